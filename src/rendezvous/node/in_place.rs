//! A node's part in changes in place: its workers stop at a check that all members receive, and live on. Part of [`super`].
//!
//! What the agent has reported is repeated on each new connection, until the round is over for this node. A restarted coordinator knows
//! nothing of a change. It learns from the counts that workers wait for a check, and goes on with the change. A node that knows the check
//! names the count before it, so that the same check is chosen again.

use std::time::{Duration, Instant};

use crate::rendezvous::messages::message::{LARGEST_COUNT, NEVER, NodeMessage, Round, Running};
use crate::wire::text::tidy;
use crate::wire::time::millis;

/// Time within which the coordinator must name the check, as workers wait for it. The coordinator gives the members half of it to count.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// A node's part in changes in place, in its current round.
#[derive(Clone, Debug, Default)]
pub(super) struct InPlace {
    current: Option<Current>,
    /// Until when the coordinator must have named the check, and be in reach.
    answer_by: Option<Instant>,
    /// The node is about to leave: why, and by which signal.
    leaving: Option<(String, Option<i32>)>,
    /// Its machine is taken away then: who says so.
    notice: Option<(Instant, String)>,
    /// Its workers have stopped for that.
    parked: bool,
    /// Its workers save at the check, which takes longer.
    saves: bool,
    /// The world that ran when this node was welcomed, if its workers may be started before it joins.
    running: Option<Running>,
}

/// The current change.
#[derive(Clone, Debug)]
struct Current {
    round: Round,
    /// How far the workers are, as the agent has reported.
    counted: Option<u64>,
    /// The check at which the workers stop. [`NEVER`]: they go on.
    check: Option<u64>,
}

impl InPlace {
    /// A coordinator has welcomed this node while this world runs.
    pub fn on_welcome(&mut self, running: Option<Running>) {
        self.running = running;
    }

    /// The world for which this node may start its workers before it joins.
    pub fn running(&self) -> Option<&Running> {
        self.running.as_ref()
    }

    /// The check at which the workers stop, once it is known.
    pub fn check(&self) -> Option<u64> {
        self.current.as_ref()?.check
    }

    /// Whether workers wait for the coordinator to name the check.
    pub fn awaits_check(&self) -> bool {
        self.current.as_ref().is_some_and(|change| change.check.is_none())
    }

    /// The world of `round` changes. Returns whether the agent has to see it: it has not seen it before.
    pub fn on_change(&mut self, round: Round, now: Instant) -> bool {
        let goes_on = |change: &Current| change.round == round && change.check != Some(NEVER);
        let new = !self.current.as_ref().is_some_and(goes_on);
        if new {
            self.answer_by = Some(now + ANSWER_WITHIN);
            self.current = Some(Current { round, counted: None, check: None });
        }
        new
    }

    /// The workers have passed this many checks. Returns the message about it.
    pub fn on_counted(&mut self, round: Round, count: u64) -> Option<NodeMessage> {
        let change = self.current.as_mut().filter(|change| change.check.is_none())?;
        let count = count.min(LARGEST_COUNT);
        change.counted = Some(count);
        Some(NodeMessage::Counted { round, count })
    }

    /// The coordinator has named the check. Returns it, if it is new.
    ///
    /// # Errors
    /// The workers cannot stop there: why.
    pub fn on_raise_at(&mut self, round: Round, check: u64) -> Result<Option<(Round, u64)>, String> {
        let Some(change) = self.current.as_mut().filter(|change| change.round == round) else { return Ok(None) };
        if change.check == Some(check) {
            return Ok(None);
        }
        if change.check.is_some() || change.counted.is_some_and(|count| check <= count) {
            return Err(format!("the workers cannot stop at check {check}, which they may have passed"));
        }
        change.check = Some(check);
        if check == NEVER {
            self.answer_by = None;
        }
        Ok(Some((round, check)))
    }

