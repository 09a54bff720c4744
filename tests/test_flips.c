// Every byte of the server changed, one at a time: each bit of it flipped, then all of it 0x00
// and 0xff.  What is right then is decided by the judge (checker.h), which reads the same bytes:
// if they are legal the client must say exactly what they say, if not it must end with the error
// that the table of fates has for the broken rule.
//
// The server goes on with its script whatever the client does, and hangs up where neither side
// has anything more to do.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include "sessions.h"

enum {
    FLIP_BYTES = 1024,  // of the server: longer sessions only repeat what shorter ones have
    FLIP_SCRIPT = 2048, // bytes of both sides and of images that such a session has at most
    FLIP_HEADER = 36    // bytes of a message that are changed with every byte a call, too
};

static const mode bytes_mode = {"byte by byte", 1, 0, 0, 0, NBD_BUFFER_NAMES, 0, uncut, NBD_IO_EOF};

static void locate(void);

/// The change ///

typedef struct change {
    size_t at; // byte of the server; uncut: none
    unsigned char flip;
    int set; // -1, or what the byte becomes
} change;

static change changed;
static int changed_it;

static void apply_change(play *p, size_t from)
{
    unsigned char *at, was;

    if (changed.at < from || changed.at >= p->out_size) return;
    at = p->out + changed.at;
    was = *at;
    *at = changed.set >= 0 ? (unsigned char)changed.set ^ p->server_key : was ^ changed.flip;
    changed_it = was != *at;
}

/// What the client says ///

typedef struct heard_list {
    size_t count;
    checker_saying sayings[PLAY_EVENTS];
} heard_list;

typedef struct result {
    int done;
    int error;
    unsigned order; // among the requests that were issued
    uint32_t server_error;
    uint64_t error_offset;
} result;

static heard_list heard;
static result results[SCRIPT_REQUESTS];
static int connection_error;
static int abandoned;  // by the program
static int left_early; // the program disconnected before READY
static int left_late;  // or behind it
static int ready;
static unsigned issued;

static void hear(uint64_t kind, const uint64_t *what, size_t count)
{
    checker_saying *said = &heard.sayings[heard.count++];

    CHECK(heard.count < PLAY_EVENTS);
    memset(said, 0, sizeof *said);
    said->kind = kind;
    memcpy(said->what, what, count * sizeof *what);
}

static void hear_result(play *p, uint32_t option, uint32_t error, int offers)
{
    const nbd_export *got = nbd_negotiated(&p->client);
    uint64_t what[6] = {0};

    what[0] = option;
    what[1] = error;
    if (offers) {
        what[2] = got->size;
        what[3] = got->flags;
        if (got->block_sizes) {
            what[4] = (uint64_t)got->minimum_block << 32 | got->maximum_payload;
            what[5] = got->preferred_block;
        }
        CHECK(got->block_sizes || got->minimum_block == 1);
        CHECK(got->block_sizes || got->preferred_block == 4096);
        CHECK(got->block_sizes || got->maximum_payload == UINT32_C(32) << 20);
    }
    hear(CHECKER_SAYS_RESULT, what, 6);
}

static uint64_t order_of(const play *p, const nbd_event *event)
{
    return results[request_of(p, event)].order;
}

static void hear_extent(const play *p, const nbd_event *event)
{
    uint64_t what[5];

    what[0] = order_of(p, event);
    what[1] = event->context;
    what[2] = event->offset;
    what[3] = event->size;
    what[4] = event->flags;
    hear(CHECKER_SAYS_EXTENT, what, 5);
}

static void hear_hole(const play *p, const nbd_event *event)
{
    uint64_t what[3];

    what[0] = order_of(p, event);
    what[1] = event->offset;
    what[2] = event->size;
    hear(CHECKER_SAYS_HOLE, what, 3);
}

static void hear_text(const nbd_event *event)
{
    uint64_t what[2];

    CHECK_EQUAL(event->text_size, event->text_length);
    what[0] = event->text_size;
    what[1] = checker_hash((const unsigned char *)event->text, event->text_size);
    if (event->text_size) hear(CHECKER_SAYS_TEXT, what, 2);
}

static int has_export(uint32_t option)
{
    return option == CHECKER_INFO || option == CHECKER_GO;
}

/// Memory of reads ///

