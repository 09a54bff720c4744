// The implementation and nothing else: no include comes before nbd.h.
#define NBD_IMPLEMENTATION
#include "nbd.h"
