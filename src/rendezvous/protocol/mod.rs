//! The session protocol between nodes and the coordinator.
//!
//! | file | what |
//! |---|---|
//! | [`settings`] | a node's settings: min and max nodes, time limits |
//! | [`message`] | the messages |
//! | [`capability`] | what a peer of another release understands |
//! | [`text`] | limits on every text and number that a peer sends |
//! | [`codec`] | messages ↔ frames of bytes |

pub mod capability;
pub mod codec;
pub mod message;
pub mod settings;
pub mod text;
