use super::*;

/// What a driver reports of its hosts, and when: each line is what happens, and the hosts that are not used after it.
#[test]
fn a_host_without_an_agent_has_one_reason_at_a_time() {
    let cooldown = Some(Cooldown { min: s(100), max: s(1000) });
    let mut bench = Bench::new(Rules { cooldown, host_failures: 2, ..rules(1, false) });
    let unused = |bench: &Bench| {
        let shown = bench.driver.unused(bench.now).shown(bench.now);
        shown.iter().map(|host| format!("{} {} {}", host.host, host.reason, host.how_long)).collect::<Vec<_>>()
    };
    let agents = bench.found("a:2,b:2,c:2");
    let starting = |host: &str| format!("{host} starting for 30 s");
    assert_eq!(unused(&bench), ["a", "b", "c"].map(starting));
    bench.driver.on_up(agents[0], "1.0", bench.now);
    bench.driver.on_up(agents[2], "1.0", bench.now);
    assert_eq!(unused(&bench), [starting("b")]);
    bench.ended(agents[1], 255, None, &["ssh: connect to host b port 22: Connection refused"]);
    assert_eq!(unused(&bench), ["b retried for 1 s"]);
    bench.pass(s(1));
    let again = bench.commands().iter().find_map(started).unwrap();
    let shown = bench.driver.unused(bench.now).shown(bench.now);
    assert!(
        shown[0].why.ends_with("after this: ssh cannot connect: ssh: connect to host b port 22: Connection refused")
    );
    bench.ended(again, 255, None, &["ssh: connect to host b port 22: Connection refused"]);
    assert_eq!(unused(&bench), ["b agents_failed for 100 s"]);
    bench.driver.on_found(&parse_list("a:2,b:2", 1).unwrap(), bench.now);
    assert_eq!(unused(&bench), ["b agents_failed for 100 s", "c not_listed until discovery lists it"]);
    bench.driver.on_found(&parse_list("a:2,b:2,c:2", 1).unwrap(), bench.now);
    assert_eq!(unused(&bench), ["b agents_failed for 100 s", "c leaving for 40 s"], "its agent was asked to leave");
    bench.ended(agents[2], 143, Some("signal"), &[]);
    assert_eq!(unused(&bench), ["b agents_failed for 100 s".to_owned(), starting("c")]);
    let out = BTreeMap::from([("b".to_owned(), kept_out(None)), ("c".to_owned(), kept_out(None))]);
    bench.driver.on_excluded(out, bench.now);
    assert_eq!(unused(&bench), Vec::<String>::new(), "the coordinator names those that it keeps out");
    bench.driver.on_excluded(BTreeMap::new(), bench.now);
    bench.driver.on_found(&parse_list("a:2", 1).unwrap(), bench.now);
    bench.pass(s(100));
    assert_eq!(unused(&bench), ["b not_listed until discovery lists it", "c not_listed until discovery lists it"]);
    bench.pass(s(3500));
    assert_eq!(unused(&bench), Vec::<String>::new(), "an hour later nobody asks any more");
}
