// copy.c - copies a disk between files, pipes and NBD servers, like nbdcopy(1)
//
//     gcc -std=c99 -O2 -I. examples/copy.c -o copy
//     ./copy -p nbd://localhost/export disk.img
//
// One loop over poll(2).  Each request owns one buffer: when its read is done
// its write starts from the same memory, when that is done the next read.
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REQUEST_SIZE_MAX (32u << 20)
#define TIMEOUT_MS 60000 // for dialling, for shaking hands and for saying goodbye

// Every file that is neither regular nor a block device is read and written in
// order, like a pipe.
enum kind { KIND_FILE, KIND_PIPE, KIND_NULL, KIND_NBD };

typedef struct side {
    enum kind kind;
    int fd;           // file or socket, -1: closed
    int sized;        // whether the size is known and cannot grow
    const char *name; // as on the command line
    uint64_t size;
    uint64_t bytes; // copied
    nbd_slot *slots;
    char uri_memory[16384];
    nbd_client client;
    nbd_sync sync;       // dialling, flush and end; the copy itself never blocks in it
    uint64_t message_id; // the request that sync.message is about
    unsigned char buffer[NBD_BUFFER_GOOD];
} side;

typedef struct request {
    struct request *next; // in the list of free ones, or in the queue of a pipe
    unsigned char *memory;
    uint64_t offset;
    size_t size;
    int full; // its bytes are all there
} request;

typedef struct copy {
    int progress, terminal, flush, verbose, synchronous;
    uint64_t request_count, request_size;
    side source, destination;
    request *requests, *free;
    request *filling;      // the one that a source pipe fills
    request *head, **tail; // in the order of their offsets, for a destination pipe
    unsigned char *memory;
    uint64_t position; // where the next read starts
    uint64_t busy;     // requests that are not free
    int ended;         // nothing is left to read
    int failed;
    double started, draw_at;
    int drawn; // whether the cursor stands behind a bar
} copy;

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

// Only the first error is printed: what follows it is its consequence.
static int fail(copy *c, const side *s, const char *format, ...)
{
    va_list arguments;
    if (c->failed) return -1;
    c->failed = 1;
    fprintf(stderr, "%scopy: %s: ", c->drawn ? "\n" : "", s->name);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    if (*s->sync.message) fprintf(stderr, " (server: \"%s\")", s->sync.message);
    fputc('\n', stderr);
    return -1;
}

static int fail_at(copy *c, const side *s, uint64_t offset, const char *text, const char *detail)
{
    return fail(c, s, "%s at offset %" PRIu64 ": %s%s%s", s == &c->source ? "read" : "write",
                offset, text, *detail ? ": " : "", detail);
}

/// Progress ///

static void draw_bar(const copy *c, double done, double rate)
{
    double size = (double)c->source.size, rest = (size - done) / (rate + 1e-9);
    int percent = size > 0 ? (int)(100 * done / size) : 100;
    int left = rest < 1e9 ? (int)rest : 1000000000;
    left += left < rest; // 0:00 is the end, not the last second
    fprintf(stderr, "[%-40.*s] %3d%%  %d:%02d left  ", percent * 40 / 100,
            "########################################", percent, left / 60, left % 60);
}

static void draw(copy *c)
{
    double now = c->terminal ? seconds() : 0, done = (double)c->destination.bytes, rate;
    if (!c->terminal || now < c->draw_at) return;
    c->draw_at = now + 0.1;
    c->drawn = 1;
    rate = done / (now - c->started + 1e-9);
    fputc('\r', stderr);
    if (c->source.sized) draw_bar(c, done, rate);
    fprintf(stderr, "%.1f MiB  %.1f MiB/s\033[K", done / 1048576, rate / 1048576);
}

static void print_summary(copy *c)
{
    double time = seconds() - c->started;
    fprintf(stderr, "%scopy: %" PRIu64 " bytes in %.3f s, %.1f MiB/s\n", c->drawn ? "\n" : "",
            c->destination.bytes, time, (double)c->destination.bytes / 1048576 / (time + 1e-9));
}

