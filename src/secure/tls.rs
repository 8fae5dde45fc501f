//! TLS 1.3, and the settings of two ends that have no certificates. [`super::certificates`] has those of ends that have.
//!
//! The coordinator's key is a raw public key (RFC 7250), made when it starts. Nodes take any: who the coordinator is, it proves by the
//! token ([`super::proof`]). Sessions are not resumed, so that every connection has a secret of its own.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;

use ring::signature::Ed25519KeyPair;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::ring::{default_provider, sign::any_eddsa_type};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use tokio_rustls::rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use tokio_rustls::rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use tokio_rustls::rustls::sign::{CertifiedKey, SigningKey};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{DigitallySignedStruct, Error, SignatureScheme};
use tokio_rustls::{TlsAcceptor, TlsConnector};

pub use tokio_rustls::client::TlsStream as ClientStream;
pub use tokio_rustls::rustls::{ClientConfig, ServerConfig};
pub use tokio_rustls::server::TlsStream as ServerStream;

/// The first bytes of every TLS connection: a record of a handshake, of version 3.
pub const FIRST_BYTES: &[u8] = &[0x16, 0x03];
/// Bytes of a connection's secret.
pub const SECRET_BYTES: usize = 32;
/// What the secret is derived for, so that it serves for nothing else.
const LABEL: &[u8] = b"EXPORTER-elastic_rs-session-proof";

/// What both ends of one connection know and nobody else does.
pub type Secret = [u8; SECRET_BYTES];

/// A coordinator's end, with a new key.
pub fn server_config() -> Result<Arc<ServerConfig>, Error> {
    let no_key = |_| Error::General("no key could be made".to_owned());
    let document = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).map_err(no_key)?;
    let key: Arc<dyn SigningKey> = any_eddsa_type(&PrivatePkcs8KeyDer::from(document.as_ref().to_vec()))?;
    let public = key.public_key().ok_or_else(|| Error::General("the key has no public half".to_owned()))?;
    let certified = CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key);
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(certified))));
    never_resume(&mut config);
    Ok(Arc::new(config))
}

/// Sessions are not resumed.
pub fn never_resume(config: &mut ServerConfig) {
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
}

/// A node's end.
pub fn client_config() -> Result<Arc<ClientConfig>, Error> {
    client_config_by(default_provider())
}

/// A node's end, which offers what this provider has.
pub(super) fn client_config_by(provider: CryptoProvider) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(provider);
    let any_key = Arc::new(AnyKey(Arc::clone(&provider)));
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous() // no certificate says who the coordinator is: the token does
        .with_custom_certificate_verifier(any_key)
        .with_no_client_auth();
    never_resume_or_name(&mut config);
    Ok(Arc::new(config))
}

/// Sessions are not resumed, and the host's name is not sent in clear.
pub fn never_resume_or_name(config: &mut ClientConfig) {
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
}

/// Begin TLS. `name` is compared with what a certificate says, and not sent. Without certificates it is not compared either.
pub async fn connect(
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    stream: TcpStream,
) -> io::Result<ClientStream<TcpStream>> {
    TlsConnector::from(config).connect(name, stream).await
}

/// The name that is compared with nothing.
pub fn no_name() -> ServerName<'static> {
    ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into())
}

/// Begin TLS. If it fails, the peer has got an alert of TLS, and its connection comes back.
pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    config: Arc<ServerConfig>,
    stream: S,
) -> Result<ServerStream<S>, (io::Error, S)> {
    TlsAcceptor::from(config).accept(stream).into_fallible().await
}

pub fn secret_of_client<S>(stream: &ClientStream<S>) -> Result<Secret, String> {
    stream.get_ref().1.export_keying_material([0; SECRET_BYTES], LABEL, None).map_err(|error| error.to_string())
}

pub fn secret_of_server<S>(stream: &ServerStream<S>) -> Result<Secret, String> {
    stream.get_ref().1.export_keying_material([0; SECRET_BYTES], LABEL, None).map_err(|error| error.to_string())
}

/// Accepts any key of the other end.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
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
        let key = SubjectPublicKeyInfoDer::from(cert.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
