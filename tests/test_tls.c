// TLS by mbedTLS: sessions of play.h over a server in process (tls_peer.h).  The transport
// that is cut, blocked and broken is the one below TLS: it carries records.
#define _DEFAULT_SOURCE 1
#include <sys/stat.h>

#ifndef NBD_MBEDTLS

#include <stdio.h>

// The Makefile defines NBD_MBEDTLS where the library is installed.
int main(void)
{
    return printf("skip sessions over TLS: mbedTLS is not installed\n") < 0;
}

#else

#include <mbedtls/ssl.h>

static int spy_ssl_write(mbedtls_ssl_context *ssl, const unsigned char *data, size_t size);

#define mbedtls_ssl_write spy_ssl_write
#define NBD_IMPLEMENTATION
#include "nbd.h"
#undef mbedtls_ssl_write

#include "tls_play.h"

static int spy_ssl_write(mbedtls_ssl_context *ssl, const unsigned char *data, size_t size)
{
    int result;

    CHECK(size > 0);
    // Reading may have sent it meanwhile.
    if (ssl->PEER_PRIVATE(out_left) == 0) live.blocked = NULL;
    if (live.blocked) {
        CHECK(data == live.blocked);
        CHECK_EQUAL(size, live.blocked_size);
        live.repeats++;
        if (stage.client.out_offered > size) live.grown++;
    }
    result = mbedtls_ssl_write(ssl, data, size);
    if (result > 0) {
        int in_stage = data >= live.tls.stage && data < live.tls.stage + sizeof live.tls.stage;

        if (!live.first_write) live.first_write = (size_t)result;
        *(in_stage ? &live.staged : &live.in_place) += (size_t)result;
    }
    live.blocked = result == MBEDTLS_ERR_SSL_WANT_WRITE ? data : NULL;
    live.blocked_size = size;
    live.writes++;
    return result;
}

// The modes of play.h that have a transport.
static void play_modes_over_tls(const script *s, size_t random_modes)
{
    static trace whole;
    size_t i;

    play_whole(s, &whole);
    for (i = 0; i < sizeof play_modes / sizeof play_modes[0]; i++) {
        if (!play_modes[i].own) play_uncut(s, &play_modes[i], &whole);
    }
    for (i = 0; i < random_modes; i++) {
        mode random = whole_mode;

        random.name = "random";
        random.piece = 0;
        random.seed = i + 1;
        random.buffer = i % 2 ? NBD_BUFFER_NAMES : NBD_BUFFER_MIN + 16 * i;
        play_uncut(s, &random, &whole);
    }
}

static void check_clean_end(void)
{
    CHECK_EQUAL(live.server.notified, 1);
    CHECK_EQUAL(live.tls.verify_flags, 0);
    CHECK_EQUAL(live.tls.alert, 0);
}

static void each_version(void (*wanted)(int version), void (*run)(void))
{
    size_t i;

    for (i = 0; i < VERSIONS; i++) {
        play_variant = (unsigned)versions[i];
        wanted(versions[i]);
        run();
    }
}

static void play_session_in_modes(void)
{
    static trace whole;
    const script *s = write_session(whole_session);

    play_modes_over_tls(s, 20);
    play_whole(s, &whole);
    check_clean_end();
}

static void session_with_certificates_in_every_mode(void)
{
    each_version(wish_x509, play_session_in_modes);
}

static void session_with_shared_key_in_every_mode(void)
{
    each_version(wish_psk, play_session_in_modes);
}

/// Records of every shape ///

static void play_some_modes(void)
{
    static trace whole;
    int tiny = wish.manner.record > 0 && wish.manner.record < 100;
    const script *s = write_session(tiny ? short_session : whole_session);
    size_t i;

    play_whole(s, &whole);
    CHECK(live.tls.transport.detail == NULL);
    for (i = 0; i < 6; i++)
        play_uncut(s, &play_modes[i], &whole);
    for (i = 0; i < 4; i++) {
        mode random = whole_mode;

        random.name = "random";
        random.piece = 0;
        random.seed = i + 1;
        play_uncut(s, &random, &whole);
    }
}

// Sets one thing of the server's manner to each of some values.
static void in_manner(size_t *record, unsigned *noise, const size_t *values, size_t count)
{
    size_t i, v;

    for (v = 0; v < VERSIONS; v++) {
        for (i = 0; i < count; i++) {
            play_variant = (unsigned)(versions[v] * 1000) + (unsigned)i;
            wish_psk(versions[v]);
            if (record) *record = values[i];
            if (noise) *noise = (unsigned)values[i];
            play_some_modes();
        }
    }
}

static void replies_are_cut_in_records_of_any_size(void)
{
    // The least reply has 20 bytes: four in five records, five in one, and one over many.
    static const size_t sizes[] = {1, 4, 5, 100, 10006, 0};

    in_manner(&wish.manner.record, NULL, sizes, sizeof sizes / sizeof sizes[0]);
}

// Four in a row are more than mbedTLS takes.
static void empty_records_are_no_end(void)
{
    static const size_t counts[] = {1, 2, 3};

    in_manner(NULL, &wish.manner.empty, counts, 3);
}

static void tickets_and_renegotiation_at_any_time_are_passed_over(void)
{
    static const size_t counts[] = {1, 2, 7};

    in_manner(NULL, &wish.manner.tickets, counts, 3);
}

static void warnings_at_any_time_are_passed_over(void)
{
    static const size_t counts[] = {1, 3};

    in_manner(NULL, &wish.manner.warnings, counts, 2);
}

static void tickets_that_are_told_of_are_passed_over(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        wish.signal_tickets = 1;
        wish.manner.tickets = 2;
        play_some_modes();
    }
}

// Below TLS it is the same as NBD_IO_WRITE.
static void transport_may_say_that_it_sent_nothing(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_psk(versions[v]);
        wish.says_zero = 1;
        play_some_modes();
    }
}

/// Streams that break ///

static void cut_everywhere(void)
{
    static trace whole;
    const script *s = write_session(short_session);
    size_t size, at;

    play_whole(s, &whole);
    size = live.server.out_size;
    for (at = 0; at <= size; at++) {
        mode how = broken_mode(at % 3 ? uncut : 150, at % 2 ? NBD_IO_ERROR : NBD_IO_EOF);

        wish.cut_at = at;
        play_variant = (unsigned)at;
        play_once(&stage, s, &how);
        check_broken_end(at < size && how.ended == NBD_IO_EOF ? "TLS: " : NULL);
    }
}

static void stream_may_end_or_fail_at_any_byte(void)
{
    each_version(wish_psk, cut_everywhere);
}

static void flip_everywhere(void)
{
    static trace whole;
    const script *s = write_session(short_session);
    size_t size, at;

    play_whole(s, &whole);
    size = live.server.out_size;
    for (at = 0; at < size; at++) {
        mode how = broken_mode(uncut, NBD_IO_EOF);

        wish.flip_at = at;
        play_variant = (unsigned)at;
        play_once(&stage, s, &how);
        check_broken_end("TLS: ");
    }
}

static void no_byte_can_be_changed_unnoticed(void)
{
    each_version(wish_psk, flip_everywhere);
}

