// bench.h - what the benchmark programs share: command line, threads, what the requests
// are, clock, counters, the line that is printed.
//
// A program defines three functions and hands them to bench_main.  Include nbd.h before
// this file to have bench_dial too.
#ifndef BENCH_H
#define BENCH_H

#include <endian.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/// Errors and words ///

static const char *bench_name, *bench_usage;

// A request, a connection or the machine failed.
static inline void __attribute__((noreturn, format(printf, 1, 2)))
bench_die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s: ", bench_name);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

// The command line is wrong.  NULL: getopt has said why.
static inline void __attribute__((noreturn)) bench_refuse(const char *why)
{
    if (why) fprintf(stderr, "%s: %s\n", bench_name, why);
    fprintf(stderr, "usage: %s %s\n", bench_name, bench_usage);
    exit(2);
}

// A number, with K or M behind it or not.
static inline uint64_t bench_number(const char *option, const char *text, uint64_t least,
                                    uint64_t most)
{
    char *end;
    unsigned shift = 0;
    unsigned long long value;
    errno = 0;
    value = strtoull(text, &end, 10);
    if (*end == 'K') shift = 10;
    if (*end == 'M') shift = 20;
    if (shift) end++;
    if (*text < '0' || *text > '9' || *end || errno || value > most >> shift ||
        value << shift < least) {
        fprintf(stderr, "%s: %s: not a number from %llu to %llu: %s\n", bench_name, option,
                (unsigned long long)least, (unsigned long long)most, text);
        exit(2);
    }
    return value << shift;
}

// The index of a word in a list that ends in NULL.
static inline unsigned bench_word(const char *option, const char *text, const char *const *words)
{
    unsigned i;
    for (i = 0; words[i]; i++)
        if (strcmp(text, words[i]) == 0) return i;
    fprintf(stderr, "%s: %s: unknown: %s\n", bench_name, option, text);
    exit(2);
}

// Ten thousand connections need as many descriptors as the system lets one have.
static inline void bench_allow_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit)) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

/// Command line ///

enum bench_op { BENCH_READ, BENCH_WRITE, BENCH_MIXED };
enum bench_send { BENCH_PLAIN, BENCH_MORE, BENCH_GATHER };

typedef struct bench_options {
    const char *uri;
    enum bench_op op;
    enum bench_send send;
    int no_init;
    int send_given, buffer_given;
    int verify;
    unsigned depth, connections, threads;
    size_t size;    // of a request; of the large ones if mixed
    size_t buffer;  // for reading ahead
    uint64_t count; // of each connection
} bench_options;

#define BENCH_USAGE \
    "URI --op read|write|mixed --size N --depth N --count N\n" \
    "    [--connections N] [--threads N] [--no-init] [--send plain|more|gather]\n" \
    "    [--buffer BYTES] [--verify]\n" \
    "N may end in K or M.  --count is of each connection.  mixed: requests of 4 KiB and of\n" \
    "--size, at least 256 KiB, reads and writes in turn.  --verify: the server is fastserver."

static inline void bench_option(bench_options *o, int c, const char *text)
{
    static const char *const ops[] = {"read", "write", "mixed", NULL};
    static const char *const sends[] = {"plain", "more", "gather", NULL};
    switch (c) {
    case 'o': o->op = (enum bench_op)bench_word("--op", text, ops); break;
    case 's': o->size = bench_number("--size", text, 1, 32 << 20); break;
    case 'd': o->depth = (unsigned)bench_number("--depth", text, 1, 4096); break;
    case 'n': o->count = bench_number("--count", text, 1, (uint64_t)1 << 40); break;
    case 'c': o->connections = (unsigned)bench_number("--connections", text, 1, 1 << 20); break;
    case 't': o->threads = (unsigned)bench_number("--threads", text, 1, 1024); break;
    case 'i': o->no_init = 1; break;
    case 'v': o->verify = 1; break;
    case 'm':
        o->send = (enum bench_send)bench_word("--send", text, sends);
        o->send_given = 1;
        break;
    case 'b':
        o->buffer = bench_number("--buffer", text, 256, 1 << 30);
        o->buffer_given = 1;
        break;
    default: bench_refuse(NULL);
    }
}

