//! A job and its faults: what is drawn from a seed, or written in a scenario.

use std::collections::BTreeMap;
use std::time::Duration;

use super::agent::Agents;
use super::elastic::Elastic;
use super::odd_hosts::OddHosts;
use crate::engine::paths::{End, HostId, Partition};
use elastic_rs::rendezvous::messages::message::{Hello, NodeMessage, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;

/// The options of a job, without its faults.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of everything random.
    pub seed: u64,
    /// Number of hosts.
    pub hosts: usize,
    /// The settings of every node.
    pub settings: Settings,
    /// `coordinator_timeout` of the nodes.
    pub coordinator_timeout: Duration,
    /// `join_timeout` of the nodes.
    pub join_timeout: Duration,
    /// Shortest and longest transit time of a message.
    pub delay: (Duration, Duration),
    /// Shortest and longest time for an agent to stop its workers.
    pub stop: (Duration, Duration),
    /// Whether an agent whose join timed out joins again with a long time-out, instead of ending.
    pub rejoin: bool,
    /// Hosts that give an address for the others (`--local-addr`).
    pub local_addrs: BTreeMap<HostId, String>,
    /// Ranks that hosts ask for in the first round.
    pub node_ranks: BTreeMap<HostId, u32>,
    /// Hosts whose wall clock is wrong, with the number of microseconds by which it is ahead.
    pub clocks: BTreeMap<HostId, i64>,
    /// The hosts that run our agent.
    pub agents: Agents,
    /// The hosts whose workers live through changes of the world.
    pub elastic: Elastic,
    /// Hosts that do not belong to this job, or differ from its others.
    pub odd_hosts: OddHosts,
    /// Whether nodes want to know from where the members of their round connect.
    pub members: bool,
    /// Whether the coordinator has reached the ports of nodes with every other connection, by which it knows that a process has ended.
    pub life_ports: bool,
    /// The host whose agent is in the coordinator's process. The two stand still, end and start together.
    pub coordinator_on: Option<HostId>,
}

impl Options {
    /// A job without delays or randomness: events happen at exact times.
    pub fn exact(hosts: usize, settings: Settings) -> Self {
        Self {
            seed: 0,
            hosts,
            settings,
            coordinator_timeout: Duration::from_secs(300),
            join_timeout: Duration::from_secs(600),
            delay: (Duration::ZERO, Duration::ZERO),
            stop: (Duration::ZERO, Duration::ZERO),
            rejoin: false,
            local_addrs: BTreeMap::new(),
            node_ranks: BTreeMap::new(),
            clocks: BTreeMap::new(),
            agents: Agents::default(),
            elastic: Elastic::default(),
            odd_hosts: OddHosts::default(),
            members: false,
            life_ports: false,
            coordinator_on: None,
        }
    }
}

/// An action on a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An agent starts, with a join timeout, and joins.
    Start(HostId, Duration),
    /// The agent dies: the kernel closes its connection.
    Kill(HostId),
    /// The host is switched off: no connection is closed.
    PowerOff(HostId),
    /// SIGTERM: the agent sends a goodbye and ends.
    Terminate(HostId),
    /// Ctrl-C: the same by SIGINT.
    Interrupt(HostId),
    /// SIGTERM: the agent asks the others to change in place, and leaves when its workers have stopped.
    AskToLeave(HostId),
    /// A notice that the host is taken away after this time. Of hosts with our agents.
    Notice(HostId, Duration),
    /// SIGSTOP, and SIGCONT later.
    Stall(HostId, Duration),
    /// The connection breaks.
    Sever(HostId),
    /// The path to the given end is cut.
    Cut(HostId, End, Duration, Partition),
    /// A worker fails: the agent stops the others and joins again.
    FailWorkers(HostId),
    /// All workers of a host end at one instant, if its agent is PyTorch's: it joins again. Otherwise as [`Self::FailWorkers`].
    LoseWorkers(HostId),
    /// A worker fails: the agent reports it, and waits for the answer.
    ReportFailure(HostId),
    /// All workers succeed: the agent reports it, and waits for the others.
    ReportDone(HostId),
    /// The agent ends the job, and then itself.
    Close(HostId, Verdict),
    /// SIGSTOP of the coordinator, and SIGCONT later.
    StallCoordinator(Duration),
    /// The coordinator dies. Its memory is lost.
    CrashCoordinator,
    /// The coordinator is started again.
    StartCoordinator,
    /// An odd host introduces itself with any claim, sends this, and ends without a goodbye.
    Intrude(Box<Hello>, Vec<NodeMessage>),
    /// The coordinator is started at another place: its address has moved to another machine.
    MoveCoordinator,
}

/// The run id of every simulated job. Other runs on its coordinator have the ids of [`run_id`].
pub const RUN_ID: &str = "job";

/// The run id of the job with this number.
pub(super) fn run_id(run: usize) -> String {
    if run == 0 { RUN_ID.to_owned() } else { format!("{RUN_ID}-{run}") }
}
