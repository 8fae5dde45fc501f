//! The doctor's questions: to the server at an address, in the core's encoding, and to this node's kernel.

use bytes::BytesMut;
use elastic_rs::hang::frames::{allowed, process};
use elastic_rs::rendezvous::messages::codec;
use elastic_rs::store::protocol::Request;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Return the first bytes that a c10d client sends to a store. A store answers with the nonce, as four bytes in little-endian order.
#[pyfunction]
pub fn store_question(py: Python<'_>, nonce: u32) -> Bound<'_, PyBytes> {
    let mut question = BytesMut::new();
    Request::<&[u8]>::Validate.encode(&mut question);
    Request::<&[u8]>::Ping { nonce }.encode(&mut question);
    PyBytes::new(py, &question)
}

/// Return the bytes that ask a coordinator for the version of its protocol. No session begins.
#[pyfunction]
pub fn coordinator_question(py: Python<'_>) -> Bound<'_, PyBytes> {
    let mut question = BytesMut::new();
    codec::encode_version_question(&mut question);
    PyBytes::new(py, &question)
}

/// Whether this is the answer of a coordinator that is protected by a token.
#[pyfunction]
pub fn coordinator_is_protected(answer: &[u8]) -> bool {
    codec::is_protected_answer(answer)
}

/// Return why an agent here cannot read its workers' stacks. None: it can.
#[pyfunction]
pub fn why_stacks_are_unknown() -> Option<String> {
    allowed::may_read_workers(&process::facts()).err().map(|obstacle| obstacle.to_string())
}

/// Return the version in a coordinator's answer. None if this is not a coordinator's answer.
#[pyfunction]
pub fn coordinator_version(answer: &[u8]) -> Option<u16> {
    codec::decode_version_answer(answer)
}
