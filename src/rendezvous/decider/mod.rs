//! One run: its nodes, its rounds and ranks, and every decision about them. Pure.
//!
//! | file | what |
//! |---|---|
//! | [`state`], `tally` | what is known of a run; counters that keep each event's cost constant |
//! | `admission` | which nodes may come in |
//! | `claims` | what a node's account of its place counts for, after the coordinator was restarted |
//! | `members` | what becomes of a node when it says something, or is silent |
//! | `decide`, [`ranks`] | when a round closes, and with which ranks |
//! | [`home`] | the process that hosts the coordinator: which node is in it, and what follows when that process ends |
//! | [`standing`] | what is decided at the moment, and why, in words |

pub(in crate::rendezvous) mod admission;
pub(in crate::rendezvous) mod claims;
pub(in crate::rendezvous) mod decide;
pub mod home;
pub(in crate::rendezvous) mod members;
pub mod ranks;
pub mod standing;
pub mod state;
mod tally;
