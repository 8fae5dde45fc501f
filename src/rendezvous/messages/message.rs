//! The messages between a node and the coordinator, version 4. Serialised with postcard ([`super::codec`]).
//!
//! A connection opens with [`MAGIC`] and [`PROTOCOL_VERSION`], then carries frames. The node's first frame is
//! [`NodeMessage::Hello`]; the coordinator answers with [`CoordinatorMessage::Welcome`] or [`CoordinatorMessage::Rejected`].

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use super::change::{ADDED, CheckpointBy, GATHER, LONGEST_NOTICE_MS, NEVER, REMOVED, SAVE_WITHIN, WorldChange};
pub use super::ending::{EndClass, Failure, STILL_ALIVE, Verdict};
use super::hang::{HangNews, PaceReport};
pub use super::ids::{NodeId, Round};
pub use super::look::{AskLook, Look, LookAnswer};
pub use super::peer::PeerHello;
pub use super::placement::{
    CHECK_WITHIN, Generation, Health, HostInstance, Join, JoinWorkers, Placed, Placement, Resume, Running,
    SURVIVORS_LIMIT, Survival, Survivor, WorkerRanks,
};
pub use super::replay::{Replay, ReplayedEvent};
use super::settings::Settings;
use crate::events::record::Phase;
use crate::hang::view::View;

/// First bytes of a session's connection. `E` is no query code of c10d, so the first byte decides the protocol.
pub const MAGIC: &[u8] = b"ELRZ";

/// Follows [`MAGIC`], as `u16` little-endian. Both ends must have the same.
pub const PROTOCOL_VERSION: u16 = 4;

/// From node to coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeMessage {
    /// Introduces the node. First message of every connection.
    Hello(Box<Hello>),
    /// Joins the next round. Answered by [`CoordinatorMessage::Complete`] when the round is complete.
    Join(Join),
    /// Withdraws the join (join timeout). Answered by [`CoordinatorMessage::Withdrawn`].
    Withdraw,
    /// The node leaves and will not come back. The rendezvous stays open.
    Leave {
        /// The reason, for the other nodes' logs.
        reason: String,
        /// The signal that ended the agent, if one did.
        signal: Option<i32>,
    },
    /// The job is over: no node is admitted any more.
    Close(Verdict),
    /// A heartbeat. Each is answered by one [`CoordinatorMessage::Heartbeat`], in order.
    Heartbeat {
        /// How long the answer to an earlier one has taken, in microseconds, up to the run's lease. One heartbeat of twelve says it.
        rtt_us: Option<u64>,
    },
    /// A worker of this node has failed. Answered by [`CoordinatorMessage::Status`], [`CoordinatorMessage::Closed`] or
    /// [`CoordinatorMessage::Stale`].
    Failed {
        /// The round it belonged to.
        round: Round,
        /// The failure.
        failure: Box<Failure>,
    },
    /// All workers of this node have succeeded. Once those of all live members have, the rendezvous closes ([`Verdict::AllDone`]).
    Done {
        /// The round they belonged to.
        round: Round,
    },
    /// All living workers of this node are connected to their agent, so that the node can change in place.
    Attending {
        /// The round they belong to.
        round: Round,
    },
    /// Answer to [`CoordinatorMessage::Change`], and repeated on a new connection while it is not followed by anything.
    Counted {
        /// The round.
        round: Round,
        /// The number of the last check of the worker that is furthest: at most [`LARGEST_COUNT`].
        count: u64,
    },
    /// The node is about to leave, and asks for a [`CoordinatorMessage::Change`]. If the members cannot change in place, it is answered
    /// with a [`CoordinatorMessage::Status`].
    WillLeave {
        /// The round.
        round: Round,
        /// As in [`Self::Leave`].
        reason: String,
        /// As in [`Self::Leave`].
        signal: Option<i32>,
    },
    /// The workers of a node that leaves have stopped at the check of [`CoordinatorMessage::RaiseAt`]. The others need not wait for its
    /// [`Self::Leave`].
    Parked {
        /// The round.
        round: Round,
    },
    /// The workers of this node let `elastic_rs.elastic.run` make their process groups. So a newcomer's can be started before it joins:
    /// see [`Running`].
    NoProcessGroup {
        /// The round they belong to.
        round: Round,
    },
    /// How long the parts of the recovery have taken that ended with this round's workers, on this node.
    PhaseDurations {
        /// The round.
        round: Round,
        /// The parts.
        phase: Phase,
    },
    // Sent only by an observer, whose connection carries nothing else.
    /// Asks for a run's events and state. Each is answered by one [`CoordinatorMessage::Observed`], in order.
    Observe(Observe),
    /// A worker of this node has made its first step of the round.
    Progress {
        /// The round.
        round: Round,
        /// The step.
        first: Progress,
    },
    /// Answer to [`CoordinatorMessage::ReportStep`]: how far the worker of this node is that is furthest.
    Step {
        /// The round.
        round: Round,
        /// How far it is.
        report: StepReport,
    },
    /// The last events that this node recorded itself: the answer to a [`CoordinatorMessage::Welcome`] that asks for them. Nothing depends
    /// on it.
    Replay(Box<Replay>),
    /// This node was cut off for its whole lease, and has stopped its workers. Nothing depends on it.
    Fenced,
    // Sent only by an observer.
    /// Asks where the ranks stand. Each is answered by one [`CoordinatorMessage::Looked`], in order.
    AskLook(AskLook),
    /// Answer to [`CoordinatorMessage::Look`], one for each worker of the node that was seen. [`Self::Looked`] follows the last one.
    View {
        /// Number of the look.
        number: u64,
        /// What was seen of one worker.
        view: Box<View>,
    },
    /// What `py-spy` shows of the rank for which it was asked. Sent after its [`Self::View`].
    PySpy {
        /// Number of the look.
        number: u64,
        /// Its lines, or why there are none.
        text: String,
    },
    /// The look is over on this node.
    Looked {
        /// Number of the look.
        number: u64,
        /// Why frames of its workers cannot be read, if they cannot.
        problem: Option<String>,
    },
    /// The workers of this node make no step, or have moved since.
    Pace {
        /// The round they belong to.
        round: Round,
        /// Which of both.
        pace: PaceReport,
    },
    /// The node's machine is about to be taken away. All members get a [`CoordinatorMessage::CheckpointBy`]. If they can change in place,
    /// a [`CoordinatorMessage::Change`] follows, as after [`Self::WillLeave`].
    Notice {
        /// The round.
        round: Round,
        /// After how many milliseconds: up to [`LONGEST_NOTICE_MS`].
        left_ms: u64,
        /// Who says so, in words.
        reason: String,
    },
    /// The workers of this node save at the check of a change, and are started anew. So they may take [`SAVE_WITHIN`] longer.
    Saves {
        /// The round.
        round: Round,
    },
    // Sent only by a process at another endpoint of the list: the first message of its connection.
    /// Introduces that process. Answered by [`CoordinatorMessage::Peer`].
    Peer(Box<PeerHello>),
}

