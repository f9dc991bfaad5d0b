"""Tests that start processes have a marker, by which `make test-fast` leaves them out."""

import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.preloaded import Preloaded

FIXTURES = {"start", "own_server", "children", "nats_server", "role_server", "shared_server", "sglang_python"}
"""A test with one of these fixtures starts a process."""
WAYS = (
    (subprocess.Popen, "_execute_child"),
    (os, "fork"),
    (os, "posix_spawn"),
    (multiprocessing.util, "spawnv_passfds"),
    (Preloaded, "start"),
)


def mark(item: pytest.Item) -> None:
    """Add the marker `process` to a test that has another marker, or a fixture, which implies it."""
    names = getattr(item, "fixturenames", ())
    if item.get_closest_marker("nats") or item.get_closest_marker("gpu") or FIXTURES.intersection(names):
        item.add_marker("process")


@pytest.fixture(autouse=True)
def starts_no_process_unmarked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test, at its end, that has started a process without the marker."""
    if request.node.get_closest_marker("process") is not None:
        yield
        return
    started: list[str] = []

    def told(way: Callable[..., Any], name: str) -> Callable[..., Any]:
        def start(*words: Any, **options: Any) -> Any:
            said = f"{name} {words[:2]}"[:160]
            # matplotlib, once a machine: where fonts are; what parses bash, in milliseconds
            if "fc-list" not in said and "shfmt" not in said:
                started.append(said)
            return way(*words, **options)

        return start

    with monkeypatch.context() as patched:
        for owner, name in WAYS:
            patched.setattr(owner, name, told(getattr(owner, name), name))
        yield
    if started:
        pytest.fail(f"it starts a process and lacks the marker `process`: {started}", pytrace=False)
