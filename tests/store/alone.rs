//! Separate processes for tests that change process-wide state, such as the limit on descriptors.

use std::env;
use std::process::Command;

/// Variable of a process that runs a single test. Its value is the test's name.
const ALONE: &str = "ELASTIC_RS_TEST_ALONE";

/// Whether this process runs only the test with this name. If not, run the test in such a process, and panic if it fails.
///
/// `cargo nextest` runs each test in a process, `cargo test` in a thread.
pub fn alone(test: &str) -> bool {
    if env::var(ALONE).is_ok_and(|name| name == test) {
        return true;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(ALONE, test).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{test} failed in a separate process:\n{stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "no test is called {test}:\n{stdout}");
    false
}
