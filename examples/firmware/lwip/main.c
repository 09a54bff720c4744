// main.c - an NBD disk over TCP with lwIP (raw calls, no operating system), on a Cortex-M3
//
//     tests/lwip.sh # fetches the sources of lwIP
//     examples/firmware/build.sh lwip build/lwip.elf
//     nbdkit -f -i 127.0.0.1 memory 8M &
//     qemu-system-arm -M mps2-an385 -display none -monitor none -nodefaults -nic user
//         -semihosting-config enable=on,target=native,arg=lwip,arg=10809 -kernel build/lwip.elf
//
// Writes and verifies the first 8 MiB of the export "scratch": what is there is lost.
//
// For your board: ../board.c, ../board.ld, lan9118.c, lwipopts.h, and here SLOTS, BLOCK_SIZE,
// and the addresses in `start`.
//
// lwIP calls back, so the engine is driven by the calls of "Own I/O":
//   - What comes in is copied from lwIP's packets to where nbd_incoming wants it, and
//     tcp_recved opens the window by what was taken.
//   - What goes out is not copied: lwIP keeps pointers to it until the server has
//     acknowledged it (tcp_sent), and only then nbd_sent says so.  Until then it is on
//     offer, and stays at the head of each nbd_outgoing: `queued` bytes are passed over.
//     Acknowledgements come for a part of the offer.  That ends the offer, and the rest is
//     offered again at once; but only payload is sure to lie where it was: it is the
//     program's, until its DONE, which does not come before its last byte is acknowledged,
//     also if the server answers early.  So the headers are copied, and no payload is.
#define NBD_NO_SOCKETS
#define NBD_IMPLEMENTATION
#include "../board.h"
#include "ethernet.h"
#include "lwip/init.h"
#include "lwip/sys.h"
#include "lwip/tcp.h"
#include "lwip/timeouts.h"
#include "nbd.h"

#define SLOTS 4u
#define BLOCK_SIZE 8192u // a multiple of the server's minimum_block
#define PROOF_SIZE (8u << 20)
#define WRONG 1000 // no error of nbd.h: the rest of the line says what it is

#ifndef LIMIT_MS
#define LIMIT_MS 10000u // of silence
#endif

static nbd_client client;
static nbd_slot slots[SLOTS];
static uint8_t buffer[128 * SLOTS]; // a quarter of it takes the headers of all slots
static uint32_t blocks[SLOTS][BLOCK_SIZE / 4];
static char message[80]; // the server's
static int over;         // the session has ended well
static struct {
    uint32_t command, next;
} job; // `next` is the offset of the block to issue

static struct netif netif;
static struct tcp_pcb *pcb; // NULL: none, or lost
static const char *why = "", *on_reset = "connection refused";
static size_t queued; // bytes that lwIP has and the server has not acknowledged

/// The program ///

static void check(int error, const char *what, uint64_t offset)
{
    if (!error) return;
    board_say("lwip: sector %: $ $ $ $ $\n", (uint32_t)(offset / 512), what,
              error == WRONG ? "" : nbd_strerror(error), nbd_detail(&client), message, why);
    // This makes lwIP let go of all memory that is on offer.  A program that goes on from here,
    // with nbd_abandon and a new connection, returns ERR_ABRT from lwIP's callback.
    if (pcb) tcp_abort(pcb);
    board_exit(1);
}

static void issue(uint32_t command, uint32_t *block, uint32_t offset)
{
    nbd_op op = NBD_ZERO;
    op.command = command;
    op.offset = offset;
    op.size = block ? BLOCK_SIZE : 0;
    op.buffer = command == NBD_READ ? block : NULL;
    op.data = command == NBD_WRITE ? block : NULL;
    op.user = block;
    check(nbd_issue(&client, &op, NULL), command == NBD_READ ? "read:" : "write:", offset);
}

static uint32_t pattern(uint32_t at)
{
    return (at ^ 0x5eed5eedu) * 2654435761u;
}

static void issue_next(uint32_t *block)
{
    uint32_t i, at = job.next;
    if (at == PROOF_SIZE) return;
    job.next += BLOCK_SIZE;
    for (i = 0; job.command == NBD_WRITE && i < BLOCK_SIZE / 4; i++)
        block[i] = pattern(at + 4 * i);
    issue(job.command, block, at);
}

