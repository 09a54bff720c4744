// lwipopts.h - lwIP without operating system, TCP over IPv4 only
#define NO_SYS 1
#define SYS_LIGHTWEIGHT_PROT 0 // lwIP is called from the main loop only, never from interrupts
#define LWIP_SOCKET 0
#define LWIP_NETCONN 0
#define LWIP_UDP 0
#define LWIP_STATS 0
#define LWIP_NOASSERT 1

// For your board: what RAM you have.  The window must not exceed what the chip holds.
#define MEM_ALIGNMENT 4
#define MEM_SIZE 8192 // headers of what is not acknowledged yet
#define PBUF_POOL_SIZE 8
#define TCP_MSS 1460
#define TCP_WND (4 * TCP_MSS)
#define TCP_SND_BUF (8 * TCP_MSS)
#define TCP_SND_QUEUELEN 32
#define MEMP_NUM_TCP_SEG TCP_SND_QUEUELEN
#define MEMP_NUM_PBUF TCP_SND_QUEUELEN // payload that is not copied
