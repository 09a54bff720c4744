// judge.c - judges a session that tshark captured
//
//   tshark -q -r FILE -z follow,tcp,raw,N | judge [EXPECTED]
//
// Reads lines of hexadecimal digits, in the order in which the bytes crossed; those of one side
// begin with a tab.  The first line is the greeting, so its side is the server.  Prints
// "# bytes SENT RECEIVED" for the client and the findings; exits with 0 if the client broke no
// rule, or once the one EXPECTED, with 1 if it broke others, with 2 if the input is no capture.
#include "checker.h"
#include <ctype.h>

static int die(const char *why)
{
    fprintf(stderr, "judge: %s\n", why);
    return 2;
}

// The value of the next two digits; -1 at the end of the line, -2 if it is something else.
static int next_byte(void)
{
    char digits[3] = {0};
    for (int i = 0; i < 2; i++) {
        int c = getchar();
        if (i == 0 && (c == '\n' || c == EOF)) return -1;
        if (c == EOF || !isxdigit(c)) return -2;
        digits[i] = (char)c;
    }
    return (int)strtol(digits, NULL, 16);
}

// Returns what the line began with.
static int skip_line(void)
{
    int first = getchar(), c = first;
    while (c != '\n' && c != EOF)
        c = getchar();
    return first;
}

static int report(const checker *k, const char *expected)
{
    static const char *const names[] = {"client", "client", "server", "server"};
    unsigned broken = k->count[CHECKER_CLIENT] + k->count[CHECKER_CLIENT_SHOULD];
    int as_expected = 0;
    for (int list = 0; list < CHECKER_LISTS; list++) {
        for (unsigned i = 0; i < k->count[list] && i < CHECKER_KEPT; i++) {
            const char *rule = k->found[list][i].rule;
            printf("# %s: %s at %llu\n", names[list], rule,
                   (unsigned long long)k->found[list][i].position);
            if (expected && list <= CHECKER_CLIENT_SHOULD) as_expected = !strcmp(rule, expected);
        }
    }
    if (k->lost) return 1;
    return expected ? !(broken == 1 && as_expected) : broken != 0;
}

int main(int argc, char **argv)
{
    static checker k;
    unsigned long long sent = 0, received = 0;
    int c, nodes = 0, server_side = 0, status;
    checker_begin(&k);
    // The last lines of the head name the two nodes; a line of "=" is the end.
    while (nodes < 2 && (c = skip_line()) != EOF)
        nodes += c == 'N';
    while ((c = getchar()) != EOF && c != '=') {
        int byte, tab = c == '\t';
        if (!tab) ungetc(c, stdin);
        if (sent + received == 0) server_side = tab;
        while ((byte = next_byte()) >= 0) {
            unsigned char one = (unsigned char)byte;
            if (tab == server_side) {
                checker_server(&k, &one, 1);
                received++;
            } else {
                checker_client(&k, &one, 1);
                sent++;
            }
        }
        if (byte == -2) return die("not the output of follow,tcp,raw");
    }
    if (received == 0) return die("no bytes");
    checker_end(&k);
    printf("# bytes %llu %llu\n", sent, received);
    status = report(&k, argc > 1 ? argv[1] : NULL);
    checker_free(&k);
    return status;
}
