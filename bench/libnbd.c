// libnbd.c - measures libnbd: asynchronous calls with callbacks, each finished request's
// place taken by the next at once
//
//     build/bench/libnbd URI --op read|write|mixed --size N --depth N --count N ...
//
// bench.h says what the options are and what is printed, without the system calls: they
// are libnbd's own.
#define _GNU_SOURCE
#include <libnbd.h>

#include "bench.h"

typedef struct connection connection;

typedef struct request {
    connection *connection;
    unsigned char *memory;
} request;

struct connection {
    struct nbd_handle *nbd;
    bench_cursor cursor;
    request *requests;
    request **free; // a stack
    unsigned free_count;
    unsigned in_flight;
    uint32_t watched;
};

/// Start and end ///

static void __attribute__((noreturn)) die(const char *what)
{
    const char *why = nbd_get_error();
    bench_die("%s: %s", what, why ? why : "failed");
}

static void open_one(connection *c, const bench_options *o, unsigned number)
{
    unsigned char *memory = bench_memory(o->depth, o->size);
    int64_t size;
    unsigned i;
    c->nbd = nbd_create();
    if (!c->nbd || nbd_set_pread_initialize(c->nbd, !o->no_init)) die("nbd_create");
    if (nbd_set_uri_allow_local_file(c->nbd, 1)) die("nbd_set_uri_allow_local_file");
    if (nbd_connect_uri(c->nbd, o->uri)) die(o->uri);
    size = nbd_get_size(c->nbd);
    if (size < 0) die("nbd_get_size");
    c->requests = (request *)(void *)bench_memory(o->depth, sizeof *c->requests);
    c->free = (request **)(void *)bench_memory(o->depth, sizeof(request *));
    for (i = 0; i < o->depth; i++) {
        c->requests[i].connection = c;
        c->requests[i].memory = memory + i * o->size;
        c->free[i] = &c->requests[i];
    }
    c->free_count = o->depth;
    bench_start(&c->cursor, o, number, (uint64_t)size);
}

static void open_all(bench_worker *w)
{
    connection *c = calloc(w->connections, sizeof *c);
    unsigned i;
    if (!c) bench_die("no memory");
    w->state = c;
    for (i = 0; i < w->connections; i++) {
        open_one(&c[i], w->options, w->first + i);
        w->sockets[i] = nbd_aio_get_fd(c[i].nbd);
        w->memory[i] = c[i].requests->memory;
    }
}

static void close_all(bench_worker *w)
{
    connection *c = w->state;
    unsigned i;
    for (i = 0; i < w->connections; i++) {
        if (nbd_shutdown(c[i].nbd, 0)) die("nbd_shutdown");
        nbd_close(c[i].nbd);
    }
}

/// Requests ///

// libnbd must not be called from here: the handle is locked.
static int finished(void *data, int *error)
{
    request *r = data;
    connection *c = r->connection;
    if (*error) bench_die("request: %s", strerror(*error));
    c->free[c->free_count++] = r;
    c->in_flight--;
    return 1; // libnbd forgets the request
}

static void issue(connection *c, request *r)
{
    bench_request next = bench_next(&c->cursor);
    nbd_completion_callback done = {0};
    int64_t cookie;
    done.callback = finished;
    done.user_data = r;
    c->in_flight++; // before the call: it may finish in it
    if (next.write) {
        cookie = nbd_aio_pwrite(c->nbd, r->memory, next.size, next.offset, done, 0);
    } else {
        cookie = nbd_aio_pread(c->nbd, r->memory, next.size, next.offset, done, 0);
    }
    if (cookie < 0) die(next.write ? "nbd_aio_pwrite" : "nbd_aio_pread");
}

static void issue_all(connection *c)
{
    while (c->free_count > 0 && c->cursor.left > 0)
        issue(c, c->free[--c->free_count]);
}

/// Loops ///

static void run_one(connection *c)
{
    for (issue_all(c); c->in_flight > 0; issue_all(c))
        if (nbd_poll(c->nbd, -1) < 0) die("nbd_poll");
}

static int serve(bench_worker *w, unsigned i, uint32_t ready)
{
    connection *c = (connection *)w->state + i;
    uint32_t events = 0;
    unsigned direction;
    if (ready & ~(uint32_t)EPOLLOUT) {
        if (nbd_aio_notify_read(c->nbd)) die("nbd_aio_notify_read");
    } else if (ready) {
        if (nbd_aio_notify_write(c->nbd)) die("nbd_aio_notify_write");
    }
    issue_all(c);
    direction = nbd_aio_get_direction(c->nbd);
    if (direction & LIBNBD_AIO_DIRECTION_READ) events |= EPOLLIN;
    if (direction & LIBNBD_AIO_DIRECTION_WRITE) events |= EPOLLOUT;
    bench_watch(w, i, events, &c->watched);
    return c->in_flight > 0;
}

static void run(bench_worker *w)
{
    connection *c = w->state;
    unsigned i;
    if (w->connections == 1) {
        run_one(c);
    } else {
        bench_run_many(w, serve, 0);
    }
    for (i = 0; i < w->connections; i++)
        w->finished += w->options->count - c[i].cursor.left - c[i].in_flight;
    w->syscalls = 0;
}

int main(int argc, char **argv)
{
    static const bench_program program = {"libnbd", 0, open_all, run, close_all};
    return bench_main(&program, argc, argv);
}
