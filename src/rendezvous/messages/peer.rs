//! How the processes at the endpoints of a list introduce themselves to each other.

use serde::{Deserialize, Serialize};

use super::ids::NodeId;
use crate::wire::text::{NAME_LIMIT_BYTES, check, tidy, validate_run_id};

/// Most endpoints of a list.
pub const MOST_ENDPOINTS: usize = 7;

/// The first message of a connection from one such process to another. Answered by
/// [`CoordinatorMessage::Peer`](super::message::CoordinatorMessage::Peer), or by a rejection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerHello {
    /// The run.
    pub run_id: String,
    /// The list, as its user has given it.
    pub endpoints: Vec<String>,
    /// Which of them this process listens at, counted from 0.
    pub place: u32,
    /// The process. Drawn at random when it starts, so one that was started again is another.
    pub process: NodeId,
}

impl PeerHello {
    /// Check an introduction.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        validate_run_id(&self.run_id)?;
        check_list(&self.endpoints)?;
        match usize::try_from(self.place).is_ok_and(|place| place < self.endpoints.len()) {
            true => Ok(()),
            false => Err(format!("the place in the list is `{}`, must be below {}", self.place, self.endpoints.len())),
        }
    }

    /// Why a process that introduces itself so has no part in this one's run, if it has none.
    pub fn disagreement(&self, other: &Self) -> Option<String> {
        if self.run_id != other.run_id {
            let (ours, theirs) = (&self.run_id, tidy(&other.run_id));
            return Some(format!("the process here belongs to run `{ours}`, not to run `{theirs}`"));
        }
        if self.endpoints != other.endpoints {
            let (ours, theirs) = (self.endpoints.join(","), tidy(&other.endpoints.join(",")));
            return Some(format!(
                "the process here was given the endpoints `{ours}`, and the other one `{theirs}`: give all nodes the same --rdzv-endpoint"
            ));
        }
        (self.place == other.place).then(|| {
            let endpoint = self.endpoints.get(self.place as usize).map_or("", String::as_str);
            match self.process == other.process {
                true => format!("this process itself answers there, which is at {endpoint}: list each machine once"),
                false => format!("two processes are at the endpoint {endpoint}"),
            }
        })
    }
}

/// Check a list of endpoints.
///
/// # Errors
/// A sentence naming what is not allowed, and what is.
pub fn check_list(endpoints: &[String]) -> Result<(), String> {
    if !(2..=MOST_ENDPOINTS).contains(&endpoints.len()) {
        return Err(format!("the list has {} endpoints, must have from 2 to {MOST_ENDPOINTS}", endpoints.len()));
    }
    for (at, endpoint) in endpoints.iter().enumerate() {
        check("endpoint", endpoint, NAME_LIMIT_BYTES)?;
        if host_and_port(endpoint).is_none_or(|(host, port)| host.is_empty() || port == 0) {
            return Err(format!("the endpoint `{endpoint}` has no host or port, must be HOST:PORT"));
        }
        if endpoints[..at].contains(endpoint) {
            return Err(format!("the list has the endpoint `{endpoint}` twice, must have each once"));
        }
    }
    Ok(())
}

/// The host and the port of an endpoint: `HOST:PORT`, or `[IPV6]:PORT`.
pub fn host_and_port(endpoint: &str) -> Option<(&str, u16)> {
    let (host, port) = endpoint.rsplit_once(':')?;
    Some((host.trim_start_matches('[').trim_end_matches(']'), port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(endpoints: &[&str], place: u32) -> PeerHello {
        let endpoints = endpoints.iter().map(|it| (*it).to_owned()).collect();
        PeerHello { run_id: "job".to_owned(), endpoints, place, process: NodeId(u128::from(place)) }
    }

    #[test]
    fn endpoints_are_read() {
        for (endpoint, found) in [
            ("a.b:29400", Some(("a.b", 29400))),
            ("[::1]:7", Some(("::1", 7))),
            ("a", None),
            ("a:70000", None),
            ("", None),
        ] {
            assert_eq!(host_and_port(endpoint), found);
        }
    }

    #[test]
    fn introductions_are_checked() {
        for (endpoints, place, why) in [
            (&["a:1", "b:1"][..], 1, ""),
            (&["a:1"], 0, "the list has 1 endpoints, must have from 2 to 7"),
            (&["a:1", "b:1"], 2, "the place in the list is `2`, must be below 2"),
            (&["a:1", "b"], 0, "the endpoint `b` has no host or port, must be HOST:PORT"),
            (&["a:1", "b:1", "a:1"], 2, "the list has the endpoint `a:1` twice, must have each once"),
        ] {
            assert_eq!(hello(endpoints, place).validate().err().unwrap_or_default(), why);
        }
        let many = ["a:1", "b:1", "c:1", "d:1", "e:1", "f:1", "g:1", "h:1"];
        assert!(hello(&many, 0).validate().is_err());
    }

    #[test]
    fn processes_of_other_lists_have_no_part() {
        let ours = hello(&["a:1", "b:1"], 0);
        assert_eq!(ours.disagreement(&hello(&["a:1", "b:1"], 1)), None);
        let why = ours.disagreement(&hello(&["a:1", "c:1"], 1)).unwrap();
        assert!(why.contains("`a:1,b:1`") && why.contains("`a:1,c:1`"), "{why}");
        let own = hello(&["a:1", "b:1"], 0);
        assert!(ours.disagreement(&own).unwrap().contains("list each machine once"));
        let twice = PeerHello { process: NodeId(9), ..own };
        assert!(ours.disagreement(&twice).unwrap().contains("two processes are at the endpoint a:1"));
        let other = PeerHello { run_id: "other".to_owned(), ..hello(&["a:1", "b:1"], 1) };
        assert!(ours.disagreement(&other).unwrap().contains("run `job`, not to run `other`"));
    }
}
