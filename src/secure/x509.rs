//! Facts of a certificate, for people, and the check of an end's own chain.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, UNIX_EPOCH};

use tokio_rustls::rustls::crypto::WebPkiSupportedAlgorithms;
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, Error, ExtendedKeyUsageValidator, KeyPurposeIdIter, anchor_from_trusted_cert};
use x509_parser::parse_x509_certificate;
use x509_parser::prelude::GeneralName;

use crate::wire::text::is_steering;

/// Most characters of a name that are shown.
const NAME_LIMIT: usize = 200;
/// Most alternative names that are shown.
pub(super) const NAMES: usize = 16;

/// What a certificate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Its subject, as `CN=a, O=b`.
    pub subject: String,
    /// Who has issued it.
    pub issuer: String,
    /// Seconds since 1970 from which on, and until which, it is valid.
    pub valid: (u64, u64),
    /// Its alternative names: of hosts, addresses, and others with their kind.
    pub names: Vec<String>,
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subject, issuer, valid, names } = self;
        let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        write!(f, "the certificate of {subject} for {names}, issued by {issuer}, valid until {}", date(valid.1))
    }
}

impl Shown {
    /// Read a certificate.
    ///
    /// # Errors
    /// A sentence: it cannot be parsed.
    pub(super) fn of(certificate: &CertificateDer<'_>) -> Result<Self, String> {
        let (_, parsed) = parse_x509_certificate(certificate).map_err(|error| error.to_string())?;
        let alternatives = parsed.subject_alternative_name().map_err(|error| error.to_string())?;
        let names = alternatives.iter().flat_map(|them| &them.value.general_names).take(NAMES).map(alternative);
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        let valid = parsed.validity();
        Ok(Self {
            subject: visible(&parsed.subject().to_string()),
            issuer: visible(&parsed.issuer().to_string()),
            valid: (seconds(valid.not_before.timestamp()), seconds(valid.not_after.timestamp())),
            names: names.collect(),
        })
    }
}

/// Why a chain of certificates cannot be used.
#[derive(Debug)]
pub(super) enum Fault {
    /// It cannot be parsed.
    NotX509(String),
    /// This one of the chain is not valid now.
    Time(Shown),
    /// It does not lead to an authority.
    Issuer,
    /// Anything else.
    Other(Error),
}

/// A chain that leads to an authority.
#[derive(Debug)]
pub(super) struct Examined {
    /// What its first certificate says.
    pub shown: Shown,
    /// What those between it and the authority say.
    pub between: Vec<Shown>,
    /// What the authority says. Of several with the same name and key, the one that ends last.
    pub authority: Option<Shown>,
}

/// Check a chain, whose first certificate is an end's own, as peers do: further ones that are of no use do not matter.
pub(super) fn examine(
    chain: &[CertificateDer<'static>],
    authorities: &[CertificateDer<'static>],
    algorithms: &WebPkiSupportedAlgorithms,
    now: UnixTime,
) -> Result<Examined, Fault> {
    let (first, rest) = chain.split_first().ok_or(Fault::NotX509("there is none".to_owned()))?;
    let shown = Shown::of(first).map_err(Fault::NotX509)?;
    let certificate = EndEntityCert::try_from(first).map_err(|error| Fault::NotX509(error.to_string()))?;
    let anchors: Vec<_> = authorities.iter().filter_map(|one| anchor_from_trusted_cert(one).ok()).collect();
    let path =
        certificate.verify_for_usage(algorithms.all, &anchors, rest, now, AnyUse, None, None).map_err(|error| {
            let is_over = |one: &Shown| !(one.valid.0..=one.valid.1).contains(&now.as_secs());
            match error {
                Error::UnknownIssuer | Error::InvalidSignatureForPublicKey => Fault::Issuer,
                Error::CertExpired { .. } | Error::CertNotValidYet { .. } => {
                    let late = chain.iter().filter_map(|one| Shown::of(one).ok()).find(is_over);
                    late.map_or(Fault::Other(error), Fault::Time)
                }
                error => Fault::Other(error),
            }
        })?;
    let between = path.intermediate_certificates().filter_map(|one| Shown::of(&one.der()).ok()).collect();
    let is_authority = |one: &&CertificateDer<'_>| anchor_from_trusted_cert(one).as_ref() == Ok(path.anchor());
    let found = authorities.iter().filter(is_authority).filter_map(|one| Shown::of(one).ok());
    Ok(Examined { shown, between, authority: found.max_by_key(|one| one.valid.1) })
}

/// Takes certificates for whatever use. Those of nodes serve one end or both.
struct AnyUse;

impl ExtendedKeyUsageValidator for AnyUse {
    fn validate(&self, mut uses: KeyPurposeIdIter<'_, '_>) -> Result<(), Error> {
        // All have to be read.
        uses.try_for_each(|one| one.map(drop))
    }
}

/// An alternative name.
fn alternative(name: &GeneralName<'_>) -> String {
    let address = |bytes: &[u8]| {
        let (four, sixteen) = (<[u8; 4]>::try_from(bytes).ok(), <[u8; 16]>::try_from(bytes).ok());
        four.map(IpAddr::from).or(sixteen.map(IpAddr::from))
    };
    match name {
        GeneralName::DNSName(name) => visible(name),
        GeneralName::IPAddress(bytes) => address(bytes).map_or_else(|| name.to_string(), |found| found.to_string()),
        other => visible(&other.to_string()),
    }
}

/// A text of somebody else, without what steers a terminal, and not too long.
fn visible(text: &str) -> String {
    match text {
        "" => "nobody".to_owned(),
        text => text.chars().map(|c| if is_steering(c) { ' ' } else { c }).take(NAME_LIMIT).collect(),
    }
}

/// Seconds since 1970 as RFC 3339 has them: `2026-01-31T12:00:00Z`.
pub(super) fn date(seconds: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds.min(END_OF_TIME))).to_string()
}

/// The last second of the year 9999, which a certificate without an end names (RFC 5280, 4.1.2.5).
const END_OF_TIME: u64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_one_of_the_calendar_however_late() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (1_709_210_096, "2024-02-29T12:34:56Z"),
            (END_OF_TIME, "9999-12-31T23:59:59Z"),
            (u64::MAX, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }

    #[test]
    fn a_name_steers_no_terminal_and_is_bounded() {
        assert_eq!(visible("O=jobs, CN=a\n\x1b"), "O=jobs, CN=a  ");
        assert_eq!(visible(&"x".repeat(1000)).len(), NAME_LIMIT);
        assert_eq!(visible(""), "nobody");
    }

    #[test]
    fn alternative_names_are_those_of_hosts_addresses_and_others_with_their_kind() {
        for (name, expected) in [
            (GeneralName::DNSName("node\x1b0"), "node 0"),
            (GeneralName::IPAddress(&[10, 0, 0, 1]), "10.0.0.1"),
            (GeneralName::IPAddress(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]), "::1"),
            (GeneralName::IPAddress(&[1, 2]), "IPAddress(01:02)"),
            (GeneralName::URI("spiffe://a/b"), "URI(spiffe://a/b)"),
        ] {
            assert_eq!(alternative(&name), expected);
        }
    }

    #[test]
    fn what_is_no_certificate_is_an_error_at_every_length() {
        use tokio_rustls::rustls::pki_types::pem::PemObject;
        let whole = CertificateDer::from_pem_slice(crate::secure::fixtures::data("node.pem").as_bytes()).expect("one");
        assert!(Shown::of(&whole).is_ok());
        for end in 0..whole.len() {
            assert!(Shown::of(&CertificateDer::from(&whole[..end])).is_err());
        }
    }
}
