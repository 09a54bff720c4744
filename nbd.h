// nbd.h - NBD client: C99 and C++11, non-blocking, no allocation - v0.1.0 - MIT-0
// In one C or C++ file: #define NBD_IMPLEMENTATION before #include "nbd.h".
// Everywhere else include it plainly.  Licence: MIT-0, text at the end.
//
// CONTENTS (search for "/// name")
//   Version and configuration     public: what may be defined, includes
//   Errors                        public: one list, enum and text
//   Transport                     public: how bytes move; write your own here
//   Types                         public: config, command, event, client
//   Session                       public: init, connect, issue, poll, next
//   Options                       public: driving the handshake yourself
//   Own I/O                       public: the engine without a transport
//   Sockets                       public: a transport over a socket, dialling
//   mbedTLS                       public: a transport that encrypts
//   Convenience                   public: URIs, blocking calls, the walker
//   Implementation notes          private from here on
//
// EXAMPLE (this is examples/hello.c: it reads the first sector)
//
//     #define _POSIX_C_SOURCE 200112L
//     #define NBD_IMPLEMENTATION
//     #include "nbd.h"
//     #include <stdio.h>
//
//     int main(int argc, char **argv)
//     {
//         static unsigned char buffer[NBD_BUFFER_MIN], sector[512];
//         static nbd_slot slots[1];
//         static nbd_client client;
//         char text[1024];
//         nbd_config config = NBD_ZERO;
//         nbd_sync sync = NBD_ZERO;
//         nbd_uri uri;
//         const char *where = argc > 1 ? argv[1] : "nbd://localhost";
//         int error = nbd_uri_parse(&uri, where, text, sizeof text);
//
//         config.slots = slots;
//         config.slot_count = 1;
//         config.buffer = buffer;
//         config.buffer_size = sizeof buffer;
//         config.export_name = uri.export_name;
//         config.flags = uri.config_flags;
//         sync.client = &client;
//         sync.timeout_ms = 5000;
//         if (!error) error = nbd_init(&client, &config);
//         if (!error) error = nbd_sync_open(&sync, &uri.address);
//         if (!error) error = nbd_sync_read(&sync, sector, sizeof sector, 0);
//         nbd_sync_close(&sync);
//         if (error) {
//             fprintf(stderr, "hello: %s: %s%s%s%s\n", where, nbd_strerror(error),
//                     *uri.detail || *sync.message ? ": " : "", uri.detail, sync.message);
//             return 1;
//         }
//         return fwrite(sector, 1, sizeof sector, stdout) != sizeof sector || fflush(stdout);
//     }
//
// THE LOOP (what a program does that has its own event loop)
//
//     nbd_connect(&client, &io.transport);
//     while ((wants = nbd_wants(&client)) != 0) {   // READ | WRITE | NOW, 0: over
//         ready = wait for READ and WRITE; with NOW do not wait, it is 0
//         nbd_poll(&client, ready);                 // moves bytes, both ways
//         while (nbd_next(&client, &event)) { ... } // hands out what happened
//         ... nbd_issue(&client, &op, &id) ...      // new commands, if any
//     }
//
// RULES
//   - Memory is the caller's: client, slots, buffer, data.  The library never
//     allocates and keeps nothing global.  Nothing has to be freed.
//   - Every pointer says until when it is held: "this call"; "until finished"
//     (the request's DONE event, or the option's OPTION event, has been
//     pulled); or "life of the client" (until the CLOSED event has been pulled
//     or the memory is given up).
//   - NULL is allowed only where a comment says so.
//   - One client is used by one thread at a time.  Different clients share
//     nothing and may run in different threads.
//   - No call blocks but the nbd_sync_ ones, nbd_walk_next and name resolution
//     (nbd_dial_start).
//   - You, your memory and your hooks are trusted.  No byte from the server is, nor a URI:
//     no access out of bounds, no loop or wait without a bound, no byte handed
//     out that the server did not send, whatever it sends.
//   - Only fields without "Private" above them are yours to touch.
//   - Chapters named in comments ("NBD_CMD_READ") are those of the protocol
//     specification.

#ifndef NBD_H
#define NBD_H

/// Version and configuration ///
//
// Macros that must be the same in every file that includes nbd.h:
//   NBD_RANGES       disjoint ranges that a read may be answered in before it
//                    fails as too fragmented; 1 to 64, default 4.  A slot takes
//                    8 bytes for each.
//   NBD_NO_SOCKETS   leaves out the socket transport, dialling, nbd_sync_dial, nbd_sync_open
//   NBD_NO_DIAL      leaves out dialling, nbd_sync_dial and nbd_sync_open (getaddrinfo)
//   NBD_NO_CONVENIENCE  leaves out URIs and the nbd_sync_ and nbd_walk_ calls
//   NBD_NO_NEGOTIATE    leaves out nbd_negotiate, and lists of exports with it
//   NBD_NO_BLOCK_STATUS leaves out metadata contexts and extents
//   NBD_NO_EXTENDED_HEADERS  never asks for them
//   NBD_NO_OLDSTYLE     gives oldstyle servers up with NBD_ERR_OLDSTYLE
//   NBD_NO_TLS          leaves out STARTTLS
//   NBD_NO_RAW          leaves out what is for testing servers: NBD_RAW, the NBD_UNCHECKED_
//                       flags, NBD_WITHOUT_FIXED_NEWSTYLE and NBD_WITHOUT_NO_ZEROES
//   NBD_NO_SPARSE       leaves out NBD_SPARSE
//   NBD_NO_IOV          leaves out requests in pieces: nbd_op.iov is NULL
//   NBD_NO_MESSAGES     skips what the server says in words: no TEXT events; implies
//                       NBD_NO_NEGOTIATE and NBD_NO_BLOCK_STATUS
//   NBD_NO_GO           opens the export by EXPORT_NAME, not by GO, which no server has to
//                       know.  But then none tells its block sizes (1, 4096 and 32 MiB
//                       count: keep to 512 or 4096 yourself), one that refuses just hangs
//                       up, and one that insists on telling them does so too.  Implies
//                       NBD_NO_NEGOTIATE and NBD_NO_EXTENDED_HEADERS
//   NBD_NO_COUNTERS     leaves all of nbd_counters but in_flight at 0; but with
//                       NBD_NO_SOCKETS they are all that the nbd_sync_ calls have for a
//                       clock, and stay unless NBD_NO_CONVENIENCE leaves those out
//   NBD_NO_EXTRAS       leaves out all commands but READ, WRITE and FLUSH, and all their flags
//                       but NBD_NO_INIT; implies NBD_NO_BLOCK_STATUS, NBD_NO_RAW and
//                       NBD_NO_SPARSE
//   NBD_NO_ADVICE       leaves out nbd_allows and nbd_phase; implies NBD_NO_CONVENIENCE
//   NBD_NO_POLL         leaves out nbd_poll: you move the bytes, see "Own I/O"; implies
//                       NBD_NO_SOCKETS and NBD_NO_CONVENIENCE
//   NBD_MINIMAL         all of these from NBD_NO_NEGOTIATE on, NBD_NO_TEXT, and NBD_RANGES
//                       is 1 unless you say more: for reading, writing and flushing with
//                       simple or structured replies, where you move the bytes
//                       What they leave out is refused: a flag, an option, a command and
//                       pieces with NBD_ERR_ARG.
//   NBD_MBEDTLS      adds TLS by mbedTLS 2.28 or 3.6
//   NBD_TLS_STAGE    bytes in nbd_tls that a header and the data behind it are joined in,
//                    to leave in one record; 512 to 16384, default 4096
//   NBD_STATIC       makes every function static; implies NBD_IMPLEMENTATION
//   NBD_API          how public functions are declared, if you must
// Macros that matter only to the file with the implementation:
//   NBD_IOVECS       pieces that one nbd_poll sends in a call; 2 to 1024,
//                    default 128 with sockets and 16 without.  Stack: 16 bytes
//                    for each on a 64-bit machine, twice that with sockets.
//   NBD_POLL_BYTES   bytes each way behind which one nbd_poll calls a hook no more; a
//                    single call may move more; default 1 MiB
//   NBD_STAGE        bytes joined, on the stack, for a transport that takes one
//                    piece; default 512 with sockets and 128 without
//   NBD_SEND_FLAGS(flags)  maps the send hook's flags to those of send(2)
//   NBD_SEND_BUFFER  bytes that dialling asks the system to hold for sending on sockets
//                    other than TCP: more takes fewer calls, but leaves the cache;
//                    default 256 KiB, 0 asks for nothing
//   NBD_NO_TEXT      drops the texts of nbd_strerror and nbd_detail (all "", but for what
//                    a transport says)
//   NBD_ASSERT(x)    checks the library's own invariants; default: nothing

#define NBD_VERSION_MAJOR 0
#define NBD_VERSION_MINOR 1
#define NBD_VERSION_PATCH 0
#define NBD_VERSION (NBD_VERSION_MAJOR * 65536 + NBD_VERSION_MINOR * 256 + NBD_VERSION_PATCH)

#include <stddef.h>
#include <stdint.h>

#ifdef NBD_MBEDTLS
#include <mbedtls/ssl.h>
#include <mbedtls/version.h>
#if MBEDTLS_VERSION_NUMBER < 0x021C0000 || MBEDTLS_VERSION_NUMBER >= 0x04000000
#error "nbd.h: NBD_MBEDTLS needs mbedTLS 2.28 or 3"
#endif
#if defined(MBEDTLS_ENTROPY_C) && defined(MBEDTLS_CTR_DRBG_C)
#include <mbedtls/ctr_drbg.h>
#include <mbedtls/entropy.h>
#define NBDI_TLS_OWN_RNG
#endif
#ifndef NBD_TLS_STAGE
#define NBD_TLS_STAGE 4096
#endif
#endif

// Undefined first: they may have been defined with another value.
#ifdef NBD_MINIMAL
#undef NBD_NO_NEGOTIATE
#define NBD_NO_NEGOTIATE
#undef NBD_NO_BLOCK_STATUS
#define NBD_NO_BLOCK_STATUS
#undef NBD_NO_EXTENDED_HEADERS
#define NBD_NO_EXTENDED_HEADERS
#undef NBD_NO_OLDSTYLE
#define NBD_NO_OLDSTYLE
#undef NBD_NO_TLS
#define NBD_NO_TLS
#undef NBD_NO_RAW
#define NBD_NO_RAW
#undef NBD_NO_SPARSE
#define NBD_NO_SPARSE
#undef NBD_NO_IOV
#define NBD_NO_IOV
#undef NBD_NO_MESSAGES
#define NBD_NO_MESSAGES
#undef NBD_NO_GO
#define NBD_NO_GO
#undef NBD_NO_COUNTERS
#define NBD_NO_COUNTERS
#undef NBD_NO_EXTRAS
#define NBD_NO_EXTRAS
#undef NBD_NO_ADVICE
#define NBD_NO_ADVICE
#undef NBD_NO_POLL
#define NBD_NO_POLL
#undef NBD_NO_TEXT
#define NBD_NO_TEXT
#ifndef NBD_RANGES
#define NBD_RANGES 1
#endif
#endif

#ifdef NBD_NO_GO
#undef NBD_NO_NEGOTIATE
#define NBD_NO_NEGOTIATE
#undef NBD_NO_EXTENDED_HEADERS
#define NBD_NO_EXTENDED_HEADERS
#endif

#ifdef NBD_NO_MESSAGES
#undef NBD_NO_NEGOTIATE
#define NBD_NO_NEGOTIATE
#undef NBD_NO_BLOCK_STATUS
#define NBD_NO_BLOCK_STATUS
#endif

#ifdef NBD_NO_EXTRAS
#undef NBD_NO_BLOCK_STATUS
#define NBD_NO_BLOCK_STATUS
#undef NBD_NO_RAW
#define NBD_NO_RAW
#undef NBD_NO_SPARSE
#define NBD_NO_SPARSE
#endif

#ifdef NBD_NO_POLL
#undef NBD_NO_SOCKETS
#define NBD_NO_SOCKETS
#endif

#if defined(NBD_NO_POLL) || defined(NBD_NO_ADVICE)
#undef NBD_NO_CONVENIENCE
#define NBD_NO_CONVENIENCE
#endif

#ifdef NBD_STATIC
#ifndef NBD_IMPLEMENTATION
#define NBD_IMPLEMENTATION
#endif
#endif

#ifndef NBD_API
#if defined(NBD_STATIC) && (defined(__GNUC__) || defined(__clang__))
#define NBD_API static __attribute__((unused))
#elif defined(NBD_STATIC)
#define NBD_API static
#elif (defined(__GNUC__) || defined(__clang__)) && !defined(_WIN32) && !defined(__CYGWIN__)
// Hidden: a shared library that vendors nbd.h does not export it, so it can
// never take over calls that its host makes to libnbd.
#define NBD_API extern __attribute__((visibility("hidden")))
#else
#define NBD_API extern
#endif
#endif

