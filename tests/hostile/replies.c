// A server that answers commands in every way, right and wrong.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "hostile.h"

enum { CONTEXT_ID = 7, OFFSET = 4096, DISK_SIZE = 64 };

static const char *const queries[] = {"base:allocation"};
static const uint32_t context_ids[] = {CONTEXT_ID};
static const char bad_magic[] = "reply magic bad or not negotiated";

// Everything up to READY; BLOCK_STATUS can be asked for if the protocol allows it.
static void open_all(script *s, int protocol)
{
    if (protocol == NBD_PROTOCOL_SIMPLE) {
        open_simple(s);
    } else {
        open_contexts(s, protocol, queries, context_ids, 1, EXPORT_SIZE, EXPORT_FLAGS);
    }
}

static int ask(script *s, uint32_t command)
{
    int r = command == NBD_FLUSH ? client_issues(s, command, 0, 0, 0)
                                 : client_issues(s, command, 0, OFFSET, DISK_SIZE);

    want_request(s, r);
    return r;
}

static int can_ask(int protocol, uint32_t command)
{
    return command != NBD_BLOCK_STATUS || protocol != NBD_PROTOCOL_SIMPLE;
}

typedef struct row {
    int protocol;
    uint32_t command;
    int kind; // of the reply
    uint32_t flags;
    uint32_t type;
    uint32_t error;
    uint64_t length;
    uint64_t bits;
    int second; // behind a chunk that is right
} row;

static const row plain_row = {NBD_PROTOCOL_STRUCTURED, NBD_FLUSH, 0, DONE, 0, 0, 0, 0, 0};

// A header of `kind`, whatever was agreed on.
static step *send_header_of(script *s, int r, int kind, uint32_t flags, uint32_t type,
                            uint64_t length)
{
    int agreed = s->protocol;
    step *sent;

    s->protocol = kind;
    sent = send_chunk_open(s, r, flags, type, length);
    s->protocol = agreed;
    script_close(s, sent);
    return sent;
}

// Success of a command without content, in the negotiated kind.
static void send_success(script *s, int r)
{
    uint32_t command = s->requests[r].op.command;
    extent one = {DISK_SIZE, 0};

    if (s->protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, r, 0);
    } else if (command == NBD_READ) {
        send_data(s, r, DONE, OFFSET, DISK_SIZE);
    } else if (command == NBD_BLOCK_STATUS) {
        send_extents(s, r, DONE, CONTEXT_ID, &one, 1);
        see_extent(s, r, 0, OFFSET, one);
    } else {
        send_none(s, r);
    }
}

// A chunk of this request that is right, and not its last.
static void send_good_chunk(script *s, int r)
{
    extent one = {DISK_SIZE, 0};

    if (s->requests[r].op.command == NBD_READ) {
        send_data(s, r, MORE, OFFSET, DISK_SIZE);
    } else if (s->requests[r].op.command == NBD_BLOCK_STATUS) {
        send_extents(s, r, MORE, CONTEXT_ID, &one, 1);
        see_extent(s, r, 0, OFFSET, one);
    }
}

/// Kinds of reply ///

static void other_kind(script *s, const void *of)
{
    const row *it = of;
    int r;

    open_all(s, it->protocol);
    r = ask(s, it->command);
    if (it->second && it->protocol != NBD_PROTOCOL_SIMPLE) send_good_chunk(s, r);
    if (it->kind == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, r, it->error);
    } else {
        (void)send_header_of(s, r, it->kind, DONE, TYPE_NONE, 0);
    }
    die_by(s, r, bad_magic);
}

static void reply_of_a_kind_that_was_not_agreed_on_ends_it(void)
{
    row it = plain_row;

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (it.kind = 0; it.kind < 3; it.kind++) {
            for (it.command = NBD_READ; it.command <= NBD_BLOCK_STATUS; it.command++) {
                int lenient = it.protocol == NBD_PROTOCOL_STRUCTURED && it.kind == 0;

                it.error = it.command % 2 ? NBD_EIO : 0;
                it.second = it.command % 3 == 1;
                if (it.kind == it.protocol || lenient || !can_ask(it.protocol, it.command))
                    continue;
                face(other_kind, &it, BROKEN);
            }
        }
    }
}

