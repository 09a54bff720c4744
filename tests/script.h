// A script is one session as both sides see it: what the client's program does, the
// exact bytes that the client must send, the bytes that the server sends, and the
// events that must come out.  play.h plays it.  The words, by their first part:
//   client_...  the program calls the library
//   want_...    the server waits for these exact bytes of the client
//   send_...    the server sends
//   see_...     this event must be the next one of its request, or of the session
// The wire is written here from the specification, on purpose without nbd.h's help.
#ifndef SCRIPT_H
#define SCRIPT_H

#include "check.h"

enum {
    SCRIPT_STEPS = 2048,
    SCRIPT_BYTES = 1 << 20,
    SCRIPT_REQUESTS = 64,
    SCRIPT_OPTIONS = 64,
    SCRIPT_PIECES = 8,
    UNTOUCHED = 0xEE, // what fills read buffers; no server byte has this value
    SESSION = -1      // "request" of the events that belong to none
};

enum step_kind {
    STEP_CALL,    // the program calls `call`
    STEP_ISSUE,   // the program issues `request`
    STEP_WANT,    // the client sent `bytes`; a cookie in them is captured
    STEP_SEND,    // the server sends `bytes`, with the captured cookie put in
    STEP_END,     // the server closes
    STEP_SEE,     // `event` came
    STEP_HOLD,    // the transport takes `size` bytes more, then blocks
    STEP_RELEASE, // the transport takes everything again
    STEP_FED,     // the client has taken and parsed all that was sent
    STEP_UNDONE,  // `request` has not finished
    STEP_REFUSED, // the library refuses `op`, or else `option`, with `error`
    STEP_SEAL     // the server starts TLS: what it receives and sends is sealed
};

static const char *const step_names[] = {"call", "issue",   "want", "send",   "end",     "see",
                                         "hold", "release", "fed",  "undone", "refused", "seal"};

typedef struct step {
    enum step_kind kind;
    int request;
    int (*call)(nbd_client *client);
    const nbd_option *option;
    const nbd_op *op;
    int error;
    const unsigned char *bytes;
    size_t size;
    size_t cookie_at;     // 0: no cookie in these bytes
    uint64_t cookie_flip; // SEND: bits of the cookie that the server gets wrong
    int farewell;         // WANT: after these bytes any end of stream is clean
    nbd_event event;      // SEE: the members that the type names
} step;

typedef struct request {
    nbd_op op; // memory is put in when it is played
    size_t pieces[SCRIPT_PIECES];
    uint32_t piece_count;       // 0: one buffer
    const unsigned char *image; // READ: what the buffer holds after success
} request;

typedef struct script {
    nbd_config config; // slots and buffer are put in when it is played
    int protocol;      // what requests and replies look like, enum nbd_protocol
    int any_order;     // DONE events of different requests may change places
    int no_cut;        // the session cannot be cut: it needs every byte
    int unlawful;      // the client breaks the specification on purpose
    size_t step_count;
    int request_count;
    uint32_t option_count;
    size_t used;
    nbd_option options[SCRIPT_OPTIONS];
    step steps[SCRIPT_STEPS];
    request requests[SCRIPT_REQUESTS];
    unsigned char bytes[SCRIPT_BYTES];
} script;

/// Bytes ///

// Every byte of the export is a function of its place: never 0, never UNTOUCHED.
static inline unsigned char export_byte(uint64_t place)
{
    return (unsigned char)(1 + (place * 7 + (place >> 8) * 3 + (place >> 16)) % 199);
}

static inline void export_fill(unsigned char *to, uint64_t place, size_t size)
{
    size_t i;

    for (i = 0; i < size; i++)
        to[i] = export_byte(place + i);
}

// Reserves bytes of the script; what follows fills them in.
static inline unsigned char *script_room(script *s, size_t size)
{
    unsigned char *room = s->bytes + s->used;

    CHECK(size <= SCRIPT_BYTES - s->used);
    s->used += size;
    return room;
}

