// A server that answers options in every way, right and wrong.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "hostile.h"

static const char *const queries[] = {"base:allocation"};

// Options that the program asks for by hand; 77 stands for those that nobody knows.
static const uint32_t every_option[] = {3, 5, 6, 7, 8, 9, 10, 11, 77};

static void ask_option(script *s, uint32_t option)
{
    if (option == 6 || option == 7) {
        client_asks(s, option, "x");
        want_info(s, option, "x");
    } else if (option == 9 || option == 10) {
        client_asks_contexts(s, option, "x", queries, 1);
        want_meta(s, option, "x", queries, 1);
    } else if (option == 77) {
        client_asks_raw(s, option, "abc", 3);
        want_option(s, option, "abc", 3);
    } else {
        client_asks(s, option, NULL);
        want_option(s, option, "", 0);
    }
}

// Metadata contexts need structured replies.
static void open_and_ask(script *s, uint32_t option)
{
    open_options(s);
    if (option == 9 || option == 10) option_succeeds(s, 8);
    ask_option(s, option);
}

// The stream is in step: one more option is answered, and the session ends well.
static void options_live(script *s)
{
    option_succeeds(s, 3);
    client_disconnects(s);
    want_abort(s);
    send_end(s);
    see_closed(s, 0);
}

/// Refusals ///

typedef struct reply_row {
    uint32_t option;
    uint32_t type;
    uint32_t length;
    int second; // behind a reply that is right
} reply_row;

static const char invalid_reply[] = "option reply of wrong type or length";

static void refuse_with_text(script *s, const void *of)
{
    const reply_row *row = of;

    open_and_ask(s, row->option);
    refuse_option(s, row->option, row->type, script_text(s, row->length));
    options_live(s);
}

static void text_of_a_refusal_is_drained_at_any_length(void)
{
    static const uint32_t lengths[] = {0, 1, 2, 37, 191, 192, 193, 255, 256, 257, 4094, 4095, 4096};
    reply_row row = {0, 1, 0, 0};
    size_t i, k;

    for (i = 0; i < COUNT(every_option); i++) {
        for (k = 0; k < COUNT(lengths); k++) {
            row.option = every_option[i];
            row.length = lengths[k];
            row.type = 1 + (uint32_t)(k % 4);
            face(refuse_with_text, &row, UNJUDGED);
        }
    }
}

// Only the header is sent: nothing of what it announces may be waited for.
static void send_header(script *s, const void *of)
{
    const reply_row *row = of;

    open_and_ask(s, row->option);
    script_close(s, send_reply_open(s, row->option, row->type, row->length));
    see_closed_by(s, NBD_ERR_PROTOCOL, invalid_reply);
}

static void text_of_a_refusal_above_4096_ends_it(void)
{
    static const uint32_t lengths[] = {4097, 4098, 5000, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    reply_row row = {0, 0, 0, 0};
    size_t i, k;

    for (i = 0; i < COUNT(every_option); i++) {
        for (k = 0; k < COUNT(lengths); k++) {
            row.option = every_option[i];
            row.length = lengths[k];
            row.type = UINT32_C(0x80000001) + (uint32_t)(k % 11);
            face(send_header, &row, BROKEN);
        }
    }
}

static void refuse_by_number(script *s, const void *of)
{
    const uint32_t *type = of;
    nbd_event *refused;

    open_and_ask(s, 3);
    send_reply(s, 3, *type, "", 0);
    refused = see_option(s, 3, NBD_REP_ERR_OTHER);
    refused->server_error = *type;
    options_live(s);
}

static void refusal_of_any_number_is_told(void)
{
    static const uint32_t numbers[] = {0, 11, 12, 0x7F, 0xFFFF, 0x00800000, 0x7FFFFFFE, 0x7FFFFFFF};
    uint32_t type;
    size_t i;

    for (i = 0; i < COUNT(numbers); i++) {
        type = UINT32_C(0x80000000) | numbers[i];
        face(refuse_by_number, &type, UNJUDGED);
    }
}

/// Types and lengths ///

// "Option reply types": which replies an option has, and how long they are.
static int reply_is_legal(const reply_row *row)
{
    uint32_t o = row->option, length = row->length;

    if (row->type & 0x80000000) return length <= 4096;
    switch (row->type) {
    case 1: return length == 0;
    case 2: return o == 3 && length >= 4 && length <= 4 + 4096 + 4096;
    case 3: return (o == 6 || o == 7) && length >= 2 && length <= 65536;
    case 4: return (o == 9 || o == 10) && length >= 4 && length <= 4 + 4096;
    default: return 0;
    }
}

static void send_good_reply(script *s, uint32_t option)
{
    if (option == 3) {
        send_server(s, "e", "");
        see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "e");
    }
    if (option == 6 || option == 7) send_info_export(s, option, EXPORT_SIZE, NBD_OFFERS_FLAGS);
    if (option == 9 || option == 10) tell_context(s, option, 0, 1, queries[0]);
}

