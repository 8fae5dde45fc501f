//! The GPUs that the NVIDIA driver knows, by its management library (NVML, loaded on demand) or else by its files in `/proc`.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::Gpu;

/// Every driver installs this name. The name without the number belongs to the development package.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Has a folder for each GPU.
const FILES: &str = "/proc/driver/nvidia/gpus";

/// The GPUs of this machine.
///
/// # Errors
/// There is no driver, or it does not work. The text says what was tried, and how it failed.
pub fn gpus() -> Result<Vec<Gpu>, String> {
    by_library().or_else(|error| by_files(Path::new(FILES)).ok_or_else(|| why_none(&error)))
}

pub(super) fn library() -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(OsStr::new(LIBRARY)).init()
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

fn by_library() -> Result<Vec<Gpu>, NvmlError> {
    let nvml = library()?;
    let mut gpus = Vec::new();
    for number in 0..nvml.device_count()? {
        // A GPU that has fallen off the bus has an index, and nothing else.
        gpus.push(nvml.device_by_index(number).map(|device| gpu(&device)).unwrap_or_default());
    }
    Ok(gpus)
}

fn gpu(device: &Device<'_>) -> Gpu {
    // NVML writes a domain of eight digits, in capitals: `00000000:DC:00.0`.
    let address = device.pci_info().ok().map(|pci| pci.bus_id.to_ascii_lowercase());
    let address = address.map(|it| it.strip_prefix("0000").filter(|_| it.len() == 16).unwrap_or(&it).to_owned());
    Gpu { uuid: device.uuid().unwrap_or_default(), address, mig_uuids: parts(device) }
}

fn parts(device: &Device<'_>) -> Vec<String> {
    // An error means that the GPU cannot be divided, or is not.
    let count = device.mig_device_count().unwrap_or_default();
    (0..count).filter_map(|number| device.mig_device_by_index(number).ok()?.uuid().ok()).collect()
}

/// Reads the driver's files. They do not list MIG instances.
fn by_files(folder: &Path) -> Option<Vec<Gpu>> {
    let mut folders: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    folders.sort(); // by bus number, which is the driver's order
    let uuid = |text: String| text.lines().find_map(|line| Some(line.strip_prefix("GPU UUID:")?.trim().to_owned()));
    let gpu = |folder: PathBuf| Gpu {
        uuid: fs::read_to_string(folder.join("information")).ok().and_then(uuid).unwrap_or_default(),
        address: folder.file_name().and_then(OsStr::to_str).map(str::to_owned),
        mig_uuids: Vec::new(),
    };
    Some(folders.into_iter().map(gpu).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_not_installed_is_said_without_the_loaders_words() {
        let missing = Nvml::builder().lib_path(OsStr::new("libelastic_rs-none.so.1")).init().unwrap_err();
        let text = why_none(&missing);
        assert!(text.starts_with("no NVIDIA driver is installed here (neither libnvidia-ml.so.1"), "{text}");
        assert!(!text.contains("shared object"), "{text}");
        let broken = why_none(&NvmlError::DriverNotLoaded);
        assert!(
            broken.starts_with("no NVIDIA driver answers (")
                && broken.contains(&NvmlError::DriverNotLoaded.to_string())
        );
    }

    #[test]
    fn the_drivers_files_show_how_many_there_are() {
        let folder = std::env::temp_dir().join(format!("elastic_rs-gpus-{}", std::process::id()));
        for (bus, uuid) in [("0000:81:00.0", "GPU-2"), ("0000:01:00.0", "GPU-1")] {
            fs::create_dir_all(folder.join(bus)).unwrap();
            let text = format!("Model: \t\t NVIDIA H100\nIRQ:   \t\t 1\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n");
            fs::write(folder.join(bus).join("information"), text).unwrap();
        }
        let found: Vec<_> =
            by_files(&folder).unwrap().into_iter().map(|gpu| (gpu.uuid, gpu.address.unwrap())).collect();
        assert_eq!(
            found,
            [("GPU-1", "0000:01:00.0"), ("GPU-2", "0000:81:00.0")].map(|(a, b)| (a.to_owned(), b.to_owned()))
        );
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(by_files(&folder), None);
    }
}
