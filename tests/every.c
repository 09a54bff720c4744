// every.c - sessions that use everything that a server offers
//
//   every go URI [QUERY...]      every option but ABORT and EXPORT_NAME, then every command
//                                with every flag; writes into the export's first 192 KiB
//   every name URI               enters by EXPORT_NAME
//   every abort URI              leaves by ABORT
//   every past URI               reads behind the end: an error, and the session lives
//   every whole URI [QUERY...]   each command without a payload over the whole export at once
//   every status URI QUERY...    asks for all contexts at once, then for each alone
//
// Prints "ok RULE" or "FAIL RULE: why" for each rule; with "# " in front the options that the
// server refuses, extents, broken rules of the specification, and how many bytes crossed.
// Both byte streams of each session are judged by checker.h.
#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "checker.h"
#include <inttypes.h>

#define UNIT 65536u
#define AREA (3 * UNIT)
#define CONTEXTS_MAX 8
#define EXTENTS_MAX 65536
#define NAME_ROOM 256

typedef struct extent {
    uint64_t offset, size, flags;
    uint32_t context;
} extent;

static struct session {
    nbd_client client;
    nbd_sync sync; // dials and closes
    nbd_transport tee;
    checker judge;
    nbd_slot slots[1];
    unsigned char buffer[NBD_BUFFER_NAMES];
    nbd_context context_memory[CONTEXTS_MAX];
    char contexts[CONTEXTS_MAX][NAME_ROOM];
    unsigned context_count;
    char wanted[NAME_ROOM]; // the export
    int listed;             // LIST told it
    extent extents[EXTENTS_MAX];
    unsigned extent_count;
    uint32_t payload[2 + CONTEXTS_MAX];
    unsigned char pattern[AREA], back[AREA];
    unsigned seed;
    int failed;
} s;

static void tell(int holds, const char *rule, int error)
{
    if (holds)
        printf("ok %s\n", rule);
    else
        printf("FAIL %s: %s. %s\n", rule, nbd_strerror(error), nbd_detail(&s.client));
    if (!holds) s.failed = 1;
}

/// Session ///

static void watch(int from_client, const nbd_iovec *iov, ptrdiff_t moved)
{
    size_t left = moved > 0 ? (size_t)moved : 0;
    for (; left > 0; iov++) {
        size_t part = iov->size < left ? iov->size : left;
        if (from_client)
            checker_client(&s.judge, iov->base, part);
        else
            checker_server(&s.judge, iov->base, part);
        left -= part;
    }
}

static ptrdiff_t tee_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    const nbd_transport *inner = context;
    ptrdiff_t moved = inner->send(inner->context, iov, count, flags);
    watch(1, iov, moved);
    return moved;
}

static int tee_finish(void *context)
{
    const nbd_transport *inner = context;
    return inner->finish(inner->context);
}

static ptrdiff_t tee_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    const nbd_transport *inner = context;
    ptrdiff_t moved = inner->recv(inner->context, iov, count);
    watch(0, iov, moved);
    if (moved == NBD_IO_EOF) checker_server_end(&s.judge);
    return moved;
}

static void note_text(const nbd_event *e)
{
    size_t size = e->text_size < NAME_ROOM - 1 ? e->text_size : NAME_ROOM - 1;
    if (e->text_kind == NBD_TEXT_EXPORT && e->option == NBD_OPTION_LIST)
        s.listed |= e->text_size == strlen(s.wanted) && !memcmp(e->text, s.wanted, e->text_size);
    if (e->text_kind != NBD_TEXT_CONTEXT || e->option != NBD_OPTION_SET_META_CONTEXT) return;
    if (e->context >= CONTEXTS_MAX) return;
    memcpy(s.contexts[e->context], e->text, size);
    s.contexts[e->context][size] = 0;
    s.context_count = e->context + 1 > s.context_count ? e->context + 1 : s.context_count;
}

static void note_extent(const nbd_event *e)
{
    extent *x = &s.extents[s.extent_count];
    if (s.extent_count == EXTENTS_MAX) return;
    *x = (extent){e->offset, e->size, e->flags, e->context};
    s.extent_count++;
}

