// Fuzzes replies to BLOCK_STATUS: the input chooses protocol, metadata contexts, requests,
// what the server says, and where its bytes are cut.
//
// What must come out is decided by a decoder in this file, written from the specification
// (chapters "NBD_REPLY_TYPE_BLOCK_STATUS", "NBD_REPLY_TYPE_BLOCK_STATUS_EXT" and
// "Structured reply types").  It sees the same bytes as the client, whole, and nothing
// else.  Each event of the client must be the next one of the decoder, with every member;
// behind a broken rule the requests left over finish with its error, each once.

#define NBD_IMPLEMENTATION
#define NBD_NO_SOCKETS
#define NBD_NO_CONVENIENCE
#include <stdlib.h>
#define NBD_ASSERT(x) ((x) ? (void)0 : abort())
#include "nbd.h"

#include "fuzz.h"

#define REQUESTS 3u
#define CONTEXTS 256u
#define WIRE 16384u
#define ROUNDS 3u

typedef struct request {
    int open; // accepted, and its DONE not yet expected
    uint64_t id;
    nbd_op op;
    uint32_t asked[CONTEXTS];
    uint8_t wanted[CONTEXTS]; // status of this context is still to come
    uint32_t error;           // first one of the server
    uint64_t error_offset;
} request;

static nbd_client *client;
static nbd_slot *slots;
static nbd_context *contexts;
static uint8_t *buffer;
static nbd_config config;
static int extended;
static uint32_t context_count;
static request requests[REQUESTS];

static struct {
    uint8_t bytes[WIRE];
    uint32_t size;
    uint32_t chunk; // where the last one begins
} wire;

/// What must come out ///

static nbd_event expected[WIRE / 8];
static uint32_t expected_count, expected_seen;

static enum { OPEN, PARTIAL, BROKEN, ENDING } decoded; // where the decoder stands
static int shutdown_said;                              // NBD_ESHUTDOWN was seen

static uint64_t number(const uint8_t *p, unsigned width)
{
    uint64_t value = 0;
    while (width--) {
        value = value << 8 | *p++;
    }
    return value;
}

static uint32_t context_id(uint32_t index)
{
    return index * 0x01010003u + 5;
}

static int is_base(uint32_t index)
{
    return index % 2 == 0;
}

static int32_t known_error(uint32_t error)
{
    static const uint8_t known[] = {1, 5, 12, 22, 28, 75, 95, 108};
    size_t i;
    for (i = 0; i < sizeof known; i++) {
        if (known[i] == error) return known[i];
    }
    return NBD_EINVAL;
}

static nbd_event *expect(uint32_t type, const request *r)
{
    nbd_event *event = &expected[expected_count++];
    MUST(expected_count <= sizeof expected / sizeof *expected);
    memset(event, 0, sizeof *event);
    event->type = type;
    event->id = r->id;
    event->user = r->op.user;
    event->command = NBD_BLOCK_STATUS;
    event->offset = r->op.offset;
    event->size = r->op.size;
    return event;
}

static uint32_t open_requests(void)
{
    uint32_t i, count = 0;
    for (i = 0; i < REQUESTS; i++) {
        count += requests[i].open != 0;
    }
    return count;
}

static int32_t result_of(const request *r, int32_t otherwise)
{
    return r->error ? known_error(r->error) : otherwise;
}

static void expect_done(request *r)
{
    nbd_event *done = expect(NBD_EVENT_DONE, r);
    int missing = 0;
    uint32_t i;
    for (i = 0; i < context_count; i++) {
        missing |= r->wanted[i];
    }
    done->error = result_of(r, missing ? NBD_ERR_GAP : 0);
    done->server_error = r->error;
    done->error_offset = r->error_offset;
    r->open = 0;
    if (shutdown_said && open_requests() == 0) decoded = ENDING;
}

/// The decoder ///

static uint32_t at; // in the wire

static int left(uint32_t size)
{
    if (wire.size - at >= size) return 1;
    decoded = PARTIAL;
    return 0;
}

static void must_be(int rule)
{
    if (!rule) decoded = BROKEN;
}

static request *request_of(uint64_t id)
{
    uint32_t i;
    for (i = 0; i < REQUESTS; i++) {
        if (requests[i].open && requests[i].id == id) return &requests[i];
    }
    decoded = BROKEN;
    return NULL;
}

