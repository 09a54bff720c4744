#!/bin/bash
# limit: 900
# TLS with the servers that people run: examples/copy, dump, info, tls and tls_openssl move
# every byte right, with the mbedTLS of this machine and with 3.6, which is in the tree that
# tests/trixie.sh makes, TLS 1.2 and 1.3, certificates and shared keys; and whatever is wrong
# is told in one line, before the server hears the name of the export.
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
    serve_nbd_server "$disk" "[other]
exportname = $disk" "certfile = $2/server-cert.pem
keyfile = $2/server-key.pem
cacertfile = $2/ca-cert.pem
force_tls = true"
}

# serve SERVER VERSION AUTHENTICATION [DIRECTORY]: the disk is the image.
serve() {
    cp "$image" "$disk"
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

# The version of the mbedTLS in the directory of headers $1, like 2.28; nothing if there is none.
mbedtls_version() {
    printf '#include <mbedtls/version.h>\nMBEDTLS_VERSION_STRING\n' |
        $CC ${1:+-isystem "$1"} -E - 2>"$tmp/none" | sed -n 's/^ *"\([0-9]*\.[0-9]*\)\..*"$/\1/p'
}

# Programs that make has built with the mbedTLS of this machine.
take_programs() {
    mkdir "$tmp/$1"
    cp build/examples/copy build/examples/dump build/examples/info build/examples/tls "$tmp/$1"
}

# The programs of the tree run with its loader.
build_newer() {
    local libraries=$tree/usr/lib/x86_64-linux-gnu name
    mkdir "$tmp/$1"
    for name in copy dump info tls; do
        # shellcheck disable=SC2086
        $CC -std=c99 -O2 $WARN -pthread -DNBD_MBEDTLS -I. -isystem "$tmp/include" \
            "examples/$name.c" -Wl,--allow-shlib-undefined -o "$tmp/$name.newer" \
            "$libraries/libmbedtls.so" "$libraries/libmbedx509.so" "$libraries/libmbedcrypto.so" ||
            return 1
        printf '#!/bin/sh\nexec %s --library-path %s --argv0 %s %s "$@"\n' \
            "$tree/usr/lib64/ld-linux-x86-64.so.2" "$libraries" "$name" "$tmp/$name.newer" \
            >"$tmp/$1/$name"
        chmod +x "$tmp/$1/$name"
    done
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

# both_ways COPY URI: downloads the image, uploads another one, looks at the server's file.
both_ways() {
    rm -f "$target"
    run "$1" "$2" "$target" && cmp "$image" "$target" && run "$1" "$image.2" "$2" &&
        cmp "$image.2" "$disk"
}

# speaks VERSION PROGRAM URI
speaks() {
    downloads "${@:2}" 2>"$tmp/said" && grep -q "^tls: TLSv${1#TLS }, " "$tmp/said"
}

## What works

# one_version SERVER VERSION AUTHENTICATION
one_version() {
    local mbedtls name="$1, $3, $2"
    for mbedtls in $versions; do
        check "$name: starts for mbedTLS $mbedtls" serve "$@"
        if too_old "$mbedtls" "$2"; then
            refuse "$name: mbedTLS $mbedtls has no such version" 'TLS: ' \
                run "$tmp/$mbedtls/tls" "$(tls_uri "$3")"
            continue
        fi
        check "$name: copied both ways, mbedTLS $mbedtls" both_ways "$tmp/$mbedtls/copy" \
            "$(tls_uri "$3")"
        check "$name: spoken by tls, mbedTLS $mbedtls" speaks "$2" "$tmp/$mbedtls/tls" \
            "$(tls_uri "$3")"
    done
    [ "$3" != psk ] && [ -x "$tmp/tls_openssl" ] || return
    check "$name: starts for OpenSSL" serve "$@"
    check "$name: downloaded, OpenSSL" downloads "$tmp/tls_openssl" "$(tls_uri "$3")"
}

# too_old MBEDTLS VERSION
too_old() {
    case "$1 $2" in 2.*1.3) return 0 ;; *) return 1 ;; esac
}

# one_server SERVER AUTHENTICATIONS...
one_server() {
    local version how
    for how in "${@:2}"; do
        for version in 'TLS 1.2' 'TLS 1.3'; do
            one_version "$1" "$version" "$how"
        done
    done
}

## What fails

secret='name-of-the-export'

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
    nothing "${1##*/}" < <(keeps_the_name) || return 0
    return $status
}

