// A server that answers reads in every way: whether a read may succeed is decided here by
// a model that knows nothing of ranges, only which byte was sent how often.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "hostile.h"

static const uint32_t read_modes[] = {0, NBD_NO_INIT, NBD_SPARSE, NBD_SPARSE | NBD_NO_INIT};

/// Place ///

enum { DISK_SIZE = 512 };

typedef struct place_row {
    int protocol;
    uint32_t flags; // of the read
    uint64_t base;  // its offset
    int hole;
    uint64_t offset; // of the chunk
    uint64_t size;
} place_row;

// In numbers that cannot wrap: how far the chunk begins behind the request.
static int is_inside(const place_row *row)
{
    return row->size > 0 && row->size <= DISK_SIZE && row->offset >= row->base &&
           row->offset - row->base <= DISK_SIZE - row->size;
}

static const char *place_detail(const place_row *row)
{
    if (row->hole) return "hole empty or outside the request";
    return row->size == 0 || row->size > DISK_SIZE ? "data chunk empty or too long"
                                                   : "data outside the request";
}

static void send_placed(script *s, int r, const place_row *row)
{
    step *sent;

    if (row->hole) {
        send_hole(s, r, DONE, row->offset, (uint32_t)row->size);
    } else if (row->size <= DISK_SIZE) {
        send_data(s, r, DONE, row->offset, (size_t)row->size);
    } else {
        sent = send_chunk_open(s, r, DONE, TYPE_DATA, 8 + row->size);
        put(s, row->offset, 8);
        script_close(s, sent);
    }
}

static void placed(script *s, const void *of)
{
    const place_row *row = of;
    int r;

    greet_fixed(s);
    agree_on(s, row->protocol);
    go(s, UINT64_MAX, EXPORT_FLAGS);
    r = client_issues(s, NBD_READ, row->flags, row->base, DISK_SIZE);
    want_request(s, r);
    send_placed(s, r, row);
    if (!is_inside(row)) {
        die_by(s, r, place_detail(row));
        return;
    }
    if (row->hole && (row->flags & NBD_SPARSE)) see_hole(s, r, row->offset, row->size);
    see_done(s, r, row->size == DISK_SIZE ? 0 : NBD_ERR_GAP);
    session_lives(s);
}

static void face_place(place_row *row)
{
    static const uint64_t sizes[] = {0,   1,   2,    510,        511,        512,
                                     513, 514, 4096, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF7};
    size_t i;

    for (i = 0; i < COUNT(sizes); i++) {
        int close_by = row->flags == 0 && row->base == 4096 && row->offset - 4000 < 1000;
        int whole = row->offset == row->base && sizes[i] == DISK_SIZE;

        row->size = sizes[i];
        (close_by ? face : face_many)(placed, row,
                                      whole                  ? LAWFUL
                                      : sizes[i] > DISK_SIZE ? UNJUDGED
                                                             : BROKEN);
    }
}

static void content_lies_inside_its_request_or_ends_it(void)
{
    static const uint64_t bases[] = {0, 4096, UINT64_C(0x7FFFFFFFFFFFFF00), UINT64_MAX - DISK_SIZE};
    static const uint64_t from_base[] = {(uint64_t)-4096,
                                         (uint64_t)-DISK_SIZE,
                                         (uint64_t)-2,
                                         (uint64_t)-1,
                                         0,
                                         1,
                                         2,
                                         DISK_SIZE - 2,
                                         DISK_SIZE - 1,
                                         DISK_SIZE,
                                         DISK_SIZE + 1,
                                         DISK_SIZE + 2,
                                         UINT64_C(1) << 32,
                                         UINT64_C(1) << 63};
    place_row row;
    size_t i, k, l;

    for (row.protocol = 1; row.protocol < 3; row.protocol++) {
        for (i = 0; i < COUNT(read_modes) * COUNT(bases); i++) {
            row.flags = read_modes[i / COUNT(bases)];
            row.base = bases[i % COUNT(bases)];
            for (k = 0; k < COUNT(from_base); k++) {
                for (l = 0; l < 2; l++) {
                    row.hole = (int)l;
                    row.offset = row.base + from_base[k];
                    face_place(&row);
                }
            }
        }
    }
}

