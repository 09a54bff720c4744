// Block status: each rule is a session, played in every mode of play.h, most of them
// with structured replies and with extended headers.  Then the longest chunk.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

enum {
    DIRTY = 0, // indices of the contexts; BASE_ID and DIRTY_ID are the server's numbers
    BASE = 1,
    BASE_ID = 0,
    STATUS_FLAGS = EXPORT_FLAGS | NBD_OFFERS_STATUS_PAYLOAD
};

#define DIRTY_ID UINT32_C(4000000000) // no value of an enumeration

static const char *const status_names[] = {"qemu:dirty-bitmap:b0", "base:allocation"};
static const uint32_t status_ids[] = {DIRTY_ID, BASE_ID};

// A rule that holds in both protocols makes two sessions.
#define IN_BOTH(rule) \
    static void structured_##rule(script *s) \
    { \
        rule(s, NBD_PROTOCOL_STRUCTURED); \
    } \
    static void extended_##rule(script *s) \
    { \
        rule(s, NBD_PROTOCOL_EXTENDED); \
    }

#define BOTH_OF(rule) SESSION_OF(structured_##rule), SESSION_OF(extended_##rule)

/// Asking ///

static void open_status(script *s, int protocol)
{
    unsigned flags = protocol == NBD_PROTOCOL_EXTENDED ? STATUS_FLAGS : EXPORT_FLAGS;

    open_contexts(s, protocol, status_names, status_ids, 2, EXPORT_SIZE, flags);
}

static int ask_status_of(script *s, uint32_t flags, uint64_t offset, uint64_t size)
{
    int r = client_issues(s, NBD_BLOCK_STATUS, flags, offset, size);

    want_request(s, r);
    return r;
}

static int open_and_ask(script *s, int protocol, uint32_t flags)
{
    open_status(s, protocol);
    return ask_status_of(s, flags, 65536, 8192);
}

static void extents_come(script *s, int r, unsigned flags, uint32_t id, const extent *extents,
                         uint32_t count)
{
    uint64_t offset = s->requests[r].op.offset;
    uint32_t i;

    send_extents(s, r, flags, id, extents, count);
    for (i = 0; i < count; i++) {
        see_extent(s, r, id == BASE_ID ? BASE : DIRTY, offset, extents[i]);
        offset += extents[i].size;
    }
}

static void one_extent_comes(script *s, int r, unsigned flags, uint32_t id, uint64_t size)
{
    extent one;

    one.size = size;
    one.flags = 1;
    extents_come(s, r, flags, id, &one, 1);
}

static void status_succeeds(script *s, int r)
{
    see_done(s, r, 0);
    close_session(s);
}

// The chunk of these extents ends the session; so many of them are told before.
static void extents_end_it(script *s, int r, uint32_t id, const extent *extents, uint32_t count,
                           uint32_t told)
{
    uint64_t offset = s->requests[r].op.offset;
    uint32_t i;

    send_extents(s, r, DONE, id, extents, count);
    for (i = 0; i < told; i++) {
        see_extent(s, r, id == BASE_ID ? BASE : DIRTY, offset, extents[i]);
        offset += extents[i].size;
    }
    die(s, r, NBD_ERR_PROTOCOL);
}

/// Several contexts ///

static void contexts_come_in_their_order(script *s, int protocol)
{
    static const extent dirty[] = {{4096, 0}, {4096, 1}};
    static const extent base[] = {{512, 3}, {512, 3}, {1024, 0}, {6144, 2}};
    int r = open_and_ask(s, protocol, 0);

    extents_come(s, r, MORE, DIRTY_ID, dirty, 2);
    extents_come(s, r, DONE, BASE_ID, base, 4);
    status_succeeds(s, r);
}
IN_BOTH(contexts_come_in_their_order)

static void contexts_come_in_another_order(script *s, int protocol)
{
    static const extent base[] = {{512, 3}, {7680, 0}};
    int r = open_and_ask(s, protocol, 0);

    extents_come(s, r, MORE, BASE_ID, base, 2);
    one_extent_comes(s, r, MORE, DIRTY_ID, 8192);
    send_none(s, r);
    status_succeeds(s, r);
}
IN_BOTH(contexts_come_in_another_order)

