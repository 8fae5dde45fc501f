//! [`Session`]: joins, reports and the view, for callers that wait.
//!
//! A [`MachineSlot`] carries the node's messages: over a connection to a coordinator ([`super::connection`]), or over a shared cell
//! ([`crate::rendezvous::cell`]).

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::connection::{Endpoint, drive};
pub use super::shared::WorkersEnd;
use super::shared::{Ending, MachineSlot, Recording, Shared};
use super::{JoinError, NodeMachine, View};
use crate::events::file::{EventFile, LAST_LINES};
use crate::events::record::{Kind, Phase};
use crate::hang::view::View as RankView;
use crate::rendezvous::messages::hang::PaceReport;
use crate::rendezvous::messages::message::{
    Failure, Health, Hello, JoinWorkers, Placement, Progress, Round, Running, StepReport, Survival, Verdict,
};
use crate::secure::Protection;
use crate::threads;

/// How long a goodbye may take in a process that a signal ends. Whoever has sent the signal kills a process that takes long.
pub const FAREWELL: Duration = Duration::from_secs(1);

/// An endpoint as text: `HOST:PORT`, or `[IPV6]:PORT`.
pub fn endpoint_of(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// A node's session with the coordinator. Dropping it ends the connection without a `Leave`. [`Session::leave`] sends one.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    /// Held while a join is pending.
    turn: tokio::sync::Mutex<()>,
    /// The task that drives the connection, or the calls to etcd. `None` over a cell, which its caller drives.
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Session {
    /// Start a session with the coordinator at `host:port`. It connects in the background, and retries until it succeeds. With a
    /// `protection`, only with a coordinator that holds the same token.
    pub fn open(
        runtime: &Handle,
        hello: Hello,
        host: &str,
        port: u16,
        coordinator_timeout: Duration,
        protection: Option<Arc<Protection>>,
    ) -> Self {
        Self::open_at(runtime, hello, (host, port), None, coordinator_timeout, protection)
    }

    /// The same for a process that hosts the coordinator itself, `at` this address. It may not reach itself at the endpoint's: that may
    /// be translated (NAT), or a name which only the other nodes can resolve.
    pub fn open_at(
        runtime: &Handle,
        hello: Hello,
        (host, port): (&str, u16),
        at: Option<SocketAddr>,
        coordinator_timeout: Duration,
        protection: Option<Arc<Protection>>,
    ) -> Self {
        let hosts = vec![(host.to_owned(), port)];
        Self::open_among(runtime, hello, hosts, at.map(|at| (0, at)), coordinator_timeout, protection)
    }

    /// The same for a coordinator at one of several endpoints; at least one. `own`: which of them is this process's, and where that is.
    pub fn open_among(
        runtime: &Handle,
        hello: Hello,
        hosts: Vec<(String, u16)>,
        own: Option<(usize, SocketAddr)>,
        coordinator_timeout: Duration,
        protection: Option<Arc<Protection>>,
    ) -> Self {
        let endpoints: Vec<_> = hosts.iter().map(|(host, port)| endpoint_of(host, *port)).collect();
        // The coordinator identifies nodes by the address of their connection, so a node with its own address connects from it.
        let source = hello.local_addr.as_deref().and_then(|addr| addr.parse().ok());
        let machine = NodeMachine::among(hello, &endpoints, coordinator_timeout, Instant::now());
        let machine = Arc::new(Mutex::new(machine));
        let mut session = Self::of(Arc::clone(&machine) as Arc<Mutex<dyn MachineSlot>>);
        let endpoint = Endpoint { hosts, source, own, protection };
        session.driven_by(runtime.spawn(drive(machine, Arc::clone(&session.shared), endpoint)));
        session
    }

    /// Make a session around a slot that the caller drives.
    pub(in crate::rendezvous) fn of(slot: Arc<Mutex<dyn MachineSlot>>) -> Self {
        let (steps, gone) = (watch::Sender::new(0), watch::Sender::new(false));
        let (requested, workers_end, events) = (Notify::new(), Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { slot, requested, steps, gone, workers_end, events, life: Mutex::default() });
        Self { shared, turn: tokio::sync::Mutex::default(), task: None }
    }

    /// Write this node's events into a file from now on, beginning with those that were recorded already. A later call has no effect.
    ///
    /// # Errors
    /// The thread that writes cannot be started.
    pub fn write_events(&self, path: &Path) -> io::Result<()> {
        let mut events = self.shared.events.lock();
        if events.is_none() {
            let (run_id, origin) = {
                let mut slot = self.shared.slot.lock();
                let machine = slot.machine();
                (machine.run_id().into(), machine.journal().origin().to_owned())
            };
            *events = Some(Recording { run_id, file: EventFile::open(path, &origin)? });
        }
        drop(events);
        self.shared.write_events();
        Ok(())
    }

    /// Have this end the workers when this node's lease is over, whatever this process does then.
    pub fn end_workers_by(&self, by: Box<dyn WorkersEnd>) {
        *self.shared.workers_end.lock() = Some(Ending { by, until: None });
        self.shared.keep_workers_end(self.shared.slot.lock().machine());
    }

    /// Why the survivors of the last join have ended, if this node fenced itself while it waited. Returned once.
    pub fn take_lost_survivors(&self) -> Option<String> {
        self.ask(NodeMachine::take_lost_survivors)
    }

    /// Record what one of this node's workers did.
    pub fn record(&self, kind: Kind) {
        self.shared.slot.lock().machine().record(kind, None, Instant::now());
        self.shared.write_events();
    }

    /// Make this task the session's driver: it ends with the session.
    pub(in crate::rendezvous) fn driven_by(&mut self, task: tokio::task::JoinHandle<()>) {
        self.task = Some(task);
    }

    /// The part that callers share with the driver.
    pub(in crate::rendezvous) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Take part in the next round. This node's empty worker store listens on `store_port`. With `workers`, the placement has their
    /// ranks. Dropping the future withdraws the join.
    ///
    /// # Errors
    /// [`JoinError`]. The session stays usable after `Timeout` and `Busy`.
    pub async fn join(
        &self,
        store_port: u16,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
    ) -> Result<Placement, JoinError> {
        let ask = |machine: &mut NodeMachine| machine.join(store_port, node_rank, workers, timeout, Instant::now());
        self.outcome_of(ask, |_| Ok(store_port)).await
    }

    /// Like [`Session::join`], with a worker store that `open` opens once the address is known at which other nodes find this one.
    /// `open` gets that address and returns the store's port. It is called again if the address changes.
    ///
    /// # Errors
    /// As [`Session::join`]. `Connection` also if the store cannot be opened.
    pub async fn join_opening(
        &self,
        open: impl FnMut(&str) -> io::Result<u16> + Send,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
    ) -> Result<Placement, JoinError> {
        let ask = |machine: &mut NodeMachine| machine.join_with_new_store(node_rank, workers, timeout, Instant::now());
        self.outcome_of(ask, open).await
    }

    async fn outcome_of(
        &self,
        join: impl FnOnce(&mut NodeMachine),
        mut open: impl FnMut(&str) -> io::Result<u16>,
    ) -> Result<Placement, JoinError> {
        let Ok(_turn) = self.turn.try_lock() else { return Err(JoinError::Busy) };
        let mut steps = self.shared.steps.subscribe();
        self.ask(join);
        let _abandoned_when_dropped = Pending(self);
        loop {
            let (outcome, wanted) = {
                let mut slot = self.shared.slot.lock();
                let machine = slot.machine();
                let outcome = machine.take_outcome();
                // Before anybody starts workers by it.
                self.shared.keep_workers_end(machine);
                (outcome, machine.wanted_store())
            };
            if let Some(outcome) = outcome {
                return outcome;
            }
            if let Some(addr) = wanted {
                let port = open(&addr)
                    .map_err(|error| JoinError::connection(format!("cannot listen for workers: {error}")))?;
                self.ask(|machine| machine.on_store_opened(addr, port));
                continue;
            }
            // The sender lives in `shared`: it cannot be gone.
            let _ = steps.changed().await;
        }
    }

    /// The current view, from memory.
    pub fn view(&self) -> View {
        let mut slot = self.shared.slot.lock();
        let machine = slot.machine();
        // After a stall of the whole process, the driver may not have run yet.
        machine.fence_if_due(Instant::now());
        self.shared.look_at_workers_end(machine);
        machine.view().clone()
    }

    /// Wait until the view satisfies `wanted`, and return it.
    pub async fn view_when(&self, wanted: impl Fn(&View) -> bool) -> View {
        let mut steps = self.shared.steps.subscribe();
        loop {
            let view = self.view();
            if wanted(&view) {
                return view;
            }
            // The sender lives in `shared`: it cannot be gone.
            let _ = steps.changed().await;
        }
    }

    /// Report a failed worker of `round`. The answer is in the view: the world must re-form (its `failure` is the first one), or the
    /// job has ended.
    pub fn report_failure(&self, round: Round, failure: Failure) {
        self.ask(|machine| machine.report_failure(round, failure));
    }

    /// Report that all workers of `round` have succeeded. The view's `all_done` is set once those of all live members have.
    pub fn report_done(&self, round: Round) {
        self.ask(|machine| machine.report_done(round));
    }

    /// What became of the last workers, for the next join. Without this call: [`Survival::New`]. The placement's `resume` is the answer.
    pub fn set_survivors(&self, survival: Survival) {
        self.ask(|machine| machine.set_survivors(survival));
    }

    /// How long the parts of the recovery have taken that ended with `round`'s workers. Sent once, to a coordinator that keeps events.
    pub fn report_phases(&self, round: Round, phase: Phase) {
        self.ask(|machine| machine.report_phases(round, phase, Instant::now()));
    }

    /// The workers of `round` are being stopped, or leave their world: for the log.
    pub fn stopping(&self, round: Round) {
        self.ask(|machine| machine.stopping(round));
    }

    /// As many workers of `round` as its world has are connected to their store, which this node serves.
    pub fn imported(&self, round: Round) {
        self.ask(|machine| machine.imported(round, Instant::now()));
    }

    /// This node's first step of `round`. Sent once, to a coordinator that keeps events.
    pub fn report_first_step(&self, round: Round, first: Progress) {
        self.ask(|machine| machine.report_first_step(round, first));
    }

    /// How far this node's workers of `round` are, because the view's `steps_asked` has changed.
    pub fn report_progress(&self, round: Round, report: StepReport) {
        self.ask(|machine| machine.report_progress(round, report));
    }

    /// What was seen of this node's workers in a look, because the view's `looks_asked` has changed. `problem`: why their frames cannot be
    /// read. `py_spy`: what it shows of the rank for which it was asked.
    pub fn report_look(&self, number: u64, views: Vec<RankView>, problem: Option<String>, py_spy: Option<String>) {
        self.ask(|machine| machine.report_look(number, views, problem, py_spy));
    }

    /// This node's workers of `round` make no step, or have moved since.
    pub fn report_pace(&self, round: Round, pace: PaceReport) {
        self.ask(|machine| machine.report_pace(round, pace));
    }

    /// All living workers of `round` are connected to their agent: the node can change in place.
    pub fn attending(&self, round: Round) {
        self.ask(|machine| machine.attending(round));
    }

    /// The workers of `round` let `elastic_rs.elastic.run` make their process groups.
    pub fn no_process_group(&self, round: Round) {
        self.ask(|machine| machine.no_process_group(round));
    }

    /// Wait until it is known whether a world runs for which this node may start its workers before it joins, and return that world.
    pub async fn forecast(&self) -> Option<Running> {
        let mut steps = self.shared.steps.subscribe();
        loop {
            let known = self.shared.slot.lock().machine().forecast().map(Option::<&Running>::cloned);
            if let Some(running) = known {
                return running;
            }
            // The sender lives in `shared`: it cannot be gone.
            let _ = steps.changed().await;
        }
    }

    /// What is known of this machine's health, also for the join that waits.
    pub fn set_health(&self, health: Health) {
        self.ask(|machine| machine.set_health(health));
    }

    /// The workers of `round` save at the check of a change, and are started anew.
    pub fn saves(&self, round: Round) {
        self.ask(|machine| machine.saves(round));
    }

    /// The workers of `round` have passed this many checks: the answer to the view's `change`.
    pub fn counted(&self, round: Round, count: u64) {
        self.ask(|machine| machine.counted(round, count));
    }

    /// This node is about to leave, and asks the others to change in place. Returns whether the coordinator will answer: by the view's
    /// `change` and `raise_at`, or by `waiting`. If not, leave at once.
    pub fn will_leave(&self, round: Round, reason: &str, signal: Option<i32>) -> bool {
        self.ask(|machine| {
            signal.iter().for_each(|signal| machine.record_signal(*signal, reason, Instant::now()));
            machine.will_leave(round, reason, signal)
        })
    }

    /// This node's machine is taken away after this time. Returns whether the coordinator will have all workers save, by the view's
    /// `checkpoint_by`. If not, this node's are to.
    pub fn notice(&self, round: Round, left: Duration, reason: &str) -> bool {
        self.ask(|machine| machine.notice(round, left, reason, Instant::now()))
    }

    /// The workers have stopped at the check of the view's `raise_at`, and this node leaves. [`Session::leave`] follows.
    pub fn parked(&self, round: Round) {
        self.ask(|machine| machine.parked(round));
    }

    /// A description of what this node waits for, if a join is pending.
    pub fn progress(&self) -> Option<String> {
        self.shared.slot.lock().machine().waits().map(|(_, what)| what)
    }

    /// Where this node meets the others: the coordinator's endpoint, or etcd's name, or `the backend`.
    pub fn endpoint(&self) -> String {
        self.shared.slot.lock().machine().backend_address().to_owned()
    }

    /// Whether the nodes meet at a coordinator, which judges all of them, and not over etcd or a backend of PyTorch's.
    pub fn is_at_coordinator(&self) -> bool {
        self.shared.slot.lock().machine().is_at_coordinator()
    }

    /// Whether the coordinator has ever welcomed this node.
    pub fn was_welcomed(&self) -> bool {
        self.shared.slot.lock().machine().was_welcomed()
    }

    /// End the job on all nodes, once the coordinator gets the message.
    pub fn close(&self, verdict: Verdict) {
        self.ask(|machine| machine.close(verdict));
    }

    /// Like [`Session::close`], and wait at most `limit` until the view shows it. Over a cell, that is when the verdict is written.
    ///
    /// # Errors
    /// `Timeout`, or the error for which this node can no longer take part.
    pub async fn close_within(&self, verdict: Verdict, limit: Duration) -> Result<(), JoinError> {
        self.close(verdict);
        let view = timeout(limit, self.view_when(|view| view.closed.is_some() || view.failed.is_some())).await;
        match view.map(|view| (view.closed.is_some(), view.failed)) {
            Ok((true, _)) | Ok((false, None)) => Ok(()),
            Ok((false, Some(error))) => Err(error),
            Err(_) => {
                let mut slot = self.shared.slot.lock();
                let machine = slot.machine();
                let progress = format!("the rendezvous could not be closed: {}", machine.why_unanswered());
                Err(JoinError::Timeout { after: limit, progress, endpoint: machine.backend.endpoint() })
            }
        }
    }

    /// Leave the rendezvous and end the session. Earlier messages are sent first, for at most `limit`. A pending join ends.
    /// `signal` is the signal that ended the agent, if one did. Then they are sent for at most [`FAREWELL`]. Later calls do nothing.
    pub async fn leave(&self, reason: String, signal: Option<i32>, limit: Duration) {
        let limit = if signal.is_some() { limit.min(FAREWELL) } else { limit };
        let mut gone = self.shared.gone.subscribe();
        self.ask(|machine| {
            signal.iter().for_each(|signal| machine.record_signal(*signal, &reason, Instant::now()));
            machine.leave(reason, signal);
        });
        if timeout(limit, gone.wait_for(|gone| *gone)).await.is_err() {
            self.task.iter().for_each(|task| task.abort());
            // Nothing is sent any more, so no later call waits for it.
            self.shared.gone.send_replace(true);
            self.shared.on_step();
        }
    }

    /// Write what was recorded to its end, which takes [`LAST_LINES`] at most. Nothing is written afterwards, so call it last: when
    /// nothing is left of the workers.
    pub async fn end_events(&self) {
        self.shared.write_events();
        let recording = self.shared.events.lock().clone();
        if let Some(Recording { file, .. }) = recording {
            // On a dedicated thread: the folder may hang.
            let _ = threads::aside("events-end", move || file.finish(LAST_LINES)).await;
        }
    }

    fn ask<T>(&self, question: impl FnOnce(&mut NodeMachine) -> T) -> T {
        let mut slot = self.shared.slot.lock();
        let answer = question(slot.machine());
        slot.on_request(Instant::now());
        self.shared.keep_workers_end(slot.machine());
        drop(slot);
        self.shared.requested.notify_one();
        answer
    }
}

/// A pending join.
struct Pending<'a>(&'a Session);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.ask(NodeMachine::abandon);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.iter().for_each(|task| task.abort());
    }
}
