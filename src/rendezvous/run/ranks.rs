//! Assignment of ranks to nodes and workers. Pure functions over names and numbers.
//!
//! PyTorch sorts `(address, pid)` as text in every round. There `node10` comes before `node9`, and one new node may change the ranks
//! of all others. Here survivors keep their ranks: see [`assign`].

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::rendezvous::messages::message::{JoinWorkers, WorkerRanks};

/// A member of the next round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate<K> {
    /// The caller's key, which [`assign`] returns.
    pub key: K,
    /// Rank in the last round. `None` for a newcomer.
    pub last_rank: Option<u32>,
    /// Rank that the user asked for. Orders newcomers.
    pub node_rank: Option<u32>,
    /// Address. Orders newcomers with equal `node_rank` or none.
    pub addr: String,
}

/// Order the candidates by their new ranks: index 0 is rank 0.
///
/// Survivors keep their ranks, and newcomers fill the holes, the lowest first. Rank 0 is a survivor if there is one: if the old
/// rank 0 is gone, the lowest-ranked survivor gets it. Remaining holes close up in order. Newcomers are ordered by `node_rank`
/// where given, then by natural order of addresses, then by their order in `candidates`.
pub fn assign<K>(candidates: Vec<Candidate<K>>) -> Vec<K> {
    let (mut survivors, mut newcomers): (Vec<_>, Vec<_>) = candidates.into_iter().partition(|c| c.last_rank.is_some());
    survivors.sort_by_key(|c| c.last_rank);
    newcomers.sort_by(|a, b| {
        let asked = |c: &Candidate<K>| c.node_rank.unwrap_or(u32::MAX);
        asked(a).cmp(&asked(b)).then_with(|| natural_order(&a.addr, &b.addr))
    });
    if let Some(first) = survivors.first_mut() {
        first.last_rank = Some(0);
    }

    let mut ordered = Vec::with_capacity(survivors.len() + newcomers.len());
    let mut newcomers = newcomers.into_iter();
    for survivor in survivors {
        let place = survivor.last_rank.map_or(0, |rank| rank as usize);
        while ordered.len() < place {
            let Some(newcomer) = newcomers.next() else { break };
            ordered.push(newcomer.key);
        }
        ordered.push(survivor.key);
    }
    ordered.extend(newcomers.map(|c| c.key));
    ordered
}

/// Assign ranks to workers. `nodes` is in the order of the nodes' ranks; a node's workers have consecutive ranks.
///
/// The result is that of `_assign_worker_ranks` in `torch/distributed/elastic/agent/server/api.py` (2.15), which sends every node's
/// role through the store. Sums saturate at 32 bits.
pub fn assign_workers(nodes: &[JoinWorkers]) -> Vec<WorkerRanks> {
    let (mut world_size, mut of_role) = (0_u32, HashMap::<&str, u32>::new());
    let mut first = Vec::with_capacity(nodes.len());
    for JoinWorkers { role, local_world_size, .. } in nodes {
        let role_size = of_role.entry(role).or_default();
        first.push((world_size, *role_size));
        world_size = world_size.saturating_add(*local_world_size);
        *role_size = role_size.saturating_add(*local_world_size);
    }
    let with_sizes = |(node, (first_rank, first_role_rank)): (&JoinWorkers, (u32, u32))| WorkerRanks {
        first_rank,
        world_size,
        first_role_rank,
        role_world_size: of_role.get(node.role.as_str()).copied().unwrap_or_default(),
    };
    nodes.iter().zip(first).map(with_sizes).collect()
}

/// Compare texts in natural order: runs of digits by value, all else as text. `node9` comes before `node10`.
pub fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.as_bytes(), b.as_bytes());
    loop {
        match (a.first(), b.first()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                let (number_a, rest_a) = split_number(a);
                let (number_b, rest_b) = split_number(b);
                let order = number_a.len().cmp(&number_b.len()).then_with(|| number_a.cmp(number_b));
                if order != Ordering::Equal {
                    return order;
                }
                (a, b) = (rest_a, rest_b);
            }
            (Some(x), Some(y)) if x != y => return x.cmp(y),
            _ => (a, b) = (&a[1..], &b[1..]),
        }
    }
}

/// Split a text into its leading digits, without leading zeros, and the rest.
fn split_number(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    let zeros = number.iter().position(|byte| *byte != b'0').unwrap_or(number.len());
    (&number[zeros..], rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(key: &'static str, last_rank: Option<u32>) -> Candidate<&'static str> {
        Candidate { key, last_rank, node_rank: None, addr: key.into() }
    }

    #[test]
    fn numbers_in_addresses_are_compared_by_value() {
        for (smaller, larger) in
            [("node9", "node10"), ("10.0.0.9", "10.0.0.100"), ("a", "a0"), ("n01", "n2"), ("a", "b"), ("n1a", "n1b")]
        {
            assert_eq!(natural_order(smaller, larger), Ordering::Less, "{smaller} {larger}");
            assert_eq!(natural_order(larger, smaller), Ordering::Greater, "{smaller} {larger}");
        }
        assert_eq!(natural_order("n07", "n7"), Ordering::Equal);
    }

    #[test]
    fn the_first_round_follows_asked_ranks_then_addresses() {
        let mut b = candidate("node9", None);
        b.node_rank = Some(0);
        assert_eq!(assign(vec![candidate("node10", None), candidate("node2", None), b]), ["node9", "node2", "node10"]);
    }

    #[test]
    fn survivors_keep_their_ranks_whatever_the_newcomers_address() {
        // #191190: PyTorch moved rank 0 to the newcomer because `127.0.0.100` sorts before `127.0.0.2`.
        let round =
            vec![candidate("127.0.0.100", None), candidate("127.0.0.2", Some(0)), candidate("127.0.0.3", Some(1))];
        assert_eq!(assign(round), ["127.0.0.2", "127.0.0.3", "127.0.0.100"]);
    }

    #[test]
    fn workers_are_ranked_by_node_and_within_their_role() {
        let node = |role: &str, local_world_size| JoinWorkers::new(role, local_world_size);
        let ranks = assign_workers(&[node("trainer", 2), node("reader", 1), node("trainer", 3)]);
        let numbers = ranks.iter().map(|r| (r.first_rank, r.world_size, r.first_role_rank, r.role_world_size));
        assert_eq!(numbers.collect::<Vec<_>>(), [(0, 6, 0, 5), (2, 6, 0, 1), (3, 6, 2, 5)]);
        assert_eq!(assign_workers(&[]), []);
    }

    #[test]
    fn newcomers_fill_holes() {
        let round = vec![candidate("a", Some(0)), candidate("c", Some(2)), candidate("x", None)];
        assert_eq!(assign(round), ["a", "x", "c"]);
    }

    #[test]
    fn holes_that_remain_close_up_in_order() {
        let round =
            vec![candidate("a", Some(0)), candidate("d", Some(3)), candidate("f", Some(5)), candidate("x", None)];
        assert_eq!(assign(round), ["a", "x", "d", "f"]);
    }

    #[test]
    fn the_lowest_survivor_becomes_rank_0_and_a_newcomer_never_does() {
        let round = vec![candidate("x", None), candidate("b", Some(1)), candidate("c", Some(2))];
        assert_eq!(assign(round), ["b", "x", "c"]);
    }
}
