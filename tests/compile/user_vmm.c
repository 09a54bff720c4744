// A virtual machine monitor: guest requests, scattered over guest memory, in its epoll loop.
#include "nbd.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>

#define PAGE 4096u
#define REQUESTS 16u

// What a virtual queue hands over: a chain of guest pages, and where its status goes.
typedef struct guest_request {
    uint32_t command;
    uint32_t pages;
    uint64_t offset;
    nbd_iovec chain[2];
    int status; // 1 while the guest waits; then 0, or an error
} guest_request;

typedef struct guest {
    guest_request queue[REQUESTS];
    unsigned taken, completed, failed;
    unsigned char memory[2 * REQUESTS][PAGE];
} guest;

typedef struct disk {
    nbd_client client;
    nbd_socket_io io;
    nbd_slot slots[8];
    unsigned char buffer[NBD_BUFFER_GOOD];
    int ready, over, error;
} disk;

// A guest that reads its first pages, each pair into memory in the wrong order, then flushes.
static void guest_boot(guest *vm)
{
    for (unsigned i = 0; i < REQUESTS; i++) {
        guest_request *request = &vm->queue[i];
        request->command = i + 1 < REQUESTS ? NBD_READ : NBD_FLUSH;
        request->pages = request->command == NBD_READ ? 2 : 0;
        request->offset = request->pages ? (uint64_t)i * 2 * PAGE : 0;
        request->chain[0].base = vm->memory[2 * i + 1];
        request->chain[1].base = vm->memory[2 * i];
        request->chain[0].size = request->chain[1].size = PAGE;
        request->status = 1;
    }
}

static void guest_complete(guest *vm, guest_request *request, int error)
{
    request->status = error;
    vm->completed++;
    vm->failed += error != 0;
}

// Takes guest requests until the slots are full; the rest waits in the guest's queue.
// Returns whether there is something new to send.
static int disk_submit(disk *d, guest *vm)
{
    unsigned before = vm->taken;

    while (d->ready && vm->taken < REQUESTS) {
        guest_request *request = &vm->queue[vm->taken];
        nbd_op op = NBD_ZERO;
        int error;

        op.command = request->command;
        op.offset = request->offset;
        op.size = (uint64_t)request->pages * PAGE;
        op.iov = request->pages ? request->chain : NULL;
        op.iov_count = request->pages;
        op.user = request;
        error = nbd_issue(&d->client, &op, NULL);
        if (error == NBD_ERR_FULL || error == NBD_ERR_STATE) break;
        vm->taken++;
        if (error) guest_complete(vm, request, error);
    }
    return vm->taken != before;
}

static void disk_event(disk *d, guest *vm, const nbd_event *event)
{
    switch (event->type) {
    case NBD_EVENT_READY: d->ready = 1; break;
    case NBD_EVENT_DONE: guest_complete(vm, (guest_request *)event->user, event->error); break;
    case NBD_EVENT_CLOSED:
        d->ready = 0;
        d->over = 1;
        d->error = event->error;
        break;
    default: break;
    }
}

// One turn: moves bytes, completes, submits.  Returns what to wait for.
static unsigned disk_turn(disk *d, guest *vm, unsigned ready)
{
    nbd_event event;

    do {
        (void)nbd_poll(&d->client, ready); // a failure comes as CLOSED
        while (nbd_next(&d->client, &event))
            disk_event(d, vm, &event);
        ready = 0;
    } while (disk_submit(d, vm));
    if (vm->completed == REQUESTS && d->ready) {
        d->ready = 0;
        (void)nbd_disconnect(&d->client); // an error means CLOSED is on its way
    }
    return nbd_wants(&d->client);
}

// The loop of the whole monitor; other devices would have their descriptors in it too.
static int run(disk *d, guest *vm, int queue)
{
    struct epoll_event slot;
    unsigned wants = disk_turn(d, vm, 0), armed = 0;
    int operation = EPOLL_CTL_ADD;

    slot.data.fd = d->io.socket;
    for (; !d->over; wants = disk_turn(d, vm, wants)) {
        if ((wants & ~NBD_WANT_NOW) != armed) {
            slot.events = (wants & NBD_WANT_READ ? (uint32_t)EPOLLIN : 0u) |
                          (wants & NBD_WANT_WRITE ? (uint32_t)EPOLLOUT : 0u);
            if (epoll_ctl(queue, operation, d->io.socket, &slot)) return NBD_ERR_SOCKET;
            operation = EPOLL_CTL_MOD;
            armed = wants & ~NBD_WANT_NOW;
        }
        slot.events = 0; // stays so if nothing is ready
        if (epoll_wait(queue, &slot, 1, wants & NBD_WANT_NOW ? 0 : -1) < 0 && errno != EINTR)
            return NBD_ERR_SOCKET;
        wants = (slot.events & (EPOLLIN | EPOLLERR | EPOLLHUP) ? NBD_WANT_READ : 0) |
                (slot.events & (EPOLLOUT | EPOLLERR | EPOLLHUP) ? NBD_WANT_WRITE : 0);
    }
    return d->error;
}

static int dial(const nbd_address *address, nbd_socket *connected)
{
    nbd_dial attempt = NBD_ZERO;
    int got = nbd_dial_start(&attempt, address);

    while (!got) {
        struct pollfd wait = {attempt.socket, POLLOUT, 0};
        int count = poll(&wait, 1, 5000);
        if (count < 0 && errno == EINTR) continue;
        got = count > 0 ? nbd_dial_step(&attempt) : nbd_dial_next(&attempt);
    }
    *connected = attempt.socket;
    return got == 1 ? 0 : got;
}

int main(int argc, char **argv)
{
    static disk d;
    static guest vm;
    nbd_config config = NBD_ZERO;
    nbd_address address = NBD_ZERO;
    nbd_socket connected = NBD_SOCKET_NONE;
    int queue = epoll_create1(EPOLL_CLOEXEC), error;

    address.kind = NBD_ADDRESS_UNIX;
    address.path = argc > 1 ? argv[1] : "/tmp/nbd.sock";
    config.slots = d.slots;
    config.slot_count = sizeof d.slots / sizeof *d.slots;
    config.buffer = d.buffer;
    config.buffer_size = sizeof d.buffer;
    guest_boot(&vm);
    error = queue < 0 ? NBD_ERR_SOCKET : nbd_init(&d.client, &config);
    if (!error) error = dial(&address, &connected);
    if (!error) error = nbd_socket_init(&d.io, connected);
    if (!error) error = nbd_connect(&d.client, &d.io.transport);
    if (!error) error = run(&d, &vm, queue);
    nbd_socket_close(connected);
    nbd_socket_close(queue);
    if (error) fprintf(stderr, "vmm: %s\n", nbd_strerror(error));
    printf("%u of %u requests completed, %u failed\n", vm.completed, REQUESTS, vm.failed);
    return error || vm.failed || vm.completed != REQUESTS;
}
