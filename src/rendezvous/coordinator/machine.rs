//! The registry of a coordinator's runs: which session belongs to which node of which run, and when to look at each run.
//!
//! Pure: no sockets, no clock. [`Machine`]'s `on_*` methods take an event and `now`. [`Machine::take_commands`] returns what to do.
//! [`Machine::next_deadline`] is when to call [`Machine::on_tick`] at the latest (earlier is harmless). [`Run::apply`] decides
//! about a run.
//!
//! A coordinator that finds its own tick late was stalled. It renews every lease before it drops a node.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::{Duration, Instant};

pub use super::command::{Command, Led};
use super::hangs::{Act, Hangs, Shown};
use super::looks::Looks;
use crate::events::tally::{Refused, Tally};
#[cfg(feature = "sim")]
use crate::rendezvous::decision_state::DecisionState;
use crate::rendezvous::messages::message::{CoordinatorMessage, Hello, NodeId, NodeMessage};
use crate::rendezvous::messages::settings::STALL;
use crate::rendezvous::run::snapshot::Snapshot;
use crate::rendezvous::run::{CoordinatorInstance, Effect, Ends, Event, Reach, Run, SessionId};

/// A run and its entries in the registry's indexes.
#[derive(Clone, Debug)]
struct Entry {
    run: Run,
    /// Its time in [`Machine::due`].
    due: Option<Instant>,
    /// Since when it has nodes but no connection: its time in [`Machine::deserted`].
    deserted: Option<Instant>,
    /// Since when it has no nodes.
    vacant_since: Option<Instant>,
    looks: Looks,
    hangs: Hangs,
}

impl Entry {
    fn new(run: Run) -> Self {
        let (looks, hangs) = (Looks::default(), Hangs::default());
        Self { run, due: None, deserted: None, vacant_since: None, looks, hangs }
    }
}

/// This coordinator's process ends.
#[derive(Clone, Debug)]
struct Leaving {
    /// The run of the node in it.
    run_id: String,
    /// Whether the world of that run must re-form.
    interrupts: bool,
    why: String,
}

/// All runs of one coordinator.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    runs: BTreeMap<String, Entry>,
    sessions: BTreeMap<SessionId, (String, NodeId)>,
    /// Runs without nodes. The cost of an event does not depend on their number.
    remembered: BTreeMap<String, Entry>,
    /// Runs without nodes, by the time since when.
    vacant: BTreeSet<(Instant, String)>,
    /// When to look at each run, the earliest first. The cost of an event does not depend on their number.
    due: BTreeSet<(Instant, String)>,
    /// Runs with nodes but without a connection, by the time since when.
    deserted: BTreeSet<(Instant, String)>,
    commands: Vec<Command>,
    /// This coordinator's process, if it is known.
    instance: Option<CoordinatorInstance>,
    /// Set once that process ends.
    leaving: Option<Leaving>,
    /// Who would lead its run then, if the job has a list of endpoints.
    led: Option<Led>,
}

/// How long a run without nodes is remembered. A late node still learns how the job ended, and a returning one finds the number of
/// its round. By default no node continues so long without its coordinator (`coordinator_timeout`, 300 s).
/// `docs/decisions/0025-an-empty-run-is-remembered-for-an-hour.md` has the alternatives.
pub const VACANT_FOR: Duration = Duration::from_secs(3600);
/// Number of such runs that are remembered. The oldest are forgotten first. Without a limit, unauthenticated peers could leave any number
/// behind.
pub const VACANT_RUNS: usize = 1000;
/// Number of runs that may wait for nodes whose connections have all ended. The nodes of the oldest ones are given up before their
/// grace is over. Without a limit, unauthenticated peers could leave any number behind.
pub const DESERTED_RUNS: usize = 4000;

impl Machine {
    /// A coordinator without runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// A coordinator without runs, in a known process.
    pub fn with_instance(instance: CoordinatorInstance) -> Self {
        Self { instance: Some(instance), ..Self::default() }
    }

