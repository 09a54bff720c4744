// Firmware without an operating system: an NBD server at the end of a serial line.
#include "nbd.h"
#include <string.h>

#define TX_ROOM 0x1u
#define RX_FULL 0x2u
#define NOT_FOUND 1u // exit codes of main, for the debugger
#define FAILED 2u

typedef struct uart_registers {
    uint32_t data, status, interrupts; // the bits of the last two are the same
} uart_registers;

typedef struct uart {
    volatile uart_registers *registers;
} uart;

static ptrdiff_t uart_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    volatile uart_registers *registers = ((uart *)context)->registers;
    ptrdiff_t sent = 0;

    (void)flags;
    for (; count; count--, iov++) {
        const unsigned char *bytes = (const unsigned char *)iov->base;
        for (size_t i = 0; i < iov->size; i++, sent++) {
            if (!(registers->status & TX_ROOM)) return sent ? sent : NBD_IO_WRITE;
            registers->data = bytes[i];
        }
    }
    return sent;
}

static ptrdiff_t uart_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    volatile uart_registers *registers = ((uart *)context)->registers;
    ptrdiff_t got = 0;

    for (; count; count--, iov++) {
        unsigned char *bytes = (unsigned char *)iov->base;
        for (size_t i = 0; i < iov->size; i++, got++) {
            if (!(registers->status & RX_FULL)) return got ? got : NBD_IO_READ;
            bytes[i] = (unsigned char)registers->data;
        }
    }
    return got;
}

// The interrupts only wake the processor: they stay masked, and the hooks do the work.
static void uart_sleep(const uart *line, unsigned wants)
{
    if (wants & NBD_WANT_NOW) return;
    line->registers->interrupts =
        (wants & NBD_WANT_READ ? RX_FULL : 0u) | (wants & NBD_WANT_WRITE ? TX_ROOM : 0u);
#ifdef __arm__
    __asm__ volatile("wfi");
#endif
}

static void wait_event(nbd_client *client, const uart *line, nbd_event *event)
{
    while (!nbd_next(client, event)) {
        uart_sleep(line, nbd_wants(client));
        (void)nbd_poll(client, NBD_WANT_READ | NBD_WANT_WRITE); // a failure comes as CLOSED
    }
}

// Waits for READY or DONE: with one request at a time whichever is due.
static int wait_end(nbd_client *client, const uart *line)
{
    nbd_event event;

    do
        wait_event(client, line, &event);
    while (event.type == NBD_EVENT_TEXT);
    if (event.type == NBD_EVENT_CLOSED) return event.error ? event.error : NBD_ERR_CLOSED;
    return event.error;
}

static int block(nbd_client *client, const uart *line, nbd_op op, uint32_t sector)
{
    int error;

    op.offset = (uint64_t)sector * 512;
    op.size = 512;
    error = nbd_issue(client, &op, NULL);
    return error ? error : wait_end(client, line);
}

static int read_block(nbd_client *client, const uart *line, void *buffer, uint32_t sector)
{
    nbd_op op = NBD_ZERO;

    op.command = NBD_READ;
    op.buffer = buffer;
    return block(client, line, op, sector);
}

static int write_block(nbd_client *client, const uart *line, const void *data, uint32_t sector)
{
    nbd_op op = NBD_ZERO;

    op.command = NBD_WRITE;
    op.flags = nbd_allows(client, NBD_WRITE, NBD_FUA) ? NBD_FUA : 0;
    op.data = data;
    return block(client, line, op, sector);
}

// The first sector of the partition of type 0xda (data without a file system), or 0.
static uint32_t find_partition(const unsigned char *table)
{
    if (table[510] != 0x55 || table[511] != 0xaa) return 0;
    for (const unsigned char *entry = table + 446; entry < table + 510; entry += 16)
        if (entry[4] == 0xda)
            return entry[8] | (uint32_t)entry[9] << 8 | (uint32_t)entry[10] << 16 |
                   (uint32_t)entry[11] << 24;
    return 0;
}

// A serial line has no end, so CLOSED would not come by itself.
static void leave(nbd_client *client, const uart *line)
{
    nbd_event event;

    if (nbd_disconnect(client)) return;
    while (nbd_wants(client) & (NBD_WANT_WRITE | NBD_WANT_NOW)) {
        uart_sleep(line, nbd_wants(client));
        (void)nbd_poll(client, NBD_WANT_WRITE);
        while (nbd_next(client, &event)) {
        }
    }
    (void)nbd_abandon(client); // an error only says that it is over already
}

int main(void)
{
    static const unsigned char text[512] = "boot log";
    static unsigned char buffer[NBD_BUFFER_MIN], sector[512];
    static nbd_slot slots[4];
    static nbd_client client;
    uart line = {(volatile uart_registers *)(uintptr_t)0x40011000u};
    nbd_transport transport = NBD_ZERO;
    nbd_config config = NBD_ZERO;
    uint32_t place = 0;
    int error;

    transport.context = &line;
    transport.send = uart_send;
    transport.recv = uart_recv;
    config.slots = slots;
    config.slot_count = 4;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    error = nbd_init(&client, &config);
    if (!error) error = nbd_connect(&client, &transport);
    if (!error) error = wait_end(&client, &line);
    if (!error) error = read_block(&client, &line, sector, 0);
    if (!error) place = find_partition(sector);
    if (!error && place) error = write_block(&client, &line, text, place);
    if (!error && place) error = read_block(&client, &line, sector, place);
    if (!error && place && memcmp(sector, text, sizeof text)) error = NBD_EIO;
    leave(&client, &line);
    return error ? (int)FAILED : place ? 0 : (int)NOT_FOUND;
}
