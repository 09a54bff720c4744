// A judge of whole NBD sessions, written from the specification alone.  Feed it the raw
// bytes of both directions in the order in which they crossed, cut anywhere:
//
//   checker_begin(&k);
//   checker_client(&k, bytes, size);   what the client sent
//   checker_server(&k, bytes, size);   what the client received
//   checker_server_end(&k);            the server closed first
//   checker_end(&k);                   the client closed
//
// Then found[LIST][0 .. count[LIST]) says which rules were broken and where: LIST is
// CHECKER_CLIENT or CHECKER_SERVER for what a side MUST or MUST NOT do, and the _SHOULD lists
// are warnings.  A position is that of the first byte of the message in its own stream.
//
// A violation that makes the framing unknown ends the judging of the session; any other does
// not.  After STARTTLS was accepted all bytes are opaque, until checker_tls says that what
// follows is decrypted.  Rules about order look at the first byte of a message: one that began
// before the other side's bytes crossed was under way, and is judged by what was known then.
// A capture that was not made inside the client may show requests that were under way after the
// error that forbids them: set `late` to the number of those to allow.
//
// Set `keep` after checker_begin to compare a client with what the server said: `said` then has
// its texts, extents and results of options in their order; `answered`, and behind the end of the
// session `requests`, has what was said about each request.
#ifndef CHECKER_H
#define CHECKER_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECKER_RULES(X) \
    X(CLIENT, speaks_first, "bytes before the greeting was complete") \
    X(CLIENT, flags_unknown, "client flags other than the two defined") \
    X(CLIENT, flags_not_offered, "a client flag that the server did not offer") \
    X(CLIENT, option_magic, "an option without its magic") \
    X(CLIENT, early_message, "a message before the final reply to the last option") \
    X(CLIENT, option_not_fixed, "not EXPORT_NAME, and the not fixed newstyle") \
    X(CLIENT, starttls_not_fixed, "STARTTLS without C_FIXED_NEWSTYLE") \
    X(CLIENT, option_data, "data with an option that has none") \
    X(CLIENT, info_layout, "INFO or GO with inconsistent lengths") \
    X(CLIENT, info_twice, "an information request listed twice") \
    X(CLIENT, meta_layout, "a metadata option with inconsistent lengths") \
    X(CLIENT, query_form, "a query that does not start with a namespace and a colon") \
    X(CLIENT, string_long, "a string of more than 4096 bytes") \
    X(CLIENT, string_nul, "NUL in a string") \
    X(CLIENT, string_utf8, "a string that is not UTF-8") \
    X(CLIENT, export_name_extended, "EXPORT_NAME after extended headers") \
    X(CLIENT, export_name_block_size, "EXPORT_NAME after block sizes were asked for") \
    X(CLIENT, set_meta_without_replies, "SET_META_CONTEXT without structured replies") \
    X(CLIENT, starttls_twice, "STARTTLS inside TLS") \
    X(CLIENT, option_after_go, "an option after GO succeeded") \
    X(CLIENT, option_after_shutdown, "not ABORT, after ERR_SHUTDOWN") \
    X(CLIENT, after_abort, "bytes after ABORT") \
    X(CLIENT, request_magic, "a request without its magic") \
    X(CLIENT, request_kind, "a compact request, or an extended one, where the other is agreed") \
    X(CLIENT, command_unknown, "a command that is not defined") \
    X(CLIENT, flag_unknown, "a command flag that is not defined") \
    X(CLIENT, flag_misplaced, "a command flag that this command does not have") \
    X(CLIENT, fua_not_offered, "FUA, not offered") \
    X(CLIENT, df_not_offered, "DF, not offered") \
    X(CLIENT, fast_zero_not_offered, "FAST_ZERO, not offered") \
    X(CLIENT, payload_flag_compact, "PAYLOAD_LEN in a compact request") \
    X(CLIENT, write_without_payload_flag, "an extended WRITE without PAYLOAD_LEN") \
    X(CLIENT, status_payload_layout, "a BLOCK_STATUS payload that is not 8 + 4 n bytes") \
    X(CLIENT, flush_not_offered, "FLUSH, not offered") \
    X(CLIENT, trim_not_offered, "TRIM, not offered") \
    X(CLIENT, zeroes_not_offered, "WRITE_ZEROES, not offered") \
    X(CLIENT, status_without_context, "BLOCK_STATUS without a context of this export") \
    X(CLIENT, out_of_bounds, "a range outside the export") \
    X(CLIENT, unaligned, "a range that is not a multiple of the minimum block") \
    X(CLIENT, over_maximum, "a payload over the maximum") \
    X(CLIENT, reserved_nonzero, "offset or length in FLUSH or DISC") \
    X(CLIENT, after_disc, "bytes after DISC") \
    X(CLIENT, request_after_shutdown, "not DISC, after ESHUTDOWN") \
    X(CLIENT, request_after_bad_chunk, "not DISC, after a chunk that obliges to disconnect") \
    X(CLIENT, cut_message, "the client closed inside a message") \
    X(CLIENT, hard_disconnect, "the client closed without ABORT or DISC") \
    X(CLIENT_SHOULD, fixed_flag_unset, "options of fixed newstyle without C_FIXED_NEWSTYLE") \
    X(CLIENT_SHOULD, option_unknown, "an option that is not defined") \
    X(CLIENT_SHOULD, abort_data, "data with ABORT") \
    X(CLIENT_SHOULD, string_256, "a string of more than 256 bytes") \
    X(CLIENT_SHOULD, query_namespace, "a namespace that is not registered") \
    X(CLIENT_SHOULD, go_preferred, "EXPORT_NAME where GO was not refused") \
    X(CLIENT_SHOULD, list_meta_without_replies, "LIST_META_CONTEXT without structured replies") \
    X(CLIENT_SHOULD, repeated_option, "an option that is in force already") \
    X(CLIENT_SHOULD, starttls_late, "STARTTLS after options that it undoes") \
    X(CLIENT_SHOULD, fua_pointless, "FUA on a command that writes nothing") \
    X(CLIENT_SHOULD, cache_not_offered, "CACHE, not offered") \
    X(CLIENT_SHOULD, write_on_read_only, "a writing command on a read-only export") \
    X(CLIENT_SHOULD, status_payload_not_offered, "PAYLOAD_LEN on BLOCK_STATUS, not offered") \
    X(CLIENT_SHOULD, status_payload_ids, "contexts in a payload unknown or named twice") \
    X(CLIENT_SHOULD, zero_length, "a range of no bytes") \
    X(CLIENT_SHOULD, unaligned_unasked, "misaligned, with block sizes not asked for") \
    X(CLIENT_SHOULD, over_default_maximum, "more than 32 MiB, with no maximum agreed") \
    X(CLIENT_SHOULD, read_over_32, "READ of 4 GiB or more") \
    X(CLIENT_SHOULD, cookie_in_flight, "a cookie that is in flight") \
    X(CLIENT_SHOULD, disc_in_flight, "DISC while requests are in flight") \
    X(SERVER, greeting_magic, "a greeting of neither style") \
    X(SERVER, handshake_flags, "handshake flags other than the two defined") \
    X(SERVER, oldstyle_flags, "upper flags in an oldstyle greeting") \
    X(SERVER, padding, "the 124 reserved bytes are not zero") \
    X(SERVER, has_flags, "transmission flags without HAS_FLAGS") \
    X(SERVER, df_flag, "SEND_DF without structured replies") \
    X(SERVER, fast_zero_flag, "SEND_FAST_ZERO without SEND_WRITE_ZEROES") \
    X(SERVER, status_payload_flag, "BLOCK_STATUS_PAYLOAD without extended headers") \
    X(SERVER, bad_flags_tolerated, "a reply to a client whose flags oblige to close") \
    X(SERVER, unasked_reply, "bytes when no option awaits a reply") \
    X(SERVER, reply_magic, "an option reply without its magic") \
    X(SERVER, reply_option, "a reply to another option") \
    X(SERVER, reply_type, "a reply type that this option does not have") \
    X(SERVER, ack_data, "ACK with data") \
    X(SERVER, abort_reply, "ABORT answered with an error") \
    X(SERVER, starttls_again, "STARTTLS inside TLS not answered with ERR_INVALID") \
    X(SERVER, bad_meta_accepted, "a malformed metadata option accepted") \
    X(SERVER, server_reply_layout, "REP_SERVER with inconsistent lengths") \
    X(SERVER, info_reply_layout, "REP_INFO with a length that its type does not have") \
    X(SERVER, meta_reply_layout, "REP_META_CONTEXT too short") \
    X(SERVER, ack_without_export, "INFO or GO accepted without INFO_EXPORT") \
    X(SERVER, info_go_differ, "GO tells other things than the same INFO just before") \
    X(SERVER, block_minimum, "minimum block not a power of 2 up to 65536") \
    X(SERVER, block_preferred, "preferred block no power of 2, or below minimum or 512") \
    X(SERVER, block_maximum, "maximum payload below the preferred block") \
    X(SERVER, block_size_required, "ERR_BLOCK_SIZE_REQD though block sizes were asked for") \
    X(SERVER, extended_required, "ERR_EXT_HEADER_REQD where it cannot be the reason") \
    X(SERVER, go_unsupported, "GO is ERR_UNSUP after extended headers") \
    X(SERVER, tls_required, "ERR_TLS_REQD inside TLS, or to STARTTLS") \
    X(SERVER, context_unasked, "a context selected by no query") \
    X(SERVER, context_id, "a context ID given twice") \
    X(SERVER, context_form, "a context name without namespace and colon") \
    X(SERVER, server_string_long, "a string of more than 4096 bytes") \
    X(SERVER, server_string_nul, "NUL in a string") \
    X(SERVER, server_string_utf8, "a string that is not UTF-8") \
    X(SERVER, chunk_magic, "a reply without any magic") \
    X(SERVER, reply_kind, "a simple, structured or extended reply that was not agreed") \
    X(SERVER, simple_read, "a simple reply to READ where structured replies are agreed") \
    X(SERVER, simple_status, "success of BLOCK_STATUS in a simple reply") \
    X(SERVER, reply_cookie, "a reply to no request in flight") \
    X(SERVER, offset_echo, "an extended reply with another offset than the request") \
    X(SERVER, chunk_type, "a chunk type that this command does not have") \
    X(SERVER, chunk_over_maximum, "a chunk larger than the maximum payload") \
    X(SERVER, none_length, "NONE with a payload") \
    X(SERVER, none_done, "NONE without DONE") \
    X(SERVER, data_length, "OFFSET_DATA without data") \
    X(SERVER, hole_length, "OFFSET_HOLE not 12 bytes long") \
    X(SERVER, hole_empty, "a hole of no bytes") \
    X(SERVER, content_outside, "content outside the request") \
    X(SERVER, content_overlap, "content that overlaps earlier content or an earlier error") \
    X(SERVER, not_covered, "success without content for the whole request") \
    X(SERVER, df_chunks, "two content chunks for DF") \
    X(SERVER, df_overflow, "EOVERFLOW for DF of up to 65536 bytes, or beside content") \
    X(SERVER, error_zero, "an error chunk without an error") \
    X(SERVER, error_length, "an error chunk too short") \
    X(SERVER, message_length, "an error message longer than its chunk") \
    X(SERVER, error_trailing, "bytes behind the fields of an error chunk of a known type") \
    X(SERVER, error_offset_outside, "an error offset outside the request") \
    X(SERVER, fast_zero_enotsup, "ENOTSUP though FAST_ZERO was not set") \
    X(SERVER, read_only_success, "a write that succeeds on a read-only export") \
    X(SERVER, status_length, "a status chunk that holds no whole number of extents") \
    X(SERVER, status_count, "a descriptor count that the length denies") \
    X(SERVER, status_context, "status of a context that was not asked for") \
    X(SERVER, status_twice, "status of a context given twice") \
    X(SERVER, status_missing, "success without the status of every context") \
    X(SERVER, extent_empty, "an extent of no bytes") \
    X(SERVER, extent_excess, "an extent that begins after the request") \
    X(SERVER, extent_one, "more than one extent for REQ_ONE") \
    X(SERVER, extent_one_long, "an extent longer than the request for REQ_ONE") \
    X(SERVER, extent_unaligned, "an extent that is not a multiple of the minimum block") \
    X(SERVER, extent_high, "upper status bits in a base: context") \
    X(SERVER, server_cut_message, "the server closed inside a message") \
    X(SERVER, hang_up, "the server closed during option haggling") \
    X(SERVER_SHOULD, server_string_256, "a string of more than 256 bytes") \
    X(SERVER_SHOULD, context_namespace, "a namespace that is not registered") \
    X(SERVER_SHOULD, info_reply_twice, "an information type given twice") \
    X(SERVER_SHOULD, size_unaligned, "a size that is not a multiple of the minimum block") \
    X(SERVER_SHOULD, maximum_small, "a maximum payload below 1 MiB on a larger export") \
    X(SERVER_SHOULD, list_context_id, "a context ID in a list") \
    X(SERVER_SHOULD, reply_flags, "reply flags that are not defined") \
    X(SERVER_SHOULD, error_value, "an error that is not defined") \
    X(SERVER_SHOULD, error_twice, "two errors without offset in one reply") \
    X(SERVER_SHOULD, allocation_bits, "reserved bits in base:allocation") \
    X(SERVER_SHOULD, extents_many, "more than 2^20 extents in a chunk") \
    X(SERVER_SHOULD, hang_up_in_flight, "the server closed with requests in flight")

