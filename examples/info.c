// info.c - what an NBD server says about itself and its exports, in the shapes of nbdinfo(1).
//
//     gcc -std=c99 -I. examples/info.c -o info
//
// It shows how to drive the options yourself (NBD_NEGOTIATE) in a loop of your own.
#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include <ctype.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#define NAME_MAX_BYTES 4096
#define KEPT_MAX 0x100000

// Strings, each with its NUL, one behind the other.  A NUL inside, which no legal
// string of the protocol has, ends it early.
typedef struct strings {
    size_t used;
    char bytes[KEPT_MAX];
} strings;

typedef struct inquiry {
    int json, list, size_only;
    const char *text; // the URI as given
    nbd_uri uri;
    char uri_memory[16384];

    nbd_client client;
    nbd_slot slots[1];
    unsigned char buffer[NBD_BUFFER_NAMES];
    nbd_sync sync;  // dials and closes
    int ready;      // the session has left the options behind
    int structured; // structured replies are agreed on

    strings exports;  // of LIST: name, description, name, description ...
    strings contexts; // of the export in question
    int has_contexts; // the server answered the question for them
    int shown;        // exports printed so far
    char name[NAME_MAX_BYTES + 1];
    char description[NAME_MAX_BYTES + 1];
    char message[1024]; // why the server refused, made printable
    const char *why;    // what there is to say besides nbd_strerror
} inquiry;

/// Text of the server, made harmless ///

// The length of the character that starts here, 0 if this is not UTF-8.  Stops at
// a NUL, since that continues nothing.
static unsigned decode(const char *text, uint32_t *code)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t first = (unsigned char)text[0];
    unsigned length = first < 0x80 ? 1 : first < 0xc0 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    unsigned i;
    if (first >= 0xf8) length = 0;
    *code = length < 2 ? first : first & (0x7fu >> length);
    for (i = 1; i < length; i++) {
        uint32_t next = (unsigned char)text[i];
        if ((next & 0xc0) != 0x80) return 0;
        *code = *code << 6 | (next & 0x3f);
    }
    if (length && *code < least[length]) return 0;
    if (*code > 0x10ffff || (*code >= 0xd800 && *code <= 0xdfff)) return 0;
    return length;
}

// Characters that move the cursor, change the terminal, or hide and reorder what
// stands beside them.
static int is_control(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x200b && code <= 0x200f) ||
           (code >= 0x2028 && code <= 0x202e) || (code >= 0x2060 && code <= 0x206f) ||
           code == 0xfeff;
}

// Escapes are those of JSON, so one function serves the terminal as well.
static void put_text(FILE *file, const char *text, int quoted)
{
    unsigned length;
    uint32_t code;
    if (quoted) fputc('"', file);
    for (; *text; text += length) {
        length = decode(text, &code);
        if (length == 0) code = 0xfffd;
        if (length == 0 || is_control(code)) {
            fprintf(file, "\\u%04x", (unsigned)code);
        } else {
            if (quoted && (*text == '"' || *text == '\\')) fputc('\\', file);
            fwrite(text, 1, length, file);
        }
        if (length == 0) length = 1;
    }
    if (quoted) fputc('"', file);
}

// Percent-escapes all but letters, digits and what is in `plain`.
static void put_escaped(const char *text, const char *plain)
{
    for (; *text; text++) {
        unsigned byte = (unsigned char)*text;
        if (isalnum((int)byte) || strchr("-_.~", *text) || strchr(plain, *text))
            putchar(*text);
        else
            printf("%%%02X", byte);
    }
}

static int keep(strings *kept, const char *text)
{
    size_t size = strlen(text) + 1;
    if (size > sizeof kept->bytes - kept->used) return NBD_ERR_ABANDONED;
    memcpy(kept->bytes + kept->used, text, size);
    kept->used += size;
    return 0;
}

/// Session ///

