// A session of writing, flushing and reading with whatever is cut out of nbd.h: it works,
// what is cut is refused as its contract says, and the proof of a read holds.  tests/cuts.sh
// compiles it with each macro.
#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include <stdio.h>
#include <string.h>

#include "check.h"

enum { DISK = 4096, HALF = 1024, SIZE = 2 * HALF, STREAM = 1 << 16, TURNS = 1000, STALE = 0xEE };

/// A small server ///

enum answer { WHOLE, IN_TWO, WITH_HOLE, GAP, OVERLAP, FAILS, SCATTERED };

typedef struct server_state {
    unsigned char disk[DISK];
    unsigned char in[STREAM];
    size_t in_size;
    unsigned char out[STREAM];
    size_t out_size;
    size_t out_taken;
    int oldstyle;
    int structured;     // whether it offers structured replies
    int chunks;         // whether they are agreed on
    int greeted;        // the client's flags are in
    int transmission;   //
    int over;           // the client has said goodbye
    int asked[16];      // options, by number
    enum answer answer; // to a structured read
    unsigned char header[28];
} server_state;

static server_state server;
static nbd_client client;
static nbd_slot slots[2];
static unsigned char buffer[NBD_BUFFER_MIN];
static unsigned char memory[SIZE];
static int texts;
static uint32_t flags_; // for nbd_init

static uint64_t number_at(const unsigned char *at, unsigned width)
{
    uint64_t value = 0;

    while (width--)
        value = value << 8 | *at++;
    return value;
}

static void put(const void *bytes, size_t size)
{
    CHECK(size <= STREAM - server.out_size);
    memcpy(server.out + server.out_size, bytes, size);
    server.out_size += size;
}

static void put_number(uint64_t value, unsigned width)
{
    unsigned char bytes[8];
    unsigned i;

    for (i = 0; i < width; i++)
        bytes[i] = (unsigned char)(value >> 8 * (width - 1 - i));
    put(bytes, width);
}

static void put_export(void)
{
    put_number(DISK, 8);
    put_number(NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH, 2);
}

static void greet(void)
{
    static const unsigned char zeroes[124];

    put("NBDMAGIC", 8);
    if (server.oldstyle) {
        put("\0\0\102\2\201\206\22\123", 8);
        put_number(DISK, 8);
        put_number(NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH, 4);
        put(zeroes, sizeof zeroes);
        server.greeted = server.transmission = 1;
    } else {
        put("IHAVEOPT", 8);
        put_number(3, 2);
    }
}

static void put_option_reply(uint32_t option, uint32_t type, uint32_t size)
{
    put_number(0x3e889045565a9, 8);
    put_number(option, 4);
    put_number(type, 4);
    put_number(size, 4);
}

static void option(uint32_t number)
{
    CHECK(number < 16);
    server.asked[number] = 1;
    if (number == NBD_OPTION_EXPORT_NAME) {
        put_export();
        server.transmission = 1;
    } else if (number == NBD_OPTION_GO) {
        put_option_reply(number, 3, 12);
        put_number(0, 2);
        put_export();
        put_option_reply(number, 3, 6); // a name, which may be skipped
        put("\0\1disk", 6);
        put_option_reply(number, 1, 0);
        server.transmission = 1;
    } else if (number == NBD_OPTION_STRUCTURED_REPLY && server.structured) {
        put_option_reply(number, 1, 0);
        server.chunks = 1;
    } else {
        put_option_reply(number, 0x80000001, 2); // with a message
        put("no", 2);
    }
}

static void put_chunk(unsigned flags, unsigned type, size_t size)
{
    put_number(0x668e33ef, 4);
    put_number(flags, 2);
    put_number(type, 2);
    put(server.header + 8, 8);
    put_number(size, 4);
}

static void put_data(unsigned flags, uint64_t offset, size_t size)
{
    put_chunk(flags, 1, 8 + size);
    put_number(offset, 8);
    put(server.disk + offset, size);
}

