// server.c - a small NBD server for tests and for the demo.
//
//     gcc -std=c99 -O2 -o server tests/server.c
//
// One process, one poll(2) loop, several clients, one export.  It shares no code with the client
// library, so that a misreading of the specification cannot hide on both sides.
//
// A client costs at most its input buffer and OUT_HIGH + one reply: nothing more is parsed or
// answered while that much output waits.  No client can hold the loop: each turn takes in one
// recv and hands out at most OUT_HIGH + one reply.  Only the disk itself can block.

#define _GNU_SOURCE // SEEK_HOLE and fallocate, where they exist

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

// ---- The protocol ------------------------------------------------------------------------------

#define NBDMAGIC UINT64_C(0x4e42444d41474943)
#define CLISERV_MAGIC UINT64_C(0x00420281861253)
#define IHAVEOPT UINT64_C(0x49484156454F5054)
#define OPTION_REPLY_MAGIC UINT64_C(0x3e889045565a9)
#define REQUEST_MAGIC 0x25609513u
#define SIMPLE_REPLY_MAGIC 0x67446698u
#define STRUCTURED_REPLY_MAGIC 0x668e33efu

#define REP_ERR_UNSUP 0x80000001u
#define REP_ERR_INVALID 0x80000003u
#define REP_ERR_UNKNOWN 0x80000006u
#define REP_ERR_TOO_BIG 0x80000009u

enum { FLAG_FIXED_NEWSTYLE = 1, FLAG_NO_ZEROES = 2 };

enum {
    FLAG_HAS_FLAGS = 1 << 0,
    FLAG_READ_ONLY = 1 << 1,
    FLAG_SEND_FLUSH = 1 << 2,
    FLAG_SEND_FUA = 1 << 3,
    FLAG_SEND_TRIM = 1 << 5,
    FLAG_SEND_WRITE_ZEROES = 1 << 6,
    FLAG_SEND_DF = 1 << 7,
    FLAG_CAN_MULTI_CONN = 1 << 8,
    FLAG_SEND_CACHE = 1 << 10,
    FLAG_SEND_FAST_ZERO = 1 << 11
};

enum {
    OPT_EXPORT_NAME = 1,
    OPT_ABORT = 2,
    OPT_LIST = 3,
    OPT_INFO = 6,
    OPT_GO = 7,
    OPT_STRUCTURED_REPLY = 8,
    OPT_LIST_META_CONTEXT = 9,
    OPT_SET_META_CONTEXT = 10
};

enum { REP_ACK = 1, REP_SERVER = 2, REP_INFO = 3, REP_META_CONTEXT = 4 };
enum { INFO_EXPORT = 0, INFO_NAME = 1, INFO_DESCRIPTION = 2, INFO_BLOCK_SIZE = 3 };

enum {
    CMD_READ = 0,
    CMD_WRITE = 1,
    CMD_DISC = 2,
    CMD_FLUSH = 3,
    CMD_TRIM = 4,
    CMD_CACHE = 5,
    CMD_WRITE_ZEROES = 6,
    CMD_BLOCK_STATUS = 7
};

enum {
    CMD_FLAG_FUA = 1,
    CMD_FLAG_NO_HOLE = 2,
    CMD_FLAG_DF = 4,
    CMD_FLAG_REQ_ONE = 8,
    CMD_FLAG_FAST_ZERO = 16
};

enum { REPLY_FLAG_DONE = 1 };

enum {
    REPLY_TYPE_NONE = 0,
    REPLY_TYPE_OFFSET_DATA = 1,
    REPLY_TYPE_OFFSET_HOLE = 2,
    REPLY_TYPE_BLOCK_STATUS = 5,
    REPLY_TYPE_ERROR = 0x8001
};

enum { STATE_HOLE = 1, STATE_ZERO = 2 };

// Host values of errno may differ from these.
enum {
    NBD_EPERM = 1,
    NBD_EIO = 5,
    NBD_ENOMEM = 12,
    NBD_EINVAL = 22,
    NBD_ENOSPC = 28,
    NBD_EOVERFLOW = 75,
    NBD_ENOTSUP = 95
};

// ---- Limits ------------------------------------------------------------------------------------

enum {
    MAX_CLIENTS = 64,
    MAX_JOBS = 256,
    MAX_STRING = 4096,      // of the specification
    MAX_OPTION = 64 << 10,  // option data above it is skipped and refused
    MAX_PAYLOAD = 32 << 20, // the specification's default
    MAX_EXTENTS = 64 << 10, // in one block status reply
    IN_SIZE = 256 << 10,    // holds any option whole
    OUT_HIGH = 1 << 20,
    OPTION_HEADER = 16,
    REQUEST_HEADER = 28,
    SIMPLE_HEADER = 16,
    CHUNK_HEADER = 20,
    DF_ALWAYS = 64 << 10, // a DF read up to this size must work
    GRANULE = 4096,       // holes in memory have this grain
    DEMO_BLOCK = 64 << 10
};

// One letter for each 64 KiB of the demo image, repeated: data or hole.
static const char demo_pattern[] = "DDHDDDHHDHDDHHHH";

// ---- Configuration -----------------------------------------------------------------------------

static struct {
    const char *unix_path;
    const char *file;
    const char *save;
    const char *export_name; // NULL: any name is accepted
    const char *description;
    uint64_t size;
    uint64_t random; // state of the shuffle, never 0
    uint32_t min_block, preferred_block, max_payload, chunk;
    int port; // -1: none
    bool memory, demo, read_only, oldstyle, one, shuffle;
    bool no_fixed, no_go, no_structured, no_zeroes;
} config = {
    .port = -1,
    .min_block = 1,
    .preferred_block = 4096,
    .max_payload = MAX_PAYLOAD,
    .chunk = UINT32_MAX,
    .no_zeroes = true,
};