static void note_error(request *r, uint32_t error, uint64_t offset)
{
    if (!r->error) {
        r->error = error;
        r->error_offset = offset;
    }
    shutdown_said |= error == NBD_ESHUTDOWN;
}

static void decode_simple(void)
{
    uint32_t error;
    request *r;
    if (!left(16)) return;
    error = (uint32_t)number(wire.bytes + at + 4, 4);
    r = request_of(number(wire.bytes + at + 8, 8));
    at += 16;
    if (!r) return;
    if (error) { // in place of a chunk: tolerated
        note_error(r, error, r->op.offset);
        expect_done(r);
    } else {
        decoded = BROKEN;
    }
}

static void decode_extent(request *r, uint32_t context, uint64_t *place, int last)
{
    unsigned width = extended ? 8 : 4;
    uint64_t size, flags, before = *place - r->op.offset;
    nbd_event *event;
    if (!left(2 * width)) return;
    size = number(wire.bytes + at, width);
    flags = number(wire.bytes + at + width, width);
    at += 2 * width;
    must_be(size > 0 && size <= UINT64_MAX - *place);
    must_be(flags >> 32 == 0 || !is_base(context));
    must_be(last || size < r->op.size - before);
    must_be(before < r->op.size);
    if (r->op.flags & NBD_REQ_ONE) must_be(last && size <= r->op.size);
    if (decoded != OPEN) return;
    event = expect(NBD_EVENT_EXTENT, r);
    event->offset = *place;
    event->size = size;
    event->flags = flags;
    event->context = context;
    *place += size;
}

static void decode_status(request *r, uint32_t type, uint64_t length)
{
    uint32_t head = extended ? 8 : 4, each = extended ? 16 : 8, context = 0;
    uint64_t i, count, place = r->op.offset;
    must_be(type == (extended ? 6u : 5u));
    must_be(length >= head + each && (length - head) % each == 0);
    count = decoded == OPEN ? (length - head) / each : 0;
    must_be(count <= 1u << 20);
    if (decoded != OPEN || !left(head)) return;
    must_be(!extended || number(wire.bytes + at + 4, 4) == count);
    while (context < context_count && context_id(context) != number(wire.bytes + at, 4)) {
        context++;
    }
    at += head;
    must_be(context < context_count && r->wanted[context]);
    if (decoded != OPEN) return;
    r->wanted[context] = 0;
    for (i = 0; i < count && decoded == OPEN; i++) {
        decode_extent(r, context, &place, i + 1 == count);
    }
}

// The message is handed out as far as the read-ahead holds it.
static void decode_message(request *r, uint32_t error, uint32_t length)
{
    uint32_t head = 32 * config.slot_count, room = (uint32_t)config.buffer_size, here;
    nbd_event *text;
    room -= head < room / 4 ? head : room / 4;
    here = length < room ? length : room;
    if (!length || !left(here)) return;
    text = expect(NBD_EVENT_TEXT, r);
    text->error = known_error(error);
    text->server_error = error;
    text->text_kind = NBD_TEXT_MESSAGE;
    text->text_length = length;
    text->text = (const char *)wire.bytes + at;
    text->text_size = here;
    if (left(length)) at += length;
}

static void decode_error(request *r, uint32_t type, uint64_t length)
{
    uint32_t error, message, rest;
    must_be(length >= 6 && length <= 8192);
    if (decoded != OPEN || !left(6)) return;
    error = (uint32_t)number(wire.bytes + at, 4);
    message = (uint32_t)number(wire.bytes + at + 4, 2);
    at += 6;
    must_be(error != 0 && message <= length - 6 && message <= 4096);
    if (decoded != OPEN) return;
    rest = (uint32_t)length - 6 - message;
    must_be(type > 0x8002 || type < 0x8001 || rest == (type == 0x8002 ? 8 : 0));
    if (decoded != OPEN) return;
    if (type != 0x8002) note_error(r, error, r->op.offset);
    decode_message(r, error, message);
    if (decoded != OPEN || !left(rest)) return;
    if (type == 0x8002) {
        uint64_t offset = number(wire.bytes + at, 8);
        must_be(offset >= r->op.offset && offset - r->op.offset < r->op.size);
        if (decoded == OPEN) note_error(r, error, offset);
    }
    at += rest;
}