static void put_simple(void)
{
    put_number(0x67446698, 4);
    put_number(0, 4);
    put(server.header + 8, 8);
}

static void answer_read(uint64_t offset)
{
    switch (server.answer) {
    case WHOLE: put_data(1, offset, SIZE); break;
    case IN_TWO:
        put_data(0, offset + HALF, HALF);
        put_data(1, offset, HALF);
        break;
    case WITH_HOLE:
        put_data(0, offset, HALF);
        put_chunk(1, 2, 12);
        put_number(offset + HALF, 8);
        put_number(HALF, 4);
        break;
    case GAP: put_data(1, offset, HALF); break;
    case OVERLAP:
        put_data(0, offset, HALF);
        put_data(1, offset, HALF);
        break;
    case FAILS:
        put_data(0, offset, HALF);
        put_chunk(1, 0x8001, 6 + 4);
        put_number(5, 4);
        put_number(4, 2);
        put("bad!", 4);
        break;
    case SCATTERED:
        put_data(0, offset, 1);
        put_data(0, offset + 2, SIZE - 2);
        put_data(1, offset + 1, 1);
        break;
    }
}

static void request(const unsigned char *payload)
{
    uint64_t type = number_at(server.header + 6, 2), offset = number_at(server.header + 16, 8);
    size_t size = (size_t)number_at(server.header + 24, 4);

    CHECK(offset + size <= DISK);
    if (type == 2) {
        server.over = 1;
    } else if (type == 0 && server.chunks) {
        CHECK_EQUAL(size, SIZE);
        answer_read(offset);
    } else {
        put_simple();
        if (type == 0) put(server.disk + offset, size);
        if (type == 1) memcpy(server.disk + offset, payload, size);
    }
}

// Bytes of the first message if it is there as a whole, else 0; works on it.
static size_t take_message(void)
{
    const unsigned char *at = server.in;
    size_t size = server.in_size, whole;

    if (!server.greeted) {
        server.greeted = size >= 4;
        return size >= 4 ? 4 : 0;
    }
    if (!server.transmission) {
        if (size < 16) return 0;
        CHECK(memcmp(at, "IHAVEOPT", 8) == 0);
        whole = 16 + (size_t)number_at(at + 12, 4);
        if (size >= whole) option((uint32_t)number_at(at + 8, 4));
        return size >= whole ? whole : 0;
    }
    if (size < 28) return 0;
    CHECK_EQUAL(number_at(at, 4), 0x25609513);
    whole = 28 + (number_at(at + 6, 2) == 1 ? (size_t)number_at(at + 24, 4) : 0);
    if (size < whole) return 0;
    memcpy(server.header, at, 28);
    request(at + 28);
    return whole;
}

static ptrdiff_t server_takes(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    size_t taken;

    (void)flags;
    CHECK(context == &server && count > 0 && iov->size <= STREAM - server.in_size);
    memcpy(server.in + server.in_size, iov->base, iov->size);
    server.in_size += iov->size;
    while ((taken = take_message()) > 0) {
        server.in_size -= taken;
        memmove(server.in, server.in + taken, server.in_size);
    }
    return (ptrdiff_t)iov->size;
}

static ptrdiff_t server_gives(void *context, const nbd_iovec *iov, unsigned count)
{
    size_t size = server.out_size - server.out_taken;

    CHECK(context == &server && count > 0);
    if (size == 0) return server.over ? NBD_IO_EOF : NBD_IO_READ;
    if (size > iov->size) size = iov->size;
    memcpy(iov->base, server.out + server.out_taken, size);
    server.out_taken += size;
    return (ptrdiff_t)size;
}

/// The program ///

static nbd_config plain_config(void)
{
    nbd_config config = NBD_ZERO;

    config.slots = slots;
    config.slot_count = 2;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    return config;
}

static nbd_transport transport;

