//! The rendezvous over one shared cell with compare-and-set: any backend with `get_state` and `set_state`, or [etcd](super::etcd).
//!
//! There is no coordinator. Each node reads the state, applies its own messages with the coordinator's decision function
//! ([`Run::apply`](crate::rendezvous::decider::run::Run::apply)), and writes the result on condition that the state is still the one
//! it read. The first writer has decided. The other nodes read its state and decide again.
//!
//! The state holds no instants. Each node judges the others by counters that it *sees change*, on its own monotonic clock, or by
//! leases with etcd. Wall clocks do not matter. Without etcd, nodes poll every 0.1 to 1 s, and each heartbeat rewrites the whole state, as
//! with PyTorch's backends. `rust-c10d` has neither cost.
//!
//! | file | what |
//! |---|---|
//! | [`blob`] | the state ↔ bytes; errors for foreign bytes |
//! | `seen` | when this node saw counters and revisions change |
//! | [`node`] | a node: its reads and writes, and the messages to its machine |
//! | `pace` | the delays between reads |
//! | `received` | a node's messages from a state that another node wrote |
//! | `propose` | a node's decision on the cell's state, and the state that it would write |
//! | `farewell` | a node's goodbye. The node whose process may hold the cell stays until the others have read that the job is over |
//! | [`wish`] | a node's messages until a state contains them; with etcd, the value of its key |
//! | `by_wishes`, [`peers`] | with etcd: the messages that one node applies for all, and whose turn that is |
//! | `driver` | a session over a cell, for the binding (feature `io`). The caller makes the backend calls |

pub mod blob;
mod by_wishes;
#[cfg(feature = "io")]
pub mod driver;
mod farewell;
pub mod node;
mod pace;
pub mod peers;
mod propose;
mod received;
mod seen;
pub mod wish;
