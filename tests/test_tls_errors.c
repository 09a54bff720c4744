// What mbedTLS may answer to nbd.h and what never happens by itself: no memory, any result at
// any call.  The sessions are those of tls_play.h.
#define _DEFAULT_SOURCE 1
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef NBD_MBEDTLS

// The Makefile defines NBD_MBEDTLS where the library is installed.
int main(void)
{
    return printf("skip errors of mbedTLS: it is not installed\n") < 0;
}

#else

#include <mbedtls/ctr_drbg.h>
#include <mbedtls/entropy.h>
#include <mbedtls/ssl.h>
#include <mbedtls/ssl_cache.h>

/// Results that mbedTLS is made to give ///

enum call { HANDSHAKE, READ, WRITE, ENTROPY, DEFAULTS, OWN_CERTIFICATE, CALLS };

static struct {
    int result;     // what the call gives instead of doing anything
    unsigned first; // the first call that gives it; 0: none does
    unsigned count; // so many do in turn
    unsigned calls;
} told[CALLS];

// Whether this call of mbedTLS is to give told[which].result.
static int is_told(enum call which)
{
    unsigned at = ++told[which].calls;

    return told[which].first && at >= told[which].first &&
           at - told[which].first < told[which].count;
}

static int told_handshake_step(mbedtls_ssl_context *ssl)
{
    return is_told(HANDSHAKE) ? told[HANDSHAKE].result : mbedtls_ssl_handshake_step(ssl);
}

static int told_read(mbedtls_ssl_context *ssl, unsigned char *to, size_t size)
{
    return is_told(READ) ? told[READ].result : mbedtls_ssl_read(ssl, to, size);
}

static int told_write(mbedtls_ssl_context *ssl, const unsigned char *data, size_t size)
{
    return is_told(WRITE) ? told[WRITE].result : mbedtls_ssl_write(ssl, data, size);
}

static int told_entropy(void *context, unsigned char *to, size_t size)
{
    return is_told(ENTROPY) ? told[ENTROPY].result : mbedtls_entropy_func(context, to, size);
}

static int told_defaults(mbedtls_ssl_config *config, int endpoint, int transport, int preset)
{
    return is_told(DEFAULTS) ? told[DEFAULTS].result
                             : mbedtls_ssl_config_defaults(config, endpoint, transport, preset);
}

static int told_own_cert(mbedtls_ssl_config *config, mbedtls_x509_crt *own, mbedtls_pk_context *key)
{
    return is_told(OWN_CERTIFICATE) ? told[OWN_CERTIFICATE].result
                                    : mbedtls_ssl_conf_own_cert(config, own, key);
}

#define mbedtls_ssl_handshake_step told_handshake_step
#define mbedtls_ssl_read told_read
#define mbedtls_ssl_write told_write
#define mbedtls_entropy_func told_entropy
#define mbedtls_ssl_config_defaults told_defaults
#define mbedtls_ssl_conf_own_cert told_own_cert
#define NBD_IMPLEMENTATION
#include "nbd.h"
#undef mbedtls_ssl_handshake_step
#undef mbedtls_ssl_read
#undef mbedtls_ssl_write
#undef mbedtls_entropy_func
#undef mbedtls_ssl_config_defaults
#undef mbedtls_ssl_conf_own_cert

#include "tls_play.h"

/// Memory that runs out ///

static struct {
    int counts;       // only the client's allocations are counted, while it is set
    int lasts;        // once there is none there is none any more
    unsigned fail_at; // the first that fails
    unsigned seen;
} memory;

// Made of malloc, so that sanitizers and valgrind, which have calls of their own, see it.
static void *(*volatile plain_malloc)(size_t size) = malloc;

void *calloc(size_t count, size_t size)
{
    void *got;

    if (memory.counts && !live.server_runs) {
        memory.seen++;
        if (memory.seen == memory.fail_at || (memory.lasts && memory.seen > memory.fail_at)) {
            return NULL;
        }
    }
    if (size > 0 && count > SIZE_MAX / size) return NULL;
    got = plain_malloc(count * size);
    return got ? memset(got, 0, count * size) : NULL;
}

