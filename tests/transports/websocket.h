// websocket.h - a transport inside the frames of a WebSocket (RFC 6455), client side, over a
// non-blocking stream socket on which the HTTP upgrade has been done.
//
// What goes out is framed and masked, so it is copied.  What comes may be cut into frames
// anywhere, with control frames between them.  A ping is answered by the next hook that finds
// room: a full socket means that the server has something to answer, so there is a next one.
#ifndef TRANSPORTS_WEBSOCKET_H
#define TRANSPORTS_WEBSOCKET_H

#include <string.h>
#include <sys/socket.h>

#include "wait.h"

enum {
    WEBSOCKET_BINARY = 2,
    WEBSOCKET_CLOSE = 8,
    WEBSOCKET_PING = 9,
    WEBSOCKET_PONG = 10,
    WEBSOCKET_CONTROL = 125, // most bytes that a control frame carries
    WEBSOCKET_PART = 4096    // bytes of the stream in a frame of ours
};

typedef struct websocket {
    int fd;
    uint32_t (*random)(void); // for masks: must not be predictable, see chapter 10.3 of the RFC
    nbd_transport transport;
    // The frame that is going out, whole, and how much of it is gone.
    unsigned char out[8 + WEBSOCKET_PART];
    size_t out_size, out_sent;
    size_t taken; // bytes of the stream in it that the client does not know to be sent
    unsigned char pong[WEBSOCKET_CONTROL];
    size_t pong_size;
    int pong_due, close_sent;
    // The frame that is coming in.
    unsigned char head[10];
    size_t head_size;
    int in_payload; // the head is whole
    uint64_t left;  // bytes of the payload
    unsigned char control[WEBSOCKET_CONTROL];
    size_t control_size;
    int closed; // a close frame came
} websocket;

/// Out ///

// Returns 0 once nothing is left of the frame, or NBD_IO_WRITE, NBD_IO_ERROR.
static inline ptrdiff_t websocket_flush(websocket *w)
{
    while (w->out_sent < w->out_size) {
        ssize_t n = send(w->fd, w->out + w->out_sent, w->out_size - w->out_sent, MSG_NOSIGNAL);

        if (n < 0) return wait_result(n, NBD_IO_WRITE);
        w->out_sent += (size_t)n;
    }
    return 0;
}

// Puts a frame behind one that is gone.  Returns how many bytes of the pieces are in it.
static inline size_t websocket_frame(websocket *w, int opcode, const nbd_iovec *iov, unsigned count)
{
    uint32_t mask = w->random();
    unsigned char *data = w->out + 8;
    size_t size = 0, k;
    unsigned i;

    for (i = 0; i < count; i++) {
        size_t part = iov[i].size < WEBSOCKET_PART - size ? iov[i].size : WEBSOCKET_PART - size;

        memcpy(data + size, iov[i].base, part);
        size += part;
    }
    memcpy(w->out + 4, &mask, 4);
    for (k = 0; k < size; k++)
        data[k] ^= w->out[4 + k % 4];
    // The short form of the length leaves the first two bytes unused.
    w->out_sent = size <= WEBSOCKET_CONTROL ? 2 : 0;
    w->out[w->out_sent] = (unsigned char)(0x80 | opcode);
    w->out[w->out_sent + 1] = (unsigned char)(0x80 | (w->out_sent ? size : 126));
    if (!w->out_sent) {
        w->out[2] = (unsigned char)(size >> 8);
        w->out[3] = (unsigned char)size;
    }
    w->out_size = 8 + size;
    return size;
}

// Flushes, and answers a ping.
static inline ptrdiff_t websocket_answer(websocket *w)
{
    ptrdiff_t result = websocket_flush(w);
    nbd_iovec echo;

    if (result || !w->pong_due) return result;
    echo.base = w->pong;
    echo.size = w->pong_size;
    websocket_frame(w, WEBSOCKET_PONG, &echo, 1);
    w->pong_due = 0;
    return websocket_flush(w);
}

// Bytes count as sent when their frame is gone, not when it is made: nobody else would send
// the rest.  Until then the client comes back with the same bytes, which are not looked at.
static inline ptrdiff_t websocket_send(void *context, const nbd_iovec *iov, unsigned count,
                                       unsigned flags)
{
    websocket *w = (websocket *)context;
    ptrdiff_t result = websocket_answer(w);
    size_t sent;

    (void)flags;
    if (result == 0 && w->taken == 0) {
        w->taken = websocket_frame(w, WEBSOCKET_BINARY, iov, count);
        result = websocket_flush(w);
    }
    if (result) return result;
    sent = w->taken;
    w->taken = 0;
    return (ptrdiff_t)sent;
}

