// A file that only uses the declarations.
#include "nbd.h"

int declare(nbd_client *client, const nbd_config *config);

int declare(nbd_client *client, const nbd_config *config)
{
    return nbd_init(client, config);
}
