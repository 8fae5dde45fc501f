//! Worker processes through the public API, with real ones: what they end as, what they leave behind, what they print.

mod ends;
mod leftovers;
mod logs;
mod starts;
pub mod support;
