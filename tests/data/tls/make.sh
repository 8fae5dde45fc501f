#!/usr/bin/env bash
# Makes the certificates of this folder, which tests of protected sessions use. They protect nothing: their keys are in the repository.
#   ca         the CA of everything here but `stranger`; its key is not kept
#   node       a node's: loopback
#   renewed    the same with another key
#   chained    the same, issued by an intermediate CA, whose certificate is below it
#   elsewhere  for another host
#   client     for connecting, and not for being connected to
#   expired    its time is over; and `early`, whose time has not begun
#   stranger   a node's, issued by other-ca
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
forever=(-startdate 20200101000000Z -enddate 21200101000000Z)
hosts="subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1,IP:127.0.0.2,IP:127.0.0.3,IP:127.0.0.4"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1" && chmod 600 "$1"; }

authority() { # NAME
	key "$work/$1.key"
	openssl req -x509 -new -key "$work/$1.key" -subj "/CN=elastic_rs tests $1" -days 36500 -out "$1.pem" \
		-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
}

# `openssl ca`, since `openssl x509` cannot be told when the time of a certificate begins before version 3.4.
sign() { # CA REQUEST OUT EXTENSIONS TIME...
	local ca=$1 request=$2 out=$3 extensions=$4
	shift 4
	: >"$work/index.txt"
	printf '%s\n' "[ca]" "default_ca=it" "[it]" "database=$work/index.txt" "new_certs_dir=$work" "default_md=sha256" \
		"policy=any" "unique_subject=no" "rand_serial=yes" "[any]" "commonName=supplied" "organizationName=optional" >"$work/ca.cnf"
	openssl ca -batch -notext -config "$work/ca.cnf" -cert "$ca.pem" -keyfile "$work/$(basename "$ca").key" -in "$request" \
		-out "$out" -extfile <(printf '%s\n' "$extensions") "$@" 2>"$work/log" || { cat "$work/log" >&2 && return 1; }
}

signed() { # CA NAME EXTENSION TIME...
	local ca=$1 name=$2 extensions
	extensions=$(printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "$3")
	shift 3
	key "$name.key"
	openssl req -new -key "$name.key" -subj "/O=elastic_rs tests/CN=$name" -out "$work/request"
	sign "$ca" "$work/request" "$name.pem" "$extensions" "$@"
}

authority ca
authority other-ca
signed ca node "$hosts" "${forever[@]}"
signed ca renewed "$hosts" "${forever[@]}"
signed ca elsewhere "subjectAltName=DNS:elsewhere.example,IP:192.0.2.1" "${forever[@]}"
signed ca client "$hosts"$'\nextendedKeyUsage=clientAuth' "${forever[@]}"
signed ca expired "$hosts" -startdate 20200101000000Z -enddate 20200201000000Z
signed ca early "$hosts" -startdate 21000101000000Z -enddate 21200101000000Z
signed other-ca stranger "$hosts" "${forever[@]}"

key "$work/middle.key"
openssl req -new -key "$work/middle.key" -subj "/CN=elastic_rs tests middle" -out "$work/middle.request"
sign ca "$work/middle.request" "$work/middle.pem" $'basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign' "${forever[@]}"
signed "$work/middle" chained "$hosts" "${forever[@]}"
cat "$work/middle.pem" >>chained.pem
