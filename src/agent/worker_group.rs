//! The workers of a round, whoever started them.
//!
//! [`crate::workers::Group`] starts programs. `torch.multiprocessing` starts Python functions, whose processes only their parent
//! can reap. They are handed over by their process ids, and the front end says how each has ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::{Future, poll_fn};
use std::io::{self, IsTerminal};
use std::os::fd::OwnedFd;
use std::task::Poll;
use std::time::Instant;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, WaitId, WaitIdOptions, WaitIdStatus, kill_process, kill_process_group, pidfd_open, waitid,
};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use crate::clock::until;
use crate::signals::{FirstSignal, Signal};
use crate::threads;
use crate::workers::{
    Command, Copies, Event, ExitStatus, Group, Left, Output, StderrEnd, StopPolicy, Stopping, WorkerExit, WorkerSpec,
};

/// Running workers. A local rank in here is a slot: see [`super::slots`].
#[derive(Debug)]
pub enum WorkerGroup {
    /// Programs that the core has started.
    Spawned(Spawned),
    /// Processes that were handed over by their ids.
    Adopted(Adopted),
}

/// An event of the workers.
#[derive(Debug)]
pub enum WorkerGroupEvent {
    /// A worker has ended.
    Exited(WorkerExit),
    /// An adopted worker has ended, and waits to be reaped. A failure that can be seen is reported before this. Otherwise the exit
    /// is reported when the worker has been reaped.
    Reap {
        /// Which one.
        local_rank: u32,
    },
    /// A worker that was asked to end has not, and is killed soon.
    Overdue {
        /// Which one.
        local_rank: u32,
        /// Its process id.
        pid: u32,
    },
    /// Nothing is left of a worker and of what it started, or it is given up. Only of [`WorkerGroup::Spawned`].
    Gone {
        /// Which one.
        local_rank: u32,
    },
}

impl WorkerGroup {
    /// Waits for the next event; `None` once nothing is left of any worker. Sends the signals of a stop when they are due.
    pub async fn next_event(&mut self) -> Option<WorkerGroupEvent> {
        match self {
            Self::Spawned(spawned) => spawned.next_event().await,
            Self::Adopted(adopted) => adopted.next_event().await,
        }
    }

    /// Begin to stop all workers.
    pub fn begin_stop(&mut self, policy: StopPolicy) {
        match self {
            Self::Spawned(Spawned(groups)) => groups.iter_mut().for_each(|group| group.begin_stop(policy)),
            Self::Adopted(adopted) => adopted.begin_stop(policy),
        }
    }

    /// Pass a signal on to all workers that have not ended, not to those in the `idle` slots. Nothing else follows.
    pub(super) fn pass_on(&self, signal: Signal, to: FirstSignal, idle: &BTreeSet<u32>) {
        match self {
            Self::Spawned(Spawned(groups)) => groups.iter().for_each(|group| group.pass_on(signal, to, idle)),
            Self::Adopted(adopted) => adopted.pass_on(signal, to),
        }
    }

    /// Kill all workers now.
    pub fn kill(&mut self) {
        match self {
            Self::Spawned(Spawned(groups)) => groups.iter_mut().for_each(Group::kill),
            Self::Adopted(adopted) => adopted.kill(),
        }
    }

    /// Kill the process in this slot, and everything that it started. Only of [`WorkerGroup::Spawned`].
    pub fn kill_slot(&mut self, slot: u32) {
        if let Self::Spawned(Spawned(groups)) = self {
            groups.iter().for_each(|group| group.kill_worker(slot));
        }
    }

    /// Kill each group whose remaining processes are all in these slots. A process that SIGKILL does not end is given up. Only of
    /// [`WorkerGroup::Spawned`].
    pub(super) fn kill_idle(&mut self, idle: &BTreeSet<u32>) {
        if let Self::Spawned(Spawned(groups)) = self {
            let is_idle = |pids: BTreeMap<u32, u32>| !pids.is_empty() && pids.keys().all(|slot| idle.contains(slot));
            groups.iter_mut().filter(|group| is_idle(group.pids())).for_each(Group::kill);
        }
    }

