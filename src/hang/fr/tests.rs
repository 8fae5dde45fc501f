use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::hang::view::SIGNATURES_LIMIT;

fn entry(group: &str, pg_id: i64, seq: u64, op: &str, sizes: serde_json::Value, retired: bool) -> serde_json::Value {
    json!({
        "collective_seq_id": seq, "input_dtypes": ["Float"], "input_sizes": sizes, "is_p2p": false, "op_id": seq,
        "output_dtypes": ["Float"], "output_sizes": [[9]], "p2p_seq_id": 0, "pg_id": pg_id, "process_group": [group, "default_pg"],
        "profiling_name": format!("gloo:{op}"), "record_id": seq, "retired": retired, "state": "scheduled", "thread_name": "python",
        "time_created_ns": 1_795_717_963_220_612_365_u64, "timeout_ms": 1_800_000,
    })
}

fn filled(dump: &serde_json::Value, members: &[(&str, &[u32])]) -> View {
    let bytes = serde_json::to_vec(dump).unwrap();
    let members = members.iter().map(|(name, ranks)| ((*name).to_owned(), ranks.iter().copied().collect())).collect();
    let mut view = View::new(0, 1);
    Recorded::parse(&bytes).unwrap().fill(&mut view, &members);
    view
}

#[test]
fn entries_become_a_groups_last_and_pending_collectives() {
    let dump = json!({
        "version": "2.10", "pg_config": {"": {"desc": "", "ranks": "[0]"}},
        "entries": [
            entry("0", 0, 7, "all_reduce", json!([[63310]]), true),
            entry("0", 0, 8, "broadcast", json!([[7]]), false),
            entry("0", 0, 9, "all_to_all", json!([[3]]), false),
        ],
    });
    let view = filled(&dump, &[("0", &[0, 1, 2, 3]), ("5", &[0, 1])]);
    let world = view.group("0").unwrap();
    assert_eq!((world.desc.as_str(), world.oldest, world.last), ("default_pg", 7, 9));
    assert_eq!(world.ranks.as_ref().unwrap().len(), 4);
    let of = |entries: &[Entry]| -> Vec<_> {
        entries.iter().map(|entry| (entry.seq, entry.at, view.signature(entry).unwrap().clone())).collect()
    };
    let signature = |op: &str, shape: &str| Signature { op: op.to_owned(), shape: shape.to_owned() };
    let pending = vec![(8, 1, signature("broadcast", "[7] Float")), (9, 2, signature("all_to_all", ""))];
    assert_eq!(of(&world.pending), pending);
    let all = [vec![(7, 0, signature("all_reduce", "[63310] Float"))], pending].concat();
    assert_eq!(of(&world.tail), all);
    assert_eq!(view.group("5").map(|group| (group.last, group.pending.len())), Some((0, 0)), "not used yet");
}

#[test]
fn recorders_of_several_backends_are_one_by_time() {
    let at = |group: &str, seq: u64, time: u64| {
        let mut entry = entry(group, 0, seq, "all_reduce", json!([[1]]), false);
        entry["time_created_ns"] = time.into();
        entry
    };
    let nccl = json!({"entries": [at("0", 1, 10), at("0", 2, 40)]}).to_string();
    let gloo = json!({"entries": [at("0", 9, 5), at("2", 1, 20), at("2", 2, 30)]}).to_string();
    let recorders = [&nccl, &gloo].map(|json| Recorded::parse(json.as_bytes()).unwrap());
    let mut view = View::new(0, 1);
    Recorded::join(recorders.into()).fill(&mut view, &BTreeMap::new());
    let of = |name: &str| -> Vec<_> { view.group(name).unwrap().tail.iter().map(|it| (it.seq, it.at)).collect() };
    assert_eq!(of("0"), [(1, 0), (2, 3)], "without those of the other backend of the same group");
    assert_eq!(of("2"), [(1, 1), (2, 2)]);
    let mut none = View::new(0, 1);
    Recorded::join(Vec::new()).fill(&mut none, &[("0".to_owned(), (0..4).collect())].into());
    assert_eq!(none.groups.len(), 1, "a group that nobody has used");
}

