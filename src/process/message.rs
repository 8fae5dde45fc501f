//! Messages between an agent and a worker's guard: datagrams of a fixed size. The guard must not allocate, so it reads and
//! writes them on its stack. Both ends are one program, so numbers have native byte order and messages have no version.

/// Bytes of every message: kind and two numbers.
pub(super) const MESSAGE_BYTES: usize = 12;

/// From the agent to the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Send this signal to the worker's group.
    Signal(i32),
    /// Kill everything below the guard.
    Kill,
}

/// From the guard to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    /// The worker was executed, with this process id.
    Started { pid: i32 },
    /// The worker could not be started: the step that failed, and its `errno`. The guard ends.
    Failed { step: i32, errno: i32 },
    /// The worker has ended: `si_code` and `si_status` of `waitid(2)`. Its group has been killed.
    Exited { code: i32, status: i32 },
    /// No descendant is left. The guard ends.
    Gone,
}

impl Order {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Order::Signal(signal) => pack([1, signal, 0]),
            Order::Kill => pack([2, 0, 0]),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Order> {
        match unpack(bytes)? {
            [1, signal, _] => Some(Order::Signal(signal)),
            [2, ..] => Some(Order::Kill),
            _ => None,
        }
    }
}

impl Report {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Report::Started { pid } => pack([1, pid, 0]),
            Report::Failed { step, errno } => pack([2, step, errno]),
            Report::Exited { code, status } => pack([3, code, status]),
            Report::Gone => pack([4, 0, 0]),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Report> {
        match unpack(bytes)? {
            [1, pid, _] => Some(Report::Started { pid }),
            [2, step, errno] => Some(Report::Failed { step, errno }),
            [3, code, status] => Some(Report::Exited { code, status }),
            [4, ..] => Some(Report::Gone),
            _ => None,
        }
    }
}

fn pack(numbers: [i32; 3]) -> [u8; MESSAGE_BYTES] {
    let [a, b, c] = numbers.map(i32::to_ne_bytes);
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3]]
}

fn unpack(bytes: &[u8]) -> Option<[i32; 3]> {
    let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
    let number = |at: usize| i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Some([number(0), number(4), number(8)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        for order in [Order::Signal(15), Order::Kill] {
            assert_eq!(Order::decode(&order.encode()), Some(order));
        }
        let reports = [
            Report::Started { pid: 7 },
            Report::Failed { step: 2, errno: 13 },
            Report::Exited { code: 2, status: 9 },
            Report::Gone,
        ];
        for report in reports {
            assert_eq!(Report::decode(&report.encode()), Some(report));
        }
        assert_eq!(Report::decode(&[0; MESSAGE_BYTES]), None);
        assert_eq!(Order::decode(&[1; 3]), None);
    }
}
