//! Processes at the endpoints of a list, of which one leads: all orders of starts, deaths, questions and answers.

use std::time::Instant;

use elastic_rs::rendezvous::quorum::bootstrap::{Answer, Attempt, Bootstrap, LISTENS_FOR, Seen, Verdict};

use super::explore::{State, digest_of, explore_from};

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
    mistake: Option<Mistake>,
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

/// Go through all histories in which listed processes start and ask so often, and so many die. Any question may get no answer.
/// Returns the number of states.
///
/// # Errors
/// The history in which two lead at once.
pub fn explore(
    endpoints: usize,
    (starts, deaths, asks): (u8, u8, u8),
    mistake: Option<Mistake>,
) -> Result<usize, String> {
    explore_from(&Listed { zero: Instant::now(), mistake, processes: vec![None; endpoints], starts, deaths, asks })
}

impl State for Listed {
    fn digest(&self) -> u64 {
        digest_of(&(&self.processes, self.starts, self.deaths, self.asks))
    }

    fn violation(&self) -> Option<String> {
        let leaders = self.processes.iter().flatten().filter(|process| process.leads).count();
        (leaders > 1).then(|| format!("{leaders} processes lead"))
    }

    fn next(&self) -> impl Iterator<Item = (String, Self)> {
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
                let listens = self.mistake != Some(Mistake::AsksFirst);
                add(format!("{at} asks {to}"), &|next| next.ask(at, to, listens));
                add(format!("{at} asks {to}, which is silent"), &|next| {
                    let silent =
                        if self.mistake == Some(Mistake::SilentIsAbsent) { Heard::Absent } else { Heard::Silent };
                    next.hears(at, to, silent);
                });
            }
            for index in 0..process.heard.len() {
                add(format!("{at} hears {:?}", process.heard[index]), &|next| next.deliver(at, index));
            }
            add(format!("{at} decides"), &|next| next.decide(at));
        }
        all.into_iter()
    }
}

impl Listed {
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
