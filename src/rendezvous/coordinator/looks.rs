//! Looks at the workers of one run: who is asked, and what was seen. Pure.
//!
//! A look costs every agent some milliseconds, so those who ask within [`SHARED_FOR`] share one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::hang::grouping::{Group, groups, lines, whole};
use crate::hang::view::View;
use crate::rendezvous::messages::look::PY_SPY_BYTES;
use crate::rendezvous::messages::message::{Look, NodeId, Round};
use crate::rendezvous::run::{Run, SessionId};
use crate::wire::text::{cut, plain, tidy_lines};

/// Whoever asks within this time after a look has begun gets what it saw.
pub const SHARED_FOR: Duration = Duration::from_secs(2);
/// How long the agents have. An agent takes 0.6 s at most; a node that is late is named.
pub const LOOK_LIMIT: Duration = Duration::from_millis(1500);
/// As [`LOOK_LIMIT`] with `py-spy`, which takes 2.2 s at most. The judge of hangs, which may share such a look, waits for 3 s.
pub const DEEP_LOOK_LIMIT: Duration = Duration::from_millis(2800);
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
    /// The rank for which `py-spy` was asked.
    deep: Option<u32>,
    /// What it has shown.
    py_spy: Option<String>,
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
    /// Somebody wants to know where the ranks stand, and what `py-spy` shows of the rank `deep`. Returns the sessions to which the
    /// message is to be sent.
    pub fn begin(&mut self, run: &Run, deep: Option<u32>, now: Instant) -> Option<(Look, Vec<SessionId>)> {
        let is_new = self.began.is_some_and(|began| now.saturating_duration_since(began) < SHARED_FOR);
        let is_shared = is_new || self.awaited_until().is_some_and(|until| now < until);
        if is_shared && self.round == run.round() && (deep.is_none() || deep == self.deep) {
            return None;
        }
        let (number, round) = (self.number + 1, run.round());
        *self = Self { number, round, deep, began: Some(now), ..Self::default() };
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
        Some((Look { round, number, deep }, sessions))
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

    /// A node tells what `py-spy` shows of one of its workers, after the view of it.
    pub fn on_py_spy(&mut self, id: NodeId, number: u64, text: &str) {
        let node = self.awaited.get(&id).filter(|_| number == self.number);
        if node.is_some_and(|node| self.deep.and_then(|rank| self.node_of(rank)) == Some(node.as_str())) {
            self.py_spy = Some(tidy_lines(text, PY_SPY_BYTES));
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
        self.began
            .filter(|_| !self.awaited.is_empty())
            .map(|began| began + if self.deep.is_some() { DEEP_LOOK_LIMIT } else { LOOK_LIMIT })
    }

    /// What was seen, as JSON: of this rank, or of all. `deep`: with what `py-spy` has shown of the rank.
    ///
    /// # Errors
    /// A sentence: nothing was seen of this rank.
    pub fn answer(&self, rank: Option<u32>, deep: bool) -> Result<String, String> {
        let Some(rank) = rank else {
            // Before all have answered it may change.
            return Ok(match self.awaited.is_empty() {
                true => self.answer.get_or_init(|| self.of_all()).clone(),
                false => self.of_all(),
            });
        };
        let mut seen = self.views.get(&rank).cloned().ok_or_else(|| self.unseen(rank))?;
        let mut of_py_spy = if deep { self.of_py_spy(rank) } else { Vec::new() };
        loop {
            let lines = whole(&seen.node, &seen.view).into_iter().chain(of_py_spy.clone()).collect();
            let answer = self.answer_with(&[], lines, Some(&seen));
            let view = &mut seen.view;
            if answer.len() <= ANSWER_BYTES
                || (view.frames.is_empty() && view.groups.is_empty() && of_py_spy.is_empty())
            {
                return Ok(answer);
            }
            // The outermost frames and the last groups say least.
            view.frames.truncate(view.frames.len() / 2);
            view.groups.truncate(view.groups.len() / 2);
            view.signatures.truncate(view.signatures.len() / 2);
            view.data_workers.truncate(view.data_workers.len() / 2);
            of_py_spy.truncate(of_py_spy.len() / 2);
        }
    }

    /// The lines of `py-spy` about this rank, below one that says whose they are.
    fn of_py_spy(&self, rank: u32) -> Vec<String> {
        if self.deep != Some(rank) {
            return vec!["py-spy: another look has begun meanwhile: ask again".to_owned()];
        }
        let text = self.py_spy.as_deref().unwrap_or("the agent has not said what it shows");
        let lines = text.lines().map(|line| format!("  {line}").trim_end().to_owned());
        ["py-spy:".to_owned()].into_iter().chain(lines).collect()
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
