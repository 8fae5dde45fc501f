//! What every room that speaks to a peer stands on: the bounds of texts, and times as numbers.

pub mod text;
pub(crate) mod time;
