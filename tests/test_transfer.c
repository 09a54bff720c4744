// Commands and their replies, disconnecting, dying: each rule is a session, played in
// every mode of play.h.  What reads promise stands in test_reads.c.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

/// Every command with every flag, in the three protocols ///

static const char *const base_allocation[] = {"base:allocation"};

static void open_with_contexts(script *s, int protocol)
{
    s->config.queries = base_allocation;
    s->config.query_count = 1;
    greet_fixed(s);
    agree_on(s, protocol);
    want_meta(s, 10, "", base_allocation, 1);
    send_context(s, 10, 9, "base:allocation");
    see_text(s, SESSION, 10, NBD_TEXT_CONTEXT, "base:allocation");
    send_ack(s, 10);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
}

static void send_success(script *s, int r)
{
    if (s->protocol == NBD_PROTOCOL_EXTENDED) {
        send_none(s, r);
    } else {
        send_simple(s, r, 0);
    }
}

static void command_succeeds(script *s, uint32_t command, uint32_t flags, uint64_t offset,
                             uint64_t size)
{
    int r = client_issues(s, command, flags, offset, size);

    want_request(s, r);
    send_success(s, r);
    see_done(s, r, 0);
}

static void commands_without_data(script *s)
{
    command_succeeds(s, NBD_WRITE, 0, 100, 33);
    command_succeeds(s, NBD_WRITE, NBD_FUA, EXPORT_SIZE - 1, 1);
    command_succeeds(s, NBD_FLUSH, 0, 0, 0);
    command_succeeds(s, NBD_TRIM, 0, 0, EXPORT_SIZE);
    command_succeeds(s, NBD_TRIM, NBD_FUA, 512, 1024);
    command_succeeds(s, NBD_CACHE, 0, 4096, 65536);
    command_succeeds(s, NBD_WRITE_ZEROES, 0, 7, 9);
    command_succeeds(s, NBD_WRITE_ZEROES, NBD_FUA | NBD_NO_HOLE, 8, 10);
    command_succeeds(s, NBD_WRITE_ZEROES, NBD_FAST_ZERO, 9, 11);
}

static void simple_commands(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    commands_without_data(s);
    r = client_issues(s, NBD_READ, 0, 11, 45);
    want_request(s, r);
    send_simple(s, r, 0);
    see_done(s, r, 0);
    close_session(s);
}

static void chunked_commands(script *s, int protocol)
{
    static const extent two[] = {{4096, 0}, {8192, 3}};
    int r;

    open_with_contexts(s, protocol);
    commands_without_data(s);
    r = client_issues(s, NBD_READ, NBD_DF, 11, 45);
    want_request(s, r);
    send_data(s, r, DONE, 11, 45);
    see_done(s, r, 0);
    r = client_issues(s, NBD_BLOCK_STATUS, 0, 512, 12288);
    want_request(s, r);
    send_extents(s, r, DONE, 9, two, 2);
    see_extent(s, r, 0, 512, two[0]);
    see_extent(s, r, 0, 512 + 4096, two[1]);
    see_done(s, r, 0);
    r = client_issues(s, NBD_BLOCK_STATUS, NBD_REQ_ONE, 0, 8192);
    want_request(s, r);
    send_extents(s, r, MORE, 9, two, 1);
    see_extent(s, r, 0, 0, two[0]);
    send_none(s, r);
    see_done(s, r, 0);
    close_session(s);
}

static void structured_commands(script *s)
{
    chunked_commands(s, NBD_PROTOCOL_STRUCTURED);
}

static void extended_commands(script *s)
{
    chunked_commands(s, NBD_PROTOCOL_EXTENDED);
}

static void lengths_beyond_32_bits_need_extended_headers(script *s)
{
    static const extent huge = {UINT64_C(1) << 33, UINT64_C(0)};
    int r;

    s->config.queries = base_allocation;
    s->config.query_count = 1;
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_EXTENDED);
    want_meta(s, 10, "", base_allocation, 1);
    send_context(s, 10, 9, "base:allocation");
    see_text(s, SESSION, 10, NBD_TEXT_CONTEXT, "base:allocation");
    send_ack(s, 10);
    go(s, UINT64_C(1) << 40, EXPORT_FLAGS);
    command_succeeds(s, NBD_WRITE_ZEROES, 0, 1, UINT64_C(1) << 33);
    command_succeeds(s, NBD_TRIM, 0, 0, UINT64_C(1) << 40);
    r = client_issues(s, NBD_BLOCK_STATUS, 0, UINT64_C(1) << 34, UINT64_C(1) << 33);
    want_request(s, r);
    send_extents(s, r, DONE, 9, &huge, 1);
    see_extent(s, r, 0, UINT64_C(1) << 34, huge);
    see_done(s, r, 0);
    close_session(s);
}

