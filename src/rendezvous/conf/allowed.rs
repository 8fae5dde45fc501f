//! The allowed values of a key: checking them, and describing them in words.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::{Agent, ExitCode, InPlace, Protocol, RestartBudget, Setting, StoreMembers, StorePeers};
use crate::hang::judge::Mode;
use crate::rendezvous::messages::settings::{MOST_CODES, OnPartition, codes_text};
use crate::signals::FirstSignal;

/// The user's value for a key.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The text for messages.
    pub shown: &'a str,
    /// The number; NaN if it is none.
    pub number: f64,
    /// The whole number, if it is one.
    pub whole: Option<i64>,
}

/// A key's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Not given, and without a default.
    Nothing,
    /// A time.
    Seconds(Duration),
    /// A count.
    Whole(u32),
    /// Yes or no.
    Truth(bool),
    /// Exit codes.
    Codes(BTreeSet<u8>),
    /// A choice.
    Word(&'static str),
    /// A text.
    Text(String),
}

/// Shown as the user would write it; `Nothing` is empty.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => Ok(()),
            Self::Seconds(time) => write!(f, "{}", time.as_secs_f64()),
            Self::Whole(number) => write!(f, "{number}"),
            Self::Truth(truth) => write!(f, "{truth}"),
            Self::Codes(codes) => f.write_str(&codes_text(codes)),
            Self::Word(word) => f.write_str(word),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// The lower bound of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Least {
    /// Above zero.
    AboveZero,
    /// This time or more.
    Is(Duration),
}

impl Least {
    /// Zero or more.
    pub const ZERO: Self = Self::Is(Duration::ZERO);
}

/// The allowed values of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// A time, in seconds.
    Seconds {
        /// The lower bound.
        least: Least,
        /// The upper bound. [`TEN_YEARS`] is not mentioned in messages.
        most: Duration,
    },
    /// A whole number from the first to the second.
    Whole(u32, u32),
    /// Exit codes, joined by `+`, since PyTorch splits `--rdzv-conf` at each comma.
    Codes,
    /// The words that torch's `RendezvousParameters.get_as_bool` accepts.
    Truth,
    /// One of two words.
    OneOf(&'static [&'static str]),
    /// One word, and the reason why no other is allowed.
    Only(&'static str, &'static str),
    /// A text: a name, or the path of a file.
    Text,
}

/// Most bytes of a text: as many as a path of Linux.
const LONGEST_TEXT: usize = 4096;

/// The longest time of any setting.
const TEN_YEARS: Duration = Duration::from_secs(315_360_000);

const YES: [&str; 5] = ["1", "true", "t", "yes", "y"];
const NO: [&str; 5] = ["0", "false", "f", "no", "n"];

impl Allowed {
    /// A time above zero.
    pub const ABOVE_ZERO: Self = Self::seconds(Least::AboveZero, TEN_YEARS);
    /// Any time.
    pub const ZERO_OR_MORE: Self = Self::seconds(Least::ZERO, TEN_YEARS);

    /// A time within bounds.
    pub const fn seconds(least: Least, most: Duration) -> Self {
        Self::Seconds { least, most }
    }

    /// Check the user's value for the key `name`.
    ///
    /// # Errors
    /// A sentence with the key, the value and what is allowed.
    pub fn check(&self, name: &str, given: &Given<'_>) -> Result<Value, String> {
        let word = || given.shown.trim().to_lowercase();
        let value = match *self {
            Self::Seconds { least, most } => {
                let enough = match least {
                    Least::AboveZero => given.number > 0.0,
                    Least::Is(least) => given.number >= least.as_secs_f64(),
                };
                // No comparison holds for NaN.
                let time = (enough && given.number <= most.as_secs_f64())
                    .then(|| Duration::try_from_secs_f64(given.number).ok());
                time.flatten().map(Value::Seconds)
            }
            Self::Whole(least, most) => given
                .whole
                .and_then(|number| u32::try_from(number).ok())
                .filter(|number| (least..=most).contains(number))
                .map(Value::Whole),
            Self::Codes => codes_of(given.shown).map(Value::Codes),
            Self::Truth => {
                let text = given.shown.to_lowercase();
                let yes = YES.contains(&text.as_str());
                (yes || NO.contains(&text.as_str())).then_some(Value::Truth(yes))
            }
            Self::OneOf(choices) => choices.iter().find(|known| **known == word()).map(|known| Value::Word(known)),
            Self::Only(known, _) => (word() == known).then_some(Value::Word(known)),
            Self::Text => {
                let text = given.shown;
                let is_name = !text.is_empty() && text.len() <= LONGEST_TEXT && !text.chars().any(char::is_control);
                is_name.then(|| Value::Text(text.to_owned()))
            }
        };
        value.ok_or_else(|| format!("--rdzv-conf {name} is `{}`, must be {self}", given.shown))
    }
}