static inline void bench_parse(bench_options *o, int argc, char **argv)
{
    static const struct option long_options[] = {
        {"op", 1, NULL, 'o'},      {"size", 1, NULL, 's'},    {"depth", 1, NULL, 'd'},
        {"count", 1, NULL, 'n'},   {"threads", 1, NULL, 't'}, {"connections", 1, NULL, 'c'},
        {"no-init", 0, NULL, 'i'}, {"send", 1, NULL, 'm'},    {"buffer", 1, NULL, 'b'},
        {"verify", 0, NULL, 'v'},  {NULL, 0, NULL, 0}};
    int c;
    o->op = (enum bench_op) - 1;
    o->send = BENCH_GATHER;
    o->connections = o->threads = 1;
    o->buffer = 65536;
    while ((c = getopt_long(argc, argv, "", long_options, NULL)) != -1)
        bench_option(o, c, optarg);
    if (optind + 1 != argc) bench_refuse("one URI is needed");
    if ((int)o->op < 0 || !o->size || !o->depth || !o->count)
        bench_refuse("--op, --size, --depth and --count are needed");
    if (o->threads > o->connections) bench_refuse("more --threads than --connections");
    if (o->op == BENCH_MIXED && o->size < 262144) o->size = 262144;
    if (o->verify && (o->op != BENCH_READ || o->size % 8 || o->count < o->depth))
        bench_refuse("--verify needs reads of whole 8 bytes, as many as --depth at least");
    o->uri = argv[optind];
}

/// Requests ///

#define BENCH_SMALL 4096 // bytes of the small requests, if they are mixed

// Requests go through the export in order and start again at its end.
typedef struct bench_cursor {
    enum bench_op op;
    size_t size;
    uint64_t offset, export_size;
    uint64_t left; // requests not yet handed out
    unsigned turn;
} bench_cursor;

typedef struct bench_request {
    int write;
    size_t size;
    uint64_t offset;
} bench_request;

// Each connection starts at another place.
static inline void bench_start(bench_cursor *c, const bench_options *o, unsigned connection,
                               uint64_t export_size)
{
    if (export_size < o->size) bench_die("the export is smaller than --size");
    c->op = o->op;
    c->size = o->size;
    c->export_size = export_size;
    c->left = o->count;
    c->turn = 0;
    c->offset = export_size / o->connections * connection / 4096 * 4096;
}

static inline bench_request bench_next(bench_cursor *c)
{
    bench_request r;
    r.write = c->op == BENCH_WRITE;
    r.size = c->size;
    if (c->op == BENCH_MIXED) {
        r.write = c->turn & 1;
        if (!(c->turn++ & 2)) r.size = BENCH_SMALL;
    }
    if (r.size > c->export_size - c->offset) c->offset = 0;
    r.offset = c->offset;
    c->offset += r.size;
    c->left--;
    return r;
}

// Memory for the requests of a connection, page by page touched.
static inline unsigned char *bench_memory(size_t count, size_t size)
{
    void *memory;
    if (posix_memalign(&memory, 4096, count * size)) bench_die("no memory");
    memset(memory, 0x55, count * size);
    return memory;
}

/// Threads ///

#define BENCH_EVENTS 256 // that one epoll_wait brings

// One thread and its connections.
typedef struct bench_worker {
    const bench_options *options;
    unsigned first, connections; // of all connections
    void *state;                 // the program's
    int *sockets;                // filled by open
    unsigned char **memory;      // of the connections' requests, filled by open
    uint64_t syscalls;           // filled by run; 0: not counted
    uint64_t finished;           // requests, filled by run
    int epoll;                   // for more than one connection
    pthread_t thread;
} bench_worker;

