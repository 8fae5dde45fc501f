//! The CPUs to which `--numa-binding` binds a worker: those near its GPU.
//!
//! The rules are PyTorch's (`torch/numa/binding.py`, 2.15), whose device of a worker is that of its local rank. Where there is no GPU,
//! workers are spread over the NUMA nodes instead, each of which gets as many, in order; PyTorch fails there.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// What a worker is bound to: the CPUs of which part of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// The NUMA node of the worker's GPU.
    Node,
    /// The socket of that node.
    Socket,
    /// An equal share of the physical cores of that node, which no other worker has.
    Exclusive,
    /// The CPUs of that node which share a cache of the last level; another one for each worker, as long as there are.
    CoreComplex,
}

impl FromStr for Binding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "node" => Ok(Self::Node),
            "socket" => Ok(Self::Socket),
            "exclusive" => Ok(Self::Exclusive),
            "core-complex" => Ok(Self::CoreComplex),
            _ => Err(format!("a NUMA binding is `{text}`, must be node, socket, exclusive or core-complex")),
        }
    }
}

/// A CPU (a hardware thread) on which this process may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub number: u32,
    /// Its NUMA node.
    pub node: u32,
    /// Its socket.
    pub socket: u32,
    /// The lowest number of a CPU of the same physical core.
    pub core: u32,
    /// The lowest number of a CPU that shares its cache of the last level.
    pub cache: u32,
}

/// The CPUs of each worker by local rank, none for a worker that is not bound; and what to say about it, once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// Numbers of CPUs, in ascending order.
    pub cpus: Vec<Vec<u32>>,
    /// Why some worker is bound otherwise than was asked for.
    pub notes: Vec<String>,
}

/// Binds this many workers. `gpus` are the NUMA nodes of the GPUs that they see, in their order.
pub fn bind(binding: Binding, workers: usize, gpus: &[u32], cpus: &[Cpu]) -> Bound {
    let mut nodes: Vec<u32> = cpus.iter().map(|cpu| cpu.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let mut bound = Bound::default();
    if nodes.is_empty() {
        bound.notes.push("no CPU of this process is known, so no worker is bound".to_owned());
        bound.cpus = vec![Vec::new(); workers];
        return bound;
    }
    let count = workers.max(gpus.len());
    let numa_nodes: Vec<u32> = match gpus {
        [] => (0..count).map(|worker| nodes[worker * nodes.len() / count]).collect(),
        // As far as there are GPUs. Workers that have none share them.
        _ => (0..count).map(|worker| gpus[worker % gpus.len()]).collect(),
    };
    for worker in 0..workers {
        let near = near(binding, worker, &numa_nodes, cpus);
        bound.cpus.push(near.unwrap_or_else(|note| {
            if !bound.notes.contains(&note.text) {
                bound.notes.push(note.text);
            }
            note.instead
        }));
    }
    bound
}

/// A worker that cannot be bound as was asked for.
struct Note {
    text: String,
    instead: Vec<u32>,
}

fn near(binding: Binding, worker: usize, numa_nodes: &[u32], cpus: &[Cpu]) -> Result<Vec<u32>, Note> {
    let numa_node = numa_nodes[worker];
    let node: Vec<Cpu> = cpus.iter().filter(|cpu| cpu.node == numa_node).copied().collect();
    let Some(first) = node.iter().min_by_key(|cpu| cpu.number) else {
        let text = format!(
            "NUMA node {numa_node} has no CPU that this process may use, so the workers whose GPUs are there are not bound"
        );
        return Err(Note { text, instead: Vec::new() });
    };
    // Of the GPUs near this node, or of the workers, which number this one has.
    let (nth, of) = (count(numa_node, &numa_nodes[..worker]), count(numa_node, numa_nodes));
    Ok(match binding {
        Binding::Node => numbers(&node),
        Binding::Socket => numbers(cpus.iter().filter(|cpu| cpu.socket == first.socket)),
        Binding::Exclusive => {
            let cores = grouped(&node, |cpu| cpu.core);
            let (each, more) = (cores.len() / of, cores.len() % of);
            if each == 0 {
                let text = format!(
                    "NUMA node {numa_node} has {} physical cores for {of} workers, so some share one",
                    cores.len()
                );
                return Err(Note { text, instead: cores[nth % cores.len()].clone() });
            }
            let begin = nth * each + nth.min(more);
            let end = begin + each + usize::from(nth < more);
            numbers_of(cores[begin..end].concat())
        }
        Binding::CoreComplex => {
            let mut caches = grouped(&node, |cpu| cpu.cache);
            caches.sort_by_key(|cpus| std::cmp::Reverse(cpus.len()));
            caches.swap_remove(nth % caches.len())
        }
    })
}

fn count(numa_node: u32, numa_nodes: &[u32]) -> usize {
    numa_nodes.iter().filter(|it| **it == numa_node).count()
}

/// The numbers of the CPUs with the same key, in the order of keys.
fn grouped(cpus: &[Cpu], key: impl Fn(&Cpu) -> u32) -> Vec<Vec<u32>> {
    let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for cpu in cpus {
        groups.entry(key(cpu)).or_default().push(cpu.number);
    }
    groups.into_values().map(numbers_of).collect()
}

fn numbers<'a>(cpus: impl IntoIterator<Item = &'a Cpu>) -> Vec<u32> {
    numbers_of(cpus.into_iter().map(|cpu| cpu.number).collect())
}