static void spoilt_magic(script *s, const void *of)
{
    const row *it = of;
    unsigned char *bytes;
    int r;

    open_all(s, it->protocol);
    r = ask(s, NBD_FLUSH);
    bytes = s->bytes + s->used;
    send_success(s, r);
    bytes[it->bits / 8] ^= (unsigned char)(1u << it->bits % 8);
    die_by(s, r, bad_magic);
}

static void reply_with_any_bit_of_its_magic_wrong_ends_it(void)
{
    row it = plain_row;

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (it.bits = 0; it.bits < 32; it.bits++)
            face(spoilt_magic, &it, BROKEN);
    }
}

static void option_reply_now(script *s, const void *of)
{
    const row *it = of;
    int r = 0;

    open_all(s, it->protocol);
    if (it->second) r = ask(s, NBD_READ);
    send_reply(s, 7, it->type, "\0\0\0\0\0\0\0\0\0\0\0\1", (size_t)it->length);
    if (it->second) {
        die_by(s, r, bad_magic);
    } else {
        see_closed_by(s, NBD_ERR_PROTOCOL, bad_magic);
    }
}

static void option_reply_during_transmission_ends_it(void)
{
    static const uint32_t types[] = {1, 3, 0x80000001};
    row it = plain_row;
    size_t i;

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (i = 0; i < 2 * COUNT(types); i++) {
            it.type = types[i / 2];
            it.length = it.type == 3 ? 12 : 0;
            it.second = i % 2 == 1;
            face(option_reply_now, &it, BROKEN);
        }
    }
}

/// Cookies ///

static void flipped_cookie(script *s, const void *of)
{
    static const char detail[] = "cookie not in flight";
    const row *it = of;
    int a, b;

    s->any_order = 1;
    open_all(s, it->protocol);
    a = ask(s, NBD_READ);
    b = ask(s, NBD_WRITE);
    if (it->kind == 0 && it->protocol != NBD_PROTOCOL_EXTENDED) {
        send_simple(s, a, it->error);
    } else if (it->error) {
        send_error(s, a, DONE, it->error, "no");
    } else {
        send_data(s, a, DONE, OFFSET, DISK_SIZE);
    }
    s->steps[s->step_count - 1].cookie_flip = it->bits;
    memset(s->bytes + (s->requests[a].image - s->bytes), UNTOUCHED, DISK_SIZE);
    see_event(s, a, NBD_EVENT_DONE)->error = NBD_ERR_PROTOCOL;
    s->steps[s->step_count - 1].event.error_offset = OFFSET;
    die_by(s, b, detail);
}

static void face_cookies(row *it, uint64_t bits)
{
    it->bits = bits;
    for (it->protocol = 0; it->protocol < 3; it->protocol++) {
        it->kind = bits % 3 == 0 && it->protocol == 1 ? 0 : it->protocol;
        it->error = bits % 5 == 1 ? NBD_EIO : 0;
        face(flipped_cookie, it, BROKEN);
    }
}

static void cookie_with_any_bit_wrong_ends_it(void)
{
    static const uint64_t masks[] = {
        UINT64_MAX, 0x1FFFF, 0x10001, 0x30001, 0xFFFF, 0x30003, UINT64_C(0xFFFFFFFFFFFF0000)};
    row it = plain_row;
    size_t i;

    for (i = 0; i < 64; i++)
        face_cookies(&it, UINT64_C(1) << i);
    for (i = 0; i < COUNT(masks); i++) {
        // One request in flight: no mask hits another.
        if (masks[i] != 0x30001 && masks[i] != 0x10001) face_cookies(&it, masks[i]);
    }
    for (i = 0; i < 32; i++)
        face_cookies(&it, (uint64_t)check_random(UINT32_MAX) << 32 | check_random(UINT32_MAX) | 4);
}

static void answered_again(script *s, const void *of)
{
    static const char detail[] = "cookie not in flight";
    const row *it = of;
    int a, b = 0;

    s->config.slot_count = it->second ? 1 : 2;
    open_all(s, it->protocol);
    a = ask(s, it->command);
    if (!it->second) b = ask(s, NBD_FLUSH);
    send_success(s, a);
    see_done(s, a, 0);
    if (it->second) b = ask(s, NBD_FLUSH); // in the same slot
    if (it->error) {
        it->protocol == NBD_PROTOCOL_SIMPLE ? send_simple(s, a, it->error)
                                            : send_error(s, a, DONE, it->error, "");
    } else if (it->protocol == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, a, 0);
    } else {
        send_none(s, a);
    }
    die_by(s, b, detail);
}