// Waits for `events` of connection i from now on; *watched is what was waited for before.
static inline void bench_watch(bench_worker *w, unsigned i, uint32_t events, uint32_t *watched)
{
    struct epoll_event event = {0};
    if (*watched == events) return;
    event.events = events;
    event.data.u32 = i;
    if (epoll_ctl(w->epoll, *watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, w->sockets[i], &event))
        bench_die("epoll_ctl: %s", strerror(errno));
    *watched = events;
    w->syscalls++;
}

// Goes on with connection i, for which `events` came, until it has to wait; returns whether
// it has requests left.
typedef int bench_serve(bench_worker *w, unsigned i, uint32_t events);

// All connections of a worker in one epoll set; each begins as if `first` had come.
static inline void bench_run_many(bench_worker *w, bench_serve *serve, uint32_t first)
{
    struct epoll_event events[BENCH_EVENTS];
    unsigned i, busy = 0;
    int k, count;
    for (i = 0; i < w->connections; i++)
        busy += (unsigned)serve(w, i, first);
    while (busy > 0) {
        count = epoll_wait(w->epoll, events, BENCH_EVENTS, -1);
        w->syscalls++;
        for (k = 0; k < count; k++)
            if (!serve(w, events[k].data.u32, events[k].events)) busy--;
    }
}

// What a program does with the connections of one worker.  Whatever fails is bench_die.
typedef struct bench_program {
    const char *name;
    int sends;                      // whether it has --send and --buffer
    void (*open)(bench_worker *w);  // connects, shakes hands, touches its memory
    void (*run)(bench_worker *w);   // is measured
    void (*close)(bench_worker *w); // ends politely
} bench_program;

static const bench_program *bench_running;
static pthread_barrier_t bench_barrier;

typedef struct bench_reading {
    double clock, user, system;
    uint64_t segments;
    int tcp;
} bench_reading;

static inline double bench_seconds(double whole, double fraction, double unit)
{
    return whole + fraction / unit;
}

// With --verify: what the last reads left in memory is what fastserver serves.
static inline void bench_verify(const bench_options *o, const bench_worker *w)
{
    size_t at, size = o->depth * o->size;
    unsigned i;
    for (i = 0; i < w->connections; i++) {
        uint64_t expected = 0, found;
        for (at = 0; at < size; at += 8, expected += 8) {
            memcpy(&found, w->memory[i] + at, 8);
            if (at % o->size == 0) expected = be64toh(found);
            if (be64toh(found) != expected)
                bench_die("wrong data at byte %zu of the requests' memory", at);
        }
    }
}

// Segments that left a TCP socket; 0 for others.  The member tcpi_segs_out is too new for
// <netinet/tcp.h>, and <linux/tcp.h> cannot be included beside it: it is the 35th word.
static inline uint64_t bench_segments(int fd, int *tcp)
{
    uint32_t info[64];
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) || size < 35 * 4) return 0;
    *tcp = 1;
    return info[34];
}

static inline void bench_read_segments(bench_reading *r, bench_worker *workers)
{
    unsigned i, k;
    for (i = 0; i < workers->options->threads; i++)
        for (k = 0; k < workers[i].connections; k++)
            r->segments += bench_segments(workers[i].sockets[k], &r->tcp);
}

static inline void bench_read_clocks(bench_reading *r)
{
    struct rusage usage;
    struct timespec now;
    getrusage(RUSAGE_SELF, &usage);
    clock_gettime(CLOCK_MONOTONIC, &now);
    r->clock = bench_seconds((double)now.tv_sec, (double)now.tv_nsec, 1e9);
    r->user = bench_seconds((double)usage.ru_utime.tv_sec, (double)usage.ru_utime.tv_usec, 1e6);
    r->system = bench_seconds((double)usage.ru_stime.tv_sec, (double)usage.ru_stime.tv_usec, 1e6);
}

// Of all requests: see bench_next.
static inline double bench_bytes(const bench_options *o)
{
    uint64_t large = o->count / 4 * 2 + (o->count % 4 == 3);
    if (o->op != BENCH_MIXED) large = o->count;
    return ((double)large * (double)o->size + (double)(o->count - large) * BENCH_SMALL) *
           o->connections;
}