static void decode_chunk(void)
{
    uint32_t head = extended ? 32 : 20, flags, type;
    const uint8_t *p = wire.bytes + at;
    uint64_t length;
    request *r;
    if (!left(head)) return;
    flags = (uint32_t)number(p + 4, 2);
    type = (uint32_t)number(p + 6, 2);
    r = request_of(number(p + 8, 8));
    if (!r) return;
    length = extended ? number(p + 24, 8) : number(p + 16, 4);
    must_be(!extended || number(p + 16, 8) == r->op.offset);
    at += head;
    if (decoded != OPEN) return;
    if (type & 0x8000) {
        decode_error(r, type, length);
    } else if (type == 5 || type == 6) {
        decode_status(r, type, length);
    } else {
        must_be(type == 0 && length == 0 && (flags & 1));
    }
    if (decoded == OPEN && (flags & 1)) expect_done(r);
}

static void decode(void)
{
    decoded = OPEN;
    at = 0;
    while (decoded == OPEN && at < wire.size && left(4)) {
        uint32_t magic = (uint32_t)number(wire.bytes + at, 4);
        if (magic == (extended ? 0x6e8a278c : 0x668e33ef)) {
            decode_chunk();
        } else if (magic == 0x67446698 && !extended) {
            decode_simple();
        } else {
            decoded = BROKEN;
        }
    }
}

/// The client ///

static void check_text(const nbd_event *got, const nbd_event *wanted)
{
    uintptr_t from = (uintptr_t)got->text - (uintptr_t)buffer;
    MUST(got->text_size == wanted->text_size && got->text_length == wanted->text_length);
    MUST(from < config.buffer_size && got->text_size <= config.buffer_size - from);
    MUST(memcmp(got->text, wanted->text, got->text_size) == 0);
}

static void check_event(const nbd_event *got, const nbd_event *wanted)
{
    MUST(got->type == wanted->type && got->id == wanted->id && got->user == wanted->user);
    MUST(got->offset == wanted->offset && got->size == wanted->size);
    MUST(got->flags == wanted->flags && got->context == wanted->context);
    MUST(got->error == wanted->error && got->server_error == wanted->server_error);
    MUST(got->error_offset == wanted->error_offset && got->command == wanted->command);
    MUST(got->text_kind == wanted->text_kind && got->option == 0);
    if (wanted->text) {
        check_text(got, wanted);
    } else {
        MUST(!got->text && !got->text_size && !got->text_length);
    }
}

// The requests that the end of the connection finishes, in any order.
static void check_lost(const nbd_event *event, int32_t cause)
{
    nbd_event wanted;
    request *r = (request *)event->user;
    MUST(r >= requests && r < requests + REQUESTS && r->open);
    expect(NBD_EVENT_DONE, r);
    wanted = expected[--expected_count];
    wanted.error = result_of(r, cause);
    wanted.server_error = r->error;
    wanted.error_offset = r->error_offset;
    check_event(event, &wanted);
    r->open = 0;
}

// Returns 1 once CLOSED has come.
static int pull(int32_t cause)
{
    nbd_event event;
    while (nbd_next(client, &event)) {
        if (expected_seen < expected_count) {
            check_event(&event, &expected[expected_seen++]);
        } else if (event.type == NBD_EVENT_CLOSED) {
            MUST(cause && open_requests() == 0);
            MUST(event.error == (shutdown_said ? NBD_ESHUTDOWN : cause));
            return 1;
        } else {
            MUST(cause && event.type == NBD_EVENT_DONE);
            check_lost(&event, cause);
        }
    }
    return 0;
}

static void drain(void)
{
    nbd_iovec iov[4];
    unsigned count, flags;
    while ((count = nbd_outgoing(client, iov, 4, &flags)) != 0) {
        ptrdiff_t sum = 0;
        while (count) {
            MUST_BE_SET(iov[count - 1].base, iov[count - 1].size);
            sum += (ptrdiff_t)iov[--count].size;
        }
        MUST(nbd_sent(client, sum) == 0);
    }
}

