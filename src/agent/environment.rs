//! The environment variables of a worker: those of torch 2.15's agent, and `TORCHELASTIC_GENERATION`.

use crate::rendezvous::messages::message::{Placement, WorkerRanks};

/// The values that are the same for all workers of a node in every round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workers {
    /// The job's run id.
    pub run_id: String,
    /// The workers' role.
    pub role: String,
    /// Workers that this node offers.
    pub local_world_size: u32,
    /// Restarts that the job may have, or each node with PyTorch's way of counting.
    pub max_restarts: u32,
    /// Whether the store at `MASTER_ADDR` exists already, so that worker 0 must not open one.
    pub use_agent_store: bool,
    /// Each worker sees only its own GPU, as device 0 with `LOCAL_RANK` 0.
    pub virtual_local_rank: bool,
    /// NCCL's groups change in place (`in_place=nccl`): a worker that makes one sets `TORCH_NCCL_ASYNC_ERROR_HANDLING` itself, and for the
    /// others PyTorch's own default holds.
    pub resizes_nccl: bool,
}

/// Where a worker's agent listens for it: the path of a Unix socket.
pub const AGENT: &str = "ELASTIC_RS_AGENT";
/// Which workers may change in place: [`crate::rendezvous::conf::InPlace::name`].
pub const IN_PLACE: &str = "ELASTIC_RS_IN_PLACE";

/// Set, to `1`, for a worker that was started before its node has a place for it: its ranks and its store are provisional.
pub const AHEAD: &str = "ELASTIC_RS_AHEAD";

/// Set, to `1`, for a standby: the place in its environment is nobody's.
pub const STANDBY: &str = "ELASTIC_RS_STANDBY";

/// How many collectives torch records. Read when the first process group is made.
const RECORDS: &str = "TORCH_FR_BUFFER_SIZE";
/// The same, under its old name. NCCL's groups read it too.
const RECORDS_OF_NCCL: &str = "TORCH_NCCL_TRACE_BUFFER_SIZE";
/// Torch's own default since 2.15. Before, gloo's groups record nothing unless they are told to.
const RECORDS_DEFAULT: &str = "2000";

/// Variables whose values differ per worker or per round, or that the agent adds. A warm start allows for these, and for no others.
pub const VARIES: [&str; 27] = [
    AGENT,
    IN_PLACE,
    AHEAD,
    STANDBY,
    crate::steps::STEPS,
    crate::channel::watch::WATCH,
    RECORDS,
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_GENERATION",
    "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    // With `virtual_local_rank`. Devices are counted on first use, not by an import.
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
];

/// Those of [`VARIES`] that a worker keeps for its whole life.
pub const KEEPS: [&str; 7] =
    [AGENT, AHEAD, STANDBY, crate::steps::STEPS, crate::channel::watch::WATCH, RECORDS, "TORCHELASTIC_ERROR_FILE"];

/// Variables of the worker `local_rank`, which override those that it inherits. `restarts` is the restart count for workers.
/// `inherited` looks variables up in the agent's own environment.
///
/// # Errors
/// With `virtual_local_rank`: the inherited list of GPUs is shorter than the number of workers.
pub fn variables(
    workers: &Workers,
    placement: &Placement,
    ranks: &WorkerRanks,
    restarts: u32,
    local_rank: u32,
    inherited: impl Fn(&str) -> Option<String>,
) -> Result<Vec<(&'static str, String)>, String> {
    let mut set = vec![
        ("RANK", (ranks.first_rank + local_rank).to_string()),
        ("GROUP_RANK", placement.rank.to_string()),
        ("ROLE_RANK", (ranks.first_role_rank + local_rank).to_string()),
        ("ROLE_NAME", workers.role.clone()),
        ("LOCAL_WORLD_SIZE", placement.workers_of(workers.local_world_size).to_string()),
        ("WORLD_SIZE", ranks.world_size.to_string()),
        ("GROUP_WORLD_SIZE", placement.world_size.to_string()),
        ("ROLE_WORLD_SIZE", ranks.role_world_size.to_string()),
        ("MASTER_ADDR", placement.master_addr.clone()),
        ("MASTER_PORT", placement.master_port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", restarts.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", workers.max_restarts.to_string()),
        ("TORCHELASTIC_RUN_ID", workers.run_id.clone()),
        ("TORCHELASTIC_USE_AGENT_STORE", python_bool(workers.use_agent_store)),
        ("TORCHELASTIC_GENERATION", placement.round.to_string()),
    ];
    let error_handling = (!workers.resizes_nccl).then_some("1");
    for (name, default) in [("TORCH_NCCL_ASYNC_ERROR_HANDLING", error_handling), ("OMP_NUM_THREADS", None)] {
        if let Some(value) = inherited(name).or(default.map(str::to_owned)) {
            set.push((name, value));
        }
    }
    set.extend(devices(workers, local_rank, inherited)?);
    Ok(set)
}

