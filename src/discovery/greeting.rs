//! What an agent says of itself: lines among those of its workers on its standard output.
//!
//! A line is said by the agent if it contains `elastic_rs-agent TOKEN ` and a JSON object after that. The token is drawn for each
//! agent, so that no output of a worker is taken for one. The text before it belongs to a worker whose line has no end.

use memchr::memmem;
use serde::Deserialize;

/// Longest text that is taken over from an agent.
const LONGEST: usize = 256;

/// What an agent says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// It runs, and is about to read what it is to do.
    Up {
        /// Version of its `elastic_rs`.
        version: String,
    },
    /// Its part has ended; as `elastic_rs.Launched.outcome` has it.
    Ended {
        /// `succeeded`, `not_needed`, `failed`, `no_place`, `signal`, or `detached`: it runs on without the driver.
        outcome: String,
    },
}

/// What one agent's lines are looked for.
#[derive(Clone, Debug)]
pub struct Ear {
    mark: Vec<u8>,
}

impl Ear {
    /// The ear for the agent that was told this token.
    pub fn new(token: &str) -> Self {
        Self { mark: format!("elastic_rs-agent {token} ").into_bytes() }
    }

    /// The output before the mark, and what the agent says after it. `None`: nothing in this line is said by the agent.
    pub fn hear<'a>(&self, line: &'a [u8]) -> Option<(&'a [u8], Option<Said>)> {
        let at = memmem::find(line, &self.mark)?;
        let said = serde_json::from_slice(line[at + self.mark.len()..].trim_ascii()).ok().map(bounded);
        Some((&line[..at], said))
    }
}

fn bounded(said: Said) -> Said {
    let cut = |text: String| text.chars().filter(|char| !char.is_control()).take(LONGEST).collect::<String>();
    match said {
        Said::Up { version } => Said::Up { version: cut(version) },
        Said::Ended { outcome } => Said::Ended { outcome: cut(outcome) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_with_the_token_are_heard() {
        let ear = Ear::new("f00d");
        assert_eq!(ear.hear(b"elastic_rs-agent cafe {\"ended\": {\"outcome\": \"failed\"}}\n"), None);
        assert_eq!(ear.hear(b"loss 0.3\n"), None);
        let up = Said::Up { version: "1.0".to_owned() };
        let line = b"elastic_rs-agent f00d {\"up\": {\"version\": \"1.0\"}}\n";
        assert_eq!(ear.hear(line), Some((&b""[..], Some(up))));
    }

    #[test]
    fn output_without_an_end_is_kept() {
        let line = b"loss 0.elastic_rs-agent f00d {\"ended\": {\"outcome\": \"succeeded\"}}\n";
        let ended = Said::Ended { outcome: "succeeded".to_owned() };
        assert_eq!(Ear::new("f00d").hear(line), Some((&b"loss 0."[..], Some(ended))));
    }

    #[test]
    fn junk_says_nothing_and_long_texts_are_cut() {
        let ear = Ear::new("f00d");
        for junk in ["", "{", "{\"up\": 3}", "{\"left\": {}}", "\u{0}"] {
            assert_eq!(
                ear.hear(format!("elastic_rs-agent f00d {junk}\n").as_bytes()),
                Some((&b""[..], None)),
                "{junk}"
            );
        }
        let long = format!("elastic_rs-agent f00d {{\"ended\": {{\"outcome\": \"{}\"}}}}\n", "x".repeat(5000));
        let Some((_, Some(Said::Ended { outcome }))) = ear.hear(long.as_bytes()) else { panic!("not heard") };
        assert_eq!(outcome.len(), LONGEST);
    }
}
