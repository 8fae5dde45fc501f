//! A node's side of the rendezvous.
//!
//! | file | what |
//! |---|---|
//! | [`machine`] (`joins`), `replies` | the node's state machine, its joins, and its handling of the coordinator's messages (pure) |
//! | `counterpart` | the node's peer, a coordinator or a shared cell, and its name in messages |
//! | `pending` | a pending join, an unanswered report, and the state of the connection |
//! | [`view`] | the output for callers: the view, and the outcome of a join |
//! | [`fence`] | when a node that is cut off stops its workers |
//! | [`report`] | log lines about a node for its operator |
//! | `session` | a session's interface for callers that wait (feature `io`) |
//! | `line`, `dial` | the driver of one connection and its timers, and how a connection is opened (feature `io`) |

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
