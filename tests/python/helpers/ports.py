"""Ports for tests."""

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
