// seal_mbedtls.c - the TLS of nbd.h for nbdh.c
#define _GNU_SOURCE
#define NBD_MBEDTLS
#define NBD_STATIC
#include "nbd.h"
#include <pthread.h>

#include "../examples/tls_uri.h"
#include "seal.h"

static void die(const char *why)
{
    fprintf(stderr, "nbdh: %s\n", why);
    exit(1);
}

const nbd_transport *bench_seal(const nbd_uri *uri, const nbd_socket_io *io)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static tls_trust trust;
    static char name[1024]; // outlives the URI
    nbd_tls *tls = calloc(1, sizeof *tls);
    if (!tls) die("no memory");
    pthread_mutex_lock(&lock);
    if (!trust.used && tls_prepare(&trust, uri)) die(trust.why);
    if (!trust.used) die("no nbds URI");
    snprintf(name, sizeof name, "%s", trust.name ? trust.name : "");
    pthread_mutex_unlock(&lock);
    if (nbd_tls_init(tls, &io->transport, &trust.credentials.config, trust.name ? name : NULL,
                     NULL))
        die(tls->transport.detail);
    return &tls->transport;
}
