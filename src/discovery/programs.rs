//! Starts the driver's programs: `ssh`, agents on this machine, and discovery scripts. Counts the descriptors that agents need.
//!
//! A program begins as if a shell had started it, with the limit of descriptors that this process was started with. It leads a session of
//! its own, so a terminal's Ctrl-C is the driver's, and `ssh` cannot ask anybody.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::process::{Child, Command, Stdio};

use crate::open_files;
use crate::processes::{Life, start_session};

/// Descriptors that the driver holds for each agent: its three streams, its pidfd, and its session with the coordinator.
const OF_AN_AGENT: u64 = 5;
/// How many agents' programs are started at the same time.
pub(super) const STARTED_AT_ONCE: usize = 16;
/// Descriptors that one more start takes until the program runs: the other ends of its streams, and a pipe for the error of `exec`.
const OF_A_START: u64 = 5;
/// Descriptors for everything else: a discovery script, connections that have not proved themselves, requests over HTTP.
const OF_OTHERS: u64 = 64;

/// Starts a program.
///
/// # Errors
/// It cannot be run.
pub fn start(command: &[OsString], stdin: Stdio, stdout: Stdio, stderr: Stdio) -> io::Result<Child> {
    let (program, args) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut made = Command::new(program);
    made.args(args).stdin(stdin).stdout(stdout).stderr(stderr);
    start_session(&mut made, open_files::limit_of_workers(), Life::Own)
}

/// How many descriptors this process may have, and how many it needs without agents. While it lives, the limit is raised.
#[derive(Debug)]
pub(super) struct Descriptors {
    limit: u64,
    without_agents: u64,
    /// The soft limit before.
    before: Option<u64>,
}

impl Descriptors {
    /// Raises this process's soft limit of descriptors to its hard limit.
    pub(super) fn raise() -> Self {
        let (before, now) = open_files::set_soft_limit(|limit| limit.maximum);
        let open = fs::read_dir("/proc/self/fd").map_or(OF_OTHERS, |open| open.count() as u64);
        let without_agents = open + OF_OTHERS + STARTED_AT_ONCE as u64 * OF_A_START;
        Self { limit: now.unwrap_or(u64::MAX), without_agents, before }
    }

    /// Why there cannot be an agent on each of so many hosts, in words.
    pub(super) fn why_too_many(&self, hosts: usize) -> Option<String> {
        let needed = self.without_agents + OF_AN_AGENT * hosts as u64;
        (needed > self.limit).then(|| {
            format!(
                "it names {hosts} hosts, for which the driver needs {needed} descriptors; its limit is {} (`ulimit -Hn`)",
                self.limit
            )
        })
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let before = self.before;
        open_files::set_soft_limit(|_| before);
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn too_many_hosts_are_refused_with_the_number_of_descriptors() {
        let descriptors = Descriptors { limit: 1024, without_agents: 174, before: Some(1024) };
        assert_eq!(descriptors.why_too_many(170), None);
        assert_eq!(
            descriptors.why_too_many(171).unwrap(),
            "it names 171 hosts, for which the driver needs 1029 descriptors; its limit is 1024 (`ulimit -Hn`)"
        );
    }

    /// This test changes the limit of its process, which `cargo nextest` gives to it alone.
    #[test]
    fn a_driver_may_have_as_many_descriptors_as_the_hard_limit_and_its_programs_as_before() {
        let before = getrlimit(Resource::Nofile);
        let soft = before.maximum.unwrap_or(u64::MAX).min(256);
        let low = Rlimit { current: Some(soft), ..before };
        setrlimit(Resource::Nofile, low).unwrap();
        let raised = Descriptors::raise();
        assert_eq!(getrlimit(Resource::Nofile).current, before.maximum);
        let command = ["sh", "-c", "ulimit -Sn; grep SigBlk /proc/self/status"].map(OsString::from);
        let output = start(&command, Stdio::null(), Stdio::piped(), Stdio::null()).unwrap().wait_with_output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{soft}\nSigBlk:\t0000000000000000\n"));
        drop(raised);
        assert_eq!(getrlimit(Resource::Nofile), low);
        setrlimit(Resource::Nofile, before).unwrap();
    }
}
