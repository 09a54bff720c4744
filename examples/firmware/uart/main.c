// main.c - an NBD disk over a UART, on a Cortex-M3 without operating system, network or heap
//
//     examples/firmware/build.sh uart build/uart.elf
//     nbdkit -f -U /tmp/nbd.sock file disk.img &
//     qemu-system-arm -M mps2-an385 -display none -monitor none -nodefaults -nic user
//         -chardev socket,id=nbd,path=/tmp/nbd.sock -serial chardev:nbd
//         -semihosting-config enable=on,target=native -kernel build/uart.elf
//
// Lists the partitions, then overwrites and verifies 32 KiB in the first one of type da.
//
// For your board: ../board.c, ../board.ld, and here all above "The program".  NBD needs every
// byte: where nothing stops the sender as QEMU does, use RTS and CTS.
#define NBD_NO_SOCKETS
#define NBD_IOVECS 4 // a UART gains nothing by more: less stack
#define NBD_IMPLEMENTATION
#include "../board.h"
#include "nbd.h"

#define DATA REGISTER(0x40004000)
#define STATE REGISTER(0x40004004)   // bit 0: cannot take a byte to send; bit 1: has received one
#define CONTROL REGISTER(0x40004008) // bits: send, receive, interrupt when sent, when received
#define INTERRUPT REGISTER(0x4000400c)

#define BLOCK_SIZE 1024u // yours: a multiple of the server's minimum_block
#define PROOF_SIZE 32768u
#define RATE(ms) (PROOF_SIZE / 1024 * 1000 / ((ms) + 1)) // KiB/s
#define WRONG 1000 // no error of nbd.h: the rest of the line says what it is
#define PATTERN(at) ((uint8_t)((at)*2654435761u >> 24))

#ifndef LIMIT_MS
#define LIMIT_MS 10000 // of a call
#endif

/// Driver ///

static volatile uint8_t ring[256]; // received, not yet asked for
static volatile uint32_t head, tail;

// With the ring full the next byte waits in the UART, which stops the sender.
void board_interrupt(void)
{
    INTERRUPT = 3;
    while ((STATE & 2) && head - tail < sizeof ring)
        ring[head++ % sizeof ring] = (uint8_t)DATA;
    CONTROL = head - tail < sizeof ring ? 15 : 7;
}

static void uart_start(void)
{
    REGISTER(0x40004010) = 16; // divisor of the clock: the speed
    CONTROL = 15;
    (void)DATA; // QEMU: what came before the UART was on waits for this
    NVIC_ENABLE = 3;
}

static ptrdiff_t uart_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    ptrdiff_t sent = 0;
    (void)context, (void)flags;
    for (; count-- > 0; iov++) {
        for (size_t i = 0; i < iov->size; i++, sent++) {
            if (STATE & 1) return sent > 0 ? sent : NBD_IO_WRITE;
            DATA = ((const uint8_t *)iov->base)[i];
        }
    }
    return sent;
}

static ptrdiff_t uart_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    uint32_t begin = tail, end = head; // more may come meanwhile
    (void)context;
    for (; count-- > 0; iov++)
        for (size_t i = 0; i < iov->size && tail != end; i++, tail++)
            ((uint8_t *)iov->base)[i] = ring[tail % sizeof ring];
    LOCK();
    board_interrupt(); // there is room again
    UNLOCK();
    return end != begin ? (ptrdiff_t)(tail - begin) : NBD_IO_READ;
}

// The clock's interrupt ends a sleep too, so none is longer than a millisecond.
static int uart_wait(void *context, unsigned wants, int *timeout_ms)
{
    (void)context;
    for (;;) {
        uint32_t began = board_ms;
        unsigned ready = wants & (STATE & 1 ? NBD_WANT_READ : NBD_WANT_READ | NBD_WANT_WRITE);
        LOCK();
        if (head == tail) ready &= NBD_WANT_WRITE;
        if (!ready) SLEEP();
        UNLOCK();
        if (ready || *timeout_ms == 0) return (int)ready;
        if (*timeout_ms > 0 && board_ms != began) --*timeout_ms;
    }
}