// Hands over some of the bytes, and returns how many; 0 if none can be taken.
static uint32_t offer(const uint8_t *from, uint32_t size)
{
    nbd_iovec iov;
    if (nbd_incoming(client, &iov, 1) == 0) return 0;
    if (size > iov.size) size = (uint32_t)iov.size;
    memcpy(iov.base, from, size);
    MUST(nbd_received(client, (ptrdiff_t)size) == 0);
    return size;
}

static int32_t cause_now(void)
{
    return decoded == BROKEN ? NBD_ERR_PROTOCOL : 0;
}

// Returns 1 once CLOSED has come.  The cuts: whole, by the byte, or of mixed sizes.
static int feed(unsigned cut)
{
    uint32_t fed = 0, mix = cut * 2654435761u;
    while (fed < wire.size) {
        uint32_t size = wire.size - fed, most = cut == 1 ? 1 : 1 + (mix >> 16) % 97, took;
        mix = mix * 1664525u + 1013904223u;
        took = offer(wire.bytes + fed, cut && most < size ? most : size);
        fed += took;
        if (pull(cause_now())) return 1;
        drain();
        MUST(took);
    }
    MUST(expected_seen == expected_count && decoded != BROKEN);
    return 0;
}

/// Handshake ///

static void out(uint64_t value, unsigned width)
{
    while (width--) {
        if (wire.size < WIRE) wire.bytes[wire.size++] = (uint8_t)(value >> 8 * width & 255);
    }
}

static void feed_handshake(void)
{
    nbd_event event;
    uint32_t fed = 0;
    while (fed < wire.size) {
        fed += offer(wire.bytes + fed, wire.size - fed);
        while (nbd_next(client, &event)) {
            MUST(event.type == NBD_EVENT_READY || event.type == NBD_EVENT_TEXT);
        }
        drain();
    }
    wire.size = 0;
}

static void option_reply(uint32_t option, uint32_t type, uint32_t length)
{
    out(0x0003e889045565a9, 8);
    out(option, 4);
    out(type, 4);
    out(length, 4);
}

static void shake_hands(void)
{
    uint32_t i;
    wire.size = 0;
    out(0x4e42444d41474943, 8);
    out(0x49484156454f5054, 8);
    out(3, 2);
    feed_handshake();
    option_reply(extended ? 11 : 8, 1, 0);
    feed_handshake();
    for (i = 0; i < context_count; i++) {
        option_reply(10, 4, 4 + 6);
        out(context_id(i), 4);
        out(is_base(i) ? 0x626173653a78 : 0x71656d753a78, 6); // "base:x", "qemu:x"
        feed_handshake();
    }
    option_reply(10, 1, 0);
    feed_handshake();
    option_reply(7, 3, 12);
    out(0, 2);
    out(UINT64_MAX, 8);
    out(0x1001, 2);
    option_reply(7, 1, 0);
    feed_handshake();
    MUST(nbd_phase(client) == NBD_PHASE_TRANSMISSION);
    MUST(nbd_negotiated(client)->context_count == context_count);
}

static void prepare(void)
{
    static const char *const queries[] = {"base:", "qemu:"};
    static const uint16_t counts[] = {1, 2, 3, 5, 32, 33, 64, 256};
    static const uint16_t rooms[] = {256, 257, 300, 1024, 6000};
    memset(&config, 0, sizeof config);
    memset(requests, 0, sizeof requests);
    shutdown_said = 0;
    extended = pick(2) != 0;
    context_count = counts[pick(8)];
    config.flags = extended ? 0 : NBD_WITHOUT_EXTENDED_HEADERS;
    config.slot_count = REQUESTS;
    config.slots = slots = (nbd_slot *)bytes(REQUESTS * sizeof *slots);
    config.buffer_size = rooms[pick(5)];
    config.buffer = buffer = (uint8_t *)bytes(config.buffer_size);
    config.queries = queries;
    config.query_count = 2;
    config.context_count = context_count;
    config.contexts = contexts = (nbd_context *)bytes(context_count * sizeof *contexts);
    client = (nbd_client *)bytes(sizeof *client);
    MUST(nbd_init(client, &config) == 0);
    MUST(nbd_connect(client, NULL) == 0);
    shake_hands();
}

