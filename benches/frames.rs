//! Benchmark of a look at another process: the frames of a Python with 8 threads, and what the kernel knows of it.

#![allow(clippy::unwrap_used, missing_docs, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use elastic_rs::hang::frames::Version;
use elastic_rs::hang::frames::process::Process;
use elastic_rs::hang::frames::{Runtime, find};
use elastic_rs::hang::look::driver::look;

fn frames(criterion: &mut Criterion) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let own = root.join("build/venv/bin/python");
    let python = if own.exists() { own } else { "python3".into() };
    let mut child = Command::new(python)
        .arg(root.join("tests/hang/frames/stands.py"))
        .arg("threads")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
    let version = Some(Version::of_hex(numbers[2].try_into().unwrap()));
    let runtime = Runtime { address: numbers[1], version };
    let child_pid = child.id();
    let process = Process::open(child_pid).unwrap();
    // Each thread stands where it stays.
    while process.stacks(Some(runtime)).unwrap().threads.iter().any(|thread| thread.frames.len() < 5) {}

    let mut group = criterion.benchmark_group("look");
    group.bench_function("frames of 8 threads", |bencher| {
        bencher.iter(|| black_box(process.stacks(Some(black_box(runtime))).unwrap()));
    });
    group.bench_function("proc of 8 threads", |bencher| bencher.iter(|| black_box(look(&process).unwrap())));
    group.bench_function("_PyRuntime by its symbol", |bencher| {
        bencher.iter(|| black_box(find::runtime(child_pid, &process).unwrap()))
    });
    group.finish();
    child.kill().unwrap();
    child.wait().unwrap();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = frames
}
criterion_main!(benches);
