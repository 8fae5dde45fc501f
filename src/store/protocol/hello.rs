//! What a new connection speaks: c10d, another protocol that the server knows, or something else.
//!
//! Owns the decision from a connection's first bytes. Leaves reading them to the server.

use super::{Query, VALIDATION_MAGIC};

/// What the first bytes of a connection say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visitor {
    /// Too few bytes to decide.
    Unknown,
    /// A c10d client, whose `VALIDATE` is complete.
    Client,
    /// The magic at this index: another protocol.
    Upgrade(usize),
    /// Neither: an unknown client.
    Foreign,
}

/// Tell a connection by its first bytes, as early as possible. `magics` begin the other protocols that the server knows.
pub fn recognise<'a>(first: &[u8], magics: impl Iterator<Item = &'a [u8]> + Clone) -> Visitor {
    let mut validate = [Query::Validate.code(); 5];
    validate[1..].copy_from_slice(&VALIDATION_MAGIC.to_le_bytes());
    if first.starts_with(&validate) {
        return Visitor::Client;
    }
    if let Some(at) = magics.clone().position(|magic| first.starts_with(magic)) {
        return Visitor::Upgrade(at);
    }
    let may_become = validate.starts_with(first) || magics.clone().any(|magic| magic.starts_with(first));
    if may_become { Visitor::Unknown } else { Visitor::Foreign }
}

/// The first line of an unknown client's bytes as printable text, at most [`PREVIEW_BYTES`] of them.
///
/// `None` if they begin like a c10d query: then they may hold keys and values, which must not be logged.
pub fn preview(first: &[u8]) -> Option<String> {
    let code = *first.first()?;
    if Query::from_code(code).is_some() {
        return None;
    }
    let line = first.split(|byte| matches!(byte, b'\r' | b'\n')).next()?;
    Some(printable(line))
}

/// At most [`PREVIEW_BYTES`] of these, escaped.
pub fn printable(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(PREVIEW_BYTES)].escape_ascii().to_string()
}

/// Most bytes of an unknown client that are shown.
pub const PREVIEW_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_are_recognised_as_early_as_possible() {
        let magics = [&b"ERS1"[..]];
        let cases: [(&[u8], Visitor); 9] = [
            (b"", Visitor::Unknown),
            (b"\0\xce\xf7\x85", Visitor::Unknown),
            (b"\0\xce\xf7\x85\x3c", Visitor::Client),
            (b"\0\xce\xf7\x85\x3c\x0d\x01", Visitor::Client),
            (b"\0\xce\xf7\x86", Visitor::Foreign),
            (b"\x07", Visitor::Foreign),
            (b"ER", Visitor::Unknown),
            (b"ERS1 and more", Visitor::Upgrade(0)),
            (b"ERS2", Visitor::Foreign),
        ];
        for (first, visitor) in cases {
            assert_eq!(recognise(first, magics.into_iter()), visitor, "{}", first.escape_ascii());
        }
    }

    #[test]
    fn previews_are_short_printable_and_hold_no_keys() {
        assert_eq!(preview(b"GET / HTTP/1.1\r\nHost: x\r\n").as_deref(), Some("GET / HTTP/1.1"));
        assert_eq!(preview(b"\x16\x03\x01\xff").as_deref(), Some("\\x16\\x03\\x01\\xff"));
        assert_eq!(preview(&[b'a'; 1000]).map(|text| text.len()), Some(PREVIEW_BYTES));
        assert_eq!(preview(b"\x01\x06\0\0\0\0\0\0\0secret"), None);
        assert_eq!(preview(b""), None);
    }
}
