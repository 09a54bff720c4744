// Plays a script (script.h) against the client, cut in many ways, and checks that the
// client sends exactly the wanted bytes, that exactly the wanted events come, and that
// no memory is touched that is not lent to it at that moment.
#ifndef PLAY_H
#define PLAY_H

#include <sys/mman.h>

#include "checker.h"
#include "script.h"

enum {
    PLAY_STREAM = 1 << 20, // bytes that the server can send in a session
    PLAY_EVENTS = 1024,
    PLAY_TEXTS = 1 << 16,
    PLAY_REGION = 1 << 18, // memory of one request, between two guard pages
    PLAY_PAGE = 4096,
    PLAY_IDLE_TURNS = 64,
    PLAY_STATES = 256,
    PLAY_EDGE_PAGES = 2, // behind the edge; they hold a buffer of the modes' size
    PLAY_SILENCE = 1     // for mode.ended
};

static const size_t uncut = (size_t)-1;

/// Modes ///

typedef struct mode {
    const char *name;
    size_t piece;    // most bytes that a call of a hook moves; 0: random
    int blocking;    // each hook blocks before each call that moves bytes
    int one_piece;   // the transport looks at the first piece only
    int own;         // no transport: every send is acknowledged after its reply was fed
    size_t buffer;   // size of the client's buffer
    uint64_t seed;   // for random modes
    size_t cut_at;   // the stream of the server ends after so many bytes
    ptrdiff_t ended; // what receiving gives then: NBD_IO_EOF, NBD_IO_ERROR; or PLAY_SILENCE:
                     // nothing ever comes, and the program gives up
} mode;

static const mode whole_mode = {"whole", uncut, 0, 0, 0, NBD_BUFFER_NAMES, 0, uncut, NBD_IO_EOF};

static const mode play_modes[] = {
    {"whole, least buffer", uncut, 0, 0, 0, NBD_BUFFER_MIN, 0, uncut, NBD_IO_EOF},
    {"whole, large buffer", uncut, 0, 0, 0, NBD_BUFFER_GOOD, 0, uncut, NBD_IO_EOF},
    {"one byte per call", 1, 0, 0, 0, NBD_BUFFER_NAMES, 0, uncut, NBD_IO_EOF},
    {"one byte per call, least buffer", 1, 0, 0, 0, NBD_BUFFER_MIN, 0, uncut, NBD_IO_EOF},
    {"would block between bytes", 1, 1, 0, 0, NBD_BUFFER_NAMES, 0, uncut, NBD_IO_EOF},
    {"would block, least buffer", 1, 1, 0, 0, NBD_BUFFER_MIN, 0, uncut, NBD_IO_EOF},
    {"one piece", uncut, 0, 1, 0, NBD_BUFFER_NAMES, 0, uncut, NBD_IO_EOF},
    {"one piece, would block", 7, 1, 1, 0, NBD_BUFFER_NAMES, 0, uncut, NBD_IO_EOF},
    {"own I/O", uncut, 0, 0, 1, NBD_BUFFER_NAMES, 0, uncut, NBD_IO_EOF},
    {"own I/O, one byte", 1, 0, 0, 1, NBD_BUFFER_MIN, 0, uncut, NBD_IO_EOF},
};

/// State ///

typedef struct seen_event {
    nbd_event event;
    int request;
    int expected;     // a SEE step has asked for it
    const char *text; // its own copy
} seen_event;

typedef struct trace {
    size_t count;
    seen_event events[PLAY_EVENTS];
} trace;

enum { SEAL_KEY = 0x5A }; // what the transport of "TLS" exclusive-ors each byte with

struct play;

// What a transport works on: the stream of a play, in clear or sealed.
typedef struct wire {
    struct play *play;
    unsigned char key;
} wire;

typedef struct play {
    const script *script;
    mode mode;
    nbd_client client;
    nbd_context contexts[64 * NBD_RANGES];
    wire wires[2]; // in clear, sealed
    nbd_transport transports[2];
    int sealed;               // the client has started TLS
    unsigned char server_key; // SEAL_KEY when the server has

    size_t step;    // the next one
    size_t matched; // bytes of it that came
    size_t accept;  // bytes that the transport takes before it blocks
    int in_hook;    // the program's steps have to wait
    int closed;     // CLOSED was pulled
    int ended;      // the client was told that the stream is over
    int end_sent;   // the server closed
    int farewell;   // the client said goodbye
    int clean_end;  // and did so before the stream was over
    int more;       // the last send carried NBD_SEND_MORE
    int blocked[2]; // receive, send: the last call blocked
    int moved;      // something happened in this turn

    unsigned char cookies[SCRIPT_REQUESTS][8];
    uint64_t ids[SCRIPT_REQUESTS];
    int issued[SCRIPT_REQUESTS];
    int done[SCRIPT_REQUESTS];
    nbd_iovec iov[SCRIPT_REQUESTS][SCRIPT_PIECES];
    size_t lent[SCRIPT_REQUESTS]; // bytes of the region, counted from its end

    size_t in_size;  // bytes of the client
    size_t in_taken; // by WANT steps
    size_t out_size; // bytes of the server
    size_t out_taken;
    size_t boundary_count;
    size_t boundaries[SCRIPT_STEPS]; // of the server's messages
    size_t text_used;
    trace seen; // from here on only what counts is reset
    unsigned char in[PLAY_STREAM];
    unsigned char out[PLAY_STREAM];
    char texts[PLAY_TEXTS];
} play;

