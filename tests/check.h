// Assertions and the naming of tests.  A program calls check_begin, check_case for
// each rule, and returns check_end().  Each case prints "ok NAME" or "FAIL NAME: why".
//   PROGRAM             runs every case
//   PROGRAM NAME...     runs those cases only
//   CHECK_SEED=N        seeds check_random; the seed stands in the first line
//   CHECK_EVERY=N       runs the first case and every Nth behind it: for slow checkers
//   CHECK_SHARE=N       does at every Nth byte what a case does at each: for slow machines
#ifndef CHECK_H
#define CHECK_H

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *name; // of the case that runs
    int argc;
    char **argv;
    char *found; // for each argument: whether a case has its name
    int failed;
    int passed;
    unsigned long every; // CHECK_EVERY
    unsigned long share; // CHECK_SHARE
    unsigned long cases; // so far, those that do not run too
    uint64_t seed;
    uint64_t random;
    char where[256];      // what a case adds to its failures: mode, step
    void (*locate)(void); // NULL, or fills `where` when it is needed
    jmp_buf out;
} check;

#define CHECK(condition) ((condition) ? (void)0 : check_fail(__FILE__, __LINE__, "%s", #condition))

// Compares integers of any type; both are shown when they differ.
#define CHECK_EQUAL(got, wanted) \
    check_equal(__FILE__, __LINE__, #got, (int64_t)(got), (int64_t)(wanted))

#define CHECK_BYTES(got, wanted, size) \
    (memcmp((got), (wanted), (size)) == 0 ? (void)0 \
                                          : check_fail(__FILE__, __LINE__, "bytes of " #got))

#if defined(__GNUC__) || defined(__clang__)
__attribute__((noreturn, format(printf, 3, 4)))
#endif
static inline void
check_fail(const char *file, int line, const char *format, ...)
{
    va_list arguments;

    if (check.locate) check.locate();
    printf("FAIL %s: %s:%d: ", check.name, file, line);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("%s%s\n", check.where[0] ? " in " : "", check.where);
    check.failed++;
    longjmp(check.out, 1);
}

static inline void check_equal(const char *file, int line, const char *what, int64_t got,
                               int64_t wanted)
{
    if (got != wanted) {
        check_fail(file, line, "%s is %lld, not %lld", what, (long long)got, (long long)wanted);
    }
}

// xorshift64*: the same numbers everywhere.
static inline uint32_t check_random(uint32_t below)
{
    check.random ^= check.random >> 12;
    check.random ^= check.random << 25;
    check.random ^= check.random >> 27;
    return (uint32_t)((check.random * UINT64_C(2685821657736338717)) >> 32) % below;
}

static inline void check_reseed(uint64_t seed)
{
    check.random = seed * UINT64_C(6364136223846793005) + 1;
}

// Guard pages turn a stray access into this signal.
static inline void check_crashed(int number)
{
    static const char text[] = ": touched memory that is not its own in ";
    ssize_t ignored = 0;

    if (check.locate) check.locate();
    ignored += write(STDOUT_FILENO, "FAIL ", 5);
    ignored += write(STDOUT_FILENO, check.name, strlen(check.name));
    ignored += write(STDOUT_FILENO, text, sizeof text - 1);
    ignored += write(STDOUT_FILENO, check.where, strlen(check.where));
    ignored += write(STDOUT_FILENO, "\n", 1);
    _exit(ignored > 0 && number > 0 ? 1 : 2);
}

// A count of the environment; 1 if it is not set.
static inline unsigned long check_setting(const char *name)
{
    const char *text = getenv(name);
    unsigned long count = text ? strtoul(text, NULL, 0) : 1;

    return count ? count : 1;
}

static inline void check_begin(int argc, char **argv)
{
    const char *seed = getenv("CHECK_SEED");

    check.argc = argc;
    check.argv = argv;
    check.found = (char *)calloc((size_t)argc + 1, 1);
    if (!check.found) abort();
    check.seed = seed ? strtoull(seed, NULL, 0) : 1;
    check.every = check_setting("CHECK_EVERY");
    check.share = check_setting("CHECK_SHARE");
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    printf("# seed %llu\n", (unsigned long long)check.seed);
    signal(SIGSEGV, check_crashed);
#ifdef SIGBUS
    signal(SIGBUS, check_crashed);
#endif
}

static inline int check_selected(const char *name)
{
    int i, selected = check.argc <= 1;

    for (i = 1; i < check.argc; i++) {
        if (strcmp(check.argv[i], name) != 0) continue;
        check.found[i] = 1;
        selected = 1;
    }
    return selected;
}

static inline void check_case_on(const char *name, void (*run)(const void *), const void *argument)
{
    if (!check_selected(name) || check.cases++ % check.every) return;
    check.name = name;
    check.where[0] = '\0';
    check.locate = NULL;
    check_reseed(check.seed);
    if (setjmp(check.out) == 0) {
        run(argument);
        check.passed++;
        printf("ok %s\n", name);
    }
}

typedef struct check_plain {
    void (*run)(void);
} check_plain;

static inline void check_call_plain(const void *plain)
{
    ((const check_plain *)plain)->run();
}

static inline void check_case(const char *name, void (*run)(void))
{
    check_plain plain;

    plain.run = run;
    check_case_on(name, check_call_plain, &plain);
}

#define CHECK_CASE(function) check_case(#function, function)

// A name that selects nothing must not look like success.
static inline int check_end(void)
{
    int i, missing = 0;

    for (i = 1; i < check.argc; i++) {
        if (check.found[i]) continue;
        fprintf(stderr, "no rule %s\n", check.argv[i]);
        missing = 1;
    }
    if (check.passed + check.failed + missing == 0) {
        fprintf(stderr, "no rule ran\n");
        missing = 1;
    }
    return missing ? 2 : check.failed != 0;
}

#endif
