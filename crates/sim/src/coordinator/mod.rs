//! Jobs with a coordinator: its process, the network, and hosts with PyTorch's agents or ours.
//!
//! Drives [`Machine`](elastic_rs::rendezvous::coordinator::machine::Machine),
//! [`NodeMachine`](elastic_rs::rendezvous::node::NodeMachine) and [`AgentMachine`](elastic_rs::agent::AgentMachine) as the real drivers
//! do, over a network that delays, breaks and silences connections.
//!
//! | file | what |
//! |---|---|
//! | [`options`], `event` | a job, its faults, and what happens in it |
//! | [`simulation`], `actions`, `wiring` | the model: events, actions on a job, the drivers' part |
//! | [`network`] | connections: ordered, delayed, broken, silent |
//! | [`host`], `server` | a host and the agent on it; the coordinator's process |
//! | [`agent`] | our agent on a host, and its workers |
//! | [`elastic`] | agents whose workers live through changes of the world |
//! | [`odd_hosts`] | hosts that do not belong to the job, or differ from its others |
//! | [`ledger`] | the record of what was said, and the promises of our rendezvous |
//! | [`plan`], [`agent_plan`], [`elastic_plan`], [`hosts_plan`], [`strange_plan`] | faults and their times, drawn from a seed; with our agents; with changes in place; with hosts that are kept out, and worlds that count workers; with odd hosts |
//! | [`history`] | the history that follows from a plan |
//! | [`explore`], `fingerprint` | exhaustive exploration of small jobs: every order of events, up to a bound |
//!
//! Every host has its own wall clock, with an error that the plan draws ([`options::Options::clocks`]). PyTorch's algorithm reads it.
//! No public function of our rendezvous takes a wall clock's time, so clocks that differ between hosts cannot matter.

mod actions;
pub mod agent;
pub mod agent_plan;
pub mod elastic;
pub mod elastic_plan;
mod event;
pub mod explore;
mod fingerprint;
pub mod history;
pub mod host;
pub mod hosts_plan;
pub mod ledger;
pub mod network;
pub mod odd_hosts;
pub mod options;
pub mod plan;
mod server;
pub mod simulation;
pub mod strange_plan;
mod wiring;

pub use options::{Action, Options, RUN_ID};
pub use simulation::Simulation;
