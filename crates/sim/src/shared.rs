//! Hosts of jobs without a coordinator: a node over shared state, with a clock of its own, and PyTorch's agent on it. What the nodes
//! share, and how they reach it, is the models': [`super::cell`] and [`super::etcd`].

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::engine::dice::Dice;
use super::engine::queue::Time;
use super::engine::record::Digest;
use super::worlds::Violation;
use elastic_rs::rendezvous::cell::node::CellNode;
use elastic_rs::rendezvous::messages::message::{Placement, Round, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::{JoinError, NodeMachine};

/// What a cell holds. A history shows its length and its digest: to print all bytes takes a quarter of the time.
#[derive(Clone)]
pub(super) struct Content(Rc<[u8]>);

impl Content {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digest = Digest::default();
        digest.add(&self.0);
        write!(f, "{} bytes {:016x}", self.0.len(), digest.0)
    }
}

/// A node over shared state.
pub(super) trait Node {
    /// The part that all such nodes have.
    fn inner(&self) -> &CellNode;
    /// The same.
    fn inner_mut(&mut self) -> &mut CellNode;
    /// When to call it again.
    fn next_deadline(&self) -> Option<Instant>;
}

/// The agent's state.
#[derive(Clone, Debug)]
pub(super) enum Agent {
    Joining,
    Running(Placement),
    /// Its workers are being stopped, or it has given up its join.
    Stopping(Option<Placement>),
    Done,
}

/// What became of a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joined {
    Placed,
    /// The job is over.
    Closed,
    /// It failed for now. The agent has to ask again.
    Again,
}

/// A host.
#[derive(Debug)]
pub(super) struct Host<N> {
    /// Its clock at virtual time zero. No node reads another node's clock.
    clock: Instant,
    /// Rises with each start and end. What arrives for an earlier process is dropped.
    pub incarnation: u32,
    pub node: Option<N>,
    pub agent: Agent,
    /// The port of the last store that the node has opened for workers.
    pub store: u16,
    /// The number of its last deadline. Earlier ones were replaced.
    tick: u64,
}

/// The hosts of a job, whose clocks differ by up to four months.
pub(super) fn draw_hosts<N>(count: usize, dice: &mut Dice) -> Vec<Host<N>> {
    // Requests to etcd hold instants, and a digest of events must be the same for a seed.
    static BASE: OnceLock<Instant> = OnceLock::new();
    let base = *BASE.get_or_init(Instant::now);
    let mut clock = || base + dice.duration((Duration::ZERO, Duration::from_secs(10_000_000)));
    let host = |number, clock| {
        let store = 1000 * (number as u16 + 1);
        Host { clock, incarnation: 0, node: None, agent: Agent::Done, store, tick: 0 }
    };
    (0..count).map(|number| host(number, clock())).collect()
}

impl<N: Node> Host<N> {
    /// The host's clock.
    pub fn clock_at(&self, at: Time) -> Instant {
        self.clock + at
    }

    /// An agent starts, and joins.
    pub fn start(&mut self, node: N, at: Time) {
        self.incarnation += 1;
        self.node = Some(node);
        self.join(at);
    }

    /// The agent dies.
    pub fn kill(&mut self) {
        self.node = None;
        self.agent = Agent::Done;
        self.incarnation += 1;
    }

    /// The agent joins, with a store that is opened after the welcome, as front ends do.
    pub fn join(&mut self, at: Time) {
        let (now, limit) = (self.clock_at(at), Duration::from_secs(3600));
        let Some(node) = &mut self.node else { return };
        self.agent = Agent::Joining;
        node.inner_mut().ask(|node| node.join_with_new_store(None, None, limit, now), now);
    }

    /// Opens the store that a join waits for. True if there was one to open.
    pub fn open_store(&mut self, at: Time) -> bool {
        let now = self.clock_at(at);
        let Some(node) = self.node.as_mut().map(Node::inner_mut) else { return false };
        let Some(addr) = node.machine().wanted_store() else { return false };
        self.store += 1;
        let port = self.store;
        node.ask(|node| node.on_store_opened(addr, port), now);
        true
    }

    /// The agent gives up its join (Ctrl-C). False if it has none.
    pub fn abandon(&mut self, at: Time) -> bool {
        let now = self.clock_at(at);
        let (Some(node), Agent::Joining) = (&mut self.node, &self.agent) else { return false };
        node.inner_mut().ask(NodeMachine::abandon, now);
        self.agent = Agent::Stopping(None);
        true
    }

    /// All workers have succeeded.
    pub fn finish(&mut self, at: Time) {
        let now = self.clock_at(at);
        let (Some(node), Agent::Running(placement)) = (&mut self.node, &self.agent) else { return };
        node.inner_mut().ask(|node| node.report_done(placement.round), now);
    }

    pub fn close(&mut self, number: usize, at: Time) {
        let now = self.clock_at(at);
        let Some(node) = &mut self.node else { return };
        node.inner_mut().ask(|node| node.close(Verdict::Succeeded { by: format!("host{number}") }), now);
    }

    pub fn leave(&mut self, at: Time) {
        let now = self.clock_at(at);
        let Some(node) = &mut self.node else { return };
        node.inner_mut().ask(|node| node.leave("the job is over".to_owned(), None), now);
    }

