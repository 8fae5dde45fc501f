//! Hangs: what each rank does, seen from outside of its Python, who is to blame, and when to say so.
//!
//! [`frames`] reads the Python frames of another process, what runs and what waits.

pub mod frames;
