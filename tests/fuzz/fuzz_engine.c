// Fuzzes the engine as a whole: configuration, caller, transport and server are all driven
// by the input.  The server inside answers real cookies, so deep states are reached; what
// it sent is modelled, so that a read can be judged byte by byte.
//
// Rules that are checked (a breach traps):
//   - each accepted request finishes exactly once, with its own id and user pointer
//   - a read that succeeds holds what the server sent, each byte sent exactly once
//   - a failed read holds the server's bytes or zeroes (not with NBD_NO_INIT)
//   - memory is free()d as soon as the contract allows it: the sanitizer sees later use
//   - the bytes sent are the right headers and payloads, each once, none behind DISC
//   - nothing but STARTTLS leaves in clear when TLS is required
//   - offers asked for again keep their bytes; NBD_SEND_MORE is never left over
//   - nbd_wants is never 0 with work left, nor NOW for ever; no loop is endless
//   - members of an event that its type does not name are zero

#define NBD_IMPLEMENTATION
#define NBD_NO_SOCKETS
#define NBD_NO_CONVENIENCE
#ifndef NBD_POLL_BYTES
#define NBD_POLL_BYTES 3000
#endif
#ifndef NBD_STAGE
#define NBD_STAGE 64
#endif
#ifndef NBD_IOVECS
#define NBD_IOVECS 5
#endif
#include <stdlib.h>
#define NBD_ASSERT(x) ((x) ? (void)0 : abort())
#include "nbd.h"

#include "fuzz.h"

#define SLOTS 4
#define PIECES 6
#define READ_MOST 6000u
#define QUEUE 65536u
#define STALE 0xA5 // what read memory holds before; no content has it
#define CONTEXTS 3u

/// The model ///

typedef struct request {
    int taken;
    uint64_t id;
    nbd_op op;
    void *memory[PIECES];
    nbd_iovec *iov;
    uint32_t *contexts;
    uint32_t pieces;
    int wired;               // its header was seen by the server
    int whole;               // its payload too
    int closed;              // the last chunk was sent
    int refused;             // an error was sent
    uint32_t cursor;         // next byte that a server answering in order sends
    uint8_t sent[READ_MOST]; // how often content was sent for this byte
    uint8_t hole[READ_MOST];
    uint32_t reported[CONTEXTS];
    int extent_context; // the one being told, or -1
    uint64_t extent_at;
    uint32_t extent_contexts;
} request;

static struct {
    uint8_t out[QUEUE]; // to the client
    uint32_t out_start, out_end;
    uint8_t in[QUEUE]; // from the client, not yet understood
    uint32_t in_size;
    int greeted, style, flags_seen, zeroes, discarded, ended;
    int tainted;     // bytes were sent that are in no model
    int stale;       // STALE was among what was sent
    uint32_t option; // last one whose header has come
    uint32_t option_left;
    uint32_t options_answered;
    int answer_due;
    uint64_t clear_end, given; // bytes delivered; count at the ACK of STARTTLS
    int polite;
    uint64_t size;
    uint32_t export_flags;
    uint64_t last_id;
} server;

static nbd_client *client;
static nbd_slot *slots;
static uint8_t *buffer;
static nbd_context *contexts;
static nbd_config config;
static request requests[SLOTS];
static nbd_transport transports[2];
static int own_io, transmission, secure, tls_due, closed, gentle, out_broken, stalled;
static uint64_t moved, happened;
static char *option_name, *meta_name;
static char **option_queries;
static void *option_data;
static int option_due;
static unsigned last_send_flags;
static int last_send_moved;

// Own I/O: what is on offer.
static nbd_iovec out_offer[8], in_offer[8];
static unsigned out_count, in_count;

static uint8_t content(uint64_t at)
{
    return (uint8_t)(1 + (at * 7 + (at >> 8)) % 127);
}

static uint8_t pattern(uint64_t at)
{
    return (uint8_t)(at * 13 + (at >> 8) + 5);
}

static char *text_of(uint32_t size)
{
    char *p = (char *)bytes(size + 1u);
    memset(p, 'n', size);
    p[size] = '\0';
    return p;
}

/// Requests ///

static void free_request(request *r)
{
    uint32_t i;
    for (i = 0; i < r->pieces; i++) {
        free(r->memory[i]);
    }
    free(r->iov);
    free(r->contexts);
    memset(r, 0, sizeof *r);
}

static request *request_of(uint64_t id)
{
    int i;
    for (i = 0; i < SLOTS; i++) {
        if (requests[i].taken && requests[i].id == id) return &requests[i];
    }
    return NULL;
}

static uint8_t *request_byte(request *r, uint64_t place)
{
    uint32_t i;
    if (!r->iov) return (uint8_t *)r->memory[0] + place;
    for (i = 0; place >= r->iov[i].size; i++) {
        place -= r->iov[i].size;
    }
    return (uint8_t *)r->iov[i].base + place;
}

static void give_pieces(request *r, uint32_t size)
{
    uint32_t left = size;
    r->pieces = 1 + pick(PIECES);
    r->iov = (nbd_iovec *)bytes(r->pieces * sizeof *r->iov);
    for (uint32_t i = 0; i < r->pieces; i++) {
        uint32_t n = i + 1 == r->pieces ? left : (pick(3) ? wide() % (left + 1) : 0);
        r->memory[i] = bytes(n);
        r->iov[i].base = n || pick(2) ? r->memory[i] : NULL;
        r->iov[i].size = n;
        left -= n;
    }
    r->op.iov = r->iov;
    r->op.iov_count = r->pieces;
}

