//! Hosts that are not of the job, or not as it expects them: of other runs on the same coordinator, at another's place, with
//! other settings, of another version.

use std::collections::{BTreeMap, BTreeSet};

use super::network::HostId;
use crate::rendezvous::protocol::settings::Settings;

/// Which hosts are not what the others are.
#[derive(Clone, Debug, Default)]
pub struct Strangers {
    /// Hosts of other runs than the first (number 0): the numbers of their runs.
    pub runs: BTreeMap<HostId, usize>,
    /// Hosts that come from the place of another: its address, and its name.
    pub twins: BTreeMap<HostId, HostId>,
    /// Hosts that ask for something else.
    pub settings: BTreeMap<HostId, Settings>,
    /// Hosts that speak another version of the protocol.
    pub versions: BTreeSet<HostId>,
}

impl Strangers {
    /// How many runs there are.
    pub fn runs(&self) -> usize {
        1 + self.runs.values().max().copied().unwrap_or(0)
    }

    /// The run that a host is of.
    pub fn run_of(&self, host: HostId) -> usize {
        self.runs.get(&host).copied().unwrap_or(0)
    }

    /// What a host asks for, if it is something else than the others do.
    pub(super) fn settings_of(&self, host: HostId) -> Option<&Settings> {
        self.settings.get(&host)
    }

    /// The host whose address this one has.
    pub(super) fn seen_as(&self, host: HostId) -> HostId {
        self.twins.get(&host).copied().unwrap_or(host)
    }

    /// The name of a host that shares it with another: process ids repeat in containers.
    pub(super) fn name(&self, host: HostId) -> Option<String> {
        let place = self.seen_as(host);
        let shared = place != host || self.twins.values().any(|of| *of == host);
        shared.then(|| format!("host{place}:1"))
    }
}
