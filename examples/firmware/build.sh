#!/bin/sh
# Builds one of the examples for a Cortex-M3, from the top directory:
#
#   examples/firmware/build.sh uart build/uart.elf [OPTION...]
#   examples/firmware/build.sh lwip build/lwip.elf [OPTION...]
#
# OPTION is for the compiler.  The second needs the sources of lwIP in ${NBD_LWIP:-
# /var/cache/nbd.h-lwip}; tests/lwip.sh fetches them.
set -e
here=$(dirname "$0")
example=$1
out=$2
shift 2
mkdir -p "$(dirname "$out")"

WARN='-Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual
    -Wstrict-prototypes -Wmissing-prototypes -pedantic -Werror'
# For your board: the processor, and the linker script.
cpu='-mcpu=cortex-m3 -mthumb'
link="-Wl,--gc-sections -nostartfiles --specs=nano.specs -T $here/board.ld"
# Each function is kept only if it is called.
flags="-std=c99 -Os -ffreestanding -ffunction-sections -fdata-sections -I$here/../.."

# lwIP is compiled as it comes, and its headers are not warned about.
others=
if [ "$example" = lwip ]; then
    lwip=${NBD_LWIP:-/var/cache/nbd.h-lwip}
    flags="$flags -isystem $lwip/src/include -I$here/lwip"
    others=$out.lwip.o
    # shellcheck disable=SC2086
    arm-none-eabi-gcc $cpu $flags -w -r -nostdlib -o "$others" "$lwip"/src/core/*.c \
        "$lwip"/src/core/ipv4/*.c "$lwip/src/netif/ethernet.c"
fi

# shellcheck disable=SC2086
arm-none-eabi-gcc $cpu $flags $WARN "$@" $link -o "$out" "$here/board.c" "$here/$example"/*.c $others
