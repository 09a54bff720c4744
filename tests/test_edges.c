// The outermost values and the rarest turns: what no other program comes across.
#define _DEFAULT_SOURCE 1
#define NBD_SEND_BUFFER 0
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

/// Reads ///

typedef struct piece_row {
    uint32_t from[6], size[6]; // data chunks of a read of 40 bytes; size 0: no more
    int error;
} piece_row;

static const piece_row *piece;

static const piece_row piece_rows[] = {
    {{0, 20, 10}, {10, 10, 15}, NBD_ERR_OVERLAP}, // grows into the next
    {{0, 20, 10}, {10, 10, 11}, NBD_ERR_OVERLAP},
    {{0, 20, 10}, {10, 10, 5}, NBD_ERR_GAP}, // grows, and does not reach it
    {{0, 20, 10}, {10, 20, 10}, 0},          // grows, and joins it
    {{20, 10, 0}, {20, 10, 10}, 0},          // each is put in front
    {{20, 9}, {20, 11}, NBD_ERR_GAP},
    {{20, 9}, {20, 12}, NBD_ERR_OVERLAP},
    {{20, 20}, {20, 20}, NBD_ERR_OVERLAP},
    {{20, 0}, {20, 21}, NBD_ERR_OVERLAP},
    {{0, 39}, {40, 1}, NBD_ERR_OVERLAP},
    {{1}, {39}, NBD_ERR_GAP},                     // one range, not from the start
    {{0}, {39}, NBD_ERR_GAP},                     // nor to the end
    {{0, 20, 35, 10, 30}, {10, 10, 5, 10, 5}, 0}, // joins, with one behind both
    {{0, 20, 35, 10, 30}, {10, 10, 5, 10, 6}, NBD_ERR_OVERLAP},
    {{0, 20, 35, 10}, {10, 10, 5, 10}, NBD_ERR_GAP},
    {{0, 2, 4, 6}, {1, 1, 1, 1}, NBD_ERR_GAP}, // as many ranges as there may be
};

static void write_pieces(script *s)
{
    size_t i;
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_READ, 0, 1000, 40);
    want_request(s, r);
    for (i = 0; i < 6 && piece->size[i]; i++)
        send_data(s, r, MORE, 1000 + piece->from[i], piece->size[i]);
    send_none(s, r);
    see_done(s, r, piece->error);
    close_session(s);
}

static void every_byte_is_proven_to_have_come_once(void)
{
    const session one = {check.name, write_pieces};
    size_t i;

    for (i = 0; i < sizeof piece_rows / sizeof piece_rows[0]; i++) {
        piece = &piece_rows[i];
        session_in_every_mode(&one);
    }
}

static void read_of_no_bytes_succeeds_without_content(script *s)
{
    int r;

    s->unlawful = 1;
    s->config.flags = NBD_UNCHECKED_ZERO_SIZE;
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_READ, 0, 0, 0);
    want_request(s, r);
    send_none(s, r);
    see_done(s, r, 0);
    close_session(s);
}

static void simple_read_of_no_bytes_succeeds_without_content(script *s)
{
    int r;

    s->unlawful = 1;
    s->config.flags = NBD_UNCHECKED_ZERO_SIZE;
    open_session(s, NBD_PROTOCOL_SIMPLE);
    r = client_issues(s, NBD_READ, 0, 0, 0);
    want_request(s, r);
    send_simple(s, r, 0);
    see_done(s, r, 0);
    close_session(s);
}