static void send_bad_reply(script *s, const void *of)
{
    const reply_row *row = of;
    uint32_t some = row->length < 64 ? row->length : 64;

    open_and_ask(s, row->option);
    if (row->second) send_good_reply(s, row->option);
    script_close(s, send_reply_open(s, row->option, row->type, row->length));
    memset(script_room(s, some), 0x5A, some);
    s->steps[s->step_count - 1].size += some;
    see_closed_by(s, NBD_ERR_PROTOCOL, invalid_reply);
}

static void reply_of_a_type_or_length_that_an_option_has_not_ends_it(void)
{
    static const uint32_t types[] = {0, 1, 2, 3, 4, 5, 6, 0x7FFFFFFF};
    static const uint32_t bounds[] = {2, 4, 4096, 4100, 8196, 65536};
    reply_row row;
    size_t i, k, l;

    for (i = 0; i < COUNT(every_option) * COUNT(types); i++) {
        for (k = 0; k < COUNT(bounds); k++) {
            for (l = 0; l < AROUND; l++) {
                row.option = every_option[i / COUNT(types)];
                row.type = types[i % COUNT(types)];
                row.length = (uint32_t)length_around(bounds[k], l);
                row.second = (k + l) % 2 == 1;
                if (!reply_is_legal(&row)) {
                    (k == 1 ? face : face_many)(send_bad_reply, &row,
                                                row.type == 3 || row.option == 77 ? UNJUDGED
                                                                                  : BROKEN);
                }
            }
        }
    }
}

static void send_other_option(script *s, const void *of)
{
    const reply_row *row = of;

    open_and_ask(s, row->option);
    if (row->second) send_good_reply(s, row->option);
    send_reply(s, row->type, 1, "", 0);
    see_closed_by(s, NBD_ERR_PROTOCOL, "reply to another option");
}

static void reply_to_any_other_option_ends_it(void)
{
    static const uint32_t others[] = {
        0,  1,  2,  3,      5,      6,          7,          8,          9,         10,
        11, 12, 77, 0x0300, 0xFFFF, 0x07000000, 0x0A000000, 0x80000003, 0xFFFFFFFF};
    reply_row row = {0, 0, 0, 0};
    size_t i, k;

    for (i = 0; i < COUNT(every_option); i++) {
        for (k = 0; k < COUNT(others); k++) {
            row.option = every_option[i];
            row.type = others[k];
            row.second = k % 2 == 1;
            if (row.option != row.type) face(send_other_option, &row, BROKEN);
        }
    }
}

static void spoil_magic(script *s, const void *of)
{
    const reply_row *row = of;
    unsigned char *bytes;

    open_and_ask(s, row->option);
    if (row->second) send_good_reply(s, row->option);
    bytes = s->bytes + s->used;
    send_ack(s, row->option);
    bytes[row->length / 8] ^= (unsigned char)(1u << row->length % 8);
    see_closed_by(s, NBD_ERR_PROTOCOL, "bad option reply magic");
}

static void option_reply_with_any_bit_of_its_magic_wrong_ends_it(void)
{
    reply_row row = {3, 0, 0, 0};

    for (row.length = 0; row.length < 64; row.length++) {
        row.second = row.length % 2 == 1;
        row.option = row.length % 3 ? 3 : 6;
        face(spoil_magic, &row, BROKEN);
    }
}

// What stands behind the final reply.
static void answer_twice(script *s, const void *of)
{
    const reply_row *row = of;

    open_and_ask(s, row->option);
    if (row->second) {
        refuse_option(s, row->option, 1, "");
    } else {
        send_ack(s, row->option);
        see_option(s, row->option, 0);
    }
    if (row->length) {
        script_close(s, send_reply_open(s, row->option, row->type, 0));
    } else {
        send_bytes(s, "\0", 1);
    }
    see_closed_by(s, NBD_ERR_PROTOCOL, "bytes between options");
}

