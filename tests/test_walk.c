// nbd_fit, nbd_sync_zero and the walker, against a server in process that is written from
// the specification: it checks every request, notes it, and answers as a case says.
#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "check.h"
#include "stream.h"

enum {
    CONTEXTS = 3,
    DISK = 1 << 16, // bytes of the export that are kept
    LOG = 4096,
    ANSWERS = 8,
    READ_ONLY = 0x2,
    // What the server offers: FLUSH, FUA, TRIM, WRITE_ZEROES, FAST_ZERO.
    ALL = 0x1 | 0x4 | 0x8 | 0x20 | 0x40 | 0x800,
    ZEROES = 0x1 | 0x40,
    BARE = 0x1 | 0x20
};

// Numbers of the wire.
enum { WIRE_WRITE = 1, WIRE_DISC = 2, WIRE_ZERO = 6, WIRE_STATUS = 7 };
enum { WIRE_FUA = 1, WIRE_NO_HOLE = 2, WIRE_FAST = 16, WIRE_PAYLOAD = 32 };
enum { IO = 5, NO_MEMORY = 12, INVALID = 22, NO_SPACE = 28, TOO_BIG = 75, NOT_SUPPORTED = 95 };

static const uint64_t GIB = UINT64_C(1) << 30;

typedef struct wire_extent {
    uint64_t size;
    uint64_t flags;
} wire_extent;

typedef struct wire_request {
    unsigned flags;
    unsigned type;
    uint64_t offset;
    uint64_t size;
} wire_request;

// What the server is; the rest of it is how far it has come.
static struct server {
    int extended;
    uint64_t size;
    unsigned flags;
    uint32_t minimum, preferred, maximum; // minimum 0: not advertised
    uint32_t context_count;
    const wire_extent *map[CONTEXTS]; // repeats itself; NULL: one extent of flags 0
    size_t map_count[CONTEXTS];
    unsigned most[CONTEXTS]; // extents in a reply; 0: no limit
    uint64_t longest;        // bytes of an extent; 0: no limit
    int overlong;            // the last extent is told whole, not cut to the request
    uint64_t behind;         // bytes that the last extent reaches behind the export
    int stuck;               // tells what lies before `stuck_at` only
    uint64_t stuck_at;
    uint32_t answers[ANSWERS]; // errors for the first requests
    int fail_at;               // number of the request that fails with IO, from 1; 0: none

    wire_request log[LOG];
    int count;
    uint64_t extents; // sent
    unsigned char disk[DISK];
} server;

static nbd_client client;
static nbd_slot slots[2];
static nbd_context contexts[CONTEXTS];
static unsigned char buffer[NBD_BUFFER_NAMES];
static nbd_sync sync_;
static const char *const queries[] = {"a:a", "b:b", "c:c"};

/// The server's side of the wire ///

static void answer_set_meta(void)
{
    uint32_t i;

    CHECK_EQUAL(get(16, 4), 0);
    CHECK_EQUAL(get(20, 4), server.context_count);
    for (i = 0; i < server.context_count; i++) {
        option_reply(10, 4, 4 + 3);
        put(100 + i, 4);
        put_text(queries[i]);
    }
    option_reply(10, 1, 0);
}

static void answer_go(void)
{
    option_reply(7, 3, 12);
    put(0, 2);
    put(server.size, 8);
    put(server.flags, 2);
    if (server.minimum) {
        option_reply(7, 3, 14);
        put(3, 2);
        put(server.minimum, 4);
        put(server.preferred, 4);
        put(server.maximum, 4);
    }
    option_reply(7, 1, 0);
    stream.stage = STAGE_TRANSMISSION;
}

static size_t take_option(void)
{
    size_t size;

    if (arrived() < 16) return 0;
    CHECK(get(0, 8) == UINT64_C(0x49484156454F5054));
    size = 16 + (size_t)get(12, 4);
    if (arrived() < size) return 0;
    switch (get(8, 4)) {
    case 7: answer_go(); break;
    case 8: option_reply(8, 1, 0); break;
    case 10: answer_set_meta(); break;
    case 11: option_reply(11, server.extended ? 1 : UINT32_C(0x80000001), 0); break;
    default: check_fail(__FILE__, __LINE__, "option that was not to be sent");
    }
    return size;
}

// A chunk of the last reply.  Requests need no more than simple errors but block status.
static void put_chunk(unsigned type, uint64_t size)
{
    put(server.extended ? 0x6E8A278C : 0x668E33EF, 4);
    put(0, 2);
    put(type, 2);
    put(get(8, 8), 8);
    if (server.extended) put(get(16, 8), 8);
    put(size, server.extended ? 8 : 4);
}

static void put_last_chunk(uint32_t error)
{
    static const char text[] = "because\n";
    size_t at = stream.out_size;

    put_chunk(error ? 0x8001 : 0, error ? 6 + strlen(text) : 0);
    stream.out[at + 5] = 1;
    if (!error) return;
    put(error, 4);
    put(strlen(text), 2);
    put_text(text);
}

// The extent of a context that holds `place`, from there on: its flags and where it ends.
static uint64_t extent_end(uint32_t context, uint64_t place, uint64_t *flags)
{
    const wire_extent *map = server.map[context];
    uint64_t turn = 0, at;
    size_t i;

    *flags = 0;
    if (!map) return server.size;
    for (i = 0; i < server.map_count[context]; i++)
        turn += map[i].size;
    at = place % turn;
    for (i = 0; at >= map[i].size; i++)
        at -= map[i].size;
    *flags = map[i].flags;
    return place + map[i].size - at < server.size ? place + map[i].size - at : server.size;
}

static void put_context(uint32_t context, uint64_t from, uint64_t to)
{
    unsigned width = server.extended ? 8 : 4, sent = 0;
    size_t head = stream.out_size, length;

    put_chunk(server.extended ? 6 : 5, 0);
    length = stream.out_size - width;
    put(100 + context, 4);
    if (server.extended) put(0, 4);
    if (server.stuck && from >= server.stuck_at) to = from + 1;
    while (from < to && (!server.most[context] || sent < server.most[context])) {
        uint64_t flags, end = extent_end(context, from, &flags);

        if (server.longest && end - from > server.longest) end = from + server.longest;
        if (end > to && !server.overlong) end = to;
        if (end == server.size) end += server.behind;
        if (width == 4 && end - from > UINT32_MAX) end = from + UINT32_MAX;
        put(end - from, width);
        put(flags, width);
        from = end;
        sent++;
    }
    server.extents += sent;
    if (server.extended) {
        size_t end = stream.out_size;

        stream.out_size = length + 8 + 4;
        put(sent, 4);
        stream.out_size = end;
    }
    head = stream.out_size;
    stream.out_size = length;
    put(head - length - width, width);
    stream.out_size = head;
}

