// The network of examples/firmware/lwip loses full packets, in both directions, so TCP
// sends them again: from memory that must be what it was.  Linked in with
// -Wl,--wrap=ethernet_start.
#include "../../examples/firmware/lwip/ethernet.h"

#define EVERY 499u // of the full packets is lost

static netif_input_fn real_input;
static netif_linkoutput_fn real_output;

err_t __real_ethernet_start(struct netif *netif);
err_t __wrap_ethernet_start(struct netif *netif);

static int lost(const struct pbuf *packet)
{
    static unsigned packets;
    return packet->tot_len > 1400 && ++packets % EVERY == 0;
}

static err_t lossy_output(struct netif *netif, struct pbuf *packet)
{
    return lost(packet) ? ERR_OK : real_output(netif, packet);
}

static err_t lossy_input(struct pbuf *packet, struct netif *netif)
{
    return lost(packet) ? ERR_MEM : real_input(packet, netif);
}

err_t __wrap_ethernet_start(struct netif *netif)
{
    err_t error = __real_ethernet_start(netif);
    real_output = netif->linkoutput;
    real_input = netif->input;
    netif->linkoutput = lossy_output;
    netif->input = lossy_input;
    return error;
}
