//! `EndpointServer`: the store and the coordinator on one port.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use elastic_rs::endpoint::{Claim, EndpointError, Sessions, Subject, Which, claim};
use elastic_rs::rendezvous::coordinator::driver::DriversHosts;
use elastic_rs::rendezvous::messages::message::{NodeId, PeerHello};
use elastic_rs::rendezvous::run::Exclusions;
use elastic_rs::store::server::ServerOptions;
use elastic_rs::store::server::limits::{Amount, LIMITS, Limit};
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use tokio::sync::{oneshot, watch};

use crate::conf::seconds;
use crate::runtime::{block_on, block_without_runtime, detach};
use crate::secure::Protection;
use crate::store::{from_bind, os_error};

/// The addresses of a name or address, if all of them are on loopback. Empty otherwise, and if it cannot be resolved. Asks the resolver.
#[pyfunction]
pub fn only_on_loopback(py: Python<'_>, host: &str) -> Vec<String> {
    let found = detach(py, || elastic_rs::net::local::only_on_loopback(host));
    found.iter().map(ToString::to_string).collect()
}

/// The store and the rendezvous coordinator, on one port and on one thread that never waits for the interpreter.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct EndpointServer {
    host: Mutex<elastic_rs::endpoint::EndpointServer>,
    /// Its place in the job's list of endpoints, if there is one.
    place: Option<usize>,
}

#[pymethods]
impl EndpointServer {
    /// Become the host of ``host:port``. A ``str`` is the reason why another process is the host.
    ///
    /// ``is_host`` is the user's choice. With None, whoever can bind the address is the host. With a ``protection`` there are only
    /// sessions of those who hold the token, and no store. Unless the job ``uses_store``, what the store holds is bounded; or by
    /// these ``limits``. With a ``list``
    /// this process may lead the job of this name, as those at the other endpoints may: the name, all endpoints, and the place of this one
    /// among them.
    ///
    /// Raises ``OSError`` when ``is_host`` is True and the port cannot be listened on, and ``ValueError`` for an invalid list.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    #[pyo3(signature = (host, port, *, is_host = None, uses_store = true, protection = None, list = None, limits = None) -> "EndpointServer | str")]
    fn claim<'py>(
        py: Python<'py>,
        host: &str,
        port: u16,
        is_host: Option<bool>,
        uses_store: bool,
        protection: Option<&Protection>,
        list: Option<(String, Vec<String>, u32)>,
        limits: Option<&StoreLimits>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let protection = protection.map(Protection::core);
        let options = match limits {
            Some(limits) => limits.0.clone(),
            None if uses_store => ServerOptions::default(),
            None => ServerOptions::for_unused_store(),
        };
        let process = NodeId(rand::random());
        let list = list.map(|(run_id, endpoints, place)| PeerHello { run_id, endpoints, place, process });
        list.as_ref().map_or(Ok(()), PeerHello::validate).map_err(PyValueError::new_err)?;
        let place = list.as_ref().map(|list| list.place as usize);
        match detach(py, || claim(host, port, is_host, options, protection, list)) {
            Ok(Claim::Serves(host)) => Ok(Bound::new(py, Self { host: Mutex::new(host), place })?.into_any()),
            Ok(Claim::Elsewhere(why)) => Ok(why.into_pyobject(py)?.into_any()),
            Err(error) => Err(from_host(&error)),
        }
    }

    /// Serve on every address of ``host``, or on all of this machine if it is None. Port 0 lets the system choose. ``protection`` as
    /// for :meth:`claim`.
    ///
    /// Raises ``OSError`` if ``host`` cannot be resolved, or if listening fails. The text names the process that has the port.
    #[staticmethod]
    #[pyo3(signature = (host, port, *, limits = None, protection = None))]
    fn listen(
        py: Python<'_>,
        host: Option<&str>,
        port: u16,
        limits: Option<&StoreLimits>,
        protection: Option<&Protection>,
    ) -> PyResult<Self> {
        let options = limits.map(|limits| limits.0.clone()).unwrap_or_default();
        let protection = protection.map(Protection::core);
        let listened = detach(py, || elastic_rs::endpoint::EndpointServer::listen(host, port, options, protection));
        listened.map(|host| Self { host: Mutex::new(host), place: None }).map_err(|error| from_host(&error))
    }

    /// The port it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.host.lock().port()
    }

    /// The addresses it listens on, each with its port.
    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.host.lock().addresses().iter().map(SocketAddr::to_string).collect()
    }

    /// The addresses by which nodes on other machines may reach it, each with its port, if it listens on all addresses.
    #[getter]
    fn public_addresses(&self) -> Vec<String> {
        self.host.lock().public_addresses().iter().map(SocketAddr::to_string).collect()
    }

    /// Whether it listens on loopback alone.
    #[getter]
    fn on_loopback(&self) -> bool {
        self.is_on_loopback()
    }

    /// The pages that are asked for by HTTP, for a thread that makes them. None: another one does already, or nobody may read them.
    fn page_requests(&self) -> Option<PageRequests> {
        self.host.lock().take_page_requests().map(|requests| PageRequests(tokio::sync::Mutex::new(requests)))
    }

    /// Whether it has ended.
    #[getter]
    fn stopped(&self) -> bool {
        self.host.lock().has_ended()
    }

    /// The numbers of sessions and of store clients that are connected now.
    #[getter]
    fn users(&self) -> (usize, u64) {
        self.host.lock().users().count()
    }

    /// Wait until nobody is connected, node or store client, at most ``timeout_s``. True if all have gone.
    ///
    /// Does not stop the host: it serves everybody meanwhile, including new connections.
    #[pyo3(signature = (*, timeout_s))]
    fn wait_for_users(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = seconds("timeout_s", timeout_s)?;
        let users = self.host.lock().users();
        block_on(py, users.gone(timeout))
    }

    /// Close everything now.
    fn stop(&self, py: Python<'_>) {
        detach(py, || self.host.lock().stop());
    }

    /// Wait until every node has said goodbye, at most ``timeout_s``. True if all had.
    #[pyo3(signature = (*, timeout_s))]
    fn wait_for_nodes(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = seconds("timeout_s", timeout_s)?;
        let sessions = self.sessions();
        block_on(py, async move { sessions.ended(timeout).await })
    }
}