static void give_memory(request *r)
{
    uint32_t size = (uint32_t)r->op.size, i;
    int writes = r->op.command == NBD_WRITE || r->op.command == NBD_RAW;
    if (r->op.command != NBD_RAW && pick(3) == 0) {
        give_pieces(r, size);
    } else {
        r->pieces = 1;
        r->memory[0] = bytes(size);
        r->op.buffer = writes ? NULL : r->memory[0];
        r->op.data = writes ? r->memory[0] : NULL;
    }
    for (i = 0; i < size; i++) {
        *request_byte(r, i) = writes ? pattern(r->op.offset + i) : STALE;
    }
}

static void give_contexts(request *r)
{
    uint32_t i, n = 1 + pick(CONTEXTS + 1);
    r->contexts = (uint32_t *)bytes(n * sizeof *r->contexts);
    for (i = 0; i < n; i++) {
        r->contexts[i] = (i + pick(2)) % (CONTEXTS + 1);
    }
    r->op.contexts = r->contexts;
    r->op.context_count = n;
    r->pieces = 1;
    r->memory[0] = bytes(8 + 4 * (size_t)n);
    r->op.buffer = r->memory[0];
}

static void choose_place(nbd_op *op)
{
    static const uint16_t sizes[] = {512, 1, 7, 64, 300, 1024, 4096, 6000, 0, 511};
    op->size = sizes[pick(10)];
    op->offset =
        pick(4) ? wide() & ~(uint64_t)(pick(2) ? 511 : 0) : server.size - op->size - pick(3);
    if (op->command >= NBD_TRIM && op->command < NBD_RAW && pick(4) == 0) {
        op->size = server.size >> pick(3);
        op->offset = 0;
    }
}

static void issue(void)
{
    static const uint16_t flags[] = {
        0,           0,       NBD_NO_INIT, NBD_SPARSE,    NBD_DF,
        NBD_REQ_ONE, NBD_FUA, NBD_NO_HOLE, NBD_FAST_ZERO, NBD_NO_INIT | NBD_SPARSE};
    request *r = NULL;
    int i, error;
    for (i = 0; i < SLOTS && !r; i++) {
        r = requests[i].taken ? NULL : &requests[i];
    }
    if (!r) return;
    memset(r, 0, sizeof *r);
    r->op.command = pick(3) ? NBD_READ : 1 + pick(NBD_RAW);
    r->op.flags = flags[pick(10)];
    r->op.user = r;
    r->extent_context = -1;
    if (r->op.command != NBD_FLUSH) choose_place(&r->op);
    if (r->op.command == NBD_RAW) {
        r->op.raw_type = pick(10);
        r->op.size = pick(3) ? r->op.size % 100 : r->op.size;
    }
    if (r->op.command <= NBD_WRITE || (r->op.command == NBD_RAW && pick(2))) give_memory(r);
    if (r->op.command == NBD_BLOCK_STATUS && pick(2)) give_contexts(r);
    error = nbd_issue(client, &r->op, &r->id);
    if (error) {
        free_request(r);
        return;
    }
    MUST(transmission && r->id != 0 && request_of(r->id) == NULL);
    r->taken = 1;
}

/// The server: what it sends ///

static void out8(unsigned x)
{
    MUST(server.out_end < QUEUE);
    server.stale |= x == STALE;
    server.out[server.out_end++] = (uint8_t)x;
}

static void out16(uint32_t x)
{
    out8(x >> 8 & 255);
    out8(x & 255);
}

static void out32(uint32_t x)
{
    out16(x >> 16);
    out16(x & 0xffff);
}

static void out64(uint64_t x)
{
    out32((uint32_t)(x >> 32));
    out32((uint32_t)x);
}

static void out_text(uint32_t n)
{
    while (n--) {
        out8('t');
    }
}

static uint8_t protocol(void)
{
    return nbd_negotiated(client)->protocol;
}

static void chunk(const request *r, unsigned flags, unsigned type, uint64_t length)
{
    int extended = protocol() == NBD_PROTOCOL_EXTENDED;
    out32(extended ? 0x6e8a278c : 0x668e33ef);
    out16(flags);
    out16(type);
    out64(r->id);
    if (extended) {
        out64(r->op.offset);
        out64(length);
    } else {
        out32((uint32_t)length);
    }
}

static void close_reply(request *r, unsigned flags)
{
    if (flags & 1) r->closed = 1;
}

static void count_content(request *r, uint64_t offset, uint32_t n, int hole)
{
    uint32_t i;
    uint64_t place = offset - r->op.offset;
    if (r->closed || r->op.command != NBD_READ || offset < r->op.offset || n > r->op.size ||
        place > r->op.size - n) {
        return;
    }
    for (i = 0; i < n; i++) {
        if (r->sent[place + i] < 200) r->sent[place + i]++;
        r->hole[place + i] = (uint8_t)hole;
    }
}

static void send_data(request *r, uint64_t offset, uint32_t n, unsigned flags)
{
    uint32_t i;
    chunk(r, flags, 1, 8 + (uint64_t)n);
    out64(offset);
    for (i = 0; i < n; i++) {
        out8(content(offset + i));
    }
    if (n) count_content(r, offset, n, 0);
    close_reply(r, flags);
}

static void send_hole(request *r, uint64_t offset, uint32_t n, unsigned flags)
{
    chunk(r, flags, 2, 12);
    out64(offset);
    out32(n);
    if (n) count_content(r, offset, n, 1);
    close_reply(r, flags);
}

