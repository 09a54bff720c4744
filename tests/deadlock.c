// Four reads of 1 MiB and a write of 8 MiB at once, over a socket with buffers of 4 KiB, to a
// real server: a client that sends before it reads comes to a stop with some of them.
//
//   deadlock URI    the export has 16 MiB at least

#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "deadlock.h"

static const char *uri_text;
static unsigned char sent[8 * MIB], back[8 * MIB];

static void turns_until(const unsigned *counter, unsigned value)
{
    while (*counter < value)
        near_turn(NULL);
}

static void fill(void)
{
    size_t i;

    for (i = 0; i < sizeof sent; i++)
        sent[i] = (unsigned char)check_random(256);
}

static void four_reads_and_a_long_write(void)
{
    char text[1024];
    nbd_uri uri;
    nbd_sync dialled = NBD_ZERO;
    unsigned i;

    fill();
    CHECK_EQUAL(nbd_uri_parse(&uri, uri_text, text, sizeof text), 0);
    dialled.timeout_ms = PATIENCE_MS;
    CHECK_EQUAL(nbd_sync_dial(&dialled, &uri.address), 0);
    shrink_buffer(dialled.io.socket, SO_SNDBUF);
    // A window of TCP this small makes the server wait for delayed acknowledgements.
    if (uri.address.kind == NBD_ADDRESS_UNIX) shrink_buffer(dialled.io.socket, SO_RCVBUF);
    near_begin(dialled.io.socket, NBD_BUFFER_NAMES, 0, uri.export_name);
    turns_until(&near.ready, 1);
    for (i = 0; i < 4; i++)
        near_issue(NBD_READ, MIB, (uint64_t)i * MIB, back + (size_t)i * MIB);
    near_issue(NBD_WRITE, sizeof sent, sizeof sent, sent);
    turns_until(&near.done, 5);
    near_issue(NBD_READ, sizeof back, sizeof sent, back);
    CHECK_EQUAL(nbd_disconnect(&near.client), 0);
    turns_until(&near.closed, 1);
    CHECK_EQUAL(near.done, 6);
    CHECK_BYTES(back, sent, sizeof back);
    near_was_frugal();
    nbd_sync_close(&dialled);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "error: usage: deadlock URI\n");
        return 2;
    }
    uri_text = argv[1];
    check_begin(1, argv);
    CHECK_CASE(four_reads_and_a_long_write);
    return check_end();
}