static void die(const char *format, ...)
{
    va_list arguments;

    fprintf(stderr, "server: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(EXIT_FAILURE);
}

static uint64_t xorshift(uint64_t x)
{
    x ^= x << 13;
    x ^= x >> 7;
    return x ^ x << 17;
}

static uint32_t min_u32(uint64_t a, uint32_t b)
{
    return a < b ? (uint32_t)a : b;
}

// ---- Big-endian bytes --------------------------------------------------------------------------

static uint32_t load_u16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

static uint32_t load_u32(const uint8_t *p)
{
    return load_u16(p) << 16 | load_u16(p + 2);
}

static uint64_t load_u64(const uint8_t *p)
{
    return (uint64_t)load_u32(p) << 32 | load_u32(p + 4);
}

static void store_be(uint8_t *p, uint64_t value, size_t size)
{
    while (size > 0) {
        p[--size] = (uint8_t)value;
        value >>= 8;
    }
}

// A piece of a message; reading from it never leaves it.
struct span {
    const uint8_t *data;
    size_t size;
};

static bool span_take(struct span *from, size_t size, struct span *piece)
{
    if (size > from->size) return false;
    piece->data = from->data;
    piece->size = size;
    from->data += size;
    from->size -= size;
    return true;
}

static bool span_u16(struct span *from, uint32_t *value)
{
    struct span piece;

    if (!span_take(from, 2, &piece)) return false;
    *value = load_u16(piece.data);
    return true;
}

static bool span_u32(struct span *from, uint32_t *value)
{
    struct span piece;

    if (!span_take(from, 4, &piece)) return false;
    *value = load_u32(piece.data);
    return true;
}

// A string with its length before it, as the specification allows strings to be.
static bool span_string(struct span *from, struct span *text)
{
    uint32_t size;

    return span_u32(from, &size) && size <= MAX_STRING && span_take(from, size, text) &&
           (size == 0 || !memchr(text->data, 0, size));
}

static bool span_equals(struct span span, const char *text)
{
    return span.size == strlen(text) && memcmp(span.data, text, span.size) == 0;
}

// ---- The image: a file, or memory with a map ---------------------------------------------------

static struct {
    uint64_t size;
    int fd; // -1: memory
    uint8_t *memory;
    uint8_t *states; // the base:allocation flags of each granule
} image = {.fd = -1};

// All image functions return an error of the protocol, 0 for success.
static uint32_t protocol_error(int error)
{
    switch (error) {
    case EPERM:
    case EACCES:
    case EROFS: return NBD_EPERM;
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return NBD_ENOSPC;
    case ENOMEM: return NBD_ENOMEM;
    default: return NBD_EIO;
    }
}

static uint32_t image_read(uint8_t *buffer, uint64_t offset, size_t size)
{
    if (image.fd < 0) {
        memcpy(buffer, image.memory + offset, size);
        return 0;
    }
    while (size > 0) {
        ssize_t n = pread(image.fd, buffer, size, (off_t)offset);

        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) // 0: the file was cut while being served
            return n < 0 ? protocol_error(errno) : NBD_EIO;
        buffer += n;
        offset += (uint64_t)n;
        size -= (size_t)n;
    }
    return 0;
}

static uint32_t file_write(const uint8_t *data, uint64_t offset, size_t size)
{
    while (size > 0) {
        ssize_t n = pwrite(image.fd, data, size, (off_t)offset);

        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return protocol_error(errno);
        data += n;
        offset += (uint64_t)n;
        size -= (size_t)n;
    }
    return 0;
}

static uint32_t image_write(const uint8_t *data, uint64_t offset, size_t size)
{
    size_t first = (size_t)(offset / GRANULE);

    if (image.fd >= 0) return file_write(data, offset, size);
    memcpy(image.memory + offset, data, size);
    memset(image.states + first, 0, (size_t)((offset + size - 1) / GRANULE) - first + 1);
    return 0;
}

// Granules that are covered whole get the state; a hole that is only touched does not stay a hole
// if it is to be provisioned.
static void memory_zero(uint64_t offset, uint64_t size, bool no_hole)
{
    uint64_t end = offset + size;

    memset(image.memory + offset, 0, (size_t)size);
    for (uint64_t at = offset - offset % GRANULE; at < end; at += GRANULE) {
        uint8_t *state = &image.states[at / GRANULE];
        bool whole = at >= offset && (end - at >= GRANULE || end == image.size);

        if (whole)
            *state = no_hole ? STATE_ZERO : STATE_HOLE | STATE_ZERO;
        else if (no_hole && *state != 0)
            *state = STATE_ZERO;
    }
}

// Lets the file system do it; NBD_ENOTSUP where it cannot.
static uint32_t file_zero_fast(uint64_t offset, uint64_t size, bool no_hole)
{
#if defined(FALLOC_FL_PUNCH_HOLE) && defined(FALLOC_FL_ZERO_RANGE)
    int punch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;

    if (!fallocate(image.fd, no_hole ? FALLOC_FL_ZERO_RANGE : punch, (off_t)offset, (off_t)size))
        return 0;
    // EINVAL: a block device whose own blocks are larger than the request.
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) return NBD_ENOTSUP;
    return protocol_error(errno);
#else
    (void)offset;
    (void)size;
    (void)no_hole;
    return NBD_ENOTSUP;
#endif
}

static uint32_t file_zero_slowly(uint64_t offset, uint64_t size)
{
    static const uint8_t zeroes[64 << 10];
    uint32_t error = 0;

    while (size > 0 && !error) {
        uint32_t n = min_u32(size, sizeof zeroes);

        error = file_write(zeroes, offset, n);
        offset += n;
        size -= n;
    }
    return error;
}

static uint32_t image_zero(uint64_t offset, uint64_t size, unsigned flags)
{
    bool no_hole = flags & CMD_FLAG_NO_HOLE;
    uint32_t error;

    if (size == 0) return 0;
    if (image.fd < 0) {
        memory_zero(offset, size, no_hole);
        return 0;
    }
    error = file_zero_fast(offset, size, no_hole);
    if (error == NBD_ENOTSUP && !(flags & CMD_FLAG_FAST_ZERO))
        error = file_zero_slowly(offset, size);
    return error;
}

// Only a hint: what cannot be discarded is left as it is.
static uint32_t image_trim(uint64_t offset, uint64_t size)
{
    uint32_t error = image_zero(offset, size, CMD_FLAG_FAST_ZERO);

    return error == NBD_ENOTSUP ? 0 : error;
}

static uint32_t image_flush(void)
{
    return image.fd >= 0 && fsync(image.fd) ? protocol_error(errno) : 0;
}

static void image_cache(uint64_t offset, uint64_t size)
{
    if (image.fd >= 0) {
        // A failing hint changes nothing for the client.
        (void)posix_fadvise(image.fd, (off_t)offset, (off_t)size, POSIX_FADV_WILLNEED);
    }
}

static uint64_t memory_run(uint64_t offset, uint64_t limit, unsigned *state)
{
    uint64_t at = offset - offset % GRANULE;

    *state = image.states[at / GRANULE];
    do {
        at += GRANULE;
    } while (at < limit && image.states[at / GRANULE] == *state);
    return at;
}

static uint64_t file_run(uint64_t offset, uint64_t limit, unsigned *state)
{
    *state = 0;
#if defined(SEEK_HOLE) && defined(SEEK_DATA)
    off_t data = lseek(image.fd, (off_t)offset, SEEK_DATA);
    off_t end = limit > INT64_MAX ? -1 : (off_t)limit;

    if (data < 0 && errno == ENXIO) {
        *state = STATE_HOLE | STATE_ZERO;
    } else if (data > (off_t)offset) {
        *state = STATE_HOLE | STATE_ZERO;
        end = data;
    } else if (data == (off_t)offset) {
        end = lseek(image.fd, (off_t)offset, SEEK_HOLE);
    }
    return end > (off_t)offset ? (uint64_t)end : limit;
#else
    (void)offset;
    return limit;
#endif
}

