//! Many ranks' views as a few lines: those that stand alike are one group. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::ranks::Ranks;
use super::view::{Call, Class, Frame, Gil, Life, State, View, WaitsIn, all_users, waits_for_data, waits_in};

/// Most groups that have a line.
pub const GROUPS_SHOWN: usize = 23;
/// Most frames of a line.
const FRAMES_SHOWN: usize = 3;
/// Most hosts that a group names.
const HOSTS_LIMIT: usize = 64;
/// Most names of nodes in a line, or of nodes that differ in a number.
const NODES_SHOWN: usize = 3;

/// Ranks that stand alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// How many they are.
    pub count: usize,
    /// The ranks, as `0-2,4-7`.
    pub ranks: String,
    /// The first hosts of their nodes.
    pub hosts: Vec<String>,
    /// How many more hosts there are.
    pub hosts_more: usize,
    /// What they do, in a word.
    pub state: &'static str,
    /// The collective or the call to the kernel in which they stand. Empty: none is known.
    pub what: String,
    /// The user's frames as `function file:line`, the innermost first.
    pub frames: Vec<String>,
}

/// State, call and frames, by which ranks are alike.
type Doing = (&'static str, String, Vec<String>);

/// The groups of these ranks, each with the name of its node: the smallest first.
pub fn groups<'a>(seen: impl IntoIterator<Item = (&'a str, &'a View)>) -> Vec<Group> {
    let mut alike: BTreeMap<Doing, (Vec<u32>, BTreeSet<String>)> = BTreeMap::new();
    for (node, view) in seen {
        let (ranks, hosts) = alike.entry((state_of(view), what_of(view), frames_of(view))).or_default();
        ranks.push(view.rank);
        let host = node.rsplit_once(':').map_or(node, |(host, _)| host);
        hosts.insert(host.to_owned());
    }
    let mut groups: Vec<_> = alike
        .into_iter()
        .map(|((state, what, frames), (ranks, hosts))| {
            let first = ranks.iter().copied().min().unwrap_or(0);
            let (count, ranks) = (ranks.len(), ranks.into_iter().collect::<Ranks>().to_string());
            let hosts_more = hosts.len().saturating_sub(HOSTS_LIMIT);
            let hosts = hosts.into_iter().take(HOSTS_LIMIT).collect();
            ((count, first), Group { count, ranks, hosts, hosts_more, state, what, frames })
        })
        .collect();
    groups.sort_by_key(|(order, _)| *order);
    groups.into_iter().map(|(_, group)| group).collect()
}

/// One line for each group, in columns. What is beyond [`GROUPS_SHOWN`] is counted in a last line.
pub fn lines(groups: &[Group]) -> Vec<String> {
    let shown = &groups[..groups.len().min(GROUPS_SHOWN)];
    let cells: Vec<[String; 6]> = shown.iter().map(cells).collect();
    let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let line = |row: &[String; 6]| {
        let columns = row.iter().zip(widths).filter(|(_, width)| *width > 0);
        columns.map(|(cell, width)| format!("{cell:width$}")).collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines: Vec<_> = cells.iter().map(line).collect();
    let rest = &groups[shown.len()..];
    if !rest.is_empty() {
        let ranks: usize = rest.iter().map(|group| group.count).sum();
        lines.push(format!(
            "and {} more groups with {ranks} ranks (--json has more, --rank=N all of a rank)",
            rest.len()
        ));
    }
    lines
}

fn cells(group: &Group) -> [String; 6] {
    let Group { count, ranks, hosts, hosts_more, state, what, frames } = group;
    let many = if *count == 1 { "rank" } else { "ranks" };
    let hosts = names(hosts, *hosts_more);
    [format!("{count} {many}"), ranks.clone(), hosts, (*state).to_owned(), what.clone(), frames.join(" < ")]
}

/// All that is known of one rank, a line each.
pub fn whole(node: &str, view: &View) -> Vec<String> {
    let head = format!("rank {} on {node}, pid {}: {} {}", view.rank, view.pid, state_of(view), what_of(view));
    let mut lines = vec![head.trim_end().to_owned()];
    if view.frames.is_empty() {
        lines.push("  its Python frames are not known".to_owned());
    }
    lines.extend(view.frames.iter().map(frame));
    for worker in &view.data_workers {
        let state = if worker.state.is_stopped() { ", stopped by a signal" } else { "" };
        lines.push(format!("data worker {}{state}", worker.pid));
        lines.extend(worker.frames.iter().map(frame));
    }
    lines
}

fn frame(frame: &Frame) -> String {
    let line = if frame.line == 0 { "?".to_owned() } else { frame.line.to_string() };
    format!("  {} ({}:{line})", frame.function, frame.file)
}

fn state_of(view: &View) -> &'static str {
    match (view.life, view.state, view.class) {
        (Life::Ended { .. }, ..) | (_, State::Ended, _) => "ended",
        (Life::MainThreadEnded { .. }, ..) => "main thread ended",
        (_, State::Stopped, _) => "stopped",
        (_, State::Traced, _) => "in a debugger",
        _ if view.gil == Gil::Held => "holds the GIL",
        _ if waits_in(&view.frames).is_some() => "waits",
        // DDP waits in C++ for what it has entered.
        (_, State::Sleeping, None | Some(Class::Idle)) if view.groups.iter().any(|of| !of.pending.is_empty()) => {
            "waits"
        }
        (_, _, Some(Class::Idle)) => "idle",
        (_, _, Some(Class::Busy)) => "busy",
        (_, _, Some(Class::Moving)) => "reads or writes",
        (_, State::Running, _) => "runs",
        (_, State::Sleeping, _) => "sleeps",
        (_, State::Uninterruptible, _) => "blocked",
        (_, State::Unknown, _) => "unknown",
    }
}

