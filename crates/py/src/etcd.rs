//! `EtcdOptions` and `EtcdClient`: an etcd cluster, for sessions over it and for stores.

use std::fs::File;
use std::future::Future;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elastic_rs::etcd::{self, Client, ClientOptions, Credentials, EtcdError, MemberLook, PATIENCE, Password, TlsFiles};
use elastic_rs::net::local::source_towards;
use elastic_rs::rendezvous::conf::{Conf, DEFAULT_KEY_PREFIX, PASSWORD_VARIABLE, Protocol};
use elastic_rs::rendezvous::etcd::keys;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::time::{Instant, sleep, timeout_at};

use crate::conf::{RendezvousConfig, seconds};
use crate::errors;
use crate::runtime::block_on;
use crate::store_client::Text;

/// Most bytes of a password's file. bcrypt, with which etcd keeps passwords, takes 72.
const PASSWORD_LIMIT_BYTES: u64 = 4096;
/// How long to wait between attempts while no member serves a request.
const PAUSE: Duration = Duration::from_millis(200);

/// An etcd cluster: where it is, and how to speak to it.
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

    fn check(endpoints: &str, asked: Asked<'_>) -> Result<Self, String> {
        let endpoints = if endpoints.trim().is_empty() { "localhost" } else { endpoints };
        let endpoints = etcd::parse_endpoints(endpoints, asked.protocol)?;
        let mut tls = asked.tls;
        // As with PyTorch's backends, one file may hold both.
        tls.key = tls.key.or_else(|| tls.cert.clone());
        let credentials = credentials(asked.username, asked.password, asked.password_file.as_deref())?;
        let key_prefix = asked.key_prefix.trim_end_matches('/').to_owned();
        let patience = PATIENCE.min(asked.read_timeout);
        let client = ClientOptions { tls, credentials, patience, ..ClientOptions::new(endpoints) };
        // Files that cannot be used are told now.
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
    let opened = File::open(file).map_err(|error| format!("cannot be read: {error}"))?;
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
    /// ``endpoints`` are the members, as ``HOST[:PORT],...``, each with or without ``http://`` or ``https://``; empty: this machine.
    /// ``cacert``, ``cert`` and ``key`` are files for TLS. A user's password is given, or in a file, or in the variable
    /// ``ELASTIC_RS_ETCD_PASSWORD``.
    ///
    /// Raises ``ValueError`` if something is not allowed, or a file cannot be read. A password is never shown.
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

    /// The cluster that ``--rdzv-endpoint`` and ``--rdzv-conf`` name. Raises as the constructor.
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

    /// Beginning of the keys that PyTorch's agents share in this job. Outside of what the nodes watch.
    fn agents_store(&self, run_id: &str) -> String {
        keys::agents_store(&self.key_prefix, run_id)
    }

    fn __repr__(&self) -> String {
        format!("EtcdOptions({:?}, key_prefix={:?})", self.endpoints(), self.key_prefix)
    }
}

/// A client of an etcd cluster. Keys are ``str`` (sent as UTF-8) or ``bytes``.
///
/// A request is repeated until a member serves it, for at most ``read_timeout_s`` of the options. Raises ``PermissionError`` for a user
/// without the right or with a wrong password, ``ConnectionError`` if no member serves, ``LookupError`` for a lease that does not exist,
/// and ``OSError`` for other answers of etcd.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct EtcdClient {
    client: Client,
    options: EtcdOptions,
}

#[pymethods]
impl EtcdClient {
    /// Connects on first use. Raises ``ValueError`` if a file for TLS cannot be used.
    #[new]
    fn new(options: EtcdOptions) -> PyResult<Self> {
        Ok(Self { client: options.client()?, options })
    }

    /// The cluster.
    #[getter]
    fn options(&self) -> EtcdOptions {
        self.options.clone()
    }

