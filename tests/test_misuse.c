// Bad use returns its own error, changes nothing and sends nothing.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "play.h"

enum { SLOTS = 2, SECTOR = 512 };

static nbd_client client;
static nbd_slot slots[SLOTS];
static unsigned char buffer[NBD_BUFFER_NAMES];
static unsigned char memory[1 << 16];
static unsigned char answer[512]; // of the server: greeting, then options
static size_t answer_size;

/// A session without a server: bytes are put in, what comes out is counted ///

static size_t take_all(void)
{
    nbd_iovec iov[16];
    size_t total = 0;
    unsigned count, flags;

    while ((count = nbd_outgoing(&client, iov, 16, &flags)) > 0) {
        total += iov_sum(iov, count);
        CHECK_EQUAL(nbd_sent(&client, (ptrdiff_t)iov_sum(iov, count)), 0);
    }
    return total;
}

static void feed(const void *bytes, size_t size)
{
    nbd_iovec iov;
    size_t k = 0;
    nbd_event event;

    while (k < size) {
        size_t n;

        CHECK_EQUAL(nbd_incoming(&client, &iov, 1), 1);
        n = smaller(iov.size, size - k);
        memcpy(iov.base, (const unsigned char *)bytes + k, n);
        CHECK_EQUAL(nbd_received(&client, (ptrdiff_t)n), 0);
        k += n;
        if (k < size) CHECK_EQUAL(nbd_next(&client, &event), 0);
    }
}

static nbd_config plain_config(void)
{
    nbd_config config = NBD_ZERO;

    config.flags = NBD_ONLY_EXPORT_NAME;
    config.slots = slots;
    config.slot_count = SLOTS;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    return config;
}

static uint32_t next_event(void)
{
    nbd_event event;

    return nbd_next(&client, &event) ? event.type : (uint32_t)NBD_EVENT_NONE;
}

static void connect_with(uint32_t config_flags)
{
    nbd_config config = plain_config();

    config.flags = config_flags;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
}

static void put_number(uint64_t value, unsigned width)
{
    while (width--)
        answer[answer_size++] = (unsigned char)(value >> (8 * width));
}

static void answer_greeting(unsigned flags)
{
    answer_size = 0;
    put_number(UINT64_C(0x4E42444D41474943), 8);
    put_number(UINT64_C(0x49484156454F5054), 8);
    put_number(flags, 2);
    feed(answer, answer_size);
}

// READY, simple replies, with these transmission flags and no block sizes.
static void open_export(uint64_t size, unsigned flags)
{
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
    CHECK_EQUAL(take_all(), 4 + 16);
    answer_size = 0;
    put_number(size, 8);
    put_number(flags, 2);
    feed(answer, answer_size);
    CHECK_EQUAL(next_event(), NBD_EVENT_READY);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
}

static void ready_with(uint32_t config_flags, uint64_t size, unsigned flags)
{
    connect_with(NBD_ONLY_EXPORT_NAME | config_flags);
    open_export(size, flags);
}

static void ready(void)
{
    ready_with(0, EXPORT_SIZE, EXPORT_FLAGS);
}

// READY after GO, with minimum and maximum.
static void ready_with_blocks(uint32_t config_flags, uint32_t minimum, uint32_t maximum)
{
    connect_with(NBD_WITHOUT_EXTENDED_HEADERS | NBD_WITHOUT_STRUCTURED_REPLY | config_flags);
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
    CHECK(take_all() > 0);
    answer_size = 0;
    put_number(UINT64_C(0x0003E889045565A9), 8);
    put_number(UINT64_C(0x0000000700000003), 8);
    put_number(12, 4);
    put_number(0, 2);
    put_number(EXPORT_SIZE, 8);
    put_number(EXPORT_FLAGS, 2);
    put_number(UINT64_C(0x0003E889045565A9), 8);
    put_number(UINT64_C(0x0000000700000003), 8);
    put_number(14, 4);
    put_number(3, 2);
    put_number(minimum, 4);
    put_number(4096, 4);
    put_number(maximum, 4);
    put_number(UINT64_C(0x0003E889045565A9), 8);
    put_number(UINT64_C(0x0000000700000001), 8);
    put_number(0, 4);
    feed(answer, answer_size);
    CHECK_EQUAL(next_event(), NBD_EVENT_READY);
}

