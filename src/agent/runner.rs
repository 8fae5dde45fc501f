//! Drives [`AgentMachine`]: workers and the session at one end, a front end at the other.
//!
//! The front end asks for the next [`Step`], carries it out, answers, and asks again. It decides nothing. It knows whether workers
//! are Python functions or programs, and which rendezvous is used. [`Runner::next`] may be dropped and called again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::account::OomKills;
use super::environment::Workers;
use super::failure_message::FailureMessage;
use super::health::Checks;
use super::machine::AgentMachine;
use super::news::Seen;
use super::own_hangs::OwnHangs;
use super::phases::Stopwatch;
use super::policy::{AgentOptions, Outcome};
use super::recovered::Disturbance;
use super::slots::Slots;
use super::uninterruptible::UninterruptibleWorkers;
use super::worker_group::{WorkerGroup, WorkerGroupEvent};
use crate::channel::agent::Exchange;
use crate::channel::message::World;
use crate::channel::watch::agent::Watches;
use crate::clock::until;
use crate::hang::judge::Mode;
use crate::rendezvous::conf::InPlace;
use crate::rendezvous::messages::message::{Placement, Running};
use crate::rendezvous::node::session::Session;
use crate::rendezvous::node::{JoinError, View};
use crate::workers::{Deadline, ExitStatus, StderrEnd, WorkerExit, reap_orphans_as_process_1};

mod deadline;
mod hang;
mod health;
mod in_place;
mod late;
mod look;
mod perform;
mod recovery;
mod replace;
mod signals;
mod standby;
mod start;
mod training;
mod uninterruptible;

use hang::Hangs;
use look::Looking;
use recovery::PendingRecovery;
use replace::Ahead;
pub use signals::Ear;
use signals::Hearing;
use standby::Standbys;
use start::Start;
pub use start::{Programs, START_PATIENCE};
use training::Training;

/// How long workers may take to be gone after SIGKILL, before their agent no longer waits for them.
const KILL: Duration = Duration::from_secs(5);

/// A step for the front end. Until it is answered, asking again returns the same step.
#[derive(Clone, Debug)]
pub enum Step {
    /// Join the next round; answer with [`Runner::placed`] or [`Runner::no_placement`].
    Join,
    /// Start all workers; answer with [`Runner::start`], [`Runner::started`] or [`Runner::not_started`].
    Start(Box<Placement>),
    /// A worker that was handed over by its process id has ended: find out how, and answer with [`Runner::reaped`].
    Reap {
        /// Which worker.
        local_rank: u32,
    },
    /// Without a session: wait for the other nodes to finish, and answer with [`Runner::all_done`].
    Barrier,
    /// The agent has ended.
    End(Box<Outcome>),
}

/// Where workers may record their exceptions, by local rank.
pub type ErrorFiles = BTreeMap<u32, PathBuf>;