static void bytes_behind_the_final_reply_end_it(void)
{
    static const uint32_t options[] = {3, 8, 9, 10, 11, 77};
    static const uint32_t types[] = {1, 2, 3, 4, 0x80000001};
    reply_row row;
    size_t i, k;

    for (i = 0; i < COUNT(options); i++) {
        for (k = 0; k < 2 * (COUNT(types) + 1); k++) {
            row.option = options[i];
            row.type = types[k / 2 % COUNT(types)];
            row.length = k / 2 < COUNT(types);
            row.second = k % 2 == 1;
            face(answer_twice, &row, BROKEN);
        }
    }
}

// The options run by themselves: what is too much answers the wrong option.
static void answer_twice_by_itself(script *s, const void *of)
{
    const uint32_t *type = of;

    greet_fixed(s);
    want_option(s, 11, "", 0);
    send_refusal(s, 11, 1, "");
    want_option(s, 8, "", 0);
    script_close(s, send_reply_open(s, 11, *type, 0));
    see_closed_by(s, NBD_ERR_PROTOCOL, "reply to another option");
}

static void second_final_reply_ends_the_automatic_options(void)
{
    static const uint32_t types[] = {1, 2, 0x80000001};
    size_t i;

    for (i = 0; i < COUNT(types); i++)
        face(answer_twice_by_itself, &types[i], BROKEN);
}

/// Lists ///

typedef struct list_row {
    uint32_t outer; // length of the reply
    uint32_t inner; // length of the name
    int second;
} list_row;

static int entry_is_legal(const list_row *row)
{
    return row->inner <= row->outer - 4 && row->inner <= 4096 &&
           row->outer - 4 - row->inner <= 4096;
}

static void list_entry(script *s, const void *of)
{
    const list_row *row = of;
    const char *text = script_text(s, 4096);
    uint32_t size = row->outer - 4;
    nbd_event *seen;

    open_and_ask(s, 3);
    if (row->second) send_good_reply(s, 3);
    (void)send_reply_open(s, 3, 2, row->outer);
    put(s, row->inner, 4);
    if (entry_is_legal(row)) {
        put_bytes(s, text, row->inner);
        put_bytes(s, text, size - row->inner);
    } else {
        put_bytes(s, text, size < 64 ? size : 64);
    }
    script_close(s, &s->steps[s->step_count - 1]);
    if (!entry_is_legal(row)) {
        see_closed_by(s, NBD_ERR_PROTOCOL, "export name or description too long");
        return;
    }
    seen = see_text(s, SESSION, 3, NBD_TEXT_EXPORT, text);
    seen->text_length = row->inner;
    if (size > row->inner) {
        seen = see_text(s, SESSION, 3, NBD_TEXT_DESCRIPTION, text);
        seen->text_length = size - row->inner;
    }
    send_ack(s, 3);
    see_option(s, 3, 0);
    options_live(s);
}

static void face_entry(uint32_t outer, uint64_t inner, int second)
{
    list_row row;

    row.outer = outer;
    row.inner = (uint32_t)inner;
    row.second = second;
    (outer < 4096 ? face : face_many)(list_entry, &row, entry_is_legal(&row) ? LAWFUL : BROKEN);
}

static void name_in_a_list_fits_its_reply_or_ends_it(void)
{
    static const uint32_t outers[] = {4, 5, 6, 7, 8, 12, 36, 260, 4099, 4100, 4101, 8195, 8196};
    size_t i, k;

    for (i = 0; i < COUNT(outers); i++) {
        for (k = 0; k < AROUND; k++) {
            face_entry(outers[i], length_around(outers[i] - 4, k), k % 2 == 1);
            face_entry(outers[i], length_around(4096, k), k % 2 == 0);
        }
        for (k = 0; k < 32; k++)
            face_entry(outers[i], (outers[i] - 4) ^ UINT32_C(1) << k, k % 2 == 1);
    }
}

// 100,000 entries pass through the least buffer; then comes nothing, and then the end.
typedef struct flood {
    nbd_client client;
    unsigned exports;
    int option; // what the last OPTION said, or 1
    int closed; // what CLOSED said, or 1
} flood;

