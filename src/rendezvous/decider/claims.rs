//! What a coordinator takes from a node's word: the settings of a run, and a place in a round that this coordinator did not form.
//!
//! Whoever reaches the port can claim anything, so a claim counts only where it can be true.
//!
//! - **Settings** are those of the first node that takes part, and is there: a node that only says Hello decides nothing, and neither does
//!   one that joined and whose connection has ended. When that node goes while no workers run, they are those of the next one.
//! - **A place** in a world that this coordinator has formed, or was told of before, is checked against the world's id. That is a
//!   digest over random ids, which only members know.
//! - **A place in an unknown world** can be a member's only while this coordinator is *young*: until every node that an earlier life of
//!   it has placed must have reported or stopped its workers, one lease after the run's first Hello. Until then such a claim may restore
//!   the round, unless a world is known here in which nodes run, and may hold up the next round. All claims together hold it up for
//!   two leases at most. Afterwards they restore nothing and hold up nothing.
//! - **A round's number** only moves the numbers of later rounds: members of another life must not take a new round for their own.

use std::time::{Duration, Instant};

use super::admission::disagreement;
use super::members::{note, stand_down};
use super::state::{Node, Run, Status};
use crate::rendezvous::coordinator::machine::Command;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId, Placed, Round};
use crate::rendezvous::protocol::settings::Settings;

/// Largest number of a round in an unknown world. Far above what a job counts, far below where numbers end.
const LARGEST_ROUND: Round = Round(1 << 48);
/// How far a claim of an unknown world moves the numbers of later rounds once this coordinator has formed a world, or is no longer young.
/// Far more than a job counts, and so little that nobody brings them to [`LARGEST_ROUND`], beyond which members of a known world
/// would be refused by the next life of this coordinator.
const LARGEST_STEP: u64 = 1 << 20;
/// For what is on the way when the last lease ends.
const SLACK: Duration = Duration::from_secs(5);
/// Worlds of other lives that are remembered. A run has a few at most.
const MOST_STRANGERS: usize = 100;

impl Run {
    /// The first node has introduced itself.
    pub(in crate::rendezvous) fn be_young(&mut self, now: Instant) {
        self.young_until = Some(now + self.settings.lease() + SLACK);
    }

    /// Whether members of a world that this coordinator does not know may still run.
    pub fn is_young(&self, now: Instant) -> bool {
        self.young_until.is_some_and(|until| now < until)
    }

    /// Whether this coordinator knows the world that a node names.
    pub fn knows_world(&self, placed: &Placed) -> bool {
        self.worlds.contains(&placed.world)
    }

    /// Whether a world that a node names becomes the current one: this coordinator was restarted, and knows of none that runs.
    pub fn takes_up(&self, placed: &Placed, now: Instant) -> bool {
        let none_runs = !self.has_formed() && self.active.is_empty();
        none_runs && self.is_young(now) && !self.knows_world(placed) && placed.round > self.round
    }

    /// The run's settings are another node's. A restart number that was only claimed counts against the budget of those who claimed it.
    pub(in crate::rendezvous) fn adopt(&mut self, settings: &Settings) {
        if settings.max_restarts != self.settings.max_restarts && !self.has_formed() {
            self.restart = 0;
        }
        self.settings = settings.clone();
    }

    /// Whether others have to ask for the same: a node is there that takes part, or a world of this coordinator's runs.
    pub(in crate::rendezvous) fn is_bound(&self) -> bool {
        self.present_count > 0 || (self.has_formed() && !self.active.is_empty())
    }
}

/// Why a claimed place is none that a member of any job has.
pub(in crate::rendezvous) fn impossible(run: Option<&Run>, hello: &Hello) -> Option<String> {
    let placed = hello.placed.filter(|placed| placed.round > LARGEST_ROUND)?;
    let known = run.is_some_and(|run| run.knows_world(&placed));
    (!known).then(|| {
        let (name, round) = (&hello.name, placed.round);
        format!("{name} was last placed in round {round}, which must be at most {LARGEST_ROUND}")
    })
}

/// A node takes part: if no other that is connected does, the run's settings are its own.
pub(in crate::rendezvous) fn bind(
    run: &mut Run,
    id: NodeId,
    settings: &Settings,
    now: Instant,
    out: &mut Vec<Command>,
) {
    if run.present_count == 0 {
        run.bound_to = Some(id);
        apply(run, settings, now, out);
    }
}

