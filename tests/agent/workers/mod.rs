//! Tests of worker processes through the public API: their starts, their ends, what they leave behind, and their output.

mod ends;
mod first_signal;
mod leftovers;
mod logs;
mod starts;
pub mod support;