    /// The process in this slot has the place of this spec from now on. `binds`: and its CPUs. Only of [`WorkerGroup::Spawned`].
    pub(super) fn place(&self, slot: u32, spec: &WorkerSpec, binds: bool) {
        if let Self::Spawned(Spawned(groups)) = self {
            groups.iter().for_each(|group| group.place(slot, spec, binds));
        }
    }

    /// Add workers that were started later, or replace all by them: those that nothing may be left of.
    pub(super) fn add(worker_group: &mut Option<Self>, later: Self) {
        match (worker_group, later) {
            (Some(Self::Spawned(Spawned(groups))), Self::Spawned(Spawned(later))) => groups.extend(later),
            (worker_group, later) => *worker_group = Some(later),
        }
    }

    /// Process ids by slot, of workers of which anything is left.
    pub fn pids(&self) -> BTreeMap<u32, u32> {
        match self {
            Self::Spawned(Spawned(groups)) => groups.iter().flat_map(Group::pids).collect(),
            Self::Adopted(adopted) => adopted.members.iter().map(|(rank, member)| (*rank, member.number)).collect(),
        }
    }

    /// Where to read the last words of the process in this slot, unless it is gone.
    pub(super) fn stderr_end(&self, slot: u32) -> StderrEnd {
        match self {
            Self::Spawned(Spawned(groups)) => {
                groups.iter().find_map(|group| group.stderr_end(slot)).unwrap_or_default()
            }
            Self::Adopted(_) => StderrEnd::default(),
        }
    }

    /// The exit of an adopted worker, unless it has been reported.
    pub(super) fn reaped(&mut self, local_rank: u32, exit: ExitStatus) -> Option<WorkerExit> {
        match self {
            Self::Spawned(_) => None,
            Self::Adopted(adopted) => adopted.reaped(local_rank, exit),
        }
    }
}

/// Programs, in groups: one for each start of workers. No two groups have a worker with the same local rank.
#[derive(Debug)]
pub struct Spawned(Vec<Group>);

impl From<Group> for WorkerGroup {
    fn from(group: Group) -> Self {
        Self::Spawned(Spawned(vec![group]))
    }
}

impl Spawned {
    async fn next_event(&mut self) -> Option<WorkerGroupEvent> {
        loop {
            if self.0.is_empty() {
                return None;
            }
            let mut events: Vec<_> = self.0.iter_mut().map(|group| Box::pin(group.next_event())).collect();
            let (index, event) = poll_fn(|context| {
                let ready = events.iter_mut().enumerate().find_map(|(index, event)| {
                    let Poll::Ready(event) = event.as_mut().poll(context) else { return None };
                    Some((index, event))
                });
                ready.map_or(Poll::Pending, Poll::Ready)
            })
            .await;
            drop(events);
            match event {
                Some(Event::Exited(exited)) => return Some(WorkerGroupEvent::Exited(exited)),
                // The group has logged the workers that are stuck. They are not waited for.
                Some(Event::Gone { local_rank } | Event::Stuck(Left { local_rank, .. })) => {
                    return Some(WorkerGroupEvent::Gone { local_rank });
                }
                Some(Event::Overdue { local_rank, pid }) => return Some(WorkerGroupEvent::Overdue { local_rank, pid }),
                None => drop(self.0.remove(index)),
            }
        }
    }
}

/// Sends a worker's standard error through the agent, so that a failure is reported with its last words.
///
/// A terminal is left to the worker: programs ask whether they write to one, and the words are on the screen anyway
/// (`docs/decisions/0045-stderr-is-copied-unless-it-is-a-terminal.md`).
pub fn captured(stderr: Output) -> Output {
    match stderr {
        Output::Inherit if !io::stderr().is_terminal() => {
            Output::Copied(Copies { file: None, console: true, prefix: None })
        }
        output => output,
    }
}

