//! Checks of this machine, beside a join. Part of [`super`].

use super::Runner;
use super::signals::Sound;
use crate::agent::health::Found;
use crate::rendezvous::messages::message::Health;
use crate::wire::text::{NAME_LIMIT_BYTES, cut, tidy};

impl Runner {
    /// Check this machine. The join that waits, or follows, says what is known.
    pub(super) fn check_health(&mut self) {
        let (Some(checks), Some(session)) = (&self.health, &self.session) else { return };
        session.set_health(Health::Checking);
        let sender = self.hearing.sender();
        checks.begin(move |found| drop(sender.send(Sound::Health(found)))); // an agent that has gone is in no round
    }

    /// The check is over.
    pub(super) fn on_health(&mut self, found: Found) {
        let prefix = self.log_prefix();
        let health = match found {
            Found::Well => Health::Well,
            Found::Ill(what) => {
                tracing::warn!("{prefix}this machine is ill, and its workers are in no world until it is well: {what}");
                Health::Ill(cut(tidy(&what), NAME_LIMIT_BYTES))
            }
            Found::Unknown(why) => {
                tracing::warn!("{prefix}--health-check says nothing, so this machine counts as well: {why}");
                Health::Well
            }
        };
        self.session.iter().for_each(|session| session.set_health(health.clone()));
    }
}
