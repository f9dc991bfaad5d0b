"""What a machine lacks skips a test, and fails it where it is required."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

from tests.support import needs
from tests.support.needs import GPUS, REASONS, SWITCH, need, required


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with zmq and without Ray."""
    monkeypatch.setattr(needs, "REASONS", {**REASONS, "ray": lambda: "none", "zmq": lambda: ""})
    monkeypatch.delenv(SWITCH, raising=False)


def test_what_is_missing_skips_with_the_reason() -> None:
    need("zmq")
    with pytest.raises(pytest.skip.Exception, match=r"^needs ray: none$"):
        need("ray")


@pytest.mark.parametrize("named", ["ray", "zmq, ray", "all"])
def test_what_is_missing_and_required_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv(SWITCH, named)
    need("zmq")
    with pytest.raises(pytest.fail.Exception, match=r"^needs ray: none$"):
        need("ray")


def test_all_is_everything_but_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert required() == set()
    monkeypatch.setenv(SWITCH, "all")
    assert required() == REASONS.keys() - GPUS
    monkeypatch.setenv(SWITCH, "all,gpu")
    assert required() == REASONS.keys() - {"two gpus"}


def test_a_need_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "sglang,host")
    with pytest.raises(pytest.UsageError, match="got host"):
        required()


def missing(name: str) -> str:
    """Look for what is there now, whatever was found before."""
    return inspect.unwrap(REASONS[name])()


def test_what_a_need_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "redis-server" in missing("redis")
    assert "ip, unshare, mount" in missing("hosts")
    monkeypatch.setenv("SGLANG_PYTHON", "/nowhere/python")
    assert "make sglang-cpu" in missing("sglang")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "package zmq: " in missing("zmq")
