// fastserver.c - an NBD server that costs so little that its client is what is measured
//
//     build/bench/fastserver --unix PATH | --tcp PORT [--size N]
//         [--replies simple|structured|extended]
//
// One thread, epoll.  Reads are answered from memory, in which each 8 bytes hold their
// own offset, big-endian; writes are received and dropped.  All requests that are there
// are answered by one writev.  --replies is the most that a client gets.  TCP is
// on 127.0.0.1.  Prints `listening` when it does, with the port if PORT is 0, and ends
// on SIGTERM.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "bench.h"

#define REPLIES 512 // answered by one writev
#define EVENTS 256
#define ROUNDS 8 // receives before the answers are sent

enum { GREETING, OPTIONS, TRANSMISSION };
enum { SIMPLE, STRUCTURED, EXTENDED };
enum { READ = 0, WRITE = 1, DISC = 2, FLUSH = 3 };
enum { EXPORT_NAME = 1, ABORT = 2, INFO = 6, GO = 7, STRUCTURED_REPLY = 8, EXTENDED_HEADERS = 11 };

// What a connection needs while bytes of it wait here.  Between requests it has none, so
// that ten thousand connections share a few.
typedef struct work {
    struct work *next; // in the list of free ones
    size_t in_start, in_end;
    int out_start, out_end; // of `out`
    int heads;
    struct iovec out[2 * REPLIES];
    unsigned char head[REPLIES][40];
    unsigned char in[32768];
} work;

typedef struct connection {
    int fd;
    uint32_t waits; // what epoll was told
    uint8_t stage, replies, no_zeroes, over;
    uint64_t skip;           // bytes of a write still to come
    unsigned char write[32]; // the head of that write
    uint32_t write_error;
    work *work;
} connection;

static unsigned char *memory; // the export
static uint64_t export_size = 16 << 20;
static int offered = SIMPLE;
static int poller;
static work *free_work;
static volatile sig_atomic_t ended;
static unsigned char sink[262144]; // where writes go
static unsigned char zeroes[124];

/// Wire ///

static void put16(unsigned char *p, unsigned value)
{
    p[0] = (unsigned char)(value >> 8);
    p[1] = (unsigned char)value;
}

static void put32(unsigned char *p, uint32_t value)
{
    value = htobe32(value);
    memcpy(p, &value, 4);
}

static void put64(unsigned char *p, uint64_t value)
{
    value = htobe64(value);
    memcpy(p, &value, 8);
}

static uint32_t get32(const unsigned char *p)
{
    uint32_t value;
    memcpy(&value, p, 4);
    return be32toh(value);
}

static uint64_t get64(const unsigned char *p)
{
    uint64_t value;
    memcpy(&value, p, 8);
    return be64toh(value);
}

static void add(work *w, void *base, size_t size)
{
    w->out[w->out_end].iov_base = base;
    w->out[w->out_end++].iov_len = size;
}

// The next head, of `size` bytes, at most 40.
static unsigned char *add_head(work *w, size_t size)
{
    unsigned char *head = w->head[w->heads++];
    add(w, head, size);
    return head;
}

/// Handshake ///

static unsigned char *option_reply(work *w, uint32_t option, uint32_t type, uint32_t size)
{
    unsigned char *head = add_head(w, 20 + size);
    put64(head, 0x3e889045565a9u);
    put32(head + 8, option);
    put32(head + 12, type);
    put32(head + 16, size);
    return head + 20;
}

static void put_export(unsigned char *p)
{
    put64(p, export_size);
    put16(p + 8, 0x1 | 0x4 | 0x100); // flags are here; FLUSH; more than one connection
}

static void answer_option(connection *c, work *w, uint32_t option)
{
    unsigned char *data;
    uint32_t type = 1; // ACK
    if (option == INFO || option == GO) {
        data = option_reply(w, option, 3, 12);
        put16(data, 0);
        put_export(data + 2);
        if (option == GO) c->stage = TRANSMISSION;
    } else if (option == STRUCTURED_REPLY && offered >= STRUCTURED) {
        if (c->replies < STRUCTURED) c->replies = STRUCTURED;
    } else if (option == EXTENDED_HEADERS && offered >= EXTENDED) {
        c->replies = EXTENDED;
    } else if (option == ABORT) {
        c->over = 1;
    } else {
        type = 0x80000001u; // ERR_UNSUP
    }
    option_reply(w, option, type, 0);
}

