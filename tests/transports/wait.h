// wait.h - the wait hook of a transport over descriptors
#ifndef TRANSPORTS_WAIT_H
#define TRANSPORTS_WAIT_H

#include <errno.h>
#include <poll.h>
#include <time.h>

static inline int wait_clock_ms(void)
{
    static struct timespec first;
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!first.tv_sec) first = now;
    return (int)((now.tv_sec - first.tv_sec) * 1000 + now.tv_nsec / 1000000);
}

// Reading waits for `in`, writing for `out`; they may be the same.
static inline int wait_for(int in, int out, unsigned wants, int *timeout_ms)
{
    struct pollfd fds[2] = {{-1, POLLIN, 0}, {-1, POLLOUT, 0}}; // poll ignores -1
    int start = wait_clock_ms(), ready, passed;

    if (wants & NBD_WANT_READ) fds[0].fd = in;
    if (wants & NBD_WANT_WRITE) fds[1].fd = out;
    ready = poll(fds, 2, *timeout_ms);
    passed = wait_clock_ms() - start;
    if (*timeout_ms > 0)
        *timeout_ms = ready == 0 || passed > *timeout_ms ? 0 : *timeout_ms - passed;
    if (ready < 0) return errno == EINTR ? 0 : NBD_IO_ERROR;
    // A hang-up or an error shows in the call that moves bytes.
    return (int)((fds[0].revents ? NBD_WANT_READ : 0u) | (fds[1].revents ? NBD_WANT_WRITE : 0u));
}

// What a system call did that reads or writes, as a hook says it.
static inline ptrdiff_t wait_result(ssize_t moved, ptrdiff_t blocked)
{
    if (moved >= 0) return moved; // 0 is NBD_IO_EOF
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? blocked : NBD_IO_ERROR;
}

#endif