static void alert_everywhere(void)
{
    static trace whole;
    const script *s = write_session(short_session);
    size_t size, at;

    play_whole(s, &whole);
    size = live.server.sent;
    for (at = 1; at < size; at++) {
        mode how = broken_mode(at % 2 ? uncut : 100, NBD_IO_EOF);

        wish.manner.alert_after = at;
        play_variant = (unsigned)at;
        play_once(&stage, s, &how);
        CHECK_EQUAL(closing_error(&stage.seen), NBD_ERR_TRANSPORT);
        CHECK_EQUAL(live.tls.alert, MBEDTLS_SSL_ALERT_MSG_INTERNAL_ERROR);
    }
}

static void alert_at_any_byte_ends_it(void)
{
    each_version(wish_psk, alert_everywhere);
}

static void sending_fails_everywhere(void)
{
    static trace whole;
    const script *s = write_session(short_session);
    size_t size, at;

    play_whole(s, &whole);
    size = live.server.in_size;
    for (at = 0; at < size; at++) {
        mode how = broken_mode(at % 2 ? uncut : 1, NBD_IO_EOF);

        wish.send_fails_at = at;
        play_variant = (unsigned)at;
        play_once(&stage, s, &how);
        check_broken_end(NULL);
    }
}

static void sending_may_fail_at_any_byte(void)
{
    each_version(wish_psk, sending_fails_everywhere);
}

static const struct {
    unsigned char number;
    const char *text;
} alerts[] = {
    {10, "TLS: server sent an alert"},
    {20, "TLS: server cannot read or verify what the client sent: the keys differ"},
    {40, "TLS: no common cipher or key, or the server wants a certificate"},
    {42, "TLS: server refuses the client's certificate, or wants one"},
    {43, "TLS: server refuses the client's certificate, or wants one"},
    {44, "TLS: server refuses the client's certificate, or wants one"},
    {45, "TLS: the client's certificate has expired"},
    {46, "TLS: server refuses the client's certificate, or wants one"},
    {48, "TLS: server does not know the authority of the client's certificate"},
    {49, "TLS: server denies access"},
    {51, "TLS: server cannot read or verify what the client sent: the keys differ"},
    {70, "TLS: no common version of TLS"},
    {71, "TLS: server wants better ciphers"},
    {80, "TLS: server sent an alert"},
    {112, "TLS: server does not know its name"},
    {115, "TLS: server does not know the user"},
    {116, "TLS: server wants a certificate of the client"},
};

static void alerts_are_named(void)
{
    size_t v, i;

    for (v = 0; v < VERSIONS; v++) {
        for (i = 0; i < sizeof alerts / sizeof alerts[0]; i++) {
            mode how = broken_mode(uncut, NBD_IO_EOF);

            play_variant = alerts[i].number;
            wish_psk(versions[v]);
            wish.manner.alert_after = 1;
            wish.manner.alert = alerts[i].number;
            play_once(&stage, write_session(short_session), &how);
            CHECK_EQUAL(live.tls.alert, alerts[i].number);
            CHECK(strcmp(nbd_detail(&stage.client), alerts[i].text) == 0);
        }
    }
}

static void check_hang_up(size_t at, const char *detail)
{
    mode how = broken_mode(uncut, NBD_IO_EOF);

    wish.cut_at = at;
    play_once(&stage, write_session(short_session), &how);
    CHECK_EQUAL(closing_error(&stage.seen), NBD_ERR_TRANSPORT);
    CHECK(strcmp(nbd_detail(&stage.client), detail) == 0);
}

// A server's hello has less than 200 bytes, with its certificate there are more.
static void hang_up_in_the_handshake_is_explained_by_what_was_said(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        check_hang_up(0, "TLS: no answer: there may be no common version or cipher");
        check_hang_up(200, "TLS: no answer: the server may want a certificate of the client");
        wish_certificate(&people.client);
        check_hang_up(0, "TLS: no answer: there may be no common version or cipher");
        check_hang_up(200, "TLS: no answer: the server may refuse the client's certificate");
    }
}

/// The end ///

static void see_closed_as(script *s, int error, const char *detail)
{
    see_closed(s, error);
    s->steps[s->step_count - 1].event.detail = detail;
}

static const char no_notify[] = "TLS: the stream ended without close_notify";
static const char hung_up[] = "TLS: no answer: the user or the key may be wrong";

static void server_ends_in_the_middle(script *s, const char *detail)
{
    int r;

    open_tls(s);
    r = client_issues(s, NBD_READ, 0, 4096, 40);
    want_request(s, r);
    send_end(s);
    see_done(s, r, NBD_ERR_CLOSED);
    see_closed_as(s, NBD_ERR_CLOSED, detail);
}

static void notified_end_in_flight(script *s)
{
    server_ends_in_the_middle(s, "during transmission");
}

static void unnotified_end_in_flight(script *s)
{
    server_ends_in_the_middle(s, no_notify);
}

static void play_end(void (*write)(script *s), int no_notify_wanted)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_psk(versions[v]);
        wish.manner.no_notify = no_notify_wanted;
        play_modes_over_tls(write_session(write), 5);
    }
}

static void close_notify_before_the_goodbye_is_an_error(void)
{
    play_end(notified_end_in_flight, 0);
}

static void end_without_close_notify_is_named(void)
{
    play_end(unnotified_end_in_flight, 1);
}

static void missing_close_notify_after_the_goodbye_is_forgiven(void)
{
    play_end(whole_session, 1);
}

static void hang_up_after_the_handshake(script *s)
{
    until_tls(s);
    want_option(s, 11, "", 0);
    send_end(s);
    see_closed_as(s, NBD_ERR_CLOSED, hung_up);
}

static void hang_up_right_after_the_handshake_is_named(void)
{
    play_end(hang_up_after_the_handshake, 0);
    play_end(hang_up_after_the_handshake, 1);
}

static void flood(script *s)
{
    until_tls(s);
    want_option(s, 11, "", 0);
    send_ack(s, 11);
    see_closed_as(s, NBD_ERR_TRANSPORT,
                  "TLS: server sends records without data, one after the other");
}

static void records_without_data_cannot_hold_a_poll(void)
{
    static trace whole;
    size_t v;

    for (v = 0; v < VERSIONS * 2; v++) {
        play_variant = (unsigned)v;
        wish_psk(versions[v / 2]);
        *(v % 2 ? &wish.manner.tickets : &wish.manner.warnings) = 9000;
        play_whole(write_session(flood), &whole);
    }
}

/// Servers and clients that do not fit ///

typedef struct misfit {
    const char *name; // the rule
    void (*wish)(int version);
    const char *detail[2]; // TLS 1.2, TLS 1.3
    uint32_t flag;         // of verify_flags, or 0
    int alert[2];
} misfit;

static void wish_other_authority(int version)
{
    wish_x509(version);
    wish.manner.who = &people.strange_server;
}

static void wish_self_signed(int version)
{
    wish_x509(version);
    wish.manner.who = &people.alone;
}

static void wish_expired(int version)
{
    wish_x509(version);
    wish.manner.who = &people.expired;
}

static void wish_not_yet_valid(int version)
{
    wish_x509(version);
    wish.manner.who = &people.future;
}

static void wish_other_name(int version)
{
    wish_x509(version);
    wish.verify_name = "other.example";
}

