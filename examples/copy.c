// copy.c - copies a disk between files, pipes and NBD servers, like nbdcopy(1)
//
//     mkdir -p build && gcc -std=c99 -O2 -pthread -I. examples/copy.c -o build/copy
//     build/copy -p nbd://localhost/export disk.img
//
// With TLS: -DNBD_MBEDTLS in front of -o, -lmbedtls -lmbedx509 -lmbedcrypto behind it.
//
// A lane is a thread with one connection to each server and requests of its own, in a
// loop over poll(2).  Lanes take ranges of the disk from one counter, ask which parts of
// them are zero, read the rest, and write each request from the memory that it was read
// into.
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "tls_uri.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef FALLOC_FL_ZERO_RANGE // musl leaves it to <linux/falloc.h>
#define FALLOC_FL_ZERO_RANGE 0x10
#endif

#define REQUEST_SIZE_MAX (32u << 20)
#define LANES_MAX 64u
#define ZEROES_MAX 256u                // zero ranges that a lane knows of at once
#define RANGE_MOST ((uint64_t)1 << 31) // what a lane takes at once; multiples of a request
#define RANGE_LEAST REQUEST_SIZE_MAX
#define ALIGNMENT 4096u  // of memory and of direct input and output
#define TIMEOUT_MS 60000 // for dialling, for shaking hands and for saying goodbye

// Every file that is neither regular nor a block device is read and written in
// order, like a pipe.
enum kind { KIND_FILE, KIND_PIPE, KIND_NULL, KIND_NBD };
enum { SOURCE, DESTINATION };

// How a server is made to write zeroes, best first; when it refuses one it gets the next.
// TRIM is none of them: what it leaves may read as anything.
enum zeroing { ZERO_FAST, ZERO_COMMAND, ZERO_WRITE };

typedef struct side {
    enum kind kind;
    int role;         // SOURCE or DESTINATION
    int fd;           // of a file or pipe, -1: none
    int sized;        // whether the size is known and cannot grow
    int regular;      // whether it is a regular file
    int emptied;      // and lost its old bytes; if the copy fails it loses the new ones too
    int is_zero;      // every byte of it reads as zero before the copy
    const char *name; // as on the command line
    char **command;   // of a server to be started, or NULL
    pid_t server;     // that was started
    uint64_t size;
    uint64_t bytes; // that were read or written, without zeroes that were skipped
    nbd_uri uri;
    char uri_memory[16384];
    tls_trust trust;
} side;

typedef struct connection {
    side *side;
    nbd_slot *slots;
    nbd_client client;
    nbd_context context[1];
    tls_session tls;
    nbd_sync sync;       // dialling, flush and end; the copy itself never blocks in it
    uint64_t message_id; // the request that sync.message is about
    unsigned char buffer[NBD_BUFFER_GOOD];
} connection;

typedef struct request {
    struct request *next; // in the list of free ones, or in the queue of a pipe
    unsigned char *memory;
    uint64_t offset;
    uint64_t size;
    uint64_t at;      // bytes of it that have been written
    uint64_t part;    // bytes that are being written
    enum zeroing how; // if a server is zeroing them
    int zero;         // nothing is read: all of it is zero
    int full;         // its bytes are all there
} request;

typedef struct range {
    uint64_t from, to;
} range;

typedef struct lane {
    connection ends[2];
    pthread_t thread;
    request *requests, *free; // what was used last is taken first: the cache still has it
    unsigned char *memory;
    unsigned busy;        // requests that are not free, and the question about extents
    uint64_t at;          // where the next request starts
    uint64_t known;       // up to where `zeroes` tells everything
    uint64_t end;         // of the range that this lane has taken
    int asking;           // the question about extents is under way
    enum zeroing zeroing; // the best way that was not refused
    range zeroes[ZEROES_MAX];
    unsigned zero_count, zero_index;
    request *filling;      // the one that a source pipe fills
    request *head, **tail; // in the order of their offsets, for a destination pipe
    int ended;             // a source pipe is over
} lane;

static struct {
    int allocated, direct, flush, no_extents, progress, synchronous, target_zero, verbose;
    int progress_fd;
    uint64_t connections, threads, requests, request_size, queue_size, sparse;
} option = {.progress_fd = -1,
            .connections = 4,
            .requests = 16,
            .request_size = 256 * 1024,
            .queue_size = 16 << 20,
            .sparse = 4096};

static side sides[2];
static lane *lanes;
static unsigned lane_count = 1;
static uint64_t block = 1;    // the largest minimum block of the servers
static uint64_t grain = 1;    // and the largest preferred one: ranges are multiples of it
static unsigned char *zeroes; // a request's worth of them
static unsigned char *tail;   // of the destination, where the source ends within a block

// What threads share; under the lock, but for `failed`.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t position; // where the next range starts
static uint64_t done;     // bytes of the disk that are copied
static int failed;        // only ever becomes 1; see has_failed
static double started, draw_at;
static int drawn; // whether the cursor stands behind a bar

static volatile sig_atomic_t copying, interrupted; // see stop

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int has_failed(void)
{
    return __atomic_load_n(&failed, __ATOMIC_RELAXED);
}

// Only the first error is printed: what follows it is its consequence.  `message` is the
// server's, or "".
static int fail(const side *s, const char *message, const char *format, ...)
{
    va_list arguments;
    pthread_mutex_lock(&lock);
    if (!has_failed()) {
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        fprintf(stderr, "%scopy: %s: ", drawn ? "\n" : "", s->name);
        va_start(arguments, format);
        vfprintf(stderr, format, arguments);
        va_end(arguments);
        if (*message) fprintf(stderr, " (server: \"%s\")", message);
        fputc('\n', stderr);
    }
    pthread_mutex_unlock(&lock);
    return -1;
}

static int fail_errno(const side *s, const char *what)
{
    return fail(s, "", "%s%s", what, strerror(errno));
}

static int fail_at(const side *s, const char *message, const char *what, uint64_t offset,
                   const char *why)
{
    return fail(s, message, "%s at offset %" PRIu64 ": %s", what, offset, why);
}

static const char *verb(const side *s)
{
    return s->role == SOURCE ? "read" : "write";
}

/// Progress ///

static void draw_bar(int percent, double left)
{
    int rest = left < 1e9 ? (int)left : 1000000000;
    rest += rest < left; // 0:00 is the end, not the last second
    fprintf(stderr, "[%-40.*s] %3d%%  %d:%02d left  ", percent * 40 / 100,
            "########################################", percent, rest / 60, rest % 60);
}

