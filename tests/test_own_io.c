// The engine's own calls: what is on offer stays valid and unmoved until it is
// acknowledged; both directions are independent; nbd_wants tells the truth.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

enum { SLOTS = 8, DATA = 4096 };

static nbd_client client;
static nbd_slot slots[SLOTS];
static unsigned char buffer[NBD_BUFFER_NAMES];
static unsigned char memory[SLOTS][DATA];

static void feed(const void *bytes, size_t size)
{
    nbd_iovec iov[2];
    size_t k = 0;

    while (k < size) {
        unsigned i, count = nbd_incoming(&client, iov, 2);
        size_t moved = 0;

        CHECK(count > 0);
        for (i = 0; i < count && k < size; i++) {
            size_t n = smaller(iov[i].size, size - k);

            memcpy(iov[i].base, (const unsigned char *)bytes + k, n);
            k += n;
            moved += n;
        }
        CHECK_EQUAL(nbd_received(&client, (ptrdiff_t)moved), 0);
    }
}

static uint32_t next_type(void)
{
    nbd_event event;

    return nbd_next(&client, &event) ? event.type : (uint32_t)NBD_EVENT_NONE;
}

static size_t send_pending(void)
{
    nbd_iovec iov[32];
    unsigned flags = 0;
    unsigned count = nbd_outgoing(&client, iov, 32, &flags);

    if (count) CHECK_EQUAL(nbd_sent(&client, (ptrdiff_t)iov_sum(iov, count)), 0);
    return iov_sum(iov, count);
}

// READY with simple replies; an oldstyle server needs no bytes of the client.
static void connect_to_oldstyle(void)
{
    unsigned char greeting[152] = "NBDMAGIC\0\0\102\2\201\206\22\123\0\0\0\0\0\20\0\0\0\0\15\155";

    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
    feed(greeting, sizeof greeting);
    CHECK_EQUAL(next_type(), NBD_EVENT_READY);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
}

static void ready(size_t buffer_size)
{
    nbd_config config = NBD_ZERO;

    config.slots = slots;
    config.slot_count = SLOTS;
    config.buffer = buffer;
    config.buffer_size = buffer_size;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    connect_to_oldstyle();
}

static uint64_t issue(uint32_t command, int slot, uint64_t size)
{
    nbd_op op = NBD_ZERO;
    uint64_t id = 0;

    op.command = command;
    op.offset = (uint64_t)slot * DATA;
    op.size = size;
    if (command == NBD_READ) op.buffer = memory[slot];
    if (command == NBD_WRITE) op.data = memory[slot];
    CHECK_EQUAL(nbd_issue(&client, &op, &id), 0);
    return id;
}

// A simple reply without data to the request whose header is at `header`.
static void reply_to(const unsigned char *header, unsigned char *reply)
{
    memcpy(reply, "\147\104\146\230\0\0\0\0", 8);
    memcpy(reply + 8, header + 8, 8);
}

static void asking_again_offers_the_same_and_more_behind(void)
{
    nbd_iovec first[32], again[32];
    unsigned char before[28 + DATA];
    unsigned flags = 0, count, more, i;
    size_t total;

    ready(sizeof buffer);
    issue(NBD_WRITE, 0, DATA);
    count = nbd_outgoing(&client, first, 32, &flags);
    CHECK_EQUAL(count, 2);
    total = iov_sum(first, count);
    CHECK_EQUAL(total, 28 + DATA);
    memcpy(before, first[0].base, 28);
    issue(NBD_WRITE, 1, DATA);
    issue(NBD_FLUSH, 0, 0);
    more = nbd_outgoing(&client, again, 32, &flags);
    CHECK_EQUAL(iov_sum(again, more), 28 + DATA + 28 + DATA + 28);
    for (i = 0; i < count; i++) {
        CHECK(again[i].base == first[i].base);
        CHECK_EQUAL(again[i].size, first[i].size);
    }
    CHECK_BYTES(again[0].base, before, 28);
    CHECK_EQUAL(nbd_sent(&client, (ptrdiff_t)total), 0);
    CHECK_EQUAL(send_pending(), 28 + DATA + 28);
}