static play stage;
// Judges what crosses, by the specification alone, while a session is played whole.
static checker judge;
static int judging;
// How many rules the server broke in the last session that was judged, and the first.
static size_t judged_server;
static const char *judged_rule;
// Tells sessions of one rule apart in what is printed; 0: there is one only.
static unsigned play_variant;
// NULL, or: whether a layer between the server and the client has something to receive, once
// it is there.  Set in a session, by what starts the layer.
static int (*play_waits)(void);
// The program calls nbd_poll and nbd_next at every turn, for no reason.
static int play_nagging;
// 0, or: the read-ahead lies so that its first bytes, as many as this, end at a page that
// cannot be touched from the moment they came until more come.
static size_t play_edge;
static int play_edge_shut;
// A region between guard pages for each request, one for the client's
// buffer and one for its slots.
static unsigned char *play_arena;

// Which values client.state had between two calls, and which when the stream was cut.
// Only with "Own I/O" all that came before the cut has been parsed by then.
static unsigned char state_reached[PLAY_STATES];
static unsigned char state_cut[PLAY_STATES];

static inline void play_locate(void)
{
    const play *p = &stage;
    int over = p->step == p->script->step_count;
    const step *at = &p->script->steps[p->step];
    char cut[64] = "";

    if (p->mode.cut_at != uncut) {
        snprintf(cut, sizeof cut, ", %s after %lu bytes",
                 p->mode.ended == NBD_IO_EOF     ? "end"
                 : p->mode.ended == PLAY_SILENCE ? "silence"
                                                 : "error",
                 (unsigned long)p->mode.cut_at);
    }
    snprintf(check.where, sizeof check.where,
             "variant %u, mode \"%s\"%s, edge %lu, seed %llu, step %lu (%s, request %d)",
             play_variant, p->mode.name, cut, (unsigned long)play_edge,
             (unsigned long long)p->mode.seed, (unsigned long)p->step,
             over ? "end" : step_names[at->kind], over ? SESSION : at->request);
}

/// Memory ///

static inline unsigned char *region_of(int r)
{
    if (!play_arena) {
        size_t size = (size_t)(SCRIPT_REQUESTS + 2) * (PLAY_REGION + PLAY_PAGE) + PLAY_PAGE;

        play_arena = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(play_arena != MAP_FAILED);
    }
    return play_arena + PLAY_PAGE + (size_t)r * (PLAY_REGION + PLAY_PAGE);
}

static inline unsigned char *region_end(int r)
{
    return region_of(r) + PLAY_REGION;
}

// Memory of the client itself: one byte behind it is a crash.
static inline void *region_last(int r, size_t size)
{
    static int allowed[SCRIPT_REQUESTS + 2]; // system calls are what playing costs most
    unsigned char *most = region_end(r) - NBD_BUFFER_GOOD;

    CHECK(size <= NBD_BUFFER_GOOD);
    if (!allowed[r]) CHECK(mprotect(most, NBD_BUFFER_GOOD, PROT_READ | PROT_WRITE) == 0);
    allowed[r] = 1;
    return region_end(r) - size;
}

/// The edge ///

static inline unsigned char *edge_of_the_bytes(void)
{
    return region_end(SCRIPT_REQUESTS) - PLAY_EDGE_PAGES * PLAY_PAGE;
}

static inline void edge_protect(int protection)
{
    CHECK(mprotect(edge_of_the_bytes(), PLAY_EDGE_PAGES * PLAY_PAGE, protection) == 0);
    play_edge_shut = protection == PROT_NONE;
}

static inline void edge_open(void)
{
    if (play_edge_shut) edge_protect(PROT_READ | PROT_WRITE);
}

// The client's buffer so that its read-ahead, behind the header area, begins `play_edge`
// bytes below the edge.
static inline void *edge_buffer(size_t size, uint32_t slots)
{
    size_t head = 32 * (size_t)slots < size / 4 ? 32 * (size_t)slots : size / 4;

    CHECK(size <= PLAY_EDGE_PAGES * PLAY_PAGE && play_edge <= size - head);
    (void)region_last(SCRIPT_REQUESTS, size); // makes the memory accessible
    return edge_of_the_bytes() - play_edge - head;
}

// How much may be received into these pieces without crossing the edge.
static inline size_t edge_room(const nbd_iovec *iov, unsigned count)
{
    unsigned char *at = iov[count - 1].base, *edge = edge_of_the_bytes();
    size_t before = 0;
    unsigned i;

    if (at < region_of(SCRIPT_REQUESTS) || at >= edge) return uncut;
    for (i = 0; i + 1 < count; i++)
        before += iov[i].size;
    return before + (size_t)(edge - at);
}

static inline void region_allow(play *p, int r, int protection)
{
    size_t size = (p->lent[r] + PLAY_PAGE - 1) / PLAY_PAGE * PLAY_PAGE;

    if (size) CHECK(mprotect(region_end(r) - size, size, protection) == 0);
}

// Lays the pieces out, the last one against the guard page and one byte between two.
static inline void region_lay(play *p, int r)
{
    const request *of = &p->script->requests[r];
    unsigned char *at = region_end(r);
    uint32_t i = of->piece_count ? of->piece_count : 1;

    while (i--) {
        size_t size = of->piece_count ? of->pieces[i] : request_memory(&of->op);

        at -= size;
        p->iov[r][i].base = at;
        p->iov[r][i].size = size;
        at -= i > 0;
    }
    p->lent[r] = (size_t)(region_end(r) - at);
    CHECK(p->lent[r] <= PLAY_REGION);
}