enum {
    CHECKER_CLIENT,
    CHECKER_CLIENT_SHOULD,
    CHECKER_SERVER,
    CHECKER_SERVER_SHOULD,
    CHECKER_LISTS,
    CHECKER_KEPT = 64 // findings per list; more are only counted
};

#define CHECKER_RULE_ID(list, name, text) CHECKER_##name,
typedef enum checker_rule { CHECKER_RULES(CHECKER_RULE_ID) CHECKER_RULE_COUNT } checker_rule;

typedef struct checker_rule_row {
    int list;
    const char *name;
    const char *text;
} checker_rule_row;

#define CHECKER_RULE_ROW(list, name, text) {CHECKER_##list, #name, text},
static const checker_rule_row checker_rules[] = {CHECKER_RULES(CHECKER_RULE_ROW)};

enum {
    CHECKER_FIXED = 1, // handshake and client flags
    CHECKER_NO_ZEROES = 2,

    CHECKER_HAS_FLAGS = 1 << 0,
    CHECKER_READ_ONLY = 1 << 1,
    CHECKER_SEND_FLUSH = 1 << 2,
    CHECKER_SEND_FUA = 1 << 3,
    CHECKER_SEND_TRIM = 1 << 5,
    CHECKER_SEND_ZEROES = 1 << 6,
    CHECKER_SEND_DF = 1 << 7,
    CHECKER_SEND_CACHE = 1 << 10,
    CHECKER_SEND_FAST_ZERO = 1 << 11,
    CHECKER_STATUS_PAYLOAD = 1 << 12,

    CHECKER_FUA = 1 << 0, // command flags
    CHECKER_NO_HOLE = 1 << 1,
    CHECKER_DF = 1 << 2,
    CHECKER_REQ_ONE = 1 << 3,
    CHECKER_FAST_ZERO = 1 << 4,
    CHECKER_PAYLOAD = 1 << 5,
    CHECKER_COMMAND_FLAGS = 0x3f,

    CHECKER_EXPORT_NAME = 1,
    CHECKER_ABORT = 2,
    CHECKER_LIST = 3,
    CHECKER_STARTTLS = 5,
    CHECKER_INFO = 6,
    CHECKER_GO = 7,
    CHECKER_STRUCTURED = 8,
    CHECKER_LIST_META = 9,
    CHECKER_SET_META = 10,
    CHECKER_EXTENDED = 11,

    CHECKER_REP_ACK = 1,
    CHECKER_REP_SERVER = 2,
    CHECKER_REP_INFO = 3,
    CHECKER_REP_META = 4,
    CHECKER_REP_UNSUP = 1, // with bit 31
    CHECKER_REP_INVALID = 3,
    CHECKER_REP_TLS = 5,
    CHECKER_REP_SHUTDOWN = 7,
    CHECKER_REP_BLOCK_SIZE = 8,
    CHECKER_REP_EXTENDED = 10,

    CHECKER_INFO_EXPORT = 0,
    CHECKER_INFO_NAME = 1,
    CHECKER_INFO_DESCRIPTION = 2,
    CHECKER_INFO_BLOCK_SIZE = 3,

    CHECKER_READ = 0,
    CHECKER_WRITE = 1,
    CHECKER_DISC = 2,
    CHECKER_FLUSH = 3,
    CHECKER_TRIM = 4,
    CHECKER_CACHE = 5,
    CHECKER_ZEROES = 6,
    CHECKER_STATUS = 7,

    CHECKER_DONE = 1,
    CHECKER_CHUNK_NONE = 0,
    CHECKER_CHUNK_DATA = 1,
    CHECKER_CHUNK_HOLE = 2,
    CHECKER_CHUNK_STATUS = 5,
    CHECKER_CHUNK_STATUS_EXT = 6,
    CHECKER_CHUNK_ERROR = 0x8001,
    CHECKER_CHUNK_ERROR_OFFSET = 0x8002,

    CHECKER_ENOTSUP = 95,
    CHECKER_EOVERFLOW = 75,
    CHECKER_ESHUTDOWN = 108,

    CHECKER_DEFAULT_MAXIMUM = 1 << 25
};

#define CHECKER_OPTION_MAGIC UINT64_C(0x49484156454f5054)
#define CHECKER_REP_ERROR UINT32_C(0x80000000)

typedef struct checker checker;
typedef void checker_step(checker *k);

// One direction.  `then` runs when `skip` bytes have passed and `need` bytes are gathered;
// without it the stream stands between two messages.
typedef struct checker_stream {
    unsigned char *bytes;
    size_t have;
    size_t room;
    uint64_t need;
    uint64_t skip;
    checker_step *then;
    uint64_t position;
    uint64_t start; // of the current message
} checker_stream;

typedef struct checker_vector {
    uint64_t *at;
    size_t count;
    size_t room;
} checker_vector;

// TEXT: length, hash.  EXTENT: request, index of the context, offset, length, flags.
// HOLE: request, offset, length.  RESULT: option (0: an oldstyle greeting), error as sent, and
// of what offers an export size, flags, minimum and maximum block in one, preferred block.
enum { CHECKER_SAYS_TEXT, CHECKER_SAYS_EXTENT, CHECKER_SAYS_HOLE, CHECKER_SAYS_RESULT };

typedef struct checker_saying {
    uint64_t kind;
    uint64_t what[6];
} checker_saying;

enum { CHECKER_NEVER_CAME, CHECKER_CAME, CHECKER_CAME_AS_HOLE };

typedef struct checker_request {
    struct checker_request *next;
    unsigned order; // among the requests of the session
    int complete;   // the reply
    uint32_t error; // the first one, as sent
    uint64_t error_offset;
    int overlapped;
    int missing;          // no status of a context
    size_t most_spans;    // that there were at once
    unsigned char *image; // READ: the content
    unsigned char *came;  // which bytes of it are the server's
    uint64_t cookie;
    uint64_t offset;
    uint64_t length; // the effect length
    uint16_t flags;
    uint16_t type;
    int settled;            // has an error, or a violation: success is not judged
    int errors;             // without offset
    int overflowed;         // EOVERFLOW was one of the errors
    unsigned contents;      // content chunks
    checker_vector spans;   // content as pairs of begin and end, sorted, joined
    checker_vector failed;  // error offsets
    checker_vector wanted;  // context IDs in the payload
    checker_vector replied; // context IDs with status
} checker_request;

typedef struct checker_export {
    unsigned seen; // bit per information type below 32
    uint64_t size;
    uint16_t flags;
    uint32_t minimum;
    uint32_t preferred;
    uint32_t maximum;
    uint64_t sum; // of the hashes of the information, in any order
} checker_export;

// The option that awaits its final reply.
typedef struct checker_pending {
    int active;
    uint32_t option;
    uint32_t reply_type; // of the reply that is being read
    int malformed;
    int asked_sizes;
    uint32_t queries;
    int only_base; // queries
    uint64_t name; // hash
    uint64_t data; // hash
} checker_pending;

enum {
    CHECKER_AT_GREETING,
    CHECKER_AT_FLAGS,
    CHECKER_AT_OPTIONS,
    CHECKER_AT_EXPORT, // EXPORT_NAME awaits its reply
    CHECKER_AT_TLS,
    CHECKER_AT_REQUESTS
};

struct checker {
    checker_rule_row const *last; // the latest rule broken, for debuggers
    struct {
        const char *rule;
        uint64_t position;
    } found[CHECKER_LISTS][CHECKER_KEPT];
    unsigned count[CHECKER_LISTS];
    unsigned late; // requests to allow after ESHUTDOWN or a bad chunk

    int keep;
    checker_saying *said;
    size_t said_count;
    size_t said_room;
    unsigned asked; // requests
    checker_request *answered;

    checker_stream client;
    checker_stream server;
    int phase;
    int lost; // the framing is unknown
    int server_gone;
    int oldstyle;
    int oversize; // a reply so long that the client may take it for an attack

    uint16_t handshake;
    uint32_t client_flags;
    int flags_bad; // the server must close
    int tls;
    int aborted;
    int told_shutdown;
    int go_refused; // as unsupported
    int asked_sizes_once;
    int structured;
    int extended;
    checker_pending pending;
    uint64_t set_name;       // hash of the export name in the last SET_META_CONTEXT
    int set_valid;           // it was accepted
    checker_vector contexts; // pairs of ID and kind
    int info_valid;          // an INFO was accepted, and no other option came since
    uint64_t info_data;
    uint64_t info_sum;

    checker_export offer; // of the INFO or GO at work, then of the transmission
    int by_go;
    int asked_sizes;
    uint64_t name; // hash
    int requested; // there was a request
    int disc;
    int shutdown;  // ESHUTDOWN crossed
    int bad_chunk; // a chunk crossed that obliges the client to disconnect
    int began_after_shutdown;
    int began_after_bad_chunk;
    checker_request *requests;
    checker_request *sending; // the request whose payload the client sends
    struct {
        uint16_t flags;
        uint16_t type;
        uint64_t length;
        checker_request *request; // NULL when the cookie is wrong
        int paints;               // its bytes are content of the request
        uint64_t place;           // of the next one
    } chunk;
};

enum { CHECKER_KIND_OTHER, CHECKER_KIND_BASE, CHECKER_KIND_ALLOCATION };

