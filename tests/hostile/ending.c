// Connections that break, stall and end in every way, with requests in every stage.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "hostile.h"

enum { DISK_SIZE = 64, LONG_TEXT = 100000 };

typedef struct row {
    int protocol;
    uint32_t error;
    size_t taken; // bytes of a write that the transport takes before it blocks
    int what;
} row;

static void open_lawful(script *s, int protocol)
{
    if (protocol == NBD_PROTOCOL_SIMPLE) {
        open_simple(s);
    } else {
        open_session(s, protocol);
    }
}

static size_t header_size(const script *s)
{
    return s->protocol == NBD_PROTOCOL_EXTENDED ? 32 : 28;
}

static void send_answer(script *s, int r, uint32_t error)
{
    if (s->protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, r, error);
    } else if (error) {
        send_error(s, r, DONE, error, "");
    } else if (s->requests[r].op.command == NBD_READ) {
        send_data(s, r, DONE, s->requests[r].op.offset, (size_t)s->requests[r].op.size);
    } else {
        send_none(s, r);
    }
}

/// A write that is stuck ///

// Issued, and sent up to a byte behind the header or in the second half of it.
static int stuck_write(script *s, size_t taken, size_t size, step *rest)
{
    size_t header = header_size(s);
    int r;

    transport_takes(s, taken);
    r = client_issues(s, NBD_WRITE, 0, 0, size);
    want_request_header(s, r);
    memset(rest, 0, sizeof *rest);
    if (taken < header) {
        *rest = script_split(s, taken);
    } else {
        want_payload(s, r, 0, taken - header);
    }
    return r;
}

static void write_goes_on(script *s, int r, size_t taken, const step *rest)
{
    size_t header = header_size(s), sent = taken > header ? taken - header : 0;

    transport_takes_all(s);
    if (rest->bytes) script_append(s, *rest);
    want_payload(s, r, sent, (size_t)s->requests[r].op.size);
}

// The client has let go of a request when it has offered all of its header; a transport
// may take the bytes later.
static void answered_early(script *s, const void *of)
{
    const row *it = of;
    step rest;
    int r;

    open_lawful(s, it->protocol);
    r = stuck_write(s, it->taken, DISK_SIZE, &rest);
    send_answer(s, r, it->error);
    see_undone(s, r);
    write_goes_on(s, r, it->taken, &rest);
    see_done(s, r, (int)it->error);
    session_lives(s);
}

static void answer_at_any_byte_of_a_write_waits_for_its_end(void)
{
    row it = {0, 0, 0, 0};

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        size_t header = it.protocol == 2 ? 32 : 28;

        for (it.taken = header; it.taken < header + DISK_SIZE; it.taken++) {
            it.error = it.taken % 2 ? NBD_ENOSPC : 0;
            face(answered_early, &it, UNJUDGED);
        }
    }
}

static void answered_twice(script *s, const void *of)
{
    const row *it = of;
    step rest;
    int r;

    open_lawful(s, it->protocol);
    r = stuck_write(s, it->taken, DISK_SIZE, &rest);
    send_answer(s, r, 0);
    see_undone(s, r);
    send_answer(s, r, 0);
    die_by(s, r, "cookie not in flight");
}

static void second_answer_to_a_write_that_is_stuck_ends_it(void)
{
    row it = {0, 0, 0, 0};

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (it.taken = 32; it.taken < 32 + DISK_SIZE - 4; it.taken += 10)
            face(answered_twice, &it, BROKEN);
    }
}

static void disconnects_stuck(script *s, const void *of)
{
    const row *it = of;
    nbd_op *flush = &s->requests[SCRIPT_REQUESTS - 1].op;
    step rest;
    int r;

    open_lawful(s, it->protocol);
    op_is(flush, NBD_FLUSH, 0, 0);
    r = stuck_write(s, it->taken, DISK_SIZE, &rest);
    client_disconnects(s);
    op_is_refused_here(s, flush, NBD_ERR_STATE);
    write_goes_on(s, r, it->taken, &rest);
    send_answer(s, r, 0);
    see_done(s, r, 0);
    want_disconnect(s);
    send_end(s);
    see_closed(s, 0);
}

