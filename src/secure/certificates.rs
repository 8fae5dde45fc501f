//! An end's certificate, its key and its authorities, from files that are read again when they have changed.
//!
//! Both ends of a connection show certificates that an authority of the other has issued. The end that has connected also checks that the
//! other's is for the host it has connected to. With a SPIFFE id both check that id, and no host.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ring::digest::{Context, SHA256};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{Resumption, WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    ClientConfig, DigitallySignedStruct, Error, InconsistentKeys, RootCertStore, ServerConfig, SignatureScheme,
};

use super::protection::ProtectionError;
use super::spiffe::SpiffeId;
use super::tls::no_name;
use super::watched::{Content, Wanted, Watched};
use super::x509::{self, Fault, Shown, date};
use super::{TLS_CA, TLS_CERT, TLS_KEY, TLS_SPIFFE_ID};

/// No file is larger. A CA's may be a bundle.
const LIMIT_BYTES: u64 = 1 << 20;
/// No chain is longer: a peer that has not proven itself may send little.
const CHAIN_LIMIT_BYTES: usize = 12 * 1024;

/// Where an end's certificate is, and whose the peers' have to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate, then those that lead to an authority, in PEM.
    pub cert: PathBuf,
    /// Its key, in PEM.
    pub key: PathBuf,
    /// The authorities, in PEM: those of the peers and of the certificate itself.
    pub ca: PathBuf,
    /// The id that peers have to have, instead of the name of their host.
    pub spiffe_id: Option<SpiffeId>,
}

/// What an end uses for connections that begin now.
pub(super) struct Identity {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
    shown: Shown,
    /// Of all files, to tell whether they hold something else.
    digest: Vec<u8>,
}

/// An end's certificate.
#[derive(Debug)]
pub(super) struct Certificates {
    files: CertificateFiles,
    watched: Watched<Identity>,
}

impl Certificates {
    /// Read the files. What they hold is good for a while, before they are looked at again.
    ///
    /// # Errors
    /// A file cannot be used, they do not fit together, or the certificate is not valid now.
    pub fn open(files: CertificateFiles, good_for: Duration) -> Result<Self, ProtectionError> {
        Ok(Self { watched: Watched::open(files.clone(), good_for)?, files })
    }

    /// What to use for a new connection.
    pub async fn identity(&self) -> Arc<Identity> {
        self.watched.current().await
    }

    /// What the certificate said at the last look.
    pub fn shown(&self) -> Shown {
        self.watched.last().shown.clone()
    }

    /// The id that peers have to have.
    pub fn spiffe_id(&self) -> Option<&SpiffeId> {
        self.files.spiffe_id.as_ref()
    }

    /// The name of the peer that is to be at `host`, as TLS wants it.
    ///
    /// # Errors
    /// It is neither a host's name nor an address.
    pub fn server_name(&self, host: &str) -> Result<ServerName<'static>, String> {
        // The zone of a link-local address means something to this machine alone.
        let bare = host.split('%').next().unwrap_or(host).to_owned();
        match (ServerName::try_from(bare), self.spiffe_id()) {
            (Ok(name), _) => Ok(name),
            (Err(_), Some(_)) => Ok(no_name()),
            (Err(_), None) => {
                Err(format!("`{host}` is a name that no certificate can have; {TLS_SPIFFE_ID} needs none"))
            }
        }
    }

    /// Check whose certificate the peer has shown, if that is not the host's.
    ///
    /// # Errors
    /// A sentence about the peer.
    pub fn check_peer(&self, chain: Option<&[CertificateDer<'_>]>) -> Result<(), String> {
        let Some(id) = self.spiffe_id() else { return Ok(()) };
        let first = chain.and_then(<[_]>::first).ok_or("it shows no certificate")?;
        let why = |why| format!("{why} ({TLS_SPIFFE_ID})");
        id.check(&x509::uris(first)?).map_err(why)
    }
}

