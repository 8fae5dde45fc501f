//! Quorums (`crates/sim/src/quorum`): all histories of small ones, random ones of larger ones, and mistakes that must show.

use std::time::{Duration, Instant};

use elastic_rs_sim::quorum::bootstrap::{self, Mistake};
use elastic_rs_sim::quorum::{Bounds, Mutation, explore, shortest, take_over, walk};

use super::seeds::asked_for;

const THREE: [u8; 3] = [0, 1, 2];

/// Three processes, all voters, of which the leader may die.
fn bounds() -> Bounds {
    Bounds {
        processes: 3,
        voters: THREE.to_vec(),
        changes: Vec::new(),
        deaths: 1,
        ticks: 0,
        writes: 1,
        questions: 0,
        stands: 2,
        abdications: 0,
        mutation: None,
    }
}

fn check(what: &str, bounds: &Bounds) {
    let began = Instant::now();
    match explore(bounds) {
        Ok(states) => println!("{what}: {states} states in {:.1?}", began.elapsed()),
        Err(history) => panic!("{what}:\n{history}"),
    }
}

#[test]
fn three_voters_of_which_the_leader_dies() {
    check("two writes", &Bounds { writes: 2, ..bounds() });
}

#[test]
fn three_voters_and_a_hand_over() {
    check("a hand-over", &Bounds { deaths: 0, abdications: 1, stands: 1, ..bounds() });
}

#[test]
fn three_voters_and_leases() {
    check("leases", &Bounds { ticks: 2, questions: 1, stands: 1, ..bounds() });
}

#[test]
fn two_voters() {
    let two = Bounds { processes: 2, voters: vec![0, 1], ..bounds() };
    check("two voters", &Bounds { ticks: 2, questions: 1, writes: 2, ..two.clone() });
    check("two voters, and a hand-over", &Bounds { ticks: 2, questions: 1, abdications: 1, ..two });
}

#[test]
fn voters_that_change() {
    let four = Bounds { processes: 4, changes: vec![vec![0, 3]], stands: 1, ..bounds() };
    check("a change of voters", &four);
}

#[test]
fn random_histories_of_five_processes() {
    let five = Bounds {
        processes: 5,
        voters: vec![0, 1, 2],
        changes: vec![vec![0, 1, 2, 3, 4], vec![1, 3, 4], vec![0, 1], vec![2, 3]],
        deaths: 3,
        ticks: 8,
        writes: 6,
        questions: 20,
        stands: 8,
        abdications: 2,
        mutation: None,
    };
    for seed in asked_for(2_000) {
        walk(&five, seed, 400).unwrap_or_else(|history| panic!("{history}"));
    }
}

/// While leases last, and although every fifth message is lost for a while.
#[test]
fn another_leads_once_the_leader_is_dead_or_hands_over() {
    for (voters, deaths) in [(2, 0), (2, 1), (3, 0), (3, 1), (5, 0), (5, 1), (5, 2), (7, 3)] {
        let of = |seed| take_over(seed, voters, deaths).unwrap_or_else(|history| panic!("{history}"));
        let mut took: Vec<_> = asked_for(500).map(of).collect();
        took.sort_unstable();
        let (median, last) = (took.get(took.len() / 2), took.last());
        println!("{deaths} of {voters} voters die: another leads after {median:.1?}, at most {last:.1?}");
        assert!(median.is_some_and(|median| *median < Duration::from_secs(4)), "messages take 0.3 s at most");
    }
}

/// Bounds within which each mistake shows. That a new leader forgets the leases which the one before has given shows with five voters only.
fn mistakes() -> Vec<(Mutation, Bounds)> {
    let four = Bounds { processes: 4, ..bounds() };
    let pair = Bounds { processes: 2, voters: vec![0, 1], ..bounds() };
    vec![
        (Mutation::WithoutVotersBefore, Bounds { changes: vec![vec![0, 3]], stands: 1, ..four.clone() }),
        (Mutation::WithoutNewVoters, Bounds { changes: vec![vec![0, 3]], writes: 2, questions: 1, stands: 1, ..four }),
        (Mutation::SaidEarly, bounds()),
        (Mutation::OwnRecord, Bounds { stands: 1, ..bounds() }),
        (Mutation::VoteAfterLease, Bounds { ticks: 2, stands: 1, ..pair.clone() }),
        (Mutation::EndedIsConsent, Bounds { stands: 1, ..pair.clone() }),
        (Mutation::ResetIsProof, Bounds { stands: 1, ..bounds() }),
        (Mutation::LeadsAlone, Bounds { stands: 1, ..pair.clone() }),
        (Mutation::LeaseOfNewer, Bounds { ticks: 2, questions: 1, stands: 1, ..pair }),
        (Mutation::WritesAfterAbdication, Bounds { deaths: 0, abdications: 1, stands: 1, ..bounds() }),
    ]
}

#[test]
fn each_mistake_shows() {
    for (mutation, bounds) in mistakes() {
        check(&format!("without {mutation:?}"), &bounds);
        let history = shortest(&Bounds { mutation: Some(mutation), ..bounds }, 24);
        println!("{mutation:?}:\n{}\n", history.unwrap_or_else(|| panic!("{mutation:?} violates nothing")));
    }
}

#[test]
fn one_of_a_list_leads() {
    let began = Instant::now();
    let states = bootstrap::explore(2, (4, 2, 6), None).unwrap_or_else(|history| panic!("{history}"));
    println!("two listed: {states} states in {:.1?}", began.elapsed());
    let states = bootstrap::explore(3, (3, 0, 6), None).unwrap_or_else(|history| panic!("{history}"));
    println!("three listed: {states} states in {:.1?}", began.elapsed());
    for mistake in [Mistake::SilentIsAbsent, Mistake::AsksFirst] {
        let history = bootstrap::explore(2, (2, 0, 4), Some(mistake)).expect_err("two lead");
        println!("{mistake:?}:\n{history}\n");
    }
}