static uint32_t error_of(const wire_request *request)
{
    uint32_t error = server.count <= ANSWERS ? server.answers[server.count - 1] : 0;
    uint64_t block = server.minimum ? server.minimum : 1;

    CHECK(request->size > 0);
    CHECK_EQUAL((request->offset | request->size) % block, 0);
    CHECK(request->offset <= server.size);
    CHECK(request->size <= server.size - request->offset);
    return server.count == server.fail_at ? IO : error;
}

static void do_write(const wire_request *request, size_t header)
{
    uint64_t k;

    for (k = 0; k < request->size; k++) {
        uint64_t place = request->offset + k;
        unsigned char byte = 0;

        if (request->type == WIRE_WRITE) byte = stream.in[stream.in_done + header + (size_t)k];
        CHECK_EQUAL(byte, 0);
        if (place >= DISK) break;
        server.disk[place] = byte;
    }
}

static void answer(const wire_request *request, size_t header)
{
    uint32_t error = error_of(request), i;

    if (!error && request->type == WIRE_STATUS) {
        for (i = server.context_count; i-- > 0;)
            put_context(i, request->offset, request->offset + request->size);
    } else if (!error) {
        do_write(request, header);
    }
    put_last_chunk(error);
}

static size_t take_request(void)
{
    size_t header = server.extended ? 32 : 28, payload = 0;
    wire_request request;

    if (arrived() < header) return 0;
    CHECK_EQUAL(get(0, 4), server.extended ? 0x21E41C71 : 0x25609513);
    request.flags = (unsigned)get(4, 2);
    request.type = (unsigned)get(6, 2);
    request.offset = get(16, 8);
    request.size = get(24, server.extended ? 8 : 4);
    if (request.type == WIRE_DISC) {
        stream.stage = STAGE_OVER;
        return header;
    }
    if (request.type == WIRE_WRITE) {
        payload = (size_t)request.size;
        CHECK(!server.extended || (request.flags & WIRE_PAYLOAD));
        request.flags &= ~(unsigned)WIRE_PAYLOAD;
        CHECK(!server.minimum || request.size <= server.maximum);
    }
    if (arrived() < header + payload) return 0;
    CHECK(server.count < LOG);
    server.log[server.count++] = request;
    answer(&request, header);
    return header + payload;
}

static void serve(void)
{
    size_t taken = 1;

    while (taken && arrived()) {
        switch (stream.stage) {
        case STAGE_FLAGS:
            taken = arrived() < 4 ? 0 : 4;
            if (taken) stream.stage = STAGE_OPTIONS;
            break;
        case STAGE_OPTIONS: taken = take_option(); break;
        case STAGE_TRANSMISSION: taken = take_request(); break;
        default: check_fail(__FILE__, __LINE__, "bytes behind the disconnect");
        }
        took(taken);
    }
}

/// The transport ///

static ptrdiff_t hook_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    (void)context;
    (void)count;
    return stream_recv(iov, STREAM);
}

static int hook_wait(void *context, unsigned wants, int *timeout_ms)
{
    (void)context;
    return stream_wait(wants, timeout_ms);
}

static const nbd_transport transport = {0, NULL, hook_send, hook_recv, hook_wait, NULL, NULL};

/// Sessions ///

// A server of this size; a case changes what it needs before it opens.
static void set_server(int extended, uint64_t size, unsigned flags)
{
    memset(&server, 0, sizeof server);
    memset(&stream, 0, sizeof stream);
    memset(server.disk, 0xAA, DISK);
    server.extended = extended;
    server.size = size;
    server.flags = flags;
}

static void set_blocks(uint64_t size)
{
    set_server(0, size, ALL);
    server.minimum = 512;
    server.preferred = 4096;
    server.maximum = 65536;
}

static void open_server(void)
{
    nbd_config config = NBD_ZERO;

    put_greeting();
    config.slots = slots;
    config.slot_count = 2;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.queries = queries;
    config.query_count = server.context_count;
    config.contexts = contexts;
    config.context_count = CONTEXTS;
    memset(&sync_, 0, sizeof sync_);
    sync_.client = &client;
    sync_.timeout_ms = 10000;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_sync_connect(&sync_, &transport), 0);
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

static void check_over(int requests)
{
    CHECK_EQUAL(server.count, requests);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
}

/// nbd_fit ///

static void fit_is_all_that_was_asked_for_if_one_command_takes_it(void)
{
    set_server(0, 1, ALL);
    open_server();
    CHECK_EQUAL(nbd_fit(&client, NBD_READ, 0), 0);
    CHECK_EQUAL(nbd_fit(&client, NBD_READ, 1), 1);
    CHECK_EQUAL(nbd_fit(&client, NBD_WRITE, 33554431), 33554431);
    CHECK_EQUAL(nbd_fit(&client, NBD_TRIM, UINT32_MAX), UINT32_MAX);
}

static void fit_of_transfers_is_the_maximum_payload(void)
{
    set_server(1, 1, ALL);
    open_server();
    CHECK_EQUAL(nbd_fit(&client, NBD_READ, UINT64_MAX), 33554432);
    CHECK_EQUAL(nbd_fit(&client, NBD_WRITE, 33554433), 33554432);
    CHECK_EQUAL(nbd_fit(&client, NBD_CACHE, UINT64_MAX), 33554432);
}

static void fit_of_the_rest_is_32_bits_without_extended_headers(void)
{
    set_server(0, 1, ALL);
    open_server();
    CHECK_EQUAL(nbd_fit(&client, NBD_TRIM, UINT64_MAX), UINT32_MAX - 4095);
    CHECK_EQUAL(nbd_fit(&client, NBD_WRITE_ZEROES, 4 * GIB), UINT32_MAX - 4095);
    CHECK_EQUAL(nbd_fit(&client, NBD_BLOCK_STATUS, 4 * GIB), UINT32_MAX - 4095);
}