static void fail_allocation(unsigned at)
{
    memory.fail_at = at;
    memory.seen = 0;
    memory.counts = 1;
}

static int has_run_out(void)
{
    memory.counts = 0;
    return memory.seen >= memory.fail_at;
}

// What is tried of many allocations, from a random one on; all with -DERRORS_STRIDE=1.
#ifndef ERRORS_STRIDE
#define ERRORS_STRIDE 211
#endif

// The allocation to fail after this one: each of the first, and some of many.
static unsigned next_allocation(unsigned at)
{
    if (at < 100) return at + 1;
    return at + (at == 100 ? 1 + check_random(ERRORS_STRIDE) : ERRORS_STRIDE);
}

static const char *said_by(const nbd_tls_credentials *c, int error)
{
    CHECK_EQUAL(error, NBD_ERR_TLS_SETUP);
    CHECK(c->tls_error != 0);
    CHECK(strncmp(c->detail, "TLS: ", 5) == 0);
    return c->detail;
}

static void credentials_run_out(void)
{
    static nbd_tls_credentials c;
    unsigned at = 1;

    for (;;) {
        int error;

        fail_allocation(at);
        error = nbd_tls_credentials_init(&c, &wish.options);
        if (!has_run_out()) {
            CHECK_EQUAL(error, 0);
            break;
        }
        // No key was looked at: nothing may be said of it.
        CHECK(strcmp(said_by(&c, error), "TLS: the key is not that of the certificate") != 0);
        nbd_tls_credentials_free(&c);
        at = next_allocation(at);
    }
    nbd_tls_credentials_free(&c);
    CHECK(at > 1);
}

static void once_and_for_good(void (*run)(void))
{
    for (memory.lasts = 0; memory.lasts < 2; memory.lasts++)
        run();
}

static void credentials_say_that_memory_ran_out(void)
{
    static char key[PEER_PEM];

    wish_psk(12);
    once_and_for_good(credentials_run_out);
    wish_x509(12);
    once_and_for_good(credentials_run_out);
    wish_certificate(&people.client);
    once_and_for_good(credentials_run_out);
    peer_encrypt_key(&people.client, "secret", key, sizeof key);
    wish.options.key = key;
    wish.options.key_size = text_size(key);
    wish.options.key_password = "secret";
    once_and_for_good(credentials_run_out);
}

static void credentials_fail(enum call which, int result, const char *detail)
{
    static nbd_tls_credentials c;

    memset(told, 0, sizeof told);
    told[which].result = result;
    told[which].first = told[which].count = 1;
    CHECK(strcmp(said_by(&c, nbd_tls_credentials_init(&c, &wish.options)), detail) == 0);
    CHECK_EQUAL(c.tls_error,
                which == ENTROPY ? MBEDTLS_ERR_CTR_DRBG_ENTROPY_SOURCE_FAILED : result);
    nbd_tls_credentials_free(&c);
}

static void credentials_that_mbedtls_refuses_say_why(void)
{
    wish_x509(12);
    wish_certificate(&people.client);
    credentials_fail(OWN_CERTIFICATE, MBEDTLS_ERR_SSL_ALLOC_FAILED,
                     "TLS: mbedTLS has no memory left");
    credentials_fail(ENTROPY, MBEDTLS_ERR_ENTROPY_SOURCE_FAILED, "TLS: no entropy");
    credentials_fail(DEFAULTS, MBEDTLS_ERR_SSL_INTERNAL_ERROR, "TLS: mbedTLS cannot start");
}

/// Sessions without memory ///

static unsigned failing_at;

static void fail_from_here(void)
{
    fail_allocation(failing_at);
}

static void fail_at_first(mbedtls_ssl_config *config)
{
    (void)config;
    fail_allocation(failing_at);
}

