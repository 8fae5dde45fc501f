//! What the coordinator says of a training that hangs: it is said to the user, and where the workers stand is written down. Part of
//! [`super`].

use std::ffi::OsString;
use std::future::pending;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::Runner;
use crate::agent::hang_command::{About, HangCommand};
use crate::agent::look::{self, Recorders};
use crate::agent::own_hangs::Act;
use crate::hang::finding::{Finding, Kind};
use crate::hang::text;
use crate::rendezvous::messages::hang::{Found, HangChange, HangNews};
use crate::rendezvous::messages::message::{Failure, Look};
use crate::rendezvous::node::session::Session;

/// How a worker has ended that others wait for, in the report of a failure.
const HUNG: &str = "a hang";

/// What the coordinator says, as far as this agent has acted on it.
#[derive(Debug)]
pub(super) struct Hangs {
    /// How often it had said that the training hangs, or goes on, when that was acted on last.
    seen: u64,
    command: Option<HangCommand>,
}

impl Hangs {
    pub fn new(command: Option<OsString>) -> Self {
        Self { seen: 0, command: command.map(HangCommand::new) }
    }

    /// Wait for the next news. Returns how many there were, and the last. May be dropped.
    pub async fn next(&self, session: Option<&Session>) -> (u64, Option<HangNews>) {
        match session {
            Some(session) => {
                let view = session.view_when(|view| view.hangs != self.seen).await;
                (view.hangs, view.hang)
            }
            None => pending().await,
        }
    }

    /// The agent ends.
    pub fn end(&self) {
        if let Some(command) = &self.command {
            command.end();
        }
    }
}

impl Runner {
    /// The coordinator says that the training hangs, or goes on.
    pub(super) fn on_hang(&mut self, (seen, news): (u64, Option<HangNews>)) {
        self.hangs.seen = seen;
        if let Some(news) = news {
            self.tell(news);
        }
    }

    /// Judge this node's workers, if nobody else does and it is time.
    pub(super) fn judge_own(&mut self) {
        let Some(own) = &mut self.own_hangs else { return };
        let (now, round) = (Instant::now(), self.machine.round());
        let ranks = self.assignment.as_ref().and_then(|(place, _)| place.workers).map_or(0, |ranks| ranks.world_size);
        own.on_round(self.machine.is_running().then_some((round, ranks)), now);
        for act in own.act(now) {
            match act {
                Act::Look => self.look(Look { round, number: 0, deep: None }),
                Act::Tell(news) => self.tell(news),
                Act::Restart { why, rank } => self.restart_hung(why, rank),
            }
        }
    }

    /// The training hangs: restart the workers, which costs none of the job's restarts.
    fn restart_hung(&mut self, why: String, rank: Option<u32>) {
        let pids = self.pids();
        let named = rank.and_then(|rank| rank.checked_sub(self.first_rank()));
        let Some((local_rank, pid)) = pids.into_iter().max_by_key(|(local_rank, _)| Some(*local_rank) == named) else {
            return;
        };
        let failure = self.failure(local_rank, pid, (HUNG.to_owned(), 1), why);
        self.machine.on_worker_failed(Failure { counts: false, ..failure }, false, Instant::now());
    }

    /// Print that the training hangs, or goes on, and write down where the workers stand. Where a coordinator judges, the agent of rank 0 alone
    /// prints; where none does, each agent prints what it has found of its own workers.
    fn tell(&mut self, news: HangNews) {
        let HangNews { round, still_us, change } = news;
        if round != self.machine.round() {
            return;
        }
        let still = Duration::from_micros(still_us);
        let says = self.own_hangs.is_some() || self.placement().is_some_and(|place| place.rank == 0);
        match change {
            HangChange::Found(found) => {
                let dumps = if found.finding.kind == Kind::Suspended { None } else { self.dump_all(still) };
                if says {
                    let lines = self.lines_of(&found, still, dumps);
                    tracing::warn!("{}{}", self.log_prefix(), lines.join("\n"));
                    self.run_command(&found.finding, &lines);
                }
            }
            HangChange::Over if says => tracing::warn!("{}{}", self.log_prefix(), text::over(still)),
            HangChange::Over => {}
        }
    }

    /// Have the user's command tell somebody. Workers that a scheduler has suspended are no hang.
    fn run_command(&self, finding: &Finding, lines: &[String]) {
        let Some(command) = self.hangs.command.as_ref().filter(|_| finding.kind != Kind::Suspended) else { return };
        let variables = vec![
            ("ELASTIC_RS_HANG_KIND", finding.kind.name().to_owned()),
            ("ELASTIC_RS_HANG_RANKS", finding.ranks.in_full()),
            ("TORCHELASTIC_RUN_ID", self.workers.run_id.clone()),
        ];
        command.run(About { prefix: self.log_prefix(), text: lines.join("\n") + "\n", variables });
    }

    fn lines_of(&self, found: &Found, still: Duration, dumps: Option<String>) -> Vec<String> {
        let is_own = self.own_hangs.is_some();
        let more = self.session.as_ref().filter(|_| !is_own);
        let more = more.map(|session| format!("elastic-rs why {}", session.endpoint()));
        text::lines(&found.finding, &text::Facts { dumps, more, is_own, ..found.facts(still) })
    }

    /// Write down where all workers of this node stand. Returns where that is for all ranks, if their logs have folders.
    fn dump_all(&self, still: Duration) -> Option<String> {
        for (local_rank, pid) in self.pids() {
            let Some(folder) = self.log_folder(local_rank).map(Path::to_owned) else { continue };
            let (prefix, rank) = (self.log_prefix(), self.first_rank().saturating_add(local_rank));
            let why = format!(
                "the training had stood still for {:.1} s when this was written about rank {rank}",
                still.as_secs_f64()
            );
            let runtime = Handle::current();
            let recorders = self.watches.as_ref().zip(self.slots.of(local_rank)).map(|(watches, slot)| Recorders {
                asker: watches.asker(),
                slot,
                runtime,
            });
            let dumped = look::dump_aside(pid, why, folder, recorders, move |dumped, folder| {
                if let Err(error) = dumped {
                    tracing::warn!(
                        "{prefix}where the worker with rank {rank} (pid {pid}) stands cannot be written into `{}`: {error}",
                        folder.display()
                    );
                }
            });
            if let Err(error) = dumped {
                tracing::warn!("{}where the workers stand is not written down: no thread: {error}", self.log_prefix());
                return None;
            }
        }
        let of_attempt = self.error_files.keys().find_map(|local_rank| self.log_folder(*local_rank)?.parent());
        of_attempt.map(|folder| folder.join("*/hang-*.txt").display().to_string())
    }

    /// The folder of a worker's logs.
    pub(super) fn log_folder(&self, local_rank: u32) -> Option<&Path> {
        self.error_files.get(&local_rank)?.parent()
    }
}
