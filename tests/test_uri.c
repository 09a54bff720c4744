// nbd_uri_parse: one case for each rule, and each of them again in memory of every size.
#define _POSIX_C_SOURCE 200112L
#define NBD_IMPLEMENTATION
#include "nbd.h"
#include "check.h"

// What a text must give.  Members that are NULL must be NULL.
typedef struct good {
    const char *name; // the rule
    const char *text;
    nbd_uri wanted;
} good;

// Where a text breaks which rule.
typedef struct bad {
    const char *name;
    const char *text;
    const char *detail; // a part of it
    size_t at;
} bad;

// clang-format off
#define TCP(host, port) {NBD_ADDRESS_TCP, 0, host, port, NULL, 0, 0}
#define SOCKET(path) {NBD_ADDRESS_UNIX, 0, NULL, NULL, path, 0, 0}
#define ABSTRACT(name) {NBD_ADDRESS_ABSTRACT, 0, NULL, NULL, name, 0, 0}
#define VSOCK(cid, port) {NBD_ADDRESS_VSOCK, 0, NULL, NULL, NULL, cid, port}
#define HOST TCP("h", NULL)
#define SECURE NBD_TLS_REQUIRE

// Arguments are macros that expand to braces, so they go through __VA_ARGS__.
#define PLAIN(export_name, ...) \
    {0, 1, __VA_ARGS__, export_name, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0}
#define USER(flags, user, ...) \
    {flags, 1, __VA_ARGS__, "", user, NULL, NULL, NULL, NULL, NULL, NULL, 0}
#define UNKNOWN(parameter, ...) \
    {0, 1, __VA_ARGS__, "", NULL, NULL, NULL, NULL, NULL, parameter, NULL, 0}
#define TLS(flags, verify, type, hostname, certificates, psk_file, ...) \
    {flags, verify, __VA_ARGS__, "", NULL, type, hostname, certificates, psk_file, NULL, NULL, 0}
#define VERIFY(verify) TLS(SECURE, verify, NULL, NULL, NULL, NULL, HOST)
// clang-format on

