// simple_copy.c - copies a disk with blocking calls, one request after the other
//
//     mkdir -p build && gcc -std=c99 -O2 -I. examples/simple_copy.c -o build/simple_copy
//     build/simple_copy [-s BYTES] SOURCE TARGET
//
// SOURCE and TARGET are NBD URIs; one of them may be a local file instead.
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define TIMEOUT_MS 600000 // of a call; a flush may take minutes
#define IS_URI(name) (strncmp(name, "nbd", 3) == 0 && strstr(name, "://"))

typedef struct side {
    const char *name;
    int fd; // of a local file, -1: a server
    uint64_t size;
    nbd_sync sync;
    nbd_client client;
    nbd_slot slot;
    char text[4096];
    unsigned char buffer[NBD_BUFFER_GOOD];
} side;

// what: NULL if it happened at no offset.
static void die(const side *s, const char *what, uint64_t offset, const char *why)
{
    fprintf(stderr, "simple_copy: %s: ", s->name);
    if (what) fprintf(stderr, "%s at offset %" PRIu64 ": ", what, offset);
    fprintf(stderr, *s->sync.message ? "%s (server: \"%s\")\n" : "%s\n", why, s->sync.message);
    exit(1);
}

static void open_server(side *s)
{
    nbd_config config = {.slots = &s->slot, .slot_count = 1, .buffer = s->buffer};
    nbd_uri uri;
    int error = nbd_uri_parse(&uri, s->name, s->text, sizeof s->text);
    config.buffer_size = sizeof s->buffer;
    config.export_name = uri.export_name;
    config.flags = uri.config_flags;
    s->sync = (nbd_sync){.client = &s->client, .timeout_ms = TIMEOUT_MS};
    if (!error) error = nbd_init(&s->client, &config);
    if (!error) error = nbd_sync_open(&s->sync, &uri.address);
    if (s->sync.os_error) fprintf(stderr, "simple_copy: system error %d\n", s->sync.os_error);
    if (error) die(s, NULL, 0, nbd_strerror(error));
    s->size = nbd_negotiated(&s->client)->size;
}

static void open_side(side *s, const char *name, int flags)
{
    s->name = name;
    s->fd = IS_URI(name) ? -1 : open(name, flags, 0666);
    off_t end = s->fd < 0 ? -1 : lseek(s->fd, 0, SEEK_END);
    s->size = (uint64_t)end;
    if (!IS_URI(name) && end < 0) die(s, NULL, 0, strerror(errno));
    if (IS_URI(name)) open_server(s);
}

// nbd_sync_read with a flag.  DONE comes in every case, after nbd_abandon too.
static int read_server(side *s, void *memory, size_t size, uint64_t offset)
{
    const nbd_transport *io = &s->sync.io.transport;
    int left = TIMEOUT_MS, ready = 0, error;
    nbd_event event;
    // NBD_NO_INIT is safe here: after an error not a byte of the memory is looked at.
    nbd_op op = {.command = NBD_READ, .flags = NBD_NO_INIT, .offset = offset, .size = size};
    op.buffer = memory;
    error = nbd_issue(&s->client, &op, NULL);
    while (!error) {
        error = nbd_poll(&s->client, ready < 0 ? 0 : (unsigned)ready);
        while (nbd_next(&s->client, &event)) {
            if (event.type == NBD_EVENT_DONE) return event.error;
            if (event.type == NBD_EVENT_TEXT) // why it fails
                nbd_escape(s->sync.message, sizeof s->sync.message, event.text, event.text_size);
        }
        unsigned wants = nbd_wants(&s->client);
        ready = wants & NBD_WANT_NOW ? 0 : io->wait(io->context, wants, &left);
        if (ready < 0 || left == 0) nbd_abandon(&s->client);
    }
    return error;
}

static void transfer(side *s, int writes, void *memory, size_t size, uint64_t offset)
{
    const char *what = writes ? "write" : "read";
    ssize_t n = (ssize_t)size;
    int error = 0;
    if (s->fd < 0)
        error = writes ? nbd_sync_write(&s->sync, memory, size, offset, 0)
                       : read_server(s, memory, size, offset);
    else if ((n = lseek(s->fd, (off_t)offset, SEEK_SET) < 0 ? -1 : 0) == 0)
        n = writes ? write(s->fd, memory, size) : read(s->fd, memory, size);
    if (n < 0) die(s, what, offset, strerror(errno));
    if (error || (size_t)n < size) die(s, what, offset, error ? nbd_strerror(error) : "cut short");
}

static void close_side(side *s)
{
    int error = s->fd < 0 && nbd_allows(&s->client, NBD_FLUSH, 0) ? nbd_sync_flush(&s->sync) : 0;
    if (!error) error = nbd_sync_close(&s->sync); // of a file: nothing
    if (error) die(s, "end", s->size, nbd_strerror(error));
    if (s->fd >= 0 && close(s->fd)) die(s, "end", s->size, strerror(errno));
}

int main(int argc, char **argv)
{
    static unsigned char memory[32 << 20];
    static side from, to;
    uint64_t size = 256 * 1024;
    char *end = "";
    struct stat status;
#ifdef _WIN32
    _fmode = _O_BINARY;
    if (WSAStartup(MAKEWORD(2, 2), &(WSADATA){0})) return fputs("no Winsock\n", stderr), 1;
#endif
    for (int option; !*end && size && (option = getopt(argc, argv, "s:")) != -1;)
        size = option == 's' ? strtoull(optarg, &end, 0) : 0;
    if (*end) return fprintf(stderr, "simple_copy: not a whole number: %s\n", optarg), 2;
    argv += optind;
    if (argc - optind != 2 || !(IS_URI(argv[0]) || IS_URI(argv[1])) || size - 1 >= sizeof memory)
        return fputs("usage: simple_copy [-s BYTES] SOURCE TARGET\n", stderr), 2;
    open_side(&from, argv[0], O_RDONLY);
    open_side(&to, argv[1], O_WRONLY | O_CREAT);
    // A regular file becomes as long as it must; anything else has to be.
    if (to.fd >= 0 && fstat(to.fd, &status) == 0 && S_ISREG(status.st_mode)) {
        to.size = from.size;
        if (ftruncate(to.fd, 0) || ftruncate(to.fd, (off_t)to.size))
            die(&to, NULL, 0, strerror(errno));
    }
    if (to.size < from.size) die(&to, NULL, 0, "smaller than the source");
    if (from.fd < 0) size = nbd_fit(&from.client, NBD_READ, size);
    for (uint64_t offset = 0; offset < from.size; offset += size) {
        if (size > from.size - offset) size = from.size - offset;
        transfer(&from, 0, memory, (size_t)size, offset);
        transfer(&to, 1, memory, (size_t)size, offset);
    }
    close_side(&from);
    close_side(&to);
    return 0;
}
