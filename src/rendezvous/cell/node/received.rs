//! A node's messages from a state that another node wrote: those that a coordinator would have pushed. Part of [super].

use std::time::Instant;

use super::{CellNode, Liveness};
use crate::rendezvous::cell::blob::Blob;
use crate::rendezvous::messages::message::{CoordinatorMessage, Join, NodeMessage};
use crate::rendezvous::node::JoinError;
use crate::rendezvous::run::Run;

impl CellNode {
    /// Process the cell's content. `None`: it is empty.
    pub(super) fn receive(&mut self, bytes: Option<&[u8]>, now: Instant) {
        let blob = match bytes.map(Blob::decode).transpose() {
            Ok(blob) => blob,
            Err(error) => return self.on_broken(self.not_ours(&error.to_string())),
        };
        if let Some(other) = blob.as_ref().map(Blob::run_id).filter(|run_id| *run_id != self.hello.run_id) {
            let text = format!("the rendezvous state belongs to run `{other}`, not to `{}`", self.hello.run_id);
            return self.on_broken(self.not_ours(&text));
        }
        let left = self.has_sent_farewell();
        self.accept(blob, now);
        if left {
            return;
        }
        let withdrawn = self.settle();
        if self.begins_anew() {
            return self.join_again_if_forgotten(false, None);
        }
        let Some(blob) = &self.confirmed else {
            if self.runs() {
                let reason = "the rendezvous state is gone from the backend".to_owned();
                let message =
                    CoordinatorMessage::Status { waiting: 1, reason, restart: self.view().restart, failure: None };
                self.deliver(vec![message], now);
            }
            return self.join_again_if_forgotten(false, None);
        };
        let run = self.seen.run(blob, &self.hello, now);
        let (mut news, known) = (self.catch_up(&run, now), self.is_known(&run));
        if withdrawn {
            news.push(CoordinatorMessage::Withdrawn { progress: run.progress(now) });
        }
        let stale = self.stale_rank(&run);
        if stale.is_none() {
            self.deliver(news, now);
        }
        if run.closed().is_none() {
            self.join_again_if_forgotten(known, stale);
        }
    }

    /// The error of a state that is not one of this run's. Etcd's endpoints are named, since a wrong one may be the cause.
    fn not_ours(&self, what: &str) -> JoinError {
        JoinError::State(match self.liveness {
            Liveness::Counters => what.to_owned(),
            Liveness::Leases(_) => format!("{}: {what}", self.machine.backend_name()),
        })
    }

    /// Whether the state has this node, and its join if it waits for a rank assignment.
    fn is_known(&self, run: &Run) -> bool {
        let idle = || run.roster().is_idle(self.hello.node) && self.machine.ready_join().is_some();
        run.knows(self.hello.node) && !(self.is_greeted_early() && idle())
    }

    /// Whether this node runs workers of its last round.
    fn runs(&self) -> bool {
        self.machine.pending_join().is_none() && self.machine.hello().placed.is_some_and(|placed| placed.active)
    }

    /// The messages for this node that the state implies.
    pub(super) fn catch_up(&self, run: &Run, now: Instant) -> Vec<CoordinatorMessage> {
        let me = self.hello.node;
        if let Some(verdict) = run.closed().cloned() {
            // The job may have been closed while the join of this node was being written.
            let was_spare = self.machine.pending_join().is_some_and(|joining| joining.is_spare());
            let spare = was_spare || run.waits_as_spare(me);
            let comes = !spare && !run.knows(me) && self.machine.hello().placed.is_none();
            return vec![match comes {
                true => CoordinatorMessage::Over { verdict, ago: None },
                false => CoordinatorMessage::Closed { verdict, spare },
            }];
        }
        // The node that has applied this node's join cannot send it anything.
        if let Some(reason) = self.machine.ready_join().and_then(|joining| run.another_job(me, joining.join(), now)) {
            return vec![CoordinatorMessage::Ended { reason }];
        }
        let mine = self.machine.hello().placed.map(|placed| (placed.round, placed.rank));
        match run.roster().assignment(me) {
            Some((_, rank)) if self.machine.ready_join().is_some() => {
                run.placement(rank).into_iter().chain([run.status()]).collect()
            }
            Some(assigned) if self.runs() && Some(assigned) == mine => vec![run.status()],
            _ if self.runs() => {
                let reason = if run.round() > self.view().round {
                    format!("round {} formed without this node", run.round())
                } else {
                    "the other nodes have declared this node lost".to_owned()
                };
                vec![run.over(reason)]
            }
            _ => Vec::new(),
        }
    }

    /// The join to send again, if this node's rank belongs to an abandoned join. The worker store of that join is gone.
    fn stale_rank(&self, run: &Run) -> Option<Join> {
        let join = self.machine.ready_join().filter(|joining| !joining.is_withdrawn())?.join();
        let (round, rank) =
            run.roster().assignment(self.hello.node).filter(|(round, rank)| *round > join.round && *rank == 0)?;
        match run.placement(rank)? {
            CoordinatorMessage::Complete(placement) if placement.master_port != join.store_port => {
                Some(Join { round, ..join.clone() })
            }
            _ => None,
        }
    }

    /// Join again, if the other nodes have dropped this waiting node, or its rank is stale.
    fn join_again_if_forgotten(&mut self, known: bool, stale: Option<Join>) {
        let asked = self.outbox.has(|sent| matches!(sent, NodeMessage::Join(_) | NodeMessage::Hello(_)));
        if asked || (known && stale.is_none()) {
            return;
        }
        match stale {
            Some(join) => self.outbox.push(NodeMessage::Join(join)),
            None => self.machine.send_join(),
        }
    }
}
