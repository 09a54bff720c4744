// Sessions of play.h over TLS, with a server in process (tls_peer.h).  The transport that is
// cut, blocked and broken is the one below TLS: it carries records.
#ifndef TLS_PLAY_H
#define TLS_PLAY_H

#include "play.h"
#include "tls_peer.h"

#if MBEDTLS_VERSION_NUMBER < 0x03000000
static const int versions[] = {12};
#else
static const int versions[] = {12, 13};
#endif

enum { VERSIONS = sizeof versions / sizeof versions[0] };

/// What a session runs on ///

// What a session is to be like; a script sets it when it is written.
static struct {
    manner manner;
    nbd_tls_options options;
    const char *verify_name;
    const char *server_name;
    size_t cut_at;        // bytes of the server's records behind which the stream ends
    size_t flip_at;       // the byte of them that is changed on its way, or `uncut`
    size_t send_fails_at; // bytes of the client's records behind which sending fails
    int client_version;   // most, as manner.version; 0: any
    int signal_tickets;   // mbedTLS 3 tells of tickets
    int any_suite;        // suites that certificates go with too
    int says_zero;        // the transport below sends 0 bytes when it blocks
    // Called, if there: when the credentials are made, and when the session is.
    void (*adjust)(mbedtls_ssl_config *config);
    void (*made)(void);
} wish;

// What it came to.
static struct {
    nbd_tls_credentials credentials;
    nbd_tls tls;
    peer server;
    nbd_transport below;
    mbedtls_x509_crt authority; // for a configuration that has none of its own
    int running;
    int server_runs; // above 0: what mbedTLS does now is for the server
    // Calls of mbedtls_ssl_write.
    const unsigned char *blocked; // what must come again, or NULL
    size_t blocked_size;
    unsigned idle; // receives in turn that found nothing
    unsigned writes;
    unsigned repeats;   // after a block
    unsigned grown;     // of these those at which the engine offered more by then
    size_t first_write; // bytes
    size_t staged;      // bytes that were written from nbd_tls.stage
    size_t in_place;    // bytes that were written from where the caller keeps them
} live;

static inline void tls_over(void)
{
    if (!live.running) return;
    nbd_tls_free(&live.tls);
    nbd_tls_credentials_free(&live.credentials);
    peer_end(&live.server);
    mbedtls_x509_crt_free(&live.authority);
    live.running = 0;
}

static inline int server_is_over(const play *p)
{
    return live.server.result || (stream_is_over(p) && live.server.shaken);
}

// The server receives what it can, and sends what it has.
static inline void pump(play *p)
{
    static unsigned char data[16384];
    nbd_iovec one = {data, 0};
    size_t size, accept = p->accept;

    live.server_runs++;
    p->accept = uncut;
    while ((one.size = peer_read(&live.server, data, sizeof data)) > 0)
        take_from_client(&p->wires[0], &one, 1, one.size);
    p->accept = accept;
    while (live.server.shaken && !live.server.result && p->out_taken < out_limit(p)) {
        one.size = sizeof data;
        size = give_to_client(&p->wires[0], &one, 1, peer_record_size(&live.server, one.size));
        peer_write(&live.server, data, size);
        if (live.server.result) p->ended = 1; // by an alert
    }
    if (live.server.shaken && stream_is_over(p) && !live.server.result) {
        if (!live.server.manner.no_notify) (void)mbedtls_ssl_close_notify(&live.server.ssl);
        live.server.result = MBEDTLS_ERR_SSL_PEER_CLOSE_NOTIFY;
    }
    live.server_runs--;
}

static inline size_t cipher_left(void)
{
    return smaller(live.server.out_size, wish.cut_at) - live.server.out_taken;
}

// A changed byte may make a length so large that both sides wait for each other.
static inline int is_flipped(void)
{
    return wish.flip_at < live.server.out_taken;
}

static inline int cipher_is_over(const play *p)
{
    return (live.server.out_taken == wish.cut_at && p->mode.ended != PLAY_SILENCE) ||
           server_is_over(p) || (is_flipped() && live.idle > 3);
}

static inline int cipher_waits(void)
{
    pump(&stage);
    return cipher_left() > 0 || cipher_is_over(&stage) || is_flipped();
}

