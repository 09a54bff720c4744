// The socket transport and dialling, over socket pairs, Unix sockets and the loopback.  The
// system calls go through this file, which can make any of them fail, counts what is open
// and keeps the clock.
#define _DEFAULT_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

/// System calls ///

enum call {
    SENDMSG,
    RECV,
    RECVMSG,
    POLL,
    GETSOCKOPT,
    GETPEERNAME,
    CONNECT,
    SOCKET,
    FCNTL,
    SETSOCKOPT,
    CLOCK,
    GETADDRINFO,
    CALLS
};

enum { ADDRESSES = 3, SEEN_PIECES = 128, AN_ERROR = EIO };

// What the calls shall do, and what they saw.
static struct {
    int pass[CALLS];  // calls that work before it fails
    int fail[CALLS];  // how often it fails then
    int error[CALLS]; // with which errno
    int count[CALLS];
    int64_t now_ms;
    int poll_takes_ms; // of the clock
    int resolving_takes_ms;
    int unready;           // polls that find nothing
    int nanoseconds;       // of the clock behind the milliseconds, but for its first call
    int ready;             // revents that poll invents; 0: asks the system
    void (*on_poll)(void); // what the other end does meanwhile
    int socket_error;      // what SO_ERROR says; 0: asks the system
    int resolve_result;    // of getaddrinfo; 0: asks the system
    int list_count;        // addresses that getaddrinfo gives; 0: asks the system
    struct addrinfo list[ADDRESSES];
    struct sockaddr_in list_at[ADDRESSES];
    int lists; // not freed
    int open;  // sockets not closed

    size_t pieces; // of the last vectored call
    size_t sizes[SEEN_PIECES];
    size_t recv_size;
    int flags;
    int timeout_ms;
    int events;
    int family, type, protocol;
    int set_name, set_value; // of the last socket option
    struct addrinfo hints;
    char host[64], port[64];
    struct sockaddr_storage to;
    socklen_t to_size;
} os;

static int fails(enum call call)
{
    os.count[call]++;
    if (os.pass[call] > 0) {
        os.pass[call]--;
        return 0;
    }
    if (os.fail[call] == 0) return 0;
    os.fail[call]--;
    errno = os.error[call];
    return 1;
}

static void fail_call(enum call call, int error, int times)
{
    os.fail[call] = times;
    os.error[call] = error;
}

static void see_message(const struct msghdr *message)
{
    size_t i;

    os.pieces = message->msg_iovlen;
    for (i = 0; i < os.pieces && i < SEEN_PIECES; i++)
        os.sizes[i] = message->msg_iov[i].iov_len;
}

static ssize_t os_sendmsg(int fd, const struct msghdr *message, int flags)
{
    see_message(message);
    os.flags = flags;
    return fails(SENDMSG) ? -1 : sendmsg(fd, message, flags);
}

static ssize_t os_recvmsg(int fd, struct msghdr *message, int flags)
{
    see_message(message);
    return fails(RECVMSG) ? -1 : recvmsg(fd, message, flags);
}

static ssize_t os_recv(int fd, void *to, size_t size, int flags)
{
    os.recv_size = size;
    return fails(RECV) ? -1 : recv(fd, to, size, flags);
}

static int os_poll(struct pollfd *at, nfds_t count, int timeout_ms)
{
    CHECK_EQUAL(count, 1);
    os.timeout_ms = timeout_ms;
    os.events = at->events;
    os.now_ms += os.poll_takes_ms;
    if (os.on_poll) os.on_poll();
    if (fails(POLL)) return -1;
    if (os.unready > 0) {
        os.unready--;
        return 0;
    }
    if (!os.ready) return poll(at, count, 0);
    at->revents = (short)os.ready;
    return 1;
}

static int os_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    if (fails(GETSOCKOPT)) return -1;
    if (name == SO_ERROR && os.socket_error) {
        *(int *)value = os.socket_error;
        return 0;
    }
    return getsockopt(fd, level, name, value, size);
}

static int os_getpeername(int fd, struct sockaddr *to, socklen_t *size)
{
    return fails(GETPEERNAME) ? -1 : getpeername(fd, to, size);
}

static int os_connect(int fd, const struct sockaddr *to, socklen_t size)
{
    CHECK(size <= sizeof os.to);
    memcpy(&os.to, to, size);
    os.to_size = size;
    return fails(CONNECT) ? -1 : connect(fd, to, size);
}

static int os_socket(int family, int type, int protocol)
{
    int made;

    os.family = family;
    os.type = type;
    os.protocol = protocol;
    if (fails(SOCKET)) return -1;
    if (family == AF_VSOCK) family = AF_UNIX; // not every machine has it
    made = socket(family, type, protocol);
    os.open += made >= 0;
    return made;
}

static int os_fcntl(int fd, int command, int value)
{
    return fails(FCNTL) ? -1 : fcntl(fd, command, value);
}

static int os_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    CHECK_EQUAL(size, sizeof os.set_value);
    memcpy(&os.set_value, value, sizeof os.set_value);
    os.set_name = level == SOL_SOCKET ? name : -1;
    return fails(SETSOCKOPT) ? -1 : setsockopt(fd, level, name, value, size);
}

static int os_close(int fd)
{
    os.open--;
    return close(fd);
}

static int os_clock(clockid_t clock, struct timespec *now)
{
    CHECK_EQUAL(clock, CLOCK_MONOTONIC);
    now->tv_sec = (time_t)(os.now_ms / 1000);
    now->tv_nsec = (long)(os.now_ms % 1000) * 1000000;
    if (os.count[CLOCK] > 0) now->tv_nsec += os.nanoseconds;
    return fails(CLOCK) ? -1 : 0;
}

static int os_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                          struct addrinfo **list)
{
    os.hints = *hints;
    os.now_ms += os.resolving_takes_ms;
    snprintf(os.host, sizeof os.host, "%s", host);
    snprintf(os.port, sizeof os.port, "%s", port);
    if (os.resolve_result) {
        errno = AN_ERROR;
        return os.resolve_result;
    }
    os.lists++;
    if (!os.list_count) return getaddrinfo(host, port, hints, list);
    *list = os.list;
    return 0;
}

static void os_freeaddrinfo(struct addrinfo *list)
{
    os.lists--;
    if (list != os.list) freeaddrinfo(list);
}

#define sendmsg(fd, message, flags) os_sendmsg(fd, message, flags)
#define recvmsg(fd, message, flags) os_recvmsg(fd, message, flags)
#define recv os_recv // the member of nbd_transport too
#define poll(at, count, timeout) os_poll(at, count, timeout)
#define getsockopt(fd, level, name, value, size) os_getsockopt(fd, level, name, value, size)
#define getpeername(fd, to, size) os_getpeername(fd, to, size)
#define connect(fd, to, size) os_connect(fd, to, size)
#define socket(family, type, protocol) os_socket(family, type, protocol)
#define fcntl(...) os_fcntl_first(__VA_ARGS__, 0, 0)
#define os_fcntl_first(fd, command, value, ...) os_fcntl(fd, command, value)
#define setsockopt(fd, level, name, value, size) os_setsockopt(fd, level, name, value, size)
#define close(fd) os_close(fd)
#define clock_gettime(clock, now) os_clock(clock, now)
#define getaddrinfo(host, port, hints, list) os_getaddrinfo(host, port, hints, list)
#define freeaddrinfo(list) os_freeaddrinfo(list)

