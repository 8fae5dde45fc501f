//! One node of a job: its agent event by event and at work, and worker processes with real ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod alone;
mod first;
mod front_end;
mod hangs;
mod machine;
mod node;
mod process;
mod runner;
