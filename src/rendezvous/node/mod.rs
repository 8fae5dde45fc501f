//! A node's side of the rendezvous.
//!
//! | file | what |
//! |---|---|
//! | [`machine`] (`joins`, `reports`, `in_place`) | the node's state machine, its joins and reports, its part in changes in place (pure) |
//! | `replies` | its handling of the coordinator's messages (pure) |
//! | `counterpart`, `reasons` | the node's peer, a coordinator or a shared cell; why it is out of reach, in words |
//! | `pending` | a pending join, an unanswered report, and the state of the connection |
//! | [`view`] | the output for callers: the view, and the outcome of a join |
//! | [`fence`] | when a node that is cut off stops its workers |
//! | [`report`] | log lines about a node for its operator |
//! | `session`, `seat` | a session's interface for callers that wait; what it shares with its driver (feature `io`) |
//! | `line`, `dial` | the driver of one connection and its timers, and how a connection is opened (feature `io`) |

mod counterpart;
#[cfg(feature = "io")]
mod dial;
pub mod fence;
#[cfg(feature = "io")]
mod line;
pub mod machine;
pub(in crate::rendezvous) mod pending;
mod reasons;
mod replies;
pub mod report;
#[cfg(feature = "io")]
pub(in crate::rendezvous) mod seat;
#[cfg(feature = "io")]
pub mod session;
pub mod view;