static void print_counters(const side *s, const char *role)
{
    static const char *const kinds[] = {"file", "pipe", "null", "nbd"};
    static const char *const protocols[] = {"simple", "structured", "extended"};
    const nbd_counters *count = nbd_count(&s->client); // zeros, if it is no server
    fprintf(stderr, "copy: %s: in_flight_max=%u sends=%" PRIu64 " receives=%" PRIu64, role,
            (unsigned)count->in_flight_max, count->sends, count->receives);
    fprintf(stderr, " bytes=%" PRIu64 " protocol=%s\n", s->bytes,
            s->kind == KIND_NBD ? protocols[nbd_negotiated(&s->client)->protocol] : kinds[s->kind]);
}

/// Opening and closing ///

static int shake_hands(copy *c, side *s, const nbd_address *address)
{
    const char *why;
    int error = nbd_sync_dial(&s->sync, address);
    if (!error) error = nbd_sync_connect(&s->sync, &s->sync.io.transport);
    if (!error) return 0;
    why = error == NBD_ERR_RESOLVE   ? gai_strerror(s->sync.os_error)
          : error == NBD_ERR_CONNECT ? strerror(s->sync.os_error)
                                     : nbd_detail(&s->client);
    return fail(c, s, "%s%s%s", nbd_strerror(error), *why ? ": " : "", why);
}

static int open_nbd(copy *c, side *s)
{
    nbd_config config = NBD_ZERO;
    nbd_uri uri;
    int error = nbd_uri_parse(&uri, s->name, s->uri_memory, sizeof s->uri_memory);
    if (error)
        return fail(c, s, "%s: %s, at byte %zu", nbd_strerror(error), uri.detail, uri.detail_at);
    if (uri.unknown)
        fprintf(stderr, "copy: %s: warning: unknown parameter \"%s\"\n", s->name, uri.unknown);
    if (uri.config_flags & NBD_TLS_REQUIRE) return fail(c, s, "this program was built without TLS");
    s->slots = calloc((size_t)c->request_count, sizeof *s->slots);
    if (!s->slots) return fail(c, s, "%s", strerror(ENOMEM));
    config.slot_count = (uint32_t)c->request_count;
    config.slots = s->slots;
    config.buffer = s->buffer;
    config.buffer_size = sizeof s->buffer;
    config.export_name = uri.export_name;
    s->kind = KIND_NBD;
    s->sync.client = &s->client;
    s->sync.timeout_ms = TIMEOUT_MS;
    error = nbd_init(&s->client, &config);
    if (error) return fail(c, s, "%s", nbd_strerror(error));
    if (shake_hands(c, s, &uri.address)) return -1;
    s->fd = s->sync.io.socket;
    s->size = nbd_negotiated(&s->client)->size;
    s->sized = 1;
    return 0;
}

static int open_file(copy *c, side *s, int flags)
{
    struct stat status;
    off_t end = 0;
    s->fd = open(s->name, flags, 0666);
    if (s->fd < 0 || fstat(s->fd, &status)) return fail(c, s, "%s", strerror(errno));
    s->kind = S_ISREG(status.st_mode) || S_ISBLK(status.st_mode) ? KIND_FILE : KIND_PIPE;
    // A regular file as destination becomes as long as it must.
    s->sized = s->kind == KIND_FILE && !(S_ISREG(status.st_mode) && (flags & O_CREAT));
    if (s->sized) end = lseek(s->fd, 0, SEEK_END);
    if (end < 0) return fail(c, s, "%s", strerror(errno));
    s->size = (uint64_t)end;
    return 0;
}

static int open_side(copy *c, side *s, int standard, int flags)
{
    int writes = (flags & O_CREAT) != 0;
    if (strcmp(s->name, "-") == 0) {
        s->kind = KIND_PIPE;
        s->fd = standard;
        return 0;
    }
    if (strcmp(s->name, "null:") == 0) {
        s->kind = KIND_NULL;
        return writes ? 0 : fail(c, s, "can only be a destination");
    }
    if (strncmp(s->name, "nbd", 3) == 0 && strstr(s->name, "://")) return open_nbd(c, s);
    return open_file(c, s, flags);
}

