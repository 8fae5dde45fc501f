//! When a hang is told, over made-up looks.

use super::*;
use crate::hang::view::{Call, Class, Entry, Gil, Group, Signature, State, View, WORLD};

mod pacing;

/// One node with two ranks, in virtual time. Rank 1 waits in a collective that rank 0 has not entered.
struct Stage {
    judge: Judge,
    start: Instant,
    now: Instant,
    round: u64,
    views: Vec<View>,
    /// What the judge did, with the second at which it did it.
    log: Vec<(f64, Effect)>,
    /// Answers to looks come after this.
    answer: Duration,
    /// Only steps of an optimizer are seen.
    is_counted: bool,
}

fn secs(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// A rank of round 1 that has entered the collective of this number, and waits in it or not.
pub(crate) fn view(rank: u32, last: u64, is_pending: bool) -> View {
    let entry = Entry { seq: last, at: 0, signature: 0 };
    let pending = if is_pending { vec![entry] } else { Vec::new() };
    let world = Group { name: WORLD.into(), last, oldest: last, pending, tail: vec![entry], ..Group::default() };
    View {
        pid: 100 + rank,
        state: State::Sleeping,
        gil: Gil::Free,
        answered: true,
        class: Some(Class::Idle),
        signatures: vec![Signature { op: "all_reduce".into(), shape: String::new() }],
        groups: vec![world],
        ..View::new(rank, 1)
    }
}

impl Stage {
    fn new(options: Options) -> Self {
        let start = Instant::now();
        let mut judge = Judge::new(options);
        judge.on_round(1, [7], start);
        let views = vec![view(0, 8, false), view(1, 9, true)];
        Self { judge, start, now: start, round: 1, views, log: Vec::new(), answer: secs(0.5), is_counted: false }
    }

    /// The node stands still since so many seconds before now.
    fn still(mut self, ago: f64, step: Option<f64>) -> Self {
        self.say_still(ago, step, None);
        self
    }

    fn say_still(&mut self, ago: f64, step: Option<f64>, section: Option<u32>) {
        let still = Still {
            round: self.round,
            since: self.now - secs(ago),
            has_stepped: step.is_some(),
            step_time: step.map(secs),
            is_counted: self.is_counted,
            section,
        };
        self.judge.on_still(7, still, self.now);
        self.take();
    }

    fn moved(&mut self) {
        self.judge.on_moved(7, self.round, self.now, true, self.now);
        self.take();
    }

    fn take(&mut self) {
        let at = (self.now - self.start).as_secs_f64();
        self.log.extend(self.judge.take_effects().into_iter().map(|effect| (at, effect)));
    }

    /// Let time pass, and answer looks.
    fn pass(&mut self, seconds: f64) {
        let until = self.now + secs(seconds);
        let mut answer: Option<(u64, Instant)> = None;
        for _ in 0..10_000 {
            let seen = self.log.len();
            if let Some((at, Effect::Look(look))) = self.log.last().filter(|_| answer.is_none()) {
                answer = Some((*look, self.start + secs(*at) + self.answer));
                self.log.pop();
            }
            let due = self.judge.next_deadline().into_iter().chain(answer.map(|(_, at)| at)).min();
            let Some(at) = due.filter(|at| *at <= until) else { break };
            self.now = self.now.max(at);
            match answer.filter(|(_, at)| *at <= self.now) {
                Some((look, _)) => {
                    answer = None;
                    self.judge.on_views(look, self.views.clone(), self.now);
                }
                None => self.judge.on_tick(self.now),
            }
            self.take();
            assert!(seen <= self.log.len() + 1);
        }
        if let Some((look, at)) = answer {
            // It is answered when more time passes.
            self.log.push(((at - self.answer - self.start).as_secs_f64(), Effect::Look(look)));
        }
        self.now = until;
    }

    /// What was done but for looks, with whole seconds.
    fn done(&mut self) -> Vec<(u64, &'static str)> {
        let kept: Vec<_> = self.log.iter().filter(|(_, effect)| !matches!(effect, Effect::Look(_))).cloned().collect();
        self.log.retain(|(_, effect)| matches!(effect, Effect::Look(_)));
        let name = |effect: &Effect| match effect {
            Effect::Look(_) => "look",
            Effect::Waits { .. } => "waits",
            Effect::Suspended => "suspended",
            Effect::Found { .. } => "found",
            Effect::Over { .. } => "over",
            Effect::Restart { .. } => "restart",
        };
        kept.iter().map(|(at, effect)| (*at as u64, name(effect))).collect()
    }

    fn all(&mut self, change: impl Fn(&mut View)) {
        self.views.iter_mut().for_each(change);
    }
}

fn restart() -> Options {
    Options { mode: Mode::Restart, ..Options::default() }
}

#[test]
fn an_idle_rank_is_named_at_once_and_found_late() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    stage.pass(170.0);
    assert_eq!(stage.done(), [(0, "waits")]);
    assert_eq!(stage.judge.finding().unwrap().0.ranks.first(), Some(0));
    stage.pass(300.0);
    assert_eq!(stage.done(), [(178, "found")]);
    stage.moved();
    assert_eq!(stage.done(), [(470, "over")]);
    assert!(stage.judge.finding().is_none() && stage.judge.next_deadline().is_none());
}

