//! Which coordinator this is: the process, where it listens, and which life of it.

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::process;
use std::sync::OnceLock;

use crate::rendezvous::run::CoordinatorInstance;

/// A random number for this process, drawn on first use. It distinguishes the process from others with its name and address.
pub fn process_number() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(random)
}

/// The identity of a coordinator in this process on these addresses.
pub(super) fn instance(addresses: &[SocketAddr]) -> CoordinatorInstance {
    static INCARNATION: OnceLock<u64> = OnceLock::new();
    CoordinatorInstance {
        process: process_number(),
        instance_id: instance_id(addresses),
        incarnation: *INCARNATION.get_or_init(random),
    }
}

/// A digest that only one listener at a time can have: boot id, network namespace and addresses. Two network namespaces, or
/// two machines, may have the same addresses. The number of a namespace may be reused, but only once all its processes have
/// ended (`docs/decisions/0031-the-end-of-the-hosts-process-is-proven.md`).
fn instance_id(addresses: &[SocketAddr]) -> Option<u64> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/net").ok()?;
    let mut addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    addresses.sort();
    let text = format!("{} {} {}", boot.trim(), namespace.display(), addresses.join(" "));
    // FNV-1a: the same in every build.
    let digest = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    Some(text.bytes().fold(0xcbf2_9ce4_8422_2325, digest))
}

/// A random number from the system, by way of the standard library's randomly keyed hasher.
fn random() -> u64 {
    RandomState::new().hash_one(process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_started_anew_at_the_same_address_has_the_same_instance_id() {
        let at = |address: ([u8; 4], u16)| SocketAddr::from(address);
        let here = instance(&[at(([127, 0, 0, 1], 29400))]);
        assert_eq!(here, instance(&[at(([127, 0, 0, 1], 29400))]));
        let elsewhere = [at(([127, 0, 0, 2], 29400)), at(([127, 0, 0, 1], 1))];
        assert!(
            here.instance_id.is_some()
                && elsewhere.iter().all(|other| instance(&[*other]).instance_id != here.instance_id)
        );
    }
}
