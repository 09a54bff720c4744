// The socket transport and dialling over TCP on the loopback, with nothing that Windows has
// not: what tests/test_sockets.c sees from below a program sees here, on every platform.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "check.h"

#ifdef _WIN32
#define OS_ERROR(name) WSAE##name
#else
#define OS_ERROR(name) E##name
#endif

enum { PATIENCE_MS = 60000, TURNS = 100000 };

/// Pairs ///

static nbd_socket_io io;
static nbd_socket far_end;
static unsigned char bytes[1 << 16];
static char port_text[16];

// A socket of TCP that listens on a port of the loopback, or, without `listens`, does not;
// port_text becomes the port.
static nbd_socket bound_socket(int listens)
{
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    nbd_socket made = socket(AF_INET, SOCK_STREAM, 0);

    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(made != NBD_SOCKET_NONE);
    CHECK_EQUAL(bind(made, (struct sockaddr *)&at, size), 0);
    CHECK_EQUAL(getsockname(made, (struct sockaddr *)&at, &size), 0);
    if (listens) CHECK_EQUAL(listen(made, 8), 0);
    snprintf(port_text, sizeof port_text, "%u", (unsigned)ntohs(at.sin_port));
    return made;
}

static nbd_address loopback(void)
{
    nbd_address address = NBD_ZERO;

    address.kind = NBD_ADDRESS_TCP;
    address.host = "127.0.0.1";
    address.port = port_text;
    return address;
}

// Waits for what a transport waits for, in the transport's own way.
static int wait_for(nbd_socket socket, unsigned wants)
{
    return nbdi_os_ready(socket, wants, PATIENCE_MS);
}

static int finish_dialling(nbd_dial *dial, int result)
{
    while (result == 0) {
        CHECK(wait_for(dial->socket, NBD_WANT_WRITE) > 0);
        result = nbd_dial_step(dial);
    }
    return result;
}

// io is dialled; what was accepted is as the system makes it.
static void open_pair(void)
{
    nbd_socket listener = bound_socket(1);
    nbd_address address = loopback();
    nbd_dial dial;
    int started = nbd_dial_start(&dial, &address);

    CHECK_EQUAL(started, 0);
    far_end = accept(listener, NULL, NULL);
    CHECK(far_end != NBD_SOCKET_NONE);
    CHECK_EQUAL(finish_dialling(&dial, started), 1);
    CHECK_EQUAL(nbd_socket_init(&io, dial.socket), NBD_OK);
    nbd_socket_close(listener);
}

static void close_pair(void)
{
    nbd_socket_close(io.socket);
    nbd_socket_close(far_end);
}

static ptrdiff_t give(const nbd_transport *to, size_t size)
{
    nbd_iovec piece;

    piece.base = bytes;
    piece.size = size;
    return to->send(to->context, &piece, 1, 0);
}

// Receives into two pieces.
static ptrdiff_t take(const nbd_transport *from, size_t size)
{
    nbd_iovec pieces[2];

    pieces[0].base = bytes;
    pieces[0].size = 1;
    pieces[1].base = bytes + 1;
    pieces[1].size = size - 1;
    return from->recv(from->context, pieces, 2);
}

static int waits(unsigned wants, int limit_ms)
{
    return io.transport.wait(io.transport.context, wants, &limit_ms);
}

static size_t fill(void)
{
    size_t filled = 0;
    ptrdiff_t moved;
    int turns = 0;

    while ((moved = give(&io.transport, sizeof bytes)) > 0) {
        CHECK(turns++ < TURNS);
        filled += (size_t)moved;
    }
    CHECK_EQUAL(moved, NBD_IO_WRITE);
    return filled;
}

/// The transport ///

static void dialled_socket_does_not_block(void)
{
    open_pair();
    CHECK_EQUAL(take(&io.transport, 8), NBD_IO_READ);
    (void)fill();
    CHECK_EQUAL(io.os_error, 0);
    close_pair();
}

