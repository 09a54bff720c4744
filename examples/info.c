// info.c - what an NBD server says about itself and its exports, in the shapes of nbdinfo(1).
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/info.c -o build/info
//     build/info nbd://localhost/export
//
// With TLS: -DNBD_MBEDTLS in front of -o, -lmbedtls -lmbedx509 -lmbedcrypto behind it.
//
// It shows how to drive the options yourself (NBD_NEGOTIATE) in a loop of your own, and
// how to walk through the extents of a metadata context.
#define _POSIX_C_SOURCE 200809L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "tls_uri.h"
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define NAME_MAX_BYTES 4096
#define KEPT_MAX 0x100000
#define CONTEXTS_MAX 16
#define TOTALS_MAX 1024
#define BLOCK_MAX 65536 // the largest minimum block of the protocol
#define PROBED 8192     // bytes that file(1) gets to see

// Strings, each with its NUL, one behind the other.  A NUL inside, which no legal
// string of the protocol has, ends it early.
typedef struct strings {
    size_t used;
    char bytes[KEPT_MAX];
} strings;

// Neighbours of one status, joined; or, in the totals, all that have that status.
typedef struct area {
    uint64_t start, size, status;
} area;

typedef struct inquiry {
    int json, list, size_only, totals, colour;
    int probe;        // look at the content
    const char *map;  // NULL, or the metadata context to walk through
    const char *can;  // NULL, or the capability in question
    char **command;   // of a server to be started, or NULL
    const char *text; // the URI as given, or the command's name
    nbd_uri uri;
    char uri_memory[16384];

    nbd_client client;
    nbd_slot slots[1];
    nbd_context context_memory[CONTEXTS_MAX];
    unsigned char buffer[NBD_BUFFER_NAMES];
    nbd_sync sync; // dials and closes
    tls_trust trust;
    tls_session tls;
    int ready; // the session has left the options behind

    strings exports;  // of LIST: name, description, name, description ...
    strings contexts; // of the export in question
    int has_contexts; // the server answered the question for them
    int shown;        // exports, areas or totals printed so far

    int has_map;        // the server agreed to the context `map`
    uint32_t map_index; // and this is its index
    area last;          // of the map, not printed yet since it may still grow
    area all[TOTALS_MAX];
    unsigned all_count;

    char name[NAME_MAX_BYTES + 1];
    char description[NAME_MAX_BYTES + 1];
    unsigned char head[BLOCK_MAX]; // of the disk
    char content[1024];            // what file(1) calls it, "" if nothing is known
    char message[1024];            // why the server refused, made printable
    const char *why;               // what there is to say besides nbd_strerror
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

/// Map ///

#define RESET "\033[0m"

static void paint(const inquiry *q, const char *colour)
{
    if (q->colour && !q->json) printf("%s", colour);
}

// What a status says in a context.
typedef struct meaning {
    const char *context; // or, with a colon at its end, how its name starts
    uint64_t status;     // ANY: whatever stands in no row above, and is printed
    const char *words;
    const char *colour;
} meaning;
#define ANY UINT64_MAX

static int is_meant(const meaning *m, const char *context, uint64_t status)
{
    size_t length = strlen(m->context);
    int is_start = m->context[length - 1] == ':';
    if (is_start ? strncmp(context, m->context, length) : strcmp(context, m->context)) return 0;
    return m->status == status || m->status == ANY;
}

static const meaning *find_meaning(const char *context, uint64_t status)
{
    static const meaning none = {"", 0, "", ""};
    static const meaning table[] = {
        {"base:allocation", 0, "data", "\033[1;30m"},
        {"base:allocation", NBD_STATE_HOLE, "hole", ""},
        {"base:allocation", NBD_STATE_ZERO, "zero", ""},
        {"base:allocation", NBD_STATE_HOLE | NBD_STATE_ZERO, "hole,zero", ""},
        {"qemu:dirty-bitmap:", 0, "clean", "\033[22;32m"},
        {"qemu:dirty-bitmap:", 1, "dirty", "\033[22;31m"},
        {"qemu:allocation-depth", 0, "absent", ""},
        {"qemu:allocation-depth", 1, "local", "\033[1;37m\033[40m"},
        {"qemu:allocation-depth", ANY, "backing depth", "\033[47m"}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (is_meant(&table[i], context, status)) return &table[i];
    return &none;
}

static void begin_line(inquiry *q, const meaning *m)
{
    if (q->json) printf("%s{ ", q->shown ? ",\n" : "[\n");
    paint(q, m->colour);
    q->shown++;
}

static void end_line(const inquiry *q, const meaning *m, uint64_t status)
{
    const char *gap = q->totals ? " " : "  ";
    char words[64];
    int length = snprintf(words, sizeof words, "%s", m->words);
    if (m->status == ANY)
        snprintf(words + length, sizeof words - (size_t)length, " %" PRIu64, status);
    if (q->json) {
        printf(", \"type\": %" PRIu64, status);
        if (*words) printf(", \"description\": \"%s\"", words);
        printf(q->totals ? " }" : "}");
        return;
    }
    printf("%s%3" PRIu64 "%s%s", gap, status, *words ? gap : "", words);
    if (*m->colour) paint(q, RESET);
    putchar('\n');
}

static void show_area(inquiry *q, const area *a)
{
    const meaning *m = find_meaning(q->map, a->status);
    begin_line(q, m);
    printf(q->json ? "\"offset\": %" PRIu64 ", \"length\": %" PRIu64 : "%10" PRIu64 "  %10" PRIu64,
           a->start, a->size);
    end_line(q, m, a->status);
}

static void show_total(inquiry *q, const area *a)
{
    const meaning *m = find_meaning(q->map, a->status);
    double percent = 100.0 * (double)a->size / (double)nbd_negotiated(&q->client)->size;
    begin_line(q, m);
    printf(q->json ? "\"size\": %" PRIu64 ", \"percent\": %g" : "%10" PRIu64 " %5.1f%%", a->size,
           percent);
    end_line(q, m, a->status);
}

// Keeps them in the order of the status.
static int add_to_totals(inquiry *q, const area *a)
{
    unsigned i = 0;
    while (i < q->all_count && q->all[i].status < a->status)
        i++;
    if (i == q->all_count || q->all[i].status != a->status) {
        if (q->all_count == TOTALS_MAX) {
            q->why = "the map has more types than this program keeps";
            return NBD_ERR_ABANDONED;
        }
        memmove(&q->all[i + 1], &q->all[i], (q->all_count - i) * sizeof q->all[0]);
        q->all[i].size = 0;
        q->all[i].status = a->status;
        q->all_count++;
    }
    q->all[i].size += a->size;
    return 0;
}

static int end_area(inquiry *q)
{
    if (q->last.size == 0) return 0;
    if (q->totals) return add_to_totals(q, &q->last);
    show_area(q, &q->last);
    return 0;
}

// Every extent starts inside its request, and so inside the export; only the end of the
// last one may lie behind it.
static int note_extent(inquiry *q, const nbd_event *event)
{
    uint64_t room = nbd_negotiated(&q->client)->size - event->offset;
    int error = 0;
    if (event->context != q->map_index) return 0;
    if (event->flags != q->last.status) {
        error = end_area(q);
        q->last.start = event->offset;
        q->last.size = 0;
        q->last.status = event->flags;
    }
    q->last.size += event->size < room ? event->size : room;
    return error;
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
    if (event->option == NBD_OPTION_SET_META_CONTEXT && !strcmp(text, q->map)) {
        q->has_map = 1;
        q->map_index = event->context;
    }
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

// Moves bytes until something is over: the greeting, an option, a command, the session.
static int run(inquiry *q)
{
    nbd_event event;
    int error = 0;
    for (;;) {
        unsigned wants;
        while (!error && nbd_next(&q->client, &event)) {
            switch (event.type) {
            case NBD_EVENT_TEXT: error = note(q, &event); break;
            case NBD_EVENT_EXTENT: error = note_extent(q, &event); break;
            case NBD_EVENT_OPTION: return event.error;
            case NBD_EVENT_DONE: q->why = event.detail; return event.error;
            case NBD_EVENT_READY: q->ready = 1; return 0;
            case NBD_EVENT_STARTTLS: return nbd_starttls(&q->client, q->sync.tls);
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

/// A server of our own ///

static volatile sig_atomic_t server; // its process, 0: none

// Neither a signal nor a closed pipe leaves the server behind.
static void stop(int number)
{
    if (server > 0) kill((pid_t)server, SIGTERM);
    signal(number, SIG_DFL);
    raise(number);
}

// In the child, which inherits the listening socket as descriptor 3 ("socket activation").
static void become_server(char **command, int listener)
{
    char pid[24];
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    setenv("LISTEN_PID", pid, 1);
    setenv("LISTEN_FDS", "1", 1);
    if (listener != 3) {
        dup2(listener, 3);
        close(listener);
    }
    execvp(command[0], command);
    fprintf(stderr, "info: %s: %s\n", command[0], strerror(errno));
    _exit(127);
}

// Dials before there is a server: the socket's name is then no longer needed, and nothing
// is left in /tmp however this program ends.
static int dial_listener(nbd_sync *sync, int listener)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    nbd_address address = {.kind = NBD_ADDRESS_UNIX, .path = at.sun_path};
    char directory[] = "/tmp/nbd-info-XXXXXX";
    int error = NBD_ERR_SOCKET;
    if (listener < 0 || !mkdtemp(directory)) {
        sync->os_error = errno;
        return error;
    }
    snprintf(at.sun_path, sizeof at.sun_path, "%s/socket", directory);
    if (!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 1))
        error = nbd_sync_dial(sync, &address);
    else
        sync->os_error = errno;
    unlink(at.sun_path);
    rmdir(directory);
    return error;
}

static int start_server(nbd_sync *sync, char **command)
{
    static const int signals[] = {SIGHUP, SIGINT, SIGPIPE, SIGTERM};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    int error = dial_listener(sync, listener);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++)
        if (signal(signals[i], stop) == SIG_IGN) signal(signals[i], SIG_IGN);
    if (!error) server = fork();
    if (!error && server < 0) {
        sync->os_error = errno;
        error = NBD_ERR_CONNECT;
    }
    if (!error && server == 0) become_server(command, listener);
    if (listener >= 0) close(listener);
    return error;
}

static void stop_server(void)
{
    pid_t pid = (pid_t)server;
    server = 0; // its number may soon be another's
    if (pid <= 0) return;
    kill(pid, SIGTERM);
    waitpid(pid, NULL, 0);
}

/// Options ///

static int ask_option(inquiry *q, const nbd_option *option)
{
    int error = nbd_negotiate(&q->client, option);
    q->message[0] = 0;
    return error ? error : run(q);
}

static int ask(inquiry *q, uint32_t number, const char *name)
{
    nbd_option option = {.option = number, .name = name};
    return ask_option(q, &option);
}

static int is_refusal(int error)
{
    return error <= NBD_REP_ERR_UNSUP && error >= NBD_REP_ERR_OTHER;
}

static int is_unsupported(int error)
{
    return error == NBD_REP_ERR_UNSUP || error == NBD_ERR_UNSUPPORTED;
}

static int protocol(const inquiry *q)
{
    return nbd_negotiated(&q->client)->protocol;
}

// Takes the best kind of replies that the server has.
static int ask_protocol(inquiry *q)
{
    int error = ask(q, NBD_OPTION_EXTENDED_HEADERS, NULL);
    if (is_unsupported(error) || is_refusal(error))
        error = ask(q, NBD_OPTION_STRUCTURED_REPLY, NULL);
    return is_unsupported(error) || is_refusal(error) ? 0 : error;
}

static const char *reason(const nbd_sync *sync, int error)
{
    switch (error) {
    case NBD_ERR_RESOLVE: return gai_strerror(sync->os_error);
    case NBD_ERR_CONNECT:
    case NBD_ERR_SOCKET: return strerror(sync->os_error);
    default: return "";
    }
}

// Connects.  An oldstyle server is READY at once.  A server of our own serves one session.
static int open_session(inquiry *q)
{
    nbd_config config = NBD_ZERO;
    int error;
    config.flags = NBD_NEGOTIATE | q->uri.config_flags;
    config.slots = q->slots;
    config.slot_count = 1;
    config.buffer = q->buffer;
    config.buffer_size = sizeof q->buffer;
    config.contexts = q->context_memory;
    config.context_count = CONTEXTS_MAX;
    q->ready = 0;
    q->message[0] = 0;
    error = nbd_init(&q->client, &config);
    if (!error && tls_begin(&q->tls, &q->trust, &q->sync)) {
        q->why = q->trust.why;
        return NBD_ERR_TLS_SETUP;
    }
    if (!error)
        error = q->command ? start_server(&q->sync, q->command)
                           : nbd_sync_dial(&q->sync, &q->uri.address);
    if (error) q->why = reason(&q->sync, error);
    if (!error) error = nbd_connect(&q->client, &q->sync.io.transport);
    if (!error) error = run(q);
    if (!error && q->sync.tls) error = ask(q, NBD_OPTION_STARTTLS, NULL);
    return error || q->ready ? error : ask_protocol(q);
}

// Says goodbye, but does not wait for an answer: some servers give none.
static void close_session(inquiry *q)
{
    if (!nbd_disconnect(&q->client)) (void)nbd_poll(&q->client, NBD_WANT_WRITE);
    (void)nbd_sync_close(&q->sync); // only closes what was dialled
    tls_end(&q->tls);
    stop_server(); // which may wait for that before it ends
}

static int ask_contexts(inquiry *q, const char *name)
{
    int error;
    q->contexts.used = 0;
    q->has_contexts = 0;
    if (protocol(q) == NBD_PROTOCOL_SIMPLE) return 0;
    error = ask(q, NBD_OPTION_LIST_META_CONTEXT, name);
    q->has_contexts = !error;
    return is_refusal(error) ? 0 : error;
}

static int choose_context(inquiry *q, const char *name)
{
    nbd_option option = {.option = NBD_OPTION_SET_META_CONTEXT, .name = name};
    int error;
    if (protocol(q) == NBD_PROTOCOL_SIMPLE) return 0;
    option.queries = &q->map;
    option.query_count = 1;
    error = ask_option(q, &option);
    return is_refusal(error) ? 0 : error;
}

static int enter_export(inquiry *q, const char *name)
{
    int error = q->ready ? 0 : ask(q, NBD_OPTION_GO, name);
    return is_unsupported(error) ? ask(q, NBD_OPTION_EXPORT_NAME, name) : error;
}

// Asks about one of many exports.  INFO leaves the session usable for the next one,
// and a server may serve one session only.  But not all servers know INFO, and
// nbd-server answers it with size 0; and INFO gives nothing to look at.
static int ask_listed(inquiry *q, const char *name)
{
    int error = 0;
    if (q->ready) {
        close_session(q);
        error = open_session(q);
    }
    if (!error) error = ask_contexts(q, name);
    if (!error && !q->probe) error = ask(q, NBD_OPTION_INFO, name);
    if (is_unsupported(error) || (!error && (q->probe || nbd_negotiated(&q->client)->size == 0)))
        error = enter_export(q, name);
    return error;
}

/// Content ///

// Reads the first bytes, in whole blocks.  Returns how many there are, 0 if they cannot be
// read: what the server says about itself is worth printing all the same.
static size_t read_head(inquiry *q)
{
    const nbd_export *got = nbd_negotiated(&q->client);
    uint32_t size = got->minimum_block > PROBED ? got->minimum_block : PROBED;
    nbd_op op = {.command = NBD_READ, .buffer = q->head};
    op.size = size < got->size ? size : got->size;
    if (op.size == 0 || nbd_issue(&q->client, &op, NULL) || run(q)) return 0;
    return op.size < PROBED ? (size_t)op.size : PROBED;
}

// file(1) reads the bytes as its standard input, which this program has no use for.
static void ask_file(inquiry *q, FILE *bytes)
{
    FILE *answer;
    if (dup2(fileno(bytes), STDIN_FILENO) < 0) return;
    answer = popen("file -b - 2>/dev/null", "r");
    if (!answer) return;
    if (fgets(q->content, sizeof q->content, answer)) q->content[strcspn(q->content, "\n")] = 0;
    if (pclose(answer)) q->content[0] = 0;
}

static void find_content(inquiry *q)
{
    size_t size;
    FILE *bytes;
    q->content[0] = 0;
    if (!q->probe) return;
    size = read_head(q);
    if (size == 0 && nbd_negotiated(&q->client)->size > 0) return;
    bytes = tmpfile();
    if (!bytes) return;
    if (fwrite(q->head, 1, size, bytes) == size && !fflush(bytes)) {
        rewind(bytes);
        ask_file(q, bytes);
    }
    fclose(bytes);
}

/// Capabilities ///

// --can and --is know them by what stands behind the first "_".
static const struct capability {
    unsigned flag;
    const char *key;
} capabilities[] = {{NBD_OFFERS_ROTATIONAL, "is_rotational"},
                    {NBD_OFFERS_READ_ONLY, "is_read_only"},
                    {NBD_OFFERS_CACHE, "can_cache"},
                    {NBD_OFFERS_DF, "can_df"},
                    {NBD_OFFERS_FAST_ZERO, "can_fast_zero"},
                    {NBD_OFFERS_FLUSH, "can_flush"},
                    {NBD_OFFERS_FUA, "can_fua"},
                    {NBD_OFFERS_MULTI_CONN, "can_multi_conn"},
                    {NBD_OFFERS_TRIM, "can_trim"},
                    {NBD_OFFERS_WRITE_ZEROES, "can_zero"}};
#define CAPABILITIES (sizeof capabilities / sizeof capabilities[0])

// FAST_ZERO means nothing without WRITE_ZEROES, nor DF without structured replies.
static unsigned offers(const inquiry *q)
{
    unsigned flags = nbd_negotiated(&q->client)->flags;
    if (protocol(q) == NBD_PROTOCOL_SIMPLE) flags &= ~NBD_OFFERS_DF;
    if (!(flags & NBD_OFFERS_WRITE_ZEROES)) flags &= ~NBD_OFFERS_FAST_ZERO;
    return flags;
}

// "Fast-Zero", "fast_zero" and "fastzero" are one word.
static int is_word(const char *a, const char *b)
{
    for (;; a++, b++) {
        a += strspn(a, "-_ ");
        b += strspn(b, "-_ ");
        if (tolower((unsigned char)*a) != tolower((unsigned char)*b)) return 0;
        if (!*a) return 1;
    }
}

static int is_one_of(const char *word, const char *const *words)
{
    while (*words && !is_word(word, *words))
        words++;
    return *words != NULL;
}

// Returns 1 or 0, or -1 if there is no such capability.
static int can(const inquiry *q, const char *word)
{
    static const char *const always[] = {"connect", "read", NULL};
    static const char *const structured[] = {"sr", "structured", "structured-reply",
                                             "structured-replies", NULL};
    static const char *const extended[] = {"eh", "extended-header", "extended-headers", NULL};
    if (is_one_of(word, always)) return 1;
    if (is_one_of(word, structured)) return protocol(q) != NBD_PROTOCOL_SIMPLE;
    if (is_one_of(word, extended)) return protocol(q) == NBD_PROTOCOL_EXTENDED;
    if (is_word(word, "tls")) return nbd_negotiated(&q->client)->tls;
    if (is_word(word, "write")) return !(offers(q) & NBD_OFFERS_READ_ONLY);
    for (size_t i = 0; i < CAPABILITIES; i++)
        if (is_word(word, strchr(capabilities[i].key, '_')))
            return (offers(q) & capabilities[i].flag) != 0;
    return -1;
}

/// Output ///

static void show_key(const inquiry *q, const char *key)
{
    printf(q->json ? "\t\"%s\": " : "\t%s: ", key);
}

// The first parameter of a query begins it.
static void put_parameter(int *count, const char *key, const char *value)
{
    if (!value) return;
    printf("%c%s=", *count ? '&' : '?', key);
    put_escaped(value, "/");
    ++*count;
}

static void put_uri(const inquiry *q, const char *name)
{
    int parameters = 0;
    const nbd_address *at = &q->uri.address;
    int is_tcp = at->kind == NBD_ADDRESS_TCP, is_vsock = at->kind == NBD_ADDRESS_VSOCK;
    printf("nbd%s%s://", q->sync.tls ? "s" : "", is_tcp ? "" : is_vsock ? "+vsock" : "+unix");
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
    if (!is_tcp && !is_vsock) {
        put_parameter(&parameters, "socket", "");
        if (at->kind == NBD_ADDRESS_ABSTRACT) printf("%%00");
        put_escaped(at->path, "/");
    }
    put_parameter(&parameters, "tls-certificates", q->uri.tls_certificates);
    put_parameter(&parameters, "tls-psk-file", q->uri.tls_psk_file);
}

static void show_text(const inquiry *q, const char *key, const char *text)
{
    if (!*text) return;
    show_key(q, key);
    put_text(stdout, text, q->json);
    puts(q->json ? "," : "");
}

static void show_uri(const inquiry *q, const char *name)
{
    show_key(q, "uri");
    printf("%s", q->json ? "\"" : "");
    put_uri(q, name);
    puts(q->json ? "\"," : "");
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

static void show_flags(const inquiry *q)
{
    for (size_t i = 0; i < CAPABILITIES; i++) {
        const struct capability *c = &capabilities[i];
        int set = (offers(q) & c->flag) != 0, is_can = *c->key == 'c';
        const char *value = set ? "true" : "false";
        if (is_can) paint(q, set ? "\033[22;32m" : "\033[22;31m");
        printf(q->json ? "\t\"%s\": %s,\n" : "\t%s: %s\n", c->key, value);
        if (is_can || c->flag == NBD_OFFERS_ROTATIONAL) paint(q, RESET);
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
    paint(q, "\033[1;30m");
    if (q->json)
        printf("%s\n\t{\n\t\"export-name\": ", q->shown ? "," : "");
    else
        printf("export=");
    put_text(stdout, *q->name ? q->name : name, 1);
    puts(q->json ? "," : ":");
    show_text(q, "description", description);
    if (!q->json) show_size(q, got->size);
    show_text(q, "content", q->content);
    if (!q->command) show_uri(q, name);
    paint(q, RESET "\033[22;90m");
    show_contexts(q);
    show_flags(q);
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
    static const char *const packets[] = {"simple", "structured", "extended"};
    const nbd_export *got = nbd_negotiated(&q->client);
    if (q->json) {
        printf("{\n\"protocol\": \"%s\",\n\"TLS\": %s,\n\"structured\": %s,\n", styles[got->style],
               got->tls ? "true" : "false", protocol(q) ? "true" : "false");
        printf("%s\"exports\": [",
               protocol(q) == NBD_PROTOCOL_EXTENDED ? "\"extended\": true,\n" : "");
        return;
    }
    paint(q, "\033[22;90m");
    printf("protocol: %s %s TLS, using %s packets\n", styles[got->style],
           got->tls ? "with" : "without", packets[protocol(q)]);
    paint(q, RESET);
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

/// The questions ///

static int show_one(inquiry *q)
{
    const char *name = q->uri.export_name;
    int error = open_session(q);
    if (!error && !q->size_only) error = ask_contexts(q, name);
    if (!error) error = enter_export(q, name);
    if (q->size_only) {
        if (!error) printf("%" PRIu64 "\n", nbd_negotiated(&q->client)->size);
    } else if (!error || is_refusal(error)) {
        if (!error) find_content(q);
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
        if (error) {
            failed = fail(q, name, error);
            continue;
        }
        find_content(q);
        show_export(q, name, *description ? description : q->description);
    }
    show_foot(q);
    return failed;
}

static int show_can(inquiry *q)
{
    const char *name = q->uri.export_name;
    int yes, error = open_session(q);
    if (!error) error = enter_export(q, name);
    if (error) return fail(q, name, error);
    yes = can(q, q->can);
    if (yes < 0) fprintf(stderr, "info: unknown --can or --is option: %s\n", q->can);
    return yes < 0 ? 1 : yes ? 0 : 2;
}

// Each round gets on: a request that succeeds has at least one extent of each context,
// and none is empty.  In 32 bits a request is cut to a round size, since nbdkit 1.32
// aborts at 2^32 - 1.
static int walk(inquiry *q)
{
    const nbd_export *got = nbd_negotiated(&q->client);
    uint32_t unit = got->minimum_block > 4096 ? got->minimum_block : 4096;
    uint64_t most = got->protocol == NBD_PROTOCOL_EXTENDED ? UINT64_MAX : UINT32_MAX / unit * unit;
    nbd_op op = {.command = NBD_BLOCK_STATUS};
    int error = 0;
    for (; !error && op.offset < got->size; op.offset = q->last.start + q->last.size) {
        uint64_t left = got->size - op.offset;
        op.size = left < most ? left : most;
        error = nbd_issue(&q->client, &op, NULL);
        if (!error) error = run(q);
    }
    return error ? error : end_area(q);
}

// Areas are printed as they are found, so a map of any length takes no more memory.
static int show_map(inquiry *q)
{
    const char *name = q->uri.export_name;
    int error = open_session(q);
    if (!error && !q->ready) error = choose_context(q, name);
    if (!error) error = enter_export(q, name);
    if (!error && !q->has_map) {
        fprintf(stderr, "info: --map: server does not support metadata context \"%s\"\n", q->map);
        return 1;
    }
    if (!error) error = walk(q);
    if (error) return fail(q, name, error);
    for (unsigned i = 0; i < q->all_count; i++)
        show_total(q, &q->all[i]);
    if (q->json) puts(q->shown ? "\n]" : q->totals ? "[]" : "[\n\n]");
    return 0;
}

static int inquire(inquiry *q)
{
    int error =
        q->command ? 0 : nbd_uri_parse(&q->uri, q->text, q->uri_memory, sizeof q->uri_memory);
    q->why = q->uri.detail ? q->uri.detail : "";
    if (q->command) q->uri.export_name = "";
    if (error) return fail(q, "", error);
    if (q->uri.unknown) fprintf(stderr, "info: %s: unknown parameter ignored\n", q->text);
    if (tls_prepare(&q->trust, &q->uri)) {
        fprintf(stderr, "info: %s: %s\n", q->text, q->trust.why);
        return 1;
    }
    error = q->list ? show_all(q) : q->map ? show_map(q) : q->can ? show_can(q) : show_one(q);
    close_session(q);
    tls_forget(&q->trust);
    errno = 0; // an earlier write may have failed: why is not known any more
    if (fflush(stdout) || ferror(stdout)) {
        fprintf(stderr, "info: standard output: %s\n", errno ? strerror(errno) : "cannot write");
        return 1;
    }
    return error;
}

/// The command line ///

static const char usage[] =
    "info - what an NBD server says about itself and its exports\n"
    "\n"
    "usage: info [OPTIONS] [--] SERVER\n"
    "       info --size | --map[=CONTEXT] | --can WORD | --is WORD [--] SERVER\n"
    "       info -L|--list [OPTIONS] [--] SERVER\n"
    "       info --help | -V|--version\n"
    "\n"
    "SERVER: an NBD URI, or [ COMMAND ARGUMENTS ... ], a server that is started and\n"
    "stopped (nbdkit, qemu-nbd).  Write -- before [ if COMMAND has options:\n"
    "info -- [ qemu-nbd -f qcow2 a ]\n" TLS_USAGE "\n"
    "  --can WORD       cache, connect, df, fast-zero, flush, fua, multi-conn, read,\n"
    "                   structured-reply, trim, write or zero: can it?\n"
    "  --color          colours (if standard output is a terminal); also colour\n"
    "  --no-color       no colours\n"
    "  --content        ask file(1) about the first bytes (without --list)\n"
    "  --no-content     do not read the disk (with --list)\n"
    "  --is WORD        read-only, rotational or tls: is it?\n"
    "  --json           print JSON\n"
    "  -L, --list       every export of the server\n"
    "  --map[=CONTEXT]  the areas of a metadata context (base:allocation)\n"
    "  --size           the size in bytes, nothing else\n"
    "  --totals         with --map: the sum of each type of area\n"
    "\n"
    "--can and --is print nothing: status 0 is yes, 2 is no.  Errors are told on standard\n"
    "error, with status 1.  In round brackets: what is done without the option.\n";

static int version(void)
{
    return printf("info (nbd.h) %d.%d.%d\n", NBD_VERSION_MAJOR, NBD_VERSION_MINOR,
                  NBD_VERSION_PATCH) < 0 ||
           fflush(stdout);
}

// 2 would be an answer.
static int misuse(const char *what, const char *why)
{
    fprintf(stderr, "info: %s%s\nTry \"info --help\".\n", what, why);
    return 1;
}

// One name is left, or a command in brackets.  Returns the exit status, or -1.
static int take_server(inquiry *q, char **arguments, int count)
{
    int last = count - 1;
    if (count < 1) return misuse("SERVER is needed", "");
    q->text = arguments[0];
    if (strcmp(q->text, "[") != 0)
        return count > 1 ? misuse(arguments[1], ": one name too many") : -1;
    if (strcmp(arguments[last], "]") != 0) return misuse("[ without ]", "");
    if (last < 2) return misuse("[ without COMMAND", "");
    arguments[last] = NULL; // execvp's end
    q->command = arguments + 1;
    q->text = *q->command;
    return -1;
}

// Returns the exit status if the program is to end here, else -1.
static int parse_options(inquiry *q, int argc, char **argv)
{
    int content = 0, no_content = 0, letter;
    const struct option options[] = {
        {"can", required_argument, NULL, 'c'},     {"color", no_argument, &q->colour, 1},
        {"colour", no_argument, &q->colour, 1},    {"content", no_argument, &content, 1},
        {"has", required_argument, NULL, 'c'},     {"have", required_argument, NULL, 'c'},
        {"help", no_argument, NULL, 'h'},          {"is", required_argument, NULL, 'c'},
        {"json", no_argument, &q->json, 1},        {"list", no_argument, NULL, 'L'},
        {"map", optional_argument, NULL, 'm'},     {"no-color", no_argument, &q->colour, 0},
        {"no-colour", no_argument, &q->colour, 0}, {"no-content", no_argument, &no_content, 1},
        {"size", no_argument, &q->size_only, 1},   {"totals", no_argument, &q->totals, 1},
        {"version", no_argument, NULL, 'V'},       {NULL, 0, NULL, 0}};
    while ((letter = getopt_long(argc, argv, "LV", options, NULL)) != -1) {
        switch (letter) {
        case 0: break; // the flag is set
        case 'c': q->can = optarg; break;
        case 'h': return fputs(usage, stdout) < 0 || fflush(stdout);
        case 'L': q->list = 1; break;
        case 'm': q->map = optarg ? optarg : "base:allocation"; break;
        case 'V': return version();
        default: return misuse("wrong option", ""); // getopt_long has said which
        }
    }
    if (q->list + q->size_only + (q->map != NULL) + (q->can != NULL) > 1)
        return misuse("--can, --is, --list, --map, --size", ": only one of them");
    if (q->totals && !q->map) return misuse("--totals", ": only with --map");
    if (content && no_content) return misuse("--content, --no-content", ": only one of them");
    q->probe = q->list ? content : !no_content;
    return take_server(q, argv + optind, argc - optind);
}

int main(int argc, char **argv)
{
    static inquiry q;
    int status;
    q.colour = isatty(STDOUT_FILENO);
    status = parse_options(&q, argc, argv);
    return status < 0 ? inquire(&q) : status;
}
