//! The place of a job's only node.

use elastic_rs::rendezvous::messages::message::{Placement, Round};

/// A place that no coordinator has given.
pub fn alone() -> Placement {
    Placement {
        round: Round(1),
        rank: 0,
        world_size: 1,
        world: 0,
        master_addr: "localhost".into(),
        master_port: 1000,
        reason: String::new(),
        restart: 0,
        workers: None,
        host: None,
        local_world_size: None,
        resume: None,
        members: None,
    }
}
