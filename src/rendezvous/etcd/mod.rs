//! The rendezvous over etcd v3, where no process and no machine matters.
//!
//! The nodes decide over one key, the run's *state*, as over any [cell](super::cell). etcd adds three things. Leases show which nodes are alive, a
//! watch pushes every change, and each node's own key holds its *wish*: its messages, which one of the nodes applies for all
//! ([`super::cell::peers`]).
//!
//! | file | what |
//! |---|---|
//! | [`interface`] | what the machine asks of etcd's driver, and what the driver reports |
//! | [`machine`] | a node: its requests and events, in the order that keeps two worlds from forming |
//! | `leases` | when the node's lease and the run's are granted and renewed |
//! | [`keys`] | the names of a run's keys |
//! | `driver`, `content` | a session over etcd, by the client in [`crate::etcd_client`] (feature `io`); keys and changes as the machine knows them |

#[cfg(feature = "io")]
mod content;
#[cfg(feature = "io")]
pub mod driver;
pub mod interface;
pub mod keys;
mod leases;
pub mod machine;
