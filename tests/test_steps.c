// Every session of the other programs, cut off after every byte of the server: by the
// end of the stream and by an error, with a transport and with the engine's own calls.
// Then: no state of the engine is left out.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#define SESSIONS_ONLY
#include "test_handshake.c"
#include "test_reads.c"
#include "test_transfer.c"
#include "test_options.c"
#include "test_status.c"
#include "test_extended.c"
#include "test_tls_seam.c"

enum coverage {
    READS, // waits for bytes: must be reached, and cut
    RESTS, // reads nothing, but a call can end in it: must be reached
    PASSES // left within the call that enters it: cannot be seen from outside
};

typedef struct state_row {
    int state;
    const char *name;
    enum coverage coverage;
} state_row;

#define ROW(name, coverage) \
    { \
        NBDI_##name, #name, coverage \
    }

// The state table of the implementation notes.
static const state_row state_table[] = {
    ROW(IDLE, RESTS),       ROW(MAGIC, READS),       ROW(OLD, READS),     ROW(FLAGS, READS),
    ROW(HAGGLE, READS),     ROW(OPTION, READS),      ROW(INFO, READS),    ROW(INFO_EXPORT, READS),
    ROW(INFO_BLOCK, READS), ROW(SERVER, READS),      ROW(LISTED, PASSES), ROW(CONTEXT, READS),
    ROW(NAME, READS),       ROW(NAME_ZEROES, READS), ROW(TEXT, READS),    ROW(SKIP, READS),
    ROW(SETTLE, READS),     ROW(TLS, RESTS),         ROW(REPLY, READS),   ROW(OFFSET, READS),
    ROW(DATA, READS),       ROW(HOLE, READS),        ROW(ERROR, READS),   ROW(ERROR_OFFSET, READS),
    ROW(STATUS, READS),     ROW(EXTENT, READS),      ROW(END, RESTS),     ROW(CLOSING, READS),
    ROW(DEAD, RESTS),       ROW(ENDED, RESTS),
};

static void every_state_is_in_the_table(void)
{
    size_t rows = sizeof state_table / sizeof state_table[0], i;

    for (i = 0; i < rows; i++)
        CHECK_EQUAL(state_table[i].state, i);
    CHECK_EQUAL(rows, NBDI_ENDED + 1);
}

static void every_state_is_reached_and_cut(void)
{
    size_t i;

    for (i = 0; i < sizeof state_table / sizeof state_table[0]; i++) {
        const state_row *row = &state_table[i];

        snprintf(check.where, sizeof check.where, "state %s", row->name);
        CHECK(row->coverage == PASSES || state_reached[row->state]);
        CHECK(row->coverage != READS || state_cut[row->state]);
    }
}

static void cut_sessions(const session *sessions, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++) {
        char name[128];

        snprintf(name, sizeof name, "cut_%s", sessions[i].name);
        check_case_on(name, session_cut_everywhere, &sessions[i]);
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    cut_sessions(handshake_sessions, HANDSHAKE_SESSIONS);
    cut_sessions(transfer_sessions, TRANSFER_SESSIONS);
    cut_sessions(read_sessions, READ_SESSIONS);
    cut_sessions(option_sessions, OPTION_SESSIONS);
    cut_sessions(status_sessions, STATUS_SESSIONS);
    cut_sessions(extended_sessions, EXTENDED_SESSIONS);
    cut_sessions(seam_sessions, SEAM_SESSIONS);
    CHECK_CASE(every_state_is_in_the_table);
    // Only after all of the sessions can it be told.
    if (argc <= 1 && check.share == 1) CHECK_CASE(every_state_is_reached_and_cut);
    return check_end();
}
