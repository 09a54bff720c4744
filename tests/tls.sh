#!/bin/bash
# limit: 900
# TLS with the servers that people run: examples/copy, dump, info, tls and tls_openssl move
# every byte right, with mbedTLS 2.28 of this machine and 3.6 of the tree that tests/trixie.sh
# makes, TLS 1.2 and 1.3, certificates and shared keys; and whatever is wrong is told in one
# line, before the server hears the name of the export.
. tests/lib.sh
. tests/servers.sh

pki=$tmp/pki             # authority, server, and a client with a certificate
anonymous=$tmp/anonymous # the authority only: a client without a certificate
psk=$tmp/psk             # keys of alice, as psktool writes them
image=$tmp/image
disk=$tmp/disk
target=$tmp/target

## Certificates

key() {
    certtool --generate-privkey --key-type=ecdsa --curve=secp256r1 --outfile "$1"
}

# authority DIRECTORY: ca-cert.pem and its key.
authority() {
    mkdir "$1"
    key "$1/ca-key.pem" || return 1
    printf '%s\n' "cn = \"authority of $1\"" ca cert_signing_key "$week" >"$1/ca.info"
    certtool --generate-self-signed --load-privkey "$1/ca-key.pem" --template "$1/ca.info" \
        --outfile "$1/ca-cert.pem"
}

# certificate NAME DIRECTORY LINES...: signed by the authority in that directory; the lines are
# more of the template.
certificate() {
    local name=$1 in=$2
    shift 2
    key "$in/$name-key.pem" || return 1
    printf '%s\n' "cn = \"$name\"" signing_key "$@" >"$in/$name.info"
    certtool --generate-certificate --load-ca-certificate "$in/ca-cert.pem" \
        --load-ca-privkey "$in/ca-key.pem" --load-privkey "$in/$name-key.pem" \
        --template "$in/$name.info" --outfile "$in/$name-cert.pem"
}

local_names='dns_name = "localhost"
ip_address = "127.0.0.1"
ip_address = "::1"'
week='expiration_days = 7'
past='activation_date = "2020-01-01 00:00:00"
expiration_date = "2020-12-31 00:00:00"'

# server_with NAME LINES...: a directory of a server whose certificate is signed by the
# authority that everybody trusts.
server_with() {
    mkdir "$tmp/$1"
    cp "$pki/ca-cert.pem" "$pki/ca-key.pem" "$tmp/$1"
    certificate server "$tmp/$1" tls_www_server "${@:2}"
}

# client_with NAME DIRECTORY FILES...: a directory of a client that trusts our authority and
# has these files.
client_with() {
    local file
    mkdir "$tmp/$1"
    cp "$pki/ca-cert.pem" "$tmp/$1"
    for file in "${@:3}"; do
        cp "$2/$file" "$tmp/$1"
    done
}

# The server wants the certificate of an authority too: its own must do.
self_signed() {
    mkdir "$tmp/self"
    key "$tmp/self/server-key.pem" || return 1
    printf '%s\n' 'cn = "server"' signing_key tls_www_server "$local_names" "$week" >"$tmp/self/info"
    certtool --generate-self-signed --load-privkey "$tmp/self/server-key.pem" \
        --template "$tmp/self/info" --outfile "$tmp/self/server-cert.pem" &&
        cp "$tmp/self/server-cert.pem" "$tmp/self/ca-cert.pem"
}

make_certificates() {
    authority "$pki" && certificate server "$pki" tls_www_server "$local_names" "$week" &&
        certificate client "$pki" tls_www_client "$week" &&
        authority "$tmp/other" && certificate client "$tmp/other" tls_www_client "$week" &&
        server_with expired "$local_names" "$past" &&
        server_with elsewhere 'dns_name = "elsewhere"' "$week" && self_signed &&
        client_with anonymous "$pki" &&
        client_with stranger "$tmp/other" client-cert.pem client-key.pem &&
        client_with mixed "$pki" client-cert.pem &&
        cp "$tmp/other/client-key.pem" "$tmp/mixed" &&
        client_with locked "$pki" client-cert.pem &&
        certtool --to-p8 --load-privkey "$pki/client-key.pem" --password sesame \
            --pkcs-cipher 3des --outfile "$tmp/locked/client-key.pem"
}