static void done(const nbd_event *e)
{
    static const char *const names[] = {"", "read:", "write:", "flush:"};
    uint32_t i, *block = e->user;
    check(e->error, names[e->command], e->offset);
    if (!block) return;
    for (i = 0; e->command == NBD_READ && i < BLOCK_SIZE / 4; i++)
        if (block[i] != pattern((uint32_t)e->offset + 4 * i))
            check(WRONG, "bytes differ", e->offset);
    issue_next(block);
}

static void take_events(void)
{
    nbd_event e;
    while (nbd_next(&client, &e)) {
        if (e.type == NBD_EVENT_TEXT && e.text_kind == NBD_TEXT_MESSAGE)
            (void)nbd_escape(message, sizeof message, e.text, e.text_size);
        if (e.type == NBD_EVENT_DONE) done(&e);
        if (e.type == NBD_EVENT_CLOSED) check(e.error, "session:", job.next);
        over |= e.type == NBD_EVENT_CLOSED;
    }
}

/// Between lwIP and the engine ///

static void push(void)
{
    nbd_iovec iov[2 * SLOTS + 2]; // a header and a payload each, and what is in front
    size_t skip = queued;
    unsigned i, more, count = nbd_outgoing(&client, iov, sizeof iov / sizeof iov[0], &more);
    for (i = 0; i < count; i++) {
        const uint8_t *from = iov[i].base;
        size_t passed = LWIP_MIN(skip, iov[i].size), size = iov[i].size - passed;
        size_t room = LWIP_MIN(size, tcp_sndbuf(pcb));
        int ours = from >= buffer && from < buffer + sizeof buffer;
        int flags = ours ? TCP_WRITE_FLAG_COPY : 0;
        skip -= passed;
        if (room < size || i + 1 < count || more) flags |= TCP_WRITE_FLAG_MORE;
        if (size == 0) continue;
        if (room == 0 || tcp_write(pcb, from + passed, (u16_t)room, (u8_t)flags)) break;
        queued += room;
        if (room < size) break;
    }
    (void)tcp_output(pcb);
    // With nothing left behind the goodbye the stream is ended.
    if (count == 0 && nbd_phase(&client) == NBD_PHASE_CLOSING && !nbd_count(&client)->in_flight)
        (void)tcp_shutdown(pcb, 0, 1);
}

static void end_input(ptrdiff_t result)
{
    nbd_iovec piece;
    if (nbd_incoming(&client, &piece, 1)) (void)nbd_received(&client, result);
}

static err_t on_sent(void *context, struct tcp_pcb *of, u16_t size)
{
    (void)context, (void)of;
    queued -= size;
    check(nbd_sent(&client, size), "acknowledgement:", 0);
    push(); // the rest is on offer again before any reply to it is seen
    return ERR_OK;
}

static err_t on_received(void *context, struct tcp_pcb *of, struct pbuf *packet, err_t error)
{
    nbd_iovec piece;
    size_t taken = 0;
    (void)context, (void)error;
    if (!packet) end_input(NBD_IO_EOF);
    // Every event is taken at once, so the engine has room as long as there is a session.
    while (packet && taken < packet->tot_len && nbd_incoming(&client, &piece, 1)) {
        u16_t part = (u16_t)LWIP_MIN(piece.size, packet->tot_len - taken);
        (void)pbuf_copy_partial(packet, piece.base, part, (u16_t)taken);
        check(nbd_received(&client, part), "input:", 0);
        taken += part;
        tcp_recved(of, part);
        take_events();
    }
    if (packet) (void)pbuf_free(packet);
    return ERR_OK;
}

// lwIP has freed the connection already, and let go of what was queued.
static void on_error(void *context, err_t error)
{
    (void)context;
    why = error == ERR_RST ? on_reset : "no answer";
    pcb = NULL;
    queued = 0;
    (void)nbd_sent(&client, NBD_IO_ERROR); // it returns NBD_ERR_STATE if nothing is on offer
    end_input(NBD_IO_ERROR);
}

static err_t on_connected(void *context, struct tcp_pcb *of, err_t error)
{
    (void)context, (void)of;
    on_reset = "connection reset";
    return error;
}

// lwIP's clock.
u32_t sys_now(void)
{
    return board_ms;
}

