// A server that answers block status in every way, judged here by the specification's
// sentences on extents and contexts.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "hostile.h"

enum { OFFSET = 65536, BASE = 0, OTHER = 1 };

static const char *const queries[] = {"base:allocation", "other:things"};
static const uint32_t ids[] = {5, 4000000000u};
static const char bad_extent[] = "extent empty, too long or behind the end";

static void open_status(script *s, int protocol, uint32_t contexts, uint64_t size)
{
    open_contexts(s, protocol, queries, ids, contexts, size, EXPORT_FLAGS);
}

static int ask_status(script *s, uint32_t flags, uint64_t size)
{
    int r = client_issues(s, NBD_BLOCK_STATUS, flags, OFFSET, size);

    want_request(s, r);
    return r;
}

/// Extents ///

enum { BYTES = 4, EXTENTS = 3 };

typedef struct extent_row {
    int protocol;
    uint32_t flags;
    unsigned count;
    uint64_t sizes[EXTENTS];
} extent_row;

// How many of the extents are right, from the first on.
static unsigned good_extents(const extent_row *row)
{
    uint64_t before = 0;
    unsigned i;

    for (i = 0; i < row->count; i++) {
        uint64_t size = row->sizes[i];
        int last = i + 1 == row->count;

        if (size == 0 || before >= BYTES) return i;
        if (!last && (size >= BYTES - before || (row->flags & NBD_REQ_ONE))) return i;
        if ((row->flags & NBD_REQ_ONE) && size > BYTES) return i;
        if (size > UINT64_MAX - OFFSET - before) return i;
        before += size;
    }
    return i;
}

static void extents_come(script *s, const void *of)
{
    const extent_row *row = of;
    extent all[EXTENTS];
    unsigned i, good = good_extents(row);
    uint64_t place = OFFSET;
    int r;

    open_status(s, row->protocol, 1, UINT64_MAX);
    r = ask_status(s, row->flags, BYTES);
    for (i = 0; i < row->count; i++) {
        all[i].size = row->sizes[i];
        all[i].flags = i;
    }
    send_extents(s, r, DONE, ids[BASE], all, row->count);
    for (i = 0; i < good; i++) {
        see_extent(s, r, BASE, place, all[i]);
        place += all[i].size;
    }
    if (good < row->count) {
        die_by(s, r, bad_extent);
        return;
    }
    see_done(s, r, 0);
    session_lives(s);
}

// Nothing forbids an extent that ends behind 2^64, but no number can say where.
static enum verdict extents_verdict(const extent_row *row)
{
    unsigned i, good = good_extents(row);

    for (i = 0; i < row->count; i++) {
        if (row->sizes[i] > UINT64_MAX - OFFSET - EXTENTS * BYTES) return UNJUDGED;
    }
    return good < row->count ? BROKEN : LAWFUL;
}

static void face_extents(extent_row *row)
{
    static const uint64_t sizes[] = {0,
                                     1,
                                     2,
                                     3,
                                     4,
                                     5,
                                     8192,
                                     0x7FFFFFFF,
                                     0x80000000,
                                     0xFFFFFFFF,
                                     UINT64_C(1) << 32,
                                     UINT64_C(1) << 63,
                                     UINT64_MAX - OFFSET,
                                     UINT64_MAX - OFFSET + 1,
                                     UINT64_MAX};
    size_t choice = row->protocol == NBD_PROTOCOL_EXTENDED ? COUNT(sizes) : 10;
    size_t all = 1, combination, i;

    for (i = 0; i < row->count; i++)
        all *= choice;
    for (combination = 0; combination < all; combination++) {
        size_t rest = combination;

        for (i = 0; i < row->count; i++, rest /= choice)
            row->sizes[i] = sizes[rest % choice];
        (row->count < EXTENTS ? face : face_many)(extents_come, row, extents_verdict(row));
    }
}

static void extents_follow_each_other_or_end_it(void)
{
    extent_row row;
    int i;

    for (row.protocol = 1; row.protocol < 3; row.protocol++) {
        for (i = 0; i < 2; i++) {
            row.flags = i ? NBD_REQ_ONE : 0;
            for (row.count = 1; row.count <= EXTENTS; row.count++)
                face_extents(&row);
        }
    }
}