/// A running agent.
#[derive(Debug)]
pub struct Runner {
    machine: AgentMachine,
    session: Option<Arc<Session>>,
    /// This node's name in other nodes' messages.
    name: String,
    entrypoint: String,
    workers: Workers,
    /// This node's place, once it has one, and when it was assigned.
    assignment: Option<(Placement, Instant)>,
    worker_group: Option<WorkerGroup>,
    /// When the guards of workers kill them.
    deadline: Option<Deadline>,
    /// Connections of workers that can change in place.
    exchange: Option<Exchange>,
    in_place: InPlace,
    /// How long what workers have started may run on once they have ended well.
    leftovers: Duration,
    /// The workers that the start under way is to start.
    missing: BTreeSet<u32>,
    /// Which worker each process is.
    slots: Slots,
    standbys: Standbys,
    /// What the front end is asked to start, and how often it was asked.
    start: Start,
    starts: u64,
    /// Workers that were started ahead of the next round.
    ahead: Ahead,
    /// The places of the round's workers, for those that attend.
    worlds: BTreeMap<u32, World>,
    error_files: ErrorFiles,
    kills_before: OomKills,
    /// Until when to find out whether a world runs, if that is to be found out.
    looking_until: Option<Instant>,
    /// The session's view that was last acted on.
    seen: Option<Seen>,
    steps: VecDeque<Step>,
    ending: Option<Box<Outcome>>,
    exits: Vec<WorkerExit>,
    /// Where to read the last words of workers that have ended.
    stderr_ends: BTreeMap<u32, StderrEnd>,
    /// Adopted workers whose ends the front end has reported.
    reaped: VecDeque<WorkerExit>,
    /// The words of the first worker that failed in the round.
    failure_message: Option<FailureMessage>,
    /// When the first failure of the round happened, or when this node learned of it.
    failed_at: Option<Instant>,
    /// The causes of adopted workers' failures, from the front end.
    reported: BTreeMap<u32, String>,
    farewell: Option<tokio::task::JoinHandle<()>>,
    /// Signals and notices.
    hearing: Hearing,
    /// Checks of this machine.
    health: Option<Checks>,
    /// A signal has ended this agent's work.
    signalled: bool,
    /// Workers that sleep uninterruptibly for too long are given up.
    uninterruptible: UninterruptibleWorkers,
    /// How long the parts of the recovery under way take.
    stopwatch: Stopwatch,
    /// Why its world re-forms, if it does.
    disturbance: Disturbance,
    /// The last recovery, until it is logged.
    pending_recovery: Option<PendingRecovery>,
    /// It has said who it is.
    introduced: bool,
    /// The steps of training that the workers report.
    training: Training,
    /// Looks at the workers that others ask for.
    looking: Looking,
    /// What the coordinator says of a training that hangs.
    hangs: Hangs,
    /// How this node's workers are judged. `None`: the coordinator judges all, or nobody does.
    own_hangs: Option<OwnHangs>,
    /// What the workers say during a look. `None`: nobody can ask for one, or it is switched off.
    watches: Option<Watches>,
    /// Process ids of running workers whose start is recorded. Those that survive a change were started once.
    recorded: BTreeSet<u32>,
}

impl Runner {
    /// An agent whose first step is to join. Without a `session` only its front end knows of other nodes. Process 1 reaps orphans.
    pub fn new(options: AgentOptions, session: Option<Arc<Session>>) -> Self {
        reap_orphans_as_process_1();
        let mut policy = options.policy();
        let exchange = in_place::listen(&options, session.is_some());
        policy.in_place &= exchange.is_some();
        standby::introduce(&options, policy.in_place);
        let slots = Slots::new(policy.workers, policy.standbys);
        let mut training = Training::new(&options, slots.count(), session.is_some());
        training.set_idle(slots.idle());
        let watches = look::listen(&options, session.is_some());
        let deadline = session.as_deref().and_then(deadline::hold);
        let is_own = session.as_ref().is_some_and(|session| !session.is_at_coordinator());
        let own_hangs = (is_own && options.hang.mode != Mode::Off).then(|| OwnHangs::new(options.hang));
        let hearing = Hearing::new(&options, session.as_deref());
        if is_own && options.health.is_some() {
            tracing::warn!("--health-check checks nothing over etcd, where nobody keeps ill machines out");
        }
        let health = options.health.clone().filter(|_| session.is_some() && !is_own).map(Checks::new);
        policy.checks_health = health.is_some();
        let AgentOptions { name, entrypoint, workers, uninterruptible_sleep, in_place, grace, on_hang, .. } = options;
        Self {
            machine: AgentMachine::new(policy, name.clone()),
            session,
            name,
            entrypoint,
            workers,
            assignment: None,
            worker_group: None,
            deadline,
            exchange,
            in_place,
            leftovers: grace,
            missing: BTreeSet::new(),
            slots,
            standbys: Standbys::default(),
            start: Start::Round,
            starts: 0,
            ahead: Ahead::default(),
            worlds: BTreeMap::new(),
            error_files: ErrorFiles::new(),
            kills_before: OomKills::default(),
            looking_until: None,
            seen: None,
            steps: VecDeque::new(),
            ending: None,
            exits: Vec::new(),
            stderr_ends: BTreeMap::new(),
            reaped: VecDeque::new(),
            failure_message: None,
            failed_at: None,
            reported: BTreeMap::new(),
            farewell: None,
            hearing,
            health,
            signalled: false,
            uninterruptible: UninterruptibleWorkers::new(uninterruptible_sleep),
            stopwatch: Stopwatch::default(),
            disturbance: Disturbance::default(),
            pending_recovery: None,
            introduced: false,
            training,
            looking: Looking::default(),
            hangs: Hangs::new(on_hang),
            own_hangs,
            watches,
            recorded: BTreeSet::new(),
        }
    }

