//! Drives [`AgentMachine`]: workers and the session at one end, a front end at the other.
//!
//! The front end asks for the next [`Step`], carries it out, answers, and asks again. It decides nothing: whether workers are
//! Python functions or programs, and who the rendezvous is, is its business. [`Runner::next`] may be dropped and called again.

use std::collections::{BTreeMap, VecDeque};
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::account::{self, OomKills};
use super::crew::{Crew, CrewEvent};
use super::machine::{AgentMachine, Command};
use super::news::Seen;
use super::policy::{Outcome, Policy};
use crate::process::{Exit, Exited, Signal, StopPolicy};
use crate::rendezvous::message::{Failure, Placement};
use crate::rendezvous::node::{JoinError, View};
use crate::rendezvous::session::Session;

/// How long a goodbye may take.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long workers may take to be gone once they are killed.
const KILL: Duration = Duration::from_secs(5);
/// How often workers are looked at for uninterruptible sleep, if that is asked for: nothing announces it.
const SLEEP_CHECK: Duration = Duration::from_secs(1);

/// What the front end is to do. Asked for again before it is answered, it is the same again.
#[derive(Clone, Debug)]
pub enum Step {
    /// Join the next round; answer with [`Runner::placed`] or [`Runner::no_place`].
    Join,
    /// Start all workers; answer with [`Runner::started`] or [`Runner::not_started`].
    Start(Box<Placement>),
    /// A worker that was handed over by its process id has ended: find out how, and answer with [`Runner::reaped`].
    Reap {
        /// Which worker.
        local_rank: u32,
    },
    /// Without a session: wait for the other nodes to finish, and answer with [`Runner::all_done`].
    Barrier,
    /// That was all.
    End(Box<Outcome>),
}

/// What the runner knows of the workers it is given.
#[derive(Debug, Default)]
pub struct Started {
    /// Where each worker's error file is, by local rank.
    pub error_files: BTreeMap<u32, std::path::PathBuf>,
    /// Global rank of the first.
    pub first_rank: u32,
}

/// One agent at work.
#[derive(Debug)]
pub struct Runner {
    machine: AgentMachine,
    session: Option<Arc<Session>>,
    run_id: String,
    role: String,
    /// The node's rank and the moment its workers were started, once it has a place.
    place: Option<(u32, Instant)>,
    crew: Option<Crew>,
    started: Started,
    kills_before: OomKills,
    /// The moment of the session's view that was acted on last.
    seen: Option<Seen>,
    steps: VecDeque<Step>,
    ending: Option<Box<Outcome>>,
    exits: Vec<Exited>,
    farewell: Option<tokio::task::JoinHandle<()>>,
    /// Workers that sleep uninterruptibly for longer are given up. Zero: nobody looks.
    sleep_limit: Duration,
    asleep_since: BTreeMap<u32, Instant>,
}

impl Runner {
    /// An agent whose first step is to join. Without a `session` it hears of other nodes only from its front end. `run_id` and
    /// `role` are what its log and its failures name.
    pub fn new(policy: Policy, name: String, run_id: String, role: String, session: Option<Arc<Session>>) -> Self {
        Self {
            machine: AgentMachine::new(policy, name),
            session,
            run_id,
            role,
            place: None,
            crew: None,
            started: Started::default(),
            kills_before: OomKills::default(),
            seen: None,
            steps: VecDeque::new(),
            ending: None,
            exits: Vec::new(),
            farewell: None,
            sleep_limit: Duration::ZERO,
            asleep_since: BTreeMap::new(),
        }
    }

    /// Give up workers that sleep uninterruptibly for so long: they hold a device that new ones could not use either.
    pub fn limit_uninterruptible_sleep(&mut self, limit: Duration) {
        self.sleep_limit = limit;
    }

    /// What the front end is to do next. Waits until there is something.
    pub async fn next(&mut self) -> Step {
        loop {
            self.perform();
            if let Some(step) = self.steps.front() {
                return step.clone();
            }
            if self.crew.is_none() && self.ending.is_some() {
                if let Some(farewell) = &mut self.farewell {
                    // It is bounded by itself.
                    let _ = farewell.await;
                    self.farewell = None;
                }
                self.steps.extend(self.ending.take().map(Step::End));
                continue;
            }
            let deadline = self.machine.next_deadline();
            let look_at = (self.sleeps_matter()).then(|| Instant::now() + SLEEP_CHECK);
            tokio::select! {
                event = next_of(&mut self.crew) => self.on_crew(event),
                view = change_of(self.session.as_deref(), self.seen.as_ref()) => self.on_view(&view),
                () = until([deadline, look_at].into_iter().flatten().min()) => {
                    self.machine.on_tick(Instant::now());
                    self.look_for_sleepers();
                }
            }
        }
    }

