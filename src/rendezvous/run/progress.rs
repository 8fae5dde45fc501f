//! The decision about the next round in words, for the log, for nodes that wait, and for observers.
//!
//! The run updates its decision ([`Standing`]) after every event, and logs it when it changes. Waiting nodes receive [`Parts::progress`].

use std::collections::BTreeSet;
use std::time::Instant;

use serde::Serialize;

use super::budget::Left;
use super::node::{Node, Status};
use super::parts::Parts;
use super::standing::{Activity, Standing};
use super::telemetry::{Interruptions, Trace};
use crate::rendezvous::messages::message::{Verdict, Waits};
use crate::wire::text::cut;

impl Parts<'_> {
    /// Determine the decision from the current state.
    pub(super) fn judge_standing(self) -> Standing {
        match () {
            () if self.current.closed().is_some() => Standing::Closed,
            () if self.roster.is_empty() => Standing::Vacant,
            () if self.recovery.awaits_members() => Standing::Recovering,
            () if self.held_growth().is_some() => Standing::Holding,
            () if !self.roster.active().is_empty() && self.waiting_for_members() == 0 => Standing::Undisturbed,
            () if !self.roster.active().is_empty() && self.changes_in_place() => Standing::Changing,
            () if !self.roster.active().is_empty() => Standing::Reforming,
            () if !self.is_enough() => Standing::Gathering,
            () if self.roster.counts().unreachable > 0 => Standing::Reconnecting,
            () if self.closes_at.is_some() && self.closes_at == self.recovery.unknown_worlds_until() => {
                Standing::Fencing
            }
            () if self.closes_at.is_some() && self.closes_at == self.checks_until() => Standing::Checking,
            () if self.closes_at.is_some() && self.closes_at == self.pace.paused_until => Standing::Pausing,
            () if self.shrinks() => Standing::Settling,
            () => Standing::LastCall,
        }
    }

    /// The decision and its reason, for the log.
    pub(super) fn standing_text(self, standing: Standing) -> Option<String> {
        let waiting = self.roster.waiting().len();
        match standing {
            // The event that led to each of these was logged already.
            Standing::Vacant
            | Standing::Closed
            | Standing::Recovering
            | Standing::Undisturbed
            | Standing::Reforming => None,
            Standing::Changing if self.in_place.is_changing() => None,
            Standing::Changing => Some(format!(
                "round {} runs on until the last call of those that want to join ends (last_call_timeout): {}",
                self.round(),
                self.who_waits()
            )),
            Standing::Holding => {
                Some(format!("round {} runs on, though {}: {}", self.round(), self.who_waits(), standing.holds_up()?))
            }
            Standing::Gathering => Some(format!(
                "round {} has {}{}",
                self.next_round(),
                self.gathering_text(),
                self.roster.list(self.roster.waiting())
            )),
            _ => {
                let why = standing.holds_up()?;
                Some(format!("round {} could form with {waiting} nodes, but {why}", self.next_round()))
            }
        }
    }

    /// The progress for a node that waits for the next round, or has finished and waits for the others to finish.
    pub(super) fn waits(self, node: &Node, now: Instant) -> Option<Waits> {
        match node.status {
            Status::Waiting { .. } => {
                let out = self.hosts.out_text(&node.origin(), now).filter(|_| node.out);
                let progress = self.progress(now);
                let progress = match out {
                    Some(out) => format!("{out}; {progress}"),
                    None => progress,
                };
                Some(Waits { progress, spare: self.is_spare(node) })
            }
            Status::Active if node.done => {
                let (done, all) = (self.roster.counts().done, self.roster.active().len());
                let have = if done == 1 { "has" } else { "have" };
                let still = self.roster.list(self.roster.unfinished());
                let progress = format!("{done} of {all} nodes {have} finished; still at work{still}");
                Some(Waits { progress, spare: false })
            }
            Status::Active | Status::Idle => None,
        }
    }

    /// Describe the next round: which nodes have joined, how many are missing, why it does not close, and when it will.
    pub(super) fn progress(self, now: Instant) -> String {
        let (waiting, active) = (self.roster.waiting(), self.roster.active());
        let mut text = format!("round {}: {}{}", self.next_round(), self.joined_text(), self.roster.list(waiting));
        if !active.is_empty() {
            let (running, round) = (active.len(), self.round());
            if self.waiting_for_members() == 0 {
                text += &format!("; round {round} runs undisturbed (nodes: {running})");
            } else if self.changes_in_place() {
                text += &format!("; round {round} runs on until its workers stop together (nodes: {running})");
            } else {
                text += &format!("; {running} still to come back from round {round}{}", self.roster.list(active));
            }
        }
        let unchecked =
            self.roster.checks().keys().filter(|id| self.roster.get(**id).is_some_and(|node| node.unchecked));
        let unchecked: BTreeSet<_> = unchecked.copied().collect();
        if !unchecked.is_empty() {
            text += &format!("; left out until their health checks have ended{}", self.roster.list(&unchecked));
        }
        if let Some(needed) = self.needed_text() {
            text += &format!("; {needed}");
        }
        if let Some(out) = self.hosts.describe(now) {
            text += &format!("; {out}");
        }
        if let Some(reason) = self.current.interrupted() {
            text += &format!("; re-forming because {reason}");
        }
        if let Some(at) = self.held_growth() {
            text += &format!("; no node can join for {:.1} s", at.saturating_duration_since(now).as_secs_f64());
        } else if let Some(at) = self.in_place.due_at().filter(|_| !self.in_place.is_changing()) {
            let left = at.saturating_duration_since(now).as_secs_f64();
            text += &format!("; more nodes may join for {left:.1} s (last_call_timeout)");
        }
        if let Some(at) = self.closes_at {
            text += &format!("; closes within {:.1} s", at.saturating_duration_since(now).as_secs_f64());
        }
        if let Some(why) = self.standing.holds_up() {
            text += &format!(": {why}");
        }
        text
    }
}