/// The node whose settings the run has may have gone: they are those of the first that waits then. Not while workers run: a member that
/// is cut off could not be told of a shorter lease.
pub(in crate::rendezvous) fn bind_to_an_heir(run: &mut Run, now: Instant, out: &mut Vec<Command>) {
    let takes_part = |id| run.nodes.get(&id).is_some_and(|node| node.session.is_some() && node.status != Status::Idle);
    if !run.active.is_empty() || run.bound_to.is_none_or(takes_part) {
        return;
    }
    let arrival = |node: &Node| match node.status {
        Status::Waiting { arrival, .. } if node.session.is_some() => Some(arrival),
        _ => None,
    };
    let waiting = run.waiting.iter().filter_map(|id| run.nodes.get(id).map(|node| (*id, node)));
    let heir = waiting.filter_map(|(id, node)| Some((arrival(node)?, id, &node.asked))).min_by_key(|(at, ..)| *at);
    if let Some((_, id, asked)) = heir {
        let asked = asked.clone();
        run.bound_to = Some(id);
        if asked != run.settings {
            apply(run, &asked, now, out);
        }
    }
}

/// The run's settings are these from now on.
fn apply(run: &mut Run, settings: &Settings, now: Instant, out: &mut Vec<Command>) {
    run.adopt(settings);
    let gone: Vec<_> = run.waiting.iter().copied().filter(|id| disagrees(run, run.nodes.get(id))).collect();
    for id in gone {
        stand_down(run, id, "asks for something else than the nodes that are here, and its connection has ended", out);
        run.remove(id);
    }
    let lease = settings.lease();
    let no_later = |until: Option<Instant>| until.map(|until| until.min(now + lease));
    run.hold_until = no_later(run.hold_until);
    run.strangers_until = no_later(run.strangers_until);
    run.young_until = run.young_until.map(|_| now + lease + SLACK);
    for node in run.nodes.values_mut() {
        node.reconnect_grace = settings.reconnect_grace;
        let told = node.lease == lease && !differ(settings, &node.asked);
        if let Some(session) = node.session.filter(|_| !told) {
            out.push(Command::Send { session, message: terms(settings) });
        }
        node.lease = lease;
    }
    run.check_at = run.nodes.values().map(Node::lost_at).min();
}

fn disagrees(run: &Run, node: Option<&Node>) -> bool {
    node.is_some_and(|node| node.session.is_none() && disagreement(run, &node.name, &node.asked).is_some())
}

/// The settings of the run, for a node that has introduced itself.
pub(in crate::rendezvous) fn apply_terms(run: &Run, node: &mut Node) {
    if run.is_bound() {
        (node.lease, node.reconnect_grace) = (run.settings.lease(), run.settings.reconnect_grace);
    }
}

/// Whether a node of these settings has to be told the run's.
pub(in crate::rendezvous) fn differ(ours: &Settings, theirs: &Settings) -> bool {
    let of = |settings: &Settings| (settings.keep_alive_interval, settings.keep_alive_max_attempt);
    of(ours) != of(theirs)
}

/// What a node has to know whose lease is not the run's.
pub(in crate::rendezvous) fn terms(settings: &Settings) -> CoordinatorMessage {
    let Settings { keep_alive_interval, keep_alive_max_attempt, .. } = *settings;
    CoordinatorMessage::Terms { keep_alive_interval, keep_alive_max_attempt }
}

/// What remains of a claimed place, once the world that it names has been taken up or not.
pub(in crate::rendezvous) fn believe(
    run: &mut Run,
    placed: Placed,
    node: &mut Node,
    hello: &Hello,
    now: Instant,
    out: &mut Vec<Command>,
) {
    if run.knows_world(&placed) {
        if placed.restart > run.restart && !run.has_formed() {
            run.restart = placed.restart;
            let text = format!("{} says that the job is at restart {}, which is taken up", node.label(), run.restart);
            note(run, text, out);
        }
    } else {
        let restarted = run.is_young(now) && !run.has_formed();
        let most = if restarted { LARGEST_ROUND } else { Round(run.next_round().0 + LARGEST_STEP) };
        run.named = run.named.max(placed.round.min(most));
        let named_anew = run.strangers.len() < MOST_STRANGERS && run.strangers.insert(placed.world);
        if run.is_young(now) && (named_anew || placed.active) {
            // Others of that world may run too, and are not known: they are given the time to report. That one of them has
            // stopped says nothing of them.
            run.strangers_until = run.strangers_until.max(Some(now + run.settings.lease()));
        }
    }
    if run.has_seat(hello.node, placed) {
        node.placed = Some((placed.round, placed.rank));
        if placed.active {
            node.status = Status::Active;
        }
    }
}
