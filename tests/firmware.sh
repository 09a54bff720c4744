#!/bin/bash
# limit: 600
# examples/firmware: both images build, prove their disk on a real server, and fail with a
# clear text when they must.  QEMU is the board; what the images print is shown indented.
. tests/lib.sh
. tests/servers.sh

lwip=${NBD_LWIP:-/var/cache/nbd.h-lwip}
board='-M mps2-an385 -display none -monitor none -nodefaults'
uart=$tmp/uart.elf
net=$tmp/lwip.elf
disk=$tmp/disk

for program in arm-none-eabi-gcc arm-none-eabi-nm qemu-system-arm nbdkit python3; do
    has "$program" && continue
    skip 'the firmware proves its disk' "$program is not installed"
    exit
done

build() {
    local out=$2
    examples/firmware/build.sh "$@" && [ -s "$out" ]
}

# All that the UART's image is made of, but nbd.h.
lines_of_uart() {
    cat examples/firmware/board.* examples/firmware/uart/* | wc -l
}

fewer_than() {
    echo "error: $2 lines, limit $1"
    [ "$2" -lt "$1" ]
}

# What image $2, called $1, must not contain: a heap, 64-bit division, floating point.
surprises() {
    arm-none-eabi-nm "$2" | sed 's/.* //' | grep -E -x '_?(malloc|free|calloc|realloc|sbrk)(_r)?|'\
'__aeabi_u?(idiv|ldivmod|idivmod).*|__u?(div|mod|divmod)[ds]i[34]|'\
'__aeabi_[dfh].*|__aeabi_u?[il]2[df]|.*[sd]f[23]|.*printf.*' | nothing "$1"
}

# What the engine alone calls, for processor $1 with options $2..., that it should not: libgcc
# has the rest of what the compiler may call, such as __aeabi_uldivmod.
calls_of_engine() {
    local allowed='memcpy|memset|memmove|memcmp|strlen'
    # It has no instruction that branches by a table.
    [ "$1" = cortex-m0 ] && allowed="$allowed|__gnu_thumb1_case_[us]?[qh]i"
    arm-none-eabi-gcc "-mcpu=$1" -mthumb -std=c99 -ffreestanding -I. -DNBD_NO_SOCKETS -DNBD_NO_CONVENIENCE \
        "${@:2}" -c -o "$tmp/engine.o" tests/compile/implement.c &&
        arm-none-eabi-nm -u "$tmp/engine.o" | sed 's/.* //' | grep -v -E -x "$allowed" | nothing "$1"
}

# emulate IMAGE OPTIONS...: its output and its status; 60 seconds at most.
emulate() {
    # shellcheck disable=SC2086
    timeout 60 qemu-system-arm $board -semihosting-config \
        "enable=on,target=native,arg=firmware,arg=$port" -kernel "$@" </dev/null 2>&1
}

over_uart() {
    emulate "$uart" -nic user -chardev "socket,id=nbd,path=$socket" -serial chardev:nbd
}

over_tcp() {
    emulate "${1:-$net}" -nic user
}

# proves RULE COMMAND...: it succeeds; what it printed is shown.
proves() {
    check "$@"
    sed 's/^/  /' "$tmp/output"
    cp "$tmp/output" "$tmp/figures"
}

# prints TEXT...: each is in what was printed last.
prints() {
    local text
    for text in "$@"; do
        grep -q -E "$text" "$tmp/figures" || { echo "error: no \"$text\""; return 1; }
    done
}

# disk FILE: 1 MiB of a pattern that is not the firmware's, with two partitions; and what the
# firmware makes of it.
make_disk() {
    python3 - "$1" "$1.expected" <<'END'
import struct, sys
disk = bytearray(i * 7 & 0xff for i in range(1 << 20))
disk[446:510] = bytes(64)
for at, kind, first, count in (446, 0x83, 64, 512), (462, 0xda, 1024, 1024):
    disk[at:at + 16] = struct.pack("<4xB3xII", kind, first, count)
disk[510:512] = b"\x55\xaa"
open(sys.argv[1], "wb").write(disk)
disk[1024 * 512:1024 * 512 + 32768] = bytes((i * 2654435761 & 0xffffffff) >> 24 for i in range(32768))
open(sys.argv[2], "wb").write(disk)
END
}

# 9 MiB, of which the firmware writes 8.
make_large_disk() {
    python3 - "$1" "$1.expected" <<'END'
import array, sys
size = 9 << 20
disk = bytearray(b"not written") * (size // 11 + 1)
del disk[size:]
open(sys.argv[1], "wb").write(disk)
words = array.array("I", ((i ^ 0x5eed5eed) * 2654435761 & 0xffffffff for i in range(0, 8 << 20, 4)))
if sys.byteorder == "big":
    words.byteswap()
disk[:8 << 20] = words.tobytes()
open(sys.argv[2], "wb").write(disk)
END
}

serve_uart() {
    start nbdkit -f -v -U "$socket" "$@"
}

serve_tcp() {
    fresh_port
    launch nbdkit -f -v -i 127.0.0.1 -p "$port" "$@"
}

# The server has been told of the end, by $1 sessions.
told_of_the_end() {
    stop
    [ "$(grep -c NBD_CMD_DISC "$tmp/server.log")" = "$1" ]
}

# A server of file $3 that gets signal $1 by the write that reaches offset $4; $2 starts it.
serve_until() {
    # shellcheck disable=SC2016
    "$2" eval get_size='stat -c %s '"$3" can_write='exit 0' \
        pread='dd if='"$3"' skip=$4 count=$3 iflag=count_bytes,skip_bytes status=none' \
        pwrite='cat >/dev/null; [ "$4" -lt '"$4"' ] || kill -'"$1"' $PPID'
}

# ended_with STATUS: the server is over by itself.
ended_with() {
    ended "$server_pid" || return
    wait "$server_pid"
    [ $? = "$1" ]
}

was_stopped() {
    grep -q '^State:.T' "/proc/$server_pid/status" && kill -9 "$server_pid"
}

# A server on $port that sends $1, and resets the connection when something has come.
serve_bytes() {
    launch python3 -c '
import socket, struct, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
client = server.accept()[0]
client.sendall(sys.argv[2].encode().decode("unicode_escape").encode("latin-1"))
client.recv(1)
client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
client.close()
' "$port" "$1"
}

uart_tests() {
    check 'uart: builds without a warning' build uart "$uart"
    check 'uart: all of it has fewer than 300 lines' fewer_than 300 "$(lines_of_uart)"
    check 'uart: no heap, no 64-bit division, no floating point' surprises uart "$uart"
    make_disk "$disk"
    serve_uart file "$disk"
    proves 'uart: writes and verifies 32 KiB' over_uart
    check 'uart: prints the partitions and its figures' prints '^partition 1: type 131, 512 sectors from 64 ' \
        '^partition 2: type 218, 1024 sectors from 1024 ' '32768 bytes .* [0-9]+ KiB/s, [0-9]+ KiB/s' \
        '^sent [0-9]+ bytes' '^[0-9]+ bytes of code, [0-9]+ of variables, [0-9]+ of stack'
    check 'uart: says goodbye' told_of_the_end 1
    check 'uart: the disk is what it says, and nothing else changed' cmp "$disk" "$disk.expected"
}

uart_failures() {
    local quick=$tmp/quick.elf
    serve_uart -r file "$disk"
    refuse 'uart: read-only export' 'sector 1024: write: .*read-only' over_uart
    truncate -s 600k "$disk"
    serve_uart file "$disk"
    refuse 'uart: partition behind the end' 'sector 1024: partition: .*past the end' over_uart
    serve_uart memory 1M
    refuse 'uart: no partition table' 'sector 0: no partition table' over_uart
    serve_uart memory 512
    refuse 'uart: export smaller than a block' 'sector 0: read of the partition table: .*past the end' over_uart
    check 'uart: builds with another limit' build uart "$quick" -DLIMIT_MS=3000
    uart=$quick
    make_disk "$disk"
    serve_until KILL serve_uart "$disk" $((1024 * 512 + 16384))
    refuse 'uart: server that dies' 'sector 1056: write: timed out' over_uart
    check 'uart: it did die' ended_with 137
}

lwip_tests() {
    check 'lwip: builds without a warning' build lwip "$net"
    check 'lwip: no heap, no 64-bit division, no floating point' surprises lwip "$net"
    make_large_disk "$disk"
    serve_tcp file "$disk"
    proves 'lwip: writes and verifies 8 MiB' over_tcp
    check 'lwip: prints its figures' prints '^wrote 8 MiB .* [0-9]+\.[0-9] MiB/s' \
        '^verified 8 MiB .* [0-9]+\.[0-9] MiB/s' '^sent [0-9]+ bytes' '^[0-9]+ bytes of code, '
    check 'lwip: says goodbye' told_of_the_end 1
    check 'lwip: the disk is what it says, and nothing else changed' cmp "$disk" "$disk.expected"
}

# With a server that answers before the data has come, what is lost is sent again behind the
# answer: the memory must not be in use for the next request by then.
lwip_losses() {
    local lossy=$tmp/lossy.elf
    check 'lwip: builds with a driver around its driver' build lwip "$lossy" tests/firmware/loss.c -Wl,--wrap=ethernet_start
    make_large_disk "$disk"
    serve_tcp file "$disk"
    check 'lwip: lost packets do no harm' over_tcp "$lossy"
    stop
    check 'lwip: the disk is right then' cmp "$disk" "$disk.expected"
    fresh_port
    launch python3 tests/firmware/early.py "$port" "$disk"
    check 'lwip: nor do early answers' over_tcp "$lossy"
    check 'lwip: the server comes to its end' ended_with 0
    check 'lwip: what is on its way keeps its memory' cmp -n $((8 << 20)) "$disk" "$disk.expected"
}

lwip_failures() {
    local quick=$tmp/quick.elf
    check 'lwip: builds with another limit' build lwip "$quick" -DLIMIT_MS=3000
    serve_tcp -r file "$disk"
    refuse 'lwip: read-only export' 'sector 0: write: .*read-only' over_tcp
    serve_tcp memory 4M
    refuse 'lwip: export too small' 'sector 8192: write: .*past the end' over_tcp
    serve_until KILL serve_tcp "$disk" $((4 << 20))
    refuse 'lwip: server that dies' 'sector [0-9]*: write: \(server closed\|transport failed\)' over_tcp
    check 'lwip: it did die' ended_with 137
    serve_until STOP serve_tcp "$disk" $((4 << 20))
    refuse 'lwip: server that falls silent' 'sector [0-9]*: session: timed out' over_tcp "$quick"
    check 'lwip: it is there still' was_stopped
    fresh_port
    serve_bytes 'NBDMAGICIHAVEOPT\x00\x03'
    refuse 'lwip: server that resets' 'sector 0: session: transport failed.* connection reset' over_tcp
    fresh_port
    serve_bytes 'HTTP/1.0 400 Bad Request'
    refuse 'lwip: server that is none' 'sector 0: session: not an NBD server' over_tcp
    fresh_port
    refuse 'lwip: no server' 'sector 0: session: transport failed.* connection refused' over_tcp
}

check 'the engine calls nothing but memory functions: -Os' calls_of_engine cortex-m3 -Os
check 'the engine calls nothing but memory functions: -O2' calls_of_engine cortex-m3 -O2
check 'the engine calls nothing but memory functions: -O0' calls_of_engine cortex-m3 -O0
check 'the engine calls nothing but listed helpers: Cortex-M0' calls_of_engine cortex-m0 -Os
uart_tests
uart_failures
if [ -e "$lwip/src/core/tcp.c" ]; then
    lwip_tests
    lwip_losses
    lwip_failures
else
    skip 'lwip: writes and verifies 8 MiB' "no sources of lwIP in $lwip: tests/lwip.sh"
fi
