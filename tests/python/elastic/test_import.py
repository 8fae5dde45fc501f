"""The package without torch: importing it, a state of plain objects, and names that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from elastic_rs import elastic

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises
import elastic_rs.elastic as hvd
assert hvd.elastic.run is hvd.run
assert hvd.HorovodInternalError is hvd.PeerFailed
state = hvd.ObjectState(epoch=1)
state.epoch = 2
state.commit()
state.epoch = 3
state.restore()
assert state.epoch == 2
assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (0, 1, False)
try:
    hvd.TorchState
except ImportError:
    print("done")
"""

WITHOUT_A_GUARD = """
import multiprocessing, sys
from elastic_rs import elastic

@elastic.run
def train(state):
    process = multiprocessing.get_context(sys.argv[1]).Process(target=print)
    process.start()
    process.join()
    return process.exitcode

sys.exit(train(elastic.ObjectState()))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_of_multiprocessing_that_imports_the_script_does_not_train(method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_A_GUARD)
    done = subprocess.run([sys.executable, script, method], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: a process of multiprocessing imports the script, and must not train: put" in done.stderr


def test_nothing_imports_torch_until_it_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_all_names_exist() -> None:
    for name in elastic.__all__:
        assert getattr(elastic, name) is not None
    assert set(elastic.__all__) <= set(dir(elastic))


def test_what_is_not_offered_says_what_to_do() -> None:
    with pytest.raises(AttributeError, match="DistributedDataParallel"):
        _ = elastic.DistributedOptimizer  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = elastic.nonsense  # type: ignore[attr-defined]