static void move(void)
{
#ifdef NBD_NO_POLL
    nbd_iovec iov[1];
    unsigned count, flags;

    while ((count = nbd_outgoing(&client, iov, 1, &flags)) > 0)
        CHECK_EQUAL(nbd_sent(&client, server_takes(&server, iov, count, flags)), 0);
    while ((count = nbd_incoming(&client, iov, 1)) > 0) {
        ptrdiff_t moved = server_gives(&server, iov, count);
        CHECK_EQUAL(nbd_received(&client, moved), 0);
        if (moved <= 0) return;
    }
#else
    CHECK_EQUAL(nbd_poll(&client, NBD_WANT_READ | NBD_WANT_WRITE), 0);
#endif
}

// Moves bytes until this event comes, and counts texts on the way.
static nbd_event await(uint32_t type)
{
    nbd_event event;
    int turn;

    for (turn = 0; turn < TURNS; turn++) {
        move();
        while (nbd_next(&client, &event)) {
            texts += event.type == NBD_EVENT_TEXT;
            if (event.type == type) return event;
            CHECK(event.type != NBD_EVENT_CLOSED);
        }
    }
    CHECK(!"the event comes");
    return event;
}

static void begin(int oldstyle, int structured)
{
    nbd_config config = plain_config();
    const nbd_transport *used = &transport;
    size_t i;

    memset(&server, 0, sizeof server);
    for (i = 0; i < DISK; i++)
        server.disk[i] = (unsigned char)(1 + i % 200);
    server.oldstyle = oldstyle;
    server.structured = structured;
    texts = 0;
    greet();
    memset(&transport, 0, sizeof transport);
    transport.context = &server;
    transport.flags = NBD_ONE_PIECE;
    transport.send = server_takes;
    transport.recv = server_gives;
    config.flags = flags_;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
#ifdef NBD_NO_POLL
    used = NULL;
#endif
    CHECK_EQUAL(nbd_connect(&client, used), 0);
}

static void open_export(int structured)
{
    begin(0, structured);
    await(NBD_EVENT_READY);
}

static void close_export(void)
{
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(await(NBD_EVENT_CLOSED).error, 0);
    CHECK(server.over);
}

static nbd_op op_of(uint32_t command, uint64_t size)
{
    nbd_op op = NBD_ZERO;

    op.command = command;
    op.offset = command == NBD_FLUSH ? 0 : HALF;
    op.size = size;
    if (command == NBD_READ) op.buffer = memory;
    if (command == NBD_WRITE) op.data = memory;
    return op;
}

static int perform(const nbd_op *op)
{
    uint64_t id = 0;
    nbd_event event;

    CHECK_EQUAL(nbd_issue(&client, op, &id), 0);
    CHECK_EQUAL(nbd_count(&client)->in_flight, 1);
    event = await(NBD_EVENT_DONE);
    CHECK(event.id == id && event.command == op->command && event.size == op->size);
    CHECK_EQUAL(nbd_count(&client)->in_flight, 0);
    return event.error;
}

// Reads over stale bytes.
static int reads(enum answer answer)
{
    nbd_op op = op_of(NBD_READ, SIZE);

    server.answer = answer;
    memset(memory, STALE, sizeof memory);
    return perform(&op);
}

static int holds(size_t from, size_t to, int value)
{
    size_t i;

    for (i = from; i < to && memory[i] == value; i++) {
    }
    return i == to;
}

static int holds_disk(size_t size)
{
    return memcmp(memory, server.disk + HALF, size) == 0;
}

static void use(int structured)
{
    nbd_op write = op_of(NBD_WRITE, SIZE), flush = op_of(NBD_FLUSH, 0);

    open_export(structured);
    CHECK_EQUAL(nbd_negotiated(&client)->size, DISK);
    CHECK_EQUAL(nbd_negotiated(&client)->protocol,
                structured ? NBD_PROTOCOL_STRUCTURED : NBD_PROTOCOL_SIMPLE);
    memset(memory, 77, sizeof memory);
    CHECK_EQUAL(perform(&write), 0);
    CHECK(server.disk[HALF - 1] != 77 && server.disk[HALF] == 77);
    CHECK(server.disk[HALF + SIZE - 1] == 77 && server.disk[HALF + SIZE] != 77);
    CHECK_EQUAL(perform(&flush), 0);
    CHECK_EQUAL(reads(WHOLE), 0);
    CHECK(holds(0, SIZE, 77));
    close_export();
}

