// Options that the program drives: each rule is a session, played in every mode of
// play.h.  Then every order of them, and a long option against a server that answers
// while it reads.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

static const char *const some_queries[] = {"base:allocation", "qemu:dirty-bitmap:b0"};

/// Answers ///

enum answer { ACCEPTED, REFUSED, REFUSED_WITH_TEXT };

static void ask_option(script *s, uint32_t option)
{
    if (option == 6) {
        client_asks(s, 6, "disk");
        want_info(s, 6, "disk");
        send_info_export(s, 6, EXPORT_SIZE, EXPORT_FLAGS);
    } else if (option == 9 || option == 10) {
        client_asks_contexts(s, option, "disk", some_queries, 2);
        want_meta(s, option, "disk", some_queries, 2);
        tell_context(s, option, 0, 7, "base:allocation");
    } else {
        client_asks(s, option, NULL);
        want_option(s, option, "", 0);
    }
    if (option == 3) {
        send_server(s, "disk", "round");
        see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "disk");
        see_text(s, SESSION, 3, NBD_TEXT_DESCRIPTION, "round");
    }
}

static void answer_option(script *s, uint32_t option, enum answer answer, uint32_t number)
{
    ask_option(s, option);
    if (answer == ACCEPTED) {
        send_ack(s, option);
        see_option(s, option, 0);
    } else {
        refuse_option(s, option, number, answer == REFUSED ? "" : "not today\n");
    }
}

static void every_option(script *s, enum answer answer, uint32_t number)
{
    static const uint32_t order[] = {8, 3, 6, 9, 10, 6, 3};
    size_t i;

    open_options(s);
    option_succeeds(s, 8);
    for (i = 0; i < sizeof order / sizeof order[0]; i++)
        answer_option(s, order[i], answer, number);
    s->protocol = NBD_PROTOCOL_STRUCTURED;
    go_asked(s, "disk");
    close_session(s);
}

static void every_option_is_accepted(script *s)
{
    every_option(s, ACCEPTED, 0);
}

static void every_option_is_refused(script *s)
{
    every_option(s, REFUSED, 2);
}

static void every_option_is_refused_with_text(script *s)
{
    every_option(s, REFUSED_WITH_TEXT, 4);
}

// NBD_REP_ERR_SHUTDOWN, number 7, is the one that ends the session.
static void every_refusal_is_told(script *s)
{
    static const uint32_t numbers[] = {1, 2, 3, 4, 5, 6, 8, 9, 10, 11};
    size_t i;

    open_options(s);
    for (i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        answer_option(s, 3, i % 2 ? REFUSED : REFUSED_WITH_TEXT, numbers[i]);
    go_asked(s, "");
    close_session(s);
}

static void unknown_refusal_keeps_its_number(script *s)
{
    open_options(s);
    client_asks(s, 8, NULL);
    want_option(s, 8, "", 0);
    send_refusal(s, 8, UINT32_C(0x7FFFFFFF), "");
    see_option(s, 8, NBD_REP_ERR_OTHER)->server_error = UINT32_C(0xFFFFFFFF);
    client_asks(s, 8, NULL);
    want_option(s, 8, "", 0);
    send_refusal(s, 8, 0, "");
    see_option(s, 8, NBD_REP_ERR_OTHER)->server_error = UINT32_C(0x80000000);
    go_asked(s, "");
    close_session(s);
}

// "If the client receives NBD_REP_ERR_SHUTDOWN it MUST initiate a soft disconnect."
static void shutdown_refusal_aborts(script *s)
{
    open_options(s);
    client_asks(s, 3, NULL);
    want_option(s, 3, "", 0);
    send_refusal(s, 3, 7, "closing time");
    see_message(s, SESSION, 3, NBD_REP_ERR_SHUTDOWN, "closing time");
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, NBD_REP_ERR_SHUTDOWN);
}

static void longest_refusal_is_handed_out_whole(script *s)
{
    static char text[4097];

    memset(text, 't', 4096);
    open_options(s);
    client_asks(s, 3, NULL);
    want_option(s, 3, "", 0);
    refuse_option(s, 3, 1, text);
    go_asked(s, "");
    close_session(s);
}

static void second_option_waits_for_the_first(script *s)
{
    open_options(s);
    client_asks(s, 8, NULL);
    option_is_refused_here(s, 3, NBD_ERR_STATE);
    want_option(s, 8, "", 0);
    send_ack(s, 8);
    see_option(s, 8, 0);
    answer_option(s, 3, ACCEPTED, 0);
    s->protocol = NBD_PROTOCOL_STRUCTURED;
    go_asked(s, "");
    close_session(s);
}

static void refused_go_may_be_asked_again(script *s)
{
    open_options(s);
    client_asks(s, 7, "absent");
    want_go(s, "absent");
    refuse_option(s, 7, 6, "no such export");
    client_asks(s, 7, "strict");
    want_go(s, "strict");
    refuse_option(s, 7, 8, "");
    go_asked(s, "disk");
    close_session(s);
}

static void export_name_enters_transmission(script *s)
{
    open_options(s);
    client_asks(s, 1, "disk");
    want_export_name(s, "disk");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    close_session(s);
}

// "Once extended headers are successfully requested, a client MUST NOT use
// NBD_OPT_EXPORT_NAME."
static void export_name_is_refused_after_extended_headers(script *s)
{
    open_options(s);
    option_succeeds(s, 11);
    option_is_refused_here(s, 1, NBD_ERR_UNSUPPORTED);
    s->protocol = NBD_PROTOCOL_EXTENDED;
    go_asked(s, "");
    close_session(s);
}

static void structured_replies_do_not_take_extended_headers_back(script *s)
{
    open_options(s);
    option_succeeds(s, 8);
    option_succeeds(s, 11);
    option_succeeds(s, 8);
    client_asks(s, 8, NULL);
    want_option(s, 8, "", 0);
    refuse_option(s, 8, 10, "");
    s->protocol = NBD_PROTOCOL_EXTENDED;
    go_asked(s, "");
    close_session(s);
}

