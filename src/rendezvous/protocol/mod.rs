//! What nodes and the coordinator say to each other.
//!
//! | file | what |
//! |---|---|
//! | [`settings`] | what a node asks for: min and max nodes, time limits |
//! | [`message`] | the messages |
//! | [`text`] | limits of every text and number that a peer sends |
//! | [`codec`] | messages ↔ frames of bytes |

pub mod codec;
pub mod message;
pub mod settings;
pub mod text;
