// Random sessions against a real server, with a model of the disk: what
// tests/differential.c does with nbd.h and tests/differential_libnbd.c with libnbd.  Each
// of them includes this file and supplies the four client_ calls; the list of operations,
// the model and the output are the same for both.
//
//   PROGRAM [-s] [-n] [-f] URI SEED COUNT RESULTS
//
// Plays COUNT sessions, of the seeds SEED, SEED + 1 and so on, and writes a line for each
// operation to the file RESULTS: what it was, in the words of nbdkit's log filter, and what
// came of it.  -s: simple replies only.  -n: no DF, which the server refuses.
// -f: no FAST_ZERO, which the server grants or not as its image happens to be laid out.
// Exits with 1 and a line on stderr at the first answer that the model does not allow.
//
// Operations that overlap are never in flight together if one of them writes: so what the
// disk holds, and what each read gives, follows from the list alone.
#ifndef DIFFERENTIAL_H
#define DIFFERENTIAL_H

#include <inttypes.h>

#include "check.h"

enum {
    DEPTH_MOST = 64,
    PIECES_MOST = 300,
    SIZE_MOST = 4 << 20, // of one operation
    BIG = 1 << 20,       // of those that fill the disk and read it back
    OPERATIONS_MOST = 4096,
    TRIES = 100, // of the last reads, which some servers make fail
    UNTOUCHED = 0xa5
};

/// What the two clients share ///

enum kind { READ, WRITE, FLUSH, TRIM, CACHE, ZERO, STATUS, KINDS };
enum { FUA = 1, NO_HOLE = 2, DF = 4, REQ_ONE = 8, FAST_ZERO = 16, NO_INIT = 32, SPARSE = 64 };

// Why the client itself has to refuse an operation.
enum refusal { LEGAL, NOT_OFFERED, EMPTY, TOO_LONG, PAST_END, MISALIGNED, REFUSALS };

enum {
    CAN_FLUSH = 1,
    CAN_FUA = 2,
    CAN_TRIM = 4,
    CAN_ZERO = 8,
    CAN_FAST_ZERO = 16,
    CAN_DF = 32,
    CAN_CACHE = 64,
    CAN_STATUS = 128
};

enum { STATE_ZERO = 2 }; // of base:allocation

typedef struct offer {
    uint64_t size;
    uint32_t minimum, maximum; // of blocks, of payloads
    unsigned can;
} offer;

typedef struct operation {
    enum kind kind;
    enum refusal refusal;
    unsigned flags;
    uint64_t offset, size;
    uint64_t seed; // of its data and of how its memory is cut
} operation;

typedef struct piece {
    unsigned char *base;
    size_t size;
} piece;

typedef struct task {
    operation op;
    unsigned number;
    int busy;
    unsigned char *memory;
    size_t memory_size;
    piece pieces[PIECES_MOST];
    unsigned piece_count;
    uint64_t told; // STATUS: bytes
    unsigned extents;
} task;

typedef struct result {
    operation op;
    int error; // 0, or the number that the server sent
    uint64_t sum;
} result;

// What each program supplies.  client_issue returns 0, or 1 if the client refused, for the
// very reason that op.refusal names.  client_wait returns when one more task is finished.
static void client_open(const char *uri, int simple, unsigned depth, offer *offered);
static int client_issue(task *t);
static void client_wait(void);
static void client_close(void);
static unsigned client_pieces(unsigned wanted);
static const char *client_protocol(void);

static struct session {
    unsigned long long seed;
    offer offer;
    unsigned depth;
    uint32_t scale; // sizes are below it
    task tasks[DEPTH_MOST];
    unsigned in_flight;
    const task *now; // whose failure it would be
    int last_error;
    uint64_t last_end;
    unsigned count; // of operations so far
    result results[OPERATIONS_MOST];
    FILE *out;
    // The model: a byte is one of two values, or anything.
    unsigned char *value, *other, *any;
    // Over all sessions:
    unsigned operations, errors, out_of_order, in_flight_most;
    unsigned refused[REFUSALS];
    const char *protocol;
} s;

static unsigned char scratch[SIZE_MOST];

/// Output ///

