// Extended headers, raw commands, and how commands fail: each rule is a session, played
// in every mode of play.h.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

static const char *const base_only[] = {"base:allocation"};
static const uint32_t base_only_ids[] = {9};

/// Agreeing ///

// One command with its exact header, then the end.
static void trim_and_close(script *s)
{
    int r = client_issues(s, NBD_TRIM, 0, 512, 1024);

    want_request(s, r);
    if (s->protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, r, 0);
    } else {
        send_none(s, r);
    }
    see_done(s, r, 0);
    close_session(s);
}

static void extended_headers_are_used_once_agreed_on(script *s)
{
    open_session(s, NBD_PROTOCOL_EXTENDED);
    trim_and_close(s);
}

static void refused_extended_headers_leave_structured_replies(script *s)
{
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    trim_and_close(s);
}

static void both_refused_leave_simple_replies_and_short_headers(script *s)
{
    open_session(s, NBD_PROTOCOL_SIMPLE);
    trim_and_close(s);
}

static void extended_headers_that_are_switched_off_are_not_asked_for(script *s)
{
    s->config.flags = NBD_WITHOUT_EXTENDED_HEADERS;
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    trim_and_close(s);
}

// "the server MUST also support NBD_OPT_GO", and EXPORT_NAME must not be used.
static void unsupported_go_after_extended_headers_ends_it(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_EXTENDED);
    want_go(s, "");
    send_refusal(s, 7, 1, "");
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void unsupported_go_asked_for_after_extended_headers_ends_it(script *s)
{
    open_options(s);
    option_succeeds(s, 11);
    client_asks(s, 7, "disk");
    want_go(s, "disk");
    send_refusal(s, 7, 1, "");
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void other_refusals_of_go_after_extended_headers_abort(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_EXTENDED);
    want_go(s, "");
    send_refusal(s, 7, 6, "");
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, NBD_REP_ERR_UNKNOWN);
}

/// Lengths ///

static void wide_command_succeeds(script *s, uint32_t command, uint64_t offset, uint64_t size)
{
    int r = client_issues(s, command, 0, offset, size);

    want_request(s, r);
    send_none(s, r);
    see_done(s, r, 0);
}

static void lengths_of_64_bits_go_out(script *s)
{
    static const uint32_t commands[] = {NBD_TRIM, NBD_WRITE_ZEROES, NBD_CACHE};
    static const extent all = {UINT64_MAX, 3};
    size_t i;
    int r;

    open_contexts(s, NBD_PROTOCOL_EXTENDED, base_only, base_only_ids, 1, UINT64_MAX, EXPORT_FLAGS);
    for (i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        wide_command_succeeds(s, commands[i], 0, UINT64_C(1) << 32);
        wide_command_succeeds(s, commands[i], 1, UINT64_C(0x123456789ABCDEF0));
        wide_command_succeeds(s, commands[i], 0, UINT64_MAX);
        wide_command_succeeds(s, commands[i], UINT64_MAX - 1, 1);
    }
    r = client_issues(s, NBD_BLOCK_STATUS, 0, 0, UINT64_MAX);
    want_request(s, r);
    send_extents(s, r, DONE, 9, &all, 1);
    see_extent(s, r, 0, 0, all);
    see_done(s, r, 0);
    close_session(s);
}

// The commands whose length short headers cannot say, and the export is large enough.
static void lengths_of_64_bits_are_refused(script *s, int protocol)
{
    static nbd_op ops[3];
    static const uint32_t commands[] = {NBD_TRIM, NBD_WRITE_ZEROES, NBD_CACHE};
    int i;

    greet_fixed(s);
    agree_on(s, protocol);
    go(s, UINT64_MAX, EXPORT_FLAGS);
    for (i = 0; i < 3; i++) {
        ops[i].command = commands[i];
        ops[i].size = UINT64_C(1) << 32;
        op_is_refused_here(s, &ops[i], NBD_ERR_PAYLOAD);
    }
    close_session(s);
}

static void simple_sessions_refuse_lengths_of_64_bits(script *s)
{
    lengths_of_64_bits_are_refused(s, NBD_PROTOCOL_SIMPLE);
}

static void structured_sessions_refuse_lengths_of_64_bits(script *s)
{
    lengths_of_64_bits_are_refused(s, NBD_PROTOCOL_STRUCTURED);
}

