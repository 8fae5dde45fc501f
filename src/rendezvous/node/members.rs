//! From where the members of a round connect, as the coordinator tells the node that serves their workers' store. Part of [`super`].

use std::net::IpAddr;
use std::sync::Arc;

use super::NodeMachine;
use crate::rendezvous::messages::message::{Placement, Round};

/// What has arrived of a round's list.
#[derive(Clone, Debug, Default)]
pub(super) struct Members {
    round: Round,
    addresses: Vec<IpAddr>,
    whole: bool,
}

/// Most addresses of a round. Whoever listens at the endpoint could send any number.
const MOST: usize = 1 << 20;

impl Members {
    fn add(&mut self, round: Round, addresses: Vec<IpAddr>, more: bool) {
        if self.round != round || self.whole {
            *self = Self { round, ..Self::default() };
        }
        if self.addresses.len() + addresses.len() <= MOST {
            self.addresses.extend(addresses.into_iter().map(|ip| ip.to_canonical()));
            self.whole = !more;
        }
    }
}

impl NodeMachine {
    pub(super) fn on_members(&mut self, round: Round, addresses: Vec<IpAddr>, more: bool) {
        self.members.add(round, addresses, more);
    }

    /// A place, with the members' addresses if they have been told for its round.
    pub(in crate::rendezvous) fn with_members(&mut self, placement: Placement) -> Placement {
        let told = std::mem::take(&mut self.members);
        let is_its = told.whole && told.round == placement.round && placement.rank == 0;
        Placement { members: is_its.then(|| Arc::from(told.addresses)), ..placement }
    }
}
