// A server that greets and describes its export in every way, right and wrong.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "hostile.h"

/// Greeting ///

static void send_spoilt_greeting(script *s, const void *row)
{
    const unsigned *bit = row;
    unsigned char *bytes = s->bytes + s->used;

    send_greeting(s, FIXED | NO_ZEROES);
    bytes[*bit / 8] ^= (unsigned char)(1u << *bit % 8);
    see_closed_by(s, NBD_ERR_NOT_NBD, *bit < 64 ? "no NBDMAGIC" : "neither new nor old style");
}

static void greeting_with_any_bit_wrong_is_no_nbd(void)
{
    unsigned bit;

    for (bit = 0; bit < 128; bit++)
        face(send_spoilt_greeting, &bit, BROKEN);
}

static void greet_with_flags(script *s, const void *row)
{
    const unsigned *flags = row;

    send_greeting(s, *flags);
    want_client_flags(s, *flags & 3);
    if (*flags & FIXED) {
        agree_on(s, NBD_PROTOCOL_SIMPLE);
        go(s, EXPORT_SIZE, NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH);
    } else {
        want_export_name(s, "");
        send_export(s, EXPORT_SIZE, NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH, !(*flags & NO_ZEROES));
        see_ready(s);
    }
    session_lives(s);
}

static void no_handshake_flag_is_echoed_but_two(void)
{
    static const unsigned words[] = {0, 1, 2, 3, 0x0300, 0xFFFF, 0xFFFC, 0xFFFE, 0xFFFD};
    unsigned flags, i;

    for (i = 0; i < COUNT(words); i++)
        face(greet_with_flags, &words[i], words[i] < 4 ? LAWFUL : BROKEN);
    for (i = 2; i < 16; i++) {
        flags = FIXED | NO_ZEROES | 1u << i;
        face(greet_with_flags, &flags, BROKEN);
    }
}

/// The export, by each way in ///

enum way { BY_GO, BY_INFO, BY_EXPORT_NAME, BY_PLAIN_NAME, BY_OLD, WAYS };

typedef struct export_row {
    enum way way;
    uint32_t flags;
    uint64_t size;
    uint32_t minimum; // block; 0: not advertised
    unsigned padding; // what the reserved bytes hold
} export_row;

static void send_padding(script *s, unsigned value)
{
    step *last = &s->steps[s->step_count - 1];

    memset(s->bytes + (last->bytes - s->bytes) + last->size - 124, (int)value, 124);
}

static void send_information(script *s, uint32_t option, const export_row *row)
{
    send_info_export(s, option, row->size, row->flags);
    if (row->minimum) {
        send_info_block_size(s, option, row->minimum, 4096 > row->minimum ? 4096 : row->minimum,
                             1u << 25);
    }
}

// All up to the end of what describes the export.
static void describe_export(script *s, const export_row *row)
{
    switch (row->way) {
    case BY_GO:
        greet_fixed(s);
        agree_on(s, NBD_PROTOCOL_SIMPLE);
        want_go(s, "");
        send_information(s, 7, row);
        return;
    case BY_INFO:
        open_options(s);
        client_asks(s, 6, "");
        want_info(s, 6, "");
        send_information(s, 6, row);
        return;
    case BY_EXPORT_NAME:
        greet_fixed(s);
        agree_on(s, NBD_PROTOCOL_SIMPLE);
        want_go(s, "");
        send_refusal(s, 7, 1, "");
        want_export_name(s, "");
        send_export(s, row->size, row->flags, 0);
        return;
    case BY_PLAIN_NAME:
        send_greeting(s, 0);
        want_client_flags(s, 0);
        want_export_name(s, "");
        send_export(s, row->size, row->flags, 1);
        send_padding(s, row->padding);
        return;
    default:
        send_oldstyle(s, row->size, row->flags);
        send_padding(s, row->padding);
        return;
    }
}

static void export_is_refused(script *s, const void *of)
{
    describe_export(s, of);
    see_closed_by(s, NBD_ERR_PROTOCOL, "no NBD_FLAG_HAS_FLAGS");
}

