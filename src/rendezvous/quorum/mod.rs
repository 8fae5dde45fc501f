//! A run's record and who may write it: what outlives the process that leads.
//!
//! Pure. One process *leads* a run: it alone writes the run's record, and says nothing that a successor could forget before the record
//! is *chosen*, that is, before the voters that the record names hold it. A voter keeps it in memory, so a process that was started
//! again is another voter. When the leader is dead, or hands over, a voter *stands* as candidate; with the votes of a majority it takes
//! the newest record that these voters hold, writes it again under its own ballot, and leads. This is a Paxos register with one value. Its
//! voters change by joint consensus: a change needs a majority of the old voters and one of the new voters.
//!
//! Two things are not Paxos. A leader does not wait for a voter that has left, is proven dead, or whose lease is over, and of two
//! voters the one leads alone when the other is proven dead. They are safe because a voter gives up a leader with proof that it is over
//! alone, because it votes within a lease only, while it holds the record under which that was given (a leader that has handed over: the
//! record that it has written), and because it is asked twice. Whom the leader has stopped to wait for has no such lease.
//!
//! | file | what it decides |
//! |---|---|
//! | [`record`] | ballots, stamps, records, and what a majority is |
//! | [`voter`] | what a voter accepts, and when it votes for another leader |
//! | [`leader`] | what is written, and when it is chosen |
//! | [`candidate`] | whose votes are asked for, and which record goes on |
//! | [`replica`] | one process's part: its voter, and whether it follows, stands or leads |
//! | [`bootstrap`] | who leads the first record, among the endpoints of a list |
//!
//! The simulator explores every history of small quorums (`crates/sim/src/quorum`). `docs/decisions/0142-a-run-is-led-by-ballots.md` has
//! the reasons.

pub mod bootstrap;
pub mod candidate;
pub mod leader;
pub mod record;
pub mod replica;
pub mod voter;
