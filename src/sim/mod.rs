//! The simulator: a whole job (coordinator, network, hosts with PyTorch's agents or ours) in one thread under virtual time.
//!
//! Owns no decision of the product. It drives [`Machine`](crate::rendezvous::coordinator::machine::Machine),
//! [`NodeMachine`](crate::rendezvous::node::machine::NodeMachine) and [`AgentMachine`](crate::agent::AgentMachine) as the real drivers
//! do, over a network that delays, breaks and silences connections. It checks the invariants after every event. Nothing here reads
//! a clock or a socket. All randomness comes from one seeded generator, so a seed determines a whole history and can be replayed.
//!
//! | file | what |
//! |---|---|
//! | [`queue`] | virtual time, the queue of events, the generator |
//! | [`network`] | connections: ordered, delayed, broken, silent |
//! | [`host`], `coordinator` | a host and the agent on it; the coordinator's process |
//! | [`agent`] | our agent on a host, and its workers |
//! | [`plan`], [`agent_plan`], [`strange_plan`] | faults and their times, drawn from a seed; with our agents; with strangers |
//! | [`strangers`] | hosts that do not belong to the job, or differ from its others |
//! | [`simulation`], `actions`, `wiring` | the loop; actions on a job; the drivers' part |
//! | [`cell`], [`etcd`] | jobs without a coordinator: over one shared cell, and over a model of etcd |
//! | [`worlds`], [`invariants`] | the invariants of any rendezvous; the further promises of ours |
//! | [`explore`], `fingerprint` | exhaustive exploration of small jobs: every order of events, up to a bound |
//! | [`pytorch`] | PyTorch's own algorithm under the same faults and invariants: a test of the simulator |
//!
//! Every host has its own wall clock, with an error that the plan draws ([`simulation::Options::clocks`]). PyTorch's algorithm reads it.
//! No public function of our rendezvous takes a wall clock's time, so clocks that differ between hosts cannot matter.

mod actions;
pub mod agent;
pub mod agent_plan;
pub mod cell;
mod coordinator;
pub mod etcd;
pub mod explore;
mod fingerprint;
pub mod host;
pub mod invariants;
pub mod network;
pub mod plan;
pub mod pytorch;
pub mod queue;
pub mod simulation;
pub mod strange_plan;
pub mod strangers;
mod wiring;
pub mod worlds;