/// Processes whose parent is other code in this process. Dropping it kills those that have not ended.
#[derive(Debug)]
pub struct Adopted {
    members: BTreeMap<u32, Member>,
    ends: mpsc::UnboundedReceiver<End>,
    /// Reported before the next of `ends`.
    ready: VecDeque<WorkerGroupEvent>,
    stopping: Option<Stopping>,
}

/// The end of an adopted worker.
struct End {
    local_rank: u32,
    /// The exit; `None` if only its parent can see it.
    exit: Option<ExitStatus>,
}

#[derive(Debug)]
struct Member {
    pid: Pid,
    number: u32,
    /// Its exit has been reported.
    reported: bool,
    watch: Watch,
}

/// What waits for the end of an adopted worker.
#[derive(Debug)]
enum Watch {
    Task(tokio::task::JoinHandle<()>),
    /// It ends with the worker.
    Thread,
    /// Nothing. Its parent, a fork server, had reaped it before it was adopted, so the id may be another process's by now.
    Gone,
}

impl Member {
    /// Signals its process group if it leads one, else the process.
    fn signal(&self, signal: Signal) {
        if matches!(self.watch, Watch::Gone) {
            return;
        }
        let Some(signal) = rustix::process::Signal::from_named_raw(signal.0) else { return };
        // ESRCH: it has ended, or it leads no group.
        if kill_process_group(self.pid, signal).is_err() {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Signals the process alone. What it leaves is killed when it ends.
    fn signal_leader(&self, signal: Signal) {
        if let (false, Some(signal)) =
            (matches!(self.watch, Watch::Gone), rustix::process::Signal::from_named_raw(signal.0))
        {
            // ESRCH: it has ended.
            let _ = kill_process(self.pid, signal);
        }
    }

    fn exited(&self, local_rank: u32, exit: ExitStatus, stopping: Option<&Stopping>) -> WorkerExit {
        let stopped = stopping.is_some_and(|stopping| stopping.explains(exit));
        WorkerExit { local_rank, pid: self.number, exit, at: Instant::now(), late: None, stopped }
    }
}

impl Adopted {
    /// Take over these processes, ids by local rank. Needs a tokio runtime.
    ///
    /// # Errors
    /// A process cannot be watched.
    pub fn new(pids: &BTreeMap<u32, u32>) -> io::Result<Self> {
        let (sender, ends) = mpsc::unbounded_channel();
        let mut members = BTreeMap::new();
        for (&local_rank, &number) in pids {
            let pid = i32::try_from(number).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
            let watch = watch(pid, local_rank, sender.clone())?;
            members.insert(local_rank, Member { pid, number, reported: false, watch });
        }
        Ok(Self { members, ends, ready: VecDeque::new(), stopping: None })
    }

    async fn next_event(&mut self) -> Option<WorkerGroupEvent> {
        loop {
            let commands = self.stopping.as_mut().map(|stopping| stopping.poll(Instant::now()));
            self.perform(commands.unwrap_or_default());
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.members.is_empty() {
                return None;
            }
            let deadline = self.stopping.as_ref().and_then(Stopping::next_deadline);
            tokio::select! {
                end = self.ends.recv() => {
                    let End { local_rank, exit } = end?;
                    let Some(member) = self.members.get_mut(&local_rank) else { continue };
                    // Kill its group before it is reaped: afterwards the id may be reused.
                    member.signal(Signal::KILL);
                    self.ready.push_back(WorkerGroupEvent::Reap { local_rank });
                    if let Some(exit) = exit.filter(|exit| !exit.is_success()) {
                        member.reported = true;
                        return Some(WorkerGroupEvent::Exited(member.exited(local_rank, exit, self.stopping.as_ref())));
                    }
                }
                () = until(deadline) => {}
            }
        }
    }

    fn reaped(&mut self, local_rank: u32, exit: ExitStatus) -> Option<WorkerExit> {
        let member = self.members.remove(&local_rank)?;
        if let Some(stopping) = &mut self.stopping {
            stopping.on_gone(local_rank);
        }
        (!member.reported).then(|| member.exited(local_rank, exit, self.stopping.as_ref()))
    }

    fn begin_stop(&mut self, policy: StopPolicy) {
        if self.stopping.is_none() {
            let (stopping, commands) = Stopping::begin(policy, self.members.keys().copied(), Instant::now());
            self.stopping = Some(stopping);
            self.perform(commands);
        }
    }

    fn pass_on(&self, signal: Signal, to: FirstSignal) {
        for member in self.members.values().filter(|member| !member.reported) {
            match to {
                FirstSignal::Leader => member.signal_leader(signal),
                FirstSignal::Group => member.signal(signal),
            }
        }
    }

    fn kill(&mut self) {
        match &mut self.stopping {
            Some(stopping) => {
                let commands = stopping.on_kill(Instant::now());
                self.perform(commands);
            }
            None => self.begin_stop(StopPolicy { grace: std::time::Duration::ZERO, ..StopPolicy::default() }),
        }
    }

    fn perform(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Signal { local_rank, signal } => self.signal(local_rank, signal),
                Command::SignalLeader { local_rank, signal } => {
                    let _ = self.members.get(&local_rank).map(|member| member.signal_leader(signal));
                }
                Command::Dump { local_rank } => {
                    let member = self.members.get(&local_rank).filter(|member| !matches!(member.watch, Watch::Gone));
                    self.ready
                        .extend(member.map(|member| WorkerGroupEvent::Overdue { local_rank, pid: member.number }));
                }
                Command::Kill { local_rank } => self.signal(local_rank, Signal::KILL),
                Command::Abandon { local_rank } => {
                    let Some(member) = self.members.remove(&local_rank) else { continue };
                    tracing::error!(
                        local_rank,
                        pid = member.number,
                        "worker did not end after SIGKILL, and its agent no longer waits for it: a hung device or file system holds it"
                    );
                }
            }
        }
    }

