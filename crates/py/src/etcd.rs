//! `EtcdOptions`: an etcd cluster, for sessions over it and for stores.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elastic_rs::at_once;
use elastic_rs::etcd_client::{self, Client, ClientOptions, Credentials, PATIENCE, Password, TlsFiles};
use elastic_rs::net::connect::source_towards;
use elastic_rs::rendezvous::conf::{Conf, DEFAULT_KEY_PREFIX, PASSWORD_VARIABLE, Protocol};
use elastic_rs::rendezvous::etcd::keys;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::time::Instant;

use crate::conf::{RendezvousConfig, seconds};
use crate::runtime::block_on;

/// Most bytes of a password's file. bcrypt, with which etcd keeps passwords, takes 72.
const PASSWORD_LIMIT_BYTES: u64 = 4096;

/// An etcd cluster: where it is, and how to speak to it.
///
/// Args:
///     endpoints: the members, as ``HOST[:PORT],...``, each with or without ``http://`` or ``https://``; empty: this machine.
///     protocol: ``http`` or ``https``, for members without one. Default: ``http``.
///     cacert: the file of the authority that has signed the members' certificates.
///     cert: the file of this client's certificate.
///     key: the file of the certificate's key.
///     username: a user of etcd.
///     password: the user's. Default: that in ``password_file``, else in the variable ``ELASTIC_RS_ETCD_PASSWORD``.
///     password_file: a file with the password alone.
///     key_prefix: beginning of all keys of jobs.
///     read_timeout_s: time limit of each request, in seconds.
///
/// Raises:
///     ValueError: something is not allowed, or a file cannot be read. A password is never shown.
#[pyclass(frozen, from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone)]
pub struct EtcdOptions {
    client: ClientOptions,
    key_prefix: String,
    read_timeout: Duration,
}

/// The values of a user, before they are checked together.
#[derive(Default)]
struct Asked<'a> {
    protocol: Option<&'a str>,
    tls: TlsFiles,
    username: Option<String>,
    password: Option<String>,
    password_file: Option<PathBuf>,
    key_prefix: &'a str,
    read_timeout: Duration,
}