static void enter_old_way(connection *c, work *w)
{
    put_export(add_head(w, 10));
    if (!c->no_zeroes) add(w, zeroes, sizeof zeroes);
    c->stage = TRANSMISSION;
}

// Takes one message of the handshake; returns its size, 0 if it is not all there.
static size_t shake_hands(connection *c, work *w, const unsigned char *in, size_t size)
{
    size_t length;
    if (c->stage == GREETING) {
        if (size < 4) return 0;
        c->no_zeroes = (in[3] & 2) != 0;
        c->stage = OPTIONS;
        return 4;
    }
    if (size < 16) return 0;
    length = get32(in + 12);
    if (get64(in) != 0x49484156454f5054u || length > sizeof w->in - 16) {
        c->over = 1;
        return size;
    }
    if (size - 16 < length) return 0;
    if (get32(in + 8) == EXPORT_NAME) {
        enter_old_way(c, w);
    } else {
        answer_option(c, w, get32(in + 8));
    }
    return 16 + length;
}

/// Transmission ///

// One structured or extended chunk, the last of its reply, with `size` bytes behind it.
// Returns where its own `fixed` bytes, a part of the size, are to be put.
static unsigned char *add_chunk(const connection *c, work *w, const unsigned char *request,
                                unsigned type, size_t fixed, uint64_t size)
{
    int extended = c->replies == EXTENDED;
    size_t length = extended ? 32 : 20;
    unsigned char *head = add_head(w, length + fixed);
    put32(head, extended ? 0x6e8a278c : 0x668e33ef);
    put16(head + 4, 1); // DONE
    put16(head + 6, type);
    memcpy(head + 8, request + 8, 8); // cookie
    if (extended) memcpy(head + 16, request + 16, 8);
    if (extended) put64(head + 24, size);
    if (!extended) put32(head + 16, (uint32_t)size);
    return head + length;
}

// What is no read, and all that fails.
static void answer(const connection *c, work *w, const unsigned char *request, unsigned type,
                   uint32_t error)
{
    unsigned char *p;
    if (c->replies == SIMPLE || (c->replies == STRUCTURED && type != READ)) {
        p = add_head(w, 16);
        put32(p, 0x67446698);
        put32(p + 4, error);
        memcpy(p + 8, request + 8, 8);
    } else if (error == 0) {
        add_chunk(c, w, request, 0, 0, 0);
    } else {
        p = add_chunk(c, w, request, 32769, 6, 6);
        put32(p, error);
        put16(p + 4, 0);
    }
}

static void answer_read(const connection *c, work *w, const unsigned char *request, uint64_t offset,
                        uint64_t size)
{
    if (c->replies == SIMPLE) {
        answer(c, w, request, READ, 0);
    } else {
        put64(add_chunk(c, w, request, 1, 8, 8 + size), offset);
    }
    add(w, memory + offset, (size_t)size);
}

// A write is answered when all of it is here: libnbd gives up a server that does it before.
static void skip(connection *c, work *w, size_t size)
{
    c->skip -= size;
    if (size > 0 && c->skip == 0) answer(c, w, c->write, WRITE, c->write_error);
}

// Takes one request; returns the size of its head, 0 if it is not all there.
static size_t take_request(connection *c, work *w, const unsigned char *in, size_t size)
{
    size_t head = c->replies == EXTENDED ? 32 : 28;
    unsigned type;
    uint64_t offset, length;
    uint32_t error = 0;
    if (size < head) return 0;
    type = in[7];
    offset = get64(in + 16);
    length = c->replies == EXTENDED ? get64(in + 24) : get32(in + 24);
    if (get32(in) != (c->replies == EXTENDED ? 0x21e41c71 : 0x25609513) || type == DISC) {
        c->over = 1;
        return size;
    }
    if (type > WRITE) {
        error = type == FLUSH ? 0 : 22;
    } else if (offset > export_size || length > export_size - offset) {
        error = 22;
    }
    if (type == WRITE && length > 0) {
        c->skip = length;
        c->write_error = error;
        memcpy(c->write, in, head);
    } else if (type == READ && error == 0) {
        answer_read(c, w, in, offset, length);
    } else {
        answer(c, w, in, type, error);
    }
    return head;
}

