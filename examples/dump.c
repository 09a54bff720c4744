// dump.c - hexdump of a disk over NBD, like nbddump(1)
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/dump.c -o build/dump
//     build/dump -n 512 nbd://localhost/export
//
// With TLS: -DNBD_MBEDTLS in front of -o, -lmbedtls -lmbedx509 -lmbedcrypto behind it.
//
// It asks the server where the disk is zero (nbd_walk_next) and reads the rest with blocking
// calls, so a sparse disk of any size is dumped in no time.
#define _POSIX_C_SOURCE 200809L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "tls_uri.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <netdb.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define LINE 16u         // bytes in a line
#define CHUNK (1u << 20) // what is read at once; a minimum block has 64 KiB at most

static const char *name;             // of the server, as on the command line
static char **command;               // of a server to be started, or NULL
static volatile sig_atomic_t server; // its process, 0: none
static int colour;
static uint64_t start, length = UINT64_MAX, end; // what is dumped

static nbd_client client;
static nbd_sync sync = {.client = &client};
static tls_trust trust;
static tls_session tls;

static const char *reason(int error)
{
    switch (error) {
    case NBD_ERR_RESOLVE: return gai_strerror(sync.os_error);
    case NBD_ERR_CONNECT:
    case NBD_ERR_SOCKET: return strerror(sync.os_error);
    case NBD_ERR_TRANSPORT:
        return *nbd_detail(&client) ? nbd_detail(&client) : strerror(sync.io.os_error);
    default: return nbd_detail(&client);
    }
}

static int fail(int error, const char *what, uint64_t offset)
{
    const char *why = reason(error);
    fflush(stdout); // the lines in front of it come first
    fprintf(stderr, "dump: %s: ", name);
    if (*what) fprintf(stderr, "%s at offset %" PRIu64 ": ", what, offset);
    fprintf(stderr, "%s%s%s", nbd_strerror(error), *why ? ": " : "", why);
    if (*sync.message) fprintf(stderr, " (server: \"%s\")", sync.message);
    fputc('\n', stderr);
    return 1;
}

/// Lines ///

#define GREY "\033[22;90m"

static void paint(const char *sequence)
{
    if (colour) fputs(sequence, stdout);
}

static void print_hex(const unsigned char *bytes, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        paint(bytes[i] ? "\033[1;34m" : GREY);
        printf("%02x%s", bytes[i], i == LINE / 2 - 1 ? "  " : " ");
    }
    paint(GREY);
    printf("%*s", (int)(3 * (LINE - count) + (count < LINE / 2)), "");
}

// Only ASCII is printed as it is, whatever the locale.
static void print_text(const unsigned char *bytes, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        int printable = bytes[i] >= ' ' && bytes[i] <= '~';
        paint(!printable ? GREY : isalnum(bytes[i]) ? "\033[1;31m" : "\033[1;35m");
        if (printable)
            putchar(bytes[i]);
        else
            fputs(colour ? "·" : ".", stdout);
    }
    paint(GREY);
    printf("%*s", (int)(LINE - count), "");
}

static void print_line(uint64_t offset, const unsigned char *bytes, unsigned count)
{
    const char *bar = colour ? "│" : "|";
    paint("\033[22;32m");
    printf("%010" PRIx64, offset);
    paint(GREY);
    fputs(": ", stdout);
    print_hex(bytes, count);
    fputs(bar, stdout);
    print_text(bytes, count);
    printf("%s\n", bar);
    paint("\033[0m");
}

static const unsigned char zeroes[LINE];
static unsigned char line[LINE], previous[LINE];
static unsigned filled; // bytes of `line`
static uint64_t place;  // of `line` in the export
static int squashed;    // lines like the previous one were left out

// The last line of the export is printed even if it is like the one before, to show where
// the end is.  A line that --length cuts short counts as if zeroes followed.
static void end_line(void)
{
    int is_last = nbd_negotiated(&client)->size - place <= LINE;
    memset(line + filled, 0, LINE - filled);
    if (place > start && !is_last && memcmp(line, previous, LINE) == 0) {
        if (!squashed) puts(colour ? "☆" : "*");
        squashed = 1;
    } else {
        print_line(place, line, filled);
        memcpy(previous, line, LINE);
        squashed = 0;
    }
    place += filled;
    filled = 0;
}

// Adds bytes to the dump; NULL: zeroes, which cost nothing once their lines are left out.
static void put(const unsigned char *bytes, uint64_t size)
{
    while (size > 0) {
        unsigned part = LINE - filled < size ? LINE - filled : (unsigned)size;
        memcpy(line + filled, bytes ? bytes : zeroes, part);
        if (bytes) bytes += part;
        filled += part;
        size -= part;
        if (filled == LINE || place + filled == end) end_line();
        if (!bytes && squashed && size > LINE && memcmp(previous, zeroes, LINE) == 0) {
            place += (size - 1) / LINE * LINE; // the rest has a byte or more
            size -= (size - 1) / LINE * LINE;
        }
    }
}

