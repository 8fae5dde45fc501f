"""Signals that end the agent: how they are received, and which exceptions they become."""

from __future__ import annotations

import logging
import os
import signal
import threading

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

logger = logging.getLogger("elastic_rs.agent")


class SignalError(Exception):
    """A signal ended the agent. PyTorch's ``run`` does not know it: it would tell of the signal a second time."""

    def __init__(self, error: SignalException) -> None:
        super().__init__(error)
        self.error = error


class Ended(SignalException, SystemExit):
    """A signal ended the agent. The process's exit code, if nobody catches it, is 128 + the signal's number."""

    def __init__(self, error: SignalException) -> None:
        super().__init__(str(error), error.sigval)
        self.code = 128 + error.sigval


def handle_signals() -> None:
    """Let the signals that torchrun names in the environment raise ``SignalException``, as PyTorch does."""
    if threading.current_thread() is not threading.main_thread():
        logger.warning("signals are not handled: the agent does not run in the main thread")
        return
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
        try:
            signal.signal(signal.Signals[name.strip()], _terminate_process_handler)
        except (KeyError, ValueError, OSError) as error:
            logger.warning("signal `%s` cannot be handled: %s", name, error)
