//! How many GPUs workers can use: `--nproc-per-node=gpu`, without PyTorch.
//!
//! Owns the rules by which `CUDA_VISIBLE_DEVICES` selects from the GPUs of a machine ([`Wanted`]). [`nvidia`] lists those.
//! The count equals torch's: `_parse_visible_devices` and `_device_count_nvml` in `torch/cuda/__init__.py` (2.15).

#[cfg(feature = "io")]
pub mod nvidia;

/// The GPUs of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpus {
    /// Their UUIDs (`GPU-…`), in the driver's order.
    pub uuids: Vec<String>,
    /// UUIDs (`MIG-…`) of the MIG instances that some of them are divided into.
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

    /// How many of these GPUs a process sees.
    pub fn count(&self, gpus: &Gpus) -> usize {
        let there = gpus.uuids.len();
        match self {
            Self::All => there,
            Self::Numbers(numbers) => numbers.iter().take_while(|number| **number < there).count(),
            Self::Uuids(begins) => {
                let mut found = Vec::new();
                for number in begins.iter().map_while(|begin| only_one(begin, &gpus.uuids)) {
                    if found.contains(&number) {
                        return 0;
                    }
                    found.push(number);
                }
                found.len()
            }
            // PyTorch asks CUDA in this case. CUDA shows a process one MIG instance, the first that is named.
            Self::Mig(begins) => begins.iter().take(1).filter_map(|begin| only_one(begin, &gpus.mig_uuids)).count(),
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

/// The index of the entry of `all` with this prefix, if there is exactly one.
fn only_one(begin: &str, all: &[String]) -> Option<usize> {
    let mut found = all.iter().enumerate().filter(|(_, uuid)| uuid.starts_with(begin)).map(|(number, _)| number);
    let first = found.next();
    if found.next().is_some() { None } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four GPUs, the last of which is divided into two parts.
    fn gpus() -> Gpus {
        let list = |uuids: &[&str]| uuids.iter().map(|uuid| (*uuid).to_owned()).collect();
        Gpus { uuids: list(&["GPU-aa1", "GPU-aa2", "GPU-b", "GPU-c"]), mig_uuids: list(&["MIG-x1", "MIG-x2"]) }
    }

    #[test]
    fn visible_devices_are_counted_as_pytorch_counts_them() {
        // The results of torch.cuda.device_count() with four GPUs of these UUIDs (for MIG, with CUDA's answer).
        for (variable, count) in [
            (None, 4),
            (Some(""), 0),
            (Some("0"), 1),
            (Some("3,1"), 2),
            (Some("0, 1 ,2"), 3),
            (Some("+1"), 1),
            (Some("0,4,1"), 1),
            (Some("4"), 0),
            (Some("-1"), 0),
            (Some("0,-1,1"), 1),
            (Some("0,,1"), 1),
            (Some("0,x,1"), 1),
            (Some("1gpu2,2ampere"), 2),
            (Some("1,1"), 0),
            (Some("none"), 0),
            (Some("GPU-b"), 1),
            (Some("GPU-b,GPU-aa1"), 2),
            (Some("GPU-aa"), 0),
            (Some("GPU-b,GPU-aa,GPU-c"), 1),
            (Some("GPU-b,GPU-b"), 0),
            (Some("GPU-b, GPU-c"), 1),
            (Some("GPU-b,1"), 1),
            (Some("GPU-d"), 0),
            (Some("MIG-x1"), 1),
            (Some("MIG-x1,MIG-x2"), 1),
            (Some("MIG-y"), 0),
            (Some("MIG-"), 0),
        ] {
            assert_eq!(Wanted::parse(variable).count(&gpus()), count, "{variable:?}");
        }
    }

    #[test]
    fn where_there_is_none_none_is_counted() {
        for variable in [None, Some("0"), Some("GPU-b"), Some("MIG-x1")] {
            assert_eq!(Wanted::parse(variable).count(&Gpus::default()), 0, "{variable:?}");
        }
    }

    #[test]
    fn two_beginnings_of_the_same_uuid_hide_everything() {
        assert_eq!(Wanted::parse(Some("GPU-b,GPU-")).count(&gpus()), 1, "the second is ambiguous");
        let one = Gpus { uuids: vec!["GPU-b1".to_owned()], ..Gpus::default() };
        assert_eq!(Wanted::parse(Some("GPU-b,GPU-b1")).count(&one), 0);
    }
}
