//! The state that a session shares with its transport.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::machine::NodeMachine;

/// A node's machine with its transport.
pub trait Seat: Debug + Send {
    /// The node's state machine.
    fn machine(&mut self) -> &mut NodeMachine;

    /// Called after each call into the machine.
    fn asked(&mut self, _now: Instant) {}
}

impl Seat for NodeMachine {
    fn machine(&mut self) -> &mut NodeMachine {
        self
    }
}

/// The state that a session's callers and its driver share.
#[derive(Debug)]
pub(in crate::rendezvous) struct Shared {
    pub seat: Arc<Mutex<dyn Seat>>,
    /// Wakes the driver after a call into the machine.
    pub asked: Notify,
    /// Number of the driver's steps. A caller that waits for an outcome looks again after each.
    pub steps: watch::Sender<u64>,
    /// Whether the `Leave` was sent.
    pub gone: watch::Sender<bool>,
}
