// Every call of a transport failed in turn: it would block, moves less than asked, fails, or
// finds the end of the stream; then two of them.  What only delays must change no event; what
// ends the connection must finish every request once, with the error that is documented for it,
// and leave no byte in a failed read that the server did not send.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "sessions.h"

enum {
    FAULT_BYTES = 4096, // of the server: longer sessions are not cut in small pieces
    FAULT_PAIRS = 60,   // for each session and mode
    FAULT_STUBBORN = 5, // calls that a direction stays blocked for
    NO_CALL = 1 << 30
};

static const mode small_mode = {"17 bytes", 17, 0, 0, 0, NBD_BUFFER_MIN, 0, uncut, NBD_IO_EOF};
static const mode piece_mode = {"one piece", 61, 0, 1, 0, NBD_BUFFER_MIN, 0, uncut, NBD_IO_EOF};

/// Faults ///

enum fault_kind {
    BLOCKS_FOR_READING,
    BLOCKS_FOR_WRITING,
    BLOCKS_LONG,
    MOVES_ONE_BYTE,
    MOVES_HALF,
    MOVES_ALL_BUT_ONE,
    MOVES_NOTHING, // sending: counts as blocked; receiving: the end of the stream
    FAILS,
    FAILS_ODDLY, // with a number that means nothing
    BLOCKS_THEN_FAILS,
    FAULT_KINDS
};

static const char *const fault_names[] = {
    "blocks for reading", "blocks for writing", "blocks long",   "moves one byte",
    "moves half",         "moves all but one",  "moves nothing", "fails",
    "fails oddly",        "blocks, then fails"};

typedef struct fault {
    int call; // its number in the session
    enum fault_kind kind;
} fault;

static struct {
    fault planned[2];
    int calls;
    int stubborn;    // calls that are still to block
    int then_fails;  // and what comes behind them
    unsigned ready;  // what the loop finds ready whatever the stream says
    int send_failed; // nothing may be sent any more
    int struck;      // faults that happened
} faults;

static unsigned long benign_runs, fatal_runs, finish_faults, wait_faults;

static const fault *fault_now(void)
{
    int i, call = faults.calls++;

    for (i = 0; i < 2; i++) {
        if (faults.planned[i].call != call) continue;
        faults.struck++;
        return &faults.planned[i];
    }
    return NULL;
}

static ptrdiff_t block(int for_reading)
{
    faults.ready |= for_reading ? NBD_WANT_READ : NBD_WANT_WRITE;
    return for_reading ? NBD_IO_READ : NBD_IO_WRITE;
}

static ptrdiff_t block_again(int for_reading, int then_fails)
{
    faults.stubborn = FAULT_STUBBORN;
    faults.then_fails = then_fails;
    return block(for_reading);
}

// How many bytes a call may move; 0: the kind is another one.
static size_t short_size(enum fault_kind kind, size_t asked)
{
    switch (kind) {
    case MOVES_ONE_BYTE: return 1;
    case MOVES_HALF: return (asked + 1) / 2;
    case MOVES_ALL_BUT_ONE: return asked > 1 ? asked - 1 : 1;
    default: return 0;
    }
}

// Nothing of the stream counts any more but what the server sent so far.
static void break_stream(play *p, size_t at, ptrdiff_t ended)
{
    p->mode.cut_at = at;
    p->mode.ended = ended;
}

static ptrdiff_t fail_send(play *p, ptrdiff_t result)
{
    break_stream(p, p->out_size, NBD_IO_ERROR);
    p->clean_end = p->farewell;
    p->ended = 1;
    p->moved = 1;
    faults.send_failed = 1;
    return result;
}

static ptrdiff_t fail_recv(play *p, ptrdiff_t result)
{
    break_stream(p, p->out_taken, result == NBD_IO_EOF ? NBD_IO_EOF : NBD_IO_ERROR);
    tell_the_end(p);
    return result;
}

static ptrdiff_t send_less(void *context, const nbd_iovec *iov, unsigned count, unsigned flags,
                           size_t most)
{
    play *p = ((const wire *)context)->play;
    size_t usual = p->mode.piece;
    ptrdiff_t moved;

    p->mode.piece = smaller(most, usual);
    moved = play_send(context, iov, count, flags);
    p->mode.piece = usual;
    return moved;
}

static ptrdiff_t recv_less(void *context, const nbd_iovec *iov, unsigned count, size_t most)
{
    play *p = ((const wire *)context)->play;
    size_t usual = p->mode.piece;
    ptrdiff_t moved;

    p->mode.piece = smaller(most, usual);
    moved = play_recv(context, iov, count);
    p->mode.piece = usual;
    return moved;
}

