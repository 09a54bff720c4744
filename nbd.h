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
//   Convenience                   public: URIs, blocking calls
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
//         int error = nbd_uri_parse(&uri, argc > 1 ? argv[1] : "nbd://localhost", text, sizeof text);
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
//             fprintf(stderr, "hello: %s %s%s\n", nbd_strerror(error), sync.message, uri.detail);
//             return 1;
//         }
//         return fwrite(sector, 1, sizeof sector, stdout) != sizeof sector;
//     }
//
// THE LOOP (what a program does that has its own event loop)
//
//     nbd_connect(&client, &io.transport);
//     for (;;) {
//         nbd_poll(&client, ready);                 // moves bytes, both ways
//         while (nbd_next(&client, &event)) { ... } // hands out what happened
//         ... nbd_issue(&client, &op, &id) ...      // new commands, if any
//         wants = nbd_wants(&client);               // READ | WRITE | NOW, 0: over
//         ready = wait for READ and WRITE; with NOW look, but do not wait
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
//   - No call blocks but the nbd_sync_ ones and name resolution (nbd_dial_start).
//   - You, your memory and your hooks are trusted.  No byte from the server is:
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
//   NBD_NO_SOCKETS   leaves out the socket transport, dialling and nbd_sync_open
//   NBD_NO_DIAL      leaves out dialling and nbd_sync_open (getaddrinfo)
//   NBD_NO_CONVENIENCE  leaves out URIs and the nbd_sync_ calls
//   NBD_STATIC       makes every function static; implies NBD_IMPLEMENTATION
//   NBD_API          how public functions are declared, if you must
// Macros that matter only to the file with the implementation:
//   NBD_IOVECS       pieces that one nbd_poll sends in a call; 2 to 1024,
//                    default 128 with sockets and 16 without.  Stack: 16 bytes
//                    for each on a 64-bit machine, twice that with sockets.
//   NBD_POLL_BYTES   bytes that one nbd_poll moves each way; default 1 MiB
//   NBD_STAGE        bytes joined, on the stack, for a transport that takes one
//                    piece; default 512 with sockets and 128 without
//   NBD_SEND_FLAGS(flags)  maps the send hook's flags to those of send(2)
//   NBD_NO_TEXT      drops the texts of nbd_strerror and nbd_detail (all "")
//   NBD_ASSERT(x)    checks the library's own invariants; default: nothing

#define NBD_VERSION_MAJOR 0
#define NBD_VERSION_MINOR 1
#define NBD_VERSION_PATCH 0
#define NBD_VERSION (NBD_VERSION_MAJOR * 65536 + NBD_VERSION_MINOR * 256 + NBD_VERSION_PATCH)

#include <stddef.h>
#include <stdint.h>

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

