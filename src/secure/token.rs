//! Tokens, their ids, and the tokens that are derived from them.

use std::fmt::{self, Write};

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

/// Fewest digits of a token, which are 128 bits.
const FEWEST_DIGITS: usize = 32;
/// Most digits of a token.
const MOST_DIGITS: usize = 512;
/// Bytes of a new token.
const NEW_BYTES: usize = 32;

/// A secret that both ends of a connection hold. Not shown by `Debug`, nor in any error.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({})", self.id())
    }
}

/// A token's public name: logs show it, and the peer looks its own token up by it. The token cannot be found from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub [u8; 8]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl Token {
    /// A token as it is written in a file: hexadecimal digits.
    ///
    /// Its id is in logs, and whoever guesses a token can check it against the id. So a token must not be what people
    /// think of, and no other form differs from a passphrase.
    ///
    /// # Errors
    /// What is wrong with it, and what is allowed. The text does not repeat the token.
    pub fn parse(text: &str) -> Result<Self, String> {
        let what = if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            "with a character that is no hexadecimal digit".to_owned()
        } else if !(FEWEST_DIGITS..=MOST_DIGITS).contains(&text.len()) {
            format!("of {} digits", text.len())
        } else {
            return Ok(Self(text.to_owned()));
        };
        Err(format!(
            "a token {what}; {FEWEST_DIGITS} to {MOST_DIGITS} hexadecimal digits are allowed, and `elastic-rs token new` writes them"
        ))
    }

    /// A new token of 256 bits, from the system's randomness.
    ///
    /// # Errors
    /// The system has none.
    pub fn random() -> Result<Self, String> {
        let mut bytes = [0; NEW_BYTES];
        SystemRandom::new().fill(&mut bytes).map_err(|_| "the system has no randomness".to_owned())?;
        Ok(Self(hex(&bytes)))
    }

    /// Its public name.
    pub fn id(&self) -> KeyId {
        let mut id = [0; 8];
        id.copy_from_slice(&self.mac(&[b"elastic_rs key id"]).as_ref()[..8]);
        KeyId(id)
    }

    /// The token of one run, of the coordinator's master token.
    #[must_use]
    pub fn for_run(&self, run_id: &str) -> Self {
        Self(hex(self.mac(&[b"elastic_rs run ", run_id.as_bytes()]).as_ref()))
    }

    /// The token with which others may read how the job does, and change nothing.
    #[must_use]
    pub fn for_observers(&self) -> Self {
        Self(hex(self.mac(&[b"elastic_rs observe"]).as_ref()))
    }

    /// The token itself, to be written into a file.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// An HMAC-SHA-256 of these parts, one after the other, by the token.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.key());
        parts.iter().for_each(|part| context.update(part));
        context.sign()
    }

    pub(super) fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, self.0.as_bytes())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_or_odd_tokens_are_refused_without_being_shown() {
        for (text, why) in [
            ("", "0 digits"),
            ("facade", "of 6 digits"),
            ("0123456789abcdef0123456789abcde", "31 digits"),
            ("0123456789ABCDEFGHIJKL==", "a character that is no hexadecimal digit"),
            ("secret secret secret secret secret secret", "no hexadecimal digit"),
            ("sécret_sécret_sécret_sécret_sécret_sécret", "no hexadecimal digit"),
            (&"f".repeat(513), "513 digits"),
        ] {
            let error = Token::parse(text).unwrap_err();
            assert!(error.contains(why) && error.contains("32 to 512 hexadecimal digits"), "{error}");
            assert!(error.contains("`elastic-rs token new`"), "{error}");
            assert!(text.is_empty() || !error.contains(text), "{error}");
        }
        for text in ["0123456789abcdef0123456789abcdef", "0123456789ABCDEF0123456789abcdef", &"f".repeat(512)] {
            assert_eq!(Token::parse(text).unwrap().reveal(), text);
        }
    }

    /// Whoever has read a token's id in a log tries words: a passphrase would be found at once.
    #[test]
    fn a_passphrase_is_no_token() {
        for text in [
            "correct-horse-battery-staple-1",
            "correcthorsebatterystaplecorrecthorse",
            "Y29ycmVjdC1ob3JzZS1iYXR0ZXJ5LXN0YXBsZS0x",
        ] {
            assert!(Token::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_derived_token_is_another_one_and_always_the_same() {
        let token = Token::parse("0123456789abcdef0123456789abcdef").unwrap();
        let all = [token.clone(), token.for_run("a"), token.for_run("b"), token.for_observers()];
        for (at, one) in all.iter().enumerate() {
            assert!(Token::parse(one.reveal()).is_ok());
            assert!(all[at + 1..].iter().all(|other| other != one && other.id() != one.id()));
        }
        assert_eq!(token.for_run("a"), token.for_run("a"));
        assert!(!format!("{token:?}").contains("0123456789abcdef"));
        assert_ne!(Token::random().unwrap(), Token::random().unwrap());
        assert!(Token::parse(Token::random().unwrap().reveal()).is_ok());
    }
}
