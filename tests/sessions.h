// Every session of the other programs in one list, and a transport that tampers with them:
// it fails calls, and it changes bytes of the server.
#ifndef SESSIONS_H
#define SESSIONS_H

#ifndef _WIN32
#include <sys/time.h>
#endif

#define SESSIONS_ONLY
#include "test_extended.c"
#include "test_handshake.c"
#include "test_options.c"
#include "test_reads.c"
#include "test_status.c"
#include "test_tls_seam.c"
#include "test_transfer.c"

typedef struct session_list {
    const session *sessions;
    size_t count;
} session_list;

static const session_list session_lists[] = {
    {handshake_sessions, HANDSHAKE_SESSIONS}, {option_sessions, OPTION_SESSIONS},
    {seam_sessions, SEAM_SESSIONS},           {transfer_sessions, TRANSFER_SESSIONS},
    {read_sessions, READ_SESSIONS},           {status_sessions, STATUS_SESSIONS},
    {extended_sessions, EXTENDED_SESSIONS},
};

enum { SESSION_LISTS = sizeof session_lists / sizeof session_lists[0] };

// Of this process's own time.  A case needs a few; under a slow checker all take long.
enum { SESSION_SECONDS = 60, SESSION_SECONDS_CHECKED = 1000 };

#ifdef _WIN32

// There is no clock of a process's own time: the limit of whoever runs the program holds.
static inline void watch(void)
{
}

#else

// A loop without end fails like a stray access.
static inline void hung(int number)
{
    static const char text[] = "FAIL a loop does not end in ";
    ssize_t ignored = write(STDOUT_FILENO, text, sizeof text - 1);

    ignored += write(STDOUT_FILENO, check.name, strlen(check.name));
    ignored += write(STDOUT_FILENO, "\n", 1);
    _exit(ignored > 0 && number > 0 ? 1 : 2);
}

static inline void watch(void)
{
    struct itimerval limit = {{0, 0}, {0, 0}};

    limit.it_value.tv_sec = check.every > 1 ? SESSION_SECONDS_CHECKED : SESSION_SECONDS;
    signal(SIGVTALRM, hung);
    CHECK_EQUAL(setitimer(ITIMER_VIRTUAL, &limit, NULL), 0);
}

#endif

// Runs a case for each session, under its name with a prefix.
static inline void every_session(const char *prefix, void (*run)(const void *of))
{
    size_t i, k;

    for (i = 0; i < SESSION_LISTS; i++) {
        for (k = 0; k < session_lists[i].count; k++) {
            const session *of = &session_lists[i].sessions[k];
            char name[160];

            snprintf(name, sizeof name, "%s%s", prefix, of->name);
            check_case_on(name, run, of);
        }
    }
}

/// What the sessions use ///

// Numbers of the protocol that stand in the messages of scripts, as bits.
typedef struct vocabulary {
    unsigned styles;   // oldstyle, newstyle, fixed newstyle
    unsigned options;  // the client's
    unsigned replies;  // to options: type, or 16 + number of the refusal
    unsigned infos;    // types of information
    unsigned commands; // in compact headers
    unsigned extended; // commands in extended headers
    unsigned flags;    // of commands
    unsigned kinds;    // simple success, simple error, structured, extended
    unsigned chunks;   // type, or 16 + number of the error type
    unsigned ends;     // text in an error, payload of BLOCK_STATUS, start of TLS
} vocabulary;

static inline void hear_option_reply(vocabulary *v, const unsigned char *p, size_t size)
{
    uint32_t type = checker_32(p + 12);

    v->replies |= type & CHECKER_REP_ERROR ? 1U << (16 + (type & 15)) : 1U << (type & 15);
    if (type == CHECKER_REP_INFO && size >= 22) v->infos |= 1U << (checker_16(p + 20) & 31);
}

static inline void hear_chunk(vocabulary *v, const unsigned char *p, size_t size, size_t head)
{
    uint16_t type = checker_16(p + 6);
    int error = (type & 0x8000) != 0;

    v->kinds |= head == 32 ? 8U : 4U;
    v->chunks |= error ? 1U << (16 + (type & 15)) : 1U << (type & 15);
    v->ends |= error && size >= head + 6 && checker_16(p + head + 4) > 0 ? 1U : 0U;
}

static inline void hear_server(vocabulary *v, const unsigned char *p, size_t size)
{
    if (size >= 18 && checker_32(p) == 0x4e42444d) {
        v->styles |= checker_32(p + 8) != 0x49484156 ? 1U : checker_16(p + 16) & 1 ? 4U : 2U;
    } else if (size >= 20 && checker_64(p) == UINT64_C(0x3e889045565a9)) {
        hear_option_reply(v, p, size);
    } else if (size >= 16 && checker_32(p) == 0x67446698) {
        v->kinds |= checker_32(p + 4) ? 2U : 1U;
    } else if (size >= 20 && checker_32(p) == 0x668e33ef) {
        hear_chunk(v, p, size, 20);
    } else if (size >= 32 && checker_32(p) == 0x6e8a278c) {
        hear_chunk(v, p, size, 32);
    }
}

