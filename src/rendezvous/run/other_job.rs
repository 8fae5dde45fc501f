//! A node of another job, which has come because neither job was given a name.
//!
//! Jobs without `--rdzv-id` all have the run id [`DEFAULT_RUN_ID`]. At one endpoint they would be one run: a second job would wait as a
//! spare of the first one, or would become a part of it. Such a node is refused. Arguments are not compared, since nodes of one job may
//! have different ones. In a run whose id was given, nobody is refused here: its nodes say that they belong together.

use std::time::Instant;

use super::Run;
use super::durable::CELL_SESSION;
use super::node::{Node, Status};
use crate::rendezvous::messages::message::{Join, NodeId};
use crate::wire::text::{DEFAULT_RUN_ID, in_words};

impl Run {
    /// Whether the nodes of this run may belong to different jobs.
    pub(super) fn has_no_name(&self) -> bool {
        self.id == DEFAULT_RUN_ID
    }

    /// Why a node that asks to join is refused, if it belongs to another job than the nodes that are here.
    pub(in crate::rendezvous) fn another_job(&self, id: NodeId, join: &Join, now: Instant) -> Option<String> {
        let node = self.roster.get(id).filter(|node| node.placed.is_none() && join.round.0 == 0)?;
        if !self.has_no_name() || self.current.closed().is_some() {
            return None;
        }
        let takes_part =
            |other: &Node| other.session.is_some() && matches!(other.status, Status::Waiting { .. } | Status::Active);
        let mut others =
            self.roster.iter().filter(|(other, node)| *other != id && takes_part(node)).map(|(_, node)| node);
        let (role, script) = join.workers.as_ref().map(|workers| (&workers.role, workers.script.as_deref())).unzip();
        let script = script.flatten();
        let differs = |other: &Node| {
            other.program.as_ref().is_some_and(|its| {
                Some(&its.role) == role && its.script.as_deref().zip(script).is_some_and(|(its, ours)| its != ours)
            })
        };
        // Over a cell nobody sees that a node has died, before its lease ends. One with the same script may be this one, started again.
        let is_seen = |other: &Node| other.session.is_some_and(|session| session != CELL_SESSION);
        let takes_one = self.settings.max_nodes == 1;
        let other = others.find(|other| differs(other) || takes_one && is_seen(other))?;
        let why = if takes_one { "takes 1 node (--nnodes)".to_owned() } else { format!("does not run `{}`", script?) };
        Some(format!(
            "{} belongs to another job than {}: that job {why}, and neither has a --rdzv-id. Give each job a --rdzv-id of its own. (In \
             a job that has one, a node too many waits as a spare.)",
            node.label(),
            describe(other, now)
        ))
    }

    /// What to add to a refusal because of other settings: they may be those of another job.
    pub(super) fn perhaps_another_job(&self, now: Instant) -> Option<String> {
        let other =
            self.roster.iter().map(|(_, node)| node).find(|node| node.program.is_some() && node.session.is_some());
        let other = other.filter(|_| self.has_no_name())?;
        Some(format!(
            ". Or these are two jobs, that of {}, and this one, and neither has a --rdzv-id: give each one of its own",
            describe(other, now)
        ))
    }
}

/// A node of the job that is here, with its script and its age.
fn describe(node: &Node, now: Instant) -> String {
    let script = node
        .program
        .as_ref()
        .and_then(|program| program.script.as_deref())
        .map_or_else(String::new, |script| format!(", which runs `{script}`"));
    let joined = node.joined_at.map(|at| format!(" and came {} ago", in_words(now.saturating_duration_since(at))));
    format!("{}{script}{}", node.label(), joined.unwrap_or_default())
}
