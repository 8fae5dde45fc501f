//! `StoreServer`, `Host` and `StoreClient`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use elastic_rs::host::{Claim, HostError, claim};
use elastic_rs::store::client::{self, ClientOptions, StoreError};
use elastic_rs::store::listen::{BindError, adopt, bind, bind_wildcard};
use elastic_rs::store::server::{self, ServerOptions};
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyDict};

use crate::errors;
use crate::rendezvous::seconds;
use crate::runtime::{block_on, detach};

/// A TCP store's server, on a thread of its own that never waits for the interpreter.
///
/// Ends when it is told to, or when this object is collected, unless :meth:`stop_when_closed` ties it to a connection.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct StoreServer(server::StoreServer);

#[pymethods]
impl StoreServer {
    /// Listen on ``address``, or on all if it is None. Port 0 lets the system choose.
    ///
    /// Raises ``OSError``; if the port is taken, its text names who has it where the system tells.
    #[staticmethod]
    fn listen(address: Option<&str>, port: u16) -> PyResult<Self> {
        let listener = match address {
            None => bind_wildcard(port),
            Some(address) => bind(SocketAddr::new(parse_ip(address)?, port)),
        };
        Self::start(listener.map_err(|error| from_bind(&error))?)
    }

    /// Take over the bound socket ``fd``, whose port must be ``port`` unless that is 0. The server closes it at its end.
    ///
    /// Raises ``OSError`` if it is no TCP socket, ``StoreError`` if its port is another one; it is the caller's still then.
    #[staticmethod]
    fn adopt(py: Python<'_>, fd: i32, port: u16) -> PyResult<Self> {
        if fd < 0 {
            return Err(os_error(&io::Error::from_raw_os_error(9), format!("listen fd {fd} is not a descriptor")));
        }
        // SAFETY: the descriptor is only borrowed for duplicating it, which fails if it is not open.
        #[expect(unsafe_code, reason = "a descriptor from Python is a number; there is no safe way to borrow it")]
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let adopted = borrowed.try_clone_to_owned().and_then(adopt);
        let listener = adopted.map_err(|error| os_error(&error, format!("listen fd {fd}: {error}")))?;
        let bound = listener.local_addr()?.port();
        if port != 0 && bound != port {
            let text = format!("listen fd {fd} is bound to port {bound}, expected to be bound to port {port}");
            return Err(errors::raise(py, "StoreError", text));
        }
        // SAFETY: it is open, as the copy shows, and the caller hands it over: from here on nobody else closes it.
        #[expect(unsafe_code, reason = "a descriptor from Python is a number; there is no safe way to take it")]
        let own = unsafe { OwnedFd::from_raw_fd(fd) };
        drop(listener);
        Self::start(own.into())
    }

    /// The port it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.0.port()
    }

    /// Whether it has ended.
    #[getter]
    fn stopped(&self) -> bool {
        self.0.has_ended()
    }

    /// Number of connections that are open now.
    #[getter]
    fn connections(&self) -> u64 {
        self.0.stats().connections_open
    }

    /// Number of connections that wait for keys now.
    #[getter]
    fn waiting(&self) -> u64 {
        self.0.stats().waiting
    }

    /// Close everything now.
    fn stop(&self, py: Python<'_>) {
        detach(py, || self.0.stop());
    }

    /// Wait until all clients have disconnected, at most ``timeout_s``, then stop. True if all had.
    #[pyo3(signature = (*, timeout_s))]
    fn drain(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = seconds("timeout_s", timeout_s)?;
        Ok(detach(py, || self.0.drain(timeout)))
    }

    /// Promise a further owner: until :meth:`stop_when_closed` names it, or :meth:`give_up_owner` takes the promise back,
    /// the server does not end because its other owners have gone. False if the server has ended.
    fn expect_owner(&self) -> bool {
        self.0.expect_owner()
    }

    /// Take back the promise of :meth:`expect_owner`. Without owners, the server ends.
    fn give_up_owner(&self) {
        self.0.give_up_owner();
    }

    /// Make the connection from this address an owner: the server ends when the connections of all its owners have closed,
    /// and no longer when this object is collected.
    fn stop_when_closed(&self, address: &str, port: u16) -> PyResult<()> {
        self.0.stop_when_closed(SocketAddr::new(parse_ip(address)?, port));
        Ok(())
    }

    /// Wait until ``world_size`` users have joined. Returns how many have: fewer when ``timeout_s`` ended first.
    #[pyo3(signature = (world_size, *, timeout_s))]
    fn wait_for_workers(&self, py: Python<'_>, world_size: i64, timeout_s: f64) -> PyResult<i64> {
        let limit = seconds("timeout_s", timeout_s)?;
        let mut address = self.0.local_addr();
        if address.ip().is_unspecified() {
            address.set_ip(if address.is_ipv4() { [127, 0, 0, 1].into() } else { [0, 0, 0, 0, 0, 0, 0, 1].into() });
        }
        let waited = block_on(py, async {
            let options = ClientOptions { connect_timeout: limit, ..ClientOptions::default() };
            let client = client::StoreClient::connect(&address.ip().to_string(), address.port(), options).await?;
            client.wait_for_workers(world_size, Some(limit)).await
        })?;
        match waited {
            Ok(()) => Ok(world_size),
            Err(StoreError::WorkersTimeout { joined, .. }) => Ok(joined),
            Err(error) => Err(errors::from_store(py, &error)),
        }
    }
}