static inline void hear_client(vocabulary *v, const unsigned char *p, size_t size)
{
    if (size >= 16 && checker_64(p) == CHECKER_OPTION_MAGIC) {
        v->options |= 1U << (checker_32(p + 8) & 31);
    } else if (size >= 28 && checker_32(p) == 0x25609513) {
        v->commands |= 1U << (checker_16(p + 6) & 31);
        v->flags |= checker_16(p + 4);
    } else if (size >= 32 && checker_32(p) == 0x21e41c71) {
        int long_form = (checker_16(p + 4) & CHECKER_PAYLOAD) != 0;

        v->extended |= 1U << (checker_16(p + 6) & 31);
        v->flags |= checker_16(p + 4);
        v->ends |= checker_16(p + 6) == CHECKER_STATUS && long_form ? 2U : 0U;
    }
}

static inline void hear_script(vocabulary *v, const script *s)
{
    size_t i;

    for (i = 0; i < s->step_count; i++) {
        const step *at = &s->steps[i];

        if (at->kind == STEP_SEND) hear_server(v, at->bytes, at->size);
        if (at->kind == STEP_WANT) hear_client(v, at->bytes, at->size);
        if (at->kind == STEP_SEAL) v->ends |= 4U;
    }
}

// All sessions, or those that `takes` says yes to.
static inline void hear_sessions(vocabulary *v, int (*takes)(const script *s))
{
    size_t i, k;

    for (i = 0; i < SESSION_LISTS; i++) {
        for (k = 0; k < session_lists[i].count; k++) {
            const script *s = session_script(&session_lists[i].sessions[k]);

            if (!takes || takes(s)) hear_script(v, s);
        }
    }
}

// Fails with what is missing.
static inline void check_whole_protocol(const vocabulary *v)
{
    CHECK_EQUAL(v->styles & 7U, 7);
    CHECK_EQUAL(v->options & 0xfeeU, 0xfee);
    CHECK_EQUAL(v->replies & 0x1eU, 0x1e);
    CHECK_EQUAL(v->replies >> 16 & 0x7feU, 0x7fe);
    CHECK_EQUAL(v->infos & 0xfU, 0xf);
    CHECK_EQUAL(v->commands & 0xffU, 0xff);
    CHECK_EQUAL(v->extended & 0xffU, 0xff);
    CHECK_EQUAL(v->flags & 0x3fU, 0x3f);
    CHECK_EQUAL(v->kinds, 0xf);
    CHECK_EQUAL(v->chunks & 0x67U, 0x67);
    CHECK_EQUAL(v->chunks >> 16 & 6U, 6);
    CHECK_EQUAL(v->ends, 7);
}

/// Memory ///

// What a receive hook is lent may hold anything behind the bytes that came.
static inline void scribble(const nbd_iovec *iov, unsigned count)
{
    unsigned i;

    for (i = 0; i < count; i++)
        memset(iov[i].base, UNTOUCHED, iov[i].size);
}

// Moves what is not parsed yet to the end of the buffer, where the guard page begins: one byte
// further is a crash.  The client itself moves it back before it receives again.
static inline void push_against_guard(nbd_client *c)
{
    uint8_t *buffer = (uint8_t *)c->config.buffer;
    uint32_t size = c->in_end - c->in_start, end = (uint32_t)c->config.buffer_size;

    if (c->in_offered || size == 0) return;
    memmove(buffer + end - size, buffer + c->in_start, size);
    memset(buffer + c->head_size, UNTOUCHED, end - c->head_size - size);
    c->in_start = end - size;
    c->in_end = end;
}

/// Opening ///

// As play_once does it up to nbd_connect, with transports that tamper: each has these hooks.
static inline void open_tampered(play *p, const script *s, const mode *how,
                                 const nbd_transport *hooks)
{
    nbd_config config = s->config;
    int i;

    play_reset(p, s, how);
    for (i = 0; i < 2; i++) {
        p->transports[i] = *hooks;
        p->transports[i].context = &p->wires[i];
    }
    if (!config.slot_count) config.slot_count = 4;
    config.slots = region_last(SCRIPT_REQUESTS + 1, config.slot_count * sizeof(nbd_slot));
    config.buffer = region_last(SCRIPT_REQUESTS, how->buffer);
    config.buffer_size = how->buffer;
    config.contexts = p->contexts;
    if (!config.context_count) config.context_count = 8;
    CHECK_EQUAL(nbd_init(&p->client, &config), 0);
}

#endif
