use proptest::prelude::*;

use super::*;

const LIMIT: Limit = Limit { restarts: 3, window: Duration::from_secs(3600) };
const HOUR: Duration = Duration::from_secs(3600);

/// A job whose workers crash, on a clock of its own.
struct Job {
    budget: Budget,
    now: Instant,
    began: Option<u64>,
}

impl Job {
    fn new() -> Self {
        Self { budget: Budget::default(), now: Instant::now(), began: None }
    }

    /// A world begins at its first step, lives so long, and a worker on this host fails at a step.
    fn crash(&mut self, lived: Duration, step: Option<u64>, host: u8, message: &str) -> Judgement {
        self.budget.begin();
        if step.is_some() {
            self.budget.on_first_step(self.began);
        }
        self.now += lived;
        let failure = Failure { lived, step, message: message.to_owned(), ..Failure::example("node") };
        let origin = Origin::Peer([10, 0, 0, host].into());
        let crash = Crash { failure: &failure, origin, step, spares_host: true };
        self.budget.on_crash("job", &crash, LIMIT, self.now)
    }

    fn hang(&mut self, step: Option<u64>) -> Judgement {
        self.budget.begin();
        self.now += Duration::from_secs(600);
        self.budget.on_hang(step, LIMIT, self.now)
    }
}

const fn restart() -> Judgement {
    Judgement::Restart { pause: None, host_is_out: None }
}

fn class(judgement: &Judgement) -> Option<EndClass> {
    if let Judgement::End { class, .. } = judgement { Some(*class) } else { None }
}

fn traceback(exception: &str, line: u32) -> String {
    format!(
        "{exception}: bad\nTraceback (most recent call last):\n  File \"/job/train.py\", line 7, in main\n    step()\n  File \
         \"/job/data.py\", line {line}, in load\n    raise {exception}('bad')\n{exception}: bad"
    )
}

#[test]
fn the_fourth_crash_within_the_window_ends_the_job_and_one_after_it_does_not() {
    let mut job = Job::new();
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    for _ in 0..3 {
        assert_eq!(job.crash(minutes(10), None, 1, ""), restart());
    }
    let mut later = Job { budget: job.budget.clone(), ..job };
    let end = job.crash(minutes(10), None, 1, "");
    assert_eq!(class(&end), Some(EndClass::Program));
    assert!(format!("{end:?}").contains("no restarts left: 3 after crashes within 3600 s"), "{end:?}");
    assert_eq!(later.crash(minutes(41), None, 1, ""), restart());
    assert_eq!(later.budget.left(LIMIT, later.now), Left { window_s: 3600, crashes: 0, hangs: 3, in_vain: 0 });
}

#[test]
fn a_restart_that_brings_as_many_steps_as_it_repeats_no_longer_counts() {
    for (began, crashes_at, left) in [(101, 150, 1), (101, 201, 2), (151, 151, 2)] {
        let mut job = Job::new();
        job.crash(HOUR / 60, Some(150), 1, "");
        assert_eq!(job.budget.left(LIMIT, job.now).crashes, 2);
        job.began = Some(began);
        job.crash(HOUR / 60, Some(crashes_at), 1, "");
        assert_eq!(job.budget.left(LIMIT, job.now).crashes, left, "from {began} to {crashes_at}");
    }
}

#[test]
fn three_restarts_in_a_row_without_a_new_step_end_the_job() {
    let mut job = Job::new();
    job.began = Some(90);
    for at in [100, 99, 100] {
        assert_eq!(job.crash(HOUR, Some(at), 1, ""), restart());
    }
    let end = job.crash(HOUR, Some(98), 1, "");
    assert_eq!(class(&end), Some(EndClass::NoProgress));
    assert!(format!("{end:?}").contains("3 restarts in a row brought no step after step 100"), "{end:?}");

    let mut job = Job::new();
    job.began = Some(90);
    for at in [100, 99, 100, 101, 101, 101] {
        assert_eq!(job.crash(HOUR, Some(at), 1, ""), restart());
    }
}

