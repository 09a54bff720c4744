// io_uring moves the bytes: one sendmsg and one recvmsg in flight, no transport.  Writes the
// first MiB of an export to stdout.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "nbd.h"
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>

#define PART 65536u
#define PARTS 16u
#define PIECES 16u

typedef struct direction {
    struct iovec pieces[PIECES];
    struct msghdr message;
    int busy;
} direction;

typedef struct reader {
    nbd_client client;
    nbd_slot slots[PARTS];
    struct io_uring ring;
    direction out, in;
    int socket, left, over, error;
    unsigned char buffer[NBD_BUFFER_GOOD];
    unsigned char data[PARTS][PART];
} reader;

static struct io_uring_sqe *prepare(reader *r, direction *way, const nbd_iovec *iov, unsigned count)
{
    struct io_uring_sqe *entry = io_uring_get_sqe(&r->ring); // two entries, two directions

    for (unsigned i = 0; i < count; i++) {
        way->pieces[i].iov_base = iov[i].base;
        way->pieces[i].iov_len = iov[i].size;
    }
    way->message.msg_iov = way->pieces;
    way->message.msg_iovlen = count;
    way->busy = 1;
    return entry;
}

static void offer(reader *r)
{
    nbd_iovec iov[PIECES];
    struct io_uring_sqe *entry;
    unsigned count, more;

    if (!r->out.busy && (count = nbd_outgoing(&r->client, iov, PIECES, &more)) > 0) {
        unsigned flags = MSG_NOSIGNAL | (more & NBD_SEND_MORE ? (unsigned)MSG_MORE : 0u);
        entry = prepare(r, &r->out, iov, count);
        io_uring_prep_sendmsg(entry, r->socket, &r->out.message, flags);
        io_uring_sqe_set_data(entry, &r->out);
    }
    if (!r->in.busy && (count = nbd_incoming(&r->client, iov, PIECES)) > 0) {
        entry = prepare(r, &r->in, iov, count);
        io_uring_prep_recvmsg(entry, r->socket, &r->in.message, 0);
        io_uring_sqe_set_data(entry, &r->in);
    }
}

// Waits for one completion and acknowledges it.
static int acknowledge(reader *r)
{
    struct io_uring_cqe *done;
    int result = io_uring_submit_and_wait(&r->ring, 1);
    direction *way;
    ptrdiff_t moved;

    if (result == -EINTR) return 0;
    if (result < 0 || io_uring_peek_cqe(&r->ring, &done)) return NBD_ERR_TRANSPORT;
    way = (direction *)io_uring_cqe_get_data(done);
    moved = done->res >= 0 ? done->res : done->res == -EINTR ? 0 : NBD_IO_ERROR;
    if (done->res == -EINTR && way == &r->in) moved = NBD_IO_READ;
    way->busy = 0;
    io_uring_cqe_seen(&r->ring, done);
    return way == &r->out ? nbd_sent(&r->client, moved) : nbd_received(&r->client, moved);
}

static void issue_all(reader *r)
{
    for (unsigned i = 0; i < PARTS && !r->error; i++) {
        nbd_op op = NBD_ZERO;
        op.command = NBD_READ;
        op.offset = (uint64_t)i * PART;
        op.size = PART;
        op.buffer = r->data[i];
        r->error = nbd_issue(&r->client, &op, NULL);
        r->left += !r->error;
    }
}

static void handle(reader *r, const nbd_event *event)
{
    if (event->type == NBD_EVENT_READY) issue_all(r);
    if (event->type == NBD_EVENT_DONE) r->left--;
    if (event->type == NBD_EVENT_CLOSED) r->over = 1;
    if (!r->error) r->error = event->error;
    if (r->left || r->over) return;
    if (event->type == NBD_EVENT_READY || event->type == NBD_EVENT_DONE)
        (void)nbd_disconnect(&r->client); // an error means CLOSED is on its way
}

static int run(reader *r)
{
    nbd_event event;
    int error = 0;

    while (!error) {
        while (nbd_next(&r->client, &event))
            handle(r, &event);
        if (r->over) return r->error;
        // A connection that failed wants nothing; CLOSED needs the offers back.
        if (!nbd_wants(&r->client) && shutdown(r->socket, SHUT_RDWR) && errno != ENOTCONN)
            return NBD_ERR_TRANSPORT;
        offer(r);
        if (r->out.busy || r->in.busy) error = acknowledge(r);
    }
    return error;
}

// A blocking socket: io_uring would hand back EAGAIN from a non-blocking one.
static int connect_unix(const char *path)
{
    struct sockaddr_un name = NBD_ZERO;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    name.sun_family = AF_UNIX;
    if (snprintf(name.sun_path, sizeof name.sun_path, "%s", path) >= (int)sizeof name.sun_path ||
        connect(fd, (const struct sockaddr *)&name, sizeof name)) {
        nbd_socket_close(fd);
        return NBD_SOCKET_NONE;
    }
    return fd;
}

int main(int argc, char **argv)
{
    static reader r;
    nbd_config config = NBD_ZERO;
    int error;

    config.slots = r.slots;
    config.slot_count = PARTS;
    config.buffer = r.buffer;
    config.buffer_size = sizeof r.buffer;
    error = nbd_init(&r.client, &config);
    if (!error) error = nbd_connect(&r.client, NULL);
    r.socket = connect_unix(argc > 1 ? argv[1] : "/tmp/nbd.sock");
    if (!error && r.socket == NBD_SOCKET_NONE) error = NBD_ERR_CONNECT;
    if (!error && io_uring_queue_init(2, &r.ring, 0)) error = NBD_ERR_TRANSPORT;
    if (!error) {
        error = run(&r);
        io_uring_queue_exit(&r.ring);
    }
    nbd_socket_close(r.socket);
    if (!error && (fwrite(r.data, sizeof r.data, 1, stdout) != 1 || fflush(stdout)))
        error = NBD_EIO;
    if (error) fprintf(stderr, "uring: %s\n", nbd_strerror(error));
    return error != 0;
}
