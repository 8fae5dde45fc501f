//! Validation and cleaning of the texts that nodes send: short enough that every message fits its frame, and without characters
//! that could forge log lines or control a terminal ([`is_steering`]).

use std::time::Duration;

/// The run id of a job that was given none. It is torchrun's.
pub const DEFAULT_RUN_ID: &str = "none";
/// Longest run id, in bytes.
pub const RUN_ID_LIMIT_BYTES: usize = 1024;
/// Longest name or address of a node, in bytes. A DNS name has at most 255.
pub const NAME_LIMIT_BYTES: usize = 255;
/// Most workers on one node.
pub const LOCAL_WORLD_SIZE_LIMIT: u32 = 65_535;
/// Longest reason or cause that is kept, in bytes.
pub const REASON_LIMIT_BYTES: usize = 4096;

/// Check a job's name.
///
/// # Errors
/// A sentence naming what is not allowed, and what is.
pub fn validate_run_id(run_id: &str) -> Result<(), String> {
    if run_id.is_empty() {
        return Err("the run id is empty".to_owned());
    }
    check("run id", run_id, RUN_ID_LIMIT_BYTES)
}

/// Check a node's name or address.
///
/// # Errors
/// A sentence naming what is not allowed, and what is.
pub(crate) fn validate_name(what: &str, name: &str) -> Result<(), String> {
    check(what, name, NAME_LIMIT_BYTES)
}

/// Check the length and the characters of a text.
pub(crate) fn check(what: &str, text: &str, limit: usize) -> Result<(), String> {
    if text.len() > limit {
        return Err(format!("the {what} has {} bytes, must have at most {limit}", text.len()));
    }
    if text.contains(is_steering) {
        return Err(format!("the {what} `{}` has control characters", text.escape_default()));
    }
    Ok(())
}

/// Whether a character moves, hides or reorders what a log viewer or a terminal shows: control characters, Unicode's line and
/// paragraph separators, marks and overrides of the writing direction, invisible characters, and tags.
///
/// U+200C and U+200D stay: Persian, Indic scripts and emoji are written with them, and they change only how neighbours join.
pub fn is_steering(c: char) -> bool {
    let invisible =
        matches!(c, '\u{180e}' | '\u{200b}' | '\u{2060}'..='\u{2065}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}');
    let separates = matches!(c, '\u{2028}' | '\u{2029}');
    let directs = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{206f}');
    c.is_control() || separates || directs || invisible || matches!(c, '\u{e0000}'..='\u{e007f}')
}

/// One line of at most [`REASON_LIMIT_BYTES`]: characters that steer a terminal become spaces, and what is too long is cut.
pub fn tidy(text: &str) -> String {
    cut(plain(text.to_owned()), REASON_LIMIT_BYTES)
}

/// A time in words: `5 s`, `12 min`, `3 h`.
pub(crate) fn duration_text(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// As [`tidy`], but lines stay lines, and of at most `limit` bytes.
pub(crate) fn tidy_lines(text: &str, limit: usize) -> String {
    let indented =
        |line: &str| line.trim_end().chars().map(|c| if is_steering(c) { ' ' } else { c }).collect::<String>();
    let lines: Vec<_> = text.trim().lines().map(indented).collect();
    cut(lines.join("\n"), limit)
}

/// One line of any length, without characters that steer a terminal. Nearly all texts are so already.
pub(crate) fn plain(text: String) -> String {
    if text.trim().len() == text.len() && !text.contains(is_steering) {
        return text;
    }
    text.trim().chars().map(|c| if is_steering(c) { ' ' } else { c }).collect()
}

/// The text, cut to at most `limit` bytes.
pub(crate) fn cut(mut text: String, limit: usize) -> String {
    const CUT: char = '…';
    if text.len() > limit {
        let mut end = limit - CUT.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push(CUT);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_become_one_line_of_bounded_length() {
        assert_eq!(tidy("two\nlines\x1b[2J\n"), "two lines [2J");
        assert_eq!(tidy(&"x".repeat(REASON_LIMIT_BYTES)).len(), REASON_LIMIT_BYTES);
        for character in ["x", "é", "語", "🦀"] {
            let cut = tidy(&character.repeat(REASON_LIMIT_BYTES + 1));
            assert!(cut.len() <= REASON_LIMIT_BYTES && cut.len() > REASON_LIMIT_BYTES - 8, "{}", cut.len());
            assert!(cut.ends_with('…'));
        }
    }
}
