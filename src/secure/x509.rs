//! What a certificate says, for people and for the check of SPIFFE ids.
//!
//! `webpki` parses certificates. It shows names of people and organisations as bytes alone: [`name`] reads these for logs, and nothing is
//! decided by them.

use std::fmt;
use std::iter;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, UNIX_EPOCH};

use tokio_rustls::rustls::crypto::WebPkiSupportedAlgorithms;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use webpki::{EndEntityCert, Error, ExtendedKeyUsageValidator, KeyPurposeIdIter, anchor_from_trusted_cert};

use crate::rendezvous::protocol::text::is_steering;

/// Most characters of a name that are shown.
const NAME_LIMIT: usize = 200;
/// Most alternative names that are shown.
const NAMES: usize = 16;

/// What a certificate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Whose it is, as `CN=a, O=b`.
    pub subject: String,
    /// Who has issued it.
    pub issuer: String,
    /// Seconds since 1970 from which on, and until which, it is valid.
    pub valid: (u64, u64),
    /// Its alternative names: of hosts, addresses, and URIs.
    pub names: Vec<String>,
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subject, issuer, valid, names } = self;
        let names = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        write!(f, "the certificate of {subject} for {names}, issued by {issuer}, valid until {}", date(valid.1))
    }
}

/// Why a chain of certificates cannot be used.
#[derive(Debug)]
pub(super) enum Fault {
    /// It cannot be parsed.
    NotX509(Error),
    /// This one of the chain is not valid now, but in this time.
    Time(String, (u64, u64)),
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
    /// The certificates that are needed: the first one, and those between it and the authority.
    pub path: Vec<CertificateDer<'static>>,
    /// The authority. Of several with the same name and key, the one that ends last.
    pub authority: Option<CertificateDer<'static>>,
}

