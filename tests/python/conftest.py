"""Fixtures and hooks for all Python tests."""

from helpers.procs import job, pytest_runtest_makereport

__all__ = ["job", "pytest_runtest_makereport"]
