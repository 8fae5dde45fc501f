//! Measures the process layer, and prints one JSON object. `benches/process.py` compares it with PyTorch's.
//!
//! `process_load tee DIR PROGRAM ARGS…`: run eight workers that print, teed to `DIR` and standard output.
//! `process_load exits COUNT`: kill workers one by one, and measure the time from each kill to its exit event.
//! `process_load starts COUNT`: start and kill groups of eight, and measure the time of each start.
//! `process_load idle SECONDS`: run eight idle workers.

use std::collections::BTreeSet;
use std::env;
use std::path::Path;
use std::process::exit;
use std::time::{Duration, Instant};

use elastic_rs::signals::{FirstSignal, Signal};
use elastic_rs::workers::{Consoles, Copies, Event, FilterOptions, Group, Output, WorkerSpec};

const WORKERS: u32 = 8;

fn main() {
    let words: Vec<String> = env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["tee", folder, program, ref args @ ..] => tee(Path::new(folder), program, args).await,
            ["exits", count] => exits(count.parse().expect("a count")).await,
            ["starts", count] => starts(count.parse().expect("a count")).await,
            ["idle", seconds] => idle(seconds.parse().expect("seconds")).await,
            _ => {
                eprintln!("see the opening lines of examples/process_load.rs");
                exit(2);
            }
        }
    });
}

async fn tee(folder: &Path, program: &str, args: &[&str]) {
    let specs = (0..WORKERS).map(|rank| {
        let mut spec = worker(rank, program, args);
        let file = Some(folder.join(rank.to_string()).join("stdout.log"));
        spec.stdout = Output::Copied(Copies { file, console: true, prefix: Some(format!("[default{rank}]:")) });
        spec
    });
    let mut group = start(specs.collect()).await;
    let began = Instant::now();
    while group.next_event().await.is_some() {}
    report(&[("wall_s", began.elapsed().as_secs_f64()), ("cpu_s", cpu_s())]);
}

async fn exits(count: usize) {
    let mut times = Vec::new();
    for _ in 0..count {
        let mut group = start(vec![worker(0, "sleep", &["1000"])]).await;
        let began = Instant::now();
        group.pass_on(Signal::KILL, FirstSignal::Group, &BTreeSet::new());
        while let Some(event) = group.next_event().await {
            if let Event::Exited(exited) = event {
                times.push((exited.at - began).as_secs_f64());
            }
        }
    }
    report_times(times);
}

async fn starts(count: usize) {
    let mut times = Vec::new();
    for _ in 0..count {
        let specs = (0..WORKERS).map(|rank| worker(rank, "sleep", &["1000"])).collect();
        let began = Instant::now();
        let mut group = start(specs).await;
        times.push(began.elapsed().as_secs_f64());
        group.kill();
        while group.next_event().await.is_some() {}
    }
    report_times(times);
}

async fn idle(seconds: u64) {
    let mut group = start((0..WORKERS).map(|rank| worker(rank, "sleep", &["1000"])).collect()).await;
    let before = cpu_s();
    // No event may come from idle workers.
    let waited = tokio::time::timeout(Duration::from_secs(seconds), group.next_event()).await;
    assert!(waited.is_err(), "{waited:?}");
    report(&[("cpu_s", cpu_s() - before)]);
}

fn worker(rank: u32, program: &str, args: &[&str]) -> WorkerSpec {
    let mut spec = WorkerSpec::new(rank, program);
    spec.args = args.iter().map(Into::into).collect();
    spec.env = env::vars_os().collect();
    spec
}

async fn start(specs: Vec<WorkerSpec>) -> Group {
    let consoles = Consoles::own().expect("streams");
    Group::start(specs, FilterOptions::default(), consoles).await.unwrap_or_else(|error| panic!("{error}"))
}

/// CPU time of this process with all its threads, without its children.
fn cpu_s() -> f64 {
    // SAFETY: the call fills the given struct.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn report_times(mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    report(&[("p50_s", at(0.5)), ("p99_s", at(0.99))]);
}

fn report(values: &[(&str, f64)]) {
    let values: Vec<String> = values.iter().map(|(name, value)| format!("\"{name}\": {value:.6}")).collect();
    eprintln!("{{{}}}", values.join(", "));
}