static const checker_request *find_request(const checker_request *first, unsigned order)
{
    while (first && first->order != order)
        first = first->next;
    return first;
}

// What the judge knows of a request; NULL if it never crossed.
static const checker_request *answer_to(int r)
{
    const checker_request *found = find_request(judge.answered, results[r].order);

    return found ? found : find_request(judge.requests, results[r].order);
}

static int byte_is_right(const request *of, const checker_request *a, uint64_t place,
                         unsigned char got, int error)
{
    int came = a && a->image ? a->came[place] : CHECKER_NEVER_CAME;

    if (came == CHECKER_CAME_AS_HOLE && (of->op.flags & NBD_SPARSE) && !error) return 1;
    if (came != CHECKER_NEVER_CAME && got == a->image[place]) return 1;
    if (!error) return 0;
    return got == 0 || ((of->op.flags & NBD_NO_INIT) && got == UNTOUCHED);
}

// Only bytes that the server sent for their place; after a failure also zeroes.
static void check_memory(play *p, int r, int error)
{
    const request *of = &p->script->requests[r];
    const checker_request *a = answer_to(r);
    uint64_t place = 0;
    uint32_t i;
    size_t k;

    region_check_gaps(p, r);
    for (i = 0; i < region_pieces(p, r); i++) {
        const unsigned char *piece = p->iov[r][i].base;

        for (k = 0; k < p->iov[r][i].size; k++, place++) {
            if (byte_is_right(of, a, place, piece[k], error)) continue;
            check_fail(__FILE__, __LINE__, "request %d, error %d: byte %lu is %02x", r, error,
                       (unsigned long)place, piece[k]);
        }
    }
}

static void hear_done(play *p, const nbd_event *event)
{
    int r = request_of(p, event);
    const nbd_op *op = &p->script->requests[r].op;

    CHECK(!results[r].done);
    CHECK(event->user == &p->issued[r]);
    CHECK_EQUAL(event->command, op->command);
    CHECK_EQUAL(event->offset, op->offset);
    CHECK_EQUAL(event->size, op->size);
    results[r].done = 1;
    results[r].error = event->error;
    results[r].server_error = event->server_error;
    results[r].error_offset = event->error_offset;
    p->done[r] = 1;
    if (op->command == NBD_READ) check_memory(p, r, event->error);
    region_allow(p, r, PROT_NONE);
    p->lent[r] = 0;
}

static void hear_event(play *p, const nbd_event *event)
{
    seen_event *seen = &p->seen.events[p->seen.count++];

    CHECK(p->seen.count < PLAY_EVENTS);
    CHECK(!p->closed);
    memset(seen, 0, sizeof *seen);
    seen->event = *event;
    seen->request = request_of(p, event);
    p->moved = 1;
    switch (event->type) {
    case NBD_EVENT_DONE: hear_done(p, event); break;
    case NBD_EVENT_TEXT: hear_text(event); break;
    case NBD_EVENT_EXTENT: hear_extent(p, event); break;
    case NBD_EVENT_HOLE: hear_hole(p, event); break;
    case NBD_EVENT_STARTTLS: hear_result(p, CHECKER_STARTTLS, 0, 0); break;
    case NBD_EVENT_READY:
        ready = 1;
        hear_result(p, CHECKER_GO, 0, 1);
        break;
    case NBD_EVENT_OPTION:
        if (!event->option) break;
        hear_result(p, event->option, event->server_error,
                    has_export(event->option) && !event->error);
        break;
    default:
        CHECK_EQUAL(event->type, NBD_EVENT_CLOSED);
        p->closed = 1;
        connection_error = event->error;
    }
}

/// Playing on ///

// Any bytes will do.
static int take_anything(play *p, const step *at)
{
    while (p->matched < at->size && p->in_taken < p->in_size) {
        unsigned char got = p->in[p->in_taken++] ^ p->server_key;
        size_t i = p->matched++;

        if (at->cookie_at && i >= at->cookie_at && i < at->cookie_at + 8 &&
            at->request != SESSION) {
            p->cookies[at->request][i - at->cookie_at] = got;
        }
    }
    if (p->matched < at->size) return 0;
    p->matched = 0;
    return 1;
}