static void copy_text(char *to, const nbd_event *event)
{
    size_t size = event->text_size < NAME_MAX_BYTES ? event->text_size : NAME_MAX_BYTES;
    memcpy(to, event->text, size);
    to[size] = 0;
}

// A list has no end that the protocol would set, so the room for it is one.
static int note_listed(inquiry *q, const nbd_event *event)
{
    char text[NAME_MAX_BYTES + 1];
    int error;
    copy_text(text, event);
    if (event->text_kind == NBD_TEXT_DESCRIPTION) q->exports.used--; // the "" in its place
    error = keep(event->text_kind == NBD_TEXT_CONTEXT ? &q->contexts : &q->exports, text);
    if (!error && event->text_kind == NBD_TEXT_EXPORT) error = keep(&q->exports, "");
    if (error) q->why = "the server lists more than this program keeps";
    return error;
}

static int note(inquiry *q, const nbd_event *event)
{
    if (event->text_kind == NBD_TEXT_MESSAGE)
        nbd_escape(q->message, sizeof q->message, event->text, event->text_size);
    else if (event->text_kind == NBD_TEXT_CONTEXT || event->option == NBD_OPTION_LIST)
        return note_listed(q, event);
    else
        copy_text(event->text_kind == NBD_TEXT_NAME ? q->name : q->description, event);
    return 0;
}

// Waits until the socket is ready.  A signal ends the wait early, which costs a try.
static void wait_for(nbd_socket socket, unsigned wants)
{
    int events = (wants & NBD_WANT_READ ? POLLIN : 0) | (wants & NBD_WANT_WRITE ? POLLOUT : 0);
    struct pollfd one = {socket, (short)events, 0};
    if (!(wants & NBD_WANT_NOW)) (void)poll(&one, 1, -1);
}

// Moves bytes until something is over: the greeting, an option, the session.
static int run(inquiry *q)
{
    nbd_event event;
    int error = 0;
    for (;;) {
        unsigned wants;
        while (!error && nbd_next(&q->client, &event)) {
            switch (event.type) {
            case NBD_EVENT_TEXT: error = note(q, &event); break;
            case NBD_EVENT_OPTION: return event.error;
            case NBD_EVENT_READY: q->ready = 1; return 0;
            case NBD_EVENT_CLOSED:
                q->why = event.detail;
                return event.error ? event.error : NBD_ERR_CLOSED;
            }
        }
        if (error) return error;
        wants = nbd_wants(&q->client);
        if (!wants) return NBD_ERR_STATE;
        wait_for(q->sync.io.socket, wants);
        error = nbd_poll(&q->client, wants & (NBD_WANT_READ | NBD_WANT_WRITE));
    }
}

static int ask(inquiry *q, uint32_t number, const char *name)
{
    nbd_option option = {.option = number, .name = name};
    int error = nbd_negotiate(&q->client, &option);
    q->message[0] = 0;
    return error ? error : run(q);
}

static int is_refusal(int error)
{
    return error <= NBD_REP_ERR_UNSUP && error >= NBD_REP_ERR_OTHER;
}

static int is_unsupported(int error)
{
    return error == NBD_REP_ERR_UNSUP || error == NBD_ERR_UNSUPPORTED;
}

// Connects.  An oldstyle server is READY at once.
static int open_session(inquiry *q)
{
    nbd_config config = NBD_ZERO;
    int error;
    config.flags = NBD_NEGOTIATE;
    config.slots = q->slots;
    config.slot_count = 1;
    config.buffer = q->buffer;
    config.buffer_size = sizeof q->buffer;
    q->ready = q->structured = 0;
    q->message[0] = 0;
    error = nbd_init(&q->client, &config);
    if (!error) error = nbd_sync_dial(&q->sync, &q->uri.address);
    if (error == NBD_ERR_CONNECT) q->why = strerror(q->sync.os_error);
    if (!error) error = nbd_connect(&q->client, &q->sync.io.transport);
    if (!error) error = run(q);
    if (error || q->ready) return error;
    error = ask(q, NBD_OPTION_STRUCTURED_REPLY, NULL);
    q->structured = !error;
    return is_unsupported(error) || is_refusal(error) ? 0 : error;
}

