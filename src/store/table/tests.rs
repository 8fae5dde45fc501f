use super::*;

impl Table {
    /// Makes the table count fewer bytes than it has.
    pub(crate) fn miscount(&mut self) {
        self.stored_bytes = 0;
    }
}

const A: ConnId = ConnId(1);
const B: ConnId = ConnId(2);
const C: ConnId = ConnId(3);

fn key(name: &str) -> Bytes {
    Bytes::copy_from_slice(name.as_bytes())
}

fn keys(names: &[&str]) -> Vec<Bytes> {
    names.iter().map(|name| key(name)).collect()
}

fn stop() -> Option<Reply> {
    Some(Reply::Wait(WaitReply::StopWaiting))
}

fn value(text: &str) -> Option<Reply> {
    Some(Reply::Value(key(text)))
}

/// A table with short words for what the tests do often. Each returns (reply, released).
#[derive(Default)]
struct Store(Table);

impl Store {
    fn apply(&mut self, conn: ConnId, request: Request) -> (Option<Reply>, Vec<ConnId>) {
        let applied = self.0.apply(conn, request).unwrap();
        (applied.reply, applied.released)
    }
    fn set(&mut self, k: &str, v: &str) -> Vec<ConnId> {
        let (reply, released) = self.apply(C, Request::Set { key: key(k), value: key(v) });
        assert_eq!(reply, None, "SET must not be acknowledged");
        released
    }
    fn wait(&mut self, conn: ConnId, names: &[&str]) -> Option<Reply> {
        self.apply(conn, Request::Wait { keys: keys(names) }).0
    }
    fn push(&mut self, k: &str, v: &str) -> Vec<ConnId> {
        self.apply(C, Request::QueuePush { key: key(k), value: key(v) }).1
    }
    fn compare_set(&mut self, k: &str, expected: &str, desired: &str) -> (Option<Reply>, Vec<ConnId>) {
        self.apply(C, Request::CompareSet { key: key(k), expected: key(expected), desired: key(desired) })
    }
    fn barrier(&mut self, conn: ConnId, k: &str, world_size: i64) -> (Option<Reply>, Vec<ConnId>) {
        self.apply(conn, Request::Barrier { key: key(k), world_size })
    }
    fn get(&mut self, k: &str) -> Option<Reply> {
        self.apply(C, Request::Get { key: key(k) }).0
    }
}

/// The four cases of `compareSetHandler` in `TCPStoreBackend.cpp`, and their events: only a created key is news.
#[test]
fn compare_set_decides_as_upstream_and_releases_only_on_creation() {
    let mut store = Store::default();
    assert_eq!(store.wait(A, &["k"]), None);
    assert_eq!(store.compare_set("k", "x", "new"), (value("x"), vec![]), "missing, not empty: stays missing");
    assert_eq!(store.apply(C, Request::GetNumKeys).0, Some(Reply::Integer(0)));
    assert_eq!(store.compare_set("k", "", "one"), (value("one"), vec![A]), "missing, empty: created");
    assert_eq!(store.compare_set("k", "one", "two"), (value("two"), vec![]));
    assert_eq!(store.compare_set("k", "one", "three"), (value("two"), vec![]));
    assert_eq!(store.compare_set("k", "", "three"), (value("two"), vec![]), "empty does not match a value");
    store.set("empty", "");
    assert_eq!(store.compare_set("empty", "", "x"), (value("x"), vec![]), "an empty value matches empty");
}

#[test]
fn a_wait_is_released_by_the_last_of_its_keys_and_once() {
    let mut store = Store::default();
    store.set("there", "");
    assert_eq!(store.wait(A, &["there"]), stop(), "an empty value is there");
    assert_eq!(store.wait(A, &[]), stop(), "no keys: ready");
    assert_eq!(store.wait(A, &["x", "there", "y", "x"]), None);
    assert_eq!(store.set("x", "1"), []);
    // Upstream counts events: that x has gone again makes no difference.
    store.apply(C, Request::DeleteKey { key: key("x") });
    assert_eq!(store.set("x", "2"), []);
    assert_eq!(store.set("y", "1"), [A]);
    assert_eq!(store.set("y", "2"), []);
    assert_eq!(store.0.num_waiting(), 0);
    assert!(store.0.waiters.is_empty());
}

#[test]
fn waiters_are_released_in_order_of_registration() {
    let mut store = Store::default();
    for conn in [B, A, C] {
        store.wait(conn, &["k"]);
    }
    let (reply, released) = store.apply(C, Request::Add { key: key("k"), amount: 0 });
    assert_eq!((reply, released), (Some(Reply::Integer(0)), vec![B, A, C]));
}