static void send_error(request *r, unsigned type, unsigned flags)
{
    static const uint32_t errors[] = {5, 108, 22, 9999, 0xffffffff, 0};
    static const uint16_t lengths[] = {0, 5, 300, 4096, 4097};
    uint32_t text = lengths[pick(5)], error = errors[pick(6)];
    uint32_t tail = type == 0x8001 ? 0 : type == 0x8002 ? 8 : pick(20);
    chunk(r, flags, type, 6 + text + tail);
    out32(error);
    out16(text);
    out_text(text);
    if (type == 0x8002) {
        out64(r->op.offset + (pick(8) ? r->op.size / 2 : r->op.size));
    } else {
        out_text(tail);
    }
    r->refused |= !r->closed;
    close_reply(r, flags);
}

static void send_status(request *r, unsigned flags)
{
    int extended = protocol() == NBD_PROTOCOL_EXTENDED;
    uint32_t i, n = 1 + pick(5), context = pick(8) ? pick(CONTEXTS) : 9;
    uint32_t claimed = n + (pick(16) == 1);
    chunk(r, flags, (extended ? 6u : 5u) + (pick(20) == 1),
          (uint64_t)n * (extended ? 16 : 8) + (extended ? 8 : 4) + (pick(20) == 1));
    out32(100 + context);
    if (extended) out32(claimed);
    for (i = 0; i < n; i++) {
        uint64_t size = r->op.size / n + (pick(6) == 1), state = pick(4);
        if (i + 1 == n && pick(4) == 1) size = UINT64_MAX >> pick(32);
        if (pick(30) == 1) size = 0;
        if (pick(20) == 1) state = (uint64_t)1 << 40;
        extended ? out64(size) : out32((uint32_t)size);
        extended ? out64(state) : out32((uint32_t)state);
    }
    if (context < CONTEXTS && !r->closed) r->reported[context]++;
    close_reply(r, flags);
}

static void send_simple(request *r, uint32_t error)
{
    uint32_t i, n = r->op.command == NBD_READ && !error && protocol() == NBD_PROTOCOL_SIMPLE
                        ? (uint32_t)r->op.size
                        : 0;
    out32(0x67446698);
    out32(error);
    out64(r->id);
    for (i = 0; i < n; i++) {
        out8(content(r->op.offset + i));
    }
    if (n) count_content(r, r->op.offset, n, 0);
    r->refused |= error != 0 && !r->closed;
    close_reply(r, 1);
}

// The next bytes in order, as a data chunk or a hole; DONE with the last.
static void send_in_order(request *r, uint32_t n)
{
    uint32_t left = (uint32_t)r->op.size - r->cursor;
    uint64_t at = r->op.offset + r->cursor;
    n = n < left ? n : left;
    r->cursor += n;
    if (n == 0) {
        chunk(r, 1, 0, 0);
        close_reply(r, 1);
    } else if (pick(4) == 1) {
        send_hole(r, at, n, n == left);
    } else {
        send_data(r, at, n, n == left);
    }
}

static void send_right(request *r)
{
    if (protocol() == NBD_PROTOCOL_SIMPLE) {
        send_simple(r, 0);
    } else if (r->op.command == NBD_READ) {
        send_in_order(r, READ_MOST);
    } else if (r->op.command == NBD_BLOCK_STATUS) {
        send_status(r, pick(4) ? 0 : 1);
    } else {
        chunk(r, 1, 0, 0);
        close_reply(r, 1);
    }
}

static void send_noise(void)
{
    unsigned n = 1 + pick(24);
    server.tainted = 1;
    while (n--) {
        out8(byte());
    }
}

static void flip(void)
{
    uint32_t size = server.out_end - server.out_start;
    uint8_t *at;
    if (size == 0) return;
    server.tainted = 1;
    at = &server.out[server.out_start + wide() % size];
    *at ^= (uint8_t)(1u << pick(8));
    server.stale |= *at == STALE;
}

static void answer_request(void)
{
    request *r = &requests[pick(SLOTS)], ghost;
    uint32_t size, n;
    uint64_t at;
    if (!r->taken || (r->closed && pick(32))) return;
    if (!r->wired && pick(8)) return; // mostly not before it was asked
    size = r->op.size < READ_MOST ? (uint32_t)r->op.size : READ_MOST;
    n = pick(6) ? 1 + wide() % (size + 1) : pick(2);
    at = r->op.offset + wide() % (size + 3) - (pick(8) == 1);
    switch (pick(20)) {
    case 0:
    case 1:
    case 2:
    case 3: send_right(r); break;
    case 4: send_data(r, at, n, pick(4) == 1); break;
    case 5: send_hole(r, at, n, pick(4) == 1); break;
    case 6: send_error(r, 0x8001, pick(2)); break;
    case 7: send_error(r, 0x8002, pick(2)); break;
    case 8: send_error(r, 0x8003, pick(2)); break;
    case 9:
        chunk(r, 1, 0, pick(16) == 1);
        close_reply(r, 1);
        break;
    case 10: send_simple(r, pick(2) ? 0 : 5); break;
    case 11: send_status(r, pick(2)); break;
    case 12:
    case 13:
    case 14: send_in_order(r, n); break;
    case 15: // a cookie that is not in flight, nor will be: nbd_init starts the numbers anew
        if (request_of(server.last_id) || server.last_id >> 16 > client->serial) break;
        ghost = *r;
        ghost.id = server.last_id;
        chunk(&ghost, 1, 0, 0);
        break;
    case 16: chunk(r, pick(2), pick(8), pick(2) ? 0xffffffffu : UINT64_MAX >> pick(64)); break;
    case 17: send_noise(); break;
    case 18: flip(); break;
    default: // in order from behind
        for (n = size; n >= 64; n -= 64) {
            send_data(r, r->op.offset + n - 64, 64, 0);
        }
    }
}

static void option_reply(uint32_t type, uint32_t length)
{
    out64(0x3e889045565a9);
    out32(server.option);
    out32(type);
    out32(length);
}

