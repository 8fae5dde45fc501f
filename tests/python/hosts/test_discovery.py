"""``elastic_rs.discovery``: what finds hosts, and Horovod's view of them."""

from __future__ import annotations

import os
import queue
import select
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from elastic_rs.discovery import (
    DiscoveryError,
    DnsHosts,
    FileHosts,
    FixedHosts,
    HostDiscovery,
    HostDiscoveryScript,
    HostManager,
    HostUpdateResult,
    SlurmHosts,
)
from elastic_rs.discovery._poll import Poll
from elastic_rs.run import _driver, _flags


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def until_gone(pid: int) -> None:
    """Wait until a process that was killed has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 60)[0], "it lives on"
    finally:
        os.close(descriptor)


# horovod test/single/test_elastic_discovery.py: TestHostDiscoveryScript.
def test_a_script_prints_hosts_with_given_and_default_slots(tmp_path: Path) -> None:
    script = program(tmp_path / "s", "echo host-1:2; echo; echo host-2; echo '[::1]:4'")
    found = HostDiscoveryScript(script, 8).find_available_hosts_and_slots()
    assert list(found.items()) == [("host-1", 2), ("host-2", 8), ("::1", 4)]
    assert HostDiscoveryScript(program(tmp_path / "none", "true")).find_available_hosts_and_slots() == {}
    assert HostDiscoveryScript("echo a:1").find_available_hosts_and_slots() == {"a": 1}


@pytest.mark.parametrize(
    "text",
    [
        "sh -c 'echo a:2; echo b:2;'",
        """awk -F '|' '{print $1}' hosts""",
        r"find . -name 'a*' -exec cat {} \;",
        "find . -exec cat {} ';'",
        "sh -c 'echo `hostname`:2'",
        'printf "%s;\n" "a > b"',
        "env HOSTS=2 hosts --format=a",
        "hosts a#b",
    ],
)
def test_a_command_whose_quotes_hold_a_shells_signs_is_run(text: str) -> None:
    assert HostDiscoveryScript(text)._command == shlex.split(text)


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("cat hosts | grep a", "|"),
        ("cat hosts|grep a", "|"),
        ("true&& cat hosts", "&&"),
        ("cat hosts 2>/dev/null", ">"),
        ("cat <hosts", "<"),
        ("echo a:2; echo b:2", ";"),
        ("echo `hostname`:2", "`"),
        ('echo "`hostname`:2"', "`"),
        ("echo $(hostname):2", "$("),
        ('echo "$(hostname):2"', "$("),
        ("HOSTS=2 hosts", "HOSTS="),
    ],
)
def test_a_command_that_only_a_shell_understands_is_refused(text: str, sign: str) -> None:
    with pytest.raises(ValueError, match="and no shell runs it, which") as raised:
        HostDiscoveryScript(text)
    assert f"which `{sign}` is for" in str(raised.value)


def test_a_script_that_does_not_say_hosts_is_an_error_that_says_why(tmp_path: Path) -> None:
    for text, expected in [
        ("echo oops >&2; exit 3", "has ended with exit code 3: oops"),
        ("kill -9 $$", "has ended with SIGKILL"),
        ("echo a:1; echo 'b c'", "printed line 2 is `b c`, must be HOST or HOST:SLOTS"),
        (
            "head -c 2000000 /dev/zero >&2; echo >&2; echo the cause >&2; exit 4",
            "has ended with exit code 4: the cause",
        ),
    ]:
        with pytest.raises(DiscoveryError, match=expected.replace("(", r"\(")):
            HostDiscoveryScript(program(tmp_path / "s", text)).find_available_hosts_and_slots()
    with pytest.raises(DiscoveryError, match="cannot be run: No such file or directory"):
        HostDiscoveryScript(tmp_path / "absent").find_available_hosts_and_slots()


def test_a_script_that_fails_steers_no_terminal(tmp_path: Path) -> None:
    script = program(tmp_path / "s", r"printf '\033]0;title\007\033[2Jno\342\200\256answer\n' >&2; exit 3")
    with pytest.raises(DiscoveryError) as failed:
        HostDiscoveryScript(script).find_available_hosts_and_slots()
    assert str(failed.value).endswith("has ended with exit code 3:  ]0;title  [2Jno answer")
    assert str(failed.value).isprintable()


def test_a_script_that_never_ends_is_killed_with_what_it_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    script = program(tmp_path / "s", f"sleep 1000 & echo $! > {told}.part; mv {told}.part {told}; echo a:1; wait")
    # On a busy machine the script may be killed before it has started anything. Then it gets more time.
    for limit_s in (0.5, 5, 50):
        with pytest.raises(DiscoveryError, match=rf"has not ended within {limit_s:g} s, and was killed"):
            HostDiscoveryScript(script, timeout_s=limit_s).find_available_hosts_and_slots()
        if told.exists():
            break
    until_gone(int(told.read_text()))


def test_a_script_that_prints_without_end_is_killed_at_the_limit_of_a_list(tmp_path: Path) -> None:
    script = program(tmp_path / "s", "exec cat /dev/zero")
    with pytest.raises(DiscoveryError, match=r"`.*/s` has printed more than 1048576 bytes, .* and was killed"):
        HostDiscoveryScript(script, timeout_s=60).find_available_hosts_and_slots()


def test_errors_without_end_are_bounded_by_the_time_limit_and_kept_nowhere(tmp_path: Path) -> None:
    script, told = tmp_path / "s", tmp_path / "streams"
    program(script, f"ls -l /proc/$$/fd >{told}; exec cat /dev/zero >&2")
    for limit_s in (0.5, 5, 50):  # on a busy machine the script may be killed before it has told
        with pytest.raises(DiscoveryError, match=rf"has not ended within {limit_s:g} s, and was killed"):
            HostDiscoveryScript(script, timeout_s=limit_s).find_available_hosts_and_slots()
        if told.exists() and "2 -> " in told.read_text():
            break
    streams = {line.split(" -> ")[0].split()[-1]: line.split(" -> ")[1] for line in told.read_text().splitlines()[1:]}
    assert streams["2"].startswith("pipe:"), streams


def test_a_file_that_is_no_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(bytes(2_000_000))
    with pytest.raises(DiscoveryError, match=r"`.*/hosts` has more than 1048576 bytes, the limit of a list"):
        FileHosts(path).find_available_hosts_and_slots()


def test_a_child_in_the_background_holds_nothing_up(tmp_path: Path) -> None:
    script = program(tmp_path / "s", "sleep 1000 & yes >&2 & echo a:1")
    began = time.monotonic()
    assert HostDiscoveryScript(script, timeout_s=60).find_available_hosts_and_slots() == {"a": 1}
    assert time.monotonic() - began < 30


def test_a_script_that_has_closed_its_streams_is_waited_for(tmp_path: Path) -> None:
    script = program(tmp_path / "s", "sleep 1000 & echo a:1; exec >&- 2>&- sleep 0.1")
    assert HostDiscoveryScript(script, timeout_s=60).find_available_hosts_and_slots() == {"a": 1}
    with pytest.raises(DiscoveryError, match=r"has not ended within 0\.2 s, and was killed"):
        HostDiscoveryScript("sleep 1000", timeout_s=0.2).find_available_hosts_and_slots()


def test_a_script_of_another_user_that_has_ended_needs_not_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killpg(_: int, __: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.killpg", killpg)
    script = program(tmp_path / "s", "echo a:1")
    assert HostDiscoveryScript(script, timeout_s=60).find_available_hosts_and_slots() == {"a": 1}


def test_a_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    hosts = FileHosts(path, 2)
    with pytest.raises(DiscoveryError, match="cannot be read: No such file"):
        hosts.find_available_hosts_and_slots()
    path.write_text("a slots=4 # four\nb\n")
    assert hosts.find_available_hosts_and_slots() == {"a": 4, "b": 2}
    path.write_text("b:1\n")
    assert hosts.find_available_hosts_and_slots() == {"b": 1}


def test_a_name_has_its_addresses_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(None, None, None, "", (address, 0)) for address in ("10.0.0.10", "fd00::2", "10.0.0.9", "10.0.0.10")]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: entries)
    found = DnsHosts("workers.job.svc", 8).find_available_hosts_and_slots()
    assert list(found.items()) == [("10.0.0.9", 8), ("10.0.0.10", 8), ("fd00::2", 8)]


def test_a_name_without_an_address_is_an_error() -> None:
    with pytest.raises(DiscoveryError, match=r"`no-such-name\.invalid` cannot be resolved"):
        DnsHosts("no-such-name.invalid").find_available_hosts_and_slots()


def test_nodes_of_slurm_are_those_that_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST is not set"):
        monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
        SlurmHosts()
    program(
        tmp_path / "sinfo",
        'echo "$@" >&2; printf "n1 alloc\\nn2 down*\\nn3 mix\\nn4 drain\\nn5 idle*\\nn6 comp\\nn7 drng\\n"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-7]")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4(x2)")
    assert SlurmHosts().find_available_hosts_and_slots() == {"n1": 4, "n3": 4, "n6": 4, "n7": 4}
    assert SlurmHosts(2).find_available_hosts_and_slots() == {"n1": 2, "n3": 2, "n6": 2, "n7": 2}
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert SlurmHosts().find_available_hosts_and_slots() == {"n1": 8, "n3": 8, "n6": 8, "n7": 8}
    for flags, slots in [([], 8), (["--slots-per-host=1"], 1), (["--nproc-per-node=2"], 2)]:
        args = _flags.parse(["--host-discovery=slurm", *flags, "train.py"])
        found, fixed = _driver._discovery_of(args, _driver._default_slots(args))
        assert (found.find_available_hosts_and_slots()["n1"], fixed) == (slots, None)
    program(tmp_path / "sinfo", "echo 'slurm_load_node: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(DiscoveryError, match=r"`sinfo .*` has ended with exit code 1: .*Unable to contact"):
        SlurmHosts().find_available_hosts_and_slots()


class Changing(HostDiscovery):
    def __init__(self, *answers: dict[str, int]) -> None:
        self.answers = list(answers)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return self.answers.pop(0)


# horovod test/single/test_elastic_discovery.py: TestHostManager.
def test_a_manager_tells_what_has_changed_and_keeps_the_order_of_age() -> None:
    manager = HostManager(
        Changing({"a": 2}, {"a": 2, "b": 2}, {"b": 2, "a": 4}, {"b": 2, "c": 2}, {"b": 2, "c": 2}, {"b": 2, "c": 1})
    )
    expected = ["added", "added", "added", "mixed", "no_update", "removed"]
    orders = [["a"], ["a", "b"], ["a", "b"], ["b", "c"], ["b", "c"], ["b", "c"]]
    for result, order in zip(expected, orders, strict=True):
        before = manager.current_hosts
        slots = before.host_slots
        assert manager.update_available_hosts() is HostUpdateResult[result]
        assert manager.current_hosts.host_assignment_order == order
        assert before.host_slots == slots, "an earlier view does not change"
    assert manager.current_hosts.count_available_slots() == 3


def test_horovods_ways_to_give_hosts_and_to_order_them() -> None:
    fixed = FixedHosts({"a": 2})
    manager = HostManager(fixed)
    assert manager.update_available_hosts() == HostUpdateResult.added
    fixed.set({"b": 1, "a": 2})
    assert manager.update_available_hosts() == HostUpdateResult.added
    assert manager.current_hosts.host_assignment_order == ["a", "b"]
    assert HostManager.order_available_hosts(["d", "c", "a"], ["a", "b", "c"]) == ["a", "c", "d"]


def test_a_blacklisted_host_takes_its_slots_and_comes_back_after_its_cooldown() -> None:
    hosts = {"a": 2, "b": 2}
    manager = HostManager(FixedHosts(hosts), (0.2, 1.0))
    manager.update_available_hosts()
    manager.blacklist("a")
    assert manager.is_blacklisted("a")
    assert manager.current_hosts.host_slots == {"b": 2}
    assert manager.current_hosts.get_slots("a") == 0
    deadline = time.monotonic() + 30
    while manager.is_blacklisted("a") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert manager.update_available_hosts() is HostUpdateResult.added
    assert manager.current_hosts.host_assignment_order == ["b", "a"], "it has lost its age"
    for_ever = HostManager(FixedHosts(hosts))
    for_ever.update_available_hosts()
    for_ever.blacklist("b")
    assert for_ever.update_available_hosts() is HostUpdateResult.no_update
    assert for_ever.current_hosts.available_hosts == {"a"}


class Heard:
    def __init__(self) -> None:
        self.told: list[object] = []

    def found(self, hosts: list[tuple[str, int]]) -> None:
        self.told.append(hosts)

    def failed(self, why: str) -> None:
        self.told.append(why)


def test_whatever_a_users_class_does_is_told_and_ends_nothing() -> None:
    answers: list[Any] = [None, {"a": "x"}, RuntimeError("no list today"), {"a": 2}]

    class Strange(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer) if answer is not None else answer

    heard = Heard()
    poll = Poll(Strange(), heard, None)
    for _ in range(4):
        poll.ask()
    assert heard.told[3] == [("a", 2)]
    kinds = [str(told).partition(":")[0] for told in heard.told[:3]]
    assert kinds == ["AttributeError", "ValueError", "RuntimeError"]


# Unlike sh, bash gives the signals that are blocked on to what it runs: `timeout` would never get its alarm.
def test_a_script_of_bash_that_the_poll_runs_has_no_blocked_signals(tmp_path: Path) -> None:
    script = tmp_path / "s"
    script.write_text("#!/bin/bash\ntimeout 0.1 sleep 1000\necho a:1\n")
    script.chmod(0o755)
    answers: queue.Queue[object] = queue.Queue()

    class Told:
        def found(self, hosts: list[tuple[str, int]]) -> None:
            answers.put(hosts)

        def failed(self, why: str) -> None:
            answers.put(why)

    Poll(HostDiscoveryScript(script, timeout_s=60), Told(), None).start()
    assert answers.get(timeout=100) == [("a", 1)]


def test_the_poll_takes_no_signals() -> None:
    masks: queue.Queue[set[signal.Signals]] = queue.Queue()

    class Masks(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            masks.put(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
            return {}

    Poll(Masks(), Heard(), None).start()
    assert {signal.SIGTERM, signal.SIGINT} <= masks.get(timeout=30)
