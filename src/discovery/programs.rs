//! Starts the driver's programs: `ssh`, agents on this machine, and discovery scripts.
//!
//! A program begins as if a shell had started it: no signal is blocked. It leads a session of its own, so a terminal's Ctrl-C is the
//! driver's, and `ssh` cannot ask anybody.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::setsid;

/// Starts a program.
///
/// # Errors
/// It cannot be run.
pub fn start(command: &[OsString], stdin: Stdio, stdout: Stdio, stderr: Stdio) -> io::Result<Child> {
    let (program, args) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut made = Command::new(program);
    made.args(args).stdin(stdin).stdout(stdout).stderr(stderr);
    // SAFETY: system calls that a forked child may make. Nothing is allocated.
    unsafe {
        made.pre_exec(|| {
            // The threads that start programs block all signals, and a program begins with the mask of its starter.
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
            // Python ignores this signal, and programs inherit that.
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
            setsid()?;
            Ok(())
        });
    }
    made.spawn()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_begins_with_no_signal_blocked() {
        let command = ["grep", "SigBlk", "/proc/self/status"].map(OsString::from);
        let told = start(&command, Stdio::null(), Stdio::piped(), Stdio::null()).unwrap().wait_with_output().unwrap();
        assert_eq!(String::from_utf8(told.stdout).unwrap(), "SigBlk:\t0000000000000000\n");
    }
}
