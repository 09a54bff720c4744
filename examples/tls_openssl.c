// tls_openssl.c - writes an export to standard output, encrypted by OpenSSL
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/tls_openssl.c -lssl -lcrypto -o build/tls_openssl
//     build/tls_openssl nbds://HOST/EXPORT?tls-certificates=DIRECTORY
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
    const char *why; // it failed: constant text, or ""
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
    if (reason || !*t->why) t->why = reason ? reason : "connection lost";
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

static int tls_finish(void *context) // says close_notify
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
static void prepare(tls *t, const nbd_uri *uri, nbd_socket socket)
{
    SSL_CTX *all = SSL_CTX_new(TLS_client_method()); // can serve any number of connections
    const char *name = uri->tls_hostname ? uri->tls_hostname : uri->address.host;
    if (uri->tls_type && strcmp(uri->tls_type, "x509")) die("no such TLS here", uri->tls_type);
    if (!name && uri->tls_verify_peer) die("no name to verify", "tls-hostname is needed");
    if (uri->tls_certificates) load(all, uri->tls_certificates);
    if (!uri->tls_certificates) SSL_CTX_set_default_verify_paths(all);
    SSL_CTX_set_verify(all, uri->tls_verify_peer ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, NULL);
    SSL_CTX_set_mode(all, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(all, 1); // many records in one call
    SSL_CTX_set_default_read_buffer_len(all, 131072);
    t->ssl = SSL_new(all);
    if (!t->ssl || !SSL_set_fd(t->ssl, socket)) die("no memory", "");
    if (name && !X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(t->ssl), name)) {
        if (!SSL_set1_host(t->ssl, name)) die("no memory", "");
        SSL_set_tlsext_host_name(t->ssl, (char *)(uintptr_t)name);
    }
    SSL_set_connect_state(t->ssl);
    ERR_clear_error();
    t->transport = (nbd_transport){NBD_ONE_PIECE, t, tls_send, tls_recv, NULL, tls_finish};
}

static nbd_client client;
static nbd_op op = {.command = NBD_READ};
static unsigned char memory[1 << 22]; // one large request at a time; poll_copy.c has many

// Writes what was read, and asks for what comes behind it.
static int next_part(void)
{
    uint64_t left = nbd_negotiated(&client)->size - (op.offset += op.size);
    if (fwrite(memory, 1, (size_t)op.size, stdout) != op.size) die("cannot write", "");
    op.buffer = memory;
    op.size = nbd_fit(&client, NBD_READ, left < sizeof memory ? left : sizeof memory);
    return left ? nbd_issue(&client, &op, NULL) : nbd_disconnect(&client);
}

int main(int argc, char **argv)
{
    static unsigned char buffer[NBD_BUFFER_GOOD];
    static char text[4096];
    nbd_slot slot;
    tls t = {.why = ""};
    nbd_sync dialled = {.timeout_ms = 5000};
    const nbd_transport *io = &dialled.io.transport;
    nbd_event event;
    nbd_uri uri;
    int ever = -1,
        error = nbd_uri_parse(&uri, argc > 1 ? argv[1] : "nbds://localhost", text, sizeof text);
    nbd_config config = {.slots = &slot, .slot_count = 1, .buffer = buffer};
    config.flags = NBD_TLS_REQUIRE;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    signal(SIGPIPE, SIG_IGN); // OpenSSL has no MSG_NOSIGNAL
    if (!error) error = nbd_init(&client, &config);
    if (!error) error = nbd_sync_dial(&dialled, &uri.address);
    if (!error) error = nbd_connect(&client, io);
    if (!error) prepare(&t, &uri, dialled.io.socket);
    for (unsigned wants; !error && (wants = nbd_wants(&client)) != 0;) {
        if (!(wants & NBD_WANT_NOW)) io->wait(io->context, wants, &ever); // errors show in nbd_poll
        error = nbd_poll(&client, wants);
        while (!error && nbd_next(&client, &event))
            if (event.type == NBD_EVENT_STARTTLS)
                error = nbd_starttls(&client, &t.transport);
            else if (event.type != NBD_EVENT_TEXT)
                error = event.error || event.type == NBD_EVENT_CLOSED ? event.error : next_part();
    }
    if (error) die(nbd_strerror(error), *t.why ? t.why : nbd_detail(&client));
    SSL_free(t.ssl);
    nbd_sync_close(&dialled);
    return fflush(stdout) != 0;
}