static void flood_events(flood *f)
{
    nbd_event event;

    while (nbd_next(&f->client, &event)) {
        if (event.type == NBD_EVENT_TEXT) {
            CHECK_EQUAL(event.text_size, 4);
            CHECK_BYTES(event.text, "name", 4);
            f->exports++;
        }
        if (event.type == NBD_EVENT_OPTION) f->option = event.error;
        if (event.type == NBD_EVENT_CLOSED) f->closed = event.error;
    }
}

static void flood_send(flood *f)
{
    nbd_iovec iov[4];
    unsigned flags, count;

    while ((count = nbd_outgoing(&f->client, iov, 4, &flags)) > 0)
        CHECK_EQUAL(nbd_sent(&f->client, (ptrdiff_t)iov_sum(iov, count)), 0);
}

static void flood_feed(flood *f, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;

    while (size > 0) {
        nbd_iovec iov[1];
        size_t some;

        CHECK(nbd_incoming(&f->client, iov, 1) == 1);
        some = smaller(size, iov[0].size);
        memcpy(iov[0].base, at, some);
        CHECK_EQUAL(nbd_received(&f->client, (ptrdiff_t)some), 0);
        at += some;
        size -= some;
        flood_events(f);
        flood_send(f);
    }
}

static void flood_is_told(flood *f, ptrdiff_t result)
{
    nbd_iovec iov[1];

    CHECK(nbd_incoming(&f->client, iov, 1) == 1);
    CHECK_EQUAL(nbd_received(&f->client, result), 0);
    flood_events(f);
}

static void flood_open(flood *f)
{
    static unsigned char buffer[NBD_BUFFER_MIN];
    static nbd_slot slots[1];
    nbd_config config = NBD_ZERO;
    nbd_option list = NBD_ZERO;

    memset(f, 0, sizeof *f);
    config.flags = NBD_NEGOTIATE;
    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    CHECK_EQUAL(nbd_init(&f->client, &config), 0);
    CHECK_EQUAL(nbd_connect(&f->client, NULL), 0);
    flood_feed(f, "NBDMAGICIHAVEOPT\0\3", 18);
    list.option = NBD_OPTION_LIST;
    CHECK_EQUAL(nbd_negotiate(&f->client, &list), 0);
    flood_send(f);
    f->option = 1;
    f->closed = 1;
}

static void list_of_100000_exports_without_its_end_is_no_success(void)
{
    static const char entry[] = "\0\3\350\211\4\125\145\251\0\0\0\3\0\0\0\2\0\0\0\10\0\0\0\4name";
    static flood f;
    unsigned i;

    flood_open(&f);
    for (i = 0; i < 100000; i++)
        flood_feed(&f, entry, sizeof entry - 1);
    CHECK_EQUAL(f.exports, 100000);
    flood_is_told(&f, NBD_IO_READ);
    CHECK_EQUAL(f.option, 1);
    CHECK_EQUAL(nbd_wants(&f.client), NBD_WANT_READ);
    flood_is_told(&f, NBD_IO_EOF);
    CHECK_EQUAL(f.option, 1);
    CHECK_EQUAL(f.closed, NBD_ERR_CLOSED);
}

/// Texts ///

typedef struct text_row {
    const char *text;
    size_t size;
    int kind;
} text_row;

enum { TEXT_KINDS = 7 };

static const struct text_kind {
    uint32_t option;
    uint32_t type;   // of the reply
    unsigned before; // bytes in front of the text
    uint32_t kind;
} text_kinds[TEXT_KINDS] = {{3, 2, 4, NBD_TEXT_EXPORT},
                            {3, 2, 4, NBD_TEXT_DESCRIPTION},
                            {6, 3, 2, NBD_TEXT_NAME},
                            {7, 3, 2, NBD_TEXT_DESCRIPTION},
                            {9, 4, 4, NBD_TEXT_CONTEXT},
                            {10, 4, 4, NBD_TEXT_CONTEXT},
                            {8, 0x80000003, 0, NBD_TEXT_MESSAGE}};