static ptrdiff_t faulty_send(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    play *p = ((const wire *)context)->play;
    const fault *f = fault_now();
    size_t asked = iov_sum(iov, count);

    CHECK(!faults.send_failed);
    if (faults.stubborn > 0) {
        faults.stubborn--;
        return faults.stubborn == 0 && faults.then_fails ? fail_send(p, NBD_IO_ERROR) : block(0);
    }
    if (!f) return play_send(context, iov, count, flags);
    if (short_size(f->kind, asked)) {
        return send_less(context, iov, count, flags, short_size(f->kind, asked));
    }
    switch (f->kind) {
    case BLOCKS_FOR_READING: return block(1);
    case BLOCKS_LONG:
    case BLOCKS_THEN_FAILS: return block_again(0, f->kind == BLOCKS_THEN_FAILS);
    case FAILS: return fail_send(p, NBD_IO_ERROR);
    case FAILS_ODDLY: return fail_send(p, -77);
    case MOVES_NOTHING: block(0); return 0;
    default: return block(0);
    }
}

static ptrdiff_t faulty_recv(void *context, const nbd_iovec *iov, unsigned count)
{
    play *p = ((const wire *)context)->play;
    const fault *f = fault_now();
    size_t asked = iov_sum(iov, count);

    scribble(iov, count);
    if (faults.stubborn > 0) {
        faults.stubborn--;
        return faults.stubborn == 0 && faults.then_fails ? fail_recv(p, NBD_IO_ERROR) : block(1);
    }
    if (faults.send_failed && p->out_taken >= out_limit(p)) return NBD_IO_READ;
    if (!f) return play_recv(context, iov, count);
    if (short_size(f->kind, asked))
        return recv_less(context, iov, count, short_size(f->kind, asked));
    switch (f->kind) {
    case BLOCKS_FOR_WRITING: return block(0);
    case BLOCKS_LONG:
    case BLOCKS_THEN_FAILS: return block_again(1, f->kind == BLOCKS_THEN_FAILS);
    case FAILS: return fail_recv(p, NBD_IO_ERROR);
    case FAILS_ODDLY: return fail_recv(p, -77);
    case MOVES_NOTHING: return fail_recv(p, NBD_IO_EOF);
    default: return block(1);
    }
}

// A failure of it counts as success.
static int faulty_finish(void *context)
{
    const fault *f = fault_now();

    (void)context;
    CHECK(!faults.send_failed);
    if (!f) return 0;
    finish_faults++;
    switch (f->kind) {
    case BLOCKS_FOR_READING: return (int)block(1);
    case BLOCKS_FOR_WRITING:
    case BLOCKS_LONG: return (int)block(0);
    case FAILS: return NBD_IO_ERROR;
    case FAILS_ODDLY: return -77;
    default: return 0;
    }
}

/// Playing ///

static void locate_fault(void)
{
    size_t used;

    play_locate();
    used = strlen(check.where);
    snprintf(check.where + used, sizeof check.where - used, ", call %d %s, call %d %s",
             faults.planned[0].call, fault_names[faults.planned[0].kind], faults.planned[1].call,
             fault_names[faults.planned[1].kind]);
}

static unsigned ready_now(const play *p)
{
    unsigned ready = faults.ready;

    if (can_receive(p)) ready |= NBD_WANT_READ;
    if (p->accept) ready |= NBD_WANT_WRITE;
    return ready;
}

// Nothing but what nbd_wants asks for is done.  While there is anything left it asks.
static void turn(play *p)
{
    unsigned wants, ready;

    play_steps(p);
    pull_events(p);
    if (p->closed) return;
    play_steps(p);
    wants = nbd_wants(&p->client);
    CHECK(wants || nbd_phase(&p->client) == NBD_PHASE_STARTTLS);
    ready = wants & ready_now(p);
    faults.ready = 0;
    if (ready || (wants & NBD_WANT_NOW)) {
        CHECK_EQUAL(nbd_poll(&p->client, ready), 0);
        push_against_guard(&p->client);
    } else if (!p->moved) {
        stuck(p, wants);
    }
    pull_events(p);
}

static void run_faulty(const script *s, const mode *how)
{
    static const nbd_transport hooks = {0,    NULL,          faulty_send, faulty_recv,
                                        NULL, faulty_finish, NULL};
    play *p = &stage;
    int idle = 0;

    faults.calls = faults.stubborn = faults.send_failed = faults.struck = 0;
    faults.ready = 0;
    checker_free(&judge);
    checker_begin(&judge);
    judging = 1;
    open_tampered(p, s, how, &hooks);
    check.locate = locate_fault;
    CHECK_EQUAL(nbd_connect(&p->client, &p->transports[0]), 0);
    while (!p->closed && idle <= PLAY_IDLE_TURNS) {
        p->moved = 0;
        turn(p);
        idle = p->moved ? 0 : idle + 1;
    }
    if (!p->closed) stuck(p, nbd_wants(&p->client));
    judging = 0;
    check_is_over(p);
    check_judgement(s);
}

