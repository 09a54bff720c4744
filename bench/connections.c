// connections.c - one thread, many connections: what each takes, and what a request costs
//
//     build/bench/connections URI --connections N --busy N --count N [--size N]
//
// Opens the connections one after the other, all of them in one epoll set.  Then the busy ones
// read --size bytes (512) again and again, one request in flight each, --count in all; the others
// idle.  Each has 4 slots and the least buffer.  Prints one line of key=value:
//   bytes_conn   what a connection is made of: client, slots, buffer, transport
//   rss_conn     growth of this process's resident memory, by connection
//   open_us      to dial and to shake hands, by connection
// Kernel and server have memory for each connection too, which is not counted.
#define _GNU_SOURCE
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "bench.h"

#define SLOTS 4

typedef struct connection {
    nbd_socket_io io;
    nbd_client client;
    nbd_slot slots[SLOTS];
    unsigned char buffer[NBD_BUFFER_MIN];
    uint32_t watched;
} connection;

typedef struct load {
    const char *uri;
    unsigned connections, busy;
    uint64_t count, size;
    connection *all;
    unsigned char *data; // of all reads: nobody looks at it
    uint64_t issued, finished;
    int epoll;
} load;

/// Opening ///

static uint64_t resident(void)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*u %llu", &pages) != 1) bench_die("no /proc/self/statm");
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static nbd_socket dial(const nbd_address *address)
{
    nbd_dial dial;
    int error = nbd_dial_start(&dial, address);
    while (error == 0) {
        struct pollfd fd = {dial.socket, POLLOUT, 0};
        if (poll(&fd, 1, 30000) <= 0) bench_die("dialling: timed out");
        error = nbd_dial_step(&dial);
    }
    if (error < 0) bench_die("dialling: %s: %s", nbd_strerror(error), strerror(dial.os_error));
    return dial.socket;
}

static void open_connection(load *l, unsigned i, const nbd_uri *uri)
{
    connection *c = &l->all[i];
    nbd_sync sync = {.client = &c->client, .timeout_ms = 30000}; // only shakes hands
    nbd_config config = {.slots = c->slots, .slot_count = SLOTS, .buffer = c->buffer};
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
    int error;
    config.buffer_size = sizeof c->buffer;
    config.export_name = uri->export_name;
    error = nbd_init(&c->client, &config);
    if (!error) error = nbd_socket_init(&c->io, dial(&uri->address));
    if (!error) error = nbd_sync_connect(&sync, &c->io.transport);
    if (error) bench_die("connection %u: %s", i, nbd_strerror(error));
    c->watched = EPOLLIN;
    if (epoll_ctl(l->epoll, EPOLL_CTL_ADD, c->io.socket, &event)) bench_die("epoll_ctl failed");
}

static void open_all(load *l)
{
    char memory[4096];
    nbd_uri uri;
    int error = nbd_uri_parse(&uri, l->uri, memory, sizeof memory);
    if (error) bench_die("%s: %s", l->uri, nbd_strerror(error));
    for (unsigned i = 0; i < l->connections; i++)
        open_connection(l, i, &uri);
}

/// Requests ///

static void issue(load *l, connection *c)
{
    nbd_op op = {.command = NBD_READ, .flags = NBD_NO_INIT, .size = l->size, .buffer = l->data};
    int error;
    if (l->issued == l->count) return;
    l->issued++;
    error = nbd_issue(&c->client, &op, NULL);
    if (error) bench_die("issue: %s", nbd_strerror(error));
}

static void watch(load *l, connection *c)
{
    unsigned wants = nbd_wants(&c->client);
    struct epoll_event event = {.data.u32 = (uint32_t)(c - l->all)};
    event.events = EPOLLIN | (wants & NBD_WANT_WRITE ? EPOLLOUT : 0);
    if (event.events == c->watched) return;
    c->watched = event.events;
    if (epoll_ctl(l->epoll, EPOLL_CTL_MOD, c->io.socket, &event)) bench_die("epoll_ctl failed");
}