#[test]
fn a_certain_hang_is_found_by_two_equal_looks() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    (stage.views[0].state, stage.views[0].answered) = (State::Stopped, false);
    stage.views[0].groups.clear();
    stage.pass(60.0);
    assert_eq!(stage.done(), [(0, "waits"), (6, "found")]);
}

#[test]
fn looks_that_differ_prove_nothing() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    (stage.views[0].state, stage.views[0].answered) = (State::Stopped, false);
    stage.views[0].groups.clear();
    for at in 0..8 {
        // Rank 1 enters one collective after the other.
        stage.views[1] = view(1, 9 + at, true);
        stage.pass(4.0);
    }
    assert!(stage.done().iter().all(|(_, what)| *what == "waits"));
    stage.pass(60.0);
    assert_eq!(stage.done().iter().filter(|(_, what)| *what == "found").count(), 1);
}

#[test]
fn a_busy_rank_has_more_time() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    stage.views[0].class = Some(Class::Busy);
    stage.pass(590.0);
    assert_eq!(stage.done(), [(0, "waits")]);
    stage.pass(30.0);
    assert_eq!(stage.done(), [(598, "found")]);
}

#[test]
fn the_time_before_a_rank_became_idle_does_not_count() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    stage.views[0].class = Some(Class::Busy);
    stage.pass(150.0);
    stage.views[0].class = Some(Class::Idle);
    stage.pass(100.0);
    assert_eq!(stage.done(), [(0, "waits")]);
    stage.pass(150.0);
    let done = stage.done();
    assert!(matches!(done[..], [(300..=335, "found")]), "{done:?}");
}

#[test]
fn limits_grow_with_the_step_and_with_what_ended_by_itself_and_outlive_rounds() {
    let mut stage = Stage::new(Options::default()).still(30.0, Some(10.0));
    stage.pass(165.0);
    assert_eq!(stage.done(), [(0, "waits")], "20 steps are 200 s");
    stage.moved();
    stage.judge.on_round(2, [7], stage.now);
    stage.round = 2;
    stage.all(|view| view.round = 2);
    stage.say_still(0.0, Some(0.2), None);
    stage.pass(500.0);
    let done = stage.done();
    // Three times the 195 s that ended by themselves.
    assert!(!done.iter().any(|(_, what)| *what == "found"), "{done:?}");
    stage.pass(120.0);
    assert!(stage.done().iter().any(|(_, what)| *what == "found"));
}

#[test]
fn a_section_has_limits_of_its_own() {
    let mut stage = Stage::new(Options::default());
    stage.say_still(2.0, Some(0.2), Some(7));
    stage.pass(170.0);
    stage.moved();
    stage.say_still(2.0, Some(0.2), Some(7));
    stage.pass(400.0);
    assert!(!stage.done().iter().any(|(_, what)| *what == "found"));
    stage.moved();
    stage.say_still(2.0, Some(0.2), None);
    stage.pass(200.0);
    assert!(stage.done().iter().any(|(_, what)| *what == "found"), "training itself has not learnt of it");
}

#[test]
fn the_first_step_has_half_an_hour_or_three_times_the_last_first_one() {
    let mut stage = Stage::new(Options::default()).still(0.0, None);
    stage.pass(1790.0);
    assert_eq!(stage.done(), [(6, "waits")]);
    stage.pass(40.0);
    assert_eq!(stage.done(), [(1800, "found")]);
    stage.moved();
    assert_eq!(stage.done(), [(1830, "over")]);
    let mut stage = Stage::new(Options::default());
    stage.pass(50.0);
    stage.moved();
    stage.judge.on_round(2, [7], stage.now);
    stage.round = 2;
    stage.all(|view| view.round = 2);
    stage.say_still(0.0, None, None);
    stage.pass(660.0);
    let done = stage.done();
    assert!(matches!(done[..], [(56, "waits"), (650..=651, "found")]), "{done:?}");
}

