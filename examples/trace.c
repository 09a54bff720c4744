// trace.c - prints every NBD message as it goes by
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/trace.c -o build/trace
//     build/trace nbd://localhost/export
//
// To debug a program of yours take all above "The program": make a `trace` over
// the transport that you have and give &trace.transport to nbd_connect.  It only
// watches.  What it does not understand it says once for each direction, and the
// bytes go on: below TLS that is all that follows STARTTLS.
#define _GNU_SOURCE
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>

#define TRACE_KEEP 1024    // bytes of a message that are kept for printing
#define TRACE_REQUESTS 256 // requests in flight that are remembered

// One direction.  A message is kept from its first byte; the decoder looks at
// all of it again whenever `have` has reached `need`.
typedef struct trace_flow {
    int direction; // '>' from the client, '<' from the server
    size_t have, need;
    uint64_t skip; // bytes that go by unseen: payload, or what exceeds TRACE_KEEP
    int lost;      // something was not understood, nothing more is decoded
    unsigned char kept[TRACE_KEEP];
} trace_flow;

typedef struct trace_request {
    uint64_t used, cookie, command, length;
} trace_request;

typedef struct trace {
    nbd_transport transport; // give its address to nbd_connect
    const nbd_transport *inner;
    FILE *out;
    trace_flow client, server;
    int flags_due;     // the client's handshake flags come next
    int export_due;    // EXPORT_NAME was sent; its answer has no magic number
    uint64_t no_zeros; // NBD_FLAG_NO_ZEROES, if both sides set it
    trace_request requests[TRACE_REQUESTS];
} trace;

/// Names ///

static const char commands[] =
    "READ\0WRITE\0DISC\0FLUSH\0TRIM\0CACHE\0WRITE_ZEROES\0BLOCK_STATUS\0RESIZE\0";
static const char options[] =
    "UNKNOWN\0EXPORT_NAME\0ABORT\0LIST\0PEEK_EXPORT\0STARTTLS\0INFO\0GO\0STRUCTURED_REPLY\0"
    "LIST_META_CONTEXT\0SET_META_CONTEXT\0EXTENDED_HEADERS\0";
static const char replies[] = "UNKNOWN\0ACK\0SERVER\0INFO\0META_CONTEXT\0";
static const char infos[] = "EXPORT\0NAME\0DESCRIPTION\0BLOCK_SIZE\0";
static const char chunks[] =
    "NONE\0OFFSET_DATA\0OFFSET_HOLE\0UNKNOWN\0UNKNOWN\0BLOCK_STATUS\0BLOCK_STATUS_EXT\0";
static const char failures[] = "UNKNOWN\0ERROR\0ERROR_OFFSET\0";

// An empty name ends the list.
static const char *name_of(const char *names, uint64_t number)
{
    for (; number && *names; number--)
        names += strlen(names) + 1;
    return *names ? names : "UNKNOWN";
}

// The names of nbd.h's own list: NBD_EIO, NBD_REP_ERR_UNSUP.
static const char *error_name(int64_t error)
{
#define TRACE_ERROR(name, value, text) \
    if (error == value) return #name;
    NBD_ERRORS(TRACE_ERROR)
    return "UNKNOWN";
}

/// Looking at bytes ///

// What is left of a message.
typedef struct view {
    const unsigned char *at;
    size_t left;
} view;

// A big-endian number of `size` bytes; 0, and nothing is left, if it is cut.
static uint64_t take(view *v, size_t size)
{
    uint64_t value = 0;
    if (size > v->left) size = v->left = 0;
    for (size_t i = 0; i < size; i++)
        value = value << 8 | v->at[i];
    v->at += size;
    v->left -= size;
    return value;
}

// Prints the format; "#4" takes four bytes and prints the number, "$4" in hexadecimal.
// Returns the last number.
static uint64_t print(trace *t, view *v, const char *format)
{
    uint64_t number = 0;
    for (; *format; format++) {
        if (*format != '#' && *format != '$') {
            fputc(*format, t->out);
            continue;
        }
        number = take(v, (size_t)(format[1] - '0'));
        fprintf(t->out, *format++ == '#' ? "%" PRIu64 : "0x%" PRIx64, number);
    }
    return number;
}