static inline uint16_t checker_16(const unsigned char *p)
{
    return (uint16_t)(p[0] << 8 | p[1]);
}

static inline uint32_t checker_32(const unsigned char *p)
{
    return (uint32_t)checker_16(p) << 16 | checker_16(p + 2);
}

static inline uint64_t checker_64(const unsigned char *p)
{
    return (uint64_t)checker_32(p) << 32 | checker_32(p + 4);
}

// FNV-1a: names and parameters are only compared.
static inline uint64_t checker_hash(const unsigned char *p, size_t n)
{
    uint64_t hash = UINT64_C(14695981039346656037);

    while (n-- > 0) {
        hash = (hash ^ *p++) * UINT64_C(1099511628211);
    }
    return hash;
}

static inline void *checker_grown(void *old, size_t size)
{
    void *grown = realloc(old, size);

    if (!grown) {
        fputs("checker: out of memory\n", stderr);
        abort();
    }
    return grown;
}

static inline void checker_push(checker_vector *v, uint64_t value)
{
    if (v->count == v->room) {
        v->room = v->room ? 2 * v->room : 8;
        v->at = (uint64_t *)checker_grown(v->at, v->room * sizeof *v->at);
    }
    v->at[v->count++] = value;
}

static inline int checker_holds(const checker_vector *v, uint64_t value, size_t stride)
{
    size_t i;

    for (i = 0; i < v->count; i += stride) {
        if (v->at[i] == value) return 1;
    }
    return 0;
}

static inline void checker_break(checker *k, checker_rule rule)
{
    const checker_rule_row *row = &checker_rules[rule];
    unsigned at = k->count[row->list]++;

    k->last = row;
    if (at >= CHECKER_KEPT) return;
    k->found[row->list][at].rule = row->name;
    k->found[row->list][at].position =
        row->list < CHECKER_SERVER ? k->client.start : k->server.start;
}

static inline void checker_lose(checker *k, checker_rule rule)
{
    checker_break(k, rule);
    k->lost = 1;
}

static inline void checker_judge(checker *k, int broken, checker_rule rule)
{
    if (broken) checker_break(k, rule);
}

// --- streams

static inline void checker_want(checker_stream *s, uint64_t size, checker_step *then)
{
    s->have = 0;
    s->need = size;
    s->then = then;
}

static inline void checker_more(checker_stream *s, uint64_t size, checker_step *then)
{
    s->need = s->have + size;
    s->then = then;
}

static inline void checker_skip(checker_stream *s, uint64_t size, checker_step *then)
{
    checker_want(s, 0, then);
    s->skip = size;
}

static inline size_t checker_least(size_t n, uint64_t limit)
{
    return limit < n ? (size_t)limit : n;
}

static inline void checker_gather(checker_stream *s, const unsigned char *p, size_t n)
{
    if (s->room - s->have < n) {
        s->room = 2 * s->room + n;
        s->bytes = (unsigned char *)checker_grown(s->bytes, s->room);
    }
    memcpy(s->bytes + s->have, p, n);
    s->have += n;
}

// Memory grows with the bytes that came, not with the length that a message claims.
static inline size_t checker_take(checker_stream *s, const unsigned char *p, size_t n)
{
    size_t took = checker_least(n, s->skip ? s->skip : s->need - s->have);

    if (s->skip) {
        s->skip -= took;
    } else if (took > 0) {
        checker_gather(s, p, took);
    }
    s->position += took;
    return took;
}

// Content for the request whose reply is read.
static inline void checker_paint(checker *k, const unsigned char *p, size_t n)
{
    checker_request *r = k->chunk.request;

    if (!k->chunk.paints || !r->image) return;
    memcpy(r->image + k->chunk.place, p, n);
    memset(r->came + k->chunk.place, CHECKER_CAME, n);
    k->chunk.place += n;
}

static inline int checker_idle(const checker *k)
{
    return k->lost || k->phase == CHECKER_AT_TLS;
}

static inline void checker_feed(checker *k, checker_stream *s, checker_step *begin,
                                const unsigned char *p, size_t n)
{
    while (n > 0 && !checker_idle(k)) {
        size_t took = 0;
        checker_step *then;

        if (!s->then) {
            s->start = s->position;
            begin(k);
            if (k->lost) break;
        }
        if (s == &k->server && s->skip) checker_paint(k, p, checker_least(n, s->skip));
        took = checker_take(s, p, n);
        p += took;
        n -= took;
        while (s->then && !s->skip && s->have == s->need) {
            then = s->then;
            s->then = NULL;
            then(k);
        }
    }
    s->position += n;
}

static inline void checker_over(checker *k)
{
    (void)k;
}

// --- what was said

static inline void checker_say(checker *k, uint64_t kind, const uint64_t *what, size_t count)
{
    checker_saying *said;

    if (!k->keep) return;
    if (k->said_count == k->said_room) {
        k->said_room = k->said_room ? 2 * k->said_room : 64;
        k->said = (checker_saying *)checker_grown(k->said, k->said_room * sizeof *k->said);
    }
    said = &k->said[k->said_count++];
    memset(said, 0, sizeof *said);
    said->kind = kind;
    memcpy(said->what, what, count * sizeof *what);
}

static inline void checker_say_text(checker *k, const unsigned char *p, size_t n)
{
    uint64_t what[2];

    what[0] = n;
    what[1] = checker_hash(p, n);
    if (n > 0) checker_say(k, CHECKER_SAYS_TEXT, what, 2);
}

// --- strings