static void disconnect_at_any_byte_of_a_write_stands_behind_it(void)
{
    row it = {0, 0, 0, 0};

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        size_t header = it.protocol == 2 ? 32 : 28;

        for (it.taken = 16; it.taken < header + DISK_SIZE; it.taken++)
            face(disconnects_stuck, &it, LAWFUL);
    }
}

// A server that does not read on before its answers are taken, as one with a single
// thread does not.
static void answers_while_stuck(script *s, const void *of)
{
    const row *it = of;
    step rest;
    int reads[4], r, i;

    s->config.slot_count = 8;
    open_lawful(s, it->protocol);
    for (i = 0; i < 4; i++) {
        reads[i] = client_issues(s, NBD_READ, 0, 8192u * (unsigned)i, 8000);
        want_request(s, reads[i]);
    }
    r = stuck_write(s, it->taken, LONG_TEXT, &rest);
    for (i = 0; i < 4; i++) {
        send_answer(s, reads[i], 0);
        see_done(s, reads[i], 0);
    }
    see_undone(s, r);
    write_goes_on(s, r, it->taken, &rest);
    send_answer(s, r, 0);
    see_done(s, r, 0);
    session_lives(s);
}

static void answers_are_taken_while_a_write_is_stuck(void)
{
    static const size_t taken[] = {16, 20, 27, 28, 31, 32, 33, 1000, 65536, LONG_TEXT};
    row it = {0, 0, 0, 0};
    size_t i;

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (i = 0; i < COUNT(taken); i++) {
            it.taken = taken[i];
            face_many(answers_while_stuck, &it, LAWFUL);
        }
    }
}

/// Requests in every stage ///

enum { MANY = 16, CHUNKS = 9 };

// Which of the messages is garbage instead; CHUNKS: none.
static int garbled(script *s, const row *it, int message)
{
    if (it->what != message) return 0;
    send_bytes(s, script_text(s, 32), 32);
    return 1;
}

static void see_all(script *s, const int *r, const unsigned char *answered, int error)
{
    int i;

    for (i = 0; i < MANY; i++)
        see_done(s, r[i], answered[i] ? 0 : error);
}

// Sixteen requests: some answered, some in part, one half sent, three not at all.
static void many_stages(script *s, const void *of)
{
    static const char detail[] = "reply magic bad or not negotiated";
    const row *it = of;
    unsigned char answered[MANY] = {0};
    int r[MANY], i, at = 0, broken = 0;
    step rest;

    s->any_order = 1;
    s->config.slot_count = MANY;
    open_lawful(s, it->protocol);
    for (i = 0; i < MANY - 4; i++) {
        r[i] = i % 3 == 2
                   ? client_issues(s, NBD_FLUSH, 0, 0, 0)
                   : client_issues(s, NBD_READ, i % 2 ? NBD_NO_INIT : 0, 512u * (unsigned)i, 300);
        want_request(s, r[i]);
    }
    r[i] = stuck_write(s, header_size(s) + 10, DISK_SIZE, &rest);
    for (i++; i < MANY; i++)
        r[i] = client_issues(s, NBD_TRIM, 0, 0, 4096);
    for (i = 0; i < 8 && !broken; i++, at++) {
        broken = garbled(s, it, at);
        if (broken) break;
        if (it->protocol != NBD_PROTOCOL_SIMPLE && i % 3 == 0) {
            send_data(s, r[i], MORE, 512u * (unsigned)i, 100); // the rest comes later, or never
        } else {
            send_answer(s, r[i], 0);
            answered[i] = 1;
        }
    }
    if (broken || garbled(s, it, at)) {
        see_all(s, r, answered, NBD_ERR_PROTOCOL);
        see_closed_by(s, NBD_ERR_PROTOCOL, detail);
        return;
    }
    script_step(s, STEP_FED);
    write_goes_on(s, r[MANY - 4], header_size(s) + 10, &rest);
    for (i = MANY - 3; i < MANY; i++)
        want_request(s, r[i]);
    for (i = 0; i < MANY; i++) {
        if (answered[i]) continue;
        if (it->protocol != NBD_PROTOCOL_SIMPLE && i % 3 == 0 && i < 8) {
            send_data(s, r[i], DONE, 512u * (unsigned)i + 100, 200);
        } else {
            send_answer(s, r[i], 0);
        }
        answered[i] = 1;
    }
    see_all(s, r, answered, 0);
    session_lives(s);
}

