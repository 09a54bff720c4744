# nbd.h needs no build: this builds its examples and tests.  GNU make.
#
# CC, CXX, CFLAGS, CPPFLAGS, LDFLAGS, PREFIX and DESTDIR are yours; the flags
# that this project needs are in STD and WARN and stay whatever you set.

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

VERSION := $(shell sed -n 's/^.define NBD_VERSION_M[AI][JN]OR \(.*\)/\1./p; \
    s/^.define NBD_VERSION_PATCH \(.*\)/\1/p' nbd.h | tr -d '\n')

EXAMPLES := $(patsubst examples/%.c,build/examples/%,$(wildcard examples/*.c))
PROGRAMS := $(patsubst tests/%.c,build/tests/%,$(wildcard tests/test_*.c))
SERVER := build/tests/server
SOURCES := nbd.h $(wildcard examples/*.[ch] tests/*.[ch] tests/compile/*.[ch] bench/*.[ch])

# Debian packages for the tests that use other people's programs.
PACKAGES := clang clang-format e2fsprogs g++ gcc-12-multilib git libc6-dev-i386 libnbd-dev \
    linux-libc-dev musl-tools nbd-server nbdkit pkg-config qemu-user qemu-utils tcc

.DELETE_ON_ERROR:
.PHONY: all tests demo check deps size bench-extents format format-check install clean FORCE

all: $(EXAMPLES)

tests: $(PROGRAMS) $(SERVER)

demo: all $(SERVER)
	@tests/demo.sh

# TESTS='test_reads interop.sh' runs these only; without it all are run.
check: all tests
	@CC='$(CC)' CFLAGS='$(CFLAGS)' tests/run $(TESTS)

deps:
	$(APT_GET) update
	$(APT_GET) install -y --no-install-recommends $(PACKAGES)

size:
	@CC='$(CC)' tests/size.sh table

bench-extents: build/bench/extents
	@build/bench/extents

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
	mkdir -p $@

# Written anew only when the flags change: everything is built again then.
build/flags: FORCE | build
	@echo '$(COMPILE) $(LDFLAGS)' | cmp -s - $@ || echo '$(COMPILE) $(LDFLAGS)' > $@

# PREFIX is part of it, so it is made each time.
build/nbd.h.pc: FORCE | build
	@printf '%s\n' 'prefix=$(PREFIX)' 'includedir=$${prefix}/include' '' 'Name: nbd.h' \
	    'Description: NBD client in one header, non-blocking, no allocation' \
	    'Version: $(VERSION)' 'Cflags: -I$${includedir}' > $@

build/examples/%: examples/%.c build/flags | build/examples
	$(COMPILE) -MMD -MP -MF $@.d -o $@ $< $(LDFLAGS)

build/tests/%: tests/%.c build/flags | build/tests
	$(COMPILE) -MMD -MP -MF $@.d -o $@ $< $(LDFLAGS)

build/bench/%: bench/%.c build/flags | build/bench
	$(COMPILE) -MMD -MP -MF $@.d -o $@ $< $(LDFLAGS)

-include $(wildcard build/*/*.d)
