// A file of a program whose other file, implement.c, may have been compiled with
// other layout macros.  Exit status 0: nbd_init took the client.  3: it said
// NBD_ERR_ABI.
#include "nbd.h"

int main(void)
{
    static unsigned char buffer[NBD_BUFFER_MIN];
    static nbd_slot slot;
    static nbd_client client;
    nbd_config config = NBD_ZERO;
    int error;

    config.slots = &slot;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    error = nbd_init(&client, &config);
    if (error == NBD_ERR_ABI) {
        return 3;
    }
    return error ? 1 : 0;
}
