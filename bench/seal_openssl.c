// seal_openssl.c - the transport of examples/tls_openssl.c for nbdh.c
int example_main(int argc, char **argv);
#define main example_main
#include "../examples/tls_openssl.c"
#undef main

#include "seal.h"

const nbd_transport *bench_seal(const nbd_uri *uri, const nbd_socket_io *io)
{
    tls *t = calloc(1, sizeof *t);
    if (!t) die("no memory", "");
    signal(SIGPIPE, SIG_IGN);
    prepare(t, uri, io);
    return &t->transport;
}
