// cc.h - what lwIP asks of a compiler, beyond the C library
#define LWIP_PLATFORM_DIAG(text)