static void send_text(script *s, const void *of)
{
    const text_row *row = of;
    const struct text_kind *kind = &text_kinds[row->kind];
    int described = kind->kind == NBD_TEXT_DESCRIPTION && kind->option == 3;
    nbd_event *seen;
    step *sent;

    open_and_ask(s, kind->option);
    if (kind->type == 3) send_info_export(s, kind->option, EXPORT_SIZE, NBD_OFFERS_FLAGS);
    sent = send_reply_open(s, kind->option, kind->type, kind->before + row->size);
    if (kind->type == 2) put(s, described ? 0 : row->size, 4);
    if (kind->type == 3) put(s, kind->kind == NBD_TEXT_NAME ? 1 : 2, 2);
    if (kind->type == 4) put(s, 7, 4);
    put_bytes(s, row->text, row->size);
    script_close(s, sent);
    if (described) see_text(s, SESSION, 3, NBD_TEXT_EXPORT, "");
    seen = see_text(s, SESSION, kind->option, kind->kind, row->text);
    seen->text_length = (uint32_t)row->size;
    if (kind->kind == NBD_TEXT_MESSAGE) {
        seen->error = NBD_REP_ERR_INVALID;
        seen->server_error = kind->type;
        see_option(s, kind->option, NBD_REP_ERR_INVALID);
        options_live(s);
        return;
    }
    send_ack(s, kind->option);
    if (kind->option == 7) {
        see_ready(s);
        close_session(s);
    } else {
        see_option(s, kind->option, 0);
        options_live(s);
    }
}

static void text_of_any_bytes_comes_as_it_was_sent(void)
{
    static char every_byte[256];
    static const text_row texts[] = {{every_byte, sizeof every_byte, 0},
                                     {"\0", 1, 0},
                                     {"\33[31mred\33[0m\r\n", 15, 0},
                                     {"\xC0\xAF", 2, 0},
                                     {"a\0b", 3, 0},
                                     {"\x80", 1, 0},
                                     {"\xF4\x90\x80\x80", 4, 0},
                                     {"%s%n%s%n", 8, 0},
                                     {"\xED\xA0\x80", 3, 0}};
    size_t i;
    text_row row;

    for (i = 0; i < sizeof every_byte; i++)
        every_byte[i] = (char)i;
    for (i = 0; i < COUNT(texts) * TEXT_KINDS; i++) {
        row = texts[i / TEXT_KINDS];
        row.kind = (int)(i % TEXT_KINDS);
        face(send_text, &row, UNJUDGED);
    }
}

/// Contexts ///

typedef struct context_row {
    unsigned count;
    uint32_t refusal;
    int by_hand;
} context_row;

static void contexts_then_refusal(script *s, const void *of)
{
    static const char *const names[] = {"base:allocation", "a:b", "c:d"};
    static nbd_op status;
    const context_row *row = of;
    unsigned i;

    if (row->by_hand) {
        open_options(s);
        option_succeeds(s, 8);
        client_asks_contexts(s, 10, "", names, 3);
    } else {
        s->config.queries = names;
        s->config.query_count = 3;
        greet_fixed(s);
        agree_on(s, NBD_PROTOCOL_STRUCTURED);
    }
    want_meta(s, 10, "", names, 3);
    for (i = 0; i < row->count; i++)
        tell_context(s, 10, i, 7 + i, names[i]);
    if (row->by_hand) {
        refuse_option(s, 10, row->refusal, "");
        go_asked(s, "");
    } else {
        send_refusal(s, 10, row->refusal, "");
        go(s, EXPORT_SIZE, EXPORT_FLAGS);
    }
    op_is(&status, NBD_BLOCK_STATUS, 0, 512);
    op_is_refused_here(s, &status, NBD_ERR_UNSUPPORTED);
    session_lives(s);
}

static void contexts_before_any_refusal_count_for_nothing(void)
{
    static const uint32_t refusals[] = {1, 2, 3, 4, 5, 6, 8, 9, 10};
    context_row row;
    size_t i;

    for (i = 0; i < COUNT(refusals) * 8; i++) {
        row.refusal = refusals[i / 8];
        row.count = i % 4;
        row.by_hand = i / 4 % 2 == 1;
        face(contexts_then_refusal, &row, UNJUDGED);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->context_count, 0);
    }
}

/// ABORT ///

static void abort_is_answered(script *s, const void *of)
{
    const text_row *row = of;

    open_options(s);
    client_disconnects(s);
    want_abort(s);
    send_bytes(s, row->text, row->size);
    send_end(s);
    see_closed(s, 0);
}

#define REPLY_TO_ABORT(type, length) "\0\3\350\211\4\125\145\251\0\0\0\2" type "\0\0\0" length