static void option_done(uint32_t type)
{
    static const uint16_t lengths[] = {0, 0, 0, 9, 300, 4096, 5000};
    uint32_t text = type & 0x80000000u ? lengths[pick(7)] : 0;
    option_reply(type, text);
    out_text(text);
    server.answer_due = 0;
    if (server.option == NBD_OPTION_STARTTLS && type == 1) {
        server.clear_end = server.given + server.out_end - server.out_start;
    }
}

static void send_export(void)
{
    option_reply(3, 12);
    out16(0);
    out64(server.size);
    out16(server.export_flags);
}

static void send_block_sizes(void)
{
    option_reply(3, 14);
    out16(3);
    out32(pick(4) ? 1u : 1u << pick(18));
    out32(4096);
    out32(pick(4) ? 1u << 25 : 0xffffffffu);
}

static void send_info_text(void)
{
    static const uint16_t lengths[] = {0, 5, 300, 4096, 4097, 9000};
    uint32_t n = lengths[pick(6)];
    option_reply(3, n + 2);
    out16(1 + pick(4));
    out_text(n);
}

static void send_export_name(void)
{
    uint32_t n = pick(2) ? pick(20) : 300, about = pick(3) ? 0 : wide() % 4100;
    option_reply(2, 4 + n + about);
    out32(n);
    out_text(n + about);
}

static void send_context(uint32_t id)
{
    uint32_t i, n = pick(4) ? 15 : 400;
    option_reply(4, 4 + n);
    out32(100 + id);
    for (i = 0; i < n; i++) {
        out8(i < 5 ? (unsigned char)"base:"[i] : 'a');
    }
}

static void name_reply(void)
{
    out64(server.size);
    out16(server.export_flags);
    if (!(server.zeroes)) out_text(124);
    server.answer_due = 0;
}

static void accept_option(void)
{
    uint32_t i, n;
    switch (server.option) {
    case NBD_OPTION_EXPORT_NAME: name_reply(); return;
    case NBD_OPTION_GO:
    case NBD_OPTION_INFO:
        send_export();
        if (pick(2)) send_block_sizes();
        break;
    case NBD_OPTION_LIST: send_export_name(); break;
    case NBD_OPTION_SET_META_CONTEXT:
    case NBD_OPTION_LIST_META_CONTEXT:
        n = pick(CONTEXTS + 1);
        for (i = 0; i < n; i++) {
            send_context(i);
        }
        break;
    default: break;
    }
    option_done(1);
}

static void answer_option(void)
{
    unsigned what = server.polite ? pick(2) : pick(16);
    if (tls_due) { // in clear, where only TLS may follow
        out64(0);
        return;
    }
    if (!server.answer_due && pick(16) != 1) return;
    switch (what) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4: accept_option(); break;
    case 5: option_done(0x80000001u); break;
    case 6: option_done(0x80000000u + pick(13)); break;
    case 7: send_info_text(); break;
    case 8: send_export_name(); break;
    case 9: send_context(pick(6)); break;
    case 10: send_block_sizes(); break;
    case 11: option_done(1); break;
    case 12: send_noise(); break;
    case 13: flip(); break;
    case 14: option_reply(pick(6), pick(2) ? 0xffffffffu : wide()); break;
    default:
        server.option += pick(3) == 1;
        option_done(1);
        if (pick(2)) out_text(6000); // more than any read-ahead holds
    }
}

static void greet(void)
{
    unsigned flags = pick(8) ? 3 : pick(8);
    server.greeted = 1;
    server.style = pick(8) != 1;
    out64(0x4e42444d41474943);
    if (server.style) {
        out64(0x49484156454f5054);
        out16(flags);
        server.zeroes = (flags & 2) && !(config.flags & NBD_WITHOUT_NO_ZEROES);
    } else {
        out64(0x420281861253);
        out64(server.size);
        out32(server.export_flags);
        out_text(124);
    }
}

static void serve(void)
{
    if (server.out_start == server.out_end) server.out_start = server.out_end = 0;
    if (server.out_end > QUEUE / 2) return;
    if (!server.greeted) {
        greet();
    } else if (transmission) {
        answer_request();
    } else {
        answer_option();
    }
}

/// The server: what it understands ///

static uint64_t in64(uint32_t at)
{
    return nbdi_get64(server.in + at);
}

static uint32_t in32(uint32_t at)
{
    return nbdi_get32(server.in + at);
}

static void swallow(uint32_t n)
{
    MUST(n <= server.in_size);
    server.in_size -= n;
    memmove(server.in, server.in + n, server.in_size);
}

static void check_payload(const request *r, uint32_t head, uint64_t size)
{
    uint64_t i;
    for (i = 0; i < size && r->op.command != NBD_BLOCK_STATUS; i++) {
        MUST(server.in[head + i] == pattern(r->op.offset + i));
    }
}

static uint64_t payload_of(const request *r)
{
    if (r->op.command == NBD_BLOCK_STATUS) {
        return r->op.contexts ? 8 + 4 * (uint64_t)r->op.context_count : 0;
    }
    return r->op.command == NBD_WRITE || (r->op.command == NBD_RAW && r->op.data) ? r->op.size : 0;
}

static void check_header(const request *r, int extended)
{
    static const uint16_t types[] = {0, 0, 1, 3, 4, 5, 6, 7};
    uint32_t flags = nbdi_get16(server.in + 4), type = nbdi_get16(server.in + 6);
    uint64_t size = extended ? in64(24) : in32(24), payload = payload_of(r);
    int has_payload = payload > 0 || r->op.command == NBD_WRITE;
    MUST(in64(16) == r->op.offset);
    if (r->op.command == NBD_RAW) {
        MUST(type == r->op.raw_type && flags == r->op.flags);
        return;
    }
    MUST(type == types[r->op.command]);
    MUST(size == (r->op.contexts ? payload : r->op.size));
    MUST(flags == ((r->op.flags & 0x1f) | (extended && has_payload ? 0x20u : 0)));
    MUST(extended || payload == 0 || r->op.command == NBD_WRITE);
}

