//! What follows when a node introduces itself: it is refused, comes back to its place, or is new.
//!
//! **Settings** are those of the first node that takes part, and is there: a node that only says Hello decides nothing, and neither
//! does one that joined and whose connection has ended. When that node goes while no workers run, they are those of the next one.

use std::time::Instant;

use super::deadlines::Deadline;
use super::event::{Effect, Home, Reach, SessionId};
use super::node::{Node, Status};
use super::recovery::LARGEST_ROUND;
use super::run::Run;
use crate::rendezvous::protocol::capability::Capabilities;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId, Placed};
use crate::rendezvous::protocol::settings::Settings;

impl Run {
    pub(super) fn on_hello(
        &mut self,
        hello: &Hello,
        session: SessionId,
        reach: Reach,
        home: Option<Home>,
        now: Instant,
    ) {
        let newer = Node::new(hello, session, reach, now);
        if let Some(reason) = self.impossible(hello).or_else(|| {
            self.give_way(hello, now);
            self.refusal(hello, &newer, now)
        }) {
            self.send(session, CoordinatorMessage::Rejected { reason });
            self.emit(Effect::End { session });
            return;
        }
        if self.roster.is_empty() {
            self.adopt(&hello.settings);
        }
        match self.roster.get(hello.node).map(|node| node.session) {
            Some(old) => {
                let old = old.filter(|old| *old != session).map(|session| Effect::End { session });
                self.readmit(hello, newer);
                old.into_iter().for_each(|effect| self.emit(effect));
            }
            None => {
                self.replace_older(hello.node, &newer);
                self.introduce(hello, newer, home, now);
            }
        }
        self.meet_host(hello, home);
        self.welcome(hello, session);
        self.lose_no_later(hello.node);
    }

    /// Take in a node never heard of, or one that was given up.
    fn introduce(&mut self, hello: &Hello, mut node: Node, home: Option<Home>, now: Instant) {
        if let Some(placed) = hello.placed {
            if self.takes_up(&placed, now) {
                self.bind(hello.node, &hello.settings, now);
                self.recall(placed, &node, now);
            }
            self.believe(placed, &mut node, hello, now);
            if node.placed.is_some() {
                self.hear_of_host(placed, home);
            }
            if node.status == Status::Active && !self.recalls() {
                self.interrupt(&format!("{} came back after it had been given up", node.label()));
            }
        }
        self.apply_terms(&mut node);
        self.admission.seat(hello.node, &node);
        self.roster.insert(hello.node, node);
    }

    /// A node that was not given up has come back: it keeps its place, unless it says itself that it gave it up.
    fn readmit(&mut self, hello: &Hello, mut newer: Node) {
        self.apply_terms(&mut newer);
        if let Some(known) = self.roster.get(hello.node) {
            let node = Node { status: known.status.clone(), placed: known.placed, done: known.done, ..newer };
            self.admission.reseat(hello.node, Some(known), &node);
            self.roster.insert(hello.node, node);
        }
        let runs = hello.placed.is_some_and(|placed| placed.active && placed.round == self.round());
        if !hello.joining && !runs {
            self.stand_down(hello.node, "gave up its place");
        }
    }

    /// Tell a node that has introduced itself all that it may have missed, whatever was sent on an earlier connection.
    fn welcome(&mut self, hello: &Hello, session: SessionId) {
        let Some(node) = self.roster.get(hello.node) else { return };
        let (addr, active, spare) = (node.addr(), node.status == Status::Active, self.is_spare(node));
        self.send(
            session,
            CoordinatorMessage::Welcome {
                addr,
                hosted: self.is_host(hello.node),
                capabilities: Capabilities::default(),
            },
        );
        if self.is_bound() && differ(&self.settings, &hello.settings) {
            self.send(session, terms(&self.settings));
        }
        if let Some(verdict) = self.current.closed().cloned() {
            self.send(session, CoordinatorMessage::Closed { verdict, spare });
        } else if active {
            self.send(session, self.status());
        } else if let Some(placed) = hello.placed.filter(|placed| placed.active) {
            let (round, last) = (self.round(), placed.round);
            let reason = format!("round {round} formed without this node, whose round {last} is over");
            self.send(session, self.over(reason));
        }
    }

    /// Why a claimed place is none that a member of any job has.
    fn impossible(&self, hello: &Hello) -> Option<String> {
        let placed = hello.placed.filter(|placed| placed.round > LARGEST_ROUND)?;
        (!self.knows_world(&placed)).then(|| {
            let (name, round) = (&hello.name, placed.round);
            format!("{name} was last placed in round {round}, which must be at most {LARGEST_ROUND}")
        })
    }

