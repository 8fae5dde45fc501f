//! Processes at the endpoints of a list, of which one leads: all orders of starts, deaths, questions and answers.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use elastic_rs::rendezvous::quorum::bootstrap::{Answer, Attempt, Bootstrap, LISTENS_FOR, Seen, Verdict};

use super::deep;

/// What a question brings, once it is delivered.
#[derive(Clone, Debug, Hash)]
enum Heard {
    Absent,
    Silent,
    Answered(Answer<usize>),
}

#[derive(Clone, Debug, Hash)]
struct Process {
    bootstrap: Bootstrap<usize>,
    leads: bool,
    asked: Vec<usize>,
    /// Answers that are on their way.
    heard: Vec<(Attempt, Heard)>,
}

#[derive(Clone, Debug)]
struct Listed {
    zero: Instant,
    /// `None`: not started, or dead.
    processes: Vec<Option<Process>>,
    starts: u8,
    deaths: u8,
    asks: u8,
}

/// A mistake that must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// Silence is taken for absence.
    SilentIsAbsent,
    /// A process asks before it listens.
    AsksFirst,
}

struct Search {
    mistake: Option<Mistake>,
    seen: HashSet<u64>,
    trace: Vec<String>,
}

/// Let so many listed processes start, so many die, and start again, and ask so often in all. Any of them may be cut off from any other for a while.
///
/// # Errors
/// The history in which two lead at once.
pub fn explore(
    endpoints: usize,
    (starts, deaths, asks): (u8, u8, u8),
    mistake: Option<Mistake>,
) -> Result<usize, String> {
    let start = Listed { zero: Instant::now(), processes: vec![None; endpoints], starts, deaths, asks };
    deep(|| {
        let mut search = Search { mistake, seen: HashSet::new(), trace: Vec::new() };
        search.go(&start)?;
        Ok(search.seen.len())
    })
}

impl Search {
    fn go(&mut self, listed: &Listed) -> Result<(), String> {
        let leaders = listed.processes.iter().flatten().filter(|process| process.leads).count();
        if leaders > 1 {
            return Err(format!("{}\n{leaders} processes lead", self.trace.join("\n")));
        }
        let mut hasher = DefaultHasher::new();
        (&listed.processes, listed.starts, listed.deaths, listed.asks).hash(&mut hasher);
        if !self.seen.insert(hasher.finish()) {
            return Ok(());
        }
        for (step, next) in listed.next(self.mistake) {
            self.trace.push(step);
            self.go(&next)?;
            self.trace.pop();
        }
        Ok(())
    }
}

impl Listed {
    /// Everything that may happen, and what is then.
    fn next(&self, mistake: Option<Mistake>) -> Vec<(String, Self)> {
        let mut all = Vec::new();
        let mut add = |step: String, change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            all.push((step, next));
        };
        for (at, process) in self.processes.iter().enumerate() {
            let Some(process) = process else {
                if self.starts > 0 {
                    add(format!("{at} starts"), &|next| next.start(at));
                }
                continue;
            };
            if self.deaths > 0 {
                add(format!("{at} dies"), &|next| {
                    next.deaths -= 1;
                    next.processes[at] = None;
                });
            }
            if process.leads {
                continue;
            }
            let may_ask = |to: &usize| self.asks > 0 && *to != at;
            for to in (0..self.processes.len()).filter(|to| may_ask(to) && process.asked.iter().all(|it| it != to)) {
                let listens = mistake != Some(Mistake::AsksFirst);
                add(format!("{at} asks {to}"), &|next| next.ask(at, to, listens));
                add(format!("{at} asks {to}, which is silent"), &|next| {
                    let silent = if mistake == Some(Mistake::SilentIsAbsent) { Heard::Absent } else { Heard::Silent };
                    next.hears(at, to, silent);
                });
            }
            for index in 0..process.heard.len() {
                add(format!("{at} hears {:?}", process.heard[index]), &|next| next.deliver(at, index));
            }
            add(format!("{at} decides"), &|next| next.decide(at));
        }
        all
    }

    fn start(&mut self, at: usize) {
        self.starts -= 1;
        let bootstrap = Bootstrap::new(at, self.processes.len(), self.zero);
        self.processes[at] = Some(Process { bootstrap, leads: false, asked: Vec::new(), heard: Vec::new() });
    }

    fn ask(&mut self, at: usize, to: usize, listens: bool) {
        let heard = match &mut self.processes[to] {
            Some(other) if listens || other.leads => Heard::Answered(other.bootstrap.on_asked(at)),
            _ => Heard::Absent,
        };
        self.hears(at, to, heard);
    }

    fn hears(&mut self, at: usize, to: usize, heard: Heard) {
        self.asks -= 1;
        let Some(process) = &mut self.processes[at] else { return };
        let attempt = process.bootstrap.ask(to);
        process.asked.push(to);
        process.heard.push((attempt, heard));
    }

    fn deliver(&mut self, at: usize, index: usize) {
        let Some(process) = &mut self.processes[at] else { return };
        let (attempt, heard) = process.heard.remove(index);
        process.asked.retain(|place| *place != attempt.place);
        match heard {
            Heard::Absent => process.bootstrap.on_seen(attempt, Seen::Absent),
            Heard::Silent => process.bootstrap.on_seen(attempt, Seen::Silent),
            Heard::Answered(Answer::Fresh) => process.bootstrap.on_seen(attempt, Seen::Fresh),
            Heard::Answered(Answer::Leads) => process.bootstrap.on_leader(attempt.place),
            Heard::Answered(Answer::Knows(leader)) => process.bootstrap.on_leader(leader),
        }
    }

    fn decide(&mut self, at: usize) {
        let now = self.zero + LISTENS_FOR;
        let Some(process) = &mut self.processes[at] else { return };
        process.leads = process.bootstrap.decide(now) == Verdict::Lead;
    }
}
