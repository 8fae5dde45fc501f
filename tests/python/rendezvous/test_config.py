"""Values and errors of ``--rdzv-conf``."""

from __future__ import annotations

import logging

import pytest
from elastic_rs.rendezvous._config import RendezvousConfig, config_of, parse_conf


def test_defaults_are_pytorchs_where_pytorch_has_them() -> None:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    ours, theirs = RendezvousConfig(), RendezvousTimeout()
    assert ours.join_timeout == theirs.join.total_seconds()
    assert ours.close_timeout == theirs.close.total_seconds()
    # The defaults of the arguments of `create_handler` and `_create_tcp_store`.
    values = ours.values()
    assert values["last_call_timeout"] == theirs.last_call.total_seconds()
    assert (values["keep_alive_interval"], values["keep_alive_max_attempt"], ours.read_timeout) == (5, 3, 60)


def test_values_come_as_text_or_as_numbers() -> None:
    config = config_of(
        {"join_timeout": "12", "last_call_timeout": 3, "settle_timeout": "0.5", "is_host": "true", "node_rank": "2"}
    )
    assert config == RendezvousConfig(
        join_timeout=12, last_call_timeout=3, settle_timeout=0.5, is_host=True, node_rank=2
    )


@pytest.mark.parametrize(
    ("key", "suggested"),
    [
        ("join_timeuot", "did you mean `join_timeout`?"),
        ("last_call", "did you mean `last_call_timeout`?"),
        ("ishost", "did you mean `is_host`?"),
        ("zzz", "known are agent, blacklist_cooldown_max"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(key: str, suggested: str) -> None:
    # PyTorch accepts it silently.
    with pytest.raises(ValueError, match=rf"unknown key `{key}`") as caught:
        config_of({key: "5"})
    assert suggested in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("join_timeout", "soon", "a number of seconds above zero"),
        ("join_timeout", "0", "a number of seconds above zero"),
        ("join_timeout", "nan", "a number of seconds above zero"),
        ("join_timeout", "1e300", "a number of seconds above zero"),
        ("last_call_timeout", "-1", "a number of seconds above zero"),
        ("settle_timeout", "-0.1", "a number of seconds, zero or more"),
        ("last_call_timeout", "90000", "a number of seconds above zero, at most 86400"),
        ("settle_timeout", "90000", "a number of seconds, zero or more, at most 86400"),
        ("reconnect_grace", "61", "a number of seconds, zero or more, at most 60"),
        ("rejoin_window", "1e9", "a number of seconds above zero, at most 86400"),
        ("keep_alive_interval", "3601", "a number of seconds, 0.01 or more, at most 3600"),
        ("on_partition", "go", "`stop` or `continue`"),
        ("rejoin_limit", "1001", "a whole number from 0 to 1000"),
        ("rejoin_window", "0", "a number of seconds above zero"),
        ("host_failures", "1001", "a whole number from 0 to 1000"),
        ("blacklist_cooldown_max", "90000", "a number of seconds above zero, at most 86400"),
        ("min_workers", "0", "a whole number from 1 to 2147483647"),
        ("reset_limit", "-1", "a whole number from 0 to 2147483647"),
        ("keep_alive_interval", "0", "a number of seconds, 0.01 or more"),
        ("keep_alive_max_attempt", "0", "a whole number from 1 to 1000"),
        ("keep_alive_max_attempt", "2.5", "a whole number from 1 to 1000"),
        ("is_host", "perhaps", "one of 1, true, t, yes, y, 0, false, f, no, n"),
        ("store_type", "file", "`tcp`"),
        ("read_timeout", True, "a number of seconds above zero"),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"--rdzv-conf {key} is `{value}`, must be") as caught:
        config_of({key: value})
    assert allowed in str(caught.value)


def test_a_lease_above_the_limit_is_rejected() -> None:
    assert config_of({"keep_alive_interval": "3600", "keep_alive_max_attempt": "1"})
    with pytest.raises(ValueError, match=r"keep_alive_interval \* keep_alive_max_attempt is `5000` seconds") as caught:
        config_of({"keep_alive_max_attempt": "1000"})
    assert str(caught.value).endswith("must be at most 3600")


def test_timeout_from_the_user_is_join_timeout_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "elastic_rs"):
        assert config_of({"timeout": "15"}).join_timeout == 15
    assert "timeout=15 is taken for join_timeout" in caplog.text


def test_timeout_from_the_launcher_is_ignored_silently(caplog: pytest.LogCaptureFixture) -> None:
    # LaunchConfig.__post_init__ puts timeout=900 into the configuration of every backend.
    with caplog.at_level(logging.DEBUG, "elastic_rs"):
        assert config_of({"timeout": 900}) == RendezvousConfig()
    assert not caplog.records


def test_join_timeout_wins_over_its_alias() -> None:
    for given in ({"timeout": "5", "join_timeout": "7"}, {"join_timeout": "7", "timeout": "5"}):
        assert config_of(given).join_timeout == 7


def test_keys_of_pytorch_without_effect_here_are_still_checked() -> None:
    given = {"heartbeat_timeout": "5", "cas_backoff_max_seconds": "0.5", "store_type": "tcp"}
    assert config_of(given) == RendezvousConfig()
    with pytest.raises(ValueError, match="heartbeat_timeout"):
        config_of({"heartbeat_timeout": "0"})


def test_keys_of_pytorchs_etcd_backends_are_read_in_both_spellings() -> None:
    v2 = {"protocol": "https", "ca_cert": "ca", "ssl_cert": "cert", "ssl_cert_key": "key", "read_timeout": "7"}
    v1 = {"protocol": "https", "cacert": "ca", "cert": "cert", "key": "key", "read_timeout": "7"}
    assert config_of(v2, "rust-etcd") == config_of(v1, "rust-etcd") != config_of({}, "rust-etcd")
    values = config_of({"etcd_prefix": "/mine", "username": "me", "password_file": "f"}, "rust-etcd").values()
    assert (values["key_prefix"], values["username"], values["password_file"]) == ("/mine", "me", "f")


def test_timeout_is_a_key_of_pytorchs_etcd_and_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert config_of({"timeout": "15"}, "rust-etcd").join_timeout == 15
    assert config_of({"timeout": 900}, "rust-etcd").join_timeout == 600, "LaunchConfig's own"
    assert not caplog.records


@pytest.mark.parametrize(
    ("backend", "key", "why"),
    [
        ("rust-etcd", "is_host", "only with rust-c10d: no node hosts the rendezvous, etcd does"),
        ("rust-etcd", "reconnect_grace", "only with rust-c10d: no connection stands for a node there"),
        ("rust-c10d", "ssl_cert", "only with rust-etcd: this backend does not connect to etcd"),
    ],
)
def test_a_key_without_a_meaning_says_why(backend: str, key: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"--rdzv-conf {key} has no meaning with --rdzv-backend={backend}, {why}"):
        config_of({key: "1"}, backend)


def test_an_unknown_key_is_compared_with_those_of_the_backend() -> None:
    with pytest.raises(ValueError, match=r"unknown key `pasword_file`: did you mean `password_file`\?"):
        config_of({"pasword_file": "f"}, "rust-etcd")
    with pytest.raises(ValueError, match="unknown key `usernam`: known are agent, "):
        config_of({"usernam": "me"}, "rust-c10d")


def test_a_password_on_the_command_line_is_refused_and_not_repeated() -> None:
    for text in ("username=me,password=top,secret", "password=secret"):
        with pytest.raises(ValueError, match=r"password|KEY=VALUE") as caught:
            config_of(parse_conf(text), "rust-etcd")
        assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="password_file=FILE, or set the variable ELASTIC_RS_ETCD_PASSWORD"):
        config_of({"username": "me", "password": "secret"}, "rust-etcd")