static inline uint32_t region_pieces(const play *p, int r)
{
    return p->script->requests[r].piece_count ? p->script->requests[r].piece_count : 1;
}

static inline void region_fill(play *p, int r)
{
    const nbd_op *op = &p->script->requests[r].op;
    size_t page_rest = (PLAY_PAGE - p->lent[r] % PLAY_PAGE) % PLAY_PAGE;
    uint64_t place = op->offset;
    uint32_t i;

    region_allow(p, r, PROT_READ | PROT_WRITE);
    memset(region_end(r) - p->lent[r] - page_rest, UNTOUCHED, p->lent[r] + page_rest);
    if (!request_sends(op)) return;
    for (i = 0; i < region_pieces(p, r); i++) {
        export_fill(p->iov[r][i].base, place, p->iov[r][i].size);
        place += p->iov[r][i].size;
    }
    region_allow(p, r, PROT_READ);
}

// The bytes around and between the pieces must be as they were.
static inline void region_check_gaps(play *p, int r)
{
    const unsigned char *at = region_end(r) - p->lent[r];
    const unsigned char *page = at - (PLAY_PAGE - p->lent[r] % PLAY_PAGE) % PLAY_PAGE;
    uint32_t i;

    for (; page < at; page++)
        CHECK_EQUAL(*page, UNTOUCHED);
    for (i = 1; i < region_pieces(p, r); i++) {
        CHECK_EQUAL(((const unsigned char *)p->iov[r][i].base)[-1], UNTOUCHED);
    }
}

static inline int read_byte_is_legal(const request *of, uint64_t place, unsigned char value,
                                     int error)
{
    if (!error) return value == of->image[place];
    if (value == 0 || value == export_byte(of->op.offset + place)) return 1;
    return (of->op.flags & NBD_NO_INIT) && value == UNTOUCHED;
}

static inline void region_check_read(play *p, int r, int error)
{
    const request *of = &p->script->requests[r];
    uint64_t place = 0;
    uint32_t i;
    size_t k;

    region_check_gaps(p, r);
    for (i = 0; i < region_pieces(p, r); i++) {
        const unsigned char *piece = p->iov[r][i].base;

        for (k = 0; k < p->iov[r][i].size; k++, place++) {
            if (!read_byte_is_legal(of, place, piece[k], error)) {
                check_fail(__FILE__, __LINE__,
                           "request %d, error %d: byte %lu is %02x, server's %02x", r, error,
                           (unsigned long)place, piece[k], export_byte(of->op.offset + place));
            }
        }
    }
}

/// Events ///

static inline int request_of(const play *p, const nbd_event *event)
{
    int r;

    if (!event->id) return SESSION;
    for (r = 0; r < p->script->request_count; r++) {
        if (p->issued[r] && p->ids[r] == event->id) return r;
    }
    check_fail(__FILE__, __LINE__, "event of an id that was never given");
}

static inline void note_done(play *p, int r, const nbd_event *event)
{
    const nbd_op *op = &p->script->requests[r].op;

    CHECK_EQUAL(p->done[r], 0);
    CHECK_EQUAL(event->command, op->command);
    CHECK_EQUAL(event->offset, op->offset);
    CHECK_EQUAL(event->size, op->size);
    CHECK(event->detail != NULL);
    p->done[r] = 1;
    if (op->command == NBD_READ) region_check_read(p, r, event->error);
    region_allow(p, r, PROT_NONE);
    p->lent[r] = 0;
}

static inline void note_text(play *p, seen_event *seen)
{
    const nbd_event *event = &seen->event;

    CHECK(event->text_size <= event->text_length);
    CHECK(event->text_size >= (event->text_length < 192 ? event->text_length : 192));
    CHECK(p->mode.buffer < NBD_BUFFER_NAMES || event->text_size == event->text_length);
    CHECK(event->text_size <= PLAY_TEXTS - p->text_used);
    if (event->text_size) memcpy(p->texts + p->text_used, event->text, event->text_size);
    seen->text = p->texts + p->text_used;
    p->text_used += event->text_size;
}

static inline void note_event(play *p, const nbd_event *event)
{
    seen_event *seen = &p->seen.events[p->seen.count++];

    CHECK(p->seen.count < PLAY_EVENTS);
    CHECK(!p->closed);
    memset(seen, 0, sizeof *seen);
    seen->event = *event;
    seen->request = request_of(p, event);
    if (seen->request != SESSION) {
        CHECK(event->user == &p->issued[seen->request]);
        CHECK_EQUAL(p->done[seen->request], 0);
    }
    if (event->type == NBD_EVENT_TEXT) note_text(p, seen);
    if (event->type == NBD_EVENT_DONE) note_done(p, seen->request, event);
    if (event->type == NBD_EVENT_CLOSED) {
        CHECK(event->detail != NULL);
        p->closed = 1;
    }
    p->moved = 1;
}

static inline void pull_events(play *p)
{
    nbd_event event;

    for (;;) {
        state_reached[p->client.state] = 1;
        if (!nbd_next(&p->client, &event)) break;
        note_event(p, &event);
    }
    state_reached[p->client.state] = 1;
}

static inline seen_event *event_for(play *p, const step *see)
{
    size_t i;

    for (i = 0; i < p->seen.count; i++) {
        seen_event *seen = &p->seen.events[i];

        if (seen->request == see->request && !seen->expected) return seen;
    }
    return NULL;
}