static int see_anything(play *p, const step *at)
{
    size_t i;

    for (i = 0; i < p->seen.count; i++) {
        seen_event *seen = &p->seen.events[i];

        if (seen->request != at->request || seen->expected) continue;
        if (seen->event.type != at->event.type) continue;
        seen->expected = 1;
        return 1;
    }
    return 0;
}

static int is_tls_call(const step *at)
{
    return at->call == play_starttls || at->call == play_seal;
}

// A call that is not due any more changes nothing, but it must not reach the judge.
static int call_anyway(play *p, const step *at)
{
    int alive = p->client.state != NBDI_IDLE && p->client.state < NBDI_DEAD;

    if (is_tls_call(at) && p->client.state != NBDI_TLS) return 1;
    if (at->call == nbd_abandon && alive) abandoned = 1;
    if (at->call == nbd_disconnect) *(ready ? &left_late : &left_early) = 1;
    return call_step(p, at);
}

static int issue_anyway(play *p, const step *at)
{
    int r = at->request;

    issue_step(p, r);
    if (p->issued[r]) results[r].order = issued++;
    return 1;
}

static int play_on(play *p)
{
    const step *at = &p->script->steps[p->step];
    size_t from = p->out_size;

    if (p->in_hook && !is_the_servers(at->kind)) return 0;
    switch (at->kind) {
    case STEP_WANT: return take_anything(p, at);
    case STEP_SEE: return see_anything(p, at);
    case STEP_CALL: return call_anyway(p, at);
    case STEP_ISSUE: return issue_anyway(p, at);
    case STEP_UNDONE:
    case STEP_REFUSED: return 1;
    case STEP_SEND:
        send_step(p, at);
        apply_change(p, from);
        return 1;
    default: return play_step(p);
    }
}

static void play_all_on(play *p)
{
    while (p->step < p->script->step_count && play_on(p)) {
        p->step++;
        p->moved = 1;
    }
}

// The program does not wait for what does not come; at last the server hangs up.
static void give_way(play *p)
{
    int over = p->step == p->script->step_count;
    enum step_kind kind = over ? STEP_END : p->script->steps[p->step].kind;

    if (p->accept != uncut) {
        p->accept = uncut;
    } else if (kind == STEP_SEE || kind == STEP_FED) {
        p->step++;
    } else if (!p->end_sent) {
        p->end_sent = 1;
    } else {
        CHECK_EQUAL(nbd_phase(&p->client), NBD_PHASE_STARTTLS);
        abandoned = 1;
        CHECK_EQUAL(nbd_abandon(&p->client), 0);
    }
}

static ptrdiff_t send_on(void *context, const nbd_iovec *iov, unsigned count, unsigned flags)
{
    const wire *w = context;
    play *p = w->play;
    size_t moved = take_from_client(w, iov, count, p->mode.piece);

    (void)flags;
    if (!moved) return NBD_IO_WRITE;
    p->in_hook = 1;
    play_all_on(p);
    p->in_hook = 0;
    return (ptrdiff_t)moved;
}

// After the client said goodbye nobody listens to the server, the judge neither.
static int judge_listens(void)
{
    return !judge.disc && !judge.aborted;
}

static ptrdiff_t recv_on(void *context, const nbd_iovec *iov, unsigned count)
{
    const wire *w = context;
    play *p = w->play;
    size_t moved;

    scribble(iov, count);
    judging = judge_listens();
    moved = give_to_client(w, iov, count, p->mode.piece);
    judging = 1;
    if (moved) return (ptrdiff_t)moved;
    if (!stream_is_over(p)) return NBD_IO_READ;
    if (!p->clean_end && judge_listens()) checker_server_end(&judge);
    p->moved |= !p->clean_end;
    p->clean_end = 1;
    return NBD_IO_EOF;
}

static void pull_all(play *p)
{
    nbd_event event;

    while (nbd_next(&p->client, &event))
        hear_event(p, &event);
}

static void turn(play *p)
{
    unsigned wants, may;

    play_all_on(p);
    pull_all(p);
    if (p->closed) return;
    play_all_on(p);
    wants = nbd_wants(&p->client);
    CHECK(wants || nbd_phase(&p->client) == NBD_PHASE_STARTTLS);
    may = wants & ((can_receive(p) ? NBD_WANT_READ : 0) | (p->accept ? NBD_WANT_WRITE : 0));
    if (may || (wants & NBD_WANT_NOW)) {
        CHECK_EQUAL(nbd_poll(&p->client, may), 0);
        push_against_guard(&p->client);
    } else if (!p->moved) {
        give_way(p);
    }
    pull_all(p);
}

