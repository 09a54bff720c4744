// Calls and pieces, counted: how few calls of the transport the library needs, and that
// no poll ends with NBD_SEND_MORE outstanding.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

enum { DEPTH = 64, BLOCK = 4096, STREAM = 1 << 20 };

/// A server that answers every request at once ///
//
// It reads oldstyle transmission requests by their own headers, and keeps the replies
// until the client fetches them.

typedef struct counting {
    unsigned char in[STREAM]; // bytes of the client that are not a whole request yet
    size_t in_size;
    unsigned char out[STREAM];
    size_t out_size;
    size_t out_taken;
    unsigned sends;     // calls that moved bytes
    unsigned receives;  // the same
    unsigned fruitless; // calls of either hook that moved nothing
    unsigned pieces;    // of the last send
    unsigned requests;  // that were answered
    int more;           // the last send carried NBD_SEND_MORE and did not block after
    int hold_replies;
    size_t send_most; // bytes that a send moves at most, if not 0
    int random;       // moves random amounts, and blocks at random
    nbd_transport transport;
} counting;

static counting server;
static nbd_client client;
static nbd_slot slots[DEPTH];
static unsigned char buffer[NBD_BUFFER_GOOD];
static unsigned char memory[DEPTH][BLOCK];

static uint64_t number_at(const unsigned char *bytes, unsigned width)
{
    uint64_t value = 0;

    while (width--)
        value = value << 8 | *bytes++;
    return value;
}

static void answer(const unsigned char *header)
{
    size_t size = number_at(header + 6, 2) == 0 ? (size_t)number_at(header + 24, 4) : 0;
    unsigned char *at = server.out + server.out_size;

    CHECK(16 + size <= STREAM - server.out_size);
    memcpy(at, "\147\104\146\230\0\0\0\0", 8);
    memcpy(at + 8, header + 8, 8);
    export_fill(at + 16, number_at(header + 16, 8), size);
    server.out_size += 16 + size;
    server.requests++;
}

// Bytes of the first request; 0 while it is not there as a whole.
static size_t whole_request(const unsigned char *bytes, size_t size)
{
    size_t all = 28;

    if (size < all) return 0;
    CHECK_EQUAL(number_at(bytes, 4), 0x25609513);
    if (number_at(bytes + 6, 2) == 1) all += (size_t)number_at(bytes + 24, 4);
    return size < all ? 0 : all;
}

static void answer_all(void)
{
    size_t done = 0, size;

    while ((size = whole_request(server.in + done, server.in_size - done)) > 0) {
        if (number_at(server.in + done + 6, 2) != 2) answer(server.in + done);
        done += size;
    }
    memmove(server.in, server.in + done, server.in_size - done);
    server.in_size -= done;
}

static size_t random_limit(size_t size)
{
    return server.random ? smaller(size, 1 + check_random(6000)) : size;
}

static ptrdiff_t count_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    size_t offered = iov_sum(iov, count);
    size_t left = random_limit(server.send_most ? smaller(server.send_most, offered) : offered);
    size_t moved = left;
    unsigned i;

    CHECK(context == &server && moved > 0);
    server.more = 0;
    if (server.random && check_random(4) == 0) {
        server.fruitless++;
        return NBD_IO_WRITE;
    }
    for (i = 0; i < count && left; i++) {
        size_t n = smaller(iov[i].size, left);

        CHECK(n <= STREAM - server.in_size);
        memcpy(server.in + server.in_size, iov[i].base, n);
        server.in_size += n;
        left -= n;
    }
    server.sends++;
    server.pieces = count;
    server.more = (flags & NBD_SEND_MORE) != 0;
    answer_all();
    return (ptrdiff_t)moved;
}

static ptrdiff_t count_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    size_t waiting = server.hold_replies ? 0 : server.out_size - server.out_taken;
    size_t left = random_limit(smaller(waiting, iov_sum(iov, count))), moved = left;
    unsigned i;

    CHECK(context == &server && iov_sum(iov, count) > 0);
    if (!moved || (server.random && check_random(4) == 0)) {
        server.fruitless++;
        return NBD_IO_READ;
    }
    for (i = 0; i < count && left; i++) {
        size_t n = smaller(iov[i].size, left);

        memcpy(iov[i].base, server.out + server.out_taken, n);
        server.out_taken += n;
        left -= n;
    }
    server.receives++;
    if (server.out_taken == server.out_size) server.out_taken = server.out_size = 0;
    return (ptrdiff_t)moved;
}