    /// Lead this run from now on, as its former leader left it. `is_dead`: that one's process is proven dead.
    pub fn take_over(&mut self, run_id: &str, snapshot: Snapshot, is_dead: bool, now: Instant) {
        let run = Run::succeeding(run_id, snapshot, is_dead, now);
        self.runs.insert(run_id.to_owned(), Entry::new(run));
        self.settle(run_id, now);
    }

    /// Lead no more: forget all runs, and send every node away with this message.
    pub fn step_down(&mut self, message: &CoordinatorMessage) {
        let sessions = mem::take(&mut self.sessions).into_keys();
        let commands = sessions.flat_map(|session| {
            let message = message.clone();
            [Command::Send { session, message }, Command::End { session }]
        });
        *self = Self { commands: commands.collect(), instance: self.instance, ..Self::default() };
    }

    /// Who would lead the run if this process ended. `None`: it does not lead, or the job has no list.
    pub fn set_led(&mut self, led: Option<Led>) {
        self.led = led;
    }

    /// Who leads, if the job has a list of endpoints.
    pub fn led(&self) -> Option<&Led> {
        self.led.as_ref()
    }

    /// A node introduced itself on a new connection.
    pub fn on_hello(&mut self, session: SessionId, hello: Hello, ends: Ends, now: Instant) {
        self.advance(now);
        if self.refuses(session, &hello) {
            return;
        }
        if let Err(reason) = hello.validate() {
            self.commands.push(Command::Tally { run_id: hello.run_id, tally: Tally::Refused(Refused::Invalid) });
            self.commands.push(Command::Send { session, message: CoordinatorMessage::Rejected { reason } });
            self.commands.push(Command::End { session });
            return;
        }
        let (run_id, node) = (hello.run_id.clone(), hello.node);
        self.restore(&run_id);
        let recovering = || Entry::new(Run::recovering(run_id.clone(), hello.settings.clone(), now));
        self.runs.entry(run_id.clone()).or_insert_with(recovering);
        self.sessions.insert(session, (run_id.clone(), node));
        let (reach, instance) = (Reach::Connection(ends), self.instance);
        self.apply(&run_id, Event::Hello { hello: Box::new(hello), session, reach, instance }, now);
    }

    /// A message of a node has arrived.
    pub fn on_message(&mut self, session: SessionId, message: NodeMessage, now: Instant) {
        self.advance(now);
        let Some((run_id, node)) = self.sessions.get(&session).cloned() else { return };
        match message {
            NodeMessage::View { number, view } => {
                self.watch(&run_id, now, |looks, _| looks.on_view(node, number, *view));
            }
            NodeMessage::PySpy { number, text } => {
                self.watch(&run_id, now, |looks, _| looks.on_py_spy(node, number, &text));
            }
            NodeMessage::Looked { number, problem } => {
                self.watch(&run_id, now, |looks, _| looks.on_looked(node, number, problem));
            }
            NodeMessage::Pace { round, pace } => {
                self.watch(&run_id, now, |_, hangs| hangs.on_pace(node, round, pace, now));
            }
            message => self.apply(&run_id, Event::Message { node, session, message }, now),
        }
    }

    /// A node tells how its workers stand. No run decides by it, until its training hangs.
    fn watch(&mut self, run_id: &str, now: Instant, take: impl FnOnce(&mut Looks, &mut Hangs)) {
        if let Some(entry) = self.runs.get_mut(run_id) {
            take(&mut entry.looks, &mut entry.hangs);
            self.settle(run_id, now);
        }
    }

    /// Judge how the training stands, and do what follows.
    fn judge(&mut self, run_id: &str, now: Instant) {
        let Some(entry) = self.runs.get_mut(run_id) else { return };
        entry.hangs.on_run(&entry.run, now);
        for act in entry.hangs.act(&entry.run, &mut entry.looks, now) {
            match act {
                Act::Send(sessions, message) => {
                    let sends = sessions.into_iter().map(|session| Command::Send { session, message: message.clone() });
                    self.commands.extend(sends);
                }
                Act::Apply(event) => self.decide(run_id, event, now),
            }
        }
    }

