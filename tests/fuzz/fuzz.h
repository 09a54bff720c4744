// What the fuzz targets share: reading the input, memory of an exact size, rules.
//
// A target is one function, LLVMFuzzerTestOneInput: libFuzzer calls it, and so does the
// driver that comes with AFL++ (persistent mode, input in shared memory).  Without either,
// -DFUZZ_MAIN makes a program of it that replays the files it is given.
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// A rule that is broken ends the program: the fuzzers call that a crash.
#define MUST(x) \
    do { \
        if (!(x)) { \
            fprintf(stderr, "rule broken, %s:%d: %s\n", __FILE__, __LINE__, #x); \
            abort(); \
        } \
    } while (0)

// Bytes that leave the client must all have been set: MSan alone can tell.
#ifdef __has_feature
#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define MUST_BE_SET(memory, size) __msan_check_mem_is_initialized(memory, size)
#endif
#endif
#ifndef MUST_BE_SET
#define MUST_BE_SET(memory, size) ((void)(memory), (void)(size))
#endif

static const uint8_t *input;
static size_t input_left;

static inline unsigned byte(void)
{
    if (input_left == 0) return 0;
    input_left--;
    return *input++;
}

static inline unsigned pick(unsigned n)
{
    return byte() % n;
}

static inline uint32_t wide(void)
{
    uint32_t high = byte();
    return high << 8 | byte();
}

// The sanitizers know where it ends, to the byte.
static inline void *bytes(size_t size)
{
    void *p = malloc(size ? size : 1);
    MUST(p);
    return p;
}

#ifdef FUZZ_MAIN
int main(int argc, char **argv)
{
    static uint8_t data[1 << 16];
    int i;
    for (i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        size_t size;
        if (!file) {
            perror(argv[i]);
            return 1;
        }
        size = fread(data, 1, sizeof data, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%d inputs\n", argc - 1);
    return 0;
}
#endif

#endif
