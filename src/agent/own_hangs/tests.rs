//! A node with ranks 4 and 5 of 8, in virtual time.

use std::collections::VecDeque;

use super::*;
use crate::hang::finding::Kind;
use crate::hang::judge::{self, Mode};
use crate::hang::view::State;

const ROUND: Round = Round(2);

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A rank that waits in a collective of all ranks, or has entered the one before.
fn view(rank: u32, waits: bool) -> View {
    let mut view = View { round: ROUND.0, ..judge::tests::view(rank, 8 + u64::from(waits), waits) };
    view.groups[0].ranks = Some((0..8).collect());
    view
}

/// Let a node whose ranks look like that stand still for so long. Returns what it does but look, with the second of each.
fn passes(own: &mut OwnHangs, views: &[View], began: Instant, until: u64) -> Vec<(u64, Act)> {
    let (mut now, mut acts) = (began, Vec::new());
    for _ in 0..1000 {
        let mut todo = VecDeque::from(own.act(now));
        while let Some(act) = todo.pop_front() {
            match act {
                Act::Look => {
                    own.on_views(views.to_vec(), now);
                    todo.extend(own.act(now));
                }
                act => acts.push(((now - began).as_secs(), act)),
            }
        }
        match own.next_deadline().filter(|at| *at <= began + secs(until)) {
            Some(at) => now = now.max(at),
            None => break,
        }
    }
    acts
}

fn stands_still(options: Options, views: &[View], until: u64) -> (OwnHangs, Vec<(u64, Act)>) {
    let (mut own, began) = (OwnHangs::new(options), Instant::now());
    own.on_round(Some((ROUND, 8)), began);
    let step_time_us = Some(200_000);
    let report =
        StillReport { still_us: 2_000_000, step: Some(40), has_stepped: true, step_time_us, ..StillReport::default() };
    own.on_pace(ROUND, PaceReport::Still(report), began);
    let acts = passes(&mut own, views, began, until);
    (own, acts)
}

fn reported(acts: &[(u64, Act)]) -> Vec<(u64, Option<Finding>)> {
    let finding = |change: &HangChange| match change {
        HangChange::Found(found) => Some(found.finding.clone()),
        HangChange::Over => None,
    };
    let reported = acts.iter().filter_map(|(at, act)| match act {
        Act::Tell(news) => Some((*at, finding(&news.change))),
        Act::Look | Act::Restart { .. } => None,
    });
    reported.collect()
}

#[test]
fn a_stopped_rank_of_this_node_is_found_by_two_looks() {
    let mut stopped = view(4, false);
    stopped.state = State::Stopped;
    let (_, acts) = stands_still(Options::default(), &[stopped, view(5, true)], 60);
    let [(at, Some(finding))] = &reported(&acts)[..] else { panic!("{acts:?}") };
    assert!((5..=12).contains(at), "after {at} s");
    assert_eq!((finding.kind, finding.ranks.in_full()), (Kind::Stopped, "4".to_owned()));
}

#[test]
fn ranks_of_other_nodes_are_not_taken_for_ended_or_absent() {
    let timeout = Some(secs(20));
    let (_, acts) = stands_still(Options { timeout, ..Options::default() }, &[view(4, true), view(5, true)], 60);
    let [(_, Some(finding))] = &reported(&acts)[..] else { panic!("{acts:?}") };
    assert_eq!((finding.kind, finding.ranks.in_full(), finding.waiting.len()), (Kind::Inside, String::new(), 2));
    let facts = Facts { ranks: 8, is_own: true, ..Facts::default() };
    let lines = text::lines(finding, &facts);
    assert!(lines[0].ends_with("2 of 8 ranks wait"), "{lines:?}");
    let cause = "all ranks of this node are inside all_reduce #9 of 0: a rank of another node, library or network";
    assert_eq!(lines[1].trim(), cause);

    let (_, acts) = stands_still(Options { timeout, ..Options::default() }, &[view(4, false), view(5, true)], 60);
    let [(_, Some(finding))] = &reported(&acts)[..] else { panic!("{acts:?}") };
    assert_eq!((finding.kind, finding.ranks.in_full()), (Kind::NotEntered, "4".to_owned()), "its own rank is named");
}

#[test]
fn what_was_found_is_over_when_the_workers_move() {
    let mut stopped = view(4, false);
    stopped.state = State::Stopped;
    let (mut own, _) = stands_still(Options::default(), &[stopped, view(5, true)], 60);
    let now = Instant::now() + secs(60);
    own.on_pace(ROUND, PaceReport::Moved(Default::default()), now);
    assert!(matches!(&reported(&own.act(now).into_iter().map(|act| (0, act)).collect::<Vec<_>>())[..], [(0, None)]));
    assert_eq!(own.next_deadline(), None);
}

#[test]
fn all_ranks_that_are_stopped_are_reported_as_those_of_this_node() {
    let views = [4, 5].map(|rank| View { state: State::Stopped, ..view(rank, false) });
    let (_, acts) = stands_still(Options::default(), &views, 60);
    let [(_, Some(finding))] = &reported(&acts)[..] else { panic!("{acts:?}") };
    let lines = text::lines(finding, &Facts { ranks: 8, is_own: true, ..Facts::default() });
    let expected =
        "training is suspended: all 2 ranks of this node are stopped by a signal (state T); SIGCONT lets them go on";
    assert_eq!(lines, [expected]);
}

#[test]
fn workers_are_restarted_after_the_dumps_and_never_once_they_are_being_stopped() {
    let mut stopped = view(4, false);
    stopped.state = State::Stopped;
    let views = [stopped, view(5, true)];
    let options = Options { mode: Mode::Restart, ..Options::default() };
    let (_, acts) = stands_still(options, &views, 60);
    let [(reported_at, Act::Tell(_)), (at, Act::Restart { why, rank: Some(4) })] = &acts[..] else {
        panic!("{acts:?}")
    };
    assert_eq!((*at, why.as_str()), (reported_at + 1, "rank 4 was stopped by a signal (state T)"));

    let (mut own, acts) = stands_still(options, &views, *reported_at);
    assert!(matches!(&acts[..], [(_, Act::Tell(_))]), "{acts:?}");
    let now = Instant::now() + secs(60);
    own.on_round(None, now);
    assert_eq!((own.act(now), own.next_deadline()), (vec![], None), "its workers are being stopped");
}
