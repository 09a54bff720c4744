// Copies an export with libnbd and with nbd.h in one process, block by block in
// turn: neither may take over a call of the other.
//
//   both_libnbd SOCKET FILE-BY-LIBNBD FILE-BY-NBD.H [LIBRARY]
//
// With LIBRARY the half that uses nbd.h is loaded from there; else it is linked in.
// POLLS: libnbd is driven with its nbd_poll, the one name that both have; without it
// with its blocking calls, for a program in which nbd_poll is that of nbd.h.

#define _POSIX_C_SOURCE 200112L
#include <libnbd.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "both_ours.h"

#define BLOCK 65536u

typedef struct ours {
    int (*open)(const char *path);
    uint64_t (*size)(void);
    int (*read)(void *data, size_t size, uint64_t offset);
    int (*close)(void);
} ours;

static void die(const char *what, const char *why)
{
    fprintf(stderr, "both_libnbd: error: %s: %s\n", what, why);
    exit(1);
}

#ifdef LOADED
// A pointer to an object does not convert to one to a function in ISO C; POSIX
// promises that the bytes are the same.
static void find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    if (!symbol) {
        die(name, dlerror());
    }
    memcpy(function, &symbol, sizeof symbol);
}

static ours load(const char *path)
{
    ours half;
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        die(path, dlerror());
    }
    find(library, "ours_open", &half.open);
    find(library, "ours_size", &half.size);
    find(library, "ours_read", &half.read);
    find(library, "ours_close", &half.close);
    return half;
}
#else
static ours load(const char *path)
{
    ours half = {ours_open, ours_size, ours_read, ours_close};
    (void)path;
    return half;
}
#endif

#ifdef POLLS
static int peer_read(struct nbd_handle *peer, void *data, size_t size, uint64_t offset)
{
    int64_t cookie = nbd_aio_pread(peer, data, size, offset, NBD_NULL_COMPLETION, 0);
    int done = 0;
    while (cookie >= 0 && done == 0) {
        if (nbd_poll(peer, -1) < 0) {
            return -1;
        }
        done = nbd_aio_command_completed(peer, (uint64_t)cookie);
    }
    return done == 1 ? 0 : -1;
}
#else
static int peer_read(struct nbd_handle *peer, void *data, size_t size, uint64_t offset)
{
    return nbd_pread(peer, data, size, offset, 0);
}
#endif

static void copy(struct nbd_handle *peer, const ours *half, FILE *by_peer, FILE *by_ours)
{
    static unsigned char block[BLOCK];
    uint64_t size = half->size();
    uint64_t offset;

    for (offset = 0; offset < size; offset += BLOCK) {
        size_t n = size - offset < BLOCK ? (size_t)(size - offset) : BLOCK;
        if (peer_read(peer, block, n, offset) != 0 || fwrite(block, 1, n, by_peer) != n) {
            die("copying with libnbd", nbd_get_error() ? nbd_get_error() : "cannot write");
        }
        memset(block, 0xa5, n);
        if (half->read(block, n, offset) != 0 || fwrite(block, 1, n, by_ours) != n) {
            die("copying with nbd.h", "cannot read or write");
        }
    }
}

int main(int argc, char **argv)
{
    struct nbd_handle *peer = nbd_create();
    FILE *by_peer = argc > 3 ? fopen(argv[2], "wb") : NULL;
    FILE *by_ours = argc > 3 ? fopen(argv[3], "wb") : NULL;
    ours half;

    if (!peer || !by_peer || !by_ours) {
        die("usage", "both_libnbd SOCKET FILE FILE [LIBRARY]");
    }
    half = load(argv[4]);
    if (nbd_connect_unix(peer, argv[1]) != 0) {
        die("connecting with libnbd", nbd_get_error());
    }
    if (half.open(argv[1]) != 0) {
        die("connecting with nbd.h", argv[1]);
    }
    if ((int64_t)half.size() != nbd_get_size(peer)) {
        die("size", "libnbd and nbd.h differ");
    }
    copy(peer, &half, by_peer, by_ours);
    if (half.close() != 0 || nbd_shutdown(peer, 0) != 0) {
        die("closing", "not clean");
    }
    nbd_close(peer);
    return fclose(by_peer) | fclose(by_ours) ? 1 : 0;
}