static inline void put(script *s, uint64_t value, unsigned width)
{
    unsigned char *room = script_room(s, width);

    while (width--)
        *room++ = (unsigned char)(value >> (8 * width));
}

static inline void put_bytes(script *s, const void *bytes, size_t size)
{
    if (size) memcpy(script_room(s, size), bytes, size);
}

static inline void put_text(script *s, const char *text)
{
    put_bytes(s, text, strlen(text));
}

static inline void put_zeroes(script *s, size_t size)
{
    memset(script_room(s, size), 0, size);
}

/// Steps ///

static inline step *script_step(script *s, enum step_kind kind)
{
    step *next = &s->steps[s->step_count];

    CHECK(s->step_count < SCRIPT_STEPS);
    s->step_count++;
    memset(next, 0, sizeof *next);
    next->kind = kind;
    next->request = SESSION;
    next->bytes = s->bytes + s->used;
    return next;
}

// Ends a step whose bytes were put after it was begun.
static inline void script_close(script *s, step *of)
{
    of->size = (size_t)(s->bytes + s->used - of->bytes);
}

/// The program ///

static inline void client_calls(script *s, int (*call)(nbd_client *client))
{
    script_step(s, STEP_CALL)->call = call;
}

static inline void client_disconnects(script *s)
{
    client_calls(s, nbd_disconnect);
}

static inline void client_abandons(script *s)
{
    client_calls(s, nbd_abandon);
}

// option: for the life of the script.
static inline void client_negotiates(script *s, const nbd_option *option)
{
    script_step(s, STEP_CALL)->option = option;
}

// An option that the script keeps.  What it points to: for the life of the script.
static inline nbd_option *script_option(script *s, uint32_t number, const char *name)
{
    nbd_option *made = &s->options[s->option_count++];

    CHECK(s->option_count <= SCRIPT_OPTIONS);
    memset(made, 0, sizeof *made);
    made->option = number;
    made->name = name;
    return made;
}

static inline void client_asks(script *s, uint32_t number, const char *name)
{
    client_negotiates(s, script_option(s, number, name));
}

static inline void client_asks_contexts(script *s, uint32_t number, const char *name,
                                        const char *const *queries, uint32_t count)
{
    nbd_option *made = script_option(s, number, name);

    made->queries = queries;
    made->query_count = count;
    client_negotiates(s, made);
}

static inline void client_asks_raw(script *s, uint32_t number, const void *data, uint32_t size)
{
    nbd_option *made = script_option(s, number, NULL);

    made->data = data;
    made->data_size = size;
    client_negotiates(s, made);
}

static inline void option_is_refused_here(script *s, uint32_t number, int error)
{
    step *refused = script_step(s, STEP_REFUSED);

    refused->option = script_option(s, number, NULL);
    refused->error = error;
}

// op: for the life of the script.
static inline void op_is_refused_here(script *s, const nbd_op *op, int error)
{
    step *refused = script_step(s, STEP_REFUSED);

    refused->op = op;
    refused->error = error;
}

// Whether a request lends memory to the client, and how much.
static inline int request_lends(const nbd_op *op)
{
    return op->command == NBD_READ || op->command == NBD_WRITE ||
           (op->command == NBD_BLOCK_STATUS && op->contexts) ||
           (op->command == NBD_RAW && op->data);
}

static inline size_t request_memory(const nbd_op *op)
{
    if (!request_lends(op)) return 0;
    return op->command == NBD_BLOCK_STATUS ? 8 + 4 * (size_t)op->context_count : (size_t)op->size;
}

static inline int request_sends(const nbd_op *op)
{
    return request_lends(op) && (op->command == NBD_WRITE || op->command == NBD_RAW);
}