impl EtcdOptions {
    /// A client of the cluster. It connects on first use.
    pub fn client(&self) -> PyResult<Client> {
        // Its files were good when the options were made.
        Client::new(self.client.clone()).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Beginning of all keys.
    pub fn prefix(&self) -> &str {
        &self.key_prefix
    }

    /// Time limit of each request.
    pub fn read_timeout(&self) -> Duration {
        self.read_timeout
    }

    fn check(endpoints: &str, asked: Asked<'_>) -> Result<Self, String> {
        let endpoints = if endpoints.trim().is_empty() { "localhost" } else { endpoints };
        let endpoints = etcd_client::parse_endpoints(endpoints, asked.protocol)?;
        let mut tls = asked.tls;
        // As with PyTorch's backends, one file may hold both.
        tls.key = tls.key.or_else(|| tls.cert.clone());
        let credentials = credentials(asked.username, asked.password, asked.password_file.as_deref())?;
        let key_prefix = asked.key_prefix.trim_end_matches('/').to_owned();
        let patience = PATIENCE.min(asked.read_timeout);
        let client = ClientOptions { tls, credentials, patience, ..ClientOptions::new(endpoints) };
        // Files that cannot be used are an error now.
        Client::new(client.clone()).map_err(|error| error.to_string())?;
        Ok(Self { client, key_prefix, read_timeout: asked.read_timeout })
    }
}

/// The user and the password, from where it was given.
fn credentials(
    username: Option<String>,
    password: Option<String>,
    file: Option<&Path>,
) -> Result<Option<Credentials>, String> {
    let Some(username) = username else {
        return match password.is_some() || file.is_some() {
            true => Err("a password is given without `username`: give both".to_owned()),
            false => Ok(None),
        };
    };
    let password = match (password, file) {
        (Some(_), Some(_)) => return Err("`password` and `password_file` are given: give one of them".to_owned()),
        (Some(password), None) => password,
        (None, Some(file)) => read_password(file).map_err(|why| format!("password_file `{}` {why}", file.display()))?,
        (None, None) => std::env::var(PASSWORD_VARIABLE).map_err(|_| {
            format!("`username` is given without a password: give password_file=FILE, or set {PASSWORD_VARIABLE}")
        })?,
    };
    Ok(Some(Credentials { username, password: Password::new(password) }))
}

fn read_password(file: &Path) -> Result<String, String> {
    let mut text = String::new();
    let opened = at_once::open_file(file).map_err(|error| format!("cannot be read: {error}"))?;
    opened
        .take(PASSWORD_LIMIT_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(|error| format!("cannot be read: {error}"))?;
    if text.len() as u64 > PASSWORD_LIMIT_BYTES {
        return Err(format!("has more than {PASSWORD_LIMIT_BYTES} bytes, must have the password alone"));
    }
    // Editors end a file with a line end, which belongs to no password.
    let password = text.strip_suffix('\n').unwrap_or(&text);
    let password = password.strip_suffix('\r').unwrap_or(password);
    if password.is_empty() { Err("is empty, must have the password".to_owned()) } else { Ok(password.to_owned()) }
}

#[pymethods]
impl EtcdOptions {
    /// Describe a cluster. Nothing is connected to.
    #[new]
    #[pyo3(signature = (endpoints, *, protocol = None, cacert = None, cert = None, key = None, username = None, password = None,
        password_file = None, key_prefix = DEFAULT_KEY_PREFIX, read_timeout_s = 60.0))]
    #[expect(clippy::too_many_arguments, reason = "one named argument per property")]
    fn new(
        endpoints: &str,
        protocol: Option<&str>,
        cacert: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        username: Option<String>,
        password: Option<String>,
        password_file: Option<PathBuf>,
        key_prefix: &str,
        read_timeout_s: f64,
    ) -> PyResult<Self> {
        let tls = TlsFiles { ca: cacert, cert, key };
        let read_timeout = seconds("read_timeout_s", read_timeout_s)?;
        let asked = Asked { protocol, tls, username, password, password_file, key_prefix, read_timeout };
        Self::check(endpoints, asked).map_err(PyValueError::new_err)
    }

    /// The cluster that ``endpoints`` (``--rdzv-endpoint``) and ``config`` (``--rdzv-conf``) name. Raises as the constructor.
    #[staticmethod]
    fn of_config(endpoints: &str, config: &RendezvousConfig) -> PyResult<Self> {
        let Conf { protocol, cacert, cert, key, username, password_file, key_prefix, read_timeout, .. } = &config.0;
        let path = |file: &Option<String>| file.as_ref().map(PathBuf::from);
        let asked = Asked {
            protocol: protocol.map(|protocol| if protocol == Protocol::Https { "https" } else { "http" }),
            tls: TlsFiles { ca: path(cacert), cert: path(cert), key: path(key) },
            username: username.clone(),
            password: None,
            password_file: path(password_file),
            key_prefix,
            read_timeout: *read_timeout,
        };
        Self::check(endpoints, asked)
            .map_err(|text| PyValueError::new_err(format!("--rdzv-endpoint, --rdzv-conf: {text}")))
    }

    /// The members in words: ``HOST:PORT,...``.
    #[getter]
    fn endpoints(&self) -> String {
        self.client.endpoints.to_string()
    }

    /// Host and port of each member.
    #[getter]
    fn members(&self) -> Vec<(String, u16)> {
        self.client.endpoints.members.clone()
    }

    /// Whether members are spoken to over TLS.
    #[getter]
    fn tls(&self) -> bool {
        self.client.endpoints.tls
    }

    /// The user, if there is one.
    #[getter]
    fn username(&self) -> Option<&str> {
        self.client.credentials.as_ref().map(|user| user.username.as_str())
    }

    /// Beginning of all keys, without slashes at its end.
    #[getter]
    fn key_prefix(&self) -> &str {
        &self.key_prefix
    }

    /// Time limit of each request, in seconds.
    #[getter]
    fn read_timeout_s(&self) -> f64 {
        self.read_timeout.as_secs_f64()
    }

    /// The address of this machine from which it reaches the cluster. None if that is loopback, or if no member's name has an
    /// address. Names are looked up for at most ``timeout_s``.
    #[pyo3(signature = (*, timeout_s))]
    fn source_address(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<String>> {
        let deadline = Instant::now() + seconds("timeout_s", timeout_s)?;
        let source = block_on(py, source_towards(&self.client.endpoints.members, deadline))?;
        Ok(source.map(|ip| ip.to_string()))
    }

    /// Beginning of the keys that PyTorch's agents share in the job ``run_id``. Outside of what the nodes watch.
    fn agents_store(&self, run_id: &str) -> String {
        keys::agents_store(&self.key_prefix, run_id)
    }

    fn __repr__(&self) -> String {
        format!("EtcdOptions({:?}, key_prefix={:?})", self.endpoints(), self.key_prefix)
    }
}
