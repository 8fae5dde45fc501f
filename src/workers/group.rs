//! The workers of one generation on this node, from their start until no process of them is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::pending;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::inotify;
use tokio::sync::{mpsc, oneshot};

use super::children::children_of;
use super::consoles::Consoles;
use super::deadline::Deadline;
use super::event::{Event, Left, Outcome, WorkerExit};
use super::forker::Forker;
use super::guard::plan::bind_threads;
use super::leftovers::{Act, Leftovers};
use super::logs::stream::{Source, Which};
use super::logs::{FilterOptions, Logs, Shown};
use super::message::Order;
use super::prefix::Prefix;
use super::spawn::{Guarded, Stage, StartError, open, spawn};
use super::spec::{Copies, Output, WorkerSpec};
use super::stderr_end::StderrEnd;
use super::stop::{Command, StopPolicy, Stopping};
use crate::clock::until;
use crate::signals::{FirstSignal, Signal};
use crate::steps::deaths::Deaths;
use crate::threads;

pub(super) mod member;

use member::{Member, News, Start};

/// Where workers come from, and until when they may run.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// Forks them where that is possible. Otherwise they are executed.
    pub forker: Option<Forker>,
    /// When their guards kill them, whatever this process does.
    pub deadline: Option<Deadline>,
    /// By what their deaths are known before their guards know them.
    pub deaths: Option<Arc<Deaths>>,
    /// How long processes may run on that a worker has started, once it has ended well. Default zero: they are killed with it.
    pub leftovers: Duration,
}

/// Running workers. Dropping it kills them and everything they started, which is complete a moment later. To know when, use
/// [`kill`](Self::kill) and [`next_event`](Self::next_event) instead. Any end of this process does the same.
#[derive(Debug)]
pub struct Group {
    /// Workers of which something is left, if only their guard.
    members: BTreeMap<u32, Member>,
    news: mpsc::UnboundedReceiver<News>,
    /// Reported before the next of `news`.
    ready: VecDeque<Event>,
    stopping: Option<Stopping>,
    leftovers: Leftovers,
    /// `None` if no stream is copied.
    logs: Option<Logs>,
}

impl Group {
    /// Starts all of these workers, and returns when each has been executed. Needs a tokio runtime with I/O and time.
    ///
    /// Dropping the future ends those already started.
    ///
    /// # Errors
    /// A worker cannot be started. Then none runs.
    pub async fn start(
        specs: Vec<WorkerSpec>,
        filters: FilterOptions,
        consoles: Consoles,
    ) -> Result<Group, StartError> {
        Group::start_from(Origin::default(), specs, filters, consoles).await
    }