static void poll_once(void)
{
    CHECK_EQUAL(nbd_poll(&client, NBD_WANT_READ | NBD_WANT_WRITE), 0);
    CHECK(!server.more);
}

static void ready(uint32_t transport_flags)
{
    static const unsigned char greeting[152] =
        "NBDMAGIC\0\0\102\2\201\206\22\123\0\0\0\0\0\20\0\0\0\0\15\155";
    nbd_config config = NBD_ZERO;
    nbd_event event;

    memset(&server, 0, sizeof server);
    server.transport.context = &server;
    server.transport.send = count_send;
    server.transport.recv = count_recv;
    server.transport.flags = transport_flags;
    memcpy(server.out, greeting, sizeof greeting);
    server.out_size = sizeof greeting;
    config.slots = slots;
    config.slot_count = DEPTH;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_connect(&client, &server.transport), 0);
    poll_once();
    CHECK_EQUAL(nbd_next(&client, &event), 1);
    CHECK_EQUAL(event.type, NBD_EVENT_READY);
    CHECK_EQUAL(nbd_next(&client, &event), 0);
    server.sends = server.receives = server.fruitless = 0;
}

static void issue(uint32_t command, unsigned place, uint64_t size)
{
    nbd_op op = NBD_ZERO;

    op.command = command;
    op.offset = place * (uint64_t)BLOCK;
    op.size = size;
    op.user = memory[place];
    if (command == NBD_READ) op.buffer = memory[place];
    if (command == NBD_WRITE) op.data = memory[place];
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
}

// Pulls the events that are there; all of them are successes.
static unsigned pull(void)
{
    nbd_event event;
    unsigned done = 0;

    while (nbd_next(&client, &event)) {
        CHECK_EQUAL(event.type, NBD_EVENT_DONE);
        CHECK_EQUAL(event.error, 0);
        done++;
    }
    return done;
}

/// The counts ///

static void queued_writes_leave_in_one_send(void)
{
    unsigned i;

    ready(NBD_SHORT_IS_DRY);
    server.hold_replies = 1;
    for (i = 0; i < DEPTH; i++)
        issue(NBD_WRITE, i, BLOCK);
    poll_once();
    CHECK_EQUAL(server.sends, 1);
    CHECK_EQUAL(server.pieces, 2 * DEPTH);
    CHECK_EQUAL(server.requests, DEPTH);
    CHECK_EQUAL(nbd_count(&client)->in_flight, DEPTH);
}

static void queued_reads_leave_in_one_piece(void)
{
    unsigned i;

    ready(NBD_SHORT_IS_DRY);
    server.hold_replies = 1;
    for (i = 0; i < DEPTH; i++)
        issue(NBD_READ, i, BLOCK);
    poll_once();
    CHECK_EQUAL(server.sends, 1);
    CHECK_EQUAL(server.pieces, 1);
    CHECK_EQUAL(server.requests, DEPTH);
}

static void waiting_small_replies_are_taken_in_two_receives(void)
{
    unsigned i;

    ready(NBD_SHORT_IS_DRY);
    server.hold_replies = 1;
    for (i = 0; i < DEPTH; i++)
        issue(NBD_READ, i, 16);
    poll_once();
    CHECK_EQUAL(pull(), 0);
    server.hold_replies = 0;
    server.receives = server.fruitless = 0;
    poll_once();
    CHECK(server.receives + server.fruitless <= 2);
    CHECK_EQUAL(pull(), DEPTH);
}

// The receive that would find nothing is saved where the transport allows.
static void short_receive_is_the_last_if_the_transport_says_so(void)
{
    ready(NBD_SHORT_IS_DRY);
    server.hold_replies = 1;
    issue(NBD_FLUSH, 0, 0);
    poll_once();
    server.hold_replies = 0;
    server.fruitless = 0;
    poll_once();
    CHECK_EQUAL(server.fruitless, 0);
    CHECK_EQUAL(pull(), 1);
}

