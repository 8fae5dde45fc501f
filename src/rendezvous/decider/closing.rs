//! When the next round closes, what its world is, and when members are told to re-form. The rules are in [`super::run`].

use std::collections::BTreeMap;
use std::time::Instant;

use super::deadlines::Deadline;
use super::event::Effect;
use super::node::{Node, Status};
use super::ranks;
use super::round::World;
use super::run::Run;
use super::size::nodes;
use crate::events::record::{Kind, Why};
use crate::rendezvous::messages::message::{
    CoordinatorMessage, Generation, JoinWorkers, NodeId, Placement, Resume, Round, Verdict,
};
use crate::rendezvous::messages::settings::LAST_LOOK;

impl Run {
    /// Close the round if it can close, and tell members if the world must re-form.
    pub(super) fn decide(&mut self, now: Instant) {
        self.deadlines.set(Deadline::CloseRound, None);
        self.recovery.end_if_due(now);
        if self.current.closed().is_none() {
            self.rebind(now);
            self.advance(now);
        }
        // A decision is logged with its reason when it changes.
        let standing = self.judge_standing();
        if standing != std::mem::replace(&mut self.standing, standing)
            && let Some(text) = self.standing_text()
        {
            let (next, nodes) = (self.next_round().0, self.roster.waiting().len());
            self.record(Kind::RoundWaits { next, nodes }, None, self.trace.broken(), text);
        }
    }

    fn advance(&mut self, now: Instant) {
        self.end_recall(now);
        self.release_hosts(now);
        if self.close_if_all_done() {
            return;
        }
        self.advance_change(now);
        if self.close_if_out_of_resets() {
            return;
        }
        let enough = self.is_enough();
        let nobody_runs = self.roster.active().is_empty();
        if nobody_runs && enough && self.roster.counts().unreachable == 0 {
            let ready_since = *self.pace.ready_since.get_or_insert(now);
            match self.closing(ready_since) {
                (at, reason) if at <= now => self.complete(&reason, now),
                (at, _) => self.deadlines.set(Deadline::CloseRound, Some(at)),
            }
        } else if !nobody_runs || !enough {
            self.pace.ready_since = None;
        }
        self.tell();
    }

    /// Close the rendezvous if every live member of an undisturbed world has finished. Returns whether it did.
    pub(super) fn close_if_all_done(&mut self) -> bool {
        let done = self.is_all_done();
        if done {
            let nodes = u32::try_from(self.roster.active().len()).unwrap_or(u32::MAX);
            self.close(Verdict::AllDone { round: self.round(), nodes }, self.trace.completed());
        }
        done
    }

    /// Close the rendezvous if the world must change and has changed as often as it may. Returns whether it did.
    fn close_if_out_of_resets(&mut self) -> bool {
        let change = self.in_place.change().map(|change| change.reason.as_str());
        let why = self.current.interrupted().or(change).filter(|_| self.current.world().is_some());
        let Some((limit, why)) = self.settings.rules.reset_limit.zip(why).filter(|_| !self.has_resets_left()) else {
            return false;
        };
        let cause = format!("{why}; no resets left: the world may change {limit} times (reset_limit)");
        let failure = self.current.failure().cloned().map(Box::new);
        self.close(Verdict::Failed { by: "the coordinator".to_owned(), cause, failure }, self.trace.broken());
        true
    }

    /// Whether the world may change once more.
    pub(super) fn has_resets_left(&self) -> bool {
        self.settings.rules.reset_limit.is_none_or(|limit| self.current.resets() < limit)
    }

    /// Stop waiting for members of a world that this coordinator did not form, once all have reported or their time is over.
    fn end_recall(&mut self, now: Instant) {
        let (Some(until), Some(size)) = (self.deadlines.get(Deadline::EndRecall), self.current.size()) else {
            return;
        };
        let (round, reported) = (self.round(), self.reported());
        let all_known = reported + self.gone_count() >= size;
        if reported >= size {
            self.deadlines.set(Deadline::EndRecall, None);
            self.note(format!("all {size} members of round {round} have reported"));
        } else if until <= now {
            self.deadlines.set(Deadline::EndRecall, None);
            if self.is_all_done() {
                return;
            }
            let reason = match self.recovery.gone_rank().filter(|_| all_known) {
                Some(rank) => {
                    format!("node rank {rank} of round {round} has ended with the coordinator that its process hosted")
                }
                None => {
                    let missing = format!("{} of {size} members of round {round}", size - reported);
                    format!("{missing} did not report to the restarted coordinator")
                }
            };
            let late = self.record(Kind::MembersMissing {}, None, None, None);
            self.interrupt(&reason, Why::CoordinatorRestarted, late);
        } else if all_known && until > now + LAST_LOOK {
            // No other member is expected. A member that has finished sends `Done` right after its Hello.
            self.deadlines.set(Deadline::EndRecall, Some(now + LAST_LOOK));
        }
    }

    /// Number of members of the current world that are known to run, or to wait for another round.
    pub(super) fn reported(&self) -> usize {
        self.roster.active().len() + self.roster.counts().returning
    }

