//! What went wrong in TLS, in words.

use std::io;

use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::{AlertDescription, CertificateError, Error, PeerIncompatible};

use super::x509::{NAMES, date};
use super::{TLS_CA, TLS_CERT};

/// A sentence about the peer, if this error is about the certificates of one of the two ends.
pub(super) fn to_text(error: &io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref::<Error>()? {
        Error::InvalidCertificate(what) => Some(of_peer(what)),
        Error::NoCertificatesPresented => Some(format!("it shows no certificate: {TLS_CERT} is set at one end only")),
        Error::AlertReceived(alert) => of_this_end(*alert),
        Error::PeerIncompatible(PeerIncompatible::IncorrectCertificateTypeExtension) => Some(at_one_end()),
        _ => None,
    }
}

/// Whether the peer's certificate is the reason. The peer gets an alert.
pub(super) fn is_of_certificate(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
    matches!(error, Some(Error::InvalidCertificate(_) | Error::NoCertificatesPresented))
}

fn at_one_end() -> String {
    format!("it refuses TLS as it was begun: {TLS_CERT} seems to be set at one of the two ends only")
}

/// What is wrong with the peer's certificate.
fn of_peer(error: &CertificateError) -> String {
    match error {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
            "its certificate does not chain to a CA of this end ({TLS_CA}): another CA has issued it, or its file lacks an intermediate \
             certificate"
        ),
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("its certificate was valid until {}: renew it, or check the clocks", at(*not_after))
        }
        CertificateError::NotValidYetContext { not_before, .. } => {
            format!("its certificate is valid from {} on: check the clocks", at(*not_before))
        }
        CertificateError::NotValidForNameContext { expected, presented } => {
            let names: Vec<_> = presented.iter().take(NAMES).map(|name| plain_name(name)).collect();
            let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
            format!(
                "its certificate is not for `{}`, which this end has connected to, but for {names}: add that as a subjectAltName",
                expected.to_str()
            )
        }
        CertificateError::InvalidPurposeContext { required, .. } => format!(
            "its certificate is not for {required}: its extendedKeyUsage has to name serverAuth and clientAuth, or to be left out"
        ),
        other => format!("its certificate cannot be used: {other}"),
    }
}

/// A name or an address of a certificate, which webpki writes as `DnsName("a")` or `IpAddress(10.0.0.1)`.
fn plain_name(written: &str) -> &str {
    let inner = written.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inner.map_or(written, |name| name.trim_matches('"'))
}

fn at(time: UnixTime) -> String {
    date(time.as_secs())
}

/// What the peer says about this end's certificate.
fn of_this_end(alert: AlertDescription) -> Option<String> {
    let why = match alert {
        AlertDescription::UnknownCA => format!("no CA of that end ({TLS_CA}) has issued it"),
        AlertDescription::CertificateExpired => "by that end's clock it is not valid now".to_owned(),
        AlertDescription::UnsupportedCertificate => {
            "its extendedKeyUsage has to name serverAuth and clientAuth, or to be left out".to_owned()
        }
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
            "that end's log says why".to_owned()
        }
        AlertDescription::CertificateRequired => {
            return Some(format!("it wants a certificate: set {TLS_CERT} here, too"));
        }
        AlertDescription::HandshakeFailure => return Some(at_one_end()),
        _ => return None,
    };
    Some(format!("it does not accept this end's certificate ({TLS_CERT}): {why}"))
}
