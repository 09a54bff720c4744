// tls_openssl.c - writes an export to standard output, encrypted by OpenSSL
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/tls_openssl.c -lssl -lcrypto -o build/tls_openssl
//     build/tls_openssl 'nbds://HOST/EXPORT?tls-certificates=DIRECTORY' >disk.img
//
// A transport of your own; TLS shakes hands within its first calls, so nothing blocks.  DIRECTORY
// has ca-cert.pem, and client-cert.pem and client-key.pem if need be; without it: the system's CAs.
#define _POSIX_C_SOURCE 200809L
#define NBD_IMPLEMENTATION
#define NBD_STAGE 16384 // nbd.h joins small pieces, such as headers and payloads, to full records
#include "nbd.h"
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct tls {
    SSL *ssl;
    const nbd_transport *below; // only to wait on: OpenSSL has the socket
    nbd_transport transport;
} tls;

// What a call says that moved nothing.  It leaves the queue of errors empty for the next.
static ptrdiff_t blocked(tls *t)
{
    int error = SSL_get_error(t->ssl, 0);
    const char *reason = ERR_reason_error_string(ERR_peek_error());
    ERR_clear_error();
    if (error == SSL_ERROR_WANT_READ) return NBD_IO_READ;
    if (error == SSL_ERROR_WANT_WRITE) return NBD_IO_WRITE;
    // A server that hangs up without a close_notify is forgiven behind ours only.
    if (error == SSL_ERROR_ZERO_RETURN || SSL_get_shutdown(t->ssl)) return NBD_IO_EOF;
    if (SSL_get_verify_mode(t->ssl) && SSL_get_verify_result(t->ssl))
        reason = X509_verify_cert_error_string(SSL_get_verify_result(t->ssl));
    if (reason || !t->transport.detail) t->transport.detail = reason ? reason : "connection lost";
    return NBD_IO_ERROR;
}

static ptrdiff_t tls_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    tls *t = context;
    size_t done;
    (void)count;
    return SSL_read_ex(t->ssl, iov->base, iov->size, &done) ? (ptrdiff_t)done : blocked(t);
}

// Writes a record.  OpenSSL that was blocked wants the same bytes again: nbd.h gives the same.
static ptrdiff_t tls_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    tls *t = context;
    size_t done;
    (void)count, (void)flags;
    return SSL_write_ex(t->ssl, iov->base, iov->size, &done) ? (ptrdiff_t)done : blocked(t);
}

static int tls_wait(void *context, unsigned wants, int *timeout_ms)
{
    const nbd_transport *below = ((tls *)context)->below;
    return below->wait(below->context, wants, timeout_ms);
}

// Says close_notify.
static int tls_finish(void *context)
{
    return SSL_shutdown(((tls *)context)->ssl) < 0 ? (int)blocked(context) : 0;
}

static void die(const char *why, const char *more)
{
    fprintf(stderr, "tls_openssl: %s%s%s\n", why, *more ? ": " : "", more);
    exit(1);
}

static void load(SSL_CTX *all, const char *directory)
{
    static const char *const names[] = {"ca-cert.pem", "client-cert.pem", "client-key.pem"};
    char path[3][4096];
    for (int i = 0; i < 3; i++)
        snprintf(path[i], sizeof path[i], "%s/%s", directory, names[i]);
    if (!SSL_CTX_load_verify_locations(all, path[0], NULL)) die("cannot use", path[0]);
    if (access(path[1], F_OK)) return; // the server may do without
    if (SSL_CTX_use_certificate_chain_file(all, path[1]) != 1) die("cannot use", path[1]);
    if (SSL_CTX_use_PrivateKey_file(all, path[2], 1) != 1) die("cannot use", path[2]);
}

// The server is verified by its name, unless the URI says that it is not.
static void prepare(tls *t, const nbd_uri *uri, const nbd_socket_io *io)
{
    SSL_CTX *all = SSL_CTX_new(TLS_client_method()); // can serve any number of connections
    const char *name = uri->tls_hostname ? uri->tls_hostname : uri->address.host;
    const char *type = uri->tls_psk_file && !uri->tls_certificates ? "psk" : "x509";
    if (uri->tls_type) type = uri->tls_type;
    if (!all || strcmp(type, "x509")) die("no such TLS here", type);
    if (!name && uri->tls_verify_peer) die("no name to verify", "tls-hostname is needed");
    if (uri->tls_certificates) load(all, uri->tls_certificates);
    if (!uri->tls_certificates && !SSL_CTX_set_default_verify_paths(all)) die("no memory", "");
    SSL_CTX_set_verify(all, uri->tls_verify_peer ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, NULL);
    SSL_CTX_set_mode(all, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(all, 1); // two records in one call
    SSL_CTX_set_default_read_buffer_len(all, 32768);
    t->ssl = SSL_new(all);
    if (!t->ssl || !SSL_set_fd(t->ssl, io->socket)) die("no memory", "");
    if (name && !X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(t->ssl), name) &&
        !(SSL_set1_host(t->ssl, name) && SSL_set_tlsext_host_name(t->ssl, (char *)(uintptr_t)name)))
        die("no name for a certificate", name);
    SSL_set_connect_state(t->ssl);
    SSL_CTX_free(all);
    ERR_clear_error();
    t->below = &io->transport;
    t->transport =
        (nbd_transport){NBD_ONE_PIECE, t, tls_send, tls_recv, tls_wait, tls_finish, NULL};
}

int main(int argc, char **argv)
{
    static unsigned char buffer[NBD_BUFFER_GOOD], memory[1 << 22];
    static char text[4096];
    const char *where = argc > 1 ? argv[1] : "nbds://localhost";
    static nbd_client client; // zeroed: it may be asked for its detail before nbd_init
    nbd_slot slot;
    nbd_config config = {.flags = NBD_TLS_REQUIRE, .slots = &slot, .slot_count = 1};
    nbd_sync sync = {.client = &client, .timeout_ms = 60000};
    tls t = {NULL, NULL, NBD_ZERO};
    nbd_uri uri;
    uint64_t at = 0, part;
    int error = nbd_uri_parse(&uri, where, text, sizeof text);
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    signal(SIGPIPE, SIG_IGN); // OpenSSL has no MSG_NOSIGNAL
    if (!error) error = nbd_init(&client, &config);
    if (!error) error = nbd_sync_dial(&sync, &uri.address);
    if (!error) prepare(&t, &uri, &sync.io);
    sync.tls = &t.transport;
    if (!error) error = nbd_sync_connect(&sync, &sync.io.transport);
    for (; !error && (part = nbd_negotiated(&client)->size - at) > 0; at += part) {
        if (part > sizeof memory) part = sizeof memory;
        error = nbd_sync_read(&sync, memory, (size_t)part, at);
        if (!error && fwrite(memory, 1, (size_t)part, stdout) != part) die("cannot write", "");
    }
    if (*uri.detail) die(nbd_strerror(error), uri.detail);
    if (error || (error = nbd_sync_close(&sync)))
        die(nbd_strerror(error), *sync.message ? sync.message : nbd_detail(&client));
    SSL_free(t.ssl);
    return fflush(stdout) != 0;
}