# wrong RULE TEXT URI: the program of each mbedTLS says so.
wrong() {
    local mbedtls
    for mbedtls in $versions; do
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

# The server does tell the name, once it has it.
server_tells_the_name() {
    downloads "$tmp/tls_openssl" "$(bad x509)" && grep -q "$secret" "$tmp/server.log"
}

wrong_servers() {
    check 'server: starts' serve nbdkit any x509
    [ ! -x "$tmp/tls_openssl" ] || check 'the name is seen once it is sent' server_tells_the_name
    check 'server: starts again' serve nbdkit any x509
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

# In TLS 1.3 it shows only behind the handshake, at the first read.  These servers hang up
# without a word.
wrong_clients() {
    local version server mbedtls newer="$versions"
    for version in 'TLS 1.2' 'TLS 1.3'; do
        for server in nbdkit qemu nbd; do
            check "$server, $version: starts for clients that it refuses" serve $server "$version" client
            for mbedtls in $newer; do
                too_old "$mbedtls" "$version" || versions=$mbedtls refused_by "$server, $version"
            done
            wrong_openssl "$server, $version: a client without a certificate" \
                'eof\|lost\|closed the connection\|certificate' "$(bad client "$anonymous")"
        done
    done
}

refused_by() {
    wrong "$1: a client without a certificate" 'want.* a certificate' "$(bad client "$anonymous")"
    wrong "$1: a client that it does not know" "the client's certificate" \
        "$(bad client "$tmp/stranger")"
}

# What is wrong with the client's own files is told before anything is sent.
wrong_files() {
    local mbedtls
    check 'server for clients with wrong files: starts' serve nbdkit any client
    wrong 'key of another certificate' 'key is not that of the certificate' "$(bad client "$tmp/mixed")"
    wrong_openssl 'key of another certificate' 'cannot use: .*client-key.pem' "$(bad client "$tmp/mixed")"
    wrong 'key without its password' 'give its password' "$(bad client "$tmp/locked")"
    KEY_PASSWORD=guess wrong 'key with a wrong password' 'wrong password' "$(bad client "$tmp/locked")"
    for mbedtls in $versions; do
        KEY_PASSWORD=sesame check "key with its password, tls, mbedTLS $mbedtls" downloads \
            "$tmp/$mbedtls/tls" "$(tls_uri client "$tmp/locked")"
        KEY_PASSWORD=sesame check "key with its password, info, mbedTLS $mbedtls" run \
            "$tmp/$mbedtls/info" "$(tls_uri client "$tmp/locked")"
    done
}

wrong_keys() {
    local server
    for server in nbdkit qemu; do
        check "$server, keys: starts" serve $server any psk
        wrong "$server: wrong key of a user" "$psk_refused" "$(bad psk "$tmp/guess")"
        wrong "$server: user that it does not know" "$psk_refused" \
            "$(bad psk "$tmp/guess" | sed s/alice/mallory/)"
        wrong "$server: user who has no key" 'no such user' "$(bad psk | sed s/alice/nobody/)"
        wrong "$server: certificates where keys are wanted" 'TLS: ' "$(bad x509)"
    done
}
psk_refused='the user or the key may be wrong'

one_side_only() {
    local tool plain_uri="nbd+unix:///$secret?socket=$socket"
    check 'server without TLS: starts' start nbdkit -f -v -U "$socket" file "$disk"
    wrong 'a server without TLS' 'TLS is required, but not started: server refused STARTTLS' "$(bad x509)"
    wrong_openssl 'a server without TLS' 'TLS is required' "$(bad x509)"
    check 'oldstyle server: starts' start nbdkit -f -v --oldstyle -U "$socket" file "$disk"
    wrong 'an oldstyle server' 'TLS is required, but not started: oldstyle server' "$(bad x509)"
    check 'server that requires TLS: starts' serve nbdkit any x509
    for tool in copy dump info; do
        refuse "$tool: a client without TLS" 'server requires TLS' tool "$tool" "$plain_uri"
    done
    for tool in hello poll_copy; do
        refuse "$tool: says that TLS was not started" 'TLS is required, but not started' \
            run "build/examples/$tool" "$(bad x509)" "$(bad x509)"
    done
}

## The tools

# tool NAME URI: copies to a file, or prints.  $tools has the programs, with $kind
# behind their names.
tool() {
    if [ "$1" = copy ]; then
        run "$tools/copy$kind" "$2" "$target"
    else
        run "$tools/$1$kind" "$2"
    fi
}
kind=

plain_tool() {
    tools=$tmp kind=.plain tool "$@"
}

same_as_nbdinfo() {
    run nbdinfo "${@:2}" "$1" >"$tmp/theirs" && run "$tools/info" "${@:2}" "$1" |
        diff "$tmp/theirs" -
}

same_as_nbdcopy() {
    run nbdcopy "$1" "$tmp/theirs" && tool copy "$1" && cmp "$tmp/theirs" "$target"
}

first_line_is_there() {
    tool dump "$1" >"$tmp/out" && od -A n -t x1 -N 16 "$disk" | tr -d ' ' >"$tmp/bytes" &&
        head -n 1 "$tmp/out" | cut -c 13-60 | tr -d ' ' | cmp - "$tmp/bytes"
}

four_connections() {
    run "$tools/copy$kind" -v -C 4 -T 4 "$1" "$target" 2>"$tmp/said" &&
        cmp "$disk" "$target" && grep -q '^copy: source: .* connections=4 threads=4$' "$tmp/said"
}

serve_tcp() {
    fresh_port
    cp "$image" "$disk"
    launch nbdkit -f -i 127.0.0.1 -p "$port" --tls=require --tls-certificates="$pki" file "$disk"
}

tools() {
    local uri_x509 uri_psk name
    check 'tools: server starts' serve nbdkit any x509
    cp "$image" "$disk"
    uri_x509=$(tls_uri x509)
    check 'dump: with certificates' first_line_is_there "$uri_x509"
    check 'copy: four connections in four threads' four_connections "$uri_x509"
    with nbdinfo 'info: as nbdinfo says it, certificates' same_as_nbdinfo "$uri_x509"
    with nbdinfo 'info: as nbdinfo says it, certificates, JSON' same_as_nbdinfo "$uri_x509" --json
    for name in --list --map --size; do
        with nbdinfo "info: as nbdinfo says it, certificates, $name" same_as_nbdinfo "$uri_x509" $name
    done
    check 'info: it is TLS' run "$tools/info" --is tls "$uri_x509"
    with nbdcopy 'copy: as nbdcopy does, certificates' same_as_nbdcopy "$uri_x509"
    for name in copy dump info; do
        refuse "$name: a wrong authority is an error" "^$name: .*not signed by a trusted authority\$" \
            tool $name "$(tls_uri x509 "$tmp/other")"
        refuse "$name: no authority is an error" "^$name: .*file of the authority cannot be read\$" \
            tool $name "$(tls_uri x509 "$tmp/none.d")"
        refuse "$name: no name is an error" "^$name: .*no name to verify" \
            tool $name "$(tls_uri x509 | sed s/tls-hostname=localhost//)"
        check "$name: builds without TLS" build_plain $name
        refuse "$name: says that it was built without TLS" \
            "^$name: .*built without TLS (NBD_MBEDTLS)\$" plain_tool $name "$uri_x509"
    done
    check 'no verification, if the URI says so' tool info \
        "nbds+unix:///disk?socket=$socket&tls-verify-peer=0&tls-certificates=$anonymous"
    places
    check 'tools, TCP: server starts' serve_tcp
    check 'copy: by the name of the host' tool copy "nbds://localhost:$port/?tls-certificates=$anonymous"
    check 'copy: which is the image' cmp "$image" "$target"
    check 'tools, keys: server starts' serve nbdkit any psk
    uri_psk=$(tls_uri psk)
    check 'dump: with keys' first_line_is_there "$uri_psk"
    with nbdinfo 'info: as nbdinfo says it, keys' same_as_nbdinfo "$uri_psk"
    with nbdcopy 'copy: as nbdcopy does, keys' same_as_nbdcopy "$uri_psk"
    check 'info: with keys, beside certificates' key_with_certificates "$uri_psk"
    check 'tools, two exports: server starts' serve nbd any client
    check 'info: a session of its own for each export' lists_both "$(tls_uri client)"
}

# with PROGRAM RULE COMMAND...: a check that needs the program.
with() {
    if has "$1"; then
        check "${@:2}"
    else
        skip "$2" "$1 is not installed"
    fi
}

# as_nobody COMMAND...: in a home of its own, as a user who is not root.
as_nobody() {
    if [ "$(id -u)" = 0 ]; then
        setpriv --reuid=65534 --regid=65534 --clear-groups env HOME="$tmp/home" "$@"
    else
        HOME=$tmp/home "$@"
    fi
}

looks_in() {
    run strace -f -qq -e trace=access,faccessat,faccessat2,open,openat -o "$tmp/sent" \
        "$tools/info" "nbds+unix:///disk?socket=$socket&tls-hostname=localhost"
    grep -q "\"$1" "$tmp/sent"
}

# Where certificates are looked for if the URI does not tell.
places() {
    local place bare="nbds+unix:///disk?socket=$socket&tls-hostname=localhost"
    mkdir "$tmp/home"
    chmod 755 "$tmp" "$tmp/home"
    chmod 777 "$socket"
    cp "$tools/info" "$tmp/info"
    for place in .pki/libnbd .config/pki/libnbd; do
        mkdir -p "$tmp/home/$place"
        cp "$pki/ca-cert.pem" "$tmp/home/$place"
        check "certificates are found in ~/$place" as_nobody timeout 60 "$tmp/info" --size "$bare"
        rm "$tmp/home/$place/ca-cert.pem"
    done
    refuse 'certificates: else those of the system count' 'not signed by a trusted\|cannot be read' \
        as_nobody timeout 60 "$tmp/info" --size "$bare"
    if [ "$(id -u)" = 0 ] && has strace; then
        check 'certificates: root looks in /etc/pki/libnbd' looks_in /etc/pki/libnbd/ca-cert.pem
    fi
}

# A key in the URI is what counts, whatever certificates there are.
key_with_certificates() {
    cp "$pki/ca-cert.pem" "$tmp/home/.pki/libnbd"
    chmod 777 "$socket"
    chmod -R a+rX "$psk"
    as_nobody timeout 60 "$tmp/info" --size "$1"
}

lists_both() {
    run "$tools/info" --list --content "$1" >"$tmp/out" &&
        [ "$(grep -c '^export=' "$tmp/out")" = 2 ]
}

sanitized() {
    # shellcheck disable=SC2046
    $CC -std=c99 -g -fsanitize=address,undefined -fno-sanitize-recover=all -pthread -I. \
        "examples/$1.c" $(mbedtls_flags) -o "$tmp/$1.asan"
}

# All that a session has is given back: one of several connections, one that fails.
sanitized_tools() {
    local name tools=$tmp kind=.asan
    check 'tools, ASan: server starts' serve nbdkit any x509
    for name in copy dump info; do
        check "$name, ASan: builds" sanitized $name
        check "$name, ASan: works" tool $name "$(tls_uri x509)"
        refuse "$name, ASan: a wrong authority" "^$name: .*not signed by a trusted authority\$" \
            tool $name "$(tls_uri x509 "$tmp/other")"
    done
    check 'copy, ASan: four connections in four threads' four_connections "$(tls_uri x509)"
    check 'tools, ASan: server with keys starts' serve nbdkit any psk
    check 'info, ASan: keys' tool info "$(tls_uri psk)"
}

# Each is short, builds with the command of its first comment, and has no fault of memory.
small_examples() {
    local name how
    for name in "$@"; do
        # shellcheck disable=SC2086
        check "$name: builds with its own command, without a warning" build "$name" $WARN
        check "$name: has less than 150 lines" [ "$(wc -l <"examples/$name.c")" -lt 150 ]
        check "$name: builds with ASan and UBSan" \
            build "$name" -g -fsanitize=address,undefined -fno-sanitize-recover=all
        for how in x509 client; do
            check "$name, ASan, $how: server starts" serve nbdkit any $how
            check "$name, ASan, $how: downloads" downloads "$tmp/$name" "$(tls_uri $how)"
            refuse "$name, ASan, $how: another name" 'name' run "$tmp/$name" \
                "$(tls_uri $how | sed s/localhost/elsewhere/)"
        done
        refuse "$name, ASan: no certificate" "^$name: " run "$tmp/$name" "$(tls_uri client "$anonymous")"
        check "$name, ASan: server without close_notify starts" serve qemu any x509
        check "$name, ASan: downloads from it" downloads "$tmp/$name" "$(tls_uri x509)"
    done
}

for program in certtool psktool nbdkit qemu-nbd nbd-server; do
    if ! has $program; then
        skip 'TLS' "$program is not installed"
        exit
    fi
done
check 'certificates are made' make_certificates
check 'keys are made' make_keys
make_versions
head -c 3000320 /dev/urandom >"$image"
head -c 3000320 /dev/urandom >"$image.2"

versions=
here=$(mbedtls_version)
if [ -n "$here" ]; then
    check "mbedTLS $here: programs are there" take_programs "$here"
    versions=$here
    tools=$tmp/$here
else
    skip 'TLS with mbedTLS' 'mbedTLS is not installed'
fi
mkdir "$tmp/include"
ln -s "$tree/usr/include/mbedtls" "$tree/usr/include/psa" "$tmp/include"
newer=$(mbedtls_version "$tmp/include")
if [ -r "$tree/usr/include/mbedtls/version.h" ]; then
    check "mbedTLS $newer: programs are built" build_newer "$newer"
    versions="$versions $newer"
else
    skip 'TLS with mbedTLS 3.6' "it is not in $tree: see tests/trixie.sh"
fi
examples=
[ -z "$here" ] || examples=tls
if echo '#include <openssl/ssl.h>' | $CC -E - >"$tmp/none" 2>&1; then
    examples="$examples tls_openssl"
    check 'tls_openssl: builds' build tls_openssl
else
    skip 'TLS with OpenSSL' 'OpenSSL is not installed'
fi
one_server nbdkit x509 client psk
one_server qemu x509 client psk
one_server nbd client
wrong_servers
wrong_clients
wrong_files
wrong_keys
if [ -n "$here" ]; then
    one_side_only
    tools
    sanitized_tools
fi
# shellcheck disable=SC2086
small_examples $examples
