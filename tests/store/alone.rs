//! Tests that change what a whole process has, such as its limit on descriptors.

use std::env;
use std::process::Command;

/// Set in the process that is one test's own. Its value is the test's name.
const ALONE: &str = "ELASTIC_RS_TEST_ALONE";

/// Whether this process runs nothing but the test of this name. If not, run the test in such a process, and fail if it fails.
///
/// `cargo nextest` gives every test a process, `cargo test` a thread.
pub fn alone(test: &str) -> bool {
    if env::var(ALONE).is_ok_and(|name| name == test) {
        return true;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(ALONE, test).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "in a process of its own {test} failed:\n{stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "no test is called {test}:\n{stdout}");
    false
}
