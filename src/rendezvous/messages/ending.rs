//! How a worker failed, and how a job ended.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::Round;
use crate::events::record::Exit;
use crate::wire::text::tidy;

/// A worker's failure. Every node names it as the cause when the job restarts or ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The node of the worker. The coordinator fills it in.
    pub node: String,
    /// The worker's role.
    pub role: String,
    /// The worker's rank on its node.
    pub local_rank: u32,
    /// The worker's rank in the job.
    pub global_rank: u32,
    /// Its process id there.
    pub pid: u32,
    /// How it ended: `exit code 3`, `SIGKILL`.
    pub exit: String,
    /// PyTorch's number for it: the exit code, or the signal's number negated. 1 for a failure without either, such as a program
    /// that could not be started. [`STILL_ALIVE`]: it has not ended.
    pub returncode: i32,
    /// The first lines of the worker's words, if there are any.
    pub message: String,
    /// Whether a restart after it counts against the job's budget.
    pub counts: bool,
    /// How long the node's workers had run in their world. Zero if not all of them had been started.
    pub lived: Duration,
    /// The last step in that world of the node's worker that was furthest, up to [`LARGEST_STEP`](super::message::LARGEST_STEP), if the
    /// training script says where it is.
    pub step: Option<u64>,
}

/// The returncode of a worker that has left its world on purpose, and lives. Its `exit` is the type of the exception that it has raised.
pub const STILL_ALIVE: i32 = 0;

impl Failure {
    /// For tests: exit code 3 of the only worker.
    #[cfg(test)]
    pub(crate) fn example(node: &str) -> Self {
        Self {
            node: node.into(),
            role: "default".into(),
            local_rank: 0,
            global_rank: 0,
            pid: 1,
            exit: "exit code 3".into(),
            returncode: 3,
            message: String::new(),
            counts: true,
            lived: Duration::from_secs(60),
            step: None,
        }
    }

    /// What follows from this failure, if `reason` begins with it. The coordinator's reasons do.
    pub(crate) fn rest_of<'a>(&self, reason: &'a str) -> Option<&'a str> {
        let rest = reason.strip_prefix(&self.to_string())?;
        if rest.is_empty() { Some(rest) } else { rest.strip_prefix("; ") }
    }

    /// As events have it. `first`: others of its round are its consequences. `counts`: it counts against the job's budget.
    pub(in crate::rendezvous) fn exit(&self, first: bool, counts: bool) -> Box<Exit> {
        Box::new(Exit {
            rank: self.global_rank,
            local_rank: self.local_rank,
            role: self.role.clone(),
            pid: self.pid,
            exit: self.exit.clone(),
            returncode: self.returncode,
            message: self.message.lines().next().unwrap_or_default().to_owned(),
            first,
            counts,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, role, local_rank, global_rank, pid, exit, returncode, message, .. } = self;
        let ended = if *returncode == STILL_ALIVE { "left its world with" } else { "ended with" };
        // Until the coordinator has filled it in.
        let node = if node.is_empty() { "this node" } else { node };
        write!(f, "rank {global_rank} (local rank {local_rank}, role {role}, pid {pid}) on {node} {ended} {exit}")?;
        match message.lines().find(|line| !line.trim().is_empty()) {
            // A worker's words may contain anything until the coordinator has cleaned them, and this becomes a line of a log.
            Some(line) => write!(f, ": {}", tidy(line)),
            None => Ok(()),
        }
    }
}

/// Whose fault it was that a job failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndClass {
    /// The program's: it would fail again.
    Program,
    /// A machine's, or the network's.
    Machine,
    /// The machine was taken back.
    Preempted,
    /// The job was restarted in vain.
    NoProgress,
}

impl EndClass {
    /// The word for it, in events, on pages and in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Machine => "machine",
            Self::Preempted => "preempted",
            Self::NoProgress => "no progress",
        }
    }
}

impl fmt::Display for EndClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The workers finished.
    Succeeded {
        /// The node that reported it.
        by: String,
    },
    /// A failure for which no restart is left: all nodes stop.
    Failed {
        /// The node that reported it.
        by: String,
        /// The cause, in words.
        cause: String,
        /// The failure, if a node reported it.
        failure: Option<Box<Failure>>,
        /// Whose fault it was.
        class: EndClass,
    },
    /// The workers of all live members succeeded.
    AllDone {
        /// The round.
        round: Round,
        /// Number of its members.
        nodes: u32,
    },
    /// A person ended the job on the node that hosts the coordinator (Ctrl-C). No node can go on without it.
    Stopped {
        /// The node.
        by: String,
        /// The cause, in words.
        cause: String,
    },
}

impl Verdict {
    /// Whether the job has failed, or was ended before it could succeed.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Stopped { .. })
    }

    /// Whose fault it was, if the job has failed and was not ended by a person.
    pub fn class(&self) -> Option<EndClass> {
        match self {
            Self::Failed { class, .. } => Some(*class),
            Self::Succeeded { .. } | Self::AllDone { .. } | Self::Stopped { .. } => None,
        }
    }

    /// The round that it names.
    pub fn round(&self) -> Option<Round> {
        match self {
            Self::AllDone { round, .. } => Some(*round),
            Self::Succeeded { .. } | Self::Failed { .. } | Self::Stopped { .. } => None,
        }
    }

    /// The global rank of the worker whose failure is the cause.
    pub fn rank(&self) -> Option<u32> {
        match self {
            Self::Failed { failure, .. } => failure.as_ref().map(|failure| failure.global_rank),
            Self::Succeeded { .. } | Self::AllDone { .. } | Self::Stopped { .. } => None,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Succeeded { by } => write!(f, "closed by {by}"),
            Self::Failed { by, cause, .. } => write!(f, "closed by {by} after a failure: {cause}"),
            Self::AllDone { round, nodes: 1 } => write!(f, "closed: the node of round {round} has finished"),
            Self::AllDone { round, nodes } => {
                write!(f, "closed: all {nodes} live nodes of round {round} have finished")
            }
            Self::Stopped { by, cause } => write!(f, "ended by {by}: {cause}"),
        }
    }
}