static nbd_op op_of(uint32_t command, uint32_t flags, uint64_t offset, uint64_t size)
{
    nbd_op op = NBD_ZERO;

    op.command = command;
    op.flags = flags;
    op.offset = offset;
    op.size = size;
    if (command == NBD_READ) op.buffer = memory;
    if (command == NBD_WRITE) op.data = memory;
    return op;
}

// The error comes, the client and its slots stay as they are, and nothing is sent.
static void refused_op(const nbd_op *op, int error)
{
    nbd_client before;
    nbd_slot slots_before[SLOTS];
    uint64_t id = 4711;

    memcpy(&before, &client, sizeof before);
    memcpy(slots_before, slots, sizeof slots);
    CHECK_EQUAL(nbd_issue(&client, op, &id), error);
    CHECK_EQUAL(id, 4711);
    CHECK_BYTES(&client, &before, sizeof before);
    CHECK_BYTES(slots, slots_before, sizeof slots);
    CHECK_EQUAL(take_all(), 0);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
}

static void refused(uint32_t command, uint32_t flags, uint64_t offset, uint64_t size, int error)
{
    nbd_op op = op_of(command, flags, offset, size);

    refused_op(&op, error);
}

static void accepted(uint32_t command, uint32_t flags, uint64_t offset, uint64_t size)
{
    nbd_op op = op_of(command, flags, offset, size);

    CHECK_EQUAL(nbd_issue(&client, &op, NULL), 0);
}

/// Texts and phases ///

static void every_error_has_a_text(void)
{
#define CHECK_TEXT(name, value, text) CHECK(strcmp(nbd_strerror(name), text) == 0);
    NBD_ERRORS(CHECK_TEXT)
    CHECK(strcmp(nbd_strerror(12345), "unknown error") == 0);
}

static void phase_is_told(void)
{
    nbd_config config = plain_config();

    CHECK_EQUAL(nbd_init(&client, &config), 0);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_GREETING);
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_OPTIONS);
    ready();
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_TRANSMISSION);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_CLOSING);
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(next_event(), NBD_EVENT_CLOSED);
    CHECK_EQUAL(nbd_phase(&client), NBD_PHASE_IDLE);
}

/// nbd_init ///

static void init_refuses_what_is_out_of_range(void)
{
    nbd_config config = plain_config();

    CHECK_EQUAL(nbd_init(NULL, &config), NBD_ERR_ARG);
    CHECK_EQUAL(nbd_init(&client, NULL), NBD_ERR_ARG);
    config.slots = NULL;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_ARG);
    config = plain_config();
    config.slot_count = 0;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_ARG);
    config.slot_count = NBD_SLOTS_MAX + 1;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_ARG);
    config = plain_config();
    config.buffer = NULL;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_ARG);
}

static void init_refuses_a_small_buffer(void)
{
    nbd_config config = plain_config();

    config.buffer_size = NBD_BUFFER_MIN - 1;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_BUFFER);
    config.buffer_size = NBD_BUFFER_MIN;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
}

// B27
static void init_refuses_long_names(void)
{
    static char name[4098];
    static const char *const queries[] = {name};
    static nbd_context contexts[1];
    nbd_config config = plain_config();

    memset(name, 'n', 4097);
    config.contexts = contexts;
    config.context_count = 1;
    config.export_name = name;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_NAME);
    config.export_name = NULL;
    config.queries = queries;
    config.query_count = 1;
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_NAME);
    config.context_count = 0; // no room for what the query may select
    CHECK_EQUAL(nbd_init(&client, &config), NBD_ERR_ARG);
    config.context_count = 1;
    name[4096] = '\0';
    config.export_name = name;
    CHECK_EQUAL(nbd_init(&client, &config), 0);
}