#define NBD_IMPLEMENTATION
#include "nbd.h"

/// Pairs ///

enum { BLOCK = 1 << 16 };

static nbd_socket_io io;
static int pair[2]; // the client's end, the other one
static char bytes[BLOCK];

static void begin(void)
{
    memset(&os, 0, sizeof os);
}

static void open_pair(void)
{
    begin();
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK_EQUAL(nbd_socket_init(&io, pair[0]), NBD_OK);
    CHECK_EQUAL(io.os_error, 0);
    memset(os.count, 0, sizeof os.count);
}

static void close_pair(void)
{
    nbd_socket_close(pair[0]);
    nbd_socket_close(pair[1]);
}

static ptrdiff_t send_text(const char *text)
{
    nbd_iovec piece;

    piece.base = nbdi_unconst(text);
    piece.size = strlen(text);
    return io.transport.send(io.transport.context, &piece, 1, 0);
}

// Receives into one piece, or into two of equal size.
static ptrdiff_t receive(size_t size, unsigned count)
{
    nbd_iovec pieces[2];

    pieces[0].base = bytes;
    pieces[0].size = size / count;
    pieces[1].base = bytes + size / count;
    pieces[1].size = size / count;
    return io.transport.recv(io.transport.context, pieces, count);
}

static void other_end_sends(const char *text)
{
    CHECK_EQUAL(write(pair[1], text, strlen(text)), (ssize_t)strlen(text));
}

static void other_end_has(const char *text)
{
    char got[64];
    ssize_t size = read(pair[1], got, sizeof got);

    CHECK_EQUAL(size, (ssize_t)strlen(text));
    CHECK_BYTES(got, text, strlen(text));
}

static void pieces_leave_in_one_call(void)
{
    char one[] = "one", two[] = "two!";
    nbd_iovec pieces[2] = {{one, 3}, {two, 4}};

    open_pair();
    CHECK_EQUAL(io.transport.send(io.transport.context, pieces, 2, 0), 7);
    CHECK_EQUAL(os.count[SENDMSG], 1);
    CHECK_EQUAL(os.pieces, 2);
    other_end_has("onetwo!");
    close_pair();
}

static void one_piece_is_received_by_recv_and_more_by_recvmsg(void)
{
    open_pair();
    other_end_sends("abcdef");
    CHECK_EQUAL(receive(4, 1), 4);
    CHECK_EQUAL(os.count[RECV], 1);
    CHECK_BYTES(bytes, "abcd", 4);
    CHECK_EQUAL(receive(8, 2), 2);
    CHECK_EQUAL(os.count[RECVMSG], 1);
    CHECK_EQUAL(os.pieces, 2);
    CHECK_BYTES(bytes, "ef", 2);
    other_end_sends("g");
    CHECK_EQUAL(receive(8, 1), 1);
    close_pair();
}

static void nothing_to_receive_waits_for_reading(void)
{
    open_pair();
    CHECK_EQUAL(receive(4, 1), NBD_IO_READ);
    CHECK_EQUAL(receive(4, 2), NBD_IO_READ);
    CHECK_EQUAL(io.os_error, 0);
    close_pair();
}

static void full_socket_waits_for_writing(void)
{
    nbd_iovec piece = {bytes, BLOCK};
    int turns = 0;
    ptrdiff_t moved;

    open_pair();
    while ((moved = io.transport.send(io.transport.context, &piece, 1, 0)) > 0)
        CHECK(turns++ < 1000);
    CHECK_EQUAL(moved, NBD_IO_WRITE);
    CHECK_EQUAL(io.os_error, 0);
    close_pair();
}

static void closed_other_end_is_the_end_of_the_stream(void)
{
    open_pair();
    nbd_socket_close(pair[1]);
    CHECK_EQUAL(receive(4, 1), NBD_IO_EOF);
    CHECK_EQUAL(receive(4, 2), NBD_IO_EOF);
    nbd_socket_close(pair[0]);
}

static void sending_to_a_closed_other_end_fails_without_a_signal(void)
{
    open_pair();
    nbd_socket_close(pair[1]);
    CHECK_EQUAL(send_text("x"), NBD_IO_ERROR);
    CHECK_EQUAL(io.os_error, EPIPE);
    nbd_socket_close(pair[0]);
}

static void interrupted_calls_are_made_again(void)
{
    open_pair();
    fail_call(SENDMSG, EINTR, 2);
    CHECK_EQUAL(send_text("abc"), 3);
    CHECK_EQUAL(os.count[SENDMSG], 3);
    other_end_has("abc");
    other_end_sends("defg");
    fail_call(RECV, EINTR, 2);
    CHECK_EQUAL(receive(2, 1), 2);
    CHECK_EQUAL(os.count[RECV], 3);
    fail_call(RECVMSG, EINTR, 1);
    CHECK_EQUAL(receive(2, 2), 2);
    CHECK_EQUAL(os.count[RECVMSG], 2);
    close_pair();
}

static void failed_call_leaves_its_reason(void)
{
    open_pair();
    fail_call(SENDMSG, ECONNRESET, 1);
    CHECK_EQUAL(send_text("x"), NBD_IO_ERROR);
    CHECK_EQUAL(io.os_error, ECONNRESET);
    fail_call(RECV, ETIMEDOUT, 1);
    CHECK_EQUAL(receive(2, 1), NBD_IO_ERROR);
    CHECK_EQUAL(io.os_error, ETIMEDOUT);
    CHECK_EQUAL(os.count[POLL], 0);
    close_pair();
}

static void finish_ends_what_is_sent_and_no_more(void)
{
    char byte;

    open_pair();
    CHECK_EQUAL(io.transport.finish(io.transport.context), 0);
    CHECK_EQUAL(read(pair[1], &byte, 1), 0);
    other_end_sends("late");
    CHECK_EQUAL(receive(4, 1), 4);
    close_pair();
}

/// What one call may carry ///

static const size_t GIB = (size_t)1 << 30;

// Sends, or receives, pieces that are not there: the call does not happen.
static void carries(enum call call, const nbd_iovec *pieces, unsigned count)
{
    nbd_transport *t = &io.transport;
    int sends = call == SENDMSG;

    os.pieces = os.recv_size = 0;
    fail_call(call, EAGAIN, 1);
    CHECK_EQUAL(sends ? t->send(t->context, pieces, count, 0) : t->recv(t->context, pieces, count),
                sends ? NBD_IO_WRITE : NBD_IO_READ);
}