// The number of bytes of the code point at p, or 0 when there is none.
static inline size_t checker_utf8_size(const unsigned char *p, size_t n)
{
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    size_t tail = p[0] >= 0xf0 ? 3 : p[0] >= 0xe0 ? 2 : p[0] >= 0xc0 ? 1 : 0;
    uint32_t code = tail ? p[0] & (0x3fU >> tail) : p[0];
    size_t i;

    if ((p[0] >= 0x80 && p[0] < 0xc0) || p[0] > 0xf7 || tail >= n) return 0;
    for (i = 1; i <= tail; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (p[i] & 0x3fU);
    }
    if (code < least[tail] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return 0;
    return tail + 1;
}

static inline int checker_utf8(const unsigned char *p, size_t n)
{
    while (n > 0) {
        size_t size = checker_utf8_size(p, n);

        if (size == 0) return 0;
        p += size;
        n -= size;
    }
    return 1;
}

enum { CHECKER_OF_CLIENT, CHECKER_OF_SERVER };

static inline void checker_string(checker *k, int side, const unsigned char *p, size_t n)
{
    static const checker_rule rules[2][4] = {
        {CHECKER_string_long, CHECKER_string_256, CHECKER_string_nul, CHECKER_string_utf8},
        {CHECKER_server_string_long, CHECKER_server_string_256, CHECKER_server_string_nul,
         CHECKER_server_string_utf8},
    };

    if (side == CHECKER_OF_SERVER) checker_say_text(k, p, n);
    checker_judge(k, n > 4096, rules[side][0]);
    checker_judge(k, n > 256 && n <= 4096, rules[side][1]);
    checker_judge(k, memchr(p, 0, n) != NULL, rules[side][2]);
    checker_judge(k, !checker_utf8(p, n), rules[side][3]);
}

static inline int checker_same(const unsigned char *p, size_t n, const char *text)
{
    return n == strlen(text) && memcmp(p, text, n) == 0;
}

static inline int checker_registered(const unsigned char *p, size_t n)
{
    return checker_same(p, n, "base") || checker_same(p, n, "nbd-server") ||
           checker_same(p, n, "qemu") || (n > 2 && memcmp(p, "x-", 2) == 0);
}

static inline size_t checker_namespace(const unsigned char *p, size_t n)
{
    size_t i = 0;

    while (i < n && p[i] > ' ' && p[i] != 0x7f && p[i] != ':') {
        i++;
    }
    return i < n && p[i] == ':' ? i : 0;
}

// Judges a query or the name of a context, and returns its kind.
static inline int checker_context(checker *k, int side, const unsigned char *p, size_t n)
{
    size_t space = checker_namespace(p, n);

    checker_string(k, side, p, n);
    if (space == 0) {
        checker_break(k, side == CHECKER_OF_CLIENT ? CHECKER_query_form : CHECKER_context_form);
    } else if (!checker_registered(p, space)) {
        checker_break(k, side == CHECKER_OF_CLIENT ? CHECKER_query_namespace
                                                   : CHECKER_context_namespace);
    }
    if (checker_same(p, n, "base:allocation")) return CHECKER_KIND_ALLOCATION;
    return checker_same(p, space, "base") ? CHECKER_KIND_BASE : CHECKER_KIND_OTHER;
}

// --- the client's handshake

static inline int checker_chunked(const checker *k)
{
    return k->structured || k->extended;
}

static inline void checker_client_flags(checker *k)
{
    uint32_t flags = checker_32(k->client.bytes);
    uint32_t known = CHECKER_FIXED | CHECKER_NO_ZEROES;

    k->client_flags = flags;
    checker_judge(k, (flags & ~known) != 0, CHECKER_flags_unknown);
    checker_judge(k, (flags & known & ~(uint32_t)k->handshake) != 0, CHECKER_flags_not_offered);
    k->flags_bad = (flags & ~(known & k->handshake)) != 0;
    k->phase = CHECKER_AT_OPTIONS;
}

enum { CHECKER_ANY_DATA, CHECKER_NO_DATA, CHECKER_NAME_DATA, CHECKER_INFO_DATA, CHECKER_META_DATA };

// The layout of each option's data, and its reply types as bits.
static const struct {
    unsigned char layout;
    unsigned char replies;
} checker_options[] = {
    {CHECKER_ANY_DATA, 0xff},
    {CHECKER_NAME_DATA, 0},
    {CHECKER_ANY_DATA, 1 << CHECKER_REP_ACK},
    {CHECKER_NO_DATA, 1 << CHECKER_REP_ACK | 1 << CHECKER_REP_SERVER},
    {CHECKER_ANY_DATA, 0xff},
    {CHECKER_NO_DATA, 1 << CHECKER_REP_ACK},
    {CHECKER_INFO_DATA, 1 << CHECKER_REP_ACK | 1 << CHECKER_REP_INFO},
    {CHECKER_INFO_DATA, 1 << CHECKER_REP_ACK | 1 << CHECKER_REP_INFO},
    {CHECKER_NO_DATA, 1 << CHECKER_REP_ACK},
    {CHECKER_META_DATA, 1 << CHECKER_REP_ACK | 1 << CHECKER_REP_META},
    {CHECKER_META_DATA, 1 << CHECKER_REP_ACK | 1 << CHECKER_REP_META},
    {CHECKER_NO_DATA, 1 << CHECKER_REP_ACK},
};

static inline unsigned checker_option_row(uint32_t option)
{
    return option < sizeof checker_options / sizeof *checker_options ? option : 0;
}

static inline void checker_forget_contexts(checker *k)
{
    k->contexts.count = 0;
    k->set_valid = 0;
}

static inline void checker_fixed_rules(checker *k, uint32_t option)
{
    if (option == CHECKER_EXPORT_NAME) return;
    if (!(k->handshake & CHECKER_FIXED)) {
        checker_break(k, CHECKER_option_not_fixed);
    } else if (!(k->client_flags & CHECKER_FIXED)) {
        checker_break(k, option == CHECKER_STARTTLS ? CHECKER_starttls_not_fixed
                                                    : CHECKER_fixed_flag_unset);
    }
}

static inline void checker_export_name_rules(checker *k)
{
    int could_go = (k->handshake & CHECKER_FIXED) && !k->go_refused;

    if (k->extended) {
        checker_break(k, CHECKER_export_name_extended);
    } else if (could_go) {
        checker_break(k,
                      k->asked_sizes_once ? CHECKER_export_name_block_size : CHECKER_go_preferred);
    }
    memset(&k->offer, 0, sizeof k->offer);
    k->phase = CHECKER_AT_EXPORT;
}

// What depends on the options before; an early reply must not change it.
static inline void checker_option_rules(checker *k, uint32_t option)
{
    checker_fixed_rules(k, option);
    checker_judge(k, k->told_shutdown && option != CHECKER_ABORT, CHECKER_option_after_shutdown);
    switch (option) {
    case CHECKER_EXPORT_NAME: checker_export_name_rules(k); break;
    case CHECKER_ABORT: k->aborted = 1; break;
    case CHECKER_LIST: break;
    case CHECKER_STARTTLS:
        checker_judge(k, k->tls, CHECKER_starttls_twice);
        checker_judge(k, !k->tls && checker_chunked(k), CHECKER_starttls_late);
        break;
    case CHECKER_INFO:
    case CHECKER_GO: memset(&k->offer, 0, sizeof k->offer); break;
    case CHECKER_STRUCTURED: checker_judge(k, k->structured, CHECKER_repeated_option); break;
    case CHECKER_LIST_META:
        checker_judge(k, !checker_chunked(k), CHECKER_list_meta_without_replies);
        break;
    case CHECKER_SET_META:
        checker_judge(k, !checker_chunked(k), CHECKER_set_meta_without_replies);
        checker_forget_contexts(k);
        break;
    case CHECKER_EXTENDED: checker_judge(k, k->extended, CHECKER_repeated_option); break;
    default: checker_break(k, CHECKER_option_unknown);
    }
    if (option != CHECKER_GO) k->info_valid = 0;
}

static inline void checker_info_requests(checker *k, const unsigned char *p, size_t count)
{
    unsigned char seen[65536 / 8] = {0};
    size_t i;

    for (i = 0; i < count; i++) {
        uint16_t type = checker_16(p + 2 * i);
        unsigned bit = 1U << type % 8;

        checker_judge(k, (seen[type / 8] & bit) != 0, CHECKER_info_twice);
        seen[type / 8] = (unsigned char)(seen[type / 8] | bit);
        if (type == CHECKER_INFO_BLOCK_SIZE) k->pending.asked_sizes = 1;
    }
    k->asked_sizes_once |= k->pending.asked_sizes;
}

static inline int checker_info_data(checker *k, const unsigned char *p, size_t n)
{
    size_t name = n < 6 ? 0 : checker_32(p);
    size_t count;

    if (n < 6 || name > n - 6) return 0;
    count = checker_16(p + 4 + name);
    if (n != 6 + name + 2 * count) return 0;
    checker_string(k, CHECKER_OF_CLIENT, p + 4, name);
    k->pending.name = checker_hash(p + 4, name);
    k->pending.data = checker_hash(p, n);
    checker_info_requests(k, p + 6 + name, count);
    return 1;
}

static inline int checker_meta_queries(checker *k, const unsigned char *p, size_t n)
{
    uint32_t i;

    k->pending.only_base = k->pending.queries > 0;
    for (i = 0; i < k->pending.queries; i++) {
        size_t size = n < 4 ? 0 : checker_32(p);

        if (n < 4 || size > n - 4) return 0;
        if (checker_context(k, CHECKER_OF_CLIENT, p + 4, size) == CHECKER_KIND_OTHER) {
            k->pending.only_base = 0;
        }
        p += 4 + size;
        n -= 4 + size;
    }
    return n == 0;
}

static inline int checker_meta_data(checker *k, const unsigned char *p, size_t n)
{
    size_t name = n < 8 ? 0 : checker_32(p);

    if (n < 8 || name > n - 8) return 0;
    checker_string(k, CHECKER_OF_CLIENT, p + 4, name);
    if (k->pending.option == CHECKER_SET_META) k->set_name = checker_hash(p + 4, name);
    k->pending.queries = checker_32(p + 4 + name);
    return checker_meta_queries(k, p + 8 + name, n - 8 - name);
}

static inline void checker_option_data(checker *k)
{
    const unsigned char *p = k->client.bytes + 16;
    size_t n = k->client.have - 16;

    switch (checker_options[checker_option_row(k->pending.option)].layout) {
    case CHECKER_NO_DATA: checker_judge(k, n > 0, CHECKER_option_data); break;
    case CHECKER_NAME_DATA:
        checker_string(k, CHECKER_OF_CLIENT, p, n);
        k->name = checker_hash(p, n);
        break;
    case CHECKER_INFO_DATA:
        k->pending.malformed = !checker_info_data(k, p, n);
        checker_judge(k, k->pending.malformed, CHECKER_info_layout);
        break;
    case CHECKER_META_DATA:
        k->pending.malformed = !checker_meta_data(k, p, n);
        checker_judge(k, k->pending.malformed, CHECKER_meta_layout);
        break;
    default: checker_judge(k, n > 0 && k->pending.option == CHECKER_ABORT, CHECKER_abort_data);
    }
}

// From here on the server may reply: it need not read the data first.
static inline void checker_option_header(checker *k)
{
    const unsigned char *p = k->client.bytes;
    uint32_t option = checker_32(p + 8);

    if (checker_64(p) != CHECKER_OPTION_MAGIC) {
        checker_lose(k, CHECKER_option_magic);
        return;
    }
    memset(&k->pending, 0, sizeof k->pending);
    k->pending.active = 1;
    k->pending.option = option;
    checker_option_rules(k, option);
    checker_more(&k->client, checker_32(p + 12), checker_option_data);
}

// --- requests

typedef struct checker_command {
    unsigned flags; // besides FUA
    unsigned needs; // transmission flag, or 0
    checker_rule unless_offered;
    int writes;
    int ranged;
} checker_command;

static const checker_command checker_commands[] = {
    {CHECKER_DF, 0, CHECKER_RULE_COUNT, 0, 1},
    {CHECKER_PAYLOAD, 0, CHECKER_RULE_COUNT, 1, 1},
    {0, 0, CHECKER_RULE_COUNT, 0, 0},
    {0, CHECKER_SEND_FLUSH, CHECKER_flush_not_offered, 0, 0},
    {0, CHECKER_SEND_TRIM, CHECKER_trim_not_offered, 1, 1},
    {0, CHECKER_SEND_CACHE, CHECKER_cache_not_offered, 0, 1},
    {CHECKER_NO_HOLE | CHECKER_FAST_ZERO, CHECKER_SEND_ZEROES, CHECKER_zeroes_not_offered, 1, 1},
    {CHECKER_REQ_ONE | CHECKER_PAYLOAD, 0, CHECKER_RULE_COUNT, 0, 1},
};

static inline int checker_inside(const checker_request *r, uint64_t offset, uint64_t length)
{
    return offset >= r->offset && length <= r->length && offset - r->offset <= r->length - length;
}

static inline int checker_has_sizes(const checker *k)
{
    return (k->offer.seen >> CHECKER_INFO_BLOCK_SIZE & 1) != 0;
}

static inline int checker_may_status(const checker *k)
{
    return k->set_valid && k->contexts.count > 0 && k->set_name == k->name;
}

static inline void checker_range_rules(checker *k, const checker_request *r)
{
    checker_request whole = {0};

    whole.length = k->offer.size;
    checker_judge(k, !checker_inside(&whole, r->offset, r->length), CHECKER_out_of_bounds);
    checker_judge(k, r->length == 0, CHECKER_zero_length);
    if (checker_has_sizes(k) && k->offer.minimum && (r->offset | r->length) % k->offer.minimum) {
        checker_break(k, k->asked_sizes ? CHECKER_unaligned : CHECKER_unaligned_unasked);
    }
}

static inline void checker_maximum_rules(checker *k, const checker_request *r, uint64_t payload)
{
    int reads = r->type == CHECKER_READ;
    uint64_t carried = reads && !checker_chunked(k) ? r->length : payload;

    if (k->asked_sizes && checker_has_sizes(k)) {
        checker_judge(k, carried > k->offer.maximum, CHECKER_over_maximum);
        checker_judge(k, reads && r->length > UINT32_MAX, CHECKER_read_over_32);
    } else {
        checker_judge(k, (reads ? r->length : payload) > CHECKER_DEFAULT_MAXIMUM,
                      CHECKER_over_default_maximum);
    }
}

static inline void checker_payload_flag_rules(checker *k, const checker_request *r)
{
    int set = r->flags & CHECKER_PAYLOAD;

    if (!k->extended) {
        checker_judge(k, set, CHECKER_payload_flag_compact);
        return;
    }
    checker_judge(k, !set && r->type == CHECKER_WRITE, CHECKER_write_without_payload_flag);
    checker_judge(k, set && r->type == CHECKER_STATUS && !(k->offer.flags & CHECKER_STATUS_PAYLOAD),
                  CHECKER_status_payload_not_offered);
}

static inline void checker_flag_rules(checker *k, const checker_request *r)
{
    static const struct {
        unsigned flag;
        unsigned needs;
        checker_rule rule;
    } rows[] = {
        {CHECKER_FUA, CHECKER_SEND_FUA, CHECKER_fua_not_offered},
        {CHECKER_DF, CHECKER_SEND_DF, CHECKER_df_not_offered},
        {CHECKER_FAST_ZERO, CHECKER_SEND_FAST_ZERO, CHECKER_fast_zero_not_offered},
    };
    const checker_command *command = &checker_commands[r->type];
    unsigned judged_apart = CHECKER_FUA | (k->extended ? 0U : (unsigned)CHECKER_PAYLOAD);
    unsigned misplaced = r->flags & CHECKER_COMMAND_FLAGS & ~command->flags & ~judged_apart;
    size_t i;

    checker_judge(k, misplaced != 0, CHECKER_flag_misplaced);
    checker_judge(k, (r->flags & CHECKER_FUA) && !command->writes, CHECKER_fua_pointless);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        checker_judge(k, (r->flags & rows[i].flag) && !(k->offer.flags & rows[i].needs),
                      rows[i].rule);
    }
    checker_payload_flag_rules(k, r);
}

static inline void checker_command_rules(checker *k, const checker_request *r)
{
    const checker_command *command = &checker_commands[r->type];
    int payload_tells_range = r->type == CHECKER_STATUS && (r->flags & CHECKER_PAYLOAD);

    checker_flag_rules(k, r);
    if (command->needs && !(k->offer.flags & command->needs)) {
        checker_break(k, command->unless_offered);
    }
    checker_judge(k, r->type == CHECKER_STATUS && !checker_may_status(k),
                  CHECKER_status_without_context);
    checker_judge(k, command->writes && (k->offer.flags & CHECKER_READ_ONLY),
                  CHECKER_write_on_read_only);
    checker_judge(k, !command->ranged && (r->offset || r->length), CHECKER_reserved_nonzero);
    if (command->ranged && !payload_tells_range) checker_range_rules(k, r);
}