static void extended_write_of_no_bytes_says_that_it_has_a_payload(script *s)
{
    int r;

    s->unlawful = 1;
    s->config.flags = NBD_UNCHECKED_ZERO_SIZE;
    open_session(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues(s, NBD_WRITE, 0, 512, 0);
    want_header(s, 0x20, 1, 512, 0)->request = r;
    send_none(s, r);
    see_done(s, r, 0);
    close_session(s);
}

static void block_status_of_no_bytes_has_no_extent(script *s)
{
    static const char *const names[] = {"a:a"};
    static const uint32_t ids[] = {9};
    static const extent one = {512, 1};
    int r;

    s->unlawful = 1;
    s->config.flags = NBD_UNCHECKED_ZERO_SIZE;
    open_contexts(s, NBD_PROTOCOL_STRUCTURED, names, ids, 1, EXPORT_SIZE, EXPORT_FLAGS);
    r = client_issues(s, NBD_BLOCK_STATUS, 0, 512, 0);
    want_request(s, r);
    send_extents(s, r, DONE, 9, &one, 1);
    die(s, r, NBD_ERR_PROTOCOL);
}

/// Error chunks ///

static void message_of_4097_bytes_ends_it(script *s)
{
    static char text[4098];
    int r;

    memset(text, 't', 4097);
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    send_error(s, r, DONE, 5, text);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void error_offset_of_seven_bytes_ends_it(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_TRIM, 0, 0, 512);
    want_request(s, r);
    script_close(s, send_error_open(s, r, DONE, TYPE_ERROR_OFFSET, 5, "1234567", 0));
    die(s, r, NBD_ERR_PROTOCOL);
}

static void error_offset_of_a_flush_is_zero(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    send_error_at(s, r, DONE, 5, "", 0);
    see_done(s, r, NBD_EIO);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    send_error_at(s, r, DONE, 5, "", 1);
    die(s, r, NBD_ERR_PROTOCOL);
}

/// Handshake ///

static void disconnect_while_go_is_under_way_ends_behind_it(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    want_go(s, "");
    client_disconnects(s);
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    want_disconnect(s);
    send_end(s);
    see_closed(s, 0);
}

static void oldstyle_server_without_flags_ends_it(script *s)
{
    send_oldstyle(s, EXPORT_SIZE, 0);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void disconnect_from_a_server_that_knows_no_abort_says_nothing(script *s)
{
    s->config.flags = NBD_NEGOTIATE;
    send_greeting(s, NO_ZEROES);
    want_client_flags(s, NO_ZEROES);
    see_option(s, 0, 0);
    client_disconnects(s);
    see_closed(s, 0);
}

static const char *asked_for; // the export of GO, after contexts of "one"

static void write_contexts_of_one(script *s)
{
    static const char *const names[] = {"a:a"};

    open_options(s);
    option_succeeds(s, 8);
    s->protocol = NBD_PROTOCOL_STRUCTURED;
    client_asks_contexts(s, 10, "one", names, 1);
    want_meta(s, 10, "one", names, 1);
    tell_context(s, 10, 0, 1, names[0]);
    send_ack(s, 10);
    see_option(s, 10, 0);
    go_asked(s, asked_for);
    close_session(s);
}

static void contexts_count_for_the_export_they_were_for(void)
{
    static const char *const names[] = {"one", "ono", "on", "", "onee"};
    size_t i;

    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        asked_for = names[i];
        CHECK_EQUAL(export_after(write_contexts_of_one)->context_count, i == 0);
    }
}

typedef struct block_row {
    uint32_t minimum, preferred, maximum;
    int legal;
} block_row;

static const block_row block_rows[] = {
    {1, 512, 512, 1},
    {0, 512, 512, 0},
    {3, 512, 512, 0},
    {65536, 65536, 65536, 1},
    {131072, 131072, 131072, 0},
    {512, 256, 512, 0},
    {1, 256, 512, 0},
    {1, 513, 1024, 0},
    {1, 0, 1024, 0},
    {1024, 512, 1024, 0},
    {512, 512, 511, 0},
    {512, 512, 513, 1},
    {1, 0x80000000u, 0xffffffffu, 1},
};

static const block_row *block;

static void write_blocks(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    want_go(s, "");
    send_info_block_size(s, 7, block->minimum, block->preferred, block->maximum);
    if (!block->legal) {
        see_closed(s, NBD_ERR_PROTOCOL);
        return;
    }
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    see_ready(s);
    close_session(s);
}

static void block_sizes_are_powers_in_order(void)
{
    size_t i;

    for (i = 0; i < sizeof block_rows / sizeof block_rows[0]; i++) {
        const nbd_export *got;

        block = &block_rows[i];
        got = export_after(write_blocks);
        CHECK_EQUAL(got->block_sizes, block->legal);
        CHECK_EQUAL(got->minimum_block, block->legal ? block->minimum : 1);
        CHECK_EQUAL(got->preferred_block, block->legal ? block->preferred : 4096);
        CHECK_EQUAL(got->maximum_payload, block->legal ? block->maximum : 32 << 20);
    }
}

/// A client without a transport ///

enum { SLOTS = 3 };

static nbd_client client;
static nbd_slot slots[SLOTS];
static unsigned char buffer[NBD_BUFFER_NAMES];
static nbd_context contexts[2];
static unsigned char memory[4096];
static nbd_iovec offered[8];
static unsigned offered_flags;

static nbd_config plain_config(uint32_t flags)
{
    nbd_config config = NBD_ZERO;

    config.flags = flags;
    config.slots = slots;
    config.slot_count = SLOTS;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.contexts = contexts;
    config.context_count = 2;
    return config;
}

static unsigned outgoing(unsigned room)
{
    return nbd_outgoing(&client, offered, room, &offered_flags);
}

static size_t send_all(void)
{
    size_t total = 0;
    unsigned count;

    while ((count = outgoing(8)) > 0) {
        total += iov_sum(offered, count);
        CHECK_EQUAL(nbd_sent(&client, (ptrdiff_t)iov_sum(offered, count)), 0);
    }
    return total;
}

static void feed(const void *bytes, size_t size)
{
    nbd_iovec iov;

    CHECK_EQUAL(nbd_incoming(&client, &iov, 1), 1);
    CHECK(iov.size >= size);
    memcpy(iov.base, bytes, size);
    CHECK_EQUAL(nbd_received(&client, (ptrdiff_t)size), 0);
}

static nbd_event next(uint32_t type)
{
    nbd_event event;

    CHECK_EQUAL(nbd_next(&client, &event), type != NBD_EVENT_NONE);
    CHECK_EQUAL(event.type, type);
    return event;
}

static void greeted(uint32_t flags, const char *handshake)
{
    nbd_config config = plain_config(flags);

    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
    feed("NBDMAGICIHAVEOPT", 16);
    feed(handshake, 2);
}

// READY with simple replies: all flags but READ_ONLY and ROTATIONAL, 1 MiB.
static void ready(uint32_t flags)
{
    greeted(NBD_ONLY_EXPORT_NAME | flags, "\0\3");
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(send_all(), 20);
    feed("\0\0\0\0\0\x10\0\0\x0c\xed", 10);
    next(NBD_EVENT_READY);
    next(NBD_EVENT_NONE);
}

// The server has agreed to start TLS.
static void before_tls(void)
{
    greeted(NBD_TLS_REQUIRE, "\0\3");
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(send_all(), 20);
    feed("\0\3\xe8\x89\4\x55\x65\xa9\0\0\0\5\0\0\0\1\0\0\0\0", 20);
}

static nbd_op op_of(uint32_t command, uint64_t offset, uint64_t size)
{
    nbd_op op = NBD_ZERO;

    op.command = command;
    op.offset = offset;
    op.size = size;
    if (command == NBD_READ) op.buffer = memory;
    if (command == NBD_WRITE) op.data = memory;
    return op;
}

static void issue(uint32_t command, uint64_t offset, uint64_t size)
{
    nbd_op op = op_of(command, offset, size);

    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
}

// The simple reply to the request in slot `index`, the `serial`th of its client.
static void reply(unsigned char serial, unsigned char index)
{
    unsigned char bytes[16] = {0x67, 0x44, 0x66, 0x98};

    bytes[13] = serial;
    bytes[15] = index;
    feed(bytes, sizeof bytes);
}

/// nbd_init ///

typedef struct init_row {
    size_t at; // of a uint32_t of nbd_config
    uint32_t value;
    int error;
} init_row;

static const init_row init_rows[] = {
    {offsetof(nbd_config, flags), 0x10000, NBD_ERR_ARG},
    {offsetof(nbd_config, flags), 0x40, NBD_ERR_ARG},
    {offsetof(nbd_config, flags), 0x80, NBD_ERR_ARG},
    {offsetof(nbd_config, flags), 0xff3f & ~(unsigned)NBD_ONLY_EXPORT_NAME, 0},
    {offsetof(nbd_config, flags), NBD_TLS_REQUIRE | NBD_ONLY_EXPORT_NAME, NBD_ERR_ARG},
    {offsetof(nbd_config, flags), NBD_TLS_ALLOW | NBD_ONLY_EXPORT_NAME, 0},
    {offsetof(nbd_config, slot_count), 1, 0},
    {offsetof(nbd_config, context_count), 64 * NBD_RANGES, 0},
    {offsetof(nbd_config, context_count), 64 * NBD_RANGES + 1, NBD_ERR_ARG},
    {offsetof(nbd_config, query_count), 1, NBD_ERR_ARG},
};

static void init_takes_what_its_contract_says(void)
{
    static const char *const queries[] = {"a:a"};
    nbd_config config;
    size_t i;

    for (i = 0; i < sizeof init_rows / sizeof init_rows[0]; i++) {
        config = plain_config(0);
        memcpy((char *)&config + init_rows[i].at, &init_rows[i].value, sizeof(uint32_t));
        CHECK_EQUAL(nbd_init(&client, &config), init_rows[i].error);
    }
    config = plain_config(0);
    config.contexts = NULL;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_ARG);
    config.context_count = 0;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    config = plain_config(0);
    config.queries = queries;
    config.query_count = 1;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    config.buffer_size = 0x7fffffff;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    config.buffer_size = (size_t)0x7fffffff + 1;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_BUFFER);
}

