//! Which GPUs workers use, and which CPUs are near them, without PyTorch: `--nproc-per-node=gpu`, `--numa-binding`.
//!
//! Owns the rules by which `CUDA_VISIBLE_DEVICES` selects from the GPUs of a machine ([`Wanted`]). [`nvidia`] lists those.
//! The count equals torch's: `_parse_visible_devices` and `_device_count_nvml` in `torch/cuda/__init__.py` (2.15). [`numa`] has the rules
//! by which workers are bound to CPUs, [`sysfs`] reads what there is. [`illness`] says whether GPUs work.

#[cfg(feature = "io")]
pub mod illness;
pub mod numa;
#[cfg(feature = "io")]
pub mod nvidia;
#[cfg(feature = "io")]
pub mod sysfs;

/// A GPU of this machine. A list of them is in the driver's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// `GPU-…`. Empty if it has fallen off the bus.
    pub uuid: String,
    /// Its PCI address as the kernel writes it, `0000:dc:00.0`, if known.
    pub address: Option<String>,
    /// UUIDs (`MIG-…`) of the MIG instances that it is divided into.
    pub mig_uuids: Vec<String>,
}

/// The value of `CUDA_VISIBLE_DEVICES`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// It is not set.
    All,
    /// Numbers in the driver's order.
    Numbers(Vec<usize>),
    /// UUIDs, or prefixes of them.
    Uuids(Vec<String>),
    /// UUIDs of MIG instances.
    Mig(Vec<String>),
}

impl Wanted {
    /// Parses the variable as the driver does. The first invalid entry ends the list. An entry that is given twice hides all GPUs.
    pub fn parse(variable: Option<&str>) -> Self {
        let Some(variable) = variable else { return Self::All };
        if variable.starts_with(GPU) {
            return Self::Uuids(with_prefix(variable, GPU));
        }
        if variable.starts_with(MIG) {
            return Self::Mig(with_prefix(variable, MIG));
        }
        let mut numbers = Vec::new();
        for number in variable.split(',').map_while(leading_number) {
            if numbers.contains(&number) {
                return Self::Numbers(Vec::new());
            }
            numbers.push(number);
        }
        Self::Numbers(numbers)
    }

    /// The GPUs that a process sees, as its devices 0, 1, …: their numbers in the driver's order.
    pub fn visible(&self, gpus: &[Gpu]) -> Vec<usize> {
        match self {
            Self::All => (0..gpus.len()).collect(),
            Self::Numbers(numbers) => numbers.iter().copied().take_while(|number| *number < gpus.len()).collect(),
            Self::Uuids(begins) => {
                let uuids = || gpus.iter().map(|gpu| &*gpu.uuid).enumerate();
                let mut found = Vec::new();
                for number in begins.iter().map_while(|begin| only_one(begin, uuids())) {
                    if found.contains(&number) {
                        return Vec::new();
                    }
                    found.push(number);
                }
                found
            }
            // PyTorch asks CUDA in this case. CUDA shows a process one MIG instance, the first that is named.
            Self::Mig(begins) => {
                let parts =
                    |(number, gpu): (usize, &'_ Gpu)| gpu.mig_uuids.clone().into_iter().map(move |uuid| (number, uuid));
                let instances: Vec<_> = gpus.iter().enumerate().flat_map(parts).collect();
                let uuids = || instances.iter().map(|(number, uuid)| (*number, &**uuid));
                begins.iter().take(1).filter_map(|begin| only_one(begin, uuids())).collect()
            }
        }
    }
}

const GPU: &str = "GPU-";
const MIG: &str = "MIG-";

fn with_prefix(list: &str, prefix: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for entry in list.split(',') {
        if found.iter().any(|known| known == entry) {
            return Vec::new();
        }
        if !entry.starts_with(prefix) {
            break;
        }
        found.push(entry.to_owned());
    }
    found
}

/// Parses as `strtoul(3)` does: `1gpu` is 1. `None` if the text does not begin with a number, or the number is negative.
fn leading_number(text: &str) -> Option<usize> {
    let text = text.trim();
    let digits = text.strip_prefix('+').unwrap_or(text);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// The number of the entry of `all` with this prefix, if there is exactly one.
fn only_one<'a>(begin: &str, all: impl Iterator<Item = (usize, &'a str)>) -> Option<usize> {
    let mut found = all.filter(|(_, uuid)| uuid.starts_with(begin)).map(|(number, _)| number);
    let first = found.next();
    if found.next().is_some() { None } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four GPUs, the last of which is divided into two parts.
    fn gpus() -> Vec<Gpu> {
        let mut gpus: Vec<Gpu> = ["GPU-aa1", "GPU-aa2", "GPU-b", "GPU-c"].map(gpu).into();
        gpus[3].mig_uuids = ["MIG-x1", "MIG-x2"].map(str::to_owned).into();
        gpus
    }

    fn gpu(uuid: &str) -> Gpu {
        Gpu { uuid: uuid.to_owned(), ..Gpu::default() }
    }

    #[test]
    fn visible_devices_are_those_that_pytorch_counts() {
        // The results of torch.cuda.device_count() with four GPUs of these UUIDs (for MIG, with CUDA's answer).
        for (variable, visible) in [
            (None, &[0, 1, 2, 3][..]),
            (Some(""), &[]),
            (Some("0"), &[0]),
            (Some("3,1"), &[3, 1]),
            (Some("0, 1 ,2"), &[0, 1, 2]),
            (Some("+1"), &[1]),
            (Some("0,4,1"), &[0]),
            (Some("4"), &[]),
            (Some("-1"), &[]),
            (Some("0,-1,1"), &[0]),
            (Some("0,,1"), &[0]),
            (Some("0,x,1"), &[0]),
            (Some("1gpu2,2ampere"), &[1, 2]),
            (Some("1,1"), &[]),
            (Some("none"), &[]),
            (Some("GPU-b"), &[2]),
            (Some("GPU-b,GPU-aa1"), &[2, 0]),
            (Some("GPU-aa"), &[]),
            (Some("GPU-b,GPU-aa,GPU-c"), &[2]),
            (Some("GPU-b,GPU-b"), &[]),
            (Some("GPU-b, GPU-c"), &[2]),
            (Some("GPU-b,1"), &[2]),
            (Some("GPU-d"), &[]),
            (Some("MIG-x1"), &[3]),
            (Some("MIG-x1,MIG-x2"), &[3]),
            (Some("MIG-y"), &[]),
            (Some("MIG-"), &[]),
        ] {
            assert_eq!(Wanted::parse(variable).visible(&gpus()), visible, "{variable:?}");
        }
    }

    #[test]
    fn where_there_is_none_none_is_visible() {
        for variable in [None, Some("0"), Some("GPU-b"), Some("MIG-x1")] {
            assert!(Wanted::parse(variable).visible(&[]).is_empty(), "{variable:?}");
        }
    }

    #[test]
    fn two_beginnings_of_the_same_uuid_hide_everything() {
        assert_eq!(Wanted::parse(Some("GPU-b,GPU-")).visible(&gpus()), [2], "the second is ambiguous");
        assert!(Wanted::parse(Some("GPU-b,GPU-b1")).visible(&[gpu("GPU-b1")]).is_empty());
    }
}