static inline int script_request(script *s, uint32_t command, uint32_t flags, uint64_t offset,
                                 uint64_t size)
{
    int r = s->request_count++;
    request *made = &s->requests[r];

    CHECK(r < SCRIPT_REQUESTS);
    memset(made, 0, sizeof *made);
    made->op.command = command;
    made->op.flags = flags;
    made->op.offset = offset;
    made->op.size = size;
    if (command == NBD_READ) {
        unsigned char *image = script_room(s, (size_t)size);

        memset(image, UNTOUCHED, (size_t)size);
        made->image = image;
    }
    return r;
}

static inline int client_issues(script *s, uint32_t command, uint32_t flags, uint64_t offset,
                                uint64_t size)
{
    int r = script_request(s, command, flags, offset, size);

    script_step(s, STEP_ISSUE)->request = r;
    return r;
}

// Any command.  What op points to: for the life of the script; `data` of RAW only says
// that there is a payload.
static inline int client_issues_op(script *s, const nbd_op *op)
{
    int r = client_issues(s, op->command, op->flags, op->offset, op->size);

    s->requests[r].op = *op;
    return r;
}

// The same in pieces of memory; `sizes` ends with the number that completes `size`.
static inline int client_issues_pieces(script *s, uint32_t command, uint32_t flags, uint64_t offset,
                                       const size_t *sizes, uint32_t count)
{
    uint64_t size = 0;
    uint32_t i;
    int r;

    CHECK(count <= SCRIPT_PIECES);
    for (i = 0; i < count; i++)
        size += sizes[i];
    r = client_issues(s, command, flags, offset, size);
    memcpy(s->requests[r].pieces, sizes, count * sizeof *sizes);
    s->requests[r].piece_count = count;
    return r;
}

/// Bytes of the client ///

static inline void want_client_flags(script *s, uint32_t flags)
{
    step *want = script_step(s, STEP_WANT);

    put(s, flags, 4);
    script_close(s, want);
}

static inline step *want_option_open(script *s, uint32_t option, size_t size)
{
    step *want = script_step(s, STEP_WANT);

    put(s, UINT64_C(0x49484156454F5054), 8);
    put(s, option, 4);
    put(s, size, 4);
    return want;
}

static inline void want_option(script *s, uint32_t option, const void *data, size_t size)
{
    step *want = want_option_open(s, option, size);

    put_bytes(s, data, size);
    script_close(s, want);
}

// Cuts the WANT step written last in two: what stands between can happen after its
// first `size` bytes.  Returns the second; append it with script_append.
static inline step script_split(script *s, size_t size)
{
    step *first = &s->steps[s->step_count - 1];
    step second = *first;

    second.bytes += size;
    second.size -= size;
    second.cookie_at = 0;
    first->size = size;
    first->farewell = 0;
    return second;
}

static inline void script_append(script *s, step what)
{
    *script_step(s, what.kind) = what;
}

static inline void want_abort(script *s)
{
    want_option(s, 2, "", 0);
    s->steps[s->step_count - 1].farewell = 1;
}

static inline void want_export_name(script *s, const char *name)
{
    want_option(s, 1, name, strlen(name));
}

// INFO (6) or GO (7), asking for name, description and block size.
static inline void want_info(script *s, uint32_t option, const char *name)
{
    step *want = want_option_open(s, option, 4 + strlen(name) + 2 + 3 * 2);

    put(s, strlen(name), 4);
    put_text(s, name);
    put(s, 3, 2);
    put(s, 1, 2);
    put(s, 2, 2);
    put(s, 3, 2);
    script_close(s, want);
}

static inline void want_go(script *s, const char *name)
{
    want_info(s, 7, name);
}

static inline void want_meta(script *s, uint32_t option, const char *name,
                             const char *const *queries, uint32_t count)
{
    size_t size = 4 + strlen(name) + 4;
    step *want;
    uint32_t i;

    for (i = 0; i < count; i++)
        size += 4 + strlen(queries[i]);
    want = want_option_open(s, option, size);
    put(s, strlen(name), 4);
    put_text(s, name);
    put(s, count, 4);
    for (i = 0; i < count; i++) {
        put(s, strlen(queries[i]), 4);
        put_text(s, queries[i]);
    }
    script_close(s, want);
}

