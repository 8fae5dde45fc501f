//! Tests of the rendezvous through its public API: the machines event by event, and their drivers over real sockets.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bench;
mod budget;
mod cell_node;
mod certificates;
mod claims;
mod decisions;
mod etcd_node;
mod events;
mod flood;
mod health;
mod hostile;
mod hosts;
mod http;
mod in_place;
mod machine;
mod members;
mod names;
mod node;
mod node_in_place;
mod observers;
mod protected;
mod replays;
mod resets;
mod restarted;
mod same_decisions;
mod session;
mod slots;
mod takeover;
mod tallies;
mod texts;
mod unread;
