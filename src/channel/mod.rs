//! The channel between an agent and its workers, over which workers survive a change of the world.
//!
//! Owns a Unix socket of the agent, the messages on it, a worker's count of its checks, and the sockets of a worker that are shut
//! down when a peer has failed. Leaves to [`crate::agent`] which message is sent when, and to the package `elastic_rs.elastic` what a
//! worker does then. A worker without this package does not connect, and is restarted as ever.
//!
//! | file | what |
//! |---|---|
//! | [`message`] | the messages ↔ frames of bytes |
//! | [`checks`] | the count of checks, and what a check finds: all workers learn of a change at the same check |
//! | [`worker`] | a worker's end: a thread reads, and frees blocked collectives (feature `io`) |
//! | `sockets` | which sockets those collectives wait for (feature `io`) |
//! | [`agent`], `address`, `peers` | the agent's end: its socket and its name, who may connect, and as which worker (feature `io`) |
//! | [`watch`] | what the agent asks a worker during a look, on a socket of its own |
//!
//! Frames and limits of texts are those of [`crate::rendezvous::messages`].

#[cfg(feature = "io")]
mod address;
#[cfg(feature = "io")]
pub mod agent;
pub mod checks;
pub mod message;
#[cfg(feature = "io")]
mod peers;
#[cfg(feature = "io")]
pub(crate) mod sockets;
pub mod watch;
#[cfg(feature = "io")]
pub mod worker;