static void contexts_are_interleaved_with_other_replies(script *s, int protocol)
{
    int a, b, c;

    open_status(s, protocol);
    a = client_issues(s, NBD_BLOCK_STATUS, 0, 0, 4096);
    b = client_issues(s, NBD_READ, 0, 512, 64);
    c = client_issues(s, NBD_BLOCK_STATUS, 0, 8192, 4096);
    want_request(s, a);
    want_request(s, b);
    want_request(s, c);
    one_extent_comes(s, c, MORE, DIRTY_ID, 4096);
    send_data(s, b, MORE, 512, 32);
    one_extent_comes(s, a, MORE, BASE_ID, 100);
    send_data(s, b, DONE, 544, 32);
    see_done(s, b, 0);
    one_extent_comes(s, c, DONE, BASE_ID, 1);
    see_done(s, c, 0);
    one_extent_comes(s, a, DONE, DIRTY_ID, 5000);
    status_succeeds(s, a);
}
IN_BOTH(contexts_are_interleaved_with_other_replies)

static void context_that_was_not_agreed_on_ends_it(script *s, int protocol)
{
    static const extent one = {8192, 0};
    int r = open_and_ask(s, protocol, 0);

    extents_end_it(s, r, DIRTY_ID + 1, &one, 1, 0);
}
IN_BOTH(context_that_was_not_agreed_on_ends_it)

static void context_told_twice_ends_it(script *s, int protocol)
{
    static const extent one = {4096, 0};
    int r = open_and_ask(s, protocol, 0);

    one_extent_comes(s, r, MORE, BASE_ID, 4096);
    extents_end_it(s, r, BASE_ID, &one, 1, 0);
}
IN_BOTH(context_told_twice_ends_it)

static void missing_context_is_a_gap(script *s, int protocol)
{
    int r = open_and_ask(s, protocol, 0), again;

    one_extent_comes(s, r, DONE, BASE_ID, 8192);
    see_done(s, r, NBD_ERR_GAP);
    again = ask_status_of(s, 0, 0, 512);
    one_extent_comes(s, again, MORE, BASE_ID, 512);
    one_extent_comes(s, again, DONE, DIRTY_ID, 512);
    status_succeeds(s, again);
}
IN_BOTH(missing_context_is_a_gap)

static void no_context_at_all_is_a_gap(script *s, int protocol)
{
    int r = open_and_ask(s, protocol, 0);

    send_none(s, r);
    see_done(s, r, NBD_ERR_GAP);
    close_session(s);
}
IN_BOTH(no_context_at_all_is_a_gap)

static void error_of_one_context_fails_the_request(script *s, int protocol)
{
    int r = open_and_ask(s, protocol, 0);

    one_extent_comes(s, r, MORE, BASE_ID, 8192);
    send_error_at(s, r, MORE, NBD_EIO, "bitmap is damaged", 65536 + 100);
    see_message(s, r, 0, NBD_EIO, "bitmap is damaged");
    one_extent_comes(s, r, DONE, DIRTY_ID, 100);
    see_done_at(s, r, NBD_EIO, NBD_EIO, 65536 + 100);
    close_session(s);
}
IN_BOTH(error_of_one_context_fails_the_request)

static void as_many_contexts_as_there_can_be(script *s, int protocol)
{
    enum { MOST = 64 * NBD_RANGES };
    static char names[MOST][24];
    static const char *pointers[MOST];
    static uint32_t ids[MOST];
    extent one = {512, 7};
    uint32_t i;
    int r;

    for (i = 0; i < MOST; i++) {
        snprintf(names[i], sizeof names[i], "x-test:%u", i);
        pointers[i] = names[i];
        ids[i] = i * 16777216u;
    }
    s->config.context_count = MOST;
    open_contexts(s, protocol, pointers, ids, MOST, EXPORT_SIZE, EXPORT_FLAGS);
    r = ask_status_of(s, 0, 0, 512);
    for (i = MOST; i-- > 0;) {
        send_extents(s, r, i ? MORE : DONE, ids[i], &one, 1);
        see_extent(s, r, i, 0, one);
    }
    status_succeeds(s, r);
}
IN_BOTH(as_many_contexts_as_there_can_be)

/// One extent only ///

static void one_extent_each_is_asked_for(script *s, int protocol)
{
    int r = open_and_ask(s, protocol, NBD_REQ_ONE);

    one_extent_comes(s, r, MORE, BASE_ID, 8192);
    one_extent_comes(s, r, DONE, DIRTY_ID, 1);
    status_succeeds(s, r);
}
IN_BOTH(one_extent_each_is_asked_for)

static void second_extent_where_one_was_asked_for_ends_it(script *s, int protocol)
{
    static const extent two[] = {{512, 0}, {512, 1}};
    int r = open_and_ask(s, protocol, NBD_REQ_ONE);

    extents_end_it(s, r, BASE_ID, two, 2, 0);
}
IN_BOTH(second_extent_where_one_was_asked_for_ends_it)

