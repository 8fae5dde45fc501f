//! Tests of one node of a job: the agent's machine event by event, the runner with real workers, worker processes, and the channel
//! to them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod ahead;
mod alone;
#[path = "../store/alone.rs"]
mod alone_process;
mod channel;
mod commands;
mod first;
mod front_end;
mod hangs;
mod health;
mod in_place;
mod machine;
mod node;
mod notice;
mod replace;
mod runner;
mod standby;
mod steps;
mod workers;
