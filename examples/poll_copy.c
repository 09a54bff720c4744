// poll_copy.c - copies a disk from server to server in one loop over poll(2)
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/poll_copy.c -o build/poll_copy
//     build/poll_copy [-r 1-64] [-s BYTES] SOURCE-URI TARGET-URI
#define _POSIX_C_SOURCE 200809L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define REQUESTS_MAX 64

typedef struct side {
    const char *name;
    nbd_sync sync; // dials, flushes and closes; the copy itself never blocks in it
    nbd_client client;
    nbd_slot slots[REQUESTS_MAX];
    char text[4096];
    unsigned char buffer[NBD_BUFFER_GOOD];
} side;
static side source, target;

static struct request {
    nbd_op read, write; // the end of a read starts its write, that the next read
} requests[REQUESTS_MAX];
static uint64_t size, request_size = 256 * 1024, count = 16, started, copied;

static void die(const side *s, unsigned long long offset, const char *why)
{
    fprintf(stderr, "poll_copy: %s: ", s->name);
    if (started) fprintf(stderr, "%s at offset %llu: ", s == &source ? "read" : "write", offset);
    fprintf(stderr, *s->sync.message ? "%s (server: \"%s\")\n" : "%s\n", why, s->sync.message);
    exit(1);
}

static void issue(side *s, const nbd_op *op)
{
    int error = nbd_issue(&s->client, op, NULL);
    if (error) die(s, op->offset, nbd_strerror(error));
}

static void start_read(struct request *r)
{
    uint64_t part = request_size < size - started ? request_size : size - started;
    r->read.offset = r->write.offset = started;
    r->read.size = r->write.size = part;
    started += part;
    if (part > 0) issue(&source, &r->read);
}

static void move(side *s, unsigned ready)
{
    nbd_event event;
    nbd_poll(&s->client, ready);
    while (nbd_next(&s->client, &event)) {
        if (event.type == NBD_EVENT_TEXT) // why a request fails
            nbd_escape(s->sync.message, sizeof s->sync.message, event.text, event.text_size);
        if (event.type == NBD_EVENT_CLOSED) die(s, copied, nbd_strerror(event.error));
        if (event.type != NBD_EVENT_DONE) continue;
        if (event.error) die(s, event.error_offset, nbd_strerror(event.error));
        copied += s == &target ? event.size : 0;
        if (s == &source)
            issue(&target, &((struct request *)event.user)->write);
        else
            start_read(event.user);
    }
}

static struct pollfd wait_for(const side *s)
{
    unsigned wants = nbd_wants(&s->client);
    int events = (wants & NBD_WANT_READ ? POLLIN : 0) | (wants & NBD_WANT_WRITE ? POLLOUT : 0);
    return (struct pollfd){s->sync.io.socket, (short)events, 0};
}

// An error or a hang-up counts as both: it shows in the calls that read and write.
static unsigned ready(short events)
{
    return (events & ~POLLOUT ? NBD_WANT_READ : 0) | (events & ~POLLIN ? NBD_WANT_WRITE : 0);
}

static void turn(void)
{
    struct pollfd fds[2] = {wait_for(&source), wait_for(&target)};
    unsigned now = (nbd_wants(&source.client) | nbd_wants(&target.client)) & NBD_WANT_NOW;
    poll(fds, 2, now ? 0 : -1); // if it is interrupted, nothing is ready
    move(&source, ready(fds[0].revents));
    move(&target, ready(fds[1].revents));
}

static void open_side(side *s, const char *name)
{
    nbd_uri uri;
    int error = nbd_uri_parse(&uri, name, s->text, sizeof s->text);
    nbd_config config = {.slots = s->slots, .slot_count = REQUESTS_MAX, .flags = uri.config_flags};
    s->name = name;
    config.buffer = s->buffer;
    config.buffer_size = sizeof s->buffer;
    config.export_name = uri.export_name;
    s->sync = (nbd_sync){.client = &s->client, .timeout_ms = 600000}; // for a flush
    if (!error) error = nbd_init(&s->client, &config);
    if (!error) error = nbd_sync_open(&s->sync, &uri.address);
    if (error) die(s, 0, nbd_strerror(error));
}

static void close_side(side *s)
{
    int flushes = s == &target && nbd_allows(&s->client, NBD_FLUSH, 0);
    int error = flushes ? nbd_sync_flush(&s->sync) : 0;
    if (error || (error = nbd_sync_close(&s->sync))) die(s, size, nbd_strerror(error));
}

int main(int argc, char **argv)
{
    char *end = "";
    for (int option; !*end && request_size && (option = getopt(argc, argv, "r:s:")) != -1;)
        *(option == 'r' ? &count : &request_size) = option == '?' ? 0 : strtoull(optarg, &end, 0);
    if (*end) return fprintf(stderr, "poll_copy: not a whole number: %s\n", optarg), 2;
    if (argc - optind != 2 || count - 1 >= REQUESTS_MAX || !request_size)
        return fputs("usage: poll_copy [-r 1-64] [-s BYTES] SOURCE-URI TARGET-URI\n", stderr), 2;
    open_side(&source, argv[optind]);
    open_side(&target, argv[optind + 1]);
    size = nbd_negotiated(&source.client)->size;
    if (nbd_negotiated(&target.client)->size < size) die(&target, 0, "smaller than the source");
    request_size = nbd_fit(&source.client, NBD_READ, request_size);
    request_size = nbd_fit(&target.client, NBD_WRITE, request_size);
    for (struct request *r = requests; r < requests + count; r++) {
        void *memory = malloc((size_t)request_size);
        if (!memory) die(&source, 0, "no memory");
        // NBD_NO_INIT is safe here: only a read that succeeded is written anywhere.
        r->read = (nbd_op){.command = NBD_READ, .flags = NBD_NO_INIT, .buffer = memory, .user = r};
        r->write = (nbd_op){.command = NBD_WRITE, .data = memory, .user = r};
        start_read(r);
    }
    while (copied < size)
        turn();
    close_side(&source);
    close_side(&target);
    return 0;
}