@pytest.mark.parametrize("name", ["etcd", "etcd-v2"])
def test_pytorchs_names_ignore_what_pytorch_ignores(name: str, caplog: pytest.LogCaptureFixture) -> None:
    given = {"nonsense": "x", "is_host": True, "join_timeout": "7", "password": "secret", "timeout": 900, "rank": None}
    with caplog.at_level(logging.WARNING, "elastic_rs"):
        assert config_of(given, "rust-etcd", name) == RendezvousConfig(join_timeout=7)
    (warning,) = caplog.messages
    assert f"--rdzv-backend={name}" in warning
    assert warning.endswith(": is_host, nonsense, password")
    with pytest.raises(ValueError, match="--rdzv-conf join_timeout is `soon`, must be"):
        config_of({"join_timeout": "soon"}, "rust-etcd", name)


@pytest.mark.parametrize("name", ["etcd", "etcd-v2"])
def test_all_our_keys_work_under_pytorchs_names(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = {
        "join_timeout": "7",
        "settle_timeout": "7",
        "coordinator_timeout": "7",
        "exit_barrier_timeout": "7",
        "on_partition": "continue",
        "agent": "torch",
        "restart_budget": "node",
        "store_tunnel": "1",
        "cacert": "ca",
        "ssl_cert": "cert",
        "ssl_cert_key": "key",
        "etcd_prefix": "/mine",
        "username": "me",
        "password_file": "f",
    }
    with caplog.at_level(logging.WARNING, "elastic_rs"):
        assert config_of(ours, "rust-etcd", name) == config_of(ours, "rust-etcd") != RendezvousConfig()
        for key in RendezvousConfig.table():
            if key.backend != "rust-c10d":
                assert {key.name, key.other or key.name} <= set(RendezvousConfig.known("rust-etcd"))
    assert not caplog.messages


def test_strict_members_need_a_store_of_the_agents() -> None:
    for members in ("off", "warn"):
        RendezvousConfig(store_members=members).check_workers_store(is_protected=False, own_store=False)
    strict = RendezvousConfig(store_members="strict")
    strict.check_workers_store(is_protected=False, own_store=True)
    with pytest.raises(
        ValueError, match=r"store_members=strict needs a store that the agents serve: it cannot be used"
    ):
        strict.check_workers_store(is_protected=False, own_store=False)
