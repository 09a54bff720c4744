#!/bin/bash
# limit: 1500
# nbd.h on each platform that can be run here, in a table: how many rules of the tests
# that need no server hold there, and whether a real disk is copied whole.
#
#   tests/portability.sh            all of them
#   tests/portability.sh NAME...    these
#   tests/portability.sh readme     all of them, and writes the table into README.md
#
# The programs run with CHECK_SHARE: what a rule does at each byte, and with each of its
# variants, is done at every 61st; and the three longest, where processors are emulated, with
# CHECK_EVERY: every 4th session.  `make check` runs them whole on the machine itself.
. tests/lib.sh
. tests/servers.sh

# name|what it is|compiler and flags|what runs the programs
platforms='glibc|x86-64, glibc|gcc -O0|
musl|x86-64, musl|musl-gcc -O0 -static|
i386|i386, glibc|gcc -m32 -O0 -static -isystem /usr/include/x86_64-linux-gnu|
arm|arm hard float, glibc|arm-linux-gnueabihf-gcc -O0 -static|qemu-arm
aarch64|aarch64, glibc|aarch64-linux-gnu-gcc -O0 -static|qemu-aarch64
s390x|s390x (big-endian), glibc|s390x-linux-gnu-gcc -O0 -static|qemu-s390x
windows|x86-64, Windows (mingw-w64, wine)|x86_64-w64-mingw32-gcc -O0 -static -DNOGDI -Itests/windows|wine64'

share=61
image_bytes=16M

# Debian has wine without a name in the path.
wine=/usr/lib/wine
export WINEPREFIX=$tmp/wine WINEDEBUG=-all
export WINEDLLOVERRIDES='mscoree,mshtml=;winemenubuilder.exe=d'

run() {
    case $runner in
    wine64) HOME=$tmp timeout -k 5 300 "$wine/wine64" "$@" ;;
    '') timeout -k 5 300 "$@" ;;
    *) timeout -k 5 300 "$runner" "$@" ;;
    esac
}

# Why program $1 is left out on this platform, or nothing.
left_out() {
    case $platform-$1 in
    *-test_tls | *-test_tls_errors) echo 'mbedTLS is there for this machine only' ;;
    windows-test_sockets | windows-test_deadlock | windows-test_threads) echo 'socketpair' ;;
    windows-test_transports) echo 'pipes, poll' ;;
    esac
}

# build SOURCE PROGRAM: the words of $compile are separate arguments.
build() {
    local libraries=-pthread
    [ "$platform" = windows ] && libraries=-lws2_32
    # shellcheck disable=SC2086
    $compile -std=c99 -Wall -Wextra -Werror -I. -o "$2" "$1" $libraries 2>"$here/errors"
}

# One program of the tests.
test_program() {
    local source=$1 name=$2 reason status every=1
    reason=$(left_out "$name")
    if [ -n "$reason" ]; then
        echo "$name ($reason)" >>"$here/left_out"
        return
    fi
    if ! build "$source" "$here/program$suffix"; then
        fail "$label: $name" "does not compile: $(reason "$here/errors")"
        return
    fi
    case $runner-$name in
    qemu-*-test_faults | qemu-*-test_flips | qemu-*-test_steps) every=4 ;;
    esac
    CHECK_EVERY=$every CHECK_SHARE=$share run "$here/program$suffix" >"$here/lines" 2>&1
    status=$?
    tr -d '\r' <"$here/lines" | grep -a '^ok ' >>"$here/passed"
    if [ $status = 0 ] && grep -q '^ok ' "$here/lines"; then
        ok "$label: $name"
        echo "$name" >>"$here/programs"
    else
        fail "$label: $name" "exit $status: $(grep -a -m 1 '^FAIL' "$here/lines" ||
            tail -n 1 "$here/lines")"
    fi
}

# Exit status, and the same bytes.
same() {
    local program=$1 from=$2 to=$3 other=$4
    run "$here/$program$suffix" "$from" "$to" && cmp "$tmp/disks/image" "$other"
}

# A disk from the server to a file, and from that file to the server.
copies() {
    local reader=copy
    [ "$platform" = windows ] && reader=simple_copy # copy starts servers, which takes fork
    truncate -s "$image_bytes" "$tmp/disks/$platform"
    for program in $reader simple_copy; do
        check "$label: $program compiles" build "examples/$program.c" "$here/$program$suffix"
    done
    check "$label: $reader: what comes from nbdkit is the disk" \
        same $reader "${uri}image" "$here/file" "$here/file"
    check "$label: simple_copy: what goes to nbdkit is the disk" \
        same simple_copy "$here/file" "$uri$platform" "$tmp/disks/$platform"
    check "$label: a refused connection has the number of this system" \
        refused "$here/simple_copy$suffix"
}

