//! Joins of a node: asking for a place, withdrawing the request, and giving up. Part of [`super`].

use std::mem;
use std::time::{Duration, Instant};

use super::backend::Counterpart;
use super::join::{Joining, Link, Store, WITHDRAW_GRACE};
use super::{JoinError, LEFT, NodeCommand, NodeMachine};
use crate::rendezvous::messages::message::{Join, JoinWorkers, NEVER, NodeMessage, Placement};

impl NodeMachine {
    /// Ask for a place in the next round, giving up at `now + timeout`. [`NodeMachine::take_outcome`] returns the answer.
    ///
    /// The node's empty worker store listens on `store_port`. With `workers`, the answer has their ranks.
    pub fn join(
        &mut self,
        store_port: u16,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
        now: Instant,
    ) {
        self.begin_join(Store::Open, store_port, node_rank, workers, timeout, now);
    }

    /// Like [`NodeMachine::join`], with a worker store that the caller opens after the welcome. Only then is the address known at which
    /// other nodes find this one: see [`NodeMachine::wanted_store`].
    pub fn join_with_new_store(
        &mut self,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
        now: Instant,
    ) {
        self.begin_join(Store::OpenFor(None), 0, node_rank, workers, timeout, now);
    }

    /// The address for which the caller must open a worker store, if a join waits for one. Answer with
    /// [`NodeMachine::on_store_opened`]. If the address changes before the node has its place, another store is wanted.
    pub fn wanted_store(&self) -> Option<String> {
        let welcomed = matches!(self.link, Link::Up { welcomed: true, .. });
        let joining = self.joining.as_ref().filter(|joining| welcomed && joining.withdrawn_at.is_none())?;
        let addr = self.view.addr.as_ref()?;
        (!joining.is_ready(Some(addr))).then(|| addr.clone())
    }

    /// The store wanted for `addr` listens on this port.
    pub fn on_store_opened(&mut self, addr: String, port: u16) {
        let Some(joining) = self.joining.as_mut().filter(|joining| joining.withdrawn_at.is_none()) else { return };
        joining.join.store_port = port;
        joining.store = Store::OpenFor(Some(addr));
        // Set no earlier: after a reconnect, the coordinator would wait for a join that may not come.
        self.hello.joining = true;
        self.send_join();
    }

    /// Send the pending join, if the coordinator has welcomed this node and the worker store is open.
    pub(in crate::rendezvous) fn send_join(&mut self) {
        let welcomed = matches!(self.link, Link::Up { welcomed: true, .. });
        if let Some(joining) = self.ready_join().filter(|_| welcomed) {
            let message = joining.message(self.changes_in_place());
            self.commands.push(NodeCommand::Send(message));
            self.hello.joining = true;
        }
    }

    /// The pending join, if its worker store is open.
    pub(in crate::rendezvous) fn ready_join(&self) -> Option<&Joining> {
        self.joining.as_ref().filter(|joining| joining.is_ready(self.view.addr.as_deref()))
    }

    fn begin_join(
        &mut self,
        store: Store,
        store_port: u16,
        node_rank: Option<u32>,
        workers: Option<JoinWorkers>,
        timeout: Duration,
        now: Instant,
    ) {
        (self.outcome, self.report, self.view.fenced, self.lost_survivors) = (None, None, None, None);
        let refusal = match (&self.view.failed, &self.view.closed) {
            _ if self.left => Some(JoinError::Connection(LEFT.to_owned())),
            (Some(error), _) => Some(error.clone()),
            (None, Some(_)) if self.view.over.is_some() => self.view.over.clone(),
            (None, Some(verdict)) => Some(JoinError::Closed { verdict: verdict.clone(), spare: false }),
            (None, None) => None,
        };
        if let Some(error) = refusal {
            self.outcome = Some(Err(error));
            return;
        }
        if self.withdrawing {
            // The answer to the abandoned join may still arrive, and would look like the answer to this one.
            self.commands.push(NodeCommand::Disconnect);
            self.lose("an earlier join was abandoned".to_owned(), now);
        }
        if let Some(placed) = &mut self.hello.placed {
            placed.active = false;
        }
        self.hello.joining = store == Store::Open;
        (self.view.waiting, self.view.unfinished) = (0, None);
        let survival = mem::take(&mut self.brings);
        let mut workers = workers.map(|workers| JoinWorkers { survival, ..workers });
        if let Some(workers) = workers.as_mut().filter(|workers| workers.have_all_survived()) {
            // A node that has lost a worker has not stopped for the change alone.
            workers.check = self.check().filter(|check| *check != NEVER);
        }
        self.end_part();
        let join = Join { round: self.view.round, store_port, node_rank, workers };
        self.joining = Some(Joining::new(join, store, now, now + timeout));
        self.send_join();
    }

