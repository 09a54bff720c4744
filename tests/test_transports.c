// Transports as a user writes them, those of tests/transports: each carries whole sessions, ends
// by name where the channel is cut, and when any of its calls fails; every request finishes once.
// Client and server take turns in one process.
#define _GNU_SOURCE 1
#include <fcntl.h>

#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "check.h"
#include "stream.h"

#include "transports/one_piece.h"
#include "transports/pipes.h"
#include "transports/socketpair.h"
#include "transports/spi.h"
#include "transports/websocket.h"
#ifdef WITH_URING
#include "transports/uring.h"
#endif

enum {
    DISK = 150000,
    SHORT = 30000, // bytes of the disk that a session moves which is run often
    REQUESTS = 512,
    SLOTS = 16,
    SMALL = 4096, // what a channel holds
    MARKS = 512,
    PATIENCE_MS = 10000, // nobody waits for it but a test that fails
    TURNS_MOST = 1000000
};

static const size_t uncut = (size_t)-1;

// What the client writes, where the server keeps it, where the client reads it to.
static unsigned char written[DISK], disk[DISK], memory[DISK];

/// The server ///

static struct server {
    size_t sent;  // bytes that have left it
    size_t limit; // after so many it is gone
    int polite;   // behind the goodbye it waits until the client sends no more
    int heard_end;
    size_t mark_count;
    size_t marks[MARKS]; // the ends of its messages, in bytes from the start
} server;

static void mark(void)
{
    CHECK(server.mark_count < MARKS);
    server.marks[server.mark_count++] = server.sent + stream.out_size - stream.out_done;
}

static void answer_option(uint32_t option)
{
    if (option == NBD_OPTION_GO) {
        option_reply(option, 3, 12);
        put(0, 2);
        put(DISK, 8);
        put(NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH, 2);
        mark();
    }
    if (option == NBD_OPTION_GO || option == NBD_OPTION_STRUCTURED_REPLY) {
        option_reply(option, 1, 0);
    } else {
        option_reply(option, UINT32_C(0x80000001), 0);
    }
    mark();
    if (option == NBD_OPTION_GO) stream.stage = STAGE_TRANSMISSION;
}

static size_t take_option(void)
{
    size_t size = 16;

    if (arrived() >= size) size += (size_t)get(12, 4);
    if (arrived() < size) return 0;
    answer_option((uint32_t)get(8, 4));
    return size;
}

static void put_chunk(unsigned flags, unsigned type, size_t size)
{
    put(UINT32_C(0x668e33ef), 4);
    put(flags, 2);
    put(type, 2);
    put(get(8, 8), 8);
    put(size, 4);
}

static void put_data(size_t from, size_t size, unsigned flags)
{
    put_chunk(flags, 1, 8 + size);
    put(from, 8);
    memcpy(stream.out + stream.out_size, disk + from, size);
    stream.out_size += size;
    mark();
}

// Reads are answered in two chunks, if they have two bytes.
static size_t take_request(void)
{
    size_t type, from, size, payload;

    if (arrived() < 28) return 0;
    CHECK_EQUAL(get(0, 4), 0x25609513);
    type = (size_t)get(6, 2);
    from = (size_t)get(16, 8);
    size = (size_t)get(24, 4);
    payload = type == 1 ? size : 0;
    CHECK(size <= DISK && from <= DISK - size);
    if (arrived() < 28 + payload) return 0;
    memcpy(disk + from, stream.in + stream.in_done + 28, payload);
    if (type == 2) {
        stream.stage = STAGE_OVER;
    } else if (type == 0) {
        if (size > 1) put_data(from, size / 2, 0);
        put_data(from + size / 2 * (size > 1), size - size / 2 * (size > 1), 1);
    } else {
        put_chunk(1, 0, 0);
        mark();
    }
    return 28 + payload;
}

