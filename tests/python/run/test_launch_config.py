"""``LaunchConfig``: its fields are the flags of ``elastic-run``, and wrong values are errors that name the field."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type, cast

import elastic_rs
import pytest
from elastic_rs import LaunchConfig
from elastic_rs._launch import _config
from elastic_rs.run import _flags

if TYPE_CHECKING:

    def rank(_: float) -> int: ...

    assert_type(elastic_rs.launch("train.py"), dict[int, None])
    assert_type(elastic_rs.launch(Path("train.py"), LaunchConfig(nnodes=(1, 2)), ["--lr", 0.1]), dict[int, None])
    assert_type(elastic_rs.launch(rank, LaunchConfig(shutdown_timeout=5), (0.1,)), dict[int, int])


def parsed(**given: Any) -> Any:
    return _flags.parse([*_config.flags_of(LaunchConfig(**given)), "--", "x"], _flags.parser(env={}))


def test_each_flag_of_elastic_run_is_a_field_or_is_left_out_for_a_reason() -> None:
    flags = {action.dest for action in _flags.parser()._actions} - {"training_script", "training_script_args"}
    names = {field.name for field in dataclasses.fields(LaunchConfig)}
    assert names | _config.LEFT_OUT.keys() == flags
    assert not names & _config.LEFT_OUT.keys()
    assert all(len(reason) > 10 for reason in _config.LEFT_OUT.values())
    assert names == _config._KINDS.keys()


def test_fields_have_the_defaults_of_the_flags() -> None:
    assert _config.flags_of(LaunchConfig()) == []
    args = parsed()
    for field in dataclasses.fields(LaunchConfig):
        default = getattr(args, field.name)
        same = {
            "nnodes": "1:1",
            "nproc_per_node": "1",
            "redirects": "0",
            "tee": "0",
            "start_method": "spawn",
            "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        }
        expected = same.get(field.name, field.default)
        assert default == expected or (not default and not expected), field.name


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("nnodes", 2, "2"),
        ("nnodes", (2, 4), "2:4"),
        ("nnodes", "2:4", "2:4"),
        ("nproc_per_node", 3, "3"),
        ("nproc_per_node", "gpu", "gpu"),
        ("standalone", True, True),
        ("rdzv_backend", "c10d", "c10d"),
        ("rdzv_endpoint", "node0:29400", "node0:29400"),
        ("rdzv_id", "-x", "-x"),
        ("rdzv_conf", {"join_timeout": 5, "is_host": True, "lease": 0.5}, "join_timeout=5,is_host=1,lease=0.5"),
        ("local_addr", "10.0.0.1", "10.0.0.1"),
        ("store_tunnel", True, True),
        ("node_rank", 1, 1),
        ("master_addr", "::1", "::1"),
        ("master_port", 2950, 2950),
        ("module", True, True),
        ("no_python", True, True),
        ("run_path", True, True),
        ("max_restarts", 3, 3),
        ("max_restarts", "3/1h", (3, "3600")),
        ("shutdown_timeout", 5, 5),
        ("shutdown_timeout", 5.0, 5),
        ("shutdown_timeout", timedelta(minutes=1), 60),
        ("signals_to_handle", ["SIGTERM", "SIGUSR1"], "SIGTERM,SIGUSR1"),
        ("in_place", "gloo", "gloo"),
        ("on_hang", "mail -s 'it hangs' me", "mail -s 'it hangs' me"),
        ("health_check", "test -d /data", "test -d /data"),
        ("progress_log", "step [0-9]+, loss", "step [0-9]+, loss"),
        ("warm_start", True, True),
        ("warm_modules", ["torch", "numpy"], "torch,numpy"),
        ("log_dir", Path("logs"), "logs"),
        ("redirects", 3, "3"),
        ("tee", "0:3,1:1", "0:3,1:1"),
        ("local_ranks_filter", [0, 2], "0,2"),
        ("ranks_filter", (0,), "0"),
        ("duplicate_stdout_filters", ["a,b", "c"], ["a,b", "c"]),
        ("duplicate_stderr_filters", ["loss"], ["loss"]),
        ("log_line_prefix_template", "${rank}", "${rank}"),
        ("omp_threads", 2, "2"),
        ("omp_threads", "auto", "auto"),
        ("virtual_local_rank", True, True),
        ("numa_binding", "core-complex", "core-complex"),
        ("role", "trainer", "trainer"),
        ("start_method", "fork", "fork"),
    ],
)
def test_a_field_is_its_flag(name: str, value: object, expected: object) -> None:
    assert getattr(parsed(**{name: value}), name) == expected
    assert name in _config._KINDS


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("nnodes", 1.0, "a whole number, (minimum, maximum) or a text such as '2:4'"),
        ("nnodes", (1, 2, 3), "a whole number, (minimum, maximum) or a text such as '2:4'"),
        ("nproc_per_node", True, "a whole number, or one of auto, cpu, gpu, xpu"),
        ("nproc_per_node", None, "a whole number, or one of auto, cpu, gpu, xpu"),
        ("standalone", 1, "True or False"),
        ("rdzv_endpoint", 29400, "a text"),
        ("rdzv_conf", "join_timeout=5", "a mapping from keys to texts, numbers or booleans"),
        ("rdzv_conf", {"join_timeout": timedelta(1)}, "a mapping from keys to texts, numbers or booleans"),
        ("max_restarts", 3.5, "a whole number, or a text such as '3/1h'"),
        ("shutdown_timeout", "30", "seconds or a timedelta"),
        ("shutdown_timeout", False, "seconds or a timedelta"),
        ("signals_to_handle", "SIGTERM", "a list of names of signals"),
        ("warm_modules", "torch", "a list of texts"),
        ("local_ranks_filter", 0, "a list of whole numbers"),
        ("log_dir", 3, "a path"),
        ("in_place", True, "one of off, gloo, nccl"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_field(name: str, value: object, allowed: str) -> None:
    with pytest.raises(TypeError) as raised:
        LaunchConfig(**cast("dict[str, Any]", {name: value}))
    kind = type(value).__name__
    assert str(raised.value) == f"{name} is `{value!r}`, of type {kind}, must be {allowed}"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("in_place", "on", "off, gloo, nccl"),
        ("numa_binding", "cpu", "node, socket, exclusive, core-complex"),
        ("start_method", "thread", "spawn, fork, forkserver"),
    ],
)
def test_another_value_of_a_closed_set_is_an_error(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is `{value}`, must be one of {allowed}$"):
        LaunchConfig(**cast("dict[str, Any]", {name: value}))


@pytest.mark.parametrize("entrypoint", ["true", os.getpid])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node is `0`, must be from 1 to 65535, or auto, cpu, gpu, xpu"),
        ({"nnodes": (3, 2)}, "nnodes is `3:2`, must be a number from 1 to"),
        ({"nnodes": 2, "standalone": True}, "standalone is given and nnodes is `2`, must be 1: others cannot find"),
        ({"rdzv_backend": "c10"}, "rdzv_backend is `c10`, must be c10d or rust-c10d, etcd or rust-etcd, or static"),
        ({"rdzv_backend": "c10d", "rdzv_id": ""}, "rdzv_id is empty, must be the job's name"),
        ({"rdzv_conf": {"joint_timeout": 3}}, "joint_timeout"),
        ({"rdzv_conf": {"password": "a,b"}}, "rdzv_conf has a value of `password` that is empty or has a comma"),
        ({"max_restarts": -1}, "max_restarts is `-1`, must be from 0 to 4294967295"),
        ({"shutdown_timeout": 0.5}, "shutdown_timeout: `0.5` is not a whole number"),
        ({"shutdown_timeout": -1}, "shutdown_timeout is `-1`, must be a whole number of seconds from 0 to"),
        ({"signals_to_handle": ["SIGTREM"]}, "signals_to_handle has `SIGTREM`, must be names such as"),
        ({"signals_to_handle": ["SIGKILL"]}, "signals_to_handle has `SIGKILL`, which no process can handle"),
        ({"redirects": 7}, "redirects"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank is `2`, must be from 0 to 1, since nnodes is `2`"),
        ({"role": "\udcff"}, r"role is `\xff`, must be UTF-8"),
    ],
)
def test_a_value_that_is_not_valid_is_an_error_before_anything_starts(
    entrypoint: Any, given: dict[str, Any], text: str
) -> None:
    if entrypoint == "true":
        given = {**given, "no_python": True}
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared below
        elastic_rs.launch(entrypoint, LaunchConfig(**given))
    assert type(raised.value) is ValueError
    assert text in str(raised.value)
    assert "--" not in str(raised.value)


def test_arguments_are_named_in_errors() -> None:
    def launch(*args: Any, **given: Any) -> str:
        with pytest.raises((TypeError, ValueError)) as raised:
            elastic_rs.launch(*args, **given)
        return f"{type(raised.value).__name__}: {raised.value}"

    assert launch("x", {"nnodes": 1}).startswith("TypeError: config is `{'nnodes': 1}`, of type dict, must be an elast")
    assert launch("x", None, "abc").startswith("TypeError: args is `'abc'`, of type str, must be a list or tuple")
    assert launch("x", None, [b""]).startswith("TypeError: args has `b''`, of type bytes, must have texts, numbers and")
    assert launch(3).startswith("TypeError: entrypoint is `3`, of type int, must be a path, a name or a function")
    assert launch("") == "ValueError: entrypoint is empty, must be a path, a name or a function"
    assert launch("no.py") == f"ValueError: the script `no.py` does not exist in `{Path.cwd()}`"
    assert launch("nope", LaunchConfig(module=True)).startswith("ValueError: no module named `nope`, neither in")
    assert launch("nope", LaunchConfig(no_python=True)) == "ValueError: the program `nope` is in no folder of PATH"
    assert launch("x", LaunchConfig(start_method="fork")) == (
        "ValueError: start_method is `fork`, and the entry point is a script, module or program: start_method is for "
        "functions alone"
    )
    assert launch(os.getpid, LaunchConfig(warm_start=True)) == (
        "ValueError: warm_start is `True`, and the entry point is a function: warm_start is for scripts, modules and "
        "programs alone"
    )
    with pytest.raises(TypeError, match="entrypoint"):
        elastic_rs.launch()  # type: ignore[call-overload]


async def coroutine() -> None:
    """Return nothing."""


class Callables:
    def __call__(self) -> None:
        """Return nothing."""


def test_functions_that_no_process_can_have_are_errors_before_anything_starts() -> None:
    def text(function: Any, *args: Any, start_method: Any = "spawn") -> str:
        with pytest.raises((TypeError, ValueError)) as raised:
            elastic_rs.launch(function, LaunchConfig(start_method=start_method), args)
        return str(raised.value)

    for start_method in ("spawn", "forkserver"):
        found = text(lambda: None, start_method=start_method)
        assert found.startswith(f"entrypoint is `{__name__}.test_functions_that_no_process_can_have")
        assert "<lambda>`, which cannot be sent to a new process (" in found
        assert found.endswith('): define it at the top of a module, or give start_method="fork"')
    found = text(os.getpid, 1, sys)
    assert found.startswith("args[1] is `<module 'sys' (built-in)>`, which cannot be sent to a new process (TypeError")
    assert text(coroutine).startswith(f"entrypoint is the coroutine function `{__name__}.coroutine`, must be a functio")
    assert "must be a function; args passes arguments" in text(Callables())


def test_what_a_program_gives_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "no number")
    monkeypatch.setenv("PET_NNODES", "7")
    args = parsed(nproc_per_node=2)
    assert (args.nnodes, args.standalone, args.variables) == ("1:1", False, {})


def test_the_file_timer_needs_pytorchs_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    with pytest.raises(ValueError, match=r"^TORCHELASTIC_ENABLE_FILE_TIMER is set, which needs PyTorch's launcher"):
        elastic_rs.launch("true", LaunchConfig(no_python=True))


def test_a_configuration_is_frozen_and_needs_no_torch() -> None:
    config = LaunchConfig(nproc_per_node=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.nnodes = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        LaunchConfig(2)  # type: ignore[call-arg]
    assert dataclasses.replace(config, nnodes=2).nproc_per_node == 2
    code = (
        "import sys, elastic_rs\n"
        "config = elastic_rs.LaunchConfig(nproc_per_node=2, no_python=True, omp_threads=1)\n"
        "assert elastic_rs.launch('true', config) == {0: None, 1: None}\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
