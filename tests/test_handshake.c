// The handshake: each rule is a session, played in every mode of play.h.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

/// Styles ///

static void oldstyle_server_is_served(script *s)
{
    int r;

    send_oldstyle(s, EXPORT_SIZE, UINT32_C(0xABCD0000) | EXPORT_FLAGS);
    see_ready(s);
    r = client_issues(s, NBD_READ, 0, 512, 64);
    want_request(s, r);
    send_simple(s, r, 0);
    see_done(s, r, 0);
    close_session(s);
}

static void oldstyle_server_has_no_names(script *s)
{
    s->config.export_name = "disk";
    send_oldstyle(s, EXPORT_SIZE, EXPORT_FLAGS);
    see_closed(s, NBD_ERR_OLDSTYLE);
}

static void oldstyle_server_has_no_tls(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    send_oldstyle(s, EXPORT_SIZE, EXPORT_FLAGS);
    see_closed(s, NBD_ERR_TLS);
}

static void export_name_to_a_plain_newstyle_server(script *s)
{
    s->config.export_name = "disk";
    send_greeting(s, 0);
    want_client_flags(s, 0);
    want_export_name(s, "disk");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 1);
    see_ready(s);
    close_session(s);
}

static void zeroes_are_negotiated_away_without_fixed(script *s)
{
    send_greeting(s, NO_ZEROES);
    want_client_flags(s, NO_ZEROES);
    want_export_name(s, "");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    close_session(s);
}

static void hidden_no_zeroes_bit_brings_the_zeroes(script *s)
{
    s->config.flags = NBD_ONLY_EXPORT_NAME;
    s->config.flags |= NBD_WITHOUT_NO_ZEROES;
    send_greeting(s, FIXED | NO_ZEROES);
    want_client_flags(s, FIXED);
    want_export_name(s, "");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 1);
    see_ready(s);
    close_session(s);
}

static void hidden_fixed_bit_makes_it_plain_newstyle(script *s)
{
    s->config.flags |= NBD_WITHOUT_FIXED_NEWSTYLE;
    send_greeting(s, FIXED | NO_ZEROES);
    want_client_flags(s, NO_ZEROES);
    want_export_name(s, "");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    close_session(s);
}

static void unknown_handshake_flags_are_not_echoed(script *s)
{
    send_greeting(s, 0xFFFF);
    want_client_flags(s, FIXED | NO_ZEROES);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    close_session(s);
}

static void only_export_name_sends_nothing_else(script *s)
{
    s->config.flags = NBD_ONLY_EXPORT_NAME;
    s->config.export_name = "disk";
    send_greeting(s, FIXED | NO_ZEROES);
    want_client_flags(s, FIXED | NO_ZEROES);
    want_export_name(s, "disk");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    close_session(s);
}

static void something_else_is_not_nbd(script *s)
{
    send_bytes(s, "SSH-2.0-OpenSSH_9.2p1 Debian\r\n", 30);
    see_closed(s, NBD_ERR_NOT_NBD);
}

static void unknown_second_magic_is_not_nbd(script *s)
{
    send_bytes(s, "NBDMAGICIHAVEOPX\0\3", 18);
    see_closed(s, NBD_ERR_NOT_NBD);
}

/// Protocols ///

static void extended_headers_are_agreed_on(script *s)
{
    open_session(s, NBD_PROTOCOL_EXTENDED);
    close_session(s);
}

static void structured_replies_are_agreed_on(script *s)
{
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    close_session(s);
}

static void both_refused_leaves_simple_replies(script *s)
{
    open_session(s, NBD_PROTOCOL_SIMPLE);
    close_session(s);
}

static void nothing_is_asked_for_when_both_are_switched_off(script *s)
{
    s->config.flags = NBD_WITHOUT_EXTENDED_HEADERS | NBD_WITHOUT_STRUCTURED_REPLY;
    open_session(s, NBD_PROTOCOL_SIMPLE);
    close_session(s);
}

// B05: every refusal brings text, and the next answer stands right behind it.
static void text_of_every_refusal_is_taken(script *s)
{
    static const char text[] = "this server is older than you think.";

    greet_fixed(s);
    want_option(s, 11, "", 0);
    send_refusal(s, 11, 1, text);
    see_message(s, SESSION, 11, NBD_REP_ERR_UNSUP, text);
    want_option(s, 8, "", 0);
    send_refusal(s, 8, 2, text);
    see_message(s, SESSION, 8, NBD_REP_ERR_POLICY, text);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    close_session(s);
}

