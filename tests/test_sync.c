// The blocking calls without sockets and without a clock, against a server in process that
// speaks simple replies: what they send, when they give up, and whose words they keep.
#define NBD_NO_SOCKETS
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "check.h"
#include "stream.h"

enum {
    LOG = 64,
    ANSWERS = 4,
    EXPORT = 1 << 20,
    OFFERS = 0x1 | 0x4 | 0x8 | 0x20 | 0x40 | 0x400, // FLUSH, FUA, TRIM, WRITE_ZEROES, CACHE
    HEADER = 28
};

enum { WIRE_READ, WIRE_WRITE, WIRE_DISC, WIRE_FLUSH, WIRE_TRIM, WIRE_CACHE, WIRE_ZERO };
enum { OPT_STARTTLS = 5, OPT_GO = 7, OPT_STRUCTURED = 8 };
enum { UNSUP = 1, POLICY = 2, SHUTDOWN = 7, ACCEPT = -1, HANG_UP = -2 };

typedef struct wire_request {
    unsigned flags;
    unsigned type;
    uint64_t offset;
    uint64_t size;
} wire_request;

// How an option is answered: an error's number or one of the above, and the words.
typedef struct option_answer {
    uint32_t option;
    int how;
    const char *text;
} option_answer;

// What the server is; the rest of it is how far it has come.
static struct server {
    option_answer answers[ANSWERS]; // others but GO are refused without a word
    uint64_t size;
    uint32_t minimum, preferred, maximum; // minimum 0: not advertised
    int fail_at;                          // number of the request that fails, from 1; 0: none
    uint32_t error;                       // with this
    int silent_at;                        // number of the request that is not answered
    int ends_at;                          // number of the request that is the last
    int stays;                            // does not hang up after the disconnect
    int endless;                          // sends the bytes of a read for ever

    uint64_t option; // the last that came
    wire_request log[LOG];
    int count;
} server;

enum { STAGE_SILENT = STAGE_OVER + 1 }; // the session is over, the stream is not

static nbd_client client;
static nbd_slot slots[2];
static unsigned char buffer[NBD_BUFFER_NAMES];
static unsigned char memory[1 << 17];
static nbd_sync sync_;

/// The server's side of the wire ///

static unsigned char byte_at(uint64_t place)
{
    return (unsigned char)(place * 7 + place / 251);
}

static void answer_go(void)
{
    option_reply(OPT_GO, 3, 12);
    put(0, 2);
    put(server.size, 8);
    put(OFFERS, 2);
    if (server.minimum) {
        option_reply(OPT_GO, 3, 14);
        put(3, 2);
        put(server.minimum, 4);
        put(server.preferred, 4);
        put(server.maximum, 4);
    }
    option_reply(OPT_GO, 1, 0);
    stream.stage = STAGE_TRANSMISSION;
}

static void answer_option(uint64_t option)
{
    int i, how = option == OPT_GO ? ACCEPT : UNSUP;
    const char *text = "";

    server.option = option;
    for (i = 0; i < ANSWERS; i++) {
        if (server.answers[i].option == option) {
            how = server.answers[i].how;
            text = server.answers[i].text;
        }
    }
    if (how == HANG_UP) {
        stream.stage = STAGE_OVER;
    } else if (how == ACCEPT && option == OPT_GO) {
        answer_go();
    } else if (how == ACCEPT) {
        option_reply(option, 1, 0);
    } else {
        option_reply(option, UINT32_C(0x80000000) + (uint32_t)how, strlen(text));
        put_text(text);
    }
}

static size_t take_option(void)
{
    size_t size = 16;

    if (arrived() >= size) size += (size_t)get(12, 4);
    if (arrived() < size) return 0;
    if (get(8, 4) == NBD_OPTION_ABORT) {
        stream.stage = STAGE_OVER;
    } else {
        answer_option(get(8, 4));
    }
    return size;
}