// NBD_ZERO initialises any struct of this file: all members zero, NULL, off.
#ifdef __cplusplus
#define NBD_ZERO {}
extern "C" {
#else
#define NBD_ZERO {0}
#endif

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
#define NBD_ERRORS(X) \
    X(NBD_OK, 0, "success") \
    X(NBD_EPERM, 1, "operation not permitted (server)") \
    X(NBD_EIO, 5, "input/output error (server)") \
    X(NBD_ENOMEM, 12, "cannot allocate memory (server)") \
    X(NBD_EINVAL, 22, "invalid argument (server)") \
    X(NBD_ENOSPC, 28, "no space left on device (server)") \
    X(NBD_EOVERFLOW, 75, "value too large (server)") \
    X(NBD_ENOTSUP, 95, "operation not supported (server)") \
    X(NBD_ESHUTDOWN, 108, "server is shutting down") \
    /* Misuse or refusal on this side: nothing was done, nothing was sent. */ \
    X(NBD_ERR_ARG, -1, "argument out of range") \
    X(NBD_ERR_STATE, -2, "call not allowed in this state") \
    X(NBD_ERR_FULL, -3, "every request slot is taken") \
    X(NBD_ERR_ABI, -4, "compiled with other layout macros or another version than the implementation") \
    X(NBD_ERR_BUFFER, -5, "buffer smaller than NBD_BUFFER_MIN") \
    X(NBD_ERR_BOUNDS, -6, "request runs past the end of the export") \
    X(NBD_ERR_BLOCK_SIZE, -7, "offset or size is no multiple of the minimum block size") \
    X(NBD_ERR_READ_ONLY, -8, "export is read-only") \
    X(NBD_ERR_UNSUPPORTED, -9, "server does not offer this command or flag") \
    X(NBD_ERR_ZERO_SIZE, -10, "size is zero") \
    X(NBD_ERR_PAYLOAD, -11, "size exceeds the maximum payload or what the header can say") \
    X(NBD_ERR_NAME, -12, "name or query longer than 4096 bytes, or option too long") \
    X(NBD_ERR_BUSY, -13, "other requests are in flight") \
    /* The connection is over; every request in flight finishes with it. */ \
    X(NBD_ERR_CLOSED, -20, "server closed the connection") \
    X(NBD_ERR_TRUNCATED, -21, "server closed the connection in the middle of a message") \
    X(NBD_ERR_TRANSPORT, -22, "transport failed") \
    X(NBD_ERR_PROTOCOL, -23, "server broke the protocol") \
    X(NBD_ERR_NOT_NBD, -24, "not an NBD server") \
    X(NBD_ERR_OLDSTYLE, -25, "oldstyle server: no export names, no TLS") \
    X(NBD_ERR_TLS, -26, "TLS is required, but the server does not start it") \
    X(NBD_ERR_INJECTED, -27, "bytes in clear behind the start of TLS") \
    X(NBD_ERR_ABANDONED, -28, "connection abandoned by the caller") \
    /* One request fails, the connection lives. */ \
    X(NBD_ERR_GAP, -40, "server said success without sending every byte") \
    X(NBD_ERR_OVERLAP, -41, "server sent the same bytes twice") \
    X(NBD_ERR_FRAGMENTED, -42, "reply in more pieces than NBD_RANGES can prove") \
    /* Convenience and sockets. */ \
    X(NBD_ERR_URI, -60, "not a valid NBD URI") \
    X(NBD_ERR_RESOLVE, -61, "host name not found") \
    X(NBD_ERR_CONNECT, -62, "cannot connect") \
    X(NBD_ERR_TIMEOUT, -63, "timed out; the connection was abandoned") \
    X(NBD_ERR_SOCKET, -64, "socket cannot be used") \
    /* The server refused an option. */ \
    X(NBD_REP_ERR_UNSUP, -101, "option not supported by the server") \
    X(NBD_REP_ERR_POLICY, -102, "option forbidden by the server's policy") \
    X(NBD_REP_ERR_INVALID, -103, "option invalid for the server") \
    X(NBD_REP_ERR_PLATFORM, -104, "option not supported on the server's platform") \
    X(NBD_REP_ERR_TLS_REQD, -105, "server requires TLS") \
    X(NBD_REP_ERR_UNKNOWN, -106, "export not known to the server") \
    X(NBD_REP_ERR_SHUTDOWN, -107, "server is shutting down") \
    X(NBD_REP_ERR_BLOCK_SIZE_REQD, -108, "server requires that block sizes be asked for") \
    X(NBD_REP_ERR_TOO_BIG, -109, "option too big for the server") \
    X(NBD_REP_ERR_EXT_HEADER_REQD, -110, "server requires extended headers") \
    X(NBD_REP_ERR_OTHER, -111, "server refused the option for a reason unknown here")

#define NBDI_ENUM(name, value, text) name = value,
enum nbd_error { NBD_ERRORS(NBDI_ENUM) NBDI_ERROR_END = -1000 };

// A constant English text for any error of the list, never NULL; "unknown
// error" for other numbers; "" with NBD_NO_TEXT.
NBD_API const char *nbd_strerror(int error);

/// Transport ///
//
// A transport moves bytes for nbd_poll: five members that you fill in.  A
// socket (below) is one; a UART, a TLS session, a pipe are others.  Both hooks
// are called from nbd_poll only, must not block, and must not call this client.
// No piece that they are given is empty.

// One piece of memory.  `size` is in bytes and may be 0.
typedef struct nbd_iovec {
    void *base;
    size_t size;
} nbd_iovec;

// What a hook returns besides the number of bytes it moved (1 or more).
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
#define NBD_SHORT_IS_DRY 0x1u // a receive shorter than asked found all there was
#define NBD_ONE_PIECE 0x2u    // the hooks take one piece: `count` is then 1 for
                              // send, which joins small ones in a copy, and
                              // recv looks at the first only

typedef struct nbd_transport {
    uint32_t flags;
    void *context; // passed to each hook

    // Sends a part of the pieces, in order.  `iov` is held for this call.
    ptrdiff_t (*send)(void *context, const nbd_iovec *iov, unsigned count, unsigned flags);

    // Receives into the pieces, in order.  `iov` is held for this call.
    ptrdiff_t (*recv)(void *context, const nbd_iovec *iov, unsigned count);

    // NULL, or: waits until one of `wants` (NBD_WANT_READ, NBD_WANT_WRITE) is
    // ready or *timeout_ms has passed, and takes the time that passed off
    // *timeout_ms; a negative *timeout_ms waits for ever and stays.  Returns
    // what is ready, 0 at the time-out, NBD_IO_ERROR.  Only nbd_sync_ calls it.
    int (*wait)(void *context, unsigned wants, int *timeout_ms);
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
    NBD_BLOCK_STATUS  // NBD_CMD_BLOCK_STATUS
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
    void *buffer;         // READ: where to
    const void *data;     // WRITE: where from
    const nbd_iovec *iov; // READ and WRITE: the same in pieces that sum up to
                          // `size`; `buffer` and `data` are NULL then.  A
                          // WRITE does not change what they point to.
    uint32_t iov_count;   // pieces
    void *user;           // comes back in every event of this request
} nbd_op;

enum nbd_event_type {
    NBD_EVENT_NONE = 0,
    NBD_EVENT_READY,    // commands may be issued; see nbd_negotiated
    NBD_EVENT_DONE,     // a request finished: id, user, command, offset, size,
                        // error, server_error, error_offset.  Its slot is free.
    NBD_EVENT_HOLE,     // a hole in a read with NBD_SPARSE: id, user, offset, size
    NBD_EVENT_EXTENT,   // one extent: id, user, context, offset, size, flags.
                        // Those of a context follow each other without gap
                        // from the request's offset on; none is empty; the last
                        // may reach behind the request (not with NBD_REQ_ONE)
                        // and, if the server says so, behind the export.  DONE
                        // with success: each context had at least one.
    NBD_EVENT_TEXT,     // a text of the server: text_kind, text, text_size,
                        // text_length; for a request id and user, else option
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

// What nbd_next hands out.  Members that the type does not name are zero.
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

// What was negotiated.  Valid from READY on, and after each successful INFO.
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
    uint64_t staged;        // copies made for a transport with NBD_ONE_PIECE
    uint32_t in_flight;     // requests issued and not yet pulled as DONE
    uint32_t in_flight_max; // the most there have been since nbd_init
} nbd_counters;

// One request.  All of it is private; give an array of them to nbd_init.
typedef struct nbd_slot {
    uint64_t id; // Private from here on
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
    int16_t error;
    uint16_t next;
    uint8_t command;
    uint8_t flags;
    uint8_t state;
    uint8_t range_count;
    uint32_t range[NBD_RANGES][2];
} nbd_slot;

// A metadata context that the server agreed to; memory for nbd_config.contexts.
typedef struct nbd_context {
    uint32_t id; // the server's number
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
// OPTION event with option 0 instead of automatic options.
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

// Sizes for nbd_config.buffer, usable as array bounds.  A header area for
// queued commands takes min(32 * slots, a quarter) of it; the rest reads ahead.
#define NBD_BUFFER_MIN 256       // works; texts are cut to 192 bytes
#define NBD_BUFFER_NAMES 5464    // holds the longest legal name (4096) whole
#define NBD_BUFFER_GOOD 65536    // what the speed figures were measured with
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
    // Bits of the server's handshake flags to overlook, for testing servers:
    // 1 NBD_FLAG_FIXED_NEWSTYLE, 2 NBD_FLAG_NO_ZEROES.
    uint32_t handshake_hide;
} nbd_config;

// One option for nbd_negotiate.  It is copied; name, queries and data are held
// until finished.
typedef struct nbd_option {
    uint32_t option;  // NBD_OPTION_..., or any number with `data`
    uint32_t query_count;
    const char *name; // export, for those options that name one; NULL is ""
    const char *const *queries; // metadata queries, NUL-terminated
    const void *data;           // NULL, or the whole payload, sent as it is
    uint32_t data_size;         // bytes
} nbd_option;

// A place in the memory of a request; private.
typedef struct nbdi_cursor {
    uint32_t index; // Private
    size_t skip;
} nbdi_cursor;

// The client.  All of it is private; see nbd_negotiated, nbd_count, nbd_detail.
typedef struct nbd_client {
    // Private from here on.  Set by nbd_init:
    uint32_t config_flags;
    uint32_t buffer_size;
    uint8_t *buffer;
    nbd_slot *slots;
    nbd_context *contexts;
    const char *export_name;
    const char *const *queries;
    uint32_t query_count;
    uint32_t head_size; // bytes of the header area
    uint16_t slot_count;
    uint16_t context_room;
    uint8_t handshake_hide;
    // The session:
    uint8_t state;           // enum nbdi_state
    uint8_t transmission;    // 1 once the options are over
    uint8_t closing;         // 1 once no new command is taken
    uint8_t fresh;           // 1 if nbd_next may have something
    uint8_t handshake_flags; // the server's, as far as they count
    int16_t error;           // first error of the connection
    const char *detail;
    const nbd_transport *transport;
    nbd_export got;
    nbd_counters counters;
    uint64_t serial; // of the last request; makes cookies unique
    // Options:
    nbd_option option;        // under way if option_due
    const char *context_name; // export of the last SET_META_CONTEXT
    uint32_t piece;           // first piece not yet sent whole
    uint32_t piece_fill;      // first piece not yet in the header area
    uint32_t found;           // metadata contexts told so far; or the one being told
    uint8_t automatic;        // next step of the automatic order
    uint8_t option_due;
    uint8_t flags_due; // 1 once the client flags may be sent
    uint8_t export_seen;
    // Sending:
    uint8_t out_blocked; // NBD_WANT_ bit that the transport asked for, or 0
    uint8_t out_failed;
    uint8_t disc; // NBDI_DISC_..., or 0
    // Receiving:
    uint8_t in_blocked; // as out_blocked
    uint8_t in_over;    // NBDI_IN_..., or 0
    uint8_t drop;       // the payload being received is not wanted
    uint8_t text_kind;
    uint8_t after; // state behind TEXT and SKIP
    uint32_t head_sent;
    uint32_t head_fill;
    uint64_t out_done;    // bytes of the first request or piece that are sent
    uint64_t out_offered; // bytes
    nbdi_cursor out_cursor;
    uint16_t first;  // slot: head of the send queue
    uint16_t unsent; // slot: first without an encoded header
    uint16_t last;   // slot: tail of the send queue
    uint16_t free;   // slot: head of the free list
    uint16_t done;   // slot: head of the list of finished requests
    uint16_t scan;   // slots below it have finished on a dead connection
    uint16_t reply_slot;
    uint16_t reply_flags;
    uint16_t reply_type;
    uint32_t reply_error;  // as sent
    uint32_t reply_length; // of the option reply or error chunk
    uint32_t text_left;    // bytes of the text and what is to be skipped behind it
    uint32_t text_length;
    uint32_t in_start;
    uint32_t in_end;
    uint32_t direct;     // bytes of payload memory on offer
    uint64_t in_offered; // bytes
    uint64_t left;       // bytes of the chunk still to come
    uint64_t place;      // where they belong: in the request; EXTENT: in the export
    nbdi_cursor in_cursor;
} nbd_client;

/// Session ///

// Prepares a client.  Every field is set; nothing is sent.  Also resets a
// client in any state: requests in flight are then forgotten without events.
// client: until its last use.  config: this call; what it points to: life of
// the client.
// Errors: NBD_ERR_ARG (NULL, slot_count, context_count out of range),
// NBD_ERR_BUFFER, NBD_ERR_NAME, NBD_ERR_ABI.
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
// (unknown command, flag not valid for it, memory missing, pieces that do not
// sum up), NBD_ERR_READ_ONLY, NBD_ERR_UNSUPPORTED, NBD_ERR_ZERO_SIZE,
// NBD_ERR_PAYLOAD (READ, WRITE: above maximum_payload; the rest: above 2^32 - 1
// without extended headers), NBD_ERR_BOUNDS, NBD_ERR_BLOCK_SIZE, NBD_ERR_FULL.
// Chapters "Request message", "Size constraints".
NBD_API int nbd_issue(nbd_client *client, const nbd_op *op, uint64_t *id);

// Whether this server offers this command with these flags: 1 or 0; 0 before
// READY.  It looks neither at sizes, slots nor NBD_UNCHECKED_ flags.
// Chapter "Transmission flags".
NBD_API int nbd_allows(const nbd_client *client, uint32_t command, uint32_t flags);

// Events that a program waits for, and what nbd_wants answers.
#define NBD_WANT_READ 0x1u
#define NBD_WANT_WRITE 0x2u
#define NBD_WANT_NOW 0x4u

// Moves bytes both ways until the transport would block or NBD_POLL_BYTES have
// moved, then returns.  Calls nothing but the two hooks; parses nothing.
//
// `ready` holds the NBD_WANT_READ and NBD_WANT_WRITE that arrived, 0 for none; an
// error or hang-up that poll(2) reports counts as both.  A bit too many costs a
// call that finds nothing; a bit too few costs a delay.  A direction that was not
// blocked is tried in any case, so nbd_poll(client, 0) right after nbd_issue sends.
//
// Returns 0, also if the connection has failed (nbd_next tells);
// NBD_ERR_STATE without a transport, or before nbd_connect.
NBD_API int nbd_poll(nbd_client *client, unsigned ready);

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
// a stream that has no end (a UART) NBD_CMD_DISC is out when nbd_wants says neither
// WRITE nor NOW; call nbd_abandon then.
// A server that says NBD_ESHUTDOWN causes the same by itself; CLOSED then
// carries NBD_ESHUTDOWN.
// Errors: NBD_ERR_STATE (not connected, or over).
// Chapter "Terminating the transmission phase".
NBD_API int nbd_disconnect(nbd_client *client);

// Ends the session at once: every request in flight finishes with
// NBD_ERR_ABANDONED (one per nbd_next), then CLOSED comes.  The transport is not
// touched: close it yourself.  With "Own I/O" memory that is on offer must first
// be given back (nbd_sent, nbd_received); until then nbd_next hands out nothing.
// Errors: NBD_ERR_STATE (not connected, or over).
NBD_API int nbd_abandon(nbd_client *client);

// What was negotiated, and the counters.  Valid for the life of the client.
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
NBD_API int nbd_phase(const nbd_client *client);

// A constant text naming the rule that the server broke, or ""; never NULL.
NBD_API const char *nbd_detail(const nbd_client *client);

/// Options ///
//
// For tools that list exports or choose contexts.  With NBD_NEGOTIATE the
// handshake stops after the greeting with an OPTION event (option 0).  From
// then on each nbd_negotiate is followed by its TEXT events and one OPTION
// event.  A refused option leaves the session usable (but NBD_REP_ERR_SHUTDOWN
// ends it).  Success of GO and EXPORT_NAME is READY instead of OPTION, that of
// STARTTLS is the STARTTLS event.

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

// Sends an option.  LIST gives EXPORT and DESCRIPTION texts; INFO and GO give
// NAME and DESCRIPTION and fill nbd_negotiated; the two META options give
// CONTEXT texts; a refusal may give a MESSAGE.
// option: this call; what it points to: until finished; the name of
// SET_META_CONTEXT until READY (contexts count only for the export they were for).
// Errors: NBD_ERR_STATE (no NBD_NEGOTIATE, greeting not over, another option
// under way, STARTTLS twice, ABORT: use nbd_disconnect), NBD_ERR_UNSUPPORTED (server
// is not fixed newstyle; EXPORT_NAME after extended headers), NBD_ERR_TLS (NBD_TLS_REQUIRE, and it is not STARTTLS),
// NBD_ERR_NAME, NBD_ERR_ARG (queries or data missing).
// Chapter "Option types".
NBD_API int nbd_negotiate(nbd_client *client, const nbd_option *option);

// After a STARTTLS event: run the TLS handshake on your stream, then hand over
// the transport that encrypts (NULL with "Own I/O").  All that the server said
// in clear is forgotten, and the options go on from the start.
// transport: held for the life of the client.
// Errors: NBD_ERR_STATE (no STARTTLS event is due, memory is on offer).
// Chapter "TLS support".
NBD_API int nbd_starttls(nbd_client *client, const nbd_transport *transport);

/// Own I/O ///
//
// The two pairs of calls that nbd_poll itself is made of, for programs that
// move bytes in another way: io_uring, DMA, lwIP callbacks, a UART interrupt.
// Both directions are independent.  What is on offer stays valid and unmoved
// until it is acknowledged; nbd_next may be called in between.  No piece is empty.
// (io_uring wants a blocking socket: clear O_NONBLOCK on one that was dialled.)

// What to send next: fills at most `count` (1 or more) pieces, returns how many,
// 0 for nothing to send.  *flags gets NBD_SEND_MORE or 0.  Asked again before
// nbd_sent it gives the same bytes in the same order, with more only behind them.
// iov: this call.  The memory it names: until nbd_sent.
NBD_API unsigned nbd_outgoing(nbd_client *client, nbd_iovec *iov, unsigned count, unsigned *flags);

// Ends the offer of nbd_outgoing: `result` bytes of it went out (1 or more); or
// 0, NBD_IO_READ, NBD_IO_WRITE: blocked, for nbd_wants; or NBD_IO_ERROR.
// Errors: NBD_ERR_STATE (nothing is on offer), NBD_ERR_ARG (more bytes than
// pending).
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
enum nbd_address_kind { NBD_ADDRESS_TCP, NBD_ADDRESS_UNIX, NBD_ADDRESS_ABSTRACT, NBD_ADDRESS_VSOCK };

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
// algorithm would only delay the last packet.
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
// Errors: NBD_ERR_RESOLVE, NBD_ERR_CONNECT (no attempt could be started),
// NBD_ERR_ARG (path too long, member missing), NBD_ERR_UNSUPPORTED (this
// platform has no such sockets).  After an error nothing is left open.
NBD_API int nbd_dial_start(nbd_dial *dial, const nbd_address *address);

// Goes on connecting without blocking; each address of a name is tried in turn.
// Call it when dial->socket is writable, or has failed.  An attempt that hangs is
// given up with nbd_dial_next.
// Returns 1: connected; dial->socket is now yours, non-blocking, with TCP_NODELAY
// on TCP.  0: wait until dial->socket is writable, then call again; it may be
// another socket than before, under the same number too.
// Errors: NBD_ERR_CONNECT (no address is left; dial->os_error is the last
// attempt's).  After 1 or an error nothing else is left open.
NBD_API int nbd_dial_step(nbd_dial *dial);

// Gives up the attempt under way and starts the next address.  Returns and
// errors: as nbd_dial_step.
NBD_API int nbd_dial_next(nbd_dial *dial);

// Gives up: closes what nbd_dial_start and nbd_dial_step opened.  Harmless after
// their end, but then dial->socket is yours and stays open.
NBD_API void nbd_dial_stop(nbd_dial *dial);

#endif // NBD_NO_DIAL
#endif // NBD_NO_SOCKETS

/// Convenience ///

#ifndef NBD_NO_CONVENIENCE

// What an NBD URI says.  Strings are NUL-terminated and lie in the memory that
// nbd_uri_parse was given; NULL: not in the URI.
typedef struct nbd_uri {
    uint32_t config_flags;   // for nbd_config.flags: NBD_TLS_REQUIRE for nbds
    int tls_verify_peer;     // 1 unless tls-verify-peer is 0 or false
    nbd_address address;
    const char *export_name; // never NULL
    const char *user;        // user name in front of the host
    const char *tls_type;    // "x509", "psk" or "anon"
    const char *tls_hostname;
    const char *tls_certificates;
    const char *tls_psk_file;
    const char *unknown;     // the first query parameter that is not known: warn
    const char *detail;      // constant text: which rule was broken, or ""
    size_t detail_at;        // where in the text, in bytes
} nbd_uri;

// Takes apart nbd://, nbds://, nbd+unix://, nbds+unix://, nbd+vsock://,
// nbds+vsock:// URIs.  Opens and starts nothing.  Percent-escapes are decoded.
// An abstract Unix name is ?socket=%00name.  Parameters: socket, tls-type,
// tls-hostname, tls-verify-peer, tls-certificates, tls-psk-file; a repeated one is
// an error, another one is left to you in `unknown`.
// uri: filled in every case.  text: this call.  memory: as long as `uri` is used;
// strlen(text) + 8 bytes always suffice.
// Errors: NBD_ERR_URI (uri->detail and detail_at tell where and why),
// NBD_ERR_BUFFER (memory too small).
NBD_API int nbd_uri_parse(nbd_uri *uri, const char *text, char *memory, size_t memory_size);

// Blocking calls for small tools.  They drive `client` to the end of one command;
// one struct, one client.  Zero it, then set timeout_ms and client.
//
// Each call gives up when timeout_ms have passed in it: since the buffer may still
// be in use by then it abandons the connection and returns NBD_ERR_TIMEOUT.  All
// of them return NBD_ERR_BUSY while requests of nbd_issue are in flight,
// NBD_ERR_STATE before nbd_sync_open or nbd_sync_connect or if the transport has
// no wait hook, any error of the connection, of nbd_issue and of the server.
typedef struct nbd_sync {
    int timeout_ms;     // for each call; 0: no limit
    int os_error;       // errno, WSAGetLastError or EAI_... of dialling, if any
    nbd_client *client; // prepared by nbd_init
    // The server's words for the last error, cut, NUL-terminated, with control
    // characters and bytes that are not ASCII replaced by '?'; "" if it said
    // nothing.
    char message[256];
    const nbd_transport *transport; // Private from here on
#ifndef NBD_NO_SOCKETS
    nbd_socket_io io;
    int opened;
#endif
} nbd_sync;

#if !defined(NBD_NO_SOCKETS) && !defined(NBD_NO_DIAL)
// Dials and shakes hands until READY.  nbd_sync_close closes the socket again.  (To
// mix these calls with nbd_issue make the transport yourself: nbd_sync_connect.)
// address: this call.  sync: until nbd_sync_close.
// Errors besides the above: those of nbd_dial_start and nbd_dial_step.
NBD_API int nbd_sync_open(nbd_sync *sync, const nbd_address *address);
#endif

// Shakes hands until READY on a transport that you made.
// transport: life of the client.
NBD_API int nbd_sync_connect(nbd_sync *sync, const nbd_transport *transport);

// One command each, `offset` and `size` in bytes, `flags` as in nbd_op.  What exceeds
// the maximum payload or 32 bits is split; the first error ends the call.  A size
// of 0 succeeds at once.  Memory: this call.
NBD_API int nbd_sync_read(nbd_sync *sync, void *buffer, size_t size, uint64_t offset);
NBD_API int nbd_sync_flush(nbd_sync *sync);
// (The one whose memory is not written to.)
NBD_API int nbd_sync_write(nbd_sync *sync, const void *data, size_t size, uint64_t offset,
                           uint32_t flags);
// (Those without memory.)
NBD_API int nbd_sync_trim(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags);
NBD_API int nbd_sync_cache(nbd_sync *sync, uint64_t size, uint64_t offset);
NBD_API int nbd_sync_write_zeroes(nbd_sync *sync, uint64_t size, uint64_t offset, uint32_t flags);

// Disconnects, waits for the end, closes what nbd_sync_open opened.  Call it in
// every case, after errors too; harmless on a zeroed struct, and twice.
// Returns 0, or the error that the session ended with.
NBD_API int nbd_sync_close(nbd_sync *sync);

#endif // NBD_NO_CONVENIENCE

#ifdef __cplusplus
}
#endif

#endif // NBD_H
