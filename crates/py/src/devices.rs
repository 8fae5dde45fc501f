//! Which GPUs workers see, and which CPUs they are bound to.

use std::path::PathBuf;

use elastic_rs::devices::{Wanted, numa, nvidia, sysfs};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::runtime::detach;

/// Number of NVIDIA GPUs that a process sees with this ``CUDA_VISIBLE_DEVICES``, as of ``torch.cuda.device_count()``.
///
/// Raises ``RuntimeError`` if there is no driver, with what was tried.
#[pyfunction]
#[pyo3(signature = (cuda_visible_devices))]
pub fn visible_gpus(py: Python<'_>, cuda_visible_devices: Option<&str>) -> PyResult<usize> {
    let gpus = detach(py, nvidia::gpus).map_err(PyRuntimeError::new_err)?;
    Ok(Wanted::parse(cuda_visible_devices).visible(&gpus).len())
}

/// The CPUs to which workers are bound, by local rank: an empty list where a worker is not. With them, why some are bound otherwise
/// than was asked for, and all in words.
///
/// ``binding`` is ``node``, ``socket``, ``exclusive`` or ``core-complex``, as PyTorch's ``AffinityMode``. ``gpus`` are the PCI addresses
/// (``0000:dc:00.0``) of the GPUs that the workers see, in their order; without them workers are spread over the NUMA nodes. ``allowed`` are
/// the CPUs that they may use, those of this thread if it is None, and ``root`` is where ``/sys`` is.
///
/// Raises ``ValueError`` if there is no such binding.
#[pyfunction]
#[pyo3(signature = (binding, workers, gpus, *, allowed = None, root = PathBuf::from(sysfs::ROOT)))]
pub fn cpus_of_workers(
    binding: &str,
    workers: usize,
    gpus: Vec<String>,
    allowed: Option<Vec<u32>>,
    root: PathBuf,
) -> PyResult<(Vec<Vec<u32>>, Vec<String>, String)> {
    let binding = binding.parse().map_err(PyValueError::new_err)?;
    let nodes: Vec<u32> = gpus.iter().map(|address| sysfs::node_of(&root, address)).collect();
    let bound = numa::bind(binding, workers, &nodes, &sysfs::cpus(&root, &allowed.unwrap_or_else(sysfs::allowed)));
    let text = bound.to_string();
    Ok((bound.cpus, bound.notes, text))
}

/// The PCI addresses of the NVIDIA GPUs that a process sees with this ``CUDA_VISIBLE_DEVICES``, in its order. A GPU without a known
/// address is missing.
///
/// Raises ``RuntimeError`` if there is no driver, with what was tried.
#[pyfunction]
#[pyo3(signature = (cuda_visible_devices))]
pub fn gpu_addresses(py: Python<'_>, cuda_visible_devices: Option<&str>) -> PyResult<Vec<String>> {
    let gpus = detach(py, nvidia::gpus).map_err(PyRuntimeError::new_err)?;
    let visible = Wanted::parse(cuda_visible_devices).visible(&gpus);
    Ok(visible.into_iter().filter_map(|number| gpus[number].address.clone()).collect())
}