static void header_area_is_32_bytes_a_slot_or_a_quarter(void)
{
    nbd_config config = plain_config(0);

    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(client.head_size, 32 * SLOTS);
    config.buffer_size = 256;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(client.head_size, 64);
}

static void zeroed_client_is_harmless(void)
{
    memset(&client, 0, sizeof client);
    CHECK(strcmp(nbd_detail(&client), "") == 0);
    CHECK_EQUAL(nbd_wants(&client), 0);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    CHECK_EQUAL(nbd_poll(&client, 3), NBD_ERR_STATE);
    next(NBD_EVENT_NONE);
}

static void detail_names_the_rule_that_was_broken(void)
{
    nbd_config config = plain_config(0);

    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
    CHECK(strcmp(nbd_detail(&client), "") == 0);
    feed("NBDMAGICnonsense", 16);
    CHECK(next(NBD_EVENT_CLOSED).detail == client.detail);
    CHECK(strcmp(nbd_detail(&client), "neither new nor old style") == 0);
}

static int phase_of(enum nbdi_state state)
{
    switch (state) {
    case NBDI_IDLE:
    case NBDI_ENDED: return NBD_PHASE_IDLE;
    case NBDI_MAGIC:
    case NBDI_OLD:
    case NBDI_FLAGS: return NBD_PHASE_GREETING;
    case NBDI_TLS: return NBD_PHASE_STARTTLS;
    case NBDI_CLOSING:
    case NBDI_DEAD: return NBD_PHASE_CLOSING;
    default: return -1;
    }
}

static void every_state_has_its_phase(void)
{
    int state;

    for (state = NBDI_IDLE; state <= NBDI_ENDED; state++) {
        int phase = phase_of((enum nbdi_state)state);

        memset(&client, 0, sizeof client);
        client.state = (uint8_t)state;
        CHECK_EQUAL(nbd_phase(&client), phase < 0 ? NBD_PHASE_OPTIONS : phase);
        client.transmission = 1;
        CHECK_EQUAL(nbd_phase(&client), phase < 0 ? NBD_PHASE_TRANSMISSION : phase);
        client.closing = 1;
        CHECK_EQUAL(nbd_phase(&client), phase < 0 ? NBD_PHASE_CLOSING : phase);
    }
}

/// Arguments of nbd_issue ///

static void refused(nbd_op op, int error)
{
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), error);
    CHECK_EQUAL(outgoing(8), 0);
}

static void memory_fits_the_command_or_is_refused(void)
{
    static const nbd_iovec halves[] = {{memory, 256}, {memory + 256, 256}};
    static const nbd_iovec nothing[] = {{memory, 0}};
    static const uint32_t commands[] = {NBD_READ, NBD_WRITE, NBD_TRIM, NBD_RAW, NBD_BLOCK_STATUS};
    nbd_op op;
    size_t i;

    ready(NBD_UNCHECKED_UNSUPPORTED | NBD_UNCHECKED_ZERO_SIZE);
    for (i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        op = op_of(commands[i], 0, 512);
        op.buffer = memory;
        op.data = memory;
        refused(op, NBD_ERR_ARG);
        op = op_of(commands[i], 0, 512);
        op.iov_count = 2;
        refused(op, NBD_ERR_ARG);
        op.iov = halves;
        if (commands[i] != NBD_READ && commands[i] != NBD_WRITE) refused(op, NBD_ERR_ARG);
    }
    op = op_of(NBD_TRIM, 0, 512);
    op.buffer = memory;
    refused(op, NBD_ERR_ARG);
    op = op_of(NBD_TRIM, 0, 512);
    op.data = memory;
    refused(op, NBD_ERR_ARG);
    op = op_of(NBD_BLOCK_STATUS, 0, 512);
    op.data = memory;
    refused(op, NBD_ERR_ARG);
    op = op_of(NBD_BLOCK_STATUS, 0, 512);
    op.buffer = memory;
    refused(op, NBD_ERR_ARG);
    op = op_of(NBD_RAW, 0, 512);
    op.buffer = memory;
    refused(op, NBD_ERR_ARG);
    op = op_of(NBD_RAW, 0, 512);
    op.raw_type = 0x10000;
    refused(op, NBD_ERR_ARG);
    op = op_of(NBD_RAW, 0, NBDI_DATA_MOST + 1);
    op.data = memory;
    refused(op, NBD_ERR_ARG);
    op = op_of(NBD_READ, 0, 512);
    op.iov = halves;
    op.iov_count = 2;
    refused(op, NBD_ERR_ARG); // and a buffer
    op.buffer = NULL;
    op.data = memory;
    refused(op, NBD_ERR_ARG);
    op.data = NULL;
    op.size = 511;
    refused(op, NBD_ERR_ARG);
    op.size = 513;
    refused(op, NBD_ERR_ARG);
    op.iov_count = 0;
    refused(op, NBD_ERR_ARG);
    op.size = 0;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    op.iov = nothing;
    op.iov_count = 1;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    op = op_of(NBD_RAW, 0, 512);
    op.raw_type = 0xffff;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
}

