//! `RendezvousConfig`: the values of `--rdzv-conf`, which the core's table of keys defines.

use std::time::Duration;

use elastic_rs::rendezvous::conf::{
    self, Allowed, Backend, Conf, ConfError, Given, KEYS, Key, Scope, Value, WITHOUT_EFFECT,
};
use elastic_rs::rendezvous::messages::settings::Settings;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt};

/// Convert seconds from Python. The error names the setting.
pub fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{name} is `{value}` seconds, must be zero or more: {error}")))
}

/// Convert an optional time limit as [`seconds`] does.
pub fn limit(name: &str, value: Option<f64>) -> PyResult<Option<Duration>> {
    value.map(|value| seconds(name, value)).transpose()
}

/// A key of ``--rdzv-conf``.
#[pyclass(frozen, get_all, module = "elastic_rs._elastic_rs")]
pub struct ConfKey {
    /// The key, as users write it.
    name: &'static str,
    /// Another spelling, which means the same.
    other: Option<&'static str>,
    /// The default as users would write it. None: it has none.
    default: Option<String>,
    /// The allowed values: the words after "must be".
    allowed: String,
    /// Whether it is a duration, in seconds.
    is_duration: bool,
    /// The one backend that has it. None: all have it.
    backend: Option<&'static str>,
    /// Why other backends have no use for it.
    why: Option<&'static str>,
    /// What it does.
    help: &'static str,
}

impl ConfKey {
    fn new(
        name: &'static str,
        other: Option<&'static str>,
        default: Option<String>,
        (allowed, scope): (&Allowed, Scope),
        help: &'static str,
    ) -> Self {
        let (backend, why) = match scope {
            Scope::All => (None, None),
            Scope::Only(backend, why) => (Some(backend.name()), Some(why)),
        };
        let is_duration = matches!(allowed, Allowed::Seconds { .. });
        Self { name, other, default, allowed: allowed.to_string(), is_duration, backend, why, help: help.trim() }
    }
}

/// The values of ``--rdzv-conf``. Times are in seconds.
///
/// The constructor takes values by key, with defaults for the other keys. It does not check ranges, which a session does.
#[pyclass(frozen, eq, from_py_object, module = "elastic_rs._elastic_rs")]
#[derive(Clone, Debug, PartialEq)]
pub struct RendezvousConfig(pub Conf);

impl RendezvousConfig {
    /// The settings of a rendezvous with this minimum and maximum of nodes.
    pub fn settings(&self, (min_nodes, max_nodes): (u32, u32)) -> Settings {
        self.0.settings(min_nodes, max_nodes)
    }
}

#[pymethods]
impl RendezvousConfig {
    #[new]
    #[pyo3(signature = (**values: "float | bool | str | None"))]
    fn new(values: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        Self(Conf::default()).replace(values)
    }

    /// Check the user's values for ``backend``, ``rust-c10d`` or ``rust-etcd``. Values are texts or numbers; None counts as not given.
    ///
    /// Raises ``ValueError`` if a key is unknown (the nearest known one is named) or without a meaning for the backend, or if a value
    /// is not allowed.
    #[staticmethod]
    #[pyo3(signature = (given: "dict[str, object]", *, backend))]
    fn from_mapping(given: &Bound<'_, PyDict>, backend: &str) -> PyResult<Self> {
        let backend = backend_named(backend)?;
        let entries: Vec<(String, Shown)> = given
            .iter()
            .filter(|(_, value)| !value.is_none())
            .map(|(key, value)| Ok((key.extract()?, Shown::of(&value)?)))
            .collect::<PyResult<_>>()?;
        let read = Conf::read(backend, entries.iter().map(|(key, value)| (key.as_str(), value.given())));
        read.map(Self).map_err(|error| match &error {
            ConfError::Unknown(key) => match hint(given.py(), backend, key) {
                Ok(hint) => PyValueError::new_err(format!("{error}: {hint}")),
                Err(error) => error,
            },
            ConfError::Refused(text) => PyValueError::new_err(text.clone()),
        })
    }

    /// Return a copy with other values. Ranges are not checked.
    #[pyo3(signature = (**values: "float | bool | str | None"))]
    fn replace(&self, values: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut conf = self.0.clone();
        for (name, value) in values.into_iter().flatten() {
            let name: String = name.extract()?;
            conf.set(&name, value_of(&name, &value)?).map_err(PyTypeError::new_err)?;
        }
        Ok(Self(conf))
    }