static void plain_newstyle_server_knows_export_name_only(script *s)
{
    s->config.flags |= NBD_NEGOTIATE;
    send_greeting(s, NO_ZEROES);
    want_client_flags(s, NO_ZEROES);
    see_option(s, 0, 0);
    option_is_refused_here(s, 7, NBD_ERR_UNSUPPORTED);
    client_asks(s, 1, "disk");
    want_export_name(s, "disk");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    close_session(s);
}

/// Raw options ///

static void raw_option_goes_out_as_it_is(script *s)
{
    open_options(s);
    client_asks_raw(s, UINT32_C(0xFFFFFFFE), "\0\1\2\3", 4);
    want_option(s, UINT32_C(0xFFFFFFFE), "\0\1\2\3", 4);
    send_ack(s, UINT32_C(0xFFFFFFFE));
    see_option(s, UINT32_C(0xFFFFFFFE), 0);
    client_asks_raw(s, 99, NULL, 0);
    want_option(s, 99, "", 0);
    refuse_option(s, 99, 1, "what is 99?");
    go_asked(s, "");
    close_session(s);
}

static void list_with_data_goes_out_as_it_is(script *s)
{
    s->unlawful = 1;
    open_options(s);
    client_asks_raw(s, 3, "why", 3);
    want_option(s, 3, "why", 3);
    refuse_option(s, 3, 3, "LIST takes no data");
    client_asks_raw(s, 3, "", 0);
    want_option(s, 3, "", 0);
    send_server(s, "disk", "");
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "disk");
    send_ack(s, 3);
    see_option(s, 3, 0);
    go_asked(s, "");
    close_session(s);
}

// The rules of the answer stay those of the option.
static void raw_go_enters_transmission(script *s)
{
    open_options(s);
    client_asks_raw(s, 7, "\0\0\0\1x\0\0", 7);
    want_option(s, 7, "\0\0\0\1x\0\0", 7);
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    see_ready(s);
    close_session(s);
}

/// LIST ///

static void ask_list(script *s)
{
    open_options(s);
    client_asks(s, 3, NULL);
    want_option(s, 3, "", 0);
}

static void end_list(script *s)
{
    send_ack(s, 3);
    see_option(s, 3, 0);
    go_asked(s, "");
    close_session(s);
}

static void many_exports_are_listed(script *s)
{
    static char names[100][16];
    unsigned i;

    ask_list(s);
    for (i = 0; i < 100; i++) {
        snprintf(names[i], sizeof names[i], "export-%u", i);
        send_server(s, names[i], i % 2 ? "odd" : "");
        see_text(s, SESSION, 3, NBD_TEXT_EXPORT, names[i]);
        if (i % 2) see_text(s, SESSION, 3, NBD_TEXT_DESCRIPTION, "odd");
    }
    end_list(s);
}

static void no_export_is_listed(script *s)
{
    ask_list(s);
    end_list(s);
}

static void longest_name_and_description_are_listed(script *s)
{
    static char name[4097], description[4097];

    memset(name, 'n', 4096);
    memset(description, 'd', 4096);
    ask_list(s);
    send_server(s, name, description);
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, name);
    see_text(s, SESSION, 3, NBD_TEXT_DESCRIPTION, description);
    send_server(s, "", description);
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "");
    see_text(s, SESSION, 3, NBD_TEXT_DESCRIPTION, description);
    end_list(s);
}

