// ethernet.h - lwIP's network interface, driven by polling and an interrupt that wakes
#include "lwip/netif.h"

err_t ethernet_start(struct netif *netif); // for netif_add
int ethernet_waits(void);                  // a packet has come: call ethernet_poll
void ethernet_poll(struct netif *netif);   // hands what has come to netif->input
