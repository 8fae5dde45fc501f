//! Simulations of whole jobs in virtual time: under seeded faults, in named scenarios, and exhaustively.

mod agent;
mod cell;
mod discovery;
mod elastic;
mod etcd;
mod explore;
mod hangs;
mod hosts;
mod pytorch;
mod quorum;
mod rendezvous;
mod scenarios;
mod seeds;
mod takeover;