// nbd_tls_init alone.
static void sessions_cannot_be_made(void)
{
    for (failing_at = 1;; failing_at++) {
        nbd_iovec one = {live.server.out, 1};
        int error;

        wish.adjust = fail_at_first;
        stage.mode = whole_mode;
        error = make_session();
        if (!has_run_out()) break;
        CHECK_EQUAL(error, NBD_ERR_TLS_SETUP);
        CHECK(live.tls.tls_error != 0);
        CHECK(strcmp(live.tls.transport.detail, "TLS: mbedTLS cannot set up a session") == 0);
        CHECK_EQUAL(live.tls.transport.send(&live.tls, &one, 1, 0), NBD_IO_ERROR);
        CHECK_EQUAL(live.tls.transport.recv(&live.tls, &one, 1), NBD_IO_ERROR);
        CHECK(strcmp(live.tls.transport.detail, "TLS: mbedTLS cannot set up a session") == 0);
    }
    CHECK(failing_at > 1);
}

// No session that lacks memory succeeds in clear, or without verification, or hangs.
static void sessions_run_out(void)
{
    const script *s = write_session(short_session);
    mode how = broken_mode(uncut, NBD_IO_EOF);

    wish.made = fail_from_here;
    for (failing_at = 1;; failing_at = next_allocation(failing_at)) {
        play_variant = failing_at;
        play_once(&stage, s, &how);
        if (!has_run_out()) break;
        check_broken_end("TLS: ");
        CHECK((closing_error(&stage.seen) != 0) == (live.tls.tls_error != 0));
        if (!live.tls.up) CHECK_EQUAL(live.server.received, 0);
    }
    CHECK_EQUAL(closing_error(&stage.seen), 0);
    CHECK(failing_at > 1);
}

static void each_way(void (*run)(void))
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        wish_psk(versions[v]);
        once_and_for_good(run);
        wish_x509(versions[v]);
        wish_certificate(&people.client);
        once_and_for_good(run);
    }
}

static void session_that_cannot_be_made_says_so(void)
{
    each_way(sessions_cannot_be_made);
}

static void session_that_runs_out_of_memory_ends_with_an_error(void)
{
    each_way(sessions_run_out);
}

/// Results that mean "call again" ///

// Each call of mbedTLS in turn, and every call, gives `result` a few times before it does
// what it shall: nobody can see that.
static void told_at_each(enum call which, int result)
{
    static trace whole, seen;
    const script *s = write_session(short_session);
    unsigned calls, at;

    memset(told, 0, sizeof told);
    play_whole(s, &whole);
    calls = told[which].calls;
    CHECK(calls > 1);
    for (at = 1; at <= calls; at++) {
        memset(told, 0, sizeof told);
        told[which].result = result;
        told[which].first = at;
        told[which].count = 3;
        play_variant = at;
        play_whole(s, &seen);
        CHECK(told[which].calls > calls);
        compare_traces(&seen, &whole);
    }
    memset(told, 0, sizeof told);
}

static void results_mean_call_again(void)
{
    told_at_each(HANDSHAKE, MBEDTLS_ERR_SSL_CRYPTO_IN_PROGRESS);
    told_at_each(HANDSHAKE, MBEDTLS_ERR_SSL_ASYNC_IN_PROGRESS);
    told_at_each(HANDSHAKE, MBEDTLS_ERR_SSL_WANT_READ);
    told_at_each(READ, MBEDTLS_ERR_SSL_CRYPTO_IN_PROGRESS);
    told_at_each(READ, MBEDTLS_ERR_SSL_WANT_READ);
    told_at_each(READ, 0);
    told_at_each(WRITE, MBEDTLS_ERR_SSL_CRYPTO_IN_PROGRESS);
    told_at_each(WRITE, MBEDTLS_ERR_SSL_WANT_READ);
}

static void result_that_asks_to_be_called_again_is(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        wish_psk(versions[v]);
        results_mean_call_again();
        wish_x509(versions[v]);
        results_mean_call_again();
    }
}

static const char *told_detail;

static void told_to_fail(script *s)
{
    until_tls(s);
    see_closed(s, NBD_ERR_TRANSPORT);
    s->steps[s->step_count - 1].event.detail = told_detail;
}

