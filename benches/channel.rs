//! Benchmark of a worker's check, which it makes in each step: the count alone, and the call on a connection with an agent.

#![allow(clippy::unwrap_used, missing_docs, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::hint::black_box;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use elastic_rs::channel::checks::Counter;
use elastic_rs::channel::worker::Channel;

fn check(criterion: &mut Criterion) {
    let name = format!("elastic_rs-bench-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let channel = Channel::connect(&format!("@{name}"), Duration::from_secs(5)).unwrap();
    let _agent = listener.accept().unwrap();
    let counter = Counter::default();
    let mut group = criterion.benchmark_group("check");
    group.bench_function("count", |bencher| bencher.iter(|| black_box(&counter).pass()));
    group.bench_function("connected", |bencher| bencher.iter(|| black_box(&channel).check().unwrap()));
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = check
}
criterion_main!(benches);