    /// Waits for the next step of the front end.
    pub async fn next(&mut self) -> Step {
        loop {
            while let Some(exited) = self.reaped.pop_front() {
                self.on_exited(exited);
            }
            self.perform();
            if let Some(step) = self.steps.front().cloned() {
                if matches!(step, Step::Start(_)) && self.look_at_session() {
                    continue; // the start may no longer be wanted
                }
                return step;
            }
            if self.worker_group.is_none() && self.ending.is_some() {
                if let Some(farewell) = &mut self.farewell {
                    // The goodbye has its own time limit.
                    let _ = farewell.await;
                    self.farewell = None;
                }
                self.steps.extend(self.ending.take().map(Step::End));
                continue;
            }
            self.turn().await;
        }
    }

    /// Wait for the next event, and act on it. May be dropped.
    async fn turn(&mut self) {
        let deadline = self.machine.next_deadline();
        let running = self.machine.is_running();
        let look_at = self.uninterruptible.next_look(Instant::now()).filter(|_| running);
        let steps_at = self.training.next_look().filter(|_| self.ending.is_none());
        let report_at = self.pending_recovery.as_ref().map(PendingRecovery::until);
        let judge_at = self.own_hangs.as_ref().filter(|_| self.ending.is_none()).and_then(OwnHangs::next_deadline);
        tokio::select! {
            event = next_of(&mut self.worker_group) => self.on_worker_group(event),
            sound = self.hearing.next(self.session.as_deref()) => self.on_sound(sound),
            received = in_place::next_of(&mut self.exchange) => self.on_from_slot(received),
            () = self.training.rung() => self.on_rung(),
            asked = self.training.asked(self.session.as_deref()) => self.on_step_asked(asked),
            next = self.looking.next(self.session.as_deref()) => self.on_look(next),
            news = self.hangs.next(self.session.as_deref()) => self.on_hang(news),
            import = recovery::imported(self.session.as_deref(), self.pending_recovery.as_ref()) => self.log_recovery(Some(import)),
            (local_rank, failure_message, complete) = message_of(&mut self.failure_message) => {
                self.machine.on_failure_message(local_rank, failure_message, complete);
            }
            running = next_forecast(self.session.as_deref(), self.looking_until) => {
                self.looking_until = None;
                self.machine.on_forecast(running.as_ref(), Instant::now());
            }
            view = change_of(self.session.as_deref(), self.seen.as_ref()) => self.on_view(&view),
            () = until([deadline, look_at, steps_at, report_at, judge_at].into_iter().flatten().min()) => {
                let now = Instant::now();
                if report_at.is_some_and(|report_at| report_at <= now) {
                    self.log_recovery(None);
                }
                self.machine.on_tick(now);
                self.look_at_steps(now);
                self.judge_own();
                self.look_for_uninterruptible();
            }
        }
    }