// The state at the offset and how far it goes, at most `size`, which is not 0.  Edges are moved to
// the minimum block size, always in favour of data, which is never wrong to report.
static uint32_t image_run(uint64_t offset, uint32_t size, unsigned *state)
{
    uint64_t limit = offset + size;
    uint64_t end = image.fd < 0 ? memory_run(offset, limit, state) : file_run(offset, limit, state);
    uint64_t beyond = end % config.min_block;

    if (beyond != 0 && end < limit) {
        end -= beyond;
        if (*state == 0 || end <= offset) {
            *state = 0;
            end += config.min_block;
        }
    }
    return (uint32_t)((end < limit ? end : limit) - offset);
}

static void image_open_file(void)
{
    off_t end;

    image.fd = open(config.file, (config.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
    if (image.fd < 0) die("%s: %s", config.file, strerror(errno));
    end = lseek(image.fd, 0, SEEK_END); // also right for block devices
    if (end < 0) die("%s: %s", config.file, strerror(errno));
    image.size = (uint64_t)end;
}

static void image_open_memory(void)
{
    size_t granules = (size_t)(config.size / GRANULE + 1);

    image.size = config.size;
    image.memory = config.size < SIZE_MAX ? calloc(1, (size_t)config.size + 1) : NULL;
    image.states = malloc(granules);
    if (!image.memory || !image.states)
        die("no memory for an image of %" PRIu64 " bytes", config.size);
    memset(image.states, STATE_HOLE | STATE_ZERO, granules);
}

// The content of a block depends on its number only.
static void demo_fill_block(uint64_t block)
{
    uint8_t bytes[DEMO_BLOCK];
    uint64_t offset = block * DEMO_BLOCK;
    uint64_t x = (block + 1) * UINT64_C(0x9e3779b97f4a7c15);

    for (size_t i = 0; i < sizeof bytes; i += 8) {
        x = xorshift(x);
        store_be(bytes + i, x, 8);
    }
    image_write(bytes, offset, min_u32(image.size - offset, DEMO_BLOCK));
}

static void demo_fill(void)
{
    for (uint64_t block = 0; block * DEMO_BLOCK < image.size; block++)
        if (demo_pattern[block % (sizeof demo_pattern - 1)] == 'D') demo_fill_block(block);
}

// The reference that a copy can be compared with, sparse like the image.
static void image_save(void)
{
    int source = image.fd;
    unsigned state;
    uint32_t error = 0;
    uint32_t run;
    int target = open(config.save, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

    if (target < 0 || ftruncate(target, (off_t)image.size))
        die("%s: %s", config.save, strerror(errno));
    for (uint64_t at = 0; at < image.size && !error; at += run) {
        run = image_run(at, min_u32(image.size - at, MAX_PAYLOAD), &state);
        if (!(state & STATE_ZERO)) {
            image.fd = target;
            error = file_write(image.memory + at, at, run);
            image.fd = source;
        }
    }
    if (close(target) || error) die("%s: cannot write the image", config.save);
}

static void image_open(void)
{
    if (config.file) {
        image_open_file();
        return;
    }
    image_open_memory();
    if (config.demo) demo_fill();
    if (config.save) image_save();
}

static void image_close(void)
{
    if (image.fd >= 0 && close(image.fd)) die("%s: %s", config.file, strerror(errno));
    free(image.memory);
    free(image.states);
}

// ---- Clients and their output ------------------------------------------------------------------

enum phase { PHASE_FLAGS, PHASE_OPTION, PHASE_SKIP, PHASE_REQUEST, PHASE_PAYLOAD };

// A request that is still to be answered.  Offset and length shrink while chunks go out.
struct job {
    uint64_t cookie;
    uint64_t offset;
    uint32_t length;
    uint32_t error;
    unsigned type;
    unsigned flags;
    const char *text; // beside the error
};

struct client {
    int fd;
    enum phase phase;
    bool no_zeroes, structured, allocation;
    bool leaving;     // said good-bye: answer what is queued, then close
    bool ended;       // the stream ended
    bool broken;      // broke a rule, or the connection failed: close at once
    bool starved;     // nothing more can be parsed without more input
    uint32_t option;  // being skipped
    uint32_t skip;    // bytes of it to come
    struct job write; // its payload is arriving
    struct job jobs[MAX_JOBS];
    size_t job_count;
    uint8_t *out;
    size_t out_start, out_end, out_capacity;
    size_t in_start, in_end;
    size_t context_name_size; // of the export that base:allocation was selected for
    uint8_t context_name[MAX_STRING];
    uint8_t in[IN_SIZE];
};

static size_t out_pending(const struct client *c)
{
    return c->out_end - c->out_start;
}

static bool out_grow(struct client *c, size_t size)
{
    size_t pending = out_pending(c);
    size_t capacity = (pending + size) * 2;
    uint8_t *bigger = malloc(capacity);

    if (!bigger) return false;
    if (pending > 0) memcpy(bigger, c->out + c->out_start, pending);
    free(c->out);
    c->out = bigger;
    c->out_capacity = capacity;
    return true;
}

// Room behind what is queued; NULL breaks the client.
static uint8_t *out_reserve(struct client *c, size_t size)
{
    size_t pending = out_pending(c);

    if (c->out_capacity - c->out_end >= size) return c->out + c->out_end;
    if (c->out_capacity - pending >= size) {
        memmove(c->out, c->out + c->out_start, pending);
    } else if (!out_grow(c, size)) {
        c->broken = true;
        return NULL;
    }
    c->out_start = 0;
    c->out_end = pending;
    return c->out + c->out_end;
}

static void put(struct client *c, uint64_t value, size_t size)
{
    uint8_t *room = out_reserve(c, size);

    if (room) {
        store_be(room, value, size);
        c->out_end += size;
    }
}

static void put_bytes(struct client *c, const void *data, size_t size)
{
    uint8_t *room = size > 0 ? out_reserve(c, size) : NULL;

    if (room) {
        memcpy(room, data, size);
        c->out_end += size;
    }
}

static void put_zeroes(struct client *c, size_t size)
{
    while (size-- > 0)
        put(c, 0, 1);
}

static void out_send(struct client *c)
{
    ssize_t n;

    if (out_pending(c) == 0 || c->broken) return;
    n = send(c->fd, c->out + c->out_start, out_pending(c), MSG_NOSIGNAL);
    if (n >= 0)
        c->out_start += (size_t)n;
    else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        c->broken = true;
    if (out_pending(c) == 0) {
        c->out_start = 0;
        c->out_end = 0;
    }
}

// ---- Handshake ---------------------------------------------------------------------------------

static unsigned handshake_flags(void)
{
    return (config.no_fixed ? 0u : FLAG_FIXED_NEWSTYLE) | (config.no_zeroes ? FLAG_NO_ZEROES : 0u);
}

static unsigned transmission_flags(const struct client *c)
{
    unsigned flags =
        FLAG_HAS_FLAGS | FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_CAN_MULTI_CONN | FLAG_SEND_CACHE;

    if (config.read_only)
        flags |= FLAG_READ_ONLY;
    else
        flags |= FLAG_SEND_TRIM | FLAG_SEND_WRITE_ZEROES | FLAG_SEND_FAST_ZERO;
    return c->structured ? flags | FLAG_SEND_DF : flags;
}

static void greet(struct client *c)
{
    put(c, NBDMAGIC, 8);
    if (config.oldstyle) {
        put(c, CLISERV_MAGIC, 8);
        put(c, image.size, 8);
        put(c, transmission_flags(c), 4);
        put_zeroes(c, 124);
        c->phase = PHASE_REQUEST;
        return;
    }
    put(c, IHAVEOPT, 8);
    put(c, handshake_flags(), 2);
}

static void put_option_reply(struct client *c, uint32_t option, uint32_t type, size_t size)
{
    put(c, OPTION_REPLY_MAGIC, 8);
    put(c, option, 4);
    put(c, type, 4);
    put(c, size, 4);
}

static void put_ack(struct client *c, uint32_t option)
{
    put_option_reply(c, option, REP_ACK, 0);
}

static void put_option_error(struct client *c, uint32_t option, uint32_t type, const char *text)
{
    put_option_reply(c, option, type, strlen(text));
    put_bytes(c, text, strlen(text));
}

static bool name_is_known(struct span name)
{
    return !config.export_name || span_equals(name, config.export_name);
}

// A context counts only for the export that it was selected for.
static void enter_transmission(struct client *c, struct span name)
{
    c->allocation = c->allocation && name.size == c->context_name_size &&
                    memcmp(name.data, c->context_name, name.size) == 0;
    c->phase = PHASE_REQUEST;
}

static void option_export_name(struct client *c, struct span name)
{
    if (name.size > MAX_STRING || !name_is_known(name)) {
        c->broken = true;
        return;
    }
    put(c, image.size, 8);
    put(c, transmission_flags(c), 2);
    put_zeroes(c, c->no_zeroes ? 0 : 124);
    enter_transmission(c, name);
}

static void option_list(struct client *c, struct span data)
{
    const char *name = config.export_name ? config.export_name : "";
    const char *description = config.description ? config.description : "";

    if (data.size > 0) {
        put_option_error(c, OPT_LIST, REP_ERR_INVALID, "LIST takes no data");
        return;
    }
    put_option_reply(c, OPT_LIST, REP_SERVER, 4 + strlen(name) + strlen(description));
    put(c, strlen(name), 4);
    put_bytes(c, name, strlen(name));
    put_bytes(c, description, strlen(description));
    put_ack(c, OPT_LIST);
}

static void put_info(struct client *c, uint32_t option, unsigned type, size_t size)
{
    put_option_reply(c, option, REP_INFO, 2 + size);
    put(c, type, 2);
}

static void put_infos(struct client *c, uint32_t option, struct span name, unsigned asked)
{
    if (asked & 1u << INFO_NAME) {
        put_info(c, option, INFO_NAME, name.size);
        put_bytes(c, name.data, name.size);
    }
    if (asked & 1u << INFO_DESCRIPTION && config.description) {
        put_info(c, option, INFO_DESCRIPTION, strlen(config.description));
        put_bytes(c, config.description, strlen(config.description));
    }
    if (asked & 1u << INFO_BLOCK_SIZE) {
        put_info(c, option, INFO_BLOCK_SIZE, 12);
        put(c, config.min_block, 4);
        put(c, config.preferred_block, 4);
        put(c, config.max_payload, 4);
    }
    put_info(c, option, INFO_EXPORT, 10);
    put(c, image.size, 8);
    put(c, transmission_flags(c), 2);
}

// The infos asked for as a bit set; false if the data is not made as it must be.
static bool parse_infos(struct span *data, unsigned *asked)
{
    uint32_t count, info;

    if (!span_u16(data, &count) || data->size != (size_t)count * 2) return false;
    for (*asked = 0; span_u16(data, &info);)
        *asked |= info <= INFO_BLOCK_SIZE ? 1u << info : 0;
    return true;
}

static void option_go(struct client *c, uint32_t option, struct span data)
{
    struct span name;
    unsigned asked;

    if (config.no_go) {
        put_option_error(c, option, REP_ERR_UNSUP, "INFO and GO are switched off");
    } else if (!span_string(&data, &name) || !parse_infos(&data, &asked)) {
        put_option_error(c, option, REP_ERR_INVALID, "malformed INFO or GO");
    } else if (!name_is_known(name)) {
        put_option_error(c, option, REP_ERR_UNKNOWN, "no export of that name");
    } else {
        put_infos(c, option, name, asked);
        put_ack(c, option);
        if (option == OPT_GO) enter_transmission(c, name);
    }
}

static void option_structured_reply(struct client *c, struct span data)
{
    if (config.no_structured) {
        put_option_error(c, OPT_STRUCTURED_REPLY, REP_ERR_UNSUP,
                         "structured replies are switched off");
    } else if (data.size > 0) {
        put_option_error(c, OPT_STRUCTURED_REPLY, REP_ERR_INVALID,
                         "STRUCTURED_REPLY takes no data");
    } else {
        c->structured = true;
        put_ack(c, OPT_STRUCTURED_REPLY);
    }
}

// Whether the queries find base:allocation; false as result if they are not made as they must be.
static bool parse_queries(uint32_t option, struct span *data, bool *found)
{
    struct span query;
    uint32_t count;

    if (!span_u32(data, &count)) return false;
    *found = count == 0 && option == OPT_LIST_META_CONTEXT;
    for (; count > 0; count--) {
        if (!span_string(data, &query)) return false;
        *found = *found || span_equals(query, "base:allocation") ||
                 (option == OPT_LIST_META_CONTEXT && span_equals(query, "base:"));
    }
    return data->size == 0;
}

static void select_allocation(struct client *c, struct span name)
{
    c->allocation = true;
    c->context_name_size = name.size;
    memcpy(c->context_name, name.data, name.size);
}

static void option_meta_context(struct client *c, uint32_t option, struct span data)
{
    static const char context[] = "base:allocation";
    bool set = option == OPT_SET_META_CONTEXT;
    bool found = false;
    struct span name;

    // Also a failing SET drops what was selected before.
    c->allocation = c->allocation && !set;
    if (!c->structured) {
        put_option_error(c, option, REP_ERR_INVALID, "structured replies come first");
    } else if (!span_string(&data, &name) || !parse_queries(option, &data, &found)) {
        put_option_error(c, option, REP_ERR_INVALID, "malformed metadata query");
    } else if (!name_is_known(name)) {
        put_option_error(c, option, REP_ERR_UNKNOWN, "no export of that name");
    } else {
        if (found) {
            put_option_reply(c, option, REP_META_CONTEXT, 4 + strlen(context));
            put(c, set, 4);
            put_bytes(c, context, strlen(context));
        }
        if (found && set) select_allocation(c, name);
        put_ack(c, option);
    }
}

static void handle_option(struct client *c, uint32_t option, struct span data)
{
    // Plain newstyle knows no way to refuse an option.
    if (config.no_fixed && option != OPT_EXPORT_NAME) {
        c->broken = true;
        return;
    }
    switch (option) {
    case OPT_EXPORT_NAME: option_export_name(c, data); break;
    case OPT_ABORT:
        put_ack(c, option);
        c->leaving = true;
        break;
    case OPT_LIST: option_list(c, data); break;
    case OPT_INFO:
    case OPT_GO: option_go(c, option, data); break;
    case OPT_STRUCTURED_REPLY: option_structured_reply(c, data); break;
    case OPT_LIST_META_CONTEXT:
    case OPT_SET_META_CONTEXT: option_meta_context(c, option, data); break;
    default: put_option_error(c, option, REP_ERR_UNSUP, "this server does not know the option");
    }
}

// ---- Answering requests ------------------------------------------------------------------------

static void put_simple(struct client *c, const struct job *job, uint32_t error)
{
    put(c, SIMPLE_REPLY_MAGIC, 4);
    put(c, error, 4);
    put(c, job->cookie, 8);
}

static void put_chunk(struct client *c, const struct job *job, bool done, unsigned type,
                      size_t length)
{
    put(c, STRUCTURED_REPLY_MAGIC, 4);
    put(c, done ? REPLY_FLAG_DONE : 0, 2);
    put(c, type, 2);
    put(c, job->cookie, 8);
    put(c, length, 4);
}

static void put_error(struct client *c, const struct job *job)
{
    size_t size = strlen(job->text);

    if (!c->structured) {
        put_simple(c, job, job->error);
        return;
    }
    put_chunk(c, job, true, REPLY_TYPE_ERROR, 6 + size);
    put(c, job->error, 4);
    put(c, size, 2);
    put_bytes(c, job->text, size);
}

static void job_fail(struct job *job, uint32_t error, const char *text)
{
    job->error = error;
    job->text = text;
}

static void job_result(struct job *job, uint32_t error)
{
    if (error && !job->error)
        job_fail(job, error, error == NBD_ENOTSUP ? "that would not be fast" : "the image failed");
}

// Reads behind the room for a header of the given size.  The header is written only afterwards:
// nothing promises data that could not be read.
static bool read_ahead_of_header(struct client *c, struct job *job, size_t header, uint32_t size)
{
    uint8_t *room = out_reserve(c, header + size);

    if (!room) return false;
    job_result(job, image_read(room + header, job->offset, size));
    if (job->error) put_error(c, job);
    return !job->error;
}

static void answer_simple_read(struct client *c, struct job *job)
{
    if (read_ahead_of_header(c, job, SIMPLE_HEADER, job->length)) {
        put_simple(c, job, 0);
        c->out_end += job->length;
    }
}

static bool answer_data_chunk(struct client *c, struct job *job, uint32_t size)
{
    if (!read_ahead_of_header(c, job, CHUNK_HEADER + 8, size)) return false;
    put_chunk(c, job, size == job->length, REPLY_TYPE_OFFSET_DATA, 8 + (size_t)size);
    put(c, job->offset, 8);
    c->out_end += size;
    return true;
}

static void answer_hole_chunk(struct client *c, const struct job *job, uint32_t size)
{
    put_chunk(c, job, size == job->length, REPLY_TYPE_OFFSET_HOLE, 12);
    put(c, job->offset, 8);
    put(c, size, 4);
}

// One chunk of a structured reply; true if it was the last.
static bool answer_structured_read(struct client *c, struct job *job)
{
    unsigned state = 0;
    uint32_t size = job->length;

    if (size == 0) {
        put_chunk(c, job, true, REPLY_TYPE_NONE, 0);
        return true;
    }
    if (!(job->flags & CMD_FLAG_DF)) {
        size = image_run(job->offset, job->length, &state);
        size = state & STATE_ZERO ? size : min_u32(size, config.chunk);
    }
    if (state & STATE_ZERO)
        answer_hole_chunk(c, job, size);
    else if (!answer_data_chunk(c, job, size))
        return true;
    job->offset += size;
    job->length -= size;
    return job->length == 0;
}

// Covers as much of the request as MAX_EXTENTS allows; the specification lets a reply be short.
static void answer_block_status(struct client *c, const struct job *job)
{
    unsigned limit = job->flags & CMD_FLAG_REQ_ONE ? 1 : MAX_EXTENTS;
    uint8_t *room = out_reserve(c, CHUNK_HEADER + 4 + (size_t)limit * 8);
    uint32_t done = 0;
    unsigned count = 0;

    if (!room) return;
    for (; done < job->length && count < limit; count++) {
        unsigned state;
        uint32_t size = image_run(job->offset + done, job->length - done, &state);

        store_be(room + CHUNK_HEADER + 4 + count * 8, size, 4);
        store_be(room + CHUNK_HEADER + 8 + count * 8, state, 4);
        done += size;
    }
    put_chunk(c, job, true, REPLY_TYPE_BLOCK_STATUS, 4 + (size_t)count * 8);
    put(c, 1, 4);
    c->out_end += (size_t)count * 8;
}

// True if the reply is complete.
static bool answer(struct client *c, struct job *job)
{
    if (job->error)
        put_error(c, job);
    else if (job->type == CMD_READ && c->structured)
        return answer_structured_read(c, job);
    else if (job->type == CMD_READ)
        answer_simple_read(c, job);
    else if (job->type == CMD_BLOCK_STATUS)
        answer_block_status(c, job);
    else
        put_simple(c, job, 0);
    return true;
}

static size_t pick_job(const struct client *c)
{
    if (!config.shuffle) return 0;
    config.random = xorshift(config.random);
    return (size_t)(config.random % c->job_count);
}

static void answer_jobs(struct client *c)
{
    while (c->job_count > 0 && out_pending(c) < OUT_HIGH && !c->broken) {
        size_t i = pick_job(c);

        if (answer(c, &c->jobs[i])) {
            c->job_count--;
            memmove(&c->jobs[i], &c->jobs[i + 1], (c->job_count - i) * sizeof c->jobs[0]);
        }
    }
}

// ---- Taking requests ---------------------------------------------------------------------------

static unsigned valid_flags(const struct client *c, unsigned type)
{
    switch (type) {
    case CMD_READ: return CMD_FLAG_FUA | (c->structured ? CMD_FLAG_DF : 0u);
    case CMD_WRITE_ZEROES: return CMD_FLAG_FUA | CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO;
    case CMD_BLOCK_STATUS: return CMD_FLAG_FUA | CMD_FLAG_REQ_ONE;
    default: return CMD_FLAG_FUA;
    }
}

static bool modifies(unsigned type)
{
    return type == CMD_WRITE || type == CMD_TRIM || type == CMD_WRITE_ZEROES;
}

static void check_range(struct job *job)
{
    bool inside = job->offset <= image.size && job->length <= image.size - job->offset;
    bool enospc = job->type == CMD_WRITE || job->type == CMD_WRITE_ZEROES;

    if (!inside)
        job_fail(job, enospc ? NBD_ENOSPC : NBD_EINVAL, "beyond the end of the export");
    else if (job->offset % config.min_block != 0 || job->length % config.min_block != 0)
        job_fail(job, NBD_EINVAL, "not aligned to the minimum block size");
}

// A structured read may be of any size, it goes out in chunks.
static void check_payload(const struct client *c, struct job *job)
{
    bool df = job->flags & CMD_FLAG_DF;

    if (job->length <= config.max_payload || (df && job->length <= DF_ALWAYS)) return;
    if (job->type == CMD_WRITE || (job->type == CMD_READ && !c->structured))
        job_fail(job, NBD_EINVAL, "above the maximum payload size");
    else if (job->type == CMD_READ && df)
        job_fail(job, NBD_EOVERFLOW, "too large for one chunk");
}

static void check_request(const struct client *c, struct job *job)
{
    if (job->type > CMD_BLOCK_STATUS) {
        job_fail(job, NBD_EINVAL, "unknown command");
    } else if (job->flags & ~valid_flags(c, job->type)) {
        job_fail(job, NBD_EINVAL, "a flag that does not fit the command");
    } else if (config.read_only && modifies(job->type)) {
        job_fail(job, NBD_EPERM, "the export is read-only");
    } else if (job->type == CMD_FLUSH && (job->offset != 0 || job->length != 0)) {
        job_fail(job, NBD_EINVAL, "FLUSH takes neither offset nor length");
    } else if (job->type == CMD_BLOCK_STATUS && !c->allocation) {
        job_fail(job, NBD_EINVAL, "no metadata context was selected");
    } else if (job->type == CMD_BLOCK_STATUS && job->length == 0) {
        job_fail(job, NBD_EINVAL, "the status of nothing");
    } else {
        check_payload(c, job);
        if (!job->error) check_range(job);
    }
}

// Everything but READ and BLOCK_STATUS is done when it arrives; only its answer may wait.
static void execute(struct job *job)
{
    switch (job->type) {
    case CMD_FLUSH: job_result(job, image_flush()); break;
    case CMD_TRIM: job_result(job, image_trim(job->offset, job->length)); break;
    case CMD_CACHE: image_cache(job->offset, job->length); break;
    case CMD_WRITE_ZEROES: job_result(job, image_zero(job->offset, job->length, job->flags)); break;
    default: break;
    }
}

static void finish_request(struct client *c, struct job *job)
{
    if (!job->error && modifies(job->type) && job->flags & CMD_FLAG_FUA)
        job_result(job, image_flush());
    c->jobs[c->job_count++] = *job;
}

// The next bytes of input if so many are there.
static const uint8_t *peek(const struct client *c, size_t size)
{
    return c->in_end - c->in_start >= size ? c->in + c->in_start : NULL;
}

static bool parse_request(struct client *c)
{
    const uint8_t *p = peek(c, REQUEST_HEADER);
    struct job job = {0};

    if (!p) return false;
    c->in_start += REQUEST_HEADER;
    job.flags = load_u16(p + 4);
    job.type = load_u16(p + 6);
    job.cookie = load_u64(p + 8);
    job.offset = load_u64(p + 16);
    job.length = load_u32(p + 24);
    if (load_u32(p) != REQUEST_MAGIC) {
        c->broken = true;
    } else if (job.type == CMD_DISC) {
        c->leaving = true;
    } else {
        check_request(c, &job);
        if (job.type == CMD_WRITE && job.length > 0) {
            c->write = job;
            c->phase = PHASE_PAYLOAD;
            return true;
        }
        if (!job.error) execute(&job);
        finish_request(c, &job);
    }
    return true;
}

// Payloads go to the image piece by piece; that of a refused write is dropped, however long.
static bool parse_payload(struct client *c)
{
    struct job *job = &c->write;
    uint32_t size = min_u32(c->in_end - c->in_start, job->length);

    if (size == 0) return false;
    if (!job->error) job_result(job, image_write(c->in + c->in_start, job->offset, size));
    c->in_start += size;
    job->offset += size;
    job->length -= size;
    if (job->length == 0) {
        finish_request(c, job);
        c->phase = PHASE_REQUEST;
    }
    return true;
}

static bool parse_flags(struct client *c)
{
    const uint8_t *p = peek(c, 4);

    if (!p) return false;
    c->in_start += 4;
    c->broken = load_u32(p) & ~handshake_flags();
    c->no_zeroes = load_u32(p) & FLAG_NO_ZEROES;
    c->phase = PHASE_OPTION;
    return true;
}

static bool parse_option(struct client *c)
{
    const uint8_t *p = peek(c, OPTION_HEADER);
    struct span data;

    if (!p) return false;
    if (load_u64(p) != IHAVEOPT) {
        c->broken = true;
        return true;
    }
    c->option = load_u32(p + 8);
    c->skip = load_u32(p + 12);
    if (c->skip > MAX_OPTION) {
        c->in_start += OPTION_HEADER;
        c->phase = PHASE_SKIP;
        return true;
    }
    data.data = p + OPTION_HEADER;
    data.size = c->skip;
    if (!peek(c, OPTION_HEADER + data.size)) return false;
    c->in_start += OPTION_HEADER + data.size;
    handle_option(c, c->option, data);
    return true;
}

static bool skip_option(struct client *c)
{
    uint32_t size = min_u32(c->in_end - c->in_start, c->skip);

    if (size == 0) return false;
    c->in_start += size;
    c->skip -= size;
    if (c->skip == 0) {
        // EXPORT_NAME knows no error reply, and plain newstyle none at all.
        c->broken = c->option == OPT_EXPORT_NAME || config.no_fixed;
        put_option_error(c, c->option, REP_ERR_TOO_BIG, "too much option data");
        c->phase = PHASE_OPTION;
    }
    return true;
}

static bool parse_one(struct client *c)
{
    switch (c->phase) {
    case PHASE_FLAGS: return parse_flags(c);
    case PHASE_OPTION: return parse_option(c);
    case PHASE_SKIP: return skip_option(c);
    case PHASE_REQUEST: return parse_request(c);
    case PHASE_PAYLOAD: return parse_payload(c);
    }
    return false;
}

// ---- The turns of a client ---------------------------------------------------------------------

static bool may_parse(const struct client *c)
{
    return !c->leaving && !c->broken && c->job_count < MAX_JOBS && out_pending(c) < OUT_HIGH;
}

// A starved parser always has room: no message that it needs whole is as large as the buffer.
static bool wants_input(const struct client *c)
{
    return may_parse(c) && !c->ended && c->in_end < IN_SIZE;
}

// There is something to do that no event will announce.
static bool is_busy(const struct client *c)
{
    return out_pending(c) < OUT_HIGH && (c->job_count > 0 || (may_parse(c) && !c->starved));
}

static bool is_finished(const struct client *c)
{
    bool over = c->leaving || (c->ended && c->starved);

    return c->broken || (over && c->job_count == 0 && out_pending(c) == 0);
}

static void receive(struct client *c)
{
    ssize_t n = recv(c->fd, c->in + c->in_end, IN_SIZE - c->in_end, 0);

    if (n > 0)
        c->in_end += (size_t)n;
    else if (n == 0)
        c->ended = true;
    else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        c->broken = true;
}

static void parse(struct client *c)
{
    c->starved = false;
    while (may_parse(c) && !c->starved)
        c->starved = !parse_one(c);
    memmove(c->in, c->in + c->in_start, c->in_end - c->in_start);
    c->in_end -= c->in_start;
    c->in_start = 0;
}

static void client_turn(struct client *c, int events)
{
    bool arrived = events & (POLLIN | POLLHUP | POLLERR) && wants_input(c);

    if (arrived) receive(c);
    parse(c);
    // A shuffle is worth the more the more it has: while input arrives, collect.
    if (!config.shuffle || !arrived || !wants_input(c)) answer_jobs(c);
    out_send(c);
}

// ---- The loop ----------------------------------------------------------------------------------

static struct client *clients[MAX_CLIENTS];
static size_t client_count;
static int stop_pipe[2];

static void on_stop(int signal_number)
{
    int saved = errno;

    (void)signal_number;
    if (write(stop_pipe[1], "", 1) < 0) {
        // The pipe is full: the loop has been told already.
    }
    errno = saved;
}

static void make_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK)) die("fcntl: %s", strerror(errno));
}

