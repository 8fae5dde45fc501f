//! Made-up jobs whose steps stall, lived through with the judge of hangs. The jobs are in `crates/sim/src/hangs`.
//!
//! `ELASTIC_RS_SIM_SEEDS` sets the number of seeds, `ELASTIC_RS_SIM_SEED` the first one. The prototype's are 0 to 999.

use std::time::Duration;

use elastic_rs::hang::judge::{Mode, Options};
use elastic_rs_sim::hangs::job::Job;
use elastic_rs_sim::hangs::numpy::Generator;
use elastic_rs_sim::hangs::{CAP, Lived, live};

use crate::seeds::asked_for;

/// Seeds of the prototype.
const PROTOTYPE: u64 = 1000;

fn job(seed: u64) -> Job {
    Job::new(u32::try_from(seed).expect("numpy's seeds are taken up to 2^32"), CAP)
}

#[test]
fn jobs_that_go_on_by_themselves_give_no_alarm() {
    let seeds = asked_for(40);
    let lived: Vec<(u64, Job, Lived)> = seeds
        .clone()
        .map(|seed| {
            let job = job(seed);
            let lived = live(&job, Options::default(), None);
            (seed, job, lived)
        })
        .collect();
    let jobs = lived.len();
    let with = |alarms: &dyn Fn(&Job) -> u32| lived.iter().filter(|(_, job, _)| alarms(job) > 0).count();
    let sum = |of: &dyn Fn(&Lived) -> f64| lived.iter().map(|(.., lived)| of(lived)).sum::<f64>();
    let alarmed: Vec<_> = lived.iter().filter(|(.., lived)| lived.alarms > 0).map(|(seed, ..)| *seed).collect();
    let [plain, floored] = [0.0, 60.0].map(|shortest| with(&|job| job.alarms_of_nvrx(shortest)));
    let (hours, looks, waits) = (sum(&|it| it.hours), sum(&|it| f64::from(it.looks)), sum(&|it| f64::from(it.waits)));
    let part = |count: usize| 100.0 * count as f64 / jobs as f64;
    println!("{jobs} jobs, {:.1} M steps, {hours:.0} h, stalls up to {CAP} s", steps(&lived) / 1e6);
    println!("NVRx, 5 x longest                {plain:5} jobs with a false alarm ({:.1} %)", part(plain));
    println!("NVRx, 5 x longest, at least 60 s {floored:5} jobs with a false alarm ({:.1} %)", part(floored));
    println!(
        "judge                            {:5} jobs with a false alarm ({:.2} %)",
        alarmed.len(),
        part(alarmed.len())
    );
    println!("{:.2} looks and {:.2} names an hour; alarms: {alarmed:?}", looks / hours, waits / hours);

    let of_prototype = alarmed.iter().filter(|seed| **seed < PROTOTYPE).count();
    assert_eq!(of_prototype, 0, "seeds {alarmed:?} of the prototype give an alarm");
    let allowed = 3 * jobs.div_ceil(5000);
    assert!(alarmed.len() <= allowed, "{} of {jobs} jobs give an alarm: {alarmed:?}", alarmed.len());
    assert!(jobs < 20 || plain * 10 >= jobs * 4, "NVRx's rule must fail here: {plain} of {jobs}");
    assert!(jobs < 1000 || floored * 3 >= jobs, "nor does a floor mend it: {floored} of {jobs}");
    assert!(jobs < 20 || waits > 0.0, "no stall was noticed, so that nothing is tested");
}

fn steps(lived: &[(u64, Job, Lived)]) -> f64 {
    lived.iter().map(|(_, job, _)| job.steps as f64).sum()
}

#[test]
fn a_hang_is_named_and_found_in_every_job() {
    let mut delays = Vec::new();
    for seed in asked_for(40) {
        let job = job(seed);
        let at = Generator::new(seed as u32).integers(100, job.steps as u32) as usize;
        let lived = live(&job, Options::default(), Some(at));
        assert_eq!((lived.alarms, lived.named), (1, Some(0)), "seed {seed}, step {at}: {lived:?}");
        delays.push(lived.delay.unwrap_or_default());
    }
    delays.sort();
    let (median, late) = (delays[delays.len() / 2], delays[delays.len() * 95 / 100]);
    println!("{} hangs, found after {median:?} (median), {late:?} (95 %)", delays.len());
    assert!(delays[0] >= Duration::from_secs(180) && median < Duration::from_secs(400), "{median:?}");
}

#[test]
fn a_limit_of_ones_own_holds_instead_of_all_others() {
    for seed in 0..10 {
        let timeout = Duration::from_secs(5);
        let options = Options { timeout: Some(timeout), mode: Mode::Restart, ..Options::default() };
        let job = job(seed);
        let lived = live(&job, options, Some(2000));
        // Nobody looks before three steps are over, or two seconds. A step may be some times longer than most.
        let longest = (1900..2000).map(|step| job.seconds(step)).fold(0.0, f64::max);
        let latest = Duration::from_millis(1500) + timeout.max(Duration::from_secs_f64(4.0 * longest));
        assert!(
            lived.delay.is_some_and(|delay| delay >= timeout && delay <= latest),
            "seed {seed}: {lived:?}, {longest}"
        );
    }
}

#[test]
fn a_seed_determines_what_is_lived() {
    for seed in 0..3 {
        let lived = || live(&job(seed), Options::default(), None);
        assert_eq!(lived(), lived(), "seed {seed}");
    }
}

/// The values are numpy's: `default_rng(7)`.
#[test]
fn the_generator_is_numpys() {
    let mut dice = Generator::new(7);
    let near = |one: f64, other: f64| assert!((one - other).abs() <= 1e-12 * other.abs(), "{one}, {other}");
    near(dice.random(), 0.625_095_466_604_667);
    near(dice.uniform(2.0, 5.0), 4.691_641_402_908_727);
    assert_eq!([dice.integers(50, 1500), dice.integers(50, 1500)], [888, 1174]);
    near(dice.normal(), -0.890_591_838_757_274_2);
    near(dice.lognormal(0.3), 0.872_492_487_243_743_1);
    near(dice.pareto(1.5), 8.542_526_038_212_388);
    near((0..200_000).map(|_| dice.normal()).map(|it| it.powi(4)).sum(), 598_675.878_780_453_2);
    near((0..200_000).map(|_| dice.exponential()).sum(), 199_584.685_801_877_1);
    near(dice.random(), 0.200_581_345_913_639_63);
}