#[test]
fn a_world_that_ends_before_its_first_step_brought_none_if_there_were_steps_before() {
    let mut job = Job::new();
    job.crash(HOUR, Some(5), 1, "");
    for _ in 0..2 {
        assert_eq!(job.crash(HOUR, None, 1, ""), restart());
    }
    assert_eq!(class(&job.crash(HOUR, None, 1, "")), Some(EndClass::NoProgress));
}

#[test]
fn a_hang_has_a_budget_of_its_own_and_can_be_in_vain() {
    let mut job = Job::new();
    for _ in 0..3 {
        assert_eq!(job.crash(HOUR / 10, None, 1, ""), restart());
        assert_eq!(job.hang(None), restart());
    }
    assert_eq!(class(&job.hang(None)), Some(EndClass::NoProgress));
    let mut job = Job::new();
    for _ in 0..3 {
        assert_eq!(job.hang(Some(7)), restart());
        job.now += HOUR;
    }
    assert_eq!(class(&job.hang(Some(7))), Some(EndClass::NoProgress));
}

#[test]
fn the_same_bad_start_twice_ends_the_job_and_different_ones_wait() {
    let second = Duration::from_secs(1);
    let mut job = Job::new();
    assert_eq!(job.crash(second, None, 1, &traceback("ImportError", 1)), restart());
    let end = job.crash(second, None, 2, &traceback("ImportError", 1));
    assert_eq!(class(&end), Some(EndClass::Program));
    assert!(format!("{end:?}").contains("before any step: ImportError at data.py:1 in load"), "{end:?}");

    let many = Limit { restarts: 1000, ..LIMIT };
    let mut job = Job::new();
    let mut pauses = Vec::new();
    for line in 0..20 {
        job.now += second;
        let failure = Failure { lived: second, message: traceback("E", line), ..Failure::example("node") };
        let crash =
            Crash { failure: &failure, origin: Origin::Peer([10, 0, 0, 1].into()), step: None, spares_host: true };
        let Judgement::Restart { pause, .. } = job.budget.on_crash("job", &crash, many, job.now) else {
            panic!("{line}")
        };
        pauses.push(pause);
    }
    assert_eq!(pauses[..2], [None, None]);
    let seconds: Vec<f64> = pauses[2..].iter().map(|pause| pause.unwrap().as_secs_f64()).collect();
    assert!((1.0..=2.0).contains(&seconds[0]) && (2.0..=4.0).contains(&seconds[1]), "{seconds:?}");
    assert!(seconds[6..].iter().all(|pause| (30.0..=60.0).contains(pause)), "{seconds:?}");
    // A good start is the end of them.
    assert_eq!(job.crash(HOUR, Some(1), 1, "E"), restart());
    assert_eq!(job.crash(second, None, 1, "E"), restart());
}

#[test]
fn the_same_fault_at_one_step_is_the_programs_on_several_hosts_and_the_hosts_on_one() {
    let fault = traceback("ValueError", 88);
    let mut job = Job::new();
    job.began = Some(40);
    for (step, host) in [(50, 1), (51, 1)] {
        assert_eq!(job.crash(HOUR, Some(step), host, &fault), restart());
    }
    let mut alone = Job { budget: job.budget.clone(), ..job };
    let end = job.crash(HOUR, Some(50), 2, &fault);
    assert_eq!(class(&end), Some(EndClass::Program));
    let expected =
        "the program, not the machines: ValueError at data.py:88 in load, 3 times at step 50, on 10.0.0.1 and 10.0.0.2";
    assert!(format!("{end:?}").contains(expected), "{end:?}");

    let Judgement::Restart { host_is_out: Some(what), .. } = alone.crash(HOUR, Some(50), 1, &fault) else { panic!() };
    assert_eq!(what, "ValueError at data.py:88 in load, 3 times at step 50");
    // Without that host it is there again.
    assert_eq!(class(&alone.crash(HOUR, Some(50), 3, &fault)), Some(EndClass::Program));
}