// A bound for what was under way is the caller's to give: see `late`.
static inline void checker_order_rules(checker *k, const checker_request *r)
{
    if (r->type == CHECKER_DISC || !(k->began_after_shutdown || k->began_after_bad_chunk)) return;
    if (k->late > 0) {
        k->late--;
        return;
    }
    checker_break(k, k->began_after_bad_chunk ? CHECKER_request_after_bad_chunk
                                              : CHECKER_request_after_shutdown);
}

static inline checker_request **checker_find(checker *k, uint64_t cookie)
{
    checker_request **at = &k->requests;

    while (*at && (*at)->cookie != cookie) {
        at = &(*at)->next;
    }
    return at;
}

static inline void checker_free_request(checker_request *r)
{
    free(r->image);
    free(r->came);
    free(r->spans.at);
    free(r->failed.at);
    free(r->wanted.at);
    free(r->replied.at);
    free(r);
}

// The oldest of two equal cookies is answered first.
static inline checker_request *checker_add(checker *k, const checker_request *r)
{
    checker_request **at = checker_find(k, r->cookie);

    checker_judge(k, *at != NULL, CHECKER_cookie_in_flight);
    while (*at) {
        at = &(*at)->next;
    }
    *at = (checker_request *)checker_grown(NULL, sizeof **at);
    **at = *r;
    (*at)->order = k->asked++;
    if (k->keep && r->type == CHECKER_READ && r->length <= CHECKER_DEFAULT_MAXIMUM) {
        (*at)->image = (unsigned char *)checker_grown(NULL, (size_t)r->length + 1);
        (*at)->came = (unsigned char *)checker_grown(NULL, (size_t)r->length + 1);
        memset((*at)->came, CHECKER_NEVER_CAME, (size_t)r->length);
    }
    return *at;
}

static inline void checker_remove(checker *k, checker_request *r)
{
    checker_request **at = &k->requests;

    while (*at != r) {
        at = &(*at)->next;
    }
    *at = r->next;
    if (k->sending == r) k->sending = NULL;
    if (k->keep && r->complete) {
        r->next = k->answered;
        k->answered = r;
    } else {
        checker_free_request(r);
    }
}

// The request is gone when the server answered without reading the payload.
static inline void checker_status_payload(checker *k)
{
    const unsigned char *p = k->client.bytes;
    size_t n = k->client.have;
    checker_request *r = k->sending;
    int doubtful = 0;
    size_t i;

    k->sending = NULL;
    if (n < 8 || n % 4 != 0) {
        checker_break(k, CHECKER_status_payload_layout);
        if (r) r->settled = 1;
        return;
    }
    if (!r) return;
    r->length = checker_64(p);
    checker_range_rules(k, r);
    for (i = 8; i < n; i += 4) {
        uint64_t id = checker_32(p + i);

        doubtful |= !checker_holds(&k->contexts, id, 2) || checker_holds(&r->wanted, id, 1);
        checker_push(&r->wanted, id);
    }
    checker_judge(k, doubtful, CHECKER_status_payload_ids);
}

static inline uint64_t checker_payload(const checker *k, const checker_request *r)
{
    if (k->extended) return r->flags & CHECKER_PAYLOAD ? r->length : 0;
    return r->type == CHECKER_WRITE ? r->length : 0;
}

static inline void checker_receive_payload(checker *k, checker_request *r, uint64_t payload)
{
    if (r->type == CHECKER_STATUS && payload > 0) {
        k->sending = r;
        checker_want(&k->client, payload, checker_status_payload);
    } else if (payload > 0) {
        checker_skip(&k->client, payload, checker_over);
    }
}

static inline void checker_request_header(checker *k)
{
    const unsigned char *p = k->client.bytes;
    checker_request r = {0};
    uint64_t payload;

    r.flags = checker_16(p + 4);
    r.type = checker_16(p + 6);
    r.cookie = checker_64(p + 8);
    r.offset = checker_64(p + 16);
    r.length = k->extended ? checker_64(p + 24) : checker_32(p + 24);
    k->requested = 1;
    payload = checker_payload(k, &r);
    checker_order_rules(k, &r);
    checker_judge(k, (r.flags & ~CHECKER_COMMAND_FLAGS) != 0, CHECKER_flag_unknown);
    checker_judge(k, r.type > CHECKER_STATUS, CHECKER_command_unknown);
    if (r.type <= CHECKER_STATUS) checker_command_rules(k, &r);
    checker_maximum_rules(k, &r, payload);
    if (r.type == CHECKER_DISC) {
        checker_judge(k, k->requests != NULL, CHECKER_disc_in_flight);
        k->disc = 1;
    } else {
        checker_receive_payload(k, checker_add(k, &r), payload);
    }
}

static inline void checker_request_start(checker *k)
{
    uint32_t magic = checker_32(k->client.bytes);

    if (magic == (k->extended ? 0x21e41c71 : 0x25609513)) {
        checker_more(&k->client, k->extended ? 28 : 24, checker_request_header);
    } else if (magic == 0x21e41c71 || magic == 0x25609513) {
        checker_lose(k, CHECKER_request_kind);
    } else if (magic == (uint32_t)(CHECKER_OPTION_MAGIC >> 32) && k->by_go) {
        checker_lose(k, CHECKER_option_after_go);
    } else {
        checker_lose(k, CHECKER_request_magic);
    }
}

static inline void checker_begin_request(checker *k)
{
    if (k->disc) {
        checker_lose(k, CHECKER_after_disc);
        return;
    }
    k->began_after_shutdown = k->shutdown;
    k->began_after_bad_chunk = k->bad_chunk;
    checker_want(&k->client, 4, checker_request_start);
}

static inline void checker_begin_option(checker *k)
{
    if (k->aborted) {
        checker_lose(k, CHECKER_after_abort);
    } else if (k->pending.active) {
        checker_lose(k, CHECKER_early_message);
    } else {
        checker_want(&k->client, 16, checker_option_header);
    }
}

static inline void checker_client_begin(checker *k)
{
    if (k->phase == CHECKER_AT_GREETING) {
        checker_lose(k, CHECKER_speaks_first);
    } else if (k->phase == CHECKER_AT_FLAGS) {
        checker_want(&k->client, 4, checker_client_flags);
    } else if (k->phase == CHECKER_AT_OPTIONS) {
        checker_begin_option(k);
    } else if (k->phase == CHECKER_AT_EXPORT) {
        checker_lose(k, CHECKER_early_message);
    } else {
        checker_begin_request(k);
    }
}

// --- the server's handshake

// The result of an option, or of a greeting that offers an export.
static inline void checker_say_result(checker *k, uint32_t option, uint32_t error, int offers)
{
    const checker_export *e = &k->offer;
    uint64_t what[6] = {0};

    what[0] = option;
    what[1] = error;
    if (offers) {
        what[2] = e->size;
        what[3] = e->flags;
        what[4] = (uint64_t)e->minimum << 32 | e->maximum;
        what[5] = e->preferred;
    }
    checker_say(k, CHECKER_SAYS_RESULT, what, 6);
}

static inline void checker_export_flags(checker *k, uint16_t flags)
{
    k->offer.flags = flags;
    checker_judge(k, !(flags & CHECKER_HAS_FLAGS), CHECKER_has_flags);
    checker_judge(k, (flags & CHECKER_SEND_DF) && !checker_chunked(k), CHECKER_df_flag);
    checker_judge(k, (flags & CHECKER_SEND_FAST_ZERO) && !(flags & CHECKER_SEND_ZEROES),
                  CHECKER_fast_zero_flag);
    checker_judge(k, (flags & CHECKER_STATUS_PAYLOAD) && !k->extended, CHECKER_status_payload_flag);
}

static inline void checker_padding(checker *k, const unsigned char *p)
{
    static const unsigned char zeroes[124];

    checker_judge(k, memcmp(p, zeroes, sizeof zeroes) != 0, CHECKER_padding);
}

static inline void checker_oldstyle(checker *k)
{
    const unsigned char *p = k->server.bytes + 16;

    k->offer.size = checker_64(p);
    checker_judge(k, checker_16(p + 8) != 0, CHECKER_oldstyle_flags);
    checker_export_flags(k, checker_16(p + 10));
    checker_padding(k, p + 12);
    k->phase = CHECKER_AT_REQUESTS;
    k->oldstyle = 1;
    checker_say_result(k, 0, 0, 1);
}

static inline void checker_newstyle(checker *k)
{
    k->handshake = checker_16(k->server.bytes + 16);
    checker_judge(k, (k->handshake & ~(CHECKER_FIXED | CHECKER_NO_ZEROES)) != 0,
                  CHECKER_handshake_flags);
    k->phase = CHECKER_AT_FLAGS;
}

static inline void checker_greeting(checker *k)
{
    const unsigned char *p = k->server.bytes;
    uint64_t style = checker_64(p + 8);

    if (checker_64(p) == UINT64_C(0x4e42444d41474943) && style == CHECKER_OPTION_MAGIC) {
        checker_more(&k->server, 2, checker_newstyle);
    } else if (checker_64(p) == UINT64_C(0x4e42444d41474943) &&
               style == UINT64_C(0x00420281861253)) {
        checker_more(&k->server, 136, checker_oldstyle);
    } else {
        checker_lose(k, CHECKER_greeting_magic);
    }
}

static inline void checker_export_name_reply(checker *k)
{
    const unsigned char *p = k->server.bytes;

    k->offer.size = checker_64(p);
    checker_export_flags(k, checker_16(p + 8));
    if (k->server.have > 10) checker_padding(k, p + 10);
    checker_say_result(k, CHECKER_EXPORT_NAME, 0, 1);
    k->pending.active = 0;
    k->phase = CHECKER_AT_REQUESTS;
}

