//! For tests of parts and policies: the parts of a run, put together by hand.

use std::time::{Duration, Instant};

use super::event::{Ends, Reach, SessionId};
use super::hosts::Hosts;
use super::in_place::InPlace;
use super::membership::Roster;
use super::node::{Node, Status};
use super::parts::Parts;
use super::recovery::Recovery;
use super::round::{Current, Pace, World};
use super::standing::Standing;
use crate::rendezvous::messages::message::{Generation, Hello, Join, JoinWorkers, NodeId, Round};
use crate::rendezvous::messages::settings::Settings;

pub(super) const SECOND: Duration = Duration::from_secs(1);

/// The parts of a run, with a clock. Node `n` is named `node<n>`, and connects from 10.0.0.n.
pub(super) struct Bench {
    pub settings: Settings,
    pub roster: Roster,
    pub current: Current,
    pub pace: Pace,
    pub recovery: Recovery,
    pub in_place: InPlace,
    pub hosts: Hosts,
    pub now: Instant,
}

impl Bench {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            roster: Roster::default(),
            current: Current::default(),
            pace: Pace::default(),
            recovery: Recovery::default(),
            in_place: InPlace::default(),
            hosts: Hosts::default(),
            now: Instant::now(),
        }
    }

    pub fn parts(&self) -> Parts<'_> {
        let Self { settings, roster, current, pace, recovery, in_place, hosts, .. } = self;
        let (pace, standing) = (*pace, Standing::default());
        Parts { id: "job", settings, roster, current, pace, recovery, in_place, hosts, closes_at: None, standing }
    }

    /// A connected node that neither waits nor runs.
    pub fn node(&self, number: u8) -> Node {
        let hello = Hello {
            in_place: true,
            ..Hello::new("job", NodeId(number.into()), format!("node{number}"), self.settings.clone())
        };
        let ends = Ends { peer: [10, 0, 0, number].into(), local: [10, 0, 0, 100].into() };
        Node::new(&hello, SessionId(number.into()), Reach::Connection(ends), self.now)
    }

    /// Nodes wait for the next round, each with one worker.
    pub fn wait(&mut self, numbers: impl IntoIterator<Item = u8>) {
        for number in numbers {
            let id = NodeId(number.into());
            if !self.roster.knows(id) {
                self.roster.insert(id, self.node(number));
            }
            let workers = Some(JoinWorkers::new("trainer", 1));
            let join = Join { round: Round(0), store_port: 1, node_rank: None, workers, health: Default::default() };
            let arrival = self.roster.next_arrival();
            self.roster.set_status(id, Status::Waiting { join, arrival });
            self.pace.newcomer_since.get_or_insert(self.now);
        }
    }

    /// Nodes run the next round, in the order of their ranks. The workers of all of them attend.
    pub fn run(&mut self, numbers: impl IntoIterator<Item = u8>) {
        let members: Vec<_> = numbers.into_iter().map(|number| NodeId(number.into())).collect();
        for id in &members {
            self.roster.insert(*id, self.node(id.0 as u8));
        }
        let round = self.roster.round().next();
        self.roster.begin_round(round, &members);
        members.iter().for_each(|id| self.roster.set_attending(*id));
        self.current.form(World {
            id: 100 + round.0,
            size: members.len() as u32,
            master: Some(("10.0.0.1".to_owned(), 1)),
            reason: "all are here".to_owned(),
            members: (0..).zip(members).collect(),
            restart: 0,
            workers: None,
            claimed_workers: None,
            began_with: Generation::default(),
        });
        self.pace = Pace::default();
    }
}
