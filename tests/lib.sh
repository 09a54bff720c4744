# shellcheck shell=sh disable=SC2034
# What the test scripts share; read in with ". tests/lib.sh" from the top
# directory.  "$tmp" is a directory of the script's own, removed at its end; a
# script that starts processes overrides `stop_all`.

failed=0
CC=${CC:-gcc}
WARN='-Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual -pedantic -Werror'
tmp=$(mktemp -d "${TMPDIR:-/tmp}/nbd-test.XXXXXX") || exit 1

stop_all() {
    :
}

finish() {
    status=$?
    stop_all
    rm -rf "$tmp"
    [ "$status" = 0 ] && status=$failed
    exit "$status"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

ok() {
    echo "ok $1"
}

fail() {
    echo "FAIL $1: $2"
    failed=1
}

skip() {
    echo "skip $1: $2"
}

has() {
    command -v "$1" >/dev/null 2>&1
}

# The line of a command's output that says why it failed.
reason() {
    grep -a -m 1 -i -E 'error|warning' "$1" || tail -n 1 "$1"
}

# check RULE COMMAND...: the rule holds if the command succeeds.
check() {
    rule=$1
    shift
    if "$@" >"$tmp/output" 2>&1; then
        ok "$rule"
    else
        fail "$rule" "$* (exit $?): $(reason "$tmp/output")"
    fi
}

# refuse RULE TEXT COMMAND...: the command must fail and print TEXT.
refuse() {
    rule=$1
    text=$2
    shift 2
    if "$@" >"$tmp/output" 2>&1; then
        fail "$rule" "$* succeeded"
    elif grep -a -q -e "$text" "$tmp/output"; then
        ok "$rule"
    else
        fail "$rule" "no \"$text\" in: $(reason "$tmp/output")"
    fi
}

# What a program with TLS by mbedTLS is built with; nothing where that is not installed.
mbedtls_flags() {
    echo '#include <mbedtls/ssl.h>' | $CC -E - >/dev/null 2>&1 || return 0
    echo '-DNBD_MBEDTLS -lmbedtls -lmbedx509 -lmbedcrypto'
}

# What leaves something out of nbd.h or changes its linkage: a line each.
CUTS='-DNBD_NO_SOCKETS
-DNBD_NO_DIAL
-DNBD_NO_CONVENIENCE
-DNBD_NO_TEXT
-DNBD_STATIC
-DNBD_NO_NEGOTIATE
-DNBD_NO_BLOCK_STATUS
-DNBD_NO_EXTENDED_HEADERS
-DNBD_NO_OLDSTYLE
-DNBD_NO_TLS
-DNBD_NO_RAW
-DNBD_NO_SPARSE
-DNBD_NO_IOV
-DNBD_NO_MESSAGES
-DNBD_NO_GO
-DNBD_NO_COUNTERS
-DNBD_NO_COUNTERS -DNBD_NO_SOCKETS
-DNBD_NO_EXTRAS
-DNBD_NO_ADVICE
-DNBD_NO_POLL
-DNBD_MINIMAL
-DNBD_NO_SOCKETS -DNBD_NO_CONVENIENCE'

# table_rows FILE [CHAPTER]: the rows of its tables, without their heads, cells parted by tabs.
table_rows() {
    awk -v chapter="${2:+## $2}" '
        BEGIN { here = chapter == "" }
        chapter != "" && /^## / { here = $0 == chapter }
        !here || !/^\|/ { inside = 0; next }
        ++inside > 2 {
            gsub(/^\| *| *\|$/, "")
            gsub(/ *\| */, "\t")
            print
        }
    ' "$1"
}

# Prints what it reads as the reason of a failure; there must be nothing.
nothing() {
    sed "s/^/error: $1: /" >"$tmp/bad"
    cat "$tmp/bad"
    [ ! -s "$tmp/bad" ]
}