static void one_call_carries_a_gib_at_most(void)
{
    nbd_iovec exact[2] = {{bytes, GIB - 5}, {bytes, 5}};
    nbd_iovec above[3] = {{bytes, GIB - 5}, {bytes, 6}, {bytes, 1}};
    nbd_iovec last[2] = {{bytes, GIB - 1}, {bytes, 5}};
    nbd_iovec whole[2] = {{bytes, GIB}, {bytes, 1}};
    nbd_iovec huge = {bytes, GIB + 1};
    nbd_iovec below = {bytes, GIB - 1};

    open_pair();
    carries(SENDMSG, exact, 2);
    CHECK_EQUAL(os.pieces, 2);
    CHECK_EQUAL(os.sizes[1], 5);
    carries(SENDMSG, above, 3);
    CHECK_EQUAL(os.pieces, 2);
    CHECK_EQUAL(os.sizes[0], GIB - 5);
    CHECK_EQUAL(os.sizes[1], 5);
    carries(SENDMSG, last, 2);
    CHECK_EQUAL(os.pieces, 2);
    CHECK_EQUAL(os.sizes[1], 1);
    carries(RECVMSG, whole, 2);
    CHECK_EQUAL(os.pieces, 1);
    CHECK_EQUAL(os.sizes[0], GIB);
    carries(SENDMSG, &huge, 1);
    CHECK_EQUAL(os.sizes[0], GIB);
    carries(RECV, &huge, 1);
    CHECK_EQUAL(os.recv_size, GIB);
    carries(RECV, whole, 1);
    CHECK_EQUAL(os.recv_size, GIB);
    carries(RECV, &below, 1);
    CHECK_EQUAL(os.recv_size, GIB - 1);
    close_pair();
}

static void one_call_carries_so_many_pieces_at_most(void)
{
    nbd_iovec pieces[NBD_IOVECS + 1];
    unsigned i;

    for (i = 0; i <= NBD_IOVECS; i++) {
        pieces[i].base = bytes;
        pieces[i].size = i + 1;
    }
    open_pair();
    carries(SENDMSG, pieces, NBD_IOVECS + 1);
    CHECK_EQUAL(os.pieces, NBD_IOVECS);
    CHECK_EQUAL(os.sizes[NBD_IOVECS - 1], NBD_IOVECS);
    carries(RECVMSG, pieces, NBD_IOVECS);
    CHECK_EQUAL(os.pieces, NBD_IOVECS);
    carries(SENDMSG, pieces, NBD_IOVECS - 1);
    CHECK_EQUAL(os.pieces, NBD_IOVECS - 1);
    close_pair();
}

static unsigned hook_flags;

static int own_flags(nbd_socket_io *of, unsigned flags)
{
    CHECK(of == &io);
    hook_flags = flags;
    return MSG_DONTWAIT;
}

static void more_to_come_is_said_unless_the_caller_maps_it(void)
{
    nbd_iovec piece = {bytes, 1};

    open_pair();
    CHECK_EQUAL(io.transport.send(&io, &piece, 1, 0), 1);
    CHECK_EQUAL(os.flags, MSG_NOSIGNAL);
    CHECK_EQUAL(io.transport.send(&io, &piece, 1, NBD_SEND_MORE), 1);
    CHECK_EQUAL(os.flags, MSG_NOSIGNAL | MSG_MORE);
    io.send_flags = own_flags;
    CHECK_EQUAL(io.transport.send(&io, &piece, 1, NBD_SEND_MORE), 1);
    CHECK_EQUAL(hook_flags, NBD_SEND_MORE);
    CHECK_EQUAL(os.flags, MSG_NOSIGNAL | MSG_DONTWAIT);
    close_pair();
}

/// Sockets that are not connected ///

typedef struct unconnected_row {
    int pass; // 1: poll says ready
    int poll_error;
    int getsockopt_error;
    int socket_error;
    int getpeername_error;
    ptrdiff_t result;
    int os_error;
} unconnected_row;

// "Not connected" is told from "connecting" by the socket itself.
static const unconnected_row unconnected_rows[] = {
    {0, EINTR, 0, 0, 0, NBD_IO_WRITE, 0},
    {0, 0, 0, 0, 0, NBD_IO_WRITE, 0}, // never ready
    {1, 0, 0, 0, 0, NBD_IO_WRITE, 0}, // connected by now
    {1, 0, ENOBUFS, 0, 0, NBD_IO_ERROR, ENOBUFS},
    {1, 0, 0, ECONNREFUSED, 0, NBD_IO_ERROR, ECONNREFUSED},
    {1, 0, 0, 0, ENOTCONN, NBD_IO_ERROR, ENOTCONN},
    {0, ENOMEM, ENOBUFS, 0, 0, NBD_IO_ERROR, ENOBUFS},
};

static void check_unconnected(const unconnected_row *row, int os_error)
{
    nbd_iovec piece = {bytes, 1};

    open_pair();
    os.ready = row->pass ? POLLOUT : 0;
    if (!row->pass && !row->poll_error) { // a full socket is not ready
        while (send(pair[0], bytes, BLOCK, MSG_DONTWAIT) > 0)
            continue;
    }
    if (row->poll_error) fail_call(POLL, row->poll_error, 1);
    if (row->getsockopt_error) fail_call(GETSOCKOPT, row->getsockopt_error, 1);
    if (row->getpeername_error) fail_call(GETPEERNAME, row->getpeername_error, 1);
    os.socket_error = row->socket_error;
    fail_call(SENDMSG, os_error, 1);
    CHECK_EQUAL(io.transport.send(&io, &piece, 1, 0), row->result);
    CHECK_EQUAL(io.os_error, row->os_error);
    CHECK_EQUAL(os.timeout_ms, 0);
    close_pair();
}

static void socket_that_connects_blocks_and_any_other_fails(void)
{
    static const int connecting[] = {ENOTCONN, EINPROGRESS, EALREADY};
    size_t i, k;

    for (k = 0; k < sizeof connecting / sizeof connecting[0]; k++) {
        for (i = 0; i < sizeof unconnected_rows / sizeof unconnected_rows[0]; i++) {
            snprintf(check.where, sizeof check.where, "row %d, errno %d", (int)i, connecting[k]);
            check_unconnected(&unconnected_rows[i], connecting[k]);
        }
    }
}

static void receiving_on_a_socket_that_connects_waits_for_writing(void)
{
    open_pair();
    fail_call(RECV, ENOTCONN, 1);
    CHECK_EQUAL(receive(1, 1), NBD_IO_WRITE);
    close_pair();
}

static void socket_that_nobody_connected_fails(void)
{
    begin();
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQUAL(nbd_socket_init(&io, pair[0]), NBD_OK);
    CHECK_EQUAL(send_text("x"), NBD_IO_ERROR);
    CHECK_EQUAL(receive(1, 1), NBD_IO_ERROR);
    CHECK_EQUAL(io.os_error, ENOTCONN);
    nbd_socket_close(pair[0]);
}

