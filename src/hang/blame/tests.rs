//! Who is named: in recorded hangs of real ranks, in made-up ones that are hard to record, and under any order of views.

mod edges;
mod properties;
mod recorded;
mod scenes;