// "Request types": the number on the wire.
static inline unsigned wire_command(const nbd_op *op)
{
    switch (op->command) {
    case NBD_READ: return 0;
    case NBD_WRITE: return 1;
    case NBD_FLUSH: return 3;
    case NBD_TRIM: return 4;
    case NBD_CACHE: return 5;
    case NBD_WRITE_ZEROES: return 6;
    case NBD_BLOCK_STATUS: return 7;
    case NBD_RAW: return op->raw_type;
    default: check_fail(__FILE__, __LINE__, "no such command");
    }
}

// "Command flags": the bits on the wire.
static inline unsigned wire_flags(const script *s, const nbd_op *op)
{
    unsigned flags = 0;

    if (op->command == NBD_RAW) return op->flags;
    if (op->flags & NBD_FUA) flags |= 1;
    if (op->flags & NBD_NO_HOLE) flags |= 2;
    if (op->flags & NBD_DF) flags |= 4;
    if (op->flags & NBD_REQ_ONE) flags |= 8;
    if (op->flags & NBD_FAST_ZERO) flags |= 16;
    if (s->protocol == NBD_PROTOCOL_EXTENDED && op->command == NBD_WRITE) flags |= 32;
    return flags;
}

static inline step *want_header(script *s, unsigned flags, unsigned type, uint64_t offset,
                                uint64_t size)
{
    int extended = s->protocol == NBD_PROTOCOL_EXTENDED;
    step *want = script_step(s, STEP_WANT);

    put(s, extended ? 0x21E41C71 : 0x25609513, 4);
    put(s, flags, 2);
    put(s, type, 2);
    want->cookie_at = 8;
    put(s, 0, 8);
    put(s, offset, 8);
    put(s, size, extended ? 8 : 4);
    script_close(s, want);
    return want;
}

static inline void want_request_header(script *s, int r)
{
    const nbd_op *op = &s->requests[r].op;

    want_header(s, wire_flags(s, op), wire_command(op), op->offset, op->size)->request = r;
}

// Bytes `from` to `to` of the payload of a WRITE or RAW.
static inline void want_payload(script *s, int r, size_t from, size_t to)
{
    step *want = script_step(s, STEP_WANT);

    export_fill(script_room(s, to - from), s->requests[r].op.offset + from, to - from);
    script_close(s, want);
}

static inline void want_request(script *s, int r)
{
    want_request_header(s, r);
    if (request_sends(&s->requests[r].op)) {
        want_payload(s, r, 0, (size_t)s->requests[r].op.size);
    }
}

// BLOCK_STATUS that names the contexts asked for by the server's numbers.
static inline void want_status(script *s, int r, const uint32_t *ids)
{
    const nbd_op *op = &s->requests[r].op;
    step *want = want_header(s, wire_flags(s, op) | 32, wire_command(op), op->offset,
                             8 + 4 * (uint64_t)op->context_count);
    uint32_t i;

    want->request = r;
    put(s, op->size, 8);
    for (i = 0; i < op->context_count; i++)
        put(s, ids[i], 4);
    script_close(s, want);
}

// NBD_CMD_DISC; its cookie belongs to no request.
static inline void want_disconnect(script *s)
{
    want_header(s, 0, 2, 0, 0)->farewell = 1;
}

/// Bytes of the server ///

static inline void send_bytes(script *s, const void *bytes, size_t size)
{
    step *sent = script_step(s, STEP_SEND);

    put_bytes(s, bytes, size);
    script_close(s, sent);
}

static inline void send_greeting(script *s, unsigned flags)
{
    step *sent = script_step(s, STEP_SEND);

    put(s, UINT64_C(0x4E42444D41474943), 8);
    put(s, UINT64_C(0x49484156454F5054), 8);
    put(s, flags, 2);
    script_close(s, sent);
}

