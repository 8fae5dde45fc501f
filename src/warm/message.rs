//! The messages between agent and fork server, as bytes. Both have one version, because the agent starts the fork server.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::workers::WorkerSpec;

/// The content of a spawn request. The worker's descriptors are sent with the message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    argv: Vec<Vec<u8>>,
    env: Vec<(Vec<u8>, Vec<u8>)>,
    cwd: Vec<u8>,
    /// The CPUs of the worker. Empty: those of the fork server.
    pub cpus: Vec<u32>,
    /// The descriptors have a deadline's timer.
    pub has_deadline: bool,
}

impl Request {
    /// `cwd` is the working directory of a worker whose specification has none.
    pub fn new(spec: &WorkerSpec, cwd: &Path, has_deadline: bool) -> Request {
        let bytes = |text: &OsStr| text.as_bytes().to_vec();
        Request {
            argv: spec.command().into_iter().map(|word| bytes(word)).collect(),
            env: spec.env.iter().map(|(name, value)| (bytes(name), bytes(value))).collect(),
            cwd: bytes(spec.cwd.as_deref().unwrap_or(cwd).as_os_str()),
            cpus: spec.cpus.clone(),
            has_deadline,
        }
    }

    pub fn argv(&self) -> Vec<OsString> {
        self.argv.iter().cloned().map(OsString::from_vec).collect()
    }

    pub fn env(&self) -> BTreeMap<OsString, OsString> {
        let pair = |(name, value): (Vec<u8>, Vec<u8>)| (OsString::from_vec(name), OsString::from_vec(value));
        self.env.iter().cloned().map(pair).collect()
    }

    pub fn cwd(&self) -> PathBuf {
        OsString::from_vec(self.cwd.clone()).into()
    }

    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Option<Request> {
        postcard::from_bytes(bytes).ok()
    }
}

/// An answer of the fork server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Everything is imported. The fork server accepts spawn requests.
    Ready,
    /// The fork server cannot be used, for this reason, and ends.
    Refused(String),
    /// A worker's guard was forked. A pidfd of it is sent with the message.
    Forked,
}

/// Upper bound on the length of an answer.
pub(super) const MAX_ANSWER_BYTES: usize = 4096;

impl Answer {
    /// A reason that is too long is cut.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Answer::Refused(reason) if reason.len() > MAX_ANSWER_BYTES / 2 => {
                let end = (0..=MAX_ANSWER_BYTES / 2).rev().find(|at| reason.is_char_boundary(*at)).unwrap_or(0);
                encode(&Answer::Refused(format!("{} ...", &reason[..end])))
            }
            answer => encode(answer),
        }
    }

    pub fn decode(bytes: &[u8]) -> Option<Answer> {
        postcard::from_bytes(bytes).ok()
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(value).expect("bytes and texts in memory can always be written")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_comes_back_as_it_was_with_bytes_that_are_no_text() {
        let mut spec = WorkerSpec::new(0, "python");
        spec.args = vec!["-u".into(), OsString::from_vec(vec![0xff, b'a'])];
        spec.env = BTreeMap::from([("A".into(), OsString::from_vec(vec![0xfe])), ("B".into(), "".into())]);
        let request = Request::decode(&Request::new(&spec, Path::new("/here"), true).encode()).unwrap();
        assert_eq!(request.argv().iter().collect::<Vec<_>>(), spec.command());
        assert_eq!((request.env(), request.cwd()), (spec.env.clone(), PathBuf::from("/here")));
        spec.cwd = Some("/there".into());
        assert_eq!(Request::new(&spec, Path::new("/here"), true).cwd(), Path::new("/there"));
        assert_eq!(Request::decode(b"\x05"), None);
    }

    #[test]
    fn answers_fit_whatever_a_reason_says() {
        for answer in [Answer::Ready, Answer::Forked, Answer::Refused("threads".to_owned())] {
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
        let bytes = Answer::Refused("ä".repeat(MAX_ANSWER_BYTES)).encode();
        assert!(bytes.len() <= MAX_ANSWER_BYTES, "{}", bytes.len());
        assert!(matches!(Answer::decode(&bytes), Some(Answer::Refused(reason)) if reason.ends_with("ä ...")));
    }
}
