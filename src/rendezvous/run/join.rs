//! A node introduces itself: it is rejected, comes back, or is new. Then it asks to join the next round.
//!
//! **Settings.** A run uses the settings of the first connected node that takes part, that is, waits or runs. A node that has only
//! sent Hello, or whose connection has ended, does not count. When that node goes while no workers run, the settings of the
//! waiting node that joined next apply.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Run;
use super::event::{CoordinatorInstance, Effect, Reach, SessionId};
use super::hosts::Entry;
use super::node::{Node, Status};
use crate::events::record::{Kind, Why};
use crate::events::tally::{Refused, Tally};
use crate::rendezvous::messages::message::{
    CHECK_WITHIN, CoordinatorMessage, Health, Hello, Join, LARGEST_COUNT, NodeId, Placed, Running, WorldChange,
};
use crate::rendezvous::messages::settings::Settings;

impl Run {
    pub(super) fn on_hello(
        &mut self,
        hello: &Hello,
        session: SessionId,
        reach: Reach,
        instance: Option<CoordinatorInstance>,
        now: Instant,
    ) {
        let newer = Node::new(hello, session, reach, now);
        let impossible = self.parts().impossible(hello, now).map(|reason| (Refused::Invalid, reason));
        if let Some((why, reason)) = impossible.or_else(|| {
            self.give_way(hello, now);
            let replaced = self.admission.is_replaced(hello.node).then(|| {
                let reason =
                    format!("{} was replaced by a newer agent from the same address ({})", hello.name, newer.addr());
                (Refused::Replaced, reason)
            });
            replaced.or_else(|| self.parts().refusal(hello, &newer, now))
        }) {
            self.emit(Effect::Tally(Tally::Refused(why)));
            self.send(session, CoordinatorMessage::Rejected { reason });
            self.emit(Effect::End { session });
            return;
        }
        if self.roster.is_empty() && !self.parts().knows_settings() {
            self.adopt(&hello.settings);
        }
        if self.trace.is_blank() {
            let Settings { min_nodes, max_nodes, max_restarts, .. } = self.settings;
            self.record(Kind::RunOpened { min_nodes, max_nodes, max_restarts }, None, None, None);
        }
        let comes = hello.placed.is_none() && !self.roster.knows(hello.node);
        match self.roster.get(hello.node).map(|node| node.session) {
            Some(old) => {
                let old = old.filter(|old| *old != session).map(|session| Effect::End { session });
                self.readmit(hello, newer);
                old.into_iter().for_each(|effect| self.emit(effect));
            }
            None => {
                self.replace_older(hello.node, &newer);
                self.introduce(hello, newer, instance, now);
            }
        }
        self.record_host(hello, instance);
        self.welcome(hello, session, comes, now);
    }

    /// Add a node that is not in the roster: it is new, or it was given up.
    fn introduce(&mut self, hello: &Hello, mut node: Node, instance: Option<CoordinatorInstance>, now: Instant) {
        if let Some(placed) = hello.placed {
            if self.adopts(&placed, now) {
                self.bind(hello.node, &hello.settings, now);
                self.adopt_world(placed, hello.world_workers, &node, now);
            }
            self.apply_claim(placed, &mut node, hello, now);
            if node.placed.is_some() {
                self.record_former_host(placed, instance);
            }
            node.attending = node.status == Status::Active && hello.attending;
            if node.status == Status::Active && !self.recovery.awaits_members() {
                let reason = format!("{} came back after it had been given up", node.label());
                let back = self.record(Kind::NodeCameBack {}, Some(&node.name), None, None);
                self.interrupt(&reason, Why::NodeCameBack, back);
            }
        }
        self.apply_terms(&mut node);
        self.admission.register(hello.node, &node);
        self.roster.insert(hello.node, node);
    }

