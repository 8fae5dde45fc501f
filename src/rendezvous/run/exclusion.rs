//! Hosts are put out of the job for their failures, and let in again. [`super::hosts`] keeps what is remembered of them.
//!
//! A node of a host that is out for a while may join, and waits: no round counts it until the time is over. A host that is out for the job
//! gets no node in. Members of a running world are not sent away. The failure that put their host out has interrupted the world, and they
//! meet the rule when they join again.

use std::time::Instant;

use super::Run;
use super::deadlines::Deadline;
use super::event::{Effect, SessionId};
use super::hosts::{Exclusion, Judged};
use super::node::{Node, Origin, Status};
use crate::events::record::{Kind, Why};
use crate::events::tally::Refused;
use crate::rendezvous::messages::message::{Hello, NodeId};

impl Run {
    /// The hosts that are kept out of the job, because of their failures or departures.
    pub fn exclusions(&self, now: Instant) -> Vec<Exclusion> {
        self.admission.hosts().exclusions(&self.settings, now)
    }

    /// Whether a node waits until its host is let in again.
    pub fn is_out(&self, id: NodeId) -> bool {
        self.roster.get(id).is_some_and(Node::is_kept_out)
    }

    /// Count a departure against the node's host, if the node ran workers.
    pub(super) fn count_departure(&mut self, id: NodeId, now: Instant) {
        let open = self.current.closed().is_none();
        let running = self.roster.get(id).filter(|node| open && node.status == Status::Active && !node.done);
        let Some(origin) = running.map(Node::origin) else { return };
        self.admission.hosts_mut().depart(&origin, &self.settings, now);
        if self.admission.hosts().refusal(&origin, &self.settings, now).is_some() {
            self.emit(Effect::Exclusions);
        }
    }

    /// Whether the loss of a member is the first failure of its round, and its host's alone: members of other hosts are connected.
    pub(super) fn is_first_failure(&self, id: NodeId) -> bool {
        let Some(node) = self.roster.get(id).filter(|node| node.status == Status::Active && !node.done) else {
            return false;
        };
        let undisturbed = self.current.interrupted().is_none() && !self.current.told();
        let explains = self.admission.hosts().is_awaited(id);
        let origin = node.origin();
        let is_there = |node: &Node| node.session.is_some() && !node.suspect;
        let mut others = self.roster.of(self.roster.active()).filter(|(other, _)| *other != id);
        (undisturbed || explains)
            && self.current.closed().is_none()
            && others.all(|(_, other)| is_there(other) || other.origin() == origin)
    }

    /// Count a round's first failure against a host: that of the worker with this rank, or of a node that was lost.
    pub(super) fn strike(&mut self, origin: &Origin, rank: Option<u32>, now: Instant) {
        let judged = self.admission.hosts_mut().strike(origin, rank, &self.settings, now);
        let limit = self.settings.rules.host_failures;
        match judged {
            Judged::Ignored => {}
            Judged::Counted(count) => {
                let text = format!("host {origin} has had {count} of {limit} first failures (host_failures)");
                let host = origin.to_string();
                self.record(Kind::HostFailed { host, count, limit }, None, self.trace.broken(), text);
            }
            Judged::Worker { freed } => {
                let rank = rank.unwrap_or_default();
                self.note(format!(
                    "rank {rank} fails first on several hosts, so its failures count against none of them (host_failures)"
                ));
                self.let_in(&freed, now);
            }
            Judged::Out => {
                let text = self.admission.hosts().out_text(origin, now);
                self.record(Kind::HostOut { host: origin.to_string() }, None, self.trace.broken(), text);
                self.apply_exclusions(now);
            }
        }
    }

    /// Let hosts in again whose time is over.
    pub(super) fn release_hosts(&mut self, now: Instant) {
        if self.deadlines.get(Deadline::LetIn).is_some_and(|at| at <= now) {
            let over = self.admission.hosts_mut().release(now);
            self.let_in(&over, now);
        }
    }

    fn let_in(&mut self, hosts: &[Origin], now: Instant) {
        for origin in hosts {
            let text = format!("host {origin} is let in again (host_failures)");
            self.record(Kind::HostLetIn { host: origin.to_string() }, None, None, text);
        }
        if !hosts.is_empty() {
            self.apply_exclusions(now);
        }
    }

    /// Apply the exclusions to the nodes that wait.
    fn apply_exclusions(&mut self, now: Instant) {
        for id in self.roster.ids() {
            let Some(node) = self.roster.get(id).filter(|node| matches!(node.status, Status::Waiting { .. })) else {
                continue;
            };
            match (self.admission.hosts().out_until(&node.origin(), now), node.session) {
                (Some(None), Some(session)) => self.turn_out(id, session, now),
                (until, _) => self.keep_out(id, until.is_some(), now),
            }
        }
        self.deadlines.set(Deadline::LetIn, self.admission.hosts().next_release());
        self.emit(Effect::Exclusions);
    }

    /// Record whether a waiting node's host is out.
    fn keep_out(&mut self, id: NodeId, out: bool, now: Instant) {
        if self.roster.get(id).is_none_or(|node| node.out == out) {
            return;
        }
        self.roster.set_out(id, out);
        let new = self.roster.get(id).is_some_and(|node| self.roster.last_rank(node).is_none());
        if !out && new {
            self.pace.newcomer_since.get_or_insert(now);
        }
    }

    /// End the session of a node whose host is out for the job.
    fn turn_out(&mut self, id: NodeId, session: SessionId, now: Instant) {
        let Some(origin) = self.roster.get(id).map(Node::origin) else { return };
        let Some((why, reason)) = self.admission.hosts().refusal(&origin, &self.settings, now) else { return };
        self.stand_down(id, "is sent away: its host is out for the job", Why::NodeWithdrew, None);
        self.remove(id);
        self.refuse(session, why, reason);
    }

    /// A node joins: send it away if its host is out for the job. Returns whether it did.
    pub(super) fn turns_out(&mut self, id: NodeId, session: SessionId, now: Instant) -> bool {
        let origin = self.roster.get(id).map(Node::origin);
        let out = origin.is_some_and(|origin| self.admission.hosts().out_until(&origin, now) == Some(None));
        if out {
            self.turn_out(id, session, now);
        }
        out
    }

    /// Whether this node's host is out for a while.
    pub(super) fn must_stay_out(&self, id: NodeId, now: Instant) -> bool {
        let origin = self.roster.get(id).map(Node::origin);
        origin.is_some_and(|origin| self.admission.hosts().out_until(&origin, now).is_some())
    }

    /// Decide whether a node may come in. Returns the reason if not: its host is out for the job, or nodes of it left the running job too
    /// often. A running member is never rejected.
    pub(super) fn kept_out(&self, hello: &Hello, newer: &Node, now: Instant) -> Option<(Refused, String)> {
        let runs = hello.placed.is_some_and(|placed| placed.active && self.knows_world(&placed));
        let exempt = runs || self.knows(hello.node) || self.current.closed().is_some();
        if exempt { None } else { self.admission.hosts().refusal(&newer.origin(), &self.settings, now) }
    }
}
