// The judge of sessions, judged: good sessions have no finding, and for each rule there is a
// session that breaks it once, and only it.  Every session is fed in several cuts.
//
// Sessions are written as words:
//   WORD=a,b,c    writes a header with these fields; its side gets the words that follow
//   ( ... )       after a header that tells a length: what the length covers
//   u8= u16= u32= u64=        a number          s=TEXT    text, without length
//   f=N,B         N bytes of value B            d=N       N bytes of data
//   e=N           N extents of one byte
//   !             the next message is the one that breaks the rule
//   eof           the server closes             end       the client closes
//   tls           what follows is decrypted
// Numbers may be names, and sums of both with '+'.  Words in capitals are macros.
#include "check.h"
#include "checker.h"

enum { OF_CLIENT, OF_SERVER, SERVER_END, CLIENT_END, TLS };

enum { MOST_PARTS = 256, MOST_BYTES = 20 << 20 };

typedef struct part {
    int kind;
    size_t from;
    size_t to;
} part;

static struct {
    unsigned char *bytes;
    size_t size;
    part parts[MOST_PARTS];
    size_t count;
    uint64_t sent[2];
    uint64_t mark[2];
    size_t open; // where the length to be filled in stands, and its width
    size_t open_width;
} session;

static void write_byte(unsigned value)
{
    CHECK(session.size < MOST_BYTES);
    CHECK(session.count > 0 && session.parts[session.count - 1].kind <= OF_SERVER);
    session.bytes[session.size++] = (unsigned char)value;
    session.parts[session.count - 1].to++;
    session.sent[session.parts[session.count - 1].kind]++;
}

static void write_number(uint64_t value, size_t width)
{
    while (width-- > 0) {
        write_byte((unsigned)(value >> 8 * width) & 0xff);
    }
}

static void begin_part(int kind)
{
    CHECK(session.count < MOST_PARTS);
    session.parts[session.count].kind = kind;
    session.parts[session.count].from = session.size;
    session.parts[session.count].to = session.size;
    session.count++;
}

static const struct {
    const char *name;
    uint64_t value;
} names[] = {
    {"EXPORT_NAME", 1},
    {"ABORT", 2},
    {"LIST", 3},
    {"STARTTLS", 5},
    {"INFO", 6},
    {"GO", 7},
    {"STRUCTURED", 8},
    {"LIST_META", 9},
    {"SET_META", 10},
    {"EXTENDED", 11},
    {"ACK", 1},
    {"SERVER", 2},
    {"REP_INFO", 3},
    {"META", 4},
    {"UNSUP", 0x80000001},
    {"POLICY", 0x80000002},
    {"INVALID", 0x80000003},
    {"TLS_REQD", 0x80000005},
    {"SHUTDOWN", 0x80000007},
    {"SIZE_REQD", 0x80000008},
    {"EXT_REQD", 0x8000000a},
    {"READ", 0},
    {"WRITE", 1},
    {"DISC", 2},
    {"FLUSH", 3},
    {"TRIM", 4},
    {"CACHE", 5},
    {"ZEROES", 6},
    {"STATUS", 7},
    {"FUA", 1},
    {"NO_HOLE", 2},
    {"DF", 4},
    {"REQ_ONE", 8},
    {"FAST_ZERO", 16},
    {"PAYLOAD", 32},
    {"DONE", 1},
    {"NONE", 0},
    {"DATA", 1},
    {"HOLE", 2},
    {"BLOCKS", 5},
    {"BLOCKS_EXT", 6},
    {"ERROR", 0x8001},
    {"ERROR_OFFSET", 0x8002},
    {"M", 1 << 20},
    {"ALL", 0xced},
    {"NO_DF", 0xc6d},
    {"ALL_EXT", 0x1ced},
};

