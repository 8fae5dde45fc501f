//! Steps of training: what a worker writes at each optimizer step, and what its agent reads of it.
//!
//! Owns 64 bytes of memory for each worker of a node, which the worker shares with its agent, and a pipe by which the first step of a
//! round wakes the agent. Leaves to [`crate::agent`] what is told of it.
//!
//! | file | what |
//! |---|---|
//! | [`slot`] | the words of a worker's memory, and what they may mean |
//! | [`board`] | the agent's end: the memory of all workers of a node, and the pipe (feature `io`) |
//! | [`worker`] | a worker's end (feature `io`) |
//!
//! Nobody sends anything for a step, and no thread waits for one. The agent reads the memory when a round's first step wakes it, and
//! when the round is over.

#[cfg(feature = "io")]
pub mod board;
pub mod slot;
#[cfg(feature = "io")]
pub mod worker;

/// The clock of both ends: nanoseconds of the system's monotonic clock, which all processes of a machine share.
#[cfg(feature = "io")]
pub fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(time.tv_sec).unwrap_or(0), u64::try_from(time.tv_nsec).unwrap_or(0));
    seconds.wrapping_mul(1_000_000_000).wrapping_add(nanos)
}
