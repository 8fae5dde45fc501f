//! Made-up views, for what is hard to record.

use crate::hang::view::{Entry, Frame, Gil, Group, Life, Signature, State, View};

/// A rank that has answered.
pub(super) fn rank(rank: u32) -> View {
    let mut view = View::new(rank, 1);
    (view.answered, view.pid, view.state, view.gil) = (true, 1000 + rank, State::Sleeping, Gil::Free);
    view.frames = vec![frame("main", "/home/user/train.py", 41)];
    view
}

pub(super) fn frame(function: &str, file: &str, line: u32) -> Frame {
    Frame { function: function.to_owned(), file: file.to_owned(), line, peer: None }
}

/// A frame of torch.distributed.
pub(super) fn torch_frame(function: &str, peer: Option<u32>) -> Frame {
    Frame { peer, ..frame(function, "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 99) }
}

impl View {
    /// It has entered collectives of a group up to `last`, and those from `pending` on have not ended.
    pub(super) fn enters(mut self, name: &str, members: Option<&[u32]>, last: u64, pending: u64, op: &str) -> Self {
        let signature = |seq: u64| match seq == last {
            true => op.to_owned(),
            false => "all_reduce".to_owned(),
        };
        let first = last.saturating_sub(9).max(1);
        let tail: Vec<_> = (first..=last)
            .map(|seq| {
                let index = self.intern(Signature { op: signature(seq), shape: "[8] Float".to_owned() }).unwrap();
                Entry { seq, at: 0, signature: index }
            })
            .collect();
        let ranks = members.map(|ranks| ranks.iter().copied().collect());
        let pending = tail.iter().copied().filter(|entry| entry.seq >= pending).collect();
        let desc = if name == "0" { "default_pg" } else { "undefined" };
        self.groups.push(Group {
            name: name.to_owned(),
            desc: desc.to_owned(),
            ranks,
            last,
            oldest: first,
            pending,
            tail,
        });
        self
    }

    /// It waits in the last collective of the world.
    pub(super) fn waits(self, last: u64) -> Self {
        self.enters("0", None, last, last, "all_reduce")
    }

    /// It has left the last collective of the world.
    pub(super) fn passed(self, last: u64) -> Self {
        self.enters("0", None, last, last + 1, "all_reduce")
    }

    pub(super) fn ended(mut self, code: i32) -> Self {
        (self.life, self.answered) = (Life::Ended { code }, false);
        self.groups.clear();
        self
    }

    pub(super) fn stopped(mut self) -> Self {
        (self.state, self.answered, self.gil) = (State::Stopped, false, Gil::Unknown);
        self.groups.clear();
        self
    }

    pub(super) fn silent(mut self, gil: Gil) -> Self {
        (self.answered, self.gil) = (false, gil);
        self.groups.clear();
        self
    }

    pub(super) fn stands_in(mut self, frame: Frame) -> Self {
        self.frames.insert(0, frame);
        self
    }
}