/// A node's first step of a round, and how far it had come before. Steps count up to [`LARGEST_STEP`], and microseconds up to
/// [`LONGEST_US`](crate::events::record::LONGEST_US).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Microseconds from the end of the start until the step ended.
    pub after_us: u64,
    /// Microseconds of it until the last of this node's workers had its process group, and until it had the state of its world, if
    /// `elastic_rs.elastic` has made them.
    pub formed_us: [Option<u64>; 2],
    /// Number of the step, if the training script says where it is.
    pub step: Option<u64>,
    /// Number of the last step that this node's workers had made in an earlier round.
    pub before: Option<u64>,
    /// Mean microseconds of a step in that round.
    pub step_time_us: Option<u64>,
}

/// How far the worker of a node is that is furthest in a round, and whether the node's workers are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of its last step, up to [`LARGEST_STEP`]. `None`: it has made none, or does not report any.
    pub step: Option<u64>,
    /// Mean microseconds of a step in this round, up to [`LONGEST_US`](crate::events::record::LONGEST_US).
    pub step_time_us: Option<u64>,
    /// A worker of the node uses `elastic_rs.elastic` with a process group of NCCL, and without `in_place=nccl`: it is restarted when the
    /// world changes.
    pub restarts_for_nccl: bool,
}

/// How long an observer's question waits for an event. The answer is empty then.
pub const OBSERVER_WAIT: Duration = Duration::from_secs(60);

/// What an observer asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observe {
    /// The run's id. `None`: the only run of this coordinator.
    pub run_id: Option<String>,
    /// The events after this one.
    pub after: u64,
    /// If there is none yet: wait for it.
    pub waits: bool,
    /// The run's state as well.
    pub state: bool,
}