/// Waiting ///

static int wait_for(unsigned wants, int *timeout_ms)
{
    return io.transport.wait(io.transport.context, wants, timeout_ms);
}

static void wait_tells_what_is_ready(void)
{
    int timeout_ms = -1;

    open_pair();
    CHECK_EQUAL(wait_for(NBD_WANT_READ | NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    other_end_sends("x");
    CHECK_EQUAL(wait_for(NBD_WANT_READ, &timeout_ms), NBD_WANT_READ);
    CHECK_EQUAL(os.events, POLLIN);
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(os.events, POLLOUT);
    CHECK_EQUAL(wait_for(NBD_WANT_READ | NBD_WANT_WRITE, &timeout_ms),
                NBD_WANT_READ | NBD_WANT_WRITE);
    CHECK_EQUAL(timeout_ms, -1);
    CHECK_EQUAL(os.timeout_ms, -1);
    close_pair();
}

static void wait_tells_both_after_a_failure(void)
{
    static const int failures[] = {POLLERR, POLLHUP, POLLNVAL};
    int i, timeout_ms = 1000;

    open_pair();
    for (i = 0; i < 3; i++) {
        os.ready = failures[i];
        CHECK_EQUAL(wait_for(NBD_WANT_READ, &timeout_ms), NBD_WANT_READ | NBD_WANT_WRITE);
    }
    close_pair();
}

static void wait_takes_the_time_that_passed_off_the_limit(void)
{
    int timeout_ms = 1000;

    open_pair();
    os.poll_takes_ms = 300;
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(os.timeout_ms, 1000);
    CHECK_EQUAL(timeout_ms, 700);
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(timeout_ms, 400);
    os.poll_takes_ms = 400;
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(timeout_ms, 0);
    close_pair();
}

static void waited(int poll_takes_ms, int nanoseconds, int limit_ms, int left_ms)
{
    int timeout_ms = limit_ms;

    open_pair();
    os.now_ms = 4700;
    os.poll_takes_ms = poll_takes_ms;
    os.nanoseconds = nanoseconds;
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(timeout_ms, left_ms);
    close_pair();
}

static void time_is_told_in_milliseconds(void)
{
    waited(1, 0, 1, 0);
    waited(1, 0, 2, 1);
    waited(1000, 0, 2000, 1000);
    waited(299, 999999, 1000, 701);
    waited(299, 0, 1000, 701);
    waited(300, 999999, 1000, 700);
    waited(5, 0, 0, 0);
    waited(5, 0, -7, -7);
}

static void wait_that_finds_nothing_has_used_up_its_limit(void)
{
    int timeout_ms = 1;

    open_pair();
    CHECK_EQUAL(wait_for(NBD_WANT_READ, &timeout_ms), 0);
    CHECK_EQUAL(timeout_ms, 0);
    CHECK_EQUAL(wait_for(NBD_WANT_READ, &timeout_ms), 0);
    CHECK_EQUAL(timeout_ms, 0);
    close_pair();
}

static void clock_that_is_set_back_or_fails_costs_no_time(void)
{
    int timeout_ms = 1000;

    open_pair();
    os.now_ms = 100000;
    os.poll_takes_ms = -500;
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(timeout_ms, 1000);
    fail_call(CLOCK, EINVAL, 2);
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(timeout_ms, 1000);
    close_pair();
}

static void interrupted_wait_goes_on_with_the_rest_of_its_limit(void)
{
    int timeout_ms = 1000;

    open_pair();
    os.poll_takes_ms = 300;
    fail_call(POLL, EINTR, 2);
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), NBD_WANT_WRITE);
    CHECK_EQUAL(os.count[POLL], 3);
    CHECK_EQUAL(os.timeout_ms, 400);
    CHECK_EQUAL(timeout_ms, 100);
    close_pair();
}

static void interrupted_wait_ends_with_its_limit(void)
{
    int timeout_ms = 1000;

    open_pair();
    os.poll_takes_ms = 600;
    fail_call(POLL, EINTR, 5);
    CHECK_EQUAL(wait_for(NBD_WANT_WRITE, &timeout_ms), 0);
    CHECK_EQUAL(os.count[POLL], 2);
    CHECK_EQUAL(timeout_ms, 0);
    CHECK_EQUAL(io.os_error, 0);
    close_pair();
}

static void failed_wait_leaves_its_reason(void)
{
    int timeout_ms = 1000;

    open_pair();
    fail_call(POLL, ENOMEM, 1);
    CHECK_EQUAL(wait_for(NBD_WANT_READ, &timeout_ms), NBD_IO_ERROR);
    CHECK_EQUAL(io.os_error, ENOMEM);
    close_pair();
}

/// nbd_socket_init and nbd_socket_close ///

static void init_sets_the_socket_non_blocking_and_nothing_else(void)
{
    int before;

    begin();
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK_EQUAL(fcntl(pair[0], F_SETFL, O_APPEND), 0);
    before = fcntl(pair[0], F_GETFL);
    memset(&io, 0xAA, sizeof io);
    CHECK_EQUAL(nbd_socket_init(&io, pair[0]), NBD_OK);
    CHECK_EQUAL(fcntl(pair[0], F_GETFL), before | O_NONBLOCK);
    CHECK_EQUAL(io.socket, pair[0]);
    CHECK_EQUAL(io.transport.flags, NBD_SHORT_IS_DRY);
    CHECK(io.transport.context == &io);
    CHECK(io.send_flags == NULL);
    CHECK_EQUAL(io.os_error, 0);
    close_pair();
}

static void what_is_no_stream_socket_is_refused(void)
{
    int fds[2];

    begin();
    CHECK(pipe(fds) == 0);
    CHECK_EQUAL(nbd_socket_init(&io, fds[0]), NBD_ERR_SOCKET);
    CHECK_EQUAL(io.os_error, ENOTSOCK);
    close(fds[0]);
    close(fds[1]);
    CHECK_EQUAL(nbd_socket_init(&io, NBD_SOCKET_NONE), NBD_ERR_SOCKET);
    CHECK_EQUAL(io.os_error, EBADF);
    fds[0] = socket(AF_UNIX, SOCK_DGRAM, 0);
    CHECK_EQUAL(nbd_socket_init(&io, fds[0]), NBD_ERR_SOCKET);
    CHECK_EQUAL(io.os_error, EPROTOTYPE);
    CHECK_EQUAL(os.count[FCNTL], 0);
    close(fds[0]);
}

static void socket_that_stays_blocking_is_refused(void)
{
    int i;

    for (i = 0; i < 2; i++) { // reading its flags fails, setting them does
        open_pair();
        os.pass[FCNTL] = i;
        fail_call(FCNTL, EACCES, 1);
        CHECK_EQUAL(nbd_socket_init(&io, pair[0]), NBD_ERR_SOCKET);
        CHECK_EQUAL(io.os_error, EACCES);
        CHECK_EQUAL(os.count[FCNTL], i + 1);
        close_pair();
    }
}