static void catch_signals(void)
{
    struct sigaction stop = {.sa_handler = on_stop};

    if (pipe(stop_pipe)) die("pipe: %s", strerror(errno));
    make_nonblocking(stop_pipe[1]);
    if (sigaction(SIGTERM, &stop, NULL) || sigaction(SIGINT, &stop, NULL))
        die("sigaction: %s", strerror(errno));
}

static void client_add(int fd)
{
    struct client *c = calloc(1, sizeof *c);
    int yes = 1;

    if (!c) {
        fprintf(stderr, "server: no memory for a client\n");
        close(fd);
        return;
    }
    make_nonblocking(fd);
    if (config.port >= 0 && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes))
        fprintf(stderr, "server: TCP_NODELAY: %s\n", strerror(errno));
    c->fd = fd;
    greet(c);
    clients[client_count++] = c;
    client_turn(c, 0);
}

static void client_free(struct client *c)
{
    close(c->fd);
    free(c->out);
    free(c);
}

static void remove_finished(void)
{
    size_t kept = 0;

    for (size_t i = 0; i < client_count; i++)
        if (is_finished(clients[i]))
            client_free(clients[i]);
        else
            clients[kept++] = clients[i];
    client_count = kept;
}

static void accept_client(int listener)
{
    int fd = accept(listener, NULL, NULL);

    if (fd >= 0)
        client_add(fd);
    else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED)
        die("accept: %s", strerror(errno));
}