    /// Withdraw the pending join, because its caller no longer waits (Ctrl-C). Has no effect once the outcome has been taken.
    pub fn abandon(&mut self) {
        let (joining, outcome) = (self.joining.take(), self.outcome.take());
        let placed = matches!(outcome, Some(Ok(_)));
        if joining.is_none() && !placed {
            return;
        }
        self.hello.joining = false;
        if let Some(placed) = self.hello.placed.as_mut().filter(|_| placed) {
            placed.active = false;
        }
        self.withdraw();
    }

    /// Tell the coordinator that this node no longer asks for a place. Its Hello may have said that it does, so it is told also before
    /// the welcome.
    fn withdraw(&mut self) {
        if matches!(self.link, Link::Up { .. }) {
            self.withdrawing = true;
            self.commands.push(NodeCommand::Send(NodeMessage::Withdraw));
        }
    }

    /// Withdraw the pending join once its time is over, and end it if the withdrawal is not answered.
    pub(super) fn give_up_join_if_due(&mut self, now: Instant) {
        if let Some((since, until)) = self.patience().filter(|(_, until)| *until <= now) {
            let text = format!("{} has failed for {:.1?}: {}", self.counterpart.name(), until - since, self.last_error);
            return self.resolve(Err(JoinError::Connection(text)));
        }
        let Some(joining) = &mut self.joining else { return };
        let after = joining.deadline - joining.since;
        match joining.withdrawn_at {
            None if joining.is_due(now) => {
                joining.withdrawn_at = Some(now);
                self.hello.joining = false;
                if matches!(self.link, Link::Up { welcomed: true, .. }) {
                    self.commands.push(NodeCommand::Send(NodeMessage::Withdraw));
                } else {
                    let name = self.counterpart.name();
                    let text = format!("could not reach {name} in {after:.1?}: {}", self.why_away());
                    self.resolve(Err(JoinError::Connection(text)));
                    self.withdraw();
                }
            }
            Some(at) if now >= at + WITHDRAW_GRACE => {
                let progress =
                    joining.progress.clone().unwrap_or_else(|| format!("{} does not answer", self.counterpart.place()));
                self.resolve(Err(JoinError::Timeout { after, progress }));
                if matches!(self.link, Link::Up { .. }) {
                    // A place may still arrive on this connection, and would look like the answer to the next join. So the
                    // connection ends.
                    self.commands.push(NodeCommand::Disconnect);
                    self.lose(format!("{} does not answer", self.counterpart.place()), now);
                }
            }
            _ => {}
        }
    }

    /// The instants between which a pending join over a cell waits for a failing backend.
    pub(super) fn patience(&self) -> Option<(Instant, Instant)> {
        let joining = self.joining.as_ref().filter(|_| self.counterpart == Counterpart::Cell)?;
        let since = self.view.out_of_reach_since?.max(joining.since);
        Some((since, since + self.hello.settings.lease()))
    }

    /// End the pending join, if there is one.
    pub(in crate::rendezvous) fn resolve(&mut self, outcome: Result<Placement, JoinError>) {
        if self.joining.take().is_some() {
            self.hello.joining = false;
            self.outcome = Some(outcome);
        }
    }
}