    /// The same, with an origin that differs.
    pub async fn start_from(
        origin: Origin,
        specs: Vec<WorkerSpec>,
        filters: FilterOptions,
        consoles: Consoles,
    ) -> Result<Group, StartError> {
        // A separate task: even if our future is dropped, it runs until the started workers are reaped.
        let starting = tokio::spawn(start(origin, specs, filters, consoles));
        match starting.await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => pending().await, // the runtime is shutting down, which drops this future
        }
    }

    /// The process ids of workers that are not gone, by local rank.
    pub fn pids(&self) -> BTreeMap<u32, u32> {
        self.members.iter().filter(|(_, member)| !member.gone).map(|(rank, member)| (*rank, member.pid)).collect()
    }

    /// Where to read a worker's last words; `None` if it is gone.
    pub fn stderr_end(&self, local_rank: u32) -> Option<StderrEnd> {
        let member = self.members.get(&local_rank).filter(|member| !member.gone);
        member.map(|member| member.stderr_end.clone())
    }

    /// Waits for the next event; `None` once all workers are gone or stuck, and the guards of those that are gone have ended.
    ///
    /// During a stop it also sends the signals that become due, so keep calling it. Cancel-safe.
    pub async fn next_event(&mut self) -> Option<Event> {
        loop {
            self.act_on_stop();
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.members.is_empty() {
                return None;
            }
            let stopping = self.stopping.as_ref().and_then(Stopping::next_deadline);
            let deadline = [stopping, self.leftovers.next_deadline()].into_iter().flatten().min();
            tokio::select! {
                news = self.news.recv() => self.take(news?),
                () = until(deadline) => {}
            }
        }
    }

    /// Pass a signal on to all workers but these that have not ended, as SIGUSR1 to save a checkpoint. Nothing else follows.
    pub fn pass_on(&self, signal: Signal, to: FirstSignal, except: &BTreeSet<u32>) {
        let order = match to {
            FirstSignal::Leader => Order::PassOn(signal.0),
            FirstSignal::Group => Order::Signal(signal.0),
        };
        self.members
            .iter()
            .filter(|(number, member)| member.guard.is_none() && !member.gone && !except.contains(number))
            .for_each(|(_, member)| member.order(order));
    }

    /// Begins to stop all workers. [`next_event`](Self::next_event) carries it out. During a stop it has no effect.
    pub fn begin_stop(&mut self, policy: StopPolicy) {
        if self.stopping.is_none() {
            let (stopping, commands) = Stopping::begin(policy, self.members.keys().copied(), Instant::now());
            self.stopping = Some(stopping);
            self.leftovers.forget();
            self.perform(commands);
        }
    }

    /// Kills all workers and everything they started now, also during a stop: a second interrupt.
    pub fn kill(&mut self) {
        let now = Instant::now();
        match &mut self.stopping {
            Some(stopping) => {
                let commands = stopping.on_kill(now);
                self.perform(commands);
            }
            None => self.begin_stop(StopPolicy { grace: Duration::ZERO, ..StopPolicy::default() }),
        }
    }

    /// The worker `number` has the place of this spec from now on: streams that the agent copies are shown as it says. `binds`: to its
    /// CPUs, too.
    pub fn place(&self, number: u32, spec: &WorkerSpec, binds: bool) {
        let Some(member) = self.members.get(&number) else { return };
        if let Some(logs) = &self.logs {
            let shown = [&spec.stdout, &spec.stderr].map(|output| Shown {
                console: output.is_on_console(),
                prefix: output.prefix().map(|prefix| Prefix::new(prefix.into(), spec.local_rank.into())),
            });
            logs.show(number, shown);
        }
        if binds && let Err(error) = bind_threads(member.pid, &spec.cpus) {
            tracing::warn!(pid = member.pid, %error, "a worker that has taken another's place is not bound to that one's CPUs");
        }
    }

    /// Kills one worker and everything it started. The others are not affected.
    pub fn kill_worker(&self, local_rank: u32) {
        self.order(local_rank, Order::Kill);
    }

    /// Stops all workers and waits until all are gone or stuck.
    pub async fn stop(&mut self, policy: StopPolicy) -> Outcome {
        self.begin_stop(policy);
        let mut outcome = Outcome::default();
        while let Some(event) = self.next_event().await {
            match event {
                Event::Exited(exited) => outcome.exited.push(exited),
                Event::Stuck(left) => outcome.left.push(left),
                Event::Gone { .. } | Event::Overdue { .. } => {}
            }
        }
        outcome
    }

    async fn await_start(&mut self, spec: &WorkerSpec, started: oneshot::Receiver<Start>) -> Result<(), StartError> {
        match started.await {
            Ok(Start::Executed { pid }) => {
                if let Some(member) = self.members.get_mut(&spec.local_rank) {
                    member.pid = pid;
                }
                Ok(())
            }
            Ok(Start::Failed { step, errno }) => Err(StartError::reported(spec, step, errno)),
            Err(_) => {
                Err(StartError::new(spec.local_rank, Stage::Fork, io::Error::other("its guard process was killed")))
            }
        }
    }

    fn take(&mut self, news: News) {
        match news {
            News::Reaped { local_rank } => {
                self.members.remove(&local_rank);
                self.leftovers.on_gone(local_rank);
                if let Some(stopping) = &mut self.stopping {
                    stopping.on_gone(local_rank);
                }
            }
            News::Left { local_rank, guard } => {
                let Some(member) = self.members.get_mut(&local_rank) else { return };
                member.guard = Some(guard);
                match &self.stopping {
                    None => {
                        let act = self.leftovers.begin(local_rank, Instant::now());
                        self.act(act);
                    }
                    Some(stopping) if stopping.waits_for_the_rest() => {
                        self.log_leftovers(local_rank, "has ended", "have the rest of its grace (first_signal=leader)");
                    }
                    // A worker that is stopped has not succeeded, whatever it says.
                    Some(_) => self.order(local_rank, Order::Kill),
                }
            }
            News::Of(Event::Exited(exited)) => self.on_exited(exited),
            News::Dies(exited) => {
                if self.stopping.is_none() {
                    // As its guard does later: processes that a failed worker has left get no grace.
                    self.order(exited.local_rank, Order::Kill);
                }
                self.on_exited(exited);
            }
            News::Of(event) => {
                if let Event::Gone { local_rank } = event
                    && let Some(member) = self.members.get_mut(&local_rank)
                {
                    member.gone = true;
                    self.leftovers.on_gone(local_rank);
                }
                self.ready.push_back(event);
            }
        }
    }

    /// Report the end of a worker, unless that was done when it died, or the worker was given up as stuck.
    fn on_exited(&mut self, exited: WorkerExit) {
        if self.members.get_mut(&exited.local_rank).is_some_and(Member::ends) {
            let stopped = self.stopping.as_ref().is_some_and(|stopping| stopping.explains(exited.exit));
            self.ready.push_back(Event::Exited(WorkerExit { stopped, ..exited }));
        }
    }

    fn act_on_stop(&mut self) {
        if let Some(stopping) = &mut self.stopping {
            let commands = stopping.poll(Instant::now());
            self.perform(commands);
        }
        let due = self.leftovers.poll(Instant::now());
        self.act(due);
    }

    fn act(&mut self, acts: impl IntoIterator<Item = Act>) {
        for act in acts {
            match act {
                Act::Report { local_rank } => {
                    let grace = self.leftovers.grace();
                    self.log_leftovers(
                        local_rank,
                        "has succeeded",
                        &format!("may run on for {grace:.0?} (--shutdown-timeout)"),
                    );
                }
                Act::ReportEnd { local_rank } => {
                    self.log_leftovers(local_rank, "has succeeded", "have outlived --shutdown-timeout, and are stopped")
                }
                Act::Do(command) => self.perform(vec![command]),
            }
        }
    }

    /// Log which processes a worker has left that has ended.
    fn log_leftovers(&self, local_rank: u32, how: &str, what: &str) {
        let Some(Member { pid, guard: Some(guard), .. }) = self.members.get(&local_rank) else { return };
        if let Some(children) = children_of(*guard) {
            tracing::warn!(
                target: "elastic_rs::agent",
                "the worker with local rank {local_rank} (pid {pid}) {how}, and processes that it has started {what}: {children}"
            );
        }
    }

    fn perform(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Signal { local_rank, signal } => self.order(local_rank, Order::Signal(signal.0)),
                Command::SignalLeader { local_rank, signal } => self.order(local_rank, Order::SignalLeader(signal.0)),
                Command::Dump { local_rank } => self.report_overdue(local_rank),
                Command::Kill { local_rank } => self.order(local_rank, Order::Kill),
                Command::Abandon { local_rank } => self.abandon(local_rank),
            }
        }
    }

    /// Not of a worker whose end is known: what it has left is killed.
    fn report_overdue(&mut self, local_rank: u32) {
        let member = self.members.get(&local_rank).filter(|member| !member.ended && member.state().is_some());
        self.ready.extend(member.map(|member| Event::Overdue { local_rank, pid: member.pid }));
    }

    fn order(&self, local_rank: u32, order: Order) {
        if let Some(member) = self.members.get(&local_rank) {
            member.order(order);
        }
    }

    /// Stops waiting for a stuck worker. Its guard stays, and ends the remaining processes as soon as the kernel lets it.
    fn abandon(&mut self, local_rank: u32) {
        let Some(member) = self.members.remove(&local_rank) else { return };
        if member.give_up_drain() {
            return;
        }
        let waited = self.stopping.as_ref().map_or(Duration::ZERO, |stopping| stopping.elapsed(Instant::now()));
        let left = Left { local_rank, pid: member.pid, state: member.state(), waited };
        tracing::error!(
            local_rank,
            pid = left.pid,
            state = %left.state.map_or_else(|| "ended, but a descendant is left".to_owned(), String::from),
            waited_ms = waited.as_millis() as u64,
            "worker did not end after SIGKILL, and its agent no longer waits for it: a hung device or file system holds it, and the \
             host may have to be restarted"
        );
        self.ready.push_back(Event::Stuck(left));
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.members.values().for_each(|member| member.order(Order::Kill));
    }
}

