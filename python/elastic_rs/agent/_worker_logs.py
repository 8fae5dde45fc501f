"""Folders of workers' logs: PyTorch's layout, but with a folder per generation, and none left behind."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs

from elastic_rs._elastic_rs import log_folder_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.elastic.multiprocessing.api import LogsDest

COUNT = "TORCHELASTIC_RESTART_COUNT"
RUN_ID = "TORCHELASTIC_RUN_ID"


class ByGeneration(LogsSpecs):
    """Names folders by generation, by this machine, and by a run id that a file system can hold.

    PyTorch names them by the restart count and empties what is there: where another node failed, or the membership
    changed, the count stays the same and the logs of healthy workers are lost. It also begins a folder's
    name with the whole run id, so that no worker starts if that is longer than 246 bytes or has a slash.
    """

    def __init__(self, logs_specs: LogsSpecs, attempt: str) -> None:
        super().__init__()
        self._inner = logs_specs
        self._attempt = attempt
        self.run_folder: Path | None = None
        """The folder of this agent's logs, once it is known. None: there is none, or its place is not PyTorch's."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destinations for one attempt. The specs get its name as the restart count.

        That is a number, from 0, and for a standby ``0.standby_2``.
        """
        # The specs add to the environments, so they get no copies.
        before = {rank: {name: env[name] for name in (COUNT, RUN_ID) if name in env} for rank, env in envs.items()}
        for env in envs.values():
            env[COUNT] = self._attempt
            if RUN_ID in env and isinstance(self._inner, DefaultLogsSpecs):
                env[RUN_ID] = log_folder_name(env[RUN_ID])
        try:
            logs = self._inner.reify(envs)
            self.run_folder = _run_folder(logs.error_files.values())
            return logs
        finally:
            for local_rank, own in before.items():
                envs[local_rank].update(own)

    @property
    def root_log_dir(self) -> str:
        """The folder that the user chose."""
        return self._inner.root_log_dir


def _run_folder(error_files: Iterable[str]) -> Path | None:
    """Return the folder ``RUN`` of error files in ``RUN/attempt_GENERATION/LOCAL_RANK``, if that is where they are."""
    paths = [path for path in map(Path, error_files) if len(path.parents) > 3]
    folders = {path.parents[2] for path in paths if path.parents[1].name.startswith("attempt_")}
    return folders.pop() if len(folders) == 1 else None


def remove_temporary(logs_specs: LogsSpecs) -> None:
    """Remove the folder if it is temporary, that is, if the user did not choose it.

    It stays after a failure, and when it holds what workers have printed: somebody will look for it there.
    """
    if type(logs_specs) is not DefaultLogsSpecs:
        return
    folder = Path(logs_specs.root_log_dir)
    # Named as by `tempfile.mkdtemp`. A folder that a user has chosen must not be removed.
    if not re.fullmatch(r"torchelastic_[a-z0-9_]{8}", folder.name) or folder.parent != Path(tempfile.gettempdir()):
        return
    if not any(file.stat().st_size > 0 for file in folder.rglob("*.log")):
        shutil.rmtree(folder, ignore_errors=True)