// Called with the lock held, or by the only thread.
static void draw(void)
{
    double now = seconds(), bytes = (double)done, size = (double)sides[SOURCE].size;
    double rate = bytes / (now - started + 1e-9);
    int percent = size > 0 ? (int)(100 * bytes / size) : 0;
    draw_at = now + 0.1;
    if (option.progress_fd >= 0) {
        dprintf(option.progress_fd, "%d/100\n", percent);
    } else if (isatty(STDERR_FILENO)) {
        drawn = 1;
        fputc('\r', stderr);
        if (sides[SOURCE].sized) draw_bar(percent, (size - bytes) / (rate + 1e-9));
        fprintf(stderr, "%.1f MiB  %.1f MiB/s\033[K", bytes / 1048576, rate / 1048576);
    }
}

static void count(side *s, uint64_t bytes, uint64_t finished)
{
    pthread_mutex_lock(&lock);
    s->bytes += bytes;
    done += finished;
    if (option.progress && seconds() >= draw_at) draw();
    pthread_mutex_unlock(&lock);
}

static void print_summary(void)
{
    double time = seconds() - started;
    if (option.progress_fd >= 0) {
        dprintf(option.progress_fd, "100/100\n");
        return;
    }
    draw();
    fprintf(stderr, "%scopy: %" PRIu64 " bytes in %.3f s, %.1f MiB/s\n", drawn ? "\n" : "", done,
            time, (double)done / 1048576 / (time + 1e-9));
}

static void print_counters(const side *s)
{
    static const char *const kinds[] = {"file", "pipe", "null", ""};
    static const char *const protocols[] = {"simple", "structured", "extended"};
    int nbd = s->kind == KIND_NBD;
    uint64_t sends = 0, receives = 0;
    unsigned most = 0;
    for (unsigned i = 0; i < lane_count; i++) {
        const nbd_counters *n = nbd_count(&lanes[i].ends[s->role].client); // zeros, if no server
        sends += n->sends;
        receives += n->receives;
        if (most < n->in_flight_max) most = n->in_flight_max;
    }
    fprintf(stderr, "copy: %s: in_flight_max=%u sends=%" PRIu64 " receives=%" PRIu64,
            s->role == SOURCE ? "source" : "destination", most, sends, receives);
    fprintf(stderr, " bytes=%" PRIu64 " protocol=%s connections=%u threads=%u\n", s->bytes,
            nbd ? protocols[nbd_negotiated(&lanes->ends[s->role].client)->protocol]
                : kinds[s->kind],
            nbd ? lane_count : 0, lane_count);
}

/// Opening and closing ///

// In the child: the listening socket becomes descriptor 3 ("socket activation").
static void become_server(const side *s, int listener)
{
    char pid[24];
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    setenv("LISTEN_PID", pid, 1);
    setenv("LISTEN_FDS", "1", 1);
    if (listener == 3)
        (void)fcntl(3, F_SETFD, 0);
    else
        dup2(listener, 3);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    execvp(s->command[0], s->command);
    fprintf(stderr, "copy: %s: %s\n", s->command[0], strerror(errno));
    _exit(127); // this side sees its connection end
}

// This side connects before there is a server, which finds the connection waiting: so the
// name of the socket is gone at once, and a server that ends at once is seen to.
static int start_server(side *s, nbd_sync *sync)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    nbd_address address = {.kind = NBD_ADDRESS_UNIX, .path = at.sun_path};
    char directory[] = "/tmp/nbd-copy-XXXXXX";
    int error = -1, listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || !mkdtemp(directory)) return fail_errno(s, "cannot start it: ");
    snprintf(at.sun_path, sizeof at.sun_path, "%s/socket", directory);
    if (!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 1))
        error = nbd_sync_dial(sync, &address);
    unlink(at.sun_path);
    rmdir(directory);
    if (!error) s->server = fork();
    if (!error && s->server == 0) become_server(s, listener);
    if (error || s->server < 0) fail_errno(s, "cannot start it: ");
    close(listener);
    return has_failed() ? -1 : 0;
}

// No limit of time: the server may have much to write, and killed it would lose that.
static void stop_server(side *s)
{
    int status = 0;
    if (s->server <= 0) return;
    kill(s->server, SIGTERM);
    while (waitpid(s->server, &status, 0) < 0 && errno == EINTR)
        continue;
    if (WIFSIGNALED(status) && WTERMSIG(status) != SIGTERM)
        fail(s, "", "server was ended by signal %d", WTERMSIG(status));
}

static int connect_nbd(connection *end)
{
    static const char *const allocation[] = {"base:allocation"};
    side *s = end->side;
    nbd_sync *sync = &end->sync;
    const char *why;
    int error;
    nbd_config config = {.flags = s->uri.config_flags,
                         .slot_count = (uint32_t)option.requests + 1, // one for extents
                         .buffer = end->buffer,
                         .buffer_size = sizeof end->buffer,
                         .export_name = s->uri.export_name,
                         .queries = allocation,
                         .query_count = s->role == SOURCE && !option.no_extents ? 1 : 0,
                         .contexts = end->context,
                         .context_count = 1};
    config.slots = end->slots = calloc(config.slot_count, sizeof *end->slots);
    if (!config.slots) return fail_errno(s, "");
    sync->client = &end->client;
    sync->timeout_ms = TIMEOUT_MS;
    error = nbd_init(&end->client, &config);
    if (!error && tls_begin(&end->tls, &s->trust, sync)) return fail(s, "", "%s", s->trust.why);
    if (!error && s->command && start_server(s, sync)) return -1;
    if (!error)
        error = s->command ? nbd_sync_connect(sync, &sync->io.transport)
                           : nbd_sync_open(sync, &s->uri.address);
    if (!error) return 0;
    why = error == NBD_ERR_RESOLVE                          ? gai_strerror(sync->os_error)
          : error == NBD_ERR_CONNECT                        ? strerror(sync->os_error)
          : *nbd_detail(&end->client) || !sync->io.os_error ? nbd_detail(&end->client)
                                                            : strerror(sync->io.os_error);
    return fail(s, sync->message, "%s%s%s", nbd_strerror(error), *why ? ": " : "", why);
}