typedef struct status_row {
    uint32_t contexts[3];
    uint32_t count;
    int error;
} status_row;

// Two contexts were agreed on.
static const status_row status_rows[] = {
    {{0}, 1, 0},
    {{1}, 1, 0},
    {{1, 0}, 2, 0},
    {{2}, 1, NBD_ERR_ARG},
    {{0, 2}, 2, NBD_ERR_ARG},
    {{0, 0}, 2, NBD_ERR_ARG},
    {{1, 0, 1}, 3, NBD_ERR_ARG},
    {{1, 0, 0}, 3, NBD_ERR_ARG},
    {{0}, 0, NBD_ERR_ARG},
};

static void ready_for_status(void)
{
    ready(0);
    client.got.protocol = NBD_PROTOCOL_EXTENDED;
    client.header_size = 32;
    client.got.flags |= NBD_OFFERS_STATUS_PAYLOAD;
    client.got.context_count = 2;
}

static void contexts_that_are_asked_for_are_known_and_stand_once(void)
{
    size_t i;

    for (i = 0; i < sizeof status_rows / sizeof status_rows[0]; i++) {
        nbd_op op = op_of(NBD_BLOCK_STATUS, 0, 512);

        ready_for_status();
        op.contexts = status_rows[i].contexts;
        op.context_count = status_rows[i].count;
        CHECK_EQUAL(nbd_issue(&client, &op, NULL), NBD_ERR_ARG); // no memory
        op.buffer = memory;
        CHECK_EQUAL(nbd_issue(&client, &op, NULL), status_rows[i].error);
    }
}

static void allows_looks_at_command_and_flags(void)
{
    ready(0);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, 0), 1);
    CHECK_EQUAL(nbd_allows(&client, 0, 0), 0);
    CHECK_EQUAL(nbd_allows(&client, NBD_RAW + 1, 0), 0);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, NBD_FUA), 0);
    CHECK_EQUAL(nbd_allows(&client, NBD_RAW, 0xffff), 1);
    CHECK_EQUAL(nbd_allows(&client, NBD_RAW, 0x10000), 0);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, NBD_DF), 0); // replies are simple
    CHECK_EQUAL(nbd_allows(&client, NBD_WRITE_ZEROES, NBD_FAST_ZERO | NBD_FUA | NBD_NO_HOLE), 1);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, 0), 0);
}

static void counters_remember_the_most_in_flight(void)
{
    ready(0);
    issue(NBD_TRIM, 0, 512);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_count(&client)->in_flight_max, 2);
    CHECK_EQUAL(send_all(), 56);
    reply(1, 0);
    next(NBD_EVENT_DONE);
    reply(2, 1);
    next(NBD_EVENT_DONE);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_count(&client)->in_flight, 1);
    CHECK_EQUAL(nbd_count(&client)->in_flight_max, 2);
}

/// Offers ///

static void offer_that_is_full_says_that_more_comes(void)
{
    ready(0);
    issue(NBD_WRITE, 0, 512);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(outgoing(1), 1);
    CHECK_EQUAL(offered_flags, NBD_SEND_MORE);
    CHECK_EQUAL(outgoing(2), 2);
    CHECK_EQUAL(offered_flags, NBD_SEND_MORE);
    CHECK_EQUAL(outgoing(3), 3);
    CHECK_EQUAL(offered_flags, 0);
    CHECK_EQUAL(iov_sum(offered, 3), 28 + 512 + 28);
}

// What an offer sums up to fits a ptrdiff_t.
static void offer_stays_below_half_of_memory(void)
{
    nbd_op op = op_of(NBD_RAW, 0, NBDI_DATA_MOST);

    ready(0);
    client.got.protocol = NBD_PROTOCOL_EXTENDED;
    client.header_size = 32;
    op.data = memory;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    CHECK_EQUAL(outgoing(8), 2);
    CHECK(offered[0].size + offered[1].size == NBDI_OFFER_MOST);
    CHECK_EQUAL(offered_flags, NBD_SEND_MORE);
}

static void nothing_is_offered_while_tls_is_the_callers(void)
{
    before_tls();
    next(NBD_EVENT_STARTTLS);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_STARTTLS);
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_wants(&client), 0);
    CHECK_EQUAL(outgoing(8), 0);
    CHECK_EQUAL(nbd_incoming(&client, offered, 8), 0);
    CHECK_EQUAL(nbd_starttls(&client, NULL), 0);
    CHECK_EQUAL(outgoing(8), 1);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_WRITE | NBD_WANT_NOW);
}

static void tls_starts_with_no_memory_on_offer(void)
{
    before_tls();
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    next(NBD_EVENT_STARTTLS);
    CHECK_EQUAL(nbd_starttls(&client, NULL), NBD_ERR_STATE);
    memcpy(offered[0].base, "!", 1);
    CHECK_EQUAL(nbd_received(&client, 1), 0);
    CHECK_EQUAL(nbd_starttls(&client, NULL), 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_INJECTED);
}

static void tls_starts_when_the_option_has_gone_out(void)
{
    greeted(NBD_TLS_REQUIRE, "\0\3");
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(outgoing(8), 1);
    CHECK_EQUAL(nbd_sent(&client, 20), 0);
    feed("\0\3\xe8\x89\4\x55\x65\xa9\0\0\0\5\0\0\0\1\0\0\0\0", 20);
    next(NBD_EVENT_STARTTLS);
    client.out_offered = 1; // as an offer that was made before
    CHECK_EQUAL(nbd_starttls(&client, NULL), NBD_ERR_STATE);
    client.out_offered = 0;
    CHECK_EQUAL(nbd_starttls(&client, NULL), 0);
}

