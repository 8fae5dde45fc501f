//! Cases at the edge: ties, circles, windows that do not overlap, rounds, groups whose members nobody has sent.

use super::scenes::{frame, rank, torch_frame};
use crate::hang::blame::blame;
use crate::hang::finding::{Finding, Kind};
use crate::hang::view::{Class, Frame, Gil, View};

fn named(finding: &Finding) -> Vec<u32> {
    finding.ranks.iter().collect()
}

fn who(views: &[View]) -> (Kind, Vec<u32>) {
    let finding = blame(views);
    (finding.kind, named(&finding))
}

#[test]
fn nobody_is_named_without_views() {
    assert_eq!(who(&[]), (Kind::Alike, vec![]));
}

#[test]
fn two_ranks_with_different_collectives_have_no_majority() {
    let broadcast = rank(1).enters("0", None, 9, 9, "broadcast");
    let finding = blame(&[rank(0).waits(9), broadcast]);
    assert_eq!((finding.kind, named(&finding), finding.tie), (Kind::Mismatch, vec![0, 1], true));
    assert_eq!(finding.collective.unwrap().seq, 9);
}

#[test]
fn of_two_largest_classes_none_is_right() {
    let with = |at: u32, op: &str| rank(at).enters("0", None, 9, 9, op);
    let views = [with(0, "a"), with(1, "a"), with(2, "b"), with(3, "b"), with(4, "c")];
    let finding = blame(&views);
    assert_eq!((finding.kind, named(&finding), finding.tie), (Kind::Mismatch, vec![0, 1, 2, 3, 4], true));
    let finding = blame(&[with(0, "a"), with(1, "a"), with(2, "b"), with(4, "c")]);
    assert_eq!((finding.kind, named(&finding), finding.tie), (Kind::Mismatch, vec![2, 4], false));
}

#[test]
fn a_mismatch_that_all_have_passed_explains_nothing() {
    let views = [rank(0).enters("0", None, 9, 10, "broadcast"), rank(1).passed(9)];
    assert_ne!(blame(&views).kind, Kind::Mismatch);
}

#[test]
fn windows_that_do_not_overlap_are_not_compared() {
    // Rank 1 has forgotten number 9, and rank 0 never came to 30.
    let views = [rank(0).enters("0", None, 9, 9, "broadcast"), rank(1).waits(30), rank(2).waits(30)];
    assert_eq!(who(&views), (Kind::NotEntered, vec![0]));
}

#[test]
fn views_of_an_earlier_round_are_dropped() {
    let mut old = rank(1).passed(3);
    old.round = 0;
    let mut views = vec![rank(0).waits(5), old];
    assert_eq!(who(&views), (Kind::Inside, vec![]));
    views[1].round = 1;
    assert_eq!(who(&views), (Kind::NotEntered, vec![1]));
}

#[test]
fn all_have_entered_a_collective_that_does_not_end() {
    let finding = blame(&[rank(0).waits(5), rank(1).waits(5), rank(2).passed(5)]);
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::Inside, vec![], false));
    assert_eq!(finding.collective.unwrap().signature.op, "all_reduce");
}

#[test]
fn of_several_roots_the_one_is_named_that_came_least_far() {
    let views = [rank(0).waits(9), rank(1).passed(8), rank(2).passed(7), rank(3).passed(8)];
    assert_eq!(who(&views), (Kind::NotEntered, vec![2]));
}

#[test]
fn roots_in_two_groups_are_both_named() {
    let pair = |view: View, name: &str, ranks: &[u32], last| view.enters(name, Some(ranks), last, last, "all_reduce");
    let views = [
        pair(rank(0), "1", &[0, 1], 9),
        rank(1).enters("1", Some(&[0, 1]), 8, 9, "all_reduce"),
        pair(rank(2), "2", &[2, 3], 5),
        rank(3).enters("2", Some(&[2, 3]), 4, 5, "all_reduce"),
    ];
    assert_eq!(who(&views), (Kind::NotEntered, vec![1, 3]));
}