static void asking_for_less_leaves_the_first_offer_open(void)
{
    nbd_iovec first[32], again[1];
    unsigned flags = 0, count;

    ready(sizeof buffer);
    issue(NBD_WRITE, 0, DATA);
    count = nbd_outgoing(&client, first, 32, &flags);
    CHECK_EQUAL(nbd_outgoing(&client, again, 1, &flags), 1);
    CHECK_EQUAL(again[0].size, 28);
    CHECK_EQUAL(nbd_sent(&client, (ptrdiff_t)iov_sum(first, count)), 0);
    CHECK_EQUAL(send_pending(), 0);
}

// The write is replied to and sent, but nobody knows yet who uses the memory of the read.
static void nothing_finishes_while_memory_is_on_offer_after_abandon(void)
{
    nbd_iovec out[32], in[4];
    unsigned char headers[2][28], reply[16];
    unsigned flags = 0, count;

    ready(sizeof buffer);
    issue(NBD_READ, 0, DATA);
    count = nbd_outgoing(&client, out, 32, &flags);
    memcpy(headers[0], out[0].base, 28);
    CHECK_EQUAL(nbd_sent(&client, (ptrdiff_t)iov_sum(out, count)), 0);
    issue(NBD_WRITE, 1, DATA);
    count = nbd_outgoing(&client, out, 32, &flags);
    memcpy(headers[1], out[0].base, 28);
    reply_to(headers[1], reply);
    feed(reply, sizeof reply);
    reply_to(headers[0], reply);
    feed(reply, sizeof reply);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK(nbd_incoming(&client, in, 4) > 0);
    CHECK(in[0].base == memory[0]);
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(nbd_sent(&client, (ptrdiff_t)iov_sum(out, count)), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(next_type(), NBD_EVENT_CLOSED);
}

// The final reply of an option is in before the option has gone out, and the server
// goes on talking: what it says fills the buffer and no more is taken.
static void flood_behind_an_early_reply_does_not_spin(void)
{
    static const unsigned char greeting[18] = "NBDMAGICIHAVEOPT\0\3";
    unsigned char refused[20] = "\0\3\350\211\4Ue\251\0\0\0\13\200\0\0\1";
    nbd_config config = NBD_ZERO;
    nbd_iovec iov[2];
    unsigned flags, i;

    config.slots = slots;
    config.slot_count = SLOTS;
    config.buffer = buffer;
    config.buffer_size = NBD_BUFFER_MIN;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
    feed(greeting, sizeof greeting);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK(nbd_outgoing(&client, iov, 2, &flags) > 0);
    CHECK_EQUAL(nbd_sent(&client, NBD_IO_WRITE), 0);
    feed(refused, sizeof refused);
    for (i = 0; i < 3 && nbd_incoming(&client, iov, 2); i++) {
        memset(iov[0].base, 0, iov[0].size);
        CHECK_EQUAL(nbd_received(&client, (ptrdiff_t)iov[0].size), 0);
        CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    }
    CHECK(i < 3);
    CHECK_EQUAL(nbd_wants(&client), NBD_WANT_WRITE);
}

static void asking_again_offers_the_same_input_memory(void)
{
    nbd_iovec first[2], again[2];
    unsigned count, i;

    ready(sizeof buffer);
    count = nbd_incoming(&client, first, 2);
    CHECK(count > 0);
    issue(NBD_READ, 0, DATA);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_incoming(&client, again, 2), count);
    for (i = 0; i < count; i++) {
        CHECK(again[i].base == first[i].base);
        CHECK_EQUAL(again[i].size, first[i].size);
    }
}