static void socket_of_the_program_does_not_block_any_more(void)
{
    nbd_socket_io accepted;

    open_pair();
    CHECK_EQUAL(nbd_socket_init(&accepted, far_end), NBD_OK);
    CHECK_EQUAL(take(&accepted.transport, 8), NBD_IO_READ);
    CHECK_EQUAL(give(&io.transport, 3), 3);
    CHECK(wait_for(far_end, NBD_WANT_READ) > 0);
    CHECK_EQUAL(take(&accepted.transport, 8), 3);
    close_pair();
}

static void dialled_socket_sends_at_once(void)
{
    int on = 0;
    socklen_t size = sizeof on;

    open_pair();
    CHECK_EQUAL(getsockopt(NBDI_OS_SOCKET(io.socket), IPPROTO_TCP, TCP_NODELAY, (char *)&on, &size),
                0);
    CHECK(on != 0);
    close_pair();
}

static void pieces_keep_their_order(void)
{
    char one[] = "one", two[] = "two!", got[8];
    nbd_iovec pieces[2];

    pieces[0].base = one;
    pieces[0].size = 3;
    pieces[1].base = two;
    pieces[1].size = 4;
    open_pair();
    CHECK_EQUAL(io.transport.send(io.transport.context, pieces, 2, NBD_SEND_MORE), 7);
    CHECK_EQUAL(io.transport.finish(io.transport.context), 0);
    CHECK_EQUAL(recv(far_end, got, 7, MSG_WAITALL), 7);
    CHECK_BYTES(got, "onetwo!", 7);
    close_pair();
}

static void waiting_tells_what_is_ready(void)
{
    open_pair();
    CHECK_EQUAL(waits(NBD_WANT_READ, 1), 0);
    CHECK_EQUAL(waits(NBD_WANT_READ | NBD_WANT_WRITE, PATIENCE_MS), NBD_WANT_WRITE);
    CHECK_EQUAL(send(far_end, "x", 1, 0), 1);
    CHECK_EQUAL(waits(NBD_WANT_READ, PATIENCE_MS), NBD_WANT_READ);
    CHECK_EQUAL(take(&io.transport, 8), 1);
    CHECK_EQUAL(waits(NBD_WANT_READ, 0), 0);
    close_pair();
}

static void waiting_takes_its_time_off_the_limit(void)
{
    int limit_ms = 1, without = -1;

    open_pair();
    CHECK_EQUAL(io.transport.wait(io.transport.context, NBD_WANT_READ, &limit_ms), 0);
    CHECK_EQUAL(limit_ms, 0);
    CHECK_EQUAL(send(far_end, "x", 1, 0), 1);
    CHECK_EQUAL(io.transport.wait(io.transport.context, NBD_WANT_READ, &without), NBD_WANT_READ);
    CHECK_EQUAL(without, -1);
    close_pair();
}

static void full_socket_can_be_written_once_it_was_read(void)
{
    nbd_socket_io accepted;
    size_t filled, left;

    open_pair();
    CHECK_EQUAL(nbd_socket_init(&accepted, far_end), NBD_OK);
    filled = fill();
    CHECK_EQUAL(waits(NBD_WANT_WRITE, 0), 0);
    for (left = filled; left > 0;) {
        ptrdiff_t moved = take(&accepted.transport, sizeof bytes);

        if (moved > 0) left -= (size_t)moved;
        CHECK(moved > 0 || moved == NBD_IO_READ);
        if (moved == NBD_IO_READ) CHECK(wait_for(far_end, NBD_WANT_READ) > 0);
    }
    CHECK_EQUAL(waits(NBD_WANT_WRITE, PATIENCE_MS), NBD_WANT_WRITE);
    CHECK_EQUAL(give(&io.transport, 5), 5);
    close_pair();
}