static void print_text(trace *t, view *v, uint64_t size)
{
    char text[4 * TRACE_KEEP + 1];
    size_t part = size < v->left ? (size_t)size : v->left;
    nbd_escape(text, sizeof text, (const char *)v->at, part);
    fprintf(t->out, " \"%s\"%s", text, part < size ? "..." : "");
    v->at += part;
    v->left -= part;
}

/// Requests in flight ///

static trace_request *find(trace *t, uint64_t used, uint64_t cookie)
{
    for (trace_request *r = t->requests; r < t->requests + TRACE_REQUESTS; r++)
        if (r->used == used && (!used || r->cookie == cookie)) return r;
    return NULL;
}

// One that finds no place is forgotten: of a simple reply to it nobody knows how
// long it is.
static void remember(trace *t, uint64_t cookie, uint64_t command, uint64_t length)
{
    trace_request *r = find(t, 0, 0);
    if (r) *r = (trace_request){1, cookie, command, length};
}

// Prints what a reply answers.  Returns how many bytes were to be read.
static uint64_t print_asked(trace *t, uint64_t cookie, int last)
{
    trace_request *r = find(t, 1, cookie);
    fprintf(t->out, " cookie=0x%" PRIx64 " (%s)", cookie,
            r ? name_of(commands, r->command) : "request not seen");
    if (!r) return 0;
    if (last) r->used = 0;
    return r->command == 0 ? r->length : 0;
}

/// Client to server ///

static void print_option(trace *t, view *v)
{
    uint64_t option = (take(v, 8), take(v, 4)), length = take(v, 4);
    int meta = option == NBD_OPTION_LIST_META_CONTEXT || option == NBD_OPTION_SET_META_CONTEXT;
    fprintf(t->out, "> option %s(%" PRIu64 ") length=%" PRIu64, name_of(options, option), option,
            length);
    if (option == NBD_OPTION_EXPORT_NAME) print_text(t, v, length);
    if (option == NBD_OPTION_EXPORT_NAME) t->export_due = 1;
    if (!meta && option != NBD_OPTION_INFO && option != NBD_OPTION_GO) return;
    print_text(t, v, take(v, 4));
    for (uint64_t count = take(v, meta ? 4 : 2); count && v->left; count--) {
        if (meta)
            print_text(t, v, take(v, 4));
        else
            fprintf(t->out, " %s", name_of(infos, take(v, 2)));
    }
}

static void print_flags(trace *t, view *v)
{
    t->flags_due = 0;
    t->no_zeros &= print(t, v, "> client flags=$4");
}

static void print_request(trace *t, view *v)
{
    int extended = take(v, 4) == 0x21e41c71;
    uint64_t flags = take(v, 2), command = take(v, 2), cookie = take(v, 8), offset = take(v, 8);
    uint64_t length = take(v, extended ? 8 : 4);
    fprintf(t->out, "> request %s cookie=0x%" PRIx64 " offset=%" PRIu64, name_of(commands, command),
            cookie, offset);
    fprintf(t->out, " length=%" PRIu64 " flags=0x%" PRIx64, length, flags);
    // Flag 0x20 of an extended request: the length is that of a payload.
    if (command == 1 || (extended && flags & 0x20)) t->client.skip += length;
    if (command != 2) remember(t, cookie, command, length); // DISC has no reply
}

/// Server to client ///

static uint64_t greeting_size(view v)
{
    uint64_t style = (take(&v, 8), take(&v, 8));
    return style == 0x49484156454f5054 ? 18 : style == 0x00420281861253 ? 28 : 0;
}

static void print_greeting(trace *t, view *v)
{
    t->flags_due = greeting_size(*v) == 18;
    take(v, 8);
    take(v, 8);
    t->no_zeros = 2 & print(t, v,
                            t->flags_due ? "< greeting newstyle flags=$2"
                                         : "< greeting oldstyle size=#8 flags=$4");
    if (!t->flags_due) t->server.skip += 124;
}

