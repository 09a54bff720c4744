// floor.c - the least that the bytes of NBD need: what no client can be much better than
//
//     build/bench/floor URI --op read|write|mixed --size N --depth N --count N ...
//
// Simple replies only, and a server that is trusted: one writev for all queued requests,
// one readv into the rest of a payload and the read-ahead behind it, copy out.  nbd.h
// dials and shakes hands; then it is left alone.  bench.h says what the options are and
// what is printed.
#define _GNU_SOURCE
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include <sys/uio.h>

#include "bench.h"

#define PIECES 1024 // that one writev takes

typedef uint32_t head[7];

typedef struct request {
    unsigned char *memory;
    size_t reads; // bytes of the reply's payload
} request;

typedef struct connection {
    int fd, blocked;
    uint32_t depth;
    enum bench_send send;
    uint32_t watched;
    nbd_client client;
    nbd_sync sync; // dials and shakes hands
    bench_cursor cursor;
    request *requests;
    head *heads; // of the requests; all but type, offset and size stays
    unsigned out_count;
    struct iovec *out;
    void *head_end;  // of its last piece, if that is of heads
    size_t out_size; // of all pieces
    unsigned char *in, *in_start, *in_end;
    size_t in_room;
    uint32_t current;    // request whose payload is to come
    size_t left;         // of that payload
    uint64_t unfinished; // requests
} connection;

/// Sending ///

static void add(connection *c, void *base, size_t size)
{
    c->out[c->out_count].iov_base = base;
    c->out[c->out_count++].iov_len = size;
    c->out_size += size;
}

// Heads that follow each other are one piece.
static void add_head(connection *c, head *h)
{
    if ((void *)h == c->head_end) {
        c->out[c->out_count - 1].iov_len += sizeof *h;
        c->out_size += sizeof *h;
    } else {
        add(c, h, sizeof *h);
    }
    c->head_end = h + 1;
}

static void queue(connection *c, uint32_t index)
{
    bench_request next = bench_next(&c->cursor);
    uint32_t *h = c->heads[index];
    uint64_t offset = htobe64(next.offset);
    h[1] = htonl((uint32_t)next.write);
    memcpy(h + 4, &offset, 8);
    h[6] = htonl((uint32_t)next.size);
    add_head(c, &c->heads[index]);
    c->requests[index].reads = next.size;
    if (!next.write) return;
    c->requests[index].reads = 0;
    add(c, c->requests[index].memory, next.size);
    c->head_end = NULL;
}

// Takes `sent` bytes off the queue, of which `start` pieces are gone; returns how many are now.
static unsigned forget(connection *c, unsigned start, size_t sent)
{
    c->out_size -= sent;
    if (c->out_size == 0) return c->out_count;
    while (sent >= c->out[start].iov_len)
        sent -= c->out[start++].iov_len;
    if (sent > 0) {
        c->out[start].iov_base = (char *)c->out[start].iov_base + sent;
        c->out[start].iov_len -= sent;
    }
    return start;
}

