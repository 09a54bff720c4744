// Hostile URIs.  Text and memory end at pages that cannot be touched.
#define _DEFAULT_SOURCE 1
#define NBD_IMPLEMENTATION
#include "nbd.h"

#include <sys/mman.h>

#include "../check.h"

enum { PAGE = 4096, ROOM = 3 << 20 };

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static nbd_uri uri;

/// Memory ///

// Memory of ROOM bytes with a page behind it that cannot be touched; which: 0 for the
// text, 1 for what is decoded.  Returns the end.
static char *memory_end(int which)
{
    static char *start[2];

    if (!start[which]) {
        start[which] = (char *)mmap(NULL, ROOM + PAGE, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(start[which] != MAP_FAILED);
        CHECK(mprotect(start[which] + ROOM, PAGE, PROT_NONE) == 0);
    }
    return start[which] + ROOM;
}

static void note_text(const char *text, size_t size)
{
    snprintf(check.where, sizeof check.where, "\"%.80s\", memory of %lu", text,
             (unsigned long)size);
}

static void check_string(const char *string, size_t size)
{
    const char *end = memory_end(1);

    CHECK(string == NULL || (string >= end - size && string + strlen(string) < end));
}

// Parses a copy of the text in exactly `size` bytes of memory.
static int parse_in(const char *text, size_t size)
{
    size_t length = strlen(text) + 1;
    char *memory = memory_end(1) - size, *copy = memory_end(0) - length;
    int error;

    CHECK(length <= ROOM && size <= ROOM);
    note_text(text, size);
    memcpy(copy, text, length);
    memset(memory, 0x5A, size);
    memset(&uri, 0xA5, sizeof uri);
    error = nbd_uri_parse(&uri, copy, memory, size);
    CHECK(error == 0 || error == NBD_ERR_URI || error == NBD_ERR_BUFFER);
    CHECK(uri.export_name != NULL && uri.detail != NULL);
    if (error) {
        CHECK(uri.export_name[0] == '\0' && !uri.address.host && !uri.address.path && !uri.user);
        CHECK((error == NBD_ERR_URI) == (uri.detail[0] != '\0'));
        CHECK(uri.detail_at < length);
        return error;
    }
    CHECK(uri.detail[0] == '\0');
    if (uri.export_name[0]) check_string(uri.export_name, size);
    check_string(uri.address.host, size);
    check_string(uri.address.port, size);
    check_string(uri.address.path, size);
    check_string(uri.user, size);
    check_string(uri.tls_type, size);
    check_string(uri.tls_hostname, size);
    check_string(uri.tls_certificates, size);
    check_string(uri.tls_psk_file, size);
    check_string(uri.unknown, size);
    return error;
}

static int parse(const char *text)
{
    return parse_in(text, strlen(text) + 8);
}

/// Cuts ///

static const char *const texts[] = {
    "nbd://h:10809/e%20x",
    "nbds://u%40@[fe80::1%25eth0]:2/a/b?tls-type=x509&tls-verify-peer=0",
    "nbd+unix:///e?socket=/run/a%2fb&x=1",
    "nbds+unix://u@/?socket=%00abstract&tls-hostname=n&tls-psk-file=/k",
    "nbd+vsock://4294967295:4294967295/e?y",
    "NBDS+VSOCK://2/?tls-certificates=%2fetc&tls-type=anon&&=&",
};

static void uri_cut_anywhere_stays_in_its_memory(void)
{
    char text[128];
    size_t i, length, size;

    for (i = 0; i < COUNT(texts); i++) {
        for (length = 0; length <= strlen(texts[i]); length++) {
            memcpy(text, texts[i], length);
            text[length] = '\0';
            for (size = 0; size <= length + 8; size++) {
                int error = parse_in(text, size);

                // What always suffices does.
                if (size == length + 8) CHECK(error != NBD_ERR_BUFFER);
            }
        }
    }
}

static void uri_with_any_byte_changed_stays_in_its_memory(void)
{
    char text[128];
    size_t i, at;
    int byte;

    for (i = 0; i < COUNT(texts); i++) {
        for (at = 0; at < strlen(texts[i]); at++) {
            for (byte = 1; byte < 256; byte++) {
                strcpy(text, texts[i]);
                text[at] = (char)byte;
                CHECK(parse(text) != NBD_ERR_BUFFER);
                (void)parse_in(text, strlen(text) / 2);
            }
        }
    }
}

/// Bytes and escapes in each place ///

enum place { IN_NAME, IN_HOST, IN_USER, IN_SOCKET, IN_HOSTNAME, IN_FILE, IN_KEY, PLACES };

// What stands before and behind the byte.
static const char *const around[PLACES][2] = {
    {"nbd://h/a", "b"},
    {"nbd://a", "b"},
    {"nbd://a", "b@h"},
    {"nbd+unix:///?socket=/a", "b"},
    {"nbds://h?tls-hostname=a", "b"},
    {"nbds://h?tls-psk-file=a", "b"},
    {"nbd://h?a", "b=1"},
};

static const char *found_in(enum place place)
{
    switch (place) {
    case IN_NAME: return uri.export_name;
    case IN_HOST: return uri.address.host;
    case IN_USER: return uri.user;
    case IN_SOCKET: return uri.address.path;
    case IN_HOSTNAME: return uri.tls_hostname;
    case IN_FILE: return uri.tls_psk_file;
    default: return uri.unknown;
    }
}

static void check_found(enum place place, int byte)
{
    char wanted[8];

    snprintf(wanted, sizeof wanted, "%sa%cb", place == IN_SOCKET ? "/" : "", byte);
    CHECK(found_in(place) != NULL && strcmp(found_in(place), wanted) == 0);
}

// Whether a decoded byte may stand there; NUL never may.
static int is_allowed(enum place place, int byte)
{
    int control = byte < 0x20 || byte == 0x7F;

    if (byte == 0) return 0;
    if (place == IN_HOST) return !control && strchr(" /?#@[]:\\", byte) == NULL;
    return !control || place == IN_NAME || place == IN_SOCKET || place == IN_FILE;
}

static void every_escape_is_decoded_or_refused_in_every_place(void)
{
    static const char *const forms[] = {"%s%%%02x%s", "%s%%%02X%s"};
    char text[64];
    int place, byte, form;

    for (place = 0; place < PLACES; place++) {
        for (byte = 0; byte < 256; byte++) {
            for (form = 0; form < 2; form++) {
                snprintf(text, sizeof text, forms[form], around[place][0], byte, around[place][1]);
                CHECK_EQUAL(parse(text), is_allowed((enum place)place, byte) ? 0 : NBD_ERR_URI);
                if (is_allowed((enum place)place, byte)) check_found((enum place)place, byte);
            }
        }
    }
}

static void every_bad_escape_is_refused_in_every_place(void)
{
    char text[64];
    int place, first, second;

    for (place = 0; place < PLACES; place++) {
        for (first = 0x21; first < 0x7F; first++) {
            for (second = 0x21; second < 0x7F; second++) {
                if (first == '#' || second == '#') continue; // refused as a fragment
                snprintf(text, sizeof text, "%s%%%c%c%s", around[place][0], first, second,
                         around[place][1]);
                if (strchr("0123456789abcdefABCDEF", first) &&
                    strchr("0123456789abcdefABCDEF", second)) {
                    continue;
                }
                CHECK_EQUAL(parse(text), NBD_ERR_URI);
            }
        }
    }
}

// Delimiters mean something else there; the rest stands for itself.
static void every_raw_byte_stands_for_itself_or_is_refused(void)
{
    static const char *const delimiters[PLACES] = {"?%", "/?%@:[]\\", "/?%@:", "&%",
                                                   "&%", "&%",        "&%="};
    char text[64];
    int place, byte;

    for (place = 0; place < PLACES; place++) {
        for (byte = 1; byte < 256; byte++) {
            int refused = byte <= 0x20 || byte >= 0x7F || byte == '#';
            int error;

            snprintf(text, sizeof text, "%s%c%s", around[place][0], byte, around[place][1]);
            error = parse(text);
            if (refused) CHECK_EQUAL(error, NBD_ERR_URI);
            if (refused || strchr(delimiters[place], byte)) continue;
            CHECK_EQUAL(error, 0);
            check_found((enum place)place, byte);
        }
    }
}

static void host_that_looks_like_an_option_is_refused_in_every_form(void)
{
    static const char *const bad[] = {
        "nbd://-oProxyCommand=x/",
        "nbd://%2doProxyCommand=x",
        "nbd://%2DoProxy",
        "nbds://-h",
        "nbd://u@-h",
        "nbd://u@%2dh",
        "nbd://-",
        "nbd://-:1",
        "nbd://--help/e",
        "nbd+ssh://-oProxy=x/",
        "nbd+exec://sh",
        "-oProxy://h",
        "nbd+unix+ssh:///e",
        "NBD+SSH://h",
        "nbd://h%0a-o",
        "nbd://h%20-o",
        "nbd://h%00-o",
        "nbd://%0d",
    };
    size_t i;

    for (i = 0; i < COUNT(bad); i++)
        CHECK_EQUAL(parse(bad[i]), NBD_ERR_URI);
}

/// Parameters ///

static const char *const keys[] = {"socket",          "tls-type",         "tls-hostname",
                                   "tls-verify-peer", "tls-certificates", "tls-psk-file"};
static const char *const values[] = {"/s", "psk", "h", "1", "/c", "/k"};

// A text with a whole URI for a socket, but for key `which`.
static void with_parameter(char *text, size_t room, size_t which, const char *key,
                           const char *value)
{
    snprintf(text, room, "nbds+unix:///?%s=%s%s", key, value, which ? "&socket=/s" : "");
}

static void check_unknown(size_t which, const char *key)
{
    char text[96];

    with_parameter(text, sizeof text, which, key, "zzz");
    if (which == 0) {
        CHECK_EQUAL(parse(text), NBD_ERR_URI); // no socket is left
        CHECK(strstr(uri.detail, "missing") != NULL);
        return;
    }
    CHECK_EQUAL(parse(text), 0);
    CHECK(uri.unknown != NULL && strcmp(uri.unknown, key) == 0);
    CHECK(!uri.tls_type && !uri.tls_hostname && !uri.tls_certificates && !uri.tls_psk_file);
    CHECK_EQUAL(uri.tls_verify_peer, 1);
}

static void parameter_with_any_letter_wrong_is_unknown(void)
{
    char key[32];
    size_t i, at, length;

    for (i = 0; i < COUNT(keys); i++) {
        length = strlen(keys[i]);
        for (at = 0; at <= length; at++) {
            snprintf(key, sizeof key, "%.*sx%s", (int)at, keys[i], keys[i] + at); // one more
            check_unknown(i, key);
            if (at == length) break;
            snprintf(key, sizeof key, "%.*s%s", (int)at, keys[i], keys[i] + at + 1); // one less
            check_unknown(i, key);
            strcpy(key, keys[i]);
            key[at] = (char)(key[at] == '-' ? '_' : key[at] - 'a' + 'A');
            check_unknown(i, key);
        }
    }
}

static void parameter_twice_or_without_a_value_is_refused(void)
{
    char text[96], twice[192];
    size_t i;

    for (i = 0; i < COUNT(keys); i++) {
        with_parameter(text, sizeof text, i, keys[i], values[i]);
        CHECK_EQUAL(parse(text), 0);
        snprintf(twice, sizeof twice, "%s&%s=%s", text, keys[i], values[i]);
        CHECK_EQUAL(parse(twice), NBD_ERR_URI);
        CHECK(strstr(uri.detail, "twice") != NULL);
        snprintf(twice, sizeof twice, "%s&%s", text, keys[i]);
        CHECK_EQUAL(parse(twice), NBD_ERR_URI);
        with_parameter(text, sizeof text, i, keys[i], "");
        CHECK_EQUAL(parse(text), NBD_ERR_URI);
        CHECK(strstr(uri.detail, "without a value") != NULL);
        snprintf(text, sizeof text, "nbds+unix:///?%s%s", keys[i], i ? "&socket=/s" : "");
        CHECK_EQUAL(parse(text), NBD_ERR_URI);
        CHECK(strstr(uri.detail, "without a value") != NULL);
    }
}

// A key is found only where a parameter begins.
static void parameter_is_not_found_inside_another(void)
{
    char text[96];
    size_t i;

    for (i = 1; i < COUNT(keys); i++) {
        snprintf(text, sizeof text, "nbds+unix:///?a=%s=%s&socket=/s", keys[i], values[i]);
        check.where[0] = '\0';
        CHECK_EQUAL(parse(text), 0);
        CHECK(!uri.tls_type && !uri.tls_hostname && !uri.tls_certificates && !uri.tls_psk_file);
        snprintf(text, sizeof text, "nbds+unix:///%s=%s?socket=/s", keys[i], values[i]);
        CHECK_EQUAL(parse(text), 0);
        CHECK(!uri.tls_type && !uri.tls_hostname && !uri.tls_certificates && !uri.tls_psk_file);
    }
    CHECK_EQUAL(parse("nbd+unix:///?a=socket=/s"), NBD_ERR_URI);
    CHECK_EQUAL(parse("nbd+unix:///socket=/s"), NBD_ERR_URI);
    CHECK_EQUAL(parse("nbd+unix:///?a&socket=/s"), 0);
}

/// Length ///

static void name_is_bounded_by_what_it_decodes_to(void)
{
    static char text[3 * 70000 + 64];
    static const size_t sizes[] = {0, 1, 2, 4094, 4095, 4096, 4097, 4098, 8192, 65536};
    size_t i, k;
    int escaped;

    for (i = 0; i < COUNT(sizes); i++) {
        for (escaped = 0; escaped < 2; escaped++) {
            strcpy(text, "nbd://h/");
            for (k = 0; k < sizes[i]; k++)
                strcpy(text + 8 + (escaped ? 3 : 1) * k, escaped ? "%61" : "a");
            CHECK_EQUAL(parse(text), sizes[i] <= 4096 ? 0 : NBD_ERR_URI);
            if (sizes[i] <= 4096)
                CHECK_EQUAL(strlen(uri.export_name), sizes[i]);
            else
                CHECK(strstr(uri.detail, "4096") != NULL);
        }
    }
}

// As much text as anybody will send, in each place.
static void text_of_1_mib_stays_in_its_memory(void)
{
    static char text[(1 << 20) + 64];
    static const char fillers[] = "a%&=:/@[?";
    size_t head, i, place;

    for (place = 0; place < PLACES; place++) {
        for (i = 0; i < sizeof fillers - 1; i++) {
            strcpy(text, around[place][0]);
            head = strlen(text);
            memset(text + head, fillers[i], sizeof text - 1 - head);
            text[sizeof text - 1] = '\0';
            CHECK(parse(text) != NBD_ERR_BUFFER);
        }
    }
}

int main(int argc, char **argv)
{
    check_begin(argc, argv);
    CHECK_CASE(uri_cut_anywhere_stays_in_its_memory);
    CHECK_CASE(uri_with_any_byte_changed_stays_in_its_memory);
    CHECK_CASE(every_escape_is_decoded_or_refused_in_every_place);
    CHECK_CASE(every_bad_escape_is_refused_in_every_place);
    CHECK_CASE(every_raw_byte_stands_for_itself_or_is_refused);
    CHECK_CASE(host_that_looks_like_an_option_is_refused_in_every_form);
    CHECK_CASE(parameter_with_any_letter_wrong_is_unknown);
    CHECK_CASE(parameter_twice_or_without_a_value_is_refused);
    CHECK_CASE(parameter_is_not_found_inside_another);
    CHECK_CASE(name_is_bounded_by_what_it_decodes_to);
    CHECK_CASE(text_of_1_mib_stays_in_its_memory);
    return check_end();
}