// The receive completion is seen first; the data is the transport's until the other comes.
static void reply_before_the_acknowledgement_finishes_only_after_it(void)
{
    nbd_iovec iov[32];
    unsigned char reply[16];
    unsigned flags = 0, count;

    ready(sizeof buffer);
    issue(NBD_WRITE, 0, DATA);
    count = nbd_outgoing(&client, iov, 32, &flags);
    reply_to(iov[0].base, reply);
    feed(reply, sizeof reply);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_sent(&client, 28 + DATA - 1), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_count(&client)->in_flight, 1);
    count = nbd_outgoing(&client, iov, 32, &flags);
    CHECK_EQUAL(iov_sum(iov, count), 1);
    CHECK_EQUAL(nbd_sent(&client, 1), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
}

// B60: a cookie matches from the moment the whole header has been offered, not before.
static void reply_to_a_header_that_was_not_offered_ends_it(void)
{
    unsigned char header[16] = {0}, reply[16];
    uint64_t id;
    int i;

    ready(sizeof buffer);
    id = issue(NBD_FLUSH, 0, 0);
    for (i = 0; i < 8; i++)
        header[8 + i] = (unsigned char)(id >> (56 - 8 * i));
    reply_to(header, reply);
    feed(reply, sizeof reply);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(next_type(), NBD_EVENT_CLOSED);
}

// B63: cookies do not repeat, so a reply of the former session matches nothing.
static void reply_of_the_former_session_ends_it(void)
{
    nbd_iovec iov[4];
    unsigned char reply[16];
    unsigned flags = 0;
    nbd_event event;

    ready(sizeof buffer);
    issue(NBD_FLUSH, 0, 0);
    CHECK_EQUAL(nbd_outgoing(&client, iov, 4, &flags), 1);
    reply_to(iov[0].base, reply);
    CHECK_EQUAL(nbd_sent(&client, 28), 0);
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(next_type(), NBD_EVENT_CLOSED);
    connect_to_oldstyle();
    issue(NBD_FLUSH, 0, 0);
    CHECK_EQUAL(send_pending(), 28);
    feed(reply, sizeof reply);
    CHECK_EQUAL(nbd_next(&client, &event), 1);
    CHECK_EQUAL(event.type, NBD_EVENT_DONE);
    CHECK_EQUAL(event.error, NBD_ERR_PROTOCOL);
    CHECK_EQUAL(next_type(), NBD_EVENT_CLOSED);
}

// One byte is missing of the header that was offered: it is not whole.
static void headers_are_whole_or_not_offered_as_whole(void)
{
    nbd_iovec iov[32];
    unsigned flags = 0;

    ready(sizeof buffer);
    issue(NBD_READ, 0, DATA);
    CHECK_EQUAL(nbd_outgoing(&client, iov, 32, &flags), 1);
    CHECK_EQUAL(iov[0].size, 28);
    CHECK_EQUAL(nbd_sent(&client, 27), 0);
    CHECK_EQUAL(nbd_outgoing(&client, iov, 32, &flags), 1);
    CHECK_EQUAL(iov[0].size, 1);
}

static void more_flag_says_whether_more_is_pending(void)
{
    nbd_iovec iov[2];
    unsigned flags = 0;

    ready(sizeof buffer);
    issue(NBD_WRITE, 0, DATA);
    CHECK_EQUAL(nbd_outgoing(&client, iov, 1, &flags), 1);
    CHECK_EQUAL(flags, NBD_SEND_MORE);
    CHECK_EQUAL(nbd_outgoing(&client, iov, 2, &flags), 2);
    CHECK_EQUAL(flags, 0);
}

static void abandon_waits_for_the_memory_on_offer(void)
{
    nbd_iovec out[4], in[4];
    unsigned flags = 0;

    ready(sizeof buffer);
    issue(NBD_WRITE, 0, DATA);
    CHECK(nbd_outgoing(&client, out, 4, &flags) > 0);
    CHECK(nbd_incoming(&client, in, 4) > 0);
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_sent(&client, 0), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(next_type(), NBD_EVENT_CLOSED);
    CHECK_EQUAL(nbd_wants(&client), 0);
}