// clang-format off
// NBD_ZERO initialises any struct of this file: all members zero, NULL, off.
#ifdef __cplusplus
#define NBD_ZERO {}
extern "C" {
#else
#define NBD_ZERO {0}
#endif
// clang-format on

#ifndef NBD_RANGES
#define NBD_RANGES 4
#endif

/// Errors ///
//
// What an event carries in `error`, and what a function returns that lists
// "Errors", is one of:
//   0         success
//   positive  the server's answer, one of the eight error values of the
//             specification ("Error values"); the value of any other answer is
//             kept in nbd_event.server_error and counts as NBD_EINVAL
//   negative  NBD_ERR_...: found on this side; NBD_REP_ERR_...: the server's
//             refusal of an option ("Option reply types")
// "Would block" is not an error: nbd_wants tells it.
//
// X(name, value, text)
// clang-format off
#define NBD_ERRORS(X) \
    X(NBD_OK, 0, "success") \
    X(NBD_EPERM, 1, "operation not permitted") \
    X(NBD_EIO, 5, "input/output error") \
    X(NBD_ENOMEM, 12, "cannot allocate memory") \
    X(NBD_EINVAL, 22, "invalid argument") \
    X(NBD_ENOSPC, 28, "no space left on device") \
    X(NBD_EOVERFLOW, 75, "value too large") \
    X(NBD_ENOTSUP, 95, "operation not supported") \
    X(NBD_ESHUTDOWN, 108, "server is shutting down") \
    /* Misuse or refusal on this side: nothing was done, nothing was sent. */ \
    X(NBD_ERR_ARG, -1, "argument missing, not allowed or out of range") \
    X(NBD_ERR_STATE, -2, "not allowed in this state") \
    X(NBD_ERR_FULL, -3, "every request slot is taken") \
    X(NBD_ERR_ABI, -4, "compiled with another layout or version") \
    X(NBD_ERR_BUFFER, -5, "memory too small, or above 2^31 - 1") \
    X(NBD_ERR_BOUNDS, -6, "past the end of the export") \
    X(NBD_ERR_BLOCK_SIZE, -7, "no multiple of the minimum block size") \
    X(NBD_ERR_READ_ONLY, -8, "export is read-only") \
    X(NBD_ERR_UNSUPPORTED, -9, "not offered by the server") \
    X(NBD_ERR_ZERO_SIZE, -10, "size is zero") \
    X(NBD_ERR_PAYLOAD, -11, "size above the maximum payload") \
    X(NBD_ERR_NAME, -12, "name or option too long") \
    X(NBD_ERR_BUSY, -13, "other requests are in flight") \
    /* The connection is over; every request in flight finishes with it. */ \
    X(NBD_ERR_CLOSED, -20, "server closed the connection") \
    X(NBD_ERR_TRUNCATED, -21, "connection closed in the middle of a message") \
    X(NBD_ERR_TRANSPORT, -22, "transport failed") \
    X(NBD_ERR_PROTOCOL, -23, "server broke the protocol") \
    X(NBD_ERR_NOT_NBD, -24, "not an NBD server") \
    X(NBD_ERR_OLDSTYLE, -25, "oldstyle server, no export names") \
    X(NBD_ERR_TLS, -26, "TLS is required, but not started") \
    X(NBD_ERR_INJECTED, -27, "bytes in clear behind STARTTLS") \
    X(NBD_ERR_ABANDONED, -28, "connection abandoned") \
    /* One request fails, the connection lives. */ \
    X(NBD_ERR_GAP, -40, "success without every byte") \
    X(NBD_ERR_OVERLAP, -41, "same bytes sent twice") \
    X(NBD_ERR_FRAGMENTED, -42, "more pieces than NBD_RANGES") \
    /* Convenience and sockets. */ \
    X(NBD_ERR_URI, -60, "not a valid NBD URI") \
    X(NBD_ERR_RESOLVE, -61, "host name not found") \
    X(NBD_ERR_CONNECT, -62, "cannot connect") \
    X(NBD_ERR_TIMEOUT, -63, "timed out, connection abandoned") \
    X(NBD_ERR_SOCKET, -64, "socket cannot be used") \
    X(NBD_ERR_TLS_SETUP, -65, "TLS cannot be set up") \
    /* The server refused an option. */ \
    X(NBD_REP_ERR_UNSUP, -101, "option not supported") \
    X(NBD_REP_ERR_POLICY, -102, "option forbidden by policy") \
    X(NBD_REP_ERR_INVALID, -103, "option invalid") \
    X(NBD_REP_ERR_PLATFORM, -104, "option not supported on this platform") \
    X(NBD_REP_ERR_TLS_REQD, -105, "server requires TLS") \
    X(NBD_REP_ERR_UNKNOWN, -106, "export not known") \
    X(NBD_REP_ERR_SHUTDOWN, -107, "server is shutting down") \
    X(NBD_REP_ERR_BLOCK_SIZE_REQD, -108, "server requires block sizes") \
    X(NBD_REP_ERR_TOO_BIG, -109, "option too big") \
    X(NBD_REP_ERR_EXT_HEADER_REQD, -110, "server requires extended headers") \
    X(NBD_REP_ERR_OTHER, -111, "option refused")
// clang-format on

#define NBDI_ENUM(name, value, text) name = value,
enum nbd_error { NBD_ERRORS(NBDI_ENUM) NBDI_ERROR_END = -1000 };

// A constant English text for any error of the list, never NULL; "unknown
// error" for other numbers; "" with NBD_NO_TEXT.
NBD_API const char *nbd_strerror(int error);

/// Transport ///
//
// A transport moves bytes for nbd_poll: members that you fill in, those not needed with
// zero.  A socket (below) is one; a UART, a TLS session, a pipe are others.  send, recv and
// finish are called from nbd_poll only, must not block, and must not call this client.  No
// piece that they are given is empty.

// One piece of memory.  `size` is in bytes and may be 0.
typedef struct nbd_iovec {
    void *base;
    size_t size;
} nbd_iovec;

// What a hook returns besides the number of bytes it moved (1 or more).
// Do not return what a system call returned: its -1 would be NBD_IO_READ.
// A blocked hook says which direction it waits for: TLS may have to write
// before it can read, and the reverse.  A send hook that returns 0 counts as
// blocked on writing.  Any other negative number counts as NBD_IO_ERROR.
#define NBD_IO_EOF 0      // receive only: the stream has ended
#define NBD_IO_READ (-1)  // would block until bytes can be read
#define NBD_IO_WRITE (-2) // would block until bytes can be written
#define NBD_IO_ERROR (-3) // failed; the connection is over

// Flag of the send hook: more bytes are queued and this same nbd_poll will
// hand them over, so a packet need not be closed yet.  The last send of an
// nbd_poll never carries it, unless the transport blocks first.
#define NBD_SEND_MORE 0x1u

// nbd_transport.flags
// A receive shorter than asked found all there was, and a send shorter than what it was
// given filled the transport: each spares the call that would move nothing.  "All" does not
// cover the end of the stream: an edge-triggered loop must keep a hang-up that came with
// the data (EPOLLRDHUP) and poll once more for it.
#define NBD_SHORT_IS_DRY 0x1u
// The hooks take one piece: `count` is then 1 for send (small ones are joined in a
// copy), and recv looks at the first only.
#define NBD_ONE_PIECE 0x2u

typedef struct nbd_transport {
    uint32_t flags;
    void *context; // passed to each hook

    // Sends a part of the pieces, in order.  `iov` is held for this call.  After it blocked
    // it is called with the same bytes first, perhaps with more behind.  Bytes that a hook
    // keeps count as sent only when they are gone: nobody else asks for the rest.
    ptrdiff_t (*send)(void *context, const nbd_iovec *iov, unsigned count, unsigned flags);

    // Receives into the pieces, in order.  `iov` is held for this call.  Called until it
    // blocks, or nbd_wants says NOW: what the hook itself holds need not show in poll(2).
    ptrdiff_t (*recv)(void *context, const nbd_iovec *iov, unsigned count);

    // NULL, or: waits until one of `wants` (NBD_WANT_READ, NBD_WANT_WRITE) is
    // ready or *timeout_ms has passed, and takes the time that passed off
    // *timeout_ms; a negative *timeout_ms waits for ever and stays.  Returns
    // what is ready (as an int), 0 at the time-out, NBD_IO_ERROR.  Only blocking calls call
    // it.  Without a clock set *timeout_ms to 0 once it has passed.
    int (*wait)(void *context, unsigned wants, int *timeout_ms);

    // NULL, or: tells the server that nothing more will be sent (shutdown(2), the
    // close_notify of TLS); receiving goes on.  nbd_poll calls it behind the last byte
    // of a session that is ended politely.  Returns 0, or NBD_IO_READ or NBD_IO_WRITE
    // to be called again then; any other result counts as 0.
    int (*finish)(void *context);

    // NULL, or: a constant text that a hook sets before it returns NBD_IO_EOF or
    // NBD_IO_ERROR, to tell why.  CLOSED then carries it.
    const char *detail;
} nbd_transport;

/// Types ///

// Commands, for nbd_op.command ("Request types").
enum nbd_command {
    NBD_READ = 1,     // NBD_CMD_READ
    NBD_WRITE,        // NBD_CMD_WRITE
    NBD_FLUSH,        // NBD_CMD_FLUSH
    NBD_TRIM,         // NBD_CMD_TRIM
    NBD_CACHE,        // NBD_CMD_CACHE
    NBD_WRITE_ZEROES, // NBD_CMD_WRITE_ZEROES
    NBD_BLOCK_STATUS, // NBD_CMD_BLOCK_STATUS
    NBD_RAW           // any type and flags, unchecked, for testing servers
};

// Flags, for nbd_op.flags ("Command flags"); the last two are this library's.
#define NBD_FUA 0x01u       // WRITE, TRIM, WRITE_ZEROES: reply when it is stable
#define NBD_NO_HOLE 0x02u   // WRITE_ZEROES: allocate, do not punch a hole
#define NBD_DF 0x04u        // READ: one chunk, or NBD_EOVERFLOW above 64 KiB
#define NBD_REQ_ONE 0x08u   // BLOCK_STATUS: one extent per context
#define NBD_FAST_ZERO 0x10u // WRITE_ZEROES: NBD_ENOTSUP unless it is fast
// READ: when the request fails, the buffer may hold anything (old bytes or the
// server's).  The caller promises to look at the error before the bytes.  On
// success it holds the server's bytes in every mode.  Without this flag each
// byte of a failed read is the server's byte for that place, or zero.
#define NBD_NO_INIT 0x20u
// READ: holes come as HOLE events and their bytes are not touched.  They are
// provisional until DONE says success.
#define NBD_SPARSE 0x40u

// One command.  nbd_issue copies the struct; `buffer`, `data`, and `iov` with
// all it points to are held until finished.
typedef struct nbd_op {
    uint32_t command;     // enum nbd_command
    uint32_t flags;       // NBD_FUA ...
    uint64_t offset;      // bytes from the start of the export; FLUSH: 0
    uint64_t size;        // bytes; FLUSH: 0
    void *buffer;         // READ: where to; NULL for WRITE
    const void *data;     // WRITE: where from; NULL for READ
    const nbd_iovec *iov; // READ and WRITE: the same in pieces that sum up to
                          // `size`; `buffer` and `data` are NULL then.  A
                          // WRITE does not change what they point to.
    uint32_t iov_count;   // pieces
    void *user;           // comes back in every event of this request
    // BLOCK_STATUS: NULL asks for all metadata contexts; else indices of those asked
    // for, each once.  nbd_issue then writes what is sent to `buffer`, which has
    // 8 + 4 * context_count bytes.  Needs NBD_OFFERS_STATUS_PAYLOAD.  NULL for any other
    // command.
    const uint32_t *contexts;
    uint32_t context_count;
    uint32_t raw_type; // RAW: type; `flags` then goes out as it is, and `data`, if
                       // not NULL, as payload of `size` bytes.  Only replies without
                       // content are understood.
} nbd_op;

enum nbd_event_type {
    NBD_EVENT_NONE = 0,
    NBD_EVENT_READY,    // commands may be issued; see nbd_negotiated
    NBD_EVENT_DONE,     // a request finished: id, user, command, offset, size,
                        // error, server_error, error_offset.  Its slot is free.
    NBD_EVENT_HOLE,     // a hole in a read with NBD_SPARSE: id, user, command, offset, size
    NBD_EVENT_EXTENT,   // one extent: id, user, command, context, offset, size, flags.
                        // Those of a context follow each other without gap
                        // from the request's offset on; none is empty; the last
                        // may reach behind the request (not with NBD_REQ_ONE)
                        // and, if the server says so, behind the export.  DONE
                        // with success: each context had at least one.
    NBD_EVENT_TEXT,     // a text of the server: text_kind, text, text_size,
                        // text_length; MESSAGE also error, server_error; for a
                        // request what DONE names it by, else option
    NBD_EVENT_OPTION,   // an option of nbd_negotiate finished: option, error,
                        // server_error.  Option 0: the greeting is over.
    NBD_EVENT_STARTTLS, // start TLS now, then call nbd_starttls
    NBD_EVENT_CLOSED    // the last event: error, detail, option.  0: clean end.
};

enum nbd_text_kind {
    NBD_TEXT_MESSAGE = 1, // why a request or an option failed; before its end
    NBD_TEXT_EXPORT,      // LIST: an export name; its description follows, if any
    NBD_TEXT_NAME,        // INFO, GO: the canonical name of the export
    NBD_TEXT_DESCRIPTION, // LIST, INFO, GO: description of the export
    NBD_TEXT_CONTEXT      // a metadata context; `context` is its index.  Comes before
                          // READY too, for nbd_config.queries: only this tells
                          // which of them the server chose, in its own order
};

// What nbd_next hands out.  Members that the type does not name are zero, detail is "".
typedef struct nbd_event {
    uint32_t type;         // enum nbd_event_type
    int32_t error;         // 0, NBD_E..., NBD_ERR_..., NBD_REP_ERR_...
    uint64_t id;           // what nbd_issue gave
    void *user;            // nbd_op.user
    uint32_t command;      // enum nbd_command
    uint32_t option;       // number of the option ("Option types")
    uint64_t offset;       // bytes from the start of the export
    uint64_t size;         // bytes
    uint64_t flags;        // EXTENT: status flags of the context, as sent
    uint32_t context;      // EXTENT, TEXT: index of the metadata context
    uint32_t server_error; // error as sent: a command's or an option's, raw
    uint64_t error_offset; // DONE: where the server says it failed, else `offset`
    uint32_t text_kind;    // enum nbd_text_kind
    uint32_t text_length;  // bytes that the server sent
    // Bytes of the server, not terminated, not printable by nature.  Held until
    // the next call on this client.  Cut to what the buffer holds.
    const char *text;
    size_t text_size;   // bytes that are here, at most text_length
    const char *detail; // CLOSED, DONE: constant text naming the broken rule, or ""
} nbd_event;

// Bits of the transmission flags in nbd_export.flags ("Transmission flags").
#define NBD_OFFERS_FLAGS 0x0001u
#define NBD_OFFERS_READ_ONLY 0x0002u
#define NBD_OFFERS_FLUSH 0x0004u
#define NBD_OFFERS_FUA 0x0008u
#define NBD_OFFERS_ROTATIONAL 0x0010u
#define NBD_OFFERS_TRIM 0x0020u
#define NBD_OFFERS_WRITE_ZEROES 0x0040u
#define NBD_OFFERS_DF 0x0080u
#define NBD_OFFERS_MULTI_CONN 0x0100u
#define NBD_OFFERS_RESIZE 0x0200u
#define NBD_OFFERS_CACHE 0x0400u
#define NBD_OFFERS_FAST_ZERO 0x0800u
#define NBD_OFFERS_STATUS_PAYLOAD 0x1000u

// Status flags of the context base:allocation, in nbd_event.flags of an EXTENT.
#define NBD_STATE_HOLE 0x1u
#define NBD_STATE_ZERO 0x2u

enum nbd_style { NBD_STYLE_UNKNOWN, NBD_STYLE_OLD, NBD_STYLE_NEW, NBD_STYLE_FIXED };
enum nbd_protocol { NBD_PROTOCOL_SIMPLE, NBD_PROTOCOL_STRUCTURED, NBD_PROTOCOL_EXTENDED };

// What was negotiated.  Valid from READY on, and after each successful INFO; style,
// protocol, tls and context_count from the first OPTION event on.
typedef struct nbd_export {
    uint64_t size;            // bytes
    uint32_t minimum_block;   // bytes, a power of 2; 1 if not advertised
    uint32_t preferred_block; // bytes, a power of 2; 4096 if not advertised
    uint32_t maximum_payload; // bytes; 32 MiB if not advertised
    uint32_t context_count;   // metadata contexts in use
    uint16_t flags;           // NBD_OFFERS_..., as sent
    uint8_t style;            // enum nbd_style
    uint8_t protocol;         // enum nbd_protocol
    uint8_t tls;              // 1 after nbd_starttls
    uint8_t block_sizes;      // 1 if the server advertised them
} nbd_export;

typedef struct nbd_counters {
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t sends;         // calls of nbd_sent, those that moved nothing too
    uint64_t receives;      // calls of nbd_received, the same
    uint32_t staged;        // copies made for a transport with NBD_ONE_PIECE
    uint16_t in_flight;     // requests issued and not yet pulled as DONE
    uint16_t in_flight_max; // the most there have been since nbd_init
} nbd_counters;

// One request.  All of it is private; give an array of them to nbd_init.
typedef struct nbd_slot {
    uint8_t command; // Private from here on
    uint8_t flags;
    uint8_t state;
    int16_t error;
    uint16_t next;
    uint64_t id;
    uint64_t offset;
    uint64_t size;
    uint64_t error_offset;
    union {
        nbd_iovec one;         // iov_count is 0
        const nbd_iovec *many; // iov_count is at least 1
    } data;
    void *user;
    uint32_t iov_count;
    uint32_t server_error;
    uint32_t edge_count;
    uint32_t edge[2 * NBD_RANGES];
} nbd_slot;

// A metadata context that the server agreed to; memory for nbd_config.contexts.
typedef struct nbd_context {
    uint32_t id;     // Private: the server's number
    uint32_t narrow; // 1 if its status flags have 32 bits at most
} nbd_context;

// nbd_config.flags
#define NBD_WITHOUT_STRUCTURED_REPLY 0x0001u // simple replies only
#define NBD_WITHOUT_EXTENDED_HEADERS 0x0002u // do not ask for extended headers
// Sends nothing but EXPORT_NAME.  Servers older than 2018 may hang up at any
// other option: the connection then ends with NBD_ERR_CLOSED or
// NBD_ERR_TRUNCATED and nbd_event.option tells which option was unanswered.  To
// reach such a server call nbd_init again with this flag and dial again.
#define NBD_ONLY_EXPORT_NAME 0x0004u
// The caller drives the options with nbd_negotiate: after the greeting comes an
// OPTION event with option 0 instead of automatic options; from an oldstyle server READY.
#define NBD_NEGOTIATE 0x0008u
#define NBD_TLS_ALLOW 0x0010u   // ask for TLS, go on in clear if refused
#define NBD_TLS_REQUIRE 0x0020u // nothing but STARTTLS leaves in clear
// Each lets through what nbd_issue otherwise refuses, for testing servers.
#define NBD_UNCHECKED_BOUNDS 0x0100u
#define NBD_UNCHECKED_BLOCK_SIZE 0x0200u
#define NBD_UNCHECKED_READ_ONLY 0x0400u
#define NBD_UNCHECKED_UNSUPPORTED 0x0800u
#define NBD_UNCHECKED_ZERO_SIZE 0x1000u
#define NBD_UNCHECKED_PAYLOAD 0x2000u
// Each overlooks a handshake flag of the server, for testing servers.
#define NBD_WITHOUT_FIXED_NEWSTYLE 0x4000u
#define NBD_WITHOUT_NO_ZEROES 0x8000u

// Sizes for nbd_config.buffer, usable as array bounds.  A header area for
// queued commands takes min(32 * slots, a quarter) of it; the rest reads ahead.
#define NBD_BUFFER_MIN 256    // works; texts are cut to 192 bytes (224 with one slot)
#define NBD_BUFFER_NAMES 5464 // holds the longest legal name (4096) whole
#define NBD_BUFFER_GOOD 65536 // what the speed figures were measured with
#define NBD_SLOTS_MAX 65535

// Zeroed means defaults.  nbd_init copies the struct; what it points to is held
// for the life of the client.
typedef struct nbd_config {
    uint32_t flags;
    uint32_t slot_count; // 1 to NBD_SLOTS_MAX: requests in flight at most
    nbd_slot *slots;     // slot_count of them
    void *buffer;        // any alignment
    size_t buffer_size;  // NBD_BUFFER_MIN to 2^31 - 1 bytes
    // NUL-terminated; NULL is the default export "".  Above 4096 bytes: error.
    const char *export_name;
    // Metadata contexts to ask for before GO, each like "base:allocation"; NULL
    // and 0 for none.  NUL-terminated.
    const char *const *queries;
    uint32_t query_count;
    // Room for the contexts that the server agrees to, at most 64 * NBD_RANGES; at
    // least 1 with queries.  Contexts beyond it end the session.
    uint32_t context_count;
    nbd_context *contexts;
} nbd_config;

// One option for nbd_negotiate.  It is copied; name, queries and data are held
// until finished.
typedef struct nbd_option {
    uint32_t option; // NBD_OPTION_..., or any number with `data`
    uint32_t query_count;
    const char *name;           // export, for those options that name one; NULL is ""
    const char *const *queries; // metadata queries, NUL-terminated
    const void *data;           // NULL, or the whole payload, sent as it is
    uint32_t data_size;         // bytes
} nbd_option;

// A place in the memory of a request; private.
typedef struct nbdi_cursor {
    uint32_t index; // Private
    size_t skip;
} nbdi_cursor;

// The client.  All of it is private; see nbd_negotiated, nbd_count, nbd_detail.  Small
// members stand in front, where small processors reach them by short instructions.
typedef struct nbd_client {
    // Private from here on.  One session; nbd_connect clears it.
    uint8_t state;           // enum nbdi_state
    uint8_t transmission;    // 1 once the options are over
    uint8_t closing;         // 1 once no new command is taken
    uint8_t fresh;           // 1 if nbd_next may have something
    uint8_t handshake_flags; // the server's, as far as they count
    uint8_t automatic;       // options: next step of the automatic order
    uint8_t option_due;      // 1 while an option is under way
    uint8_t header_size;     // of a request: 28, or 32 once extended headers are agreed on
    uint8_t option_left;     // 1 while some of the client flags or the option is unsent
    uint8_t out_blocked;     // NBD_WANT_ bit that the transport asked for, or 0
    uint8_t out_failed;
    uint8_t finished;   // 1 once the transport has been told that nothing follows
    uint8_t disc;       // NBDI_DISC_..., or 0
    uint8_t in_blocked; // as out_blocked
    uint8_t in_over;    // NBDI_IN_..., or 0
    uint8_t drop;       // the payload being received is not wanted
    uint8_t text_kind;
    uint8_t after;   // state behind TEXT and SKIP
    int16_t error;   // first error of the session, for CLOSED
    int16_t cause;   // what ended the connection, for requests in flight
    uint16_t first;  // slot: head of the send queue
    uint16_t unsent; // slot: first without an encoded header
    uint16_t last;   // slot: tail of the send queue
    uint16_t done;   // slot: head of the list of finished requests
    uint16_t scan;   // slots below it have finished on a dead connection
    uint16_t reply_slot;
    uint16_t reply_flags;
    uint16_t reply_type;
    uint16_t free; // slot: head of the free list
    uint32_t in_start;
    uint32_t in_end;
    uint32_t reply_length; // of the option reply, data or error chunk
    uint32_t reply_error;  // as sent
    uint32_t left;         // bytes still to come: of DATA; in STATUS and EXTENT of extents
    uint32_t direct;       // bytes of payload memory on offer
    uint32_t skip_left;    // bytes still to be dropped, in TEXT those behind the text
    uint32_t text_length;
    uint32_t found; // metadata contexts told so far; or the one being told
    uint32_t head_sent;
    uint32_t head_fill;
    uint32_t piece;     // options: first piece not yet sent whole
    size_t in_offered;  // bytes
    size_t out_offered; // bytes
    size_t out_done;    // bytes of the first request or piece that are sent
    // What goes on from session to session:
    nbd_config config;
    uint32_t head_size; // bytes of the header area
    uint64_t serial;    // of the last request; makes cookies unique
    nbd_counters counters;
    // One session again:
    const nbd_transport *transport;
    const char *detail;
    const char *context_name; // export of the last SET_META_CONTEXT
    uint32_t piece_fill;      // options: first piece not yet in the header area
    nbd_option option;        // under way if option_due
    nbdi_cursor out_cursor;
    nbdi_cursor in_cursor;
    uint64_t place; // of the next extent: bytes from the start of the export
    nbd_export got;
} nbd_client;

/// Session ///

// Prepares a client.  On success every field is set, on an error none; nothing is sent.
// Also resets a client in any state: requests in flight are then forgotten without events.
// client: until its last use.  config: this call; what it points to: life of the client.
// Errors: NBD_ERR_ARG (NULL; flags, slot_count or context_count out of range; queries
// without context_count; NBD_TLS_REQUIRE with NBD_ONLY_EXPORT_NAME), NBD_ERR_BUFFER,
// NBD_ERR_NAME, NBD_ERR_ABI.
#define nbd_init(client, config) \
    nbd_init_checked((client), (config), sizeof(nbd_client), sizeof(nbd_slot), NBD_VERSION)

// What nbd_init calls: the sizes and the version as the caller's file sees
// them; any difference to the implementation's is NBD_ERR_ABI.
NBD_API int nbd_init_checked(nbd_client *client, const nbd_config *config, size_t client_size,
                             size_t slot_size, uint32_t version);

// Starts the handshake on a fresh stream; nothing is sent yet.  Allowed after
// nbd_init, and again once CLOSED has been pulled.
// transport: held for the life of the client.  NULL: you move the bytes
// yourself, see "Own I/O".
// Errors: NBD_ERR_STATE.
NBD_API int nbd_connect(nbd_client *client, const nbd_transport *transport);

// Queues a command; nothing is sent before nbd_poll or nbd_outgoing.  *id
// (NULL: not wanted) gets a number that is never 0 and never repeats for this
// client.  Every request that was accepted finishes exactly once, as a DONE
// event, in no promised order.
// op: this call; what it points to: until finished.
// Errors: NBD_ERR_STATE (not READY yet, or disconnecting, or over), NBD_ERR_ARG
// (unknown command, flag not valid for it, memory missing or not for it, pieces that do not
// sum up, FLUSH with an offset or size, contexts that are empty, twice or unknown), NBD_ERR_READ_ONLY, NBD_ERR_UNSUPPORTED, NBD_ERR_ZERO_SIZE, NBD_ERR_PAYLOAD (READ,
// WRITE: above maximum_payload, and always above 2^32 - 1 or half of the memory that a
// pointer reaches; the rest: above 2^32 - 1 without extended headers), NBD_ERR_BOUNDS, NBD_ERR_BLOCK_SIZE, NBD_ERR_FULL.
// Chapters "Request message", "Size constraints".
NBD_API int nbd_issue(nbd_client *client, const nbd_op *op, uint64_t *id);

// Whether this server offers this command with these flags: 1 or 0; 0 before READY
// and from disconnect on.  It looks neither at sizes, slots nor NBD_UNCHECKED_ flags.
// Chapter "Transmission flags".
#ifndef NBD_NO_ADVICE
NBD_API int nbd_allows(const nbd_client *client, uint32_t command, uint32_t flags);
#endif

// Events that a program waits for, and what nbd_wants answers.
#define NBD_WANT_READ 0x1u
#define NBD_WANT_WRITE 0x2u
#define NBD_WANT_NOW 0x4u

// Moves bytes both ways until the transport would block or NBD_POLL_BYTES or more have
// moved, then returns.  Calls nothing but the hooks send, recv and finish; parses nothing.
//
// `ready` holds the NBD_WANT_READ and NBD_WANT_WRITE that arrived, 0 for none; an
// error or hang-up that poll(2) reports counts as both.  A bit too many costs a
// call that finds nothing; a bit too few costs a delay; 0 is right after NOW.  A
// direction that was not blocked is tried in any case, so nbd_poll(client, 0) right
// after nbd_issue sends.
//
// Returns 0, also if the connection has failed (nbd_next tells);
// NBD_ERR_STATE without a transport, or before nbd_connect.
#ifndef NBD_NO_POLL
NBD_API int nbd_poll(nbd_client *client, unsigned ready);
#endif

// Parses what is buffered until something has happened, and hands that out.
// Calls no hook.  Returns 1 with *event filled, 0 if there is nothing.
// event: this call; event->text: until the next call on this client.
// Call it until it returns 0, after every nbd_poll.
NBD_API int nbd_next(nbd_client *client, nbd_event *event);

// What to wait for before the next nbd_poll.  NOW: do not wait, call nbd_poll
// and nbd_next again.  READ: input can be taken.  WRITE: bytes are pending, or
// the transport asked for it.  0: before nbd_connect, while TLS is yours to
// start, and after CLOSED has been pulled; with "Own I/O" also when the session
// has failed while memory is on offer: cancel, then acknowledge.
NBD_API unsigned nbd_wants(const nbd_client *client);

// Ends the session politely: no new commands from now on; when nothing is in
// flight NBD_CMD_DISC goes out (NBD_OPT_ABORT during options), then the stream
// is read to its end and CLOSED comes, with error 0.  Keep polling until then.  On
// a stream that has no end (a UART), in transmission and with nothing in flight,
// NBD_CMD_DISC is out when nbd_wants says neither WRITE nor NOW; call nbd_abandon
// then.  With "Own I/O" shut the stream down for sending at that point: some servers
// wait for its end.
// A server that says NBD_ESHUTDOWN causes the same by itself; CLOSED then
// carries NBD_ESHUTDOWN.
// Errors: NBD_ERR_STATE (not connected, or over).
// Chapter "Terminating the transmission phase".
NBD_API int nbd_disconnect(nbd_client *client);

// Ends the session at once: every request in flight finishes (one per nbd_next), with
// NBD_ERR_ABANDONED unless its result is known already (an error of the server or of
// the proof, or all sent and all replied), then CLOSED comes.  The transport is not
// touched: close it yourself.  With "Own I/O" memory that is on offer must first
// be given back (nbd_sent, nbd_received); until then nbd_next hands out nothing.
// Errors: NBD_ERR_STATE (not connected, or over).
NBD_API int nbd_abandon(nbd_client *client);

// What was negotiated, and the counters.  The pointers last as long as the client.
// nbd_connect clears what was negotiated (after CLOSED it can still be read), nbd_init
// the counters too.
NBD_API const nbd_export *nbd_negotiated(const nbd_client *client);
NBD_API const nbd_counters *nbd_count(const nbd_client *client);

// Where the session stands, for programs that run a clock: compare it, and the
// counters, with what they were.
enum nbd_phase_type {
    NBD_PHASE_IDLE,         // not connected, or over
    NBD_PHASE_GREETING,     // waiting for the server's first bytes
    NBD_PHASE_OPTIONS,      // option haggling
    NBD_PHASE_STARTTLS,     // it is yours to start TLS
    NBD_PHASE_TRANSMISSION, // commands and replies
    NBD_PHASE_CLOSING       // no new commands; CLOSED will come
};

// Returns an enum nbd_phase_type.
#ifndef NBD_NO_ADVICE
NBD_API int nbd_phase(const nbd_client *client);
#endif

// A constant text naming the rule that the server broke, or ""; never NULL.
NBD_API const char *nbd_detail(const nbd_client *client);

/// Options ///
//
// For tools that list exports or choose contexts.  With NBD_NEGOTIATE the handshake
// stops after the greeting with an OPTION event (option 0); an oldstyle server has no
// options, and READY comes at once.  From then on each nbd_negotiate is followed by its
// TEXT events and one OPTION event, or CLOSED (after nbd_disconnect too).  A refused option
// leaves the session usable, but three refusals end it: NBD_REP_ERR_SHUTDOWN, STARTTLS with
// NBD_TLS_REQUIRE, and GO as unknown after extended headers.  Success of GO and EXPORT_NAME
// is READY instead of OPTION, that of STARTTLS is the STARTTLS event.

// Numbers of the options ("Option types").
#define NBD_OPTION_EXPORT_NAME 1u
#define NBD_OPTION_ABORT 2u
#define NBD_OPTION_LIST 3u
#define NBD_OPTION_STARTTLS 5u
#define NBD_OPTION_INFO 6u
#define NBD_OPTION_GO 7u
#define NBD_OPTION_STRUCTURED_REPLY 8u
#define NBD_OPTION_LIST_META_CONTEXT 9u
#define NBD_OPTION_SET_META_CONTEXT 10u
#define NBD_OPTION_EXTENDED_HEADERS 11u

// Sends an option.  LIST gives EXPORT and DESCRIPTION texts; INFO and GO give NAME
// and DESCRIPTION and fill nbd_negotiated; the two META options give CONTEXT texts
// (no query lists all contexts, and selects none); a refusal may give a MESSAGE.
// Texts may contain any byte, NUL too: such an export name cannot be asked for.
// option: this call; what it points to: until finished; the name of
// SET_META_CONTEXT until READY (contexts count only for the export they were for).
// Errors: NBD_ERR_STATE (no NBD_NEGOTIATE, greeting not over, another option under
// way, disconnecting, over, STARTTLS twice, ABORT: use nbd_disconnect),
// NBD_ERR_UNSUPPORTED (server is not fixed newstyle, and it is not EXPORT_NAME;
// EXPORT_NAME after extended headers; SET_META_CONTEXT, unless with data of your own,
// without structured replies),
// NBD_ERR_TLS (NBD_TLS_REQUIRE, and it is not STARTTLS), NBD_ERR_NAME, NBD_ERR_ARG
// (NULL with a count or size above 0; what a macro has left out).
// Chapter "Option types".
#ifndef NBD_NO_NEGOTIATE
NBD_API int nbd_negotiate(nbd_client *client, const nbd_option *option);
#endif

// After a STARTTLS event: run the TLS handshake on your stream, then hand over
// the transport that encrypts (NULL with "Own I/O").  All that the server said
// in clear is forgotten, and the options go on from the start.
// transport: held for the life of the client.
// Errors: NBD_ERR_STATE (no STARTTLS event is due, memory is on offer).
// Chapter "TLS support".
#ifndef NBD_NO_TLS
NBD_API int nbd_starttls(nbd_client *client, const nbd_transport *transport);
#endif

/// Own I/O ///
//
// The two pairs of calls that nbd_poll itself is made of, for programs that
// move bytes in another way: io_uring, DMA, lwIP callbacks, a UART interrupt.
// Both directions are independent.  What is on offer stays valid and unmoved
// until it is acknowledged; nbd_next may be called in between.  No piece is empty.
// (io_uring wants a blocking socket: clear O_NONBLOCK on one that was dialled.)
// A client that a transport has connected (nbd_sync_open) may go on in this way.  Once
// nbd_outgoing has nothing left behind NBD_CMD_DISC, shut the stream down for sending:
// nbd_poll is not there to call the transport's finish, and nbd_wants waits for it.

// What to send next: fills at most `count` (1 or more) pieces, returns how many,
// 0 for nothing to send.  *flags gets NBD_SEND_MORE or 0.  Asked again before
// nbd_sent it gives the same bytes in the same order, with more only behind them.
// iov: this call.  The memory it names: until nbd_sent.
NBD_API unsigned nbd_outgoing(nbd_client *client, nbd_iovec *iov, unsigned count, unsigned *flags);

// Ends the offer of nbd_outgoing: `result` bytes of it went out (1 or more); or
// 0, NBD_IO_READ, NBD_IO_WRITE: blocked, for nbd_wants; or NBD_IO_ERROR.  Behind that what
// has arrived is still read: nbd_wants keeps READ, and CLOSED waits until a receive that is
// on offer is back, so cancel it.
// Errors: NBD_ERR_STATE (nothing is on offer), NBD_ERR_ARG (more bytes than were
// offered).
NBD_API int nbd_sent(nbd_client *client, ptrdiff_t result);

// Where to put input: fills at most `count` (1 or more) pieces, returns how
// many, 0 if no input can be taken now (call nbd_next).  Asked again before
// nbd_received it gives the same memory.
// iov: this call.  The memory it names: until nbd_received.
NBD_API unsigned nbd_incoming(nbd_client *client, nbd_iovec *iov, unsigned count);

// Ends the offer of nbd_incoming: `result` bytes arrived (1 or more), filling
// the pieces in order; or NBD_IO_EOF, NBD_IO_READ, NBD_IO_WRITE, NBD_IO_ERROR.
// Errors: NBD_ERR_STATE (nothing is on offer), NBD_ERR_ARG (more bytes than
// were offered).
NBD_API int nbd_received(nbd_client *client, ptrdiff_t result);

/// Sockets ///

// Where a server listens.  All strings are NUL-terminated.
enum nbd_address_kind {
    NBD_ADDRESS_TCP,
    NBD_ADDRESS_UNIX,
    NBD_ADDRESS_ABSTRACT,
    NBD_ADDRESS_VSOCK
};

typedef struct nbd_address {
    uint32_t kind;    // enum nbd_address_kind
    uint32_t family;  // TCP: 0 whatever works, 4 IPv4 only, 6 IPv6 only
    const char *host; // TCP: name or numeric address, without brackets
    const char *port; // TCP: decimal number or service name; NULL: "10809"
    const char *path; // UNIX: path.  ABSTRACT: name without the leading NUL
    uint32_t cid;     // VSOCK: context identifier of the machine
    uint32_t vport;   // VSOCK: port; 0: 10809
} nbd_address;

#ifndef NBD_NO_SOCKETS

#ifdef _WIN32
typedef uintptr_t nbd_socket; // SOCKET
#define NBD_SOCKET_NONE ((nbd_socket) ~(nbd_socket)0)
#else
typedef int nbd_socket;
#define NBD_SOCKET_NONE (-1)
#endif

// A transport over one connected or connecting stream socket.
typedef struct nbd_socket_io {
    int os_error;            // errno, or WSAGetLastError, of the call that failed
    nbd_socket socket;       // the caller's; this transport never closes it
    nbd_transport transport; // give its address to nbd_connect
    // NULL, or: maps NBD_SEND_MORE (or 0) to the flags of send(2).  Called before
    // each send, so it may also set a socket option such as TCP_CORK instead.
    // NULL maps with NBD_SEND_FLAGS: MSG_MORE where it exists, else nothing.
    int (*send_flags)(struct nbd_socket_io *io, unsigned flags);
} nbd_socket_io;

// Makes a transport of a socket: TCP, Unix, vsock, one of a socketpair.  Sets it
// non-blocking, and SO_NOSIGPIPE where MSG_NOSIGNAL is missing; where neither
// exists ignore SIGPIPE yourself.  On TCP set TCP_NODELAY yourself
// (nbd_dial_step does): the library coalesces what it sends, and Nagle's
// algorithm would only delay the last packet.  Clears *io first: set send_flags
// behind it.  On Windows WSAStartup is yours.
// io: life of the client.  socket: the same; close it after CLOSED.
// Errors: NBD_ERR_SOCKET; io->os_error tells why.
NBD_API int nbd_socket_init(nbd_socket_io *io, nbd_socket socket);

// Closes a socket that the caller owns: close(2) or closesocket.
// NBD_SOCKET_NONE is allowed and does nothing.
NBD_API void nbd_socket_close(nbd_socket socket);

#ifndef NBD_NO_DIAL

// A connection being made.  `socket` is what to wait on; the rest is private.
typedef struct nbd_dial {
    int os_error;      // errno, WSAGetLastError or EAI_... of what failed last
    nbd_socket socket; // the attempt under way, or NBD_SOCKET_NONE
    uint32_t kind;     // Private from here on
    void *list;
    void *next;
} nbd_dial;

// Begins to connect.  Resolves the name of a TCP address, which may block and is
// the only thing here that does; then starts the first attempt.
// dial: until nbd_dial_step ends it or nbd_dial_stop.  address: this call.
// Returns 0: wait until dial->socket is writable, then call nbd_dial_step.
// Errors: NBD_ERR_RESOLVE, NBD_ERR_CONNECT (no attempt could be started),
// NBD_ERR_ARG (path too long, member missing, unknown kind, family not 0, 4 or 6),
// NBD_ERR_UNSUPPORTED (this platform has no such sockets).  After an error nothing is left
// open.
NBD_API int nbd_dial_start(nbd_dial *dial, const nbd_address *address);

// Goes on connecting without blocking; each address of a name is tried in turn.
// Call it when dial->socket is writable, or has failed.  An attempt that hangs is
// given up with nbd_dial_next.
// Returns 1 (not 0): connected; dial->socket is now yours, non-blocking, with
// TCP_NODELAY on TCP, and with NBD_SEND_BUFFER on others.  0: wait until dial->socket is
// writable, then call again; it may be another socket than before, under the same number
// too.
// Errors: NBD_ERR_STATE after the end, NBD_ERR_CONNECT (no address is left;
// dial->os_error is the last attempt's).  After 1 or an error nothing else is left open.
NBD_API int nbd_dial_step(nbd_dial *dial);

// Gives up the attempt under way as timed out and starts the next address.
// Returns 0, and errors: as nbd_dial_step.
NBD_API int nbd_dial_next(nbd_dial *dial);

// Gives up: closes what nbd_dial_start and nbd_dial_step opened.  Harmless after
// their end, but then dial->socket is yours and stays open.
NBD_API void nbd_dial_stop(nbd_dial *dial);

#endif // NBD_NO_DIAL
#endif // NBD_NO_SOCKETS

/// mbedTLS ///
//
// A transport over another transport, with NBD_MBEDTLS: mbedTLS 2.28 and 3.6.  At the
// STARTTLS event a program calls nbd_starttls(client, &tls.transport), and that is all.  The
// TLS handshake then runs inside nbd_poll, without blocking, as bytes come and go.
//
//     nbd_tls_credentials_init(&credentials, &options);        // once, for all clients
//     nbd_tls_init(&tls, &io.transport, &credentials.config, "the name to verify", NULL);
//     ... nbd_connect(&client, &io.transport) ... STARTTLS: nbd_starttls(&client, &tls.transport)
//     nbd_tls_free(&tls);                                      // after CLOSED or nbd_sync_close
//     nbd_tls_credentials_free(&credentials);
//
// A failure of TLS ends the session with NBD_ERR_TRANSPORT.  The detail of CLOSED is then
// tls.transport.detail: a text for each cause that a program can tell.  In every mode no byte
// of NBD leaves before the handshake is over and the server is verified.
// A server may leave close_notify out after the client's goodbye; if it does before that, the
// detail says so, and the session ends as in clear (NBD_ERR_CLOSED, NBD_ERR_TRUNCATED).
// Records without data (tickets, warnings, empty ones) are passed over, but one call of a hook
// takes no more than 256 KiB of them.
//
// Memory: mbedTLS allocates, 38 KiB for a session with records of its default size
// (MBEDTLS_SSL_IN_CONTENT_LEN, MBEDTLS_SSL_OUT_CONTENT_LEN) and more while shaking hands.
// To give it memory of your own: mbedtls_platform_set_calloc_free, or
// mbedtls_memory_buffer_alloc_init with MBEDTLS_MEMORY_BUFFER_ALLOC_C.
// Firmware: without MBEDTLS_FS_IO there are no _file options; without
// MBEDTLS_HAVE_TIME_DATE no certificate expires; with MBEDTLS_ECP_RESTARTABLE and
// mbedtls_ecp_set_max_ops a step of the handshake is cut in short ones: the hooks then ask
// to be called again as soon as the transport below can be written to.
// Threads: what uses one nbd_tls_credentials in several threads needs MBEDTLS_THREADING_C.

#ifdef NBD_MBEDTLS

// Bit of nbd_tls.verify_flags beside those of mbedTLS (MBEDTLS_X509_BADCERT_...): the
// server's certificate is signed by itself.  Set with configurations of nbd_tls_credentials.
#define NBD_TLS_SELF_SIGNED 0x40000000u

// What credentials are made of.  Zeroed means none.  Memory: PEM with the NUL behind it
// counted in the size, or DER.  Of a thing give the memory or the file, not both.
// All of it is held for the call of nbd_tls_credentials_init.
typedef struct nbd_tls_options {
    // 1: any certificate is good, so anybody in the middle can read and write.
    int no_verify;
    // 1: no certificate is no error if certificate_file cannot be opened.
    int certificate_optional;
    // Authorities that may have signed the server's certificate.  A file may be the bundle
    // of the system; of several in one what mbedTLS cannot read is left out.
    const void *ca;
    size_t ca_size; // bytes
    const char *ca_file;
    // NULL, or what the client proves who it is with; the chain behind it may follow.
    const void *certificate;
    size_t certificate_size; // bytes
    const char *certificate_file;
    const void *key;
    size_t key_size; // bytes
    const char *key_file;
    const char *key_password; // NULL: the key is not encrypted
    // NULL, or a key known to both sides.  No certificate is then accepted or sent.
    const void *psk;
    size_t psk_size;      // bytes, at most MBEDTLS_PSK_MAX_LEN (32 or 48)
    const char *psk_file; // as psktool writes it: lines of user:key in hexadecimal
    const char *user;     // the identity that goes with the key
    // NULL: mbedTLS's entropy and CTR_DRBG.  Else fills `size` bytes, returns 0 or an error
    // of mbedTLS; held, as its context, until nbd_tls_credentials_free.
    int (*rng)(void *context, unsigned char *to, size_t size);
    void *rng_context;
} nbd_tls_options;

// Who may be trusted, and who we are.  Any number of sessions share it; do not move it.
typedef struct nbd_tls_credentials {
    int tls_error;      // mbedTLS's number for what failed, or 0
    const char *detail; // constant text: what was wrong, or ""
    // For nbd_tls_init.  Yours to adjust before the first session, by mbedtls_ssl_conf_...
    mbedtls_ssl_config config;
    // Private from here on
#ifdef MBEDTLS_X509_CRT_PARSE_C
    mbedtls_x509_crt ca;
    mbedtls_x509_crt certificate;
    mbedtls_pk_context key;
#endif
#ifdef NBDI_TLS_OWN_RNG
    mbedtls_entropy_context entropy;
    mbedtls_ctr_drbg_context drbg;
#endif
    int (*rng)(void *context, unsigned char *to, size_t size);
    void *rng_context;
    int made; // 1 until it is freed
} nbd_tls_credentials;

// Makes a configuration: TLS 1.2 or 1.3, mbedTLS's default ciphers, no session tickets.
// Calls psa_crypto_init where mbedTLS wants it (for TLS 1.3, or built to use PSA): it may be
// called twice, but not by two threads at once.
// credentials: until nbd_tls_credentials_free; call that after an error too.
// options: this call, but see rng.
// Errors, each with credentials->detail: NBD_ERR_ARG (neither a CA nor a PSK nor no_verify;
// a thing as memory and as file; certificate without key or the reverse; PSK with a CA or
// a certificate, without user, or empty; no rng, and mbedTLS has none; mbedTLS is built
// without the certificates, shared keys or files that this takes),
// NBD_ERR_TLS_SETUP (a file cannot be read, or what it holds cannot be used; password
// missing or wrong; key of another certificate; user not in psk_file; out of memory).
NBD_API int nbd_tls_credentials_init(nbd_tls_credentials *credentials,
                                     const nbd_tls_options *options);

// Frees what mbedTLS allocated.  Harmless on a zeroed struct, and twice.
NBD_API void nbd_tls_credentials_free(nbd_tls_credentials *credentials);

// One TLS session.
typedef struct nbd_tls {
    int tls_error;              // mbedTLS's number for what failed, or 0
    int alert;                  // number of the fatal alert of the server, or 0
    uint32_t verify_flags;      // why the server's certificate is not good, or 0
    nbd_transport transport;    // give its address to nbd_starttls; its detail tells what failed
    mbedtls_ssl_context ssl;    // yours to ask for the version, the cipher, the certificate
    const nbd_transport *below; // Private from here on
    const char *verify_name;
    const unsigned char *latch; // what mbedTLS holds of a blocked write
    size_t latch_size;
    size_t budget;      // bytes that a call of a hook may still take from below
    ptrdiff_t blocked;  // what the transport below said: NBD_IO_READ, NBD_IO_WRITE, or 0
    unsigned more;      // for the send hook below
    uint8_t named;      // 1 once mbedTLS has the name to verify
    uint8_t up;         // 1 once the handshake is over
    uint8_t heard;      // 1 once a byte of NBD has come
    uint8_t send_waits; // 1 while the send hook waits for input
    uint8_t sending;    // 1 if the send hook below was the last of its hooks to be called
    uint8_t send_over;  // 1 once the transport below cannot send
    uint8_t notified;   // 1 once close_notify has been made
    uint8_t below_over; // NBDI_TLS_..., or 0
    uint8_t over;       // NBDI_TLS_..., or 0
    unsigned char stage[NBD_TLS_STAGE];
} nbd_tls;

// Prepares a session; nothing is sent.  Three names that may all differ: the one that is
// dialled (not known here), the one to verify, and the one to ask the server for.
// tls: until nbd_tls_free; call that after an error too, and before using it again.  After
// an error its hooks fail with the same detail, so a session cannot start by mistake.
// A stream that is TLS from its first byte, which is not NBD's way, works too: give the
// transport to nbd_connect, and begin with nbd_poll(client, NBD_WANT_READ).
// below: the transport to encrypt on, for the life of the client; it may be filled in later.
// config: life of the client; that of nbd_tls_credentials, or your own for a client over
// a stream (then psa_crypto_init, renegotiation off, and the mode of verification are yours).
// verify_name: what the server's certificate must be made out to; until the handshake is
// over.  NULL: only if `config` verifies no certificate (no_verify, PSK).
// server_name: what is sent as SNI; until the handshake is over.  NULL: verify_name, unless
// that is an address.  "": nothing.
// mbedTLS 2.28 finds no address among the alternative names of a certificate.
// Errors, each with tls->transport.detail: NBD_ERR_ARG (verify_name missing, or empty; a name
// longer than 255 bytes), NBD_ERR_TLS_SETUP (mbedTLS refuses, mostly for want of memory).
NBD_API int nbd_tls_init(nbd_tls *tls, const nbd_transport *below, const mbedtls_ssl_config *config,
                         const char *verify_name, const char *server_name);

// Frees what mbedTLS allocated, without a word to the server.  Harmless on a zeroed
// struct, and twice.
NBD_API void nbd_tls_free(nbd_tls *tls);

#endif // NBD_MBEDTLS

/// Convenience ///

#ifndef NBD_NO_CONVENIENCE

// What an NBD URI says.  Strings are NUL-terminated and lie in the memory that
// nbd_uri_parse was given; NULL: not in the URI.
typedef struct nbd_uri {
    uint32_t config_flags; // for nbd_config.flags: NBD_TLS_REQUIRE for nbds
    int tls_verify_peer;   // 1 unless tls-verify-peer is 0 or false
    nbd_address address;
    const char *export_name; // never NULL
    const char *user;        // user name in front of the host
    const char *tls_type;    // "x509", "psk" or "anon"
    const char *tls_hostname;
    const char *tls_certificates;
    const char *tls_psk_file;
    const char *unknown; // the first query parameter that is not known: warn
    const char *detail;  // constant text: which rule was broken, or ""
    size_t detail_at;    // where in the text, in bytes
} nbd_uri;

// Takes apart nbd://, nbds://, nbd+unix://, nbds+unix://, nbd+vsock://,
// nbds+vsock:// URIs.  Opens and starts nothing.  Percent-escapes are decoded.
// An abstract Unix name is ?socket=%00name.  Parameters: socket, tls-type,
// tls-hostname, tls-verify-peer, tls-certificates, tls-psk-file; a repeated one is
// an error, another one is left to you in `unknown`.
// uri: filled in every case.  text: this call.  memory: as long as `uri` is used;
// strlen(text) + 8 bytes always suffice.  On an error all is blank but detail.
// Errors: NBD_ERR_URI (uri->detail and detail_at tell where and why),
// NBD_ERR_BUFFER (memory too small).
NBD_API int nbd_uri_parse(nbd_uri *uri, const char *text, char *memory, size_t memory_size);

#ifdef NBD_MBEDTLS

// Fills in the options as a URI says.  X.509: ca-cert.pem, client-cert.pem and client-key.pem
// in the directory tls-certificates, the latter two if there; without that parameter ca_file
// is yours to set (the system's bundle, say).  PSK (tls-type=psk, or tls-psk-file alone):
// psk_file, and user if the URI has one.  Opens nothing, but nbd_tls_credentials_init will:
// do not call it for a URI that may not name files of yours.
// options: filled in every case.  memory: for names of files, as long as `options` is used;
// 3 * strlen(tls_certificates) + 48 bytes suffice, 48 without.
// Errors, each with uri->detail: NBD_ERR_UNSUPPORTED (tls-type=anon: it protects from
// nobody), NBD_ERR_URI (tls-type=psk without tls-psk-file), NBD_ERR_BUFFER.
NBD_API int nbd_tls_uri(nbd_tls_options *options, nbd_uri *uri, char *memory, size_t memory_size);

// The name to verify: tls-hostname, else the host; NULL if there is neither (Unix, vsock)
// or no certificate is to be verified.
NBD_API const char *nbd_tls_uri_name(const nbd_uri *uri);

#endif

// Makes a text of the server fit for a terminal or a log: printable ASCII stays but
// the backslash, every other byte becomes \x and two hexadecimal digits.  Writes at
// most `room` bytes (1 or more) with the NUL, never a part of an escape, and
// returns the length without it.  to, from: this call.
NBD_API size_t nbd_escape(char *to, size_t room, const char *from, size_t size);

// How many of `size` bytes one command may take from this server: all of them if it can,
// else a whole number of preferred blocks, which is one of minimum blocks too.  The limit
// is maximum_payload for READ, WRITE and CACHE (qemu-nbd refuses more), for the others
// what the header can say: 32 bits without extended headers.  From READY on it is above
// 0 if `size` is.  command: enum nbd_command.
// Chapter "Size constraints".
NBD_API uint64_t nbd_fit(const nbd_client *client, uint32_t command, uint64_t size);

// Blocking calls for small tools.  They drive `client` to the end of one command;
// one struct, one client.  Zero it, then set timeout_ms and client.
//
// Each call gives up when timeout_ms have passed in it: since the buffer may still
// be in use by then it abandons the connection and returns NBD_ERR_TIMEOUT.  All of
// them return NBD_ERR_BUSY while requests of nbd_issue are in flight, NBD_ERR_STATE
// before nbd_sync_open or nbd_sync_connect, if the transport has no wait hook, or
// if the handshake needs the caller (NBD_NEGOTIATE); NBD_ERR_TLS if the server starts TLS and
// `tls` is NULL; any error of the connection, of nbd_issue and of the server.
typedef struct nbd_sync {
    int timeout_ms;     // for each call; 0: no limit
    int os_error;       // errno, WSAGetLastError or EAI_... of dialling, if any
    nbd_client *client; // prepared by nbd_init
    // NULL, or: what STARTTLS switches to, as &tls.transport of an nbd_tls over
    // &io.transport.  It has a wait hook.  Held for the life of the client.
    const nbd_transport *tls;
    // The server's words for the last error, by nbd_escape; "" if it said nothing.
    char message[256];
#ifndef NBD_NO_SOCKETS
    nbd_socket_io io; // what nbd_sync_dial and nbd_sync_open made; yours to read
    int opened;       // Private from here on
#endif
    const nbd_transport *transport; // Private
} nbd_sync;

#if !defined(NBD_NO_SOCKETS) && !defined(NBD_NO_DIAL)
// Only dials.  Then wait on sync->io.socket in a loop of your own, or hand
// sync->io.transport, or one around it, to nbd_sync_connect or nbd_connect.
// nbd_sync_close closes the socket.  `client` may be NULL.
// address: this call.  sync: until nbd_sync_close.
// Errors besides the above: those of nbd_dial_start and nbd_dial_step, NBD_ERR_SOCKET,
// NBD_ERR_STATE (open already: nbd_sync_close first).
NBD_API int nbd_sync_dial(nbd_sync *sync, const nbd_address *address);

// nbd_sync_dial, then nbd_sync_connect: shakes hands until READY.
// address: this call.  sync: until nbd_sync_close.
// Errors besides the above: those of nbd_dial_start and nbd_dial_step, NBD_ERR_SOCKET,
// NBD_ERR_STATE (open already: nbd_sync_close first).
NBD_API int nbd_sync_open(nbd_sync *sync, const nbd_address *address);
#endif

// Shakes hands until READY on a transport that you made.
// transport: life of the client.
NBD_API int nbd_sync_connect(nbd_sync *sync, const nbd_transport *transport);

// One command each, `offset` and `size` in bytes, `flags` as in nbd_op.  What exceeds
// the maximum payload or 32 bits is split; the first error ends the call, and the memory
// of the parts behind it stays as it was.  A size of 0 succeeds at once.  Memory: this call.
NBD_API int nbd_sync_read(nbd_sync *sync, void *buffer, size_t size, uint64_t offset);
NBD_API int nbd_sync_flush(nbd_sync *sync);
// The same for memory that is only read.
NBD_API int nbd_sync_write(nbd_sync *sync, const void *data, size_t size, uint64_t offset,
                           uint32_t flags);
// The same for commands without memory.
NBD_API int nbd_sync_trim(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags);
NBD_API int nbd_sync_cache(nbd_sync *sync, uint64_t size, uint64_t offset);
NBD_API int nbd_sync_write_zeroes(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags);

// Makes a range read as zero on any server that lets itself be written to; never by TRIM,
// which promises nothing about what is read.  The range is zeroed in order, piece by
// piece; a piece that the server refuses (NBD_ENOTSUP, NBD_EINVAL, NBD_EOVERFLOW) is
// tried in the next of these ways, which then serves for the rest of the range:
//   WRITE_ZEROES with NBD_FAST_ZERO, if `flags` and the server have it; WRITE_ZEROES;
//   WRITE_ZEROES of at most the maximum payload; WRITE of `zeroes`.
// What the server does not offer is left out.  NBD_NO_HOLE says nothing to a WRITE.
// size, offset: bytes.  flags: NBD_FUA, NBD_NO_HOLE, NBD_FAST_ZERO.
// zeroes: NULL, never to WRITE; or zeroes_size bytes of zero, at least a minimum block,
// aligned as you like it.  Every WRITE starts at its first byte and is a whole number of
// minimum blocks; it is only read, and held for this call.
// Errors besides the above: NBD_ERR_ARG (another flag), NBD_ERR_BUFFER (zeroes_size below
// the minimum block), NBD_ERR_BOUNDS and NBD_ERR_BLOCK_SIZE (of the whole range, before
// anything is sent), NBD_ERR_UNSUPPORTED (NBD_FUA, or, with NULL, WRITE_ZEROES is not
// offered).  After an error from the server a part of the range may be zero already.
// Chapter "Request types".
NBD_API int nbd_sync_zero(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags,
                          const void *zeroes, size_t zeroes_size);

// Disconnects, waits for the end, closes what nbd_sync_open or nbd_sync_dial opened.  Call it in
// every case, after errors too; harmless on a zeroed struct, and twice.
// Returns 0 (also if the session was over before), or the error that it ended with: on a
// stream without an end NBD_ERR_TIMEOUT, with NBD_CMD_DISC sent;
// NBD_ERR_BUSY, with nothing closed, while requests of nbd_issue are in flight: pull
// their DONE events first, after nbd_abandon if need be.
NBD_API int nbd_sync_close(nbd_sync *sync);

// A walk through a range of the export, step by step, with all metadata contexts side by
// side.  A step ends where the status flags of any context change, and nowhere else: what
// the server cuts in pieces is joined, what it tells about bytes outside the range is cut
// off.
//
//     error = nbd_walk_start(&walk, &sync, size, 0, memory, sizeof memory / sizeof memory[0]);
//     while (!error && !(error = nbd_walk_next(&walk)) && walk.size > 0) {
//         ... walk.offset, walk.size, walk.flags[0] ...
//     }
typedef struct nbd_walk {
    uint64_t offset;       // of the step: bytes from the start of the export
    uint64_t size;         // of the step: bytes; 0 when the walk is over
    const uint64_t *flags; // of the step: status flags as sent, one for each context by
                           // its index; held until the next call on this walk
    nbd_sync *sync;        // Private from here on
    uint64_t *memory;      // flags, then counts, then extents of each context
    uint64_t end;          // of the range
    uint64_t known;        // up to here the extents of every context are in memory
    uint64_t window;       // bytes that are worth asking for at once
    size_t room;           // extents of each context
    uint32_t contexts;
    uint32_t dropped; // 1 if the reply had more than memory could take
} nbd_walk;

// Starts a walk; sends nothing.  memory: memory_count numbers, 2 + 2 * n for each metadata
// context to take n extents of it from a reply, n at least 1; more memory, fewer queries.
// size, offset: bytes; any, whatever the minimum block is.
// walk: filled in every case.  walk, sync, memory: held until the last nbd_walk_next.
// Errors: NBD_ERR_STATE (no session), NBD_ERR_BUSY, NBD_ERR_UNSUPPORTED (no metadata
// context was agreed on), NBD_ERR_BOUNDS, NBD_ERR_BUFFER (memory too small).
NBD_API int nbd_walk_start(nbd_walk *walk, nbd_sync *sync, uint64_t size, uint64_t offset,
                           uint64_t *memory, size_t memory_count);

// Takes the next step.  Blocks if it has to ask the server, under the rules of the
// nbd_sync_ calls; between two steps the session may be used for other calls.  Each
// query takes the walk further by a byte at least, or is an error.
// Returns 0 with a step, or with size 0: the range is over, and stays so.  After an error
// the step is what was known before it (size may be 0); the next call asks again behind it.
// Errors: as nbd_sync_ calls; NBD_ERR_STATE also if nbd_walk_start did not succeed or the
// session has other contexts now; NBD_ERR_PROTOCOL (the server told nothing new, the
// connection lives), NBD_ERR_BLOCK_SIZE (what is left of the export is smaller than its
// minimum block: it cannot be asked for, and the server did not tell it unasked).
// Chapter "NBD_CMD_BLOCK_STATUS".
NBD_API int nbd_walk_next(nbd_walk *walk);

#endif // NBD_NO_CONVENIENCE

#ifdef __cplusplus
}
#endif

#endif // NBD_H

#if defined(NBD_IMPLEMENTATION) && !defined(NBD_IMPLEMENTATION_DONE)
#define NBD_IMPLEMENTATION_DONE

#include <string.h>

#ifdef NBD_MBEDTLS
#include <mbedtls/platform_util.h>
#if defined(MBEDTLS_SSL_PROTO_TLS1_3) || defined(MBEDTLS_USE_PSA_CRYPTO)
#define NBDI_TLS_STARTS_PSA
#include <psa/crypto.h>
#endif
#ifdef MBEDTLS_FS_IO
#include <stdio.h>
#endif
#endif

#ifndef NBD_NO_SOCKETS
#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <winsock2.h>
#include <ws2tcpip.h>
#else
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#ifndef __ZEPHYR__ // it has struct iovec in <sys/socket.h>, and no Unix sockets
#include <sys/uio.h>
#endif
#include <time.h>
#include <unistd.h>
#ifndef NBD_NO_DIAL
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#ifndef __ZEPHYR__
#include <sys/un.h>
#endif
#ifndef AI_PASSIVE
#error "nbd.h: <netdb.h> hides getaddrinfo: define _POSIX_C_SOURCE 200112L first, or NBD_NO_DIAL"
#endif
#endif
#endif
#endif // NBD_NO_SOCKETS