    /// Update a node that has reconnected. It keeps its rank or its turn, unless its Hello shows that it neither waits nor runs.
    fn readmit(&mut self, hello: &Hello, mut newer: Node) {
        self.apply_terms(&mut newer);
        if let Some(known) = self.roster.get(hello.node) {
            let Node {
                placed,
                done,
                out,
                unchecked,
                rechecks,
                phases_reported,
                first_step_reported,
                joined_at,
                gone_at,
                ..
            } = *known;
            let (status, program) = (known.status.clone(), known.program.clone());
            let attends = status == Status::Active && placed == hello.placed.map(|last| (last.round, last.rank));
            let attending = known.attending || (attends && hello.attending);
            let node = Node {
                status,
                placed,
                done,
                attending,
                out,
                unchecked,
                rechecks,
                phases_reported,
                first_step_reported,
                program,
                joined_at,
                gone_at,
                ..newer
            };
            self.admission.register_again(hello.node, Some(known), &node);
            self.roster.insert(hello.node, node);
        }
        let runs = hello.placed.is_some_and(|placed| placed.active && placed.round == self.round());
        if !hello.joining && !runs {
            self.withdraw(hello.node, "gave up its place", Why::NodeWithdrew, None);
        }
    }

    /// Answer a Hello with everything that the node may have missed while it was not connected.
    /// `comes`: it is new, and was in no round.
    fn welcome(&mut self, hello: &Hello, session: SessionId, comes: bool, now: Instant) {
        let Some(node) = self.roster.get(hello.node) else { return };
        let (addr, active, spare) = (node.addr(), node.status == Status::Active, self.parts().is_spare(node));
        let (new, at_coordinator) = (hello.placed.is_none() && !hello.joining && node.in_place, node.ends.is_some());
        let running = self.running().filter(|_| new);
        let formed_here = self.current.world().is_some_and(|world| world.master.is_some());
        let was_placed = hello.placed.is_some() && at_coordinator && !formed_here;
        let wants_replay = was_placed && self.trace.asks(hello.node);
        let hosted = self.is_host(hello.node);
        self.send(session, CoordinatorMessage::Welcome { addr, hosted, running, wants_replay });
        if self.parts().is_bound() && differ(&self.settings, &hello.settings) {
            self.send(session, terms(&self.settings));
        }
        if let Some(verdict) = self.current.closed().cloned() {
            let ago = self.closed_at.map(|at| now.saturating_duration_since(at));
            self.send(
                session,
                match comes {
                    true => CoordinatorMessage::Over { verdict, ago },
                    false => CoordinatorMessage::Closed { verdict, spare },
                },
            );
        } else if active {
            self.send(session, self.status());
            self.repeat_change(hello.node, session);
        } else if let Some(placed) = hello.placed.filter(|placed| placed.active) {
            let (round, last) = (self.round(), placed.round);
            let reason = format!("round {round} formed without this node, and round {last}, its last, is over");
            self.send(session, self.over(reason));
        }
    }

    /// Notify a member that has reconnected of the change.
    fn repeat_change(&mut self, id: NodeId, session: SessionId) {
        let capable = self.roster.get(id).is_some_and(|node| node.in_place);
        let Some(change) = self.in_place.change().filter(|_| capable) else { return };
        let (flags, reason, round) = (change.flags, change.reason.clone(), self.round());
        self.send(session, CoordinatorMessage::Change(WorldChange { round, flags, reason }));
        if let Some(check) = self.in_place.check() {
            self.send(session, CoordinatorMessage::RaiseAt { round, check });
        }
    }

    /// The world that runs, if a newcomer may start its workers before it joins.
    fn running(&self) -> Option<Running> {
        let parts = self.parts();
        let settled = parts.changes_in_place() && self.in_place.is_without_group();
        let world = self.current.world().filter(|_| settled)?;
        let (master_addr, master_port) = world.master.clone()?;
        let workers = world.workers.as_ref()?.first()?.world_size;
        let room = parts.bounds().map(|bounds| bounds.max.saturating_sub(workers));
        Some(Running {
            round: self.round(),
            world: world.id,
            nodes: world.size,
            workers,
            room: room.filter(|room| *room > 0),
            master_addr,
            master_port,
            restart: world.restart,
        })
    }

    /// Reject a node that has introduced itself before.
    pub(super) fn refuse(&mut self, session: SessionId, why: Refused, reason: String) {
        self.emit(Effect::Tally(Tally::Refused(why)));
        self.end(session, reason);
    }