static void second_reply_ends_it_in_a_new_slot_or_a_used_one(void)
{
    row it = plain_row;
    unsigned i;

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (it.command = NBD_READ; it.command <= NBD_BLOCK_STATUS; it.command++) {
            for (i = 0; i < 4; i++) {
                it.second = i % 2 == 1;
                it.error = i / 2 ? NBD_EIO : 0;
                if (can_ask(it.protocol, it.command)) face(answered_again, &it, BROKEN);
            }
        }
    }
}

static void flipped_echo(script *s, const void *of)
{
    const row *it = of;
    unsigned char *bytes;
    int r;

    open_all(s, NBD_PROTOCOL_EXTENDED);
    r = ask(s, it->command);
    if (it->second) send_good_chunk(s, r);
    bytes = s->bytes + s->used;
    if (it->error) {
        send_error(s, r, DONE, NBD_EIO, "");
    } else {
        send_none(s, r);
    }
    bytes[16 + it->bits / 8] ^= (unsigned char)(1u << it->bits % 8);
    die_by(s, r, "offset not echoed");
}

static void echo_with_any_bit_wrong_ends_it(void)
{
    row it = plain_row;

    for (it.bits = 0; it.bits < 64; it.bits++) {
        it.command = NBD_READ + (uint32_t)(it.bits % 7);
        it.error = it.bits % 2 == 1;
        it.second = it.bits % 3 == 1;
        face(flipped_echo, &it, BROKEN);
    }
}

/// Types ///

// "Structured reply types": which chunk answers which command, and what breaks otherwise.
static const char *type_detail(const row *it)
{
    int content = it->type == TYPE_DATA || it->type == TYPE_HOLE;
    int status = it->type == TYPE_EXTENTS || it->type == TYPE_EXTENTS_64;
    uint32_t extents = it->protocol == NBD_PROTOCOL_EXTENDED ? TYPE_EXTENTS_64 : TYPE_EXTENTS;

    if (it->type == TYPE_NONE || it->type >= 0x8000) return NULL;
    if (content) {
        return it->command == NBD_READ ? NULL : "content chunk, but no read";
    }
    if (!status) return "unknown chunk type";
    return it->command == NBD_BLOCK_STATUS && it->type == extents
               ? NULL
               : "block status chunk of wrong kind";
}

static void wrong_type(script *s, const void *of)
{
    const row *it = of;
    int r;

    open_all(s, it->protocol);
    r = ask(s, it->command);
    if (it->second) send_good_chunk(s, r);
    (void)send_header_of(s, r, it->protocol, it->flags, it->type, it->length);
    die_by(s, r, type_detail(it));
}

static void chunk_of_a_type_that_a_command_has_not_ends_it(void)
{
    static const uint32_t types[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0x0100, 0x0500, 0x7FFF};
    row it = plain_row;
    size_t i;

    for (it.protocol = 1; it.protocol < 3; it.protocol++) {
        for (it.command = NBD_READ; it.command <= NBD_BLOCK_STATUS; it.command++) {
            for (i = 0; i < 2 * COUNT(types); i++) {
                it.type = types[i / 2];
                it.second = i % 2 == 1;
                it.flags = i % 3 ? DONE : MORE;
                it.length = i % 5 ? 12 : 0;
                if (type_detail(&it)) face(wrong_type, &it, BROKEN);
            }
        }
    }
}

/// Lengths ///

// The reason why a chunk of this length is impossible, from its type alone; or NULL.
static const char *length_detail(const row *it)
{
    uint64_t head = it->protocol == NBD_PROTOCOL_EXTENDED ? 8 : 4, length = it->length;

    if (it->type >= 0x8000) {
        return length >= 6 && length <= 8192 ? NULL : "error chunk of wrong length";
    }
    switch (it->type) {
    case TYPE_NONE: return length == 0 ? NULL : "NONE chunk with payload or not DONE";
    case TYPE_DATA:
        return length > 8 && length <= 8 + DISK_SIZE ? NULL : "data chunk empty or too long";
    case TYPE_HOLE: return length == 12 ? NULL : "hole chunk not 12 bytes";
    default:
        return length > head && (length - head) % (2 * head) == 0 &&
                       (length - head) / (2 * head) <= 1u << 20
                   ? NULL
                   : "block status chunk of wrong length";
    }
}