static void init_refuses_another_layout(void)
{
    nbd_config config = plain_config();
    size_t c = sizeof(nbd_client), s = sizeof(nbd_slot);

    CHECK_EQUAL(nbd_init_checked(&client, &config, c + 8, s, NBD_VERSION), NBD_ERR_ABI);
    CHECK_EQUAL(nbd_init_checked(&client, &config, c, s + 8, NBD_VERSION), NBD_ERR_ABI);
    CHECK_EQUAL(nbd_init_checked(&client, &config, c, s, NBD_VERSION + 1), NBD_ERR_ABI);
    CHECK_EQUAL(nbd_init_checked(&client, &config, c, s, NBD_VERSION), 0);
}

/// The wrong time ///

static void every_call_before_connect_is_refused(void)
{
    nbd_config config = plain_config();
    nbd_option option = NBD_ZERO;
    nbd_iovec iov;
    unsigned flags = 0;

    CHECK_EQUAL(nbd_init(&client, &config), 0);
    refused(NBD_READ, 0, 0, SECTOR, NBD_ERR_STATE);
    option.option = NBD_OPTION_LIST;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_starttls(&client, NULL), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_disconnect(&client), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_abandon(&client), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_poll(&client, NBD_WANT_READ | NBD_WANT_WRITE), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_outgoing(&client, &iov, 1, &flags), 0);
    CHECK_EQUAL(nbd_incoming(&client, &iov, 1), 0);
    CHECK_EQUAL(nbd_sent(&client, 1), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_received(&client, 1), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, 0), 0);
    CHECK_EQUAL(nbd_wants(&client), 0);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
}

static void commands_before_ready_are_refused(void)
{
    connect_with(NBD_ONLY_EXPORT_NAME);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, 0), 0);
    refused(NBD_READ, 0, 0, SECTOR, NBD_ERR_STATE);
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
    CHECK_EQUAL(take_all(), 20);
    refused(NBD_READ, 0, 0, SECTOR, NBD_ERR_STATE);
}

static void second_connect_is_refused(void)
{
    ready();
    CHECK_EQUAL(nbd_connect(&client, NULL), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(nbd_connect(&client, NULL), NBD_ERR_STATE);
}

static void poll_without_a_transport_is_refused(void)
{
    ready();
    CHECK_EQUAL(nbd_poll(&client, 0), NBD_ERR_STATE);
}

static void commands_after_disconnect_are_refused(void)
{
    ready();
    CHECK_EQUAL(nbd_disconnect(&client), 0);
    CHECK_EQUAL(take_all(), 28);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, 0), 0);
    refused(NBD_READ, 0, 0, SECTOR, NBD_ERR_STATE);
}

static void commands_after_abandon_are_refused(void)
{
    ready();
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(nbd_issue(&client, &(nbd_op){0}, NULL), NBD_ERR_STATE);
    CHECK_EQUAL(take_all(), 0);
    CHECK_EQUAL(next_event(), NBD_EVENT_CLOSED);
    refused(NBD_FLUSH, 0, 0, 0, NBD_ERR_STATE);
    CHECK_EQUAL(nbd_abandon(&client), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_wants(&client), 0);
}

static void connect_is_allowed_again_after_closed(void)
{
    ready();
    CHECK_EQUAL(nbd_abandon(&client), 0);
    CHECK_EQUAL(next_event(), NBD_EVENT_CLOSED);
    CHECK_EQUAL(nbd_connect(&client, NULL), 0);
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_NONE);
    CHECK_EQUAL(take_all(), 4 + 16);
}

static void finish_one(void)
{
    nbd_event event;

    CHECK_EQUAL(nbd_next(&client, &event), 1);
    CHECK_EQUAL(event.type, NBD_EVENT_DONE);
    CHECK_EQUAL(event.error, NBD_ERR_ABANDONED);
}

