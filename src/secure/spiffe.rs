//! SPIFFE ids: by which ends know each other whose certificates name no host.
//!
//! The form is that of the SPIFFE standard (`SPIFFE-ID.md`, 2.1 to 2.3; `X509-SVID.md`, 2 for the rule that a certificate has one URI).

use std::fmt;
use std::str::FromStr;

const SCHEME: &str = "spiffe://";
/// Longest id, in bytes.
const LIMIT_BYTES: usize = 2048;
/// Longest trust domain, in bytes.
const DOMAIN_LIMIT_BYTES: usize = 255;

/// Whose certificate a peer has to show: `spiffe://domain/path`, or `spiffe://domain` for any id of that trust domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpiffeId {
    domain: String,
    /// With its leading slash. Empty: any.
    path: String,
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}{}", self.domain, self.path)
    }
}

impl FromStr for SpiffeId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            let shown: String = text.chars().take(100).collect();
            format!(
                "`{}` {why}; `spiffe://trust.domain/path` is one id, `spiffe://trust.domain` is any of it",
                shown.escape_default()
            )
        };
        if text.len() > LIMIT_BYTES {
            return Err(wrong(&format!("has more than {LIMIT_BYTES} bytes")));
        }
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| wrong("does not begin with `spiffe://`"))?;
        let (domain, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let of_domain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
        if domain.is_empty() || domain.len() > DOMAIN_LIMIT_BYTES || !domain.chars().all(of_domain) {
            return Err(wrong("has no trust domain of 1 to 255 small letters, digits, `.`, `_` and `-`"));
        }
        let of_segment = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let segment = |text: &str| !matches!(text, "" | "." | "..") && text.chars().all(of_segment);
        if !path.is_empty() && !path[1..].split('/').all(segment) {
            return Err(wrong("has a path that is not of letters, digits, `.`, `_` and `-` between single slashes"));
        }
        Ok(Self { domain: domain.to_owned(), path: path.to_owned() })
    }
}

impl SpiffeId {
    /// Whether a certificate with these URIs is one that is asked for.
    ///
    /// # Errors
    /// Why not: a certificate that names one SPIFFE id names no other URI.
    pub fn check(&self, uris: &[String]) -> Result<(), String> {
        let [uri] = uris else {
            return Err(format!("its certificate names {} URIs, must name one, and that is to be {self}", uris.len()));
        };
        match uri.parse::<Self>() {
            Ok(id) if id.path.is_empty() => {
                Err(format!("its certificate is for {id}, which has no path: no workload's"))
            }
            Ok(id) if id.domain == self.domain && (self.path.is_empty() || id.path == self.path) => Ok(()),
            Ok(id) => Err(format!("its certificate is for {id}, must be for {self}")),
            Err(error) => Err(format!("its certificate is for a URI that is no SPIFFE id: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_id_is_told() {
        for (text, why) in [
            ("", "does not begin"),
            ("https://a/b", "does not begin"),
            ("spiffe://", "no trust domain"),
            ("spiffe:///b", "no trust domain"),
            ("spiffe://A/b", "no trust domain"),
            ("spiffe://a:1/b", "no trust domain"),
            ("spiffe://me@a/b", "no trust domain"),
            ("spiffe://a/", "a path"),
            ("spiffe://a/b/", "a path"),
            ("spiffe://a//b", "a path"),
            ("spiffe://a/../b", "a path"),
            ("spiffe://a/b?c", "a path"),
            ("spiffe://a/ü", "a path"),
            (&format!("spiffe://a/{}", "b".repeat(2048)), "more than 2048"),
            (&format!("spiffe://{}", "a".repeat(256)), "no trust domain"),
        ] {
            let error = text.parse::<SpiffeId>().unwrap_err();
            assert!(error.contains(why) && error.len() < 400, "{error}");
        }
        for text in
            ["spiffe://a", "spiffe://prod.example.org/ns/jobs/sa/train", "spiffe://a_b-1/...", "spiffe://a/B-c_d.e"]
        {
            assert_eq!(text.parse::<SpiffeId>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_certificate_names_the_id_or_one_of_the_trust_domain_and_nothing_else() {
        let check = |wanted: &str, uris: &[&str]| {
            let uris: Vec<_> = uris.iter().map(|uri| (*uri).to_owned()).collect();
            wanted.parse::<SpiffeId>().unwrap().check(&uris)
        };
        assert_eq!(check("spiffe://a/b", &["spiffe://a/b"]), Ok(()));
        assert_eq!(check("spiffe://a", &["spiffe://a/b/c"]), Ok(()));
        for (wanted, uris, why) in [
            ("spiffe://a/b", &["spiffe://a/b/c"][..], "is for spiffe://a/b/c, must be for spiffe://a/b"),
            ("spiffe://a/b", &["spiffe://other/b"], "is for spiffe://other/b"),
            ("spiffe://a", &["spiffe://aa/b"], "is for spiffe://aa/b"),
            ("spiffe://a", &["spiffe://a"], "no workload's"),
            ("spiffe://a", &["https://a/b"], "no SPIFFE id"),
            ("spiffe://a", &[], "names 0 URIs"),
            ("spiffe://a", &["spiffe://a/b", "spiffe://a/c"], "names 2 URIs"),
        ] {
            let error = check(wanted, uris).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