static void wrong_length(script *s, const void *of)
{
    const row *it = of;
    int r;

    open_all(s, it->protocol);
    r = ask(s, it->command);
    if (it->second) send_good_chunk(s, r);
    (void)send_header_of(s, r, it->protocol, it->flags, it->type, it->length);
    die_by(s, r, length_detail(it));
}

// The specification has not defined the other error chunks, so it bounds them nowhere.
static int known_type(uint32_t type)
{
    return type < 0x8000 || type == TYPE_ERROR || type == TYPE_ERROR_OFFSET;
}

// The judge waits for the payload where the length alone is against no rule.
static int header_says_it(const row *it)
{
    return it->type == TYPE_NONE || it->type == TYPE_HOLE ||
           (it->type == TYPE_DATA && it->length <= 8);
}

static void face_length(row *it, uint64_t length, unsigned how)
{
    it->length = length;
    it->flags = how % 3 ? DONE : MORE;
    it->second = how % 2 == 1;
    if (it->type == TYPE_NONE) it->flags = DONE;
    if (length_detail(it)) face(wrong_length, it, header_says_it(it) ? BROKEN : UNJUDGED);
}

static void chunk_of_an_impossible_length_ends_it(void)
{
    static const uint32_t types[] = {0, 1, 2, 5, 0x8000, 0x8001, 0x8002, 0x8003, 0x80FF, 0xFFFF};
    static const uint64_t bounds[] = {
        2, 6, 9, 12, 14, 24, 8 + DISK_SIZE, 8192, 4 + (8u << 20), 8 + (16u << 20)};
    static const uint64_t huge[] = {UINT64_C(1) << 32, UINT64_C(1) << 63,
                                    UINT64_C(0x7FFFFFFFFFFFFFFF), UINT64_MAX};
    row it = plain_row;
    size_t i, k, l;

    for (it.protocol = 1; it.protocol < 3; it.protocol++) {
        for (i = 0; i < COUNT(types); i++) {
            it.type = types[i] == 5 ? 4 + (uint32_t)it.protocol : types[i];
            it.command = it.type == TYPE_DATA || it.type == TYPE_HOLE ? NBD_READ
                         : types[i] == 5                              ? NBD_BLOCK_STATUS
                                                                      : NBD_WRITE;
            for (k = 0; k < COUNT(bounds); k++) {
                for (l = 0; l < AROUND; l++) {
                    face_length(&it, length_around(bounds[k], l), (unsigned)(k + l));
                    if (it.protocol == 2 && l < 5) {
                        // The lower half would be a length that is right.
                        face_length(&it, (UINT64_C(1) << 32) + length_around(bounds[k], l),
                                    (unsigned)l);
                    }
                }
            }
            for (k = 0; k < COUNT(huge) && it.protocol == 2; k++)
                face_length(&it, huge[k], (unsigned)k);
        }
    }
}

/// Flags ///

static void none_without_done(script *s, const void *of)
{
    const row *it = of;
    int r;

    open_all(s, it->protocol);
    r = ask(s, it->command);
    (void)send_header_of(s, r, it->protocol, it->flags, TYPE_NONE, 0);
    die_by(s, r, "NONE chunk with payload or not DONE");
}

static void none_without_done_ends_it_whatever_else_is_set(void)
{
    row it = plain_row;
    unsigned bit;

    for (it.protocol = 1; it.protocol < 3; it.protocol++) {
        for (bit = 0; bit <= 16; bit++) {
            it.flags = bit == 0 ? 0 : bit == 16 ? 0xFFFE : 1u << bit;
            it.command = NBD_READ + bit % 7;
            face(none_without_done, &it, BROKEN);
        }
    }
}