static void end_of_sending_leaves_receiving(void)
{
    open_pair();
    CHECK_EQUAL(io.transport.finish(io.transport.context), 0);
    CHECK_EQUAL(recv(far_end, (char *)bytes, 1, 0), 0);
    CHECK_EQUAL(send(far_end, "late", 4, 0), 4);
    CHECK_EQUAL(waits(NBD_WANT_READ, PATIENCE_MS), NBD_WANT_READ);
    CHECK_EQUAL(take(&io.transport, 8), 4);
    nbd_socket_close(far_end);
    CHECK(((unsigned)waits(NBD_WANT_READ, PATIENCE_MS) & NBD_WANT_READ) != 0);
    CHECK_EQUAL(take(&io.transport, 8), NBD_IO_EOF);
    nbd_socket_close(io.socket);
}

static int is_loss(int os_error)
{
#ifdef _WIN32
    return os_error == WSAECONNRESET || os_error == WSAECONNABORTED || os_error == WSAESHUTDOWN;
#else
    return os_error == ECONNRESET || os_error == EPIPE;
#endif
}

// No signal either: it would end this program.
static void sending_to_nobody_fails_with_the_error_of_the_system(void)
{
    ptrdiff_t moved;
    int turns = 0;

    open_pair();
    nbd_socket_close(far_end);
    while ((moved = give(&io.transport, 1)) != NBD_IO_ERROR)
        CHECK(turns++ < TURNS);
    CHECK(is_loss(io.os_error));
    CHECK_EQUAL(give(&io.transport, 1), NBD_IO_ERROR);
    nbd_socket_close(io.socket);
}

static void what_is_no_socket_is_refused(void)
{
    CHECK_EQUAL(nbd_socket_init(&io, NBD_SOCKET_NONE), NBD_ERR_SOCKET);
#ifdef _WIN32
    CHECK_EQUAL(io.os_error, WSAENOTSOCK);
#else
    CHECK_EQUAL(io.os_error, EBADF);
#endif
    nbd_socket_close(NBD_SOCKET_NONE);
}

static void socket_of_datagrams_is_refused(void)
{
    nbd_socket datagrams = socket(AF_INET, SOCK_DGRAM, 0);

    CHECK(datagrams != NBD_SOCKET_NONE);
    CHECK_EQUAL(nbd_socket_init(&io, datagrams), NBD_ERR_SOCKET);
    CHECK_EQUAL(io.os_error, OS_ERROR(PROTOTYPE));
    nbd_socket_close(datagrams);
}

// A call takes 2^30 bytes at most: more does not fit the lengths of every system.
static void long_pieces_are_cut(void)
{
    const size_t most = (size_t)1 << 30;
    const size_t sizes[][2] = {
        {most - 1, 5}, {(size_t)-1, 5}, {5, (size_t)-1}, {(size_t)(UINT64_C(1) << 32 | 7), 5}};
    size_t i, k, sum, used, size, expected;

    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        nbd_iovec from[2];
#ifdef _WIN32
        WSABUF to[2];
#else
        struct iovec to[2];
        struct msghdr message;
#endif
        from[0].base = from[1].base = bytes;
        from[0].size = sizes[i][0];
        from[1].size = sizes[i][1];
        expected = sizes[i][0] < most && sizes[i][0] + sizes[i][1] < most && sizes[i][1] < most
                       ? sizes[i][0] + sizes[i][1]
                       : most;
#ifdef _WIN32
        used = nbdi_os_pieces(to, from, 2);
#else
        memset(&message, 0, sizeof message);
        message.msg_iov = to;
        nbdi_os_pieces(&message, from, 2);
        used = (size_t)message.msg_iovlen;
#endif
        for (k = 0, sum = 0; k < used; k++) {
#ifdef _WIN32
            size = to[k].len;
#else
            size = to[k].iov_len;
#endif
            CHECK(size > 0 && size <= most);
            sum += size;
        }
        CHECK_EQUAL(sum, expected);
    }
}

/// Dialling ///

static void refused_connection_tells_the_error_of_the_system(void)
{
    nbd_socket silent = bound_socket(0);
    nbd_address address = loopback();
    nbd_dial dial;

    CHECK_EQUAL(finish_dialling(&dial, nbd_dial_start(&dial, &address)), NBD_ERR_CONNECT);
    CHECK_EQUAL(dial.os_error, OS_ERROR(CONNREFUSED));
    CHECK(dial.socket == NBD_SOCKET_NONE);
    CHECK_EQUAL(nbd_dial_step(&dial), NBD_ERR_STATE);
    nbd_socket_close(silent);
}