    /// The answer to [`Step::Join`].
    pub fn placed(&mut self, placement: Placement) {
        self.answered(|step| matches!(step, Step::Join));
        self.seen = self.session.as_ref().map(|_| Seen::placed(&placement));
        self.place = Some((placement.rank, Instant::now()));
        self.machine.on_placed(placement);
    }

    /// The other answer to [`Step::Join`].
    pub fn no_place(&mut self, error: JoinError) {
        self.answered(|step| matches!(step, Step::Join));
        self.machine.on_no_place(error);
    }

    /// The answer to [`Step::Start`].
    pub fn started(&mut self, crew: Crew, started: Started) {
        self.answered(|step| matches!(step, Step::Start(_)));
        self.crew = Some(crew);
        self.started = started;
        self.exits.clear();
        self.asleep_since.clear();
        self.kills_before = OomKills::now();
    }

    /// The other answer to [`Step::Start`]: the worker `local_rank` cannot be started, and none runs.
    pub fn not_started(&mut self, local_rank: u32, first_rank: u32, reason: &str) {
        self.answered(|step| matches!(step, Step::Start(_)));
        self.exits.clear(); // those of the round before
        self.started = Started { first_rank, ..Started::default() };
        let failure = Failure {
            node: String::new(),
            role: self.role.clone(),
            local_rank,
            global_rank: first_rank + local_rank,
            pid: 0,
            exit: "a failure to start".to_owned(),
            returncode: 1,
            message: reason.to_owned(),
            counts: true,
        };
        self.machine.on_worker_failed(failure, false);
    }

    /// The answer to [`Step::Reap`].
    pub fn reaped(&mut self, local_rank: u32, exit: Exit) {
        self.answered(|step| matches!(step, Step::Reap { local_rank: it } if *it == local_rank));
        let exited = self.crew.as_mut().and_then(|crew| crew.reaped(local_rank, exit));
        if let Some(exited) = exited {
            self.on_exited(exited);
        }
    }

    /// The answer to [`Step::Barrier`].
    pub fn all_done(&mut self) {
        self.answered(|step| matches!(step, Step::Barrier));
        self.machine.on_barrier_passed();
    }

    /// This process got a signal that it handles.
    pub fn signal(&mut self, signal: i32) {
        self.machine.on_signal(signal);
    }

    /// Without a session: the world must re-form.
    pub fn interrupted(&mut self, reason: &str) {
        self.machine.on_interrupted(self.machine.round(), reason);
    }

    /// Signal the workers and do nothing else.
    pub fn forward(&self, signal: i32) {
        if let Some(crew) = &self.crew {
            crew.signal(Signal(signal));
        }
    }

    /// The front end gives up: kill what is left of the workers, and wait for that as long as a kill may take. Adopted workers
    /// are killed only; their parent reaps them.
    pub async fn close(&mut self) {
        let Some(mut crew) = self.crew.take() else { return };
        crew.kill();
        if matches!(crew, Crew::Spawned(_)) {
            let ended = async { while crew.next_event().await.is_some() {} };
            if tokio::time::timeout(KILL, ended).await.is_err() {
                tracing::error!("workers have not ended {KILL:.0?} after SIGKILL and are waited for no longer");
            }
        }
    }

    /// How the workers of the last round ended, in that order.
    pub fn exits(&self) -> &[Exited] {
        &self.exits
    }

    /// How many restarts failures have cost.
    pub fn restarts(&self) -> u32 {
        self.machine.restarts()
    }

    fn answered(&mut self, which: impl Fn(&Step) -> bool) {
        self.steps.retain(|step| !which(step));
    }

    fn perform(&mut self) {
        loop {
            let commands = self.machine.take_commands();
            if commands.is_empty() {
                return;
            }
            commands.into_iter().for_each(|command| self.perform_one(command));
        }
    }