static void the_one_extent_longer_than_the_request_ends_it(script *s, int protocol)
{
    static const extent one = {8193, 0};
    int r = open_and_ask(s, protocol, NBD_REQ_ONE);

    extents_end_it(s, r, BASE_ID, &one, 1, 0);
}
IN_BOTH(the_one_extent_longer_than_the_request_ends_it)

/// Lengths of extents ///

static void last_extent_may_reach_behind_the_request(script *s, int protocol)
{
    static const extent dirty[] = {{8191, 0}, {UINT32_C(0xFFFFFFFF), 1}};
    int r = open_and_ask(s, protocol, 0);

    extents_come(s, r, MORE, DIRTY_ID, dirty, 2);
    one_extent_comes(s, r, DONE, BASE_ID, UINT32_C(0x80000000));
    status_succeeds(s, r);
}
IN_BOTH(last_extent_may_reach_behind_the_request)

// "the sum of the length fields of the first N-1 extents MUST be less than the
// requested length"
static void extents_that_fill_the_request_have_no_successor(script *s, int protocol)
{
    static const extent two[] = {{8192, 0}, {512, 1}};
    int r = open_and_ask(s, protocol, 0);

    extents_end_it(s, r, BASE_ID, two, 2, 0);
}
IN_BOTH(extents_that_fill_the_request_have_no_successor)

static void extent_in_the_middle_may_not_fill_the_request(script *s, int protocol)
{
    static const extent three[] = {{4096, 0}, {4096, 1}, {1, 0}};
    int r = open_and_ask(s, protocol, 0);

    extents_end_it(s, r, DIRTY_ID, three, 3, 1);
}
IN_BOTH(extent_in_the_middle_may_not_fill_the_request)

static void empty_first_extent_ends_it(script *s, int protocol)
{
    static const extent two[] = {{0, 0}, {8192, 0}};
    int r = open_and_ask(s, protocol, 0);

    extents_end_it(s, r, BASE_ID, two, 2, 0);
}
IN_BOTH(empty_first_extent_ends_it)

static void empty_last_extent_ends_it(script *s, int protocol)
{
    static const extent two[] = {{4096, 0}, {0, 0}};
    int r = open_and_ask(s, protocol, 0);

    extents_end_it(s, r, BASE_ID, two, 2, 1);
}
IN_BOTH(empty_last_extent_ends_it)

static void extents_may_end_before_the_request(script *s, int protocol)
{
    static const extent three[] = {{1, 0}, {1, 0}, {1, 0}};
    int r = open_and_ask(s, protocol, 0);

    extents_come(s, r, MORE, BASE_ID, three, 3);
    one_extent_comes(s, r, DONE, DIRTY_ID, 8191);
    status_succeeds(s, r);
}
IN_BOTH(extents_may_end_before_the_request)

static void extents_of_64_bits_are_told(script *s)
{
    static const extent dirty[] = {{UINT64_C(1) << 62, 0}, {UINT64_C(1) << 63, 1}};
    static const extent base = {UINT64_MAX, 2};
    int r;

    open_contexts(s, NBD_PROTOCOL_EXTENDED, status_names, status_ids, 2, UINT64_MAX, EXPORT_FLAGS);
    r = ask_status_of(s, 0, 0, UINT64_C(1) << 63);
    extents_come(s, r, MORE, DIRTY_ID, dirty, 2);
    extents_come(s, r, DONE, BASE_ID, &base, 1);
    status_succeeds(s, r);
}

static void extent_that_ends_behind_2_64_ends_it(script *s)
{
    static const extent one = {UINT64_MAX - 65535, 0};
    int r = open_and_ask(s, NBD_PROTOCOL_EXTENDED, 0);

    extents_end_it(s, r, BASE_ID, &one, 1, 0);
}

static void extent_that_ends_right_before_2_64_is_told(script *s)
{
    int r = open_and_ask(s, NBD_PROTOCOL_EXTENDED, 0);

    one_extent_comes(s, r, MORE, BASE_ID, UINT64_MAX - 65536);
    one_extent_comes(s, r, DONE, DIRTY_ID, UINT64_C(1) << 63);
    status_succeeds(s, r);
}

static void extent_of_2_63_in_the_middle_ends_it(script *s)
{
    static const extent two[] = {{UINT64_C(1) << 63, 0}, {UINT64_C(1) << 63, 0}};
    int r = open_and_ask(s, NBD_PROTOCOL_EXTENDED, 0);

    extents_end_it(s, r, BASE_ID, two, 2, 0);
}