static void fit_of_the_rest_is_64_bits_with_extended_headers(void)
{
    set_server(1, 1, ALL);
    open_server();
    CHECK(nbd_fit(&client, NBD_TRIM, UINT64_MAX) == UINT64_MAX);
    CHECK(nbd_fit(&client, NBD_WRITE_ZEROES, 1025 * GIB) == 1025 * GIB);
    CHECK(nbd_fit(&client, NBD_BLOCK_STATUS, 4 * GIB) == 4 * GIB);
}

static void fit_is_whole_preferred_blocks_unless_it_is_all(void)
{
    set_server(0, 1 << 20, ALL);
    server.minimum = 512;
    server.preferred = 8192;
    server.maximum = 20001;
    open_server();
    CHECK_EQUAL(nbd_fit(&client, NBD_WRITE, 20001), 20001);
    CHECK_EQUAL(nbd_fit(&client, NBD_WRITE, 20002), 16384);
    CHECK_EQUAL(nbd_fit(&client, NBD_TRIM, UINT64_MAX), UINT32_MAX - 8191);
}

/// nbd_sync_zero ///

static const unsigned char zeroes[4096];

static int zero(uint64_t size, uint64_t offset, uint32_t flags)
{
    return nbd_sync_zero(&sync_, size, offset, flags, zeroes, sizeof zeroes);
}

static int zero_without_buffer(uint64_t size, uint64_t offset, uint32_t flags)
{
    return nbd_sync_zero(&sync_, size, offset, flags, NULL, 0);
}

// The bytes from `from` to `to` are zero, the others are as they were.
static void check_zeroed(uint64_t from, uint64_t to)
{
    uint64_t k;

    for (k = 0; k < DISK; k++)
        CHECK_EQUAL(server.disk[k], k >= from && k < to ? 0 : 0xAA);
}

// An export of the size of the disk, whose first requests are answered with these errors.
static void set_answers(unsigned flags, uint32_t first, uint32_t second, uint32_t third)
{
    set_server(0, DISK, flags);
    server.answers[0] = first;
    server.answers[1] = second;
    server.answers[2] = third;
    open_server();
}

static void zero_is_write_zeroes_where_it_is_offered(void)
{
    set_answers(ALL, 0, 0, 0);
    CHECK_EQUAL(zero(12345, 77, NBD_FUA | NBD_NO_HOLE), 0);
    check_request(0, WIRE_ZERO, WIRE_FUA | WIRE_NO_HOLE, 77, 12345);
    check_zeroed(77, 77 + 12345);
    check_over(1);
}

static void zero_writes_the_buffer_where_it_is_not_offered(void)
{
    set_answers(BARE | 0x8, 0, 0, 0);
    CHECK_EQUAL(zero(10000, 33, NBD_FUA | NBD_NO_HOLE | NBD_FAST_ZERO), 0);
    check_request(0, WIRE_WRITE, WIRE_FUA, 33, 4096);
    check_request(1, WIRE_WRITE, WIRE_FUA, 33 + 4096, 4096);
    check_request(2, WIRE_WRITE, WIRE_FUA, 33 + 8192, 10000 - 8192);
    check_zeroed(33, 10033);
    check_over(3);
}

static void zero_pieces_are_whole_minimum_blocks_of_the_buffer(void)
{
    set_server(0, DISK, BARE);
    server.minimum = 512;
    server.preferred = 4096;
    server.maximum = 65536;
    open_server();
    CHECK_EQUAL(nbd_sync_zero(&sync_, 2560, 512, 0, zeroes, 1535), 0);
    check_request(0, WIRE_WRITE, 0, 512, 1024);
    check_request(1, WIRE_WRITE, 0, 1536, 1024);
    check_request(2, WIRE_WRITE, 0, 2560, 512);
    check_zeroed(512, 3072);
    check_over(3);
}

static void zero_pieces_are_bounded_by_the_maximum_payload(void)
{
    set_server(1, DISK, BARE);
    server.minimum = 1;
    server.preferred = 512;
    server.maximum = 1500;
    open_server();
    CHECK_EQUAL(zero(2600, 3, 0), 0);
    check_request(0, WIRE_WRITE, 0, 3, 1024);
    check_request(1, WIRE_WRITE, 0, 1027, 1024);
    check_request(2, WIRE_WRITE, 0, 2051, 552);
    check_zeroed(3, 2603);
    check_over(3);
}

// Each WRITE starts at the first byte of the buffer, so its alignment is the payload's.
static void zero_writes_only_from_the_start_of_the_buffer(void)
{
    static const unsigned char just[600];
    unsigned char copy[1200];

    memset(copy, 0x55, sizeof copy);
    memcpy(copy, just, sizeof just);
    set_answers(BARE, 0, 0, 0);
    CHECK_EQUAL(nbd_sync_zero(&sync_, 1300, 0, 0, copy, sizeof just), 0);
    CHECK_BYTES(copy, just, sizeof just);
    check_zeroed(0, 1300);
    check_over(3);
}

static void zero_is_fast_first_if_asked_for(void)
{
    set_answers(ALL, 0, 0, 0);
    CHECK_EQUAL(zero(100, 0, NBD_FAST_ZERO), 0);
    check_request(0, WIRE_ZERO, WIRE_FAST, 0, 100);
    check_over(1);
}

static void zero_is_not_fast_unless_asked_for(void)
{
    set_answers(ALL, 0, 0, 0);
    CHECK_EQUAL(zero(100, 0, 0), 0);
    check_request(0, WIRE_ZERO, 0, 0, 100);
    check_over(1);
}

static void fast_zero_that_is_not_offered_is_plain(void)
{
    set_answers(ZEROES, 0, 0, 0);
    CHECK_EQUAL(zero(100, 0, NBD_FAST_ZERO), 0);
    check_request(0, WIRE_ZERO, 0, 0, 100);
    check_over(1);
}

static void fast_zero_that_is_refused_is_plain(void)
{
    set_answers(ALL, NOT_SUPPORTED, 0, 0);
    CHECK_EQUAL(zero(100, 5, NBD_FAST_ZERO | NBD_FUA), 0);
    check_request(0, WIRE_ZERO, WIRE_FAST | WIRE_FUA, 5, 100);
    check_request(1, WIRE_ZERO, WIRE_FUA, 5, 100);
    check_zeroed(5, 105);
    check_over(2);
}