#ifdef __cplusplus
extern "C" {
#endif

/// Implementation notes ///
//
// Order of what follows: wire, memory of a request, range proof, endings, sending
// (requests, options), receiving (input memory, options, replies), public functions,
// sockets, mbedTLS, convenience.  The last three touch nothing inside the client.  The engine
// knows no sockets, clocks, heap, errno or TLS.
//
// STATES.  What each state reads, and where it leads.  A state reads a fixed
// number of bytes that lie in one piece (the least read-ahead holds the
// largest), or a counted run of any size.  So every state restarts at any byte,
// and the events are the same for every cut of the stream.
//
//   state        reads                              leads to
//   IDLE         nothing                            MAGIC (nbd_connect)
//   MAGIC        16: NBDMAGIC and a second magic    OLD, FLAGS
//   OLD          136: size, flags, zeroes           REPLY
//   FLAGS        2: handshake flags                 OPTION, NAME, HAGGLE
//   HAGGLE       nothing is due                     OPTION, NAME (nbd_negotiate), CLOSING
//   OPTION       20: header of an option reply      INFO, SERVER, CONTEXT, TEXT,
//                                                   SETTLE
//   INFO         2: type of the information         INFO_EXPORT, INFO_BLOCK, TEXT,
//                                                   SKIP
//   INFO_EXPORT  10: size, flags                    OPTION
//   INFO_BLOCK   12: three sizes                    OPTION
//   SERVER       4: length of a name                TEXT, then LISTED
//   LISTED       nothing                            TEXT, OPTION
//   CONTEXT      4: number of a metadata context    TEXT
//   NAME         10: size, flags                    SETTLE
//   NAME_ZEROES  134: size, flags, zeroes           SETTLE; it stands for NAME wherever
//                                                   the server sends zeroes
//   TEXT         a text, or what the buffer holds   SKIP
//   SKIP         a counted run, dropped             `after`
//   SETTLE       nothing; the final reply is in,    OPTION, NAME, HAGGLE, TLS, REPLY,
//                the rest of the option goes out    CLOSING
//   TLS          nothing                            OPTION, NAME, HAGGLE (nbd_starttls)
//   REPLY        16, 20 or 32: header of a reply    DATA, OFFSET, HOLE, ERROR, STATUS,
//                                                   REPLY, CLOSING
//   OFFSET       8: offset of a data chunk          DATA
//   DATA         a counted run of payload           REPLY (as END does)
//   HOLE         12: offset, size                   END
//   ERROR        6: error, length of its message    TEXT, SKIP, then ERROR_OFFSET or END
//   ERROR_OFFSET 8: offset of the error             END
//   STATUS       4 or 8: context, count             EXTENT
//   EXTENT       8 or 16: one extent                EXTENT, END
//   END          nothing: a chunk is complete       REPLY
//   CLOSING      everything, dropped                DEAD
//   DEAD         nothing: requests finish           ENDED
//   ENDED        nothing                            MAGIC (nbd_connect)
//
// Every state but IDLE and ENDED leads to DEAD: a wrong byte, end of stream, a failed
// hook, nbd_abandon; HAGGLE and TLS also by nbd_disconnect.
//
// BUFFER.  [0, head_size) is the header area, [head_size, buffer_size) reads
// ahead.  Encoded bytes lie at [head_sent, head_fill); the area starts anew when
// all of it has gone out.  Unparsed input lies at [in_start, in_end).  Only
// nbd_incoming moves it, and only when no input memory is on offer.  Payload of
// the caller's is on offer only while the read-ahead is empty, so the stream is
// always: payload first, then what lies behind it.
//
// REQUESTS.  A slot is free (id 0), or between `first` and the end of the send queue
// (not all of it has gone out), or sent and waiting, or in the `done` list (replied
// before its last byte was acknowledged).  `unsent` is the first of the queue without an
// encoded header.  A reply matches from the moment the whole header has been offered,
// since the receive completion may be seen first; the request finishes when the last
// byte is acknowledged too.  nbd_next alone frees a slot.
//
// OPTIONS.  An option is a sequence of pieces: small encoded ones (header, lengths) in
// the header area, strings where the caller keeps them.  Piece 0 is the client
// flags.  Any piece can be made again from its index alone, so a short header
// area and a blocked transport only delay.
//
// ENDINGS.  `error` is the first error of the session and leaves with CLOSED; `cause` is
// what ended the connection and leaves with the requests in flight.  They differ if the
// server refused the export or said NBD_ESHUTDOWN before.  A polite end waits in its
// state until nothing is in flight, sends its last message in CLOSING, tells the
// transport that nothing follows, and drops what still comes.
//
// WANTS.  NOW is said if nbd_next was not asked since something came in, and if a
// direction could move at once: it is computed from `fresh`, the last results of the
// transport and what is pending.  So commands issued after nbd_poll are NOW as well:
// it spares the program a wait for a socket that is writable anyway.

// X(state, bytes that it reads in one piece; 0: none, or the step looks itself).  STATUS and
// EXTENT read twice as many with extended headers.
// clang-format off
#define NBDI_STATES(X) \
    X(IDLE, 0) X(MAGIC, 16) X(OLD, 136) X(FLAGS, 2) X(HAGGLE, 0) X(OPTION, 20) X(INFO, 2) \
    X(INFO_EXPORT, 10) X(INFO_BLOCK, 12) X(SERVER, 4) X(LISTED, 0) X(CONTEXT, 4) X(NAME, 10) \
    X(NAME_ZEROES, 134) X(TEXT, 0) X(SKIP, 0) X(SETTLE, 0) X(TLS, 0) X(REPLY, 0) X(OFFSET, 8) \
    X(DATA, 0) X(HOLE, 12) X(ERROR, 6) X(ERROR_OFFSET, 8) X(STATUS, 4) X(EXTENT, 8) X(END, 0) \
    X(CLOSING, 0) X(DEAD, 0) X(ENDED, 0)
// clang-format on
#define NBDI_STATE(name, size) NBDI_##name,
enum nbdi_state { NBDI_STATES(NBDI_STATE) };

// What one step of the parser came to.
enum nbdi_step { NBDI_WAIT, NBDI_AGAIN, NBDI_EVENT };

// nbd_slot.state
#define NBDI_OFFERED 0x01u // the whole header has been offered
#define NBDI_SENT 0x02u    // every byte is acknowledged
#define NBDI_REPLIED 0x04u // the reply is complete
#define NBDI_SPARED 0x08u  // holes were left untouched (NBD_SPARSE)

// nbd_client.in_over
#define NBDI_IN_EOF 1
#define NBDI_IN_FAILED 2

// nbd_client.disc
#define NBDI_DISC_DUE 1
#define NBDI_DISC_ENCODED 2

#define NBDI_NONE 0xffffu // no slot

// Wire: magic numbers and sizes of headers.
#define NBDI_MAGIC_NBD 0x4e42444d41474943u
#define NBDI_MAGIC_OPTION 0x49484156454f5054u
#define NBDI_MAGIC_OLD 0x00420281861253u
#define NBDI_MAGIC_OPTION_REPLY 0x0003e889045565a9u
#define NBDI_MAGIC_REQUEST 0x25609513u
#define NBDI_MAGIC_EXTENDED_REQUEST 0x21e41c71u
#define NBDI_MAGIC_SIMPLE 0x67446698u
#define NBDI_MAGIC_STRUCTURED 0x668e33efu
#define NBDI_MAGIC_EXTENDED 0x6e8a278cu

#define NBDI_FIXED_NEWSTYLE 1u
#define NBDI_NO_ZEROES 2u

#define NBDI_REP_ACK 1u
#define NBDI_REP_SERVER 2u
#define NBDI_REP_INFO 3u
#define NBDI_REP_META_CONTEXT 4u
#define NBDI_REP_ERROR 0x80000000u

#define NBDI_INFO_TYPE_EXPORT 0u
#define NBDI_INFO_TYPE_NAME 1u
#define NBDI_INFO_TYPE_DESCRIPTION 2u
#define NBDI_INFO_TYPE_BLOCK_SIZE 3u

#define NBDI_CHUNK_DONE 1u // NBD_REPLY_FLAG_DONE
#define NBDI_CHUNK_NONE 0u
#define NBDI_CHUNK_DATA 1u
#define NBDI_CHUNK_HOLE 2u
#define NBDI_CHUNK_STATUS 5u
#define NBDI_CHUNK_STATUS_EXT 6u
#define NBDI_CHUNK_ERROR 0x8001u
#define NBDI_CHUNK_ERROR_OFFSET 0x8002u

#define NBDI_WIRE_DISC 2u
#define NBDI_WIRE_PAYLOAD_LEN 0x20u
#define NBDI_WIRE_FLAGS 0x1fu // these bits of nbd_op.flags are the wire's own

#define NBDI_STRING_MAX 4096u     // chapter "Conventions"
#define NBDI_INFO_MAX 65536u      // an unknown information type, with its header
#define NBDI_ERROR_MAX 8192u      // an unknown error chunk
#define NBDI_EXTENTS_MAX 1048576u // chapter "NBD_REPLY_TYPE_BLOCK_STATUS"
#define NBDI_MAXIMUM 33554432u    // chapter "Size constraints", as the next two
#define NBDI_PREFERRED 4096u
#define NBDI_MINIMUM_LARGEST 65536u

#define NBDI_LARGE 32768u // a payload that costs more to copy than a call of recv(2) does
#define NBDI_AHEAD 64u    // holds the largest header of a reply, and the offset behind it

#ifndef NBD_IOVECS
#ifdef NBD_NO_SOCKETS
#define NBD_IOVECS 16
#else
#define NBD_IOVECS 128
#endif
#endif

#ifndef NBD_POLL_BYTES
#define NBD_POLL_BYTES 1048576
#endif

#ifndef NBD_SEND_BUFFER
#define NBD_SEND_BUFFER 262144
#endif

#ifndef NBD_STAGE
#ifdef NBD_NO_SOCKETS
#define NBD_STAGE 128
#else
#define NBD_STAGE 512
#endif
#endif

#ifndef NBD_ASSERT
#define NBD_ASSERT(x) ((void)0)
#endif

// What is cut is a constant 0 here, so that its code goes without a mark of its own.
#ifdef NBD_NO_NEGOTIATE
#define NBDI_NEGOTIATES 0
#else
#define NBDI_NEGOTIATES 1
#endif
#ifdef NBD_NO_BLOCK_STATUS
#define NBDI_STATUSES 0
#else
#define NBDI_STATUSES 1
#endif
#ifdef NBD_NO_EXTENDED_HEADERS
#define NBDI_EXTENDS 0
#else
#define NBDI_EXTENDS 1
#endif
#ifdef NBD_NO_OLDSTYLE
#define NBDI_OLDSTYLES 0
#else
#define NBDI_OLDSTYLES 1
#endif
#ifdef NBD_NO_TLS
#define NBDI_ENCRYPTS 0
#else
#define NBDI_ENCRYPTS 1
#endif
#ifdef NBD_NO_RAW
#define NBDI_RAWS 0
#else
#define NBDI_RAWS 1
#endif

#ifdef NBD_NO_SPARSE
#define NBDI_SPARES 0
#else
#define NBDI_SPARES 1
#endif
#ifdef NBD_NO_IOV
#define NBDI_GATHERS 0
#else
#define NBDI_GATHERS 1
#endif
#ifdef NBD_NO_MESSAGES
#define NBDI_TELLS 0
#else
#define NBDI_TELLS 1
#endif
#ifdef NBD_NO_GO
#define NBDI_GOES 0
#else
#define NBDI_GOES 1
#endif
#if defined(NBD_NO_COUNTERS) && (defined(NBD_NO_CONVENIENCE) || !defined(NBD_NO_SOCKETS))
#define NBDI_COUNTS 0
#else
#define NBDI_COUNTS 1
#endif
#ifdef NBD_NO_EXTRAS
#define NBDI_EXTRAS 0
#else
#define NBDI_EXTRAS 1
#endif
#ifdef NBD_NO_POLL
#define NBDI_POLLS 0
#else
#define NBDI_POLLS 1
#endif
#if defined(NBD_NO_TEXT) && defined(NBD_NO_POLL) // a transport may have texts of its own
#define NBDI_DETAILS 0
#else
#define NBDI_DETAILS 1
#endif

// The bits of nbd_config.flags that are known.
#define NBDI_CONFIG_FLAGS \
    (0x0007u | NBDI_NEGOTIATES * NBD_NEGOTIATE | \
     NBDI_ENCRYPTS * (NBD_TLS_ALLOW | NBD_TLS_REQUIRE) | NBDI_RAWS * 0xff00u)

#ifdef NBD_NO_TEXT
#define NBDI_SAY(text) ""
#else
#define NBDI_SAY(text) text
#endif

// Where a compiler that optimises for size guesses wrong, by the bytes on a Cortex-M.
#if defined(__GNUC__) && defined(__OPTIMIZE_SIZE__)
#define NBDI_SMALL 1
#define NBDI_APART static __attribute__((noinline))
#define NBDI_WITHIN static inline __attribute__((always_inline))
#else
#define NBDI_SMALL 0
#define NBDI_APART static
#define NBDI_WITHIN static inline
#endif

// Refuses to compile if a macro is out of its range or a number that a comment states is
// wrong.
#define NBDI_STATIC_ASSERT(name, x) typedef char nbdi_assert_##name[(x) ? 1 : -1]
NBDI_STATIC_ASSERT(names, NBD_BUFFER_NAMES - NBD_BUFFER_NAMES / 4 >= 4096);
NBDI_STATIC_ASSERT(least, NBD_BUFFER_MIN - NBD_BUFFER_MIN / 4 >= 8 + 4 + 124); // state OLD
NBDI_STATIC_ASSERT(ranges, NBD_RANGES >= 1 && NBD_RANGES <= 64);
NBDI_STATIC_ASSERT(iovecs, NBD_IOVECS >= 2 && NBD_IOVECS <= 1024);
NBDI_STATIC_ASSERT(stage, NBD_STAGE >= 1 && NBD_STAGE <= 65536);
NBDI_STATIC_ASSERT(poll_bytes, NBD_POLL_BYTES >= 1);
NBDI_STATIC_ASSERT(wants, NBD_WANT_READ == -NBD_IO_READ && NBD_WANT_WRITE == -NBD_IO_WRITE);
#ifdef NBD_MBEDTLS
NBDI_STATIC_ASSERT(tls_stage, NBD_TLS_STAGE >= 512 && NBD_TLS_STAGE <= 16384);
#endif

/// Wire ///

static uint16_t nbdi_get16(const uint8_t *p)
{
    return (uint16_t)((unsigned)p[0] << 8 | p[1]);
}

NBDI_WITHIN uint32_t nbdi_get32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

NBDI_WITHIN uint64_t nbdi_get64(const uint8_t *p)
{
    return (uint64_t)nbdi_get32(p) << 32 | nbdi_get32(p + 4);
}

// Compilers see one store in eight of them only where nothing is known of the value, so
// those that have a built-in function are told.
#if defined(__GNUC__) && __GNUC__ >= 4 && defined(__BYTE_ORDER__) && \
    __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
static inline void nbdi_put32(uint8_t *p, uint32_t value)
{
    value = __builtin_bswap32(value);
    memcpy(p, &value, sizeof value);
}

static inline void nbdi_put64(uint8_t *p, uint64_t value)
{
    value = __builtin_bswap64(value);
    memcpy(p, &value, sizeof value);
}
#else
static void nbdi_put32(uint8_t *p, uint32_t value)
{
    p[0] = (uint8_t)(value >> 24);
    p[1] = (uint8_t)(value >> 16);
    p[2] = (uint8_t)(value >> 8);
    p[3] = (uint8_t)value;
}

static void nbdi_put64(uint8_t *p, uint64_t value)
{
    nbdi_put32(p, (uint32_t)(value >> 32));
    nbdi_put32(p + 4, (uint32_t)value);
}
#endif

static inline size_t nbdi_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

// Whether the configuration says so; 0 without looking for what is cut.
static inline int nbdi_told(const nbd_client *c, uint32_t flag)
{
    return (c->config.flags & flag & NBDI_CONFIG_FLAGS) != 0;
}

static inline uint8_t *nbdi_at(const nbd_client *c, uint32_t place)
{
    return (uint8_t *)c->config.buffer + place;
}

/// Memory of a request ///
//
// A cursor is a place in the caller's memory: entry and bytes into it.  A plain
// buffer is one entry.

static inline nbd_iovec nbdi_entry(const nbd_slot *s, uint32_t index)
{
    if (NBDI_GATHERS && s->iov_count) return s->data.many[index];
    return s->data.one;
}

// The memory in one piece at the cursor, at most `most` bytes; the cursor moves
// behind it.  The caller knows that at least `most` bytes are left, so the search
// for an entry that is not used up ends inside the array.
static inline nbd_iovec nbdi_piece(const nbd_slot *s, nbdi_cursor *cursor, size_t most)
{
    nbd_iovec v = nbdi_entry(s, cursor->index);
    while (NBDI_GATHERS && cursor->skip == v.size) {
        cursor->skip = 0;
        v = nbdi_entry(s, ++cursor->index);
    }
    v.base = (uint8_t *)v.base + cursor->skip;
    v.size = NBDI_GATHERS ? nbdi_min(v.size - cursor->skip, most) : most;
    cursor->skip += v.size;
    return v;
}

static void nbdi_advance(const nbd_slot *s, nbdi_cursor *cursor, size_t bytes)
{
    while (bytes) {
        bytes -= nbdi_piece(s, cursor, bytes).size;
    }
}

static void nbdi_seek(const nbd_slot *s, nbdi_cursor *cursor, size_t place)
{
    cursor->index = 0;
    cursor->skip = 0;
    nbdi_advance(s, cursor, place);
}

// Clears from the cursor on.
static void nbdi_clear_here(const nbd_slot *s, nbdi_cursor cursor, size_t bytes)
{
    while (bytes) {
        nbd_iovec v = nbdi_piece(s, &cursor, bytes);
        memset(v.base, 0, v.size);
        bytes -= v.size;
    }
}

static void nbdi_clear(const nbd_slot *s, size_t place, size_t bytes)
{
    nbdi_cursor cursor;
    nbdi_seek(s, &cursor, place);
    nbdi_clear_here(s, cursor, bytes);
}

// Writes of const memory go through the same struct; nothing is stored there.
static void *nbdi_unconst(const void *p)
{
    return (void *)(uintptr_t)p;
}

/// Range proof ///
//
// A read succeeds only if the server sent every byte exactly once.  The sum of
// the lengths would not do: two chunks over one half add up to the whole.  So each
// request keeps the places where what was announced begins and ends, sorted: from
// edge[0] to edge[1], from edge[2] to edge[3] and so on.  There are two while the
// server answers in order.

// Claims [from, to) of the request, from < to.  0, or why the proof has failed;
// nothing is claimed then.
static int nbdi_claim(nbd_slot *s, uint32_t from, uint32_t to)
{
    uint32_t *end = s->edge + s->edge_count, *at = s->edge;
    int joins, reaches;
    while (at < end && *at <= from) {
        at++;
    }
    if ((at - s->edge) % 2 || (at < end && *at < to)) return NBD_ERR_OVERLAP;
    joins = at > s->edge && at[-1] == from;
    reaches = at < end && *at == to;
    if (NBD_RANGES > 1 && joins && reaches) {
        s->edge_count -= 2;
        memmove(at - 1, at + 1, (size_t)(end - at - 1) * sizeof *at);
    } else if (joins) {
        at[-1] = to;
    } else if (reaches) {
        *at = from;
    } else if (s->edge_count == 2 * NBD_RANGES) {
        return NBD_ERR_FRAGMENTED;
    } else {
        s->edge_count += 2;
        for (; NBD_RANGES > 1 && end > at; end--) { // mostly none, so it is no call
            end[1] = end[-1];
        }
        at[0] = from;
        at[1] = to;
    }
    return 0;
}

static int nbdi_covered(const nbd_slot *s)
{
    size_t size = (size_t)s->size; // a read is bounded by memory
    return (NBDI_RAWS && size == 0) ||
           (s->edge_count == 2 && s->edge[0] == 0 && s->edge[1] == size);
}

// Clears what no content was announced for.
static void nbdi_clear_gaps(const nbd_slot *s)
{
    uint32_t place = 0, i;
    for (i = 0; i < s->edge_count; i += 2) {
        nbdi_clear(s, place, s->edge[i] - place);
        place = s->edge[i + 1];
    }
    nbdi_clear(s, place, (size_t)s->size - place);
}

// Block status has no ranges: their memory holds a bit for each context that is still to
// be reported, and edge_count the number of these contexts.
static uint32_t *nbdi_context_word(nbd_slot *s, uint32_t context)
{
    return &s->edge[context / 32];
}

/// Endings ///

static int nbdi_pending(const nbd_client *c);
static void nbdi_abort(nbd_client *c);
static void nbdi_wind_up(nbd_client *c);

static int nbdi_known_error(uint32_t raw)
{
    switch (raw) {
    case NBD_EPERM:
    case NBD_EIO:
    case NBD_ENOMEM:
    case NBD_EINVAL:
    case NBD_ENOSPC:
    case NBD_EOVERFLOW:
    case NBD_ENOTSUP:
    case NBD_ESHUTDOWN: return (int)raw;
    default: return NBD_EINVAL; // chapter "Error values"
    }
}

// NBD_REP_ERR_UNSUP is 2^31 + 1 on the wire and -101 here, and so on.
static int nbdi_option_error(uint32_t raw)
{
    uint32_t number = raw & ~NBDI_REP_ERROR;
    if (raw == 0) return 0;
    return number >= 1 && number <= 10 ? -100 - (int)number : NBD_REP_ERR_OTHER;
}

// The first error wins.
NBDI_APART void nbdi_note_error(nbd_client *c, int error, const char *detail)
{
    if (!c->error) {
        c->error = (int16_t)error;
        if (NBDI_DETAILS) c->detail = detail;
    }
}

// The connection is over.
static int nbdi_fail(nbd_client *c, int error, const char *detail)
{
    nbdi_note_error(c, error, detail);
    c->cause = (int16_t)error;
    c->state = NBDI_DEAD;
    c->fresh = 1;
    return NBDI_AGAIN;
}

static int nbdi_broken(nbd_client *c, const char *detail)
{
    return nbdi_fail(c, NBD_ERR_PROTOCOL, detail);
}

static int nbdi_alive(const nbd_client *c)
{
    return c->state != NBDI_IDLE && c->state < NBDI_DEAD; // ENDED is the last
}

// The stream is in nobody's hands: it is the caller's to start TLS.
static int nbdi_between(const nbd_client *c)
{
    return NBDI_ENCRYPTS && c->state == NBDI_TLS;
}

static int nbdi_transmitting(const nbd_client *c)
{
    return c->transmission && nbdi_alive(c);
}

static void nbdi_about(nbd_event *event, const nbd_slot *s)
{
    event->id = s->id;
    event->user = s->user;
    event->command = s->command;
    event->offset = s->offset;
    event->size = s->size;
}

// The server's first error counts before any failure of the proof, and both
// before the end of the connection.
static int nbdi_result(const nbd_client *c, const nbd_slot *s)
{
    const uint8_t all = NBDI_REPLIED | NBDI_SENT;
    if (s->server_error) return nbdi_known_error(s->server_error);
    if (s->error) return s->error;
    if ((s->state & all) != all) return c->cause;
    if (s->command == NBD_READ && !nbdi_covered(s)) return NBD_ERR_GAP;
    if (NBDI_STATUSES && s->command == NBD_BLOCK_STATUS && s->edge_count) return NBD_ERR_GAP;
    return 0;
}

// Leaves no byte in a failed read that the server did not send for that place.
// A hole left untouched is not told from data, so then everything goes.
static void nbdi_clear_missing(const nbd_client *c, nbd_slot *s, uint32_t index)
{
    if (NBDI_SPARES && (s->state & NBDI_SPARED)) {
        s->edge_count = 0;
    }
    nbdi_clear_gaps(s);
    if (c->left && !c->drop && c->reply_slot == index) {
        nbdi_clear_here(s, c->in_cursor, c->left);
    }
}

static int nbdi_finish(nbd_client *c, uint32_t index, nbd_event *event)
{
    nbd_slot *s = &c->config.slots[index];
    int error = nbdi_result(c, s);
    if (error && s->command == NBD_READ && !(s->flags & NBD_NO_INIT)) {
        nbdi_clear_missing(c, s, index);
    }
    NBD_ASSERT(s->id && c->counters.in_flight > 0);
    event->type = NBD_EVENT_DONE;
    nbdi_about(event, s);
    event->error = error;
    event->server_error = s->server_error;
    event->error_offset = s->error_offset;
    if (NBDI_DETAILS && error && error == c->error) {
        event->detail = c->detail;
    }
    s->id = 0;
    s->state = 0;
    s->next = c->free;
    c->free = (uint16_t)index;
    c->counters.in_flight--;
    if (c->closing) {
        nbdi_wind_up(c);
    }
    return NBDI_EVENT;
}

// One request per call; then the last event.  While memory is on offer nobody
// knows whether it is still being used, so nothing finishes.
static int nbdi_dead(nbd_client *c, nbd_event *event)
{
    if (c->in_offered || c->out_offered) return NBDI_WAIT;
    for (; c->scan < c->config.slot_count; c->scan++) {
        if (c->config.slots[c->scan].id) return nbdi_finish(c, c->scan, event);
    }
    c->state = NBDI_ENDED;
    event->type = NBD_EVENT_CLOSED;
    event->error = c->error;
    if (NBDI_DETAILS) event->detail = c->detail;
    event->option = c->option_due && c->option.option != NBD_OPTION_ABORT ? c->option.option : 0;
    return NBDI_EVENT;
}

// No new command is taken: begins the polite end, once nothing is due any more.
static void nbdi_wind_up(nbd_client *c)
{
    if (c->state == NBDI_HAGGLE) {
        nbdi_abort(c);
    } else if (c->transmission && c->state == NBDI_REPLY && c->counters.in_flight == 0) {
        c->disc = NBDI_DISC_DUE;
        c->state = NBDI_CLOSING;
    }
}

// States in which an end of the stream cuts no message of the server.
#define NBDI_BIT(state) ((uint32_t)1 << NBDI_##state)
#define NBDI_BOUNDARIES \
    (NBDI_BIT(MAGIC) | NBDI_BIT(HAGGLE) | NBDI_BIT(OPTION) | NBDI_BIT(NAME) | \
     NBDI_BIT(NAME_ZEROES) | NBDI_BIT(SETTLE) | NBDI_BIT(TLS) | NBDI_BIT(REPLY) | \
     NBDI_BIT(CLOSING))

static int nbdi_at_boundary(const nbd_client *c)
{
    return c->in_start == c->in_end && (NBDI_BOUNDARIES >> c->state & 1);
}

static const char *nbdi_closed_where(const nbd_client *c)
{
    if (NBDI_POLLS && c->transport && c->transport->detail) return c->transport->detail;
    if (c->transmission) return NBDI_SAY("during transmission");
    if (c->state <= NBDI_FLAGS) {
        return NBDI_SAY("before the greeting was complete");
    }
    if (c->option_due) return NBDI_SAY("instead of answering an option");
    return NBDI_SAY("between options");
}

// The parser needs bytes that are not there.  Returns whether that ends the
// connection.  What arrived before a failure has been parsed by now.
static int nbdi_starved(nbd_client *c)
{
    int error = NBD_ERR_TRUNCATED;
    int send_only = c->out_failed && c->in_blocked && !c->in_offered;
    if (!nbdi_alive(c) || (!c->in_over && !send_only)) return 0;
    if (c->state == NBDI_CLOSING && c->out_offered) {
        return 0; // whether it went out is known when nbd_sent says so
    }
    if (c->state == NBDI_CLOSING && !c->out_failed && !nbdi_pending(c)) {
        c->state = NBDI_DEAD; // whatever the server does after DISC or ABORT is a clean end
    } else {
        if (c->in_over != NBDI_IN_EOF) {
            error = NBD_ERR_TRANSPORT;
        } else if (nbdi_at_boundary(c)) {
            error = NBD_ERR_CLOSED;
        }
        nbdi_fail(c, error, nbdi_closed_where(c));
    }
    return 1;
}

/// Sending: requests ///

typedef struct nbdi_rule {
    uint8_t wire;    // type on the wire
    uint8_t flags;   // what nbd_op.flags may hold
    uint16_t offers; // transmission flag that must be set
} nbdi_rule;

// By enum nbd_command.  Chapters "Request types" and "Command flags".
static const nbdi_rule nbdi_rules[] = {
    {0, 0, 0},
    {0, NBDI_EXTRAS *NBD_DF | NBD_NO_INIT | NBDI_SPARES *NBD_SPARSE, 0},
    {1, NBDI_EXTRAS *NBD_FUA, 0},
    {3, 0, NBD_OFFERS_FLUSH},
#ifndef NBD_NO_EXTRAS
    {4, NBD_FUA, NBD_OFFERS_TRIM},
    {5, 0, NBD_OFFERS_CACHE},
    {6, NBD_FUA | NBD_NO_HOLE | NBD_FAST_ZERO, NBD_OFFERS_WRITE_ZEROES},
    {7, NBD_REQ_ONE, 0},
#endif
};

// The export is read-only, and the command would change it.
static int nbdi_forbidden(const nbd_client *c, uint32_t command)
{
    int changes = command == NBD_WRITE ||
                  (NBDI_EXTRAS && (command == NBD_TRIM || command == NBD_WRITE_ZEROES));
    return changes && (c->got.flags & NBD_OFFERS_READ_ONLY);
}

static int nbdi_carries_data(uint32_t command)
{
    return command == NBD_READ || command == NBD_WRITE;
}

// NBD_RAW has no rule: any flags, any type.
NBDI_WITHIN int nbdi_op_known(uint32_t command, uint32_t flags)
{
    if (NBDI_RAWS && command == NBD_RAW) return flags <= 0xffffu;
    return command >= NBD_READ && command < sizeof nbdi_rules / sizeof *nbdi_rules &&
           (NBDI_STATUSES || command != NBD_BLOCK_STATUS) &&
           !(flags & ~(uint32_t)nbdi_rules[command].flags);
}

NBDI_APART size_t nbdi_payload(const nbd_slot *s)
{
    if (s->command == NBD_READ) return 0;
    if (s->command == NBD_WRITE) return (size_t)s->size;
    return NBDI_RAWS || NBDI_STATUSES ? s->data.one.size : 0;
}

static int nbdi_extended(const nbd_client *c)
{
    return NBDI_EXTENDS && c->header_size == 32;
}

static uint32_t nbdi_header_size(const nbd_client *c)
{
    return NBDI_EXTENDS ? c->header_size : 28;
}

// Begins a header, returns where it goes on.
static uint8_t *nbdi_encode(nbd_client *c, uint32_t flags_type)
{
    uint8_t *p = nbdi_at(c, c->head_fill);
    nbdi_put32(p, nbdi_extended(c) ? NBDI_MAGIC_EXTENDED_REQUEST : NBDI_MAGIC_REQUEST);
    nbdi_put32(p + 4, flags_type);
    c->head_fill += nbdi_header_size(c);
    NBD_ASSERT(c->head_fill <= c->head_size);
    return p + 8;
}

static void nbdi_encode_request(nbd_client *c, const nbd_slot *s)
{
    uint32_t flags = NBDI_EXTRAS ? s->flags & NBDI_WIRE_FLAGS : 0, type;
    uint64_t size = s->size;
    uint8_t *p;
    if (NBDI_RAWS && s->command == NBD_RAW) { // keeps both in the memory of the ranges
        type = s->edge[0];
        flags = s->edge[1];
    } else {
        type = nbdi_rules[s->command].wire;
        if (nbdi_extended(c) && (nbdi_payload(s) || s->command == NBD_WRITE)) {
            flags |= NBDI_WIRE_PAYLOAD_LEN;
            size = nbdi_payload(s);
        }
    }
    if (!nbdi_extended(c)) { // the last 8 bytes are then a half of the offset, and the size
        size |= (uint64_t)(uint32_t)s->offset << 32;
    }
    p = nbdi_encode(c, flags << 16 | type);
    nbdi_put64(p, s->id);
    nbdi_put64(p + 8, s->offset);
    nbdi_put64(p + nbdi_header_size(c) - 16, size);
}

// Writes as many headers as the header area holds.
static void nbdi_encode_queue(nbd_client *c)
{
    while (c->head_size - c->head_fill >= nbdi_header_size(c)) {
        if (c->unsent != NBDI_NONE) {
            nbd_slot *s = &c->config.slots[c->unsent];
            nbdi_encode_request(c, s);
            c->unsent = s->next;
        } else if (c->disc == NBDI_DISC_DUE) {
            memset(nbdi_encode(c, NBDI_WIRE_DISC), 0, nbdi_header_size(c) - 8);
            c->disc = NBDI_DISC_ENCODED;
        } else {
            return;
        }
    }
}

typedef struct nbdi_offer {
    nbd_iovec *iov;
    unsigned room;
    unsigned count;
    size_t bytes;
    const void *end; // of the last piece
} nbdi_offer;

// What an offer may sum up to: its acknowledgement is a ptrdiff_t.
#define NBDI_OFFER_MOST ((size_t)-1 / 2)
#define NBDI_DATA_MOST (NBDI_OFFER_MOST - 32) // with its header

// Adds memory to an offer; what follows the last piece in memory joins it.
// Returns 0 if the offer is full.
static inline int nbdi_add(nbdi_offer *o, void *base, size_t size)
{
    if (size == 0) return 1;
    if (size > NBDI_OFFER_MOST - o->bytes) return 0;
    if (o->count && base == o->end) {
        o->iov[o->count - 1].size += size;
    } else if (o->count < o->room) {
        o->iov[o->count].base = base;
        o->iov[o->count].size = size;
        o->count++;
    } else {
        return 0;
    }
    o->bytes += size;
    o->end = (uint8_t *)base + size;
    return 1;
}

// Adds `bytes` of a request's memory from the cursor on.  Returns 0 if the offer
// is full before the end.
static int nbdi_add_data(nbdi_offer *o, const nbd_slot *s, nbdi_cursor cursor, size_t bytes)
{
    while (bytes) {
        nbd_iovec v = nbdi_piece(s, &cursor, bytes);
        if (!nbdi_add(o, v.base, v.size)) return 0;
        bytes -= v.size;
    }
    return 1;
}

// Returns whether anything is left that did not fit.
static int nbdi_offer_requests(nbd_client *c, nbdi_offer *o)
{
    uint32_t header = nbdi_header_size(c), head = c->head_sent;
    size_t done = c->out_done; // of the first request: bytes acknowledged
    nbdi_cursor cursor = c->out_cursor;
    uint16_t index;

    nbdi_encode_queue(c);
    for (index = c->first; index != c->unsent; index = c->config.slots[index].next) {
        nbd_slot *s = &c->config.slots[index];
        size_t bytes = header + nbdi_payload(s) - done;
        if (done < header) {
            if (!nbdi_add(o, nbdi_at(c, head), header - done)) return 1;
            head += header - (uint32_t)done;
            bytes -= header - done;
        }
        s->state |= NBDI_OFFERED;
        if (!nbdi_add_data(o, s, cursor, bytes)) return 1;
        done = 0;
        cursor.index = 0;
        cursor.skip = 0;
    }
    // What is left in the header area is NBD_CMD_DISC.  It is alone: it waits until nothing
    // is in flight, so it always fits.
    (void)nbdi_add(o, nbdi_at(c, head), c->head_fill - head);
    return c->unsent != NBDI_NONE;
}

static void nbdi_request_sent(nbd_client *c, nbd_slot *s)
{
    uint16_t index = c->first;
    c->first = s->next;
    c->out_done = 0;
    c->out_cursor.index = 0;
    c->out_cursor.skip = 0;
    NBD_ASSERT(s->state & NBDI_OFFERED);
    s->state |= NBDI_SENT;
    if (s->state & NBDI_REPLIED) {
        s->next = c->done;
        c->done = index;
    }
}

static void nbdi_ack_requests(nbd_client *c, size_t bytes)
{
    uint32_t header = nbdi_header_size(c);
    while (bytes && c->first != c->unsent) {
        nbd_slot *s = &c->config.slots[c->first];
        size_t head = c->out_done < header ? nbdi_min(bytes, header - c->out_done) : 0;
        size_t rest = header + nbdi_payload(s) - c->out_done;
        c->head_sent += (uint32_t)head;
        if (bytes < rest) {
            nbdi_advance(s, &c->out_cursor, bytes - head);
            c->out_done += bytes;
            return;
        }
        nbdi_request_sent(c, s);
        bytes -= rest;
    }
    c->head_sent += (uint32_t)bytes;
}

/// Sending: options ///

static int nbdi_has_queries(uint32_t option)
{
    return NBDI_STATUSES &&
           (option == NBD_OPTION_LIST_META_CONTEXT || option == NBD_OPTION_SET_META_CONTEXT);
}

static int nbdi_has_infos(uint32_t option)
{
    return NBDI_GOES && (option == NBD_OPTION_INFO || option == NBD_OPTION_GO);
}

static int nbdi_names_export(uint32_t option)
{
    return option == NBD_OPTION_EXPORT_NAME || nbdi_has_infos(option) || nbdi_has_queries(option);
}

static nbd_iovec nbdi_string(const char *text)
{
    nbd_iovec v;
    v.base = nbdi_unconst(text);
    v.size = strlen(text);
    return v;
}

// A name as it is kept in an nbd_option.
static const char *nbdi_name(const char *name)
{
    return name ? name : "";
}

// The number of the option if its payload is made here, 0 if it is the caller's.
static uint32_t nbdi_made(const nbd_option *o)
{
    return NBDI_NEGOTIATES && o->data ? 0 : o->option;
}

#define NBDI_TOO_LONG 0xffffffffu

// Length of the option data, or NBDI_TOO_LONG: a string is, or the whole does not fit 32 bits.
static uint32_t nbdi_option_length(const nbd_option *o)
{
    size_t length = nbdi_names_export(o->option) ? strlen(o->name) : 0;
    uint32_t i;
    if (NBDI_NEGOTIATES && o->data) return o->data_size;
    if (length > NBDI_STRING_MAX) return NBDI_TOO_LONG;
    if (nbdi_has_infos(o->option)) {
        length += 12;
    }
    if (nbdi_has_queries(o->option)) {
        length += 8;
        for (i = 0; i < o->query_count; i++) {
            size_t size = strlen(o->queries[i]);
            if (size > NBDI_STRING_MAX || length > NBDI_TOO_LONG - 4 - NBDI_STRING_MAX) {
                return NBDI_TOO_LONG;
            }
            length += 4 + size;
        }
    }
    return (uint32_t)length;
}

static uint32_t nbdi_client_flags(const nbd_client *c)
{
    return c->handshake_flags;
}

static uint32_t nbdi_put_option(const nbd_option *o, uint8_t *p)
{
    nbdi_put64(p, NBDI_MAGIC_OPTION);
    nbdi_put32(p + 8, o->option);
    nbdi_put32(p + 12, nbdi_option_length(o));
    if (o->option == NBD_OPTION_EXPORT_NAME || !nbdi_names_export(nbdi_made(o))) return 16;
    nbdi_put32(p + 16, (uint32_t)strlen(o->name));
    return 20;
}

// What stands behind the name.
static uint32_t nbdi_put_after_name(const nbd_option *o, uint8_t *p)
{
    if (nbdi_has_infos(nbdi_made(o))) {
        static const uint8_t three[] = {0, 3,
                                        0, NBDI_INFO_TYPE_NAME,
                                        0, NBDI_INFO_TYPE_DESCRIPTION,
                                        0, NBDI_INFO_TYPE_BLOCK_SIZE};
        memcpy(p, three, sizeof three);
        return sizeof three;
    }
    if (nbdi_has_queries(nbdi_made(o))) {
        nbdi_put32(p, o->query_count);
        return 4;
    }
    return 0;
}

// Piece `i` of what is to be sent now.  A small piece is written to `small` (20
// bytes) and has base NULL; a string has its own base.  Returns 0 behind the last.
static int nbdi_option_piece(const nbd_client *c, uint32_t i, uint8_t *small, nbd_iovec *v)
{
    const nbd_option *o = &c->option;
    v->base = NULL;
    v->size = 0;
    if (i == 0) {
        nbdi_put32(small, nbdi_client_flags(c));
        v->size = 4;
        return 1;
    }
    if (!c->option_due) return 0;
    if (i == 1) {
        v->size = nbdi_put_option(o, small);
    } else if (NBDI_NEGOTIATES && i == 2 && o->data) {
        v->base = nbdi_unconst(o->data);
        v->size = o->data_size;
    } else if (i == 2) {
        if (nbdi_names_export(o->option)) *v = nbdi_string(o->name);
    } else if (i == 3 && (NBDI_GOES || NBDI_STATUSES)) {
        v->size = nbdi_put_after_name(o, small);
    } else if (!nbdi_has_queries(nbdi_made(o)) || (i - 4) / 2 >= o->query_count) {
        return 0;
    } else {
        *v = nbdi_string(o->queries[(i - 4) / 2]);
        if (i % 2 == 0) {
            nbdi_put32(small, (uint32_t)v->size);
            v->base = NULL;
            v->size = 4;
        }
    }
    return 1;
}

// Puts a small piece into the header area unless it is there already.
static int nbdi_keep_piece(nbd_client *c, uint32_t i, const uint8_t *small, size_t size)
{
    if (i < c->piece_fill) return 1;
    if (c->head_size - c->head_fill < size) return 0;
    memcpy(nbdi_at(c, c->head_fill), small, size);
    c->head_fill += (uint32_t)size;
    c->piece_fill = i + 1;
    return 1;
}

// Returns whether anything is left that did not fit.
static int nbdi_offer_options(nbd_client *c, nbdi_offer *o)
{
    uint32_t i, head = c->head_sent;
    size_t done = c->out_done; // of the first piece: bytes acknowledged
    uint8_t small[20];
    nbd_iovec v;
    for (i = c->piece; nbdi_option_piece(c, i, small, &v); i++) {
        if (v.base) {
            if (!nbdi_add(o, (uint8_t *)v.base + done, v.size - done)) return 1;
        } else if (v.size) {
            if (!nbdi_keep_piece(c, i, small, v.size) ||
                !nbdi_add(o, nbdi_at(c, head), v.size - done)) {
                return 1;
            }
            head += (uint32_t)(v.size - done);
        }
        done = 0;
    }
    return 0;
}

// Moves over what is acknowledged, and over pieces of no bytes.
static void nbdi_ack_options(nbd_client *c, size_t bytes)
{
    uint8_t small[20];
    nbd_iovec v;
    while (nbdi_option_piece(c, c->piece, small, &v)) {
        size_t n = nbdi_min(bytes, v.size - c->out_done);
        if (!v.base) {
            c->head_sent += (uint32_t)n;
        }
        bytes -= n;
        c->out_done += n;
        if (c->out_done < v.size) return;
        c->out_done = 0;
        c->piece++;
    }
    c->option_left = 0;
}

static int nbdi_pending(const nbd_client *c)
{
    if (c->out_failed || !nbdi_alive(c) || nbdi_between(c)) return 0;
    if (c->transmission) {
        return c->first != NBDI_NONE || c->disc == NBDI_DISC_DUE || c->head_sent != c->head_fill;
    }
    return c->option_left;
}

static int nbdi_fixed(const nbd_client *c)
{
    return c->got.style == NBD_STYLE_FIXED;
}

NBDI_APART void nbdi_forget_export(nbd_client *c)
{
    c->got.size = 0;
    c->got.flags = 0;
    c->got.minimum_block = 1;
    c->got.preferred_block = NBDI_PREFERRED;
    c->got.maximum_payload = NBDI_MAXIMUM;
    c->got.block_sizes = 0;
}

// Starts to send c->option; every earlier one has gone out whole and is answered.
static void nbdi_start(nbd_client *c)
{
    const nbd_option *option = &c->option;
    c->option_due = 1;
    c->option_left = 1;
    if (NBDI_STATUSES) c->found = 0;
    if (c->piece > 0) { // else the client flags are still on their way
        c->piece = 1;
        c->piece_fill = 1;
    }
    if (NBDI_STATUSES && option->option == NBD_OPTION_SET_META_CONTEXT) {
        c->got.context_count = 0;
        c->context_name = option->name;
    }
    if (NBDI_GOES && (option->option == NBD_OPTION_EXPORT_NAME || nbdi_has_infos(option->option))) {
        nbdi_forget_export(c);
    }
    c->state = NBDI_OPTION;
    if (option->option == NBD_OPTION_EXPORT_NAME) {
        c->state = c->handshake_flags & NBDI_NO_ZEROES ? NBDI_NAME : NBDI_NAME_ZEROES;
    } else if (option->option == NBD_OPTION_ABORT) {
        c->state = NBDI_CLOSING;
    }
}

static void nbdi_abort(nbd_client *c)
{
    if (!nbdi_fixed(c) || (nbdi_told(c, NBD_TLS_REQUIRE) && !c->got.tls)) {
        c->state = NBDI_DEAD; // nothing may be sent that would say it politely
        c->fresh = 1;
        return;
    }
    memset(&c->option, 0, sizeof c->option);
    c->option.option = NBD_OPTION_ABORT;
    nbdi_start(c);
}

// What is asked for without being told, in this order; each only where it is of use.
static int nbdi_useful(const nbd_client *c, uint32_t option)
{
    if (option == NBD_OPTION_EXPORT_NAME) return 1;
    if (!nbdi_fixed(c) || nbdi_told(c, NBD_ONLY_EXPORT_NAME)) return 0;
    switch (option) {
    case NBD_OPTION_STARTTLS: return nbdi_told(c, NBD_TLS_ALLOW | NBD_TLS_REQUIRE);
    case NBD_OPTION_EXTENDED_HEADERS:
        return NBDI_EXTENDS &&
               !nbdi_told(c, NBD_WITHOUT_EXTENDED_HEADERS | NBD_WITHOUT_STRUCTURED_REPLY);
    case NBD_OPTION_STRUCTURED_REPLY:
        return !nbdi_told(c, NBD_WITHOUT_STRUCTURED_REPLY) &&
               c->got.protocol == NBD_PROTOCOL_SIMPLE;
    case NBD_OPTION_SET_META_CONTEXT:
        return NBDI_STATUSES && c->config.query_count > 0 && c->got.protocol != NBD_PROTOCOL_SIMPLE;
    default: return NBDI_GOES;
    }
}

static void nbdi_start_next(nbd_client *c)
{
    static const uint8_t order[] = {NBD_OPTION_STARTTLS,
                                    NBD_OPTION_EXTENDED_HEADERS,
                                    NBD_OPTION_STRUCTURED_REPLY,
                                    NBD_OPTION_SET_META_CONTEXT,
                                    NBD_OPTION_GO,
                                    NBD_OPTION_EXPORT_NAME};
    while (!nbdi_useful(c, order[c->automatic])) {
        c->automatic++;
    }
    c->option.option = order[c->automatic++];
    c->option.name = nbdi_name(c->config.export_name);
    if (NBDI_STATUSES) {
        c->option.queries = c->config.queries;
        c->option.query_count = c->config.query_count;
    }
    nbdi_start(c);
}

static void nbdi_about_option(const nbd_client *c, nbd_event *event)
{
    event->option = c->option.option;
    event->server_error = c->reply_error;
    event->error = nbdi_option_error(c->reply_error);
}

// The greeting or an option is over: what is next?
static int nbdi_haggle(nbd_client *c, nbd_event *event)
{
    c->state = NBDI_HAGGLE;
    if (c->closing) {
        nbdi_wind_up(c);
        return NBDI_AGAIN;
    }
    if (!nbdi_told(c, NBD_NEGOTIATE)) {
        nbdi_start_next(c);
        return NBDI_AGAIN;
    }
    event->type = NBD_EVENT_OPTION;
    nbdi_about_option(c, event);
    return NBDI_EVENT;
}

/// Receiving: memory ///

// `size` bytes in one piece, or NULL while they are not all there.
static const uint8_t *nbdi_take(nbd_client *c, uint32_t size)
{
    const uint8_t *p = nbdi_at(c, c->in_start);
    if (c->in_end - c->in_start < size) return NULL;
    c->in_start += size;
    return p;
}

// Each byte that moves has been matched by one that was parsed, or the buffer is
// full: so the moving costs at most what the receiving did.
static void nbdi_make_room(nbd_client *c)
{
    uint32_t size = c->in_end - c->in_start, parsed = c->in_start - c->head_size;
    if (parsed && (size <= parsed || c->in_end == c->config.buffer_size)) {
        memmove(nbdi_at(c, c->head_size), nbdi_at(c, c->in_start), size);
        c->in_start = c->head_size;
        c->in_end = c->head_size + size;
    }
}

// A full read-ahead that nbd_next cannot empty waits for sending (SETTLE).
static int nbdi_takes_input(const nbd_client *c)
{
    int full = c->in_end - c->in_start == c->config.buffer_size - c->head_size;
    return nbdi_alive(c) && !nbdi_between(c) && !c->in_over && !full;
}

// Payload that may be received in place now: only with nothing buffered before it.
static uint32_t nbdi_direct(const nbd_client *c)
{
    int in_place = c->state == NBDI_DATA && !c->drop && c->in_start == c->in_end;
    return in_place ? c->left : 0;
}

// The next reply brings a large payload, which is better received in place than copied.  With
// more than one request in flight replies come in batches, and reading ahead saves calls.
static int nbdi_expects_large(const nbd_client *c)
{
    const nbd_slot *s;
    if (NBDI_SMALL || c->state != NBDI_REPLY || c->counters.in_flight != 1) return 0;
    s = &c->config.slots[c->last]; // most likely the one
    return s->command == NBD_READ && s->size >= NBDI_LARGE;
}

// Bytes to be read ahead.  Before a large payload they are little more than its header; when
// that is there nbd_next is to be asked first, so none.
static size_t nbdi_ahead(const nbd_client *c)
{
    size_t room = c->config.buffer_size - c->in_end, unparsed = c->in_end - c->in_start;
    if (!nbdi_expects_large(c)) return room;
    return unparsed < NBDI_AHEAD ? nbdi_min(room, NBDI_AHEAD - unparsed) : 0;
}

/// Receiving: options ///

static int nbdi_skip(nbd_client *c, uint32_t bytes, uint32_t after)
{
    c->skip_left = bytes;
    c->after = (uint8_t)after;
    c->state = NBDI_SKIP;
    return NBDI_AGAIN;
}

static int nbdi_text(nbd_client *c, uint32_t kind, uint32_t length, uint32_t after)
{
    if (!NBDI_TELLS) return nbdi_skip(c, length, after);
    nbdi_skip(c, 0, after);
    c->text_kind = (uint8_t)kind;
    c->text_length = length;
    c->state = NBDI_TEXT;
    return NBDI_AGAIN;
}

// Chapter "NBD_REPLY_TYPE_BLOCK_STATUS_EXT": contexts of the namespace "base" have
// 32 bits.
static void nbdi_note_context(nbd_client *c, const uint8_t *name, uint32_t size)
{
    if (c->option.option == NBD_OPTION_SET_META_CONTEXT) {
        c->config.contexts[c->found].narrow = size >= 5 && memcmp(name, "base:", 5) == 0;
    }
}

static int nbdi_step_text(nbd_client *c, nbd_event *event)
{
    uint32_t size = (uint32_t)nbdi_min(c->text_length, c->config.buffer_size - c->head_size);
    const uint8_t *p = nbdi_take(c, size);
    if (!p) return NBDI_WAIT;
    c->skip_left += c->text_length - size;
    c->state = NBDI_SKIP;
    event->type = NBD_EVENT_TEXT;
    event->text_kind = c->text_kind;
    event->text = (const char *)p;
    event->text_size = size;
    event->text_length = c->text_length;
    if (c->transmission) {
        nbdi_about(event, &c->config.slots[c->reply_slot]);
        event->server_error = c->reply_error;
        event->error = nbdi_known_error(c->reply_error);
    } else {
        nbdi_about_option(c, event);
    }
    if (NBDI_STATUSES && c->text_kind == NBD_TEXT_CONTEXT) {
        nbdi_note_context(c, p, size);
        event->context = c->found++;
    }
    return NBDI_EVENT;
}

static int nbdi_step_skip(nbd_client *c)
{
    uint32_t size = (uint32_t)nbdi_min(c->skip_left, c->in_end - c->in_start);
    c->in_start += size;
    c->skip_left -= size;
    if (c->skip_left) return NBDI_WAIT;
    c->state = c->after;
    return NBDI_AGAIN;
}

static int nbdi_step_magic(nbd_client *c, const uint8_t *p)
{
    if (nbdi_get64(p) != NBDI_MAGIC_NBD) {
        return nbdi_fail(c, NBD_ERR_NOT_NBD, NBDI_SAY("no NBDMAGIC"));
    }
    if (nbdi_get64(p + 8) == NBDI_MAGIC_OPTION) {
        c->state = NBDI_FLAGS;
    } else if (nbdi_get64(p + 8) != NBDI_MAGIC_OLD) {
        return nbdi_fail(c, NBD_ERR_NOT_NBD, NBDI_SAY("neither new nor old style"));
    } else if (!NBDI_OLDSTYLES) {
        return nbdi_fail(c, NBD_ERR_OLDSTYLE, NBDI_SAY("oldstyle is cut out"));
    } else {
        c->state = NBDI_OLD;
    }
    return NBDI_AGAIN;
}

// The size stands at `p`.
NBDI_APART int nbdi_set_export(nbd_client *c, const uint8_t *p, uint32_t flags)
{
    if (!(flags & NBD_OFFERS_FLAGS)) {
        return nbdi_broken(c, NBDI_SAY("no NBD_FLAG_HAS_FLAGS"));
    }
    c->got.size = nbdi_get64(p);
    c->got.flags = (uint16_t)flags;
    return NBDI_AGAIN;
}

static int nbdi_ready(nbd_client *c, nbd_event *event)
{
    c->state = NBDI_REPLY;
    c->transmission = 1;
    c->head_sent = 0;
    c->head_fill = 0;
    if (c->closing) {
        nbdi_wind_up(c);
        return NBDI_AGAIN;
    }
    event->type = NBD_EVENT_READY;
    return NBDI_EVENT;
}

// Chapter "Oldstyle negotiation": the upper half of the flags is not for us.
static int nbdi_step_old(nbd_client *c, const uint8_t *p, nbd_event *event)
{
    c->got.style = NBD_STYLE_OLD;
    if (nbdi_told(c, NBD_TLS_REQUIRE)) {
        return nbdi_fail(c, NBD_ERR_TLS, NBDI_SAY("oldstyle server"));
    }
    if (*nbdi_name(c->config.export_name)) {
        return nbdi_fail(c, NBD_ERR_OLDSTYLE, NBDI_SAY("an export name is wanted"));
    }
    nbdi_set_export(c, p, nbdi_get16(p + 10));
    return c->state == NBDI_DEAD ? NBDI_AGAIN : nbdi_ready(c, event);
}

NBDI_APART int nbdi_step_flags(nbd_client *c, const uint8_t *p, nbd_event *event)
{
    c->handshake_flags = (uint8_t)(nbdi_get16(p) & ~(c->config.flags / NBD_WITHOUT_FIXED_NEWSTYLE) &
                                   (NBDI_FIXED_NEWSTYLE | NBDI_NO_ZEROES));
    c->got.style = c->handshake_flags & NBDI_FIXED_NEWSTYLE ? NBD_STYLE_FIXED : NBD_STYLE_NEW;
    if (nbdi_told(c, NBD_TLS_REQUIRE) && !nbdi_fixed(c)) {
        return nbdi_fail(c, NBD_ERR_TLS, NBDI_SAY("not fixed newstyle"));
    }
    c->option_left = 1;
    c->reply_error = 0;
    return nbdi_haggle(c, event);
}

static int nbdi_reply_header_ok(const nbd_client *c, uint32_t type, uint32_t length)
{
    uint32_t option = c->option.option;
    if (type & NBDI_REP_ERROR) return length <= NBDI_STRING_MAX;
    switch (type) {
    case NBDI_REP_ACK: return length == 0;
    case NBDI_REP_SERVER:
        return NBDI_NEGOTIATES && option == NBD_OPTION_LIST && length >= 4 &&
               length <= 4 + 2 * NBDI_STRING_MAX;
    case NBDI_REP_INFO: return nbdi_has_infos(option) && length >= 2 && length <= NBDI_INFO_MAX;
    case NBDI_REP_META_CONTEXT:
        return nbdi_has_queries(option) && length >= 4 && length <= 4 + NBDI_STRING_MAX;
    default: return 0;
    }
}

static int nbdi_step_option(nbd_client *c, const uint8_t *p)
{
    uint32_t type;
    if (nbdi_get64(p) != NBDI_MAGIC_OPTION_REPLY) {
        return nbdi_broken(c, NBDI_SAY("bad option reply magic"));
    }
    if (nbdi_get32(p + 8) != c->option.option) {
        return nbdi_broken(c, NBDI_SAY("reply to another option"));
    }
    type = nbdi_get32(p + 12);
    c->reply_length = nbdi_get32(p + 16);
    if (!nbdi_reply_header_ok(c, type, c->reply_length)) {
        return nbdi_broken(c, NBDI_SAY("option reply of wrong type or length"));
    }
    c->reply_error = type & NBDI_REP_ERROR ? type : 0;
    if (c->reply_error && c->reply_length) {
        return nbdi_text(c, NBD_TEXT_MESSAGE, c->reply_length, NBDI_SETTLE);
    }
    c->state = type == NBDI_REP_SERVER         ? NBDI_SERVER
               : type == NBDI_REP_INFO         ? NBDI_INFO
               : type == NBDI_REP_META_CONTEXT ? NBDI_CONTEXT
                                               : NBDI_SETTLE;
    return NBDI_AGAIN;
}

static int nbdi_step_server(nbd_client *c, const uint8_t *p)
{
    uint32_t length = nbdi_get32(p), room = c->reply_length - 4;
    if (length > NBDI_STRING_MAX || length > room || room - length > NBDI_STRING_MAX) {
        return nbdi_broken(c, NBDI_SAY("export name or description too long"));
    }
    c->reply_length = room - length;
    return nbdi_text(c, NBD_TEXT_EXPORT, length, NBDI_LISTED);
}

static int nbdi_step_listed(nbd_client *c)
{
    if (c->reply_length) return nbdi_text(c, NBD_TEXT_DESCRIPTION, c->reply_length, NBDI_OPTION);
    c->state = NBDI_OPTION;
    return NBDI_AGAIN;
}

static int nbdi_step_context(nbd_client *c, const uint8_t *p)
{
    if (c->option.option == NBD_OPTION_SET_META_CONTEXT) {
        if (c->found >= c->config.context_count) {
            return nbdi_broken(c, NBDI_SAY("too many metadata contexts"));
        }
        c->config.contexts[c->found].id = nbdi_get32(p);
    }
    return nbdi_text(c, NBD_TEXT_CONTEXT, c->reply_length - 4, NBDI_OPTION);
}

static int nbdi_step_info(nbd_client *c, const uint8_t *p)
{
    uint32_t length = c->reply_length - 2;
    switch (nbdi_get16(p)) {
    case NBDI_INFO_TYPE_EXPORT:
        c->state = NBDI_INFO_EXPORT;
        return length == 10 ? NBDI_AGAIN : nbdi_broken(c, NBDI_SAY("NBD_INFO_EXPORT not 12 bytes"));
    case NBDI_INFO_TYPE_BLOCK_SIZE:
        c->state = NBDI_INFO_BLOCK;
        return length == 12 ? NBDI_AGAIN
                            : nbdi_broken(c, NBDI_SAY("NBD_INFO_BLOCK_SIZE not 14 bytes"));
    case NBDI_INFO_TYPE_NAME:
    case NBDI_INFO_TYPE_DESCRIPTION:
        if (length > NBDI_STRING_MAX) {
            return nbdi_broken(c, NBDI_SAY("name or description too long"));
        }
        return nbdi_text(
            c, nbdi_get16(p) == NBDI_INFO_TYPE_NAME ? NBD_TEXT_NAME : NBD_TEXT_DESCRIPTION, length,
            NBDI_OPTION);
    default: return nbdi_skip(c, length, NBDI_OPTION);
    }
}

static int nbdi_step_info_export(nbd_client *c, const uint8_t *p)
{
    c->state = NBDI_OPTION;
    return nbdi_set_export(c, p, nbdi_get16(p + 8)); // sent twice, the last one counts
}

static int nbdi_power_of_2(uint32_t x)
{
    return x != 0 && (x & (x - 1)) == 0;
}

static int nbdi_step_info_block(nbd_client *c, const uint8_t *p)
{
    uint32_t minimum, preferred, maximum;
    minimum = nbdi_get32(p);
    preferred = nbdi_get32(p + 4);
    maximum = nbdi_get32(p + 8);
    if (!nbdi_power_of_2(minimum) || minimum > NBDI_MINIMUM_LARGEST ||
        !nbdi_power_of_2(preferred) || preferred < minimum || preferred < 512 ||
        maximum < preferred) {
        return nbdi_broken(c, NBDI_SAY("block sizes break their rules"));
    }
    c->got.minimum_block = minimum;
    c->got.preferred_block = preferred;
    c->got.maximum_payload = maximum;
    c->got.block_sizes = 1;
    c->state = NBDI_OPTION;
    return NBDI_AGAIN;
}

// The reply to EXPORT_NAME has no header.
static int nbdi_step_name(nbd_client *c, const uint8_t *p)
{
    c->reply_error = 0;
    c->state = NBDI_SETTLE;
    return nbdi_set_export(c, p, nbdi_get16(p + 8));
}

static int nbdi_same_name(const char *a, const char *b)
{
    while (*a && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

static int nbdi_accept(nbd_client *c, nbd_event *event)
{
    switch (c->option.option) {
    case NBD_OPTION_STARTTLS:
        if (!NBDI_ENCRYPTS) break;
        if (c->in_start != c->in_end) {
            return nbdi_fail(c, NBD_ERR_INJECTED, NBDI_SAY("bytes behind STARTTLS"));
        }
        if (c->closing) {
            c->state = NBDI_DEAD; // the server waits for a TLS handshake, and nothing else
            return NBDI_AGAIN;
        }
        c->state = NBDI_TLS;
        event->type = NBD_EVENT_STARTTLS;
        return NBDI_EVENT;
    case NBD_OPTION_EXTENDED_HEADERS:
        if (!NBDI_EXTENDS) break;
        c->got.protocol = NBD_PROTOCOL_EXTENDED;
        c->header_size = 32;
        break;
    case NBD_OPTION_STRUCTURED_REPLY:
        if (c->got.protocol == NBD_PROTOCOL_SIMPLE) {
            c->got.protocol = NBD_PROTOCOL_STRUCTURED;
        }
        break;
    case NBD_OPTION_SET_META_CONTEXT:
        if (NBDI_STATUSES) c->got.context_count = c->found;
        break;
    case NBD_OPTION_GO:
    case NBD_OPTION_EXPORT_NAME:
        if (NBDI_STATUSES && !nbdi_same_name(c->option.name, c->context_name)) {
            c->got.context_count = 0;
        }
        return nbdi_ready(c, event);
    default: break;
    }
    return nbdi_haggle(c, event);
}

static int nbdi_refuse(nbd_client *c, nbd_event *event)
{
    uint32_t option = c->option.option;
    int goes = NBDI_GOES && option == NBD_OPTION_GO;
    int error = nbdi_option_error(c->reply_error);
    if (error == NBD_REP_ERR_SHUTDOWN) {
        c->closing = 1;
        nbdi_note_error(c, error, NBDI_SAY("server is shutting down"));
    } else if (nbdi_told(c, NBD_TLS_REQUIRE) && option == NBD_OPTION_STARTTLS) {
        return nbdi_fail(c, NBD_ERR_TLS, NBDI_SAY("server refused STARTTLS"));
    } else if (goes && nbdi_extended(c) && error == NBD_REP_ERR_UNSUP) {
        return nbdi_broken(c, NBDI_SAY("no GO after extended headers"));
    } else if (goes && error != NBD_REP_ERR_UNSUP && !nbdi_told(c, NBD_NEGOTIATE)) {
        c->closing = 1;
        nbdi_note_error(c, error, NBDI_SAY("export refused"));
    }
    return nbdi_haggle(c, event);
}

// The final reply is in.  The server may have sent it early: the next bytes may only
// go out behind the whole of this option.
static int nbdi_step_settle(nbd_client *c, nbd_event *event)
{
    if (nbdi_pending(c)) return NBDI_WAIT;
    if (!c->reply_error && nbdi_has_infos(c->option.option) && !c->got.flags) { // told, it is not 0
        return nbdi_broken(c, NBDI_SAY("no NBD_INFO_EXPORT"));
    }
    c->option_due = 0;
    return c->reply_error ? nbdi_refuse(c, event) : nbdi_accept(c, event);
}

static int nbdi_step_haggle(nbd_client *c)
{
    return c->in_start == c->in_end ? NBDI_WAIT : nbdi_broken(c, NBDI_SAY("bytes between options"));
}

/// Receiving: replies ///

NBDI_APART nbd_slot *nbdi_reply_slot(nbd_client *c)
{
    return &c->config.slots[c->reply_slot];
}

// The cookie is the server's word: it only selects a slot if that slot says the same.
static inline int nbdi_find(nbd_client *c, uint64_t cookie)
{
    uint32_t index = (uint32_t)(cookie & 0xffffu);
    if (index >= c->config.slot_count || c->config.slots[index].id != cookie ||
        (c->config.slots[index].state & (NBDI_OFFERED | NBDI_REPLIED)) != NBDI_OFFERED) {
        nbdi_broken(c, NBDI_SAY("cookie not in flight"));
        return 0;
    }
    c->reply_slot = (uint16_t)index;
    return 1;
}

static int nbdi_server_error(nbd_client *c, uint32_t error)
{
    nbd_slot *s = nbdi_reply_slot(c);
    if (!s->server_error) {
        s->server_error = error;
    }
    if (error == NBD_ESHUTDOWN) { // chapter "Terminating the transmission phase"
        c->closing = 1;
        nbdi_note_error(c, NBD_ESHUTDOWN, NBDI_SAY("server is shutting down"));
    }
    return NBDI_AGAIN;
}

// A request whose last bytes have not gone out finishes when they have.
static int nbdi_replied(nbd_client *c, nbd_event *event)
{
    nbd_slot *s = nbdi_reply_slot(c);
    s->state |= NBDI_REPLIED;
    c->state = NBDI_REPLY;
    return s->state & NBDI_SENT ? nbdi_finish(c, c->reply_slot, event) : NBDI_AGAIN;
}

static int nbdi_step_end(nbd_client *c, nbd_event *event)
{
    if (c->reply_flags & NBDI_CHUNK_DONE) return nbdi_replied(c, event);
    c->state = NBDI_REPLY;
    return NBDI_AGAIN;
}

// Content for [place, place + size) of the request is announced: it is received if
// the proof allows, dropped if not.
static int nbdi_announce(nbd_client *c, uint32_t place, uint32_t size)
{
    nbd_slot *s = nbdi_reply_slot(c);
    int error = s->error ? s->error : nbdi_claim(s, place, place + size);
    s->error = (int16_t)error;
    c->drop = error != 0;
    return error == 0;
}

static void nbdi_expect_data(nbd_client *c, uint32_t place, uint32_t size)
{
    if (nbdi_announce(c, place, size)) {
        nbdi_seek(nbdi_reply_slot(c), &c->in_cursor, place);
    }
    c->left = size;
    c->state = NBDI_DATA;
}

static int nbdi_simple(nbd_client *c, uint32_t error, nbd_event *event)
{
    const nbd_slot *s = nbdi_reply_slot(c);
    c->reply_flags = NBDI_CHUNK_DONE;
    if (error) {
        nbdi_server_error(c, error);
        return nbdi_replied(c, event);
    }
    if ((NBDI_STATUSES && s->command == NBD_BLOCK_STATUS) ||
        (s->command == NBD_READ && c->got.protocol != NBD_PROTOCOL_SIMPLE)) {
        return nbdi_broken(c, NBDI_SAY("simple reply, structured needed"));
    }
    if (s->command != NBD_READ || (NBDI_RAWS && s->size == 0)) return nbdi_replied(c, event);
    nbdi_expect_data(c, 0, (uint32_t)s->size);
    return NBDI_AGAIN;
}

static int nbdi_begin_chunk(nbd_client *c, uint32_t state)
{
    c->state = (uint8_t)state;
    return NBDI_AGAIN;
}

static int nbdi_status_chunk(nbd_client *c, const nbd_slot *s, uint32_t type, size_t length)
{
    int extended = nbdi_extended(c);
    size_t each, head;
    if (s->command != NBD_BLOCK_STATUS ||
        type != (extended ? NBDI_CHUNK_STATUS_EXT : NBDI_CHUNK_STATUS)) {
        return nbdi_broken(c, NBDI_SAY("block status chunk of wrong kind"));
    }
    each = extended ? 16 : 8;
    head = each / 2; // context and count
    if (length <= head || length - head > each * NBDI_EXTENTS_MAX || (length - head) & (each - 1)) {
        return nbdi_broken(c, NBDI_SAY("block status chunk of wrong length"));
    }
    c->left = (uint32_t)(length - head);
    return nbdi_begin_chunk(c, NBDI_STATUS);
}

static int nbdi_content_chunk(nbd_client *c, const nbd_slot *s, uint32_t type, size_t length)
{
    if (s->command != NBD_READ) {
        return nbdi_broken(c, NBDI_SAY("content chunk, but no read"));
    }
    if (type == NBDI_CHUNK_HOLE) {
        return length == 12 ? nbdi_begin_chunk(c, NBDI_HOLE)
                            : nbdi_broken(c, NBDI_SAY("hole chunk not 12 bytes"));
    }
    if (length < 9 || length - 8 > s->size) {
        return nbdi_broken(c, NBDI_SAY("data chunk empty or too long"));
    }
    c->reply_length = (uint32_t)(length - 8);
    return nbdi_begin_chunk(c, NBDI_OFFSET);
}

static int nbdi_chunk(nbd_client *c, nbd_event *event, size_t length)
{
    const nbd_slot *s = nbdi_reply_slot(c);
    uint32_t type = c->reply_type;
    if (type & 0x8000u) {
        c->reply_length = (uint32_t)length;
        return length >= 6 && length <= NBDI_ERROR_MAX
                   ? nbdi_begin_chunk(c, NBDI_ERROR)
                   : nbdi_broken(c, NBDI_SAY("error chunk of wrong length"));
    }
    if (NBDI_STATUSES && (type == NBDI_CHUNK_STATUS || type == NBDI_CHUNK_STATUS_EXT)) {
        return nbdi_status_chunk(c, s, type, length);
    }
    switch (type) {
    case NBDI_CHUNK_NONE:
        return length == 0 && (c->reply_flags & NBDI_CHUNK_DONE)
                   ? nbdi_replied(c, event)
                   : nbdi_broken(c, NBDI_SAY("NONE chunk with payload or not DONE"));
    case NBDI_CHUNK_DATA:
    case NBDI_CHUNK_HOLE: return nbdi_content_chunk(c, s, type, length);
    default: return nbdi_broken(c, NBDI_SAY("unknown chunk type"));
    }
}

// Size of the reply header whose magic this is; 0 if that kind was not negotiated.
static uint32_t nbdi_reply_size(const nbd_client *c, uint32_t magic)
{
    if (nbdi_extended(c)) return magic == NBDI_MAGIC_EXTENDED ? 32 : 0;
    if (magic == NBDI_MAGIC_STRUCTURED) return c->got.protocol == NBD_PROTOCOL_STRUCTURED ? 20 : 0;
    return magic == NBDI_MAGIC_SIMPLE ? 16 : 0;
}

// A length above the half of memory is too long for every kind of chunk, so it may be cut
// to what is counted in size_t.
static size_t nbdi_chunk_length(uint64_t length)
{
    return length < (size_t)-1 ? (size_t)length : (size_t)-1;
}

static int nbdi_step_reply(nbd_client *c, nbd_event *event)
{
    const uint8_t *p = nbdi_at(c, c->in_start);
    uint32_t size;
    if (c->in_end - c->in_start < 4) return NBDI_WAIT;
    size = nbdi_reply_size(c, nbdi_get32(p));
    if (!size) {
        return nbdi_broken(c, NBDI_SAY("reply magic bad or not negotiated"));
    }
    p = nbdi_take(c, size);
    if (!p) return NBDI_WAIT;
    if (!nbdi_find(c, nbdi_get64(p + 8))) return NBDI_AGAIN;
    if (size == 16) return nbdi_simple(c, nbdi_get32(p + 4), event);
    if (size == 32 && nbdi_get64(p + 16) != nbdi_reply_slot(c)->offset) {
        return nbdi_broken(c, NBDI_SAY("offset not echoed"));
    }
    c->reply_flags = nbdi_get16(p + 4);
    c->reply_type = nbdi_get16(p + 6);
    return nbdi_chunk(c, event,
                      size == 32 ? nbdi_chunk_length(nbdi_get64(p + 24)) : nbdi_get32(p + 16));
}

// Whether [offset, offset + size) lies within the request.  Nothing is added before it is
// compared, so nothing wraps.
static int nbdi_inside(const nbd_slot *s, uint32_t size, uint64_t offset)
{
    return offset >= s->offset && size <= s->size && offset - s->offset <= s->size - size;
}

static int nbdi_step_offset(nbd_client *c, const uint8_t *p)
{
    const nbd_slot *s = nbdi_reply_slot(c);
    if (!nbdi_inside(s, c->reply_length, nbdi_get64(p))) {
        return nbdi_broken(c, NBDI_SAY("data outside the request"));
    }
    nbdi_expect_data(c, (uint32_t)(nbdi_get64(p) - s->offset), c->reply_length);
    return NBDI_AGAIN;
}

static int nbdi_step_data(nbd_client *c, nbd_event *event)
{
    uint32_t bytes = (uint32_t)nbdi_min(c->left, c->in_end - c->in_start);
    NBD_ASSERT(bytes == 0 || c->direct == 0); // payload in place comes before the read-ahead
    c->left -= bytes;
    while (bytes) {
        nbd_iovec v = {NULL, bytes};
        if (!c->drop) {
            v = nbdi_piece(nbdi_reply_slot(c), &c->in_cursor, bytes);
            memcpy(v.base, nbdi_at(c, c->in_start), v.size);
        }
        c->in_start += (uint32_t)v.size;
        bytes -= (uint32_t)v.size;
    }
    return c->left ? NBDI_WAIT : nbdi_step_end(c, event);
}

static int nbdi_step_hole(nbd_client *c, const uint8_t *p, nbd_event *event)
{
    nbd_slot *s = nbdi_reply_slot(c);
    uint64_t offset;
    uint32_t size, place;
    offset = nbdi_get64(p);
    size = nbdi_get32(p + 8);
    if (size == 0 || !nbdi_inside(s, size, offset)) {
        return nbdi_broken(c, NBDI_SAY("hole empty or outside the request"));
    }
    c->state = NBDI_END;
    place = (uint32_t)(offset - s->offset);
    if (!nbdi_announce(c, place, size)) return NBDI_AGAIN;
    if (!NBDI_SPARES || !(s->flags & NBD_SPARSE)) {
        nbdi_clear(s, place, size);
        return NBDI_AGAIN;
    }
    s->state |= NBDI_SPARED;
    event->type = NBD_EVENT_HOLE;
    nbdi_about(event, s);
    event->offset = offset;
    event->size = size;
    return NBDI_EVENT;
}

// What stands behind the message of an error chunk must be as long as its type says.
static int nbdi_step_error(nbd_client *c, const uint8_t *p)
{
    uint32_t message = nbdi_get16(p + 4), room = c->reply_length - 6;
    uint32_t rest, wanted, after = NBDI_END;
    c->reply_error = nbdi_get32(p);
    if (c->reply_error == 0) return nbdi_broken(c, NBDI_SAY("error chunk with error 0"));
    if (message > room || message > NBDI_STRING_MAX) {
        return nbdi_broken(c, NBDI_SAY("error message too long"));
    }
    wanted = rest = room - message;
    if (c->reply_type == NBDI_CHUNK_ERROR) {
        wanted = 0;
    } else if (c->reply_type == NBDI_CHUNK_ERROR_OFFSET) {
        wanted = 8;
        after = NBDI_ERROR_OFFSET;
    }
    if (rest != wanted) {
        return nbdi_broken(c, NBDI_SAY("error chunk not as long as its type"));
    }
    if (after == NBDI_ERROR_OFFSET) {
        rest = 0;
    } else {
        nbdi_server_error(c, c->reply_error);
    }
    if (!message) return nbdi_skip(c, rest, after);
    nbdi_text(c, NBD_TEXT_MESSAGE, message, after);
    c->skip_left += rest;
    return NBDI_AGAIN;
}

static int nbdi_step_error_offset(nbd_client *c, const uint8_t *p)
{
    nbd_slot *s = nbdi_reply_slot(c);
    if (!nbdi_inside(s, s->size ? 1 : 0, nbdi_get64(p))) {
        return nbdi_broken(c, NBDI_SAY("error offset outside the request"));
    }
    if (!s->server_error) {
        s->error_offset = nbdi_get64(p);
    }
    c->state = NBDI_END;
    return nbdi_server_error(c, c->reply_error);
}

static int nbdi_step_status(nbd_client *c, const uint8_t *p)
{
    nbd_slot *s = nbdi_reply_slot(c);
    uint32_t i, *word;
    if (nbdi_extended(c) && nbdi_get32(p + 4) != c->left / 16) {
        return nbdi_broken(c, NBDI_SAY("wrong number of extents"));
    }
    for (i = 0; i < c->got.context_count && c->config.contexts[i].id != nbdi_get32(p); i++) {
    }
    if (i == c->got.context_count) {
        return nbdi_broken(c, NBDI_SAY("metadata context not agreed on"));
    }
    word = nbdi_context_word(s, i);
    if (!(*word >> i % 32 & 1u)) {
        return nbdi_broken(c, NBDI_SAY("metadata context twice"));
    }
    *word -= (uint32_t)1 << i % 32;
    s->edge_count--;
    c->found = i;
    c->place = s->offset;
    c->state = NBDI_EXTENT;
    return NBDI_AGAIN;
}

// Every extent but the last ends inside the request; with NBD_REQ_ONE there is one
// and it does not exceed the request.  None runs past 2^64.
static int nbdi_extent_ok(const nbd_client *c, const nbd_slot *s, uint64_t size, int last)
{
    uint64_t left = s->size - (c->place - s->offset);
    if (size == 0 || left == 0 || size > UINT64_MAX - c->place) return 0;
    if (s->flags & NBD_REQ_ONE) return last && size <= left;
    return last || size < left;
}

static int nbdi_step_extent(nbd_client *c, const uint8_t *p, nbd_event *event)
{
    uint32_t each = nbdi_extended(c) ? 16 : 8;
    const nbd_slot *s = nbdi_reply_slot(c);
    uint64_t size, flags;
    size = each == 16 ? nbdi_get64(p) : nbdi_get32(p);
    flags = each == 16 ? nbdi_get64(p + 8) : nbdi_get32(p + 4);
    c->left -= each;
    if (c->config.contexts[c->found].narrow && flags > 0xffffffffu) {
        return nbdi_broken(c, NBDI_SAY("status flags above 32 bits in base"));
    }
    if (!nbdi_extent_ok(c, s, size, c->left == 0)) {
        return nbdi_broken(c, NBDI_SAY("extent empty, too long or behind the end"));
    }
    event->type = NBD_EVENT_EXTENT;
    nbdi_about(event, s);
    event->offset = c->place;
    event->size = size;
    event->flags = flags;
    event->context = c->found;
    c->place += size;
    if (c->left == 0) c->state = NBDI_END;
    return NBDI_EVENT;
}

static int nbdi_step_closing(nbd_client *c)
{
    c->in_start = c->in_end;
    return NBDI_WAIT;
}

// Bytes that must be there before the step of this state is taken.
NBDI_WITHIN uint32_t nbdi_reads(const nbd_client *c)
{
#define NBDI_READS(name, size) size,
    static const uint8_t reads[] = {NBDI_STATES(NBDI_READS)};
    int doubled = nbdi_extended(c) && (c->state == NBDI_STATUS || c->state == NBDI_EXTENT);
    return (uint32_t)reads[c->state] << doubled;
}

NBDI_APART int nbdi_step(nbd_client *c, nbd_event *event)
{
    const uint8_t *p = nbdi_at(c, c->in_start);
    uint32_t size = nbdi_reads(c);
    if (c->done != NBDI_NONE && nbdi_alive(c)) { // a dead one looks at every slot
        uint16_t index = c->done;
        c->done = c->config.slots[index].next;
        return nbdi_finish(c, index, event);
    }
    if (c->in_end - c->in_start < size) return NBDI_WAIT;
    c->in_start += size;
    switch ((enum nbdi_state)c->state) {
    case NBDI_MAGIC: return nbdi_step_magic(c, p);
    case NBDI_OLD: return NBDI_OLDSTYLES ? nbdi_step_old(c, p, event) : NBDI_WAIT;
    case NBDI_FLAGS: return nbdi_step_flags(c, p, event);
    case NBDI_HAGGLE: return nbdi_step_haggle(c);
    case NBDI_OPTION: return nbdi_step_option(c, p);
    case NBDI_INFO: return NBDI_GOES ? nbdi_step_info(c, p) : NBDI_WAIT;
    case NBDI_INFO_EXPORT: return NBDI_GOES ? nbdi_step_info_export(c, p) : NBDI_WAIT;
    case NBDI_INFO_BLOCK: return NBDI_GOES ? nbdi_step_info_block(c, p) : NBDI_WAIT;
    case NBDI_SERVER: return NBDI_NEGOTIATES ? nbdi_step_server(c, p) : NBDI_WAIT;
    case NBDI_LISTED: return NBDI_NEGOTIATES ? nbdi_step_listed(c) : NBDI_WAIT;
    case NBDI_CONTEXT: return NBDI_STATUSES ? nbdi_step_context(c, p) : NBDI_WAIT;
    case NBDI_NAME:
    case NBDI_NAME_ZEROES: return nbdi_step_name(c, p);
    case NBDI_TEXT: return NBDI_TELLS ? nbdi_step_text(c, event) : NBDI_WAIT;
    case NBDI_SKIP: return nbdi_step_skip(c);
    case NBDI_SETTLE: return nbdi_step_settle(c, event);
    case NBDI_REPLY: return nbdi_step_reply(c, event);
    case NBDI_OFFSET: return nbdi_step_offset(c, p);
    case NBDI_DATA: return nbdi_step_data(c, event);
    case NBDI_HOLE: return nbdi_step_hole(c, p, event);
    case NBDI_ERROR: return nbdi_step_error(c, p);
    case NBDI_ERROR_OFFSET: return nbdi_step_error_offset(c, p);
    case NBDI_STATUS: return NBDI_STATUSES ? nbdi_step_status(c, p) : NBDI_WAIT;
    case NBDI_EXTENT: return NBDI_STATUSES ? nbdi_step_extent(c, p, event) : NBDI_WAIT;
    case NBDI_END: return nbdi_step_end(c, event);
    case NBDI_CLOSING: return nbdi_step_closing(c);
    case NBDI_DEAD: return nbdi_dead(c, event);
    case NBDI_IDLE:
    case NBDI_TLS:
    case NBDI_ENDED: break;
    }
    return NBDI_WAIT;
}

/// Public functions ///

const char *nbd_strerror(int error)
{
#ifdef NBD_NO_TEXT
    (void)error;
    return "";
#else
#define NBDI_VALUE(name, value, text) value,
#define NBDI_PACKED(name, value, text) text "\0"
    static const int8_t values[] = {NBD_ERRORS(NBDI_VALUE)};
    static const char texts[] = NBD_ERRORS(NBDI_PACKED) "unknown error";
    const char *text = texts;
    size_t i;
    for (i = 0; i < sizeof values && values[i] != error; i++) {
        text += strlen(text) + 1;
    }
    return text;
#endif
}

NBDI_WITHIN int nbdi_contexts_config_ok(const nbd_config *config)
{
    if (!NBDI_STATUSES) return !config->query_count;
    return config->context_count <= 64 * NBD_RANGES &&
           (config->contexts || !config->context_count) &&
           (config->query_count == 0 || (config->queries && config->context_count));
}

NBDI_WITHIN int nbdi_config_ok(const nbd_config *config)
{
    uint32_t flags = config->flags;
    return !(flags & ~NBDI_CONFIG_FLAGS) && config->slots && config->slot_count >= 1 &&
           config->slot_count <= NBD_SLOTS_MAX && config->buffer &&
           nbdi_contexts_config_ok(config) &&
           !((flags & NBD_TLS_REQUIRE) && (flags & NBD_ONLY_EXPORT_NAME));
}

static int nbdi_names_ok(const nbd_config *config)
{
    nbd_option o;
    memset(&o, 0, sizeof o);
    o.option = NBDI_STATUSES ? NBD_OPTION_SET_META_CONTEXT : NBD_OPTION_EXPORT_NAME;
    o.name = nbdi_name(config->export_name);
    o.queries = config->queries;
    o.query_count = config->query_count;
    return nbdi_option_length(&o) != NBDI_TOO_LONG;
}

// The members of one session stand in two runs: before and behind those that stay.
static void nbdi_forget_session(nbd_client *c)
{
    memset(c, 0, offsetof(nbd_client, config));
    memset(&c->transport, 0, sizeof *c - offsetof(nbd_client, transport));
    if (NBDI_DETAILS) c->detail = "";
    if (NBDI_STATUSES) c->context_name = "";
    c->header_size = 28;
    c->first = c->unsent = c->last = c->done = NBDI_NONE;
    c->in_start = c->in_end = c->head_size;
}

static void nbdi_free_slots(nbd_client *c)
{
    uint32_t i;
    c->free = NBDI_NONE;
    for (i = c->config.slot_count; i > 0;) {
        nbd_slot *s = &c->config.slots[--i];
        s->id = 0;
        s->state = 0;
        s->next = c->free;
        c->free = (uint16_t)i;
    }
}

int nbd_init_checked(nbd_client *client, const nbd_config *config, size_t client_size,
                     size_t slot_size, uint32_t version)
{
    if (client_size != sizeof(nbd_client) || slot_size != sizeof(nbd_slot) ||
        version != NBD_VERSION) {
        return NBD_ERR_ABI;
    }
    if (!client || !config || !nbdi_config_ok(config)) return NBD_ERR_ARG;
    if (config->buffer_size < NBD_BUFFER_MIN || config->buffer_size > 0x7fffffffu) {
        return NBD_ERR_BUFFER;
    }
    if (!nbdi_names_ok(config)) return NBD_ERR_NAME;
    memset(client, 0, sizeof *client);
    client->config = *config;
    client->head_size =
        (uint32_t)nbdi_min((size_t)32 * config->slot_count, config->buffer_size / 4);
    nbdi_forget_session(client);
    return 0;
}

int nbd_connect(nbd_client *client, const nbd_transport *transport)
{
    nbd_client *c = client;
    if (c->state != NBDI_IDLE && c->state != NBDI_ENDED) return NBD_ERR_STATE;
    nbdi_forget_session(c);
    nbdi_free_slots(c);
    nbdi_forget_export(c);
    c->transport = transport;
    c->state = NBDI_MAGIC;
    c->in_blocked = NBD_WANT_READ;
    return 0;
}

// Transmission flags that flags of a command need.
static uint32_t nbdi_flags_need(uint32_t flags)
{
    uint32_t need = 0;
    if (!NBDI_EXTRAS) return 0;
    need |= flags & NBD_FUA ? NBD_OFFERS_FUA : 0;
    need |= flags & NBD_DF ? NBD_OFFERS_DF : 0;
    need |= flags & NBD_FAST_ZERO ? NBD_OFFERS_FAST_ZERO : 0;
    return need;
}

// Whether the server offers a known command with these flags, read-only or not.
static inline int nbdi_offered(const nbd_client *c, uint32_t command, uint32_t flags)
{
    uint32_t need = nbdi_rules[command].offers | (flags ? nbdi_flags_need(flags) : 0);
    return (c->got.flags & need) == need &&
           !(NBDI_EXTRAS && flags & NBD_DF && c->got.protocol == NBD_PROTOCOL_SIMPLE) &&
           !(NBDI_STATUSES && command == NBD_BLOCK_STATUS && c->got.context_count == 0);
}

#ifndef NBD_NO_ADVICE

int nbd_allows(const nbd_client *client, uint32_t command, uint32_t flags)
{
    const nbd_client *c = client;
    if (!nbdi_transmitting(c) || c->closing || !nbdi_op_known(command, flags)) return 0;
    if (NBDI_RAWS && command == NBD_RAW) return 1;
    return nbdi_offered(c, command, flags) && !nbdi_forbidden(c, command);
}

#endif // NBD_NO_ADVICE

static int nbdi_pieces_ok(const nbd_op *op)
{
    uint64_t left = op->size;
    uint32_t i;
    for (i = 0; i < op->iov_count; i++) {
        if (op->iov[i].size > left) return 0;
        left -= op->iov[i].size;
    }
    return left == 0;
}

// Each index once, and room for what is sent.
static int nbdi_contexts_ok(const nbd_client *c, const nbd_op *op)
{
    uint32_t i, j;
    for (i = 0; i < op->context_count; i++) {
        if (op->contexts[i] >= c->got.context_count) return 0;
        for (j = 0; j < i; j++) {
            if (op->contexts[i] == op->contexts[j]) return 0;
        }
    }
    return op->context_count > 0;
}

// 1 with a buffer, 2 with data, 3 with both: a READ has 1, which is its number, a WRITE 2.
static uint32_t nbdi_memory_of(const nbd_op *op)
{
    return (op->buffer ? 1u : 0u) | (op->data ? 2u : 0u);
}

static int nbdi_memory_ok(const nbd_client *c, const nbd_op *op)
{
    uint32_t memory = nbdi_memory_of(op);
    uint32_t wanted = nbdi_carries_data(op->command) ? op->command : 0;
    if (NBDI_GATHERS && wanted && op->iov) return !memory && nbdi_pieces_ok(op);
    if (op->iov || op->iov_count) return 0;
    if (NBDI_RAWS && op->command == NBD_RAW) {
        return op->raw_type <= 0xffffu && !op->buffer && (!op->data || op->size <= NBDI_DATA_MOST);
    }
    if (NBDI_STATUSES && op->command == NBD_BLOCK_STATUS && op->contexts) {
        return memory == NBD_READ && nbdi_contexts_ok(c, op);
    }
    return memory == wanted;
}

// 32 bits bound a read in every mode, since its proof counts in 32 bits; half of memory
// bounds what is counted in size_t.
static int nbdi_too_large(const nbd_client *c, uint32_t command, uint64_t size)
{
    size_t most = (size_t)nbdi_min(0xffffffffu, NBDI_DATA_MOST);
    if (!nbdi_carries_data(command)) return !nbdi_extended(c) && size > 0xffffffffu;
    if (!nbdi_told(c, NBD_UNCHECKED_PAYLOAD)) { // without GO none is advertised
        most = nbdi_min(most, NBDI_GOES ? c->got.maximum_payload : NBDI_MAXIMUM);
    }
    return size > most;
}

static int nbdi_check_range(const nbd_client *c, const nbd_op *op)
{
    const nbd_export *got = &c->got;
    if (op->size == 0 && !nbdi_told(c, NBD_UNCHECKED_ZERO_SIZE)) return NBD_ERR_ZERO_SIZE;
    if (nbdi_too_large(c, op->command, op->size)) return NBD_ERR_PAYLOAD;
    if ((op->size > got->size || op->offset > got->size - op->size) &&
        !nbdi_told(c, NBD_UNCHECKED_BOUNDS)) {
        return NBD_ERR_BOUNDS;
    }
    if (NBDI_GOES && ((op->offset | op->size) & (got->minimum_block - 1)) &&
        !nbdi_told(c, NBD_UNCHECKED_BLOCK_SIZE)) {
        return NBD_ERR_BLOCK_SIZE;
    }
    return 0;
}

static int nbdi_check(const nbd_client *c, const nbd_op *op)
{
    uint32_t command = op->command;
    if (!nbdi_transmitting(c) || c->closing) return NBD_ERR_STATE;
    if (!nbdi_op_known(command, op->flags) || !nbdi_memory_ok(c, op)) return NBD_ERR_ARG;
    if (NBDI_RAWS && command == NBD_RAW)
        return nbdi_too_large(c, command, op->size) ? NBD_ERR_PAYLOAD : 0;
    if (nbdi_forbidden(c, command) && !nbdi_told(c, NBD_UNCHECKED_READ_ONLY)) {
        return NBD_ERR_READ_ONLY;
    }
    if (!nbdi_offered(c, command, op->flags) && !nbdi_told(c, NBD_UNCHECKED_UNSUPPORTED)) {
        return NBD_ERR_UNSUPPORTED;
    }
    if (NBDI_STATUSES && op->contexts &&
        (!nbdi_extended(c) || !(c->got.flags & NBD_OFFERS_STATUS_PAYLOAD))) {
        return NBD_ERR_UNSUPPORTED;
    }
    if (command == NBD_FLUSH) return op->offset || op->size ? NBD_ERR_ARG : 0;
    return nbdi_check_range(c, op);
}

// The payload form of block status names the contexts; else it is all of them.
static void nbdi_fill_status(const nbd_client *c, nbd_slot *s, const nbd_op *op)
{
    uint8_t *p = (uint8_t *)op->buffer;
    uint32_t i;
    s->edge_count = op->contexts ? op->context_count : c->got.context_count;
    memset(s->edge, op->contexts ? 0 : 0xff, sizeof s->edge);
    if (!op->contexts) return;
    nbdi_put64(p, op->size);
    for (i = 0; i < op->context_count; i++) {
        uint32_t context = op->contexts[i];
        *nbdi_context_word(s, context) |= (uint32_t)1 << context % 32;
        nbdi_put32(p + 8 + 4 * (size_t)i, c->config.contexts[context].id);
    }
    s->data.one.base = p;
    s->data.one.size = 8 + 4 * (size_t)op->context_count;
}

NBDI_APART void nbdi_fill_data(nbd_slot *s, const nbd_op *op)
{
    void *base = op->data ? nbdi_unconst(op->data) : op->buffer; // one of them at most
    s->iov_count = op->iov_count;
    if (NBDI_GATHERS && s->iov_count) {
        s->data.many = op->iov;
        return;
    }
    s->data.one.base = base;
    s->data.one.size = base ? (size_t)op->size : 0;
}

static void nbdi_fill(const nbd_client *c, nbd_slot *s, const nbd_op *op)
{
    s->offset = op->offset;
    s->size = op->size;
    s->error_offset = op->offset;
    s->user = op->user;
    s->command = (uint8_t)op->command;
    s->flags = (uint8_t)op->flags;
    s->server_error = 0;
    s->error = 0;
    s->state = 0;
    s->edge_count = 0;
    nbdi_fill_data(s, op);
    if (NBDI_STATUSES && op->command == NBD_BLOCK_STATUS) {
        nbdi_fill_status(c, s, op);
    } else if (NBDI_RAWS && op->command == NBD_RAW) {
        s->edge[0] = op->raw_type;
        s->edge[1] = op->flags;
    }
}

static void nbdi_enqueue(nbd_client *c, uint16_t index)
{
    c->config.slots[index].next = NBDI_NONE;
    if (c->first == NBDI_NONE) {
        c->first = index;
    } else {
        c->config.slots[c->last].next = index;
    }
    if (c->unsent == NBDI_NONE) {
        c->unsent = index;
    }
    c->last = index;
}

int nbd_issue(nbd_client *client, const nbd_op *op, uint64_t *id)
{
    nbd_client *c = client;
    uint16_t index = c->free;
    nbd_slot *s;
    int error = nbdi_check(c, op);
    if (error) return error;
    if (index == NBDI_NONE) return NBD_ERR_FULL;
    s = &c->config.slots[index];
    c->free = s->next;
    nbdi_fill(c, s, op);
    s->id = ++c->serial << 16 | index;
    nbdi_enqueue(c, index);
    c->counters.in_flight++;
    if (NBDI_COUNTS && c->counters.in_flight > c->counters.in_flight_max) {
        c->counters.in_flight_max = c->counters.in_flight;
    }
    if (id) {
        *id = s->id;
    }
    return 0;
}

unsigned nbd_outgoing(nbd_client *client, nbd_iovec *iov, unsigned count, unsigned *flags)
{
    nbd_client *c = client;
    nbdi_offer offer = {NULL, 0, 0, 0, NULL};
    int more;
    *flags = 0;
    if (!nbdi_pending(c)) return 0;
    offer.iov = iov;
    offer.room = count;
    if (c->head_sent == c->head_fill) {
        c->head_sent = c->head_fill = 0;
    }
    more = c->transmission ? nbdi_offer_requests(c, &offer) : nbdi_offer_options(c, &offer);
    if (offer.bytes > c->out_offered) c->out_offered = offer.bytes;
    *flags = more ? NBD_SEND_MORE : 0;
    return offer.count;
}

// What a hook says about waiting, as NBD_WANT_ bits (the same numbers, negated); else 0.
static uint8_t nbdi_blocked(ptrdiff_t result)
{
    return (uint8_t)(result < 0 && result >= NBD_IO_WRITE ? -result : 0);
}

int nbd_sent(nbd_client *client, ptrdiff_t result)
{
    nbd_client *c = client;
    if (!c->out_offered) return NBD_ERR_STATE;
    if (result > (ptrdiff_t)c->out_offered) return NBD_ERR_ARG;
    if (NBDI_COUNTS) c->counters.sends++;
    c->out_offered = 0;
    c->out_blocked = result == 0 ? NBD_WANT_WRITE : nbdi_blocked(result);
    if (result > 0) {
        if (NBDI_COUNTS) c->counters.bytes_sent += (size_t)result;
        if (c->transmission) {
            nbdi_ack_requests(c, (size_t)result);
        } else {
            nbdi_ack_options(c, (size_t)result);
        }
    } else if (!c->out_blocked) {
        c->out_failed = 1;
        c->in_blocked = 0; // replies that are already here are read before giving up
    }
    c->fresh |= !c->out_blocked || c->state == NBDI_DEAD;
    return 0;
}

unsigned nbd_incoming(nbd_client *client, nbd_iovec *iov, unsigned count)
{
    nbd_client *c = client;
    nbdi_offer offer = {NULL, 0, 0, 0, NULL};
    size_t behind;
    offer.iov = iov;
    offer.room = count;
    if (!c->in_offered) {
        if (!nbdi_takes_input(c)) return 0;
        nbdi_make_room(c);
        c->direct = nbdi_direct(c);
    }
    behind = c->in_offered ? c->in_offered - c->direct : nbdi_ahead(c);
    if (!c->direct || nbdi_add_data(&offer, nbdi_reply_slot(c), c->in_cursor, c->direct)) {
        nbdi_add(&offer, nbdi_at(c, c->in_end), behind);
    }
    if (!c->in_offered) {
        c->direct = (uint32_t)nbdi_min(c->direct, offer.bytes);
        c->in_offered = offer.bytes;
    }
    return offer.count;
}

int nbd_received(nbd_client *client, ptrdiff_t result)
{
    nbd_client *c = client;
    if (!c->in_offered) return NBD_ERR_STATE;
    if (result > (ptrdiff_t)c->in_offered) return NBD_ERR_ARG;
    if (NBDI_COUNTS) c->counters.receives++;
    c->in_blocked = nbdi_blocked(result);
    if (result > 0) {
        uint32_t placed = (uint32_t)nbdi_min((size_t)result, c->direct);
        nbdi_advance(nbdi_reply_slot(c), &c->in_cursor, placed);
        if (NBDI_COUNTS) c->counters.bytes_received += (size_t)result;
        c->left -= placed;
        c->in_end += (uint32_t)((size_t)result - placed);
        NBD_ASSERT(c->in_end <= c->config.buffer_size);
    } else if (!c->in_blocked) {
        c->in_over = result == NBD_IO_EOF ? NBDI_IN_EOF : NBDI_IN_FAILED;
    }
    c->in_offered = 0;
    c->direct = 0;
    c->fresh |= !c->in_blocked || c->state == NBDI_DEAD || c->out_failed;
    return 0;
}

#ifndef NBD_NO_POLL

// For a transport that takes one piece: joins small pieces in `stage`.
static nbd_iovec nbdi_join(nbd_client *c, const nbd_iovec *iov, unsigned count, uint8_t *stage)
{
    nbd_iovec v = iov[0];
    unsigned i;
    if (count == 1 || v.size >= NBD_STAGE) return v;
    v.base = stage;
    v.size = 0;
    for (i = 0; i < count && v.size < NBD_STAGE; i++) {
        size_t size = nbdi_min(iov[i].size, NBD_STAGE - v.size);
        memcpy(stage + v.size, iov[i].base, size);
        v.size += size;
    }
    if (NBDI_COUNTS) c->counters.staged++;
    return v;
}

// `budget` is what this poll may still send.  The flag is given only if another send
// of this poll is sure to follow.  Returns what went out, 0 if no more will.
static size_t nbdi_send(nbd_client *c, const nbd_iovec *iov, unsigned count, unsigned flags,
                        size_t budget)
{
    const nbd_transport *t = c->transport;
    uint8_t stage[NBD_STAGE];
    nbd_iovec one;
    size_t handed = c->out_offered;
    ptrdiff_t result;
    if (t->flags & NBD_ONE_PIECE) {
        one = nbdi_join(c, iov, count, stage);
        iov = &one;
        count = 1;
        flags |= one.size < handed ? NBD_SEND_MORE : 0;
        handed = one.size;
    }
    result = t->send(t->context, iov, count, handed < budget ? flags : 0);
    if (nbd_sent(c, result) || result <= 0) return 0;
    if ((size_t)result < handed && (t->flags & NBD_SHORT_IS_DRY)) {
        c->out_blocked = NBD_WANT_WRITE;
        return 0;
    }
    return (size_t)result;
}

static void nbdi_poll_out(nbd_client *c, nbd_iovec *iov)
{
    size_t budget = NBD_POLL_BYTES;
    unsigned count, flags;
    while ((count = nbd_outgoing(c, iov, NBD_IOVECS, &flags)) > 0) {
        size_t sent = nbdi_send(c, iov, count, flags, budget);
        if (sent == 0 || sent >= budget) return;
        budget -= sent;
    }
}

#endif // NBD_NO_POLL

// Whether the transport is still to be told that nothing more will be sent.
NBDI_WITHIN int nbdi_unfinished(const nbd_client *c)
{
    return NBDI_POLLS && c->state == NBDI_CLOSING && !c->finished && !c->out_failed &&
           !nbdi_pending(c) && c->transport && c->transport->finish;
}

#ifndef NBD_NO_POLL

// After the last byte a server may wait for the end of the stream before it ends its own.
static void nbdi_finish_sending(nbd_client *c)
{
    if (!nbdi_unfinished(c)) return;
    c->out_blocked = nbdi_blocked(c->transport->finish(c->transport->context));
    c->finished = c->out_blocked == 0;
}

static void nbdi_poll_in(nbd_client *c, nbd_iovec *iov)
{
    const nbd_transport *t = c->transport;
    size_t budget = NBD_POLL_BYTES;
    unsigned count;
    while ((count = nbd_incoming(c, iov, NBD_IOVECS)) > 0) {
        size_t asked = t->flags & NBD_ONE_PIECE ? iov[0].size : c->in_offered;
        ptrdiff_t result = t->recv(t->context, iov, count);
        if (nbd_received(c, result) || result <= 0) return;
        if ((size_t)result < asked && (t->flags & NBD_SHORT_IS_DRY)) {
            c->in_blocked = NBD_WANT_READ;
            return;
        }
        if ((size_t)result >= budget) return;
        budget -= (size_t)result;
    }
}

int nbd_poll(nbd_client *client, unsigned ready)
{
    nbd_client *c = client;
    nbd_iovec iov[NBD_IOVECS];
    if (!c->transport) return NBD_ERR_STATE; // IDLE has none
    if (!c->out_blocked || (ready & c->out_blocked)) {
        nbdi_poll_out(c, iov);
        nbdi_finish_sending(c);
    }
    if (!c->in_blocked || (ready & c->in_blocked)) {
        nbdi_poll_in(c, iov);
    }
    return 0;
}

#endif // NBD_NO_POLL

// The end by name: all at once would be a slow string instruction on some machines.
static void nbdi_blank(nbd_event *event)
{
    memset(event, 0, NBDI_SMALL ? sizeof *event : offsetof(nbd_event, text_kind));
    if (!NBDI_SMALL) {
        event->text_kind = 0;
        event->text_length = 0;
        event->text = NULL;
        event->text_size = 0;
    }
    event->detail = "";
}

int nbd_next(nbd_client *client, nbd_event *event)
{
    int step;
    nbdi_blank(event);
    if (!client->config.slots) return 0; // zeroed, and never prepared by nbd_init
    do {
        step = nbdi_step(client, event);
        if (step == NBDI_WAIT && nbdi_starved(client)) {
            step = NBDI_AGAIN;
        }
    } while (step == NBDI_AGAIN);
    client->fresh = step == NBDI_EVENT && client->state != NBDI_ENDED;
    return step == NBDI_EVENT;
}

// What a direction with something to do waits for.
static unsigned nbdi_waits_for(unsigned blocked, size_t offered, unsigned ready)
{
    if (blocked) return blocked;
    return offered ? ready : ready | NBD_WANT_NOW;
}

unsigned nbd_wants(const nbd_client *client)
{
    const nbd_client *c = client;
    unsigned wants = 0;
    if (c->fresh) {
        wants = NBD_WANT_NOW;
    }
    if (nbdi_takes_input(c)) {
        wants |= nbdi_waits_for(c->in_blocked, c->in_offered, NBD_WANT_READ);
    }
    if (nbdi_pending(c) || nbdi_unfinished(c)) {
        wants |= nbdi_waits_for(c->out_blocked, c->out_offered, NBD_WANT_WRITE);
    }
    return wants;
}

int nbd_disconnect(nbd_client *client)
{
    if (!nbdi_alive(client)) return NBD_ERR_STATE;
    client->closing = 1;
    client->fresh = 1;
    if (nbdi_between(client)) {
        client->state = NBDI_DEAD;
    }
    nbdi_wind_up(client);
    return 0;
}

int nbd_abandon(nbd_client *client)
{
    if (!nbdi_alive(client)) return NBD_ERR_STATE;
    nbdi_fail(client, NBD_ERR_ABANDONED, "");
    return 0;
}

const nbd_export *nbd_negotiated(const nbd_client *client)
{
    return &client->got;
}

const nbd_counters *nbd_count(const nbd_client *client)
{
    return &client->counters;
}

const char *nbd_detail(const nbd_client *client)
{
    return NBDI_DETAILS && client->detail ? client->detail : ""; // NULL before nbd_init, if zeroed
}

#ifndef NBD_NO_ADVICE

int nbd_phase(const nbd_client *client)
{
    const nbd_client *c = client;
    if (c->state == NBDI_IDLE || c->state == NBDI_ENDED) return NBD_PHASE_IDLE;
    if (c->state <= NBDI_FLAGS) return NBD_PHASE_GREETING;
    if (c->state == NBDI_TLS) return NBD_PHASE_STARTTLS;
    if (c->state >= NBDI_CLOSING || c->closing) return NBD_PHASE_CLOSING;
    return c->transmission ? NBD_PHASE_TRANSMISSION : NBD_PHASE_OPTIONS;
}

#endif // NBD_NO_ADVICE

#ifndef NBD_NO_NEGOTIATE

// What the server would do after these options this build could not follow.
static int nbdi_is_cut(uint32_t option)
{
    return (!NBDI_ENCRYPTS && option == NBD_OPTION_STARTTLS) ||
           (!NBDI_EXTENDS && option == NBD_OPTION_EXTENDED_HEADERS) ||
           (!NBDI_STATUSES &&
            (option == NBD_OPTION_LIST_META_CONTEXT || option == NBD_OPTION_SET_META_CONTEXT));
}

static int nbdi_option_ok(const nbd_option *o)
{
    return (o->data || !o->data_size) && (o->queries || !o->query_count);
}

int nbd_negotiate(nbd_client *client, const nbd_option *option)
{
    nbd_client *c = client;
    uint32_t number = option->option;
    if (c->state != NBDI_HAGGLE || number == NBD_OPTION_ABORT ||
        (number == NBD_OPTION_STARTTLS && c->got.tls)) {
        return NBD_ERR_STATE;
    }
    if (nbdi_is_cut(number) || !nbdi_option_ok(option)) return NBD_ERR_ARG;
    if (nbdi_told(c, NBD_TLS_REQUIRE) && !c->got.tls && number != NBD_OPTION_STARTTLS) {
        return NBD_ERR_TLS;
    }
    if (number == NBD_OPTION_EXPORT_NAME ? nbdi_extended(c) : !nbdi_fixed(c)) {
        return NBD_ERR_UNSUPPORTED;
    }
    if (number == NBD_OPTION_SET_META_CONTEXT && !option->data &&
        c->got.protocol == NBD_PROTOCOL_SIMPLE) {
        return NBD_ERR_UNSUPPORTED;
    }
    c->option = *option;
    c->option.name = nbdi_name(option->name);
    if (nbdi_option_length(&c->option) == NBDI_TOO_LONG) return NBD_ERR_NAME;
    nbdi_start(c);
    return 0;
}

#endif // NBD_NO_NEGOTIATE

#ifndef NBD_NO_TLS

int nbd_starttls(nbd_client *client, const nbd_transport *transport)
{
    nbd_client *c = client;
    if (c->state != NBDI_TLS || c->in_offered || c->out_offered) return NBD_ERR_STATE;
    if (c->in_start != c->in_end) {
        nbdi_fail(c, NBD_ERR_INJECTED, NBDI_SAY("bytes behind STARTTLS"));
        return 0;
    }
    c->transport = transport;
    c->got.protocol = NBD_PROTOCOL_SIMPLE;
    c->header_size = 28;
    c->got.context_count = 0;
    c->got.tls = 1;
    c->context_name = "";
    nbdi_forget_export(c);
    c->in_blocked = c->out_blocked = 0;
    c->state = NBDI_HAGGLE;
    if (!nbdi_told(c, NBD_NEGOTIATE)) nbdi_start_next(c);
    return 0;
}

#endif // NBD_NO_TLS

/// Sockets: implementation ///

#if !defined(NBD_NO_SOCKETS) || !defined(NBD_NO_CONVENIENCE)

// Takes time off a limit in milliseconds; a negative limit is none and stays.
static void nbdi_spend(int *limit_ms, uint64_t passed)
{
    if (*limit_ms > 0) *limit_ms = passed < (uint64_t)*limit_ms ? *limit_ms - (int)passed : 0;
}

#endif

#ifndef NBD_NO_SOCKETS

#ifndef NBD_SEND_FLAGS
#ifdef MSG_MORE
#define NBD_SEND_FLAGS(flags) ((NBD_SEND_MORE & (flags)) ? MSG_MORE : 0)
#else
#define NBD_SEND_FLAGS(flags) ((void)(flags), 0)
#endif
#endif

#ifdef MSG_NOSIGNAL
#define NBDI_NO_SIGNAL MSG_NOSIGNAL
#else
#define NBDI_NO_SIGNAL 0
#endif

// macOS hides the option from strict C, FreeBSD the flag too below POSIX.1-2008; the
// kernel knows it all the same, by a number that cannot change.
#ifdef MSG_NOSIGNAL
#define NBDI_NO_SIGNAL_OPTION 0
#elif defined(SO_NOSIGPIPE)
#define NBDI_NO_SIGNAL_OPTION SO_NOSIGPIPE
#elif defined(__APPLE__)
#define NBDI_NO_SIGNAL_OPTION 0x1022
#elif defined(__FreeBSD__) || defined(__DragonFly__) || defined(__NetBSD__)
#define NBDI_NO_SIGNAL_OPTION 0x0800
#else
#define NBDI_NO_SIGNAL_OPTION 0
#endif

// Bytes in one call at most: some systems refuse sums above INT_MAX.
#define NBDI_SOCKET_MOST ((size_t)1 << 30)

// Where Winsock and POSIX differ: names, error numbers, the two vectored calls,
// waiting and the clock.
#ifdef _WIN32

#define NBDI_OS_SOCKET(socket) ((SOCKET)(socket))
#define NBDI_OS_SHUT_SEND SD_SEND
#define NBDI_OS_WRONG_TYPE WSAEPROTOTYPE
#define NBDI_OS_TIMED_OUT WSAETIMEDOUT

static int nbdi_os_error(void)
{
    return WSAGetLastError();
}

static int nbdi_os_interrupted(int os_error)
{
    return os_error == WSAEINTR;
}

static int nbdi_os_blocked(int os_error)
{
    return os_error == WSAEWOULDBLOCK;
}

static int nbdi_os_connecting(int os_error)
{
    return os_error == WSAENOTCONN || os_error == WSAEINPROGRESS || os_error == WSAEALREADY;
}

static int nbdi_os_unblock(nbd_socket socket)
{
    u_long on = 1;
    return ioctlsocket(NBDI_OS_SOCKET(socket), (long)FIONBIO, &on);
}

static DWORD nbdi_os_pieces(WSABUF *to, const nbd_iovec *from, unsigned count)
{
    size_t room = NBDI_SOCKET_MOST;
    DWORD used = 0;
    while (used < count && used < NBD_IOVECS && room > 0) {
        size_t size = from[used].size < room ? from[used].size : room;
        to[used].buf = (char *)from[used].base;
        to[used].len = (ULONG)size;
        room -= size;
        used++;
    }
    return used;
}

static ptrdiff_t nbdi_os_send(nbd_socket socket, const nbd_iovec *iov, unsigned count, int flags)
{
    WSABUF pieces[NBD_IOVECS];
    DWORD used = nbdi_os_pieces(pieces, iov, count), moved = 0;
    if (WSASend(NBDI_OS_SOCKET(socket), pieces, used, &moved, (DWORD)flags, NULL, NULL)) return -1;
    return (ptrdiff_t)moved;
}

static ptrdiff_t nbdi_os_recv(nbd_socket socket, const nbd_iovec *iov, unsigned count)
{
    WSABUF pieces[NBD_IOVECS];
    DWORD used = nbdi_os_pieces(pieces, iov, count), moved = 0, flags = 0;
    if (WSARecv(NBDI_OS_SOCKET(socket), pieces, used, &moved, &flags, NULL, NULL)) return -1;
    return (ptrdiff_t)moved;
}

// select, because WSAPoll never reports a failed connect on older systems.
// Returns what is ready of `wants`, both after a failure, 0 at the time-out, -1.
static int nbdi_os_ready(nbd_socket socket, unsigned wants, int timeout_ms)
{
    fd_set readable, writable, failed;
    struct timeval limit;
    unsigned ready = 0;
    int count;
    FD_ZERO(&readable);
    FD_ZERO(&writable);
    FD_ZERO(&failed);
    if (wants & NBD_WANT_READ) FD_SET(NBDI_OS_SOCKET(socket), &readable);
    if (wants & NBD_WANT_WRITE) FD_SET(NBDI_OS_SOCKET(socket), &writable);
    FD_SET(NBDI_OS_SOCKET(socket), &failed);
    limit.tv_sec = timeout_ms / 1000;
    limit.tv_usec = timeout_ms % 1000 * 1000;
    count = select(0, &readable, &writable, &failed, timeout_ms < 0 ? NULL : &limit);
    if (count <= 0) return count < 0 ? -1 : 0;
    if (FD_ISSET(NBDI_OS_SOCKET(socket), &readable)) ready |= NBD_WANT_READ;
    if (FD_ISSET(NBDI_OS_SOCKET(socket), &writable)) ready |= NBD_WANT_WRITE;
    if (FD_ISSET(NBDI_OS_SOCKET(socket), &failed)) ready |= NBD_WANT_READ | NBD_WANT_WRITE;
    return (int)ready;
}

static uint64_t nbdi_clock(void)
{
    return GetTickCount64();
}

#else // POSIX

#define NBDI_OS_SOCKET(socket) (socket)
#define NBDI_OS_WRONG_TYPE EPROTOTYPE
#define NBDI_OS_SHUT_SEND SHUT_WR
#define NBDI_OS_TIMED_OUT ETIMEDOUT

static int nbdi_os_error(void)
{
    return errno;
}

static int nbdi_os_interrupted(int os_error)
{
    return os_error == EINTR;
}

static int nbdi_os_blocked(int os_error)
{
#if EAGAIN != EWOULDBLOCK
    if (os_error == EWOULDBLOCK) return 1;
#endif
    return os_error == EAGAIN;
}

static int nbdi_os_connecting(int os_error)
{
    return os_error == ENOTCONN || os_error == EINPROGRESS || os_error == EALREADY;
}

static int nbdi_os_unblock(nbd_socket socket)
{
    int flags = fcntl(socket, F_GETFL);
    return flags < 0 ? -1 : fcntl(socket, F_SETFL, flags | O_NONBLOCK);
}

// Counts in the message itself: the type of msg_iovlen differs between systems.
static void nbdi_os_pieces(struct msghdr *message, const nbd_iovec *from, unsigned count)
{
    struct iovec *to = message->msg_iov;
    size_t room = NBDI_SOCKET_MOST;
    unsigned used, most = count < NBD_IOVECS ? count : NBD_IOVECS;
    for (used = 0; used < most && room > 0; used++) {
        to[used].iov_base = from[used].base;
        to[used].iov_len = from[used].size < room ? from[used].size : room;
        room -= to[used].iov_len;
        message->msg_iovlen++;
    }
}

static ptrdiff_t nbdi_os_send(nbd_socket socket, const nbd_iovec *iov, unsigned count, int flags)
{
    struct iovec pieces[NBD_IOVECS];
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    nbdi_os_pieces(&message, iov, count);
    return sendmsg(socket, &message, flags);
}

static ptrdiff_t nbdi_os_recvmsg(nbd_socket socket, const nbd_iovec *iov, unsigned count)
{
    struct iovec pieces[NBD_IOVECS];
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    nbdi_os_pieces(&message, iov, count);
    return recvmsg(socket, &message, 0);
}

static ptrdiff_t nbdi_os_recv(nbd_socket socket, const nbd_iovec *iov, unsigned count)
{
    size_t size = iov->size < NBDI_SOCKET_MOST ? iov->size : NBDI_SOCKET_MOST;
    return count == 1 ? recv(socket, iov->base, size, 0) : nbdi_os_recvmsg(socket, iov, count);
}

// Returns what is ready of `wants`, both after a failure, 0 at the time-out, -1.
static int nbdi_os_ready(nbd_socket socket, unsigned wants, int timeout_ms)
{
    struct pollfd at;
    unsigned ready = 0;
    int count;
    at.fd = socket;
    at.events = 0;
    at.revents = 0;
    if (wants & NBD_WANT_READ) at.events = POLLIN;
    if (wants & NBD_WANT_WRITE) at.events = (short)(at.events | POLLOUT);
    count = poll(&at, 1, timeout_ms);
    if (count <= 0) return count;
    if (at.revents & POLLIN) ready |= NBD_WANT_READ;
    if (at.revents & POLLOUT) ready |= NBD_WANT_WRITE;
    if (at.revents & (POLLERR | POLLHUP | POLLNVAL)) ready |= NBD_WANT_READ | NBD_WANT_WRITE;
    return (int)ready;
}

// Milliseconds.  Differences of the cut counter add up to the time that passed,
// however short the intervals are.  Strict C hides the monotonic clock: then whole
// seconds of the wall clock must do, and somebody who sets it shifts a time-out.
static uint64_t nbdi_clock(void)
{
#ifdef CLOCK_MONOTONIC
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now)) return 0;
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
#else
    return (uint64_t)time(NULL) * 1000;
#endif
}

#endif // POSIX

// A clock that was set back counts as one that stood still.
static uint64_t nbdi_clock_since(uint64_t start)
{
    uint64_t now = nbdi_clock();
    return now > start ? now - start : 0;
}

// 1: connected, 0: still connecting, -1: never will be, *os_error says why.
// Readiness comes first: once the socket is ready the answers below are final.
static int nbdi_socket_state(nbd_socket socket, int *os_error)
{
    struct sockaddr_storage peer;
    socklen_t peer_size = sizeof peer, size = sizeof *os_error;
    int ready = nbdi_os_ready(socket, NBD_WANT_WRITE, 0);
    if (ready == 0 || (ready < 0 && nbdi_os_interrupted(nbdi_os_error()))) return 0;
    if (getsockopt(NBDI_OS_SOCKET(socket), SOL_SOCKET, SO_ERROR, (char *)os_error, &size)) {
        *os_error = nbdi_os_error();
        return -1;
    }
    if (*os_error != 0) return -1;
    if (getpeername(NBDI_OS_SOCKET(socket), (struct sockaddr *)(void *)&peer, &peer_size) == 0) {
        return 1;
    }
    *os_error = nbdi_os_error();
    return -1;
}

// What a hook returns after a failed call.  "Not connected" counts as blocked only
// while the socket is connecting, or the caller would spin on it for ever.
static ptrdiff_t nbdi_socket_failed(nbd_socket_io *io, int os_error, ptrdiff_t blocked)
{
    if (nbdi_os_blocked(os_error)) return blocked;
    if (nbdi_os_connecting(os_error) && nbdi_socket_state(io->socket, &os_error) >= 0) {
        return NBD_IO_WRITE;
    }
    io->os_error = os_error;
    return NBD_IO_ERROR;
}

static ptrdiff_t nbdi_socket_send(void *context, const nbd_iovec *iov, unsigned count,
                                  unsigned flags)
{
    nbd_socket_io *io = (nbd_socket_io *)context;
    int os_flags = io->send_flags != NULL ? io->send_flags(io, flags) : NBD_SEND_FLAGS(flags);
    int os_error;
    do {
        ptrdiff_t moved = nbdi_os_send(io->socket, iov, count, os_flags | NBDI_NO_SIGNAL);
        if (moved >= 0) return moved;
        os_error = nbdi_os_error();
    } while (nbdi_os_interrupted(os_error));
    return nbdi_socket_failed(io, os_error, NBD_IO_WRITE);
}

static ptrdiff_t nbdi_socket_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    nbd_socket_io *io = (nbd_socket_io *)context;
    int os_error;
    do {
        ptrdiff_t moved = nbdi_os_recv(io->socket, iov, count);
        if (moved >= 0) return moved > 0 ? moved : NBD_IO_EOF;
        os_error = nbdi_os_error();
    } while (nbdi_os_interrupted(os_error));
    return nbdi_socket_failed(io, os_error, NBD_IO_READ);
}