    /// Reject the present nodes if a member of a running world reports and they ask for other settings. They reached a restarted
    /// coordinator before that member did, and the running job takes precedence.
    fn give_way(&mut self, hello: &Hello, now: Instant) {
        let member = hello.placed.is_some_and(|placed| placed.active && self.adopts(&placed, now));
        let agrees = self.parts().disagreement(&hello.name, &hello.settings).is_none();
        if !member || self.current.world().is_some() || self.current.closed().is_some() || agrees {
            return;
        }
        let counts = hello.settings.node_counts();
        let reason = format!(
            "{} is in a running world of run `{}` with {counts} nodes, and nodes that ask for other settings are rejected: \
             give every node the same `--nnodes`, `--max-restarts`, `restart_budget` and agent",
            hello.name, self.id
        );
        let ids = self.roster.ids();
        self.record(Kind::NodeRefused {}, None, None, format!("{} node(s) rejected: {reason}", ids.len()));
        for id in ids {
            if let Some(session) = self.session(id) {
                self.refuse(session, Refused::Settings, reason.clone());
            }
            self.remove(id);
        }
        self.pace = super::round::Pace::default();
    }

    /// Replace an agent by a newer one with the same identity. The older agent is assumed dead, and its connection has not ended yet: a
    /// pod was killed together with its network, for example.
    fn replace_older(&mut self, id: NodeId, newer: &Node) {
        let Some(older) = self.admission.holder(id, newer) else { return };
        let Some(node) = self.roster.get(older).filter(|node| node.process != newer.process) else { return };
        let (label, session) = (node.label(), node.session);
        let by = newer.name.clone();
        let text = format!("is replaced: {} registered from the same address", newer.label());
        let replaced = self.record_of(older, Kind::NodeReplaced { by }, None, text);
        let what = format!("was replaced by {}, which registered from the same address", newer.name);
        self.withdraw(older, &what, Why::NodeReplaced, Some(replaced));
        self.remove(older);
        self.admission.replace(older);
        if let Some(session) = session {
            let reason = format!(
                "agent `{}` registered from the same address, so this one ({label}) is assumed dead: give two agents on \
                 one address distinct `node_rank`s",
                newer.name
            );
            self.refuse(session, Refused::Replaced, reason);
        }
    }

    /// Replace the run's settings. If the budget of restarts changes, a restart number that was only claimed is dropped: it was
    /// counted against another budget.
    fn adopt(&mut self, settings: &Settings) {
        if settings.max_restarts != self.settings.max_restarts && !self.current.has_formed() {
            self.current.set_restart(0);
        }
        self.settings = settings.clone();
    }

    /// Use a joining node's settings for the run, if no connected node waits or runs.
    pub(super) fn bind(&mut self, id: NodeId, settings: &Settings, now: Instant) {
        if self.roster.counts().present == 0 && !self.parts().knows_settings() {
            self.admission.bind_to(id);
            self.apply_settings(settings, now);
        }
    }

    /// If the node that gave the run its settings is gone, use those of the connected node that has waited longest.
    ///
    /// Not while workers run: a member that is cut off could not be notified of a shorter lease.
    pub(super) fn rebind(&mut self, now: Instant) {
        let takes_part =
            |id| self.roster.get(id).is_some_and(|node| node.session.is_some() && node.status != Status::Idle);
        if !self.roster.active().is_empty() || self.admission.bound_to().is_none_or(takes_part) {
            return;
        }
        let arrival = |node: &Node| match node.status {
            Status::Waiting { arrival, .. } if node.session.is_some() => Some(arrival),
            _ => None,
        };
        let waiting = self.roster.of(self.roster.waiting());
        let first = waiting.filter_map(|(id, node)| Some((arrival(node)?, id, &node.asked))).min_by_key(|(at, ..)| *at);
        if let Some((_, id, asked)) = first {
            let asked = asked.clone();
            self.admission.bind_to(id);
            if asked != self.settings {
                self.apply_settings(&asked, now);
            }
        }
    }

    /// Use these settings for the run, notify connected nodes, and drop disconnected ones that ask for others.
    fn apply_settings(&mut self, settings: &Settings, now: Instant) {
        self.adopt(settings);
        let disagrees =
            |node: &Node| node.session.is_none() && self.parts().disagreement(&node.name, &node.asked).is_some();
        let waiting = self.roster.of(self.roster.waiting());
        let gone: Vec<_> = waiting.filter(|(_, node)| disagrees(node)).map(|(id, _)| id).collect();
        for id in gone {
            let what = "asks for other settings than the connected nodes, and its connection has ended";
            self.withdraw(id, what, Why::NodeWithdrew, None);
            self.remove(id);
        }
        let lease = settings.lease();
        self.recovery.set_lease(lease, now);
        let knows = |node: &Node| node.lease == lease && !differ(settings, &node.asked);
        let others: Vec<_> =
            self.roster.iter().filter(|(_, node)| !knows(node)).filter_map(|(_, node)| node.session).collect();
        others.into_iter().for_each(|session| self.send(session, terms(settings)));
        self.roster.set_limits(lease, settings.reconnect_grace);
    }

