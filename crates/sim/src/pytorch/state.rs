//! The blob that all nodes read and rewrite, and their changes to it. Restated from
//! `torch/distributed/elastic/rendezvous/dynamic_rendezvous.py` (2.15), with its names.

use std::collections::{BTreeMap, BTreeSet};

use super::super::engine::queue::Time;
use super::super::engine::record::Digest;
use elastic_rs::rendezvous::messages::settings::Settings;

/// A reading of a host's wall clock, in microseconds of virtual time. Clocks of two hosts need not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(pub i64);

impl WallTime {
    pub fn after(self, time: Time) -> Self {
        Self(self.0 + time.as_micros() as i64)
    }

    pub fn before(self, time: Time) -> Self {
        Self(self.0 - time.as_micros() as i64)
    }
}

/// `_NodeDesc`. Sorted as text, which determines the ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeDesc {
    pub addr: String,
    pub pid: u64,
}

/// `_RendezvousState`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub round: u64,
    pub complete: bool,
    pub deadline: Option<WallTime>,
    pub closed: bool,
    pub participants: BTreeMap<NodeDesc, u32>,
    pub wait_list: BTreeSet<NodeDesc>,
    pub redundancy_list: BTreeSet<NodeDesc>,
    pub last_heartbeats: BTreeMap<NodeDesc, WallTime>,
}

impl State {
    /// `_sanitize`: drop from the copy all nodes whose time stamp is old by this node's clock, perhaps itself. Nobody is notified.
    pub fn sanitize(&mut self, settings: &Settings, now: WallTime) {
        let expire_time = now.before(settings.lease());
        let dead: Vec<_> =
            self.last_heartbeats.iter().filter(|(_, at)| **at < expire_time).map(|(node, _)| node.clone()).collect();
        let mut participant_removed = false;
        for node in dead {
            self.last_heartbeats.remove(&node);
            participant_removed |= self.participants.remove(&node).is_some();
            self.wait_list.remove(&node);
            self.redundancy_list.remove(&node);
        }
        if participant_removed {
            self.after_removal(settings);
        }
    }

    /// `_remove_participant_epilogue`.
    fn after_removal(&mut self, settings: &Settings) {
        if self.complete {
            if self.participants.is_empty() {
                self.complete = false;
                self.round += 1;
            }
        } else if self.participants.len() < settings.min_nodes as usize {
            self.deadline = None;
        }
    }

    /// `_keep_alive`: write a time stamp of the writer's clock, which others compare with theirs.
    pub fn keep_alive(&mut self, node: &NodeDesc, now: WallTime) {
        self.last_heartbeats.insert(node.clone(), now);
    }

    pub fn add_to_participants(&mut self, node: &NodeDesc, settings: &Settings, now: WallTime) {
        self.wait_list.remove(node);
        // Ranks are set when the round is complete.
        self.participants.insert(node.clone(), 0);
        self.keep_alive(node, now);
        if self.participants.len() == settings.min_nodes as usize {
            self.deadline = Some(now.after(settings.last_call_timeout));
        }
        if self.participants.len() == settings.max_nodes as usize {
            self.mark_complete();
        }
    }

    pub fn add_to_wait_list(&mut self, node: &NodeDesc, now: WallTime) {
        self.redundancy_list.remove(node);
        self.wait_list.insert(node.clone());
        self.keep_alive(node, now);
    }

    pub fn add_to_redundancy_list(&mut self, node: &NodeDesc, now: WallTime) {
        self.redundancy_list.insert(node.clone());
        self.keep_alive(node, now);
    }

    pub fn remove_from_participants(&mut self, node: &NodeDesc, settings: &Settings) {
        self.participants.remove(node);
        self.last_heartbeats.remove(node);
        self.after_removal(settings);
    }

    /// Remove a node from both lists. It is in one of them at most.
    pub fn remove_from_lists(&mut self, node: &NodeDesc) {
        self.wait_list.remove(node);
        self.redundancy_list.remove(node);
        self.last_heartbeats.remove(node);
    }

    pub fn mark_complete(&mut self) {
        self.complete = true;
        self.deadline = None;
        for (rank, (_, participant_rank)) in (0..).zip(self.participants.iter_mut()) {
            *participant_rank = rank;
        }
    }

    /// An id of the world, from its members.
    pub fn world(&self) -> u64 {
        let mut digest = Digest::default();
        digest.add(&self.round.to_le_bytes());
        for node in self.participants.keys() {
            digest.add(node.addr.as_bytes());
            digest.add(&node.pid.to_le_bytes());
        }
        digest.0
    }
}