static inline int checker_power(uint32_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

static inline void checker_block_sizes(checker *k, const unsigned char *p)
{
    uint32_t minimum = checker_32(p);
    uint32_t preferred = checker_32(p + 4);
    uint32_t maximum = checker_32(p + 8);

    checker_judge(k, !checker_power(minimum) || minimum > 65536, CHECKER_block_minimum);
    checker_judge(k, !checker_power(preferred) || preferred < 512 || preferred < minimum,
                  CHECKER_block_preferred);
    checker_judge(k, maximum < preferred, CHECKER_block_maximum);
    k->offer.minimum = minimum;
    k->offer.preferred = preferred;
    k->offer.maximum = maximum;
}

static inline void checker_info_reply(checker *k, const unsigned char *p, size_t n)
{
    static const size_t sizes[] = {12, 0, 0, 14};
    unsigned type = n < 2 ? 0 : checker_16(p);

    if (n < 2 || (type < 4 && sizes[type] && n != sizes[type])) {
        checker_break(k, CHECKER_info_reply_layout);
        return;
    }
    if (type < 32) {
        checker_judge(k, k->offer.seen >> type & 1, CHECKER_info_reply_twice);
        k->offer.seen |= 1U << type;
    }
    k->offer.sum += checker_hash(p, n);
    if (type == CHECKER_INFO_EXPORT) {
        k->offer.size = checker_64(p + 2);
        checker_export_flags(k, checker_16(p + 10));
    } else if (type == CHECKER_INFO_BLOCK_SIZE) {
        checker_block_sizes(k, p + 2);
    } else if (type == CHECKER_INFO_NAME || type == CHECKER_INFO_DESCRIPTION) {
        checker_string(k, CHECKER_OF_SERVER, p + 2, n - 2);
    }
}

static inline void checker_meta_reply(checker *k, const unsigned char *p, size_t n)
{
    uint32_t id = n < 4 ? 0 : checker_32(p);
    int kind;

    if (n < 4) {
        checker_break(k, CHECKER_meta_reply_layout);
        return;
    }
    kind = checker_context(k, CHECKER_OF_SERVER, p + 4, n - 4);
    if (k->pending.option == CHECKER_LIST_META) {
        checker_judge(k, id != 0, CHECKER_list_context_id);
        return;
    }
    checker_judge(k, !k->client.then && k->pending.queries == 0, CHECKER_context_unasked);
    checker_judge(k, checker_holds(&k->contexts, id, 2), CHECKER_context_id);
    checker_push(&k->contexts, id);
    checker_push(&k->contexts, (uint64_t)kind);
}

static inline void checker_server_reply(checker *k, const unsigned char *p, size_t n)
{
    size_t name = n < 4 ? 0 : checker_32(p);

    if (n < 4 || name > n - 4) {
        checker_break(k, CHECKER_server_reply_layout);
        return;
    }
    checker_string(k, CHECKER_OF_SERVER, p + 4, name);
    checker_string(k, CHECKER_OF_SERVER, p + 4 + name, n - 4 - name);
}

static inline void checker_size_rules(checker *k)
{
    checker_judge(k, !(k->offer.seen >> CHECKER_INFO_EXPORT & 1), CHECKER_ack_without_export);
    if (!checker_has_sizes(k)) return;
    checker_judge(k, k->offer.minimum && k->offer.size % k->offer.minimum != 0,
                  CHECKER_size_unaligned);
    checker_judge(k, k->offer.maximum < 1 << 20 && k->offer.size >= 1 << 20, CHECKER_maximum_small);
}

static inline void checker_info_accepted(checker *k)
{
    const checker_pending *pending = &k->pending;

    checker_size_rules(k);
    checker_say_result(k, pending->option, 0, 1);
    if (pending->option == CHECKER_INFO) {
        k->info_valid = 1;
        k->info_data = pending->data;
        k->info_sum = k->offer.sum;
        return;
    }
    checker_judge(k, k->info_valid && k->info_data == pending->data && k->info_sum != k->offer.sum,
                  CHECKER_info_go_differ);
    k->name = pending->name;
    k->asked_sizes = pending->asked_sizes;
    k->by_go = 1;
    k->phase = CHECKER_AT_REQUESTS;
}

static inline void checker_accepted(checker *k)
{
    uint32_t option = k->pending.option;

    checker_judge(k, option == CHECKER_STARTTLS && k->tls, CHECKER_starttls_again);
    if (option != CHECKER_INFO && option != CHECKER_GO) checker_say_result(k, option, 0, 0);
    if (option == CHECKER_STARTTLS) {
        k->phase = CHECKER_AT_TLS;
    } else if (option == CHECKER_INFO || option == CHECKER_GO) {
        checker_info_accepted(k);
    } else if (option == CHECKER_STRUCTURED) {
        k->structured = 1;
    } else if (option == CHECKER_EXTENDED) {
        k->extended = 1;
    } else if (option == CHECKER_LIST_META || option == CHECKER_SET_META) {
        checker_judge(k, k->pending.malformed, CHECKER_bad_meta_accepted);
        k->set_valid |= option == CHECKER_SET_META;
    }
}

// Is ERR_EXT_HEADER_REQD impossible here?
static inline int checker_extended_denied(const checker *k)
{
    uint32_t option = k->pending.option;

    if (option == CHECKER_STRUCTURED) return 0;
    if (option == CHECKER_LIST_META || option == CHECKER_SET_META) {
        return k->extended || (!k->client.then && k->pending.only_base && checker_chunked(k));
    }
    return k->extended;
}

static inline void checker_refused(checker *k, uint32_t error)
{
    uint32_t option = k->pending.option;
    int info = option == CHECKER_INFO || option == CHECKER_GO;

    checker_say_result(k, option, error | CHECKER_REP_ERROR, 0);
    checker_judge(k, option == CHECKER_ABORT, CHECKER_abort_reply);
    checker_judge(k, option == CHECKER_STARTTLS && k->tls && error != CHECKER_REP_INVALID,
                  CHECKER_starttls_again);
    checker_judge(k, error == CHECKER_REP_TLS && (k->tls || option == CHECKER_STARTTLS),
                  CHECKER_tls_required);
    checker_judge(k, error == CHECKER_REP_BLOCK_SIZE && info && k->pending.asked_sizes,
                  CHECKER_block_size_required);
    checker_judge(k, error == CHECKER_REP_EXTENDED && checker_extended_denied(k),
                  CHECKER_extended_required);
    checker_judge(k, error == CHECKER_REP_UNSUP && option == CHECKER_GO && k->extended,
                  CHECKER_go_unsupported);
    k->told_shutdown |= error == CHECKER_REP_SHUTDOWN;
    k->go_refused |= error == CHECKER_REP_UNSUP && info;
    if (option == CHECKER_SET_META) checker_forget_contexts(k);
}

static inline void checker_reply_data(checker *k)
{
    const unsigned char *p = k->server.bytes + 20;
    size_t n = k->server.have - 20;
    uint32_t type = k->pending.reply_type;
    unsigned allowed = checker_options[checker_option_row(k->pending.option)].replies;

    if (type & CHECKER_REP_ERROR) {
        checker_string(k, CHECKER_OF_SERVER, p, n);
        k->pending.active = 0;
        checker_refused(k, type & ~CHECKER_REP_ERROR);
    } else if (type > 7 || !(allowed >> type & 1)) {
        checker_break(k, CHECKER_reply_type);
    } else if (type == CHECKER_REP_ACK) {
        checker_judge(k, n > 0, CHECKER_ack_data);
        k->pending.active = 0;
        checker_accepted(k);
    } else if (type == CHECKER_REP_SERVER) {
        checker_server_reply(k, p, n);
    } else if (type == CHECKER_REP_INFO) {
        checker_info_reply(k, p, n);
    } else if (type == CHECKER_REP_META) {
        checker_meta_reply(k, p, n);
    }
}

static inline void checker_reply_header(checker *k)
{
    const unsigned char *p = k->server.bytes;

    if (checker_64(p) != UINT64_C(0x3e889045565a9)) {
        checker_lose(k, CHECKER_reply_magic);
    } else if (checker_32(p + 8) != k->pending.option) {
        checker_lose(k, CHECKER_reply_option);
    } else {
        k->pending.reply_type = checker_32(p + 12);
        checker_more(&k->server, checker_32(p + 16), checker_reply_data);
    }
}

// --- replies to requests

static inline void checker_error(checker *k, checker_request *r, uint32_t error)
{
    static const unsigned char defined[] = {1, 5, 12, 22, 28, 75, 95, 108};
    int overflow = error == CHECKER_EOVERFLOW && (r->flags & CHECKER_DF);
    int needless = error == CHECKER_ENOTSUP && r->type == CHECKER_ZEROES &&
                   (k->offer.flags & CHECKER_SEND_FAST_ZERO) && !(r->flags & CHECKER_FAST_ZERO);

    checker_judge(k, error > 255 || !memchr(defined, (int)error, sizeof defined),
                  CHECKER_error_value);
    checker_judge(k, needless, CHECKER_fast_zero_enotsup);
    checker_judge(k, overflow && (r->length <= 65536 || r->contents > 0), CHECKER_df_overflow);
    if (!r->error) {
        r->error = error;
        r->error_offset = r->offset;
    }
    r->overflowed |= overflow;
    r->settled = 1;
    k->shutdown |= error == CHECKER_ESHUTDOWN;
}

static inline int checker_covered(const checker_request *r)
{
    const checker_vector *v = &r->spans;

    if (r->length == 0) return 1;
    return v->count == 2 && v->at[0] == r->offset && v->at[1] - v->at[0] == r->length;
}

static inline int checker_all_status(const checker *k, const checker_request *r)
{
    int chosen = r->wanted.count > 0;
    const checker_vector *wanted = chosen ? &r->wanted : &k->contexts;
    size_t i;

    for (i = 0; i < wanted->count; i += chosen ? 1 : 2) {
        if (!checker_holds(&r->replied, wanted->at[i], 1)) return 0;
    }
    return 1;
}

// The reply is complete.
static inline void checker_finish(checker *k, checker_request *r)
{
    if (!r->settled && r->type <= CHECKER_STATUS) {
        checker_judge(k, r->type == CHECKER_READ && checker_chunked(k) && !checker_covered(r),
                      CHECKER_not_covered);
        checker_judge(k, r->type == CHECKER_STATUS && !checker_all_status(k, r),
                      CHECKER_status_missing);
        checker_judge(k, checker_commands[r->type].writes && (k->offer.flags & CHECKER_READ_ONLY),
                      CHECKER_read_only_success);
    }
    r->missing = r->type == CHECKER_STATUS && !checker_all_status(k, r);
    r->complete = 1;
    checker_remove(k, r);
}

static inline void checker_simple_data(checker *k)
{
    checker_finish(k, k->chunk.request);
}

static inline void checker_simple(checker *k)
{
    uint32_t error = checker_32(k->server.bytes + 4);
    checker_request *r = *checker_find(k, checker_64(k->server.bytes + 8));

    k->chunk.paints = 0;
    if (!r) {
        checker_lose(k, CHECKER_reply_cookie);
        return;
    }
    if (r->type == CHECKER_READ && checker_chunked(k)) {
        checker_break(k, CHECKER_simple_read);
        k->lost = error == 0;
        r->settled = 1;
    } else if (r->type == CHECKER_STATUS && !error) {
        checker_break(k, CHECKER_simple_status);
        r->settled = 1;
    }
    if (error) checker_error(k, r, error);
    if (r->type == CHECKER_READ && !error) {
        k->chunk.request = r;
        k->chunk.paints = 1;
        k->chunk.place = 0;
        checker_skip(&k->server, r->length, checker_simple_data);
    } else {
        checker_finish(k, r);
    }
}

// A violation inside a reply: whether it is complete cannot be judged any more.
static inline void checker_spoil(checker *k, checker_rule rule)
{
    checker_break(k, rule);
    k->chunk.request->settled = 1;
}

// These oblige the client to disconnect.
static inline void checker_bad_chunk(checker *k, checker_rule rule)
{
    checker_spoil(k, rule);
    k->bad_chunk = 1;
}

static inline void checker_chunk_end(checker *k)
{
    if (k->chunk.request && (k->chunk.flags & CHECKER_DONE)) checker_finish(k, k->chunk.request);
}

static inline void checker_insert_span(checker_vector *v, size_t at, uint64_t begin, uint64_t end)
{
    checker_push(v, 0);
    checker_push(v, 0);
    memmove(v->at + at + 2, v->at + at, (v->count - 2 - at) * sizeof *v->at);
    v->at[at] = begin;
    v->at[at + 1] = end;
}

// Adds a span and joins it with its neighbours; 0 when it overlaps one of them.
static inline int checker_cover(checker_vector *v, uint64_t begin, uint64_t end)
{
    size_t at = 0;
    int joins;

    while (at < v->count && v->at[at + 1] <= begin) {
        at += 2;
    }
    if (at < v->count && v->at[at] < end) return 0;
    joins = at > 0 && v->at[at - 1] == begin;
    if (at < v->count && v->at[at] == end && joins) {
        v->at[at - 1] = v->at[at + 1];
        memmove(v->at + at, v->at + at + 2, (v->count - at - 2) * sizeof *v->at);
        v->count -= 2;
    } else if (at < v->count && v->at[at] == end) {
        v->at[at] = begin;
    } else if (joins) {
        v->at[at - 1] = end;
    } else {
        checker_insert_span(v, at, begin, end);
    }
    return 1;
}

static inline int checker_hits_error(const checker_request *r, uint64_t begin, uint64_t end)
{
    size_t i;

    for (i = 0; i < r->failed.count; i++) {
        if (r->failed.at[i] >= begin && r->failed.at[i] < end) return 1;
    }
    return 0;
}

static inline void checker_content(checker *k, uint64_t offset, uint64_t length)
{
    checker_request *r = k->chunk.request;

    if (!checker_inside(r, offset, length)) {
        checker_bad_chunk(k, CHECKER_content_outside);
        return;
    }
    if ((r->flags & CHECKER_DF) && r->contents > 0) checker_spoil(k, CHECKER_df_chunks);
    checker_judge(k, r->overflowed, CHECKER_df_overflow);
    r->contents++;
    r->overlapped |= !checker_cover(&r->spans, offset, offset + length);
    if (r->spans.count / 2 > r->most_spans) r->most_spans = r->spans.count / 2;
    k->chunk.paints = !r->overlapped;
    k->chunk.place = offset - r->offset;
    if (r->overlapped || checker_hits_error(r, offset, offset + length)) {
        checker_spoil(k, CHECKER_content_overlap); // the client MAY disconnect, but need not
    }
}

static inline void checker_chunk_data(checker *k)
{
    checker_content(k, checker_64(k->server.bytes), k->chunk.length - 8);
    checker_skip(&k->server, k->chunk.length - 8, checker_chunk_end);
}

static inline void checker_paint_hole(checker *k, uint64_t length)
{
    checker_request *r = k->chunk.request;
    uint64_t what[3];

    what[0] = r->order;
    what[1] = r->offset + k->chunk.place;
    what[2] = length;
    checker_say(k, CHECKER_SAYS_HOLE, what, 3);
    if (!r->image) return;
    memset(r->image + k->chunk.place, 0, (size_t)length);
    memset(r->came + k->chunk.place, CHECKER_CAME_AS_HOLE, (size_t)length);
}

static inline void checker_chunk_hole(checker *k)
{
    uint32_t length = checker_32(k->server.bytes + 8);

    if (length == 0) {
        checker_bad_chunk(k, CHECKER_hole_empty);
    } else {
        checker_content(k, checker_64(k->server.bytes), length);
        if (k->chunk.paints) checker_paint_hole(k, length);
    }
    checker_chunk_end(k);
}

static inline void checker_error_offset(checker *k, uint64_t offset)
{
    checker_request *r = k->chunk.request;

    checker_judge(k, !checker_inside(r, offset, 1), CHECKER_error_offset_outside);
    checker_push(&r->failed, offset);
}

static inline int checker_is_known_error(const checker *k)
{
    return k->chunk.type == CHECKER_CHUNK_ERROR || k->chunk.type == CHECKER_CHUNK_ERROR_OFFSET;
}

static inline void checker_error_payload(checker *k, const unsigned char *p, size_t n)
{
    checker_request *r = k->chunk.request;
    size_t fixed = k->chunk.type == CHECKER_CHUNK_ERROR_OFFSET ? 14 : 6;
    size_t message = n < fixed ? 0 : checker_16(p + 4);
    int first = !r->error;

    r->settled = 1;
    if (n < fixed) {
        checker_bad_chunk(k, CHECKER_error_length);
        return;
    }
    if (message > n - fixed) {
        checker_bad_chunk(k, CHECKER_message_length);
        return;
    }
    if (checker_32(p) == 0) {
        checker_break(k, CHECKER_error_zero);
    } else {
        checker_error(k, r, checker_32(p));
    }
    checker_string(k, CHECKER_OF_SERVER, p + 6, message);
    if (checker_is_known_error(k) && message < n - fixed) {
        checker_bad_chunk(k, CHECKER_error_trailing);
    }
    if (k->chunk.type == CHECKER_CHUNK_ERROR_OFFSET) {
        checker_error_offset(k, checker_64(p + 6 + message));
        if (first) r->error_offset = checker_64(p + 6 + message);
    } else {
        checker_judge(k, r->errors++ > 0, CHECKER_error_twice);
    }
}

static inline void checker_chunk_error(checker *k)
{
    checker_error_payload(k, k->server.bytes, k->server.have);
    checker_chunk_end(k);
}

static inline int checker_context_kind(const checker *k, uint32_t id)
{
    size_t i;

    for (i = 0; i < k->contexts.count; i += 2) {
        if (k->contexts.at[i] == id) return (int)k->contexts.at[i + 1];
    }
    return CHECKER_KIND_OTHER;
}

typedef struct checker_extent {
    uint64_t length;
    uint64_t flags;
    uint64_t before; // bytes of the extents before it, never more than fits
} checker_extent;

static inline void checker_extent_rules(checker *k, const checker_extent *e, int kind)
{
    const checker_request *r = k->chunk.request;
    int one = r->flags & CHECKER_REQ_ONE;

    checker_judge(k, e->length == 0, CHECKER_extent_empty);
    checker_judge(k, one && e->before == 0 && e->length > r->length, CHECKER_extent_one_long);
    checker_judge(k, !one && e->before > 0 && e->before >= r->length, CHECKER_extent_excess);
    checker_judge(k, checker_has_sizes(k) && k->offer.minimum && e->length % k->offer.minimum != 0,
                  CHECKER_extent_unaligned);
    checker_judge(k, kind != CHECKER_KIND_OTHER && e->flags >> 32 != 0, CHECKER_extent_high);
    checker_judge(k, kind == CHECKER_KIND_ALLOCATION && (e->flags & 0xfffffffc) != 0,
                  CHECKER_allocation_bits);
}

static inline void checker_say_extent(checker *k, const checker_extent *e, uint32_t id)
{
    const checker_request *r = k->chunk.request;
    uint64_t what[5];

    what[0] = r->order;
    for (what[1] = 0; 2 * what[1] < k->contexts.count; what[1]++) {
        if (k->contexts.at[2 * what[1]] == id) break;
    }
    what[2] = r->offset + e->before;
    what[3] = e->length;
    what[4] = e->flags;
    checker_say(k, CHECKER_SAYS_EXTENT, what, 5);
}

// Returns how much they cover.
static inline uint64_t checker_extents(checker *k, const unsigned char *p, size_t count,
                                       uint32_t id)
{
    int kind = checker_context_kind(k, id);
    size_t half = k->extended ? 8 : 4;
    checker_extent e = {0};
    size_t i;

    for (i = 0; i < count; i++, p += 2 * half) {
        e.length = k->extended ? checker_64(p) : checker_32(p);
        e.flags = k->extended ? checker_64(p + half) : checker_32(p + half);
        checker_extent_rules(k, &e, kind);
        checker_say_extent(k, &e, id);
        e.before = e.length > UINT64_MAX - e.before ? UINT64_MAX : e.before + e.length;
    }
    return e.before;
}

static inline void checker_status_id(checker *k, uint32_t id)
{
    checker_request *r = k->chunk.request;
    int chosen = r->wanted.count > 0;

    if (!checker_holds(chosen ? &r->wanted : &k->contexts, id, chosen ? 1 : 2)) {
        checker_bad_chunk(k, CHECKER_status_context);
    } else if (checker_holds(&r->replied, id, 1)) {
        checker_bad_chunk(k, CHECKER_status_twice);
    }
    checker_push(&r->replied, id);
}

static inline void checker_chunk_status(checker *k)
{
    const unsigned char *p = k->server.bytes;
    size_t n = k->server.have;
    size_t head = k->extended ? 8 : 4;
    size_t count = n < head ? 0 : (n - head) / (2 * head);

    if (count == 0 || n != head + count * 2 * head) {
        checker_bad_chunk(k, CHECKER_status_length);
    } else {
        if (k->extended && checker_32(p + 4) != count) checker_bad_chunk(k, CHECKER_status_count);
        checker_status_id(k, checker_32(p));
        checker_judge(k, count > 1 && (k->chunk.request->flags & CHECKER_REQ_ONE),
                      CHECKER_extent_one);
        checker_judge(k, count > 1 << 20, CHECKER_extents_many);
        checker_extents(k, p + head, count, checker_32(p));
    }
    checker_chunk_end(k);
}

// The chunk types, the commands that they answer as bits, and their fixed parts.
typedef struct checker_chunk_kind {
    uint16_t type;
    unsigned commands;
    uint64_t least;
    uint64_t most;
    checker_rule unless;
    uint64_t gathered; // 0: all of it
    uint64_t fixed;    // not counted against the maximum payload
    checker_step *step;
} checker_chunk_kind;

static const checker_chunk_kind checker_chunk_kinds[] = {
    {CHECKER_CHUNK_NONE, 0xff, 0, 0, CHECKER_none_length, 0, 0, checker_chunk_end},
    {CHECKER_CHUNK_DATA, 1 << CHECKER_READ, 9, UINT64_MAX, CHECKER_data_length, 8, 8,
     checker_chunk_data},
    {CHECKER_CHUNK_HOLE, 1 << CHECKER_READ, 12, 12, CHECKER_hole_length, 0, 12, checker_chunk_hole},
    {CHECKER_CHUNK_STATUS, 1 << CHECKER_STATUS, 0, UINT64_MAX, CHECKER_status_length, 0, 4,
     checker_chunk_status},
    {CHECKER_CHUNK_STATUS_EXT, 1 << CHECKER_STATUS, 0, UINT64_MAX, CHECKER_status_length, 0, 8,
     checker_chunk_status},
    {CHECKER_CHUNK_ERROR, 0xff, 0, UINT64_MAX, CHECKER_error_length, 0, 6, checker_chunk_error},
    {CHECKER_CHUNK_ERROR_OFFSET, 0xff & ~(1 << CHECKER_FLUSH), 0, UINT64_MAX, CHECKER_error_length,
     0, 14, checker_chunk_error},
};

// An error chunk of unknown type begins like ERROR.
static inline const checker_chunk_kind *checker_kind(uint16_t type)
{
    size_t i;

    for (i = 0; i < sizeof checker_chunk_kinds / sizeof *checker_chunk_kinds; i++) {
        if (checker_chunk_kinds[i].type == type) return &checker_chunk_kinds[i];
    }
    return type & 0x8000 ? checker_kind(CHECKER_CHUNK_ERROR) : NULL;
}

static inline int checker_fits_command(const checker *k, const checker_chunk_kind *kind)
{
    uint16_t wrong = k->extended ? CHECKER_CHUNK_STATUS : CHECKER_CHUNK_STATUS_EXT;
    unsigned type = k->chunk.request->type;

    if (kind && type > CHECKER_STATUS) return kind->commands == 0xff;
    return kind && kind->type != wrong && (kind->commands >> type & 1);
}

static inline void checker_refuse_chunk(checker *k, checker_rule rule)
{
    checker_spoil(k, rule);
    k->bad_chunk |= !(k->chunk.type & 0x8000);
    checker_skip(&k->server, k->chunk.length, checker_chunk_end);
}

static inline void checker_chunk_payload(checker *k)
{
    const checker_chunk_kind *kind = checker_kind(k->chunk.type);
    uint64_t length = k->chunk.length;

    if (!checker_fits_command(k, kind)) {
        checker_refuse_chunk(k, CHECKER_chunk_type);
        return;
    }
    if (kind->type == CHECKER_CHUNK_NONE && !(k->chunk.flags & CHECKER_DONE)) {
        checker_bad_chunk(k, CHECKER_none_done);
    }
    if (length < kind->least || length > kind->most) {
        checker_refuse_chunk(k, kind->unless);
        return;
    }
    checker_judge(
        k, checker_has_sizes(k) && length > kind->fixed && length - kind->fixed > k->offer.maximum,
        CHECKER_chunk_over_maximum);
    checker_want(&k->server, kind->gathered ? kind->gathered : length, kind->step);
}

static inline void checker_chunk_header(checker *k)
{
    const unsigned char *p = k->server.bytes;
    checker_request *r = *checker_find(k, checker_64(p + 8));

    k->chunk.paints = 0;
    k->chunk.flags = checker_16(p + 4);
    k->chunk.type = checker_16(p + 6);
    k->chunk.length = k->extended ? checker_64(p + 24) : checker_32(p + 16);
    k->chunk.request = r;
    k->oversize |= k->chunk.length > CHECKER_DEFAULT_MAXIMUM;
    if (!r) {
        checker_break(k, CHECKER_reply_cookie);
        checker_skip(&k->server, k->chunk.length, checker_chunk_end);
        return;
    }
    checker_judge(k, (k->chunk.flags & ~CHECKER_DONE) != 0, CHECKER_reply_flags);
    checker_judge(k, k->extended && checker_64(p + 16) != r->offset, CHECKER_offset_echo);
    checker_chunk_payload(k);
}

static inline void checker_reply_start(checker *k)
{
    uint32_t magic = checker_32(k->server.bytes);
    int simple = magic == 0x67446698;
    int structured = magic == 0x668e33ef;
    int extended = magic == 0x6e8a278c;

    if (!simple && !structured && !extended) {
        checker_lose(k, CHECKER_chunk_magic);
    } else if (extended != k->extended || (structured && !k->structured)) {
        checker_lose(k, CHECKER_reply_kind);
    } else {
        checker_more(&k->server,
                     simple       ? 12
                     : structured ? 16
                                  : 28,
                     simple ? checker_simple : checker_chunk_header);
    }
}

static inline void checker_begin_reply(checker *k)
{
    int zeroes = !(k->client_flags & CHECKER_NO_ZEROES);

    if (!k->pending.active) {
        checker_lose(k, CHECKER_unasked_reply);
        return;
    }
    if (k->flags_bad) {
        checker_break(k, CHECKER_bad_flags_tolerated);
        k->flags_bad = 0;
    }
    if (k->phase == CHECKER_AT_EXPORT) {
        checker_want(&k->server, zeroes ? 134 : 10, checker_export_name_reply);
    } else {
        checker_want(&k->server, 20, checker_reply_header);
    }
}

static inline void checker_server_begin(checker *k)
{
    if (k->phase == CHECKER_AT_GREETING) {
        checker_want(&k->server, 16, checker_greeting);
    } else if (k->phase == CHECKER_AT_REQUESTS) {
        checker_want(&k->server, 4, checker_reply_start);
    } else {
        checker_begin_reply(k);
    }
}

// --- the interface

static inline void checker_begin(checker *k)
{
    memset(k, 0, sizeof *k);
}

static inline void checker_client(checker *k, const void *bytes, size_t n)
{
    checker_feed(k, &k->client, checker_client_begin, (const unsigned char *)bytes, n);
}

static inline void checker_server(checker *k, const void *bytes, size_t n)
{
    checker_feed(k, &k->server, checker_server_begin, (const unsigned char *)bytes, n);
}

// What follows was decrypted.  The client flags still hold; all that was agreed by options is
// forgotten.
static inline void checker_tls(checker *k)
{
    k->client.then = NULL;
    k->server.then = NULL;
    k->tls = 1;
    k->phase = CHECKER_AT_OPTIONS;
    k->structured = 0;
    k->extended = 0;
    k->go_refused = 0;
    k->asked_sizes_once = 0;
    k->info_valid = 0;
    memset(&k->pending, 0, sizeof k->pending);
    checker_forget_contexts(k);
}

// --- a message that never ends: its beginning may be impossible already

static inline void checker_begun_reply(checker *k)
{
    const unsigned char *p = k->server.bytes + 20;
    size_t have = k->server.have - 20;
    uint64_t n = k->server.need - 20;
    uint32_t type = k->pending.reply_type;
    unsigned allowed = checker_options[checker_option_row(k->pending.option)].replies;
    uint64_t most = 4096;

    if (type & CHECKER_REP_ERROR) {
        checker_judge(k, n > most, CHECKER_server_string_long);
        return;
    }
    if (type > 7 || !(allowed >> type & 1)) {
        checker_break(k, CHECKER_reply_type);
    } else if (type == CHECKER_REP_ACK) {
        checker_break(k, CHECKER_ack_data);
    } else if (type == CHECKER_REP_SERVER) {
        uint64_t name = have < 4 ? 0 : checker_32(p);

        checker_judge(k, n < 4 || (have >= 4 && name > n - 4), CHECKER_server_reply_layout);
        checker_judge(k, n > 4 + 2 * most || name > most || (have >= 4 && n - 4 > name + most),
                      CHECKER_server_string_long);
    } else if (type == CHECKER_REP_META) {
        checker_judge(k, n < 4, CHECKER_meta_reply_layout);
        checker_judge(k, n > 4 + most, CHECKER_server_string_long);
    } else if (type == CHECKER_REP_INFO) {
        unsigned info = have < 2 ? 0xffff : checker_16(p);

        checker_judge(k, n < 2, CHECKER_info_reply_layout);
        checker_judge(k,
                      (info == CHECKER_INFO_EXPORT && n != 12) ||
                          (info == CHECKER_INFO_BLOCK_SIZE && n != 14),
                      CHECKER_info_reply_layout);
        checker_judge(
            k, (info == CHECKER_INFO_NAME || info == CHECKER_INFO_DESCRIPTION) && n > 2 + most,
            CHECKER_server_string_long);
    }
}

static inline void checker_begun_error(checker *k)
{
    const unsigned char *p = k->server.bytes;
    uint64_t n = k->server.need;
    unsigned fixed = k->chunk.type == CHECKER_CHUNK_ERROR_OFFSET ? 14 : 6;
    unsigned broken;

    checker_judge(k, n < fixed, CHECKER_error_length);
    checker_judge(k, checker_is_known_error(k) && n > fixed + 4096 && k->server.have < 6,
                  CHECKER_server_string_long);
    if (n < fixed || k->server.have < 6) return;
    broken = k->count[CHECKER_SERVER];
    checker_judge(k, checker_32(p) == 0, CHECKER_error_zero);
    checker_judge(k, checker_16(p + 4) > n - fixed, CHECKER_message_length);
    checker_judge(k, checker_16(p + 4) > 4096, CHECKER_server_string_long);
    checker_judge(k, checker_is_known_error(k) && checker_16(p + 4) < n - fixed,
                  CHECKER_error_trailing);
    if (fixed == 6 && k->count[CHECKER_SERVER] == broken) {
        checker_error(k, k->chunk.request, checker_32(p));
    }
}

static inline void checker_begun_status(checker *k)
{
    const unsigned char *p = k->server.bytes;
    uint64_t n = k->server.need;
    size_t head = k->extended ? 8 : 4;
    uint64_t covered;

    if (n < 3 * head || (n - head) % (2 * head) != 0) {
        checker_bad_chunk(k, CHECKER_status_length);
    } else if (k->server.have >= head) {
        if (k->extended && checker_32(p + 4) != (n - head) / (2 * head)) {
            checker_bad_chunk(k, CHECKER_status_count);
        }
        checker_status_id(k, checker_32(p));
        checker_judge(k, n > 3 * head && (k->chunk.request->flags & CHECKER_REQ_ONE),
                      CHECKER_extent_one);
        covered = checker_extents(k, p + head, (k->server.have - head) / (2 * head), checker_32(p));
        checker_judge(k,
                      k->server.have > head && covered >= k->chunk.request->length &&
                          (n - k->server.have) / (2 * head) > 0,
                      CHECKER_extent_excess);
    }
}

static inline void checker_begun(checker *k)
{
    checker_step *then = k->server.then;

    if (then == checker_reply_data) {
        checker_begun_reply(k);
    } else if (then == checker_chunk_error) {
        checker_begun_error(k);
    } else if (then == checker_chunk_status) {
        checker_begun_status(k);
    } else if (then == checker_chunk_data) {
        checker_judge(k, k->chunk.length - 8 > k->chunk.request->length, CHECKER_content_outside);
    }
}

// A simple reply to READ can only be broken off when reading fails.
static inline int checker_breaks_off(const checker *k)
{
    return k->server.then == checker_simple_data && k->server.skip > 0;
}

static inline void checker_server_end(checker *k)
{
    int haggling = k->phase == CHECKER_AT_OPTIONS && (k->handshake & CHECKER_FIXED) && !k->aborted;
    int in_flight = k->phase == CHECKER_AT_REQUESTS && !k->disc && k->requests != NULL;

    k->server_gone = 1;
    if (checker_idle(k) || k->count[CHECKER_CLIENT] > 0 || checker_breaks_off(k)) return;
    if (k->server.then) {
        unsigned broken = k->count[CHECKER_SERVER];

        checker_begun(k);
        checker_judge(k, k->count[CHECKER_SERVER] == broken, CHECKER_server_cut_message);
        return;
    }
    k->server.start = k->server.position;
    checker_judge(k, haggling, CHECKER_hang_up);
    checker_judge(k, in_flight, CHECKER_hang_up_in_flight);
}

static inline int checker_client_done(const checker *k)
{
    switch (k->phase) {
    case CHECKER_AT_OPTIONS: return k->aborted || !(k->handshake & CHECKER_FIXED);
    case CHECKER_AT_EXPORT: return 0;
    case CHECKER_AT_REQUESTS: return k->disc || (k->oldstyle && !k->requested);
    default: return 1;
    }
}

static inline void checker_end(checker *k)
{
    if (checker_idle(k) || k->server_gone || k->oversize || k->count[CHECKER_SERVER] > 0) return;
    if (k->server.then) checker_begun(k);
    if (k->count[CHECKER_SERVER] > 0) return;
    if (k->client.then) {
        checker_break(k, CHECKER_cut_message);
    } else if (!checker_client_done(k)) {
        k->client.start = k->client.position;
        checker_break(k, CHECKER_hard_disconnect);
    }
}

// Prints the findings of one list, one a line.
static inline void checker_print(const checker *k, int list, FILE *file)
{
    unsigned i;

    for (i = 0; i < k->count[list] && i < CHECKER_KEPT; i++) {
        fprintf(file, "%s at %llu\n", k->found[list][i].rule,
                (unsigned long long)k->found[list][i].position);
    }
}

static inline void checker_free(checker *k)
{
    k->keep = 0;
    while (k->requests) {
        checker_remove(k, k->requests);
    }
    while (k->answered) {
        checker_request *r = k->answered;

        k->answered = r->next;
        checker_free_request(r);
    }
    free(k->said);
    free(k->client.bytes);
    free(k->server.bytes);
    free(k->contexts.at);
    memset(k, 0, sizeof *k);
}

#endif
