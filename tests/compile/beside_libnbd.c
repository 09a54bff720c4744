// nbd_poll is the only name shared with <libnbd.h>: once that is renamed both
// fit into one file, whichever comes first.
#define NBD_STATIC
#ifdef NBD_FIRST
#include "nbd.h"
#endif
#define nbd_poll libnbd_poll
#include <libnbd.h>
#undef nbd_poll
#ifndef NBD_FIRST
#include "nbd.h"
#endif

int main(void)
{
    struct nbd_handle *peer = nbd_create();
    nbd_client client;
    nbd_config config = NBD_ZERO;
    int error = nbd_init(&client, &config);
    nbd_close(peer);
    return peer != NULL && error == NBD_ERR_ARG ? 0 : 1;
}