static size_t take_something(void)
{
    switch (stream.stage) {
    case STAGE_FLAGS:
        if (arrived() < 4) return 0;
        stream.stage = STAGE_OPTIONS;
        return 4;
    case STAGE_OPTIONS: return take_option();
    case STAGE_TRANSMISSION: return take_request();
    default: return arrived();
    }
}

static void serve(void)
{
    size_t size;

    while ((size = take_something()) > 0)
        took(size);
}

static void server_start(size_t limit)
{
    stream.in_size = stream.in_done = stream.out_size = stream.out_done = 0;
    stream.stage = STAGE_FLAGS;
    memset(&server, 0, sizeof server);
    server.limit = limit;
    put_greeting();
    mark();
}

// What is between the server and the channel: bytes that came, and those that may leave.
static void server_takes(const void *bytes, size_t size)
{
    memmove(stream.in, stream.in + stream.in_done, arrived());
    stream.in_size = arrived();
    stream.in_done = 0;
    CHECK(size <= STREAM - stream.in_size);
    memcpy(stream.in + stream.in_size, bytes, size);
    stream.in_size += size;
    serve();
}

static size_t server_offers(void)
{
    size_t size = stream.out_size - stream.out_done, most = server.limit - server.sent;

    return size < most ? size : most;
}

static const unsigned char *server_bytes(void)
{
    return stream.out + stream.out_done;
}

static void server_sent(size_t size)
{
    server.sent += size;
    stream.out_done += size;
    if (stream.out_done < stream.out_size && stream.out_done < STREAM / 2) return;
    memmove(stream.out, stream.out + stream.out_done, stream.out_size - stream.out_done);
    stream.out_size -= stream.out_done;
    stream.out_done = 0;
}

static int server_is_gone(void)
{
    return server.sent == server.limit ||
           (stream.stage == STAGE_OVER && stream.out_done == stream.out_size &&
            (server.heard_end || !server.polite));
}

/// Channels ///

// Both ends of a channel, of which there is one at a time.
static struct ends {
    const nbd_transport *transport; // NULL: the client's bytes are moved by `turn`
    int near[2];                    // descriptors of the client: in, out
    int far_in, far_out;            // of the server; -1 once closed
    int torn;                       // the server's end is an end of the socket only
    int broken;                     // the client's calls fail from now on
} ends;

typedef struct channel {
    const char *name;
    int endless;        // its stream has no end: who is gone is an error
    void (*open)(void); // makes both ends
    void (*pump)(void); // the server moves all that it can
    void (*fail)(void); // lets the calls of the client fail
    void (*turn)(void); // NULL, or in place of nbd_poll
} channel;

static const channel *now;

