//! The faults of a history: how many there are, and when each begins and ends.

use std::time::Duration;

use super::super::engine::dice::Dice;
use super::super::engine::queue::Time;
use super::{Cluster, Event, Health, Job, Script};

impl Cluster {
    pub(super) fn draw(dice: &mut Dice) -> Self {
        let mut draw = |most| dice.between(0, most);
        Self {
            hosts: 1 + draw(11),
            minutes: 1 + draw(9),
            losses: draw(12),
            flaps: draw(12),
            refusals: draw(4),
            hangs: draw(4),
            script_faults: draw(4),
            exclusions: draw(3),
        }
    }
}

impl Job {
    /// Adds the faults, and gives the time at which the last one has passed.
    pub(super) fn plan(&mut self) -> Time {
        let cluster = self.report.cluster.clone();
        let end = Duration::from_secs(60 * cluster.minutes);
        let hosts = cluster.hosts;
        let mut add = |count: u64, longest: u64, make: &mut dyn FnMut(&mut Dice) -> (Event, Option<Event>)| {
            for _ in 0..count {
                let at = self.engine.dice.duration((Duration::from_secs(5), end));
                let (event, undo) = make(&mut self.engine.dice);
                let lasts = self.engine.dice.duration((Duration::from_millis(1), Duration::from_secs(longest)));
                self.engine.push(at, event);
                if let Some(undo) = undo {
                    self.engine.push((at + lasts).min(end), undo);
                }
            }
        };
        let pick = |dice: &mut Dice| dice.between(0, hosts - 1);
        add(cluster.losses, 1, &mut |dice| (Event::Lose(pick(dice)), None));
        add(cluster.flaps, 60, &mut |dice| {
            let (host, gone) = (pick(dice), dice.chance(70));
            let slots = dice.between(1, 8) as u32;
            (Event::List(host, !gone, slots), Some(Event::List(host, true, slots)))
        });
        for (count, health) in [(cluster.refusals, Health::Refuses), (cluster.hangs, Health::Hangs)] {
            add(count, 120, &mut |dice| {
                let host = pick(dice);
                (Event::Set(host, health), Some(Event::Set(host, Health::Good)))
            });
        }
        add(cluster.script_faults, 60, &mut |dice| {
            let fault = [Script::Fails, Script::Hangs, Script::Empty][dice.between(0, 2) as usize];
            (Event::Script(fault), Some(Event::Script(Script::Good)))
        });
        add(cluster.exclusions, 60, &mut |dice| {
            let (host, seconds) = (pick(dice), dice.between(1, 50));
            (Event::Exclude(host, Some(Duration::from_secs(seconds))), Some(Event::Exclude(host, None)))
        });
        end + Duration::from_secs(1)
    }

    pub(super) fn calm(&mut self) {
        self.script = Script::Good;
        self.hosts.iter_mut().for_each(|host| (host.health, host.listed) = (Health::Good, true));
    }
}
