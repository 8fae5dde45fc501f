//! Validation and cleaning of the texts that nodes send: short enough that every message fits its frame, and without characters
//! that could forge log lines or control a terminal ([`is_steering`]).

use super::message::{CoordinatorMessage, Failure, Hello, Join, Placed, Placement, Verdict, Waits};
use super::settings::Settings;

/// Longest run id, in bytes.
pub const RUN_ID_LIMIT_BYTES: usize = 1024;
/// Longest name or address of a node, in bytes. A DNS name has at most 255.
pub const NAME_LIMIT_BYTES: usize = 255;
/// Most workers on one node.
pub const LOCAL_WORLD_SIZE_LIMIT: u32 = 65_535;
/// Longest reason or cause that is kept, in bytes.
pub const REASON_LIMIT_BYTES: usize = 4096;

impl Hello {
    /// Check a node's introduction.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        validate_run_id(&self.run_id)?;
        check("name", &self.name, NAME_LIMIT_BYTES)?;
        check("address", self.local_addr.as_deref().unwrap_or_default(), NAME_LIMIT_BYTES)?;
        self.settings.validate()?;
        self.capabilities.validate()?;
        self.placed.map_or(Ok(()), |placed| placed.validate(&self.settings))
    }
}

impl Placed {
    /// Check a node's claim about its last round against its settings, by which it was placed.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    fn validate(&self, settings: &Settings) -> Result<(), String> {
        let Self { rank, world_size, restart, .. } = *self;
        if world_size < 1 || world_size > settings.max_nodes {
            let max = settings.max_nodes;
            return Err(format!(
                "the world size of the last round is `{world_size}`, must be from 1 to max_nodes (`{max}`)"
            ));
        }
        if rank >= world_size {
            return Err(format!(
                "the rank of the last round is `{rank}`, must be below its world size (`{world_size}`)"
            ));
        }
        match settings.max_restarts {
            Some(limit) if restart > limit => {
                Err(format!("the restart number is `{restart}`, must be at most max_restarts (`{limit}`)"))
            }
            _ => Ok(()),
        }
    }
}

impl Join {
    /// Check a node's account of its workers.
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

/// Check a node's name or address.
///
/// # Errors
/// A sentence naming what is not allowed, and what is.
pub(in crate::rendezvous) fn validate_name(what: &str, name: &str) -> Result<(), String> {
    check(what, name, NAME_LIMIT_BYTES)
}

fn check(what: &str, text: &str, limit: usize) -> Result<(), String> {
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
    cut(plain(text), REASON_LIMIT_BYTES)
}

/// As [`tidy`], but lines stay lines.
fn tidy_lines(text: &str) -> String {
    let indented =
        |line: &str| line.trim_end().chars().map(|c| if is_steering(c) { ' ' } else { c }).collect::<String>();
    let lines: Vec<_> = text.trim().lines().map(indented).collect();
    cut(lines.join("\n"), REASON_LIMIT_BYTES)
}

/// What a coordinator says, with its texts tidied: a node logs them, and whatever listens at the endpoint may have written them.
pub(in crate::rendezvous) fn tidy_message(message: CoordinatorMessage) -> CoordinatorMessage {
    use CoordinatorMessage::{Closed, Complete, Ended, Heartbeat, Leaving, Rejected, Status, Welcome, Withdrawn};
    let failed = |failure: Box<Failure>| Box::new(tidy_failure(&failure, plain(&failure.node)));
    let waits = |waits: Waits| Waits { progress: plain(&waits.progress), ..waits };
    match message {
        Rejected { reason } => Rejected { reason: plain(&reason) },
        Ended { reason } => Ended { reason: plain(&reason) },
        Welcome { addr, hosted, capabilities } => {
            Welcome { addr: plain(&addr), hosted, capabilities: capabilities.tidied() }
        }
        Leaving { why, interrupts } => Leaving { why: plain(&why), interrupts },
        Withdrawn { progress } => Withdrawn { progress: plain(&progress) },
        Status { waiting, reason, restart, failure } => {
            Status { waiting, reason: plain(&reason), restart, failure: failure.map(failed) }
        }
        Complete(place) => {
            Complete(Placement { master_addr: plain(&place.master_addr), reason: plain(&place.reason), ..place })
        }
        Closed { verdict, spare } => Closed { verdict: tidy_verdict(&verdict), spare },
        Heartbeat { waits: told } => Heartbeat { waits: told.map(waits) },
        CoordinatorMessage::Waits(told) => CoordinatorMessage::Waits(waits(told)),
        CoordinatorMessage::Stale { .. } | CoordinatorMessage::Terms { .. } => message,
    }
}

/// One line of any length, without characters that steer a terminal.
pub(in crate::rendezvous) fn plain(text: &str) -> String {
    text.trim().chars().map(|c| if is_steering(c) { ' ' } else { c }).collect()
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
        Verdict::Stopped { by, cause } => Verdict::Stopped { by: tidy(by), cause: tidy(cause) },
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