static void wants_say_now_only_for_what_is_not_on_offer(void)
{
    ready(0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_NOW);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_WRITE | NBD_WANT_NOW);
    CHECK_EQUAL(outgoing(1), 1);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_WRITE);
    CHECK_EQUAL(nbd_sent(&client, 0), 0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_WRITE);
    CHECK_EQUAL(outgoing(1), 1);
    CHECK_EQUAL(nbd_sent(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ);
}

static void end_of_the_stream_is_no_input_to_wait_for(void)
{
    ready(0);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(send_all(), 28);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_EOF), 0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_NOW);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 0);
    CHECK_EQUAL(next(NBD_EVENT_DONE).error, NBD_ERR_CLOSED);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_CLOSED);
}

static void pieces_of_each_write_start_at_the_first(void)
{
    static nbd_iovec halves[] = {{memory, 100}, {memory + 200, 156}};
    nbd_op op = op_of(NBD_WRITE, 0, 256);
    int i;

    ready(0);
    op.data = NULL;
    op.iov = halves;
    op.iov_count = 2;
    for (i = 0; i < 3; i++) {
        CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
        CHECK_EQUAL(outgoing(8), 3);
        CHECK(offered[1].base == memory && offered[2].base == memory + 200);
        CHECK_EQUAL(nbd_sent(&client, 28 + 100 + 1), 0);
        CHECK_EQUAL(outgoing(8), 1);
        CHECK(offered[0].base == memory + 201 && offered[0].size == 155);
        CHECK_EQUAL(nbd_sent(&client, 155), 0);
    }
}

/// What one session leaves for the next ///

static void abandoned_client_has_something_to_say(void)
{
    ready(0);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ);
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_NOW);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_ABANDONED);
    CHECK_EQUAL(nbd_wants(&client), 0);
}

static void connect_again(void)
{
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).option, 0);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
}

static void what_was_negotiated_is_gone_with_the_next_connection(void)
{
    static const nbd_export none = {0, 1, 4096, 32 << 20, 0, 0, 0, 0, 0, 0};
    const nbd_export *got = nbd_negotiated(&client);

    ready_for_status();
    client.got.tls = client.got.block_sizes = 1;
    client.got.minimum_block = client.got.preferred_block = client.got.maximum_payload = 512;
    connect_again();
    CHECK_BYTES(got, &none, sizeof none);
}

static void refused_option_says_nothing_about_the_next_connection(void)
{
    nbd_option option = NBD_ZERO;

    greeted(NBD_NEGOTIATE, "\0\3");
    next(NBD_EVENT_OPTION);
    option.option = NBD_OPTION_LIST;
    CHECK_EQUAL(nbd_negotiate(&client, &option), 0);
    CHECK_EQUAL(send_all(), 20);
    feed("\0\3\xe8\x89\4\x55\x65\xa9\0\0\0\3\x80\0\0\1\0\0\0\0", 20);
    CHECK_EQUAL(next(NBD_EVENT_OPTION).error, NBD_REP_ERR_UNSUP);
    connect_again();
    feed("NBDMAGICIHAVEOPT\0\3", 18);
    CHECK_EQUAL(next(NBD_EVENT_OPTION).server_error, 0);
}

static void tls_forgets_what_was_negotiated_in_clear(void)
{
    before_tls();
    client.got.protocol = NBD_PROTOCOL_STRUCTURED;
    client.got.context_count = 1;
    client.got.size = 77;
    next(NBD_EVENT_STARTTLS);
    CHECK_EQUAL(nbd_starttls(&client, NULL), 0);
    CHECK_EQUAL(client.got.protocol, NBD_PROTOCOL_SIMPLE);
    CHECK_EQUAL(client.got.context_count, 0);
    CHECK_EQUAL(client.got.size, 0);
    CHECK_EQUAL(client.got.tls, 1);
}

static void end_in_transmission_blames_no_option(void)
{
    ready(0);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_EOF), 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).option, 0);
}

/// A send that fails ///

static void fail_to_send(void)
{
    CHECK_EQUAL(outgoing(8) > 0, 1);
    CHECK_EQUAL(nbd_sent(&client, NBD_IO_ERROR), 0);
    CHECK_EQUAL(outgoing(8), 0);
}

static void replies_that_are_there_are_read_before_giving_up(void)
{
    ready(0);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(send_all(), 28);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    fail_to_send();
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_NOW);
    next(NBD_EVENT_NONE);
    reply(1, 0);
    CHECK_EQUAL(next(NBD_EVENT_DONE).error, 0);
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(nbd_wants(&client) & NBD_WANT_NOW, NBD_WANT_NOW);
    CHECK_EQUAL(next(NBD_EVENT_DONE).error, NBD_ERR_TRANSPORT);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_TRANSPORT);
}

static void failed_send_waits_for_memory_on_offer(void)
{
    ready(0);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    fail_to_send();
    client.in_blocked = NBD_WANT_READ; // as the last answer to an offer before this one
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(next(NBD_EVENT_DONE).error, NBD_ERR_TRANSPORT);
}

static void disconnect_that_cannot_be_sent_is_no_clean_end(void)
{
    ready(0);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    next(NBD_EVENT_NONE);
    fail_to_send();
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_EOF), 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_CLOSED);
    ready(0);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    fail_to_send();
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_TRANSPORT);
}

static void end_of_the_stream_decides_only_when_the_disconnect_is_known_to_be_out(void)
{
    ready(0);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(outgoing(1), 1);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_EOF), 0);
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_sent(&client, 28), 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, 0);
}

static void stream_that_ends_before_the_disconnect_is_out_is_no_clean_end(void)
{
    ready(0);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(nbd_incoming(&client, offered, 1), 1);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_EOF), 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_CLOSED);
}

/// Options of the caller ///