/// The variables by which a worker connects to the agent at this address, and records the collectives that it is asked for. What the user
/// has chosen stays, also if that is to record none.
pub fn watched(address: &str, inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
    let chosen = [RECORDS, RECORDS_OF_NCCL].into_iter().any(inherited);
    let records = (!chosen).then(|| (RECORDS, RECORDS_DEFAULT.to_owned()));
    [(crate::channel::watch::WATCH, address.to_owned())].into_iter().chain(records).collect()
}

/// `LOCAL_RANK`, and which GPUs the worker sees. ROCm's variable has precedence over CUDA's, as in PyTorch.
fn devices(
    workers: &Workers,
    local_rank: u32,
    inherited: impl Fn(&str) -> Option<String>,
) -> Result<Vec<(&'static str, String)>, String> {
    const CUDA: &str = "CUDA_VISIBLE_DEVICES";
    const HIP: &str = "HIP_VISIBLE_DEVICES";
    if !workers.virtual_local_rank {
        let mut set = vec![("LOCAL_RANK", local_rank.to_string())];
        set.extend(inherited(CUDA).map(|devices| (CUDA, devices)));
        return Ok(set);
    }
    let hip = inherited(HIP).filter(|devices| !devices.is_empty());
    let name = if hip.is_some() { HIP } else { CUDA };
    let device = match hip.clone().or_else(|| inherited(CUDA)) {
        None => local_rank.to_string(),
        Some(devices) => match devices.split(',').nth(local_rank as usize) {
            Some(device) => device.trim().to_owned(),
            None => return Err(format!("local_rank {local_rank} exceeds available GPUs in {name}={devices}")),
        },
    };
    let mut set = vec![("LOCAL_RANK", "0".to_owned()), (CUDA, device.clone())];
    set.extend(hip.map(|_| (HIP, device)));
    Ok(set)
}

/// A bool as Python writes it: workers compare with that text.
fn python_bool(value: bool) -> String {
    if value { "True" } else { "False" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_user_has_chosen_to_record_stays() {
        let of = |set: &[&str]| watched("@agent", |name| set.contains(&name));
        let address = (crate::channel::watch::WATCH, "@agent".to_owned());
        assert_eq!(of(&["RANK"]), [address.clone(), ("TORCH_FR_BUFFER_SIZE", "2000".to_owned())]);
        for chosen in ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"] {
            assert_eq!(of(&[chosen]), std::slice::from_ref(&address));
        }
        assert!(of(&[]).iter().all(|(name, _)| VARIES.contains(name)), "a warm start allows for them");
    }

    /// Its agent reads the error file that it has named first, and the memory of the slot.
    #[test]
    fn a_worker_keeps_what_its_agent_knows_it_by() {
        assert!(KEEPS.iter().all(|name| VARIES.contains(name)));
        assert!(KEEPS.contains(&"TORCHELASTIC_ERROR_FILE") && KEEPS.contains(&crate::steps::STEPS));
        assert!(!["RANK", "LOCAL_RANK", "MASTER_PORT"].iter().any(|name| KEEPS.contains(name)));
    }
}