    /// Return a key's value and the revision of its last change; None and 0 if there is no such key. The third is the revision of
    /// the store.
    fn get<'py>(&self, py: Python<'py>, key: Text) -> PyResult<(Option<Bound<'py, PyBytes>>, u64, u64)> {
        let (found, revision) = self.patiently(py, || self.client.get(key.as_ref()))?;
        let modified = found.as_ref().map_or(0, |found| found.modified);
        Ok((found.map(|found| PyBytes::new(py, &found.value)), modified, revision))
    }

    /// Return all keys that begin with ``prefix``: key, value, and the revision of its last change. All are of one moment.
    #[expect(clippy::type_complexity, reason = "what Python gets: a list of tuples")]
    fn range<'py>(
        &self,
        py: Python<'py>,
        prefix: Text,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>, u64)>> {
        let (found, _) = self.patiently(py, || self.client.range(prefix.as_ref()))?;
        Ok(found.iter().map(|kv| (PyBytes::new(py, &kv.key), PyBytes::new(py, &kv.value), kv.modified)).collect())
    }

    /// Store a value, with a lease if one is given. Return the revision.
    #[pyo3(signature = (key, value, *, lease = 0))]
    fn put(&self, py: Python<'_>, key: Text, value: Text, lease: u64) -> PyResult<u64> {
        self.patiently(py, || self.client.put(key.as_ref(), value.as_ref(), lease))
    }

    /// Delete a key. True if it was there.
    fn delete(&self, py: Python<'_>, key: Text) -> PyResult<bool> {
        self.patiently(py, || self.client.delete(key.as_ref())).map(|deleted| deleted > 0)
    }

    /// Store a value if ``expect`` is the revision of the key's last change (0: there is no such key). Return whether it was stored,
    /// the value that is there now, and the revision of its last change; None and 0 if there is none.
    ///
    /// None: no member answered, and the value may have been stored.
    #[pyo3(signature = (key, expect, value, *, lease = 0))]
    #[expect(clippy::type_complexity, reason = "what Python gets: a tuple")]
    fn compare_and_put<'py>(
        &self,
        py: Python<'py>,
        key: Text,
        expect: u64,
        value: Text,
        lease: u64,
    ) -> PyResult<Option<(bool, Option<Bound<'py, PyBytes>>, u64)>> {
        let put = || self.client.compare_and_put(key.as_ref(), expect, value.as_ref(), lease);
        match self.wait_out(py, |error| matches!(error, EtcdError::Unavailable(_)), put)? {
            Ok(Ok(revision)) => Ok(Some((true, Some(PyBytes::new(py, value.as_ref())), revision))),
            Ok(Err(Some(there))) => Ok(Some((false, Some(PyBytes::new(py, &there.value)), there.modified))),
            Ok(Err(None)) => Ok(Some((false, None, 0))),
            Err(EtcdError::Unknown(_)) => Ok(None),
            Err(error) => Err(errors::from_etcd(&error)),
        }
    }

    /// Wait until all keys are there, at most ``timeout_s``. Return those that are missing.
    ///
    /// Raises ``ConnectionError`` if no member serves when the time is over.
    #[pyo3(signature = (keys, *, timeout_s))]
    fn wait<'py>(&self, py: Python<'py>, keys: Vec<Text>, timeout_s: f64) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let deadline = Instant::now() + seconds("timeout_s", timeout_s)?;
        let missing = block_on(py, self.missing(&keys, deadline))?.map_err(|error| errors::from_etcd(&error))?;
        Ok(missing.into_iter().map(|key| PyBytes::new(py, key)).collect())
    }

    /// Grant a lease of ``ttl_s``, which etcd rounds up to whole seconds. Nobody renews it.
    fn lease_grant(&self, py: Python<'_>, ttl_s: f64) -> PyResult<u64> {
        let ttl = seconds("ttl_s", ttl_s)?;
        self.patiently(py, || self.client.lease_grant(ttl))
    }

    /// End a lease. Its keys are deleted.
    fn lease_revoke(&self, py: Python<'_>, lease: u64) -> PyResult<()> {
        self.patiently(py, || self.client.lease_revoke(lease))
    }

    /// Ask each endpoint once, all at the same time. Also return the members that the cluster lists: name, URLs for clients, and
    /// whether it only learns. Raises nothing for a member that does not answer.
    #[expect(clippy::type_complexity, reason = "what Python gets: a tuple of lists")]
    fn look(&self, py: Python<'_>) -> PyResult<(Vec<EtcdMember>, Vec<(String, Vec<String>, bool)>)> {
        let look = block_on(py, self.client.look())?;
        let endpoints = look.endpoints.into_iter().map(|(endpoint, found)| EtcdMember::of(endpoint, found));
        let listed = look.members.into_iter().map(|member| (member.name, member.client_urls, member.is_learner));
        Ok((endpoints.collect(), listed.collect()))
    }
}