static void closing_no_socket_does_nothing(void)
{
    begin();
    nbd_socket_close(NBD_SOCKET_NONE);
    CHECK_EQUAL(os.open, 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    nbd_socket_close(pair[0]);
    CHECK_EQUAL(os.open, -1);
    CHECK(fcntl(pair[0], F_GETFL) < 0);
    nbd_socket_close(pair[1]);
}

/// Dialling ///

static nbd_dial dial;
static int listener;
static char port[16];
static char path[64];

static void *any(struct sockaddr_in *at)
{
    return at;
}

static void listen_on_loopback(void)
{
    struct sockaddr_in at;
    socklen_t size = sizeof at;

    begin();
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, any(&at), size) == 0 && listen(listener, 8) == 0);
    CHECK(getsockname(listener, any(&at), &size) == 0);
    snprintf(port, sizeof port, "%u", ntohs(at.sin_port));
}

static void listen_on_unix(size_t lead)
{
    struct sockaddr_un at;
    void *to = &at;

    begin();
    memset(&at, 0, sizeof at);
    at.sun_family = AF_UNIX;
    snprintf(path, sizeof path, "%s/nbd-test-%ld", lead ? "" : "/tmp", (long)getpid());
    if (!lead) unlink(path);
    memcpy(at.sun_path + lead, path, strlen(path));
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(bind(listener, to,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + lead + strlen(path) +
                           (lead ? 0 : 1))) == 0);
    CHECK(listen(listener, 8) == 0);
}

static nbd_address tcp_address(void)
{
    nbd_address address = NBD_ZERO;

    address.kind = NBD_ADDRESS_TCP;
    address.host = "127.0.0.1";
    address.port = port;
    return address;
}

// Steps until it is over; the system calls of the other end are those of the kernel.
static int dial_on(int result)
{
    int turns = 0;

    while (result == 0) {
        struct pollfd at = {dial.socket, POLLOUT, 0};

        CHECK(turns++ < 100);
        CHECK((poll)(&at, 1, 5000) == 1);
        result = nbd_dial_step(&dial);
    }
    return result;
}

static int dial_all(const nbd_address *address)
{
    int started;

    memset(&dial, 0xAA, sizeof dial);
    started = nbd_dial_start(&dial, address);
    CHECK(started <= 0);
    return dial_on(started);
}

static void nothing_is_left_open(int sockets)
{
    CHECK(!dial.list && !dial.next);
    CHECK_EQUAL(os.open, sockets);
    CHECK_EQUAL(os.lists, 0);
}

static void other_end_hears_the_socket(void)
{
    int accepted = accept(listener, NULL, NULL);
    char got[2];

    CHECK(accepted >= 0);
    CHECK_EQUAL(write(dial.socket, "hi", 2), 2);
    CHECK_EQUAL(read(accepted, got, 2), 2);
    (close)(accepted);
}

static void dialled_tcp_socket_is_the_callers_and_well_set(void)
{
    nbd_address address;
    int on = 0;
    socklen_t size = sizeof on;

    listen_on_loopback();
    address = tcp_address();
    CHECK_EQUAL(dial_all(&address), 1);
    CHECK(fcntl(dial.socket, F_GETFL) & O_NONBLOCK);
    CHECK(fcntl(dial.socket, F_GETFD) & FD_CLOEXEC);
    CHECK(getsockopt(dial.socket, IPPROTO_TCP, TCP_NODELAY, &on, &size) == 0 && on);
    other_end_hears_the_socket();
    CHECK_EQUAL(nbd_dial_step(&dial), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_dial_next(&dial), NBD_ERR_STATE);
    nbd_dial_stop(&dial);
    nothing_is_left_open(2);
    nbd_socket_close(dial.socket);
    nbd_socket_close(listener);
}

static void refused_tcp_leaves_nothing_open(void)
{
    nbd_address address;

    listen_on_loopback();
    nbd_socket_close(listener);
    address = tcp_address();
    CHECK_EQUAL(dial_all(&address), NBD_ERR_CONNECT);
    CHECK_EQUAL(dial.os_error, ECONNREFUSED);
    CHECK_EQUAL(dial.socket, NBD_SOCKET_NONE);
    CHECK_EQUAL(nbd_dial_step(&dial), NBD_ERR_STATE);
    nbd_dial_stop(&dial);
    nothing_is_left_open(0);
}

static void paths_and_abstract_names_are_dialled(void)
{
    nbd_address address = NBD_ZERO;
    unsigned lead;

    for (lead = 0; lead < 2; lead++) {
        listen_on_unix(lead);
        address.kind = lead ? NBD_ADDRESS_ABSTRACT : NBD_ADDRESS_UNIX;
        address.path = path;
        CHECK_EQUAL(dial_all(&address), 1);
        CHECK_EQUAL(os.type, SOCK_STREAM | SOCK_CLOEXEC);
        CHECK_EQUAL(os.protocol, 0);
        CHECK_EQUAL(os.count[SETSOCKOPT], 1);
        CHECK_EQUAL(os.set_name, SO_SNDBUF);
        CHECK_EQUAL(os.set_value, NBD_SEND_BUFFER);
        other_end_hears_the_socket();
        nothing_is_left_open(2);
        nbd_socket_close(dial.socket);
        nbd_socket_close(listener);
        if (!lead) unlink(path);
    }
}

static void small_send_buffer_is_no_reason_to_fail(void)
{
    nbd_address address = NBD_ZERO;

    listen_on_unix(1);
    address.kind = NBD_ADDRESS_ABSTRACT;
    address.path = path;
    fail_call(SETSOCKOPT, ENOBUFS, 1);
    CHECK_EQUAL(dial_all(&address), 1);
    CHECK_EQUAL(os.fail[SETSOCKOPT], 0);
    nbd_socket_close(dial.socket);
    nbd_socket_close(listener);
}

static void unix_name(uint32_t kind, size_t size, int error)
{
    static char name[200];
    nbd_address address = NBD_ZERO;

    begin();
    memset(name, 'n', sizeof name);
    name[size] = '\0';
    address.kind = kind;
    address.path = name;
    fail_call(CONNECT, ENOENT, 1);
    CHECK_EQUAL(nbd_dial_start(&dial, &address), error);
    CHECK_EQUAL(os.count[CONNECT], error == NBD_ERR_CONNECT);
    nothing_is_left_open(0);
    if (error == NBD_ERR_ARG) return;
    CHECK_EQUAL(os.to_size, offsetof(struct sockaddr_un, sun_path) + size + 1);
    CHECK_EQUAL(dial.os_error, ENOENT);
}