#[test]
fn a_group_that_was_made_anew_counts_alone() {
    let one = |pg_id, seq, retired| entry("0", pg_id, seq, "barrier", json!([]), retired);
    let view =
        filled(&json!({"entries": [one(0, 90, true), one(0, 91, false), one(3, 1, true), one(3, 2, false)]}), &[]);
    let world = view.group("0").unwrap();
    assert_eq!((world.oldest, world.last, world.pending.len(), world.tail.len()), (1, 2, 1, 2));
}

#[test]
fn completed_operations_and_messages_are_not_pending() {
    let mut completed = entry("0", 0, 1, "all_reduce", json!([[1]]), false);
    completed["state"] = json!("completed");
    let mut message = entry("0", 0, 1, "send 0->1", json!([[1]]), false);
    message["is_p2p"] = json!(true);
    let view = filled(&json!({"entries": [completed, message]}), &[]);
    assert!(view.groups[0].pending.is_empty() && view.groups[0].tail.len() == 1);
}

#[test]
fn long_shapes_that_differ_at_their_end_stay_different() {
    let sizes = |last: u32| json!((0..200).map(|_| [64]).chain([[last]]).collect::<Vec<_>>());
    let many: Vec<_> = (1..=3).map(|seq| entry("0", 0, seq, "all_reduce", sizes(seq as u32 / 2), false)).collect();
    let view = filled(&json!({"entries": many}), &[]);
    let shapes: Vec<_> = view.groups[0].pending.iter().map(|entry| &view.signature(entry).unwrap().shape).collect();
    assert!(shapes[0] != shapes[1] && shapes[1] == shapes[2], "{shapes:?}");
    assert!(shapes.iter().all(|shape| shape.len() <= SHAPE_LIMIT_BYTES && shape.starts_with("[64],[64]")));
}

#[test]
fn bounds_hold_for_any_number_of_entries_groups_and_signatures() {
    let many: Vec<_> = (0..5000_u64)
        .map(|at| entry(&format!("{}", at % 100), 0, at, "all_reduce", json!([[at]]), at % 3 == 0))
        .collect();
    let mut view = filled(&json!({"entries": many}), &[]);
    assert_eq!(view.groups.len(), GROUPS_LIMIT);
    assert_eq!(view.signatures.len(), SIGNATURES_LIMIT);
    assert!(view.groups.iter().all(|group| group.oldest >= 904), "of 5,000 entries the last 4,096 count");
    assert!(view.groups.iter().all(|group| group.pending.len() <= PENDING_LIMIT && group.tail.len() <= TAIL_LIMIT));
    view.fit();
    assert_eq!(View::decode(&view.encode()), Ok(view));
}

#[test]
fn what_is_no_dump_is_refused() {
    for bytes in [&b""[..], b"5", b"{\"entries\": 5}", b"{\"entries\": [{}]}", b"\xff", b"[[[[[[[[["] {
        assert!(Recorded::parse(bytes).unwrap_err().contains("cannot be read"));
    }
    assert!(Recorded::parse(&vec![b' '; DUMP_LIMIT_BYTES + 1]).unwrap_err().contains("must have at most 4194304"));
    assert!(Recorded::parse(b"{}").is_ok());
}

proptest! {
    #[test]
    fn a_dump_of_anything_makes_a_view_that_may_be_sent(
        names in proptest::collection::vec((".{0,90}", any::<i64>(), any::<u64>(), ".{0,90}", any::<bool>()), 0..40),
    ) {
        let entries: Vec<_> =
            names.iter().map(|(group, id, seq, op, retired)| entry(group, *id, *seq, op, json!([[seq % 99]]), *retired)).collect();
        let mut view = filled(&json!({"entries": entries}), &[]);
        view.fit();
        prop_assert_eq!(View::decode(&view.encode()), Ok(view));
    }
}