static void options_that_are_not_possible_are_refused(void)
{
    static const char *const queries[] = {"a:a"};
    nbd_option option = NBD_ZERO;

    greeted(NBD_NEGOTIATE, "\0\3");
    next(NBD_EVENT_OPTION);
    option.option = 77;
    option.data_size = 1;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_ARG);
    memset(&option, 0, sizeof option);
    option.option = NBD_OPTION_SET_META_CONTEXT;
    option.query_count = 1;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_ARG);
    option.queries = queries;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_UNSUPPORTED);
    option.option = NBD_OPTION_LIST_META_CONTEXT;
    CHECK_EQUAL(nbd_negotiate(&client, &option), 0);
    greeted(NBD_NEGOTIATE, "\0\3");
    next(NBD_EVENT_OPTION);
    option.option = NBD_OPTION_SET_META_CONTEXT;
    option.data = "raw";
    option.data_size = 3;
    CHECK_EQUAL(nbd_negotiate(&client, &option), 0);
    CHECK_EQUAL(send_all(), 4 + 16 + 3);
    greeted(NBD_NEGOTIATE, "\0\3");
    next(NBD_EVENT_OPTION);
    client.got.protocol = NBD_PROTOCOL_STRUCTURED;
    option.data = NULL;
    option.data_size = 0;
    CHECK_EQUAL(nbd_negotiate(&client, &option), 0);
    greeted(NBD_NEGOTIATE, "\0\3");
    next(NBD_EVENT_OPTION);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_STATE);
}

/// nbd_poll ///

// A transport that says what it is told to.
static struct {
    ptrdiff_t send, recv; // what the hooks return; `claims`: besides what was offered
    int claims;
    int sends, recvs, finishes;
    size_t handed[4]; // bytes of the first sends
    unsigned flags;
    size_t most; // bytes in a call
    int finish;
    const nbd_iovec *last;
} hooks;

static ptrdiff_t hook(ptrdiff_t result, const nbd_iovec *iov, unsigned count)
{
    size_t sum = iov_sum(iov, count);

    if (hooks.claims) return (ptrdiff_t)sum + hooks.claims;
    if (result <= 0) return result;
    return (ptrdiff_t)(sum < hooks.most ? sum : hooks.most);
}

static ptrdiff_t hook_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    (void)context;
    if (hooks.sends < 4) hooks.handed[hooks.sends] = iov_sum(iov, count);
    hooks.sends++;
    hooks.flags = flags;
    return hook(hooks.send, iov, count);
}

static ptrdiff_t hook_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    unsigned i;

    (void)context;
    hooks.recvs++;
    for (i = 0; i < count; i++)
        memset(iov[i].base, 0, iov[i].size);
    return hook(hooks.recv, iov, count);
}

static int hook_finish(void *context)
{
    (void)context;
    hooks.finishes++;
    return hooks.finish;
}

static nbd_transport transport = {0, NULL, hook_send, hook_recv, NULL, hook_finish, NULL};

static void ready_to_poll(ptrdiff_t send, ptrdiff_t recv)
{
    ready(0);
    memset(&hooks, 0, sizeof hooks);
    hooks.send = send;
    hooks.recv = recv;
    hooks.most = (size_t)-1;
    transport.flags = 0;
    client.transport = &transport; // from here on
}

static void hook_that_claims_too_much_is_not_believed(void)
{
    ready_to_poll(1, NBD_IO_READ);
    issue(NBD_WRITE, 0, 512);
    hooks.claims = 1;
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.sends, 1);
    CHECK_EQUAL(hooks.recvs, 1);
    CHECK_EQUAL(nbd_count(&client)->bytes_sent, 20);
    CHECK_EQUAL(nbd_count(&client)->bytes_received, 28);
}

static void blocked_direction_is_tried_only_when_it_is_ready(void)
{
    ready_to_poll(NBD_IO_READ, NBD_IO_WRITE);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.sends, 1);
    CHECK_EQUAL(hooks.recvs, 1);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_WRITE);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.sends, 1);
    CHECK_EQUAL(hooks.recvs, 1);
    CHECK_EQUAL(nbd_poll(&client, NBD_WANT_READ), 0);
    CHECK_EQUAL(hooks.sends, 2);
    CHECK_EQUAL(hooks.recvs, 1);
    CHECK_EQUAL(nbd_poll(&client, NBD_WANT_WRITE), 0);
    CHECK_EQUAL(hooks.sends, 2);
    CHECK_EQUAL(hooks.recvs, 2);
}

static void hook_that_returns_any_other_number_has_failed(void)
{
    ready_to_poll(-77, NBD_IO_READ);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(next(NBD_EVENT_DONE).error, NBD_ERR_TRANSPORT);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_TRANSPORT);
    ready_to_poll(1, -77);
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(next(NBD_EVENT_DONE).error, NBD_ERR_TRANSPORT);
}

// 3 MiB are queued: one call sends all, or each sends a little less than was asked.
static void one_poll_sends_no_more_than_it_may(void)
{
    static unsigned char much[3 << 20];
    nbd_op op = op_of(NBD_WRITE, 0, sizeof much);

    ready_to_poll(1, NBD_IO_READ);
    client.got.size = sizeof much;
    op.data = much;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    hooks.most = NBD_POLL_BYTES / 2;
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.sends, 2);
    CHECK_EQUAL(hooks.flags, 0);
    hooks.most = (size_t)-1;
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.sends, 3);
    CHECK_EQUAL(nbd_count(&client)->bytes_sent, 20 + 28 + sizeof much);
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ);
}

static void one_poll_receives_no_more_than_it_may(void)
{
    static unsigned char much[3 << 20];
    nbd_op op = op_of(NBD_READ, 0, sizeof much);

    ready_to_poll(1, NBD_IO_READ);
    client.got.size = sizeof much;
    op.buffer = much;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    reply(1, 0);
    next(NBD_EVENT_NONE);
    hooks.recv = 1;
    hooks.recvs = 0;
    hooks.most = NBD_POLL_BYTES / 2;
    client.in_blocked = 0;
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.recvs, 2);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_NOW);
}

static void short_receive_is_the_last_if_the_transport_says_so(void)
{
    ready_to_poll(1, 1);
    transport.flags = NBD_SHORT_IS_DRY;
    hooks.most = 1;
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.recvs, 1);
    CHECK_EQUAL(nbd_count(&client)->bytes_received, 29);
}

