use super::*;
use crate::discovery::hosts::parse_list;
use crate::discovery::manager::MOST_GONE;

mod bench;
mod detached;
mod unused;

use bench::{Bench, rules, s, send, started};

/// The coordinator keeps a host out until then.
fn kept_out(until: Option<Instant>) -> Unused {
    Unused { why: WhyUnused::FailedFirst { count: 3, window: s(3600) }, until }
}

#[test]
fn every_host_gets_one_agent_and_its_age() {
    let mut bench = Bench::new(rules(2, false));
    bench.driver.on_found(&parse_list("b:2,a:4", 1).unwrap(), bench.now);
    let ages: Vec<_> = bench.commands();
    let expected = [("b", 2, 0), ("a", 4, 1)].map(|(name, slots, age)| Command::Start {
        agent: AgentId(age),
        host: Host { name: name.to_owned(), slots },
        age,
        hosts_coordinator: false,
    });
    assert_eq!(ages, expected);
    bench.driver.on_found(&parse_list("a:4,b:2", 1).unwrap(), bench.now);
    assert_eq!(bench.commands(), [], "the same list changes nothing");
    assert_eq!(bench.found("a:4,b:2,c:1"), [AgentId(2)]);
}

#[test]
fn a_host_that_vanishes_has_its_agent_leave_and_is_killed_after_the_grace() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    assert_eq!(bench.found("a:2"), []);
    bench.pass(s(39));
    assert_eq!(bench.commands(), []);
    bench.pass(s(1));
    assert_eq!(bench.commands(), [Command::Kill { agent: agents[1] }]);
    bench.ended(agents[1], 255, None, &[]);
    assert_eq!(bench.commands(), [], "nobody is started on a host that is not in the list");
    assert!(bench.has_logged("the agent on b:2 has left"));
    assert_eq!(bench.found("a:2,b:2").len(), 1, "a host that is back is used again");
}

#[test]
fn a_host_that_comes_back_while_its_agent_leaves_gets_the_next_one_after_that() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    bench.driver.on_found(&parse_list("a:2", 1).unwrap(), bench.now);
    assert_eq!(bench.commands(), [send(agents[1], Request::Leave)]);
    assert_eq!(bench.found("a:2,b:2"), []);
    bench.ended(agents[1], 143, Some("signal"), &[]);
    assert_eq!(bench.commands().iter().filter_map(started).count(), 1);
}

#[test]
fn a_host_with_other_slots_gets_another_agent() {
    let (mut bench, agents) = Bench::with(1, "a:2");
    bench.driver.on_found(&parse_list("a:4", 1).unwrap(), bench.now);
    assert_eq!(bench.commands(), [send(agents[0], Request::Leave)]);
    bench.ended(agents[0], 143, Some("signal"), &[]);
    let [Command::Start { host, .. }] = &bench.commands()[..] else { panic!("not started") };
    assert_eq!(host.slots, 4);
}

#[test]
fn discovery_that_fails_at_its_first_call_ends_the_job_and_later_changes_nothing() {
    let mut bench = Bench::new(rules(1, false));
    bench.driver.on_discovery_failed("exit code 1", bench.now);
    let reason = "host discovery failed at its first call: exit code 1".to_owned();
    assert_eq!(bench.end(), Some((Verdict::GivenUp, reason)));

    let (mut bench, agents) = Bench::with(1, "a:2");
    for _ in 0..3 {
        bench.driver.on_discovery_failed("line 1 is `junk here`", bench.now);
    }
    assert_eq!(bench.driver.agents().map(|(id, ..)| id).collect::<Vec<_>>(), agents);
    assert_eq!(bench.stays(), 1, "{:?}", bench.logged);
    assert_eq!(bench.found("a:2"), []);
    assert!(bench.has_logged("works again"));
    assert_eq!(bench.found(""), [], "an empty list is a failure too");
    assert_eq!(bench.stays(), 2, "{:?}", bench.logged);
}

/// The text is of a script, or of whoever answers it.
#[test]
fn a_failed_discovery_steers_no_terminal() {
    let steering = "exit code 1: \x1b]0;title\x07\x1b[2J\u{202e}now\r\nhost `b` is out";
    let mut bench = Bench::new(rules(1, false));
    bench.driver.on_discovery_failed(steering, bench.now);
    let plain = "exit code 1:  ]0;title  [2J now  host `b` is out";
    assert_eq!(bench.end(), Some((Verdict::GivenUp, format!("host discovery failed at its first call: {plain}"))));
    let (mut bench, _) = Bench::with(1, "a:2");
    bench.driver.on_discovery_failed(steering, bench.now);
    bench.commands();
    assert!(bench.has_logged(plain), "{:?}", bench.logged);
}

