#!/bin/bash
# limit: 600
# examples/info prints what nbdinfo prints, and exits as it does.
#
# Different on purpose, so not compared or compared with what is written here:
#   - The content is found on servers too that serve only blocks larger than 8 KiB.
#   - A last extent that reaches behind the export is cut at its end.  nbdinfo prints it as
#     the server sent it, and totals above 100 %.
#   - Areas are printed as they are found, so that a long map needs no memory.  nbdinfo
#     prints nothing on stdout if the map fails in the middle.  Both exit with 1.
#   - The totals know 1024 types and fail with more, for the same reason.
#   - Extents of no size are an error.  nbdinfo asks for them without end.
#   - Text of the server is escaped.
#   - What is known is shown.  Of nbd-server nbdinfo shows the size 0, since that is its
#     answer to INFO, and of a server without INFO no contexts.
#   - JSON is whole if the server refuses the export: its list is empty, not missing.
#   - What is said on stderr, --help and --version.
# shellcheck disable=SC2016
. tests/lib.sh
. tests/servers.sh

info=build/examples/info

serve_nbdkit() {
    start nbdkit -f -U "$socket" "$@"
}

serve_qemu() {
    start qemu-nbd -t -e 8 -k "$socket" "$@"
}

# both ARGUMENTS...: asks both programs; what they say is in ours, theirs.
both() {
    timeout 60 $info "$@" >"$tmp/ours" 2>"$tmp/ours.err"
    our_status=$?
    timeout 60 nbdinfo "$@" >"$tmp/theirs" 2>"$tmp/theirs.err"
    their_status=$?
}

# A list of arguments with a server to be started is long, so it is cut in what is printed.
brief() {
    local all="$*"
    echo "${all:0:60}"
}

# equal STATUSES ARGUMENTS...: same output and exit status, and it is one of these.
equal() {
    local statuses=$1
    shift
    both "$@"
    if [ $our_status != $their_status ]; then
        echo "error: $(brief "$@") exits with $our_status, not $their_status:" \
            "$(head -n 1 "$tmp/ours.err")"
        return 1
    fi
    case " $statuses " in
    *" $our_status "*) ;;
    *)
        echo "error: $(brief "$@") exits with $our_status: $(head -n 1 "$tmp/ours.err")"
        return 1
        ;;
    esac
    cmp "$tmp/ours" "$tmp/theirs" && return 0
    echo "error: $(brief "$@") differs: $(diff "$tmp/ours" "$tmp/theirs" | sed -n 2p)"
    return 1
}

# long_map LINES: the map just compared is not a trivial one.
long_map() {
    [ "$(wc -l <"$tmp/ours")" -ge "$1" ] || {
        echo "error: the map has less than $1 lines"
        return 1
    }
}

# maps NAME LINES [CONTEXT]: the map in each of its forms.
maps() {
    local form map=--map${3:+=$3}
    for form in '' --color --json --totals '--totals --color' '--totals --json'; do
        # shellcheck disable=SC2086
        check "$1: $map $form" equal 0 "$map" $form "$uri"
        [ -n "$form" ] || check "$1: $map has $2 areas or more" long_map "$2"
    done
}

words='connect read write tls structured-reply read-only rotational cache df fast-zero flush fua
    multi-conn trim zero'
other_words='sr structured structured_reply structured-replies structured_replies readonly
    read_only Read-Only fastzero fast_zero multiconn multi_conn'

every_word() {
    local word
    for word in $words; do
        equal '0 2' --can "$word" "$uri" || return 1
    done
}

every_other_word() {
    local word
    for word in $other_words; do
        equal '0 2' --is "$word" "$uri" || return 1
    done
    equal '0 2' --can 'structured reply' "$uri" && equal '0 2' --can 'structured replies' "$uri"
}

# answers NAME: all that is one value.
answers() {
    check "$1: --can, every word" every_word
    check "$1: --size" equal 0 --size "$uri"
    check "$1: --size --json" equal 0 --size --json "$uri"
}

# says NAME: all that is not a map.
says() {
    local form
    answers "$1"
    for form in '' --json --color --no-content; do
        check "$1: $form" equal 0 ${form:+"$form"} "$uri"
    done
}

