// What a read promises: success only if the server delivered every byte exactly once;
// after a failure server bytes or zeroes, unless NBD_NO_INIT was set.  play.h checks
// the memory of each read when it finishes; each rule is a session.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

/// Legal replies ///

static int read_until_answer(script *s, uint32_t flags, uint64_t offset, uint64_t size)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues(s, NBD_READ, flags, offset, size);
    want_request(s, r);
    return r;
}

static void read_succeeds(script *s, int r)
{
    see_done(s, r, 0);
    close_session(s);
}

static void read_in_one_chunk(script *s)
{
    int r = read_until_answer(s, 0, 1000, 300);

    send_data(s, r, DONE, 1000, 300);
    read_succeeds(s, r);
}

static void chunk_of_one_byte_and_none(script *s)
{
    int r = read_until_answer(s, NBD_NO_INIT, 1000, 300);

    send_data(s, r, MORE, 1000, 299);
    send_data(s, r, MORE, 1299, 1);
    send_none(s, r);
    read_succeeds(s, r);
}

static void chunks_in_order(script *s)
{
    uint64_t place;
    int r = read_until_answer(s, 0, 4096, 256);

    for (place = 0; place < 256; place += 16)
        send_data(s, r, MORE, 4096 + place, 16);
    send_none(s, r);
    read_succeeds(s, r);
}

static void chunks_and_holes_out_of_order(script *s)
{
    int r = read_until_answer(s, 0, 4096, 400);

    send_data(s, r, MORE, 4096 + 300, 100);
    send_hole(s, r, MORE, 4096, 100);
    send_data(s, r, MORE, 4096 + 200, 100);
    send_hole(s, r, DONE, 4096 + 100, 100);
    read_succeeds(s, r);
}

static void holes_are_zeroes_without_initialising_too(script *s)
{
    int r = read_until_answer(s, NBD_NO_INIT, 0, 4096);

    send_hole(s, r, MORE, 0, 4000);
    send_data(s, r, DONE, 4000, 96);
    read_succeeds(s, r);
}

static void sparse_read_reports_holes_and_leaves_their_bytes(script *s)
{
    int r = read_until_answer(s, NBD_SPARSE, 8192, 700);

    send_data(s, r, MORE, 8192, 100);
    send_hole(s, r, MORE, 8192 + 100, 500);
    see_hole(s, r, 8192 + 100, 500);
    send_data(s, r, DONE, 8192 + 600, 100);
    read_succeeds(s, r);
}

static void sparse_read_of_a_whole_hole(script *s)
{
    int r = read_until_answer(s, NBD_SPARSE | NBD_NO_INIT, 0, 4096);

    send_hole(s, r, DONE, 0, 4096);
    see_hole(s, r, 0, 4096);
    read_succeeds(s, r);
}

static void replies_are_interleaved(script *s)
{
    int a, b;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    a = client_issues(s, NBD_READ, 0, 0, 200);
    b = client_issues(s, NBD_READ, NBD_NO_INIT, 512, 200);
    want_request(s, a);
    want_request(s, b);
    send_data(s, b, MORE, 512, 100);
    send_data(s, a, MORE, 100, 100);
    send_hole(s, b, MORE, 612, 50);
    send_data(s, a, MORE, 0, 100);
    send_data(s, b, MORE, 662, 50);
    send_none(s, b);
    see_done(s, b, 0);
    send_none(s, a);
    see_done(s, a, 0);
    close_session(s);
}

static void extended_chunks_fill_a_read(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues(s, NBD_READ, 0, 4096, 300);
    want_request(s, r);
    send_hole(s, r, MORE, 4096 + 200, 100);
    send_data(s, r, MORE, 4096, 200);
    send_none(s, r);
    read_succeeds(s, r);
}

/// Pieces of memory ///

static const size_t pieces[] = {3, 0, 1, 250, 2, 44};

static void simple_reply_fills_pieces(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    r = client_issues_pieces(s, NBD_READ, 0, 77, pieces, 6);
    want_request(s, r);
    send_simple(s, r, 0);
    read_succeeds(s, r);
}