/// What an endpoint of etcd says of itself. If it does not answer, only ``endpoint`` and ``error`` mean something.
#[pyclass(frozen, module = "elastic_rs._elastic_rs", get_all)]
#[derive(Default)]
pub struct EtcdMember {
    /// Its host and port.
    endpoint: String,
    /// Why it does not answer.
    error: Option<String>,
    /// Its name.
    name: String,
    /// Its version.
    version: String,
    /// What is known to be wrong with this version.
    problems: Vec<String>,
    /// Whether it leads.
    is_leader: bool,
    /// Whether it knows a leader.
    knows_leader: bool,
    /// Whether it only learns, and serves nobody.
    is_learner: bool,
    /// Alarms that it has raised: ``NOSPACE``, ``CORRUPT``.
    alarms: Vec<String>,
    /// What it says is wrong with itself.
    errors: Vec<String>,
    /// Bytes of its database, and of what is in use there.
    db_bytes: (u64, u64),
    /// Time from a question to its answer, in seconds.
    round_trip_s: f64,
}

impl EtcdMember {
    fn of(endpoint: String, found: Result<MemberLook, EtcdError>) -> Self {
        let look = match found {
            Ok(look) => look,
            Err(error) => return Self { endpoint, error: Some(error.to_string()), ..Self::default() },
        };
        Self {
            endpoint,
            error: None,
            is_leader: look.is_leader(),
            knows_leader: look.leader != 0,
            name: look.name,
            version: look.version,
            problems: look.problems,
            is_learner: look.is_learner,
            alarms: look.alarms,
            errors: look.errors,
            db_bytes: look.db_size,
            round_trip_s: look.round_trip.as_secs_f64(),
        }
    }
}

impl EtcdClient {
    /// Call until a member has served the request. Only for requests that may be done twice.
    fn patiently<T, F>(&self, py: Python<'_>, call: impl Fn() -> F + Send + Sync) -> PyResult<T>
    where
        T: Send,
        F: Future<Output = Result<T, EtcdError>> + Send,
    {
        let may_pass = |error: &EtcdError| matches!(error, EtcdError::Unavailable(_) | EtcdError::Unknown(_));
        self.wait_out(py, may_pass, call)?.map_err(|error| errors::from_etcd(&error))
    }

    /// Call again after errors that may pass, for at most the options' time limit.
    fn wait_out<T, F>(
        &self,
        py: Python<'_>,
        may_pass: impl Fn(&EtcdError) -> bool + Send + Sync,
        call: impl Fn() -> F + Send + Sync,
    ) -> PyResult<Result<T, EtcdError>>
    where
        T: Send,
        F: Future<Output = Result<T, EtcdError>> + Send,
    {
        let deadline = Instant::now() + self.options.read_timeout;
        block_on(py, async {
            loop {
                match call().await {
                    Err(error) if may_pass(&error) && Instant::now() + PAUSE < deadline => sleep(PAUSE).await,
                    done => return done,
                }
            }
        })
    }

    /// The keys that are not there, once all are, or at the deadline.
    async fn missing<'a>(&self, keys: &'a [Text], deadline: Instant) -> Result<Vec<&'a [u8]>, EtcdError> {
        let mut missing: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let mut failed = None;
        while let Some(key) = missing.first() {
            let look = async {
                let (found, revision) = self.client.get(key).await?;
                if found.is_none() {
                    self.client.changed(key, revision).await?;
                }
                Ok(found.is_some())
            };
            match timeout_at(deadline, look).await {
                Ok(Ok(true)) => _ = missing.remove(0),
                // It has changed: look again.
                Ok(Ok(false)) => failed = None,
                Ok(Err(error @ (EtcdError::Unavailable(_) | EtcdError::Unknown(_)))) => {
                    failed = Some(error);
                    if timeout_at(deadline, sleep(PAUSE)).await.is_err() {
                        break;
                    }
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => break,
            }
        }
        match failed {
            Some(error) if !missing.is_empty() => Err(error),
            _ => Ok(missing),
        }
    }
}