#[test]
fn a_second_wait_on_a_waiting_connection_is_refused_and_changes_nothing() {
    let mut store = Store::default();
    store.wait(A, &["k"]);
    let again = store.0.apply(A, Request::Wait { keys: vec![] });
    assert_eq!(again, Err(Violation::AlreadyWaiting(Query::Wait)));
    let barrier = store.0.apply(A, Request::Barrier { key: key("b"), world_size: 1 });
    assert_eq!(barrier, Err(Violation::AlreadyWaiting(Query::Barrier)));
    assert_eq!(store.get("b"), value(""), "not counted");
    assert_eq!(store.set("k", "v"), [A]);
}

#[test]
fn cancel_is_always_answered_and_removes_the_registrations() {
    let mut store = Store::default();
    let canceled = Some(Reply::Wait(WaitReply::WaitCanceled));
    assert_eq!(store.apply(A, Request::CancelWait).0, canceled);
    store.wait(A, &["x", "y"]);
    store.set("x", "1");
    assert_eq!(store.apply(A, Request::CancelWait).0, canceled);
    assert_eq!(store.set("y", "1"), []);
    assert!(store.0.waiters.is_empty());
}

#[test]
fn a_push_releases_one_waiter_and_leaves_nothing_behind() {
    let mut store = Store::default();
    store.wait(A, &["q"]);
    store.wait(B, &["q"]);
    assert_eq!(store.push("q", "1"), [A]);
    let popped = store.apply(A, Request::QueuePop { key: key("q") }).0;
    assert_eq!(popped, Some(Reply::Popped { length: 1, item: Some(key("1")) }));
    // The libuv server keeps A's entry under q, and this push would release A's wait for another key.
    assert_eq!(store.wait(A, &["unrelated"]), None);
    assert_eq!(store.push("q", "2"), [B]);
    assert_eq!(store.push("q", "3"), []);
    assert_eq!(store.set("unrelated", ""), [A]);
}

#[test]
fn a_push_passes_over_a_waiter_that_needs_more() {
    let mut store = Store::default();
    store.wait(A, &["q", "late"]);
    store.wait(B, &["q"]);
    assert_eq!(store.push("q", "1"), [B]);
    assert_eq!(store.set("late", ""), [A], "A has seen q");
}

/// The libuv server counts the queue as missing as soon as another key is, and the wait hangs until the next push.
#[test]
fn a_filled_queue_counts_as_there_in_a_wait_on_several_keys() {
    let mut store = Store::default();
    store.push("q", "1");
    assert_eq!(store.wait(A, &["q"]), stop());
    assert_eq!(store.wait(A, &["q", "late"]), None);
    assert_eq!(store.set("late", ""), [A]);
}

#[test]
fn queues_and_values_live_side_by_side() {
    let mut store = Store::default();
    store.push("k", "item");
    assert_eq!(store.get("k"), value(""), "GET sees values only");
    assert_eq!(store.apply(A, Request::GetNumKeys).0, Some(Reply::Integer(0)));
    assert_eq!(store.apply(A, Request::ListKeys).0, Some(Reply::Keys(vec![])));
    assert_eq!(store.apply(A, Request::DeleteKey { key: key("k") }).0, Some(Reply::Integer(0)));
    assert_eq!(store.apply(A, Request::Check { keys: keys(&["k"]) }).0, Some(Reply::Check(CheckReply::Ready)));
    store.set("k", "value");
    assert_eq!(store.get("k"), value("value"));
    assert_eq!(store.apply(A, Request::QueueLen { key: key("k") }).0, Some(Reply::Integer(1)));
    store.apply(A, Request::QueuePop { key: key("k") });
    let empty = store.apply(A, Request::QueuePop { key: key("k") }).0;
    assert_eq!(empty, Some(Reply::Popped { length: 0, item: None }));
}

#[test]
fn a_barrier_counts_for_ever_and_a_set_releases_it() {
    let mut store = Store::default();
    assert_eq!(store.barrier(A, "b", 2), (None, vec![]));
    assert_eq!(store.get("b"), value("1"));
    assert_eq!(store.barrier(B, "b", 2), (stop(), vec![A]));
    assert_eq!(store.barrier(A, "b", 2), (stop(), vec![]), "a passed barrier stays open");
    assert_eq!(store.barrier(A, "none", -5), (stop(), vec![]));
    assert_eq!(store.barrier(A, "c", 3), (None, vec![]));
    store.apply(A, Request::CancelWait);
    assert_eq!(store.get("c"), value("1"), "giving up does not take the count back");
    assert_eq!(store.barrier(A, "c", 3), (None, vec![]));
    assert_eq!(store.set("c", "x"), [A]);
    let broken = store.0.apply(A, Request::Barrier { key: key("c"), world_size: 3 });
    assert_eq!(broken, Err(Violation::NotANumber(Query::Barrier)));
}

