//! Admission of nodes: one agent to an address and rank or name, the node that gave the run its settings, and the nodes that are refused.
//!
//! **Nodes of another job.** Jobs without `--rdzv-id` all have the run id [`DEFAULT_RUN_ID`]. At one endpoint they would be one run: a
//! second job would wait as a spare of the first one, or would become a part of it. A node of such a job is refused. Arguments are not
//! compared, since nodes of one job may have different ones. In a run whose id was given, nobody is refused for that: its nodes say that
//! they belong together.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::durable::CELL_SESSION;
use super::node::{Node, Status};
use super::parts::Parts;
use crate::events::tally::Refused;
use crate::rendezvous::messages::message::{Hello, Join, NodeId};
use crate::rendezvous::messages::settings::{Settings, codes_text};
use crate::wire::text::{DEFAULT_RUN_ID, duration_text};

/// Number of replaced agents that are remembered. The ones that were replaced first are forgotten first.
const MOST_REPLACED: usize = 10_000;

/// The state of admission.
#[derive(Clone, Debug, Default)]
pub(in crate::rendezvous) struct Admission {
    /// The node with each identity, to recognise a restarted agent.
    holders: BTreeMap<Identity, NodeId>,
    /// Agents that a newer agent has replaced. They may not come back.
    replaced: BTreeSet<NodeId>,
    /// The same in the order in which they were replaced.
    in_order: VecDeque<NodeId>,
    /// The node that gave the run its settings.
    bound_to: Option<NodeId>,
}

impl Admission {
    /// Whether no replaced agent is remembered.
    pub fn is_blank(&self) -> bool {
        self.replaced.is_empty()
    }

    /// Register a node under its identity, even if another node holds it.
    pub fn register(&mut self, id: NodeId, node: &Node) {
        self.holders.insert(Identity::of(node), id);
    }

    /// Register a reconnected node under its identity, which may have changed. It gets none that another node holds.
    pub fn register_again(&mut self, id: NodeId, before: Option<&Node>, node: &Node) {
        self.release(id, before);
        self.holders.entry(Identity::of(node)).or_insert(id);
    }

    /// Free a node's identity.
    pub fn release(&mut self, id: NodeId, node: Option<&Node>) {
        if let Some(its) = node.map(Identity::of).filter(|its| self.holders.get(its) == Some(&id)) {
            self.holders.remove(&its);
        }
    }

    /// The other node that holds this node's identity.
    pub fn holder(&self, id: NodeId, newer: &Node) -> Option<NodeId> {
        self.holders.get(&Identity::of(newer)).copied().filter(|older| *older != id)
    }

    /// Record that a newer agent has replaced this one.
    pub fn replace(&mut self, id: NodeId) {
        if self.replaced.insert(id) {
            self.in_order.push_back(id);
        }
        if self.in_order.len() > MOST_REPLACED
            && let Some(first) = self.in_order.pop_front()
        {
            self.replaced.remove(&first);
        }
    }

    /// Whether a newer agent has replaced this one.
    pub fn is_replaced(&self, id: NodeId) -> bool {
        self.replaced.contains(&id)
    }

    /// The node that gave the run its settings.
    pub fn bound_to(&self) -> Option<NodeId> {
        self.bound_to
    }

    /// Record that this node gave the run its settings.
    pub fn bind_to(&mut self, id: NodeId) {
        self.bound_to = Some(id);
    }
}

/// The identity by which a restarted agent is recognised: its address, and there its `node_rank`, or without one its name (`host:pid`).
///
/// - The address is the connection's. `--local-addr` is only for others to connect to, and proves nothing.
/// - The address alone is not enough, because several agents may run on one host.
/// - Names repeat in containers that share their host's network and name, because pids repeat there. So `node_rank` comes first.
/// - On loopback, and over a shared cell, the process is part of it. All connections of a service mesh may come from loopback.
///   If an agent on the coordinator's own host ends, the kernel ends its connection too, so its successor finds the identity free.
///
/// `docs/decisions/0033-a-restarted-agent-takes-the-place-of-its-older-self.md` has the alternatives.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Identity {
    addr: Option<IpAddr>,
    process: Option<u64>,
    agent: Agent,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Agent {
    Rank(u32),
    Name(String),
}

