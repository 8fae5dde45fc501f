//! Signals that this process has got, and notices: they end this node's part, now or soon, or its workers get them. Part of [`super`].

use std::future::pending;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::Runner;
use crate::agent::health::Found;
use crate::agent::notices::{Notice, Watches};
use crate::agent::policy::AgentOptions;
use crate::rendezvous::messages::message::{CheckpointBy, Round};
use crate::rendezvous::node::View;
use crate::rendezvous::node::session::Session;
use crate::signals::{FirstSignal, Meaning, Meanings, Signal};

/// A signal, or a notice, that an agent has to handle.
#[derive(Debug)]
pub(super) enum Sound {
    /// A signal that does not end it, from a handler that cannot wait for it. With its sender, in words.
    Signal(i32, String),
    /// A notice for this machine.
    Notice(Notice),
    /// The coordinator has all workers save.
    CheckpointBy(Option<CheckpointBy>),
    /// The coordinator has this machine checked again.
    CheckHealth,
    /// What a check of this machine has found.
    Health(Found),
}

/// Where signals and notices arrive, and what they mean.
#[derive(Debug)]
pub(super) struct Hearing {
    sender: mpsc::UnboundedSender<Sound>,
    receiver: mpsc::UnboundedReceiver<Sound>,
    meanings: Meanings,
    /// Who gets signals that are passed on.
    to: FirstSignal,
    /// What workers get to save by, at a notice for whatever node.
    preempt_signal: Option<Signal>,
    /// How often the coordinator had said that the workers are to save, when that was acted on last.
    told: u64,
    /// The same, for checks of this machine.
    checks_asked: u64,
    _watches: Watches,
}

impl Hearing {
    pub fn new(options: &AgentOptions, session: Option<&Session>) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let notices = sender.clone();
        // An agent that has gone leaves nothing behind that a notice could be about.
        let watches = Watches::start(&options.notices, move |notice| drop(notices.send(Sound::Notice(notice))));
        Self {
            sender,
            receiver,
            meanings: options.signals.clone(),
            to: options.first_signal,
            preempt_signal: options.notices.signal,
            told: session.map_or(0, |session| session.view().notices),
            checks_asked: session.map_or(0, |session| session.view().checks_asked),
            _watches: watches,
        }
    }

    /// Where others leave what is to be heard.
    pub fn sender(&self) -> mpsc::UnboundedSender<Sound> {
        self.sender.clone()
    }

    /// The next one. May be dropped and called again.
    pub async fn next(&mut self, session: Option<&Session>) -> Sound {
        let told = async {
            match session {
                Some(session) => {
                    let is_news = |view: &View| (view.notices, view.checks_asked) != (self.told, self.checks_asked);
                    session.view_when(is_news).await
                }
                None => pending().await,
            }
        };
        tokio::select! {
            Some(sound) = self.receiver.recv() => sound, // a sender is here: there is always a next one
            view = told => {
                if view.notices != self.told {
                    self.told = view.notices;
                    return Sound::CheckpointBy(view.checkpoint_by);
                }
                self.checks_asked = view.checks_asked;
                Sound::CheckHealth
            }
        }
    }
}

/// Where a handler of signals leaves them.
#[derive(Clone, Debug)]
pub struct Ear(mpsc::UnboundedSender<Sound>);

impl Ear {
    /// As [`Runner::signal`], later.
    pub fn signal(&self, signal: i32, sender: &str) {
        // An agent that has gone has no workers.
        let _ = self.0.send(Sound::Signal(signal, sender.to_owned()));
    }
}

impl Runner {
    /// Handle the next signal or notice, while the front end carries out a step. May be dropped and called again.
    pub async fn hear(&mut self) {
        let sound = self.hearing.next(self.session.as_deref()).await;
        self.on_sound(sound);
    }

    /// Whether a join is still wanted.
    pub fn is_joining(&self) -> bool {
        self.machine.is_joining()
    }

    /// Whether this node has ended, or is about to, since its machine is taken away.
    pub fn is_taken_away(&self) -> bool {
        self.machine.is_taken_away()
    }

    /// For handlers that may interrupt whoever has this.
    pub fn ear(&self) -> Ear {
        Ear(self.hearing.sender())
    }

    /// This process got a signal that it handles. A second one that ends it kills what is left of the workers. `sender`: who has sent it,
    /// in words, or nothing.
    pub fn signal(&mut self, signal: i32, sender: &str) {
        let from = if sender.is_empty() { String::new() } else { format!("; it was {sender}") };
        let signal = Signal(signal);
        match self.hearing.meanings.of(signal) {
            Meaning::Ends => self.end_by(signal, &from),
            Meaning::Notice(left) => {
                let by = if sender.is_empty() { String::new() } else { format!(" {sender}") };
                self.notice(Instant::now() + left, &format!("{signal}{by}"));
            }
            Meaning::Forwarded => self.forward(signal, &from),
        }
    }

    pub(super) fn on_sound(&mut self, sound: Sound) {
        match sound {
            Sound::Signal(signal, sender) => self.signal(signal, &sender),
            Sound::Notice(Notice { at, from }) => self.notice(at, &from),
            Sound::CheckHealth => self.check_health(),
            Sound::Health(found) => self.on_health(found),
            Sound::CheckpointBy(news) => {
                let round = self.machine.round();
                news.iter().filter(|news| news.round == round).for_each(|news| self.save(&news.reason));
            }
        }
    }

    /// This machine is taken away at this time.
    fn notice(&mut self, at: Instant, from: &str) {
        let reason = format!("its machine is taken away ({from})");
        self.machine.on_notice(at, &reason, Instant::now());
    }

    /// The coordinator has all workers save. If there is none, this node's do.
    pub(super) fn announce(&mut self, round: Round, left: Duration, reason: String) {
        let told = self.session.as_ref().is_some_and(|session| session.notice(round, left, &reason));
        if !told {
            self.save(&reason);
            self.machine.on_notice_unsent(Instant::now());
        }
    }

    /// Have the workers save, if a signal makes them.
    fn save(&self, reason: &str) {
        let prefix = self.log_prefix();
        match (self.hearing.preempt_signal, &self.worker_group) {
            (Some(signal), Some(worker_group)) => {
                worker_group.pass_on(signal, self.hearing.to, &self.slots.idle());
                tracing::warn!("{prefix}the workers get {signal}, to save: {reason}");
            }
            _ => tracing::info!("{prefix}members leave: {reason}"),
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
                worker_group.pass_on(signal, self.hearing.to, &self.slots.idle());
                tracing::info!("{prefix}received {signal}: passed on to the workers{from}");
            }
            None => tracing::warn!("{prefix}received {signal}: no worker runs that could get it{from}"),
        }
    }
}