// Waits; false when told to stop.  The clients' entries start at fds[2].
static bool wait_for_events(struct pollfd *fds, int listener)
{
    int timeout = -1;

    fds[0] = (struct pollfd){.fd = stop_pipe[0], .events = POLLIN};
    fds[1] = (struct pollfd){.fd = client_count < MAX_CLIENTS ? listener : -1, .events = POLLIN};
    for (size_t i = 0; i < client_count; i++) {
        const struct client *c = clients[i];
        int events = (wants_input(c) ? POLLIN : 0) | (out_pending(c) > 0 ? POLLOUT : 0);

        fds[i + 2] = (struct pollfd){.fd = c->fd, .events = (short)events};
        timeout = is_busy(c) ? 0 : timeout;
    }
    while (poll(fds, (nfds_t)client_count + 2, timeout) < 0)
        if (errno != EINTR) die("poll: %s", strerror(errno));
    return !fds[0].revents;
}

static void serve(int listener)
{
    struct pollfd fds[MAX_CLIENTS + 2];
    bool served = false;

    while (!(config.one && served && client_count == 0) && wait_for_events(fds, listener)) {
        for (size_t i = 0; i < client_count; i++)
            if (fds[i + 2].revents || is_busy(clients[i]))
                client_turn(clients[i], fds[i + 2].revents);
        if (fds[1].revents) {
            accept_client(listener);
            served = true;
        }
        remove_finished();
    }
    while (client_count > 0)
        client_free(clients[--client_count]);
}

