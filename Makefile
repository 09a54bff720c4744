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

EXAMPLES := $(patsubst examples/%.c,build/examples/%,$(wildcard examples/*.c))
PROGRAMS := $(patsubst tests/%.c,build/tests/%,$(wildcard tests/test_*.c))
SERVER := build/tests/server
TOOLS := $(SERVER) build/tests/every build/tests/judge
SOURCES := nbd.h $(wildcard examples/*.[ch] tests/*.[ch] tests/compile/*.[ch] tests/fuzz/*.[ch] \
    bench/*.[ch])

# Debian packages for the tests that use other people's programs.
PACKAGES := clang clang-format debootstrap e2fsprogs g++ gcc-12-multilib gcc-arm-none-eabi \
    git libc6-dev-i386 libclang-rt-14-dev libnbd-bin libnbd-dev libnewlib-arm-none-eabi \
    linux-libc-dev musl-tools nbd-server nbdkit pkg-config python3 qemu-user \
    qemu-utils tcc tshark

.DELETE_ON_ERROR:
.PHONY: all tests demo check deps size bench-extents fuzz format format-check install clean FORCE

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

size:
	@CC='$(CC)' tests/size.sh table

bench-extents: build/bench/extents
	@build/bench/extents

# Needs clang and its libFuzzer.  What is found new goes to build/fuzz/corpus.
FUZZ_SECONDS ?= 60
fuzz: tests/fuzz/fuzz_engine.c nbd.h
	mkdir -p build/fuzz/corpus
	clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I. \
	    -o build/fuzz/fuzz_engine $<
	cd build/fuzz && ./fuzz_engine -max_len=2000 -timeout=5 -print_final_stats=1 \
	    -max_total_time=$(FUZZ_SECONDS) corpus ../../tests/fuzz/corpus

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

build/tests/%: tests/%.c build/flags | build/tests
	$(BUILD)

build/bench/%: bench/%.c build/flags | build/bench
	$(BUILD)

-include $(wildcard build/*/*.d)
