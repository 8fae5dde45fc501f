use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;

use bytes::BytesMut;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::secure::acceptor::Acceptor;
use crate::secure::fixtures::{Folder, data};
use crate::secure::objection::to_text as to_text_of;
use crate::secure::refusals::Kind;
use crate::secure::{Protection, ProtectionOptions, proof, tls};

fn open(folder: &Folder) -> Result<Certificates, ProtectionError> {
    Certificates::open(folder.files(), Duration::ZERO)
}

#[test]
fn files_that_cannot_be_used_are_named_with_the_reason() {
    let long = data("node.pem").repeat(40);
    let locked = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    for (file, text, what, why) in [
        ("cert.pem", &data("node.key")[..], "certificate", "holds no certificate in PEM"),
        ("cert.pem", "", "certificate", "holds no certificate in PEM"),
        (
            "cert.pem",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "certificate",
            "what is no certificate",
        ),
        ("cert.pem", &long, "certificate", "must have at most 12288: leave out the authority's own"),
        ("key.pem", &data("node.pem"), "key", "holds no private key in PEM"),
        ("key.pem", locked, "key", "holds a key with a passphrase"),
        ("key.pem", &data("renewed.key"), "key", "does not belong to the first certificate in `"),
        ("ca.pem", &data("node.key"), "CA", "holds no certificate in PEM"),
        ("ca.pem", &"#".repeat(1 << 21), "CA", "has more than 1048576 bytes"),
    ] {
        let folder = Folder::new("node", &["ca"]);
        folder.put(file, text);
        let error = open(&folder).unwrap_err().to_string();
        let begin = format!("the {what} file `{}` ", folder.path(file).display());
        assert!(error.starts_with(&begin) && error.contains(why), "{error}");
    }
    for (name, authority, why) in [
        ("expired", "ca", "ended "),
        ("expired", "ca", " days ago, at 2020-02-01T00:00:00Z: renew it"),
        ("early", "ca", "is not valid before 2100-01-01T00:00:00Z: check this machine's clock"),
        ("node", "other-ca", "no authority in `"),
        ("stranger", "ca", "no authority in `"),
    ] {
        let folder = Folder::new(name, &[authority]);
        let error = open(&folder).unwrap_err().to_string();
        assert!(error.contains("cert.pem` holds ") && error.contains(why), "{error}");
    }
    let folder = Folder::new("node", &["ca"]);
    set_permissions(folder.path("key.pem"), Permissions::from_mode(0o644)).unwrap();
    assert!(open(&folder).unwrap_err().to_string().contains("has the mode 0644: others may read"));
    std::fs::remove_file(folder.path("key.pem")).unwrap();
    assert!(open(&folder).unwrap_err().to_string().contains("key.pem` cannot be read: No such file"));
}

/// Peers find a way to an authority without it, and so does this end.
#[test]
fn a_certificate_that_is_not_needed_may_be_out_of_its_time() {
    for (file, text) in [
        ("cert.pem", data("chained.pem") + &data("expired.pem")),
        ("cert.pem", data("chained.pem") + &data("early.pem")),
        ("ca.pem", data("expired.pem") + &data("ca.pem")),
    ] {
        let folder = Folder::new("chained", &["ca"]);
        folder.put(file, &text);
        assert_eq!(open(&folder).unwrap().warnings(), [""; 0]);
    }
}

#[test]
fn an_authority_is_warned_of_unless_one_with_its_key_replaces_it() {
    let parsed = |name| CertificateDer::pem_slice_iter(data(name).as_bytes()).map(Result::unwrap).collect::<Vec<_>>();
    let (chain, renewed) = (parsed("chained.pem"), parsed("ca.pem").remove(0));
    let shown = |one| Shown::of(one).unwrap();
    // The signature of an authority is not looked at.
    let mut bytes = renewed.to_vec();
    let century = bytes.windows(3).position(|at| at == [0x18, 15, b'2']).unwrap() + 2;
    bytes[century..century + 4].copy_from_slice(b"2050");
    let old = CertificateDer::from(bytes);
    let other = parsed("other-ca.pem").remove(0);
    for (authorities, expected) in [
        (vec![other.clone(), old.clone()], &old),
        (vec![old.clone(), renewed.clone()], &renewed),
        (vec![renewed.clone(), old.clone(), other], &renewed),
    ] {
        let algorithms = default_provider().signature_verification_algorithms;
        let examined = x509::examine(&chain, &authorities, &algorithms, UnixTime::now()).unwrap();
        assert_eq!(examined.authority, Some(shown(expected)));
        assert_eq!((examined.shown, examined.between), (shown(&chain[0]), vec![shown(&chain[1])]));
    }
    assert_ne!(shown(&old), shown(&renewed));
}

