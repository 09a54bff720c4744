// A client that has to send much while its server does not read: what
// tests/test_deadlock.c does with a server in process and tests/deadlock.c with real ones.
// The client's loop is the one of the header's first page.  It waits for what nbd_wants says
// and for nothing else, so a wish that is missing is a deadlock.
#ifndef DEADLOCK_H
#define DEADLOCK_H

#include <poll.h>

#include "check.h"

enum {
    MIB = 1 << 20,
    SLOTS = 64,
    SMALL = 4096, // SO_SNDBUF, SO_RCVBUF
    POLLS_MOST = 100000,
    PATIENCE_MS = 10000
};

static struct near {
    nbd_client client;
    nbd_slot slots[SLOTS];
    unsigned char buffer[NBD_BUFFER_NAMES];
    nbd_socket_io io;
    unsigned polls;     // calls of nbd_poll
    unsigned fruitless; // those after which no byte had moved
    unsigned done, texts, options, ready, closed;
} near;

static void shrink_buffer(int fd, int which)
{
    int size = SMALL;

    CHECK_EQUAL(setsockopt(fd, SOL_SOCKET, which, &size, sizeof size), 0);
}

static void near_begin(int fd, size_t buffer_size, uint32_t flags, const char *export_name)
{
    nbd_config config = NBD_ZERO;

    memset(&near, 0, sizeof near);
    config.flags = flags;
    config.slots = near.slots;
    config.slot_count = SLOTS;
    config.buffer = near.buffer;
    config.buffer_size = buffer_size;
    config.export_name = export_name;
    CHECK_EQUAL(nbd_init(&near.client, &config), 0);
    CHECK_EQUAL(nbd_socket_init(&near.io, fd), 0);
    CHECK_EQUAL(nbd_connect(&near.client, &near.io.transport), 0);
}

static void near_events(void)
{
    nbd_event event;

    while (nbd_next(&near.client, &event)) {
        near.ready += event.type == NBD_EVENT_READY;
        near.done += event.type == NBD_EVENT_DONE;
        near.texts += event.type == NBD_EVENT_TEXT;
        near.options += event.type == NBD_EVENT_OPTION;
        near.closed += event.type == NBD_EVENT_CLOSED;
        // The text of an option that was refused, as an old server does, is no failure.
        if (event.type != NBD_EVENT_TEXT) CHECK_EQUAL(event.error, 0);
    }
}

static void near_poll(unsigned ready)
{
    const nbd_counters *counters = nbd_count(&near.client);
    uint64_t before = counters->bytes_sent + counters->bytes_received;

    CHECK_EQUAL(nbd_poll(&near.client, ready), 0);
    CHECK(++near.polls <= POLLS_MOST);
    near.fruitless += counters->bytes_sent + counters->bytes_received == before;
}

// One turn of the loop.  `far` is NULL, or what the server in this process waits for.
static void near_turn(struct pollfd *far)
{
    unsigned wants = nbd_wants(&near.client), ready = 0;
    int waits = wants & NBD_WANT_NOW ? 0 : PATIENCE_MS, moves;
    struct pollfd fds[2];

    memset(fds, 0, sizeof fds);
    fds[0].fd = near.io.socket;
    if (wants & NBD_WANT_READ) fds[0].events |= POLLIN;
    if (wants & NBD_WANT_WRITE) fds[0].events |= POLLOUT;
    if (far) fds[1] = *far;
    moves = poll(fds, far ? 2 : 1, waits);
    if (far) *far = fds[1];
    CHECK(wants != 0);
    CHECK(moves > 0 || waits == 0); // else neither side can move
    if (fds[0].revents & (POLLIN | POLLHUP | POLLERR)) ready |= NBD_WANT_READ;
    if (fds[0].revents & (POLLOUT | POLLHUP | POLLERR)) ready |= NBD_WANT_WRITE;
    if (ready || waits == 0) near_poll(ready);
    near_events();
}

static void near_issue(uint32_t command, uint64_t size, uint64_t offset, unsigned char *memory)
{
    nbd_op op = NBD_ZERO;

    op.command = command;
    op.size = size;
    op.offset = offset;
    if (command == NBD_READ)
        op.buffer = memory;
    else
        op.data = memory;
    CHECK_EQUAL(nbd_issue(&near.client, &op, NULL), 0);
}

// A call of nbd_poll is worth about what a buffer holds, and few find nothing to do.
static void near_was_frugal(void)
{
    const nbd_counters *counters = nbd_count(&near.client);
    uint64_t bytes = counters->bytes_sent + counters->bytes_received;

    printf("# %s: polls=%u fruitless=%u bytes=%llu\n", check.name, near.polls, near.fruitless,
           (unsigned long long)bytes);
    CHECK(near.polls <= 64 + bytes / (SMALL / 4));
    CHECK(near.fruitless <= 8 + near.polls / 64);
}

#endif
