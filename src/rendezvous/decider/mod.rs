//! One run: its nodes, its rounds and ranks, and every decision about them. Pure.
//!
//! [`Run::apply`](run::Run::apply) is the one decision function. A run is made of parts that keep their own state:
//!
//! | part | what it keeps |
//! |---|---|
//! | `roster`, `node` | the nodes, with counters that keep each event's cost constant |
//! | `round` | the current world, why it must re-form, the job's restarts, how the rendezvous was closed |
//! | `recovery` | worlds formed before this coordinator restarted, and how far a node's claim to a place in one is believed |
//! | `in_place` | a change of the world that its workers live through |
//! | `admission` | which agent holds which place |
//! | [`hosts`] | how often each host's nodes have left or failed first, and which hosts are kept out |
//! | `watched` | how far the training is, while somebody watches |
//! | `trace` | the events that were recorded, as far as later ones name them as causes |
//! | `deadlines` | when to decide again if no event comes |
//!
//! The steps of a decision are methods of [`Run`](run::Run), grouped by what triggers them:
//!
//! | file | step |
//! |---|---|
//! | [`event`] | events, the input; effects, the output |
//! | [`run`] | dispatch of an event to its step; lost nodes; what members are told |
//! | `hello` | a node introduces itself: rejected, back, or new; which node's settings the run uses |
//! | `report`, `other_job` | a node asks for a place, or reports how its workers ended; a node of another job is refused |
//! | `host` | the process that hosts the coordinator ends |
//! | `exclusion` | hosts are put out of the job for their failures, and let in again |
//! | `changing` | members that can change in place stop their workers at one check |
//! | `closing`, `size`, [`ranks`], `resume` | a round closes: when, with which nodes and how many workers, with which ranks, and whose workers live on |
//! | `members` | a member is told its place, and the one that serves the workers' store also from where the others connect |
//! | `durable` | conversion between a run and its state in a shared cell |
//! | `facts`, `snapshot` | what others ask about a run; its state for observers |
//! | [`standing`], `progress` | the current decision, and its reason in words |

pub(in crate::rendezvous) mod admission;
mod changing;
mod closing;
mod deadlines;
pub(in crate::rendezvous) mod durable;
pub mod event;
mod exclusion;
mod facts;
mod hello;
mod host;
pub mod hosts;
mod in_place;
mod members;
pub mod node;
pub(in crate::rendezvous) mod other_job;
mod progress;
pub mod ranks;
mod recovery;
mod report;
mod resume;
pub(in crate::rendezvous) mod roster;
pub(in crate::rendezvous) mod round;
pub mod run;
mod size;
pub mod snapshot;
pub mod standing;
mod trace;
mod watched;