static inline ptrdiff_t cipher_send(void *context, const nbd_iovec *iov, unsigned count,
                                    unsigned flags)
{
    play *p = context;
    size_t size;

    CHECK(count == 1 && iov->size > 0);
    p->more = 0;
    if (live.server.in_size >= wish.send_fails_at) {
        p->ended = 1;
        return NBD_IO_ERROR;
    }
    size = blocks_now(p, 1) ? 0 : smaller(smaller(iov->size, piece_now(p)), p->accept);
    if (size == 0) return wish.says_zero ? 0 : NBD_IO_WRITE;
    if (p->accept != uncut) p->accept -= size;
    peer_take(&live.server, iov->base, size);
    p->moved = 1;
    live.idle = 0;
    p->more = (flags & NBD_SEND_MORE) != 0;
    pump(p);
    p->in_hook = 1;
    play_steps(p);
    p->in_hook = 0;
    return (ptrdiff_t)size;
}

static inline ptrdiff_t cipher_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    play *p = context;
    size_t size;

    CHECK(count == 1 && iov->size > 0);
    play_waits = cipher_waits; // what comes is the server's records from here on
    if (blocks_now(p, 0)) return NBD_IO_READ;
    pump(p);
    size = smaller(smaller(cipher_left(), iov->size), piece_now(p));
    if (size > 0) {
        memcpy(iov->base, live.server.out + live.server.out_taken, size);
        if (wish.flip_at - live.server.out_taken < size) {
            ((unsigned char *)iov->base)[wish.flip_at - live.server.out_taken] ^= 0x55;
        }
        live.server.out_taken += size;
        p->moved = 1;
        live.idle = 0;
        return (ptrdiff_t)size;
    }
    live.idle++;
    return cipher_is_over(p) ? tell_the_end(p) : NBD_IO_READ;
}

/// Starting TLS ///

// What a program may do to the configuration.
static inline void adjust_client(mbedtls_ssl_config *config)
{
    if (wish.adjust) wish.adjust(config);
    if (wish.client_version) peer_set_version(config, wish.client_version);
    if (wish.any_suite) {
        mbedtls_ssl_conf_ciphersuites(config, mbedtls_ssl_list_ciphersuites());
        mbedtls_ssl_conf_ca_chain(config, &live.authority, NULL);
    }
#ifdef MBEDTLS_SSL_TLS1_3_SIGNAL_NEW_SESSION_TICKETS_ENABLED
    if (wish.signal_tickets) {
        mbedtls_ssl_conf_session_tickets(config, MBEDTLS_SSL_SESSION_TICKETS_ENABLED);
        mbedtls_ssl_conf_tls13_enable_signal_new_session_tickets(
            config, MBEDTLS_SSL_TLS1_3_SIGNAL_NEW_SESSION_TICKETS_ENABLED);
    }
#endif
}

static inline int make_session(void)
{
    int error;

    tls_over();
    live.server_runs = 0;
    live.blocked = NULL;
    live.writes = live.repeats = live.grown = live.idle = 0;
    live.staged = live.in_place = live.first_write = 0;
    live.below.context = &stage;
    live.below.send = cipher_send;
    live.below.recv = cipher_recv;
    live.below.flags = stage.mode.one_piece ? NBD_ONE_PIECE : 0;
    live.running = 1;
    peer_begin(&live.server, &wish.manner);
    mbedtls_x509_crt_init(&live.authority);
    peer_parse(&live.authority, &people.authority);
    CHECK_EQUAL(nbd_tls_credentials_init(&live.credentials, &wish.options), 0);
    adjust_client(&live.credentials.config);
    error = nbd_tls_init(&live.tls, &live.below, &live.credentials.config, wish.verify_name,
                         wish.server_name);
    if (wish.made) wish.made();
    return error;
}

static inline int start_tls(nbd_client *client)
{
    int error = make_session();

    play_waits = cipher_waits;
    if (judging) checker_tls(&judge);
    return error ? error : nbd_starttls(client, &live.tls.transport);
}

/// Sessions ///

static inline size_t text_size(const char *text)
{
    return strlen(text) + 1;
}

