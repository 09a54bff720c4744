// one_piece.h - a transport without scatter-gather: a device or a library that moves one
// buffer at a time.  Here a descriptor with read(2) and write(2); it must be non-blocking.
#ifndef TRANSPORTS_ONE_PIECE_H
#define TRANSPORTS_ONE_PIECE_H

#include <unistd.h>

#include "wait.h"

typedef struct one_piece {
    int fd;
    nbd_transport transport;
} one_piece;

// `count` is 1: the client joins what is small.
static inline ptrdiff_t one_piece_send(void *context, const nbd_iovec *iov, unsigned count,
                                       unsigned flags)
{
    const one_piece *o = (const one_piece *)context;

    (void)count;
    (void)flags;
    return wait_result(write(o->fd, iov->base, iov->size), NBD_IO_WRITE);
}

// `count` may be more: the first piece is enough.
static inline ptrdiff_t one_piece_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    const one_piece *o = (const one_piece *)context;

    (void)count;
    return wait_result(read(o->fd, iov->base, iov->size), NBD_IO_READ);
}

static inline int one_piece_wait(void *context, unsigned wants, int *timeout_ms)
{
    const one_piece *o = (const one_piece *)context;

    return wait_for(o->fd, o->fd, wants, timeout_ms);
}

static inline void one_piece_init(one_piece *o, int fd)
{
    // No finish: NBD_CMD_DISC has told the server that nothing follows.
    const nbd_transport transport = {
        .flags = NBD_ONE_PIECE,
        .context = o,
        .send = one_piece_send,
        .recv = one_piece_recv,
        .wait = one_piece_wait,
    };

    o->fd = fd;
    o->transport = transport;
}

#endif
