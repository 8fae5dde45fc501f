//! Benchmark of `blame`: who holds up 4,096 ranks with 8 groups each.

#![allow(missing_docs, reason = "a measuring tool")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use elastic_rs::hang::blame::blame;
use elastic_rs::hang::ranks::Ranks;
use elastic_rs::hang::view::{Class, Entry, Gil, Group, PENDING_LIMIT, Signature, State, TAIL_LIMIT, View, WORLD};

const RANKS: u32 = 4096;
const GROUPS: u32 = 8;

/// All ranks wait in the last collective of each of their groups, but for one, which has entered none of these. A view has as many
/// collectives as it may.
fn views(pending: usize) -> Vec<View> {
    let last = 5000_u64;
    let index = |seq: u64| (seq % 5) as u16;
    let view = |rank: u32| {
        let behind = u64::from(rank == RANKS / 2 + 1) * pending as u64;
        let group = |at: u32| {
            // The world, and groups of 8, 16, ... ranks that are neighbours or far apart.
            let size = 4 << at;
            let members: Ranks = match at {
                0 => (0..RANKS).collect(),
                _ if at % 2 == 1 => (rank / size * size..(rank / size + 1) * size).collect(),
                _ => (0..size).map(|one| rank % (RANKS / size) + one * (RANKS / size)).collect(),
            };
            let of = members.first().unwrap_or_default();
            let entry = |seq: u64| Entry { seq, at: seq as u32 * GROUPS + at, signature: index(seq) };
            let came_to = last - behind;
            Group {
                name: if at == 0 { WORLD.to_owned() } else { format!("{at}-{of}") },
                desc: "undefined".to_owned(),
                ranks: Some(members),
                last: came_to,
                oldest: came_to - 200,
                pending: (last - pending as u64 + 1..=came_to).map(entry).collect(),
                tail: (came_to - TAIL_LIMIT as u64 + 1..=came_to).map(entry).collect(),
            }
        };
        View {
            answered: true,
            gil: Gil::Free,
            state: State::Sleeping,
            class: Some(Class::Idle),
            signatures: (0..5)
                .map(|at| Signature { op: "all_reduce".to_owned(), shape: format!("[{at}] Float") })
                .collect(),
            groups: (0..GROUPS).map(group).collect(),
            ..View::new(rank, 1)
        }
    };
    (0..RANKS).map(view).collect()
}

fn name_one_rank(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("blame, 4096 ranks x 8 groups");
    for pending in [1, PENDING_LIMIT] {
        let views = views(pending);
        let finding = blame(&views);
        assert_eq!(finding.ranks.iter().collect::<Vec<_>>(), [RANKS / 2 + 1], "{finding:?}");
        group.bench_function(BenchmarkId::new("pending", pending), |bencher| {
            bencher.iter(|| black_box(blame(black_box(&views))));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(3)).sample_size(10);
    targets = name_one_rank
}
criterion_main!(benches);