// B83: plain WRITE_ZEROES must not be refused so, but is.
static void zero_that_is_refused_twice_is_written(void)
{
    set_answers(ALL, NOT_SUPPORTED, NOT_SUPPORTED, 0);
    CHECK_EQUAL(zero(5000, 5, NBD_FAST_ZERO | NBD_NO_HOLE), 0);
    check_request(0, WIRE_ZERO, WIRE_FAST | WIRE_NO_HOLE, 5, 5000);
    check_request(1, WIRE_ZERO, WIRE_NO_HOLE, 5, 5000);
    check_request(2, WIRE_WRITE, 0, 5, 4096);
    check_request(3, WIRE_WRITE, 0, 4101, 904);
    check_zeroed(5, 5005);
    check_over(4);
}

// B83: lengths below the server's block.
static void zero_that_is_invalid_is_written(void)
{
    set_answers(ALL, INVALID, 0, 0);
    CHECK_EQUAL(zero(100, 5, 0), 0);
    check_request(0, WIRE_ZERO, 0, 5, 100);
    check_request(1, WIRE_WRITE, 0, 5, 100);
    check_zeroed(5, 105);
    check_over(2);
}

static void zero_that_is_too_big_is_tried_with_the_maximum_payload(void)
{
    set_server(0, DISK, ALL);
    server.minimum = 1;
    server.preferred = 512;
    server.maximum = 20000;
    server.answers[0] = TOO_BIG;
    open_server();
    CHECK_EQUAL(zero(30000, 1, 0), 0);
    check_request(0, WIRE_ZERO, 0, 1, 30000);
    check_request(1, WIRE_ZERO, 0, 1, 19968);
    check_request(2, WIRE_ZERO, 0, 19969, 10032);
    check_zeroed(1, 30001);
    check_over(3);
}

static void zero_that_stays_too_big_is_written(void)
{
    set_server(0, DISK, ALL);
    server.minimum = 1;
    server.preferred = 512;
    server.maximum = 4096;
    server.answers[0] = server.answers[1] = TOO_BIG;
    open_server();
    CHECK_EQUAL(zero(8192, 0, 0), 0);
    check_request(0, WIRE_ZERO, 0, 0, 8192);
    check_request(1, WIRE_ZERO, 0, 0, 4096);
    check_request(2, WIRE_WRITE, 0, 0, 4096);
    check_request(3, WIRE_WRITE, 0, 4096, 4096);
    check_over(4);
}

static void zero_without_buffer_gives_the_refusal_back(void)
{
    set_answers(ALL, NOT_SUPPORTED, INVALID, 0);
    CHECK_EQUAL(zero_without_buffer(100, 0, NBD_FAST_ZERO), NBD_EINVAL);
    CHECK(strcmp(sync_.message, "because\\x0a") == 0);
    check_over(2);
}

static void message_of_a_refusal_is_gone_when_another_way_worked(void)
{
    set_answers(ALL, NOT_SUPPORTED, 0, 0);
    CHECK_EQUAL(zero(100, 0, 0), 0);
    CHECK_EQUAL(sync_.message[0], '\0');
    check_over(2);
}

static void zero_that_fails_is_not_tried_in_another_way(void)
{
    static const struct {
        uint32_t sent;
        int error;
    } failures[] = {{IO, NBD_EIO}, {NO_SPACE, NBD_ENOSPC}, {NO_MEMORY, NBD_ENOMEM}};
    size_t i;

    for (i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        set_answers(ALL, failures[i].sent, 0, 0);
        CHECK_EQUAL(zero(100, 0, NBD_FAST_ZERO), failures[i].error);
        check_over(1);
    }
}

static void zero_gives_the_error_of_a_write_back(void)
{
    set_answers(ALL, INVALID, 0, INVALID);
    CHECK_EQUAL(zero(10000, 0, 0), NBD_EINVAL);
    check_request(2, WIRE_WRITE, 0, 4096, 4096);
    check_zeroed(0, 4096);
    check_over(3);
}

static void zero_above_32_bits_is_split(void)
{
    set_server(0, 9 * GIB, ALL);
    open_server();
    CHECK_EQUAL(zero(5 * GIB + 1, 3, 0), 0);
    check_request(0, WIRE_ZERO, 0, 3, UINT32_MAX - 4095);
    check_request(1, WIRE_ZERO, 0, 4 * GIB - 4093, GIB + 4097);
    check_over(2);
}

static void zero_is_one_command_with_extended_headers(void)
{
    set_server(1, 9 * GIB, ALL);
    open_server();
    CHECK_EQUAL(zero(9 * GIB - 3, 3, NBD_FAST_ZERO), 0);
    check_request(0, WIRE_ZERO, WIRE_FAST, 3, 9 * GIB - 3);
    check_over(1);
}

// What was zeroed is not written again, and what was refused is not tried again.
static void zero_goes_on_where_it_was_refused(void)
{
    set_server(0, 5 * GIB, ALL);
    server.answers[1] = server.answers[2] = NOT_SUPPORTED;
    open_server();
    CHECK_EQUAL(zero(4 * GIB + 4096, 0, NBD_FAST_ZERO), 0);
    check_request(0, WIRE_ZERO, WIRE_FAST, 0, UINT32_MAX - 4095);
    check_request(1, WIRE_ZERO, WIRE_FAST, 4 * GIB - 4096, 8192);
    check_request(2, WIRE_ZERO, 0, 4 * GIB - 4096, 8192);
    check_request(3, WIRE_WRITE, 0, 4 * GIB - 4096, 4096);
    check_request(4, WIRE_WRITE, 0, 4 * GIB, 4096);
    check_over(5);
}

static void misused_zero_sends_nothing(void)
{
    set_server(0, DISK, ZEROES);
    server.minimum = 512;
    server.preferred = 512;
    server.maximum = 4096;
    open_server();
    CHECK_EQUAL(zero(512, 0, NBD_DF), NBD_ERR_ARG);
    CHECK_EQUAL(zero(1024, DISK - 512, 0), NBD_ERR_BOUNDS);
    CHECK_EQUAL(zero(UINT64_MAX - 511, 512, 0), NBD_ERR_BOUNDS);
    CHECK_EQUAL(zero(100, 0, 0), NBD_ERR_BLOCK_SIZE);
    CHECK_EQUAL(zero(8192, 100, 0), NBD_ERR_BLOCK_SIZE);
    CHECK_EQUAL(nbd_sync_zero(&sync_, 512, 0, 0, zeroes, 511), NBD_ERR_BUFFER);
    CHECK_EQUAL(zero(512, 0, NBD_FUA), NBD_ERR_UNSUPPORTED);
    CHECK_EQUAL(zero_without_buffer(512, 0, NBD_FUA), NBD_ERR_UNSUPPORTED);
    CHECK_EQUAL(zero(0, 0, 0), 0);
    check_zeroed(0, 0);
    check_over(0);
    CHECK_EQUAL(zero(512, 0, 0), NBD_ERR_STATE);
}