static int understand_request(void)
{
    int extended = protocol() == NBD_PROTOCOL_EXTENDED;
    uint32_t head = extended ? 32 : 28;
    request *r;
    MUST(!server.ended);
    if (server.in_size < head) return 0;
    MUST(in32(0) == (extended ? 0x21e41c71u : 0x25609513u));
    if (in64(8) == 0) {
        MUST(nbdi_get16(server.in + 6) == 2 && nbd_count(client)->in_flight == 0);
        server.ended = 1;
        swallow(head);
        MUST(server.in_size == 0);
        return 0;
    }
    r = request_of(in64(8));
    MUST(r);
    r->wired = 1; // may be answered before its payload has come
    if (server.in_size < head + payload_of(r)) return 0;
    check_header(r, extended);
    check_payload(r, head, payload_of(r));
    MUST(!r->whole);
    r->whole = 1;
    swallow(head + (uint32_t)payload_of(r));
    return 1;
}

static int understand_option(void)
{
    uint32_t n;
    if (server.option_left) {
        n = server.option_left < server.in_size ? server.option_left : server.in_size;
        server.option_left -= n;
        swallow(n);
        return n > 0;
    }
    if (!server.flags_seen) {
        if (server.in_size < 4) return 0;
        MUST((in32(0) & ~3u) == 0);
        server.flags_seen = 1;
        swallow(4);
        return 1;
    }
    if (server.in_size < 16) return 0;
    MUST(!server.ended);
    MUST(in64(0) == 0x49484156454f5054);
    MUST(secure || !(config.flags & NBD_TLS_REQUIRE) || in32(8) == NBD_OPTION_STARTTLS);
    server.option = in32(8);
    server.option_left = in32(12);
    server.answer_due = server.option != NBD_OPTION_ABORT;
    server.ended = server.option == NBD_OPTION_ABORT;
    swallow(16);
    return 1;
}

static void take_from_client(const void *from, size_t n)
{
    MUST(n <= QUEUE - server.in_size);
    MUST_BE_SET(from, n);
    memcpy(server.in + server.in_size, from, n);
    server.in_size += (uint32_t)n;
    // READY is not told to a caller who has disconnected before.
    while (server.in_size && (client->transmission ? understand_request() : understand_option())) {
    }
}

static size_t give_to_client(const nbd_iovec *iov, unsigned count, size_t most)
{
    size_t done = 0;
    unsigned i;
    for (i = 0; i < count && done < most; i++) {
        size_t n = server.out_end - server.out_start;
        MUST(iov[i].size > 0);
        n = n < iov[i].size ? n : iov[i].size;
        n = n < most - done ? n : most - done;
        memcpy(iov[i].base, server.out + server.out_start, n);
        server.out_start += (uint32_t)n;
        server.given += n;
        done += n;
        if (n < iov[i].size) break;
    }
    moved += done;
    return done;
}

static size_t take_pieces(const nbd_iovec *iov, unsigned count, size_t most)
{
    size_t done = 0;
    unsigned i;
    for (i = 0; i < count && done < most; i++) {
        size_t n = iov[i].size < most - done ? iov[i].size : most - done;
        MUST(iov[i].size > 0);
        take_from_client(iov[i].base, n);
        done += n;
    }
    moved += done;
    return done;
}

/// The transport ///

static size_t some(void)
{
    static const uint16_t most[] = {65535, 65535, 65535, 1, 3, 19, 33, 200};
    return most[pick(8)];
}

static size_t size_of(const nbd_iovec *iov, unsigned count)
{
    size_t size = 0;
    while (count) {
        size += iov[--count].size;
    }
    return size;
}

static ptrdiff_t hook_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    ptrdiff_t result;
    MUST(context == &transports[secure] && !tls_due && !own_io);
    MUST(count == 1 || !(transports[0].flags & NBD_ONE_PIECE));
    last_send_flags = flags;
    last_send_moved = 0;
    if (stalled) return NBD_IO_WRITE;
    switch (gentle ? 0 : pick(12)) {
    case 1: return NBD_IO_WRITE;
    case 2: return NBD_IO_READ;
    case 3: return 0;
    case 4:
        if (pick(8)) break;
        out_broken = 1;
        return pick(2) ? NBD_IO_ERROR : -77;
    default: break;
    }
    result = (ptrdiff_t)take_pieces(iov, count, gentle ? 65535 : some());
    // A short one counts as blocked for a transport that says so.
    last_send_moved =
        (size_t)result == size_of(iov, count) || !(transports[0].flags & NBD_SHORT_IS_DRY);
    return result;
}

static ptrdiff_t hook_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    size_t n;
    MUST(context == &transports[secure] && !tls_due && !own_io);
    if (stalled) return NBD_IO_READ;
    if (transports[0].flags & NBD_ONE_PIECE) count = 1;
    switch (gentle ? 0 : pick(14)) {
    case 1: return NBD_IO_READ;
    case 2: return NBD_IO_WRITE;
    case 3: return pick(12) ? NBD_IO_READ : NBD_IO_EOF;
    case 4: return pick(12) ? NBD_IO_READ : NBD_IO_ERROR;
    default: break;
    }
    n = give_to_client(iov, count, gentle ? 65535 : some());
    return n ? (ptrdiff_t)n : NBD_IO_READ;
}

/// Events ///

