// Plays the random sessions of tests/differential.h with libnbd.

#define _POSIX_C_SOURCE 200112L
#include <libnbd.h>
#include "differential.h"

enum { PATIENCE_MS = 30000 };

static struct nbd_handle *client;
static unsigned finished; // tasks, in this session

static const struct {
    unsigned ours;
    uint32_t theirs;
} flag_map[] = {{FUA, LIBNBD_CMD_FLAG_FUA},
                {NO_HOLE, LIBNBD_CMD_FLAG_NO_HOLE},
                {DF, LIBNBD_CMD_FLAG_DF},
                {REQ_ONE, LIBNBD_CMD_FLAG_REQ_ONE},
                {FAST_ZERO, LIBNBD_CMD_FLAG_FAST_ZERO}};

// It takes no vectors.
static unsigned client_pieces(unsigned wanted)
{
    (void)wanted;
    return 1;
}

static const char *client_protocol(void)
{
    return nbd_get_structured_replies_negotiated(client) > 0 ? "structured" : "simple";
}

static void must(int64_t answer, const char *what)
{
    if (answer < 0) die("%s: %s", what, nbd_get_error() ? nbd_get_error() : "failed");
}

static unsigned if_can(int answer, unsigned can)
{
    must(answer, "what the server offers");
    return answer > 0 ? can : 0;
}

static void learn(offer *offered)
{
    int64_t minimum = nbd_get_block_size(client, LIBNBD_SIZE_MINIMUM);
    int64_t maximum = nbd_get_block_size(client, LIBNBD_SIZE_MAXIMUM);
    int64_t size = nbd_get_size(client);

    must(minimum, "minimum block");
    must(maximum, "maximum block");
    must(size, "size");
    offered->size = (uint64_t)size;
    // 0: not advertised, for which the specification has defaults.
    offered->minimum = minimum ? (uint32_t)minimum : 1;
    offered->maximum = maximum ? (uint32_t)maximum : 32u << 20;
    offered->can = if_can(nbd_can_flush(client), CAN_FLUSH) | if_can(nbd_can_fua(client), CAN_FUA) |
                   if_can(nbd_can_trim(client), CAN_TRIM) | if_can(nbd_can_zero(client), CAN_ZERO) |
                   if_can(nbd_can_fast_zero(client), CAN_FAST_ZERO) |
                   if_can(nbd_can_df(client), CAN_DF) | if_can(nbd_can_cache(client), CAN_CACHE) |
                   if_can(nbd_can_meta_context(client, LIBNBD_CONTEXT_BASE_ALLOCATION), CAN_STATUS);
}

static void client_open(const char *uri, int simple, unsigned depth, offer *offered)
{
    (void)depth;
    finished = 0;
    client = nbd_create();
    if (!client) must(-1, "create");
    if (simple) must(nbd_set_request_structured_replies(client, false), "simple replies");
    must(nbd_add_meta_context(client, LIBNBD_CONTEXT_BASE_ALLOCATION), "context");
    must(nbd_connect_uri(client, uri), uri);
    learn(offered);
}

static void client_close(void)
{
    must(nbd_shutdown(client, 0), "close");
    nbd_close(client);
}

static int completed(void *user, int *error)
{
    finished++;
    finish(user, *error);
    return 1;
}

static int chunk(void *user, const void *part, size_t size, uint64_t offset, unsigned status,
                 int *error)
{
    (void)user, (void)part, (void)size, (void)offset, (void)status, (void)error;
    return 0;
}

static int extents(void *user, const char *context, uint64_t offset, uint32_t *entries,
                   size_t count, int *error)
{
    size_t i;

    (void)context, (void)error;
    for (i = 0; i + 1 < count; i += 2) {
        extent_seen(user, offset, entries[i], entries[i + 1]);
        offset += entries[i];
    }
    return 0;
}

static int64_t issue(task *t, nbd_completion_callback done, uint32_t flags)
{
    const operation *op = &t->op;
    nbd_chunk_callback parts = {chunk, NULL, NULL};
    nbd_extent_callback told = {extents, t, NULL};
    unsigned char *data = t->pieces[0].base;

    switch (op->kind) {
    case READ:
        if (!flags) return nbd_aio_pread(client, data, op->size, op->offset, done, 0);
        return nbd_aio_pread_structured(client, data, op->size, op->offset, parts, done, flags);
    case WRITE: return nbd_aio_pwrite(client, data, op->size, op->offset, done, flags);
    case FLUSH: return nbd_aio_flush(client, done, flags);
    case TRIM: return nbd_aio_trim(client, op->size, op->offset, done, flags);
    case CACHE: return nbd_aio_cache(client, op->size, op->offset, done, flags);
    case ZERO: return nbd_aio_zero(client, op->size, op->offset, done, flags);
    default: return nbd_aio_block_status(client, op->size, op->offset, told, done, flags);
    }
}

static int client_issue(task *t)
{
    nbd_completion_callback done = {completed, t, NULL};
    uint32_t flags = 0;
    int64_t cookie;
    size_t i;

    // libnbd 1.14 sends payloads above the server's maximum.
    if (t->op.refusal == TOO_LONG) return 1;
    for (i = 0; i < sizeof flag_map / sizeof flag_map[0]; i++)
        if (t->op.flags & flag_map[i].ours) flags |= flag_map[i].theirs;
    cookie = issue(t, done, flags);
    if (cookie < 0 && !t->op.refusal) must(cookie, "issued");
    return cookie < 0;
}

static void client_wait(void)
{
    unsigned before = finished;

    while (finished == before) {
        int moved = nbd_poll(client, PATIENCE_MS);

        must(moved, "poll");
        if (moved == 0) die("nothing came in %d ms", (int)PATIENCE_MS);
    }
}
