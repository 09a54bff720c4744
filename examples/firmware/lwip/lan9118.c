// lan9118.c - the Ethernet chip of QEMU's mps2-an385
//
// For your board: all of it, or the driver of your vendor.
#include "../board.h"
#include "ethernet.h"
#include "netif/ethernet.h"
#include "lwip/etharp.h"

#define CHIP(offset) REGISTER(0x40200000 + (offset))
#define RX_DATA CHIP(0x00)
#define TX_DATA CHIP(0x20)
#define RX_STATUS CHIP(0x40)
#define TX_STATUS CHIP(0x48)
#define IRQ_CONFIG CHIP(0x54)
#define IRQ_STATUS CHIP(0x58)
#define IRQ_ENABLE CHIP(0x5c)
#define TX_CONFIG CHIP(0x70)
#define HW_CONFIG CHIP(0x74)
#define RX_INFO CHIP(0x7c)
#define TX_INFO CHIP(0x80)
#define MAC_COMMAND CHIP(0xa4)
#define MAC_DATA CHIP(0xa8)

#define IRQ_RX 8u // bit: a packet has come

static uint32_t frame[1536 / 4];

// Only wakes the processor; ethernet_poll lets the next one through.
void board_interrupt(void)
{
    IRQ_ENABLE = 0;
}

static void set_mac(uint32_t number, uint32_t value)
{
    while (MAC_COMMAND >> 31)
        continue;
    MAC_DATA = value;
    MAC_COMMAND = 0x80000000u | number;
}

// Nothing of `chain` is in use once this has returned.
static err_t transmit(struct netif *netif, struct pbuf *chain)
{
    uint32_t i, size = pbuf_copy_partial(chain, frame, sizeof frame, 0);
    (void)netif;
    TX_DATA = 0x3000u | size; // first and last part of a packet
    TX_DATA = size;
    for (i = 0; i < (size + 3) / 4; i++)
        TX_DATA = frame[i];
    while (TX_INFO >> 16 & 0xff)
        (void)TX_STATUS;
    return ERR_OK;
}

int ethernet_waits(void)
{
    return (RX_INFO >> 16 & 0xff) != 0;
}

void ethernet_poll(struct netif *netif)
{
    IRQ_STATUS = IRQ_RX;
    while (ethernet_waits()) {
        uint32_t status = RX_STATUS, size = status >> 16 & 0x3fff, i;
        struct pbuf *packet;
        for (i = 0; i < (size + 3) / 4; i++)
            frame[i % (sizeof frame / 4)] = RX_DATA;
        if (status & 0x8000 || size < 4 || size > sizeof frame) continue;
        packet = pbuf_alloc(PBUF_RAW, (u16_t)(size - 4), PBUF_POOL); // without the checksum
        if (!packet) continue;                                       // TCP sends it again
        (void)pbuf_take(packet, frame, (u16_t)(size - 4));
        if (netif->input(packet, netif) != ERR_OK) (void)pbuf_free(packet);
    }
    IRQ_ENABLE = IRQ_RX;
}

err_t ethernet_start(struct netif *netif)
{
    static const uint8_t address[6] = {0x52, 0x54, 0x00, 0x12, 0x34, 0x56};
    HW_CONFIG = 1; // reset
    while (HW_CONFIG & 1)
        continue;
    HW_CONFIG = 0x00050000; // 5 KiB for sending, 10 KiB for receiving
    set_mac(2, address[4] | (uint32_t)address[5] << 8);
    set_mac(3, address[0] | (uint32_t)address[1] << 8 | (uint32_t)address[2] << 16 |
                   (uint32_t)address[3] << 24);
    set_mac(1, 0x0c); // receive, send
    TX_CONFIG = 2;    // on
    IRQ_CONFIG = 0x111;
    IRQ_ENABLE = IRQ_RX;
    NVIC_ENABLE = 1u << 13;
    netif->hwaddr_len = sizeof address;
    SMEMCPY(netif->hwaddr, address, sizeof address);
    netif->mtu = 1500;
    netif->flags =
        NETIF_FLAG_BROADCAST | NETIF_FLAG_ETHARP | NETIF_FLAG_ETHERNET | NETIF_FLAG_LINK_UP;
    netif->output = etharp_output;
    netif->linkoutput = transmit;
    return ERR_OK;
}
