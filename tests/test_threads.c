// Different clients in different threads share nothing, and a client may move from one thread
// to another between two calls.  Each client talks over a socket pair to a server in a thread
// of its own.  The thread sanitizer sees what the results do not show: tests/sanitizers.sh.
#define _DEFAULT_SOURCE 1
#include <pthread.h>

#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "check.h"

enum { CLIENTS = 8, ROUNDS = 40, PIECE = 3000, DISK_SIZE = ROUNDS * PIECE };

/// The server ///

static int get(int fd, unsigned char *to, size_t size)
{
    while (size) {
        ssize_t n = read(fd, to, size);

        if (n <= 0) return 0;
        to += n;
        size -= (size_t)n;
    }
    return 1;
}

static int give(int fd, const void *from, size_t size)
{
    const unsigned char *at = (const unsigned char *)from;

    while (size) {
        ssize_t n = write(fd, at, size);

        if (n <= 0) return 0;
        at += n;
        size -= (size_t)n;
    }
    return 1;
}

static uint64_t number(const unsigned char *p, unsigned width)
{
    uint64_t value = 0;

    while (width--)
        value = value << 8 | *p++;
    return value;
}

static void put_number(unsigned char *p, uint64_t value, unsigned width)
{
    while (width--)
        *p++ = (unsigned char)(value >> 8 * width);
}

typedef struct server {
    pthread_t thread;
    int fd;
    unsigned char disk[DISK_SIZE];
    unsigned char payload[PIECE];
} server;

// EXPORT_NAME is the only option that these clients send.
static int greet(const server *s)
{
    unsigned char client[4 + 16 + 1], answer[10];

    if (!give(s->fd, "NBDMAGICIHAVEOPT\0\3", 18) || !get(s->fd, client, sizeof client)) return 0;
    put_number(answer, DISK_SIZE, 8);
    put_number(answer + 8, NBD_OFFERS_FLAGS | NBD_OFFERS_FLUSH, 2);
    return give(s->fd, answer, sizeof answer);
}

// Commands by their type on the wire: 0 reads, 1 writes.
static int serve_one(server *s)
{
    unsigned char request[28], reply[16] = {0x67, 0x44, 0x66, 0x98};
    size_t type, place, size;

    if (!get(s->fd, request, sizeof request)) return 0;
    type = (size_t)number(request + 6, 2);
    place = (size_t)number(request + 16, 8);
    size = (size_t)number(request + 24, 4);
    if (size > PIECE || place > DISK_SIZE - size || (type == 1 && !get(s->fd, s->payload, size))) {
        return 0;
    }
    if (type == 1) memcpy(s->disk + place, s->payload, size);
    memcpy(reply + 8, request + 8, 8);
    return type != 2 && give(s->fd, reply, sizeof reply) &&
           (type != 0 || give(s->fd, s->disk + place, size));
}

static void *serve(void *of)
{
    server *s = (server *)of;

    if (greet(s)) {
        while (serve_one(s)) {
        }
    }
    close(s->fd);
    return NULL;
}

/// The client ///

typedef struct caller {
    pthread_t thread;
    unsigned char fill; // what it writes: another one for each client
    int error;
    int fd;
    nbd_client client;
    nbd_sync sync;
    nbd_slot slots[2];
    nbd_socket_io io;
    unsigned char buffer[NBD_BUFFER_MIN];
    unsigned char data[PIECE];
} caller;

static server servers[CLIENTS];
static caller callers[CLIENTS];

static int open_session(caller *c)
{
    nbd_config config = NBD_ZERO;
    int error;

    config.flags = NBD_ONLY_EXPORT_NAME;
    config.export_name = "e";
    config.slots = c->slots;
    config.slot_count = 2;
    config.buffer = c->buffer;
    config.buffer_size = sizeof c->buffer;
    c->sync.client = &c->client;
    error = nbd_init(&c->client, &config);
    if (!error) error = nbd_socket_init(&c->io, c->fd);
    return error ? error : nbd_sync_connect(&c->sync, &c->io.transport);
}

// The first thread of a client: opens the session and writes.
static void *open_and_write(void *of)
{
    caller *c = (caller *)of;
    int i;

    c->error = open_session(c);
    memset(c->data, c->fill, PIECE);
    for (i = 0; i < ROUNDS && !c->error; i++) {
        c->error = nbd_sync_write(&c->sync, c->data, PIECE, (uint64_t)i * PIECE, 0);
    }
    return NULL;
}

static int holds_fill(const caller *c)
{
    size_t i;

    for (i = 0; i < PIECE && c->data[i] == c->fill; i++) {
    }
    return i == PIECE;
}

static int parse_and_print(const caller *c)
{
    char text[64], escaped[64];
    nbd_uri uri;
    int error = nbd_uri_parse(&uri, "nbd://h/%7f", text, sizeof text);

    nbd_escape(escaped, sizeof escaped, uri.export_name, strlen(uri.export_name));
    return error == 0 && strcmp(escaped, "\\x7f") == 0 && nbd_strerror(c->error)[0] != '\0';
}

// The second thread of a client: reads, has an error, and ends the session.
static void *read_and_close(void *of)
{
    caller *c = (caller *)of;
    int i;

    for (i = 0; i < ROUNDS && !c->error; i++) {
        c->error = nbd_sync_read(&c->sync, c->data, PIECE, (uint64_t)i * PIECE);
        if (!c->error && !holds_fill(c)) c->error = -1000;
    }
    if (!c->error && nbd_sync_flush(&c->sync) != 0) c->error = -1001;
    if (!c->error && nbd_sync_read(&c->sync, c->data, 1, DISK_SIZE) != NBD_ERR_BOUNDS)
        c->error = -1002;
    if (!c->error && !parse_and_print(c)) c->error = -1003;
    if (!c->error) c->error = nbd_sync_close(&c->sync);
    close(c->fd);
    return NULL;
}

static void in_threads(void *(*run)(void *))
{
    int i;

    for (i = 0; i < CLIENTS; i++) {
        CHECK_EQUAL(pthread_create(&callers[i].thread, NULL, run, &callers[i]), 0);
    }
    for (i = 0; i < CLIENTS; i++) {
        CHECK_EQUAL(pthread_join(callers[i].thread, NULL), 0);
    }
    for (i = 0; i < CLIENTS; i++) {
        CHECK_EQUAL(callers[i].error, 0);
    }
}

static void connect_all(void)
{
    int i, pair[2];

    for (i = 0; i < CLIENTS; i++) {
        CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        callers[i].fd = pair[0];
        callers[i].fill = (unsigned char)(i + 1);
        servers[i].fd = pair[1];
        CHECK_EQUAL(pthread_create(&servers[i].thread, NULL, serve, &servers[i]), 0);
    }
}

static void clients_in_many_threads_share_nothing(void)
{
    int i;

    signal(SIGPIPE, SIG_IGN); // the servers write to sockets
    connect_all();
    in_threads(open_and_write);
    in_threads(read_and_close);
    for (i = 0; i < CLIENTS; i++) {
        CHECK_EQUAL(pthread_join(servers[i].thread, NULL), 0);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(clients_in_many_threads_share_nothing);
    return check_end();
}