static void the_one_extent_of_2_64_ends_it(script *s)
{
    static const extent one = {UINT64_MAX - 70000, 0};
    int r = open_and_ask(s, NBD_PROTOCOL_EXTENDED, NBD_REQ_ONE);

    extents_end_it(s, r, BASE_ID, &one, 1, 0);
}

/// Status flags ///

static void all_32_status_flags_are_told(script *s, int protocol)
{
    static const extent all = {8192, UINT32_C(0xFFFFFFFF)};
    int r = open_and_ask(s, protocol, 0);

    extents_come(s, r, MORE, BASE_ID, &all, 1);
    extents_come(s, r, DONE, DIRTY_ID, &all, 1);
    status_succeeds(s, r);
}
IN_BOTH(all_32_status_flags_are_told)

static void status_flags_above_32_bits_are_passed_on(script *s)
{
    static const extent two[] = {{4096, UINT64_MAX}, {4096, UINT64_C(1) << 32}};
    int r = open_and_ask(s, NBD_PROTOCOL_EXTENDED, 0);

    extents_come(s, r, MORE, DIRTY_ID, two, 2);
    one_extent_comes(s, r, DONE, BASE_ID, 8192);
    status_succeeds(s, r);
}

// "For metadata contexts that only return a 32-bit status (including all contexts in
// the "base:" namespace), the most-significant 32 bits of status MUST be all zeroes."
static void status_flags_above_32_bits_of_base_end_it(script *s)
{
    static const extent one = {8192, UINT64_C(1) << 32};
    int r = open_and_ask(s, NBD_PROTOCOL_EXTENDED, 0);

    extents_end_it(s, r, BASE_ID, &one, 1, 0);
}

static void namespace_that_only_begins_like_base_is_another(script *s)
{
    s->unlawful = 1;
    static const char *const names[] = {"baseline:x", "base"};
    static const uint32_t ids[] = {1, 2};
    static const extent wide = {8192, UINT64_MAX};
    int r;

    open_contexts(s, NBD_PROTOCOL_EXTENDED, names, ids, 2, EXPORT_SIZE, EXPORT_FLAGS);
    r = ask_status_of(s, 0, 0, 8192);
    send_extents(s, r, MORE, 2, &wide, 1);
    see_extent(s, r, 1, 0, wide);
    send_extents(s, r, DONE, 1, &wide, 1);
    see_extent(s, r, 0, 0, wide);
    status_succeeds(s, r);
}

/// Chunks that do not fit ///

// A chunk of this type and length, and no more of it.
static void status_header_ends_it(script *s, int protocol, unsigned type, uint64_t length)
{
    int r = open_and_ask(s, protocol, 0);

    script_close(s, send_chunk_open(s, r, DONE, type, length));
    die(s, r, NBD_ERR_PROTOCOL);
}

static void structured_chunk_without_an_extent_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_STRUCTURED, TYPE_EXTENTS, 4);
}

static void structured_chunk_of_11_bytes_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_STRUCTURED, TYPE_EXTENTS, 11);
}

static void structured_chunk_of_13_bytes_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_STRUCTURED, TYPE_EXTENTS, 13);
}

static void structured_chunk_of_2_20_extents_and_one_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_STRUCTURED, TYPE_EXTENTS, 4 + 8 * ((1u << 20) + 1));
}

static void structured_chunk_of_64_bit_extents_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_STRUCTURED, TYPE_EXTENTS_64, 24);
}

static void extended_chunk_without_an_extent_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_EXTENDED, TYPE_EXTENTS_64, 8);
}

static void extended_chunk_of_23_bytes_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_EXTENDED, TYPE_EXTENTS_64, 23);
}

static void extended_chunk_of_25_bytes_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_EXTENDED, TYPE_EXTENTS_64, 25);
}

static void extended_chunk_of_2_20_extents_and_one_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_EXTENDED, TYPE_EXTENTS_64, 8 + 16 * ((1u << 20) + 1));
}

static void extended_chunk_of_2_32_and_24_bytes_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_EXTENDED, TYPE_EXTENTS_64, (UINT64_C(1) << 32) + 24);
}

static void extended_chunk_of_32_bit_extents_ends_it(script *s)
{
    status_header_ends_it(s, NBD_PROTOCOL_EXTENDED, TYPE_EXTENTS, 12);
}

