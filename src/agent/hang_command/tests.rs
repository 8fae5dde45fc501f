use std::fs;
use std::sync::mpsc;
use std::time::Instant;

use rustix::fs::Mode;
use rustix::process::{Pid, test_kill_process_group};

use super::*;
use crate::processes::is_alive;

const LONG: Duration = Duration::from_secs(60);

/// Runs a command in this thread. Returns the warnings, and what is in the file `$OUT` then.
fn ran(command: &str, limit: Duration) -> (Vec<String>, String) {
    let folder = std::env::temp_dir().join(format!("hang-command-{}", rand::random::<u64>()));
    fs::create_dir(&folder).unwrap();
    let out = folder.join("out");
    let variables = vec![("ELASTIC_RS_HANG_RANKS", "0-2,5".to_owned()), ("OUT", out.display().to_string())];
    let about = About { text: "training stands still\n  rank 3\n".to_owned(), variables, ..About::default() };
    let run = Run { command: command.into(), limit, about, shown: "…".to_owned(), shell: Arc::default() };
    let (sender, warnings) = mpsc::channel();
    run.report(|text| sender.send(text).unwrap());
    drop(sender);
    let text = fs::read_to_string(&out).unwrap_or_default();
    fs::remove_dir_all(&folder).unwrap();
    (warnings.iter().collect(), text)
}

#[test]
fn it_gets_the_lines_and_the_variables_in_a_session_of_its_own_with_no_signal_blocked() {
    let script = "cat > $OUT; echo $ELASTIC_RS_HANG_RANKS >> $OUT; grep SigBlk /proc/self/status >> $OUT; \
                  test $(cut -d' ' -f6 /proc/$$/stat) = $$ && echo leads >> $OUT";
    let expected = "training stands still\n  rank 3\n0-2,5\nSigBlk:\t0000000000000000\nleads\n";
    assert_eq!(ran(script, LONG), (vec![], expected.to_owned()));
    assert_eq!(ran("true", LONG), (vec![], String::new()), "it need not read them");
}

#[test]
fn one_that_fails_is_one_warning() {
    for (command, end) in [("exit 3", "exit code 3"), ("kill -KILL $$", "SIGKILL"), ("/nowhere", "exit code 127")] {
        let (warnings, _) = ran(command, LONG);
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(
            warnings[0].starts_with(&format!("the command of --on-hang (`…`) ended with {end} after 0.")),
            "{warnings:?}"
        );
    }
    let (warnings, _) = ran("a\0b", LONG);
    assert!(warnings[0].starts_with("the command of --on-hang (`…`) cannot be run: "), "{warnings:?}");
}

#[test]
fn one_that_hangs_is_killed_with_all_that_it_has_started() {
    let (warnings, pids) = ran("sleep 600 & echo $$ $! > $OUT; wait", Duration::from_millis(500));
    let expected = "the command of --on-hang (`…`) has not ended after 0.5 s and was killed, with all that it had started: what \
                    takes longer needs a session of its own (setsid)";
    assert_eq!(warnings, [expected]);
    let pids: Vec<u32> = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(pids.len(), 2);
    assert!(!is_alive(pids[0]));
    let killed = Instant::now();
    while is_alive(pids[1]) {
        assert!(killed.elapsed() < LONG, "what it had started lives"); // nobody has waited for it
    }
}

#[test]
fn it_ends_with_the_agent_and_is_not_run_twice_at_a_time() {
    let fifo = std::env::temp_dir().join(format!("hang-command-{}", rand::random::<u64>()));
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::RWXU).unwrap();
    let command = HangCommand::new(format!("echo $$ > {}; sleep 600", fifo.display()).into());
    command.run(About::default());
    let pid = fs::read_to_string(&fifo).unwrap();
    let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    while command.shell.runs() != Some(pid) {
        std::thread::yield_now(); // its thread has not noted it yet
    }
    command.run(About::default());
    assert_eq!(command.shell.runs(), Some(pid), "the second one would be another");
    drop(command);
    while test_kill_process_group(pid).is_ok() {
        std::thread::yield_now(); // its thread reaps it
    }
    fs::remove_file(&fifo).unwrap();
}
