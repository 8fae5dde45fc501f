use std::collections::HashSet;
use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;

const PATIENCE: Duration = Duration::from_millis(500);

fn bounds(permits: usize, waiting: usize) -> Bounds {
    Bounds { permits, waiting, kept: 4, patience: PATIENCE }
}

fn address(number: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x7f00_0000 + number).into()
}

/// A listener whose connections are closed at once when they have to be.
struct Bench {
    admission: Admission,
    now: Instant,
    admitted: Vec<ConnectionId>,
    /// All that ever were, in their order.
    were_admitted: Vec<ConnectionId>,
    refused: Vec<ConnectionId>,
    closed: Vec<ConnectionId>,
}

impl Bench {
    fn new(bounds: Bounds) -> Self {
        Self {
            admission: Admission::new(bounds),
            now: Instant::now(),
            admitted: Vec::new(),
            were_admitted: Vec::new(),
            refused: Vec::new(),
            closed: Vec::new(),
        }
    }

    fn arrives(&mut self, from: u32, is_authenticated: bool) -> ConnectionId {
        let id = self.admission.arrived(address(from), is_authenticated, self.now);
        self.carry_out();
        id
    }

    fn ends(&mut self, id: ConnectionId) {
        self.admitted.retain(|one| *one != id);
        self.admission.ended(id, self.now);
        self.carry_out();
    }

    fn passes(&mut self, time: Duration) {
        self.now += time;
        self.admission.tick(self.now);
        self.carry_out();
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.admission.poll_effect() {
            match effect {
                Effect::Admit(id) => {
                    self.admitted.push(id);
                    self.were_admitted.push(id);
                }
                Effect::Refuse(id) => self.refused.push(id),
                Effect::Close(id) => {
                    self.admitted.retain(|one| *one != id);
                    self.closed.push(id);
                    self.admission.ended(id, self.now);
                }
            }
        }
    }
}

#[test]
fn all_are_admitted_while_there_are_permits_whoever_they_are() {
    let mut bench = Bench::new(bounds(8, 0));
    let ids: Vec<_> = (0..8).map(|_| bench.arrives(1, false)).collect();
    assert_eq!(bench.admitted, ids);
    let further = bench.arrives(1, false);
    assert_eq!((&bench.refused[..], &bench.closed[..]), (&[further][..], &[][..]));
}

#[test]
fn the_greediest_address_yields_its_oldest_connection_and_no_other_one_does() {
    let mut bench = Bench::new(bounds(8, 8));
    let greedy: Vec<_> = (0..6).map(|_| bench.arrives(1, false)).collect();
    let modest: Vec<_> = [2, 3].map(|from| bench.arrives(from, false)).into();
    let newcomers: Vec<_> = (4..9).map(|from| bench.arrives(from, false)).collect();
    assert_eq!(bench.closed, greedy[..5], "all but one: then it has as many as the others");
    assert!(modest.iter().chain(&newcomers).all(|id| bench.admitted.contains(id)));
    let late = bench.arrives(9, false);
    assert!(!bench.admitted.contains(&late), "it waits: all others hold one");
    bench.passes(PATIENCE);
    assert!(bench.admitted.contains(&late));
    assert_eq!(bench.closed[5..], greedy[5..], "of those with as many, the one that has had it for longest");
}

#[test]
fn whoever_comes_last_from_one_address_is_the_next_there_and_the_first_is_refused() {
    let mut bench = Bench::new(bounds(1, 2));
    let ids: Vec<_> = (0..4).map(|_| bench.arrives(1, false)).collect();
    assert_eq!(bench.refused, ids[1..2]);
    bench.ends(ids[0]);
    assert_eq!(bench.admitted, ids[3..]);
    bench.passes(PATIENCE);
    assert_eq!((&bench.closed[..], &bench.admitted[..]), (&ids[3..], &ids[2..3]));
    bench.passes(PATIENCE);
    assert_eq!(bench.closed.len(), 1, "nobody waits");
}