// A program that asks elsewhere, and does not like what it hears.
static int find_revoked(void *context, mbedtls_x509_crt *certificate, int depth, uint32_t *flags)
{
    (void)context;
    (void)certificate;
    if (depth == 0) *flags |= MBEDTLS_X509_BADCERT_REVOKED;
    return 0;
}

static void ask_elsewhere(mbedtls_ssl_config *config)
{
    mbedtls_ssl_conf_verify(config, find_revoked, NULL);
}

static void wish_revoked(int version)
{
    wish_x509(version);
    wish.adjust = ask_elsewhere;
}

static void want_strong_keys(mbedtls_ssl_config *config)
{
    static mbedtls_x509_crt_profile strong;

    strong = mbedtls_x509_crt_profile_default;
    strong.allowed_curves = MBEDTLS_X509_ID_FLAG(MBEDTLS_ECP_DP_SECP521R1);
    mbedtls_ssl_conf_cert_profile(config, &strong);
}

static void wish_strong_keys(int version)
{
    wish_x509(version);
    wish.adjust = want_strong_keys;
}

static void wish_no_client_certificate(int version)
{
    wish_x509(version);
    wish_certificate(NULL);
}

static void wish_strange_client_certificate(int version)
{
    wish_x509(version);
    wish_certificate(&people.strange_client);
}

static void wish_wrong_psk(int version)
{
    wish_psk(version);
    wish.options.psk = "0123456789abcdeF";
}

static void wish_unknown_user(int version)
{
    wish_psk(version);
    wish.options.user = "mallory";
}

static void wish_psk_of_server_with_certificate(int version)
{
    wish_psk(version);
    wish.manner.key = NULL;
    wish.manner.suites = NULL;
    wish.manner.who = &people.server;
}

static void wish_certificate_of_server_with_psk(int version)
{
    wish_x509(version);
    wish.manner.who = NULL;
    wish.manner.user = "alice";
    wish.manner.key = "0123456789abcdef";
    wish.manner.suites = quick_suites;
}

static const char nothing_common[] =
    "TLS: no common cipher or key, or the server wants a certificate";
static const char wants_certificate[] =
    "TLS: no answer: the server may want a certificate of the client";
static const char other_authority[] =
    "TLS: server's certificate is not signed by a trusted authority";
static const char self_signed[] = "TLS: server's certificate is signed by itself";
static const char expired[] = "TLS: server's certificate has expired";
static const char not_yet_valid[] = "TLS: server's certificate is not valid yet";
static const char other_name[] = "TLS: server's certificate is for another name";
static const char revoked[] = "TLS: server's certificate is revoked";
static const char too_weak[] = "TLS: server's certificate is not good enough";
static const char keys_differ[] =
    "TLS: server cannot read or verify what the client sent: the keys differ";

// A server of mbedTLS says nothing of a missing certificate in TLS 1.2, and in TLS 1.3 what
// no client can read; other servers send alerts.
static const misfit misfits[] = {
    {"server_of_another_authority_is_refused",
     wish_other_authority,
     {other_authority, other_authority},
     MBEDTLS_X509_BADCERT_NOT_TRUSTED,
     {0, 0}},
    {"server_that_signs_itself_is_refused",
     wish_self_signed,
     {self_signed, self_signed},
     NBD_TLS_SELF_SIGNED,
     {0, 0}},
    {"expired_certificate_is_refused",
     wish_expired,
     {expired, expired},
     MBEDTLS_X509_BADCERT_EXPIRED,
     {0, 0}},
    {"certificate_of_the_future_is_refused",
     wish_not_yet_valid,
     {not_yet_valid, not_yet_valid},
     MBEDTLS_X509_BADCERT_FUTURE,
     {0, 0}},
    {"certificate_of_another_name_is_refused",
     wish_other_name,
     {other_name, other_name},
     MBEDTLS_X509_BADCERT_CN_MISMATCH,
     {0, 0}},
    {"certificate_that_the_program_knows_as_revoked_is_refused",
     wish_revoked,
     {revoked, revoked},
     MBEDTLS_X509_BADCERT_REVOKED,
     {0, 0}},
    {"certificate_with_a_weak_key_is_refused",
     wish_strong_keys,
     {too_weak, too_weak},
     MBEDTLS_X509_BADCERT_BAD_KEY,
     {0, 0}},
    {"missing_client_certificate_is_named",
     wish_no_client_certificate,
     {wants_certificate, wants_certificate},
     0,
     {0, 0}},
    {"client_certificate_of_another_authority_is_named",
     wish_strange_client_certificate,
     {"TLS: server does not know the authority of the client's certificate",
      "TLS: no answer: the server may refuse the client's certificate"},
     0,
     {48, 0}},
    {"wrong_shared_key_is_named", wish_wrong_psk, {keys_differ, keys_differ}, 0, {20, 51}},
    {"unknown_user_is_named",
     wish_unknown_user,
     {"TLS: server does not know the user", nothing_common},
     0,
     {115, 0}},
    {"client_with_shared_key_takes_no_certificate",
     wish_psk_of_server_with_certificate,
     {nothing_common, nothing_common},
     0,
     {40, 0}},
    {"client_with_certificates_takes_no_shared_key",
     wish_certificate_of_server_with_psk,
     {nothing_common, nothing_common},
     0,
     {40, 40}},
};

enum { MISFITS = sizeof misfits / sizeof misfits[0] };

static const char *misfit_detail;

static void refused(script *s)
{
    until_tls(s);
    see_closed_as(s, NBD_ERR_TRANSPORT, misfit_detail);
}

// The server has not read a byte of NBD by then.
static void play_misfit(const void *of)
{
    const misfit *it = of;
    size_t v, i;

    for (v = 0; v < VERSIONS; v++) {
        int at = versions[v] == 13;
        static trace whole;

        play_variant = (unsigned)versions[v];
        it->wish(versions[v]);
        misfit_detail = it->detail[at];
        for (i = 0; i < 4; i++) {
            play_uncut(write_session(refused), &play_modes[2 * i], i > 0 ? &whole : NULL);
            if (i == 0) whole = stage.seen;
            CHECK_EQUAL(live.server.received, 0);
            CHECK(live.tls.tls_error != 0);
            CHECK_EQUAL(live.tls.verify_flags & it->flag, it->flag);
            CHECK_EQUAL(live.tls.alert, it->alert[at]);
        }
    }
}

/// Names ///

// Plays a session that must succeed, or be refused for the name, with these names.
static void play_names(const char *verify_name, const char *server_name, const char *sni, int good)
{
    static trace whole;

    wish.verify_name = verify_name;
    wish.server_name = server_name;
    misfit_detail = other_name;
    play_whole(write_session(good ? whole_session : refused), &whole);
    CHECK(strcmp(live.server.sni, sni) == 0);
}

static void three_names_may_differ(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        play_names("server.example", NULL, "server.example", 1);
        play_names("server.example", "front.example", "front.example", 1);
        play_names("server.example", "", "", 1);
        play_names("SERVER.example", NULL, "SERVER.example", 1);
        play_names("other.example", "server.example", "server.example", 0);
        play_names("other.example", "", "", 0);
        play_names("server.example.", NULL, "server.example.", 0);
        play_names("\n", "server.example", "server.example", 0);
        CHECK_EQUAL(live.server.received, 0);
    }
}