static void chunks_fill_pieces_across_their_borders(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues_pieces(s, NBD_READ, 0, 77, pieces, 6);
    want_request(s, r);
    send_data(s, r, MORE, 77 + 2, 100);
    send_data(s, r, MORE, 77, 2);
    send_hole(s, r, MORE, 77 + 240, 60);
    send_data(s, r, DONE, 77 + 102, 138);
    read_succeeds(s, r);
}

static void failed_read_clears_pieces(script *s)
{
    int r;

    open_session(s, NBD_PROTOCOL_STRUCTURED);
    r = client_issues_pieces(s, NBD_READ, 0, 77, pieces, 6);
    want_request(s, r);
    send_data(s, r, MORE, 77 + 100, 100);
    send_error(s, r, DONE, NBD_EIO, "");
    see_done(s, r, NBD_EIO);
    close_session(s);
}

/// Bulk, received in place ///

static void bulk(script *s, int protocol, uint32_t flags)
{
    int a, b;

    open_session(s, protocol);
    a = client_issues(s, NBD_READ, flags, 5, 34001);
    b = client_issues(s, NBD_READ, flags, 200000, 9000);
    want_request(s, a);
    want_request(s, b);
    if (protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, a, 0);
        send_simple(s, b, 0);
    } else {
        send_data(s, a, MORE, 5, 14000);
        send_data(s, b, DONE, 200000, 9000);
        send_data(s, a, DONE, 14005, 20001);
    }
    s->any_order = protocol != NBD_PROTOCOL_SIMPLE;
    see_done(s, a, 0);
    see_done(s, b, 0);
    close_session(s);
}

static void simple_bulk_is_received_in_place(script *s)
{
    bulk(s, NBD_PROTOCOL_SIMPLE, 0);
}

static void structured_bulk_is_received_in_place(script *s)
{
    bulk(s, NBD_PROTOCOL_STRUCTURED, NBD_NO_INIT);
}

/// Failures that the connection survives ///

// After the read one more request proves that the stream is in step.
static void read_fails(script *s, int r, int error)
{
    int flush;

    see_done(s, r, error);
    flush = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_request(s, flush);
    send_none(s, flush);
    see_done(s, flush, 0);
    close_session(s);
}

static void nothing_but_none(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 512);

    send_none(s, r);
    read_fails(s, r, NBD_ERR_GAP);
}

static void gap_at_the_end(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 512);

    send_data(s, r, DONE, 0, 511);
    read_fails(s, r, NBD_ERR_GAP);
}

static void gap_in_the_middle(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 512, 512);

    send_data(s, r, MORE, 512, 100);
    send_data(s, r, MORE, 512 + 101, 411);
    send_none(s, r);
    read_fails(s, r, NBD_ERR_GAP);
}

// B51: the lengths add up to the whole.
static void overlap_that_adds_up(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 4096, 512);

    send_data(s, r, MORE, 4096, 256);
    send_data(s, r, MORE, 4096, 256);
    send_none(s, r);
    read_fails(s, r, NBD_ERR_OVERLAP);
}

static void overlap_in_part(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 4096, 512);

    send_data(s, r, MORE, 4096, 300);
    send_data(s, r, DONE, 4096 + 200, 312);
    read_fails(s, r, NBD_ERR_OVERLAP);
}

static void hole_over_data(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 4096, 512);

    send_data(s, r, MORE, 4096, 512);
    send_hole(s, r, DONE, 4096 + 100, 10);
    read_fails(s, r, NBD_ERR_OVERLAP);
}

// One range more than a slot can hold.
static void too_many_fragments(script *s, uint32_t flags)
{
    uint64_t place;
    int r = read_until_answer(s, flags, 0, 512);

    for (place = 0; place < 512; place += 32)
        send_data(s, r, MORE, place, 16);
    for (place = 16; place < 512; place += 32)
        send_data(s, r, MORE, place, 16);
    send_none(s, r);
    read_fails(s, r, NBD_ERR_FRAGMENTED);
}

