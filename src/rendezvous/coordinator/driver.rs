//! Drives [`Machine`]: reads messages of nodes, passes them to the machine, and writes its messages.
//!
//! One task owns the machine. It never waits for a connection ([`super::connections`]): messages that a node does not read are queued
//! up to a bound, beyond which its session ends. A session that ends is disconnected for the machine at once, whatever its node still
//! sends. The caller passes the connections ([`Incoming`]), which share the store's port.

use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout};

use super::connections::{ConnectionEvent, Shared, greetings};
pub use super::connections::{Incoming, asker_of};
use super::event_log::EventLog;
pub use super::event_log::{DriversHosts, Subject};
use super::lives::Lives;
use super::look_askers::LookAskers;
use super::machine::{Command, Machine};
use super::peers::Part;
use super::readers::{Asker, Readers, refusal};
use super::writing::Writing;
use crate::bounded_log::BoundedLog;
use crate::clock::until;
use crate::events::file::EventFile;
use crate::events::open_metrics::OpenMetrics;
use crate::net::same_user::SameUser;
use crate::rendezvous::messages::message::{CoordinatorMessage, PeerHello};
use crate::rendezvous::run::Exclusions;
use crate::rendezvous::run::SessionId;
use crate::secure::Protection;
use crate::wire::text::tidy;

/// Time for the last messages to be written when the coordinator ends.
const LAST_MESSAGES_LIMIT: Duration = Duration::from_secs(1);
/// Decisions of a run that are logged in a log period: far more than a job has that restarts every few seconds.
const RECORDS_PER_RUN: u64 = 200;
/// The additional number for each node of the run.
const RECORDS_PER_NODE: u64 = 10;
/// Decisions of all runs together that are logged in a log period: anybody who reaches the port can open runs.
const RECORDS_OF_ALL_RUNS: u64 = 10_000;

/// What others may ask of a coordinator that runs.
#[derive(Debug)]
pub enum Question {
    /// Whether new nodes are welcome: not once its process ends. Any answer shows that its thread runs.
    Ready(oneshot::Sender<bool>),
    /// Why this one may not read this run, or all runs if none is named, of those who may. `None`: it may.
    MayRead {
        /// Who asks.
        asker: Asker,
        /// Who may.
        readers: Readers,
        /// The run's id.
        run: Option<String>,
        /// Where the answer goes.
        reply: oneshot::Sender<Option<String>>,
    },
    /// Why readers are sent away, if this process has a list of endpoints and does not lead: a [`CoordinatorMessage::Redirect`].
    Elsewhere(oneshot::Sender<Option<CoordinatorMessage>>),
    /// What was counted, and the state of its runs.
    Metrics(oneshot::Sender<OpenMetrics>),
    /// What the page of a run shows, or why there is none. Without a name the only run, or a list of them.
    Page {
        /// Its id.
        run: Option<String>,
        /// Where the answer goes.
        reply: oneshot::Sender<Result<Subject, String>>,
    },
    /// Write all events into this file, beginning with those that are kept.
    Write(EventFile),
}

type Sessions = HashMap<SessionId, Writing>;

/// What others may want to know of a coordinator.
#[derive(Debug)]
pub struct Shown {
    /// The number of connected sessions.
    pub sessions: watch::Sender<usize>,
    /// The hosts that are kept out.
    pub exclusions: watch::Sender<Exclusions>,
    /// The hosts that drivers in this process do not use, which observers are shown.
    pub drivers: watch::Receiver<DriversHosts>,
    /// What others ask. May be closed.
    pub questions: mpsc::Receiver<Question>,
    /// Counts the peers that have proven themselves, and ask for what their proof is not good for.
    pub protection: Option<Arc<Protection>>,
    /// Who may observe, if the coordinator is not protected.
    pub readers: Readers,
    /// Finds out which user of this machine asks. `None`: the coordinator is protected, so nobody needs to know.
    pub same_user: Option<Arc<SameUser>>,
    /// How this process introduces itself to those at the other endpoints, if the job has a list of them.
    pub list: Option<PeerHello>,
}

