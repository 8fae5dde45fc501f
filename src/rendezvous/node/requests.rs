//! What a node's agent asks of it: joins, reports, its part in changes in place, and its end; and what it wants to know. Part of [`super`].

use std::time::{Duration, Instant};

use super::join::{PendingJoin, Store};
use super::report::RoundResult;
use super::{JoinError, LEFT, NodeCommand, NodeMachine, View};
use crate::events::journal::{Entry, Journal, Reference};
use crate::events::record::{Kind, Phase, Record};
use crate::hang::view::View as RankView;
use crate::rendezvous::messages::bounds::tidy_failure;
use crate::rendezvous::messages::hang::PaceReport;
use crate::rendezvous::messages::message::{
    Failure, Health, Hello, JoinWorkers, NEVER, NodeMessage, Placement, Progress, Round, Running, StepReport, Survival,
    Verdict, Waits,
};
use crate::wire::text::tidy;

/// Joins.
impl NodeMachine {
    /// Ask for a rank assignment in the next round, giving up at `now + timeout`. [`NodeMachine::take_outcome`] returns the answer.
    ///
    /// The node's empty worker store listens on `store_port`. With `workers`, the answer has their ranks.
    pub fn join(
        &mut self,
        store_port: u16,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
        now: Instant,
    ) {
        self.begin_join(Store::Open(store_port), node_rank, workers, timeout, now);
    }

    /// Like [`NodeMachine::join`], with a worker store that the caller opens after the welcome. Only then is the address known at which
    /// other nodes find this one: see [`NodeMachine::wanted_store`].
    pub fn join_with_new_store(
        &mut self,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
        now: Instant,
    ) {
        self.begin_join(Store::OpenFor(None), node_rank, workers, timeout, now);
    }

    fn begin_join(
        &mut self,
        store: Store,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
        now: Instant,
    ) {
        self.joins.forget_last();
        self.reports.forget();
        self.view.fenced = None;
        if let Some(error) = self.refusal() {
            return self.joins.refuse(error);
        }
        if self.joins.is_withdrawing() {
            // The answer to the abandoned join may still arrive, and would look like the answer to this one.
            self.commands.push(NodeCommand::Disconnect);
            self.lose("an earlier join was abandoned".to_owned(), now);
        }
        self.stop_running();
        self.hello.joining = matches!(store, Store::Open(_));
        (self.view.waiting, self.view.unfinished) = (0, None);
        let check = self.in_place.check().filter(|check| *check != NEVER);
        self.end_change();
        self.joins.begin(store, self.view.round, node_rank, workers, check, (now, now + timeout));
        self.send_join();
    }

    /// Why no join can begin.
    fn refusal(&self) -> Option<JoinError> {
        match (&self.view.failed, &self.view.closed) {
            _ if self.left => Some(JoinError::connection(LEFT)),
            (Some(error), _) => Some(error.clone()),
            (None, Some(_)) if self.view.over.is_some() => self.view.over.clone(),
            (None, Some(verdict)) => Some(JoinError::Closed { verdict: verdict.clone(), spare: false }),
            (None, None) => None,
        }
    }

    /// The address for which the caller must open a worker store, if a join waits for one. Answer with
    /// [`NodeMachine::on_store_opened`]. If the address changes before the node has its rank assignment, another store is wanted.
    pub fn wanted_store(&self) -> Option<String> {
        let addr = self.view.addr.as_ref().filter(|_| self.link.is_welcomed())?;
        self.joins.wants_store(addr).then(|| addr.clone())
    }

    /// The store wanted for `addr` listens on this port.
    pub fn on_store_opened(&mut self, addr: String, port: u16) {
        if self.joins.on_store_opened(addr, port) {
            // Set no earlier: after a reconnect, the coordinator would wait for a join that may not come.
            self.hello.joining = true;
            self.send_join();
        }
    }

    /// Send the pending join, if the coordinator has welcomed this node and the worker store is open.
    pub(in crate::rendezvous) fn send_join(&mut self) {
        if let Some(pending) = self.ready_join().filter(|_| self.link.is_welcomed()) {
            let message = pending.message(self.changes_in_place());
            self.send(message);
            self.hello.joining = true;
        }
    }

    /// The pending join.
    pub(in crate::rendezvous) fn pending_join(&self) -> Option<&PendingJoin> {
        self.joins.pending()
    }

    /// The pending join, if its worker store is open.
    pub(in crate::rendezvous) fn ready_join(&self) -> Option<&PendingJoin> {
        self.joins.ready(self.view.addr.as_deref())
    }

