// threads.c - copies a disk from server to server in threads, and verifies what it wrote
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/threads.c -pthread -o build/threads
//     build/threads [-t 1-16] [-r 1-64] [-s BYTES] SOURCE TARGET
#define _POSIX_C_SOURCE 200809L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define THREADS_MAX 16
#define REQUESTS_MAX 64

static struct worker { // only its own thread uses it
    pthread_t thread;
    struct side {
        const char *name;
        nbd_sync sync; // dials, flushes and closes; the copy itself never blocks in it
        nbd_client client;
        nbd_slot slots[REQUESTS_MAX];
        char text[4096];
        unsigned char buffer[NBD_BUFFER_GOOD];
    } source, target;
    struct request {
        nbd_op read, write, check; // in this order; the last reads back what was written
    } requests[REQUESTS_MAX];
} workers[THREADS_MAX];
static uint64_t size, part_size = 256 * 1024, threads = 4, count = 16, taken;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; // of `taken`, where the rest begins

static void die(const struct side *s, const char *what, unsigned long long offset, const char *why)
{
    pthread_mutex_lock(&mutex); // one thread ends the program, any other waits here for that
    fprintf(stderr, "threads: %s: ", s->name);
    if (taken) fprintf(stderr, "%s at offset %llu: ", what, offset);
    fprintf(stderr, *s->sync.message ? "%s (server: \"%s\")\n" : "%s\n", why, s->sync.message);
    exit(1);
}

static void issue(struct side *s, const nbd_op *op, const char *what)
{
    int error = nbd_issue(&s->client, op, NULL);
    if (error) die(s, what, op->offset, nbd_strerror(error));
}

static void start(struct worker *w, struct request *r)
{
    pthread_mutex_lock(&mutex);
    uint64_t part = part_size < size - taken ? part_size : size - taken;
    r->read.offset = r->write.offset = r->check.offset = taken;
    r->read.size = r->write.size = r->check.size = part;
    taken += part;
    pthread_mutex_unlock(&mutex);
    if (part > 0) issue(&w->source, &r->read, "read");
}

static void move(struct worker *w, struct side *s, short seen)
{
    nbd_event event;
    nbd_poll(&s->client, seen ? NBD_WANT_READ | NBD_WANT_WRITE : 0);
    while (nbd_next(&s->client, &event)) {
        struct request *r = event.user;
        int wrote = event.command == NBD_WRITE;
        if (event.type == NBD_EVENT_TEXT) // why a request fails
            nbd_escape(s->sync.message, sizeof s->sync.message, event.text, event.text_size);
        else if (event.error)
            die(s, wrote ? "write" : "read", event.error_offset, nbd_strerror(event.error));
        else if (s == &w->source)
            issue(&w->target, &r->write, "write");
        else if (wrote)
            issue(&w->target, &r->check, "read");
        else if (memcmp(r->read.buffer, r->check.buffer, (size_t)event.size) != 0)
            die(s, "verify", event.offset, "not what was written");
        else
            start(w, r);
    }
}

static void *run(void *worker)
{
    struct worker *w = worker;
    nbd_client *from = &w->source.client, *to = &w->target.client;
    struct pollfd fds[2] = {{w->source.sync.io.socket, 0, 0}, {w->target.sync.io.socket, 0, 0}};
    for (struct request *r = w->requests; r < w->requests + count; r++) {
        unsigned char *memory = malloc((size_t)part_size * 2);
        if (!memory) die(&w->source, "start", 0, "no memory");
        // NBD_NO_INIT is safe here: only reads that succeeded are written or compared.
        r->read = (nbd_op){.command = NBD_READ, .flags = NBD_NO_INIT, .buffer = memory, .user = r};
        r->write = (nbd_op){.command = NBD_WRITE, .data = memory, .user = r};
        r->check = r->read;
        r->check.buffer = memory + part_size;
        start(w, r);
    }
    while (nbd_count(from)->in_flight || nbd_count(to)->in_flight) {
        fds[0].events = nbd_wants(from) & NBD_WANT_WRITE ? POLLIN | POLLOUT : POLLIN;
        fds[1].events = nbd_wants(to) & NBD_WANT_WRITE ? POLLIN | POLLOUT : POLLIN;
        poll(fds, 2, (nbd_wants(from) | nbd_wants(to)) & NBD_WANT_NOW ? 0 : -1);
        move(w, &w->source, fds[0].revents);
        move(w, &w->target, fds[1].revents);
    }
    int error = nbd_allows(to, NBD_FLUSH, 0) ? nbd_sync_flush(&w->target.sync) : 0;
    if (!error) error = nbd_sync_close(&w->target.sync);
    if (error) die(&w->target, "end", size, nbd_strerror(error));
    error = nbd_sync_close(&w->source.sync);
    if (error) die(&w->source, "end", size, nbd_strerror(error));
    return NULL;
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
    s->sync = (nbd_sync){.client = &s->client, .timeout_ms = 600000}; // for a flush
    if (!error) error = nbd_init(&s->client, &config);
    if (!error) error = nbd_sync_open(&s->sync, &uri.address);
    if (error) die(s, "open", 0, nbd_strerror(error));
}

int main(int argc, char **argv)
{
    char *end = "";
    for (int option; !*end && part_size && (option = getopt(argc, argv, "t:r:s:")) != -1;)
        *(option == 't'   ? &threads
          : option == 'r' ? &count
                          : &part_size) = option == '?' ? 0 : strtoull(optarg, &end, 0);
    if (*end) return fprintf(stderr, "threads: not a whole number: %s\n", optarg), 2;
    if (argc - optind != 2 || threads - 1 >= THREADS_MAX || count - 1 >= REQUESTS_MAX || !part_size)
        return fputs("usage: threads [-t 1-16] [-r 1-64] [-s BYTES] SOURCE TARGET\n", stderr), 2;
    for (struct worker *w = workers; w < workers + threads; w++) {
        const nbd_export *from = nbd_negotiated(&w->source.client);
        const nbd_export *to = nbd_negotiated(&w->target.client);
        open_side(&w->source, argv[optind]);
        open_side(&w->target, argv[optind + 1]);
        if (to->size < (size = from->size)) die(&w->target, "open", 0, "smaller than the source");
        part_size = nbd_fit(&w->source.client, NBD_READ, part_size);
        part_size = nbd_fit(&w->target.client, NBD_WRITE, part_size);
        if (!(from->flags & to->flags & NBD_OFFERS_MULTI_CONN)) threads = 1;
    }
    for (struct worker *w = workers; w < workers + threads; w++)
        if (pthread_create(&w->thread, NULL, run, w)) die(&w->source, "start", 0, "no thread");
    for (struct worker *w = workers; w < workers + threads; w++)
        pthread_join(w->thread, NULL);
    return 0;
}
