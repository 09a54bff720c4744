// Plays the random sessions of tests/differential.h with nbd.h.

#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "differential.h"

enum { PATIENCE_MS = 30000 };

static nbd_client client;
static nbd_sync session_sync;
static nbd_slot slots[DEPTH_MOST];
static unsigned char buffer[NBD_BUFFER_GOOD];
static nbd_context contexts[1];
static nbd_iovec iov[DEPTH_MOST][PIECES_MOST];
static unsigned char status_payload[DEPTH_MOST][12];

static const uint32_t commands[KINDS] = {NBD_READ,  NBD_WRITE,        NBD_FLUSH,       NBD_TRIM,
                                         NBD_CACHE, NBD_WRITE_ZEROES, NBD_BLOCK_STATUS};

static const struct {
    unsigned ours, theirs;
} flag_map[] = {{FUA, NBD_FUA},         {NO_HOLE, NBD_NO_HOLE},     {DF, NBD_DF},
                {REQ_ONE, NBD_REQ_ONE}, {FAST_ZERO, NBD_FAST_ZERO}, {NO_INIT, NBD_NO_INIT},
                {SPARSE, NBD_SPARSE}};

static const struct {
    unsigned can;
    uint32_t command, flags;
} offers[] = {{CAN_FLUSH, NBD_FLUSH, 0},
              {CAN_FUA, NBD_WRITE, NBD_FUA},
              {CAN_TRIM, NBD_TRIM, 0},
              {CAN_ZERO, NBD_WRITE_ZEROES, 0},
              {CAN_FAST_ZERO, NBD_WRITE_ZEROES, NBD_FAST_ZERO},
              {CAN_DF, NBD_READ, NBD_DF},
              {CAN_CACHE, NBD_CACHE, 0},
              {CAN_STATUS, NBD_BLOCK_STATUS, 0}};

static unsigned client_pieces(unsigned wanted)
{
    return wanted;
}

static const char *client_protocol(void)
{
    static const char *const names[] = {"simple", "structured", "extended"};

    return names[nbd_negotiated(&client)->protocol];
}

static void must(int error, const char *what)
{
    if (error) die("%s: %s. %s", what, nbd_strerror(error), nbd_detail(&client));
}

static void client_open(const char *uri, int simple, unsigned depth, offer *offered)
{
    static const size_t sizes[] = {NBD_BUFFER_MIN, 1000, NBD_BUFFER_NAMES, NBD_BUFFER_GOOD};
    static const char *const queries[] = {"base:allocation"};
    static char text[1024];
    nbd_config config = NBD_ZERO;
    nbd_uri parsed;
    size_t i;

    must(nbd_uri_parse(&parsed, uri, text, sizeof text), uri);
    memset(&session_sync, 0, sizeof session_sync);
    session_sync.client = &client;
    session_sync.timeout_ms = PATIENCE_MS;
    config.flags = simple ? NBD_WITHOUT_STRUCTURED_REPLY : 0;
    config.slots = slots;
    config.slot_count = depth;
    config.buffer = buffer;
    config.buffer_size = sizes[s.seed % 4];
    config.export_name = parsed.export_name;
    config.queries = queries;
    config.query_count = 1;
    config.contexts = contexts;
    config.context_count = 1;
    must(nbd_init(&client, &config), "init");
    must(nbd_sync_open(&session_sync, &parsed.address), "open");
    offered->size = nbd_negotiated(&client)->size;
    offered->minimum = nbd_negotiated(&client)->minimum_block;
    offered->maximum = nbd_negotiated(&client)->maximum_payload;
    offered->can = 0;
    for (i = 0; i < sizeof offers / sizeof offers[0]; i++)
        if (nbd_allows(&client, offers[i].command, offers[i].flags)) offered->can |= offers[i].can;
}

static void client_close(void)
{
    must(nbd_sync_close(&session_sync), "close");
}

static void set_memory(nbd_op *op, const task *t)
{
    nbd_iovec *pieces = iov[t - s.tasks];
    unsigned i;

    if (t->piece_count == 1) {
        if (t->op.kind == WRITE)
            op->data = t->pieces[0].base;
        else
            op->buffer = t->pieces[0].base;
        return;
    }
    for (i = 0; i < t->piece_count; i++) {
        pieces[i].base = t->pieces[i].base;
        pieces[i].size = t->pieces[i].size;
    }
    op->iov = t->piece_count ? pieces : NULL;
    op->iov_count = t->piece_count;
}

// To ask for the one context by its number is the same as to ask for all.
static void choose_contexts(nbd_op *op, const task *t)
{
    static const uint32_t first[] = {0};
    const nbd_export *got = nbd_negotiated(&client);

    if (t->op.kind != STATUS || !(t->op.seed & 1) || !(got->flags & NBD_OFFERS_STATUS_PAYLOAD))
        return;
    if (got->protocol != NBD_PROTOCOL_EXTENDED) return;
    op->contexts = first;
    op->context_count = 1;
    op->buffer = status_payload[t - s.tasks];
}

static int client_issue(task *t)
{
    static const int refusals[] = {
        [NOT_OFFERED] = NBD_ERR_UNSUPPORTED, [EMPTY] = NBD_ERR_ZERO_SIZE,
        [TOO_LONG] = NBD_ERR_PAYLOAD,        [PAST_END] = NBD_ERR_BOUNDS,
        [MISALIGNED] = NBD_ERR_BLOCK_SIZE,
    };
    nbd_op op = NBD_ZERO;
    size_t i;
    int error;

    op.command = commands[t->op.kind];
    op.offset = t->op.offset;
    op.size = t->op.size;
    op.user = t;
    for (i = 0; i < sizeof flag_map / sizeof flag_map[0]; i++)
        if (t->op.flags & flag_map[i].ours) op.flags |= flag_map[i].theirs;
    set_memory(&op, t);
    choose_contexts(&op, t);
    error = nbd_issue(&client, &op, NULL);
    if (error != refusals[t->op.refusal])
        die("issued: %s, not %s", nbd_strerror(error), nbd_strerror(refusals[t->op.refusal]));
    return error != 0;
}

// Returns 1 if a task is finished.
static int take(const nbd_event *event)
{
    task *t = event->user;

    switch (event->type) {
    case NBD_EVENT_HOLE: hole_seen(t, event->offset, event->size); return 0;
    case NBD_EVENT_EXTENT: extent_seen(t, event->offset, event->size, event->flags); return 0;
    case NBD_EVENT_DONE:
        s.now = t;
        if (event->error < 0) must(event->error, event->detail);
        finish(t, event->error);
        return 1;
    case NBD_EVENT_CLOSED: must(event->error ? event->error : NBD_ERR_CLOSED, event->detail);
    }
    return 0;
}

static void client_wait(void)
{
    const nbd_transport *transport = &session_sync.io.transport;
    nbd_event event;

    for (;;) {
        unsigned wants;
        int ready = 0, left_ms = PATIENCE_MS;

        while (nbd_next(&client, &event))
            if (take(&event)) return;
        wants = nbd_wants(&client);
        if (!(wants & NBD_WANT_NOW)) {
            ready = transport->wait(transport->context, wants, &left_ms);
            if (ready <= 0) die("nothing came in %d ms", (int)PATIENCE_MS);
        }
        must(nbd_poll(&client, (unsigned)ready), "poll");
    }
}
