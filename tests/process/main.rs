//! Worker processes through the public API, with real ones: what they end as, what they leave behind, what they print.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod ends;
mod leftovers;
mod logs;
mod starts;
mod support;