impl Content for Identity {
    type Files = CertificateFiles;
    const THREAD: &'static str = "certificates";
    const KEPT: &'static str = "the certificate that was read before stays in use in this process";

    fn paths(files: &CertificateFiles) -> Vec<&Path> {
        vec![&files.cert, &files.key, &files.ca]
    }

    fn read(files: &CertificateFiles) -> Result<Self, ProtectionError> {
        let file = |what, path, is_secret| Wanted { what, path, limit_bytes: LIMIT_BYTES, is_secret };
        let cert = file("certificate", &files.cert, false);
        let key = file("key", &files.key, true);
        let ca = file("CA", &files.ca, false);
        let texts = [cert.text()?, key.text()?, ca.text()?];
        let chain = certificates(cert, &texts[0])?;
        let length: usize = chain.iter().map(|one| one.len()).sum();
        if length > CHAIN_LIMIT_BYTES {
            return Err(cert.unusable(format!(
                "holds certificates of {length} bytes, must have at most {CHAIN_LIMIT_BYTES}: leave out the authority's own"
            )));
        }
        let mut roots = RootCertStore::empty();
        for authority in certificates(ca, &texts[2])? {
            roots
                .add(authority)
                .map_err(|error| ca.unusable(format!("holds a certificate that cannot be used: {error}")))?;
        }
        let provider = Arc::new(default_provider());
        let certified = certify(&chain, cert, key, &texts[1], &provider)?;
        let algorithms = &provider.signature_verification_algorithms;
        let shown = x509::examine(&chain, &roots.roots, algorithms, UnixTime::now())
            .map_err(|fault| cert.unusable(in_words(&fault, &files.ca)))?;
        let mut digest = Context::new(&SHA256);
        texts.iter().for_each(|text| digest.update(text.as_bytes()));
        let (client, server) = configs(certified, roots, provider, files.spiffe_id.is_some())
            .map_err(|error| ProtectionError::Tls(error.to_string()))?;
        let digest = digest.finish().as_ref().to_vec();
        Ok(Self { client: Arc::new(client), server: Arc::new(server), shown, digest })
    }

    fn news(&self, before: &Self, files: &CertificateFiles) -> Option<String> {
        let path = files.cert.display();
        (self.digest != before.digest).then(|| {
            format!("the certificate `{path}`, its key or its CA has changed; new connections use: {}", self.shown)
        })
    }
}

/// The certificates in a file: at least one.
fn certificates(file: Wanted<'_>, text: &str) -> Result<Vec<CertificateDer<'static>>, ProtectionError> {
    let found = CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| file.unusable(format!("is no PEM: {error}")))?;
    match found.is_empty() {
        false => Ok(found),
        true => Err(file.unusable("holds no certificate in PEM (`-----BEGIN CERTIFICATE-----`)".to_owned())),
    }
}