static void check_read(request *r, const nbd_event *event)
{
    uint64_t i;
    int success = event->error == 0;
    if (!success && (r->op.flags & NBD_NO_INIT)) return;
    for (i = 0; i < r->op.size; i++) {
        uint8_t is = *request_byte(r, i);
        int right = r->hole[i] ? is == 0 : is == content(r->op.offset + i);
        if (server.tainted) {
            MUST(is != STALE || server.stale || (success && (r->op.flags & NBD_SPARSE)));
        } else if (success) {
            MUST(r->sent[i] == 1 && (right || (r->hole[i] && (r->op.flags & NBD_SPARSE))));
        } else {
            MUST(is == 0 || is == content(r->op.offset + i));
        }
    }
}

static void check_proof(request *r, const nbd_event *event)
{
    uint64_t i, missing = 0, twice = 0;
    for (i = 0; i < r->op.size; i++) {
        missing += r->sent[i] == 0;
        twice += r->sent[i] > 1;
    }
    MUST(event->error != NBD_ERR_GAP || missing);
    MUST(event->error != NBD_ERR_OVERLAP || twice);
}

static void on_done(const nbd_event *event)
{
    request *r = request_of(event->id);
    uint32_t i, wanted = nbd_negotiated(client)->context_count;
    MUST(r && event->user == r && event->command == r->op.command);
    MUST(event->offset == r->op.offset && event->size == r->op.size);
    MUST(!event->flags && !event->context && !event->text && !event->text_kind && !event->option);
    MUST((event->error > 0) == (event->server_error != 0));
    MUST(event->error <= 0 || server.tainted || r->refused);
    if (!event->error && !server.tainted) {
        MUST(r->closed && !r->refused && r->wired);
        for (i = 0; r->op.command == NBD_BLOCK_STATUS && !r->op.contexts && i < wanted; i++) {
            MUST(r->reported[i] == 1);
        }
    }
    if (r->op.command == NBD_READ) {
        check_read(r, event);
        if (!server.tainted) check_proof(r, event);
    }
    server.last_id = r->id;
    free_request(r);
}

static void on_extent(const nbd_event *event)
{
    request *r = request_of(event->id);
    MUST(r && event->size > 0 && event->user == r);
    MUST(event->context < nbd_negotiated(client)->context_count);
    if (r->extent_context != (int)event->context) {
        MUST(!(r->extent_contexts >> event->context & 1));
        r->extent_contexts |= 1u << event->context;
        r->extent_context = (int)event->context;
        r->extent_at = r->op.offset;
    }
    MUST(event->offset == r->extent_at);
    MUST(event->offset - r->op.offset < r->op.size);
    MUST(!(r->op.flags & NBD_REQ_ONE) || event->size <= r->op.size);
    r->extent_at += event->size;
}

static void on_text(const nbd_event *event)
{
    size_t i;
    unsigned sum = 0;
    uintptr_t at = (uintptr_t)event->text, from = (uintptr_t)buffer;
    MUST(at >= from && event->text_size <= config.buffer_size);
    MUST(at - from <= config.buffer_size - event->text_size);
    MUST(event->text_size <= event->text_length);
    for (i = 0; i < event->text_size; i++) {
        sum += (unsigned char)event->text[i];
    }
    MUST(sum <= 255 * event->text_size);
}

static void free_option(void)
{
    uint32_t i;
    free(option_name);
    free(option_data);
    for (i = 0; option_queries && i < 3; i++) {
        free(option_queries[i]);
    }
    free(option_queries);
    option_name = NULL;
    option_data = NULL;
    option_queries = NULL;
    option_due = 0;
}

static void on_closed(const nbd_event *event)
{
    int i;
    for (i = 0; i < SLOTS; i++) {
        MUST(!requests[i].taken);
    }
    MUST(nbd_count(client)->in_flight == 0 && !event->id && !event->context && !event->flags);
    free_option();
    tls_due = 0;
    closed = 1;
}

static void on_hole(const nbd_event *event)
{
    request *r = request_of(event->id);
    MUST(r && (r->op.flags & NBD_SPARSE) && event->size > 0);
    MUST(event->offset >= r->op.offset && event->size <= r->op.size);
    MUST(event->offset - r->op.offset <= r->op.size - event->size);
}

static void on_event(const nbd_event *event)
{
    MUST(!closed && (!tls_due || event->type == NBD_EVENT_CLOSED));
    happened++;
    switch (event->type) {
    case NBD_EVENT_READY:
        MUST(!transmission && (out_broken || (!server.in_size && !server.option_left)));
        MUST(secure || !(config.flags & NBD_TLS_REQUIRE));
        transmission = 1;
        free(meta_name);
        meta_name = NULL;
        free_option();
        break;
    case NBD_EVENT_DONE: on_done(event); break;
    case NBD_EVENT_HOLE: on_hole(event); break;
    case NBD_EVENT_EXTENT: on_extent(event); break;
    case NBD_EVENT_TEXT: on_text(event); break;
    case NBD_EVENT_OPTION:
        MUST(config.flags & NBD_NEGOTIATE);
        free_option();
        break;
    case NBD_EVENT_STARTTLS:
        tls_due = 1;
        free_option();
        break;
    case NBD_EVENT_CLOSED: on_closed(event); break;
    default: MUST(0);
    }
}

static void pull(unsigned most)
{
    nbd_event event;
    while (most-- && nbd_next(client, &event)) {
        on_event(&event);
    }
}

/// The caller ///

