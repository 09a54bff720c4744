// A TLS server in process, made of mbedTLS, with all the certificates that tests need:
// they are made anew in each run.  It works on memory: what the client sent lies in `in`,
// what the client shall get is put at the end of `out`.  It can be told to cut what it
// sends in any records, and to send things that are no data in between.
#ifndef TLS_PEER_H
#define TLS_PEER_H

#include <mbedtls/cipher.h>
#include <mbedtls/ecp.h>
#include <mbedtls/error.h>
#include <mbedtls/md5.h>
#include <mbedtls/pem.h>
#include <mbedtls/ssl_ticket.h>
#include <mbedtls/x509_crt.h>

#include "check.h"

enum {
    PEER_STREAM = 1 << 21,
    PEER_RECORDS = 1 << 16,
    PEER_PEM = 4096,
    PEER_HANDSHAKE = 22, // types of records
    PEER_DATA = 23
};

#if MBEDTLS_VERSION_NUMBER < 0x03000000
#define PEER_PRIVATE(member) member
#define PEER_RNG
#define PEER_FINAL(function) function##_ret
#else
#define PEER_PRIVATE(member) MBEDTLS_PRIVATE(member)
#define PEER_RNG , mbedtls_ctr_drbg_random, &peer_drbg
#define PEER_FINAL(function) function
#endif

// Not in a public header, but every build of the library has it.
#if MBEDTLS_VERSION_NUMBER < 0x03000000
int mbedtls_ssl_write_record(mbedtls_ssl_context *ssl, uint8_t force_flush);
#else
int mbedtls_ssl_write_record(mbedtls_ssl_context *ssl, int force_flush);
#endif

/// Certificates ///

typedef struct identity {
    const char *name; // common name, and the alternative name
    char certificate[PEER_PEM];
    char key[PEER_PEM];
    mbedtls_pk_context pk;
} identity;

static mbedtls_entropy_context peer_entropy;
static mbedtls_ctr_drbg_context peer_drbg;

static struct {
    identity authority;      // signs those below
    identity server;         // "server.example"
    identity expired;        // the same name
    identity future;         // the same name
    identity address;        // "127.0.0.1"
    identity client;         // "client"
    identity stranger;       // another authority; its name is as long as the server's
    identity strange_server; // signed by it, "server.example"
    identity strange_client; // signed by it
    identity alone;          // "server.example", signed by itself
} people;

static inline void peer_check(int result, const char *what)
{
    char text[128];

    if (result >= 0) return;
    mbedtls_strerror(result, text, sizeof text);
    fprintf(stderr, "%s: %s\n", what, text);
    abort();
}

// subjectAltName with one name, or one IPv4 address.
static inline void peer_add_name(mbedtls_x509write_cert *writer, const char *name)
{
    unsigned char der[128], address[4] = {127, 0, 0, 1};
    int is_address = strcmp(name, "127.0.0.1") == 0;
    size_t length = is_address ? 4 : strlen(name);

    der[0] = 0x30;
    der[1] = (unsigned char)(length + 2);
    der[2] = is_address ? 0x87 : 0x82;
    der[3] = (unsigned char)length;
    memcpy(der + 4, is_address ? (const void *)address : name, length);
    peer_check(mbedtls_x509write_crt_set_extension(writer, "\x55\x1d\x11", 3, 0, der, length + 4),
               "alternative name");
}

static inline void peer_set_serial(mbedtls_x509write_cert *writer)
{
    static unsigned char serial;
#if MBEDTLS_VERSION_NUMBER < 0x03040000
    mbedtls_mpi number;

    mbedtls_mpi_init(&number);
    peer_check(mbedtls_mpi_lset(&number, ++serial), "serial");
    peer_check(mbedtls_x509write_crt_set_serial(writer, &number), "serial");
    mbedtls_mpi_free(&number);
#else
    ++serial;
    peer_check(mbedtls_x509write_crt_set_serial_raw(writer, &serial, 1), "serial");
#endif
}

static inline void peer_make_key(identity *who)
{
    mbedtls_pk_init(&who->pk);
    peer_check(mbedtls_pk_setup(&who->pk, mbedtls_pk_info_from_type(MBEDTLS_PK_ECKEY)), "key");
    peer_check(mbedtls_ecp_gen_key(MBEDTLS_ECP_DP_SECP256R1, mbedtls_pk_ec(who->pk),
                                   mbedtls_ctr_drbg_random, &peer_drbg),
               "key");
    peer_check(mbedtls_pk_write_key_pem(&who->pk, (unsigned char *)who->key, PEER_PEM), "key");
}