static void end_session(copy *c, side *s)
{
    nbd_event event;
    int error;
    // After a failure requests may be in flight; nobody waits for them.
    if (c->failed && !nbd_abandon(&s->client))
        while (nbd_next(&s->client, &event))
            continue;
    error = nbd_sync_close(&s->sync);
    if (error) fail(c, s, "at the end: %s", nbd_strerror(error));
}

static void close_side(copy *c, side *s)
{
    if (s->kind == KIND_NBD)
        end_session(c, s);
    else if (s->fd >= 0 && close(s->fd))
        fail(c, s, "at the end: %s", strerror(errno));
    free(s->slots);
}

/// What is checked before anything is written ///

// Requests obey the blocks and payloads of both servers.
static int check_limits(copy *c, const side *s, uint64_t *block, uint64_t *payload)
{
    const nbd_export *got = nbd_negotiated(&s->client);
    if (s->kind != KIND_NBD) return 0;
    if (*block < got->minimum_block) *block = got->minimum_block;
    if (*payload > got->maximum_payload) *payload = got->maximum_payload;
    if (c->source.sized && c->source.size % got->minimum_block)
        return fail(c, s,
                    "the source's size %" PRIu64 " is no multiple of the minimum block size "
                    "%u, so that its last bytes cannot be copied",
                    c->source.size, (unsigned)got->minimum_block);
    if (s == &c->destination && !nbd_allows(&s->client, NBD_WRITE, 0))
        return fail(c, s, "export is read-only");
    return 0;
}

static int check_sides(copy *c)
{
    side *from = &c->source, *to = &c->destination;
    uint64_t block = 1, payload = c->request_size;
    struct stat a, b;
    if (from->sized && to->sized && to->size < from->size)
        return fail(c, to, "size %" PRIu64 " is smaller than the source's %" PRIu64, to->size,
                    from->size);
    if (check_limits(c, from, &block, &payload) || check_limits(c, to, &block, &payload)) return -1;
    c->request_size = payload > block ? payload - payload % block : block;
    if (from->kind == KIND_FILE && to->kind == KIND_FILE) {
        if (fstat(from->fd, &a) || fstat(to->fd, &b)) return fail(c, to, "%s", strerror(errno));
        if (a.st_dev == b.st_dev && a.st_ino == b.st_ino)
            return fail(c, to, "is the source itself");
    }
    return 0;
}

// A regular file loses its old bytes, so that none can pass for a copied one.
static int set_file_size(copy *c)
{
    side *to = &c->destination;
    if (to->kind != KIND_FILE || to->sized) return 0;
    if (ftruncate(to->fd, 0) || ftruncate(to->fd, (off_t)c->source.size))
        return fail(c, to, "%s", strerror(errno));
    return 0;
}

static int allocate(copy *c)
{
    size_t count = (size_t)c->request_count, size = (size_t)c->request_size;
    void *memory = NULL;
    c->requests = calloc(count, sizeof *c->requests);
    if (!c->requests || size > SIZE_MAX / count || posix_memalign(&memory, 4096, count * size))
        return fail(c, &c->source, "%s", strerror(ENOMEM));
    c->memory = memory;
    for (size_t i = 0; i < count; i++) {
        c->requests[i].memory = c->memory + i * size;
        c->requests[i].next = c->free;
        c->free = &c->requests[i];
    }
    c->tail = &c->head;
    return 0;
}

/// Writing ///

static void write_done(copy *c, request *r)
{
    c->destination.bytes += r->size;
    c->busy--;
    r->next = c->free;
    c->free = r;
    draw(c);
}

