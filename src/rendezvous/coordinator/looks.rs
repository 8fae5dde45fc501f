//! Looks at the workers of one run: who is asked, and what was seen. Pure.
//!
//! A look costs every agent some milliseconds, so those who ask within [`SHARED_FOR`] share one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::hang::grouping::{Group, groups, lines, whole};
use crate::hang::view::View;
use crate::rendezvous::messages::message::{Look, NodeId, Round};
use crate::rendezvous::run::{Run, SessionId};
use crate::wire::text::{cut, plain};

/// Whoever asks within this time after a look has begun gets what it saw.
pub const SHARED_FOR: Duration = Duration::from_secs(2);
/// How long the agents have. An agent takes 0.6 s at most; a node that is late is named.
pub const LOOK_LIMIT: Duration = Duration::from_millis(1500);
/// Most bytes of all views of a look: those that come later are left out. 4,096 ranks have 2 KiB each as a rule.
const VIEWS_BYTES: usize = 32 << 20;
/// What a view takes at least, with all that is kept for it.
const LEAST_BYTES: usize = 512;
/// Longest sentence of a node about what it cannot read.
const PROBLEM_BYTES: usize = 256;

/// Most bytes of an answer: a frame has room for more.
const ANSWER_BYTES: usize = 56 * 1024;
/// Most groups of an answer.
const GROUPS_SENT: usize = 64;
/// Most nodes that an answer names because they were silent, or cannot read frames.
const NODES_SENT: usize = 16;
/// Most nodes that say in words why frames cannot be read.
const PROBLEMS_SHOWN: usize = 3;

/// The last look at the workers of a run.
#[derive(Clone, Debug, Default)]
pub struct Looks {
    number: u64,
    round: Round,
    began: Option<Instant>,
    /// The members that were asked and have not answered, by their names.
    awaited: BTreeMap<NodeId, String>,
    /// Those that were not asked, because they are not connected or have another agent.
    unasked: BTreeSet<String>,
    views: BTreeMap<u32, Seen>,
    bytes: usize,
    problems: BTreeMap<String, String>,
    /// The answer about all ranks, for those who share the look.
    answer: OnceLock<String>,
}

/// What was seen of a rank.
#[derive(Clone, Debug)]
struct Seen {
    /// The name of its node.
    node: String,
    view: View,
}

impl Looks {
    /// Somebody wants to know where the ranks stand. Returns the sessions to which the message is to be sent.
    pub fn begin(&mut self, run: &Run, now: Instant) -> Option<(Look, Vec<SessionId>)> {
        let is_shared = self.began.is_some_and(|began| now.saturating_duration_since(began) < SHARED_FOR);
        if is_shared && self.round == run.round() {
            return None;
        }
        let (number, round) = (self.number + 1, run.round());
        *self = Self { number, round, began: Some(now), ..Self::default() };
        let mut sessions = Vec::new();
        let roster = run.roster();
        for (id, node) in roster.of(roster.active()).filter(|(_, node)| run.is_current(node, round)) {
            match node.session.filter(|_| node.reports_steps) {
                Some(session) => {
                    sessions.push(session);
                    self.awaited.insert(id, node.name.clone());
                }
                None => drop(self.unasked.insert(node.name.clone())),
            }
        }
        Some((Look { round, number }, sessions))
    }

    /// A node tells what it saw of one of its workers.
    pub fn on_view(&mut self, id: NodeId, number: u64, view: View) {
        let Some(node) = self.awaited.get(&id).filter(|_| number == self.number) else { return };
        let bytes = view.encode().len().max(LEAST_BYTES);
        let is_wanted = view.round == self.round.0 && !self.views.contains_key(&view.rank);
        if is_wanted && self.bytes + bytes <= VIEWS_BYTES && view.validate().is_ok() {
            self.bytes += bytes;
            self.answer.take();
            self.views.insert(view.rank, Seen { node: node.clone(), view });
        }
    }

    /// The look is over on a node.
    pub fn on_looked(&mut self, id: NodeId, number: u64, problem: Option<String>) {
        if number == self.number
            && let Some(node) = self.awaited.remove(&id)
        {
            self.problems.extend(problem.map(|problem| (node, cut(plain(problem), PROBLEM_BYTES))));
            self.answer.take();
        }
    }

    /// What was seen.
    pub fn views(&self) -> impl Iterator<Item = &View> {
        self.views.values().map(|seen| &seen.view)
    }

    /// The name of the node on which a rank was seen.
    pub fn node_of(&self, rank: u32) -> Option<&str> {
        self.views.get(&rank).map(|seen| seen.node.as_str())
    }

