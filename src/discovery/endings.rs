//! Why an agent ended, with what to do.

use std::time::Duration;

use crate::signals::Signal;

/// How the program through which an agent ran has ended: `ssh`, or on the driver's machine the agent itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// What it called `exit` with. `None`: it could not be started, or a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// What the agent reported ([`super::reports::Report::Ended`]).
    pub outcome: Option<String>,
    /// It was the agent itself, on the driver's machine.
    pub is_here: bool,
    /// The last lines that it wrote to standard error before the agent was up, or why it could not be started.
    pub last_lines: Vec<String>,
}

/// What an ending means for the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The job has succeeded.
    Succeeded,
    /// The job has failed.
    Failed,
    /// The agent does not accept its command line. No other will, unless one has.
    Refused,
    /// Its host lacks the script, as the driver's machine does. If all hosts do, the command line names no script.
    LacksScript,
    /// The agent runs on without the driver.
    Detached,
    /// The host's machine is taken away: nobody's fault.
    TakenAway,
    /// Only this host cannot go on.
    Trouble,
}

/// How many of the last lines an error repeats.
const SHOWN_LINES: usize = 3;
/// `ssh`'s own exit code: it could not connect, or the connection ended.
const SSH_FAILED: i32 = 255;
/// A shell's exit code for a program that it does not find.
const NOT_FOUND: i32 = 127;
/// `elastic-run`'s exit code for a command line that is not valid on that host.
const USAGE: i32 = 2;

impl Ending {
    /// What it means for the job.
    pub fn meaning(&self) -> Meaning {
        match self.outcome.as_deref() {
            Some("succeeded" | "not_needed" | "too_late" | "succeeded_before") => Meaning::Succeeded,
            Some("failed" | "failed_here" | "failed_before") => Meaning::Failed,
            Some("refused") => Meaning::Refused,
            Some("lacks_script") => Meaning::LacksScript,
            Some("detached") => Meaning::Detached,
            Some("taken_away") => Meaning::TakenAway,
            _ => Meaning::Trouble,
        }
    }

    /// The exit code of an agent whose job has failed. 1 if it is not known.
    pub fn exit_code(&self) -> i32 {
        self.code.filter(|code| self.is_here || *code != SSH_FAILED).unwrap_or(1)
    }

    /// Whether the first failure of the job was on its host.
    pub fn was_first(&self) -> bool {
        self.outcome.as_deref() == Some("failed_here")
    }

    /// Why an agent that was not asked to leave has ended. `up`: it had reported that it runs.
    pub fn why(&self, python: &str, up: bool) -> String {
        let has = |text: &str| self.last_lines.iter().any(|line| line.contains(text));
        let detail = self.detail();
        if let Some(signal) = self.signal {
            return format!("{} was ended by {}{detail}", self.program(), Signal(signal));
        }
        match self.code {
            None => format!("cannot start {}{detail}", self.program()),
            Some(SSH_FAILED) if up && !self.is_here => {
                "the connection was lost, or a signal ended the agent; ssh ended with 255".to_owned() + &detail
            }
            Some(SSH_FAILED) if !self.is_here => format!("ssh cannot connect{detail}{}", ssh_hint(&self.last_lines)),
            // Not of a module of the package: then another version is installed.
            Some(code) if !up && has("No module named 'elastic_rs'") => {
                // Without the traceback.
                let last = self.last_lines.last().map(|line| format!(": {line}")).unwrap_or_default();
                format!("elastic_rs is not installed for `{python}` there (exit code {code}){last}")
            }
            Some(code) if !up && has("No module named 'elastic_rs.") => {
                let last = self.last_lines.last().map(|line| format!(": {line}")).unwrap_or_default();
                format!(
                    "the elastic_rs of `{python}` there is of another version, or incomplete (exit code {code}){last}"
                )
            }
            Some(USAGE) if !up && has("Unknown option: -P") => {
                format!("`{python}` there is older than Python 3.11 (--remote-python names another)")
            }
            Some(NOT_FOUND) if !up => format!("there is no `{python}` (--remote-python names another){detail}"),
            Some(code) if !up => format!("the agent did not start (exit code {code}){detail}"),
            Some(USAGE) => "the agent cannot run there (exit code 2); its error is in its output".to_owned() + &detail,
            Some(code) => match self.outcome.as_deref() {
                Some("unfit") => "its workers cannot take part in the job; the report is in its output".to_owned(),
                Some("no_place") => "the agent could not join the job; its error is in its output".to_owned(),
                _ => format!("the agent ended with exit code {code}"),
            },
        }
    }

    /// The last lines, after a colon; empty if there are none.
    pub fn detail(&self) -> String {
        let last = self.last_lines[self.last_lines.len().saturating_sub(SHOWN_LINES)..].join("; ");
        if last.is_empty() { last } else { format!(": {last}") }
    }

    fn program(&self) -> &'static str {
        if self.is_here { "the agent" } else { "ssh" }
    }
}