// Moves bytes until a greeting, an option, a command or the session is over.
static int run(void)
{
    int left_ms = 60000;
    nbd_event e;
    for (;;) {
        unsigned wants;
        while (nbd_next(&s.client, &e)) {
            switch (e.type) {
            case NBD_EVENT_TEXT: note_text(&e); break;
            case NBD_EVENT_EXTENT: note_extent(&e); break;
            case NBD_EVENT_HOLE: memset(s.back + e.offset, 0, (size_t)e.size); break;
            case NBD_EVENT_CLOSED: return e.error ? e.error : NBD_ERR_CLOSED;
            default: return e.error;
            }
        }
        wants = nbd_wants(&s.client);
        if (!wants) return NBD_ERR_STATE;
        if (!(wants & NBD_WANT_NOW) &&
            s.tee.wait(s.sync.io.transport.context, wants, &left_ms) <= 0)
            return NBD_ERR_TIMEOUT;
        if (nbd_poll(&s.client, wants)) return NBD_ERR_STATE;
    }
}

static int open_session(const nbd_uri *uri, uint32_t flags)
{
    nbd_config config = NBD_ZERO;
    int error;
    config.flags = flags;
    config.slots = s.slots;
    config.slot_count = 1;
    config.buffer = s.buffer;
    config.buffer_size = sizeof s.buffer;
    config.contexts = s.context_memory;
    config.context_count = CONTEXTS_MAX;
    config.export_name = uri->export_name;
    snprintf(s.wanted, sizeof s.wanted, "%s", uri->export_name);
    checker_begin(&s.judge);
    error = nbd_init(&s.client, &config);
    if (!error) error = nbd_sync_dial(&s.sync, &uri->address);
    s.tee = s.sync.io.transport;
    s.tee.context = &s.sync.io.transport;
    s.tee.send = tee_send;
    s.tee.recv = tee_recv;
    s.tee.finish = tee_finish;
    if (!error) error = nbd_connect(&s.client, &s.tee);
    return error ? error : run();
}

static void print_findings(int list, const char *who)
{
    for (unsigned i = 0; i < s.judge.count[list] && i < CHECKER_KEPT; i++)
        printf("# %s: %s at %" PRIu64 "\n", who, s.judge.found[list][i].rule,
               s.judge.found[list][i].position);
}

// `expected` is NULL, or the one rule that this session breaks on purpose.
static int is_clean(const char *expected)
{
    unsigned count = 0;
    for (int list = CHECKER_CLIENT; list <= CHECKER_CLIENT_SHOULD; list++) {
        count += s.judge.count[list];
        if (!expected || !s.judge.count[list]) continue;
        if (strcmp(s.judge.found[list][0].rule, expected) != 0) return 0;
    }
    return !s.judge.lost && count == (expected ? 1u : 0u);
}

static void close_session(const char *expected)
{
    const nbd_counters *counters = nbd_count(&s.client);
    int error = nbd_disconnect(&s.client);
    if (!error) error = run();
    tell(error == NBD_ERR_CLOSED, "the session ends clean", error);
    checker_end(&s.judge);
    print_findings(CHECKER_CLIENT, "client");
    print_findings(CHECKER_CLIENT_SHOULD, "client");
    print_findings(CHECKER_SERVER, "server");
    print_findings(CHECKER_SERVER_SHOULD, "server");
    printf("# bytes %" PRIu64 " %" PRIu64 "\n", counters->bytes_sent, counters->bytes_received);
    tell(is_clean(expected), expected ? "judged: the one violation" : "judged: no violation", 0);
    checker_free(&s.judge);
    (void)nbd_sync_close(&s.sync); // only closes what was dialled
}

/// Options ///

static int is_refusal(int error)
{
    return error <= NBD_REP_ERR_UNSUP && error >= NBD_REP_ERR_OTHER;
}