#[test]
fn failures_of_discovery_whose_text_changes_are_logged_every_30_s() {
    let (mut bench, _) = Bench::with(1, "a:2");
    for second in 0..90 {
        bench.driver.on_discovery_failed(&format!("12:00:{second}: no answer"), bench.now);
        bench.now += s(1);
    }
    let logged = bench.has_logged("no answer").then(|| bench.stays());
    assert_eq!(logged, Some(3), "{:?}", bench.logged);
    assert!(bench.has_logged("12:00:30: no answer") && bench.has_logged("12:00:60: no answer"));
    for _ in 0..90 {
        bench.driver.on_discovery_failed("12:00:60: no answer", bench.now);
        bench.now += s(1);
    }
    assert_eq!(bench.stays(), 3, "one text is logged once, however long it lasts");
}

#[test]
fn discovery_that_never_answers_ends_the_job_and_later_is_logged_once() {
    let mut bench = Bench::new(rules(1, false));
    assert_eq!(bench.driver.next_deadline(bench.now), Some(bench.now + s(20)));
    bench.pass(s(20));
    let reason = bench.given_up();
    assert!(reason.contains("has not answered within 20 s (--discovery-timeout)"), "{reason}");

    let (mut bench, _) = Bench::with(1, "a:2");
    bench.pass(s(20));
    bench.pass(s(20));
    assert_eq!(bench.commands(), []);
    assert_eq!(bench.logged.iter().filter(|text| text.contains("has not answered for 20 s")).count(), 1);
    assert_eq!(bench.driver.next_deadline(bench.now), None);
}

#[test]
fn an_agent_that_does_not_start_is_tried_again_and_its_host_kept_out_at_last() {
    let (mut bench, _) = Bench::with(1, "a:2");
    let mut agent = bench.found("a:2,b:2")[0];
    for (attempt, delay) in [(1, 1), (2, 2)] {
        bench.ended(agent, 255, None, &["ssh: connect to host b port 22: Connection refused"]);
        assert!(
            bench.has_logged(&format!("Connection refused; next try in {delay} s ({attempt} of 3)")),
            "{:?}",
            bench.logged
        );
        bench.pass(s(delay) - Duration::from_millis(1));
        assert_eq!(bench.commands(), []);
        assert_eq!(bench.driver.next_deadline(bench.now), Some(bench.now + Duration::from_millis(1)));
        bench.pass(Duration::from_millis(1));
        agent = bench.commands().iter().find_map(started).unwrap();
    }
    bench.ended(agent, 255, None, &[]);
    assert!(bench.has_logged("it is out for the job (3 of 3, --host-failures)"));
    bench.pass(s(10_000));
    assert_eq!(bench.commands(), []);
}

#[test]
fn a_host_that_is_out_comes_back_after_its_cool_down_if_it_is_listed() {
    let cooldown = Some(Cooldown { min: s(10), max: s(60) });
    let mut bench = Bench::new(Rules { cooldown, host_failures: 1, ..rules(1, false) });
    let agents = bench.found("a:2,b:2");
    bench.driver.on_up(agents[0], "1.0", bench.now);
    bench.ended(agents[1], 127, None, &[]);
    assert!(bench.has_logged("there is no `python3`"), "{:?}", bench.logged);
    assert!(bench.has_logged("it is out for 10 s"));
    bench.pass(s(9));
    assert_eq!(bench.commands(), []);
    bench.pass(s(1));
    let [Command::Start { host, age, .. }] = &bench.commands()[..] else { panic!("not started") };
    assert_eq!((&*host.name, *age), ("b", 2), "it is the youngest now");
}

#[test]
fn without_a_limit_of_failures_a_host_is_tried_again_and_again() {
    let (mut bench, _) = Bench::with(1, "a:2");
    bench.driver.rules.host_failures = 0;
    let mut agent = bench.found("a:2,b:2")[0];
    for _ in 0..20 {
        bench.ended(agent, 255, None, &[]);
        bench.pass(s(60));
        agent = bench.commands().iter().find_map(started).unwrap();
    }
    assert!(bench.has_logged("next try in 60 s (20 so far)") && !bench.has_logged("it is out"), "{:?}", bench.logged);
}