impl Identity {
    fn of(node: &Node) -> Self {
        let agent = node.node_rank.map_or_else(|| Agent::Name(node.name.clone()), Agent::Rank);
        let addr = node.ends.map(|ends| ends.peer);
        Self { addr, process: addr.is_none_or(|addr| addr.is_loopback()).then_some(node.process), agent }
    }
}

impl Parts<'_> {
    /// Check a claim to a rank. Returns the error if its round number is above the largest that is believed.
    pub(super) fn impossible(self, hello: &Hello, now: Instant) -> Option<String> {
        let placed = hello.placed.filter(|placed| !self.recovery.knows_world(placed))?;
        let most = self.recovery.largest_claim(!self.current.has_formed(), self.next_round(), now);
        (placed.round > most).then(|| {
            let (name, round) = (&hello.name, placed.round);
            format!("{name} reports a place in round {round}, which must be at most {most}: start this agent again")
        })
    }

    /// Decide whether a node may take part in the run. Returns the reason if not.
    pub(super) fn refusal(self, hello: &Hello, newer: &Node, now: Instant) -> Option<(Refused, String)> {
        let disagreement = || {
            let mut reason = self.disagreement(&hello.name, &hello.settings)?;
            reason.extend(self.perhaps_another_job(now));
            Some((Refused::Settings, reason))
        };
        disagreement().or_else(|| self.kept_out(hello, newer, now))
    }

    /// Decide whether a node may come in. Returns the reason if not: its host is out for the job, or nodes of it left the running job too
    /// often. A running member is never rejected.
    fn kept_out(self, hello: &Hello, newer: &Node, now: Instant) -> Option<(Refused, String)> {
        let runs = hello.placed.is_some_and(|placed| placed.active && self.recovery.knows_world(&placed));
        let exempt = runs || self.roster.knows(hello.node) || self.current.closed().is_some();
        if exempt { None } else { self.hosts.refusal(&newer.origin(), self.settings, now) }
    }

    /// Compare a node's settings with the run's. Returns the difference if the run's settings are fixed and the node's do not fit.
    pub(super) fn disagreement(self, name: &str, theirs: &Settings) -> Option<String> {
        if !self.is_bound() {
            return None;
        }
        let (ours, id) = (self.settings, self.id);
        if (ours.min_nodes, ours.max_nodes) != (theirs.min_nodes, theirs.max_nodes) {
            return Some(format!(
                "{name} asks for {} nodes, but run `{id}` was opened for {}: give every node the same `--nnodes`",
                theirs.node_counts(),
                ours.node_counts()
            ));
        }
        if ours.rules.workers != theirs.rules.workers {
            let words = |settings: &Settings| match settings.rules.workers {
                Some(bounds) => format!("{bounds} workers"),
                None => "any number of workers".to_owned(),
            };
            return Some(format!(
                "{name} asks for {}, but run `{id}` was opened for {}: give every node the same `min_workers` and `max_workers`",
                words(theirs),
                words(ours)
            ));
        }
        if ours.rules.store_tunnel != theirs.rules.store_tunnel {
            let [theirs, ours] = [theirs, ours].map(|settings| u32::from(settings.rules.store_tunnel));
            return Some(format!(
                "{name} has `store_tunnel={theirs}`, but run `{id}` was opened with `store_tunnel={ours}`: give every node the same \
                 `--rdzv-conf store_tunnel`. Where it is not given, a named token or certificates turn it on, unless \
                 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set"
            ));
        }
        if ours.rules.no_restart_on != theirs.rules.no_restart_on {
            let words = |settings: &Settings| match codes_text(&settings.rules.no_restart_on) {
                none if none.is_empty() => "no `no_restart_on`".to_owned(),
                codes => format!("`no_restart_on={codes}`"),
            };
            return Some(format!(
                "{name} has {}, but run `{id}` was opened with {}: give every node the same `--no-restart-on`",
                words(theirs),
                words(ours)
            ));
        }
        if ours.ranks_as_asked != theirs.ranks_as_asked {
            let ranks =
                |as_asked| if as_asked { "ranks set by `--node-rank`" } else { "ranks assigned by the rendezvous" };
            let (theirs, ours) = (ranks(theirs.ranks_as_asked), ranks(ours.ranks_as_asked));
            return Some(format!(
                "{name} asks for {theirs}, but run `{id}` was opened for {ours}: give every node the same `--rdzv-backend`"
            ));
        }
        let [theirs, ours] = [theirs, ours].map(|settings| (settings.max_restarts, settings.rules.restart_window));
        (ours != theirs).then(|| {
            let words = |budget: (Option<u32>, Option<Duration>)| match budget {
                (Some(restarts), Some(window)) => {
                    format!("{restarts} restarts of the job within {} s", window.as_secs_f64())
                }
                (Some(restarts), None) => format!("{restarts} restarts of the job"),
                (None, _) => "restarts counted by each node".to_owned(),
            };
            format!(
                "{name} asks for {}, but run `{id}` was opened for {}: give every node the same `--max-restarts`, \
                 `restart_window`, `restart_budget` and agent",
                words(theirs),
                words(ours)
            )
        })
    }

    /// Whether the nodes of this run may belong to different jobs.
    pub(super) fn has_no_name(self) -> bool {
        self.id == DEFAULT_RUN_ID
    }

    /// Why a node that asks to join is refused, if it belongs to another job than the nodes that are here.
    pub(super) fn another_job(self, id: NodeId, join: &Join, now: Instant) -> Option<String> {
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
    pub(super) fn perhaps_another_job(self, now: Instant) -> Option<String> {
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
    let joined = node.joined_at.map(|at| format!(" and came {} ago", duration_text(now.saturating_duration_since(at))));
    format!("{}{script}{}", node.label(), joined.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::messages::message::{JoinWorkers, Round};
    use crate::rendezvous::messages::settings::Rules;
    use crate::rendezvous::run::bench::{Bench, SECOND};
    use crate::rendezvous::run::event::Ends;

    fn bench() -> Bench {
        Bench::new(Settings::new(2, 4))
    }

    /// An agent's node, as the coordinator sees it.
    fn agent(number: u8, name: &str, node_rank: Option<u32>, process: u64) -> Node {
        Node { name: name.to_owned(), node_rank, process, ..bench().node(number) }
    }

    #[test]
    fn an_agent_is_recognised_by_its_address_and_there_by_its_rank_or_else_its_name() {
        let older = agent(1, "a:1", None, 1);
        let ranked = agent(1, "a:1", Some(0), 1);
        for (older, newer, same) in [
            (&older, agent(1, "a:1", None, 2), true),
            (&older, agent(1, "a:2", None, 2), false),
            (&older, agent(2, "a:1", None, 2), false),
            (&older, agent(1, "a:1", Some(0), 2), false),
            (&ranked, agent(1, "a:2", Some(0), 2), true),
            (&ranked, agent(1, "a:1", Some(1), 2), false),
        ] {
            let mut admission = Admission::default();
            admission.register(NodeId(1), older);
            assert_eq!(
                admission.holder(NodeId(2), &newer),
                same.then_some(NodeId(1)),
                "{} {}",
                newer.name,
                newer.addr()
            );
            assert_eq!(admission.holder(NodeId(1), older), None, "itself");
            admission.release(NodeId(1), Some(older));
            assert_eq!(admission.holder(NodeId(2), &newer), None);
        }
    }

    #[test]
    fn on_loopback_and_over_a_cell_another_process_is_another_agent() {
        let loopback = [127, 0, 0, 1].into();
        for ends in [Some(Ends { peer: loopback, local: loopback }), None] {
            let node = |process| Node { ends, ..agent(1, "a:1", Some(0), process) };
            let mut admission = Admission::default();
            admission.register(NodeId(1), &node(1));
            assert_eq!(admission.holder(NodeId(2), &node(2)), None);
            assert_eq!(admission.holder(NodeId(2), &node(1)), Some(NodeId(1)));
        }
    }

    #[test]
    fn a_node_that_reconnects_takes_no_identity_that_another_one_holds() {
        let (first, second) = (agent(1, "a:1", Some(0), 1), agent(1, "a:2", Some(1), 2));
        let mut admission = Admission::default();
        admission.register(NodeId(1), &first);
        admission.register(NodeId(2), &second);
        admission.register_again(NodeId(2), Some(&second), &first);
        assert_eq!(admission.holder(NodeId(3), &first), Some(NodeId(1)));
        assert_eq!(admission.holder(NodeId(3), &second), None, "it has given up its own");
        admission.register(NodeId(2), &first);
        assert_eq!(admission.holder(NodeId(3), &first), Some(NodeId(2)), "a newer agent does");
    }

    #[test]
    fn settings_that_differ_are_refused_once_a_node_waits() {
        let ours = Settings::new(2, 4);
        let tunnel = Rules { store_tunnel: true, ..Rules::default() };
        let cases = [
            (Settings::new(1, 4), Some("give every node the same `--nnodes`")),
            (Settings { ranks_as_asked: true, ..ours.clone() }, Some("give every node the same `--rdzv-backend`")),
            (Settings { max_restarts: Some(9), ..ours.clone() }, Some("give every node the same `--max-restarts`")),
            (Settings { rules: tunnel, ..ours.clone() }, Some("give every node the same `--rdzv-conf store_tunnel`")),
            (Settings { settle_timeout: 77 * SECOND, ..ours.clone() }, None),
        ];
        for (theirs, expected) in cases {
            let mut bench = bench();
            assert_eq!(bench.parts().disagreement("b", &theirs), None, "nobody waits yet");
            bench.wait([1]);
            let text = bench.parts().disagreement("b", &theirs);
            assert_eq!(text.is_some(), expected.is_some(), "{text:?}");
            assert!(text.is_none_or(|text| expected.is_some_and(|part| text.contains(part))));
        }
    }

    #[test]
    fn only_a_run_without_a_name_refuses_a_newcomer_with_another_script() {
        let workers = |script| Some(JoinWorkers::new("trainer", 1).running(script));
        let join = |script| Join {
            round: Round(0),
            store_port: 1,
            node_rank: None,
            workers: workers(script),
            health: Default::default(),
        };
        let mut bench = bench();
        bench.wait([1]);
        bench.roster.set_program(NodeId(1), &join("train.py"), None);
        let newcomer = bench.node(2);
        bench.roster.insert(NodeId(2), newcomer);
        for (id, script, refused) in
            [(DEFAULT_RUN_ID, "other.py", true), (DEFAULT_RUN_ID, "train.py", false), ("job", "other.py", false)]
        {
            let parts = Parts { id, ..bench.parts() };
            let text = parts.another_job(NodeId(2), &join(script), bench.now);
            assert_eq!(text.is_some(), refused, "{id} {script}: {text:?}");
        }
    }

    #[test]
    fn the_agent_that_was_replaced_first_is_forgotten_first() {
        let mut admission = Admission::default();
        let last = MOST_REPLACED as u128;
        (0..=last).rev().for_each(|id| admission.replace(NodeId(id)));
        assert_eq!([0, 1, last].map(|id| admission.is_replaced(NodeId(id))), [true, true, false]);
    }
}
