//! All runs of one coordinator: which session belongs to which node of which run, and when to look at each run.
//!
//! Pure: no sockets, no clock. [`Machine`]'s `on_*` methods take what happened and `now`; [`Machine::take_commands`] gives what
//! to do about it; [`Machine::next_deadline`] says when to call [`Machine::on_tick`] at the latest (earlier is harmless). What
//! becomes of a run is [`Run::apply`]'s to decide.
//!
//! A coordinator that finds its own tick late was stalled, and renews every lease before it judges.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::rendezvous::decider::event::{Effect, Ends, Event, Home, Reach, SessionId};
use crate::rendezvous::decider::run::Run;
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, NodeId, NodeMessage};
use crate::rendezvous::protocol::settings::STALL;

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send a message.
    Send {
        /// To whom.
        session: SessionId,
        /// What.
        message: CoordinatorMessage,
    },
    /// Close the connection once everything sent to it has left.
    End {
        /// Whose.
        session: SessionId,
    },
    /// Tell the operator what was decided, and why.
    Note {
        /// Which run.
        run_id: String,
        /// In words.
        text: String,
    },
}

/// A run, and what the registry keeps of it.
#[derive(Clone, Debug)]
struct Entry {
    run: Run,
    /// Under which time the run is in [`Machine::due`].
    due: Option<Instant>,
    /// Since when it has had nodes, and no connection: its time in [`Machine::deserted`].
    deserted: Option<Instant>,
    /// Since when nobody has been in it.
    vacant_since: Option<Instant>,
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
    /// Runs that nobody is in any more: no event costs more because there are many.
    remembered: BTreeMap<String, Entry>,
    /// Since when nobody has been in them.
    vacant: BTreeSet<(Instant, String)>,
    /// When to look at each run, the earliest first: no event costs more because there are many runs.
    due: BTreeSet<(Instant, String)>,
    /// Runs that have nodes and no connection: since when.
    deserted: BTreeSet<(Instant, String)>,
    commands: Vec<Command>,
    /// The process that this coordinator is in, if it is known.
    home: Option<Home>,
    /// That process ends.
    leaving: Option<Leaving>,
}

/// How long a run is remembered that nobody is in any more: a node that comes late still learns how the job ended, and one
/// that returns finds the number of its round. Longer than any node does without its coordinator by default
/// (`coordinator_timeout`, 300 s).
pub const VACANT_FOR: Duration = Duration::from_secs(3600);
/// How many such runs are remembered, the last ones: strangers may leave behind as many as they like.
pub const VACANT_RUNS: usize = 1000;
/// How many runs may wait for nodes whose connections have all ended, the last ones. The nodes of older ones are given up before their
/// grace is over: strangers may leave behind as many as they like.
pub const DESERTED_RUNS: usize = 4000;

impl Machine {
    /// A coordinator that has heard of nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, in a process that is known.
    pub fn at_home(home: Home) -> Self {
        Self { home: Some(home), ..Self::default() }
    }

    /// A node introduced itself on a new connection.
    pub fn on_hello(&mut self, session: SessionId, hello: Hello, ends: Ends, now: Instant) {
        self.advance(now);
        if self.turns_away(session, &hello) {
            return;
        }
        if let Err(reason) = hello.validate() {
            self.commands.push(Command::Send { session, message: CoordinatorMessage::Rejected { reason } });
            self.commands.push(Command::End { session });
            return;
        }
        let (run_id, node) = (hello.run_id.clone(), hello.node);
        self.recollect(&run_id);
        self.runs.entry(run_id.clone()).or_insert_with(|| Entry {
            run: Run::young(run_id.clone(), hello.settings.clone(), now),
            due: None,
            deserted: None,
            vacant_since: None,
        });
        self.sessions.insert(session, (run_id.clone(), node));
        let (reach, home) = (Reach::Connection(ends), self.home);
        self.apply(&run_id, Event::Hello { hello: Box::new(hello), session, reach, home }, now);
    }

    /// A node said something.
    pub fn on_message(&mut self, session: SessionId, message: NodeMessage, now: Instant) {
        self.advance(now);
        if let Some((run_id, node)) = self.sessions.get(&session).cloned() {
            self.apply(&run_id, Event::Message { node, session, message }, now);
        }
    }

