//! When this machine is checked: before the first join, and after a failure of a worker of its own.

use std::time::Instant;

use crate::commands::{self, does, killed};
use elastic_rs::agent::{AgentMachine, Command, Policy};
use elastic_rs::rendezvous::messages::message::Round;

#[test]
fn it_is_checked_before_the_first_join_and_after_failures_of_its_own() {
    let now = Instant::now();
    for checks_health in [false, true] {
        let policy = Policy { in_place: false, checks_health, ..commands::policy() };
        let mut agent = AgentMachine::new(policy, "node0".to_owned());
        let checked = |agent: &mut AgentMachine| {
            let did = does(agent);
            let joins = did.iter().position(|it| matches!(it, Command::Join { .. }));
            let checks = did.iter().position(|it| *it == Command::CheckHealth);
            assert!(joins.is_some() && checks.is_none_or(|at| Some(at) < joins), "{did:?}");
            checks.is_some()
        };
        assert_eq!(checked(&mut agent), checks_health);
        agent.on_placed(commands::placement(1), now);
        agent.on_started();
        agent.on_interrupted(Round(1), "another node was lost", now);
        agent.on_worker_exited_badly(killed(0), now); // by SIGTERM
        agent.on_stopped();
        assert!(!checked(&mut agent), "others have failed");
        agent.on_placed(commands::placement(2), now);
        agent.on_started();
        agent.on_worker_failed(killed(0), false, now);
        agent.on_stopped();
        agent.on_interrupted(Round(2), "restart 1", now);
        assert_eq!(checked(&mut agent), checks_health);
    }
}
