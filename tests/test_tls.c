// TLS by mbedTLS: sessions of play.h over a server in process (tls_peer.h).  The transport
// that is cut, blocked and broken is the one below TLS: it carries records.
#define _DEFAULT_SOURCE 1
#include <sys/stat.h>

#include <mbedtls/ssl.h>

static int spy_ssl_write(mbedtls_ssl_context *ssl, const unsigned char *data, size_t size);

#define mbedtls_ssl_write spy_ssl_write
#define NBD_MBEDTLS
#define NBD_IMPLEMENTATION
#include "../nbd.h"
#undef mbedtls_ssl_write

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
    size_t cut_at; // bytes of the server's records behind which the stream ends
} wish;

// What it came to.
static struct {
    nbd_tls_credentials credentials;
    nbd_tls tls;
    peer server;
    nbd_transport below;
    int running;
    // Calls of mbedtls_ssl_write.
    const unsigned char *blocked; // what must come again, or NULL
    size_t blocked_size;
    unsigned writes;
    unsigned repeats; // after a block
    unsigned grown;   // of these those at which the engine offered more by then
} live;

static int spy_ssl_write(mbedtls_ssl_context *ssl, const unsigned char *data, size_t size)
{
    int result;

    CHECK(size > 0);
    if (live.blocked) {
        CHECK(data == live.blocked);
        CHECK_EQUAL(size, live.blocked_size);
        live.repeats++;
        if (stage.client.out_offered > size) live.grown++;
    }
    result = mbedtls_ssl_write(ssl, data, size);
    live.blocked = result == MBEDTLS_ERR_SSL_WANT_WRITE ? data : NULL;
    live.blocked_size = size;
    live.writes++;
    return result;
}

static void tls_over(void)
{
    if (!live.running) return;
    nbd_tls_free(&live.tls);
    nbd_tls_credentials_free(&live.credentials);
    peer_end(&live.server);
    live.running = 0;
}

static int server_is_over(const play *p)
{
    return live.server.result || (stream_is_over(p) && live.server.shaken);
}

// The server receives what it can, and sends what it has.
static void pump(play *p)
{
    static unsigned char data[16384];
    nbd_iovec one = {data, 0};
    size_t size, accept = p->accept;

    p->accept = uncut;
    while ((one.size = peer_read(&live.server, data, sizeof data)) > 0)
        take_from_client(&p->wires[0], &one, 1, one.size);
    p->accept = accept;
    if (!live.server.shaken) return;
    while (!live.server.result && p->out_taken < out_limit(p)) {
        one.size = sizeof data;
        size = give_to_client(&p->wires[0], &one, 1, peer_record_size(&live.server, one.size));
        peer_write(&live.server, data, size);
    }
    if (stream_is_over(p) && !live.server.result) {
        if (!live.server.manner.no_notify) (void)mbedtls_ssl_close_notify(&live.server.ssl);
        live.server.result = MBEDTLS_ERR_SSL_PEER_CLOSE_NOTIFY;
    }
}

static size_t cipher_left(void)
{
    return smaller(live.server.out_size, wish.cut_at) - live.server.out_taken;
}

static int cipher_is_over(const play *p)
{
    return live.server.out_taken == wish.cut_at || server_is_over(p);
}

static int cipher_waits(void)
{
    pump(&stage);
    return cipher_left() > 0 || cipher_is_over(&stage);
}

static ptrdiff_t cipher_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    play *p = context;
    size_t size;

    CHECK(count == 1 && iov->size > 0);
    p->more = 0;
    if (blocks_now(p, 1)) return NBD_IO_WRITE;
    size = smaller(smaller(iov->size, piece_now(p)), p->accept);
    if (size == 0) return NBD_IO_WRITE;
    if (p->accept != uncut) p->accept -= size;
    peer_take(&live.server, iov->base, size);
    p->moved = 1;
    p->more = (flags & NBD_SEND_MORE) != 0;
    pump(p);
    p->in_hook = 1;
    play_steps(p);
    p->in_hook = 0;
    return (ptrdiff_t)size;
}

static ptrdiff_t cipher_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    play *p = context;
    size_t size;

    CHECK(count == 1 && iov->size > 0);
    if (blocks_now(p, 0)) return NBD_IO_READ;
    pump(p);
    size = smaller(smaller(cipher_left(), iov->size), piece_now(p));
    if (size > 0) {
        memcpy(iov->base, live.server.out + live.server.out_taken, size);
        live.server.out_taken += size;
        p->moved = 1;
        return (ptrdiff_t)size;
    }
    return cipher_is_over(p) ? tell_the_end(p) : NBD_IO_READ;
}

/// Starting TLS ///

static int make_session(void)
{
    int error;

    tls_over();
    live.blocked = NULL;
    live.writes = live.repeats = live.grown = 0;
    live.below.context = &stage;
    live.below.send = cipher_send;
    live.below.recv = cipher_recv;
    live.below.flags = stage.mode.one_piece ? NBD_ONE_PIECE : 0;
    live.running = 1;
    peer_begin(&live.server, &wish.manner);
    CHECK_EQUAL(nbd_tls_credentials_init(&live.credentials, &wish.options), 0);
    error = nbd_tls_init(&live.tls, &live.below, &live.credentials.config, wish.verify_name,
                         wish.server_name);
    play_waits = cipher_waits;
    return error;
}

static int start_tls(nbd_client *client)
{
    int error = make_session();

    if (judging) checker_tls(&judge);
    return error ? error : nbd_starttls(client, &live.tls.transport);
}

/// Sessions ///

static size_t text_size(const char *text)
{
    return strlen(text) + 1;
}

static void wish_nothing(void)
{
    memset(&wish, 0, sizeof wish);
    wish.cut_at = uncut;
}

static void wish_x509(int version)
{
    wish_nothing();
    wish.manner.version = version;
    wish.manner.who = &people.server;
    wish.options.ca = people.authority.certificate;
    wish.options.ca_size = text_size(people.authority.certificate);
    wish.verify_name = "server.example";
}

static void wish_certificate(const identity *client)
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

static void wish_psk(int version)
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

static void until_tls(script *s)
{
    s->config.flags |= NBD_TLS_REQUIRE;
    s->config.export_name = "secret name";
    greet_fixed(s);
    want_option(s, 5, "", 0);
    send_ack(s, 5);
    see_starttls(s);
    client_calls(s, start_tls);
}

static void open_tls(script *s)
{
    until_tls(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
}

// Small and large ones, both ways.
static void transfer(script *s)
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

static void whole_session(script *s)
{
    open_tls(s);
    transfer(s);
    close_session(s);
}

static const script *write_session(void (*write)(script *s))
{
    const session one = {check.name, write};

    return session_script(&one);
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

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    peer_make_people();
    CHECK_CASE(session_with_certificates_in_every_mode);
    CHECK_CASE(session_with_shared_key_in_every_mode);
    tls_over();
    peer_free_people();
    return check_end();
}