    /// The progress of the round is known without a message.
    pub(in crate::rendezvous) fn on_progress(&mut self, progress: impl FnOnce() -> String, spare: bool, now: Instant) {
        if self.joins.pending().is_some_and(|pending| !pending.is_withdrawn()) {
            self.joins.on_waits(&Waits { progress: progress(), spare }, now);
        }
    }

    /// The outcome of the last join, once it has ended. Returned once.
    pub fn take_outcome(&mut self) -> Option<Result<Placement, JoinError>> {
        self.joins.take_outcome()
    }

    /// Withdraw the pending join, because its caller no longer waits (Ctrl-C). Has no effect once the outcome has been taken.
    pub fn abandon(&mut self) {
        let Some(placed) = self.joins.abandon() else { return };
        self.hello.joining = false;
        if placed {
            self.stop_running();
        }
        self.withdraw();
    }

    /// Inform the coordinator that this node no longer waits for a rank. Its Hello may have asked for one, so the withdrawal is sent also
    /// before the welcome.
    pub(super) fn withdraw(&mut self) {
        if self.link.is_up() {
            self.joins.on_withdrawal_sent();
            self.send(NodeMessage::Withdraw);
        }
    }

    /// What became of the last workers, for the next join. Without this call: [`Survival::New`].
    pub fn set_survivors(&mut self, survival: Survival) {
        self.joins.set_survivors(survival);
    }

    /// What is known of this machine's health, also for the join that waits.
    pub fn set_health(&mut self, health: Health) {
        self.joins.set_health(health);
        self.send_join();
    }

    /// Why the survivors that the last join brought have ended, if this node fenced itself while it waited. Taken once.
    pub fn take_lost_survivors(&mut self) -> Option<String> {
        self.joins.take_lost_survivors()
    }

    /// The world that runs, if this node may start its workers before it joins. `None` until that is known: the coordinator has not
    /// answered yet.
    pub fn forecast(&self) -> Option<Option<&Running>> {
        if !self.backend.is_coordinator() {
            return Some(None);
        }
        self.was_welcomed().then(|| self.in_place.running())
    }
}

/// Reports.
impl NodeMachine {
    /// Report that a worker of `round` has failed. The report is repeated on each new connection until it is answered: the world
    /// must re-form, the job has ended, or the round was over already.
    pub fn report_failure(&mut self, round: Round, failure: Failure) {
        let failure = Box::new(tidy_failure(&failure, String::new()));
        self.report(RoundResult::Failed { round, failure });
    }

    /// Report that all workers of `round` have succeeded. The view's `all_done` is set once those of all live members have.
    pub fn report_done(&mut self, round: Round) {
        self.report(RoundResult::Done { round });
    }

    fn report(&mut self, result: RoundResult) {
        let over = self.is_out() || self.view.closed.is_some();
        let current = self.hello.placed.is_some_and(|placed| placed.active && placed.round == result.round());
        if !over && current {
            self.send_if_welcomed(result.message());
            self.reports.keep(result);
        }
    }

    /// Report how long the parts of the recovery have taken that ended with `round`'s workers, if a coordinator is connected. It is not
    /// repeated: nothing depends on it.
    pub fn report_phases(&mut self, round: Round, phase: Phase, now: Instant) {
        self.reports.on_started(round, now);
        self.send_phases(round, phase, now);
    }

    /// As many workers of `round` as its world has are connected to their store, which this node serves.
    pub fn imported(&mut self, round: Round, now: Instant) {
        let Some(import) = self.reports.import_time(round, now) else { return };
        self.view.imported = Some((round, import));
        let import_us = u64::try_from(import.as_micros()).ok();
        self.send_phases(round, Phase { import_us, ..Phase::default() }, now);
    }

    fn send_phases(&mut self, round: Round, phase: Phase, now: Instant) {
        self.records.tick(now);
        self.records.on_phase(phase);
        self.send_to_coordinator(NodeMessage::PhaseDurations { round, phase });
    }

    /// Report this node's first step of `round`, as [`Self::report_phases`] reports its phases.
    pub fn report_first_step(&mut self, round: Round, first: Progress) {
        self.send_to_coordinator(NodeMessage::Progress { round, first });
    }

    /// Report how far this node's workers of `round` are, because the view's `steps_asked` has changed.
    pub fn report_progress(&mut self, round: Round, report: StepReport) {
        self.send_to_coordinator(NodeMessage::Step { round, report });
    }

    /// What was seen of this node's workers in a look, because the view's `looks_asked` has changed. `problem`: why their frames cannot be
    /// read. `py_spy`: what it shows of the rank for which it was asked.
    pub fn report_look(&mut self, number: u64, views: Vec<RankView>, problem: Option<String>, py_spy: Option<String>) {
        for view in views {
            self.send_to_coordinator(NodeMessage::View { number, view: Box::new(view) });
        }
        if let Some(text) = py_spy {
            self.send_to_coordinator(NodeMessage::PySpy { number, text });
        }
        self.send_to_coordinator(NodeMessage::Looked { number, problem });
    }