    /// Why a node may not take part in the run, if it may not.
    fn refusal(&self, hello: &Hello, newer: &Node, now: Instant) -> Option<String> {
        let replaced = self
            .admission
            .is_replaced(hello.node)
            .then(|| format!("{} was replaced by a newer agent at the same place ({})", hello.name, newer.addr()));
        replaced
            .or_else(|| self.disagreement(&hello.name, &hello.settings))
            .or_else(|| self.flapping(hello, newer, now))
    }

    /// Why a node may not take part in a run that others take part in.
    pub(super) fn disagreement(&self, name: &str, theirs: &Settings) -> Option<String> {
        if !self.is_bound() {
            return None;
        }
        let (ours, id) = (&self.settings, &self.id);
        if (ours.min_nodes, ours.max_nodes) != (theirs.min_nodes, theirs.max_nodes) {
            return Some(format!(
                "{name} asks for {} nodes, but run `{id}` was opened for {}: give every node the same `--nnodes`",
                theirs.node_counts(),
                ours.node_counts()
            ));
        }
        if ours.ranks_as_asked != theirs.ranks_as_asked {
            let ranks =
                |as_asked| if as_asked { "ranks as --node-rank says" } else { "ranks that the rendezvous gives" };
            let (theirs, ours) = (ranks(theirs.ranks_as_asked), ranks(ours.ranks_as_asked));
            return Some(format!(
                "{name} asks for {theirs}, but run `{id}` was opened for {ours}: give every node the same `--rdzv-backend`"
            ));
        }
        (ours.max_restarts != theirs.max_restarts).then(|| {
            let budget = |restarts: Option<u32>| match restarts {
                Some(restarts) => format!("{restarts} restarts of the job"),
                None => "restarts counted by each node".to_owned(),
            };
            format!(
                "{name} asks for {}, but run `{id}` was opened for {}: give every node the same `--max-restarts`, \
                 `restart_budget` and agent",
                budget(theirs.max_restarts),
                budget(ours.max_restarts)
            )
        })
    }

    /// Why a node may not come back: its host has come and gone too often. A member that runs is never turned away.
    fn flapping(&self, hello: &Hello, newer: &Node, now: Instant) -> Option<String> {
        let (limit, origin) = (self.settings.rejoin_limit, newer.origin());
        let runs = hello.placed.is_some_and(|placed| placed.active && self.knows_world(&placed));
        let exempt = limit == 0 || runs || self.knows(hello.node) || self.current.closed().is_some();
        if exempt || self.admission.departures().recent(&origin, &self.settings, now) < limit as usize {
            return None;
        }
        Some(format!(
            "nodes at {origin} have interrupted the job {limit} times within {:.0?} by going (rejoin_limit, rejoin_window): see \
             why they end, or raise the limit",
            self.settings.rejoin_window
        ))
    }

    /// A member of a running world has come back to a run that others, who ask for something else, have opened meanwhile: a
    /// restarted coordinator has heard of them first. The job that runs goes before: the others are sent away.
    fn give_way(&mut self, hello: &Hello, now: Instant) {
        let member = hello.placed.is_some_and(|placed| placed.active && self.takes_up(&placed, now));
        let agrees = self.disagreement(&hello.name, &hello.settings).is_none();
        if !member || self.current.world().is_some() || self.current.closed().is_some() || agrees {
            return;
        }
        let counts = hello.settings.node_counts();
        let reason = format!(
            "{} has come back to run `{}`, which runs with {counts} nodes and was opened by nodes that ask for something \
             else: give every node the same `--nnodes`, `--max-restarts`, `restart_budget` and agent",
            hello.name, self.id
        );
        let ids = self.roster.ids();
        self.note(format!("{} node(s) are sent away: {reason}", ids.len()));
        for id in ids {
            if let Some(session) = self.session(id) {
                self.end(session, reason.clone());
            }
            self.remove(id);
        }
        self.pace = super::round::Pace::default();
    }

    /// End the session of an agent whose place is another's now: its process was restarted, and the old connection has not ended
    /// yet (a pod that was killed with its network).
    fn replace_older(&mut self, id: NodeId, newer: &Node) {
        let Some(older) = self.admission.holder(id, newer) else { return };
        let Some(node) = self.roster.get(older).filter(|node| node.process != newer.process) else { return };
        let (label, session) = (node.label(), node.session);
        self.note(format!("{label} is replaced: {} has come from the same place", newer.label()));
        self.stand_down(older, &format!("was replaced by {}, started anew at the same place", newer.name));
        self.remove(older);
        self.admission.replace(older);
        if let Some(session) = session {
            let reason = format!(
                "another agent ({}) has come from the place of this one ({label}), which is taken to have been restarted: \
                 agents that share an address need a `node_rank` each",
                newer.name
            );
            self.end(session, reason);
        }
    }

    /// The run's settings are another node's. A restart number that was only claimed counts against the budget of those who claimed it.
    fn adopt(&mut self, settings: &Settings) {
        if settings.max_restarts != self.settings.max_restarts && !self.current.has_formed() {
            self.current.set_restart(0);
        }
        self.settings = settings.clone();
    }

