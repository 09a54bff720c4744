#!/bin/sh
# Makes the tree of lwIP's sources that examples/firmware/lwip is built with: Debian's
# package of them, since liblwip-dev has headers only.
#
# The tree is ${NBD_LWIP:-/var/cache/nbd.h-lwip}.  It is there whole or not at all; if it
# is there, nothing is done.  Needs dpkg-dev; root only for /var/cache.  The package comes
# from where this machine's own come from.
set -e
# shellcheck source=tests/archive.sh
. "$(dirname "$0")/archive.sh"

tree=${NBD_LWIP:-/var/cache/nbd.h-lwip}

# apt with lists of its own: those of the machine stay as they are.
apt_get() {
    timeout 300 apt-get -o Dir::Etc::sourcelist="$new/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$new/lists" -o APT::Sandbox::User=root "$@" >"$new.log" 2>&1 || {
        tail -n 5 "$new.log" >&2
        die "apt-get failed: $*"
    }
}

[ ! -e "$tree/src/core/tcp.c" ] || exit 0
[ ! -e "$tree" ] || die "$tree is there, but is not complete: remove it"
command -v dpkg-source >/dev/null || die 'dpkg-source is not installed'
archive
mkdir -p "$(dirname "$tree")"
new=$(mktemp -d "$tree.XXXXXX")
mkdir -p "$new/lists/partial"
echo "deb-src $uri $(codename) main" >"$new/sources.list"
apt_get update
(cd "$new" && apt_get source --download-only lwip)
dpkg-source --no-check -x "$new"/lwip_*.dsc "$new/lwip" >"$new.log"
[ -e "$new/lwip/src/core/tcp.c" ] || die 'the package has no src/core/tcp.c'
mv -T "$new/lwip" "$tree"
