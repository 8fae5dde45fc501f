//! Fuzzes the rendezvous state of a backend. Any bytes must decode to a state or an error, and a node must cope with any state.
#![no_main]

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use elastic_rs::rendezvous::cell::blob::Blob;
use elastic_rs::rendezvous::cell::node::{CellCommand, CellNode};
use elastic_rs::rendezvous::messages::message::{Hello, NodeId, Verdict};
use elastic_rs::rendezvous::messages::settings::Settings;
use libfuzzer_sys::fuzz_target;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Steps of the node's driver. Enough for a round to form, and for other nodes to be lost.
const STEPS: u32 = 60;

fuzz_target!(|input: &[u8]| {
    // The first byte is the node's request, the rest is the backend's state.
    let Some((&wish, bytes)) = input.split_first() else { return };
    match Blob::decode(bytes) {
        Ok(blob) => assert_eq!(Blob::decode(&blob.encode()).as_ref(), Ok(&blob), "what is written is read"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let mut now = *START;
    let hello = Hello::new("run", NodeId(u128::from(wish & 3)), "host0:1", Settings::new(1, 3));
    let hello = Hello { local_addr: Some("a".to_owned()), ..hello };
    let mut node = CellNode::new(hello, false, now);
    match wish >> 4 & 3 {
        0 => node.look(now),
        1 => node.ask(|node| node.close(Verdict::Succeeded { by: "host0".to_owned() }), now),
        _ => node.ask(|node| node.join(1, None, None, Duration::from_secs(30), now), now),
    }
    let mut cell = Some(bytes.to_vec());
    for step in 0..STEPS {
        node.on_tick(now);
        match node.take_command() {
            Some(CellCommand::Read) => node.on_state(cell.as_deref(), now),
            Some(CellCommand::Write(state)) => {
                assert!(Blob::decode(&state).is_ok(), "a node writes an invalid state");
                // Sometimes another node has written first.
                if wish & 8 > 0 && step % 5 == 0 {
                    node.on_conflict(cell.as_deref(), now);
                } else {
                    cell = Some(state);
                    node.on_written(now);
                }
            }
            None => {
                let Some(at) = node.next_deadline() else { break };
                now = now.max(at) + Duration::from_millis(1);
            }
        }
        if step == STEPS / 2 && wish & 4 > 0 {
            node.ask(|node| node.leave("the fuzzer ends it".to_owned(), None), now);
        }
        let (_, _) = (node.take_outcome(), node.take_notes());
        assert!(node.view().waiting == 0 || !node.view().reason.is_empty(), "interrupted without a reason");
    }
});
