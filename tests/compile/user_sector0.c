// A small tool: writes the first 512 bytes of an export to stdout.
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
    int error = nbd_uri_parse(&uri, argc > 1 ? argv[1] : "nbd://localhost", text, sizeof text);

    config.flags = uri.config_flags; // nbds: fails rather than goes on in clear
    config.slots = slots;
    config.slot_count = 1;
    config.buffer = buffer;
    config.buffer_size = sizeof buffer;
    config.export_name = uri.export_name;
    sync.client = &client;
    sync.timeout_ms = 5000;
    if (!error) error = nbd_init(&client, &config);
    if (!error) error = nbd_sync_open(&sync, &uri.address);
    if (!error) error = nbd_sync_read(&sync, sector, sizeof sector, 0);
    if (nbd_sync_close(&sync) && !error) error = NBD_ERR_CLOSED;
    if (error)
        fprintf(stderr, "sector0: %s %s%s\n", nbd_strerror(error), uri.detail, sync.message);
    else if (fwrite(sector, sizeof sector, 1, stdout) != 1 || fflush(stdout))
        error = NBD_EIO;
    return error != 0;
}