/// What to do about `ssh`'s most common errors.
fn ssh_hint(lines: &[String]) -> &'static str {
    let has = |text: &str| lines.iter().any(|line| line.contains(text));
    if has("REMOTE HOST IDENTIFICATION HAS CHANGED") {
        "; the host's key is not the one in known_hosts: find out why, then `ssh-keygen -R HOST`"
    } else if has("Host key verification failed") {
        "; known_hosts does not have the host's key: connect once by hand, or use ssh-keyscan"
    } else if has("Permission denied") {
        "; the driver cannot answer questions: an agent or a key without a passphrase has to let it in"
    } else {
        ""
    }
}

/// Why a host whose agent has said nothing was given up.
pub fn start_timed_out(after: Duration) -> String {
    format!("no agent has started there after {} s (--start-timeout)", after.as_secs_f64())
}

/// Why an agent of another version cannot be used.
pub fn other_version(there: &str, here: &str) -> String {
    format!("it has elastic_rs {there}, and the driver {here}: install the same version on all hosts")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: i32, words: &[&str]) -> Ending {
        Ending {
            code: Some(code),
            last_lines: words.iter().map(|&line| line.to_owned()).collect(),
            ..Ending::default()
        }
    }

    fn why(ending: &Ending, up: bool) -> String {
        ending.why("/opt/bin/python", up)
    }

    #[test]
    fn an_outcome_says_what_an_ending_means_for_the_job() {
        for (outcome, meaning) in [
            (Some("succeeded"), Meaning::Succeeded),
            (Some("not_needed"), Meaning::Succeeded),
            (Some("too_late"), Meaning::Succeeded),
            (Some("succeeded_before"), Meaning::Succeeded),
            (Some("failed_before"), Meaning::Failed),
            (Some("failed_here"), Meaning::Failed),
            (Some("failed"), Meaning::Failed),
            (Some("refused"), Meaning::Refused),
            (Some("lacks_script"), Meaning::LacksScript),
            (Some("detached"), Meaning::Detached),
            (Some("unfit"), Meaning::Trouble),
            (Some("no_place"), Meaning::Trouble),
            (Some("signal"), Meaning::Trouble),
            (None, Meaning::Trouble),
        ] {
            let ending = Ending { outcome: outcome.map(str::to_owned), ..ended(0, &[]) };
            assert_eq!(ending.meaning(), meaning, "{outcome:?}");
        }
    }

    #[test]
    fn troubles_before_the_agent_is_up_are_named() {
        let refused = why(&ended(255, &["me@node1: Permission denied (publickey)."]), false);
        assert!(
            refused.starts_with("ssh cannot connect: me@node1: Permission denied (publickey).; the driver"),
            "{refused}"
        );
        let changed = ["@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "Host key verification failed."];
        assert!(why(&ended(255, &changed), false).ends_with("`ssh-keygen -R HOST`"));
        assert!(why(&ended(255, &changed[1..]), false).contains("known_hosts does not have"));
        let unknown = "ssh: Could not resolve hostname node1: Name or service not known";
        assert_eq!(why(&ended(255, &[unknown]), false), format!("ssh cannot connect: {unknown}"));
        let module = "ModuleNotFoundError: No module named 'elastic_rs'";
        let traceback = ["Traceback (most recent call last):", "  File \"<string>\", line 1, in <module>", module];
        assert_eq!(
            why(&ended(1, &traceback), false),
            format!("elastic_rs is not installed for `/opt/bin/python` there (exit code 1): {module}")
        );
        let other = "ModuleNotFoundError: No module named 'elastic_rs._hosted'";
        assert_eq!(
            why(&ended(1, &[other]), false),
            format!(
                "the elastic_rs of `/opt/bin/python` there is of another version, or incomplete (exit code 1): {other}"
            )
        );
        let old = ["Unknown option: -P", "usage: /opt/bin/python [option] ... [-c cmd | -m mod | file | -] [arg] ..."];
        assert_eq!(
            why(&ended(2, &old), false),
            "`/opt/bin/python` there is older than Python 3.11 (--remote-python names another)"
        );
        assert!(why(&ended(127, &["bash: not found"]), false).starts_with("there is no `/opt/bin/python` (--remote-"));
        let none = Ending { last_lines: vec!["No such file or directory".to_owned()], ..Ending::default() };
        assert_eq!(why(&none, false), "cannot start ssh: No such file or directory");
    }

    #[test]
    fn troubles_of_an_agent_that_was_up_are_named() {
        assert!(why(&ended(255, &[]), true).starts_with("the connection was lost"));
        assert!(why(&ended(2, &[]), true).starts_with("the agent cannot run there"));
        assert_eq!(why(&ended(143, &[]), true), "the agent ended with exit code 143");
        let killed = Ending { signal: Some(9), ..Ending::default() };
        assert_eq!(why(&killed, true), "ssh was ended by SIGKILL");
        let killed = Ending { is_here: true, ..killed };
        assert_eq!(why(&killed, true), "the agent was ended by SIGKILL");
    }
}