static void set_non_blocking(int fd)
{
    CHECK_EQUAL(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
}

static void end_far(void)
{
    if (ends.far_out < 0) return;
    if (ends.far_in == ends.far_out)
        shutdown(ends.far_out, SHUT_WR);
    else
        close(ends.far_out);
    ends.far_out = -1;
}

static void close_ends(void)
{
    if (ends.near[1] != ends.near[0] && fcntl(ends.near[1], F_GETFD) >= 0) close(ends.near[1]);
    close(ends.near[0]);
    if (ends.far_in != ends.far_out && ends.far_out >= 0) close(ends.far_out);
    if (ends.far_in >= 0) close(ends.far_in);
}

// Over descriptors, in clear.  The client's side closed first: then nothing can be written.
static void pump_descriptors(void)
{
    unsigned char part[SMALL];
    ssize_t n;
    int moves;

    do {
        moves = 0;
        n = read(ends.far_in, part, sizeof part);
        if (n > 0) server_takes(part, (size_t)n), moves = 1;
        if (n == 0) server.heard_end = 1;
        if (ends.far_out < 0 || server_offers() == 0) continue;
        n = write(ends.far_out, server_bytes(), server_offers());
        if (n > 0) server_sent((size_t)n), moves = 1;
    } while (moves);
    if (server_is_gone()) end_far();
}

static void make_socketpair(void)
{
    int pair[2], small = SMALL;

    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    CHECK_EQUAL(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
    CHECK_EQUAL(setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
    set_non_blocking(pair[0]);
    set_non_blocking(pair[1]);
    ends.near[0] = ends.near[1] = pair[0];
    ends.far_in = ends.far_out = pair[1];
}

/// Pipes ///

static pipes over_pipes;

static void open_pipes(void)
{
    int to_client[2], to_server[2], i;

    CHECK_EQUAL(pipe(to_client), 0);
    CHECK_EQUAL(pipe(to_server), 0);
    for (i = 0; i < 2; i++) {
        set_non_blocking(to_client[i]);
        set_non_blocking(to_server[i]);
    }
    CHECK(fcntl(to_client[1], F_SETPIPE_SZ, SMALL) >= SMALL);
    CHECK(fcntl(to_server[1], F_SETPIPE_SZ, SMALL) >= SMALL);
    ends.near[0] = to_client[0];
    ends.near[1] = to_server[1];
    ends.far_in = to_server[0];
    ends.far_out = to_client[1];
    pipes_init(&over_pipes, to_client[0], to_server[1]);
    ends.transport = &over_pipes.transport;
}

static void fail_pipes(void)
{
    over_pipes.in = -1;
    over_pipes.out = -1;
}

/// Socketpair, one piece ///

static socketpair_io over_socketpair;
static one_piece over_one_piece;

static void open_socketpair(void)
{
    make_socketpair();
    socketpair_init(&over_socketpair, ends.near[0]);
    ends.transport = &over_socketpair.transport;
}

static void fail_socketpair(void)
{
    over_socketpair.fd = -1;
}

static void open_one_piece(void)
{
    make_socketpair();
    one_piece_init(&over_one_piece, ends.near[0]);
    ends.transport = &over_one_piece.transport;
}

static void fail_one_piece(void)
{
    over_one_piece.fd = -1;
}

/// SPI ///

// The slave takes now all, now nothing, now a little.
static struct slave {
    unsigned transfers;
    unsigned room;         // that it told
    unsigned promised;     // that the master told
    unsigned length, more; // what its frames say too much: bytes, and room
} slave;
static spi over_spi;

static int exchange(void *bus, const unsigned char *out, unsigned char *in)
{
    static const unsigned char rooms[] = {SPI_BYTES, SPI_BYTES, 0, 7, SPI_BYTES, 1};
    struct slave *s = (struct slave *)bus;
    size_t size = server_offers();

    if (ends.broken) return -1;
    memset(in, 0xff, SPI_FRAME);
    if (server.sent == server.limit) return 0;
    if (size > s->promised) size = s->promised;
    memcpy(in + 2, server_bytes(), size);
    server_sent(size);
    CHECK(out[0] <= s->room && out[1] <= SPI_BYTES);
    server_takes(out + 2, out[0]);
    s->promised = out[1];
    s->room = rooms[++s->transfers % sizeof rooms];
    in[0] = (unsigned char)(size + s->length);
    in[1] = (unsigned char)(s->room + s->more);
    return 0;
}

static void open_spi(void)
{
    memset(&slave, 0, sizeof slave);
    spi_init(&over_spi, exchange, &slave);
    ends.transport = &over_spi.transport;
    ends.near[0] = ends.near[1] = ends.far_in = ends.far_out = -1;
}

static void do_nothing(void)
{
}

/// WebSocket ///

enum { RAW = 1 << 17 };

// The server's side: frames of any size, messages of several, pings between them.
static struct far_frames {
    unsigned char in[RAW], out[RAW];
    size_t in_size, out_size, out_sent;
    int in_message; // the last frame was not the end of its message
    int closing;    // a close frame was made
    unsigned pings, pongs;
    unsigned answered; // number of the last ping that was
} frames;
static websocket over_websocket;

static uint32_t next_mask(void)
{
    return check_random(UINT32_MAX);
}

static void frame_byte(size_t value)
{
    frames.out[frames.out_size++] = (unsigned char)value;
}

static void make_frame(int opcode, int last, const void *bytes, size_t size)
{
    unsigned width = size < 126 ? 0 : size < 65536 ? 2 : 8;

    frame_byte((last ? 0x80u : 0u) | (unsigned)opcode);
    frame_byte(width == 8 ? 127 : width == 2 ? 126 : size);
    while (width--)
        frame_byte(width < 4 ? size >> 8 * width & 255 : 0);
    memcpy(frames.out + frames.out_size, bytes, size);
    frames.out_size += size;
}

// Each ping has its own payload.
static size_t ping_payload(unsigned number, unsigned char *to)
{
    size_t k, size = number * 37 % (WEBSOCKET_CONTROL + 1);

    for (k = 0; k < size; k++)
        to[k] = (unsigned char)(number + k);
    return size;
}

static void make_ping(void)
{
    unsigned char payload[WEBSOCKET_CONTROL];
    size_t size = ping_payload(++frames.pings, payload);

    make_frame(WEBSOCKET_PING, 1, payload, size);
}

// Answers a ping behind those that were answered; some may stay without.
static void take_pong(const unsigned char *got, size_t size)
{
    unsigned char payload[WEBSOCKET_CONTROL];

    do {
        CHECK(frames.answered++ < frames.pings);
    } while (ping_payload(frames.answered, payload) != size || memcmp(payload, got, size) != 0);
    frames.pongs++;
}

static void make_something(void)
{
    static const unsigned sizes[] = {1, 125, 126, 4000, 70000};
    size_t size = server_offers(), most = sizes[check_random(5)];
    int last = check_random(3) == 0;

    frames.out_size = frames.out_sent = 0;
    if (check_random(4) == 0) make_ping();
    if (size > most) size = most;
    make_frame(frames.in_message ? 0 : WEBSOCKET_BINARY, last, server_bytes(), size);
    frames.in_message = !last;
    server_sent(size);
}

static void make_end(void)
{
    frames.out_size = frames.out_sent = 0;
    if (ends.torn)
        frame_byte(0x80 | WEBSOCKET_BINARY);
    else
        make_frame(WEBSOCKET_CLOSE, 1, "\3\350", 2);
    frames.closing = 1;
}

static void take_frame(int opcode, unsigned char *payload, size_t size, const unsigned char *mask)
{
    size_t k;

    for (k = 0; k < size; k++)
        payload[k] ^= mask[k % 4];
    if (opcode == WEBSOCKET_BINARY) {
        server_takes(payload, size);
    } else if (opcode == WEBSOCKET_PONG) {
        take_pong(payload, size);
    } else {
        CHECK_EQUAL(opcode, WEBSOCKET_CLOSE);
        CHECK(!server.heard_end);
        server.heard_end = 1;
    }
}

// Takes the frames that are whole.
static void take_frames(void)
{
    size_t at = 0, head, size;

    while (frames.in_size - at >= 2) {
        const unsigned char *p = frames.in + at;

        CHECK(p[0] & 0x80 && p[1] & 0x80 && p[1] != 0xff);
        head = p[1] == 0xfe ? 8 : 6;
        if (frames.in_size - at < head) break;
        size = head == 8 ? (size_t)p[2] << 8 | p[3] : p[1] & 127u;
        if (frames.in_size - at < head + size) break;
        take_frame(p[0] & 15, frames.in + at + head, size, p + head - 4);
        at += head + size;
    }
    frames.in_size -= at;
    memmove(frames.in, frames.in + at, frames.in_size);
}

static void pump_frames(void)
{
    ssize_t n;
    int moves;

    do {
        moves = 0;
        n = read(ends.far_in, frames.in + frames.in_size, sizeof frames.in - frames.in_size);
        if (n > 0) frames.in_size += (size_t)n, take_frames(), moves = 1;
        if (ends.far_out < 0) continue;
        if (frames.out_sent == frames.out_size && server_offers() > 0) make_something();
        if (frames.out_sent == frames.out_size && server_is_gone() && !frames.closing) make_end();
        n = write(ends.far_out, frames.out + frames.out_sent, frames.out_size - frames.out_sent);
        if (n > 0) frames.out_sent += (size_t)n, moves = 1;
    } while (moves);
    if (frames.closing && frames.out_sent == frames.out_size) end_far();
}

static void open_websocket(void)
{
    memset(&frames, 0, sizeof frames);
    make_socketpair();
    websocket_init(&over_websocket, ends.near[0], next_mask);
    ends.transport = &over_websocket.transport;
}

static void fail_websocket(void)
{
    over_websocket.fd = -1;
}

/// The session ///

static struct session {
    nbd_client client;
    nbd_slot slots[SLOTS];
    unsigned char buffer[NBD_BUFFER_NAMES];
    nbd_op plan[REQUESTS];
    size_t slot_count;
    size_t count, writes; // of the plan: all, and those in front that write
    size_t issued, done, succeeded;
    unsigned times[REQUESTS]; // how often it finished
    int errors[REQUESTS];
    int ready, closed, error; // events: READY, CLOSED, and what that said
    nbd_transport hooks;      // of the channel, with `calls` counted
    size_t calls, fail_at;    // from this call on, counted from 1, the channel fails; 0: never
} session;

static void add_to_plan(uint32_t command, size_t offset, size_t size)
{
    nbd_op *op = &session.plan[session.count];

    CHECK(session.count < REQUESTS);
    op->command = command;
    op->offset = offset;
    op->size = size;
    if (command == NBD_READ) op->buffer = memory + offset;
    if (command == NBD_WRITE) op->data = written + offset;
    op->user = &session.times[session.count++];
}

static void plan_range(uint32_t command, size_t total, const size_t *sizes, size_t count)
{
    size_t offset, size, i = 0;

    for (offset = 0; offset < total; offset += size) {
        size = sizes[i++ % count];
        if (size > total - offset) size = total - offset;
        add_to_plan(command, offset, size);
    }
}

// All of `total` bytes is written, then read, each in its own pieces.
static void make_plan(size_t total)
{
    static const size_t writes[] = {1, 30, 4096, 31, 512, 20000, 4097, 3};
    static const size_t reads[] = {7, 512, 16384, 29, 4096, 1, 33000};

    memset(disk, 0, total);
    memset(memory, 0, total);
    plan_range(NBD_WRITE, total, writes, sizeof writes / sizeof writes[0]);
    session.writes = session.count;
    plan_range(NBD_READ, total, reads, sizeof reads / sizeof reads[0]);
    add_to_plan(NBD_FLUSH, 0, 0);
}

static void count_call(void)
{
    if (++session.calls != session.fail_at) return;
    ends.broken = 1;
    now->fail();
}

static ptrdiff_t counted_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    count_call();
    return ends.transport->send(context, iov, count, flags);
}

static ptrdiff_t counted_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    count_call();
    return ends.transport->recv(context, iov, count);
}

// The server is given its turn before the client waits.
static int pumped_wait(void *context, unsigned wants, int *timeout_ms)
{
    now->pump();
    return ends.transport->wait(context, wants, timeout_ms);
}

static void prepare(const channel *of, size_t buffer_size, uint32_t slots, size_t total,
                    size_t limit)
{
    nbd_config config = NBD_ZERO;

    now = of;
    memset(&ends, 0, sizeof ends);
    memset(&session, 0, sizeof session);
    server_start(limit);
    of->open();
    server.polite = !ends.transport || ends.transport->finish;
    make_plan(total);
    config.slots = session.slots;
    config.slot_count = slots;
    session.slot_count = slots;
    config.buffer = session.buffer;
    config.buffer_size = buffer_size;
    CHECK_EQUAL(nbd_init(&session.client, &config), 0);
    if (!ends.transport) return;
    session.hooks = *ends.transport;
    session.hooks.send = counted_send;
    session.hooks.recv = counted_recv;
    session.hooks.wait = pumped_wait;
}

// Reads wait for all writes.
static void issue_more(void)
{
    while (session.issued < session.count && session.issued < session.done + session.slot_count &&
           (session.issued < session.writes || session.done >= session.writes)) {
        if (nbd_issue(&session.client, &session.plan[session.issued], NULL)) return;
        session.issued++;
    }
    if (session.done == session.count && nbd_phase(&session.client) == NBD_PHASE_TRANSMISSION) {
        CHECK_EQUAL(nbd_disconnect(&session.client), 0);
    }
}

static void handle_event(const nbd_event *event)
{
    ptrdiff_t which;

    session.ready += event->type == NBD_EVENT_READY;
    if (event->type == NBD_EVENT_DONE) {
        which = (unsigned *)event->user - session.times;
        session.times[which]++;
        session.errors[which] = event->error;
        session.done++;
        session.succeeded += !event->error;
    }
    if (event->type == NBD_EVENT_CLOSED) {
        session.closed++;
        session.error = event->error;
    }
}

static void poll_turn(void)
{
    unsigned wants = nbd_wants(&session.client);
    int ready = 0, patience = PATIENCE_MS;

    // Its goodbye is out, and no end will come.
    if (now->endless && nbd_phase(&session.client) == NBD_PHASE_CLOSING &&
        !(wants & (NBD_WANT_WRITE | NBD_WANT_NOW))) {
        CHECK_EQUAL(nbd_abandon(&session.client), 0);
        return;
    }
    if (!(wants & NBD_WANT_NOW) && !ends.broken) {
        ready = session.hooks.wait(session.hooks.context, wants, &patience);
        CHECK(ready != 0); // else both sides wait
    }
    // What fails in waiting fails in moving, too.
    if (ready < 0 || ends.broken) ready = NBD_WANT_READ | NBD_WANT_WRITE;
    CHECK_EQUAL(nbd_poll(&session.client, (unsigned)ready), 0);
}

static void run_session(void)
{
    nbd_event event;
    unsigned turns;

    CHECK_EQUAL(nbd_connect(&session.client, ends.transport ? &session.hooks : NULL), 0);
    for (turns = 0; !session.closed; turns++) {
        CHECK(turns < TURNS_MOST);
        if (now->turn)
            now->turn();
        else
            poll_turn();
        while (nbd_next(&session.client, &event))
            handle_event(&event);
        issue_more();
    }
    CHECK_EQUAL(nbd_wants(&session.client), 0);
    close_ends();
}

/// Verdicts ///

static void each_finished_once(int error)
{
    size_t i;

    CHECK_EQUAL(session.closed, 1);
    CHECK_EQUAL(session.done, session.issued);
    for (i = 0; i < session.issued; i++) {
        CHECK_EQUAL(session.times[i], 1);
        if (session.errors[i]) CHECK_EQUAL(session.errors[i], error);
    }
}

static void all_was_moved(size_t total)
{
    CHECK_EQUAL(session.ready, 1);
    CHECK_EQUAL(session.succeeded, session.count);
    each_finished_once(0);
    CHECK_EQUAL(session.error, now->endless ? NBD_ERR_ABANDONED : 0);
    CHECK_EQUAL(stream.stage, STAGE_OVER);
    CHECK_BYTES(disk, written, total);
    CHECK_BYTES(memory, written, total);
}

static int is_mark(size_t place)
{
    size_t i;

    for (i = 0; i < server.mark_count && server.marks[i] != place; i++) {
    }
    return place == 0 || i < server.mark_count;
}

/// Rules ///

static void carry(const channel *of, size_t buffer_size, uint32_t slots)
{
    prepare(of, buffer_size, slots, DISK, uncut);
    run_session();
    all_was_moved(DISK);
    CHECK_EQUAL(nbd_count(&session.client)->in_flight_max, slots);
}

static void carries_whole_sessions(const void *of)
{
    static const size_t sizes[] = {NBD_BUFFER_MIN, 1000, NBD_BUFFER_NAMES};
    size_t i;

    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        carry((const channel *)of, sizes[i], 1);
        carry((const channel *)of, sizes[i], SLOTS);
    }
}