static int open_nbd(side *s, connection *end)
{
    int error = 0;
    s->kind = KIND_NBD;
    if (!s->command) error = nbd_uri_parse(&s->uri, s->name, s->uri_memory, sizeof s->uri_memory);
    if (error)
        return fail(s, "", "%s: %s, at byte %zu", nbd_strerror(error), s->uri.detail,
                    s->uri.detail_at);
    if (s->uri.unknown) fprintf(stderr, "copy: %s: warning: unknown parameter ignored\n", s->name);
    if (tls_prepare(&s->trust, &s->uri)) return fail(s, "", "%s", s->trust.why);
    if (connect_nbd(end)) return -1;
    s->size = nbd_negotiated(&end->client)->size;
    s->sized = 1;
    return 0;
}

static int open_file(side *s)
{
    struct stat status;
    off_t end = 0;
    s->fd = open(s->name, (s->role == SOURCE ? O_RDONLY : O_WRONLY) | O_CLOEXEC);
    // Only what does not exist is made: a device that went away is no reason to fill its
    // directory.
    if (s->fd < 0 && errno == ENOENT && s->role == DESTINATION)
        s->fd = open(s->name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (s->fd < 0 || fstat(s->fd, &status)) return fail_errno(s, "");
    s->regular = S_ISREG(status.st_mode);
    s->kind = s->regular || S_ISBLK(status.st_mode) ? KIND_FILE : KIND_PIPE;
    // A regular file as destination becomes as long as it must.
    s->sized = s->kind == KIND_FILE && !(s->regular && s->role == DESTINATION);
    if (s->sized) end = lseek(s->fd, 0, SEEK_END);
    if (end < 0 || (option.direct && s->kind == KIND_FILE &&
                    fcntl(s->fd, F_SETFL, fcntl(s->fd, F_GETFL) | O_DIRECT)))
        return fail_errno(s, "");
    s->size = (uint64_t)end;
    return 0;
}

static int open_side(side *s)
{
    connection *end = &lanes->ends[s->role];
    end->side = s;
    if (s->command || (strncmp(s->name, "nbd", 3) == 0 && strstr(s->name, "://")))
        return open_nbd(s, end);
    if (strcmp(s->name, "null:") == 0) {
        s->kind = KIND_NULL;
        return s->role == DESTINATION ? 0 : fail(s, "", "can only be a destination");
    }
    if (strcmp(s->name, "-") != 0) return open_file(s);
    s->kind = KIND_PIPE;
    s->fd = s->role == SOURCE ? STDIN_FILENO : STDOUT_FILENO;
    return s->role == DESTINATION && isatty(s->fd) ? fail(s, "", "is a terminal") : 0;
}

static void end_session(connection *end)
{
    nbd_event event;
    int error;
    // After a failure requests may be in flight: nobody waits for them, and their memory
    // is given up only behind this.
    if (has_failed() && end->sync.client && !nbd_abandon(&end->client))
        while (nbd_next(&end->client, &event))
            continue;
    error = end->sync.client ? nbd_sync_close(&end->sync) : 0;
    if (error) fail(end->side, end->sync.message, "at the end: %s", nbd_strerror(error));
    tls_end(&end->tls);
    free(end->slots);
}

// A copy that failed leaves no file that could pass for a whole one.
static void close_side(side *s)
{
    stop_server(s);
    tls_forget(&s->trust);
    if (s->fd >= 0 && has_failed() && s->emptied && ftruncate(s->fd, 0)) fail_errno(s, "");
    if (s->fd >= 0 && close(s->fd)) fail_errno(s, "at the end: ");
}

/// What is checked before anything is written ///

static const nbd_export *export_of(const side *s)
{
    return nbd_negotiated(&lanes->ends[s->role].client);
}

static uint32_t minimum_block(const side *s)
{
    return s->kind == KIND_NBD ? export_of(s)->minimum_block : 1;
}

// Requests obey the blocks and payloads of both servers, and so do the zeroes that are
// looked for: a server would have to read and write again what lies around small ones.
static int obey(const side *s, uint64_t *payload)
{
    const nbd_export *got = export_of(s);
    if (s->kind != KIND_NBD) return 0;
    if (block < got->minimum_block) block = got->minimum_block;
    if (grain < got->preferred_block) grain = got->preferred_block;
    if (*payload > got->maximum_payload) *payload = got->maximum_payload;
    if (s->role == SOURCE) return 0;
    if (option.sparse && option.sparse < got->preferred_block) option.sparse = got->preferred_block;
    return nbd_allows(&lanes->ends[DESTINATION].client, NBD_WRITE, 0)
               ? 0
               : fail(s, "", "export is read-only");
}

static int choose_sizes(uint64_t payload)
{
    if (option.direct && block < ALIGNMENT) block = ALIGNMENT;
    if (grain > payload) grain = block;
    if (grain < block) grain = block;
    if (option.request_size < grain) option.request_size = grain;
    if (option.request_size > payload) option.request_size = payload - payload % grain;
    if (option.request_size == 0)
        return fail(&sides[DESTINATION], "",
                    "the largest request of one side, %" PRIu64
                    " bytes, is smaller than the smallest of the other, %" PRIu64,
                    payload, block);
    if (option.sparse && option.sparse < block) option.sparse = block;
    if (option.allocated) option.sparse = 0;
    return 0;
}

static int check_same_file(void)
{
    struct stat a, b;
    side *to = &sides[DESTINATION];
    if (sides[SOURCE].kind != KIND_FILE || to->kind != KIND_FILE) return 0;
    if (fstat(sides[SOURCE].fd, &a) || fstat(to->fd, &b)) return fail_errno(to, "");
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino ? fail(to, "", "is the source itself") : 0;
}

// The source may end within a block of the server that it is written to: what lies behind
// it there stays.  A block that the source cannot be read in is lost.
static int check_tail(void)
{
    side *from = &sides[SOURCE], *to = &sides[DESTINATION];
    nbd_sync *sync = &lanes->ends[DESTINATION].sync;
    uint32_t to_block = minimum_block(to);
    uint64_t over = from->size % to_block;
    int odd = from->size % minimum_block(from) != 0, error;
    if (odd || (over && from->size - over + to_block > to->size))
        return fail(odd ? from : to, "",
                    "the source's size %" PRIu64 " is no multiple of the minimum block size "
                    "%" PRIu64 ", so that its last bytes cannot be copied",
                    from->size, block);
    if (!over) return 0;
    tail = malloc(to_block);
    error = tail ? nbd_sync_read(sync, tail, to_block, from->size - over) : NBD_ENOMEM;
    return error ? fail_at(to, sync->message, "read", from->size - over, nbd_strerror(error)) : 0;
}

static int check_sides(void)
{
    side *from = &sides[SOURCE], *to = &sides[DESTINATION];
    uint64_t payload = REQUEST_SIZE_MAX;
    if (from->sized && to->sized && to->size < from->size)
        return fail(to, "", "size %" PRIu64 " is smaller than the source's %" PRIu64, to->size,
                    from->size);
    if (obey(from, &payload) || obey(to, &payload) || check_same_file()) return -1;
    if (choose_sizes(payload)) return -1;
    return from->sized ? check_tail() : 0;
}

// A regular file loses its old bytes, so that none can pass for a copied one.
static int empty_file(void)
{
    side *to = &sides[DESTINATION];
    copying = 1;
    if (!to->regular) return 0;
    to->is_zero = to->emptied = 1;
    return ftruncate(to->fd, 0) || ftruncate(to->fd, (off_t)sides[SOURCE].size) ? fail_errno(to, "")
                                                                                : 0;
}

/// Lanes ///

// One lane for each connection.  Several are safe only if each server says so.
static void choose_counts(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t room = option.queue_size / option.request_size;
    uint64_t threads = option.threads ? option.threads : cores > 0 ? (uint64_t)cores : 1;
    lane_count = (unsigned)(threads < option.connections ? threads : option.connections);
    for (int i = 0; i < 2; i++)
        if (sides[i].kind == KIND_PIPE || sides[i].command || tls_is_single(&sides[i].trust) ||
            (sides[i].kind == KIND_NBD && !(export_of(&sides[i])->flags & NBD_OFFERS_MULTI_CONN)))
            lane_count = 1;
    if (option.synchronous) lane_count = 1;
    if (option.requests > room) option.requests = room ? room : 1;
}

static int prepare_lane(lane *l)
{
    size_t number = (size_t)option.requests, size = (size_t)option.request_size;
    void *memory = NULL;
    l->requests = calloc(number, sizeof *l->requests);
    if (!l->requests || posix_memalign(&memory, ALIGNMENT, number * size))
        return fail(&sides[SOURCE], "", "%s", strerror(ENOMEM));
    l->memory = memory;
    for (size_t i = 0; i < number; i++) {
        l->requests[i].memory = l->memory + i * size;
        l->requests[i].next = l->free;
        l->free = &l->requests[i];
    }
    l->tail = &l->head;
    return 0;
}

static int prepare_lanes(void)
{
    void *memory = NULL;
    if (posix_memalign(&memory, ALIGNMENT, (size_t)option.request_size))
        return fail(&sides[SOURCE], "", "%s", strerror(ENOMEM));
    zeroes = memset(memory, 0, (size_t)option.request_size);
    for (unsigned i = 0; i < lane_count; i++) {
        for (int k = 0; i > 0 && k < 2; k++) {
            lanes[i].ends[k].side = &sides[k];
            if (sides[k].kind == KIND_NBD && connect_nbd(&lanes[i].ends[k])) return -1;
        }
        if (prepare_lane(&lanes[i])) return -1;
    }
    return 0;
}

static void free_lane(lane *l)
{
    for (int k = 0; k < 2; k++)
        if (sides[k].kind == KIND_NBD && l->ends[k].side) end_session(&l->ends[k]);
    free(l->requests);
    free(l->memory);
}

/// What is zero in the source ///

// A zero range counts as far as whole grains of it are zero.  Returns 0 if there is no
// room for it: it has to be asked for again.
static int note_zero(lane *l, uint64_t from, uint64_t to)
{
    unsigned n = l->zero_count;
    uint64_t skip = (grain - from % grain) % grain;
    if (skip >= to - from) return 1; // compared before it is added, so nothing wraps
    from += skip;
    if (to != sides[SOURCE].size || tail) to -= to % grain;
    if (from >= to) return 1;
    if (n > 0 && l->zeroes[n - 1].to == from) {
        l->zeroes[n - 1].to = to;
        return 1;
    }
    if (n == ZEROES_MAX) return 0;
    l->zeroes[l->zero_count++] = (range){from, to};
    return 1;
}

// The next range of the disk: large, so that few questions are asked, but each lane gets
// several, so that all end together.
static int take_range(lane *l)
{
    uint64_t share = sides[SOURCE].size / lane_count / 8, left;
    share -= share % RANGE_LEAST;
    share = share < RANGE_LEAST ? RANGE_LEAST : share > RANGE_MOST ? RANGE_MOST : share;
    pthread_mutex_lock(&lock);
    left = sides[SOURCE].size - position;
    l->at = l->known = position;
    l->end = position += left < share ? left : share;
    pthread_mutex_unlock(&lock);
    return l->at < l->end;
}

// An answer may end anywhere, a request may not: what is cut off here is asked for again,
// and a grain that is not known whole is read.
static void settle_known(lane *l)
{
    if (l->known < l->end) l->known -= l->known % grain;
    if (l->known <= l->at) l->known = l->at + grain;
    if (l->known > l->end) l->known = l->end;
}

static void ask_file(lane *l)
{
    int fd = sides[SOURCE].fd;
    while (l->known < l->end) {
        off_t data = lseek(fd, (off_t)l->known, SEEK_DATA), hole;
        uint64_t to = data < 0 || (uint64_t)data > l->end ? l->end : (uint64_t)data;
        if (data < 0 && errno != ENXIO) break; // it cannot tell: all is data
        if (!note_zero(l, l->known, to)) return;
        hole = to < l->end ? lseek(fd, (off_t)to, SEEK_HOLE) : -1;
        l->known = hole > (off_t)to && (uint64_t)hole < l->end ? (uint64_t)hole : l->end;
    }
    l->known = l->end;
}

static int issue(connection *end, const nbd_op *op, const char *what)
{
    int error = nbd_issue(&end->client, op, NULL);
    return error ? fail_at(end->side, "", what, op->offset, nbd_strerror(error)) : 0;
}

static void ask_nbd(lane *l)
{
    connection *end = &l->ends[SOURCE];
    nbd_op op = {.command = NBD_BLOCK_STATUS,
                 .offset = l->at,
                 .size = nbd_fit(&end->client, NBD_BLOCK_STATUS, l->end - l->at)};
    if (issue(end, &op, "block status")) return;
    l->asking = 1;
    l->busy++;
}

static void ask(lane *l)
{
    int nbd = sides[SOURCE].kind == KIND_NBD;
    l->zero_count = l->zero_index = 0;
    if (nbd && nbd_allows(&l->ends[SOURCE].client, NBD_BLOCK_STATUS, 0)) {
        ask_nbd(l);
        return;
    }
    if (nbd || option.no_extents)
        l->known = l->end;
    else
        ask_file(l);
    settle_known(l);
}

// Extents come in order, so the first that finds no room ends what is known.
static void extent(lane *l, const nbd_event *event)
{
    uint64_t to = event->offset + event->size;
    if (event->offset != l->known) return;
    if (to > l->end) to = l->end;
    if (!(event->flags & NBD_STATE_ZERO) || note_zero(l, event->offset, to)) l->known = to;
}

/// Writing ///

static void write_done(lane *l, request *r)
{
    count(&sides[DESTINATION], 0, r->size);
    l->busy--;
    r->next = l->free;
    l->free = r;
}

// Reads or writes a file, or writes a pipe, all of it.
static int transfer(side *s, unsigned char *memory, uint64_t size, uint64_t offset)
{
    // Direct input and output is in whole blocks; a file may end within one.
    if (option.direct && size % ALIGNMENT)
        (void)fcntl(s->fd, F_SETFL, fcntl(s->fd, F_GETFL) & ~O_DIRECT);
    for (uint64_t at = 0; at < size && !interrupted;) {
        size_t left = (size_t)(size - at);
        off_t where = (off_t)(offset + at);
        ssize_t n = s->role == SOURCE      ? pread(s->fd, memory + at, left, where)
                    : s->kind == KIND_PIPE ? write(s->fd, memory + at, left)
                                           : pwrite(s->fd, memory + at, left, where);
        if (n == 0) return fail_at(s, "", verb(s), offset + at, "unexpected end");
        if (n > 0)
            at += (uint64_t)n;
        else if (errno == EAGAIN)
            (void)poll(&(struct pollfd){s->fd, POLLOUT, 0}, 1, -1); // errors show in the next try
        else if (errno != EINTR)
            return fail_at(s, "", verb(s), offset + at, strerror(errno));
    }
    if (interrupted) return fail(s, "", "interrupted");
    count(s, size, 0);
    return 0;
}

// Memory that is all zero equals itself moved by one byte.
static int is_zero(const unsigned char *memory, size_t size)
{
    return memory[0] == 0 && memcmp(memory, memory + 1, size - 1) == 0;
}

// The part of a request that is written next: a run of blocks that are all zero, or none.
static uint64_t next_part(const request *r, int *zero)
{
    uint64_t at = r->at, size = option.sparse;
    *zero = r->zero;
    if (r->zero || !size) return r->size - at;
    do {
        uint64_t left = r->size - at, step = size - (r->offset + at) % size;
        int now = is_zero(r->memory + at, (size_t)(left < step ? left : step));
        if (at == r->at) *zero = now;
        if (now != *zero) break;
        at += left < step ? left : step;
    } while (at < r->size);
    return at - r->at;
}

// The last bytes of the source in a block of the destination: the rest of it stays.
static uint64_t pad(request *r)
{
    uint64_t end = r->at + r->part, to_block = export_of(&sides[DESTINATION])->minimum_block;
    uint64_t over = (r->offset + end) % to_block, rest = over ? to_block - over : 0;
    if (!tail || !rest) return r->part; // or the server's rule is broken, which nbd_issue tells
    memcpy(r->memory + end, tail + over, (size_t)rest);
    return r->part + rest;
}

static void write_nbd(lane *l, request *r)
{
    nbd_op op = {.command = NBD_WRITE,
                 .offset = r->offset + r->at,
                 .size = pad(r),
                 .data = r->memory + r->at,
                 .user = r};
    count(&sides[DESTINATION], r->part, 0);
    (void)issue(&l->ends[DESTINATION], &op, "write");
}

static void zero_nbd(lane *l, request *r)
{
    connection *end = &l->ends[DESTINATION];
    uint32_t flags = option.allocated ? NBD_NO_HOLE : 0;
    nbd_op op = {.command = NBD_WRITE_ZEROES, .offset = r->offset + r->at, .user = r};
    r->how = l->zeroing;
    if (r->how == ZERO_FAST && !nbd_allows(&end->client, NBD_WRITE_ZEROES, flags | NBD_FAST_ZERO))
        r->how = ZERO_COMMAND;
    if (r->how == ZERO_COMMAND && !nbd_allows(&end->client, NBD_WRITE_ZEROES, flags))
        r->how = ZERO_WRITE;
    if (r->how != ZERO_WRITE) {
        op.flags = flags | (r->how == ZERO_FAST ? NBD_FAST_ZERO : 0);
        op.size = nbd_fit(&end->client, NBD_WRITE_ZEROES, r->part);
    } else {
        op.command = NBD_WRITE;
        op.data = zeroes;
        op.size = r->part < option.request_size ? r->part : option.request_size;
        count(&sides[DESTINATION], op.size, 0);
    }
    r->part = op.size;
    (void)issue(end, &op, "zeroing");
}

static int zero_file(side *s, const request *r)
{
    off_t from = (off_t)(r->offset + r->at), size = (off_t)r->part;
    int mode =
        FALLOC_FL_KEEP_SIZE | (option.allocated ? FALLOC_FL_ZERO_RANGE : FALLOC_FL_PUNCH_HOLE);
    if (s->kind == KIND_FILE && fallocate(s->fd, mode, from, size) == 0) return 0;
    for (uint64_t at = 0, step; at < r->part; at += step) {
        step = r->part - at < option.request_size ? r->part - at : option.request_size;
        if (transfer(s, zeroes, step, r->offset + r->at + at)) return -1;
    }
    return 0;
}

// Writes a part of a request, or starts to.  Returns whether the next may follow.
static int write_part(lane *l, request *r, int zero)
{
    side *to = &sides[DESTINATION];
    // Where a source ends within a block there is no whole block to zero.
    int odd = tail && r->offset + r->at + r->part == sides[SOURCE].size;
    if (to->kind == KIND_NULL) return 1;
    if (zero && (option.target_zero || (to->is_zero && !option.allocated))) return 1;
    if (to->kind != KIND_NBD)
        return zero ? zero_file(to, r) == 0
                    : transfer(to, r->memory + r->at, r->part, r->offset + r->at) == 0;
    if (zero && !odd)
        zero_nbd(l, r);
    else
        write_nbd(l, r);
    return 0;
}

static void write_next(lane *l, request *r)
{
    while (r->at < r->size && !has_failed()) {
        int zero;
        r->part = next_part(r, &zero);
        if (!write_part(l, r, zero)) return;
        r->at += r->part;
    }
    if (!has_failed()) write_done(l, r);
}

// The server refuses to zero in this way: from now on it is done in the next.
static int zeroes_otherwise(lane *l, const nbd_event *event)
{
    request *r = event->user;
    int refused =
        event->error == NBD_ENOTSUP || event->error == NBD_EINVAL || event->error == NBD_EOVERFLOW;
    if (event->command != NBD_WRITE_ZEROES || !refused) return 0;
    if (l->zeroing <= r->how) l->zeroing = r->how == ZERO_FAST ? ZERO_COMMAND : ZERO_WRITE;
    write_next(l, r);
    return 1;
}

/// Reading ///

static request *take_request(lane *l, uint64_t offset, uint64_t size)
{
    request *r = l->free;
    l->free = r->next;
    l->busy++;
    *r = (request){.memory = r->memory, .offset = offset, .size = size};
    if (sides[DESTINATION].kind == KIND_PIPE) {
        *l->tail = r;
        l->tail = &r->next;
    }
    return r;
}

static void read_done(lane *l, request *r)
{
    r->full = 1;
    if (sides[DESTINATION].kind != KIND_PIPE) write_next(l, r);
    // Replies come in any order, the bytes of a pipe do not.
    while (l->head && l->head->full && !has_failed()) {
        request *first = l->head;
        l->head = first->next;
        if (!l->head) l->tail = &l->head;
        write_next(l, first);
    }
}

static void start_read(lane *l, request *r)
{
    side *from = &sides[SOURCE];
    // NBD_NO_INIT is safe here: the bytes are written only after DONE has said
    // success, and then every one of them is the server's.
    nbd_op op = {.command = NBD_READ,
                 .flags = NBD_NO_INIT,
                 .offset = r->offset,
                 .size = r->size,
                 .buffer = r->memory,
                 .user = r};
    if (!r->zero && from->kind == KIND_NBD)
        (void)issue(&l->ends[SOURCE], &op, "read");
    else if (r->zero || transfer(from, r->memory, r->size, r->offset) == 0)
        read_done(l, r);
}

// The next request of the range: up to the next zero range, or the whole of one.
static void start_next(lane *l)
{
    uint64_t end = l->at + option.request_size - l->at % option.request_size;
    const range *next;
    request *r;
    int zero;
    while (l->zero_index < l->zero_count && l->zeroes[l->zero_index].to <= l->at)
        l->zero_index++;
    next = l->zero_index < l->zero_count ? &l->zeroes[l->zero_index] : NULL;
    zero = next && next->from <= l->at;
    if (zero)
        end = next->to;
    else if (next && next->from < end)
        end = next->from;
    if (end > l->known) end = l->known;
    r = take_request(l, l->at, end - l->at);
    r->zero = zero;
    l->at = end;
    start_read(l, r);
}

// Starts what can be started; of a file one request, so that it is sent while its bytes
// are in the cache.  Returns whether there is more to start.
static int fill(lane *l)
{
    while (sides[SOURCE].sized && l->free && !l->asking && !has_failed()) {
        if (interrupted) fail(&sides[DESTINATION], "", "interrupted");
        if (l->at == l->end && !take_range(l)) break;
        if (l->at == l->known) ask(l);
        if (l->at < l->known) start_next(l);
        if (sides[SOURCE].kind == KIND_FILE) return 1;
    }
    return 0;
}

// Takes what the pipe holds; only the last request of a pipe may stay short.
static void read_pipe(lane *l)
{
    side *from = &sides[SOURCE];
    request *r = l->filling ? l->filling : l->free;
    uint64_t had = l->filling ? r->size : 0;
    ssize_t n = read(from->fd, r->memory + had, (size_t)(option.request_size - had));
    if (n < 0 && errno != EINTR && errno != EAGAIN)
        fail_at(from, "", "read", position, strerror(errno));
    if (n < 0) return;
    l->ended = n == 0;
    if (n > 0 && !l->filling) l->filling = take_request(l, position, 0);
    position += (uint64_t)n;
    count(from, (uint64_t)n, 0);
    if (n > 0) r->size = had + (uint64_t)n;
    if (l->filling && (l->ended || r->size == option.request_size)) {
        l->filling = NULL;
        read_done(l, r);
    }
}

/// The loop ///

static void succeeded(lane *l, connection *end, const nbd_event *event)
{
    request *r = event->user;
    if (event->command == NBD_BLOCK_STATUS) {
        l->asking = 0;
        l->busy--;
        settle_known(l);
    } else if (end->side->role == SOURCE) {
        count(end->side, r->size, 0);
        read_done(l, r);
    } else {
        r->at += r->part;
        write_next(l, r);
    }
}

static void report_failure(connection *end, const nbd_event *event)
{
    const char *what = event->command == NBD_BLOCK_STATUS   ? "block status"
                       : event->command == NBD_WRITE_ZEROES ? "zeroing"
                                                            : verb(end->side);
    if (event->id != end->message_id) end->sync.message[0] = 0;
    fail(end->side, end->sync.message, "%s at offset %" PRIu64 ": %s%s%s", what,
         event->error_offset, nbd_strerror(event->error), *event->detail ? ": " : "",
         event->detail);
}

static void handle(lane *l, connection *end, const nbd_event *event)
{
    if (event->type == NBD_EVENT_TEXT && event->text_kind == NBD_TEXT_MESSAGE) {
        end->message_id = event->id;
        nbd_escape(end->sync.message, sizeof end->sync.message, event->text, event->text_size);
    } else if (event->type == NBD_EVENT_EXTENT) {
        extent(l, event);
    } else if (event->type == NBD_EVENT_DONE && !event->error) {
        succeeded(l, end, event);
    } else if (event->type == NBD_EVENT_DONE && !zeroes_otherwise(l, event)) {
        report_failure(end, event);
    } else if (event->type == NBD_EVENT_CLOSED) {
        fail(end->side, "", "%s before the end of the copy%s%s", nbd_strerror(event->error),
             *event->detail ? ": " : "", event->detail);
    }
}

// What poll(2) is to wait for.  NOW: not to wait at all.
static unsigned wants(const lane *l, const connection *end)
{
    if (end->side->kind == KIND_NBD) return nbd_wants(&end->client);
    if (end->side->role == DESTINATION || end->side->kind != KIND_PIPE || l->ended) return 0;
    return l->filling || l->free ? NBD_WANT_READ : 0;
}

static void move(lane *l, connection *end, unsigned ready)
{
    nbd_event event;
    if (end->side->kind == KIND_NBD) {
        int error = nbd_poll(&end->client, ready);
        if (error) fail(end->side, "", "%s", nbd_strerror(error));
        while (!has_failed() && nbd_next(&end->client, &event))
            handle(l, end, &event);
    } else if (ready & NBD_WANT_READ) {
        read_pipe(l);
    }
}

// Waits, unless there is something to do at once.  Every second ends the wait, since
// another thread may have failed.
static void wait_and_move(lane *l, int now)
{
    struct pollfd on[2];
    for (int k = 0; k < 2; k++) {
        const connection *end = &l->ends[k];
        unsigned want = wants(l, end);
        int fd = end->side->kind == KIND_NBD ? end->sync.io.socket : end->side->fd;
        int events = (want & NBD_WANT_READ ? POLLIN : 0) | (want & NBD_WANT_WRITE ? POLLOUT : 0);
        on[k] = (struct pollfd){events ? fd : -1, (short)events, 0};
        now |= (want & NBD_WANT_NOW) != 0;
    }
    if (!now && poll(on, 2, 1000) < 0 && errno != EINTR) fail_errno(&sides[SOURCE], "");
    if (interrupted) fail(&sides[DESTINATION], "", "interrupted");
    for (int k = 0; k < 2 && !has_failed(); k++)
        // An error or a hang-up shows in the call that reads or writes.
        move(l, &l->ends[k],
             (on[k].revents & ~POLLOUT ? NBD_WANT_READ : 0) |
                 (on[k].revents & ~POLLIN ? NBD_WANT_WRITE : 0));
}

static void *run_lane(void *argument)
{
    lane *l = argument;
    while (!has_failed()) {
        int more = fill(l), pipe = !sides[SOURCE].sized && !l->ended;
        if (!more && !pipe && l->busy == 0) break;
        wait_and_move(l, more);
    }
    return NULL;
}

static void copy_all(void)
{
    unsigned running = 1;
    started = seconds();
    draw_at = started + 0.2; // what is over by then needs no bar
    if (option.progress_fd >= 0) draw();
    while (running < lane_count && !has_failed()) {
        errno = pthread_create(&lanes[running].thread, NULL, run_lane, &lanes[running]);
        if (errno)
            fail_errno(&sides[SOURCE], "a thread: ");
        else
            running++;
    }
    run_lane(lanes);
    while (--running > 0)
        pthread_join(lanes[running].thread, NULL);
}

// A file whose source had no size ends where the last data ends: zeroes may follow there.
static void set_length(void)
{
    side *to = &sides[DESTINATION];
    if (to->emptied && !has_failed() && ftruncate(to->fd, (off_t)position)) fail_errno(to, "");
}

// One connection flushes for all: a server that offers several says that it does.
static void flush(void)
{
    side *to = &sides[DESTINATION];
    connection *end = &lanes->ends[DESTINATION];
    int error;
    if (to->kind == KIND_FILE && fsync(to->fd)) fail_errno(to, "flush: ");
    if (to->kind != KIND_NBD || !nbd_allows(&end->client, NBD_FLUSH, 0)) return;
    end->sync.timeout_ms = 0; // it takes as long as the server's disk does
    error = nbd_sync_flush(&end->sync);
    end->sync.timeout_ms = TIMEOUT_MS;
    if (error) fail(to, end->sync.message, "flush: %s", nbd_strerror(error));
}

/// The command line ///

static const char usage[] =
    "copy - copy to and from NBD servers\n"
    "\n"
    "usage: copy [OPTIONS] [--] SOURCE DESTINATION\n"
    "       copy --help | -V|--version\n"
    "\n"
    "SOURCE, DESTINATION: a file, a block device, - (standard input or output), an NBD URI,\n"
    "or [ COMMAND ARGUMENTS ... ], a server that is started and stopped (nbdkit, qemu-nbd);\n"
    "DESTINATION also null:, which throws away what was read.  Write -- before [ if COMMAND\n"
    "has options: copy -- [ qemu-nbd -f qcow2 a ] b\n" TLS_USAGE "\n"
    "  --allocated              write zeroes as allocated blocks, make no holes\n"
    "  -C N, --connections=N    connections to a server that allows several (4)\n"
    "  --destination-is-zero    it reads as zero already: skip zeroes (also --target-is-zero)\n"
    "  --direct                 open files with O_DIRECT, past the page cache\n"
    "  --flush                  make the copy stable before the end\n"
    "  --no-extents             do not ask the source for its holes\n"
    "  -p, --progress[=FD]      show progress, or write N/100 lines to FD\n"
    "  --queue-size=N           bytes in flight on a connection, at most (16777216)\n"
    "  --request-size=N         bytes of a request, a power of 2 (262144)\n"
    "  -R N, --requests=N       requests in flight on a connection (16)\n"
    "  -S N, --sparse=N         look for zeroes in blocks of N bytes, a power of 2 (4096, or\n"
    "                           the destination's preferred block); 0: do not\n"
    "  --synchronous            one request at a time, in order\n"
    "  -T N, --threads=N        threads, and so connections, at most (number of cores)\n"
    "  -v, --verbose            print what was sent and received\n"
    "\n"
    "A copy that fails says why on standard error, ends with status 1, and leaves no regular\n"
    "file that could pass for a whole one.\n";

// Returns the exit status.
static int misuse(const char *format, ...)
{
    va_list arguments;
    fputs("copy: ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputs("\nTry \"copy --help\".\n", stderr);
    return 1;
}

// Returns 0 and stores the number, or the exit status.
static int number(const char *name, uint64_t least, uint64_t most, uint64_t *value)
{
    char *end;
    *value = strtoull(optarg, &end, 10);
    if (*optarg >= '0' && *optarg <= '9' && !*end && *value >= least && *value <= most) return 0;
    return misuse("--%s=%s: no number from %" PRIu64 " to %" PRIu64, name, optarg, least, most);
}

static int power_of_2(const char *name, uint64_t least, uint64_t *value)
{
    int status = number(name, 0, REQUEST_SIZE_MAX, value);
    if (status || (*value >= least && !(*value & (*value - 1)))) return status;
    return misuse("--%s=%s: no power of 2 from %" PRIu64 " on", name, optarg, least);
}

static int parse_option(int letter)
{
    uint64_t fd = 0;
    int status = 0;
    switch (letter) {
    case 0: return 0; // the flag is set
    case 'C': return number("connections", 1, UINT32_MAX, &option.connections);
    case 'q': return number("queue-size", 0, UINT32_MAX, &option.queue_size);
    case 's': return power_of_2("request-size", 4096, &option.request_size);
    case 'R': return number("requests", 1, UINT32_MAX, &option.requests);
    case 'S':
        return strcmp(optarg, "0") ? power_of_2("sparse", 512, &option.sparse)
                                   : number("sparse", 0, 0, &option.sparse);
    case 'T': return number("threads", 0, UINT32_MAX, &option.threads);
    case 'v': option.verbose = 1; return 0;
    case 'p':
        option.progress = 1;
        if (optarg) status = number("progress", 0, 1 << 20, &fd);
        if (optarg) option.progress_fd = (int)fd;
        return status;
    default: return misuse("wrong option"); // getopt_long has said which
    }
}

// One side of the command line; [ to ] is a command.  Returns NULL if it is not whole, which
// it has told.
static char **take_side(side *s, int role, char **arguments)
{
    const char *wrong = NULL;
    s->role = role;
    s->fd = -1;
    if (!arguments) return NULL;
    if (!*arguments) return misuse("SOURCE and DESTINATION are needed"), NULL;
    s->name = *arguments;
    if (strcmp(*arguments, "[") != 0) return arguments + 1;
    s->command = ++arguments;
    while (*arguments && strcmp(*arguments, "]") != 0)
        arguments++;
    if (arguments == s->command) wrong = "[ without COMMAND";
    if (!*arguments) wrong = "[ without ]";
    if (wrong) return misuse("%s", wrong), NULL;
    *arguments = NULL; // execvp's end
    s->name = *s->command;
    return arguments + 1;
}

// Returns the exit status if the program is to end here, else -1.
static int parse_options(int argc, char **argv)
{
    const struct option options[] = {{"allocated", no_argument, &option.allocated, 1},
                                     {"connections", required_argument, NULL, 'C'},
                                     {"destination-is-zero", no_argument, &option.target_zero, 1},
                                     {"target-is-zero", no_argument, &option.target_zero, 1},
                                     {"direct", no_argument, &option.direct, 1},
                                     {"flush", no_argument, &option.flush, 1},
                                     {"no-extents", no_argument, &option.no_extents, 1},
                                     {"progress", optional_argument, NULL, 'p'},
                                     {"queue-size", required_argument, NULL, 'q'},
                                     {"request-size", required_argument, NULL, 's'},
                                     {"requests", required_argument, NULL, 'R'},
                                     {"sparse", required_argument, NULL, 'S'},
                                     {"synchronous", no_argument, &option.synchronous, 1},
                                     {"threads", required_argument, NULL, 'T'},
                                     {"verbose", no_argument, NULL, 'v'},
                                     {"help", no_argument, NULL, 'h'},
                                     {"version", no_argument, NULL, 'V'},
                                     {NULL, 0, NULL, 0}};
    char **rest;
    int letter, status = 0;
    while (!status && (letter = getopt_long(argc, argv, "C:pR:S:T:vV", options, NULL)) != -1) {
        if (letter == 'h') return fputs(usage, stdout) < 0 || fflush(stdout);
        if (letter == 'V')
            return printf("copy (nbd.h) %d.%d.%d\n", NBD_VERSION_MAJOR, NBD_VERSION_MINOR,
                          NBD_VERSION_PATCH) < 0 ||
                   fflush(stdout);
        status = parse_option(letter);
    }
    if (status) return status;
    rest = take_side(&sides[SOURCE], SOURCE, argv + optind);
    rest = take_side(&sides[DESTINATION], DESTINATION, rest);
    if (!rest) return 1;
    if (*rest) return misuse("%s: one name too many", *rest);
    if (option.synchronous) option.requests = 1;
    if (option.requests > NBD_SLOTS_MAX - 1) option.requests = NBD_SLOTS_MAX - 1;
    if (option.connections > LANES_MAX) option.connections = LANES_MAX;
    return -1;
}

// While bytes are copied there is something to be cleaned up; before and after it a signal
// ends the program, but not without its servers.
static void stop(int number)
{
    interrupted = 1;
    if (copying) return;
    for (int i = 0; i < 2; i++)
        if (sides[i].server > 0) kill(sides[i].server, SIGTERM);
    signal(number, SIG_DFL);
    raise(number);
}

static void handle_signals(void)
{
    struct sigaction action, was;
    memset(&action, 0, sizeof action);
    action.sa_handler = stop;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, &was);
    if (was.sa_handler == SIG_IGN) sigaction(SIGHUP, &was, NULL); // nohup(1)
    // A reader that went away and a limit on the size of files are errors of write(2).
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

static void run(void)
{
    // The destination comes last: no error of the source may harm it.
    if (open_side(&sides[SOURCE]) || open_side(&sides[DESTINATION]) || check_sides()) return;
    choose_counts();
    if (prepare_lanes() || empty_file()) return;
    copy_all();
    if (!sides[SOURCE].sized) set_length();
    if (interrupted) fail(&sides[DESTINATION], "", "interrupted");
    copying = has_failed();
    if (!has_failed() && option.flush) flush();
    if (!has_failed() && option.progress) print_summary();
    if (!has_failed() && option.verbose) {
        print_counters(&sides[SOURCE]);
        print_counters(&sides[DESTINATION]);
    }
}

int main(int argc, char **argv)
{
    int status = parse_options(argc, argv);
    if (status >= 0) return status;
    handle_signals();
    lanes = calloc(LANES_MAX, sizeof *lanes);
    if (!lanes) return misuse("%s", strerror(ENOMEM));
    run();
    for (unsigned i = 0; i < lane_count; i++)
        free_lane(&lanes[i]);
    close_side(&sides[SOURCE]);
    close_side(&sides[DESTINATION]);
    free(zeroes);
    free(tail);
    free(lanes);
    return has_failed();
}
