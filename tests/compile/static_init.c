// One function of a static copy is called: the others must not be warned about.
#define NBD_STATIC
#include "nbd.h"

int main(void)
{
    nbd_client client;
    nbd_config config = NBD_ZERO;
    return nbd_init(&client, &config) == NBD_ERR_ARG ? 0 : 1;
}
