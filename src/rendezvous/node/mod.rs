//! A node's side of the rendezvous.
//!
//! | file | what |
//! |---|---|
//! | [`machine`], `replies` | the node's state machine; its handling of the coordinator's messages (pure) |
//! | `pending` | a pending join, and the state of the connection |
//! | [`view`] | what callers see: the state of the rendezvous, and how a join ended |
//! | [`fence`] | when a node that is cut off stops its workers |
//! | [`report`] | log lines about a node for its operator |
//! | `session`, `dial` | the driver: one connection and its timers; how it is opened (feature `io`) |

#[cfg(feature = "io")]
mod dial;
pub mod fence;
pub mod machine;
pub(in crate::rendezvous) mod pending;
mod replies;
pub mod report;
#[cfg(feature = "io")]
pub mod session;
pub mod view;
