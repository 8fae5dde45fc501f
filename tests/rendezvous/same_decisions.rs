//! A coordinator and nodes over a shared cell make the same decisions in the same histories.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use elastic_rs::rendezvous::cell::node::{CellCommand, CellNode};
use elastic_rs::rendezvous::coordinator::machine::{Command, Machine};
use elastic_rs::rendezvous::messages::message::{
    Failure, Hello, JoinWorkers, NodeId, NodeMessage, Placement, Round, Verdict,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::{NodeCommand, NodeMachine};
use elastic_rs::rendezvous::run::{Ends, SessionId};
use proptest::prelude::*;

const NODES: usize = 4;
/// Interval of the ticks.
const STEP: Duration = Duration::from_millis(50);

/// An action of a user or an agent.
#[derive(Clone, Copy, Debug)]
enum Act {
    Join(usize),
    Abandon(usize),
    Fail(usize, bool),
    Done(usize),
    Leave(usize),
    Close(usize),
}

/// A node's knowledge after an action.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    placement: Option<Placement>,
    must_re_form: bool,
    /// Only whether there is a reason. The texts may differ, because a cell's nodes make them again at each read.
    has_reason: bool,
    restart: u32,
    failure: Option<Failure>,
    closed: Option<String>,
    all_done: bool,
}

/// A composition under test.
trait Job {
    fn ask(&mut self, node: usize, question: &mut dyn FnMut(&mut NodeMachine, Instant));
    fn outcome(&mut self, node: usize) -> Option<Placement>;
    fn step(&mut self);
}

fn hello(number: usize, settings: &Settings) -> Hello {
    let hello = Hello::new("job", NodeId(number as u128 + 1), format!("host{number}:1"), settings.clone());
    // There are no changes in place over a cell.
    Hello { local_addr: Some(format!("node{number}")), process: number as u64 + 1, in_place: false, ..hello }
}

struct OverCoordinator {
    now: Instant,
    machine: Machine,
    nodes: Vec<(NodeMachine, Option<SessionId>)>,
    sessions: u64,
}

impl OverCoordinator {
    fn new(settings: &Settings) -> Self {
        let now = Instant::now();
        let node = |number| NodeMachine::new(hello(number, settings), "head:1".into(), Duration::from_secs(300), now);
        let nodes = (0..NODES).map(|number| (node(number), None)).collect();
        Self { now, machine: Machine::new(), nodes, sessions: 0 }
    }

    fn pump(&mut self) {
        let now = self.now;
        loop {
            let mut quiet = true;
            for number in 0..NODES {
                let (node, _) = &mut self.nodes[number];
                node.on_tick(now);
                for command in node.take_commands() {
                    quiet = false;
                    self.perform(number, command);
                }
            }
            self.machine.on_tick(now);
            for command in self.machine.take_commands() {
                quiet = false;
                let of = |session| self.nodes.iter().position(|(_, of)| *of == Some(session));
                match command {
                    Command::Send { session, message } => {
                        if let Some(number) = of(session) {
                            self.nodes[number].0.on_message(message, now);
                        }
                    }
                    Command::End { session } => {
                        if let Some(number) = of(session) {
                            self.nodes[number].1 = None;
                            self.nodes[number].0.on_disconnected("the session ended".into(), false, now);
                        }
                    }
                    Command::Record { .. }
                    | Command::Tally { .. }
                    | Command::Forget { .. }
                    | Command::Exclusions { .. }
                    | Command::Warn { .. }
                    | Command::EmptyStore
                    | Command::HandOver => {}
                }
            }
            if quiet {
                return;
            }
        }
    }