static uint64_t read_term(const char **text)
{
    size_t size = strspn(*text, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_");
    uint64_t value;
    size_t i;
    char *end;

    for (i = 0; size > 0 && i < sizeof names / sizeof *names; i++) {
        if (strlen(names[i].name) == size && memcmp(names[i].name, *text, size) == 0) {
            *text += size;
            return names[i].value;
        }
    }
    value = strtoull(*text, &end, 0);
    CHECK(end != *text);
    *text = end;
    return value;
}

static uint64_t read_number(const char **text)
{
    uint64_t value = read_term(text);

    while (**text == '+') {
        *text += 1;
        value += read_term(text);
    }
    return value;
}

// The headers: their side, their fields as widths in bytes with the magics in front, and the
// width of the length that "( ... )" fills in at the end.
typedef struct header {
    const char *name;
    int kind;
    const char *magic; // in hexadecimal
    const char *widths;
    size_t length_width;
} header;

static const header headers[] = {
    {"new", OF_SERVER, "4e42444d4147494349484156454f5054", "2", 0},
    {"old", OF_SERVER, "4e42444d414749430000420281861253", "844", 0},
    {"cflags", OF_CLIENT, "", "4", 0},
    {"opt", OF_CLIENT, "49484156454f5054", "4", 4},
    {"option", OF_CLIENT, "49484156454f5054", "44", 0},
    {"rep", OF_SERVER, "0003e889045565a9", "44", 4},
    {"req", OF_CLIENT, "25609513", "22884", 0},
    {"xreq", OF_CLIENT, "21e41c71", "22888", 0},
    {"simple", OF_SERVER, "67446698", "48", 0},
    {"chunk", OF_SERVER, "668e33ef", "228", 4},
    {"xchunk", OF_SERVER, "6e8a278c", "2288", 8},
    {"client", OF_CLIENT, "", "", 0},
    {"server", OF_SERVER, "", "", 0},
};

static void write_magic(const char *magic)
{
    for (; *magic; magic += 2) {
        char pair[3] = {magic[0], magic[1], '\0'};

        write_byte((unsigned)strtoul(pair, NULL, 16));
    }
}

static void write_header(const header *h, const char *text)
{
    const char *width;

    begin_part(h->kind);
    write_magic(h->magic);
    for (width = h->widths; *width; width++) {
        write_number(read_number(&text), (size_t)(*width - '0'));
        CHECK(*text == (width[1] ? ',' : '\0'));
        text += *text == ',';
    }
    session.open = session.size;
    session.open_width = h->length_width;
    write_number(0, h->length_width);
}

static void close_length(void)
{
    uint64_t length = session.size - session.open - session.open_width;
    size_t i;

    for (i = 0; i < session.open_width; i++) {
        unsigned char *at = session.bytes + session.open + session.open_width - 1 - i;

        *at = (unsigned char)(length >> 8 * i & 0xff);
    }
}

// The export "x" of 1 MiB, in the five ways that tests begin with.
static const struct {
    const char *name;
    const char *text;
} macros[] = {
    {"FIXED", "new=3 cflags=3"},
    {"BYE", "req=0,DISC,99,0,0 end"},
    {"XBYE", "xreq=0,DISC,99,0,0 end"},
    {"LEAVE", "opt=ABORT ( ) rep=ABORT,ACK ( ) end"},
    {"OLD", "old=M,0xc6d,0 f=120,0"},
    {"ASK", "opt=GO ( u32=1 s=x u16=1 u16=3 )"},
    {"SIZES", "rep=GO,REP_INFO ( u16=3 u32=512 u32=4096 u32=0x2000000 )"},
    {"EXPORT", "rep=GO,REP_INFO ( u16=0 u64=M u16=ALL )"},
    {"ENTER", "rep=GO,ACK ( )"},
    {"STRUCTURE", "opt=STRUCTURED ( ) rep=STRUCTURED,ACK ( )"},
    {"EXTEND", "opt=EXTENDED ( ) rep=EXTENDED,ACK ( )"},
    {"SELECT", "opt=SET_META ( u32=1 s=x u32=2 u32=15 s=base:allocation u32=6 s=qemu:d )"
               " rep=SET_META,META ( u32=1 s=base:allocation ) rep=SET_META,META ( u32=2 s=qemu:d )"
               " rep=SET_META,ACK ( )"},
    {"SIMPLE", "FIXED ASK rep=GO,REP_INFO ( u16=0 u64=M u16=NO_DF ) SIZES ENTER"},
    {"STRUCT", "FIXED STRUCTURE SELECT ASK EXPORT SIZES ENTER"},
    {"WIDE", "FIXED EXTEND SELECT ASK rep=GO,REP_INFO ( u16=0 u64=M u16=ALL_EXT ) SIZES ENTER"},
    {"UNSIZED", "FIXED STRUCTURE opt=GO ( u32=1 s=x u16=0 ) EXPORT ENTER"},
    {"ASK_READ_ONLY", "FIXED ASK rep=GO,REP_INFO ( u16=0 u64=M u16=NO_DF+2 ) ENTER"},
    {"ASK_POOR", "FIXED STRUCTURE ASK rep=GO,REP_INFO ( u16=0 u64=M u16=0x41 ) ENTER"},
    {"ASK_BARE", "FIXED STRUCTURE ASK rep=GO,REP_INFO ( u16=0 u64=M u16=0x1 ) ENTER"},
    {"BEGUN", "server u64=0x3e889045565a9"},
    {"ERRING", "server u32=0x668e33ef u16=1 u16=ERROR u64=1"},
    {"TELLING", "server u32=0x668e33ef u16=0 u16=BLOCKS u64=1"},
    {"STATUS_1", "chunk=0,BLOCKS,1 ( u32=1 u32=4096 u32=0 )"},
    {"STATUS_2", "chunk=DONE,BLOCKS,1 ( u32=2 u32=4096 u32=0 )"},
    {"XSTATUS_2", "xchunk=DONE,BLOCKS_EXT,1,0 ( u32=2 u32=1 u64=4096 u64=0 )"},
};

static void write_words(const char *text);

static int write_value(const char *word, const char *text)
{
    uint64_t count;

    if (strcmp(word, "s") == 0) {
        for (; *text; text++) {
            write_byte((unsigned char)*text);
        }
        return 1;
    }
    if (!strchr("ufde", word[0]) || (word[0] != 'u' && word[1])) return 0;
    count = read_number(&text);
    if (word[0] == 'u') {
        write_number(count, strtoul(word + 1, NULL, 10) / 8);
        return 1;
    }
    for (; count > 0 && word[0] == 'e'; count--) {
        write_number(UINT64_C(1) << 32, 8);
    }
    for (; count > 0; count--) {
        write_byte(word[0] == 'f' ? (unsigned)strtoul(text + 1, NULL, 0) : (unsigned)count & 0xff);
    }
    return 1;
}

static int write_macro(const char *word)
{
    size_t i;

    for (i = 0; i < sizeof macros / sizeof *macros; i++) {
        if (strcmp(word, macros[i].name) == 0) {
            write_words(macros[i].text);
            return 1;
        }
    }
    return 0;
}

static int write_event(const char *word)
{
    static const char *const events[] = {"eof", "end", "tls"};
    int i;

    if (strcmp(word, "!") == 0) {
        memcpy(session.mark, session.sent, sizeof session.mark);
        return 1;
    }
    if (strcmp(word, "(") == 0) return 1;
    if (strcmp(word, ")") == 0) {
        close_length();
        return 1;
    }
    for (i = 0; i < 3; i++) {
        if (strcmp(word, events[i]) == 0) {
            begin_part(SERVER_END + i);
            return 1;
        }
    }
    return 0;
}

static int write_named(const char *word, const char *text)
{
    size_t i;

    for (i = 0; i < sizeof headers / sizeof *headers; i++) {
        if (strcmp(word, headers[i].name) == 0) {
            write_header(&headers[i], text);
            return 1;
        }
    }
    return 0;
}

static void write_word(char *word)
{
    char *text = strchr(word, '=');

    if (!text) {
        if (!write_event(word) && !write_macro(word) && !write_named(word, "")) {
            check_fail(__FILE__, __LINE__, "no such word: %s", word);
        }
        return;
    }
    *text++ = '\0';
    if (!write_named(word, text) && !write_value(word, text)) {
        check_fail(__FILE__, __LINE__, "no such word: %s", word);
    }
}

static void write_words(const char *text)
{
    char word[200];

    while (*text) {
        size_t size = strcspn(text, " ");

        CHECK(size < sizeof word);
        memcpy(word, text, size);
        word[size] = '\0';
        if (size > 0) write_word(word);
        text += size + (text[size] == ' ');
    }
}

static void write_session(const char *text)
{
    memset(session.sent, 0, sizeof session.sent);
    memset(session.mark, 0, sizeof session.mark);
    session.size = 0;
    session.count = 0;
    write_words(text);
}

// --- feeding

enum { CUT_NOWHERE, CUT_EVERYWHERE, CUT_AT_RANDOM };

// Bytes come from a block of their own size, so that reading past a piece is seen.
static void feed_piece(checker *k, int kind, const unsigned char *bytes, size_t size)
{
    unsigned char *copy = (unsigned char *)malloc(size);

    CHECK(copy != NULL);
    memcpy(copy, bytes, size);
    if (kind == OF_CLIENT) {
        checker_client(k, copy, size);
    } else {
        checker_server(k, copy, size);
    }
    free(copy);
}

static size_t piece_size(int cut, size_t left)
{
    size_t size = cut == CUT_EVERYWHERE ? 1 : cut == CUT_NOWHERE ? left : 1 + check_random(9);

    return size < left ? size : left;
}

static void feed_part(checker *k, const part *p, int cut)
{
    size_t at = p->from;

    if (p->kind == SERVER_END) {
        checker_server_end(k);
    } else if (p->kind == CLIENT_END) {
        checker_end(k);
    } else if (p->kind == TLS) {
        checker_tls(k);
    } else if (at == p->to) {
        checker_client(k, NULL, 0);
    }
    while (at < p->to) {
        size_t size = piece_size(cut, p->to - at);

        feed_piece(k, p->kind, session.bytes + at, size);
        at += size;
    }
}

// Without cuts, neighbouring parts of one side come as one piece.
static void join_parts(void)
{
    size_t i;
    size_t kept = 0;

    for (i = 1; i < session.count; i++) {
        part *last = &session.parts[kept];

        if (session.parts[i].kind == last->kind && last->kind <= OF_SERVER) {
            last->to = session.parts[i].to;
        } else {
            session.parts[++kept] = session.parts[i];
        }
    }
    session.count = kept + 1;
}

static void feed_parts(checker *k, int cut)
{
    size_t i;

    for (i = 0; i < session.count; i++) {
        feed_part(k, &session.parts[i], cut);
    }
}

static void feed(checker *k, int cut)
{
    checker_begin(k);
    feed_parts(k, cut);
}

typedef struct bad_row {
    checker_rule rule;
    const char *text;
    const char *also; // NULL, or the rule that the other side must break first
} bad_row;

static const bad_row *broken; // NULL: a good session

// What was found goes into a failure.
static void note_findings(const checker *k, int cut)
{
    int list;

    snprintf(check.where, sizeof check.where, "cut %d", cut);
    for (list = 0; list < CHECKER_LISTS; list++) {
        size_t used = strlen(check.where);

        if (k->count[list] == 0) continue;
        snprintf(check.where + used, sizeof check.where - used, ", %s at %llu",
                 k->found[list][0].rule, (unsigned long long)k->found[list][0].position);
    }
}

static void look_at_rule(const checker *k)
{
    int list = checker_rules[broken->rule].list;

    CHECK(k->count[list] == 1);
    CHECK(strcmp(k->found[list][0].rule, checker_rules[broken->rule].name) == 0);
    CHECK_EQUAL(k->found[list][0].position,
                session.mark[list < CHECKER_SERVER ? OF_CLIENT : OF_SERVER]);
}

static void look(const checker *k, int cut)
{
    unsigned total = 0;
    int others = 0;
    int list;

    note_findings(k, cut);
    for (list = 0; list < CHECKER_LISTS; list++) {
        total += k->count[list];
        others += broken && broken->also && k->count[list] == 1 &&
                  strcmp(k->found[list][0].rule, broken->also) == 0;
    }
    CHECK_EQUAL(others, broken && broken->also);
    CHECK_EQUAL(total, (broken != NULL) + others);
    if (broken) look_at_rule(k);
}

static void judge_cut(int cut)
{
    checker k;

    feed(&k, cut);
    look(&k, cut);
    checker_free(&k);
}

static void judge(const char *text)
{
    int i;

    write_session(text);
    judge_cut(CUT_NOWHERE);
    judge_cut(CUT_EVERYWHERE);
    for (i = session.size > 1 << 20 ? 7 : 0; i < 8; i++) {
        judge_cut(CUT_AT_RANDOM);
    }
    join_parts();
    judge_cut(CUT_NOWHERE);
}

// --- good sessions

typedef struct good_row {
    const char *name;
    const char *text;
} good_row;

static const good_row good[] = {
    {"good_oldstyle", "OLD req=0,READ,1,0,512 simple=0,1 d=512 BYE"},
    {"good_oldstyle_unwanted", "OLD end"},
    {"good_newstyle", "new=2 cflags=2 opt=EXPORT_NAME ( s=x ) server u64=M u16=1"
                      " req=0,WRITE,7,512,512 d=512 simple=0,7 BYE"},
    {"good_newstyle_unwanted", "new=0 cflags=0 end"},
    {"good_zeroes", "new=1 cflags=1 opt=GO ( u32=1 s=x u16=0 ) rep=GO,UNSUP ( )"
                    " opt=EXPORT_NAME ( s=x ) server u64=M u16=1 f=124,0 BYE"},
    {"good_export_refused", "new=0 cflags=0 opt=EXPORT_NAME ( s=x ) eof end"},
    {"good_list", "FIXED opt=LIST ( ) rep=LIST,SERVER ( u32=1 s=x )"
                  " rep=LIST,SERVER ( u32=1 s=y s=About ) rep=LIST,ACK ( ) LEAVE"},
    {"good_abort_unanswered", "FIXED opt=ABORT ( ) eof end"},
    {"good_shutdown_in_haggling", "FIXED opt=LIST ( ) rep=LIST,SHUTDOWN ( s=bye ) LEAVE"},
    {"good_raw_error", "FIXED opt=LIST ( ) rep=LIST,0x800000ff ( s=no ) LEAVE"},
    {"good_info_then_go", "FIXED opt=INFO ( u32=1 s=x u16=1 u16=3 )"
                          " rep=INFO,REP_INFO ( u16=0 u64=M u16=0x1 )"
                          " rep=INFO,REP_INFO ( u16=3 u32=1 u32=4096 u32=0x2000000 )"
                          " rep=INFO,ACK ( ) ASK"
                          " rep=GO,REP_INFO ( u16=3 u32=1 u32=4096 u32=0x2000000 )"
                          " rep=GO,REP_INFO ( u16=0 u64=M u16=0x1 ) ENTER BYE"},
    {"good_info_texts", "FIXED opt=INFO ( u32=0 u16=3 u16=1 u16=2 u16=77 )"
                        " rep=INFO,REP_INFO ( u16=0 u64=M u16=0x1 )"
                        " rep=INFO,REP_INFO ( u16=1 s=x ) rep=INFO,REP_INFO ( u16=2 s=About )"
                        " rep=INFO,REP_INFO ( u16=77 d=9 ) rep=INFO,ACK ( ) LEAVE"},
    {"good_list_meta", "FIXED STRUCTURE opt=LIST_META ( u32=1 s=x u32=1 u32=5 s=base: )"
                       " rep=LIST_META,META ( u32=0 s=base:allocation ) rep=LIST_META,ACK ( )"
                       " LEAVE"},
    {"good_early_refusal", "FIXED STRUCTURE option=SET_META,17 u32=1 rep=SET_META,POLICY ( )"
                           " client s=x u32=1 u32=4 s=x-a: LEAVE"},
    {"good_tls", "FIXED opt=STARTTLS ( ) rep=STARTTLS,ACK ( ) server d=90 client d=40 tls"
                 " STRUCTURE ASK EXPORT ENTER BYE"},
    {"good_tls_failed", "FIXED opt=STARTTLS ( ) rep=STARTTLS,ACK ( ) client d=40 end"},
    {"good_tls_required", "FIXED opt=LIST ( ) rep=LIST,TLS_REQD ( ) opt=STARTTLS ( )"
                          " rep=STARTTLS,POLICY ( s=no ) LEAVE"},
    {"good_simple", "SIMPLE req=0,READ,1,0,512 req=FUA,WRITE,2,512,512 d=512 simple=0,2"
                    " simple=0,1 d=512 req=0,FLUSH,1,0,0 simple=0,1 req=0,TRIM,2,0,4096"
                    " req=0,CACHE,3,0,4096 simple=22,3 simple=0,2"
                    " req=NO_HOLE+FAST_ZERO,ZEROES,5,0,4096 simple=95,5 BYE"},
    {"good_read_error", "SIMPLE req=0,READ,1,0,512 simple=5,1 BYE"},
    {"good_read_broken_off", "SIMPLE req=0,READ,1,0,512 simple=0,1 d=100 eof end"},
    {"good_structured",
     "STRUCT req=DF,READ,1,0,4096 req=0,READ,2,4096,4096 chunk=0,DATA,2 ( u64=6144 d=1024 )"
     " chunk=DONE,DATA,1 ( u64=0 d=4096 ) chunk=0,HOLE,2 ( u64=4096 u32=2048 )"
     " chunk=0,DATA,2 ( u64=7168 d=1024 ) chunk=DONE,NONE,2 ( ) req=0,FLUSH,3,0,0"
     " simple=0,3 req=0,FLUSH,3,0,0 chunk=DONE,NONE,3 ( ) BYE"},
    {"good_content_in_any_order",
     "STRUCT req=0,READ,1,0,4096 chunk=0,HOLE,1 ( u64=2048 u32=512 )"
     " chunk=0,HOLE,1 ( u64=0 u32=512 ) chunk=0,HOLE,1 ( u64=3584 u32=512 )"
     " chunk=0,HOLE,1 ( u64=2560 u32=1024 ) chunk=0,HOLE,1 ( u64=1024 u32=1024 )"
     " chunk=0,HOLE,1 ( u64=512 u32=512 ) chunk=DONE,NONE,1 ( ) BYE"},
    {"good_read_errors", "STRUCT req=0,READ,1,0,4096 chunk=0,DATA,1 ( u64=0 d=2048 )"
                         " chunk=0,ERROR_OFFSET,1 ( u32=5 u16=2 s=io u64=512 )"
                         " chunk=0,DATA,1 ( u64=2048 d=1024 ) chunk=DONE,NONE,1 ( )"
                         " req=0,READ,1,0,4096 chunk=DONE,ERROR,1 ( u32=22 u16=0 )"
                         " req=0,READ,1,0,4096 chunk=DONE,0x80ff,1 ( u32=5 u16=2 s=io d=9 ) BYE"},
    {"good_status",
     "STRUCT req=0,STATUS,1,0,8192 chunk=0,BLOCKS,1 ( u32=2 u32=4096 u32=1 u32=8192 u32=0 )"
     " chunk=DONE,BLOCKS,1 ( u32=1 u32=512 u32=3 )"
     " req=REQ_ONE,STATUS,1,0,4096 STATUS_1 STATUS_2"
     " req=0,STATUS,1,0,4096 simple=22,1 BYE"},
    {"good_extended", "WIDE xreq=PAYLOAD,WRITE,1,512,512 d=512 xchunk=DONE,NONE,1,512 ( )"
                      " xreq=0,READ,1,4096,4096 xchunk=0,DATA,1,4096 ( u64=4608 d=3584 )"
                      " xchunk=DONE,HOLE,1,4096 ( u64=4096 u32=512 ) xreq=FUA,TRIM,1,0,M"
                      " xchunk=DONE,ERROR,1,0 ( u32=75 u16=3 s=big ) XBYE"},
    {"good_extended_status", "WIDE xreq=0,STATUS,1,0,4096 xchunk=0,BLOCKS_EXT,1,0 ( u32=1 u32=2"
                             " u64=512 u64=3 u64=0x100000000 u64=0 ) XSTATUS_2"
                             " xreq=PAYLOAD,STATUS,1,0,12 u64=4096 u32=2 XSTATUS_2"
                             " xreq=PAYLOAD,STATUS,1,0,12 u64=4096 u32=2"
                             " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE"},
    {"good_early_payload_error", "WIDE xreq=PAYLOAD,STATUS,1,0,12 u64=4096"
                                 " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) client u32=2 XBYE"},
    {"good_shutdown", "SIMPLE req=0,READ,1,0,512 req=0,READ,2,0,512 simple=108,1 simple=108,2 BYE"},
    {"good_under_way_at_shutdown",
     "SIMPLE req=0,READ,1,0,512 client u8=0x25 simple=108,1 client u8=0x60 u16=0x9513 u32=0"
     " u64=2 u64=0 u32=512 simple=108,2 BYE"},
    {"good_read_only", "ASK_READ_ONLY req=0,READ,1,0,512 simple=0,1 d=512 BYE"},
    {"good_server_leaves", "SIMPLE eof end"},
    {"good_reply_after_disc",
     "SIMPLE req=0,READ,1,0,512 simple=0,1 d=512 req=0,DISC,2,0,0 eof end"},
    {"good_early_close", "new=3 end"},
    {"good_utf8", "FIXED opt=GO ( u32=10 u16=0xc3a9 u8=0xe2 u16=0x82ac u8=0xf0 u8=0x9f u16=0x9880"
                  " s=z u16=0 ) rep=GO,UNSUP ( s=no ) LEAVE"},
    {"good_other_go", "FIXED opt=INFO ( u32=1 s=x u16=0 ) rep=INFO,REP_INFO ( u16=0 u64=M u16=1 )"
                      " rep=INFO,ACK ( ) opt=GO ( u32=1 s=y u16=0 )"
                      " rep=GO,REP_INFO ( u16=0 u64=512 u16=1 ) ENTER BYE"},
    {"good_registered", "FIXED STRUCTURE opt=LIST_META ( u32=0 u32=3 u32=4 s=x-a: u32=11"
                        " s=nbd-server: u32=5 s=qemu: ) rep=LIST_META,EXT_REQD ( ) LEAVE"},
    {"good_no_downgrade", "FIXED EXTEND opt=STRUCTURED ( ) rep=STRUCTURED,EXT_REQD ( ) LEAVE"},
    {"good_sizes_required", "FIXED opt=GO ( u32=0 u16=0 ) rep=GO,SIZE_REQD ( ) LEAVE"},
    {"good_limits", "FIXED STRUCTURE ASK rep=GO,REP_INFO ( u16=0 u64=0x20000 u16=1 )"
                    " rep=GO,REP_INFO ( u16=3 u32=65536 u32=65536 u32=65536 ) ENTER"
                    " req=0,WRITE,1,0,65536 d=65536 simple=0,1 req=0,READ,1,0x10000,0x10000"
                    " chunk=DONE,DATA,1 ( u64=0x10000 d=65536 ) BYE"},
    {"good_default_maximum",
     "FIXED opt=GO ( u32=256 f=256,65 u16=0 ) rep=GO,REP_INFO ( u16=0 u64=0x8000000 u16=1 ) ENTER"
     " req=0,READ,1,0,0x2000000 simple=22,1 BYE"},
    {"good_empty_texts", "FIXED opt=LIST ( ) rep=LIST,SERVER ( u32=0 ) rep=LIST,ACK ( )"
                         " opt=INFO ( u32=0 u16=0 ) rep=INFO,REP_INFO ( u16=0 u64=M u16=1 )"
                         " rep=INFO,REP_INFO ( u16=2 ) rep=INFO,REP_INFO ( u16=1 )"
                         " rep=INFO,REP_INFO ( u16=4 ) rep=INFO,REP_INFO ( u16=32 )"
                         " rep=INFO,REP_INFO ( u16=32 ) rep=INFO,ACK ( ) LEAVE"},
    {"good_status_of_all", "WIDE xreq=PAYLOAD,STATUS,1,0,8 u64=512"
                           " xchunk=0,BLOCKS_EXT,1,0 ( u32=1 u32=1 u64=512 u64=0 )"
                           " xchunk=DONE,BLOCKS_EXT,1,0 ( u32=2 u32=1 u64=512"
                           " u64=0xf000000000000000 ) XBYE"},
    {"good_contexts_stay", "FIXED STRUCTURE SELECT opt=LIST ( ) rep=LIST,POLICY ( ) ASK EXPORT"
                           " ENTER req=0,STATUS,1,0,512 STATUS_1 STATUS_2 BYE"},
    {"good_oversize", "UNSIZED req=0,READ,1,0,512 chunk=0,0x80ff,1 ( u32=5 u16=0 ) server"
                      " u32=0x668e33ef u16=0 u16=0x80ff u64=1 u32=0x7fffffff end"},
};

static void run_good(const void *row)
{
    broken = NULL;
    judge(((const good_row *)row)->text);
}

// --- broken sessions

static const bad_row bad[] = {
    // The client's handshake.
    {CHECKER_speaks_first, "server u64=0x4e42444d41474943 ! cflags=0", NULL},
    {CHECKER_flags_unknown, "new=3 ! cflags=7 eof end", NULL},
    {CHECKER_flags_not_offered, "new=1 ! cflags=3 eof end", NULL},
    {CHECKER_option_magic, "FIXED ! client u64=0x49484156454f5055 u64=0", NULL},
    {CHECKER_early_message, "FIXED opt=LIST ( ) rep=LIST,SERVER ( u32=1 s=x ) ! opt=ABORT ( )",
     NULL},
    {CHECKER_early_message, "new=0 cflags=0 opt=EXPORT_NAME ( s=x ) ! req=0,READ,1,0,512", NULL},
    {CHECKER_option_not_fixed, "new=2 cflags=2 ! opt=LIST ( ) eof end", NULL},
    {CHECKER_starttls_not_fixed, "new=3 cflags=2 ! opt=STARTTLS ( ) rep=STARTTLS,POLICY ( ) eof",
     NULL},
    {CHECKER_option_data, "FIXED ! opt=LIST ( u8=0 ) rep=LIST,INVALID ( ) LEAVE", NULL},
    {CHECKER_option_data, "FIXED ! opt=STARTTLS ( u8=0 ) rep=STARTTLS,INVALID ( ) LEAVE", NULL},
    {CHECKER_option_data, "FIXED ! opt=STRUCTURED ( u8=0 ) rep=STRUCTURED,INVALID ( ) LEAVE", NULL},
    {CHECKER_option_data, "FIXED ! opt=EXTENDED ( u8=0 ) rep=EXTENDED,INVALID ( ) LEAVE", NULL},
    {CHECKER_info_layout, "FIXED ! opt=INFO ( u32=1 s=x u16=1 ) rep=INFO,INVALID ( ) LEAVE", NULL},
    {CHECKER_info_layout, "FIXED ! opt=INFO ( u32=1 u16=0 ) rep=INFO,INVALID ( ) LEAVE", NULL},
    {CHECKER_info_layout, "FIXED ! opt=GO ( u32=1 ) rep=GO,INVALID ( ) LEAVE", NULL},
    {CHECKER_info_layout, "FIXED ! opt=GO ( u32=0 u16=0 u16=1 ) rep=GO,INVALID ( ) LEAVE", NULL},
    {CHECKER_info_twice, "FIXED ! opt=GO ( u32=0 u16=3 u16=3 u16=1 u16=3 ) rep=GO,UNSUP ( ) LEAVE",
     NULL},
    {CHECKER_meta_layout,
     "FIXED STRUCTURE ! opt=SET_META ( u32=0 u32=2 u32=5 s=base: ) rep=SET_META,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_meta_layout,
     "FIXED STRUCTURE ! opt=SET_META ( u32=0 u32=1 u32=9 s=base: ) rep=SET_META,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_meta_layout,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=0 u8=1 ) rep=LIST_META,INVALID ( ) LEAVE", NULL},
    {CHECKER_meta_layout,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=3 u32=0 ) rep=LIST_META,INVALID ( ) LEAVE", NULL},
    {CHECKER_query_form,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=4 s=base )"
     " rep=LIST_META,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_query_form,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=2 s=:a )"
     " rep=LIST_META,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_string_long, "FIXED ! opt=GO ( u32=4097 f=4097,65 u16=0 ) rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_string_nul, "FIXED ! opt=GO ( u32=3 s=a u8=0 s=b u16=0 ) rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_string_utf8,
     "FIXED ! opt=GO ( u32=3 u8=0xed u8=0xa0 u8=0x80 u16=0 )"
     " rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_string_utf8, "FIXED ! opt=GO ( u32=2 u8=0xc0 u8=0x80 u16=0 ) rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_export_name_extended, "FIXED EXTEND ! opt=EXPORT_NAME ( s=x ) eof end", NULL},
    {CHECKER_export_name_block_size,
     "FIXED opt=INFO ( u32=0 u16=1 u16=3 ) rep=INFO,REP_INFO ( u16=0 u64=M u16=1 )"
     " rep=INFO,ACK ( ) ! opt=EXPORT_NAME ( ) server u64=M u16=1 BYE",
     NULL},
    {CHECKER_set_meta_without_replies,
     "FIXED ! opt=SET_META ( u32=0 u32=1 u32=5 s=base: ) rep=SET_META,INVALID ( ) LEAVE", NULL},
    {CHECKER_set_meta_without_replies,
     "FIXED EXTEND opt=STARTTLS ( ) rep=STARTTLS,ACK ( ) tls"
     " ! opt=SET_META ( u32=0 u32=1 u32=5 s=base: ) rep=SET_META,INVALID ( ) LEAVE",
     "starttls_late"},
    {CHECKER_starttls_twice,
     "FIXED opt=STARTTLS ( ) rep=STARTTLS,ACK ( ) tls"
     " ! opt=STARTTLS ( ) rep=STARTTLS,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_option_after_go, "SIMPLE ! opt=ABORT ( )", NULL},
    {CHECKER_option_after_shutdown,
     "FIXED opt=LIST ( ) rep=LIST,SHUTDOWN ( ) ! opt=LIST ( ) rep=LIST,SHUTDOWN ( ) LEAVE", NULL},
    {CHECKER_after_abort, "FIXED opt=ABORT ( ) rep=ABORT,ACK ( ) ! opt=LIST ( )", NULL},
    // Requests.
    {CHECKER_request_magic, "SIMPLE ! client u32=0x12560953 d=24", NULL},
    {CHECKER_request_kind, "SIMPLE ! xreq=0,READ,1,0,512", NULL},
    {CHECKER_request_kind, "WIDE ! req=0,READ,1,0,512", NULL},
    {CHECKER_command_unknown, "SIMPLE ! req=0,8,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_flag_unknown, "SIMPLE ! req=64,READ,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_flag_misplaced, "SIMPLE ! req=NO_HOLE,TRIM,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_flag_misplaced, "STRUCT ! req=DF,TRIM,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_flag_misplaced, "STRUCT ! req=REQ_ONE,FLUSH,1,0,0 simple=22,1 BYE", NULL},
    {CHECKER_flag_misplaced, "SIMPLE ! req=FAST_ZERO,WRITE,1,0,512 d=512 simple=22,1 BYE", NULL},
    {CHECKER_flag_misplaced,
     "WIDE ! xreq=PAYLOAD,READ,1,0,512 d=512"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_fua_not_offered, "ASK_POOR ! req=FUA,WRITE,1,0,512 d=512 simple=0,1 BYE", NULL},
    {CHECKER_df_not_offered,
     "ASK_POOR ! req=DF,READ,1,0,512"
     " chunk=DONE,DATA,1 ( u64=0 d=512 ) BYE",
     NULL},
    {CHECKER_fast_zero_not_offered, "ASK_POOR ! req=FAST_ZERO,ZEROES,1,0,512 simple=22,1 BYE",
     NULL},
    {CHECKER_payload_flag_compact, "STRUCT ! req=PAYLOAD,WRITE,1,0,512 d=512 simple=22,1 BYE",
     NULL},
    {CHECKER_write_without_payload_flag,
     "WIDE ! xreq=0,WRITE,1,0,512"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_status_payload_layout,
     "WIDE ! xreq=PAYLOAD,STATUS,1,0,10 d=10"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_flush_not_offered, "ASK_BARE ! req=0,FLUSH,1,0,0 simple=22,1 BYE", NULL},
    {CHECKER_trim_not_offered, "ASK_BARE ! req=0,TRIM,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_zeroes_not_offered, "ASK_BARE ! req=0,ZEROES,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_status_without_context, "ASK_BARE ! req=0,STATUS,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_status_without_context,
     "FIXED STRUCTURE SELECT opt=GO ( u32=1 s=y u16=0 ) EXPORT ENTER"
     " ! req=0,STATUS,1,0,512 simple=22,1 BYE",
     NULL},
    {CHECKER_status_without_context,
     "FIXED STRUCTURE SELECT opt=SET_META ( u32=1 s=x u32=1 u32=5 s=base: )"
     " rep=SET_META,INVALID ( ) ASK EXPORT ENTER ! req=0,STATUS,1,0,512 simple=22,1 BYE",
     NULL},
    {CHECKER_out_of_bounds, "SIMPLE ! req=0,READ,1,0xffe00,1024 simple=22,1 BYE", NULL},
    {CHECKER_out_of_bounds,
     "WIDE ! xreq=0,TRIM,1,512,0xfffffffffffffe00"
     " xchunk=DONE,ERROR,1,512 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_out_of_bounds,
     "WIDE ! xreq=PAYLOAD,STATUS,1,0,12 u64=M+M u32=1"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_unaligned, "SIMPLE ! req=0,READ,1,0,100 simple=22,1 BYE", NULL},
    {CHECKER_unaligned, "SIMPLE ! req=0,TRIM,1,1,512 simple=22,1 BYE", NULL},
    {CHECKER_over_maximum,
     "FIXED ASK rep=GO,REP_INFO ( u16=0 u64=0x4000 u16=1 )"
     " rep=GO,REP_INFO ( u16=3 u32=1 u32=512 u32=4096 ) ENTER"
     " ! req=0,READ,1,0,4097 simple=22,1 BYE",
     NULL},
    {CHECKER_over_maximum,
     "FIXED STRUCTURE ASK rep=GO,REP_INFO ( u16=0 u64=0x4000 u16=1 )"
     " rep=GO,REP_INFO ( u16=3 u32=1 u32=512 u32=4096 ) ENTER req=0,READ,1,0,4097 "
     "chunk=DONE,ERROR,1 ( u32=22 u16=0 )"
     " ! req=0,WRITE,1,0,4097 d=4097 simple=22,1 BYE",
     NULL},
    {CHECKER_reserved_nonzero, "SIMPLE ! req=0,FLUSH,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_reserved_nonzero, "SIMPLE ! req=0,DISC,1,512,0 end", NULL},
    {CHECKER_after_disc, "SIMPLE req=0,DISC,1,0,0 ! req=0,READ,1,0,512", NULL},
    {CHECKER_request_after_shutdown,
     "SIMPLE req=0,READ,1,0,512 simple=108,1 ! req=0,READ,2,0,512 simple=108,2 BYE", NULL},
    {CHECKER_request_after_shutdown,
     "STRUCT req=0,READ,1,0,512 chunk=DONE,ERROR,1 ( u32=108 u16=0 )"
     " ! req=0,READ,2,0,512 chunk=DONE,ERROR,2 ( u32=108 u16=0 ) BYE",
     NULL},
    {CHECKER_cut_message, "SIMPLE ! req=0,WRITE,1,0,512 d=511 end", NULL},
    {CHECKER_cut_message, "FIXED ! option=GO,9 u32=1 end", NULL},
    {CHECKER_hard_disconnect, "FIXED opt=LIST ( ) rep=LIST,UNSUP ( ) ! end", NULL},
    {CHECKER_hard_disconnect, "new=0 cflags=0 opt=EXPORT_NAME ( s=x ) ! end", NULL},
    {CHECKER_hard_disconnect, "SIMPLE req=0,READ,1,0,512 simple=5,1 ! end", NULL},
    {CHECKER_hard_disconnect, "OLD req=0,READ,1,0,512 simple=5,1 ! end", NULL},
    // What the client should do.
    {CHECKER_fixed_flag_unset, "new=3 cflags=2 ! opt=ABORT ( ) rep=ABORT,ACK ( ) end", NULL},
    {CHECKER_option_unknown, "FIXED ! opt=4 ( s=x ) rep=4,UNSUP ( ) LEAVE", NULL},
    {CHECKER_abort_data, "FIXED ! opt=ABORT ( s=x ) rep=ABORT,ACK ( ) end", NULL},
    {CHECKER_string_256, "FIXED ! opt=GO ( u32=257 f=257,65 u16=0 ) rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_query_namespace,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=2 s=a: )"
     " rep=LIST_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_go_preferred, "FIXED ! opt=EXPORT_NAME ( s=x ) server u64=M u16=1 BYE", NULL},
    {CHECKER_list_meta_without_replies,
     "FIXED ! opt=LIST_META ( u32=0 u32=0 ) rep=LIST_META,ACK ( ) LEAVE", NULL},
    {CHECKER_repeated_option, "FIXED STRUCTURE ! STRUCTURE LEAVE", NULL},
    {CHECKER_repeated_option, "FIXED EXTEND ! EXTEND LEAVE", NULL},
    {CHECKER_starttls_late, "FIXED STRUCTURE ! opt=STARTTLS ( ) rep=STARTTLS,UNSUP ( ) LEAVE",
     NULL},
    {CHECKER_fua_pointless, "SIMPLE ! req=FUA,READ,1,0,512 simple=0,1 d=512 BYE", NULL},
    {CHECKER_cache_not_offered, "ASK_BARE ! req=0,CACHE,1,0,512 simple=22,1 BYE", NULL},
    {CHECKER_write_on_read_only, "ASK_READ_ONLY ! req=0,WRITE,1,0,512 d=512 simple=1,1 BYE", NULL},
    {CHECKER_status_payload_not_offered,
     "FIXED EXTEND SELECT ASK EXPORT ENTER ! xreq=PAYLOAD,STATUS,1,0,12 u64=512 u32=1"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_status_payload_ids,
     "WIDE ! xreq=PAYLOAD,STATUS,1,0,16 u64=512 u32=1 u32=1"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_status_payload_ids,
     "WIDE ! xreq=PAYLOAD,STATUS,1,0,12 u64=512 u32=7"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_zero_length, "SIMPLE ! req=0,READ,1,0,0 simple=0,1 BYE", NULL},
    {CHECKER_unaligned_unasked,
     "FIXED opt=GO ( u32=1 s=x u16=0 ) rep=GO,REP_INFO ( u16=0 u64=M u16=1 ) SIZES ENTER"
     " ! req=0,READ,1,0,100 simple=22,1 BYE",
     NULL},
    {CHECKER_over_default_maximum,
     "FIXED opt=GO ( u32=1 s=x u16=0 ) rep=GO,REP_INFO ( u16=0 u64=0x8000000 u16=1 ) ENTER"
     " ! req=0,READ,1,0,0x2000001 simple=22,1 BYE",
     NULL},
    {CHECKER_read_over_32,
     "FIXED EXTEND ASK rep=GO,REP_INFO ( u16=0 u64=0x200000000 u16=1 ) SIZES ENTER"
     " ! xreq=0,READ,1,0,0x100000000 xchunk=DONE,ERROR,1,0 ( u32=75 u16=0 ) XBYE",
     NULL},
    {CHECKER_cookie_in_flight,
     "SIMPLE req=0,READ,1,0,512 ! req=0,READ,1,0,512"
     " simple=5,1 simple=5,1 BYE",
     NULL},
    {CHECKER_disc_in_flight, "SIMPLE req=0,READ,1,0,512 ! req=0,DISC,2,0,0 end", NULL},
    // The server's handshake.
    {CHECKER_greeting_magic, "! server u64=0x4e42444d41474943 u64=1 end", NULL},
    {CHECKER_greeting_magic, "! server u64=0x4e42444d41474944 u64=0x49484156454f5054 end", NULL},
    {CHECKER_handshake_flags, "! new=7 cflags=3 LEAVE", NULL},
    {CHECKER_oldstyle_flags, "! old=M,0x10001,0 f=120,0 end", NULL},
    {CHECKER_padding, "! old=M,0x1,0 f=119,0 u8=1 end", NULL},
    {CHECKER_padding, "new=0 cflags=0 opt=EXPORT_NAME ( s=x ) ! server u64=M u16=1 f=124,1 BYE",
     NULL},
    {CHECKER_has_flags, "! old=M,0x0,0 f=120,0 end", NULL},
    {CHECKER_has_flags, "new=2 cflags=2 opt=EXPORT_NAME ( s=x ) ! server u64=M u16=0 BYE", NULL},
    {CHECKER_df_flag, "FIXED ASK ! EXPORT ENTER BYE", NULL},
    {CHECKER_fast_zero_flag, "FIXED ASK ! rep=GO,REP_INFO ( u16=0 u64=M u16=0x801 ) ENTER BYE",
     NULL},
    {CHECKER_status_payload_flag,
     "FIXED STRUCTURE ASK ! rep=GO,REP_INFO ( u16=0 u64=M u16=0x1001 ) ENTER BYE", NULL},
    {CHECKER_unasked_reply, "FIXED ! rep=LIST,ACK ( )", NULL},
    {CHECKER_unasked_reply, "FIXED opt=ABORT ( ) rep=ABORT,ACK ( ) ! rep=ABORT,ACK ( )", NULL},
    {CHECKER_unasked_reply, "new=3 ! rep=LIST,ACK ( )", NULL},
    {CHECKER_reply_magic, "FIXED opt=LIST ( ) ! server d=20", NULL},
    {CHECKER_reply_option, "FIXED opt=LIST ( ) ! rep=GO,ACK ( )", NULL},
    {CHECKER_reply_type,
     "FIXED opt=LIST ( ) ! rep=LIST,META ( u32=1 s=a:b ) rep=LIST,ACK ( ) LEAVE", NULL},
    {CHECKER_reply_type, "FIXED opt=STARTTLS ( ) ! rep=STARTTLS,9 ( ) rep=STARTTLS,UNSUP ( ) LEAVE",
     NULL},
    {CHECKER_ack_data, "FIXED opt=LIST ( ) ! rep=LIST,ACK ( u8=0 ) LEAVE", NULL},
    {CHECKER_abort_reply, "FIXED opt=ABORT ( ) ! rep=ABORT,UNSUP ( ) end", NULL},
    {CHECKER_server_reply_layout,
     "FIXED opt=LIST ( ) ! rep=LIST,SERVER ( u32=2 s=x ) rep=LIST,ACK ( ) LEAVE", NULL},
    {CHECKER_server_reply_layout,
     "FIXED opt=LIST ( ) ! rep=LIST,SERVER ( u16=0 ) rep=LIST,ACK ( ) LEAVE", NULL},
    {CHECKER_info_reply_layout,
     "FIXED STRUCTURE ASK EXPORT ! rep=GO,REP_INFO ( u8=0 ) rep=GO,POLICY ( ) LEAVE", NULL},
    {CHECKER_info_reply_layout,
     "FIXED ASK ! rep=GO,REP_INFO ( u16=0 u64=M u16=1 u8=0 ) rep=GO,POLICY ( ) LEAVE", NULL},
    {CHECKER_info_reply_layout,
     "FIXED ASK ! rep=GO,REP_INFO ( u16=3 u64=M ) rep=GO,POLICY ( ) LEAVE", NULL},
    {CHECKER_meta_reply_layout,
     "FIXED STRUCTURE opt=LIST_META ( u32=0 u32=0 )"
     " ! rep=LIST_META,META ( u16=1 ) rep=LIST_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_ack_without_export, "FIXED ASK SIZES ! ENTER BYE", NULL},
    {CHECKER_ack_without_export, "FIXED opt=INFO ( u32=0 u16=0 ) ! rep=INFO,ACK ( ) LEAVE", NULL},
    {CHECKER_info_go_differ,
     "FIXED opt=INFO ( u32=1 s=x u16=0 ) rep=INFO,REP_INFO ( u16=0 u64=M u16=1 )"
     " rep=INFO,ACK ( ) opt=GO ( u32=1 s=x u16=0 )"
     " rep=GO,REP_INFO ( u16=0 u64=512 u16=1 ) ! ENTER BYE",
     NULL},
    {CHECKER_block_minimum,
     "FIXED STRUCTURE ASK EXPORT"
     " ! rep=GO,REP_INFO ( u16=3 u32=65537 u32=0x20000 u32=M )"
     " rep=GO,POLICY ( ) LEAVE",
     NULL},
    {CHECKER_block_minimum,
     "FIXED STRUCTURE ASK EXPORT"
     " ! rep=GO,REP_INFO ( u16=3 u32=0 u32=4096 u32=M ) ENTER BYE",
     NULL},
    {CHECKER_block_preferred,
     "FIXED STRUCTURE ASK EXPORT"
     " ! rep=GO,REP_INFO ( u16=3 u32=1 u32=256 u32=M ) ENTER BYE",
     NULL},
    {CHECKER_block_preferred,
     "FIXED STRUCTURE ASK EXPORT"
     " ! rep=GO,REP_INFO ( u16=3 u32=4096 u32=512 u32=M ) ENTER BYE",
     NULL},
    {CHECKER_block_maximum,
     "FIXED STRUCTURE ASK EXPORT"
     " ! rep=GO,REP_INFO ( u16=3 u32=1 u32=M+M u32=M ) ENTER BYE",
     NULL},
    {CHECKER_block_size_required, "FIXED ASK ! rep=GO,SIZE_REQD ( ) LEAVE", NULL},
    {CHECKER_extended_required, "FIXED EXTEND ASK ! rep=GO,EXT_REQD ( ) LEAVE", NULL},
    {CHECKER_extended_required,
     "FIXED STRUCTURE opt=SET_META ( u32=0 u32=1 u32=6 s=base:x )"
     " ! rep=SET_META,EXT_REQD ( ) LEAVE",
     NULL},
    {CHECKER_go_unsupported, "FIXED EXTEND ASK ! rep=GO,UNSUP ( ) LEAVE", NULL},
    {CHECKER_tls_required, "FIXED opt=STARTTLS ( ) ! rep=STARTTLS,TLS_REQD ( ) LEAVE", NULL},
    {CHECKER_tls_required,
     "FIXED opt=STARTTLS ( ) rep=STARTTLS,ACK ( ) tls opt=LIST ( )"
     " ! rep=LIST,TLS_REQD ( ) LEAVE",
     NULL},
    {CHECKER_context_unasked,
     "FIXED STRUCTURE opt=SET_META ( u32=0 u32=0 ) ! rep=SET_META,META ( u32=1 s=base:allocation )"
     " rep=SET_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_context_id,
     "FIXED STRUCTURE opt=SET_META ( u32=0 u32=1 u32=5 s=qemu: )"
     " rep=SET_META,META ( u32=1 s=qemu:a )"
     " ! rep=SET_META,META ( u32=1 s=qemu:b ) rep=SET_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_context_form,
     "FIXED STRUCTURE opt=LIST_META ( u32=0 u32=0 )"
     " ! rep=LIST_META,META ( u32=0 s=base ) rep=LIST_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_server_string_long, "FIXED opt=LIST ( ) ! rep=LIST,POLICY ( f=4097,65 ) LEAVE", NULL},
    {CHECKER_server_string_nul,
     "FIXED opt=LIST ( ) ! rep=LIST,SERVER ( u32=1 u8=0 ) rep=LIST,ACK ( ) LEAVE", NULL},
    {CHECKER_server_string_utf8,
     "FIXED opt=LIST ( ) ! rep=LIST,SERVER ( u32=0 u8=0xff ) rep=LIST,ACK ( ) LEAVE", NULL},
    // The server's replies.
    {CHECKER_chunk_magic, "SIMPLE req=0,READ,1,0,512 ! server u32=0x96744668 d=12 end", NULL},
    {CHECKER_reply_kind, "SIMPLE req=0,READ,1,0,512 ! chunk=DONE,DATA,1 ( u64=0 d=512 ) end", NULL},
    {CHECKER_reply_kind, "STRUCT req=0,READ,1,0,512 ! xchunk=DONE,DATA,1,0 ( u64=0 d=512 ) end",
     NULL},
    {CHECKER_reply_kind, "WIDE xreq=0,FLUSH,1,0,0 ! simple=0,1 end", NULL},
    {CHECKER_simple_read, "STRUCT req=0,READ,1,0,512 ! simple=22,1 BYE", NULL},
    {CHECKER_simple_read, "STRUCT req=0,READ,1,0,512 ! simple=0,1 d=512 end", NULL},
    {CHECKER_reply_cookie, "SIMPLE req=0,FLUSH,1,0,0 ! simple=0,2 end", NULL},
    {CHECKER_reply_cookie,
     "STRUCT req=0,FLUSH,1,0,0 chunk=DONE,NONE,1 ( )"
     " ! chunk=DONE,NONE,1 ( ) BYE",
     NULL},
    {CHECKER_reply_cookie, "STRUCT req=0,DISC,1,0,0 ! chunk=DONE,NONE,1 ( ) end", NULL},
    {CHECKER_offset_echo,
     "WIDE xreq=0,READ,1,512,512 ! xchunk=DONE,HOLE,1,0 ( u64=512 u32=512 )"
     " XBYE",
     NULL},
    {CHECKER_chunk_type, "STRUCT req=0,FLUSH,1,0,0 ! chunk=DONE,DATA,1 ( u64=0 d=512 ) end", NULL},
    {CHECKER_chunk_type, "STRUCT req=0,READ,1,0,512 ! chunk=DONE,3,1 ( d=12 ) end", NULL},
    {CHECKER_chunk_type, "STRUCT req=0,READ,1,0,512 ! chunk=DONE,BLOCKS,1 ( d=12 ) end", NULL},
    {CHECKER_chunk_type, "STRUCT req=0,STATUS,1,0,512 ! chunk=DONE,BLOCKS_EXT,1 ( d=24 ) end",
     NULL},
    {CHECKER_chunk_type, "WIDE xreq=0,STATUS,1,0,512 ! xchunk=DONE,BLOCKS,1,0 ( d=12 ) end", NULL},
    {CHECKER_chunk_type,
     "STRUCT req=0,FLUSH,1,0,0"
     " ! chunk=DONE,ERROR_OFFSET,1 ( u32=5 u16=0 u64=0 ) BYE",
     NULL},
    {CHECKER_chunk_over_maximum,
     "FIXED STRUCTURE ASK rep=GO,REP_INFO ( u16=0 u64=0x4000 u16=1 )"
     " rep=GO,REP_INFO ( u16=3 u32=1 u32=512 u32=4096 ) ENTER req=0,READ,1,0,4097"
     " ! chunk=DONE,DATA,1 ( u64=0 d=4097 ) BYE",
     NULL},
    {CHECKER_none_length, "STRUCT req=0,FLUSH,1,0,0 ! chunk=DONE,NONE,1 ( u8=0 ) end", NULL},
    {CHECKER_none_done, "STRUCT req=0,FLUSH,1,0,0 ! chunk=0,NONE,1 ( ) end", NULL},
    {CHECKER_data_length, "STRUCT req=0,READ,1,0,512 ! chunk=DONE,DATA,1 ( u64=0 ) end", NULL},
    {CHECKER_hole_length, "STRUCT req=0,READ,1,0,512 ! chunk=DONE,HOLE,1 ( u64=0 u64=512 ) end",
     NULL},
    {CHECKER_hole_empty, "STRUCT req=0,READ,1,0,512 ! chunk=DONE,HOLE,1 ( u64=0 u32=0 ) end", NULL},
    {CHECKER_content_outside,
     "STRUCT req=0,READ,1,512,512 ! chunk=DONE,HOLE,1 ( u64=0 u32=512 ) end", NULL},
    {CHECKER_content_outside,
     "STRUCT req=0,READ,1,512,512 ! chunk=DONE,DATA,1 ( u64=768 d=512 ) end", NULL},
    {CHECKER_content_overlap,
     "STRUCT req=0,READ,1,0,1024 chunk=0,DATA,1 ( u64=0 d=512 )"
     " ! chunk=DONE,DATA,1 ( u64=511 d=513 ) end",
     NULL},
    {CHECKER_content_overlap,
     "STRUCT req=0,READ,1,0,1024"
     " chunk=0,HOLE,1 ( u64=512 u32=512 ) chunk=0,HOLE,1 ( u64=0 u32=100 )"
     " ! chunk=DONE,HOLE,1 ( u64=100 u32=413 ) end",
     NULL},
    {CHECKER_content_overlap,
     "STRUCT req=0,READ,1,0,1024"
     " chunk=0,ERROR_OFFSET,1 ( u32=5 u16=0 u64=511 )"
     " ! chunk=DONE,DATA,1 ( u64=0 d=512 ) end",
     NULL},
    {CHECKER_not_covered,
     "STRUCT req=0,READ,1,0,1024 chunk=0,DATA,1 ( u64=0 d=512 )"
     " ! chunk=DONE,NONE,1 ( ) end",
     NULL},
    {CHECKER_not_covered,
     "STRUCT req=0,READ,1,0,1024 chunk=0,DATA,1 ( u64=0 d=512 )"
     " ! chunk=DONE,HOLE,1 ( u64=768 u32=256 ) end",
     NULL},
    {CHECKER_df_chunks,
     "STRUCT req=DF,READ,1,0,1024 chunk=0,DATA,1 ( u64=0 d=512 )"
     " ! chunk=DONE,DATA,1 ( u64=512 d=512 ) end",
     NULL},
    {CHECKER_df_overflow, "STRUCT req=DF,READ,1,0,65536 ! chunk=DONE,ERROR,1 ( u32=75 u16=0 ) BYE",
     NULL},
    {CHECKER_df_overflow,
     "STRUCT req=DF,READ,1,0,66048 chunk=0,DATA,1 ( u64=0 d=512 )"
     " ! chunk=DONE,ERROR,1 ( u32=75 u16=0 ) BYE",
     NULL},
    {CHECKER_df_overflow,
     "STRUCT req=DF,READ,1,0,66048 chunk=0,ERROR,1 ( u32=75 u16=0 )"
     " ! chunk=DONE,DATA,1 ( u64=0 d=512 ) BYE",
     NULL},
    {CHECKER_error_zero, "STRUCT req=0,FLUSH,1,0,0 ! chunk=DONE,ERROR,1 ( u32=0 u16=0 ) BYE", NULL},
    {CHECKER_error_length, "STRUCT req=0,FLUSH,1,0,0 ! chunk=DONE,ERROR,1 ( u32=5 ) end", NULL},
    {CHECKER_error_length,
     "STRUCT req=0,READ,1,0,512 ! chunk=DONE,ERROR_OFFSET,1 ( u32=5 u16=0 u32=0 ) end", NULL},
    {CHECKER_message_length,
     "STRUCT req=0,FLUSH,1,0,0 ! chunk=DONE,ERROR,1 ( u32=5 u16=2 s=x ) end", NULL},
    {CHECKER_message_length,
     "STRUCT req=0,READ,1,0,512 ! chunk=DONE,ERROR_OFFSET,1 ( u32=5 u16=2 s=x u64=0 ) end", NULL},
    {CHECKER_server_string_long,
     "STRUCT req=0,FLUSH,1,0,0 ! chunk=DONE,ERROR,1 ( u32=5 u16=4097 f=4097,65 ) BYE", NULL},
    {CHECKER_error_offset_outside,
     "STRUCT req=0,READ,1,0,512 ! chunk=DONE,ERROR_OFFSET,1 ( u32=5 u16=1 s=x u64=512 ) BYE", NULL},
    {CHECKER_fast_zero_enotsup, "SIMPLE req=0,ZEROES,1,0,512 ! simple=95,1 BYE", NULL},
    {CHECKER_fast_zero_enotsup,
     "STRUCT req=NO_HOLE,ZEROES,1,0,512"
     " ! chunk=DONE,ERROR,1 ( u32=95 u16=0 ) BYE",
     NULL},
    {CHECKER_status_length, "STRUCT req=0,STATUS,1,0,512 ! chunk=DONE,BLOCKS,1 ( u32=1 ) end",
     NULL},
    {CHECKER_status_length,
     "STRUCT req=0,STATUS,1,0,512 ! chunk=DONE,BLOCKS,1 ( u32=1 u32=512 u16=0 ) end", NULL},
    {CHECKER_status_length,
     "WIDE xreq=0,STATUS,1,0,512 ! xchunk=DONE,BLOCKS_EXT,1,0 ( u32=1 u32=1 u64=512 ) end", NULL},
    {CHECKER_status_count,
     "WIDE xreq=0,STATUS,1,0,512"
     " ! xchunk=0,BLOCKS_EXT,1,0 ( u32=1 u32=2 u64=512 u64=0 ) XSTATUS_2 end",
     NULL},
    {CHECKER_status_context,
     "STRUCT req=0,STATUS,1,0,512 ! chunk=DONE,BLOCKS,1 ( u32=3 u32=512 u32=0 ) end", NULL},
    {CHECKER_status_context, "WIDE xreq=PAYLOAD,STATUS,1,0,12 u64=512 u32=1 ! XSTATUS_2 end", NULL},
    {CHECKER_status_twice, "STRUCT req=0,STATUS,1,0,512 STATUS_1 ! STATUS_1 STATUS_2 end", NULL},
    {CHECKER_status_missing, "STRUCT req=0,STATUS,1,0,512 ! STATUS_2 BYE", NULL},
    {CHECKER_status_missing, "STRUCT req=0,STATUS,1,0,512 STATUS_1 ! chunk=DONE,NONE,1 ( ) BYE",
     NULL},
    {CHECKER_simple_status, "STRUCT req=0,STATUS,1,0,512 ! simple=0,1 BYE", NULL},
    {CHECKER_status_missing, "WIDE xreq=PAYLOAD,STATUS,1,0,16 u64=512 u32=1 u32=2 ! XSTATUS_2 XBYE",
     NULL},
    {CHECKER_extent_empty,
     "STRUCT req=0,STATUS,1,0,512"
     " ! chunk=0,BLOCKS,1 ( u32=1 u32=0 u32=0 ) STATUS_2 BYE",
     NULL},
    {CHECKER_extent_excess,
     "STRUCT req=0,STATUS,1,0,1024"
     " ! chunk=0,BLOCKS,1 ( u32=1 u32=1024 u32=0 u32=512 u32=1 )"
     " STATUS_2 BYE",
     NULL},
    {CHECKER_extent_one,
     "STRUCT req=REQ_ONE,STATUS,1,0,4096"
     " ! chunk=0,BLOCKS,1 ( u32=1 u32=512 u32=0 u32=512 u32=1 ) STATUS_2 BYE",
     NULL},
    {CHECKER_extent_one_long,
     "STRUCT req=REQ_ONE,STATUS,1,0,4096"
     " ! chunk=0,BLOCKS,1 ( u32=1 u32=4608 u32=0 ) STATUS_2 BYE",
     NULL},
    {CHECKER_extent_unaligned,
     "STRUCT req=0,STATUS,1,0,4096"
     " ! chunk=0,BLOCKS,1 ( u32=1 u32=100 u32=0 ) STATUS_2 BYE",
     NULL},
    {CHECKER_extent_high,
     "WIDE xreq=0,STATUS,1,0,4096"
     " ! xchunk=0,BLOCKS_EXT,1,0 ( u32=1 u32=1 u64=512 u64=0x100000000 )"
     " XSTATUS_2 XBYE",
     NULL},
    {CHECKER_server_cut_message, "SIMPLE req=0,FLUSH,1,0,0 ! server u32=0x67446698 eof end", NULL},
    {CHECKER_server_cut_message,
     "STRUCT req=0,READ,1,0,512 ! server u32=0x668e33ef u16=0 u16=1"
     " u64=1 u32=520 u64=0 d=100 eof end",
     NULL},
    {CHECKER_server_cut_message, "! server u64=0x4e42444d41474943 eof end", NULL},
    {CHECKER_hang_up, "FIXED opt=LIST ( ) ! eof end", NULL},
    {CHECKER_error_trailing,
     "STRUCT req=0,FLUSH,1,0,0 ! chunk=DONE,ERROR,1 ( u32=5 u16=0 u8=1 ) end", NULL},
    {CHECKER_error_trailing,
     "STRUCT req=0,READ,1,0,512 ! chunk=DONE,ERROR_OFFSET,1 ( u32=5 u16=0 u64=0 u8=1 ) end", NULL},
    // What begins is impossible, whatever would follow.
    {CHECKER_server_string_long, "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=POLICY u32=4097 eof end",
     NULL},
    {CHECKER_server_string_long, "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=POLICY u32=4097 end",
     NULL},
    {CHECKER_reply_type, "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=7 u32=1 end", NULL},
    {CHECKER_ack_data, "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=ACK u32=1 end", NULL},
    {CHECKER_server_reply_layout, "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=SERVER u32=9 u32=6 end",
     NULL},
    {CHECKER_server_string_long,
     "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=SERVER u32=8197 u32=4096 end", NULL},
    {CHECKER_server_string_long,
     "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=SERVER u32=4102 u32=4097 end", NULL},
    {CHECKER_server_string_long,
     "FIXED opt=LIST ( ) ! BEGUN u32=LIST u32=SERVER u32=4102 u32=1 end", NULL},
    {CHECKER_server_string_long,
     "FIXED STRUCTURE opt=LIST_META ( u32=0 u32=0 )"
     " ! BEGUN u32=LIST_META u32=META u32=4101 end",
     NULL},
    {CHECKER_meta_reply_layout,
     "FIXED STRUCTURE opt=LIST_META ( u32=0 u32=0 ) ! BEGUN u32=LIST_META u32=META u32=3 end",
     NULL},
    {CHECKER_info_reply_layout, "FIXED ASK ! BEGUN u32=GO u32=REP_INFO u32=1 end", NULL},
    {CHECKER_info_reply_layout, "FIXED ASK ! BEGUN u32=GO u32=REP_INFO u32=13 u16=0 end", NULL},
    {CHECKER_info_reply_layout, "FIXED ASK ! BEGUN u32=GO u32=REP_INFO u32=15 u16=3 end", NULL},
    {CHECKER_server_string_long, "FIXED ASK ! BEGUN u32=GO u32=REP_INFO u32=4099 u16=2 end", NULL},
    {CHECKER_error_length, "STRUCT req=0,FLUSH,1,0,0 ! ERRING u32=5 end", NULL},
    {CHECKER_error_zero, "STRUCT req=0,FLUSH,1,0,0 ! ERRING u32=16 u32=0 u16=10 end", NULL},
    {CHECKER_message_length, "STRUCT req=0,FLUSH,1,0,0 ! ERRING u32=16 u32=5 u16=11 end", NULL},
    {CHECKER_error_trailing, "STRUCT req=0,FLUSH,1,0,0 ! ERRING u32=16 u32=5 u16=9 end", NULL},
    {CHECKER_server_string_long, "STRUCT req=0,FLUSH,1,0,0 ! ERRING u32=4103 u32=5 u16=4097 end",
     NULL},
    {CHECKER_server_string_long, "STRUCT req=0,FLUSH,1,0,0 ! ERRING u32=4103 u32=5 end", NULL},
    {CHECKER_status_length, "STRUCT req=0,STATUS,1,0,4096 ! TELLING u32=13 u32=1 end", NULL},
    {CHECKER_status_context, "STRUCT req=0,STATUS,1,0,4096 ! TELLING u32=12 u32=3 end", NULL},
    {CHECKER_extent_one, "STRUCT req=REQ_ONE,STATUS,1,0,4096 ! TELLING u32=20 u32=1 end", NULL},
    {CHECKER_extent_empty, "STRUCT req=0,STATUS,1,0,4096 ! TELLING u32=20 u32=1 u32=0 u32=0 end",
     NULL},
    {CHECKER_status_count,
     "WIDE xreq=0,STATUS,1,0,512 ! server u32=0x6e8a278c u16=0 u16=BLOCKS_EXT u64=1 u64=0 u64=24"
     " u32=1 u32=2 end",
     NULL},
    {CHECKER_content_outside,
     "STRUCT req=0,READ,1,0,512 ! server u32=0x668e33ef u16=1 u16=DATA u64=1 u32=521 end", NULL},
    // One side may go wrong here only after the other.
    {CHECKER_request_after_bad_chunk,
     "STRUCT req=0,FLUSH,1,0,0 chunk=DONE,3,1 ( ) ! req=0,FLUSH,1,0,0 simple=0,1 BYE",
     "chunk_type"},
    {CHECKER_request_after_bad_chunk,
     "STRUCT req=0,READ,1,0,512 chunk=0,HOLE,1 ( u64=0 u32=0 ) ! req=0,FLUSH,2,0,0 simple=0,2"
     " chunk=DONE,NONE,1 ( ) BYE",
     "hole_empty"},
    {CHECKER_bad_flags_tolerated, "new=3 cflags=7 opt=LIST ( ) ! rep=LIST,ACK ( ) LEAVE",
     "flags_unknown"},
    {CHECKER_bad_meta_accepted,
     "FIXED STRUCTURE opt=SET_META ( u32=0 )"
     " ! rep=SET_META,ACK ( ) LEAVE",
     "meta_layout"},
    {CHECKER_starttls_again,
     "FIXED opt=STARTTLS ( ) rep=STARTTLS,ACK ( ) tls"
     " opt=STARTTLS ( ) ! rep=STARTTLS,UNSUP ( ) LEAVE",
     "starttls_twice"},
    {CHECKER_starttls_again,
     "FIXED opt=STARTTLS ( ) rep=STARTTLS,ACK ( ) tls"
     " opt=STARTTLS ( ) ! rep=STARTTLS,ACK ( ) end",
     "starttls_twice"},
    {CHECKER_read_only_success, "ASK_READ_ONLY req=0,WRITE,1,0,512 d=512 ! simple=0,1 BYE",
     "write_on_read_only"},
    // Other ways to break the same rules.
    {CHECKER_string_utf8, "FIXED ! opt=GO ( u32=1 u8=0xff u16=0 ) rep=GO,INVALID ( ) LEAVE", NULL},
    {CHECKER_string_utf8, "FIXED ! opt=GO ( u32=1 u8=0x80 u16=0 ) rep=GO,INVALID ( ) LEAVE", NULL},
    {CHECKER_string_utf8, "FIXED ! opt=GO ( u32=1 u8=0xc3 u16=0 ) rep=GO,INVALID ( ) LEAVE", NULL},
    {CHECKER_string_utf8, "FIXED ! opt=GO ( u32=2 u8=0xc3 s=a u16=0 ) rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_string_utf8, "FIXED ! opt=GO ( u32=4 u32=0xf4908080 u16=0 ) rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_query_form,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=4 s=x-a u8=9 )"
     " rep=LIST_META,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_query_form,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=5 s=x- u8=0x7f s=:a )"
     " rep=LIST_META,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_request_magic, "OLD ! opt=ABORT ( )", NULL},
    {CHECKER_block_minimum,
     "FIXED STRUCTURE ASK EXPORT"
     " ! rep=GO,REP_INFO ( u16=3 u32=0x20000 u32=0x20000 u32=M ) ENTER BYE",
     NULL},
    {CHECKER_block_preferred,
     "FIXED STRUCTURE ASK EXPORT"
     " ! rep=GO,REP_INFO ( u16=3 u32=1 u32=3000 u32=M ) ENTER BYE",
     NULL},
    {CHECKER_extended_required,
     "FIXED EXTEND opt=SET_META ( u32=0 u32=1 u32=6 s=qemu:x )"
     " ! rep=SET_META,EXT_REQD ( ) LEAVE",
     NULL},
    {CHECKER_error_value, "SIMPLE req=0,FLUSH,1,0,0 ! simple=0x101,1 BYE", NULL},
    {CHECKER_zero_length, "STRUCT ! req=0,READ,1,0,0 chunk=DONE,NONE,1 ( ) BYE", NULL},
    {CHECKER_command_unknown, "STRUCT ! req=0,8,1,0,512 chunk=DONE,ERROR,1 ( u32=22 u16=0 ) BYE",
     NULL},
    {CHECKER_status_payload_layout,
     "WIDE ! xreq=PAYLOAD,STATUS,1,0,4 d=4"
     " xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) XBYE",
     NULL},
    {CHECKER_status_payload_layout,
     "WIDE ! xreq=PAYLOAD,STATUS,1,0,10 xchunk=DONE,ERROR,1,0 ( u32=22 u16=0 ) client d=10 XBYE",
     NULL},
    {CHECKER_string_256, "FIXED ! opt=GO ( u32=4096 f=4096,65 u16=0 ) rep=GO,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_query_form,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=0 )"
     " rep=LIST_META,INVALID ( ) LEAVE",
     NULL},
    {CHECKER_query_namespace,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=3 s=x-: )"
     " rep=LIST_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_query_namespace,
     "FIXED STRUCTURE ! opt=LIST_META ( u32=0 u32=1 u32=4 s=abc: )"
     " rep=LIST_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_status_without_context,
     "FIXED STRUCTURE opt=SET_META ( u32=1 s=x u32=0 ) rep=SET_META,ACK ( ) ASK EXPORT ENTER"
     " ! req=0,STATUS,1,0,512 simple=22,1 BYE",
     NULL},
    {CHECKER_go_preferred,
     "FIXED opt=LIST ( ) rep=LIST,UNSUP ( )"
     " ! opt=EXPORT_NAME ( s=x ) server u64=M u16=1 BYE",
     NULL},
    {CHECKER_content_overlap,
     "STRUCT req=0,READ,1,0,1024"
     " chunk=0,ERROR_OFFSET,1 ( u32=5 u16=0 u64=512 )"
     " ! chunk=DONE,DATA,1 ( u64=512 d=512 ) end",
     NULL},
    {CHECKER_reply_type, "FIXED opt=LIST ( ) ! rep=LIST,7 ( ) rep=LIST,ACK ( ) LEAVE", NULL},
    {CHECKER_server_string_nul,
     "FIXED ASK ! rep=GO,REP_INFO ( u16=1 u8=0 ) rep=GO,POLICY ( ) LEAVE", NULL},
    {CHECKER_server_string_nul,
     "FIXED ASK ! rep=GO,REP_INFO ( u16=2 u8=0 ) rep=GO,POLICY ( ) LEAVE", NULL},
    // What the server should do.
    {CHECKER_server_string_256, "FIXED opt=LIST ( ) ! rep=LIST,POLICY ( f=257,65 ) LEAVE", NULL},
    {CHECKER_context_namespace,
     "FIXED STRUCTURE opt=LIST_META ( u32=0 u32=0 )"
     " ! rep=LIST_META,META ( u32=0 s=a:b ) rep=LIST_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_info_reply_twice, "FIXED STRUCTURE ASK EXPORT ! EXPORT ENTER BYE", NULL},
    {CHECKER_size_unaligned, "FIXED ASK rep=GO,REP_INFO ( u16=0 u64=1000 u16=1 ) SIZES ! ENTER BYE",
     NULL},
    {CHECKER_maximum_small,
     "FIXED STRUCTURE ASK EXPORT"
     " rep=GO,REP_INFO ( u16=3 u32=1 u32=512 u32=4096 ) ! ENTER BYE",
     NULL},
    {CHECKER_list_context_id,
     "FIXED STRUCTURE opt=LIST_META ( u32=0 u32=0 )"
     " ! rep=LIST_META,META ( u32=1 s=base:allocation ) rep=LIST_META,ACK ( ) LEAVE",
     NULL},
    {CHECKER_reply_flags, "STRUCT req=0,FLUSH,1,0,0 ! chunk=3,NONE,1 ( ) BYE", NULL},
    {CHECKER_error_value, "SIMPLE req=0,FLUSH,1,0,0 ! simple=7,1 BYE", NULL},
    {CHECKER_error_twice,
     "STRUCT req=0,FLUSH,1,0,0 chunk=0,ERROR,1 ( u32=5 u16=0 )"
     " ! chunk=DONE,ERROR,1 ( u32=5 u16=0 ) BYE",
     NULL},
    {CHECKER_allocation_bits,
     "STRUCT req=0,STATUS,1,0,512"
     " ! chunk=0,BLOCKS,1 ( u32=1 u32=512 u32=4 ) STATUS_2 BYE",
     NULL},
    {CHECKER_extents_many,
     "FIXED STRUCTURE SELECT ASK rep=GO,REP_INFO ( u16=0 u64=M+M u16=1 ) ENTER"
     " req=0,STATUS,1,0,M+M ! chunk=0,BLOCKS,1 ( u32=1 e=M+1 ) STATUS_2 BYE",
     NULL},
    {CHECKER_hang_up_in_flight, "SIMPLE req=0,FLUSH,1,0,0 ! eof end", NULL},
};

// Every rule has a session that breaks it.
static void run_rule(const void *row)
{
    checker_rule rule = (checker_rule)((const checker_rule_row *)row - checker_rules);
    int sessions = 0;
    size_t i;

    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (bad[i].rule != rule) continue;
        broken = &bad[i];
        judge(bad[i].text);
        sessions++;
    }
    check.where[0] = '\0';
    CHECK(sessions > 0);
}

// --- the rest of the interface

static void late_requests_are_allowed_for(void)
{
    unsigned late;
    checker k;

    write_session("SIMPLE req=0,FLUSH,1,0,0 simple=108,1 req=0,FLUSH,2,0,0 req=0,FLUSH,3,0,0");
    for (late = 0; late < 3; late++) {
        checker_begin(&k);
        k.late = late;
        feed_parts(&k, CUT_NOWHERE);
        CHECK_EQUAL(k.count[CHECKER_CLIENT], 2 - late);
        checker_free(&k);
    }
}

static void findings_beyond_the_list_are_counted(void)
{
    checker k;

    write_session("STRUCT req=0,STATUS,1,0,M chunk=0,BLOCKS,1 ( u32=1 e=1000 )");
    feed(&k, CUT_NOWHERE);
    CHECK_EQUAL(k.count[CHECKER_SERVER], 1000);
    checker_free(&k);
}

static void findings_print_one_a_line(void)
{
    char text[100] = "";
    FILE *file = tmpfile();
    checker k;

    CHECK(file != NULL);
    write_session("FIXED opt=LIST ( u8=0 ) rep=LIST,INVALID ( ) opt=GO ( )");
    feed(&k, CUT_NOWHERE);
    checker_print(&k, CHECKER_CLIENT, file);
    rewind(file);
    CHECK_EQUAL(fread(text, 1, sizeof text, file), 35);
    CHECK(strcmp(text, "option_data at 4\ninfo_layout at 21\n") == 0);
    CHECK_EQUAL(fclose(file), 0);
    checker_free(&k);
}

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    session.bytes = (unsigned char *)malloc(MOST_BYTES);
    if (!session.bytes) return 2;
    for (i = 0; i < sizeof good / sizeof *good; i++) {
        check_case_on(good[i].name, run_good, &good[i]);
    }
    for (i = 0; i < CHECKER_RULE_COUNT; i++) {
        check_case_on(checker_rules[i].name, run_rule, &checker_rules[i]);
    }
    CHECK_CASE(late_requests_are_allowed_for);
    CHECK_CASE(findings_beyond_the_list_are_counted);
    CHECK_CASE(findings_print_one_a_line);
    free(session.bytes);
    return check_end();
}