static void print_export(trace *t, view *v)
{
    print(t, v, "< export size=#8 flags=$2");
    t->export_due = 0;
    if (!t->no_zeros) t->server.skip += 124;
}

static void print_info(trace *t, view *v)
{
    uint64_t type = take(v, 2);
    fprintf(t->out, " %s(%d)", name_of(infos, type), (int)type);
    if (type == 0)
        print(t, v, " size=#8 flags=$2");
    else if (type == 3)
        print(t, v, " minimum=#4 preferred=#4 maximum=#4");
    else
        print_text(t, v, v->left);
}

static void print_option_reply(trace *t, view *v)
{
    uint64_t option = (take(v, 8), take(v, 4)), type = take(v, 4), number = type & 0x7fffffff;
    int refused = type != number;
    fprintf(t->out, "< reply to %s: %s(%" PRIu64 ")", name_of(options, option),
            refused ? error_name(-100 - (int64_t)number) : name_of(replies, number), number);
    print(t, v, " length=#4");
    if (type == 3) print_info(t, v);
    if (type == 2) print_text(t, v, take(v, 4));
    if (type == 4) print(t, v, " id=#4");
    if (v->left) print_text(t, v, v->left);
}

static void print_error(trace *t, uint64_t error)
{
    fprintf(t->out, " %s(%" PRIu64 ")", error_name((int64_t)error), error);
}

static void print_simple_reply(trace *t, view *v)
{
    uint64_t error = (take(v, 4), take(v, 4)), length;
    fputs("< simple reply", t->out);
    length = print_asked(t, take(v, 8), 1);
    print_error(t, error);
    if (error || !length) return;
    fprintf(t->out, " payload=%" PRIu64, length);
    t->server.skip += length;
}

static void print_extents(trace *t, view *v, int extended)
{
    size_t extent = extended ? 16 : 8;
    print(t, v, extended ? " context=#4 count=#4" : " context=#4");
    while (v->left >= extent)
        print(t, v, extended ? " #8:$8" : " #4:$4");
    if (v->left) fputs(" ...", t->out);
}

static void print_chunk(trace *t, view *v)
{
    int extended = take(v, 4) == 0x6e8a278c;
    uint64_t flags = take(v, 2), type = take(v, 2), cookie = take(v, 8), length;
    int failed = type >= 0x8000;
    fprintf(t->out, "< chunk %s(%d)%s",
            failed ? name_of(failures, type - 0x8000) : name_of(chunks, type), (int)type,
            flags & 1 ? " DONE" : "");
    print_asked(t, cookie, flags & 1);
    length = print(t, v, extended ? " offset=#8 length=#8" : " length=#4");
    if (failed) {
        print_error(t, take(v, 4));
        print_text(t, v, take(v, 2));
    }
    if (type == 1 || type == 2 || type == 0x8002) print(t, v, " at=#8");
    if (type == 1) fprintf(t->out, " payload=%" PRIu64, length < 8 ? 0 : length - 8);
    if (type == 2) print(t, v, " hole=#4");
    if (type == 5 || type == 6) print_extents(t, v, type == 6);
}

/// Messages ///

static const struct message {
    int direction;
    uint32_t magic;                      // the first four bytes, if there is one
    size_t size, length_at, length_size; // the length counts what follows the `size` bytes
    void (*print)(trace *t, view *v);
} messages[] = {
    {'>', 0, 4, 0, 0, print_flags},
    {'<', 0, 10, 0, 0, print_export},
    {'>', 0x49484156, 16, 12, 4, print_option},
    {'>', 0x25609513, 28, 0, 0, print_request},
    {'>', 0x21e41c71, 32, 0, 0, print_request},
    {'<', 0x4e42444d, 16, 0, 0, print_greeting},
    {'<', 0x0003e889, 20, 16, 4, print_option_reply},
    {'<', 0x67446698, 16, 0, 0, print_simple_reply},
    {'<', 0x668e33ef, 20, 16, 4, print_chunk},
    {'<', 0x6e8a278c, 32, 24, 8, print_chunk},
};

