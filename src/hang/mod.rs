//! Hangs: which rank the others wait for, in which collective and at which line.
//!
//! Agents look at their workers from outside and make a view of each. What a view has is wrong at worst, never dangerous: every length
//! is bounded, and every text is safe to print.
//!
//! | file | what |
//! |---|---|
//! | [`view`] | what a look says of one rank: its process, its frames, its collectives; bounds on all of it |
//! | [`ranks`] | a set of ranks in a few numbers |
//! | [`finding`] | who holds the others up, and how that is known |

pub mod blame;
pub mod finding;
pub mod fr;
pub mod judge;
pub mod ranks;
pub mod view;
