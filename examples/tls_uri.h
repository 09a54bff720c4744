// tls_uri.h - TLS as a URI asks for it, with mbedTLS: what copy, dump and info share
//
// Include it behind nbd.h.  Without NBD_MBEDTLS a URI with TLS is an error.
#ifndef TLS_URI_H
#define TLS_URI_H

#ifdef NBD_MBEDTLS
#define TLS_USAGE \
    "An nbds URI is for TLS: ?tls-certificates=DIRECTORY has ca-cert.pem, client-cert.pem and\n" \
    "client-key.pem; without it /etc/pki/libnbd (root) or ~/.pki/libnbd and " \
    "~/.config/pki/libnbd\n" \
    "are looked at, then the authorities of the system count.  ?tls-psk-file=FILE is for USER@.\n" \
    "KEY_PASSWORD in the environment opens an encrypted key.\n"
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// Of one server; any number of connections share it.
typedef struct tls_trust {
    int used;             // 0: the URI asks for no TLS
    const char *name;     // to verify
    const char *why;      // constant text: what was wrong, or ""
    char directory[4096]; // where the certificates are, if the URI does not say it
    char memory[3 * 4096 + 48];
    nbd_tls_credentials credentials;
} tls_trust;

typedef nbd_tls tls_session; // of one connection

static inline int tls_is_there(const char *directory, const char *name)
{
    char path[4096 + 16];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return access(path, R_OK) == 0;
}

// The places that nbd_set_tls_certificates(3) of libnbd names.  Returns 1 if it is one.
static inline int tls_find_directory(tls_trust *trust)
{
    static const char *const below_home[] = {".pki/libnbd", ".config/pki/libnbd"};
    const char *home = getenv("HOME");
    for (size_t i = 0; i < 2; i++) {
        if (geteuid() == 0)
            snprintf(trust->directory, sizeof trust->directory, "/etc/pki/libnbd");
        else
            snprintf(trust->directory, sizeof trust->directory, "%s/%s", home ? home : "",
                     below_home[i]);
        if (tls_is_there(trust->directory, "ca-cert.pem")) return 1;
    }
    return 0;
}

// Where systems keep the authorities that everybody trusts.
static inline const char *tls_system_authorities(void)
{
    static const char *const bundles[] = {"/etc/ssl/certs/ca-certificates.crt",
                                          "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"};
    for (size_t i = 0; i < sizeof bundles / sizeof bundles[0]; i++)
        if (access(bundles[i], R_OK) == 0) return bundles[i];
    return bundles[0];
}

static inline const char *tls_login_name(void)
{
    const struct passwd *user = getpwuid(geteuid());
    return user ? user->pw_name : NULL;
}

// Reads certificates or keys as the URI says.  trust, uri: until tls_forget.  Returns 0 or
// an error, and then trust->why.
static inline int tls_prepare(tls_trust *trust, const nbd_uri *uri)
{
    nbd_uri filled = *uri;
    nbd_tls_options options;
    int error;
    trust->why = "";
    if (!(uri->config_flags & NBD_TLS_REQUIRE)) return 0;
    if (!uri->tls_certificates && (uri->tls_type || !uri->tls_psk_file) &&
        tls_find_directory(trust))
        filled.tls_certificates = trust->directory;
    error = nbd_tls_uri(&options, &filled, trust->memory, sizeof trust->memory);
    trust->why = filled.detail;
    if (error) return error;
    if (!options.psk_file && !options.ca_file && !options.no_verify)
        options.ca_file = tls_system_authorities();
    if (!options.user) options.user = tls_login_name();
    options.key_password = getenv("KEY_PASSWORD");
    trust->name = nbd_tls_uri_name(uri);
    trust->used = 1;
    error = nbd_tls_credentials_init(&trust->credentials, &options);
    trust->why = trust->credentials.detail;
    return error;
}

// Makes a connection that sync is to open use TLS, if the URI does.  session: until
// tls_end.  Returns 0 or an error, and then trust->why.
static inline int tls_begin(tls_session *session, tls_trust *trust, nbd_sync *sync)
{
    int error;
    if (!trust->used) return 0;
    error =
        nbd_tls_init(session, &sync->io.transport, &trust->credentials.config, trust->name, NULL);
    sync->tls = &session->transport;
    if (error) trust->why = session->transport.detail;
    return error;
}

// Behind nbd_sync_close, in every case.
static inline void tls_end(tls_session *session)
{
    nbd_tls_free(session);
}

static inline void tls_forget(tls_trust *trust)
{
    nbd_tls_credentials_free(&trust->credentials);
}

// Whether this mbedTLS must not be used in more than one thread.
static inline int tls_is_single(const tls_trust *trust)
{
#ifdef MBEDTLS_THREADING_C
    (void)trust;
    return 0;
#else
    return trust->used;
#endif
}

#else

#define TLS_USAGE "This program was built without TLS, so there is no nbds.\n"

typedef struct tls_trust {
    const char *why;
} tls_trust;

typedef struct tls_session {
    int none;
} tls_session;

static inline int tls_prepare(tls_trust *trust, const nbd_uri *uri)
{
    trust->why = "this program was built without TLS (NBD_MBEDTLS)";
    return uri->config_flags & NBD_TLS_REQUIRE ? NBD_ERR_UNSUPPORTED : 0;
}
static inline int tls_begin(tls_session *session, tls_trust *trust, nbd_sync *sync)
{
    (void)session, (void)trust, (void)sync;
    return 0;
}
static inline void tls_end(tls_session *session)
{
    (void)session;
}
static inline void tls_forget(tls_trust *trust)
{
    (void)trust;
}
static inline int tls_is_single(const tls_trust *trust)
{
    (void)trust;
    return 0;
}

#endif
#endif