static const good goods[] = {
    {"tcp_with_host_port_and_name", "nbd://h:10810/e", PLAIN("e", TCP("h", "10810"))},
    {"nbds_requires_tls", "nbds://h", TLS(SECURE, 1, NULL, NULL, NULL, NULL, HOST)},
    {"nbds_unix_requires_tls", "nbds+unix:///?socket=/s",
     TLS(SECURE, 1, NULL, NULL, NULL, NULL, SOCKET("/s"))},
    {"nbds_vsock_requires_tls", "nbds+vsock://2",
     TLS(SECURE, 1, NULL, NULL, NULL, NULL, VSOCK(2, 0))},
    {"scheme_has_no_case", "NbD+UniX:///e?socket=/s", PLAIN("e", SOCKET("/s"))},

    {"no_path_is_the_empty_name", "nbd://h", PLAIN("", HOST)},
    {"only_a_slash_is_the_empty_name", "nbd://h/", PLAIN("", HOST)},
    {"query_without_path_is_the_empty_name", "nbd://h?x-a=1", UNKNOWN("x-a", HOST)},
    {"only_the_first_slash_is_removed", "nbd://h//a", PLAIN("/a", HOST)},
    {"later_slashes_belong_to_the_name", "nbd://h/a/b/", PLAIN("a/b/", HOST)},
    {"name_is_decoded_once", "nbd://h/a%2fb%252f", PLAIN("a/b%2f", HOST)},
    {"escapes_have_either_case", "nbd://h/%c3%A9", PLAIN("\xc3\xa9", HOST)},
    {"name_need_not_be_utf8", "nbd://h/%c3%28", PLAIN("\xc3(", HOST)},
    {"name_may_hold_control_characters", "nbd://h/a%0ab", PLAIN("a\nb", HOST)},
    {"name_may_hold_question_mark_and_hash", "nbd://h/a%3Fb%23", PLAIN("a?b#", HOST)},
    {"plus_stays_plus", "nbd://h/a+b", PLAIN("a+b", HOST)},
    {"at_and_colon_may_stand_in_the_name", "nbd://h/a@b:c", PLAIN("a@b:c", HOST)},

    {"empty_host_is_localhost", "nbd:///e", PLAIN("e", TCP("localhost", NULL))},
    {"nothing_at_all_is_localhost", "nbd://", PLAIN("", TCP("localhost", NULL))},
    {"empty_host_may_have_a_port", "nbd://:5", PLAIN("", TCP("localhost", "5"))},
    {"empty_port_is_the_default", "nbd://h:/e", PLAIN("e", HOST)},
    {"first_port", "nbd://h:1", PLAIN("", TCP("h", "1"))},
    {"last_port", "nbd://h:65535", PLAIN("", TCP("h", "65535"))},
    {"host_is_decoded", "nbd://%68%c3%a9", PLAIN("", TCP("h\xc3\xa9", NULL))},
    {"dash_inside_the_host", "nbd://a-b", PLAIN("", TCP("a-b", NULL))},
    {"ipv6_loses_its_brackets", "nbd://[::1]", PLAIN("", TCP("::1", NULL))},
    {"ipv6_with_a_port", "nbd://[::1]:1/e", PLAIN("e", TCP("::1", "1"))},
    {"ipv6_with_ipv4_tail", "nbd://[::ffff:1.2.3.4]", PLAIN("", TCP("::ffff:1.2.3.4", NULL))},
    {"ipv6_zone", "nbd://[fe80::1%25eth0]:2", PLAIN("", TCP("fe80::1%eth0", "2"))},

    {"user_stands_before_the_host", "nbd://alice@h", USER(0, "alice", HOST)},
    {"user_is_decoded", "nbd://a%40b%3ac@h", USER(0, "a@b:c", HOST)},
    {"user_before_an_empty_host", "nbd://u@", USER(0, "u", TCP("localhost", NULL))},
    {"user_before_ipv6", "nbd://u@[::1]", USER(0, "u", TCP("::1", NULL))},
    {"user_of_a_unix_socket", "nbds+unix://u@/?socket=/s", USER(SECURE, "u", SOCKET("/s"))},

    {"unix_socket", "nbd+unix:///e?socket=/run/s", PLAIN("e", SOCKET("/run/s"))},
    {"unix_socket_without_path", "nbd+unix://?socket=s", PLAIN("", SOCKET("s"))},
    {"socket_is_decoded", "nbd+unix:///?socket=%2fa%26b%0a", PLAIN("", SOCKET("/a&b\n"))},
    {"value_may_hold_an_equals_sign", "nbd+unix:///?socket=/a=b", PLAIN("", SOCKET("/a=b"))},
    {"value_may_hold_slash_and_question_mark", "nbd+unix:///?socket=/a?b",
     PLAIN("", SOCKET("/a?b"))},
    {"abstract_socket", "nbd+unix:///e?socket=%00name", PLAIN("e", ABSTRACT("name"))},
    {"empty_parameters_are_skipped", "nbd+unix:///?&&socket=/a&", PLAIN("", SOCKET("/a"))},
    {"keys_are_decoded", "nbd+unix:///?s%6fcket=/a", PLAIN("", SOCKET("/a"))},

    {"vsock_with_port", "nbd+vsock://3:4294967295/e", PLAIN("e", VSOCK(3, UINT32_MAX))},
    {"vsock_with_empty_port", "nbd+vsock://4294967294:", PLAIN("", VSOCK(4294967294u, 0))},

    {"key_is_no_substring", "nbd+unix:///?xsocket=/b&socket=/a", UNKNOWN("xsocket", SOCKET("/a"))},
    {"key_is_no_prefix", "nbd+unix:///?socketx=/b&socket=/a", UNKNOWN("socketx", SOCKET("/a"))},
    {"key_is_not_found_in_values", "nbd+unix:///?a=socket=/b&socket=/a",
     UNKNOWN("a", SOCKET("/a"))},
    {"keys_have_case", "nbd+unix:///?Socket=/b&socket=/a", UNKNOWN("Socket", SOCKET("/a"))},
    {"first_unknown_parameter_is_told", "nbd://h?b=1&a=2&b=3", UNKNOWN("b", HOST)},
    {"unknown_parameter_needs_no_value", "nbd://h?b", UNKNOWN("b", HOST)},
    {"unknown_values_are_not_decoded", "nbd://h?b=%zz", UNKNOWN("b", HOST)},

    {"tls_parameters", "nbds://h?tls-type=x509&tls-hostname=n&tls-certificates=%2fetc",
     TLS(SECURE, 1, "x509", "n", "/etc", NULL, HOST)},
    {"tls_parameters_of_a_unix_socket",
     "nbds+unix:///?socket=/s&tls-hostname=n&tls-type=psk&tls-psk-file=/k",
     TLS(SECURE, 1, "psk", "n", NULL, "/k", SOCKET("/s"))},
    {"tls_parameters_without_nbds", "nbd://h?tls-type=anon&tls-verify-peer=0",
     TLS(0, 0, "anon", NULL, NULL, NULL, HOST)},
    {"tls_verify_peer_0", "nbds://h?tls-verify-peer=0", VERIFY(0)},
    {"tls_verify_peer_false", "nbds://h?tls-verify-peer=false", VERIFY(0)},
    {"tls_verify_peer_1", "nbds://h?tls-verify-peer=1", VERIFY(1)},
    {"tls_verify_peer_true", "nbds://h?tls-verify-peer=true", VERIFY(1)},
};