    /// A node takes part: if no other that is connected does, the run's settings are its own.
    pub(super) fn bind(&mut self, id: NodeId, settings: &Settings, now: Instant) {
        if self.roster.counts().present == 0 {
            self.admission.bind_to(id);
            self.apply_settings(settings, now);
        }
    }

    /// The node whose settings the run has may have gone: they are those of the first that waits then. Not while workers run: a
    /// member that is cut off could not be told of a shorter lease.
    pub(super) fn bind_to_an_heir(&mut self, now: Instant) {
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
        let heir = waiting.filter_map(|(id, node)| Some((arrival(node)?, id, &node.asked))).min_by_key(|(at, ..)| *at);
        if let Some((_, id, asked)) = heir {
            let asked = asked.clone();
            self.admission.bind_to(id);
            if asked != self.settings {
                self.apply_settings(&asked, now);
            }
        }
    }

    /// The run's settings are these from now on.
    fn apply_settings(&mut self, settings: &Settings, now: Instant) {
        self.adopt(settings);
        let disagrees = |node: &Node| node.session.is_none() && self.disagreement(&node.name, &node.asked).is_some();
        let waiting = self.roster.of(self.roster.waiting());
        let gone: Vec<_> = waiting.filter(|(_, node)| disagrees(node)).map(|(id, _)| id).collect();
        for id in gone {
            self.stand_down(id, "asks for something else than the nodes that are here, and its connection has ended");
            self.remove(id);
        }
        let lease = settings.lease();
        self.recovery.shorten(lease, now);
        if self.recalls() {
            self.deadlines.no_later(Deadline::EndRecall, Some(now + lease));
        }
        let told = |node: &Node| node.lease == lease && !differ(settings, &node.asked);
        let untold: Vec<_> =
            self.roster.iter().filter(|(_, node)| !told(node)).filter_map(|(_, node)| node.session).collect();
        untold.into_iter().for_each(|session| self.send(session, terms(settings)));
        self.roster.set_limits(lease, settings.reconnect_grace);
        self.deadlines.set(Deadline::LoseNode, self.roster.next_lost_at());
    }

    /// The settings of the run, for a node that has introduced itself.
    fn apply_terms(&self, node: &mut Node) {
        if self.is_bound() {
            (node.lease, node.reconnect_grace) = (self.settings.lease(), self.settings.reconnect_grace);
        }
    }

    /// A node knows of a round that this coordinator does not: it was restarted, and takes up what its nodes report.
    fn recall(&mut self, placed: Placed, node: &Node, now: Instant) {
        let lease = self.settings.lease();
        self.note(format!(
            "{} was placed in round {} of {} nodes, of which this coordinator knows nothing: it was restarted, and waits \
             {:.1} s for the others",
            node.label(),
            placed.round,
            placed.world_size,
            lease.as_secs_f64()
        ));
        let until = now + lease;
        let over = self.roster.take_up_round(placed.round);
        self.recovery.know(placed.world);
        if !over.is_empty() {
            // They are told, and stop; those who cannot be told find out for themselves within their lease.
            self.recovery.hold_for_strangers(until);
        }
        self.current.take_up(&placed);
        self.pace.ready_since = None;
        let open = self.current.closed().is_none();
        self.deadlines.set(Deadline::EndRecall, open.then_some(until));
        self.recovery.forget_host();
        for session in over {
            let message = self.over(format!("round {} formed without this node", placed.round));
            self.send(session, message);
        }
    }

    /// What remains of a claimed place, once the world that it names has been taken up or not.
    fn believe(&mut self, placed: Placed, node: &mut Node, hello: &Hello, now: Instant) {
        let formed = self.current.has_formed();
        if !self.knows_world(&placed) {
            self.recovery.meet_stranger(&placed, !formed, self.next_round(), self.settings.lease(), now);
        } else if placed.restart > self.current.restart() && !formed {
            self.current.set_restart(placed.restart);
            let (label, restart) = (node.label(), placed.restart);
            self.note(format!("{label} says that the job is at restart {restart}, which is taken up"));
        }
        if self.current.has_seat(hello.node, placed, self.round()) {
            node.placed = Some((placed.round, placed.rank));
            if placed.active {
                node.status = Status::Active;
            }
        }
    }
}

/// Whether a node of these settings has to be told the run's.
fn differ(ours: &Settings, theirs: &Settings) -> bool {
    let of = |settings: &Settings| (settings.keep_alive_interval, settings.keep_alive_max_attempt);
    of(ours) != of(theirs)
}

/// What a node has to know whose lease is not the run's.
fn terms(settings: &Settings) -> CoordinatorMessage {
    let Settings { keep_alive_interval, keep_alive_max_attempt, .. } = *settings;
    CoordinatorMessage::Terms { keep_alive_interval, keep_alive_max_attempt }
}