static inline int websocket_finish(void *context)
{
    websocket *w = (websocket *)context;
    ptrdiff_t result = websocket_answer(w);

    if (result || w->close_sent) return (int)result;
    websocket_frame(w, WEBSOCKET_CLOSE, NULL, 0);
    w->close_sent = 1;
    return (int)websocket_flush(w);
}

/// In ///

// The socket must not end within the stream: that takes a close frame.
static inline ptrdiff_t websocket_take(websocket *w, void *to, size_t size)
{
    ssize_t n = recv(w->fd, to, size, 0);

    return n == 0 ? NBD_IO_ERROR : wait_result(n, NBD_IO_READ);
}

static inline size_t websocket_head_wanted(const websocket *w)
{
    int length = w->head_size < 2 ? 0 : w->head[1];

    return length == 127 ? 10 : length == 126 ? 4 : 2;
}

// Takes in the head of the next frame.  Returns 1 when it is whole, or NBD_IO_READ or _ERROR.
static inline ptrdiff_t websocket_head(websocket *w)
{
    size_t k;

    while (w->head_size < websocket_head_wanted(w)) {
        ptrdiff_t n =
            websocket_take(w, w->head + w->head_size, websocket_head_wanted(w) - w->head_size);

        if (n < 0) return n;
        w->head_size += (size_t)n;
    }
    w->left = w->head_size == 2 ? w->head[1] : 0;
    for (k = 2; k < w->head_size; k++)
        w->left = w->left << 8 | w->head[k];
    return 1;
}

// Takes in the rest of a control frame.  Returns 1 when it is whole, or as above.
static inline ptrdiff_t websocket_control(websocket *w)
{
    if (w->control_size + w->left > WEBSOCKET_CONTROL) return NBD_IO_ERROR;
    while (w->left > 0) {
        ptrdiff_t n = websocket_take(w, w->control + w->control_size, (size_t)w->left);

        if (n < 0) return n;
        w->control_size += (size_t)n;
        w->left -= (uint64_t)n;
    }
    if ((w->head[0] & 15) == WEBSOCKET_CLOSE) w->closed = 1;
    if ((w->head[0] & 15) == WEBSOCKET_PING) {
        memcpy(w->pong, w->control, w->control_size);
        w->pong_size = w->control_size;
        w->pong_due = 1; // only the last of several needs an answer
    }
    w->control_size = 0;
    return 1;
}

// Goes on to payload of the stream.  Returns 1 when there is some, or what the hook returns.
static inline ptrdiff_t websocket_payload(websocket *w)
{
    while (!w->closed) {
        ptrdiff_t n = websocket_answer(w);

        if (n == NBD_IO_ERROR) return n;
        if (!w->in_payload && (n = websocket_head(w)) < 0) return n;
        w->in_payload = 1;
        if (w->head[0] & 8) {
            if ((n = websocket_control(w)) < 0) return n;
        } else if (w->left > 0) {
            return 1;
        }
        w->in_payload = 0;
        w->head_size = 0;
    }
    return NBD_IO_EOF;
}

static inline ptrdiff_t websocket_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    websocket *w = (websocket *)context;
    ptrdiff_t n = websocket_payload(w);

    (void)count;
    if (n <= 0) return n;
    n = websocket_take(w, iov->base, iov->size < w->left ? iov->size : (size_t)w->left);
    if (n > 0) w->left -= (uint64_t)n;
    return n;
}

static inline int websocket_wait(void *context, unsigned wants, int *timeout_ms)
{
    const websocket *w = (const websocket *)context;

    return wait_for(w->fd, w->fd, wants, timeout_ms);
}

static inline void websocket_init(websocket *w, int fd, uint32_t (*random)(void))
{
    const nbd_transport transport = {
        .context = w,
        .send = websocket_send,
        .recv = websocket_recv,
        .wait = websocket_wait,
        .finish = websocket_finish,
    };

    memset(w, 0, sizeof *w);
    w->fd = fd;
    w->random = random;
    w->transport = transport;
}

#endif
