//! Errors of the core → exceptions of `elastic_rs.errors`. The one place where this is decided.

use elastic_rs::rendezvous::node::machine::JoinError;
use elastic_rs::rendezvous::protocol::message::Verdict;
use elastic_rs::store::client::StoreError;
use pyo3::prelude::*;

/// An exception of `elastic_rs.errors` by name, with a message.
pub fn raise(py: Python<'_>, class: &str, message: String) -> PyErr {
    let made = py
        .import("elastic_rs.errors")
        .and_then(|errors| errors.getattr(class))
        .and_then(|class| class.call1((message,)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// Why a join did not end with a place.
pub fn from_join(py: Python<'_>, error: &JoinError) -> PyErr {
    raise(py, class_of_join(error), error.to_string())
}

/// The exception's class by name.
pub fn class_of_join(error: &JoinError) -> &'static str {
    match error {
        JoinError::Timeout { .. } => "RendezvousTimeoutError",
        JoinError::Closed { verdict: Verdict::Stopped { .. }, .. } => "RendezvousClosedError",
        JoinError::Closed { spare: true, .. } => "RendezvousGracefulExitError",
        JoinError::Closed { .. } => "RendezvousClosedError",
        JoinError::Connection(_) => "RendezvousConnectionError",
        JoinError::State(_) => "RendezvousStateError",
        _ => "RendezvousError",
    }
}

/// Why a store operation did not succeed.
pub fn from_store(py: Python<'_>, error: &StoreError) -> PyErr {
    let class = match error {
        StoreError::WaitTimeout { .. } | StoreError::WorkersTimeout { .. } => "StoreTimeoutError",
        StoreError::ConnectTimeout { .. } | StoreError::ConnectionLost { .. } => "StoreNetworkError",
        StoreError::QueueEmpty { .. } => "StoreQueueEmptyError",
        _ => "StoreError",
    };
    raise(py, class, error.to_string())
}
