"""Fixtures and hooks for all Python tests."""

import os
import signal

from helpers.ports import free_port, port
from helpers.procs import job, pytest_runtest_makereport
from hypothesis import HealthCheck, settings

__all__ = ["free_port", "job", "port", "pytest_runtest_makereport"]

# A shell's background jobs ignore the first one, nohup the other, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# One that is active where tests are started from is none of a job's affairs.
os.environ.pop("VIRTUAL_ENV", None)

# Other tests run beside these, so a case may take long.
settings.register_profile("beside others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("beside others")
