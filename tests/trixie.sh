#!/bin/sh
# Makes the tree of newer servers and of a newer mbedTLS, those of Debian 13, that
# tests/newer.sh and tests/newer_tls.sh run.
#
# The tree is ${NBD_TRIXIE:-/var/cache/nbd.h-trixie}.  It is there whole or not at all; if
# it is there, nothing is done, and one that lacks a package is made anew.  Needs root and
# debootstrap; the packages come from where this machine's own come from.
set -e

# shellcheck source=tests/archive.sh
. "$(dirname "$0")/archive.sh"

tree=${NBD_TRIXIE:-/var/cache/nbd.h-trixie}

is_complete() {
    for program in qemu-nbd nbdkit nbd-server nbdinfo; do
        [ -x "$1/usr/bin/$program" ] || return 1
    done
    [ -f "$1/usr/include/mbedtls/ssl.h" ]
}

is_complete "$tree" && exit
[ ! -e "$tree" ] || [ -f "$tree/etc/debian_version" ] ||
    die "$tree is there, but is no tree of Debian: remove it"
[ "$(id -u)" = 0 ] || die 'needs root'
archive

mkdir -p "$(dirname "$tree")"
new=$(mktemp -d "$tree.XXXXXX")
chmod 755 "$new"
timeout 1800 debootstrap --variant=minbase \
    --include=qemu-utils,nbdkit,nbd-server,libnbd-bin,libmbedtls-dev \
    trixie "$new" "$uri" >"$new.log" 2>&1 || {
    tail -n 5 "$new.log" >&2
    die 'debootstrap failed'
}
rm -f "$new.log"
rm -rf --one-file-system "$new/var/cache/apt/archives"
is_complete "$new" || die 'debootstrap left programs out'
rm -rf --one-file-system "$tree"
mv -T "$new" "$tree"
new=