// The session as it is without faults, in every mode the same.
static trace flawless;

static void check_outcome(const script *s)
{
    if (stage.mode.cut_at != uncut) {
        check_cut_end(&stage, &flawless);
        fatal_runs++;
        return;
    }
    check_uncut_end(&stage);
    if (!s->any_order) compare_traces(&stage.seen, &flawless);
    benign_runs++;
}

static int is_fatal(enum fault_kind kind)
{
    return kind >= MOVES_NOTHING; // some of them for one direction only
}

static void play_faults(const script *s, const mode *how, fault first, fault second)
{
    if (s->no_cut && (is_fatal(first.kind) || is_fatal(second.kind))) return;
    faults.planned[0] = first;
    faults.planned[1] = second;
    run_faulty(s, how);
    if (faults.struck) check_outcome(s);
}

static fault no_fault(void)
{
    fault none = {NO_CALL, MOVES_HALF};

    return none;
}

static fault some_fault(int calls)
{
    fault some;

    some.call = (int)check_random((uint32_t)calls + 2);
    some.kind = (enum fault_kind)check_random(FAULT_KINDS);
    return some;
}

static void fail_every_call(const script *s, const mode *how)
{
    fault one = no_fault();
    int calls, kind, i;

    play_faults(s, how, one, one);
    calls = faults.calls;
    for (one.call = 0; one.call < calls; one.call += (int)check.share) {
        for (kind = 0; kind < FAULT_KINDS; kind++) {
            one.kind = (enum fault_kind)kind;
            play_faults(s, how, one, no_fault());
            CHECK(faults.struck || s->no_cut);
        }
    }
    for (i = 0; i < FAULT_PAIRS; i += (int)check.share)
        play_faults(s, how, some_fault(calls), some_fault(calls));
}

static void session_with_faults(const void *of)
{
    const script *s = session_script(of);
    size_t size = play_whole(s, &flawless);

    watch();
    fail_every_call(s, &whole_mode);
    if (size > FAULT_BYTES) return;
    fail_every_call(s, &small_mode);
    fail_every_call(s, &piece_mode);
}

/// Blocking calls ///

enum { SYNC_SIZE = 700, SYNC_CALLS = 7 };

// The server's side of what blocking_calls does.
static void sync_session(script *s)
{
    static const uint32_t commands[] = {NBD_READ, NBD_WRITE, NBD_FLUSH, NBD_TRIM, NBD_WRITE_ZEROES};
    size_t i;

    greet_fixed(s);
    agree_on(s, NBD_PROTOCOL_STRUCTURED);
    want_go(s, "");
    send_info_export(s, 7, EXPORT_SIZE, EXPORT_FLAGS);
    send_ack(s, 7);
    for (i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        uint64_t size = commands[i] == NBD_FLUSH ? 0 : SYNC_SIZE;
        int r = script_request(s, commands[i], 0, 0, size);

        want_request(s, r);
        if (commands[i] == NBD_READ) {
            send_data(s, r, MORE, 300, SYNC_SIZE - 300);
            send_data(s, r, MORE, 0, 300);
        }
        send_none(s, r);
    }
    want_disconnect(s);
    send_end(s);
}

static int wait_result; // of the first failed wait; 0: none

static int faulty_wait(void *context, unsigned wants, int *timeout_ms)
{
    play *p = ((const wire *)context)->play;
    const fault *f = fault_now();
    unsigned ready;

    CHECK(wants && !(wants & NBD_WANT_NOW));
    CHECK(*timeout_ms > 0);
    play_steps(p);
    if (f) wait_faults++;
    if (f && (f->kind == FAILS || f->kind == FAILS_ODDLY || f->kind == BLOCKS_THEN_FAILS)) {
        wait_result = NBD_ERR_TRANSPORT;
        return f->kind == FAILS_ODDLY ? -77 : NBD_IO_ERROR;
    }
    if (f && f->kind == MOVES_NOTHING) {
        wait_result = NBD_ERR_TIMEOUT;
        *timeout_ms = 0;
        return 0;
    }
    if (f && f->kind == BLOCKS_FOR_READING) return NBD_WANT_READ;
    if (f && f->kind == BLOCKS_FOR_WRITING) return NBD_WANT_WRITE;
    if (f && f->kind == BLOCKS_LONG) return 0; // woken up too early
    ready = wants & ready_now(p);
    faults.ready = 0;
    if (!ready) stuck(p, wants);
    return (int)ready;
}