static void negotiate(void)
{
    static const uint8_t numbers[] = {7, 6, 10, 9, 8, 11, 3, 5, 1, 2, 99};
    nbd_option option;
    uint32_t i;
    if (option_due) return;
    memset(&option, 0, sizeof option);
    option.option = numbers[pick(11)];
    if (pick(2)) option.name = option_name = text_of(pick(4) ? pick(9) : wide() % 4200);
    if (pick(3)) {
        option_queries = (char **)bytes(3 * sizeof *option_queries);
        for (i = 0; i < 3; i++) {
            option_queries[i] = text_of(pick(2) ? pick(30) : pick(2) * 4096);
        }
        option.queries = (const char *const *)option_queries;
        option.query_count = pick(4);
    }
    if (pick(8) == 1) {
        option.data_size = wide() % 700;
        option.data = option_data = text_of(option.data_size);
    }
    if (nbd_negotiate(client, &option)) {
        free_option();
        return;
    }
    option_due = 1;
    if (option.option == NBD_OPTION_SET_META_CONTEXT) { // held until READY
        free(meta_name);
        meta_name = option_name;
        option_name = NULL;
    }
}

static void start_tls(void)
{
    int injected = server.clear_end && server.given > server.clear_end;
    if (!tls_due) {
        MUST(nbd_starttls(client, &transports[1]) == NBD_ERR_STATE);
        return;
    }
    if (nbd_starttls(client, own_io ? NULL : &transports[1])) return;
    tls_due = 0;
    secure = 1;
    if (!server.tainted) {
        MUST(!injected || nbd_phase(client) == NBD_PHASE_CLOSING);
        MUST(server.in_size == 0 || out_broken);
        server.out_start = server.out_end = 0; // it went to the TLS handshake
    }
}

static void poll_once(unsigned ready)
{
    last_send_flags = 0;
    last_send_moved = 0;
    nbd_poll(client, ready);
    MUST(!(last_send_moved && (last_send_flags & NBD_SEND_MORE)));
}

// The same bytes, with more only behind them.
static void same_bytes(const nbd_iovec *old, unsigned old_count, const nbd_iovec *new_offer,
                       unsigned new_count, int exact)
{
    size_t i = 0, j = 0, in_old = 0, in_new = 0;
    while (i < old_count) {
        size_t n;
        MUST(j < new_count);
        MUST((uint8_t *)old[i].base + in_old == (uint8_t *)new_offer[j].base + in_new);
        n = old[i].size - in_old;
        if (n > new_offer[j].size - in_new) n = new_offer[j].size - in_new;
        in_old += n;
        in_new += n;
        if (in_old == old[i].size) {
            i++;
            in_old = 0;
        }
        if (in_new == new_offer[j].size) {
            j++;
            in_new = 0;
        }
    }
    MUST(!exact || j == new_count);
}

static void ask_out(void)
{
    nbd_iovec again[8];
    unsigned flags = 77, count = nbd_outgoing(client, again, out_count ? 8 : 1 + pick(8), &flags);
    MUST(flags <= NBD_SEND_MORE && count <= 8);
    if (nbd_phase(client) == NBD_PHASE_CLOSING && count == 0) return;
    same_bytes(out_offer, out_count, again, count, 0);
    memcpy(out_offer, again, sizeof again);
    out_count = count;
}

static void ask_in(void)
{
    nbd_iovec again[8];
    unsigned count = nbd_incoming(client, again, in_count ? 8 : 1 + pick(8));
    MUST(count <= 8);
    if (in_count) same_bytes(in_offer, in_count, again, count, 1);
    memcpy(in_offer, again, sizeof again);
    in_count = count;
}

static void ack_out(void)
{
    ptrdiff_t result;
    if (!out_count) {
        MUST(nbd_sent(client, 1) == NBD_ERR_STATE);
        return;
    }
    switch (gentle ? 0 : pick(12)) {
    case 1: result = 0; break;
    case 2: result = NBD_IO_READ; break;
    case 3: result = NBD_IO_WRITE; break;
    case 4:
        result = pick(8) ? NBD_IO_WRITE : NBD_IO_ERROR;
        out_broken |= result == NBD_IO_ERROR;
        break;
    default: result = (ptrdiff_t)take_pieces(out_offer, out_count, gentle ? 65535 : some());
    }
    MUST(nbd_sent(client, result) == 0);
    out_count = 0;
}

static void ack_in(void)
{
    size_t n;
    if (!in_count) {
        MUST(nbd_received(client, 1) == NBD_ERR_STATE);
        return;
    }
    n = give_to_client(in_offer, in_count, gentle ? 65535 : some());
    if (n == 0 && !gentle && pick(2)) return; // the operation goes on
    MUST(nbd_received(client, n               ? (ptrdiff_t)n
                              : pick(10) != 1 ? NBD_IO_READ
                                              : (pick(2) ? NBD_IO_EOF : NBD_IO_ERROR)) == 0);
    in_count = 0;
}

static void check_wants(void)
{
    unsigned wants, turn;
    pull(100000);
    wants = nbd_wants(client);
    if (nbd_phase(client) == NBD_PHASE_IDLE || tls_due) {
        MUST(wants == 0);
        return;
    }
    if (!own_io) {
        MUST(wants != 0);
        stalled = 1;
        for (turn = 0; turn < 4; turn++) { // nothing moves: NOW must pass
            poll_once(NBD_WANT_READ | NBD_WANT_WRITE);
            pull(100000);
        }
        stalled = 0;
        MUST(closed || tls_due || !(nbd_wants(client) & NBD_WANT_NOW));
        MUST(closed || tls_due || nbd_wants(client));
        return;
    }
    MUST(wants != 0 || out_count || in_count);
    if (wants & NBD_WANT_NOW) {
        unsigned before = out_count != 0, before_in = in_count != 0;
        if (!out_count) ask_out();
        if (!in_count) ask_in();
        MUST((out_count && !before) || (in_count && !before_in));
    }
}