fn what_of(view: &View) -> String {
    if view.is_stopped() || view.has_ended() {
        return String::new();
    }
    if let Some((group, entry)) = view.groups.iter().find_map(|group| Some((group, group.pending.first()?))) {
        let op = view.signature(entry).map_or("a collective", |signature| signature.op.as_str());
        let name = if group.desc.is_empty() { &group.name } else { &group.desc };
        return format!("{op} #{} of {name}", entry.seq);
    }
    match waits_in(&view.frames) {
        Some((frame, WaitsIn::Peer(Some(peer)))) => format!("{} with rank {peer}", frame.name()),
        Some((frame, _)) => frame.name().to_owned(),
        None => view.call.as_ref().map(Call::to_string).unwrap_or_default(),
    }
}

fn frames_of(view: &View) -> Vec<String> {
    let short = |frame: &&Frame| format!("{} {}:{}", frame.name(), frame.file_name(), frame.line);
    let is_call = |frame: &&&Frame| frame.function != "<module>";
    let busy = view.data_workers.iter().find(|worker| !worker.is_idle()).filter(|_| waits_for_data(&view.frames));
    let of_worker = busy.map(|worker| {
        let first = all_users(&worker.frames).first().map(short).unwrap_or_default();
        format!("data worker {}: {first}", worker.pid)
    });
    let users = all_users(&view.frames);
    let calls: Vec<_> = users.iter().filter(is_call).map(short).collect();
    let calls = if calls.is_empty() { users.iter().map(short).collect() } else { calls };
    of_worker.into_iter().chain(calls).take(FRAMES_SHOWN).collect()
}

