//! Runs a check in a thread.

use std::ffi::OsString;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use super::super::shell::{Ran, Shell};
use super::built_in::BuiltIn;
use super::{Found, Options};
use crate::threads;
use crate::wire::text::{cut, tidy};
use crate::workers::ExitStatus;

/// How long a check may take. Then its command is killed, with all that it has started.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// How much of the command, and of what it says, a line of the log shows.
const SHOWN_BYTES: usize = 120;

/// Checks of this machine, one at a time. None outlives it.
#[derive(Debug)]
pub(in crate::agent) struct Checks {
    options: Options,
    limit: Duration,
    /// Since the first check.
    built_in: Arc<OnceLock<BuiltIn>>,
    shell: Arc<Shell>,
    runs: Arc<AtomicBool>,
}

impl Checks {
    pub fn new(options: Options) -> Self {
        Self { options, limit: TIME_LIMIT, built_in: Arc::default(), shell: Arc::default(), runs: Arc::default() }
    }

    /// Check now, and tell what was found, unless a check runs, which tells it.
    pub fn begin(&self, tell: impl FnOnce(Found) + Send + 'static) {
        if self.runs.swap(true, Ordering::Relaxed) {
            return;
        }
        let (command, limit, until) = (self.options.command.clone(), self.limit, Instant::now() + self.limit);
        let (shell, runs, built_in) = (self.shell.clone(), self.runs.clone(), self.built_in.clone());
        let check = move || {
            let found = match started(&built_in).map(|it| it.ill(limit)) {
                Ok(Some(ill)) => Some(Found::Ill(ill)),
                Ok(None) => by_command(&shell, command, limit, until),
                Err(error) => Some(Found::Unknown(format!("no thread for the built-in checks: {error}"))),
            };
            runs.store(false, Ordering::Relaxed);
            if let Some(found) = found {
                tell(found);
            }
        };
        if let Err(error) = threads::spawn("health-check".to_owned(), check) {
            // Without an answer the join counts as that of a node that is well.
            self.runs.store(false, Ordering::Relaxed);
            tracing::warn!("no thread for --health-check, so this machine is not checked: {error}");
        }
    }
}

impl Drop for Checks {
    fn drop(&mut self) {
        self.shell.end();
    }
}

fn started(built_in: &OnceLock<BuiltIn>) -> io::Result<&BuiltIn> {
    match built_in.get() {
        Some(started) => Ok(started),
        None => BuiltIn::start().map(|started| built_in.get_or_init(|| started)),
    }
}

/// Check this machine once, and wait for that.
pub fn check(options: Options) -> Found {
    let (sender, told) = mpsc::channel();
    let checks = Checks::new(options);
    checks.begin(move |found| drop(sender.send(found)));
    told.recv().unwrap_or_else(|_| Found::Unknown("no thread for the check".to_owned()))
}

/// What the command finds, which has the rest of the time limit. `None`: the agent has ended.
fn by_command(shell: &Shell, command: Option<OsString>, limit: Duration, until: Instant) -> Option<Found> {
    let Some(command) = command else { return Some(Found::Well) };
    let shown = cut(tidy(&command.to_string_lossy()), SHOWN_BYTES);
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        let why = format!("the built-in checks have taken {limit:.1?}, which leaves no time for `{shown}`");
        return Some(Found::Unknown(why));
    }
    let found = match shell.read(&command, true, Some(left)) {
        Ok(ran) => of(&shown, ran?, limit),
        Err(error) => Found::Unknown(format!("`{shown}` cannot be run: {error}")),
    };
    Some(found)
}

fn of(shown: &str, ran: Ran, limit: Duration) -> Found {
    let said = ran.output.lines().map(str::trim).find(|line| !line.is_empty());
    let said = said.map_or_else(String::new, |line| format!(": {}", cut(tidy(line), SHOWN_BYTES)));
    match ran.exit {
        _ if ran.late => Found::Unknown(format!("`{shown}` has not ended within {limit:.1?} and was killed{said}")),
        ExitStatus::Code(0) => Found::Well,
        ExitStatus::Code(1) => Found::Ill(format!("`{shown}` ended with exit code 1{said}")),
        exit => Found::Unknown(format!("`{shown}` ended with {exit}, which is neither 0 (well) nor 1 (ill){said}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::is_alive;

    fn run(command: &str, limit: Duration) -> Found {
        by_command(&Shell::default(), Some(command.into()), limit, Instant::now() + limit).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn zero_is_well_and_one_is_ill_and_anything_else_says_nothing() {
        let unknown = |text: &str| Found::Unknown(text.to_owned());
        for (command, found) in [
            ("true", Found::Well),
            (
                "echo; echo ' GPU 3 is  hot'; echo more; exit 1",
                Found::Ill(
                    "`echo; echo ' GPU 3 is  hot'; echo more; exit 1` ended with exit code 1: GPU 3 is  hot".to_owned(),
                ),
            ),
            ("exit 2", unknown("`exit 2` ended with exit code 2, which is neither 0 (well) nor 1 (ill)")),
            ("kill -KILL $$", unknown("`kill -KILL $$` ended with SIGKILL, which is neither 0 (well) nor 1 (ill)")),
        ] {
            assert_eq!(run(command, LONG), found);
        }
        let missing = "`/nowhere` ended with exit code 127, which is neither 0 (well) nor 1 (ill): sh: ";
        assert!(matches!(run("/nowhere", LONG), Found::Unknown(text) if text.starts_with(missing)), "{missing}");
        assert!(matches!(run("a\0b", LONG), Found::Unknown(text) if text.contains("cannot be run")));
    }

    #[test]
    fn one_that_writes_without_end_or_leaves_a_writer_is_not_waited_for() {
        let text = "x".repeat(SHOWN_BYTES);
        let found = run("head -c 100000000 /dev/zero | tr '\\0' x; exit 1", LONG);
        assert!(matches!(&found, Found::Ill(found) if found.contains(&text[..60])), "{found:?}");
        let began = Instant::now();
        assert_eq!(run("sleep 600 & exit 0", LONG), Found::Well);
        assert!(began.elapsed() < LONG, "what it has left is killed");
    }

    #[test]
    fn one_that_never_stops_to_write_is_killed_when_its_time_is_over() {
        let found = run("yes hot", Duration::from_millis(300));
        assert!(matches!(&found, Found::Unknown(text) if text.contains("was killed: hot")), "{found:?}");
    }

    #[test]
    fn one_without_time_is_not_begun() {
        let found = run("exit 1", Duration::ZERO);
        let why = "the built-in checks have taken 0.0ns, which leaves no time for `exit 1`";
        assert_eq!(found, Found::Unknown(why.to_owned()));
    }

    #[test]
    fn one_that_forks_and_hangs_is_killed_when_its_time_is_over() {
        let found = run("sleep 600 & echo $!; wait", Duration::from_millis(300));
        let Found::Unknown(text) = found else { panic!("{found:?}") };
        assert!(text.contains("has not ended within 300.0ms and was killed: "), "{text}");
        let pid: u32 = text.rsplit(' ').next().unwrap().parse().unwrap();
        let killed = Instant::now();
        while is_alive(pid) {
            assert!(killed.elapsed() < LONG, "what it had started lives");
        }
    }

    #[test]
    fn it_ends_with_the_agent_and_tells_nothing_then() {
        let checks = Checks::new(Options { command: Some("sleep 600".into()) });
        let (sender, told) = mpsc::channel();
        checks.begin(move |found| sender.send(found).unwrap());
        while checks.shell.runs().is_none() {
            std::thread::yield_now();
        }
        drop(checks);
        assert!(told.recv().is_err());
    }
}