static void zero_is_refused_as_a_whole_before_its_first_piece(void)
{
    set_blocks(DISK);
    server.flags = BARE;
    open_server();
    CHECK_EQUAL(zero(16384, DISK - 8192, 0), NBD_ERR_BOUNDS);
    CHECK_EQUAL(zero(8292, 0, 0), NBD_ERR_BLOCK_SIZE);
    check_over(0);
}

static void zero_of_a_read_only_export_is_refused(void)
{
    set_answers(ALL | READ_ONLY, 0, 0, 0);
    CHECK_EQUAL(zero(512, 0, 0), NBD_ERR_READ_ONLY);
    CHECK_EQUAL(zero_without_buffer(512, 0, 0), NBD_ERR_READ_ONLY);
    check_over(0);
}

// The server offers TRIM.
static void zero_without_any_way_is_refused_and_never_trimmed(void)
{
    set_answers(BARE, 0, 0, 0);
    CHECK_EQUAL(zero_without_buffer(512, 0, NBD_FAST_ZERO), NBD_ERR_UNSUPPORTED);
    check_over(0);
}

static void zero_is_busy_while_a_request_is_in_flight(void)
{
    nbd_op op = NBD_ZERO;

    set_answers(ALL, 0, 0, 0);
    op.command = NBD_FLUSH;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    CHECK_EQUAL(zero(512, 0, 0), NBD_ERR_BUSY);
    CHECK_EQUAL(server.count, 0);
}

/// The walker ///

// Room for `n` extents of each context.
#define ROOM(n) ((2 + 2 * (size_t)(n)) * server.context_count)

static uint64_t walk_memory[3 * (2 + 2 * 1024)];
static nbd_walk walk;

#define MAP(context, ...) \
    do { \
        static const wire_extent map_[] = {__VA_ARGS__}; \
        server.map[context] = map_; \
        server.map_count[context] = sizeof map_ / sizeof map_[0]; \
        if (server.context_count <= (context)) server.context_count = (context) + 1; \
    } while (0)

// Memory behind what the walk was given must stay as it is.
static void start(uint64_t size, uint64_t offset, size_t memory_count)
{
    memset(walk_memory, 0x77, sizeof walk_memory);
    CHECK(memory_count <= sizeof walk_memory / sizeof walk_memory[0]);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, size, offset, walk_memory, memory_count), 0);
}

static void check_memory_behind(size_t memory_count)
{
    size_t i;

    for (i = memory_count; i < sizeof walk_memory / sizeof walk_memory[0]; i++)
        CHECK(walk_memory[i] == UINT64_C(0x7777777777777777));
}

static void step(uint64_t offset, uint64_t size, uint64_t first, uint64_t second)
{
    CHECK_EQUAL(nbd_walk_next(&walk), 0);
    CHECK_EQUAL(walk.offset, offset);
    CHECK_EQUAL(walk.size, size);
    CHECK_EQUAL(walk.flags[0], first);
    if (server.context_count > 1) CHECK_EQUAL(walk.flags[1], second);
}

static void last(uint64_t offset)
{
    int i;

    for (i = 0; i < 2; i++) {
        CHECK_EQUAL(nbd_walk_next(&walk), 0);
        CHECK_EQUAL(walk.offset, offset);
        CHECK_EQUAL(walk.size, 0);
    }
}

// The steps of a range as the server's maps say, byte by byte, for small exports.
static void check_steps(uint64_t size, uint64_t offset)
{
    uint64_t at = offset, end = offset + size;

    while (at < end) {
        uint64_t flags[CONTEXTS] = {0, 0, 0}, other, step_size = 0;
        uint32_t i;
        int same = 1;

        for (i = 0; i < server.context_count; i++)
            extent_end(i, at, &flags[i]);
        while (same && at + step_size < end) {
            for (i = 0; i < server.context_count; i++) {
                extent_end(i, at + step_size, &other);
                same = same && other == flags[i];
            }
            step_size += (uint64_t)same;
        }
        step(at, step_size, flags[0], flags[1]);
        if (server.context_count > 2) CHECK_EQUAL(walk.flags[2], flags[2]);
        at += step_size;
    }
    last(end);
}

static void walk_gives_the_extents_of_one_context(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 0}, {200, 3}, {700, 1});
    open_server();
    start(1000, 0, ROOM(10));
    step(0, 100, 0, 0);
    step(100, 200, 3, 0);
    step(300, 700, 1, 0);
    last(1000);
    check_request(0, WIRE_STATUS, 0, 0, 1000);
    check_over(1);
}

static void walk_ends_a_step_where_any_context_changes(void)
{
    set_server(1, 1000, ALL);
    MAP(0, {100, 0}, {900, 3});
    MAP(1, {99, 7}, {401, UINT64_C(1) << 40}, {500, 7});
    open_server();
    start(1000, 0, ROOM(3));
    step(0, 99, 0, 7);
    step(99, 1, 0, UINT64_C(1) << 40);
    step(100, 400, 3, UINT64_C(1) << 40);
    step(500, 500, 3, 7);
    last(1000);
    check_over(1);
}

static void walk_asks_for_its_range_only(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 0}, {900, 3});
    open_server();
    start(201, 50, ROOM(3));
    step(50, 50, 0, 0);
    step(100, 151, 3, 0);
    last(251);
    check_request(0, WIRE_STATUS, 0, 50, 201);
    check_over(1);
}

static void walk_joins_equal_neighbours_of_a_reply(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 1}, {100, 1}, {50, 2}, {1, 2}, {749, 1});
    open_server();
    start(1000, 0, ROOM(3));
    step(0, 200, 1, 0);
    step(200, 51, 2, 0);
    step(251, 749, 1, 0);
    last(1000);
    check_over(1);
}

static void walk_joins_equal_neighbours_of_two_replies(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {600, 1}, {400, 2});
    server.longest = 250;
    server.most[0] = 1;
    open_server();
    start(1000, 0, ROOM(8));
    step(0, 600, 1, 0);
    step(600, 400, 2, 0);
    last(1000);
    check_request(1, WIRE_STATUS, 0, 250, 750);
    check_over(5);
}