/// Several at once ///

static void pieces_are_written_in_order(script *s)
{
    static const size_t sizes[] = {1, 0, 300, 4, 0};
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues_pieces(s, NBD_WRITE, NBD_FUA, 1000, sizes, 5);
    want_request(s, r);
    send_none(s, r);
    see_done(s, r, 0);
    close_session(s);
}

static void replies_come_in_another_order(script *s)
{
    int a, b, c, d;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    a = client_issues(s, NBD_READ, 0, 0, 40);
    b = client_issues(s, NBD_WRITE, 0, 512, 40);
    c = client_issues(s, NBD_READ, 0, 1024, 60);
    d = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, a);
    want_request(s, b);
    want_request(s, c);
    want_request(s, d);
    send_simple(s, d, 0);
    send_simple(s, c, 0);
    send_simple(s, a, 0);
    send_simple(s, b, NBD_ENOSPC);
    see_done(s, d, 0);
    see_done(s, c, 0);
    see_done(s, a, 0);
    see_done(s, b, NBD_ENOSPC);
    close_session(s);
}

// One slot is enough: it is free when DONE has been pulled.
static void one_slot_serves_many_requests(script *s)
{
    int i;

    s->config.slot_count = 1;
    open_session(s, NBD_PROTOCOL_SIMPLE);
    for (i = 0; i < 5; i++) {
        command_succeeds(s, NBD_WRITE, 0, (uint64_t)i * 64, 16);
        command_succeeds(s, NBD_FLUSH, 0, 0, 0);
    }
    close_session(s);
}

static void large_write_passes_whole(script *s)
{
    s->no_cut = 1;
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    command_succeeds(s, NBD_WRITE, 0, 3, 70000);
    close_session(s);
}

/// Errors of the server ///

// B81: no payload follows an error.
static void simple_error_has_no_payload(script *s)
{
    int a, b;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    a = client_issues(s, NBD_READ, 0, 0, 64);
    b = client_issues(s, NBD_READ, 0, 64, 64);
    want_request(s, a);
    want_request(s, b);
    send_simple(s, a, NBD_EIO);
    send_simple(s, b, 0);
    see_done(s, a, NBD_EIO);
    see_done(s, b, 0);
    close_session(s);
}

// B55: the value is the wire's; one that is not of the list counts as NBD_EINVAL.
static void every_error_value_is_told(script *s)
{
    static const uint32_t values[] = {1, 5, 12, 22, 28, 75, 95, 9999, UINT32_C(0xFFFFFFFF)};
    size_t i;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    for (i = 0; i < sizeof values / sizeof values[0]; i++) {
        int error = values[i] < 100 ? (int)values[i] : NBD_EINVAL;
        int r = client_issues(s, NBD_TRIM, 0, 0, 512);

        want_request(s, r);
        send_simple(s, r, values[i]);
        see_done_at(s, r, error, values[i], 0);
        r = client_issues(s, NBD_TRIM, 0, 512, 512);
        want_request(s, r);
        send_error(s, r, DONE, values[i], "");
        see_done_at(s, r, error, values[i], 512);
    }
    close_session(s);
}

static void text_of_an_error_comes_before_its_done(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_WRITE, 0, 4096, 16);
    want_request(s, r);
    send_error(s, r, DONE, NBD_ENOSPC, "disk full:\nbuy another");
    see_message(s, r, 0, NBD_ENOSPC, "disk full:\nbuy another");
    see_done(s, r, NBD_ENOSPC);
    r = client_issues(s, NBD_TRIM, 0, 8192, 4096);
    want_request(s, r);
    send_error_at(s, r, DONE, NBD_EIO, "half way", 9000);
    see_message(s, r, 0, NBD_EIO, "half way");
    see_done_at(s, r, NBD_EIO, NBD_EIO, 9000);
    close_session(s);
}

static void longest_text_of_an_error_is_handed_out_whole(script *s)
{
    static char text[4097];
    int r;

    memset(text, 't', 4096);
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    send_error(s, r, DONE, NBD_EIO, text);
    see_message(s, r, 0, NBD_EIO, text);
    see_done(s, r, NBD_EIO);
    close_session(s);
}

