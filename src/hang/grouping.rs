//! Ranks that do the same as one line, the smallest group first. Pure.

use std::collections::BTreeMap;

use super::frames::Frame;
use super::frames::whose::{user_frames, words};
use crate::wire::text::{cut, plain};

/// Most lines.
pub const LINE_LIMIT: usize = 24;
/// Most frames of a line.
const FRAMES: usize = 3;
/// Longest part of a line, in characters.
const PART_CHARS: usize = 120;
/// Most runs of numbers in a list of ranks or nodes.
const RUNS: usize = 8;

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// Its rank in the world.
    pub rank: u32,
    /// The name of its node.
    pub node: String,
    /// `idle`, `busy`, `wait`, `stopped`, …
    pub state: String,
    /// The collective that it is in, or the call of the kernel: `all_reduce #5127 of default_pg`, `read(/data/x, nfs4)`.
    pub doing: String,
    /// The frames of its main thread, innermost first.
    pub frames: Vec<Frame>,
}

/// Ranks that do the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Their ranks, in order.
    pub ranks: Vec<u32>,
    /// The nodes that they are on, in order.
    pub nodes: Vec<String>,
    /// What their state is.
    pub state: String,
    /// The collective that they are in, or the call of the kernel.
    pub doing: String,
    /// The user's frames: `load_batch train.py:88 < main train.py:41`.
    pub at: String,
}

/// The user's innermost frames in a few words.
pub fn at(frames: &[Frame]) -> String {
    let frames = user_frames(frames);
    let is_call = |frame: &&&Frame| frame.function != "<module>";
    let mut calls: Vec<_> = frames.iter().filter(is_call).take(FRAMES).map(|frame| words(frame)).collect();
    if calls.is_empty() {
        calls.extend(frames.first().map(|frame| words(frame)));
    }
    calls.join(" < ")
}

/// Group ranks by state, what they do, and the user's frames. The smallest group is the first, then that of the lowest rank.
pub fn groups(members: &[Member]) -> Vec<Group> {
    let mut found: BTreeMap<(String, String, String), Vec<&Member>> = BTreeMap::new();
    for member in members {
        let part = |text: &str| cut(plain(text.to_owned()), PART_CHARS);
        let alike = (part(&member.state), part(&member.doing), part(&at(&member.frames)));
        found.entry(alike).or_default().push(member);
    }
    let mut groups: Vec<_> = found
        .into_iter()
        .map(|((state, doing, at), members)| {
            let mut ranks: Vec<_> = members.iter().map(|member| member.rank).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let mut nodes: Vec<_> = members.iter().map(|member| plain(member.node.clone())).collect();
            nodes.sort_by(|one, other| numbered(one).cmp(&numbered(other)));
            nodes.dedup();
            Group { ranks, nodes, state, doing, at }
        })
        .collect();
    groups.sort_by_key(|group| (group.ranks.len(), group.ranks.first().copied()));
    groups
}