static const bad bads[] = {
    {"empty_text", "", "scheme", 0},
    {"scheme_missing", "//h/e", "scheme", 0},
    {"scheme_without_colon", "nbd", "scheme", 0},
    {"scheme_unknown", "nbd+ssh://-oProxyCommand=x/", "scheme", 0},
    {"scheme_only_begins_right", "nbdx://h", "scheme", 0},
    {"slashes_missing", "nbd:h", "//", 4},
    {"one_slash_missing", "nbd:/h", "//", 4},

    {"raw_space", "nbd://h/a b", "percent-encoded", 9},
    {"raw_newline", "nbd://h\n", "percent-encoded", 7},
    {"raw_delete", "nbd://h/\x7f", "percent-encoded", 8},
    {"raw_byte_that_is_not_ascii", "nbd://h/\xc3\xa9", "percent-encoded", 8},
    {"fragment", "nbd://h/e#f", "fragment", 9},

    {"nul_in_the_name", "nbd://h/%00a", "%00", 8},
    {"nul_at_the_end_of_the_name", "nbd://h/a%00", "%00", 9},
    {"escape_without_hex_digits", "nbd://h/%zz", "'%'", 8},
    {"escape_with_one_digit", "nbd://h/%4", "'%'", 8},
    {"escape_with_a_bad_second_digit", "nbd://h/%4g", "'%'", 8},
    {"escape_without_digits", "nbd://h/%", "'%'", 8},
    {"escape_must_not_reach_into_the_query", "nbd://h/%4?1=2", "'%'", 8},

    {"host_starts_with_a_dash", "nbd://-oProxyCommand=x/", "'-'", 6},
    {"host_starts_with_an_escaped_dash", "nbd://%2doption", "'-'", 6},
    {"host_behind_user_starts_with_a_dash", "nbd://u@-h", "'-'", 8},
    {"control_character_in_the_host", "nbd://a%0ab", "control", 7},
    {"delete_in_the_host", "nbd://a%7f", "control", 7},
    {"nul_in_the_host", "nbd://a%00b", "%00", 7},
    {"space_in_the_host", "nbd://a%20b", "host", 6},
    {"slash_in_the_host", "nbd://a%2fb", "host", 6},
    {"two_at_signs", "nbd://u@v@h", "host", 8},
    {"control_character_in_the_user", "nbd://a%1bb@h", "control", 7},
    {"password", "nbd://u:p@h", "password", 6},

    {"ipv6_without_brackets", "nbd://::1", "brackets", 7},
    {"ipv6_without_closing_bracket", "nbd://[::1", "']'", 6},
    {"ipv6_empty_brackets", "nbd://[]", "IPv6", 7},
    {"ipv6_with_text_behind", "nbd://[::1]x", "follow", 11},
    {"ipv4_in_brackets", "nbd://[1.2.3.4]", "IPv6", 7},
    {"name_in_brackets", "nbd://[a:b:host]", "IPv6", 7},
    {"ipv6_empty_zone", "nbd://[::1%25]", "zone", 7},
    {"ipv6_zone_must_be_escaped", "nbd://[fe80::1%eth0]", "'%'", 14},

    {"port_0", "nbd://h:0", "port", 8},
    {"port_65536", "nbd://h:65536", "port", 8},
    {"port_beyond_64_bits", "nbd://h:18446744073709551617", "port", 8},
    {"port_with_a_sign", "nbd://h:+1", "port", 8},
    {"port_by_name", "nbd://h:nbd", "port", 8},
    {"port_with_an_escape", "nbd://h:%31", "port", 8},

    {"unix_socket_missing", "nbd+unix:///e", "missing", 13},
    {"unix_socket_key_without_value", "nbd+unix:///?socket", "without a value", 19},
    {"unix_socket_empty", "nbd+unix:///?socket=", "without a value", 20},
    {"unix_socket_twice", "nbd+unix:///?socket=/a&socket=/b", "twice", 30},
    {"unix_socket_with_a_nul_inside", "nbd+unix:///?socket=/a%00b", "%00", 22},
    {"unix_with_a_host", "nbd+unix://h/?socket=/a", "host", 11},
    {"unix_with_a_port", "nbd+unix://:1/?socket=/a", "host", 11},
    {"abstract_name_empty", "nbd+unix:///?socket=%00", "abstract", 20},
    {"abstract_name_with_a_second_nul", "nbd+unix:///?socket=%00%00", "%00", 23},
    {"socket_with_tcp", "nbd://h/?socket=/a", "+unix only", 16},
    {"socket_with_vsock", "nbd+vsock://2/?socket=/a", "+unix only", 22},

    {"vsock_without_cid", "nbd+vsock:///", "CID", 12},
    {"vsock_cid_is_no_number", "nbd+vsock://host", "CID", 12},
    {"vsock_cid_beyond_32_bits", "nbd+vsock://4294967296", "CID", 12},
    {"vsock_port_0", "nbd+vsock://2:0", "port", 14},
    {"vsock_port_beyond_32_bits", "nbd+vsock://2:4294967296", "port", 14},

    {"tls_type_unknown", "nbds://h?tls-type=X509", "tls-type", 18},
    {"tls_type_empty", "nbds://h?tls-type=", "without a value", 18},
    {"tls_type_twice", "nbds://h?tls-type=psk&tls-type=psk", "twice", 31},
    {"tls_verify_peer_unknown", "nbds://h?tls-verify-peer=no", "tls-verify-peer", 25},
    {"tls_hostname_with_control_character", "nbds://h?tls-hostname=a%0d", "control", 23},
    {"key_with_control_character", "nbd://h?a%0d=1", "control", 9},
    {"key_with_bad_escape", "nbd://h?%=1", "'%'", 8},
};