static const char *const kind_names[KINDS] = {"Read",  "Write", "Flush",  "Trim",
                                              "Cache", "Zero",  "Extents"};

// As nbdkit's log filter says it.
static void print_operation(FILE *to, const operation *op)
{
    fprintf(to, "%s", kind_names[op->kind]);
    if (op->kind != FLUSH)
        fprintf(to, " offset=0x%" PRIx64 " count=0x%" PRIx64, op->offset, op->size);
    if (op->kind == ZERO) fprintf(to, " trim=%d", !(op->flags & NO_HOLE));
    if (op->kind == WRITE || op->kind == ZERO || op->kind == TRIM)
        fprintf(to, " fua=%d", (op->flags & FUA) != 0);
    if (op->kind == ZERO) fprintf(to, " fast=%d", (op->flags & FAST_ZERO) != 0);
    if (op->kind == STATUS) fprintf(to, " req_one=%d", (op->flags & REQ_ONE) != 0);
}

#if defined(__GNUC__) || defined(__clang__)
__attribute__((noreturn, format(printf, 1, 2)))
#endif
static void
die(const char *format, ...)
{
    va_list arguments;

    fprintf(stderr, "error: seed %llu", s.seed);
    if (s.now) {
        fprintf(stderr, ", operation %u (", s.now->number);
        print_operation(stderr, &s.now->op);
        fprintf(stderr, ", flags 0x%x)", s.now->op.flags);
    }
    fprintf(stderr, ": ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    exit(1);
}

static void write_results(void)
{
    unsigned i;

    fprintf(s.out, "seed %llu: size %" PRIu64 ", blocks of %u, payloads up to %u, offers 0x%x\n",
            s.seed, s.offer.size, s.offer.minimum, s.offer.maximum, s.offer.can);
    for (i = 0; i < s.count; i++) {
        const result *r = &s.results[i];

        fprintf(s.out, "%u |", i);
        print_operation(s.out, &r->op);
        fprintf(s.out, "| flags 0x%x ", r->op.flags);
        if (r->op.refusal)
            fprintf(s.out, "refused %d\n", (int)r->op.refusal);
        else
            fprintf(s.out, "error %d sum %016" PRIx64 "\n", r->error, r->sum);
    }
}

/// Model ///

static void *memory(size_t size)
{
    void *p = calloc(size ? size : 1, 1);

    if (!p) die("no memory");
    return p;
}

static int model_is_certain(uint64_t place)
{
    return !s.any[place] && s.value[place] == s.other[place];
}

static int model_may_be(uint64_t place, unsigned char byte)
{
    return s.any[place] || s.value[place] == byte || s.other[place] == byte;
}

static void model_set(uint64_t offset, uint64_t size, const unsigned char *data)
{
    if (data)
        memcpy(s.value + offset, data, size);
    else
        memset(s.value + offset, 0, size);
    memcpy(s.other + offset, s.value + offset, size);
    memset(s.any + offset, 0, size);
}

// What was there, or this.  NULL: zeroes.
static void model_maybe(uint64_t offset, uint64_t size, const unsigned char *data)
{
    uint64_t i;

    for (i = 0; i < size; i++) {
        unsigned char byte = data ? data[i] : 0;

        if (s.value[offset + i] == s.other[offset + i])
            s.other[offset + i] = byte;
        else if (!model_may_be(offset + i, byte))
            s.any[offset + i] = 1;
    }
}

static void model_begin(void)
{
    s.value = memory(s.offer.size);
    s.other = memory(s.offer.size);
    s.any = memory(s.offer.size);
    memset(s.any, 1, s.offer.size);
}

static void model_end(void)
{
    free(s.value);
    free(s.other);
    free(s.any);
}

/// Memory of a task ///

static uint64_t mix(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

// What a write of this operation sends, in `scratch`.
static void make_data(const operation *op)
{
    uint64_t state = op->seed | 1, i;

    for (i = 0; i < op->size; i += 8) {
        uint64_t word = mix(&state);

        memcpy(scratch + i, &word, op->size - i < 8 ? (size_t)(op->size - i) : 8);
    }
}

static void cut_sizes(task *t)
{
    uint64_t state = t->op.seed | 1;
    size_t left = (size_t)t->op.size;
    unsigned i;

    t->piece_count = 1 + (mix(&state) % 2 ? 0 : (unsigned)(mix(&state) >> 40) % PIECES_MOST);
    t->piece_count = client_pieces(t->piece_count);
    for (i = 0; i + 1 < t->piece_count; i++) {
        size_t most = left / (t->piece_count - i) * 2;

        t->pieces[i].size = most ? (size_t)((mix(&state) >> 16) % most) : 0;
        left -= t->pieces[i].size;
    }
    t->pieces[i].size = left;
}

// The pieces lie in memory from the first to the last, or the other way round, with a byte
// around each that nobody may touch.
static void lay_out(task *t)
{
    unsigned i, backwards = t->op.seed >> 32 & 1;
    unsigned char *at;

    cut_sizes(t);
    t->memory_size = (size_t)t->op.size + t->piece_count + 1;
    t->memory = memory(t->memory_size);
    memset(t->memory, UNTOUCHED, t->memory_size);
    at = t->memory + 1;
    for (i = 0; i < t->piece_count; i++) {
        piece *p = &t->pieces[backwards ? t->piece_count - 1 - i : i];

        p->base = at;
        at += p->size + 1;
    }
}

static void scatter(task *t)
{
    const unsigned char *from = scratch;
    unsigned i;

    for (i = 0; i < t->piece_count; i++) {
        memcpy(t->pieces[i].base, from, t->pieces[i].size);
        from += t->pieces[i].size;
    }
}

static void gather(const task *t)
{
    unsigned char *to = scratch;
    unsigned i;

    for (i = 0; i < t->piece_count; i++) {
        const piece *p = &t->pieces[i];

        if (p->base[-1] != UNTOUCHED || p->base[p->size] != UNTOUCHED)
            die("a byte beside piece %u was written", i);
        memcpy(to, p->base, p->size);
        to += p->size;
    }
}

static int has_memory(const operation *op)
{
    return op->kind == READ || op->kind == WRITE;
}

static void lend(task *t)
{
    t->memory = NULL;
    t->piece_count = 0;
    if (!has_memory(&t->op)) return;
    if (t->op.refusal == TOO_LONG) { // nobody looks at the memory of what is refused
        t->piece_count = 1;
        t->pieces[0].base = t->memory = memory(1);
        t->pieces[0].size = (size_t)t->op.size;
        return;
    }
    lay_out(t);
    if (t->op.kind != WRITE) return;
    make_data(&t->op);
    scatter(t);
}

/// What a client tells ///

// A hole that the client reported instead of writing zeroes.
static inline void hole_seen(task *t, uint64_t offset, uint64_t size)
{
    const operation *op = &t->op;
    uint64_t place = op->offset;
    unsigned i;

    s.now = t;
    if (!(op->flags & SPARSE)) die("a hole that was not asked for");
    if (!size || offset < op->offset || size > op->offset + op->size - offset)
        die("a hole outside the request");
    if (op->flags & DF && size != op->size) die("a hole as a fragment, in spite of DF");
    for (i = 0; i < t->piece_count; i++) {
        size_t k;

        for (k = 0; k < t->pieces[i].size; k++, place++) {
            if (place < offset || place - offset >= size) continue;
            if (t->pieces[i].base[k] != UNTOUCHED)
                die("byte %" PRIu64 " in a hole was written", place);
            t->pieces[i].base[k] = 0;
        }
    }
}

static void extent_seen(task *t, uint64_t offset, uint64_t size, uint64_t flags)
{
    const operation *op = &t->op;
    uint64_t i, end = op->offset + op->size;

    s.now = t;
    if (offset != op->offset + t->told || t->told >= op->size || !size)
        die("an extent at %" PRIu64 " of %" PRIu64 " bytes does not follow", offset, size);
    t->told += size;
    t->extents++;
    if (op->flags & REQ_ONE && (t->extents > 1 || t->told > op->size))
        die("more than the one extent that was asked for");
    if (!(flags & STATE_ZERO)) return;
    for (i = offset; i < end && i - offset < size; i++)
        if (!model_may_be(i, 0)) die("byte %" PRIu64 " is not zero as its extent says", i);
}

static void check_read(const operation *op, int error)
{
    uint64_t i;

    if (error && op->flags & NO_INIT) return;
    if (!error && !memcmp(scratch, s.value + op->offset, (size_t)op->size)) return;
    for (i = 0; i < op->size; i++) {
        if (model_may_be(op->offset + i, scratch[i]) || (error && scratch[i] == 0)) continue;
        die("byte %" PRIu64 " is %02x, not %02x (error %d)", i, scratch[i], s.value[op->offset + i],
            error);
    }
}

// Of the bytes that the list of operations determines.
static uint64_t sum_of_read(const operation *op)
{
    uint64_t i, sum = UINT64_C(14695981039346656037);

    for (i = 0; i < op->size; i++) {
        unsigned char byte = model_is_certain(op->offset + i) ? scratch[i] : 0;

        sum = (sum ^ byte) * UINT64_C(1099511628211);
    }
    return sum;
}

static void apply_write(const task *t, int error)
{
    const operation *op = &t->op;

    make_data(op);
    if (error)
        model_maybe(op->offset, op->size, scratch);
    else
        model_set(op->offset, op->size, scratch);
    gather(t);
    if (!error && memcmp(scratch, s.value + op->offset, (size_t)op->size) != 0)
        die("memory of a write was changed");
}

static void apply(const task *t, int error, result *r)
{
    const operation *op = &t->op;

    switch (op->kind) {
    case READ:
        gather(t);
        check_read(op, error);
        if (!error) r->sum = sum_of_read(op);
        break;
    case WRITE: apply_write(t, error); break;
    case TRIM: model_maybe(op->offset, op->size, NULL); break;
    case ZERO:
        if (error)
            model_maybe(op->offset, op->size, NULL);
        else
            model_set(op->offset, op->size, NULL);
        break;
    case STATUS:
        if (!error && !t->told) die("success without an extent");
        break;
    default: break;
    }
}

static void give_back(task *t)
{
    free(t->memory);
    t->memory = NULL;
    t->busy = 0;
}

// A task is over: `error` is 0 or the number of the server's error.
static void finish(task *t, int error)
{
    result *r = &s.results[t->number];
    unsigned i, late = 0;

    s.now = t;
    if (!t->busy) die("finished twice");
    r->error = error;
    apply(t, error, r);
    for (i = 0; i < DEPTH_MOST; i++)
        late |= s.tasks[i].busy && s.tasks[i].number < t->number;
    s.out_of_order += late;
    s.errors += error != 0;
    s.last_error = error;
    s.in_flight--;
    s.now = NULL;
    give_back(t);
}

/// The list of operations ///

static uint64_t aligned(uint64_t n, uint32_t to)
{
    return n / to * to;
}

static int is_offered(enum kind kind)
{
    static const unsigned needed[KINDS] = {0,         0,        CAN_FLUSH, CAN_TRIM,
                                           CAN_CACHE, CAN_ZERO, CAN_STATUS};

    return (s.offer.can & needed[kind]) == needed[kind];
}

static unsigned random_flags(enum kind kind)
{
    static const unsigned possible[KINDS] = {DF | NO_INIT | SPARSE,     FUA,    0, FUA, 0,
                                             FUA | NO_HOLE | FAST_ZERO, REQ_ONE};
    unsigned flags = possible[kind] & check_random(128);

    if (!(s.offer.can & CAN_FUA)) flags &= ~(unsigned)FUA;
    if (!(s.offer.can & CAN_DF)) flags &= ~(unsigned)DF;
    if (!(s.offer.can & CAN_FAST_ZERO)) flags &= ~(unsigned)FAST_ZERO;
    return flags;
}

static uint64_t random_size(enum kind kind)
{
    uint32_t bits = 1, size;
    uint64_t most = kind == READ || kind == WRITE ? s.offer.maximum : s.offer.size;

    while ((1u << bits) < s.scale)
        bits++;
    bits = check_random(bits + 1);
    size = 1 + check_random(1u << bits);
    if (check_random(2)) size = (size + 4095) / 4096 * 4096;
    size = (size + s.offer.minimum - 1) / s.offer.minimum * s.offer.minimum;
    if (most > SIZE_MOST) most = SIZE_MOST;
    return size > most ? aligned(most, s.offer.minimum) : size;
}

static uint64_t random_offset(uint64_t size)
{
    uint64_t last = aligned(s.offer.size - size, s.offer.minimum);
    uint64_t offset = check_random((uint32_t)last + 1);

    switch (check_random(8)) {
    case 0: offset = last; break;
    case 1: offset = s.last_end <= last ? s.last_end : offset; break;
    case 2:
    case 3:
    case 4: offset = aligned(offset, 4096); break;
    default: break;
    }
    s.last_end = offset + size;
    return aligned(offset, s.offer.minimum);
}

static operation random_legal(void)
{
    static const enum kind kinds[] = {READ, READ, READ, READ, WRITE, WRITE,  WRITE, FLUSH,
                                      TRIM, TRIM, ZERO, ZERO, CACHE, STATUS, STATUS};
    operation op;

    memset(&op, 0, sizeof op);
    op.kind = kinds[check_random(sizeof kinds / sizeof kinds[0])];
    if (!is_offered(op.kind)) op.kind = check_random(2) ? READ : WRITE;
    op.flags = random_flags(op.kind);
    op.seed = (uint64_t)check_random(UINT32_MAX) << 32 | check_random(UINT32_MAX);
    if (op.kind == FLUSH) return op;
    op.size = random_size(op.kind);
    op.offset = random_offset(op.size);
    return op;
}

// Breaks one rule; legal as it is if the rule cannot be broken here.
static void spoil(operation *op)
{
    uint32_t kind = check_random(KINDS), large = check_random(2);

    switch (1 + check_random(5)) {
    case NOT_OFFERED:
        if (is_offered((enum kind)kind)) return;
        op->kind = (enum kind)kind;
        op->flags = 0;
        if (op->kind == FLUSH) op->offset = op->size = 0;
        op->refusal = NOT_OFFERED;
        return;
    case EMPTY: op->size = 0; break;
    case TOO_LONG:
        if (!has_memory(op)) return;
        op->size = (uint64_t)s.offer.maximum + s.offer.minimum;
        op->refusal = TOO_LONG;
        return;
    case PAST_END:
        op->offset = aligned(s.offer.size - op->size, s.offer.minimum) + s.offer.minimum;
        if (large) op->offset = aligned(UINT64_MAX - op->offset, s.offer.minimum);
        op->refusal = PAST_END;
        return;
    default:
        if (s.offer.minimum == 1) return;
        if (large)
            op->size--;
        else
            op->offset++, op->size -= s.offer.minimum;
        if (!op->size) op->size = 1;
        op->refusal = MISALIGNED;
        return;
    }
    op->refusal = EMPTY;
}

static operation random_operation(void)
{
    operation op = random_legal();

    if (check_random(16) == 0 && op.kind != FLUSH) spoil(&op);
    return op;
}

/// Playing it ///

static int writes(const operation *op)
{
    return op->kind == WRITE || op->kind == TRIM || op->kind == ZERO;
}

static int conflict(const operation *a, const operation *b)
{
    if (!writes(a) && !writes(b)) return 0;
    return a->offset < b->offset + b->size && b->offset < a->offset + a->size;
}

static int has_to_wait(const operation *op)
{
    unsigned i;

    if (s.in_flight >= s.depth) return 1;
    for (i = 0; i < DEPTH_MOST; i++)
        if (s.tasks[i].busy && conflict(op, &s.tasks[i].op)) return 1;
    return 0;
}

static void wait_for_all(void)
{
    while (s.in_flight > 0)
        client_wait();
}

static task *free_task(void)
{
    task *t = s.tasks;

    while (t->busy)
        t++;
    return t;
}

static void play(operation op)
{
    task *t;
    int refused;

    while (!op.refusal && has_to_wait(&op))
        client_wait();
    if (op.refusal && s.in_flight == s.depth) client_wait();
    if (s.count == OPERATIONS_MOST) die("too many operations");
    t = free_task();
    memset(t, 0, sizeof *t);
    t->op = op;
    t->number = s.count;
    memset(&s.results[s.count], 0, sizeof s.results[s.count]);
    s.results[s.count++].op = op;
    s.operations++;
    s.now = t;
    lend(t);
    t->busy = 1;
    s.in_flight++;
    refused = client_issue(t);
    s.now = t;
    if (refused != (op.refusal != LEGAL)) die(refused ? "refused" : "not refused");
    if (refused) {
        s.in_flight--;
        s.refused[op.refusal]++;
        give_back(t);
    }
    s.now = NULL;
    if (s.in_flight > s.in_flight_most) s.in_flight_most = s.in_flight;
}

// A part of the whole disk, of BIG bytes if there are so many.
static operation part(enum kind kind, uint64_t offset)
{
    operation op;
    uint64_t left = aligned(s.offer.size, s.offer.minimum) - offset;
    uint64_t most = s.offer.maximum < BIG ? s.offer.maximum : BIG;

    memset(&op, 0, sizeof op);
    op.kind = kind;
    op.offset = offset;
    op.size = left < most ? left : most;
    op.seed = (uint64_t)check_random(UINT32_MAX) << 32 | check_random(UINT32_MAX);
    return op;
}

static void fill_disk(void)
{
    operation op;
    uint64_t at;

    for (at = 0; at + s.offer.minimum <= s.offer.size; at += op.size) {
        op = part(check_random(3) == 0 && is_offered(ZERO) ? ZERO : WRITE, at);
        play(op);
    }
    wait_for_all();
}

static void read_disk(void)
{
    operation op;
    uint64_t at;

    for (at = 0; at + s.offer.minimum <= s.offer.size; at += op.size) {
        int tries = 0;

        op = part(READ, at);
        do {
            if (tries++ == TRIES) die("the disk cannot be read: error %d", s.last_error);
            play(op);
            wait_for_all();
        } while (s.last_error);
    }
}

static void play_session(const char *uri, int simple, unsigned hidden)
{
    static const struct {
        uint32_t scale;
        unsigned count;
    } loads[] = {{4096, 250}, {65536, 200}, {1 << 20, 100}, {SIZE_MOST, 50}};
    uint32_t load = check_random(4), count;

    s.depth = check_random(2) ? 1 + check_random(DEPTH_MOST) : 1u << check_random(7);
    s.scale = loads[load].scale;
    s.count = 0;
    s.last_end = 0;
    client_open(uri, simple, s.depth, &s.offer);
    s.offer.can &= ~hidden;
    s.protocol = client_protocol();
    if (s.offer.size < 2 * SIZE_MOST || s.offer.size > 64 * SIZE_MOST) die("the size of the disk");
    model_begin();
    fill_disk();
    for (count = loads[load].count; count > 0; count--)
        play(random_operation());
    wait_for_all();
    read_disk();
    client_close();
    model_end();
    write_results();
}

int main(int argc, char **argv)
{
    int simple = 0, option;
    unsigned hidden = 0;
    unsigned long long first, count;

    while ((option = getopt(argc, argv, "snf")) != -1) {
        simple |= option == 's';
        if (option == '?') return 2;
        if (option == 'n') hidden |= CAN_DF;
        if (option == 'f') hidden |= CAN_FAST_ZERO;
    }
    if (argc - optind != 4) {
        fprintf(stderr, "error: usage: %s [-s] [-n] [-f] URI SEED COUNT RESULTS\n", argv[0]);
        return 2;
    }
    first = strtoull(argv[optind + 1], NULL, 0);
    count = strtoull(argv[optind + 2], NULL, 0);
    s.out = fopen(argv[optind + 3], "w");
    if (!s.out) die("cannot write %s", argv[optind + 3]);
    for (s.seed = first; s.seed - first < count; s.seed++) {
        check_reseed(s.seed);
        play_session(argv[optind], simple, hidden);
    }
    printf("# protocol=%s operations=%u errors=%u out_of_order=%u in_flight_most=%u refused: "
           "not_offered=%u empty=%u too_long=%u past_end=%u misaligned=%u\n",
           s.protocol, s.operations, s.errors, s.out_of_order, s.in_flight_most,
           s.refused[NOT_OFFERED], s.refused[EMPTY], s.refused[TOO_LONG], s.refused[PAST_END],
           s.refused[MISALIGNED]);
    return fclose(s.out) != 0;
}

#endif
