//! `StoreServer`: a TCP store's server.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use elastic_rs::net::listen::{BindError, adopt, bind, bind_wildcard};
use elastic_rs::store::client::{self, ClientOptions, StoreError};
use elastic_rs::store::server::{self, ServerOptions};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::conf::seconds;
use crate::errors::{self, Attributes};
use crate::runtime::{block_on, detach};

/// A TCP store's server. It runs on its own thread, which never waits for the interpreter.
///
/// It ends by :meth:`stop` or :meth:`drain`, or when this object is collected, unless :meth:`stop_when_closed` has given it owners.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct StoreServer(pub(crate) server::StoreServer);

#[pymethods]
impl StoreServer {
    /// Listen on ``address``, or on all addresses if it is None. Port 0 lets the system choose.
    ///
    /// Raises ``OSError``. If the port is taken, the text names the process that has it, if the system reports it.
    #[staticmethod]
    fn listen(address: Option<&str>, port: u16) -> PyResult<Self> {
        let listener = match address {
            None => bind_wildcard(port),
            Some(address) => bind(SocketAddr::new(parse_ip(address)?, port)),
        };
        Self::start(listener.map_err(|error| from_bind(&error))?)
    }

    /// Take over the bound socket ``fd``, and close it at the end. Its port must be ``port``, unless that is 0.
    ///
    /// Raises ``OSError`` if it is not a TCP socket, and ``StoreError`` if it has another port. The caller then keeps the socket.
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
            return Err(errors::raise(py, "StoreError", text, &Attributes::default()));
        }
        // SAFETY: the copy shows that it is open, and the caller passes its ownership.
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

    /// Announce a further owner. Until :meth:`stop_when_closed` names it or :meth:`give_up_owner` is called, the server does not
    /// end because its other owners have gone. False if the server has ended.
    fn expect_owner(&self) -> bool {
        self.0.expect_owner()
    }

    /// Withdraw the announcement of :meth:`expect_owner`. Without owners, the server ends.
    fn give_up_owner(&self) {
        self.0.give_up_owner();
    }

    /// Make the connection from this address an owner: the server ends when the connections of all its owners have closed,
    /// and no longer when this object is collected.
    fn stop_when_closed(&self, address: &str, port: u16) -> PyResult<()> {
        self.0.stop_when_closed(SocketAddr::new(parse_ip(address)?, port));
        Ok(())
    }

    /// Wait until ``world_size`` users have joined, at most ``timeout_s``. Return the number of those that have.
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

/// An address from Python.
fn parse_ip(text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|_| PyValueError::new_err(format!("`{text}` is not an IPv4 or IPv6 address")))
}

/// The `OSError` for a port on which a process cannot listen.
pub(crate) fn from_bind(error: &BindError) -> PyErr {
    os_error(&error.source, error.to_string())
}

pub(crate) fn os_error(error: &io::Error, text: String) -> PyErr {
    PyOSError::new_err((error.raw_os_error().unwrap_or_default(), text))
}
