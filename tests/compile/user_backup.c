// A backup tool: asks where the data is and copies only that into a sparse file.
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "nbd.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BLOCK 65536u // bytes of one read; the least maximum payload is larger
#define BLOCKS 8u
#define EXTENTS 256u
#define ASK (1u << 30) // bytes of one BLOCK_STATUS

typedef struct extent {
    uint64_t offset, size, flags;
} extent;

typedef struct block {
    struct block *next; // while it is free
    unsigned char data[BLOCK];
} block;

typedef struct backup {
    nbd_client client;
    nbd_socket_io io;
    nbd_slot slots[BLOCKS + 1]; // one more for the BLOCK_STATUS
    nbd_context contexts[1];
    block blocks[BLOCKS], *free;
    extent extents[EXTENTS]; // provisional until asking is 0
    unsigned extent_count;
    int known; // the context that the server agreed to is base:allocation
    int ready, asking, leaving, over;
    int file, error; // the first error wins
    unsigned char buffer[NBD_BUFFER_GOOD];
} backup;

static void fail(backup *b, int error)
{
    if (!b->error) b->error = error;
}

static void store(backup *b, const block *from, uint64_t offset, uint64_t size)
{
    if (pwrite(b->file, from->data, (size_t)size, (off_t)offset) != (ssize_t)size) fail(b, NBD_EIO);
}

static void done(backup *b, const nbd_event *event)
{
    block *read = (block *)event->user;

    if (event->error) fail(b, event->error);
    if (event->command == NBD_BLOCK_STATUS) b->asking = 0;
    if (event->command != NBD_READ) return;
    if (!event->error) store(b, read, event->offset, event->size);
    read->next = b->free;
    b->free = read;
}

static void handle(backup *b, const nbd_event *event)
{
    static const char name[] = "base:allocation";

    switch (event->type) {
    case NBD_EVENT_READY: b->ready = 1; break;
    case NBD_EVENT_DONE: done(b, event); break;
    case NBD_EVENT_TEXT:
        if (event->text_kind == NBD_TEXT_CONTEXT && event->text_size == sizeof name - 1)
            b->known = !memcmp(event->text, name, sizeof name - 1);
        break;
    case NBD_EVENT_EXTENT:
        if (b->extent_count < EXTENTS) { // the rest is asked for again
            extent *e = &b->extents[b->extent_count++];
            e->offset = event->offset;
            e->size = event->size;
            e->flags = event->flags;
        }
        break;
    case NBD_EVENT_CLOSED:
        b->over = 1;
        if (event->error || !b->leaving) fail(b, event->error ? event->error : NBD_ERR_CLOSED);
        break;
    default: break;
    }
}

// One turn: waits, moves bytes, handles what happened.
static void turn(backup *b)
{
    unsigned wants = nbd_wants(&b->client), ready = 0;
    struct pollfd wait = {b->io.socket, 0, 0};
    nbd_event event;

    if (wants & NBD_WANT_READ) wait.events |= POLLIN;
    if (wants & NBD_WANT_WRITE) wait.events |= POLLOUT;
    if (!(wants & NBD_WANT_NOW)) {
        int count = poll(&wait, 1, 30000);
        if (!count) fail(b, NBD_ERR_TIMEOUT);
        if (count < 0 && errno != EINTR) fail(b, NBD_ERR_SOCKET);
        if (count <= 0) return;
    }
    if (wait.revents & ~POLLOUT) ready |= NBD_WANT_READ;
    if (wait.revents & ~POLLIN) ready |= NBD_WANT_WRITE;
    (void)nbd_poll(&b->client, ready); // a failure comes as CLOSED
    while (nbd_next(&b->client, &event))
        handle(b, &event);
}

static void copy(backup *b, uint64_t offset, uint64_t end)
{
    while (offset < end && !b->error) {
        nbd_op op = NBD_ZERO;

        while (!b->free && !b->error)
            turn(b);
        if (b->error) return;
        op.command = NBD_READ;
        op.flags = NBD_NO_INIT; // safe: a block is stored only after success
        op.offset = offset;
        op.size = end - offset < BLOCK ? end - offset : BLOCK;
        op.buffer = b->free->data;
        op.user = b->free;
        b->free = b->free->next;
        fail(b, nbd_issue(&b->client, &op, NULL));
        offset += op.size;
    }
}