    /// A connection ended, for whatever reason. Connections that never said Hello may be reported too.
    pub fn on_disconnected(&mut self, session: SessionId, now: Instant) {
        self.advance(now);
        if let Some((run_id, node)) = self.sessions.remove(&session) {
            self.apply(&run_id, Event::Disconnected { node }, now);
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

    /// What to do now, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// What is known of a run.
    pub fn run(&self, run_id: &str) -> Option<&Run> {
        self.runs.get(run_id).or_else(|| self.remembered.get(run_id)).map(|entry| &entry.run)
    }

    /// How many runs are known: those that nodes are in, and those that are remembered.
    pub fn run_count(&self) -> usize {
        self.runs.len() + self.remembered.len()
    }

    /// How many sessions have introduced themselves and are connected.
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    /// Something has happened in a run.
    fn apply(&mut self, run_id: &str, event: Event, now: Instant) {
        self.decide(run_id, event, now);
        while self.deserted.len() > DESERTED_RUNS {
            let Some((_, run_id)) = self.deserted.first().cloned() else { return };
            let why = format!("{DESERTED_RUNS} runs have lost their connections since: its nodes are given up");
            self.decide(&run_id, Event::GiveUp { why }, now);
        }
    }

    /// Let a run decide, perform the effects, and put it where it belongs.
    fn decide(&mut self, run_id: &str, event: Event, now: Instant) {
        let Some(entry) = self.runs.get_mut(run_id) else { return };
        let mut left = None;
        for effect in entry.run.apply(event, now) {
            match effect {
                Effect::Send { session, message } => self.commands.push(Command::Send { session, message }),
                Effect::End { session } => {
                    // A node that still has this session is told to go, and heard of when its connection ends.
                    let kept =
                        self.sessions.get(&session).is_some_and(|(_, id)| entry.run.session(*id) == Some(session));
                    if !kept {
                        self.sessions.remove(&session);
                    }
                    self.commands.push(Command::End { session });
                }
                Effect::Note(text) => self.commands.push(Command::Note { run_id: run_id.to_owned(), text }),
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

    /// The node in this coordinator's own process has left: every run that has not ended ends here.
    fn on_host_left(&mut self, leaving: Leaving, now: Instant) {
        let all: Vec<String> = self.runs.keys().cloned().collect();
        self.leaving = Some(leaving.clone());
        for run_id in all {
            let interrupts = leaving.interrupts && leaving.run_id == run_id;
            self.decide(&run_id, Event::CoordinatorEnds { why: leaving.why.clone(), interrupts }, now);
        }
    }

    /// Whether this coordinator's process ends, and the node is told nothing else: nobody is admitted any more, except to
    /// learn how its job has ended.
    fn turns_away(&mut self, session: SessionId, hello: &Hello) -> bool {
        let ended = self.run(&hello.run_id).is_some_and(|run| run.closed().is_some());
        let Some(leaving) = self.leaving.as_ref().filter(|_| !ended) else { return false };
        let interrupts = leaving.interrupts && leaving.run_id == hello.run_id;
        let message = CoordinatorMessage::Leaving { why: leaving.why.clone(), interrupts };
        self.commands.push(Command::Send { session, message });
        self.commands.push(Command::End { session });
        true
    }

    /// Put a run where it belongs: into the indexes, or, if nobody is in it any more, among those that are only remembered. One that
    /// has nothing to remember is gone at once.
    fn settle(&mut self, run_id: &str, now: Instant) {
        let Some(entry) = self.runs.get_mut(run_id) else { return };
        let (due, deserted) = match entry.run.is_empty() {
            true => (None, None),
            false => {
                let deserted = (entry.run.connected() == 0).then(|| entry.deserted.unwrap_or(now));
                (entry.run.next_deadline(), deserted)
            }
        };
        refile(&mut self.due, std::mem::replace(&mut entry.due, due), due, run_id);
        refile(&mut self.deserted, std::mem::replace(&mut entry.deserted, deserted), deserted, run_id);
        if !entry.run.is_empty() {
            entry.vacant_since = None;
            return;
        }
        let since = *entry.vacant_since.get_or_insert(now);
        let Some(entry) = self.runs.remove(run_id).filter(|entry| !entry.run.is_blank()) else { return };
        self.vacant.insert((since, run_id.to_owned()));
        self.remembered.insert(run_id.to_owned(), entry);
        self.forget(now);
    }

    /// Somebody asks for a run that may only be remembered.
    fn recollect(&mut self, run_id: &str) {
        let Some(entry) = self.remembered.remove(run_id) else { return };
        if let Some(since) = entry.vacant_since {
            self.vacant.remove(&(since, run_id.to_owned()));
        }
        self.runs.insert(run_id.to_owned(), entry);
    }

    /// Forget the runs that nobody has been in for long, and the oldest of those that are too many.
    fn forget(&mut self, now: Instant) {
        while let Some((since, _)) = self.vacant.first() {
            let (over, many) = (now >= *since + VACANT_FOR, self.vacant.len() > VACANT_RUNS);
            if !over && !many {
                return;
            }
            let Some((since, run_id)) = self.vacant.pop_first() else { return };
            self.remembered.remove(&run_id);
            let left = format!("nobody has been here for {:.0?}", now - since);
            let text = match over {
                true => format!("{left}: this run is forgotten"),
                false => format!("{left}, and {VACANT_RUNS} runs have been left since: this run is forgotten"),
            };
            self.commands.push(Command::Note { run_id, text });
        }
    }

    /// Renew every lease if the last deadline passed long ago: it was this process that stood still, not the nodes.
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

    /// Compare the indexes of runs with the runs.
    ///
    /// # Errors
    /// Which differ.
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