static void address_is_not_sent_as_a_name(void)
{
    // mbedTLS 2.28 looks for addresses in the common name only, if there is no other name.
    int finds_addresses = MBEDTLS_VERSION_NUMBER >= 0x03000000;
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        wish.manner.who = &people.address;
        play_names("127.0.0.1", NULL, "", finds_addresses);
        play_names("127.0.0.2", NULL, "", 0);
        play_names("fe80::1", NULL, "", 0);
        play_names("127.0.0.1", "localhost", "localhost", finds_addresses);
    }
}

#ifdef MBEDTLS_SSL_PROTO_TLS1_3

// The server wants a hello with another group: the name of the first must stay.
static void hello_that_is_repeated_has_the_same_name(void)
{
    static const uint16_t groups[] = {MBEDTLS_SSL_IANA_TLS_GROUP_SECP521R1, 0};

    wish_x509(13);
    wish.manner.groups = groups;
    play_names("server.example", "front.example", "front.example", 1);
    play_names("other.example", "server.example", "server.example", 0);
    CHECK_EQUAL(live.server.records[1].type, 20); // of the client: the middlebox's, so it was
    CHECK_EQUAL(live.server.records[2].type, PEER_HANDSHAKE); // asked for a second hello
}

#endif

static void without_verification_any_server_will_do(void)
{
    static trace whole;
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        wish.manner.who = &people.alone;
        wish.options.ca = NULL;
        wish.options.no_verify = 1;
        wish.verify_name = NULL;
        play_whole(write_session(whole_session), &whole);
    }
}

static void client_certificate_is_accepted(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        wish_certificate(&people.client);
        play_modes_over_tls(write_session(whole_session), 2);
    }
}

// nbd_tls_init alone, with its result.
static int names_give(const char *verify_name, const char *server_name)
{
    int error;

    stage.mode = whole_mode;
    wish.verify_name = verify_name;
    wish.server_name = server_name;
    error = make_session();
    CHECK((error == 0) == (live.tls.transport.detail == NULL));
    return error;
}

// What a program gets that does not look at the result of nbd_tls_init.
static void check_hooks_fail(void)
{
    unsigned char byte = 1;
    nbd_iovec one = {&byte, 1};
    const nbd_transport *t = &live.tls.transport;

    CHECK_EQUAL(t->send(t->context, &one, 1, 0), NBD_IO_ERROR);
    CHECK_EQUAL(t->recv(t->context, &one, 1), NBD_IO_ERROR);
    CHECK_EQUAL(t->finish(t->context), 0);
    CHECK_EQUAL(live.server.in_size, 0);
}

static void verification_without_a_name_is_refused(void)
{
    static char longest[257];

    memset(longest, 'a', 255);
    wish_x509(12);
    CHECK_EQUAL(names_give("server.example", NULL), 0);
    CHECK_EQUAL(names_give(longest, NULL), 0);
    CHECK_EQUAL(names_give(NULL, NULL), NBD_ERR_ARG);
    check_hooks_fail();
    CHECK_EQUAL(names_give(NULL, "server.example"), NBD_ERR_ARG);
    check_hooks_fail();
    CHECK_EQUAL(names_give("", NULL), NBD_ERR_ARG);
    check_hooks_fail();
    longest[255] = 'a';
    CHECK_EQUAL(names_give(longest, NULL), NBD_ERR_ARG);
    CHECK_EQUAL(names_give("server.example", longest), NBD_ERR_ARG);
    wish.options.no_verify = 1;
    CHECK_EQUAL(names_give(NULL, NULL), 0);
    CHECK_EQUAL(names_give("", NULL), NBD_ERR_ARG);
    wish_psk(12);
    CHECK_EQUAL(names_give(NULL, NULL), 0);
}

// A configuration of the program's own that takes keys and certificates alike.
static void certificate_without_a_name_is_refused_in_any_case(void)
{
    static trace whole;

    wish_psk(12);
    wish.manner.suites = NULL;
    wish.manner.key = NULL;
    wish.manner.who = &people.server;
    wish.any_suite = 1;
    misfit_detail = other_name;
    play_whole(write_session(refused), &whole);
    CHECK_EQUAL(live.server.received, 0);
}

/// Records of the client ///

static unsigned first_record;

static int note_records(nbd_client *client)
{
    (void)client;
    first_record = live.server.record_count;
    live.staged = live.in_place = live.first_write = 0;
    live.repeats = live.grown = 0;
    return 0;
}

static unsigned records_since(void)
{
    unsigned i, count = 0;

    for (i = first_record; i < live.server.record_count; i++)
        count += live.server.records[i].type == PEER_DATA;
    return count;
}

static size_t wanted_first, wanted_all, wanted_in_place;
static unsigned wanted_records;

static int records_are_as_wanted(nbd_client *client)
{
    (void)client;
    CHECK_EQUAL(records_since(), wanted_records);
    CHECK_EQUAL(live.first_write, wanted_first);
    CHECK_EQUAL(live.staged + live.in_place, wanted_all);
    CHECK_EQUAL(live.in_place, wanted_in_place);
    return 0;
}

static void write_one(script *s)
{
    int r;

    open_tls(s);
    client_calls(s, note_records);
    r = client_issues(s, NBD_WRITE, 0, 0, (size_t)(wanted_all - 28));
    want_request(s, r);
    client_calls(s, records_are_as_wanted);
    send_none(s, r);
    see_done(s, r, 0);
    close_session(s);
}

static void flush_many(script *s)
{
    int r[32];
    size_t i;

    s->config.slot_count = 32;
    open_tls(s);
    client_calls(s, note_records);
    for (i = 0; i < 32; i++)
        r[i] = client_issues(s, NBD_FLUSH, 0, 0, 0);
    for (i = 0; i < 32; i++)
        want_request(s, r[i]);
    client_calls(s, records_are_as_wanted);
    for (i = 0; i < 32; i++)
        send_none(s, r[i]);
    for (i = 0; i < 32; i++)
        see_done(s, r[i], 0);
    close_session(s);
}

static void play_records(void (*write)(script *s), size_t all, size_t in_place)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        static trace whole;
        int last = in_place > 0 && versions[v] == 13; // a record of TLS 1.3 takes a byte less

        play_variant = (unsigned)versions[v];
        wish_psk(versions[v]);
        wanted_all = all;
        wanted_in_place = in_place;
        wanted_first = all < NBD_TLS_STAGE ? all : NBD_TLS_STAGE;
        wanted_records = 1 + (unsigned)((in_place + 16383 - (size_t)last) / (16384 - (size_t)last));
        play_whole(write_session(write), &whole);
    }
}

static void header_and_payload_share_a_record(void)
{
    play_records(write_one, 28 + 1, 0);
    play_records(write_one, 28 + 512, 0);
    play_records(write_one, NBD_TLS_STAGE, 0);
}

static void rest_of_a_payload_leaves_from_where_it_lies(void)
{
    play_records(write_one, 28 + NBD_TLS_STAGE, 28);
    play_records(write_one, 28 + 40000, 28 + 40000 - NBD_TLS_STAGE);
    play_records(write_one, NBD_TLS_STAGE + 3 * 16384, 3 * 16384);
}