static inline void send_oldstyle(script *s, uint64_t size, uint32_t flags)
{
    step *sent = script_step(s, STEP_SEND);

    put(s, UINT64_C(0x4E42444D41474943), 8);
    put(s, UINT64_C(0x0000420281861253), 8);
    put(s, size, 8);
    put(s, flags, 4);
    put_zeroes(s, 124);
    script_close(s, sent);
}

// The answer to EXPORT_NAME, with or without the 124 zeroes.
static inline void send_export(script *s, uint64_t size, unsigned flags, int zeroes)
{
    step *sent = script_step(s, STEP_SEND);

    put(s, size, 8);
    put(s, flags, 2);
    put_zeroes(s, zeroes ? 124 : 0);
    script_close(s, sent);
}

static inline step *send_reply_open(script *s, uint32_t option, uint32_t type, size_t size)
{
    step *sent = script_step(s, STEP_SEND);

    put(s, UINT64_C(0x0003E889045565A9), 8);
    put(s, option, 4);
    put(s, type, 4);
    put(s, size, 4);
    return sent;
}

static inline void send_reply(script *s, uint32_t option, uint32_t type, const void *data,
                              size_t size)
{
    step *sent = send_reply_open(s, option, type, size);

    put_bytes(s, data, size);
    script_close(s, sent);
}

static inline void send_ack(script *s, uint32_t option)
{
    send_reply(s, option, 1, "", 0);
}

// A refusal: `number` 1 is NBD_REP_ERR_UNSUP, and so on.
static inline void send_refusal(script *s, uint32_t option, uint32_t number, const char *text)
{
    send_reply(s, option, UINT32_C(0x80000000) + number, text, strlen(text));
}

static inline void send_info_export(script *s, uint32_t option, uint64_t size, unsigned flags)
{
    step *sent = send_reply_open(s, option, 3, 12);

    put(s, 0, 2);
    put(s, size, 8);
    put(s, flags, 2);
    script_close(s, sent);
}

// NBD_INFO_NAME (1), NBD_INFO_DESCRIPTION (2), or one that is unknown.
static inline void send_info_text(script *s, uint32_t option, unsigned type, const char *text)
{
    step *sent = send_reply_open(s, option, 3, 2 + strlen(text));

    put(s, type, 2);
    put_text(s, text);
    script_close(s, sent);
}

static inline void send_info_block_size(script *s, uint32_t option, uint32_t minimum,
                                        uint32_t preferred, uint32_t maximum)
{
    step *sent = send_reply_open(s, option, 3, 14);

    put(s, 3, 2);
    put(s, minimum, 4);
    put(s, preferred, 4);
    put(s, maximum, 4);
    script_close(s, sent);
}

static inline void send_server(script *s, const char *name, const char *description)
{
    step *sent = send_reply_open(s, 3, 2, 4 + strlen(name) + strlen(description));

    put(s, strlen(name), 4);
    put_text(s, name);
    put_text(s, description);
    script_close(s, sent);
}

static inline void send_context(script *s, uint32_t option, uint32_t id, const char *name)
{
    step *sent = send_reply_open(s, option, 4, 4 + strlen(name));

    put(s, id, 4);
    put_text(s, name);
    script_close(s, sent);
}

// What the client's memory holds when these bytes count.
static inline void script_paint(script *s, int r, uint64_t offset, uint64_t size, int hole)
{
    const request *of = &s->requests[r];
    unsigned char *image = s->bytes + (of->image - s->bytes);
    uint64_t place;

    for (place = 0; place < of->op.size; place++) {
        uint64_t at = of->op.offset + place;

        if (at - offset >= size) continue;
        if (!hole) {
            image[place] = export_byte(at);
        } else if (!(of->op.flags & NBD_SPARSE)) {
            image[place] = 0;
        }
    }
}

