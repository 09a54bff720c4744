// Fuzzes nbd_uri_parse and nbd_escape: the input is the text of a URI, up to its first NUL.
//
// Rules that are checked (a breach traps):
//   - text and memory end at their last byte: the sanitizer sees one byte more
//   - strings of the result end within the memory given
//   - success has no detail; a refusal has one, a place in the text, and is blank otherwise
//   - no memory is too small beyond strlen(text) + 8; with less the answer is the same one or
//     NBD_ERR_BUFFER, and it is NBD_ERR_BUFFER below a size and never above it
//   - names are not longer than 4096 bytes; hosts do not begin with a dash
//   - the export name is the path, decoded by a decoder of this file
//   - the result, printed as a URI with as many escapes as there can be, parses to itself
//   - nbd_escape prints ASCII alone, within the room, and what it prints reads back

#define NBD_IMPLEMENTATION
#define NBD_NO_SOCKETS
#include <stdlib.h>
#define NBD_ASSERT(x) ((x) ? (void)0 : abort())
#include "nbd.h"

#include "fuzz.h"

#define ENOUGH 8u // bytes of memory that suffice behind strlen(text)

/// Results ///

// The strings of a result.  An abstract path is told by the kind.
static unsigned strings_of(const nbd_uri *uri, const char **to)
{
    to[0] = uri->address.host;
    to[1] = uri->address.port;
    to[2] = uri->address.path;
    to[3] = uri->export_name;
    to[4] = uri->user;
    to[5] = uri->tls_type;
    to[6] = uri->tls_hostname;
    to[7] = uri->tls_certificates;
    to[8] = uri->tls_psk_file;
    to[9] = uri->unknown;
    return 10;
}

static void check_strings(const nbd_uri *uri, const char *memory, size_t size)
{
    const char *strings[10];
    unsigned i, count = strings_of(uri, strings);
    for (i = 0; i < count; i++) {
        uintptr_t at = (uintptr_t)strings[i], from = (uintptr_t)memory;
        if (!strings[i]) continue;
        if (!*strings[i] && strings[i] == uri->export_name && (at < from || at - from >= size)) {
            continue; // the default name is nobody's memory
        }
        MUST(at >= from && at - from < size);
        MUST(memchr(strings[i], '\0', size - (at - from)));
    }
}

static int same_text(const char *one, const char *other)
{
    return one && other ? strcmp(one, other) == 0 : one == other;
}

// `but` is the index of a string that need not be the same.
static void check_same(const nbd_uri *one, const nbd_uri *other, unsigned but)
{
    const char *ones[10], *others[10];
    unsigned i, count = strings_of(one, ones);
    strings_of(other, others);
    for (i = 0; i < count; i++) {
        MUST(i == but || same_text(ones[i], others[i]));
    }
    MUST(one->config_flags == other->config_flags);
    MUST(one->tls_verify_peer == other->tls_verify_peer);
    MUST(one->address.kind == other->address.kind && one->address.family == other->address.family);
    MUST(one->address.cid == other->address.cid && one->address.vport == other->address.vport);
}

static void check_refusal(const nbd_uri *uri, int error, size_t length)
{
    const char *strings[10];
    unsigned i, count = strings_of(uri, strings);
    MUST(error == NBD_ERR_URI || error == NBD_ERR_BUFFER);
    MUST((uri->detail[0] != '\0') == (error == NBD_ERR_URI));
    MUST(uri->detail_at <= length);
    for (i = 0; i < count; i++) {
        MUST(strings[i] == uri->export_name || !strings[i]);
    }
    MUST(!*uri->export_name && uri->tls_verify_peer == 1 && !uri->config_flags);
    MUST(!uri->address.kind && !uri->address.cid && !uri->address.vport);
}

// Parses into memory of exactly this size, which the caller frees.
static int parse(nbd_uri *uri, const char *text, char **memory, size_t size)
{
    int error;
    memset(uri, 0xA5, sizeof *uri);
    *memory = (char *)bytes(size);
    error = nbd_uri_parse(uri, text, *memory, size);
    if (error) {
        check_refusal(uri, error, strlen(text));
    } else {
        MUST(uri->detail && !*uri->detail && !uri->detail_at);
        check_strings(uri, *memory, size);
    }
    return error;
}