    /// This node's workers of `round` make no step, or have moved since.
    pub fn report_pace(&mut self, round: Round, pace: PaceReport) {
        self.send_to_coordinator(NodeMessage::Pace { round, pace });
    }

    /// The workers of `round` are being stopped, or leave their world.
    pub fn stopping(&mut self, round: Round) {
        self.reports.on_stopping(round);
    }

    /// Send this if a coordinator is connected. A run over a cell records no events and no steps, and forms no world whose workers
    /// survive.
    fn send_to_coordinator(&mut self, message: NodeMessage) {
        if self.has_coordinator() {
            self.send(message);
        }
    }
}

/// Changes in place.
impl NodeMachine {
    /// All living workers of `round` are connected to their agent, so that this node can change in place.
    pub fn attending(&mut self, round: Round) {
        if self.is_member(round) && self.hello.in_place {
            // Later connections begin with it.
            self.hello.attending = true;
            self.send_in_place(NodeMessage::Attending { round });
        }
    }

    /// The workers of `round` let `elastic_rs.elastic.run` make their process groups.
    pub fn no_process_group(&mut self, round: Round) {
        if self.is_member(round) {
            self.send_in_place(NodeMessage::NoProcessGroup { round });
        }
    }

    /// The workers of `round` save at the check of a change, and are started anew.
    pub fn saves(&mut self, round: Round) {
        if self.is_member(round) {
            let message = self.in_place.on_saves(round);
            self.send_in_place(message);
        }
    }

    /// The workers of `round` have passed this many checks, and wait at the next one: the answer to the view's `change`.
    pub fn counted(&mut self, round: Round, count: u64) {
        if self.is_member(round)
            && let Some(counted) = self.in_place.on_counted(round, count)
        {
            self.send_in_place(counted);
        }
    }

    /// This node is about to leave, and its workers need not be stopped at once. Returns whether the coordinator will answer: by the
    /// view's `change` and `raise_at`, or by `waiting`. If not, leave at once.
    pub fn will_leave(&mut self, round: Round, reason: &str, signal: Option<i32>) -> bool {
        let answered = self.hello.attending && self.is_member(round) && self.changes_in_place();
        if answered {
            let departure = self.in_place.on_leaving(round, reason, signal);
            self.send(departure);
        }
        answered
    }

    /// This node's machine is taken away after this time. Returns whether the coordinator will have all workers save, by the view's
    /// `checkpoint_by`.
    pub fn notice(&mut self, round: Round, left: Duration, reason: &str, now: Instant) -> bool {
        if !(self.is_member(round) && self.backend.is_coordinator()) {
            return false;
        }
        self.lease.ends_no_later(now + left);
        let notice = self.in_place.on_notice(round, left, reason, now);
        self.send_to_coordinator(notice); // or on the next connection
        self.has_coordinator()
    }

    /// The workers have stopped at the check, and this node leaves. The other nodes need not wait for its goodbye.
    pub fn parked(&mut self, round: Round) {
        if self.is_member(round)
            && let Some(parked) = self.in_place.on_parked(round)
        {
            self.send_in_place(parked);
        }
    }

    /// Send this if a coordinator is connected, and this node's workers may survive a change.
    pub(super) fn send_in_place(&mut self, message: NodeMessage) {
        if self.changes_in_place() {
            self.send(message);
        }
    }
}

/// The end.
impl NodeMachine {
    /// End the job on all nodes. The failure of a node that was never in a round does not: it concerns nobody else.
    pub fn close(&mut self, verdict: Verdict) {
        let concerns_nobody = verdict.is_failure() && self.hello.placed.is_none();
        if self.left || self.view.closed.is_some() || concerns_nobody {
            return;
        }
        let verdict = self.reports.close(&verdict);
        if self.backend.is_coordinator() {
            // The verdict is sent until a coordinator has it. Over a cell, the write may fail for good.
            self.view.closed = Some(verdict.clone());
        }
        self.send_if_welcomed(NodeMessage::Close(verdict));
    }

    /// Leave the rendezvous. Nothing is sent or received afterwards. `signal` is the signal that ended the agent, if one did.
    pub fn leave(&mut self, reason: String, signal: Option<i32>) {
        if !self.left {
            self.send_if_welcomed(NodeMessage::Leave { reason: tidy(&reason), signal });
        }
        self.left = true;
        self.resolve(Err(JoinError::connection(LEFT)));
    }
}

