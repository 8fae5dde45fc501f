//! Rendezvous: who is in the job, when a round closes, who gets which rank, and why.
//!
//! One decision function ([`machine::Machine`], pure) runs in the *coordinator*, inside the process that hosts the store
//! and on the same port. Each node holds one *session*, a connection with the framed protocol of [`message`]. A join is
//! one request, its completion one push; nothing polls.
//!
//! | file | what |
//! |---|---|
//! | [`settings`] | what a node asks for: min and max nodes, time limits |
//! | [`message`], [`text`], [`codec`] | what nodes and the coordinator say to each other; bounds on texts; frames |
//! | [`state`], `tally`, [`ranks`] | what the coordinator knows of one run; what is counted of it; who gets which rank |
//! | [`machine`], `admission`, `claims`, `members`, `decide` | events in, commands out; who may come in; what a node's word counts for; what becomes of a node; when a round closes, and as what |
//! | [`home`] | the process that hosts the coordinator: which node is in it, and what follows when that goes |
//! | [`standing`] | what is decided at the moment, and why, in words |
//! | [`node`], `replies`, `pending`, `view` | a node's side of its session; what it is told; what it has under way; what it hands out |
//! | [`fence`] | when a node that is cut off stops its workers |
//! | [`report`] | what an operator is told of a node unasked |
//! | [`cas`] | the same decisions without a coordinator: over a cell with compare-and-set, or etcd |
//! | `coordinator`, `session` | the drivers: sockets and timers (feature `io`) |
//!
//! Semantics follow `torch/distributed/elastic/rendezvous/dynamic_rendezvous.py` (2.15) except where a comment says why not.

mod admission;
pub mod cas;
mod claims;
pub mod codec;
#[cfg(feature = "io")]
pub mod coordinator;
mod decide;
pub mod fence;
pub mod home;
pub mod machine;
mod members;
pub mod message;
pub mod node;
mod pending;
pub mod ranks;
mod replies;
pub mod report;
#[cfg(feature = "io")]
pub mod session;
pub mod settings;
pub mod standing;
pub mod state;
mod tally;
pub mod text;
mod view;