    /// Until when no round closes: members of a world that this coordinator did not form may still run, and have not reported.
    pub fn held_until(&self) -> Option<Instant> {
        self.deadlines.get(Deadline::EndRecall).max(self.recovery.strangers_until())
    }

    /// When the next round closes, and why then. Requires that enough wait and no member runs.
    fn closing(&self, ready_since: Instant) -> (Instant, String) {
        let hold_until = self.held_until().unwrap_or(ready_since);
        if let Some(reason) = self.is_full_round() {
            return (ready_since.max(hold_until), reason);
        }
        if let Some(change) = self.in_place.change() {
            return (ready_since.max(hold_until), format!("the world changed in place: {}", change.reason));
        }
        let returning = self.roster.counts().returning;
        if let Some(size) = self.current.size().filter(|_| self.shrinks()) {
            if returning == size {
                return (ready_since, format!("all members of round {} are back", self.round()));
            }
            let settle = self.settings.settle_timeout;
            let settled = (ready_since + settle).max(hold_until);
            let cause = self.current.interrupted().unwrap_or("the world changed");
            return (
                settled,
                format!("settled for {:.1} s (settle_timeout) after this: {cause}", settle.as_secs_f64()),
            );
        }
        let last_call = self.settings.last_call_timeout;
        // Without any member of the last world, the last call is that of a first round.
        let grows = self.current.world().is_some() && returning > 0;
        // A first round's last call begins when enough nodes wait. A growing round's begins with the first newcomer.
        let since = if grows { self.pace.newcomer_since.unwrap_or(ready_since) } else { ready_since };
        ((since + last_call).max(hold_until), format!("the last call of {:.1} s ended", last_call.as_secs_f64()))
    }

    /// Form the next world.
    fn complete(&mut self, why_now: &str, now: Instant) {
        let seats = self.next_members();
        let members: Vec<NodeId> = seats.iter().map(|seat| seat.id).collect();
        let first = members.first().and_then(|id| self.roster.get(*id));
        let rank0 = first.map(|node| node.name.clone());
        let master = first.and_then(|node| Some((self.reachable_addr(node, &members), join(node)?.store_port)));
        let brought: Option<Vec<JoinWorkers>> = seats.iter().map(|seat| seat.workers.clone()).collect();
        let workers = brought.map(|brought| ranks::assign_workers(&brought));
        let round = self.next_round();
        let generation = Generation { round, world: world_id(round, &members) };
        let resume = self.resume_of(&seats, workers.as_deref(), generation);
        let began_with = match resume {
            Resume::Continue { generation, .. } => generation,
            Resume::Restart { .. } => generation,
        };
        if !self.current.has_formed() {
            self.warn_of_shared_machines(&members);
        }
        let survive = members.iter().filter_map(|id| self.roster.get(*id)).any(has_survivors);
        self.roster.begin_round(round, &members);
        let reason = format!("{why_now}{}", self.roster.list(self.roster.active()));
        let world = Kind::RoundCompleted {
            nodes: members.len(),
            workers: workers.as_ref().and_then(|workers| workers.first()).map(|ranks| ranks.world_size),
            rank0,
            in_place: survive,
        };
        let causes = self.trace.broken().or(self.trace.joined());
        let text = format!("round {round} is complete with {}: {reason}", nodes(members.len()));
        self.record(world, None, causes, text);
        if survive {
            self.note(format!("round {round}: {resume}"));
        }
        self.in_place.begin_round(Some(resume));
        self.recovery.add_world(generation.world);
        self.current.form(World {
            id: generation.world,
            size: members.len() as u32,
            master,
            reason,
            members: (0..).zip(members.iter().copied()).collect(),
            restart: self.current.restart(),
            workers,
            claimed_workers: None,
            began_with,
        });
        self.recovery.settle();
        self.admission.hosts_mut().await_loss(None);
        self.deadlines.set(Deadline::EndRecall, None);
        self.deadlines.set(Deadline::CloseRound, None);
        self.pace.ready_since = None;
        self.pace.newcomer_since = (!self.roster.waiting().is_empty()).then_some(now);
        if self.settings.ranks_as_asked {
            // Every member has joined since its last workers ended or left their world, so no earlier connection is needed.
            self.emit(Effect::EmptyStore);
        }
        for (rank, id) in (0..).zip(members) {
            if let Some(session) = self.session(id) {
                self.send_place(session, rank);
            }
        }
    }

