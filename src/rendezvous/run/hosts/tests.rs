use std::time::Duration;

use super::*;
use crate::hosts::Cooldown;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn host(number: u8) -> Origin {
    Origin::Peer([10, 0, 0, number].into())
}

fn settings(host_failures: u32, cooldown: Option<(u64, u64)>) -> Settings {
    let seconds = |(min, max)| Cooldown { min: Duration::from_secs(min), max: Duration::from_secs(max) };
    let rules = Rules { host_failures, cooldown: cooldown.map(seconds), ..Rules::default() };
    Settings { rules, ..Settings::new(1, 4) }
}

/// A test's hosts, with a clock.
struct Bench {
    hosts: Hosts,
    settings: Settings,
    now: Instant,
}

impl Bench {
    fn new(settings: Settings) -> Self {
        Self { hosts: Hosts::default(), settings, now: Instant::now() }
    }

    fn judge(&mut self, number: u8, rank: Option<u32>) -> Judged {
        self.hosts.judge(&host(number), rank, &self.settings, self.now)
    }

    /// The hosts that are let in because their time is over.
    fn released(&mut self) -> Vec<String> {
        let Consequence { records, changes } = self.hosts.release(self.now);
        assert_eq!(changes, !records.is_empty());
        let host = |(kind, _)| match kind {
            Kind::HostLetIn { host } => host,
            other => panic!("{other:?}"),
        };
        records.into_iter().map(host).collect()
    }

    /// How long a host is out now. `Some(None)`: for the job.
    fn out_for(&self, number: u8) -> Option<Option<Duration>> {
        Some(self.hosts.out_until(&host(number), self.now)?.map(|until| until - self.now))
    }
}

#[test]
fn a_host_is_out_for_the_job_after_as_many_first_failures_within_the_window() {
    let mut bench = Bench::new(settings(3, None));
    for (wait, expected) in
        [(0, Judged::Counted(1)), (3000, Judged::Counted(2)), (601, Judged::Counted(2)), (10, Judged::Out)]
    {
        bench.now += wait * SECOND;
        assert_eq!(bench.judge(1, Some(0)), expected);
    }
    assert_eq!((bench.out_for(1), bench.out_for(2)), (Some(None), None));
    bench.now += 1000 * HOUR;
    assert_eq!(bench.out_for(1), Some(None), "for the job");
    assert_eq!((bench.released(), bench.hosts.next_release()), (vec![], None));
    let (_, text) = bench.hosts.refusal(&host(1), &bench.settings, bench.now).unwrap();
    assert_eq!(
        text,
        "host 10.0.0.1 is out for the job: 3 rounds had their first failure there within 3600s (host_failures, \
         host_failures_window); look for a fault of the host, or raise host_failures"
    );
}

#[test]
fn without_a_limit_nothing_is_counted() {
    let mut bench = Bench::new(settings(0, None));
    for _ in 0..100 {
        assert_eq!(bench.judge(1, None), Judged::Ignored);
    }
    assert!(bench.hosts.is_blank());
}

#[test]
fn the_cool_down_doubles_up_to_its_maximum_and_a_day_takes_one_doubling_back() {
    let mut bench = Bench::new(settings(1, Some((10, 60))));
    for expected in [10, 20, 40, 60, 60] {
        assert_eq!(bench.judge(1, None), Judged::Out);
        assert_eq!(bench.out_for(1), Some(Some(expected * SECOND)));
        assert_eq!(bench.hosts.next_release(), Some(bench.now + expected * SECOND));
        bench.now += expected * SECOND;
        assert_eq!(bench.out_for(1), None, "its time is over");
        assert_eq!(bench.released(), ["10.0.0.1"]);
    }
    // Four times out led to the maximum, and the fifth does not count. Two days take two back.
    for (days, expected) in [(2, 40), (2, 20), (40, 10)] {
        bench.now += days * 24 * HOUR;
        assert_eq!(bench.judge(1, None), Judged::Out);
        assert_eq!(bench.out_for(1), Some(Some(expected * SECOND)), "after {days} days");
    }
}

