use super::*;

/// As the binding makes it of a text, but for Python's underscores in numbers.
fn given(text: &str) -> Given<'_> {
    Given { shown: text, number: text.trim().parse().unwrap_or(f64::NAN), whole: text.trim().parse().ok() }
}

fn read_for(backend: Backend, entries: &[(&'static str, &'static str)]) -> Result<Conf, String> {
    Conf::read(backend, entries.iter().map(|(name, text)| (*name, given(text)))).map_err(|error| error.to_string())
}

fn read(entries: &[(&'static str, &'static str)]) -> Result<Conf, String> {
    read_for(Backend::RustC10d, entries)
}

#[test]
fn no_name_or_spelling_is_given_twice() {
    for backend in Backend::ALL {
        let mut names = known(backend);
        names.dedup();
        assert_eq!(names, known(backend));
    }
}

#[test]
fn defaults_are_allowed() {
    for key in KEYS {
        let default = key.get(&Conf::default());
        if default != Value::Nothing {
            let shown = default.to_string();
            assert_eq!(key.allowed.check(key.name, &given(&shown)), Ok(default));
        }
    }
}

#[test]
fn what_may_be_said_may_be_asked_of_a_coordinator() {
    // `restart_window` needs a number of restarts.
    let asked = |conf: &Conf| Settings { max_restarts: Some(1), ..conf.settings(1, 2) };
    for key in KEYS {
        for bound in match key.allowed {
            Allowed::Seconds { most, .. } if key.name == "keep_alive_interval" => vec![most / 3],
            Allowed::Seconds { most, .. } => vec![most],
            _ => vec![],
        } {
            let mut conf = Conf::default();
            conf.set(key.name, Value::Seconds(bound)).unwrap();
            assert_eq!(asked(&conf).validate(), Ok(()), "{}", key.name);
        }
        if let Allowed::Whole(least, most) = key.allowed {
            for bound in [least, most] {
                let mut conf = Conf { keep_alive_interval: settings::SHORTEST_KEEP_ALIVE, ..Conf::default() };
                conf.set(key.name, Value::Whole(bound)).unwrap();
                assert_eq!(asked(&conf).validate(), Ok(()), "{}", key.name);
            }
        }
    }
}

#[test]
fn a_value_is_checked_by_its_key() {
    let conf = read(&[("settle_timeout", "0"), ("is_host", "Yes"), ("on_partition", " Continue"), ("node_rank", "2")]);
    let expected = Conf {
        settle_timeout: Duration::ZERO,
        is_host: Some(true),
        on_partition: OnPartition::Continue,
        node_rank: Some(2),
        ..Conf::default()
    };
    assert_eq!(conf, Ok(expected));
    for (name, text, allowed) in [
        ("join_timeout", "0", "a number of seconds above zero"),
        ("join_timeout", "nan", "a number of seconds above zero"),
        ("join_timeout", "1e300", "a number of seconds above zero"),
        ("drain_timeout", "-1", "a number of seconds, zero or more"),
        ("reconnect_grace", "61", "a number of seconds, zero or more, at most 60"),
        ("keep_alive_interval", "0.001", "a number of seconds, 0.01 or more, at most 3600"),
        ("node_rank", "2147483648", "a whole number from 0 to 2147483647"),
        ("is_host", "perhaps", "one of 1, true, t, yes, y, 0, false, f, no, n"),
        ("agent", "java", "`rust` or `torch`"),
        ("no_restart_on", "0", CODES),
        ("no_restart_on", "3+256", CODES),
        ("no_restart_on", "3+abc", CODES),
        ("no_restart_on", "-9", CODES),
        ("no_restart_on", "3+4+3", CODES),
        ("no_restart_on", "3,4", CODES),
        ("no_restart_on", "", CODES),
        (
            "no_restart_on",
            "1+2+3+4+5+6+7+8+9+10+11+12+13+14+15+16+17+18+19+20+21+22+23+24+25+26+27+28+29+30+31+32+33",
            CODES,
        ),
        ("exit_code", "kind", "`worker` or `class`"),
        ("store_type", "file", "`tcp`: this backend has its own store"),
        ("timeout", "soon", "a number of seconds above zero"),
    ] {
        let expected = format!("--rdzv-conf {name} is `{text}`, must be {allowed}");
        assert_eq!(read(&[(name, text)]), Err(expected));
    }
}

const CODES: &str = "1 to 32 exit codes from 1 to 255, each once and joined by +, such as 3+4";

#[test]
fn a_lease_has_a_bound_of_its_own() {
    assert!(read(&[("keep_alive_interval", "3600"), ("keep_alive_max_attempt", "1")]).is_ok());
    let text = "--rdzv-conf keep_alive_interval * keep_alive_max_attempt is `5000` seconds, must be at most 3600";
    assert_eq!(read(&[("keep_alive_max_attempt", "1000")]), Err(text.to_owned()));
}

#[test]
fn join_timeout_goes_before_its_alias() {
    let of = |entries| read(entries).unwrap().join_timeout.as_secs();
    assert_eq!(of(&[("timeout", "5")]), 5);
    assert_eq!(of(&[("timeout", "5"), ("join_timeout", "7")]), 7);
    assert_eq!(of(&[("join_timeout", "7"), ("timeout", "5")]), 7);
}

#[test]
fn what_is_set_must_be_of_the_keys_kind() {
    let mut conf = Conf::default();
    assert_eq!(conf.set("node_rank", Value::Nothing), Ok(()));
    assert_eq!(conf.set("rank", Value::Nothing), Err("there is no setting `rank`".to_owned()));
    let error = conf.set("join_timeout", Value::Whole(5)).unwrap_err();
    assert_eq!(error, "`join_timeout` is of another kind than Whole(5)");
}