static void first_of_two_errors_counts(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_WRITE_ZEROES, 0, 0, 4096);
    want_request(s, r);
    send_error_at(s, r, MORE, NBD_EIO, "", 100);
    send_error(s, r, MORE, NBD_ENOMEM, "");
    send_none(s, r);
    see_done_at(s, r, NBD_EIO, NBD_EIO, 100);
    close_session(s);
}

static void unknown_error_chunk_fails_its_request_only(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    script_close(s, send_error_open(s, r, DONE, 0x8123, NBD_EPERM, "odd", 5));
    send_behind(s, UINT64_C(0x1122334455), 5);
    see_message(s, r, 0, NBD_EPERM, "odd");
    see_done(s, r, NBD_EPERM);
    close_session(s);
}

static void unknown_reply_flags_are_ignored(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_READ, 0, 0, 64);
    want_request(s, r);
    send_data(s, r, 0xFFFE, 0, 32);
    send_data(s, r, 0xFFFF, 32, 32);
    see_done(s, r, 0);
    close_session(s);
}

/// Early replies ///

static void reply_before_the_write_was_sent(script *s, uint32_t error)
{
    int a, b;

    s->any_order = 1;
    open_session(s, NBD_PROTOCOL_SIMPLE);
    transport_takes(s, 28 + 100);
    a = client_issues(s, NBD_WRITE, 0, 0, 4096);
    b = client_issues(s, NBD_READ, 0, 8192, 24);
    want_request_header(s, a);
    want_payload(s, a, 0, 100);
    send_simple(s, a, error);
    see_undone(s, a);
    transport_takes(s, 1000);
    want_payload(s, a, 100, 1100);
    see_undone(s, a);
    transport_takes_all(s);
    want_payload(s, a, 1100, 4096);
    see_done(s, a, (int)error);
    want_request(s, b);
    send_simple(s, b, 0);
    see_done(s, b, 0);
    close_session(s);
}

static void early_success_waits_for_the_end_of_its_write(script *s)
{
    reply_before_the_write_was_sent(s, 0);
}

static void early_error_waits_for_the_end_of_its_write(script *s)
{
    reply_before_the_write_was_sent(s, NBD_ENOSPC);
}

// The receive completion can be seen before the send completion.
static void early_chunk_is_accepted_too(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    transport_takes(s, 32);
    r = client_issues(s, NBD_WRITE, 0, 0, 64);
    want_request_header(s, r);
    send_error(s, r, DONE, NBD_EPERM, "not you");
    see_message(s, r, 0, NBD_EPERM, "not you");
    see_undone(s, r);
    transport_takes_all(s);
    want_payload(s, r, 0, 64);
    see_done(s, r, NBD_EPERM);
    close_session(s);
}

/// The end ///

static void disconnect_waits_for_what_is_in_flight(script *s)
{
    int a, b;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    a = client_issues(s, NBD_READ, 0, 0, 32);
    b = client_issues(s, NBD_WRITE, 0, 64, 32);
    client_disconnects(s);
    want_request(s, a);
    want_request(s, b);
    send_simple(s, b, 0);
    see_done(s, b, 0);
    send_simple(s, a, 0);
    see_done(s, a, 0);
    want_disconnect(s);
    send_end(s);
    see_closed(s, 0);
}

// B89: the goodbye stands behind the bytes of a write that is half sent.
static void disconnect_stands_behind_a_half_sent_write(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    transport_takes(s, 28 + 10);
    r = client_issues(s, NBD_WRITE, 0, 0, 256);
    want_request_header(s, r);
    client_disconnects(s);
    transport_takes_all(s);
    want_payload(s, r, 0, 256);
    send_simple(s, r, 0);
    see_done(s, r, 0);
    want_disconnect(s);
    send_end(s);
    see_closed(s, 0);
}

