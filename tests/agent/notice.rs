//! Notices that this machine is taken away, event by event.

use std::time::{Duration, Instant};

use crate::commands::{self, GRACE, SIGTERM, does, held, killed, warnings};
use elastic_rs::agent::machine::{LEAVE_LIMIT, RAISE_LIMIT};
use elastic_rs::agent::{AgentMachine, Command, Outcome, Policy};
use elastic_rs::channel::message::ToWorker;
use elastic_rs::rendezvous::messages::message::{
    Generation, Placement, Resume, Round, SAVE_WITHIN, Survival, WorldChange,
};

const SECOND: Duration = Duration::from_secs(1);
const WHY: &str = "its machine is taken away (a test)";
const FIRST: Resume =
    Resume::Continue { source: 0, sync: true, survivors: 0, generation: Generation { round: Round(1), world: 1 } };

fn running(policy: Policy, attend: bool) -> AgentMachine {
    let mut agent = commands::new_agent(policy);
    let placement = commands::placement(1);
    agent.on_placed(Placement { resume: Some(FIRST), ..placement }, Instant::now());
    agent.on_started();
    if attend {
        (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
    }
    does(&mut agent);
    agent
}

fn noticed(agent: &mut AgentMachine, left: Duration, now: Instant) {
    agent.on_notice(now + left, WHY, now);
    assert_eq!(does(agent), [Command::Notice { round: Round(1), left, reason: WHY.to_owned() }]);
}

/// It has left by now, because of its machine.
fn assert_leaves(agent: &mut AgentMachine) {
    let did = does(agent);
    let leaves = matches!(&did[0], Command::Leave { reason, signal: None } if reason == WHY);
    assert!(leaves && matches!(&did[1], Command::Stop(_)), "{did:?}");
    agent.on_stopped();
    assert_eq!(does(agent), [Command::End(Box::new(Outcome::Signal(SIGTERM)))]);
}

#[test]
fn workers_that_attend_leave_at_a_check_and_have_until_the_machine_goes() {
    let now = Instant::now();
    let mut agent = running(commands::policy(), true);
    noticed(&mut agent, 30 * SECOND, now);
    assert_eq!(agent.next_deadline(), Some(now + 30 * SECOND - GRACE), "the others may be unable to change in place");
    let change = WorldChange { round: Round(1), flags: 1, reason: WHY.to_owned() };
    agent.on_change(1, &change);
    assert_eq!(agent.next_deadline(), Some(now + 30 * SECOND), "not a grace before: they leave by themselves");
    assert!(
        does(&mut agent)
            .iter()
            .all(|it| matches!(it, Command::Send { message, .. } if matches!(**message, ToWorker::Change { .. })))
    );
    (0..2).for_each(|local_rank| agent.on_worker_counted(local_rank, 1, 4));
    agent.on_raise_at(1, &change, 5, now + SECOND);
    assert_eq!(agent.next_deadline(), Some(now + 30 * SECOND));
    (0..2).for_each(|local_rank| agent.on_worker_parked(local_rank, held(Some(4))));
    let did = does(&mut agent);
    assert!(did.contains(&Command::Parked(Round(1))), "{did:?}");
    assert!(did.iter().any(|it| matches!(it, Command::Leave { signal: None, .. })), "{did:?}");
    agent.on_stopped();
    assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::Signal(SIGTERM)))]);
}

#[test]
fn workers_that_do_not_attend_run_until_their_grace_begins_or_until_the_end() {
    let now = Instant::now();
    for (saves_by_signal, left, runs) in [
        (false, 30 * SECOND, 30 * SECOND - GRACE),
        (false, GRACE / 2, Duration::ZERO),
        (true, 30 * SECOND, 30 * SECOND),
    ] {
        let mut agent = running(Policy { saves_by_signal, ..commands::policy() }, false);
        noticed(&mut agent, left, now);
        assert_eq!(agent.next_deadline(), Some(now + runs));
        agent.on_tick(now + runs);
        let did = does(&mut agent);
        assert!(matches!(&did[..2], [Command::Leave { .. }, Command::Stop(_)]), "{did:?}");
        if runs < left {
            assert_eq!(agent.next_deadline(), Some(now + left), "whoever ignores it is killed");
            agent.on_tick(now + left);
            assert_eq!(does(&mut agent), [Command::Kill]);
        } else {
            assert_eq!(did[2..], [Command::Kill]);
        }
        assert_eq!(agent.next_deadline(), None);
    }
}