// Reads or writes a file, or writes a pipe, to the end of the request.
static int transfer(copy *c, const side *s, const request *r)
{
    for (size_t at = 0; at < r->size;) {
        unsigned char *memory = r->memory + at;
        size_t left = r->size - at;
        off_t offset = (off_t)(r->offset + at);
        ssize_t n = s == &c->source        ? pread(s->fd, memory, left, offset)
                    : s->kind == KIND_PIPE ? write(s->fd, memory, left)
                                           : pwrite(s->fd, memory, left, offset);
        if (n == 0) return fail_at(c, s, r->offset + at, "unexpected end", "");
        if (n > 0)
            at += (size_t)n;
        else if (errno == EAGAIN)
            (void)poll(&(struct pollfd){s->fd, POLLOUT, 0}, 1, -1); // errors show in the next try
        else if (errno != EINTR)
            return fail_at(c, s, r->offset + at, strerror(errno), "");
    }
    return 0;
}

static void issue(copy *c, side *s, request *r, uint32_t command, uint32_t flags)
{
    nbd_op op = {.command = command,
                 .flags = flags,
                 .offset = r->offset,
                 .size = r->size,
                 .buffer = command == NBD_READ ? r->memory : NULL,
                 .data = command == NBD_WRITE ? r->memory : NULL,
                 .user = r};
    int error = nbd_issue(&s->client, &op, NULL);
    if (error) fail_at(c, s, r->offset, nbd_strerror(error), "");
}

static void start_write(copy *c, request *r)
{
    enum kind kind = c->destination.kind;
    if (kind == KIND_NBD)
        issue(c, &c->destination, r, NBD_WRITE, 0);
    else if (kind == KIND_NULL || transfer(c, &c->destination, r) == 0)
        write_done(c, r);
}

/// Reading ///

static request *take_request(copy *c)
{
    request *r = c->free;
    c->free = r->next;
    c->busy++;
    r->next = NULL;
    r->full = 0;
    r->offset = c->position;
    if (c->destination.kind == KIND_PIPE) {
        *c->tail = r;
        c->tail = &r->next;
    }
    return r;
}

static void read_done(copy *c, request *r)
{
    c->source.bytes += r->size;
    r->full = 1;
    if (c->destination.kind != KIND_PIPE) start_write(c, r);
    // Replies come in any order, the bytes of a pipe do not.
    while (c->head && c->head->full && !c->failed) {
        request *first = c->head;
        c->head = first->next;
        if (!c->head) c->tail = &c->head;
        start_write(c, first);
    }
}

static void start_read(copy *c)
{
    uint64_t left = c->source.size - c->position;
    request *r = take_request(c);
    r->size = (size_t)(left < c->request_size ? left : c->request_size);
    c->position += r->size;
    c->ended = c->position == c->source.size;
    // NBD_NO_INIT is safe here: the bytes are written only after DONE has said
    // success, and then every one of them is the server's.
    if (c->source.kind == KIND_NBD)
        issue(c, &c->source, r, NBD_READ, NBD_NO_INIT);
    else if (transfer(c, &c->source, r) == 0)
        read_done(c, r);
}

// Takes what the pipe holds; only the last request of a pipe may stay short.
static void read_pipe(copy *c)
{
    request *r = c->filling ? c->filling : c->free;
    size_t had = c->filling ? r->size : 0;
    ssize_t n = read(c->source.fd, r->memory + had, (size_t)c->request_size - had);
    if (n < 0 && errno != EINTR && errno != EAGAIN)
        fail_at(c, &c->source, c->position, strerror(errno), "");
    if (n < 0) return;
    c->ended = n == 0;
    if (n > 0 && !c->filling) c->filling = take_request(c);
    c->position += (uint64_t)n;
    r->size = had + (size_t)n;
    if (c->filling && (c->ended || r->size == c->request_size)) {
        c->filling = NULL;
        read_done(c, r);
    }
}

/// The loop ///

