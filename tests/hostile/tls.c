// A server, or somebody on the way, that tampers with the start of TLS.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "hostile.h"

typedef struct row {
    uint32_t number; // of the refusal, or of the option that is answered
    uint32_t type;   // of the reply
    uint32_t length;
    int required;
    const char *text;
} row;

static void ask_tls(script *s, const row *it)
{
    s->config.flags |= it->required ? NBD_TLS_REQUIRE : NBD_TLS_ALLOW;
    s->config.export_name = "secret";
    greet_fixed(s);
    want_option(s, 5, "", 0);
}

/// Bytes in clear ///

// What a man in the middle would like the client to believe.
static const unsigned char injected[] =
    "\0\3\350\211\4\125\145\251\0\0\0\10\0\0\0\1\0\0\0\0"
    "\0\3\350\211\4\125\145\251\0\0\0\7\0\0\0\3\0\0\0\14\0\0\0\0\0\0\0\20\0\0\0\1"
    "\0\3\350\211\4\125\145\251\0\0\0\7\0\0\0\1\0\0\0\0";

static void inject(script *s, const void *of)
{
    const row *it = of;
    size_t i;

    ask_tls(s, it);
    send_ack(s, 5);
    for (i = 0; i < it->length; i++)
        send_behind(s, it->type ? it->type : injected[i], 1);
    see_closed_by(s, NBD_ERR_INJECTED, "bytes behind STARTTLS");
}

// In one segment with the acknowledgement.  What comes later is left to TLS, which will
// not take it: see test_tls_seam.
static void bytes_in_clear_behind_the_start_of_tls_end_it(void)
{
    static trace whole;
    row it = {0, 0, 0, 0, NULL};
    size_t i;

    for (it.length = 1; it.length < sizeof injected; it.length++) {
        for (it.required = 0; it.required < 2; it.required++) {
            for (it.type = 0; it.type < 256; it.type += 85) {
                const script *s = variant_script(inject, &it);

                play_variant++;
                play_whole(s, &whole);
                for (i = 0; i < 2; i++)
                    play_uncut(s, &play_modes[i], &whole);
                play_uncut(s, &play_modes[8], &whole); // the engine's own calls
            }
        }
    }
}

/// Refusals ///

static void refuse_tls(script *s, const void *of)
{
    const row *it = of;
    uint32_t type = UINT32_C(0x80000000) + it->number;

    ask_tls(s, it);
    send_reply(s, 5, type, it->text, strlen(it->text));
    if (it->text[0]) {
        nbd_event *seen = see_text(s, SESSION, 5, NBD_TEXT_MESSAGE, it->text);

        seen->server_error = type;
        seen->error = it->number <= 10 ? -100 - (int)it->number : NBD_REP_ERR_OTHER;
    }
    if (it->required && it->number == 7) {
        see_closed_by(s, NBD_REP_ERR_SHUTDOWN, "server is shutting down");
    } else if (it->required) {
        see_closed_by(s, NBD_ERR_TLS, "server refused STARTTLS");
    } else if (it->number == 7) {
        want_abort(s);
        send_end(s);
        see_closed_by(s, NBD_REP_ERR_SHUTDOWN, "server is shutting down");
    } else {
        agree_on(s, NBD_PROTOCOL_STRUCTURED);
        go(s, EXPORT_SIZE, EXPORT_FLAGS);
        session_lives(s);
    }
}

static void any_refusal_of_tls_ends_it_if_required(void)
{
    static const uint32_t numbers[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0x7FFFFFFF};
    row it = {0, 0, 0, 0, NULL};
    size_t i;

    for (i = 0; i < COUNT(numbers) * 4; i++) {
        it.number = numbers[i / 4];
        it.required = i % 2 == 1;
        it.text = i / 2 % 2 ? "no TLS here" : "";
        face(refuse_tls, &it, UNJUDGED);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->tls, 0);
    }
}

static void answer_tls_wrongly(script *s, const void *of)
{
    const row *it = of;

    ask_tls(s, it);
    script_close(s, send_reply_open(s, it->number, it->type, it->length));
    see_closed_by(s, NBD_ERR_PROTOCOL,
                  it->number != 5 ? "reply to another option"
                                  : "option reply of wrong type or length");
}

