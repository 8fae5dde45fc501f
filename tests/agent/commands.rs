//! What the tests of the agent's machine share: a place in a round, and the commands that follow an event.

use std::time::Instant;

use elastic_rs::agent::{AgentMachine, Command, Policy};
use elastic_rs::rendezvous::protocol::message::{Placement, Round};

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
    }
}

/// The agent's commands, without log lines.
pub fn does(agent: &mut AgentMachine) -> Vec<Command> {
    let said = |command: &Command| matches!(command, Command::Tell(_) | Command::Warn(_));
    agent.take_commands().into_iter().filter(|command| !said(command)).collect()
}

/// An agent that is about to join, since no world runs.
pub fn new_agent(policy: Policy) -> AgentMachine {
    let mut agent = AgentMachine::new(policy, "node0".into());
    assert_eq!(agent.take_commands(), [Command::Look]);
    agent.on_outlook(None, Instant::now());
    agent
}
