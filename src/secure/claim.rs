//! The bytes of the proof, for both ends.
//!
//! ```text
//! node          1 byte    1: a proof by a token follows
//!               8 bytes   the id of its token
//!               2 bytes   the length of the run id, little-endian; the run id follows
//!              32 bytes   HMAC by the token: "c", the connection's secret, and all bytes before
//!         or    1 byte    2: the certificate that TLS has shown is the proof
//!               2 bytes   the length of the run id; the run id follows
//! coordinator   1 byte    0: proven
//!              32 bytes   HMAC by the same token: "s", the connection's secret, and the node's HMAC
//!         or    1 byte    1: refused
//!               2 bytes   the length of the reason; the reason follows
//!         or    1 byte    2: admitted by its certificate
//! ```

use crate::wire::text::{RUN_ID_LIMIT_BYTES, is_steering, validate_run_id};

const BY_TOKEN: u8 = 1;
const BY_CERTIFICATE: u8 = 2;
const PROVEN: u8 = 0;
const REFUSED: u8 = 1;
const ADMITTED: u8 = 2;
/// Bytes of an HMAC-SHA-256.
pub const MAC_BYTES: usize = 32;
/// An HMAC-SHA-256.
pub type Mac = [u8; MAC_BYTES];
/// Bytes of a token's id.
const ID_BYTES: usize = 8;
/// Longest reason for a refusal.
const REASON_LIMIT_BYTES: usize = 512;

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The id of its token. `None`: its certificate alone speaks for it.
    pub key: Option<[u8; ID_BYTES]>,
    /// The run for which it speaks. With a token that was derived for one run, it can speak for no other.
    pub run_id: String,
}

impl Claim {
    /// The bytes that the node's HMAC covers. Without a token, these are all.
    ///
    /// # Errors
    /// The run id is too long.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let head = match &self.key {
            Some(key) => [&[BY_TOKEN], &key[..]].concat(),
            None => vec![BY_CERTIFICATE],
        };
        Ok([&head, &length_of(self.run_id.len())?.to_le_bytes()[..], self.run_id.as_bytes()].concat())
    }

    /// A claim and its HMAC, if it names a token, once all bytes of both have come. `None`: more have to come.
    ///
    /// # Errors
    /// These bytes begin no claim, more follow, or the run id is none: log records repeat it.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, Option<Mac>)>, String> {
        let (id_bytes, mac_bytes) = match bytes.first() {
            None => return Ok(None),
            Some(&BY_TOKEN) => (ID_BYTES, MAC_BYTES),
            Some(&BY_CERTIFICATE) => (0, 0),
            Some(other) => {
                return Err(format!("the proof has the version {other}, must have {BY_TOKEN} or {BY_CERTIFICATE}"));
            }
        };
        let Some((head, rest)) = bytes[1..].split_at_checked(id_bytes + 2) else { return Ok(None) };
        let (id, length) = head.split_at(id_bytes);
        let length = usize::from(length_of(usize::from(u16::from_le_bytes([length[0], length[1]])))?);
        if rest.len() < length + mac_bytes {
            return Ok(None);
        }
        let (run_id, mac) = rest.split_at(length);
        if mac.len() > mac_bytes {
            return Err("more bytes follow the proof".to_owned());
        }
        let run_id = str::from_utf8(run_id).map_err(|_| "the run id is not UTF-8".to_owned())?.to_owned();
        validate_run_id(&run_id)?;
        // Both have all their bytes, or none.
        Ok(Some((Self { key: id.try_into().ok(), run_id }, mac.try_into().ok())))
    }
}

fn length_of(length: usize) -> Result<u16, String> {
    let fits = u16::try_from(length).ok().filter(|_| length <= RUN_ID_LIMIT_BYTES);
    fits.ok_or_else(|| format!("the run id has {length} bytes, must have at most {RUN_ID_LIMIT_BYTES}"))
}

/// What a coordinator says to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The node is proven, and so is the coordinator, by this HMAC.
    Proven(Mac),
    /// The node is refused, and why: words of somebody who has proven nothing.
    Refused(String),
    /// The node's certificate is its proof, as the coordinator's is.
    Admitted,
}