/// Names in order, those that differ in a last number alone as one: `n16-17`, `gpu-a,gpu-b`.
fn names(names: &[String], more: usize) -> String {
    let mut alike: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for name in names {
        let (prefix, number) = numbered(name);
        alike.entry(prefix).or_default().extend(number);
    }
    let text = |(prefix, numbers): (&&str, &Vec<u32>)| match numbers.as_slice() {
        [] => (*prefix).to_owned(),
        [one] => format!("{prefix}{one}"),
        [one, other] => format!("{prefix}{one},{prefix}{other}"),
        many => format!("{prefix}{}", many.iter().copied().collect::<Ranks>()),
    };
    let more = alike.values().skip(NODES_SHOWN).map(|numbers| numbers.len().max(1)).sum::<usize>() + more;
    let shown = alike.iter().take(NODES_SHOWN).map(text).collect::<Vec<_>>().join(",");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// A name without its last number, and that. A number that begins with 0 stays: it would be shown as another.
fn numbered(name: &str) -> (&str, Option<u32>) {
    let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &name[prefix.len()..];
    match digits.parse() {
        Ok(number) if digits == "0" || !digits.starts_with('0') => (prefix, Some(number)),
        _ => (name, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hang::view::DataWorker;

    fn at(frames: &[(&str, &str, u32)]) -> Vec<Frame> {
        let frame = |(function, file, line): &(&str, &str, u32)| Frame {
            function: (*function).to_owned(),
            file: (*file).to_owned(),
            line: *line,
            peer: None,
        };
        frames.iter().map(frame).collect()
    }

    const C10D: &str = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py";

    fn waiting(rank: u32) -> View {
        let frames = at(&[("all_reduce", C10D, 9), ("main", "/job/train.py", 45)]);
        View { state: State::Sleeping, frames, ..View::new(rank, 1) }
    }

    #[test]
    fn the_rank_that_does_not_come_is_in_the_first_line() {
        let call = Call {
            name: "read".into(),
            file: Some("/data/shard-17".into()),
            file_system: Some("nfs4".into()),
            fd: Some(4),
        };
        let frames = at(&[("load_batch", "/job/train.py", 88), ("main", "/job/train.py", 41)]);
        let late =
            View { state: State::Sleeping, call: Some(call), frames, class: Some(Class::Idle), ..View::new(3, 1) };
        let mut views: Vec<_> = (0..8).map(waiting).collect();
        views[3] = late;
        let node = |rank: u32| if rank < 4 { "n17:9" } else { "n16:7" };
        let lines = lines(&groups(views.iter().map(|view| (node(view.rank), view))));
        assert_eq!(
            lines,
            [
                "1 rank   3        n17      idle   read(/data/shard-17, nfs4)  load_batch train.py:88 < main train.py:41",
                "7 ranks  0-2,4-7  n16,n17  waits  all_reduce                  main train.py:45",
            ]
        );
    }

    #[test]
    fn a_rank_that_waits_for_its_data_worker_shows_where_that_is() {
        let loader = "/v/site-packages/torch/utils/data/dataloader.py";
        let frames = at(&[("_next_data", loader, 3), ("main", "/job/train.py", 5)]);
        let data_worker =
            DataWorker { pid: 23, state: State::Sleeping, frames: at(&[("D.__getitem__", "/job/d.py", 8)]) };
        let view = View { frames, data_workers: vec![data_worker], ..View::new(0, 1) };
        assert_eq!(groups([("n:1", &view)])[0].frames, ["data worker 23: __getitem__ d.py:8", "main train.py:5"]);
        assert_eq!(whole("n:1", &view).last().unwrap(), "  D.__getitem__ (/job/d.py:8)");
    }

    #[test]
    fn nodes_are_named_together() {
        let of = |all: &[&str]| names(&all.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), 0);
        assert_eq!(of(&["n16", "n17", "n18", "gpu-b", "gpu-a"]), "gpu-a,gpu-b,n16-18");
        assert_eq!(of(&["n01", "n1", "a", "b", "c"]), "a,b,c and 2 more");
    }

    #[test]
    fn what_has_no_line_is_counted() {
        let mut views: Vec<_> = (0..40).map(waiting).collect();
        views.iter_mut().for_each(|view| view.frames[1].line = view.rank);
        let groups = groups(views.iter().map(|view| ("n:1", view)));
        let lines = lines(&groups);
        assert_eq!(lines.len(), GROUPS_SHOWN + 1);
        assert_eq!(lines[GROUPS_SHOWN], "and 17 more groups with 17 ranks (--json has more, --rank=N all of a rank)");
    }

    #[test]
    fn what_keeps_a_rank_from_going_on_is_one_word() {
        for (state, life, word) in [
            (State::Stopped, Life::Running, "stopped"),
            (State::Traced, Life::Running, "in a debugger"),
            (State::Sleeping, Life::MainThreadEnded { raised: true }, "main thread ended"),
            (State::Sleeping, Life::Ended { code: 0 }, "ended"),
            (State::Sleeping, Life::Running, "waits"),
        ] {
            assert_eq!(groups([("n:1", &View { state, life, ..waiting(0) })])[0].state, word);
        }
        assert_eq!(groups([("n:1", &View { gil: Gil::Held, ..waiting(0) })])[0].state, "holds the GIL");
    }

    #[test]
    fn a_rank_that_sleeps_in_a_collective_waits_even_if_no_frame_says_so() {
        use crate::hang::view::{Entry, Group};
        let pending = Group { pending: vec![Entry::default()], ..Group::default() };
        let view = View { state: State::Sleeping, groups: vec![pending], ..View::new(0, 1) };
        assert_eq!(state_of(&view), "waits");
        assert_eq!(state_of(&View { class: Some(Class::Idle), ..view.clone() }), "waits");
        assert_eq!(state_of(&View { class: Some(Class::Busy), ..view.clone() }), "busy");
        assert_eq!(state_of(&View { groups: Vec::new(), ..view }), "sleeps");
    }
}
