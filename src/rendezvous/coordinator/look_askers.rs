//! The observers that wait for a look at the workers of a run.

use std::time::Instant;

use tokio::sync::oneshot;

use super::event_log::chosen;
use super::looks::Looks;
use super::machine::Machine;
use crate::rendezvous::messages::message::{AskLook, LookAnswer};

/// What an observer gets: what was seen, or a sentence.
pub(super) type Answer = Result<LookAnswer, String>;

/// An observer that waits until all nodes have looked.
#[derive(Debug)]
struct Waiting {
    run_id: String,
    rank: Option<u32>,
    deep: bool,
    reply: oneshot::Sender<Answer>,
}

/// The observers that wait.
#[derive(Debug, Default)]
pub(super) struct LookAskers(Vec<Waiting>);

impl LookAskers {
    /// An observer asks. `knows_all`: it may know which runs there are.
    pub fn ask(
        &mut self,
        AskLook { run_id, rank, deep }: AskLook,
        knows_all: bool,
        reply: oneshot::Sender<Answer>,
        machine: &mut Machine,
        now: Instant,
    ) {
        match chosen(run_id.as_deref(), knows_all, machine) {
            Ok(run_id) => {
                machine.on_look_asked(&run_id, rank.filter(|_| deep), now);
                self.0.push(Waiting { run_id, rank, deep, reply });
            }
            Err(why) => drop(reply.send(Err(why))), // the observer may have gone
        }
    }

    /// Answer those whose look is over.
    pub fn answer(&mut self, machine: &Machine, now: Instant) {
        for waiting in std::mem::take(&mut self.0) {
            let looks = machine.looks(&waiting.run_id);
            if looks.and_then(Looks::awaited_until).is_some_and(|until| now < until) {
                self.0.push(waiting);
                continue;
            }
            let Waiting { run_id, rank, deep, reply } = waiting;
            let answer = match looks {
                Some(looks) => looks.answer(rank, deep).map(|seen| LookAnswer { run_id, seen }),
                None => Err(format!("run `{run_id}` has no nodes")),
            };
            let _ = reply.send(answer); // the observer may have gone
        }
    }

    /// When to call [`Self::answer`] at the latest.
    pub fn next_deadline(&self, machine: &Machine) -> Option<Instant> {
        self.0.iter().filter_map(|waiting| machine.looks(&waiting.run_id)?.awaited_until()).min()
    }
}