// Says goodbye, but does not wait for an answer: some servers give none.
static void close_session(inquiry *q)
{
    if (!nbd_disconnect(&q->client)) (void)nbd_poll(&q->client, NBD_WANT_WRITE);
    (void)nbd_sync_close(&q->sync); // only closes what was dialled
}

static int ask_contexts(inquiry *q, const char *name)
{
    int error;
    q->contexts.used = 0;
    q->has_contexts = 0;
    if (!q->structured) return 0;
    error = ask(q, NBD_OPTION_LIST_META_CONTEXT, name);
    q->has_contexts = !error;
    return is_refusal(error) ? 0 : error;
}

static int enter_export(inquiry *q, const char *name)
{
    int error = q->ready ? 0 : ask(q, NBD_OPTION_GO, name);
    return is_unsupported(error) ? ask(q, NBD_OPTION_EXPORT_NAME, name) : error;
}

// Asks about one of many exports.  INFO leaves the session usable for the next one,
// and a server may serve one session only.  But not all servers know INFO, and
// nbd-server answers it with size 0.
static int ask_listed(inquiry *q, const char *name)
{
    int error = 0;
    if (q->ready) {
        close_session(q);
        error = open_session(q);
    }
    if (!error) error = ask_contexts(q, name);
    if (!error) error = ask(q, NBD_OPTION_INFO, name);
    if (is_unsupported(error) || (!error && nbd_negotiated(&q->client)->size == 0))
        error = enter_export(q, name);
    return error;
}

/// Output ///

static void show_uri(const inquiry *q, const char *name)
{
    const nbd_address *at = &q->uri.address;
    int is_tcp = at->kind == NBD_ADDRESS_TCP, is_vsock = at->kind == NBD_ADDRESS_VSOCK;
    printf("nbd%s://", is_tcp ? "" : is_vsock ? "+vsock" : "+unix");
    if (q->uri.user) {
        put_escaped(q->uri.user, "");
        putchar('@');
    }
    if (is_tcp) {
        int is_ipv6 = strchr(at->host, ':') != NULL;
        if (is_ipv6) putchar('[');
        put_escaped(at->host, ":");
        printf("%s:%s", is_ipv6 ? "]" : "", at->port ? at->port : "10809");
    }
    if (is_vsock) printf("%" PRIu32 ":%" PRIu32, at->cid, at->vport ? at->vport : 10809);
    putchar('/');
    put_escaped(name, "/;@&=+$,:!*'()");
    if (is_tcp || is_vsock) return;
    printf("?socket=%s", at->kind == NBD_ADDRESS_ABSTRACT ? "%00" : "");
    put_escaped(at->path, "/");
}

static void show_key(const inquiry *q, const char *key)
{
    printf(q->json ? "\t\"%s\": " : "\t%s: ", key);
}

static void show_contexts(const inquiry *q)
{
    const char *at = q->contexts.bytes, *end = at + q->contexts.used;
    if (!q->has_contexts) return;
    puts(q->json ? "\t\"contexts\": [" : "\tcontexts:");
    while (at < end) {
        const char *next = at + strlen(at) + 1;
        printf("\t\t");
        put_text(stdout, at, q->json);
        puts(q->json && next < end ? "," : "");
        at = next;
    }
    if (q->json) puts("\t],");
}

// 1048576 is "1M", but 1048577 stays as it is: nothing is rounded.
static void show_size(const inquiry *q, uint64_t size)
{
    uint64_t count = size;
    const char *unit = "\0KMGTPE";
    char human[32];
    for (; count && count % 1024 == 0; unit++)
        count /= 1024;
    snprintf(human, sizeof human, "%" PRIu64 "%.1s", count, unit);
    show_key(q, "export-size");
    printf("%" PRIu64, size);
    if (q->json)
        printf(",\n\t\"export-size-str\": \"%s\"", human);
    else if (count != size)
        printf(" (%s)", human);
    putchar('\n');
}

