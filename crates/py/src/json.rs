//! `parse_json`: JSON for processes that wait for each import. Python's `json` imports `re`.

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::Value;

/// Parse JSON as ``json.loads`` does.
///
/// Raises ``ValueError`` if it is none, or if it has a surrogate without the other half, which ``json`` accepts.
#[pyfunction]
pub fn parse_json<'py>(py: Python<'py>, text: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::from_slice(text).map_err(|error| PyValueError::new_err(format!("no JSON: {error}")))?;
    converted(py, value)
}

fn converted(py: Python<'_>, value: Value) -> PyResult<Bound<'_, PyAny>> {
    match value {
        Value::Null => Ok(py.None().into_bound(py)),
        Value::Bool(value) => value.into_bound_py_any(py),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => number.into_bound_py_any(py),
            (None, Some(number)) => number.into_bound_py_any(py),
            (None, None) => number.as_f64().into_bound_py_any(py),
        },
        Value::String(text) => text.into_bound_py_any(py),
        Value::Array(values) => {
            let list = PyList::empty(py);
            for value in values {
                list.append(converted(py, value)?)?;
            }
            Ok(list.into_any())
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            for (name, value) in entries {
                dict.set_item(name, converted(py, value)?)?;
            }
            Ok(dict.into_any())
        }
    }
}
