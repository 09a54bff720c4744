// What tests/both_ours.c offers to tests/both_libnbd.c; each returns 0 or an error
// of nbd.h.
#ifndef BOTH_OURS_H
#define BOTH_OURS_H

#include <stddef.h>
#include <stdint.h>

int ours_open(const char *path);
uint64_t ours_size(void);
int ours_read(void *data, size_t size, uint64_t offset);
int ours_close(void);

#endif