static void cut_at(const channel *of, size_t limit, int torn)
{
    prepare(of, NBD_BUFFER_MIN, SLOTS, SHORT, limit);
    ends.torn = torn;
    snprintf(check.where, sizeof check.where, "cut after %lu bytes", (unsigned long)limit);
    run_session();
    CHECK(session.succeeded < session.count);
    CHECK_EQUAL(session.error, of->endless || torn ? NBD_ERR_TRANSPORT
                               : is_mark(limit)    ? NBD_ERR_CLOSED
                                                   : NBD_ERR_TRUNCATED);
    each_finished_once(session.error);
}

// After each byte of the handshake, and of a few replies; then around each end of a message.
static void is_cut_anywhere(const channel *of, int torn)
{
    static size_t marks[MARKS];
    size_t count, i, limit;

    prepare(of, NBD_BUFFER_MIN, SLOTS, SHORT, uncut);
    run_session();
    all_was_moved(SHORT);
    count = server.mark_count;
    memcpy(marks, server.marks, sizeof marks);
    for (limit = 0; limit < 300; limit++)
        cut_at(of, limit, torn);
    for (i = 0; i + 1 < count; i++) {
        for (limit = marks[i] - 1; limit <= marks[i] + 1; limit++)
            cut_at(of, limit, torn);
    }
}