static void walk_clips_the_tail_to_the_range(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 0}, {900, 3});
    MAP(1, {400, 0}, {600, 1});
    server.overlong = 1;
    open_server();
    start(100, 50, ROOM(3));
    step(50, 50, 0, 0);
    step(100, 50, 3, 0);
    last(150);
    check_over(1);
}

static void walk_clips_the_tail_to_the_export(void)
{
    set_server(1, 1000, ALL);
    MAP(0, {100, 0}, {900, 3});
    server.overlong = 1;
    server.behind = UINT64_C(1) << 62;
    open_server();
    start(1000, 0, ROOM(3));
    step(0, 100, 0, 0);
    step(100, 900, 3, 0);
    last(1000);
    check_over(1);
}

// Contexts reach differently far: what one told in vain is told again.
static void walk_follows_the_context_that_is_told_least(void)
{
    set_server(1, 1000, ALL);
    MAP(0, {10, 0}, {20, 3});
    MAP(1, {700, 0}, {300, 1});
    MAP(2, {33, 1}, {3, 2});
    server.overlong = 1;
    server.most[0] = 3;
    server.most[2] = 1;
    open_server();
    start(1000, 0, ROOM(50));
    check_steps(1000, 0);
}

static void walk_in_the_least_memory_gives_the_same(void)
{
    set_server(0, 3001, ALL);
    MAP(0, {10, 0}, {20, 3}, {5, 3});
    MAP(1, {700, 0}, {301, 1});
    MAP(2, {33, 1}, {3, 2}, {3, 1});
    open_server();
    start(3000, 1, ROOM(1));
    check_steps(3000, 1);
    check_memory_behind(ROOM(1));
}

static void walk_splits_memory_evenly_and_stays_in_it(void)
{
    size_t count;

    for (count = ROOM(1); count < 64; count++) {
        set_server(count % 2, 611, ALL);
        MAP(0, {10, 0}, {20, 3}, {5, 3});
        MAP(1, {7, 0}, {30, 1});
        MAP(2, {33, 1}, {3, 2}, {3, 1});
        count = count < ROOM(1) ? ROOM(1) : count;
        open_server();
        start(600, 3, count);
        check_steps(600, 3);
        check_memory_behind(count);
    }
}

static void walk_asks_less_often_with_more_memory(void)
{
    int queries_before = LOG;
    size_t n;

    for (n = 1; n <= 1024; n *= 4) {
        set_server(0, 10000, ALL);
        MAP(0, {30, 0}, {20, 3});
        open_server();
        start(10000, 0, ROOM(n));
        check_steps(10000, 0);
        CHECK(server.count < queries_before);
        queries_before = server.count;
    }
    CHECK_EQUAL(queries_before, 1);
}

// 400 extents; what is dropped for want of memory is asked for again only a few times.
static void walk_in_little_memory_does_not_have_all_sent_each_time(void)
{
    set_server(0, 40000, ALL);
    MAP(0, {100, 0}, {100, 3});
    open_server();
    start(40000, 0, ROOM(2));
    check_steps(40000, 0);
    CHECK(server.extents >= 400);
    CHECK(server.extents < 400 + 4 * 400);
}

static void walk_asks_for_more_again_when_extents_are_long(void)
{
    set_server(1, 1000 * GIB, ALL);
    MAP(0, {512, 1}, {512, 2}, {512, 1}, {512, 2}, {512, 1}, {999 * GIB, 3});
    open_server();
    start(999 * GIB, 0, ROOM(1));
    step(0, 512, 1, 0);
    step(512, 512, 2, 0);
    step(1024, 512, 1, 0);
    step(1536, 512, 2, 0);
    step(2048, 512, 1, 0);
    step(2560, 999 * GIB - 2560, 3, 0);
    last(999 * GIB);
    CHECK(server.count < 64);
}

static void walk_with_one_tiny_extent_at_a_time_gives_the_same(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {600, 1}, {400, 2});
    MAP(1, {300, 1}, {3, 2});
    server.longest = server.most[0] = server.most[1] = 1;
    open_server();
    start(1000, 0, ROOM(8));
    check_steps(1000, 0);
    check_over(1000);
}

static void walk_is_one_query_with_extended_headers(void)
{
    set_server(1, 8192 * GIB, ALL);
    MAP(0, {5000 * GIB + 1, 1}, {3192 * GIB - 1, 2});
    open_server();
    start(8192 * GIB, 0, ROOM(2));
    step(0, 5000 * GIB + 1, 1, 0);
    step(5000 * GIB + 1, 3192 * GIB - 1, 2, 0);
    last(8192 * GIB);
    check_request(0, WIRE_STATUS, 0, 0, 8192 * GIB);
    check_over(1);
}

// B71: nbdkit's null plugin tells 2^32 - 1 bytes at once.
static void walk_above_32_bits_goes_on_at_whole_blocks(void)
{
    set_server(0, 9 * GIB, ALL);
    server.context_count = 1;
    server.overlong = 1;
    open_server();
    start(9 * GIB, 0, ROOM(2));
    step(0, 9 * GIB, 0, 0);
    last(9 * GIB);
    check_request(0, WIRE_STATUS, 0, 0, UINT32_MAX - 4095);
    check_request(1, WIRE_STATUS, 0, UINT32_MAX - 4095, UINT32_MAX - 4095);
    check_request(2, WIRE_STATUS, 0, 2 * (UINT64_C(0x100000000) - 4096), GIB + 8192);
    check_over(3);
}

static void walk_of_any_range_asks_for_whole_minimum_blocks(void)
{
    set_blocks(8192);
    MAP(0, {512, 1}, {1024, 2}, {6656, 3});
    open_server();
    start(1000, 600, ROOM(4));
    step(600, 936, 2, 0);
    step(1536, 64, 3, 0);
    last(1600);
    check_request(0, WIRE_STATUS, 0, 512, 1536);
    check_over(1);
}

static void walk_up_to_the_end_of_the_export_stays_inside_it(void)
{
    set_blocks(8192);
    MAP(0, {512, 1}, {7680, 3});
    open_server();
    start(8191, 1, ROOM(4));
    step(1, 511, 1, 0);
    step(512, 7680, 3, 0);
    last(8192);
    check_request(0, WIRE_STATUS, 0, 0, 8192);
    check_over(1);
}

