// One half of tests/both_libnbd.c: reads an export with nbd.h.  Compiled into the
// program, or into a shared library that the program loads.

#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "both_ours.h"

static unsigned char buffer[NBD_BUFFER_GOOD];
static nbd_slot slot;
static nbd_client client;
static nbd_sync session;

int ours_open(const char *path)
{
    nbd_config config = NBD_ZERO;
    nbd_address address = NBD_ZERO;
    int error;

    config.slots = &slot;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    session.client = &client;
    session.timeout_ms = 30000;
    address.kind = NBD_ADDRESS_UNIX;
    address.path = path;
    error = nbd_init(&client, &config);
    return error ? error : nbd_sync_open(&session, &address);
}

uint64_t ours_size(void)
{
    return nbd_negotiated(&client)->size;
}

int ours_read(void *data, size_t size, uint64_t offset)
{
    return nbd_sync_read(&session, data, size, offset);
}

int ours_close(void)
{
    return nbd_sync_close(&session);
}
