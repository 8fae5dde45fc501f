"""Fixtures and hooks for all Python tests."""

from helpers.ports import free_port, port
from helpers.procs import job, pytest_runtest_makereport

__all__ = ["free_port", "job", "port", "pytest_runtest_makereport"]
