//! Whether this process may read the memory of its workers here. Pure: [`super::process::facts`] gathers the facts.

use thiserror::Error;

/// What reading this process's own memory by `process_vm_readv(2)` came to. It shows what a seccomp filter or a sandbox says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnMemory {
    /// It could be read.
    Read,
    /// The call is refused.
    Refused,
    /// The kernel, or a sandbox in its place, has no such call.
    NoSuchCall,
}

/// What decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// What reading this process's own memory came to.
    pub own_memory: OwnMemory,
    /// `/proc/sys/kernel/yama/ptrace_scope`. `None`: the kernel has no Yama.
    pub ptrace_scope: Option<u32>,
    /// Whether this process has `CAP_SYS_PTRACE`.
    pub has_ptrace_capability: bool,
}

/// What forbids it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Obstacle {
    /// A sandbox such as gVisor, or a seccomp filter.
    #[error(
        "process_vm_readv(2) does not exist here: a sandbox such as gVisor; install py-spy, or run the job outside of the sandbox"
    )]
    NoSuchCall,
    /// A seccomp filter.
    #[error(
        "a seccomp filter refuses process_vm_readv(2): start the container with `--cap-add=SYS_PTRACE`, or allow the call in its profile"
    )]
    Refused,
    /// Yama lets only privileged processes do it.
    #[error(
        "kernel.yama.ptrace_scope is {0}, so an agent without CAP_SYS_PTRACE reads no worker's memory: set it to 1 or 0"
    )]
    Privileged(u32),
    /// Yama lets nobody do it.
    #[error("kernel.yama.ptrace_scope is {0}, so no process reads another's memory: start the host with 1 or 0")]
    Nobody(u32),
}

/// Whether this process may read its descendants' memory. Yama's scope 1 lets a process read its descendants', which workers are.
///
/// # Errors
/// What forbids it, and what to do.
pub fn may_read_workers(facts: &Facts) -> Result<(), Obstacle> {
    match (facts.own_memory, facts.ptrace_scope) {
        (OwnMemory::NoSuchCall, _) => Err(Obstacle::NoSuchCall),
        (OwnMemory::Refused, _) => Err(Obstacle::Refused),
        (OwnMemory::Read, Some(scope @ 3..)) => Err(Obstacle::Nobody(scope)),
        (OwnMemory::Read, Some(scope @ 2)) if !facts.has_ptrace_capability => Err(Obstacle::Privileged(scope)),
        (OwnMemory::Read, _) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_may_be_read_unless_yama_a_filter_or_a_sandbox_forbids_it() {
        let facts =
            |own_memory, ptrace_scope, has_ptrace_capability| Facts { own_memory, ptrace_scope, has_ptrace_capability };
        for (facts, expected) in [
            (facts(OwnMemory::Read, None, false), Ok(())),
            (facts(OwnMemory::Read, Some(0), false), Ok(())),
            (facts(OwnMemory::Read, Some(1), false), Ok(())),
            (facts(OwnMemory::Read, Some(2), true), Ok(())),
            (facts(OwnMemory::Read, Some(2), false), Err(Obstacle::Privileged(2))),
            (facts(OwnMemory::Read, Some(3), true), Err(Obstacle::Nobody(3))),
            (facts(OwnMemory::Refused, Some(0), false), Err(Obstacle::Refused)),
            (facts(OwnMemory::NoSuchCall, None, true), Err(Obstacle::NoSuchCall)),
        ] {
            assert_eq!(may_read_workers(&facts), expected, "{facts:?}");
        }
    }
}
