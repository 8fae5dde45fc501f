//! What begins each line of a worker's output on a console, and whether the console shows colours.

use std::env;
use std::ffi::OsString;
use std::io::IsTerminal;

/// Of neighbours in turn. Red is for errors, and dark blue cannot be read on black.
const COLOURS: [&str; 6] = ["\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[32m", "\x1b[94m", "\x1b[96m"];
const PLAIN: &[u8] = b"\x1b[0m";

/// The prefix of lines, with and without a colour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    plain: Vec<u8>,
    coloured: Vec<u8>,
}

impl Prefix {
    /// `number`: of the worker or the node. Its colour differs from that of the next one.
    pub fn new(plain: Vec<u8>, number: u64) -> Self {
        let coloured = match plain.is_empty() {
            true => Vec::new(),
            false => [colour(number).as_bytes(), &plain, PLAIN].concat(),
        };
        Self { plain, coloured }
    }

    /// The prefix for a file or a pipe.
    pub fn plain(&self) -> &[u8] {
        &self.plain
    }

    /// The prefix for a console.
    pub fn shown(&self, colours: bool) -> &[u8] {
        if colours { &self.coloured } else { &self.plain }
    }
}

fn colour(number: u64) -> &'static str {
    COLOURS[usize::try_from(number % COLOURS.len() as u64).unwrap_or(0)]
}

/// Whether to colour what is written there. Never if `NO_COLOR` is set and not empty (<https://no-color.org>), `TERM` is `dumb`, or it is
/// no terminal.
/// `elastic_rs/_terminal.py` has the same rule.
pub(crate) fn shows_colours(console: &impl IsTerminal) -> bool {
    are_wanted(|name| env::var_os(name)) && console.is_terminal()
}

/// Whether these variables allow colours.
fn are_wanted(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    variable("NO_COLOR").is_none_or(|it| it.is_empty()) && variable("TERM").is_none_or(|term| term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_have_other_colours_and_the_same_words() {
        let prefixes: Vec<_> = (0..20).map(|number| Prefix::new(b"[default0]:".to_vec(), number)).collect();
        for pair in prefixes.windows(2) {
            assert_ne!(pair[0].shown(true), pair[1].shown(true));
            assert_eq!(pair[0].shown(false), pair[1].shown(false));
        }
        assert_eq!(prefixes[0].shown(true), b"\x1b[36m[default0]:\x1b[0m");
        assert_eq!(prefixes[0].plain(), b"[default0]:");
        assert_eq!(Prefix::new(Vec::new(), 1).shown(true), b"", "nothing has no colour");
    }

    #[test]
    fn colours_are_for_those_who_want_them() {
        for (name, value, expected) in [
            ("PATH", "", true),
            ("NO_COLOR", "", true),
            ("NO_COLOR", "0", false),
            ("TERM", "xterm", true),
            ("TERM", "dumb", false),
        ] {
            assert_eq!(are_wanted(|it| (it == name).then(|| value.into())), expected, "{name}={value}");
        }
    }

    #[test]
    fn a_file_shows_no_colours() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(!shows_colours(&null));
    }
}
