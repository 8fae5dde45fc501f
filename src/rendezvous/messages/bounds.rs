//! Checks of what nodes send, and the texts of messages cleaned: short enough that every message fits its frame, without characters
//! that could forge log lines.

use super::message::{
    ADDED, CheckpointBy, CoordinatorMessage, Failure, Health, Hello, Join, JoinWorkers, LARGEST_STEP,
    LONGEST_NOTICE_MS, Placed, Placement, REMOVED, Resume, Running, SURVIVORS_LIMIT, Verdict, Waits, WorkerRanks,
    WorldChange,
};
use super::settings::Settings;
use crate::wire::text::{
    LOCAL_WORLD_SIZE_LIMIT, NAME_LIMIT_BYTES, REASON_LIMIT_BYTES, check, cut, plain, tidy, tidy_lines, validate_run_id,
};

impl Hello {
    /// Check a node's introduction.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        validate_run_id(&self.run_id)?;
        check("name", &self.name, NAME_LIMIT_BYTES)?;
        check("address", self.local_addr.as_deref().unwrap_or_default(), NAME_LIMIT_BYTES)?;
        check("host_name", self.host_name.as_deref().unwrap_or_default(), NAME_LIMIT_BYTES)?;
        self.settings.validate()?;
        self.placed.map_or(Ok(()), |placed| placed.validate(&self.settings))
    }
}

impl Placed {
    /// Check a node's claim about its last round against its settings, by which it was placed.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    fn validate(&self, settings: &Settings) -> Result<(), String> {
        let Self { rank, world_size, restart, .. } = *self;
        if world_size < 1 || world_size > settings.max_nodes {
            let max = settings.max_nodes;
            return Err(format!(
                "the world size of the last round is `{world_size}`, must be from 1 to max_nodes (`{max}`)"
            ));
        }
        if rank >= world_size {
            return Err(format!(
                "the rank of the last round is `{rank}`, must be below its world size (`{world_size}`)"
            ));
        }
        match settings.max_restarts {
            // A sliding budget is filled up again.
            Some(limit) if restart > limit && settings.rules.restart_window.is_none() => {
                Err(format!("the restart number is `{restart}`, must be at most max_restarts (`{limit}`)"))
            }
            _ => Ok(()),
        }
    }
}

impl Join {
    /// Check a node's account of its workers.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        if let Health::Ill(what) = &self.health {
            check("finding of the health check", what, NAME_LIMIT_BYTES)?;
        }
        let Some(workers) = &self.workers else { return Ok(()) };
        check("role", &workers.role, NAME_LIMIT_BYTES)?;
        check("name of the script", workers.script.as_deref().unwrap_or_default(), NAME_LIMIT_BYTES)?;
        match workers.local_world_size {
            1..=LOCAL_WORLD_SIZE_LIMIT => workers.validate_survivors(),
            size => Err(format!("local_world_size is `{size}`, must be from 1 to {LOCAL_WORLD_SIZE_LIMIT}")),
        }
    }
}

impl JoinWorkers {
    /// Check which workers have survived.
    fn validate_survivors(&self) -> Result<(), String> {
        let (survivors, size) = (self.survivors(), self.local_world_size);
        if survivors.len() > SURVIVORS_LIMIT {
            return Err(format!("{} surviving workers are named, at most {SURVIVORS_LIMIT} may be", survivors.len()));
        }
        if survivors.windows(2).any(|pair| pair[0].local_rank >= pair[1].local_rank) {
            return Err("the surviving workers are not named by rising local rank".to_owned());
        }
        match survivors.last().filter(|last| last.local_rank >= size) {
            Some(last) => Err(format!(
                "the local rank of a surviving worker is `{}`, must be below local_world_size (`{size}`)",
                last.local_rank
            )),
            None => Ok(()),
        }
    }
}

/// Most workers of a world. Ranks of PyTorch are `int`, so that no sum of a rank and the workers of a node overflows here.
const WORLD_SIZE_LIMIT: u32 = i32::MAX.cast_unsigned();

/// Check that `what` is a rank among so many.
fn is_rank(what: &str, rank: u32, size: u32) -> Result<(), String> {
    let many = WORLD_SIZE_LIMIT;
    match size {
        size if size < 1 || size > many => {
            Err(format!("the size for the {what} is `{size}`, must be from 1 to {many}"))
        }
        size if rank >= size => Err(format!("the {what} is `{rank}`, must be below its size (`{size}`)")),
        _ => Ok(()),
    }
}

impl CoordinatorMessage {
    /// Check the numbers with which a node computes: whatever listens at the endpoint may have written them.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        match self {
            Self::Complete(placement) => placement.validate(),
            Self::Welcome { running: Some(running), .. } => running.validate(),
            _ => Ok(()),
        }
    }
}

impl Placement {
    fn validate(&self) -> Result<(), String> {
        is_rank("node's rank", self.rank, self.world_size)?;
        if let Some(host) = &self.host {
            is_rank("rank of the coordinator's host", host.rank, self.world_size)?;
        }
        let Some(ranks) = &self.workers else { return Ok(()) };
        ranks.validate(self.local_world_size.unwrap_or(1))?;
        if self.world_size > ranks.world_size {
            let (nodes, workers) = (self.world_size, ranks.world_size);
            return Err(format!("the world has `{nodes}` nodes and `{workers}` workers, must have one on each node"));
        }
        match &self.resume {
            Some(Resume::Continue { source, survivors, .. }) => {
                is_rank("rank whose state is taken", *source, ranks.world_size)?;
                is_rank("number of survivors", survivors.saturating_sub(1), ranks.world_size)
            }
            Some(Resume::Restart { .. }) | None => Ok(()),
        }
    }
}