static void run_on(play *p, const script *s, const mode *how)
{
    static const nbd_transport hooks = {0, NULL, send_on, recv_on, NULL, NULL, NULL};
    int idle = 0;

    memset(results, 0, sizeof results);
    heard.count = 0;
    connection_error = abandoned = left_early = left_late = ready = changed_it = 0;
    issued = 0;
    checker_free(&judge);
    checker_begin(&judge);
    judge.keep = 1;
    judging = 1;
    open_tampered(p, s, how, &hooks);
    CHECK_EQUAL(nbd_connect(&p->client, &p->transports[0]), 0);
    check.locate = locate;
    p->ended = 1; // calls may fail
    while (!p->closed && idle <= PLAY_IDLE_TURNS) {
        p->moved = 0;
        turn(p);
        idle = p->moved ? 0 : idle + 1;
    }
    if (!p->closed) stuck(p, nbd_wants(&p->client));
    judging = 0;
    check_is_over(p);
}

/// The verdict ///

enum fate {
    DIES,      // the connection ends with `error`
    FAILS,     // a request fails, by name or with the server's error; the connection lives
    OVERLOOKED // the client goes on as if it were legal
};

typedef struct fate_row {
    const char *rule;
    enum fate fate;
    int error;
    const char *why;
} fate_row;

// What becomes of the rules that a server breaks.  A rule that is not here ends the connection
// with NBD_ERR_PROTOCOL.
static const fate_row fates[] = {
    {"greeting_magic", DIES, NBD_ERR_NOT_NBD, "nothing tells what is spoken here"},
    {"hang_up", DIES, NBD_ERR_CLOSED, "the stream is over"},
    {"server_cut_message", DIES, NBD_ERR_TRUNCATED, "the stream is over"},
    {"handshake_flags", OVERLOOKED, 0, "unknown flags SHOULD be ignored"},
    {"oldstyle_flags", OVERLOOKED, 0, "the upper half is not for the client"},
    {"padding", OVERLOOKED, 0, "reserved bytes MUST be ignored"},
    {"df_flag", OVERLOOKED, 0, "without structured replies DF counts as not offered"},
    {"fast_zero_flag", OVERLOOKED, 0, "without WRITE_ZEROES nothing can be asked with it"},
    {"status_payload_flag", OVERLOOKED, 0, "without extended headers it is never used"},
    {"info_go_differ", OVERLOOKED, 0, "what GO says counts"},
    {"block_size_required", OVERLOOKED, 0, "a refusal is a refusal"},
    {"tls_required", OVERLOOKED, 0, "a refusal is a refusal"},
    {"simple_read", OVERLOOKED, 0, "the error counts: a shipping server does it; success dies"},
    {"server_string_nul", OVERLOOKED, 0, "texts are handed out as bytes, with their length"},
    {"server_string_utf8", OVERLOOKED, 0, "texts are handed out as bytes, with their length"},
    {"context_form", OVERLOOKED, 0, "names of contexts are handed out as bytes"},
    {"content_overlap", FAILS, 0, "the client MAY disconnect, but need not"},
    {"not_covered", FAILS, 0, "the proof of the read has failed"},
    {"status_missing", FAILS, 0, "the proof of the status has failed"},
};

enum { FATES = sizeof fates / sizeof fates[0] };

static unsigned long fate_met[FATES];
static const fate_row unlisted = {"", DIES, NBD_ERR_PROTOCOL, ""};

static const fate_row *fate_of(const char *rule)
{
    size_t i;

    for (i = 0; i < FATES; i++) {
        if (strcmp(fates[i].rule, rule) != 0) continue;
        fate_met[i]++;
        return &fates[i];
    }
    return &unlisted;
}

// The first rule broken with this fate; NULL if there is none.
static const fate_row *first_fate(enum fate fate)
{
    unsigned i;

    for (i = 0; i < judge.count[CHECKER_SERVER] && i < CHECKER_KEPT; i++) {
        const fate_row *row = fate_of(judge.found[CHECKER_SERVER][i].rule);

        if (row->fate == fate) return row;
    }
    return judge.lost && fate == DIES ? &unlisted : NULL; // there is no way on
}