// Returns 1 if the server accepted it; that it refused leaves the session usable.
static int ask(const char *name, uint32_t number, const char *const *queries, unsigned count)
{
    nbd_option option = NBD_ZERO;
    char rule[64];
    int error;
    option.option = number;
    option.name = s.wanted;
    option.queries = queries;
    option.query_count = count;
    error = nbd_negotiate(&s.client, &option);
    if (!error) error = run();
    if (is_refusal(error)) printf("# refused: %s\n", name);
    snprintf(rule, sizeof rule, "option %s is answered", name);
    tell(!error || is_refusal(error), rule, error);
    return !error;
}

static int enter(const nbd_uri *uri, char **queries, int count)
{
    static const char *const everything[] = {"base:", "qemu:"};
    const char *const *asked = (const char *const *)queries;
    int error = open_session(uri, NBD_NEGOTIATE);
    tell(!error, "the server greets", error);
    if (error) return error;
    ask("STARTTLS", NBD_OPTION_STARTTLS, NULL, 0);
    ask("STRUCTURED_REPLY", NBD_OPTION_STRUCTURED_REPLY, NULL, 0);
    ask("EXTENDED_HEADERS", NBD_OPTION_EXTENDED_HEADERS, NULL, 0);
    if (ask("LIST", NBD_OPTION_LIST, NULL, 0)) tell(s.listed, "LIST tells the export", 0);
    ask("INFO", NBD_OPTION_INFO, NULL, 0);
    if (nbd_negotiated(&s.client)->protocol != NBD_PROTOCOL_SIMPLE) {
        ask("LIST_META_CONTEXT", NBD_OPTION_LIST_META_CONTEXT, NULL, 0);
        ask("LIST_META_CONTEXT", NBD_OPTION_LIST_META_CONTEXT, everything, 2);
        if (ask("SET_META_CONTEXT", NBD_OPTION_SET_META_CONTEXT, asked, (unsigned)count))
            tell(s.context_count == (unsigned)count, "SET_META_CONTEXT chooses what was asked", 0);
    }
    return ask("GO", NBD_OPTION_GO, NULL, 0) ? 0 : NBD_ERR_STATE;
}

/// Commands ///

static const struct command {
    const char *name;
    uint32_t number, flags;
} commands[] = {{"WRITE", NBD_WRITE, NBD_FUA},
                {"READ", NBD_READ, NBD_DF | NBD_NO_INIT | NBD_SPARSE},
                {"FLUSH", NBD_FLUSH, 0},
                {"TRIM", NBD_TRIM, NBD_FUA},
                {"CACHE", NBD_CACHE, 0},
                {"WRITE_ZEROES", NBD_WRITE_ZEROES, NBD_FUA | NBD_NO_HOLE | NBD_FAST_ZERO},
                {"BLOCK_STATUS", NBD_BLOCK_STATUS, NBD_REQ_ONE}};

// By bit.
static const char *const flag_names[] = {"FUA",       "NO_HOLE",   "DF",      "REQ_ONE",
                                         "FAST_ZERO", "(no init)", "(sparse)"};

static int perform(const nbd_op *op)
{
    int error = nbd_issue(&s.client, op, NULL);
    s.extent_count = 0;
    return error ? error : run();
}

static int transfer(uint32_t command, void *bytes, uint64_t offset, uint64_t size)
{
    nbd_op op = NBD_ZERO;
    op.command = command;
    op.offset = offset;
    op.size = size;
    if (command == NBD_READ) op.buffer = bytes;
    if (command == NBD_WRITE) op.data = bytes;
    return perform(&op);
}

static void new_pattern(unsigned char *at, size_t size)
{
    s.seed++;
    for (size_t i = 0; i < size; i++)
        at[i] = (unsigned char)(1 + (i / 512 * 7 + i + s.seed * 31) % 255);
}

static int is_zero(const unsigned char *at, size_t size)
{
    while (size > 0 && at[size - 1] == 0)
        size--;
    return size == 0;
}

