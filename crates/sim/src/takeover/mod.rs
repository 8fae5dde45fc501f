//! Jobs with a list of endpoints: on each listed host a process that may lead, on every host an agent.
//!
//! Drives [`Succession`](elastic_rs::rendezvous::coordinator::succession::Succession),
//! [`Machine`](elastic_rs::rendezvous::coordinator::machine::Machine) and [`NodeMachine`](elastic_rs::rendezvous::node::NodeMachine) as the
//! real drivers do. Hosts have clocks of their own. Workers are there until they have ended: their guards kill them by the deadline that
//! their node has given, also while its agent stands still.
//!
//! | file | what |
//! |---|---|
//! | [`plan`] | a job and its faults, drawn from a seed; mistakes that must show |
//! | `event` | what happens, and what is sent |
//! | `job`, `wiring`, `peers`, `agent` | the model: events, the drivers' part, connections between listed processes, agents and workers |
//! | `network`, `host` | connections between any two hosts; a host, its clock and its process |
//! | `checks` | the invariants |

mod agent;
mod checks;
mod event;
mod host;
mod job;
mod network;
mod peers;
pub mod plan;
mod wiring;

use crate::engine::history::{Failure, History};
pub use event::Event;
pub use job::Job;
pub use plan::{Action, Mutation, Options, Plan};

/// The result of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Digest of all events.
    pub digest: u64,
    /// Rounds that were formed.
    pub rounds: u64,
    /// How often a process has led on from the record of another one.
    pub takeovers: u64,
    /// How often somebody had to lead soon after a process that led was killed, and did.
    pub promises: u64,
}

/// Live through the history of a seed.
///
/// # Errors
/// The first invariant that breaks. With `keep_history`, the last events before it.
pub fn live(seed: u64, keep_history: bool) -> Result<Report, Box<Failure>> {
    live_with(seed, None, keep_history)
}

/// The same with a mistake, which an invariant must show.
///
/// # Errors
/// As [`live`].
pub fn live_with(seed: u64, mutation: Option<Mutation>, keep_history: bool) -> Result<Report, Box<Failure>> {
    live_plan(seed, &Plan::draw(seed, mutation), keep_history)
}

/// The same for a plan. The seed draws the rest.
///
/// # Errors
/// As [`live`].
pub fn live_plan(seed: u64, plan: &Plan, keep_history: bool) -> Result<Report, Box<Failure>> {
    let job = plan.begin(seed, keep_history).live(seed, plan.calm_at)?;
    Ok(Report { digest: job.digest(), rounds: job.rounds(), takeovers: job.takeovers(), promises: job.promises() })
}

impl Plan {
    /// The job, with what is to happen in it.
    pub fn begin(&self, seed: u64, keep_history: bool) -> Job {
        let mut job = Job::new(seed, self.options.clone());
        if keep_history {
            job.keep_history();
        }
        self.actions.iter().for_each(|(at, action)| job.engine.push(*at, Event::Act(*action)));
        job
    }
}