#[test]
fn a_cool_down_after_several_failures_begins_with_the_last_of_them() {
    let mut bench = Bench::new(settings(2, Some((10, 100))));
    assert_eq!((bench.judge(1, None), bench.judge(1, None)), (Judged::Counted(1), Judged::Out));
    bench.now += 10 * SECOND;
    assert_eq!(bench.released(), ["10.0.0.1"]);
    assert_eq!((bench.judge(1, None), bench.out_for(1)), (Judged::Out, Some(Some(20 * SECOND))), "within the window");
}

#[test]
fn a_worker_that_fails_on_two_hosts_is_the_cause_and_they_are_let_in() {
    let mut bench = Bench::new(settings(1, None));
    assert_eq!(bench.judge(1, Some(3)), Judged::Out);
    assert_eq!(bench.judge(2, Some(3)), Judged::Worker { freed: vec![host(1)] });
    assert_eq!((bench.out_for(1), bench.out_for(2)), (None, None));
    bench.now += HOUR / 2;
    assert_eq!(bench.judge(3, Some(3)), Judged::Worker { freed: vec![] }, "it is known by now");
    assert_eq!(bench.judge(3, Some(4)), Judged::Out, "another worker");
    bench.now += HOUR;
    assert_eq!(bench.judge(1, Some(3)), Judged::Out, "long forgotten");
}

#[test]
fn a_host_with_other_failures_stays_out_when_a_worker_is_the_cause_of_one() {
    let mut bench = Bench::new(settings(2, None));
    for rank in [Some(3), Some(5), None] {
        bench.judge(1, rank);
    }
    assert_eq!(bench.judge(2, Some(5)), Judged::Worker { freed: vec![] });
    assert_eq!(bench.out_for(1), Some(None), "two others are enough");
    assert_eq!(bench.judge(2, Some(3)), Judged::Worker { freed: vec![host(1)] });
    assert_eq!(bench.out_for(1), None, "one is not");
}

#[test]
fn departures_keep_a_host_out_until_the_oldest_is_over() {
    let settings = Settings { rejoin_limit: 2, rejoin_window: 100 * SECOND, ..settings(0, None) };
    let mut bench = Bench::new(settings);
    for _ in 0..3 {
        bench.hosts.on_departure(&host(1), &bench.settings, bench.now);
        bench.now += 10 * SECOND;
    }
    let (_, text) = bench.hosts.refusal(&host(1), &bench.settings, bench.now).unwrap();
    assert_eq!(
        text,
        "host 10.0.0.1 is out for 80 s: nodes there left the running job 2 times within 100s (rejoin_limit, \
         rejoin_window); check why they exit, or raise rejoin_limit"
    );
    let exclusions = bench.hosts.exclusions(&bench.settings, bench.now);
    assert_eq!(exclusions.len(), 1);
    assert_eq!((exclusions[0].addr.as_str(), exclusions[0].out.until), ("10.0.0.1", Some(bench.now + 80 * SECOND)));
    bench.now += 80 * SECOND;
    assert_eq!(bench.hosts.refusal(&host(1), &bench.settings, bench.now), None);
    assert_eq!(bench.hosts.exclusions(&bench.settings, bench.now), []);
}

#[test]
fn only_so_many_hosts_are_remembered_and_the_quietest_is_forgotten_first() {
    let mut bench = Bench::new(settings(5, None));
    let origin = |number: u32| Origin::Peer(std::net::Ipv4Addr::from(number).into());
    for number in 0..MOST_HOSTS as u32 + 10 {
        bench.hosts.judge(&origin(number), None, &bench.settings, bench.now);
        bench.now += Duration::from_millis(1);
    }
    assert_eq!(bench.hosts.book.len(), MOST_HOSTS);
    assert!(bench.hosts.book.get(&origin(9)).is_none() && bench.hosts.book.get(&origin(10)).is_some());
    for rank in 0..MOST_BLAMED as u32 + 10 {
        bench.judge(1, Some(rank));
        bench.judge(2, Some(rank));
    }
    assert_eq!(bench.hosts.blamed.len(), MOST_BLAMED);
}

