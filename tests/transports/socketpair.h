// socketpair.h - a transport over a stream socket, here one of a socketpair: what
// nbd_socket_init makes, by hand, where NBD_NO_SOCKETS has left it out.  The socket must be
// non-blocking.
#ifndef TRANSPORTS_SOCKETPAIR_H
#define TRANSPORTS_SOCKETPAIR_H

#include <sys/socket.h>
#include <sys/uio.h>

#include "wait.h"

enum { SOCKETPAIR_PIECES = 16 };

typedef struct socketpair_io {
    int fd; // stays yours to close
    nbd_transport transport;
} socketpair_io;

static inline struct msghdr socketpair_message(struct iovec *pieces, const nbd_iovec *iov,
                                               unsigned count)
{
    struct msghdr message = {0};
    unsigned i;

    for (i = 0; i < count && i < SOCKETPAIR_PIECES; i++) {
        pieces[i].iov_base = iov[i].base;
        pieces[i].iov_len = iov[i].size;
    }
    message.msg_iov = pieces;
    message.msg_iovlen = i;
    return message;
}

static inline ptrdiff_t socketpair_send(void *context, const nbd_iovec *iov, unsigned count,
                                        unsigned flags)
{
    const socketpair_io *s = (const socketpair_io *)context;
    struct iovec pieces[SOCKETPAIR_PIECES];
    struct msghdr message = socketpair_message(pieces, iov, count);
    int more = flags & NBD_SEND_MORE ? MSG_MORE : 0;

    return wait_result(sendmsg(s->fd, &message, MSG_NOSIGNAL | more), NBD_IO_WRITE);
}

static inline ptrdiff_t socketpair_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    const socketpair_io *s = (const socketpair_io *)context;
    struct iovec pieces[SOCKETPAIR_PIECES];
    struct msghdr message = socketpair_message(pieces, iov, count);

    return wait_result(recvmsg(s->fd, &message, 0), NBD_IO_READ);
}

static inline int socketpair_wait(void *context, unsigned wants, int *timeout_ms)
{
    const socketpair_io *s = (const socketpair_io *)context;

    return wait_for(s->fd, s->fd, wants, timeout_ms);
}

static inline int socketpair_finish(void *context)
{
    const socketpair_io *s = (const socketpair_io *)context;

    shutdown(s->fd, SHUT_WR); // it fails if the server was faster, which is as good
    return 0;                 // never what it returned: -1 would mean NBD_IO_READ
}

static inline void socketpair_init(socketpair_io *s, int fd)
{
    // A call that moves less than asked has emptied or filled the socket.
    const nbd_transport transport = {
        .flags = NBD_SHORT_IS_DRY,
        .context = s,
        .send = socketpair_send,
        .recv = socketpair_recv,
        .wait = socketpair_wait,
        .finish = socketpair_finish,
    };

    s->fd = fd;
    s->transport = transport;
}

#endif