    /// Somebody wants to know where the ranks of this run stand. `deep`: and what `py-spy` shows of this one.
    pub fn on_look_asked(&mut self, run_id: &str, deep: Option<u32>, now: Instant) {
        self.advance(now);
        let Some(entry) = self.runs.get_mut(run_id) else { return };
        let Some((look, sessions)) = entry.looks.begin(&entry.run, deep, now) else { return };
        let messages =
            sessions.into_iter().map(|session| Command::Send { session, message: CoordinatorMessage::Look(look) });
        self.commands.extend(messages);
    }

    /// The last look at the workers of a run.
    pub fn looks(&self, run_id: &str) -> Option<&Looks> {
        self.runs.get(run_id).map(|entry| &entry.looks)
    }

    /// For how long the training of a run has made no step, if all its nodes stand still.
    pub fn still(&self, run_id: &str, now: Instant) -> Option<Duration> {
        self.runs.get(run_id)?.hangs.still(now)
    }

    /// What observers are shown of a training that stands still.
    pub fn hang(&self, run_id: &str, now: Instant) -> Option<Shown> {
        self.runs.get(run_id)?.hangs.shown(now)
    }

    /// A connection ended, for any reason. Connections without a `Hello` may be reported too.
    pub fn on_disconnected(&mut self, session: SessionId, now: Instant) {
        self.advance(now);
        if let Some((run_id, node)) = self.sessions.remove(&session) {
            self.apply(&run_id, Event::Disconnected { node }, now);
        }
    }

    /// The run and the node of a session that has introduced itself, and has not ended.
    pub fn node_of(&self, session: SessionId) -> Option<(String, NodeId)> {
        self.sessions.get(&session).cloned()
    }

    /// The process of a node has ended, after its session.
    pub fn on_dead(&mut self, run_id: &str, node: NodeId, now: Instant) {
        self.advance(now);
        self.apply(run_id, Event::Dead { node }, now);
    }

    /// Somebody watches this run, or the only one.
    pub fn on_watched(&mut self, run_id: Option<&str>, now: Instant) {
        self.advance(now);
        let only = self.runs.keys().next().filter(|_| self.runs.len() == 1);
        if let Some(run_id) = run_id.or(only.map(String::as_str)).map(str::to_owned) {
            self.apply(&run_id, Event::Watched, now);
        }
    }

    /// Time has passed.
    pub fn on_tick(&mut self, now: Instant) {
        self.advance(now);
        let due: Vec<_> = self.due.iter().take_while(|(at, _)| *at <= now).map(|(_, run_id)| run_id.clone()).collect();
        due.iter().for_each(|run_id| self.apply(run_id, Event::Tick, now));
        self.forget(now);
    }

