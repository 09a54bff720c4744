// libnbd_copy.c - the copy loops of examples/, written with libnbd
//
//     build/bench/libnbd_copy [--no-init] [--loop sync|poll|ev] [-r REQUESTS]
//         [-s REQUEST-SIZE] SOURCE-URI TARGET-URI
//
// The same work as simple_copy, poll_copy and libev_copy do: a fixed array of requests, in
// which the end of a read starts its write, and that the next read.
#define _GNU_SOURCE
#include <errno.h>
#include <ev.h>
#include <getopt.h>
#include <inttypes.h>
#include <libnbd.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REQUESTS_MAX 64

typedef struct request {
    struct request *next; // in the list of free ones
    unsigned char *memory;
    uint64_t offset;
    size_t size;
} request;

static struct nbd_handle *source, *target;
static request requests[REQUESTS_MAX], *idle;
static uint64_t size, request_size = 256 * 1024, started, copied;
static ev_io source_watcher, target_watcher;

static void check(int failed)
{
    if (!failed) return;
    fprintf(stderr, "libnbd_copy: offset %" PRIu64 ": %s\n", copied, nbd_get_error());
    exit(1);
}

static struct nbd_handle *open_side(const char *uri, int initialize)
{
    struct nbd_handle *handle = nbd_create();
    check(handle == NULL);
    check(nbd_set_pread_initialize(handle, initialize) < 0);
    check(nbd_connect_uri(handle, uri) < 0);
    return handle;
}

static void close_side(struct nbd_handle *handle)
{
    if (nbd_can_flush(handle) > 0) check(nbd_flush(handle, 0) < 0);
    check(nbd_shutdown(handle, 0) < 0);
    nbd_close(handle);
}

/// Requests ///

// A read is not started from here: libnbd holds the lock of the source where a write ends
// within a callback of it.
static int write_done(void *user, int *error)
{
    request *r = user;
    if (*error) {
        fprintf(stderr, "libnbd_copy: write at offset %" PRIu64 ": %s\n", r->offset,
                strerror(*error));
        exit(1);
    }
    copied += r->size;
    r->next = idle;
    idle = r;
    return 1;
}

static int read_done(void *user, int *error)
{
    request *r = user;
    nbd_completion_callback done = {.callback = write_done, .user_data = r};
    if (*error) {
        fprintf(stderr, "libnbd_copy: read at offset %" PRIu64 ": %s\n", r->offset,
                strerror(*error));
        exit(1);
    }
    check(nbd_aio_pwrite(target, r->memory, r->size, r->offset, done, 0) < 0);
    return 1;
}

static void start_reads(void)
{
    while (idle && started < size) {
        request *r = idle;
        nbd_completion_callback done = {.callback = read_done, .user_data = r};
        idle = r->next;
        r->offset = started;
        r->size = (size_t)(size - started < request_size ? size - started : request_size);
        started += r->size;
        check(nbd_aio_pread(source, r->memory, r->size, r->offset, done, 0) < 0);
    }
}

/// Loops ///

static void sync_loop(void)
{
    for (; copied < size; copied += request_size) {
        uint64_t part = size - copied < request_size ? size - copied : request_size;
        check(nbd_pread(source, requests[0].memory, (size_t)part, copied, 0) < 0);
        check(nbd_pwrite(target, requests[0].memory, (size_t)part, copied, 0) < 0);
    }
}

static void notify(struct nbd_handle *handle, int read, int write)
{
    // What the handle waits for may have changed while the other one was served.
    unsigned direction = nbd_aio_get_direction(handle);
    if (read && (direction & LIBNBD_AIO_DIRECTION_READ))
        check(nbd_aio_notify_read(handle) < 0);
    else if (write && (direction & LIBNBD_AIO_DIRECTION_WRITE))
        check(nbd_aio_notify_write(handle) < 0);
}