#[test]
fn a_line_of_the_log_is_no_first_step() {
    let mut stage = Stage::new(Options::default());
    stage.pass(50.0);
    stage.judge.on_moved(7, 1, stage.now, false, stage.now);
    stage.say_still(0.0, None, None);
    stage.pass(1790.0);
    assert_eq!(stage.done(), [(56, "waits")]);
    stage.pass(20.0);
    assert_eq!(stage.done(), [(1850, "found")]);
}

#[test]
fn a_timeout_holds_instead_of_all_limits() {
    let options = Options { timeout: Some(secs(5.0)), ..Options::default() };
    for class in [Class::Idle, Class::Busy] {
        let mut stage = Stage::new(options).still(2.0, Some(0.2));
        stage.views[0].class = Some(class);
        stage.pass(4.5);
        assert_eq!(stage.done(), [(0, "waits"), (3, "found")], "{class:?}");
    }
}

#[test]
fn a_rank_that_writes_goes_on_for_an_hour() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    stage.views[0].class = Some(Class::Moving);
    stage.pass(3590.0);
    assert!(!stage.done().iter().any(|(_, what)| *what == "found"));
    stage.pass(700.0);
    assert_eq!(stage.done().iter().filter(|(_, what)| *what == "found").count(), 1);
}

#[test]
fn a_wait_is_reported_at_most_once_a_minute() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    for at in 0..20 {
        stage.views[0] = view(0, 9 + at, false);
        stage.views[1] = view(1, 10 + at, true);
        stage.pass(12.0);
    }
    let told: Vec<_> = stage.done().into_iter().map(|(at, what)| (at / 60, what)).collect();
    assert_eq!(told, [(0, "waits"), (1, "waits"), (2, "waits"), (3, "waits")]);
}

#[test]
fn all_ranks_stopped_are_no_hang() {
    let mut stage = Stage::new(restart()).still(2.0, Some(0.2));
    stage.all(|view| (view.state, view.answered) = (State::Stopped, false));
    stage.pass(7200.0);
    assert_eq!(stage.done(), [(0, "suspended")]);
    stage.all(|view| (view.state, view.answered) = (State::Sleeping, true));
    stage.pass(100.0);
    let done = stage.done();
    assert!(matches!(done[..], [(7200..=7231, "waits")]), "nobody has made a step: {done:?}");
    stage.moved();
    assert_eq!(stage.done(), [(7300, "over")]);
}

#[test]
fn a_rank_that_computes_is_not_judged_by_limits_that_nobody_has_learnt() {
    let mut stage = Stage::new(restart()).still(0.0, None);
    stage.all(|view| view.class = Some(Class::Busy));
    stage.pass(20_000.0);
    assert!(!stage.done().iter().any(|(_, what)| *what == "found"), "it makes no steps, and may compute for hours");
    let mut stage = Stage::new(restart()).still(2.0, Some(0.2));
    stage.views[0].class = Some(Class::Busy);
    stage.pass(20_000.0);
    let done = stage.done();
    assert!(done.iter().any(|(_, what)| *what == "found"), "{done:?}");
    assert!(!done.iter().any(|(_, what)| *what == "restart"), "an evaluation may be longer than all before: {done:?}");
}

#[test]
fn a_rank_that_computes_may_make_steps_that_nobody_counts() {
    let mut stage = Stage { is_counted: true, ..Stage::new(restart()) }.still(2.0, Some(0.2));
    stage.views[0].class = Some(Class::Busy);
    stage.pass(20_000.0);
    assert_eq!(stage.done(), [(0, "waits")]);
    stage.views[0].class = Some(Class::Idle);
    stage.pass(400.0);
    assert!(stage.done().iter().any(|(_, what)| *what == "found"), "it does nothing: {:?}", stage.done());
}

#[test]
fn a_rank_in_a_debugger_is_no_certain_hang_and_never_restarted() {
    let mut stage = Stage::new(restart()).still(2.0, Some(0.2));
    (stage.views[0].state, stage.views[0].answered) = (State::Traced, false);
    stage.views[0].groups.clear();
    stage.pass(100.0);
    assert_eq!(stage.done(), [(0, "waits")]);
    stage.pass(2000.0);
    let done = stage.done();
    assert!(matches!(done[..], [(_, "found")]), "{done:?}");
}

