// What one EXTENT event costs: a block status chunk of 2^20 extents, the most that
// the specification allows, is fed to the engine from memory.
//
//     make bench-extents
//
// Prints nanoseconds per extent for several sizes of the buffer, which is all the
// memory that the reply takes.
#define _POSIX_C_SOURCE 200112L
#define NBD_NO_SOCKETS
#define NBD_NO_CONVENIENCE
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXTENTS (1u << 20)
#define EXTENT_SIZE 4096u
#define ROUNDS 11

static nbd_client client;
static nbd_slot slot;
static nbd_context context;
static unsigned char buffer[NBD_BUFFER_GOOD];
static unsigned char chunk[20 + 4 + 8 * EXTENTS];

static void put32(unsigned char *p, uint32_t value)
{
    p[0] = (unsigned char)(value >> 24);
    p[1] = (unsigned char)(value >> 16);
    p[2] = (unsigned char)(value >> 8);
    p[3] = (unsigned char)value;
}

// Hands bytes of the server to the engine; returns how many EXTENT events came out.
static uint32_t feed(const unsigned char *bytes, size_t size)
{
    uint32_t extents = 0;
    while (size > 0) {
        nbd_iovec to;
        nbd_event event;
        size_t part;
        if (nbd_incoming(&client, &to, 1) == 0) break;
        part = to.size < size ? to.size : size;
        memcpy(to.base, bytes, part);
        nbd_received(&client, (ptrdiff_t)part);
        bytes += part;
        size -= part;
        while (nbd_next(&client, &event))
            extents += event.type == NBD_EVENT_EXTENT;
    }
    return extents;
}

static void send_all(unsigned char *copy)
{
    nbd_iovec piece;
    unsigned flags;
    size_t at = 0;
    while (nbd_outgoing(&client, &piece, 1, &flags) > 0) {
        if (copy && at + piece.size <= 28) memcpy(copy + at, piece.base, piece.size);
        at += piece.size;
        nbd_sent(&client, (ptrdiff_t)piece.size);
    }
}

// An option reply: the header, then what the option says.
static void reply(uint32_t option, uint32_t type, const char *data, uint32_t size)
{
    unsigned char bytes[64] = "\0\3\350\211\4Ue\251";
    put32(bytes + 8, option);
    put32(bytes + 12, type);
    put32(bytes + 16, size);
    memcpy(bytes + 20, data, size);
    send_all(NULL);
    feed(bytes, 20 + size);
}

static int shake_hands(size_t buffer_size)
{
    static const char *const queries[] = {"base:allocation"};
    nbd_config config = NBD_ZERO;
    config.flags = NBD_WITHOUT_EXTENDED_HEADERS;
    config.slots = &slot;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = buffer_size;
    config.queries = queries;
    config.query_count = 1;
    config.contexts = &context;
    config.context_count = 1;
    if (nbd_init(&client, &config) || nbd_connect(&client, NULL)) return -1;
    feed((const unsigned char *)"NBDMAGICIHAVEOPT\0\3", 18);
    reply(NBD_OPTION_STRUCTURED_REPLY, 1, "", 0);
    reply(NBD_OPTION_SET_META_CONTEXT, 4, "\0\0\0\1base:allocation", 19);
    reply(NBD_OPTION_SET_META_CONTEXT, 1, "", 0);
    reply(NBD_OPTION_GO, 3, "\0\0\0\0\0\20\0\0\0\0\0\1", 12); // 2^44 bytes
    reply(NBD_OPTION_GO, 1, "", 0);
    return nbd_phase(&client) == NBD_PHASE_TRANSMISSION ? 0 : -1;
}

static void make_chunk(const unsigned char *request)
{
    uint32_t i;
    memcpy(chunk, "\146\216\063\357\0\1\0\5", 8);
    memcpy(chunk + 8, request + 8, 8); // cookie
    put32(chunk + 16, 4 + 8 * EXTENTS);
    put32(chunk + 20, 1);
    for (i = 0; i < EXTENTS; i++) {
        put32(chunk + 24 + 8 * (size_t)i, i + 1 < EXTENTS ? EXTENT_SIZE - 1 : EXTENT_SIZE);
        put32(chunk + 28 + 8 * (size_t)i, i & 3);
    }
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Median nanoseconds per extent, or -1 if the events are not those of the chunk.
static double measure(size_t buffer_size)
{
    double times[ROUNDS];
    int i;
    if (shake_hands(buffer_size)) return -1;
    for (i = 0; i < ROUNDS; i++) {
        unsigned char request[28];
        nbd_op op = NBD_ZERO;
        double start;
        op.command = NBD_BLOCK_STATUS;
        op.size = 0xfffff000u;
        if (nbd_issue(&client, &op, NULL)) return -1;
        send_all(request);
        make_chunk(request);
        start = seconds();
        if (feed(chunk, sizeof chunk) != EXTENTS) return -1;
        times[i] = (seconds() - start) * 1e9 / EXTENTS;
    }
    qsort(times, ROUNDS, sizeof times[0], compare);
    return times[ROUNDS / 2];
}

int main(void)
{
    static const size_t sizes[] = {NBD_BUFFER_MIN, 4096, NBD_BUFFER_GOOD};
    size_t i;
    printf("buffer bytes  ns per extent (median of %d chunks of 2^20)\n", ROUNDS);
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        double cost = measure(sizes[i]);
        if (cost < 0) {
            fprintf(stderr, "extents: the engine did not hand out the extents of the chunk\n");
            return 1;
        }
        printf("%12zu  %.1f\n", sizes[i], cost);
    }
    return 0;
}