static const nbd_transport uart = {
    .flags = NBD_SHORT_IS_DRY, .send = uart_send, .recv = uart_recv, .wait = uart_wait};

/// The program ///

static nbd_client client;
static nbd_sync sync;
static nbd_slot slots[1];
static uint8_t buffer[NBD_BUFFER_MIN], block[BLOCK_SIZE];

static void check(int error, const char *what, uint32_t sector)
{
    if (!error) return;
    board_say("uart: sector %: $ $ $ $\n", sector, what, error == WRONG ? "" : nbd_strerror(error),
              nbd_detail(&client), sync.message);
    board_exit(1);
}

// Returns the first sector of the partition to write to.
static uint32_t find_partition(uint64_t disk_size)
{
    uint32_t found = 0;
    check(nbd_sync_read(&sync, block, BLOCK_SIZE, 0), "read of the partition table:", 0);
    if (block[510] != 0x55 || block[511] != 0xaa) check(WRONG, "no partition table", 0);
    for (uint32_t i = 0; i < 4; i++) {
        const uint8_t *entry = block + 446 + 16 * i;
        uint32_t at[2]; // first sector, sectors: little-endian, as this processor is
        memcpy(at, entry + 8, sizeof at);
        if (entry[4] == 0) continue;
        board_say("partition %: type %, % sectors from % on\n", i + 1, entry[4], at[1], at[0]);
        if (at[0] + (uint64_t)at[1] > disk_size / 512) check(NBD_ERR_BOUNDS, "partition:", at[0]);
        if (entry[4] == 0xda && at[1] >= PROOF_SIZE / 512 && !found) found = at[0];
    }
    if (!found) check(WRONG, "no partition of type da (218)", 0);
    return found;
}

static void prove(uint32_t sector)
{
    uint32_t at, began = board_ms, written;
    for (at = 0; at < PROOF_SIZE; at += BLOCK_SIZE) {
        for (uint32_t i = 0; i < BLOCK_SIZE; i++)
            block[i] = PATTERN(at + i);
        check(nbd_sync_write(&sync, block, BLOCK_SIZE, sector * (uint64_t)512 + at, 0),
              "write:", sector + at / 512);
    }
    if (nbd_allows(&client, NBD_FLUSH, 0)) check(nbd_sync_flush(&sync), "flush:", sector);
    written = board_ms;
    for (at = 0; at < PROOF_SIZE; at += BLOCK_SIZE) {
        check(nbd_sync_read(&sync, block, BLOCK_SIZE, sector * (uint64_t)512 + at),
              "read:", sector + at / 512);
        for (uint32_t i = 0; i < BLOCK_SIZE; i++)
            if (block[i] != PATTERN(at + i)) check(WRONG, "bytes differ", sector + at / 512);
    }
    board_say("wrote and verified % bytes at sector %: % KiB/s, % KiB/s\n", PROOF_SIZE, sector,
              RATE(written - began), RATE(board_ms - written));
}

int main(void)
{
    nbd_config config = {.slots = slots, .slot_count = 1, .buffer = buffer};
    const nbd_counters *count = nbd_count(&client);
    nbd_event event;
    config.buffer_size = sizeof buffer;
    sync.client = &client;
    sync.timeout_ms = LIMIT_MS;
    uart_start();
    check(nbd_init(&client, &config), "start:", 0);
    check(nbd_sync_connect(&sync, &uart), "handshake:", 0);
    prove(find_partition(nbd_negotiated(&client)->size));
    board_say("sent % bytes in % calls, received % bytes in % calls\n", (uint32_t)count->bytes_sent,
              (uint32_t)count->sends, (uint32_t)count->bytes_received, (uint32_t)count->receives);
    board_say_memory();
    // This stream has no end: nothing to write means that the goodbye is out.
    check(nbd_disconnect(&client), "disconnect:", 0);
    do
        (void)nbd_poll(&client, NBD_WANT_WRITE);
    while (nbd_next(&client, &event) || nbd_wants(&client) & (NBD_WANT_WRITE | NBD_WANT_NOW));
    while (STATE & 1)
        continue; // its last byte is still in the UART
    return nbd_abandon(&client);
}