// The same for sending: what did not fit waits until the transport takes more.
static void short_send_is_the_last_if_the_transport_says_so(void)
{
    ready(NBD_SHORT_IS_DRY);
    server.hold_replies = 1;
    server.send_most = 100;
    issue(NBD_WRITE, 0, BLOCK);
    poll_once();
    CHECK_EQUAL(server.sends, 1);
    CHECK_EQUAL(pull(), 0);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_READ | NBD_WANT_WRITE);
    server.send_most = 0;
    poll_once();
    CHECK_EQUAL(server.sends, 2);
    CHECK_EQUAL(server.requests, 1);
}

static void nothing_queued_calls_no_send(void)
{
    ready(NBD_SHORT_IS_DRY);
    poll_once();
    poll_once();
    CHECK_EQUAL(server.sends, 0);
}

static void counters_agree_with_the_transport(void)
{
    nbd_counters before, after;
    unsigned i;

    ready(NBD_SHORT_IS_DRY);
    before = *nbd_count(&client);
    for (i = 0; i < 10; i++)
        issue(NBD_WRITE, i, BLOCK);
    poll_once();
    poll_once();
    CHECK_EQUAL(pull(), 10);
    after = *nbd_count(&client);
    CHECK_EQUAL(after.bytes_sent - before.bytes_sent, 10 * (28 + BLOCK));
    CHECK_EQUAL(after.bytes_received - before.bytes_received, 10 * 16);
    CHECK_EQUAL(after.sends - before.sends, server.sends);
    CHECK_EQUAL(after.receives - before.receives, server.receives + server.fruitless);
    CHECK_EQUAL(after.staged, 0);
    CHECK_EQUAL(after.in_flight, 0);
    CHECK_EQUAL(after.in_flight_max, 10);
}

// A transport for one piece gets small pieces joined, and the copies are counted.
static void small_pieces_are_joined_for_a_transport_of_one_piece(void)
{
    ready(NBD_ONE_PIECE);
    server.hold_replies = 1;
    issue(NBD_WRITE, 0, 64);
    issue(NBD_WRITE, 1, 64);
    poll_once();
    CHECK_EQUAL(server.sends, 1);
    CHECK_EQUAL(server.pieces, 1);
    CHECK_EQUAL(server.requests, 2);
    CHECK_EQUAL(nbd_count(&client)->staged, 1);
}

static ptrdiff_t count_more(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    ptrdiff_t moved = count_send(context, iov, count, flags);

    // Every send but the last promises more; the last is checked by poll_once.
    CHECK_EQUAL(server.more, server.requests < DEPTH);
    return moved;
}

// More pieces than one call takes; no two of them are neighbours in memory.
static void every_send_but_the_last_says_more(void)
{
    static nbd_iovec pieces[DEPTH][4];
    unsigned i, k;

    ready(NBD_SHORT_IS_DRY);
    server.hold_replies = 1;
    server.transport.send = count_more;
    for (i = 0; i < DEPTH; i++) {
        nbd_op op = NBD_ZERO;

        for (k = 0; k < 4; k++) {
            pieces[i][k].base = memory[i] + (3 - k) * 1024;
            pieces[i][k].size = 1024;
        }
        op.command = NBD_WRITE;
        op.size = BLOCK;
        op.iov = pieces[i];
        op.iov_count = 4;
        CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    }
    poll_once();
    CHECK_EQUAL(server.sends, (5 * DEPTH + NBD_IOVECS - 1) / NBD_IOVECS);
    CHECK_EQUAL(server.requests, DEPTH);
}

static void issue_at_random(void)
{
    static const uint32_t commands[] = {NBD_READ, NBD_WRITE, NBD_FLUSH, NBD_TRIM};
    uint32_t command = commands[check_random(4)];
    uint64_t size = command == NBD_FLUSH ? 0 : 1 + check_random(BLOCK);

    issue(command, command == NBD_FLUSH ? 0 : check_random(DEPTH), size);
}