// Where a session says which text names the broken rule.
static inline void compare_detail(const nbd_event *got, const nbd_event *wanted)
{
    if (!wanted->detail || strcmp(got->detail, wanted->detail) == 0) return;
    check_fail(__FILE__, __LINE__, "detail is \"%s\", not \"%s\"", got->detail, wanted->detail);
}

static inline void compare_event(const seen_event *seen, const nbd_event *wanted)
{
    const nbd_event *got = &seen->event;

    CHECK_EQUAL(got->type, wanted->type);
    CHECK_EQUAL(got->error, wanted->error);
    switch (wanted->type) {
    case NBD_EVENT_DONE:
        CHECK_EQUAL(got->server_error, wanted->server_error);
        CHECK_EQUAL(got->error_offset, wanted->error_offset);
        CHECK_EQUAL(got->flags, 0);
        CHECK_EQUAL(got->context, 0);
        compare_detail(got, wanted);
        break;
    case NBD_EVENT_CLOSED:
        compare_detail(got, wanted);
        if (wanted->option) CHECK_EQUAL(got->option, wanted->option);
        break;
    case NBD_EVENT_HOLE:
    case NBD_EVENT_EXTENT:
        CHECK_EQUAL(got->context, wanted->context);
        CHECK_EQUAL(got->offset, wanted->offset);
        CHECK_EQUAL(got->size, wanted->size);
        CHECK_EQUAL(got->flags, wanted->flags);
        break;
    case NBD_EVENT_TEXT:
        CHECK_EQUAL(got->option, wanted->option);
        CHECK_EQUAL(got->context, wanted->context);
        CHECK_EQUAL(got->server_error, wanted->server_error);
        CHECK_EQUAL(got->text_kind, wanted->text_kind);
        CHECK_EQUAL(got->text_length, wanted->text_length);
        CHECK_BYTES(seen->text, wanted->text, got->text_size);
        break;
    case NBD_EVENT_OPTION:
        CHECK_EQUAL(got->option, wanted->option);
        // A session may leave open which number stands for its error.
        if (wanted->server_error || !wanted->error) {
            CHECK_EQUAL(got->server_error, wanted->server_error);
        }
        break;
    default: break;
    }
}

/// Steps ///

static inline int issue_step(play *p, int r)
{
    const request *of = &p->script->requests[r];
    nbd_op op = of->op;
    int error;

    if (request_lends(&op)) {
        region_lay(p, r);
        region_fill(p, r);
        if (of->piece_count) {
            op.iov = p->iov[r];
            op.iov_count = of->piece_count;
        } else if (request_sends(&op)) {
            op.data = p->iov[r][0].base;
        } else {
            op.buffer = p->iov[r][0].base;
        }
    }
    op.user = &p->issued[r];
    error = nbd_issue(&p->client, &op, &p->ids[r]);
    CHECK(p->ended || error == 0);
    CHECK(error || p->ids[r] != 0);
    p->issued[r] = !error;
    return 1;
}

static inline int call_step(play *p, const step *at)
{
    int error = at->option ? nbd_negotiate(&p->client, at->option) : at->call(&p->client);

    CHECK(p->ended || error == 0);
    return 1;
}

// A call that is refused changes nothing, and nothing of it is held.
static inline int refused_step(play *p, const step *at)
{
    int error =
        at->op ? nbd_issue(&p->client, at->op, NULL) : nbd_negotiate(&p->client, at->option);

    CHECK(error != 0);
    if (!p->ended) CHECK_EQUAL(error, at->error);
    return 1;
}

static inline int want_step(play *p, const step *at)
{
    while (p->matched < at->size && p->in_taken < p->in_size) {
        unsigned char got = p->in[p->in_taken++] ^ p->server_key;
        size_t i = p->matched++;

        if (at->cookie_at && i >= at->cookie_at && i < at->cookie_at + 8) {
            if (at->request != SESSION) p->cookies[at->request][i - at->cookie_at] = got;
        } else if (got != at->bytes[i]) {
            check_fail(__FILE__, __LINE__, "the client's byte %lu of %lu is %02x, not %02x",
                       (unsigned long)i, (unsigned long)at->size, got, at->bytes[i]);
        }
    }
    if (p->matched < at->size) return 0;
    p->matched = 0;
    if (at->farewell) p->farewell = 1;
    return 1;
}

static inline int send_step(play *p, const step *at)
{
    size_t i;

    CHECK(at->size <= PLAY_STREAM - p->out_size);
    memcpy(p->out + p->out_size, at->bytes, at->size);
    if (at->cookie_at && at->request != SESSION) {
        memcpy(p->out + p->out_size + at->cookie_at, p->cookies[at->request], 8);
    }
    for (i = 0; i < 8 && at->cookie_flip; i++) {
        p->out[p->out_size + at->cookie_at + i] ^= (unsigned char)(at->cookie_flip >> (56 - 8 * i));
    }
    for (i = 0; i < at->size; i++)
        p->out[p->out_size + i] ^= p->server_key;
    p->boundaries[p->boundary_count++] = p->out_size;
    p->out_size += at->size;
    return 1;
}

static inline int see_step(play *p, const step *at)
{
    seen_event *seen = p->ended && p->mode.cut_at != uncut ? NULL : event_for(p, at);

    if (!seen) return 0;
    compare_event(seen, &at->event);
    seen->expected = 1;
    return 1;
}

static inline int is_the_servers(enum step_kind kind)
{
    return kind == STEP_WANT || kind == STEP_SEND || kind == STEP_END || kind == STEP_SEAL;
}