static inline void bench_print(const bench_options *o, const bench_worker *workers,
                               bench_reading start, bench_reading end)
{
    double ops = 0, syscalls = 0, user, system, seconds = end.clock - start.clock;
    unsigned i;
    for (i = 0; i < o->threads; i++) {
        ops += (double)workers[i].finished;
        syscalls += (double)workers[i].syscalls;
    }
    user = (end.user - start.user) * 1e6 / ops;
    system = (end.system - start.system) * 1e6 / ops;
    printf("ops_s=%.0f mb_s=%.1f cpu_us_op=%.4f user_us_op=%.4f sys_us_op=%.4f", ops / seconds,
           bench_bytes(o) / seconds / 1e6, user + system, user, system);
    if (syscalls > 0) printf(" syscalls_op=%.4f", syscalls / ops);
    if (start.tcp) printf(" segs_op=%.4f", (double)(end.segments - start.segments) / ops);
    printf(" ops=%.0f\n", ops);
}

static inline void bench_together(void)
{
    pthread_barrier_wait(&bench_barrier);
}

static inline void *bench_thread(void *worker)
{
    bench_running->open(worker);
    bench_together();
    bench_together();
    bench_running->run(worker);
    bench_together();
    bench_together();
    bench_running->close(worker);
    return NULL;
}

// The main thread is the first worker; it measures between the others' barriers.
static inline void bench_measure(const bench_options *o, bench_worker *workers)
{
    bench_reading start = {0}, end = {0};
    bench_running->open(&workers[0]);
    bench_together();
    bench_read_segments(&start, workers);
    bench_read_clocks(&start);
    bench_together();
    bench_running->run(&workers[0]);
    bench_together();
    bench_read_clocks(&end);
    bench_read_segments(&end, workers);
    bench_together();
    bench_running->close(&workers[0]);
    bench_print(o, workers, start, end);
}

static inline void bench_hire(bench_worker *w, const bench_options *o, unsigned number)
{
    unsigned share = o->connections / o->threads, rest = o->connections % o->threads;
    w->options = o;
    w->connections = share + (number < rest);
    w->first = number * share + (number < rest ? number : rest);
    w->sockets = calloc(w->connections, sizeof *w->sockets);
    w->memory = calloc(w->connections, sizeof *w->memory);
    w->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (!w->sockets || !w->memory || w->epoll < 0) bench_die("no memory");
    if (number > 0 && pthread_create(&w->thread, NULL, bench_thread, w)) bench_die("no thread");
}

static inline int bench_main(const bench_program *program, int argc, char **argv)
{
    static bench_options o;
    bench_worker *workers;
    unsigned i;
    bench_name = program->name;
    bench_usage = BENCH_USAGE;
    bench_running = program;
    bench_parse(&o, argc, argv);
    if (!program->sends && (o.send_given || o.buffer_given))
        bench_refuse("--send and --buffer are not libnbd's");
    bench_allow_files();
    workers = calloc(o.threads, sizeof *workers);
    if (!workers || pthread_barrier_init(&bench_barrier, NULL, o.threads)) bench_die("no memory");
    for (i = 0; i < o.threads; i++)
        bench_hire(&workers[i], &o, i);
    bench_measure(&o, workers);
    for (i = 1; i < o.threads; i++)
        pthread_join(workers[i].thread, NULL);
    for (i = 0; i < o.threads && o.verify; i++)
        bench_verify(&o, &workers[i]);
    return 0;
}

/// Dialling ///

#ifdef NBD_H
// Dials, but does not shake hands.
static inline void bench_dial(nbd_sync *sync, const char *text, nbd_uri *uri, char *memory,
                              size_t memory_size)
{
    int error = nbd_uri_parse(uri, text, memory, memory_size);
    sync->timeout_ms = 30000;
    if (!error) error = nbd_sync_dial(sync, &uri->address);
    if (error) bench_die("%s: %s %s", text, nbd_strerror(error), uri->detail);
}
#endif

#endif // BENCH_H