#define FENCE 16
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

// Parses into exactly `size` bytes.  The fence behind them shows stray writes; the second
// run is in memory that ends there, for sanitizers.
static int parse(nbd_uri *uri, const char *text, char *memory, size_t size)
{
    char *exact = (char *)malloc(size ? size : 1), fence[FENCE];
    nbd_uri again;
    int error, second;

    CHECK(exact != NULL);
    memset(fence, 0x5a, sizeof fence);
    memset(memory + size, 0x5a, sizeof fence);
    memset(uri, 0xa5, sizeof *uri);
    error = nbd_uri_parse(uri, text, memory, size);
    second = nbd_uri_parse(&again, text, size ? exact : NULL, size);
    free(exact);
    CHECK_EQUAL(second, error);
    CHECK_BYTES(memory + size, fence, sizeof fence);
    CHECK(uri->export_name != NULL && uri->detail != NULL);
    return error;
}

static char *room_for(const char *text)
{
    char *memory = (char *)malloc(strlen(text) + 8 + FENCE);

    CHECK(memory != NULL);
    return memory;
}

static void check_string(const char *what, const char *got, const char *wanted)
{
    snprintf(check.where, sizeof check.where, "%s", what);
    CHECK((got == NULL) == (wanted == NULL));
    CHECK(got == NULL || strcmp(got, wanted) == 0);
    check.where[0] = '\0';
}

