//! TLS and mutual TLS, from files.

use std::error::Error;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::error::EtcdError;
use super::options::TlsFiles;
use crate::at_once;

/// Where Linux distributions keep the authorities that the system trusts.
const SYSTEM_AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
];
/// No certificate or bundle is larger.
const FILE_LIMIT_BYTES: u64 = 4 << 20;

/// Read the files.
///
/// # Errors
/// [`EtcdError::Tls`], naming the file.
pub(super) fn read(files: &TlsFiles) -> Result<Arc<ClientConfig>, EtcdError> {
    let system = || SYSTEM_AUTHORITIES.iter().map(Path::new).find(|path| path.exists());
    let authorities = match (&files.ca, system()) {
        (Some(path), _) => certificates("cacert", path)?,
        (None, Some(path)) => certificates("system's authorities", path)?,
        (None, None) => {
            let text = "this machine has no list of trusted authorities: give etcd's as `cacert`";
            return Err(EtcdError::Tls(text.to_owned()));
        }
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities);
    let unusable = |error: &dyn Error| EtcdError::Tls(format!("`cert` and `key` cannot be used together: {error}"));
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(&error))?
        .with_root_certificates(roots);
    let mut config = match (&files.cert, &files.key) {
        (None, None) => builder.with_no_client_auth(),
        (Some(cert), Some(key)) => {
            let key = PrivateKeyDer::from_pem_slice(&bytes("key", key)?)
                .map_err(|error| wrong("key", key, format!("holds no private key in PEM: {error}")))?;
            builder.with_client_auth_cert(certificates("cert", cert)?, key).map_err(|error| unusable(&error))?
        }
        (Some(_), None) => return Err(EtcdError::Tls("`cert` is given without `key`: give both, or none".to_owned())),
        (None, Some(_)) => return Err(EtcdError::Tls("`key` is given without `cert`: give both, or none".to_owned())),
    };
    config.alpn_protocols.push(b"h2".to_vec());
    Ok(Arc::new(config))
}

/// Begin TLS with a member.
pub(super) async fn begin(
    config: Arc<ClientConfig>,
    host: &str,
    stream: TcpStream,
) -> Result<TlsStream<TcpStream>, Box<dyn Error + Send + Sync>> {
    let name = ServerName::try_from(host.to_owned())?;
    Ok(TlsConnector::from(config).connect(name, stream).await?)
}

/// What a member says against this client once TLS has begun. With TLS 1.3 it judges the client's certificate only then, and closes
/// the connection: a client that has sent something meanwhile may never read why.
pub(super) async fn objection(config: Arc<ClientConfig>, host: &str, stream: TcpStream) -> Option<String> {
    let mut stream = begin(config, host, stream).await.ok()?;
    stream.read_u8().await.err().filter(|error| error.get_ref().is_some()).map(|error| error.to_string())
}

/// The certificates in a file. Those that cannot be parsed are left out.
fn certificates(what: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, EtcdError> {
    let text = bytes(what, path)?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&text).filter_map(Result::ok).collect();
    match found.is_empty() {
        false => Ok(found),
        true => Err(wrong(what, path, "holds no certificate in PEM (`-----BEGIN CERTIFICATE-----`)".to_owned())),
    }
}

/// A file's bytes, of which there may not be too many.
fn bytes(what: &str, path: &Path) -> Result<Vec<u8>, EtcdError> {
    let mut bytes = Vec::new();
    let read = at_once::open_file(path).and_then(|file| file.take(FILE_LIMIT_BYTES + 1).read_to_end(&mut bytes));
    match read {
        Ok(count) if count as u64 > FILE_LIMIT_BYTES => {
            Err(wrong(what, path, format!("has more than {FILE_LIMIT_BYTES} bytes")))
        }
        Ok(_) => Ok(bytes),
        Err(error) => Err(wrong(what, path, format!("cannot be read: {error}"))),
    }
}

fn wrong(what: &str, path: &Path, why: String) -> EtcdError {
    EtcdError::Tls(format!("the {what} file `{}` {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        let file = |name: &str| Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/etcd").join(name));
        let error = |ca: Option<PathBuf>, cert: Option<PathBuf>, key: Option<PathBuf>| {
            read(&TlsFiles { ca, cert, key }).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(error(file("ca.pem"), None, None), "");
        assert_eq!(error(file("ca.pem"), file("trainer.pem"), file("trainer.key")), "");
        let text = error(file("trainer.key"), None, None);
        assert!(text.contains("cacert file") && text.contains("trainer.key` holds no certificate"), "{text}");
        let text = error(file("missing.pem"), None, None);
        assert!(text.contains("missing.pem` cannot be read: No such file"), "{text}");
        assert!(error(file("ca.pem"), file("trainer.pem"), None).contains("without `key`"));
        assert!(error(file("ca.pem"), None, file("trainer.key")).contains("without `cert`"));
        assert!(error(file("ca.pem"), file("trainer.pem"), file("ca.pem")).contains("holds no private key"));
        assert!(error(file("ca.pem"), file("trainer.pem"), file("stranger.key")).contains("cannot be used together"));
    }
}
