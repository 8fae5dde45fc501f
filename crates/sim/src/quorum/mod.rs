//! A quorum: a few processes of which one leads, in every order of messages, deaths, proofs and lapses of leases.
//!
//! The product's voters, candidates and leaders, with a network that may deliver messages in any order and after any time. A message that
//! is never delivered was lost. [`explore`] goes through all histories within [`Bounds`], and finds the shortest that violates an
//! invariant. [`walk`] takes random ones of larger quorums. [`Mutation`]s are mistakes of a driver, or of the machines as their
//! neighbours see them: each must violate an invariant.

pub mod bootstrap;
mod explore;
mod model;

pub use explore::{explore, shortest, walk};
pub use model::{Bounds, Mutation, Quorum};