static void wants_write_only_while_bytes_are_pending(void)
{
    ready(sizeof buffer);
    CHECK(!(nbd_wants(&client) & NBD_WANT_WRITE));
    CHECK(nbd_wants(&client) & NBD_WANT_READ);
    issue(NBD_FLUSH, 0, 0);
    CHECK(nbd_wants(&client) & (NBD_WANT_WRITE | NBD_WANT_NOW));
    CHECK_EQUAL(send_pending(), 28);
    CHECK(!(nbd_wants(&client) & NBD_WANT_WRITE));
}

static void blocked_directions_are_told_as_the_transport_says(void)
{
    nbd_iovec iov[4];
    unsigned flags = 0;

    ready(sizeof buffer);
    issue(NBD_FLUSH, 0, 0);
    CHECK(nbd_outgoing(&client, iov, 4, &flags) > 0);
    CHECK_EQUAL(nbd_sent(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(nbd_wants(&client) & NBD_WANT_READ, NBD_WANT_READ);
    CHECK(nbd_incoming(&client, iov, 4) > 0);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_WRITE), 0);
    CHECK_EQUAL(nbd_wants(&client) & NBD_WANT_WRITE, NBD_WANT_WRITE);
}

// While a long write is stuck, replies are taken and finish.
static void input_is_taken_while_output_is_stuck(void)
{
    nbd_iovec iov[32];
    unsigned char header[28], reply[16];
    unsigned flags = 0;

    ready(NBD_BUFFER_MIN);
    issue(NBD_FLUSH, 0, 0);
    CHECK(nbd_outgoing(&client, iov, 32, &flags) > 0);
    memcpy(header, iov[0].base, 28);
    CHECK_EQUAL(nbd_sent(&client, 28), 0);
    issue(NBD_WRITE, 1, DATA);
    CHECK(nbd_outgoing(&client, iov, 32, &flags) > 0);
    CHECK_EQUAL(nbd_sent(&client, 28 + 100), 0);
    CHECK(nbd_outgoing(&client, iov, 32, &flags) > 0);
    CHECK_EQUAL(nbd_sent(&client, NBD_IO_WRITE), 0);
    reply_to(header, reply);
    feed(reply, sizeof reply);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(nbd_count(&client)->in_flight, 1);
}