lists() {
    check "$1: --list" equal "$2" --list "$uri"
    check "$1: -L --json" equal "$2" -L --json "$uri"
}

# can STATUS WORD: that the servers below differ in what they offer.
can() {
    timeout 60 $info --can "$2" "$uri" >"$tmp/ours"
    [ $? = "$1" ] && ! [ -s "$tmp/ours" ]
}

nbdkit_maps() {
    check 'nbdkit data, holes at 1 and 4 GiB: starts' serve_nbdkit data \
        data='1 @0x40000000 2 @0x100000000 3' size=5G
    maps 'nbdkit data, holes at 1 and 4 GiB' 6
    check 'nbdkit null 8G: starts' serve_nbdkit null 8G
    maps 'nbdkit null 8G' 1
    says 'nbdkit null 8G'
    check 'nbdkit memory 1000003: starts' serve_nbdkit memory 1000003
    maps 'nbdkit memory 1000003' 1
    says 'nbdkit memory 1000003'
    check 'nbdkit null 0: starts' serve_nbdkit null 0
    maps 'nbdkit null 0' 0
    check 'every type of base:allocation: starts' serve_nbdkit eval get_size='echo 16384' \
        pread='head -c $3 /dev/zero' can_extents='exit 0' extents='echo 0 4096 hole
            echo 4096 4096 zero; echo 8192 4096; echo 12288 4096 hole,zero'
    maps 'every type of base:allocation' 4
    stop
}

nbdkit_words() {
    local variant
    check 'nbdkit -r: starts' serve_nbdkit -r memory 1M
    says 'nbdkit -r'
    check 'nbdkit -r: cannot write' can 2 write
    check 'nbdkit rotational: starts' serve_nbdkit eval get_size='echo 4096' \
        pread='head -c $3 /dev/zero' is_rotational='exit 0'
    says 'nbdkit rotational'
    check 'nbdkit rotational: is rotational' can 0 rotational
    check 'nbdkit fast zeroes: starts' serve_nbdkit eval get_size='echo 4096' \
        pread='head -c $3 /dev/zero' pwrite='exit 0' can_write='exit 0' can_zero='exit 0' \
        can_fast_zero='exit 0' zero='exit 0'
    says 'nbdkit fast zeroes'
    check 'nbdkit fast zeroes: can fast-zero' can 0 fast-zero
    check 'nbdkit block sizes: starts' serve_nbdkit --filter=blocksize-policy memory 1M \
        blocksize-minimum=512 blocksize-preferred=64K blocksize-maximum=1M
    says 'nbdkit block sizes'
    maps 'nbdkit block sizes' 1
    for variant in nozero nocache fua multi-conn noextents; do
        check "nbdkit filter $variant: starts" serve_nbdkit "--filter=$variant" memory 1M
        says "nbdkit filter $variant"
    done
    for variant in -o --no-sr --mask-handshake=0; do
        check "nbdkit $variant: starts" serve_nbdkit "$variant" memory 1M
        says "nbdkit $variant"
        check "nbdkit $variant: --map" equal 1 --map "$uri"
    done
    stop
}

# says_why TEXT ARGUMENTS...: status 1, nothing on stdout, and one line with TEXT.
says_why() {
    local text=$1
    shift
    timeout 60 $info "$@" >"$tmp/ours" 2>"$tmp/ours.err"
    [ $? = 1 ] && ! [ -s "$tmp/ours" ] && grep -q "^info: .*$text" "$tmp/ours.err"
}

output_is_full() {
    timeout 60 $info "$uri" >/dev/full 2>"$tmp/ours.err"
    [ $? = 1 ] && grep -q '^info: standard output: ' "$tmp/ours.err"
}