static void may_be_cut_anywhere(const void *of)
{
    is_cut_anywhere((const channel *)of, 0);
}

static void may_be_torn_anywhere(const void *of)
{
    is_cut_anywhere((const channel *)of, 1);
}

// Until a session is over before its call to fail.
static void may_fail_at_any_call(const void *of)
{
    size_t at = 0;

    do {
        prepare((const channel *)of, NBD_BUFFER_MIN, SLOTS, SHORT, uncut);
        session.fail_at = ++at;
        snprintf(check.where, sizeof check.where, "call %lu fails", (unsigned long)at);
        run_session();
        if (ends.broken && session.succeeded < session.count) {
            CHECK_EQUAL(session.error, NBD_ERR_TRANSPORT);
        }
        each_finished_once(session.error);
    } while (ends.broken);
    all_was_moved(SHORT);
    CHECK(at > 10);
}

// The same requests one by one.
static int sync_requests(nbd_sync *sync)
{
    int error = 0;
    size_t i;

    for (i = 0; i + 1 < session.count && !error; i++) {
        const nbd_op *op = &session.plan[i];

        error = i < session.writes ? nbd_sync_write(sync, op->data, (size_t)op->size, op->offset, 0)
                                   : nbd_sync_read(sync, op->buffer, (size_t)op->size, op->offset);
    }
    return error ? error : nbd_sync_flush(sync);
}

