//! The command and environment that `/proc` shows of a process. They are memory of the process, written when it was executed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::ptr;

/// Overwrites the calling process's command and environment with these, as far as they fit. Does nothing if their addresses are
/// not known.
///
/// SAFETY: nothing may refer to the old ones any more. C's `argv` and `environ` do.
pub(super) unsafe fn show(argv: &[OsString], env: &BTreeMap<OsString, OsString>) {
    let Some([arg_start, arg_end, env_start, env_end]) = areas() else { return };
    let command: Vec<u8> = argv.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect();
    let variable = |(name, value): (&OsString, &OsString)| [name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat();
    let variables: Vec<Vec<u8>> = env.iter().map(variable).collect();
    // SAFETY: the kernel says that these areas are this process's, and the caller promises that nothing reads them.
    unsafe {
        fill(arg_start, arg_end, &[command]);
        fill(env_start, env_end, &variables);
    }
}

/// Copies the parts that fit, and clears the rest.
unsafe fn fill(start: usize, end: usize, parts: &[Vec<u8>]) {
    let mut at = start;
    for part in parts {
        let room = end - at;
        // A command that is too long is cut, as the kernel does. A variable that is cut would be wrong, so it is left out.
        let length = if parts.len() == 1 { part.len().min(room.saturating_sub(1)) } else { part.len() };
        if length > room {
            break;
        }
        unsafe { ptr::copy_nonoverlapping(part.as_ptr(), ptr::with_exposed_provenance_mut(at), length) };
        at += length;
    }
    unsafe { ptr::write_bytes(ptr::with_exposed_provenance_mut::<u8>(at), 0, end - at) };
}

/// Begin and end of arguments and environment: fields 48 to 51 of `/proc/self/stat`, see `proc_pid_stat(5)`.
fn areas() -> Option<[usize; 4]> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name in brackets may contain anything. Field 3 follows it.
    let fields: Vec<usize> = stat.rsplit_once(") ")?.1.split(' ').skip(45).take(4).flat_map(str::parse).collect();
    let areas: [usize; 4] = fields.try_into().ok()?;
    let [arg_start, arg_end, env_start, env_end] = areas;
    (arg_start > 0 && arg_start < arg_end && arg_end <= env_start && env_start < env_end).then_some(areas)
}