/// Lines of columns, at most [`LINE_LIMIT`].
pub fn lines(groups: &[Group]) -> Vec<String> {
    let shown = if groups.len() > LINE_LIMIT { LINE_LIMIT - 1 } else { groups.len() };
    let rows: Vec<[String; 6]> = groups[..shown].iter().map(row).collect();
    let widths: Vec<_> = (0..6).map(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &[String; 6]| {
        let cells = row.iter().zip(&widths).filter(|(_, width)| **width > 0);
        let padded: Vec<_> = cells.map(|(cell, &width)| format!("{cell:width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines: Vec<_> = rows.iter().map(line).collect();
    if shown < groups.len() {
        let ranks: usize = groups[shown..].iter().map(|group| group.ranks.len()).sum();
        lines.push(format!("and {ranks} ranks in {} further groups", groups.len() - shown));
    }
    lines
}

fn row(group: &Group) -> [String; 6] {
    let count = if group.ranks.len() == 1 { "1 rank".to_owned() } else { format!("{} ranks", group.ranks.len()) };
    [count, runs(&group.ranks), names(&group.nodes), group.state.clone(), group.doing.clone(), group.at.clone()]
}

/// Numbers in order as runs: `0-2,4-7`.
pub fn runs(numbers: &[u32]) -> String {
    let mut found: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match found.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*number) => *last = *number,
            _ => found.push((*number, *number)),
        }
    }
    let run = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    let mut shown: Vec<_> = found.iter().take(RUNS).map(run).collect();
    if found.len() > RUNS {
        shown.push("…".to_owned());
    }
    shown.join(",")
}

/// Names in order, those that differ in a last number alone as one: `n16-17`, `gpu-a,gpu-b`.
fn names(names: &[String]) -> String {
    let mut found: Vec<(&str, Vec<u32>, Option<&str>)> = Vec::new();
    for name in names {
        match numbered(name) {
            (prefix, Some(number)) => match found.last_mut() {
                Some((before, numbers, None)) if *before == prefix => numbers.push(number),
                _ => found.push((prefix, vec![number], None)),
            },
            _ => found.push(("", Vec::new(), Some(name))),
        }
    }
    let text = |(prefix, numbers, name): &(&str, Vec<u32>, Option<&str>)| match name {
        Some(name) => (*name).to_owned(),
        None => format!("{prefix}{}", runs(numbers)),
    };
    let mut shown: Vec<_> = found.iter().take(RUNS).map(text).collect();
    if found.len() > RUNS {
        shown.push("…".to_owned());
    }
    shown.join(",")
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

    fn frame(function: &str, file: &str, line: u32) -> Frame {
        Frame { function: function.to_owned(), file: file.to_owned(), line: Some(line), peer: None }
    }

    fn member(rank: u32, state: &str, doing: &str, frames: &[Frame]) -> Member {
        let node = format!("n{}", 16 + rank / 4);
        Member { rank, node, state: state.to_owned(), doing: doing.to_owned(), frames: frames.to_vec() }
    }

    #[test]
    fn ranks_are_grouped_by_what_they_do_the_smallest_group_first() {
        let torch = frame("all_reduce", "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3000);
        let (main, module) = (frame("main", "/u/train.py", 45), frame("<module>", "/u/train.py", 99));
        let loads = [frame("load_batch", "/u/train.py", 88), frame("main", "/u/train.py", 41), module.clone()];
        let waits = [torch, main, module];
        let members: Vec<_> = [7, 0, 1, 2, 3, 4, 5, 6]
            .map(|rank| match rank {
                3 => member(3, "idle", "read(/data/shard-17, nfs4)", &loads),
                rank => member(rank, "wait", "all_reduce #5127 of default_pg", &waits),
            })
            .into();
        let lines = lines(&groups(&members));
        assert_eq!(
            lines,
            [
                "1 rank   3        n16     idle  read(/data/shard-17, nfs4)      load_batch train.py:88 < main train.py:41",
                "7 ranks  0-2,4-7  n16-17  wait  all_reduce #5127 of default_pg  main train.py:45",
            ]
        );
    }

    #[test]
    fn many_groups_are_cut_and_say_so() {
        let members: Vec<_> = (0..60).map(|rank| member(rank, "busy", &format!("step {rank}\n"), &[])).collect();
        let lines = lines(&groups(&members));
        assert_eq!(lines.len(), LINE_LIMIT);
        assert_eq!(lines[LINE_LIMIT - 1], "and 37 ranks in 37 further groups");
        assert!(lines.iter().all(|line| !line.contains('\n')), "{lines:?}");
        let all: Vec<_> = (0..24).map(|rank| member(rank, "busy", &format!("step {rank}"), &[])).collect();
        assert!(super::lines(&groups(&all)).iter().all(|line| !line.contains("further")));
        assert!(super::lines(&[]).is_empty());
    }

    #[test]
    fn numbers_and_names_become_runs() {
        for (numbers, expected) in [
            (&[][..], ""),
            (&[3], "3"),
            (&[0, 1, 2, 4, 5, 6, 7], "0-2,4-7"),
            (&[0, 2, 4, 6, 8, 10, 12, 14, 16], "0,2,4,6,8,10,12,14,…"),
            (&[u32::MAX], "4294967295"),
        ] {
            assert_eq!(runs(numbers), expected);
        }
        let names = |names: &[&str]| super::names(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(names(&["n9", "n10", "n11"]), "n9-11");
        assert_eq!(names(&["gpu-a", "gpu-b"]), "gpu-a,gpu-b");
        assert_eq!(names(&["n01", "n02"]), "n01,n02");
        assert_eq!(names(&["10.0.0.1", "10.0.0.2", "10.0.1.1"]), "10.0.0.1-2,10.0.1.1");
        assert_eq!(names(&[""]), "");
    }
}