/// Choices ///

static int is_huge_information(void)
{
    return judge.server.then == checker_reply_data && judge.server.need > 20 + 65536 &&
           judge.pending.reply_type == CHECKER_REP_INFO;
}

static int is_huge_error(void)
{
    return judge.server.then == checker_chunk_error && judge.server.need > 8192 &&
           !checker_is_known_error(&judge);
}

static int has_too_many_extents(void)
{
    uint64_t each = judge.extended ? 16 : 8;

    return judge.server.then == checker_chunk_status && judge.server.need > each / 2 + (each << 20);
}

static int has_extent_behind_2_64(void)
{
    size_t i;

    for (i = 0; i < judge.said_count; i++) {
        const checker_saying *said = &judge.said[i];

        if (said->kind == CHECKER_SAYS_EXTENT && said->what[3] > UINT64_MAX - said->what[2]) {
            return 1;
        }
    }
    return 0;
}

typedef struct choice {
    int (*applies)(void);
    const char *why;
} choice;

// What the specification allows, or leaves open, and the client ends with NBD_ERR_PROTOCOL.
static const choice choices[] = {
    {is_huge_information, "unknown information has no bound: above 64 KiB it is an attack"},
    {is_huge_error, "an unknown error has no bound: above 8 KiB it is an attack"},
    {has_too_many_extents, "a chunk SHOULD NOT have more than 2^20 extents"},
    {has_extent_behind_2_64, "no offset of 64 bits can name its end"},
};

enum { CHOICES = sizeof choices / sizeof choices[0] };

static unsigned long choice_met[CHOICES];

static int refused_by_choice(void)
{
    size_t i;

    for (i = 0; i < CHOICES; i++) {
        if (!choices[i].applies()) continue;
        choice_met[i]++;
        return NBD_ERR_PROTOCOL;
    }
    return 0;
}

/// Endings ///

// The client closed first.  If it did so inside a message of the server, the rest of what the
// server wrote tells whether that message could have ended.
static void end_judgement(play *p)
{
    size_t i;

    if (p->clean_end || refused_by_choice()) return;
    if (!connection_error || abandoned || !judge_listens() || first_fate(DIES) ||
        !judge.server.then) {
        checker_end(&judge);
        return;
    }
    for (i = p->out_taken; i < p->out_size; i++) {
        unsigned char byte = p->out[i] ^ p->server_key;

        checker_server(&judge, &byte, 1);
    }
    checker_server_end(&judge);
}

static int is_automatic(const play *p)
{
    return !(p->script->config.flags & NBD_NEGOTIATE);
}

static int option_error(uint64_t sent)
{
    uint64_t number = sent & ~(uint64_t)CHECKER_REP_ERROR;

    return number >= 1 && number <= 10 ? -100 - (int)number : NBD_REP_ERR_OTHER;
}

// What the refusal of an option makes of the session; 0: it goes on.
static int refusal_ends(const play *p, uint64_t option, uint64_t sent)
{
    int error = sent ? option_error(sent) : 0;

    if (!error || error == NBD_REP_ERR_SHUTDOWN) return error;
    if (option == CHECKER_STARTTLS && (p->script->config.flags & NBD_TLS_REQUIRE)) {
        return NBD_ERR_TLS;
    }
    return option == CHECKER_GO && is_automatic(p) && error != NBD_REP_ERR_UNSUP ? error : 0;
}

// The error of CLOSED that a legal answer of the server causes, or 0.
static int noted_error(const play *p)
{
    size_t i;

    for (i = 0; i < judge.said_count; i++) {
        const checker_saying *said = &judge.said[i];
        int error = refusal_ends(p, said->what[0], said->what[1]);

        if (said->kind == CHECKER_SAYS_RESULT && error) return error;
    }
    return judge.shutdown ? NBD_ESHUTDOWN : 0;
}

static int fixed_for_client(const play *p)
{
    return !(p->script->config.flags & NBD_WITHOUT_FIXED_NEWSTYLE) &&
           (judge.handshake & CHECKER_FIXED);
}

