// The seam of TLS, shown with a transport that exclusive-ors each byte: each rule is a
// session, played in every mode of play.h.  Every byte of the client is compared with
// what is wanted, in clear before the server seals and sealed behind that; so nothing
// but the client flags and STARTTLS can leave in clear unseen.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

static const char *const seam_queries[] = {"base:allocation"};

static void ask_tls(script *s)
{
    want_option(s, 5, "", 0);
}

// The server agrees, and both sides seal what they send from here on.
static void tls_begins(script *s)
{
    send_ack(s, 5);
    server_seals(s);
    see_starttls(s);
    client_calls(s, play_seal);
}

static void open_sealed(script *s, int protocol)
{
    greet_fixed(s);
    ask_tls(s);
    tls_begins(s);
    agree_on(s, protocol);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
}

static void transfer_and_close(script *s)
{
    int w, r;

    w = client_issues(s, NBD_WRITE, 0, 512, 30);
    r = client_issues(s, NBD_READ, 0, 4096, 40);
    want_request(s, w);
    want_request(s, r);
    if (s->protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, w, 0);
        send_simple(s, r, 0);
    } else {
        send_none(s, w);
        send_data(s, r, DONE, 4096, 40);
    }
    see_done(s, w, 0);
    see_done(s, r, 0);
    close_session(s);
}

/// Accepted ///

static void allowed_tls_seals_everything(script *s)
{
    s->config.flags = NBD_TLS_ALLOW;
    open_sealed(s, NBD_PROTOCOL_STRUCTURED);
    transfer_and_close(s);
}

static void required_tls_seals_everything(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    s->config.export_name = "secret name";
    open_sealed(s, NBD_PROTOCOL_EXTENDED);
    transfer_and_close(s);
}

static void simple_replies_in_tls(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE | NBD_WITHOUT_STRUCTURED_REPLY | NBD_WITHOUT_EXTENDED_HEADERS;
    open_sealed(s, NBD_PROTOCOL_SIMPLE);
    transfer_and_close(s);
}