// Returns 1 when the step is over.
static inline int play_step(play *p)
{
    const step *at = &p->script->steps[p->step];

    if (p->in_hook && !is_the_servers(at->kind)) return 0;
    switch (at->kind) {
    case STEP_CALL: return call_step(p, at);
    case STEP_ISSUE: return issue_step(p, at->request);
    case STEP_WANT: return want_step(p, at);
    case STEP_SEND: return send_step(p, at);
    case STEP_END: p->end_sent = 1; return 1;
    case STEP_SEE: return see_step(p, at);
    case STEP_HOLD: p->accept = at->size; return 1;
    case STEP_RELEASE: p->accept = uncut; return 1;
    case STEP_FED: return p->out_taken == p->out_size;
    case STEP_UNDONE: CHECK_EQUAL(p->done[at->request], 0); return 1;
    case STEP_REFUSED: return refused_step(p, at);
    case STEP_SEAL: p->server_key = SEAL_KEY; return 1;
    }
    return 0;
}

static inline void play_steps(play *p)
{
    while (p->step < p->script->step_count && play_step(p)) {
        p->step++;
        p->moved = 1;
    }
}

/// Moving bytes ///

static inline size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t piece_now(const play *p)
{
    return p->mode.piece ? p->mode.piece : 1 + check_random(check_random(2) ? 4 : 600);
}

// In blocking modes each direction blocks before every call that moves bytes.
static inline int blocks_now(play *p, int direction)
{
    int blocks = p->mode.piece ? p->mode.blocking && !p->blocked[direction]
                               : check_random(3) == 0 && !p->blocked[direction];

    p->blocked[direction] = blocks;
    return blocks;
}

static inline size_t iov_sum(const nbd_iovec *iov, unsigned count)
{
    size_t sum = 0;
    unsigned i;

    for (i = 0; i < count; i++)
        sum += iov[i].size;
    return sum;
}

static inline void seal_bytes(unsigned char *to, const unsigned char *from, size_t size,
                              unsigned char key)
{
    size_t i;

    for (i = 0; i < size; i++)
        to[i] = from[i] ^ key;
}

// The server receives; returns how many bytes.
static inline size_t take_from_client(const wire *w, const nbd_iovec *iov, unsigned count,
                                      size_t most)
{
    play *p = w->play;
    size_t moved = 0;
    unsigned i;

    most = smaller(most, p->accept);
    for (i = 0; i < count && moved < most; i++) {
        size_t size = smaller(iov[i].size, most - moved);

        CHECK(size <= PLAY_STREAM - p->in_size);
        seal_bytes(p->in + p->in_size, iov[i].base, size, w->key);
        if (judging) checker_client(&judge, iov[i].base, size);
        p->in_size += size;
        moved += size;
    }
    if (p->accept != uncut) p->accept -= moved;
    if (moved) p->moved = 1;
    return moved;
}

static inline size_t out_limit(const play *p)
{
    return smaller(p->out_size, p->mode.cut_at);
}

static inline int stream_is_over(const play *p)
{
    if (p->out_taken == p->mode.cut_at) return p->mode.ended != PLAY_SILENCE;
    return p->end_sent && p->out_taken == p->out_size;
}

static inline int can_receive(const play *p)
{
    if (play_waits) return play_waits();
    return p->out_taken < out_limit(p) || stream_is_over(p);
}

static inline size_t give_to_client(const wire *w, const nbd_iovec *iov, unsigned count,
                                    size_t most)
{
    play *p = w->play;
    size_t moved = 0;
    unsigned i;

    most = smaller(most, out_limit(p) - p->out_taken);
    edge_open();
    if (play_edge) most = smaller(most, edge_room(iov, count));
    for (i = 0; i < count && moved < most; i++) {
        size_t size = smaller(iov[i].size, most - moved);

        seal_bytes(iov[i].base, p->out + p->out_taken, size, w->key);
        if (judging) checker_server(&judge, iov[i].base, size);
        if (play_edge && (unsigned char *)iov[i].base + size == edge_of_the_bytes()) {
            edge_protect(PROT_NONE);
        }
        p->out_taken += size;
        moved += size;
    }
    if (moved) p->moved = 1;
    return moved;
}

static inline ptrdiff_t tell_the_end(play *p)
{
    if (!p->ended) {
        if (judging) checker_server_end(&judge);
        p->clean_end = p->farewell;
        state_cut[p->client.state] |= p->mode.own && p->mode.cut_at != uncut;
        p->moved = 1;
    }
    p->ended = 1;
    return p->mode.cut_at == uncut ? NBD_IO_EOF : p->mode.ended;
}

static inline ptrdiff_t play_send(void *context, const nbd_iovec *iov, unsigned count,
                                  unsigned flags)
{
    const wire *w = context;
    play *p = w->play;
    size_t moved;

    CHECK(count > 0 && iov_sum(iov, count) > 0);
    p->more = 0;
    if (p->mode.one_piece) count = 1;
    CHECK(iov_sum(iov, count) > 0);
    if (blocks_now(p, 1)) return NBD_IO_WRITE;
    moved = take_from_client(w, iov, count, piece_now(p));
    if (!moved) return NBD_IO_WRITE;
    p->more = (flags & NBD_SEND_MORE) != 0;
    p->in_hook = 1;
    play_steps(p);
    p->in_hook = 0;
    return (ptrdiff_t)moved;
}

