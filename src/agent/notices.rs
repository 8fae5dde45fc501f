//! Notices that this machine is about to be taken away: where they come from, and what they say.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::signals::Signal;

#[cfg(feature = "io")]
mod watch;

#[cfg(feature = "io")]
pub(super) use watch::Watches;

/// The longest time that a notice may say: a day.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// How an agent learns that its machine is about to be taken away. Signals that say so are [`Meanings::notices`](crate::signals::Meanings).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Where else to look.
    pub sources: Vec<Source>,
    /// How much time a notice leaves that does not say it.
    pub deadline: Duration,
    /// What workers get at a notice for whatever node, to save. Default none.
    pub signal: Option<Signal>,
}

/// Where a notice comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// This file appears. Its first word is how many seconds are left.
    File(PathBuf),
    /// A shell runs this, again and again. Once it ends well and has written something, that is a notice, and the first word is how many
    /// seconds are left.
    Command {
        /// The command.
        command: OsString,
        /// What messages call it.
        name: String,
    },
}

/// What a notice says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Notice {
    /// How much time is left.
    pub left: Duration,
    /// Who says so, in words.
    pub from: String,
}

/// How much time a notice leaves, by its first word. `Err`: what stands there instead of a number of seconds.
fn left_by(text: &str, default: Duration) -> Result<Duration, String> {
    let Some(word) = text.split_whitespace().next() else { return Ok(default) };
    let seconds = word.parse::<f64>().ok().filter(|seconds| (0.0..=LONGEST.as_secs_f64()).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| crate::wire::text::tidy(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_is_how_many_seconds_are_left() {
        let default = Duration::from_secs(30);
        for (text, left) in [
            ("", Ok(30_000)),
            (" \n", Ok(30_000)),
            ("120", Ok(120_000)),
            ("0.5 seconds\nmore", Ok(500)),
            ("0", Ok(0)),
            ("86400", Ok(86_400_000)),
            ("86401", Err("86401")),
            ("-1", Err("-1")),
            ("nan", Err("nan")),
            ("inf", Err("inf")),
            ("terminate in 30", Err("terminate")),
        ] {
            let expected = left.map(Duration::from_millis).map_err(ToOwned::to_owned);
            assert_eq!(left_by(text, default), expected, "{text:?}");
        }
    }
}