async fn start(
    origin: Origin,
    specs: Vec<WorkerSpec>,
    filters: FilterOptions,
    consoles: Consoles,
) -> Result<Group, StartError> {
    let first = specs.first().map_or(0, |spec| spec.local_rank);
    let deaths = origin.deaths.clone();
    if let Some(deaths) = &deaths {
        specs.iter().for_each(|spec| deaths.forget(spec.local_rank));
    }
    let leftovers = Leftovers::new(origin.leftovers);
    // Forking takes long where much memory is mapped, and opening files may hang.
    let launching = threads::aside("worker-start", move || launch(&origin, specs, &filters, consoles));
    let launched = launching.await.map_err(|source| StartError::new(first, Stage::Fork, source))?;
    let Launched { workers, logs, mut error } = launched?;
    let (sender, news) = mpsc::unbounded_channel();
    let (members, ready) = (BTreeMap::new(), VecDeque::new());
    let mut group = Group { members, news, ready, stopping: None, leftovers, logs: logs.clone() };
    let mut starts = Vec::new();
    for (spec, guarded) in workers {
        let source = spec.clone();
        match Member::attend(&spec, guarded, logs.clone(), sender.clone()) {
            Ok((member, started)) => {
                group.members.insert(spec.local_rank, member);
                starts.push((source, started));
            }
            Err(source) => error = error.or(Some(StartError::new(spec.local_rank, Stage::Fork, source))),
        }
    }
    for (spec, started) in starts {
        match group.await_start(&spec, started).await {
            Ok(()) => {
                if let (Some(member), Some(deaths)) = (group.members.get_mut(&spec.local_rank), &deaths) {
                    member.watch(spec.local_rank, deaths, sender.clone());
                }
            }
            Err(failed) => error = error.or(Some(failed)),
        }
    }
    match error {
        None => Ok(group),
        Some(error) => {
            group.kill();
            group.stop(StopPolicy::default()).await;
            Err(error)
        }
    }
}

