// memory.c - heap that a connected handle of libnbd takes
//
//     build/bench/memory URI
//
// Prints heap=BYTES, the mean of 100 handles.
#include <libnbd.h>
#include <malloc.h>
#include <stdio.h>

#define HANDLES 100

static struct nbd_handle *connect_to(const char *uri)
{
    struct nbd_handle *handle = nbd_create();
    if (handle && !nbd_connect_uri(handle, uri)) return handle;
    fprintf(stderr, "memory: %s: %s\n", uri, nbd_get_error());
    return NULL;
}

int main(int argc, char **argv)
{
    struct nbd_handle *handles[HANDLES], *first;
    size_t before, after;
    int i;
    if (argc != 2) {
        fputs("usage: memory URI\n", stderr);
        return 2;
    }
    first = connect_to(argv[1]); // what is allocated once, for all of them, is not counted
    if (!first) return 1;
    before = mallinfo2().uordblks;
    for (i = 0; i < HANDLES; i++) {
        handles[i] = connect_to(argv[1]);
        if (!handles[i]) return 1;
    }
    after = mallinfo2().uordblks;
    for (i = 0; i < HANDLES; i++)
        nbd_close(handles[i]);
    nbd_close(first);
    return printf("heap=%lu\n", (unsigned long)((after - before) / HANDLES)) < 0;
}
