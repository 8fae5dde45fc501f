//! Benchmark of the table: the cost of a request without codec and sockets.

#![allow(clippy::unwrap_used, missing_docs, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::time::Duration;

use bytes::Bytes;
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use elastic_rs::store::protocol::Request;
use elastic_rs::store::{ConnId, Table, TableLimits};

const KEYS: usize = 10_000;

fn key(number: usize) -> Bytes {
    Bytes::from(format!("/key/{number:07}"))
}

fn filled() -> Table {
    let mut table = Table::new(TableLimits::default());
    let value = Bytes::from(vec![b'v'; 64]);
    for number in 0..KEYS {
        table.apply(ConnId(1), Request::Set { key: key(number), value: value.clone() }).unwrap();
    }
    table
}

fn requests() -> Vec<(&'static str, Request)> {
    let value = Bytes::from(vec![b'v'; 64]);
    vec![
        ("get", Request::Get { key: key(17) }),
        ("set of 64 B", Request::Set { key: key(17), value: value.clone() }),
        ("add", Request::Add { key: Bytes::from_static(b"/counter"), amount: 1 }),
        ("check", Request::Check { keys: vec![key(17)] }),
        ("compare_set of 64 B", Request::CompareSet { key: key(17), expected: value.clone(), desired: value }),
        ("multi_get of 100", Request::MultiGet { keys: (0..100).map(key).collect() }),
    ]
}

fn apply(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("apply");
    group.throughput(Throughput::Elements(1));
    for (name, request) in requests() {
        let mut table = filled();
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            let apply = |request| table.apply(ConnId(1), request).unwrap();
            bencher.iter_batched(|| request.clone(), apply, BatchSize::SmallInput);
        });
    }
    group.finish();
}

/// Set a key that this many connections wait for.
fn release(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("release");
    for count in [64_u64, 2048] {
        group.throughput(Throughput::Elements(count));
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            let waited_for = || {
                let mut table = Table::new(TableLimits::default());
                for number in 0..count {
                    table.apply(ConnId(number), Request::Wait { keys: vec![key(0)] }).unwrap();
                }
                table
            };
            let release = |mut table: Table| {
                let set = Request::Set { key: key(0), value: Bytes::from_static(b"x") };
                let released = table.apply(ConnId(count), set).unwrap().released;
                assert_eq!(released.len() as u64, count);
                table
            };
            bencher.iter_batched(waited_for, release, BatchSize::LargeInput);
        });
    }
    group.finish();
}

/// Set new keys, as at a job's start.
fn fill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fill");
    group.throughput(Throughput::Elements(KEYS as u64)).sample_size(20);
    group.bench_function(BenchmarkId::from_parameter(KEYS), |bencher| bencher.iter_with_large_drop(filled));
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = apply, release, fill
}
criterion_main!(benches);