questions() {
    local nowhere="nbd+unix:///?socket=$tmp/none"
    check 'questions: server starts' serve_nbdkit memory 1M
    check 'the words of --can and --is that mean the same' every_other_word
    check 'an unknown context' equal 1 --map=foo:bar "$uri"
    check 'a context that is a namespace' equal 1 --map=base: "$uri"
    check 'an unknown word' equal 1 --can bogus "$uri"
    check 'no server: --can connect' equal 1 --can connect "$nowhere"
    check 'no server: --map' equal 1 --map "$nowhere"
    check 'no server: --size' equal 1 --size "$nowhere"
    check '--map with --list' equal 1 --map --list "$uri"
    check '--can with --size' equal 1 --can read --size "$uri"
    check '--totals without --map' equal 1 --totals "$uri"
    check '--content with --no-content' equal 1 --content --no-content "$uri"
    check 'two names' equal 1 "$uri" "$uri"
    check 'TLS without a name to verify, or not built in: status 1, and said so' says_why 'TLS' "nbds+unix:///?socket=$socket"
    check 'no URI: status 1, and said so' says_why 'not a valid NBD URI' 'nbd:nothing'
    check 'standard output is full' output_is_full
    check 'an option that does not exist' equal 1 --bogus "$uri"
    check 'no URI' equal 1 --map
    check 'options behind the URI' equal 0 "$uri" --size
    check 'the last of two words counts' equal 2 --can read --is tls "$uri"
    check 'an option in short, a word behind =' equal 0 --ca=read -- "$uri"
    stop
}

export_names() {
    mkdir "$tmp/exports"
    truncate -s 1M "$tmp/exports/one"
    truncate -s 1025 "$tmp/exports/two words"
    check 'nbdkit file dir=: starts' serve_nbdkit file dir="$tmp/exports"
    lists 'nbdkit file dir=' 0
    check 'nbdkit file dir=, name unknown: --can connect' equal 1 --can connect "$uri"
    check 'nbdkit file dir=, name unknown: no option' equal 1 "$uri"
    uri="nbd+unix:///two%20words?socket=$socket"
    says 'nbdkit file dir=, one of two'
    maps 'nbdkit file dir=, one of two' 1
    stop
}

qemu_export() {
    local nothing="nbd+unix:///nothing?socket=$socket"
    truncate -s 1000003 "$tmp/odd"
    check 'qemu-nbd: starts' serve_qemu -f raw -x name -D 'what it is' "$tmp/odd"
    lists 'qemu-nbd' 0
    check 'qemu-nbd, name unknown: --can connect' equal 1 --can connect "$nothing"
    check 'qemu-nbd, name unknown: --map' equal 1 --map "$nothing"
    check 'qemu-nbd, name unknown: --size' equal 1 --size "$nothing"
    uri="nbd+unix:///name?socket=$socket"
    says 'qemu-nbd'
    maps 'qemu-nbd, 1000003 bytes' 1
    stop
}

# A chain of three, so that there are the depths 1, 2 and 3.
make_chain() {
    qemu-img create -q -f qcow2 "$tmp/base" 8M &&
        qemu-io -f qcow2 -c 'write 1M 1M' "$tmp/base" &&
        qemu-img create -q -f qcow2 -b "$tmp/base" -F qcow2 "$tmp/middle" &&
        qemu-io -f qcow2 -c 'write 3M 1M' "$tmp/middle" &&
        qemu-img create -q -f qcow2 -b "$tmp/middle" -F qcow2 "$tmp/top" &&
        qemu-img bitmap --add "$tmp/top" changes &&
        qemu-io -f qcow2 -c 'write 5M 1M' "$tmp/top"
}

qemu_contexts() {
    check 'qcow2 with a bitmap: made' make_chain
    check 'qcow2 with a bitmap: starts' serve_qemu -r -A -B changes -f qcow2 "$tmp/top"
    says 'qcow2 with a bitmap'
    maps 'qcow2 with a bitmap' 7 base:allocation
    maps 'qcow2 with a bitmap' 7 qemu:allocation-depth
    maps 'qcow2 with a bitmap' 3 qemu:dirty-bitmap:changes
    check 'a bitmap that is not there' equal 1 --map=qemu:dirty-bitmap:other "$uri"
    stop
}

nbd_server() {
    truncate -s 1M "$tmp/disk"
    check 'nbd-server: starts' serve_nbd_server "$tmp/disk" 'rotational = true'
    answers 'nbd-server'
    check 'nbd-server: --map' equal 1 --map "$uri"
    check 'nbd-server: is rotational' can 0 rotational
    check 'nbd-server, flags: starts' serve_nbd_server "$tmp/disk" \
        $'readonly = true\nflush = true\nfua = true\ntrim = true'
    answers 'nbd-server, flags'
    stop
}