// One turn of the main loop: what has come, what goes out, then sleep until an interrupt.
// nbd.h knows no clock: who wants a limit compares the counters.
static void turn(void)
{
    static uint32_t moved_at;
    const nbd_counters *count = nbd_count(&client);
    uint64_t moved = count->bytes_sent + count->bytes_received;
    ethernet_poll(&netif);
    sys_check_timeouts();
    take_events();
    if (pcb) push();
    if (count->bytes_sent + count->bytes_received != moved) moved_at = board_ms;
    check(board_ms - moved_at > LIMIT_MS ? NBD_ERR_TIMEOUT : 0, "session:", job.next);
    LOCK();
    if (!ethernet_waits()) SLEEP();
    UNLOCK();
}

/// Start ///

// The number behind the program's name on the debugger's command line: the port.
static u16_t port_asked_for(void)
{
    static char text[32];
    struct {
        char *text;
        uint32_t size;
    } line = {text, sizeof text};
    const char *p = text;
    u16_t port = 0;
    board_debugger(0x15, &line);
    while (*p && *p++ != ' ')
        continue;
    for (; *p >= '0' && *p <= '9'; p++)
        port = (u16_t)(10 * port + *p - '0');
    return port ? port : 10809;
}

static void start(void)
{
    ip4_addr_t address, mask, router, server;
    IP4_ADDR(&address, 10, 0, 2, 15);
    IP4_ADDR(&mask, 255, 255, 255, 0);
    IP4_ADDR(&router, 10, 0, 2, 2);
    IP4_ADDR(&server, 10, 0, 2, 2); // QEMU's name for the host
    lwip_init();
    pcb = tcp_new();
    if (!netif_add(&netif, &address, &mask, &router, NULL, ethernet_start, netif_input) || !pcb)
        check(NBD_ERR_CONNECT, "start:", 0);
    netif_set_default(&netif);
    netif_set_up(&netif);
    tcp_nagle_disable(pcb); // the engine joins what goes out together
    tcp_sent(pcb, on_sent);
    tcp_recv(pcb, on_received);
    tcp_err(pcb, on_error);
    check(tcp_connect(pcb, &server, port_asked_for(), on_connected) ? NBD_ERR_CONNECT : 0,
          "start:", 0);
}

// Returns the milliseconds that it took.
static uint32_t run(uint32_t command)
{
    uint32_t i, began = board_ms;
    job.command = command;
    job.next = 0;
    for (i = 0; i < SLOTS; i++)
        issue_next(blocks[i]);
    while (nbd_count(&client)->in_flight > 0)
        turn();
    if (command == NBD_WRITE && nbd_allows(&client, NBD_FLUSH, 0)) issue(NBD_FLUSH, NULL, 0);
    while (nbd_count(&client)->in_flight > 0)
        turn();
    return board_ms - began + 1;
}

// In tenths of MiB/s, since this processor has no floating point.
static void say_rate(const char *what, uint32_t ms)
{
    uint32_t rate = PROOF_SIZE / 1024 * 1000 / ms * 10 / 1024;
    board_say("$ % MiB in % ms: %.% MiB/s\n", what, PROOF_SIZE >> 20, ms, rate / 10, rate % 10);
}

int main(void)
{
    nbd_config config = {.slots = slots, .slot_count = SLOTS, .buffer = buffer};
    const nbd_counters *count = nbd_count(&client);
    config.buffer_size = sizeof buffer;
    config.export_name = "scratch";
    check(nbd_init(&client, &config), "start:", 0);
    check(nbd_connect(&client, NULL), "start:", 0);
    start();
    while (nbd_phase(&client) != NBD_PHASE_TRANSMISSION)
        turn();
    say_rate("wrote", run(NBD_WRITE));
    say_rate("verified", run(NBD_READ));
    check(nbd_disconnect(&client), "disconnect:", 0);
    while (!over)
        turn();
    if (pcb) (void)tcp_close(pcb);
    board_say("sent % bytes in % calls, received % bytes in % calls, % in flight at most\n",
              (uint32_t)count->bytes_sent, (uint32_t)count->sends, (uint32_t)count->bytes_received,
              (uint32_t)count->receives, (uint32_t)count->in_flight_max);
    board_say_memory();
    return 0;
}
