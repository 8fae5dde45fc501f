//! What the tests of the agent's machine share: its policy, a place in a round, a failure, and the commands that follow an event.

use std::time::{Duration, Instant};

use elastic_rs::agent::{AgentMachine, Budget, Command, Policy};
use elastic_rs::channel::message::HeldState;
use elastic_rs::rendezvous::messages::message::{Failure, Generation, Placement, Round, Survival, Survivor};
use elastic_rs::signals::{FirstSignal, Signal};
use elastic_rs::workers::StopPolicy;

pub const SIGTERM: i32 = 15;
pub const SIGKILL: i32 = 9;
/// How long workers may take to end after the signal.
pub const GRACE: Duration = Duration::from_secs(7);

/// The policy of a node with two workers that can change in place. The job may be restarted three times.
pub fn policy() -> Policy {
    Policy {
        budget: Budget::Job,
        workers: 2,
        max_restarts: 3,
        grace: GRACE,
        first_signal: FirstSignal::default(),
        exit_barrier_timeout: None,
        in_place: true,
        standbys: 0,
        replaces_dying: true,
        saves_by_signal: false,
        checks_health: false,
    }
}

/// A place in a round of two nodes.
pub fn placement(round: u64) -> Placement {
    Placement {
        round: Round(round),
        rank: 0,
        world_size: 2,
        world: round,
        master_addr: "node0".into(),
        master_port: 1,
        reason: "all are in".into(),
        restart: 0,
        workers: None,
        host: None,
        local_world_size: None,
        resume: None,
        members: None,
    }
}

/// The state of a worker with this commit. `None`: it has never had the job's state.
pub fn held(commit: Option<u64>) -> HeldState {
    HeldState { generation: commit.map(|_| Generation { round: Round(1), world: 1 }), commit }
}

/// The join of a node whose workers attended. Those with these local ranks and commits live.
pub fn join_with(survivors: &[(u32, Option<u64>)]) -> Command {
    let survivor = |&(local_rank, commit): &(u32, Option<u64>)| {
        let HeldState { generation, commit } = held(commit);
        Survivor { local_rank, generation, commit }
    };
    Command::Join { survival: Survival::Attended(survivors.iter().map(survivor).collect()) }
}

/// The join of a node whose workers have been stopped, and had never attended.
pub const UNATTENDED: Command = Command::Join { survival: Survival::NeverAttended };

/// The join of a node that had no workers before.
pub const NEW: Command = Command::Join { survival: Survival::New };

/// The failure of a worker that was killed, as the driver first reports it: without the worker's words.
pub fn killed(local_rank: u32) -> Failure {
    Failure {
        node: String::new(),
        role: "default".into(),
        local_rank,
        global_rank: local_rank,
        pid: 70 + local_rank,
        exit: "SIGKILL".into(),
        returncode: -9,
        message: String::new(),
        counts: true,
        lived: Duration::from_secs(60),
        step: None,
    }
}

/// The command that stops all workers, by this signal first.
pub fn stop(signal: i32) -> Command {
    Command::Stop(StopPolicy { signal: Signal(signal), grace: GRACE, ..StopPolicy::default() })
}

/// The agent's commands, without log lines.
pub fn does(agent: &mut AgentMachine) -> Vec<Command> {
    let is_text = |command: &Command| matches!(command, Command::Log(_) | Command::Warn(_));
    agent.take_commands().into_iter().filter(|command| !is_text(command)).collect()
}

/// The agent's next warnings.
pub fn warnings(agent: &mut AgentMachine) -> Vec<String> {
    let text = |command| if let Command::Warn(text) = command { Some(text) } else { None };
    agent.take_commands().into_iter().filter_map(text).collect()
}

/// An agent that is about to join, since no world runs.
pub fn new_agent(policy: Policy) -> AgentMachine {
    let mut agent = AgentMachine::new(policy, "node0".into());
    assert_eq!(agent.take_commands(), [Command::Look]);
    agent.on_forecast(None, Instant::now());
    agent
}