static void serves_blocking_calls(const void *of)
{
    nbd_sync sync = NBD_ZERO;

    prepare((const channel *)of, NBD_BUFFER_MIN, SLOTS, DISK, uncut);
    sync.client = &session.client;
    sync.timeout_ms = PATIENCE_MS;
    CHECK_EQUAL(nbd_sync_connect(&sync, &session.hooks), 0);
    CHECK_EQUAL(sync_requests(&sync), 0);
    // Where no end comes the time limit is the end.
    CHECK_EQUAL(nbd_sync_close(&sync), now->endless ? NBD_ERR_TIMEOUT : 0);
    close_ends();
    CHECK_EQUAL(stream.stage, STAGE_OVER);
    CHECK_BYTES(disk, written, DISK);
    CHECK_BYTES(memory, written, DISK);
}

static void answers_pings(const void *of)
{
    carry((const channel *)of, NBD_BUFFER_MIN, SLOTS);
    CHECK(frames.pongs > 0);
}

static void is_given_joined_pieces(const void *of)
{
    carry((const channel *)of, NBD_BUFFER_MIN, SLOTS);
    CHECK(nbd_count(&session.client)->staged > 0);
}

static void refuses_impossible_frames(const void *of)
{
    int what;

    for (what = 0; what < 2; what++) {
        prepare((const channel *)of, NBD_BUFFER_MIN, SLOTS, SHORT, uncut);
        *(what ? &slave.more : &slave.length) = 1;
        run_session();
        CHECK_EQUAL(session.ready, 0);
        CHECK_EQUAL(session.error, NBD_ERR_TRANSPORT);
    }
}