/// Every way to fill four bytes ///

enum {
    BYTES = 4,
    INTERVALS = BYTES * (BYTES + 1) / 2,
    SYMBOLS = 2 * INTERVALS + 2, // data, holes, ERROR, ERROR_OFFSET
    CHUNKS = 3
};

typedef struct fill_row {
    int protocol;
    uint32_t flags;
    unsigned count; // of chunks
    unsigned chunks[CHUNKS];
    int ends_by_none; // or the last chunk carries DONE
} fill_row;

typedef struct model {
    unsigned sent[BYTES]; // how often
    int overlap;
    int server_error;
    uint64_t error_offset;
    int byte_failed;         // ERROR_OFFSET named a byte,
    int failed_byte_is_sent; // and then it was sent
} model;

enum { FAILED_BYTE = 2 };

static void interval(unsigned symbol, unsigned *from, unsigned *to)
{
    unsigned i = symbol % INTERVALS;

    for (*from = 0; i >= BYTES - *from; (*from)++)
        i -= BYTES - *from;
    *to = *from + i + 1;
}

// Returns 1 if the content counts: no byte of it came before, in no chunk before either.
static int model_content(model *m, unsigned from, unsigned to)
{
    unsigned i;

    m->failed_byte_is_sent |= m->byte_failed && from <= FAILED_BYTE && to > FAILED_BYTE;
    for (i = from; i < to && !m->overlap; i++)
        m->overlap = m->sent[i] > 0;
    for (i = from; i < to && !m->overlap; i++)
        m->sent[i]++;
    return !m->overlap;
}

static int model_result(const model *m)
{
    unsigned i;

    if (m->server_error) return m->server_error;
    if (m->overlap) return NBD_ERR_OVERLAP;
    for (i = 0; i < BYTES; i++) {
        if (!m->sent[i]) return NBD_ERR_GAP;
    }
    return 0;
}

static void model_error(model *m, int error, uint64_t offset)
{
    if (m->server_error) return;
    m->server_error = error;
    m->error_offset = offset;
}

static void fill_chunk(script *s, int r, model *m, const fill_row *row, unsigned symbol,
                       unsigned flags)
{
    uint64_t base = s->requests[r].op.offset;
    unsigned from, to;

    if (symbol == 2 * INTERVALS) {
        send_error(s, r, flags, NBD_EIO, "");
        model_error(m, NBD_EIO, base);
    } else if (symbol == 2 * INTERVALS + 1) {
        send_error_at(s, r, flags, NBD_ENOSPC, "", base + FAILED_BYTE);
        model_error(m, NBD_ENOSPC, base + FAILED_BYTE);
        m->byte_failed = 1;
    } else if (symbol < INTERVALS) {
        interval(symbol, &from, &to);
        send_data(s, r, flags, base + from, to - from);
        (void)model_content(m, from, to);
    } else {
        interval(symbol, &from, &to);
        send_hole(s, r, flags, base + from, to - from);
        if (model_content(m, from, to) && (row->flags & NBD_SPARSE)) {
            see_hole(s, r, base + from, to - from);
        }
    }
}

// What the judge must say is known only after the script is written.
static model last_fill;

static void filled(script *s, const void *of)
{
    const fill_row *row = of;
    unsigned i;
    int r, error;

    memset(&last_fill, 0, sizeof last_fill);
    open_session(s, row->protocol);
    r = client_issues(s, NBD_READ, row->flags, 4096, BYTES);
    want_request(s, r);
    last_fill.error_offset = 4096;
    for (i = 0; i < row->count; i++) {
        int last = i + 1 == row->count && !row->ends_by_none;

        fill_chunk(s, r, &last_fill, row, row->chunks[i], last ? DONE : MORE);
    }
    if (row->ends_by_none) send_none(s, r);
    error = model_result(&last_fill);
    see_done_at(s, r, error, (uint32_t)last_fill.server_error, last_fill.error_offset);
    session_lives(s);
}

static void face_fill(fill_row *row)
{
    static script unused;
    enum verdict verdict;
    int full = row->count < 2 || (row->count == 2 && row->flags == 0 && row->protocol == 1);

    memset(&unused, 0, offsetof(script, bytes));
    filled(&unused, row);
    verdict = last_fill.overlap || last_fill.failed_byte_is_sent ||
                      model_result(&last_fill) == NBD_ERR_GAP
                  ? BROKEN
                  : LAWFUL;
    (full ? face : face_many)(filled, row, verdict);
}

