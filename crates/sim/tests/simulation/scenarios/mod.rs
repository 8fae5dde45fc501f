//! Bugs of other systems, as named scenarios. The name says what must hold, the comment names the bug (`#n` is pytorch/pytorch). Times
//! are virtual and exact, without delays and randomness.
//!
//! There is no scenario for clocks that differ, which `dynamic_rendezvous.py` compares. No function of our rendezvous takes a wall
//! clock's time, and no message carries one. `simulation/pytorch` shows the effect on PyTorch's.

mod claims;
mod coordinator;
mod failures;
mod growing;
mod host;
mod job;
mod losses;
mod raw;
mod starting;