#[test]
fn an_address_that_has_authenticated_keeps_permits_and_comes_first() {
    let mut bench = Bench::new(bounds(8, 8));
    let known: Vec<_> = (0..4).map(|_| bench.arrives(1, true)).collect();
    for from in 2..6 {
        bench.arrives(from, false);
    }
    let waiting = bench.arrives(6, false);
    let first = bench.arrives(7, true);
    assert!(bench.admitted.contains(&first), "it displaces one of those that hold a single permit");
    assert!(!bench.admitted.contains(&waiting));
    for _ in 0..20 {
        bench.passes(PATIENCE);
        bench.arrives(8, false);
    }
    assert!(known.iter().chain([&first]).all(|id| bench.admitted.contains(id)));
    // What it has above those is like anybody's.
    let mut bench = Bench::new(bounds(8, 8));
    for _ in 0..8 {
        bench.arrives(1, true);
    }
    let newcomers: Vec<_> = (2..5).map(|from| bench.arrives(from, false)).collect();
    assert!(newcomers.iter().all(|id| bench.admitted.contains(id)));
    assert_eq!(bench.closed.len(), 3);
}

#[test]
fn a_permit_is_free_once_its_connection_has_ended() {
    let (mut admission, now) = (Admission::new(bounds(1, 0)), Instant::now());
    let greedy = admission.arrived(address(1), false, now);
    assert_eq!(admission.poll_effect(), Some(Effect::Admit(greedy)));
    let known = admission.arrived(address(2), true, now);
    assert_eq!((admission.poll_effect(), admission.poll_effect()), (Some(Effect::Close(greedy)), None));
    admission.ended(greedy, now);
    assert_eq!((admission.poll_effect(), admission.poll_effect()), (Some(Effect::Admit(known)), None));
    [greedy, known, known].into_iter().for_each(|id| admission.ended(id, now));
    assert_eq!((admission.counts(), admission.sources.len()), ((0, 0), 0), "nothing is left");
}

#[test]
fn an_ipv6_network_is_one_address_and_neighbours_on_the_link_are_not() {
    let source = |text: &str| Source::of(text.parse().unwrap());
    assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:1"));
    assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
    assert_ne!(source("fe80::1"), source("fe80::2"));
    assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
    assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
    let mut known = Authenticated::default();
    known.add(address(0));
    (1..=Authenticated::MOST as u32).for_each(|number| known.add(address(number % 100 + 1)));
    assert!(known.has(address(0)) && known.last.len() == 101 && known.oldest.len() == 101);
    (1..=Authenticated::MOST as u32).for_each(|number| known.add(address(1000 + number)));
    assert!(!known.has(address(0)) && known.last.len() == Authenticated::MOST);
}

/// One address opens 10,000 connections a second, which never authenticate. 1,000 others come within 5 s, whose handshakes take a while.
/// None of them is refused or closed.
#[test]
fn ten_thousand_half_handshakes_a_second_from_one_address_keep_nobody_out() {
    let step = Duration::from_micros(100);
    let mut bench = Bench::new(bounds(256, 1024));
    let mut nodes = HashSet::new();
    let mut due: VecDeque<(Instant, ConnectionId)> = VecDeque::new();
    let (mut authenticated, mut seen) = (0, 0);
    for turn in 0..50_000 {
        bench.now += step;
        bench.arrives(0, false);
        if turn % 50 == 0 {
            nodes.insert(bench.arrives(1 + turn / 50, false));
        }
        if turn % 1000 == 0 {
            bench.passes(Duration::ZERO);
        }
        for id in &bench.were_admitted[seen..] {
            due.extend(nodes.contains(id).then_some((bench.now + Duration::from_millis(50), *id)));
        }
        seen = bench.were_admitted.len();
        while let Some(&(at, id)) = due.front()
            && at <= bench.now
        {
            due.pop_front();
            assert!(bench.admitted.contains(&id), "it has lost its permit");
            authenticated += 1;
            bench.ends(id);
        }
    }
    assert!(nodes.is_disjoint(&bench.refused.iter().chain(&bench.closed).copied().collect()));
    assert_eq!((nodes.len(), authenticated + due.len()), (1000, 1000), "each was admitted as it came");
}