// The message that begins with these bytes, NULL: not understood.
static const struct message *find_message(const trace *t, const trace_flow *f)
{
    view v = {f->kept, f->have};
    uint64_t magic = take(&v, 4);
    if (f->direction == '>' && t->flags_due) return &messages[0];
    if (f->direction == '<' && t->export_due) return &messages[1];
    for (size_t i = 2; i < sizeof messages / sizeof *messages; i++)
        if (f->direction == messages[i].direction && magic == messages[i].magic)
            return &messages[i];
    return NULL;
}

// How many bytes the message has, as far as one can see yet; 0: not understood.
static uint64_t message_size(const struct message *m, view v)
{
    view length = v;
    if (!m || v.left < m->size) return m ? m->size : 0;
    if (m->print == print_greeting) return greeting_size(v);
    length.at += m->length_at;
    return m->size + take(&length, m->length_size);
}

/// The transport ///

static void print_bytes(trace *t, const trace_flow *f, const char *label)
{
    fprintf(t->out, "%c %s:", f->direction, label);
    for (size_t i = 0; i < f->have; i++)
        fprintf(t->out, " %02x", f->kept[i]);
    fputc('\n', t->out);
}

// Prints the message if all of it is there, or if no more can be kept.
static void decode(trace *t, trace_flow *f)
{
    const struct message *m = find_message(t, f);
    view v = {f->kept, f->have};
    uint64_t size = message_size(m, v);
    if (size > f->have && f->have < TRACE_KEEP) {
        f->need = size < TRACE_KEEP ? (size_t)size : TRACE_KEEP;
        return;
    }
    f->lost = size == 0;
    if (f->lost) {
        print_bytes(t, f, "not understood, as the rest");
    } else {
        m->print(t, &v);
        fputc('\n', t->out);
    }
    fflush(t->out); // whoever looks for a hang needs the last line
    if (size > f->have) f->skip += size - f->have;
    f->have = 0;
    f->need = 4;
}

static void feed(trace *t, trace_flow *f, const unsigned char *bytes, size_t size)
{
    while (size && !f->lost) {
        size_t part = f->need - f->have;
        if (f->skip) {
            part = size < f->skip ? size : (size_t)f->skip;
            f->skip -= part;
        } else {
            if (part > size) part = size;
            memcpy(f->kept + f->have, bytes, part);
            f->have += part;
            if (f->have == f->need) decode(t, f);
        }
        bytes += part;
        size -= part;
    }
}

// Only the first `moved` bytes of the pieces have gone by.
static void watch(trace *t, trace_flow *f, const nbd_iovec *iov, unsigned count, ptrdiff_t moved)
{
    size_t left = moved > 0 ? (size_t)moved : 0;
    for (unsigned i = 0; i < count && left; i++) {
        size_t part = iov[i].size < left ? iov[i].size : left;
        feed(t, f, iov[i].base, part);
        left -= part;
    }
    if (moved == NBD_IO_ERROR) fputs("! transport failed\n", t->out);
}

static ptrdiff_t trace_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    trace *t = context;
    ptrdiff_t moved = t->inner->send(t->inner->context, iov, count, flags);
    watch(t, &t->client, iov, count, moved);
    return moved;
}

static ptrdiff_t trace_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    trace *t = context;
    ptrdiff_t moved = t->inner->recv(t->inner->context, iov, count);
    t->transport.detail = t->inner->detail;
    watch(t, &t->server, iov, count, moved);
    if (moved == NBD_IO_EOF) fputs("< end of stream\n", t->out);
    return moved;
}

static int trace_wait(void *context, unsigned wants, int *timeout_ms)
{
    trace *t = context;
    return t->inner->wait(t->inner->context, wants, timeout_ms);
}

static int trace_finish(void *context)
{
    trace *t = context;
    return t->inner->finish(t->inner->context);
}