static void names_of_unix_sockets_are_as_long_as_the_system_allows(void)
{
    nbd_address address = NBD_ZERO;

    unix_name(NBD_ADDRESS_UNIX, 0, NBD_ERR_ARG);
    unix_name(NBD_ADDRESS_UNIX, 1, NBD_ERR_CONNECT);
    unix_name(NBD_ADDRESS_UNIX, 107, NBD_ERR_CONNECT);
    unix_name(NBD_ADDRESS_UNIX, 108, NBD_ERR_ARG);
    unix_name(NBD_ADDRESS_ABSTRACT, 0, NBD_ERR_ARG);
    unix_name(NBD_ADDRESS_ABSTRACT, 1, NBD_ERR_CONNECT);
    unix_name(NBD_ADDRESS_ABSTRACT, 107, NBD_ERR_CONNECT);
    unix_name(NBD_ADDRESS_ABSTRACT, 108, NBD_ERR_ARG);
    address.kind = NBD_ADDRESS_UNIX;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_ARG);
}

static void vsock(uint32_t vport, uint32_t wanted)
{
    nbd_address address = NBD_ZERO;
    unsigned char zero[6] = {0}; // behind the family, and behind the numbers
    uint32_t numbers[2];         // port and context identifier, behind family and two bytes

    begin();
    address.kind = NBD_ADDRESS_VSOCK;
    address.cid = 77;
    address.vport = vport;
    fail_call(CONNECT, EINPROGRESS, 1);
    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    CHECK_EQUAL(os.family, AF_VSOCK);
    CHECK_EQUAL(os.protocol, 0);
    CHECK_EQUAL(os.to.ss_family, AF_VSOCK);
    CHECK_EQUAL(os.to_size, 16);
    memcpy(numbers, (const char *)&os.to + 4, sizeof numbers);
    CHECK_BYTES((const char *)&os.to + 2, zero, 2);
    CHECK_BYTES((const char *)&os.to + 12, zero, 4);
    CHECK_EQUAL(numbers[0], wanted);
    CHECK_EQUAL(numbers[1], 77);
    nbd_dial_stop(&dial);
    nothing_is_left_open(0);
}

static void vsock_is_dialled_by_number(void)
{
    vsock(0, 10809);
    vsock(1, 1);
    vsock(UINT32_MAX, UINT32_MAX);
}

static void address_that_is_none_is_refused(void)
{
    nbd_address address;

    begin();
    address = tcp_address();
    address.kind = NBD_ADDRESS_VSOCK + 1;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_ARG);
    CHECK_EQUAL(dial.socket, NBD_SOCKET_NONE);
    address.kind = UINT32_MAX;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_ARG);
    address = tcp_address();
    address.host = NULL;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_ARG);
    address = tcp_address();
    address.port = "";
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_ARG);
    address = tcp_address();
    address.family = 5;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_ARG);
    CHECK_EQUAL(nbd_dial_step(&dial), NBD_ERR_STATE);
    CHECK_EQUAL(os.count[SOCKET], 0);
    nothing_is_left_open(0);
}

static void resolver_is_asked_for(uint32_t family, int wanted, const char *at, const char *told)
{
    nbd_address address = NBD_ZERO;

    begin();
    address.host = "server";
    address.port = at;
    address.family = family;
    os.resolve_result = EAI_NONAME;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_RESOLVE);
    CHECK_EQUAL(dial.os_error, EAI_NONAME);
    CHECK_EQUAL(os.hints.ai_family, wanted);
    CHECK_EQUAL(os.hints.ai_socktype, SOCK_STREAM);
    CHECK_EQUAL(os.hints.ai_flags, 0);
    CHECK(strcmp(os.host, "server") == 0);
    CHECK(strcmp(os.port, told) == 0);
    nothing_is_left_open(0);
}

static void resolver_is_asked_for_what_the_address_says(void)
{
    resolver_is_asked_for(0, AF_UNSPEC, NULL, "10809");
    resolver_is_asked_for(4, AF_INET, "nbd", "nbd");
    resolver_is_asked_for(6, AF_INET6, "1", "1");
}

static void failed_resolver_leaves_the_systems_reason_if_it_is_one(void)
{
    nbd_address address;

    begin();
    address = tcp_address();
    os.resolve_result = EAI_SYSTEM;
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_RESOLVE);
    CHECK_EQUAL(dial.os_error, AN_ERROR);
}

/// Several addresses ///

// The resolver gives the loopback `count` times, each in the family of the listener.
static nbd_address several(int count)
{
    static nbd_address address;
    int i;

    listen_on_loopback();
    address = tcp_address();
    os.list_count = count;
    for (i = 0; i < count; i++) {
        os.list_at[i].sin_family = AF_INET;
        os.list_at[i].sin_port = htons((uint16_t)atoi(port));
        os.list_at[i].sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        os.list[i].ai_family = AF_INET;
        os.list[i].ai_protocol = i == 0 ? 0 : IPPROTO_TCP;
        os.list[i].ai_addr = any(&os.list_at[i]);
        os.list[i].ai_addrlen = sizeof os.list_at[i];
        os.list[i].ai_next = i + 1 < count ? &os.list[i + 1] : NULL;
    }
    memset(os.count, 0, sizeof os.count);
    return address;
}

static void end_several(void)
{
    nbd_socket_close(listener);
    nothing_is_left_open(0);
}

// A call fails for the first address: the second serves.
static void first_fails(enum call call, int error)
{
    nbd_address address = several(2);

    fail_call(call, error, 1);
    CHECK_EQUAL(dial_all(&address), 1);
    CHECK_EQUAL(os.count[SOCKET], 2);
    CHECK_EQUAL(os.protocol, IPPROTO_TCP);
    CHECK_EQUAL(dial.os_error, error);
    nbd_socket_close(dial.socket);
    end_several();
}

static void next_address_serves_if_one_cannot_be_tried(void)
{
    first_fails(SOCKET, EAFNOSUPPORT);
    first_fails(SETSOCKOPT, ENOBUFS);
    first_fails(FCNTL, EACCES);
    first_fails(CONNECT, ENETUNREACH);
    first_fails(CONNECT, EAGAIN);
    first_fails(GETSOCKOPT, ENOBUFS);
    first_fails(GETPEERNAME, ENOTCONN);
}

static void interrupted_connect_goes_on(void)
{
    nbd_address address = several(2);

    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    nbd_dial_stop(&dial);
    fail_call(CONNECT, EINTR, 1);
    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    CHECK_EQUAL(os.count[SOCKET], 2);
    CHECK_EQUAL(dial.os_error, 0);
    nbd_dial_stop(&dial);
    end_several();
}

static void attempt_that_is_not_ready_goes_on(void)
{
    nbd_address address = several(1);

    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    fail_call(POLL, EINTR, 1);
    CHECK_EQUAL(nbd_dial_step(&dial), 0);
    os.unready = 1;
    CHECK_EQUAL(nbd_dial_step(&dial), 0);
    CHECK_EQUAL(dial_on(0), 1);
    nbd_socket_close(dial.socket);
    end_several();
}

