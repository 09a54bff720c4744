// A server that never reads while it has something to send, over sockets with buffers of
// 4 KiB at both ends, and a client that has much to send: it must come to an end.  What is
// watched is who can move, and how often nbd_poll is called.

#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "deadlock.h"

enum {
    DISK = 16 * MIB,
    OUT_MOST = 2 * MIB,
    LISTED = 2000, // answers to an option
    NAME = 250,
    QUERIES = 256,
    QUERY = 4000
};

/// The server ///

typedef struct far_side {
    struct pollfd fd;
    unsigned char head[32]; // what it reads next
    size_t need, have;
    uint64_t payload, place; // bytes still to read, and where in the disk they belong
    uint64_t cookie;
    int options;        // they are not over yet
    int greeted;        // the client's flags have come
    unsigned both;      // answers begun while the client had more to send
    unsigned farewells; // DISC, ABORT
    int over;
    size_t from, to;
    unsigned char out[OUT_MOST];
} far_side;

static far_side far;
static unsigned char disk[DISK], memory[DISK];

static void put(uint64_t value, unsigned bytes)
{
    CHECK(far.to + bytes <= OUT_MOST);
    while (bytes-- > 0)
        far.out[far.to++] = (unsigned char)(value >> 8 * bytes);
}

static void put_bytes(const void *bytes, size_t size)
{
    CHECK(far.to + size <= OUT_MOST);
    memcpy(far.out + far.to, bytes, size);
    far.to += size;
}

static uint64_t taken(size_t at, unsigned bytes)
{
    uint64_t value = 0;

    while (bytes-- > 0)
        value = value << 8 | far.head[at++];
    return value;
}

static void greet(int options)
{
    static const unsigned char zeroes[124];

    far.options = options;
    far.need = options ? 4 : 28;
    put_bytes("NBDMAGIC", 8);
    if (options) {
        put_bytes("IHAVEOPT", 8);
        put(3, 2);
    } else {
        put(0x00420281861253, 8);
        put(DISK, 8);
        put(1, 4);
        put_bytes(zeroes, sizeof zeroes);
    }
}

static void answer_option(uint32_t type, uint32_t size)
{
    put(UINT64_C(0x0003e889045565a9), 8);
    put(taken(8, 4), 4);
    put(type, 4);
    put(size, 4);
}

// The header is enough for the answers to begin; what is behind it is read after them.
static void begin_option(void)
{
    char name[NAME];
    uint32_t option = (uint32_t)taken(8, 4), i;

    CHECK_EQUAL(taken(0, 8), UINT64_C(0x49484156454f5054));
    far.payload = taken(12, 4);
    far.farewells += option == NBD_OPTION_ABORT;
    if (option == NBD_OPTION_ABORT) return;
    memset(name, 'n', sizeof name);
    for (i = 0; i < LISTED; i++) {
        answer_option(option == NBD_OPTION_LIST ? 2 : 4, 4 + NAME);
        put(option == NBD_OPTION_LIST ? NAME : 0, 4);
        put_bytes(name, NAME);
    }
    far.both += far.payload > 0;
}

static void begin_request(void)
{
    uint64_t type = taken(6, 2), place = taken(16, 8), size = taken(24, 4);

    CHECK_EQUAL(taken(0, 4), 0x25609513);
    CHECK(type <= 2 && place + size <= DISK);
    far.farewells += type == 2;
    if (type == 2) return;
    far.cookie = taken(8, 8);
    far.payload = type == 1 ? size : 0;
    far.place = place;
    if (type == 1) return;
    put(0x67446698, 4);
    put(0, 4);
    put(far.cookie, 8);
    put_bytes(disk + place, (size_t)size);
}

// A message has come whole: its header, or the payload behind it.
static void end_payload(void)
{
    if (far.options) {
        answer_option(1, 0);
    } else {
        put(0x67446698, 4);
        put(0, 4);
        put(far.cookie, 8);
    }
}

static void end_head(void)
{
    far.have = 0;
    if (!far.options)
        begin_request();
    else if (far.greeted)
        begin_option();
    far.need = far.options ? 16 : 28;
    if (far.options && far.greeted && !far.payload) end_payload();
    far.greeted = 1;
}