static void every_slot_is_free_in_the_next_session(void)
{
    int i;

    ready();
    for (i = 0; i < 3; i++) {
        int k;

        for (k = 0; k < SLOTS; k++)
            accepted(NBD_READ, 0, 0, SECTOR);
        CHECK_EQUAL(take_all(), SLOTS * 28);
        refused(NBD_READ, 0, 0, SECTOR, NBD_ERR_FULL);
        CHECK_EQUAL(nbd_abandon(&client), 0);
        for (k = 0; k < SLOTS; k++)
            finish_one();
        CHECK_EQUAL(next_event(), NBD_EVENT_CLOSED);
        CHECK_EQUAL(nbd_connect(&client, NULL), 0);
        open_export(EXPORT_SIZE, EXPORT_FLAGS);
    }
}

static void options_that_are_not_the_callers_are_refused(void)
{
    nbd_option option = NBD_ZERO;

    option.option = NBD_OPTION_LIST;
    ready();
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_STATE);
    connect_with(NBD_NEGOTIATE);
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_STATE);
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_OPTION);
    option.option = NBD_OPTION_ABORT;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_STATE);
    option.option = NBD_OPTION_SET_META_CONTEXT;
    option.query_count = 1;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_ARG);
    CHECK_EQUAL(take_all(), 4);
    option.option = NBD_OPTION_LIST;
    option.query_count = 0;
    CHECK_EQUAL(nbd_negotiate(&client, &option), 0);
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_STATE);
    CHECK_EQUAL(take_all(), 16);
}

static void options_need_a_fixed_newstyle_server(void)
{
    nbd_option option = NBD_ZERO;

    connect_with(NBD_NEGOTIATE);
    answer_greeting(NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_OPTION);
    CHECK_EQUAL(take_all(), 4);
    option.option = NBD_OPTION_LIST;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_UNSUPPORTED);
    CHECK_EQUAL(take_all(), 0);
    option.option = NBD_OPTION_EXPORT_NAME;
    CHECK_EQUAL(nbd_negotiate(&client, &option), 0);
    CHECK_EQUAL(take_all(), 16);
}

// B32: nothing but STARTTLS leaves in clear.
static void options_in_clear_are_refused_if_tls_is_required(void)
{
    nbd_option option = NBD_ZERO;

    connect_with(NBD_NEGOTIATE | NBD_TLS_REQUIRE);
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_OPTION);
    CHECK_EQUAL(take_all(), 4);
    option.option = NBD_OPTION_GO;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_TLS);
    CHECK_EQUAL(take_all(), 0);
    option.option = NBD_OPTION_STARTTLS;
    CHECK_EQUAL(nbd_negotiate(&client, &option), 0);
    CHECK_EQUAL(take_all(), 16);
}

static void names_of_options_that_are_too_long_are_refused(void)
{
    static char name[4098];
    nbd_option option = NBD_ZERO;

    memset(name, 'n', 4097);
    connect_with(NBD_NEGOTIATE);
    answer_greeting(FIXED | NO_ZEROES);
    CHECK_EQUAL(next_event(), NBD_EVENT_OPTION);
    CHECK_EQUAL(take_all(), 4);
    option.option = NBD_OPTION_INFO;
    option.name = name;
    CHECK_EQUAL(nbd_negotiate(&client, &option), NBD_ERR_NAME);
    CHECK_EQUAL(take_all(), 0);
}

/// Commands ///

static void no_free_slot(void)
{
    ready();
    accepted(NBD_READ, 0, 0, SECTOR);
    accepted(NBD_FLUSH, 0, 0, 0);
    CHECK_EQUAL(take_all(), 2 * 28);
    refused(NBD_FLUSH, 0, 0, 0, NBD_ERR_FULL);
}

static void size_of_zero(void)
{
    ready();
    refused(NBD_READ, 0, 0, 0, NBD_ERR_ZERO_SIZE);
    refused(NBD_WRITE, 0, SECTOR, 0, NBD_ERR_ZERO_SIZE);
    refused(NBD_TRIM, 0, 0, 0, NBD_ERR_ZERO_SIZE);
    refused(NBD_CACHE, 0, 0, 0, NBD_ERR_ZERO_SIZE);
    refused(NBD_WRITE_ZEROES, 0, 0, 0, NBD_ERR_ZERO_SIZE);
    ready_with(NBD_UNCHECKED_ZERO_SIZE, EXPORT_SIZE, EXPORT_FLAGS);
    accepted(NBD_READ, 0, 0, 0);
}