    /// The answer to [`Step::Join`].
    pub fn placed(&mut self, placement: Placement) {
        self.answered(|step| matches!(step, Step::Join));
        self.seen = self.session.as_ref().map(|_| Seen::placed(&placement));
        self.stopwatch.placed(Instant::now());
        self.training.begin(placement.round);
        self.assignment = Some((placement.clone(), Instant::now()));
        (self.failure_message, self.failed_at) = (None, None); // they are of the round before
        self.take_over_ahead();
        if let Some(reason) = self.session.as_ref().and_then(|session| session.take_lost_survivors()) {
            self.machine.on_survivors_lost(&reason);
        }
        self.machine.on_placed(placement, Instant::now());
    }

    /// The other answer to [`Step::Join`].
    pub fn no_placement(&mut self, error: JoinError) {
        self.answered(|step| matches!(step, Step::Join));
        self.machine.on_no_placement(error);
    }

    /// The answer to [`Step::Reap`]. `reported`: the failure's cause, if the front end knows it; used if the error file is empty.
    pub fn reaped(&mut self, local_rank: u32, exit: ExitStatus, reported: String) {
        self.answered(|step| matches!(step, Step::Reap { local_rank: it } if *it == local_rank));
        if let Some(failure_message) = &mut self.failure_message {
            failure_message.on_reported(local_rank, reported.clone());
        }
        self.reported.insert(local_rank, reported);
        let exited = self.worker_group.as_mut().and_then(|worker_group| worker_group.reaped(local_rank, exit));
        self.reaped.extend(exited);
    }

    /// The answer to [`Step::Barrier`].
    pub fn all_done(&mut self) {
        self.answered(|step| matches!(step, Step::Barrier));
        self.machine.on_barrier_passed();
    }

    /// Without a session: the world must re-form.
    pub fn interrupted(&mut self, reason: &str) {
        let now = Instant::now();
        self.disturbance.note(reason, None, now);
        self.machine.on_interrupted(self.machine.round(), reason, now);
    }

    /// The front end gives up: kill the remaining workers, and wait for their end as long as a kill may take. Adopted workers are
    /// only killed: their parent reaps them.
    pub async fn close(&mut self) {
        let Some(mut worker_group) = self.worker_group.take() else { return };
        worker_group.kill();
        if matches!(worker_group, WorkerGroup::Spawned(_)) {
            let ended = async { while worker_group.next_event().await.is_some() {} };
            if tokio::time::timeout(KILL, ended).await.is_err() {
                let pids: Vec<u32> = worker_group.pids().into_values().collect();
                tracing::error!(
                    "workers with the pids {pids:?} have not ended {KILL:.0?} after SIGKILL, and their agent no longer waits for \
                     them: a hung device or file system holds them"
                );
            }
        }
    }

    /// How the workers of the last round ended, in that order.
    pub fn exits(&self) -> &[WorkerExit] {
        &self.exits
    }

    /// When the first failure of the round happened, or when this node learned of it. `None`: there was none.
    pub fn failed_at(&self) -> Option<Instant> {
        self.failed_at
    }

    /// The number of restarts after failures.
    pub fn restarts(&self) -> u32 {
        self.machine.restarts()
    }

    /// Where the workers of the last round may have recorded exceptions.
    pub fn error_files(&self) -> &ErrorFiles {
        &self.error_files
    }

    /// Global rank of the last round's first worker; 0 if no rendezvous has assigned ranks.
    pub fn first_rank(&self) -> u32 {
        let ranks = self.assignment.as_ref().and_then(|(placement, _)| placement.workers);
        ranks.map_or(0, |ranks| ranks.first_rank)
    }

    /// Whether this node has been a member of a round.
    pub fn was_in_world(&self) -> bool {
        !self.machine.is_new()
    }

    /// The place of this node, once it has one.
    pub fn placement(&self) -> Option<&Placement> {
        self.assignment.as_ref().map(|(placement, _)| placement)
    }

