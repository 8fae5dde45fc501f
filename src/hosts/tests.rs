use super::why::NAMED;
use super::*;

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const HOUR: Duration = s(3600);
const COOLDOWN: Option<Cooldown> = Some(Cooldown { min: s(10), max: s(60) });

fn failed(count: usize) -> WhyUnused {
    WhyUnused::FailedFirst { count, window: HOUR }
}

fn ssh() -> String {
    "ssh cannot connect: Connection refused".to_owned()
}

/// Each reason, until when it holds in seconds, its name, its text, how long it lasts, and how the advice begins.
#[test]
fn each_reason_has_one_text_an_end_and_an_advice() {
    let now = Instant::now();
    let table = [
        (
            failed(1),
            None,
            "failed_first",
            "the first failure of a round was there (host_failures)",
            "for the job",
            "look",
        ),
        (
            failed(3),
            Some(80),
            "failed_first",
            "3 rounds had their first failure there within 3600s (host_failures, host_failures_window)",
            "for 80 s",
            "look for a fault",
        ),
        (
            WhyUnused::LeftOften { count: 2, window: s(600) },
            Some(594),
            "left_often",
            "nodes there left the running job 2 times within 600s (rejoin_limit, rejoin_window)",
            "for 594 s",
            "check why they exit",
        ),
        (
            WhyUnused::AgentsFailed { count: 1, last: ssh() },
            Some(10),
            "agents_failed",
            "ssh cannot connect: Connection refused",
            "for 10 s",
            "mend it until then",
        ),
        (
            WhyUnused::AgentsFailed { count: 3, last: ssh() },
            None,
            "agents_failed",
            "ssh cannot connect: Connection refused; its agents failed 3 times (--host-failures)",
            "for the job",
            "mend it for the next job",
        ),
        (
            WhyUnused::Blacklisted,
            None,
            "blacklisted",
            "a program has put it out (HostManager.blacklist)",
            "for the job",
            "look",
        ),
        (
            WhyUnused::NotListed,
            None,
            "not_listed",
            "discovery does not list it any longer",
            "until discovery lists it",
            "nothing if you took it away",
        ),
        (
            WhyUnused::Retried { last: ssh() },
            Some(2),
            "retried",
            "ssh cannot connect: Connection refused",
            "for 2 s",
            "mend",
        ),
        (
            WhyUnused::Leaving,
            None,
            "leaving",
            "its last agent was asked to leave, and has not ended",
            "until its agent has ended",
            "wait",
        ),
        (
            WhyUnused::Starting { last: None },
            Some(30),
            "starting",
            "its agent is being started (--start-timeout)",
            "for 30 s",
            "wait, or look at",
        ),
        (
            WhyUnused::Starting { last: Some(ssh()) },
            Some(30),
            "starting",
            "its agent is being started again (--start-timeout), after this: ssh cannot connect: Connection refused",
            "for 30 s",
            "wait, or look at",
        ),
    ];
    for (why, ends_s, name, text, how_long, advice) in table {
        let until = ends_s.map(|ends_s| now + s(ends_s));
        let unused = Unused { why, until };
        let said = (unused.why.name(), unused.why.text(), unused.how_long(now));
        assert_eq!(said, (name, text.to_owned(), how_long.to_owned()));
        assert_eq!(unused.text(now), format!("{how_long}: {text}"));
        assert!(unused.advice().starts_with(advice), "{unused:?}: {}", unused.advice());
        assert!(unused.holds(now));
        match until {
            Some(until) => assert!(unused.holds(until - s(1)) && !unused.holds(until), "{unused:?} ends"),
            None => assert!(unused.holds(now + 10_000 * HOUR), "{unused:?} does not end by itself"),
        }
    }
}

#[test]
fn few_seconds_have_a_digit_after_the_point() {
    let now = Instant::now();
    for (ms, text) in [(80_000, "80 s"), (79_960, "80 s"), (9_940, "9.9 s"), (2_000, "2 s"), (40, "0 s")] {
        let unused = Unused { why: failed(1), until: Some(now + Duration::from_millis(ms)) };
        assert_eq!(unused.how_long(now), format!("for {text}"));
    }
}