// A reply to LIST of this length whose name has that length, and no more of it.
static void listed_until_name(script *s, uint32_t length, uint32_t name)
{
    step *sent;

    ask_list(s);
    sent = send_reply_open(s, 3, 2, length);
    put(s, name, 4);
    script_close(s, sent);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void listed_name_of_4097_bytes_ends_it(script *s)
{
    listed_until_name(s, 4 + 4097, 4097);
}

static void listed_description_of_4097_bytes_ends_it(script *s)
{
    listed_until_name(s, 4 + 4097, 0);
}

static void listed_name_one_byte_longer_than_its_reply_ends_it(script *s)
{
    listed_until_name(s, 4 + 10, 11);
}

static void listed_name_of_all_ones_ends_it(script *s)
{
    listed_until_name(s, 4 + 10, UINT32_C(0xFFFFFFFF));
}

static void list_reply_header_ends_it(script *s, uint32_t length)
{
    ask_list(s);
    script_close(s, send_reply_open(s, 3, 2, length));
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void list_reply_longer_than_two_names_ends_it(script *s)
{
    list_reply_header_ends_it(s, 4 + 2 * 4096 + 1);
}

static void list_reply_of_3_bytes_ends_it(script *s)
{
    list_reply_header_ends_it(s, 3);
}

static void list_reply_of_4_gigabytes_ends_it(script *s)
{
    list_reply_header_ends_it(s, UINT32_C(0xFFFFFFFF));
}

/// INFO ///

static void ask_info(script *s)
{
    open_options(s);
    client_asks(s, 6, "disk");
    want_info(s, 6, "disk");
}

static void end_info(script *s)
{
    send_info_export(s, 6, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 6);
    see_option(s, 6, 0);
    go_asked(s, "disk");
    close_session(s);
}

static void information_twice_and_then_go(script *s)
{
    ask_info(s);
    send_info_export(s, 6, 4096, NBD_OFFERS_FLAGS | NBD_OFFERS_READ_ONLY);
    send_info_block_size(s, 6, 512, 1024, 2048);
    send_ack(s, 6);
    see_option(s, 6, 0);
    client_asks(s, 6, "other");
    want_info(s, 6, "other");
    send_info_export(s, 6, 8192, NBD_OFFERS_FLAGS);
    send_info_text(s, 6, 1, "other");
    see_text(s, SESSION, 6, NBD_TEXT_NAME, "other");
    send_ack(s, 6);
    see_option(s, 6, 0);
    go_asked(s, "disk");
    close_session(s);
}

static void unknown_information_is_passed_over(script *s)
{
    static char all[65535];

    memset(all, 'u', 65534);
    ask_info(s);
    send_info_text(s, 6, 4, "");
    send_info_text(s, 6, 0xFFFF, "of the future");
    send_info_text(s, 6, 0x8000, all);
    end_info(s);
}

static void empty_name_and_description_are_told(script *s)
{
    ask_info(s);
    send_info_text(s, 6, 1, "");
    see_text(s, SESSION, 6, NBD_TEXT_NAME, "");
    send_info_text(s, 6, 2, "");
    see_text(s, SESSION, 6, NBD_TEXT_DESCRIPTION, "");
    end_info(s);
}

static void longest_description_is_told(script *s)
{
    static char text[4097];

    memset(text, 'd', 4096);
    ask_info(s);
    send_info_text(s, 6, 2, text);
    see_text(s, SESSION, 6, NBD_TEXT_DESCRIPTION, text);
    end_info(s);
}

// A reply to INFO of this length and type, and no more of it.
static void information_ends_it(script *s, uint32_t length, unsigned type)
{
    step *sent;

    ask_info(s);
    sent = send_reply_open(s, 6, 3, length);
    put(s, type, 2);
    script_close(s, sent);
    see_closed(s, NBD_ERR_PROTOCOL);
}

// "bit 0, NBD_FLAG_HAS_FLAGS: MUST always be 1."
static void export_without_has_flags_ends_it(script *s)
{
    ask_info(s);
    send_info_export(s, 6, EXPORT_SIZE, EXPORT_FLAGS & ~NBD_OFFERS_FLAGS);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void name_of_4097_bytes_ends_it(script *s)
{
    information_ends_it(s, 2 + 4097, 1);
}

static void description_of_4097_bytes_ends_it(script *s)
{
    information_ends_it(s, 2 + 4097, 2);
}

static void unknown_information_beyond_64_kib_ends_it(script *s)
{
    ask_info(s);
    script_close(s, send_reply_open(s, 6, 3, 65537));
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void export_information_of_11_bytes_ends_it(script *s)
{
    information_ends_it(s, 11, 0);
}

static void export_information_of_13_bytes_ends_it(script *s)
{
    information_ends_it(s, 13, 0);
}

static void block_sizes_of_13_bytes_end_it(script *s)
{
    information_ends_it(s, 13, 3);
}

static void block_sizes_of_15_bytes_end_it(script *s)
{
    information_ends_it(s, 15, 3);
}

static void information_acknowledged_without_an_export_ends_it(script *s)
{
    ask_info(s);
    send_info_text(s, 6, 1, "disk");
    see_text(s, SESSION, 6, NBD_TEXT_NAME, "disk");
    send_ack(s, 6);
    see_closed(s, NBD_ERR_PROTOCOL);
}

// What an earlier INFO told does not stand for what this one has to tell.
static void export_of_an_earlier_information_does_not_count(script *s)
{
    ask_info(s);
    send_info_export(s, 6, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 6);
    see_option(s, 6, 0);
    client_asks(s, 7, "disk");
    want_go(s, "disk");
    send_ack(s, 7);
    see_closed(s, NBD_ERR_PROTOCOL);
}

/// Metadata contexts ///

static void open_for_contexts(script *s)
{
    open_options(s);
    option_succeeds(s, 8);
    s->protocol = NBD_PROTOCOL_STRUCTURED;
}

static void contexts_without_a_query_are_listed(script *s)
{
    open_for_contexts(s);
    client_asks_contexts(s, 9, "disk", NULL, 0);
    want_meta(s, 9, "disk", NULL, 0);
    tell_context(s, 9, 0, 0, "base:allocation");
    tell_context(s, 9, 1, 0, "qemu:allocation-depth");
    send_ack(s, 9);
    see_option(s, 9, 0);
    go_asked(s, "disk");
    close_session(s);
}

static void no_context_fits_the_query(script *s)
{
    open_for_contexts(s);
    client_asks_contexts(s, 9, NULL, some_queries, 1);
    want_meta(s, 9, "", some_queries, 1);
    send_ack(s, 9);
    see_option(s, 9, 0);
    go_asked(s, "disk");
    close_session(s);
}

// Those that are listed only take no room.
static void many_queries_list_many_contexts(script *s)
{
    static char names[40][24];
    static const char *queries[40];
    uint32_t i;

    s->config.context_count = 1;
    for (i = 0; i < 40; i++) {
        snprintf(names[i], sizeof names[i], "x-test:context-%u", i);
        queries[i] = names[i];
    }
    open_for_contexts(s);
    client_asks_contexts(s, 9, "disk", queries, 40);
    want_meta(s, 9, "disk", queries, 40);
    for (i = 0; i < 40; i++)
        tell_context(s, 9, i, i, names[i]);
    send_ack(s, 9);
    see_option(s, 9, 0);
    go_asked(s, "disk");
    close_session(s);
}

static void longest_name_and_query_go_out(script *s)
{
    static char name[4097], query[4097];
    static const char *const queries[] = {query, "", query};

    s->unlawful = 1;
    memset(name, 'n', 4096);
    memset(query, 'q', 4096);
    open_for_contexts(s);
    client_asks_contexts(s, 9, name, queries, 3);
    want_meta(s, 9, name, queries, 3);
    tell_context(s, 9, 0, 1, query);
    send_ack(s, 9);
    see_option(s, 9, 0);
    go_asked(s, name);
    close_session(s);
}

// Selects one context that the server numbers `id`.
static void set_context(script *s, const char *name, uint32_t id)
{
    client_asks_contexts(s, 10, name, some_queries, 2);
    want_meta(s, 10, name ? name : "", some_queries, 2);
    tell_context(s, 10, 0, id, some_queries[1]);
    send_ack(s, 10);
    see_option(s, 10, 0);
}

// The contexts count: one extent comes for number `id`.
static void ask_status(script *s, uint32_t id)
{
    static const extent one = {4096, 1};
    int r = client_issues(s, NBD_BLOCK_STATUS, 0, 0, 4096);

    want_request(s, r);
    send_extents(s, r, DONE, id, &one, 1);
    see_extent(s, r, 0, 0, one);
    see_done(s, r, 0);
}

static void status_is_refused(script *s)
{
    static nbd_op op;

    op.command = NBD_BLOCK_STATUS;
    op.size = 4096;
    op_is_refused_here(s, &op, NBD_ERR_UNSUPPORTED);
}

static void contexts_set_again_replace_the_first(script *s)
{
    open_for_contexts(s);
    client_asks_contexts(s, 10, "disk", some_queries, 2);
    want_meta(s, 10, "disk", some_queries, 2);
    tell_context(s, 10, 0, 1, some_queries[0]);
    tell_context(s, 10, 1, 2, some_queries[1]);
    send_ack(s, 10);
    see_option(s, 10, 0);
    set_context(s, "disk", 3);
    go_asked(s, "disk");
    ask_status(s, 3);
    close_session(s);
}

// "Issuing this command replaces all previously-set metadata contexts (including when
// this command fails)"
static void failed_set_leaves_no_context(script *s)
{
    open_for_contexts(s);
    set_context(s, "disk", 3);
    client_asks_contexts(s, 10, "disk", some_queries, 1);
    want_meta(s, 10, "disk", some_queries, 1);
    tell_context(s, 10, 0, 3, some_queries[0]);
    refuse_option(s, 10, 9, "too many");
    go_asked(s, "disk");
    status_is_refused(s);
    close_session(s);
}

static void set_without_a_query_leaves_no_context(script *s)
{
    open_for_contexts(s);
    set_context(s, "disk", 3);
    client_asks_contexts(s, 10, "disk", NULL, 0);
    want_meta(s, 10, "disk", NULL, 0);
    send_ack(s, 10);
    see_option(s, 10, 0);
    go_asked(s, "disk");
    status_is_refused(s);
    close_session(s);
}

static void listing_keeps_the_contexts_that_are_set(script *s)
{
    open_for_contexts(s);
    set_context(s, "disk", 3);
    answer_option(s, 9, ACCEPTED, 0);
    answer_option(s, 9, REFUSED, 6);
    go_asked(s, "disk");
    ask_status(s, 3);
    close_session(s);
}

static void contexts_of_another_export_do_not_count(script *s)
{
    open_for_contexts(s);
    set_context(s, "disk", 3);
    go_asked(s, "disk2");
    status_is_refused(s);
    close_session(s);
}

static void contexts_of_another_export_do_not_count_for_export_name(script *s)
{
    open_for_contexts(s);
    set_context(s, "disk", 3);
    client_asks(s, 1, "");
    want_export_name(s, "");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    status_is_refused(s);
    close_session(s);
}

static void contexts_count_for_the_same_name_elsewhere_in_memory(script *s)
{
    static const char name[] = "disk";

    open_for_contexts(s);
    set_context(s, "disk", 3);
    go_asked(s, name);
    ask_status(s, 3);
    close_session(s);
}

static void contexts_of_no_name_count_for_the_default_export(script *s)
{
    open_for_contexts(s);
    set_context(s, NULL, 3);
    go_asked(s, "");
    ask_status(s, 3);
    close_session(s);
}

static void contexts_survive_the_refusal_of_another_export(script *s)
{
    open_for_contexts(s);
    set_context(s, "disk", 3);
    client_asks(s, 7, "other");
    want_go(s, "other");
    refuse_option(s, 7, 6, "");
    go_asked(s, "disk");
    ask_status(s, 3);
    close_session(s);
}

static void more_contexts_than_there_is_room_end_it(script *s)
{
    s->config.context_count = 1;
    open_for_contexts(s);
    client_asks_contexts(s, 10, "disk", some_queries, 2);
    want_meta(s, 10, "disk", some_queries, 2);
    tell_context(s, 10, 0, 1, some_queries[0]);
    send_context(s, 10, 2, some_queries[1]);
    see_closed(s, NBD_ERR_PROTOCOL);
}

// "the empty leaf-name makes sense as a wildcard for a client query during
// NBD_OPT_LIST_META_CONTEXT, but SHOULD NOT select any contexts"
static void namespace_lists_its_contexts_and_sets_none(script *s)
{
    static const char *const namespaces[] = {"base:", "qemu:"};

    open_for_contexts(s);
    client_asks_contexts(s, 9, "disk", namespaces, 2);
    want_meta(s, 9, "disk", namespaces, 2);
    tell_context(s, 9, 0, 0, some_queries[0]);
    tell_context(s, 9, 1, 0, some_queries[1]);
    send_ack(s, 9);
    see_option(s, 9, 0);
    client_asks_contexts(s, 10, "disk", namespaces, 2);
    want_meta(s, 10, "disk", namespaces, 2);
    send_ack(s, 10);
    see_option(s, 10, 0);
    go_asked(s, "disk");
    status_is_refused(s);
    close_session(s);
}

static void wide_context_is_set_after_extended_headers(script *s)
{
    static const char *const wide[] = {"x-test:wide"};
    static const extent one = {4096, UINT64_C(0x123456789ABCDEF0)};
    int r;

    open_for_contexts(s);
    client_asks_contexts(s, 10, "disk", wide, 1);
    want_meta(s, 10, "disk", wide, 1);
    refuse_option(s, 10, 10, "");
    option_succeeds(s, 11);
    s->protocol = NBD_PROTOCOL_EXTENDED;
    client_asks_contexts(s, 10, "disk", wide, 1);
    want_meta(s, 10, "disk", wide, 1);
    tell_context(s, 10, 0, 3, wide[0]);
    send_ack(s, 10);
    see_option(s, 10, 0);
    go_asked(s, "disk");
    r = client_issues(s, NBD_BLOCK_STATUS, 0, 0, 4096);
    want_request(s, r);
    send_extents(s, r, DONE, 3, &one, 1);
    see_extent(s, r, 0, 0, one);
    see_done(s, r, 0);
    close_session(s);
}

static void longest_context_is_told(script *s)
{
    static char name[4097];

    memset(name, 'c', 4096);
    open_for_contexts(s);
    client_asks_contexts(s, 10, "disk", some_queries, 2);
    want_meta(s, 10, "disk", some_queries, 2);
    tell_context(s, 10, 0, 1, name);
    tell_context(s, 10, 1, 2, "");
    send_ack(s, 10);
    see_option(s, 10, 0);
    go_asked(s, "disk");
    close_session(s);
}

static void context_header_ends_it(script *s, uint32_t length)
{
    open_for_contexts(s);
    client_asks_contexts(s, 9, "disk", some_queries, 2);
    want_meta(s, 9, "disk", some_queries, 2);
    script_close(s, send_reply_open(s, 9, 4, length));
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void listed_context_of_4097_bytes_ends_it(script *s)
{
    context_header_ends_it(s, 4 + 4097);
}

static void context_reply_of_3_bytes_ends_it(script *s)
{
    context_header_ends_it(s, 3);
}

/// Replies that do not fit ///

// LIST is asked for; the header of a reply comes.
static void header_ends_it(script *s, uint32_t option, uint32_t type, uint32_t length)
{
    ask_list(s);
    script_close(s, send_reply_open(s, option, type, length));
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void reply_to_another_option_ends_it(script *s)
{
    header_ends_it(s, 6, 1, 0);
}

static void acknowledgement_with_payload_ends_it(script *s)
{
    header_ends_it(s, 3, 1, 1);
}

static void information_for_list_ends_it(script *s)
{
    header_ends_it(s, 3, 3, 12);
}

static void context_for_list_ends_it(script *s)
{
    header_ends_it(s, 3, 4, 8);
}

static void reply_of_type_0_ends_it(script *s)
{
    header_ends_it(s, 3, 0, 0);
}

static void reply_of_an_unknown_type_ends_it(script *s)
{
    header_ends_it(s, 3, 5, 0);
}

static void refusal_of_4097_bytes_ends_it(script *s)
{
    header_ends_it(s, 3, UINT32_C(0x80000001), 4097);
}

static void export_for_information_ends_it(script *s)
{
    ask_info(s);
    send_server(s, "disk", "");
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void content_for_a_raw_option_ends_it(script *s)
{
    open_options(s);
    client_asks_raw(s, 99, "", 0);
    want_option(s, 99, "", 0);
    send_reply(s, 99, 2, "\0\0\0\0", 4);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void bytes_between_options_end_it(script *s)
{
    open_options(s);
    option_succeeds(s, 8);
    send_ack(s, 8);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static const session option_sessions[] = {
    SESSION_OF(every_option_is_accepted),
    SESSION_OF(every_option_is_refused),
    SESSION_OF(every_option_is_refused_with_text),
    SESSION_OF(every_refusal_is_told),
    SESSION_OF(unknown_refusal_keeps_its_number),
    SESSION_OF(shutdown_refusal_aborts),
    SESSION_OF(longest_refusal_is_handed_out_whole),
    SESSION_OF(second_option_waits_for_the_first),
    SESSION_OF(refused_go_may_be_asked_again),
    SESSION_OF(export_name_enters_transmission),
    SESSION_OF(export_name_is_refused_after_extended_headers),
    SESSION_OF(plain_newstyle_server_knows_export_name_only),
    SESSION_OF(structured_replies_do_not_take_extended_headers_back),
    SESSION_OF(raw_option_goes_out_as_it_is),
    SESSION_OF(list_with_data_goes_out_as_it_is),
    SESSION_OF(raw_go_enters_transmission),
    SESSION_OF(many_exports_are_listed),
    SESSION_OF(no_export_is_listed),
    SESSION_OF(longest_name_and_description_are_listed),
    SESSION_OF(listed_name_of_4097_bytes_ends_it),
    SESSION_OF(listed_description_of_4097_bytes_ends_it),
    SESSION_OF(listed_name_one_byte_longer_than_its_reply_ends_it),
    SESSION_OF(listed_name_of_all_ones_ends_it),
    SESSION_OF(list_reply_longer_than_two_names_ends_it),
    SESSION_OF(list_reply_of_3_bytes_ends_it),
    SESSION_OF(list_reply_of_4_gigabytes_ends_it),
    SESSION_OF(information_twice_and_then_go),
    SESSION_OF(unknown_information_is_passed_over),
    SESSION_OF(empty_name_and_description_are_told),
    SESSION_OF(longest_description_is_told),
    SESSION_OF(export_without_has_flags_ends_it),
    SESSION_OF(name_of_4097_bytes_ends_it),
    SESSION_OF(description_of_4097_bytes_ends_it),
    SESSION_OF(unknown_information_beyond_64_kib_ends_it),
    SESSION_OF(export_information_of_11_bytes_ends_it),
    SESSION_OF(export_information_of_13_bytes_ends_it),
    SESSION_OF(block_sizes_of_13_bytes_end_it),
    SESSION_OF(block_sizes_of_15_bytes_end_it),
    SESSION_OF(information_acknowledged_without_an_export_ends_it),
    SESSION_OF(export_of_an_earlier_information_does_not_count),
    SESSION_OF(contexts_without_a_query_are_listed),
    SESSION_OF(no_context_fits_the_query),
    SESSION_OF(many_queries_list_many_contexts),
    SESSION_OF(longest_name_and_query_go_out),
    SESSION_OF(contexts_set_again_replace_the_first),
    SESSION_OF(failed_set_leaves_no_context),
    SESSION_OF(set_without_a_query_leaves_no_context),
    SESSION_OF(listing_keeps_the_contexts_that_are_set),
    SESSION_OF(contexts_of_another_export_do_not_count),
    SESSION_OF(contexts_of_another_export_do_not_count_for_export_name),
    SESSION_OF(contexts_count_for_the_same_name_elsewhere_in_memory),
    SESSION_OF(contexts_of_no_name_count_for_the_default_export),
    SESSION_OF(contexts_survive_the_refusal_of_another_export),
    SESSION_OF(more_contexts_than_there_is_room_end_it),
    SESSION_OF(namespace_lists_its_contexts_and_sets_none),
    SESSION_OF(wide_context_is_set_after_extended_headers),
    SESSION_OF(longest_context_is_told),
    SESSION_OF(listed_context_of_4097_bytes_ends_it),
    SESSION_OF(context_reply_of_3_bytes_ends_it),
    SESSION_OF(reply_to_another_option_ends_it),
    SESSION_OF(acknowledgement_with_payload_ends_it),
    SESSION_OF(information_for_list_ends_it),
    SESSION_OF(context_for_list_ends_it),
    SESSION_OF(reply_of_type_0_ends_it),
    SESSION_OF(reply_of_an_unknown_type_ends_it),
    SESSION_OF(refusal_of_4097_bytes_ends_it),
    SESSION_OF(export_for_information_ends_it),
    SESSION_OF(content_for_a_raw_option_ends_it),
    SESSION_OF(bytes_between_options_end_it),
};

enum { OPTION_SESSIONS = sizeof option_sessions / sizeof option_sessions[0] };

#ifndef SESSIONS_ONLY

/// Every order ///

static const uint32_t ordered[] = {8, 11, 3, 6, 9, 10};

enum { ORDERED = sizeof ordered / sizeof ordered[0], ORDERS = 720 };

// The `index`th order of the options.
static void order_of(unsigned index, uint32_t *order)
{
    unsigned i, at;

    memcpy(order, ordered, sizeof ordered);
    for (i = 0; i < ORDERED; i++) {
        uint32_t swapped = order[i];

        at = i + index % (ORDERED - i);
        index /= ORDERED - i;
        order[i] = order[at];
        order[at] = swapped;
    }
}

// What has been agreed on, as the answers say.
typedef struct agreement {
    int protocol;
    uint32_t contexts;
} agreement;

static void note_answer(agreement *a, uint32_t option, enum answer answer)
{
    if (option == 10) a->contexts = answer == ACCEPTED;
    if (answer != ACCEPTED) return;
    if (option == 11) a->protocol = NBD_PROTOCOL_EXTENDED;
    if (option == 8 && a->protocol == NBD_PROTOCOL_SIMPLE) a->protocol = NBD_PROTOCOL_STRUCTURED;
}

static agreement write_order(script *s, const uint32_t *order)
{
    agreement a = {NBD_PROTOCOL_SIMPLE, 0};
    unsigned i;

    open_options(s);
    for (i = 0; i < ORDERED; i++) {
        enum answer answer = (enum answer)check_random(3);

        // "MUST NOT be requested unless structured replies have been negotiated"
        if (order[i] >= 9 && order[i] <= 10 && a.protocol == NBD_PROTOCOL_SIMPLE) continue;
        answer_option(s, order[i], answer, 1 + check_random(6));
        note_answer(&a, order[i], answer);
    }
    s->protocol = a.protocol;
    go_asked(s, "disk");
    close_session(s);
    return a;
}

static void any_order_of_options_is_served(void)
{
    static script written;
    uint32_t order[ORDERED];
    unsigned index;

    for (index = 0; index < ORDERS; index++) {
        static trace seen;
        agreement a;

        memset(&written, 0, offsetof(script, bytes));
        check_reseed(check.seed + index);
        order_of(index, order);
        a = write_order(&written, order);
        play_whole(&written, &seen);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->protocol, a.protocol);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->context_count, a.contexts);
    }
}

static void each_information_replaces_the_last(void)
{
    const session one = {check.name, information_twice_and_then_go};
    static trace seen;
    const nbd_export *got = nbd_negotiated(&stage.client);

    play_whole(session_script(&one), &seen);
    CHECK_EQUAL(got->size, EXPORT_SIZE);
    CHECK_EQUAL(got->flags, EXPORT_FLAGS);
    CHECK_EQUAL(got->block_sizes, 0);
    CHECK_EQUAL(got->minimum_block, 1);
    CHECK_EQUAL(got->preferred_block, 4096);
    CHECK_EQUAL(got->maximum_payload, 32 << 20);
}

static void plain_newstyle_is_told(void)
{
    const session one = {check.name, plain_newstyle_server_knows_export_name_only};
    static trace seen;

    play_whole(session_script(&one), &seen);
    CHECK_EQUAL(nbd_negotiated(&stage.client)->style, NBD_STYLE_NEW);
}

static void go_with_every_flag(script *s)
{
    open_options(s);
    client_asks(s, 7, "disk");
    want_go(s, "disk");
    send_info_export(s, 7, EXPORT_SIZE, 0xFFFF);
    send_ack(s, 7);
    see_ready(s);
    close_session(s);
}

// By its place in the specification, from bit 0 on; those behind it are unknown.
static void every_transmission_flag_is_told(void)
{
    static const unsigned bits[] = {
        NBD_OFFERS_FLAGS,         NBD_OFFERS_READ_ONLY,  NBD_OFFERS_FLUSH,
        NBD_OFFERS_FUA,           NBD_OFFERS_ROTATIONAL, NBD_OFFERS_TRIM,
        NBD_OFFERS_WRITE_ZEROES,  NBD_OFFERS_DF,         NBD_OFFERS_MULTI_CONN,
        NBD_OFFERS_RESIZE,        NBD_OFFERS_CACHE,      NBD_OFFERS_FAST_ZERO,
        NBD_OFFERS_STATUS_PAYLOAD};
    const session one = {check.name, go_with_every_flag};
    static trace seen;
    unsigned i;

    play_whole(session_script(&one), &seen);
    CHECK_EQUAL(nbd_negotiated(&stage.client)->flags, 0xFFFF);
    for (i = 0; i < sizeof bits / sizeof bits[0]; i++)
        CHECK_EQUAL(bits[i], 1u << i);
}

/// A long option against a server that answers while it reads ///

enum {
    LONG_QUERIES = 2000,
    LONG_QUERY = 4000,
    LONG_ROOM = 250, // contexts that SET selects: every eighth
    PIPE_SIZE = 4096
};

typedef struct pipe_bytes {
    size_t from;
    size_t to;
    unsigned char bytes[PIPE_SIZE];
} pipe_bytes;

// A server that stops reading for as long as it cannot write.
typedef struct answerer {
    uint32_t option;
    uint32_t every; // which queries are answered: each, each second one, ...
    uint32_t told;
    uint64_t read; // bytes
    uint64_t option_end;
    size_t reply_size;
    size_t reply_sent;
    int acknowledged;
    int early; // replies were on their way before the option was read whole
    unsigned char reply[20 + 4 + LONG_QUERY];
    pipe_bytes in;
    pipe_bytes out;
} answerer;

static answerer server;
static char long_text[LONG_QUERIES][LONG_QUERY + 1];
static const char *long_queries[LONG_QUERIES];
static nbd_client long_client;
static nbd_context long_contexts[LONG_ROOM];
static uint32_t texts_seen;
static int option_over;

static size_t pipe_put(pipe_bytes *p, const void *from, size_t size)
{
    size = smaller(size, PIPE_SIZE - (p->to - p->from));
    memmove(p->bytes, p->bytes + p->from, p->to - p->from);
    p->to -= p->from;
    p->from = 0;
    memcpy(p->bytes + p->to, from, size);
    p->to += size;
    return size;
}

static size_t pipe_get(pipe_bytes *p, void *to, size_t size)
{
    size = smaller(size, p->to - p->from);
    memcpy(to, p->bytes + p->from, size);
    p->from += size;
    return size;
}

static size_t put_big_endian(unsigned char *to, uint64_t value, size_t width)
{
    size_t i;

    for (i = 0; i < width; i++)
        to[i] = (unsigned char)(value >> (8 * (width - 1 - i)));
    return width;
}

static void server_replies(uint32_t type, const char *text)
{
    size_t at = 0;

    at += put_big_endian(server.reply + at, UINT64_C(0x0003E889045565A9), 8);
    at += put_big_endian(server.reply + at, server.option, 4);
    at += put_big_endian(server.reply + at, type, 4);
    at += put_big_endian(server.reply + at, text ? 4 + LONG_QUERY : 0, 4);
    if (text) {
        at += put_big_endian(server.reply + at, server.told, 4);
        memcpy(server.reply + at, text, LONG_QUERY);
        at += LONG_QUERY;
    }
    server.reply_size = at;
    server.reply_sent = 0;
}

// The bytes of the client in front of query number `index`.
static uint64_t query_place(uint32_t index)
{
    return 4 + 16 + 4 + 4 + 4 + (uint64_t)index * (4 + LONG_QUERY);
}

// Answers the next query that has been read whole.  Returns whether there is an answer.
static int server_answers(void)
{
    uint32_t next = server.told * server.every;

    if (next < LONG_QUERIES) {
        if (server.read < query_place(next + 1)) return 0;
        server_replies(4, long_text[next]);
        server.told++;
        server.early |= server.read < server.option_end;
        return 1;
    }
    if (server.read < server.option_end || server.acknowledged) return 0;
    server_replies(1, NULL);
    server.acknowledged = 1;
    return 1;
}

// Returns whether anything moved.
static int server_moves(void)
{
    unsigned char bytes[512];
    size_t sent, got;

    if (server.reply_sent < server.reply_size || server_answers()) {
        sent = pipe_put(&server.out, server.reply + server.reply_sent,
                        server.reply_size - server.reply_sent);
        server.reply_sent += sent;
        return sent > 0;
    }
    got = pipe_get(&server.in, bytes, sizeof bytes);
    server.read += got;
    return got > 0;
}

static ptrdiff_t long_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    size_t moved = 0;
    unsigned i;

    CHECK(context == &server && (flags & ~NBD_SEND_MORE) == 0);
    for (i = 0; i < count; i++)
        moved += pipe_put(&server.in, iov[i].base, iov[i].size);
    return moved ? (ptrdiff_t)moved : NBD_IO_WRITE;
}

static ptrdiff_t long_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    size_t moved = 0;
    unsigned i;

    CHECK(context == &server);
    for (i = 0; i < count; i++)
        moved += pipe_get(&server.out, iov[i].base, iov[i].size);
    return moved ? (ptrdiff_t)moved : NBD_IO_READ;
}

static int long_events(void)
{
    nbd_event event;
    int any = 0;

    while (nbd_next(&long_client, &event)) {
        any = 1;
        if (event.type == NBD_EVENT_TEXT) {
            CHECK_EQUAL(event.text_kind, NBD_TEXT_CONTEXT);
            CHECK_EQUAL(event.context, texts_seen);
            CHECK_EQUAL(event.text_size, LONG_QUERY);
            CHECK_BYTES(event.text, long_text[texts_seen * server.every], LONG_QUERY);
            texts_seen++;
        } else {
            CHECK_EQUAL(event.type, NBD_EVENT_OPTION);
            CHECK_EQUAL(event.error, 0);
            option_over = event.option != 0;
        }
    }
    return any;
}

static int long_moves_by_poll(void)
{
    unsigned wants = nbd_wants(&long_client);
    uint64_t before = nbd_count(&long_client)->bytes_sent + nbd_count(&long_client)->bytes_received;

    CHECK_EQUAL(nbd_poll(&long_client, wants & (NBD_WANT_READ | NBD_WANT_WRITE)), 0);
    return nbd_count(&long_client)->bytes_sent + nbd_count(&long_client)->bytes_received != before;
}

static int long_moves_by_hand(void)
{
    nbd_iovec iov[3];
    unsigned flags, count;
    ptrdiff_t sent = 0, got = 0;

    count = nbd_outgoing(&long_client, iov, 3, &flags);
    if (count) {
        sent = long_send(&server, iov, count, flags);
        CHECK_EQUAL(nbd_sent(&long_client, sent), 0);
    }
    count = nbd_incoming(&long_client, iov, 3);
    if (count) {
        got = long_recv(&server, iov, count);
        CHECK_EQUAL(nbd_received(&long_client, got), 0);
    }
    return sent > 0 || got > 0;
}

static void fill_long_queries(void)
{
    unsigned i;

    for (i = 0; i < LONG_QUERIES; i++) {
        memset(long_text[i], 'a' + (int)(i % 26), LONG_QUERY);
        snprintf(long_text[i], 16, "x-test:%08u", i);
        long_text[i][15] = '-';
        long_queries[i] = long_text[i];
    }
}

// How the bytes cross: by hooks, by the engine's own calls, over a socketpair.
enum way { BY_HOOKS, BY_HAND, BY_SOCKETS };

#ifdef _WIN32 // it has no socketpair

static int shovel(void)
{
    return 0;
}

static const nbd_transport *socket_transport(void)
{
    return NULL;
}

#else

static int far_socket; // the server's end of the socketpair

// Between the server's pipes and its socket.  Returns whether anything moved.
static int shovel(void)
{
    unsigned char bytes[PIPE_SIZE];
    pipe_bytes *in = &server.in, *out = &server.out;
    ssize_t got = recv(far_socket, bytes, PIPE_SIZE - (in->to - in->from), MSG_DONTWAIT);
    ssize_t sent = send(far_socket, out->bytes + out->from, out->to - out->from, MSG_DONTWAIT);

    if (got > 0) CHECK_EQUAL(pipe_put(in, bytes, (size_t)got), got);
    if (sent > 0) out->from += (size_t)sent;
    return got > 0 || sent > 0;
}

static const nbd_transport *socket_transport(void)
{
    static nbd_socket_io io;
    int ends[2], size = PIPE_SIZE;

    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    CHECK_EQUAL(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size), 0);
    CHECK_EQUAL(setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size), 0);
    CHECK_EQUAL(nbd_socket_init(&io, ends[0]), 0);
    far_socket = ends[1];
    return &io.transport;
}

#endif

static void connect_long(enum way way)
{
    static unsigned char buffer[NBD_BUFFER_NAMES];
    static nbd_slot slots[1];
    static nbd_transport transport;
    nbd_config config = NBD_ZERO;

    transport.context = &server;
    transport.send = long_send;
    transport.recv = long_recv;
    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.contexts = long_contexts;
    config.context_count = LONG_ROOM;
    config.flags = NBD_NEGOTIATE;
    CHECK_EQUAL(nbd_init(&long_client, &config), 0);
    CHECK_EQUAL(nbd_connect(&long_client, way == BY_HAND      ? NULL
                                          : way == BY_SOCKETS ? socket_transport()
                                                              : &transport),
                0);
}

// Everybody moves what they can until the option is over; if nobody can move, it is a
// deadlock.
static void long_option_completes(uint32_t option, uint32_t every, enum way way)
{
    static const char greeting[] = "NBDMAGICIHAVEOPT\0\3";
    nbd_option asked = NBD_ZERO;

    memset(&server, 0, sizeof server);
    server.option = option;
    server.every = every;
    server.option_end = query_place(LONG_QUERIES);
    texts_seen = 0;
    option_over = 0;
    fill_long_queries();
    asked.option = option;
    asked.name = "disk";
    asked.queries = long_queries;
    asked.query_count = LONG_QUERIES;
    CHECK_EQUAL(pipe_put(&server.out, greeting, 18), 18);
    connect_long(way);
    while (!option_over) {
        int moved = way == BY_HAND ? long_moves_by_hand() : long_moves_by_poll();

        moved |= long_events();
        if (nbd_phase(&long_client) == NBD_PHASE_OPTIONS && server.read == 0 && asked.option) {
            long_client.got.protocol = NBD_PROTOCOL_STRUCTURED; // as if agreed on before
            CHECK_EQUAL(nbd_negotiate(&long_client, &asked), 0);
            asked.option = 0;
            moved = 1;
        }
        moved |= server_moves();
        if (way == BY_SOCKETS) moved |= shovel();
        CHECK(moved);
    }
    CHECK(server.early);
    CHECK_EQUAL(texts_seen, LONG_QUERIES / every);
    CHECK_EQUAL(server.read, server.option_end);
}

static void long_set_against_a_server_that_answers_while_it_reads(void)
{
    long_option_completes(NBD_OPTION_SET_META_CONTEXT, LONG_QUERIES / LONG_ROOM, BY_HOOKS);
    CHECK_EQUAL(nbd_negotiated(&long_client)->context_count, LONG_ROOM);
}

static void long_set_against_such_a_server_with_own_io(void)
{
    long_option_completes(NBD_OPTION_SET_META_CONTEXT, LONG_QUERIES / LONG_ROOM, BY_HAND);
    CHECK_EQUAL(nbd_negotiated(&long_client)->context_count, LONG_ROOM);
}

#ifndef _WIN32

static void long_set_over_sockets_with_buffers_of_4_kib(void)
{
    long_option_completes(NBD_OPTION_SET_META_CONTEXT, LONG_QUERIES / LONG_ROOM, BY_SOCKETS);
    CHECK_EQUAL(nbd_negotiated(&long_client)->context_count, LONG_ROOM);
    CHECK_EQUAL(close(far_socket), 0);
}

#endif

static void long_list_against_such_a_server(void)
{
    long_option_completes(NBD_OPTION_LIST_META_CONTEXT, 1, BY_HOOKS);
}

static void long_list_against_such_a_server_with_own_io(void)
{
    long_option_completes(NBD_OPTION_LIST_META_CONTEXT, 1, BY_HAND);
}

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < OPTION_SESSIONS; i++) {
        const session *of = &option_sessions[i];

        check_case_on(of->name, session_in_every_mode, of);
    }
    CHECK_CASE(any_order_of_options_is_served);
    CHECK_CASE(each_information_replaces_the_last);
    CHECK_CASE(plain_newstyle_is_told);
    CHECK_CASE(every_transmission_flag_is_told);
    CHECK_CASE(long_set_against_a_server_that_answers_while_it_reads);
    CHECK_CASE(long_set_against_such_a_server_with_own_io);
#ifndef _WIN32
    CHECK_CASE(long_set_over_sockets_with_buffers_of_4_kib);
#endif
    CHECK_CASE(long_list_against_such_a_server);
    CHECK_CASE(long_list_against_such_a_server_with_own_io);
    return check_end();
}

#endif