static void handle(copy *c, side *s, const nbd_event *event)
{
    if (event->type == NBD_EVENT_TEXT && event->text_kind == NBD_TEXT_MESSAGE) {
        s->message_id = event->id;
        nbd_escape(s->sync.message, sizeof s->sync.message, event->text, event->text_size);
    } else if (event->type == NBD_EVENT_DONE && !event->error) {
        if (s == &c->source)
            read_done(c, event->user);
        else
            write_done(c, event->user);
    } else if (event->type == NBD_EVENT_DONE) {
        if (event->id != s->message_id) s->sync.message[0] = 0;
        fail_at(c, s, event->error_offset, nbd_strerror(event->error), event->detail);
    } else if (event->type == NBD_EVENT_CLOSED) {
        fail(c, s, "%s before the end of the copy (%s)", nbd_strerror(event->error), event->detail);
    }
}

// What poll(2) is to wait for on this side.  NOW: not to wait at all.
static unsigned wants(const copy *c, const side *s)
{
    if (s->kind == KIND_NBD) return nbd_wants(&s->client);
    if (s != &c->source || s->kind != KIND_PIPE || c->ended) return 0;
    return c->filling || c->free ? NBD_WANT_READ : 0;
}

static void move(copy *c, side *s, unsigned ready)
{
    nbd_event event;
    if (s->kind == KIND_NBD) {
        int error = nbd_poll(&s->client, ready);
        if (error) fail(c, s, "%s", nbd_strerror(error));
        while (!c->failed && nbd_next(&s->client, &event))
            handle(c, s, &event);
    } else if (ready & NBD_WANT_READ) {
        read_pipe(c);
    }
}

static void wait_and_move(copy *c)
{
    side *sides[2] = {&c->source, &c->destination};
    struct pollfd on[2];
    int timeout = -1;
    for (int i = 0; i < 2; i++) {
        unsigned want = wants(c, sides[i]);
        int events = (want & NBD_WANT_READ ? POLLIN : 0) | (want & NBD_WANT_WRITE ? POLLOUT : 0);
        on[i] = (struct pollfd){events ? sides[i]->fd : -1, (short)events, 0};
        if (want & NBD_WANT_NOW) timeout = 0;
    }
    if (poll(on, 2, timeout) < 0 && errno != EINTR) fail(c, &c->source, "%s", strerror(errno));
    for (int i = 0; i < 2 && !c->failed; i++) {
        // An error or a hang-up shows in the call that reads or writes.
        int read = on[i].revents & ~POLLOUT, write = on[i].revents & ~POLLIN;
        move(c, sides[i], (read ? NBD_WANT_READ : 0) | (write ? NBD_WANT_WRITE : 0));
    }
}

static void copy_all(copy *c)
{
    c->started = seconds();
    c->draw_at = c->started + 0.2; // what is over by then needs no bar
    c->ended = c->source.sized && c->source.size == 0;
    while (!c->failed) {
        while (c->source.sized && c->free && !c->ended && !c->failed)
            start_read(c);
        if (c->failed || (c->ended && c->busy == 0)) return;
        wait_and_move(c);
    }
}

static void flush(copy *c)
{
    side *to = &c->destination;
    int error;
    if (to->kind == KIND_FILE && fsync(to->fd)) fail(c, to, "flush: %s", strerror(errno));
    if (to->kind != KIND_NBD || !nbd_allows(&to->client, NBD_FLUSH, 0)) return;
    to->sync.timeout_ms = 0; // it takes as long as the server's disk does
    error = nbd_sync_flush(&to->sync);
    to->sync.timeout_ms = TIMEOUT_MS;
    if (error) fail(c, to, "flush: %s", nbd_strerror(error));
}

/// The command line ///

static const char usage[] =
    "usage: copy [-p|--progress] [--flush] [-R N|--requests=N] [--request-size=N]\n"
    "            [--synchronous] [-v|--verbose] [--] SOURCE DESTINATION\n"
    "       copy --help | -V|--version\n"
    "SOURCE, DESTINATION: a file, a block device, - or an NBD URI;\n"
    "DESTINATION also null:; sizes may end in K or M\n";

// Returns the exit status.
static int misuse(const char *format, ...)
{
    va_list arguments;
    fputs("copy: ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n%s", usage);
    return 2;
}

