"""What lies around a run: neighbours that cannot be read, names that are no text, and too few open files. A sentence each, no traceback."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import recorded as runs
from tests.support.printed import printed

NOBODY = 65534


@pytest.fixture
def base() -> Iterator[Path]:
    """Runs in a folder that everybody may look into."""
    place = Path(tempfile.mkdtemp(prefix="streamrl-test-"))
    place.chmod(0o755)
    for name in ("own", "closed", "odd"):
        (place / name).mkdir()
        (place / name).chmod(0o755)  # whatever the umask is
        (place / name / "config.json").write_text("{}")
        (place / name / "config.json").chmod(0o644)
    yield place
    for path in (place / "closed", place):
        path.chmod(0o755)
    shutil.rmtree(place)


@contextlib.contextmanager
def as_somebody() -> Iterator[None]:
    """As a user for whom rights count."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_neighbour_that_cannot_be_read_is_listed_as_such(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "status", "--dir", base)  # what is imported is imported as who owns it
    (base / "closed").chmod(0)
    with as_somebody():
        states = {line["run"]: line["state"] for line in json.loads(printed(capsys, "status", "--dir", base, "--json").out)}
        said = printed(capsys, "status", "closed", "--dir", base, code=1).err
    assert states.pop("closed").endswith("Permission denied")
    assert states == {"own": "stopped", "odd": "stopped"}
    assert said.startswith("error: the run directory") and "Permission denied" in said
    base.chmod(0)
    with as_somebody():
        assert "Permission denied" in printed(capsys, "status", "--dir", base, code=1).err


def test_what_is_no_file_where_one_should_be_is_said_of_its_run_alone(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "odd" / "lock").mkdir()
    (base / "own" / "summary.json").mkdir()
    os.mkdir(os.fsencode(base) + b"/caf\xe9")
    Path(os.fsdecode(os.fsencode(base) + b"/caf\xe9/config.json")).write_text("{}")
    printed(capsys, "status", "--dir", base)
    states = {line["run"]: line["state"] for line in json.loads(printed(capsys, "status", "--dir", base, "--json").out)}
    assert states.pop("odd").endswith("Is a directory")
    assert states == {"own": "stopped", "closed": "stopped", "caf\ufffd": "stopped"}


@pytest.mark.process
@pytest.mark.parametrize(("limit", "verb"), [(20, ("up", "run.toml", "--plain")), (3, ("status",))])
def test_too_few_open_files_are_said(tmp_path: Path, limit: int, verb: tuple[str, ...]) -> None:
    (tmp_path / "run.toml").write_text('[data]\ntrain = "train.jsonl"\n[engine]\nkind = "table"\n[trainer]\nbackend = "table"\n')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    program = (
        "import resource, sys; from streamrl.cli import main; import streamrl.launch.up, streamrl.monitor.status; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); sys.exit(main(sys.argv[1:]))"
    )
    command, env = [sys.executable, "-c", program, *verb], runs.surroundings()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    if verb[0] == "up":
        assert done.returncode == 1 and f"may have {limit}" in done.stderr, done.stderr


def test_a_low_limit_is_raised_where_that_is_allowed() -> None:
    from streamrl.runtime.bus_server import LEAST_FILES, ensure_open_files

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES - 1, hard))
        ensure_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (LEAST_FILES, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
