use std::collections::BTreeSet;

use super::*;
use crate::rendezvous::quorum::record::{Record, Stamp};
use crate::rendezvous::quorum::voter::Reply;

fn process(place: usize) -> NodeId {
    NodeId(place as u128 + 1)
}

fn ensemble(place: usize, count: usize, now: Instant) -> Ensemble {
    let endpoints = (0..count).map(|place| format!("n{place}:1")).collect();
    Ensemble::new(PeerHello { run_id: "job".into(), endpoints, place: place as u32, process: process(place) }, now)
}

/// The first of so many, which leads.
fn leader(count: usize, now: Instant) -> Ensemble {
    let mut first = ensemble(0, count, now);
    for place in 1..count {
        first.on_link(place, Link::Refused, now);
    }
    first.on_tick(now + 2 * LOOKS_EVERY);
    assert!(first.leads());
    first.take_commands();
    first
}

fn voters(of: &Ensemble) -> BTreeSet<usize> {
    of.voters.0.iter().map(|voter| voter.0 as usize - 1).collect()
}

#[test]
fn those_that_are_there_vote_in_odd_numbers_or_two() {
    let now = Instant::now();
    let mut first = leader(5, now);
    assert_eq!(voters(&first), [0].into());
    for (place, expected) in [(3, vec![0, 3]), (1, vec![0, 1, 3]), (4, vec![0, 1, 3]), (2, vec![0, 1, 2, 3, 4])] {
        first.on_link(place, Link::Up(process(place)), now);
        assert_eq!(voters(&first), expected.into_iter().collect(), "{place} is there");
    }
    // One that is away stays for a lease, one that is proven dead does not.
    first.on_link(1, Link::Down, now);
    assert_eq!(voters(&first).len(), 5);
    first.on_link(2, Link::Down, now);
    first.on_link(2, Link::Dead(process(2)), now);
    assert_eq!(voters(&first), [0, 3, 4].into(), "the one that is away is not needed any more");
    first.on_link(4, Link::Down, now);
    let lapses = now + LEASE_OF_OTHERS;
    assert!(first.next_deadline() <= lapses);
    first.on_tick(lapses);
    assert_eq!(voters(&first), [0, 3].into());
    let Led { leader, successors, missing } = first.led();
    assert_eq!((leader.as_str(), successors, missing.len()), ("n0:1", vec!["n3:1".to_owned()], 3));
}

#[test]
fn one_that_knows_of_no_leader_asks_everybody_and_leads_only_if_all_have_answered() {
    let now = Instant::now();
    let mut one = ensemble(1, 3, now);
    one.on_link(2, Link::Refused, now);
    let late = now + Duration::from_secs(60);
    one.on_tick(late);
    assert!(!one.leads() && one.why_nobody(late).contains("n0:1 did not answer"), "{}", one.why_nobody(late));
    one.on_link(0, Link::Up(process(0)), late);
    let asked = Command::Send { place: 0, message: PeerMessage::WhoLeads };
    assert_eq!(one.take_commands().last(), Some(&asked));
    one.on_message(0, process(0), PeerMessage::Leader(Answer::Fresh), late).unwrap();
    one.on_tick(late + LOOKS_EVERY);
    assert!(!one.leads() && one.why_nobody(late).contains("n0:1 is about to lead"), "{}", one.why_nobody(late));
    one.on_message(0, process(0), PeerMessage::Leader(Answer::Leads), late).unwrap();
    assert_eq!((one.leader(), one.leads()), (Some(0), false));
    // It has ended before it has sent a record.
    one.on_link(0, Link::Refused, late);
    assert_eq!(one.leader(), None);
    one.on_link(2, Link::Refused, late);
    one.on_link(0, Link::Refused, late);
    one.on_tick(late + 4 * LOOKS_EVERY);
    assert!(one.leads());
}

#[test]
fn messages_that_nobody_sends_are_errors() {
    let now = Instant::now();
    let mut one = ensemble(1, 3, now);
    let ballot = |number| Ballot { number, node: process(0) };
    let record = |stamp, voters: usize| Record {
        stamp,
        voters: (0..voters).map(process).collect(),
        before: None,
        content: Content::default(),
    };
    let stamp = |number, seq| Stamp { ballot: ballot(number), seq };
    let far = u64::MAX;
    for (message, text) in [
        (Message::Ask(ballot(far)), "a number is"),
        (Message::Abdicated(ballot(far)), "a number is"),
        (Message::IsOver(ballot(far)), "a number is"),
        (Message::Write(record(stamp(0, far), 1)), "a number is"),
        (Message::Write(record(stamp(far, 0), 1)), "a number is"),
        (Message::Write(record(stamp(0, 0), 0)), "a set of voters has none or more than 7"),
        (Message::Write(record(stamp(0, 0), 8)), "a set of voters has none or more than 7"),
        (Message::Reply(Reply::Voted(ballot(1), record(stamp(0, 0), 8))), "a set of voters has"),
        (Message::Reply(Reply::Accepted(stamp(0, far))), "a number is"),
        (Message::Reply(Reply::Refused(ballot(far))), "a number is"),
    ] {
        let why = one.on_message(0, process(0), PeerMessage::Quorum(message), now).unwrap_err();
        assert!(why.starts_with(text), "{why}");
    }
    for message in [
        PeerMessage::Question { number: 1, follows: ballot(far) },
        PeerMessage::Lease { number: 1, stamp: stamp(far, 0) },
    ] {
        assert!(one.on_message(0, process(0), message, now).is_err());
    }
    // Places that are not in the list, and its own, are no leaders.
    for place in [7, u32::MAX, 1] {
        one.on_message(0, process(0), PeerMessage::Leader(Answer::Knows(place)), now).unwrap();
        assert_eq!(one.leader(), None);
    }
    one.on_link(99, Link::Up(process(0)), now);
}