// Those agreed to, and the one whose name is still to come.
static size_t contexts_begun(void)
{
    int one_more = judge.server.then == checker_reply_data && judge.server.have >= 24 &&
                   judge.pending.reply_type == CHECKER_REP_META &&
                   judge.pending.option == CHECKER_SET_META;

    return judge.contexts.count / 2 + (size_t)one_more;
}

// What the caller's configuration does not allow, though the server may offer it.
static int refused_by_config(const play *p)
{
    const nbd_config *config = &p->script->config;
    int newstyle = judge.phase >= CHECKER_AT_FLAGS && !judge.oldstyle;
    size_t room = config->context_count ? config->context_count : 8;

    if (judge.oldstyle && (config->flags & NBD_TLS_REQUIRE)) return NBD_ERR_TLS;
    if (judge.oldstyle && config->export_name && config->export_name[0]) return NBD_ERR_OLDSTYLE;
    if (newstyle && (config->flags & NBD_TLS_REQUIRE) && !fixed_for_client(p)) return NBD_ERR_TLS;
    return contexts_begun() > room ? NBD_ERR_PROTOCOL : 0;
}

// Whether a client that is to disconnect can do it without a word.
static int leaves_silently(const play *p)
{
    int in_clear = (p->script->config.flags & NBD_TLS_REQUIRE) && !judge.tls;

    return left_early && (judge.phase == CHECKER_AT_TLS || !fixed_for_client(p) || in_clear);
}

static int legal_error(play *p)
{
    int error = refused_by_config(p);

    if (!error) error = refused_by_choice();
    if (!error) error = noted_error(p);
    if (error) return error;
    if (abandoned) return NBD_ERR_ABANDONED;
    if (!judge_listens() || leaves_silently(p)) return 0;
    return judge.server.then ? NBD_ERR_TRUNCATED : NBD_ERR_CLOSED;
}

/// What was said, and what was heard ///

enum told { UNTOLD, MAYBE_TOLD, TOLD };

static int request_of_order(const play *p, uint64_t order)
{
    int r;

    for (r = 0; r < p->script->request_count; r++) {
        if (p->issued[r] && results[r].order == order) return r;
    }
    check_fail(__FILE__, __LINE__, "no request %lu", (unsigned long)order);
}

// Only sparse reads hear of holes, as long as their proof holds.
static enum told hole_is_told(const play *p, uint64_t order)
{
    int r = request_of_order(p, order);

    if (!(p->script->requests[r].op.flags & NBD_SPARSE)) return UNTOLD;
    return results[r].error == NBD_ERR_FRAGMENTED ? MAYBE_TOLD : TOLD;
}

// Automatic options and those that end the session have no event of their own; nor have those
// that are answered when the program has left.
static enum told result_is_told(const play *p, const checker_saying *said)
{
    uint64_t option = said->what[0], error = said->what[1];
    int leads_on =
        option <= CHECKER_EXPORT_NAME || option == CHECKER_GO || option == CHECKER_STARTTLS;

    if (refusal_ends(p, option, error)) return UNTOLD;
    if (is_automatic(p) && (error || !leads_on)) return UNTOLD;
    return left_early ? MAYBE_TOLD : TOLD;
}

static enum told is_told(const play *p, const checker_saying *said)
{
    if (said->kind == CHECKER_SAYS_HOLE) return hole_is_told(p, said->what[0]);
    return said->kind == CHECKER_SAYS_RESULT ? result_is_told(p, said) : TOLD;
}

static int is_same(const checker_saying *a, const checker_saying *b)
{
    checker_saying x = *a;

    if (x.kind == CHECKER_SAYS_RESULT && x.what[0] <= CHECKER_EXPORT_NAME && !x.what[1]) {
        x.what[0] = CHECKER_GO; // all of them are READY
    }
    return memcmp(&x, b, sizeof x) == 0;
}

// Every event is the server's word, in its order; with `all` none of its words is missing.
static void compare_sayings(const play *p, int all)
{
    size_t i, k = 0;

    for (i = 0; i < judge.said_count; i++) {
        enum told told = is_told(p, &judge.said[i]);

        if (told == UNTOLD) continue;
        if (k < heard.count && is_same(&judge.said[i], &heard.sayings[k])) {
            k++;
        } else if (told == TOLD && (all || k < heard.count)) {
            check_fail(__FILE__, __LINE__, "event %lu of %lu is not what the server said",
                       (unsigned long)k, (unsigned long)heard.count);
        }
    }
    if (all) CHECK_EQUAL(k, heard.count);
}

