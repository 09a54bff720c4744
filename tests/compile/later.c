// Declared through another header first, implemented later in the same file.
#include "later.h"

#define NBD_IMPLEMENTATION
#include "nbd.h"

int disk_init(disk *d, const nbd_config *config)
{
    return nbd_init(&d->client, config);
}