static void session_with_simple_replies(void)
{
    use(0);
}

static void session_with_structured_replies(void)
{
    use(1);
}

static void read_in_chunks(void)
{
    open_export(1);
    CHECK_EQUAL(reads(IN_TWO), 0);
    CHECK(holds_disk(SIZE));
    CHECK_EQUAL(reads(WITH_HOLE), 0);
    CHECK(holds_disk(HALF) && holds(HALF, SIZE, 0));
    CHECK_EQUAL(reads(SCATTERED), NBD_RANGES > 1 ? 0 : NBD_ERR_FRAGMENTED);
    if (NBD_RANGES > 1)
        CHECK(holds_disk(SIZE));
    else
        CHECK(holds_disk(1) && holds(2, SIZE, 0));
    close_export();
}

static void read_is_proven_and_what_is_missing_cleared(void)
{
    open_export(1);
    CHECK_EQUAL(reads(GAP), NBD_ERR_GAP);
    CHECK(holds_disk(HALF) && holds(HALF, SIZE, 0));
    CHECK_EQUAL(reads(OVERLAP), NBD_ERR_OVERLAP);
    CHECK(holds_disk(HALF) && holds(HALF, SIZE, 0));
    CHECK_EQUAL(reads(FAILS), NBD_EIO);
    CHECK(holds_disk(HALF) && holds(HALF, SIZE, 0));
    CHECK_EQUAL(reads(WHOLE), 0);
    close_export();
}

/// What is cut ///

static int init_with(uint32_t flags)
{
    nbd_config config = plain_config();

    config.flags = flags;
    return nbd_init(&client, &config);
}

static void flags_that_are_cut_are_refused(void)
{
    int negotiate = 0, tls = 0, raw = 0;
#ifdef NBD_NO_NEGOTIATE
    negotiate = NBD_ERR_ARG;
#endif
#ifdef NBD_NO_TLS
    tls = NBD_ERR_ARG;
#endif
#ifdef NBD_NO_RAW
    raw = NBD_ERR_ARG;
#endif
    CHECK_EQUAL(init_with(NBD_NEGOTIATE), negotiate);
    CHECK_EQUAL(init_with(NBD_TLS_ALLOW), tls);
    CHECK_EQUAL(init_with(NBD_TLS_REQUIRE), tls);
    CHECK_EQUAL(init_with(NBD_UNCHECKED_BOUNDS), raw);
    CHECK_EQUAL(init_with(NBD_WITHOUT_FIXED_NEWSTYLE), raw);
    CHECK_EQUAL(init_with(NBD_WITHOUT_STRUCTURED_REPLY | NBD_WITHOUT_EXTENDED_HEADERS), 0);
}

static void queries_that_are_cut_are_refused(void)
{
    static const char *const queries[] = {"base:allocation"};
    static nbd_context contexts[1];
    nbd_config config = plain_config();
    int wanted = 0;

#ifdef NBD_NO_BLOCK_STATUS
    wanted = NBD_ERR_ARG;
#endif
    config.queries = queries;
    config.query_count = 1;
    config.contexts = contexts;
    config.context_count = 1;
    CHECK_EQUAL(nbd_init(&client, &config), wanted);
}

