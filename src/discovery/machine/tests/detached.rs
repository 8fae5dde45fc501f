use super::*;

/// Rules under which agents run on without the driver, and a host is out after its first failure.
fn detached(min_slots: u32) -> Rules {
    Rules { detach: true, host_failures: 1, ..rules(min_slots, true) }
}

#[test]
fn detached_agents_run_on_and_the_driver_ends_when_all_are_started() {
    let mut bench = Bench::new(detached(4));
    let agents = bench.found("a:2,b:2,c:2");
    for agent in &agents[..2] {
        bench.driver.on_up(*agent, "1.0", bench.now);
        bench.ended(*agent, 0, Some("detached"), &[]);
        assert_eq!(bench.commands(), []);
    }
    bench.ended(agents[2], 255, None, &["refused"]);
    let (verdict, reason) = bench.end().unwrap();
    assert_eq!((verdict, &*reason), (Verdict::Succeeded, "agents with 4 slots run on without the driver"));

    let mut bench = Bench::new(detached(4));
    let agents = bench.found("a:2,b:2");
    bench.ended(agents[0], 0, Some("detached"), &[]);
    bench.ended(agents[1], 255, None, &["refused"]);
    let reason = bench.given_up();
    assert!(
        reason.contains("slots with an agent: 2, must be at least 4 (--min-np)")
            && reason.contains("host `b`: ssh cannot connect: refused"),
        "{reason}"
    );
}

/// Only the first host's agent hosts the coordinator of detached agents, so without it the others would meet nobody.
#[test]
fn detached_agents_without_the_first_hosts_are_given_up() {
    let mut bench = Bench::new(detached(1));
    let agents = bench.found("a:2,b:2,c:2");
    bench.driver.on_up(agents[1], "1.0", bench.now);
    bench.ended(agents[1], 0, Some("detached"), &[]);
    bench.ended(agents[0], 255, None, &["refused"]);
    assert_eq!(bench.commands(), [Command::Kill { agent: agents[2] }], "it is not waited for");
    bench.ended(agents[2], 255, None, &[]);
    let reason = bench.given_up();
    assert!(
        reason.starts_with("the agent on `a`, the first host, would have hosted the rendezvous (--detach), and cannot")
            && reason.ends_with("host `a`: ssh cannot connect: refused"),
        "{reason}"
    );
}

/// None of those that meet at a list of endpoints hosts the coordinator before the others, and all have to be there.
#[test]
fn detached_agents_meet_at_the_hosts_of_a_list() {
    let mut bench = Bench::new(Rules { listed: Some(vec!["b".to_owned(), "a".to_owned()]), ..detached(1) });
    bench.driver.on_found(&parse_list("a:2,b:2,c:2", 1).unwrap(), bench.now);
    let hosts = |command: &Command| matches!(command, Command::Start { hosts_coordinator: true, .. });
    assert!(!bench.commands().iter().any(hosts));
    bench.ended(AgentId(0), 0, Some("detached"), &[]);
    bench.ended(AgentId(2), 255, None, &["refused"]);
    assert_eq!(bench.end(), None, "`b` may come");
    bench.ended(AgentId(1), 255, None, &["refused"]);
    let reason = bench.given_up();
    assert!(reason.starts_with("the agent on `b`, one of the list's hosts, would have hosted"), "{reason}");
}

#[test]
fn the_first_hosts_agent_hosts_the_rendezvous_of_detached_agents_also_after_a_cool_down() {
    let cooldown = Some(Cooldown { min: s(10), max: s(60) });
    let mut bench = Bench::new(Rules { cooldown, ..detached(1) });
    bench.driver.on_found(&parse_list("a:2,b:2", 1).unwrap(), bench.now);
    let hosting = |commands: &[Command]| -> Vec<(String, u64, bool)> {
        let starts = commands.iter().filter_map(|command| match command {
            Command::Start { host, age, hosts_coordinator, .. } => Some((host.name.clone(), *age, *hosts_coordinator)),
            _ => None,
        });
        starts.collect()
    };
    let started = bench.commands();
    assert_eq!(hosting(&started), [("a".to_owned(), 0, true), ("b".to_owned(), 1, false)]);
    bench.ended(AgentId(0), 255, None, &[]);
    bench.ended(AgentId(1), 0, Some("detached"), &[]);
    assert_eq!(bench.end(), None, "`a` comes back");
    bench.pass(s(10));
    assert_eq!(hosting(&bench.commands()), [("a".to_owned(), 2, true)]);
}