    /// All keys that have an effect.
    #[staticmethod]
    fn table() -> Vec<ConfKey> {
        let default = Conf::default();
        let row = |key: &'static Key| {
            let value = key.get(&default);
            let default = (value != Value::Nothing).then(|| value.to_string());
            ConfKey::new(key.name, key.or, default, (&key.allowed, key.scope), key.help)
        };
        KEYS.iter().map(row).collect()
    }

    /// The keys of PyTorch's that are checked and have no effect here.
    #[staticmethod]
    fn without_effect() -> Vec<ConfKey> {
        let row = |(name, allowed, scope): &(&'static str, Allowed, Scope)| {
            ConfKey::new(name, None, None, (allowed, *scope), "checked, without effect")
        };
        WITHOUT_EFFECT.iter().map(row).collect()
    }

    /// The keys that have a meaning for ``backend``, ``rust-c10d`` or ``rust-etcd``, in all spellings, sorted.
    ///
    /// Raises ``ValueError`` for another backend.
    #[staticmethod]
    fn known(backend: &str) -> PyResult<Vec<&'static str>> {
        Ok(conf::known(backend_named(backend)?))
    }

    /// Return all values by their keys. None: the key was not given and has no default.
    #[pyo3(signature = () -> "dict[str, float | int | bool | str | None]")]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let values = PyDict::new(py);
        for key in KEYS {
            match key.get(&self.0) {
                Value::Nothing => values.set_item(key.name, py.None())?,
                Value::Seconds(time) => values.set_item(key.name, time.as_secs_f64())?,
                Value::Whole(number) => values.set_item(key.name, number)?,
                Value::Truth(truth) => values.set_item(key.name, truth)?,
                value @ Value::Codes(_) => values.set_item(key.name, value.to_string())?,
                Value::Word(word) => values.set_item(key.name, word)?,
                Value::Text(text) => values.set_item(key.name, text)?,
            }
        }
        Ok(values)
    }

    /// Whether workers reach the store of rank 0's node through their agents. None: the user has not said so.
    #[getter]
    fn store_tunnel(&self) -> Option<bool> {
        self.0.store_tunnel
    }

    /// Check whether the protection of the workers' store that is wanted, ``store_tunnel`` or ``store_members=strict``, is possible.
    /// ``is_protected``: the job has a token or certificates. ``own_store``: each round has a store, which the agent of rank 0's node
    /// serves.
    ///
    /// Raises ``ValueError`` if it is not.
    #[pyo3(signature = (*, is_protected, own_store))]
    fn check_workers_store(&self, is_protected: bool, own_store: bool) -> PyResult<()> {
        self.0.check_workers_store(is_protected, own_store).map_err(PyValueError::new_err)
    }

    /// Time limit of a join, in seconds.
    #[getter]
    fn join_timeout(&self) -> f64 {
        self.0.join_timeout.as_secs_f64()
    }

    /// Time limit of telling the other nodes that the job is over, in seconds.
    #[getter]
    fn close_timeout(&self) -> f64 {
        self.0.close_timeout.as_secs_f64()
    }

    /// How long this process may serve other nodes at the end, in seconds.
    #[getter]
    fn drain_timeout(&self) -> f64 {
        self.0.drain_timeout.as_secs_f64()
    }

    /// Time limit of each operation of the store that the agents share, in seconds.
    #[getter]
    fn read_timeout(&self) -> f64 {
        self.0.read_timeout.as_secs_f64()
    }

    /// How long to wait for the other nodes' workers, in seconds. None: for as long as they run.
    #[getter]
    fn exit_barrier_timeout(&self) -> Option<f64> {
        self.0.exit_barrier_timeout.map(|limit| limit.as_secs_f64())
    }

    /// True: this process must host the coordinator. False: it must not. None: it does if it can.
    #[getter]
    fn is_host(&self) -> Option<bool> {
        self.0.is_host
    }

    /// The rank that this node requests.
    #[getter]
    fn node_rank(&self) -> Option<u32> {
        self.0.node_rank
    }

    /// Whether our agent runs the workers: ``agent`` is ``rust``.
    #[getter]
    fn wants_agent(&self) -> bool {
        self.0.agent == conf::Agent::Rust
    }

    /// Whether restarts are counted for the job: ``restart_budget`` is ``job``.
    #[getter]
    fn job_counts(&self) -> bool {
        self.0.restart_budget == conf::RestartBudget::Job
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("RendezvousConfig({})", self.values(py)?.repr()?))
    }
}

fn backend_named(name: &str) -> PyResult<Backend> {
    Backend::named(name).ok_or_else(|| PyValueError::new_err(format!("`{name}` is not a backend with a table of keys")))
}

/// A user's value as text, and as the numbers to which Python converts it.
struct Shown {
    shown: String,
    number: f64,
    whole: Option<i64>,
}

impl Shown {
    fn of(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = value.py();
        let shown = value.str()?.extract()?;
        if value.is_instance_of::<PyBool>() {
            return Ok(Self { shown, number: f64::NAN, whole: None });
        }
        let number = py.get_type::<PyFloat>().call1((value,)).and_then(|number| number.extract());
        let whole = py.get_type::<PyInt>().call1((value,)).and_then(|number| number.extract());
        Ok(Self { shown, number: number.unwrap_or(f64::NAN), whole: whole.ok() })
    }

    fn given(&self) -> Given<'_> {
        Given { shown: &self.shown, number: self.number, whole: self.whole }
    }
}

/// Convert a value to the kind of its key.
fn value_of(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Nothing);
    }
    let Some(key) = Key::named(name) else { return Ok(Value::Nothing) };
    Ok(match key.allowed {
        Allowed::Seconds { .. } => Value::Seconds(seconds(name, value.extract()?)?),
        Allowed::Whole(..) => Value::Whole(value.extract()?),
        Allowed::Codes => conf::codes_of(&value.extract::<String>()?).map_or(Value::Nothing, Value::Codes),
        Allowed::Truth => Value::Truth(value.extract()?),
        Allowed::OneOf(choices) => {
            let word: String = value.extract()?;
            choices.iter().find(|known| **known == word).map_or(Value::Nothing, |known| Value::Word(known))
        }
        Allowed::Only(word, _) => Value::Word(word),
        Allowed::Text => Value::Text(value.extract()?),
    })
}

/// Suggest a known key for an unknown one.
fn hint(py: Python<'_>, backend: Backend, key: &str) -> PyResult<String> {
    let known = conf::known(backend);
    let near: Vec<String> = py.import("difflib")?.call_method1("get_close_matches", (key, &known, 1))?.extract()?;
    Ok(near.first().map_or_else(|| format!("known are {}", known.join(", ")), |near| format!("did you mean `{near}`?")))
}