static void commands_that_are_cut_are_refused(void)
{
    nbd_op status = op_of(NBD_BLOCK_STATUS, SIZE), raw = op_of(NBD_RAW, 0);
    nbd_op sparse = op_of(NBD_READ, SIZE);

    open_export(1);
#ifdef NBD_NO_BLOCK_STATUS
    CHECK_EQUAL(nbd_issue(&client, &status, NULL), NBD_ERR_ARG);
#else
    CHECK_EQUAL(nbd_issue(&client, &status, NULL), NBD_ERR_UNSUPPORTED);
#endif
    raw.raw_type = 3; // a flush
#ifdef NBD_NO_RAW
    CHECK_EQUAL(nbd_issue(&client, &raw, NULL), NBD_ERR_ARG);
#ifndef NBD_NO_ADVICE
    CHECK_EQUAL(nbd_allows(&client, NBD_RAW, 0), 0);
#endif
#else
    raw.offset = 0;
    CHECK_EQUAL(perform(&raw), 0);
#endif
    sparse.flags = NBD_SPARSE;
#ifdef NBD_NO_SPARSE
    CHECK_EQUAL(nbd_issue(&client, &sparse, NULL), NBD_ERR_ARG);
#else
    CHECK_EQUAL(perform(&sparse), 0);
#endif
    close_export();
}

static void extras_that_are_cut_are_refused(void)
{
    nbd_op trim = op_of(NBD_TRIM, SIZE), cache = op_of(NBD_CACHE, SIZE);
    nbd_op zeroes = op_of(NBD_WRITE_ZEROES, SIZE), fua = op_of(NBD_WRITE, SIZE);
    nbd_op df = op_of(NBD_READ, SIZE), wrong = op_of(NBD_FLUSH, 0);
    int wanted = NBD_ERR_UNSUPPORTED; // by this server

#ifdef NBD_NO_EXTRAS
    wanted = NBD_ERR_ARG;
#endif
    fua.flags = NBD_FUA;
    df.flags = NBD_DF;
    wrong.flags = NBD_NO_INIT;
    open_export(1);
    CHECK_EQUAL(nbd_issue(&client, &trim, NULL), wanted);
    CHECK_EQUAL(nbd_issue(&client, &cache, NULL), wanted);
    CHECK_EQUAL(nbd_issue(&client, &zeroes, NULL), wanted);
    CHECK_EQUAL(nbd_issue(&client, &fua, NULL), wanted);
    CHECK_EQUAL(nbd_issue(&client, &df, NULL), wanted);
    CHECK_EQUAL(nbd_issue(&client, &wrong, NULL), NBD_ERR_ARG);
    wrong.flags = 0;
    wrong.command = 0;
    CHECK_EQUAL(nbd_issue(&client, &wrong, NULL), NBD_ERR_ARG);
    close_export();
}

static void pieces_that_are_cut_are_refused(void)
{
    nbd_op op = op_of(NBD_READ, SIZE);
    nbd_iovec iov[2];

    iov[0].base = memory + HALF;
    iov[0].size = HALF;
    iov[1].base = memory;
    iov[1].size = HALF;
    op.buffer = NULL;
    op.iov = iov;
    op.iov_count = 2;
    open_export(1);
#ifdef NBD_NO_IOV
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), NBD_ERR_ARG);
    op.iov = NULL;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), NBD_ERR_ARG);
#else
    CHECK_EQUAL(perform(&op), 0);
    CHECK(memcmp(memory + HALF, server.disk + HALF, HALF) == 0);
#endif
    close_export();
}

static void messages_are_told_or_skipped(void)
{
    open_export(1);
    CHECK_EQUAL(reads(FAILS), NBD_EIO);
    close_export();
#ifdef NBD_NO_MESSAGES
    CHECK_EQUAL(texts, 0);
#else
    CHECK(texts > 0);
#endif
}

static void options_that_are_cut_are_not_sent(void)
{
    int go = 1, extended = 1;
#ifdef NBD_NO_GO
    go = 0;
#endif
#ifdef NBD_NO_EXTENDED_HEADERS
    extended = 0;
#endif
    open_export(1);
    CHECK_EQUAL(server.asked[NBD_OPTION_GO], go);
    CHECK_EQUAL(server.asked[NBD_OPTION_EXPORT_NAME], !go);
    CHECK_EQUAL(server.asked[NBD_OPTION_EXTENDED_HEADERS], extended);
    CHECK_EQUAL(server.asked[NBD_OPTION_STRUCTURED_REPLY], 1);
    close_export();
}