#[test]
fn a_stopped_rank_comes_before_a_mismatch_and_an_ended_one_before_both() {
    let mut views =
        vec![rank(0).waits(9), rank(1).enters("0", None, 9, 9, "broadcast"), rank(2).waits(9), rank(3).stopped()];
    assert_eq!(who(&views), (Kind::Stopped, vec![3]));
    views.push(rank(4).ended(0));
    assert_eq!(who(&views), (Kind::Ended, vec![4]));
    views.truncate(3);
    assert_eq!(who(&views), (Kind::Mismatch, vec![1]));
    views.push(rank(3).silent(Gil::Held));
    assert_eq!(who(&views), (Kind::Mismatch, vec![1]), "a mismatch comes before silence");
}

#[test]
fn a_rank_that_does_not_answer_is_silent_or_holds_the_gil() {
    let mut views = vec![rank(0).waits(9), rank(1).silent(Gil::Unknown), rank(2).silent(Gil::Held)];
    assert_eq!(who(&views), (Kind::GilHeld, vec![2]));
    views.pop();
    assert_eq!(who(&views), (Kind::Silent, vec![1]));
}

#[test]
fn a_rank_whose_main_thread_has_ended_holds_the_others_up() {
    let mut raised = rank(1);
    raised.life = crate::hang::view::Life::MainThreadEnded { raised: true };
    let finding = blame(&[rank(0).waits(4), raised]);
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::Ended, vec![1], true));
}

#[test]
fn all_ranks_stopped_are_suspended() {
    assert_eq!(who(&[rank(0).stopped(), rank(1).stopped()]), (Kind::Suspended, vec![0, 1]));
}

#[test]
fn a_group_whose_members_nobody_sent_may_have_any_silent_rank() {
    let waits = |at: u32| rank(at).enters("7", None, 5, 5, "all_reduce");
    assert_eq!(who(&[waits(0), waits(1), rank(2).silent(Gil::Unknown), rank(3)]), (Kind::Silent, vec![2]));
    assert_eq!(who(&[waits(0), waits(1), rank(2), rank(3)]), (Kind::Inside, vec![]));
    let behind = rank(1).enters("7", None, 4, 5, "all_reduce");
    assert_eq!(who(&[waits(0), behind, rank(2).silent(Gil::Unknown)]), (Kind::NotEntered, vec![1]));
}

#[test]
fn members_that_most_have_sent_count() {
    let waits = |at: u32, members: &[u32]| rank(at).enters("7", Some(members), 5, 5, "all_reduce");
    let views = [waits(0, &[0, 1, 2, 9]), waits(1, &[0, 1, 2, 3]), waits(2, &[0, 1, 2, 3]), rank(3)];
    assert_eq!(who(&views), (Kind::NotEntered, vec![3]));
}

#[test]
fn ranks_that_wait_for_messages_of_one_another_are_a_circle() {
    let waits = |at: u32, peer: u32| rank(at).stands_in(torch_frame("recv", Some(peer)));
    let finding = blame(&[waits(0, 1), waits(1, 2), waits(2, 0), waits(3, 0)]);
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::Crossed, vec![0, 1, 2], true));
    assert_eq!(finding.chain.iter().map(|wait| (wait.rank, wait.on)).collect::<Vec<_>>(), [(0, 1), (1, 2), (2, 0)]);
    assert_eq!(finding.waiting.iter().collect::<Vec<_>>(), [3]);
    let finding = blame(&[waits(0, 1), waits(1, 2), rank(2)]);
    assert_eq!((finding.kind, named(&finding)), (Kind::NotEntered, vec![2]));
    assert_eq!(finding.chain.len(), 2, "rank 0 waits for rank 1, and that for rank 2");
}

