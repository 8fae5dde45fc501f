//! One worker of a group: orders to its guard, and the task that receives the guard's reports.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, oneshot};

use super::super::children::reaped;
use super::super::event::{Event, WorkerExit};
use super::super::exit::ExitStatus;
use super::super::logs::Logs;
use super::super::message::{GuardReport, MESSAGE_BYTES, Order};
use super::super::spawn::{Guarded, received};
use super::super::spec::{Output, WorkerSpec};
use super::super::stderr_end::StderrEnd;
use crate::clock::monotonic_ns;
use crate::processes::state_of;
use crate::steps::deaths::{Deaths, Watch};

/// How long the end of a worker waits for its output to be shown while the console is blocked.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The group's handle of a worker.
#[derive(Debug)]
pub(crate) struct Member {
    /// 0 until it has been executed.
    pub pid: u32,
    pub stderr_end: StderrEnd,
    /// Nothing of it is left but its guard, which ends.
    pub gone: bool,
    /// Its end was reported.
    pub ended: bool,
    /// Waits for its death, until its end is reported.
    watch: Option<Watch>,
    /// Process id of its guard, whose children are what is left of a worker that has ended well.
    pub guard: Option<u32>,
    control: Arc<AsyncFd<OwnedFd>>,
    drain: Arc<Drain>,
}

/// What the task of a member reports to its group.
#[derive(Debug)]
pub(crate) enum News {
    /// An event of the worker.
    Of(Event),
    /// It dies. Its guard does not know it yet.
    Dies(WorkerExit),
    /// It has ended well, and processes that it started are left, as children of its guard.
    Left {
        /// Which worker.
        local_rank: u32,
        /// Process id of its guard.
        guard: u32,
    },
    /// Its guard has ended, too. This is the last news.
    Reaped {
        /// Which worker.
        local_rank: u32,
    },
}

/// Of the output of a worker that has ended with all its descendants.
#[derive(Debug, Default)]
struct Drain {
    begun: AtomicBool,
    give_up: Notify,
}

/// The result of a start.
#[derive(Debug)]
pub(crate) enum Start {
    Executed { pid: u32 },
    Failed { step: i32, errno: i32 },
}

impl Member {
    /// Starts the task that receives a guard's reports. The receiver gets whether the worker was started.
    ///
    /// If that fails the guard finds its socket closed. It kills its worker, and is reaped.
    pub(in super::super) fn attend(
        spec: &WorkerSpec,
        guarded: Guarded,
        logs: Option<Logs>,
        news: mpsc::UnboundedSender<News>,
    ) -> io::Result<(Member, oneshot::Receiver<Start>)> {
        let Guarded { control, end, child } = guarded;
        let (control, end) = watched_both(control, end).inspect_err(|_| drop(tokio::spawn(await_end(None, child))))?;
        let (start, started) = oneshot::channel();
        let stderr_file = match &spec.stderr {
            Output::File(path) => Some(path.clone()),
            Output::Copied(copies) => copies.file.clone(),
            Output::Inherit | Output::Null => None,
        };
        let stderr_pipe = logs.as_ref().and_then(|logs| logs.stderr_pipe(spec.local_rank));
        let stderr_end = StderrEnd::new(stderr_pipe, stderr_file);
        let drain = Arc::new(Drain::default());
        let task = Task {
            local_rank: spec.local_rank,
            pid: 0,
            exited: false,
            control: control.clone(),
            logs,
            gone: false,
            start: Some(start),
            news,
            drain: drain.clone(),
        };
        tokio::spawn(task.run(end, child));
        let member = Member { pid: 0, stderr_end, gone: false, ended: false, watch: None, guard: None, control, drain };
        Ok((member, started))
    }

    /// Report its death as soon as it dies, before its memory is freed.
    pub fn watch(&mut self, local_rank: u32, deaths: &Arc<Deaths>, news: mpsc::UnboundedSender<News>) {
        let pid = self.pid;
        let tell = move |status| {
            let (exit, late) = (ExitStatus::from_status(status), Some(Duration::ZERO));
            let exited = WorkerExit { local_rank, pid, exit, at: Instant::now(), late, stopped: false };
            drop(news.send(News::Dies(exited))); // the group may have been dropped
        };
        self.watch = Some(deaths.watch(local_rank, pid, tell));
    }