    /// Give a node the run's lease and grace, if the run's settings are fixed.
    fn apply_terms(&self, node: &mut Node) {
        if self.parts().is_bound() {
            (node.lease, node.reconnect_grace) = (self.settings.lease(), self.settings.reconnect_grace);
        }
    }

    /// Adopt the world that a node claims, and wait one lease for its other members to report. This coordinator was restarted.
    fn adopt_world(&mut self, placed: Placed, workers: Option<u32>, node: &Node, now: Instant) {
        let lease = self.settings.lease();
        let text = format!(
            "{} was placed in round {} of {} nodes, which this coordinator does not know: it was restarted, and waits \
             {:.1} s for the other members",
            node.label(),
            placed.round,
            placed.world_size,
            lease.as_secs_f64()
        );
        self.record(Kind::CoordinatorRestarted { reported: placed.round.0 }, Some(&node.name), None, text);
        let until = now + lease;
        let over = self.roster.adopt_round(placed.round);
        self.recovery.add_world(placed.world);
        if !over.is_empty() {
            // These nodes are notified below, and stop. A node that is cut off stops by itself within its lease.
            self.recovery.hold_for_unknown_worlds(until);
        }
        self.current.adopt(&placed, workers);
        self.pace.ready_since = None;
        let open = self.current.closed().is_none();
        self.recovery.await_members(open.then_some(until));
        self.recovery.forget_host();
        self.in_place.begin_round(None, BTreeSet::new());
        for session in over {
            let message = self.over(format!("round {} formed without this node", placed.round));
            self.send(session, message);
        }
    }

    /// Evaluate a claim to a rank, after the claimed world was adopted or not: give the node the rank if the claim can be true.
    fn apply_claim(&mut self, placed: Placed, node: &mut Node, hello: &Hello, now: Instant) {
        let formed = self.current.has_formed();
        if !self.knows_world(&placed) {
            self.recovery.record_claim(&placed, self.settings.lease(), now);
        } else if placed.restart > self.current.restart() && !formed {
            self.current.set_restart(placed.restart);
            let (label, restart) = (node.label(), placed.restart);
            self.note(format!("{label} reports that the job is at restart {restart}, which this coordinator adopts"));
        }
        if self.current.has_rank(hello.node, placed, self.round()) {
            node.placed = Some((placed.round, placed.rank));
            self.recovery.on_back(placed.rank);
            if placed.active {
                node.status = Status::Active;
            }
        }
    }

    /// A node asks to join.
    pub(super) fn on_join(&mut self, id: NodeId, session: SessionId, join: Join, now: Instant) {
        if let Some(verdict) = self.current.closed().cloned() {
            return self.send(session, CoordinatorMessage::Closed { verdict, spare: false });
        }
        if let Err(reason) = join.validate() {
            return self.refuse(session, Refused::Invalid, reason);
        }
        if self.entry(id, now) == Entry::Never {
            return self.evict(id, session, now);
        }
        self.take_join(id, session, join, now);
        if self.roster.get(id).is_some_and(|node| self.parts().is_spare(node)) {
            let waits = self.roster.get(id).and_then(|node| self.parts().waits(node, now));
            waits.into_iter().for_each(|waits| self.send(session, CoordinatorMessage::Waits(waits)));
        }
    }

    /// What is known of the host of a node that asks to join.
    fn entry(&self, id: NodeId, now: Instant) -> Entry {
        self.roster.get(id).map_or(Entry::Open, |node| self.hosts.entry(node, now))
    }