static void answer_request(const wire_request *request)
{
    int fails = server.count == server.fail_at;
    uint64_t k;

    if (server.count == server.silent_at) return;
    put(UINT64_C(0x67446698), 4);
    put(fails ? server.error : 0, 4);
    put(get(8, 8), 8);
    if (server.count == server.ends_at) stream.stage = STAGE_OVER;
    if (fails || request->type != WIRE_READ || server.endless) return;
    for (k = 0; k < request->size; k++)
        put(byte_at(request->offset + k), 1);
}

static size_t take_request(void)
{
    wire_request request;
    size_t payload, k;

    if (arrived() < HEADER) return 0;
    CHECK_EQUAL(get(0, 4), 0x25609513);
    request.flags = (unsigned)get(4, 2);
    request.type = (unsigned)get(6, 2);
    request.offset = get(16, 8);
    request.size = get(24, 4);
    payload = request.type == WIRE_WRITE ? (size_t)request.size : 0;
    if (arrived() < HEADER + payload) return 0;
    if (request.type == WIRE_DISC) {
        stream.stage = server.stays ? STAGE_SILENT : STAGE_OVER;
        return HEADER;
    }
    CHECK(server.count < LOG);
    server.log[server.count++] = request;
    for (k = 0; k < payload; k++)
        CHECK_EQUAL(get(HEADER + k, 1), byte_at(request.offset + k));
    answer_request(&request);
    return HEADER + payload;
}

static void serve(void)
{
    size_t taken = 1;

    while (taken && arrived()) {
        if (stream.stage == STAGE_FLAGS) {
            taken = arrived() < 4 ? 0 : 4;
            stream.stage = taken ? STAGE_OPTIONS : STAGE_FLAGS;
        } else {
            taken = stream.stage == STAGE_OPTIONS        ? take_option()
                    : stream.stage == STAGE_TRANSMISSION ? take_request()
                                                         : 0;
        }
        took(taken);
    }
}

/// The transport ///

// What the next calls of the wait hook do, before it does as asked.
enum { WAIT_WORKS, WAIT_FAILS, WAIT_FINDS_NOTHING, WAIT_USES_ALL_TIME };

static int waits; // calls
static int waits_before_input;
static int wait_does, wait_times, wait_timeout_ms;
static size_t receive_most; // bytes in a call
static uint64_t received;

static ptrdiff_t hook_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    size_t size = iov[0].size;

    (void)context;
    (void)count;
    if (waits_before_input < 0) waits_before_input = waits;
    if (stream.out_size == stream.out_done && server.endless && server.count) {
        if (size > 1 << 16) size = 1 << 16;
        memset(iov[0].base, 0, size);
        received += size;
        return (ptrdiff_t)size;
    }
    return stream_recv(iov, receive_most ? receive_most : STREAM);
}

static int hook_wait(void *context, unsigned wants, int *timeout_ms)
{
    (void)context;
    waits++;
    wait_timeout_ms = *timeout_ms;
    if (wait_times > 0) {
        wait_times--;
        if (wait_does == WAIT_FAILS) return NBD_IO_ERROR;
        if (wait_does == WAIT_FINDS_NOTHING) return 0;
        *timeout_ms = 0;
        return (int)wants;
    }
    return stream_wait(wants, timeout_ms);
}

static nbd_transport transport = {0, NULL, hook_send, hook_recv, hook_wait, NULL, NULL};

static const nbd_transport *tls; // what STARTTLS is to switch to

/// Sessions ///

static void set_server(void)
{
    memset(&server, 0, sizeof server);
    memset(&stream, 0, sizeof stream);
    server.size = EXPORT;
    server.preferred = 512;
    waits = wait_times = 0;
    waits_before_input = -1;
    tls = NULL;
    receive_most = 0;
    received = 0;
    transport.wait = hook_wait;
    memset(memory, 0xAA, sizeof memory);
    put_greeting();
}

static int connect_with(uint32_t config_flags)
{
    nbd_config config = NBD_ZERO;

    config.flags = config_flags;
    config.slots = slots;
    config.slot_count = 2;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    memset(&sync_, 0, sizeof sync_);
    sync_.client = &client;
    sync_.timeout_ms = 10000;
    sync_.tls = tls;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    return nbd_sync_connect(&sync_, &transport);
}

static void open_server(void)
{
    CHECK_EQUAL(connect_with(0), 0);
}