/// Check a chain, whose first certificate is an end's own, as peers do: further ones that are of no use do not matter.
pub(super) fn examine(
    chain: &[CertificateDer<'static>],
    authorities: &[CertificateDer<'static>],
    algorithms: &WebPkiSupportedAlgorithms,
    now: UnixTime,
) -> Result<Examined, Fault> {
    let (first, rest) = chain.split_first().ok_or(Fault::NotX509(Error::BadDer))?;
    let certificate = EndEntityCert::try_from(first).map_err(Fault::NotX509)?;
    let anchors: Vec<_> = authorities.iter().filter_map(|one| anchor_from_trusted_cert(one).ok()).collect();
    let path =
        certificate.verify_for_usage(algorithms.all, &anchors, rest, now, AnyUse, None, None).map_err(|error| {
            let is_over = |(_, valid): &(String, (u64, u64))| !(valid.0..=valid.1).contains(&now.as_secs());
            match error {
                Error::UnknownIssuer | Error::InvalidSignatureForPublicKey => Fault::Issuer,
                Error::CertExpired { .. } | Error::CertNotValidYet { .. } => {
                    match chain.iter().filter_map(life).find(is_over) {
                        Some((subject, valid)) => Fault::Time(subject, valid),
                        None => Fault::Other(error),
                    }
                }
                error => Fault::Other(error),
            }
        })?;
    let (subject, issuer) = (name(certificate.subject()), name(certificate.issuer()));
    let shown = Shown { subject, issuer, valid: validity(&certificate), names: alternatives(&certificate) };
    let between = path.intermediate_certificates().map(|one| one.der().into_owned());
    let is_authority = |one: &&CertificateDer<'_>| anchor_from_trusted_cert(one).as_ref() == Ok(path.anchor());
    let end = |one: &&CertificateDer<'_>| life(one).map(|(_, (_, until))| until);
    let authority = authorities.iter().filter(is_authority).max_by_key(end).cloned();
    Ok(Examined { shown, path: iter::once(first.clone()).chain(between).collect(), authority })
}

/// Whose a certificate is, and from when until when it is valid, in seconds since 1970. `None`: it is older than X.509 version 3, or
/// cannot be parsed.
pub(super) fn life(certificate: &CertificateDer<'_>) -> Option<(String, (u64, u64))> {
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    Some((name(parsed.subject()), validity(&parsed)))
}

/// webpki names the limits of the time in errors alone. It looks at them before anything else.
fn validity(certificate: &EndEntityCert<'_>) -> (u64, u64) {
    let at = |seconds| {
        let time = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        certificate.verify_for_usage(&[], &[], &[], time, AnyUse, None, None).err()
    };
    let from = match at(0) {
        Some(Error::CertNotValidYet { not_before, .. }) => not_before.as_secs(),
        _ => 0,
    };
    let until = match at(u64::MAX) {
        Some(Error::CertExpired { not_after, .. }) => not_after.as_secs(),
        _ => u64::MAX,
    };
    (from, until)
}

/// The URIs that a certificate names.
///
/// # Errors
/// It cannot be parsed.
pub(super) fn uris(certificate: &CertificateDer<'_>) -> Result<Vec<String>, String> {
    let parsed = EndEntityCert::try_from(certificate).map_err(|error| error.to_string())?;
    Ok(parsed.valid_uri_names().map(str::to_owned).collect())
}

/// All alternative names, for people. webpki lists addresses in an error alone.
fn alternatives(certificate: &EndEntityCert<'_>) -> Vec<String> {
    let nobody = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
    let listed = match certificate.verify_is_valid_for_subject_name(&nobody) {
        Err(Error::CertNotValidForName(context)) => context.presented,
        _ => Vec::new(),
    };
    in_words(&listed)
}

/// Alternative names for people, as webpki lists them: `DnsName("a")`, `IpAddress(10.0.0.1)`, `UniformResourceIdentifier("spiffe://a")`.
pub(super) fn in_words(listed: &[String]) -> Vec<String> {
    let bare = |text: &String| {
        let inner = text.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or(text);
        // `0::1` is what it makes of ::1.
        match inner.parse::<IpAddr>() {
            Ok(address) => address.to_string(),
            Err(_) => visible(inner.trim_matches('"'), NAME_LIMIT),
        }
    };
    listed.iter().take(NAMES).map(bare).collect()
}

/// Takes certificates for whatever use. Those of nodes serve one end or both.
struct AnyUse;

impl ExtendedKeyUsageValidator for AnyUse {
    fn validate(&self, mut uses: KeyPurposeIdIter<'_, '_>) -> Result<(), Error> {
        // All have to be read.
        uses.try_for_each(|one| one.map(drop))
    }
}

/// A distinguished name (RFC 5280, 4.1.2.4), without its outer tag, as `CN=a, O=b`. What cannot be read is left out.
fn name(mut der: &[u8]) -> String {
    let mut parts = Vec::new();
    while let Some((SET, mut set, rest)) = element(der) {
        der = rest;
        while let Some((SEQUENCE, pair, rest)) = element(set) {
            set = rest;
            let Some((OBJECT, kind, value)) = element(pair) else { continue };
            let Some((_, value, _)) = element(value) else { continue };
            let kind = match kind {
                [0x55, 4, 3] => "CN",
                [0x55, 4, 6] => "C",
                [0x55, 4, 7] => "L",
                [0x55, 4, 8] => "ST",
                [0x55, 4, 10] => "O",
                [0x55, 4, 11] => "OU",
                _ => continue,
            };
            parts.push(format!("{kind}={}", String::from_utf8_lossy(value)));
        }
    }
    if parts.is_empty() { "nobody".to_owned() } else { visible(&parts.join(", "), NAME_LIMIT) }
}

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT: u8 = 0x06;

/// The first element of DER: its tag, its content, and what follows. Lengths of more than two bytes are in no name.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (length, rest) = match der {
        [_, short @ 0..=0x7f, rest @ ..] => (usize::from(*short), rest),
        [_, 0x81, length, rest @ ..] => (usize::from(*length), rest),
        [_, 0x82, high, low, rest @ ..] => (usize::from(u16::from_be_bytes([*high, *low])), rest),
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((der[0], content, rest))
}

/// A text of somebody else, without what steers a terminal, and not longer than this.
fn visible(text: &str, limit: usize) -> String {
    text.chars().map(|c| if is_steering(c) { ' ' } else { c }).take(limit).collect()
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
    fn names_are_read_as_far_as_they_can_be() {
        let pair = |kind: &[u8], value: &[u8]| {
            let value = [&[0x0c, value.len() as u8], value].concat();
            let kind = [&[OBJECT, kind.len() as u8], kind].concat();
            let pair = [&[SEQUENCE, (kind.len() + value.len()) as u8][..], &kind, &value].concat();
            [&[SET, pair.len() as u8][..], &pair].concat()
        };
        let whole =
            [pair(&[0x55, 4, 10], b"jobs"), pair(&[0x55, 4, 99], b"?"), pair(&[0x55, 4, 3], b"a\n\x1b")].concat();
        assert_eq!(name(&whole), "O=jobs, CN=a  ");
        for end in 0..whole.len() {
            assert!("O=jobs, CN=a  ".starts_with(&name(&whole[..end])) || name(&whole[..end]) == "nobody");
        }
        let long = pair(&[0x55, 4, 3], &[b'x'; 100]);
        assert_eq!(name(&long).len(), 103);
        assert_eq!(element(&[SET, 0x82, 0xff, 0xff, 0]), None);
        assert_eq!(element(&[SET, 0x84, 0, 0, 0, 1, 0]), None);
        assert_eq!(element(&[SET, 0x81, 1, 7, 8]), Some((SET, &[7][..], &[8][..])));
    }
}