static inline void send_simple(script *s, int r, uint32_t error)
{
    const nbd_op *op = &s->requests[r].op;
    step *sent = script_step(s, STEP_SEND);

    sent->request = r;
    sent->cookie_at = 8;
    put(s, 0x67446698, 4);
    put(s, error, 4);
    put(s, 0, 8);
    if (op->command == NBD_READ && !error) {
        export_fill(script_room(s, (size_t)op->size), op->offset, (size_t)op->size);
        script_paint(s, r, op->offset, op->size, 0);
    }
    script_close(s, sent);
}

enum { MORE = 0, DONE = 1 }; // reply flags

enum {
    TYPE_NONE = 0,
    TYPE_DATA = 1,
    TYPE_HOLE = 2,
    TYPE_EXTENTS = 5,
    TYPE_EXTENTS_64 = 6,
    TYPE_ERROR = 0x8001,
    TYPE_ERROR_OFFSET = 0x8002
};

// A header of the negotiated kind; the payload of `size` bytes is put after it.
static inline step *send_chunk_open(script *s, int r, unsigned flags, unsigned type, uint64_t size)
{
    int extended = s->protocol == NBD_PROTOCOL_EXTENDED;
    step *sent = script_step(s, STEP_SEND);

    sent->request = r;
    sent->cookie_at = 8;
    put(s, extended ? 0x6E8A278C : 0x668E33EF, 4);
    put(s, flags, 2);
    put(s, type, 2);
    put(s, 0, 8);
    if (extended) put(s, s->requests[r].op.offset, 8);
    put(s, size, extended ? 8 : 4);
    return sent;
}

static inline void send_chunk(script *s, int r, unsigned flags, unsigned type, const void *data,
                              size_t size)
{
    step *sent = send_chunk_open(s, r, flags, type, size);

    put_bytes(s, data, size);
    script_close(s, sent);
}

static inline void send_none(script *s, int r)
{
    send_chunk(s, r, DONE, TYPE_NONE, "", 0);
}

static inline void send_data(script *s, int r, unsigned flags, uint64_t offset, size_t size)
{
    step *sent = send_chunk_open(s, r, flags, TYPE_DATA, 8 + size);

    put(s, offset, 8);
    export_fill(script_room(s, size), offset, size);
    script_close(s, sent);
    script_paint(s, r, offset, size, 0);
}

static inline void send_hole(script *s, int r, unsigned flags, uint64_t offset, uint32_t size)
{
    step *sent = send_chunk_open(s, r, flags, TYPE_HOLE, 12);

    put(s, offset, 8);
    put(s, size, 4);
    script_close(s, sent);
    script_paint(s, r, offset, size, 1);
}

// An error chunk of any type: `tail` bytes follow the text.
static inline step *send_error_open(script *s, int r, unsigned flags, unsigned type, uint32_t error,
                                    const char *text, size_t tail)
{
    step *sent = send_chunk_open(s, r, flags, type, 6 + strlen(text) + tail);

    put(s, error, 4);
    put(s, strlen(text), 2);
    put_text(s, text);
    return sent;
}

static inline void send_error(script *s, int r, unsigned flags, uint32_t error, const char *text)
{
    script_close(s, send_error_open(s, r, flags, TYPE_ERROR, error, text, 0));
}

static inline void send_error_at(script *s, int r, unsigned flags, uint32_t error, const char *text,
                                 uint64_t offset)
{
    step *sent = send_error_open(s, r, flags, TYPE_ERROR_OFFSET, error, text, 8);

    put(s, offset, 8);
    script_close(s, sent);
}

typedef struct extent {
    uint64_t size;
    uint64_t flags;
} extent;

static inline void send_extents(script *s, int r, unsigned flags, uint32_t context,
                                const extent *extents, uint32_t count)
{
    int extended = s->protocol == NBD_PROTOCOL_EXTENDED;
    unsigned width = extended ? 8 : 4;
    step *sent = send_chunk_open(s, r, flags, extended ? TYPE_EXTENTS_64 : TYPE_EXTENTS,
                                 width + (uint64_t)count * 2 * width);
    uint32_t i;

    put(s, context, 4);
    if (extended) put(s, count, 4);
    for (i = 0; i < count; i++) {
        put(s, extents[i].size, width);
        put(s, extents[i].flags, width);
    }
    script_close(s, sent);
}

