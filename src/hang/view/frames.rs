//! Frames of a Python thread: which are the user's, and in which call of torch's a rank waits.

use serde::{Deserialize, Serialize};

use super::{FRAMES_LIMIT, FUNCTION_LIMIT_BYTES, PATH_LIMIT_BYTES, State, at_most, fit};
use crate::wire::text::check;

/// Number of innermost frames that are searched for a call of torch's. Decorators stand between it and the user's frame.
const NEAR: usize = 6;

/// A frame of a Python thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Frame {
    /// The function's qualified name, such as `Dataset.__getitem__`.
    pub function: String,
    /// Its file.
    pub file: String,
    /// The line; 0: unknown.
    pub line: u32,
    /// In a call that sends to or receives from one rank: that rank.
    pub peer: Option<u32>,
}

/// What a rank waits for outside of recorded collectives, by its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsIn {
    /// A collective of torch.distributed.
    Collective,
    /// A message to or from one rank, if the frame says which.
    Peer(Option<u32>),
    /// All other ranks: it makes a process group, and waits for their keys in the store.
    Store,
}

/// A process that loads data for a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataWorker {
    /// Its process.
    pub pid: u32,
    /// What the kernel says of its main thread.
    pub state: State,
    /// Frames of its main thread, the innermost first.
    pub frames: Vec<Frame>,
}

/// Files of torch that a rank waits in.
const C10D: &str = "torch/distributed/distributed_c10d.py";
/// Torch's data loader.
pub const DATA_LOADER: &str = "torch/utils/data/dataloader.py";
/// Torch's loop of data workers.
pub const DATA_WORKER: &str = "torch/utils/data/_utils/worker.py";

/// Folders of torch that are seen in a checkout of it, which is no installed package.
const TORCH: &[&str] = &[
    "torch/distributed/",
    "torch/nn/",
    "torch/utils/",
    "torch/autograd/",
    "torch/optim/",
    "torch/_dynamo/",
    "torch/_inductor/",
    "torch/_functorch/",
    "torch/amp/",
    "torch/cuda/",
    "torch/multiprocessing/",
];

impl Frame {
    /// The function's name without its class.
    pub fn name(&self) -> &str {
        self.function.rsplit('.').next().unwrap_or(&self.function)
    }

    /// The file's name without its folders.
    pub fn file_name(&self) -> &str {
        self.file.rsplit('/').next().unwrap_or(&self.file)
    }

    /// Whether it is neither torch's, nor an installed package's, nor the standard library's.
    pub fn is_users(&self) -> bool {
        let file = &self.file;
        let installed = ["/site-packages/", "/dist-packages/", "/lib/python3"].iter().any(|part| file.contains(part));
        let generated = file.is_empty() || file.starts_with('<') || file == "?";
        let torch = TORCH.iter().any(|folder| file.find(folder).is_some_and(|at| file[..at].ends_with('/')));
        !(installed || generated || torch)
    }

    pub(super) fn fit(&mut self) {
        fit(&mut self.function, FUNCTION_LIMIT_BYTES);
        // The end of a path says more than its beginning.
        if self.file.len() > PATH_LIMIT_BYTES {
            let mut from = self.file.len() - PATH_LIMIT_BYTES + '…'.len_utf8();
            while !self.file.is_char_boundary(from) {
                from += 1;
            }
            self.file = format!("…{}", &self.file[from..]);
        }
        fit(&mut self.file, PATH_LIMIT_BYTES);
    }

    pub(in crate::hang) fn validate(&self) -> Result<(), String> {
        check("function of a frame", &self.function, FUNCTION_LIMIT_BYTES)?;
        check("file of a frame", &self.file, PATH_LIMIT_BYTES)
    }
}

impl DataWorker {
    pub(super) fn fit(&mut self) {
        self.frames.truncate(FRAMES_LIMIT);
        self.frames.iter_mut().for_each(Frame::fit);
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        at_most("frames of a data worker", self.frames.len(), FRAMES_LIMIT)?;
        self.frames.iter().try_for_each(Frame::validate)
    }

    /// Whether it waits for work: between torch's loop and the innermost frame there is only the queue.
    pub fn is_idle(&self) -> bool {
        if self.state.is_stopped() {
            return false;
        }
        let is_loop = |frame: &Frame| frame.name() == "_worker_loop" && frame.file.ends_with(DATA_WORKER);
        let waits = |frame: &Frame| {
            let file = &frame.file;
            ["/multiprocessing/", "/queue.py", "/threading.py", "/selectors.py"].iter().any(|part| file.contains(part))
        };
        self.frames.iter().position(is_loop).is_some_and(|at| self.frames[..at].iter().all(waits))
    }
}

/// The user's frame that stands innermost, or the innermost one.
pub fn users(frames: &[Frame]) -> Option<&Frame> {
    frames.iter().find(|frame| frame.is_users()).or(frames.first())
}

/// The user's frames, the innermost first, or the innermost one.
pub fn all_users(frames: &[Frame]) -> Vec<&Frame> {
    let users: Vec<_> = frames.iter().filter(|frame| frame.is_users()).collect();
    if users.is_empty() { frames.first().into_iter().collect() } else { users }
}

/// Whether a file is the standard library's, or generated.
pub fn is_pythons(file: &str) -> bool {
    let installed = ["/site-packages/", "/dist-packages/"].iter().any(|folder| file.contains(folder));
    let standard = ["/lib/python3", "/lib64/python3"].iter().any(|folder| file.contains(folder));
    (standard && !installed) || file.starts_with('<')
}

/// Whether the rank waits for a data worker.
pub fn waits_for_data(frames: &[Frame]) -> bool {
    let near = frames.iter().take_while(|frame| !frame.is_users());
    near.into_iter().any(|frame| frame.file.ends_with(DATA_LOADER))
}

/// The frame of torch.distributed in which the rank waits, and what for.
pub fn waits_in(frames: &[Frame]) -> Option<(&Frame, WaitsIn)> {
    let near = frames.iter().take(NEAR).filter(|frame| frame.file.ends_with(C10D));
    near.filter_map(|frame| Some((frame, kind_of(frame)?))).next()
}

fn kind_of(frame: &Frame) -> Option<WaitsIn> {
    Some(match frame.name() {
        "send" | "recv" | "isend" | "irecv" | "batch_isend_irecv" => WaitsIn::Peer(frame.peer),
        "init_process_group"
        | "new_group"
        | "_new_group_with_tag"
        | "_new_process_group_helper"
        | "split_group"
        | "_store_based_barrier" => WaitsIn::Store,
        "all_reduce"
        | "all_reduce_coalesced"
        | "broadcast"
        | "all_gather"
        | "all_gather_coalesced"
        | "all_gather_into_tensor"
        | "all_gather_object"
        | "barrier"
        | "monitored_barrier"
        | "reduce"
        | "gather"
        | "gather_object"
        | "scatter"
        | "scatter_object_list"
        | "all_to_all"
        | "all_to_all_single"
        | "reduce_scatter"
        | "reduce_scatter_tensor"
        | "broadcast_object_list"
        | "wait" => WaitsIn::Collective,
        _ => return None,
    })
}
