// spi.h - a transport over a bus where the master starts every transfer, and both sides send a
// frame of 32 bytes in it at the same time, as SPI does.
//
//     byte 0   how many bytes of the stream are in this frame, 0 to 30
//     byte 1   how many the sender of this frame takes in the next one, 0 to 30
//     then     the bytes; the rest of the frame means nothing
//
// A slave that is not there leaves the line high: 255 bytes, which no frame has.  The stream has
// no end; see nbd_disconnect for what to do then.
#ifndef TRANSPORTS_SPI_H
#define TRANSPORTS_SPI_H

#include <string.h>

enum { SPI_FRAME = 32, SPI_BYTES = SPI_FRAME - 2, SPI_ROOM = 2 * SPI_BYTES };

typedef struct spi {
    // The driver's: one transfer, of a millisecond at most.  Returns 0, or not: it failed.
    int (*exchange)(void *bus, const unsigned char *out, unsigned char *in);
    void *bus;
    unsigned char waiting[SPI_ROOM]; // what came and was not asked for yet
    unsigned fill;                   // bytes of it
    unsigned promised;               // bytes that the slave may send in the next transfer
    unsigned room;                   // bytes that the slave takes in it
    nbd_transport transport;
} spi;

static inline unsigned spi_least(size_t a, size_t b)
{
    return (unsigned)(a < b ? a : b);
}

// Sends up to a frame of the pieces.  Returns how many bytes went out, or NBD_IO_ERROR.
static inline ptrdiff_t spi_transfer(spi *s, const nbd_iovec *iov, unsigned count)
{
    unsigned char out[SPI_FRAME] = {0}, in[SPI_FRAME];
    unsigned i, part, sent = 0, promise;

    for (i = 0; i < count; i++) {
        part = spi_least(iov[i].size, s->room - sent);
        memcpy(out + 2 + sent, iov[i].base, part);
        sent += part;
    }
    // What was promised before may come in this frame, so it is taken off.
    promise = spi_least(SPI_BYTES, SPI_ROOM - s->fill - s->promised);
    out[0] = (unsigned char)sent;
    out[1] = (unsigned char)promise;
    if (s->exchange(s->bus, out, in) || in[0] > s->promised || in[1] > SPI_BYTES) {
        return NBD_IO_ERROR;
    }
    memcpy(s->waiting + s->fill, in + 2, in[0]);
    s->fill += in[0];
    s->promised = promise;
    s->room = in[1];
    return (ptrdiff_t)sent;
}

static inline ptrdiff_t spi_send(void *context, const nbd_iovec *iov, unsigned count,
                                 unsigned flags)
{
    (void)flags;
    return spi_transfer((spi *)context, iov, count); // 0: the slave took none
}

// The slave cannot call: each receive that finds nothing asks it.
static inline ptrdiff_t spi_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    spi *s = (spi *)context;
    unsigned part;

    (void)count;
    if (s->fill == 0 && spi_transfer(s, NULL, 0) < 0) return NBD_IO_ERROR;
    if (s->fill == 0) return NBD_IO_READ;
    part = spi_least(iov->size, s->fill);
    memcpy(iov->base, s->waiting, part);
    s->fill -= part;
    memmove(s->waiting, s->waiting + part, s->fill);
    return (ptrdiff_t)part;
}

static inline int spi_wait(void *context, unsigned wants, int *timeout_ms)
{
    spi *s = (spi *)context;
    unsigned ready;

    for (;;) {
        ready = (s->fill > 0 ? NBD_WANT_READ : 0u) | (s->room > 0 ? NBD_WANT_WRITE : 0u);
        if ((ready & wants) || *timeout_ms == 0) return (int)(ready & wants);
        if (spi_transfer(s, NULL, 0) < 0) return NBD_IO_ERROR;
        if (*timeout_ms > 0) --*timeout_ms;
    }
}

static inline void spi_init(spi *s, int (*exchange)(void *, const unsigned char *, unsigned char *),
                            void *bus)
{
    const nbd_transport transport = {
        .context = s,
        .send = spi_send,
        .recv = spi_recv,
        .wait = spi_wait,
    };

    memset(s, 0, sizeof *s); // nothing is promised: the first transfer only tells the rooms
    s->exchange = exchange;
    s->bus = bus;
    s->transport = transport;
}

#endif