/// Serve sessions until `incoming` is closed. `shown` is always up to date.
///
/// A connection without a `Hello` after `hello_timeout` is closed. Refused sessions, sessions that are ended for their messages,
/// and decisions are logged one by one up to a bound in each `log_period`, and then counted.
///
/// `empty_store` replaces the table of the endpoint's store; it blocks until that is done.
///
/// Messages to nodes and the file of events are written before this returns, or have had [`LAST_MESSAGES_LIMIT`] and
/// [`LAST_LINES`](crate::events::file::LAST_LINES) for it: the process may end then.
pub async fn run(
    mut machine: Machine,
    mut incoming: mpsc::UnboundedReceiver<Incoming>,
    mut shown: Shown,
    empty_store: impl Fn(),
    hello_timeout: Duration,
    log_period: Duration,
) {
    let log = Arc::new(BoundedLog::new(log_period, |what, count| {
        tracing::warn!(what, count, "further messages of this kind were not logged");
    }));
    let mut summarising = pin!(log.summarise());
    let mut writers = Sessions::new();
    let (events_in, mut events) = mpsc::channel(1024);
    let mut next_session = 0;
    let mut event_log = EventLog::new(rand::random(), shown.drivers.clone(), Instant::now().into_std());
    let mut look_askers = LookAskers::default();
    let mut lives = Lives::new(events_in.clone());
    let list = shown.list.take();
    let has_list = list.is_some();
    let mut part = list.map(|hello| Part::begin(hello, shown.protection.as_ref(), &events_in, &log));
    // Each writing task holds a sender, and drops it when it has written everything.
    let (writing, mut written) = mpsc::channel::<()>(1);
    let shared = Shared {
        events: events_in,
        writes: writing.downgrade(),
        observers: Arc::default(),
        log: log.clone(),
        protection: shown.protection.clone(),
        same_user: shown.same_user.clone(),
        hello_timeout,
        has_list,
    };
    let greetings = greetings(shared);
    loop {
        tokio::select! {
            // Messages that have arrived are handled before any node is dropped for silence.
            biased;
            connection = incoming.recv() => match connection {
                Some(connection) => {
                    next_session += 1;
                    let address = connection.peer.ip();
                    greetings.arrived((SessionId(next_session), connection), address, false);
                }
                None => break,
            },
            // Few may wait, so they cannot hold nodes up.
            Some(question) = shown.questions.recv() => answer(question, &mut machine, part.as_ref(), &mut event_log),
            Some(event) = events.recv() => {
                let asked = (&mut event_log, &mut look_askers);
                on_event(event, &mut machine, &mut part, (&mut writers, &mut lives), asked, shown.readers);
            }
            () = until([
                machine.next_deadline(),
                event_log.next_deadline(),
                look_askers.next_deadline(&machine),
                part.as_ref().map(|part| part.succession.next_deadline()),
            ].into_iter().flatten().min()) => {
                let now = Instant::now().into_std();
                part.iter_mut().for_each(|part| part.succession.on_tick(now));
                machine.on_tick(now);
                event_log.on_tick(now);
            }
            () = &mut summarising => {}
        }
        perform(&mut machine, &mut part, &mut writers, &mut event_log, &shown.exclusions, &empty_store, &log);
        look_askers.answer(&machine, Instant::now().into_std());
        shown
            .sessions
            .send_if_modified(|count| std::mem::replace(count, machine.session_count()) != machine.session_count());
    }
    // What has arrived still counts, if it is not answered: a node's goodbye, say, and the file for events of a job that was short.
    while let Ok(question) = shown.questions.try_recv() {
        answer(question, &mut machine, part.as_ref(), &mut event_log);
    }
    while let Ok(event) = events.try_recv() {
        let asked = (&mut event_log, &mut look_askers);
        on_event(event, &mut machine, &mut part, (&mut writers, &mut lives), asked, shown.readers);
        perform(&mut machine, &mut part, &mut writers, &mut event_log, &shown.exclusions, &empty_store, &log);
    }
    drop((part, writers, lives, events, writing));
    let _ = timeout(LAST_MESSAGES_LIMIT, written.recv()).await;
    event_log.finish();
}