static void no_address_left_is_an_error_with_the_last_reason(void)
{
    nbd_address address = several(3);

    fail_call(SOCKET, EMFILE, 2);
    os.socket_error = EHOSTUNREACH;
    CHECK_EQUAL(dial_all(&address), NBD_ERR_CONNECT);
    CHECK_EQUAL(dial.os_error, EHOSTUNREACH);
    CHECK_EQUAL(dial.socket, NBD_SOCKET_NONE);
    CHECK_EQUAL(os.count[SOCKET], 3);
    end_several();
    address = several(2);
    fail_call(SOCKET, EMFILE, 2);
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_CONNECT);
    CHECK_EQUAL(dial.os_error, EMFILE);
    end_several();
}

static void attempt_that_hangs_is_given_up_for_the_next(void)
{
    nbd_address address = several(2);

    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    CHECK_EQUAL(nbd_dial_next(&dial), 0);
    CHECK_EQUAL(dial.os_error, ETIMEDOUT);
    CHECK_EQUAL(os.count[SOCKET], 2);
    CHECK_EQUAL(os.open, 2);
    CHECK_EQUAL(nbd_dial_next(&dial), NBD_ERR_CONNECT);
    CHECK_EQUAL(dial.os_error, ETIMEDOUT);
    CHECK_EQUAL(nbd_dial_next(&dial), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_dial_step(&dial), NBD_ERR_STATE);
    end_several();
}

static void stopped_dialling_closes_what_it_opened(void)
{
    nbd_address address = several(2);
    nbd_dial zeroed = NBD_ZERO;

    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    nbd_dial_stop(&dial);
    CHECK_EQUAL(dial.socket, NBD_SOCKET_NONE);
    nbd_dial_stop(&dial);
    end_several();
    nbd_dial_stop(&zeroed);
    CHECK_EQUAL(zeroed.socket, 0);
    nothing_is_left_open(0);
}

/// Blocking calls that dial ///

static nbd_client client;
static nbd_sync sync_;
static int accepted;

// An oldstyle server: all that it says at once.
static void serve(void)
{
    static const unsigned char greeting[152] = "NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53"
                                               "\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x01";

    if (accepted >= 0) return;
    accepted = accept(listener, NULL, NULL);
    CHECK_EQUAL(write(accepted, greeting, sizeof greeting), sizeof greeting);
    CHECK_EQUAL(shutdown(accepted, SHUT_WR), 0);
}

static void prepare_sync(void)
{
    static nbd_slot slots[1];
    static unsigned char buffer[NBD_BUFFER_MIN];
    nbd_config config = NBD_ZERO;

    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    memset(&sync_, 0, sizeof sync_);
    sync_.client = &client;
    sync_.timeout_ms = 1000;
    accepted = NBD_SOCKET_NONE;
}

static void end_sync(void)
{
    if (accepted >= 0) (close)(accepted);
    nbd_socket_close(listener);
    nothing_is_left_open(0);
}

static void open_dials_shakes_hands_and_close_closes(void)
{
    nbd_address address;

    listen_on_loopback();
    address = tcp_address();
    prepare_sync();
    os.on_poll = serve;
    CHECK_EQUAL(nbd_sync_open(&sync_, &address), NBD_OK);
    CHECK_EQUAL(nbd_negotiated(&client)->size, 4096);
    CHECK_EQUAL(nbd_sync_open(&sync_, &address), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_sync_connect(&sync_, &sync_.io.transport), NBD_ERR_STATE);
    nothing_is_left_open(2);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_OK);
    CHECK_EQUAL(sync_.io.socket, NBD_SOCKET_NONE);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_OK);
    end_sync();
}

static void dial_leaves_the_handshake_to_the_caller(void)
{
    nbd_address address;

    listen_on_loopback();
    address = tcp_address();
    prepare_sync();
    sync_.client = NULL;
    CHECK_EQUAL(nbd_sync_open(&sync_, &address), NBD_ERR_STATE);
    sync_.os_error = ECONNREFUSED; // of an attempt before
    strcpy(sync_.message, "of another server");
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_OK);
    CHECK_EQUAL(sync_.io.os_error, 0);
    CHECK_EQUAL(sync_.os_error, 0);
    CHECK_EQUAL(sync_.message[0], 0);
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_ERR_STATE);
    sync_.client = &client;
    CHECK_EQUAL(nbd_sync_open(&sync_, &address), NBD_ERR_STATE);
    os.on_poll = serve;
    CHECK_EQUAL(nbd_sync_connect(&sync_, &sync_.io.transport), NBD_OK);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_OK);
    end_sync();
}

static void dialled_socket_is_closed_without_a_session_too(void)
{
    nbd_address address;

    listen_on_loopback();
    address = tcp_address();
    prepare_sync();
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_OK);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_OK);
    end_sync();
}

typedef struct open_row {
    enum call call; // that fails
    int error;
    int pass; // calls that work before it fails
    int times;
    int timeout_ms;
    int poll_takes_ms;
    int ready; // as in os
    int unready;
    int result;
    int os_error;
} open_row;

static const open_row open_rows[] = {
    {SOCKET, EMFILE, 0, 1, 1000, 0, 0, 0, NBD_ERR_CONNECT, EMFILE},
    {GETSOCKOPT, ENOBUFS, 0, 1, 1000, 0, 0, 0, NBD_ERR_CONNECT, ENOBUFS}, // is it connected?
    {GETSOCKOPT, ENOBUFS, 1, 1, 1000, 0, 0, 0, NBD_ERR_SOCKET, ENOBUFS},  // is it a stream?
    {POLL, ENOMEM, 0, 1, 1000, 0, 0, 0, NBD_ERR_TRANSPORT, ENOMEM},
    {POLL, EINTR, 0, 3, 1000, 400, 0, 0, NBD_ERR_TIMEOUT, 0},
    {CLOCK, 0, 0, 0, 1000, 1000, POLLOUT, 0, NBD_OK, 0},    // what is there by then takes no time
    {CLOCK, 0, 0, 0, 1000, 1000, 0, 1, NBD_ERR_TIMEOUT, 0}, // ready a moment later
    {CLOCK, 0, 0, 0, 1000, 1, 0, 0, NBD_OK, 0},
    {CLOCK, 0, 0, 0, 0, 5000, 0, 0, NBD_OK, 0}, // no limit
    {CLOCK, 0, 0, 0, 0, 5000, 0, 2, NBD_OK, 0},
};