static void refused_connection_is_told_by_the_blocking_calls_too(void)
{
    nbd_socket silent = bound_socket(0);
    nbd_address address = loopback();
    nbd_sync sync = NBD_ZERO;

    sync.timeout_ms = PATIENCE_MS;
    CHECK_EQUAL(nbd_sync_dial(&sync, &address), NBD_ERR_CONNECT);
    CHECK_EQUAL(sync.os_error, OS_ERROR(CONNREFUSED));
    CHECK_EQUAL(nbd_sync_close(&sync), 0);
    nbd_socket_close(silent);
}

static void attempt_that_is_given_up_has_timed_out(void)
{
    nbd_socket listener = bound_socket(1);
    nbd_address address = loopback();
    nbd_dial dial;

    CHECK_EQUAL(nbd_dial_start(&dial, &address), 0);
    CHECK_EQUAL(nbd_dial_next(&dial), NBD_ERR_CONNECT);
    CHECK_EQUAL(dial.os_error, OS_ERROR(TIMEDOUT));
    CHECK(dial.socket == NBD_SOCKET_NONE);
    nbd_socket_close(listener);
}

// A service that nobody knows is looked up in no network.
static void failure_to_resolve_tells_the_error_of_the_system(void)
{
    nbd_address address = loopback();
    nbd_dial dial;

    address.port = "no such service";
    CHECK_EQUAL(nbd_dial_start(&dial, &address), NBD_ERR_RESOLVE);
    CHECK(dial.os_error != 0);
    CHECK(dial.socket == NBD_SOCKET_NONE);
}

static void kinds_of_sockets_that_are_missing_are_unsupported(void)
{
    static const uint32_t kinds[] = {NBD_ADDRESS_UNIX, NBD_ADDRESS_ABSTRACT, NBD_ADDRESS_VSOCK};
    nbd_dial dial;
    size_t i;

    for (i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        nbd_address address = NBD_ZERO;
        int error;

        address.kind = kinds[i];
        address.path = "/there/is/no/such/directory";
        error = nbd_dial_start(&dial, &address);
#ifdef _WIN32
        CHECK_EQUAL(error, NBD_ERR_UNSUPPORTED);
#else
        CHECK(error == NBD_ERR_UNSUPPORTED || error == NBD_ERR_CONNECT ||
              kinds[i] == NBD_ADDRESS_VSOCK);
        nbd_dial_stop(&dial);
#endif
    }
}

int main(int argc, char **argv)
{
#ifdef _WIN32
    WSADATA data;

    if (WSAStartup(MAKEWORD(2, 2), &data)) return 1;
#endif
    check_begin(argc, argv);
    CHECK_CASE(dialled_socket_does_not_block);
    CHECK_CASE(socket_of_the_program_does_not_block_any_more);
    CHECK_CASE(dialled_socket_sends_at_once);
    CHECK_CASE(pieces_keep_their_order);
    CHECK_CASE(waiting_tells_what_is_ready);
    CHECK_CASE(waiting_takes_its_time_off_the_limit);
    CHECK_CASE(full_socket_can_be_written_once_it_was_read);
    CHECK_CASE(end_of_sending_leaves_receiving);
    CHECK_CASE(sending_to_nobody_fails_with_the_error_of_the_system);
    CHECK_CASE(what_is_no_socket_is_refused);
    CHECK_CASE(socket_of_datagrams_is_refused);
    CHECK_CASE(long_pieces_are_cut);
    CHECK_CASE(refused_connection_tells_the_error_of_the_system);
    CHECK_CASE(refused_connection_is_told_by_the_blocking_calls_too);
    CHECK_CASE(attempt_that_is_given_up_has_timed_out);
    CHECK_CASE(failure_to_resolve_tells_the_error_of_the_system);
    CHECK_CASE(kinds_of_sockets_that_are_missing_are_unsupported);
    return check_end();
}
