//! One run: its nodes, its rounds and ranks, and every decision about them. Pure.
//!
//! [`Run::apply`](run::Run::apply) is the one decision function. A run is made of parts that keep their own state:
//!
//! | part | what it keeps |
//! |---|---|
//! | `roster`, `node` | the nodes, with counters that keep each event's cost constant |
//! | `round` | the current world, why it must re-form, the job's restarts, how the rendezvous was closed |
//! | `recovery` | worlds of other lives of the coordinator, and what a node's account of one counts for |
//! | `admission` | places, and hosts that come and go |
//! | `deadlines` | when to look again although nothing happens |
//!
//! The steps of a decision are methods of [`Run`](run::Run), by what they follow from:
//!
//! | file | step |
//! |---|---|
//! | [`event`] | what goes in, and what comes out |
//! | [`run`] | which step an event takes; lost nodes; what members are told |
//! | `hello` | a node introduces itself: refused, back, or new; whose settings the run has |
//! | `report` | a node asks for a place, or reports how its workers ended |
//! | `host` | the process that hosts the coordinator ends |
//! | `closing`, [`ranks`] | a round closes: when, with whom, with which ranks |
//! | `durable` | a run as a shared cell holds it, and back |
//! | [`standing`] | what is decided at the moment, and why, in words |

pub(in crate::rendezvous) mod admission;
mod closing;
mod deadlines;
pub(in crate::rendezvous) mod durable;
pub mod event;
mod hello;
mod host;
pub mod node;
pub mod ranks;
mod recovery;
mod report;
pub(in crate::rendezvous) mod roster;
pub(in crate::rendezvous) mod round;
pub mod run;
pub mod standing;