static void open_blocks(uint32_t minimum, uint32_t maximum)
{
    set_server();
    server.minimum = minimum;
    server.maximum = maximum;
    open_server();
}

static void answer(uint32_t option, int how, const char *text)
{
    int i = 0;

    while (server.answers[i].option)
        i++;
    server.answers[i].option = option;
    server.answers[i].how = how;
    server.answers[i].text = text;
}

static void check_request(int index, unsigned type, unsigned flags, uint64_t offset, uint64_t size)
{
    const wire_request *got = &server.log[index];

    CHECK(index < server.count);
    CHECK_EQUAL(got->type, type);
    CHECK_EQUAL(got->flags, flags);
    CHECK_EQUAL(got->offset, offset);
    CHECK_EQUAL(got->size, size);
}

static void check_bytes_of(uint64_t offset, size_t size)
{
    size_t k;

    for (k = 0; k < size; k++)
        CHECK_EQUAL(memory[k], byte_at(offset + k));
    CHECK_EQUAL(memory[size], 0xAA);
}

static void fill_bytes_of(uint64_t offset, size_t size)
{
    size_t k;

    for (k = 0; k < size; k++)
        memory[k] = byte_at(offset + k);
}

static void check_over(int requests)
{
    CHECK_EQUAL(server.count, requests);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
}

/// Commands ///

static void each_call_is_one_command(void)
{
    set_server();
    open_server();
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 1000, 5), 0);
    check_bytes_of(5, 1000);
    fill_bytes_of(77, 600);
    CHECK_EQUAL(nbd_sync_write(&sync_, memory, 600, 77, NBD_FUA), 0);
    CHECK_EQUAL(nbd_sync_flush(&sync_), 0);
    CHECK_EQUAL(nbd_sync_trim(&sync_, 11, 12, NBD_FUA), 0);
    CHECK_EQUAL(nbd_sync_cache(&sync_, 13, 14), 0);
    CHECK_EQUAL(nbd_sync_write_zeroes(&sync_, 15, 16, NBD_NO_HOLE), 0);
    check_request(0, WIRE_READ, 0, 5, 1000);
    check_request(1, WIRE_WRITE, 1, 77, 600);
    check_request(2, WIRE_FLUSH, 0, 0, 0);
    check_request(3, WIRE_TRIM, 1, 12, 11);
    check_request(4, WIRE_CACHE, 0, 14, 13);
    check_request(5, WIRE_ZERO, 2, 16, 15);
    check_over(6);
}

static void no_bytes_are_done_at_once(void)
{
    set_server();
    open_server();
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 0, 0), 0);
    CHECK_EQUAL(nbd_sync_write(&sync_, memory, 0, EXPORT, 0), 0);
    CHECK_EQUAL(nbd_sync_trim(&sync_, 0, 0, 0), 0);
    check_over(0);
}

static void transfers_above_the_maximum_payload_are_split(void)
{
    open_blocks(1, 1024);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2600, 100), 0);
    check_bytes_of(100, 2600);
    check_request(0, WIRE_READ, 0, 100, 1024);
    check_request(1, WIRE_READ, 0, 1124, 1024);
    check_request(2, WIRE_READ, 0, 2148, 552);
    fill_bytes_of(3, 1025);
    CHECK_EQUAL(nbd_sync_write(&sync_, memory, 1025, 3, 0), 0);
    check_request(3, WIRE_WRITE, 0, 3, 1024);
    check_request(4, WIRE_WRITE, 0, 1027, 1);
    CHECK_EQUAL(nbd_sync_cache(&sync_, 2048, 0), 0);
    check_over(7);
}

static void commands_above_32_bits_are_split_in_preferred_blocks(void)
{
    set_server();
    server.size = UINT64_C(1) << 40;
    open_server();
    CHECK_EQUAL(nbd_sync_trim(&sync_, (UINT64_C(1) << 32) + 1, 3, 0), 0);
    check_request(0, WIRE_TRIM, 0, 3, 0xFFFFF000);
    check_request(1, WIRE_TRIM, 0, UINT64_C(3) + 0xFFFFF000, 4097);
    check_over(2);
}