// NBD_CMD_FLAG_PAYLOAD_LEN stands in the header of a WRITE and of nothing else.
static void payload_flag_goes_out_with_writes_only(script *s)
{
    int w, z;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    w = client_issues(s, NBD_WRITE, NBD_FUA, 4096, 77);
    z = client_issues(s, NBD_WRITE_ZEROES, NBD_FUA | NBD_NO_HOLE | NBD_FAST_ZERO, 0, 512);
    want_header(s, 1 | 32, 1, 4096, 77)->request = w;
    want_payload(s, w, 0, 77);
    want_header(s, 1 | 2 | 16, 6, 0, 512)->request = z;
    send_none(s, w);
    send_none(s, z);
    see_done(s, w, 0);
    see_done(s, z, 0);
    close_session(s);
}

/// The echo of the offset ///

// READ of 64 bytes at 4096.
static int read_extended(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues(s, NBD_READ, 0, 4096, 64);
    want_request(s, r);
    return r;
}

// A header whose offset is not the request's.
static void wrong_echo_ends_it(script *s, int r, unsigned type, uint64_t size, uint64_t offset)
{
    step *sent = script_step(s, STEP_SEND);

    sent->request = r;
    sent->cookie_at = 8;
    put(s, 0x6E8A278C, 4);
    put(s, DONE, 2);
    put(s, type, 2);
    put(s, 0, 8);
    put(s, offset, 8);
    put(s, size, 8);
    script_close(s, sent);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void echo_is_checked_in_data(script *s)
{
    wrong_echo_ends_it(s, read_extended(s), TYPE_DATA, 8 + 64, 4095);
}

static void echo_is_checked_in_holes(script *s)
{
    wrong_echo_ends_it(s, read_extended(s), TYPE_HOLE, 12, 4096 + 64);
}

static void echo_is_checked_in_none(script *s)
{
    wrong_echo_ends_it(s, read_extended(s), TYPE_NONE, 0, 0);
}

static void echo_is_checked_in_errors(script *s)
{
    wrong_echo_ends_it(s, read_extended(s), TYPE_ERROR, 6, UINT64_MAX);
}

static void echo_is_checked_in_all_64_bits(script *s)
{
    wrong_echo_ends_it(s, read_extended(s), TYPE_ERROR_OFFSET, 14, (UINT64_C(1) << 32) + 4096);
}

static void echo_is_checked_in_the_second_chunk_too(script *s)
{
    int r = read_extended(s);

    send_data(s, r, MORE, 4096, 32);
    wrong_echo_ends_it(s, r, TYPE_DATA, 8 + 32, 4096 + 32);
}

static void echo_is_checked_in_block_status(script *s)
{
    int r;

    open_contexts(s, NBD_PROTOCOL_EXTENDED, base_only, base_only_ids, 1, EXPORT_SIZE, EXPORT_FLAGS);
    r = client_issues(s, NBD_BLOCK_STATUS, 0, 512, 512);
    want_request(s, r);
    wrong_echo_ends_it(s, r, TYPE_EXTENTS_64, 24, 0);
}

// FLUSH has no offset of its own, so the echo is 0.
static void echo_of_a_flush_is_zero(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    wrong_echo_ends_it(s, r, TYPE_NONE, 0, 1);
}

/// Kinds of replies ///

static void simple_success_in_an_extended_session_ends_it(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    send_simple(s, r, 0);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void simple_error_in_an_extended_session_ends_it(script *s)
{
    int r = read_extended(s);

    send_simple(s, r, NBD_EIO);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void structured_chunk_in_an_extended_session_ends_it(script *s)
{
    int r = read_extended(s);

    s->protocol = NBD_PROTOCOL_STRUCTURED;
    send_error(s, r, DONE, NBD_EIO, "");
    die(s, r, NBD_ERR_PROTOCOL);
}

static void extended_chunk_in_a_structured_session_ends_it(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    s->protocol = NBD_PROTOCOL_EXTENDED;
    send_none(s, r);
    die(s, r, NBD_ERR_PROTOCOL);
}

// A chunk of this length, of which nothing is waited for.
static void length_ends_it(script *s, unsigned type, uint64_t length)
{
    int r = read_extended(s);

    script_close(s, send_chunk_open(s, r, DONE, type, length));
    die(s, r, NBD_ERR_PROTOCOL);
}

static void data_of_2_63_bytes_ends_it(script *s)
{
    length_ends_it(s, TYPE_DATA, UINT64_C(1) << 63);
}

static void hole_of_2_63_bytes_ends_it(script *s)
{
    length_ends_it(s, TYPE_HOLE, UINT64_C(1) << 63);
}

static void error_of_2_63_bytes_ends_it(script *s)
{
    length_ends_it(s, TYPE_ERROR, UINT64_C(1) << 63);
}

static void unknown_error_of_2_63_bytes_ends_it(script *s)
{
    length_ends_it(s, 0x8123, UINT64_C(1) << 63);
}

static void none_of_2_63_bytes_ends_it(script *s)
{
    length_ends_it(s, TYPE_NONE, UINT64_C(1) << 63);
}

// Each of these is right in its lower 32 bits.
static void data_of_2_32_bytes_more_ends_it(script *s)
{
    length_ends_it(s, TYPE_DATA, (UINT64_C(1) << 32) + 8 + 64);
}

static void hole_of_2_32_bytes_more_ends_it(script *s)
{
    length_ends_it(s, TYPE_HOLE, (UINT64_C(1) << 32) + 12);
}

static void error_of_2_32_bytes_more_ends_it(script *s)
{
    length_ends_it(s, TYPE_ERROR, (UINT64_C(1) << 32) + 6);
}

static void none_of_2_32_bytes_more_ends_it(script *s)
{
    length_ends_it(s, TYPE_NONE, UINT64_C(1) << 32);
}

static void data_of_one_byte_more_ends_it(script *s)
{
    length_ends_it(s, TYPE_DATA, 8 + 65);
}

static void data_of_all_ones_ends_it(script *s)
{
    length_ends_it(s, TYPE_DATA, UINT64_MAX);
}

/// Raw commands ///

static const char payload[] = ""; // only says that there is one

static nbd_op raw_of(uint32_t type, uint32_t flags, uint64_t offset, uint64_t size,
                     const void *data)
{
    nbd_op op = NBD_ZERO;

    op.command = NBD_RAW;
    op.raw_type = type;
    op.flags = flags;
    op.offset = offset;
    op.size = size;
    op.data = data;
    return op;
}

static int ask_raw(script *s, nbd_op op)
{
    int r = client_issues_op(s, &op);

    want_request(s, r);
    return r;
}

static void raw_success(script *s, int r)
{
    if (s->protocol == NBD_PROTOCOL_EXTENDED) {
        send_none(s, r);
    } else {
        send_simple(s, r, 0);
    }
    see_done(s, r, 0);
}

static void raw_error(script *s, int r)
{
    if (s->protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, r, NBD_EINVAL);
    } else {
        send_error(s, r, DONE, NBD_EINVAL, "type?");
        see_message(s, r, 0, NBD_EINVAL, "type?");
    }
    see_done(s, r, NBD_EINVAL);
}

// Neither type nor flags, offset or size are looked at.
static void raw_commands(script *s, int protocol)
{
    s->unlawful = 1;
    open_session(s, protocol);
    raw_success(s, ask_raw(s, raw_of(0xFFFF, 0xFFFF, UINT64_MAX, 4711, NULL)));
    raw_error(s, ask_raw(s, raw_of(0xFFFE, 0, 0, 0, NULL)));
    raw_success(s, ask_raw(s, raw_of(1, 32, EXPORT_SIZE + 5, 100, payload)));
    raw_error(s, ask_raw(s, raw_of(1000, 0x8001, 7, 1, payload)));
    raw_success(s, ask_raw(s, raw_of(3, 8, 0, 0, payload)));
    trim_and_close(s);
}

static void simple_raw_commands(script *s)
{
    raw_commands(s, NBD_PROTOCOL_SIMPLE);
}

static void structured_raw_commands(script *s)
{
    raw_commands(s, NBD_PROTOCOL_STRUCTURED);
}

static void extended_raw_commands(script *s)
{
    raw_commands(s, NBD_PROTOCOL_EXTENDED);
}

static void raw_length_of_64_bits_goes_out(script *s)
{
    s->unlawful = 1;
    open_session(s, NBD_PROTOCOL_EXTENDED);
    raw_success(s, ask_raw(s, raw_of(6, 16, 1, UINT64_MAX, NULL)));
    close_session(s);
}

static int raw_until_answer(script *s, uint32_t type)
{
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    return ask_raw(s, raw_of(type, 0, 0, 64, NULL));
}

static void data_for_a_raw_command_ends_it(script *s)
{
    int r = raw_until_answer(s, 0);

    send_chunk(s, r, DONE, TYPE_DATA, "\0\0\0\0\0\0\0\0x", 9);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void hole_for_a_raw_command_ends_it(script *s)
{
    int r = raw_until_answer(s, 0);

    send_chunk(s, r, DONE, TYPE_HOLE, "\0\0\0\0\0\0\0\0\0\0\0\100", 12);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void extents_for_a_raw_command_end_it(script *s)
{
    int r;

    open_contexts(s, NBD_PROTOCOL_STRUCTURED, base_only, base_only_ids, 1, EXPORT_SIZE,
                  EXPORT_FLAGS);
    r = ask_raw(s, raw_of(7, 0, 0, 64, NULL));
    send_chunk(s, r, DONE, TYPE_EXTENTS, "\0\0\0\11\0\0\0\100\0\0\0\0", 12);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void raw_type_above_16_bits_is_refused(script *s)
{
    static nbd_op op;

    op = raw_of(0x10000, 0, 0, 0, NULL);
    open_session(s, NBD_PROTOCOL_SIMPLE);
    op_is_refused_here(s, &op, NBD_ERR_ARG);
    close_session(s);
}

static void raw_flags_above_16_bits_are_refused(script *s)
{
    static nbd_op op;

    op = raw_of(1, 0x10000, 0, 0, NULL);
    open_session(s, NBD_PROTOCOL_SIMPLE);
    op_is_refused_here(s, &op, NBD_ERR_ARG);
    close_session(s);
}

/// Errors ///

// A server that shuts down says so in the reply to `told`; the others finish.
static void shutdown_in(script *s, int protocol, uint32_t told, int at_offset)
{
    int a, b, c;

    open_contexts(s, protocol, base_only, base_only_ids, 1, EXPORT_SIZE, EXPORT_FLAGS);
    a = client_issues(s, NBD_READ, 0, 0, 16);
    b = client_issues(s, told, 0, 4096, 512);
    c = client_issues(s, NBD_WRITE, 0, 512, 16);
    want_request(s, a);
    want_request(s, b);
    want_request(s, c);
    if (at_offset) {
        send_error_at(s, b, DONE, NBD_ESHUTDOWN, "", 4096 + 511);
    } else {
        send_error(s, b, DONE, NBD_ESHUTDOWN, "");
    }
    see_done_at(s, b, NBD_ESHUTDOWN, NBD_ESHUTDOWN, at_offset ? 4096 + 511 : 4096);
    send_none(s, c);
    see_done(s, c, 0);
    see_undone(s, a);
    send_data(s, a, DONE, 0, 16);
    see_done(s, a, 0);
    want_disconnect(s);
    send_end(s);
    see_closed(s, NBD_ESHUTDOWN);
}

static void shutdown_in_a_structured_error_disconnects(script *s)
{
    shutdown_in(s, NBD_PROTOCOL_STRUCTURED, NBD_READ, 0);
}

static void shutdown_in_an_extended_error_disconnects(script *s)
{
    shutdown_in(s, NBD_PROTOCOL_EXTENDED, NBD_READ, 0);
}

static void shutdown_with_an_offset_disconnects(script *s)
{
    shutdown_in(s, NBD_PROTOCOL_STRUCTURED, NBD_WRITE, 1);
}

static void shutdown_in_block_status_disconnects(script *s)
{
    shutdown_in(s, NBD_PROTOCOL_EXTENDED, NBD_BLOCK_STATUS, 1);
}

static void shutdown_in_an_unknown_error_chunk_disconnects(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, r);
    script_close(s, send_error_open(s, r, DONE, 0xFFFF, NBD_ESHUTDOWN, "bye", 3));
    send_behind(s, 0x010203, 3);
    see_message(s, r, 0, NBD_ESHUTDOWN, "bye");
    see_done(s, r, NBD_ESHUTDOWN);
    want_disconnect(s);
    send_end(s);
    see_closed(s, NBD_ESHUTDOWN);
}

static void simple_shutdown_for_a_structured_read_disconnects(script *s)
{
    int r, other;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_READ, 0, 0, 64);
    other = client_issues(s, NBD_READ, 0, 64, 64);
    want_request(s, r);
    want_request(s, other);
    send_data(s, other, MORE, 64, 32);
    send_simple(s, r, NBD_ESHUTDOWN);
    see_done(s, r, NBD_ESHUTDOWN);
    send_data(s, other, DONE, 96, 32);
    see_done(s, other, 0);
    want_disconnect(s);
    send_end(s);
    see_closed(s, NBD_ESHUTDOWN);
}

// It need not be the first error, nor the last chunk.
static void shutdown_behind_another_error_disconnects(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues(s, NBD_READ, 0, 0, 64);
    want_request(s, r);
    send_error_at(s, r, MORE, NBD_EIO, "", 10);
    send_error(s, r, MORE, NBD_ESHUTDOWN, "");
    send_data(s, r, MORE, 0, 10);
    send_none(s, r);
    see_done_at(s, r, NBD_EIO, NBD_EIO, 10);
    want_disconnect(s);
    send_end(s);
    see_closed(s, NBD_ESHUTDOWN);
}

// What ended the connection is told to those that are in flight.
static void end_after_shutdown_finishes_the_others_as_closed(script *s)
{
    int a, b;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    a = client_issues(s, NBD_READ, 0, 0, 16);
    b = client_issues(s, NBD_READ, 0, 64, 16);
    want_request(s, a);
    want_request(s, b);
    send_error(s, a, DONE, NBD_ESHUTDOWN, "");
    see_done(s, a, NBD_ESHUTDOWN);
    send_end(s);
    see_done(s, b, NBD_ERR_CLOSED);
    see_closed(s, NBD_ESHUTDOWN);
}

static void commands_after_shutdown_are_refused(script *s)
{
    static nbd_op flush;
    int a, b;

    flush.command = NBD_FLUSH;
    open_session(s, NBD_PROTOCOL_EXTENDED);
    a = client_issues(s, NBD_FLUSH, 0, 0, 0);
    b = client_issues(s, NBD_TRIM, 0, 0, 512);
    want_request(s, a);
    want_request(s, b);
    send_error(s, a, DONE, NBD_ESHUTDOWN, "");
    see_done(s, a, NBD_ESHUTDOWN);
    op_is_refused_here(s, &flush, NBD_ERR_STATE);
    send_none(s, b);
    see_done(s, b, 0);
    want_disconnect(s);
    send_end(s);
    see_closed(s, NBD_ESHUTDOWN);
}

// "unknown errors count as EINVAL", and the value is kept.
static void unknown_errors_keep_their_value(script *s, int protocol)
{
    static const uint32_t values[] = {2, 11, 0x16000000, UINT32_C(0x80000001), UINT32_MAX};
    size_t i;

    open_session(s, protocol);
    for (i = 0; i < sizeof values / sizeof values[0]; i++) {
        int r = client_issues(s, NBD_READ, 0, 512, 32);

        want_request(s, r);
        if (protocol == NBD_PROTOCOL_SIMPLE) {
            send_simple(s, r, values[i]);
            see_done_at(s, r, NBD_EINVAL, values[i], 512);
        } else {
            send_error_at(s, r, DONE, values[i], "odd", 520);
            see_message(s, r, 0, NBD_EINVAL, "odd");
            s->steps[s->step_count - 1].event.server_error = values[i];
            see_done_at(s, r, NBD_EINVAL, values[i], 520);
        }
    }
    close_session(s);
}

static void unknown_simple_errors_keep_their_value(script *s)
{
    unknown_errors_keep_their_value(s, NBD_PROTOCOL_SIMPLE);
}

static void unknown_structured_errors_keep_their_value(script *s)
{
    unknown_errors_keep_their_value(s, NBD_PROTOCOL_STRUCTURED);
}

static void unknown_extended_errors_keep_their_value(script *s)
{
    unknown_errors_keep_their_value(s, NBD_PROTOCOL_EXTENDED);
}

static void command_fails(script *s, uint32_t command, uint32_t flags, uint64_t size, int error)
{
    int r = client_issues(s, command, flags, 1024, size);

    want_request(s, r);
    if (s->protocol == NBD_PROTOCOL_EXTENDED) {
        send_error(s, r, DONE, (uint32_t)error, "");
    } else {
        send_simple(s, r, (uint32_t)error);
    }
    see_done(s, r, error);
}

static void refused_fast_zero_is_not_supported(script *s)
{
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    command_fails(s, NBD_WRITE_ZEROES, NBD_FAST_ZERO, 4096, NBD_ENOTSUP);
    trim_and_close(s);
}

static void refused_fast_zero_with_extended_headers_is_not_supported(script *s)
{
    open_session(s, NBD_PROTOCOL_EXTENDED);
    command_fails(s, NBD_WRITE_ZEROES, NBD_FAST_ZERO | NBD_NO_HOLE, 4096, NBD_ENOTSUP);
    trim_and_close(s);
}

static void read_too_large_for_one_chunk_is_an_overflow(script *s)
{
    open_session(s, NBD_PROTOCOL_EXTENDED);
    command_fails(s, NBD_READ, NBD_DF, 65537, NBD_EOVERFLOW);
    trim_and_close(s);
}

static void offset_of_the_error_is_told(script *s, int protocol)
{
    static const uint32_t commands[] = {NBD_READ, NBD_WRITE, NBD_TRIM, NBD_CACHE, NBD_WRITE_ZEROES};
    size_t i;

    open_session(s, protocol);
    for (i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        int r = client_issues(s, commands[i], 0, 4096, 64);

        want_request(s, r);
        send_error_at(s, r, DONE, NBD_EIO, i % 2 ? "bad sector" : "", 4096 + 15 * i);
        if (i % 2) see_message(s, r, 0, NBD_EIO, "bad sector");
        see_done_at(s, r, NBD_EIO, NBD_EIO, 4096 + 15 * i);
    }
    close_session(s);
}

static void offset_of_a_structured_error_is_told(script *s)
{
    offset_of_the_error_is_told(s, NBD_PROTOCOL_STRUCTURED);
}

static void offset_of_an_extended_error_is_told(script *s)
{
    offset_of_the_error_is_told(s, NBD_PROTOCOL_EXTENDED);
}

// Bytes before the first place that failed count, as far as they came.
static void offset_of_the_first_error_counts(script *s)
{
    int r = read_extended(s);

    send_data(s, r, MORE, 4096, 16);
    send_error_at(s, r, MORE, NBD_EIO, "", 4096 + 16);
    send_error_at(s, r, MORE, NBD_ENOMEM, "", 4096 + 40);
    send_data(s, r, DONE, 4096 + 17, 20);
    see_done_at(s, r, NBD_EIO, NBD_EIO, 4096 + 16);
    close_session(s);
}

static void error_offset_right_behind_the_request_ends_it(script *s)
{
    int r = read_extended(s);

    send_error_at(s, r, DONE, NBD_EIO, "", 4096 + 64);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void error_offset_in_a_request_of_64_bits_is_told(script *s)
{
    uint64_t size = UINT64_C(1) << 40;
    int r;

    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_EXTENDED);
    go(s, 2 * size, EXPORT_FLAGS);
    r = client_issues(s, NBD_WRITE_ZEROES, 0, size, size);
    want_request(s, r);
    send_error_at(s, r, DONE, NBD_ENOSPC, "", 2 * size - 1);
    see_done_at(s, r, NBD_ENOSPC, NBD_ENOSPC, 2 * size - 1);
    close_session(s);
}

static const session extended_sessions[] = {
    SESSION_OF(extended_headers_are_used_once_agreed_on),
    SESSION_OF(refused_extended_headers_leave_structured_replies),
    SESSION_OF(both_refused_leave_simple_replies_and_short_headers),
    SESSION_OF(extended_headers_that_are_switched_off_are_not_asked_for),
    SESSION_OF(unsupported_go_after_extended_headers_ends_it),
    SESSION_OF(unsupported_go_asked_for_after_extended_headers_ends_it),
    SESSION_OF(other_refusals_of_go_after_extended_headers_abort),
    SESSION_OF(lengths_of_64_bits_go_out),
    SESSION_OF(simple_sessions_refuse_lengths_of_64_bits),
    SESSION_OF(structured_sessions_refuse_lengths_of_64_bits),
    SESSION_OF(payload_flag_goes_out_with_writes_only),
    SESSION_OF(echo_is_checked_in_data),
    SESSION_OF(echo_is_checked_in_holes),
    SESSION_OF(echo_is_checked_in_none),
    SESSION_OF(echo_is_checked_in_errors),
    SESSION_OF(echo_is_checked_in_all_64_bits),
    SESSION_OF(echo_is_checked_in_the_second_chunk_too),
    SESSION_OF(echo_is_checked_in_block_status),
    SESSION_OF(echo_of_a_flush_is_zero),
    SESSION_OF(simple_success_in_an_extended_session_ends_it),
    SESSION_OF(simple_error_in_an_extended_session_ends_it),
    SESSION_OF(structured_chunk_in_an_extended_session_ends_it),
    SESSION_OF(extended_chunk_in_a_structured_session_ends_it),
    SESSION_OF(data_of_2_63_bytes_ends_it),
    SESSION_OF(hole_of_2_63_bytes_ends_it),
    SESSION_OF(error_of_2_63_bytes_ends_it),
    SESSION_OF(unknown_error_of_2_63_bytes_ends_it),
    SESSION_OF(none_of_2_63_bytes_ends_it),
    SESSION_OF(data_of_2_32_bytes_more_ends_it),
    SESSION_OF(hole_of_2_32_bytes_more_ends_it),
    SESSION_OF(error_of_2_32_bytes_more_ends_it),
    SESSION_OF(none_of_2_32_bytes_more_ends_it),
    SESSION_OF(data_of_one_byte_more_ends_it),
    SESSION_OF(data_of_all_ones_ends_it),
    SESSION_OF(simple_raw_commands),
    SESSION_OF(structured_raw_commands),
    SESSION_OF(extended_raw_commands),
    SESSION_OF(raw_length_of_64_bits_goes_out),
    SESSION_OF(data_for_a_raw_command_ends_it),
    SESSION_OF(hole_for_a_raw_command_ends_it),
    SESSION_OF(extents_for_a_raw_command_end_it),
    SESSION_OF(raw_type_above_16_bits_is_refused),
    SESSION_OF(raw_flags_above_16_bits_are_refused),
    SESSION_OF(shutdown_in_a_structured_error_disconnects),
    SESSION_OF(shutdown_in_an_extended_error_disconnects),
    SESSION_OF(shutdown_with_an_offset_disconnects),
    SESSION_OF(shutdown_in_block_status_disconnects),
    SESSION_OF(shutdown_in_an_unknown_error_chunk_disconnects),
    SESSION_OF(simple_shutdown_for_a_structured_read_disconnects),
    SESSION_OF(shutdown_behind_another_error_disconnects),
    SESSION_OF(end_after_shutdown_finishes_the_others_as_closed),
    SESSION_OF(commands_after_shutdown_are_refused),
    SESSION_OF(unknown_simple_errors_keep_their_value),
    SESSION_OF(unknown_structured_errors_keep_their_value),
    SESSION_OF(unknown_extended_errors_keep_their_value),
    SESSION_OF(refused_fast_zero_is_not_supported),
    SESSION_OF(refused_fast_zero_with_extended_headers_is_not_supported),
    SESSION_OF(read_too_large_for_one_chunk_is_an_overflow),
    SESSION_OF(offset_of_a_structured_error_is_told),
    SESSION_OF(offset_of_an_extended_error_is_told),
    SESSION_OF(offset_of_the_first_error_counts),
    SESSION_OF(error_offset_right_behind_the_request_ends_it),
    SESSION_OF(error_offset_in_a_request_of_64_bits_is_told),
};

enum { EXTENDED_SESSIONS = sizeof extended_sessions / sizeof extended_sessions[0] };

#ifndef SESSIONS_ONLY

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < EXTENDED_SESSIONS; i++) {
        const session *of = &extended_sessions[i];

        check_case_on(of->name, session_in_every_mode, of);
    }
    return check_end();
}

#endif