#[test]
fn troubles_long_ago_do_not_count() {
    let mut bench = Bench::new(Rules { elastic_timeout: s(10_000), ..rules(1, false) });
    let mut agent = bench.found("a:2")[0];
    for _ in 0..5 {
        bench.ended(agent, 255, None, &[]);
        bench.pass(s(3601));
        agent = bench.commands().iter().find_map(started).unwrap();
        bench.driver.on_up(agent, "1.0", bench.now);
    }
    assert!(!bench.has_logged("it is out"));
}

#[test]
fn an_agent_that_says_nothing_is_killed_at_its_limit() {
    let mut bench = Bench::new(rules(1, false));
    let agent = bench.found("a:2")[0];
    bench.driver.on_found(&parse_list("a:2", 1).unwrap(), bench.now + s(29));
    bench.pass(s(30));
    assert_eq!(bench.commands(), [Command::Kill { agent }]);
    bench.ended(agent, 255, None, &["debug: waiting"]);
    assert!(
        bench.has_logged("no agent has started there after 30 s (--start-timeout): debug: waiting; next try"),
        "{:?}",
        bench.logged
    );
}

#[test]
fn an_agent_of_another_version_is_refused_and_both_are_named() {
    let mut bench = Bench::new(rules(1, false));
    let agent = bench.found("a:2")[0];
    bench.driver.on_up(agent, "0.9", bench.now);
    assert_eq!(bench.commands(), [Command::Kill { agent }]);
    bench.ended(agent, 255, None, &[]);
    assert!(bench.has_logged("it has elastic_rs 0.9, and the driver 1.0"), "{:?}", bench.logged);
}

#[test]
fn the_job_ends_as_an_agent_says_once_all_have_ended() {
    for (code, outcome, verdict) in [(0, "succeeded", Verdict::Succeeded), (92, "failed", Verdict::Failed { code: 92 })]
    {
        let (mut bench, agents) = Bench::with(2, "a:2,b:2");
        let starting = bench.found("a:2,b:2,c:2")[0];
        bench.ended(agents[0], code, Some(outcome), &[]);
        assert_eq!(
            bench.commands(),
            [Command::Kill { agent: starting }],
            "nobody is notified: the others learn it themselves"
        );
        bench.ended(starting, 255, None, &[]);
        bench.ended(agents[1], code, Some(outcome), &[]);
        assert_eq!(bench.end().map(|(verdict, _)| verdict), Some(verdict));
        assert_eq!(bench.driver.next_deadline(bench.now), None);
    }
}

#[test]
fn agents_that_do_not_end_with_the_job_are_killed_and_at_last_not_waited_for() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    bench.ended(agents[0], 0, Some("succeeded"), &[]);
    bench.pass(s(40));
    assert_eq!(bench.commands(), [Command::Kill { agent: agents[1] }]);
    bench.pass(s(5));
    assert_eq!(bench.end().map(|(verdict, _)| verdict), Some(Verdict::Succeeded));
}

#[test]
fn signals_are_passed_on_and_the_third_kills() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    let starting = bench.found("a:2,b:2,c:1")[0];
    bench.driver.on_signal(2, "", bench.now);
    let request = Request::Signal(2);
    let kill = |agent| Command::Kill { agent };
    assert_eq!(bench.commands(), [send(agents[0], request), send(agents[1], request), kill(starting)]);
    bench.driver.on_signal(2, "", bench.now);
    assert_eq!(bench.commands(), [send(agents[0], request), send(agents[1], request)]);
    bench.driver.on_signal(2, "", bench.now);
    assert_eq!(
        bench.commands(),
        [send(agents[0], request), send(agents[1], request), kill(agents[0]), kill(agents[1])]
    );
    for agent in [starting, agents[0], agents[1]] {
        bench.ended(agent, 130, Some("signal"), &[]);
    }
    assert_eq!(bench.end(), Some((Verdict::Signal(2), "SIGINT".to_owned())));
}

#[test]
fn a_signal_that_ends_nothing_is_passed_on_each_time() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    bench.found("a:2,b:2,c:1"); // starts
    for _ in 0..4 {
        bench.driver.on_signal(10, "pid 7 (slurmstepd)", bench.now);
        assert_eq!(bench.commands(), [send(agents[0], Request::Signal(10)), send(agents[1], Request::Signal(10))]);
    }
    assert_eq!(bench.logged.last().unwrap(), "received SIGUSR1: passed on to all agents; it was pid 7 (slurmstepd)");
    assert_eq!(bench.end(), None);
}