static void act(void)
{
    switch (pick(24)) {
    case 0:
    case 1:
    case 2: issue(); break;
    case 3:
    case 4:
    case 5:
    case 6:
    case 7: serve(); break;
    case 8: negotiate(); break;
    case 9: pick(6) == 1 ? (void)nbd_disconnect(client) : check_wants(); break;
    case 10:
        if (pick(12) == 1) nbd_abandon(client);
        break;
    case 11: start_tls(); break;
    case 12: pull(1); break;
    case 13: check_wants(); break;
    case 14:
    case 15: own_io ? ask_out() : poll_once(pick(4)); break;
    case 16:
    case 17: own_io ? ask_in() : poll_once(3); break;
    case 18:
    case 19: own_io ? ack_out() : poll_once(0); break;
    case 20:
    case 21: own_io ? ack_in() : pull(1000); break;
    default: pull(1000);
    }
}

// A turn of an obliging world: everything moves, the server answers as it should.
static void flow(void)
{
    gentle = 1;
    if (own_io) {
        ask_out();
        if (out_count) ack_out();
        serve();
        ask_in();
        if (in_count) ack_in();
    } else {
        poll_once(3);
        serve();
        poll_once(3);
    }
    pull(1000);
    if (tls_due) start_tls();
    gentle = 0;
}

/// A session ///

static void forget_all(void)
{
    int i;
    for (i = 0; i < SLOTS; i++) {
        if (requests[i].taken) free_request(&requests[i]);
    }
    free_option();
    free(meta_name);
    meta_name = NULL;
}

static void begin(void)
{
    static const uint64_t sizes[] = {65536, 65536, 1u << 20, (uint64_t)1 << 33, UINT64_MAX, 1, 0};
    uint64_t last = server.last_id;
    memset(&server, 0, sizeof server);
    server.last_id = last;
    server.size = sizes[pick(7)];
    server.export_flags = pick(4) ? 0x1cedu | 0x200u : wide() | (pick(8) != 1);
    server.polite = pick(3) != 1;
    transmission = secure = tls_due = closed = out_broken = 0;
    out_count = in_count = 0;
    own_io = pick(2) == 1;
    MUST(nbd_connect(client, own_io ? NULL : &transports[0]) == 0);
    MUST(nbd_connect(client, NULL) == NBD_ERR_STATE);
}

static void prepare(void)
{
    static const char *const queries[] = {"base:allocation", "qemu:", "x"};
    static const uint16_t flags[] = {0, 0, 0, 1, 2, 4, 8, 8, 0x10, 0x20, 0x28, 0x18};
    static const uint16_t rooms[] = {256, 257, 300, 512, 1000, 6000};
    static const char *const names[] = {NULL, "", "disk", "a longer name of an export"};
    unsigned i;
    memset(&config, 0, sizeof config);
    server.last_id = 0;
    config.flags = flags[pick(12)] | (pick(4) == 1 ? byte() << 8 & 0x3f00u : 0);
    config.slot_count = 1 + pick(SLOTS);
    config.buffer_size = rooms[pick(6)];
    config.slots = slots = (nbd_slot *)bytes(config.slot_count * sizeof *slots);
    config.buffer = buffer = (uint8_t *)bytes(config.buffer_size);
    config.context_count = CONTEXTS;
    config.contexts = contexts = (nbd_context *)bytes(CONTEXTS * sizeof *contexts);
    config.queries = queries;
    config.query_count = pick(4);
    config.export_name = names[pick(4)];
    config.flags |= pick(8) == 1 ? pick(4) * NBD_WITHOUT_FIXED_NEWSTYLE : 0;
    client = (nbd_client *)bytes(sizeof *client);
    MUST(nbd_init(client, &config) == 0);
    for (i = 0; i < 2; i++) {
        transports[i].flags = pick(4);
        transports[i].context = &transports[i];
        transports[i].send = hook_send;
        transports[i].recv = hook_recv;
    }
    transports[1].flags = transports[0].flags;
}

// Whatever has happened, giving everything back must lead to CLOSED, soon.
static void finish(void)
{
    unsigned turns = 0;
    if (pick(2)) nbd_abandon(client);
    if (tls_due) nbd_abandon(client);
    tls_due = 0;
    while (!closed) {
        MUST(turns++ < 50);
        if (own_io) {
            if (!out_count) out_count = nbd_outgoing(client, out_offer, 8, &last_send_flags);
            if (out_count) MUST(nbd_sent(client, NBD_IO_ERROR) == 0);
            if (!in_count) in_count = nbd_incoming(client, in_offer, 8);
            if (in_count) MUST(nbd_received(client, NBD_IO_EOF) == 0);
            out_count = in_count = 0;
            out_broken = 1;
        } else {
            nbd_abandon(client);
        }
        pull(100000);
        if (tls_due) nbd_abandon(client);
        tls_due = 0;
    }
    MUST(nbd_wants(client) == 0 && nbd_phase(client) == NBD_PHASE_IDLE);
}

static void session(void)
{
    unsigned i, calm = pick(3) ? 8 : 0;
    begin();
    for (i = 0; i < calm && !closed; i++) {
        flow();
    }
    while (input_left && !closed) {
        unsigned before = (unsigned)input_left;
        act();
        if (pick(8) == 1) flow();
        MUST(input_left < before || !input_left);
        if (pick(200) == 199) break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned again = 3;
    input = data;
    input_left = size;
    prepare();
    while (again--) {
        session();
        if (input_left && pick(16) == 1) { // a reset in the middle of everything
            forget_all();
            MUST(nbd_init(client, &config) == 0);
            continue;
        }
        finish();
        if (!input_left) break;
    }
    forget_all();
    free(client);
    free(slots);
    free(buffer);
    free(contexts);
    return 0;
}
