//! Whether NVIDIA's GPUs work, as their driver says by NVML.

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, EventSet, Nvml};

use super::nvidia;

/// Fields of `nvml.h`: rows of memory wait for a remapping, a remapping has failed, and `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
const REMAP_WAITS: u32 = 144;
const REMAP_FAILED: u32 = 145;
const RECOVERY_ACTION: u32 = 230;
/// Faults that a program causes. The GPU works after them (NVIDIA's device plugin of Kubernetes, `internal/rm/health.go`).
const OF_PROGRAMS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// So many events are read at once at most.
const EVENTS: usize = 1000;

/// The driver, opened. It tells of faults since then.
#[derive(Debug)]
pub struct Driver(Nvml);

impl Driver {
    /// `None`: there is none, or it does not answer, as in a container without it.
    pub fn open() -> Option<Self> {
        nvidia::library().ok().map(Self)
    }

    /// Listen to the faults of each GPU. `None`: the driver does not say how many there are.
    pub fn gpus(&self) -> Option<Gpus<'_>> {
        let faults = |number| {
            let events = self.0.create_event_set().ok()?;
            self.0.device_by_index(number).ok()?.register_events(EventTypes::CRITICAL_XID_ERROR, events).ok()
        };
        let count = self.0.device_count().ok()?;
        Some(Gpus { nvml: &self.0, faults: (0..count).map(faults).collect() })
    }
}

/// GPUs whose faults are listened to.
#[derive(Debug)]
pub struct Gpus<'nvml> {
    nvml: &'nvml Nvml,
    /// By their number. `None`: it does not tell of any, or may not be asked.
    faults: Vec<Option<EventSet<'nvml>>>,
}

impl Gpus<'_> {
    /// What is wrong with the GPUs, if anything is: now, or since their events were registered. `most`: the largest number of GPUs so far,
    /// which is updated.
    pub fn ill(&self, most: &mut usize) -> Option<String> {
        let count = self.faults.len();
        if count < *most {
            return Some(format!("{count} GPUs are there, and {most} were"));
        }
        *most = count;
        self.faults.iter().enumerate().find_map(|(number, faults)| {
            let found = self.nvml.device_by_index(number as u32).and_then(|device| needs(&device));
            let ill = match found {
                Ok(what) => what,
                Err(error) => lost(&error),
            };
            let ill = ill.map(str::to_owned).or_else(|| fault(faults.as_ref()?));
            ill.map(|what| format!("GPU {number} {what}"))
        })
    }
}

/// Whether this error is an illness. To ask may be forbidden.
fn lost(error: &NvmlError) -> Option<&'static str> {
    matches!(error, NvmlError::GpuLost).then_some("has fallen off the bus")
}

/// What the driver asks for, so that a GPU works again. Older drivers do not say everything.
fn needs(device: &Device<'_>) -> Result<Option<&'static str>, NvmlError> {
    let answers = device.field_values_for(&[REMAP_WAITS, REMAP_FAILED, RECOVERY_ACTION].map(FieldId))?;
    let answers: Vec<_> = answers.into_iter().map(|answer| answer.and_then(|answer| answer.value)).collect();
    if answers.iter().any(|answer| matches!(answer, Err(NvmlError::GpuLost))) {
        return Err(NvmlError::GpuLost);
    }
    let mut numbers = answers.iter().map(|answer| number(answer.as_ref().ok()?).filter(|it| *it != 0));
    let mut next = || numbers.next().flatten();
    let (waits, failed, action) = (next(), next(), next());
    Ok(match action {
        Some(1) => Some("needs a reset"),
        Some(2) => Some("needs a reboot of its machine"),
        // Other GPUs go on, and after a drain all do.
        Some(3) => Some("needs peer-to-peer traffic to be drained"),
        Some(4) => Some("needs to be drained and reset"),
        _ if failed.is_some() => Some("could not remap a row of its memory, and has to be replaced"),
        _ if waits.is_some() => Some("needs a reset: rows of its memory wait to be remapped"),
        _ => None,
    })
}

fn number(value: &SampleValue) -> Option<u64> {
    match *value {
        SampleValue::U32(number) => Some(number.into()),
        SampleValue::U64(number) => Some(number),
        SampleValue::I64(number) => number.try_into().ok(),
        SampleValue::F64(_) => None,
    }
}

/// The first fault that a program has not caused.
fn fault(faults: &EventSet<'_>) -> Option<String> {
    for _ in 0..EVENTS {
        let event = match faults.wait(0) {
            Ok(event) => event,
            Err(error) => return lost(&error).map(str::to_owned), // mostly since there is none
        };
        match event.event_data {
            Some(XidError::Value(number)) if OF_PROGRAMS.contains(&number) => {}
            Some(XidError::Value(number)) => return Some(format!("has had the fault Xid {number}")),
            Some(XidError::Unknown) => return Some("has had a fault that its driver does not name".to_owned()),
            None => {}
        }
    }
    None
}
