//! All interleavings of small jobs: ranks that check, threads that read, agents that send, and a coordinator that counts.
//!
//! The model runs the code of the checks itself. A step is what happens without another thread in between: one atomic operation on the
//! counter, or one critical section. Every reachable state is visited.

use std::collections::{HashSet, VecDeque};

use elastic_rs::channel::checks::{Counter, News, Verdict};
use elastic_rs::channel::message::{ToAgent, ToWorker};

use super::{change, failure};

/// What is explored.
#[derive(Clone, Copy)]
struct Job {
    ranks: usize,
    /// Checks that a rank makes while nothing happens.
    checks: u64,
    /// Whether a collective follows each check, which no rank leaves before all have begun it.
    collectives: bool,
    /// Whether the last rank may die.
    deaths: bool,
    /// The world changes this many checks after the highest number.
    after: u64,
    /// Whether a thread stops the counter in the step in which it reads the number.
    is_atomic: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum At {
    /// Behind its last check.
    Running,
    /// Its check has found that there is news, and its number is this.
    Checking(u64),
    Raised(u64),
    Failed,
    Dead,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Rank {
    at: At,
    /// The counter: how many checks, and whether they find news.
    counted: u64,
    is_stopped: bool,
    news: News,
    /// What the agent has sent, and the thread has not read.
    inbox: VecDeque<ToWorker>,
    /// The thread has the lock, and has stopped the counter for this message.
    reading: Option<(ToWorker, u64)>,
    knows_failure: bool,
    acknowledged: Option<u64>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    ranks: Vec<Rank>,
    has_changed: bool,
    was_repeated: bool,
    raise_at: Option<u64>,
    is_failing: bool,
}

impl Rank {
    fn new() -> Rank {
        Rank {
            at: At::Running,
            counted: 0,
            is_stopped: false,
            news: News::default(),
            inbox: VecDeque::new(),
            reading: None,
            knows_failure: false,
            acknowledged: None,
        }
    }

    /// Do something with a counter in this rank's state.
    fn count<T>(&mut self, act: impl FnOnce(&Counter) -> T) -> T {
        let counter = Counter::default();
        (0..self.counted).for_each(|_| assert_eq!(counter.pass(), None));
        if self.is_stopped {
            counter.stop();
        }
        let done = act(&counter);
        self.is_stopped = counter.pass().is_some();
        self.counted = counter.stop() - 1;
        done
    }

    /// Checks that this rank has behind it.
    fn passed(&self) -> u64 {
        self.counted.saturating_sub(u64::from(!matches!(self.at, At::Running | At::Dead)))
    }
}

impl State {
    fn first(job: Job) -> State {
        State {
            ranks: vec![Rank::new(); job.ranks],
            has_changed: false,
            was_repeated: false,
            raise_at: None,
            is_failing: false,
        }
    }

    /// The states after each step that is possible.
    fn next(&self, job: Job) -> Vec<State> {
        let mut after = Vec::new();
        let mut add = |step: &dyn Fn(&mut State)| {
            let mut state = self.clone();
            step(&mut state);
            after.push(state);
        };
        for number in 0..self.ranks.len() {
            let rank = &self.ranks[number];
            if rank.at == At::Dead {
                continue;
            }
            if self.may_check(job, number) {
                add(&|state| state.check(number));
            }
            if rank.at == At::Running && rank.news.has_failed() {
                // The collective that it is in fails.
                add(&|state| state.ranks[number].at = At::Failed);
            }
            if let At::Checking(check) = rank.at
                && rank.reading.is_none()
                && rank.news.clone().verdict(check).is_some()
            {
                add(&|state| state.look(number, check));
            }
            if rank.reading.is_some() {
                add(&|state| state.received(number));
            } else if !rank.inbox.is_empty() {
                add(&|state| state.read(job, number));
            }
            if self.is_failing && !rank.knows_failure {
                add(&|state| {
                    state.ranks[number].knows_failure = true;
                    state.ranks[number].inbox.push_back(failure());
                });
            }
        }
        if !self.has_changed {
            add(&|state| {
                state.has_changed = true;
                state.send_all(&change(1));
            });
        } else if !self.was_repeated {
            // The first rank's agent has connected again.
            add(&|state| {
                state.was_repeated = true;
                state.ranks[0].inbox.push_back(change(1));
            });
        }
        let counts: Option<Vec<u64>> = self.ranks.iter().map(|rank| rank.acknowledged).collect();
        if let (Some(counts), None) = (counts, self.raise_at) {
            let check = counts.into_iter().max().unwrap() + job.after;
            add(&|state| {
                state.raise_at = Some(check);
                state.send_all(&ToWorker::RaiseAt { seq: 1, check });
            });
        }
        if job.deaths && !self.is_failing && self.ranks[job.ranks - 1].at == At::Running {
            add(&|state| {
                state.is_failing = true;
                state.ranks[job.ranks - 1].at = At::Dead;
            });
        }
        after
    }

    fn may_check(&self, job: Job, number: usize) -> bool {
        let rank = &self.ranks[number];
        let may_go_on = rank.counted < job.checks || rank.is_stopped;
        // Another rank's contribution to the collective after its check n comes when it has passed that check.
        let is_free = !job.collectives || self.ranks.iter().all(|other| other.passed() >= rank.counted);
        rank.at == At::Running && may_go_on && is_free
    }

    fn send_all(&mut self, message: &ToWorker) {
        self.ranks.iter_mut().for_each(|rank| rank.inbox.push_back(message.clone()));
    }

    fn check(&mut self, number: usize) {
        let rank = &mut self.ranks[number];
        if let Some(check) = rank.count(Counter::pass) {
            rank.at = At::Checking(check);
        }
    }

    fn look(&mut self, number: usize, check: u64) {
        let rank = &mut self.ranks[number];
        rank.at = match rank.news.verdict(check).unwrap().unwrap() {
            Verdict::GoOn => At::Running,
            Verdict::WorldChanges => At::Raised(check),
            Verdict::PeerFailed => At::Failed,
        };
    }

    fn read(&mut self, job: Job, number: usize) {
        let rank = &mut self.ranks[number];
        let message = rank.inbox.pop_front().unwrap();
        let counted = if job.is_atomic { rank.count(Counter::stop) } else { rank.counted };
        rank.reading = Some((message, counted));
    }

    fn received(&mut self, number: usize) {
        let rank = &mut self.ranks[number];
        let (message, counted) = rank.reading.take().unwrap();
        rank.count(Counter::stop);
        if let Some(ToAgent::Ack { count, .. }) = rank.news.on_message(message, counted) {
            rank.acknowledged = Some(count);
        }
    }

    /// What must hold in every state.
    fn validate(&self) -> Result<(), String> {
        for (number, rank) in self.ranks.iter().enumerate() {
            match (&rank.at, self.raise_at) {
                (At::Raised(at), Some(check)) if *at != check => {
                    return Err(format!("rank {number} raises at check {at}, and others at check {check}"));
                }
                (At::Raised(at), None) => {
                    return Err(format!("rank {number} raises at check {at}, which nobody has named"));
                }
                (_, Some(check)) if rank.passed() >= check => {
                    return Err(format!("rank {number} has passed check {check}"));
                }
                (At::Failed, _) if !self.is_failing => return Err(format!("rank {number} fails, and nobody else")),
                _ => {}
            }
        }
        Ok(())
    }

    /// What must hold in a state after which nothing can happen.
    fn validate_last(&self) -> Result<(), String> {
        let is_over = |rank: &Rank| matches!(rank.at, At::Raised(_) | At::Failed | At::Dead);
        match self.ranks.iter().position(|rank| !is_over(rank)) {
            Some(number) => Err(format!("rank {number} waits for ever")),
            None => Ok(()),
        }
    }
}

/// What an exploration has found.
#[derive(Debug, Default)]
struct Found {
    /// Checks at which all ranks have raised.
    raised: HashSet<u64>,
    /// States at whose end some ranks have raised and others have failed.
    mixed: usize,
}

fn explore(job: Job) -> Result<Found, String> {
    let mut found = Found::default();
    let first = State::first(job);
    let mut seen = HashSet::from([first.clone()]);
    let mut left = vec![first];
    while let Some(state) = left.pop() {
        state.validate()?;
        let after = state.next(job);
        if after.is_empty() {
            state.validate_last()?;
            let raised: Vec<_> = state.ranks.iter().filter(|rank| matches!(rank.at, At::Raised(_))).collect();
            if raised.len() == job.ranks {
                found.raised.extend(state.raise_at);
            } else if !raised.is_empty() && state.ranks.iter().any(|rank| rank.at == At::Failed) {
                found.mixed += 1;
            }
        }
        left.extend(after.into_iter().filter(|state| seen.insert(state.clone())));
    }
    Ok(found)
}

const QUIET: Job = Job { ranks: 2, checks: 3, collectives: false, deaths: false, after: 1, is_atomic: true };

#[test]
fn all_ranks_raise_at_the_same_check_however_far_apart_they_are() {
    let found = explore(QUIET).unwrap();
    assert_eq!(found.raised, HashSet::from([1, 2, 3, 4]), "every check is where it happens in some history");
    assert_eq!(found.mixed, 0);
    let found = explore(Job { ranks: 3, checks: 1, ..QUIET }).unwrap();
    assert_eq!(found.raised, HashSet::from([1, 2]));
}

#[test]
fn a_rank_that_waits_in_a_check_keeps_nobody_in_a_collective_for_ever() {
    let found = explore(Job { collectives: true, ..QUIET }).unwrap();
    assert_eq!(found.raised, HashSet::from([1, 2, 3, 4]));
    let found = explore(Job { ranks: 3, checks: 1, collectives: true, ..QUIET }).unwrap();
    assert_eq!(found.raised, HashSet::from([1, 2]));
}

#[test]
fn a_death_ends_every_wait_and_no_rank_passes_the_check_at_which_others_raise() {
    for collectives in [false, true] {
        let found = explore(Job { ranks: 3, checks: 1, collectives, deaths: true, ..QUIET }).unwrap();
        assert!(found.mixed > 0, "in some histories ranks raise, and others fail");
    }
}

#[test]
fn the_model_finds_a_change_at_a_check_that_a_rank_has_passed() {
    let found = explore(Job { after: 0, ..QUIET });
    assert!(found.as_ref().is_err_and(|why| why.contains("has passed") || why.contains("fails")), "{found:?}");
}

#[test]
fn the_model_finds_a_number_that_is_out_of_date_when_it_is_sent() {
    let found = explore(Job { is_atomic: false, ..QUIET });
    assert!(found.as_ref().is_err_and(|why| why.contains("has passed check")), "{found:?}");
}