static void face_fills_of(fill_row *row, unsigned count)
{
    unsigned combination, all = 1, i;

    for (i = 0; i < count; i++)
        all *= SYMBOLS;
    for (combination = 0; combination < all; combination++) {
        unsigned rest = combination;

        for (i = 0; i < count; i++, rest /= SYMBOLS)
            row->chunks[i] = rest % SYMBOLS;
        row->count = count;
        row->ends_by_none = count == 0 || combination % 2 == 1;
        // Three chunks: each combination in one of the modes; a sample with extended headers.
        if (count == CHUNKS && row->flags != read_modes[combination / 3 % COUNT(read_modes)])
            continue;
        if (count == CHUNKS && row->protocol == 2 && combination % 7) continue;
        face_fill(row);
    }
}

static void read_succeeds_only_if_each_byte_came_once(void)
{
    fill_row row;
    unsigned count;
    size_t i;

    for (row.protocol = 1; row.protocol < 3; row.protocol++) {
        for (i = 0; i < COUNT(read_modes); i++) {
            row.flags = read_modes[i];
            for (count = 0; count <= CHUNKS; count++)
                face_fills_of(&row, count);
        }
    }
}

/// Many pieces ///

enum { PIECES = 1000 };

typedef struct order_row {
    uint32_t flags;
    unsigned count;
    unsigned order[PIECES]; // bytes of the request, each once
} order_row;

// How many runs of bytes there are.
static unsigned runs(const unsigned char *there, unsigned count)
{
    unsigned i, found = 0;

    for (i = 0; i < count; i++)
        found += there[i] && (i == 0 || !there[i - 1]);
    return found;
}

static int order_result(const order_row *row)
{
    unsigned char there[PIECES] = {0};
    unsigned i;

    for (i = 0; i < row->count; i++) {
        there[row->order[i]] = 1;
        if (runs(there, row->count) > NBD_RANGES) return NBD_ERR_FRAGMENTED;
    }
    return 0;
}

static void byte_by_byte(script *s, const void *of)
{
    const order_row *row = of;
    unsigned i;
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_READ, row->flags, 8192, row->count);
    want_request(s, r);
    for (i = 0; i < row->count; i++)
        send_data(s, r, MORE, 8192 + row->order[i], 1);
    send_none(s, r);
    see_done(s, r, order_result(row));
    session_lives(s);
}

static void shuffle(order_row *row)
{
    unsigned i;

    for (i = row->count; i > 1; i--) {
        unsigned other = check_random(i), kept = row->order[i - 1];

        row->order[i - 1] = row->order[other];
        row->order[other] = kept;
    }
}

static void pieces_in_any_order_are_proved_or_too_fragmented(void)
{
    static order_row row;
    unsigned stride, i, k;

    for (i = 0; i < 2; i++) {
        row.flags = i ? NBD_NO_INIT : 0;
        for (row.count = PIECES, k = 0; k < PIECES; k++)
            row.order[k] = PIECES - 1 - k;
        face_many(byte_by_byte, &row, LAWFUL);
        // As many runs as the stride says, closed one after the other.
        for (stride = 1; stride <= 2 * NBD_RANGES; stride++) {
            for (row.count = 0, k = 0; k < 24; k++)
                row.order[row.count++] = k % (24 / stride) * stride + k / (24 / stride);
            if (24 % stride == 0) face(byte_by_byte, &row, LAWFUL);
        }
        for (k = 0; k < 12; k++)
            row.order[k] = k;
        for (row.count = 12, k = 0; k < 300; k++) {
            uint64_t random = check.random;

            shuffle(&row);
            face_many(byte_by_byte, &row, LAWFUL);
            check.random = random * UINT64_C(6364136223846793005) + 1; // playing reseeds it
        }
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RULE(content_lies_inside_its_request_or_ends_it);
    RULE(read_succeeds_only_if_each_byte_came_once);
    RULE(pieces_in_any_order_are_proved_or_too_fragmented);
    return check_end();
}
