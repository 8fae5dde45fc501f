//! What every room that speaks to a peer stands on: the bounds of texts.

pub mod text;
