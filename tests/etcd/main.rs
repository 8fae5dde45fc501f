//! Tests with a real etcd: the client, and sessions over it. `ETCD` names the binary; `make test` sets it. Without it they are skipped,
//! which they say on stderr.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod calls;
mod cluster;
mod encrypted;
mod faults;
mod not_etcd;
mod sessions;
mod users;