    /// This node is about to leave. Returns the message about it.
    pub fn on_leaving(&mut self, round: Round, reason: &str, signal: Option<i32>) -> NodeMessage {
        let reason = tidy(reason);
        self.leaving = Some((reason.clone(), signal));
        NodeMessage::WillLeave { round, reason, signal }
    }

    /// The workers have stopped at the check, and this node leaves. Returns the message about it, unless it has announced no departure.
    pub fn on_parked(&mut self, round: Round) -> Option<NodeMessage> {
        let leaves = (self.leaving.is_some() || self.notice.is_some()) && self.check().is_some();
        self.parked |= leaves;
        leaves.then_some(NodeMessage::Parked { round })
    }

    /// This node's machine is taken away. Returns the message about it.
    pub fn on_notice(&mut self, round: Round, left: Duration, reason: &str, now: Instant) -> NodeMessage {
        let reason = tidy(reason);
        self.notice = Some((now + left, reason.clone()));
        notice(round, left, reason)
    }

    /// The workers save at the check. Returns the message about it.
    pub fn on_saves(&mut self, round: Round) -> NodeMessage {
        self.saves = true;
        NodeMessage::Saves { round }
    }

    /// What a coordinator may not have received, for a new connection.
    pub fn repeated(&self, round: Round, now: Instant) -> Vec<NodeMessage> {
        let count = self.current.as_ref().and_then(|change| match change.check {
            None => change.counted,
            Some(NEVER) => None,
            Some(check) => Some(check.saturating_sub(1).min(LARGEST_COUNT)),
        });
        let counted = count.map(|count| NodeMessage::Counted { round, count });
        let leaving = self.leaving.clone().map(|(reason, signal)| NodeMessage::WillLeave { round, reason, signal });
        let noticed = self.notice.clone();
        let noticed = noticed.map(|(at, reason)| notice(round, at.saturating_duration_since(now), reason));
        let parked = self.parked.then_some(NodeMessage::Parked { round });
        let saves = self.saves.then_some(NodeMessage::Saves { round });
        [saves, counted, leaving, noticed, parked].into_iter().flatten().collect()
    }

    /// When the change is broken off here, unless the coordinator answers.
    pub fn answer_by(&self) -> Option<Instant> {
        self.answer_by
    }

    /// Whether the change has to be broken off: the coordinator has not named the check in time. If it has, but is out of reach since, it
    /// may not have sent it to all members.
    pub fn is_overdue(&mut self, out_of_reach: bool, now: Instant) -> bool {
        if self.answer_by.is_none_or(|at| now < at) {
            return false;
        }
        self.answer_by = None;
        // Whoever saves has time, and the others wait.
        self.awaits_check() || (out_of_reach && !self.saves)
    }

    /// The round is over for this node, or its workers cannot stop together any more.
    pub fn end(&mut self) {
        *self = Self { running: self.running.take(), ..Self::default() };
    }

    /// The job is over. Returns the check that lets waiting workers go on.
    pub fn let_workers_go_on(&mut self) -> Option<(Round, u64)> {
        self.answer_by = None;
        let change = self.current.as_mut().filter(|change| change.check.is_none())?;
        change.check = Some(NEVER);
        Some((change.round, NEVER))
    }
}

