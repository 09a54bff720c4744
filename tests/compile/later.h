// A header of a program: its types need the declarations of nbd.h.
#ifndef LATER_H
#define LATER_H

#include "nbd.h"

typedef struct disk {
    nbd_client client;
    nbd_slot slot;
} disk;

int disk_init(disk *d, const nbd_config *config);

#endif
