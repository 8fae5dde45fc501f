//! The simulator: a whole job in one thread under virtual time.
//!
//! Owns no decision of the product. One engine passes virtual time and makes faults. Models of jobs beside it drive the product's
//! state machines as the real drivers do, and check the invariants after every event.
//!
//! | part | what |
//! |---|---|
//! | [`engine`] | virtual time, events, randomness, processes that stand still, paths that are cut, histories |
//! | [`worlds`] | the invariants of any rendezvous |
//! | [`coordinator`] | jobs with a coordinator: sessions, our agents and PyTorch's, odd hosts, and the exhaustive explorer |
//! | [`cell`], [`etcd`] | jobs without a coordinator: over one shared cell, and over a model of etcd |
//! | [`discovery`] | a driver whose hosts come and go: scripts that flap, fail and hang, agents that are lost |
//! | `records` | what nodes without a coordinator have recorded |
//! | [`quorum`] | voters of a run's record, and who leads: all histories of small quorums |
//! | [`takeover`] | jobs with a list of endpoints: whoever leads dies, and another one leads |
//! | [`pytorch`] | PyTorch's own algorithm under the same faults and invariants: a test of the simulator |

pub mod cell;
pub mod coordinator;
pub mod discovery;
pub mod engine;
pub mod etcd;
pub mod hangs;
pub mod pytorch;
pub mod quorum;
mod records;
mod shared;
pub mod takeover;
pub mod worlds;