// Whoever would be refused in the last part only is refused before the first.
static void split_call_is_refused_as_a_whole(void)
{
    open_blocks(512, 1024);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2048, EXPORT - 1024), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2048, EXPORT + 512), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2048, EXPORT), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2047, 0), NBD_ERR_BLOCK_SIZE);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2048, 256), NBD_ERR_BLOCK_SIZE);
    CHECK_EQUAL(server.count, 0);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2048, EXPORT - 2048), 0);
    check_over(2);
}

static void zeroing_takes_the_last_byte_and_no_byte_at_the_end(void)
{
    set_server();
    open_server();
    CHECK_EQUAL(nbd_sync_zero(&sync_, 1, EXPORT - 1, 0, NULL, 0), 0);
    check_request(0, WIRE_ZERO, 0, EXPORT - 1, 1);
    CHECK_EQUAL(nbd_sync_zero(&sync_, 0, EXPORT, 0, NULL, 0), 0);
    CHECK_EQUAL(nbd_sync_zero(&sync_, 0, EXPORT + 1, 0, NULL, 0), NBD_ERR_BOUNDS);
    check_over(1);
}

// The refusal and the end come together: there is no other way to be tried.
static void zeroing_ends_with_the_connection(void)
{
    static const unsigned char zeroes[512];

    set_server();
    server.fail_at = server.ends_at = 1;
    server.error = NBD_EINVAL;
    open_server();
    CHECK_EQUAL(nbd_sync_zero(&sync_, 512, 0, 0, zeroes, sizeof zeroes), NBD_EINVAL);
    check_over(1);
}

// Where a pointer reaches less than the preferred block, minimum blocks have to do.
static void preferred_block_of_half_the_memory_leaves_room_for_a_command(void)
{
    const uint32_t half = 0x80000000;

    set_server();
    server.minimum = 1;
    server.preferred = server.maximum = half;
    open_server();
    CHECK(nbd_fit(&client, NBD_READ, half) > half / 2);
    CHECK(nbd_fit(&client, NBD_CACHE, half) > half / 2);
    CHECK_EQUAL(nbd_sync_cache(&sync_, 0, 0), 0);
    check_over(0);
}

static void first_error_ends_a_split_call(void)
{
    open_blocks(1, 1024);
    server.fail_at = 2;
    server.error = NBD_ENOSPC;
    fill_bytes_of(0, 4096);
    CHECK_EQUAL(nbd_sync_write(&sync_, memory, 4096, 0, 0), NBD_ENOSPC);
    check_over(2);
}

static void misused_call_gives_the_refusal_back(void)
{
    set_server();
    open_server();
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 2, EXPORT - 1), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_sync_read(&sync_, NULL, 2, 0), NBD_ERR_ARG);
    CHECK_EQUAL(nbd_sync_trim(&sync_, 1, 0, NBD_DF), NBD_ERR_ARG);
    CHECK_EQUAL(nbd_sync_write_zeroes(&sync_, 1, 0, NBD_FAST_ZERO), NBD_ERR_UNSUPPORTED);
    check_over(0);
}

/// The wrong time ///

static void every_call_fails(int error)
{
    nbd_walk walk;
    uint64_t numbers[8];

    strcpy(sync_.message, "old");
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 1, 0), error);
    CHECK_EQUAL(sync_.message[0], 0);
    CHECK_EQUAL(nbd_sync_write(&sync_, memory, 1, 0, 0), error);
    CHECK_EQUAL(nbd_sync_flush(&sync_), error);
    CHECK_EQUAL(nbd_sync_trim(&sync_, 1, 0, 0), error);
    CHECK_EQUAL(nbd_sync_cache(&sync_, 1, 0), error);
    CHECK_EQUAL(nbd_sync_write_zeroes(&sync_, 1, 0, 0), error);
    strcpy(sync_.message, "old");
    CHECK_EQUAL(nbd_sync_zero(&sync_, 1, 0, 0, NULL, 0), error);
    CHECK_EQUAL(sync_.message[0], 0);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 1, 0, numbers, 8), error);
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_STATE);
}