#[test]
fn an_exclusion_has_the_name_that_nodes_give_their_host() {
    let mut bench = Bench::new(settings(1, None));
    let origin = Origin::Host("node7".to_owned(), [10, 0, 0, 1].into());
    bench.hosts.judge(&origin, None, &bench.settings, bench.now);
    let exclusions = bench.hosts.exclusions(&bench.settings, bench.now);
    let [Exclusion { addr, name: Some(name), out }] = &exclusions[..] else { panic!("{exclusions:?}") };
    assert_eq!((addr.as_str(), name.as_str()), ("10.0.0.1", "node7"));
    assert_eq!(out.text(bench.now), "for the job: the first failure of a round was there (host_failures)");
    assert_eq!(bench.out_for(1), None, "another host behind the same address");
    let described = bench.hosts.describe(bench.now).unwrap();
    assert_eq!(described, "hosts that are out: node7 (10.0.0.1) for the job");
}

/// Hosts with falling addresses, so that the order of their ages is not the order of their keys.
#[test]
fn the_host_that_has_been_out_for_longest_is_forgotten_first() {
    let mut bench = Bench::new(settings(1, None));
    let host = |number: usize| Origin::Peer(std::net::Ipv4Addr::from(u32::MAX - number as u32).into());
    for number in 0..MOST_HOSTS + 2 {
        bench.now += SECOND / 1000;
        assert_eq!(bench.hosts.judge(&host(number), None, &bench.settings, bench.now), Judged::Out);
    }
    let out = |number| bench.hosts.out_until(&host(number), bench.now).is_some();
    assert_eq!([0, 1, 2, MOST_HOSTS, MOST_HOSTS + 1].map(out), [false, false, true, true, true]);
}

#[test]
fn the_worker_that_was_blamed_first_is_forgotten_first() {
    let mut bench = Bench::new(settings(9, None));
    let most = MOST_BLAMED as u32;
    for rank in (0..=most).rev() {
        bench.now += SECOND / 1000;
        bench.judge(1, Some(rank));
        assert!(matches!(bench.judge(2, Some(rank)), Judged::Worker { .. }));
    }
    assert!(matches!(bench.judge(3, Some(1)), Judged::Worker { .. }), "it was blamed just before the last one");
    assert!(matches!(bench.judge(3, Some(most)), Judged::Counted(_)), "it was blamed first");
}

#[test]
fn each_judgement_becomes_events_and_says_whether_the_waiting_nodes_are_judged_again() {
    let mut bench = Bench::new(settings(2, None));
    let mut fails = |number, rank| {
        let Consequence { records, changes } =
            bench.hosts.on_first_failure(&host(number), rank, &bench.settings, bench.now);
        (records.into_iter().map(|(_, text)| text).collect::<Vec<_>>(), changes)
    };
    let first = "host 10.0.0.1 has had 1 of 2 first failures (host_failures)";
    let out = "host 10.0.0.1 is out for the job: 2 rounds had their first failure there within 3600s (host_failures, \
               host_failures_window)";
    let worker = "rank 3 fails first on several hosts, so its failures count against none of them (host_failures)";
    let let_in = "host 10.0.0.1 is let in again";
    assert_eq!(fails(1, Some(3)), (vec![first.to_owned()], false));
    assert_eq!(fails(1, None), (vec![out.to_owned()], true));
    assert_eq!(fails(2, Some(3)), (vec![worker.to_owned(), let_in.to_owned()], true));
    assert_eq!(fails(2, Some(3)), (vec![worker.to_owned()], false));
}