# The number that the system has for a refused connection: WSAECONNREFUSED, ECONNREFUSED.
refused() {
    local number=111 nobody=${uri%:*}:1/
    [ "$platform" = windows ] && number=10061
    ! run "$1" "$nobody" "$here/none" 2>"$here/errors" &&
        grep -q "system error $number\$" <(tr -d '\r' <"$here/errors")
}

# What is missing to run it, or nothing.
missing() {
    has "${compile%% *}" || { echo "${compile%% *} is not installed" && return; }
    case $runner in
    wine64) [ -x "$wine/wine64" ] || echo 'wine64 is not installed' ;;
    ?*) has "$runner" || echo "$runner is not installed" ;;
    esac
}

prepare() {
    printf 'int main(void)\n{\n    return 0;\n}\n' >"$here/empty.c"
    # shellcheck disable=SC2086
    $compile -o "$here/empty$suffix" "$here/empty.c" 2>"$here/errors" || {
        echo "cannot link a program: $(reason "$here/errors")"
        return
    }
    run "$here/empty$suffix" 2>"$here/errors" || {
        [ "$platform" = i386 ] && has qemu-i386 && return
        echo "cannot run a program: $(reason "$here/errors")"
    }
}

# Everything of one platform; leaves a row of the table.
platform_row() {
    local why source failures
    IFS='|' read -r platform label compile runner <<<"$1"
    here=$tmp/$platform
    suffix=
    [ "$platform" = windows ] && suffix=.exe
    mkdir "$here"
    : >"$here/passed"
    : >"$here/left_out"
    : >"$here/programs"
    why=$(missing)
    [ -n "$why" ] || why=$(prepare)
    if [ -n "$why" ]; then
        skip "$label" "$why"
        echo "| $label | not run: $why | not run |" >"$here/row"
        return
    fi
    [ "$platform" != i386 ] || "$here/empty" 2>/dev/null || runner=qemu-i386
    for source in tests/test_*.c; do
        test_program "$source" "$(basename "$source" .c)"
    done
    for source in tests/hostile/*.c; do
        test_program "$source" "hostile_$(basename "$source" .c)"
    done
    failures=$failed
    failed=0
    copies
    echo "| $label | $(passed "$failures") | $([ $failed = 0 ] && echo yes || echo no) |" >"$here/row"
}

passed() {
    printf '%s in %s programs' "$(wc -l <"$here/passed")" "$(wc -l <"$here/programs")"
    [ "$1" = 0 ] || printf ', some failed'
}

# Rows, then what each platform leaves out and why.
table() {
    local platform label
    echo '| platform | rules that hold | copies equal |'
    echo '|---|---|---|'
    while IFS='|' read -r platform label _; do
        cat "$tmp/$platform/row"
    done <<<"$platforms"
    echo
    while IFS='|' read -r platform label _; do
        [ ! -s "$tmp/$platform/left_out" ] ||
            echo "- without, $label: $(paste -s -d , "$tmp/$platform/left_out" | sed 's/,test/, test/g')"
    done <<<"$platforms"
}

stop_wine() {
    [ ! -d "$WINEPREFIX" ] || "$wine/wineserver64" -k -w 2>/dev/null
}

stop_all() {
    stop
    stop_wine
}

case $1 in
'' | readme) ;;
*)
    platforms=$(grep -E "^($(echo "$*" | tr ' ' '|'))\\|" <<<"$platforms")
    ;;
esac

mkdir "$tmp/disks"
if ! has nbdkit || ! has mke2fs; then
    skip 'platforms' 'nbdkit or mke2fs is not installed'
    exit
fi
truncate -s "$image_bytes" "$tmp/disks/image"
mke2fs -q -t ext4 -d tests "$tmp/disks/image"
fresh_port
check 'nbdkit serves the disks' launch nbdkit -f -i 127.0.0.1 -p "$port" file dir="$tmp/disks"
while read -r row; do
    (
        trap - EXIT
        platform_row "$row"
    ) >"$tmp/log" 2>&1 </dev/null
    cat "$tmp/log"
    ! grep -q '^FAIL ' "$tmp/log" || failed=1
done <<<"$platforms"

# The figures grow with the tests, the platforms stay.
names() {
    sed -n 's/^| \([^|]*\) | .*/\1/p'
}

readme_has_the_platforms() {
    diff <(sed -n '/^## Platforms/,/^## [^P]/p' README.md | names) <(table | names)
}

write_readme() {
    table >"$tmp/table"
    awk -v table="$tmp/table" '
        /^## / { here = $0 == "## Platforms" }
        here && /^\|/ && !skipping {
            while ((getline line <table) > 0) print line
            skipping = 1
        }
        skipping && /^$|^\||^- without, / { next }
        skipping { print ""; skipping = 0 }
        { print }
    ' README.md >"$tmp/README.md" && cp "$tmp/README.md" README.md
}

table
case $1 in
'') check 'README.md has these platforms' readme_has_the_platforms ;;
readme) write_readme ;;
esac
