//! What holds for all views.

use proptest::prelude::*;

use super::scenes::{frame, rank, torch_frame};
use crate::hang::blame::blame;
use crate::hang::finding::Finding;
use crate::hang::ranks::Ranks;
use crate::hang::view::{Class, Entry, Gil, Group, Life, Signature, State, View};

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let entry = (prop_oneof![0..6_u64, any::<u64>()], any::<u32>(), 0..4_u16);
    proptest::collection::vec(entry.prop_map(|(seq, at, signature)| Entry { seq, at, signature }), 0..4)
}

/// Any group, of few names, so that ranks share some.
fn group() -> impl Strategy<Value = Group> {
    let ranks = proptest::option::of(proptest::collection::vec(0..8_u32, 0..5));
    let number = || prop_oneof![0..6_u64, any::<u64>()];
    ("[0-3]", ranks, number(), number(), entries(), entries()).prop_map(|(name, ranks, last, oldest, pending, tail)| {
        Group {
            name,
            desc: String::new(),
            ranks: ranks.map(|ranks| ranks.into_iter().collect::<Ranks>()),
            last,
            oldest,
            pending,
            tail,
        }
    })
}

/// Any view, whether or not it makes sense.
fn view() -> impl Strategy<Value = View> {
    let life = prop_oneof![
        5 => Just(Life::Running),
        1 => any::<i32>().prop_map(|code| Life::Ended { code }),
        1 => any::<bool>().prop_map(|raised| Life::MainThreadEnded { raised }),
    ];
    let state = prop_oneof![5 => Just(State::Sleeping), 1 => Just(State::Stopped), 1 => Just(State::Ended)];
    let call = proptest::option::of(prop_oneof![
        Just(("all_reduce", None)),
        Just(("new_group", None)),
        proptest::option::of(0..8_u32).prop_map(|peer| ("recv", peer)),
    ]);
    let class = proptest::option::of(prop_oneof![Just(Class::Idle), Just(Class::Busy)]);
    let groups = proptest::collection::vec(group(), 0..4);
    (0..8_u32, 0..2_u64, life, state, any::<bool>(), call, class, groups).prop_map(
        |(at, round, life, state, answered, call, class, groups)| {
            let mut view = rank(at);
            (view.round, view.life, view.state, view.answered, view.class) = (round, life, state, answered, class);
            view.gil = if answered { Gil::Free } else { Gil::Held };
            let named = |op: &str| Signature { op: op.to_owned(), shape: String::new() };
            view.signatures = vec![named("a"), named("b"), named("a")];
            view.frames.extend((at % 3 == 0).then(|| frame("other", "/home/user/other.py", at)));
            match call {
                Some((name, peer)) => View { groups, ..view }.stands_in(torch_frame(name, peer)),
                None => View { groups, ..view },
            }
        },
    )
}

/// A world that makes sense: each rank has come to some number of the world's and of a pair's collectives.
fn world() -> impl Strategy<Value = Vec<View>> {
    let one = (1..4_u64, any::<bool>(), 0..20_u32, 1..4_u64);
    proptest::collection::vec(one, 2..8).prop_map(|ranks| {
        let one = |(at, (last, waits, special, pair)): (usize, (u64, bool, u32, u64))| {
            let members = [at as u32 / 2 * 2, at as u32 / 2 * 2 + 1];
            let view = rank(at as u32);
            let view = if waits { view.waits(last + 10) } else { view.passed(last + 10) };
            let view = view.enters(&format!("{}", 1 + at / 2), Some(&members), pair, 9, "all_reduce");
            match special {
                0 => view.ended(1),
                1 => view.stopped(),
                2 => view.silent(Gil::Held),
                _ => view,
            }
        };
        ranks.into_iter().enumerate().map(one).collect()
    })
}

proptest! {
    #[test]
    fn no_views_lead_to_a_panic_and_their_order_does_not_matter(views in proptest::collection::vec(view(), 0..12), turn in 0..12_usize) {
        let finding = blame(&views);
        let mut others = views.clone();
        others.reverse();
        prop_assert_eq!(blame(&others), finding.clone());
        others.rotate_left(turn.min(views.len()));
        prop_assert_eq!(blame(&others), finding.clone());
        let round = views.iter().map(|view| view.round).max();
        let known = |rank: u32| views.iter().any(|view| view.rank == rank && Some(view.round) == round);
        prop_assert!(finding.waiting.iter().all(known), "{finding:?}");
        prop_assert_eq!(Finding::decode(&finding.encode()), Ok(finding));
    }

    /// A group in which all have ended all they have entered has nothing to do with a hang.
    #[test]
    fn a_healthy_group_changes_nothing(views in world(), last in 1..50_u64, name in "[a-c]|[A-C]") {
        let before = blame(&views);
        let members: Vec<u32> = views.iter().map(|view| view.rank).collect();
        let mut more = views.clone();
        for view in more.iter_mut().filter(|view| view.answered) {
            *view = view.clone().enters(&name, Some(&members), last, last + 1, "all_gather");
        }
        prop_assert_eq!(blame(&more), before);
    }

    /// If one rank alone is behind, nobody else is named.
    #[test]
    fn the_only_rank_that_is_behind_is_named(ranks in 2..20_u32, bad in 0..20_u32, last in 2..50_u64, special in 0..4_u32) {
        let bad = bad % ranks;
        let views: Vec<_> = (0..ranks)
            .map(|at| match (at == bad, special) {
                (false, _) => rank(at).waits(last),
                (true, 0) => rank(at).passed(last - 1),
                (true, 1) => rank(at).stopped(),
                (true, 2) => rank(at).ended(0),
                (true, _) => rank(at).silent(Gil::Held),
            })
            .collect();
        let finding = blame(&views);
        prop_assert_eq!(finding.ranks.iter().collect::<Vec<_>>(), vec![bad]);
        prop_assert_eq!(finding.waiting.len(), ranks as usize - 1);
        prop_assert_eq!(finding.collective.map(|it| it.seq), Some(last));
    }
}
