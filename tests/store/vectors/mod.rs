//! The captured bytes of `tests/data/tcpstore`, replayed in both directions.
//!
//! `server`: recorded client bytes go to our server. Its replies must be the recorded ones, byte for byte.
//! `client`: our client performs the recorded operations against the recorded server bytes.
//! Both use every file. `tests/data/tcpstore_differences.json` has the steps in which our server differs on purpose, each with its
//! reason. An unused entry fails the test.

mod client;
mod file;
mod server;

use file::File;

#[test]
fn our_server_answers_as_recorded() {
    let mut differences = file::differences();
    for file in File::all() {
        println!("{}", file.name);
        server::replay(&file, &mut differences);
    }
    assert!(differences.is_empty(), "unused differences: {:?}", differences.keys());
}

#[test]
fn our_client_asks_as_recorded() {
    let files = File::all();
    let (raw, operations): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.is_raw());
    // Raw files have bytes that torch's client never sends, so our client has no operation for them.
    let raw: Vec<&str> = raw.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(raw, ["legacy-limits", "legacy-raw", "libuv-limits", "libuv-quirks", "libuv-raw"]);
    assert_eq!(operations.len(), 37);
    for file in operations {
        println!("{}", file.name);
        client::replay(file);
    }
}