// Adds bytes to what was sent last.
static inline void send_behind(script *s, uint64_t value, unsigned width)
{
    put(s, value, width);
    s->steps[s->step_count - 1].size += width;
}

static inline void send_end(script *s)
{
    script_step(s, STEP_END);
}

static inline void server_seals(script *s)
{
    script_step(s, STEP_SEAL);
}

/// The transport ///

static inline void transport_takes(script *s, size_t size)
{
    script_step(s, STEP_HOLD)->size = size;
}

static inline void transport_takes_all(script *s)
{
    script_step(s, STEP_RELEASE);
}

/// Events ///

static inline nbd_event *see_event(script *s, int r, uint32_t type)
{
    step *see = script_step(s, STEP_SEE);

    see->request = r;
    see->event.type = type;
    return &see->event;
}

static inline void see_ready(script *s)
{
    see_event(s, SESSION, NBD_EVENT_READY);
}

// The result of a request that the server answered, or that failed by name.
static inline void see_done_at(script *s, int r, int error, uint32_t server_error, uint64_t offset)
{
    nbd_event *done = see_event(s, r, NBD_EVENT_DONE);

    done->error = error;
    done->server_error = server_error;
    done->error_offset = offset;
}

static inline void see_done(script *s, int r, int error)
{
    see_done_at(s, r, error, error > 0 ? (uint32_t)error : 0, s->requests[r].op.offset);
}

static inline void see_hole(script *s, int r, uint64_t offset, uint64_t size)
{
    nbd_event *hole = see_event(s, r, NBD_EVENT_HOLE);

    hole->offset = offset;
    hole->size = size;
}

static inline void see_extent(script *s, int r, uint32_t context, uint64_t offset, extent what)
{
    nbd_event *seen = see_event(s, r, NBD_EVENT_EXTENT);

    seen->context = context;
    seen->offset = offset;
    seen->size = what.size;
    seen->flags = what.flags;
}

// A text of a request, or with SESSION of an option.  text: for the life of the script.
static inline nbd_event *see_text(script *s, int r, uint32_t option, uint32_t kind,
                                  const char *text)
{
    nbd_event *seen = see_event(s, r, NBD_EVENT_TEXT);

    seen->option = option;
    seen->text_kind = kind;
    seen->text = text;
    seen->text_length = (uint32_t)strlen(text);
    return seen;
}

// Why `option`, or with option 0 the request, failed.
static inline void see_message(script *s, int r, uint32_t option, int error, const char *text)
{
    nbd_event *seen = see_text(s, r, option, NBD_TEXT_MESSAGE, text);

    seen->error = error;
    seen->server_error = option ? UINT32_C(0x80000000) + (uint32_t)(-100 - error) : (uint32_t)error;
}

static inline nbd_event *see_option(script *s, uint32_t option, int error)
{
    nbd_event *seen = see_event(s, SESSION, NBD_EVENT_OPTION);

    seen->option = option;
    seen->error = error;
    seen->server_error = error ? UINT32_C(0x80000000) + (uint32_t)(-100 - error) : 0;
    return seen;
}

// One context of the reply to SET_META_CONTEXT or LIST_META_CONTEXT, the `index`th.
static inline void tell_context(script *s, uint32_t option, uint32_t index, uint32_t id,
                                const char *name)
{
    send_context(s, option, id, name);
    see_text(s, SESSION, option, NBD_TEXT_CONTEXT, name)->context = index;
}

static inline void see_starttls(script *s)
{
    see_event(s, SESSION, NBD_EVENT_STARTTLS);
}

static inline void see_closed(script *s, int error)
{
    see_event(s, SESSION, NBD_EVENT_CLOSED)->error = error;
}

