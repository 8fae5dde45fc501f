//! The core of elastic_rs: what PyTorch's launcher layer (`torch.distributed.elastic`) does, in Rust and without Python.
//!
//! Decisions are pure: state machines take events and `now`, and return what to do and when to be called again.
//! Drivers act: they own the sockets, clocks and threads, and sit behind the feature `io`.
//! `cargo check --no-default-features --lib` compiles the pure half alone. `ARCHITECTURE.md` has the map, `docs/decisions` the
//! reasons.

pub mod agent;
#[cfg(feature = "io")]
pub mod at_once;
#[cfg(feature = "io")]
mod bounded_log;
pub mod channel;
#[cfg(feature = "io")]
pub mod clock;
pub mod devices;
pub mod discovery;
#[cfg(feature = "io")]
pub mod endpoint;
pub mod etcd_client;
pub mod events;
pub mod hang;
pub mod hosts;
pub mod launcher;
pub mod net;
#[cfg(feature = "io")]
mod open_files;
#[cfg(feature = "io")]
mod processes;

pub mod rendezvous;
pub mod secure;
pub mod signals;
pub mod steps;
pub mod store;
#[cfg(feature = "io")]
pub mod threads;
#[cfg(feature = "io")]
pub mod warm;
pub mod wire;
pub mod workers;