// A payload is received into the caller's memory, in place.
static void large_payload_is_offered_in_place(void)
{
    nbd_iovec iov[32];
    unsigned char reply[16];
    unsigned flags = 0, i;

    ready(NBD_BUFFER_MIN);
    issue(NBD_READ, 3, DATA);
    CHECK(nbd_outgoing(&client, iov, 32, &flags) > 0);
    reply_to(iov[0].base, reply);
    CHECK_EQUAL(nbd_sent(&client, 28), 0);
    feed(reply, sizeof reply);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK(nbd_incoming(&client, iov, 32) >= 1);
    CHECK(iov[0].base == (void *)memory[3]);
    CHECK_EQUAL(iov[0].size, DATA);
    for (i = 0; i < DATA; i++)
        memory[3][i] = export_byte(i);
    CHECK_EQUAL(nbd_received(&client, DATA), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(memory[3][DATA - 1], export_byte(DATA - 1));
}

// How much input may be put in now.
static size_t room(void)
{
    nbd_iovec iov[2];
    unsigned count = nbd_incoming(&client, iov, 2);

    if (count) CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    return iov_sum(iov, count);
}

static size_t room_with(uint32_t command, uint64_t size)
{
    ready(sizeof buffer);
    issue(command, 0, size);
    return room();
}

// In front of a payload that is better received in place than copied there is a header.
static void one_large_read_in_flight_reads_a_header_ahead(void)
{
    enum { LARGE = SLOTS * DATA, AHEAD = 64 };
    unsigned char header[28], reply[AHEAD] = {0};
    nbd_iovec iov[2];
    unsigned flags;
    size_t all, cut;

    ready(sizeof buffer);
    all = room();
    CHECK_EQUAL(room_with(NBD_READ, LARGE - 1), all);
    CHECK_EQUAL(room_with(NBD_WRITE, LARGE), all);
    CHECK_EQUAL(room_with(NBD_READ, LARGE), AHEAD);
    issue(NBD_READ, 0, LARGE);
    CHECK_EQUAL(room(), all);
    for (cut = 1; cut <= AHEAD; cut++) {
        size_t ahead = cut < 16 ? 0 : cut - 16;

        CHECK_EQUAL(room_with(NBD_READ, LARGE), AHEAD);
        CHECK_EQUAL(nbd_outgoing(&client, iov, 1, &flags), 1);
        memcpy(header, iov[0].base, sizeof header);
        CHECK_EQUAL(nbd_sent(&client, sizeof header), 0);
        reply_to(header, reply);
        feed(reply, cut);
        CHECK_EQUAL(room(), AHEAD - cut);
        CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
        if (cut < 16) {
            CHECK_EQUAL(room(), AHEAD - cut);
            feed(reply + cut, 16 - cut);
            CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
        }
        CHECK(nbd_incoming(&client, iov, 2) >= 1);
        CHECK(iov[0].base == (void *)(memory[0] + ahead));
        CHECK_EQUAL(iov[0].size, LARGE - ahead);
    }
}

// Both an answer that is offered and the session's death: the request waits for its memory.
static void request_does_not_finish_while_its_memory_is_offered(void)
{
    nbd_iovec iov[32];
    unsigned char reply[16];
    unsigned flags = 0;

    ready(NBD_BUFFER_MIN);
    issue(NBD_READ, 2, DATA);
    CHECK(nbd_outgoing(&client, iov, 32, &flags) > 0);
    reply_to(iov[0].base, reply);
    CHECK_EQUAL(nbd_sent(&client, 28), 0);
    feed(reply, sizeof reply);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    CHECK(nbd_incoming(&client, iov, 32) >= 1);
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_NONE);
    memset(memory[2], UNTOUCHED, DATA);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_ERROR), 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_DONE);
    CHECK_EQUAL(memory[2][0], 0);
    CHECK_EQUAL(memory[2][DATA - 1], 0);
    CHECK_EQUAL(next_type(), NBD_EVENT_CLOSED);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(asking_again_offers_the_same_and_more_behind);
    CHECK_CASE(asking_for_less_leaves_the_first_offer_open);
    CHECK_CASE(nothing_finishes_while_memory_is_on_offer_after_abandon);
    CHECK_CASE(flood_behind_an_early_reply_does_not_spin);
    CHECK_CASE(asking_again_offers_the_same_input_memory);
    CHECK_CASE(reply_before_the_acknowledgement_finishes_only_after_it);
    CHECK_CASE(reply_to_a_header_that_was_not_offered_ends_it);
    CHECK_CASE(reply_of_the_former_session_ends_it);
    CHECK_CASE(headers_are_whole_or_not_offered_as_whole);
    CHECK_CASE(more_flag_says_whether_more_is_pending);
    CHECK_CASE(abandon_waits_for_the_memory_on_offer);
    CHECK_CASE(wants_write_only_while_bytes_are_pending);
    CHECK_CASE(blocked_directions_are_told_as_the_transport_says);
    CHECK_CASE(input_is_taken_while_output_is_stuck);
    CHECK_CASE(large_payload_is_offered_in_place);
    CHECK_CASE(one_large_read_in_flight_reads_a_header_ahead);
    CHECK_CASE(request_does_not_finish_while_its_memory_is_offered);
    return check_end();
}