#[test]
fn fixed_hosts_that_can_never_be_enough_end_the_job_at_once() {
    let mut bench = Bench::new(Rules { host_failures: 1, ..rules(4, true) });
    let agents = bench.found("a:2,b:2");
    bench.driver.on_up(agents[0], "1.0", bench.now);
    bench.ended(agents[1], 255, None, &["ssh: Could not resolve hostname b"]);
    assert_eq!(bench.commands(), [send(agents[0], Request::Leave)]);
    bench.ended(agents[0], 143, Some("signal"), &[]);
    let reason = bench.given_up();
    assert!(
        reason.starts_with("slots left: 2, must be at least 4 (--min-np): host `b`: ssh cannot connect: "),
        "{reason}"
    );
}

/// The driver gives up after the elastic timeout, and has its last agent leave.
fn gives_up_for_want_of_slots(bench: &mut Bench, agent: AgentId) {
    assert_eq!(bench.commands(), [send(agent, Request::Leave)]);
    bench.ended(agent, 143, Some("signal"), &[]);
    let reason = bench.given_up();
    assert!(
        reason.starts_with("slots with an agent for 600 s (--elastic-timeout): 2, must be at least 4 (--min-np)"),
        "{reason}"
    );
}

#[test]
fn too_few_slots_end_the_job_after_the_elastic_timeout() {
    let (mut bench, agents) = Bench::with(4, "a:2,b:2");
    bench.driver.on_found(&parse_list("a:2", 1).unwrap(), bench.now);
    bench.ended(agents[1], 143, Some("signal"), &[]);
    bench.commands();
    for _ in 0..59 {
        bench.pass(s(10));
        bench.driver.on_found(&parse_list("a:2", 1).unwrap(), bench.now);
        assert_eq!(bench.commands(), []);
    }
    bench.pass(s(10));
    gives_up_for_want_of_slots(&mut bench, agents[0]);
}

#[test]
fn a_job_whose_hosts_are_all_out_for_ever_ends_at_once_also_with_a_discovery() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    let out = |name: &str| (name.to_owned(), kept_out(None));
    bench.driver.on_excluded(BTreeMap::from([out("a")]), bench.now);
    bench.ended(agents[0], 1, Some("no_place"), &[]);
    assert_eq!(bench.end(), None, "`b` is left");
    bench.driver.on_excluded(BTreeMap::from([out("a"), out("b")]), bench.now);
    bench.ended(agents[1], 1, Some("no_place"), &[]);
    let reason = bench.given_up();
    assert!(reason.starts_with("slots left: 0, must be at least 1 (--min-np)"), "{reason}");
}

#[test]
fn a_wait_for_slots_is_logged_with_its_limit() {
    let (mut bench, agents) = Bench::with(4, "a:2,b:2");
    bench.driver.on_found(&parse_list("a:2", 1).unwrap(), bench.now);
    bench.ended(agents[1], 143, Some("signal"), &[]);
    bench.pass(s(9));
    assert!(!bench.has_logged("--elastic-timeout"));
    assert_eq!(bench.driver.next_deadline(bench.now), Some(bench.now + s(1)));
    bench.pass(s(1));
    assert!(bench.has_logged(
        "slots with an agent: 2, must be at least 4 (--min-np); waiting for more until 600 s have passed (--elastic-timeout), 10 s"
    ));
    bench.pass(s(1));
    assert_eq!(bench.logged.iter().filter(|text| text.contains("--elastic-timeout")).count(), 1);
}

#[test]
fn a_command_line_that_an_agent_does_not_accept_ends_the_job_at_once() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    bench.ended(agents[0], 2, Some("refused"), &[]);
    assert_eq!(bench.commands(), [send(agents[1], Request::Leave)]);
    bench.ended(agents[1], 143, Some("signal"), &[]);
    let (verdict, reason) = bench.end().unwrap();
    assert_eq!(verdict, Verdict::Refused, "the exit code is that of a command line that is not valid");
    assert!(reason.starts_with("host `a`: the agent cannot run there (exit code 2)"), "{reason}");
}