static void past_the_end(void)
{
    ready();
    refused(NBD_READ, 0, EXPORT_SIZE, 1, NBD_ERR_BOUNDS);
    refused(NBD_READ, 0, EXPORT_SIZE - 1, 2, NBD_ERR_BOUNDS);
    refused(NBD_WRITE, 0, UINT64_MAX, 1, NBD_ERR_BOUNDS);
    refused(NBD_TRIM, 0, UINT64_MAX - 1, 4, NBD_ERR_BOUNDS);
    refused(NBD_WRITE_ZEROES, 0, 1, EXPORT_SIZE, NBD_ERR_BOUNDS);
    accepted(NBD_READ, 0, EXPORT_SIZE - 1, 1);
    ready_with(NBD_UNCHECKED_BOUNDS, EXPORT_SIZE, EXPORT_FLAGS);
    accepted(NBD_READ, 0, EXPORT_SIZE, 1);
}

// B19: sizes with the top bit set are sizes.
static void bounds_of_the_largest_export(void)
{
    ready_with(0, UINT64_MAX, EXPORT_FLAGS);
    refused(NBD_READ, 0, UINT64_MAX - 1, 2, NBD_ERR_BOUNDS);
    refused(NBD_READ, 0, UINT64_MAX, 1, NBD_ERR_BOUNDS);
    accepted(NBD_READ, 0, UINT64_MAX - 1, 1);
}

static void export_of_no_bytes(void)
{
    ready_with(0, 0, EXPORT_FLAGS);
    refused(NBD_READ, 0, 0, 1, NBD_ERR_BOUNDS);
    accepted(NBD_FLUSH, 0, 0, 0);
}

static void read_only_export(void)
{
    ready_with(0, EXPORT_SIZE, EXPORT_FLAGS | NBD_OFFERS_READ_ONLY);
    refused(NBD_WRITE, 0, 0, SECTOR, NBD_ERR_READ_ONLY);
    refused(NBD_TRIM, 0, 0, SECTOR, NBD_ERR_READ_ONLY);
    refused(NBD_WRITE_ZEROES, 0, 0, SECTOR, NBD_ERR_READ_ONLY);
    CHECK_EQUAL(nbd_allows(&client, NBD_WRITE, 0), 0);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, 0), 1);
    accepted(NBD_READ, 0, 0, SECTOR);
    ready_with(NBD_UNCHECKED_READ_ONLY, EXPORT_SIZE, EXPORT_FLAGS | NBD_OFFERS_READ_ONLY);
    accepted(NBD_WRITE, 0, 0, SECTOR);
}

static void unaligned_request(void)
{
    ready_with_blocks(0, 512, 1 << 20);
    refused(NBD_READ, 0, 1, 512, NBD_ERR_BLOCK_SIZE);
    refused(NBD_WRITE, 0, 512, 511, NBD_ERR_BLOCK_SIZE);
    refused(NBD_TRIM, 0, 256, 512, NBD_ERR_BLOCK_SIZE);
    accepted(NBD_READ, 0, 512, 1024);
    ready_with_blocks(NBD_UNCHECKED_BLOCK_SIZE, 512, 1 << 20);
    accepted(NBD_READ, 0, 1, 3);
}

static void payload_beyond_the_maximum(void)
{
    ready_with_blocks(0, 512, 4096);
    refused(NBD_READ, 0, 0, 4096 + 512, NBD_ERR_PAYLOAD);
    refused(NBD_WRITE, 0, 0, 4096 + 512, NBD_ERR_PAYLOAD);
    accepted(NBD_TRIM, 0, 0, 4096 + 512);
    accepted(NBD_READ, 0, 0, 4096);
    ready_with_blocks(NBD_UNCHECKED_PAYLOAD, 512, 4096);
    accepted(NBD_READ, 0, 0, 4096 + 512);
    ready_with(0, UINT64_C(1) << 40, EXPORT_FLAGS);
    refused(NBD_READ, 0, 0, (32 << 20) + 1, NBD_ERR_PAYLOAD);
}