static void contexts_are_asked_for_in_tls(script *s)
{
    static const extent one = {4096, 1};
    int r;

    s->config.flags = NBD_TLS_REQUIRE;
    s->config.queries = seam_queries;
    s->config.query_count = 1;
    greet_fixed(s);
    ask_tls(s);
    tls_begins(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_meta(s, 10, "", seam_queries, 1);
    tell_context(s, 10, 0, 5, seam_queries[0]);
    send_ack(s, 10);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    r = client_issues(s, NBD_BLOCK_STATUS, 0, 0, 4096);
    want_request(s, r);
    send_extents(s, r, DONE, 5, &one, 1);
    see_extent(s, r, 0, 0, one);
    see_done(s, r, 0);
    close_session(s);
}

static void export_name_goes_out_sealed_if_go_is_not_known(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    s->config.export_name = "secret name";
    greet_fixed(s);
    ask_tls(s);
    tls_begins(s);
    agree_on(s, NBD_PROTOCOL_SIMPLE);
    want_go(s, "secret name");
    send_refusal(s, 7, 1, "");
    want_export_name(s, "secret name");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    transfer_and_close(s);
}

static void refused_export_aborts_in_tls(script *s)
{
    s->config.flags = NBD_TLS_ALLOW;
    greet_fixed(s);
    ask_tls(s);
    tls_begins(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_go(s, "");
    send_refusal(s, 7, 2, "not for you");
    see_message(s, SESSION, 7, NBD_REP_ERR_POLICY, "not for you");
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, NBD_REP_ERR_POLICY);
}

/// Refused ///

static void refusal_goes_on_in_clear_if_tls_is_allowed(script *s)
{
    s->config.flags = NBD_TLS_ALLOW;
    greet_fixed(s);
    ask_tls(s);
    send_refusal(s, 5, 4, "not compiled in");
    see_message(s, SESSION, 5, NBD_REP_ERR_PLATFORM, "not compiled in");
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    transfer_and_close(s);
}

// Nothing stands behind STARTTLS, not even ABORT.
static void refusal_ends_it_if_tls_is_required(script *s, uint32_t number, const char *text)
{
    s->config.flags = NBD_TLS_REQUIRE;
    s->config.export_name = "secret name";
    s->config.queries = seam_queries;
    s->config.query_count = 1;
    greet_fixed(s);
    ask_tls(s);
    send_refusal(s, 5, number, text);
    if (text[0]) see_message(s, SESSION, 5, -100 - (int)number, text);
    see_closed(s, NBD_ERR_TLS);
}

static void unsupported_tls_ends_it_if_required(script *s)
{
    refusal_ends_it_if_tls_is_required(s, 1, "");
}

static void forbidden_tls_ends_it_if_required(script *s)
{
    refusal_ends_it_if_tls_is_required(s, 2, "");
}

static void invalid_tls_with_text_ends_it_if_required(script *s)
{
    refusal_ends_it_if_tls_is_required(s, 3, "try again in clear, please");
}

static void shutdown_before_tls_says_nothing_more(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    ask_tls(s);
    send_refusal(s, 5, 7, "");
    see_closed(s, NBD_REP_ERR_SHUTDOWN);
}

static void shutdown_before_allowed_tls_aborts(script *s)
{
    s->config.flags = NBD_TLS_ALLOW;
    greet_fixed(s);
    ask_tls(s);
    send_refusal(s, 5, 7, "");
    want_abort(s);
    send_end(s);
    see_closed(s, NBD_REP_ERR_SHUTDOWN);
}

/// Servers that cannot ///

static void allowed_tls_is_not_asked_of_a_plain_newstyle_server(script *s)
{
    s->config.flags = NBD_TLS_ALLOW;
    send_greeting(s, NO_ZEROES);
    want_client_flags(s, NO_ZEROES);
    want_export_name(s, "");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    transfer_and_close(s);
}

static void allowed_tls_is_not_asked_of_an_oldstyle_server(script *s)
{
    s->config.flags = NBD_TLS_ALLOW;
    send_oldstyle(s, EXPORT_SIZE, EXPORT_FLAGS);
    see_ready(s);
    transfer_and_close(s);
}

static void required_tls_says_nothing_to_a_plain_newstyle_server(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    send_greeting(s, 0);
    see_closed(s, NBD_ERR_TLS);
}

static void required_tls_says_nothing_to_an_oldstyle_server(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    send_oldstyle(s, EXPORT_SIZE, EXPORT_FLAGS);
    see_closed(s, NBD_ERR_TLS);
}

static void required_tls_says_nothing_if_the_fixed_bit_is_hidden(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    s->config.flags |= NBD_WITHOUT_FIXED_NEWSTYLE;
    send_greeting(s, FIXED | NO_ZEROES);
    see_closed(s, NBD_ERR_TLS);
}

/// Answers that do not fit ///

static void answer_to_starttls_ends_it(script *s, uint32_t option, uint32_t type, uint32_t length)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    ask_tls(s);
    script_close(s, send_reply_open(s, option, type, length));
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void acknowledgement_of_tls_with_payload_ends_it(script *s)
{
    answer_to_starttls_ends_it(s, 5, 1, 4);
}

static void acknowledgement_of_another_option_is_none_of_tls(script *s)
{
    answer_to_starttls_ends_it(s, 8, 1, 0);
}

static void information_instead_of_tls_ends_it(script *s)
{
    answer_to_starttls_ends_it(s, 5, 3, 12);
}

// Sealing it twice puts what the server sends last in clear.
static void unseal_last(script *s)
{
    const step *last = &s->steps[s->step_count - 1];
    unsigned char *bytes = s->bytes + (last->bytes - s->bytes);
    size_t i;

    for (i = 0; i < last->size; i++)
        bytes[i] ^= SEAL_KEY;
}

static void answer_in_clear_after_tls_began_ends_it(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    ask_tls(s);
    tls_begins(s);
    want_option(s, 11, "", 0);
    send_ack(s, 11);
    unseal_last(s);
    see_closed(s, NBD_ERR_PROTOCOL);
}

/// The program starts TLS ///

// Structured replies, a context and an export are known in clear.
static void learn_in_clear(script *s)
{
    open_options(s);
    option_succeeds(s, 8);
    client_asks_contexts(s, 10, "disk", seam_queries, 1);
    want_meta(s, 10, "disk", seam_queries, 1);
    tell_context(s, 10, 0, 3, seam_queries[0]);
    send_ack(s, 10);
    see_option(s, 10, 0);
    client_asks(s, 6, "disk");
    want_info(s, 6, "disk");
    send_info_export(s, 6, 4096, NBD_OFFERS_FLAGS | NBD_OFFERS_READ_ONLY);
    send_info_block_size(s, 6, 512, 1024, 2048);
    send_ack(s, 6);
    see_option(s, 6, 0);
}

static void start_tls(script *s)
{
    client_asks(s, 5, NULL);
    ask_tls(s);
    tls_begins(s);
}

static int no_export_is_known(nbd_client *client)
{
    const nbd_export *got = nbd_negotiated(client);

    return got->size == 0 && got->flags == 0 && got->block_sizes == 0 ? 0 : NBD_ERR_STATE;
}

static void all_that_was_learned_in_clear_is_forgotten(script *s)
{
    static nbd_op status;

    status.command = NBD_BLOCK_STATUS;
    status.size = 512;
    learn_in_clear(s);
    start_tls(s);
    client_calls(s, no_export_is_known);
    go_asked(s, "disk");
    op_is_refused_here(s, &status, NBD_ERR_UNSUPPORTED);
    transfer_and_close(s);
}

static void extended_headers_of_the_clear_are_forgotten(script *s)
{
    open_options(s);
    option_succeeds(s, 11);
    start_tls(s);
    client_asks(s, 1, "disk");
    want_export_name(s, "disk");
    send_export(s, EXPORT_SIZE, EXPORT_FLAGS, 0);
    see_ready(s);
    transfer_and_close(s);
}

static void all_is_negotiated_anew_in_tls(script *s)
{
    static const extent one = {512, UINT64_C(2)};
    int r;

    learn_in_clear(s);
    start_tls(s);
    option_succeeds(s, 11);
    client_asks_contexts(s, 10, "disk", seam_queries, 1);
    want_meta(s, 10, "disk", seam_queries, 1);
    tell_context(s, 10, 0, 8, seam_queries[0]);
    send_ack(s, 10);
    see_option(s, 10, 0);
    s->protocol = NBD_PROTOCOL_EXTENDED;
    go_asked(s, "disk");
    r = client_issues(s, NBD_BLOCK_STATUS, 0, 0, 512);
    want_request(s, r);
    send_extents(s, r, DONE, 8, &one, 1);
    see_extent(s, r, 0, 0, one);
    see_done(s, r, 0);
    transfer_and_close(s);
}

static void export_of_the_clear_does_not_count_in_tls(script *s)
{
    learn_in_clear(s);
    start_tls(s);
    client_asks(s, 7, "disk");
    want_go(s, "disk");
    send_ack(s, 7);
    see_closed(s, NBD_ERR_PROTOCOL);
}

static void tls_is_started_once_only(script *s)
{
    open_options(s);
    start_tls(s);
    option_is_refused_here(s, 5, NBD_ERR_STATE);
    option_succeeds(s, 8);
    option_is_refused_here(s, 5, NBD_ERR_STATE);
    s->protocol = NBD_PROTOCOL_STRUCTURED;
    go_asked(s, "");
    transfer_and_close(s);
}

static void refused_tls_leaves_the_options_usable(script *s)
{
    open_options(s);
    client_asks(s, 5, NULL);
    ask_tls(s);
    refuse_option(s, 5, 2, "behind the firewall?");
    option_succeeds(s, 8);
    client_asks(s, 5, NULL);
    ask_tls(s);
    tls_begins(s);
    go_asked(s, "");
    transfer_and_close(s);
}

static void options_wait_for_tls_if_it_is_required(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    open_options(s);
    option_is_refused_here(s, 3, NBD_ERR_TLS);
    option_is_refused_here(s, 8, NBD_ERR_TLS);
    option_is_refused_here(s, 7, NBD_ERR_TLS);
    option_is_refused_here(s, 1, NBD_ERR_TLS);
    start_tls(s);
    option_succeeds(s, 8);
    s->protocol = NBD_PROTOCOL_STRUCTURED;
    go_asked(s, "");
    transfer_and_close(s);
}

static void refused_tls_that_was_asked_for_ends_it_if_required(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    open_options(s);
    client_asks(s, 5, NULL);
    ask_tls(s);
    send_refusal(s, 5, 2, "");
    see_closed(s, NBD_ERR_TLS);
}

// Options wait for the program as long as it has not started TLS.
static void options_are_refused_until_tls_has_started(script *s)
{
    open_options(s);
    client_asks(s, 5, NULL);
    ask_tls(s);
    send_ack(s, 5);
    server_seals(s);
    see_starttls(s);
    option_is_refused_here(s, 3, NBD_ERR_STATE);
    option_is_refused_here(s, 5, NBD_ERR_STATE);
    client_calls(s, play_seal);
    go_asked(s, "");
    transfer_and_close(s);
}

/// Endings ///

static void disconnect_before_required_tls_says_nothing(script *s)
{
    s->unlawful = 1;
    s->config.flags = NBD_TLS_REQUIRE;
    open_options(s);
    client_disconnects(s);
    see_closed(s, 0);
}

// The stream is in nobody's hands: nothing can be said politely.
static void disconnect_instead_of_tls_closes_at_once(script *s)
{
    open_options(s);
    client_asks(s, 5, NULL);
    ask_tls(s);
    send_ack(s, 5);
    see_starttls(s);
    client_disconnects(s);
    see_closed(s, 0);
}

// The server waits for a TLS handshake then, and for nothing else.
static void disconnect_while_tls_is_asked_for_closes_with_the_answer(script *s)
{
    open_options(s);
    client_asks(s, 5, NULL);
    ask_tls(s);
    client_disconnects(s);
    send_ack(s, 5);
    see_closed(s, 0);
}

static void abandon_instead_of_tls_closes_at_once(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    ask_tls(s);
    send_ack(s, 5);
    see_starttls(s);
    client_abandons(s);
    see_closed(s, NBD_ERR_ABANDONED);
}

static void abort_goes_out_sealed(script *s)
{
    open_options(s);
    start_tls(s);
    option_succeeds(s, 8);
    client_disconnects(s);
    want_abort(s);
    send_ack(s, 2);
    send_end(s);
    see_closed(s, 0);
}

static const session seam_sessions[] = {
    SESSION_OF(allowed_tls_seals_everything),
    SESSION_OF(required_tls_seals_everything),
    SESSION_OF(simple_replies_in_tls),
    SESSION_OF(contexts_are_asked_for_in_tls),
    SESSION_OF(export_name_goes_out_sealed_if_go_is_not_known),
    SESSION_OF(refused_export_aborts_in_tls),
    SESSION_OF(refusal_goes_on_in_clear_if_tls_is_allowed),
    SESSION_OF(unsupported_tls_ends_it_if_required),
    SESSION_OF(forbidden_tls_ends_it_if_required),
    SESSION_OF(invalid_tls_with_text_ends_it_if_required),
    SESSION_OF(shutdown_before_tls_says_nothing_more),
    SESSION_OF(shutdown_before_allowed_tls_aborts),
    SESSION_OF(allowed_tls_is_not_asked_of_a_plain_newstyle_server),
    SESSION_OF(allowed_tls_is_not_asked_of_an_oldstyle_server),
    SESSION_OF(required_tls_says_nothing_to_a_plain_newstyle_server),
    SESSION_OF(required_tls_says_nothing_to_an_oldstyle_server),
    SESSION_OF(required_tls_says_nothing_if_the_fixed_bit_is_hidden),
    SESSION_OF(acknowledgement_of_tls_with_payload_ends_it),
    SESSION_OF(acknowledgement_of_another_option_is_none_of_tls),
    SESSION_OF(information_instead_of_tls_ends_it),
    SESSION_OF(answer_in_clear_after_tls_began_ends_it),
    SESSION_OF(all_that_was_learned_in_clear_is_forgotten),
    SESSION_OF(extended_headers_of_the_clear_are_forgotten),
    SESSION_OF(all_is_negotiated_anew_in_tls),
    SESSION_OF(export_of_the_clear_does_not_count_in_tls),
    SESSION_OF(tls_is_started_once_only),
    SESSION_OF(refused_tls_leaves_the_options_usable),
    SESSION_OF(options_wait_for_tls_if_it_is_required),
    SESSION_OF(refused_tls_that_was_asked_for_ends_it_if_required),
    SESSION_OF(options_are_refused_until_tls_has_started),
    SESSION_OF(disconnect_before_required_tls_says_nothing),
    SESSION_OF(disconnect_instead_of_tls_closes_at_once),
    SESSION_OF(disconnect_while_tls_is_asked_for_closes_with_the_answer),
    SESSION_OF(abandon_instead_of_tls_closes_at_once),
    SESSION_OF(abort_goes_out_sealed),
};

enum { SEAM_SESSIONS = sizeof seam_sessions / sizeof seam_sessions[0] };

#ifndef SESSIONS_ONLY

static void whether_tls_runs_is_told(void)
{
    CHECK_EQUAL(export_after(allowed_tls_seals_everything)->tls, 1);
    CHECK_EQUAL(export_after(required_tls_seals_everything)->tls, 1);
    CHECK_EQUAL(export_after(refusal_goes_on_in_clear_if_tls_is_allowed)->tls, 0);
    CHECK_EQUAL(export_after(allowed_tls_is_not_asked_of_an_oldstyle_server)->tls, 0);
    CHECK_EQUAL(export_after(refused_tls_leaves_the_options_usable)->tls, 1);
    CHECK_EQUAL(export_after(disconnect_instead_of_tls_closes_at_once)->tls, 0);
}

static void nothing_of_the_clear_is_told_in_tls(void)
{
    const nbd_export *got = export_after(all_that_was_learned_in_clear_is_forgotten);

    CHECK_EQUAL(got->protocol, NBD_PROTOCOL_SIMPLE);
    CHECK_EQUAL(got->context_count, 0);
    CHECK_EQUAL(got->size, EXPORT_SIZE);
    CHECK_EQUAL(got->flags, EXPORT_FLAGS);
    CHECK_EQUAL(got->block_sizes, 0);
    CHECK_EQUAL(got->minimum_block, 1);
    CHECK_EQUAL(got->maximum_payload, 32 << 20);
}

// The wire itself: flags and STARTTLS in clear, and behind them no byte of the name.
static void name_of_the_export_is_never_on_the_wire(void)
{
    static const char name[] = "secret name";
    size_t size = sizeof name - 1, i;

    export_after(required_tls_seals_everything);
    CHECK(stage.in_size > 20 + size);
    CHECK_BYTES(stage.in, "\0\0\0\3IHAVEOPT\0\0\0\5\0\0\0\0", 20);
    CHECK_EQUAL(stage.in[20] ^ SEAL_KEY, 'I');
    for (i = 0; i + size <= stage.in_size; i++)
        CHECK(memcmp(stage.in + i, name, size) != 0);
}

static void inject(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    ask_tls(s);
    send_ack(s, 5);
    send_ack(s, 11);
    see_closed(s, NBD_ERR_INJECTED);
}

// With the acknowledgement in one piece they are found out before TLS starts.
static void bytes_behind_the_acknowledgement_end_it(void)
{
    const session one = {check.name, inject};
    static trace seen;
    mode by_hand = whole_mode;

    play_whole(session_script(&one), &seen);
    by_hand.own = 1;
    play_uncut(session_script(&one), &by_hand, NULL);
}

static void inject_late(script *s)
{
    s->config.flags = NBD_TLS_REQUIRE;
    greet_fixed(s);
    ask_tls(s);
    send_ack(s, 5);
    send_ack(s, 11);
    server_seals(s);
    see_starttls(s);
    client_calls(s, play_seal);
    want_option(s, 11, "", 0);
    see_closed(s, NBD_ERR_PROTOCOL);
}

// Byte by byte they are left to TLS, which cannot make sense of them.
static void late_bytes_behind_the_acknowledgement_are_left_to_tls(void)
{
    const session one = {check.name, inject_late};
    mode bytes = whole_mode;

    bytes.piece = 1;
    bytes.blocking = 1;
    play_uncut(session_script(&one), &bytes, NULL);
}

static int starttls_too_early(nbd_client *client)
{
    return nbd_starttls(client, NULL) == NBD_ERR_STATE ? 0 : NBD_ERR_ARG;
}

static void starttls_that_is_not_due(script *s)
{
    open_options(s);
    client_calls(s, starttls_too_early);
    start_tls(s);
    client_calls(s, starttls_too_early);
    option_succeeds(s, 8);
    s->protocol = NBD_PROTOCOL_STRUCTURED;
    go_asked(s, "");
    client_calls(s, starttls_too_early);
    close_session(s);
}

static void starttls_is_refused_when_it_is_not_due(void)
{
    const session one = {check.name, starttls_that_is_not_due};

    play_every_mode(session_script(&one));
}

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < SEAM_SESSIONS; i++) {
        const session *of = &seam_sessions[i];

        check_case_on(of->name, session_in_every_mode, of);
    }
    CHECK_CASE(whether_tls_runs_is_told);
    CHECK_CASE(nothing_of_the_clear_is_told_in_tls);
    CHECK_CASE(name_of_the_export_is_never_on_the_wire);
    CHECK_CASE(bytes_behind_the_acknowledgement_end_it);
    CHECK_CASE(late_bytes_behind_the_acknowledgement_are_left_to_tls);
    CHECK_CASE(starttls_is_refused_when_it_is_not_due);
    return check_end();
}

#endif