/// The certificate with its key.
fn certify(
    chain: &[CertificateDer<'static>],
    cert: Wanted<'_>,
    key: Wanted<'_>,
    text: &str,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, ProtectionError> {
    let parsed = PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(|_| {
        key.unusable(match text.contains("-----BEGIN ENCRYPTED PRIVATE KEY-----") {
            true => "holds a key with a passphrase, which nobody can give here; `openssl pkey -in KEY -out NEW` removes it",
            false => "holds no private key in PEM (`-----BEGIN PRIVATE KEY-----`)",
        }
        .to_owned())
    })?;
    CertifiedKey::from_der(chain.to_vec(), parsed, provider).map_err(|error| match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => key.unusable(format!(
            "does not belong to the first certificate in `{}`: {TLS_KEY} and {TLS_CERT} must be made together",
            cert.path.display()
        )),
        Error::InvalidCertificate(error) => cert.unusable(format!("begins with what is no certificate: {error}")),
        error => key.unusable(format!("holds a key that cannot be used: {error}")),
    })
}

/// What is wrong with an end's own certificate.
fn in_words(fault: &Fault, ca: &Path) -> String {
    match fault {
        Fault::NotX509(error) => format!("begins with what is no certificate: {error}"),
        Fault::Time(from, until) => format!(
            "holds a certificate that is not valid now, but from {} until {}: renew it, or check this machine's clock",
            date(*from),
            date(*until)
        ),
        Fault::Issuer => format!(
            "holds a certificate that no authority in `{}` ({TLS_CA}) has issued: name its CA there, and write intermediate \
             certificates below the certificate",
            ca.display()
        ),
        Fault::Other(error) => format!("holds a certificate that cannot be used: {error}"),
    }
}

/// Both ends' settings of TLS.
fn configs(
    certified: CertifiedKey,
    roots: RootCertStore,
    provider: Arc<CryptoProvider>,
    by_id: bool,
) -> Result<(ClientConfig, ServerConfig), Error> {
    let (roots, own) = (Arc::new(roots), Arc::new(SingleCertAndKey::from(certified)));
    let general = |error: &dyn std::fmt::Display| Error::General(error.to_string());
    let of_nodes = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        .clear_root_hint_subjects()
        .build()
        .map_err(|error| general(&error))?;
    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(of_nodes)
        .with_cert_resolver(own.clone());
    server.send_tls13_tickets = 0;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(&[&TLS13])?;
    let builder = if by_id {
        // The id is checked once the handshake is over: `Certificates::check_peer`.
        builder.dangerous().with_custom_certificate_verifier(Arc::new(OfAnyHost { roots, provider }))
    } else {
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider).build();
        builder.with_webpki_verifier(verifier.map_err(|error| general(&error))?)
    };
    let mut client = builder.with_client_cert_resolver(own);
    client.enable_sni = false;
    client.resumption = Resumption::disabled();
    Ok((client, server))
}