    /// Gives the agent the answer to its join, if there is one.
    ///
    /// # Errors
    /// An answer that no node should get here.
    pub fn take_outcome(&mut self, number: usize) -> Result<Option<Joined>, Violation> {
        let Some(outcome) = self.node.as_mut().and_then(|node| node.inner_mut().take_outcome()) else {
            return Ok(None);
        };
        Ok(Some(match outcome {
            Ok(placement) => {
                self.agent = Agent::Running(placement);
                Joined::Placed
            }
            Err(JoinError::Closed { .. } | JoinError::Over { .. }) => {
                self.agent = Agent::Done;
                Joined::Closed
            }
            Err(JoinError::Connection { .. } | JoinError::Timeout { .. }) => Joined::Again,
            Err(error) => return Err(Violation::contract(format!("host {number}: {error}"))),
        }))
    }

    /// Lets the agent look whether its world goes on. True if it begins to stop its workers.
    ///
    /// # Errors
    /// The world is to re-form without a reason.
    pub fn look(&mut self, number: usize) -> Result<bool, Violation> {
        let (Some(node), Agent::Running(placement)) = (&self.node, &self.agent) else { return Ok(false) };
        let view = node.inner().view();
        if view.closed.is_some() {
            self.agent = Agent::Done;
        } else if view.waiting > 0 {
            if view.reason.is_empty() {
                return Err(Violation::contract(format!("host {number} is interrupted without a reason")));
            }
            self.agent = Agent::Stopping(Some(placement.clone()));
            return Ok(true);
        }
        Ok(false)
    }

    /// The round before `round` whose workers run, although a node that is awake has looked at its clock. Guards kill the workers of a
    /// fenced node, also while it stands still. Workers that are stopped for another reason run until they end.
    pub fn runs_still(&mut self, round: Round, at: Time, awake: bool) -> Option<Round> {
        let now = self.clock_at(at);
        let (Agent::Running(placement) | Agent::Stopping(Some(placement))) = &self.agent else { return None };
        let node = self.node.as_mut()?.inner_mut();
        if awake {
            node.on_tick(now);
        }
        let over = node.machine().workers_until().is_some_and(|until| until <= now);
        let killed = over || node.view().fenced.is_some();
        (placement.round < round && !killed).then_some(placement.round)
    }

    /// When to call the node next, and the number of that call.
    pub fn arm(&mut self, now: Time) -> Option<(Time, u64)> {
        let at = self.node.as_ref()?.next_deadline()?;
        self.tick += 1;
        Some((at.saturating_duration_since(self.clock).max(now + Duration::from_micros(1)), self.tick))
    }

    /// Whether the call with this number is still wanted. Number 0 always is.
    pub fn wants(&self, tick: u64) -> bool {
        tick == 0 || tick == self.tick
    }

    /// The placement in force, while workers run.
    pub fn running(&self) -> Option<&Placement> {
        match &self.agent {
            Agent::Running(placement) => Some(placement),
            _ => None,
        }
    }
}

/// Checks that no workers of an earlier round run as this round forms. `stopping`: also those that are being stopped.
///
/// # Errors
/// The host and its round.
pub(super) fn check_alone<N: Node, E>(
    hosts: &mut [Host<N>],
    engine: &Engine<E>,
    round: Round,
    stopping: bool,
) -> Result<(), Violation> {
    let Engine { queue, processes, .. } = engine;
    let now = queue.now();
    let counts = |host: &Host<N>| stopping || !matches!(host.agent, Agent::Stopping(_));
    hosts.iter_mut().enumerate().filter(|(_, host)| counts(host)).try_for_each(|(number, host)| {
        match host.runs_still(round, now, processes.stalled_until(Some(number)) <= now) {
            None => Ok(()),
            Some(earlier) => Err(Violation::contract(format!(
                "round {round} forms while workers of host {number} run round {earlier}"
            ))),
        }
    })
}

/// Checks a settled job: as many nodes as may run do so, in one world.
///
/// # Errors
/// The worlds that there are, and what the nodes wait for.
pub(super) fn check_settled<N: Node>(hosts: &[Host<N>], settings: &Settings) -> Result<(), Violation> {
    let live: Vec<_> = hosts.iter().filter_map(|host| Some((host, host.node.as_ref()?))).collect();
    if live.len() < settings.min_nodes as usize {
        return Ok(());
    }
    let expected = live.len().min(settings.max_nodes as usize);
    let mut running = BTreeMap::new();
    for placement in live.iter().filter_map(|(host, _)| host.running()) {
        *running.entry((placement.round, placement.world_size)).or_insert(0) += 1;
    }
    let whole = |((_, size), count): (&(_, u32), &usize)| *count == expected && *size as usize == expected;
    if running.len() == 1 && running.iter().all(whole) {
        return Ok(());
    }
    let nodes: Vec<_> = live.iter().map(|(host, node)| (&host.agent, node.inner().machine().waits())).collect();
    Err(Violation::contract(format!("{expected} nodes should run in one world: {running:?}; {nodes:?}")))
}

/// Checks that all agents have heard that the job was closed.
///
/// # Errors
/// One that has not.
pub(super) fn check_all_done<N>(hosts: &[Host<N>]) -> Result<(), Violation> {
    match hosts.iter().position(|host| host.node.is_some() && !matches!(host.agent, Agent::Done)) {
        Some(host) => Err(Violation::contract(format!("host {host} does not hear that the job was closed"))),
        None => Ok(()),
    }
}
