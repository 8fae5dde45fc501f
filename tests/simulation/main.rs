//! Whole jobs in virtual time: under faults drawn from seeds, in named scenarios, and exhaustively.

mod agent;
mod cell;
mod explore;
mod pytorch;
mod rendezvous;
mod scenarios;
mod seeds;