static void move(load *l, connection *c, unsigned ready)
{
    nbd_event event;
    do {
        nbd_poll(&c->client, ready);
        while (nbd_next(&c->client, &event)) {
            if (event.error || event.type == NBD_EVENT_CLOSED)
                bench_die("read: %s", nbd_strerror(event.error));
            l->finished += event.type == NBD_EVENT_DONE;
            if (event.type == NBD_EVENT_DONE) issue(l, c);
        }
        ready = 0; // what was issued goes out at once
    } while (nbd_wants(&c->client) & NBD_WANT_NOW);
    if (nbd_wants(&c->client) & NBD_WANT_WRITE) nbd_poll(&c->client, 0);
    watch(l, c);
}

// What is measured; callgrind finds it by its name.
static void __attribute__((noinline)) measured(load *l)
{
    struct epoll_event events[BENCH_EVENTS];
    for (unsigned i = 0; i < l->busy; i++) {
        // Spread over all of them, as they would be in a server of many.
        connection *c = &l->all[(uint64_t)i * l->connections / l->busy];
        issue(l, c);
        move(l, c, 0);
    }
    while (l->finished < l->count) {
        int found = epoll_wait(l->epoll, events, BENCH_EVENTS, -1);
        if (found < 0 && errno != EINTR) bench_die("epoll_wait: %s", strerror(errno));
        for (int i = 0; i < found; i++) {
            unsigned ready = events[i].events & ~(uint32_t)EPOLLOUT ? NBD_WANT_READ : 0;
            if (events[i].events & ~(uint32_t)EPOLLIN) ready |= NBD_WANT_WRITE;
            move(l, &l->all[events[i].data.u32], ready);
        }
    }
}

/// The command line ///

static void parse(load *l, int argc, char **argv)
{
    static const struct option options[] = {{"connections", 1, NULL, 'c'},
                                            {"busy", 1, NULL, 'b'},
                                            {"count", 1, NULL, 'n'},
                                            {"size", 1, NULL, 's'},
                                            {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'c':
            l->connections = (unsigned)bench_number("--connections", optarg, 1, 1u << 20);
            break;
        case 'b': l->busy = (unsigned)bench_number("--busy", optarg, 1, 1u << 20); break;
        case 'n': l->count = bench_number("--count", optarg, 1, (uint64_t)1 << 40); break;
        case 's': l->size = bench_number("--size", optarg, 1, 32u << 20); break;
        default: bench_refuse(NULL);
        }
    }
    if (optind + 1 != argc) bench_refuse("one URI is needed");
    if (!l->connections || !l->busy || !l->count || l->busy > l->connections)
        bench_refuse("--connections, --busy and --count are needed, not more busy than there are");
    l->uri = argv[optind];
}

static void print(const load *l, uint64_t memory, const bench_reading *at)
{
    double ops = (double)l->count, connections = (double)l->connections;
    double user = (at[2].user - at[1].user) * 1e6 / ops;
    double system = (at[2].system - at[1].system) * 1e6 / ops;
    printf("connections=%u busy=%u bytes_conn=%zu rss_conn=%.0f open_us=%.2f", l->connections,
           l->busy, sizeof *l->all, (double)memory / connections,
           (at[1].clock - at[0].clock) * 1e6 / connections);
    printf(" ops_s=%.0f cpu_us_op=%.4f user_us_op=%.4f sys_us_op=%.4f ops=%.0f\n",
           ops / (at[2].clock - at[1].clock), user + system, user, system, ops);
}

int main(int argc, char **argv)
{
    static load l;
    static bench_reading at[3];
    uint64_t before;
    bench_name = "connections";
    bench_usage = "URI --connections N --busy N --count N [--size N]";
    l.size = 512;
    parse(&l, argc, argv);
    bench_allow_files();
    l.epoll = epoll_create1(EPOLL_CLOEXEC);
    l.data = bench_memory(1, (size_t)l.size);
    before = resident();
    bench_read_clocks(&at[0]);
    l.all = calloc(l.connections, sizeof *l.all);
    if (!l.all || l.epoll < 0) bench_die("no memory");
    open_all(&l);
    before = resident() - before;
    bench_read_clocks(&at[1]);
    measured(&l);
    bench_read_clocks(&at[2]);
    print(&l, before, at);
    return 0; // the end of the process ends the sessions
}
