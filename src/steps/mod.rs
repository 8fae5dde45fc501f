//! Steps of training: what a worker writes at each optimizer step, and what its agent reads of it.
//!
//! Owns 128 bytes of memory for each worker of a node, which the worker shares with its agent, and a pipe by which the first step of a
//! round wakes the agent. Leaves to [`crate::agent`] what is reported of it.
//!
//! | file | what |
//! |---|---|
//! | [`slot`] | the words of a worker's memory, and what they may mean |
//! | [`board`] | the agent's end: the memory of all workers of a node, and the pipe (feature `io`) |
//! | [`worker`] | a worker's end (feature `io`) |
//! | [`deaths`] | the mutex in that memory by which a worker's death is known early, both ends (feature `io`) |
//!
//! Nobody sends anything for a step, and no thread waits for one. The agent reads the memory when a round's first step wakes it, when
//! somebody asks how far the training is, and when the round is over.
//!
//! In the same memory a worker says that it is restarted when the world changes, because its process group uses NCCL.

#[cfg(feature = "io")]
pub mod board;
#[cfg(feature = "io")]
pub mod deaths;
pub mod slot;
#[cfg(feature = "io")]
pub mod worker;

/// The variable by which a worker gets what [`worker`] reads.
pub const STEPS: &str = "ELASTIC_RS_STEPS";