/// Workers whose guards were forked. After an error these are not all.
struct Launched {
    workers: Vec<(WorkerSpec, Guarded)>,
    /// `None` if no stream is copied.
    logs: Option<Logs>,
    error: Option<StartError>,
}

fn launch(
    Origin { forker, deadline, .. }: &Origin,
    specs: Vec<WorkerSpec>,
    filters: &FilterOptions,
    consoles: Consoles,
) -> Result<Launched, StartError> {
    let mut ranks = BTreeSet::new();
    if let Some(twice) = specs.iter().find(|spec| !ranks.insert(spec.local_rank)) {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "another worker has the same local rank");
        return Err(StartError::new(twice.local_rank, Stage::Fork, error));
    }
    // Without an inotify instance (they are limited per user) streams come through pipes.
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).ok();
    let one_console = consoles.stderr_is_own_stdout() && filters.stderr.is_none();
    let shares_pipe = |spec: &WorkerSpec| {
        one_console
            && is_copied_as_it_is(&spec.stderr)
            && (spec.stdout == Output::Inherit || spec.stdout == spec.stderr)
    };
    let mut opened = Vec::new();
    for spec in &specs {
        opened.push(open(spec, watch.as_ref().filter(|_| !shares_files(spec, &specs)), shares_pipe(spec))?);
    }
    let mut sources = Vec::new();
    for (spec, opened) in specs.iter().zip(&mut opened) {
        for (which, output) in [(Which::Stdout, &spec.stdout), (Which::Stderr, &spec.stderr)] {
            if let (Output::Copied(copies), Some(reading)) = (output, opened.readings[which as usize].take()) {
                sources.push(Source { local_rank: spec.local_rank, which, reading, copies: copies.clone() });
            }
        }
    }
    let logs = if sources.is_empty() { None } else { Some(Logs::start(sources, watch, filters, consoles)?) };
    let mut launched = Launched { workers: Vec::new(), logs, error: None };
    for (spec, opened) in specs.into_iter().zip(opened) {
        let forked = forker.as_ref().and_then(|forker| forker.fork(&spec, &opened, deadline.as_ref()));
        match forked.map_or_else(|| spawn(&spec, &opened, deadline.as_ref()), Ok) {
            Ok(guarded) => launched.workers.push((spec, guarded)),
            Err(error) => {
                launched.error = Some(error);
                break;
            }
        }
    }
    Ok(launched)
}

/// Whether this stream is only passed on to the console, without a change, if it is shown there.
fn is_copied_as_it_is(output: &Output) -> bool {
    matches!(output, Output::Copied(Copies { file: None, console: _, prefix: None }))
}

/// Whether one of its streams goes to the same file as another stream. The agent could not separate such streams.
fn shares_files(spec: &WorkerSpec, specs: &[WorkerSpec]) -> bool {
    let all: Vec<&Path> = specs.iter().flat_map(files_of).collect();
    files_of(spec).any(|file| all.iter().filter(|other| **other == file).count() > 1)
}

fn files_of(spec: &WorkerSpec) -> impl Iterator<Item = &Path> {
    [&spec.stdout, &spec.stderr].into_iter().filter_map(|output| match output {
        Output::File(path) => Some(path.as_path()),
        Output::Copied(copies) => copies.file.as_deref(),
        Output::Inherit | Output::Null => None,
    })
}
