//! The process of an agent: its streams, its end, and what it prints.

use super::*;

/// A child whose streams are not there stands for one whose descriptors cannot be waited for.
#[tokio::test]
async fn an_agent_whose_streams_cannot_be_set_up_is_killed_and_reaped() {
    let child = start(&["sleep", "3600"].map(OsString::from), Stdio::null(), Stdio::null(), Stdio::null()).unwrap();
    let pid = pid_of(&child).unwrap();
    let error = timeout(Duration::from_secs(60), set_up(Ok(child))).await.unwrap();
    assert_eq!(error.err().unwrap().to_string(), "a stream of the process is missing");
    assert!(rustix::process::test_kill_process(pid).is_err(), "it runs, or is a zombie");
}

/// As where the kernel has no pidfds. The runtime has one thread for calls that wait.
#[test]
fn any_number_of_agents_without_pidfds_run_and_end_beside_one_another() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    let ends = runtime.block_on(async {
        let child = |program: &[&str]| {
            let command: Vec<OsString> = program.iter().map(OsString::from).collect();
            start(&command, Stdio::piped(), Stdio::null(), Stdio::null()).unwrap()
        };
        let mut long = child(&["cat"]);
        let input = long.stdin.take();
        let long = tokio::spawn(ended(long, None));
        let short = ended(child(&["sh", "-c", "exit 7"]), None);
        let short = timeout(Duration::from_secs(60), short).await.expect("one waits for no other").unwrap();
        drop(input);
        (short.code(), long.await.unwrap().unwrap().code())
    });
    assert_eq!(ends, (Some(7), Some(0)));
}

#[test]
fn this_machine_is_known_by_its_name_with_and_without_the_domain() {
    let is_here = |name: &str| is_here(&Host { name: name.to_owned(), slots: 1 });
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert!(is_here(&own) && is_here(own.split('.').next().unwrap()));
    assert!(is_here("localhost") && is_here("127.0.0.1") && is_here("::1"));
    assert!(!is_here("no-such-host.invalid") && !is_here("192.0.2.1"));
}

const PROGRAM: &str = "import sys; main()";

fn launching() -> Launching {
    Launching {
        ssh: vec!["ssh".into(), "-p".into(), "2222".into()],
        remote_python: "/opt/my env/bin/python".to_owned(),
        python: "/usr/bin/python3".into(),
        program: ["-P".to_owned(), "-c".to_owned(), PROGRAM.to_owned()].into(),
        job: Bytes::new(),
        port: 0,
    }
}

#[test]
fn what_is_shown_of_it_holds_no_secret_of_the_job() {
    let launching = Launching { job: Bytes::from_static(b"{\"token\":\"4f4f\"}"), ..launching() };
    let shown = format!("{launching:?}");
    assert!(shown.contains("2222") && !shown.contains("4f4f") && !shown.contains("token"), "{shown}");
}

#[test]
fn users_options_come_first_and_nothing_secret_is_on_the_command_line() {
    let host = Host::new("me@node1", 2).unwrap();
    let words: Vec<String> = launching().command(&host).iter().map(|word| word.to_str().unwrap().to_owned()).collect();
    assert_eq!(words[..3], ["ssh", "-p", "2222"]);
    assert!(words.contains(&"BatchMode=yes".to_owned()));
    let remote = format!("exec '/opt/my env/bin/python' -P -c '{PROGRAM}'");
    assert_eq!(words[words.len() - 2..], ["me@node1".to_owned(), remote]);
}

#[test]
fn no_ssh_is_needed_on_the_drivers_machine() {
    let here = Host::new("localhost", 2).unwrap();
    assert_eq!(launching().command(&here), ["/usr/bin/python3", "-P", "-c", PROGRAM]);
}

#[test]
fn words_of_a_shell_are_quoted_if_they_have_to_be() {
    for (word, expected) in
        [("/usr/bin/python3.11", "/usr/bin/python3.11"), ("it's", r"'it'\''s'"), ("", "''"), ("$x", "'$x'")]
    {
        assert_eq!(quoted(word), expected);
    }
}