/// Requests ///

// Asks for some contexts only: every nth from the first on.
static void ask_some(request *r)
{
    uint32_t first = pick(context_count > 250 ? 250 : context_count), step = 1 + pick(3), i;
    memset(r->wanted, 0, sizeof r->wanted);
    r->op.contexts = r->asked;
    for (i = first; i < context_count; i += step) {
        r->asked[r->op.context_count++] = i;
        r->wanted[i] = 1;
    }
    r->op.buffer = bytes(8 + 4 * (size_t)r->op.context_count);
}

static void issue(request *r)
{
    static const uint64_t places[] = {0,       512,        4096,          (uint64_t)1 << 32,
                                      1 << 30, 0xffffffff, UINT64_MAX / 2};
    static const uint32_t sizes[] = {512, 1, 4096, 65536, 0x7fffffff, 0xffffffff, 3, 1024};
    unsigned how = byte();
    memset(r, 0, sizeof *r);
    memset(r->wanted, 1, context_count);
    r->op.command = NBD_BLOCK_STATUS;
    r->op.user = r;
    r->op.flags = how & 1 ? NBD_REQ_ONE : 0;
    r->op.size = sizes[how >> 1 & 7];
    if (extended && (how & 0x70) == 0x70) r->op.size <<= 13;
    how = byte();
    r->op.offset = how % 8 == 7 ? UINT64_MAX - r->op.size - (how >> 5) : places[how % 8];
    if (extended && (how & 8)) ask_some(r);
    MUST(nbd_issue(client, &r->op, &r->id) == 0);
    r->open = 1;
    r->error_offset = r->op.offset;
}

static void forget(request *r)
{
    free(r->op.buffer);
    memset(r, 0, sizeof *r);
}

static void issue_some(void)
{
    uint32_t i, count = 1 + pick(REQUESTS);
    for (i = 0; i < count; i++) {
        if (requests[i].open) continue;
        forget(&requests[i]);
        issue(&requests[i]);
    }
    drain();
}

/// What the server says ///

static void chunk_head(const request *r, unsigned flags, unsigned type, uint64_t length)
{
    wire.chunk = wire.size;
    out(extended ? 0x6e8a278c : 0x668e33ef, 4);
    out(flags, 2);
    out(type, 2);
    out(r->id, 8);
    if (extended) out(r->op.offset, 8);
    out(length, extended ? 8 : 4);
}

static uint64_t extent_size(const request *r, uint64_t so_far, uint32_t more)
{
    uint64_t rest = r->op.size > so_far ? r->op.size - so_far : 1;
    switch (pick(12)) {
    case 0: return rest;
    case 1: return rest - 1;
    case 2: return rest + 1;
    case 3: return wide();
    case 4: return 0xffffffff;
    case 5: return UINT64_MAX;
    case 6: return UINT64_MAX - r->op.offset - so_far;
    case 7: return 0;
    case 8: return 1;
    default: return more ? rest / (more + 1) : rest;
    }
}

static uint64_t extent_flags(void)
{
    static const uint64_t flags[] = {0, 1, 2, 3, 0xffffffff, (uint64_t)1 << 32, UINT64_MAX};
    unsigned which = pick(32);
    return flags[which < 28 ? which % 5 : 5 + which % 2];
}

// `wrong` is 0, or what is wrong with the head of the chunk.
static void say_status(const request *r, uint32_t context, uint32_t count, unsigned flags,
                       unsigned wrong)
{
    uint32_t head = extended ? 8 : 4, each = extended ? 16 : 8;
    uint64_t so_far = 0;
    chunk_head(r, flags, (extended ? 6 : 5) ^ (wrong == 1 ? 3 : 0),
               head + (uint64_t)count * each + (wrong == 2 ? 1 + pick(each) : 0));
    out(context_id(context), 4);
    if (extended) out(wrong == 3 ? count + 1 : count, 4);
    while (count--) {
        uint64_t size = extent_size(r, so_far, count);
        out(size, extended ? 8 : 4);
        out(extent_flags(), extended ? 8 : 4);
        so_far += size;
    }
}