// FAST_ZERO means nothing without WRITE_ZEROES, nor DF without structured replies.
static void show_flags(const inquiry *q, unsigned flags)
{
    static const struct {
        unsigned flag;
        const char *key;
    } table[] = {{NBD_OFFERS_ROTATIONAL, "is_rotational"},
                 {NBD_OFFERS_READ_ONLY, "is_read_only"},
                 {NBD_OFFERS_CACHE, "can_cache"},
                 {NBD_OFFERS_DF, "can_df"},
                 {NBD_OFFERS_FAST_ZERO, "can_fast_zero"},
                 {NBD_OFFERS_FLUSH, "can_flush"},
                 {NBD_OFFERS_FUA, "can_fua"},
                 {NBD_OFFERS_MULTI_CONN, "can_multi_conn"},
                 {NBD_OFFERS_TRIM, "can_trim"},
                 {NBD_OFFERS_WRITE_ZEROES, "can_zero"}};
    if (!q->structured) flags &= ~NBD_OFFERS_DF;
    if (!(flags & NBD_OFFERS_WRITE_ZEROES)) flags &= ~NBD_OFFERS_FAST_ZERO;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const char *value = flags & table[i].flag ? "true" : "false";
        printf(q->json ? "\t\"%s\": %s,\n" : "\t%s: %s\n", table[i].key, value);
    }
}

static void show_block_size(const inquiry *q, const char *key, uint32_t size)
{
    printf(q->json ? "\t\"%s\": %" PRIu32 ",\n" : "\t%s: %" PRIu32 "\n", key, size);
}

// `name` is what was asked for; the server may know the export by another.
static void show_export(inquiry *q, const char *name, const char *description)
{
    const nbd_export *got = nbd_negotiated(&q->client);
    if (q->json)
        printf("%s\n\t{\n\t\"export-name\": ", q->shown ? "," : "");
    else
        printf("export=");
    put_text(stdout, *q->name ? q->name : name, 1);
    puts(q->json ? "," : ":");
    if (*description) {
        show_key(q, "description");
        put_text(stdout, description, q->json);
        puts(q->json ? "," : "");
    }
    if (!q->json) show_size(q, got->size);
    show_key(q, "uri");
    printf("%s", q->json ? "\"" : "");
    show_uri(q, name);
    puts(q->json ? "\"," : "");
    show_contexts(q);
    show_flags(q, got->flags);
    if (got->block_sizes) {
        show_block_size(q, "block_size_minimum", got->minimum_block);
        show_block_size(q, "block_size_preferred", got->preferred_block);
        show_block_size(q, "block_size_maximum", got->maximum_payload);
    }
    if (q->json) {
        show_size(q, got->size);
        printf("\t}");
    }
    q->shown++;
}

static void show_head(const inquiry *q)
{
    static const char *const styles[] = {"unknown", "oldstyle", "newstyle", "newstyle-fixed"};
    const nbd_export *got = nbd_negotiated(&q->client);
    if (q->json)
        printf("{\n\"protocol\": \"%s\",\n\"TLS\": %s,\n\"structured\": %s,\n\"exports\": [",
               styles[got->style], got->tls ? "true" : "false", q->structured ? "true" : "false");
    else
        printf("protocol: %s %s TLS, using %s packets\n", styles[got->style],
               got->tls ? "with" : "without", q->structured ? "structured" : "simple");
}

static void show_foot(const inquiry *q)
{
    if (q->json) puts(q->shown ? " ]\n}" : "]\n}");
}

