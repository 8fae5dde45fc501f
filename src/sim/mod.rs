//! The simulator: a whole job (coordinator, network, hosts with stock agents or ours) in one thread under virtual time.
//!
//! Owns no decision of the product: it drives [`Machine`](crate::rendezvous::coordinator::machine::Machine),
//! [`NodeMachine`](crate::rendezvous::node::machine::NodeMachine) and [`AgentMachine`](crate::agent::AgentMachine) as real drivers do, over a network that delays, breaks and silences, and
//! checks what must always be true after every event. Nothing here reads a clock or a socket; everything random comes from one
//! seeded generator, so a seed is a whole history and may be replayed.
//!
//! | file | what |
//! |---|---|
//! | [`queue`] | virtual time, the queue of events, the generator |
//! | [`network`] | connections: ordered, delayed, lost, silent |
//! | [`host`], `coordinator` | a host and the agent on it; the coordinator's process |
//! | [`agent`] | our agent on a host, and its workers |
//! | [`plan`], [`agent_plan`], [`strange_plan`] | what goes wrong when: drawn from a seed; with our agents; with strangers |
//! | [`strangers`] | hosts that are not of the job, or not as it expects them |
//! | [`simulation`], `actions`, `wiring` | the loop; what may be done to a job; the drivers' part |
//! | [`cell`], [`etcd`] | jobs without a coordinator: over one shared cell, and over a model of etcd |
//! | [`worlds`], [`invariants`] | what must be true of any rendezvous; what is promised beyond by ours |
//! | [`explore`], `fingerprint` | small jobs exhaustively: every order of events, up to a bound |
//! | [`pytorch`] | PyTorch's own algorithm under the same faults, held to the same invariants: what the simulator sees |
//!
//! Every host has a wall clock of its own, wrong by as much as a plan says ([`simulation::Options::clocks`]). PyTorch's algorithm reads
//! it. No public function of our rendezvous takes a wall clock's time, so clocks that differ between hosts cannot matter.

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