static void far_receives(void)
{
    static unsigned char dropped[65536];
    unsigned char *to = far.head + far.have;
    size_t most = far.need - far.have;
    ssize_t got;

    if (far.payload) {
        to = far.options ? dropped : disk + far.place;
        most = far.options && far.payload > sizeof dropped ? sizeof dropped : (size_t)far.payload;
    }
    got = recv(far.fd.fd, to, most, MSG_DONTWAIT);
    far.over = got == 0;
    if (got <= 0) return;
    if (!far.payload) {
        far.have += (size_t)got;
        if (far.have == far.need) end_head();
        return;
    }
    far.place += (size_t)got;
    far.payload -= (size_t)got;
    if (!far.payload) end_payload();
}

static void far_sends(void)
{
    ssize_t sent =
        send(far.fd.fd, far.out + far.from, far.to - far.from, MSG_DONTWAIT | MSG_NOSIGNAL);

    if (sent > 0) far.from += (size_t)sent;
    if (far.from == far.to) far.from = far.to = 0;
}

static void far_turn(void)
{
    if (far.fd.revents && far.to > 0)
        far_sends();
    else if (far.fd.revents)
        far_receives();
    if (far.farewells && !far.to) { // it hangs up when all is said
        if (far.fd.fd >= 0) CHECK_EQUAL(close(far.fd.fd), 0);
        far.fd.fd = -1;
    }
    far.fd.events = far.to > 0 ? POLLOUT : POLLIN;
}

/// Sessions ///

static void shrink_buffers(int fd)
{
    shrink_buffer(fd, SO_SNDBUF);
    shrink_buffer(fd, SO_RCVBUF);
}

static void pair_of_unix(int ends[2])
{
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    shrink_buffers(ends[0]);
    shrink_buffers(ends[1]);
}

// Buffers of TCP have to be small before it connects.
static void pair_of_tcp(int ends[2])
{
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);

    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    shrink_buffers(listener);
    CHECK_EQUAL(bind(listener, (const struct sockaddr *)&at, sizeof at), 0);
    CHECK_EQUAL(listen(listener, 1), 0);
    CHECK_EQUAL(getsockname(listener, (struct sockaddr *)&at, &size), 0);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    shrink_buffers(ends[0]);
    CHECK_EQUAL(connect(ends[0], (const struct sockaddr *)&at, sizeof at), 0);
    ends[1] = accept(listener, NULL, NULL);
    CHECK(ends[1] >= 0);
    CHECK_EQUAL(close(listener), 0);
}

static void begin(void (*connects)(int[2]), int options, size_t buffer_size)
{
    int ends[2];

    memset(&far, 0, sizeof far);
    connects(ends);
    far.fd.fd = ends[1];
    greet(options);
    far.fd.events = POLLOUT;
    near_begin(ends[0], buffer_size, options ? NBD_NEGOTIATE : 0, NULL);
}

static void turn(void)
{
    near_turn(&far.fd);
    far_turn();
}

// Says goodbye and waits for the end: nothing is lost of what was under way.
static void end(void)
{
    if (!near.closed) CHECK_EQUAL(nbd_disconnect(&near.client), 0);
    while (!near.closed)
        turn();
    CHECK_EQUAL(far.farewells, 1);
    near_was_frugal();
    nbd_socket_close(near.io.socket);
}

static void fill(void)
{
    size_t i;

    check_reseed(7);
    for (i = 0; i < DISK; i += 4) {
        uint32_t word = check_random(UINT32_MAX);

        memcpy(disk + i, &word, 4);
        word = check_random(UINT32_MAX);
        memcpy(memory + i, &word, 4);
    }
}

static void reads_then_write(void (*connects)(int[2]), size_t buffer_size)
{
    unsigned i;

    fill();
    begin(connects, 0, buffer_size);
    while (!near.ready)
        turn();
    for (i = 0; i < 4; i++)
        near_issue(NBD_READ, MIB, (uint64_t)i * MIB, memory + (size_t)i * MIB);
    near_issue(NBD_WRITE, 8 * MIB, 8 * MIB, memory + 8 * MIB);
    end(); // at once: goodbye waits for all of it
    CHECK_EQUAL(near.done, 5);
    CHECK_BYTES(memory, disk, 4 * MIB);
    CHECK_BYTES(memory + 8 * MIB, disk + 8 * MIB, 8 * MIB);
}

