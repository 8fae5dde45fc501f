"""Run a program on a terminal of its own, pass on what it prints, and end as it does: PROGRAM [ARG ...]."""

import os
import pty
import sys

sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
