//! Who the members are, and whether the cluster can be proven to have no leader.
//!
//! A cluster without a leader ends no lease, and whoever leads it next gives every lease its whole time again. So a node that learns
//! that *no* member knows a leader may keep its lease from the moment it began to ask.
//!
//! The proof must cover every voting member. One that answers says so itself. One whose host refuses the connection is taken to be
//! dead only if this client has met that very member at that address before: the addresses that members advertise may be those
//! of other machines (`localhost`). A time-out proves nothing.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::connection::Connection;
use super::endpoints::{Address, parse_endpoints};
use super::messages::{MemberMessage, StatusResponse};
use super::version::known_problems;

/// Most addresses that a survey asks. Clusters have 3, 5 or 7 members. A voter that is not asked is not proven to be without a leader.
const ADDRESSES_LIMIT: usize = 64;

/// What a client knows about the cluster.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    /// The cluster's id, and the member that reported it.
    id: Option<(u64, String)>,
    /// The voting members, by id.
    voters: BTreeMap<u64, Vec<Address>>,
    /// Which member was met at an address. `None`: different ones, as behind a load balancer.
    met: BTreeMap<Address, Option<u64>>,
}

/// Versions whose problems this process has logged.
static WARNED: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// A cluster has one version, or two while it is upgraded.
const WARNED_LIMIT: usize = 16;

impl Cluster {
    /// Check that a member belongs to the cluster of the first one. Returns that one's address if not.
    pub fn check_cluster(&mut self, id: u64) -> Result<(), String> {
        match &self.id {
            Some((known, member)) if *known != id => Err(member.clone()),
            _ => Ok(()),
        }
    }

    /// A member was connected to.
    pub fn learn(&mut self, connection: &Connection, version: &str, members: Vec<MemberMessage>) {
        self.id.get_or_insert_with(|| (connection.ids.0, connection.member.clone()));
        self.learn_members(members);
        let mut warned = WARNED.lock();
        if !warned.iter().any(|warned| warned == version) && warned.len() < WARNED_LIMIT {
            warned.push(version.to_owned());
            for problem in known_problems(version) {
                tracing::warn!("etcd at {} has version {version}: {problem}", connection.member);
            }
        }
    }

    pub fn learn_members(&mut self, members: Vec<MemberMessage>) {
        let voters = members.into_iter().filter(|member| !member.is_learner);
        let addresses = |urls: Vec<String>| {
            let parsed = urls.iter().filter_map(|url| parse_endpoints(url, None).ok());
            parsed.flat_map(|endpoints| endpoints.members).collect()
        };
        self.voters = voters.map(|member| (member.id, addresses(member.client_urls))).collect();
    }

    pub fn meet(&mut self, address: Address, id: u64) {
        let met = self.met.entry(address).or_insert(Some(id));
        if *met != Some(id) {
            *met = None;
        }
    }

    /// The addresses to ask: the client's endpoints, and those that the voters advertise.
    pub fn addresses(&self, endpoints: &[Address]) -> Vec<Address> {
        let mut all = endpoints.to_vec();
        all.extend(self.voters.values().flatten().cloned());
        all.sort();
        all.dedup();
        all.truncate(ADDRESSES_LIMIT);
        all
    }

    /// Whether every voter has been met at an address.
    pub fn has_met_all(&self) -> bool {
        self.voters.keys().all(|id| self.met.values().any(|met| *met == Some(*id)))
    }

    /// Whether these answers prove that no voter knows a leader.
    pub fn leaderless(&self, answers: &[(Address, Answer)]) -> bool {
        let no_leader = |id: u64| {
            let own = |answer: &Answer| matches!(answer, Answer::Status { id: other, .. } if *other == id);
            let mut statuses = answers.iter().filter(|(_, answer)| own(answer)).peekable();
            if statuses.peek().is_some() {
                return statuses.all(|(_, answer)| matches!(answer, Answer::Status { leader: 0, .. }));
            }
            let of = |address: &Address| self.met.get(address) == Some(&Some(id));
            let mut refusals = answers.iter().filter(|(address, _)| of(address)).peekable();
            refusals.peek().is_some() && refusals.all(|(_, answer)| matches!(answer, Answer::Refused))
        };
        !self.voters.is_empty() && self.voters.keys().all(|id| no_leader(*id))
    }
}

/// What came of asking at an address.
#[derive(Debug)]
pub(super) enum Answer {
    Status { id: u64, leader: u64 },
    Refused,
    Nothing,
}

impl From<&StatusResponse> for Answer {
    fn from(status: &StatusResponse) -> Self {
        let id = status.header.as_ref().map_or(0, |header| header.member_id);
        Self::Status { id, leader: status.leader }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> Address {
        ("h".to_owned(), port)
    }

    fn member(id: u64, url: &str, is_learner: bool) -> MemberMessage {
        MemberMessage { id, name: String::new(), client_urls: vec![url.to_owned()], is_learner }
    }

    fn cluster() -> Cluster {
        let mut cluster = Cluster::default();
        cluster.learn_members(vec![
            member(1, "http://h:1", false),
            member(2, "http://h:2", false),
            member(3, "http://localhost:2379", false),
            member(4, "http://h:4", true),
        ]);
        cluster.meet(address(1), 1);
        cluster.meet(address(2), 2);
        cluster
    }

    fn status(id: u64, leader: u64) -> Answer {
        Answer::Status { id, leader }
    }

    #[test]
    fn only_all_voters_together_prove_that_there_is_no_leader() {
        let cluster = cluster();
        let answers = |one, two, three| vec![(address(1), one), (address(2), two), (address(3), three)];
        // A learner (4) does not count.
        assert!(cluster.leaderless(&answers(status(1, 0), status(2, 0), status(3, 0))));
        assert!(cluster.leaderless(&answers(Answer::Refused, Answer::Refused, status(3, 0))));
        assert!(!cluster.leaderless(&answers(status(1, 0), status(2, 2), status(3, 0))));
        assert!(!cluster.leaderless(&answers(status(1, 0), Answer::Nothing, status(3, 0))));
        // Nobody has met the third at an address: a refusal proves nothing, at its own (`localhost`) neither.
        assert!(!cluster.leaderless(&answers(status(1, 0), status(2, 0), Answer::Refused)));
        let localhost = (("localhost".to_owned(), 2379), Answer::Refused);
        assert!(!cluster.leaderless(&[(address(1), status(1, 0)), (address(2), status(2, 0)), localhost]));
        // One member twice is one member.
        assert!(!cluster.leaderless(&answers(status(1, 0), status(2, 0), status(1, 0))));
        assert!(!Cluster::default().leaderless(&[]));
    }

    #[test]
    fn an_address_of_several_members_is_nobodys() {
        let mut cluster = cluster();
        cluster.meet(address(3), 3);
        assert!(cluster.has_met_all());
        let answers = [(address(1), status(1, 0)), (address(2), status(2, 0)), (address(3), Answer::Refused)];
        assert!(cluster.leaderless(&answers));
        cluster.meet(address(3), 1);
        assert!(!cluster.has_met_all() && !cluster.leaderless(&answers));
    }
}