static void failed_open_closes_its_socket(void)
{
    size_t i;

    for (i = 0; i < sizeof open_rows / sizeof open_rows[0]; i++) {
        const open_row *row = &open_rows[i];
        nbd_address address;

        snprintf(check.where, sizeof check.where, "row %d", (int)i);
        listen_on_loopback();
        address = tcp_address();
        prepare_sync();
        os.on_poll = serve;
        fail_call(row->call, row->error, row->times);
        os.pass[row->call] = row->pass;
        sync_.timeout_ms = row->timeout_ms;
        os.poll_takes_ms = row->poll_takes_ms;
        os.ready = row->ready;
        os.unready = row->unready;
        CHECK_EQUAL(nbd_sync_open(&sync_, &address), row->result);
        CHECK_EQUAL(sync_.os_error, row->os_error);
        if (row->result) CHECK_EQUAL(sync_.io.socket, NBD_SOCKET_NONE);
        sync_.timeout_ms = 10000;
        os.poll_takes_ms = 1;
        os.ready = 0;
        CHECK_EQUAL(nbd_sync_close(&sync_), NBD_OK);
        end_sync();
    }
}

static void time_that_resolving_took_counts(void)
{
    nbd_address address;

    listen_on_loopback();
    address = tcp_address();
    prepare_sync();
    os.resolving_takes_ms = 1000;
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_ERR_TIMEOUT);
    CHECK_EQUAL(os.count[POLL], 0);
    CHECK_EQUAL(sync_.io.socket, NBD_SOCKET_NONE);
    os.resolving_takes_ms = 999;
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_OK);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_OK);
    end_sync();
}

static void dial_that_is_ready_too_late_has_timed_out(void)
{
    nbd_address address;

    listen_on_loopback();
    address = tcp_address();
    prepare_sync();
    os.poll_takes_ms = 1000;
    os.unready = 1;
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_ERR_TIMEOUT);
    CHECK_EQUAL(sync_.opened, 0);
    end_sync();
}

static void dial_without_a_limit_waits_until_it_is_ready(void)
{
    nbd_address address;

    listen_on_loopback();
    address = tcp_address();
    prepare_sync();
    sync_.timeout_ms = 0;
    os.unready = 4;
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_OK);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_OK);
    sync_.transport = &sync_.io.transport; // as after nbd_sync_connect
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_ERR_STATE);
    end_sync();
}

static void server_that_is_no_nbd(void)
{
    if (accepted >= 0) return;
    accepted = accept(listener, NULL, NULL);
    CHECK_EQUAL(write(accepted, "HTTP/1.1 400 Bad", 16), 16);
}

static void open_that_does_not_get_to_ready_closes_its_socket(void)
{
    nbd_address address;

    listen_on_loopback();
    address = tcp_address();
    prepare_sync();
    os.on_poll = server_that_is_no_nbd;
    CHECK_EQUAL(nbd_sync_open(&sync_, &address), NBD_ERR_NOT_NBD);
    nothing_is_left_open(1);
    CHECK_EQUAL(sync_.opened, 0);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    end_sync();
}

static void open_gives_the_refusal_of_the_address_back(void)
{
    nbd_address address = NBD_ZERO;

    begin();
    prepare_sync();
    address.kind = NBD_ADDRESS_UNIX;
    CHECK_EQUAL(nbd_sync_open(&sync_, &address), NBD_ERR_ARG);
    CHECK_EQUAL(nbd_sync_dial(&sync_, &address), NBD_ERR_ARG);
    nothing_is_left_open(0);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(pieces_leave_in_one_call);
    CHECK_CASE(one_piece_is_received_by_recv_and_more_by_recvmsg);
    CHECK_CASE(nothing_to_receive_waits_for_reading);
    CHECK_CASE(full_socket_waits_for_writing);
    CHECK_CASE(closed_other_end_is_the_end_of_the_stream);
    CHECK_CASE(sending_to_a_closed_other_end_fails_without_a_signal);
    CHECK_CASE(interrupted_calls_are_made_again);
    CHECK_CASE(failed_call_leaves_its_reason);
    CHECK_CASE(finish_ends_what_is_sent_and_no_more);
    CHECK_CASE(one_call_carries_a_gib_at_most);
    CHECK_CASE(one_call_carries_so_many_pieces_at_most);
    CHECK_CASE(more_to_come_is_said_unless_the_caller_maps_it);
    CHECK_CASE(socket_that_connects_blocks_and_any_other_fails);
    CHECK_CASE(receiving_on_a_socket_that_connects_waits_for_writing);
    CHECK_CASE(socket_that_nobody_connected_fails);
    CHECK_CASE(wait_tells_what_is_ready);
    CHECK_CASE(wait_tells_both_after_a_failure);
    CHECK_CASE(wait_takes_the_time_that_passed_off_the_limit);
    CHECK_CASE(time_is_told_in_milliseconds);
    CHECK_CASE(wait_that_finds_nothing_has_used_up_its_limit);
    CHECK_CASE(clock_that_is_set_back_or_fails_costs_no_time);
    CHECK_CASE(interrupted_wait_goes_on_with_the_rest_of_its_limit);
    CHECK_CASE(interrupted_wait_ends_with_its_limit);
    CHECK_CASE(failed_wait_leaves_its_reason);
    CHECK_CASE(init_sets_the_socket_non_blocking_and_nothing_else);
    CHECK_CASE(what_is_no_stream_socket_is_refused);
    CHECK_CASE(socket_that_stays_blocking_is_refused);
    CHECK_CASE(closing_no_socket_does_nothing);
    CHECK_CASE(dialled_tcp_socket_is_the_callers_and_well_set);
    CHECK_CASE(refused_tcp_leaves_nothing_open);
    CHECK_CASE(paths_and_abstract_names_are_dialled);
    CHECK_CASE(small_send_buffer_is_no_reason_to_fail);
    CHECK_CASE(names_of_unix_sockets_are_as_long_as_the_system_allows);
    CHECK_CASE(vsock_is_dialled_by_number);
    CHECK_CASE(address_that_is_none_is_refused);
    CHECK_CASE(resolver_is_asked_for_what_the_address_says);
    CHECK_CASE(failed_resolver_leaves_the_systems_reason_if_it_is_one);
    CHECK_CASE(next_address_serves_if_one_cannot_be_tried);
    CHECK_CASE(interrupted_connect_goes_on);
    CHECK_CASE(attempt_that_is_not_ready_goes_on);
    CHECK_CASE(no_address_left_is_an_error_with_the_last_reason);
    CHECK_CASE(attempt_that_hangs_is_given_up_for_the_next);
    CHECK_CASE(stopped_dialling_closes_what_it_opened);
    CHECK_CASE(open_dials_shakes_hands_and_close_closes);
    CHECK_CASE(dial_leaves_the_handshake_to_the_caller);
    CHECK_CASE(dialled_socket_is_closed_without_a_session_too);
    CHECK_CASE(failed_open_closes_its_socket);
    CHECK_CASE(time_that_resolving_took_counts);
    CHECK_CASE(dial_that_is_ready_too_late_has_timed_out);
    CHECK_CASE(dial_without_a_limit_waits_until_it_is_ready);
    CHECK_CASE(open_that_does_not_get_to_ready_closes_its_socket);
    CHECK_CASE(open_gives_the_refusal_of_the_address_back);
    return check_end();
}