    fn take_join(&mut self, id: NodeId, session: SessionId, join: Join, now: Instant) {
        let Some(node) = self.roster.get(id) else { return };
        let asked = node.asked.clone();
        if let Some(reason) = self.parts().disagreement(&node.name, &asked) {
            // The node said Hello before the run's settings were fixed.
            return self.refuse(session, Refused::Settings, reason);
        }
        if let Some(reason) = self.parts().another_job(id, &join, now) {
            let name = node.name.clone();
            self.record(Kind::NodeRefused {}, Some(&name), None, reason.clone());
            return self.refuse(session, Refused::Settings, reason);
        }
        self.bind(id, &asked, now);
        self.roster.set_program(id, &join, self.parts().has_no_name().then_some(now));
        let Some(node) = self.roster.get(id) else { return };
        let (name, label, address) = (node.name.clone(), node.label(), node.addr());
        let workers = join.workers.as_ref().map(|workers| workers.local_world_size);
        if self.parts().bounds().is_some() && join.workers.is_none() {
            let reason = format!(
                "run `{}` counts workers (min_workers, max_workers), and the agent of {label} does not report how many it has: it is \
                 PyTorch's (`--rdzv-conf agent=torch`)",
                self.id
            );
            return self.refuse(session, Refused::Settings, reason);
        }
        let member = self.roster.last_rank(node).is_some();
        // Only members can have stopped for a change of this world.
        let check = join.workers.as_ref().and_then(|workers| workers.check).filter(|_| member);
        let check = check.map(|check| check.min(LARGEST_COUNT));
        // The workers of an idle member have ended before this coordinator was started, or its session with them.
        let stops_alone = node.status == Status::Active || (member && check.is_none());
        let mut arrival = None;
        match (&node.status, node.placed) {
            // This join belongs to a completed round. The completion was lost with the connection that it was sent on.
            (Status::Active, Some((round, rank))) if join.round < round => {
                if self.send_assignment(session, rank) {
                    // The node took itself for waiting, and ignored the status pushed since then. Send it again.
                    return self.send(session, self.status());
                }
            }
            // A check that this coordinator has not sent is that of an earlier one, whose change it begins again.
            (Status::Active, _) if check.is_some() && self.in_place.check().is_none_or(|sent| Some(sent) == check) => {
                self.in_place.someone_has_stopped(now);
            }
            (Status::Active | Status::Idle, _) if stops_alone => {
                // A member that was notified to re-form is not the cause.
                let notified = self.current.notified();
                let reason = if notified { self.parts().why() } else { format!("{label} restarts its workers") };
                let broken = self.trace.broken().filter(|_| notified);
                let asks = broken.unwrap_or_else(|| self.record(Kind::NodeCameBack {}, Some(&name), None, None));
                self.interrupt(&reason, Why::NodeCameBack, asks);
            }
            (Status::Waiting { arrival: first, .. }, _) => arrival = Some(*first),
            (Status::Active | Status::Idle, _) => {}
        }
        let next = self.roster.next_arrival();
        let join = self.judge_health(id, join, now);
        let checks = join.health == Health::Checking;
        let ill = matches!(join.health, Health::Ill(_));
        self.roster.set_status(id, Status::Waiting { join, arrival: arrival.unwrap_or(next) });
        self.in_place.stop_at(id, check);
        let out = self.entry(id, now) != Entry::Open || ill;
        self.roster.set_out(id, out);
        self.roster.set_check(id, checks.then(|| now + CHECK_WITHIN));
        self.leave_out_unchecked(now);
        let new = self.roster.get(id).is_some_and(|node| self.roster.last_rank(node).is_none());
        if new && !out {
            self.pace.newcomer_since.get_or_insert(now);
        }
        if arrival.is_none() {
            let verb = if new { "joined" } else { "is back" };
            let cause = self.trace.broken().filter(|_| !new);
            let text = format!("{label} {verb} ({})", self.parts().known_text());
            let joined = self.record(Kind::NodeJoined { address, workers, new }, Some(&name), cause, text);
            self.trace.on_joined(id, joined);
        }
    }
}

/// Whether a node with settings `theirs` must be notified of the run's lease.
fn differ(ours: &Settings, theirs: &Settings) -> bool {
    let of = |settings: &Settings| (settings.keep_alive_interval, settings.keep_alive_max_attempt);
    of(ours) != of(theirs)
}

/// The message by which a node gets the run's lease.
fn terms(settings: &Settings) -> CoordinatorMessage {
    let Settings { keep_alive_interval, keep_alive_max_attempt, .. } = *settings;
    CoordinatorMessage::Terms { keep_alive_interval, keep_alive_max_attempt }
}