// It fails if the server was faster, which is as good.
static int nbdi_socket_finish(void *context)
{
    nbd_socket_io *io = (nbd_socket_io *)context;
    (void)shutdown(NBDI_OS_SOCKET(io->socket), NBDI_OS_SHUT_SEND);
    return 0;
}

static int nbdi_socket_wait(void *context, unsigned wants, int *timeout_ms)
{
    nbd_socket_io *io = (nbd_socket_io *)context;
    int ready, os_error;
    do {
        uint64_t start = nbdi_clock();
        ready = nbdi_os_ready(io->socket, wants, *timeout_ms);
        os_error = nbdi_os_error();
        if (ready == 0 && *timeout_ms > 0) *timeout_ms = 0;
        nbdi_spend(timeout_ms, nbdi_clock_since(start));
        if (ready >= 0) return ready;
    } while (nbdi_os_interrupted(os_error) && *timeout_ms != 0);
    if (nbdi_os_interrupted(os_error)) return 0;
    io->os_error = os_error;
    return NBD_IO_ERROR;
}

static int nbdi_socket_is_stream(nbd_socket socket, int *os_error)
{
    int type = 0;
    socklen_t size = sizeof type;
    if (getsockopt(NBDI_OS_SOCKET(socket), SOL_SOCKET, SO_TYPE, (char *)&type, &size)) {
        *os_error = nbdi_os_error();
        return 0;
    }
    if (type != SOCK_STREAM) *os_error = NBDI_OS_WRONG_TYPE;
    return type == SOCK_STREAM;
}

