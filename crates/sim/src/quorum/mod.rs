//! A quorum: a few processes of which one leads, in every order of messages, deaths, proofs and lapses of leases.
//!
//! The product's voters, candidates and leaders, with a network that delays and overtakes without bound. What is not delivered at the
//! end of a history was lost. [`explore`] goes through all histories within [`Bounds`], and finds the shortest that violates an
//! invariant. [`walk`] takes random ones of larger quorums. [`Mutation`]s are mistakes of a driver, or of the machines as their
//! neighbours see them: each must violate an invariant.

pub mod bootstrap;
mod explore;
mod model;

pub use explore::{explore, shortest, walk};
pub use model::{Bounds, Mutation, Quorum};

/// Room for a history's steps. What is not used takes no memory.
const STACK_BYTES: usize = 1 << 30;

/// Call this where a history has room for all its steps.
fn deep<T: Send>(search: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, search);
        thread.expect("a thread starts").join().expect("the search ends")
    })
}