fn on_event(
    event: ConnectionEvent,
    machine: &mut Machine,
    part: &mut Option<Part>,
    (writers, lives): (&mut Sessions, &mut Lives),
    (event_log, look_askers): (&mut EventLog, &mut LookAskers),
    readers: Readers,
) {
    let now = Instant::now().into_std();
    match event {
        ConnectionEvent::Hello { session, hello, ends, writing } => {
            if let Some(message) = part.as_ref().and_then(|part| part.turns_away(Some(&hello.run_id))) {
                let _ = writing.queue(&message); // it ends with this
                return;
            }
            writers.insert(session, writing);
            lives.on_hello(session, hello.life_at, ends);
            machine.on_hello(session, *hello, ends, now);
        }
        ConnectionEvent::Observe { ask, asker, reply } => {
            let run_id = ask.run_id.as_deref();
            if let Some(why) = asker.and_then(|asker| refusal(asker, readers, run_id, machine)) {
                let _ = reply.send(Err(why)); // the observer may have gone
                return;
            }
            if ask.state {
                machine.on_watched(run_id, now);
            }
            event_log.ask(ask, asker.is_some(), reply, machine, now);
        }
        ConnectionEvent::AskLook { ask, asker, reply } => {
            if let Some(why) = asker.and_then(|asker| refusal(asker, readers, ask.run_id.as_deref(), machine)) {
                let _ = reply.send(Err(why)); // the observer may have gone
                return;
            }
            look_askers.ask(ask, asker.is_some(), reply, machine, now);
        }
        ConnectionEvent::Message { session, message } => machine.on_message(session, message, now),
        ConnectionEvent::Gone { session } => {
            writers.remove(&session);
            lives.on_gone(session, machine.node_of(session));
            machine.on_disconnected(session, now);
        }
        ConnectionEvent::Reached { session, at } if writers.contains_key(&session) => lives.on_reached(session, at),
        ConnectionEvent::Reached { .. } => {}
        ConnectionEvent::Dead { run_id, node } => machine.on_dead(&run_id, node, now),
        ConnectionEvent::Elsewhere { run_id, reply } => {
            let told = part.as_ref().and_then(|part| part.turns_away(run_id.as_deref()));
            let _ = reply.send(told); // the observer may have gone
        }
        ConnectionEvent::Peer { hello, reply } => {
            let answer = match part {
                Some(part) => part.admit(&hello),
                None => Err(format!(
                    "this process was not given the list of endpoints {}: give all nodes the same --rdzv-endpoint",
                    tidy(&hello.endpoints.join(","))
                )),
            };
            let _ = reply.send(answer); // it may have gone
        }
        ConnectionEvent::PeerSays { place, process, message } => {
            let said = part.as_mut().map_or(Ok(()), |part| part.succession.on_message(place, process, message, now));
            if let Err(why) = said {
                tracing::warn!("a message of the process at another endpoint is not believed: {why}");
            }
        }
        ConnectionEvent::Link { place, link } => {
            part.iter_mut().for_each(|part| part.succession.on_link(place, link, now));
        }
    }
}

fn perform(
    machine: &mut Machine,
    part: &mut Option<Part>,
    writers: &mut Sessions,
    event_log: &mut EventLog,
    exclusions: &watch::Sender<Exclusions>,
    empty_store: impl Fn(),
    log: &BoundedLog,
) {
    let mut take = |machine: &mut Machine| match part {
        Some(part) => part.take(machine),
        None => machine.take_commands(),
    };
    let mut commands = VecDeque::from(take(machine));
    while let Some(command) = commands.pop_front() {
        match command {
            Command::Send { session, message } => {
                if let CoordinatorMessage::Rejected { reason } | CoordinatorMessage::Ended { reason } = &message
                    && log.admits("turned_away")
                {
                    tracing::warn!(session = session.0, "a node is rejected: {reason}");
                }
                send_to(session, &message, writers, machine, log);
                commands.extend(take(machine));
            }
            Command::End { session } => {
                writers.remove(&session);
                machine.on_disconnected(session, Instant::now().into_std());
                commands.extend(take(machine));
            }
            Command::EmptyStore => empty_store(),
            Command::HandOver => {} // its part in the list takes it
            Command::Exclusions { run_id, hosts } => {
                exclusions.send_if_modified(|all| match hosts.is_empty() {
                    true => all.remove(&run_id).is_some(),
                    false => all.insert(run_id, hosts.clone()).as_ref() != Some(&hosts),
                });
            }
            Command::Warn { run_id, text } => {
                if log.admits("warnings of runs") {
                    tracing::warn!("[{run_id}] {text}");
                }
            }
            Command::Tally { run_id, tally } => event_log.tally(&run_id, tally),
            Command::Record { run_id, record } => {
                if let Some(text) = &record.text {
                    let nodes = machine.run(&run_id).map_or(0, |run| run.nodes().len());
                    log_decision(&run_id, text, nodes, log);
                }
                event_log.keep(run_id, record, Instant::now().into_std());
            }
            Command::Forget { run_id, why } => {
                event_log.forget(&run_id, machine);
                if let Some(why) = why {
                    log_decision(&run_id, &why, 0, log);
                }
            }
        }
    }
    event_log.answer_waiting(machine);
}