static void error_after_data(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 512);

    send_data(s, r, MORE, 0, 256);
    send_error(s, r, DONE, NBD_EIO, "");
    read_fails(s, r, NBD_EIO);
}

// B69: the error counts, whatever comes after it.
static void data_after_error(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 512);

    send_error(s, r, MORE, NBD_EIO, "");
    send_data(s, r, MORE, 0, 512);
    send_none(s, r);
    read_fails(s, r, NBD_EIO);
}

// The server's error is the result, before any failure of the proof.
static void gap_behind_an_error(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 1024, 512);

    send_data(s, r, MORE, 1024, 64);
    send_data(s, r, MORE, 1024, 64);
    send_error_at(s, r, MORE, NBD_EIO, "bad sector", 1024 + 64);
    see_message(s, r, 0, NBD_EIO, "bad sector");
    send_data(s, r, DONE, 1024 + 400, 100);
    see_done_at(s, r, NBD_EIO, NBD_EIO, 1024 + 64);
    close_session(s);
}

static void whole_read_fails_in_simple_replies(script *s, uint32_t flags)
{
    int r;

    open_session(s, NBD_PROTOCOL_SIMPLE);
    r = client_issues(s, NBD_READ, flags, 0, 512);
    want_request(s, r);
    send_simple(s, r, NBD_EPERM);
    see_done(s, r, NBD_EPERM);
    close_session(s);
}

// A shipping server answers so although structured replies were agreed on.
static void simple_error_to_a_structured_read(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 512);

    send_simple(s, r, NBD_EIO);
    read_fails(s, r, NBD_EIO);
}

/// Failures that end the connection ///

static void data_outside(script *s, uint32_t flags, uint64_t offset, size_t size)
{
    int r = read_until_answer(s, flags, 4096, 512);

    send_data(s, r, DONE, offset, size);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void hole_outside(script *s, uint32_t flags, uint64_t offset, uint32_t size)
{
    int r = read_until_answer(s, flags, 4096, 512);

    send_hole(s, r, DONE, offset, size);
    die(s, r, NBD_ERR_PROTOCOL);
}

// B49: on every side, and where the sum wraps.
static void data_below(script *s, uint32_t flags)
{
    data_outside(s, flags, 4095, 512);
}

static void data_above(script *s, uint32_t flags)
{
    data_outside(s, flags, 4607, 2);
}

static void data_at_the_end_of_64_bits(script *s, uint32_t flags)
{
    data_outside(s, flags, UINT64_MAX, 2);
}

static void data_longer_than_the_request(script *s, uint32_t flags)
{
    data_outside(s, flags, 4096, 513);
}

static void hole_below(script *s, uint32_t flags)
{
    hole_outside(s, flags, 4095, 512);
}

static void hole_longer_than_the_request(script *s, uint32_t flags)
{
    hole_outside(s, flags, 4096, 513);
}

static void hole_of_4_gib(script *s, uint32_t flags)
{
    hole_outside(s, flags, 4608, UINT32_C(0xFFFFFFFF));
}

static void hole_of_nothing(script *s, uint32_t flags)
{
    hole_outside(s, flags, 4096, 0);
}

static void data_of_nothing(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 512);

    send_data(s, r, DONE, 0, 0);
    die(s, r, NBD_ERR_PROTOCOL);
}

// B65: no payload that long can be right, so none of it is waited for.
static void data_of_4_gib(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 512);

    script_close(s, send_chunk_open(s, r, DONE, TYPE_DATA, UINT32_C(0xFFFFFFFF)));
    die(s, r, NBD_ERR_PROTOCOL);
}

static void data_after_done(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 64);
    int other = client_issues(s, NBD_FLUSH, 0, 0, 0);

    want_request(s, other);
    send_data(s, r, DONE, 0, 64);
    see_done(s, r, 0);
    send_data(s, r, DONE, 0, 64);
    die(s, other, NBD_ERR_PROTOCOL);
}