/// Contexts ///

enum { SYMBOLS = 5, CHUNKS = 3 }; // two contexts, two that are none, an error

typedef struct chunks_row {
    int protocol;
    unsigned count;
    unsigned chunks[CHUNKS];
} chunks_row;

// What the chunks come to: a detail if one ends it, the error of the request if none does.
typedef struct outcome {
    const char *detail;
    unsigned ends_at; // the chunk that ends it
    int error;
} outcome;

static outcome chunks_outcome(const chunks_row *row)
{
    outcome o = {NULL, 0, 0};
    unsigned seen = 0, i;

    for (i = 0; i < row->count && !o.detail; i++) {
        unsigned symbol = row->chunks[i];

        o.ends_at = i;
        if (symbol == 4) {
            o.error = NBD_EIO;
        } else if (symbol > 1) {
            o.detail = "metadata context not agreed on";
        } else if (seen >> symbol & 1) {
            o.detail = "metadata context twice";
        } else {
            seen |= 1u << symbol;
        }
    }
    if (!o.error && seen != 3) o.error = NBD_ERR_GAP;
    return o;
}

static void send_status_chunk(script *s, int r, unsigned symbol, unsigned flags, int told)
{
    static const uint32_t numbers[] = {5, 4000000000u, 0, 0x05000000};
    extent one = {BYTES, 1};

    if (symbol == 4) {
        send_error(s, r, flags, NBD_EIO, "");
        return;
    }
    send_extents(s, r, flags, numbers[symbol], &one, 1);
    if (told) see_extent(s, r, symbol, OFFSET, one);
}

static void chunks_come(script *s, const void *of)
{
    const chunks_row *row = of;
    outcome o = chunks_outcome(row);
    unsigned i;
    int r;

    open_status(s, row->protocol, 2, EXPORT_SIZE);
    r = ask_status(s, 0, BYTES);
    for (i = 0; i < row->count; i++) {
        int ends = o.detail && i == o.ends_at;

        send_status_chunk(s, r, row->chunks[i], i + 1 == row->count ? DONE : MORE, !ends);
        if (ends) break;
    }
    if (row->count == 0) send_none(s, r);
    if (!o.detail) {
        see_done(s, r, o.error);
        session_lives(s);
        return;
    }
    die_by(s, r, o.detail);
    if (o.error != NBD_EIO) return;
    // The server's error came first.
    s->steps[s->step_count - 2].event.error = NBD_EIO;
    s->steps[s->step_count - 2].event.server_error = NBD_EIO;
    s->steps[s->step_count - 2].event.detail = "";
}

static void each_context_comes_once_or_the_request_fails(void)
{
    chunks_row row;
    unsigned combination, all, i;

    for (row.protocol = 1; row.protocol < 3; row.protocol++) {
        for (row.count = 0, all = 1; row.count <= CHUNKS; row.count++, all *= SYMBOLS) {
            for (combination = 0; combination < all; combination++) {
                unsigned rest = combination;
                outcome o;

                for (i = 0; i < row.count; i++, rest /= SYMBOLS)
                    row.chunks[i] = rest % SYMBOLS;
                o = chunks_outcome(&row);
                face(chunks_come, &row, !o.detail && o.error != NBD_ERR_GAP ? LAWFUL : BROKEN);
            }
        }
    }
}

static void other_number(script *s, const void *of)
{
    const uint64_t *bit = of;
    extent one = {BYTES, 1};
    int r;

    open_status(s, *bit % 2 ? NBD_PROTOCOL_EXTENDED : NBD_PROTOCOL_STRUCTURED, 2, EXPORT_SIZE);
    r = ask_status(s, 0, BYTES);
    send_extents(s, r, DONE, ids[*bit / 32] ^ UINT32_C(1) << *bit % 32, &one, 1);
    die_by(s, r, "metadata context not agreed on");
}

static void number_of_a_context_with_any_bit_wrong_ends_it(void)
{
    uint64_t bit;

    for (bit = 0; bit < 64; bit++)
        face(other_number, &bit, BROKEN);
}