/// Send a message to a node, or end its session.
fn send_to(
    session: SessionId,
    message: &CoordinatorMessage,
    writers: &mut Sessions,
    machine: &mut Machine,
    log: &BoundedLog,
) {
    let Some(Err(why)) = writers.get(&session).map(|writing| writing.queue(message)) else { return };
    if let Some(why) = why.filter(|_| log.admits("unsent")) {
        tracing::warn!(session = session.0, "{why}: the session ends");
    }
    writers.remove(&session);
    machine.on_disconnected(session, Instant::now().into_std());
}

/// Log a decision about a run with so many nodes.
fn log_decision(run_id: &str, text: &str, nodes: usize, log: &BoundedLog) {
    let of_run = (format!("decisions of run {run_id}").into(), RECORDS_PER_RUN + RECORDS_PER_NODE * nodes as u64);
    if log.admits_both(of_run, ("decisions of all runs", RECORDS_OF_ALL_RUNS)) {
        tracing::info!("[{run_id}] {text}");
    }
}

/// Answer a question, whose asker may have gone. Metrics have the step that was reported after they were last asked for.
fn answer(question: Question, machine: &mut Machine, part: Option<&Part>, event_log: &mut EventLog) {
    match question {
        Question::Elsewhere(reply) => drop(reply.send(part.and_then(|part| part.turns_away(None)))),
        Question::Ready(reply) => drop(reply.send(!machine.is_leaving())),
        Question::MayRead { asker, readers, run, reply } => {
            drop(reply.send(refusal(asker, readers, run.as_deref(), machine)));
        }
        Question::Metrics(reply) => {
            drop(reply.send(event_log.metrics(machine)));
            let now = Instant::now().into_std();
            event_log.runs().for_each(|run_id| machine.on_watched(Some(run_id), now));
        }
        Question::Page { run, reply } => drop(reply.send(event_log.subject(run.as_deref(), machine))),
        Question::Write(file) => event_log.write_into(file),
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;
    use crate::rendezvous::messages::codec;

    /// No bound on a reason is known to be missed, so the test makes the message itself.
    #[tokio::test]
    async fn a_message_that_fits_no_frame_costs_its_own_session() {
        let log = BoundedLog::new(Duration::from_secs(60), |_, _| {});
        let (mut machine, mut sessions) = (Machine::new(), Sessions::new());
        let mut outboxes = Vec::new();
        for number in 1..=2 {
            let (outbox, outgoing) = mpsc::channel::<BytesMut>(1);
            let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
            sessions.insert(SessionId(number), Writing::new(outbox, oneshot::channel().0, task));
            outboxes.push(outgoing);
        }
        let rejected = |bytes| CoordinatorMessage::Rejected { reason: "x".repeat(bytes) };
        let long = codec::FRAME_LIMIT_BYTES + 1;
        send_to(SessionId(1), &rejected(long), &mut sessions, &mut machine, &log);
        send_to(SessionId(2), &rejected(5), &mut sessions, &mut machine, &log);
        assert_eq!(sessions.keys().collect::<Vec<_>>(), [&SessionId(2)]);
        assert_eq!(outboxes[0].recv().await, None);
        assert!(outboxes[1].recv().await.is_some(), "the others are served");
    }
}
