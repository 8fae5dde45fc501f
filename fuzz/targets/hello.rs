//! Fuzzes the first bytes of a connection to the store's port, which come from peers that have proven nothing.
//!
//! What a connection speaks must not depend on how its bytes are cut, and what the log shows of an unknown client must be short and
//! printable.

#![no_main]

use elastic_rs::rendezvous::messages::message::MAGIC;
use elastic_rs::store::protocol::Query;
use elastic_rs::store::protocol::hello::{PREVIEW_BYTES, Visitor, preview, recognise};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let recognised = |bytes: &[u8]| recognise(bytes, [&b"\x16"[..], MAGIC, b"GET "].into_iter());
    let first =
        (0..=bytes.len()).map(|end| recognised(&bytes[..end])).find(|recognised| *recognised != Visitor::Unknown);
    assert_eq!(recognised(bytes), first.unwrap_or(Visitor::Unknown));
    let Some(text) = preview(bytes) else { return };
    // Each byte is shown as four characters at most.
    assert!(text.len() <= 4 * PREVIEW_BYTES && text.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{text:?}");
    assert!(Query::from_code(bytes[0]).is_none(), "keys and values may follow");
});