static int call_number(nbd_sync *sync, int number, unsigned char *memory)
{
    switch (number) {
    case 0: return nbd_sync_connect(sync, &stage.transports[0]);
    case 1: return nbd_sync_read(sync, memory, SYNC_SIZE, 0);
    case 2: return nbd_sync_write(sync, memory, SYNC_SIZE, 0, 0);
    case 3: return nbd_sync_flush(sync);
    case 4: return nbd_sync_trim(sync, SYNC_SIZE, 0, 0);
    case 5: return nbd_sync_write_zeroes(sync, SYNC_SIZE, 0, 0);
    default: return nbd_sync_close(sync);
    }
}

static void check_read_memory(const unsigned char *memory, int error)
{
    size_t i;

    for (i = 0; i < SYNC_SIZE; i++) {
        CHECK(memory[i] == export_byte(i) || (error && memory[i] == 0));
    }
}

// What a failed call may say: what the transport did, in the words of the documentation.
static int sync_error_is_right(int error)
{
    if (wait_result) return error == wait_result;
    if (stage.mode.cut_at == uncut) return 0;
    return error == cut_error(&stage);
}

// The first failure tells why; only where the session was over before the call began, it is
// nbd_sync_close that does.  Later calls fail too.
static void check_sync_call(int number, int error, int *failed, int *told)
{
    if (*failed && number < SYNC_CALLS - 1) CHECK(error != 0);
    *failed |= error != 0;
    if (!error || error == NBD_ERR_STATE || *told) return;
    if (!sync_error_is_right(error)) {
        check_fail(__FILE__, __LINE__, "call %d says %d", number, error);
    }
    *told = 1;
}

static void blocking_calls(const script *s, const mode *how)
{
    static const nbd_transport hooks = {0,           NULL,          faulty_send, faulty_recv,
                                        faulty_wait, faulty_finish, NULL};
    unsigned char *memory = region_of(0) + PLAY_REGION - SYNC_SIZE;
    nbd_sync sync = NBD_ZERO;
    int number, failed = 0, told = 0;

    faults.calls = faults.stubborn = faults.send_failed = faults.struck = 0;
    faults.ready = 0;
    wait_result = 0;
    open_tampered(&stage, s, how, &hooks);
    check.locate = locate_fault;
    stage.lent[0] = SYNC_SIZE;
    region_allow(&stage, 0, PROT_READ | PROT_WRITE);
    sync.client = &stage.client;
    sync.timeout_ms = 1 << 20;
    for (number = 0; number < SYNC_CALLS; number++) {
        int error;

        if (number == 1) memset(memory, UNTOUCHED, SYNC_SIZE);
        error = call_number(&sync, number, memory);
        check_sync_call(number, error, &failed, &told);
        // Nothing was read into it if it was never asked for.
        if (number == 1 && error != NBD_ERR_STATE) check_read_memory(memory, error);
        CHECK_EQUAL(nbd_count(&stage.client)->in_flight, 0);
    }
    CHECK_EQUAL(nbd_phase(&stage.client), NBD_PHASE_IDLE);
    CHECK_EQUAL(told, failed);
    CHECK(failed || (stage.step == s->step_count && stage.mode.cut_at == uncut) || stage.farewell);
}

static void blocking_calls_with_faults(void)
{
    const session one = {check.name, sync_session};
    const script *s = session_script(&one);
    const mode *const modes[] = {&whole_mode, &small_mode, &piece_mode};
    size_t m;

    for (m = 0; m < sizeof modes / sizeof modes[0]; m++) {
        int calls, call, kind;

        faults.planned[0] = faults.planned[1] = no_fault();
        blocking_calls(s, modes[m]);
        calls = faults.calls;
        for (call = 0; call < calls; call += (int)check.share) {
            for (kind = 0; kind < FAULT_KINDS; kind++) {
                faults.planned[0].call = call;
                faults.planned[0].kind = (enum fault_kind)kind;
                blocking_calls(s, modes[m]);
                CHECK(faults.struck);
            }
        }
    }
}

/// All of it ///

static void sessions_use_every_message(void)
{
    static vocabulary all;

    hear_sessions(&all, NULL);
    check_whole_protocol(&all);
}

static void faults_happened(void)
{
    printf("# faults: %lu sessions delayed, %lu ended, %lu calls of finish and %lu of wait\n",
           benign_runs, fatal_runs, finish_faults, wait_faults);
    CHECK(benign_runs > 0);
    CHECK(fatal_runs > 0);
    CHECK(finish_faults > 0);
    CHECK(wait_faults > 0);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(sessions_use_every_message);
    CHECK_CASE(blocking_calls_with_faults);
    every_session("faults_in_", session_with_faults);
    // Only after all of the sessions can it be told.
    if (argc <= 1) CHECK_CASE(faults_happened);
    return check_end();
}