fn numbers_of(mut numbers: Vec<u32>) -> Vec<u32> {
    numbers.sort_unstable();
    numbers
}

/// Numbers as the kernel lists them, `0-3,8`. What is no number is left out.
pub fn listed(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        Some(first..=last.min(first.saturating_add(MOST_CPUS)))
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// More than any kernel is built for.
const MOST_CPUS: u32 = 1 << 16;

/// Numbers in the same form, for people.
pub fn as_list(numbers: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let range = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    let ranges: Vec<String> = ranges.iter().map(range).collect();
    ranges.join(",")
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worker = |(local_rank, cpus): (usize, &Vec<u32>)| {
            if cpus.is_empty() { format!("{local_rank}: all") } else { format!("{local_rank}: {}", as_list(cpus)) }
        };
        let workers: Vec<String> = self.cpus.iter().enumerate().map(worker).collect();
        f.write_str(&workers.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of two NUMA nodes of four cores with two threads. Threads of a core are 16 apart. Each two cores share a cache.
    fn machine() -> Vec<Cpu> {
        let cpu = |number: u32| {
            let core = number % 16;
            Cpu { number, node: core / 4, socket: core / 8, core, cache: core / 2 * 2 }
        };
        (0..32).map(cpu).collect()
    }

    fn lists(bound: &Bound) -> Vec<String> {
        bound.cpus.iter().map(|cpus| as_list(cpus)).collect()
    }

    #[test]
    fn a_worker_is_bound_near_its_gpu() {
        for (binding, expected) in [
            (Binding::Node, ["12-15,28-31", "12-15,28-31", "0-3,16-19", "4-7,20-23"]),
            (Binding::Socket, ["8-15,24-31", "8-15,24-31", "0-7,16-23", "0-7,16-23"]),
            (Binding::Exclusive, ["12-13,28-29", "14-15,30-31", "0-3,16-19", "4-7,20-23"]),
            (Binding::CoreComplex, ["12-13,28-29", "14-15,30-31", "0-1,16-17", "4-5,20-21"]),
        ] {
            let bound = bind(binding, 4, &[3, 3, 0, 1], &machine());
            assert_eq!((lists(&bound), bound.notes), (expected.map(str::to_owned).to_vec(), vec![]), "{binding:?}");
        }
    }

    #[test]
    fn without_gpus_workers_are_spread_over_the_nodes() {
        let bound = bind(Binding::Node, 8, &[], &machine());
        assert_eq!(lists(&bound)[..3], ["0-3,16-19", "0-3,16-19", "4-7,20-23"]);
        assert_eq!(lists(&bound)[7], "12-15,28-31");
        assert_eq!(lists(&bind(Binding::Exclusive, 8, &[], &machine()))[..2], ["0-1,16-17", "2-3,18-19"]);
        let one = bind(Binding::Node, 1, &[], &machine());
        assert_eq!((lists(&one), one.notes.len()), (vec!["0-3,16-19".to_owned()], 0));
    }

    #[test]
    fn exclusive_shares_do_not_overlap_and_use_every_core() {
        for workers in 1..=16 {
            let bound = bind(Binding::Exclusive, workers, &[], &machine());
            let mut all = bound.cpus.concat();
            let given = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!((all.len(), bound.notes.len()), (given, 0), "{workers}");
            assert!(bound.cpus.iter().all(|cpus| cpus.len() >= 2 && cpus.len() % 2 == 0), "{workers}: {bound}");
            assert!(workers < 4 || given == 32, "{workers}: {bound}");
        }
    }

    #[test]
    fn more_workers_than_cores_share_them_and_are_said_once() {
        let bound = bind(Binding::Exclusive, 6, &[0; 6], &machine());
        assert_eq!(lists(&bound), ["0,16", "1,17", "2,18", "3,19", "0,16", "1,17"]);
        assert_eq!(bound.notes, ["NUMA node 0 has 4 physical cores for 6 workers, so some share one"]);
    }

    #[test]
    fn workers_beyond_the_gpus_share_them() {
        assert_eq!(lists(&bind(Binding::Node, 3, &[1, 2], &machine())), ["4-7,20-23", "8-11,24-27", "4-7,20-23"]);
    }

    #[test]
    fn a_node_without_an_allowed_cpu_binds_nobody() {
        let allowed: Vec<Cpu> = machine().into_iter().filter(|cpu| cpu.node == 0).collect();
        let bound = bind(Binding::Node, 3, &[0, 2, 2], &allowed);
        assert_eq!(bound.to_string(), "0: 0-3,16-19; 1: all; 2: all");
        assert_eq!(bound.notes.len(), 1, "{:?}", bound.notes);
        let nothing = bind(Binding::Node, 2, &[], &[]);
        assert_eq!((nothing.cpus, nothing.notes.len()), (vec![vec![], vec![]], 1));
    }

    #[test]
    fn lists_of_numbers_are_read_as_the_kernel_writes_them() {
        assert_eq!(listed("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        assert_eq!(as_list(&listed("0-2,8,10-11")), "0-2,8,10-11");
        assert!(listed("").is_empty() && listed("x,-").is_empty() && listed("3-1").is_empty());
        assert!(listed("0-4294967295").len() as u32 <= MOST_CPUS + 1);
    }
}
