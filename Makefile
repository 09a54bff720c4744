# nbd.h needs no build: this builds its examples and tests.  GNU make.
#
# CC, CXX, CFLAGS, CPPFLAGS, LDFLAGS, PREFIX and DESTDIR are yours; the flags
# that this project needs are in STD and WARN and stay whatever you set.
# V=1 shows whole commands.

ifeq ($(origin CC),default)
CC := gcc
endif
CFLAGS ?= -O2 -g
PREFIX ?= /usr/local
APT_GET ?= apt-get

STD := -std=c99 -pedantic
WARN := -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual \
    -Wstrict-prototypes -Wmissing-prototypes
ifeq ($(CI),true)
WARN += -Werror
endif
COMPILE = $(CC) $(STD) $(WARN) -I. $(CPPFLAGS) $(CFLAGS)
BUILD = $(if $(filter 1,$(V)),,@echo 'CC $@' &&) $(COMPILE) -MMD -MP -MF $@.d -o $@ $< $(LDFLAGS)

VERSION := $(shell sed -n 's/^.define NBD_VERSION_M[AI][JN]OR \(.*\)/\1./p; \
    s/^.define NBD_VERSION_PATCH \(.*\)/\1/p' nbd.h | tr -d '\n')

# An example of a library that is not installed is left out.
EV := $(shell echo '\#include <ev.h>' | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 && echo yes)
URING := $(shell echo '\#include <liburing.h>' | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 && echo yes)
MBEDTLS := $(shell echo '\#include <mbedtls/ssl.h>' | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 && echo yes)
OPENSSL := $(shell echo '\#include <openssl/ssl.h>' | $(CC) $(CPPFLAGS) -E - >/dev/null 2>&1 && echo yes)
MBEDTLS_LIBRARIES := -lmbedtls -lmbedx509 -lmbedcrypto
LEFT_OUT := $(if $(EV),,examples/libev_copy.c) $(if $(URING),,examples/uring_copy.c) \
    $(if $(MBEDTLS),,examples/tls.c) $(if $(OPENSSL),,examples/tls_openssl.c)
