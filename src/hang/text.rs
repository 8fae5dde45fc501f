//! A finding in words: the six lines on the terminal, the one of `status`, and the one that says that it is over.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::finding::{Collective, Entered, Finding, Kind, Place};
use super::ranks::Ranks;
use super::view::{Class, Frame, Life, Signature};
use crate::wire::text::cut;

/// Most lines that a finding prints.
pub const LINES_LIMIT: usize = 6;
/// Longest line, in bytes.
const LINE_LIMIT_BYTES: usize = 400;
/// Most frames of a line.
const FRAMES: usize = 3;

/// What a finding does not say itself.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The time without progress.
    pub still: Duration,
    /// The last step, if the training script says it.
    pub step: Option<u64>,
    /// The median time of a step.
    pub step_time: Option<Duration>,
    /// Number of ranks in the world.
    pub ranks: usize,
    /// The node of the first named rank.
    pub node: Option<String>,
    /// How long ago the first named rank ended.
    pub ended_ago: Option<Duration>,
    /// Where the dumps of all ranks are, if there are any.
    pub dumps: Option<String>,
    /// The command that shows more.
    pub more: Option<String>,
    /// What happens now.
    pub next: Next,
    /// Somebody has looked at the ranks of one node alone.
    pub is_own: bool,
}

/// What happens after a hang was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Next {
    /// Nothing: `--hang=report`.
    #[default]
    Report,
    /// The workers are restarted now.
    Restart,
    /// They are restarted if nothing moves until twice the limit.
    RestartLater,
    /// The budget of restarts for hangs is used up.
    NoBudget,
    /// Not while somebody types at a rank.
    Attended,
    /// Not while the awaited rank computes.
    Computes,
}

/// The lines on the terminal: what stands still, why, where, the others, the dumps, and what happens.
pub fn lines(finding: &Finding, facts: &Facts) -> Vec<String> {
    if finding.kind == Kind::Suspended {
        return vec![suspended(finding, facts)];
    }
    let others = finding.others.as_ref().filter(|_| !finding.ranks.is_empty());
    let others = others.and_then(|place| Some(format!("others: {}", place_in(place, finding)?)));
    let dumps = facts.dumps.as_ref().map(|dumps| format!("dumps of {}: {dumps}", all(facts)));
    let more = facts.more.as_ref().map(|more| format!("more: {more}"));
    let dumps = dumps.into_iter().chain(more).collect::<Vec<_>>().join("; ");
    let indented =
        [Some(cause(finding, facts)), stands_at(finding), others, Some(dumps), Some(next(facts.next).to_owned())];
    let indented = indented.into_iter().flatten().filter(|line| !line.is_empty()).map(|line| format!("  {line}"));
    let lines = std::iter::once(headline(finding, facts)).chain(indented).map(|line| cut(line, LINE_LIMIT_BYTES));
    lines.take(LINES_LIMIT).collect()
}

/// The line that says that a hang is over.
pub fn over(still: Duration) -> String {
    format!("training goes on, after {} without progress", seconds(still))
}

/// For `status`: whom the others wait for, and where that rank stands.
pub fn status(finding: &Finding, facts: &Facts) -> String {
    let whom = match finding.kind {
        Kind::Suspended => return suspended(finding, facts),
        _ if finding.ranks.is_empty() => format!("stands still for {}", seconds(facts.still)),
        _ => format!("waits {} for {}", seconds(facts.still), ranks(&finding.ranks)),
    };
    let place = finding.places.first().or(finding.others.as_ref()).and_then(|place| place.frames.first());
    let place = place.map(|frame| format!(" at {}:{}", frame.file_name(), frame.line)).unwrap_or_default();
    let usually = facts.step_time.map(|time| format!(" (usually {})", seconds(time))).unwrap_or_default();
    cut(format!("{whom}{place}{usually}"), LINE_LIMIT_BYTES)
}

fn suspended(finding: &Finding, facts: &Facts) -> String {
    let all = match facts.is_own {
        true => format!("all {} ranks of this node", finding.ranks.len()),
        false => format!("all {} ranks", facts.ranks),
    };
    format!("training is suspended: {all} are stopped by a signal (state T); SIGCONT lets them go on")
}

