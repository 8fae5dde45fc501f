//! Messages between an agent and a worker's guard: datagrams of a fixed size. The guard must not allocate, so it reads and
//! writes them on its stack. Both ends are one program, so numbers have native byte order and messages have no version.

/// Bytes of every message: kind, two numbers, and a time.
pub(super) const MESSAGE_BYTES: usize = 20;

/// From the agent to the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Send this signal to the worker's group; once the worker has ended, to what it has started.
    Signal(i32),
    /// Send this signal to the worker alone; once the worker has ended, SIGTERM to what it has started, which is not killed then.
    SignalLeader(i32),
    /// Send this signal to the worker alone, if it has not ended.
    PassOn(i32),
    /// Kill everything below the guard.
    Kill,
}

/// From the guard to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuardReport {
    /// The worker was executed, with this process id.
    Started { pid: i32 },
    /// The worker could not be started: the step that failed, and its `errno`. The guard ends.
    Failed { step: i32, errno: i32 },
    /// The worker has ended: `si_code` and `si_status` of `waitid(2)`, and when the guard saw it, on the system's monotonic clock. Its
    /// group has been killed, unless it has ended well or after [`Order::SignalLeader`].
    Exited { code: i32, status: i32, seen_ns: u64 },
    /// The worker has ended well, or after [`Order::SignalLeader`], and processes that it started are left. They are children of the guard, which
    /// has this process id.
    Left { guard: i32 },
    /// No descendant is left. The guard ends.
    Gone,
}

impl Order {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Order::Signal(signal) => pack([1, signal, 0], 0),
            Order::Kill => pack([2, 0, 0], 0),
            Order::SignalLeader(signal) => pack([3, signal, 0], 0),
            Order::PassOn(signal) => pack([4, signal, 0], 0),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Order> {
        match unpack(bytes)? {
            ([1, signal, _], _) => Some(Order::Signal(signal)),
            ([2, ..], _) => Some(Order::Kill),
            ([3, signal, _], _) => Some(Order::SignalLeader(signal)),
            ([4, signal, _], _) => Some(Order::PassOn(signal)),
            _ => None,
        }
    }
}

impl GuardReport {
    pub(super) fn encode(self) -> [u8; MESSAGE_BYTES] {
        match self {
            GuardReport::Started { pid } => pack([1, pid, 0], 0),
            GuardReport::Failed { step, errno } => pack([2, step, errno], 0),
            GuardReport::Exited { code, status, seen_ns } => pack([3, code, status], seen_ns),
            GuardReport::Gone => pack([4, 0, 0], 0),
            GuardReport::Left { guard } => pack([5, guard, 0], 0),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<GuardReport> {
        match unpack(bytes)? {
            ([1, pid, _], _) => Some(GuardReport::Started { pid }),
            ([2, step, errno], _) => Some(GuardReport::Failed { step, errno }),
            ([3, code, status], seen_ns) => Some(GuardReport::Exited { code, status, seen_ns }),
            ([4, ..], _) => Some(GuardReport::Gone),
            ([5, guard, _], _) => Some(GuardReport::Left { guard }),
            _ => None,
        }
    }
}

fn pack(numbers: [i32; 3], time: u64) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    let (head, tail) = bytes.split_at_mut(12);
    for (bytes, number) in head.chunks_exact_mut(4).zip(numbers) {
        bytes.copy_from_slice(&number.to_ne_bytes());
    }
    tail.copy_from_slice(&time.to_ne_bytes());
    bytes
}

fn unpack(bytes: &[u8]) -> Option<([i32; 3], u64)> {
    let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
    let (numbers, time) = bytes.split_at(12);
    let number = |at: usize| Some(i32::from_ne_bytes(numbers.get(at..at + 4)?.try_into().ok()?));
    Some(([number(0)?, number(4)?, number(8)?], u64::from_ne_bytes(time.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        for order in [Order::Signal(15), Order::SignalLeader(15), Order::PassOn(10), Order::Kill] {
            assert_eq!(Order::decode(&order.encode()), Some(order));
        }
        let reports = [
            GuardReport::Started { pid: 7 },
            GuardReport::Failed { step: 2, errno: 13 },
            GuardReport::Exited { code: 2, status: 9, seen_ns: u64::MAX - 7 },
            GuardReport::Left { guard: 6 },
            GuardReport::Gone,
        ];
        for report in reports {
            assert_eq!(GuardReport::decode(&report.encode()), Some(report));
        }
        assert_eq!(GuardReport::decode(&[0; MESSAGE_BYTES]), None);
        assert_eq!(Order::decode(&[1; 3]), None);
    }
}
