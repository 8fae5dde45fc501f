//! The names of a run's keys: `{prefix}/{run}/state`, and `{prefix}/{run}/nodes/{node}` for each node. Pure.

use crate::rendezvous::messages::message::NodeId;

/// The names of one run's keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Ends with a slash, so that no other run's keys begin with it.
    prefix: String,
}

/// What a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// The run's state.
    State,
    /// A node's key.
    Node(NodeId),
}

const STATE: &str = "state";
const NODES: &str = "nodes/";
/// Longest part of another program's key that a message repeats.
const SHOWN_BYTES: usize = 200;

impl Keys {
    /// The keys of a run, below `key_prefix`.
    pub fn new(key_prefix: &str, run_id: &str) -> Self {
        Self { prefix: format!("{}/{}/", key_prefix.trim_end_matches('/'), encoded(run_id)) }
    }

    /// All of the run's keys begin with it, and no others do.
    pub fn prefix(&self) -> &[u8] {
        self.prefix.as_bytes()
    }

    /// The key of the state.
    pub fn state(&self) -> Vec<u8> {
        format!("{}{STATE}", self.prefix).into_bytes()
    }

    /// The key of a node.
    pub fn node(&self, node: NodeId) -> Vec<u8> {
        format!("{}{NODES}{:032x}", self.prefix, node.0).into_bytes()
    }

    /// What a key below the prefix is.
    ///
    /// # Errors
    /// It is none of ours: a sentence that names it.
    pub fn parse(&self, key: &[u8]) -> Result<Key, String> {
        let foreign = || {
            let shown = String::from_utf8_lossy(&key[..key.len().min(SHOWN_BYTES)]).escape_default().to_string();
            format!("the key `{shown}` is another program's: choose another `key_prefix` or run id, or delete the key")
        };
        let own = key.strip_prefix(self.prefix()).ok_or_else(foreign)?;
        if own == STATE.as_bytes() {
            return Ok(Key::State);
        }
        let digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
        own.strip_prefix(NODES.as_bytes())
            .filter(|digits| digits.len() == 32 && digits.iter().all(digit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u128::from_str_radix(digits, 16).ok())
            .map(|id| Key::Node(NodeId(id)))
            .ok_or_else(foreign)
    }
}

/// Beginning of the keys that PyTorch's agents share, without a slash at its end. No run's keys begin so: an `@` in a run id is encoded.
pub fn agents_store(key_prefix: &str, run_id: &str) -> String {
    format!("{}/{}@store", key_prefix.trim_end_matches('/'), encoded(run_id))
}

/// A run id without characters that have a meaning in keys, or none that a terminal shows: those become `%` and two digits for each
/// byte.
fn encoded(run_id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'~');
    let mut text = String::with_capacity(run_id.len());
    for byte in run_id.bytes() {
        match plain(byte) {
            true => text.push(char::from(byte)),
            false => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(0xab);

    #[test]
    fn keys_are_named_as_documented_and_read_back() {
        let keys = Keys::new("/torch/elastic/rendezvous", "job-1");
        assert_eq!(keys.state(), b"/torch/elastic/rendezvous/job-1/state");
        let node = b"/torch/elastic/rendezvous/job-1/nodes/000000000000000000000000000000ab";
        assert_eq!(keys.node(NODE), node);
        assert_eq!((keys.parse(&keys.state()), keys.parse(&keys.node(NODE))), (Ok(Key::State), Ok(Key::Node(NODE))));
    }

    #[test]
    fn no_run_has_keys_within_anothers() {
        let keys = |run: &str| String::from_utf8(Keys::new("/p//", run).prefix().to_vec()).unwrap();
        let table = [
            ("a", "/p/a/"),
            ("a/state", "/p/a%2Fstate/"),
            ("a b", "/p/a%20b/"),
            ("é@%", "/p/%C3%A9%40%25/"),
            ("../a", "/p/..%2Fa/"),
            ("A.b_c-d~9", "/p/A.b_c-d~9/"),
        ];
        for (run, prefix) in table {
            assert_eq!(keys(run), prefix, "{run}");
        }
    }

    #[test]
    fn another_programs_key_is_named() {
        let keys = Keys::new("/p", "a");
        let others = [
            "/p/a/other",
            "/p/a/state/x",
            "/p/a/nodes/",
            "/p/a/nodes/ab",
            "/p/a/nodes/0000000000000000000000000000000g",
            "/p/a/nodes/000000000000000000000000000000AB",
            "/p/a/nodes/+00000000000000000000000000000ab",
            "/p/b/state",
        ];
        for key in others {
            assert!(keys.parse(key.as_bytes()).unwrap_err().contains(&format!("`{key}`")), "{key}");
        }
        let steering = keys.parse(b"/p/a/\x1b[2J\xff").unwrap_err();
        assert!(steering.contains("\\u{1b}") && !steering.contains('\u{1b}'), "{steering}");
        assert!(keys.parse(&[b'x'; 4096]).unwrap_err().len() < 400);
    }

    #[test]
    fn what_agents_share_is_beside_the_keys_of_all_runs() {
        assert_eq!(agents_store("/p/", "a/b"), "/p/a%2Fb@store");
        assert!(!agents_store("/p", "a").as_bytes().starts_with(Keys::new("/p", "a").prefix()));
        assert_ne!(Keys::new("/p", "a@store").prefix(), format!("{}/", agents_store("/p", "a")).as_bytes());
    }
}