#[test]
fn other_exceptions_places_steps_and_words_without_a_traceback_are_other_faults() {
    for other in [
        [(50, traceback("ValueError", 88)), (60, traceback("ValueError", 88)), (70, traceback("ValueError", 88))],
        [(50, traceback("ValueError", 88)), (51, traceback("ValueError", 89)), (52, traceback("ValueError", 88))],
        [(50, traceback("ValueError", 88)), (51, traceback("KeyError", 88)), (52, traceback("ValueError", 88))],
        [(50, "Killed".to_owned()), (51, "Killed".to_owned()), (52, "Killed".to_owned())],
    ] {
        let mut job = Job::new();
        for (host, (step, message)) in (1..).zip(other) {
            assert_eq!(job.crash(HOUR, Some(step), host, &message), restart());
        }
    }
}

#[test]
fn a_crash_every_two_hours_for_thirty_days_runs_on() {
    for steps in [true, false] {
        let mut job = Job::new();
        for crash in 1..=360 {
            assert_eq!(job.crash(2 * HOUR, steps.then_some(crash * 700), 1, &traceback("ValueError", 88)), restart());
        }
    }
}

/// The workers go on from the last checkpoint, and one fails at this step. Steps take a second.
fn crash_at(job: &mut Job, checkpoint: u64, saved: &mut u64, step: u64, host: u8, message: &str) -> Judgement {
    job.began = Some(*saved + 1);
    let lived = Duration::from_secs(20 + step.saturating_sub(*saved));
    *saved = step / checkpoint * checkpoint;
    job.crash(lived, Some(step), host, message)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn no_verdict_comes_while_steps_advance(
        checkpoint in 20..400_u64,
        crashes in prop::collection::vec((0..5000_u64, 1..9_u8, 0..2_usize), 1..40),
    ) {
        let (mut job, mut saved, mut step) = (Job::new(), 0, 0);
        for (gained, host, exception) in crashes {
            // At least what is repeated, and one step more.
            step += checkpoint + 1 + gained;
            let message = traceback(["ValueError", "KeyError"][exception], 88);
            prop_assert_eq!(crash_at(&mut job, checkpoint, &mut saved, step, host, &message), restart());
        }
    }

    #[test]
    fn a_program_that_fails_at_one_step_ends_after_three_restarts_and_is_named(
        checkpoint in 20..400_u64, hosts in 2..9_u8, bad in 1..10_000_u64, moves: bool,
    ) {
        let (mut job, fault) = (Job::new(), traceback("ValueError", 88));
        let mut saved = bad / checkpoint * checkpoint;
        let (mut crashes, mut host, mut out) = (0, 1, false);
        loop {
            crashes += 1;
            match crash_at(&mut job, checkpoint, &mut saved, bad, host, &fault) {
                Judgement::End { class, why } => {
                    prop_assert_eq!(class, EndClass::Program);
                    prop_assert!(why.contains("the program, not the machines"), "{}", why);
                    break;
                }
                Judgement::Restart { host_is_out, .. } => out |= host_is_out.is_some(),
            }
            // The rank that fails is on another host, or on the same one until that is out.
            if moves || out {
                host = host % hosts + 1;
            }
        }
        prop_assert_eq!(crashes, if moves { 3 } else { 4 });
    }

    #[test]
    fn a_host_that_fails_at_one_step_is_named_and_the_job_goes_on(bad in 1..10_000_u64, later in 1..100_u64) {
        let (mut job, fault, mut saved) = (Job::new(), traceback("RuntimeError", 3), bad / 50 * 50);
        let judged: Vec<_> = (0..3).map(|_| crash_at(&mut job, 50, &mut saved, bad, 4, &fault)).collect();
        prop_assert_eq!(&judged[..2], &[restart(), restart()]);
        let named = matches!(&judged[2], Judgement::Restart { host_is_out: Some(_), .. });
        prop_assert!(named, "{:?}", judged);
        prop_assert_eq!(crash_at(&mut job, 50, &mut saved, bad + 50 + later, 5, &fault), restart());
    }
}