/// The words after "must be".
impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seconds { least, most } => {
                f.write_str("a number of seconds")?;
                match least {
                    Least::AboveZero => f.write_str(" above zero")?,
                    Least::Is(Duration::ZERO) => f.write_str(", zero or more")?,
                    Least::Is(least) => write!(f, ", {} or more", least.as_secs_f64())?,
                }
                if *most < TEN_YEARS { write!(f, ", at most {}", most.as_secs()) } else { Ok(()) }
            }
            Self::Whole(least, most) => write!(f, "a whole number from {least} to {most}"),
            Self::Codes => {
                write!(f, "1 to {MOST_CODES} exit codes from 1 to 255, each once and joined by +, such as 3+4")
            }
            Self::Truth => write!(f, "one of {}, {}", YES.join(", "), NO.join(", ")),
            Self::OneOf(choices) => match choices.split_last() {
                Some((last, [])) => write!(f, "`{last}`"),
                Some((last, others)) => write!(f, "`{}` or `{last}`", others.join("`, `")),
                None => Ok(()),
            },
            Self::Only(word, why) => write!(f, "`{word}`: {why}"),
            Self::Text => write!(f, "a text of 1 to {LONGEST_TEXT} bytes without control characters"),
        }
    }
}

/// Read exit codes. `None` if one is no number from 1 to 255 or occurs twice, or there are too many.
pub fn codes_of(text: &str) -> Option<BTreeSet<u8>> {
    let mut codes = BTreeSet::new();
    for code in text.split('+') {
        let code = code.trim().parse().ok().filter(|code| *code != 0)?;
        (codes.len() < MOST_CODES && codes.insert(code)).then_some(())?;
    }
    Some(codes)
}

impl Setting for BTreeSet<u8> {
    fn from_value(value: Value) -> Option<Self> {
        match value {
            Value::Codes(codes) => Some(codes),
            Value::Nothing => Some(Self::new()),
            _ => None,
        }
    }

    fn to_value(&self) -> Value {
        if self.is_empty() { Value::Nothing } else { Value::Codes(self.clone()) }
    }
}

impl Setting for Duration {
    fn from_value(value: Value) -> Option<Self> {
        if let Value::Seconds(time) = value { Some(time) } else { None }
    }

    fn to_value(&self) -> Value {
        Value::Seconds(*self)
    }
}

impl Setting for u32 {
    fn from_value(value: Value) -> Option<Self> {
        if let Value::Whole(number) = value { Some(number) } else { None }
    }

    fn to_value(&self) -> Value {
        Value::Whole(*self)
    }
}

impl Setting for bool {
    fn from_value(value: Value) -> Option<Self> {
        if let Value::Truth(truth) = value { Some(truth) } else { None }
    }

    fn to_value(&self) -> Value {
        Value::Truth(*self)
    }
}

impl Setting for String {
    fn from_value(value: Value) -> Option<Self> {
        if let Value::Text(text) = value { Some(text) } else { None }
    }

    fn to_value(&self) -> Value {
        Value::Text(self.clone())
    }
}

impl<T: Setting> Setting for Option<T> {
    fn from_value(value: Value) -> Option<Self> {
        if value == Value::Nothing { Some(None) } else { T::from_value(value).map(Some) }
    }

    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Nothing, T::to_value)
    }
}

/// A choice is the word that the user writes for it.
macro_rules! choices {
    ($($type:ident { $($variant:ident = $word:literal),+ })+) => {$(
        impl Setting for $type {
            fn from_value(value: Value) -> Option<Self> {
                match value {
                    $(Value::Word($word) => Some(Self::$variant),)+
                    _ => None,
                }
            }

            fn to_value(&self) -> Value {
                Value::Word(match self { $(Self::$variant => $word,)+ })
            }
        }
    )+};
}

choices! {
    OnPartition { Stop = "stop", Continue = "continue" }
    Agent { Rust = "rust", Torch = "torch" }
    FirstSignal { Leader = "leader", Group = "group" }
    ExitCode { Worker = "worker", Class = "class" }
    RestartBudget { Job = "job", Node = "node" }
    Mode { Off = "off", Report = "report", Restart = "restart" }
    InPlace { Off = "off", Gloo = "gloo", Nccl = "nccl" }
    StoreMembers { Off = "off", Warn = "warn", Strict = "strict" }
    StorePeers { SameUser = "same-user", Any = "any" }
    Protocol { Http = "http", Https = "https" }
}
