#!/usr/bin/env bash
# Makes the certificates of this folder, which tests of TLS use. They protect nothing: their keys are in the repository.
#   ca         the CA of everything here; its key is not kept
#   server     the members': loopback. etcd's JSON gateway shows it to etcd as a client, so it may be a client's too
#   trainer    a client's, whose name (CN) etcd takes for the user `trainer`
#   stranger   a client's, whose name is the user of no cluster
#   other-ca   a CA that has signed nothing here
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
days=36500

key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }

authority() { # NAME KEY
	key "$2"
	openssl req -x509 -new -key "$2" -subj "/CN=elastic_rs tests $1" -days "$days" -out "$1.pem" \
		-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
}

signed() { # NAME COMMON_NAME EXTENSIONS
	key "$1.key"
	openssl req -new -key "$1.key" -subj "$2" | openssl x509 -req -CA ca.pem -CAkey "$ca" -CAcreateserial -days "$days" \
		-extfile <(printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "$3") -out "$1.pem"
}

ca=$(mktemp) other=$(mktemp)
trap 'rm -f "$ca" "$other" ca.srl' EXIT
authority ca "$ca"
authority other-ca "$other"
# No CN: etcd would take it for a user when its own gateway asks.
signed server "/O=elastic_rs tests" $'extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1'
signed trainer "/CN=trainer" "extendedKeyUsage=clientAuth"
signed stranger "/CN=stranger" "extendedKeyUsage=clientAuth"