    fn perform_one(&mut self, command: Command) {
        match command {
            Command::Join => self.steps.push_back(Step::Join),
            Command::Start(placement) => self.steps.push_back(Step::Start(placement)),
            Command::Stop { signal, grace } => {
                self.answered(|step| matches!(step, Step::Start(_)));
                match &mut self.crew {
                    Some(crew) => {
                        crew.begin_stop(StopPolicy { signal: Signal(signal), grace, ..StopPolicy::default() })
                    }
                    None => self.machine.on_stopped(),
                }
            }
            Command::Kill => self.crew.iter_mut().for_each(Crew::kill),
            Command::Tell(text) => tracing::info!("{}{text}", self.whose()),
            Command::Warn(text) => tracing::warn!("{}{text}", self.whose()),
            Command::End(outcome) => {
                // Only workers that have ended still concern anybody.
                self.steps.retain(|step| matches!(step, Step::Reap { .. }));
                self.ending = Some(outcome);
            }
            Command::Done(round) => match &self.session {
                Some(session) => session.report_done(round),
                None => self.steps.push_back(Step::Barrier),
            },
            Command::Report(failure) => {
                tracing::warn!("{}stopping all workers: {failure}; the others are told", self.whose());
                if let Some(session) = &self.session {
                    session.report_failure(self.machine.round(), *failure);
                }
            }
            Command::Close(verdict) => {
                if let Some(session) = &self.session {
                    session.close(verdict);
                }
            }
            Command::Leave(reason) => {
                if let Some(session) = self.session.clone() {
                    self.farewell = Some(tokio::spawn(async move { session.leave(reason, FAREWELL).await }));
                }
            }
        }
    }

    /// What a line of the log begins with.
    fn whose(&self) -> String {
        let Some((rank, since)) = self.place else { return format!("[{}] ", self.run_id) };
        let (run_id, round, after) = (&self.run_id, self.machine.round(), since.elapsed().as_secs_f64());
        format!("[{run_id}] round {round}, node rank {rank}, after {after:.1} s: ")
    }

    fn on_crew(&mut self, event: Option<CrewEvent>) {
        match event {
            Some(CrewEvent::Exited(exited)) => self.on_exited(exited),
            Some(CrewEvent::Ended { local_rank }) => self.steps.push_back(Step::Reap { local_rank }),
            None => {
                self.crew = None;
                self.machine.on_stopped();
            }
        }
    }

    fn on_exited(&mut self, exited: Exited) {
        if exited.exit.is_success() {
            self.machine.on_worker_succeeded(exited.local_rank, Instant::now());
        } else {
            self.machine.on_worker_failed(self.failure(&exited), false);
        }
        self.exits.push(exited);
    }

    fn failure(&self, exited: &Exited) -> Failure {
        let recorded = self.started.error_files.get(&exited.local_rank);
        let recorded = recorded.and_then(|file| std::fs::read_to_string(file).ok());
        let mut message = account::words(recorded.as_deref(), &exited.stderr_tail);
        if exited.exit.returncode() == -Signal::KILL.0 {
            let hint = OomKills::now().hint(self.kills_before);
            message = [hint, message.as_str()].join("\n").trim_end().to_owned();
        }
        Failure {
            node: String::new(),
            role: self.role.clone(),
            local_rank: exited.local_rank,
            global_rank: self.started.first_rank + exited.local_rank,
            pid: exited.pid,
            exit: exited.exit.to_string(),
            returncode: exited.exit.returncode(),
            message,
            counts: true,
        }
    }

    fn on_view(&mut self, view: &View) {
        self.seen = Some(Seen::of(view));
        self.machine.on_view(view);
    }

    fn sleeps_matter(&self) -> bool {
        !self.sleep_limit.is_zero() && self.machine.is_running()
    }

    fn look_for_sleepers(&mut self) {
        let Some(crew) = self.crew.as_ref().filter(|_| self.sleeps_matter()) else { return };
        let now = Instant::now();
        let asleep: BTreeMap<u32, u32> =
            crew.pids().into_iter().filter(|(_, pid)| state_of(*pid) == Some('D')).collect();
        self.asleep_since.retain(|local_rank, _| asleep.contains_key(local_rank));
        for (local_rank, pid) in asleep {
            let since = *self.asleep_since.entry(local_rank).or_insert(now);
            if now - since < self.sleep_limit {
                continue;
            }
            let failure = Failure {
                node: String::new(),
                role: self.role.clone(),
                local_rank,
                global_rank: self.started.first_rank + local_rank,
                pid,
                exit: format!("uninterruptible sleep for {:.0?}", now - since),
                returncode: 1,
                message: "a hung device or file system holds it; a new worker on this host could not use it either"
                    .to_owned(),
                counts: true,
            };
            self.machine.on_worker_failed(failure, true);
        }
    }
}

/// The kernel's letter for a process's state.
fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

async fn next_of(crew: &mut Option<Crew>) -> Option<CrewEvent> {
    match crew {
        Some(crew) => crew.next_event().await,
        None => pending().await,
    }
}

/// The session's view, once something in it concerns the agent.
async fn change_of(session: Option<&Session>, seen: Option<&Seen>) -> View {
    match (session, seen) {
        (Some(session), Some(seen)) => session.view_when(|view| Seen::of(view) != *seen).await,
        _ => pending().await,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => pending().await,
    }
}