static void small_pieces_are_joined_for_a_transport_that_takes_one(void)
{
    ready_to_poll(1, NBD_IO_READ);
    transport.flags = NBD_ONE_PIECE;
    issue(NBD_TRIM, 0, 512);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(nbd_count(&client)->staged, 0);
    issue(NBD_WRITE, 0, NBD_STAGE - 28);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(nbd_count(&client)->staged, 1);
    CHECK_EQUAL(hooks.sends, 2);
    issue(NBD_WRITE, 0, 4096);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(nbd_count(&client)->staged, 2);
    CHECK_EQUAL(hooks.sends, 4);
    CHECK_EQUAL(hooks.handed[1], NBD_STAGE);
    CHECK_EQUAL(hooks.handed[2], NBD_STAGE);
    CHECK_EQUAL(hooks.handed[3], 28 + 4096 - NBD_STAGE);
    CHECK_EQUAL(nbd_count(&client)->bytes_sent, 20 + 3 * 28 + NBD_STAGE - 28 + 4096);
}

static void piece_that_fills_the_stage_is_not_copied(void)
{
    size_t size;

    for (size = NBD_STAGE - 1; size <= NBD_STAGE; size++) {
        ready_to_poll(1, NBD_IO_READ);
        transport.flags = NBD_ONE_PIECE | NBD_SHORT_IS_DRY;
        hooks.most = 28; // the header alone
        issue(NBD_WRITE, 0, size);
        CHECK_EQUAL(nbd_poll(&client, 0), 0);
        CHECK_EQUAL(nbd_count(&client)->staged, 1);
        hooks.most = (size_t)-1;
        issue(NBD_TRIM, 0, 512);
        CHECK_EQUAL(nbd_poll(&client, NBD_WANT_WRITE), 0);
        CHECK_EQUAL(nbd_count(&client)->staged, size < NBD_STAGE ? 2 : 1);
        CHECK_EQUAL(nbd_count(&client)->bytes_sent, 20 + 28 + size + 28);
    }
}

// The last bytes are out: the transport is told so once, and again only if it blocked.
static void end_of_sending_is_told_once(void)
{
    ready_to_poll(1, NBD_IO_READ);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    hooks.finish = NBD_IO_WRITE;
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.finishes, 1);
    CHECK_EQUAL(nbd_wants(&client) & ~NBD_WANT_NOW, NBD_WANT_READ | NBD_WANT_WRITE);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.finishes, 1);
    hooks.finish = -9;
    CHECK_EQUAL(nbd_poll(&client, NBD_WANT_WRITE), 0);
    CHECK_EQUAL(hooks.finishes, 2);
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ);
    CHECK_EQUAL(nbd_poll(&client, 3), 0);
    CHECK_EQUAL(hooks.finishes, 2);
}

static void end_of_sending_is_not_told_where_sending_failed(void)
{
    ready_to_poll(NBD_IO_ERROR, NBD_IO_READ);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(nbd_poll(&client, 0), 0);
    CHECK_EQUAL(hooks.finishes, 0);
    CHECK_EQUAL(next(NBD_EVENT_CLOSED).error, NBD_ERR_TRANSPORT);
}

static void end_of_sending_is_nobodys_without_a_hook(void)
{
    ready(0);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(send_all(), 28);
    next(NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_NOW);
}

/// URIs ///

typedef struct uri_row {
    const char *text;
    int error;
    size_t detail_at;
} uri_row;

static const uri_row uri_rows[] = {
    {"nbd://h/!", 0, 0},
    {"nbd://h/%1F", 0, 0},
    {"nbd://u%1F@h", NBD_ERR_URI, 7},
    {"nbd://u%20@h", 0, 0},
    {"nbd://u%01@h", NBD_ERR_URI, 7},
    {"\001nbd://h", NBD_ERR_URI, 0},
    {" nbd://h", NBD_ERR_URI, 0},
    {"xbd://h", NBD_ERR_URI, 0},
    {"nbx://h", NBD_ERR_URI, 0},
    {"nbd:", NBD_ERR_URI, 4},
    {"nbd:/", NBD_ERR_URI, 4},
    {"nbd+vsock://0", 0, 0},
    {"nbd+vsock://0:1", 0, 0},
    {"nbd+vsock://0:0", NBD_ERR_URI, 14},
    {"nbd://[fe80::1%25e0]", 0, 0},
    {"nbd://[fe80::1%25-x]", NBD_ERR_URI, 7},
    {"nbd://[fe80::1%25a%2Fb]", NBD_ERR_URI, 7},
    {"nbd://[fe80::1%25]", NBD_ERR_URI, 7},
    {"nbd://[fe80::1%25%01]", NBD_ERR_URI, 17},
    {"nbd://[a:b]", NBD_ERR_URI, 7},
    {"nbd://[a::]", 0, 0},
    {"nbd://[::1", NBD_ERR_URI, 6},
    {"nbd://h/~", 0, 0},
    {"nbd://h/\x7f", NBD_ERR_URI, 8},
    {"nbd+vsock://4294967295:4294967295", 0, 0},
    {"nbd+vsock://4294967296", NBD_ERR_URI, 12},
};

// The text ends at a page that cannot be read.
static void uris_at_the_edges(void)
{
    size_t i;

    for (i = 0; i < sizeof uri_rows / sizeof uri_rows[0]; i++) {
        const uri_row *row = &uri_rows[i];
        size_t size = strlen(row->text) + 1;
        char *text = region_last(0, size), strings[64];
        nbd_uri uri;

        snprintf(check.where, sizeof check.where, "row %d", (int)i);
        memcpy(text, row->text, size);
        CHECK_EQUAL(nbd_uri_parse(&uri, text, strings, size - 1 + 8), row->error);
        CHECK_EQUAL(uri.detail_at, row->detail_at);
        CHECK_EQUAL(uri.detail[0] != 0, row->error != 0);
    }
}

static void uri_that_is_refused_names_the_rule(void)
{
    char strings[32];
    nbd_uri uri;

    CHECK_EQUAL(nbd_uri_parse(&uri, "nbd://[::1", strings, sizeof strings), NBD_ERR_URI);
    CHECK(strcmp(uri.detail, "']' is missing") == 0);
    CHECK_EQUAL(nbd_uri_parse(&uri, "\001nbd://h", strings, sizeof strings), NBD_ERR_URI);
    CHECK(strcmp(uri.detail, "byte that must be percent-encoded") == 0);
}

