//! Which exception of `elastic_rs.errors` each error of the core becomes. Those of etcd and of options need no torch.

use std::time::Duration;

use elastic_rs::etcd_client::EtcdError;
use elastic_rs::rendezvous::messages::message::Verdict;
use elastic_rs::rendezvous::node::JoinError;
use elastic_rs::store::client::StoreError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The attributes that an exception has beside its text.
#[derive(Default)]
pub struct Attributes {
    /// The store or coordinator, as `host:port`.
    pub endpoint: Option<String>,
    /// How long the operation took.
    pub elapsed: Option<Duration>,
    /// The round in which it happened.
    pub round: Option<u64>,
    /// The global rank of the worker that is the cause.
    pub rank: Option<u32>,
}

impl Attributes {
    /// Those that are known, by name.
    fn known<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let known = PyDict::new(py);
        if let Some(endpoint) = &self.endpoint {
            known.set_item("endpoint", endpoint)?;
        }
        if let Some(elapsed) = self.elapsed {
            known.set_item("elapsed", elapsed.as_secs_f64())?;
        }
        if let Some(round) = self.round {
            known.set_item("round", round)?;
        }
        if let Some(rank) = self.rank {
            known.set_item("rank", rank)?;
        }
        Ok(known)
    }
}

/// Make the exception of `elastic_rs.errors` with this name, message and attributes.
pub fn raise(py: Python<'_>, class: &str, message: String, attributes: &Attributes) -> PyErr {
    let make = || {
        let class = py.import("elastic_rs.errors")?.getattr(class)?;
        class.call((message,), Some(&attributes.known(py)?))
    };
    match make() {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// The exception for a failed join.
pub fn from_join(py: Python<'_>, error: &JoinError) -> PyErr {
    let attributes = Attributes {
        endpoint: error.endpoint().map(str::to_owned),
        elapsed: error.elapsed(),
        round: error.round().map(|round| round.0),
        rank: error.rank(),
    };
    raise(py, class_of_join(error), error.to_string(), &attributes)
}

/// The name of the exception's class for a failed join.
pub fn class_of_join(error: &JoinError) -> &'static str {
    match error {
        JoinError::Timeout { .. } => "RendezvousTimeoutError",
        JoinError::Closed { verdict: Verdict::Stopped { .. }, .. } => "RendezvousClosedError",
        JoinError::Closed { spare: true, .. } => "RendezvousGracefulExitError",
        JoinError::Closed { .. } | JoinError::Over { .. } => "RendezvousClosedError",
        JoinError::Connection { .. } => "RendezvousConnectionError",
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
    let attributes = Attributes { endpoint: error.endpoint(), elapsed: error.elapsed(), ..Attributes::default() };
    raise(py, class, error.to_string(), &attributes)
}

/// The exception for a request to etcd that failed after this time.
pub fn from_etcd(py: Python<'_>, error: &EtcdError, elapsed: Duration) -> PyErr {
    let class = match error {
        EtcdError::Denied(_) | EtcdError::WrongPassword(_) => "EtcdPermissionError",
        EtcdError::Unavailable(_) | EtcdError::Unknown(_) | EtcdError::WrongScheme(_) | EtcdError::Tls(_) => {
            "EtcdConnectionError"
        }
        EtcdError::LeaseNotFound(_) => "EtcdLeaseError",
        _ => "EtcdError",
    };
    let attributes = Attributes { elapsed: Some(elapsed), ..Attributes::default() };
    raise(py, class, error.to_string(), &attributes)
}