static void flags_without_their_first_bit_end_it(void)
{
    static const unsigned words[] = {0, 2, 0x0100, 0x8000, 0xFFFE};
    export_row row = {BY_GO, 0, EXPORT_SIZE, 0, 0};
    unsigned way, i;

    for (way = 0; way < WAYS; way++) {
        for (i = 0; i < COUNT(words); i++) {
            row.way = (enum way)way;
            row.flags = words[i];
            face(export_is_refused, &row, BROKEN);
        }
    }
    row.flags = 0xFFFF0000; // the upper half is not for us, so bit 0 is missing
    face(export_is_refused, &row, BROKEN);
}

// What only GO and INFO have behind the description.
static void export_is_entered(script *s, const export_row *row)
{
    describe_export(s, row);
    if (row->way == BY_GO) send_ack(s, 7);
    if (row->way == BY_INFO) {
        send_ack(s, 6);
        see_option(s, 6, 0);
        client_asks(s, 7, "");
        want_go(s, "");
        send_information(s, 7, row);
        send_ack(s, 7);
    }
    see_ready(s);
}

static void any_flags(script *s, const void *of)
{
    static nbd_op write;
    static unsigned char byte;
    const export_row *row = of;

    export_is_entered(s, row);
    op_is(&write, NBD_WRITE, 0, 1);
    write.data = &byte;
    if (row->flags & NBD_OFFERS_READ_ONLY) op_is_refused_here(s, &write, NBD_ERR_READ_ONLY);
    close_session(s);
}

static void every_bit_of_the_flags_is_taken_as_sent(void)
{
    static const unsigned words[] = {0x0001, 0x8001, 0xFFFF, 0x0003, 0x587, 0xD6D};
    export_row row = {BY_GO, 0, EXPORT_SIZE, 0, 0};
    unsigned way, i;

    for (way = 0; way < WAYS; way++) {
        for (i = 0; i < COUNT(words) + 16; i++) {
            row.way = (enum way)way;
            row.flags = i < 16 ? 1u | 1u << i : words[i - 16];
            face(any_flags, &row, UNJUDGED);
            CHECK_EQUAL(nbd_negotiated(&stage.client)->flags, row.flags);
        }
    }
}

static void oldstyle_flags_have_no_upper_half(void)
{
    export_row row = {BY_OLD, 0, EXPORT_SIZE, 0, 0};
    unsigned i;

    for (i = 16; i <= 32; i++) {
        row.flags = i < 32 ? 1u | 1u << i : 0xFFFF0001u;
        face(any_flags, &row, BROKEN);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->flags, 1);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->style, NBD_STYLE_OLD);
    }
}

static void reserved_bytes_may_hold_anything(void)
{
    static const unsigned values[] = {0, 1, 0x49, 0x67, 0xFF};
    export_row row = {BY_OLD, 1, EXPORT_SIZE, 0, 0};
    unsigned i;

    for (i = 0; i < 2 * COUNT(values); i++) {
        row.way = i % 2 ? BY_OLD : BY_PLAIN_NAME;
        row.padding = values[i / 2];
        face(any_flags, &row, row.padding ? BROKEN : LAWFUL);
    }
}

/// Size ///

// The range test as the specification says it, on numbers that cannot wrap.
static int range_error(const export_row *row, uint64_t offset, uint64_t size)
{
    uint64_t minimum = row->minimum ? row->minimum : 1;

    if (offset > row->size || size > row->size - offset) return NBD_ERR_BOUNDS;
    return offset % minimum || size % minimum ? NBD_ERR_BLOCK_SIZE : 0;
}

static const uint64_t near_the_end[] = {0, 1, 2, 511, 512, 513, 4096};

static void try_ranges(script *s, const export_row *row, nbd_op *ops)
{
    static unsigned char byte;
    size_t i, k, used = 0;

    for (i = 0; i < COUNT(near_the_end); i++) {
        for (k = 1; k < COUNT(near_the_end); k++) {
            nbd_op *op = &ops[used++];
            int error;

            op_is(op, NBD_READ, row->size - near_the_end[i], near_the_end[k]);
            op->buffer = &byte;
            error = range_error(row, op->offset, op->size);
            if (error) op_is_refused_here(s, op, error);
        }
    }
}