// poll_once checks each time that the last send did not promise more.
static void no_poll_ends_with_more_outstanding(void)
{
    unsigned turn, issued = 0, done = 0;

    ready(0);
    server.random = 1;
    for (turn = 0; turn < 20000; turn++) {
        unsigned burst = turn < 19000 ? check_random(8) : 0;

        while (burst-- && issued - done < DEPTH) {
            issue_at_random();
            issued++;
        }
        poll_once();
        done += pull();
    }
    CHECK(issued > 10000);
    CHECK_EQUAL(done, issued);
    CHECK_EQUAL(server.requests, issued);
}

static ptrdiff_t flood(void *context, const nbd_iovec *iov, unsigned count)
{
    unsigned i;

    CHECK(context == &server);
    for (i = 0; i < count; i++) {
        if (iov[i].size) memset(iov[i].base, 0, iov[i].size);
    }
    server.receives++;
    return (ptrdiff_t)iov_sum(iov, count);
}

static int finish_calls, finish_blocks;

static int count_finish(void *context)
{
    CHECK(context == &server);
    CHECK_EQUAL(server.in_size, 0); // NBD_CMD_DISC has been taken
    finish_calls++;
    return finish_calls <= finish_blocks ? NBD_IO_WRITE : 0;
}

// Behind the last byte the transport hears that nothing follows: once, or again while it
// is blocked, and not before the requests in flight have finished.
static void transport_is_told_once_that_nothing_follows(void)
{
    nbd_event event;

    for (finish_blocks = 0; finish_blocks < 3; finish_blocks++) {
        finish_calls = 0;
        ready(0);
        server.transport.finish = count_finish;
        issue(NBD_READ, 0, BLOCK);
        CHECK_EQUAL(nbd_disconnect(&client), 0);
        CHECK_EQUAL(nbd_poll(&client, 0), 0);
        CHECK_EQUAL(finish_calls, 0);
        CHECK_EQUAL(nbd_poll(&client, NBD_WANT_READ), 0);
        CHECK_EQUAL(nbd_next(&client, &event), 1);
        CHECK_EQUAL(event.type, NBD_EVENT_DONE);
        CHECK_EQUAL(nbd_next(&client, &event), 0);
        while (nbd_wants(&client) & NBD_WANT_WRITE)
            CHECK_EQUAL(nbd_poll(&client, NBD_WANT_WRITE), 0);
        CHECK_EQUAL(finish_calls, finish_blocks + 1);
        CHECK_EQUAL(nbd_poll(&client, NBD_WANT_WRITE | NBD_WANT_READ), 0);
        CHECK_EQUAL(finish_calls, finish_blocks + 1);
    }
}

// A server that never stops sending does not hold nbd_poll.
static void endless_server_does_not_hold_a_poll(void)
{
    nbd_event event;

    ready(0);
    server.transport.recv = flood;
    poll_once();
    CHECK(nbd_wants(&client) & NBD_WANT_NOW);
    CHECK_EQUAL(nbd_next(&client, &event), 1);
    CHECK_EQUAL(event.type, NBD_EVENT_CLOSED);
    CHECK_EQUAL(event.error, NBD_ERR_PROTOCOL);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(queued_writes_leave_in_one_send);
    CHECK_CASE(queued_reads_leave_in_one_piece);
    CHECK_CASE(waiting_small_replies_are_taken_in_two_receives);
    CHECK_CASE(short_receive_is_the_last_if_the_transport_says_so);
    CHECK_CASE(short_send_is_the_last_if_the_transport_says_so);
    CHECK_CASE(nothing_queued_calls_no_send);
    CHECK_CASE(counters_agree_with_the_transport);
    CHECK_CASE(small_pieces_are_joined_for_a_transport_of_one_piece);
    CHECK_CASE(every_send_but_the_last_says_more);
    CHECK_CASE(no_poll_ends_with_more_outstanding);
    CHECK_CASE(transport_is_told_once_that_nothing_follows);
    CHECK_CASE(endless_server_does_not_hold_a_poll);
    return check_end();
}