static void calls_without_a_session_are_refused(void)
{
    set_server();
    memset(&sync_, 0, sizeof sync_);
    every_call_fails(NBD_ERR_STATE);
    CHECK_EQUAL(nbd_sync_connect(&sync_, &transport), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
    open_server();
    check_over(0);
    every_call_fails(NBD_ERR_STATE);
}

static void session_is_opened_once(void)
{
    set_server();
    open_server();
    CHECK_EQUAL(nbd_sync_connect(&sync_, &transport), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_sync_flush(&sync_), 0);
    check_over(1);
}

static void issue_flush(void)
{
    nbd_op op = NBD_ZERO;

    op.command = NBD_FLUSH;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
}

static void calls_are_busy_while_a_request_is_in_flight(void)
{
    nbd_event event;

    set_server();
    open_server();
    issue_flush();
    every_call_fails(NBD_ERR_BUSY);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_ERR_BUSY);
    CHECK_EQUAL(server.count, 0);
    CHECK_EQUAL(nbd_poll(&client, NBD_WANT_READ), 0);
    CHECK_EQUAL(nbd_next(&client, &event), 1);
    CHECK_EQUAL(event.type, NBD_EVENT_DONE);
    CHECK_EQUAL(nbd_sync_flush(&sync_), 0);
    check_over(2);
}

static void transport_without_a_wait_hook_is_refused(void)
{
    set_server();
    transport.wait = NULL;
    CHECK_EQUAL(connect_with(0), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    transport.wait = hook_wait;
    CHECK_EQUAL(nbd_sync_connect(&sync_, &transport), 0);
    check_over(0);
}

static void tls_transport_without_a_wait_hook_is_refused(void)
{
    nbd_transport deaf = transport;

    deaf.wait = NULL;
    set_server();
    answer(OPT_STARTTLS, ACCEPT, "");
    tls = &deaf;
    CHECK_EQUAL(connect_with(NBD_TLS_REQUIRE), NBD_ERR_STATE);
    CHECK_EQUAL(server.option, OPT_STARTTLS);
}

// A transport may shake hands in its receive hook, before anything comes.
static void greeting_is_asked_for_before_anything_is_waited_for(void)
{
    set_server();
    open_server();
    CHECK_EQUAL(waits_before_input, 0);
    check_over(0);
}

static void client_that_is_connected_is_refused(void)
{
    set_server();
    open_server();
    sync_.transport = NULL; // as with a second struct for one client
    CHECK_EQUAL(nbd_sync_connect(&sync_, &transport), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_TRANSMISSION);
}

static void options_and_tls_of_the_caller_are_not_for_blocking_calls(void)
{
    set_server();
    CHECK_EQUAL(connect_with(NBD_NEGOTIATE), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    set_server();
    answer(OPT_STARTTLS, ACCEPT, "");
    CHECK_EQUAL(connect_with(NBD_TLS_ALLOW), NBD_ERR_TLS);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
}

static void session_that_was_taken_elsewhere_is_no_longer_driven(void)
{
    nbd_event event;

    set_server();
    open_server();
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(nbd_next(&client, &event), 1);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_ERR_STATE);
}

static void walk_of_bytes_behind_the_export_is_refused(void)
{
    nbd_walk walk;
    uint64_t numbers[4];

    set_server();
    open_server();
    client.got.context_count = 1; // as if one had been agreed on
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 0, EXPORT + 1, numbers, 4), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 1, EXPORT, numbers, 4), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 0, EXPORT, numbers, 3), NBD_ERR_BUFFER);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 0, EXPORT, numbers, 4), 0);
    CHECK_EQUAL(nbd_walk_next(&walk), 0);
    CHECK_EQUAL(walk.size, 0);
    check_over(0);
}

/// Giving up ///

static void abandoned(int error)
{
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 512, 0), error);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    CHECK_EQUAL(nbd_count(&client)->in_flight, 0);
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 512, 0), NBD_ERR_STATE);
    check_over(1);
}

static void call_that_takes_too_long_abandons_the_connection(void)
{
    set_server();
    server.silent_at = 1;
    open_server();
    abandoned(NBD_ERR_TIMEOUT);
    CHECK_EQUAL(wait_timeout_ms, 10000);
}