static void nothing_but_an_empty_acknowledgement_starts_tls(void)
{
    static const uint32_t types[] = {0, 1, 2, 3, 4, 5, 0x7FFFFFFF};
    static const uint32_t others[] = {0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 0x05000000, 0xFFFFFFFF};
    row it = {5, 0, 0, 0, NULL};
    size_t i, k;

    for (it.required = 0; it.required < 2; it.required++) {
        it.number = 5;
        for (i = 0; i < COUNT(types); i++) {
            for (k = 0; k < AROUND; k++) {
                it.type = types[i];
                it.length = (uint32_t)length_around(12, k);
                if (it.type != 1 || it.length != 0) face(answer_tls_wrongly, &it, BROKEN);
            }
        }
        for (i = 0; i < COUNT(others); i++) {
            it.number = others[i];
            it.type = 1;
            it.length = 0;
            face(answer_tls_wrongly, &it, BROKEN);
        }
    }
}

/// Style ///

static void greet_without_tls(script *s, const void *of)
{
    const row *it = of;

    s->config.flags |= NBD_TLS_REQUIRE;
    if (it->type) {
        send_oldstyle(s, EXPORT_SIZE, it->number);
        see_closed_by(s, NBD_ERR_TLS, "oldstyle server");
    } else {
        send_greeting(s, it->number);
        see_closed_by(s, NBD_ERR_TLS, "not fixed newstyle");
    }
}

static void server_that_cannot_start_tls_is_told_nothing_if_required(void)
{
    static const uint32_t plain[] = {0, 2, 4, 0xFFFE, 0x0100};
    static const uint32_t old[] = {0, 1, 3, 0xFFFF, 0xFFFFFFFF};
    row it = {0, 0, 0, 1, NULL};
    size_t i;

    for (i = 0; i < 2 * COUNT(plain); i++) {
        it.type = i % 2;
        it.number = it.type ? old[i / 2] : plain[i / 2];
        face(greet_without_tls, &it, UNJUDGED);
        CHECK_EQUAL(nbd_count(&stage.client)->bytes_sent, 0);
    }
}

/// Inside TLS ///

// As a server does that did not like the client's certificate.
static void end_inside(script *s, const void *of)
{
    const row *it = of;
    nbd_event *closed;

    ask_tls(s, it);
    send_ack(s, 5);
    see_starttls(s);
    client_calls(s, play_seal);
    server_seals(s);
    want_option(s, 11, "", 0);
    send_end(s);
    closed = see_event(s, SESSION, NBD_EVENT_CLOSED);
    closed->error = NBD_ERR_CLOSED;
    closed->option = 11;
    closed->detail = "instead of answering an option";
}

static void end_right_behind_the_start_of_tls_names_the_option(void)
{
    row it = {0, 0, 0, 0, NULL};

    for (it.required = 0; it.required < 2; it.required++) {
        face(end_inside, &it, UNJUDGED);
        CHECK_EQUAL(nbd_negotiated(&stage.client)->tls, 1);
    }
}

// Behind DISC any end is clean, with close_notify or without; before it none is.
static void session_inside(script *s, const void *of)
{
    const row *it = of;

    ask_tls(s, it);
    send_ack(s, 5);
    see_starttls(s);
    client_calls(s, play_seal);
    server_seals(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    go(s, EXPORT_SIZE, EXPORT_FLAGS);
    option_is_refused_here(s, 5, NBD_ERR_STATE);
    session_lives(s);
}

static void only_an_end_behind_goodbye_is_clean_in_tls(void)
{
    row it = {0, 0, 0, 0, NULL};

    for (it.required = 0; it.required < 2; it.required++)
        face(session_inside, &it, LAWFUL);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    RULE(bytes_in_clear_behind_the_start_of_tls_end_it);
    RULE(any_refusal_of_tls_ends_it_if_required);
    RULE(nothing_but_an_empty_acknowledgement_starts_tls);
    RULE(server_that_cannot_start_tls_is_told_nothing_if_required);
    RULE(end_right_behind_the_start_of_tls_names_the_option);
    RULE(only_an_end_behind_goodbye_is_clean_in_tls);
    return check_end();
}