    /// The start that the front end was asked for is answered, or no longer wanted.
    fn start_answered(&mut self) {
        self.answered(|step| matches!(step, Step::Start(_)));
        if let Start::Standby(slot) = std::mem::replace(&mut self.start, Start::Round) {
            self.change_slots(|slots, _| slots.free(slot));
        }
    }

    fn answered(&mut self, which: impl Fn(&Step) -> bool) {
        self.steps.retain(|step| !which(step));
    }

    fn on_worker_group(&mut self, event: Option<WorkerGroupEvent>) {
        match event {
            Some(WorkerGroupEvent::Exited(exited)) => self.on_slot_exited(exited),
            Some(WorkerGroupEvent::Gone { local_rank: slot }) => self.on_slot_gone(slot),
            Some(WorkerGroupEvent::Overdue { local_rank: slot, pid }) => self.on_slot_overdue(slot, pid),
            Some(WorkerGroupEvent::Reap { local_rank }) => self.steps.push_back(Step::Reap { local_rank }),
            None => {
                self.worker_group = None;
                self.change_slots(|slots, _| slots.clear());
                self.stopwatch.stopped(Instant::now());
                self.machine.on_stopped();
            }
        }
    }

    fn on_exited(&mut self, exited: WorkerExit) {
        let now = Instant::now();
        if self.session.as_ref().is_some_and(|session| session.view().fenced.is_some()) {
            self.look_at_session(); // its guard has killed it: no failure
        }
        let WorkerExit { local_rank, pid, exit, at, late, .. } = exited;
        self.stderr_ends.insert(local_rank, self.stderr_end(local_rank));
        self.record_exit(&exited);
        self.note_exit(exited);
        if exit.is_success() {
            self.machine.on_worker_succeeded(local_rank, now);
        } else {
            if let Some(late) = late.filter(|_| self.machine.is_running()) {
                self.stopwatch.detected(late + now.saturating_duration_since(at));
            }
            let ended = (exit.to_string(), exit.returncode());
            let failure = self.failure(local_rank, pid, ended, String::new());
            if self.machine.is_running() {
                self.disturbance.own(&failure, &self.name, now);
                self.failed_at.get_or_insert(at.checked_sub(late.unwrap_or_default()).unwrap_or(at));
            }
            self.machine.on_worker_exited_badly(failure, now);
        }
    }

    fn on_view(&mut self, view: &View) {
        let now = Instant::now();
        self.seen = Some(Seen::of(view));
        if view.failure.is_some() {
            self.failed_at.get_or_insert(now);
        }
        self.disturbance.on_view(view, self.machine.is_running(), now);
        self.machine.on_view(view, now);
    }

    /// Act on the session's present view, without waiting. False if nothing is new.
    fn look_at_session(&mut self) -> bool {
        let Some(view) = self.session.as_ref().map(|session| session.view()) else { return false };
        let news = self.seen.as_ref().is_some_and(|seen| *seen != Seen::of(&view));
        if news {
            self.on_view(&view);
        }
        news
    }
}

async fn next_of(worker_group: &mut Option<WorkerGroup>) -> Option<WorkerGroupEvent> {
    match worker_group {
        Some(worker_group) => worker_group.next_event().await,
        None => pending().await,
    }
}

async fn message_of(failure_message: &mut Option<FailureMessage>) -> (u32, String, bool) {
    match failure_message {
        Some(failure_message) => failure_message.next().await,
        None => pending().await,
    }
}

/// Waits until it is known whether a world runs for which workers can be started before the join.
async fn next_forecast(session: Option<&Session>, until: Option<Instant>) -> Option<Running> {
    let Some(until) = until else { return pending().await };
    tokio::time::timeout_at(until.into(), session?.forecast()).await.ok().flatten()
}

/// Waits until the session's view changes in a way that concerns the agent.
async fn change_of(session: Option<&Session>, seen: Option<&Seen>) -> View {
    match (session, seen) {
        (Some(session), Some(seen)) => session.view_when(|view| Seen::of(view) != *seen).await,
        _ => pending().await,
    }
}