/// Events of this node.
impl NodeMachine {
    /// The events that this node has recorded.
    pub fn journal(&self) -> &Journal {
        self.records.journal()
    }

    /// Record an event of this node.
    pub fn record(&mut self, kind: Kind, text: Option<String>, now: Instant) {
        self.records.tick(now);
        self.records.add(kind, text);
    }

    /// This node's agent got a signal that ends it, for this reason in the words of its goodbye. Only the first one is recorded.
    pub fn record_signal(&mut self, signal: i32, reason: &str, now: Instant) {
        self.records.tick(now);
        self.records.on_signal(signal, reason);
    }

    /// Record decisions that this node has written into a shared cell.
    pub(in crate::rendezvous) fn record_decisions(&mut self, records: Vec<Record>, of: &[Reference], now: Instant) {
        self.records.tick(now);
        self.records.on_decided(records, of);
    }

    /// Take the events that no file has taken yet, and the number of those that were dropped before one could.
    pub fn take_events(&mut self) -> (Vec<Entry>, u64) {
        self.records.take()
    }
}

/// What callers want to know.
impl NodeMachine {
    /// Take the commands to perform now, in order.
    pub fn take_commands(&mut self) -> Vec<NodeCommand> {
        std::mem::take(&mut self.commands)
    }

    /// The node's current view of the rendezvous.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The run id of the job.
    pub fn run_id(&self) -> &str {
        &self.hello.run_id
    }

    /// The introduction with which the next connection begins.
    pub(in crate::rendezvous) fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Whether the node has left. Once its commands are performed, nothing remains to be done.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Whether this node can no longer take part.
    pub(in crate::rendezvous) fn has_failed(&self) -> bool {
        self.view.failed.is_some()
    }

    /// Whether the nodes meet at a coordinator.
    pub fn is_at_coordinator(&self) -> bool {
        self.backend.is_coordinator()
    }

    /// Whether a coordinator has welcomed this node on the connection that is open.
    pub fn has_coordinator(&self) -> bool {
        self.link.is_welcomed() && self.is_at_coordinator()
    }

    /// Whether the coordinator, or the backend in its place, has ever answered this node.
    pub fn was_welcomed(&self) -> bool {
        self.link.was_welcomed()
    }

    /// The name of the coordinator, or of the backend in its place, in messages.
    pub(in crate::rendezvous) fn backend_name(&self) -> String {
        self.backend.name()
    }

    /// The same without the word `coordinator`.
    #[cfg(feature = "io")]
    pub(in crate::rendezvous) fn backend_address(&self) -> &str {
        self.backend.address()
    }

    /// Time after which a waiting node first logs what it waits for.
    pub(super) fn silent_for(&self) -> Duration {
        self.backend.silent_for()
    }

    /// Explain why the backend is out of reach, in a sentence that names it.
    pub(super) fn why_out_of_reach(&self) -> String {
        self.backend.why_out_of_reach(&self.link, self.view.stopped.as_deref())
    }

    /// Explain why no answer has come yet.
    #[cfg(feature = "io")]
    pub(super) fn why_unanswered(&self) -> String {
        match self.view.out_of_reach_since {
            Some(_) => self.link.last_error().to_owned(),
            None => format!("{} does not answer", self.backend.address()),
        }
    }

    /// Since when this node has waited for a rank assignment, and what it waits for. `None` if no join is pending.
    pub fn waits(&self) -> Option<(Instant, String)> {
        let pending = self.joins.pending().filter(|pending| !pending.is_withdrawn())?;
        let what = match (pending.progress(), self.view.out_of_reach_since) {
            (_, Some(_)) => self.why_out_of_reach(),
            (Some(progress), None) => progress.to_owned(),
            (None, None) => "the round is not complete".to_owned(),
        };
        Some((pending.since(), what))
    }

    /// Since when the coordinator has been out of reach, and the text for the log. `None` if it is in reach.
    pub(super) fn out_of_reach(&self) -> Option<(Instant, String)> {
        let until = self.needed_until().filter(|_| !self.is_out())?;
        let (why, limit) = (self.why_out_of_reach(), self.backend.timeout()?);
        let idle = self.joins.pending().is_some() || self.reports.unanswered().is_some() || self.view.waiting > 0;
        let runs = self.hello.placed.is_some_and(|placed| placed.active && !self.reports.stops(placed.round));
        let meanwhile = match runs && !idle {
            true => "this node's workers run on, and it retries",
            false => "this node waits for it",
        };
        let text = format!("{why}; {meanwhile} for up to {limit:.0?} (coordinator_timeout)");
        Some((until.checked_sub(limit)?, text))
    }
}
