#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include <stdio.h>

int main(int argc, char **argv)
{
    static unsigned char buffer[NBD_BUFFER_MIN], sector[512];
    static nbd_slot slots[1];
    static nbd_client client;
    char text[1024];
    nbd_config config = NBD_ZERO;
    nbd_sync sync = NBD_ZERO;
    nbd_uri uri;
    const char *where = argc > 1 ? argv[1] : "nbd://localhost";
    int error = nbd_uri_parse(&uri, where, text, sizeof text);

    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    config.flags = uri.config_flags;
    sync.client = &client;
    sync.timeout_ms = 5000;
    if (!error) error = nbd_init(&client, &config);
    if (!error) error = nbd_sync_open(&sync, &uri.address);
    if (!error) error = nbd_sync_read(&sync, sector, sizeof sector, 0);
    nbd_sync_close(&sync);
    if (error) {
        fprintf(stderr, "hello: %s: %s%s%s%s\n", where, nbd_strerror(error),
                *uri.detail || *sync.message ? ": " : "", uri.detail, sync.message);
        return 1;
    }
    return fwrite(sector, 1, sizeof sector, stdout) != sizeof sector || fflush(stdout);
}