// Returns 0 for anything that is no number from 1 to the maximum.
static uint64_t parse_number(const char *text, uint64_t maximum)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    int shift = *end == 'K' || *end == 'k' ? 10 : *end == 'M' || *end == 'm' ? 20 : 0;
    if (*text < '0' || *text > '9' || end[shift != 0]) return 0;
    return value > maximum >> shift ? 0 : (uint64_t)value << shift;
}

static int parse_requests(copy *c, const char *text)
{
    c->request_count = parse_number(text, NBD_SLOTS_MAX);
    if (c->request_count) return 0;
    return misuse("--requests=%s: no number from 1 to %d", text, NBD_SLOTS_MAX);
}

static int parse_request_size(copy *c, const char *text)
{
    c->request_size = parse_number(text, REQUEST_SIZE_MAX);
    if (c->request_size) return 0;
    return misuse("--request-size=%s: no size from 1 to %uM", text, REQUEST_SIZE_MAX >> 20);
}

// Returns the exit status if the program is to end here, else -1.
static int parse_options(copy *c, int argc, char **argv)
{
    const struct option options[] = {{"progress", no_argument, NULL, 'p'},
                                     {"flush", no_argument, &c->flush, 1},
                                     {"requests", required_argument, NULL, 'R'},
                                     {"verbose", no_argument, NULL, 'v'},
                                     {"request-size", required_argument, NULL, 's'},
                                     {"synchronous", no_argument, &c->synchronous, 1},
                                     {"help", no_argument, NULL, 'h'},
                                     {"version", no_argument, NULL, 'V'},
                                     {NULL, 0, NULL, 0}};
    int option, status = 0;
    while (!status && (option = getopt_long(argc, argv, "pR:vV", options, NULL)) != -1) {
        switch (option) {
        case 0: break; // the flag is set
        case 'p': c->progress = 1; break;
        case 'v': c->verbose = 1; break;
        case 'R': status = parse_requests(c, optarg); break;
        case 's': status = parse_request_size(c, optarg); break;
        case 'h': return fputs(usage, stdout) < 0;
        case 'V':
            return printf("copy (nbd.h) %d.%d.%d\n", NBD_VERSION_MAJOR, NBD_VERSION_MINOR,
                          NBD_VERSION_PATCH) < 0;
        default: fputs(usage, stderr); return 2; // getopt_long has said why
        }
    }
    if (status) return status;
    if (argc - optind < 2) return misuse("SOURCE and DESTINATION are needed");
    if (argc - optind > 2) return misuse("%s: one name too many", argv[optind + 2]);
    if (c->synchronous) c->request_count = 1;
    c->source.name = argv[optind];
    c->destination.name = argv[optind + 1];
    return -1;
}

static void run(copy *c)
{
    c->terminal = c->progress && isatty(STDERR_FILENO);
    // The destination comes last: no error of the source may harm it.
    if (open_side(c, &c->source, STDIN_FILENO, O_RDONLY) ||
        open_side(c, &c->destination, STDOUT_FILENO, O_WRONLY | O_CREAT) || check_sides(c) ||
        allocate(c) || set_file_size(c))
        return;
    copy_all(c);
    c->draw_at = 0;
    if (!c->failed) draw(c);
    if (!c->failed && c->flush) flush(c);
    if (!c->failed && c->progress) print_summary(c);
    if (!c->failed && c->verbose) {
        print_counters(&c->source, "source");
        print_counters(&c->destination, "destination");
    }
}

int main(int argc, char **argv)
{
    static copy c;
    int status;
    c.request_count = 64;
    c.request_size = 256 * 1024;
    c.source.fd = c.destination.fd = -1;
    status = parse_options(&c, argc, argv);
    if (status >= 0) return status;
    signal(SIGPIPE, SIG_IGN); // a reader that went away is an error of write(2)
    run(&c);
    close_side(&c, &c.source);
    close_side(&c, &c.destination);
    free(c.requests);
    free(c.memory);
    return c.failed;
}
