//! `StoreClient`: the core's client of a store.

use std::time::Duration;

use elastic_rs::store::client::{self, ClientOptions, StoreError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::PyBytes;

use crate::conf::seconds;
use crate::errors;
use crate::runtime::block_on;

/// The core's client of a TCP store, without torch. Keys are ``str`` (sent as UTF-8) or ``bytes``. Times are in seconds.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct StoreClient(client::StoreClient);

/// A key or a value.
#[derive(FromPyObject)]
pub enum Text {
    /// Sent as it is.
    Bytes(PyBackedBytes),
    /// Sent as UTF-8.
    Str(PyBackedStr),
}

impl AsRef<[u8]> for Text {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Str(text) => text.as_bytes(),
        }
    }
}

#[pymethods]
impl StoreClient {
    /// Connect to the store at ``host:port``, which need not listen yet.
    ///
    /// ``timeout_s`` limits connecting, and each operation that waits for keys.
    #[new]
    #[pyo3(signature = (host, port, *, timeout_s = 300.0))]
    fn new(py: Python<'_>, host: &str, port: u16, timeout_s: f64) -> PyResult<Self> {
        let timeout = seconds("timeout_s", timeout_s)?;
        let options = ClientOptions { connect_timeout: timeout, timeout: Some(timeout) };
        run(py, client::StoreClient::connect(host, port, options)).map(Self)
    }

    /// Store a value.
    fn set(&self, py: Python<'_>, key: Text, value: Text) -> PyResult<()> {
        run(py, self.0.set(key.as_ref(), value.as_ref()))
    }

    /// Return a key's value, waiting for it to appear.
    fn get<'py>(&self, py: Python<'py>, key: Text) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &run(py, self.0.get(key.as_ref()))?))
    }

    /// Add to the number stored under a key, and return the sum.
    fn add(&self, py: Python<'_>, key: Text, amount: i64) -> PyResult<i64> {
        run(py, self.0.add(key.as_ref(), amount))
    }

    /// Replace the value if it is the expected one. Return the store's answer.
    fn compare_set<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        expected: Text,
        desired: Text,
    ) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &run(py, self.0.compare_set(key.as_ref(), expected.as_ref(), desired.as_ref()))?))
    }

    /// Whether all keys exist.
    fn check(&self, py: Python<'_>, keys: Vec<Text>) -> PyResult<bool> {
        run(py, self.0.check(&keys))
    }

    /// Wait until all keys exist, at most ``timeout_s`` or the client's default.
    #[pyo3(signature = (keys, timeout_s = None))]
    fn wait(&self, py: Python<'_>, keys: Vec<Text>, timeout_s: Option<f64>) -> PyResult<()> {
        run(py, self.0.wait_within(&keys, self.limit(timeout_s)?))
    }

    /// Remove a key. Return whether it existed.
    fn delete_key(&self, py: Python<'_>, key: Text) -> PyResult<bool> {
        run(py, self.0.delete_key(key.as_ref()))
    }

    /// Number of keys in the store.
    fn num_keys(&self, py: Python<'_>) -> PyResult<i64> {
        run(py, self.0.num_keys())
    }

    /// Append to a key's value.
    fn append(&self, py: Python<'_>, key: Text, value: Text) -> PyResult<()> {
        run(py, self.0.append(key.as_ref(), value.as_ref()))
    }

    /// Return several values, waiting for all keys to appear.
    fn multi_get<'py>(&self, py: Python<'py>, keys: Vec<Text>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        Ok(run(py, self.0.multi_get(&keys))?.iter().map(|value| PyBytes::new(py, value)).collect())
    }

    /// Store several values.
    fn multi_set(&self, py: Python<'_>, keys: Vec<Text>, values: Vec<Text>) -> PyResult<()> {
        run(py, self.0.multi_set(&keys, &values))
    }

    /// Add an item to the end of a queue.
    fn queue_push(&self, py: Python<'_>, key: Text, value: Text) -> PyResult<()> {
        run(py, self.0.queue_push(key.as_ref(), value.as_ref()))
    }

    /// Take the first item of a queue. With ``block``, wait for one.
    ///
    /// Raises ``StoreQueueEmptyError`` if there is none, also after blocking if another client took it first.
    #[pyo3(signature = (key, block = true))]
    fn queue_pop<'py>(&self, py: Python<'py>, key: Text, block: bool) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &run(py, self.0.queue_pop(key.as_ref(), block))?))
    }

    /// Length of a queue.
    fn queue_len(&self, py: Python<'_>, key: Text) -> PyResult<i64> {
        run(py, self.0.queue_len(key.as_ref()))
    }

    /// All keys, in no particular order, as ``bytes``, because a key need not be UTF-8.
    fn list_keys<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        Ok(run(py, self.0.list_keys())?.iter().map(|key| PyBytes::new(py, key)).collect())
    }

    /// Wait until ``world_size`` callers have reached this barrier, at most ``timeout_s`` or the client's default.
    #[pyo3(signature = (key, world_size, timeout_s = None))]
    fn barrier(&self, py: Python<'_>, key: Text, world_size: i64, timeout_s: Option<f64>) -> PyResult<()> {
        run(py, self.0.barrier_within(key.as_ref(), world_size, self.limit(timeout_s)?))
    }

    /// Open another connection to the same store.
    fn clone(&self, py: Python<'_>) -> PyResult<Self> {
        run(py, self.0.connect_again()).map(Self)
    }
}

impl StoreClient {
    fn limit(&self, timeout_s: Option<f64>) -> PyResult<Option<Duration>> {
        timeout_s.map_or_else(|| Ok(self.0.timeout()), |timeout| seconds("timeout_s", timeout).map(Some))
    }
}

fn run<F, T>(py: Python<'_>, operation: F) -> PyResult<T>
where
    F: Future<Output = Result<T, StoreError>> + Send,
    T: Send,
{
    block_on(py, operation)?.map_err(|error| errors::from_store(py, &error))
}