impl EndpointServer {
    /// Whether it listens on loopback alone.
    pub fn is_on_loopback(&self) -> bool {
        self.host.lock().is_on_loopback()
    }

    /// Where this process reaches it, if not at the endpoint's address.
    pub fn own_address(&self) -> Option<SocketAddr> {
        self.host.lock().own_address()
    }

    /// Its place in the job's list of endpoints, or the first of one.
    pub fn place(&self) -> usize {
        self.place.unwrap_or_default()
    }

    /// The hosts that its coordinator keeps out, as they change.
    pub fn exclusions(&self) -> watch::Receiver<Exclusions> {
        self.host.lock().exclusions()
    }

    /// Where a driver shows which hosts it does not use.
    pub fn drivers(&self) -> watch::Sender<DriversHosts> {
        self.host.lock().drivers()
    }

    /// To wait for their end without borrowing the host.
    pub fn sessions(&self) -> Sessions {
        self.host.lock().sessions()
    }
}

/// The pages that are asked for at a host.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct PageRequests(tokio::sync::Mutex<elastic_rs::endpoint::PageRequests>);

#[pymethods]
impl PageRequests {
    /// Wait for the next one. None: the host has ended.
    fn next(&self, py: Python<'_>) -> PyResult<Option<PageRequest>> {
        let request = block_without_runtime(py, async { self.0.lock().await.recv().await }, None)?;
        Ok(request.flatten().map(|elastic_rs::endpoint::PageRequest { subject, which, reply }| PageRequest {
            subject,
            which,
            reply: Mutex::new(Some(reply)),
        }))
    }
}

/// A page that somebody waits for.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct PageRequest {
    subject: Subject,
    which: Which,
    reply: Mutex<Option<oneshot::Sender<String>>>,
}

#[pymethods]
impl PageRequest {
    /// Of a run's page: its events as lines of JSON, and its state as JSON.
    #[getter]
    fn run(&self) -> Option<(Vec<&str>, &str)> {
        match &self.subject {
            Subject::Run { lines, state } => Some((lines.iter().map(AsRef::as_ref).collect(), state)),
            Subject::Runs(..) => None,
        }
    }

    /// Of a list: the names of runs, and the number of those that are left out.
    #[getter]
    fn runs(&self) -> Option<(Vec<String>, usize)> {
        match &self.subject {
            Subject::Runs(names, more) => Some((names.clone(), *more)),
            Subject::Run { .. } => None,
        }
    }

    /// The page was asked for by the name of its run, so there may be others.
    #[getter]
    fn named(&self) -> bool {
        self.which.run.is_some()
    }

    /// The page is not to ask for itself again.
    #[getter]
    fn still(&self) -> bool {
        self.which.still
    }

    /// The page is made. Without that, who has asked hears that it could not be made.
    fn made(&self, html: String) {
        if let Some(reply) = self.reply.lock().take() {
            let _ = reply.send(html); // who has asked may have gone
        }
    }
}

/// The limits of a store, by their names in :meth:`table`. A limit that is not given, or None, has its default.
///
/// Raises ``TypeError`` for an unknown name, and ``ValueError`` for a value out of its range.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct StoreLimits(ServerOptions);

#[pymethods]
impl StoreLimits {
    #[new]
    #[pyo3(signature = (**values: "float | None"))]
    fn new(values: Option<BTreeMap<String, Option<f64>>>) -> PyResult<Self> {
        let mut options = ServerOptions::default();
        for (name, value) in values.unwrap_or_default() {
            let limit = Limit::named(&name).ok_or_else(|| {
                let known: Vec<_> = LIMITS.iter().map(|limit| limit.name).collect();
                PyTypeError::new_err(format!("`{name}` is not a limit, must be one of {}", known.join(", ")))
            })?;
            if let Some(value) = value {
                limit.set(&mut options, value).map_err(PyValueError::new_err)?;
            }
        }
        Ok(Self(options))
    }

    /// All limits: name, unit (``number``, ``bytes`` or ``seconds``), default (None is no limit), and what it limits.
    #[staticmethod]
    fn table() -> Vec<(&'static str, &'static str, Option<f64>, &'static str)> {
        let amount = |limit: &Limit| match limit.default() {
            Amount::Number(number) => ("number", (number != usize::MAX).then_some(number as f64)),
            Amount::Bytes(bytes) => ("bytes", (bytes != usize::MAX).then_some(bytes as f64)),
            Amount::Time(time) => ("seconds", Some(time.as_secs_f64())),
        };
        let row = |limit: &'static Limit| {
            let (unit, default) = amount(limit);
            (limit.name, unit, default, limit.help)
        };
        LIMITS.iter().map(row).collect()
    }
}

fn from_host(error: &EndpointError) -> PyErr {
    match error {
        EndpointError::Bind(error) => from_bind(error),
        EndpointError::Start(source) | EndpointError::Resolve { source, .. } => os_error(source, error.to_string()),
        _ => PyOSError::new_err(error.to_string()),
    }
}
