//! What nodes write about themselves, as others may be shown it: short enough that no message outgrows its frame, and
//! without control characters, which could forge lines of a log or steer a terminal.

use super::message::{Failure, Hello, Join, Verdict};

/// Longest run id, in bytes.
pub const RUN_ID_LIMIT_BYTES: usize = 1024;
/// Longest name or address of a node, in bytes. A DNS name has at most 255.
pub const NAME_LIMIT_BYTES: usize = 255;
/// Most workers on one node.
pub const LOCAL_WORLD_SIZE_LIMIT: u32 = 65_535;
/// What is kept of a reason or cause, in bytes.
pub const REASON_LIMIT_BYTES: usize = 4096;

impl Hello {
    /// Check what a node says about itself.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        validate_run_id(&self.run_id)?;
        check("name", &self.name, NAME_LIMIT_BYTES)?;
        check("address", self.local_addr.as_deref().unwrap_or_default(), NAME_LIMIT_BYTES)?;
        self.settings.validate()
    }
}

impl Join {
    /// Check what a node says about its workers.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        let Some(workers) = &self.workers else { return Ok(()) };
        check("role", &workers.role, NAME_LIMIT_BYTES)?;
        match workers.local_world_size {
            1..=LOCAL_WORLD_SIZE_LIMIT => Ok(()),
            size => Err(format!("local_world_size is `{size}`, must be from 1 to {LOCAL_WORLD_SIZE_LIMIT}")),
        }
    }
}

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

fn check(what: &str, text: &str, limit: usize) -> Result<(), String> {
    if text.len() > limit {
        return Err(format!("the {what} has {} bytes, must have at most {limit}", text.len()));
    }
    if text.contains(char::is_control) {
        return Err(format!("the {what} `{}` has control characters", text.escape_default()));
    }
    Ok(())
}

/// One line of at most [`REASON_LIMIT_BYTES`]: control characters become spaces, and what is too long is cut.
pub fn tidy(text: &str) -> String {
    cut(plain(text), REASON_LIMIT_BYTES)
}

/// As [`tidy`], but lines stay lines.
fn tidy_lines(text: &str) -> String {
    let indented =
        |line: &str| line.trim_end().chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    let lines: Vec<_> = text.trim().lines().map(indented).collect();
    cut(lines.join("\n"), REASON_LIMIT_BYTES)
}

fn plain(text: &str) -> String {
    text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn cut(mut text: String, limit: usize) -> String {
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

/// A failure with its texts tidied, as it happened on `node`.
pub fn tidy_failure(failure: &Failure, node: String) -> Failure {
    let short = |text: &str| cut(plain(text), NAME_LIMIT_BYTES);
    Failure {
        node: cut(node, 3 * NAME_LIMIT_BYTES),
        role: short(&failure.role),
        exit: short(&failure.exit),
        message: tidy_lines(&failure.message),
        ..failure.clone()
    }
}

/// The verdict with its texts tidied.
pub fn tidy_verdict(verdict: &Verdict) -> Verdict {
    match verdict {
        Verdict::Succeeded { by } => Verdict::Succeeded { by: tidy(by) },
        Verdict::Failed { by, cause, failure } => Verdict::Failed {
            by: tidy(by),
            cause: tidy(cause),
            failure: failure.as_ref().map(|failure| Box::new(tidy_failure(failure, tidy(&failure.node)))),
        },
        Verdict::AllDone { .. } => verdict.clone(),
    }
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