static void last_block_is_read(script *s, const export_row *row)
{
    uint64_t minimum = row->minimum ? row->minimum : 1;
    int r;

    if (row->size < minimum) return;
    r = client_issues(s, NBD_READ, 0, row->size / minimum * minimum - minimum, minimum);
    want_request(s, r);
    send_simple(s, r, 0);
    see_done(s, r, 0);
}

static void export_of_size(script *s, const void *of)
{
    static nbd_op ops[COUNT(near_the_end) * COUNT(near_the_end) + 2];
    static unsigned char byte;
    const export_row *row = of;
    nbd_op *longest = &ops[COUNT(ops) - 1], *last = &ops[COUNT(ops) - 2];

    export_is_entered(s, row);
    try_ranges(s, row, ops);
    // The sum of offset and size wraps to something small.
    op_is(longest, NBD_TRIM, UINT64_MAX, 0xFFFFFFFF);
    op_is_refused_here(s, longest, NBD_ERR_BOUNDS);
    op_is(last, NBD_READ, UINT64_MAX, 1);
    last->buffer = &byte;
    op_is_refused_here(s, last, NBD_ERR_BOUNDS);
    last_block_is_read(s, row);
    session_lives(s);
}

static void export_of_any_size_is_told_and_bounded(void)
{
    static const uint64_t sizes[] = {0,
                                     1,
                                     2,
                                     511,
                                     512,
                                     513,
                                     4095,
                                     4096,
                                     4097,
                                     0x7FFFFFFF,
                                     0x80000000,
                                     0xFFFFFFFF,
                                     UINT64_C(0x100000000),
                                     UINT64_C(0x7FFFFFFFFFFFFFFE),
                                     UINT64_C(0x7FFFFFFFFFFFFFFF),
                                     UINT64_C(0x8000000000000000),
                                     UINT64_MAX - 1,
                                     UINT64_MAX};
    static const uint32_t minimums[] = {0, 1, 512, 4096};
    export_row row = {BY_GO, NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH | NBD_OFFERS_TRIM, 0, 0, 0};
    unsigned way, i;

    for (way = 0; way < WAYS; way++) {
        for (i = 0; i < COUNT(sizes) * COUNT(minimums); i++) {
            row.way = (enum way)way;
            row.size = sizes[i / COUNT(minimums)];
            row.minimum = minimums[i % COUNT(minimums)];
            if (row.minimum && way > BY_INFO) continue;
            (row.minimum ? face_many : face)(export_of_size, &row, LAWFUL);
            CHECK(nbd_negotiated(&stage.client)->size == row.size);
        }
    }
}

/// Names ///

typedef struct name_row {
    int way; // 0 GO, 1 GO refused, 2 only EXPORT_NAME, 3 plain newstyle, 4 INFO, 5 META
    size_t size;
} name_row;

static void name_goes_out(script *s, const void *of)
{
    static const char *query[1];
    const name_row *row = of;
    const char *name = script_text(s, row->size);
    int by_hand = row->way > 3;

    if (row->way == 2) s->config.flags |= NBD_ONLY_EXPORT_NAME;
    if (!by_hand) s->config.export_name = name;
    if (by_hand) {
        open_options(s);
        if (row->way == 5) option_succeeds(s, 8);
        query[0] = row->size > 1 ? name : "a:";
        client_asks_contexts(s, row->way == 4 ? 6 : 10, name, query, row->way == 5);
        if (row->way == 4) want_info(s, 6, name);
        if (row->way == 5) want_meta(s, 10, name, query, 1);
        refuse_option(s, row->way == 4 ? 6 : 10, 6, "");
        client_disconnects(s);
        want_abort(s);
        send_end(s);
        see_closed(s, 0);
        return;
    }
    send_greeting(s, row->way == 3 ? NO_ZEROES : FIXED | NO_ZEROES);
    want_client_flags(s, row->way == 3 ? NO_ZEROES : FIXED | NO_ZEROES);
    if (row->way < 2) {
        agree_on(s, NBD_PROTOCOL_SIMPLE);
        want_go(s, name);
    }
    if (row->way == 0) {
        send_info_export(s, 7, EXPORT_SIZE, NBD_OFFERS_FLAGS);
        send_ack(s, 7);
    } else {
        if (row->way == 1) send_refusal(s, 7, 1, "");
        want_export_name(s, name);
        send_export(s, EXPORT_SIZE, NBD_OFFERS_FLAGS, 0);
    }
    see_ready(s);
    close_session(s);
}

