//! `Protection`: the token by which the sessions of a job are protected. `new_token`, `derived_token`: for the command line.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elastic_rs::secure::token::Token;
use elastic_rs::secure::{self, ProtectionError};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::conf::seconds;
use crate::runtime::block_on;

/// How the sessions of a job are protected: by a token that all its nodes hold.
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
    /// Use the token in this file. It is read again when it has changed.
    ///
    /// Raises ``ValueError`` if it cannot be read, if others may read it, or if it holds no token.
    #[staticmethod]
    fn by_file(path: PathBuf) -> PyResult<Self> {
        made(secure::Protection::by_file(&path))
    }

    /// Use the token of each run, derived from the master token in this file. For a coordinator that serves several jobs.
    ///
    /// Raises ``ValueError`` as :meth:`by_file`.
    #[staticmethod]
    fn by_master_file(path: PathBuf) -> PyResult<Self> {
        made(secure::Protection::by_master_file(&path))
    }

    /// Use this token.
    ///
    /// Raises ``ValueError`` if it is too short, or has characters that are not allowed.
    #[staticmethod]
    fn by_token(token: &str) -> PyResult<Self> {
        let token = Token::parse(token).map_err(PyValueError::new_err)?;
        made(secure::Protection::by_token(token))
    }

    /// The public ids of its tokens.
    #[getter]
    fn key_ids(&self) -> String {
        self.0.key_ids()
    }

    /// The token that this process shows, to be given to a process of the same job. It must not be shown.
    fn reveal(&self) -> String {
        self.0.reveal()
    }

    /// Try whether a coordinator at ``host:port`` holds the token for this run. None if both ends are proven, or the reason why not.
    #[pyo3(signature = (host, port, run_id, *, timeout_s))]
    fn try_at(&self, py: Python<'_>, host: &str, port: u16, run_id: &str, timeout_s: f64) -> PyResult<Option<String>> {
        let limit: Duration = seconds("timeout_s", timeout_s)?;
        let (protection, host, run_id) = (self.core(), host.to_owned(), run_id.to_owned());
        let tried = async move { protection.try_at(&host, port, &run_id, limit).await.err() };
        block_on(py, tried)
    }

    fn __repr__(&self) -> String {
        format!("Protection(key_ids={})", self.0.key_ids())
    }
}

fn made(made: Result<secure::Protection, ProtectionError>) -> PyResult<Protection> {
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