static int nbdi_socket_prepare(nbd_socket socket)
{
#if NBDI_NO_SIGNAL_OPTION
    int on = 1;
    if (setsockopt(socket, SOL_SOCKET, NBDI_NO_SIGNAL_OPTION, &on, sizeof on)) return -1;
#endif
    return nbdi_os_unblock(socket);
}

int nbd_socket_init(nbd_socket_io *io, nbd_socket socket)
{
    memset(io, 0, sizeof *io);
    io->socket = socket;
    io->transport.flags = NBD_SHORT_IS_DRY;
    io->transport.context = io;
    io->transport.send = nbdi_socket_send;
    io->transport.recv = nbdi_socket_recv;
    io->transport.wait = nbdi_socket_wait;
    io->transport.finish = nbdi_socket_finish;
    if (!nbdi_socket_is_stream(socket, &io->os_error)) return NBD_ERR_SOCKET;
    if (nbdi_socket_prepare(socket)) {
        io->os_error = nbdi_os_error();
        return NBD_ERR_SOCKET;
    }
    return NBD_OK;
}

// A close that fails has closed all the same, and there is nobody to tell.
void nbd_socket_close(nbd_socket socket)
{
    if (socket == NBD_SOCKET_NONE) return;
#ifdef _WIN32
    (void)closesocket(NBDI_OS_SOCKET(socket));
#else
    (void)close(socket);
#endif
}