static inline ptrdiff_t play_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    const wire *w = context;
    play *p = w->play;
    size_t moved;

    CHECK(count > 0 && iov_sum(iov, count) > 0);
    if (p->mode.one_piece) count = 1;
    CHECK(iov_sum(iov, count) > 0);
    if (blocks_now(p, 0)) return NBD_IO_READ;
    moved = give_to_client(w, iov, count, piece_now(p));
    if (moved) return (ptrdiff_t)moved;
    return stream_is_over(p) ? tell_the_end(p) : NBD_IO_READ;
}

// TLS that changes nothing.
static inline int play_starttls(nbd_client *client)
{
    if (judging) checker_tls(&judge);
    return nbd_starttls(client, stage.mode.own ? NULL : &stage.transports[0]);
}

// "TLS" that exclusive-ors each byte, both ways: a transport over another stream.
static inline int play_seal(nbd_client *client)
{
    stage.sealed = 1;
    if (judging) checker_tls(&judge);
    return nbd_starttls(client, stage.mode.own ? NULL : &stage.transports[1]);
}

/// Drivers ///

static inline void stuck(play *p, unsigned wants)
{
    check_fail(__FILE__, __LINE__, "stuck: client in state %u wants %u, %lu bytes wait for it",
               p->client.state, wants, (unsigned long)(out_limit(p) - p->out_taken));
}

static inline int is_silent(const play *p)
{
    return p->out_taken == p->mode.cut_at && p->mode.ended == PLAY_SILENCE && !p->ended;
}

// With the engine's own calls it is told so that there is nothing to receive.
static inline unsigned wants_when_dry(play *p)
{
    nbd_iovec iov[2];

    if (nbd_incoming(&p->client, iov, 2)) {
        CHECK_EQUAL(nbd_received(&p->client, NBD_IO_READ), 0);
    }
    return nbd_wants(&p->client);
}

// Nothing comes any more.  The client says what a program with a clock needs, asking it
// again changes nothing, and it can be abandoned.
static inline void give_up(play *p)
{
    unsigned wants = p->mode.own ? wants_when_dry(p) : nbd_wants(&p->client);
    const nbd_counters *counters = nbd_count(&p->client);
    uint64_t sent = counters->bytes_sent;
    nbd_event event;

    CHECK((wants & NBD_WANT_NOW) == 0);
    CHECK((wants & NBD_WANT_READ) != 0 || nbd_phase(&p->client) == NBD_PHASE_STARTTLS);
    CHECK(nbd_phase(&p->client) != NBD_PHASE_IDLE);
    CHECK_EQUAL(counters->bytes_received, p->out_taken);
    if (!p->mode.own) CHECK_EQUAL(nbd_poll(&p->client, 0), 0);
    CHECK_EQUAL(nbd_next(&p->client, &event), 0);
    CHECK_EQUAL(counters->bytes_sent, sent);
    CHECK_EQUAL(nbd_abandon(&p->client), 0);
    p->ended = 1;
    p->moved = 1;
}

// Nothing but what nbd_wants asks for is done: a wrong answer of it gets stuck.
static inline void drive_poll(play *p)
{
    int idle = 0;

    while (!p->closed) {
        unsigned wants, ready;

        p->moved = 0;
        play_steps(p);
        pull_events(p);
        if (p->closed) break;
        play_steps(p);
        wants = nbd_wants(&p->client);
        ready = wants & ((can_receive(p) ? NBD_WANT_READ : 0) | (p->accept ? NBD_WANT_WRITE : 0));
        if (play_nagging) ready = NBD_WANT_READ | NBD_WANT_WRITE;
        if (ready || (wants & NBD_WANT_NOW)) {
            CHECK_EQUAL(nbd_poll(&p->client, ready), 0);
            CHECK(!p->more);
        } else if (!p->moved && is_silent(p)) {
            give_up(p);
        } else if (!p->moved) {
            stuck(p, wants);
        }
        pull_events(p);
        idle = p->moved ? 0 : idle + 1;
        if (idle > PLAY_IDLE_TURNS) stuck(p, wants);
    }
}

static inline void check_same_offer(play *p, const nbd_iovec *first, unsigned count)
{
    nbd_iovec again[SCRIPT_PIECES * 2];
    unsigned flags = 0, i;

    CHECK(nbd_outgoing(&p->client, again, count, &flags) == count);
    for (i = 0; i < count; i++) {
        CHECK(again[i].base == first[i].base);
        CHECK(i + 1 == count ? again[i].size >= first[i].size : again[i].size == first[i].size);
    }
}

static inline void feed_all(play *p)
{
    nbd_iovec iov[2];
    unsigned count;

    while (can_receive(p) && !p->ended && !p->closed &&
           (count = nbd_incoming(&p->client, iov, 2)) > 0) {
        size_t moved = give_to_client(&p->wires[p->sealed], iov, count, piece_now(p));

        CHECK(iov_sum(iov, count) > 0);
        CHECK_EQUAL(nbd_received(&p->client, moved ? (ptrdiff_t)moved : tell_the_end(p)), 0);
        pull_events(p);
    }
}

static inline void drive_own(play *p)
{
    int idle = 0;

    while (!p->closed) {
        nbd_iovec iov[SCRIPT_PIECES * 2];
        unsigned flags = 0, count;
        size_t moved;

        p->moved = 0;
        play_steps(p);
        pull_events(p);
        if (p->closed) break;
        play_steps(p);
        count = nbd_outgoing(&p->client, iov, SCRIPT_PIECES * 2, &flags);
        moved = count ? take_from_client(&p->wires[p->sealed], iov, count, piece_now(p)) : 0;
        p->in_hook = 1;
        play_steps(p);
        p->in_hook = 0;
        feed_all(p);
        if (count) {
            if (p->client.state < NBDI_DEAD) check_same_offer(p, iov, count);
            CHECK_EQUAL(nbd_sent(&p->client, (ptrdiff_t)moved), 0);
        }
        pull_events(p);
        idle = p->moved ? 0 : idle + 1;
        if (idle > 1 && is_silent(p)) give_up(p);
        if (idle > 1 && !p->ended) stuck(p, nbd_wants(&p->client));
        if (idle > PLAY_IDLE_TURNS) stuck(p, nbd_wants(&p->client));
    }
}