#[test]
fn workers_that_attend_have_their_grace_if_the_world_does_not_change() {
    let now = Instant::now();
    // The coordinator waits for a third of the time, and is asked for 5 s.
    let mut agent = running(commands::policy(), true);
    noticed(&mut agent, 9 * SECOND, now);
    assert_eq!(agent.next_deadline(), Some(now + 8 * SECOND));
    // There is no coordinator that could.
    let mut agent = running(commands::policy(), true);
    noticed(&mut agent, 9 * SECOND, now);
    agent.on_notice_unsent(now);
    assert_eq!(agent.next_deadline(), Some(now + 9 * SECOND - GRACE));
    agent.on_tick(now + 9 * SECOND - GRACE);
    let did = does(&mut agent);
    assert!(matches!(&did[..], [Command::Leave { .. }, Command::Stop(_)]), "{did:?}");
}

#[test]
fn the_earliest_of_several_notices_counts() {
    let now = Instant::now();
    let mut agent = running(Policy { saves_by_signal: true, ..commands::policy() }, false);
    noticed(&mut agent, 30 * SECOND, now);
    agent.on_notice(now + 60 * SECOND, WHY, now);
    assert_eq!((does(&mut agent), agent.next_deadline()), (Vec::new(), Some(now + 30 * SECOND)));
    noticed(&mut agent, 9 * SECOND, now);
    assert_eq!(agent.next_deadline(), Some(now + 9 * SECOND));
}

#[test]
fn sigterm_after_a_notice_leaves_at_a_check_and_a_notice_after_sigterm_is_later() {
    let now = Instant::now();
    for notice_first in [true, false] {
        let mut agent = running(commands::policy(), true);
        if notice_first {
            noticed(&mut agent, 30 * SECOND, now);
        }
        agent.on_signal(SIGTERM, now);
        assert_eq!(does(&mut agent), [Command::WillLeave { round: Round(1), signal: SIGTERM }]);
        if !notice_first {
            agent.on_notice(now + 30 * SECOND, WHY, now);
            assert_eq!(does(&mut agent), []);
        }
        assert_eq!(agent.next_deadline(), Some(now + LEAVE_LIMIT), "{notice_first}");
    }
}

#[test]
fn a_node_that_has_finished_takes_part_in_no_new_world_either() {
    let now = Instant::now();
    let mut agent = running(commands::policy(), false);
    (0..2).for_each(|local_rank| agent.on_worker_succeeded(local_rank, now));
    does(&mut agent);
    agent.on_notice(now + 30 * SECOND, WHY, now);
    agent.on_interrupted(Round(1), "node1 is lost", now);
    let did = does(&mut agent);
    assert!(matches!(&did[..], [Command::Leave { .. }, Command::Stop(_)]), "{did:?}");
    assert_eq!(agent.next_deadline(), Some(now + 30 * SECOND), "what they have left is killed then");
    agent.on_tick(now + 30 * SECOND);
    assert_eq!((does(&mut agent), agent.next_deadline()), (vec![Command::Kill], None));
}

#[test]
fn a_node_with_a_notice_takes_part_in_no_new_world() {
    let now = Instant::now();
    // It waits for one.
    let mut agent = commands::new_agent(commands::policy());
    does(&mut agent);
    agent.on_notice(now + 30 * SECOND, WHY, now);
    let did = does(&mut agent);
    assert!(matches!(&did[..], [Command::Leave { .. }, Command::End(_)]), "{did:?}");
    // Its world ends, or one of its workers does.
    for ends in [
        (|agent, now| agent.on_interrupted(Round(1), "node1 is lost", now)) as fn(&mut AgentMachine, Instant),
        |agent, now| agent.on_worker_exited_badly(killed(1), now),
    ] {
        let mut agent = running(commands::policy(), true);
        noticed(&mut agent, 30 * SECOND, now);
        ends(&mut agent, now);
        let did = does(&mut agent);
        assert!(matches!(&did[..2], [Command::Leave { .. }, Command::Stop(_)]), "{did:?}");
        agent.on_stopped();
        assert_eq!(does(&mut agent), [Command::End(Box::new(Outcome::Signal(SIGTERM)))]);
    }
}

#[test]
fn workers_that_succeed_before_it_have_succeeded() {
    let now = Instant::now();
    let mut agent = running(commands::policy(), true);
    noticed(&mut agent, 30 * SECOND, now);
    (0..2).for_each(|local_rank| agent.on_worker_succeeded(local_rank, now));
    assert_eq!(does(&mut agent), [Command::Done(Round(1))]);
    assert_eq!(agent.next_deadline(), Some(now + 30 * SECOND));
    agent.on_tick(now + 30 * SECOND);
    assert_leaves(&mut agent);
}

