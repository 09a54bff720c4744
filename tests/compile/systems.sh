#!/bin/sh
# Flags and options that not every system has are used where they are, and nowhere else:
# each combination of them, compiled and run; then the systems that are not Linux.
# The words of $options are separate arguments.
# shellcheck disable=SC2086
. tests/lib.sh

C99="-std=c99 $WARN -Wno-conversion -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes -I."
names='MSG_MORE MSG_NOSIGNAL SO_NOSIGPIPE TCP_NOPUSH TCP_CORK'

compile_and_run() {
    $CC $C99 $options -o "$tmp/program" tests/compile/systems.c && "$tmp/program"
}

# system NAME OPTIONS...: those of the five that are named in $has are there.
system() {
    rule=$1
    shift
    options=$*
    for name in $names; do
        case " $has " in
        *" $name "*) options="$options -DHAS_$name=1" ;;
        *) options="$options -DHAS_$name=0" ;;
        esac
    done
    check "$rule" compile_and_run
}

combination=0
while [ "$combination" -lt 32 ]; do
    has=
    rest=$combination
    for name in $names; do
        [ $((rest % 2)) = 0 ] || has="$has $name"
        rest=$((rest / 2))
    done
    system "each is used where it is: ${has:-none}"
    combination=$((combination + 1))
done

has='SO_NOSIGPIPE TCP_NOPUSH'
system 'macOS: SO_NOSIGPIPE' -DSYSTEM=1
has=
system 'macOS, strict: SO_NOSIGPIPE though it is hidden' -DSYSTEM=1 -DWANTED_OPTION=0x1022
has='MSG_NOSIGNAL SO_NOSIGPIPE TCP_NOPUSH'
system 'FreeBSD: MSG_NOSIGNAL' -DSYSTEM=2
has=
system 'FreeBSD, strict: SO_NOSIGPIPE though it is hidden' -DSYSTEM=2 -DWANTED_OPTION=0x0800
has='MSG_NOSIGNAL'
system 'OpenBSD: MSG_NOSIGNAL' -DSYSTEM=3
has=
system 'Zephyr: no signals, no Unix sockets' -DSYSTEM=4
