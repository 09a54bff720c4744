# shellcheck shell=sh
# What the scripts share that fetch trees for the tests; read in with ". tests/archive.sh"
# from the directory of the script.  "$new" is what is being made, removed if it is not finished:
# a tree is there whole or not at all.

new=
uri=

die() {
    echo "$(basename "$0"): $1" >&2
    exit 1
}

# debootstrap leaves mounts behind when it fails: they are not to be emptied.
finish() {
    [ -z "$new" ] || rm -rf --one-file-system "$new" "$new.log"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

# The code name of this release.
codename() {
    # shellcheck disable=SC1091
    (. /etc/os-release && echo "$VERSION_CODENAME")
}

# Sets uri to the archive of the release itself, not of its updates, as apt knows it.
archive() {
    # shellcheck disable=SC2016
    uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
        "Codename: $(codename)" | head -n 1)
    [ -n "$uri" ] || die 'apt knows no archive: run apt-get update'
}
