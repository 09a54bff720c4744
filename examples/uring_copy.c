// uring_copy.c - copies a disk from server to server; io_uring(7) moves the bytes
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/uring_copy.c -luring -o build/uring_copy
//     build/uring_copy [-r 1-64] [-s BYTES] SOURCE-URI TARGET-URI
#define _GNU_SOURCE
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>

#define REQUESTS_MAX 64

static struct side {
    const char *name;
    nbd_sync sync; // dials and shakes hands; the copy is not made by it
    nbd_client client;
    nbd_slot slots[REQUESTS_MAX];
    char text[4096];
    unsigned char buffer[NBD_BUFFER_GOOD];
} sides[2], *const source = &sides[0], *const target = &sides[1];
static int busy[4]; // source in and out, target in and out: what is on offer stays put
static struct io_uring ring;
static uint64_t size, request_size = 256 * 1024, count = 16, started, copied;

static void check(const struct side *s, unsigned long long offset, int error)
{
    if (!error) return;
    fprintf(stderr, "uring_copy: %s: ", s->name);
    if (started > 0) fprintf(stderr, "%s at offset %llu: ", s == source ? "read" : "write", offset);
    fprintf(stderr, *s->sync.message ? "%s (server: \"%s\")\n" : "%s\n", nbd_strerror(error),
            s->sync.message);
    exit(1);
}

static void issue(struct side *s, uint32_t command, uint64_t offset, uint64_t part, void *user)
{
    nbd_op op = {.command = command, .offset = offset, .size = part, .user = user};
    // NBD_NO_INIT is safe here: only a read that succeeded is written anywhere.
    op.flags = command == NBD_READ ? NBD_NO_INIT : 0;
    op.buffer = command == NBD_READ ? user : NULL;
    op.data = command == NBD_WRITE ? user : NULL;
    check(s, offset, nbd_issue(&s->client, &op, NULL));
}

static void start_read(void *user)
{
    uint64_t part = request_size < size - started ? request_size : size - started;
    started += part;
    if (part > 0) issue(source, NBD_READ, started - part, part, user);
}

static void handle(struct side *s)
{
    nbd_event e;
    while (nbd_next(&s->client, &e)) {
        if (e.type == NBD_EVENT_TEXT) // why a request fails
            nbd_escape(s->sync.message, sizeof s->sync.message, e.text, e.text_size);
        if (e.type == NBD_EVENT_TEXT) continue;
        check(s, e.user ? e.error_offset : copied, e.error);
        // The end of a read starts its write, that the next read.
        if (e.command == NBD_READ) issue(target, NBD_WRITE, e.offset, e.size, e.user);
        if (e.command == NBD_WRITE) copied += e.size, start_read(e.user);
    }
    // A session that failed wants nothing, and tells why once it has back what is on offer.
    if (!nbd_wants(&s->client)) (void)shutdown(s->sync.io.socket, SHUT_RDWR); // cancels it
}

static void offer(int way)
{
    nbd_client *c = &sides[way / 2].client;
    int fd = sides[way / 2].sync.io.socket;
    struct io_uring_sqe *entry;
    nbd_iovec piece;
    unsigned more = 0, n = way % 2 ? nbd_outgoing(c, &piece, 1, &more) : nbd_incoming(c, &piece, 1);
    if (n == 0 && way % 2 && nbd_phase(c) == NBD_PHASE_CLOSING && !nbd_count(c)->in_flight)
        (void)shutdown(fd, SHUT_WR); // some servers wait for the end of the stream
    if (n == 0) return;
    entry = io_uring_get_sqe(&ring); // never NULL: there are four
    if (way % 2)
        io_uring_prep_send(entry, fd, piece.base, piece.size, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    else
        io_uring_prep_recv(entry, fd, piece.base, piece.size, 0);
    io_uring_sqe_set_data(entry, &busy[way]);
    busy[way] = 1;
}

static void turn(void)
{
    struct io_uring_cqe *entry;
    for (int way = 0; way < 4; way++)
        if (!busy[way]) offer(way);
    int result = io_uring_submit_and_wait(&ring, 1);
    check(source, copied, result < 0 && result != -EINTR ? NBD_ERR_TRANSPORT : 0);
    for (; !io_uring_peek_cqe(&ring, &entry); io_uring_cqe_seen(&ring, entry)) {
        int *done = io_uring_cqe_get_data(entry), way = (int)(done - busy);
        nbd_client *c = &sides[way / 2].client;
        ptrdiff_t moved = entry->res < 0 ? NBD_IO_ERROR : entry->res;
        check(&sides[way / 2], copied, way % 2 ? nbd_sent(c, moved) : nbd_received(c, moved));
        *done = 0;
    }
    handle(target);
    handle(source);
}

static void open_side(struct side *s, const char *name)
{
    nbd_uri uri;
    int error = nbd_uri_parse(&uri, name, s->text, sizeof s->text);
    nbd_config config = {.slots = s->slots, .slot_count = REQUESTS_MAX, .buffer = s->buffer};
    config.buffer_size = sizeof s->buffer;
    config.export_name = uri.export_name;
    config.flags = uri.config_flags;
    s->name = name;
    s->sync = (nbd_sync){.client = &s->client, .timeout_ms = 60000};
    if (!error) error = nbd_init(&s->client, &config);
    if (!error) error = nbd_sync_open(&s->sync, &uri.address);
    if (!error && fcntl(s->sync.io.socket, F_SETFL, 0)) error = NBD_ERR_SOCKET; // io_uring waits
    check(s, 0, error);
}

int main(int argc, char **argv)
{
    static unsigned char *memory; // one block, for all requests
    char *end = "";
    for (int option; !*end && request_size && (option = getopt(argc, argv, "r:s:")) != -1;)
        *(option == 'r' ? &count : &request_size) = option == '?' ? 0 : strtoull(optarg, &end, 0);
    if (*end) return fprintf(stderr, "uring_copy: not a whole number: %s\n", optarg), 2;
    if (argc - optind != 2 || count - 1 >= REQUESTS_MAX || !request_size)
        return fputs("usage: uring_copy [-r 1-64] [-s BYTES] SOURCE-URI TARGET-URI\n", stderr), 2;
    if (io_uring_queue_init(4, &ring, 0)) return fputs("uring_copy: no io_uring here\n", stderr), 1;
    open_side(source, argv[optind]);
    open_side(target, argv[optind + 1]);
    size = nbd_negotiated(&source->client)->size;
    if (nbd_negotiated(&target->client)->size < size)
        return fprintf(stderr, "uring_copy: %s: smaller than the source\n", target->name), 1;
    request_size = nbd_fit(&source->client, NBD_READ, request_size);
    request_size = nbd_fit(&target->client, NBD_WRITE, request_size);
    if (!(memory = calloc((size_t)count, (size_t)request_size))) return perror("uring_copy"), 1;
    for (size_t i = 0; i < count; i++)
        start_read(memory + i * request_size);
    while (copied < size)
        turn();
    if (nbd_allows(&target->client, NBD_FLUSH, 0)) issue(target, NBD_FLUSH, 0, 0, NULL);
    check(source, size, nbd_disconnect(&source->client));
    check(target, size, nbd_disconnect(&target->client));
    while (nbd_phase(&source->client) || nbd_phase(&target->client)) // 0: idle, over
        turn();
    return 0;
}
