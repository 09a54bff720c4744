// Included twice with the implementation and twice without: it is there once.
#include "nbd.h"
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "nbd.h"
#define NBD_IMPLEMENTATION
#include "nbd.h"