#[test]
fn a_key_without_a_meaning_for_the_backend_is_refused_with_the_reason() {
    let refused = |backend, name, text| read_for(backend, &[(name, text)]).unwrap_err();
    assert_eq!(
        refused(Backend::RustEtcd, "is_host", "1"),
        "--rdzv-conf is_host has no meaning with --rdzv-backend=rust-etcd, only with rust-c10d: no node hosts the \
         rendezvous, etcd does"
    );
    assert!(refused(Backend::RustEtcd, "reconnect_grace", "1").contains("its lease at etcd"));
    assert!(refused(Backend::RustEtcd, "store_type", "tcp").contains("etcd is one"));
    assert_eq!(
        refused(Backend::RustC10d, "cacert", "ca.pem"),
        "--rdzv-conf cacert has no meaning with --rdzv-backend=rust-c10d, only with rust-etcd: this backend does not \
         connect to etcd"
    );
}

#[test]
fn keys_of_etcd_have_the_spellings_of_both_backends_of_pytorch() {
    let v2 = [("protocol", "HTTPS"), ("ca_cert", "ca"), ("ssl_cert", "c"), ("ssl_cert_key", "k"), ("key_prefix", "/p")];
    let v1 = [("protocol", "https"), ("cacert", "ca"), ("cert", "c"), ("key", "k"), ("etcd_prefix", "/p")];
    let conf = read_for(Backend::RustEtcd, &v2);
    assert_eq!(conf, read_for(Backend::RustEtcd, &v1));
    let text = |text: &str| Some(text.to_owned());
    let expected = Conf {
        protocol: Some(Protocol::Https),
        cacert: text("ca"),
        cert: text("c"),
        key: text("k"),
        key_prefix: "/p".to_owned(),
        ..Conf::default()
    };
    assert_eq!(conf, Ok(expected));
    let twice = read_for(Backend::RustEtcd, &[("ssl_cert", "a"), ("cert", "b")]).unwrap_err();
    assert_eq!(twice, "--rdzv-conf has `ssl_cert` and `cert`, which are the same key: give one of them");
}

#[test]
fn keys_that_need_another_are_refused_without_it() {
    for (alone, needed) in [("ssl_cert_key", "cert"), ("key", "cert"), ("password_file", "username")] {
        let error = read_for(Backend::RustEtcd, &[(alone, "x")]).unwrap_err();
        assert!(error.ends_with(&format!("without `{needed}`: give both")), "{error}");
    }
}

#[test]
fn a_password_is_refused_and_not_shown() {
    let error = read_for(Backend::RustEtcd, &[("username", "me"), ("password", "secret")]).unwrap_err();
    assert!(error.starts_with("--rdzv-conf password is refused: everybody on this machine can read"), "{error}");
    assert!(error.contains("password_file=FILE") && error.contains(PASSWORD_VARIABLE), "{error}");
    assert!(Key::named("password_file").unwrap().help.contains(PASSWORD_VARIABLE));
    assert!(!error.contains("secret"), "{error}");
}

#[test]
fn a_text_has_a_bound_and_no_control_characters() {
    for text in ["", "a\nb"] {
        let error = read_for(Backend::RustEtcd, &[("username", text)]).unwrap_err();
        assert!(error.contains("must be a text of 1 to 4096 bytes"), "{error}");
    }
}

#[test]
fn keys_in_pairs_need_one_another_and_rise() {
    for (least, most) in [("blacklist_cooldown_min", "blacklist_cooldown_max"), ("min_workers", "max_workers")] {
        for (given, missing) in [(least, most), (most, least)] {
            let error = read(&[(given, "5")]).unwrap_err();
            assert_eq!(error, format!("--rdzv-conf has `{given}` without `{missing}`: give both"));
        }
        let error = read(&[(least, "5"), (most, "4")]).unwrap_err();
        assert_eq!(error, format!("--rdzv-conf {most} is `4`, must be at least {least} (`5`)"));
        assert!(read(&[(least, "5"), (most, "5")]).is_ok());
    }
}

#[test]
fn a_host_is_out_after_one_failure_if_only_a_cool_down_is_given() {
    let cooldown = [("blacklist_cooldown_min", "10"), ("blacklist_cooldown_max", "60")];
    let failures = |entries: &[_]| read(entries).unwrap().settings(1, 2).rules.host_failures;
    assert_eq!((failures(&[]), failures(&cooldown)), (0, 1));
    assert_eq!(failures(&[cooldown[0], cooldown[1], ("host_failures", "3")]), 3);
}

#[test]
fn exit_codes_are_joined_by_a_plus_and_written_in_order() {
    let conf = read(&[("no_restart_on", "255+3"), ("exit_code", "Class")]).unwrap();
    assert_eq!(conf.no_restart_on, [3, 255].into());
    assert_eq!(Key::named("no_restart_on").unwrap().get(&conf).to_string(), "3+255");
    assert_eq!((conf.exit_code, conf.settings(1, 1).rules.no_restart_on), (Some(ExitCode::Class), [3, 255].into()));
    assert_eq!(Key::named("no_restart_on").unwrap().get(&Conf::default()), Value::Nothing);
}

#[test]
fn what_the_coordinator_or_our_agent_does_is_refused_without_it() {
    for (one, other) in [
        (("no_restart_on", "3"), ("restart_budget", "node")),
        (("no_restart_on", "3"), ("agent", "torch")),
        (("exit_code", "class"), ("agent", "torch")),
    ] {
        let error = read(&[one, other]).unwrap_err();
        let expected = format!("--rdzv-conf has `{}` and `{}={}`, which cannot be combined: ", one.0, other.0, other.1);
        assert!(error.starts_with(&expected), "{error}");
    }
}
