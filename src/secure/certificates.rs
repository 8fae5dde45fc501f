//! An end's certificate, its key and its authorities, from files that are read again when they have changed.
//!
//! Both ends of a connection show certificates that an authority of the other has issued. The end that has connected also checks that the
//! other's is for the host it has connected to.

use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ring::digest::{Context, SHA256};
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, Error, InconsistentKeys, RootCertStore, ServerConfig};

use super::ending::{self, Ending, Source, about};
use super::error::ProtectionError;
use super::tls;
use super::watched::{Content, Wanted, Watched};
use super::x509::{self, Examined, Fault, Shown, date};
use super::{TLS_CA, TLS_CERT, TLS_KEY};

/// No file is larger. A CA's may be a bundle.
const LIMIT_BYTES: u64 = 1 << 20;
/// No chain is longer: a peer that has not proven itself may send little.
const CHAIN_LIMIT_BYTES: usize = 12 * 1024;

/// Where an end's certificate is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate, then those that lead to an authority, in PEM.
    pub cert: PathBuf,
    /// Its key, in PEM.
    pub key: PathBuf,
    /// The authorities, in PEM: those of the peers and of the certificate itself.
    pub ca: PathBuf,
}

/// What an end uses for connections that begin now.
pub(super) struct Identity {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
    shown: Shown,
    /// The own certificate, and those that lead from it to its authority. Others of the files may end unnoticed: nothing depends on them.
    endings: Vec<Ending>,
    /// Of all files, to find out whether they have changed.
    digest: Vec<u8>,
}

/// An end's certificate.
#[derive(Debug)]
pub(super) struct Certificates(Watched<Identity>);

impl Certificates {
    /// Read the files. What they hold is good for a while, before they are looked at again.
    ///
    /// # Errors
    /// A file cannot be used, they do not fit together, or the certificate is not valid now.
    pub fn open(files: CertificateFiles, good_for: Duration) -> Result<Self, ProtectionError> {
        Watched::open(files, good_for).map(Self)
    }

    /// What to use for a new connection.
    pub async fn identity(&self) -> Arc<Identity> {
        self.0.current().await
    }

    /// What the certificate said at the last look.
    pub fn shown(&self) -> Shown {
        self.0.last().shown.clone()
    }

    /// What is to be said now of certificates that end soon, one sentence for each.
    pub fn warnings(&self) -> Vec<String> {
        let now = ending::now();
        self.0.last().endings.iter().filter_map(|ending| ending.text(now)).collect()
    }

    /// The name of the peer that is to be at `host`, as TLS wants it.
    ///
    /// # Errors
    /// It is neither a host's name nor an address.
    pub fn server_name(&self, host: &str) -> Result<ServerName<'static>, String> {
        // The zone of a link-local address means something to this machine alone.
        let bare = host.split('%').next().unwrap_or(host).to_owned();
        ServerName::try_from(bare).map_err(|_| {
            format!("`{host}` is a name that no certificate can have, must be a DNS name or an IP address")
        })
    }
}

impl Content for Identity {
    type Files = CertificateFiles;
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
        let authorities = certificates(ca, &texts[2])?;
        for authority in &authorities {
            roots
                .add(authority.clone())
                .map_err(|error| ca.unusable(format!("holds a certificate that cannot be used: {error}")))?;
        }
        let provider = Arc::new(default_provider());
        let certified = certify(&chain, cert, key, &texts[1], &provider)?;
        let algorithms = &provider.signature_verification_algorithms;
        let now = UnixTime::now();
        let Examined { shown, between, authority } = x509::examine(&chain, &authorities, algorithms, now)
            .map_err(|fault| cert.unusable(to_text(&fault, &files.ca, now.as_secs())))?;
        let ending = |source, path: &Path, one: &Shown| {
            let (path, subject) = (path.to_owned(), one.subject.clone());
            Ending { source, path, subject, valid: one.valid }
        };
        let needed = iter::once(&shown).chain(&between).map(|one| ending(Source::Cert, &files.cert, one));
        let endings = needed.chain(authority.iter().map(|one| ending(Source::Ca, &files.ca, one))).collect();
        let mut digest = Context::new(&SHA256);
        texts.iter().for_each(|text| digest.update(text.as_bytes()));
        let (client, server) =
            configs(certified, roots, provider).map_err(|error| ProtectionError::Tls(error.to_string()))?;
        let digest = digest.finish().as_ref().to_vec();
        Ok(Self { client: Arc::new(client), server: Arc::new(server), shown, endings, digest })
    }

    fn news(&self, before: &Self, files: &CertificateFiles) -> Option<String> {
        let path = files.cert.display();
        (self.digest != before.digest).then(|| {
            format!("the certificate `{path}`, its key or its CA has changed; new connections use: {}", self.shown)
        })
    }

    fn on_loaded(&self) {
        ending::warn(&self.endings, ending::now());
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
fn to_text(fault: &Fault, ca: &Path, now: u64) -> String {
    match fault {
        Fault::NotX509(error) => format!("begins with what is no certificate: {error}"),
        Fault::Time(Shown { subject, valid: (_, until), .. }) if now > *until => format!(
            "holds the certificate of {subject}, which ended {} ago, at {}: renew it, or check this machine's clock",
            about(now - until),
            date(*until)
        ),
        Fault::Time(Shown { subject, valid: (from, _), .. }) => format!(
            "holds the certificate of {subject}, which is not valid before {}: check this machine's clock",
            date(*from)
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
    tls::never_resume(&mut server);
    let of_hosts = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
        .build()
        .map_err(|error| general(&error))?;
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_webpki_verifier(of_hosts)
        .with_client_cert_resolver(own);
    tls::never_resume_or_name(&mut client);
    Ok((client, server))
}

#[cfg(test)]
mod tests;
