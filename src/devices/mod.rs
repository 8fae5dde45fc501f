//! How many GPUs workers can use: `--nproc-per-node=gpu`, without PyTorch.
//!
//! Owns the rules by which `CUDA_VISIBLE_DEVICES` chooses among the GPUs that are there ([`Wanted`]); [`nvidia`] says which
//! are. Facts: `_parse_visible_devices` and `_device_count_nvml` in `torch/cuda/__init__.py` (2.15), whose number this is.

#[cfg(feature = "io")]
pub mod nvidia;

/// The GPUs of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpus {
    /// Their UUIDs (`GPU-…`), in the driver's order.
    pub uuids: Vec<String>,
    /// UUIDs (`MIG-…`) of the parts that some of them are divided into.
    pub mig_uuids: Vec<String>,
}

/// What `CUDA_VISIBLE_DEVICES` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// It is not set.
    All,
    /// Numbers in the driver's order.
    Numbers(Vec<usize>),
    /// UUIDs, or what they begin with.
    Uuids(Vec<String>),
    /// UUIDs of parts of GPUs.
    Mig(Vec<String>),
}

impl Wanted {
    /// Reads the variable. What follows the first entry that makes no sense does not count, and an entry given twice hides
    /// everything, as the driver has it.
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
            // PyTorch asks CUDA then, which shows a process one part, the first that is named.
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

/// As `strtoul(3)`: `1gpu` is 1. `None` for what begins with no number, or is below zero.
fn leading_number(text: &str) -> Option<usize> {
    let text = text.trim();
    let digits = text.strip_prefix('+').unwrap_or(text);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// Which of `all` begins so, if it is one.
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
        // What torch.cuda.device_count() gives with four GPUs of these UUIDs (for MIG, with CUDA's answer).
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
