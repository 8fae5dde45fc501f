//! Benchmark of the codec: decoding requests from a receive buffer, and encoding replies into a buffer.

#![allow(clippy::unwrap_used, missing_docs, reason = "a measuring tool: it stops at the first thing that goes wrong")]

use std::hint::black_box;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use elastic_rs::store::protocol::{Decoder, Limits, Reply, Request};

/// Number of requests that arrive together, as from a client with requests in flight.
const TOGETHER: usize = 64;

fn requests() -> Vec<(&'static str, Request)> {
    let (key, value) = (Bytes::from_static(b"/key/000"), Bytes::from(vec![b'v'; 64]));
    let keys: Vec<Bytes> = (0..100).map(|number| Bytes::from(format!("/key/{number:03}"))).collect();
    vec![
        ("ping", Request::Ping { nonce: 1 }),
        ("get", Request::Get { key: key.clone() }),
        ("set of 64 B", Request::Set { key: key.clone(), value: value.clone() }),
        ("compare_set of 64 B", Request::CompareSet { key, expected: value.clone(), desired: value }),
        ("multi_get of 100", Request::MultiGet { keys }),
    ]
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    group.throughput(Throughput::Elements(TOGETHER as u64));
    for (name, request) in requests() {
        let mut stream = BytesMut::new();
        (0..TOGETHER).for_each(|_| request.encode(&mut stream));
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            let whole = || (Decoder::validated(Limits::default()), stream.clone());
            bencher.iter_batched(
                whole,
                |(mut decoder, mut buf)| {
                    while let Some(request) = decoder.decode(&mut buf).unwrap() {
                        black_box(request);
                    }
                    buf
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

fn encode(criterion: &mut Criterion) {
    let value = Bytes::from(vec![b'v'; 64]);
    let replies = [
        ("integer", Reply::Integer(-7)),
        ("value of 64 B", Reply::Value(value.clone())),
        ("values, 100 of 64 B", Reply::Values(vec![value; 100])),
    ];
    let mut group = criterion.benchmark_group("encode");
    group.throughput(Throughput::Elements(1));
    for (name, reply) in replies {
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            let room = || (reply.clone(), BytesMut::with_capacity(16 * 1024));
            bencher.iter_batched(
                room,
                |(reply, mut out)| {
                    reply.encode(&mut out);
                    out
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = decode, encode
}
criterion_main!(benches);
