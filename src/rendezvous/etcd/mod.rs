//! The rendezvous over etcd v3, where no process and no machine matters.
//!
//! The nodes decide over one key, the run's *state*, as over any [cell](super::cell). etcd adds three things. Leases tell who is alive, a
//! watch pushes every change, and each node's own key holds its *wish*: its messages, which one of the nodes applies for all
//! ([`super::cell::peers`]).
//!
//! | file | what |
//! |---|---|
//! | [`interface`] | what the machine asks of etcd's driver, and what the driver reports |
//! | [`machine`] | a node: its requests and events, in the order that keeps two worlds from forming |
//! | `leases` | when the node's lease and the run's are granted and renewed |

pub mod interface;
mod leases;
pub mod machine;