// A chunk of one extent that says it has `count` of them.
static void count_ends_it(script *s, uint32_t count)
{
    int r = open_and_ask(s, NBD_PROTOCOL_EXTENDED, 0);
    step *sent = send_chunk_open(s, r, DONE, TYPE_EXTENTS_64, 24);

    put(s, BASE_ID, 4);
    put(s, count, 4);
    put(s, 8192, 8);
    put(s, 0, 8);
    script_close(s, sent);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void count_of_no_extent_ends_it(script *s)
{
    count_ends_it(s, 0);
}

static void count_of_one_extent_more_ends_it(script *s)
{
    count_ends_it(s, 2);
}

// 16 times this is the right length in 32 bits.
static void count_that_wraps_to_the_length_ends_it(script *s)
{
    count_ends_it(s, (1u << 28) + 1);
}

static void extents_for_a_read_end_it(script *s, int protocol)
{
    static const extent one = {512, 0};
    int r;

    open_status(s, protocol);
    r = client_issues(s, NBD_READ, 0, 0, 512);
    want_request(s, r);
    extents_end_it(s, r, BASE_ID, &one, 1, 0);
}
IN_BOTH(extents_for_a_read_end_it)

static void data_for_block_status_ends_it(script *s, int protocol)
{
    int r = open_and_ask(s, protocol, 0);

    send_chunk(s, r, DONE, TYPE_DATA, "\0\0\0\0\0\1\0\0x", 9);
    die(s, r, NBD_ERR_PROTOCOL);
}
IN_BOTH(data_for_block_status_ends_it)

static void hole_for_block_status_ends_it(script *s, int protocol)
{
    int r = open_and_ask(s, protocol, 0);

    send_chunk(s, r, DONE, TYPE_HOLE, "\0\0\0\0\0\1\0\0\0\0\0\1", 12);
    die(s, r, NBD_ERR_PROTOCOL);
}
IN_BOTH(hole_for_block_status_ends_it)

static void simple_success_of_block_status_ends_it(script *s)
{
    int r = open_and_ask(s, NBD_PROTOCOL_STRUCTURED, 0);

    send_simple(s, r, 0);
    die(s, r, NBD_ERR_PROTOCOL);
}

static void simple_error_of_block_status_is_told(script *s)
{
    int r = open_and_ask(s, NBD_PROTOCOL_STRUCTURED, 0);

    send_simple(s, r, NBD_EINVAL);
    see_done(s, r, NBD_EINVAL);
    close_session(s);
}

/// Contexts chosen by the request ///

static const uint32_t only_base[] = {BASE};
static const uint32_t only_base_ids[] = {BASE_ID};
static const uint32_t base_and_dirty[] = {BASE, DIRTY};
static const uint32_t base_and_dirty_ids[] = {BASE_ID, DIRTY_ID};

static nbd_op status_of(const uint32_t *contexts, uint32_t count)
{
    nbd_op op = NBD_ZERO;

    op.command = NBD_BLOCK_STATUS;
    op.offset = 65536;
    op.size = 8192;
    op.contexts = contexts;
    op.context_count = count;
    return op;
}

static int ask_base_only(script *s, uint32_t flags)
{
    nbd_op op = status_of(only_base, 1);
    int r;

    op.flags = flags;
    open_status(s, NBD_PROTOCOL_EXTENDED);
    r = client_issues_op(s, &op);
    want_status(s, r, only_base_ids);
    return r;
}

static void one_context_of_two_is_asked_for(script *s)
{
    int r = ask_base_only(s, 0);

    one_extent_comes(s, r, DONE, BASE_ID, 8192);
    status_succeeds(s, r);
}

static void one_extent_of_one_context_is_asked_for(script *s)
{
    int r = ask_base_only(s, NBD_REQ_ONE);

    one_extent_comes(s, r, MORE, BASE_ID, 512);
    send_none(s, r);
    status_succeeds(s, r);
}

static void both_contexts_are_asked_for_by_name(script *s)
{
    nbd_op op = status_of(base_and_dirty, 2);
    int r, flush;

    open_status(s, NBD_PROTOCOL_EXTENDED);
    op.offset = 4096;
    r = client_issues_op(s, &op);
    flush = client_issues(s, NBD_FLUSH, 0, 0, 0);
    want_status(s, r, base_and_dirty_ids);
    want_request(s, flush);
    send_none(s, flush);
    see_done(s, flush, 0);
    one_extent_comes(s, r, MORE, DIRTY_ID, 8192);
    one_extent_comes(s, r, DONE, BASE_ID, 8192);
    status_succeeds(s, r);
}

static void length_above_32_bits_stands_in_the_payload(script *s)
{
    nbd_op op = status_of(only_base, 1);
    int r;

    open_contexts(s, NBD_PROTOCOL_EXTENDED, status_names, status_ids, 2, UINT64_C(1) << 40,
                  STATUS_FLAGS);
    op.offset = UINT64_C(1) << 33;
    op.size = UINT64_C(1) << 39;
    r = client_issues_op(s, &op);
    want_status(s, r, only_base_ids);
    one_extent_comes(s, r, DONE, BASE_ID, UINT64_C(1) << 39);
    status_succeeds(s, r);
}

static void the_next_request_asks_for_all_again(script *s)
{
    int r = ask_base_only(s, 0);

    one_extent_comes(s, r, DONE, BASE_ID, 8192);
    see_done(s, r, 0);
    r = ask_status_of(s, 0, 0, 512);
    one_extent_comes(s, r, MORE, BASE_ID, 512);
    one_extent_comes(s, r, DONE, DIRTY_ID, 512);
    status_succeeds(s, r);
}

static void context_not_asked_for_ends_it(script *s)
{
    static const extent one = {8192, 0};
    int r = ask_base_only(s, 0);

    extents_end_it(s, r, DIRTY_ID, &one, 1, 0);
}

static void missing_context_of_those_asked_for_is_a_gap(script *s)
{
    int r = ask_base_only(s, 0);

    send_none(s, r);
    see_done(s, r, NBD_ERR_GAP);
    close_session(s);
}

static void refused_choice_of_contexts_keeps_its_error(script *s)
{
    int r = ask_base_only(s, 0);

    send_error(s, r, DONE, NBD_EINVAL, "no");
    see_message(s, r, 0, NBD_EINVAL, "no");
    see_done(s, r, NBD_EINVAL);
    close_session(s);
}

// A choice that is refused here, and none of its bytes go out.
static void choice_is_refused(script *s, const nbd_op *op, int error)
{
    op_is_refused_here(s, op, error);
    close_session(s);
}

static unsigned char status_memory[16];

static const nbd_op *choice_of(const uint32_t *contexts, uint32_t count)
{
    static nbd_op op;

    op = status_of(contexts, count);
    op.buffer = status_memory;
    return &op;
}

static void index_out_of_range_is_refused(script *s)
{
    static const uint32_t contexts[] = {0, 2};

    open_status(s, NBD_PROTOCOL_EXTENDED);
    choice_is_refused(s, choice_of(contexts, 2), NBD_ERR_ARG);
}

static void index_given_twice_is_refused(script *s)
{
    static const uint32_t contexts[] = {1, 1};

    open_status(s, NBD_PROTOCOL_EXTENDED);
    choice_is_refused(s, choice_of(contexts, 2), NBD_ERR_ARG);
}

static void choice_of_nothing_is_refused(script *s)
{
    open_status(s, NBD_PROTOCOL_EXTENDED);
    choice_is_refused(s, choice_of(only_base, 0), NBD_ERR_ARG);
}

static void choice_without_memory_is_refused(script *s)
{
    static nbd_op op;

    op = status_of(only_base, 1);
    open_status(s, NBD_PROTOCOL_EXTENDED);
    choice_is_refused(s, &op, NBD_ERR_ARG);
}

static void choice_that_is_not_offered_is_refused(script *s)
{
    open_contexts(s, NBD_PROTOCOL_EXTENDED, status_names, status_ids, 2, EXPORT_SIZE, EXPORT_FLAGS);
    choice_is_refused(s, choice_of(only_base, 1), NBD_ERR_UNSUPPORTED);
}

// "Servers MUST NOT advertise this bit unless the client successfully negotiates extended
// headers": a header without the flag must not be followed by a payload.
static void choice_without_extended_headers_is_refused(script *s)
{
    open_contexts(s, NBD_PROTOCOL_STRUCTURED, status_names, status_ids, 2, EXPORT_SIZE,
                  STATUS_FLAGS);
    choice_is_refused(s, choice_of(only_base, 1), NBD_ERR_UNSUPPORTED);
}

static const session status_sessions[] = {
    BOTH_OF(contexts_come_in_their_order),
    BOTH_OF(contexts_come_in_another_order),
    BOTH_OF(contexts_are_interleaved_with_other_replies),
    BOTH_OF(context_that_was_not_agreed_on_ends_it),
    BOTH_OF(context_told_twice_ends_it),
    BOTH_OF(missing_context_is_a_gap),
    BOTH_OF(no_context_at_all_is_a_gap),
    BOTH_OF(error_of_one_context_fails_the_request),
    BOTH_OF(as_many_contexts_as_there_can_be),
    BOTH_OF(one_extent_each_is_asked_for),
    BOTH_OF(second_extent_where_one_was_asked_for_ends_it),
    BOTH_OF(the_one_extent_longer_than_the_request_ends_it),
    BOTH_OF(last_extent_may_reach_behind_the_request),
    BOTH_OF(extents_that_fill_the_request_have_no_successor),
    BOTH_OF(extent_in_the_middle_may_not_fill_the_request),
    BOTH_OF(empty_first_extent_ends_it),
    BOTH_OF(empty_last_extent_ends_it),
    BOTH_OF(extents_may_end_before_the_request),
    SESSION_OF(extents_of_64_bits_are_told),
    SESSION_OF(extent_that_ends_behind_2_64_ends_it),
    SESSION_OF(extent_that_ends_right_before_2_64_is_told),
    SESSION_OF(extent_of_2_63_in_the_middle_ends_it),
    SESSION_OF(the_one_extent_of_2_64_ends_it),
    BOTH_OF(all_32_status_flags_are_told),
    SESSION_OF(status_flags_above_32_bits_are_passed_on),
    SESSION_OF(status_flags_above_32_bits_of_base_end_it),
    SESSION_OF(namespace_that_only_begins_like_base_is_another),
    SESSION_OF(structured_chunk_without_an_extent_ends_it),
    SESSION_OF(structured_chunk_of_11_bytes_ends_it),
    SESSION_OF(structured_chunk_of_13_bytes_ends_it),
    SESSION_OF(structured_chunk_of_2_20_extents_and_one_ends_it),
    SESSION_OF(structured_chunk_of_64_bit_extents_ends_it),
    SESSION_OF(extended_chunk_without_an_extent_ends_it),
    SESSION_OF(extended_chunk_of_23_bytes_ends_it),
    SESSION_OF(extended_chunk_of_25_bytes_ends_it),
    SESSION_OF(extended_chunk_of_2_20_extents_and_one_ends_it),
    SESSION_OF(extended_chunk_of_2_32_and_24_bytes_ends_it),
    SESSION_OF(extended_chunk_of_32_bit_extents_ends_it),
    SESSION_OF(count_of_no_extent_ends_it),
    SESSION_OF(count_of_one_extent_more_ends_it),
    SESSION_OF(count_that_wraps_to_the_length_ends_it),
    BOTH_OF(extents_for_a_read_end_it),
    BOTH_OF(data_for_block_status_ends_it),
    BOTH_OF(hole_for_block_status_ends_it),
    SESSION_OF(simple_success_of_block_status_ends_it),
    SESSION_OF(simple_error_of_block_status_is_told),
    SESSION_OF(one_context_of_two_is_asked_for),
    SESSION_OF(one_extent_of_one_context_is_asked_for),
    SESSION_OF(both_contexts_are_asked_for_by_name),
    SESSION_OF(length_above_32_bits_stands_in_the_payload),
    SESSION_OF(the_next_request_asks_for_all_again),
    SESSION_OF(context_not_asked_for_ends_it),
    SESSION_OF(missing_context_of_those_asked_for_is_a_gap),
    SESSION_OF(refused_choice_of_contexts_keeps_its_error),
    SESSION_OF(index_out_of_range_is_refused),
    SESSION_OF(index_given_twice_is_refused),
    SESSION_OF(choice_of_nothing_is_refused),
    SESSION_OF(choice_without_memory_is_refused),
    SESSION_OF(choice_that_is_not_offered_is_refused),
    SESSION_OF(choice_without_extended_headers_is_refused),
};

enum { STATUS_SESSIONS = sizeof status_sessions / sizeof status_sessions[0] };

#ifndef SESSIONS_ONLY

/// The longest chunk ///

enum { MOST_EXTENTS = 1 << 20, EXTENTS_AT_ONCE = 64 };

static nbd_client status_client;
static uint64_t extents_seen;
static uint64_t extents_end;
static int status_result;

static void pull_status_events(void)
{
    nbd_event event;

    while (nbd_next(&status_client, &event)) {
        if (event.type == NBD_EVENT_EXTENT) {
            CHECK_EQUAL(event.context, 0);
            CHECK_EQUAL(event.offset, extents_end);
            CHECK_EQUAL(event.size, 1 + extents_seen % 3);
            CHECK_EQUAL(event.flags, extents_seen % 5);
            extents_seen++;
            extents_end += event.size;
        } else if (event.type == NBD_EVENT_DONE) {
            status_result = event.error;
        }
    }
}

static void drain_status_client(void)
{
    nbd_iovec iov[8];
    unsigned flags, count;

    while ((count = nbd_outgoing(&status_client, iov, 8, &flags)) > 0)
        CHECK_EQUAL(nbd_sent(&status_client, (ptrdiff_t)iov_sum(iov, count)), 0);
    pull_status_events();
}

static void feed_status_client(const unsigned char *bytes, size_t size)
{
    while (size) {
        nbd_iovec iov;
        size_t now;

        CHECK_EQUAL(nbd_incoming(&status_client, &iov, 1), 1);
        now = smaller(iov.size, size);
        memcpy(iov.base, bytes, now);
        CHECK_EQUAL(nbd_received(&status_client, (ptrdiff_t)now), 0);
        pull_status_events();
        bytes += now;
        size -= now;
    }
}

// READY with one context, in the least buffer; behind it and the one slot is no memory.
static void status_client_is_ready(int protocol)
{
    static script written;
    static nbd_context contexts[1];
    static const uint32_t ids[] = {DIRTY_ID};
    nbd_config config;
    size_t i;

    memset(&written, 0, offsetof(script, bytes));
    open_contexts(&written, protocol, status_names, ids, 1, UINT64_C(1) << 31, EXPORT_FLAGS);
    config = written.config;
    config.slot_count = 1;
    config.slots = region_last(SCRIPT_REQUESTS + 1, sizeof(nbd_slot));
    config.buffer_size = NBD_BUFFER_MIN;
    config.buffer = region_last(SCRIPT_REQUESTS, NBD_BUFFER_MIN);
    config.contexts = contexts;
    config.context_count = 1;
    CHECK_EQUAL(nbd_init(&status_client, &config), 0);
    CHECK_EQUAL(nbd_connect(&status_client, NULL), 0);
    for (i = 0; i < written.step_count; i++) {
        drain_status_client();
        if (written.steps[i].kind == STEP_SEND) {
            feed_status_client(written.steps[i].bytes, written.steps[i].size);
        }
    }
    CHECK_EQUAL(nbd_phase(&status_client), NBD_PHASE_TRANSMISSION);
    CHECK_EQUAL(nbd_negotiated(&status_client)->protocol, protocol);
}

static void feed_extents(int protocol, uint64_t cookie)
{
    static script bytes;
    int extended = protocol == NBD_PROTOCOL_EXTENDED;
    unsigned width = extended ? 8 : 4;
    uint32_t i;

    bytes.used = 0;
    put(&bytes, extended ? 0x6E8A278C : 0x668E33EF, 4);
    put(&bytes, DONE, 2);
    put(&bytes, extended ? TYPE_EXTENTS_64 : TYPE_EXTENTS, 2);
    put(&bytes, cookie, 8);
    if (extended) put(&bytes, 0, 8);
    put(&bytes, width + (uint64_t)MOST_EXTENTS * 2 * width, width);
    put(&bytes, DIRTY_ID, 4);
    if (extended) put(&bytes, MOST_EXTENTS, 4);
    for (i = 0; i < MOST_EXTENTS; i++) {
        put(&bytes, 1 + i % 3, width);
        put(&bytes, i % 5, width);
        if (i % EXTENTS_AT_ONCE) continue;
        feed_status_client(bytes.bytes, bytes.used);
        bytes.used = 0;
    }
    CHECK_EQUAL(nbd_count(&status_client)->in_flight, 1);
    feed_status_client(bytes.bytes, bytes.used);
}

static void longest_chunk_is_told(int protocol)
{
    nbd_op op = NBD_ZERO;
    uint64_t id = 0;

    status_client_is_ready(protocol);
    extents_seen = extents_end = 0;
    status_result = -1;
    op.command = NBD_BLOCK_STATUS;
    op.size = UINT64_C(1) << 31;
    CHECK_EQUAL(nbd_issue(&status_client, &op, &id), 0);
    drain_status_client();
    feed_extents(protocol, id);
    CHECK_EQUAL(extents_seen, MOST_EXTENTS);
    CHECK_EQUAL(status_result, 0);
}

static void chunk_of_2_20_extents_needs_no_more_than_the_least_buffer(void)
{
    longest_chunk_is_told(NBD_PROTOCOL_STRUCTURED);
}

static void chunk_of_2_20_wide_extents_needs_no_more_than_the_least_buffer(void)
{
    longest_chunk_is_told(NBD_PROTOCOL_EXTENDED);
}

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < STATUS_SESSIONS; i++) {
        const session *of = &status_sessions[i];

        check_case_on(of->name, session_in_every_mode, of);
    }
    CHECK_CASE(chunk_of_2_20_extents_needs_no_more_than_the_least_buffer);
    CHECK_CASE(chunk_of_2_20_wide_extents_needs_no_more_than_the_least_buffer);
    return check_end();
}

#endif