/// io_uring ///

#ifdef WITH_URING

static uring over_uring;

static void open_uring(void)
{
    make_socketpair();
    CHECK_EQUAL(fcntl(ends.near[0], F_SETFL, 0), 0);
    if (over_uring.fd) io_uring_queue_exit(&over_uring.ring);
    CHECK_EQUAL(uring_init(&over_uring, ends.near[0]), 0);
}

// Sending fails, receiving hangs.
static void fail_uring(void)
{
    shutdown(over_uring.fd, SHUT_WR);
}

// The server is given its turn before the client waits.
static void turn_uring(void)
{
    count_call();
    CHECK(uring_submit(&over_uring, &session.client) >= 0);
    now->pump();
    if (over_uring.ways[0].busy || over_uring.ways[1].busy) {
        CHECK_EQUAL(uring_complete(&over_uring, &session.client), 0);
    }
}

static int can_uring(void)
{
    struct io_uring ring;
    int error = io_uring_queue_init(4, &ring, 0);

    if (!error) io_uring_queue_exit(&ring);
    return !error;
}

#endif

/// All of them ///

static const channel channels[] = {
    {"pipes", 0, open_pipes, pump_descriptors, fail_pipes, NULL},
    {"socketpair", 0, open_socketpair, pump_descriptors, fail_socketpair, NULL},
    {"one_piece", 0, open_one_piece, pump_descriptors, fail_one_piece, NULL},
    {"spi", 1, open_spi, do_nothing, do_nothing, NULL},
    {"websocket", 0, open_websocket, pump_frames, fail_websocket, NULL},
#ifdef WITH_URING
    {"uring", 0, open_uring, pump_descriptors, fail_uring, turn_uring},
#endif
};