static int fail(inquiry *q, const char *name, int error)
{
    fprintf(stderr, "info: %s: ", q->text);
    if (*name) {
        fprintf(stderr, "export ");
        put_text(stderr, name, 1);
        fprintf(stderr, ": ");
    }
    fprintf(stderr, "%s", nbd_strerror(error));
    if (*q->why) fprintf(stderr, ": %s", q->why);
    if (*q->message) fprintf(stderr, " (server: \"%s\")", q->message);
    fprintf(stderr, "\n");
    return 1;
}

/// The three questions ///

static int show_one(inquiry *q)
{
    const char *name = q->uri.export_name;
    int error = open_session(q);
    if (!error && !q->size_only) error = ask_contexts(q, name);
    if (!error) error = enter_export(q, name);
    if (q->size_only) {
        if (!error) printf("%" PRIu64 "\n", nbd_negotiated(&q->client)->size);
    } else if (!error || is_refusal(error)) {
        show_head(q);
        if (!error) show_export(q, name, q->description);
        show_foot(q);
    }
    return error ? fail(q, name, error) : 0;
}

static int show_all(inquiry *q)
{
    int failed = 0, error = open_session(q);
    size_t at = 0;
    if (!error && q->ready) error = NBD_ERR_OLDSTYLE;
    if (!error) error = ask(q, NBD_OPTION_LIST, NULL);
    if (error) return fail(q, "", error);
    show_head(q);
    while (at < q->exports.used && (!error || is_refusal(error))) {
        const char *name = q->exports.bytes + at, *description = name + strlen(name) + 1;
        at += strlen(name) + 1 + strlen(description) + 1;
        q->name[0] = q->description[0] = 0;
        error = ask_listed(q, name);
        if (!error)
            show_export(q, name, *description ? description : q->description);
        else
            failed = fail(q, name, error);
    }
    show_foot(q);
    return failed;
}

static int usage(FILE *file)
{
    fputs("Show what an NBD server says about itself and its exports:\n\n"
          "    info [--json] URI\n"
          "    info --size URI\n"
          "    info -L|--list [--json] URI\n"
          "    info --help\n"
          "    info -V|--version\n\n"
          "The output is that of nbdinfo(1) with --no-content: what is on the disk is not\n"
          "looked at.  TLS, --map, --can, --is and starting a server are not supported.\n",
          file);
    return file == stderr;
}

static int inquire(inquiry *q)
{
    int error = nbd_uri_parse(&q->uri, q->text, q->uri_memory, sizeof q->uri_memory);
    q->why = q->uri.detail;
    if (error) return fail(q, "", error);
    if (q->uri.unknown) fprintf(stderr, "info: %s: unknown parameter ignored\n", q->text);
    if (q->uri.config_flags & NBD_TLS_REQUIRE) {
        fprintf(stderr, "info: %s: this program has no TLS\n", q->text);
        return 1;
    }
    error = q->list ? show_all(q) : show_one(q);
    close_session(q);
    if (fflush(stdout) || ferror(stdout)) {
        perror("info: standard output");
        return 1;
    }
    return error;
}

int main(int argc, char **argv)
{
    static inquiry q;
    static int ignored;
    const struct {
        const char *word;
        int *set;
    } options[] = {{"--json", &q.json}, {"--size", &q.size_only},   {"-L", &q.list},
                   {"--list", &q.list}, {"--no-content", &ignored}, {"--no-color", &ignored}};
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        size_t n = 0, count = sizeof options / sizeof options[0];
        if (!strcmp(word, "--help")) return usage(stdout);
        if (!strcmp(word, "-V") || !strcmp(word, "--version"))
            return printf("info %d.%d.%d\n", NBD_VERSION_MAJOR, NBD_VERSION_MINOR,
                          NBD_VERSION_PATCH) < 0;
        while (n < count && strcmp(word, options[n].word))
            n++;
        if (n < count)
            *options[n].set = 1;
        else if (*word == '-' || q.text)
            return usage(stderr);
        else
            q.text = word;
    }
    if (!q.text || (q.list && q.size_only)) return usage(stderr);
    return inquire(&q);
}
