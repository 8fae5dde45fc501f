//! Which exception each error of the core becomes: one of `elastic_rs.errors`, or a builtin where torch may be missing.

use elastic_rs::etcd_client::EtcdError;
use elastic_rs::rendezvous::messages::message::Verdict;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::store::client::StoreError;
use pyo3::exceptions::{PyConnectionError, PyLookupError, PyOSError, PyPermissionError};
use pyo3::prelude::*;

/// Make the exception of `elastic_rs.errors` with this name and message.
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

/// The exception for a failed join.
pub fn from_join(py: Python<'_>, error: &JoinError) -> PyErr {
    raise(py, class_of_join(error), error.to_string())
}

/// The name of the exception's class for a failed join.
pub fn class_of_join(error: &JoinError) -> &'static str {
    match error {
        JoinError::Timeout { .. } => "RendezvousTimeoutError",
        JoinError::Closed { verdict: Verdict::Stopped { .. }, .. } => "RendezvousClosedError",
        JoinError::Closed { spare: true, .. } => "RendezvousGracefulExitError",
        JoinError::Closed { .. } | JoinError::Over { .. } => "RendezvousClosedError",
        JoinError::Connection(_) => "RendezvousConnectionError",
        JoinError::State(_) => "RendezvousStateError",
        _ => "RendezvousError",
    }
}

/// The exception for a failed store operation.
pub fn from_store(py: Python<'_>, error: &StoreError) -> PyErr {
    let class = match error {
        StoreError::WaitTimeout { .. } | StoreError::WorkersTimeout { .. } => "StoreTimeoutError",
        StoreError::ConnectTimeout { .. } | StoreError::ConnectionLost { .. } => "StoreNetworkError",
        StoreError::QueueEmpty { .. } => "StoreQueueEmptyError",
        _ => "StoreError",
    };
    raise(py, class, error.to_string())
}

/// The exception for a failed request to etcd: a builtin, since the doctor runs without torch.
pub fn from_etcd(error: &EtcdError) -> PyErr {
    let text = error.to_string();
    match error {
        EtcdError::Denied(_) | EtcdError::WrongPassword(_) => PyPermissionError::new_err(text),
        EtcdError::Unavailable(_) | EtcdError::Unknown(_) | EtcdError::WrongScheme(_) | EtcdError::Tls(_) => {
            PyConnectionError::new_err(text)
        }
        EtcdError::LeaseNotFound(_) => PyLookupError::new_err(text),
        _ => PyOSError::new_err(text),
    }
}