#if !defined(NBD_NO_DIAL) && defined(AI_PASSIVE)

#define NBDI_DEFAULT_PORT 10809u
#define NBDI_DEFAULT_PORT_TEXT "10809"

// nbd_dial.kind holds the address kind plus 1.  0 is over: a zeroed struct, or one
// whose socket is the caller's, so that nbd_dial_stop leaves that alone.
#define NBDI_DIAL_OVER 0u

// A socket that programs started by this one do not inherit.
static nbd_socket nbdi_os_open(int family, int protocol)
{
#if defined(_WIN32) && defined(WSA_FLAG_NO_HANDLE_INHERIT)
    return WSASocketW(family, SOCK_STREAM, protocol, NULL, 0,
                      WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT);
#elif defined(_WIN32)
    return socket(family, SOCK_STREAM, protocol);
#elif defined(SOCK_CLOEXEC)
    return socket(family, SOCK_STREAM | SOCK_CLOEXEC, protocol);
#elif !defined(FD_CLOEXEC) // Zephyr: no programs are started
    return socket(family, SOCK_STREAM, protocol);
#else
    int made = socket(family, SOCK_STREAM, protocol);
    if (made >= 0 && fcntl(made, F_SETFD, FD_CLOEXEC) < 0) {
        int os_error = errno;
        nbd_socket_close(made);
        errno = os_error;
        return NBD_SOCKET_NONE;
    }
    return made;
#endif
}

static int nbdi_os_set(nbd_socket socket, int level, int name, int value)
{
    return setsockopt(NBDI_OS_SOCKET(socket), level, name, (const char *)&value, sizeof value);
}

static int nbdi_dial_prepare(const nbd_dial *dial)
{
    const int room = NBD_SEND_BUFFER;
    if (dial->kind == NBD_ADDRESS_TCP + 1u) {
        if (nbdi_os_set(dial->socket, IPPROTO_TCP, TCP_NODELAY, 1)) return -1;
    } else if (room > 0) {
        (void)nbdi_os_set(dial->socket, SOL_SOCKET, SO_SNDBUF, room); // less only costs calls
    }
    return nbdi_os_unblock(dial->socket);
}

// An interrupted connect goes on in the background.  EAGAIN of a Unix socket is
// none of these: the listener's queue is full and nothing can be waited for, so the
// attempt has failed, and os_error tells the caller that a later one may succeed.
static int nbdi_os_connect_pending(int os_error)
{
#ifdef _WIN32
    return os_error == WSAEWOULDBLOCK || os_error == WSAEINPROGRESS;
#else
    return os_error == EINPROGRESS || os_error == EINTR;
#endif
}

static void nbdi_dial_drop(nbd_dial *dial)
{
    nbd_socket_close(dial->socket);
    dial->socket = NBD_SOCKET_NONE;
}

// Starts one attempt.  A failure leaves no socket, and its reason in os_error.
static int nbdi_dial_attempt(nbd_dial *dial, int family, int protocol, const void *address,
                             socklen_t size)
{
    const struct sockaddr *to = (const struct sockaddr *)address;
    dial->socket = nbdi_os_open(family, protocol);
    if (dial->socket != NBD_SOCKET_NONE && nbdi_dial_prepare(dial) == 0) {
        if (connect(NBDI_OS_SOCKET(dial->socket), to, size) == 0) return NBD_OK;
        if (nbdi_os_connect_pending(nbdi_os_error())) return NBD_OK;
    }
    dial->os_error = nbdi_os_error();
    nbdi_dial_drop(dial);
    return NBD_ERR_CONNECT;
}

static void nbdi_dial_finish(nbd_dial *dial)
{
    if (dial->list != NULL) freeaddrinfo((struct addrinfo *)dial->list);
    dial->list = NULL;
    dial->next = NULL;
    dial->kind = NBDI_DIAL_OVER;
}

// Starts the next address that can be started.
static int nbdi_dial_advance(nbd_dial *dial)
{
    while (dial->next != NULL) {
        const struct addrinfo *at = (const struct addrinfo *)dial->next;
        dial->next = at->ai_next;
        if (nbdi_dial_attempt(dial, at->ai_family, at->ai_protocol, at->ai_addr,
                              (socklen_t)at->ai_addrlen) == NBD_OK) {
            return 0;
        }
    }
    return NBD_ERR_CONNECT;
}

static int nbdi_dial_resolve_error(int result)
{
#ifdef EAI_SYSTEM
    if (result == EAI_SYSTEM) return nbdi_os_error();
#endif
    return result;
}

// Without AI_ADDRCONFIG: it would hide ::1 and localhost from a machine that has only
// its loopback, and an address that cannot be reached fails at once anyway.
static int nbdi_dial_tcp(nbd_dial *dial, const nbd_address *address)
{
    struct addrinfo hints, *list = NULL;
    const char *port = address->port != NULL ? address->port : NBDI_DEFAULT_PORT_TEXT;
    int result;
    if (address->host == NULL || port[0] == '\0') return NBD_ERR_ARG;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    switch (address->family) {
    case 0: hints.ai_family = AF_UNSPEC; break;
    case 4: hints.ai_family = AF_INET; break;
    case 6: hints.ai_family = AF_INET6; break;
    default: return NBD_ERR_ARG;
    }
    result = getaddrinfo(address->host, port, &hints, &list);
    if (result != 0) {
        dial->os_error = nbdi_dial_resolve_error(result);
        return NBD_ERR_RESOLVE;
    }
    dial->list = list;
    dial->next = list;
    return nbdi_dial_advance(dial);
}

#if !defined(_WIN32) && !defined(__ZEPHYR__)

// `lead` is the place of the name in sun_path: 1 behind the NUL of an abstract one.
static int nbdi_dial_path(nbd_dial *dial, const char *path, size_t lead)
{
    struct sockaddr_un at;
    size_t size = path != NULL ? strlen(path) : 0, end = lead != 0 ? lead + size : size + 1;
    if (size == 0 || end > sizeof at.sun_path) return NBD_ERR_ARG;
    memset(&at, 0, sizeof at);
    at.sun_family = AF_UNIX;
    memcpy(at.sun_path + lead, path, size);
    return nbdi_dial_attempt(dial, AF_UNIX, 0, &at,
                             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + end));
}

#endif

#if defined(__linux__) && defined(AF_VSOCK)

// As struct sockaddr_vm of <linux/vm_sockets.h>, which may be missing.
typedef struct nbdi_vsock_address {
    uint16_t family;
    uint16_t reserved;
    uint32_t port;
    uint32_t cid;
    uint8_t zero[4];
} nbdi_vsock_address;

static int nbdi_dial_vsock(nbd_dial *dial, const nbd_address *address)
{
    nbdi_vsock_address at;
    memset(&at, 0, sizeof at);
    at.family = AF_VSOCK;
    at.port = address->vport != 0 ? address->vport : NBDI_DEFAULT_PORT;
    at.cid = address->cid;
    return nbdi_dial_attempt(dial, AF_VSOCK, 0, &at, sizeof at);
}

#endif

static int nbdi_dial_first(nbd_dial *dial, const nbd_address *address)
{
    switch (address->kind) {
    case NBD_ADDRESS_TCP: return nbdi_dial_tcp(dial, address);
#if !defined(_WIN32) && !defined(__ZEPHYR__)
    case NBD_ADDRESS_UNIX: return nbdi_dial_path(dial, address->path, 0);
#endif
#ifdef __linux__
    case NBD_ADDRESS_ABSTRACT: return nbdi_dial_path(dial, address->path, 1);
#endif
#if defined(__linux__) && defined(AF_VSOCK)
    case NBD_ADDRESS_VSOCK: return nbdi_dial_vsock(dial, address);
#endif
    default: return address->kind > NBD_ADDRESS_VSOCK ? NBD_ERR_ARG : NBD_ERR_UNSUPPORTED;
    }
}

int nbd_dial_start(nbd_dial *dial, const nbd_address *address)
{
    int error;
    memset(dial, 0, sizeof *dial);
    dial->socket = NBD_SOCKET_NONE;
    dial->kind = (address->kind & 0xffffu) + 1u; // what is no kind is refused below
    error = nbdi_dial_first(dial, address);
    if (error) nbdi_dial_finish(dial);
    return error;
}

static int nbdi_dial_retry(nbd_dial *dial)
{
    int error;
    nbdi_dial_drop(dial);
    error = nbdi_dial_advance(dial);
    if (error) nbdi_dial_finish(dial);
    return error;
}

int nbd_dial_step(nbd_dial *dial)
{
    int os_error = 0, state;
    if (dial->kind == NBDI_DIAL_OVER) return NBD_ERR_STATE;
    state = nbdi_socket_state(dial->socket, &os_error);
    if (state == 0) return 0;
    if (state < 0) {
        dial->os_error = os_error;
        return nbdi_dial_retry(dial);
    }
    nbdi_dial_finish(dial);
    return 1;
}

int nbd_dial_next(nbd_dial *dial)
{
    if (dial->kind == NBDI_DIAL_OVER) return NBD_ERR_STATE;
    dial->os_error = NBDI_OS_TIMED_OUT;
    return nbdi_dial_retry(dial);
}

void nbd_dial_stop(nbd_dial *dial)
{
    if (dial->kind == NBDI_DIAL_OVER) return;
    nbdi_dial_drop(dial);
    nbdi_dial_finish(dial);
}

#endif // NBD_NO_DIAL
#endif // NBD_NO_SOCKETS

static inline int nbdi_hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/// mbedTLS: implementation ///

#ifdef NBD_MBEDTLS

// Members that mbedTLS 3 keeps to itself, and that no call of it tells: ssl.state, in_msg,
// conf, out_left, send_alert and alert_reason, config.authmode, key_cert and psk_identity.
#if MBEDTLS_VERSION_NUMBER < 0x03000000
#define NBDI_TLS_PRIVATE(member) member
#define NBDI_TLS_BAD_VERSION MBEDTLS_ERR_SSL_BAD_HS_PROTOCOL_VERSION
#define NBDI_TLS_BAD_CERTIFICATE MBEDTLS_ERR_SSL_BAD_HS_CERTIFICATE
#else
#define NBDI_TLS_PRIVATE(member) MBEDTLS_PRIVATE(member)
#define NBDI_TLS_BAD_VERSION MBEDTLS_ERR_SSL_BAD_PROTOCOL_VERSION
#define NBDI_TLS_BAD_CERTIFICATE MBEDTLS_ERR_SSL_BAD_CERTIFICATE
#endif
#if defined(MBEDTLS_KEY_EXCHANGE_SOME_PSK_ENABLED) || \
    defined(MBEDTLS_SSL_HANDSHAKE_WITH_PSK_ENABLED)
#define NBDI_TLS_PSK
#endif

// Records without data (tickets, empty ones, warnings) that a call of a hook takes, with
// those of the handshake: a server that sends nothing else must not hold it.
#define NBDI_TLS_BUDGET 262144u
#define NBDI_TLS_TURN 64u // what a turn without a byte costs of it

// nbd_tls.over and below_over
#define NBDI_TLS_ENDED 1
#define NBDI_TLS_FAILED 2
#define NBDI_TLS_FLOODED 3

// What nbdi_tls_judge says besides NBD_IO_...: the same call once more, now.
#define NBDI_TLS_AGAIN 1

/// mbedTLS: what failed ///

#define NBDI_TLS_NO_MEMORY NBDI_SAY("TLS: mbedTLS has no memory left")

#ifdef NBD_NO_TEXT
#define nbdi_tls_alert_text(alert) ""
#define nbdi_tls_verify_text(flags) ""
#define nbdi_tls_result_text(tls, result) ""
#define nbdi_tls_lacks_memory(result) 0
#else

#define NBDI_TLS_NOTHING_COMMON "TLS: no common cipher or key, or the server wants a certificate"

static const char *nbdi_tls_alert_text(int alert)
{
    switch (alert) {
    case MBEDTLS_SSL_ALERT_MSG_HANDSHAKE_FAILURE: return NBDI_TLS_NOTHING_COMMON;
    case MBEDTLS_SSL_ALERT_MSG_BAD_CERT:
    case MBEDTLS_SSL_ALERT_MSG_UNSUPPORTED_CERT:
    case MBEDTLS_SSL_ALERT_MSG_CERT_REVOKED:
    case MBEDTLS_SSL_ALERT_MSG_CERT_UNKNOWN:
        return "TLS: server refuses the client's certificate, or wants one";
    case MBEDTLS_SSL_ALERT_MSG_CERT_EXPIRED: return "TLS: the client's certificate has expired";
    case MBEDTLS_SSL_ALERT_MSG_UNKNOWN_CA:
        return "TLS: server does not know the authority of the client's certificate";
    case MBEDTLS_SSL_ALERT_MSG_ACCESS_DENIED: return "TLS: server denies access";
    case MBEDTLS_SSL_ALERT_MSG_BAD_RECORD_MAC:
    case MBEDTLS_SSL_ALERT_MSG_DECRYPT_ERROR:
        return "TLS: server cannot read or verify what the client sent: the keys differ";
    case MBEDTLS_SSL_ALERT_MSG_PROTOCOL_VERSION: return "TLS: no common version of TLS";
    case MBEDTLS_SSL_ALERT_MSG_INSUFFICIENT_SECURITY: return "TLS: server wants better ciphers";
    case MBEDTLS_SSL_ALERT_MSG_UNRECOGNIZED_NAME: return "TLS: server does not know its name";
    case MBEDTLS_SSL_ALERT_MSG_UNKNOWN_PSK_IDENTITY: return "TLS: server does not know the user";
    case 116: return "TLS: server wants a certificate of the client"; // certificate_required
    default: return "TLS: server sent an alert";
    }
}

#ifdef MBEDTLS_X509_CRT_PARSE_C
// What is wrong with the server's certificate, the plainest of several first.
static const char *nbdi_tls_verify_text(uint32_t flags)
{
    if (flags & NBD_TLS_SELF_SIGNED) return "TLS: server's certificate is signed by itself";
    if (flags & MBEDTLS_X509_BADCERT_NOT_TRUSTED) {
        return "TLS: server's certificate is not signed by a trusted authority";
    }
    if (flags & MBEDTLS_X509_BADCERT_EXPIRED) return "TLS: server's certificate has expired";
    if (flags & MBEDTLS_X509_BADCERT_FUTURE) return "TLS: server's certificate is not valid yet";
    if (flags & MBEDTLS_X509_BADCERT_REVOKED) return "TLS: server's certificate is revoked";
    if (flags & MBEDTLS_X509_BADCERT_CN_MISMATCH) {
        return "TLS: server's certificate is for another name";
    }
    return "TLS: server's certificate is not good enough";
}
#endif

// Each module of mbedTLS has a number of its own for it, and may add that of a lower one.
static int nbdi_tls_lacks_memory(int result)
{
    switch (-result & 0xff80) {
    case 0x1180: // PEM
    case 0x2880: // X.509
    case 0x3f80: // PK
    case 0x4d80: // ECP
    case 0x5180: // MD
    case 0x6180: // ciphers
    case 0x7f00: // SSL
        return 1;
    default: return (-result & 0x7f) == 0x10; // large numbers
    }
}

static const char *nbdi_tls_result_text(const nbd_tls *tls, int result)
{
    if (nbdi_tls_lacks_memory(result)) return NBDI_TLS_NO_MEMORY;
    switch (result) {
    case NBDI_TLS_BAD_VERSION: return "TLS: no common version of TLS";
    case NBDI_TLS_BAD_CERTIFICATE: return "TLS: server's certificate cannot be used";
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    case MBEDTLS_ERR_SSL_HANDSHAKE_FAILURE: return NBDI_TLS_NOTHING_COMMON;
#endif
    case MBEDTLS_ERR_SSL_INVALID_MAC:
        return "TLS: a record was forged or damaged, or the keys differ";
    case MBEDTLS_ERR_SSL_INVALID_RECORD: return "TLS: what the server sends is not TLS";
    default: return tls->up ? "TLS: the session failed" : "TLS: the handshake failed";
    }
}

#endif // NBD_NO_TEXT

// Many servers hang up without an alert.  What this one may not like.
static const char *nbdi_tls_refused_text(const nbd_tls *tls)
{
    const mbedtls_ssl_config *config = tls->ssl.NBDI_TLS_PRIVATE(conf);
#ifdef NBDI_TLS_PSK
    if (config->NBDI_TLS_PRIVATE(psk_identity)) {
        return NBDI_SAY("TLS: no answer: the user or the key may be wrong");
    }
#endif
    if (!tls->named) return NBDI_SAY("TLS: no answer: there may be no common version or cipher");
#ifdef MBEDTLS_X509_CRT_PARSE_C
    if (config->NBDI_TLS_PRIVATE(key_cert)) {
        return NBDI_SAY("TLS: no answer: the server may refuse the client's certificate");
    }
#endif
    return NBDI_SAY("TLS: no answer: the server may want a certificate of the client");
}

// The stream below is over, or brought nothing but records without data.
static const char *nbdi_tls_below_text(const nbd_tls *tls)
{
    if (tls->below_over == NBDI_TLS_FLOODED) {
        return NBDI_SAY("TLS: server sends records without data, one after the other");
    }
    if (!tls->heard) return nbdi_tls_refused_text(tls);
    if (tls->below_over == NBDI_TLS_ENDED) {
        return NBDI_SAY("TLS: the stream ended without close_notify");
    }
    return tls->below->detail;
}

static const char *nbdi_tls_why(nbd_tls *tls, int result)
{
    if (tls->below_over) return nbdi_tls_below_text(tls);
    if (result == MBEDTLS_ERR_SSL_FATAL_ALERT_MESSAGE) {
        tls->alert = tls->ssl.NBDI_TLS_PRIVATE(in_msg)[1];
        return nbdi_tls_alert_text(tls->alert);
    }
#ifdef MBEDTLS_X509_CRT_PARSE_C
    if (result == MBEDTLS_ERR_X509_CERT_VERIFY_FAILED) {
        tls->verify_flags = mbedtls_ssl_get_verify_result(&tls->ssl);
        return nbdi_tls_verify_text(tls->verify_flags);
    }
#endif
    if (result == MBEDTLS_ERR_SSL_PEER_CLOSE_NOTIFY) {
        return tls->heard ? NULL : nbdi_tls_refused_text(tls);
    }
    // With TLS 1.3 a client's certificate is looked at after its handshake, and a server that
    // is made of mbedTLS then seals its refusal with a key of before.
    if (result == MBEDTLS_ERR_SSL_INVALID_MAC && tls->up && !tls->heard)
        return nbdi_tls_refused_text(tls);
    return nbdi_tls_result_text(tls, result);
}

// What the hooks return from now on.
static ptrdiff_t nbdi_tls_over(const nbd_tls *tls)
{
    return tls->over == NBDI_TLS_ENDED ? NBD_IO_EOF : NBD_IO_ERROR;
}

// `result` is what mbedTLS returned.  The end of the stream is told as such after the
// handshake only: before it nothing can have ended.
static ptrdiff_t nbdi_tls_fail(nbd_tls *tls, int result)
{
    int ended = result == MBEDTLS_ERR_SSL_PEER_CLOSE_NOTIFY || tls->below_over == NBDI_TLS_ENDED;
    tls->tls_error = result;
    tls->transport.detail = nbdi_tls_why(tls, result);
    tls->over = ended && tls->up ? NBDI_TLS_ENDED : NBDI_TLS_FAILED;
    return nbdi_tls_over(tls);
}

/// mbedTLS: the transport below ///

// Whether mbedTLS still holds a part of a record that could not be sent.
static int nbdi_tls_is_stuck(const nbd_tls *tls)
{
    return tls->ssl.NBDI_TLS_PRIVATE(out_left) > 0;
}

// What mbedTLS is told when nothing moved.
static int nbdi_tls_stopped(nbd_tls *tls, ptrdiff_t result)
{
    if (result == NBD_IO_READ || result == NBD_IO_WRITE) {
        tls->blocked = result;
        return result == NBD_IO_READ ? MBEDTLS_ERR_SSL_WANT_READ : MBEDTLS_ERR_SSL_WANT_WRITE;
    }
    return MBEDTLS_ERR_SSL_CONN_EOF;
}

// Whoever cannot send may still read why.
static int nbdi_tls_put(void *context, const unsigned char *data, size_t size)
{
    nbd_tls *tls = (nbd_tls *)context;
    nbd_iovec one;
    ptrdiff_t result;
    one.base = nbdi_unconst(data);
    one.size = size;
    tls->sending = 1;
    result = tls->below->send(tls->below->context, &one, 1, tls->more);
    if (result > 0) return (int)result;
    if (result == 0) result = NBD_IO_WRITE;
    if (result < NBD_IO_WRITE) {
        tls->send_over = 1;
        if (!tls->up) tls->below_over = NBDI_TLS_FAILED;
    }
    return nbdi_tls_stopped(tls, result);
}

static int nbdi_tls_get(void *context, unsigned char *to, size_t size)
{
    nbd_tls *tls = (nbd_tls *)context;
    nbd_iovec one;
    ptrdiff_t result;
    tls->sending = 0;
    // Reading has sent the rest of a record: what answers it must not come before nbd_sent.
    if (tls->latch && !nbdi_tls_is_stuck(tls)) return nbdi_tls_stopped(tls, NBD_IO_WRITE);
    if (tls->budget < size) {
        tls->below_over = NBDI_TLS_FLOODED;
        return MBEDTLS_ERR_SSL_CONN_EOF;
    }
    one.base = to;
    one.size = size;
    result = tls->below->recv(tls->below->context, &one, 1);
    if (result > 0) {
        tls->budget -= (size_t)result;
        return (int)result;
    }
    if (result == NBD_IO_EOF) tls->below_over = NBDI_TLS_ENDED;
    if (result < NBD_IO_WRITE) tls->below_over = NBDI_TLS_FAILED;
    return nbdi_tls_stopped(tls, result);
}

// An alert that mbedTLS could not send does not stop reading: nbdi_tls_flush is to send it.
static int nbdi_tls_may_go_on(const nbd_tls *tls)
{
    return tls->up && !tls->latch && tls->sending;
}

// What a result of mbedTLS that moved nothing means: NBD_IO_..., or NBDI_TLS_AGAIN.  It
// also says "call again" after a ticket, a warning, a second empty record (as 0, which
// otherwise is the end), and in the middle of a long computation.
static ptrdiff_t nbdi_tls_judge(nbd_tls *tls, int result)
{
    switch (result) {
    case MBEDTLS_ERR_SSL_CRYPTO_IN_PROGRESS:
    case MBEDTLS_ERR_SSL_ASYNC_IN_PROGRESS: return NBD_IO_WRITE;
    case MBEDTLS_ERR_SSL_WANT_READ:
    case MBEDTLS_ERR_SSL_WANT_WRITE:
        if (tls->blocked && !nbdi_tls_may_go_on(tls)) return tls->blocked;
        break;
#ifdef MBEDTLS_ERR_SSL_RECEIVED_NEW_SESSION_TICKET
    case MBEDTLS_ERR_SSL_RECEIVED_NEW_SESSION_TICKET: break;
#endif
    default:
        if (result || tls->below_over) return nbdi_tls_fail(tls, result);
    }
    if (tls->budget < NBDI_TLS_TURN) {
        tls->below_over = NBDI_TLS_FLOODED;
        return nbdi_tls_fail(tls, result);
    }
    tls->budget -= NBDI_TLS_TURN;
    return NBDI_TLS_AGAIN;
}

/// mbedTLS: the handshake ///

// mbedTLS has one name for SNI and for the certificate.  It gets that of SNI first, and the
// one to verify as soon as the hello is accepted, before a certificate is looked at.
// A hello that is to be repeated does not count.  A line end is in no certificate's name.
static int nbdi_tls_set_name(nbd_tls *tls)
{
    int state = (int)tls->ssl.NBDI_TLS_PRIVATE(state);
    int due = state == MBEDTLS_SSL_SERVER_CERTIFICATE;
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
    due |= state == MBEDTLS_SSL_ENCRYPTED_EXTENSIONS;
#endif
    if (!due || tls->named) return 0;
    tls->named = 1;
    return mbedtls_ssl_set_hostname(&tls->ssl, tls->verify_name ? tls->verify_name : "\n");
}

static int nbdi_tls_shaken(nbd_tls *tls)
{
#if MBEDTLS_VERSION_NUMBER < 0x03000000
    return tls->ssl.state == MBEDTLS_SSL_HANDSHAKE_OVER;
#else
    return mbedtls_ssl_is_handshake_over(&tls->ssl);
#endif
}

// Every hook begins with it.
static void nbdi_tls_enter(nbd_tls *tls)
{
    tls->budget = NBDI_TLS_BUDGET;
    tls->more = 0;
}

// One step.  mbedTLS 3 makes an alert of its own that blocks anew at each step, without end:
// it is given up, and what it was for is what failed.
static int nbdi_tls_step(nbd_tls *tls)
{
    int result = nbdi_tls_set_name(tls);
    tls->blocked = 0;
    if (!result) result = mbedtls_ssl_handshake_step(&tls->ssl);
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    if (result == MBEDTLS_ERR_SSL_WANT_WRITE && tls->ssl.MBEDTLS_PRIVATE(send_alert)) {
        result = tls->ssl.MBEDTLS_PRIVATE(alert_reason);
    }
#endif
    return result;
}

// Goes on shaking hands.  Returns 1 when that is over, else what the hook returns.
static ptrdiff_t nbdi_tls_shake(nbd_tls *tls)
{
    if (tls->over) return nbdi_tls_over(tls);
    while (!tls->up) {
        int result = nbdi_tls_step(tls);
        if (result) {
            ptrdiff_t verdict = nbdi_tls_judge(tls, result);
            if (verdict != NBDI_TLS_AGAIN) return verdict;
        }
        tls->up = nbdi_tls_shaken(tls) && tls->named;
    }
    return 1;
}

/// mbedTLS: hooks ///

// What goes into the next record, with `done` bytes of the offer behind it: a piece as it
// lies, or, if it is small and another one follows, both in the stage.
static nbd_iovec nbdi_tls_gather(nbd_tls *tls, const nbd_iovec *iov, unsigned count, size_t done,
                                 size_t most)
{
    size_t room = (size_t)nbdi_min(NBD_TLS_STAGE, most);
    nbd_iovec v;
    for (; done >= iov->size; count--)
        done -= (iov++)->size;
    v.base = (uint8_t *)iov->base + done;
    v.size = (size_t)nbdi_min(iov->size - done, most);
    if (count == 1 || v.size >= room) return v;
    v.base = tls->stage;
    for (v.size = 0; count > 0 && v.size < room; iov++, count--, done = 0) {
        size_t size = (size_t)nbdi_min(iov->size - done, room - v.size);
        memcpy(tls->stage + v.size, (const uint8_t *)iov->base + done, size);
        v.size += size;
    }
    return v;
}