static void flush(bench_worker *w, connection *c)
{
    unsigned start = 0;
    while (start < c->out_count) {
        struct msghdr message = {0};
        int more = c->send == BENCH_MORE && c->out_count - start > 1;
        ssize_t sent;
        message.msg_iov = c->out + start;
        message.msg_iovlen = c->send == BENCH_GATHER ? c->out_count - start : 1;
        if (message.msg_iovlen > PIECES) message.msg_iovlen = PIECES;
        sent = sendmsg(c->fd, &message, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
        w->syscalls++;
        c->blocked = sent < 0 && errno == EAGAIN;
        if (c->blocked) break;
        if (sent < 0) bench_die("send: %s", strerror(errno));
        start = forget(c, start, (size_t)sent);
    }
    c->out_count -= start;
    c->head_end = NULL;
    if (c->out_count > 0) memmove(c->out, c->out + start, c->out_count * sizeof *c->out);
}

/// Receiving ///

static void finish(connection *c)
{
    c->unfinished--;
    if (c->cursor.left > 0) queue(c, c->current);
}

static uint32_t check(const connection *c, const uint32_t *words)
{
    if (words[0] != htonl(0x67446698) || words[1] || words[3] >= c->depth)
        bench_die("request: the server's answer is an error, or no simple reply");
    return words[3];
}

// Takes a part of the current payload; returns how much.
static size_t copy(connection *c, const unsigned char *from, size_t size)
{
    const request *r = &c->requests[c->current];
    if (size > c->left) size = c->left;
    memcpy(r->memory + r->reads - c->left, from, size);
    c->left -= size;
    if (c->left == 0) finish(c);
    return size;
}

static void parse(connection *c)
{
    unsigned char *p = c->in_start, *end = c->in_end;
    uint32_t words[4];
    if (c->left > 0) p += copy(c, p, (size_t)(end - p));
    while (end - p >= 16) {
        memcpy(words, p, 16);
        p += 16;
        c->current = check(c, words);
        c->left = c->requests[c->current].reads;
        if (c->left > 0) {
            p += copy(c, p, (size_t)(end - p));
        } else {
            finish(c);
        }
    }
    c->in_start = p;
}

// Returns 0 if there is nothing more to receive now.
static int fill(bench_worker *w, connection *c)
{
    struct iovec to[2];
    size_t kept = (size_t)(c->in_end - c->in_start), got, direct = c->left;
    ssize_t result;
    memmove(c->in, c->in_start, kept);
    c->in_start = c->in;
    c->in_end = c->in + kept;
    to[0].iov_base = c->in_end;
    to[0].iov_len = c->in_room - kept;
    if (direct > 0) {
        to[1] = to[0];
        to[0].iov_base = c->requests[c->current].memory + c->requests[c->current].reads - direct;
        to[0].iov_len = direct;
    }
    result = readv(c->fd, to, direct > 0 ? 2 : 1);
    w->syscalls++;
    if (result < 0 && errno == EAGAIN) return 0;
    if (result <= 0) bench_die("receive: %s", result < 0 ? strerror(errno) : "end of stream");
    got = (size_t)result;
    if (direct > got) direct = got;
    c->left -= direct;
    c->in_end += got - direct;
    if (direct > 0 && c->left == 0) finish(c);
    return got == to[0].iov_len + (direct > 0 ? to[1].iov_len : 0);
}

/// Loops ///

// With a blocking socket: neither sending nor receiving waits for longer than it must, as
// long as requests or replies are small.
static void run_blocking(bench_worker *w, connection *c)
{
    while (c->unfinished > 0) {
        flush(w, c);
        fill(w, c);
        parse(c);
    }
}

static int serve(bench_worker *w, unsigned i, uint32_t events)
{
    connection *c = (connection *)w->state + i;
    int more = (events & ~(uint32_t)EPOLLOUT) != 0;
    if (events & EPOLLOUT) flush(w, c);
    while (more && c->unfinished > 0) {
        more = fill(w, c);
        parse(c);
        if (!c->blocked) flush(w, c);
    }
    bench_watch(w, i, c->out_count > 0 ? EPOLLIN | EPOLLOUT : EPOLLIN, &c->watched);
    return c->unfinished > 0;
}

static int is_blocking(const bench_worker *w)
{
    return w->connections == 1 && w->options->op != BENCH_MIXED;
}

static void run(bench_worker *w)
{
    connection *c = w->state;
    unsigned i, k;
    for (i = 0; i < w->connections; i++) {
        c[i].unfinished = c[i].cursor.left;
        for (k = 0; k < w->options->depth && c[i].cursor.left > 0; k++)
            queue(&c[i], k);
    }
    if (is_blocking(w)) {
        run_blocking(w, c);
    } else {
        bench_run_many(w, serve, EPOLLOUT);
    }
    for (i = 0; i < w->connections; i++)
        w->finished += w->options->count - c[i].unfinished;
}

/// Start and end ///

static void shake_hands(connection *c, const bench_options *o)
{
    nbd_slot slot;
    unsigned char buffer[NBD_BUFFER_NAMES];
    char text[4096];
    nbd_config config = NBD_ZERO;
    nbd_uri uri;
    int error;
    bench_dial(&c->sync, o->uri, &uri, text, sizeof text);
    config.flags = uri.config_flags | NBD_WITHOUT_STRUCTURED_REPLY | NBD_WITHOUT_EXTENDED_HEADERS;
    config.slots = &slot;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    c->sync.client = &c->client;
    error = nbd_init(&c->client, &config);
    if (!error) error = nbd_sync_connect(&c->sync, &c->sync.io.transport);
    if (error) bench_die("%s: %s %s", o->uri, nbd_strerror(error), c->sync.message);
}

static void open_one(connection *c, const bench_options *o, unsigned number)
{
    unsigned char *memory = bench_memory(o->depth, o->size);
    unsigned i;
    shake_hands(c, o);
    c->fd = c->sync.io.socket;
    c->send = o->send;
    c->depth = o->depth;
    c->requests = (request *)(void *)bench_memory(o->depth, sizeof *c->requests);
    c->heads = (head *)(void *)bench_memory(o->depth, sizeof *c->heads);
    memset(c->heads, 0, o->depth * sizeof *c->heads);
    for (i = 0; i < o->depth; i++) {
        c->requests[i].memory = memory + i * o->size;
        c->heads[i][0] = htonl(0x25609513);
        c->heads[i][3] = i;
    }
    c->out = (struct iovec *)(void *)bench_memory(2 * o->depth, sizeof *c->out);
    c->in = c->in_start = c->in_end = bench_memory(1, o->buffer);
    c->in_room = o->buffer;
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
        w->sockets[i] = c[i].fd;
        w->memory[i] = c[i].requests->memory;
        if (is_blocking(w) && fcntl(c[i].fd, F_SETFL, 0)) bench_die("fcntl");
    }
}

// Without a word: the server is not to be waited for.
static void close_all(bench_worker *w)
{
    connection *c = w->state;
    unsigned i;
    for (i = 0; i < w->connections; i++)
        nbd_socket_close(c[i].fd);
}

int main(int argc, char **argv)
{
    static const bench_program program = {"floor", 1, open_all, run, close_all};
    return bench_main(&program, argc, argv);
}