// `issuer` is `who` for one that signs itself.  from, to: years.
static inline void peer_make(identity *who, const char *name, identity *issuer, int is_ca,
                             const char *from, const char *to)
{
    mbedtls_x509write_cert writer;
    char subject[64], issued[64], not_before[16], not_after[16];

    who->name = name;
    peer_make_key(who);
    snprintf(subject, sizeof subject, "CN=%s", name);
    snprintf(issued, sizeof issued, "CN=%s", issuer->name);
    snprintf(not_before, sizeof not_before, "%s0101000000", from);
    snprintf(not_after, sizeof not_after, "%s0101000000", to);
    mbedtls_x509write_crt_init(&writer);
    mbedtls_x509write_crt_set_version(&writer, MBEDTLS_X509_CRT_VERSION_3);
    mbedtls_x509write_crt_set_md_alg(&writer, MBEDTLS_MD_SHA256);
    mbedtls_x509write_crt_set_subject_key(&writer, &who->pk);
    mbedtls_x509write_crt_set_issuer_key(&writer, &issuer->pk);
    peer_set_serial(&writer);
    peer_check(mbedtls_x509write_crt_set_subject_name(&writer, subject), "subject");
    peer_check(mbedtls_x509write_crt_set_issuer_name(&writer, issued), "issuer");
    peer_check(mbedtls_x509write_crt_set_validity(&writer, not_before, not_after), "validity");
    peer_check(mbedtls_x509write_crt_set_basic_constraints(&writer, is_ca, -1), "constraints");
    peer_add_name(&writer, name);
    peer_check(mbedtls_x509write_crt_pem(&writer, (unsigned char *)who->certificate, PEER_PEM,
                                         mbedtls_ctr_drbg_random, &peer_drbg),
               "certificate");
    mbedtls_x509write_crt_free(&writer);
}

static inline void peer_make_people(void)
{
    mbedtls_entropy_init(&peer_entropy);
    mbedtls_ctr_drbg_init(&peer_drbg);
    peer_check(mbedtls_ctr_drbg_seed(&peer_drbg, mbedtls_entropy_func, &peer_entropy, NULL, 0),
               "entropy");
#ifdef MBEDTLS_SSL_PROTO_TLS1_3
    peer_check(psa_crypto_init() ? -1 : 0, "psa");
#endif
    peer_make(&people.authority, "authority", &people.authority, 1, "2000", "2099");
    peer_make(&people.server, "server.example", &people.authority, 0, "2000", "2099");
    peer_make(&people.expired, "server.example", &people.authority, 0, "2000", "2001");
    peer_make(&people.future, "server.example", &people.authority, 0, "2098", "2099");
    peer_make(&people.address, "127.0.0.1", &people.authority, 0, "2000", "2099");
    peer_make(&people.client, "client", &people.authority, 0, "2000", "2099");
    peer_make(&people.stranger, "stranger.other", &people.stranger, 1, "2000", "2099");
    peer_make(&people.strange_server, "server.example", &people.stranger, 0, "2000", "2099");
    peer_make(&people.strange_client, "client", &people.stranger, 0, "2000", "2099");
    peer_make(&people.alone, "server.example", &people.alone, 0, "2000", "2099");
}