/// An independent look at the text ///

static int hex(char c)
{
    const char *digits = "0123456789abcdef0123456789ABCDEF";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)((at - digits) % 16) : -1;
}

static size_t decode(char *to, const char *from, size_t size)
{
    size_t i, n = 0;
    for (i = 0; i < size; i++) {
        if (from[i] == '%') {
            MUST(i + 2 < size && hex(from[i + 1]) >= 0 && hex(from[i + 2]) >= 0);
            to[n++] = (char)(hex(from[i + 1]) * 16 + hex(from[i + 2]));
            i += 2;
        } else {
            to[n++] = from[i];
        }
    }
    return n;
}

static void check_name(const char *text, const nbd_uri *uri)
{
    const char *path = strstr(text, "://");
    size_t size;
    char *decoded;
    MUST(path);
    path += 3;
    path += strcspn(path, "/?");
    path += *path == '/';
    size = strcspn(path, "?");
    decoded = (char *)bytes(size);
    size = decode(decoded, path, size);
    MUST(size <= 4096 && strlen(uri->export_name) == size);
    MUST(memcmp(decoded, uri->export_name, size) == 0);
    free(decoded);
}

static void check_meaning(const char *text, const nbd_uri *uri)
{
    const nbd_address *address = &uri->address;
    int local = address->kind == NBD_ADDRESS_UNIX || address->kind == NBD_ADDRESS_ABSTRACT;
    check_name(text, uri);
    MUST(address->kind <= NBD_ADDRESS_VSOCK && address->family == 0);
    MUST((address->host != NULL) == (address->kind == NBD_ADDRESS_TCP));
    MUST((address->path != NULL) == local && (!local || *address->path));
    MUST(!address->host || (*address->host && *address->host != '-'));
    MUST(!address->port ||
         (address->host && atoi(address->port) >= 1 && atoi(address->port) <= 65535));
    MUST(!uri->tls_hostname || *uri->tls_hostname);
    MUST(uri->config_flags == ((text[3] | 0x20) == 's' ? NBD_TLS_REQUIRE : 0u));
}

/// Printing a result ///

typedef struct printer {
    char *text;
    size_t size;
    size_t room;
} printer;

static void print(printer *p, const char *text)
{
    size_t size = strlen(text);
    MUST(size < p->room - p->size);
    memcpy(p->text + p->size, text, size + 1);
    p->size += size;
}

static void print_escaped(printer *p, const char *text)
{
    char escape[4];
    for (; *text; text++) {
        snprintf(escape, sizeof escape, "%%%02x", (unsigned char)*text);
        print(p, escape);
    }
}

static void print_parameter(printer *p, const char *key, const char *value)
{
    if (!value) return;
    print(p, "&");
    print(p, key);
    print(p, "=");
    print_escaped(p, value);
}

static void print_address(printer *p, const nbd_address *address)
{
    char number[24];
    if (address->kind == NBD_ADDRESS_VSOCK) {
        snprintf(number, sizeof number, "%lu:", (unsigned long)address->cid);
        print(p, number);
        snprintf(number, sizeof number, "%lu", (unsigned long)address->vport);
        if (address->vport) print(p, number);
    } else if (address->kind == NBD_ADDRESS_TCP) {
        int brackets = strchr(address->host, ':') != NULL;
        if (brackets) print(p, "[");
        print_escaped(p, address->host);
        print(p, brackets ? "]:" : ":");
        if (address->port) print(p, address->port);
    }
}

static void print_uri(printer *p, const nbd_uri *uri)
{
    static const char *const kinds[] = {"", "+unix", "+unix", "+vsock"};
    print(p, uri->config_flags ? "NBDS" : "nbd");
    print(p, kinds[uri->address.kind]);
    print(p, "://");
    if (uri->user) {
        print_escaped(p, uri->user);
        print(p, "@");
    }
    print_address(p, &uri->address);
    print(p, "/");
    print_escaped(p, uri->export_name);
    print(p, uri->tls_verify_peer ? "?tls-verify-peer=true" : "?tls-verify-peer=0");
    print_parameter(p, "tls-type", uri->tls_type);
    print_parameter(p, "tls-hostname", uri->tls_hostname);
    print_parameter(p, "tls-certificates", uri->tls_certificates);
    print_parameter(p, "tls-psk-file", uri->tls_psk_file);
    if (uri->address.kind == NBD_ADDRESS_ABSTRACT) {
        print(p, "&socket=%00");
        print_escaped(p, uri->address.path);
    } else {
        print_parameter(p, "socket", uri->address.path);
    }
    if (uri->unknown) {
        print(p, "&");
        print_escaped(p, uri->unknown);
    }
}