static void check_same(const nbd_uri *got, const nbd_uri *wanted)
{
    CHECK_EQUAL(got->config_flags, wanted->config_flags);
    CHECK_EQUAL(got->tls_verify_peer, wanted->tls_verify_peer);
    CHECK_EQUAL(got->address.kind, wanted->address.kind);
    CHECK_EQUAL(got->address.family, 0);
    CHECK_EQUAL(got->address.cid, wanted->address.cid);
    CHECK_EQUAL(got->address.vport, wanted->address.vport);
    check_string("host", got->address.host, wanted->address.host);
    check_string("port", got->address.port, wanted->address.port);
    check_string("path", got->address.path, wanted->address.path);
    check_string("export_name", got->export_name, wanted->export_name);
    check_string("user", got->user, wanted->user);
    check_string("tls_type", got->tls_type, wanted->tls_type);
    check_string("tls_hostname", got->tls_hostname, wanted->tls_hostname);
    check_string("tls_certificates", got->tls_certificates, wanted->tls_certificates);
    check_string("tls_psk_file", got->tls_psk_file, wanted->tls_psk_file);
    check_string("unknown", got->unknown, wanted->unknown);
    check_string("detail", got->detail, "");
}

static void check_inside(const char *string, const char *memory, size_t size)
{
    CHECK(string == NULL || (string >= memory && string + strlen(string) < memory + size));
}

static void check_all_inside(const nbd_uri *uri, const char *memory, size_t size)
{
    check_inside(uri->address.host, memory, size);
    check_inside(uri->address.port, memory, size);
    check_inside(uri->address.path, memory, size);
    check_inside(uri->export_name, memory, size);
    check_inside(uri->user, memory, size);
    check_inside(uri->tls_type, memory, size);
    check_inside(uri->tls_hostname, memory, size);
    check_inside(uri->tls_certificates, memory, size);
    check_inside(uri->tls_psk_file, memory, size);
    check_inside(uri->unknown, memory, size);
}

static void check_blank(const nbd_uri *uri)
{
    nbd_uri blank;

    memset(&blank, 0, sizeof blank);
    blank.tls_verify_peer = 1;
    blank.export_name = "";
    blank.detail = "";
    CHECK(uri->detail[0] != '\0');
    check_string("export_name", uri->export_name, "");
    blank.export_name = uri->export_name;
    blank.detail = uri->detail;
    blank.detail_at = uri->detail_at;
    CHECK_BYTES(uri, &blank, sizeof blank);
}

static void accepts(const void *argument)
{
    const good *this = (const good *)argument;
    char *memory = room_for(this->text);
    nbd_uri uri;

    CHECK_EQUAL(parse(&uri, this->text, memory, strlen(this->text) + 8), NBD_OK);
    check_same(&uri, &this->wanted);
    check_all_inside(&uri, memory, strlen(this->text) + 8);
    free(memory);
}

static void refuses(const void *argument)
{
    const bad *this = (const bad *)argument;
    char *memory = room_for(this->text);
    nbd_uri uri;

    CHECK_EQUAL(parse(&uri, this->text, memory, strlen(this->text) + 8), NBD_ERR_URI);
    CHECK(strstr(uri.detail, this->detail) != NULL);
    CHECK_EQUAL(uri.detail_at, this->at);
    check_blank(&uri);
    free(memory);
}

// From the least size that suffices on, every size does, and gives the same.
static void every_size_of_memory_is_respected(void)
{
    size_t i, size;

    for (i = 0; i < COUNT(goods); i++) {
        const char *text = goods[i].text;
        char *memory = room_for(text);
        int sufficed = 0;
        for (size = 0; size <= strlen(text) + 8; size++) {
            nbd_uri uri;
            int error = parse(&uri, text, memory, size);
            CHECK_EQUAL(error, sufficed || error == NBD_OK ? NBD_OK : NBD_ERR_BUFFER);
            sufficed = error == NBD_OK;
            if (!sufficed) continue;
            check_same(&uri, &goods[i].wanted);
            check_all_inside(&uri, memory, size);
        }
        CHECK(sufficed);
        free(memory);
    }
}