static struct pollfd wait_for(struct nbd_handle *handle)
{
    unsigned direction = nbd_aio_get_direction(handle);
    int events = (direction & LIBNBD_AIO_DIRECTION_READ ? POLLIN : 0) |
                 (direction & LIBNBD_AIO_DIRECTION_WRITE ? POLLOUT : 0);
    return (struct pollfd){nbd_aio_get_fd(handle), (short)events, 0};
}

static void poll_loop(void)
{
    while (copied < size) {
        start_reads();
        struct pollfd fds[2] = {wait_for(source), wait_for(target)};
        if (poll(fds, 2, -1) < 0 && errno != EINTR) check(1);
        notify(source, fds[0].revents & ~POLLOUT, fds[0].revents & POLLOUT);
        notify(target, fds[1].revents & ~POLLOUT, fds[1].revents & POLLOUT);
    }
}

static void on_socket(struct ev_loop *loop, ev_io *watcher, int events)
{
    (void)loop;
    notify(watcher->data, events & EV_READ, events & EV_WRITE);
}

static void watch(struct ev_loop *loop, ev_io *watcher)
{
    unsigned direction = nbd_aio_get_direction(watcher->data);
    int events = (direction & LIBNBD_AIO_DIRECTION_READ ? EV_READ : 0) |
                 (direction & LIBNBD_AIO_DIRECTION_WRITE ? EV_WRITE : 0);
    ev_io_stop(loop, watcher);
    ev_io_modify(watcher, events);
    ev_io_start(loop, watcher);
}

static void before_sleep(struct ev_loop *loop, ev_prepare *watcher, int events)
{
    (void)watcher, (void)events;
    start_reads();
    watch(loop, &source_watcher);
    watch(loop, &target_watcher);
    if (copied == size) ev_break(loop, EVBREAK_ALL);
}

static void event_loop(void)
{
    ev_prepare prepare;
    ev_io_init(&source_watcher, on_socket, nbd_aio_get_fd(source), 0);
    ev_io_init(&target_watcher, on_socket, nbd_aio_get_fd(target), 0);
    source_watcher.data = source;
    target_watcher.data = target;
    ev_prepare_init(&prepare, before_sleep);
    ev_prepare_start(EV_DEFAULT, &prepare);
    ev_run(EV_DEFAULT, 0);
}

/// The command line ///

static int misuse(void)
{
    fputs(
        "usage: libnbd_copy [--no-init] [--loop sync|poll|ev] [-r 1-64] [-s SIZE] SOURCE TARGET\n",
        stderr);
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"no-init", 0, NULL, 'n'}, {"loop", 1, NULL, 'l'}, {NULL, 0, NULL, 0}};
    const char *loop = "poll";
    uint64_t count = 16;
    int initialize = 1;
    for (int option; (option = getopt_long(argc, argv, "r:s:", options, NULL)) != -1;) {
        switch (option) {
        case 'n': initialize = 0; break;
        case 'l': loop = optarg; break;
        case 'r': count = strtoull(optarg, NULL, 0); break;
        case 's': request_size = strtoull(optarg, NULL, 0); break;
        default: return misuse();
        }
    }
    if (argc - optind != 2 || !count || count > REQUESTS_MAX || !request_size) return misuse();
    source = open_side(argv[optind], initialize);
    target = open_side(argv[optind + 1], initialize);
    size = (uint64_t)nbd_get_size(source);
    for (uint64_t i = 0; i < count; i++) {
        requests[i].memory = malloc((size_t)request_size);
        if (!requests[i].memory) return misuse();
        requests[i].next = idle;
        idle = &requests[i];
    }
    if (strcmp(loop, "sync") == 0)
        sync_loop();
    else if (strcmp(loop, "poll") == 0)
        poll_loop();
    else if (strcmp(loop, "ev") == 0)
        event_loop();
    else
        return misuse();
    close_side(source);
    close_side(target);
    return 0;
}