fn headline(finding: &Finding, facts: &Facts) -> String {
    let step = facts.step.map(|step| format!("step {step}"));
    let time = facts.step_time.map(|time| format!("a step took {}", seconds(time)));
    let known: Vec<_> = step.into_iter().chain(time).collect();
    let known = if known.is_empty() { String::new() } else { format!(" ({})", known.join("; ")) };
    let (waiting, all) = (finding.waiting.len(), facts.ranks.max(finding.waiting.len()));
    let who = match finding.ranks.len() {
        0 if waiting == all => format!("all {all} ranks wait"),
        0 => format!("{waiting} of {all} ranks wait"),
        count => {
            let details: Vec<_> = match (count, finding.places.first()) {
                (1, Some(place)) => {
                    facts.node.iter().cloned().chain((place.pid > 0).then(|| format!("pid {}", place.pid))).collect()
                }
                (1, None) => facts.node.iter().cloned().collect(),
                _ => Vec::new(),
            };
            let details = if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) };
            format!("{waiting} of {all} ranks wait for {}{details}", ranks(&finding.ranks))
        }
    };
    format!("training stands still for {}{known}: {who}", seconds(facts.still))
}

/// What holds the others up, by kind.
pub fn cause(finding: &Finding, facts: &Facts) -> String {
    let who = ranks(&finding.ranks);
    let many = finding.ranks.len() > 1;
    let (has, was, does, holds) = if many { ("have", "were", "do", "hold") } else { ("has", "was", "does", "holds") };
    let place = finding.places.first();
    match finding.kind {
        Kind::Ended => {
            let ago = facts.ended_ago.map(|ago| format!(" {} ago", seconds(ago))).unwrap_or_default();
            match place.map(|place| place.life) {
                Some(Life::Ended { code }) => format!("{who} {has} ended ({}){ago}", exit(code)),
                Some(Life::MainThreadEnded { raised: true }) => {
                    format!("the main thread of {who} raised an exception{ago}; another thread keeps the process alive")
                }
                Some(Life::MainThreadEnded { raised: false }) => {
                    format!("the main thread of {who} {has} ended{ago}; another thread keeps the process alive")
                }
                Some(Life::Running) | None => format!("{who} {has} ended{ago}"),
            }
        }
        Kind::Absent => format!("nothing is known of {who}: no agent has shown it"),
        Kind::Stopped | Kind::Suspended => format!("{who} {was} stopped by a signal (state T)"),
        Kind::Mismatch => mismatch(finding),
        Kind::GilHeld => format!("{who} {holds} the GIL in C{}", activity(place)),
        Kind::Silent => format!("{who} {does} not answer{}", activity(place)),
        Kind::NotEntered => match (data_worker(finding), &finding.collective) {
            (Some(waits), _) => waits,
            (None, Some(of)) => format!("{who} {has} not entered {}{}", collective(of, true), activity(place)),
            (None, None) => format!("{who} {has} not come to a message or a new process group{}", activity(place)),
        },
        Kind::Crossed => crossed(finding, &who),
        Kind::Inside => {
            let inside =
                finding.collective.as_ref().map_or_else(|| "a collective".to_owned(), |of| collective(of, false));
            let why = if facts.is_own { "a rank of another node, library or network" } else { "library or network" };
            format!("{} are inside {inside}: {why}", all(facts))
        }
        Kind::Outside => {
            let be = if many { "are" } else { "is" };
            format!("a guess: {who} {be} outside of torch.distributed, the others are inside{}", activity(place))
        }
        Kind::Odd => {
            let stand = if many { "stand" } else { "stands" };
            format!("a guess: {who} {stand} elsewhere than the {} others{}", finding.waiting.len(), activity(place))
        }
        Kind::Alike => format!("a guess: {} stand at one line{}", all(facts), activity(finding.others.as_ref())),
    }
}

fn all(facts: &Facts) -> &'static str {
    if facts.is_own { "all ranks of this node" } else { "all ranks" }
}

fn mismatch(finding: &Finding) -> String {
    let (seq, group) = match &finding.collective {
        Some(of) => (of.seq, title(of)),
        None => (0, "a group"),
    };
    match &finding.classes[..] {
        [few @ .., most] if !finding.tie && !few.is_empty() => {
            let entered = |class: &Entered| format!("{} entered {}", ranks(&class.ranks), signature(&class.signature));
            let few: Vec<_> = few.iter().take(2).map(entered).collect();
            let others = match most.ranks.len() {
                1 => ranks(&most.ranks),
                count => format!("the {count} others"),
            };
            format!("{} as #{seq} of {group}, {others} {}", few.join(", "), signature(&most.signature))
        }
        classes => {
            let entered = |class: &Entered| format!("{} {}", ranks(&class.ranks), signature(&class.signature));
            let classes: Vec<_> = classes.iter().take(3).map(entered).collect();
            format!("ranks entered different collectives as #{seq} of {group}: {}", classes.join(", "))
        }
    }
}

