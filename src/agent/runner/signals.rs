//! Signals that this process has got: they end this node's part, or its workers get them. Part of [`super`].

use std::time::Instant;

use tokio::sync::mpsc;

use super::Runner;
use crate::signals::{Meaning, Signal};

/// Signals that do not end the agent, from handlers that cannot wait for it.
#[derive(Debug)]
pub(super) struct Heard {
    sender: mpsc::UnboundedSender<(i32, String)>,
    receiver: mpsc::UnboundedReceiver<(i32, String)>,
}

impl Default for Heard {
    fn default() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { sender, receiver }
    }
}

impl Heard {
    /// The next one. May be dropped and called again.
    pub(super) async fn next(&mut self) -> (i32, String) {
        match self.receiver.recv().await {
            Some(heard) => heard,
            None => std::future::pending().await, // never: a sender is here
        }
    }
}

/// Where a handler of signals leaves them.
#[derive(Clone, Debug)]
pub struct Ear(mpsc::UnboundedSender<(i32, String)>);

impl Ear {
    /// As [`Runner::signal`], later.
    pub fn signal(&self, signal: i32, sender: &str) {
        // An agent that has gone has no workers.
        let _ = self.0.send((signal, sender.to_owned()));
    }
}

impl Runner {
    /// For handlers that may interrupt whoever has this.
    pub fn ear(&self) -> Ear {
        Ear(self.heard.sender.clone())
    }

    /// This process got a signal that it handles. A second one that ends it kills what is left of the workers. `sender`: who has sent it,
    /// in words, or nothing.
    pub fn signal(&mut self, signal: i32, sender: &str) {
        let from = if sender.is_empty() { String::new() } else { format!("; it was {sender}") };
        let signal = Signal(signal);
        match self.signals.of(signal) {
            Meaning::Ends => self.end_by(signal, &from),
            Meaning::Forwarded => self.forward(signal, &from),
        }
    }

    fn end_by(&mut self, signal: Signal, from: &str) {
        let text = match (self.signalled, &self.worker_group) {
            (true, _) => format!("received {signal}: killing what is left of the workers"),
            (false, None) => format!("received {signal}: leaving the job"),
            (false, Some(_)) if self.ending.is_some() => {
                format!("received {signal}: what the workers have started is stopped; another signal kills it")
            }
            // PyTorch's words, for which people search logs.
            (false, Some(_)) => format!(
                "Received {} death signal, shutting down workers ({signal}): leaving the job, waiting for the workers to end; \
                 another signal kills them",
                signal.0
            ),
        };
        self.signalled = true;
        tracing::warn!("{}{text}{from}", self.log_prefix());
        self.machine.on_signal(signal.0, Instant::now());
    }

    fn forward(&mut self, signal: Signal, from: &str) {
        let prefix = self.log_prefix();
        match &self.worker_group {
            Some(worker_group) => {
                worker_group.pass_on(signal, self.first_signal);
                tracing::info!("{prefix}received {signal}: passed on to the workers{from}");
            }
            None => tracing::warn!("{prefix}received {signal}: no worker runs that could get it{from}"),
        }
    }
}
