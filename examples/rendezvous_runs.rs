//! Measures the cost of many runs on one coordinator, without sockets: `rendezvous_runs RUNS`. With this many jobs of one node at rest
//! it measures a Hello of another node, the jobs' heartbeats, and the memory of as many abandoned runs.
//!
//! Times are from this process's clock. CPU time and memory are the kernel's figures for this process.

use std::time::{Duration, Instant};

use elastic_rs::rendezvous::coordinator::machine::Machine;
use elastic_rs::rendezvous::messages::message::{Hello, Join, NodeId, NodeMessage, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{Ends, SessionId};

const HELLOS: u64 = 2_000;
/// Virtual time for which the jobs are watched at rest.
const AT_REST: Duration = Duration::from_secs(60);

fn main() {
    let runs: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(10_000);
    let mut now = Instant::now();
    let mut machine = Machine::new();
    let settings = Settings::new(1, 1);
    for run in 0..runs {
        greet(&mut machine, run, format!("job {run}"), settings.clone(), now);
        machine.on_message(SessionId(run), join(), now);
        machine.take_commands();
    }

    let mut took: Vec<Duration> =
        (0..HELLOS).map(|number| hello(&mut machine, runs + number, &settings, now)).collect();
    took.sort();
    let at = |share: usize| took[took.len() * share / 100];
    println!(
        "{runs} runs at rest; a Hello: p50 {:.1?}, p99 {:.1?}, worst {:.1?}",
        at(50),
        at(99),
        took[took.len() - 1]
    );

    // Every node sends one heartbeat in each interval, spread over it. The machine ticks at each deadline.
    let (before, interval) = (cpu_seconds(), settings.keep_alive_interval);
    let (steps, mut ticks) = ((AT_REST.as_secs() / interval.as_secs()) as u32, 0_u64);
    for _ in 0..steps {
        for run in 0..runs {
            now += interval / runs as u32;
            if machine.next_deadline().is_some_and(|at| at <= now) {
                machine.on_tick(now);
                ticks += 1;
            }
            machine.on_message(SessionId(run), NodeMessage::Heartbeat { rtt_us: None }, now);
            machine.take_commands();
        }
    }
    let used = 100.0 * (cpu_seconds() - before) / AT_REST.as_secs_f64();
    println!("at rest: {used:.2} % of a core, {} ticks a second", ticks / AT_REST.as_secs());

    let mut machine = Machine::new();
    let (before, kept) = (resident_kib(), Settings { reconnect_grace: Duration::from_secs(60), ..Settings::new(2, 2) });
    for run in 0..2 * runs {
        greet(&mut machine, run, format!("abandoned {run}"), kept.clone(), now);
        machine.on_message(SessionId(run), join(), now);
        machine.on_disconnected(SessionId(run), now);
        machine.take_commands();
        now += Duration::from_micros(100);
    }
    let grown = resident_kib().saturating_sub(before);
    println!("{} abandoned runs: {} kept, {grown} KiB", 2 * runs, machine.run_count());
}

/// Measure the decisions about the node of a new run.
fn hello(machine: &mut Machine, number: u64, settings: &Settings, now: Instant) -> Duration {
    let begun = Instant::now();
    greet(machine, number, format!("newcomer {number}"), settings.clone(), now);
    let took = begun.elapsed();
    machine.on_message(SessionId(number), NodeMessage::Leave { reason: "measured".to_owned(), signal: None }, now);
    machine.take_commands();
    took
}

fn greet(machine: &mut Machine, number: u64, run: String, settings: Settings, now: Instant) {
    let [.., high, low] = number.to_be_bytes();
    let ends = Ends { peer: [10, 0, high, low].into(), local: [10, 1, 0, 0].into() };
    let hello = Hello::new(run, NodeId(u128::from(number)), format!("host{number}:1"), settings);
    machine.on_hello(SessionId(number), Hello { process: number, ..hello }, ends, now);
}

fn join() -> NodeMessage {
    NodeMessage::Join(Join {
        round: Round(0),
        store_port: 29_500,
        node_rank: None,
        workers: None,
        health: Default::default(),
    })
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields.to_owned()).unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok());
    ticks.sum::<f64>() / 100.0
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