EXAMPLES := $(patsubst examples/%.c,build/examples/%,$(filter-out $(LEFT_OUT), \
    $(wildcard examples/*.c)))
PROGRAMS := $(patsubst tests/%.c,build/tests/%,$(wildcard tests/test_*.c)) \
    $(patsubst tests/hostile/%.c,build/tests/hostile_%,$(wildcard tests/hostile/*.c))
SERVER := build/tests/server
TOOLS := $(SERVER) build/tests/every build/tests/judge build/tests/differential build/tests/deadlock
SOURCES := nbd.h $(wildcard examples/*.[ch] examples/firmware/*.[ch] examples/firmware/*/*.[ch] \
    examples/firmware/*/*/*.[ch] tests/*.[ch] tests/compile/*.[ch] tests/firmware/*.[ch] \
    tests/fuzz/*.[ch] tests/hostile/*.[ch] tests/transports/*.h tests/windows/sys/*.h bench/*.[ch])

# Debian packages for the tests that use other people's programs.
PACKAGES := afl++ clang clang-19 clang-format clang-tidy cppcheck debootstrap dpkg-dev \
    e2fsprogs file g++ g++-mingw-w64-x86-64-win32 gcc-12-multilib gcc-aarch64-linux-gnu \
    gcc-arm-linux-gnueabihf gcc-arm-none-eabi gcc-mingw-w64-x86-64-win32 gcc-s390x-linux-gnu git \
    gnuplot-nox gnutls-bin libc6-dev-arm64-cross libc6-dev-armhf-cross libc6-dev-i386 \
    libc6-dev-s390x-cross libclang-rt-14-dev libclang-rt-19-dev libev-dev libmbedtls-dev \
    libnbd-bin libnbd-dev libnewlib-arm-none-eabi libssl-dev liburing-dev linux-libc-dev llvm-19 \
    musl-tools nbd-server nbdkit nbdkit-plugin-python pkg-config python3 python3-clang-14 \
    qemu-system-arm qemu-user qemu-utils shellcheck strace tcc tshark valgrind wine64

.DELETE_ON_ERROR:
.PHONY: all tests demo check deps size firmware portability bench bench-quick bench-programs \
    bench-extents bench-no-init bench-send-more bench-parallel bench-connections bench-tls fuzz \
    fuzz-long coverage mutation format format-check install clean FORCE

all: $(EXAMPLES)

tests: $(PROGRAMS) $(TOOLS)

demo: all $(SERVER)
	@tests/demo.sh

# TESTS='test_reads interop.sh' runs these only; without it all are run.  What a script
# runs is not known here, so it has all but the other tests.
WANTED := $(notdir $(TESTS))
CHECKED := $(filter $(addprefix build/tests/,$(WANTED)),$(PROGRAMS))
SCRIPTS := $(notdir $(wildcard tests/*.sh tests/compile/*.sh))
CHECKED += $(if $(filter $(SCRIPTS) $(SCRIPTS:.sh=),$(WANTED)),$(EXAMPLES) $(TOOLS))
check: $(if $(WANTED),$(CHECKED),all tests)
	@CC='$(CC)' CFLAGS='$(CFLAGS)' tests/run $(TESTS)

deps:
	$(APT_GET) update
	$(APT_GET) install -y --no-install-recommends $(PACKAGES)
	tests/trixie.sh
	tests/lwip.sh

size:
	@CC='$(CC)' tests/size.sh table

# Both images in QEMU against nbdkit, with the figures that they print.
firmware:
	@tests/firmware.sh

portability:
	@tests/portability.sh

# The programs that `make bench` runs; the one of libnbd where libnbd is installed.
BENCH := build/bench/fastserver build/bench/nbdh build/bench/floor \
    $(if $(shell pkg-config --libs libnbd 2>/dev/null),build/bench/libnbd build/bench/memory)
bench-programs: $(BENCH)

# BENCH_OPTIONS='--rounds=21 --pin=together': see bench/run.py --help.
bench: bench-programs build/examples/copy
	@bench/run.py $(BENCH_OPTIONS)

bench-quick: bench-programs
	@bench/run.py --quick $(BENCH_OPTIONS)

# Five experiments; EXPERIMENT_OPTIONS='--rounds=5', or --quick to try them.
DEFAULT_MODE := $(patsubst build/examples/%,build/bench/default/%,$(filter %copy,$(EXAMPLES)))
bench-no-init bench-parallel: $(EXAMPLES)
bench-no-init: $(DEFAULT_MODE) $(if $(EV),$(filter %_copy,$(BENCH:libnbd=libnbd_copy)))
bench-connections: build/bench/connections
bench-tls: build/examples/copy $(if $(MBEDTLS),build/bench/nbdh_mbedtls) $(if $(OPENSSL),build/bench/nbdh_openssl) \
    $(if $(MBEDTLS),$(if $(OPENSSL),build/bench/tls_floor))
bench-no-init bench-send-more bench-parallel bench-connections bench-tls: bench-%: $(BENCH)
	@python3 bench/experiments.py $* $(EXPERIMENT_OPTIONS)

bench-extents: build/bench/extents
	@build/bench/extents

# libFuzzer and AFL++ over each target: each target takes FUZZ_SECONDS, or FUZZ_HOURS.  What
# is found new goes to build/fuzz.
FUZZ_SECONDS ?= 60
FUZZ_HOURS ?= 1
fuzz:
	@tests/fuzz/run.sh $(FUZZ_SECONDS)

fuzz-long:
	@tests/fuzz/run.sh $$(($(FUZZ_HOURS) * 3600))

# What the tests reach of nbd.h, and whether they notice that it is broken: MUTANTS, SEED.
coverage:
	@tests/coverage.sh

mutation:
	@tests/mutate.py

format:
	clang-format -i $(SOURCES)

format-check:
	clang-format --dry-run -Werror $(SOURCES)

install: build/nbd.h.pc
	install -d '$(DESTDIR)$(PREFIX)/include' '$(DESTDIR)$(PREFIX)/share/pkgconfig'
	install -m 644 nbd.h '$(DESTDIR)$(PREFIX)/include/nbd.h'
	install -m 644 build/nbd.h.pc '$(DESTDIR)$(PREFIX)/share/pkgconfig/nbd.h.pc'

clean:
	rm -rf build

build build/examples build/tests build/bench:
	@mkdir -p $@

# Written anew only when the flags change: everything is built again then.
build/flags: FORCE | build
	@echo '$(COMPILE) $(LDFLAGS)' | cmp -s - $@ || echo '$(COMPILE) $(LDFLAGS)' > $@

# PREFIX is part of it, so it is made each time.
build/nbd.h.pc: FORCE | build
	@printf '%s\n' 'prefix=$(PREFIX)' 'includedir=$${prefix}/include' '' 'Name: nbd.h' \
	    'Description: NBD client in one header, non-blocking, no allocation' \
	    'Version: $(VERSION)' 'Cflags: -I$${includedir}' > $@

build/examples/%: examples/%.c build/flags | build/examples
	$(BUILD)

# The examples with an nbd.h in which NBD_NO_INIT means nothing.
build/bench/default/nbd.h: nbd.h
	@mkdir -p $(@D)
	sed 's/^#define NBD_NO_INIT 0x20u$$/#define NBD_NO_INIT 0x00u/' $< > $@
	! cmp -s $< $@

build/bench/default/%: examples/%.c build/bench/default/nbd.h build/flags
	$(COMPILE:-I.=-Ibuild/bench/default) -o $@ $< $(LDFLAGS)

build/bench/default/libev_copy build/examples/libev_copy: private LDFLAGS += -lev
build/bench/default/uring_copy build/examples/uring_copy: private LDFLAGS += -luring
build/bench/default/copy build/examples/copy build/examples/threads: private LDFLAGS += -pthread
build/examples/tls_openssl: private LDFLAGS += -lssl -lcrypto

# The tools speak TLS where mbedTLS is installed.
ifeq ($(MBEDTLS),yes)
TLS_TOOLS := $(addprefix build/examples/,copy dump info tls)
$(TLS_TOOLS): private CPPFLAGS += -DNBD_MBEDTLS
$(TLS_TOOLS): private LDFLAGS += $(MBEDTLS_LIBRARIES)
endif

build/tests/test_threads: private LDFLAGS += -pthread
ifeq ($(URING),yes)
build/tests/test_transports: private CPPFLAGS += -DWITH_URING
build/tests/test_transports: private LDFLAGS += -luring
endif

# Without the library these only say that they are skipped.
ifeq ($(MBEDTLS),yes)
TLS_TESTS := build/tests/test_tls build/tests/test_tls_errors
$(TLS_TESTS): private CPPFLAGS += -DNBD_MBEDTLS
$(TLS_TESTS): private LDFLAGS += $(MBEDTLS_LIBRARIES)
endif

build/tests/%: tests/%.c build/flags | build/tests
	$(BUILD)

build/tests/hostile_%: tests/hostile/%.c build/flags | build/tests
	$(BUILD)

build/bench/%: bench/%.c build/flags | build/bench
	$(BUILD)

# The seam of TLS stands in a file of its own, since nbdh.c has all of nbd.h as static.
build/bench/nbdh_%: bench/nbdh.c bench/seal_%.c nbd.h $(wildcard bench/*.h examples/*.h) \
    examples/tls_openssl.c build/flags | build/bench
	$(if $(filter 1,$(V)),,@echo 'CC $@' &&) $(COMPILE) -DBENCH_SEAL -o $@ bench/nbdh.c \
	    bench/seal_$*.c $(LDFLAGS)

build/bench/nbdh_mbedtls: private LDFLAGS += $(MBEDTLS_LIBRARIES) -lpthread
build/bench/nbdh_openssl: private LDFLAGS += -lssl -lcrypto -lpthread
build/bench/tls_floor: private LDFLAGS += $(MBEDTLS_LIBRARIES) -lssl -lcrypto -lpthread
$(BENCH): private LDFLAGS += -lpthread
build/bench/libnbd_copy: private LDFLAGS += -lev $(shell pkg-config --libs libnbd)
build/bench/libnbd build/bench/memory: private LDFLAGS += $(shell pkg-config --libs libnbd)

-include $(wildcard build/*/*.d)
