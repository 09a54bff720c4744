// tls_floor.c - measures mbedTLS alone: the bytes of the requests go one way over a socket
//
//     build/bench/tls_floor DIRECTORY --op read|write --size N --depth N --count N
//
// The other side is a process of its own with OpenSSL, which is so much faster that this side
// is what is measured.  It has server-cert.pem and server-key.pem of DIRECTORY, this side its
// ca-cert.pem.  Each request is as long as one of NBD with its header; nothing answers.  The
// server makes a record of each, as nbdkit does; this side fills its records from all requests
// that are in flight.
#define _GNU_SOURCE
#include <mbedtls/ctr_drbg.h>
#include <mbedtls/entropy.h>
#include <mbedtls/ssl.h>
#include <mbedtls/version.h>
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
#include <psa/crypto.h>
#endif
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "bench.h"

#define HEADER 28 // bytes of a request; a reply has 16 to 20

typedef struct floor_state {
    int fd;
    unsigned char *memory;
    pid_t server;
    mbedtls_ssl_context ssl;
    mbedtls_ssl_config config;
    mbedtls_x509_crt authority;
    mbedtls_entropy_context entropy;
    mbedtls_ctr_drbg_context random;
} floor_state;

static const char *file(const char *directory, const char *name)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

/// The server ///

static void serve(const bench_options *o, int fd)
{
    SSL_CTX *all = SSL_CTX_new(TLS_server_method());
    SSL *ssl;
    unsigned char *memory = bench_memory(1, o->size + HEADER);
    uint64_t left = o->count * (o->size + HEADER);
    signal(SIGPIPE, SIG_IGN); // the client may be gone by the last word
    if (!all || SSL_CTX_use_certificate_chain_file(all, file(o->uri, "server-cert.pem")) != 1 ||
        SSL_CTX_use_PrivateKey_file(all, file(o->uri, "server-key.pem"), SSL_FILETYPE_PEM) != 1)
        bench_die("cannot use the certificate of the server");
    SSL_CTX_set_read_ahead(all, 1);
    SSL_CTX_set_default_read_buffer_len(all, 1 << 18);
    ssl = SSL_new(all);
    if (!ssl || !SSL_set_fd(ssl, fd) || SSL_accept(ssl) != 1) bench_die("server: no handshake");
    while (left > 0) {
        int size = (int)(left < o->size + HEADER ? left : o->size + HEADER);
        int done = o->op == BENCH_READ ? SSL_write(ssl, memory, size) : SSL_read(ssl, memory, size);
        if (done <= 0) bench_die("server: the connection is over");
        left -= (uint64_t)done;
    }
    SSL_shutdown(ssl);
    _exit(0);
}

/// The client ///

static int send_some(void *fd, const unsigned char *from, size_t size)
{
    ssize_t done = send(*(int *)fd, from, size, MSG_NOSIGNAL);
    return done < 0 ? -1 : (int)done;
}

static int receive_some(void *fd, unsigned char *to, size_t size)
{
    ssize_t done = recv(*(int *)fd, to, size, 0);
    return done < 0 ? -1 : (int)done;
}

static void check(const char *what, int result)
{
    if (result) bench_die("%s: mbedTLS error -0x%x", what, (unsigned)-result);
}

static void shake_hands(floor_state *f, const char *directory)
{
    mbedtls_ssl_init(&f->ssl);
    mbedtls_ssl_config_init(&f->config);
    mbedtls_x509_crt_init(&f->authority);
    mbedtls_entropy_init(&f->entropy);
    mbedtls_ctr_drbg_init(&f->random);
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
    if (psa_crypto_init() != PSA_SUCCESS) bench_die("psa_crypto_init");
#endif
    check("random", mbedtls_ctr_drbg_seed(&f->random, mbedtls_entropy_func, &f->entropy, NULL, 0));
    check("ca-cert.pem",
          mbedtls_x509_crt_parse_file(&f->authority, file(directory, "ca-cert.pem")));
    check("defaults",
          mbedtls_ssl_config_defaults(&f->config, MBEDTLS_SSL_IS_CLIENT,
                                      MBEDTLS_SSL_TRANSPORT_STREAM, MBEDTLS_SSL_PRESET_DEFAULT));
    mbedtls_ssl_conf_rng(&f->config, mbedtls_ctr_drbg_random, &f->random);
    mbedtls_ssl_conf_ca_chain(&f->config, &f->authority, NULL);
    check("setup", mbedtls_ssl_setup(&f->ssl, &f->config));
    check("name", mbedtls_ssl_set_hostname(&f->ssl, "localhost"));
    mbedtls_ssl_set_bio(&f->ssl, &f->fd, send_some, receive_some, NULL);
    check("handshake", mbedtls_ssl_handshake(&f->ssl));
}

static void open_all(bench_worker *w)
{
    const bench_options *o = w->options;
    floor_state *f = calloc(1, sizeof *f);
    int ends[2], room = 256 * 1024; // as nbd.h dials
    if (!f || o->connections != 1 || o->op == BENCH_MIXED)
        bench_die("one connection, and reads or writes only");
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) bench_die("socketpair: %s", strerror(errno));
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    f->server = fork();
    if (f->server < 0) bench_die("fork: %s", strerror(errno));
    if (f->server == 0) {
        close(ends[0]);
        serve(o, ends[1]);
    }
    close(ends[1]);
    w->state = f;
    w->sockets[0] = f->fd = ends[0];
    f->memory = bench_memory(o->depth, o->size + HEADER);
    shake_hands(f, o->uri);
}

static void run(bench_worker *w)
{
    floor_state *f = w->state;
    const bench_options *o = w->options;
    uint64_t left = o->count * (o->size + HEADER);
    size_t at = 0, all = o->depth * (o->size + HEADER);
    while (left > 0) {
        size_t size = left < all - at ? (size_t)left : all - at;
        int done = o->op == BENCH_READ ? mbedtls_ssl_read(&f->ssl, f->memory + at, size)
                                       : mbedtls_ssl_write(&f->ssl, f->memory + at, size);
        if (done == MBEDTLS_ERR_SSL_WANT_READ) continue; // a ticket
#ifdef MBEDTLS_ERR_SSL_RECEIVED_NEW_SESSION_TICKET
        if (done == MBEDTLS_ERR_SSL_RECEIVED_NEW_SESSION_TICKET) continue;
#endif
        if (done <= 0) check("transfer", done ? done : -1);
        left -= (uint64_t)done;
        at = (at + (size_t)done) % all;
    }
    w->finished = o->count;
}

static void close_all(bench_worker *w)
{
    floor_state *f = w->state;
    int status;
    close(f->fd);
    if (waitpid(f->server, &status, 0) < 0 || status) bench_die("the server failed");
}

int main(int argc, char **argv)
{
    static const bench_program program = {"tls_floor", 0, open_all, run, close_all};
    return bench_main(&program, argc, argv);
}