static void requests_in_every_stage_finish_once_at_any_end(void)
{
    row it = {0, 0, 0, 0};

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (it.what = CHUNKS; it.what >= 0; it.what--)
            face(many_stages, &it, it.what == CHUNKS ? LAWFUL : BROKEN);
    }
}

/// Calls after the end ///

// With no session each call says so, and changes nothing.
static void every_call_is_refused(nbd_client *c)
{
    static unsigned char byte;
    nbd_option option = NBD_ZERO;
    nbd_sync sync = NBD_ZERO;
    nbd_event event;
    nbd_iovec iov[1];
    nbd_op op = NBD_ZERO;
    nbd_walk walk;
    uint64_t memory[4];
    unsigned flags;
    uint32_t command;

    option.option = NBD_OPTION_LIST;
    sync.client = c;
    for (command = NBD_READ; command <= NBD_RAW; command++) {
        op_is(&op, command, 0, 1);
        op.buffer = &byte;
        CHECK_EQUAL(nbd_issue(c, &op, NULL), NBD_ERR_STATE);
        CHECK_EQUAL(nbd_allows(c, command, 0), 0);
    }
    CHECK_EQUAL(nbd_negotiate(c, &option), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_starttls(c, NULL), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_disconnect(c), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_abandon(c), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_outgoing(c, iov, 1, &flags), 0);
    CHECK_EQUAL(nbd_sent(c, 0), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_incoming(c, iov, 1), 0);
    CHECK_EQUAL(nbd_received(c, 0), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_sync_read(&sync, &byte, 1, 0), NBD_ERR_STATE);
    CHECK(nbd_walk_start(&walk, &sync, 1, 0, memory, COUNT(memory)) != 0);
    (void)nbd_poll(c, NBD_WANT_READ | NBD_WANT_WRITE);
    CHECK_EQUAL(nbd_next(c, &event), 0);
    CHECK_EQUAL(nbd_wants(c), 0);
    CHECK_EQUAL(nbd_phase(c), NBD_PHASE_IDLE);
    CHECK(nbd_detail(c) != NULL && nbd_negotiated(c) != NULL);
    CHECK_EQUAL(nbd_count(c)->in_flight, 0);
}

static void asks_by_hand(script *s, const void *of)
{
    static const char *const queries[] = {"base:allocation"};
    int r;

    (void)of;
    open_options(s);
    option_succeeds(s, 8);
    client_asks(s, 3, NULL);
    want_option(s, 3, "", 0);
    send_server(s, "e", "about e");
    see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "e");
    see_text(s, SESSION, 3, NBD_TEXT_DESCRIPTION, "about e");
    send_ack(s, 3);
    see_option(s, 3, 0);
    client_asks_contexts(s, 10, "e", queries, 1);
    want_meta(s, 10, "e", queries, 1);
    tell_context(s, 10, 0, 3, queries[0]);
    send_ack(s, 10);
    see_option(s, 10, 0);
    go_asked(s, "e");
    s->protocol = NBD_PROTOCOL_STRUCTURED;
    r = client_issues(s, NBD_READ, 0, 0, DISK_SIZE);
    want_request(s, r);
    send_data(s, r, MORE, 0, 32);
    send_error(s, r, DONE, NBD_EIO, "bad sector");
    see_message(s, r, 0, NBD_EIO, "bad sector");
    see_done(s, r, NBD_EIO);
    close_session(s);
}

static void every_call_is_refused_wherever_the_server_died(void)
{
    static const ptrdiff_t ends[] = {NBD_IO_EOF, NBD_IO_ERROR, PLAY_SILENCE};
    static trace whole;
    const script *s = variant_script(asks_by_hand, NULL);
    size_t size = play_whole(s, &whole), at, i;

    for (at = 0; at <= size; at++) {
        for (i = 0; i < COUNT(ends); i++) {
            mode how = whole_mode;

            how.ended = ends[i];
            how.own = at % 2 == 1;
            play_cut(s, how, at, &whole);
            every_call_is_refused(&stage.client);
            play_variant++;
        }
    }
}