static void limit_of_one_millisecond_is_a_limit(void)
{
    set_server();
    server.silent_at = 1;
    open_server();
    sync_.timeout_ms = 1;
    abandoned(NBD_ERR_TIMEOUT);
    CHECK_EQUAL(wait_timeout_ms, 1);
}

static void call_without_a_limit_waits_for_ever(void)
{
    set_server();
    open_server();
    sync_.timeout_ms = 0;
    receive_most = 1;
    wait_does = WAIT_FINDS_NOTHING;
    wait_times = 3;
    CHECK_EQUAL(nbd_sync_flush(&sync_), 0);
    sync_.timeout_ms = -5;
    CHECK_EQUAL(nbd_sync_flush(&sync_), 0);
    CHECK_EQUAL(wait_timeout_ms < 0 || waits == 0, 1);
    check_over(2);
}

static void failed_wait_abandons_the_connection(void)
{
    set_server();
    server.silent_at = 1;
    open_server();
    wait_does = WAIT_FAILS;
    wait_times = 1;
    abandoned(NBD_ERR_TRANSPORT);
}

static void wait_that_finds_nothing_with_time_left_is_tried_again(void)
{
    set_server();
    server.silent_at = 1;
    open_server();
    waits = 0;
    wait_does = WAIT_FINDS_NOTHING;
    wait_times = 2;
    abandoned(NBD_ERR_TIMEOUT);
    CHECK_EQUAL(waits, 3);
}

static void what_is_ready_at_the_last_moment_counts(void)
{
    set_server();
    open_server();
    waits = 0;
    wait_does = WAIT_USES_ALL_TIME;
    wait_times = 1;
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 512, 0), 0);
    CHECK_EQUAL(waits, 1);
    server.silent_at = 2;
    wait_times = 1;
    CHECK_EQUAL(nbd_sync_read(&sync_, memory, 512, 0), NBD_ERR_TIMEOUT);
    CHECK_EQUAL(waits, 2);
    check_over(2);
}

// Where there is no clock, a MiB that moved counts as a millisecond.
static void server_that_never_pauses_runs_into_the_limit(void)
{
    static unsigned char much[16 << 20];

    set_server();
    server.size = UINT64_C(1) << 40;
    server.endless = 1;
    open_server();
    sync_.timeout_ms = 4;
    CHECK_EQUAL(nbd_sync_read(&sync_, much, sizeof much, 0), NBD_ERR_TIMEOUT);
    CHECK(received >= 4 << 20);
    CHECK(received <= 6 << 20);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
}

static void close_gives_up_a_server_that_stays(void)
{
    set_server();
    server.stays = 1;
    open_server();
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_ERR_TIMEOUT);
    CHECK_EQUAL(stream.stage, STAGE_SILENT);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
}

static void server_that_hangs_up_ends_the_call(void)
{
    set_server();
    server.silent_at = 1;
    open_server();
    stream.stage = STAGE_TRANSMISSION;
    CHECK_EQUAL(nbd_sync_flush(&sync_), NBD_ERR_TIMEOUT);
    set_server();
    open_server();
    stream.stage = STAGE_OVER; // before it has heard anything
    CHECK_EQUAL(nbd_sync_flush(&sync_), NBD_ERR_CLOSED);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
}

// The server ends the session by itself: the call was answered, the next finds it over.
static void shutdown_of_the_server_ends_the_session(void)
{
    set_server();
    server.fail_at = 1;
    server.error = NBD_ESHUTDOWN;
    open_server();
    CHECK_EQUAL(nbd_sync_flush(&sync_), NBD_ESHUTDOWN);
    CHECK_EQUAL(nbd_sync_flush(&sync_), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_sync_close(&sync_), NBD_ESHUTDOWN);
}

/// The server's words ///

typedef struct words_row {
    uint32_t config_flags;
    uint32_t option;
    int how;
    const char *text;
    int then_go; // how GO is answered, without words
    int error;
    const char *message;
} words_row;