/// A part of a run's events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    /// The run's id.
    pub run_id: String,
    /// Its state, as JSON, if it was asked for.
    pub state: Option<String>,
    /// Events as lines of JSON, the oldest first.
    pub lines: Vec<String>,
    /// Number of the last of them. As in the question, if there are none.
    pub last: u64,
    /// There are more events, which can be asked for at once.
    pub more: bool,
}

/// Most interfaces of a node that count.
pub const INTERFACES_LIMIT: usize = 32;

/// Largest number of a step.
pub use crate::steps::slot::LARGEST_STEP;

/// Largest number of checks that a node may name.
pub const LARGEST_COUNT: u64 = 1 << 62;

/// Introduces a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The job's run id.
    pub run_id: String,
    /// The agent's id.
    pub node: NodeId,
    /// The node's name in messages: `host:pid`.
    pub name: String,
    /// The address for other nodes, if the user gave one (`--local-addr`). Otherwise the one that the coordinator sees.
    pub local_addr: Option<String>,
    /// Drawn at random once per process: agents of one process share it.
    pub process: u64,
    /// The rank the user gave this node, if any.
    pub node_rank: Option<u32>,
    /// The name of the node's host, as whoever starts the agents calls it.
    pub host_name: Option<String>,
    /// The node's settings.
    pub settings: Settings,
    /// The last round this node was placed in, if any.
    pub placed: Option<Placed>,
    /// Number of workers of that round, if rounds count workers.
    pub world_workers: Option<u32>,
    /// The node waits for its next rank, and its [`Join`] follows.
    pub joining: bool,
    /// The node's own process hosts a coordinator. A coordinator believes this only of its own process.
    pub hosts: bool,
    /// The node's workers may survive a change of the world. Not with PyTorch's agent.
    pub in_place: bool,
    /// All of them attend: the node can change in place now. A restarted coordinator has to know that before it sends the member
    /// anything, so it cannot wait for [`NodeMessage::Attending`].
    pub attending: bool,
    /// The node's agent answers [`CoordinatorMessage::ReportStep`] and [`CoordinatorMessage::Look`]. PyTorch's does not.
    pub reports_steps: bool,
    /// The addresses of the node's interfaces, from any of which its workers may connect to the round's store: at most
    /// [`INTERFACES_LIMIT`] count. `None`: the node does not want to know from where the members of its rounds connect
    /// ([`CoordinatorMessage::Members`]).
    pub interfaces: Option<Vec<IpAddr>>,
    /// Where the node's process listens for as long as it lives, if it does. Before it is connected, port 0 says that it wants to.
    pub life_at: Option<SocketAddr>,
}

impl Hello {
    /// A node that was just started and was in no round. Its address is the one that the coordinator sees, its process has no number
    /// (0), and it asks for no rank. Its workers may survive a change of the world.
    pub fn new(run_id: impl Into<String>, node: NodeId, name: impl Into<String>, settings: Settings) -> Self {
        Self {
            run_id: run_id.into(),
            node,
            name: name.into(),
            local_addr: None,
            process: 0,
            node_rank: None,
            host_name: None,
            settings,
            placed: None,
            world_workers: None,
            joining: false,
            hosts: false,
            in_place: true,
            attending: false,
            reports_steps: false,
            interfaces: None,
            life_at: None,
        }
    }
}