// B77: a server that shuts down gets its answers collected, then a goodbye.
static void shutdown_of_the_server_disconnects(script *s, int protocol)
{
    int a, b, c;

    open_session(s, protocol);
    a = client_issues(s, NBD_READ, 0, 0, 16);
    b = client_issues(s, NBD_FLUSH, 0, 0, 0);
    c = client_issues(s, NBD_READ, 0, 512, 16);
    want_request(s, a);
    want_request(s, b);
    want_request(s, c);
    if (protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, b, NBD_ESHUTDOWN);
        send_simple(s, c, 0);
        send_simple(s, a, 0);
    } else {
        send_error(s, b, DONE, NBD_ESHUTDOWN, "");
        send_data(s, c, DONE, 512, 16);
        send_data(s, a, DONE, 0, 16);
    }
    see_done(s, b, NBD_ESHUTDOWN);
    see_done(s, c, 0);
    see_done(s, a, 0);
    want_disconnect(s);
    send_end(s);
    see_closed(s, NBD_ESHUTDOWN);
}

static void simple_shutdown_disconnects(script *s)
{
    shutdown_of_the_server_disconnects(s, NBD_PROTOCOL_SIMPLE);
}

static void structured_shutdown_disconnects(script *s)
{
    shutdown_of_the_server_disconnects(s, NBD_PROTOCOL_STRUCTURED);
}

static void abandon_finishes_everything(script *s)
{
    int a, b, c;

    s->any_order = 1;
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    a = client_issues(s, NBD_READ, 0, 0, 4096);
    want_request(s, a);
    send_data(s, a, MORE, 512, 512);
    script_step(s, STEP_FED);
    transport_takes(s, 28 + 10);
    b = client_issues(s, NBD_WRITE, 0, 0, 4096);
    c = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request_header(s, b);
    want_payload(s, b, 0, 10);
    client_abandons(s);
    see_done(s, a, NBD_ERR_ABANDONED);
    see_done(s, b, NBD_ERR_ABANDONED);
    see_done(s, c, NBD_ERR_ABANDONED);
    see_closed(s, NBD_ERR_ABANDONED);
}

// B90: in whatever stage a request is, the end of the stream finishes it.
static void end_of_stream_finishes_every_stage(script *s)
{
    int a, b, c, d;

    s->any_order = 1;
    s->no_cut = 1;
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    a = client_issues(s, NBD_READ, 0, 0, 512);
    b = client_issues(s, NBD_READ, 0, 4096, 512);
    want_request(s, a);
    want_request(s, b);
    transport_takes(s, 28 + 10);
    c = client_issues(s, NBD_WRITE, 0, 0, 4096);
    d = client_issues(s, NBD_TRIM, 0, 0, 4096);
    want_request_header(s, c);
    want_payload(s, c, 0, 10);
    send_data(s, a, MORE, 0, 256);
    script_close(s, send_chunk_open(s, b, DONE, TYPE_DATA, 8 + 512));
    send_behind(s, 4096, 8);
    send_end(s);
    see_done(s, a, NBD_ERR_TRUNCATED);
    see_done(s, b, NBD_ERR_TRUNCATED);
    see_done(s, c, NBD_ERR_TRUNCATED);
    see_done(s, d, NBD_ERR_TRUNCATED);
    see_closed(s, NBD_ERR_TRUNCATED);
}

/// What a server may not say ///

static int flush_until_answer(script *s, int protocol)
{
    int r;

    open_session(s, protocol);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    return r;
}

static void error_chunk_of_zero_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_error(s, r, DONE, 0, "");
    die(s, r, NBD_ERR_PROTOCOL);
}

// B53: the text may not be longer than its chunk.
static void text_longer_than_its_chunk_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_chunk(s, r, DONE, TYPE_ERROR, "\0\0\0\5\0\4abc", 9);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void trailing_bytes_of_a_known_error_end_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_chunk(s, r, DONE, TYPE_ERROR, "\0\0\0\5\0\2abc", 9);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void short_error_chunk_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_chunk(s, r, DONE, TYPE_ERROR, "\0\0\0\5\0", 5);
    die(s, r, NBD_ERR_PROTOCOL);
}

// B59
static void none_without_done_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_chunk(s, r, MORE, TYPE_NONE, "", 0);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void none_with_payload_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_chunk(s, r, DONE, TYPE_NONE, "ever", 4);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void unknown_chunk_type_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_chunk(s, r, DONE, 11, "", 0);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void data_for_a_flush_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_STRUCTURED);

    send_chunk(s, r, DONE, TYPE_DATA, "\0\0\0\0\0\0\0\0x", 9);
    die(s, r, NBD_ERR_PROTOCOL);
}

