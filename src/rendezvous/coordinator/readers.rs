//! Who may read how a job does: one rule for observers, pages and metrics.
//!
//! Where peers prove themselves, what they have proven decides instead, and HTTP, which carries no proof, shows neither.

use std::net::IpAddr;

use super::machine::Machine;

/// Who may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Readers {
    /// The coordinator's user, and root, on its machine.
    Loopback,
    /// And whoever connects from an address of a node of the job.
    #[default]
    Members,
    /// Everybody.
    All,
    /// Nobody.
    Nobody,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    /// The coordinator's user, or root, on its machine.
    Ours,
    /// Another user of its machine.
    OtherUser,
    /// Somebody on another machine.
    Elsewhere(IpAddr),
}

/// What else to do, whoever was refused.
const WAYS: &str = "ask as its user on the coordinator's node, or on a node of the running job; on the coordinator's node, \
                    ELASTIC_RS_HTTP=metrics lets everybody read metrics alone, and ELASTIC_RS_HTTP=all all there is; or protect the job \
                    by a token (elastic-rs token new), with which `elastic-rs` asks from anywhere, and HTTP nowhere";

/// Why this one may not read this run, or all runs if none is named. `None`: it may.
pub fn refusal(asker: Asker, readers: Readers, run_id: Option<&str>, machine: &Machine) -> Option<String> {
    let is_member = |address: IpAddr| match run_id {
        Some(run_id) => machine.run(run_id).is_some_and(|run| run.roster().has_node_at(address)),
        None => {
            // A run that has ended, or that an unauthenticated peer has opened and left, has none to ask from.
            let runs = machine.run_ids().filter_map(|run_id| machine.run(run_id));
            let mut runs = runs.filter(|run| run.connected() > 0).peekable();
            runs.peek().is_some() && runs.all(|run| run.roster().has_node_at(address))
        }
    };
    let who = match (readers, asker) {
        (Readers::All, _) | (Readers::Loopback | Readers::Members, Asker::Ours) => return None,
        (Readers::Members, Asker::Elsewhere(address)) if is_member(address) => return None,
        (Readers::Loopback, _) => {
            "only the coordinator's user may read its jobs, on its node (ELASTIC_RS_HTTP=loopback)".to_owned()
        }
        (Readers::Nobody, _) => "this coordinator serves its jobs to nobody that way (ELASTIC_RS_HTTP=off)".to_owned(),
        (Readers::Members, Asker::Elsewhere(address)) => match run_id {
            Some(run_id) => format!("{address} is no address of a node of the run `{run_id}`"),
            None => format!("{address} is no address of a node of every run here (name one: --run-id)"),
        },
        (Readers::Members, _) => "another user of the coordinator's node may not read its jobs".to_owned(),
    };
    Some(format!("{who}: {WAYS}"))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::rendezvous::messages::message::{Hello, NodeId};
    use crate::rendezvous::messages::settings::Settings;
    use crate::rendezvous::run::{Ends, SessionId};

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// A coordinator of two jobs, `one` on the hosts 1 and 2, `other` on 2 and 3.
    fn machine() -> Machine {
        let mut machine = Machine::new();
        for (number, (run, host)) in [("one", 1), ("one", 2), ("other", 2), ("other", 3)].into_iter().enumerate() {
            let (id, name) = (NodeId(number as u128 + 1), format!("node{host}:{number}"));
            let ends = Ends { peer: address(host), local: address(1) };
            let hello = Hello::new(run, id, name, Settings::new(2, 2));
            machine.on_hello(SessionId(number as u64 + 1), hello, ends, Instant::now());
        }
        machine
    }

    #[test]
    fn a_job_is_read_at_the_coordinator_and_on_its_own_nodes() {
        use Readers::{All, Loopback, Members, Nobody};
        let mut machine = machine();
        let may = |asker, readers, run, machine: &Machine| refusal(asker, readers, run, machine).is_none();
        for run in [None, Some("one"), Some("third")] {
            assert!(may(Asker::Ours, Members, run, &machine) && may(Asker::Ours, Loopback, run, &machine));
            assert!(!may(Asker::OtherUser, Members, run, &machine) && !may(Asker::OtherUser, Loopback, run, &machine));
            for asker in [Asker::Ours, Asker::OtherUser, Asker::Elsewhere(address(9))] {
                assert!(may(asker, All, run, &machine) && !may(asker, Nobody, run, &machine));
            }
        }
        for (host, run, expected) in [
            (1, Some("one"), true),
            (1, Some("other"), false),
            (2, Some("one"), true),
            (2, Some("other"), true),
            (9, Some("one"), false),
            (1, Some("third"), false),
            (1, None, false),
            (2, None, true),
            (9, None, false),
        ] {
            let asker = Asker::Elsewhere(address(host));
            assert_eq!(may(asker, Members, run, &machine), expected, "{host} {run:?}");
            assert!(!may(asker, Loopback, run, &machine));
        }
        assert!(!may(Asker::Elsewhere(address(1)), Members, None, &Machine::new()), "a coordinator without jobs");
        // A node that has gone is none of the job any more, and a job without nodes keeps nobody from reading the list.
        machine.on_disconnected(SessionId(1), Instant::now());
        assert!(!may(Asker::Elsewhere(address(3)), Members, None, &machine));
        machine.on_disconnected(SessionId(2), Instant::now());
        assert!(may(Asker::Elsewhere(address(3)), Members, None, &machine));
        assert!(!may(Asker::Elsewhere(address(1)), Members, Some("one"), &machine));
    }

    #[test]
    fn whoever_is_refused_gets_all_ways() {
        let machine = machine();
        for (asker, readers, who) in [
            (Asker::Elsewhere(address(9)), Readers::Members, "10.0.0.9 is no address of a node of the run `one`: "),
            (Asker::OtherUser, Readers::Members, "another user of the coordinator's node"),
            (Asker::Elsewhere(address(1)), Readers::Loopback, "ELASTIC_RS_HTTP=loopback"),
        ] {
            let why = refusal(asker, readers, Some("one"), &machine).unwrap();
            assert!(why.contains(who), "{why}");
            for way in [
                "on a node of the running job",
                "ELASTIC_RS_HTTP=metrics",
                "ELASTIC_RS_HTTP=all",
                "elastic-rs token new",
            ] {
                assert!(why.contains(way), "{why}");
            }
        }
    }
}