#[test]
fn a_notice_after_the_end_changes_nothing() {
    let now = Instant::now();
    let mut agent = running(commands::policy(), false);
    agent.on_signal(SIGTERM, now);
    does(&mut agent);
    agent.on_notice(now + 3 * SECOND, WHY, now);
    assert_eq!((does(&mut agent), agent.next_deadline()), (Vec::new(), Some(now + 3 * SECOND)), "but the kill");
    agent.on_stopped();
    does(&mut agent);
    agent.on_notice(now + SECOND, WHY, now);
    assert_eq!((does(&mut agent), warnings(&mut agent).len()), (Vec::new(), 0));
}

#[test]
fn workers_that_save_at_the_check_are_replaced_and_need_no_company() {
    let now = Instant::now();
    let change = WorldChange { round: Round(1), flags: 1, reason: WHY.to_owned() };
    for (leaves, size) in [(true, 1), (true, 4), (false, 4)] {
        let mut agent = commands::new_agent(commands::policy());
        agent.on_placed(Placement { resume: Some(FIRST), world_size: size, ..commands::placement(1) }, now);
        agent.on_started();
        (0..2).for_each(|local_rank| agent.on_worker_attends(local_rank));
        does(&mut agent);
        agent.on_worker_saves();
        assert_eq!(does(&mut agent), [Command::Saves(Round(1))]);
        if leaves {
            noticed(&mut agent, 30 * SECOND, now);
        }
        agent.on_change(1, &change);
        (0..2).for_each(|local_rank| agent.on_worker_counted(local_rank, 1, 4));
        agent.on_raise_at(1, &change, 5, now);
        if !leaves {
            assert_eq!(agent.next_deadline(), Some(now + RAISE_LIMIT + SAVE_WITHIN));
        }
        does(&mut agent);
        (0..2).for_each(|local_rank| agent.on_worker_parked(local_rank, held(None)));
        let mut did = does(&mut agent);
        if leaves {
            assert_eq!(did, [Command::Parked(Round(1))], "others may still save");
            assert_eq!(agent.next_deadline(), Some(now + 30 * SECOND));
            agent.on_interrupted(Round(1), "all workers have stopped", now);
            did = does(&mut agent);
        } else {
            assert_eq!(did, [Command::Join { survival: Survival::Saved }]);
            agent.on_placed(Placement { resume: Some(FIRST), ..commands::placement(2) }, now);
            did = does(&mut agent);
        }
        let dismissed = did
            .iter()
            .filter(|it| matches!(it, Command::Send { message, .. } if matches!(**message, ToWorker::Refused { .. })));
        assert_eq!(dismissed.count(), 2, "{did:?}");
        assert!(matches!(did.last(), Some(Command::Stop(_))), "{did:?}");
        agent.on_stopped();
        let did = does(&mut agent);
        match leaves {
            true => assert_eq!(did, [Command::End(Box::new(Outcome::Signal(SIGTERM)))]),
            false => assert!(matches!(&did[..], [Command::Start { missing, .. }] if missing.len() == 2), "{did:?}"),
        }
    }
}

/// Nobody may know that the others have saved.
#[test]
fn a_node_that_has_saved_leaves_in_time() {
    let now = Instant::now();
    let change = WorldChange { round: Round(1), flags: 1, reason: WHY.to_owned() };
    for late in [false, true] {
        let mut agent = running(commands::policy(), true);
        noticed(&mut agent, 30 * SECOND, now);
        agent.on_change(1, &change);
        (0..2).for_each(|local_rank| agent.on_worker_counted(local_rank, 1, 4));
        if !late {
            agent.on_worker_saves();
        }
        agent.on_raise_at(1, &change, 5, now);
        if late {
            agent.on_worker_saves();
        }
        assert!(does(&mut agent).contains(&Command::Saves(Round(1))));
        (0..2).for_each(|local_rank| agent.on_worker_parked(local_rank, held(None)));
        assert_eq!(does(&mut agent), [Command::Parked(Round(1))]);
        agent.on_tick(now + 30 * SECOND);
        let did = does(&mut agent);
        assert!(matches!(&did[0], Command::Leave { .. }), "{did:?}");
        assert_eq!(did.last(), Some(&Command::Kill));
    }
}

/// The coordinator may know before the agent that they do not live through the end of their world.
#[test]
fn workers_that_save_are_stopped_when_their_world_fails() {
    for early in [false, true] {
        let now = Instant::now();
        let mut agent = running(commands::policy(), true);
        if early {
            agent.on_worker_saves();
            does(&mut agent);
        }
        agent.on_interrupted(Round(1), "a node was lost", now);
        let did = does(&mut agent);
        if !early {
            assert!(!did.iter().any(|it| matches!(it, Command::Stop(_))), "{did:?}");
            agent.on_worker_saves();
            assert!(matches!(&does(&mut agent)[..], [Command::Stop(_)]));
        } else {
            assert!(matches!(did.last(), Some(Command::Stop(_))), "{did:?}");
        }
    }
}