static const words_row words_rows[] = {
    {0, OPT_GO, POLICY, "not \"you\"\n", POLICY, NBD_REP_ERR_POLICY, "not \"you\"\\x0a"},
    {0, OPT_GO, 6, "which?", 6, NBD_REP_ERR_UNKNOWN, "which?"},
    {0, OPT_STRUCTURED, POLICY, "no chunks", HANG_UP, NBD_ERR_CLOSED, ""},
    {0, OPT_STRUCTURED, POLICY, "no chunks", ACCEPT, 0, ""},
    {NBD_TLS_REQUIRE, OPT_STARTTLS, POLICY, "no TLS", ACCEPT, NBD_ERR_TLS, "no TLS"},
    {NBD_TLS_ALLOW, OPT_STARTTLS, POLICY, "no TLS", HANG_UP, NBD_ERR_CLOSED, ""},
    {0, OPT_GO, UNSUP, "no GO", UNSUP, NBD_ERR_CLOSED, ""}, // hangs up at EXPORT_NAME
};

static void words_explain_the_error_they_belong_to(void)
{
    size_t i;

    for (i = 0; i < sizeof words_rows / sizeof words_rows[0]; i++) {
        const words_row *row = &words_rows[i];

        snprintf(check.where, sizeof check.where, "row %d", (int)i);
        set_server();
        answer(row->option, row->how, row->text);
        if (row->option != OPT_GO) answer(OPT_GO, row->then_go, "");
        answer(NBD_OPTION_EXPORT_NAME, HANG_UP, "");
        CHECK_EQUAL(connect_with(row->config_flags), row->error);
        CHECK_BYTES(sync_.message, row->message, strlen(row->message) + 1);
        CHECK_EQUAL(nbd_sync_close(&sync_), 0);
    }
}

// A program without a library for TLS: what a URI or a server wants sealed is not opened in
// clear, and the error tells whose lack it is.
static void tls_that_a_side_lacks_is_never_left_out(void)
{
    enum { TLS_REQUIRED = 5 };
    static const struct {
        const char *uri;
        int starttls, go; // how these are answered
        uint64_t last_option;
        int error;
    } rows[] = {
        {"nbds://host/x", UNSUP, ACCEPT, OPT_STARTTLS, NBD_ERR_TLS},
        {"nbds://host/x", ACCEPT, ACCEPT, OPT_STARTTLS, NBD_ERR_TLS},
        {"nbd://host/x", ACCEPT, TLS_REQUIRED, OPT_GO, NBD_REP_ERR_TLS_REQD},
    };
    size_t i;

    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[64];
        nbd_uri uri;

        snprintf(check.where, sizeof check.where, "row %d", (int)i);
        CHECK_EQUAL(nbd_uri_parse(&uri, rows[i].uri, text, sizeof text), 0);
        set_server();
        answer(OPT_STARTTLS, rows[i].starttls, "");
        answer(OPT_GO, rows[i].go, "");
        CHECK_EQUAL(connect_with(uri.config_flags), rows[i].error);
        CHECK_EQUAL(server.option, rows[i].last_option);
        CHECK_EQUAL(nbd_sync_close(&sync_), 0);
    }
}

static void failed_handshake_leaves_room_for_the_next(void)
{
    set_server();
    answer(OPT_GO, POLICY, "no");
    CHECK_EQUAL(connect_with(0), NBD_REP_ERR_POLICY);
    CHECK(sync_.transport == NULL);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    set_server();
    CHECK_EQUAL(nbd_sync_connect(&sync_, &transport), 0);
    CHECK_EQUAL(sync_.message[0], 0);
    check_over(0);
}

static void words_stay_for_who_closes(void)
{
    set_server();
    open_server();
    strcpy(sync_.message, "why");
    check_over(0);
    CHECK(strcmp(sync_.message, "why") == 0);
}

static void words_of_another_call_are_gone(void)
{
    set_server();
    open_server();
    check_over(0);
    set_server();
    answer(OPT_GO, HANG_UP, "");
    strcpy(sync_.message, "old");
    CHECK_EQUAL(nbd_sync_connect(&sync_, &transport), NBD_ERR_CLOSED);
    CHECK_EQUAL(sync_.message[0], 0);
}

/// nbd_escape ///

typedef struct escape_row {
    const char *from;
    size_t size;
    size_t room;
    const char *to;
} escape_row;