// B57: reply kinds that were not agreed on.
static void chunk_in_a_simple_session_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_SIMPLE);

    send_none(s, r);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void simple_reply_in_an_extended_session_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_EXTENDED);

    send_simple(s, r, 0);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void chunk_in_an_extended_session_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_EXTENDED);

    s->protocol = NBD_PROTOCOL_STRUCTURED;
    send_none(s, r);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void wrong_offset_in_an_extended_header_ends_it(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues(s, NBD_TRIM, 0, 4096, 4096);
    want_request(s, r);
    s->requests[r].op.offset = 4097;
    send_none(s, r);
    s->requests[r].op.offset = 4096;
    die(s, r, NBD_ERR_PROTOCOL);
}

// B61: the second reply is one to a request that is not in flight.
static void second_reply_ends_it(script *s)
{
    int a, b;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    a = client_issues(s, NBD_FLUSH, 0, 0, 0);
    b = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, a);
    want_request(s, b);
    send_simple(s, a, 0);
    see_done(s, a, 0);
    send_simple(s, a, 0);
    die(s, b, NBD_ERR_PROTOCOL);
}

static void reply_to_nobody_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_SIMPLE);

    send_bytes(s, "\147\104\146\230\0\0\0\0\336\255\276\357\336\255\276\357", 16);
    die(s, r, NBD_ERR_PROTOCOL);
}