    /// Until when nodes are awaited. `None`: all have answered.
    pub fn awaited_until(&self) -> Option<Instant> {
        self.began.filter(|_| !self.awaited.is_empty()).map(|began| began + LOOK_LIMIT)
    }

    /// What was seen, as JSON: of this rank, or of all.
    ///
    /// # Errors
    /// A sentence: nothing was seen of this rank.
    pub fn answer(&self, rank: Option<u32>) -> Result<String, String> {
        let Some(rank) = rank else {
            // Before all have answered it may change.
            return Ok(match self.awaited.is_empty() {
                true => self.answer.get_or_init(|| self.of_all()).clone(),
                false => self.of_all(),
            });
        };
        let mut seen = self.views.get(&rank).cloned().ok_or_else(|| self.unseen(rank))?;
        loop {
            let lines = whole(&seen.node, &seen.view);
            let answer = self.answer_with(&[], lines, Some(&seen));
            let view = &mut seen.view;
            if answer.len() <= ANSWER_BYTES || (view.frames.is_empty() && view.groups.is_empty()) {
                return Ok(answer);
            }
            // The outermost frames and the last groups say least.
            view.frames.truncate(view.frames.len() / 2);
            view.groups.truncate(view.groups.len() / 2);
            view.signatures.truncate(view.signatures.len() / 2);
            view.data_workers.truncate(view.data_workers.len() / 2);
        }
    }

    fn of_all(&self) -> String {
        let groups = groups(self.views.values().map(|seen| (seen.node.as_str(), &seen.view)));
        let lines = if groups.is_empty() && self.awaited.is_empty() && self.unasked.is_empty() {
            vec!["no worker runs".to_owned()]
        } else {
            lines(&groups)
        };
        let mut sent = &groups[..groups.len().min(GROUPS_SENT)];
        loop {
            let answer = self.answer_with(sent, lines.clone(), None);
            if answer.len() <= ANSWER_BYTES || sent.is_empty() {
                return answer;
            }
            sent = &sent[..sent.len() / 2]; // names may be long
        }
    }

    fn answer_with(&self, groups: &[Group], mut lines: Vec<String>, seen: Option<&Seen>) -> String {
        let first = |nodes: &mut dyn Iterator<Item = &String>| nodes.next().cloned().unwrap_or_default();
        match self.awaited.len() {
            0 => {}
            1 => lines.push(format!("1 node has not answered: {}", first(&mut self.awaited.values()))),
            more => {
                lines.push(format!("{more} nodes have not answered: {} and others", first(&mut self.awaited.values())))
            }
        }
        match self.unasked.len() {
            0 => {}
            one_or_more => lines.push(format!(
                "{one_or_more} of the nodes cannot be asked: {}{}; it is not connected now, or has PyTorch's own agent (agent=torch), \
                 where py-spy shows its workers",
                first(&mut self.unasked.iter()),
                if one_or_more > 1 { " and others" } else { "" }
            )),
        }
        lines.extend(self.problems.iter().take(PROBLEMS_SHOWN).map(|(node, why)| format!("{node}: {why}")));
        let silent = self.awaited.values().chain(&self.unasked).take(NODES_SENT).map(String::as_str).collect();
        let problems = self.problems.iter().take(NODES_SENT).map(|(node, why)| (node.as_str(), why.as_str())).collect();
        let (round, ranks, view) = (self.round.0, self.views.len(), seen.map(|seen| &seen.view));
        let silent_more = (self.awaited.len() + self.unasked.len()).saturating_sub(NODES_SENT);
        // All of its keys are texts, so nothing in it can fail.
        serde_json::to_string(&Answer { round, ranks, groups, view, silent, silent_more, problems, lines })
            .unwrap_or_default()
    }

    fn unseen(&self, rank: u32) -> String {
        match self.views.keys().next_back() {
            Some(last) => format!(
                "nothing was seen of rank {rank}: ranks {} to {last} were",
                self.views.keys().next().unwrap_or(last)
            ),
            None => format!(
                "nothing was seen of rank {rank}, nor of any other: elastic-rs stacks, without --rank, says why"
            ),
        }
    }
}

/// An answer, as JSON.
#[derive(Serialize)]
struct Answer<'a> {
    round: u64,
    ranks: usize,
    groups: &'a [Group],
    #[serde(skip_serializing_if = "Option::is_none")]
    view: Option<&'a View>,
    silent: Vec<&'a str>,
    silent_more: usize,
    problems: BTreeMap<&'a str, &'a str>,
    lines: Vec<String>,
}

#[cfg(test)]
mod tests;
