// nbd.h as other systems see it: the headers of this one come first, then each constant
// that not every system has is there (HAS_... is 1) or not (0), with a number of this file.
// What the system is asked for is written down.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#undef MSG_MORE
#undef MSG_NOSIGNAL
#undef SO_NOSIGPIPE
#undef TCP_NOPUSH
#undef TCP_CORK
#if HAS_MSG_MORE
#define MSG_MORE 0x10000
#endif
#if HAS_MSG_NOSIGNAL
#define MSG_NOSIGNAL 0x20000
#endif
#if HAS_SO_NOSIGPIPE
#define SO_NOSIGPIPE 0x30000
#endif
#if HAS_TCP_NOPUSH
#define TCP_NOPUSH 0x40000
#endif
#if HAS_TCP_CORK
#define TCP_CORK 0x50000
#endif

// A system that is not Linux, and which one.
#ifdef SYSTEM
#undef __linux__
#undef SOCK_CLOEXEC
#undef AF_VSOCK
#undef EAI_SYSTEM
#if SYSTEM == 1
#define __APPLE__ 1
#elif SYSTEM == 2
#define __FreeBSD__ 14
#elif SYSTEM == 3
#define __OpenBSD__ 1
#elif SYSTEM == 4
#define __ZEPHYR__ 1
#undef FD_CLOEXEC
#undef F_SETFD
#endif
#endif

static int flags_seen;  // of the last sendmsg
static int option_seen; // of the last setsockopt, but TCP_NODELAY and SO_SNDBUF; 0: none
static int value_seen;

static ssize_t seen_sendmsg(int fd, const struct msghdr *message, int flags)
{
    flags_seen = flags;
    return sendmsg(fd, message, 0);
}

static int seen_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    (void)fd;
    if (level == IPPROTO_TCP && name == TCP_NODELAY) return 0;
    if (level == SOL_SOCKET && name == SO_SNDBUF) return 0;
    option_seen = size == sizeof value_seen ? name : -1;
    value_seen = *(const int *)value;
    return 0;
}

#define sendmsg(fd, message, flags) seen_sendmsg(fd, message, flags)
#define setsockopt(fd, level, name, value, size) seen_setsockopt(fd, level, name, value, size)

#define NBD_IMPLEMENTATION
#include "../../nbd.h"

// The hook of a user who corks the socket instead, as the comment at send_flags allows.
static int corked(nbd_socket_io *io, unsigned flags)
{
    int on = (flags & NBD_SEND_MORE) != 0;

    (void)io;
    (void)on;
#ifdef TCP_CORK
    setsockopt(io->socket, IPPROTO_TCP, TCP_CORK, &on, sizeof on);
#elif defined(TCP_NOPUSH)
    setsockopt(io->socket, IPPROTO_TCP, TCP_NOPUSH, &on, sizeof on);
#endif
    return 0;
}

static int failed;

static void expect(const char *what, int got, int wanted)
{
    if (got == wanted) return;
    fprintf(stderr, "error: %s is %#x, not %#x\n", what, (unsigned)got, (unsigned)wanted);
    failed = 1;
}

static void send_with(nbd_socket_io *io, unsigned flags)
{
    char text[] = "x";
    nbd_iovec piece = NBD_ZERO;

    piece.base = text;
    piece.size = 1;
    flags_seen = option_seen = value_seen = 0;
    expect("what was sent", (int)io->transport.send(io, &piece, 1, flags), 1);
}

// What this system must be asked for at each socket, by what it has.
static int wanted_option(void)
{
#ifdef WANTED_OPTION
    return WANTED_OPTION; // its headers hide it
#else
    return !HAS_MSG_NOSIGNAL && HAS_SO_NOSIGPIPE ? 0x30000 : 0;
#endif
}

static void dial_a_path(void)
{
    nbd_address address = NBD_ZERO;
    nbd_dial dial;

    address.kind = NBD_ADDRESS_UNIX;
    address.path = "/there/is/no/such/path";
#ifdef __ZEPHYR__
    expect("dialling a path", nbd_dial_start(&dial, &address), NBD_ERR_UNSUPPORTED);
#else
    expect("dialling a path", nbd_dial_start(&dial, &address), NBD_ERR_CONNECT);
#endif
}

int main(void)
{
    const int no_signal = HAS_MSG_NOSIGNAL ? 0x20000 : 0, more = HAS_MSG_MORE ? 0x10000 : 0;
    const int cork = HAS_TCP_CORK ? 0x50000 : HAS_TCP_NOPUSH ? 0x40000 : 0;
    nbd_socket_io io;
    int ends[2];

    expect("socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    expect("nbd_socket_init", nbd_socket_init(&io, ends[0]), 0);
    expect("option of the socket", option_seen, wanted_option());
    expect("its value", value_seen, wanted_option() != 0);
    send_with(&io, 0);
    expect("flags of the last send", flags_seen, no_signal);
    send_with(&io, NBD_SEND_MORE);
    expect("flags of a send before another", flags_seen, no_signal | more);
    expect("option of a send", option_seen, 0);
    io.send_flags = corked;
    send_with(&io, NBD_SEND_MORE);
    expect("flags of a send with a hook", flags_seen, no_signal);
    expect("option of a hook", option_seen, cork);
    expect("value of a hook", value_seen, cork != 0);
    send_with(&io, 0);
    expect("value of a hook at the end", value_seen, 0);
    dial_a_path();
    nbd_socket_close(ends[0]);
    nbd_socket_close(ends[1]);
    return failed;
}