// ---- Listening ---------------------------------------------------------------------------------

static int listen_on(int family, const struct sockaddr *address, socklen_t size, const char *name)
{
    int fd = socket(family, SOCK_STREAM, 0);
    int yes = 1;

    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) ||
        bind(fd, address, size) || listen(fd, SOMAXCONN))
        die("%s: %s", name, strerror(errno));
    make_nonblocking(fd);
    return fd;
}

static int listen_unix(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd;

    if (strlen(config.unix_path) >= sizeof address.sun_path)
        die("%s: the path is too long for a socket", config.unix_path);
    memcpy(address.sun_path, config.unix_path, strlen(config.unix_path));
    fd = listen_on(AF_UNIX, (const struct sockaddr *)&address, sizeof address, config.unix_path);
    printf("listening on unix %s\n", config.unix_path);
    return fd;
}

static int listen_tcp(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)config.port)};
    socklen_t size = sizeof address;
    int fd;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd = listen_on(AF_INET, (const struct sockaddr *)&address, size, "127.0.0.1");
    if (getsockname(fd, (struct sockaddr *)&address, &size))
        die("getsockname: %s", strerror(errno));
    printf("listening on tcp %u\n", (unsigned)ntohs(address.sin_port));
    return fd;
}

// ---- Command line ------------------------------------------------------------------------------

