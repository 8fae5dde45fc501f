//! What etcd's keys and changes are to the machine.

use super::interface::{LeaseId, NodeKey, Revision, RunChange, Snapshot, StateKey};
use super::keys::{Key, Keys};
use crate::etcd_client::{KeyChange, KeyValue};

/// The run's prefix as it was read, and what was found there that is another program's.
pub(super) fn snapshot(keys: &Keys, found: Vec<KeyValue>, revision: u64) -> (Snapshot, Option<String>) {
    let mut snapshot = Snapshot { revision: Revision(revision), ..Snapshot::default() };
    let mut foreign = None;
    for kv in found {
        match keys.parse(&kv.key) {
            Ok(Key::State) => snapshot.state = Some(state(kv)),
            Ok(Key::Node(node)) => _ = snapshot.nodes.insert(node, node_key(kv)),
            Err(why) => foreign = foreign.or(Some(why)),
        }
    }
    (snapshot, foreign)
}

/// A change of a key.
///
/// # Errors
/// It is another program's key.
pub(super) fn change(keys: &Keys, changed: KeyChange) -> Result<RunChange, String> {
    Ok(match keys.parse(&changed.key)? {
        Key::State => RunChange::State(changed.now.map(state)),
        Key::Node(node) => RunChange::Node(node, changed.now.map(node_key)),
    })
}

fn state(kv: KeyValue) -> StateKey {
    StateKey { bytes: kv.value, revision: Revision(kv.modified), lease: LeaseId(kv.lease) }
}

fn node_key(kv: KeyValue) -> NodeKey {
    NodeKey { lease: LeaseId(kv.lease), created: Revision(kv.created), modified: Revision(kv.modified), wish: kv.value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::messages::message::NodeId;

    fn kv(key: Vec<u8>, value: &[u8]) -> KeyValue {
        KeyValue { key, value: value.to_vec(), created: 3, modified: 5, lease: 7 }
    }

    #[test]
    fn keys_become_the_state_and_the_nodes() {
        let (keys, node) = (Keys::new("/p", "run"), NodeId(9));
        let foreign = b"/p/run/other".to_vec();
        let found = vec![kv(keys.node(node), b"wish"), kv(foreign.clone(), b""), kv(keys.state(), b"state")];
        let (read, why) = snapshot(&keys, found, 8);
        let state = StateKey { bytes: b"state".to_vec(), revision: Revision(5), lease: LeaseId(7) };
        let key = NodeKey { lease: LeaseId(7), created: Revision(3), modified: Revision(5), wish: b"wish".to_vec() };
        let nodes = [(node, key.clone())].into();
        assert_eq!(read, Snapshot { revision: Revision(8), state: Some(state), nodes });
        assert!(why.is_some_and(|why| why.contains("/p/run/other")));
        let put = KeyChange { key: keys.node(node), now: Some(kv(keys.node(node), b"wish")) };
        assert_eq!(change(&keys, put), Ok(RunChange::Node(node, Some(key))));
        assert_eq!(change(&keys, KeyChange { key: keys.state(), now: None }), Ok(RunChange::State(None)));
        assert!(change(&keys, KeyChange { key: foreign, now: None }).is_err());
    }
}
