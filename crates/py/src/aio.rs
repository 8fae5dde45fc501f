//! `AsyncStoreClient`: the core's client of a TCP store, for asyncio.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use elastic_rs::store::client::{self, ClientOptions, StoreError};
use parking_lot::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::awaitable::awaitable;
use crate::conf::seconds;
use crate::errors::{self, Attributes};
use crate::store_client::Text;

/// The core's client of a TCP store, for asyncio. Every operation returns an awaitable of the running event loop.
///
/// Operations of one client run one after the other, in the order of the calls. Cancelling a waiting operation ends its wait, and
/// the client stays usable. Times are in seconds. A negative time limit means no limit.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct AsyncStoreClient {
    client: Mutex<Option<Arc<client::StoreClient>>>,
}

#[pymethods]
impl AsyncStoreClient {
    /// Connect to the store at ``host:port``, which need not listen yet.
    #[staticmethod]
    #[pyo3(signature = (host, port, *, timeout_s))]
    fn connect<'py>(py: Python<'py>, host: String, port: u16, timeout_s: f64) -> PyResult<Bound<'py, PyAny>> {
        let timeout = limit(timeout_s)?;
        let options = ClientOptions { connect_timeout: timeout.unwrap_or(Duration::MAX), timeout };
        awaitable(py, async move {
            Outcome(client::StoreClient::connect(&host, port, options).await.map(|client| Done::Client(client.into())))
        })
    }

    /// Close the connection after pending operations. Later ones raise ``StoreNetworkError``.
    fn close(&self) {
        self.client.lock().take();
    }

    /// Whether :meth:`close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.client.lock().is_none()
    }

    /// Change the time limit of operations that begin later.
    fn set_timeout(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        self.client(py)?.set_timeout(limit(timeout_s)?);
        Ok(())
    }

    /// Store a value.
    fn set<'py>(&self, py: Python<'py>, key: Text, value: Text) -> PyResult<Bound<'py, PyAny>> {
        let (key, value) = (owned(&key), owned(&value));
        self.run(py, |store| async move { store.set(&key, &value).await.map(|()| Done::Nothing) })
    }

    /// Return a key's value, waiting for it to appear.
    fn get<'py>(&self, py: Python<'py>, key: Text) -> PyResult<Bound<'py, PyAny>> {
        let key = owned(&key);
        self.run(py, |store| async move { store.get(&key).await.map(Done::Value) })
    }

    /// Add to the number stored under a key, and return the sum.
    fn add<'py>(&self, py: Python<'py>, key: Text, amount: i64) -> PyResult<Bound<'py, PyAny>> {
        let key = owned(&key);
        self.run(py, |store| async move { store.add(&key, amount).await.map(Done::Number) })
    }

    /// Replace the value if it is the expected one. Return the store's answer.
    fn compare_set<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        expected: Text,
        desired: Text,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (key, expected, desired) = (owned(&key), owned(&expected), owned(&desired));
        self.run(py, |store| async move { store.compare_set(&key, &expected, &desired).await.map(Done::Value) })
    }

    /// Whether all keys exist.
    fn check<'py>(&self, py: Python<'py>, keys: Vec<Text>) -> PyResult<Bound<'py, PyAny>> {
        let keys = all_owned(&keys);
        self.run(py, |store| async move { store.check(&keys).await.map(Done::Truth) })
    }

    /// Wait until all keys exist, at most ``timeout_s`` or the client's default.
    #[pyo3(signature = (keys, timeout_s = None))]
    fn wait<'py>(&self, py: Python<'py>, keys: Vec<Text>, timeout_s: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let keys = all_owned(&keys);
        let own = timeout_s.map(limit).transpose()?;
        self.run(py, |store| async move {
            store.wait_within(&keys, own.unwrap_or_else(|| store.timeout())).await.map(|()| Done::Nothing)
        })
    }

    /// Remove a key. Return whether it existed.
    fn delete_key<'py>(&self, py: Python<'py>, key: Text) -> PyResult<Bound<'py, PyAny>> {
        let key = owned(&key);
        self.run(py, |store| async move { store.delete_key(&key).await.map(Done::Truth) })
    }

    /// Number of keys in the store.
    fn num_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.run(py, |store| async move { store.num_keys().await.map(Done::Number) })
    }

    /// Append to a key's value.
    fn append<'py>(&self, py: Python<'py>, key: Text, value: Text) -> PyResult<Bound<'py, PyAny>> {
        let (key, value) = (owned(&key), owned(&value));
        self.run(py, |store| async move { store.append(&key, &value).await.map(|()| Done::Nothing) })
    }

    /// Return several values, waiting for all keys to appear.
    fn multi_get<'py>(&self, py: Python<'py>, keys: Vec<Text>) -> PyResult<Bound<'py, PyAny>> {
        let keys = all_owned(&keys);
        self.run(py, |store| async move { store.multi_get(&keys).await.map(Done::Values) })
    }

    /// Store several values.
    fn multi_set<'py>(&self, py: Python<'py>, keys: Vec<Text>, values: Vec<Text>) -> PyResult<Bound<'py, PyAny>> {
        let (keys, values) = (all_owned(&keys), all_owned(&values));
        self.run(py, |store| async move { store.multi_set(&keys, &values).await.map(|()| Done::Nothing) })
    }

    /// Add an item to the end of a queue.
    fn queue_push<'py>(&self, py: Python<'py>, key: Text, value: Text) -> PyResult<Bound<'py, PyAny>> {
        let (key, value) = (owned(&key), owned(&value));
        self.run(py, |store| async move { store.queue_push(&key, &value).await.map(|()| Done::Nothing) })
    }

    /// Take the first item of a queue. With ``block``, wait for one.
    #[pyo3(signature = (key, block = true))]
    fn queue_pop<'py>(&self, py: Python<'py>, key: Text, block: bool) -> PyResult<Bound<'py, PyAny>> {
        let key = owned(&key);
        self.run(py, |store| async move { store.queue_pop(&key, block).await.map(Done::Value) })
    }

    /// Length of a queue.
    fn queue_len<'py>(&self, py: Python<'py>, key: Text) -> PyResult<Bound<'py, PyAny>> {
        let key = owned(&key);
        self.run(py, |store| async move { store.queue_len(&key).await.map(Done::Number) })
    }

    /// All keys, in no particular order, as ``bytes``.
    fn list_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.run(py, |store| async move { store.list_keys().await.map(Done::Values) })
    }

    /// Wait until ``world_size`` callers have reached this barrier, at most ``timeout_s`` or the client's default.
    #[pyo3(signature = (key, world_size, timeout_s = None))]
    fn barrier<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        world_size: i64,
        timeout_s: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let key = owned(&key);
        let own = timeout_s.map(limit).transpose()?;
        self.run(py, |store| async move {
            store.barrier_within(&key, world_size, own.unwrap_or_else(|| store.timeout())).await.map(|()| Done::Nothing)
        })
    }

    /// Open another connection to the same store.
    fn clone<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.run(py, |store| async move { store.connect_again().await.map(|client| Done::Client(client.into())) })
    }
}

