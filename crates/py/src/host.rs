//! `Host`: the store and the coordinator on one port.

use std::net::SocketAddr;

use elastic_rs::host::{Claim, HostError, Sessions, claim};
use elastic_rs::store::server::ServerOptions;
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::conf::seconds;
use crate::runtime::{block_on, detach};
use crate::store::{from_bind, os_error};

/// The store and the rendezvous coordinator, on one port and on one thread that never waits for the interpreter.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Host(Mutex<elastic_rs::host::Host>);

#[pymethods]
impl Host {
    /// Become the host of ``host:port``. A ``str`` is the reason why another process is the host.
    ///
    /// ``is_host`` is the user's choice. With None, whoever can bind the address is the host.
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
    /// Raises ``OSError`` if ``host`` cannot be resolved, or if listening fails. The text names the process that has the port.
    /// Raises ``ValueError`` for invalid times: those of keep-alive are from 1 to 32767 s.
    #[staticmethod]
    #[pyo3(signature = (host, port, *, key_bytes = None, value_bytes = None, list_len = None, message_bytes = None, keys = None,
        stored_bytes = None, connections = None, reply_buffer_bytes = None, hello_timeout_s = None, flush_timeout_s = None,
        keepalive_idle_s = None, keepalive_interval_s = None, log_period_s = None))]
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
        keepalive_idle_s: Option<f64>,
        keepalive_interval_s: Option<f64>,
        log_period_s: Option<f64>,
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
        let given = [
            ("hello_timeout_s", hello_timeout_s, &mut options.hello_timeout),
            ("flush_timeout_s", flush_timeout_s, &mut options.flush_timeout),
            ("log_period_s", log_period_s, &mut options.log_period),
            ("keepalive_idle_s", keepalive_idle_s, &mut options.keepalive_idle),
            ("keepalive_interval_s", keepalive_interval_s, &mut options.keepalive_interval),
        ];
        for (name, value, limit) in given {
            if let Some(value) = value {
                *limit = seconds(name, value)?;
            }
        }
        for (name, value) in
            [("keepalive_idle_s", options.keepalive_idle), ("keepalive_interval_s", options.keepalive_interval)]
        {
            if !KEEPALIVE_SECONDS.contains(&value.as_secs_f64()) {
                let (least, most) = (KEEPALIVE_SECONDS.start(), KEEPALIVE_SECONDS.end());
                let value = value.as_secs_f64();
                let text = format!(
                    "{name} must be from {least} to {most} seconds, which is what the kernel takes; got {value}"
                );
                return Err(PyValueError::new_err(text));
            }
        }
        let listened = detach(py, || elastic_rs::host::Host::listen(host, port, options));
        listened.map(|host| Self(Mutex::new(host))).map_err(|error| from_host(&error))
    }

    /// The limits of :meth:`listen` with their defaults. None is no limit.
    #[staticmethod]
    #[pyo3(signature = () -> "dict[str, int | float | None]")]
    fn default_limits(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let options = ServerOptions::default();
        let (limits, table) = (options.limits, options.table);
        let defaults = PyDict::new(py);
        let counts = [
            ("key_bytes", limits.key_bytes),
            ("value_bytes", limits.value_bytes),
            ("list_len", limits.list_len),
            ("message_bytes", limits.message_bytes),
            ("keys", table.keys),
            ("stored_bytes", table.stored_bytes),
            ("connections", options.max_connections),
            ("reply_buffer_bytes", options.reply_buffer_bytes),
        ];
        for (name, limit) in counts {
            defaults.set_item(name, (limit != usize::MAX).then_some(limit))?;
        }
        let times = [
            ("hello_timeout_s", options.hello_timeout),
            ("flush_timeout_s", options.flush_timeout),
            ("keepalive_idle_s", options.keepalive_idle),
            ("keepalive_interval_s", options.keepalive_interval),
            ("log_period_s", options.log_period),
        ];
        for (name, limit) in times {
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
    /// Does not stop the host: it serves everybody meanwhile, including new connections.
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
        let sessions = self.sessions();
        let drained = block_on(py, async move { sessions.ended(timeout).await })?;
        detach(py, || self.0.lock().stop());
        Ok(drained)
    }
}

impl Host {
    /// Whether it listens on loopback alone.
    pub fn is_on_loopback(&self) -> bool {
        self.0.lock().is_on_loopback()
    }

    /// To wait for their end without borrowing the host.
    pub fn sessions(&self) -> Sessions {
        self.0.lock().sessions()
    }
}

/// `MAX_TCP_KEEPIDLE` and `MAX_TCP_KEEPINTVL` of Linux; it counts whole seconds.
const KEEPALIVE_SECONDS: std::ops::RangeInclusive<f64> = 1.0..=32_767.0;

fn from_host(error: &HostError) -> PyErr {
    match error {
        HostError::Bind(error) => from_bind(error),
        HostError::Start(source) | HostError::Resolve { source, .. } => os_error(source, error.to_string()),
        _ => PyOSError::new_err(error.to_string()),
    }
}