#[derive(Clone, Debug)]
enum Step {
    Arrives(u32),
    Ends(usize),
    Passes(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        5 => (0..6_u32).prop_map(Step::Arrives),
        2 => any::<usize>().prop_map(Step::Ends),
        1 => (0..700_u64).prop_map(Step::Passes),
    ];
    prop::collection::vec(one, 1..200)
}

proptest! {
    /// Address 5 has authenticated. `slow`: connections that have to be closed end only some steps later.
    #[test]
    fn whatever_happens_the_bounds_hold_and_permits_are_shared(steps in steps(), permits in 1..9_usize, waiting in 0..6_usize, slow: bool) {
        let mut admission = Admission::new(bounds(permits, waiting));
        let mut now = Instant::now();
        let mut states: BTreeMap<ConnectionId, (u32, &str)> = BTreeMap::new();
        let mut to_close = VecDeque::new();
        for step in steps {
            match step {
                Step::Arrives(from) => {
                    let id = admission.arrived(address(from), from == 5, now);
                    states.insert(id, (from, "waiting"));
                }
                Step::Ends(at) if !states.is_empty() => {
                    let id = *states.keys().nth(at % states.len()).unwrap();
                    states.remove(&id);
                    admission.ended(id, now);
                }
                Step::Ends(_) => {}
                Step::Passes(time) => {
                    now += Duration::from_millis(time);
                    admission.tick(now);
                }
            }
            loop {
                while let Some(effect) = admission.poll_effect() {
                    match effect {
                        Effect::Admit(id) => {
                            prop_assert_eq!(states[&id].1, "waiting");
                            states.get_mut(&id).unwrap().1 = "admitted";
                        }
                        Effect::Refuse(id) => prop_assert_eq!(states.remove(&id).unwrap().1, "waiting"),
                        Effect::Close(id) => {
                            prop_assert_eq!(states[&id].1, "admitted");
                            states.get_mut(&id).unwrap().1 = "closing";
                            to_close.push_back(id);
                        }
                    }
                }
                match to_close.pop_front().filter(|_| !slow || to_close.len() > 2) {
                    Some(id) if states.remove(&id).is_some() => admission.ended(id, now),
                    Some(_) => {}
                    None => break,
                }
            }
            let count = |state: &str| states.values().filter(|(_, one)| *one == state).count();
            let (held, waits) = (count("admitted") + count("closing"), count("waiting"));
            prop_assert_eq!(admission.counts(), (held, waits));
            prop_assert!(held <= permits && waits <= waiting + count("closing"));
            prop_assert!(waits == 0 || held == permits, "a permit is free while somebody waits");
            let of = |address: u32, state: &str| states.values().filter(|one| **one == (address, state)).count();
            let above = |from: u32, count: usize| if from == 5 { count.saturating_sub(4) } else { count };
            if count("closing") == 0 {
                for one in (0..6).filter(|one| of(*one, "waiting") > 0) {
                    let greediest = (0..6).map(|other| above(other, of(other, "admitted"))).max().unwrap();
                    let wanted = above(one, of(one, "admitted") + of(one, "waiting"));
                    prop_assert!(greediest <= wanted, "{} has a better claim: {:?}", one, states);
                }
            }
            prop_assert_eq!(admission.connections.len(), states.len());
        }
        states.keys().for_each(|id| admission.ended(*id, now));
        prop_assert!(admission.sources.is_empty() && admission.connections.is_empty());
        prop_assert!(admission.by_held.is_empty() && admission.by_claim.is_empty() && admission.by_queue.is_empty());
    }
}