// The cookie names the slot behind the last; there is no such memory.
static void cookie_of_a_slot_that_is_not_there_ends_it(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_SIMPLE);

    send_bytes(s, "\147\104\146\230\0\0\0\0\0\0\0\0\0\1\0\4", 16);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void wrong_reply_magic_ends_the_session(script *s)
{
    int r = flush_until_answer(s, NBD_PROTOCOL_SIMPLE);

    send_bytes(s, "\147\104\146\231\0\0\0\0\0\0\0\0\0\0\0\0", 16);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void bytes_without_a_request_end_it(script *s)
{
    open_session(s, NBD_PROTOCOL_SIMPLE);
    send_bytes(s, "\147\104\146\230\0\0\0\0\0\0\0\0\0\1\0\0", 16);
    see_closed(s, NBD_ERR_PROTOCOL);
}

/// Extents that are not right ///

static int status_until_answer(script *s, int protocol, uint32_t flags)
{
    int r;

    open_with_contexts(s, protocol);
    r = client_issues(s, NBD_BLOCK_STATUS, flags, 0, 4096);
    want_request(s, r);
    return r;
}

// B71: the last extent may reach beyond the request.
static void last_extent_may_be_longer(script *s)
{
    static const extent extents[] = {{512, 1}, {UINT32_C(0xFFFFFFFF), UINT32_C(0xFFFFFFFC) | 2}};
    int r = status_until_answer(s, NBD_PROTOCOL_STRUCTURED, 0);

    send_extents(s, r, DONE, 9, extents, 2);
    see_extent(s, r, 0, 0, extents[0]);
    see_extent(s, r, 0, 512, extents[1]);
    see_done(s, r, 0);
    close_session(s);
}

static void states_of_base_allocation_are_told(script *s)
{
    static const extent sent[] = {{512, 1}, {512, 2}, {512, 3}, {2560, 0}};
    static const uint64_t states[] = {NBD_STATE_HOLE, NBD_STATE_ZERO,
                                      NBD_STATE_HOLE | NBD_STATE_ZERO, 0};
    int r = status_until_answer(s, NBD_PROTOCOL_STRUCTURED, 0);
    uint64_t i;

    send_extents(s, r, DONE, 9, sent, 4);
    for (i = 0; i < 4; i++) {
        extent told = sent[i];

        told.flags = states[i];
        see_extent(s, r, 0, i * 512, told);
    }
    see_done(s, r, 0);
    close_session(s);
}

static void empty_extent_ends_it(script *s)
{
    static const extent empty = {0, 0};
    int r = status_until_answer(s, NBD_PROTOCOL_STRUCTURED, 0);

    send_extents(s, r, DONE, 9, &empty, 1);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void extents_of_an_unknown_context_end_it(script *s)
{
    static const extent one = {4096, 0};
    int r = status_until_answer(s, NBD_PROTOCOL_STRUCTURED, 0);

    send_extents(s, r, DONE, 10, &one, 1);
    die(s, r, NBD_ERR_PROTOCOL);
}

// B67: each protocol has its own kind of extents.
static void narrow_extents_in_an_extended_session_end_it(script *s)
{
    int r = status_until_answer(s, NBD_PROTOCOL_EXTENDED, 0);

    send_chunk(s, r, DONE, TYPE_EXTENTS, "\0\0\0\11\0\0\20\0\0\0\0\0", 12);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void wrong_count_of_extents_ends_it(script *s)
{
    int r = status_until_answer(s, NBD_PROTOCOL_EXTENDED, 0);

    send_chunk(s, r, DONE, TYPE_EXTENTS_64, "\0\0\0\11\0\0\0\2\0\0\0\0\0\0\20\0\0\0\0\0\0\0\0\0",
               24);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void failed_status_keeps_its_error(script *s)
{
    static const extent one = {4096, 0};
    int r = status_until_answer(s, NBD_PROTOCOL_STRUCTURED, 0);

    send_extents(s, r, MORE, 9, &one, 1);
    see_extent(s, r, 0, 0, one);
    send_error(s, r, DONE, NBD_EIO, "");
    see_done(s, r, NBD_EIO);
    close_session(s);
}

static const session transfer_sessions[] = {
    SESSION_OF(simple_commands),
    SESSION_OF(structured_commands),
    SESSION_OF(extended_commands),
    SESSION_OF(lengths_beyond_32_bits_need_extended_headers),
    SESSION_OF(pieces_are_written_in_order),
    SESSION_OF(replies_come_in_another_order),
    SESSION_OF(one_slot_serves_many_requests),
    SESSION_OF(large_write_passes_whole),
    SESSION_OF(simple_error_has_no_payload),
    SESSION_OF(every_error_value_is_told),
    SESSION_OF(text_of_an_error_comes_before_its_done),
    SESSION_OF(longest_text_of_an_error_is_handed_out_whole),
    SESSION_OF(first_of_two_errors_counts),
    SESSION_OF(unknown_error_chunk_fails_its_request_only),
    SESSION_OF(unknown_reply_flags_are_ignored),
    SESSION_OF(early_success_waits_for_the_end_of_its_write),
    SESSION_OF(early_error_waits_for_the_end_of_its_write),
    SESSION_OF(early_chunk_is_accepted_too),
    SESSION_OF(disconnect_waits_for_what_is_in_flight),
    SESSION_OF(disconnect_stands_behind_a_half_sent_write),
    SESSION_OF(simple_shutdown_disconnects),
    SESSION_OF(structured_shutdown_disconnects),
    SESSION_OF(abandon_finishes_everything),
    SESSION_OF(end_of_stream_finishes_every_stage),
    SESSION_OF(error_chunk_of_zero_ends_it),
    SESSION_OF(text_longer_than_its_chunk_ends_it),
    SESSION_OF(trailing_bytes_of_a_known_error_end_it),
    SESSION_OF(short_error_chunk_ends_it),
    SESSION_OF(none_without_done_ends_it),
    SESSION_OF(none_with_payload_ends_it),
    SESSION_OF(unknown_chunk_type_ends_it),
    SESSION_OF(data_for_a_flush_ends_it),
    SESSION_OF(chunk_in_a_simple_session_ends_it),
    SESSION_OF(simple_reply_in_an_extended_session_ends_it),
    SESSION_OF(chunk_in_an_extended_session_ends_it),
    SESSION_OF(wrong_offset_in_an_extended_header_ends_it),
    SESSION_OF(second_reply_ends_it),
    SESSION_OF(reply_to_nobody_ends_it),
    SESSION_OF(cookie_of_a_slot_that_is_not_there_ends_it),
    SESSION_OF(wrong_reply_magic_ends_the_session),
    SESSION_OF(bytes_without_a_request_end_it),
    SESSION_OF(last_extent_may_be_longer),
    SESSION_OF(states_of_base_allocation_are_told),
    SESSION_OF(empty_extent_ends_it),
    SESSION_OF(extents_of_an_unknown_context_end_it),
    SESSION_OF(narrow_extents_in_an_extended_session_end_it),
    SESSION_OF(wrong_count_of_extents_ends_it),
    SESSION_OF(failed_status_keeps_its_error),
};

enum { TRANSFER_SESSIONS = sizeof transfer_sessions / sizeof transfer_sessions[0] };

#ifndef SESSIONS_ONLY

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < TRANSFER_SESSIONS; i++) {
        const session *of = &transfer_sessions[i];

        check_case_on(of->name, session_in_every_mode, of);
    }
    return check_end();
}

#endif
