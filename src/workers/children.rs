//! The children of a process: waiting for the end of one, and naming them for people.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::sleep;

/// The first pause between two looks at a child that has no pidfd: on kernels before 5.3, in gVisor, and under older seccomp profiles.
/// It may be about to end. Each pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest one.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Wait until a child of this process has ended, and reap it. `end`: its pidfd. `reap` must not wait; it returns `None` while the child
/// runs. No thread waits: one for each child would take all of the runtime's.
pub(crate) async fn reaped<T>(
    end: Option<&AsyncFd<OwnedFd>>,
    mut reap: impl FnMut() -> io::Result<Option<T>>,
) -> io::Result<T> {
    let mut pause = FIRST_PAUSE;
    loop {
        if let Some(end) = end {
            let _ = end.readable().await?;
        }
        if let Some(ended) = reap()? {
            return Ok(ended);
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Children that are named.
const NAMED: usize = 3;
/// Longest a command is that is shown.
const COMMAND_CHARS: usize = 100;

/// The children of a process of one thread, with their commands, in words. `None` if it has none, or this kernel does not list them.
pub(super) fn children_of(pid: u32) -> Option<String> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let children: Vec<&str> = list.split_whitespace().collect();
    let named: Vec<String> = children.iter().take(NAMED).map(|pid| format!("pid {pid}{}", command_of(pid))).collect();
    let more = children.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!named.is_empty()).then(|| named.join(", ") + &more)
}

/// A process's command in brackets; empty if it has ended.
fn command_of(pid: &str) -> String {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    let shown: String = command.trim().escape_debug().take(COMMAND_CHARS).collect();
    if shown.is_empty() { shown } else { format!(" (`{shown}`)") }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio, id};

    use super::*;

    #[test]
    fn children_are_named_with_their_commands() {
        let shell = ["-c", "echo up; read line"];
        let mut child = Command::new("sh").args(shell).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut up = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut up).unwrap();
        // A test has a thread of its own, whose children are not those of the main thread.
        let reported = children_of(id());
        assert!(reported.is_none_or(|reported| reported.contains("pid ")));
        assert_eq!(command_of(&child.id().to_string()), " (`sh -c echo up; read line`)");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(command_of(&child.id().to_string()), "");
        assert_eq!(children_of(child.id()), None);
    }
}