static inline void wish_nothing(void)
{
    memset(&wish, 0, sizeof wish);
    wish.cut_at = wish.flip_at = wish.send_fails_at = uncut;
}

static inline void wish_x509(int version)
{
    wish_nothing();
    wish.manner.version = version;
    wish.manner.who = &people.server;
    wish.options.ca = people.authority.certificate;
    wish.options.ca_size = text_size(people.authority.certificate);
    wish.verify_name = "server.example";
}

static inline void wish_certificate(const identity *client)
{
    wish.manner.trusts = &people.authority;
    if (!client) return;
    wish.options.certificate = client->certificate;
    wish.options.certificate_size = text_size(client->certificate);
    wish.options.key = client->key;
    wish.options.key_size = text_size(client->key);
}

// Shaking hands with a shared key alone is quick in TLS 1.2.
static const int quick_suites[] = {MBEDTLS_TLS_PSK_WITH_AES_128_GCM_SHA256,
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
                                   MBEDTLS_TLS1_3_AES_128_GCM_SHA256,
#endif
                                   0};

static inline void wish_psk(int version)
{
    wish_nothing();
    wish.manner.version = version;
    wish.manner.user = "alice";
    wish.manner.key = "0123456789abcdef";
    wish.manner.suites = quick_suites;
    wish.options.psk = "0123456789abcdef";
    wish.options.psk_size = 16;
    wish.options.user = "alice";
}

static inline void until_tls(script *s)
{
    s->config.flags |= NBD_TLS_REQUIRE;
    s->config.export_name = "secret name";
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_ack(s, 5);
    see_starttls(s);
    client_calls(s, start_tls);
}

static inline void open_tls(script *s)
{
    until_tls(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
}

// Small and large ones, both ways.
static inline void transfer(script *s)
{
    int a = client_issues(s, NBD_WRITE, 0, 512, 30), b = client_issues(s, NBD_READ, 0, 4096, 40);
    int c = client_issues(s, NBD_WRITE, 0, 8192, 40000);
    int d = client_issues(s, NBD_READ, 0, 512, 50000);

    want_request(s, a);
    want_request(s, b);
    send_none(s, a);
    send_data(s, b, DONE, 4096, 40);
    want_request(s, c);
    want_request(s, d);
    send_data(s, d, MORE, 512, 30000);
    send_none(s, c);
    send_data(s, d, DONE, 30512, 20000);
    see_done(s, a, 0);
    see_done(s, b, 0);
    see_done(s, c, 0);
    see_done(s, d, 0);
}

// The least of everything, for what is done to each of its bytes.
static inline void short_session(script *s)
{
    int w, r;

    open_tls(s);
    w = client_issues(s, NBD_WRITE, 0, 512, 30);
    r = client_issues(s, NBD_READ, 0, 4096, 40);
    want_request(s, w);
    want_request(s, r);
    send_data(s, r, DONE, 4096, 40);
    send_none(s, w);
    see_done(s, w, 0);
    see_done(s, r, 0);
    close_session(s);
}

static inline void whole_session(script *s)
{
    open_tls(s);
    transfer(s);
    close_session(s);
}

static inline const script *write_session(void (*write)(script *s))
{
    const session one = {check.name, write};

    return session_script(&one);
}

/// Sessions that break ///

static inline mode broken_mode(size_t piece, ptrdiff_t ended)
{
    mode how = whole_mode;

    how.piece = piece;
    how.cut_at = uncut - 1; // the server's data is whole, but what is seen may be cut
    how.ended = ended;
    return how;
}

// A session that may have been stopped at any point: it is over, once, and by no other
// error than these; without one only if the server heard the client's goodbye.
static inline void check_broken_end(const char *prefix)
{
    int error = closing_error(&stage.seen);
    const nbd_event *closed = &stage.seen.events[stage.seen.count - 1].event;

    if (error == 0) {
        CHECK(stage.farewell || !stage.ended);
        return;
    }
    CHECK(error == NBD_ERR_CLOSED || error == NBD_ERR_TRUNCATED || error == NBD_ERR_TRANSPORT);
    if (prefix) CHECK(strncmp(closed->detail, prefix, strlen(prefix)) == 0);
}

#endif