make_keys() {
    mkdir "$psk" "$tmp/guess"
    psktool -u alice -p "$psk/keys.psk" && psktool -u alice -p "$tmp/guess/keys.psk" &&
        psktool -u mallory -p "$tmp/guess/keys.psk"
}

# What makes GnuTLS, which all of these servers use, speak one version only.
make_versions() {
    printf '[overrides]\ndisabled-version = tls1.3\n' >"$tmp/TLS 1.2"
    printf '[overrides]\ndisabled-version = tls1.%s\n' 0 1 2 >"$tmp/TLS 1.3"
    printf '[overrides]\n' >"$tmp/any"
}

## Servers

# Each serves the disk as $1 says: x509, client (it wants a certificate of the client) or psk.
# $2 is the directory of its certificates.
serve_nbdkit() {
    local options
    case $1 in
    psk) options="--tls-psk=$psk/keys.psk" ;;
    client) options="--tls-certificates=$2 --tls-verify-peer" ;;
    x509) options="--tls-certificates=$2" ;;
    esac
    # shellcheck disable=SC2086
    start nbdkit -f -v -U "$socket" --tls=require $options file "$disk"
}

serve_qemu() {
    local object
    case $1 in
    psk) object="tls-creds-psk,dir=$psk" ;;
    client) object="tls-creds-x509,dir=$2,verify-peer=on" ;;
    x509) object="tls-creds-x509,dir=$2,verify-peer=off" ;;
    esac
    start qemu-nbd -t -e 8 -k "$socket" -f raw -x disk --object "$object,id=t,endpoint=server" \
        --tls-creds t "$disk"
}

# It always wants a certificate of the client: 3.24 hangs up if it has no cacertfile.
serve_nbd() {
    serve_nbd_server "$disk" '' "certfile = $2/server-cert.pem
keyfile = $2/server-key.pem
cacertfile = $2/ca-cert.pem
force_tls = true"
}

# serve SERVER VERSION AUTHENTICATION [DIRECTORY]: the disk is empty.
serve() {
    head -c "$(stat -c %s "$image")" /dev/zero >"$disk"
    GNUTLS_SYSTEM_PRIORITY_FILE="$tmp/$2" "serve_$1" "$3" "${4:-$pki}"
}

# tls_uri AUTHENTICATION [DIRECTORY]: how a client reaches it, with the certificates or keys
# in that directory.
tls_uri() {
    case $1 in
    psk) echo "nbds+unix://alice@/disk?socket=$socket&tls-psk-file=${2:-$psk}/keys.psk" ;;
    client) tls_uri x509 "${2:-$pki}" ;;
    x509) echo "nbds+unix:///disk?socket=$socket&tls-hostname=localhost&tls-certificates=${2:-$anonymous}" ;;
    esac
}

## Programs

# The command of the first comment of examples/$1.c, with more arguments behind the compiler.
build() {
    local name=$1 command
    command=$(sed -n 's,^// .*&& gcc ,,p' "examples/$name.c" | head -n 1)
    # shellcheck disable=SC2086
    $CC "${@:2}" ${command% -o *} -o "$tmp/$name"
}

# The programs of mbedTLS 3.6 run with the loader of their tree.
build_newer() {
    local libraries=$tree/usr/lib/x86_64-linux-gnu
    # shellcheck disable=SC2086
    $CC -std=c99 -O2 $WARN -pthread -DNBD_MBEDTLS -I. -isystem "$tmp/include" "examples/$1.c" \
        -Wl,--allow-shlib-undefined -o "$tmp/$1.newer" "$libraries/libmbedtls.so" \
        "$libraries/libmbedx509.so" "$libraries/libmbedcrypto.so" || return 1
    printf '#!/bin/sh\nexec %s --library-path %s --argv0 %s %s "$@"\n' \
        "$tree/usr/lib64/ld-linux-x86-64.so.2" "$libraries" "$1" "$tmp/$1.newer" >"$tmp/3.6/$1"
    chmod +x "$tmp/3.6/$1"
}

build_plain() {
    # shellcheck disable=SC2086
    $CC -std=c99 -O2 $WARN -pthread -I. "examples/$1.c" -o "$tmp/$1.plain"
}

run() {
    timeout 60 "$@"
}

