//! The session protocol between nodes and the coordinator.
//!
//! | file | what |
//! |---|---|
//! | [`settings`] | a node's settings: min and max nodes, time limits, how workers are counted and hosts judged |
//! | [`ids`] | what identifies a node and a round |
//! | [`message`] | the messages |
//! | [`placement`], [`change`], [`ending`] | what messages hold: places in rounds; changes in place; how a worker failed, and how a job ended |
//! | [`look`], [`hang`] | looks at workers; a training that stands still |
//! | [`peer`] | how the processes at the endpoints of a list introduce themselves to each other |
//! | [`replay`] | what a member replays to a restarted coordinator |
//! | [`bounds`] | limits on every message that a peer sends |
//! | [`codec`], `frames` | messages ↔ frames of bytes; reading them from a connection (feature `io`) |

pub mod bounds;
pub mod change;
pub mod codec;
pub mod ending;
#[cfg(feature = "io")]
pub(crate) mod frames;
pub mod hang;
pub mod ids;
pub mod look;
pub mod message;
pub mod peer;
pub mod placement;
pub mod replay;
pub mod settings;