static int has_room(const work *w)
{
    return w->heads + 2 <= REPLIES;
}

// Takes what came in until it needs more, or the answers are as many as one call sends.
static void take(connection *c, work *w)
{
    while (!c->over && has_room(w)) {
        size_t size = w->in_end - w->in_start, used;
        if (c->skip > 0) {
            used = c->skip < size ? (size_t)c->skip : size;
            skip(c, w, used);
        } else if (c->stage == TRANSMISSION) {
            used = take_request(c, w, w->in + w->in_start, size);
        } else {
            used = shake_hands(c, w, w->in + w->in_start, size);
        }
        if (used == 0) break;
        w->in_start += used;
    }
}

/// Connections ///

static void end(connection *c)
{
    close(c->fd);
    if (c->work) {
        c->work->next = free_work;
        free_work = c->work;
    }
    free(c);
}

static work *get_work(connection *c)
{
    work *w = c->work;
    if (w) return w;
    w = free_work;
    if (w) {
        free_work = w->next;
    } else {
        w = malloc(sizeof *w);
    }
    if (!w) return NULL;
    w->in_start = w->in_end = 0;
    w->out_start = w->out_end = w->heads = 0;
    return c->work = w;
}

static void put_work(connection *c)
{
    work *w = c->work;
    if (w->in_start < w->in_end || w->out_start < w->out_end) return;
    w->next = free_work;
    free_work = w;
    c->work = NULL;
}

// Returns 1 if all is sent, 0 if the socket is full, -1 at an error.
static int send_out(connection *c, work *w)
{
    while (w->out_start < w->out_end) {
        struct msghdr message = {0};
        ssize_t sent;
        message.msg_iov = w->out + w->out_start;
        message.msg_iovlen = (size_t)(w->out_end - w->out_start);
        sent = sendmsg(c->fd, &message, MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
        while (w->out_start < w->out_end && (size_t)sent >= w->out[w->out_start].iov_len)
            sent -= (ssize_t)w->out[w->out_start++].iov_len;
        if (sent > 0) {
            struct iovec *rest = &w->out[w->out_start];
            rest->iov_base = (char *)rest->iov_base + sent;
            rest->iov_len -= (size_t)sent;
        }
    }
    w->out_start = w->out_end = w->heads = 0;
    return 1;
}

// Returns 1 if there may be more to receive, 0 if not, -1 at the end or an error.
static int receive(connection *c, work *w)
{
    size_t skipped = c->skip < sizeof sink ? (size_t)c->skip : sizeof sink, asked;
    struct iovec to[2];
    ssize_t got;
    memmove(w->in, w->in + w->in_start, w->in_end - w->in_start);
    w->in_end -= w->in_start;
    w->in_start = 0;
    to[0].iov_base = sink;
    to[0].iov_len = skipped;
    to[1].iov_base = w->in + w->in_end;
    to[1].iov_len = skipped < c->skip ? 0 : sizeof w->in - w->in_end;
    asked = to[0].iov_len + to[1].iov_len;
    got = readv(c->fd, to, 2);
    if (got < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
    if (got == 0) return -1;
    if ((size_t)got < skipped) skipped = (size_t)got;
    skip(c, w, skipped);
    w->in_end += (size_t)got - skipped;
    return (size_t)got == asked;
}

static int wait_for(connection *c, uint32_t events)
{
    struct epoll_event event = {0};
    if (c->waits == events) return 0;
    event.events = events;
    event.data.ptr = c;
    if (epoll_ctl(poller, c->waits ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, c->fd, &event)) return -1;
    c->waits = events;
    return 0;
}

// Returns 1 if all that came in is answered, 0 if the socket is full, -1 at the end.
static int answer_all(connection *c, work *w)
{
    int sent;
    do {
        take(c, w);
        if (w->out_end == 0) return c->over ? -1 : 1;
        sent = send_out(c, w);
    } while (sent > 0);
    return sent;
}

// Receives what is there, as far as one call can answer it; -1 at the end.
static int gather(connection *c, work *w)
{
    int rounds, more = 1;
    for (rounds = 0; rounds < ROUNDS && more > 0 && has_room(w); rounds++) {
        more = receive(c, w);
        take(c, w);
    }
    return more;
}

// Returns -1 when the connection is over.
static int serve(connection *c)
{
    work *w = get_work(c);
    int answered;
    if (!w) return -1;
    answered = answer_all(c, w);
    if (answered > 0) answered = gather(c, w) < 0 ? -1 : answer_all(c, w);
    if (answered < 0 || wait_for(c, answered ? EPOLLIN : EPOLLOUT)) return -1;
    put_work(c);
    return 0;
}

static void welcome(int fd)
{
    static const unsigned char greeting[] = "NBDMAGICIHAVEOPT\0\3";
    connection *c = calloc(1, sizeof *c);
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); // fails on a Unix socket
    if (!c) {
        close(fd);
        return;
    }
    c->fd = fd;
    if (send(fd, greeting, 18, MSG_NOSIGNAL) != 18 || wait_for(c, EPOLLIN)) end(c);
}

static void run(int listener)
{
    struct epoll_event events[EVENTS];
    while (!ended) {
        int i, fd, count = epoll_wait(poller, events, EVENTS, -1);
        for (i = 0; i < count; i++) {
            connection *c = events[i].data.ptr;
            if (c) {
                if (serve(c)) end(c);
                continue;
            }
            while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0)
                welcome(fd);
        }
    }
}

