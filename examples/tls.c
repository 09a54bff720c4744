// tls.c - writes an export to standard output, encrypted by mbedTLS: certificates or a PSK
//
//     mkdir -p build && gcc -std=c99 -O2 -DNBD_MBEDTLS -I. examples/tls.c -lmbedtls -lmbedx509 -lmbedcrypto -o build/tls
//     build/tls 'nbds://HOST/EXPORT?tls-certificates=DIRECTORY' >disk.img
//     build/tls 'nbds://USER@HOST/EXPORT?tls-psk-file=FILE' >disk.img
//
// DIRECTORY has ca-cert.pem and, if the server asks for them, client-cert.pem and
// client-key.pem; KEY_PASSWORD in the environment opens an encrypted key.  FILE is what
// psktool(1) writes.
#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include <stdio.h>
#include <stdlib.h>

static unsigned char buffer[NBD_BUFFER_GOOD], memory[1 << 20];
static char text[4096], files[3 * 4096 + 48];
static nbd_slot slots[1];
static nbd_client client;
static nbd_tls_credentials credentials; // any number of connections may share them
static nbd_tls tls;                     // of one connection

static int fail(const char *where, int error, const char *why)
{
    fprintf(stderr, "tls: %s: %s%s%s\n", where, nbd_strerror(error), *why ? ": " : "", why);
    return 1;
}

// Sends nothing yet.  Returns an error, and why it is one.
static int prepare(nbd_uri *uri, const nbd_transport *clear, const char **why)
{
    nbd_tls_options options;
    int error = nbd_tls_uri(&options, uri, files, sizeof files);
    *why = uri->detail;
    if (error) return error;
    if (!options.psk_file && !options.ca_file && !options.no_verify)
        options.ca_file = "/etc/ssl/certs/ca-certificates.crt"; // whom the system trusts
    options.key_password = getenv("KEY_PASSWORD");
    error = nbd_tls_credentials_init(&credentials, &options);
    *why = credentials.detail;
    if (error) return error;
    error = nbd_tls_init(&tls, clear, &credentials.config, nbd_tls_uri_name(uri), NULL);
    *why = error ? tls.transport.detail : "";
    return error;
}

static int copy(nbd_sync *sync)
{
    uint64_t size = nbd_negotiated(&client)->size, at, part;
    int error = 0;
    fprintf(stderr, "tls: %s, %s, %llu bytes\n", mbedtls_ssl_get_version(&tls.ssl),
            mbedtls_ssl_get_ciphersuite(&tls.ssl), (unsigned long long)size);
    for (at = 0; !error && at < size; at += part) {
        part = size - at < sizeof memory ? size - at : sizeof memory;
        error = nbd_sync_read(sync, memory, (size_t)part, at);
        if (!error && fwrite(memory, 1, (size_t)part, stdout) != part) break;
    }
    return error;
}

int main(int argc, char **argv)
{
    nbd_config config = NBD_ZERO;
    nbd_sync sync = NBD_ZERO;
    nbd_uri uri;
    const char *where = argc > 1 ? argv[1] : "nbds://localhost", *why;
    int error = nbd_uri_parse(&uri, where, text, sizeof text);
    config.flags = NBD_TLS_REQUIRE; // whatever the URI says
    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    sync.client = &client;
    sync.timeout_ms = 60000;
    sync.tls = &tls.transport;
    why = uri.detail;
    if (!error) error = prepare(&uri, &sync.io.transport, &why);
    if (error) return fail(where, error, why);
    error = nbd_init(&client, &config);
    if (!error) error = nbd_sync_open(&sync, &uri.address);
    if (!error) error = copy(&sync);
    if (!error) error = nbd_sync_close(&sync);
    if (error) return fail(where, error, *sync.message ? sync.message : nbd_detail(&client));
    nbd_tls_free(&tls);
    nbd_tls_credentials_free(&credentials);
    if (!ferror(stdout) && !fflush(stdout)) return 0;
    perror("tls: standard output");
    return 1;
}