// An unknown parameter with an empty name cannot be printed as one that says nothing else.
static void check_printed(const nbd_uri *uri, size_t length)
{
    printer p;
    nbd_uri again;
    char *memory;
    p.size = 0;
    p.room = 3 * length + 200;
    p.text = (char *)bytes(p.room);
    print_uri(&p, uri);
    MUST(parse(&again, p.text, &memory, p.size + ENOUGH) == 0);
    check_same(uri, &again, uri->unknown && !*uri->unknown ? 9 : 10);
    free(memory);
    free(p.text);
}

/// Memory of other sizes ///

// With less memory the same result, or none.
static void check_smaller(const char *text, const nbd_uri *whole, int error, size_t size)
{
    nbd_uri uri;
    char *memory;
    int got = parse(&uri, text, &memory, size);
    MUST(got == error || got == NBD_ERR_BUFFER);
    if (got == 0) check_same(whole, &uri, 10);
    if (got == NBD_ERR_URI) {
        MUST(uri.detail == whole->detail && uri.detail_at == whole->detail_at);
    }
    free(memory);
}

// The least memory that is enough is a bound: below it all is too small.
static void check_sizes(const char *text, const nbd_uri *whole, int error, size_t most)
{
    size_t low = 0, high = most; // high is enough
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        nbd_uri uri;
        char *memory;
        int got = parse(&uri, text, &memory, middle);
        free(memory);
        if (got == NBD_ERR_BUFFER) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    check_smaller(text, whole, error, high);
    if (high) {
        nbd_uri uri;
        char *memory;
        MUST(parse(&uri, text, &memory, high - 1) == NBD_ERR_BUFFER);
        free(memory);
        check_smaller(text, whole, error, (high - 1) / 2);
    }
    check_smaller(text, whole, error, high + (most - high) / 2);
}

/// nbd_escape ///

static size_t unescape(char *to, const char *from, size_t size)
{
    size_t i, n = 0;
    for (i = 0; i < size; i++) {
        MUST((unsigned char)from[i] >= 0x20 && (unsigned char)from[i] <= 0x7e);
        if (from[i] == '\\') {
            MUST(size - i >= 4 && from[i + 1] == 'x');
            to[n++] = (char)(hex(from[i + 2]) * 16 + hex(from[i + 3]));
            i += 3;
        } else {
            to[n++] = from[i];
        }
    }
    return n;
}

static void check_escape(const char *from, size_t size, size_t room)
{
    char *to = (char *)bytes(room), *back = (char *)bytes(room);
    size_t length = nbd_escape(to, room, from, size), plain;
    MUST(length < room && to[length] == '\0');
    plain = unescape(back, to, length);
    MUST(plain <= size && memcmp(back, from, plain) == 0);
    MUST(plain == size || room - length <= 4);
    free(back);
    free(to);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = (char *)bytes(size + 1), *exact, *memory;
    nbd_uri uri;
    size_t length;
    int error;
    if (size) memcpy(text, data, size);
    text[size] = '\0';
    length = strlen(text);
    exact = (char *)bytes(length + 1);
    memcpy(exact, text, length + 1);

    error = parse(&uri, exact, &memory, length + ENOUGH);
    MUST(error != NBD_ERR_BUFFER);
    check_sizes(exact, &uri, error, length + ENOUGH);
    if (!error) {
        check_meaning(exact, &uri);
        check_printed(&uri, length);
    }
    free(memory);
    free(exact);

    check_escape(text, size, 4 * size + 1);
    check_escape(text, size, size + 1);
    check_escape(text, size, 1 + size / 2);
    free(text);
    return 0;
}