/// Results ///

static int request_error(uint32_t sent)
{
    static const unsigned char known[] = {NBD_EPERM,  NBD_EIO,       NBD_ENOMEM,  NBD_EINVAL,
                                          NBD_ENOSPC, NBD_EOVERFLOW, NBD_ENOTSUP, NBD_ESHUTDOWN};

    return sent < 256 && memchr(known, (int)sent, sizeof known) ? (int)sent : NBD_EINVAL;
}

static int came_whole(const checker_request *a)
{
    return !a->image || !memchr(a->came, CHECKER_NEVER_CAME, (size_t)a->length);
}

// What the answer of the server makes of a request; 1: nothing yet.  The client may have stopped
// reading before an error that stands in an illegal message.
static int answer_error(const checker_request *a, int got, int legal)
{
    if (!a) return 1;
    if (a->error && (legal || got > 0)) return request_error(a->error);
    if (got == NBD_ERR_FRAGMENTED && a->most_spans > NBD_RANGES) return got;
    if (a->overlapped) return NBD_ERR_OVERLAP;
    if (!a->complete) return 1;
    return came_whole(a) && !a->missing ? 0 : NBD_ERR_GAP;
}

static int is_connection_error(int error)
{
    return error <= NBD_ERR_CLOSED && error >= NBD_ERR_ABANDONED &&
           (error == connection_error || connection_error >= 0 || connection_error < -100);
}

static void compare_result(int r, int legal)
{
    const result *got = &results[r];
    const checker_request *a = answer_to(r);
    int wanted = answer_error(a, got->error, legal);
    int open = !legal || wanted == 1;

    snprintf(check.where, sizeof check.where, "request %d", r);
    if (is_connection_error(got->error) && open) return;
    CHECK_EQUAL(got->error, wanted);
    CHECK_EQUAL(got->server_error, wanted > 0 ? a->error : 0);
    if (wanted > 0) CHECK_EQUAL(got->error_offset, a->error_offset);
}

/// Judging ///

static struct {
    unsigned long legal, overlooked, failed, illegal;
} counts;

static void check_client(const script *s)
{
    size_t i;

    for (i = 0; i < judge.count[CHECKER_CLIENT] && i < CHECKER_KEPT && !s->unlawful; i++) {
        const char *rule = judge.found[CHECKER_CLIENT][i].rule;
        int ends = strcmp(rule, "hard_disconnect") == 0 || strcmp(rule, "cut_message") == 0;

        if (!ends || !connection_error) {
            check_fail(__FILE__, __LINE__, "the client broke \"%s\"", rule);
        }
    }
}

// A program that disconnects does not listen any more when its last request is answered.
static int has_left(const play *p)
{
    int r;

    for (r = 0; r < p->script->request_count; r++) {
        const checker_request *a = p->issued[r] ? answer_to(r) : NULL;

        if (p->issued[r] && (!a || !a->complete)) return 0;
    }
    return left_late && judge.lost && connection_error == 0;
}

static void check_illegal(const play *p, const fate_row *row)
{
    int earlier = refused_by_config(p);

    if (!earlier) earlier = noted_error(p);
    if (!earlier && abandoned) earlier = NBD_ERR_ABANDONED;
    if (!earlier || connection_error != earlier) CHECK_EQUAL(connection_error, row->error);
    counts.illegal++;
}

static void check_legal(play *p)
{
    CHECK_EQUAL(connection_error, legal_error(p));
    if (first_fate(FAILS)) {
        counts.failed++;
    } else if (first_fate(OVERLOOKED)) {
        counts.overlooked++;
    } else {
        counts.legal++;
    }
}

static void check_verdict(play *p)
{
    const fate_row *dies;
    int r, legal;

    end_judgement(p);
    dies = first_fate(DIES);
    legal = !dies && !refused_by_config(p) && !refused_by_choice() && !abandoned;
    check_client(p->script);
    if (dies && has_left(p)) {
        counts.overlooked++;
    } else if (dies) {
        check_illegal(p, dies);
    } else {
        check_legal(p);
    }
    compare_sayings(p, legal);
    for (r = 0; r < p->script->request_count; r++) {
        if (p->issued[r]) compare_result(r, legal);
    }
}

