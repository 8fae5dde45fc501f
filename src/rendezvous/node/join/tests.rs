use super::*;
use crate::rendezvous::messages::message::Survivor;

const PATIENCE: Duration = Duration::from_secs(60);

fn workers(survivors: u32) -> JoinWorkers {
    let survivor = |local_rank| Survivor { local_rank, generation: None, commit: None };
    let survival = Survival::Attended((0..survivors).map(survivor).collect());
    JoinWorkers { survival, ..JoinWorkers::new("trainer", 2) }
}

/// A join after round 1 whose store is open, with these survivors of two workers.
fn pending(survivors: u32, now: Instant) -> Joins {
    let mut joins = Joins::default();
    joins.set_survivors(workers(survivors).survival);
    let offered = Some(JoinWorkers::new("trainer", 2));
    joins.begin(Store::Open(5), Round(1), None, offered, Some(9), (now, now + PATIENCE));
    joins
}

fn placement(round: u64, rank: u32) -> Placement {
    Placement {
        round: Round(round),
        rank,
        world_size: 2,
        world: 1,
        master_addr: "10.0.0.1".into(),
        master_port: 5,
        reason: String::new(),
        restart: 0,
        workers: None,
        host: None,
        local_world_size: Some(3),
        resume: None,
        members: None,
    }
}

#[test]
fn a_join_without_an_answer_is_withdrawn_and_then_ended() {
    let begin = Instant::now();
    let (late, progress) = (begin + PATIENCE, Some("one is missing".to_owned()));
    let waits = Waits { progress: "one is missing".into(), spare: false };
    for (welcomed, first) in [(true, GiveUp::Withdraw), (false, GiveUp::Unreachable { after: PATIENCE })] {
        let mut joins = pending(0, begin);
        assert!(joins.on_waits(&waits, begin));
        assert_eq!(joins.give_up_if_due(welcomed, late - Duration::from_millis(1)), None);
        assert_eq!(joins.give_up_if_due(welcomed, late), Some(first));
        assert_eq!(joins.give_up_if_due(welcomed, late), None);
        assert_eq!(joins.on_complete(placement(2, 0)), None, "it has given up");
        let ended = joins.give_up_if_due(welcomed, late + WITHDRAW_GRACE);
        assert_eq!(ended, Some(GiveUp::Unanswered { after: PATIENCE, progress: progress.clone() }));
        assert_eq!(joins.on_withdrawn(), Some(PATIENCE));
    }
}

#[test]
fn a_spare_waits_without_a_limit_until_it_is_needed() {
    let begin = Instant::now();
    let mut joins = pending(0, begin);
    let waits = |spare| Waits { progress: String::new(), spare };
    let hour = begin + Duration::from_secs(3600);
    joins.on_waits(&waits(true), begin);
    assert_eq!(joins.give_up_if_due(true, hour), None);
    joins.on_waits(&waits(false), hour);
    assert_eq!(joins.pending().and_then(PendingJoin::next_deadline), Some(hour + PATIENCE));
}

#[test]
fn a_rank_assignment_counts_if_it_is_of_a_later_round() {
    let address = IpAddr::from([10, 0, 0, 2]);
    for (round, rank, list_of, members) in
        [(1, 0, 1, None), (2, 0, 2, Some(Some(1))), (2, 1, 2, Some(None)), (3, 0, 2, Some(None))]
    {
        let mut joins = pending(0, Instant::now());
        joins.on_members(Round(list_of), vec![address], false);
        let found = joins.on_complete(placement(round, rank));
        assert_eq!(
            found.as_ref().map(|found| found.members.as_ref().map(|list| list.len())),
            members,
            "{round} {rank}"
        );
        assert!(found.is_none_or(|found| found.local_world_size.is_none()), "it has offered two workers");
    }
    let mut joins = pending(0, Instant::now());
    joins.on_members(Round(2), vec![address], true);
    joins.on_connected();
    joins.on_members(Round(2), vec![address], false);
    let members = joins.on_complete(placement(2, 0)).and_then(|found| found.members);
    assert_eq!(members.as_deref(), Some([address].as_slice()), "of the new connection alone");
}

#[test]
fn only_workers_that_have_all_survived_bring_the_check() {
    for (survivors, in_place, check, has_survivors) in
        [(2, true, Some(9), true), (1, true, None, true), (0, true, None, false), (2, false, None, true)]
    {
        let joins = pending(survivors, Instant::now());
        let join = joins.pending().expect("it has begun");
        let NodeMessage::Join(message) = join.message(in_place) else { panic!("{join:?}") };
        let sent = message.workers.expect("it offers workers");
        assert_eq!((sent.check, join.has_survivors()), (check, has_survivors), "{survivors} {in_place}");
        assert_eq!(sent.survivors().len(), if in_place { survivors as usize } else { 0 });
    }
    let mut joins = pending(2, Instant::now());
    assert!(joins.lose_survivors("cut off".into()) && joins.has_lost_survivors());
    assert!(!joins.pending().expect("it goes on").has_survivors());
    assert_eq!([joins.take_lost_survivors(), joins.take_lost_survivors()], [Some("cut off".into()), None]);
}

#[test]
fn a_store_is_wanted_for_each_new_address_until_the_join_is_withdrawn() {
    let begin = Instant::now();
    let mut joins = Joins::default();
    joins.begin(Store::OpenFor(None), Round(0), None, None, None, (begin, begin + PATIENCE));
    assert!(joins.wants_store("a") && joins.ready(Some("a")).is_none());
    assert!(joins.on_store_opened("a".into(), 7));
    assert!(!joins.wants_store("a") && joins.wants_store("b"));
    assert_eq!(joins.ready(Some("a")).map(|join| join.join().store_port), Some(7));
    joins.give_up_if_due(true, begin + PATIENCE);
    assert!(!joins.wants_store("b") && !joins.on_store_opened("b".into(), 8));
}

#[test]
fn an_abandoned_join_reports_whether_the_caller_had_a_rank_assignment() {
    assert_eq!(Joins::default().abandon(), None);
    let mut joins = pending(0, Instant::now());
    assert_eq!((joins.abandon(), joins.abandon()), (Some(false), None));
    let mut joins = pending(0, Instant::now());
    assert!(joins.resolve(Ok(placement(2, 0))) && !joins.resolve(Ok(placement(3, 0))));
    assert_eq!(joins.abandon(), Some(true));
    let mut joins = pending(0, Instant::now());
    joins.resolve(Err(JoinError::Busy));
    assert_eq!((joins.abandon(), joins.take_outcome()), (None, None));
}

#[test]
fn progress_is_asked_for_once_unless_it_is_known() {
    let begin = Instant::now();
    let mut joins = pending(0, begin);
    let asks = [0, 2, 3].map(|seconds| joins.asks(begin + Duration::from_secs(seconds)));
    assert_eq!(asks, [false, true, false]);
    let mut joins = pending(0, begin);
    joins.on_waits(&Waits { progress: String::new(), spare: false }, begin);
    assert!(!joins.asks(begin + PATIENCE));
}
