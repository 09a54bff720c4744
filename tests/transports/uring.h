// uring.h - io_uring(7) under a client, with the calls of "Own I/O" in place of a transport: the
// kernel is handed the memory that the client offers, and says later how much moved.
//
//     nbd_connect(&client, NULL);
//     while (nbd_wants(&client)) {
//         uring_submit(&u, &client);
//         uring_complete(&u, &client);   // waits for one at least
//         while (nbd_next(&client, &event)) ...
//     }
#ifndef TRANSPORTS_URING_H
#define TRANSPORTS_URING_H

#include <liburing.h>
#include <string.h>
#include <sys/socket.h>

enum { URING_PIECES = 8, URING_IN = 0, URING_OUT = 1 };

// One direction: what is on offer stays where it is until its completion.
typedef struct uring_way {
    int busy;
    struct msghdr message;
    struct iovec pieces[URING_PIECES];
} uring_way;

typedef struct uring {
    struct io_uring ring;
    int fd;     // a socket that blocks: the kernel waits, not this program
    int failed; // a call has
    uring_way ways[2];
} uring;

static inline int uring_init(uring *u, int fd)
{
    memset(u, 0, sizeof *u);
    u->fd = fd;
    return io_uring_queue_init(4, &u->ring, 0);
}

static inline void uring_offer(uring *u, nbd_client *client, int which)
{
    uring_way *way = &u->ways[which];
    nbd_iovec iov[URING_PIECES];
    struct io_uring_sqe *entry;
    unsigned i, flags = 0, count;

    count = which == URING_OUT ? nbd_outgoing(client, iov, URING_PIECES, &flags)
                               : nbd_incoming(client, iov, URING_PIECES);
    if (count == 0) return;
    for (i = 0; i < count; i++) {
        way->pieces[i].iov_base = iov[i].base;
        way->pieces[i].iov_len = iov[i].size;
    }
    way->message.msg_iov = way->pieces;
    way->message.msg_iovlen = count;
    entry = io_uring_get_sqe(&u->ring); // never NULL: there are two at most
    if (which == URING_OUT) {
        unsigned more = flags & NBD_SEND_MORE ? MSG_MORE : 0;

        io_uring_prep_sendmsg(entry, u->fd, &way->message, MSG_NOSIGNAL | more);
    } else {
        io_uring_prep_recvmsg(entry, u->fd, &way->message, 0);
    }
    io_uring_sqe_set_data(entry, way);
    way->busy = 1;
}

// Hands over what can go out and where input may go.
static inline int uring_submit(uring *u, nbd_client *client)
{
    int which;

    for (which = 0; which < 2; which++) {
        if (!u->ways[which].busy) uring_offer(u, client, which);
    }
    // The goodbye is out: there is no transport whose finish could tell the server so.
    if (!u->ways[URING_OUT].busy && nbd_phase(client) == NBD_PHASE_CLOSING &&
        !nbd_count(client)->in_flight) {
        shutdown(u->fd, SHUT_WR);
    }
    // A session that failed says why only when nothing is on offer any more.
    if (!nbd_wants(client)) shutdown(u->fd, SHUT_RDWR);
    return io_uring_submit(&u->ring);
}

// When one direction fails the other may hang for ever: it is ended, and that is no end of the
// stream.
static inline int uring_acknowledge(uring *u, nbd_client *client, const uring_way *way, int moved)
{
    ptrdiff_t result = moved;

    if (moved < 0) {
        u->failed = 1;
        shutdown(u->fd, SHUT_RDWR);
    }
    if (moved <= 0) result = u->failed ? NBD_IO_ERROR : NBD_IO_EOF;
    return way == &u->ways[URING_OUT] ? nbd_sent(client, result) : nbd_received(client, result);
}

// Waits for a completion, and takes all that there are.
static inline int uring_complete(uring *u, nbd_client *client)
{
    struct io_uring_cqe *entry;
    int error = io_uring_wait_cqe(&u->ring, &entry);

    while (!error && io_uring_peek_cqe(&u->ring, &entry) == 0) {
        uring_way *way = (uring_way *)io_uring_cqe_get_data(entry);

        way->busy = 0;
        error = uring_acknowledge(u, client, way, entry->res);
        io_uring_cqe_seen(&u->ring, entry);
    }
    return error;
}

#endif