#[test]
fn an_incomplete_barrier_creates_its_key_without_releasing_waiters() {
    let mut store = Store::default();
    store.wait(A, &["b"]);
    assert_eq!(store.barrier(B, "b", 2), (None, vec![]));
    assert_eq!(store.barrier(C, "b", 2), (stop(), vec![A, B]));
}

#[test]
fn add_wraps_and_leaves_a_non_number_alone() {
    let mut store = Store::default();
    store.set("n", "9223372036854775807");
    let add = |k: &str, amount| Request::Add { key: key(k), amount };
    assert_eq!(store.apply(A, add("n", 1)).0, Some(Reply::Integer(i64::MIN)));
    store.set("n", "abc");
    assert_eq!(store.0.apply(A, add("n", 1)), Err(Violation::NotANumber(Query::Add)));
    assert_eq!(store.get("n"), value("abc"));
}

#[test]
fn append_does_not_disturb_a_reply_that_is_still_held() {
    let mut store = Store::default();
    let append = |v: &str| Request::Append { key: key("k"), value: key(v) };
    store.apply(A, append("a"));
    let held = store.get("k");
    store.apply(A, append("b"));
    assert_eq!(held, value("a"));
    assert_eq!(store.get("k"), value("ab"));
}

#[test]
fn limits_refuse_whole_requests_and_bytes_are_given_back() {
    // One key, one queue with one item, and ten bytes between them.
    let limit = 3 * ENTRY_BYTES + 10;
    let mut store = Store(Table::new(TableLimits { keys: 2, stored_bytes: limit }));
    store.set("a", "12");
    let pairs = vec![(key("b"), key("")), (key("c"), key(""))];
    let refused = store.0.apply(A, Request::MultiSet { pairs });
    let full = |query, name, needed, what, limit| Err(Violation::Full { query, key: key(name), needed, what, limit });
    assert_eq!(refused, full(Query::MultiSet, "b", 3, "keys", 2));
    assert_eq!(store.0.num_keys(), 1, "none of the pairs is stored");
    store.push("q", "123456");
    let refused = store.0.apply(A, Request::Append { key: key("a"), value: key("3") });
    assert_eq!(refused, full(Query::Append, "a", limit + 1, "stored_bytes", limit));
    store.set("a", "21");
    store.apply(A, Request::QueuePop { key: key("q") });
    store.apply(A, Request::DeleteKey { key: key("a") });
    assert_eq!(store.0.stored_bytes(), 0);
}

#[test]
fn empty_items_and_open_waits_count_towards_the_stored_bytes() {
    let mut store = Store(Table::new(TableLimits { stored_bytes: 3 * ENTRY_BYTES + 3, ..TableLimits::default() }));
    let refused =
        |result: Result<Applied, Violation>| matches!(result, Err(Violation::Full { what: "stored_bytes", .. }));
    store.push("q", "");
    store.push("q", "");
    assert!(refused(store.0.apply(A, Request::QueuePush { key: key("q"), value: key("") })));
    store.apply(A, Request::QueuePop { key: key("q") });
    store.apply(A, Request::QueuePop { key: key("q") });
    assert_eq!(store.0.stored_bytes(), 0);

    assert!(refused(store.0.apply(A, Request::Wait { keys: keys(&["a", "b", "c", "d"]) })));
    store.apply(A, Request::Wait { keys: keys(&["a", "b", "a"]) });
    assert_eq!(store.0.stored_bytes(), 3 * ENTRY_BYTES + 3, "a key named twice is held twice");
    assert!(refused(store.0.apply(B, Request::Wait { keys: keys(&["c"]) })));
    assert!(
        refused(store.0.apply(B, Request::Barrier { key: key("b"), world_size: 2 })),
        "needs the number and the wait"
    );
    store.apply(A, Request::CancelWait);
    store.apply(A, Request::Barrier { key: key("b"), world_size: 2 });
    assert_eq!(store.0.stored_bytes(), 2 * ENTRY_BYTES + 3);
    store.apply(B, Request::Barrier { key: key("b"), world_size: 2 });
    assert_eq!(store.0.stored_bytes(), ENTRY_BYTES + 2, "released: only the number is left");
}

#[test]
fn small_values_do_not_pin_the_receive_buffer() {
    let buffer = Bytes::from(vec![b'x'; 1 << 20]);
    let mut store = Store::default();
    store.apply(A, Request::Set { key: buffer.slice(0..3), value: buffer.slice(8..9) });
    store.apply(A, Request::Wait { keys: vec![buffer.slice(0..5)] });
    assert!(buffer.is_unique(), "key, value and registration are copies");
    store.apply(B, Request::Set { key: key("big"), value: buffer.clone() });
    assert!(!buffer.is_unique(), "a value that is its buffer is not copied");
}