/// Verdicts ///

static inline void check_is_over(play *p)
{
    nbd_event event;
    nbd_op op = NBD_ZERO;
    int r;

    for (r = 0; r < p->script->request_count; r++)
        CHECK_EQUAL(p->done[r], p->issued[r]);
    CHECK_EQUAL(nbd_wants(&p->client), 0);
    CHECK_EQUAL(nbd_next(&p->client, &event), 0);
    CHECK_EQUAL(nbd_count(&p->client)->in_flight, 0);
    op.command = NBD_FLUSH;
    CHECK_EQUAL(nbd_issue(&p->client, &op, NULL), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_disconnect(&p->client), NBD_ERR_STATE);
}

static inline void check_uncut_end(play *p)
{
    size_t i;

    play_steps(p);
    if (p->step < p->script->step_count) check_fail(__FILE__, __LINE__, "steps are left over");
    CHECK_EQUAL(p->in_size, p->in_taken);
    for (i = 0; i < p->seen.count; i++) {
        const seen_event *seen = &p->seen.events[i];

        if (!seen->expected) {
            check_fail(__FILE__, __LINE__, "event %u of request %d (option %u, error %d) too many",
                       seen->event.type, seen->request, seen->event.option, seen->event.error);
        }
    }
}

static inline int closing_error(const trace *t)
{
    return t->events[t->count - 1].event.error;
}

static inline int is_boundary(const play *p, size_t place)
{
    size_t i;

    for (i = 0; i < p->boundary_count; i++) {
        if (p->boundaries[i] == place) return 1;
    }
    return place == p->out_size;
}

static inline int cut_error(const play *p)
{
    if (p->mode.ended == PLAY_SILENCE) return NBD_ERR_ABANDONED;
    if (p->mode.ended != NBD_IO_EOF) return NBD_ERR_TRANSPORT;
    return is_boundary(p, p->mode.cut_at) ? NBD_ERR_CLOSED : NBD_ERR_TRUNCATED;
}

static inline int done_error(const trace *t, int r)
{
    size_t i;

    for (i = 0; i < t->count; i++) {
        if (t->events[i].request == r && t->events[i].event.type == NBD_EVENT_DONE) {
            return t->events[i].event.error;
        }
    }
    return 0;
}

// A request that the cut leaves without an answer fails with the connection's error; one
// that failed by name before keeps that name.
static inline void check_cut_done(const play *p, const seen_event *seen, int error,
                                  const trace *uncut_trace)
{
    int got = seen->event.error;
    int by_name = got >= NBD_ERR_FRAGMENTED && got <= NBD_ERR_GAP;

    if (got != error && got != cut_error(p) && !by_name)
        CHECK_EQUAL(got, done_error(uncut_trace, seen->request));
}

static inline void check_cut_end(play *p, const trace *uncut_trace)
{
    int error = closing_error(&p->seen), uncut_error = closing_error(uncut_trace);
    int only_closed_is_left = p->step + 1 == p->script->step_count;
    size_t i;

    if (!p->ended || p->clean_end || (only_closed_is_left && error == uncut_error)) {
        CHECK_EQUAL(error, uncut_error);
        return;
    }
    CHECK(error != 0);
    if (uncut_error == 0) CHECK_EQUAL(error, cut_error(p));
    for (i = 0; i < p->seen.count; i++) {
        if (p->seen.events[i].event.type == NBD_EVENT_DONE) {
            check_cut_done(p, &p->seen.events[i], error, uncut_trace);
        }
    }
}

static inline void compare_traces(const trace *got, const trace *wanted)
{
    size_t i;

    CHECK_EQUAL(got->count, wanted->count);
    for (i = 0; i < got->count; i++) {
        const nbd_event *a = &got->events[i].event, *b = &wanted->events[i].event;

        CHECK_EQUAL(got->events[i].request, wanted->events[i].request);
        CHECK_EQUAL(a->type, b->type);
        CHECK_EQUAL(a->error, b->error);
        CHECK_EQUAL(a->server_error, b->server_error);
        CHECK_EQUAL(a->error_offset, b->error_offset);
        CHECK_EQUAL(a->command, b->command);
        CHECK_EQUAL(a->option, b->option);
        CHECK_EQUAL(a->offset, b->offset);
        CHECK_EQUAL(a->size, b->size);
        CHECK_EQUAL(a->flags, b->flags);
        CHECK_EQUAL(a->context, b->context);
        CHECK_EQUAL(a->text_kind, b->text_kind);
        CHECK_EQUAL(a->text_length, b->text_length);
        CHECK((!a->detail && !b->detail) || strcmp(a->detail, b->detail) == 0);
    }
}

/// Playing ///

