// pipes.h - a transport over two descriptors, one for each direction: two pipes, or standard
// input and output of a process.  Both must be non-blocking; ignore SIGPIPE.
//
//     pipes_init(&io, from_server, to_server);
//     nbd_connect(&client, &io.transport);
//     ... wait for io.in to be readable, for io.out to be writable ...
#ifndef TRANSPORTS_PIPES_H
#define TRANSPORTS_PIPES_H

#include <sys/uio.h>
#include <unistd.h>

#include "wait.h"

enum { PIPES_PIECES = 16 };

typedef struct pipes {
    int in, out; // -1 once closed; `finish` closes `out`
    nbd_transport transport;
} pipes;

// Their layouts may differ.  What is behind the last piece is moved by the next call.
static inline int pipes_pieces(struct iovec *to, const nbd_iovec *from, unsigned count)
{
    unsigned i;

    for (i = 0; i < count && i < PIPES_PIECES; i++) {
        to[i].iov_base = from[i].base;
        to[i].iov_len = from[i].size;
    }
    return (int)i;
}

static inline ptrdiff_t pipes_send(void *context, const nbd_iovec *iov, unsigned count,
                                   unsigned flags)
{
    const pipes *p = (const pipes *)context;
    struct iovec pieces[PIPES_PIECES];

    (void)flags;
    return wait_result(writev(p->out, pieces, pipes_pieces(pieces, iov, count)), NBD_IO_WRITE);
}

static inline ptrdiff_t pipes_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    const pipes *p = (const pipes *)context;
    struct iovec pieces[PIPES_PIECES];

    return wait_result(readv(p->in, pieces, pipes_pieces(pieces, iov, count)), NBD_IO_READ);
}

static inline int pipes_wait(void *context, unsigned wants, int *timeout_ms)
{
    const pipes *p = (const pipes *)context;

    return wait_for(p->in, p->out, wants, timeout_ms);
}

// The server reads the end of its pipe then.
static inline int pipes_finish(void *context)
{
    pipes *p = (pipes *)context;

    close(p->out);
    p->out = -1;
    return 0;
}

static inline void pipes_init(pipes *p, int in, int out)
{
    const nbd_transport transport = {
        .context = p,
        .send = pipes_send,
        .recv = pipes_recv,
        .wait = pipes_wait,
        .finish = pipes_finish,
    };

    p->in = in;
    p->out = out;
    p->transport = transport;
}

#endif
