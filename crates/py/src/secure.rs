//! `Protection`: the token and the certificates by which the sessions of a job are protected. `new_token`, `derived_token`: for the
//! command line.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use elastic_rs::secure::token::Token;
use elastic_rs::secure::{self, CertificateFiles, ProtectionError, ProtectionOptions, TokenSource};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::conf::seconds;
use crate::runtime::block_on;

/// Where a node's certificate is.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Certificates(CertificateFiles);

#[pymethods]
impl Certificates {
    /// Name the files: the certificate and those that lead to an authority, its key, and the authorities of the peers. They are read
    /// by :class:`Protection`.
    #[new]
    #[pyo3(signature = (*, cert, key, ca))]
    fn new(cert: PathBuf, key: PathBuf, ca: PathBuf) -> Self {
        Self(CertificateFiles { cert, key, ca })
    }

    fn __repr__(&self) -> String {
        format!("Certificates(cert={:?})", self.0.cert)
    }
}

/// How the sessions of a job are protected: by a token that all its nodes hold, by certificates of one authority, or by both.
#[pyclass(frozen, module = "elastic_rs._elastic_rs")]
pub struct Protection(Arc<secure::Protection>);

impl Protection {
    /// The core's.
    pub fn core(&self) -> Arc<secure::Protection> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl Protection {
    /// Use the token in this file. It is read again when it has changed, and so are those of ``certificates``.
    ///
    /// Raises ``ValueError`` if a file cannot be read, if others may read it, or if it does not hold what it should.
    #[staticmethod]
    #[pyo3(signature = (path, *, certificates = None))]
    fn by_file(path: PathBuf, certificates: Option<&Certificates>) -> PyResult<Self> {
        made(Some(TokenSource::File(path)), certificates)
    }

    /// Use the token of each run, derived from the master token in this file. For a coordinator that serves several jobs.
    ///
    /// Raises ``ValueError`` as :meth:`by_file`.
    #[staticmethod]
    #[pyo3(signature = (path, *, certificates = None))]
    fn by_master_file(path: PathBuf, certificates: Option<&Certificates>) -> PyResult<Self> {
        made(Some(TokenSource::Master(path)), certificates)
    }

    /// Use this token.
    ///
    /// Raises ``ValueError`` if it is too short, or has characters that are not allowed, or as :meth:`by_file`.
    #[staticmethod]
    #[pyo3(signature = (token, *, certificates = None))]
    fn by_token(token: &str, certificates: Option<&Certificates>) -> PyResult<Self> {
        let token = Token::parse(token).map_err(PyValueError::new_err)?;
        made(Some(TokenSource::Memory(token)), certificates)
    }

    /// Use certificates alone.
    ///
    /// Raises ``ValueError`` as :meth:`by_file`.
    #[staticmethod]
    fn by_certificates(certificates: &Certificates) -> PyResult<Self> {
        made(None, Some(certificates))
    }

    /// The public ids of its tokens. None: it has certificates alone.
    #[getter]
    fn key_ids(&self) -> Option<String> {
        self.0.key_ids()
    }

    /// What its certificate says, for people. None: it has a token alone.
    #[getter]
    fn certificate(&self) -> Option<String> {
        self.0.certificate().map(|shown| shown.to_string())
    }

    /// The days that its certificate is still valid. None: it has a token alone.
    #[getter]
    fn days_left(&self) -> Option<f64> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        self.0.certificate().map(|shown| (shown.valid.1 as f64 - now) / 86400.0)
    }

    /// What an operator has to know now about certificates that end soon, one sentence for each.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.0.warnings()
    }

    /// What this process proves itself by, for people.
    #[getter]
    fn text(&self) -> String {
        self.0.text()
    }

    /// The token that this process shows, to be given to a process of the same job. It must not be shown. None: it has certificates
    /// alone.
    fn reveal(&self) -> Option<String> {
        self.0.reveal()
    }

    /// Try whether a coordinator at ``address:port`` and this process are proven to each other for this run. A certificate of the
    /// coordinator has to be for ``host``. None if they are, or the reason why not.
    #[pyo3(signature = (address, port, host, run_id, *, timeout_s))]
    fn try_at(
        &self,
        py: Python<'_>,
        address: &str,
        port: u16,
        host: &str,
        run_id: &str,
        timeout_s: f64,
    ) -> PyResult<Option<String>> {
        let limit: Duration = seconds("timeout_s", timeout_s)?;
        let protection = self.core();
        let [address, host, run_id] = [address, host, run_id].map(str::to_owned);
        let tried = async move { protection.try_at(&address, port, &host, &run_id, limit).await.err() };
        block_on(py, tried)
    }

    fn __repr__(&self) -> String {
        format!("Protection({})", self.0.text())
    }
}

fn made(token: Option<TokenSource>, certificates: Option<&Certificates>) -> PyResult<Protection> {
    let certificates = certificates.map(|files| files.0.clone());
    let options = ProtectionOptions { token, certificates, ..ProtectionOptions::default() };
    let made: Result<_, ProtectionError> = secure::Protection::new(options);
    made.map(|protection| Protection(Arc::new(protection))).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Return a new token of 256 bits, as hexadecimal digits.
///
/// Raises ``OSError`` if the system has no randomness.
#[pyfunction]
pub fn new_token() -> PyResult<String> {
    Token::random().map(|token| token.reveal().to_owned()).map_err(PyOSError::new_err)
}

/// Return the token that is derived from another one: for a run, or for observers.
///
/// Raises ``ValueError`` if the other one is no token.
#[pyfunction]
#[pyo3(signature = (token, *, run_id = None, observer = false))]
pub fn derived_token(token: &str, run_id: Option<&str>, observer: bool) -> PyResult<String> {
    let mut token = Token::parse(token).map_err(PyValueError::new_err)?;
    if let Some(run_id) = run_id {
        token = token.for_run(run_id);
    }
    if observer {
        token = token.for_observers();
    }
    Ok(token.reveal().to_owned())
}