our_server() {
    local variant
    for variant in --read-only --no-structured --no-fixed --oldstyle --description=text; do
        check "our server $variant: starts" start build/tests/server -U "$socket" --size 1M \
            "$variant"
        says "our server $variant"
    done
    check 'our server --no-go: starts' start build/tests/server -U "$socket" --size 1M --no-go
    answers 'our server --no-go'
    stop
}

# Files that file(1) knows, and one that it does not.
make_files() (
    mkdir "$tmp/files" && cd "$tmp/files" &&
        cp /bin/sh elf && gzip -c <elf >compressed && printf 'text \303\244\n' >text &&
        printf '%510s\125\252' '' >mbr && : >empty && truncate -s 1M zeroes &&
        head -c 9000 /dev/urandom >random && printf '<?xml version="1.0"?>' >'x"m\l'
)

# known TEXT [ARGUMENTS...]: the content is TEXT; by itself, since nbdinfo does not see it.
known() {
    local text=$1
    shift
    timeout 60 $info "$@" "$uri" >"$tmp/ours" && grep -q "^	content: $text" "$tmp/ours"
}

# harmless ARGUMENTS...: what file(1) says is printed without its escape sequences.
harmless() {
    mkdir -p "$tmp/bin"
    printf '#!/bin/sh\nprintf "a \\033[2J\\" b\\n"\n' >"$tmp/bin/file"
    chmod +x "$tmp/bin/file"
    PATH=$tmp/bin:$PATH timeout 60 $info "$@" "$uri" >"$tmp/ours" || return 1
    grep -q 'content.*a \\u001b\[2J.*b' "$tmp/ours" && ! grep -q $'\033' "$tmp/ours"
}

# A file(1) that fails is not believed.
what_fails() {
    printf '#!/bin/sh\necho nonsense\nexit 1\n' >"$tmp/bin/file"
    PATH=$tmp/bin:$PATH timeout 60 $info "$uri" >"$tmp/ours" && ! grep content "$tmp/ours"
}

without_file() {
    timeout 60 $info --no-content "$uri" >"$tmp/theirs" &&
        env PATH="$tmp/nothing" $info "$uri" >"$tmp/ours" && cmp "$tmp/ours" "$tmp/theirs"
}

content() {
    local form name
    check 'content: files made' make_files
    check 'content, nbdkit file dir=: starts' serve_nbdkit file dir="$tmp/files"
    for form in --content --no-content '--content --json' '--content --color'; do
        # shellcheck disable=SC2086
        check "content of many exports: --list $form" equal 0 --list $form "$uri"
    done
    for name in elf text empty; do
        uri="nbd+unix:///$name?socket=$socket"
        check "content of $name" equal 0 "$uri"
    done
    uri="nbd+unix:///elf?socket=$socket"
    check 'content is known' known ELF
    check 'content is made harmless' harmless
    check 'content is made harmless in JSON' harmless --json
    check 'content is left out if file(1) fails' what_fails
    check 'content is left out without file(1)' without_file
    check 'content that cannot be read: starts' serve_nbdkit --filter=error memory 1M \
        error-pread-rate=100%
    says 'content that cannot be read'
    check 'content, blocks of 64 KiB: starts' serve_nbdkit --filter=blocksize-policy memory 1M \
        blocksize-error-policy=error blocksize-minimum=64K blocksize-preferred=64K \
        blocksize-maximum=1M
    check 'content, blocks of 64 KiB: known' known data
    stop
}

# started NAME COMMAND...: every form, for a server that the programs start themselves.
started() {
    local name=$1 form
    shift
    for form in '' --json --color --no-content --size '--size --json' --map '--map --json' \
        '--map --totals' --list '--list --content' '--can connect' '--can write' \
        '--is read-only' '--is tls'; do
        # shellcheck disable=SC2086
        check "[ $name ]: $form" equal '0 2' $form -- [ "$@" ]
    done
}