static void handshake_ends(int result, unsigned count, const char *detail)
{
    static trace whole;

    memset(told, 0, sizeof told);
    told[HANDSHAKE].result = result;
    told[HANDSHAKE].first = 3;
    told[HANDSHAKE].count = count;
    told_detail = detail;
    play_whole(write_session(told_to_fail), &whole);
    CHECK_EQUAL(live.tls.tls_error, result);
    CHECK_EQUAL(live.server.received, 0);
    memset(told, 0, sizeof told);
}

static void calls_that_bring_nothing_cannot_hold_a_poll(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        wish_psk(versions[v]);
        handshake_ends(MBEDTLS_ERR_SSL_WANT_READ, UINT_MAX,
                       "TLS: server sends records without data, one after the other");
    }
}

static void lack_of_memory_is_named(void)
{
    wish_psk(12);
    handshake_ends(MBEDTLS_ERR_SSL_ALLOC_FAILED, 1, "TLS: mbedTLS has no memory left");
}

static void certificate_that_cannot_be_used_is_named(void)
{
    wish_psk(12);
    handshake_ends(NBDI_TLS_BAD_CERTIFICATE, 1, "TLS: server's certificate cannot be used");
}

/// Hooks, called by hand ///

// The transport below them.
static struct {
    size_t takes;         // bytes that sending takes before it says `full`
    ptrdiff_t full;       // NBD_IO_...
    int silent;           // nothing comes
    unsigned sends;       // calls of the send hook
    unsigned finishes;    // calls of the finish hook
    unsigned finish_more; // so many of them ask to be called again
    unsigned flags;       // of the last send
    int receives;         // calls of the receive hook
    int recv_writes;      // it waits to write
} bare;

static unsigned char bare_bytes[NBD_POLL_BYTES * 2];

static ptrdiff_t bare_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    size_t size = smaller(iov->size, bare.takes);

    (void)context;
    CHECK_EQUAL(count, 1);
    bare.sends++;
    bare.flags = flags;
    if (size == 0) return bare.full;
    if (bare.takes != uncut) bare.takes -= size;
    peer_take(&live.server, iov->base, size);
    live.server_runs++;
    (void)peer_shake(&live.server);
    live.server_runs--;
    return (ptrdiff_t)size;
}

static ptrdiff_t bare_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    size_t size = smaller(iov->size, live.server.out_size - live.server.out_taken);

    (void)context;
    CHECK_EQUAL(count, 1);
    bare.receives++;
    if (bare.recv_writes) return NBD_IO_WRITE;
    if (bare.silent) return NBD_IO_READ;
    memcpy(iov->base, live.server.out + live.server.out_taken, size);
    live.server.out_taken += size;
    return size > 0 ? (ptrdiff_t)size : NBD_IO_READ;
}

static int bare_finish(void *context)
{
    (void)context;
    bare.finishes++;
    return bare.finishes <= bare.finish_more ? NBD_IO_READ : 0;
}

static ptrdiff_t hook_send(size_t at, size_t size)
{
    nbd_iovec one;

    one.base = bare_bytes + at;
    one.size = size;
    return live.tls.transport.send(&live.tls, &one, 1, 0);
}

static ptrdiff_t hook_recv(void)
{
    static unsigned char got[100];
    nbd_iovec one = {got, sizeof got};

    return live.tls.transport.recv(&live.tls, &one, 1);
}

static int hook_finish(void)
{
    return live.tls.transport.finish(&live.tls);
}

static void make_bare(void)
{
    memset(&bare, 0, sizeof bare);
    bare.takes = uncut;
    bare.full = NBD_IO_WRITE;
    stage.mode = whole_mode;
    CHECK_EQUAL(make_session(), 0);
    live.below.context = NULL;
    live.below.send = bare_send;
    live.below.recv = bare_recv;
    live.below.finish = bare_finish;
}