static void simple_success_to_a_structured_read(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 0, 64);

    send_simple(s, r, 0);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void error_offset_outside(script *s, uint32_t flags)
{
    int r = read_until_answer(s, flags, 4096, 512);

    send_error_at(s, r, DONE, NBD_EIO, "", 4608);
    die(s, r, NBD_ERR_PROTOCOL);
}

/// In each mode of reading ///

#define IN_MODES(rule) \
    static void rule##_default(script *s) \
    { \
        rule(s, 0); \
    } \
    static void rule##_no_init(script *s) \
    { \
        rule(s, NBD_NO_INIT); \
    } \
    static void rule##_sparse_no_init(script *s) \
    { \
        rule(s, NBD_SPARSE | NBD_NO_INIT); \
    }

#define SESSIONS_OF(rule) \
    SESSION_OF(rule##_default), SESSION_OF(rule##_no_init), SESSION_OF(rule##_sparse_no_init)

// The rules whose sessions differ in nothing but the flags of the read.
// clang-format off
#define RULES(X) \
    X(nothing_but_none) \
    X(gap_at_the_end) \
    X(gap_in_the_middle) \
    X(overlap_that_adds_up) \
    X(overlap_in_part) \
    X(too_many_fragments) \
    X(error_after_data) \
    X(data_after_error) \
    X(gap_behind_an_error) \
    X(whole_read_fails_in_simple_replies) \
    X(simple_error_to_a_structured_read) \
    X(data_below) \
    X(data_above) \
    X(data_at_the_end_of_64_bits) \
    X(data_longer_than_the_request) \
    X(hole_below) \
    X(hole_longer_than_the_request) \
    X(hole_of_4_gib) \
    X(hole_of_nothing) \
    X(data_of_nothing) \
    X(data_of_4_gib) \
    X(data_after_done) \
    X(simple_success_to_a_structured_read) \
    X(error_offset_outside) \
    X(hole_over_data)
// clang-format on

RULES(IN_MODES)

// Holes were announced; a failure takes them back and clears their bytes.
static void failed_sparse_read_is_cleared(script *s)
{
    int r = read_until_answer(s, NBD_SPARSE, 0, 512);

    send_hole(s, r, MORE, 128, 128);
    see_hole(s, r, 128, 128);
    send_data(s, r, MORE, 0, 128);
    send_none(s, r);
    read_fails(s, r, NBD_ERR_GAP);
}

// Cut behind the header of the second chunk: its length belongs to no place yet.
static void hole_at_the_end_and_then_data(script *s)
{
    int r = read_until_answer(s, 0, 0, 300);

    send_hole(s, r, MORE, 280, 20);
    send_data(s, r, DONE, 0, 280);
    read_succeeds(s, r);
}

static const session read_sessions[] = {
    SESSION_OF(hole_at_the_end_and_then_data),
    SESSION_OF(read_in_one_chunk),
    SESSION_OF(chunk_of_one_byte_and_none),
    SESSION_OF(chunks_in_order),
    SESSION_OF(chunks_and_holes_out_of_order),
    SESSION_OF(holes_are_zeroes_without_initialising_too),
    SESSION_OF(sparse_read_reports_holes_and_leaves_their_bytes),
    SESSION_OF(sparse_read_of_a_whole_hole),
    SESSION_OF(replies_are_interleaved),
    SESSION_OF(extended_chunks_fill_a_read),
    SESSION_OF(simple_reply_fills_pieces),
    SESSION_OF(chunks_fill_pieces_across_their_borders),
    SESSION_OF(failed_read_clears_pieces),
    SESSION_OF(simple_bulk_is_received_in_place),
    SESSION_OF(structured_bulk_is_received_in_place),
    SESSION_OF(failed_sparse_read_is_cleared),
#define SESSIONS_OF_RULE(rule) SESSIONS_OF(rule),
    RULES(SESSIONS_OF_RULE)};

enum { READ_SESSIONS = sizeof read_sessions / sizeof read_sessions[0] };

#ifndef SESSIONS_ONLY

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < READ_SESSIONS; i++) {
        const session *of = &read_sessions[i];

        check_case_on(of->name, session_in_every_mode, of);
    }
    return check_end();
}

#endif
