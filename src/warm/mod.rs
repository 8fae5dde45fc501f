//! Warm starts: workers are forked from a fork server that has imported their modules.
//!
//! Owns the fork server, which users know as the *template*: the agent's end of it ([`Template`]), its own end ([`ForkServer`]),
//! the messages between the two, and the rules which workers may be forked from it. Leaves to the front end what a fork server
//! executes. Leaves to the program in the fork server how a child becomes a worker that equals an executed one.
//!
//! For each worker the fork server forks a child that becomes the worker's guard, and the guard forks the worker. So supervision
//! is the same for both kinds of start. The fork server's own guard kills nothing when the server ends: workers outlive it. When
//! a fork server cannot be used, workers are executed as usual, and the log says why.
//! `docs/decisions/0047-warm-starts-fork-workers-from-a-template.md` and the two after it have the reasons.
//!
//! This room uses `workers`, which knows it only as a [`Forker`](crate::workers::Forker).

mod client;
mod fork_server;
mod message;
mod socket;
mod spawn_request;
mod spec;
mod supervisor;
mod template;
mod title;

pub use fork_server::ForkServer;
pub use spawn_request::SpawnRequest;
pub use spec::TemplateSpec;
pub use template::Template;
