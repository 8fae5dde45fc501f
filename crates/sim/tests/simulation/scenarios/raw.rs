//! Calls to a coordinator's machine without a network. Node `n` has session `n`.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use elastic_rs::rendezvous::coordinator::machine::{Command, Machine};
use elastic_rs::rendezvous::messages::message::{Hello, Join, NodeId, NodeMessage, Round};
use elastic_rs::rendezvous::messages::settings::Settings;
use elastic_rs::rendezvous::run::{Ends, SessionId};

pub fn hello(machine: &mut Machine, node: u64, settings: Settings, now: Instant) {
    let hello = Hello { joining: true, ..Hello::new("job", NodeId(node.into()), format!("node{node}"), settings) };
    let addr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, node as u8));
    machine.on_hello(SessionId(node), hello, Ends { peer: addr, local: addr }, now);
}

pub fn join(machine: &mut Machine, node: u64, round: u64, now: Instant) {
    let join = Join { round: Round(round), store_port: 1, node_rank: None, workers: None, health: Default::default() };
    machine.on_message(SessionId(node), NodeMessage::Join(join), now);
}

/// The pending messages to a node, as text. All other commands are dropped.
pub fn reported(machine: &mut Machine, node: u64) -> String {
    let commands = machine.take_commands().into_iter();
    let reported = commands.filter(|c| matches!(c, Command::Send { session, .. } if *session == SessionId(node)));
    reported.map(|command| format!("{command:?}")).collect()
}