fn crossed(finding: &Finding, who: &str) -> String {
    if let Some((first, second)) = &finding.turned {
        return format!("{who} entered group {first} before {second}, other than in its last 3 turns");
    }
    let waits = finding.chain.iter().take(3).map(|wait| match wait.seq {
        0 => format!("{} for {}", wait.rank, wait.on),
        seq => format!("{} for {} in {} #{seq}", wait.rank, wait.on, wait.group),
    });
    format!("{who} wait for one another: {}", waits.collect::<Vec<_>>().join(", "))
}

/// The rank waits for a process that loads its data.
fn data_worker(finding: &Finding) -> Option<String> {
    let place = finding.places.first()?;
    let pid = place.data_worker?;
    let who = format!("rank {}", place.rank);
    if place.data_worker_stopped {
        return Some(format!("{who} waits for its data worker {pid}, which was stopped by a signal (state T)"));
    }
    let at = place.frames.first().map(|frame| format!(": {}", at(frame))).unwrap_or_default();
    Some(format!("{who} waits for its data worker {pid}{at}"))
}

/// What a rank does where it stands.
fn activity(place: Option<&Place>) -> String {
    let Some(place) = place else { return String::new() };
    match (&place.call, place.class) {
        (Some(call), _) if call.reads_standard_input() => "; it reads standard input".to_owned(),
        (_, Some(Class::Busy)) => "; it computes".to_owned(),
        (_, Some(Class::Moving)) => "; it reads or writes".to_owned(),
        (Some(call), _) if !call.name.is_empty() => format!("; it sleeps in {call}"),
        (_, Some(Class::Idle)) => "; it sleeps".to_owned(),
        (_, None) => String::new(),
    }
}

/// The user's frames of the first named rank.
fn stands_at(finding: &Finding) -> Option<String> {
    let place = finding.places.first().or(finding.others.as_ref())?;
    let frames: Vec<_> = place.frames.iter().take(FRAMES).map(at).collect();
    let rank = if finding.ranks.len() > 1 { format!("rank {} ", place.rank) } else { String::new() };
    (!frames.is_empty()).then(|| format!("{rank}at {}", frames.join(" < ")))
}

/// Where the waiting ranks stand, and in which collective.
fn place_in(place: &Place, finding: &Finding) -> Option<String> {
    let line = at(place.frames.first()?);
    let op = finding.collective.as_ref().map(|of| of.signature.op.as_str()).filter(|op| !op.is_empty());
    Some(op.map_or(line.clone(), |op| format!("{line} in {op}")))
}

fn next(next: Next) -> &'static str {
    match next {
        Next::Report => "nothing is stopped (--hang=report)",
        Next::Restart => "the workers are restarted (--hang=restart)",
        Next::RestartLater => "the workers are restarted if nothing moves for as long again (--hang=restart)",
        Next::NoBudget => "nothing is stopped: all restarts for hangs are used up (--hang=restart)",
        Next::Attended => "nothing is stopped: a rank reads standard input or is in a debugger (--hang=restart)",
        Next::Computes => "nothing is stopped: it computes, and --hang-timeout is not given (--hang=restart)",
    }
}

fn collective(of: &Collective, shape: bool) -> String {
    let op = if of.signature.op.is_empty() { "collective" } else { &of.signature.op };
    let shape = Some(&of.signature.shape).filter(|text| shape && !text.is_empty());
    let shape = shape.map(|text| format!(" ({text})")).unwrap_or_default();
    let group = if shape.is_empty() && of.group.is_empty() { String::new() } else { format!(" of {}", title(of)) };
    format!("{op} #{}{group}{shape}", of.seq)
}

fn title(of: &Collective) -> &str {
    if of.desc.is_empty() || of.desc == "undefined" { &of.group } else { &of.desc }
}

fn signature(signature: &Signature) -> String {
    if signature.shape.is_empty() { signature.op.clone() } else { format!("{} {}", signature.op, signature.shape) }
}

fn at(frame: &Frame) -> String {
    format!("{} {}:{}", frame.name(), frame.file_name(), frame.line)
}

fn ranks(ranks: &Ranks) -> String {
    format!("rank{} {ranks}", if ranks.len() == 1 { "" } else { "s" })
}

fn exit(code: i32) -> String {
    if code < 0 { format!("signal {}", code.unsigned_abs()) } else { format!("exit code {code}") }
}

/// `0.21 s`, `3.4 s`, `183 s`, `45 min`.
fn seconds(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds @ ..1.0 => format!("{seconds:.2} s"),
        seconds @ 1.0..10.0 => format!("{seconds:.1} s"),
        seconds @ 10.0..1800.0 => format!("{seconds:.0} s"),
        seconds => format!("{:.0} min", seconds / 60.0),
    }
}

#[cfg(test)]
mod tests;