impl Answer {
    /// As bytes. A reason that is too long is cut.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Proven(mac) => [&[PROVEN], &mac[..]].concat(),
            Self::Admitted => vec![ADMITTED],
            Self::Refused(reason) => {
                let text = &reason.as_bytes()[..reason.len().min(REASON_LIMIT_BYTES)];
                let length = u16::try_from(text.len()).unwrap_or_default();
                [&[REFUSED], &length.to_le_bytes()[..], text].concat()
            }
        }
    }

    /// An answer, once all its bytes have come. `None`: more have to come.
    ///
    /// # Errors
    /// These bytes begin no answer, or more follow.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, String> {
        let more = || "more bytes follow the answer".to_owned();
        match bytes {
            [] => Ok(None),
            [PROVEN, mac @ ..] if mac.len() < MAC_BYTES => Ok(None),
            [PROVEN, mac @ ..] => Ok(Some(Self::Proven(mac.try_into().map_err(|_| more())?))),
            [REFUSED, low, high, text @ ..] => {
                let length = usize::from(u16::from_le_bytes([*low, *high]));
                if length > REASON_LIMIT_BYTES {
                    return Err(format!("the reason has {length} bytes, must have at most {REASON_LIMIT_BYTES}"));
                }
                match text.len() {
                    came if came < length => Ok(None),
                    came if came > length => Err(more()),
                    _ => {
                        let text = String::from_utf8_lossy(text);
                        Ok(Some(Self::Refused(text.chars().filter(|c| !is_steering(*c)).collect())))
                    }
                }
            }
            [REFUSED, ..] => Ok(None),
            [ADMITTED] => Ok(Some(Self::Admitted)),
            [ADMITTED, ..] => Err(more()),
            [other, ..] => {
                Err(format!("the answer begins with {other}, must begin with {PROVEN}, {REFUSED} or {ADMITTED}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded_once_all_of_it_has_come() {
        for (key, mac) in [(Some([1, 2, 3, 4, 5, 6, 7, 8]), Some([9; MAC_BYTES])), (None, None)] {
            let claim = Claim { key, run_id: "läuft".into() };
            let mac_bytes = mac.map_or(Vec::new(), |mac: Mac| mac.to_vec());
            let bytes = [claim.encode().unwrap(), mac_bytes].concat();
            for end in 0..bytes.len() {
                assert_eq!(Claim::decode(&bytes[..end]), Ok(None));
            }
            assert_eq!(Claim::decode(&bytes), Ok(Some((claim, mac))));
        }
        let refused = |why: &str| Answer::Refused(why.into());
        for answer in [Answer::Proven([7; MAC_BYTES]), refused("no"), refused(""), Answer::Admitted] {
            let bytes = answer.encode();
            for end in 0..bytes.len() {
                assert_eq!(Answer::decode(&bytes[..end]), Ok(None));
            }
            assert_eq!(Answer::decode(&bytes), Ok(Some(answer)));
            assert!(Answer::decode(&[bytes, vec![0]].concat()).is_err());
        }
    }

    #[test]
    fn what_is_no_claim_and_what_is_no_answer_is_refused_at_its_first_wrong_byte() {
        let claim = |version: u8, length: u16| [&[version], &[0; 8][..], &length.to_le_bytes(), &[0xff; 1057]].concat();
        let named = |run_id: &str| Claim { key: None, run_id: run_id.to_owned() }.encode().unwrap();
        for (bytes, why) in [
            (vec![3], "version 3, must have 1 or 2"),
            (vec![2, 1, 4], "1025 bytes, must have at most 1024"),
            (vec![2, 0, 0, 0], "more bytes follow"),
            (claim(1, 1025)[..11].to_vec(), "1025 bytes, must have at most 1024"),
            (claim(1, 1024), "more bytes follow"),
            (claim(1, 1025 - 1)[..1067].to_vec(), "not UTF-8"),
            (named(""), "the run id is empty"),
            (
                named("job\n2026-11-24 ERROR forged"),
                "the run id `job\\n2026-11-24 ERROR forged` has control characters",
            ),
            (named("\u{1b}[2J"), "has control characters"),
            (named("\u{202e}boj"), "has control characters"),
        ] {
            let error = Claim::decode(&bytes).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(Claim { key: None, run_id: "x".repeat(1025) }.encode().is_err());
        for (bytes, why) in [
            (vec![3], "begins with 3"),
            (vec![2, 0], "more bytes follow"),
            (vec![1, 1, 2], "513 bytes, must have at most 512"),
        ] {
            let error = Answer::decode(&bytes).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let Answer::Refused(text) =
            Answer::decode(&Answer::Refused("a\nb\x1b[2J\u{202e}".repeat(99)).encode()).unwrap().unwrap()
        else {
            panic!()
        };
        assert!(text.len() <= 512 && !text.contains(is_steering));
    }
}