// An alert that mbedTLS sends by itself, against renegotiation, may have got stuck.  A write
// would take it for its own record and drop the data; sending an alert just goes on.
static ptrdiff_t nbdi_tls_flush(nbd_tls *tls)
{
    int result = 0;
    tls->blocked = 0;
    if (!tls->latch && nbdi_tls_is_stuck(tls)) {
        result = mbedtls_ssl_send_alert_message(&tls->ssl, MBEDTLS_SSL_ALERT_LEVEL_WARNING,
                                                MBEDTLS_SSL_ALERT_MSG_NO_RENEGOTIATION);
    }
    if (!result) return 1;
    return tls->blocked ? tls->blocked : NBD_IO_ERROR;
}

// Sends one record.  mbedTLS wants a blocked write again with the same pointer and size: what
// is latched is the front of every later offer of the engine.  Reading, and whatever else
// mbedTLS does before it writes, may send the rest: to write it then would send it twice.
static ptrdiff_t nbdi_tls_record(nbd_tls *tls, nbd_iovec v)
{
    ptrdiff_t verdict = NBDI_TLS_AGAIN;
    while (verdict == NBDI_TLS_AGAIN) {
        int result = 0;
        tls->blocked = 0;
        if (!tls->latch || nbdi_tls_is_stuck(tls)) {
            result = mbedtls_ssl_write(&tls->ssl, (const unsigned char *)v.base, v.size);
        }
        if (result > 0 || (tls->latch && !nbdi_tls_is_stuck(tls))) {
            tls->latch = NULL;
            return result > 0 ? result : (ptrdiff_t)v.size;
        }
        if (nbdi_tls_is_stuck(tls)) {
            tls->latch = (const unsigned char *)v.base;
            tls->latch_size = v.size;
        }
        verdict = tls->send_over ? NBD_IO_ERROR : nbdi_tls_judge(tls, result);
    }
    return verdict;
}

static ptrdiff_t nbdi_tls_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    nbd_tls *tls = (nbd_tls *)context;
    size_t total = 0, sent = 0;
    ptrdiff_t result;
    unsigned i;
    for (i = 0; i < count; i++)
        total += iov[i].size;
    nbdi_tls_enter(tls);
    result = tls->send_over ? NBD_IO_ERROR : nbdi_tls_shake(tls);
    if (result > 0) result = nbdi_tls_flush(tls);
    while (result > 0 && sent < total && sent < NBD_POLL_BYTES) {
        int most = mbedtls_ssl_get_max_out_record_payload(&tls->ssl);
        nbd_iovec v;
        if (tls->latch) {
            v.base = nbdi_unconst(tls->latch);
            v.size = tls->latch_size;
        } else {
            v = nbdi_tls_gather(tls, iov, count, sent, (size_t)most);
        }
        tls->more = sent + v.size < nbdi_min(total, NBD_POLL_BYTES) ? NBD_SEND_MORE : flags;
        result = nbdi_tls_record(tls, v);
        if (result > 0) sent += (size_t)result;
    }
    tls->send_waits = result == NBD_IO_READ;
    if (sent > 0) return (ptrdiff_t)sent;
    return result == NBD_IO_EOF ? NBD_IO_ERROR : result;
}

// While the send hook waits for input (in the handshake, or in the middle of a ticket) it
// alone takes it: if this one did, the engine would not know that it can send.
static ptrdiff_t nbdi_tls_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    nbd_tls *tls = (nbd_tls *)context;
    size_t most = (size_t)nbdi_min(iov->size, 0x7fffffffu);
    ptrdiff_t verdict;
    (void)count;
    nbdi_tls_enter(tls);
    if (tls->send_waits) return tls->over ? nbdi_tls_over(tls) : NBD_IO_READ;
    verdict = nbdi_tls_shake(tls);
    while (verdict == NBDI_TLS_AGAIN) {
        int result;
        tls->blocked = 0;
        result = mbedtls_ssl_read(&tls->ssl, (unsigned char *)iov->base, most);
        if (result > 0) {
            tls->heard = 1;
            return result;
        }
        verdict = nbdi_tls_judge(tls, result);
    }
    return verdict;
}

static int nbdi_tls_wait(void *context, unsigned wants, int *timeout_ms)
{
    const nbd_tls *tls = (const nbd_tls *)context;
    if (!tls->below->wait) return NBD_IO_ERROR;
    return tls->below->wait(tls->below->context, wants, timeout_ms);
}

// Of a close_notify that blocks the rest is sent by the next call: to ask for it again would
// make another one.
static int nbdi_tls_finish(void *context)
{
    nbd_tls *tls = (nbd_tls *)context;
    nbdi_tls_enter(tls);
    if (tls->up && !tls->over && !tls->send_over) {
        if (nbdi_tls_flush(tls) > 0 && !tls->notified) {
            tls->notified = 1;
            (void)mbedtls_ssl_close_notify(&tls->ssl);
        }
        if (tls->blocked) return (int)tls->blocked;
    }
    return tls->below->finish ? tls->below->finish(tls->below->context) : 0;
}

/// mbedTLS: a session ///

static int nbdi_tls_refuse(nbd_tls *tls, int error, int tls_error, const char *detail)
{
    tls->tls_error = tls_error;
    tls->transport.detail = detail;
    tls->over = NBDI_TLS_FAILED;
    return error;
}

// Whether a certificate may be accepted only under a name.
static int nbdi_tls_verifies(const mbedtls_ssl_config *config)
{
#ifdef NBDI_TLS_PSK
    if (config->NBDI_TLS_PRIVATE(psk_identity)) return 0;
#endif
    return config->NBDI_TLS_PRIVATE(authmode) != MBEDTLS_SSL_VERIFY_NONE;
}

// An address is no name: RFC 6066 keeps it out of SNI.
static int nbdi_tls_is_address(const char *name)
{
    return strchr(name, ':') || name[strspn(name, "0123456789.")] == '\0';
}

static const char *nbdi_tls_sni(const char *verify_name, const char *server_name)
{
    if (server_name) return *server_name ? server_name : NULL;
    return verify_name && !nbdi_tls_is_address(verify_name) ? verify_name : NULL;
}

static int nbdi_tls_name_ok(const char *name)
{
    return !name || strlen(name) <= MBEDTLS_SSL_MAX_HOST_NAME_LEN;
}

int nbd_tls_init(nbd_tls *tls, const nbd_transport *below, const mbedtls_ssl_config *config,
                 const char *verify_name, const char *server_name)
{
    int result;
    memset(tls, 0, offsetof(nbd_tls, stage));
    tls->transport.context = tls;
    tls->transport.send = nbdi_tls_send;
    tls->transport.recv = nbdi_tls_recv;
    tls->transport.wait = nbdi_tls_wait;
    tls->transport.finish = nbdi_tls_finish;
    tls->below = below;
    tls->verify_name = verify_name;
    mbedtls_ssl_init(&tls->ssl);
    if (verify_name ? !*verify_name : nbdi_tls_verifies(config)) {
        return nbdi_tls_refuse(tls, NBD_ERR_ARG, 0,
                               NBDI_SAY("TLS: no name to verify: set one, or do not verify"));
    }
    if (!nbdi_tls_name_ok(verify_name) || !nbdi_tls_name_ok(server_name)) {
        return nbdi_tls_refuse(tls, NBD_ERR_ARG, 0, NBDI_SAY("TLS: name above 255 bytes"));
    }
    result = mbedtls_ssl_setup(&tls->ssl, config);
    if (!result) {
        result = mbedtls_ssl_set_hostname(&tls->ssl, nbdi_tls_sni(verify_name, server_name));
    }
    if (result) {
        return nbdi_tls_refuse(tls, NBD_ERR_TLS_SETUP, result,
                               NBDI_SAY("TLS: mbedTLS cannot set up a session"));
    }
    mbedtls_ssl_set_bio(&tls->ssl, tls, nbdi_tls_put, nbdi_tls_get, NULL);
    return NBD_OK;
}

void nbd_tls_free(nbd_tls *tls)
{
    mbedtls_ssl_free(&tls->ssl);
    tls->over = NBDI_TLS_FAILED;
}

/// mbedTLS: credentials ///

static int nbdi_tls_bad(nbd_tls_credentials *c, int tls_error, const char *detail)
{
    c->tls_error = tls_error;
    c->detail = nbdi_tls_lacks_memory(tls_error) ? NBDI_TLS_NO_MEMORY : detail;
    return tls_error ? NBD_ERR_TLS_SETUP : NBD_ERR_ARG;
}

static int nbdi_tls_has_psk(const nbd_tls_options *o)
{
    return o->psk || o->psk_file;
}

#ifdef MBEDTLS_X509_CRT_PARSE_C

// A certificate that signs itself is told from one whose authority is not known.
static int nbdi_tls_verify(void *context, mbedtls_x509_crt *certificate, int depth, uint32_t *flags)
{
    const mbedtls_x509_buf *issuer = &certificate->issuer_raw, *subject = &certificate->subject_raw;
    (void)context;
    if (depth == 0 && (*flags & MBEDTLS_X509_BADCERT_NOT_TRUSTED) && issuer->len == subject->len &&
        memcmp(issuer->p, subject->p, issuer->len) == 0) {
        *flags |= NBD_TLS_SELF_SIGNED;
    }
    return 0;
}

static int nbdi_tls_parse_key(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    const char *password = o->key_password;
    const unsigned char *key = (const unsigned char *)o->key;
#if MBEDTLS_VERSION_NUMBER < 0x03000000
#define NBDI_TLS_RNG
#else
#define NBDI_TLS_RNG , c->rng, c->rng_context
#endif
#ifdef MBEDTLS_FS_IO
    if (o->key_file) {
        return mbedtls_pk_parse_keyfile(&c->key, o->key_file, password NBDI_TLS_RNG);
    }
#endif
    return mbedtls_pk_parse_key(&c->key, key, o->key_size, (const unsigned char *)password,
                                password ? strlen(password) : 0 NBDI_TLS_RNG);
}

static int nbdi_tls_parse(mbedtls_x509_crt *to, const void *memory, size_t size, const char *file)
{
#ifdef MBEDTLS_FS_IO
    if (file) return mbedtls_x509_crt_parse_file(to, file);
#endif
    (void)file;
    return mbedtls_x509_crt_parse(to, (const unsigned char *)memory, size);
}

static int nbdi_tls_load_key(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    int result = nbdi_tls_parse_key(c, o);
    switch (result) {
    case 0: break;
#ifdef MBEDTLS_FS_IO
    case MBEDTLS_ERR_PK_FILE_IO_ERROR:
        return nbdi_tls_bad(c, result, NBDI_SAY("TLS: file of the key cannot be read"));
#endif
    case MBEDTLS_ERR_PK_PASSWORD_REQUIRED:
        return nbdi_tls_bad(c, result, NBDI_SAY("TLS: the key is encrypted: give its password"));
    case MBEDTLS_ERR_PK_PASSWORD_MISMATCH:
        return nbdi_tls_bad(c, result, NBDI_SAY("TLS: wrong password of the key"));
    default: return nbdi_tls_bad(c, result, NBDI_SAY("TLS: the key cannot be used"));
    }
    result = mbedtls_pk_check_pair(&c->certificate.pk, &c->key NBDI_TLS_RNG);
    if (result) {
        return nbdi_tls_bad(c, result, NBDI_SAY("TLS: the key is not that of the certificate"));
    }
    result = mbedtls_ssl_conf_own_cert(&c->config, &c->certificate, &c->key);
    return result ? nbdi_tls_bad(c, result, NBDI_SAY("TLS: the key cannot be used")) : NBD_OK;
}

static int nbdi_tls_load_certificate(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    int result;
    if (!o->certificate && !o->certificate_file) return NBD_OK;
    result =
        nbdi_tls_parse(&c->certificate, o->certificate, o->certificate_size, o->certificate_file);
#ifdef MBEDTLS_FS_IO
    if (result == MBEDTLS_ERR_PK_FILE_IO_ERROR) {
        if (o->certificate_optional) return NBD_OK;
        return nbdi_tls_bad(c, result, NBDI_SAY("TLS: file of the certificate cannot be read"));
    }
#endif
    if (result > 0) result = MBEDTLS_ERR_X509_INVALID_FORMAT; // one of the chain
    if (result) return nbdi_tls_bad(c, result, NBDI_SAY("TLS: the certificate cannot be used"));
    return nbdi_tls_load_key(c, o);
}

static int nbdi_tls_load_ca(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    int result;
    if (!o->ca && !o->ca_file) return NBD_OK;
    result = nbdi_tls_parse(&c->ca, o->ca, o->ca_size, o->ca_file);
#ifdef MBEDTLS_FS_IO
    if (result == MBEDTLS_ERR_PK_FILE_IO_ERROR) {
        return nbdi_tls_bad(c, result, NBDI_SAY("TLS: file of the authority cannot be read"));
    }
#endif
    if (result < 0) {
        return nbdi_tls_bad(c, result, NBDI_SAY("TLS: the authority's certificate cannot be used"));
    }
    mbedtls_ssl_conf_ca_chain(&c->config, &c->ca, NULL);
    return NBD_OK;
}

static int nbdi_tls_load_x509(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    int error = nbdi_tls_load_ca(c, o);
    mbedtls_ssl_conf_verify(&c->config, nbdi_tls_verify, NULL);
    if (o->no_verify) mbedtls_ssl_conf_authmode(&c->config, MBEDTLS_SSL_VERIFY_NONE);
    return error ? error : nbdi_tls_load_certificate(c, o);
}

#else

static int nbdi_tls_load_x509(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    (void)o;
    return nbdi_tls_bad(c, 0, NBDI_SAY("TLS: mbedTLS is built without certificates"));
}

#endif // MBEDTLS_X509_CRT_PARSE_C

#ifdef NBDI_TLS_PSK

// Without suites that certificates go with: one of those would be accepted instead.
static const int nbdi_tls_psk_suites[] = {
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
    MBEDTLS_TLS1_3_AES_128_GCM_SHA256,
    MBEDTLS_TLS1_3_CHACHA20_POLY1305_SHA256,
    MBEDTLS_TLS1_3_AES_256_GCM_SHA384,
#endif
    MBEDTLS_TLS_ECDHE_PSK_WITH_CHACHA20_POLY1305_SHA256,
    MBEDTLS_TLS_DHE_PSK_WITH_AES_128_GCM_SHA256,
    MBEDTLS_TLS_DHE_PSK_WITH_AES_256_GCM_SHA384,
    MBEDTLS_TLS_DHE_PSK_WITH_CHACHA20_POLY1305_SHA256,
    MBEDTLS_TLS_ECDHE_PSK_WITH_AES_128_CBC_SHA256,
    MBEDTLS_TLS_ECDHE_PSK_WITH_AES_256_CBC_SHA384,
    MBEDTLS_TLS_PSK_WITH_AES_128_GCM_SHA256,
    MBEDTLS_TLS_PSK_WITH_AES_256_GCM_SHA384,
    MBEDTLS_TLS_PSK_WITH_CHACHA20_POLY1305_SHA256,
    MBEDTLS_TLS_PSK_WITH_AES_128_CCM,
    MBEDTLS_TLS_PSK_WITH_AES_128_CCM_8,
    0};

static int nbdi_tls_use_psk(nbd_tls_credentials *c, const void *key, size_t size, const char *user)
{
    int result = mbedtls_ssl_conf_psk(&c->config, (const unsigned char *)key, size,
                                      (const unsigned char *)user, strlen(user));
    if (result) return nbdi_tls_bad(c, result, NBDI_SAY("TLS: the shared key cannot be used"));
    mbedtls_ssl_conf_ciphersuites(&c->config, nbdi_tls_psk_suites);
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
    mbedtls_ssl_conf_tls13_key_exchange_modes(&c->config,
                                              MBEDTLS_SSL_TLS1_3_KEY_EXCHANGE_MODE_PSK_ALL);
#endif
    return NBD_OK;
}

#ifdef MBEDTLS_FS_IO

// Takes the key out of a line "user:hexadecimal".  Returns its size, 0 if the line is of
// another user or none of that form.
static size_t nbdi_tls_psk_line(char *line, const char *user, unsigned char *key, size_t room)
{
    size_t size = 0, length = strlen(user);
    const char *at = line + length + 1;
    if (strncmp(line, user, length) != 0 || line[length] != ':') return 0;
    for (; nbdi_hex_digit(at[0]) >= 0 && nbdi_hex_digit(at[1]) >= 0 && size < room; at += 2)
        key[size++] = (unsigned char)(nbdi_hex_digit(at[0]) * 16 + nbdi_hex_digit(at[1]));
    return at[strspn(at, "\r\n")] == '\0' ? size : 0;
}

static int nbdi_tls_load_psk_file(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    unsigned char key[MBEDTLS_PSK_MAX_LEN];
    char line[512], buffer[512];
    size_t size = 0;
    int error;
    FILE *file = fopen(o->psk_file, "r");
    if (!file) {
        return nbdi_tls_bad(c, MBEDTLS_ERR_PK_FILE_IO_ERROR,
                            NBDI_SAY("TLS: file of the shared keys cannot be read"));
    }
    (void)setvbuf(file, buffer, _IOFBF, sizeof buffer); // so no key is left on the heap
    while (!size && fgets(line, sizeof line, file))
        size = nbdi_tls_psk_line(line, o->user, key, sizeof key);
    (void)fclose(file);
    error = size ? nbdi_tls_use_psk(c, key, size, o->user)
                 : nbdi_tls_bad(c, MBEDTLS_ERR_PK_KEY_INVALID_FORMAT,
                                NBDI_SAY("TLS: no such user in the file of the shared keys"));
    mbedtls_platform_zeroize(key, sizeof key);
    mbedtls_platform_zeroize(line, sizeof line);
    mbedtls_platform_zeroize(buffer, sizeof buffer);
    return error;
}

#endif // MBEDTLS_FS_IO

static int nbdi_tls_load_psk(nbd_tls_credentials *c, const nbd_tls_options *o)
{
#ifdef MBEDTLS_FS_IO
    if (o->psk_file) return nbdi_tls_load_psk_file(c, o);
#endif
    return nbdi_tls_use_psk(c, o->psk, o->psk_size, o->user);
}

#else

static int nbdi_tls_load_psk(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    (void)o;
    return nbdi_tls_bad(c, 0, NBDI_SAY("TLS: mbedTLS is built without shared keys"));
}

#endif // NBDI_TLS_PSK

// What contradicts itself or is missing, or NULL.
static const char *nbdi_tls_missing(const nbd_tls_options *o)
{
    int certificate = o->certificate || o->certificate_file, key = o->key || o->key_file;
    int ca = o->ca || o->ca_file;
#ifndef MBEDTLS_FS_IO
    if (o->ca_file || o->certificate_file || o->key_file || o->psk_file) {
        return NBDI_SAY("TLS: mbedTLS is built without files");
    }
#endif
    if ((o->ca && o->ca_file) || (o->certificate && o->certificate_file) ||
        (o->key && o->key_file) || (o->psk && o->psk_file)) {
        return NBDI_SAY("TLS: the same thing is given as memory and as file");
    }
    if (certificate != key) return NBDI_SAY("TLS: certificate without key, or the reverse");
    if (nbdi_tls_has_psk(o)) {
        if (ca || certificate) return NBDI_SAY("TLS: a shared key and certificates");
        if (!o->user || !*o->user) return NBDI_SAY("TLS: a shared key without a user");
        if (o->psk && !o->psk_size) return NBDI_SAY("TLS: the shared key is empty");
    } else if (!ca && !o->no_verify) {
        return NBDI_SAY("TLS: no authority to trust: give one, or do not verify");
    }
    return NULL;
}

static int nbdi_tls_start_rng(nbd_tls_credentials *c, const nbd_tls_options *o)
{
    int result = 0;
    c->rng = o->rng;
    c->rng_context = o->rng_context;
#ifdef NBDI_TLS_OWN_RNG
    if (!o->rng) {
        c->rng = mbedtls_ctr_drbg_random;
        c->rng_context = &c->drbg;
        result = mbedtls_ctr_drbg_seed(&c->drbg, mbedtls_entropy_func, &c->entropy, NULL, 0);
    }
#else
    if (!o->rng) return nbdi_tls_bad(c, 0, NBDI_SAY("TLS: no source of random numbers"));
#endif
    return result ? nbdi_tls_bad(c, result, NBDI_SAY("TLS: no entropy")) : NBD_OK;
}

static int nbdi_tls_start_config(nbd_tls_credentials *c)
{
    int result =
        mbedtls_ssl_config_defaults(&c->config, MBEDTLS_SSL_IS_CLIENT, MBEDTLS_SSL_TRANSPORT_STREAM,
                                    MBEDTLS_SSL_PRESET_DEFAULT);
#ifdef NBDI_TLS_STARTS_PSA
    if (!result && psa_crypto_init()) result = MBEDTLS_ERR_SSL_HW_ACCEL_FAILED;
#endif
    if (result) return nbdi_tls_bad(c, result, NBDI_SAY("TLS: mbedTLS cannot start"));
    mbedtls_ssl_conf_rng(&c->config, c->rng, c->rng_context);
#if MBEDTLS_VERSION_NUMBER < 0x03000000
    mbedtls_ssl_conf_min_version(&c->config, MBEDTLS_SSL_MAJOR_VERSION_3,
                                 MBEDTLS_SSL_MINOR_VERSION_3);
#else
    mbedtls_ssl_conf_min_tls_version(&c->config, MBEDTLS_SSL_VERSION_TLS1_2);
#endif
#ifdef MBEDTLS_SSL_SESSION_TICKETS
    mbedtls_ssl_conf_session_tickets(&c->config, MBEDTLS_SSL_SESSION_TICKETS_DISABLED);
#endif
    return NBD_OK;
}

int nbd_tls_credentials_init(nbd_tls_credentials *credentials, const nbd_tls_options *options)
{
    nbd_tls_credentials *c = credentials;
    const char *missing = nbdi_tls_missing(options);
    int error;
    memset(c, 0, sizeof *c);
    c->detail = "";
    c->made = 1;
    mbedtls_ssl_config_init(&c->config);
#ifdef MBEDTLS_X509_CRT_PARSE_C
    mbedtls_x509_crt_init(&c->ca);
    mbedtls_x509_crt_init(&c->certificate);
    mbedtls_pk_init(&c->key);
#endif
#ifdef NBDI_TLS_OWN_RNG
    mbedtls_entropy_init(&c->entropy);
    mbedtls_ctr_drbg_init(&c->drbg);
#endif
    if (missing) return nbdi_tls_bad(c, 0, missing);
    error = nbdi_tls_start_rng(c, options);
    if (!error) error = nbdi_tls_start_config(c);
    if (error) return error;
    return nbdi_tls_has_psk(options) ? nbdi_tls_load_psk(c, options)
                                     : nbdi_tls_load_x509(c, options);
}

void nbd_tls_credentials_free(nbd_tls_credentials *credentials)
{
    nbd_tls_credentials *c = credentials;
    if (!c->made) return;
    mbedtls_ssl_config_free(&c->config);
#ifdef MBEDTLS_X509_CRT_PARSE_C
    mbedtls_x509_crt_free(&c->ca);
    mbedtls_x509_crt_free(&c->certificate);
    mbedtls_pk_free(&c->key);
#endif
#ifdef NBDI_TLS_OWN_RNG
    mbedtls_ctr_drbg_free(&c->drbg);
    mbedtls_entropy_free(&c->entropy);
#endif
    c->made = 0;
}

#endif // NBD_MBEDTLS

/// Convenience: implementation ///

#ifndef NBD_NO_CONVENIENCE

// URIs (RFC 3986, and doc/uri.md of the NBD project).  The text is taken apart from left
// to right; each string is decoded behind the one before it.  strlen(text) + 8 bytes
// suffice: the delimiter of a part pays for its NUL, "nbd://" and the 8 for "localhost".

typedef struct nbdi_uri_range {
    size_t start;
    size_t end; // one behind the last byte
} nbdi_uri_range;

enum nbdi_uri_parameter_index {
    NBDI_URI_SOCKET,
    NBDI_URI_TLS_TYPE,
    NBDI_URI_TLS_HOSTNAME,
    NBDI_URI_TLS_VERIFY_PEER,
    NBDI_URI_TLS_CERTIFICATES,
    NBDI_URI_TLS_PSK_FILE,
    NBDI_URI_PARAMETERS
};

typedef struct nbdi_uri_parser {
    nbd_uri *uri;
    const char *text;
    char *memory;
    size_t size; // of the memory
    size_t used;
    const char *value[NBDI_URI_PARAMETERS]; // NULL: not seen
    size_t value_at[NBDI_URI_PARAMETERS];   // in the text
} nbdi_uri_parser;

// What decoded text may hold besides bytes that are harmless to print.
#define NBDI_URI_CONTROLS 1u  // control characters, but no NUL
#define NBDI_URI_FIRST_NUL 2u // a NUL as the first byte

static const struct nbdi_uri_parameter {
    const char *name;
    unsigned holds;
} nbdi_uri_parameters[NBDI_URI_PARAMETERS] = {
    {"socket", NBDI_URI_CONTROLS | NBDI_URI_FIRST_NUL},
    {"tls-type", 0},
    {"tls-hostname", 0},
    {"tls-verify-peer", 0},
    {"tls-certificates", NBDI_URI_CONTROLS},
    {"tls-psk-file", NBDI_URI_CONTROLS},
};

static const struct nbdi_uri_scheme {
    const char *name;
    uint32_t kind;
    uint32_t config_flags;
} nbdi_uri_schemes[] = {
    {"nbd", NBD_ADDRESS_TCP, 0},         {"nbds", NBD_ADDRESS_TCP, NBD_TLS_REQUIRE},
    {"nbd+unix", NBD_ADDRESS_UNIX, 0},   {"nbds+unix", NBD_ADDRESS_UNIX, NBD_TLS_REQUIRE},
    {"nbd+vsock", NBD_ADDRESS_VSOCK, 0}, {"nbds+vsock", NBD_ADDRESS_VSOCK, NBD_TLS_REQUIRE},
};

#define NBDI_URI_SCHEMES (sizeof nbdi_uri_schemes / sizeof nbdi_uri_schemes[0])

static int nbdi_uri_bad(nbdi_uri_parser *parser, size_t at, const char *rule)
{
    parser->uri->detail = rule;
    parser->uri->detail_at = at;
    return NBD_ERR_URI;
}

static int nbdi_text_is(const char *text, const char *word)
{
    size_t size = strlen(word);
    return strlen(text) == size && memcmp(text, word, size) == 0;
}

// The place of the first `wanted` in the range, or its end.
static size_t nbdi_uri_find(const nbdi_uri_parser *parser, nbdi_uri_range in, char wanted)
{
    size_t at = in.start;
    while (at < in.end && parser->text[at] != wanted)
        at++;
    return at;
}

// The place of the first of two bytes, or the end of the range.
static size_t nbdi_uri_find_either(const nbdi_uri_parser *parser, nbdi_uri_range in, char one,
                                   char other)
{
    in.end = nbdi_uri_find(parser, in, one);
    return nbdi_uri_find(parser, in, other);
}

// The byte that the escape at `at` stands for, or -1.  It ends within its part of the
// text: neither the NUL nor a delimiter is a digit.
static int nbdi_uri_escape(const nbdi_uri_parser *parser, size_t at)
{
    int high = nbdi_hex_digit(parser->text[at + 1]), low;
    if (high < 0) return -1;
    low = nbdi_hex_digit(parser->text[at + 2]);
    return low < 0 ? -1 : high * 16 + low;
}

static int nbdi_is_control(int byte)
{
    return byte < 0x20 || byte == 0x7f;
}

static int nbdi_uri_put(nbdi_uri_parser *parser, char byte)
{
    if (parser->used == parser->size) return NBD_ERR_BUFFER;
    parser->memory[parser->used++] = byte;
    return NBD_OK;
}

// Stores one decoded byte, if the place may hold it.
static int nbdi_uri_put_decoded(nbdi_uri_parser *parser, int byte, size_t at, int first,
                                unsigned holds)
{
    if (byte < 0) return nbdi_uri_bad(parser, at, "'%' without two hexadecimal digits");
    if (byte == 0 && !(first && (holds & NBDI_URI_FIRST_NUL))) {
        return nbdi_uri_bad(parser, at, "%00 is not allowed here");
    }
    if (byte != 0 && nbdi_is_control(byte) && !(holds & NBDI_URI_CONTROLS)) {
        return nbdi_uri_bad(parser, at, "control character");
    }
    return nbdi_uri_put(parser, (char)byte);
}

static int nbdi_uri_decode(nbdi_uri_parser *parser, nbdi_uri_range in, unsigned holds,
                           const char **decoded)
{
    size_t begin = parser->used, at = in.start;
    int error = NBD_OK;
    while (at < in.end && !error) {
        int escaped = parser->text[at] == '%';
        int byte = escaped ? nbdi_uri_escape(parser, at) : parser->text[at];
        error = nbdi_uri_put_decoded(parser, byte, at, at == in.start, holds);
        at += escaped ? 3u : 1u;
    }
    if (!error) error = nbdi_uri_put(parser, '\0');
    if (!error) *decoded = parser->memory + begin;
    return error;
}

// A decimal number from 1 (or 0) to `most`; anything else is -1.
static int64_t nbdi_uri_number(const nbdi_uri_parser *parser, nbdi_uri_range in, uint32_t least,
                               uint32_t most)
{
    uint64_t number = 0;
    size_t at;
    for (at = in.start; at < in.end; at++) {
        char c = parser->text[at];
        if (c < '0' || c > '9') return -1;
        number = number * 10 + (unsigned)(c - '0');
        if (number > most) return -1;
    }
    return in.start == in.end || number < least ? -1 : (int64_t)number;
}

// Everything that is not printable ASCII must be escaped in a URI.
static int nbdi_uri_check_bytes(nbdi_uri_parser *parser, size_t *length)
{
    size_t at;
    for (at = 0; parser->text[at] != '\0'; at++) {
        unsigned char byte = (unsigned char)parser->text[at];
        if (byte <= 0x20 || byte >= 0x7f) {
            return nbdi_uri_bad(parser, at, "byte that must be percent-encoded");
        }
        if (byte == '#') return nbdi_uri_bad(parser, at, "fragments have no meaning here");
    }
    *length = at;
    return NBD_OK;
}

// Schemes are compared without case.
static int nbdi_uri_scheme_is(const nbdi_uri_parser *parser, size_t size, const char *name)
{
    size_t at;
    if (strlen(name) != size) return 0;
    for (at = 0; at < size; at++) {
        char c = parser->text[at];
        if (c >= 'A' && c <= 'Z') c = (char)(c - 'A' + 'a');
        if (c != name[at]) return 0;
    }
    return 1;
}

static int nbdi_uri_take_scheme(nbdi_uri_parser *parser, nbdi_uri_range *rest)
{
    size_t colon = nbdi_uri_find(parser, *rest, ':');
    size_t i = 0;
    while (i < NBDI_URI_SCHEMES && !nbdi_uri_scheme_is(parser, colon, nbdi_uri_schemes[i].name)) {
        i++;
    }
    if (colon == rest->end || i == NBDI_URI_SCHEMES) {
        return nbdi_uri_bad(parser, 0, "scheme is none of nbd, nbds, with +unix or +vsock");
    }
    rest->start = colon + 1;
    if (rest->end - rest->start < 2 || memcmp(parser->text + rest->start, "//", 2) != 0) {
        return nbdi_uri_bad(parser, rest->start, "\"//\" is missing behind the scheme");
    }
    rest->start += 2;
    parser->uri->address.kind = nbdi_uri_schemes[i].kind;
    parser->uri->config_flags = nbdi_uri_schemes[i].config_flags;
    return NBD_OK;
}

static int nbdi_uri_is_delimiter(char c)
{
    static const char delimiters[] = " /?#@[]:\\";
    size_t i = 0;
    while (delimiters[i] != '\0' && delimiters[i] != c)
        i++;
    return delimiters[i] != '\0';
}

// A host reaches resolvers, and command lines of careless programs.
static int nbdi_uri_check_host(nbdi_uri_parser *parser, size_t at, const char *host)
{
    const char *c;
    if (host[0] == '-') return nbdi_uri_bad(parser, at, "host starts with '-'");
    for (c = host; *c != '\0'; c++) {
        if (nbdi_uri_is_delimiter(*c)) {
            return nbdi_uri_bad(parser, at, "delimiter or space inside the host");
        }
    }
    return NBD_OK;
}

// An IPv6 address without brackets, maybe with %zone.  Only its alphabet is checked,
// the rest is for the resolver.
static int nbdi_uri_check_ipv6(nbdi_uri_parser *parser, size_t at, const char *host)
{
    const char *c;
    int colons = 0;
    for (c = host; *c != '\0' && *c != '%'; c++) {
        if (*c == ':') colons++;
        if (*c != ':' && *c != '.' && nbdi_hex_digit(*c) < 0) {
            return nbdi_uri_bad(parser, at, "no IPv6 address between the brackets");
        }
    }
    if (colons < 2) return nbdi_uri_bad(parser, at, "no IPv6 address between the brackets");
    if (c[0] == '%' && c[1] == '\0') return nbdi_uri_bad(parser, at, "empty IPv6 zone");
    return c[0] == '%' ? nbdi_uri_check_host(parser, at, c + 1) : NBD_OK;
}

// Moves in->start behind the host.
static int nbdi_uri_take_bracketed(nbdi_uri_parser *parser, nbdi_uri_range *in)
{
    nbdi_uri_range inner;
    int error;
    inner.start = in->start + 1;
    inner.end = nbdi_uri_find(parser, *in, ']');
    if (inner.end == in->end) return nbdi_uri_bad(parser, in->start, "']' is missing");
    in->start = inner.end + 1;
    error = nbdi_uri_decode(parser, inner, 0, &parser->uri->address.host);
    if (error) return error;
    return nbdi_uri_check_ipv6(parser, inner.start, parser->uri->address.host);
}

static int nbdi_uri_take_name(nbdi_uri_parser *parser, nbdi_uri_range *in)
{
    nbdi_uri_range name = *in;
    int error;
    name.end = nbdi_uri_find(parser, *in, ':');
    in->start = name.end;
    error = nbdi_uri_decode(parser, name, 0, &parser->uri->address.host);
    if (error) return error;
    return nbdi_uri_check_host(parser, name.start, parser->uri->address.host);
}

static int nbdi_uri_default_host(nbdi_uri_parser *parser)
{
    static const char name[] = "localhost";
    if (parser->size - parser->used < sizeof name) return NBD_ERR_BUFFER;
    parser->uri->address.host = parser->memory + parser->used;
    memcpy(parser->memory + parser->used, name, sizeof name);
    parser->used += sizeof name;
    return NBD_OK;
}

static int nbdi_uri_take_host(nbdi_uri_parser *parser, nbdi_uri_range *in)
{
    if (in->start == in->end || parser->text[in->start] == ':') {
        return nbdi_uri_default_host(parser);
    }
    if (parser->text[in->start] == '[') return nbdi_uri_take_bracketed(parser, in);
    return nbdi_uri_take_name(parser, in);
}

// What stands behind the host: nothing, or ':' and a port that may be empty.
static int nbdi_uri_take_port(nbdi_uri_parser *parser, nbdi_uri_range in)
{
    if (in.start == in.end) return NBD_OK;
    if (parser->text[in.start] != ':') {
        return nbdi_uri_bad(parser, in.start, "only ':' and a port may follow ']'");
    }
    in.start++;
    if (in.start == in.end) return NBD_OK;
    if (nbdi_uri_find(parser, in, ':') != in.end) {
        return nbdi_uri_bad(parser, in.start, "an IPv6 address stands in brackets");
    }
    if (nbdi_uri_number(parser, in, 1, 65535) < 0) {
        return nbdi_uri_bad(parser, in.start, "port is no number from 1 to 65535");
    }
    return nbdi_uri_decode(parser, in, 0, &parser->uri->address.port);
}

static int nbdi_uri_take_vsock(nbdi_uri_parser *parser, nbdi_uri_range in)
{
    nbdi_uri_range cid = in, port = in;
    int64_t number;
    cid.end = nbdi_uri_find(parser, in, ':');
    number = nbdi_uri_number(parser, cid, 0, UINT32_MAX);
    if (number < 0) return nbdi_uri_bad(parser, cid.start, "CID is no 32-bit number");
    parser->uri->address.cid = (uint32_t)number;
    if (in.end - cid.end < 2) return NBD_OK;
    port.start = cid.end + 1;
    number = nbdi_uri_number(parser, port, 1, UINT32_MAX);
    if (number < 0) return nbdi_uri_bad(parser, port.start, "port is no 32-bit number above 0");
    parser->uri->address.vport = (uint32_t)number;
    return NBD_OK;
}

static int nbdi_uri_take_user(nbdi_uri_parser *parser, nbdi_uri_range *in)
{
    nbdi_uri_range user = *in;
    user.end = nbdi_uri_find(parser, *in, '@');
    if (user.end == in->end) return NBD_OK;
    in->start = user.end + 1;
    if (nbdi_uri_find(parser, user, ':') != user.end) {
        return nbdi_uri_bad(parser, user.start, "a password has no place in an NBD URI");
    }
    return nbdi_uri_decode(parser, user, 0, &parser->uri->user);
}

// A user name is allowed with every scheme: TLS with a pre-shared key needs it.
static int nbdi_uri_take_authority(nbdi_uri_parser *parser, nbdi_uri_range in)
{
    int error = nbdi_uri_take_user(parser, &in);
    if (error) return error;
    switch (parser->uri->address.kind) {
    case NBD_ADDRESS_VSOCK: return nbdi_uri_take_vsock(parser, in);
    case NBD_ADDRESS_UNIX:
        if (in.start == in.end) return NBD_OK;
        return nbdi_uri_bad(parser, in.start, "a Unix socket has neither host nor port");
    default:
        error = nbdi_uri_take_host(parser, &in);
        return error ? error : nbdi_uri_take_port(parser, in);
    }
}

