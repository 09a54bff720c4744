// What the programs here share.  A rule is a function; it faces the client with every
// variant of what a server can do wrong, or do oddly but lawfully, in one place.  Each
// variant is a script (../script.h) that is played (../play.h)
//   whole, byte by byte, with would-block anywhere, with the engine's own calls,
//   by a program that calls for no reason,
//   so that bytes of the server end at a page that cannot be touched,
//   and cut everywhere: by the end, by an error, by silence.
// ../checker.h says independently whether the server kept the law.
#ifndef HOSTILE_H
#define HOSTILE_H

#include "../play.h"

// What the independent judge must say of the server.
enum verdict {
    LAWFUL,  // it breaks no rule
    BROKEN,  // it breaks at least one
    UNJUDGED // the rule is the client's own, or an area that the judge leaves open
};

typedef void variant_writer(script *s, const void *row);

enum {
    EDGE_MOST = 200, // longer than all that the parser takes in one piece, but texts
    EDGE_FEW = 48    // longer than every header
};

static inline void check_verdict(enum verdict wanted)
{
    if (wanted == UNJUDGED || (wanted == BROKEN) == (judged_server > 0)) return;
    check_fail(__FILE__, __LINE__, "the judge says that the server broke \"%s\"", judged_rule);
}

static inline const script *variant_script(variant_writer *write, const void *row)
{
    static script written;

    memset(&written, 0, offsetof(script, bytes));
    write(&written, row);
    return &written;
}

// The bytes of the server before the program's first request: they are the same in most
// variants of a rule.
static inline size_t opening_size(const script *s)
{
    size_t i, size = 0;

    for (i = 0; i < s->step_count && s->steps[i].kind != STEP_ISSUE; i++)
        size += s->steps[i].kind == STEP_SEND ? s->steps[i].size : 0;
    return i < s->step_count ? size : 0;
}

static inline void play_edges(const script *s, size_t most, const trace *wanted)
{
    for (play_edge = 1; play_edge <= most; play_edge += check.share)
        play_uncut(s, &whole_mode, wanted);
    play_edge = 0;
}

// The next place to cut; the end is always one.
static inline size_t cut_behind(size_t at, size_t size, size_t stride)
{
    size_t ahead = (at < 512 || at + 128 > size ? 1 : stride) * check.share;

    return at < size && ahead > size - at ? size : at + ahead;
}

static inline void play_cuts(const script *s, size_t from, size_t size, const trace *wanted)
{
    static const ptrdiff_t ends[] = {NBD_IO_EOF, NBD_IO_ERROR, PLAY_SILENCE};
    size_t at, i, stride = size > 2048 ? size / 64 : 1;

    if (s->no_cut) return;
    for (at = from; at <= size; at = cut_behind(at, size, stride)) {
        for (i = 0; i < 3; i++) {
            mode how = whole_mode;

            how.ended = ends[i];
            how.own = i == at % 3;
            how.piece = i == at / 3 % 3 && size < 2048 ? 1 : uncut;
            play_cut(s, how, at, wanted);
        }
    }
}

static inline void play_nagged(const script *s, const trace *wanted)
{
    play_nagging = 1;
    play_uncut(s, &whole_mode, wanted);
    play_uncut(s, &play_modes[4], wanted);
    play_nagging = 0;
}

// The first variant of a rule is played in all ways and cut in its opening too.  Returns
// whether it was played at all.
static inline int face(variant_writer *write, const void *row, enum verdict verdict)
{
    static trace whole;
    const script *s = variant_script(write, row);
    int first = play_variant++ == 0;
    size_t size;

    play_edge = 0;
    play_nagging = 0;
    size = play_whole(s, &whole);
    check_verdict(verdict);
    if (!first && play_variant % check.share) return 1;
    play_every_mode(s);
    play_nagged(s, &whole);
    play_edges(s, first ? EDGE_MOST : EDGE_FEW, &whole);
    play_cuts(s, first ? 0 : opening_size(s), size, &whole);
    return 1;
}

// For thousands of variants that differ in a number: whole, byte by byte, in the least
// buffer with the engine's own calls.
static inline int face_many(variant_writer *write, const void *row, enum verdict verdict)
{
    static trace whole;
    const script *s;

    if (play_variant++ % check.share) return 0;
    s = variant_script(write, row);
    play_edge = 0;
    play_nagging = 0;
    play_whole(s, &whole);
    check_verdict(verdict);
    play_uncut(s, &play_modes[3], &whole);
    play_uncut(s, &play_modes[9], &whole);
    return 1;
}

static inline void hostile_case(const char *name, void (*run)(void))
{
    play_variant = 0;
    check_case(name, run);
    if (play_variant) printf("# %s: %u variants\n", name, play_variant);
}

#define RULE(function) hostile_case(#function, function)

/// Words ///

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

// Lengths around a bound, and those where 32 bits turn over.
enum { AROUND = 10 };

static inline uint64_t length_around(uint64_t bound, size_t i)
{
    static const uint64_t turns[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};

    return i < 5 ? bound - 2 + i : turns[i - 5];
}

// A program that may have asked for `option` by hand sees its end.
static inline void see_closed_by(script *s, int error, const char *detail)
{
    nbd_event *closed = see_event(s, SESSION, NBD_EVENT_CLOSED);

    closed->error = error;
    closed->detail = detail;
}

static inline void die_by(script *s, int r, const char *detail)
{
    nbd_event *done = see_event(s, r, NBD_EVENT_DONE);

    done->error = NBD_ERR_PROTOCOL;
    done->error_offset = s->requests[r].op.offset;
    done->detail = detail;
    see_closed_by(s, NBD_ERR_PROTOCOL, detail);
}

// A text of `size` bytes that the script keeps; it may stand for a query too.
static inline const char *script_text(script *s, size_t size)
{
    unsigned char *text = script_room(s, size + 1);
    size_t i;

    for (i = 0; i < size; i++)
        text[i] = (unsigned char)(i == 1 ? ':' : 'a' + i % 26);
    text[size] = '\0';
    return (const char *)text;
}

static inline void op_is(nbd_op *op, uint32_t command, uint64_t offset, uint64_t size)
{
    memset(op, 0, sizeof *op);
    op->command = command;
    op->offset = offset;
    op->size = size;
}

// As open_session, without the one flag that is against the law in simple sessions.
static inline void open_simple(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    go(s, EXPORT_SIZE, EXPORT_FLAGS & ~(unsigned)NBD_OFFERS_DF);
}

// The stream is in step: one more request is answered, and the session ends well.
static inline void session_lives(script *s)
{
    int r = client_issues(s, NBD_FLUSH, 0, 0, 0);

    want_request(s, r);
    if (s->protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, r, 0);
    } else {
        send_none(s, r);
    }
    see_done(s, r, 0);
    close_session(s);
}

#endif