static inline void see_undone(script *s, int r)
{
    script_step(s, STEP_FED);
    script_step(s, STEP_UNDONE)->request = r;
}

/// Sentences ///

enum {
    FIXED = 1,
    NO_ZEROES = 2,
    EXPORT_SIZE = 1 << 20,
    // READ_ONLY and ROTATIONAL are missing, RESIZE and MULTI_CONN do not matter.
    EXPORT_FLAGS = NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH | NBD_OFFERS_FUA | NBD_OFFERS_TRIM |
                   NBD_OFFERS_WRITE_ZEROES | NBD_OFFERS_DF | NBD_OFFERS_CACHE | NBD_OFFERS_FAST_ZERO
};

static inline void greet_fixed(script *s)
{
    send_greeting(s, FIXED | NO_ZEROES);
    want_client_flags(s, FIXED | NO_ZEROES);
}

// Extended headers and structured replies are asked for, and agreed to as
// `protocol` says.
static inline void agree_on(script *s, int protocol)
{
    if (!(s->config.flags & NBD_WITHOUT_EXTENDED_HEADERS)) {
        want_option(s, 11, "", 0);
        if (protocol == NBD_PROTOCOL_EXTENDED) {
            send_ack(s, 11);
        } else {
            send_refusal(s, 11, 1, "");
        }
    }
    if (protocol != NBD_PROTOCOL_EXTENDED && !(s->config.flags & NBD_WITHOUT_STRUCTURED_REPLY)) {
        want_option(s, 8, "", 0);
        if (protocol == NBD_PROTOCOL_STRUCTURED) {
            send_ack(s, 8);
        } else {
            send_refusal(s, 8, 1, "");
        }
    }
    s->protocol = protocol;
}

// The server refuses the option that was asked for last.
static inline void refuse_option(script *s, uint32_t option, uint32_t number, const char *text)
{
    send_refusal(s, option, number, text);
    if (text[0]) see_message(s, SESSION, option, -100 - (int)number, text);
    see_option(s, option, -100 - (int)number);
}

static inline void go(script *s, uint64_t size, unsigned flags)
{
    want_go(s, s->config.export_name ? s->config.export_name : "");
    send_info_export(s, 7, size, flags);
    send_ack(s, 7);
    see_ready(s);
}

// Everything up to READY, with an export that offers every command.
static inline void open_session(script *s, int protocol)
{
    greet_fixed(s);
    agree_on(s, protocol);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
}

// The options are the program's from here on.
static inline void open_options(script *s)
{
    s->config.flags |= NBD_NEGOTIATE;
    greet_fixed(s);
    see_option(s, 0, 0);
}

// An option without data is asked for and acknowledged.
static inline void option_succeeds(script *s, uint32_t option)
{
    client_asks(s, option, NULL);
    want_option(s, option, "", 0);
    send_ack(s, option);
    see_option(s, option, 0);
}

static inline void go_asked(script *s, const char *name)
{
    client_asks(s, 7, name);
    want_go(s, name);
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    see_ready(s);
}

// Everything up to READY of an export of any size and flags, with metadata contexts
// that the server numbers `ids`.
static inline void open_contexts(script *s, int protocol, const char *const *names,
                                 const uint32_t *ids, uint32_t count, uint64_t size, unsigned flags)
{
    uint32_t i;

    s->config.queries = names;
    s->config.query_count = count;
    greet_fixed(s);
    agree_on(s, protocol);
    want_meta(s, 10, "", names, count);
    for (i = 0; i < count; i++)
        tell_context(s, 10, i, ids[i], names[i]);
    send_ack(s, 10);
    go(s, size, flags);
}

static inline void close_session(script *s)
{
    client_disconnects(s);
    want_disconnect(s);
    send_end(s);
    see_closed(s, 0);
}

// The session dies because the server broke a rule, taking request `r` with it.
static inline void die(script *s, int r, int error)
{
    see_done(s, r, error);
    see_closed(s, error);
}

#endif