/// Information ///

static void information_comes_in_one_order(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_go(s, "");
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_info_text(s, 7, 1, "the/canonical name");
    see_text(s, SESSION, 7, NBD_TEXT_NAME, "the/canonical name");
    send_info_text(s, 7, 2,
                   "a disk of \xC3\xBC"
                   "ber \x1B[31mred");
    see_text(s, SESSION, 7, NBD_TEXT_DESCRIPTION,
             "a disk of \xC3\xBC"
             "ber \x1B[31mred");
    send_info_block_size(s, 7, 512, 8192, 1 << 20);
    send_ack(s, 7);
    see_ready(s);
    close_session(s);
}

static void information_comes_in_another_order(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_go(s, "");
    send_info_block_size(s, 7, 1, 65536, UINT32_C(0xFFFFFFFF));
    send_info_text(s, 7, 2, "");
    see_text(s, SESSION, 7, NBD_TEXT_DESCRIPTION, "");
    send_info_text(s, 7, 77, "an information type of the future");
    send_info_text(s, 7, 1, "name");
    see_text(s, SESSION, 7, NBD_TEXT_NAME, "name");
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    see_ready(s);
    close_session(s);
}

static void longest_name_is_handed_out_whole(script *s)
{
    static char name[4097];

    memset(name, 'n', 4096);
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    want_go(s, "");
    send_info_text(s, 7, 1, name);
    see_text(s, SESSION, 7, NBD_TEXT_NAME, name);
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    see_ready(s);
    close_session(s);
}

// B07: what a server may not say in the answer to GO.
static void go_until_answer(script *s)
{
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    want_go(s, "");
}

