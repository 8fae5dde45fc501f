//! Looks at the workers, for whoever asks where they stand, and before they are killed. Part of [`super`].

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::path::Path;
use std::time::Instant;

use tokio::task::JoinHandle;

use super::Runner;
use super::late::{Late, LateWorker};
use crate::agent::environment::watched;
use crate::agent::look::{self, Looked, Worker};
use crate::agent::policy::AgentOptions;
use crate::channel::watch::agent::Watches;
use crate::hang;
use crate::hang::judge::Mode;
use crate::hang::view::{Life, View};
use crate::rendezvous::messages::look::ROUND_CHANGES;
use crate::rendezvous::messages::message::Look;
use crate::rendezvous::node::session::Session;
use crate::workers::DUMP_BEFORE_KILL;

/// The looks that others ask for.
#[derive(Debug, Default)]
pub(super) struct Looking {
    /// How often somebody had asked when the last look began.
    answered: u64,
    /// The look under way.
    look: Option<(Look, JoinHandle<Looked>)>,
    /// Its workers that have ended.
    ended: Vec<View>,
    /// What the last one has found, by process.
    last: BTreeMap<u32, (Instant, hang::look::Look)>,
    /// Workers that do not leave their world.
    pub late: Late,
}

/// What happens to them.
pub(super) enum Next {
    /// Somebody asks. How often that was so, and the look.
    Asked(u64, Option<Look>),
    /// The look under way is over.
    Done(Looked),
    /// This worker does not leave its world.
    Late(LateWorker),
}

impl Looking {
    /// The workers make steps again. What they did since an earlier look says nothing of the next time that they stand still.
    pub fn forget(&mut self) {
        self.last.clear();
    }

    /// Wait until somebody asks, or the look under way is over. May be dropped.
    pub(super) async fn next(&mut self, session: Option<&Session>) -> Next {
        let Self { look, answered, late, .. } = self;
        let asked = async {
            match (look, session) {
                (Some((_, looked)), _) => Next::Done(looked.await.unwrap_or_default()),
                (None, Some(session)) => {
                    let view = session.view_when(|view| view.looks_asked != *answered).await;
                    Next::Asked(view.looks_asked, view.look)
                }
                (None, None) => pending().await,
            }
        };
        tokio::select! {
            next = asked => next,
            worker = late.next() => Next::Late(worker),
        }
    }
}

/// The socket at which workers answer, if somebody can ask for a look.
pub(super) fn listen(options: &AgentOptions, has_session: bool) -> Option<Watches> {
    if options.hang.mode == Mode::Off || !has_session {
        return None;
    }
    let listening = Watches::listen(options.workers.local_world_size);
    let missed = |error: &io::Error| {
        let run_id = &options.workers.run_id;
        tracing::warn!(
            "[{run_id}] workers are not asked for their collectives: their agent's socket cannot be made: {error}; `elastic-rs stacks` \
             shows the lines at which they stand, without numbers of collectives"
        );
    };
    listening.inspect_err(missed).ok()
}

impl Runner {
    /// The variables by which a worker answers during a look. `inherited`: whether a variable of this name is set already.
    pub fn watch_variables(&self, inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        self.watches.as_ref().map_or_else(Vec::new, |watches| watched(watches.address(), inherited))
    }

    pub(super) fn on_look(&mut self, next: Next) {
        match next {
            Next::Asked(asked, look) => self.on_look_asked(asked, look),
            Next::Done(looked) => self.on_looked(looked),
            Next::Late(worker) => self.on_late(&worker),
        }
    }

    /// Somebody asks where the workers stand.
    fn on_look_asked(&mut self, asked: u64, look: Option<Look>) {
        self.looking.answered = asked;
        let Some(look) = look else { return };
        if look.round == self.machine.round() {
            return self.look(look);
        }
        if let Some(session) = &self.session {
            session.report_look(look.number, Vec::new(), Some(ROUND_CHANGES.to_owned()), None);
        }
    }

    /// Look at the workers.
    pub(super) fn look(&mut self, look: Look) {
        let round = look.round;
        let (pids, first) = (self.pids(), self.first_rank());
        let worker = |(local_rank, pid)| {
            let earlier = self.looking.last.get(&pid).cloned();
            let slot = self.slots.of(local_rank).unwrap_or(local_rank);
            Worker { rank: first.saturating_add(local_rank), slot, round: round.0, pid, earlier }
        };
        let workers: Vec<_> = pids.into_iter().map(worker).collect();
        let lives = |local_rank| workers.iter().any(|worker| worker.rank == first.saturating_add(local_rank));
        let ended = self.exits.iter().filter(|exited| !lives(exited.local_rank)).map(|exited| View {
            pid: exited.pid,
            life: Life::Ended { code: exited.exit.returncode() },
            ..View::new(first.saturating_add(exited.local_rank), round.0)
        });
        self.looking.ended = ended.collect();
        let asker = self.watches.as_ref().map(Watches::asker);
        let deep = workers.iter().find(|worker| Some(worker.rank) == look.deep).map(|worker| worker.pid);
        self.looking.look = Some((look, tokio::spawn(look::look(workers, deep, asker))));
    }

    /// The look is over: report it to the coordinator.
    fn on_looked(&mut self, looked: Looked) {
        let Some((look, _)) = self.looking.look.take() else { return };
        self.looking.last = looked.looks.into_iter().map(|(at, look)| (look.pid, (at, look))).collect();
        let views = looked.views.into_iter().chain(std::mem::take(&mut self.looking.ended)).collect();
        if let Some(own) = &mut self.own_hangs {
            own.on_views(views, Instant::now());
            self.judge_own();
        } else if let Some(session) = &self.session {
            session.report_look(look.number, views, looked.problem, looked.py_spy);
        }
    }

    /// A worker is about to be killed, because it has not ended within its grace: write down where it stands. The kill does not wait.
    pub(super) fn dump(&self, local_rank: u32, pid: u32) {
        let Some(folder) = self.log_folder(local_rank).map(Path::to_owned) else { return };
        let (prefix, rank) = (self.log_prefix(), self.first_rank().saturating_add(local_rank));
        let left_s = DUMP_BEFORE_KILL.as_secs_f64();
        let why = format!(
            "rank {rank} was asked to end and had not when this was written: it is killed {left_s:.1} s later if it lives then"
        );
        let dumped = look::dump_aside(pid, why, folder, None, move |dumped, folder| match dumped {
            Ok(path) => tracing::warn!(
                "{prefix}the worker with rank {rank} (pid {pid}) has not ended yet, and is killed in {left_s:.1} s if it does not; where it \
                 stands is in {}",
                path.display()
            ),
            Err(error) => tracing::warn!(
                "{prefix}where the worker with rank {rank} (pid {pid}) stands before it is killed cannot be written into `{}`: {error}",
                folder.display()
            ),
        });
        if let Err(error) = dumped {
            tracing::warn!(
                "{}where the worker with rank {rank} (pid {pid}) stands is not written: no thread: {error}",
                self.log_prefix()
            );
        }
    }
}