static void named_case(const channel *of, const char *rule, void (*run)(const void *of))
{
    char name[80];

    snprintf(name, sizeof name, "%s_%s", of->name, rule);
    check_case_on(name, run, of);
}

static void every_rule(const channel *of)
{
    named_case(of, "carries_whole_sessions", carries_whole_sessions);
    named_case(of, "may_be_cut_anywhere", may_be_cut_anywhere);
    named_case(of, "may_fail_at_any_call", may_fail_at_any_call);
    if (!of->turn) named_case(of, "serves_blocking_calls", serves_blocking_calls);
    if (of->open == open_one_piece) {
        named_case(of, "is_given_joined_pieces", is_given_joined_pieces);
    }
    if (of->open == open_spi) {
        named_case(of, "refuses_impossible_frames", refuses_impossible_frames);
    }
    if (of->open != open_websocket) return;
    named_case(of, "may_be_torn_anywhere", may_be_torn_anywhere);
    named_case(of, "answers_pings", answers_pings);
}

int main(int argc, char **argv)
{
    size_t i, count = sizeof channels / sizeof channels[0];

    check_begin(argc, argv);
    signal(SIGPIPE, SIG_IGN); // pipes have no MSG_NOSIGNAL
    for (i = 0; i < DISK; i++)
        written[i] = (unsigned char)(i * 7 + i / 251 + 1);
#ifdef WITH_URING
    if (!can_uring()) {
        puts("skip io_uring carries a client: the kernel refuses it");
        count--;
    }
#else
    puts("skip io_uring carries a client: liburing is not installed");
#endif
    for (i = 0; i < count; i++)
        every_rule(&channels[i]);
    return check_end();
}