#[test]
fn failures_within_the_window_are_counted_and_only_so_many_remembered() {
    let (began, mut host) = (Instant::now(), Standing::default());
    assert_eq!(host.quiet(began), Duration::MAX);
    for (at_s, rank, count) in
        [(0, Some(1), 1), (3000, None, 2), (3601, Some(2), 2), (3602, Some(1), 3), (3603, None, 3)]
    {
        let now = began + s(at_s);
        host.fail(rank, 3, now);
        assert_eq!(host.failed_within(HOUR, now), count, "after {at_s} s");
    }
    let now = began + s(3700);
    assert_eq!(host.quiet(now), s(97));
    assert!(host.has_failed(1, HOUR, now) && !host.has_failed(3, HOUR, now) && !host.has_failed(1, s(10), now));
    assert!(host.acquit(2) && !host.acquit(2));
    assert_eq!(host.failed_within(HOUR, now), 2);
    host.forget_failures();
    assert_eq!(host.failed_within(HOUR, now), 0);
}

#[test]
fn a_host_is_out_for_a_while_with_a_cool_down_and_for_the_job_without() {
    let (began, mut host) = (Instant::now(), Standing::default());
    assert_eq!(host.put_out(failed(1), Duration::MAX, COOLDOWN, began).until, Some(began + s(10)));
    assert_eq!(host.out(began + s(9)).map(|out| &out.why), Some(&failed(1)));
    assert_eq!(host.out(began + s(10)), None, "its time is over");
    assert_eq!((host.since_out(began + s(11)), host.put_out_at_all().is_some()), (s(11), true));
    assert_eq!(host.put_out(failed(1), s(11), COOLDOWN, began + s(11)).until, Some(began + s(31)), "twice as long");
    assert!(host.absolve() && !host.absolve() && host.out(began + s(12)).is_none());
    assert_eq!(host.put_out(failed(1), s(1), COOLDOWN, began + s(12)).until, Some(began + s(32)), "one was taken back");
    assert!(host.let_in() && !host.let_in());
    assert_eq!(host.put_out(failed(1), s(1), None, began).until, None);
    assert!(host.out(began + 10_000 * HOUR).is_some(), "for the job");
}

#[test]
fn nodes_that_left_often_keep_their_host_out_until_the_oldest_is_over() {
    let (began, mut host) = (Instant::now(), Standing::default());
    for (at_s, until_s) in [(0, None), (10, Some(100)), (20, Some(110)), (115, None)] {
        let now = began + s(at_s);
        if at_s < 100 {
            host.depart(2, now);
        }
        let out = host.left_often(2, s(100), now);
        assert_eq!(out.map(|out| out.until), until_s.map(|until_s| Some(began + s(until_s))), "after {at_s} s");
        assert_eq!(host.left_often(0, s(100), now), None, "without a limit");
    }
    assert_eq!(host.departures().len(), 2);
}

/// What a host is through before it is used again: the reason that lasts longest comes first.
#[test]
fn of_several_reasons_the_one_that_lasts_is_given() {
    let (now, mut host) = (Instant::now(), Standing::default());
    let name = |host: &Standing, now| host.unused(now).map(|unused| unused.why.name());
    assert_eq!(name(&host, now), None);
    host.retry(&ssh(), Some(now + s(60)));
    assert_eq!((name(&host, now), host.last()), (Some("retried"), Some(&*ssh())));
    assert_eq!(name(&host, now + s(60)), None, "it is tried then");
    host.list(Some(now));
    assert_eq!(name(&host, now), Some("not_listed"));
    host.put_out(failed(1), Duration::MAX, COOLDOWN, now);
    assert_eq!(name(&host, now), Some("failed_first"));
    assert_eq!(name(&host, now + s(10)), Some("not_listed"));
    host.list(None);
    assert_eq!((name(&host, now + s(10)), host.retry_at()), (None, None), "a host that was out is tried at once");
    host.retry(&ssh(), Some(now + s(60)));
    host.tried();
    assert_eq!((name(&host, now + s(10)), host.last()), (None, Some(&*ssh())), "why it failed before");
    host.recovered();
    assert_eq!(host.last(), None);
}

#[test]
fn what_is_over_does_not_matter() {
    let (now, day) = (Instant::now(), 24 * HOUR);
    let matters = |change: fn(&mut Standing, Instant), after: Duration| {
        let mut host = Standing::default();
        change(&mut host, now);
        host.matters(s(600), HOUR, now + after)
    };
    for (change, lasts) in [
        ((|host, now| host.depart(1, now)) as fn(&mut Standing, Instant), s(600)),
        (|host, now| host.fail(None, 1, now), HOUR),
        (
            |host, now| {
                host.fail(None, 1, now);
                host.put_out(failed(1), Duration::MAX, COOLDOWN, now);
                host.let_in();
            },
            day,
        ),
    ] {
        assert!(matters(change, lasts - s(1)) && !matters(change, lasts), "{lasts:?}");
    }
    let out: fn(&mut Standing, Instant) = |host, now| _ = host.put_out(failed(1), Duration::MAX, None, now);
    assert!(matters(out, 1000 * day));
}

