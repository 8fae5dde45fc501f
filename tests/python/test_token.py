"""``elastic-rs token``."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest
from elastic_rs import _cli, _elastic_rs

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_token_is_its_owners_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    assert _cli.main(["token", "new", "-o", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    protection = _elastic_rs.Protection.by_file(path)
    assert capsys.readouterr().err == f"elastic-rs: wrote the token with the id {protection.key_ids} to {path}\n"
    # Never overwritten: a job may run with it.
    assert _cli.main(["token", "new", "-o", str(path)]) == 1
    assert "exists: tokens are never overwritten" in capsys.readouterr().err
    assert _cli.main(["token", "id", f"--of={path}"]) == 0
    assert capsys.readouterr().out == f"{protection.key_ids}\n"
    assert _cli.main(["token", "new"]) == 0
    printed = capsys.readouterr().out.strip()
    assert len(printed) == 64
    assert printed != path.read_text().strip()


def test_tokens_are_derived_from_the_first_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(f"# new\n{'ab' * 16}\n# until all have the new one\n{'cd' * 16}\n")
    assert _cli.main(["token", "run", "job-7", f"--of={path}"]) == 0
    assert capsys.readouterr().out.strip() == _elastic_rs.derived_token("ab" * 16, run_id="job-7")
    assert _cli.main(["token", "observer", f"--of={path}"]) == 0
    assert capsys.readouterr().out.strip() == _elastic_rs.derived_token("ab" * 16, observer=True)
    assert _cli.main(["token", "id", f"--of={path}"]) == 0
    assert len(capsys.readouterr().out.strip().split(", ")) == 2


@pytest.mark.parametrize("command", [["token", "id"], ["token", "observer"], ["token", "run", "job"]])
def test_a_file_must_be_named(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_RS_TOKEN_FILE", raising=False)
    assert _cli.main(command) == 2
    assert "name one by --of=FILE or in ELASTIC_RS_TOKEN_FILE" in capsys.readouterr().err


def test_a_file_that_others_may_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text("ab" * 16)
    path.chmod(0o604)
    assert _cli.main(["token", "id", f"--of={path}"]) == 2
    assert "has the mode 0604: others may read or change it" in capsys.readouterr().err
    assert _cli.main(["store", "serve", "--port=0", f"--master-token-file={path}"]) == 2
    with pytest.raises(ValueError, match="a token of 3 digits; 32 to 512 hexadecimal digits are allowed"):
        _elastic_rs.Protection.by_token("abc")
