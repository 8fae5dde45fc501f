//! What a peer understands beyond the messages of this protocol's version.
//!
//! Each end names its capabilities when it introduces itself: a node in its [`Hello`](super::message::Hello), the coordinator in its
//! [`Welcome`](super::message::CoordinatorMessage::Welcome). A later release appends variants to the messages, and sends them only to
//! a peer that has named the capability. So nodes of two releases form a job at one coordinator, and
//! [`PROTOCOL_VERSION`](super::message::PROTOCOL_VERSION) stays.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// The messages by which a world changes while its workers live on: [`NodeMessage::Attending`] and those after it,
/// [`CoordinatorMessage::Change`] and those after it.
///
/// [`NodeMessage::Attending`]: super::message::NodeMessage::Attending
/// [`CoordinatorMessage::Change`]: super::message::CoordinatorMessage::Change
pub const IN_PLACE: &str = "in_place";
/// Named by a member that reconnects while all its workers attend: it can change in place now. A restarted coordinator has to know
/// that before it tells the member anything, so it cannot wait for [`NodeMessage::Attending`].
///
/// [`NodeMessage::Attending`]: super::message::NodeMessage::Attending
pub const ATTENDING: &str = "attending";

/// Named by a coordinator whose [`Welcome`](super::message::CoordinatorMessage::Welcome) is followed by
/// [`CoordinatorMessage::Running`].
///
/// [`CoordinatorMessage::Running`]: super::message::CoordinatorMessage::Running
pub const RUNNING: &str = "running";

/// Named by a node that wants to know from where the members of its round connect, if it serves their workers' store; and by a
/// coordinator, to such a node, that tells it: [`NodeMessage::Interfaces`], [`CoordinatorMessage::Members`].
///
/// [`NodeMessage::Interfaces`]: super::message::NodeMessage::Interfaces
/// [`CoordinatorMessage::Members`]: super::message::CoordinatorMessage::Members
pub const MEMBERS: &str = "members";

/// Named by a coordinator that keeps events: [`NodeMessage::Took`].
///
/// [`NodeMessage::Took`]: super::message::NodeMessage::Took
pub const EVENTS: &str = "events";

/// Named by a coordinator that keeps events, and knows of steps: [`NodeMessage::Stepped`], [`NodeMessage::Step`]; and by a node whose
/// agent knows of them: [`CoordinatorMessage::TellStep`].
///
/// [`NodeMessage::Stepped`]: super::message::NodeMessage::Stepped
/// [`NodeMessage::Step`]: super::message::NodeMessage::Step
/// [`CoordinatorMessage::TellStep`]: super::message::CoordinatorMessage::TellStep
pub const STEPS: &str = "steps";
/// Named by a coordinator that was restarted, to a member of a world that it did not form, if it keeps events: [`NodeMessage::Recalled`].
///
/// [`NodeMessage::Recalled`]: super::message::NodeMessage::Recalled
pub const RECALLS: &str = "recalls";

/// Named by a coordinator that counts what nodes tell of themselves: [`NodeMessage::Beat`], [`NodeMessage::Fenced`].
///
/// [`NodeMessage::Beat`]: super::message::NodeMessage::Beat
/// [`NodeMessage::Fenced`]: super::message::NodeMessage::Fenced
pub const TALLIES: &str = "tallies";

/// The capabilities of this release that a peer has without asking for anything.
const OURS: [&str; 1] = [IN_PLACE];

/// Most capabilities that a peer may name.
const MOST: usize = 64;
/// Longest name of a capability, in bytes.
const NAME_LIMIT_BYTES: usize = 32;

/// Names of what a peer understands. Names that this release does not know have no effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities(BTreeSet<String>);

impl Default for Capabilities {
    /// Those of this release.
    fn default() -> Self {
        Self::of(OURS)
    }
}

impl Capabilities {
    /// These.
    pub fn of<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        Self(names.into_iter().map(Into::into).collect())
    }

    /// None: a peer that understands no more than the messages of the protocol's version.
    pub fn none() -> Self {
        Self(BTreeSet::new())
    }

    /// These, with this one or without it.
    #[must_use]
    pub fn with(mut self, name: &str, has: bool) -> Self {
        self.set(name, has);
        self
    }

    /// Add this one, or take it away.
    pub(in crate::rendezvous) fn set(&mut self, name: &str, has: bool) {
        if has {
            self.0.insert(name.to_owned());
        } else {
            self.0.remove(name);
        }
    }

    /// Whether the peer has named this one.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    /// Check what a peer has named.
    ///
    /// # Errors
    /// A sentence naming what is not allowed, and what is.
    pub fn validate(&self) -> Result<(), String> {
        if self.0.len() > MOST {
            return Err(format!("{} capabilities are named, at most {MOST} may be", self.0.len()));
        }
        match self.0.iter().find(|name| !is_name(name)) {
            Some(name) => Err(format!(
                "the capability `{}` is not a name of 1 to {NAME_LIMIT_BYTES} letters a-z, digits, `_` or `-`",
                name.escape_default()
            )),
            None => Ok(()),
        }
    }

    /// Those that can be names of capabilities, up to the limit.
    pub(in crate::rendezvous) fn tidied(self) -> Self {
        Self(self.0.into_iter().filter(|name| is_name(name)).take(MOST).collect())
    }
}

fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-');
    (1..=NAME_LIMIT_BYTES).contains(&name.len()) && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_few() {
        assert_eq!(Capabilities::of(["in_place", "hosts-2"]).validate(), Ok(()));
        for wrong in ["", "Upper", "with space", "\u{1b}[2J", &"x".repeat(33)] {
            let error = Capabilities::of([wrong]).validate().unwrap_err();
            assert!(error.contains("is not a name of 1 to 32 letters"), "{error}");
            assert_eq!(Capabilities::of([wrong, "fine"]).tidied(), Capabilities::of(["fine"]));
        }
        let many = Capabilities::of((0..65).map(|number| format!("n{number}")));
        assert_eq!(many.validate(), Err("65 capabilities are named, at most 64 may be".to_owned()));
        assert_eq!(many.tidied().0.len(), 64);
    }
}
