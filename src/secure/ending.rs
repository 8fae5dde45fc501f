//! Whether an operator is warned, when a certificate is read, that it ends soon, and in which words.
//!
//! Sites renew certificates when a third of their life or more is left. Less than a tenth means that renewing has failed.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::x509::date;
use super::{TLS_CA, TLS_CERT};

/// Warn when less than one part in so many of the lifetime is left.
const LAST_PART: u64 = 10;

/// In which file a certificate is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// The end's own, or one that leads from it to an authority.
    Cert,
    /// The authority's.
    Ca,
}

/// A certificate in a file, and when it ends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ending {
    pub source: Source,
    /// Of the file.
    pub path: PathBuf,
    /// Its subject.
    pub subject: String,
    /// Seconds since 1970 from which on, and until which, it is valid.
    pub valid: (u64, u64),
}

impl Ending {
    /// What an operator has to know now, if anything.
    pub fn text(&self, now: u64) -> Option<String> {
        let Self { source, path, subject, valid: (from, until) } = self;
        let (what, variable) = match source {
            Source::Cert => ("certificate", TLS_CERT),
            Source::Ca => ("CA", TLS_CA),
        };
        let is_over = now > *until;
        let when = match is_over {
            true => format!("ended {} ago, at {}", about(now - until), date(*until)),
            false if now >= until - until.saturating_sub(*from) / LAST_PART => {
                format!("ends in {}, at {}", about(until.saturating_add(1) - now), date(*until))
            }
            false => return None,
        };
        let todo = match source {
            Source::Cert if is_over => "renew it: no connection can begin with it",
            Source::Cert => "renew it: no connection can begin with it afterwards",
            Source::Ca => "add the one that takes its place to the file, unless it is there",
        };
        Some(format!(
            "the {what} file `{}` ({variable}) holds the certificate of {subject}, which {when}; {todo}",
            path.display()
        ))
    }
}

/// A time in one unit that people read.
pub(super) fn about(seconds: u64) -> String {
    match seconds {
        172_800.. => format!("{} days", seconds / 86_400),
        7_200.. => format!("{} h", seconds / 3_600),
        120.. => format!("{} min", seconds / 60),
        _ => format!("{seconds} s"),
    }
}

/// Log which of these certificates end soon, once in this process for each: several ends may read the same files.
pub(super) fn warn(endings: &[Ending], now: u64) {
    static WARNED: Mutex<BTreeSet<Ending>> = Mutex::new(BTreeSet::new());
    for ending in endings {
        if let Some(text) = ending.text(now)
            && WARNED.lock().insert(ending.clone())
        {
            tracing::warn!("{text}");
        }
    }
}

/// Seconds since 1970, by this machine's clock.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600;
    const DAY: u64 = 86_400;

    fn ending(source: Source, from: u64, until: u64) -> Ending {
        Ending { source, path: "/etc/node.pem".into(), subject: "CN=node0".to_owned(), valid: (from, until) }
    }

    #[test]
    fn an_end_is_reported_in_the_last_tenth_of_a_life() {
        for (lifetime, left) in [(DAY, DAY / 10), (30 * DAY, 3 * DAY), (3650 * DAY, 365 * DAY), (10, 1), (9, 0)] {
            let (from, until) = (1_000 * DAY, 1_000 * DAY + lifetime);
            let one = ending(Source::Cert, from, until);
            let begins = until - left;
            assert_eq!(one.text(begins - 1), None, "{lifetime}");
            for (at, text) in [(begins, "which ends in "), (until, "which ends in 1 s"), (until + 1, "which ended ")] {
                assert!(one.text(at).unwrap().contains(text), "{lifetime}");
            }
        }
    }

    #[test]
    fn times_without_an_end_are_far_away() {
        assert_eq!(ending(Source::Ca, 0, u64::MAX).text(DAY), None);
        assert!(ending(Source::Ca, 5, 0).text(1).unwrap().contains("ended 1 s ago"), "its end is before its begin");
    }

    #[test]
    fn the_words_name_the_file_the_subject_and_the_time_left() {
        let until = 1_780_000_000;
        let begin = |what: &str| format!("the {what} holds the certificate of CN=node0, which ");
        let (cert, ca) = (
            begin("certificate file `/etc/node.pem` (ELASTIC_RS_TLS_CERT)"),
            begin("CA file `/etc/node.pem` (ELASTIC_RS_TLS_CA)"),
        );
        let renew = "renew it: no connection can begin with it";
        let add = "add the one that takes its place to the file, unless it is there";
        for (source, now, expected) in [
            (Source::Cert, until - 37 * DAY, None),
            (
                Source::Cert,
                until - 5 * DAY,
                Some(format!("{cert}ends in 5 days, at 2026-05-28T20:26:40Z; {renew} afterwards")),
            ),
            (
                Source::Cert,
                until - 30 * HOUR,
                Some(format!("{cert}ends in 30 h, at 2026-05-28T20:26:40Z; {renew} afterwards")),
            ),
            (Source::Cert, until, Some(format!("{cert}ends in 1 s, at 2026-05-28T20:26:40Z; {renew} afterwards"))),
            (Source::Cert, until + 600, Some(format!("{cert}ended 10 min ago, at 2026-05-28T20:26:40Z; {renew}"))),
            (Source::Ca, until - 5 * HOUR, Some(format!("{ca}ends in 5 h, at 2026-05-28T20:26:40Z; {add}"))),
            (Source::Ca, until + 5 * DAY, Some(format!("{ca}ended 5 days ago, at 2026-05-28T20:26:40Z; {add}"))),
        ] {
            assert_eq!(ending(source, until - 365 * DAY, until).text(now), expected);
        }
    }
}
