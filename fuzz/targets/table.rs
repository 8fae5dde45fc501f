//! Fuzzes the table with bytes of several connections. Every wait must end exactly once, and the counters must be right.
#![no_main]

use std::collections::BTreeSet;

use bytes::BytesMut;
use elastic_rs::store::protocol::{CheckReply, Decoder, Limits, Reply, ReplyDecoder, Request};
use elastic_rs::store::{ConnId, Table, TableLimits};
use libfuzzer_sys::fuzz_target;

const CONNECTIONS: usize = 4;

/// One end of a connection, as the server keeps it.
struct Connection {
    id: ConnId,
    decoder: Decoder,
    buffer: BytesMut,
}

struct World {
    table: Table,
    limits: TableLimits,
    connections: Vec<Connection>,
    next_id: u64,
    /// Connections that wait.
    unanswered: BTreeSet<ConnId>,
    received: usize,
}

fuzz_target!(|input: &[u8]| {
    let Some((&mode, mut script)) = input.split_first() else { return };
    let limits = if mode & 1 == 0 { TableLimits::default() } else { TableLimits { keys: 6, stored_bytes: 600 } };
    let mut world = World {
        table: Table::new(limits.clone()),
        limits,
        connections: Vec::new(),
        next_id: 0,
        unanswered: BTreeSet::new(),
        received: 0,
    };
    for _ in 0..CONNECTIONS {
        let fresh = world.connect();
        world.connections.push(fresh);
    }
    // Chunks: the connection (0xf0 and above close it), the number of bytes, the bytes.
    while let Some((&[number, length], rest)) = script.split_first_chunk() {
        let (bytes, rest) = rest.split_at(rest.len().min(usize::from(length)));
        script = rest;
        let at = usize::from(number) % CONNECTIONS;
        if number >= 0xf0 {
            world.hang_up(at);
        } else {
            world.receive(at, bytes);
        }
    }
    for at in 0..CONNECTIONS {
        world.hang_up(at);
    }
    assert_eq!(world.table.num_waiting(), 0, "a wait outlives its connection");
});

impl World {
    fn connect(&mut self) -> Connection {
        self.next_id += 1;
        let limits = Limits { message_bytes: 4096, ..Limits::default() };
        Connection { id: ConnId(self.next_id), decoder: Decoder::validated(limits), buffer: BytesMut::new() }
    }

    fn hang_up(&mut self, at: usize) {
        let id = self.connections[at].id;
        self.table.disconnect(id);
        self.unanswered.remove(&id);
        self.connections[at] = self.connect();
        assert_eq!(self.table.num_waiting(), self.unanswered.len());
    }

    fn receive(&mut self, at: usize, bytes: &[u8]) {
        self.received += bytes.len();
        self.connections[at].buffer.extend_from_slice(bytes);
        loop {
            let connection = &mut self.connections[at];
            match connection.decoder.decode(&mut connection.buffer) {
                Ok(Some(request)) => {
                    let id = connection.id;
                    if !self.carry_out(id, request) {
                        return self.hang_up(at);
                    }
                }
                Ok(None) => return,
                Err(_) => return self.hang_up(at),
            }
        }
    }

    /// Apply a request, and check its effects. Returns false if the connection must be closed.
    fn carry_out(&mut self, id: ConnId, request: Request) -> bool {
        let before = (self.table.num_keys(), self.table.stored_bytes(), self.table.num_waiting());
        let shape = request.reply_shape();
        // WAIT and BARRIER may be answered later. CANCEL_WAIT ends a wait.
        let may_wait = matches!(request, Request::Wait { .. } | Request::Barrier { .. });
        let gives_up = matches!(request, Request::CancelWait);
        let (is_count, is_list) = (matches!(request, Request::GetNumKeys), matches!(request, Request::ListKeys));
        let checked = match &request {
            Request::Check { keys } => Some(keys.clone()),
            _ => None,
        };
        let applied = match self.table.apply(id, request) {
            Ok(applied) => applied,
            Err(violation) => {
                assert!(!violation.to_string().is_empty());
                let after = (self.table.num_keys(), self.table.stored_bytes(), self.table.num_waiting());
                assert_eq!(before, after, "a refused request changed something: {violation}");
                return false;
            }
        };
        for released in applied.released {
            assert!(self.unanswered.remove(&released), "{released:?} is released without waiting");
        }
        if gives_up {
            self.unanswered.remove(&id);
        }
        match (&applied.reply, shape) {
            (None, None) => {}
            (None, Some(_)) => {
                assert!(may_wait, "no reply");
                assert!(self.unanswered.insert(id), "{id:?} waits twice");
            }
            (Some(_), None) => panic!("a reply to a request that has none"),
            (Some(reply), Some(shape)) => {
                let mut bytes = BytesMut::new();
                reply.clone().encode(&mut bytes);
                let decoded = ReplyDecoder::new(shape).decode(&mut bytes);
                assert_eq!(decoded.as_ref().map(Option::as_ref), Ok(Some(reply)), "a client reads another reply");
                assert!(bytes.is_empty());
            }
        }
        match applied.reply {
            Some(Reply::Integer(count)) if is_count => assert_eq!(count as usize, self.table.num_keys()),
            Some(Reply::Keys(keys)) if is_list => assert_eq!(keys.len(), self.table.num_keys()),
            Some(Reply::Check(CheckReply::Ready)) if checked.is_some() => {
                let keys = checked.unwrap_or_default();
                if !self.unanswered.contains(&id) {
                    let wait = self.table.apply(id, Request::Wait { keys }).expect("it does not wait");
                    assert!(wait.reply.is_some(), "a wait for existing keys is not answered");
                }
            }
            _ => {}
        }
        assert_eq!(self.table.num_waiting(), self.unanswered.len());
        assert!(self.table.num_keys() <= self.limits.keys);
        assert!(self.table.stored_bytes() <= self.limits.stored_bytes);
        // A number made by ADD has at most 20 bytes. All other stored bytes have been received.
        assert!(self.table.stored_bytes() <= 20 * self.received, "more is stored than was received");
        true
    }
}
