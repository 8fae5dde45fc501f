//! Hosts that do not belong to the job, or differ from its others: hosts of other runs on the same coordinator, with the address
//! and name of another, with other settings, or with another version.

use std::collections::{BTreeMap, BTreeSet};

use crate::engine::paths::HostId;
use elastic_rs::rendezvous::messages::settings::Settings;

/// The hosts that differ from the others.
#[derive(Clone, Debug, Default)]
pub struct OddHosts {
    /// Hosts of other runs than the first (number 0), with the number of their run.
    pub runs: BTreeMap<HostId, usize>,
    /// Hosts with the address and the name of another host.
    pub twins: BTreeMap<HostId, HostId>,
    /// Hosts with other settings.
    pub settings: BTreeMap<HostId, Settings>,
    /// Hosts that speak another version of the protocol.
    pub versions: BTreeSet<HostId>,
}

impl OddHosts {
    /// Number of runs.
    pub fn runs(&self) -> usize {
        1 + self.runs.values().max().copied().unwrap_or(0)
    }

    /// The run of a host.
    pub fn run_of(&self, host: HostId) -> usize {
        self.runs.get(&host).copied().unwrap_or(0)
    }

    /// The settings of a host, if they differ from the others'.
    pub(super) fn settings_of(&self, host: HostId) -> Option<&Settings> {
        self.settings.get(&host)
    }

    /// The host whose address this host has.
    pub(super) fn seen_as(&self, host: HostId) -> HostId {
        self.twins.get(&host).copied().unwrap_or(host)
    }

    /// The name of a host that shares it with another: process ids repeat in containers.
    pub(super) fn name(&self, host: HostId) -> Option<String> {
        let seen_as = self.seen_as(host);
        let shared = seen_as != host || self.twins.values().any(|of| *of == host);
        shared.then(|| format!("host{seen_as}:1"))
    }
}
