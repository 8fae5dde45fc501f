use std::collections::BTreeSet;

use super::super::command::Led;
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

/// Let the others take what the leader writes, and ask for leases.
fn accept(leader: &mut Ensemble, now: Instant) {
    while let commands = leader.take_commands()
        && !commands.is_empty()
    {
        for command in commands {
            if let Command::Send { place, message: PeerMessage::Quorum(Message::Write(record)) } = command {
                let accepted = PeerMessage::Quorum(Message::Reply(Reply::Accepted(record.stamp)));
                leader.on_message(place, process(place), accepted, now).unwrap();
                let question = PeerMessage::Question { number: 1, follows: record.stamp.ballot };
                leader.on_message(place, process(place), question, now).unwrap();
            }
        }
    }
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
    first.on_message(3, process(3), PeerMessage::WhoLeads, lapses - LOOKS_EVERY).unwrap();
    first.on_tick(lapses);
    assert_eq!(voters(&first), [0, 3].into());
    accept(&mut first, lapses);
    let Led { leader, successors, missing, .. } = first.led();
    assert_eq!((leader.as_str(), successors, missing.len()), ("n0:1", vec!["n3:1".to_owned()], 3));
}

/// The connection of a machine that has lost its power does not end.
#[test]
fn one_that_is_not_heard_for_a_lease_does_not_vote() {
    let now = Instant::now();
    let mut first = leader(2, now);
    first.on_link(1, Link::Up(process(1)), now);
    assert_eq!(voters(&first), [0, 1].into());
    let lapses = now + LEASE_OF_OTHERS;
    assert!(first.next_deadline() <= lapses);
    first.on_tick(lapses);
    assert_eq!((voters(&first), first.led().missing), ([0].into(), vec!["n1:1".to_owned()]));
    assert!(first.next_deadline() > lapses);
    first.on_message(1, process(1), PeerMessage::WhoLeads, lapses + LOOKS_EVERY).unwrap();
    accept(&mut first, lapses + LOOKS_EVERY);
    assert_eq!((voters(&first), first.led().successors), ([0, 1].into(), vec!["n1:1".to_owned()]));
}

/// Its connection is given up later than it was heard last.
#[test]
fn while_one_of_three_is_silent_nobody_could_take_over_and_soon_the_other_one() {
    let now = Instant::now();
    let mut first = leader(3, now);
    for place in [1, 2] {
        first.on_link(place, Link::Up(process(place)), now);
    }
    assert_eq!(voters(&first), [0, 1, 2].into());
    assert!(first.led().successors.is_empty());
    accept(&mut first, now);
    assert_eq!(first.led().successors, ["n1:1", "n2:1"]);
    let given_up = now + Duration::from_secs(10);
    let follows = Ballot::first(process(0));
    first.on_message(1, process(1), PeerMessage::Question { number: 2, follows }, given_up).unwrap();
    first.on_link(2, Link::Down, given_up);
    let Led { successors, missing, may_hand_over, .. } = first.led();
    assert_eq!((successors, missing, may_hand_over), (vec![], vec!["n2:1".to_owned()], true));
    let lapses = now + LEASE_OF_OTHERS;
    assert!(first.next_deadline() <= lapses);
    first.on_tick(lapses);
    accept(&mut first, lapses);
    assert_eq!((voters(&first), first.led().successors), ([0, 1].into(), vec!["n1:1".to_owned()]));
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

/// A process that follows the first one, and was sent no record.
fn follower(count: usize, now: Instant) -> Ensemble {
    let mut one = ensemble(1, count, now);
    one.on_link(0, Link::Up(process(0)), now);
    one.on_message(0, process(0), PeerMessage::Leader(Answer::Leads), now).unwrap();
    assert_eq!(one.leader(), Some(0));
    one
}

/// Nobody is at the other endpoints any more.
fn lose_all(one: &mut Ensemble, at: Instant) {
    one.on_link(0, Link::Down, at);
    one.on_link(0, Link::Refused, at);
    one.on_link(0, Link::Dead(process(0)), at);
    (2..one.peers.len()).for_each(|place| one.on_link(place, Link::Refused, at));
    one.on_tick(at + 4 * LOOKS_EVERY);
}

/// A leader that cannot connect to this process decides alone, and others may hold what it has decided.
#[test]
fn who_has_followed_for_long_without_a_record_begins_no_history_of_its_own() {
    let now = Instant::now();
    for (after, leads) in [(BARRED_AFTER - LOOKS_EVERY, true), (BARRED_AFTER, false)] {
        let mut one = follower(3, now);
        lose_all(&mut one, now + after);
        assert_eq!(one.leads(), leads, "{after:?}");
        let why = one.why_nobody(now + after);
        assert_eq!(why.contains("could not connect to its endpoint"), !leads, "{why}");
    }
    // It follows whoever leads then.
    let mut one = follower(3, now);
    lose_all(&mut one, now + BARRED_AFTER);
    one.on_message(2, process(2), PeerMessage::Leader(Answer::Leads), now + 2 * BARRED_AFTER).unwrap();
    assert_eq!(one.leader(), Some(2));
}

fn written_by(leader: usize, voters: usize, content: Content<i64>) -> PeerMessage {
    let stamp = Stamp { ballot: Ballot { number: leader as u64, node: process(leader) }, seq: 1 + leader as u64 };
    PeerMessage::Quorum(Message::Write(Record {
        stamp,
        voters: (0..voters).map(process).collect(),
        before: None,
        content,
    }))
}

#[test]
fn a_proof_counts_also_for_a_record_that_comes_after_it() {
    let now = Instant::now();
    let mut one = follower(3, now);
    one.on_link(0, Link::Down, now);
    one.on_link(0, Link::Dead(process(0)), now);
    one.on_message(0, process(0), written_by(0, 3, Content::default()), now).unwrap();
    assert_eq!(one.leader(), None, "its leader is dead, so this process stands when it may");
}

/// The rank of the leader's own node is that of the process that recorded it, whoever has written the record again since.
#[test]
fn a_node_is_not_taken_for_dead_with_another_process() {
    let now = Instant::now();
    for (by, is_dead) in [(0, true), (2, false)] {
        let mut one = ensemble(1, 2, now);
        one.on_link(0, Link::Up(process(0)), now);
        one.on_message(0, process(0), PeerMessage::Leader(Answer::Leads), now).unwrap();
        let content = Content { version: 3, snapshot: None, by: Some(process(by)) };
        one.on_message(0, process(0), written_by(0, 2, content), now).unwrap();
        one.on_tick(now + ASKS_EVERY);
        let number = one.question.0;
        let stamp = Stamp { ballot: Ballot { number: 0, node: process(0) }, seq: 1 };
        one.on_message(0, process(0), PeerMessage::Lease { number, stamp }, now).unwrap();
        one.take_commands();
        one.on_link(0, Link::Down, now);
        one.on_link(0, Link::Dead(process(0)), now);
        one.on_tick(now + ASKS_EVERY);
        let leads = Command::Lead { snapshot: None, is_dead };
        assert!(one.take_commands().contains(&leads), "recorded by {by}");
    }
}