// Copies what one BLOCK_STATUS says is data.  Returns where its knowledge ends, which may be
// behind the bytes that were asked about.
static uint64_t copy_known(backup *b, uint64_t offset, uint64_t size)
{
    nbd_op op = NBD_ZERO;

    op.command = NBD_BLOCK_STATUS;
    op.offset = offset;
    op.size = size;
    b->extent_count = 0;
    b->asking = 1;
    fail(b, nbd_issue(&b->client, &op, NULL));
    while (b->asking && !b->error)
        turn(b);
    if (!b->extent_count) fail(b, NBD_ERR_PROTOCOL); // else the walk would not move
    for (unsigned i = 0; i < b->extent_count && !b->error; i++) {
        const extent *e = &b->extents[i];
        if (!(e->flags & NBD_STATE_ZERO)) copy(b, e->offset, e->offset + e->size);
        offset = e->offset + e->size;
    }
    return offset;
}

static void copy_all(backup *b)
{
    const nbd_export *from = nbd_negotiated(&b->client);
    uint64_t offset = 0;

    if (ftruncate(b->file, (off_t)from->size)) fail(b, NBD_EIO);
    if (!b->known || !nbd_allows(&b->client, NBD_BLOCK_STATUS, 0))
        copy(b, 0, from->size);
    else
        while (offset < from->size && !b->error)
            offset = copy_known(b, offset, from->size - offset < ASK ? from->size - offset : ASK);
    while (nbd_count(&b->client)->in_flight && !b->error)
        turn(b);
}

static void leave(backup *b)
{
    nbd_event event;

    fail(b, nbd_disconnect(&b->client));
    b->leaving = 1;
    while (!b->error && !b->over)
        turn(b);
    if (b->over || nbd_abandon(&b->client)) return;
    while (nbd_next(&b->client, &event))
        handle(b, &event);
}

static int dial(const nbd_address *address, nbd_socket *connected)
{
    nbd_dial attempt = NBD_ZERO;
    int got = nbd_dial_start(&attempt, address);

    while (!got) {
        struct pollfd wait = {attempt.socket, POLLOUT, 0};
        int count = poll(&wait, 1, 5000);
        if (count < 0 && errno == EINTR) continue;
        got = count > 0 ? nbd_dial_step(&attempt) : nbd_dial_next(&attempt);
    }
    *connected = attempt.socket;
    return got == 1 ? 0 : got;
}

int main(int argc, char **argv)
{
    static const char *const queries[] = {"base:allocation"};
    static backup b;
    nbd_config config = NBD_ZERO;
    nbd_socket connected = NBD_SOCKET_NONE;
    nbd_uri uri;
    char memory[4096];

    if (argc != 3) {
        fprintf(stderr, "usage: backup URI FILE\n");
        return 2;
    }
    for (unsigned i = 0; i < BLOCKS; i++)
        b.blocks[i].next = i ? &b.blocks[i - 1] : NULL;
    b.free = &b.blocks[BLOCKS - 1];
    b.error = nbd_uri_parse(&uri, argv[1], memory, sizeof memory);
    config.flags = uri.config_flags;
    config.slots = b.slots;
    config.slot_count = BLOCKS + 1;
    config.buffer = b.buffer;
    config.buffer_size = sizeof b.buffer;
    config.export_name = uri.export_name;
    config.queries = queries;
    config.query_count = 1;
    config.contexts = b.contexts;
    config.context_count = 1;
    b.file = open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (b.file < 0) fail(&b, NBD_EIO);
    if (!b.error) b.error = nbd_init(&b.client, &config);
    if (!b.error) b.error = dial(&uri.address, &connected);
    if (!b.error) b.error = nbd_socket_init(&b.io, connected);
    if (!b.error) b.error = nbd_connect(&b.client, &b.io.transport);
    while (!b.ready && !b.error)
        turn(&b);
    if (!b.error) copy_all(&b);
    if (b.ready) leave(&b);
    nbd_socket_close(connected);
    if (b.file >= 0 && (fsync(b.file) || close(b.file))) fail(&b, NBD_EIO);
    if (b.error) fprintf(stderr, "backup: %s\n", nbd_strerror(b.error));
    return b.error != 0;
}
