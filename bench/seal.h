// seal.h - TLS for nbdh.c with -DBENCH_SEAL: seal_mbedtls.c or seal_openssl.c is linked with it
#ifndef SEAL_H
#define SEAL_H

#include "nbd.h"

// A transport that encrypts as the URI says, over `io`; what fails ends the program.
// uri: this call.  io: as long as the transport is used, which is never freed.
const nbd_transport *bench_seal(const nbd_uri *uri, const nbd_socket_io *io);

#endif