// A session that has shaken hands, with a server that has sent a byte.
static void shake_bare(void)
{
    size_t i;

    for (i = 0; i < sizeof bare_bytes; i++)
        bare_bytes[i] = (unsigned char)(i * 31 ^ i >> 8);
    make_bare();
    bare.silent = 1;
    CHECK_EQUAL(hook_send(0, 1), NBD_IO_READ);
    bare.silent = 0;
    CHECK_EQUAL(hook_recv(), NBD_IO_READ); // it is the send hook that waits
    CHECK_EQUAL(hook_send(0, 1), 1);
    peer_write(&live.server, (const unsigned char *)"x", 1);
    CHECK_EQUAL(hook_recv(), 1);
}

// What the client sent is the first byte, and `size` of bare_bytes behind it.
static void server_got(size_t size)
{
    static unsigned char got[sizeof bare_bytes + 1];
    size_t all = 0;

    while (live.server.in_taken < live.server.in_size && !live.server.result &&
           !live.server.notified) {
        all += peer_read(&live.server, got + all, sizeof got - all);
    }
    CHECK_EQUAL(all, size + 1);
    CHECK_EQUAL(got[0], bare_bytes[0]);
    CHECK_BYTES(got + 1, bare_bytes, size);
}

static void each_bare(void (*run)(void))
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        play_variant = (unsigned)versions[v];
        wish_psk(versions[v]);
        shake_bare();
        run();
    }
}

// With TLS 1.2 mbedTLS answers a request to shake hands anew by an alert that it makes
// itself.  The transport takes so much of it only.
static void get_alert_stuck(size_t takes)
{
    wish_psk(12);
    shake_bare();
    bare.takes = takes;
    peer_write_ticket_record(&live.server);
    CHECK_EQUAL(hook_recv(), NBD_IO_READ);
    CHECK(live.tls.ssl.PEER_PRIVATE(out_left) > 0);
}

static void one_call_sends_no_more_than_a_poll_may(void)
{
    ptrdiff_t sent = hook_send(0, sizeof bare_bytes), most = NBD_POLL_BYTES + 16384;

    CHECK(sent >= NBD_POLL_BYTES && sent < most);
    CHECK_EQUAL(bare.flags, 0); // nothing follows in this poll
    server_got((size_t)sent);
}

static void wait_to_write_in_receive(void)
{
    bare.recv_writes = 1;
    bare.receives = 0;
    CHECK_EQUAL(hook_recv(), NBD_IO_WRITE);
    CHECK_EQUAL(bare.receives, 1);
    bare.recv_writes = 0;
    peer_write(&live.server, (const unsigned char *)"y", 1);
    CHECK_EQUAL(hook_recv(), 1);
}

static void receive_that_waits_to_write_is_not_called_again(void)
{
    each_bare(wait_to_write_in_receive);
}

// One call, one try: else it would spin.
static void handshake_that_cannot_be_sent_waits(void)
{
    size_t v, i;

    for (v = 0; v < VERSIONS; v++) {
        wish_x509(versions[v]);
        make_bare();
        bare.takes = 10;
        CHECK_EQUAL(hook_send(0, 1), NBD_IO_WRITE);
        CHECK_EQUAL(bare.sends, 2);
        for (i = 0; i < 3; i++) {
            bare.sends = 0;
            CHECK_EQUAL(hook_recv(), NBD_IO_WRITE);
            CHECK_EQUAL(hook_send(0, 1), NBD_IO_WRITE);
            CHECK_EQUAL(bare.sends, 2);
        }
        CHECK_EQUAL(hook_finish(), 0);
        CHECK_EQUAL(bare.sends, 2);
        bare.takes = uncut;
        CHECK_EQUAL(hook_send(0, 1), 1);
    }
}

static void large_sends_are_cut(void)
{
    each_bare(one_call_sends_no_more_than_a_poll_may);
}

static void alert_that_got_stuck_leaves_before_data(void)
{
    get_alert_stuck(3);
    CHECK_EQUAL(hook_send(0, 100), NBD_IO_WRITE);
    bare.takes = uncut;
    CHECK_EQUAL(hook_send(0, 100), 100);
    server_got(100);
    CHECK_EQUAL(live.server.result, 0);
}