static void small_requests_share_a_record(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        static trace whole;

        wish_psk(versions[v]);
        wanted_first = wanted_all = wanted_in_place = 32 * 28;
        wanted_records = 1;
        play_whole(write_session(flush_many), &whole);
    }
}

static int poll_once(nbd_client *client)
{
    return nbd_poll(client, NBD_WANT_WRITE);
}

static int has_grown(nbd_client *client)
{
    (void)client;
    CHECK(live.repeats > 0);
    CHECK(live.grown > 0);
    return 0;
}

// The transport blocks in the middle of a record; by the time it goes on there is more.
static void grow_while_blocked(script *s)
{
    int a, b, c;

    open_tls(s);
    client_calls(s, note_records);
    transport_takes(s, 10);
    a = client_issues(s, NBD_WRITE, 0, 0, 300);
    script_step(s, STEP_FED);
    client_calls(s, poll_once);
    b = client_issues(s, NBD_WRITE, 0, 4096, 6000);
    client_calls(s, poll_once);
    c = client_issues(s, NBD_READ, 0, 0, 512);
    client_calls(s, poll_once);
    transport_takes_all(s);
    want_request(s, a);
    want_request(s, b);
    want_request(s, c);
    send_none(s, b);
    send_data(s, c, DONE, 0, 512);
    send_none(s, a);
    see_done(s, b, 0);
    see_done(s, c, 0);
    see_done(s, a, 0);
    client_calls(s, has_grown);
    close_session(s);
}

static void play_growth(void)
{
    static trace whole;

    play_whole(write_session(grow_while_blocked), &whole);
}

static void blocked_write_is_repeated_as_it_was(void)
{
    each_version(wish_psk, play_growth);
    each_version(wish_x509, play_growth);
}

/// Without the driver of play.h ///

// A client of its own on the stage, with what `s` wants of it.
static void stage_client(const script *s, uint32_t flags)
{
    static nbd_slot slots[4];
    static unsigned char buffer[NBD_BUFFER_NAMES];
    nbd_config config = NBD_ZERO;

    play_reset(&stage, s, &whole_mode);
    config.flags = flags;
    config.slots = slots;
    config.slot_count = 4;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = s->config.export_name;
    CHECK_EQUAL(nbd_init(&stage.client, &config), 0);
}

static void session_in_tls(script *s)
{
    s->config.export_name = "secret name";
    open_session(s, NBD_PROTOCOL_STRUCTURED);
    transfer(s);
    close_session(s);
}

// It is the client that speaks first then, so the program begins with a poll that reads.
static void tls_may_begin_with_the_first_byte(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        wish_x509(versions[v]);
        stage_client(write_session(session_in_tls), 0);
        CHECK_EQUAL(make_session(), 0);
        CHECK_EQUAL(nbd_connect(&stage.client, &live.tls.transport), 0);
        CHECK_EQUAL(nbd_poll(&stage.client, NBD_WANT_READ), 0);
        drive_poll(&stage);
        check_uncut_end(&stage);
        CHECK_EQUAL(live.server.notified, 1);
    }
}

/// Blocking calls ///

static int wait_here(void *context, unsigned wants, int *timeout_ms)
{
    play *p = &stage;
    unsigned ready;

    (void)context;
    (void)timeout_ms;
    p->in_hook = 1;
    play_steps(p);
    p->in_hook = 0;
    ready = wants & (NBD_WANT_WRITE | (can_receive(p) ? NBD_WANT_READ : 0));
    if (!ready) check_fail(__FILE__, __LINE__, "waits for ever");
    return (int)ready;
}

static int wait_fails(void *context, unsigned wants, int *timeout_ms)
{
    (void)context;
    (void)wants;
    (void)timeout_ms;
    return NBD_IO_ERROR;
}

// What a server does until TLS starts, and behind that.
static void serve_until_tls(script *s)
{
    s->config.export_name = "secret name";
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_ack(s, 5);
}

static void serve(script *s)
{
    serve_until_tls(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_go(s, "secret name");
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    want_disconnect(s);
    send_end(s);
}

// Shakes hands with blocking calls.
static int sync_connect(nbd_sync *sync, const script *s, uint32_t flags,
                        int (*wait)(void *context, unsigned wants, int *timeout_ms))
{
    nbd_sync fresh = NBD_ZERO;

    *sync = fresh;
    stage_client(s, flags);
    stage.mode.blocking = 1;
    stage.transports[0].wait = wait_here;
    CHECK_EQUAL(make_session(), 0);
    live.below.wait = wait;
    sync->client = &stage.client;
    sync->tls = &live.tls.transport;
    return nbd_sync_connect(sync, &stage.transports[0]);
}

static void blocking_calls_start_tls(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        nbd_sync sync;

        wish_x509(versions[v]);
        CHECK_EQUAL(sync_connect(&sync, write_session(serve), NBD_TLS_REQUIRE, wait_here), 0);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->tls, 1);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->size, EXPORT_SIZE);
        CHECK_EQUAL(nbd_sync_close(&sync), 0);
        wish.verify_name = "other.example";
        CHECK_EQUAL(sync_connect(&sync, write_session(serve_until_tls), NBD_TLS_ALLOW, wait_here),
                    NBD_ERR_TRANSPORT);
        CHECK(strcmp(nbd_detail(&stage.client), other_name) == 0);
        CHECK_EQUAL(nbd_sync_close(&sync), 0);
    }
}

static void blocking_calls_need_a_wait_hook_below(void)
{
    nbd_sync sync;

    wish_x509(12);
    CHECK_EQUAL(sync_connect(&sync, write_session(serve), NBD_TLS_REQUIRE, NULL),
                NBD_ERR_TRANSPORT);
    CHECK_EQUAL(sync_connect(&sync, write_session(serve), NBD_TLS_REQUIRE, wait_fails),
                NBD_ERR_TRANSPORT);
}

static void blocking_calls_without_tls_refuse_to_start_it(void)
{
    nbd_sync sync = NBD_ZERO;

    wish_x509(12);
    stage_client(write_session(serve_until_tls), NBD_TLS_REQUIRE);
    stage.transports[0].wait = wait_here;
    sync.client = &stage.client;
    CHECK_EQUAL(nbd_sync_connect(&sync, &stage.transports[0]), NBD_ERR_TLS);
    CHECK_EQUAL(nbd_sync_close(&sync), 0);
}

/// Servers that fall silent ///

// Plays until nothing moves any more.  The client then waits for input and for nothing else,
// however often it is called.
static void play_until_silent(const script *s)
{
    unsigned calls = 0;
    uint64_t sent;

    stage_client(s, NBD_TLS_REQUIRE);
    stage.mode.ended = PLAY_SILENCE;
    CHECK_EQUAL(nbd_connect(&stage.client, &stage.transports[0]), 0);
    do {
        unsigned wants = nbd_wants(&stage.client);

        stage.moved = 0;
        if (can_receive(&stage) || (wants & (NBD_WANT_WRITE | NBD_WANT_NOW))) {
            CHECK_EQUAL(nbd_poll(&stage.client, wants), 0);
            stage.moved = 1;
        }
        play_steps(&stage);
        pull_events(&stage);
        play_steps(&stage);
        CHECK(++calls < 10000);
    } while (stage.moved && !stage.closed);
    if (stage.closed) return;
    sent = live.server.in_size;
    for (calls = 0; calls < 3; calls++) {
        CHECK_EQUAL(nbd_wants(&stage.client), NBD_WANT_READ);
        CHECK_EQUAL(nbd_poll(&stage.client, NBD_WANT_READ | NBD_WANT_WRITE), 0);
    }
    CHECK_EQUAL(live.server.in_size, sent);
}