/// Start ///

static void on_signal(int number)
{
    (void)number;
    ended = 1;
}

static int listen_unix(const char *path)
{
    struct sockaddr_un address = {0};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (strlen(path) >= sizeof address.sun_path) bench_die("path too long: %s", path);
    address.sun_family = AF_UNIX;
    strcpy(address.sun_path, path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, SOMAXCONN))
        bench_die("%s: %s", path, strerror(errno));
    return fd;
}

static int listen_tcp(uint16_t port)
{
    struct sockaddr_in address = {0};
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, SOMAXCONN))
        bench_die("port %d: %s", port, strerror(errno));
    return fd;
}

static int port_of(int fd)
{
    struct sockaddr_in address = {0};
    socklen_t size = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &size))
        bench_die("getsockname: %s", strerror(errno));
    return ntohs(address.sin_port);
}

static void fill_memory(void)
{
    uint64_t at;
    memory = malloc((size_t)export_size + 8);
    if (!memory) bench_die("no memory for %llu bytes", (unsigned long long)export_size);
    for (at = 0; at < export_size; at += 8)
        put64(memory + at, at);
}

// Exactly one of the two addresses is given: *path stays NULL, or *port stays -1.
static void parse(int argc, char **argv, const char **path, int *port)
{
    static const struct option long_options[] = {{"unix", 1, NULL, 'u'},
                                                 {"tcp", 1, NULL, 't'},
                                                 {"size", 1, NULL, 's'},
                                                 {"replies", 1, NULL, 'r'},
                                                 {NULL, 0, NULL, 0}};
    static const char *const kinds[] = {"simple", "structured", "extended", NULL};
    int c;
    while ((c = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        switch (c) {
        case 'u': *path = optarg; break;
        case 't': *port = (int)bench_number("--tcp", optarg, 0, 65535); break;
        case 's': export_size = bench_number("--size", optarg, 1, (uint64_t)1 << 40); break;
        case 'r': offered = (int)bench_word("--replies", optarg, kinds); break;
        default: bench_refuse(NULL);
        }
    }
    if (optind < argc || !*path == (*port < 0))
        bench_refuse("one of --unix and --tcp, nothing else");
}

static void end_on_signals(void)
{
    struct sigaction action = {0};
    action.sa_handler = on_signal;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
}

int main(int argc, char **argv)
{
    struct epoll_event event = {0};
    const char *path = NULL;
    int port = -1, listener;

    bench_usage = "--unix PATH | --tcp PORT [--size N] [--replies simple|structured|extended]";
    bench_name = "fastserver";
    parse(argc, argv, &path, &port);
    bench_allow_files();
    fill_memory();
    end_on_signals();
    listener = path ? listen_unix(path) : listen_tcp((uint16_t)port);
    poller = epoll_create1(EPOLL_CLOEXEC);
    event.events = EPOLLIN;
    if (poller < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event))
        bench_die("epoll: %s", strerror(errno));
    if (port == 0) {
        printf("listening %d\n", port_of(listener));
    } else {
        puts("listening");
    }
    fflush(stdout);
    run(listener);
    if (path) unlink(path);
    return 0;
}
