//! Whose a frame is: the user's, a library's, torch's, or Python's own. Pure.

use super::Frame;

/// Whose a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user's own.
    User,
    /// An installed package's.
    Package,
    /// torch's, of this library, Python's own, or made by `exec`.
    Machinery,
}

/// Folders of torch, wherever it is installed or built.
const TORCH: [&str; 11] = [
    "/torch/distributed/",
    "/torch/utils/",
    "/torch/nn/",
    "/torch/optim/",
    "/torch/autograd/",
    "/torch/_dynamo/",
    "/torch/_inductor/",
    "/torch/_tensor.py",
    "/torch/_ops.py",
    "/torch/amp/",
    "/torch/cuda/",
];
const INSTALLED: [&str; 2] = ["/site-packages/", "/dist-packages/"];
const OWN: [&str; 2] = ["/torch/", "/elastic_rs/"];
const WORKER_LOOP: (&str, &str) = ("_worker_loop", "torch/utils/data/_utils/worker.py");
const DATA_LOADER: &str = "torch/utils/data/dataloader.py";

/// Whose a frame is, by its file.
pub fn whose(frame: &Frame) -> Whose {
    let file = &*frame.file;
    if file.starts_with('<') || file == super::UNKNOWN {
        return Whose::Machinery;
    }
    if let Some(inside) = INSTALLED.iter().find_map(|folder| file.split_once(folder)).map(|(_, inside)| inside) {
        let own = OWN.iter().any(|package| inside.starts_with(&package[1..]));
        return if own { Whose::Machinery } else { Whose::Package };
    }
    let standard = file.split("/lib/python3.").nth(1).is_some() || file.contains("/lib64/python3.");
    if standard || TORCH.iter().any(|folder| file.contains(folder)) { Whose::Machinery } else { Whose::User }
}

/// The frames that a user recognises, innermost first: the user's own. Without any those of packages, else the outermost one.
pub fn user_frames(frames: &[Frame]) -> Vec<&Frame> {
    for wanted in [Whose::User, Whose::Package] {
        let found: Vec<_> = frames.iter().filter(|frame| whose(frame) == wanted).collect();
        if !found.is_empty() {
            return found;
        }
    }
    frames.last().into_iter().collect()
}

/// Whether a thread waits for data workers: its innermost frame outside of the standard library is in torch's data loader.
pub fn waits_for_data(frames: &[Frame]) -> bool {
    innermost_outside_of_python(frames).is_some_and(|frame| frame.file.ends_with(DATA_LOADER))
}

/// Whether a data worker waits for work.
pub fn waits_for_work(frames: &[Frame]) -> bool {
    let (function, file) = WORKER_LOOP;
    innermost_outside_of_python(frames).is_some_and(|frame| frame.function == function && frame.file.ends_with(file))
}

fn innermost_outside_of_python(frames: &[Frame]) -> Option<&Frame> {
    let is_python = |file: &str| {
        let standard = file.contains("/lib/python3.") || file.contains("/lib64/python3.") || file.starts_with('<');
        standard && !INSTALLED.iter().any(|folder| file.contains(folder))
    };
    frames.iter().find(|frame| !is_python(&frame.file))
}

/// A frame in a few words: `load_batch train.py:88`.
pub fn words(frame: &Frame) -> String {
    let file = frame.file.rsplit('/').next().unwrap_or_default();
    match frame.line {
        Some(line) => format!("{} {file}:{line}", frame.function),
        None => format!("{} {file}", frame.function),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(of: &[(&str, &str)]) -> Vec<Frame> {
        let frame = |(function, file): &(&str, &str)| Frame {
            function: (*function).to_owned(),
            file: (*file).to_owned(),
            line: Some(1),
            peer: None,
        };
        of.iter().map(frame).collect()
    }

    #[test]
    fn a_file_is_the_users_unless_it_is_installed_or_pythons() {
        for (file, expected) in [
            ("/home/u/train.py", Whose::User),
            ("/home/u/torch/train.py", Whose::User),
            ("train.py", Whose::User),
            ("/v/lib/python3.11/site-packages/torch/nn/modules/module.py", Whose::Machinery),
            ("/src/pytorch/torch/nn/modules/module.py", Whose::Machinery),
            ("/v/lib/python3.11/site-packages/torchvision/ops.py", Whose::Package),
            ("/v/lib/python3.11/site-packages/elastic_rs/elastic/_run.py", Whose::Machinery),
            ("/usr/lib/python3/dist-packages/numpy/core.py", Whose::Package),
            ("/usr/lib/python3.11/threading.py", Whose::Machinery),
            ("<frozen importlib._bootstrap>", Whose::Machinery),
            ("?", Whose::Machinery),
        ] {
            assert_eq!(whose(&frames(&[("f", file)])[0]), expected, "{file}");
        }
    }

    #[test]
    fn a_data_worker_waits_for_work_or_loads() {
        let torch = "/v/lib/python3.11/site-packages/torch/utils/data";
        let (worker, fetch) = (format!("{torch}/_utils/worker.py"), format!("{torch}/_utils/fetch.py"));
        let idle = [("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py"), ("_worker_loop", &*worker)];
        assert!(waits_for_work(&frames(&idle)));
        let loads =
            [("Shards.__getitem__", "/u/data.py"), ("_MapDatasetFetcher.fetch", &*fetch), ("_worker_loop", &*worker)];
        assert!(!waits_for_work(&frames(&loads)));
        let collates = [("_MapDatasetFetcher.fetch", &*fetch), ("_worker_loop", &*worker)];
        assert!(!waits_for_work(&frames(&collates)));
        let loader = format!("{torch}/dataloader.py");
        let waits = [
            ("wait", "/usr/lib/python3.11/multiprocessing/connection.py"),
            ("_next_data", &*loader),
            ("main", "/u/t.py"),
        ];
        assert!(waits_for_data(&frames(&waits)));
        assert!(!waits_for_data(&frames(&waits[2..])));
    }

    #[test]
    fn without_a_frame_of_the_user_a_packages_stands_for_it() {
        let package = ("step", "/v/lib/python3.11/site-packages/lightning/loop.py");
        let of = frames(&[
            ("wait", "/v/lib/python3.11/site-packages/torch/distributed/c.py"),
            package,
            ("run", "/usr/lib/python3.11/runpy.py"),
        ]);
        assert_eq!(user_frames(&of), [&of[1]]);
        assert_eq!(user_frames(&of[2..]), [&of[2]]);
        assert!(user_frames(&[]).is_empty());
        assert_eq!(words(&of[1]), "step loop.py:1");
    }
}