static void reads_then_a_long_write_over_unix_sockets(void)
{
    reads_then_write(pair_of_unix, NBD_BUFFER_NAMES);
}

static void reads_then_a_long_write_with_the_least_buffer(void)
{
    reads_then_write(pair_of_unix, NBD_BUFFER_MIN);
}

static void reads_then_a_long_write_over_tcp(void)
{
    reads_then_write(pair_of_tcp, NBD_BUFFER_NAMES);
}

// Reads and writes in turn, all slots at once, over and over.
static void mixed(void (*connects)(int[2]))
{
    enum { PART = 65536, ROUNDS = DISK / PART / SLOTS };
    unsigned i, round;
    size_t place = 0;

    fill();
    begin(connects, 0, NBD_BUFFER_NAMES);
    while (!near.ready)
        turn();
    for (round = 0; round < ROUNDS; round++) {
        for (i = 0; i < SLOTS; i++, place += PART)
            near_issue(i % 2 ? NBD_WRITE : NBD_READ, PART, place, memory + place);
        while (near.done < (round + 1) * SLOTS)
            turn();
    }
    end();
    CHECK_BYTES(memory, disk, DISK);
}

static void sixty_four_requests_at_once_over_unix_sockets(void)
{
    mixed(pair_of_unix);
}

static void sixty_four_requests_at_once_over_tcp(void)
{
    mixed(pair_of_tcp);
}

static void long_option(void (*connects)(int[2]), const nbd_option *option)
{
    begin(connects, 1, NBD_BUFFER_NAMES);
    while (near.options == 0)
        turn();
    // LIST_META_CONTEXT is legal without structured replies too.
    CHECK_EQUAL(nbd_negotiate(&near.client, option), 0);
    while (near.options == 1)
        turn();
    CHECK_EQUAL(near.texts, LISTED);
    CHECK_EQUAL(far.both, 1);
    end();
}

static void long_list(void (*connects)(int[2]))
{
    nbd_option option = NBD_ZERO;

    option.option = NBD_OPTION_LIST;
    option.data = memory;
    option.data_size = MIB;
    long_option(connects, &option);
}

static void long_queries(void (*connects)(int[2]))
{
    static char text[QUERIES][QUERY + 1];
    static const char *queries[QUERIES];
    nbd_option option = NBD_ZERO;
    unsigned i;

    for (i = 0; i < QUERIES; i++) {
        memset(text[i], 'q', QUERY);
        memcpy(text[i], "x-q:", 4);
        queries[i] = text[i];
    }
    option.option = NBD_OPTION_LIST_META_CONTEXT;
    option.queries = queries;
    option.query_count = QUERIES;
    long_option(connects, &option);
}

static void long_list_is_answered_while_the_option_is_sent_over_unix_sockets(void)
{
    long_list(pair_of_unix);
}

static void long_list_is_answered_while_the_option_is_sent_over_tcp(void)
{
    long_list(pair_of_tcp);
}

static void contexts_are_answered_while_the_queries_are_sent_over_unix_sockets(void)
{
    long_queries(pair_of_unix);
}

static void contexts_are_answered_while_the_queries_are_sent_over_tcp(void)
{
    long_queries(pair_of_tcp);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(reads_then_a_long_write_over_unix_sockets);
    CHECK_CASE(reads_then_a_long_write_with_the_least_buffer);
    CHECK_CASE(reads_then_a_long_write_over_tcp);
    CHECK_CASE(sixty_four_requests_at_once_over_unix_sockets);
    CHECK_CASE(sixty_four_requests_at_once_over_tcp);
    CHECK_CASE(long_list_is_answered_while_the_option_is_sent_over_unix_sockets);
    CHECK_CASE(long_list_is_answered_while_the_option_is_sent_over_tcp);
    CHECK_CASE(contexts_are_answered_while_the_queries_are_sent_over_unix_sockets);
    CHECK_CASE(contexts_are_answered_while_the_queries_are_sent_over_tcp);
    return check_end();
}
