//! The GPUs that the NVIDIA driver knows, by its management library (NVML, loaded on demand) or else by its files in `/proc`.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::Gpus;

/// Every driver installs this name. The name without the number belongs to the development package.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Has a folder for each GPU.
const FILES: &str = "/proc/driver/nvidia/gpus";

/// The GPUs of this machine.
///
/// # Errors
/// There is no driver, or it does not work. The text says what was tried, and how it failed.
pub fn gpus() -> Result<Gpus, String> {
    by_library().or_else(|error| by_files(Path::new(FILES)).ok_or_else(|| why_none(&error)))
}

/// Why there is no driver, or none that works. The loader's own message about a missing library would explain nothing.
fn why_none(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(cause) if cause.to_string().contains("No such file") => {
            format!("no NVIDIA driver is installed here (neither {LIBRARY} nor {FILES} exists)")
        }
        _ => format!("no NVIDIA driver answers ({error}; there is no {FILES})"),
    }
}

fn by_library() -> Result<Gpus, NvmlError> {
    let nvml = Nvml::builder().lib_path(OsStr::new(LIBRARY)).init()?;
    let mut gpus = Gpus::default();
    for number in 0..nvml.device_count()? {
        // A GPU that has fallen off the bus has an index, and nothing else.
        let device = nvml.device_by_index(number);
        gpus.uuids.push(device.as_ref().ok().and_then(|device| device.uuid().ok()).unwrap_or_default());
        if let Ok(device) = &device {
            gpus.mig_uuids.extend(parts(device));
        }
    }
    Ok(gpus)
}

fn parts(device: &Device<'_>) -> Vec<String> {
    // An error means that the GPU cannot be divided, or is not.
    let count = device.mig_device_count().unwrap_or_default();
    (0..count).filter_map(|number| device.mig_device_by_index(number).ok()?.uuid().ok()).collect()
}

/// Reads the driver's files. They do not list MIG instances.
fn by_files(folder: &Path) -> Option<Gpus> {
    let mut folders: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    folders.sort(); // by bus number, which is the driver's order
    let uuid = |text: String| text.lines().find_map(|line| Some(line.strip_prefix("GPU UUID:")?.trim().to_owned()));
    let uuids = folders.iter().map(|gpu| fs::read_to_string(gpu.join("information")).ok().and_then(uuid));
    Some(Gpus { uuids: uuids.map(Option::unwrap_or_default).collect(), ..Gpus::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_not_installed_is_said_without_the_loaders_words() {
        let missing = Nvml::builder().lib_path(OsStr::new("libelastic_rs-none.so.1")).init().unwrap_err();
        let said = why_none(&missing);
        assert!(said.starts_with("no NVIDIA driver is installed here (neither libnvidia-ml.so.1"), "{said}");
        assert!(!said.contains("shared object"), "{said}");
        let broken = why_none(&NvmlError::DriverNotLoaded);
        assert!(
            broken.starts_with("no NVIDIA driver answers (")
                && broken.contains(&NvmlError::DriverNotLoaded.to_string())
        );
    }

    #[test]
    fn the_drivers_files_tell_how_many_there_are() {
        let folder = std::env::temp_dir().join(format!("elastic_rs-gpus-{}", std::process::id()));
        for (bus, uuid) in [("0000:81:00.0", "GPU-2"), ("0000:01:00.0", "GPU-1")] {
            fs::create_dir_all(folder.join(bus)).unwrap();
            let text = format!("Model: \t\t NVIDIA H100\nIRQ:   \t\t 1\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n");
            fs::write(folder.join(bus).join("information"), text).unwrap();
        }
        assert_eq!(by_files(&folder).unwrap().uuids, ["GPU-1", "GPU-2"]);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(by_files(&folder), None);
    }
}