// t, inner, out: life of the client.
static void trace_init(trace *t, const nbd_transport *inner, FILE *out)
{
    memset(t, 0, sizeof *t);
    t->inner = inner;
    t->out = out;
    t->client.direction = '>';
    t->server.direction = '<';
    t->client.need = t->server.need = 4;
    t->transport.flags = inner->flags;
    t->transport.context = t;
    t->transport.send = trace_send;
    t->transport.recv = trace_recv;
    t->transport.wait = inner->wait ? trace_wait : NULL;
    t->transport.finish = inner->finish ? trace_finish : NULL;
}

// Prints the messages whose end never came: often one of them is what broke.
static void trace_end(trace *t)
{
    if (t->client.have) print_bytes(t, &t->client, "incomplete");
    if (t->server.have) print_bytes(t, &t->server, "incomplete");
}

/// The program ///

#define TIMEOUT_MS 60000 // of each blocking call

static const char usage[] = "trace - prints every NBD message as it goes by\n"
                            "\n"
                            "usage: trace URI\n";

// What is known about an error besides its name, or "".
static const char *reason(const nbd_sync *sync, int error)
{
    if (error == NBD_ERR_RESOLVE) return gai_strerror(sync->os_error);
    if (error == NBD_ERR_CONNECT) return strerror(sync->os_error);
    return nbd_detail(sync->client);
}

static void fail(const char *name, const nbd_sync *sync, int error)
{
    const char *why = reason(sync, error);
    fprintf(stderr, "trace: %s: %s%s%s", name, nbd_strerror(error), *why ? ": " : "", why);
    if (*sync->message) fprintf(stderr, " (server: \"%s\")", sync->message);
    fputc('\n', stderr);
}

// Returns 0 if the URI is one that this program can open.
static int parse(nbd_uri *uri, const char *name, char *memory, size_t size)
{
    int error = nbd_uri_parse(uri, name, memory, size);
    if (error) {
        fprintf(stderr, "trace: %s: %s: %s, at byte %zu\n", name, nbd_strerror(error), uri->detail,
                uri->detail_at);
        return 1;
    }
    if (uri->unknown) fprintf(stderr, "trace: %s: warning: unknown parameter ignored\n", name);
    if (!(uri->config_flags & NBD_TLS_REQUIRE)) return 0;
    fprintf(stderr, "trace: %s: this program was built without TLS\n", name);
    return 1;
}

// Reads the first sector, or the first block if that is larger, and says goodbye.  Returns the
// first error.
static int run(nbd_sync *sync, trace *t, const nbd_address *address)
{
    static unsigned char block[65536]; // the largest that a minimum block may be
    const nbd_export *got = nbd_negotiated(sync->client);
    size_t size;
    int end, error = nbd_sync_dial(sync, address);
    trace_init(t, &sync->io.transport, stdout);
    if (!error) error = nbd_sync_connect(sync, &t->transport);
    size = got->minimum_block > 512 ? got->minimum_block : 512;
    if (!error) error = nbd_sync_read(sync, block, size < got->size ? size : (size_t)got->size, 0);
    end = nbd_sync_close(sync);
    trace_end(t);
    return error ? error : end;
}

int main(int argc, char **argv)
{
    static unsigned char buffer[NBD_BUFFER_GOOD];
    static char memory[16384];
    static nbd_client client;
    static trace t;
    nbd_slot slot;
    nbd_config config = NBD_ZERO;
    nbd_sync sync = NBD_ZERO;
    nbd_uri uri;
    int error;

    if (argc == 2 && (!strcmp(argv[1], "-h") || !strcmp(argv[1], "--help")))
        return fputs(usage, stdout) < 0 || fflush(stdout);
    if (argc != 2 || *argv[1] == '-') return fputs(usage, stderr), 2;
    if (parse(&uri, argv[1], memory, sizeof memory)) return 1;
    config.slots = &slot;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    config.flags = uri.config_flags;
    sync.client = &client;
    sync.timeout_ms = TIMEOUT_MS;
    error = nbd_init(&client, &config);
    if (!error) error = run(&sync, &t, &uri.address);
    if (error) fail(argv[1], &sync, error);
    if (fflush(stdout) || ferror(stdout)) {
        perror("trace: standard output");
        return 1;
    }
    return error != 0;
}
