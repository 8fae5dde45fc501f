//! The store through its public API: its bytes, its rules, its server among friends and strangers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod alone;
mod client;
mod descriptors;
mod hostility;
mod logging;
mod properties;
mod server;
mod vectors;