static const char usage_text[] =
    "usage: server (-U PATH | -p PORT) (--file PATH | --size N | --demo N) [options]\n"
    "\n"
    "Serves one NBD export.  Prints `listening on unix PATH` or `listening on tcp PORT` when\n"
    "ready.  SIGTERM and SIGINT end it.  N is a number of bytes and may end in K, M, G or T.\n"
    "\n"
    "  -U, --unix PATH         listen on a Unix socket, which must not exist\n"
    "  -p, --port PORT         listen on 127.0.0.1; 0 picks a free port\n"
    "      --file PATH         serve a file or block device\n"
    "      --size N            serve zeroed memory, all of it a hole\n"
    "      --demo N            serve memory with data and holes, the same in each run:\n"
    "                          64 KiB a letter DDHDDDHHDHDDHHHH, repeated\n"
    "      --save PATH         with --size or --demo: first write the image to a file\n"
    "  -r, --read-only         refuse to write\n"
    "  -e, --export-name NAME  the only name accepted (default: any)\n"
    "      --description TEXT  describe the export\n"
    "      --block-size MIN:PREF:MAX  size constraints, MAX at most 64M\n"
    "      --one               exit when the last client has left\n"
    "      --oldstyle          speak the oldstyle handshake\n"
    "      --no-fixed          speak newstyle that is not fixed: EXPORT_NAME only\n"
    "      --no-go             do not know INFO and GO\n"
    "      --no-structured     do not know structured replies\n"
    "      --no-zeroes=on|off  whether to offer NBD_FLAG_NO_ZEROES (default: on)\n"
    "      --shuffle SEED      answer in pseudo-random order what has arrived\n"
    "      --chunk N           at most N bytes in a data chunk; with --shuffle the chunks of\n"
    "                          several replies are interleaved\n"
    "  -h, --help              print this\n";