static void size_that_the_header_cannot_say(void)
{
    ready_with(0, UINT64_C(1) << 40, EXPORT_FLAGS);
    refused(NBD_TRIM, 0, 0, UINT64_C(1) << 32, NBD_ERR_PAYLOAD);
    accepted(NBD_TRIM, 0, 0, UINT64_C(0xFFFFFFFF));
}

static void unsupported(uint32_t command, uint32_t flags, unsigned without)
{
    uint64_t size = command == NBD_FLUSH ? 0 : SECTOR;

    ready_with(0, EXPORT_SIZE, EXPORT_FLAGS & ~without);
    CHECK_EQUAL(nbd_allows(&client, command, flags), 0);
    refused(command, flags, 0, size, NBD_ERR_UNSUPPORTED);
    ready_with(NBD_UNCHECKED_UNSUPPORTED, EXPORT_SIZE, EXPORT_FLAGS & ~without);
    accepted(command, flags, 0, size);
    if (!without) return;
    ready();
    CHECK_EQUAL(nbd_allows(&client, command, flags), 1);
}

static void commands_that_are_not_offered(void)
{
    unsupported(NBD_FLUSH, 0, NBD_OFFERS_FLUSH);
    unsupported(NBD_TRIM, 0, NBD_OFFERS_TRIM);
    unsupported(NBD_CACHE, 0, NBD_OFFERS_CACHE);
    unsupported(NBD_WRITE_ZEROES, 0, NBD_OFFERS_WRITE_ZEROES);
    unsupported(NBD_WRITE, NBD_FUA, NBD_OFFERS_FUA);
    unsupported(NBD_WRITE_ZEROES, NBD_FAST_ZERO, NBD_OFFERS_FAST_ZERO);
}

// Neither structured replies nor a context were agreed on.
static void block_status_without_a_context(void)
{
    ready();
    CHECK_EQUAL(nbd_allows(&client, NBD_BLOCK_STATUS, 0), 0);
    refused(NBD_BLOCK_STATUS, 0, 0, SECTOR, NBD_ERR_UNSUPPORTED);
}

static void dont_fragment_that_is_not_offered(void)
{
    ready_with(0, EXPORT_SIZE, EXPORT_FLAGS & ~(unsigned)NBD_OFFERS_DF);
    CHECK_EQUAL(nbd_allows(&client, NBD_READ, NBD_DF), 0);
    refused(NBD_READ, NBD_DF, 0, SECTOR, NBD_ERR_UNSUPPORTED);
}

static void raw_size_that_the_header_cannot_say(void)
{
    ready();
    refused(NBD_RAW, 0, 0, UINT64_C(0x100000200), NBD_ERR_PAYLOAD);
}

static void read_only_unchecked_leaves_the_other_checks(void)
{
    ready_with(NBD_UNCHECKED_READ_ONLY, EXPORT_SIZE,
               (EXPORT_FLAGS | NBD_OFFERS_READ_ONLY) & ~(unsigned)NBD_OFFERS_TRIM);
    refused(NBD_TRIM, 0, 0, SECTOR, NBD_ERR_UNSUPPORTED);
}