static void anything_behind_abort_is_a_clean_end(void)
{
    static const text_row answers[] = {
        {"", 0, 0},
        {REPLY_TO_ABORT("\0\0\0\1", "\0"), 20, 0},
        {REPLY_TO_ABORT("\0\0\0\1", "\4") "abcd", 24, 0},
        {REPLY_TO_ABORT("\200\0\0\1", "\0"), 20, 0},
        {REPLY_TO_ABORT("\200\0\0\1", "\4") "abcd", 24, 0},
        {REPLY_TO_ABORT("\0\0\0\2", "\4") "\0\0\0\0", 24, 0},
        {REPLY_TO_ABORT("\0\0\0\1", "\0"), 7, 0},
        {REPLY_TO_ABORT("\0\0\0\1", "\377"), 20, 0},
        {"HTTP/1.1 400 Bad Request\r\n\r\n", 28, 0},
    };
    size_t i;

    for (i = 0; i < COUNT(answers); i++)
        face(abort_is_answered, &answers[i], UNJUDGED);
}

/// Switches ///

typedef struct switch_row {
    uint32_t flags;
    uint32_t option;
    uint32_t answer; // 0 acknowledged, else the refusal
} switch_row;

static int refused_here(const switch_row *row)
{
    if ((row->flags & NBD_TLS_REQUIRE) && row->option != 5) return NBD_ERR_TLS;
    return row->option == 10 ? NBD_ERR_UNSUPPORTED : 0;
}

static void first_option(script *s, const void *of)
{
    const switch_row *row = of;
    int error = refused_here(row);

    s->config.flags = row->flags;
    s->unlawful = (row->flags & NBD_TLS_REQUIRE) != 0; // not even ABORT may leave in clear
    open_options(s);
    if (error) {
        option_is_refused_here(s, row->option, error);
        client_disconnects(s);
        if (!(row->flags & NBD_TLS_REQUIRE)) {
            want_abort(s);
            send_end(s);
        }
        see_closed(s, 0);
        return;
    }
    ask_option(s, row->option);
    if (row->answer) {
        refuse_option(s, row->option, row->answer, "no");
    } else {
        send_ack(s, row->option);
        see_option(s, row->option, 0);
    }
    options_live(s);
}

static void any_option_may_come_first_whatever_is_switched_off(void)
{
    static const uint32_t flags[] = {0,
                                     NBD_WITHOUT_STRUCTURED_REPLY,
                                     NBD_WITHOUT_EXTENDED_HEADERS,
                                     NBD_WITHOUT_STRUCTURED_REPLY | NBD_WITHOUT_EXTENDED_HEADERS,
                                     NBD_TLS_ALLOW,
                                     NBD_TLS_REQUIRE};
    static const uint32_t answers[] = {0, 1, 3};
    switch_row row;
    size_t i, k, l;

    for (i = 0; i < COUNT(flags); i++) {
        for (k = 0; k < COUNT(every_option); k++) {
            for (l = 0; l < COUNT(answers); l++) {
                row.flags = flags[i];
                row.option = every_option[k];
                row.answer = answers[l];
                // Success of these is told in other events, and tested elsewhere.
                if (row.option >= 5 && row.option <= 7 && row.answer == 0) continue;
                if (row.option == 5 && (row.flags & NBD_TLS_REQUIRE)) continue;
                face(first_option, &row, UNJUDGED);
            }
        }
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RULE(text_of_a_refusal_is_drained_at_any_length);
    RULE(text_of_a_refusal_above_4096_ends_it);
    RULE(refusal_of_any_number_is_told);
    RULE(reply_of_a_type_or_length_that_an_option_has_not_ends_it);
    RULE(reply_to_any_other_option_ends_it);
    RULE(option_reply_with_any_bit_of_its_magic_wrong_ends_it);
    RULE(bytes_behind_the_final_reply_end_it);
    RULE(second_final_reply_ends_the_automatic_options);
    RULE(name_in_a_list_fits_its_reply_or_ends_it);
    RULE(list_of_100000_exports_without_its_end_is_no_success);
    RULE(text_of_any_bytes_comes_as_it_was_sent);
    RULE(contexts_before_any_refusal_count_for_nothing);
    RULE(anything_behind_abort_is_a_clean_end);
    RULE(any_option_may_come_first_whatever_is_switched_off);
    return check_end();
}
