//! A node's backend, a coordinator or a shared cell: what differs between them, and why one is out of reach, in words. Part of [`super`].

use std::time::Duration;

use super::link::Link;
use super::view::JoinError;

/// A node's backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    /// A coordinator. An answer renews the node's lease.
    Coordinator {
        /// Its address, as `host:port`, or those at which it may be, with commas.
        endpoint: String,
        /// How long a welcomed node continues while the coordinator is out of reach.
        timeout: Duration,
    },
    /// A cell that all nodes share. A write of this node renews its lease: the transport calls `NodeMachine::renew`. A backend that
    /// fails for one lease ends a pending join. By then a running node has fenced itself.
    Cell,
    /// The cell that etcd is. The node's lease there renews its lease here.
    Etcd {
        /// Its name in messages, with its endpoints.
        name: String,
        /// How long a welcomed node continues while etcd is out of reach.
        timeout: Duration,
    },
}

impl Backend {
    /// Its name in messages, with the endpoint.
    pub fn name(&self) -> String {
        match self {
            Self::Coordinator { endpoint, .. } => format!("the coordinator at {endpoint}"),
            Self::Cell => "the backend".to_owned(),
            Self::Etcd { name, .. } => name.clone(),
        }
    }

    /// Its address in messages, without the word `coordinator`.
    pub fn address(&self) -> &str {
        match self {
            Self::Coordinator { endpoint, .. } => endpoint,
            Self::Cell => "the backend",
            Self::Etcd { name, .. } => name,
        }
    }

    /// The coordinator, as `host:port`. `None` for a cell: etcd has several members, and of another backend only its owner knows.
    pub fn endpoint(&self) -> Option<String> {
        match self {
            Self::Coordinator { endpoint, .. } => Some(endpoint.clone()),
            Self::Cell | Self::Etcd { .. } => None,
        }
    }

    /// The place of an endpoint in the list of those at which the coordinator may be.
    pub fn place_of(&self, endpoint: &str) -> Option<usize> {
        match self {
            Self::Coordinator { endpoint: all, .. } => all.split(',').position(|one| one == endpoint),
            Self::Cell | Self::Etcd { .. } => None,
        }
    }

    /// The error of a connection with it that failed, after this time if the node had waited.
    pub fn unreachable(&self, text: String, elapsed: Option<Duration>) -> JoinError {
        JoinError::Connection { text, endpoint: self.endpoint(), elapsed }
    }

    /// How long a welcomed node continues while it is out of reach. `None`: no limit, except for a pending join.
    pub fn timeout(&self) -> Option<Duration> {
        match self {
            Self::Coordinator { timeout, .. } | Self::Etcd { timeout, .. } => Some(*timeout),
            Self::Cell => None,
        }
    }

    /// How long it remembers a run that has ended, in words.
    pub fn memory(&self) -> &'static str {
        match self {
            Self::Coordinator { .. } => "a coordinator remembers that for an hour",
            Self::Cell => "the backend keeps that",
            Self::Etcd { .. } => "etcd keeps that for two hours, or until somebody deletes the run's keys",
        }
    }

    /// Time after which a waiting node first logs what it waits for. A coordinator's host may start a little later than other nodes;
    /// etcd was there before.
    pub fn silent_for(&self) -> Duration {
        match self {
            Self::Coordinator { .. } | Self::Cell => Duration::from_secs(3),
            Self::Etcd { .. } => Duration::from_secs(1),
        }
    }

    /// Whether it is a coordinator. A coordinator's answer renews the node's lease.
    pub fn is_coordinator(&self) -> bool {
        matches!(self, Self::Coordinator { .. })
    }

    /// Explain why it is out of reach, in a sentence that names it. `stopped`: why its process has ended, if it has reported that.
    pub fn why_out_of_reach(&self, link: &Link, stopped: Option<&str>) -> String {
        let (name, error) = (self.name(), link.last_error());
        match (self, stopped) {
            (Self::Cell, _) => format!("{name} fails: {error}"),
            (Self::Etcd { .. }, _) if link.is_first_try() => format!("{name} has not answered yet"),
            // The error names the members that were tried.
            (Self::Etcd { .. }, _) => error.to_owned(),
            (Self::Coordinator { .. }, Some(why)) => {
                format!("{name} was stopped: {why}; no world can form until a coordinator runs there again")
            }
            (Self::Coordinator { .. }, None) if link.was_welcomed() || link.was_unanswered() || link.is_first_try() => {
                format!("{name} is out of reach: {error}")
            }
            (Self::Coordinator { .. }, None) => format!(
                "{name} is out of reach: {error}; nobody has answered there yet, so either the node that hosts it has not started, or \
                 the job is over; behind a Service or NAT, that node needs --rdzv-conf is_host=1"
            ),
        }
    }

    /// Explain why this node stops its workers. `away`: the time since its `lease` was last renewed.
    pub fn why_fenced(&self, link: &Link, lease: Duration, away: Duration) -> String {
        let error = link.last_error();
        match self {
            Self::Coordinator { .. } => format!(
                "this node has been cut off from {} for {away:.1?} (its lease is {lease:.1?}): {}; it stops its workers, \
                 because the other nodes may go on without it (on_partition=stop)",
                self.name(),
                if link.is_up() { "its last messages were not answered" } else { error }
            ),
            Self::Cell => format!("this node could not renew its lease of {lease:.1?} in the backend: {error}"),
            Self::Etcd { name, .. } => format!(
                "this node could not renew its lease of {lease:.1?} at {name} for {away:.1?}: {error}; it stops its workers, \
                 because the other nodes may go on without it (on_partition=stop)"
            ),
        }
    }
}

/// Explain why the backend is out of reach, for an error that names it already.
pub(super) fn why_away(link: &Link, stopped: Option<&str>) -> String {
    let error = link.last_error();
    match stopped {
        None => error.to_owned(),
        Some(why) => format!("it was stopped ({why}), and has not come back: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn each_backend_explains_its_absence_in_its_own_words() {
        let timeout = Duration::from_secs(300);
        let coordinator = Backend::Coordinator { endpoint: "host:1".into(), timeout };
        let etcd = Backend::Etcd { name: "etcd at e:2".into(), timeout };
        let now = Instant::now();
        let new = Link::new(7, now);
        let mut tried = new.clone();
        tried.on_lost("e:2: connection refused".into(), now);
        let mut welcomed = tried.clone();
        welcomed.on_connected(Duration::from_secs(5), now);
        welcomed.on_welcome(Duration::from_secs(5));
        welcomed.on_lost("reset".into(), now);
        for (backend, link, stopped, text) in [
            (&coordinator, &new, None, "the coordinator at host:1 is out of reach: no answer yet"),
            (
                &coordinator,
                &tried,
                None,
                "nobody has answered there yet, so either the node that hosts it has not started, or the job",
            ),
            (&coordinator, &welcomed, None, "the coordinator at host:1 is out of reach: reset"),
            (
                &coordinator,
                &welcomed,
                Some("SIGTERM"),
                "the coordinator at host:1 was stopped: SIGTERM; no world can form",
            ),
            (&Backend::Cell, &tried, None, "the backend fails: e:2: connection refused"),
            (&etcd, &new, None, "etcd at e:2 has not answered yet"),
            (&etcd, &tried, None, "e:2: connection refused"),
        ] {
            let found = backend.why_out_of_reach(link, stopped);
            assert!(found.contains(text), "{found}");
        }
        assert_eq!(why_away(&welcomed, Some("SIGTERM")), "it was stopped (SIGTERM), and has not come back: reset");
    }
}
