//! `EtcdClient`: a client of an etcd cluster, for stores and for the doctor.

use std::future::Future;
use std::time::Duration;

use elastic_rs::etcd_client::{Client, EtcdError, MemberLook};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::time::{Instant, sleep, timeout_at};

use crate::conf::seconds;
use crate::errors;
use crate::etcd::EtcdOptions;
use crate::runtime::block_on;
use crate::store_client::Text;

/// How long to wait between attempts while no member serves a request.
const PAUSE: Duration = Duration::from_millis(200);

/// A client of an etcd cluster. Keys are ``str`` (sent as UTF-8) or ``bytes``.
///
/// A request is repeated until a member serves it, for at most ``read_timeout_s`` of the options. Exceptions are in
/// ``elastic_rs.errors``, and each is also a builtin one: ``EtcdPermissionError`` for a user without the right or with a wrong password,
/// ``EtcdConnectionError`` if no member serves, ``EtcdLeaseError`` (a ``LookupError``) for a lease that does not exist, and
/// ``EtcdError`` (an ``OSError``) for other answers of etcd.
///
/// Args:
///     options: the cluster. It is connected to on first use.
///
/// Raises:
///     ValueError: a file for TLS cannot be used.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct EtcdClient {
    client: Client,
    options: EtcdOptions,
}

#[pymethods]
impl EtcdClient {
    /// Make a client of the cluster that ``options`` names.
    #[new]
    fn new(options: EtcdOptions) -> PyResult<Self> {
        Ok(Self { client: options.client()?, options })
    }

    /// The cluster.
    #[getter]
    fn options(&self) -> EtcdOptions {
        self.options.clone()
    }

    /// Return the value of ``key`` and the revision of its last change; None and 0 if there is no such key. The third is the revision
    /// of the store.
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

    /// Store ``value`` under ``key``, with ``lease`` if that is not 0. Return the revision.
    #[pyo3(signature = (key, value, *, lease = 0))]
    fn put(&self, py: Python<'_>, key: Text, value: Text, lease: u64) -> PyResult<u64> {
        self.patiently(py, || self.client.put(key.as_ref(), value.as_ref(), lease))
    }

    /// Delete ``key``. True if it was there.
    fn delete(&self, py: Python<'_>, key: Text) -> PyResult<bool> {
        self.patiently(py, || self.client.delete(key.as_ref())).map(|deleted| deleted > 0)
    }

    /// Store ``value`` under ``key``, with ``lease`` if that is not 0, if ``expect`` is the revision of the key's last change (0: there is
    /// no such key). Return whether it was stored, the value that is there now, and the revision of its last change; None and 0 if there
    /// is none.
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
        let began = Instant::now();
        let put = || self.client.compare_and_put(key.as_ref(), expect, value.as_ref(), lease);
        match self.wait_out(py, |error| matches!(error, EtcdError::Unavailable(_)), put)? {
            Ok(Ok(revision)) => Ok(Some((true, Some(PyBytes::new(py, value.as_ref())), revision))),
            Ok(Err(Some(there))) => Ok(Some((false, Some(PyBytes::new(py, &there.value)), there.modified))),
            Ok(Err(None)) => Ok(Some((false, None, 0))),
            Err(EtcdError::Unknown(_)) => Ok(None),
            Err(error) => Err(errors::from_etcd(py, &error, began.elapsed())),
        }
    }

    /// Wait until all ``keys`` are there, at most ``timeout_s`` seconds. Return those that are missing.
    ///
    /// Raises ``EtcdConnectionError`` if no member serves when the time is over.
    #[pyo3(signature = (keys, *, timeout_s))]
    fn wait<'py>(&self, py: Python<'py>, keys: Vec<Text>, timeout_s: f64) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let began = Instant::now();
        let deadline = began + seconds("timeout_s", timeout_s)?;
        let missing = block_on(py, self.missing(&keys, deadline))?
            .map_err(|error| errors::from_etcd(py, &error, began.elapsed()))?;
        Ok(missing.into_iter().map(|key| PyBytes::new(py, key)).collect())
    }

    /// Grant a lease of ``ttl_s`` seconds, which etcd rounds up to whole seconds. Nobody renews it.
    fn lease_grant(&self, py: Python<'_>, ttl_s: f64) -> PyResult<u64> {
        let ttl = seconds("ttl_s", ttl_s)?;
        self.patiently(py, || self.client.lease_grant(ttl))
    }

    /// End ``lease``. Its keys are deleted.
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
        let began = Instant::now();
        self.wait_out(py, may_pass, call)?.map_err(|error| errors::from_etcd(py, &error, began.elapsed()))
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
        let deadline = Instant::now() + self.options.read_timeout();
        block_on(py, async {
            loop {
                match call().await {
                    Err(error) if may_pass(&error) && Instant::now() + PAUSE < deadline => sleep(PAUSE).await,
                    done => return done,
                }
            }
        })
    }

    /// The keys that are not there, once all are, or at the deadline. Each is looked at, however little time there is.
    async fn missing<'a>(&self, keys: &'a [Text], deadline: Instant) -> Result<Vec<&'a [u8]>, EtcdError> {
        let mut missing: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        while let Some(key) = missing.first() {
            match self.look_until(key, deadline).await {
                Ok(Looked::There) => _ = missing.remove(0),
                Ok(Looked::Changed) => {}
                Ok(Looked::Late) => break,
                Err(error) => {
                    if !may_pass(&error) || timeout_at(deadline, sleep(PAUSE)).await.is_err() {
                        return Err(error);
                    }
                }
            }
        }
        let mut absent = Vec::new();
        for key in missing {
            if self.client.get(key).await?.0.is_none() {
                absent.push(key);
            }
        }
        Ok(absent)
    }

    /// Look at a key. If it is not there, wait for a change.
    async fn look_until(&self, key: &[u8], deadline: Instant) -> Result<Looked, EtcdError> {
        let (found, revision) = self.client.get(key).await?;
        if found.is_some() {
            return Ok(Looked::There);
        }
        match timeout_at(deadline, self.client.changed(key, revision)).await {
            Ok(changed) => changed.map(|()| Looked::Changed),
            Err(_) => Ok(Looked::Late),
        }
    }
}

/// What a look at a key has found.
enum Looked {
    There,
    Changed,
    Late,
}

/// Whether a request that may be done twice is worth another attempt.
fn may_pass(error: &EtcdError) -> bool {
    matches!(error, EtcdError::Unavailable(_) | EtcdError::Unknown(_))
}