static int has_context(const char *name, uint32_t *index)
{
    for (*index = 0; *index < s.context_count; ++*index)
        if (!strcmp(s.contexts[*index], name)) return 1;
    return 0;
}

// Each context, or the only one, has extents, from the start of the unit on; the unit was
// just written, and so is data.
static int is_status_right(uint32_t flags, int only)
{
    uint32_t base, i;
    int has_base = has_context("base:allocation", &base);
    for (i = 0; i < s.context_count; i++) {
        uint64_t at = UNIT, count = 0;
        for (const extent *x = s.extents; x < s.extents + s.extent_count; x++) {
            if (x->context != i) continue;
            if (x->offset != at || (has_base && i == base && x->flags != 0)) return 0;
            at += x->size;
            count++;
        }
        if ((count > 0) != (only < 0 || (uint32_t)only == i)) return 0;
        if ((flags & NBD_REQ_ONE) && (count > 1 || at > 2 * UNIT)) return 0;
    }
    return 1;
}

// What is in the export now against what the command was to do.
static int is_effect_right(const nbd_op *op, int error)
{
    int refused = error == NBD_ENOTSUP && (op->flags & NBD_FAST_ZERO);
    int zeroes = op->command == NBD_WRITE_ZEROES && !refused;
    unsigned char *middle = s.back + UNIT;
    if (error && !refused) return 0;
    if (op->command == NBD_READ && memcmp(s.back, s.pattern, AREA) != 0) return 0;
    if (op->command == NBD_BLOCK_STATUS && !is_status_right(op->flags, -1)) return 0;
    memset(s.back, 0xee, AREA);
    if (transfer(NBD_READ, s.back, 0, AREA)) return 0;
    if (zeroes && !is_zero(middle, UNIT)) return 0;
    // Trimmed bytes may be anything.
    if (zeroes || op->command == NBD_TRIM) memcpy(middle, s.pattern + UNIT, UNIT);
    return memcmp(s.back, s.pattern, AREA) == 0;
}

// The command on the middle unit of three, which a pattern fills; READ reads them all.
static void try_command(const struct command *c, uint32_t flags)
{
    nbd_op op = NBD_ZERO;
    char rule[128];
    size_t length;
    int error;
    new_pattern(s.pattern, AREA);
    memset(s.back, 0xee, AREA);
    error = transfer(NBD_WRITE, s.pattern, 0, AREA);
    op.command = c->number;
    op.flags = flags;
    op.offset = c->number == NBD_WRITE || c->number >= NBD_TRIM ? UNIT : 0;
    op.size = c->number == NBD_FLUSH ? 0 : c->number == NBD_READ ? AREA : UNIT;
    if (c->number == NBD_WRITE) new_pattern(s.pattern + UNIT, UNIT);
    op.buffer = c->number == NBD_READ ? s.back : NULL;
    op.data = c->number == NBD_WRITE ? s.pattern + UNIT : NULL;
    if (!error) error = perform(&op);
    // More than 64 KiB in one chunk may be too much: then no byte came.
    if (error == NBD_EOVERFLOW && (flags & NBD_DF)) {
        op.size = UNIT;
        error = perform(&op);
        memcpy(s.back + UNIT, s.pattern + UNIT, AREA - UNIT);
    }
    length = (size_t)snprintf(rule, sizeof rule, "%s", c->name);
    for (size_t i = 0; i < sizeof flag_names / sizeof flag_names[0]; i++)
        if (flags >> i & 1)
            length += (size_t)snprintf(rule + length, sizeof rule - length, " %s", flag_names[i]);
    tell(is_effect_right(&op, error), rule, error);
}

// Of one context, or of all with a negative number.
static int ask_status(int context, uint64_t offset, uint64_t size)
{
    nbd_op op = NBD_ZERO;
    uint32_t index = (uint32_t)context;
    op.command = NBD_BLOCK_STATUS;
    op.offset = offset;
    op.size = size;
    if (context >= 0) {
        op.contexts = &index;
        op.context_count = 1;
        op.buffer = s.payload;
    }
    return perform(&op);
}