// At each byte of the server's, and each time the client can be given up.
static void fall_silent_everywhere(void)
{
    static trace whole;
    const script *s = write_session(short_session);
    size_t size, at;

    play_whole(s, &whole);
    size = live.server.out_size;
    for (at = 0; at < size; at++) {
        nbd_event event;

        wish.cut_at = at;
        play_variant = (unsigned)at;
        play_until_silent(s);
        if (stage.closed) break; // the rest is the goodbye
        CHECK_EQUAL(nbd_abandon(&stage.client), 0);
        while (nbd_next(&stage.client, &event) == 1 && event.type != NBD_EVENT_CLOSED)
            continue;
        CHECK_EQUAL(event.type, NBD_EVENT_CLOSED);
        CHECK_EQUAL(event.error, NBD_ERR_ABANDONED);
        nbd_tls_free(&live.tls);
        CHECK_EQUAL(nbd_wants(&stage.client), 0);
    }
    CHECK(at > size / 2);
}

static void silent_server_can_be_given_up_at_any_byte(void)
{
    each_version(wish_psk, fall_silent_everywhere);
}

static unsigned waited_for;

static int wait_with_a_clock(void *context, unsigned wants, int *timeout_ms)
{
    int ready;

    stage.in_hook = 1;
    play_steps(&stage);
    stage.in_hook = 0;
    (void)context;
    ready = (int)(wants & (NBD_WANT_WRITE | (can_receive(&stage) ? NBD_WANT_READ : 0)));
    if (ready) return ready;
    CHECK_EQUAL(waited_for, 0);
    waited_for = wants;
    *timeout_ms = 0;
    return 0;
}

// Behind the ClientHello, and in the middle of the server's answer.
static void blocking_call_gives_up_a_server_that_is_silent_in_the_handshake(void)
{
    size_t v, i;

    for (v = 0; v < VERSIONS; v++) {
        for (i = 0; i < 100; i += 33) {
            nbd_sync sync = NBD_ZERO;

            play_variant = (unsigned)(versions[v] * 100) + (unsigned)i;
            wish_x509(versions[v]);
            wish.cut_at = i;
            waited_for = 0;
            stage_client(write_session(serve_until_tls), NBD_TLS_REQUIRE);
            stage.mode.ended = PLAY_SILENCE;
            stage.transports[0].wait = wait_with_a_clock;
            CHECK_EQUAL(make_session(), 0);
            live.below.wait = wait_with_a_clock;
            sync.client = &stage.client;
            sync.tls = &live.tls.transport;
            sync.timeout_ms = 1000;
            CHECK_EQUAL(nbd_sync_connect(&sync, &stage.transports[0]), NBD_ERR_TIMEOUT);
            CHECK_EQUAL(waited_for, NBD_WANT_READ);
            CHECK(live.server.in_size > 0);
            CHECK_EQUAL(live.server.received, 0);
            CHECK_EQUAL(nbd_phase(&stage.client), NBD_PHASE_IDLE);
            CHECK_EQUAL(nbd_sync_close(&sync), 0);
        }
    }
}

/// Credentials ///

enum { PATH_SIZE = 256 };

static char directory[PATH_SIZE];

static const char *path_of(const char *name)
{
    static char paths[8][2 * PATH_SIZE];
    static unsigned next;
    char *path = paths[next++ % 8];

    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

static const char *write_file(const char *name, const char *text)
{
    const char *path = path_of(name);
    FILE *file = fopen(path, "w");

    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0 && fclose(file) == 0);
    return path;
}

// Makes credentials of wish.options: the result must be this, with this text.
static void check_credentials(int error, const char *detail)
{
    static nbd_tls_credentials c;

    CHECK_EQUAL(nbd_tls_credentials_init(&c, &wish.options), error);
    if (strcmp(c.detail, detail) != 0) {
        check_fail(__FILE__, __LINE__, "detail is \"%s\", not \"%s\"", c.detail, detail);
    }
    CHECK_EQUAL(c.tls_error != 0, error == NBD_ERR_TLS_SETUP);
    nbd_tls_credentials_free(&c);
    nbd_tls_credentials_free(&c);
}

static void free_is_harmless_on_zeroed_structs(void)
{
    static nbd_tls_credentials c;
    static nbd_tls t;

    nbd_tls_credentials_free(&c);
    nbd_tls_free(&t);
    nbd_tls_free(&t);
    CHECK_EQUAL(t.transport.send == NULL, 1);
}

static void credentials_that_contradict_themselves_are_refused(void)
{
    static const char twice[] = "TLS: the same thing is given as memory and as file";
    static const char half[] = "TLS: certificate without key, or the reverse";

    wish_nothing();
    check_credentials(NBD_ERR_ARG, "TLS: no authority to trust: give one, or do not verify");
    wish.options.no_verify = 1;
    check_credentials(0, "");
    wish_x509(12);
    check_credentials(0, "");
    wish.options.ca_file = "x";
    check_credentials(NBD_ERR_ARG, twice);
    wish_x509(12);
    wish.options.certificate_file = "x";
    check_credentials(NBD_ERR_ARG, half);
    wish.options.key = people.client.key;
    wish.options.key_file = "x";
    check_credentials(NBD_ERR_ARG, twice);
    wish_x509(12);
    wish_certificate(&people.client);
    wish.options.key_file = "x";
    check_credentials(NBD_ERR_ARG, twice);
    wish_x509(12);
    wish.options.key_file = "x";
    check_credentials(NBD_ERR_ARG, half);
    wish.options.certificate = wish.options.certificate_file = "x";
    check_credentials(NBD_ERR_ARG, twice);
    wish_psk(12);
    check_credentials(0, "");
    wish.options.psk_file = "x";
    check_credentials(NBD_ERR_ARG, twice);
    wish_psk(12);
    wish.options.ca = "x";
    check_credentials(NBD_ERR_ARG, "TLS: a shared key and certificates");
    wish_psk(12);
    wish.options.key = wish.options.certificate = "x";
    check_credentials(NBD_ERR_ARG, "TLS: a shared key and certificates");
    wish_psk(12);
    wish.options.user = "";
    check_credentials(NBD_ERR_ARG, "TLS: a shared key without a user");
    wish.options.user = NULL;
    check_credentials(NBD_ERR_ARG, "TLS: a shared key without a user");
    wish_psk(12);
    wish.options.psk_size = 0;
    check_credentials(NBD_ERR_ARG, "TLS: the shared key is empty");
    wish.options.psk_size = MBEDTLS_PSK_MAX_LEN + 1;
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the shared key cannot be used");
}