#[test]
fn a_circle_with_a_rank_that_runs_is_not_certain() {
    let all: &[u32] = &[0, 1];
    let crossed = || {
        let zero = rank(0).enters("1", Some(all), 3, 3, "all_reduce").enters("2", Some(all), 2, 3, "all_reduce");
        let one = rank(1).enters("1", Some(all), 2, 3, "all_reduce").enters("2", Some(all), 3, 3, "all_reduce");
        [zero, one]
    };
    let finding = blame(&crossed());
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::Crossed, vec![0, 1], true));
    // It has begun a collective, and computes something else now.
    let mut views = crossed();
    views[1].class = Some(Class::Busy);
    let finding = blame(&views);
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::NotEntered, vec![1], false));
    views[0].class = Some(Class::Busy);
    let finding = blame(&views);
    assert_eq!((finding.kind, finding.certain), (Kind::Crossed, false), "NCCL's waits are busy");
}

#[test]
fn ranks_in_calls_that_are_not_recorded_are_named_last() {
    let sends = rank(1).stands_in(torch_frame("send", None));
    assert_eq!(who(&[rank(0).waits(9), sends.clone(), rank(2)]), (Kind::NotEntered, vec![2]));
    assert_eq!(who(&[rank(0).waits(9), sends]), (Kind::NotEntered, vec![1]));
}

#[test]
fn ranks_that_make_a_group_wait_for_all_that_do_not() {
    let makes = |at: u32| rank(at).stands_in(torch_frame("_new_group_with_tag", None));
    assert_eq!(who(&[makes(0), makes(1), rank(2)]), (Kind::NotEntered, vec![2]));
    assert_eq!(who(&[makes(0), makes(1), rank(2).stopped()]), (Kind::Stopped, vec![2]));
}

#[test]
fn silence_says_nothing_if_nobody_answers() {
    let mute = |at: u32| rank(at).silent(Gil::Unknown);
    let makes = |at: u32| mute(at).stands_in(torch_frame("new_group", None));
    assert_eq!(who(&[makes(0), makes(1), mute(2)]), (Kind::NotEntered, vec![2]));
    assert_eq!(who(&[makes(0), makes(1), rank(2)]), (Kind::NotEntered, vec![2]));
    assert_eq!(who(&[mute(0), mute(1)]), (Kind::Alike, vec![]));
}

#[test]
fn a_guess_names_the_line_at_which_fewest_stand() {
    let at = |of: u32, line: u32| View { frames: vec![frame("main", "/home/user/train.py", line)], ..rank(of) };
    let finding = blame(&[at(0, 1), at(1, 1), at(2, 7)]);
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::Odd, vec![2], false));
    assert_eq!(who(&[at(0, 1), at(1, 1)]), (Kind::Alike, vec![]));
    let inside = |of: u32| at(of, 5).stands_in(torch_frame("all_reduce", None));
    let finding = blame(&[inside(0), inside(1), rank(2).stopped()]);
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::Stopped, vec![2], true));
    let finding = blame(&[at(0, 1), at(1, 1), rank(2).stopped()]);
    assert_eq!((finding.kind, named(&finding), finding.certain), (Kind::Stopped, vec![2], false));
    assert_eq!(who(&[inside(0), inside(1), rank(2).ended(0)]), (Kind::Ended, vec![2]));
}

#[test]
fn of_a_large_world_the_first_ranks_are_described() {
    let mut views: Vec<_> = (0..40).map(|at| rank(at).passed(8)).collect();
    views[0] = rank(0).waits(9);
    let finding = blame(&views);
    assert_eq!((finding.kind, finding.ranks.len(), finding.places.len()), (Kind::NotEntered, 39, 8));
    let frame = finding.others.unwrap().frames.pop();
    assert_eq!(frame.map(|frame: Frame| frame.line), Some(41));
}

#[test]
fn a_collective_that_lacks_only_who_is_named_is_said_before_one_for_which_others_are_late_too() {
    // Before all of them reduce over the world, ranks 0 to 2 use their group for the first time, and rank 1 does not come.
    let waits = |at: u32| rank(at).passed(9).enters("5", Some(&[0, 1, 2]), 1, 1, "all_reduce");
    let finding = blame(&[waits(0), rank(1).passed(9), waits(2), rank(3).waits(10)]);
    assert_eq!((finding.kind, named(&finding)), (Kind::NotEntered, vec![1]));
    let of = finding.collective.unwrap();
    assert_eq!((of.group.as_str(), of.seq), ("5", 1));
}
