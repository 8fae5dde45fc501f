//! What a job asks of its coordinator beyond the settings of earlier releases: [`Rules`].
//!
//! A node that asks for any of it introduces itself with [`NodeMessage::HelloAsking`], which older coordinators refuse. All other nodes
//! say [`NodeMessage::Hello`], so that they can be mixed with older releases.

use serde::{Deserialize, Serialize};

use super::message::{Hello, NodeMessage};
use super::settings::Settings;

/// The rules of one rendezvous. Those of the first node that joins hold for all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// How often the world may change after its first round, by restarts and changes of membership together. `None`: as often as it has
    /// to.
    pub reset_limit: Option<u32>,
}

/// What [`NodeMessage::HelloAsking`] carries beside the introduction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asks {
    /// [`Settings::rules`].
    pub rules: Rules,
}

impl Hello {
    /// What this node asks for beyond the settings of earlier releases.
    fn asks(&self) -> Asks {
        Asks { rules: self.settings.rules.clone() }
    }

    fn asking(self, asks: Asks) -> Self {
        let Asks { rules } = asks;
        Self { settings: Settings { rules, ..self.settings }, ..self }
    }
}

impl NodeMessage {
    /// The message as it is sent. Within a process a `Hello` has all that its node asks for.
    pub fn outgoing(self) -> Self {
        match self {
            Self::Hello(hello) => match hello.asks() {
                asks if asks == Asks::default() => Self::Hello(hello),
                asks => Self::HelloAsking { hello, asks: Box::new(asks) },
            },
            other => other,
        }
    }

    /// A received message as it is used: the reverse of [`Self::outgoing`].
    pub fn incoming(self) -> Self {
        match self {
            Self::HelloAsking { hello, asks } => Self::Hello(Box::new(hello.asking(*asks))),
            other => other,
        }
    }
}