static void unknown_flags(script *s, const void *of)
{
    const row *it = of;
    int r;

    open_all(s, it->protocol);
    r = ask(s, NBD_READ);
    send_data(s, r, it->flags & 0xFFFE, OFFSET, 10);
    send_hole(s, r, it->flags & 0xFFFE, OFFSET + 10, DISK_SIZE - 10);
    (void)send_header_of(s, r, it->protocol, it->flags | DONE, TYPE_NONE, 0);
    see_done(s, r, 0);
    session_lives(s);
}

static void any_unknown_flag_of_a_chunk_is_ignored(void)
{
    row it = plain_row;
    unsigned bit;

    for (it.protocol = 1; it.protocol < 3; it.protocol++) {
        for (bit = 1; bit <= 16; bit++) {
            it.flags = bit == 16 ? 0xFFFE : 1u << bit;
            face(unknown_flags, &it, UNJUDGED);
        }
    }
}

/// Errors ///

static int known_error(uint32_t value)
{
    static const uint32_t known[] = {1, 5, 12, 22, 28, 75, 95, 108};
    size_t i;

    for (i = 0; i < COUNT(known); i++) {
        if (known[i] == value) return (int)value;
    }
    return NBD_EINVAL;
}

static void error_value(script *s, const void *of)
{
    const row *it = of;
    int r;

    open_all(s, it->protocol);
    r = ask(s, it->command);
    if (it->kind == NBD_PROTOCOL_SIMPLE) {
        send_simple(s, r, it->error);
    } else if (it->type == TYPE_ERROR_OFFSET) {
        send_error_at(s, r, DONE, it->error, "", s->requests[r].op.offset);
    } else {
        script_close(s, send_error_open(s, r, DONE, it->type, it->error, "", 0));
    }
    if (it->error == 0) {
        die_by(s, r, "error chunk with error 0");
        return;
    }
    see_done_at(s, r, known_error(it->error), it->error, s->requests[r].op.offset);
    if (it->error == NBD_ESHUTDOWN) {
        want_disconnect(s);
        send_end(s);
        see_closed_by(s, NBD_ESHUTDOWN, "server is shutting down");
    } else {
        session_lives(s);
    }
}

static void face_error(row *it, uint32_t error, unsigned how)
{
    static const uint32_t types[] = {TYPE_ERROR, TYPE_ERROR_OFFSET, 0x8003, 0xFFFF};

    it->error = error;
    it->type = types[how % COUNT(types)];
    it->command = NBD_READ + how % 6;
    for (it->protocol = 0; it->protocol < 3; it->protocol++) {
        it->kind = it->protocol;
        if (error || it->protocol) face(error_value, it, error ? UNJUDGED : BROKEN);
    }
    // What a shipping server does to READ.
    it->protocol = NBD_PROTOCOL_STRUCTURED;
    it->kind = NBD_PROTOCOL_SIMPLE;
    if (error) face(error_value, it, UNJUDGED);
}

