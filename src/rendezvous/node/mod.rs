//! A node's side of the rendezvous.
//!
//! | file | what |
//! |---|---|
//! | [`machine`], `replies` | the node's state machine; what it makes of the coordinator's messages (pure) |
//! | `pending` | a join that waits, and the state of the connection |
//! | [`view`] | what callers see: how things stand, and how a join ended |
//! | [`fence`] | when a node that is cut off stops its workers |
//! | [`report`] | what an operator is told of a node unasked |
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