#[test]
fn a_host_that_lacks_the_script_ends_no_job_whose_other_hosts_may_have_it() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    bench.ended(agents[0], 2, Some("lacks_script"), &[]);
    assert_eq!(bench.commands(), []);
    assert!(bench.has_logged("host `a`: the agent cannot run there (exit code 2)"), "{:?}", bench.logged);
    assert_eq!(bench.end(), None);
    bench.ended(agents[1], 2, Some("lacks_script"), &[]);
    let (verdict, reason) = bench.end().unwrap();
    assert_eq!(verdict, Verdict::Refused, "no host has it");
    assert!(reason.ends_with("every other agent has ended in the same way"), "{reason}");
}

#[test]
fn a_command_line_that_another_agent_has_accepted_is_one_hosts_trouble() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    bench.driver.on_accepted();
    bench.ended(agents[1], 2, Some("refused"), &[]);
    assert_eq!(bench.commands(), []);
    assert!(bench.has_logged("host `b`: the agent cannot run there (exit code 2)"), "{:?}", bench.logged);
    assert_eq!(bench.end(), None);
}

#[test]
fn an_agent_that_cannot_take_part_is_one_hosts_trouble() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2");
    bench.ended(agents[1], 1, Some("unfit"), &[]);
    assert_eq!(bench.commands(), []);
    assert!(bench.has_logged("host `b`: its workers cannot take part in the job"), "{:?}", bench.logged);
}

#[test]
fn the_coordinators_exclusions_are_heeded() {
    let (mut bench, agents) = Bench::with(1, "a:2,b:2,c:2");
    let out = |name: &str, until: Option<Instant>| (name.to_owned(), kept_out(until));
    let excluded = BTreeMap::from([out("b", Some(bench.now + s(100))), out("c", None)]);
    bench.driver.on_excluded(excluded, bench.now);
    assert_eq!(bench.commands(), [], "agents of hosts that are out wait or end by themselves");
    assert!(
        bench.has_logged("host `b` is out for 100 s: 3 rounds had their first failure there")
            && bench.has_logged("host `c` is out for the job")
    );
    bench.ended(agents[1], 1, Some("no_place"), &[]);
    bench.ended(agents[2], 1, Some("no_place"), &[]);
    bench.pass(s(99));
    assert_eq!(bench.commands(), []);
    bench.pass(s(1));
    assert_eq!(bench.commands().iter().filter_map(started).count(), 1, "b is back, and c never is");
    assert!(!bench.has_logged("host `c`: the agent"), "its end was expected");
}

/// Hosts that are kept out have agents, which wait, and no round counts their workers.
#[test]
fn hosts_that_the_coordinator_keeps_out_do_not_count_towards_min_np() {
    let (mut bench, agents) = Bench::with(4, "a:2,b:2");
    let out = |until| BTreeMap::from([("b".to_owned(), kept_out(Some(until)))]);
    bench.pass(s(20)); // discovery is silent
    let until = bench.now + s(500);
    bench.driver.on_excluded(out(until), bench.now);
    bench.pass(s(10)); // the shortage is logged
    assert_eq!(bench.driver.next_deadline(bench.now), Some(until));
    bench.pass(s(490));
    assert_eq!(bench.driver.next_deadline(bench.now), None, "`b` counts again, and the time of shortage is over");
    let until = bench.now + s(3600);
    bench.driver.on_excluded(out(until), bench.now);
    bench.ended(agents[1], 1, Some("no_place"), &[]);
    assert!(!bench.has_logged("host `b`: the agent"), "its end was expected");
    bench.pass(s(599));
    assert_eq!(bench.commands(), []);
    bench.pass(s(1));
    gives_up_for_want_of_slots(&mut bench, agents[0]);
}

/// A cluster that gives every machine another name.
#[test]
fn hosts_that_are_gone_are_forgotten_when_they_are_too_many() {
    let (mut bench, _) = Bench::with(1, "stays:1");
    let running = bench.found("stays:1,runs:1")[0];
    bench.driver.on_up(running, "1.0", bench.now);
    for number in 0..2 * MOST_GONE {
        let [agent] = bench.found(&format!("stays:1,gone{number}:1"))[..] else { panic!("not started") };
        bench.ended(agent, 255, None, &[]);
        bench.found("stays:1");
        bench.pass(s(2));
        assert!(bench.driver.states.len() <= MOST_GONE + 2);
    }
    let remembers = |name| bench.driver.states.contains_key(name);
    assert!(remembers("stays") && remembers("runs") && !remembers("gone0"), "the agent on `runs` has not ended");
}