// The key as OpenSSL once encrypted keys: AES of a key that is the MD5 of password and salt.
static inline void peer_encrypt_key(identity *who, const char *password, char *pem, size_t room)
{
    static const unsigned char iv[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
    unsigned char der[512], sealed[512], key[16], text[128], header[160];
    int size = mbedtls_pk_write_key_der(&who->pk, der, sizeof der);
    size_t done = 0, length = strlen(password), written;
    mbedtls_cipher_context_t aes;

    peer_check(size, "key");
    memcpy(text, password, length);
    memcpy(text + length, iv, 8);
    peer_check(PEER_FINAL(mbedtls_md5)(text, length + 8, key), "md5");
    mbedtls_cipher_init(&aes);
    peer_check(
        mbedtls_cipher_setup(&aes, mbedtls_cipher_info_from_type(MBEDTLS_CIPHER_AES_128_CBC)),
        "aes");
    peer_check(mbedtls_cipher_setkey(&aes, key, 128, MBEDTLS_ENCRYPT), "aes");
    peer_check(mbedtls_cipher_set_padding_mode(&aes, MBEDTLS_PADDING_PKCS7), "aes");
    peer_check(
        mbedtls_cipher_crypt(&aes, iv, 16, der + sizeof der - size, (size_t)size, sealed, &done),
        "aes");
    mbedtls_cipher_free(&aes);
    snprintf((char *)header, sizeof header,
             "-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n"
             "DEK-Info: AES-128-CBC,0102030405060708090A0B0C0D0E0F10\n\n");
    peer_check(mbedtls_pem_write_buffer((const char *)header, "-----END EC PRIVATE KEY-----\n",
                                        sealed, done, (unsigned char *)pem, room, &written),
               "pem");
}

static inline void peer_free_people(void)
{
    identity *all = (identity *)(void *)&people;
    size_t i;

    for (i = 0; i < sizeof people / sizeof *all; i++)
        mbedtls_pk_free(&all[i].pk);
    mbedtls_ctr_drbg_free(&peer_drbg);
    mbedtls_entropy_free(&peer_entropy);
}

/// The server ///

// How it behaves; zeroed it is a good server that sends what is there in one record.
typedef struct manner {
    const identity *who;    // NULL: PSK only
    const identity *trusts; // NULL, or: authority that the client must have a certificate of
    const char *user;       // PSK: identity
    const char *key;        // PSK
    int version;            // 12, 13; 0: any
    const int *suites;      // NULL: any
    const uint16_t *groups; // NULL: any; mbedTLS 3 only
    size_t record;          // most bytes in a record; 0: all
    unsigned empty;         // so many empty records before each record of data
    unsigned tickets;       // so many (TLS 1.3), or requests to shake hands (TLS 1.2)
    unsigned warnings;      // so many warnings
    int no_notify;          // ends without close_notify
    size_t alert_after;     // 0, or: after so many bytes of data comes a fatal alert
    unsigned char alert;    // its number; 0: internal_error
} manner;

typedef struct peer {
    manner manner;
    mbedtls_ssl_config config;
    mbedtls_ssl_context ssl;
    mbedtls_x509_crt certificate, authority;
    int shaken;
    int result;            // what ended it, or 0
    int notified;          // the client said close_notify
    size_t sent;           // bytes of data
    size_t received;       // bytes of data
    char sni[256];         // what the client asked for, or ""
    unsigned record_count; // of the client's, with their types and sizes
    struct {
        int type;
        size_t size;
    } records[PEER_RECORDS];
    size_t parsed; // bytes of `in` that are counted in them
    size_t in_size, in_taken, out_size, out_taken;
    unsigned char in[PEER_STREAM], out[PEER_STREAM];
} peer;

static inline int peer_send(void *context, const unsigned char *data, size_t size)
{
    peer *p = (peer *)context;

    if (size > PEER_STREAM - p->out_size) abort();
    memcpy(p->out + p->out_size, data, size);
    p->out_size += size;
    return (int)size;
}

static inline int peer_recv(void *context, unsigned char *to, size_t size)
{
    peer *p = (peer *)context;
    size_t there = p->in_size - p->in_taken;

    if (there == 0) return MBEDTLS_ERR_SSL_WANT_READ;
    if (size > there) size = there;
    memcpy(to, p->in + p->in_taken, size);
    p->in_taken += size;
    return (int)size;
}

static inline int peer_note_sni(void *context, mbedtls_ssl_context *ssl, const unsigned char *name,
                                size_t size)
{
    peer *p = (peer *)context;

    (void)ssl;
    if (size >= sizeof p->sni) return -1;
    memcpy(p->sni, name, size);
    p->sni[size] = '\0';
    return 0;
}

// Tickets that nobody will ever use.
static inline int peer_write_ticket(void *context, const mbedtls_ssl_session *of,
                                    unsigned char *start, const unsigned char *end, size_t *size,
                                    uint32_t *lifetime)
{
    (void)context;
    (void)of;
    if (end - start < 32) return MBEDTLS_ERR_SSL_BUFFER_TOO_SMALL;
    memset(start, 7, 32);
    *size = 32;
    *lifetime = 60;
    return 0;
}

static inline void peer_set_version(mbedtls_ssl_config *config, int version)
{
#if MBEDTLS_VERSION_NUMBER < 0x03000000
    (void)version;
    mbedtls_ssl_conf_min_version(config, MBEDTLS_SSL_MAJOR_VERSION_3, MBEDTLS_SSL_MINOR_VERSION_3);
#else
    if (version == 12) mbedtls_ssl_conf_max_tls_version(config, MBEDTLS_SSL_VERSION_TLS1_2);
    if (version == 13) mbedtls_ssl_conf_min_tls_version(config, MBEDTLS_SSL_VERSION_TLS1_3);
#endif
}

static inline void peer_parse(mbedtls_x509_crt *to, const identity *who)
{
    peer_check(mbedtls_x509_crt_parse(to, (const unsigned char *)who->certificate,
                                      strlen(who->certificate) + 1),
               "certificate");
}

static inline void peer_identify(peer *p, const manner *how)
{
    mbedtls_x509_crt_init(&p->certificate);
    mbedtls_x509_crt_init(&p->authority);
    if (how->who) {
        peer_parse(&p->certificate, how->who);
        peer_check(mbedtls_ssl_conf_own_cert(&p->config, &p->certificate,
                                             (mbedtls_pk_context *)(uintptr_t)&how->who->pk),
                   "own certificate");
    }
    if (how->trusts) {
        peer_parse(&p->authority, how->trusts);
        mbedtls_ssl_conf_ca_chain(&p->config, &p->authority, NULL);
    }
    mbedtls_ssl_conf_authmode(&p->config,
                              how->trusts ? MBEDTLS_SSL_VERIFY_REQUIRED : MBEDTLS_SSL_VERIFY_NONE);
    if (how->key) {
        peer_check(mbedtls_ssl_conf_psk(&p->config, (const unsigned char *)how->key,
                                        strlen(how->key), (const unsigned char *)how->user,
                                        strlen(how->user)),
                   "psk");
    }
}

static inline void peer_begin(peer *p, const manner *how)
{
    memset(p, 0, offsetof(peer, in));
    p->manner = *how;
    mbedtls_ssl_config_init(&p->config);
    mbedtls_ssl_init(&p->ssl);
    peer_check(mbedtls_ssl_config_defaults(&p->config, MBEDTLS_SSL_IS_SERVER,
                                           MBEDTLS_SSL_TRANSPORT_STREAM,
                                           MBEDTLS_SSL_PRESET_DEFAULT),
               "configuration");
    mbedtls_ssl_conf_rng(&p->config, mbedtls_ctr_drbg_random, &peer_drbg);
    mbedtls_ssl_conf_sni(&p->config, peer_note_sni, p);
    if (how->suites) mbedtls_ssl_conf_ciphersuites(&p->config, how->suites);
    peer_set_version(&p->config, how->version);
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    if (how->groups) mbedtls_ssl_conf_groups(&p->config, how->groups);
    mbedtls_ssl_conf_session_tickets_cb(&p->config, peer_write_ticket, NULL, NULL);
    mbedtls_ssl_conf_new_session_tickets(&p->config, 1);
#endif
    peer_identify(p, how);
    peer_check(mbedtls_ssl_setup(&p->ssl, &p->config), "setup");
    mbedtls_ssl_set_bio(&p->ssl, p, peer_send, peer_recv, NULL);
}

static inline void peer_end(peer *p)
{
    mbedtls_ssl_free(&p->ssl);
    mbedtls_ssl_config_free(&p->config);
    mbedtls_x509_crt_free(&p->certificate);
    mbedtls_x509_crt_free(&p->authority);
}

// What the client sent: types and sizes of its records, by the specification alone.
static inline void peer_count_records(peer *p)
{
    while (p->in_size - p->parsed >= 5) {
        size_t size = (size_t)p->in[p->parsed + 3] * 256 + p->in[p->parsed + 4];

        if (p->in_size - p->parsed < 5 + size) return;
        if (p->record_count == PEER_RECORDS) abort();
        p->records[p->record_count].type = p->in[p->parsed];
        p->records[p->record_count].size = size;
        p->record_count++;
        p->parsed += 5 + size;
    }
}

static inline void peer_take(peer *p, const void *data, size_t size)
{
    if (size > PEER_STREAM - p->in_size) abort();
    memcpy(p->in + p->in_size, data, size);
    p->in_size += size;
    peer_count_records(p);
}

// Shakes hands as far as that goes.  Returns whether data may be moved.
static inline int peer_shake(peer *p)
{
    int result;

    if (p->result || p->shaken) return p->shaken && !p->result;
    result = mbedtls_ssl_handshake(&p->ssl);
    p->shaken = result == 0;
    if (result && result != MBEDTLS_ERR_SSL_WANT_READ) p->result = result;
    return p->shaken;
}

// Receives data; returns how many bytes, 0 if there is none now.
static inline size_t peer_read(peer *p, unsigned char *to, size_t size)
{
    int result;

    if (!peer_shake(p)) return 0;
    result = mbedtls_ssl_read(&p->ssl, to, size);
    if (result > 0) {
        p->received += (size_t)result;
        return (size_t)result;
    }
    if (result == MBEDTLS_ERR_SSL_PEER_CLOSE_NOTIFY) {
        p->notified = 1;
    } else if (result != MBEDTLS_ERR_SSL_WANT_READ) {
        p->result = result;
    }
    return 0;
}

/// Records that are no data ///

static inline void peer_write_handshake(peer *p, const unsigned char *message, size_t size)
{
    memcpy(p->ssl.PEER_PRIVATE(out_msg), message, size);
    p->ssl.PEER_PRIVATE(out_msgtype) = MBEDTLS_SSL_MSG_HANDSHAKE;
    p->ssl.PEER_PRIVATE(out_msglen) = size;
    peer_check(mbedtls_ssl_write_record(&p->ssl, 1), "record");
}

static inline int peer_is_13(const peer *p)
{
    return strcmp(mbedtls_ssl_get_version(&p->ssl), "TLSv1.3") == 0;
}

// A new session ticket, or in TLS 1.2 a request to shake hands anew.
static inline void peer_write_ticket_record(peer *p)
{
    static const unsigned char ticket[] = {4, 0, 0,  18, 0, 0, 0, 60, 1, 2, 3,
                                           4, 1, 99, 0,  4, 5, 6, 7,  8, 0, 0};
    static const unsigned char anew[] = {0, 0, 0, 0};

    if (peer_is_13(p)) {
        peer_write_handshake(p, ticket, sizeof ticket);
    } else {
        peer_write_handshake(p, anew, sizeof anew);
    }
}

static inline void peer_write_noise(peer *p)
{
    unsigned i;

    for (i = 0; i < p->manner.tickets; i++)
        peer_write_ticket_record(p);
    for (i = 0; i < p->manner.warnings; i++) {
        peer_check(mbedtls_ssl_send_alert_message(&p->ssl, MBEDTLS_SSL_ALERT_LEVEL_WARNING,
                                                  MBEDTLS_SSL_ALERT_MSG_USER_CANCELED),
                   "warning");
    }
    for (i = 0; i < p->manner.empty; i++)
        peer_check(mbedtls_ssl_write(&p->ssl, (const unsigned char *)"", 0), "empty record");
}

// How many of `size` bytes the next record takes.
static inline size_t peer_record_size(const peer *p, size_t size)
{
    size_t most = (size_t)mbedtls_ssl_get_max_out_record_payload(&p->ssl);

    if (p->manner.record && p->manner.record < most) most = p->manner.record;
    if (p->manner.alert_after && p->manner.alert_after - p->sent < most) {
        most = p->manner.alert_after - p->sent;
    }
    return size < most ? size : most;
}

// Sends one record of data, with what comes before and behind it.
static inline void peer_write(peer *p, const unsigned char *data, size_t size)
{
    peer_write_noise(p);
    peer_check(mbedtls_ssl_write(&p->ssl, data, size) == (int)size ? 0 : -1, "data");
    p->sent += size;
    if (p->manner.alert_after == p->sent) {
        peer_check(mbedtls_ssl_send_alert_message(
                       &p->ssl, MBEDTLS_SSL_ALERT_LEVEL_FATAL,
                       p->manner.alert ? p->manner.alert : MBEDTLS_SSL_ALERT_MSG_INTERNAL_ERROR),
                   "alert");
        p->result = -1;
    }
}

#endif
