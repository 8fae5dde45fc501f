//! Warm starts: workers that are forked from a process in which what they import is loaded already.
//!
//! Owns the *template*, a process that imports modules and then waits ([`Template`], the agent's end; [`Nest`], its own), what
//! the two say to each other, and which workers may come from it. Leaves to the front end what a template executes, and to
//! the program in it how a child becomes a worker that nobody can tell from one that was executed.
//!
//! For each worker the template forks a child that becomes the worker's guard, which forks the worker: so there is one way
//! to supervise, whichever way a worker was started. The template's own guard kills nothing when the template ends: workers outlive
//! it. Whenever a template cannot be used, workers are executed as always, and the log says why.

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
