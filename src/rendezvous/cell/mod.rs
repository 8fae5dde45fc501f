//! The rendezvous over one shared cell with compare-and-set: any backend with `get_state` and `set_state`, or [etcd](super::etcd).
//!
//! There is no coordinator. Each node reads the state, applies its own messages with the coordinator's decision function
//! ([`Run::apply`](crate::rendezvous::run::Run::apply)), and writes the result on condition that the state is still the one
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
//! | `node/received` | a node's messages from a state that another node wrote |
//! | `node/propose` | a node's decision on the cell's state, and the state that it would write |
//! | `node/farewell` | a node's goodbye. The node whose process may hold the cell stays until the others have read that the job is over |
//! | `node/by_wishes` | with etcd: the messages that one node applies for all |
//! | `pace` | the delays between reads |
//! | [`wish`] | a node's messages until a state contains them; with etcd, the value of its key |
//! | [`peers`] | with etcd: the nodes with a key, and the order in which they propose |
//! | `driver` | a session over a cell, for the binding (feature `io`). The caller makes the backend calls |

pub mod blob;
#[cfg(feature = "io")]
pub mod driver;
pub mod node;
mod pace;
pub mod peers;
mod seen;
pub mod wish;