static void locate(void)
{
    static const mode *const how = &stage.mode;
    size_t used;
    int side;
    unsigned i;

    used = (size_t)snprintf(check.where, sizeof check.where,
                            "byte %lu ^ %02x = %d, mode \"%s\", step %lu, closed %d (%s)",
                            (unsigned long)changed.at, changed.flip, changed.set, how->name,
                            (unsigned long)stage.step, connection_error, nbd_detail(&stage.client));
    for (side = 0; side < CHECKER_LISTS; side++) {
        for (i = 0; i < judge.count[side] && i < CHECKER_KEPT && used < sizeof check.where; i++) {
            used += (size_t)snprintf(check.where + used, sizeof check.where - used, ", %s at %lu",
                                     judge.found[side][i].rule,
                                     (unsigned long)judge.found[side][i].position);
        }
    }
}

static void run_changed(const script *s, const mode *how)
{
    run_on(&stage, s, how);
    if (changed.at == uncut || changed_it) check_verdict(&stage);
}

static void change_byte(const script *s, const mode *how, size_t at)
{
    int bit;

    changed.at = at;
    for (bit = 0; bit < 8; bit++) {
        changed.flip = (unsigned char)(1 << bit);
        changed.set = -1;
        run_changed(s, how);
    }
    for (bit = 0; bit < 2; bit++) {
        changed.set = bit ? 0xff : 0;
        run_changed(s, how);
    }
}

// Who tests a server with raw commands and options must know what they mean.
static int is_raw(const script *s)
{
    uint32_t i;
    int r;

    if (s->unlawful) return 1;
    for (r = 0; r < s->request_count; r++) {
        if (s->requests[r].op.command == NBD_RAW) return 1;
    }
    for (i = 0; i < s->option_count; i++) {
        if (s->options[i].data || s->options[i].option > CHECKER_EXTENDED) return 1;
    }
    return 0;
}

// Headers are parsed where they may be cut.
static int is_in_header(const play *p, size_t at)
{
    size_t i;

    for (i = 0; i < p->boundary_count; i++) {
        if (at >= p->boundaries[i] && at - p->boundaries[i] < FLIP_HEADER) return 1;
    }
    return 0;
}

static void change_session(const void *of)
{
    const script *s = session_script(of);
    size_t size, at;

    if (is_raw(s)) return;
    watch();

    changed.at = uncut;
    run_changed(s, &whole_mode);
    size = stage.out_size;
    for (at = 0; at < size && size <= FLIP_BYTES; at += check.share) {
        change_byte(s, &whole_mode, at);
        if (is_in_header(&stage, at)) change_byte(s, &bytes_mode, at);
    }
}

/// All of it ///

static int is_changed(const script *s)
{
    return !is_raw(s) && s->used <= FLIP_SCRIPT;
}

static void sessions_use_every_message(void)
{
    static vocabulary all;

    hear_sessions(&all, is_changed);
    check_whole_protocol(&all);
}

// A row that nothing meets would only hide a fault.
static void every_row_of_the_tables_is_met(void)
{
    size_t i;

    for (i = 0; i < FATES; i++) {
        snprintf(check.where, sizeof check.where, "fate of %s", fates[i].rule);
        CHECK(fate_met[i] > 0);
    }
    for (i = 0; i < CHOICES; i++) {
        snprintf(check.where, sizeof check.where, "choice: %s", choices[i].why);
        CHECK(choice_met[i] > 0);
    }
}

static void flips_are_legal_and_illegal(void)
{
    printf("# flips: %lu legal, %lu illegal, %lu fail a request only, %lu are overlooked\n",
           counts.legal, counts.illegal, counts.failed, counts.overlooked);
    CHECK(counts.legal > 0);
    CHECK(counts.illegal > 0);
    CHECK(counts.failed > 0);
    CHECK(counts.overlooked > 0);
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(sessions_use_every_message);
    every_session("flips_of_", change_session);
    if (argc > 1) return check_end();
    // Only after all of the sessions can it be told.
    if (check.every * check.share == 1)
        CHECK_CASE(every_row_of_the_tables_is_met); // it sums up the others
    CHECK_CASE(flips_are_legal_and_illegal);
    return check_end();
}