/// Reading ///

// Reads whole blocks, whatever part of them is wanted.
static int dump_data(uint64_t from, uint64_t to)
{
    static unsigned char buffer[CHUNK];
    const nbd_export *got = nbd_negotiated(&client);
    uint64_t block = got->minimum_block;
    while (from < to) {
        uint64_t first = from / block * block, room = got->size - first, left = to - first;
        uint64_t size = left < CHUNK ? (left + block - 1) / block * block : CHUNK, wanted;
        int error;
        if (size > room) size = room;
        error = nbd_sync_read(&sync, buffer, (size_t)size, first);
        if (error) return fail(error, "read", first);
        wanted = size < left ? size - (from - first) : to - from;
        put(buffer + (from - first), wanted);
        from += wanted;
    }
    return 0;
}

static int dump_all(void)
{
    static uint64_t memory[2 + 2 * 4096]; // takes 4096 extents from a reply
    nbd_walk walk;
    int error;
    if (start == end) return 0;
    if (nbd_negotiated(&client)->context_count == 0) return dump_data(start, end);
    error =
        nbd_walk_start(&walk, &sync, end - start, start, memory, sizeof memory / sizeof memory[0]);
    while (!error) {
        error = nbd_walk_next(&walk);
        if (!error && walk.size == 0) return 0;
        if (walk.size > 0 && walk.flags[0] & NBD_STATE_ZERO)
            put(NULL, walk.size);
        else if (dump_data(walk.offset, walk.offset + walk.size))
            return 1;
    }
    return fail(error, "block status", place + filled);
}

static int choose_range(void)
{
    uint64_t size = nbd_negotiated(&client)->size;
    if (start > size) {
        fprintf(stderr, "dump: %s: --offset=%" PRIu64 " is behind the end, %" PRIu64 "\n", name,
                start, size);
        return 1;
    }
    place = start;
    end = length < size - start ? start + length : size;
    return 0;
}

/// A server of our own ///

// Neither a signal nor a closed pipe leaves the server behind.
static void stop(int number)
{
    if (server > 0) kill((pid_t)server, SIGTERM);
    signal(number, SIG_DFL);
    raise(number);
}

// In the child, which inherits the listening socket as descriptor 3 ("socket activation").
static void become_server(int listener)
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
    fprintf(stderr, "dump: %s: %s\n", command[0], strerror(errno));
    _exit(127);
}

// Dials before there is a server: the socket's name is then no longer needed, and nothing
// is left in /tmp however this program ends.
static int dial_listener(int listener)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    nbd_address address = {.kind = NBD_ADDRESS_UNIX, .path = at.sun_path};
    char directory[] = "/tmp/nbd-dump-XXXXXX";
    int error = NBD_ERR_SOCKET;
    if (listener < 0 || !mkdtemp(directory)) {
        sync.os_error = errno;
        return error;
    }
    snprintf(at.sun_path, sizeof at.sun_path, "%s/socket", directory);
    if (!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 1))
        error = nbd_sync_dial(&sync, &address);
    else
        sync.os_error = errno;
    unlink(at.sun_path);
    rmdir(directory);
    return error;
}

static int start_server(void)
{
    static const int signals[] = {SIGHUP, SIGINT, SIGPIPE, SIGTERM};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    int error = dial_listener(listener);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++)
        if (signal(signals[i], stop) == SIG_IGN) signal(signals[i], SIG_IGN);
    if (!error) server = fork();
    if (!error && server < 0) {
        sync.os_error = errno;
        error = NBD_ERR_CONNECT;
    }
    if (!error && server == 0) become_server(listener);
    if (listener >= 0) close(listener);
    return error ? error : nbd_sync_connect(&sync, &sync.io.transport);
}

/// The command line ///

static int open_session(void)
{
    static const char *const allocation[] = {"base:allocation"};
    static unsigned char buffer[NBD_BUFFER_GOOD];
    static nbd_slot slots[1];
    static nbd_context contexts[1];
    static char memory[16384];
    nbd_config config = {.slots = slots, .slot_count = 1, .contexts = contexts, .context_count = 1};
    nbd_uri uri = NBD_ZERO;
    int error = command ? 0 : nbd_uri_parse(&uri, name, memory, sizeof memory);
    if (error) {
        fprintf(stderr, "dump: %s: %s: %s, at byte %zu\n", name, nbd_strerror(error), uri.detail,
                uri.detail_at);
        return 1;
    }
    if (uri.unknown) fprintf(stderr, "dump: %s: unknown parameter ignored\n", name);
    if (tls_prepare(&trust, &uri) || tls_begin(&tls, &trust, &sync)) {
        fprintf(stderr, "dump: %s: %s\n", name, trust.why);
        return 1;
    }
    config.flags = uri.config_flags;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    config.queries = allocation;
    config.query_count = 1;
    error = nbd_init(&client, &config);
    if (!error) error = command ? start_server() : nbd_sync_open(&sync, &uri.address);
    return error ? fail(error, "", 0) : 0;
}