impl StoreServer {
    fn start(listener: std::net::TcpListener) -> PyResult<Self> {
        Ok(Self(server::StoreServer::start(vec![listener], ServerOptions::default())?))
    }
}

/// The store and the rendezvous coordinator, on one port and on one thread that never waits for the interpreter.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Host(Mutex<elastic_rs::host::Host>);

#[pymethods]
impl Host {
    /// Become the host of ``host:port``, or learn why another process is: a ``str`` says so.
    ///
    /// ``is_host`` is the user's word; None lets whoever can bind the address be the host.
    ///
    /// Raises ``OSError`` when ``is_host`` is True and the port cannot be listened on.
    #[staticmethod]
    #[pyo3(signature = (host, port, *, is_host = None) -> "Host | str")]
    fn claim<'py>(py: Python<'py>, host: &str, port: u16, is_host: Option<bool>) -> PyResult<Bound<'py, PyAny>> {
        match detach(py, || claim(host, port, is_host)) {
            Ok(Claim::Host(host)) => Ok(Bound::new(py, Self(Mutex::new(host)))?.into_any()),
            Ok(Claim::Guest(why)) => Ok(why.into_pyobject(py)?.into_any()),
            Err(error) => Err(from_host(&error)),
        }
    }

    /// Serve on every address of ``host``, or on all of this machine if it is None. Port 0 lets the system choose.
    ///
    /// A limit that is not given has the value of :meth:`default_limits`.
    ///
    /// Raises ``OSError`` when ``host`` means nothing, or the port cannot be listened on; the text names who has it.
    #[staticmethod]
    #[pyo3(signature = (host, port, *, key_bytes = None, value_bytes = None, list_len = None, message_bytes = None, keys = None,
        stored_bytes = None, connections = None, reply_buffer_bytes = None, hello_timeout_s = None, flush_timeout_s = None))]
    #[expect(clippy::too_many_arguments, reason = "one named argument per limit")]
    fn listen(
        py: Python<'_>,
        host: Option<&str>,
        port: u16,
        key_bytes: Option<usize>,
        value_bytes: Option<usize>,
        list_len: Option<usize>,
        message_bytes: Option<usize>,
        keys: Option<usize>,
        stored_bytes: Option<usize>,
        connections: Option<usize>,
        reply_buffer_bytes: Option<usize>,
        hello_timeout_s: Option<f64>,
        flush_timeout_s: Option<f64>,
    ) -> PyResult<Self> {
        let mut options = ServerOptions::default();
        let given = [
            (key_bytes, &mut options.limits.key_bytes),
            (value_bytes, &mut options.limits.value_bytes),
            (list_len, &mut options.limits.list_len),
            (message_bytes, &mut options.limits.message_bytes),
            (keys, &mut options.table.keys),
            (stored_bytes, &mut options.table.stored_bytes),
            (connections, &mut options.max_connections),
            (reply_buffer_bytes, &mut options.reply_buffer_bytes),
        ];
        for (value, limit) in given {
            *limit = value.unwrap_or(*limit);
        }
        if let Some(value) = hello_timeout_s {
            options.hello_timeout = seconds("hello_timeout_s", value)?;
        }
        if let Some(value) = flush_timeout_s {
            options.flush_timeout = seconds("flush_timeout_s", value)?;
        }
        let listened = detach(py, || elastic_rs::host::Host::listen(host, port, options));
        listened.map(|host| Self(Mutex::new(host))).map_err(|error| from_host(&error))
    }

    /// The limits that :meth:`listen` knows, with their defaults; None is no limit.
    #[staticmethod]
    #[pyo3(signature = () -> "dict[str, int | float | None]")]
    fn default_limits(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let ServerOptions { limits, table, max_connections, hello_timeout, reply_buffer_bytes, flush_timeout, .. } =
            ServerOptions::default();
        let defaults = PyDict::new(py);
        let counts = [
            ("key_bytes", limits.key_bytes),
            ("value_bytes", limits.value_bytes),
            ("list_len", limits.list_len),
            ("message_bytes", limits.message_bytes),
            ("keys", table.keys),
            ("stored_bytes", table.stored_bytes),
            ("connections", max_connections),
            ("reply_buffer_bytes", reply_buffer_bytes),
        ];
        for (name, limit) in counts {
            defaults.set_item(name, (limit != usize::MAX).then_some(limit))?;
        }
        for (name, limit) in [("hello_timeout_s", hello_timeout), ("flush_timeout_s", flush_timeout)] {
            defaults.set_item(name, limit.as_secs_f64())?;
        }
        Ok(defaults)
    }

    /// The port it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.0.lock().port()
    }

    /// The addresses it listens on, each with its port.
    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.0.lock().addresses().iter().map(SocketAddr::to_string).collect()
    }

    /// Whether it has ended.
    #[getter]
    fn stopped(&self) -> bool {
        self.0.lock().has_ended()
    }

    /// The numbers of sessions and of store clients that are connected now.
    #[getter]
    fn users(&self) -> (usize, u64) {
        self.0.lock().users().count()
    }

    /// Wait until nobody is connected, node or store client, at most ``timeout_s``. True if all have gone.
    ///
    /// Does not stop: meanwhile everything is served, newcomers included.
    #[pyo3(signature = (*, timeout_s))]
    fn wait_for_users(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = seconds("timeout_s", timeout_s)?;
        let users = self.0.lock().users();
        block_on(py, users.gone(timeout))
    }

    /// Close everything now.
    fn stop(&self, py: Python<'_>) {
        detach(py, || self.0.lock().stop());
    }

    /// Wait until every node has said goodbye, at most ``timeout_s``, then stop. True if all had.
    #[pyo3(signature = (*, timeout_s))]
    fn drain(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = seconds("timeout_s", timeout_s)?;
        let sessions = self.0.lock().sessions();
        let drained = block_on(py, async move { sessions.ended(timeout).await })?;
        detach(py, || self.0.lock().stop());
        Ok(drained)
    }
}