// All that was asked for, as the specification wants it.
static void say_all(const request *r)
{
    uint32_t i, count = r->op.flags & NBD_REQ_ONE ? 1 : 1 + pick(4);
    for (i = 0; i < context_count; i++) {
        if (r->wanted[i]) say_status(r, i, count, 0, 0);
    }
    chunk_head(r, 1, 0, 0);
}

static void say_error(const request *r)
{
    static const uint32_t errors[] = {5, 22, 1, 75, 108, 9999, 0xffffffff, 0};
    static const uint16_t types[] = {0x8001, 0x8002, 0x8003, 0xffff};
    static const uint16_t lengths[] = {0, 3, 200, 300, 4096, 4097};
    uint32_t error = errors[pick(8)], type = types[pick(4)], text = lengths[pick(6)];
    uint32_t rest = type == 0x8002 ? 8 : type == 0x8001 ? 0 : pick(20);
    if (text > 300 && pick(4)) text = 3;
    if (rest == 19) rest = 8192 - 6 - text + pick(2); // the bound of a whole chunk
    chunk_head(r, pick(2), type, 6 + text + rest + (pick(16) == 1));
    out(error, 4);
    out(text, 2);
    while (text--) {
        out('a' + text % 26, 1);
    }
    if (type == 0x8002) {
        out(r->op.offset + (pick(4) ? r->op.size / 2 : r->op.size), 8);
    } else {
        while (rest--) {
            out(0, 1);
        }
    }
}

static void say_raw(const request *r)
{
    uint32_t count = pick(40);
    unsigned flags = byte(), type = byte();
    if (type & 0x80) type = type << 8 | byte();
    chunk_head(r, flags, type, pick(4) ? count : (uint64_t)wide() << 8);
    while (count--) {
        out(byte(), 1);
    }
}

static void spoil(void)
{
    uint32_t back = 1 + pick(64);
    unsigned bits = byte();
    if (back <= wire.size) wire.bytes[wire.size - back] ^= (uint8_t)bits;
}

static void repeat(void)
{
    uint32_t from = wire.chunk, end = wire.size;
    wire.chunk = end;
    while (from < end) {
        out(wire.bytes[from++], 1);
    }
}

static void say(void)
{
    unsigned what = byte();
    const request *r = &requests[what >> 4 & 3];
    if (r >= requests + REQUESTS || !r->id) r = &requests[0];
    switch (what & 15) {
    case 0:
    case 1:
    case 2: say_all(r); break;
    case 3:
    case 4:
    case 5:
    case 6: say_status(r, byte() % (context_count + 1), 1 + pick(5), what >> 7, pick(16)); break;
    case 7: say_status(r, pick(3), pick(60), what >> 7, 0); break;
    case 8: chunk_head(r, pick(8) != 1, 0, 0); break;
    case 9:
    case 10: say_error(r); break;
    case 11:
        out(0x67446698, 4);
        out(pick(3) ? wide() : 0, 4);
        out(r->id, 8);
        break;
    case 12: say_raw(r); break;
    case 13: spoil(); break;
    case 14: repeat(); break;
    default:
        if (wire.size) wire.size -= pick(wire.size < 60 ? wire.size : 60);
        break;
    }
}

/// A session ///

// Returns 1 once CLOSED has come.
static int play_round(void)
{
    uint32_t says = 1 + pick(12), cut = pick(12);
    expected_count = expected_seen = wire.size = wire.chunk = 0;
    issue_some();
    while (says-- && input_left) {
        say();
    }
    decode();
    return feed(cut);
}

static void end_session(void)
{
    nbd_iovec iov;
    MUST(nbd_incoming(client, &iov, 1));
    MUST(nbd_received(client, NBD_IO_EOF) == 0);
    MUST(pull(decoded == PARTIAL ? NBD_ERR_TRUNCATED : NBD_ERR_CLOSED));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint32_t i, rounds = 0;
    int closed = 0;
    input = data;
    input_left = size;
    prepare();
    do {
        closed = play_round();
    } while (!closed && decoded == OPEN && !shutdown_said && input_left && ++rounds < ROUNDS);
    if (!closed) end_session();
    for (i = 0; i < REQUESTS; i++) {
        forget(&requests[i]);
    }
    free(client);
    free(slots);
    free(buffer);
    free(contexts);
    return 0;
}
