#!/bin/sh
# The chapter "Protocol coverage" of README.md is complete and true: each term of the
# specification stands in it, and each test that it names exists.
. tests/lib.sh

tab=$(printf '\t')

# Every constant of the specification, with and without extended headers.  Those of Linux's
# ioctl(2), NBD_REPLY_MAGIC (an old name) and NBD_FLAG_XXX and NBD_INFO (of any) are none.
terms() {
    sed 's/^ *//; s/ *$//' <<'TERMS' | tr ' ' '\n' | sort
    NBD_FLAG_FIXED_NEWSTYLE NBD_FLAG_NO_ZEROES NBD_FLAG_C_FIXED_NEWSTYLE NBD_FLAG_C_NO_ZEROES
    NBD_FLAG_HAS_FLAGS NBD_FLAG_READ_ONLY NBD_FLAG_SEND_FLUSH NBD_FLAG_SEND_FUA
    NBD_FLAG_ROTATIONAL NBD_FLAG_SEND_TRIM NBD_FLAG_SEND_WRITE_ZEROES NBD_FLAG_SEND_DF
    NBD_FLAG_CAN_MULTI_CONN NBD_FLAG_SEND_RESIZE NBD_FLAG_SEND_CACHE NBD_FLAG_SEND_FAST_ZERO
    NBD_FLAG_BLOCK_STATUS_PAYLOAD
    NBD_OPT_EXPORT_NAME NBD_OPT_ABORT NBD_OPT_LIST NBD_OPT_PEEK_EXPORT NBD_OPT_STARTTLS
    NBD_OPT_INFO NBD_OPT_GO NBD_OPT_STRUCTURED_REPLY NBD_OPT_LIST_META_CONTEXT
    NBD_OPT_SET_META_CONTEXT NBD_OPT_EXTENDED_HEADERS
    NBD_REP_ACK NBD_REP_SERVER NBD_REP_INFO NBD_REP_META_CONTEXT
    NBD_REP_ERR_UNSUP NBD_REP_ERR_POLICY NBD_REP_ERR_INVALID NBD_REP_ERR_PLATFORM
    NBD_REP_ERR_TLS_REQD NBD_REP_ERR_UNKNOWN NBD_REP_ERR_SHUTDOWN NBD_REP_ERR_BLOCK_SIZE_REQD
    NBD_REP_ERR_TOO_BIG NBD_REP_ERR_EXT_HEADER_REQD
    NBD_INFO_EXPORT NBD_INFO_NAME NBD_INFO_DESCRIPTION NBD_INFO_BLOCK_SIZE
    NBD_REQUEST_MAGIC NBD_EXTENDED_REQUEST_MAGIC
    NBD_CMD_READ NBD_CMD_WRITE NBD_CMD_DISC NBD_CMD_FLUSH NBD_CMD_TRIM NBD_CMD_CACHE
    NBD_CMD_WRITE_ZEROES NBD_CMD_BLOCK_STATUS NBD_CMD_RESIZE
    NBD_CMD_FLAG_FUA NBD_CMD_FLAG_NO_HOLE NBD_CMD_FLAG_DF NBD_CMD_FLAG_REQ_ONE
    NBD_CMD_FLAG_FAST_ZERO NBD_CMD_FLAG_PAYLOAD_LEN
    NBD_SIMPLE_REPLY_MAGIC NBD_STRUCTURED_REPLY_MAGIC NBD_EXTENDED_REPLY_MAGIC
    NBD_REPLY_FLAG_DONE
    NBD_REPLY_TYPE_NONE NBD_REPLY_TYPE_OFFSET_DATA NBD_REPLY_TYPE_OFFSET_HOLE
    NBD_REPLY_TYPE_BLOCK_STATUS NBD_REPLY_TYPE_BLOCK_STATUS_EXT NBD_REPLY_TYPE_ERROR
    NBD_REPLY_TYPE_ERROR_OFFSET
    NBD_EPERM NBD_EIO NBD_ENOMEM NBD_EINVAL NBD_ENOSPC NBD_EOVERFLOW NBD_ENOTSUP NBD_ESHUTDOWN
    NBD_STATE_HOLE NBD_STATE_ZERO
TERMS
}

full_rows() {
    [ -s "$tmp/rows" ] || { echo 'error: there is no row'; return 1; }
    awk -F "$tab" 'NF != 3 || $1 !~ /[A-Za-z]/ || $2 !~ /[A-Za-z]/ ||
        $3 !~ /^`[a-z_]+ [^`]+`$/' "$tmp/rows" | nothing 'row is not full'
}

# The row of a term begins with it; other rows may mention it.
every_term_has_a_row() {
    sed -n 's/^`\(NBD_[A-Z_]*\)`.*/\1/p' "$tmp/rows" | sort -u | comm -23 "$tmp/terms" - |
        nothing 'no row for'
}

no_other_terms() {
    cut -f 1 "$tmp/rows" | grep -o 'NBD_[A-Z_]*' | sort -u | comm -13 "$tmp/terms" - |
        nothing 'not in the specification'
}

# The second cell names what the public half of the header has.
names_are_public() {
    sed '/^#if defined(NBD_IMPLEMENTATION)/q' nbd.h | grep -o '[A-Za-z_][A-Za-z_0-9]*' |
        sort -u >"$tmp/public"
    cut -f 2 "$tmp/rows" | grep -o '`[^`]*`' | tr -d '`' | tr . '\n' | sort -u |
        comm -13 "$tmp/public" - | nothing 'not in nbd.h'
}

# The names of the cases of test program $1: each stands beside its own function in a
# table of sessions or in a call.  Macros make some, so the compiler spells them out.
cases() {
    $CC -E -I. "tests/$1.c" |
        awk -v file="\"tests/$1.c\"" '/^# [0-9]/ { here = $3 == file } here' |
        grep -o '"\([a-z_0-9]*\)" *, *\1\b' | cut -d '"' -f 2
}

# The rules of script $1 that are written out.
rules() {
    sed -n "s/^ *\(check\|refuse\) '\([^']*\)'.*/\2/p" "tests/$1.sh"
}

tests_exist() {
    cut -f 3 "$tmp/rows" | tr -d '`' | sort -u >"$tmp/named"
    for name in $(cut -d ' ' -f 1 "$tmp/named" | sort -u); do
        case $name in
        test_*) cases "$name" ;;
        *) rules "$name" ;;
        esac | sed "s/^/$name /"
    done | sort -u >"$tmp/existing"
    comm -23 "$tmp/named" "$tmp/existing" | nothing 'no test'
}

table_rows README.md 'Protocol coverage' >"$tmp/rows"
terms >"$tmp/terms"
check 'no row of the table is empty' full_rows
check 'each term of the specification has a row' every_term_has_a_row
check 'each term of the table is of the specification' no_other_terms
check 'each name of the table is in nbd.h' names_are_public
check 'each test of the table exists' tests_exist