fn notice(round: Round, left: Duration, reason: String) -> NodeMessage {
    NodeMessage::Notice { round, left_ms: millis(left), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: Round = Round(3);

    fn counted(count: u64) -> NodeMessage {
        NodeMessage::Counted { round: ROUND, count }
    }

    fn changing(now: Instant) -> InPlace {
        let mut part = InPlace::default();
        assert!(part.on_change(ROUND, now));
        part
    }

    #[test]
    fn a_change_is_seen_once_unless_the_workers_were_let_go() {
        let now = Instant::now();
        let mut part = changing(now);
        assert!(!part.on_change(ROUND, now) && part.on_change(Round(4), now) && part.on_change(ROUND, now));
        assert_eq!(part.on_raise_at(ROUND, NEVER), Ok(Some((ROUND, NEVER))));
        assert!(part.on_change(ROUND, now));
        assert_eq!((part.check(), part.answer_by()), (None, Some(now + ANSWER_WITHIN)));
    }

    #[test]
    fn a_check_counts_if_no_worker_may_have_passed_it() {
        for (count, check, expected) in [
            (None, 1, Ok(Some((ROUND, 1)))),
            (Some(4), 5, Ok(Some((ROUND, 5)))),
            (Some(5), 5, Err("the workers cannot stop at check 5, which they may have passed".to_owned())),
            (Some(5), NEVER, Ok(Some((ROUND, NEVER)))),
        ] {
            let mut part = changing(Instant::now());
            assert_eq!(count.and_then(|count| part.on_counted(ROUND, count)), count.map(counted));
            assert_eq!(part.on_raise_at(ROUND, check), expected, "{count:?}");
        }
        let mut part = changing(Instant::now());
        assert_eq!(part.on_raise_at(Round(2), 7), Ok(None));
        assert_eq!([part.on_raise_at(ROUND, 7), part.on_raise_at(ROUND, 7)], [Ok(Some((ROUND, 7))), Ok(None)]);
        assert!(part.on_raise_at(ROUND, 8).is_err() && part.on_counted(ROUND, 7).is_none());
    }

    #[test]
    fn a_new_connection_begins_with_what_may_be_lost() {
        let leaves = NodeMessage::WillLeave { round: ROUND, reason: "SIGTERM".into(), signal: Some(15) };
        let now = Instant::now();
        let mut part = changing(now);
        assert_eq!(part.repeated(ROUND, now), []);
        part.on_counted(ROUND, LARGEST_COUNT + 1);
        assert_eq!(part.repeated(ROUND, now), [counted(LARGEST_COUNT)]);
        assert_eq!((part.on_parked(ROUND), part.on_leaving(ROUND, "SIGTERM", Some(15))), (None, leaves.clone()));
        let mut part = changing(Instant::now());
        part.on_leaving(ROUND, "SIGTERM", Some(15));
        part.on_raise_at(ROUND, 9).unwrap();
        assert_eq!(part.repeated(ROUND, now), [counted(8), leaves.clone()]);
        assert_eq!(part.on_parked(ROUND), Some(NodeMessage::Parked { round: ROUND }));
        assert_eq!(part.repeated(ROUND, now), [counted(8), leaves, NodeMessage::Parked { round: ROUND }]);
        assert_eq!(part.on_saves(ROUND), NodeMessage::Saves { round: ROUND });
        assert_eq!(part.repeated(ROUND, now)[0], NodeMessage::Saves { round: ROUND });
        part.end();
        assert_eq!((part.repeated(ROUND, now), part.check(), part.answer_by()), (Vec::new(), None, None));
    }

    #[test]
    fn a_change_without_an_answer_is_overdue_once() {
        let begin = Instant::now();
        let late = begin + ANSWER_WITHIN;
        for (check, out_of_reach, overdue) in
            [(None, false, true), (Some(4), false, false), (Some(4), true, true), (Some(NEVER), true, false)]
        {
            let mut part = changing(begin);
            check.iter().for_each(|check| _ = part.on_raise_at(ROUND, *check));
            assert!(!part.is_overdue(out_of_reach, late - Duration::from_millis(1)));
            let mut saves = part.clone();
            saves.on_saves(ROUND);
            let found = [part.is_overdue(out_of_reach, late), part.is_overdue(out_of_reach, late)];
            assert_eq!(found, [overdue, false], "{check:?}");
            assert_eq!(saves.is_overdue(out_of_reach, late), check.is_none(), "whoever saves is not disturbed");
        }
    }

    #[test]
    fn workers_that_wait_for_a_check_go_on_when_the_job_is_over() {
        let mut part = changing(Instant::now());
        assert_eq!(part.let_workers_go_on(), Some((ROUND, NEVER)));
        assert_eq!((part.let_workers_go_on(), part.answer_by(), part.awaits_check()), (None, None, false));
        assert_eq!(InPlace::default().let_workers_go_on(), None);
    }
}
