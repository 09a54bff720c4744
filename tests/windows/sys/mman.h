// What the tests use of <sys/mman.h>, for Windows: memory whose pages may be shut.
#ifndef WINDOWS_MMAN_H
#define WINDOWS_MMAN_H

#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>

#define PROT_NONE 0
#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_PRIVATE 0
#define MAP_ANONYMOUS 0
#define MAP_FAILED NULL

static inline DWORD windows_pages(int protection)
{
    return protection & PROT_WRITE  ? PAGE_READWRITE
           : protection & PROT_READ ? PAGE_READONLY
                                    : PAGE_NOACCESS;
}

static inline void *mmap(void *at, size_t size, int protection, int flags, int fd, long long offset)
{
    (void)flags;
    (void)fd;
    (void)offset;
    return VirtualAlloc(at, size, MEM_RESERVE | MEM_COMMIT, windows_pages(protection));
}

static inline int mprotect(void *at, size_t size, int protection)
{
    DWORD former;

    return VirtualProtect(at, size, windows_pages(protection), &former) ? 0 : -1;
}

#endif