# downloads PROGRAM URI: the image comes out of its standard output.
downloads() {
    run "$@" >"$target" && cmp "$disk" "$target"
}

# both_ways COPY URI: uploads the image, looks at the server's file, downloads it.
both_ways() {
    run "$1" "$image" "$2" && cmp "$image" "$disk" && rm -f "$target" &&
        run "$1" "$2" "$target" && cmp "$image" "$target"
}

# speaks VERSION PROGRAM URI
speaks() {
    downloads "${@:2}" 2>"$tmp/said" && grep -q "^tls: TLSv${1#TLS }, " "$tmp/said"
}

## What works

# one_version SERVER VERSION AUTHENTICATION
one_version() {
    local mbedtls name="$1, $3, $2"
    for mbedtls in $mbedtls_versions; do
        if [ "$mbedtls $2" = '2.28 TLS 1.3' ]; then
            check "$name: starts for mbedTLS $mbedtls" serve "$@"
            refuse "$name: mbedTLS $mbedtls says that it is too old" 'TLS: no common version' \
                run "$tmp/$mbedtls/tls" "$(tls_uri "$3")"
            continue
        fi
        check "$name: starts for mbedTLS $mbedtls" serve "$@"
        check "$name: copied both ways, mbedTLS $mbedtls" both_ways "$tmp/$mbedtls/copy" "$(tls_uri "$3")"
        check "$name: tls tells the version, mbedTLS $mbedtls" speaks "$2" "$tmp/$mbedtls/tls" \
            "$(tls_uri "$3")"
    done
    [ "$3" = psk ] || [ ! -x "$tmp/tls_openssl" ] ||
        check "$name: downloads, OpenSSL" downloads "$tmp/tls_openssl" "$(tls_uri "$3")"
}

# one_server SERVER PROGRAM AUTHENTICATIONS...
one_server() {
    local version how
    if ! has "$2"; then
        skip "$1" "$2 is not installed"
        return
    fi
    for how in "${@:3}"; do
        for version in 'TLS 1.2' 'TLS 1.3'; do
            one_version "$1" "$version" "$how"
        done
    done
}

## What fails

secret=name-of-the-export

# What a program sends is looked at, and what the server has seen.  The line that it prints
# may have the name.
keeps_the_name() {
    grep -v ' write(2, ' "$tmp/sent" | grep -q "$secret" && echo 'error: the name was sent in clear'
    grep -q "$secret" "$tmp/server.log" && echo 'error: the server has the name'
    [ ! -s "$tmp/out" ] || echo 'error: something was printed'
    [ "$(wc -l <"$tmp/said")" = 1 ] || echo 'error: not one line'
}

# Fails as the program does, but succeeds if that was not all it did.
fails_well() {
    local status
    if has strace; then
        run strace -f -qq -s 65536 -e trace=sendmsg,sendto,write,writev -o "$tmp/sent" "$@"
    else
        : >"$tmp/sent"
        run "$@"
    fi >"$tmp/out" 2>"$tmp/said"
    status=$?
    cat "$tmp/said"
    nothing "${1##*/}" < <(keeps_the_name) && return $status
}

# wrong RULE TEXT URI: the program of each mbedTLS says so.
wrong() {
    local mbedtls
    for mbedtls in $mbedtls_versions; do
        refuse "$1, mbedTLS $mbedtls" "$2" fails_well "$tmp/$mbedtls/tls" "$3"
    done
}

wrong_openssl() {
    [ ! -x "$tmp/tls_openssl" ] || refuse "$1, OpenSSL" "$2" fails_well "$tmp/tls_openssl" "$3"
}

# bad AUTHENTICATION [DIRECTORY]: tls_uri with the name that must stay secret.
bad() {
    tls_uri "$@" | sed "s,/disk?,/$secret?,"
}