static void alert_that_got_stuck_fails_with_the_transport(void)
{
    size_t sent;

    get_alert_stuck(3);
    sent = live.server.in_size;
    bare.full = NBD_IO_ERROR;
    CHECK_EQUAL(hook_send(0, 100), NBD_IO_ERROR);
    CHECK_EQUAL(hook_send(0, 100), NBD_IO_ERROR);
    bare.takes = uncut;
    CHECK_EQUAL(hook_send(0, 100), NBD_IO_ERROR);
    CHECK_EQUAL(hook_finish(), 0);
    CHECK_EQUAL(live.server.in_size, sent);
}

static void deny_access(void)
{
    bare.takes = 0;
    bare.full = NBD_IO_ERROR;
    CHECK_EQUAL(hook_send(0, 100), NBD_IO_ERROR);
    CHECK_EQUAL(hook_recv(), NBD_IO_READ);
    CHECK_EQUAL(mbedtls_ssl_send_alert_message(&live.server.ssl, MBEDTLS_SSL_ALERT_LEVEL_FATAL,
                                               MBEDTLS_SSL_ALERT_MSG_ACCESS_DENIED),
                0);
    CHECK_EQUAL(hook_recv(), NBD_IO_ERROR);
    CHECK(strcmp(live.tls.transport.detail, "TLS: server denies access") == 0);
}

static void who_cannot_send_still_reads_why(void)
{
    each_bare(deny_access);
}

static void alert_that_got_stuck_leaves_before_close_notify(void)
{
    get_alert_stuck(3);
    CHECK_EQUAL(hook_finish(), NBD_IO_WRITE);
    bare.takes = uncut;
    CHECK_EQUAL(hook_finish(), 0);
    server_got(0);
    CHECK_EQUAL(live.server.notified, 1);
}

// Reading answers the server, and mbedTLS sends what is left of a record before that.
static void record_that_reading_completed_is_not_sent_twice(void)
{
    wish_psk(12);
    shake_bare();
    bare.takes = 10;
    CHECK_EQUAL(hook_send(0, 100), NBD_IO_WRITE);
    bare.takes = uncut;
    peer_write_ticket_record(&live.server);
    CHECK_EQUAL(hook_recv(), NBD_IO_WRITE); // an answer to it has to wait
    CHECK_EQUAL(live.tls.ssl.PEER_PRIVATE(out_left), 0);
    CHECK_EQUAL(hook_send(0, 200), 200);
    CHECK_EQUAL(hook_recv(), NBD_IO_READ);
    server_got(200);
}

static void say_goodbye(void)
{
    bare.finish_more = 2;
    bare.takes = 3;
    CHECK_EQUAL(hook_finish(), NBD_IO_WRITE);
    CHECK_EQUAL(bare.finishes, 0);
    bare.takes = uncut;
    CHECK_EQUAL(hook_finish(), NBD_IO_READ);
    CHECK_EQUAL(hook_finish(), NBD_IO_READ);
    CHECK_EQUAL(hook_finish(), 0);
    CHECK_EQUAL(bare.finishes, 3);
    server_got(0);
    CHECK_EQUAL(live.server.notified, 1);
    CHECK_EQUAL(live.server.in_taken, live.server.in_size); // nothing behind it
}

static void close_notify_leaves_once_and_before_the_end_below(void)
{
    each_bare(say_goodbye);
}

static void hang_up_first(void)
{
    size_t sent = live.server.in_size;

    CHECK_EQUAL(mbedtls_ssl_close_notify(&live.server.ssl), 0);
    CHECK_EQUAL(hook_recv(), NBD_IO_EOF);
    CHECK_EQUAL(hook_recv(), NBD_IO_EOF);
    CHECK_EQUAL(hook_send(0, 10), NBD_IO_ERROR);
    CHECK_EQUAL(hook_finish(), 0);
    CHECK_EQUAL(bare.finishes, 1);
    CHECK_EQUAL(live.server.in_size, sent);
}

static void nothing_is_sent_behind_the_end(void)
{
    each_bare(hang_up_first);
}

