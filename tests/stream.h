// The bytes between a blocking client and a server in process: two buffers, and the hooks of
// the transport that move them.  Include nbd.h and check.h before it, and define serve().
#ifndef NBD_TESTS_STREAM_H
#define NBD_TESTS_STREAM_H

enum { STREAM = 1 << 20 };

// How far the server has come; a program may have more stages behind these.
enum { STAGE_FLAGS, STAGE_OPTIONS, STAGE_TRANSMISSION, STAGE_OVER };

static struct stream {
    unsigned char in[STREAM], out[STREAM];
    size_t in_size, in_done, out_size, out_done;
    int stage;
} stream;

// The program's: takes what has arrived whole, and puts its answers.
static void serve(void);

static inline void put(uint64_t value, unsigned width)
{
    CHECK(stream.out_size + width <= STREAM);
    while (width--)
        stream.out[stream.out_size++] = (unsigned char)(value >> (8 * width));
}

static inline void put_text(const char *text)
{
    while (*text)
        put((unsigned char)*text++, 1);
}

static inline uint64_t get(size_t at, unsigned width)
{
    uint64_t value = 0;

    CHECK(stream.in_done + at + width <= stream.in_size);
    while (width--)
        value = value << 8 | stream.in[stream.in_done + at++];
    return value;
}

static inline size_t arrived(void)
{
    return stream.in_size - stream.in_done;
}

static inline void took(size_t size)
{
    stream.in_done += size;
    if (stream.in_done == stream.in_size) stream.in_done = stream.in_size = 0;
}

static inline void put_greeting(void)
{
    put(UINT64_C(0x4E42444D41474943), 8);
    put(UINT64_C(0x49484156454F5054), 8);
    put(3, 2);
}

static inline void option_reply(uint64_t option, uint32_t type, size_t size)
{
    put(UINT64_C(0x0003E889045565A9), 8);
    put(option, 4);
    put(type, 4);
    put(size, 4);
}

static inline ptrdiff_t hook_send(void *context, const nbd_iovec *iov, unsigned count,
                                  unsigned flags)
{
    size_t total = 0;
    unsigned i;

    (void)context;
    (void)flags;
    for (i = 0; i < count; i++) {
        CHECK(iov[i].size <= STREAM - stream.in_size);
        memcpy(stream.in + stream.in_size, iov[i].base, iov[i].size);
        stream.in_size += iov[i].size;
        total += iov[i].size;
    }
    serve();
    return (ptrdiff_t)total;
}

// Into the first piece, at most `most` bytes.
static inline ptrdiff_t stream_recv(const nbd_iovec *iov, size_t most)
{
    size_t left = stream.out_size - stream.out_done, size = iov[0].size;

    if (left == 0) return stream.stage == STAGE_OVER ? NBD_IO_EOF : NBD_IO_READ;
    if (size > left) size = left;
    if (size > most) size = most;
    memcpy(iov[0].base, stream.out + stream.out_done, size);
    stream.out_done += size;
    if (stream.out_done == stream.out_size) stream.out_done = stream.out_size = 0;
    return (ptrdiff_t)size;
}

// The server has answered all that it was sent: who waits for more waits for ever.
static inline int stream_wait(unsigned wants, int *timeout_ms)
{
    if (stream.out_done < stream.out_size || stream.stage == STAGE_OVER) return (int)wants;
    if (wants & NBD_WANT_WRITE) return NBD_WANT_WRITE;
    if (*timeout_ms > 0) *timeout_ms = 0;
    return 0;
}

#endif
