"""Run a command without pidfds, as under gVisor, old seccomp profiles, and kernels before 5.3.

without_pidfd.py [--nor-signalfd] ERRNO COMMAND...

``pidfd_open`` and its relatives fail with that error (ENOSYS, EPERM). ``clone`` and ``waitid`` reject CLONE_PIDFD and
P_PIDFD. The seccomp filter applies to the command and its descendants.

--nor-signalfd  ``signalfd4`` fails with that error too; then no worker can be started
"""

import ctypes
import errno
import os
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
LOAD, IS, HAS, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, FIRST_ARGUMENT = 0, 16  # in `struct seccomp_data`
CLONE_PIDFD, P_PIDFD = 0x1000, 3
PIDFD_SEND_SIGNAL, PIDFD_OPEN, CLONE3, PIDFD_GETFD = 424, 434, 435, 438
CLONE, WAITID, SIGNALFD4 = {"x86_64": (56, 247, 289), "aarch64": (220, 95, 74)}[platform.machine()]
NEVER = 0xFFFFFFFF

nor_signalfd = sys.argv[1] == "--nor-signalfd"
name, *command = sys.argv[1 + nor_signalfd :]
refused = FAIL_WITH | getattr(errno, name)
program = [
    (LOAD, 0, 0, NUMBER),
    # After the operation come the number of instructions to skip if equal, and if not.
    (IS, 9, 0, PIDFD_OPEN),
    (IS, 8, 0, PIDFD_SEND_SIGNAL),
    (IS, 7, 0, PIDFD_GETFD),
    (IS, 6, 0, SIGNALFD4 if nor_signalfd else NEVER),
    (IS, 6, 0, CLONE3),
    (IS, 7, 0, CLONE),
    (IS, 1, 0, WAITID),
    (RETURN, 0, 0, ALLOW),
    (LOAD, 0, 0, FIRST_ARGUMENT),
    (IS, 6, 5, P_PIDFD),
    (RETURN, 0, 0, refused),
    # glibc falls back to `clone` only after ENOSYS.
    (RETURN, 0, 0, FAIL_WITH | errno.ENOSYS),
    (RETURN, 0, 0, ALLOW),
    (LOAD, 0, 0, FIRST_ARGUMENT),
    (HAS, 1, 0, CLONE_PIDFD),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, FAIL_WITH | errno.EINVAL),
]
code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
instructions = ctypes.create_string_buffer(code, len(code))
filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions)))
libc = ctypes.CDLL(None, use_errno=True)
for call in (
    (PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)),
    (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), filters),
):
    if libc.prctl(*call) == -1:
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
os.execvp(command[0], command)