/// From coordinator to node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CoordinatorMessage {
    /// The node is rejected. The first variant, so that an end of another version can read the refusal, which names both versions.
    Rejected {
        /// The reason, and what would be accepted.
        reason: String,
    },
    /// The answer to an accepted [`Hello`].
    Welcome {
        /// The address at which other nodes will look for this one.
        addr: String,
        /// The node is in the coordinator's own process.
        hosted: bool,
        /// The world that runs, if it can change in place and the node is new: it may start its workers before it joins, because they
        /// reach `elastic_rs.elastic.run` without a world.
        running: Option<Running>,
        /// The coordinator was restarted, and asks this member of a world that it did not form for [`NodeMessage::Replay`].
        wants_replay: bool,
    },
    /// The state of the world, pushed to running members when it changes.
    Status {
        /// Above zero when the world must re-form: nodes wait for a rank, or a member was lost.
        waiting: u32,
        /// Why, in words.
        reason: String,
        /// The job's restart number. If the world must re-form, the next round's.
        restart: u32,
        /// The failure that is the cause, if any.
        failure: Option<Box<Failure>>,
    },
    /// The round is complete. With the node's rank assignment in it.
    Complete(Placement),
    /// The answer to [`NodeMessage::Withdraw`].
    Withdrawn {
        /// Which nodes had joined, and how many were missing.
        progress: String,
    },
    /// The rendezvous is closed.
    Closed {
        /// How the job ended.
        verdict: Verdict,
        /// Whether this node was a spare, which the job did not need.
        spare: bool,
    },
    /// The session is over, and reconnecting would not help.
    Ended {
        /// Why.
        reason: String,
    },
    /// Answer to a heartbeat.
    Heartbeat {
        /// For a waiting node: the progress of the round.
        waits: Option<Waits>,
    },
    /// Answer to the [`Join`] of a spare.
    Waits(Waits),
    /// The node's message was about a round that is over for it, and had no effect.
    Stale {
        /// The round of the message.
        round: Round,
        /// The current one.
        current: Round,
    },
    /// The run's lease. Sent after [`Welcome`](Self::Welcome) to a node that brought another one, and when it has changed. From then
    /// on it is the node's own.
    Terms {
        /// See [`Settings::keep_alive_interval`].
        keep_alive_interval: Duration,
        /// See [`Settings::keep_alive_max_attempt`].
        keep_alive_max_attempt: u32,
    },
    /// The coordinator's process ends. The coordinator decides nothing more, and closes the connection.
    Leaving {
        /// What ends it, in words.
        why: String,
        /// Whether the node's world must re-form, because a member with running workers was in that process.
        interrupts: bool,
    },
    /// The world changes: all its workers are to stop at one check. Answered by [`NodeMessage::Counted`]. Followed by
    /// [`Self::RaiseAt`], or by a [`Self::Status`] if the members cannot stop together.
    Change(WorldChange),
    /// At which check the workers stop. The same for all members, and above every count that they have named.
    RaiseAt {
        /// The round.
        round: Round,
        /// The number of the check. [`NEVER`]: the reason is gone, and they go on.
        check: u64,
    },
    /// A part of the addresses from which the members of a round connect. For the node that serves their workers' store, before its place,
    /// if it wants to know them ([`Hello::interfaces`]).
    Members {
        /// The round.
        round: Round,
        /// At most [`MEMBERS_IN_A_MESSAGE`].
        addresses: Vec<IpAddr>,
        /// Whether another part follows.
        more: bool,
    },
    // Sent only to an observer.
    /// Answer to [`NodeMessage::Observe`].
    Observed(Observed),
    /// Somebody wants to know how far the training is. Answered by [`NodeMessage::Step`], if workers of the round run.
    ReportStep {
        /// The round.
        round: Round,
    },
    /// The rendezvous was closed before this node came. Sent after [`Self::Welcome`], instead of [`Self::Closed`], to a node that was in
    /// no round.
    Over {
        /// How the job ended.
        verdict: Verdict,
        /// How long ago. `None`: nobody knows.
        ago: Option<Duration>,
    },
    /// The agent is to look at its workers. Answered by a [`NodeMessage::View`] for each, and by [`NodeMessage::Looked`].
    Look(Look),
    // Sent only to an observer.
    /// Answer to [`NodeMessage::AskLook`].
    Looked(LookAnswer),
    /// The training hangs, or goes on.
    Hang(HangNews),
    /// Members of the round are about to leave, since their machines are taken away: the workers of all are to save.
    CheckpointBy(CheckpointBy),
    /// The node's host was out, and is let in if its check finds nothing now. The node answers by its join, once more.
    CheckHealth,
    // Sent only to a process at another endpoint of the list.
    /// Answer to [`NodeMessage::Peer`].
    Peer {
        /// The process at this endpoint.
        process: NodeId,
    },
    /// The coordinator of the run is at another endpoint of the list. The connection ends.
    Redirect {
        /// Which one. `None`: nobody leads yet.
        endpoint: Option<String>,
        /// Why nobody leads, in words.
        why: String,
    },
}

/// Most addresses in one [`CoordinatorMessage::Members`]. As many fit into a frame.
pub const MEMBERS_IN_A_MESSAGE: usize = 2048;

impl CoordinatorMessage {
    /// The rank assignment that it gives the node, if it gives one.
    pub fn placement(&self) -> Option<&Placement> {
        match self {
            Self::Complete(placement) => Some(placement),
            _ => None,
        }
    }
}

/// The progress of a round, for a waiting node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Which nodes have joined, how many are missing, and until when.
    pub progress: String,
    /// Whether the node is a spare. Its join does not time out then.
    pub spare: bool,
}