static void free_while_send_waits(void)
{
    bare.silent = 1;
    CHECK_EQUAL(hook_send(0, 1), NBD_IO_READ);
    CHECK_EQUAL(hook_recv(), NBD_IO_READ);
    nbd_tls_free(&live.tls);
    CHECK_EQUAL(hook_recv(), NBD_IO_ERROR);
    CHECK_EQUAL(hook_send(0, 1), NBD_IO_ERROR);
    CHECK_EQUAL(hook_recv(), NBD_IO_ERROR);
    CHECK_EQUAL(hook_finish(), 0);
}

static void hooks_fail_after_free(void)
{
    size_t v;

    for (v = 0; v < VERSIONS; v++) {
        wish_psk(versions[v]);
        make_bare();
        free_while_send_waits();
        wish_psk(versions[v]);
        shake_bare();
        nbd_tls_free(&live.tls);
        CHECK_EQUAL(hook_recv(), NBD_IO_ERROR);
        CHECK_EQUAL(hook_send(0, 1), NBD_IO_ERROR);
    }
}

/// Resumption ///

static struct {
    mbedtls_ssl_cache_context cache;
    mbedtls_ssl_session session;
    int has_session;
} resumed;

static void offer_session(void)
{
    mbedtls_ssl_conf_session_cache(&live.server.config, &resumed.cache, mbedtls_ssl_cache_get,
                                   mbedtls_ssl_cache_set);
    if (resumed.has_session) {
        CHECK_EQUAL(mbedtls_ssl_set_session(&live.tls.ssl, &resumed.session), 0);
    }
}

// A program that resumes a session behind nbd.h's back: no certificate comes, so none is looked
// at under the name.
static void resumed_session_is_refused(void)
{
    wish_x509(12);
    wish.made = offer_session;
    memset(&resumed, 0, sizeof resumed);
    mbedtls_ssl_cache_init(&resumed.cache);
    mbedtls_ssl_session_init(&resumed.session);
    shake_bare();
    CHECK_EQUAL(mbedtls_ssl_get_session(&live.tls.ssl, &resumed.session), 0);
    resumed.has_session = 1;
    wish.verify_name = "other.example";
    make_bare();
    CHECK_EQUAL(hook_send(0, 1), NBD_IO_ERROR);
    CHECK(strcmp(live.tls.transport.detail, "TLS: the handshake failed") == 0);
    CHECK_EQUAL(live.server.shaken, 1);
    CHECK_EQUAL(peer_read(&live.server, bare_bytes, 1), 0);
    mbedtls_ssl_session_free(&resumed.session);
    mbedtls_ssl_cache_free(&resumed.cache);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    peer_make_people();
    CHECK_CASE(credentials_say_that_memory_ran_out);
    CHECK_CASE(credentials_that_mbedtls_refuses_say_why);
    CHECK_CASE(session_that_cannot_be_made_says_so);
    CHECK_CASE(session_that_runs_out_of_memory_ends_with_an_error);
    CHECK_CASE(result_that_asks_to_be_called_again_is);
    CHECK_CASE(calls_that_bring_nothing_cannot_hold_a_poll);
    CHECK_CASE(lack_of_memory_is_named);
    CHECK_CASE(certificate_that_cannot_be_used_is_named);
    CHECK_CASE(handshake_that_cannot_be_sent_waits);
    CHECK_CASE(large_sends_are_cut);
    CHECK_CASE(receive_that_waits_to_write_is_not_called_again);
    CHECK_CASE(alert_that_got_stuck_leaves_before_data);
    CHECK_CASE(alert_that_got_stuck_fails_with_the_transport);
    CHECK_CASE(alert_that_got_stuck_leaves_before_close_notify);
    CHECK_CASE(who_cannot_send_still_reads_why);
    CHECK_CASE(record_that_reading_completed_is_not_sent_twice);
    CHECK_CASE(close_notify_leaves_once_and_before_the_end_below);
    CHECK_CASE(nothing_is_sent_behind_the_end);
    CHECK_CASE(hooks_fail_after_free);
    CHECK_CASE(resumed_session_is_refused);
    tls_over();
    peer_free_people();
    return check_end();
}

#endif