static const escape_row escape_rows[] = {
    {"abc", 3, 4, "abc"},
    {"abc", 3, 3, "ab"},
    {"abc", 3, 1, ""},
    {"", 0, 1, ""},
    {" ~", 2, 9, " ~"},
    {"\x1f", 1, 9, "\\x1f"},
    {"\x7f", 1, 9, "\\x7f"},
    {"\\", 1, 9, "\\x5c"},
    {"\0", 1, 9, "\\x00"},
    {"\xff\xa0", 2, 9, "\\xff\\xa0"},
    {"\xff", 1, 5, "\\xff"},
    {"\xff", 1, 4, ""},
    {"a\xff", 2, 6, "a\\xff"},
    {"a\xff", 2, 5, "a"},
    {"\xff"
     "a",
     2, 5, "\\xff"},
};

static void escaped_text_is_printable_and_never_cut_in_an_escape(void)
{
    size_t i;

    for (i = 0; i < sizeof escape_rows / sizeof escape_rows[0]; i++) {
        const escape_row *row = &escape_rows[i];
        char to[16];

        snprintf(check.where, sizeof check.where, "row %d", (int)i);
        memset(to, '!', sizeof to);
        CHECK_EQUAL(nbd_escape(to, row->room, row->from, row->size), strlen(row->to));
        CHECK_BYTES(to, row->to, strlen(row->to) + 1);
        CHECK_EQUAL(to[row->room], '!');
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(each_call_is_one_command);
    CHECK_CASE(no_bytes_are_done_at_once);
    CHECK_CASE(transfers_above_the_maximum_payload_are_split);
    CHECK_CASE(commands_above_32_bits_are_split_in_preferred_blocks);
    CHECK_CASE(split_call_is_refused_as_a_whole);
    CHECK_CASE(zeroing_takes_the_last_byte_and_no_byte_at_the_end);
    CHECK_CASE(zeroing_ends_with_the_connection);
    CHECK_CASE(preferred_block_of_half_the_memory_leaves_room_for_a_command);
    CHECK_CASE(first_error_ends_a_split_call);
    CHECK_CASE(misused_call_gives_the_refusal_back);
    CHECK_CASE(calls_without_a_session_are_refused);
    CHECK_CASE(session_is_opened_once);
    CHECK_CASE(calls_are_busy_while_a_request_is_in_flight);
    CHECK_CASE(transport_without_a_wait_hook_is_refused);
    CHECK_CASE(tls_transport_without_a_wait_hook_is_refused);
    CHECK_CASE(greeting_is_asked_for_before_anything_is_waited_for);
    CHECK_CASE(client_that_is_connected_is_refused);
    CHECK_CASE(options_and_tls_of_the_caller_are_not_for_blocking_calls);
    CHECK_CASE(walk_of_bytes_behind_the_export_is_refused);
    CHECK_CASE(session_that_was_taken_elsewhere_is_no_longer_driven);
    CHECK_CASE(call_that_takes_too_long_abandons_the_connection);
    CHECK_CASE(limit_of_one_millisecond_is_a_limit);
    CHECK_CASE(call_without_a_limit_waits_for_ever);
    CHECK_CASE(failed_wait_abandons_the_connection);
    CHECK_CASE(wait_that_finds_nothing_with_time_left_is_tried_again);
    CHECK_CASE(what_is_ready_at_the_last_moment_counts);
    CHECK_CASE(server_that_never_pauses_runs_into_the_limit);
    CHECK_CASE(close_gives_up_a_server_that_stays);
    CHECK_CASE(server_that_hangs_up_ends_the_call);
    CHECK_CASE(shutdown_of_the_server_ends_the_session);
    CHECK_CASE(words_explain_the_error_they_belong_to);
    CHECK_CASE(words_stay_for_who_closes);
    CHECK_CASE(words_of_another_call_are_gone);
    CHECK_CASE(tls_that_a_side_lacks_is_never_left_out);
    CHECK_CASE(failed_handshake_leaves_room_for_the_next);
    CHECK_CASE(escaped_text_is_printable_and_never_cut_in_an_escape);
    return check_end();
}
