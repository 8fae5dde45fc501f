//! Who may come in: settings that fit the run's, one agent to a place, and no host that comes and goes without end.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use super::members::{note, stand_down};
use super::state::{Node, Run, SessionId};
use crate::rendezvous::coordinator::machine::Command;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId};
use crate::rendezvous::protocol::settings::Settings;

/// Why a node may not take part in the run, if it may not.
pub(in crate::rendezvous) fn refusal(run: &Run, hello: &Hello, newer: &Node, now: Instant) -> Option<String> {
    let replaced = run
        .replaced
        .contains(&hello.node)
        .then(|| format!("{} was replaced by a newer agent at the same place ({})", hello.name, newer.addr()));
    replaced
        .or_else(|| disagreement(run, &hello.name, &hello.settings))
        .or_else(|| flapping(run, hello, newer.ends.peer, now))
}

/// Why a node may not take part in a run that others take part in.
pub(in crate::rendezvous) fn disagreement(run: &Run, name: &str, theirs: &Settings) -> Option<String> {
    if !run.is_bound() {
        return None;
    }
    let (ours, id) = (&run.settings, &run.id);
    if (ours.min_nodes, ours.max_nodes) != (theirs.min_nodes, theirs.max_nodes) {
        return Some(format!(
            "{name} asks for {} nodes, but run `{id}` was opened for {}: give every node the same `--nnodes`",
            theirs.node_counts(),
            ours.node_counts()
        ));
    }
    if ours.ranks_as_asked != theirs.ranks_as_asked {
        let ranks = |as_asked| if as_asked { "ranks as --node-rank says" } else { "ranks that the rendezvous gives" };
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

/// A member of a running world has come back to a run that others, who ask for something else, have opened meanwhile: a
/// restarted coordinator has heard of them first. The job that runs goes before. Gives the sessions of those who go.
pub(in crate::rendezvous) fn give_way(
    run: &mut Run,
    hello: &Hello,
    now: Instant,
    out: &mut Vec<Command>,
) -> Vec<SessionId> {
    let member = hello.placed.is_some_and(|placed| placed.active && run.takes_up(&placed, now));
    let agrees = disagreement(run, &hello.name, &hello.settings).is_none();
    if !member || run.world.is_some() || run.closed.is_some() || agrees {
        return Vec::new();
    }
    let counts = hello.settings.node_counts();
    let reason = format!(
        "{} has come back to run `{}`, which runs with {counts} nodes and was opened by nodes that ask for something else: \
         give every node the same `--nnodes`, `--max-restarts`, `restart_budget` and agent",
        hello.name, run.id
    );
    note(run, format!("{} node(s) are sent away: {reason}", run.nodes.len()), out);
    let ids: Vec<_> = run.nodes.keys().copied().collect();
    let mut sessions = Vec::new();
    for id in ids {
        if let Some(session) = run.nodes.get(&id).and_then(|node| node.session) {
            out.push(Command::Send { session, message: CoordinatorMessage::Ended { reason: reason.clone() } });
            out.push(Command::End { session });
            sessions.push(session);
        }
        run.remove(id);
    }
    (run.newcomer_since, run.ready_since) = (None, None);
    sessions
}

/// What makes two agents the same one, started anew: the same address, and there the same rank that the user gave, or else the
/// same name (`host:pid`).
///
/// The address is that of the connection: what a node says of its own (`--local-addr`) is for others to connect to, and proves nothing.
/// An address alone is no identity: several agents may run on one host. Nor is a name: pids repeat in containers that share
/// their host's network and name, which is why `node_rank` goes first, and why agents of one process are never taken for another.
/// Agents on loopback are told apart by their process as well. All of a service mesh's may come from there; and where an agent ends on the
/// coordinator's own host, the kernel has ended its connection too, so none is in the way of the next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::rendezvous) struct Place {
    addr: IpAddr,
    process: Option<u64>,
    who: Who,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Rank(u32),
    Name(String),
}

/// The place of a node.
pub(in crate::rendezvous) fn place_of(node: &Node) -> Place {
    let who = node.node_rank.map_or_else(|| Who::Name(node.name.clone()), Who::Rank);
    let addr = node.ends.peer;
    Place { addr, process: addr.is_loopback().then_some(node.process), who }
}

/// End the session of an agent whose place is another's now: its process was restarted, and the old connection has not ended
/// yet (a pod that was killed with its network). Gives that session, if there was one.
pub(in crate::rendezvous) fn replace_older(
    run: &mut Run,
    id: NodeId,
    newer: &Node,
    out: &mut Vec<Command>,
) -> Option<SessionId> {
    let older = *run.places.get(&place_of(newer)).filter(|older| **older != id)?;
    let node = run.nodes.get(&older).filter(|node| node.process != newer.process)?;
    let (label, session) = (node.label(), node.session);
    let text = format!("{label} is replaced: {} has come from the same place", newer.label());
    note(run, text, out);
    stand_down(run, older, &format!("was replaced by {}, started anew at the same place", newer.name), out);
    run.remove(older);
    run.replaced.insert(older);
    if run.replaced.len() > MOST_REPLACED {
        run.replaced.pop_first();
    }
    let session = session?;
    let reason = format!(
        "another agent ({}) has come from the place of this one ({label}), which is taken to have been restarted: agents that \
         share an address need a `node_rank` each",
        newer.name
    );
    out.push(Command::Send { session, message: CoordinatorMessage::Ended { reason } });
    out.push(Command::End { session });
    Some(session)
}

/// When nodes of each address have interrupted a world by going, as far as that still matters.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Departures(BTreeMap<IpAddr, VecDeque<Instant>>);

impl Departures {
    /// Whether nobody's going is remembered.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A running node of this address is gone.
    pub fn add(&mut self, addr: IpAddr, settings: &Settings, now: Instant) {
        if settings.rejoin_limit == 0 {
            return;
        }
        self.0.retain(|_, times| times.back().is_some_and(|at| now.duration_since(*at) < settings.rejoin_window));
        if self.0.len() >= MOST_ADDRESSES
            && !self.0.contains_key(&addr)
            && let Some(oldest) = self.0.iter().min_by_key(|(_, times)| times.back().copied()).map(|(addr, _)| *addr)
        {
            self.0.remove(&oldest);
        }
        let times = self.0.entry(addr).or_default();
        times.push_back(now);
        while times.len() > settings.rejoin_limit as usize {
            times.pop_front();
        }
    }

    fn within(&self, addr: IpAddr, settings: &Settings, now: Instant) -> usize {
        let recent = |at: &&Instant| now.duration_since(**at) < settings.rejoin_window;
        self.0.get(&addr).map_or(0, |times| times.iter().filter(recent).count())
    }
}

/// Agents that are remembered as replaced: a run has one for each that was started anew.
const MOST_REPLACED: usize = 10_000;
/// Addresses whose departures are remembered.
const MOST_ADDRESSES: usize = 10_000;

/// Why a node may not come back: its host has come and gone too often. A member that runs is never turned away.
fn flapping(run: &Run, hello: &Hello, addr: IpAddr, now: Instant) -> Option<String> {
    let limit = run.settings.rejoin_limit;
    let runs = hello.placed.is_some_and(|placed| placed.active && run.knows_world(&placed));
    let known = runs || run.nodes.contains_key(&hello.node);
    if limit == 0 || known || run.closed.is_some() || run.departures.within(addr, &run.settings, now) < limit as usize {
        return None;
    }
    Some(format!(
        "nodes at {addr} have interrupted the job {limit} times within {:.0?} by going (rejoin_limit, rejoin_window): see why \
         they end, or raise the limit",
        run.settings.rejoin_window
    ))
}