static void name_of_any_length_goes_out(void)
{
    static const size_t sizes[] = {0, 1, 2, 3, 254, 255, 256, 257, 258, 4094, 4095, 4096};
    name_row row;
    size_t i;

    for (row.way = 0; row.way < 6; row.way++) {
        for (i = 0; i < COUNT(sizes); i++) {
            row.size = sizes[i];
            face(name_goes_out, &row, LAWFUL);
        }
    }
}

// Refused before a byte leaves.
static nbd_option *option_with_long_name(script *s, uint32_t number)
{
    option_is_refused_here(s, number, NBD_ERR_NAME);
    return &s->options[s->option_count - 1];
}

static void long_names_by_hand(script *s, const void *of)
{
    static const uint32_t naming[] = {1, 6, 7, 9, 10};
    static const char *query[1];
    const size_t *size = of;
    size_t i;

    query[0] = script_text(s, *size);
    open_options(s);
    option_succeeds(s, 8);
    for (i = 0; i < COUNT(naming); i++) {
        option_with_long_name(s, naming[i])->name = query[0];
        if (naming[i] >= 9) {
            nbd_option *refused = option_with_long_name(s, naming[i]);

            refused->queries = query;
            refused->query_count = 1;
        }
    }
    client_disconnects(s);
    want_abort(s);
    send_end(s);
    see_closed(s, 0);
}

static int init_with(const char *name, const char *query)
{
    static unsigned char buffer[NBD_BUFFER_MIN];
    static nbd_slot slots[1];
    static nbd_context contexts[1];
    static nbd_client client;
    nbd_config config = NBD_ZERO;

    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.contexts = contexts;
    config.context_count = 1;
    config.export_name = name;
    config.queries = &query;
    config.query_count = query != NULL;
    return nbd_init(&client, &config);
}

static void longer_name_is_refused_before_a_byte_leaves(void)
{
    static const size_t sizes[] = {4094, 4095, 4096, 4097, 4098, 5000, 65536};
    static char text[65537];
    size_t i;

    for (i = 0; i < COUNT(sizes); i++) {
        int wanted = sizes[i] > 4096 ? NBD_ERR_NAME : 0;

        memset(text, 'n', sizes[i]);
        text[sizes[i]] = '\0';
        CHECK_EQUAL(init_with(text, NULL), wanted);
        CHECK_EQUAL(init_with(NULL, text), wanted);
        if (wanted) face(long_names_by_hand, &sizes[i], LAWFUL);
    }
}

// 4 GiB of queries in one option: one more than 32 bits can say is refused.
static void queries_of_4_gib(script *s, const void *of)
{
    enum { MOST = 1047552 }; // times 4 + 4096 is just below 2^32
    static const char *queries[MOST + 1];
    const char *query = script_text(s, 4096);
    nbd_option *refused;
    size_t i;

    (void)of;
    for (i = 0; i < MOST + 1; i++)
        queries[i] = query;
    open_options(s);
    option_succeeds(s, 8);
    refused = option_with_long_name(s, 10);
    refused->queries = queries;
    refused->query_count = MOST + 1;
    transport_takes(s, 16); // the header, which says how long the option is
    client_asks_contexts(s, 10, NULL, queries, MOST);
    script_close(s, want_option_open(s, 10, 4 + 4 + MOST * (size_t)(4 + 4096)));
    client_abandons(s);
    see_closed(s, NBD_ERR_ABANDONED);
}

static void queries_longer_than_an_option_can_say_are_refused(void)
{
    play_uncut(variant_script(queries_of_4_gib, NULL), &whole_mode, NULL);
}

/// Information ///

typedef struct info_row {
    uint32_t option; // INFO or GO
    unsigned type;
    uint32_t length; // of the whole reply
    int second;      // behind a good one
} info_row;

