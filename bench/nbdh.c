// nbdh.c - measures nbd.h: only its public calls, in the loop that the README shows
//
//     build/bench/nbdh URI --op read|write|mixed --size N --depth N --count N ...
//
// bench.h says what the options are and what is printed.
#define _GNU_SOURCE
#define NBD_STATIC // as in any tool of one file: implies NBD_IMPLEMENTATION
#ifdef BENCH_SEAL
#define NBD_STAGE 16384 // a record of TLS, for a transport that takes one piece
#else
#define NBD_STAGE 28 // with --send plain and more a header is not joined with its payload
#endif
#include "nbd.h"

#include "bench.h"
#ifdef BENCH_SEAL
#include "seal.h"
#endif

typedef struct connection {
    nbd_client client;
    nbd_sync sync; // dials, shakes hands and ends; requests never go through it
    bench_cursor cursor;
    unsigned char *memory;
    uint64_t in_flight;
    uint32_t read_flags, watched;
} connection;

/// Start and end ///

static int no_flag(nbd_socket_io *io, unsigned flags)
{
    (void)io;
    (void)flags;
    return 0;
}

static void prepare(connection *c, const bench_options *o, const char *export_name, uint32_t flags)
{
    nbd_config config = NBD_ZERO;
    int error;
    config.slots = (nbd_slot *)(void *)bench_memory(o->depth, sizeof(nbd_slot));
    config.slot_count = o->depth;
    config.buffer = bench_memory(1, o->buffer);
    config.buffer_size = o->buffer;
    config.export_name = export_name;
    config.flags = flags;
    error = nbd_init(&c->client, &config);
    if (error) bench_die("nbd_init: %s", nbd_strerror(error));
}

static void open_one(connection *c, const bench_options *o, unsigned number)
{
    char text[4096];
    nbd_uri uri;
    int error;
    c->sync.client = &c->client;
    bench_dial(&c->sync, o->uri, &uri, text, sizeof text);
    prepare(c, o, uri.export_name, uri.config_flags);
    if (o->send != BENCH_GATHER) c->sync.io.transport.flags |= NBD_ONE_PIECE;
    if (o->send == BENCH_PLAIN) c->sync.io.send_flags = no_flag;
#ifdef BENCH_SEAL
    c->sync.tls = bench_seal(&uri, &c->sync.io);
#endif
    error = nbd_sync_connect(&c->sync, &c->sync.io.transport);
    if (error) bench_die("%s: %s %s", o->uri, nbd_strerror(error), c->sync.message);
    c->read_flags = o->no_init ? NBD_NO_INIT : 0; // a failed read ends the program
    c->memory = bench_memory(o->depth, o->size);
    bench_start(&c->cursor, o, number, nbd_negotiated(&c->client)->size);
}

static void open_all(bench_worker *w)
{
    connection *c = calloc(w->connections, sizeof *c);
    unsigned i;
    if (!c) bench_die("no memory");
    w->state = c;
    for (i = 0; i < w->connections; i++) {
        open_one(&c[i], w->options, w->first + i);
        w->sockets[i] = c[i].sync.io.socket;
        w->memory[i] = c[i].memory;
    }
}

static void close_all(bench_worker *w)
{
    connection *c = w->state;
    unsigned i;
    for (i = 0; i < w->connections; i++) {
        int error = nbd_sync_close(&c[i].sync);
        if (error) bench_die("end: %s", nbd_strerror(error));
    }
}

/// Requests ///

static void issue(connection *c, void *memory)
{
    bench_request next = bench_next(&c->cursor);
    nbd_op op = NBD_ZERO;
    int error;
    op.command = next.write ? NBD_WRITE : NBD_READ;
    op.offset = next.offset;
    op.size = next.size;
    op.user = memory;
    if (next.write) {
        op.data = memory;
    } else {
        op.buffer = memory;
        op.flags = c->read_flags;
    }
    error = nbd_issue(&c->client, &op, NULL);
    if (error) bench_die("nbd_issue: %s", nbd_strerror(error));
    c->in_flight++;
}

static void issue_first(connection *c, const bench_options *o)
{
    unsigned i;
    for (i = 0; i < o->depth && c->cursor.left > 0; i++)
        issue(c, c->memory + i * o->size);
}

static void handle(connection *c, const nbd_event *event)
{
    if (event->error || event->type != NBD_EVENT_DONE)
        bench_die("request: %s %s", nbd_strerror(event->error), event->detail ? event->detail : "");
    c->in_flight--;
    if (c->cursor.left > 0) issue(c, event->user);
}

static void move(connection *c, unsigned ready)
{
    nbd_event event;
    nbd_poll(&c->client, ready);
    while (nbd_next(&c->client, &event))
        handle(c, &event);
}

/// Loops ///

static void run_one(bench_worker *w, connection *c)
{
    unsigned wants, ready = 0;
    while (c->in_flight > 0) {
        struct pollfd fd = {0, 0, 0};
        fd.fd = c->sync.io.socket;
        wants = nbd_wants(&c->client);
        if (wants & NBD_WANT_READ) fd.events |= POLLIN;
        if (wants & NBD_WANT_WRITE) fd.events |= POLLOUT;
        if (!(wants & NBD_WANT_NOW)) {
            if (poll(&fd, 1, -1) > 0) {
                if (fd.revents & ~POLLOUT) ready |= NBD_WANT_READ;
                if (fd.revents & ~POLLIN) ready |= NBD_WANT_WRITE;
            }
            w->syscalls++;
        }
        move(c, ready);
        ready = 0;
    }
}

static int serve(bench_worker *w, unsigned i, uint32_t came)
{
    connection *c = (connection *)w->state + i;
    unsigned wants, ready = 0;
    uint32_t events = 0;
    if (came & ~(uint32_t)EPOLLOUT) ready |= NBD_WANT_READ;
    if (came & ~(uint32_t)EPOLLIN) ready |= NBD_WANT_WRITE;
    do {
        move(c, ready);
        ready = 0;
        wants = nbd_wants(&c->client);
    } while (c->in_flight > 0 && (wants & NBD_WANT_NOW));
    if (wants & NBD_WANT_READ) events |= EPOLLIN;
    if (wants & NBD_WANT_WRITE) events |= EPOLLOUT;
    bench_watch(w, i, events, &c->watched);
    return c->in_flight > 0;
}

static void run(bench_worker *w)
{
    connection *c = w->state;
    unsigned i;
    for (i = 0; i < w->connections; i++) {
        const nbd_counters *counters = nbd_count(&c[i].client);
        w->syscalls -= counters->sends + counters->receives;
        issue_first(&c[i], w->options);
    }
    if (w->connections == 1) {
        run_one(w, c);
    } else {
        bench_run_many(w, serve, 0);
    }
    for (i = 0; i < w->connections; i++) {
        const nbd_counters *counters = nbd_count(&c[i].client);
        w->syscalls += counters->sends + counters->receives;
        w->finished += w->options->count - c[i].cursor.left - c[i].in_flight;
    }
}

int main(int argc, char **argv)
{
    static const bench_program program = {"nbdh", 1, open_all, run, close_all};
    return bench_main(&program, argc, argv);
}