    /// It has ended. Whether that was not known.
    pub fn ends(&mut self) -> bool {
        self.watch = None;
        !std::mem::replace(&mut self.ended, true)
    }

    /// The same for a process whose output is not copied.
    pub fn attend_silent(
        spec: &WorkerSpec,
        guarded: Guarded,
        news: mpsc::UnboundedSender<News>,
    ) -> io::Result<(Member, oneshot::Receiver<Start>)> {
        Member::attend(spec, guarded, None, news)
    }

    pub fn order(&self, order: Order) {
        // A guard that has ended needs no order. A guard whose socket is full cannot be helped.
        let _ = send(self.control.get_ref(), &order.encode(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Stops waiting for the worker's output to be shown. False if the worker or a descendant is still running.
    pub fn give_up_drain(&self) -> bool {
        self.drain.give_up.notify_one();
        self.drain.begun.load(Ordering::Relaxed)
    }

    /// The letter of the worker's state in `/proc`; `None` once it has ended.
    pub fn state(&self) -> Option<char> {
        state_of(self.pid).filter(|state| !matches!(state, 'Z' | 'X'))
    }
}

type Watched = AsyncFd<OwnedFd>;

fn watched_both(control: OwnedFd, end: Option<OwnedFd>) -> io::Result<(Arc<Watched>, Option<Watched>)> {
    rustix::io::ioctl_fionbio(&control, true)?;
    Ok((Arc::new(watched(control)?), end.map(watched).transpose()?))
}

fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays open and the same for as long as it is owned, as required.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

struct Task {
    local_rank: u32,
    pid: u32,
    exited: bool,
    gone: bool,
    control: Arc<AsyncFd<OwnedFd>>,
    logs: Option<Logs>,
    start: Option<oneshot::Sender<Start>>,
    news: mpsc::UnboundedSender<News>,
    drain: Arc<Drain>,
}

impl Task {
    /// Runs until the guard has ended, and reaps it if it is this process's child.
    async fn run(mut self, end: Option<AsyncFd<OwnedFd>>, child: Option<Pid>) {
        while let Some(report) = self.next_report().await {
            match report {
                GuardReport::Started { pid } => {
                    self.pid = pid.unsigned_abs();
                    self.started(Start::Executed { pid: self.pid });
                }
                GuardReport::Failed { step, errno } => self.started(Start::Failed { step, errno }),
                GuardReport::Exited { code, status, seen_ns } => {
                    let late = Duration::from_nanos(monotonic_ns().saturating_sub(seen_ns));
                    self.on_exited(ExitStatus::from_wait(code, status), Some(late));
                }
                GuardReport::Left { guard } => {
                    self.send(News::Left { local_rank: self.local_rank, guard: guard.unsigned_abs() });
                }
                // A guard that was forked from a template takes tens of milliseconds to end: the kernel frees its memory first.
                GuardReport::Gone => self.on_gone().await,
            }
        }
        await_end(end, child).await;
        if !self.exited && self.pid != 0 {
            self.on_exited(ExitStatus::Unseen, None);
        }
        if !self.gone {
            self.on_gone().await;
        }
        self.send(News::Reaped { local_rank: self.local_rank });
    }

    /// Nothing of the worker runs any more.
    async fn on_gone(&mut self) {
        self.gone = true;
        self.drain().await;
        self.send_report(Event::Gone { local_rank: self.local_rank });
    }

    /// Waits until the worker's output is shown, or until that is given up.
    async fn drain(&self) {
        let Some(logs) = &self.logs else { return };
        self.drain.begun.store(true, Ordering::Relaxed);
        let began_at = Instant::now();
        let shown = tokio::select! {
            shown = logs.finish(self.local_rank, DRAIN_TIMEOUT) => shown,
            () = self.drain.give_up.notified() => false,
        };
        if !shown {
            tracing::warn!(
                local_rank = self.local_rank,
                waited_ms = began_at.elapsed().as_millis() as u64,
                "the console is blocked and does not take a worker's last output; the rest is lost if this process ends first"
            );
        }
    }

    /// `None` once the guard has closed the socket.
    async fn next_report(&self) -> Option<GuardReport> {
        loop {
            let mut ready = self.control.readable().await.ok()?;
            let mut bytes = [0; MESSAGE_BYTES];
            match received(|| recv(self.control.get_ref(), &mut bytes, RecvFlags::DONTWAIT)) {
                Ok((read, _)) => return GuardReport::decode(&bytes[..read]),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(_) => return None,
            }
        }
    }

    fn on_exited(&mut self, exit: ExitStatus, late: Option<Duration>) {
        self.exited = true;
        if self.pid == 0 {
            return; // the worker was never executed, which has been reported
        }
        let (local_rank, pid, at) = (self.local_rank, self.pid, Instant::now());
        self.send_report(Event::Exited(WorkerExit { local_rank, pid, exit, at, late, stopped: false }));
    }

    fn started(&mut self, start: Start) {
        if let Some(sender) = self.start.take() {
            // The caller that started the group may have given up.
            let _ = sender.send(start);
        }
    }

    fn send_report(&self, event: Event) {
        self.send(News::Of(event));
    }

    fn send(&self, news: News) {
        // The group may have been dropped. Its remaining processes are still waited for.
        let _ = self.news.send(news);
    }
}

/// Waits until a guard that has closed its socket has ended for good, and reaps it.
async fn await_end(end: Option<AsyncFd<OwnedFd>>, child: Option<Pid>) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let reap = || {
        let Some(child) = child else { return Ok(Some(())) };
        let by_end = end.as_ref().map(|end| waitid(WaitId::PidFd(end.get_ref().as_fd()), options));
        let ended = match by_end {
            // Without pidfds, or without `waitid` for them (before Linux 5.4).
            None | Some(Err(Errno::INVAL)) => waitid(WaitId::Pid(child), options)?,
            Some(ended) => ended?,
        };
        Ok(ended.map(drop))
    };
    // ECHILD: other code in this process reaps all children. Any other error: the runtime ends.
    let _ = reaped(end.as_ref(), reap).await;
}

#[cfg(test)]
mod tests {
    use rustix::pipe::pipe;

    use super::super::super::spawn::message_socket;
    use super::*;

    /// A plain file cannot be waited for, as a pidfd cannot where the user has no watches left.
    #[tokio::test]
    #[expect(clippy::zombie_processes, reason = "that is what is tested")]
    async fn a_guard_that_cannot_be_attended_to_is_reaped() {
        let (control, _guard) = message_socket().unwrap();
        let child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let guarded = Guarded { control, end: Some(file.into()), child: Some(pid) };
        let (sender, _news) = mpsc::unbounded_channel();
        Member::attend_silent(&WorkerSpec::new(0, "worker"), guarded, sender).unwrap_err();
        let began = Instant::now();
        while rustix::process::test_kill_process(pid).is_ok() {
            assert!(began.elapsed() < Duration::from_secs(60), "it is a zombie, or runs");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A guard that was forked from a template ends tens of milliseconds after it has said that nothing is left.
    #[tokio::test]
    async fn a_worker_is_gone_before_its_guard_has_ended() {
        let (control, guard) = message_socket().unwrap();
        let (end, held_by_guard) = pipe().unwrap();
        let spec = WorkerSpec::new(3, "worker");
        let (sender, mut news) = mpsc::unbounded_channel();
        let guarded = Guarded { control, end: Some(end), child: None };
        let (_member, started) = Member::attend_silent(&spec, guarded, sender).unwrap();
        let send_report = |report: GuardReport| send(&guard, &report.encode(), SendFlags::empty()).unwrap();
        send_report(GuardReport::Started { pid: 7 });
        assert!(matches!(started.await.unwrap(), Start::Executed { pid: 7 }));
        send_report(GuardReport::Exited { code: 2, status: 9, seen_ns: 0 });
        send_report(GuardReport::Gone);
        assert!(matches!(news.recv().await, Some(News::Of(Event::Exited(WorkerExit { local_rank: 3, .. })))));
        assert!(matches!(news.recv().await, Some(News::Of(Event::Gone { local_rank: 3 }))));
        drop(guard);
        assert!(news.try_recv().is_err(), "the guard has not ended");
        drop(held_by_guard);
        assert!(matches!(news.recv().await, Some(News::Reaped { local_rank: 3 })));
        assert!(news.recv().await.is_none(), "each of them once");
    }
}
