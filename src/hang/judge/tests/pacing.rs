//! When an agent says that its workers stand still.

use super::secs;
use crate::hang::judge::pace::{Change, Pace, Reached, SHORTEST, Still, UNKNOWN};
use std::time::Instant;

/// A step each so many seconds, looked at when it is due.
fn paced(start: Instant, step: f64, steps: u64) -> (Pace, Instant) {
    let mut pace = Pace::new(start);
    let end = start + secs(step * steps as f64);
    let mut now = start;
    while pace.next_look() < end {
        now = pace.next_look();
        let done = ((now - start).as_secs_f64() / step + 1e-6) as u64;
        let reached = (done > 0).then(|| Reached {
            steps: done,
            first_at: start + secs(step),
            at: start + secs(step * done as f64),
        });
        assert_eq!(pace.on_look(reached, now), None, "{:?}", now - start);
    }
    (pace, now)
}

#[test]
fn fast_steps_are_looked_at_every_two_seconds_and_slow_ones_every_three_steps() {
    let start = Instant::now();
    let (fast, _) = paced(start, 0.01, 3000);
    assert_eq!(fast.patience(), SHORTEST);
    assert!(fast.step_time().is_some_and(|time| time > secs(0.009) && time < secs(0.011)));
    let known = Reached { steps: 3, first_at: start + secs(90.0), at: start + secs(94.0) };
    let mut early = Pace::new(start);
    early.on_look(Some(known), start + secs(95.0));
    assert_eq!(early.step_time(), Some(secs(2.0)), "from the third step on");
    let (slow, _) = paced(start, 8.0, 30);
    assert!(slow.patience() > secs(23.0) && slow.patience() < secs(25.0), "{:?}", slow.patience());
}

#[test]
fn workers_that_make_no_step_stand_still_once_and_move_again() {
    let start = Instant::now();
    let (mut pace, _) = paced(start, 0.5, 40);
    let reached = Reached { steps: 40, first_at: start, at: start + secs(20.0) };
    assert_eq!(pace.on_look(Some(reached), start + secs(20.5)), None);
    let due = pace.next_look();
    assert_eq!(due, start + secs(22.0));
    let Some(Change::Still(Still { steps: 40, since, step_time: Some(time) })) = pace.on_look(Some(reached), due)
    else {
        panic!("it stands still")
    };
    assert_eq!((since, time), (start + secs(20.0), secs(0.5)));
    assert_eq!(pace.on_look(Some(reached), pace.next_look()), None, "said once");
    let next = Reached { steps: 41, first_at: start, at: start + secs(50.0) };
    assert_eq!(pace.on_look(Some(next), start + secs(51.0)), Some(Change::Moved(start + secs(50.0), secs(30.0))));
}

#[test]
fn a_training_that_stops_in_its_first_seconds_is_looked_at_soon() {
    let start = Instant::now();
    let mut pace = Pace::new(start);
    let reached = |steps, at| Some(Reached { steps, first_at: start + secs(5.0), at: start + secs(at) });
    assert_eq!(pace.on_look(reached(1, 5.0), start + secs(5.0)), None, "the first step wakes the agent");
    assert_eq!(pace.next_look(), start + secs(5.0) + SHORTEST);
    assert_eq!(pace.on_look(reached(7, 5.6), pace.next_look()), None);
    assert_eq!(pace.next_look(), start + secs(7.6));
    let still = pace.on_look(reached(7, 5.6), pace.next_look());
    assert!(matches!(still, Some(Change::Still(Still { steps: 7, step_time: Some(_), .. }))), "{still:?}");
}

#[test]
fn the_time_of_a_step_is_a_median() {
    let start = Instant::now();
    let mut pace = Pace::new(start);
    let mut at = start;
    for (steps, seconds) in [(1, 300.0), (2, 1.0), (3, 90.0), (4, 1.0), (5, 1.0)] {
        at += secs(seconds);
        pace.on_look(Some(Reached { steps, first_at: start + secs(300.0), at }), at);
    }
    assert_eq!(pace.step_time(), Some(secs(1.0)), "the first one, and one that stalled, do not count");
}

#[test]
fn nothing_is_known_before_the_first_steps() {
    let start = Instant::now();
    let mut pace = Pace::new(start);
    assert_eq!((pace.step_time(), pace.next_look()), (None, start + UNKNOWN));
    let still = Some(Change::Still(Still { steps: 0, since: start, step_time: None }));
    assert_eq!(pace.on_look(None, start + UNKNOWN), still);
    assert_eq!(pace.next_look(), start + 2 * UNKNOWN);
}

#[test]
fn a_line_of_the_log_is_progress() {
    let start = Instant::now();
    let mut pace = Pace::new(start);
    assert_eq!(pace.on_progress(start + secs(5.0)), None);
    assert_eq!(pace.next_look(), start + secs(15.0));
    assert!(pace.on_look(None, start + secs(15.0)).is_some());
    assert_eq!(pace.on_progress(start + secs(20.0)), Some(Change::Moved(start + secs(20.0), secs(15.0))));
    assert!(pace.on_look(None, start + secs(30.0)).is_some());
    assert_eq!(pace.on_progress(start + secs(20.0)), None, "an old one");
}

#[test]
fn steps_are_counted_beside_lines() {
    let start = Instant::now();
    let mut pace = Pace::new(start);
    for step in 1..=4 {
        let at = start + secs(step as f64);
        pace.on_progress(at + secs(0.1));
        let reached = Reached { steps: step, first_at: start + secs(1.0), at };
        assert_eq!(pace.on_look(Some(reached), at + secs(0.2)), None);
    }
    assert_eq!(pace.step_time(), Some(secs(1.0)));
    assert_eq!(pace.next_look(), start + secs(7.1), "from the last line on");
}

#[test]
fn a_step_that_was_noticed_late_is_followed_by_another_look_at_once() {
    let start = Instant::now();
    let (mut pace, _) = paced(start, 0.5, 40);
    let due = start + secs(22.0);
    pace.on_look(Some(Reached { steps: 40, first_at: start, at: start + secs(20.0) }), due);
    assert_eq!(pace.next_look(), start + secs(24.0));
    let next = Some(Reached { steps: 41, first_at: start, at: start + secs(22.0) });
    assert!(matches!(pace.on_look(next, start + secs(24.0)), Some(Change::Moved(..))));
    assert_eq!(pace.next_look(), start + secs(24.0), "two seconds are over already");
    assert!(matches!(pace.on_look(next, start + secs(24.0)), Some(Change::Still(_))));
    assert_eq!(pace.next_look(), start + secs(26.0));
}

#[test]
fn what_a_worker_writes_may_be_anything() {
    let start = Instant::now();
    let mut pace = Pace::new(start);
    let late = start + secs(9.0);
    pace.on_look(Some(Reached { steps: 9, first_at: start, at: late }), late);
    for reached in
        [Reached { steps: 3, first_at: start, at: late }, Reached { steps: u64::MAX, first_at: start, at: start }]
    {
        assert_eq!(pace.on_look(Some(reached), late), None);
    }
    assert_eq!(pace.step_time(), Some(secs(9.0) / 8));
}