wrong_servers() {
    check 'server: starts' serve nbdkit any x509
    wrong 'an authority that is not ours' 'not signed by a trusted authority' "$(bad x509 "$tmp/other")"
    wrong_openssl 'an authority that is not ours' 'local issuer' "$(bad x509 "$tmp/other")"
    wrong 'another name' 'is for another name' "$(bad x509 | sed s/localhost/elsewhere/)"
    wrong_openssl 'another name' 'hostname mismatch' "$(bad x509 | sed s/localhost/elsewhere/)"
    wrong 'no name to verify' 'no name to verify' "$(bad x509 | sed s/tls-hostname=localhost//)"
    wrong_openssl 'no name to verify' 'no name to verify' "$(bad x509 | sed s/tls-hostname=localhost//)"
    wrong 'no authority' 'file of the authority cannot be read' "$(bad x509 "$tmp/none.d")"
    wrong_openssl 'no authority' 'cannot use: .*/none.d/ca-cert.pem' "$(bad x509 "$tmp/none.d")"
    wrong 'anonymous TLS' 'anon is not supported' "$(bad x509)&tls-type=anon"
    wrong_openssl 'anonymous TLS' 'no such TLS here: anon' "$(bad x509)&tls-type=anon"
    check 'server of another name: starts' serve nbdkit any x509 "$tmp/elsewhere"
    wrong 'a server of another name' 'is for another name' "$(bad x509)"
    wrong_openssl 'a server of another name' 'hostname mismatch' "$(bad x509)"
    check 'expired server: starts' serve nbdkit any x509 "$tmp/expired"
    wrong 'an expired certificate' 'has expired' "$(bad x509)"
    wrong_openssl 'an expired certificate' 'has expired' "$(bad x509)"
    check 'server that signs for itself: starts' serve nbdkit any x509 "$tmp/self"
    wrong 'a certificate signed by itself' 'signed by itself' "$(bad x509)"
    wrong_openssl 'a certificate signed by itself' 'self.signed' "$(bad x509)"
}

# In TLS 1.3 it shows only behind the handshake, at the first read.
wrong_clients() {
    local version server
    for version in 'TLS 1.2' 'TLS 1.3'; do
        for server in nbdkit qemu nbd; do
            check "$server, $version: starts for clients that it refuses" serve $server "$version" client
            refused_by "$server, $version"
        done
    done
    check 'server for clients with wrong keys: starts' serve nbdkit any client
    wrong 'key of another certificate' 'key is not that of the certificate' "$(bad client "$tmp/mixed")"
    wrong_openssl 'key of another certificate' 'cannot use: .*client-key.pem' "$(bad client "$tmp/mixed")"
    wrong 'key without its password' 'give its password' "$(bad client "$tmp/locked")"
    KEY_PASSWORD=guess wrong 'key with a wrong password' 'wrong password' "$(bad client "$tmp/locked")"
    for mbedtls in $mbedtls_versions; do
        KEY_PASSWORD=sesame check "key with its password, mbedTLS $mbedtls" downloads \
            "$tmp/$mbedtls/tls" "$(tls_uri client "$tmp/locked")"
    done
}

refused_by() {
    wrong "$1: a client without a certificate" 'certificate\|refuse' "$(bad client "$anonymous")"
    wrong "$1: a client that it does not know" 'certificate\|refuse' "$(bad client "$tmp/stranger")"
    wrong_openssl "$1: a client without a certificate" 'transport' "$(bad client "$anonymous")"
}

wrong_keys() {
    local server
    for server in nbdkit qemu; do
        check "$server, keys: starts" serve $server any psk
        wrong "$server: wrong key of a user" 'keys differ\|x' "$(bad psk "$tmp/guess")"
        wrong "$server: user that it does not know" 'know the user\|x' \
            "$(bad psk "$tmp/guess" | sed s/alice/mallory/)"
        wrong "$server: user who has no key" 'no such user' "$(bad psk | sed s/alice/nobody/)"
        wrong "$server: certificate instead of a key" 'x' "$(bad x509)"
    done
}

make_certificates 2>&1 | tail -3
make_keys
make_versions
mbedtls_versions='2.28 3.6'
mkdir "$tmp/include" "$tmp/3.6" "$tmp/2.28"
ln -s "$tree/usr/include/mbedtls" "$tree/usr/include/psa" "$tmp/include"
for p in copy tls dump info; do build_newer $p; cp build/examples/$p $tmp/2.28; done
cp build/examples/tls_openssl $tmp
head -c 4194304 /dev/urandom >"$image"
one_server nbdkit nbdkit x509 client psk
one_server qemu qemu-nbd x509 client psk
one_server nbd nbd-server client
wrong_servers
wrong_clients
wrong_keys