static void files_serve_as_well_as_memory(void)
{
    static trace whole;
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        wish.manner.trusts = &people.authority;
        wish.options.ca = NULL;
        wish.options.ca_file = write_file("ca", people.authority.certificate);
        wish.options.certificate_file = write_file("certificate", people.client.certificate);
        wish.options.key_file = write_file("key", people.client.key);
        play_whole(write_session(whole_session), &whole);
        wish_psk(versions[v]);
        wish.options.psk = NULL;
        wish.options.psk_file = write_file("keys", "alic:00\nbob:0123\nalice2:55\n"
                                                   "alice:30313233343536373839616263646566\n"
                                                   "alice:0000\n");
        play_whole(write_session(whole_session), &whole);
    }
}

static void files_that_cannot_be_used_are_named(void)
{
    wish_x509(12);
    wish.options.ca = NULL;
    wish.options.ca_file = path_of("nothing");
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: file of the authority cannot be read");
    wish.options.ca_file = write_file("garbage", "no certificate");
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the authority's certificate cannot be used");
    wish_x509(12);
    wish.options.certificate_file = path_of("nothing");
    wish.options.key_file = path_of("nothing");
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: file of the certificate cannot be read");
    wish.options.certificate_optional = 1;
    check_credentials(0, "");
    wish.options.certificate_file = write_file("garbage", "no certificate");
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the certificate cannot be used");
    wish.options.certificate_file = write_file("certificate", people.client.certificate);
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: file of the key cannot be read");
    wish.options.key_file = write_file("garbage", "no key");
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the key cannot be used");
    wish.options.key_file = write_file("key", people.server.key);
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the key is not that of the certificate");
    wish_psk(12);
    wish.options.psk = NULL;
    wish.options.psk_file = path_of("nothing");
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: file of the shared keys cannot be read");
}

// One certificate of a chain or of a bundle is no certificate.
static void bundle_may_hold_what_mbedtls_cannot_read(void)
{
    static char both[2 * PEER_PEM];

    snprintf(both, sizeof both, "%s-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
             people.authority.certificate);
    wish_x509(12);
    wish.options.ca = both;
    wish.options.ca_size = text_size(both);
    check_credentials(0, "");
    wish_x509(12);
    wish_certificate(&people.client);
    snprintf(both, sizeof both, "%s-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
             people.client.certificate);
    wish.options.certificate = both;
    wish.options.certificate_size = text_size(both);
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the certificate cannot be used");
}

static void file_of_shared_keys_is_read_by_the_rules(void)
{
    static const char none[] = "TLS: no such user in the file of the shared keys";
    static const struct {
        const char *text;
        int found;
    } files[] = {
        {"", 0},
        {"alice", 0},
        {"alice:", 0},
        {"alice:0", 0},
        {"alice:00", 1},
        {"alice:0g", 0},
        {"alice:001", 0},
        {"alice:00\r\n", 1},
        {"alice:00 \n", 0},
        {"alice:aF09\n", 1},
        {"bob:00\nalice:00\n", 1},
        {"alic:00\nalice2:00\n", 0},
        {" alice:00\n", 0},
        {"#alice:00\nAlice:00\n", 0},
    };
    char longest[2 * MBEDTLS_PSK_MAX_LEN + 16] = "alice:";
    size_t i;

    wish_psk(12);
    wish.options.psk = NULL;
    for (i = 0; i < sizeof files / sizeof files[0]; i++) {
        play_variant = (unsigned)i;
        wish.options.psk_file = write_file("keys", files[i].text);
        check_credentials(files[i].found ? 0 : NBD_ERR_TLS_SETUP, files[i].found ? "" : none);
    }
    memset(longest + 6, '1', 2 * MBEDTLS_PSK_MAX_LEN);
    wish.options.psk_file = write_file("keys", longest);
    check_credentials(0, "");
    memset(longest + 6, '1', 2 * MBEDTLS_PSK_MAX_LEN + 2);
    wish.options.psk_file = write_file("keys", longest);
    check_credentials(NBD_ERR_TLS_SETUP, none);
}

static void encrypted_key_needs_its_password(void)
{
    static trace whole;
    static char key[PEER_PEM];

    peer_encrypt_key(&people.client, "secret", key, sizeof key);
    wish_x509(12);
    wish_certificate(&people.client);
    wish.options.key = key;
    wish.options.key_size = text_size(key);
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the key is encrypted: give its password");
    wish.options.key_password = "wrong";
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: wrong password of the key");
    wish.options.key_password = "secret";
    play_whole(write_session(whole_session), &whole);
    wish.options.key = NULL;
    wish.options.key_file = write_file("key", key);
    play_whole(write_session(whole_session), &whole);
    wish.options.key_password = NULL;
    check_credentials(NBD_ERR_TLS_SETUP, "TLS: the key is encrypted: give its password");
}

static unsigned randoms;

static int random_of_ours(void *context, unsigned char *to, size_t size)
{
    randoms++;
    return mbedtls_ctr_drbg_random(context, to, size);
}

static int random_that_fails(void *context, unsigned char *to, size_t size)
{
    (void)context;
    (void)to;
    (void)size;
    return MBEDTLS_ERR_CTR_DRBG_ENTROPY_SOURCE_FAILED;
}

static void random_numbers_may_be_the_programs_own(void)
{
    static trace whole;
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_x509(versions[v]);
        wish.options.rng = random_of_ours;
        wish.options.rng_context = &peer_drbg;
        randoms = 0;
        play_whole(write_session(whole_session), &whole);
        CHECK(randoms > 0);
    }
    wish_x509(12);
    wish.options.rng = random_that_fails;
    misfit_detail = "TLS: the handshake failed";
    play_whole(write_session(refused), &whole);
    CHECK_EQUAL(live.tls.tls_error, MBEDTLS_ERR_CTR_DRBG_ENTROPY_SOURCE_FAILED);
}

/// URIs ///

static nbd_uri uri;
static char uri_text[1024], uri_paths[1024];

// The error of nbd_tls_uri, with wish.options filled in.
static int uri_gives(const char *text, size_t room)
{
    CHECK_EQUAL(nbd_uri_parse(&uri, text, uri_text, sizeof uri_text), 0);
    memset(&wish.options, 7, sizeof wish.options);
    return nbd_tls_uri(&wish.options, &uri, uri_paths, room);
}

static int same_text(const char *a, const char *b)
{
    return a && b ? strcmp(a, b) == 0 : a == b;
}

