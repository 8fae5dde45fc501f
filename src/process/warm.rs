//! Warm starts: workers are forked from a fork server that has imported their modules.
//!
//! Owns the fork server, called the *template*: the agent's end of it ([`Template`]), its own end ([`Nest`]), the messages between
//! the two, and the rules which workers may be forked from it. Leaves to the front end what a template executes. Leaves to the
//! program in the template how a child becomes a worker that equals an executed one.
//!
//! For each worker the template forks a child that becomes the worker's guard, and the guard forks the worker. So supervision is
//! the same for both kinds of start. The template's own guard kills nothing when the template ends: workers outlive it. When a
//! template cannot be used, workers are executed as usual, and the log says why.
//! `docs/decisions/0047-warm-starts-fork-workers-from-a-template.md` and the two after it have the reasons.

mod nest;
mod request;
mod socket;
mod spec;
mod template;
mod title;

pub use nest::{Egg, Nest};
pub use spec::TemplateSpec;
pub(super) use template::Shared;
pub use template::Template;
