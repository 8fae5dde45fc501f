//! The CPUs and PCI devices of this machine, as `/sys` describes them. What it lacks is taken to be one node, one socket, one cache.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::thread::{CpuSet, sched_getaffinity};

use super::numa::{Cpu, listed};

/// Where it is.
pub const ROOT: &str = "/sys";

/// The CPUs of these numbers, on whichever NUMA nodes they are.
pub fn cpus(root: &Path, allowed: &[u32]) -> Vec<Cpu> {
    let lowest = allowed.iter().copied().min().unwrap_or_default();
    let cpu = |node, number| cpu(root, node, number, lowest);
    let mut cpus: Vec<Cpu> = Vec::new();
    for node in listed(&text(&root.join("devices/system/node/online"))) {
        let there = listed(&text(&root.join(format!("devices/system/node/node{node}/cpulist"))));
        cpus.extend(there.into_iter().filter(|number| allowed.contains(number)).map(|number| cpu(node, number)));
    }
    if cpus.is_empty() {
        // A kernel without NUMA.
        cpus.extend(allowed.iter().map(|number| cpu(0, *number)));
    }
    cpus
}

/// The NUMA node of a PCI device. Where there is only one, the kernel may say -1, which is node 0.
pub fn node_of(root: &Path, address: &str) -> u32 {
    let text = text(&root.join("bus/pci/devices").join(address).join("numa_node"));
    text.trim().parse::<i64>().ok().and_then(|node| u32::try_from(node).ok()).unwrap_or(0)
}

/// `cache` is that of CPUs whose caches are not described.
fn cpu(root: &Path, node: u32, number: u32, cache: u32) -> Cpu {
    let folder = root.join(format!("devices/system/cpu/cpu{number}"));
    let lowest = |path: &Path| listed(&text(path)).into_iter().min();
    let socket = text(&folder.join("topology/physical_package_id")).trim().parse::<i64>();
    Cpu {
        number,
        node,
        socket: socket.ok().and_then(|socket| u32::try_from(socket).ok()).unwrap_or(0),
        core: lowest(&folder.join("topology/thread_siblings_list")).unwrap_or(number),
        cache: last_cache(&folder.join("cache"))
            .and_then(|cache| lowest(&cache.join("shared_cpu_list")))
            .unwrap_or(cache),
    }
}

/// The cache of the highest level, of data.
fn last_cache(folder: &Path) -> Option<PathBuf> {
    let caches = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let of_data = caches.filter(|cache| matches!(text(&cache.join("type")).trim(), "Unified" | "Data"));
    of_data.max_by_key(|cache| text(&cache.join("level")).trim().parse::<u32>().unwrap_or_default())
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The numbers of the CPUs on which this thread may run. Empty if the kernel does not say, or has more than 1,024.
pub fn allowed() -> Vec<u32> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|number| set.is_set(*number)).filter_map(|number| u32::try_from(number).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_does_not_say_is_one_node_one_socket_one_cache() {
        let allowed = allowed();
        let cpus = cpus(Path::new("/nowhere"), &allowed);
        assert_eq!(cpus.iter().map(|cpu| cpu.number).collect::<Vec<_>>(), allowed);
        let lowest = allowed[0];
        assert!(cpus.iter().all(|cpu| (cpu.node, cpu.socket, cpu.core, cpu.cache) == (0, 0, cpu.number, lowest)));
        assert_eq!(node_of(Path::new("/nowhere"), "0000:01:00.0"), 0);
    }

    #[test]
    fn this_machine_is_read() {
        let cpus = cpus(Path::new(ROOT), &allowed());
        let mut numbers: Vec<u32> = cpus.iter().map(|cpu| cpu.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, allowed(), "each allowed CPU is of one node");
    }
}
