//! Bugs that other systems had, as named scenarios: the name is what must hold, the comment says who had it (`#n` is
//! pytorch/pytorch). Times are virtual and exact: no delays, no randomness.
//!
//! That clocks of hosts do not matter (`dynamic_rendezvous.py` compares them) is a fact of compilation: no function of the rendezvous
//! takes a wall clock's time, and no message carries one. `simulation/pytorch` shows what they do to PyTorch's.

mod claims;
mod coordinator;
mod failures;
mod growing;
mod host;
mod job;
mod losses;
mod raw;
mod starting;