#ifndef NBD_NO_NEGOTIATE
static int negotiates(uint32_t number)
{
    nbd_option asked = NBD_ZERO;

    asked.option = number;
    return nbd_negotiate(&client, &asked);
}

static void options_that_are_cut_are_refused(void)
{
    int tls = 0, extended = 0, status = 0;
#ifdef NBD_NO_TLS
    tls = NBD_ERR_ARG;
#endif
#ifdef NBD_NO_EXTENDED_HEADERS
    extended = NBD_ERR_ARG;
#endif
#ifdef NBD_NO_BLOCK_STATUS
    status = NBD_ERR_ARG;
#endif
    flags_ = NBD_NEGOTIATE;
    begin(0, 1);
    flags_ = 0;
    await(NBD_EVENT_OPTION);
    CHECK_EQUAL(negotiates(NBD_OPTION_STARTTLS), tls);
    if (!tls) await(NBD_EVENT_OPTION);
    CHECK_EQUAL(negotiates(NBD_OPTION_EXTENDED_HEADERS), extended);
    if (!extended) await(NBD_EVENT_OPTION);
    CHECK_EQUAL(negotiates(NBD_OPTION_LIST_META_CONTEXT), status);
    if (!status) await(NBD_EVENT_OPTION);
    CHECK_EQUAL(negotiates(NBD_OPTION_SET_META_CONTEXT), status ? status : NBD_ERR_UNSUPPORTED);
    CHECK_EQUAL(negotiates(NBD_OPTION_GO), 0);
    await(NBD_EVENT_READY);
    close_export();
}
#endif

static void oldstyle_server_is_used_or_given_up(void)
{
    begin(1, 0);
#ifdef NBD_NO_OLDSTYLE
    CHECK_EQUAL(await(NBD_EVENT_CLOSED).error, NBD_ERR_OLDSTYLE);
#else
    await(NBD_EVENT_READY);
    CHECK_EQUAL(reads(WHOLE), 0);
    CHECK(holds_disk(SIZE));
    close_export();
#endif
}

static void texts_are_told_or_empty(void)
{
#ifdef NBD_NO_TEXT
    CHECK_EQUAL(*nbd_strerror(NBD_ERR_ARG), 0);
#else
    CHECK(*nbd_strerror(NBD_ERR_ARG) != 0);
#endif
}

static void counters_count_or_stay(void)
{
    const nbd_counters *counters = nbd_count(&client);

    use(1);
#if defined(NBD_NO_COUNTERS) && (defined(NBD_NO_CONVENIENCE) || !defined(NBD_NO_SOCKETS))
    CHECK(!counters->sends && !counters->receives && !counters->bytes_sent &&
          !counters->bytes_received && !counters->staged && !counters->in_flight_max);
#else
    CHECK(counters->sends && counters->receives && counters->in_flight_max == 1);
    CHECK_EQUAL(counters->bytes_received, server.out_size);
#endif
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(session_with_simple_replies);
    CHECK_CASE(session_with_structured_replies);
    CHECK_CASE(read_in_chunks);
    CHECK_CASE(read_is_proven_and_what_is_missing_cleared);
    CHECK_CASE(flags_that_are_cut_are_refused);
    CHECK_CASE(queries_that_are_cut_are_refused);
    CHECK_CASE(commands_that_are_cut_are_refused);
    CHECK_CASE(extras_that_are_cut_are_refused);
    CHECK_CASE(pieces_that_are_cut_are_refused);
    CHECK_CASE(messages_are_told_or_skipped);
    CHECK_CASE(options_that_are_cut_are_not_sent);
#ifndef NBD_NO_NEGOTIATE
    CHECK_CASE(options_that_are_cut_are_refused);
#endif
    CHECK_CASE(oldstyle_server_is_used_or_given_up);
    CHECK_CASE(texts_are_told_or_empty);
    CHECK_CASE(counters_count_or_stay);
    return check_end();
}