#[tokio::test]
async fn a_certificate_is_shown_and_a_changed_one_used_and_a_broken_one_is_not() {
    let folder = Folder::new("chained", &["other-ca", "ca"]);
    let own = open(&folder).unwrap();
    let names = "localhost, 127.0.0.1, ::1, 127.0.0.2, 127.0.0.3, 127.0.0.4";
    let shown = |name: &str, issuer: &str| {
        format!(
            "the certificate of CN={name}, O=elastic_rs tests for {names}, issued by CN=elastic_rs tests {issuer}, valid until \
             2120-01-01T00:00:00Z"
        )
    };
    assert_eq!(own.shown().to_string(), shown("chained", "middle"));
    let first = own.identity().await;
    // Files are replaced one after the other. Between, they do not fit together.
    folder.put("cert.pem", &data("renewed.pem"));
    assert!(Arc::ptr_eq(&own.identity().await, &first));
    folder.put("key.pem", &data("renewed.key"));
    assert!(!Arc::ptr_eq(&own.identity().await, &first));
    assert_eq!(own.shown().to_string(), shown("renewed", "ca"));
    folder.put("ca.pem", &data("other-ca.pem"));
    own.identity().await;
    assert_eq!(own.shown().to_string(), shown("renewed", "ca"));
}

#[test]
fn the_host_that_was_connected_to_is_what_a_certificate_has_to_be_for() {
    let folder = Folder::new("node", &["ca"]);
    let own = open(&folder).unwrap();
    for (host, name) in [("node0", "node0"), ("10.0.0.1", "10.0.0.1"), ("::1", "::1"), ("fe80::1%eth0", "fe80::1")] {
        assert_eq!(own.server_name(host).unwrap().to_str(), name);
    }
    let error = own.server_name("no host").unwrap_err();
    assert!(error.contains("`no host` is a name that no certificate can have"), "{error}");
}

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (one, other) =
        tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async { listener.accept().await });
    (one.unwrap(), other.unwrap().0)
}

fn acceptor(folder: &Folder) -> Acceptor {
    let options = ProtectionOptions { certificates: Some(folder.files()), ..ProtectionOptions::default() };
    Acceptor::new(Arc::new(Protection::new(options).unwrap())).unwrap()
}

/// Settings of an unauthenticated peer that does not look at its own certificate.
fn foreign_client(name: Option<&str>) -> Arc<ClientConfig> {
    let provider = Arc::new(default_provider());
    let roots = CertificateDer::pem_slice_iter(data("ca.pem").as_bytes()).map(Result::unwrap).collect::<Vec<_>>();
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots);
    let Some(name) = name else {
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).unwrap();
        return Arc::new(builder.with_root_certificates(store).with_no_client_auth());
    };
    let chain = CertificateDer::pem_slice_iter(data(&format!("{name}.pem")).as_bytes()).map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_slice(data(&format!("{name}.key")).as_bytes()).unwrap();
    let certified = CertifiedKey::from_der(chain, key, &provider).unwrap();
    Arc::new(configs(certified, store, provider).unwrap().0)
}

/// The coordinator judges a node's certificate once the node takes TLS as begun: the node learns it with the first answer.
#[tokio::test]
async fn a_node_whose_certificate_is_not_accepted_gets_the_reason() {
    let folder = Folder::new("node", &["ca"]);
    for (name, refused, expected) in [
        (None, "it shows no certificate", "it wants a certificate: set ELASTIC_RS_TLS_CERT here, too"),
        (Some("stranger"), "does not chain to a CA of this end", "no CA of that end (ELASTIC_RS_TLS_CA) has issued it"),
        (Some("expired"), "was valid until 2020-02-01T00:00:00Z", "by that end's clock it is not valid now"),
        (Some("early"), "is valid from 2100-01-01T00:00:00Z on", "by that end's clock it is not valid now"),
    ] {
        let acceptor = acceptor(&folder);
        let (node, coordinator) = pair().await;
        let speaking = async {
            let host = ServerName::try_from("localhost").unwrap();
            let mut stream = tls::connect(foreign_client(name), host, node).await.unwrap();
            let secret = tls::secret_of_client(&stream).unwrap();
            proof::prove(&mut stream, None, "job", &secret).await.unwrap_err()
        };
        let (admitted, error) = tokio::join!(acceptor.admit(coordinator, BytesMut::new()), speaking);
        let refusal = admitted.unwrap_err();
        assert!(refusal.kind == Kind::Certificate && refusal.why.contains(refused), "{refusal:?}");
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn an_end_without_certificates_and_one_with_them_report_it() {
    let folder = Folder::new("node", &["ca"]);
    let at_one_end = "ELASTIC_RS_TLS_CERT seems to be set at one of the two ends only";
    let (node, coordinator) = pair().await;
    let acceptor = acceptor(&folder);
    let speaking = async { tls::connect(tls::client_config().unwrap(), tls::no_name(), node).await.err().unwrap() };
    let (admitted, error) = tokio::join!(acceptor.admit(coordinator, BytesMut::new()), speaking);
    let refusal = admitted.unwrap_err();
    assert!(refusal.kind == Kind::NoTls && refusal.why.contains(at_one_end), "{refusal:?}: {error:?}");
    assert!(to_text_of(&error).is_some_and(|text| text.contains(at_one_end)), "{error:?}");
}