static uint64_t parse_number(const char *text, const char **end)
{
    static const char suffixes[] = "KMGT";
    char *rest;
    const char *suffix;
    unsigned shift = 0;
    unsigned long long value;

    errno = 0;
    value = strtoull(text, &rest, 10);
    if (text[0] < '0' || text[0] > '9' || errno) die("%s: not a number", text);
    suffix = *rest ? strchr(suffixes, *rest) : NULL;
    if (suffix) {
        shift = (unsigned)(suffix - suffixes + 1) * 10;
        rest++;
    }
    if (value > (unsigned long long)INT64_MAX >> shift) die("%s: too large", text);
    *end = rest;
    return value << shift;
}

static uint64_t parse_whole_number(const char *text, uint64_t least, uint64_t most)
{
    const char *end;
    uint64_t value = parse_number(text, &end);

    if (*end || value < least || value > most)
        die("%s: expected a number from %" PRIu64 " to %" PRIu64, text, least, most);
    return value;
}

static bool is_power_of_2(uint64_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

static void parse_block_size(const char *text)
{
    uint64_t sizes[3];
    const char *p = text;

    for (size_t i = 0; i < 3; i++) {
        sizes[i] = parse_number(p, &p);
        if (*p != (i < 2 ? ':' : '\0')) die("%s: expected MIN:PREF:MAX", text);
        p++;
    }
    if (!is_power_of_2(sizes[0]) || sizes[0] > 65536 || !is_power_of_2(sizes[1]) ||
        sizes[1] < 512 || sizes[1] < sizes[0] || sizes[2] < sizes[1] || sizes[2] > 64 << 20)
        die("%s: the specification (or this server, above 64M) does not allow these sizes", text);
    config.min_block = (uint32_t)sizes[0];
    config.preferred_block = (uint32_t)sizes[1];
    config.max_payload = (uint32_t)sizes[2];
}

static const char *parse_string(const char *text)
{
    if (strlen(text) > MAX_STRING) die("a string may have %d bytes at most", MAX_STRING);
    return text;
}

static void parse_shuffle(const char *text)
{
    config.shuffle = true;
    config.random = (parse_whole_number(text, 0, UINT32_MAX) + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

static void parse_memory(const char *text, bool demo)
{
    config.memory = true;
    config.demo = demo;
    config.size = parse_whole_number(text, 0, INT64_MAX);
}

static bool parse_switch(const char *text)
{
    if (strcmp(text, "on") != 0 && strcmp(text, "off") != 0) die("%s: expected on or off", text);
    return strcmp(text, "on") == 0;
}

static void print_help(void)
{
    fputs(usage_text, stdout);
    exit(EXIT_SUCCESS);
}

enum {
    ARG_FILE = 256,
    ARG_SIZE,
    ARG_DEMO,
    ARG_SAVE,
    ARG_DESCRIPTION,
    ARG_BLOCK_SIZE,
    ARG_ONE,
    ARG_OLDSTYLE,
    ARG_NO_FIXED,
    ARG_NO_GO,
    ARG_NO_STRUCTURED,
    ARG_NO_ZEROES,
    ARG_SHUFFLE,
    ARG_CHUNK
};

static const struct option long_options[] = {
    {"unix", required_argument, NULL, 'U'},
    {"port", required_argument, NULL, 'p'},
    {"file", required_argument, NULL, ARG_FILE},
    {"size", required_argument, NULL, ARG_SIZE},
    {"demo", required_argument, NULL, ARG_DEMO},
    {"save", required_argument, NULL, ARG_SAVE},
    {"read-only", no_argument, NULL, 'r'},
    {"export-name", required_argument, NULL, 'e'},
    {"description", required_argument, NULL, ARG_DESCRIPTION},
    {"block-size", required_argument, NULL, ARG_BLOCK_SIZE},
    {"one", no_argument, NULL, ARG_ONE},
    {"oldstyle", no_argument, NULL, ARG_OLDSTYLE},
    {"no-fixed", no_argument, NULL, ARG_NO_FIXED},
    {"no-go", no_argument, NULL, ARG_NO_GO},
    {"no-structured", no_argument, NULL, ARG_NO_STRUCTURED},
    {"no-zeroes", required_argument, NULL, ARG_NO_ZEROES},
    {"shuffle", required_argument, NULL, ARG_SHUFFLE},
    {"chunk", required_argument, NULL, ARG_CHUNK},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static void parse_argument(int name, const char *value)
{
    switch (name) {
    case 'U': config.unix_path = value; break;
    case 'p': config.port = (int)parse_whole_number(value, 0, 65535); break;
    case ARG_FILE: config.file = value; break;
    case ARG_SIZE: parse_memory(value, false); break;
    case ARG_DEMO: parse_memory(value, true); break;
    case ARG_SAVE: config.save = value; break;
    case 'r': config.read_only = true; break;
    case 'e': config.export_name = parse_string(value); break;
    case ARG_DESCRIPTION: config.description = parse_string(value); break;
    case ARG_BLOCK_SIZE: parse_block_size(value); break;
    case ARG_ONE: config.one = true; break;
    case ARG_OLDSTYLE: config.oldstyle = true; break;
    case ARG_NO_FIXED: config.no_fixed = true; break;
    case ARG_NO_GO: config.no_go = true; break;
    case ARG_NO_STRUCTURED: config.no_structured = true; break;
    case ARG_NO_ZEROES: config.no_zeroes = parse_switch(value); break;
    case ARG_SHUFFLE: parse_shuffle(value); break;
    case ARG_CHUNK: config.chunk = (uint32_t)parse_whole_number(value, 1, UINT32_MAX); break;
    case 'h': print_help(); break;
    default: die("try --help");
    }
}

static void parse_arguments(int argc, char **argv)
{
    int name;

    while ((name = getopt_long(argc, argv, "U:p:re:h", long_options, NULL)) != -1)
        parse_argument(name, optarg);
    if (optind < argc) die("%s: unexpected argument", argv[optind]);
    if ((config.unix_path != NULL) == (config.port >= 0)) die("give one of --unix and --port");
    if ((config.file != NULL) == config.memory) die("give one of --file, --size and --demo");
    if (config.save && !config.memory) die("--save goes with --size and --demo");
    config.chunk = min_u32(config.chunk, config.max_payload);
}

int main(int argc, char **argv)
{
    int listener;

    parse_arguments(argc, argv);
    image_open();
    catch_signals();
    listener = config.unix_path ? listen_unix() : listen_tcp();
    if (fflush(stdout)) die("stdout: %s", strerror(errno));
    serve(listener);
    close(listener);
    if (config.unix_path && unlink(config.unix_path))
        die("%s: %s", config.unix_path, strerror(errno));
    image_close();
    return EXIT_SUCCESS;
}