#[test]
fn a_script_that_goes_back_makes_steps() {
    let start = Instant::now();
    let mut pace = pace::Pace::new(start);
    let reached = |steps, at| Some(pace::Reached { steps, first_at: start + secs(1.0), at: start + secs(at) });
    assert_eq!(pace.on_look(reached(50, 10.0), start + secs(10.0)), None);
    assert_eq!(pace.on_look(reached(1, 12.0), start + secs(12.0)), None);
    assert_eq!(pace.on_look(reached(5, 13.0), start + secs(13.9)), None);
    let still = pace.on_look(reached(5, 13.0), start + secs(16.0));
    assert!(matches!(still, Some(pace::Change::Still(still)) if still.since == start + secs(13.0)), "{still:?}");
}

#[test]
fn a_certain_hang_is_restarted_at_once_and_another_at_twice_the_limit() {
    let mut stage = Stage::new(restart()).still(2.0, Some(0.2));
    (stage.views[0].state, stage.views[0].answered) = (State::Stopped, false);
    stage.views[0].groups.clear();
    stage.pass(400.0);
    assert_eq!(stage.done(), [(0, "waits"), (6, "found"), (6, "restart")]);
    let mut stage = Stage::new(restart()).still(2.0, Some(0.2));
    stage.pass(600.0);
    let done = stage.done();
    assert!(matches!(done[..], [(0, "waits"), (178, "found"), (358..=390, "restart")]), "{done:?}");
}

#[test]
fn restarts_for_hangs_have_a_budget() {
    let mut stage = Stage::new(Options { restarts: 2, ..restart() });
    let mut restarts = 0;
    for round in 1..=4 {
        stage.judge.on_round(round, [7], stage.now);
        stage.round = round;
        stage.all(|view| {
            view.round = round;
            if view.rank == 0 {
                view.state = State::Stopped;
            }
        });
        stage.say_still(2.0, Some(0.2), None);
        stage.pass(100.0);
        restarts += stage.done().iter().filter(|(_, what)| *what == "restart").count();
    }
    assert_eq!((restarts, stage.judge.restarts()), (2, 2));
}

#[test]
fn a_rank_that_reads_standard_input_is_never_restarted() {
    let mut stage = Stage::new(restart()).still(2.0, Some(0.2));
    stage.views[0].call = Some(Call { name: "read".into(), fd: Some(0), ..Call::default() });
    stage.pass(4000.0);
    assert_eq!(stage.done(), [(0, "waits"), (178, "found")]);
}

#[test]
fn all_nodes_must_stand_still() {
    let start = Instant::now();
    let mut judge = Judge::new(Options::default());
    judge.on_round(1, [1, 2], start);
    let still = |since| Still {
        round: 1,
        since,
        has_stepped: true,
        step_time: Some(secs(0.2)),
        is_counted: false,
        section: None,
    };
    judge.on_still(1, still(start), start + secs(2.0));
    assert_eq!((judge.take_effects(), judge.next_deadline()), (vec![], None));
    judge.on_still(9, still(start), start + secs(2.0));
    judge.on_still(2, Still { round: 0, ..still(start) }, start + secs(2.0));
    assert_eq!(judge.take_effects(), [], "of a stranger, and of another round");
    judge.on_still(2, still(start + secs(1.0)), start + secs(3.0));
    assert_eq!(judge.take_effects(), [Effect::Look(1)]);
    judge.on_moved(1, 1, start + secs(4.0), true, start + secs(4.0));
    judge.on_views(1, vec![view(0, 8, false), view(1, 9, true)], start + secs(4.0));
    assert_eq!(judge.take_effects(), [], "views that come too late");
}

#[test]
fn a_look_that_nobody_answers_is_asked_again() {
    let mut stage = Stage::new(Options::default()).still(2.0, Some(0.2));
    assert_eq!(stage.log, [(0.0, Effect::Look(1))]);
    stage.now = stage.judge.next_deadline().unwrap();
    stage.judge.on_tick(stage.now);
    stage.take();
    assert_eq!(stage.log.last(), Some(&(3.0, Effect::Look(2))));
    stage.judge.on_views(1, stage.views.clone(), stage.now);
    assert_eq!(stage.judge.take_effects(), [], "the answer to an earlier look");
}

#[test]
fn nobody_looks_if_hangs_are_off() {
    let stage = Stage::new(Options { mode: Mode::Off, ..Options::default() }).still(2.0, Some(0.2));
    assert_eq!((stage.log.len(), stage.judge.next_deadline()), (0, None));
}