static void default_host_needs_its_own_bytes_and_no_more(void)
{
    char strings[11];
    nbd_uri uri;

    CHECK_EQUAL(nbd_uri_parse(&uri, "nbd://", strings, 11), 0);
    CHECK(strcmp(uri.address.host, "localhost") == 0);
    CHECK_EQUAL(nbd_uri_parse(&uri, "nbd://", strings, 10), NBD_ERR_BUFFER);
    CHECK_EQUAL(nbd_uri_parse(&uri, "nbd://", strings, 9), NBD_ERR_BUFFER);
}

/// Dialling ///

// Sizes are set on sockets other than TCP: Windows has none.
#ifndef _WIN32

static int send_buffer(int fd)
{
    int size = 0;
    socklen_t length = sizeof size;

    CHECK(getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, &length) == 0);
    return size;
}

static void dialling_leaves_the_send_buffer_alone_if_told_so(void)
{
    char name[32];
    struct sockaddr_un at = {AF_UNIX, ""};
    nbd_address address = NBD_ZERO;
    socklen_t size;
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    void *to = &at;
    nbd_dial dial;

    snprintf(name, sizeof name, "nbd-test-edges-%ld", (long)getpid());
    memcpy(at.sun_path + 1, name, strlen(name));
    size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    CHECK(bind(listener, to, size) == 0 && listen(listener, 1) == 0);
    address.kind = NBD_ADDRESS_ABSTRACT;
    address.path = name;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    CHECK_EQUAL(nbd_dial_step(&dial), 1);
    CHECK_EQUAL(send_buffer(dial.socket), send_buffer(listener));
    nbd_socket_close(dial.socket);
    nbd_socket_close(listener);
}

#endif

static const session edge_sessions[] = {
    SESSION_OF(read_of_no_bytes_succeeds_without_content),
    SESSION_OF(simple_read_of_no_bytes_succeeds_without_content),
    SESSION_OF(extended_write_of_no_bytes_says_that_it_has_a_payload),
    SESSION_OF(block_status_of_no_bytes_has_no_extent),
    SESSION_OF(message_of_4097_bytes_ends_it),
    SESSION_OF(error_offset_of_seven_bytes_ends_it),
    SESSION_OF(error_offset_of_a_flush_is_zero),
    SESSION_OF(disconnect_while_go_is_under_way_ends_behind_it),
    SESSION_OF(oldstyle_server_without_flags_ends_it),
    SESSION_OF(disconnect_from_a_server_that_knows_no_abort_says_nothing),
};

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < sizeof edge_sessions / sizeof edge_sessions[0]; i++)
        check_case_on(edge_sessions[i].name, session_in_every_mode, &edge_sessions[i]);
    CHECK_CASE(every_byte_is_proven_to_have_come_once);
    CHECK_CASE(contexts_count_for_the_export_they_were_for);
    CHECK_CASE(block_sizes_are_powers_in_order);
    CHECK_CASE(init_takes_what_its_contract_says);
    CHECK_CASE(header_area_is_32_bytes_a_slot_or_a_quarter);
    CHECK_CASE(zeroed_client_is_harmless);
    CHECK_CASE(detail_names_the_rule_that_was_broken);
    CHECK_CASE(every_state_has_its_phase);
    CHECK_CASE(memory_fits_the_command_or_is_refused);
    CHECK_CASE(contexts_that_are_asked_for_are_known_and_stand_once);
    CHECK_CASE(allows_looks_at_command_and_flags);
    CHECK_CASE(counters_remember_the_most_in_flight);
    CHECK_CASE(offer_that_is_full_says_that_more_comes);
    CHECK_CASE(offer_stays_below_half_of_memory);
    CHECK_CASE(nothing_is_offered_while_tls_is_the_callers);
    CHECK_CASE(tls_starts_with_no_memory_on_offer);
    CHECK_CASE(tls_starts_when_the_option_has_gone_out);
    CHECK_CASE(wants_say_now_only_for_what_is_not_on_offer);
    CHECK_CASE(end_of_the_stream_is_no_input_to_wait_for);
    CHECK_CASE(pieces_of_each_write_start_at_the_first);
    CHECK_CASE(abandoned_client_has_something_to_say);
    CHECK_CASE(what_was_negotiated_is_gone_with_the_next_connection);
    CHECK_CASE(refused_option_says_nothing_about_the_next_connection);
    CHECK_CASE(tls_forgets_what_was_negotiated_in_clear);
    CHECK_CASE(end_in_transmission_blames_no_option);
    CHECK_CASE(replies_that_are_there_are_read_before_giving_up);
    CHECK_CASE(failed_send_waits_for_memory_on_offer);
    CHECK_CASE(disconnect_that_cannot_be_sent_is_no_clean_end);
    CHECK_CASE(end_of_the_stream_decides_only_when_the_disconnect_is_known_to_be_out);
    CHECK_CASE(stream_that_ends_before_the_disconnect_is_out_is_no_clean_end);
    CHECK_CASE(options_that_are_not_possible_are_refused);
    CHECK_CASE(hook_that_claims_too_much_is_not_believed);
    CHECK_CASE(blocked_direction_is_tried_only_when_it_is_ready);
    CHECK_CASE(hook_that_returns_any_other_number_has_failed);
    CHECK_CASE(one_poll_sends_no_more_than_it_may);
    CHECK_CASE(one_poll_receives_no_more_than_it_may);
    CHECK_CASE(short_receive_is_the_last_if_the_transport_says_so);
    CHECK_CASE(small_pieces_are_joined_for_a_transport_that_takes_one);
    CHECK_CASE(piece_that_fills_the_stage_is_not_copied);
    CHECK_CASE(end_of_sending_is_told_once);
    CHECK_CASE(end_of_sending_is_not_told_where_sending_failed);
    CHECK_CASE(end_of_sending_is_nobodys_without_a_hook);
    CHECK_CASE(uris_at_the_edges);
    CHECK_CASE(uri_that_is_refused_names_the_rule);
    CHECK_CASE(default_host_needs_its_own_bytes_and_no_more);
#ifndef _WIN32
    CHECK_CASE(dialling_leaves_the_send_buffer_alone_if_told_so);
#endif
    return check_end();
}
