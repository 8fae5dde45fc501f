//! Fuzzes the coordinator with bytes of several sessions, and time. It must not panic, every deadline must be bounded, and every message
//! must fit into a frame.
#![no_main]

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use elastic_rs::rendezvous::coordinator::machine::{Command, Machine};
use elastic_rs::rendezvous::messages::codec::{decode_frame, decode_preamble, try_encode_frame};
use elastic_rs::rendezvous::messages::message::{CoordinatorMessage, NodeMessage};
use elastic_rs::rendezvous::messages::settings::{LONGEST_LEASE, LONGEST_WAIT};
use elastic_rs::rendezvous::run::{Ends, SessionId};
use libfuzzer_sys::fuzz_target;

const CONNECTIONS: usize = 4;
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

#[derive(Default)]
struct Connection {
    id: u64,
    buffer: BytesMut,
    opened: bool,
    introduced: bool,
}

struct World {
    machine: Machine,
    now: Instant,
    connections: Vec<Connection>,
    next_id: u64,
    ended: BTreeSet<u64>,
}

fuzz_target!(|input: &[u8]| {
    let mut script = input;
    let mut world =
        World { machine: Machine::new(), now: *START, connections: Vec::new(), next_id: 0, ended: BTreeSet::new() };
    for _ in 0..CONNECTIONS {
        let fresh = world.connect();
        world.connections.push(fresh);
    }
    // Chunks: action and connection, a number, and for arriving bytes that many bytes.
    while let Some((&[what, number], rest)) = script.split_first_chunk() {
        script = rest;
        let at = usize::from(what) % CONNECTIONS;
        match what >> 4 {
            // Time passes in small or big steps, and the driver ticks at each deadline, or too late.
            0 => world.pass(Duration::from_millis(u64::from(number) * 20), true),
            1 => world.pass(Duration::from_secs(u64::from(number)), number & 1 == 0),
            2 => world.hang_up(at),
            // A long text, which the fuzzer would hardly generate.
            3 => world.receive(at, &[b'x'].repeat(usize::from(number) * 256)),
            _ => {
                let (bytes, rest) = rest.split_at(rest.len().min(usize::from(number)));
                script = rest;
                world.receive(at, bytes);
            }
        }
    }
});

impl World {
    fn connect(&mut self) -> Connection {
        self.next_id += 1;
        Connection { id: self.next_id, ..Connection::default() }
    }

    fn pass(&mut self, time: Duration, is_punctual: bool) {
        let until = self.now + time;
        if is_punctual {
            // A machine whose deadline is always now would keep its driver busy.
            for _ in 0..200 {
                match self.machine.next_deadline() {
                    Some(at) if at <= until => {
                        self.now = self.now.max(at);
                        self.machine.on_tick(self.now);
                        self.perform();
                    }
                    _ => {
                        self.now = until;
                        return;
                    }
                }
            }
            panic!("the machine is never content");
        }
        self.now = until;
        self.machine.on_tick(self.now);
        self.perform();
    }

    fn hang_up(&mut self, at: usize) {
        self.machine.on_disconnected(SessionId(self.connections[at].id), self.now);
        self.connections[at] = self.connect();
        self.perform();
    }

    /// Read like the coordinator's driver: the preamble, Hello, then messages.
    fn receive(&mut self, at: usize, bytes: &[u8]) {
        self.connections[at].buffer.extend_from_slice(bytes);
        loop {
            let connection = &mut self.connections[at];
            if !connection.opened {
                match decode_preamble(&mut connection.buffer) {
                    Ok(opened) => connection.opened = opened,
                    Err(_) => return self.hang_up(at),
                }
                if !connection.opened {
                    return;
                }
            }
            let session = SessionId(connection.id);
            let message = decode_frame::<NodeMessage>(&mut connection.buffer);
            match (message, connection.introduced) {
                (Ok(None), _) => return,
                (Ok(Some(NodeMessage::Hello(hello))), false) => {
                    connection.introduced = true;
                    let ip = IpAddr::V4(Ipv4Addr::new(10, 0, 0, at as u8));
                    self.machine.on_hello(session, *hello, Ends { peer: ip, local: ip }, self.now);
                }
                (Ok(Some(message)), true) => self.machine.on_message(session, message, self.now),
                (Ok(Some(_)), false) | (Err(_), _) => return self.hang_up(at),
            }
            self.perform();
            if self.ended.contains(&self.connections[at].id) {
                return self.hang_up(at);
            }
        }
    }

    fn perform(&mut self) {
        for command in self.machine.take_commands() {
            match command {
                Command::Send { session, message } => {
                    assert!((1..=self.next_id).contains(&session.0), "a message to nobody");
                    let mut frame = BytesMut::new();
                    try_encode_frame(&message, &mut frame).expect("a message that is short enough");
                    assert_eq!(decode_frame::<CoordinatorMessage>(&mut frame), Ok(Some(message)));
                }
                Command::End { session } => {
                    self.ended.insert(session.0);
                }
                Command::Record { .. }
                | Command::Tally { .. }
                | Command::Forget { .. }
                | Command::Exclusions { .. }
                | Command::HandOver
                | Command::Warn { .. }
                | Command::EmptyStore => {}
            }
        }
        let introduced = self.connections.iter().filter(|connection| connection.introduced).count();
        assert!(self.machine.session_count() <= introduced, "sessions of connections that have gone");
        // No claim makes the coordinator wait for longer than the longest times that are allowed.
        let due = self.machine.next_deadline();
        assert!(due.is_none_or(|at| at <= self.now + LONGEST_WAIT + LONGEST_LEASE), "a deadline is too far away");
    }
}
