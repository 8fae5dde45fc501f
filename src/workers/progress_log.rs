//! Which lines of workers show progress: `--progress-log`. Pure.

use std::fmt;
use std::str::FromStr;

use regex_lite::{Regex, RegexBuilder};

/// Longest expression.
pub const PATTERN_LIMIT_BYTES: usize = 1000;
/// Largest compiled expression: `(a{200}){200}` is short, and would cost too much for each line.
const COMPILED_LIMIT_BYTES: usize = 256 << 10;
/// Only so much of a line is looked at.
const LINE_LIMIT_BYTES: usize = 4 << 10;

/// A regular expression that a line matches if it shows progress. Matching takes time in proportion to the line's length.
#[derive(Clone, Debug)]
pub struct ProgressPattern(Regex);

impl ProgressPattern {
    /// Whether a line, or a part of it, matches. Its end is no part of it, and only its first 4 KiB are looked at. Bytes that are no
    /// UTF-8 match as U+FFFD.
    pub fn matches(&self, line: &[u8]) -> bool {
        let kept = &line[..line.len().min(LINE_LIMIT_BYTES)];
        let is_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
        let length = kept.iter().rposition(|byte| !is_end(byte)).map_or(0, |last| last + 1);
        self.0.is_match(&String::from_utf8_lossy(&kept[..length]))
    }
}

impl PartialEq for ProgressPattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for ProgressPattern {}

impl FromStr for ProgressPattern {
    type Err = ProgressPatternError;

    fn from_str(text: &str) -> Result<Self, ProgressPatternError> {
        match text.len() {
            0 => return Err(ProgressPatternError("is empty, must be a regular expression: `step [0-9]+`".to_owned())),
            1..=PATTERN_LIMIT_BYTES => {}
            length => {
                return Err(ProgressPatternError(format!(
                    "has {length} bytes, must be a regular expression of at most {PATTERN_LIMIT_BYTES}"
                )));
            }
        }
        let made = RegexBuilder::new(text).size_limit(COMPILED_LIMIT_BYTES).build();
        let wrong = |error| ProgressPatternError(format!("is `{text}`, must be a regular expression: {error}"));
        made.map(Self).map_err(wrong)
    }
}

/// Why a text is no pattern. Its message goes behind the name of the flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgressPatternError(String);

impl fmt::Display for ProgressPatternError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ProgressPatternError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, line: &[u8]) -> bool {
        pattern.parse::<ProgressPattern>().unwrap().matches(line)
    }

    #[test]
    fn a_line_matches_without_its_end_wherever_the_expression_fits() {
        assert!(matches(r"step \d+", b"[rank 0] step 17 loss 0.3\n"));
        assert!(matches(r"it/s\]$", b" 40%|#### | 4/10 [2.1it/s]\r"));
        assert!(matches(r"^done$", b"done\r\n"));
        assert!(!matches(r"step \d+", b"step one\n"));
        assert!(!matches("x", b"\n"));
        assert!(matches("step", b"\xff step\n"), "what is no UTF-8 does not matter");
    }

    #[test]
    fn of_a_long_line_only_the_beginning_is_looked_at() {
        let mut line = vec![b'.'; LINE_LIMIT_BYTES - 4];
        line.extend_from_slice(b"step and more\n");
        assert!(matches("step", &line));
        assert!(!matches("and", &line));
        let euro = [vec![b'.'; LINE_LIMIT_BYTES - 1], "€\n".into()].concat();
        assert!(!matches("€", &euro), "a character that is cut");
    }

    #[test]
    fn what_is_no_expression_is_said_with_what_is_allowed() {
        let error = |text: &str| text.parse::<ProgressPattern>().unwrap_err().to_string();
        assert_eq!(error(""), "is empty, must be a regular expression: `step [0-9]+`");
        assert_eq!(error("(step"), "is `(step`, must be a regular expression: found open group without closing ')'");
        assert_eq!(error(&"x".repeat(1001)), "has 1001 bytes, must be a regular expression of at most 1000");
        assert!("x".repeat(1000).parse::<ProgressPattern>().is_ok());
        let error = error("((a{200}){200}){200}");
        assert!(error.starts_with("is `((a{200}){200}){200}`, must be a regular expression: "), "{error}");
    }
}
