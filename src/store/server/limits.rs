//! The limits of a server, each declared once: name, unit, range and help. `elastic-rs store serve` and the binding read this table.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::ServerOptions;

/// A limit that a user can set.
#[derive(Debug)]
pub struct Limit {
    /// Its name.
    pub name: &'static str,
    /// What it limits.
    pub help: &'static str,
    field: Field,
}

#[derive(Debug)]
enum Field {
    /// A number of things.
    Number(Of<usize>),
    /// A number of bytes.
    Bytes(Of<usize>),
    /// A time, with the allowed seconds.
    Time(Of<Duration>, RangeInclusive<u32>),
}

/// A limit's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// A number. `usize::MAX` is no limit.
    Number(usize),
    /// A number of bytes. `usize::MAX` is no limit.
    Bytes(usize),
    /// A time.
    Time(Duration),
}

const TEN_YEARS: u32 = 315_360_000;
/// `MAX_TCP_KEEPIDLE` and `MAX_TCP_KEEPINTVL` of Linux, which counts whole seconds.
const KEEPALIVE: u32 = 32_767;

/// All limits.
pub static LIMITS: [Limit; 13] = [
    number("connections", "connections that may be open at once", |options| &mut options.max_connections),
    number("keys", "stored keys and queues", |options| &mut options.table.keys),
    bytes("stored_bytes", "keys, values and queue items together", |options| &mut options.table.stored_bytes),
    bytes("key_bytes", "length of a key", |options| &mut options.limits.key_bytes),
    bytes("value_bytes", "length of a value in a request", |options| &mut options.limits.value_bytes),
    number("list_len", "keys in one request", |options| &mut options.limits.list_len),
    bytes("message_bytes", "length of one request", |options| &mut options.limits.message_bytes),
    bytes("reply_buffer_bytes", "replies that may wait for a client that asks for more", |options| {
        &mut options.reply_buffer_bytes
    }),
    time(
        "hello_timeout_s",
        "time in which a new connection must show its protocol",
        |options| &mut options.hello_timeout,
        0..=TEN_YEARS,
    ),
    time(
        "flush_timeout_s",
        "time in which a client that has closed its sending side must read the replies",
        |options| &mut options.flush_timeout,
        0..=TEN_YEARS,
    ),
    time(
        "keepalive_idle_s",
        "silence after which the kernel probes a client's host",
        |options| &mut options.keepalive_idle,
        1..=KEEPALIVE,
    ),
    time(
        "keepalive_interval_s",
        "time between such probes while none is answered",
        |options| &mut options.keepalive_interval,
        1..=KEEPALIVE,
    ),
    time(
        "log_period_s",
        "time in which at most 20 rejections of each cause are logged, 0 for all",
        |options| &mut options.log_period,
        0..=TEN_YEARS,
    ),
];

type Of<T> = fn(&mut ServerOptions) -> &mut T;

const fn number(name: &'static str, help: &'static str, of: Of<usize>) -> Limit {
    Limit { name, help, field: Field::Number(of) }
}

const fn bytes(name: &'static str, help: &'static str, of: Of<usize>) -> Limit {
    Limit { name, help, field: Field::Bytes(of) }
}

const fn time(name: &'static str, help: &'static str, of: Of<Duration>, allowed: RangeInclusive<u32>) -> Limit {
    Limit { name, help, field: Field::Time(of, allowed) }
}

impl Limit {
    /// The limit of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        LIMITS.iter().find(|limit| limit.name == name)
    }

    /// Its default.
    pub fn default(&self) -> Amount {
        let mut options = ServerOptions::default();
        match &self.field {
            Field::Number(of) => Amount::Number(*of(&mut options)),
            Field::Bytes(of) => Amount::Bytes(*of(&mut options)),
            Field::Time(of, _) => Amount::Time(*of(&mut options)),
        }
    }

    /// Set it to a number of things, bytes or seconds.
    ///
    /// # Errors
    /// The value is not allowed. The text says what is.
    pub fn set(&self, options: &mut ServerOptions, value: f64) -> Result<(), String> {
        let name = self.name;
        match &self.field {
            Field::Number(of) | Field::Bytes(of) => {
                // Larger numbers are none that a machine could hold, and no longer whole.
                let whole = value.fract() == 0.0 && (1.0..=9e15).contains(&value);
                *of(options) = whole
                    .then_some(value as usize)
                    .ok_or_else(|| format!("{name} is {value}, must be a whole number from 1 to 9e15"))?;
            }
            Field::Time(of, allowed) => {
                let (least, most) = (f64::from(*allowed.start()), f64::from(*allowed.end()));
                if !(least..=most).contains(&value) {
                    let why = if *allowed.end() == KEEPALIVE { ", which is what the kernel takes" } else { "" };
                    return Err(format!("{name} is {value}, must be from {least} to {most} seconds{why}"));
                }
                *of(options) = Duration::from_secs_f64(value);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_sets_a_field_of_its_own() {
        for limit in &LIMITS {
            let mut options = ServerOptions::default();
            limit.set(&mut options, 77.0).unwrap();
            let changed = LIMITS.iter().filter(|other| {
                let now = match &other.field {
                    Field::Number(of) => Amount::Number(*of(&mut options)),
                    Field::Bytes(of) => Amount::Bytes(*of(&mut options)),
                    Field::Time(of, _) => Amount::Time(*of(&mut options)),
                };
                now != other.default()
            });
            assert_eq!(changed.map(|limit| limit.name).collect::<Vec<_>>(), [limit.name]);
        }
    }

    #[test]
    fn values_outside_their_range_are_refused_with_it() {
        let refused = |name: &str, value| Limit::named(name).unwrap().set(&mut ServerOptions::default(), value);
        for (name, value, expected) in [
            ("keys", 1.5, "keys is 1.5, must be a whole number from 1 to 9e15"),
            ("keys", 0.0, "keys is 0, must be a whole number from 1 to 9e15"),
            ("log_period_s", f64::NAN, "log_period_s is NaN, must be from 0 to 315360000 seconds"),
            (
                "keepalive_idle_s",
                0.5,
                "keepalive_idle_s is 0.5, must be from 1 to 32767 seconds, which is what the kernel takes",
            ),
        ] {
            assert_eq!(refused(name, value), Err(expected.to_owned()));
        }
    }
}