    fn perform(&mut self, number: usize, command: NodeCommand) {
        let now = self.now;
        let (node, session) = &mut self.nodes[number];
        match command {
            NodeCommand::Connect => {
                self.sessions += 1;
                *session = Some(SessionId(self.sessions));
                node.on_connected(now);
            }
            NodeCommand::Disconnect => {
                if let Some(session) = session.take() {
                    self.machine.on_disconnected(session, now);
                }
            }
            NodeCommand::Probe => {}
            NodeCommand::Send(message) => match (message, *session) {
                (NodeMessage::Hello(hello), Some(session)) => {
                    let addr = |last| IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
                    let ends = Ends { peer: addr(number as u8 + 2), local: addr(1) };
                    self.machine.on_hello(session, *hello, ends, now);
                }
                (message, Some(session)) => self.machine.on_message(session, message, now),
                (_, None) => {}
            },
        }
    }
}

impl Job for OverCoordinator {
    fn ask(&mut self, node: usize, question: &mut dyn FnMut(&mut NodeMachine, Instant)) {
        question(&mut self.nodes[node].0, self.now);
        self.pump();
    }

    fn outcome(&mut self, node: usize) -> Option<Placement> {
        self.nodes[node].0.take_outcome()?.ok()
    }

    fn step(&mut self) {
        self.now += STEP;
        self.pump();
    }
}

struct OverCell {
    now: Instant,
    nodes: Vec<(CellNode, u64)>,
    cell: (Option<Vec<u8>>, u64),
}

impl OverCell {
    fn new(settings: &Settings) -> Self {
        let now = Instant::now();
        let node = |number| CellNode::new(hello(number, settings), false, now);
        Self { now, nodes: (0..NODES).map(|number| (node(number), 0)).collect(), cell: (None, 0) }
    }

    fn pump(&mut self) {
        for (node, token) in &mut self.nodes {
            node.on_tick(self.now);
            while let Some(command) = node.take_command() {
                match command {
                    CellCommand::Read => {
                        *token = self.cell.1;
                        node.on_state(self.cell.0.as_deref(), self.now);
                    }
                    CellCommand::Write(_) if *token != self.cell.1 => {
                        *token = self.cell.1;
                        node.on_conflict(self.cell.0.as_deref(), self.now);
                    }
                    CellCommand::Write(state) => {
                        self.cell = (Some(state), self.cell.1 + 1);
                        *token = self.cell.1;
                        node.on_written(self.now);
                    }
                }
                node.on_tick(self.now);
            }
        }
    }
}

impl Job for OverCell {
    fn ask(&mut self, node: usize, question: &mut dyn FnMut(&mut NodeMachine, Instant)) {
        let now = self.now;
        self.nodes[node].0.ask(|machine| question(machine, now), now);
        self.pump();
    }

    fn outcome(&mut self, node: usize) -> Option<Placement> {
        self.nodes[node].0.take_outcome()?.ok()
    }

    fn step(&mut self) {
        self.now += STEP;
        self.pump();
    }
}

