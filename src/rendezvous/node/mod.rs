//! A node's side of the rendezvous.
//!
//! | file | what |
//! |---|---|
//! | [`machine`], `replies` | the node's state machine; what it makes of the coordinator's messages (pure) |
//! | `counterpart` | what decides for the node, and the words for it |
//! | `pending` | a join that waits, and the state of the connection |
//! | [`view`] | what callers see: how things stand, and how a join ended |
//! | [`fence`] | when a node that is cut off stops its workers |
//! | [`report`] | log lines about a node for its operator |
//! | `session`, `dial` | the driver: one connection and its timers; how it is opened (feature `io`) |

mod counterpart;
#[cfg(feature = "io")]
mod dial;
pub mod fence;
#[cfg(feature = "io")]
mod line;
pub mod machine;
pub(in crate::rendezvous) mod pending;
mod replies;
pub mod report;
#[cfg(feature = "io")]
pub mod session;
pub mod view;