// The server must not use such extents; those already passed are told again.
static void walk_goes_on_behind_extents_smaller_than_a_block(void)
{
    set_blocks(4096);
    MAP(0, {100, 1}, {100, 2});
    server.most[0] = 7;
    open_server();
    start(4096, 0, ROOM(2));
    check_steps(4096, 0);
}

// B71: a last extent of the server reaches where no request may.
static void walk_takes_an_unaligned_end_that_the_server_tells(void)
{
    set_blocks(1000);
    MAP(0, {256, 1}, {744, 2});
    server.overlong = 1;
    open_server();
    start(1000, 0, ROOM(4));
    step(0, 256, 1, 0);
    step(256, 744, 2, 0);
    last(1000);
    check_request(0, WIRE_STATUS, 0, 0, 512);
    check_over(1);
}

static void walk_to_an_unaligned_end_that_nobody_tells_is_an_error(void)
{
    int i;

    set_blocks(1000);
    MAP(0, {100, 2}, {900, 1});
    open_server();
    start(1000, 0, ROOM(4));
    step(0, 100, 2, 0);
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_BLOCK_SIZE);
    CHECK_EQUAL(walk.offset, 100);
    CHECK_EQUAL(walk.size, 412);
    CHECK_EQUAL(walk.flags[0], 1);
    for (i = 0; i < 2; i++) {
        CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_BLOCK_SIZE);
        CHECK_EQUAL(walk.offset, 512);
        CHECK_EQUAL(walk.size, 0);
    }
    check_over(1);
}

static void walk_to_an_unaligned_end_that_one_context_tells_is_an_error(void)
{
    set_blocks(1000);
    MAP(0, {512, 1}, {488, 2});
    MAP(1, {1000, 5});
    server.overlong = 1;
    open_server();
    start(500, 500, ROOM(4));
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_BLOCK_SIZE);
    CHECK_EQUAL(walk.offset, 500);
    CHECK_EQUAL(walk.size, 12);
    CHECK_EQUAL(walk.flags[0], 1);
    CHECK_EQUAL(walk.flags[1], 5);
    check_over(1);
}

// One byte from the start of the block is no progress behind it.
static void walk_without_progress_ends_in_an_error(void)
{
    set_blocks(4096);
    MAP(0, {4096, 2});
    server.longest = 700;
    server.most[0] = 1;
    server.stuck = 1;
    server.stuck_at = 512;
    open_server();
    start(4096, 0, ROOM(4));
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_PROTOCOL);
    CHECK_EQUAL(walk.offset, 0);
    CHECK_EQUAL(walk.size, 700);
    check_request(0, WIRE_STATUS, 0, 0, 4096);
    check_request(1, WIRE_STATUS, 0, 512, 3584);
    check_over(2);
}

static void walk_that_fails_gives_what_was_known_and_goes_on(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 1}, {900, 2});
    server.longest = 150;
    server.most[0] = 1;
    server.fail_at = 3;
    open_server();
    start(1000, 0, ROOM(4));
    step(0, 100, 1, 0);
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_EIO);
    CHECK(strcmp(sync_.message, "because\\x0a") == 0);
    CHECK_EQUAL(walk.offset, 100);
    CHECK_EQUAL(walk.size, 150);
    CHECK_EQUAL(walk.flags[0], 2);
    step(250, 750, 2, 0);
    CHECK_EQUAL(sync_.message[0], '\0');
    last(1000);
    check_over(8);
}

static void walk_that_fails_at_once_knows_nothing(void)
{
    set_server(1, 1000, ALL);
    MAP(0, {100, 1}, {900, 2});
    server.fail_at = 1;
    open_server();
    start(1000, 0, ROOM(4));
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_EIO);
    CHECK_EQUAL(walk.offset, 0);
    CHECK_EQUAL(walk.size, 0);
    step(0, 100, 1, 0);
    check_over(2);
}

static void walk_allows_other_calls_between_two_steps(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 1}, {900, 2});
    open_server();
    start(1000, 0, ROOM(1));
    step(0, 100, 1, 0);
    CHECK_EQUAL(nbd_sync_write(&sync_, zeroes, 100, 0, 0), 0);
    step(100, 900, 2, 0);
    last(1000);
    CHECK_EQUAL(nbd_sync_close(&sync_), 0);
}

static void empty_walk_is_over_at_once(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 1});
    open_server();
    start(0, 1000, ROOM(1));
    last(1000);
    check_over(0);
}

static void walk_that_cannot_start_is_refused(void)
{
    nbd_walk zeroed = NBD_ZERO;

    CHECK_EQUAL(nbd_walk_next(&zeroed), NBD_ERR_STATE);
    set_server(0, 1000, ALL);
    open_server();
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 1, 0, walk_memory, 64), NBD_ERR_UNSUPPORTED);
    set_server(0, 1000, ALL);
    MAP(0, {1000, 0});
    MAP(1, {1000, 0});
    open_server();
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 1, 1000, walk_memory, 64), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, UINT64_MAX, 1, walk_memory, 64), NBD_ERR_BOUNDS);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 1, 0, walk_memory, ROOM(1) - 1), NBD_ERR_BUFFER);
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_STATE);
    check_over(0);
    CHECK_EQUAL(nbd_walk_start(&walk, &sync_, 1, 0, walk_memory, 64), NBD_ERR_STATE);
}

static void walk_of_another_session_is_refused(void)
{
    set_server(0, 1000, ALL);
    MAP(0, {100, 1});
    open_server();
    start(1000, 0, ROOM(1));
    set_server(0, 1000, ALL);
    MAP(0, {100, 1});
    MAP(1, {100, 1});
    open_server();
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_STATE);
    check_over(0);
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_STATE);
}

static void walk_is_busy_while_a_request_is_in_flight(void)
{
    nbd_op op = NBD_ZERO;

    set_server(0, 1000, ALL);
    MAP(0, {100, 1}, {900, 2});
    open_server();
    start(1000, 0, ROOM(2));
    step(0, 100, 1, 0);
    op.command = NBD_FLUSH;
    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
    CHECK_EQUAL(nbd_walk_next(&walk), NBD_ERR_BUSY);
    CHECK_EQUAL(walk.offset, 100);
    CHECK_EQUAL(walk.size, 0);
}