/// Perform a history. Returns the knowledge of every node after each action.
fn live(job: &mut dyn Job, acts: &[Act]) -> Vec<Vec<Known>> {
    let mut placements: BTreeMap<usize, Placement> = BTreeMap::new();
    let mut all = Vec::new();
    for act in acts {
        let round =
            |placements: &BTreeMap<usize, Placement>, node: usize| placements.get(&node).map_or(Round(0), |p| p.round);
        match *act {
            Act::Join(node) => {
                placements.remove(&node);
                let workers = JoinWorkers::new("default", node as u32 + 1);
                job.ask(node, &mut |machine, now| {
                    machine.join(4000 + node as u16, None, Some(workers.clone()), Duration::from_secs(10_000), now);
                });
            }
            Act::Abandon(node) => job.ask(node, &mut |machine, _| machine.abandon()),
            Act::Fail(node, counts) => {
                let round = round(&placements, node);
                job.ask(node, &mut |machine, _| machine.report_failure(round, failure(node, counts)));
            }
            Act::Done(node) => {
                let round = round(&placements, node);
                job.ask(node, &mut |machine, _| machine.report_done(round));
            }
            Act::Leave(node) => job.ask(node, &mut |machine, _| machine.leave("a test".into(), None)),
            Act::Close(node) => job.ask(node, &mut |machine, _| {
                machine.close(Verdict::Succeeded { by: format!("node{node}") });
            }),
        }
        // Longer than the polling interval of the cell, and than a round takes to settle.
        for _ in 0..80 {
            job.step();
            for node in 0..NODES {
                if let Some(placement) = job.outcome(node) {
                    placements.insert(node, placement);
                }
            }
        }
        let mut known = Vec::new();
        for node in 0..NODES {
            let placement = placements.get(&node).cloned();
            job.ask(node, &mut |machine, _| {
                let view = machine.view().clone();
                // A node without a place learns of others only when it asks. A node that has left learns nothing.
                let runs = placement.is_some() && !machine.has_left();
                known.push(Known {
                    placement: placement.clone(),
                    must_re_form: runs && view.waiting > 0,
                    has_reason: runs && !view.reason.is_empty(),
                    restart: if runs { view.restart } else { 0 },
                    failure: view.failure.filter(|_| runs),
                    closed: view.closed.filter(|_| runs).map(|verdict| verdict.to_string()),
                    all_done: runs && view.all_done,
                });
            });
        }
        all.push(known);
    }
    all
}

fn failure(node: usize, counts: bool) -> Failure {
    Failure {
        node: String::new(),
        role: "default".into(),
        local_rank: 0,
        global_rank: node as u32,
        pid: 100,
        exit: "exit code 3".into(),
        returncode: 3,
        message: "ValueError: a test".into(),
        counts,
        lived: Duration::from_secs(60),
        step: None,
    }
}

fn act() -> impl Strategy<Value = Act> {
    let node = 0..NODES;
    prop_oneof![
        8 => node.clone().prop_map(Act::Join),
        1 => node.clone().prop_map(Act::Abandon),
        2 => (node.clone(), any::<bool>()).prop_map(|(node, counts)| Act::Fail(node, counts)),
        2 => node.clone().prop_map(Act::Done),
        1 => node.clone().prop_map(Act::Leave),
        1 => node.prop_map(Act::Close),
    ]
}

/// Over a cell, an abandoned join must not remove a member from the state: it would come back as a newcomer.
#[test]
fn a_member_whose_join_was_abandoned_comes_back_as_a_member() {
    use Act::{Abandon, Join};
    let mut settings = Settings::new(2, 3);
    (settings.last_call_timeout, settings.settle_timeout) = (Duration::from_millis(500), Duration::from_millis(200));
    let acts = [Join(3), Join(0), Join(3), Abandon(3), Join(3), Join(0)];
    let coordinator = live(&mut OverCoordinator::new(&settings), &acts);
    assert_eq!(coordinator, live(&mut OverCell::new(&settings), &acts));
    let reason =
        coordinator.last().and_then(|known| known[3].placement.as_ref()).map(|placement| placement.reason.as_str());
    assert_eq!(reason, Some("all members of round 1 are back (node0 (host0:1), node3 (host3:1))"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_coordinator_and_a_cell_decide_the_same(
        acts in prop::collection::vec(act(), 1..24),
        min in 1..=3_u32,
        more in 0..=2_u32,
        max_restarts in prop::option::of(0..3_u32),
    ) {
        let mut settings = Settings::new(min, min + more);
        settings.max_restarts = max_restarts;
        (settings.last_call_timeout, settings.settle_timeout) = (Duration::from_millis(500), Duration::from_millis(200));
        let coordinator = live(&mut OverCoordinator::new(&settings), &acts);
        let cell = live(&mut OverCell::new(&settings), &acts);
        for (number, (coordinator, cell)) in coordinator.iter().zip(&cell).enumerate() {
            prop_assert_eq!(coordinator, cell, "after act {} ({:?})", number, acts[number]);
        }
    }
}