static void ask_export(script *s, uint32_t option)
{
    open_options(s);
    client_asks(s, option, "");
    want_info(s, option, "");
}

static const char *info_detail(const info_row *row)
{
    if (row->length < 2 || row->length > 65536) {
        return "option reply of wrong type or length";
    }
    if (row->type == 0) return "NBD_INFO_EXPORT not 12 bytes";
    if (row->type == 3) return "NBD_INFO_BLOCK_SIZE not 14 bytes";
    return "name or description too long";
}

static int info_is_legal(const info_row *row)
{
    switch (row->type) {
    case 0: return row->length == 12;
    case 1:
    case 2: return row->length >= 2 && row->length <= 2 + 4096;
    case 3: return row->length == 14;
    default: return row->length >= 2 && row->length <= 65536;
    }
}

static void send_info(script *s, const info_row *row)
{
    step *sent = send_reply_open(s, row->option, 3, row->length);

    if (row->length >= 2) put(s, row->type, 2);
    if (info_is_legal(row) || row->length < 32) {
        memset(script_room(s, row->length >= 2 ? row->length - 2 : row->length), 1,
               row->length >= 2 ? row->length - 2 : row->length);
    }
    script_close(s, sent);
}

static void wrong_information(script *s, const void *of)
{
    const info_row *row = of;

    ask_export(s, row->option);
    if (row->second) send_info_export(s, row->option, EXPORT_SIZE, EXPORT_FLAGS);
    send_info(s, row);
    see_closed_by(s, NBD_ERR_PROTOCOL, info_detail(row));
}

static void passed_information(script *s, const void *of)
{
    const info_row *row = of;
    char *text;

    ask_export(s, row->option);
    send_info_export(s, row->option, EXPORT_SIZE, NBD_OFFERS_FLAGS);
    send_info(s, row);
    if (row->type == 1 || row->type == 2) {
        text = (char *)script_room(s, row->length);
        memset(text, 1, row->length - 2);
        text[row->length - 2] = '\0';
        see_text(s, SESSION, row->option, row->type == 1 ? NBD_TEXT_NAME : NBD_TEXT_DESCRIPTION,
                 text);
    }
    send_ack(s, row->option);
    if (row->option == 6) {
        see_option(s, 6, 0);
        client_disconnects(s);
        want_abort(s);
        send_end(s);
        see_closed(s, 0);
    } else {
        see_ready(s);
        close_session(s);
    }
}

static void face_information(int legal)
{
    static const unsigned types[] = {0, 1, 2, 3, 4, 5, 0x7FFF, 0x8000, 0xFFFF};
    static const uint32_t bounds[] = {2, 12, 14, 4098, 65536};
    info_row row;
    size_t i, k;

    for (i = 0; i < COUNT(types); i++) {
        for (k = 0; k < COUNT(bounds) * AROUND; k++) {
            row.option = k % 2 ? 6 : 7;
            row.type = types[i];
            row.length = (uint32_t)length_around(bounds[k / AROUND], k % AROUND);
            row.second = k % 3 == 0;
            if (info_is_legal(&row) != legal || (legal && (row.type == 0 || row.type == 3)))
                continue;
            if (legal) {
                (row.length < 4096 ? face : face_many)(passed_information, &row, LAWFUL);
            } else {
                face(wrong_information, &row, row.type > 3 && row.length > 1 ? UNJUDGED : BROKEN);
            }
        }
    }
}

static void information_of_a_wrong_length_ends_it(void)
{
    face_information(0);
}

static void information_of_any_other_length_is_taken(void)
{
    face_information(1);
}

/// Block sizes ///

typedef struct block_row {
    uint32_t minimum, preferred, maximum;
} block_row;

static int power_of_2(uint32_t x)
{
    unsigned bit, set = 0;

    for (bit = 0; bit < 32; bit++)
        set += x >> bit & 1;
    return set == 1;
}

static int blocks_are_legal(const block_row *row)
{
    return power_of_2(row->minimum) && row->minimum <= 65536 && power_of_2(row->preferred) &&
           row->preferred >= 512 && row->preferred >= row->minimum &&
           row->maximum >= row->preferred;
}