static void bad_text_is_refused_in_memory_of_every_size(void)
{
    size_t i, size;

    for (i = 0; i < COUNT(bads); i++) {
        const char *text = bads[i].text;
        char *memory = room_for(text);
        for (size = 0; size <= strlen(text) + 8; size++) {
            nbd_uri uri;
            int error = parse(&uri, text, memory, size);
            CHECK(error == NBD_ERR_URI || error == NBD_ERR_BUFFER);
        }
        free(memory);
    }
}

// Parses "nbd://h/" and a name of `size` bytes, each one written as `piece`.
static int parse_name(nbd_uri *uri, const char *piece, size_t size)
{
    size_t each = strlen(piece), at = 8, i;
    char *text = (char *)malloc(at + size * each + 1), *memory;
    int error;

    CHECK(text != NULL);
    memcpy(text, "nbd://h/", at);
    for (i = 0; i < size; i++)
        memcpy(text + at + i * each, piece, each);
    text[at + size * each] = '\0';
    memory = room_for(text);
    error = parse(uri, text, memory, strlen(text) + 8);
    if (!error) CHECK_EQUAL(strlen(uri->export_name), size);
    free(memory);
    free(text);
    return error;
}

static void name_of_4096_bytes_is_taken(void)
{
    nbd_uri uri;

    CHECK_EQUAL(parse_name(&uri, "a", 4096), NBD_OK);
    CHECK_EQUAL(parse_name(&uri, "%c3", 4096), NBD_OK);
}

static void name_of_4097_bytes_is_refused(void)
{
    nbd_uri uri;

    CHECK_EQUAL(parse_name(&uri, "a", 4097), NBD_ERR_URI);
    CHECK(strstr(uri.detail, "4096") != NULL);
    CHECK_EQUAL(parse_name(&uri, "%c3", 4097), NBD_ERR_URI);
}

static void name_of_1_mib_is_refused(void)
{
    nbd_uri uri;

    CHECK_EQUAL(parse_name(&uri, "%2f", 1u << 20), NBD_ERR_URI);
}

static uint32_t random_text(char *text, uint32_t most)
{
    static const char *const words[] = {"nbd://",  "nbd+unix://", "nbds+vsock://",
                                        "[::1]",   "h",           "@",
                                        ":",       "/",           "?",
                                        "socket=", "tls-type=",   "psk",
                                        "&",       "%00",         "%2",
                                        "%41",     "=",           "1",
                                        "x",       "-",           "#",
                                        "\x80"};
    uint32_t used = 0;

    while (used + 16 < most && check_random(12) != 0) {
        const char *word = words[used == 0 ? check_random(3) : check_random(COUNT(words))];
        memcpy(text + used, word, strlen(word));
        used += (uint32_t)strlen(word);
    }
    text[used] = '\0';
    return used;
}

static void random_text_stays_within_its_memory(void)
{
    char text[256], memory[256 + 8 + FENCE];
    int i, taken = 0;

    for (i = 0; i < 20000; i++) {
        uint32_t size = random_text(text, sizeof text) + 8;
        nbd_uri uri;
        int error = parse(&uri, text, memory, size);
        snprintf(check.where, sizeof check.where, "%s", text);
        CHECK(error == NBD_OK || error == NBD_ERR_URI);
        if (!error) check_all_inside(&uri, memory, size);
        taken += !error;
        CHECK(parse(&uri, text, memory, check_random(size)) <= 0);
    }
    CHECK(taken > 0);
}

int main(int argc, char **argv)
{
    size_t i;

    check_begin(argc, argv);
    for (i = 0; i < COUNT(goods); i++)
        check_case_on(goods[i].name, accepts, &goods[i]);
    for (i = 0; i < COUNT(bads); i++)
        check_case_on(bads[i].name, refuses, &bads[i]);
    CHECK_CASE(every_size_of_memory_is_respected);
    CHECK_CASE(bad_text_is_refused_in_memory_of_every_size);
    CHECK_CASE(name_of_4096_bytes_is_taken);
    CHECK_CASE(name_of_4097_bytes_is_refused);
    CHECK_CASE(name_of_1_mib_is_refused);
    CHECK_CASE(random_text_stays_within_its_memory);
    return check_end();
}
