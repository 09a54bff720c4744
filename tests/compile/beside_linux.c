// The kernel's <linux/nbd.h> shares no name, whichever comes first.
#define NBD_IMPLEMENTATION
#ifdef NBD_FIRST
#include "nbd.h"
#endif
#include <linux/nbd.h>
#ifndef NBD_FIRST
#include "nbd.h"
#endif

// Names of both are used, so that none can have hidden the other's.
int main(void)
{
    nbd_op op = NBD_ZERO;
    struct nbd_request request;
    op.command = NBD_READ;
    request.magic = NBD_REQUEST_MAGIC;
    return op.command == 1 && request.magic == NBD_REQUEST_MAGIC && NBD_CMD_READ == 0 ? 0 : 1;
}
