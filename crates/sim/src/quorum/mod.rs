//! A quorum: a few processes of which one leads, in every order of messages, deaths, proofs and lapses of leases.
//!
//! The product's replicas, with a network that may deliver messages in any order and after any time. A message that is never delivered
//! was lost. [`explore`] goes through all histories within [`Bounds`], and finds the shortest that violates an invariant. [`walk`] takes
//! random ones of larger quorums. In [`take_over`] time passes, and somebody must lead. [`Mutation`]s are mistakes of a driver, or of the
//! machines as their neighbours see them: each must violate an invariant.

pub mod bootstrap;
mod explore;
mod model;
mod timed;

pub use explore::{explore, shortest, walk};
pub use model::{Bounds, Mutation, Quorum};
pub use timed::take_over;
