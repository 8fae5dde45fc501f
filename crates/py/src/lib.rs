//! The Python binding: `elastic_rs._elastic_rs`. Each function converts its arguments, calls the core, converts back.

use pyo3::prelude::*;

/// The compiled half of the package `elastic_rs`.
#[pymodule]
mod _elastic_rs {}