/// Results of hooks ///

typedef struct hooks {
    ptrdiff_t sends;
    ptrdiff_t receives;
    int calls;
} hooks;

static ptrdiff_t hook_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    hooks *h = context;

    CHECK(count > 0 && iov[0].size > 0);
    (void)flags;
    CHECK(++h->calls < 100);
    return h->sends;
}

// Greets, then gives what the row says.
static ptrdiff_t hook_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    hooks *h = context;

    CHECK(count > 0 && iov[0].size >= 18);
    CHECK(++h->calls < 100);
    if (h->calls > 1) return h->receives;
    memcpy(iov[0].base, "NBDMAGICIHAVEOPT\0\3", 18);
    return 18;
}

typedef struct hook_row {
    ptrdiff_t sends;
    ptrdiff_t receives;
    unsigned wants; // 0: it is over,
    int error;      // by this
} hook_row;

static void play_hooks(const hook_row *it)
{
    unsigned char buffer[NBD_BUFFER_MIN];
    hooks h = {0, 0, 0};
    nbd_transport transport = NBD_ZERO;
    nbd_client client;
    nbd_config config = NBD_ZERO;
    nbd_slot slots[1];
    nbd_event event;
    unsigned turn;
    int closed = 0;

    h.sends = it->sends;
    h.receives = it->receives;
    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    transport.context = &h;
    transport.send = hook_send;
    transport.recv = hook_recv;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_connect(&client, &transport), 0);
    for (turn = 0; turn < 5; turn++) {
        (void)nbd_poll(&client, nbd_wants(&client));
        while (nbd_next(&client, &event))
            closed = event.type == NBD_EVENT_CLOSED ? event.error : 0;
    }
    CHECK_EQUAL(nbd_wants(&client), it->wants);
    CHECK_EQUAL(closed, it->error);
}

static void any_result_of_a_hook_blocks_or_ends_it(void)
{
    enum { READ = NBD_WANT_READ, WRITE = NBD_WANT_WRITE };
    static const hook_row rows[] = {
        {0, NBD_IO_READ, READ | WRITE, 0},
        {NBD_IO_WRITE, NBD_IO_READ, READ | WRITE, 0},
        {NBD_IO_READ, NBD_IO_READ, READ, 0},
        {NBD_IO_WRITE, NBD_IO_WRITE, WRITE, 0},
        {0, NBD_IO_EOF, 0, NBD_ERR_CLOSED},
        {NBD_IO_WRITE, NBD_IO_EOF, 0, NBD_ERR_CLOSED},
        {NBD_IO_WRITE, NBD_IO_ERROR, 0, NBD_ERR_TRANSPORT},
        {NBD_IO_WRITE, -4, 0, NBD_ERR_TRANSPORT},
        {NBD_IO_WRITE, -1000, 0, NBD_ERR_TRANSPORT},
        {NBD_IO_WRITE, PTRDIFF_MIN, 0, NBD_ERR_TRANSPORT},
        {NBD_IO_ERROR, NBD_IO_READ, 0, NBD_ERR_TRANSPORT},
        {-4, NBD_IO_READ, 0, NBD_ERR_TRANSPORT},
        {-1000, NBD_IO_READ, 0, NBD_ERR_TRANSPORT},
        {PTRDIFF_MIN, NBD_IO_READ, 0, NBD_ERR_TRANSPORT},
    };
    size_t i;

    for (i = 0; i < COUNT(rows); i++) {
        snprintf(check.where, sizeof check.where, "row %lu", (unsigned long)i);
        play_hooks(&rows[i]);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RULE(answer_at_any_byte_of_a_write_waits_for_its_end);
    RULE(second_answer_to_a_write_that_is_stuck_ends_it);
    RULE(disconnect_at_any_byte_of_a_write_stands_behind_it);
    RULE(answers_are_taken_while_a_write_is_stuck);
    RULE(requests_in_every_stage_finish_once_at_any_end);
    RULE(every_call_is_refused_wherever_the_server_died);
    RULE(any_result_of_a_hook_blocks_or_ends_it);
    return check_end();
}