/// The core's own client of a TCP store, without torch. Keys are ``str`` (sent as UTF-8) or ``bytes``; times are seconds.
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
    /// Connect to the store at ``host:port``, which need not be there yet.
    ///
    /// ``timeout_s`` bounds connecting, and each operation that waits for keys.
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

    /// Replace the value if it is what was expected; return what the store then answers.
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

    /// Remove a key; whether it was there.
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

    /// Take the first item of a queue; if ``block``, wait for one.
    ///
    /// Raises ``StoreQueueEmptyError`` if there is none, also after blocking, if another client was faster.
    #[pyo3(signature = (key, block = true))]
    fn queue_pop<'py>(&self, py: Python<'py>, key: Text, block: bool) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &run(py, self.0.queue_pop(key.as_ref(), block))?))
    }

    /// Length of a queue.
    fn queue_len(&self, py: Python<'_>, key: Text) -> PyResult<i64> {
        run(py, self.0.queue_len(key.as_ref()))
    }

    /// All keys, in no particular order. They are ``bytes``, since a key need not be UTF-8.
    fn list_keys<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        Ok(run(py, self.0.list_keys())?.iter().map(|key| PyBytes::new(py, key)).collect())
    }

    /// Wait until ``world_size`` callers have come to this key, at most ``timeout_s`` or the client's default.
    #[pyo3(signature = (key, world_size, timeout_s = None))]
    fn barrier(&self, py: Python<'_>, key: Text, world_size: i64, timeout_s: Option<f64>) -> PyResult<()> {
        run(py, self.0.barrier_within(key.as_ref(), world_size, self.limit(timeout_s)?))
    }

    /// Connect to the same store once more.
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

fn parse_ip(text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|_| PyValueError::new_err(format!("`{text}` is not an IPv4 or IPv6 address")))
}

fn from_bind(error: &BindError) -> PyErr {
    os_error(&error.source, error.to_string())
}

fn from_host(error: &HostError) -> PyErr {
    match error {
        HostError::Bind(error) => from_bind(error),
        HostError::Start(source) | HostError::Resolve { source, .. } => os_error(source, error.to_string()),
        _ => PyOSError::new_err(error.to_string()),
    }
}

fn os_error(error: &io::Error, text: String) -> PyErr {
    PyOSError::new_err((error.raw_os_error().unwrap_or_default(), text))
}