/// One host of each kind, of which one is forgotten after the other when there is no room.
#[test]
fn hosts_that_are_out_or_wait_are_forgotten_last() {
    let now = Instant::now();
    let mut book = Book::default();
    let mut add = |name: &str| {
        book.standing(&name.to_owned(), 5, |name| name == "listed", now).fail(None, 1, now);
        book.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>().join(" ")
    };
    add("listed");
    add("out");
    add("waits");
    add("early");
    add("late");
    book.get_mut("out").unwrap().put_out(failed(1), Duration::MAX, None, now);
    book.get_mut("waits").unwrap().retry(&ssh(), Some(now + s(60)));
    book.get_mut("late").unwrap().fail(None, 1, now + s(1));
    let mut add = |name: &str, at_s| {
        let now = now + s(at_s);
        book.standing(&name.to_owned(), 5, |name| name == "listed", now).fail(None, 1, now);
        book.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(add("a", 2), "a late listed out waits");
    assert_eq!(add("b", 3), "a b listed out waits");
    assert_eq!(add("c", 4), "b c listed out waits");
    assert_eq!(add("b", 5), "b c listed out waits", "it is known");
    assert_eq!(add("d", 70), "b c d listed out", "the wait is over, and nothing has happened there for longest");
    assert_eq!(add("e", 71), "b d e listed out", "to `c` nothing has happened for longer than to `b`");
    assert_eq!(book.len(), 5);
}

#[test]
fn the_most_urgent_hosts_are_named_and_the_others_counted() {
    let now = Instant::now();
    let unused = |why, until| Unused { why, until };
    let of = |count: usize, kind: &'static str, one: Unused| {
        (0..count).map(move |number| (format!("{kind}{number}"), one.clone()))
    };
    let starting = of(20, "starting", unused(WhyUnused::Starting { last: None }, Some(now + s(30))));
    let gone = of(3, "gone", unused(WhyUnused::NotListed, None));
    let waits = of(2, "waits", unused(WhyUnused::Retried { last: ssh() }, Some(now + s(5))));
    let driver: UnusedHosts = starting.chain(gone).chain(waits).collect();
    assert_eq!(driver.more(), 25 - NAMED);
    let run: UnusedHosts = of(2, "out", unused(failed(1), None)).collect();
    let both = run.and(driver);
    assert_eq!(both.more(), 27 - NAMED);
    let names: Vec<_> = both.shown(now).into_iter().map(|host| host.host).collect();
    assert_eq!(names[..8], ["out0", "out1", "waits0", "waits1", "gone0", "gone1", "gone2", "starting0"]);
    assert_eq!(both.shown(now + s(5)).len(), NAMED - 2, "the time of two is over");
    let text = both.text(now);
    assert!(
        text.starts_with("`out0` for the job: the first failure of a round was there (host_failures); `out1`"),
        "{text}"
    );
    assert!(text.ends_with("; and 11 more"), "{text}");
    assert!(UnusedHosts::default().is_empty() && UnusedHosts::default().text(now).is_empty());
}

/// Texts of scripts, of `ssh` and of peers.
#[test]
fn observers_get_short_texts_that_steer_no_terminal() {
    let now = Instant::now();
    let last = format!("\x1b[2J\u{202e}{}", "ä\"".repeat(5000));
    let hosts: UnusedHosts =
        [(format!("a\n{}", "b".repeat(500)), Unused { why: WhyUnused::Retried { last }, until: Some(now + s(2)) })]
            .into_iter()
            .collect();
    let [host] = &hosts.shown(now)[..] else { panic!("{hosts:?}") };
    assert!(host.host.starts_with("a bb") && host.host.len() <= 96, "{host:?}");
    assert!(host.why.starts_with(" [2J ä\"") && host.why.len() <= 400 && host.why.ends_with('…'), "{host:?}");
    assert_eq!((host.left_ms, host.reason), (Some(2000), "retried"));
}