static void send_blocks(script *s, const void *of)
{
    const block_row *row = of;

    ask_export(s, 7);
    send_info_export(s, 7, EXPORT_SIZE, NBD_OFFERS_FLAGS);
    send_info_block_size(s, 7, row->minimum, row->preferred, row->maximum);
    if (blocks_are_legal(row)) {
        send_ack(s, 7);
        see_ready(s);
        close_session(s);
    } else {
        see_closed_by(s, NBD_ERR_PROTOCOL, "block sizes break their rules");
    }
}

static void block_sizes_keep_their_rules_or_end_it(void)
{
    static const uint32_t sizes[] = {0,      1,      2,        3,          255,        256,
                                     511,    512,    513,      1023,       1024,       4095,
                                     4096,   4097,   32768,    65535,      65536,      65537,
                                     131072, 262144, 1u << 25, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    block_row row;
    size_t i, k, l;

    for (i = 0; i < COUNT(sizes); i++) {
        for (k = 0; k < COUNT(sizes); k++) {
            for (l = 0; l < COUNT(sizes); l++) {
                int legal;

                row.minimum = sizes[i];
                row.preferred = sizes[k];
                row.maximum = sizes[l];
                legal = blocks_are_legal(&row);
                if (face_many(send_blocks, &row, legal ? LAWFUL : BROKEN) && legal) {
                    const nbd_export *got = nbd_negotiated(&stage.client);

                    CHECK(got->minimum_block == row.minimum &&
                          got->preferred_block == row.preferred &&
                          got->maximum_payload == row.maximum && got->block_sizes == 1);
                }
            }
        }
    }
}

/// A server that hangs up ///

// Options in the order in which they are asked for; the server hangs up at the last.
static void hang_up(script *s, const void *of)
{
    static const char *const queries[] = {"base:allocation"};
    const unsigned *at = of;
    static const uint32_t asked[] = {5, 11, 8, 10, 7, 1};
    nbd_event *closed;
    unsigned i;

    s->config.flags = *at == 0 ? NBD_TLS_ALLOW : 0;
    s->config.queries = queries;
    s->config.query_count = 1;
    s->config.export_name = "abc";
    greet_fixed(s);
    for (i = *at == 0 ? 0 : 1; i <= *at; i++) {
        if (asked[i] == 10) want_meta(s, 10, "abc", queries, 1);
        if (asked[i] == 7) want_go(s, "abc");
        if (asked[i] == 1) want_export_name(s, "abc");
        if (asked[i] == 5 || asked[i] == 8 || asked[i] == 11) want_option(s, asked[i], "", 0);
        if (i == *at) break;
        if (asked[i] == 8) {
            send_ack(s, 8);
        } else {
            send_refusal(s, asked[i], 1, "");
        }
    }
    send_end(s);
    closed = see_event(s, SESSION, NBD_EVENT_CLOSED);
    closed->error = NBD_ERR_CLOSED;
    closed->option = asked[*at];
    closed->detail = "instead of answering an option";
}

static void server_that_hangs_up_names_the_option(void)
{
    unsigned at;

    for (at = 0; at < 6; at++)
        face(hang_up, &at, UNJUDGED);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RULE(greeting_with_any_bit_wrong_is_no_nbd);
    RULE(no_handshake_flag_is_echoed_but_two);
    RULE(flags_without_their_first_bit_end_it);
    RULE(every_bit_of_the_flags_is_taken_as_sent);
    RULE(oldstyle_flags_have_no_upper_half);
    RULE(reserved_bytes_may_hold_anything);
    RULE(export_of_any_size_is_told_and_bounded);
    RULE(name_of_any_length_goes_out);
    RULE(longer_name_is_refused_before_a_byte_leaves);
    RULE(queries_longer_than_an_option_can_say_are_refused);
    RULE(information_of_a_wrong_length_ends_it);
    RULE(information_of_any_other_length_is_taken);
    RULE(block_sizes_keep_their_rules_or_end_it);
    RULE(server_that_hangs_up_names_the_option);
    return check_end();
}