// Closing the connection comes first: a server may wait for that before it ends.
static void close_session(void)
{
    pid_t pid = (pid_t)server;
    (void)nbd_sync_close(&sync);
    tls_end(&tls);
    tls_forget(&trust);
    server = 0; // its number may soon be another's
    if (pid <= 0) return;
    kill(pid, SIGTERM);
    waitpid(pid, NULL, 0);
}

static const char usage[] =
    "dump - hexdump of a disk over NBD\n"
    "\n"
    "usage: dump [OPTIONS] [--] SERVER\n"
    "       dump --help | -V|--version\n"
    "\n"
    "SERVER: an NBD URI, or [ COMMAND ARGUMENTS ... ], a server that is started and\n"
    "stopped (nbdkit, qemu-nbd).  Write -- before [ if COMMAND has options:\n"
    "dump -- [ qemu-nbd -f qcow2 a ]\n" TLS_USAGE "\n"
    "  --color           colours (if standard output is a terminal); also colour\n"
    "  --no-color        no colours\n"
    "  -n N, --length=N  at most N bytes (all)\n"
    "  -o N, --offset=N  from byte N on (0)\n"
    "\n"
    "Each line has the offset, 16 bytes, and those of them that are printable ASCII.\n"
    "Lines like the one before are left out: one * stands for them, but the last line of\n"
    "the disk is always there.  Errors are told on standard error, with status 1.\n";

static int misuse(const char *option, const char *what, const char *why)
{
    fprintf(stderr, "dump: %s%s%s\nTry \"dump --help\".\n", option, what, why);
    return 1;
}

static int number(const char *option, const char *text, uint64_t *value)
{
    char *rest;
    errno = 0;
    *value = strtoull(text, &rest, 10);
    if (isdigit((unsigned char)*text) && !*rest && !errno) return -1;
    return misuse(option, text, ": not a number of bytes");
}

// Returns the exit status if the program is to end here, else -1.
static int parse_options(int argc, char **argv)
{
    const struct option options[] = {{"color", no_argument, &colour, 1},
                                     {"colour", no_argument, &colour, 1},
                                     {"no-color", no_argument, &colour, 0},
                                     {"no-colour", no_argument, &colour, 0},
                                     {"length", required_argument, NULL, 'n'},
                                     {"offset", required_argument, NULL, 'o'},
                                     {"help", no_argument, NULL, 'h'},
                                     {"version", no_argument, NULL, 'V'},
                                     {NULL, 0, NULL, 0}};
    int letter, status = -1;
    while (status < 0 && (letter = getopt_long(argc, argv, "n:o:V", options, NULL)) != -1) {
        switch (letter) {
        case 0: break; // the flag is set
        case 'n': status = number("--length=", optarg, &length); break;
        case 'o': status = number("--offset=", optarg, &start); break;
        case 'h': return fputs(usage, stdout) < 0 || fflush(stdout);
        case 'V':
            return printf("dump (nbd.h) %d.%d.%d\n", NBD_VERSION_MAJOR, NBD_VERSION_MINOR,
                          NBD_VERSION_PATCH) < 0 ||
                   fflush(stdout);
        default: return misuse("", "wrong option", ""); // getopt_long has said which
        }
    }
    return status;
}

// One name is left, or a command in brackets.  Returns the exit status, or -1.
static int take_server(char **arguments, int count)
{
    int last = count - 1;
    if (count < 1) return misuse("", "SERVER is needed", "");
    name = arguments[0];
    if (strcmp(name, "[") != 0)
        return count > 1 ? misuse("", arguments[1], ": one name too many") : -1;
    if (strcmp(arguments[last], "]") != 0) return misuse("[ without ]", "", "");
    if (last < 2) return misuse("[ without COMMAND", "", "");
    arguments[last] = NULL; // execvp's end
    command = arguments + 1;
    name = *command;
    return -1;
}

int main(int argc, char **argv)
{
    int status;
    colour = isatty(STDOUT_FILENO);
    status = parse_options(argc, argv);
    if (status < 0) status = take_server(argv + optind, argc - optind);
    if (status >= 0) return status;
    status = open_session() || choose_range() || dump_all();
    close_session();
    errno = 0; // an earlier write may have failed: why is not known any more
    if (fflush(stdout) || ferror(stdout)) {
        fprintf(stderr, "dump: standard output: %s\n", errno ? strerror(errno) : "cannot write");
        return 1;
    }
    return status;
}