subprocesses() {
    started 'nbdkit memory' nbdkit memory 1M
    started 'nbdkit data' nbdkit data data='1 @0x10000 2' size=1000003
    started 'nbdkit sparse-random' nbdkit -r sparse-random 64M seed=1
    started 'nbdkit sh -c' sh -c 'exec nbdkit -f null 5G'
    check '[ nbdkit ] short options need --' equal 1 [ nbdkit -r memory 1M ]
    check '[ nbdkit ] without --' equal 0 [ nbdkit memory 1M ]
    check '[ nbdkit ] with options behind' equal 0 [ nbdkit memory 1M ] --size
    check '[ nbdkit ] with the unknown context' equal 1 --map=foo:bar [ nbdkit memory 1M ]
    check '[ no such command ]' equal 1 [ /no/such/command ]
    check '[ a command that ends ]' equal 1 [ true ]
    check '[ a command without its end' equal 1 [ nbdkit memory 1M
    check '[ ]' equal 1 [ ]
    check '[ command ] and a name' equal 1 [ nbdkit memory 1M ] name
    check '[ a server that dies ]' equal 1 --map -- [ nbdkit eval get_size='echo 1M' \
        can_extents='exit 0' pread='exit 0' extents='kill -9 $PPID' ]
    check '[ command ] leaves no server' leaves_no_server $info
    check '[ command ]: a signal ends the server too' signal_ends_the_server $info
}

qemu_subprocesses() {
    local map
    started 'qemu-nbd raw' qemu-nbd -r -f raw "$tmp/base"
    started 'qemu-nbd qcow2' qemu-nbd -r -A -B changes -f qcow2 "$tmp/top"
    for map in qemu:allocation-depth qemu:dirty-bitmap:changes; do
        check "[ qemu-nbd qcow2 ]: --map=$map" equal 0 "--map=$map" -- [ qemu-nbd -r -A -B changes \
            -f qcow2 "$tmp/top" ]
    done
}

# Every option of nbdinfo(1) stands in the help.
helps() {
    local option
    timeout 60 $info --help >"$tmp/ours" || return 1
    for option in --can --color --no-color --content --no-content --help --is --json -L --list \
        --map --totals --size -V --version '\[ COMMAND'; do
        grep -q -e "$option" "$tmp/ours" || {
            echo "error: no $option in --help"
            return 1
        }
    done
}

tells_version() {
    [ "$($info --version)" = "$($info -V)" ] &&
        [[ $($info -V) =~ ^info\ \(nbd.h\)\ [0-9]+\.[0-9]+\.[0-9]+$ ]]
}

ext4_image() {
    truncate -s 256M "$tmp/ext4" && mke2fs -q -t ext4 -d /usr/include "$tmp/ext4"
}

ext4_maps() {
    check 'ext4 image: made' ext4_image
    if has nbdkit; then
        check 'ext4 image, nbdkit file: starts' serve_nbdkit file "$tmp/ext4"
        maps 'ext4 image, nbdkit file' 5
    fi
    if has qemu-nbd; then
        check 'ext4 image, qemu-nbd: starts' serve_qemu -f raw "$tmp/ext4"
        maps 'ext4 image, qemu-nbd' 5
    fi
    stop
    rm "$tmp/ext4"
}

# A server of 1000000 bytes that answers block status as its argument says.
write_odd_server() {
    cat >"$tmp/odd.py" <<'END'
import socket, struct, sys

ANSWERS = {
    "short": lambda offset, size: [(1000, 3)],
    "many": lambda offset, size: [(7, 3), (5, 3), (4, 0)],
    "types": lambda offset, size: [(4000, offset // 4000 % 9)],
    "kinds": lambda offset, size: [(500, offset // 500)],
    "overlong": lambda offset, size: [(size - 4000, 0), (8000, 3)],
    "none": lambda offset, size: [],
    "zero": lambda offset, size: [(0, 3)],
    "other": lambda offset, size: None,
    "refuse": lambda offset, size: [(1000, 0)] if offset == 0 else "no \x1b[2J",
}

def take(peer, size):
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data

def option(peer, number):
    def reply(kind, data=b""):
        peer.sendall(struct.pack(">QLLL", 0x3e889045565a9, number, kind, len(data)) + data)
    if number == 7:
        reply(3, struct.pack(">HQH", 0, 1000000, 1))
    if number in (9, 10):
        reply(4, struct.pack(">L", 77) + b"base:allocation")
    reply(1 if number in (7, 8, 9, 10) else 0x80000001)

def status(peer, cookie, answer):
    def chunk(flags, kind, data=b""):
        peer.sendall(struct.pack(">LHHQL", 0x668e33ef, flags, kind, cookie, len(data)) + data)
    if answer is None:
        chunk(1, 0)
    elif isinstance(answer, str):
        chunk(1, 0x8001, struct.pack(">LH", 22, len(answer)) + answer.encode())
    else:
        chunk(1, 5, struct.pack(">L", 77) + b"".join(struct.pack(">LL", *e) for e in answer))

def session(peer):
    peer.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
    take(peer, 4)
    number = 0
    while number != 7:
        number, size = struct.unpack(">8xLL", take(peer, 16))
        take(peer, size)
        option(peer, number)
    while True:
        kind, cookie, offset, size = struct.unpack(">6xHQQL", take(peer, 28))
        if kind != 7:
            return
        status(peer, cookie, ANSWERS[sys.argv[2]](offset, size))

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
while True:
    peer = listener.accept()[0]
    try:
        session(peer)
    except (EOFError, OSError):
        pass
    peer.close()
END
}

serve_odd() {
    start python3 "$tmp/odd.py" "$socket" "$1"
}

# prints TEXT ARGUMENTS...: success, and exactly this.
prints() {
    local text=$1
    shift
    timeout 60 $info "$@" "$uri" >"$tmp/ours" || return 1
    [ "$(cat "$tmp/ours")" = "$text" ] || {
        echo "error: not \"$text\" but $(cat "$tmp/ours")"
        return 1
    }
}

# fails ARGUMENTS...: status 1, a reason, and no escape sequence in it.
fails() {
    timeout 60 $info "$@" "$uri" >"$tmp/ours" 2>"$tmp/ours.err"
    [ $? = 1 ] && grep -q '^info: ' "$tmp/ours.err" && ! grep -q $'\033' "$tmp/ours.err"
}

odd_servers() {
    local mode
    write_odd_server
    check 'an extent per 1000 bytes: starts' serve_odd short
    maps 'an extent per 1000 bytes' 1
    check 'three extents per request: starts' serve_odd many
    maps 'three extents per request' 1000
    check 'types without a meaning: starts' serve_odd types
    maps 'types without a meaning' 250
    check 'an extent behind the export: starts' serve_odd overlong
    check 'an extent behind the export is cut' prints \
        $'         0      996000    0  data\n    996000        4000    3  hole,zero' --map
    check 'the totals of it are 100 %' prints \
        $'    996000  99.6%   0 data\n      4000   0.4%   3 hole,zero' --map --totals
    for mode in none zero other refuse; do
        check "block status, $mode: starts" serve_odd $mode
        check "block status, $mode: fails and ends" fails --map
        check "block status, $mode: the totals fail and print nothing" fails --map --totals
        check "block status, $mode: no totals on stdout" cmp "$tmp/ours" /dev/null
    done
    check 'too many types: starts' serve_odd kinds
    maps_kinds
    stop
}

maps_kinds() {
    check 'too many types: --map' equal 0 --map "$uri"
    check 'too many types: the totals fail' fails --map --totals
}

check '--help names every option' helps
check '--version and -V tell the version' tells_version
if ! has nbdinfo; then
    skip 'info against nbdinfo' 'nbdinfo is not installed'
    exit
fi
our_server
if has nbdkit; then
    nbdkit_maps
    nbdkit_words
    questions
    export_names
    subprocesses
    if has file; then
        content
    else
        skip 'content' 'file is not installed'
    fi
else
    skip 'nbdkit' 'nbdkit is not installed'
fi
if has qemu-nbd && has qemu-img && has qemu-io; then
    qemu_export
    qemu_contexts
    qemu_subprocesses
else
    skip 'qemu-nbd' 'qemu-nbd, qemu-img or qemu-io is not installed'
fi
if has nbd-server; then
    nbd_server
else
    skip 'nbd-server' 'nbd-server is not installed'
fi
if has mke2fs; then
    ext4_maps
else
    skip 'ext4 image' 'mke2fs is not installed'
fi
if has python3; then
    odd_servers
else
    skip 'odd answers to block status' 'python3 is not installed'
fi
