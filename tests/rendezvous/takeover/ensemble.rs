//! [`Job`]: processes at the endpoints of a list, each with a node, over a network in virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use elastic_rs::rendezvous::coordinator::ensemble::{Link, PeerMessage};
use elastic_rs::rendezvous::coordinator::machine::{Command, Machine};
use elastic_rs::rendezvous::coordinator::succession::Succession;
use elastic_rs::rendezvous::messages::message::{
    CoordinatorMessage, Hello, JoinWorkers, NodeId, NodeMessage, PeerHello, Placement,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::node::{JoinError, NodeCommand, NodeMachine};
use elastic_rs::rendezvous::run::{CoordinatorInstance, Ends, SessionId};

/// How long a message, a refusal or the end of a connection is on its way.
const LATENCY: Duration = Duration::from_millis(1);
/// How often a connection to another process is tried.
const REDIAL: Duration = Duration::from_millis(250);
/// Nothing takes longer.
const LIMIT: Duration = Duration::from_secs(120);

/// A process at an endpoint.
pub struct Process {
    pub machine: Machine,
    pub succession: Succession,
    id: NodeId,
    /// To which processes its connections are open.
    up: BTreeMap<usize, NodeId>,
    dial_at: Instant,
}

/// A node.
pub struct Agent {
    id: NodeId,
    pub place: usize,
    pub machine: NodeMachine,
    pub outcome: Option<Result<Placement, JoinError>>,
    /// The process to which it is connected, and its session there.
    connection: Option<(NodeId, SessionId)>,
    is_alive: bool,
}

enum Event {
    /// A message between processes, or what has happened to a connection of the first one.
    Peer {
        from: (usize, NodeId),
        to: usize,
        message: PeerMessage,
    },
    Link {
        at: NodeId,
        place: usize,
        link: Link,
    },
    /// A node's connection.
    Connect {
        node: usize,
        place: usize,
    },
    ToNode {
        session: SessionId,
        message: CoordinatorMessage,
    },
    ToCoordinator {
        session: SessionId,
        message: NodeMessage,
    },
    Ended {
        session: SessionId,
    },
}

pub struct Job {
    pub now: Instant,
    pub processes: Vec<Option<Process>>,
    pub agents: Vec<Agent>,
    settings: Settings,
    names: Vec<String>,
    queue: VecDeque<(Instant, Event)>,
    sessions: BTreeMap<SessionId, (usize, NodeId)>,
    next: u64,
    /// Connections between processes at these places are cut: what is sent is lost, and nobody is refused.
    pub cut: Vec<(usize, usize)>,
    pub notes: Vec<String>,
}

impl Job {
    /// A job with a node at each of so many endpoints, none of which has been started.
    pub fn new(endpoints: usize, settings: Settings) -> Self {
        Self {
            now: Instant::now(),
            processes: (0..endpoints).map(|_| None).collect(),
            agents: Vec::new(),
            settings,
            names: (0..endpoints).map(|place| format!("n{place}:29400")).collect(),
            queue: VecDeque::new(),
            sessions: BTreeMap::new(),
            next: 1000,
            cut: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn draw(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Start the process at an endpoint, and its node. Returns the number of the node.
    pub fn start(&mut self, place: usize) -> usize {
        let number = self.draw();
        let id = NodeId(number.into());
        let hello = PeerHello { run_id: "job".into(), endpoints: self.names.clone(), place: place as u32, process: id };
        let instance = CoordinatorInstance { process: number, instance_id: Some(place as u64), incarnation: number };
        self.processes[place] = Some(Process {
            machine: Machine::with_instance(instance),
            succession: Succession::new(hello, self.now),
            id,
            up: BTreeMap::new(),
            dial_at: self.now,
        });
        let name = format!("n{place}:{number}");
        let hello = Hello { process: number, hosts: true, ..Hello::new("job", id, name, self.settings.clone()) };
        let mut machine = NodeMachine::among(hello, &self.names, Duration::from_secs(60), self.now);
        machine.join(7, None, Some(JoinWorkers::new("trainer", 2)), Duration::from_secs(60), self.now);
        self.agents.push(Agent { id, place, machine, outcome: None, connection: None, is_alive: true });
        self.agents.len() - 1
    }

    /// Kill the process at an endpoint, with its node.
    pub fn kill(&mut self, place: usize) {
        let process = self.processes[place].take().unwrap();
        for other in self.processes.iter().flatten() {
            if other.up.get(&place) == Some(&process.id) {
                let later = self.now + LATENCY;
                for link in [Link::Down, Link::Refused, Link::Dead(process.id)] {
                    self.queue.push_back((later, Event::Link { at: other.id, place, link }));
                }
            }
        }
        let ended: Vec<_> = self.sessions.iter().filter(|(_, (_, at))| *at == process.id).map(|(s, _)| *s).collect();
        for session in ended {
            self.queue.push_back((self.now + LATENCY, Event::Ended { session }));
        }
        if let Some(node) = self.node_of(process.id) {
            self.agents[node].is_alive = false;
            self.disconnect(node);
        }
    }

    pub fn is_alive(&self, node: usize) -> bool {
        self.agents[node].is_alive && !self.agents[node].machine.has_left()
    }

    fn node_of(&self, process: NodeId) -> Option<usize> {
        self.agents.iter().position(|agent| agent.id == process)
    }

    /// The place of the process that leads.
    pub fn leader(&self) -> Option<usize> {
        let leads = |process: &Option<Process>| process.as_ref().is_some_and(|it| it.succession.leads());
        let all: Vec<_> = self.processes.iter().enumerate().filter(|(_, it)| leads(it)).map(|(at, _)| at).collect();
        assert!(all.len() < 2, "{all:?} lead");
        all.first().copied()
    }

    /// Let things happen until this is true. Returns how long that took.
    pub fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) -> Duration {
        let began = self.now;
        self.settle();
        while !done(self) {
            assert!(self.now < began + LIMIT, "not within {LIMIT:?}: {:#?}", self.notes);
            self.step();
        }
        self.now - began
    }

    /// Let this time pass.
    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        self.settle();
        while self.next_at() < end {
            self.step();
        }
        self.now = end;
        self.tick();
    }

    fn next_at(&self) -> Instant {
        let queued = self.queue.iter().map(|(at, _)| *at).min();
        let alive = self.agents.iter().filter(|agent| agent.is_alive);
        let nodes = alive.filter_map(|agent| agent.machine.next_deadline());
        let processes = self.processes.iter().flatten();
        let others = processes.flat_map(|process| {
            [process.machine.next_deadline(), Some(process.succession.next_deadline()), Some(process.dial_at)]
        });
        nodes
            .chain(queued)
            .chain(others.flatten())
            .min()
            .unwrap_or(self.now + REDIAL)
            .max(self.now + Duration::from_micros(100))
    }

    fn step(&mut self) {
        self.now = self.next_at();
        self.tick();
    }

    fn tick(&mut self) {
        let due: Vec<_> = {
            let now = self.now;
            let (due, later): (VecDeque<_>, VecDeque<_>) = self.queue.drain(..).partition(|(at, _)| *at <= now);
            self.queue = later;
            due.into_iter().map(|(_, event)| event).collect()
        };
        due.into_iter().for_each(|event| {
            self.happen(event);
            self.settle();
        });
        for place in 0..self.processes.len() {
            let now = self.now;
            if let Some(process) = &mut self.processes[place] {
                process.succession.on_tick(now);
                process.machine.on_tick(now);
                if process.dial_at <= now {
                    process.dial_at = now + REDIAL;
                    self.dial(place);
                }
            }
        }
        for agent in self.agents.iter_mut().filter(|agent| agent.is_alive) {
            agent.machine.on_tick(self.now);
        }
        self.settle();
    }

    fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cut.contains(&(a, b)) || self.cut.contains(&(b, a))
    }

    /// Connect to the processes to which it has no connection.
    fn dial(&mut self, from: usize) {
        for to in (0..self.processes.len()).filter(|to| *to != from) {
            let there = self.processes[to].as_ref().map(|it| it.id);
            let is_cut = self.is_cut(from, to);
            let Some(process) = &mut self.processes[from] else { return };
            if process.up.contains_key(&to) || is_cut {
                continue;
            }
            process.succession.on_link(to, Link::Begins, self.now);
            let link = match there {
                Some(there) => {
                    process.up.insert(to, there);
                    Link::Up(there)
                }
                None => Link::Refused,
            };
            self.queue.push_back((self.now + LATENCY, Event::Link { at: process.id, place: to, link }));
        }
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Peer { from: (from, process), to, message } => {
                if let Some(target) = self.processes[to].as_mut() {
                    target.succession.on_message(from, process, message, now).unwrap();
                }
            }
            Event::Link { at, place, link } => {
                if let Some(process) = self.processes.iter_mut().flatten().find(|it| it.id == at) {
                    if link == Link::Down {
                        process.up.remove(&place);
                    }
                    process.succession.on_link(place, link, now);
                }
            }
            Event::Connect { node, place } => self.connect(node, place),
            Event::ToNode { session, message } => {
                if let Some((node, _)) = self.sessions.get(&session).copied() {
                    self.agents[node].machine.on_message(message, now);
                }
            }
            Event::ToCoordinator { session, message } => {
                let Some((_, at)) = self.sessions.get(&session).copied() else { return };
                let Some(process) = self.processes.iter_mut().flatten().find(|it| it.id == at) else { return };
                match message {
                    NodeMessage::Hello(hello) => {
                        if let Some(message) = process.succession.turns_away(Some(&hello.run_id), now) {
                            self.queue.push_back((now + LATENCY, Event::ToNode { session, message }));
                            self.queue.push_back((now + LATENCY, Event::Ended { session }));
                            return;
                        }
                        let ends = Ends { peer: [10, 0, 0, 1].into(), local: [10, 0, 0, 9].into() };
                        process.machine.on_hello(session, *hello, ends, now);
                    }
                    message => process.machine.on_message(session, message, now),
                }
            }
            Event::Ended { session } => {
                if let Some((node, _)) = self.sessions.remove(&session)
                    && self.agents[node].connection.is_some_and(|(_, own)| own == session)
                {
                    self.agents[node].connection = None;
                    self.agents[node].machine.on_disconnected("closed".into(), false, now);
                }
            }
        }
    }

    fn connect(&mut self, node: usize, place: usize) {
        let session = SessionId(self.draw());
        let agent = &mut self.agents[node];
        if !agent.is_alive {
            return;
        }
        match self.processes[place].as_ref().map(|it| it.id) {
            Some(at) => {
                agent.connection = Some((at, session));
                self.sessions.insert(session, (node, at));
                agent.machine.on_connected(self.now);
            }
            None => agent.machine.on_connect_failed("connection refused".into(), true, self.now),
        }
    }

    /// A node ends its connection.
    fn disconnect(&mut self, node: usize) {
        let Some((at, session)) = self.agents[node].connection.take() else { return };
        self.sessions.remove(&session);
        if let Some(process) = self.processes.iter_mut().flatten().find(|it| it.id == at) {
            process.machine.on_disconnected(session, self.now);
        }
    }

    /// Perform everything that is to be done now.
    pub fn settle(&mut self) {
        loop {
            let mut anything = false;
            for place in 0..self.processes.len() {
                anything |= self.perform(place);
            }
            for node in 0..self.agents.len() {
                anything |= self.perform_of(node);
            }
            if !anything {
                return;
            }
        }
    }

    fn perform(&mut self, place: usize) -> bool {
        let now = self.now;
        let Some(process) = &mut self.processes[place] else { return false };
        let todo = process.succession.take(&mut process.machine, now);
        process.machine.check().unwrap();
        let from = (place, process.id);
        let anything = !todo.commands.is_empty() || !todo.peers.is_empty();
        for (to, message) in todo.peers {
            if !self.is_cut(place, to) {
                self.queue.push_back((now + LATENCY, Event::Peer { from, to, message }));
            }
        }
        for command in todo.commands {
            match command {
                Command::Send { session, message } => {
                    self.queue.push_back((now + LATENCY, Event::ToNode { session, message }));
                }
                Command::End { session } => {
                    self.queue.push_back((now + LATENCY, Event::Ended { session }));
                    if let Some(process) = &mut self.processes[place] {
                        process.machine.on_disconnected(session, now);
                    }
                }
                Command::Record { record, .. } => {
                    self.notes.extend(record.text.map(|text| format!("n{place}: {text}")));
                }
                _ => {}
            }
        }
        anything
    }

    fn perform_of(&mut self, node: usize) -> bool {
        let now = self.now;
        let agent = &mut self.agents[node];
        if !agent.is_alive {
            return false;
        }
        let commands = agent.machine.take_commands();
        let outcome = agent.machine.take_outcome();
        let anything = !commands.is_empty() || outcome.is_some();
        agent.outcome = outcome.or(agent.outcome.take());
        for command in commands {
            match command {
                NodeCommand::Connect => {
                    let place = self.agents[node].machine.place();
                    self.queue.push_back((now + LATENCY, Event::Connect { node, place }));
                }
                NodeCommand::Disconnect => self.disconnect(node),
                NodeCommand::Probe => {}
                NodeCommand::Send(message) => {
                    if let Some((_, session)) = self.agents[node].connection {
                        self.queue.push_back((now + LATENCY, Event::ToCoordinator { session, message }));
                    }
                }
            }
        }
        anything
    }
}