/// Takes the certificates of any host that an authority has issued.
#[derive(Debug)]
struct OfAnyHost {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for OfAnyHost {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    use bytes::BytesMut;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::secure::door::Door;
    use crate::secure::fixtures::{Folder, data};
    use crate::secure::objection::in_words as in_words_of;
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
            ("expired", "ca", "not valid now, but from 2020-01-01T00:00:00Z until 2020-02-01T00:00:00Z: renew it"),
            ("early", "ca", "not valid now, but from 2100-01-01T00:00:00Z until 2120-01-01T00:00:00Z"),
            ("node", "other-ca", "no authority in `"),
            ("stranger", "ca", "no authority in `"),
        ] {
            let folder = Folder::new(name, &[authority]);
            let error = open(&folder).unwrap_err().to_string();
            assert!(error.contains("cert.pem` holds a certificate that ") && error.contains(why), "{error}");
        }
        let folder = Folder::new("node", &["ca"]);
        set_permissions(folder.path("key.pem"), Permissions::from_mode(0o644)).unwrap();
        assert!(open(&folder).unwrap_err().to_string().contains("has the mode 0644: others may read"));
        std::fs::remove_file(folder.path("key.pem")).unwrap();
        assert!(open(&folder).unwrap_err().to_string().contains("key.pem` cannot be read: No such file"));
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
        let id = Folder::new("member", &["ca"]);
        assert_eq!(open(&id).unwrap().shown().names, ["spiffe://tests.elastic-rs/jobs/train"]);
    }

    #[test]
    fn the_host_that_was_connected_to_is_what_a_certificate_has_to_be_for() {
        let folder = Folder::new("node", &["ca"]);
        let mut files = folder.files();
        let own = Certificates::open(files.clone(), Duration::ZERO).unwrap();
        for (host, name) in [("node0", "node0"), ("10.0.0.1", "10.0.0.1"), ("::1", "::1"), ("fe80::1%eth0", "fe80::1")]
        {
            assert_eq!(own.server_name(host).unwrap().to_str(), name);
        }
        let error = own.server_name("no host").unwrap_err();
        assert!(error.contains("`no host` is a name that no certificate can have"), "{error}");
        files.spiffe_id = Some("spiffe://a".parse().unwrap());
        assert!(Certificates::open(files, Duration::ZERO).unwrap().server_name("no host").is_ok());
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (one, other) =
            tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async { listener.accept().await });
        (one.unwrap(), other.unwrap().0)
    }

    fn door(folder: &Folder) -> Door {
        let options = ProtectionOptions { certificates: Some(folder.files()), ..ProtectionOptions::default() };
        Door::new(Arc::new(Protection::new(options).unwrap())).unwrap()
    }

    /// Settings of a stranger that does not look at its own certificate.
    fn stranger(name: Option<&str>) -> Arc<ClientConfig> {
        let provider = Arc::new(default_provider());
        let roots = CertificateDer::pem_slice_iter(data("ca.pem").as_bytes()).map(Result::unwrap).collect::<Vec<_>>();
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(roots);
        let Some(name) = name else {
            let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).unwrap();
            return Arc::new(builder.with_root_certificates(store).with_no_client_auth());
        };
        let chain =
            CertificateDer::pem_slice_iter(data(&format!("{name}.pem")).as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_slice(data(&format!("{name}.key")).as_bytes()).unwrap();
        let certified = CertifiedKey::from_der(chain, key, &provider).unwrap();
        Arc::new(configs(certified, store, provider, false).unwrap().0)
    }

    /// The coordinator judges a node's certificate once the node takes TLS as begun: the node learns it with the first answer.
    #[tokio::test]
    async fn a_node_whose_certificate_is_not_accepted_is_told_why() {
        let folder = Folder::new("node", &["ca"]);
        for (name, refused, told) in [
            (None, "it shows no certificate", "it wants a certificate: set ELASTIC_RS_TLS_CERT here, too"),
            (
                Some("stranger"),
                "does not chain to a CA of this end",
                "no CA of that end (ELASTIC_RS_TLS_CA) has issued it",
            ),
            (Some("expired"), "was valid until 2020-02-01T00:00:00Z", "by that end's clock it is not valid now"),
            (Some("early"), "is valid from 2100-01-01T00:00:00Z on", "by that end's clock it is not valid now"),
        ] {
            let door = door(&folder);
            let (node, coordinator) = pair().await;
            let speaking = async {
                let host = ServerName::try_from("localhost").unwrap();
                let mut stream = tls::connect(stranger(name), host, node).await.unwrap();
                let secret = tls::secret_of_client(&stream).unwrap();
                proof::prove(&mut stream, None, "job", &secret).await.unwrap_err()
            };
            let (admitted, error) = tokio::join!(door.admit(coordinator, BytesMut::new()), speaking);
            let refusal = admitted.unwrap_err();
            assert!(refusal.kind == Kind::Certificate && refusal.why.contains(refused), "{refusal:?}");
            assert!(error.contains(told), "{error}");
        }
    }

    #[tokio::test]
    async fn an_end_without_certificates_and_one_with_them_tell_each_other() {
        let folder = Folder::new("node", &["ca"]);
        let at_one_end = "ELASTIC_RS_TLS_CERT seems to be set at one of the two ends only";
        let (node, coordinator) = pair().await;
        let door = door(&folder);
        let speaking = async { tls::connect(tls::client_config().unwrap(), no_name(), node).await.err().unwrap() };
        let (admitted, error) = tokio::join!(door.admit(coordinator, BytesMut::new()), speaking);
        let refusal = admitted.unwrap_err();
        assert!(refusal.kind == Kind::NoTls && refusal.why.contains(at_one_end), "{refusal:?}: {error:?}");
        assert!(in_words_of(&error).is_some_and(|words| words.contains(at_one_end)), "{error:?}");
    }
}