// Only the first '/' of the path does not belong to the name.
static int nbdi_uri_take_export(nbdi_uri_parser *parser, nbdi_uri_range in)
{
    size_t begin = parser->used;
    int error;
    if (in.start < in.end) in.start++;
    error = nbdi_uri_decode(parser, in, NBDI_URI_CONTROLS, &parser->uri->export_name);
    if (error) return error;
    if (parser->used - begin - 1 > NBDI_STRING_MAX) {
        return nbdi_uri_bad(parser, in.start, "export name longer than 4096 bytes");
    }
    return NBD_OK;
}

// Which parameter a key is, exactly; NBDI_URI_PARAMETERS if none.
static unsigned nbdi_uri_parameter_of(const char *key)
{
    unsigned i = 0;
    while (i < NBDI_URI_PARAMETERS && !nbdi_text_is(key, nbdi_uri_parameters[i].name))
        i++;
    return i;
}

static int nbdi_uri_take_value(nbdi_uri_parser *parser, unsigned which, nbdi_uri_range in)
{
    if (parser->value[which] != NULL) {
        return nbdi_uri_bad(parser, in.start, "the same parameter twice");
    }
    if (in.start >= in.end) return nbdi_uri_bad(parser, in.end, "parameter without a value");
    parser->value_at[which] = in.start;
    return nbdi_uri_decode(parser, in, nbdi_uri_parameters[which].holds, &parser->value[which]);
}

// The key is decoded to be compared.
static int nbdi_uri_take_parameter(nbdi_uri_parser *parser, nbdi_uri_range in)
{
    nbdi_uri_range key = in, value = in;
    const char *name = NULL;
    unsigned which;
    int error;
    key.end = nbdi_uri_find(parser, in, '=');
    value.start = key.end + (key.end < in.end);
    error = nbdi_uri_decode(parser, key, 0, &name);
    if (error) return error;
    which = nbdi_uri_parameter_of(name);
    if (which < NBDI_URI_PARAMETERS) return nbdi_uri_take_value(parser, which, value);
    if (parser->uri->unknown == NULL) parser->uri->unknown = name;
    return NBD_OK;
}

static int nbdi_uri_take_query(nbdi_uri_parser *parser, nbdi_uri_range rest)
{
    int error = NBD_OK;
    while (rest.start < rest.end && !error) {
        nbdi_uri_range one = rest;
        one.end = nbdi_uri_find(parser, rest, '&');
        if (one.end > one.start) error = nbdi_uri_take_parameter(parser, one);
        rest.start = one.end + (one.end < rest.end);
    }
    return error;
}

static int nbdi_uri_use_socket(nbdi_uri_parser *parser, size_t end)
{
    nbd_address *address = &parser->uri->address;
    const char *path = parser->value[NBDI_URI_SOCKET];
    size_t at = parser->value_at[NBDI_URI_SOCKET];
    if (address->kind != NBD_ADDRESS_UNIX) {
        return path == NULL ? NBD_OK : nbdi_uri_bad(parser, at, "socket= is for +unix only");
    }
    if (path == NULL) return nbdi_uri_bad(parser, end, "socket= is missing");
    address->path = path;
    if (path[0] != '\0') return NBD_OK;
    address->kind = NBD_ADDRESS_ABSTRACT;
    address->path = path + 1;
    return path[1] != '\0' ? NBD_OK : nbdi_uri_bad(parser, at, "empty abstract name");
}

static int nbdi_uri_use_tls_type(nbdi_uri_parser *parser)
{
    const char *type = parser->value[NBDI_URI_TLS_TYPE];
    if (type != NULL && !nbdi_text_is(type, "x509") && !nbdi_text_is(type, "psk") &&
        !nbdi_text_is(type, "anon")) {
        return nbdi_uri_bad(parser, parser->value_at[NBDI_URI_TLS_TYPE],
                            "tls-type is none of x509, psk, anon");
    }
    parser->uri->tls_type = type;
    return NBD_OK;
}

static int nbdi_uri_use_verify_peer(nbdi_uri_parser *parser)
{
    const char *verify = parser->value[NBDI_URI_TLS_VERIFY_PEER];
    if (verify == NULL || nbdi_text_is(verify, "1") || nbdi_text_is(verify, "true")) return NBD_OK;
    if (!nbdi_text_is(verify, "0") && !nbdi_text_is(verify, "false")) {
        return nbdi_uri_bad(parser, parser->value_at[NBDI_URI_TLS_VERIFY_PEER],
                            "tls-verify-peer is none of 0, 1, false, true");
    }
    parser->uri->tls_verify_peer = 0;
    return NBD_OK;
}

static int nbdi_uri_use_parameters(nbdi_uri_parser *parser, size_t end)
{
    int error = nbdi_uri_use_socket(parser, end);
    if (!error) error = nbdi_uri_use_tls_type(parser);
    if (!error) error = nbdi_uri_use_verify_peer(parser);
    parser->uri->tls_hostname = parser->value[NBDI_URI_TLS_HOSTNAME];
    parser->uri->tls_certificates = parser->value[NBDI_URI_TLS_CERTIFICATES];
    parser->uri->tls_psk_file = parser->value[NBDI_URI_TLS_PSK_FILE];
    return error;
}

static int nbdi_uri_take_all(nbdi_uri_parser *parser)
{
    nbdi_uri_range rest = {0, 0}, authority, path;
    int error = nbdi_uri_check_bytes(parser, &rest.end);
    if (!error) error = nbdi_uri_take_scheme(parser, &rest);
    if (error) return error;
    authority = path = rest;
    authority.end = path.start = nbdi_uri_find_either(parser, rest, '/', '?');
    path.end = rest.start = nbdi_uri_find(parser, rest, '?');
    if (rest.start < rest.end) rest.start++;
    error = nbdi_uri_take_authority(parser, authority);
    if (!error) error = nbdi_uri_take_export(parser, path);
    if (!error) error = nbdi_uri_take_query(parser, rest);
    return error ? error : nbdi_uri_use_parameters(parser, rest.end);
}

static void nbdi_uri_blank(nbd_uri *uri, const char *detail, size_t detail_at)
{
    memset(uri, 0, sizeof *uri);
    uri->tls_verify_peer = 1;
    uri->export_name = "";
    uri->detail = detail;
    uri->detail_at = detail_at;
}

// An error leaves no half of a URI that somebody might use.
int nbd_uri_parse(nbd_uri *uri, const char *text, char *memory, size_t memory_size)
{
    nbdi_uri_parser parser;
    int error;
    memset(&parser, 0, sizeof parser);
    parser.uri = uri;
    parser.text = text;
    parser.memory = memory;
    parser.size = memory_size;
    nbdi_uri_blank(uri, "", 0);
    error = nbdi_uri_take_all(&parser);
    if (error) nbdi_uri_blank(uri, uri->detail, uri->detail_at);
    return error;
}

#ifdef NBD_MBEDTLS

static int nbdi_tls_uri_is_psk(const nbd_uri *uri)
{
    if (uri->tls_type) return nbdi_text_is(uri->tls_type, "psk");
    return uri->tls_psk_file && !uri->tls_certificates;
}

static int nbdi_tls_uri_bad(nbd_uri *uri, int error, const char *detail)
{
    uri->detail = detail;
    return error;
}

// Puts "directory/name" at *memory and moves that behind it.
static const char *nbdi_tls_uri_file(char **memory, const char *directory, const char *name)
{
    size_t length = strlen(directory), name_size = strlen(name) + 1;
    char *start = *memory;
    memcpy(start, directory, length);
    start[length] = '/';
    memcpy(start + length + 1, name, name_size);
    *memory = start + length + 1 + name_size;
    return start;
}

int nbd_tls_uri(nbd_tls_options *options, nbd_uri *uri, char *memory, size_t memory_size)
{
    const char *directory = uri->tls_certificates;
    memset(options, 0, sizeof *options);
    if (uri->tls_type && nbdi_text_is(uri->tls_type, "anon")) {
        return nbdi_tls_uri_bad(uri, NBD_ERR_UNSUPPORTED,
                                NBDI_SAY("tls-type=anon is not supported"));
    }
    if (nbdi_tls_uri_is_psk(uri)) {
        options->psk_file = uri->tls_psk_file;
        options->user = uri->user;
        if (options->psk_file) return NBD_OK;
        return nbdi_tls_uri_bad(uri, NBD_ERR_URI, NBDI_SAY("tls-type=psk without tls-psk-file"));
    }
    options->no_verify = !uri->tls_verify_peer;
    if (!directory) return NBD_OK;
    if (memory_size < 48 || strlen(directory) > (memory_size - 48) / 3) {
        return nbdi_tls_uri_bad(uri, NBD_ERR_BUFFER, NBDI_SAY("tls-certificates is too long"));
    }
    options->certificate_optional = 1;
    if (!options->no_verify)
        options->ca_file = nbdi_tls_uri_file(&memory, directory, "ca-cert.pem");
    options->certificate_file = nbdi_tls_uri_file(&memory, directory, "client-cert.pem");
    options->key_file = nbdi_tls_uri_file(&memory, directory, "client-key.pem");
    return NBD_OK;
}

const char *nbd_tls_uri_name(const nbd_uri *uri)
{
    if (nbdi_tls_uri_is_psk(uri) || !uri->tls_verify_peer) return NULL;
    return uri->tls_hostname ? uri->tls_hostname : uri->address.host;
}

#endif // NBD_MBEDTLS

// Blocking calls.  They pull events until one ends the call and the client has nothing
// more to say: behind the DONE of a lost request waits CLOSED.

size_t nbd_escape(char *to, size_t room, const char *from, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    size_t i, at = 0;
    for (i = 0; i < size; i++) {
        unsigned byte = (unsigned char)from[i];
        int plain = byte >= 0x20 && byte <= 0x7e && byte != '\\';
        if (room - at <= (plain ? 1u : 4u)) break;
        if (!plain) {
            to[at++] = '\\';
            to[at++] = 'x';
            to[at++] = digits[byte >> 4];
        }
        to[at++] = plain ? (char)byte : digits[byte & 15u];
    }
    to[at] = '\0';
    return at;
}

typedef struct nbdi_sync_call {
    nbd_sync *sync;
    int left_ms;     // until the time-out; negative: no limit
    uint32_t awaits; // type of the event that ends the call
    uint64_t id;     // of the request, else 0
    uint32_t option; // the one that sync->message is about
    int over;
    int result;
    nbd_walk *walk; // that asks for block status
} nbdi_sync_call;

// Milliseconds.  Without a clock a MiB that moved counts as one, which is more than
// any link of such a machine carries: a server that never pauses still ends.
static uint64_t nbdi_sync_clock(const nbd_sync *sync)
{
#ifdef NBD_NO_SOCKETS
    const nbd_counters *moved = nbd_count(sync->client);
    return (moved->bytes_sent + moved->bytes_received) >> 20;
#else
    (void)sync;
    return nbdi_clock();
#endif
}

static void nbdi_sync_spend_since(nbdi_sync_call *call, uint64_t start)
{
    uint64_t now = nbdi_sync_clock(call->sync);
    if (now > start) nbdi_spend(&call->left_ms, now - start);
}

static void nbdi_sync_start(nbdi_sync_call *call, nbd_sync *sync)
{
    memset(call, 0, sizeof *call);
    call->sync = sync;
    call->left_ms = sync->timeout_ms > 0 ? sync->timeout_ms : -1;
}

// Whether a session is open and free for a call of its own.
static int nbdi_sync_begin(nbdi_sync_call *call, nbd_sync *sync)
{
    nbdi_sync_start(call, sync);
    if (sync->client == NULL || sync->transport == NULL) return NBD_ERR_STATE;
    return nbd_count(sync->client)->in_flight != 0 ? NBD_ERR_BUSY : NBD_OK;
}

static void nbdi_sync_hear(nbdi_sync_call *call, const nbd_event *event)
{
    nbd_escape(call->sync->message, sizeof call->sync->message, event->text, event->text_size);
    call->option = event->option;
}

static void nbdi_sync_finish(nbdi_sync_call *call, int result)
{
    if (call->over) return;
    call->over = 1;
    call->result = result;
}

// Whether a message about this option explains this end of the session.  Most options
// may be refused, and the handshake goes on.
static int nbdi_sync_explains(uint32_t option, int error)
{
    switch (option) {
    case 0: return 1;
    case NBD_OPTION_STARTTLS: return error == NBD_ERR_TLS;
    case NBD_OPTION_GO: return error <= NBD_REP_ERR_UNSUP;
    default: return 0;
    }
}

static void nbdi_sync_closed(nbdi_sync_call *call, const nbd_event *event)
{
    if (!nbdi_sync_explains(call->option, event->error)) call->sync->message[0] = '\0';
    if (event->error || call->awaits == NBD_EVENT_CLOSED) nbdi_sync_finish(call, event->error);
    nbdi_sync_finish(call, NBD_ERR_CLOSED);
}

// How far the steps have come.
static uint64_t nbdi_walk_at(const nbd_walk *walk)
{
    return walk->offset + walk->size;
}

// Counts what a context has in memory while a reply comes, later what of it is passed.
static uint64_t *nbdi_walk_count(const nbd_walk *walk, uint32_t context)
{
    return walk->memory + walk->contexts + context;
}

// The extents of a context in memory: where each ends, and its status flags.
static uint64_t *nbdi_walk_extent(const nbd_walk *walk, uint32_t context, uint64_t index)
{
    size_t before = walk->contexts + walk->room * context + (size_t)index;
    return walk->memory + 2 * before;
}

// Stores an extent, or makes the one before it longer.  One is dropped when there is no
// room: those behind it do not begin where the last stored one ends, so they are too.
static void nbdi_walk_take(nbd_walk *walk, const nbd_event *event)
{
    uint64_t *count = nbdi_walk_count(walk, event->context);
    uint64_t *last = *count > 0 ? nbdi_walk_extent(walk, event->context, *count - 1) : NULL;
    uint64_t end = event->offset + event->size;
    if (end <= nbdi_walk_at(walk)) return;
    if (last != NULL && last[0] == event->offset && last[1] == event->flags) {
        last[0] = end;
    } else if (*count < walk->room) {
        last = nbdi_walk_extent(walk, event->context, (*count)++);
        last[0] = end;
        last[1] = event->flags;
    } else {
        walk->dropped = 1;
    }
}

static void nbdi_sync_start_tls(nbdi_sync_call *call)
{
#ifndef NBD_NO_TLS
    nbd_sync *sync = call->sync;
    if (sync->tls && !sync->tls->wait) {
        nbdi_sync_finish(call, NBD_ERR_STATE);
        return;
    }
    if (sync->tls) {
        sync->transport = sync->tls;
        (void)nbd_starttls(sync->client, sync->tls); // it is due, and nbd_poll leaves no offer
        return;
    }
#endif
    nbdi_sync_finish(call, NBD_ERR_TLS);
}

// Options and TLS that the caller wants to drive are not for blocking calls.  Only a walk
// asks for extents.
static void nbdi_sync_event(nbdi_sync_call *call, const nbd_event *event)
{
    switch (event->type) {
    case NBD_EVENT_TEXT:
        if (event->text_kind == NBD_TEXT_MESSAGE) nbdi_sync_hear(call, event);
        break;
    case NBD_EVENT_EXTENT: nbdi_walk_take(call->walk, event); break;
    case NBD_EVENT_CLOSED: nbdi_sync_closed(call, event); break;
    case NBD_EVENT_STARTTLS: nbdi_sync_start_tls(call); break;
    case NBD_EVENT_OPTION: nbdi_sync_finish(call, NBD_ERR_STATE); break;
    default:
        if (event->type == call->awaits && event->id == call->id) {
            nbdi_sync_finish(call, event->error);
        }
    }
}

// Afterwards the client holds none of the caller's memory.
static int nbdi_sync_give_up(const nbdi_sync_call *call, int error)
{
    nbd_client *client = call->sync->client;
    nbd_event event;
    if (nbd_abandon(client) == NBD_OK) {
        while (nbd_next(client, &event))
            continue;
    }
    return error;
}

// Moves bytes and pulls events once.
static void nbdi_sync_turn(nbdi_sync_call *call, unsigned ready)
{
    nbd_client *client = call->sync->client;
    uint64_t start = nbdi_sync_clock(call->sync);
    nbd_event event;
    int error = nbd_poll(client, ready);
    if (error) nbdi_sync_finish(call, error);
    // Behind a success the rest waits for the next call: CLOSED tells nbd_sync_close why.
    while ((!call->over || call->result) && nbd_next(client, &event))
        nbdi_sync_event(call, &event);
    nbdi_sync_spend_since(call, start);
}

// Waits for what the client wants.  Returns what is ready, or an error.
static int nbdi_sync_wait(nbdi_sync_call *call)
{
    const nbd_transport *transport = call->sync->transport;
    unsigned wants = nbd_wants(call->sync->client);
    int ready;
    if (wants == 0) return NBD_ERR_STATE;
    if (call->left_ms == 0) return NBD_ERR_TIMEOUT;
    if (wants & NBD_WANT_NOW) return (int)(wants & ~NBD_WANT_NOW);
    ready = transport->wait(transport->context, wants, &call->left_ms);
    if (ready < 0) return NBD_ERR_TRANSPORT;
    return ready == 0 && call->left_ms == 0 ? NBD_ERR_TIMEOUT : ready;
}

// The first turn tries to write: what was just queued rarely has to wait.  A transport that
// shakes hands by itself may do so only in the hook that is asked for the greeting.
static int nbdi_sync_await(nbdi_sync_call *call, uint32_t awaits, uint64_t id)
{
    int ready = (int)(awaits == NBD_EVENT_READY ? NBD_WANT_READ | NBD_WANT_WRITE : NBD_WANT_WRITE);
    call->awaits = awaits;
    call->id = id;
    call->over = 0;
    for (;;) {
        nbdi_sync_turn(call, (unsigned)ready);
        if (call->over) return call->result;
        ready = nbdi_sync_wait(call);
        if (ready < 0) return nbdi_sync_give_up(call, ready);
    }
}

// A failure leaves the struct as it was before: the next attempt may follow.
static int nbdi_sync_shake(nbdi_sync_call *call, const nbd_transport *transport)
{
    nbd_sync *sync = call->sync;
    int error = transport->wait != NULL ? nbd_connect(sync->client, transport) : NBD_ERR_STATE;
    if (error) return error;
    sync->transport = transport;
    error = nbdi_sync_await(call, NBD_EVENT_READY, 0);
    if (!error) {
        sync->message[0] = '\0';
        return NBD_OK;
    }
    sync->transport = NULL;
    return nbdi_sync_give_up(call, error);
}

static int nbdi_sync_prepare(nbdi_sync_call *call, nbd_sync *sync)
{
    nbdi_sync_start(call, sync);
    sync->message[0] = '\0';
    return sync->client == NULL || sync->transport != NULL ? NBD_ERR_STATE : NBD_OK;
}

int nbd_sync_connect(nbd_sync *sync, const nbd_transport *transport)
{
    nbdi_sync_call call;
    int error = nbdi_sync_prepare(&call, sync);
    return error ? error : nbdi_sync_shake(&call, transport);
}

static void nbdi_sync_release(nbd_sync *sync)
{
#ifdef NBD_NO_SOCKETS
    (void)sync;
#else
    if (!sync->opened) return;
    sync->opened = 0;
    nbd_socket_close(sync->io.socket);
    sync->io.socket = NBD_SOCKET_NONE;
#endif
}

#if !defined(NBD_NO_SOCKETS) && !defined(NBD_NO_DIAL)

// Waits until the attempt under way may have got further.
static int nbdi_sync_wait_dial(nbdi_sync_call *call, nbd_socket socket)
{
    nbd_socket_io *io = &call->sync->io;
    int ready;
    if (call->left_ms == 0) return NBD_ERR_TIMEOUT;
    io->socket = socket;
    ready = nbdi_socket_wait(io, NBD_WANT_WRITE, &call->left_ms);
    if (ready < 0) return NBD_ERR_TRANSPORT;
    return ready == 0 && call->left_ms == 0 ? NBD_ERR_TIMEOUT : NBD_OK;
}

// The time-out is for all addresses together.
static int nbdi_sync_reach(nbdi_sync_call *call, const nbd_address *address, nbd_dial *dial)
{
    uint64_t start = nbdi_sync_clock(call->sync);
    int result = nbd_dial_start(dial, address);
    nbdi_sync_spend_since(call, start);
    while (result == 0) {
        result = nbdi_sync_wait_dial(call, dial->socket);
        if (!result) result = nbd_dial_step(dial);
    }
    if (result > 0) return NBD_OK;
    call->sync->os_error = result == NBD_ERR_TRANSPORT ? call->sync->io.os_error : dial->os_error;
    nbd_dial_stop(dial);
    return result;
}

// The transport is made last: a socket that was refused takes no more options on some systems.
static int nbdi_sync_dial(nbdi_sync_call *call, const nbd_address *address)
{
    nbd_sync *sync = call->sync;
    nbd_dial dial;
    int error;
    sync->os_error = 0;
    sync->message[0] = '\0';
    error = nbdi_sync_reach(call, address, &dial);
    if (!error) {
        sync->opened = 1;
        error = nbd_socket_init(&sync->io, dial.socket);
        sync->os_error = sync->io.os_error;
    }
    if (error) {
        nbdi_sync_release(sync);
        sync->io.socket = NBD_SOCKET_NONE;
    }
    return error;
}

int nbd_sync_dial(nbd_sync *sync, const nbd_address *address)
{
    nbdi_sync_call call;
    nbdi_sync_start(&call, sync);
    if (sync->opened || sync->transport != NULL) return NBD_ERR_STATE;
    return nbdi_sync_dial(&call, address);
}

int nbd_sync_open(nbd_sync *sync, const nbd_address *address)
{
    nbdi_sync_call call;
    int error = nbdi_sync_prepare(&call, sync);
    if (error || sync->opened) return NBD_ERR_STATE;
    error = nbdi_sync_dial(&call, address);
    if (!error) error = nbdi_sync_shake(&call, &sync->io.transport);
    if (error) nbdi_sync_release(sync);
    return error;
}

#endif

// Preferred blocks and not minimum blocks: a server may round up inside, and 2^32 - 1
// rounded up does not fit 32 bits any more.
uint64_t nbd_fit(const nbd_client *client, uint32_t command, uint64_t size)
{
    const nbd_export *got = nbd_negotiated(client);
    uint64_t most = UINT32_MAX, block;
    if (command == NBD_READ || command == NBD_WRITE || command == NBD_CACHE) {
        most = nbdi_min(got->maximum_payload, NBDI_DATA_MOST);
    } else if (got->protocol == NBD_PROTOCOL_EXTENDED) {
        most = UINT64_MAX;
    }
    block = got->preferred_block <= most ? got->preferred_block : got->minimum_block;
    return size <= most ? size : most & ~(block - 1);
}

// Refuses as a whole what nbd_issue would refuse in its last part only, when the others
// are done.
static int nbdi_sync_check_parts(const nbd_export *got, const nbd_op *op)
{
    if (op->offset > got->size || op->size > got->size - op->offset) return NBD_ERR_BOUNDS;
    if ((op->offset | op->size) & ((uint64_t)got->minimum_block - 1)) return NBD_ERR_BLOCK_SIZE;
    return NBD_OK;
}

static int nbdi_sync_one(nbdi_sync_call *call, const nbd_op *op)
{
    uint64_t id = 0;
    int error = nbd_issue(call->sync->client, op, &id);
    return error ? error : nbdi_sync_await(call, NBD_EVENT_DONE, id);
}

// Where there is memory its size came in a size_t.
static void nbdi_sync_advance(nbd_op *op)
{
    op->offset += op->size;
    if (op->buffer != NULL) op->buffer = (char *)op->buffer + (size_t)op->size;
    if (op->data != NULL) op->data = (const char *)op->data + (size_t)op->size;
}

static int nbdi_sync_parts(nbdi_sync_call *call, nbd_op *op)
{
    const nbd_client *client = call->sync->client;
    uint64_t left = op->size;
    int whole = nbd_fit(client, op->command, left) == left;
    int error = whole ? NBD_OK : nbdi_sync_check_parts(nbd_negotiated(client), op);
    while (left > 0 && !error) {
        op->size = nbd_fit(client, op->command, left);
        error = nbdi_sync_one(call, op);
        left -= op->size;
        nbdi_sync_advance(op);
    }
    return error;
}

static int nbdi_sync_command(nbd_sync *sync, nbd_op *op)
{
    nbdi_sync_call call;
    int error = nbdi_sync_begin(&call, sync);
    sync->message[0] = '\0';
    if (error) return error;
    return op->command == NBD_FLUSH ? nbdi_sync_one(&call, op) : nbdi_sync_parts(&call, op);
}

static int nbdi_sync_bare(nbd_sync *sync, uint32_t command, uint64_t size, uint64_t offset,
                          uint32_t flags)
{
    nbd_op op = NBD_ZERO;
    op.command = command;
    op.flags = flags;
    op.offset = offset;
    op.size = size;
    return nbdi_sync_command(sync, &op);
}

int nbd_sync_read(nbd_sync *sync, void *buffer, size_t size, uint64_t offset)
{
    nbd_op op = NBD_ZERO;
    op.command = NBD_READ;
    op.offset = offset;
    op.size = size;
    op.buffer = buffer;
    return nbdi_sync_command(sync, &op);
}

int nbd_sync_write(nbd_sync *sync, const void *data, size_t size, uint64_t offset, uint32_t flags)
{
    nbd_op op = NBD_ZERO;
    op.command = NBD_WRITE;
    op.flags = flags;
    op.offset = offset;
    op.size = size;
    op.data = data;
    return nbdi_sync_command(sync, &op);
}

int nbd_sync_flush(nbd_sync *sync)
{
    return nbdi_sync_bare(sync, NBD_FLUSH, 0, 0, 0);
}

int nbd_sync_trim(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags)
{
    return nbdi_sync_bare(sync, NBD_TRIM, size, offset, flags);
}

int nbd_sync_cache(nbd_sync *sync, uint64_t size, uint64_t offset)
{
    return nbdi_sync_bare(sync, NBD_CACHE, size, offset, 0);
}

int nbd_sync_write_zeroes(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags)
{
    return nbdi_sync_bare(sync, NBD_WRITE_ZEROES, size, offset, flags);
}

// A range being zeroed.
typedef struct nbdi_zeroing {
    nbd_op op;           // how the next piece is tried
    uint64_t left;       // bytes still to be zeroed
    uint64_t most;       // bytes of a piece
    const void *zeroes;  // NULL: never write
    uint64_t write_most; // bytes of zeroes that are used
} nbdi_zeroing;

static void nbdi_zero_by_writing(nbdi_zeroing *zeroing)
{
    zeroing->op.command = NBD_WRITE;
    zeroing->op.flags &= NBD_FUA;
    zeroing->op.data = zeroing->zeroes;
    zeroing->most = zeroing->write_most;
}

// Turns to the next way of zeroing: 0 if there is none.  A server that zeroes through a
// scratch buffer may refuse more than the maximum payload at once.
static int nbdi_zero_otherwise(nbdi_zeroing *zeroing, const nbd_client *client)
{
    uint64_t payload = nbd_fit(client, NBD_WRITE, zeroing->op.size);
    if (zeroing->op.command == NBD_WRITE) return 0;
    if (zeroing->op.flags & NBD_FAST_ZERO) {
        zeroing->op.flags &= ~(uint32_t)NBD_FAST_ZERO;
    } else if (zeroing->op.size > payload) {
        zeroing->most = payload;
    } else if (zeroing->zeroes != NULL) {
        nbdi_zero_by_writing(zeroing);
    } else {
        return 0;
    }
    return 1;
}

static int nbdi_zero_refused(int error)
{
    return error == NBD_ENOTSUP || error == NBD_EINVAL || error == NBD_EOVERFLOW;
}

// What a refusal said is no error of the call if another way works.
static int nbdi_zero_parts(nbdi_sync_call *call, nbdi_zeroing *zeroing)
{
    const nbd_client *client = call->sync->client;
    nbd_op *op = &zeroing->op;
    while (zeroing->left > 0) {
        uint64_t most = zeroing->left < zeroing->most ? zeroing->left : zeroing->most;
        int error;
        op->size = nbd_fit(client, op->command, most);
        error = nbdi_sync_one(call, op);
        if (!error) {
            zeroing->left -= op->size;
            op->offset += op->size;
        } else if (nbd_phase(client) == NBD_PHASE_IDLE) {
            return error; // the connection ended behind the refusal
        } else if (nbdi_zero_refused(error) && nbdi_zero_otherwise(zeroing, client)) {
            call->sync->message[0] = '\0';
        } else {
            return error;
        }
    }
    return NBD_OK;
}

// Without a buffer it is nbd_issue that says why WRITE_ZEROES is not allowed.
static void nbdi_zero_begin(nbdi_zeroing *zeroing, const nbd_client *client)
{
    nbd_op *op = &zeroing->op;
    op->command = NBD_WRITE_ZEROES;
    if (!nbd_allows(client, op->command, op->flags)) {
        op->flags &= ~(uint32_t)NBD_FAST_ZERO;
    }
    if (zeroing->zeroes != NULL && !nbd_allows(client, op->command, op->flags)) {
        nbdi_zero_by_writing(zeroing);
    }
}

int nbd_sync_zero(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags,
                  const void *zeroes, size_t zeroes_size)
{
    nbdi_sync_call call;
    nbdi_zeroing zeroing;
    const nbd_export *got;
    int error = nbdi_sync_begin(&call, sync);
    sync->message[0] = '\0';
    if (error) return error;
    got = nbd_negotiated(sync->client);
    memset(&zeroing, 0, sizeof zeroing);
    zeroing.op.flags = flags;
    zeroing.op.offset = offset;
    zeroing.op.size = zeroing.left = size;
    zeroing.most = UINT64_MAX;
    zeroing.zeroes = zeroes;
    zeroing.write_most = zeroes_size & ~((uint64_t)got->minimum_block - 1);
    if (flags & ~(uint32_t)(NBD_FUA | NBD_NO_HOLE | NBD_FAST_ZERO)) return NBD_ERR_ARG;
    if (zeroes != NULL && zeroing.write_most == 0) return NBD_ERR_BUFFER;
    error = nbdi_sync_check_parts(got, &zeroing.op);
    if (error) return error;
    nbdi_zero_begin(&zeroing, sync->client);
    return nbdi_zero_parts(&call, &zeroing);
}

// The message stays: it belongs to the call whose error led here.
static int nbdi_sync_end(nbd_sync *sync)
{
    nbdi_sync_call call;
    int error = nbdi_sync_begin(&call, sync);
    if (error || nbd_phase(sync->client) == NBD_PHASE_IDLE) return error;
    (void)nbd_disconnect(sync->client); // refused only where CLOSED is about to come anyway
    return nbdi_sync_await(&call, NBD_EVENT_CLOSED, 0);
}

// Requests of nbd_issue keep the session open; without a session there is nothing
// to end.
int nbd_sync_close(nbd_sync *sync)
{
    int error = sync->transport != NULL ? nbdi_sync_end(sync) : NBD_OK;
    if (error == NBD_ERR_BUSY) return error;
    sync->transport = NULL;
    nbdi_sync_release(sync);
    return error;
}

// The walker.  Each query fills the memory of every context with what follows the last
// step; then steps are cut out of it until one context has no more.  A query starts at
// a whole block, so it may tell once more of bytes that were passed.

int nbd_walk_start(nbd_walk *walk, nbd_sync *sync, uint64_t size, uint64_t offset, uint64_t *memory,
                   size_t memory_count)
{
    nbdi_sync_call call;
    const nbd_export *got;
    int error = nbdi_sync_begin(&call, sync);
    memset(walk, 0, sizeof *walk);
    if (error) return error;
    got = nbd_negotiated(sync->client);
    if (got->context_count == 0) return NBD_ERR_UNSUPPORTED;
    if (offset > got->size || size > got->size - offset) return NBD_ERR_BOUNDS;
    if (memory_count / got->context_count < 4) return NBD_ERR_BUFFER;
    walk->offset = walk->known = offset;
    walk->end = offset + size;
    walk->window = UINT64_MAX;
    walk->memory = memory;
    walk->flags = memory;
    walk->contexts = got->context_count;
    walk->room = memory_count / got->context_count / 2 - 1;
    walk->sync = sync;
    return NBD_OK;
}

static uint64_t nbdi_walk_round_down(uint64_t place, uint64_t block)
{
    return place & ~(block - 1);
}

// What to ask for: whole minimum blocks around the rest of the range, as far as the export
// has them.  Where `to` is rounded up it stays below `whole`.
static int nbdi_walk_aim(const nbd_walk *walk, nbd_op *op)
{
    const nbd_export *got = nbd_negotiated(walk->sync->client);
    uint64_t block = got->minimum_block, whole = nbdi_walk_round_down(got->size, block);
    uint64_t from = nbdi_walk_round_down(nbdi_walk_at(walk), block), to = walk->end;
    if (from >= whole) return NBD_ERR_BLOCK_SIZE;
    if (walk->window < to - from) to = from + walk->window;
    to = to > whole ? whole : nbdi_walk_round_down(to + block - 1, block);
    op->command = NBD_BLOCK_STATUS;
    op->offset = from;
    op->size = nbd_fit(walk->sync->client, NBD_BLOCK_STATUS, to - from);
    return NBD_OK;
}

// Where the context that was told the least of ends, but not behind the range.
static uint64_t nbdi_walk_reached(const nbd_walk *walk)
{
    uint64_t reached = walk->end;
    uint32_t i;
    for (i = 0; i < walk->contexts; i++) {
        uint64_t count = *nbdi_walk_count(walk, i);
        uint64_t end = count > 0 ? nbdi_walk_extent(walk, i, count - 1)[0] : 0;
        if (end < reached) reached = end;
    }
    return reached;
}

// The next query starts at a preferred block where that is progress too.
static uint64_t nbdi_walk_trim(const nbd_walk *walk, uint64_t reached)
{
    const nbd_export *got = nbd_negotiated(walk->sync->client);
    uint64_t block = nbdi_walk_round_down(reached, got->preferred_block);
    return reached < walk->end && block > nbdi_walk_at(walk) ? block : reached;
}

// Asks for as much as was of use the last time, if that was less than came: else a server
// with many extents would send most of them again and again.
static void nbdi_walk_pace(nbd_walk *walk, uint64_t used)
{
    if (walk->dropped) {
        walk->window = used;
    } else {
        walk->window = walk->window > UINT64_MAX / 2 ? UINT64_MAX : walk->window * 2;
    }
}

static void nbdi_walk_rewind(nbd_walk *walk)
{
    uint32_t i;
    for (i = 0; i < walk->contexts; i++) {
        *nbdi_walk_count(walk, i) = 0;
    }
}

static int nbdi_walk_ask(nbdi_sync_call *call, nbd_walk *walk)
{
    nbd_op op = NBD_ZERO;
    uint64_t reached;
    int error = nbdi_walk_aim(walk, &op);
    if (error) return error;
    nbdi_walk_rewind(walk);
    walk->dropped = 0;
    error = nbdi_sync_one(call, &op);
    if (error) return error;
    reached = nbdi_walk_reached(walk);
    if (reached <= nbdi_walk_at(walk)) return NBD_ERR_PROTOCOL;
    walk->known = nbdi_walk_trim(walk, reached);
    nbdi_walk_pace(walk, walk->known - op.offset);
    nbdi_walk_rewind(walk);
    return NBD_OK;
}

// The extent of a context that holds the next byte; it is in memory.
static const uint64_t *nbdi_walk_current(const nbd_walk *walk, uint32_t context)
{
    uint64_t *passed = nbdi_walk_count(walk, context);
    while (nbdi_walk_extent(walk, context, *passed)[0] <= nbdi_walk_at(walk)) {
        (*passed)++;
    }
    return nbdi_walk_extent(walk, context, *passed);
}

// Makes the step longer by the bytes in which no context changes: 0 if it is over.
static int nbdi_walk_join(nbd_walk *walk)
{
    uint64_t end = walk->known;
    uint32_t i;
    for (i = 0; i < walk->contexts; i++) {
        const uint64_t *extent = nbdi_walk_current(walk, i);
        if (walk->size > 0 && extent[1] != walk->flags[i]) return 0;
        if (walk->size == 0) walk->memory[i] = extent[1];
        if (extent[0] < end) end = extent[0];
    }
    walk->size = end - walk->offset;
    return 1;
}

// A session that was opened anew may have other contexts, and memory is split for these.
static int nbdi_walk_begin(nbdi_sync_call *call, nbd_walk *walk)
{
    int error;
    if (walk->sync == NULL) return NBD_ERR_STATE;
    error = nbdi_sync_begin(call, walk->sync);
    if (error) return error;
    walk->sync->message[0] = '\0';
    call->walk = walk;
    return nbd_negotiated(walk->sync->client)->context_count == walk->contexts ? NBD_OK
                                                                               : NBD_ERR_STATE;
}

int nbd_walk_next(nbd_walk *walk)
{
    nbdi_sync_call call;
    int error;
    walk->offset = nbdi_walk_at(walk);
    walk->size = 0;
    error = nbdi_walk_begin(&call, walk);
    while (!error && nbdi_walk_at(walk) < walk->end) {
        if (walk->known == nbdi_walk_at(walk)) error = nbdi_walk_ask(&call, walk);
        if (!error && !nbdi_walk_join(walk)) break;
    }
    return error;
}

#endif // NBD_NO_CONVENIENCE

#ifdef __cplusplus
}
#endif

#endif // NBD_IMPLEMENTATION

// LICENCE
//
// MIT No Attribution
//
// Copyright nbd.h contributors
//
// Permission is hereby granted, free of charge, to any person obtaining a copy of this
// software and associated documentation files (the "Software"), to deal in the Software
// without restriction, including without limitation the rights to use, copy, modify,
// merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
// permit persons to whom the Software is furnished to do so.
//
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED,
// INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A
// PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT
// HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
// CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE
// OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
