//! Hangs: which rank the others wait for, in which collective and at which line, and when that is a hang.
//!
//! Agents look at their workers from outside and make a view of each. Two pure parts decide: [`blame`] says who holds the others up,
//! [`judge`] when that is a hang. What a view has is wrong at worst, never dangerous: every length is bounded, and every text is safe to
//! print. `docs/decisions/0129-who-hangs-is-a-pure-function-of-views.md` has the reasons.
//!
//! | file | what |
//! |---|---|
//! | [`frames`] | the Python frames of another process, read from its memory |
//! | [`look`] | what the kernel knows of a process: its state, the call in which it stands, what it used between two looks |
//! | [`fr`] | torch's flight recorder: its JSON becomes groups of a view |
//! | [`view`] | what a look says of one rank: its process, its frames, its collectives; bounds on all of it |
//! | [`ranks`] | a set of ranks in a few numbers |
//! | [`grouping`] | many ranks' views as a few lines |
//! | [`blame`], [`finding`] | who holds the others up, and how that is known |
//! | [`judge`] | when to look at all ranks, and when a standstill is a hang |
//! | [`text`] | a finding in words |

pub mod blame;
pub mod finding;
pub mod fr;
pub mod frames;
pub mod grouping;
pub mod judge;
pub mod look;
pub mod ranks;
pub mod text;
pub mod view;