/// Most nodes that a state names of each kind.
const NAMED: usize = 16;
/// Longest text of a state, in bytes. JSON writes some characters with up to six.
const TEXT_BYTES: usize = 1500;
/// Longest name of a node in a state, in bytes.
const NAME_BYTES: usize = 64;

/// The state of a run. Fields are only added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunState {
    /// The run's id.
    pub run: String,
    /// What the next round waits for, or whether the world runs.
    pub state: Activity,
    /// Number of the last round that completed. 0: none has.
    pub round: u64,
    /// Number of failures that were counted against the job's budget.
    pub restart: u32,
    /// That budget. `None`: each node counts its own.
    pub max_restarts: Option<u32>,
    /// What is left of it, if it slides (`restart_window`).
    pub budget: Option<Left>,
    /// How often a running world was interrupted, by kind.
    pub interruptions: Interruptions,
    /// Fewest nodes of a world.
    pub min_nodes: u32,
    /// Most nodes of a world.
    pub max_nodes: u32,
    /// Number of nodes that run workers.
    pub running: usize,
    /// How many of them have finished.
    pub finished: usize,
    /// Number of workers of the current world, if every member reports it.
    pub workers: Option<u32>,
    /// Number of nodes that wait for the next round.
    pub waiting: usize,
    /// Names of the first of them.
    pub waiting_names: Vec<String>,
    /// Names of the first nodes whose connection has ended, and that may come back.
    pub unreachable_names: Vec<String>,
    /// How far the next round is, in words.
    pub progress: String,
    /// How the job ended, in words, if it has.
    pub verdict: Option<String>,
    /// Whether it has failed, if it has ended.
    pub failed: bool,
    /// Number of the last step of training, when somebody last wanted to know it in this round.
    pub step: Option<u64>,
    /// Mean time of a step in this round until then, in microseconds.
    pub step_time_us: Option<u64>,
    /// Names of the members that are behind the others, and by how many steps: most first. Known while somebody watches.
    pub behind: Vec<(String, u64)>,
    /// Workers that use `elastic_rs.elastic` are restarted when the world changes, because their process groups use NCCL and `in_place`
    /// is not `nccl`. As rank 0's node has reported when somebody last wanted to know the step.
    pub restarts_for_nccl: bool,
}

impl RunState {
    /// The state of a run.
    pub(super) fn of(parts: Parts, trace: &Trace, budget: Option<Left>, now: Instant) -> Self {
        let watch = trace.watch();
        let counts = parts.roster.counts();
        let names = |which: &mut dyn Iterator<Item = &Node>| {
            which.take(NAMED).map(|node| cut(node.name.clone(), NAME_BYTES)).collect::<Vec<_>>()
        };
        let unreachable = parts.roster.iter().map(|(_, node)| node).filter(|node| node.session.is_none());
        let verdict = parts.current.closed();
        Self {
            run: parts.id.to_owned(),
            state: parts.standing.activity(),
            round: parts.round().0,
            restart: parts.current.restart(),
            max_restarts: parts.settings.max_restarts,
            budget,
            interruptions: trace.interruptions(),
            min_nodes: parts.settings.min_nodes,
            max_nodes: parts.settings.max_nodes,
            running: parts.roster.active().len(),
            finished: counts.done,
            workers: parts.current.world().and_then(|world| world.worker_count()),
            waiting: parts.roster.waiting().len(),
            waiting_names: names(&mut parts.roster.of(parts.roster.waiting()).map(|(_, node)| node)),
            unreachable_names: names(&mut unreachable.into_iter()),
            progress: cut(parts.progress(now), TEXT_BYTES),
            verdict: verdict.map(|verdict| cut(verdict.to_string(), TEXT_BYTES)),
            failed: verdict.is_some_and(Verdict::is_failure),
            step: watch.step,
            step_time_us: watch.step_time_us,
            behind: watch
                .behind(parts.roster, NAMED)
                .into_iter()
                .map(|(name, by)| (cut(name.to_owned(), NAME_BYTES), by))
                .collect(),
            restarts_for_nccl: watch.restarts_for_nccl,
        }
    }
}
