//! The state of a node's connection to its backend: attempts to connect, heartbeats, and what was answered. Part of [`super`].

use std::collections::VecDeque;
use std::mem;
#[cfg(feature = "io")]
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::events::record::LONGEST_US;
use crate::rendezvous::messages::message::NodeMessage;
use crate::wire::time::micros;

/// Number of connections that end without an answer, in a row, after which the node probes which protocol the server speaks.
const PROBE_EVERY: u32 = 3;
/// Longest time from the Hello to the first heartbeat. PyTorch's store does not react to a Hello alone; it closes the connection when
/// more bytes follow.
const NUDGE_AFTER: Duration = Duration::from_secs(1);
/// One of so many heartbeats reports a round trip. The bytes of all of them together are next to nothing.
const ROUND_TRIP_EVERY: u32 = 12;
/// Number of tries from which [`back_off`] has its longest delay.
const SLOW_TRIES: u32 = 6;

/// The connection.
#[derive(Clone, Debug)]
pub(super) struct Link {
    state: LinkState,
    /// When each unanswered heartbeat was sent.
    heartbeats: VecDeque<Instant>,
    round_trips: RoundTrips,
    /// When the last attempt to connect began.
    attempt_at: Instant,
    ever_welcomed: bool,
    tries: u32,
    /// Connections that were closed before a welcome, in a row.
    unanswered: u32,
    last_error: String,
    /// Since when the backend's answer has been that nobody serves it, if it is.
    gone_since: Option<Instant>,
    /// Differs between nodes, so that they do not connect at the same instants.
    seed: u64,
    /// Number of the endpoints at which the backend may be, and the one that is tried.
    places: u32,
    place: u32,
    /// The connection has ended on which the backend had welcomed this node: the same endpoint is tried again first.
    stays: bool,
    /// Why nobody leads, as a process in the list has said, and the number of tries then.
    told: Option<(String, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkState {
    Down {
        retry_at: Instant,
    },
    Connecting,
    /// `answered_at`: when the last answered message was sent.
    Up {
        welcomed: bool,
        answered_at: Instant,
        beat_at: Instant,
    },
}

#[cfg(feature = "io")]
impl super::NodeMachine {
    /// Whether this node's process is to listen, so that its death can be known.
    pub(super) fn wants_life(&self) -> bool {
        self.hello.life_at.is_some()
    }

    /// Where this process listens. `None`: it cannot, and its death is known later.
    pub(super) fn lives_at(&mut self, at: Option<SocketAddr>) {
        self.hello.life_at = at.or(self.hello.life_at.map(|at| SocketAddr::new(at.ip(), 0)));
    }
}

/// Round trips of heartbeats, for the coordinator's metrics.
#[derive(Clone, Debug, Default)]
struct RoundTrips {
    /// Heartbeats since the last one that reported a round trip.
    heartbeats: u32,
    last: Option<Duration>,
}

impl Link {
    /// A connection that is attempted at once.
    pub fn new(seed: u64, now: Instant) -> Self {
        Self::among(1, seed, now)
    }

    /// The same, to a backend that is at one of so many endpoints. The first is tried first.
    pub fn among(places: u32, seed: u64, now: Instant) -> Self {
        Self {
            places: places.max(1),
            place: 0,
            stays: false,
            told: None,
            state: LinkState::Down { retry_at: now },
            heartbeats: VecDeque::new(),
            round_trips: RoundTrips::default(),
            attempt_at: now,
            ever_welcomed: false,
            tries: 0,
            unanswered: 0,
            last_error: "no answer yet".to_owned(),
            gone_since: None,
            seed,
        }
    }

    /// Whether the backend may be at several endpoints.
    pub fn has_list(&self) -> bool {
        self.places > 1
    }

    /// The place of the endpoint that is tried.
    pub fn place(&self) -> usize {
        self.place as usize
    }

    /// Whether a connection is open.
    pub fn is_up(&self) -> bool {
        matches!(self.state, LinkState::Up { .. })
    }

    /// Whether no connection is open, and none is being opened.
    pub fn is_down(&self) -> bool {
        matches!(self.state, LinkState::Down { .. })
    }

    /// Whether the backend has welcomed this node on the connection that is open.
    pub fn is_welcomed(&self) -> bool {
        matches!(self.state, LinkState::Up { welcomed: true, .. })
    }

    /// Whether the backend has ever welcomed this node.
    pub fn was_welcomed(&self) -> bool {
        self.ever_welcomed
    }

    /// Whether no attempt has failed since the last welcome.
    pub fn is_first_try(&self) -> bool {
        self.tries == 0
    }

    /// Whether the last connections were closed before a welcome.
    pub fn was_unanswered(&self) -> bool {
        self.unanswered > 0
    }

    /// Why the last connection ended, or could not be opened. What a process in the list has said since all were tried comes first.
    pub fn last_error(&self) -> &str {
        let told = self.told.as_ref().filter(|(_, tries)| self.tries <= tries.saturating_add(self.places));
        told.map_or(&self.last_error, |(why, _)| why)
    }

    /// When the last attempt to connect began.
    pub fn attempt_at(&self) -> Instant {
        self.attempt_at
    }

    /// Since when the backend's answer has been that nobody serves it, if it is.
    pub fn gone_since(&self) -> Option<Instant> {
        self.gone_since
    }

    /// Whether to connect now.
    pub fn connect_if_due(&mut self, now: Instant) -> bool {
        let due = matches!(self.state, LinkState::Down { retry_at } if retry_at <= now);
        if due {
            (self.state, self.attempt_at) = (LinkState::Connecting, now);
        }
        due
    }

    /// The connection is open, and the Hello is sent now.
    pub fn on_connected(&mut self, keep_alive_interval: Duration, now: Instant) {
        let beat_at = now + keep_alive_interval.min(NUDGE_AFTER);
        self.state = LinkState::Up { welcomed: false, answered_at: now, beat_at };
        self.gone_since = None;
        self.last_error = "it accepts connections, but has not answered yet".to_owned();
        self.heartbeats.clear();
    }

    /// The connection ends. Returns whether to probe which protocol the server speaks.
    pub fn on_ended(&mut self) -> bool {
        self.stays = self.is_welcomed();
        if self.ever_welcomed || self.is_welcomed() || !self.is_up() {
            return false;
        }
        self.unanswered += 1;
        self.unanswered.is_multiple_of(PROBE_EVERY)
    }

    /// The connection is lost, or could not be opened. The next attempt is at the next endpoint. Once all were tried it follows after a
    /// back-off. A connection may break although the process at its other end lives, so that one is tried once more first: the next
    /// endpoint may be silent for longer than a node has to come back.
    pub fn on_lost(&mut self, error: String, now: Instant) {
        let rounds = self.tries / self.places;
        self.tries += 1;
        let delay = if self.tries.is_multiple_of(self.places) { back_off(rounds, self.seed) } else { Duration::ZERO };
        self.place = (self.place + u32::from(!mem::take(&mut self.stays))) % self.places;
        self.last_error = error;
        self.state = LinkState::Down { retry_at: now + delay };
    }

    /// The process at this endpoint has said that the backend is at another one: the connection is lost, and that one is tried next.
    pub fn on_redirected(&mut self, place: Option<usize>, why: String, now: Instant) {
        self.on_lost(why.clone(), now);
        self.told = place.is_none().then_some((why, self.tries));
        self.place = place.and_then(|place| u32::try_from(place).ok()).unwrap_or(self.place);
    }

    /// The backend's process ends, which may take a while. Reconnecting starts slowly.
    pub fn slow_down(&mut self) {
        self.tries = self.tries.max(SLOW_TRIES * self.places);
    }

    /// The backend could not be reached. `gone`: somebody has answered that nobody serves it.
    pub fn on_backend_failed(&mut self, gone: bool, now: Instant) {
        self.gone_since = gone.then(|| self.gone_since.unwrap_or(now));
    }

    /// The Hello was accepted. Returns when it was sent.
    pub fn on_welcome(&mut self, keep_alive_interval: Duration) -> Option<Instant> {
        (self.ever_welcomed, self.tries, self.unanswered) = (true, 0, 0);
        self.told = None; // of the attempts before
        let LinkState::Up { welcomed, answered_at, beat_at } = &mut self.state else { return None };
        *welcomed = true;
        *beat_at = (*answered_at + keep_alive_interval).max(*beat_at);
        Some(*answered_at)
    }

    /// A heartbeat was answered. Returns when it was sent: answers come in the order of the heartbeats.
    pub fn on_heartbeat_answered(&mut self, now: Instant) -> Option<Instant> {
        let sent_at = self.heartbeats.pop_front()?;
        self.round_trips.last = Some(now.saturating_duration_since(sent_at));
        if let LinkState::Up { answered_at, .. } = &mut self.state {
            *answered_at = sent_at;
        }
        Some(sent_at)
    }

    /// Heartbeats are due in this interval from now on.
    pub fn on_terms(&mut self, keep_alive_interval: Duration) {
        if let LinkState::Up { answered_at, beat_at, .. } = &mut self.state {
            *beat_at = (*beat_at).min(*answered_at + keep_alive_interval);
        }
    }

    /// Ask once more, with a heartbeat now. The connection counts as answered at `since`.
    pub fn ask_again(&mut self, since: Instant, now: Instant) {
        if let LinkState::Up { answered_at, beat_at, .. } = &mut self.state {
            *answered_at = since.max(*answered_at);
            *beat_at = now;
        }
    }

    /// Whether nothing was answered for a lease.
    pub fn is_silent(&self, lease: Duration, now: Instant) -> bool {
        matches!(self.state, LinkState::Up { answered_at, .. } if now >= answered_at + lease)
    }

    /// The heartbeat to send now, if one is due. `early`: one is wanted now, which does not postpone the regular one. `reports`: the backend
    /// counts round trips.
    pub fn heartbeat_if_due(
        &mut self,
        keep_alive_interval: Duration,
        early: bool,
        reports: bool,
        now: Instant,
    ) -> Option<NodeMessage> {
        let LinkState::Up { beat_at, .. } = &mut self.state else { return None };
        let due = now >= *beat_at;
        if due {
            *beat_at = now + keep_alive_interval;
        }
        (due || early).then(|| {
            self.heartbeats.push_back(now);
            NodeMessage::Heartbeat { rtt_us: self.round_trips.next(reports) }
        })
    }

    /// When to look at it next.
    pub fn next_deadline(&self, lease: Duration) -> Option<Instant> {
        match self.state {
            LinkState::Down { retry_at } => Some(retry_at),
            LinkState::Connecting => None,
            LinkState::Up { answered_at, beat_at, .. } => Some(beat_at.min(answered_at + lease)),
        }
    }

    /// The same, as if no round trip had been measured.
    #[cfg(feature = "sim")]
    pub fn without_round_trips(&self) -> Self {
        Self { round_trips: RoundTrips::default(), ..self.clone() }
    }
}

impl RoundTrips {
    /// The round trip that the next heartbeat reports, in microseconds.
    fn next(&mut self, reports: bool) -> Option<u64> {
        self.heartbeats += 1;
        let last = self.last.filter(|_| reports && self.heartbeats >= ROUND_TRIP_EVERY)?;
        self.heartbeats = 0;
        Some(micros(last).min(LONGEST_US))
    }
}

/// The delay before an attempt: 50 ms, doubled with each try up to 2 s, of which up to one half is jitter. The jitter keeps many
/// nodes from connecting at once.
pub(in crate::rendezvous) fn back_off(tries: u32, seed: u64) -> Duration {
    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(2);
    let delay = (FIRST * 2_u32.pow(tries.min(10))).min(LONGEST);
    let spread = (seed ^ u64::from(tries.saturating_add(1))).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    delay.mul_f64(0.5 + 0.5 * spread as f64 / u32::MAX as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP_ALIVE: Duration = Duration::from_secs(5);
    const LEASE: Duration = Duration::from_secs(15);

    /// A link whose Hello was accepted at once.
    fn welcomed(now: Instant) -> Link {
        let mut link = Link::new(7, now);
        assert!(link.connect_if_due(now) && !link.connect_if_due(now));
        link.on_connected(KEEP_ALIVE, now);
        assert_eq!(link.on_welcome(KEEP_ALIVE), Some(now));
        link
    }

    #[test]
    fn attempts_become_rarer_until_a_welcome() {
        for (tries, longest) in [(0, 50), (1, 100), (3, 400), (SLOW_TRIES, 2000), (u32::MAX, 2000)] {
            let (delay, longest) = (back_off(tries, 7), Duration::from_millis(longest));
            assert!(delay >= longest / 2 && delay <= longest, "{tries}: {delay:?}");
        }
        let begin = Instant::now();
        let mut link = Link::new(7, begin);
        link.slow_down();
        link.on_lost("its process ends".into(), begin);
        assert!(
            link.next_deadline(LEASE) >= Some(begin + Duration::from_secs(1))
                && link.last_error() == "its process ends"
        );
        link.on_connected(KEEP_ALIVE, begin);
        link.on_welcome(KEEP_ALIVE);
        link.on_lost("closed".into(), begin);
        assert!(link.next_deadline(LEASE) <= Some(begin + Duration::from_millis(50)));
    }

    #[test]
    fn an_endpoint_whose_connection_breaks_is_tried_once_more_before_the_next_one() {
        let now = Instant::now();
        let mut link = Link::among(3, 7, now);
        let lose = |link: &mut Link| {
            link.on_ended();
            link.on_lost("closed".into(), now);
            link.place()
        };
        link.on_connected(KEEP_ALIVE, now);
        link.on_welcome(KEEP_ALIVE);
        assert_eq!([lose(&mut link), lose(&mut link), lose(&mut link)], [0, 1, 2]);
        // One that has been silent for a lease may be so for longer.
        link.on_connected(KEEP_ALIVE, now);
        link.on_welcome(KEEP_ALIVE);
        link.on_lost("silent".into(), now);
        assert_eq!(link.place(), 0);
    }

    #[test]
    fn every_third_connection_that_ends_unanswered_is_probed_unless_the_node_was_welcomed_once() {
        let now = Instant::now();
        let mut link = Link::new(7, now);
        let end = |link: &mut Link, welcome: bool| {
            link.on_connected(KEEP_ALIVE, now);
            if welcome {
                link.on_welcome(KEEP_ALIVE);
            }
            let probes = link.on_ended();
            link.on_lost("closed".into(), now);
            probes
        };
        assert_eq!([(); 6].map(|()| end(&mut link, false)), [false, false, true, false, false, true]);
        assert!(link.was_unanswered() && !link.on_ended());
        assert!(!end(&mut link, true) && !link.was_unanswered());
        assert_eq!([(); 3].map(|()| end(&mut link, false)), [false; 3]);
    }

    #[test]
    fn an_early_heartbeat_does_not_postpone_the_regular_one() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut link = welcomed(begin);
        let mut beats = |early, seconds| link.heartbeat_if_due(KEEP_ALIVE, early, true, at(seconds)).is_some();
        assert_eq!(
            [beats(false, 2), beats(true, 2), beats(false, 4), beats(false, 5), beats(false, 6)],
            [false, true, false, true, false]
        );
        assert_eq!(link.on_heartbeat_answered(at(6)), Some(at(2)));
        assert!(!link.is_silent(LEASE, at(16)) && link.is_silent(LEASE, at(17)));
        assert_eq!([link.on_heartbeat_answered(at(6)), link.on_heartbeat_answered(at(6))], [Some(at(5)), None]);
    }

    #[test]
    fn one_heartbeat_of_twelve_reports_the_last_round_trip() {
        let begin = Instant::now();
        let reported = |reports: bool| {
            let mut link = welcomed(begin);
            let beat = |number: u32| {
                let now = begin + KEEP_ALIVE * number;
                let beat = link.heartbeat_if_due(KEEP_ALIVE, false, reports, now)?;
                link.on_heartbeat_answered(now + Duration::from_millis(3));
                matches!(beat, NodeMessage::Heartbeat { rtt_us: Some(3000) }).then_some(number)
            };
            (1..=30).filter_map(beat).collect::<Vec<_>>()
        };
        assert_eq!((reported(true), reported(false)), (vec![12, 24], vec![]));
    }
}