    /// Warn of members that run on one machine: most often one agent too many was started there, and each has started the workers of the
    /// whole machine. Agents that a driver has started have their hosts' names, and are meant.
    fn warn_of_shared_machines(&mut self, members: &[NodeId]) {
        let mut machines: BTreeMap<(String, &str), Vec<&Node>> = BTreeMap::new();
        for node in members.iter().filter_map(|id| self.roster.get(*id)).filter(|node| node.host_name.is_none()) {
            let host = node.name.rsplit_once(':').map_or(node.name.as_str(), |(host, _)| host);
            machines.entry((node.addr(), host)).or_default().push(node);
        }
        let shared = machines.into_iter().find(|(_, nodes)| nodes.len() > 1);
        let Some(((addr, host), nodes)) = shared else { return };
        let slots =
            |node: &&Node| join(node).and_then(|join| Some(join.workers.as_ref()?.local_world_size.to_string()));
        let slots: Vec<String> = nodes.iter().take(8).filter_map(slots).collect();
        let workers = if slots.is_empty() { String::new() } else { format!(", with {} workers", slots.join(" + ")) };
        let text = format!(
            "{} agents of this job run on one machine, {addr} ({host}){workers}. If that is not meant, start one agent on each machine, by \
             `srun --ntasks-per-node=1` for example",
            nodes.len()
        );
        self.emit(Effect::Warn(text));
    }

    /// The message that tells a member of the current world its place. `None` if this coordinator did not form the world.
    pub(in crate::rendezvous) fn placement(&self, rank: u32) -> Option<CoordinatorMessage> {
        let world = self.current.world()?;
        let (master_addr, master_port) = world.master.clone()?;
        let node = world.members.get(&rank).and_then(|id| self.roster.get(*id));
        Some(CoordinatorMessage::Complete(Placement {
            round: self.round(),
            rank,
            world_size: world.size,
            world: world.id,
            master_addr,
            master_port,
            reason: world.reason.clone(),
            restart: world.restart,
            workers: world.workers.as_ref().and_then(|workers| workers.get(rank as usize)).copied(),
            host: self.host_seat(),
            local_world_size: self.bounds().and_then(|_| world.local_world_size(rank)),
            resume: self.in_place.resume().filter(|_| node.is_some_and(|node| node.in_place)).cloned(),
            members: None,
        }))
    }

    /// The address under which the other members reach `node`.
    ///
    /// The coordinator may see a node on its own host under a loopback address, which nodes on other hosts cannot use. Then the
    /// address is the one by which another member has reached the coordinator.
    fn reachable_addr(&self, node: &Node, members: &[NodeId]) -> String {
        if node.local_addr.is_none() && node.ends.is_some_and(|ends| ends.peer.is_loopback()) {
            let elsewhere = |id: &NodeId| self.roster.get(*id)?.ends.filter(|ends| !ends.peer.is_loopback());
            if let Some(ends) = members.iter().find_map(elsewhere) {
                return ends.local.to_string();
            }
        }
        node.addr()
    }

    /// Tell members if it has changed whether the world must re-form. Members that change in place are told by that change.
    fn tell(&mut self) {
        // A member that reports to a restarted coordinator, at which others wait already, has not been told.
        let someone_runs = !self.roster.active().is_empty();
        let must_re_form = someone_runs && self.waiting_for_members() > 0 && !self.changes_in_place();
        if !self.current.set_told(must_re_form) {
            return;
        }
        if must_re_form && self.current.interrupted().is_none() {
            let text = format!("members of round {} must stop: {}", self.round(), self.why());
            self.record(Kind::RoundBroken { why: Why::NodesWait }, None, self.first_newcomer(), text);
        } else if someone_runs && self.current.interrupted().is_none() {
            self.record(Kind::RoundGoesOn {}, None, self.trace.broken(), None);
        }
        let message = self.status();
        let sessions: Vec<_> = self.roster.of(self.roster.active()).filter_map(|(_, node)| node.session).collect();
        sessions.into_iter().for_each(|session| self.send(session, message.clone()));
    }

    /// The reason for which the world must re-form.
    pub(in crate::rendezvous) fn why(&self) -> String {
        match self.current.interrupted() {
            Some(reason) => reason.to_owned(),
            None => format!(
                "{}; Detected {} new nodes; will restart worker group", // PyTorch's words
                self.who_waits(),
                self.roster.waiting().len()
            ),
        }
    }

    /// The nodes that wait to join, in words.
    pub(super) fn who_waits(&self) -> String {
        let waiting = self.roster.waiting();
        let count =
            if waiting.len() == 1 { "1 node waits".to_owned() } else { format!("{} nodes wait", waiting.len()) };
        format!("{count} to join{}", self.roster.list(waiting))
    }
}

/// Whether workers of a waiting node have survived the last round.
fn has_survivors(node: &Node) -> bool {
    let workers = join(node).and_then(|join| join.workers.as_ref());
    workers.is_some_and(|workers| !workers.survivors().is_empty())
}

/// The request of a waiting node.
pub(super) fn join(node: &Node) -> Option<&crate::rendezvous::messages::message::Join> {
    match &node.status {
        Status::Waiting { join, .. } => Some(join),
        _ => None,
    }
}

/// Digest (FNV-1a) of a world's round and members. The members' ids are random, so two worlds share a digest only if they have the
/// same members in the same round.
fn world_id(round: Round, members: &[NodeId]) -> u64 {
    let bytes = members.iter().flat_map(|id| id.0.to_le_bytes()).chain(round.0.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