static void ack_without_information_ends_it(script *s)
{
    go_until_answer(s);
    send_ack(s, 7);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void ack_with_payload_ends_it(script *s)
{
    go_until_answer(s);
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_reply(s, 7, 1, "more", 4);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void short_information_ends_it(script *s)
{
    go_until_answer(s);
    send_reply(s, 7, 3, "\0\0\0\0\0\0\0\20\0\0\0", 11);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void long_information_ends_it(script *s)
{
    go_until_answer(s);
    send_reply(s, 7, 3, "\0\0\0\0\0\0\0\20\0\0\0\1\0", 13);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void information_of_one_byte_ends_it(script *s)
{
    go_until_answer(s);
    send_reply(s, 7, 3, "\0", 1);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void empty_information_ends_it(script *s)
{
    go_until_answer(s);
    send_reply(s, 7, 3, "", 0);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void impossible_block_sizes_end_it(script *s)
{
    go_until_answer(s);
    send_info_block_size(s, 7, 4096, 512, 1 << 20);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void answer_to_another_option_ends_it(script *s)
{
    go_until_answer(s);
    send_ack(s, 8);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void wrong_reply_magic_ends_it(script *s)
{
    go_until_answer(s);
    send_bytes(s, "\0\3\350\211\4\125\145\250\0\0\0\7\0\0\0\1\0\0\0\0", 20);
    see_closed(s, NBD_ERR_PROTOCOL);
}

/// Refusals of GO ///

// B01: the bytes of EXPORT_NAME after GO was refused as unknown.
static void fall_back(script *s, size_t size)
{
    static char name[4097];

    memset(name, 'x', size);
    name[size] = '\0';
    s->config.export_name = name;
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    want_go(s, name);
    send_refusal(s, 7, 1, "");
    want_export_name(s, name);
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    close_session(s);
}

static void unsupported_go_falls_back_with_no_name(script *s)
{
    fall_back(s, 0);
}

static void unsupported_go_falls_back_with_one_byte_name(script *s)
{
    fall_back(s, 1);
}

static void unsupported_go_falls_back_with_long_name(script *s)
{
    fall_back(s, 255);
}

static void unsupported_go_falls_back_with_longest_name(script *s)
{
    fall_back(s, 4096);
}

static void refused_go(script *s, uint32_t number, const char *text, int error)
{
    s->config.export_name = "nothing";
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_go(s, "nothing");
    send_refusal(s, 7, number, text);
    if (text[0]) see_message(s, SESSION, 7, error, text);
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, error);
}

static void unknown_export_ends_with_abort_and_text(script *s)
{
    refused_go(s, 6, "export 'nothing' not present", NBD_REP_ERR_UNKNOWN);
}

static void forbidden_export_ends_with_abort(script *s)
{
    refused_go(s, 2, "", NBD_REP_ERR_POLICY);
}

static void server_that_requires_tls_ends_with_abort(script *s)
{
    refused_go(s, 5, "TLS first", NBD_REP_ERR_TLS_REQD);
}

static void unknown_refusal_is_other(script *s)
{
    refused_go(s, 4711, "", NBD_REP_ERR_OTHER);
}

// "If the client receives NBD_REP_ERR_SHUTDOWN it MUST initiate a soft disconnect."
static void server_that_shuts_down_ends_with_abort(script *s)
{
    greet_fixed(s);
    want_option(s, 11, "", 0);
    send_refusal(s, 11, 7, "");
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, NBD_REP_ERR_SHUTDOWN);
}

// B03: an old server hangs up at an option that it does not know.
static void server_that_hangs_up_is_closed(script *s)
{
    greet_fixed(s);
    want_option(s, 11, "", 0);
    send_end(s);
    see_closed(s, NBD_ERR_CLOSED);
    s->no_cut = 1;
}

// The answer may come before the option has left in full; the next option has to wait.
static void early_answer_waits_for_the_end_of_its_option(script *s)
{
    step rest;

    s->config.export_name = "a name of some length";
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    script_step(s, STEP_FED);
    transport_takes(s, 0);
    s->steps[s->step_count - 1].size = 24;
    want_go(s, s->config.export_name);
    rest = script_split(s, 24);
    send_refusal(s, 7, 6, "");
    script_step(s, STEP_FED);
    transport_takes_all(s);
    script_append(s, rest);
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, NBD_REP_ERR_UNKNOWN);
}

/// Metadata contexts ///

static const char *const two_queries[] = {"base:allocation", "qemu:dirty-bitmap:b0"};

static void contexts_are_asked_for_before_go(script *s)
{
    nbd_event *text;

    s->config.export_name = "disk";
    s->config.queries = two_queries;
    s->config.query_count = 2;
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_meta(s, 10, "disk", two_queries, 2);
    send_context(s, 10, 77, two_queries[1]);
    see_text(s, SESSION, 10, NBD_TEXT_CONTEXT, two_queries[1]);
    send_context(s, 10, 5, two_queries[0]);
    text = see_text(s, SESSION, 10, NBD_TEXT_CONTEXT, two_queries[0]);
    text->context = 1;
    send_ack(s, 10);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    close_session(s);
}

// B11: what came before a refusal does not count; the session goes on.
static void refused_contexts_are_none(script *s)
{
    s->config.queries = two_queries;
    s->config.query_count = 1;
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_meta(s, 10, "", two_queries, 1);
    send_context(s, 10, 7, two_queries[0]);
    see_text(s, SESSION, 10, NBD_TEXT_CONTEXT, two_queries[0]);
    send_refusal(s, 10, 3, "no");
    see_message(s, SESSION, 10, NBD_REP_ERR_INVALID, "no");
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    close_session(s);
}

// What is longer than any legal name is not waited for.
static void context_name_beyond_4096_bytes_ends_it(script *s)
{
    s->config.queries = two_queries;
    s->config.query_count = 1;
    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_meta(s, 10, "", two_queries, 1);
    script_close(s, send_reply_open(s, 10, 4, 4 + 4097));
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void contexts_are_not_asked_for_without_structured_replies(script *s)
{
    s->config.queries = two_queries;
    s->config.query_count = 1;
    open_session(s, NBD_PROTOCOL_SIMPLE);
    close_session(s);
}

/// Options driven by the caller ///

static void greet_for_options(script *s)
{
    s->config.flags = NBD_NEGOTIATE;
    greet_fixed(s);
    see_option(s, 0, 0);
}

static const nbd_option list = {NBD_OPTION_LIST, 0, NULL, NULL, NULL, 0};
static const nbd_option info = {NBD_OPTION_INFO, 0, "disk", NULL, NULL, 0};
static const nbd_option structured = {NBD_OPTION_STRUCTURED_REPLY, 0, NULL, NULL, NULL, 0};
static const nbd_option list_meta = {NBD_OPTION_LIST_META_CONTEXT, 2, "disk", two_queries, NULL, 0};
static const nbd_option set_meta = {NBD_OPTION_SET_META_CONTEXT, 1, "disk", two_queries, NULL, 0};
static const nbd_option raw = {4242, 0, NULL, NULL, "\1\2\3", 3};
static const nbd_option go_disk = {NBD_OPTION_GO, 0, "disk", NULL, NULL, 0};
static const nbd_option name_disk = {NBD_OPTION_EXPORT_NAME, 0, "disk", NULL, NULL, 0};
static const nbd_option starttls = {NBD_OPTION_STARTTLS, 0, NULL, NULL, NULL, 0};

static void go_by_option(script *s)
{
    client_negotiates(s, &go_disk);
    want_go(s, "disk");
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    see_ready(s);
}

static void exports_are_listed(script *s)
{
    greet_for_options(s);
    client_negotiates(s, &list);
    want_option(s, 3, "", 0);
    send_server(s, "one", "the first\none");
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "one");
    see_text(s, SESSION, 3, NBD_TEXT_DESCRIPTION, "the first\none");
    send_server(s, "", "");
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "");
    send_server(s, "three", "");
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "three");
    send_ack(s, 3);
    see_option(s, 3, 0);
    go_by_option(s);
    close_session(s);
}

// B09: the length inside must fit into the length outside.
static void listed_name_longer_than_its_reply_ends_it(script *s)
{
    greet_for_options(s);
    client_negotiates(s, &list);
    want_option(s, 3, "", 0);
    send_reply(s, 3, 2, "\0\0\0\4abc", 7);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void export_is_described(script *s)
{
    greet_for_options(s);
    client_negotiates(s, &info);
    want_info(s, 6, "disk");
    send_info_export(s, 6, EXPORT_SIZE, EXPORT_FLAGS);
    send_info_text(s, 6, 2, "words");
    see_text(s, SESSION, 6, NBD_TEXT_DESCRIPTION, "words");
    send_ack(s, 6);
    see_option(s, 6, 0);
    go_by_option(s);
    close_session(s);
}

static void contexts_are_listed_and_set(script *s)
{
    greet_for_options(s);
    client_negotiates(s, &structured);
    want_option(s, 8, "", 0);
    send_ack(s, 8);
    see_option(s, 8, 0);
    client_negotiates(s, &list_meta);
    want_meta(s, 9, "disk", two_queries, 2);
    send_context(s, 9, 0, "base:allocation");
    see_text(s, SESSION, 9, NBD_TEXT_CONTEXT, "base:allocation");
    send_ack(s, 9);
    see_option(s, 9, 0);
    client_negotiates(s, &set_meta);
    want_meta(s, 10, "disk", two_queries, 1);
    send_context(s, 10, 3, "base:allocation");
    see_text(s, SESSION, 10, NBD_TEXT_CONTEXT, "base:allocation");
    send_ack(s, 10);
    see_option(s, 10, 0);
    go_by_option(s);
    close_session(s);
}

static void refused_option_leaves_the_session_usable(script *s)
{
    s->unlawful = 1;
    greet_for_options(s);
    client_negotiates(s, &raw);
    want_option(s, 4242, "\1\2\3", 3);
    send_refusal(s, 4242, 1, "never heard of it");
    see_message(s, SESSION, 4242, NBD_REP_ERR_UNSUP, "never heard of it");
    see_event(s, SESSION, NBD_EVENT_OPTION)->option = 4242;
    s->steps[s->step_count - 1].event.error = NBD_REP_ERR_UNSUP;
    client_negotiates(s, &go_disk);
    want_go(s, "disk");
    send_refusal(s, 7, 6, "");
    see_option(s, 7, NBD_REP_ERR_UNKNOWN);
    client_negotiates(s, &name_disk);
    want_export_name(s, "disk");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    close_session(s);
}

/// Abort (B31) ///

static void abort_until_answer(script *s)
{
    greet_for_options(s);
    client_disconnects(s);
    want_abort(s);
}

static void abort_answered_by_ack_is_clean(script *s)
{
    abort_until_answer(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, 0);
}

static void abort_answered_by_the_end_is_clean(script *s)
{
    abort_until_answer(s);
    send_end(s);
    see_closed(s, 0);
}

static void abort_answered_by_an_error_is_clean(script *s)
{
    abort_until_answer(s);
    send_refusal(s, 2, 1, "");
    send_end(s);
    see_closed(s, 0);
}

// CLOSED stands for the OPTION event then.
static void abort_waits_for_the_option_under_way(script *s)
{
    greet_for_options(s);
    client_negotiates(s, &list);
    want_option(s, 3, "", 0);
    client_disconnects(s);
    send_server(s, "one", "");
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "one");
    send_ack(s, 3);
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, 0);
}

static void abandoned_handshake_closes_at_once(script *s)
{
    greet_fixed(s);
    want_option(s, 11, "", 0);
    client_abandons(s);
    see_closed(s, NBD_ERR_ABANDONED);
}

/// TLS ///

static void tls_comes_first_and_forgets_what_was_said(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_ack(s, 5);
    see_starttls(s);
    client_calls(s, play_starttls);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    close_session(s);
}

static void export_refused_in_tls_ends_with_abort(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_ack(s, 5);
    see_starttls(s);
    client_calls(s, play_starttls);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    want_go(s, "");
    send_refusal(s, 7, 6, "");
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, NBD_REP_ERR_UNKNOWN);
}

static void refused_tls_goes_on_in_clear_if_allowed(script *s)
{
    s->config.flags = NBD_TLS_ALLOW;
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_refusal(s, 5, 1, "");
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    close_session(s);
}

// Not even ABORT leaves in clear.
static void refused_tls_ends_it_if_required(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_refusal(s, 5, 2, "no certificate here");
    see_message(s, SESSION, 5, NBD_REP_ERR_POLICY, "no certificate here");
    see_closed(s, NBD_ERR_TLS);
}

static void plain_newstyle_server_has_no_tls(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    send_greeting(s, NO_ZEROES);
    see_closed(s, NBD_ERR_TLS);
}

// B33: structured replies that were agreed on in clear are not agreed on in TLS.
static void tls_forgets_structured_replies(script *s)
{
    int r;

    greet_for_options(s);
    client_negotiates(s, &structured);
    want_option(s, 8, "", 0);
    send_ack(s, 8);
    see_option(s, 8, 0);
    client_negotiates(s, &starttls);
    want_option(s, 5, "", 0);
    send_ack(s, 5);
    see_starttls(s);
    client_calls(s, play_starttls);
    go_by_option(s);
    r = client_issues(s, NBD_READ, 0, 0, 32);
    want_request(s, r);
    send_simple(s, r, 0);
    see_done(s, r, 0);
    close_session(s);
}

static const session handshake_sessions[] = {
    SESSION_OF(oldstyle_server_is_served),
    SESSION_OF(oldstyle_server_has_no_names),
    SESSION_OF(oldstyle_server_has_no_tls),
    SESSION_OF(export_name_to_a_plain_newstyle_server),
    SESSION_OF(zeroes_are_negotiated_away_without_fixed),
    SESSION_OF(hidden_no_zeroes_bit_brings_the_zeroes),
    SESSION_OF(hidden_fixed_bit_makes_it_plain_newstyle),
    SESSION_OF(unknown_handshake_flags_are_not_echoed),
    SESSION_OF(only_export_name_sends_nothing_else),
    SESSION_OF(something_else_is_not_nbd),
    SESSION_OF(unknown_second_magic_is_not_nbd),
    SESSION_OF(extended_headers_are_agreed_on),
    SESSION_OF(structured_replies_are_agreed_on),
    SESSION_OF(both_refused_leaves_simple_replies),
    SESSION_OF(nothing_is_asked_for_when_both_are_switched_off),
    SESSION_OF(text_of_every_refusal_is_taken),
    SESSION_OF(information_comes_in_one_order),
    SESSION_OF(information_comes_in_another_order),
    SESSION_OF(longest_name_is_handed_out_whole),
    SESSION_OF(ack_without_information_ends_it),
    SESSION_OF(ack_with_payload_ends_it),
    SESSION_OF(short_information_ends_it),
    SESSION_OF(long_information_ends_it),
    SESSION_OF(information_of_one_byte_ends_it),
    SESSION_OF(empty_information_ends_it),
    SESSION_OF(impossible_block_sizes_end_it),
    SESSION_OF(answer_to_another_option_ends_it),
    SESSION_OF(wrong_reply_magic_ends_it),
    SESSION_OF(unsupported_go_falls_back_with_no_name),
    SESSION_OF(unsupported_go_falls_back_with_one_byte_name),
    SESSION_OF(unsupported_go_falls_back_with_long_name),
    SESSION_OF(unsupported_go_falls_back_with_longest_name),
    SESSION_OF(unknown_export_ends_with_abort_and_text),
    SESSION_OF(forbidden_export_ends_with_abort),
    SESSION_OF(server_that_requires_tls_ends_with_abort),
    SESSION_OF(unknown_refusal_is_other),
    SESSION_OF(server_that_shuts_down_ends_with_abort),
    SESSION_OF(server_that_hangs_up_is_closed),
    SESSION_OF(early_answer_waits_for_the_end_of_its_option),
    SESSION_OF(contexts_are_asked_for_before_go),
    SESSION_OF(refused_contexts_are_none),
    SESSION_OF(context_name_beyond_4096_bytes_ends_it),
    SESSION_OF(contexts_are_not_asked_for_without_structured_replies),
    SESSION_OF(exports_are_listed),
    SESSION_OF(listed_name_longer_than_its_reply_ends_it),
    SESSION_OF(export_is_described),
    SESSION_OF(contexts_are_listed_and_set),
    SESSION_OF(refused_option_leaves_the_session_usable),
    SESSION_OF(abort_answered_by_ack_is_clean),
    SESSION_OF(abort_answered_by_the_end_is_clean),
    SESSION_OF(abort_answered_by_an_error_is_clean),
    SESSION_OF(abort_waits_for_the_option_under_way),
    SESSION_OF(abandoned_handshake_closes_at_once),
    SESSION_OF(tls_comes_first_and_forgets_what_was_said),
    SESSION_OF(export_refused_in_tls_ends_with_abort),
    SESSION_OF(refused_tls_goes_on_in_clear_if_allowed),
    SESSION_OF(refused_tls_ends_it_if_required),
    SESSION_OF(plain_newstyle_server_has_no_tls),
    SESSION_OF(tls_forgets_structured_replies),
};

enum { HANDSHAKE_SESSIONS = sizeof handshake_sessions / sizeof handshake_sessions[0] };

#ifndef SESSIONS_ONLY

static void advertised_block_sizes_are_told(void)
{
    const nbd_export *got = export_after(information_comes_in_one_order);

    CHECK_EQUAL(got->size, EXPORT_SIZE);
    CHECK_EQUAL(got->flags, EXPORT_FLAGS);
    CHECK_EQUAL(got->minimum_block, 512);
    CHECK_EQUAL(got->preferred_block, 8192);
    CHECK_EQUAL(got->maximum_payload, 1 << 20);
    CHECK_EQUAL(got->block_sizes, 1);
    CHECK_EQUAL(got->style, NBD_STYLE_FIXED);
    CHECK_EQUAL(got->protocol, NBD_PROTOCOL_STRUCTURED);
}

static void defaults_are_told_if_nothing_is_advertised(void)
{
    const nbd_export *got = export_after(oldstyle_server_is_served);

    CHECK_EQUAL(got->size, EXPORT_SIZE);
    CHECK_EQUAL(got->flags, EXPORT_FLAGS);
    CHECK_EQUAL(got->minimum_block, 1);
    CHECK_EQUAL(got->preferred_block, 4096);
    CHECK_EQUAL(got->maximum_payload, 32 << 20);
    CHECK_EQUAL(got->block_sizes, 0);
    CHECK_EQUAL(got->style, NBD_STYLE_OLD);
    CHECK_EQUAL(got->protocol, NBD_PROTOCOL_SIMPLE);
    CHECK_EQUAL(got->tls, 0);
}

static void tls_is_told(void)
{
    CHECK_EQUAL(export_after(tls_comes_first_and_forgets_what_was_said)->tls, 1);
}

static void contexts_are_counted_after_ack_only(void)
{
    CHECK_EQUAL(export_after(contexts_are_asked_for_before_go)->context_count, 2);
    CHECK_EQUAL(export_after(refused_contexts_are_none)->context_count, 0);
}

static void closed_tells_the_unanswered_option(void)
{
    export_after(server_that_hangs_up_is_closed);
    CHECK_EQUAL(stage.seen.events[stage.seen.count - 1].event.option, 11);
}

// B34: what stands behind the answer to STARTTLS in clear is never taken for TLS.
static void injected(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_ack(s, 5);
    send_ack(s, 8);
    see_closed(s, NBD_ERR_INJECTED);
}

static void bytes_injected_before_tls_end_it(void)
{
    export_after(injected);
}

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < HANDSHAKE_SESSIONS; i++) {
        const session *of = &handshake_sessions[i];

        check_case_on(of->name, session_in_every_mode, of);
    }
    CHECK_CASE(advertised_block_sizes_are_told);
    CHECK_CASE(defaults_are_told_if_nothing_is_advertised);
    CHECK_CASE(tls_is_told);
    CHECK_CASE(contexts_are_counted_after_ack_only);
    CHECK_CASE(closed_tells_the_unanswered_option);
    CHECK_CASE(bytes_injected_before_tls_end_it);
    return check_end();
}

#endif