static void uri_names_files_and_user(void)
{
    const nbd_tls_options *o = &wish.options;

    CHECK_EQUAL(uri_gives("nbds://host/x", 0), 0);
    CHECK(!o->ca_file && !o->certificate_file && !o->key_file && !o->psk_file && !o->no_verify);
    CHECK(same_text(nbd_tls_uri_name(&uri), "host"));
    CHECK_EQUAL(uri_gives("nbds://host/x?tls-verify-peer=0", 0), 0);
    CHECK(o->no_verify && !o->ca_file && !nbd_tls_uri_name(&uri));
    CHECK_EQUAL(uri_gives("nbds://host/?tls-certificates=/d&tls-hostname=other", 54), 0);
    CHECK(same_text(o->ca_file, "/d/ca-cert.pem"));
    CHECK(same_text(o->certificate_file, "/d/client-cert.pem"));
    CHECK(same_text(o->key_file, "/d/client-key.pem"));
    CHECK(o->certificate_optional && !o->no_verify);
    CHECK(same_text(nbd_tls_uri_name(&uri), "other"));
    CHECK_EQUAL(uri_gives("nbds://host/?tls-certificates=/d&tls-verify-peer=false", 54), 0);
    CHECK(!o->ca_file && same_text(o->certificate_file, "/d/client-cert.pem"));
    CHECK_EQUAL(uri_gives("nbds+unix:///?socket=/s&tls-certificates=/d", 54), 0);
    CHECK(nbd_tls_uri_name(&uri) == NULL);
    CHECK_EQUAL(uri_gives("nbds+unix:///?socket=/s&tls-hostname=h", 54), 0);
    CHECK(same_text(nbd_tls_uri_name(&uri), "h"));
    CHECK_EQUAL(uri_gives("nbds://alice@host/?tls-psk-file=/f", 0), 0);
    CHECK(same_text(o->psk_file, "/f") && same_text(o->user, "alice") && !o->no_verify);
    CHECK(nbd_tls_uri_name(&uri) == NULL);
    CHECK_EQUAL(uri_gives("nbds://alice@host/?tls-psk-file=/f&tls-type=x509", 0), 0);
    CHECK(!o->psk_file && !o->user && same_text(nbd_tls_uri_name(&uri), "host"));
    CHECK_EQUAL(uri_gives("nbds://host/?tls-psk-file=/f&tls-certificates=/d", 54), 0);
    CHECK(!o->psk_file && o->ca_file);
    CHECK_EQUAL(uri_gives("nbds://h/?tls-psk-file=/f&tls-certificates=/d&tls-type=psk", 0), 0);
    CHECK(same_text(o->psk_file, "/f") && !o->user && !o->ca_file);
}

static void uri_that_protects_nobody_is_refused(void)
{
    CHECK_EQUAL(uri_gives("nbds://host/?tls-type=anon", 100), NBD_ERR_UNSUPPORTED);
    CHECK(same_text(uri.detail, "tls-type=anon is not supported"));
    CHECK_EQUAL(uri_gives("nbds://host/?tls-type=psk", 100), NBD_ERR_URI);
    CHECK(same_text(uri.detail, "tls-type=psk without tls-psk-file"));
    CHECK_EQUAL(uri_gives("nbds://host/?tls-certificates=/d", 53), NBD_ERR_BUFFER);
    CHECK(same_text(uri.detail, "tls-certificates is too long"));
    CHECK_EQUAL(uri_gives("nbds://host/?tls-certificates=/d", 0), NBD_ERR_BUFFER);
}

static void session_as_a_uri_says(void)
{
    static trace whole;
    char text[2 * PATH_SIZE];

    write_file("ca-cert.pem", people.authority.certificate);
    (void)remove(path_of("client-cert.pem"));
    snprintf(text, sizeof text, "nbds://server.example/x?tls-certificates=%s", directory);
    wish_x509(12);
    CHECK_EQUAL(uri_gives(text, sizeof uri_paths), 0);
    wish.verify_name = nbd_tls_uri_name(&uri);
    play_whole(write_session(whole_session), &whole);
    wish.manner.trusts = &people.authority;
    write_file("client-cert.pem", people.client.certificate);
    write_file("client-key.pem", people.client.key);
    play_whole(write_session(whole_session), &whole);
}

static void make_directory(void)
{
    const char *parent = getenv("TMPDIR");

    snprintf(directory, sizeof directory, "%s/nbd-tls.XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(directory)) abort();
}

static void remove_directory(void)
{
    static const char *const names[] = {
        "ca",          "certificate",     "key",           "keys", "garbage",
        "ca-cert.pem", "client-cert.pem", "client-key.pem"};
    size_t i;

    for (i = 0; i < sizeof names / sizeof names[0]; i++)
        (void)remove(path_of(names[i]));
    (void)rmdir(directory);
}

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    peer_make_people();
    make_directory();
    CHECK_CASE(session_with_certificates_in_every_mode);
    CHECK_CASE(session_with_shared_key_in_every_mode);
    CHECK_CASE(replies_are_cut_in_records_of_any_size);
    CHECK_CASE(empty_records_are_no_end);
    CHECK_CASE(tickets_and_renegotiation_at_any_time_are_passed_over);
    CHECK_CASE(tickets_that_are_told_of_are_passed_over);
    CHECK_CASE(warnings_at_any_time_are_passed_over);
    CHECK_CASE(transport_may_say_that_it_sent_nothing);
    CHECK_CASE(stream_may_end_or_fail_at_any_byte);
    CHECK_CASE(no_byte_can_be_changed_unnoticed);
    CHECK_CASE(alert_at_any_byte_ends_it);
    CHECK_CASE(alerts_are_named);
    CHECK_CASE(sending_may_fail_at_any_byte);
    CHECK_CASE(hang_up_in_the_handshake_is_explained_by_what_was_said);
    CHECK_CASE(close_notify_before_the_goodbye_is_an_error);
    CHECK_CASE(end_without_close_notify_is_named);
    CHECK_CASE(missing_close_notify_after_the_goodbye_is_forgiven);
    CHECK_CASE(hang_up_right_after_the_handshake_is_named);
    CHECK_CASE(records_without_data_cannot_hold_a_poll);
    for (i = 0; i < MISFITS; i++)
        check_case_on(misfits[i].name, play_misfit, &misfits[i]);
    CHECK_CASE(three_names_may_differ);
    CHECK_CASE(address_is_not_sent_as_a_name);
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
    CHECK_CASE(hello_that_is_repeated_has_the_same_name);
#endif
    CHECK_CASE(without_verification_any_server_will_do);
    CHECK_CASE(client_certificate_is_accepted);
    CHECK_CASE(verification_without_a_name_is_refused);
    CHECK_CASE(certificate_without_a_name_is_refused_in_any_case);
    CHECK_CASE(header_and_payload_share_a_record);
    CHECK_CASE(rest_of_a_payload_leaves_from_where_it_lies);
    CHECK_CASE(small_requests_share_a_record);
    CHECK_CASE(blocked_write_is_repeated_as_it_was);
    CHECK_CASE(tls_may_begin_with_the_first_byte);
    CHECK_CASE(blocking_calls_start_tls);
    CHECK_CASE(blocking_calls_need_a_wait_hook_below);
    CHECK_CASE(blocking_calls_without_tls_refuse_to_start_it);
    CHECK_CASE(silent_server_can_be_given_up_at_any_byte);
    CHECK_CASE(blocking_call_gives_up_a_server_that_is_silent_in_the_handshake);
    CHECK_CASE(free_is_harmless_on_zeroed_structs);
    CHECK_CASE(credentials_that_contradict_themselves_are_refused);
    CHECK_CASE(files_serve_as_well_as_memory);
    CHECK_CASE(files_that_cannot_be_used_are_named);
    CHECK_CASE(bundle_may_hold_what_mbedtls_cannot_read);
    CHECK_CASE(file_of_shared_keys_is_read_by_the_rules);
    CHECK_CASE(encrypted_key_needs_its_password);
    CHECK_CASE(random_numbers_may_be_the_programs_own);
    CHECK_CASE(uri_names_files_and_user);
    CHECK_CASE(uri_that_protects_nobody_is_refused);
    CHECK_CASE(session_as_a_uri_says);
    tls_over();
    remove_directory();
    peer_free_people();
    return check_end();
}

#endif