/// Counts ///

typedef struct count_row {
    uint32_t extents;
    uint32_t count;  // as the chunk says it
    uint32_t behind; // bytes more than its extents take
} count_row;

static void counted(script *s, const void *of)
{
    const count_row *row = of;
    extent one = {1, 0};
    step *sent;
    uint32_t i;
    int r;

    open_status(s, NBD_PROTOCOL_EXTENDED, 1, EXPORT_SIZE);
    r = ask_status(s, 0, 1000);
    sent = send_chunk_open(s, r, DONE, TYPE_EXTENTS_64, 8 + 16 * row->extents + row->behind);
    put(s, ids[BASE], 4);
    put(s, row->count, 4);
    for (i = 0; i < row->extents; i++) {
        put(s, one.size, 8);
        put(s, one.flags, 8);
    }
    put_zeroes(s, row->behind);
    script_close(s, sent);
    if (row->behind || row->extents == 0) {
        die_by(s, r, "block status chunk of wrong length");
        return;
    }
    if (row->count != row->extents) {
        die_by(s, r, "wrong number of extents");
        return;
    }
    for (i = 0; i < row->extents; i++)
        see_extent(s, r, BASE, OFFSET + i, one);
    see_done(s, r, 0);
    session_lives(s);
}

static void count_of_extents_is_theirs_or_ends_it(void)
{
    static const uint32_t odd[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1u << 20, 1u << 28};
    count_row row = {0, 0, 0};
    uint32_t i;

    for (row.extents = 0; row.extents < 5; row.extents++) {
        for (i = 0; i < 5 + 2 * COUNT(odd); i++) {
            // The last wrap to what is right if they are multiplied in 32 bits.
            row.count = i < 5                ? row.extents - 2 + i
                        : i < 5 + COUNT(odd) ? odd[i - 5]
                                             : row.extents + odd[i - 5 - COUNT(odd)];
            row.behind = 0;
            face(counted, &row, row.extents && row.count == row.extents ? LAWFUL : BROKEN);
            row.behind = 1 + i % 15;
            face(counted, &row, BROKEN);
        }
    }
}

/// Flags ///

typedef struct flags_row {
    int protocol;
    unsigned context;
    uint64_t flags;
} flags_row;

static void flagged(script *s, const void *of)
{
    const flags_row *row = of;
    extent base = {BYTES, 0}, other = {BYTES, 0};
    int r;

    *(row->context == BASE ? &base : &other) = (extent){BYTES, row->flags};
    open_status(s, row->protocol, 2, EXPORT_SIZE);
    r = ask_status(s, 0, BYTES);
    send_extents(s, r, MORE, ids[OTHER], &other, 1);
    see_extent(s, r, OTHER, OFFSET, other);
    send_extents(s, r, DONE, ids[BASE], &base, 1);
    if (row->context == BASE && row->flags > 0xFFFFFFFF) {
        die_by(s, r, "status flags above 32 bits in base");
        return;
    }
    see_extent(s, r, BASE, OFFSET, base);
    see_done(s, r, 0);
    session_lives(s);
}

static void status_flags_come_as_they_were_sent(void)
{
    static const uint64_t words[] = {0,         3, 0xFFFFFFFD, 0xFFFFFFFF, UINT64_C(0x100000001),
                                     UINT64_MAX};
    flags_row row;
    size_t i;

    for (row.protocol = 1; row.protocol < 3; row.protocol++) {
        for (row.context = 0; row.context < 2; row.context++) {
            for (i = 0; i < 64 + COUNT(words); i++) {
                row.flags = i < 64 ? UINT64_C(1) << i : words[i - 64];
                if (row.protocol == 1 && row.flags > 0xFFFFFFFF) continue;
                face(flagged, &row, UNJUDGED);
            }
        }
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RULE(extents_follow_each_other_or_end_it);
    RULE(each_context_comes_once_or_the_request_fails);
    RULE(number_of_a_context_with_any_bit_wrong_ends_it);
    RULE(count_of_extents_is_theirs_or_ends_it);
    RULE(status_flags_come_as_they_were_sent);
    return check_end();
}