static inline void play_reset(play *p, const script *s, const mode *how)
{
    int r, i;

    for (r = 0; p->script && r < p->script->request_count; r++)
        region_allow(p, r, PROT_NONE);
    edge_open();
    play_waits = NULL;
    memset(p, 0, offsetof(play, seen));
    p->seen.count = 0;
    p->script = s;
    p->mode = *how;
    check.locate = play_locate;
    p->accept = uncut;
    for (i = 0; i < 2; i++) {
        p->wires[i].play = p;
        p->wires[i].key = (unsigned char)(i ? SEAL_KEY : 0);
        p->transports[i].context = &p->wires[i];
        p->transports[i].send = play_send;
        p->transports[i].recv = play_recv;
        p->transports[i].flags = how->one_piece ? NBD_ONE_PIECE : 0;
    }
    check_reseed(check.seed + how->seed);
}

static inline void play_once(play *p, const script *s, const mode *how)
{
    nbd_config config = s->config;

    play_reset(p, s, how);
    if (!config.slot_count) config.slot_count = 4;
    config.slots = region_last(SCRIPT_REQUESTS + 1, config.slot_count * sizeof(nbd_slot));
    config.buffer = play_edge ? edge_buffer(how->buffer, config.slot_count)
                              : region_last(SCRIPT_REQUESTS, how->buffer);
    config.buffer_size = how->buffer;
    config.contexts = p->contexts;
    if (!config.context_count) config.context_count = 8;
    CHECK_EQUAL(nbd_init(&p->client, &config), 0);
    CHECK_EQUAL(nbd_wants(&p->client), 0);
    state_reached[p->client.state] = 1;
    CHECK_EQUAL(nbd_connect(&p->client, how->own ? NULL : &p->transports[0]), 0);
    if (how->own) {
        drive_own(p);
    } else {
        drive_poll(p);
    }
    check_is_over(p);
}

static inline void play_uncut(const script *s, const mode *how, const trace *wanted)
{
    play_once(&stage, s, how);
    check_uncut_end(&stage);
    if (wanted && !s->any_order && !how->own) compare_traces(&stage.seen, wanted);
}

// Where a script wants the session to end with an error, only the script knows why: the
// judge may not have seen the end of the message that is wrong.
static inline int is_wanted_end(const char *rule)
{
    return closing_error(&stage.seen) &&
           (strcmp(rule, "hard_disconnect") == 0 || strcmp(rule, "cut_message") == 0);
}

// A client that tests servers may break the specification, any other may not.
static inline void check_judgement(const script *s)
{
    size_t i;

    checker_end(&judge);
    for (i = 0; i < judge.count[CHECKER_CLIENT] && !s->unlawful; i++) {
        const char *rule = judge.found[CHECKER_CLIENT][i].rule;

        if (!is_wanted_end(rule)) check_fail(__FILE__, __LINE__, "the client broke \"%s\"", rule);
    }
    judged_server = judge.count[CHECKER_SERVER];
    judged_rule = judged_server ? judge.found[CHECKER_SERVER][0].rule : "none";
    checker_free(&judge);
}

// The session as nobody cut it; its trace, and how many bytes the server sent.
static inline size_t play_whole(const script *s, trace *seen)
{
    checker_begin(&judge);
    judging = 1;
    play_uncut(s, &whole_mode, NULL);
    judging = 0;
    check_judgement(s);
    *seen = stage.seen;
    return stage.out_size;
}

static inline void play_every_mode(const script *s)
{
    static trace whole;
    size_t i;

    play_whole(s, &whole);
    for (i = 0; i < sizeof play_modes / sizeof play_modes[0]; i++) {
        play_uncut(s, &play_modes[i], &whole);
    }
    for (i = 0; i < 20; i += check.share) {
        mode random = whole_mode;

        random.name = "random";
        random.piece = 0;
        random.seed = i + 1;
        random.one_piece = i % 5 == 4;
        random.buffer = i % 2 ? NBD_BUFFER_NAMES : NBD_BUFFER_MIN + 16 * i;
        play_uncut(s, &random, &whole);
    }
}

static inline void play_cut(const script *s, mode how, size_t at, const trace *uncut_trace)
{
    how.cut_at = at;
    play_once(&stage, s, &how);
    check_cut_end(&stage, uncut_trace);
}

// Ends and breaks the stream after every byte of the server; in the middle of a session
// that is longer than 2 KiB (bulk data) only after some.
static inline void play_every_cut(const script *s)
{
    static trace whole;
    size_t size = play_whole(s, &whole), stride = size > 2048 ? size / 128 : 1, at;

    if (s->no_cut) return;
    for (at = 0; at <= size; at += (at < 512 || at + 256 > size ? 1 : stride) * check.share) {
        mode how = whole_mode;

        play_cut(s, how, at, &whole);
        how.own = 1;
        play_cut(s, how, at, &whole);
        how.own = 0;
        how.name = "one byte";
        how.piece = at < 2048 ? 1 : uncut;
        how.ended = NBD_IO_ERROR;
        play_cut(s, how, at, &whole);
    }
}

/// Sessions ///

typedef struct session {
    const char *name; // the rule
    void (*write)(script *s);
} session;

#define SESSION_OF(function) \
    { \
#function, function \
    }

static inline const script *session_script(const session *of)
{
    static script written;

    memset(&written, 0, offsetof(script, bytes));
    of->write(&written);
    return &written;
}

// What the getters say after a session.
static inline const nbd_export *export_after(void (*write)(script *s))
{
    const session one = {check.name, write};
    static trace seen;

    play_whole(session_script(&one), &seen);
    return nbd_negotiated(&stage.client);
}

static inline void session_in_every_mode(const void *of)
{
    play_every_mode(session_script(of));
}

static inline void session_cut_everywhere(const void *of)
{
    play_every_cut(session_script(of));
}

#endif
