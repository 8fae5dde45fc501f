//! Hangs: what each rank does, seen from outside of its Python, who is to blame, and when to say so.
//!
//! [`frames`] reads the Python frames of another process, [`look`] what the kernel knows of it, and [`grouping`] makes lines of many
//! ranks' views.

pub mod frames;
pub mod grouping;
pub mod look;