impl AsyncStoreClient {
    fn client(&self, py: Python<'_>) -> PyResult<Arc<client::StoreClient>> {
        let closed =
            || errors::raise(py, "StoreNetworkError", "this client was closed".to_owned(), &Attributes::default());
        self.client.lock().clone().ok_or_else(closed)
    }

    fn run<'py, F>(
        &self,
        py: Python<'py>,
        operation: impl FnOnce(Arc<client::StoreClient>) -> F,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        F: Future<Output = Result<Done, StoreError>> + Send + 'static,
    {
        let operation = operation(self.client(py)?);
        awaitable(py, async { Outcome(operation.await) })
    }
}

/// The result of an operation. It becomes a Python object or an exception where the interpreter is attached.
struct Outcome(Result<Done, StoreError>);

enum Done {
    Nothing,
    Truth(bool),
    Number(i64),
    Value(Bytes),
    Values(Vec<Bytes>),
    Client(Box<client::StoreClient>),
}

impl<'py> IntoPyObject<'py> for Outcome {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.0.map_err(|error| errors::from_store(py, &error))? {
            Done::Nothing => Ok(py.None().into_bound(py)),
            Done::Truth(truth) => truth.into_bound_py_any(py),
            Done::Number(number) => number.into_bound_py_any(py),
            Done::Value(value) => Ok(PyBytes::new(py, &value).into_any()),
            Done::Values(values) => {
                let values = values.iter().map(|value| PyBytes::new(py, value));
                Ok(PyList::new(py, values.collect::<Vec<_>>())?.into_any())
            }
            Done::Client(client) => {
                let client = AsyncStoreClient { client: Mutex::new(Some(Arc::new(*client))) };
                Ok(Bound::new(py, client)?.into_any())
            }
        }
    }
}

/// Copy a text out of Python, so that it can be dropped without the interpreter.
fn owned(text: &Text) -> Box<[u8]> {
    text.as_ref().into()
}

fn all_owned(texts: &[Text]) -> Vec<Box<[u8]>> {
    texts.iter().map(owned).collect()
}

/// Convert a time limit. A negative one means no limit, as in PyTorch.
fn limit(timeout_s: f64) -> PyResult<Option<Duration>> {
    if timeout_s < 0.0 { Ok(None) } else { seconds("timeout_s", timeout_s).map(Some) }
}
