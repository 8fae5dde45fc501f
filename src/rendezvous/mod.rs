//! Rendezvous: which nodes are in the job, when a round closes, which node gets which rank, and why.
//!
//! One decision function ([`run`], pure) runs in the *coordinator*, inside the process that serves the store and on the
//! same port. Each node holds one *session*, a connection with the framed protocol of [`messages::message`]. A join is one
//! request, its completion one push; nothing polls. Where there is no coordinator, every node runs the same decisions over a
//! shared [`cell`].
//!
//! | room | what it owns |
//! |---|---|
//! | [`conf`] | the keys of `--rdzv-conf`, each with its default, range and help |
//! | [`messages`] | the session protocol: messages, limits of texts, frames, settings |
//! | [`run`] | one run: its nodes, rounds and ranks, the decisions about them and their reasons |
//! | `decision_state` | the part of a machine's state that decides, for the simulator (feature `sim`) |
//! | [`coordinator`] | the registry of runs, and the driver of their sockets and timers (feature `io`) |
//! | [`node`] | a node's side of its session, and the driver of its connection (feature `io`) |
//! | `observer` | reads a run's events and state from a coordinator, and changes nothing (feature `io`) |
//! | [`quorum`] | who leads a run when its leader dies, and what a successor knows |
//! | [`cell`] | the same decisions without a coordinator: over a cell with compare-and-set |
//! | [`etcd`] | a node over the cell that etcd is: leases, watch, and one node that proposes for all |
//!
//! Imports point one way: `coordinator` and `cell` use `run`, `etcd` uses `cell`, which uses `node`; all use `messages`. Only tests here use `conf`.
//!
//! Semantics follow `torch/distributed/elastic/rendezvous/dynamic_rendezvous.py` (2.15) except where a comment says why not.

pub mod cell;
pub mod conf;
pub mod coordinator;
#[cfg(feature = "sim")]
pub mod decision_state;
pub mod etcd;
pub mod messages;
pub mod node;
#[cfg(feature = "io")]
pub mod observer;
pub mod quorum;
pub mod run;