impl WorkerRanks {
    /// Check the ranks of a node that starts so many workers.
    fn validate(&self, local_world_size: u32) -> Result<(), String> {
        if !(1..=LOCAL_WORLD_SIZE_LIMIT).contains(&local_world_size) {
            return Err(format!(
                "the node's number of workers is `{local_world_size}`, must be from 1 to {LOCAL_WORLD_SIZE_LIMIT}"
            ));
        }
        let last = |first: u32| first.saturating_add(local_world_size - 1);
        is_rank("rank of the node's last worker", last(self.first_rank), self.world_size)?;
        is_rank("role rank of the node's last worker", last(self.first_role_rank), self.role_world_size)?;
        is_rank("number of workers of the role", self.role_world_size - 1, self.world_size)
    }
}

impl Running {
    fn validate(&self) -> Result<(), String> {
        is_rank("number of nodes", self.nodes.saturating_sub(1), self.workers)?;
        let free = WORLD_SIZE_LIMIT - LOCAL_WORLD_SIZE_LIMIT;
        match self.workers {
            workers if workers > free => Err(format!("the world has `{workers}` workers, must have at most {free}")),
            _ => Ok(()),
        }
    }
}

/// What a coordinator says, with its texts tidied: a node logs them, and whatever listens at the endpoint may have written them.
pub(in crate::rendezvous) fn tidy_message(message: CoordinatorMessage) -> CoordinatorMessage {
    use CoordinatorMessage::{
        Change, Closed, Complete, Ended, Heartbeat, Leaving, Rejected, Status, Welcome, Withdrawn,
    };
    let failed = |failure: Box<Failure>| Box::new(tidy_failure(&failure, plain(failure.node.clone())));
    let waits = |waits: Waits| Waits { progress: plain(waits.progress), ..waits };
    match message {
        Rejected { reason } => Rejected { reason: plain(reason) },
        Ended { reason } => Ended { reason: plain(reason) },
        Welcome { addr, hosted, running, wants_replay } => {
            let tidied = |running: Running| Running { master_addr: plain(running.master_addr), ..running };
            Welcome { addr: plain(addr), hosted, running: running.map(tidied), wants_replay }
        }
        Leaving { why, interrupts } => Leaving { why: plain(why), interrupts },
        Withdrawn { progress } => Withdrawn { progress: plain(progress) },
        Status { waiting, reason, restart, failure } => {
            Status { waiting, reason: plain(reason), restart, failure: failure.map(failed) }
        }
        Complete(placement) => Complete(Placement {
            master_addr: plain(placement.master_addr),
            reason: plain(placement.reason),
            resume: placement.resume.map(tidy_resume),
            ..placement
        }),
        Change(WorldChange { round, flags, reason }) => {
            Change(WorldChange { round, flags: flags & (REMOVED | ADDED), reason: plain(reason) })
        }
        CoordinatorMessage::CheckpointBy(news) => {
            let left_ms = news.left_ms.min(LONGEST_NOTICE_MS);
            CoordinatorMessage::CheckpointBy(CheckpointBy { left_ms, reason: plain(news.reason), ..news })
        }
        Closed { verdict, spare } => Closed { verdict: tidy_verdict(&verdict), spare },
        CoordinatorMessage::Over { verdict, ago } => CoordinatorMessage::Over { verdict: tidy_verdict(&verdict), ago },
        CoordinatorMessage::Redirect { endpoint, why } => {
            CoordinatorMessage::Redirect { endpoint: endpoint.map(plain), why: plain(why) }
        }
        Heartbeat { waits: status } => Heartbeat { waits: status.map(waits) },
        CoordinatorMessage::Waits(status) => CoordinatorMessage::Waits(waits(status)),
        CoordinatorMessage::Stale { .. }
        | CoordinatorMessage::Terms { .. }
        | CoordinatorMessage::RaiseAt { .. }
        | CoordinatorMessage::Members { .. }
        | CoordinatorMessage::Observed(_)
        | CoordinatorMessage::CheckHealth
        | CoordinatorMessage::Peer { .. }
        | CoordinatorMessage::Look(_)
        | CoordinatorMessage::Looked(_)
        | CoordinatorMessage::Hang(_) // checked where it is used
        | CoordinatorMessage::ReportStep { .. } => message,
    }
}

fn tidy_resume(resume: Resume) -> Resume {
    match resume {
        Resume::Restart { reason } => Resume::Restart { reason: plain(reason) },
        Resume::Continue { .. } => resume,
    }
}

/// A failure with its texts tidied, as it happened on `node`.
pub fn tidy_failure(failure: &Failure, node: String) -> Failure {
    let short = |text: &str| cut(plain(text.to_owned()), NAME_LIMIT_BYTES);
    Failure {
        node: cut(node, 3 * NAME_LIMIT_BYTES),
        role: short(&failure.role),
        exit: short(&failure.exit),
        message: tidy_lines(&failure.message, REASON_LIMIT_BYTES),
        step: failure.step.map(|step| step.min(LARGEST_STEP)),
        ..failure.clone()
    }
}

/// The verdict with its texts tidied.
pub fn tidy_verdict(verdict: &Verdict) -> Verdict {
    match verdict {
        Verdict::Succeeded { by } => Verdict::Succeeded { by: tidy(by) },
        Verdict::Failed { by, cause, failure, class } => Verdict::Failed {
            class: *class,
            by: tidy(by),
            cause: tidy(cause),
            failure: failure.as_ref().map(|failure| Box::new(tidy_failure(failure, tidy(&failure.node)))),
        },
        Verdict::AllDone { .. } => verdict.clone(),
        Verdict::Stopped { by, cause } => Verdict::Stopped { by: tidy(by), cause: tidy(cause) },
    }
}
