//! Drives [`machine::Driver`]: agents' connections, discovery's lists, signals and exclusions come in; starts, words and kills go
//! out.

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::time::Instant;

use bytes::BytesMut;
use tokio::sync::mpsc;

pub use super::agent::Launching;
use super::agent::{AgentCommand, Connection, News, is_here};
use super::endings::Ending;
use super::hosts::Host;
use super::machine::{self, AgentId, Command, End, Rules};
use super::output::Output;
use super::programs::Descriptors;
use crate::clock::until;
use crate::hosts::{Unused, UnusedHosts};
use crate::signals::Received;
use crate::workers::Consoles;

/// Events that the driver gets from this process: from discovery, the coordinator, and signal handlers.
#[derive(Clone, Debug)]
pub enum Input {
    /// Discovery has found these hosts.
    Found(Vec<Host>),
    /// Discovery has failed, for this reason.
    DiscoveryFailed(String),
    /// The coordinator keeps out these hosts.
    Excluded(BTreeMap<String, Unused>),
    /// This process got a signal.
    Signal(Received),
}

/// Starts agents on the hosts that are found, and keeps them going until the job is over. When this returns no connection is left.
///
/// `unused` is called with the hosts that are not used when they change.
///
/// # Errors
/// There is no descriptor or thread for the output.
pub async fn drive(
    rules: Rules,
    launching: Launching,
    mut inputs: mpsc::UnboundedReceiver<Input>,
    unused: impl Fn(UnusedHosts) + Send,
) -> io::Result<End> {
    let descriptors = Descriptors::raise();
    let (output, written) = Output::start(Consoles::own()?)?;
    let (news_in, mut news) = mpsc::unbounded_channel();
    let mut driving = Driving {
        machine: machine::Driver::new(rules, Instant::now()),
        launching,
        descriptors,
        commands: BTreeMap::new(),
        news: news_in,
        output,
    };
    let mut shown = UnusedHosts::default();
    let end = loop {
        if let Some(end) = driving.perform() {
            break end;
        }
        let now_unused = driving.machine.unused(Instant::now());
        if now_unused != shown {
            shown.clone_from(&now_unused);
            unused(now_unused);
        }
        let deadline = driving.machine.next_deadline(Instant::now());
        tokio::select! {
            Some(input) = inputs.recv() => driving.on_input(input),
            Some((agent, news)) = news.recv() => driving.on_news(agent, news),
            () = until(deadline) => driving.machine.on_tick(Instant::now()),
        }
    };
    // Connections that have not ended are killed now, and let the output go.
    drop(driving);
    let signalled = async {
        loop {
            match inputs.recv().await {
                Some(Input::Signal(_)) => return,
                Some(_) => {}
                None => pending().await,
            }
        }
    };
    tokio::select! {
        () = written.wait() => {}
        () = signalled => {}
    }
    Ok(end)
}

struct Driving {
    machine: machine::Driver,
    launching: Launching,
    descriptors: Descriptors,
    commands: BTreeMap<AgentId, mpsc::UnboundedSender<AgentCommand>>,
    news: mpsc::UnboundedSender<(AgentId, News)>,
    output: Output,
}

impl Driving {
    fn on_input(&mut self, input: Input) {
        let now = Instant::now();
        match input {
            Input::Found(hosts) => match self.descriptors.why_too_many(hosts.len()) {
                None => self.machine.on_found(&hosts, now),
                Some(why) => self.machine.on_discovery_failed(&why, now),
            },
            Input::DiscoveryFailed(why) => self.machine.on_discovery_failed(&why, now),
            Input::Excluded(hosts) => self.machine.on_excluded(hosts, now),
            Input::Signal(Received { signal, sender }) => self.machine.on_signal(signal, &sender.text(), now),
        }
    }

    fn on_news(&mut self, agent: AgentId, news: News) {
        let now = Instant::now();
        match news {
            News::Up { version } => self.machine.on_up(agent, &version, now),
            News::Accepted => self.machine.on_accepted(),
            News::Ended(ending) => {
                self.commands.remove(&agent);
                self.machine.on_ended(agent, &ending, now);
            }
        }
    }

    /// Carries out what the machine has decided. Gives the end of the job.
    fn perform(&mut self) -> Option<End> {
        while let Some(command) = self.machine.poll_command() {
            match command {
                Command::Start { agent, host, age, hosts_coordinator } => {
                    self.start(agent, host, age, hosts_coordinator);
                }
                Command::Send { agent, request } => self.send(agent, AgentCommand::Send(request)),
                Command::Kill { agent } => self.send(agent, AgentCommand::Kill),
                Command::Log { warns: true, text } => tracing::warn!(target: "elastic_rs::discovery", "{text}"),
                Command::Log { warns: false, text } => tracing::info!(target: "elastic_rs::discovery", "{text}"),
                Command::End(end) => return Some(end),
            }
        }
        None
    }

    fn start(&mut self, agent: AgentId, host: Host, age: u64, hosts_coordinator: bool) {
        let token = format!("{:032x}", rand::random::<u128>());
        let first = self.first_lines(&host, age, hosts_coordinator, &token);
        let first = match first {
            Ok(first) => first,
            Err(error) => {
                let ending =
                    Ending { is_here: is_here(&host), last_lines: vec![error.to_string()], ..Ending::default() };
                return self.machine.on_ended(agent, &ending, Instant::now());
            }
        };
        let (sender, commands) = mpsc::unbounded_channel();
        self.commands.insert(agent, sender);
        let command = self.launching.command(&host);
        let (news, output) = (self.news.clone(), self.output.clone());
        tokio::spawn(Connection { agent, host, command, first, token, commands, news, output }.serve());
    }

    /// The first two lines of an agent's standard input, in JSON: the values for this agent alone, and the job. The agent finds its
    /// token before it has a parser, so the first line has no spaces.
    fn first_lines(&self, host: &Host, age: u64, hosts_coordinator: bool, token: &str) -> serde_json::Result<BytesMut> {
        let own = serde_json::json!({
            "token": token,
            "host": host.name,
            "slots": host.slots,
            "age": age,
            "hosts_coordinator": hosts_coordinator,
            "port": self.launching.port,
            "remote": !is_here(host),
        });
        let mut lines = serde_json::to_vec(&own)?;
        lines.push(b'\n');
        lines.extend_from_slice(&self.launching.job);
        lines.push(b'\n');
        Ok(BytesMut::from(&lines[..]))
    }

    fn send(&mut self, agent: AgentId, command: AgentCommand) {
        if let Some(commands) = self.commands.get(&agent) {
            // It may have ended, which is among the news then.
            let _ = commands.send(command);
        }
    }
}