    fn signal(&self, local_rank: u32, signal: Signal) {
        if let Some(member) = self.members.get(&local_rank) {
            member.signal(signal);
        }
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        for member in self.members.values() {
            if let Watch::Task(task) = &member.watch {
                task.abort();
            }
            member.signal(Signal::KILL);
        }
    }
}

/// Sends to `ends` when a child of this process, or of its fork server, has ended.
fn watch(pid: Pid, local_rank: u32, ends: mpsc::UnboundedSender<End>) -> io::Result<Watch> {
    let handle = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => handle,
        Err(Errno::SRCH) => {
            let _ = ends.send(End { local_rank, exit: None });
            return Ok(Watch::Gone);
        }
        // This kernel has no pidfds.
        Err(_) => {
            // It has to be a child of this process.
            waitid(WaitId::Pid(pid), LOOK | WaitIdOptions::NOHANG)?;
            threads::spawn(format!("adopted-{local_rank}"), move || {
                let ended = waitid(WaitId::Pid(pid), LOOK);
                let _ = ends.send(End { local_rank, exit: seen(ended) });
            })?;
            return Ok(Watch::Thread);
        }
    };
    // SAFETY: an `OwnedFd` refers to the same open descriptor until it is dropped.
    let handle: AsyncFd<OwnedFd> = unsafe { AsyncFd::register(handle) }?;
    Ok(Watch::Task(tokio::spawn(async move {
        // An error means that the runtime ends.
        if handle.readable().await.is_ok() {
            let ended = waitid(WaitId::Pid(pid), LOOK | WaitIdOptions::NOHANG);
            let _ = ends.send(End { local_rank, exit: seen(ended) });
        }
    })))
}

/// Does not reap: the parent, which is in this process, does. So the id cannot have been reused.
const LOOK: WaitIdOptions = WaitIdOptions::EXITED.union(WaitIdOptions::NOWAIT);

/// How a process has ended. `None` if its parent has reaped it already, and will report it.
fn seen(ended: Result<Option<WaitIdStatus>, Errno>) -> Option<ExitStatus> {
    let status = ended.ok().flatten()?;
    let signal = status
        .terminating_signal()
        .map(|number| ExitStatus::Signal { signal: Signal(number), core_dumped: status.dumped() });
    status.exit_status().map(ExitStatus::Code).or(signal)
}
