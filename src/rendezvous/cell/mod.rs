//! The rendezvous over one shared cell that knows compare-and-set: any backend with `get_state` and `set_state`, or etcd.
//!
//! There is no coordinator: each node takes in what the cell holds, applies its own wish (join, withdraw, leave, close), and
//! lets the same functions decide that run in the coordinator ([`crate::rendezvous::coordinator::machine`]). What changed is written on condition
//! that the cell still holds what was read. Whoever is first has decided; the others take that in and decide anew.
//!
//! The cell holds no times. Each node judges the others by counters that it *sees change* on its own monotonic clock (or, with
//! etcd, by leases), so wall clocks do not matter. A cell cannot push: nodes look every 0.1 to 1 s, and each beat of a node
//! writes the whole state, as with PyTorch's backends. `rust-c10d` has neither cost.
//!
//! | file | what |
//! |---|---|
//! | [`blob`] | the state ↔ bytes; what a foreign blob is |
//! | `seen` | what this node has seen of the others, and when |
//! | [`node`], `told` | a node: when to read and write; what it is told of what others have written |
//! | `propose` | what a node would write |
//! | [`etcd`] | the same node over etcd's interface: transactions, leases, watch |
//! | `driver` | waits and wakes for the binding (feature `io`); backend calls are the caller's |

pub mod blob;
#[cfg(feature = "io")]
pub mod driver;
pub mod etcd;
pub mod node;
mod propose;
mod seen;
mod told;
