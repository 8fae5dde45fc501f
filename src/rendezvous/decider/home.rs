//! The process that hosts the coordinator: which node is in it, how its end is known, and what the others are told of it.
//!
//! Without a coordinator no world can form. So when the node in its process leaves, and the job has not ended, the coordinator
//! decides nothing more: it tells everybody, and closes all sessions. If a person has ended the agent at its keyboard, that
//! ends the job; after any other end, such as a pod that is moved, a coordinator may come back to the same address.

use std::collections::BTreeMap;
use std::time::Instant;

use super::decide::close_if_all_done;
use super::members::{close, depart, note};
use super::state::{Node, Run, SessionId};
use crate::rendezvous::coordinator::machine::{Command, Machine};
use crate::rendezvous::protocol::message::{CoordinatorMessage, Hello, HostSeat, NodeId, Placed, Verdict};

/// The process that a coordinator runs in, as the coordinator itself knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// Number of the process, as in [`Hello::process`]: tells which node is in it.
    pub process: u64,
    /// Where it listens: a digest of the machine's boot, its network namespace, and the addresses with their port. The kernel
    /// gives them to one listener at a time. `None` if the system does not tell.
    pub place: Option<u64>,
    /// Another number of the process, which all members may know.
    pub life: u64,
}

impl Home {
    /// Whether the node that introduces itself is the one that hosts this coordinator.
    fn is_of(&self, hello: &Hello) -> bool {
        hello.hosts && hello.process == self.process
    }
}

/// This coordinator's process ends.
#[derive(Clone, Debug)]
pub(in crate::rendezvous) struct Leaving {
    /// The run of the node in it.
    run_id: String,
    /// Whether the world of that run must re-form: not if the node was a spare, or had finished.
    interrupts: bool,
    why: String,
}

impl Leaving {
    /// What a node is told.
    fn message(&self, run_id: &str) -> CoordinatorMessage {
        CoordinatorMessage::Leaving { why: self.why.clone(), interrupts: self.interrupts && self.run_id == run_id }
    }
}

impl Run {
    /// Note which node is in the coordinator's own process.
    pub(in crate::rendezvous) fn meet_host(&mut self, hello: &Hello, home: Option<&Home>) {
        if let Some(home) = home.filter(|home| home.is_of(hello)) {
            self.host = Some((hello.node, *home));
        }
    }

    /// Whether the node is in the coordinator's own process.
    pub(in crate::rendezvous) fn is_host(&self, id: NodeId) -> bool {
        self.host.is_some_and(|(host, _)| host == id)
    }

    /// What members of the current world are told of the host's place in it.
    pub(in crate::rendezvous) fn host_seat(&self) -> Option<HostSeat> {
        let (id, home) = self.host?;
        let rank = self.nodes.get(&id).and_then(|node| self.last_rank(node))?;
        Some(HostSeat { rank, place: home.place?, life: home.life })
    }

    /// A member of the current world has reported to a restarted coordinator, and has said who hosted the one before.
    pub(in crate::rendezvous) fn hear_of_host(&mut self, placed: Placed, home: Option<&Home>) {
        let gone = |seat: &HostSeat| home.is_some_and(|home| home.place == Some(seat.place) && home.life != seat.life);
        self.gone_rank = placed.host.filter(gone).map(|seat| seat.rank).or(self.gone_rank);
    }

    /// How many members need not be waited for: the one that hosted the coordinator before this one, unless it has reported.
    pub(in crate::rendezvous) fn gone_count(&self) -> usize {
        let unheard = |rank: &u32| self.world.as_ref().is_some_and(|w| *rank < w.size && !w.members.contains_key(rank));
        usize::from(self.gone_rank.as_ref().is_some_and(unheard))
    }
}

impl Machine {
    /// Whether this coordinator's process ends, and the node is told nothing else: nobody is admitted any more, except to
    /// learn how its job has ended.
    pub(in crate::rendezvous) fn turns_away(&mut self, session: SessionId, hello: &Hello) -> bool {
        let ended = self.run(&hello.run_id).is_some_and(|run| run.closed.is_some());
        let Some(leaving) = self.leaving.as_ref().filter(|_| !ended) else { return false };
        self.commands.push(Command::Send { session, message: leaving.message(&hello.run_id) });
        self.commands.push(Command::End { session });
        true
    }

    /// The node in this coordinator's own process has left.
    pub(in crate::rendezvous) fn on_host_left(
        &mut self,
        run_id: &str,
        id: NodeId,
        reason: &str,
        signal: Option<i32>,
        now: Instant,
    ) {
        let Some(run) = self.runs.get_mut(run_id) else { return };
        let label = run.nodes.get(&id).map(Node::label).unwrap_or_default();
        let must_re_form = run.waiting_for_members() > 0;
        depart(run, id, &format!("left: {reason}"), now, &mut self.commands);
        let interrupts = must_re_form || run.interrupted.is_some();
        run.remove(id);
        run.host = None;
        let out = &mut self.commands;
        if run.closed.is_none() {
            close_if_all_done(run, out);
        }
        if run.closed.is_none() && signal.is_some_and(is_from_keyboard) {
            let cause = format!("{reason}, and its process hosted the coordinator");
            close(run, Verdict::Stopped { by: label.clone(), cause }, out);
            self.end_sessions(|of| of == run_id, None);
        }
        let why = format!("{label}, whose process hosted it, left: {reason}");
        let leaving = Leaving { run_id: run_id.to_owned(), interrupts, why };
        let ended: Vec<String> =
            self.runs.iter().filter(|(_, run)| run.closed.is_some()).map(|(id, _)| id.clone()).collect();
        self.end_sessions(|of| !ended.iter().any(|ended| ended == of), Some(&leaving));
        self.leaving = Some(leaving);
        let all: Vec<String> = self.runs.keys().cloned().collect();
        all.iter().for_each(|run_id| self.settle(run_id, now));
    }

    /// End the sessions of these runs, in which nobody is then.
    fn end_sessions(&mut self, of: impl Fn(&str) -> bool, leaving: Option<&Leaving>) {
        let (ended, kept): (BTreeMap<_, _>, _) =
            std::mem::take(&mut self.sessions).into_iter().partition(|(_, (run_id, _))| of(run_id));
        self.sessions = kept;
        for (session, (run_id, id)) in ended {
            if let Some(leaving) = leaving {
                self.commands.push(Command::Send { session, message: leaving.message(&run_id) });
            }
            self.commands.push(Command::End { session });
            if let Some(run) = self.runs.get_mut(&run_id) {
                run.remove(id);
            }
        }
        if let Some(leaving) = leaving {
            for run in self.runs.values_mut().filter(|run| of(&run.id)) {
                note(run, format!("no world can form any more: {}", leaving.why), &mut self.commands);
                // Those whose connection is broken find nobody here.
                run.nodes.keys().copied().collect::<Vec<_>>().into_iter().for_each(|id| run.remove(id));
            }
        }
    }
}

/// Whether a person sends this signal at the terminal, to end what runs there: SIGINT, SIGQUIT.
fn is_from_keyboard(signal: i32) -> bool {
    matches!(signal, 2 | 3)
}