static void arguments_that_make_no_command(void)
{
    static const nbd_iovec short_iov[] = {{memory, 100}, {memory + 100, 411}};
    nbd_op op;

    ready();
    refused(0, 0, 0, SECTOR, NBD_ERR_ARG);
    refused(NBD_RAW + 1, 0, 0, SECTOR, NBD_ERR_ARG);
    refused(NBD_READ, NBD_FUA, 0, SECTOR, NBD_ERR_ARG);
    refused(NBD_WRITE, NBD_NO_INIT, 0, SECTOR, NBD_ERR_ARG);
    refused(NBD_TRIM, NBD_NO_HOLE, 0, SECTOR, NBD_ERR_ARG);
    refused(NBD_READ, 0x8000, 0, SECTOR, NBD_ERR_ARG);
    refused(NBD_FLUSH, 0, 1, 0, NBD_ERR_ARG);
    refused(NBD_FLUSH, 0, 0, 1, NBD_ERR_ARG);
    op = op_of(NBD_READ, 0, 0, SECTOR);
    op.buffer = NULL;
    refused_op(&op, NBD_ERR_ARG);
    op = op_of(NBD_WRITE, 0, 0, SECTOR);
    op.data = NULL;
    refused_op(&op, NBD_ERR_ARG);
    op.iov = short_iov;
    op.iov_count = 2;
    refused_op(&op, NBD_ERR_ARG);
}

/// Own I/O ///

static void acknowledging_what_is_not_on_offer(void)
{
    ready();
    CHECK_EQUAL(nbd_sent(&client, 1), NBD_ERR_STATE);
    CHECK_EQUAL(nbd_received(&client, 1), NBD_ERR_STATE);
}

static void acknowledging_more_than_was_offered(void)
{
    nbd_iovec iov;
    unsigned flags = 0;

    ready();
    accepted(NBD_FLUSH, 0, 0, 0);
    CHECK_EQUAL(nbd_outgoing(&client, &iov, 1, &flags), 1);
    CHECK_EQUAL(nbd_sent(&client, 29), NBD_ERR_ARG);
    CHECK_EQUAL(nbd_sent(&client, 28), 0);
    CHECK_EQUAL(nbd_incoming(&client, &iov, 1), 1);
    CHECK_EQUAL(nbd_received(&client, (ptrdiff_t)iov.size + 1), NBD_ERR_ARG);
    CHECK_EQUAL(nbd_received(&client, NBD_IO_READ), 0);
    CHECK_EQUAL(nbd_count(&client)->in_flight, 1);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(every_error_has_a_text);
    CHECK_CASE(phase_is_told);
    CHECK_CASE(init_refuses_what_is_out_of_range);
    CHECK_CASE(init_refuses_a_small_buffer);
    CHECK_CASE(init_refuses_long_names);
    CHECK_CASE(init_refuses_another_layout);
    CHECK_CASE(every_call_before_connect_is_refused);
    CHECK_CASE(commands_before_ready_are_refused);
    CHECK_CASE(second_connect_is_refused);
    CHECK_CASE(poll_without_a_transport_is_refused);
    CHECK_CASE(commands_after_disconnect_are_refused);
    CHECK_CASE(commands_after_abandon_are_refused);
    CHECK_CASE(connect_is_allowed_again_after_closed);
    CHECK_CASE(every_slot_is_free_in_the_next_session);
    CHECK_CASE(options_that_are_not_the_callers_are_refused);
    CHECK_CASE(options_need_a_fixed_newstyle_server);
    CHECK_CASE(options_in_clear_are_refused_if_tls_is_required);
    CHECK_CASE(names_of_options_that_are_too_long_are_refused);
    CHECK_CASE(no_free_slot);
    CHECK_CASE(size_of_zero);
    CHECK_CASE(past_the_end);
    CHECK_CASE(bounds_of_the_largest_export);
    CHECK_CASE(export_of_no_bytes);
    CHECK_CASE(read_only_export);
    CHECK_CASE(unaligned_request);
    CHECK_CASE(payload_beyond_the_maximum);
    CHECK_CASE(size_that_the_header_cannot_say);
    CHECK_CASE(commands_that_are_not_offered);
    CHECK_CASE(block_status_without_a_context);
    CHECK_CASE(dont_fragment_that_is_not_offered);
    CHECK_CASE(raw_size_that_the_header_cannot_say);
    CHECK_CASE(read_only_unchecked_leaves_the_other_checks);
    CHECK_CASE(arguments_that_make_no_command);
    CHECK_CASE(acknowledging_what_is_not_on_offer);
    CHECK_CASE(acknowledging_more_than_was_offered);
    return check_end();
}
