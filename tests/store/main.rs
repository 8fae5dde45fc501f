//! Tests of the store through its public API: recorded bytes, rules of the table, the client, and the server under attack.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod alone;
mod client;
mod descriptors;
#[path = "../../src/net/hidden_peer.rs"]
mod hidden_peer;
mod hostility;
mod logging;
mod opening;
mod properties;
mod replaced;
mod server;
mod users;
mod vectors;