static uint32_t random_map(wire_extent *map, uint32_t count, uint32_t block)
{
    uint32_t i, total = 0;

    for (i = 0; i < count; i++) {
        map[i].size = (uint64_t)block * (1 + check_random(9));
        map[i].flags = check_random(3);
        total += (uint32_t)map[i].size;
    }
    return total;
}

static void walk_of_random_maps_is_right(void)
{
    static wire_extent maps[CONTEXTS][16];
    uint32_t turn, i;

    for (turn = 0; turn < 2000; turn++) {
        uint32_t block = turn % 4 ? 1 : 512;
        uint64_t size, offset;
        size_t memory_count;

        set_server((int)check_random(2), block * (1 + check_random(100)), ALL);
        if (block > 1) {
            server.minimum = block;
            server.preferred = 512u << check_random(4);
            server.maximum = 1 << 20;
        }
        server.context_count = 1 + check_random(CONTEXTS);
        for (i = 0; i < server.context_count; i++) {
            server.map[i] = maps[i];
            server.map_count[i] = 1 + check_random(16);
            random_map(maps[i], (uint32_t)server.map_count[i], block);
            server.most[i] = check_random(5);
        }
        server.overlong = (int)check_random(2);
        server.behind = server.overlong ? check_random(1000) : 0;
        offset = check_random((uint32_t)server.size);
        size = check_random((uint32_t)(server.size - offset) + 1);
        memory_count = ROOM(1) + check_random(40);
        snprintf(check.where, sizeof check.where, "turn %u", (unsigned)turn);
        open_server();
        start(size, offset, memory_count);
        check_steps(size, offset);
        check_memory_behind(memory_count);
        CHECK_EQUAL(nbd_sync_close(&sync_), 0);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(fit_is_all_that_was_asked_for_if_one_command_takes_it);
    CHECK_CASE(fit_of_transfers_is_the_maximum_payload);
    CHECK_CASE(fit_of_the_rest_is_32_bits_without_extended_headers);
    CHECK_CASE(fit_of_the_rest_is_64_bits_with_extended_headers);
    CHECK_CASE(fit_is_whole_preferred_blocks_unless_it_is_all);
    CHECK_CASE(zero_is_write_zeroes_where_it_is_offered);
    CHECK_CASE(zero_writes_the_buffer_where_it_is_not_offered);
    CHECK_CASE(zero_pieces_are_whole_minimum_blocks_of_the_buffer);
    CHECK_CASE(zero_pieces_are_bounded_by_the_maximum_payload);
    CHECK_CASE(zero_writes_only_from_the_start_of_the_buffer);
    CHECK_CASE(zero_is_fast_first_if_asked_for);
    CHECK_CASE(zero_is_not_fast_unless_asked_for);
    CHECK_CASE(fast_zero_that_is_not_offered_is_plain);
    CHECK_CASE(fast_zero_that_is_refused_is_plain);
    CHECK_CASE(zero_that_is_refused_twice_is_written);
    CHECK_CASE(zero_that_is_invalid_is_written);
    CHECK_CASE(zero_that_is_too_big_is_tried_with_the_maximum_payload);
    CHECK_CASE(zero_that_stays_too_big_is_written);
    CHECK_CASE(zero_without_buffer_gives_the_refusal_back);
    CHECK_CASE(message_of_a_refusal_is_gone_when_another_way_worked);
    CHECK_CASE(zero_that_fails_is_not_tried_in_another_way);
    CHECK_CASE(zero_gives_the_error_of_a_write_back);
    CHECK_CASE(zero_above_32_bits_is_split);
    CHECK_CASE(zero_is_one_command_with_extended_headers);
    CHECK_CASE(zero_goes_on_where_it_was_refused);
    CHECK_CASE(misused_zero_sends_nothing);
    CHECK_CASE(zero_is_refused_as_a_whole_before_its_first_piece);
    CHECK_CASE(zero_of_a_read_only_export_is_refused);
    CHECK_CASE(zero_without_any_way_is_refused_and_never_trimmed);
    CHECK_CASE(zero_is_busy_while_a_request_is_in_flight);
    CHECK_CASE(walk_gives_the_extents_of_one_context);
    CHECK_CASE(walk_ends_a_step_where_any_context_changes);
    CHECK_CASE(walk_asks_for_its_range_only);
    CHECK_CASE(walk_joins_equal_neighbours_of_a_reply);
    CHECK_CASE(walk_joins_equal_neighbours_of_two_replies);
    CHECK_CASE(walk_clips_the_tail_to_the_range);
    CHECK_CASE(walk_clips_the_tail_to_the_export);
    CHECK_CASE(walk_follows_the_context_that_is_told_least);
    CHECK_CASE(walk_in_the_least_memory_gives_the_same);
    CHECK_CASE(walk_splits_memory_evenly_and_stays_in_it);
    CHECK_CASE(walk_asks_less_often_with_more_memory);
    CHECK_CASE(walk_in_little_memory_does_not_have_all_sent_each_time);
    CHECK_CASE(walk_asks_for_more_again_when_extents_are_long);
    CHECK_CASE(walk_with_one_tiny_extent_at_a_time_gives_the_same);
    CHECK_CASE(walk_is_one_query_with_extended_headers);
    CHECK_CASE(walk_above_32_bits_goes_on_at_whole_blocks);
    CHECK_CASE(walk_of_any_range_asks_for_whole_minimum_blocks);
    CHECK_CASE(walk_up_to_the_end_of_the_export_stays_inside_it);
    CHECK_CASE(walk_goes_on_behind_extents_smaller_than_a_block);
    CHECK_CASE(walk_takes_an_unaligned_end_that_the_server_tells);
    CHECK_CASE(walk_to_an_unaligned_end_that_nobody_tells_is_an_error);
    CHECK_CASE(walk_to_an_unaligned_end_that_one_context_tells_is_an_error);
    CHECK_CASE(walk_without_progress_ends_in_an_error);
    CHECK_CASE(walk_that_fails_gives_what_was_known_and_goes_on);
    CHECK_CASE(walk_that_fails_at_once_knows_nothing);
    CHECK_CASE(walk_allows_other_calls_between_two_steps);
    CHECK_CASE(empty_walk_is_over_at_once);
    CHECK_CASE(walk_that_cannot_start_is_refused);
    CHECK_CASE(walk_of_another_session_is_refused);
    CHECK_CASE(walk_is_busy_while_a_request_is_in_flight);
    CHECK_CASE(walk_of_random_maps_is_right);
    return check_end();
}