static void try_contexts(void)
{
    char rule[2 * NAME_ROOM];
    for (uint32_t i = 0; i < s.context_count; i++) {
        int error = transfer(NBD_WRITE, s.pattern, 0, AREA);
        if (!error) error = ask_status((int)i, UNIT, UNIT);
        snprintf(rule, sizeof rule, "BLOCK_STATUS for %s alone", s.contexts[i]);
        tell(!error && is_status_right(0, (int)i), rule, error);
    }
}

static void try_all(void)
{
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        uint32_t flags = 0, mask = commands[i].flags;
        do {
            if (nbd_allows(&s.client, commands[i].number, flags)) try_command(&commands[i], flags);
            flags = (flags - mask) & mask;
        } while (flags);
    }
    if (nbd_negotiated(&s.client)->flags & NBD_OFFERS_STATUS_PAYLOAD) try_contexts();
}

/// The modes ///

static void print_extents(const char *how)
{
    for (const extent *x = s.extents; x < s.extents + s.extent_count; x++)
        printf("# %s %s %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", how, s.contexts[x->context],
               x->offset, x->size, x->flags);
}

static void whole(void)
{
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        char rule[64];
        int error;
        if (commands[i].number < NBD_TRIM || !nbd_allows(&s.client, commands[i].number, 0))
            continue;
        error = transfer(commands[i].number, NULL, 0, nbd_negotiated(&s.client)->size);
        snprintf(rule, sizeof rule, "%s over the whole export", commands[i].name);
        tell(!error, rule, error);
    }
    print_extents("together");
}

// All contexts at once, then each alone.
static void status(void)
{
    for (int i = -1; i < (int)s.context_count; i++) {
        int error = ask_status(i, 0, nbd_negotiated(&s.client)->size);
        tell(!error, i < 0 ? "BLOCK_STATUS for all contexts" : "BLOCK_STATUS for one", error);
        print_extents(i < 0 ? "together" : "alone");
    }
}

static void past(void)
{
    uint64_t size = nbd_negotiated(&s.client)->size;
    int error = transfer(NBD_READ, s.back, size, 512);
    tell(error > 0, "READ behind the end is an error of the server", error);
    tell(is_zero(s.back, 512), "the failed READ leaves zeroes", 0);
    error = transfer(NBD_READ, s.back, size - 512, 512);
    tell(!error, "READ after that", error);
}

static int usage(void)
{
    fputs("usage: every go|name|abort|past|whole|status URI [QUERY...]\n", stderr);
    return 2;
}

int main(int argc, char **argv)
{
    static char memory[8192];
    const char *mode = argc > 2 ? argv[1] : "", *expected = NULL;
    nbd_uri uri;
    int error = argc > 2 ? nbd_uri_parse(&uri, argv[2], memory, sizeof memory) : NBD_ERR_URI;
    if (error) return usage();
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    if (!strcmp(mode, "go") || !strcmp(mode, "whole") || !strcmp(mode, "status")) {
        if (enter(&uri, argv + 3, argc - 3)) return 1;
        if (*mode == 'g') try_all();
        if (*mode == 'w') whole();
        if (*mode == 's') status();
    } else if (!strcmp(mode, "past")) {
        error = open_session(&uri, NBD_UNCHECKED_BOUNDS);
        tell(!error, "READY", error);
        if (!error) past();
        expected = "out_of_bounds";
    } else if (!strcmp(mode, "name")) {
        error = open_session(&uri, NBD_ONLY_EXPORT_NAME);
        tell(!error, "EXPORT_NAME", error);
        if (!error) tell(!transfer(NBD_READ, s.back, 0, UNIT), "READ, simple reply", 0);
        expected = "go_preferred";
    } else if (!strcmp(mode, "abort")) {
        error = open_session(&uri, NBD_NEGOTIATE);
        tell(!error, "the server greets", error);
        ask("LIST", NBD_OPTION_LIST, NULL, 0);
    } else {
        return usage();
    }
    close_session(expected);
    return s.failed;
}