    /// When to call [`Machine::on_tick`] at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let due = self.due.first().map(|(at, _)| *at);
        due.into_iter().chain(self.vacant.first().map(|(since, _)| *since + VACANT_FOR)).min()
    }

    /// Take the commands to perform now, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        mem::take(&mut self.commands)
    }

    /// The run with this id.
    pub fn run(&self, run_id: &str) -> Option<&Run> {
        self.runs.get(run_id).or_else(|| self.remembered.get(run_id)).map(|entry| &entry.run)
    }

    /// Whether its process ends.
    pub fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// The ids of all runs, with nodes and without.
    pub fn run_ids(&self) -> impl Iterator<Item = &str> {
        self.runs.keys().chain(self.remembered.keys()).map(String::as_str)
    }

    /// Number of runs, with nodes and without.
    pub fn run_count(&self) -> usize {
        self.runs.len() + self.remembered.len()
    }

    /// Number of connected sessions that have introduced themselves.
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// An event of a run.
    fn apply(&mut self, run_id: &str, event: Event, now: Instant) {
        self.decide(run_id, event, now);
        while self.deserted.len() > DESERTED_RUNS {
            let Some((_, run_id)) = self.deserted.first().cloned() else { return };
            let why = format!("{DESERTED_RUNS} other runs have lost their connections since: its nodes are given up");
            self.decide(&run_id, Event::GiveUp { why }, now);
        }
    }

    /// Let a run decide, perform the effects, and update the indexes.
    fn decide(&mut self, run_id: &str, event: Event, now: Instant) {
        let Some(entry) = self.runs.get_mut(run_id) else { return };
        let mut left = None;
        for effect in entry.run.apply(event, now) {
            match effect {
                Effect::Send { session, message } => self.commands.push(Command::Send { session, message }),
                Effect::End { session } => {
                    // A node that still has this session is sent away. Its end is handled when its connection ends.
                    let kept =
                        self.sessions.get(&session).is_some_and(|(_, id)| entry.run.session(*id) == Some(session));
                    if !kept {
                        self.sessions.remove(&session);
                    }
                    self.commands.push(Command::End { session });
                }
                Effect::Record(record) => self.commands.push(Command::Record { run_id: run_id.to_owned(), record }),
                Effect::Warn(text) => self.commands.push(Command::Warn { run_id: run_id.to_owned(), text }),
                Effect::Tally(tally) => self.commands.push(Command::Tally { run_id: run_id.to_owned(), tally }),
                Effect::Exclusions => {
                    let hosts = entry.run.exclusions(now);
                    self.commands.push(Command::Exclusions { run_id: run_id.to_owned(), hosts });
                }
                Effect::EmptyStore => self.commands.push(Command::EmptyStore),
                Effect::HostLeft { why, interrupts } => {
                    left = Some(Leaving { run_id: run_id.to_owned(), interrupts, why });
                }
            }
        }
        self.settle(run_id, now);
        if let Some(leaving) = left {
            self.on_host_left(leaving, now);
        }
    }

    /// The node in this coordinator's own process has left: another process leads from now on, or every run that has not ended ends here.
    fn on_host_left(&mut self, leaving: Leaving, now: Instant) {
        if self.led.as_ref().is_some_and(|led| led.may_hand_over) {
            return self.commands.push(Command::HandOver);
        }
        let all: Vec<String> = self.runs.keys().cloned().collect();
        self.leaving = Some(leaving.clone());
        for run_id in all {
            let interrupts = leaving.interrupts && leaving.run_id == run_id;
            self.decide(&run_id, Event::CoordinatorEnds { why: leaving.why.clone(), interrupts }, now);
        }
    }

    /// Reject a node if this coordinator's process ends. A node of a closed run is still admitted, to learn how its job has ended.
    fn refuses(&mut self, session: SessionId, hello: &Hello) -> bool {
        let ended = self.run(&hello.run_id).is_some_and(|run| run.closed().is_some());
        let Some(leaving) = self.leaving.as_ref().filter(|_| !ended) else { return false };
        let interrupts = leaving.interrupts && leaving.run_id == hello.run_id;
        let message = CoordinatorMessage::Leaving { why: leaving.why.clone(), interrupts };
        self.commands.push(Command::Send { session, message });
        self.commands.push(Command::End { session });
        true
    }

    /// Update a run's entries: in the indexes or, without nodes, among the remembered runs. A run with nothing to remember is dropped.
    fn settle(&mut self, run_id: &str, now: Instant) {
        self.judge(run_id, now);
        let Some(entry) = self.runs.get_mut(run_id) else { return };
        let (due, deserted) = match entry.run.is_empty() {
            true => (None, None),
            false => {
                let deserted = (entry.run.connected() == 0).then(|| entry.deserted.unwrap_or(now));
                let due = entry.run.next_deadline().into_iter().chain(entry.hangs.next_deadline(&entry.looks)).min();
                (due, deserted)
            }
        };
        refile(&mut self.due, mem::replace(&mut entry.due, due), due, run_id);
        refile(&mut self.deserted, mem::replace(&mut entry.deserted, deserted), deserted, run_id);
        if !entry.run.is_empty() {
            entry.vacant_since = None;
            return;
        }
        let since = *entry.vacant_since.get_or_insert(now);
        let Some(entry) = self.runs.remove(run_id).filter(|entry| !entry.run.is_blank()) else {
            return self.commands.push(Command::Forget { run_id: run_id.to_owned(), why: None });
        };
        self.vacant.insert((since, run_id.to_owned()));
        self.remembered.insert(run_id.to_owned(), entry);
        self.forget(now);
    }

    /// Restore a run for which a node asks, if it is among the remembered ones.
    fn restore(&mut self, run_id: &str) {
        let Some(entry) = self.remembered.remove(run_id) else { return };
        if let Some(since) = entry.vacant_since {
            self.vacant.remove(&(since, run_id.to_owned()));
        }
        self.runs.insert(run_id.to_owned(), entry);
    }

    /// Drop runs that have been without nodes for too long, and the oldest if there are too many.
    fn forget(&mut self, now: Instant) {
        while let Some((since, _)) = self.vacant.first() {
            let (over, many) = (now >= *since + VACANT_FOR, self.vacant.len() > VACANT_RUNS);
            if !over && !many {
                return;
            }
            let Some((since, run_id)) = self.vacant.pop_first() else { return };
            self.remembered.remove(&run_id);
            let left = format!("this run has had no nodes for {:.0?}", now - since);
            let why = match over {
                true => format!("{left}: it is forgotten"),
                false => format!("{left}, and {VACANT_RUNS} other runs have lost their nodes since: it is forgotten"),
            };
            self.commands.push(Command::Exclusions { run_id: run_id.clone(), hosts: Vec::new() });
            self.commands.push(Command::Forget { run_id, why: Some(why) });
        }
    }

    /// Renew every lease if the last deadline passed long ago: this process was stalled, and the nodes' silence proves nothing.
    fn advance(&mut self, now: Instant) {
        let is_late = |at: Instant| now.saturating_duration_since(at) > STALL;
        let late: Vec<_> =
            self.due.iter().take_while(|(at, _)| is_late(*at)).map(|(_, run_id)| run_id.clone()).collect();
        for run_id in late {
            let late = self.runs.get(&run_id).and_then(|entry| entry.run.lateness(now)).filter(|late| *late > STALL);
            if let Some(late) = late {
                self.decide(&run_id, Event::Stalled { late }, now);
            }
        }
    }

    /// Compare the indexes with the runs.
    ///
    /// # Errors
    /// The first difference.
    #[cfg(any(test, feature = "sim"))]
    pub fn check(&self) -> Result<(), String> {
        let due: BTreeSet<_> =
            self.runs.values().filter_map(|e| Some((e.run.next_deadline()?, e.run.id().to_owned()))).collect();
        let deserted: BTreeSet<_> = self.deserted.iter().map(|(_, run_id)| run_id).collect();
        let without: BTreeSet<_> =
            self.runs.iter().filter(|(_, entry)| entry.run.connected() == 0).map(|(run_id, _)| run_id).collect();
        if self.due == due && deserted == without {
            return Ok(());
        }
        Err(format!("runs are due at {:?}, filed at {:?}; deserted {without:?}, filed {deserted:?}", due, self.due))
    }
}

/// Move a run within an index.
fn refile(index: &mut BTreeSet<(Instant, String)>, before: Option<Instant>, now: Option<Instant>, run_id: &str) {
    if before == now {
        return;
    }
    if let Some(before) = before {
        index.remove(&(before, run_id.to_owned()));
    }
    if let Some(now) = now {
        index.insert((now, run_id.to_owned()));
    }
}

#[cfg(feature = "sim")]
impl DecisionState for Machine {
    fn decision_state(&self, now: Instant) -> Self {
        let mut all = self.clone();
        for Entry { run, .. } in all.runs.values_mut().chain(all.remembered.values_mut()) {
            *run = run.decision_state(now);
        }
        all
    }
}
