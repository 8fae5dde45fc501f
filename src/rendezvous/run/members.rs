//! A member is told its place. The one that serves the workers' store is first told from where the members connect, if it wants to know.
//!
//! One node of a round gets the list, so that a round costs as much as it has members
//! (`docs/decisions/0085-the-coordinator-tells-rank-0-who-the-members-are.md`).

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::Run;
use super::event::SessionId;
use crate::rendezvous::messages::message::{CoordinatorMessage, INTERFACES_LIMIT, MEMBERS_IN_A_MESSAGE};

/// Most addresses that a node is told: fewer messages than may wait for a session that is not read.
const MOST: usize = 32 * MEMBERS_IN_A_MESSAGE;

impl Run {
    /// Tell a member of the current world its place. Returns whether it could be told: this coordinator has formed the world.
    pub(super) fn send_place(&mut self, session: SessionId, rank: u32) -> bool {
        let Some(place) = self.placement(rank) else { return false };
        if rank == 0 && self.wants_members() {
            // Without room for all interfaces, proven addresses have to do. Without room for those, nothing is told.
            let addresses = [true, false].map(|interfaces| self.member_addresses(interfaces));
            if let Some(addresses) = addresses.into_iter().find(|addresses| addresses.len() <= MOST) {
                self.send_members(session, &addresses);
            }
        }
        self.send(session, place);
        true
    }

    fn send_members(&mut self, session: SessionId, addresses: &[IpAddr]) {
        let round = self.round();
        let mut rest = addresses;
        loop {
            let (part, after) = rest.split_at(rest.len().min(MEMBERS_IN_A_MESSAGE));
            let more = !after.is_empty();
            self.send(session, CoordinatorMessage::Members { round, addresses: part.to_vec(), more });
            if !more {
                return;
            }
            rest = after;
        }
    }

    /// Whether the node with rank 0 wants to know the members' addresses.
    fn wants_members(&self) -> bool {
        let serving = self.current.world().and_then(|world| self.roster.get(*world.members.get(&0)?));
        serving.is_some_and(|node| node.interfaces.is_some())
    }

    /// The addresses of the world's members: of their connections, of their interfaces if these are wanted, and those that their users
    /// have given.
    ///
    /// A member whose connection comes over loopback is on the coordinator's host. Others know that host by the address at which they have
    /// reached the coordinator.
    fn member_addresses(&self, interfaces: bool) -> Vec<IpAddr> {
        let (mut addresses, mut hosts) = (BTreeSet::new(), BTreeSet::new());
        let mut is_anyone_here = false;
        let ids = self.current.world().into_iter().flat_map(|world| world.members.values());
        for node in ids.filter_map(|id| self.roster.get(*id)) {
            let given = node.local_addr.as_deref().and_then(|addr| addr.parse::<IpAddr>().ok());
            addresses.extend(given.map(|ip| ip.to_canonical()));
            addresses.extend(node.interfaces.iter().flatten().filter(|_| interfaces));
            if let Some(ends) = node.ends {
                is_anyone_here |= ends.peer.is_loopback();
                addresses.insert(ends.peer);
                hosts.insert(ends.local);
            }
        }
        if is_anyone_here {
            addresses.append(&mut hosts);
        }
        addresses.into_iter().filter(|ip| may_connect_from(*ip)).collect()
    }
}

/// The addresses of a node's interfaces that peers elsewhere can see, up to [`INTERFACES_LIMIT`].
pub(super) fn visible(interfaces: &[IpAddr]) -> Vec<IpAddr> {
    let canonical = interfaces.iter().map(IpAddr::to_canonical).filter(|ip| may_connect_from(*ip));
    canonical.take(INTERFACES_LIMIT).collect()
}

/// Whether a peer elsewhere can have this address.
fn may_connect_from(ip: IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast()
}