static void error_of_any_value_is_told_and_0_ends_it(void)
{
    static const uint32_t odd[] = {255,    256,        9999,       0x0100,     0x05000000,
                                   0x8000, 0x10000005, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    row it = plain_row;
    uint32_t error;

    for (error = 0; error < 130; error++)
        face_error(&it, error, error);
    for (error = 0; error < COUNT(odd); error++)
        face_error(&it, odd[error], error);
    for (error = 0; error < 4; error++)
        face_error(&it, 0, error);
}

// The message of an error chunk: `length` of the chunk, `bits` of the message.
static const char *message_detail(const row *it)
{
    uint64_t rest = it->length - 6 - it->bits;

    if (it->bits > it->length - 6 || it->bits > 4096) {
        return "error message too long";
    }
    if ((it->type == TYPE_ERROR && rest != 0) || (it->type == TYPE_ERROR_OFFSET && rest != 8)) {
        return "error chunk not as long as its type";
    }
    return NULL;
}

static void error_message(script *s, const void *of)
{
    const row *it = of;
    const char *text = script_text(s, (size_t)it->bits);
    size_t room = (size_t)it->length - 6;
    step *sent;
    int r;

    open_all(s, it->protocol);
    r = ask(s, it->command);
    sent = send_header_of(s, r, it->protocol, DONE, it->type, it->length);
    put(s, NBD_EIO, 4);
    put(s, it->bits, 2);
    put_bytes(s, text, smaller(strlen(text), room));
    room -= smaller(strlen(text), room);
    if (room == 8) put(s, s->requests[r].op.offset, 8);
    if (room != 8) put_zeroes(s, room);
    script_close(s, sent);
    if (message_detail(it)) {
        die_by(s, r, message_detail(it));
        return;
    }
    if (it->bits) see_message(s, r, 0, NBD_EIO, text);
    see_done(s, r, NBD_EIO);
    session_lives(s);
}

static void face_message(row *it)
{
    static const uint64_t room[] = {0, 1, 2, 7, 8, 9, 10, 16, 37, 4095, 4096, 4097, 4104, 8186};
    size_t i, k;

    for (i = 0; i < COUNT(room); i++) {
        for (k = 0; k < 12 + AROUND; k++) {
            uint64_t around = k < 5    ? room[i] - 2 + k
                              : k < 10 ? room[i] - 8 - 2 + (k - 5)
                              : k < 12 ? 0x7FFF + (k - 10)
                                       : length_around(4096, k - 12);

            it->length = 6 + room[i];
            it->bits = around & 0xFFFF;
            it->command = k % 2 || it->type == TYPE_ERROR_OFFSET ? NBD_READ : NBD_FLUSH;
            (room[i] < 100 ? face : face_many)(error_message, it,
                                               !known_type(it->type) ? UNJUDGED
                                               : message_detail(it)  ? BROKEN
                                                                     : LAWFUL);
        }
    }
}

static void message_of_an_error_fits_its_chunk_or_ends_it(void)
{
    static const uint32_t types[] = {TYPE_ERROR, TYPE_ERROR_OFFSET, 0x8003, 0xFFFF};
    row it = plain_row;
    size_t i;

    for (it.protocol = 1; it.protocol < 3; it.protocol++) {
        for (i = 0; i < COUNT(types); i++) {
            it.type = types[i];
            face_message(&it);
        }
    }
}

static int offset_is_legal(const row *it)
{
    return it->bits >= OFFSET && it->bits < OFFSET + DISK_SIZE;
}

static void error_offset(script *s, const void *of)
{
    const row *it = of;
    int r;

    open_all(s, it->protocol);
    r = ask(s, it->command);
    send_error_at(s, r, DONE, NBD_EIO, "no", it->bits);
    see_message(s, r, 0, NBD_EIO, "no");
    if (offset_is_legal(it)) {
        see_done_at(s, r, NBD_EIO, NBD_EIO, it->bits);
        session_lives(s);
    } else {
        die_by(s, r, "error offset outside the request");
    }
}

static void offset_of_an_error_lies_in_its_request_or_ends_it(void)
{
    row it = plain_row;
    size_t i;

    for (it.protocol = 1; it.protocol < 3; it.protocol++) {
        for (it.command = NBD_READ; it.command <= NBD_BLOCK_STATUS; it.command++) {
            for (i = 0; i < 3 * AROUND; i++) {
                if (it.command == NBD_FLUSH) continue; // has no offset
                it.bits = i < AROUND       ? length_around(OFFSET, i)
                          : i < 2 * AROUND ? length_around(OFFSET + DISK_SIZE, i - AROUND)
                                           : UINT64_MAX - (i - 2 * AROUND);
                face(error_offset, &it, offset_is_legal(&it) ? LAWFUL : BROKEN);
            }
        }
    }
}

static void message_of_any_bytes(script *s, const void *of)
{
    static char every_byte[256];
    const row *it = of;
    nbd_event *seen;
    step *sent;
    size_t i;
    int r;

    for (i = 0; i < sizeof every_byte; i++)
        every_byte[i] = (char)i;
    open_all(s, it->protocol);
    r = ask(s, NBD_READ);
    sent = send_header_of(s, r, it->protocol, DONE, it->type, 6 + 256);
    put(s, NBD_EPERM, 4);
    put(s, 256, 2);
    put_bytes(s, every_byte, 256);
    script_close(s, sent);
    see_message(s, r, 0, NBD_EPERM, every_byte);
    seen = &s->steps[s->step_count - 1].event;
    seen->text_length = 256;
    see_done(s, r, NBD_EPERM);
    session_lives(s);
}

static void message_of_any_bytes_comes_as_it_was_sent(void)
{
    row it = plain_row;

    for (it.protocol = 1; it.protocol < 3; it.protocol++) {
        it.type = TYPE_ERROR;
        face(message_of_any_bytes, &it, UNJUDGED);
        it.type = 0x8099;
        face(message_of_any_bytes, &it, UNJUDGED);
    }
}

// "Simple reply message": payload only behind success.
static void payload_behind_an_error(script *s, const void *of)
{
    const row *it = of;
    int a, b;

    open_all(s, NBD_PROTOCOL_SIMPLE);
    a = ask(s, NBD_READ);
    b = client_issues(s, NBD_READ, it->flags, 8192, 100);
    want_request(s, b);
    send_simple(s, a, it->error);
    if (it->second) send_bytes(s, script_text(s, DISK_SIZE), DISK_SIZE);
    see_done_at(s, a, known_error(it->error), it->error, OFFSET);
    if (it->second) {
        die_by(s, b, bad_magic);
        return;
    }
    send_simple(s, b, 0);
    see_done(s, b, 0);
    session_lives(s);
}

static void no_payload_is_read_behind_any_simple_error(void)
{
    static const uint32_t errors[] = {1, 5, 12, 22, 28, 75, 95, 2, 9999, 0x80000000, 0xFFFFFFFF};
    static const uint32_t modes[] = {0, NBD_NO_INIT, NBD_SPARSE};
    row it = plain_row;
    size_t i;

    for (i = 0; i < COUNT(errors) * COUNT(modes) * 2; i++) {
        it.error = errors[i / 2 % COUNT(errors)];
        it.flags = modes[i / 2 / COUNT(errors)];
        it.second = i % 2 == 1;
        face(payload_behind_an_error, &it, it.second ? BROKEN : UNJUDGED);
    }
}

/// Shutdown ///

static void one_of_four_shuts_down(script *s, const void *of)
{
    const row *it = of;
    int r[4], i;

    open_all(s, it->protocol);
    for (i = 0; i < 4; i++)
        r[i] = ask(s, NBD_READ);
    for (i = 0; i < 4; i++) {
        if (i != (int)it->bits) {
            send_success(s, r[i]);
        } else if (it->protocol == NBD_PROTOCOL_SIMPLE) {
            send_simple(s, r[i], NBD_ESHUTDOWN);
        } else {
            send_error(s, r[i], DONE, NBD_ESHUTDOWN, "");
        }
        see_done(s, r[i], i == (int)it->bits ? NBD_ESHUTDOWN : 0);
    }
    want_disconnect(s);
    send_end(s);
    see_closed_by(s, NBD_ESHUTDOWN, "server is shutting down");
}

static void shutdown_collects_what_is_in_flight_at_any_place(void)
{
    row it = plain_row;

    for (it.protocol = 0; it.protocol < 3; it.protocol++) {
        for (it.bits = 0; it.bits < 4; it.bits++)
            face(one_of_four_shuts_down, &it, LAWFUL);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RULE(reply_of_a_kind_that_was_not_agreed_on_ends_it);
    RULE(reply_with_any_bit_of_its_magic_wrong_ends_it);
    RULE(option_reply_during_transmission_ends_it);
    RULE(cookie_with_any_bit_wrong_ends_it);
    RULE(second_reply_ends_it_in_a_new_slot_or_a_used_one);
    RULE(echo_with_any_bit_wrong_ends_it);
    RULE(chunk_of_a_type_that_a_command_has_not_ends_it);
    RULE(chunk_of_an_impossible_length_ends_it);
    RULE(none_without_done_ends_it_whatever_else_is_set);
    RULE(any_unknown_flag_of_a_chunk_is_ignored);
    RULE(error_of_any_value_is_told_and_0_ends_it);
    RULE(message_of_an_error_fits_its_chunk_or_ends_it);
    RULE(offset_of_an_error_lies_in_its_request_or_ends_it);
    RULE(message_of_any_bytes_comes_as_it_was_sent);
    RULE(no_payload_is_read_behind_any_simple_error);
    RULE(shutdown_collects_what_is_in_flight_at_any_place);
    return check_end();
}
