"""The atomic directory protocol: killed at every system call, it leaves the old content, the new one, or none."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.errors import CheckpointDamaged, TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers import checkpoints
from streamrl.trainers.checkpoints import BackgroundWriter, list_checkpoints, prune, recover, write_directory
from tests.support.errors import raises

# Ends itself without any clean-up at the n-th call that the protocol makes.
KILLED = """
import os, shutil, sys
from pathlib import Path
from streamrl.trainers.checkpoints import write_directory

path, content, left = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def counted(function):
    def call(*args, **options):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return function(*args, **options)
    return call

def write(directory):
    (directory / "a").write_text(content)
    (directory / "b").write_text(content)

os.fsync, os.rename, os.chmod, shutil.rmtree = map(counted, (os.fsync, os.rename, os.chmod, shutil.rmtree))
write_directory(path, write)
"""


def content(path: Path) -> str | None:
    if not path.exists():
        return None
    a, b = (path / "a").read_text(), (path / "b").read_text()
    assert a == b
    return a


def fill(text: str, names: str = "f") -> Callable[[Path], None]:
    """Writes files of one letter."""

    def write(directory: Path) -> None:
        for name in names:
            (directory / name).write_text(text)

    return write


@pytest.mark.process
@pytest.mark.parametrize("former", [None, "old"])
def test_a_kill_at_any_call_leaves_one_whole_content(tmp_path: Path, former: str | None) -> None:
    seen: list[str | None] = []
    for calls in range(30):
        path = tmp_path / str(calls) / "main-v00000001-e0"
        if former is not None:
            write_directory(path, fill("old", "ab"))
        child = subprocess.run([sys.executable, "-c", KILLED, str(path), "new", str(calls)], check=False)
        assert child.returncode in (0, 9)
        before_recovery = content(path)
        recover(path)
        seen.append(content(path))
        assert before_recovery in (seen[-1], None)
        assert [p.name for p in path.parent.iterdir()] == ([path.name] if seen[-1] else [])
        if child.returncode == 0:
            break
    # Killed early: as before; killed late or not at all: the new content; nothing else in between.
    assert seen[-1] == "new"
    assert seen == sorted(seen, key=lambda found: found == "new")
    assert set(seen) == {former, "new"}


def test_a_write_that_fails_leaves_nothing_and_says_where(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "a").write_text("half")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        write_directory(tmp_path / "at", write)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "at").write_text("a file, not a directory")
    with raises(TrainingError, path=str(tmp_path / "at" / "below")):
        write_directory(tmp_path / "at" / "below", lambda _: None)


def test_the_writer_writes_in_order_and_reports_failures(tmp_path: Path) -> None:
    writer = BackgroundWriter()

    def fail(directory: Path) -> None:
        raise OSError("disk full")

    first = writer.submit(tmp_path / "one", fill("1"))
    second = writer.submit(tmp_path / "two", fail)
    third = writer.submit(tmp_path / "three", fill("3"))
    assert first.done() and second.done()
    with raises(TrainingError, path=str(tmp_path / "two")):
        second.result()
    third.result()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "three"]


def test_lists_and_prunes_by_version_and_prefix(tmp_path: Path) -> None:
    names = ["main-v00000009-e0", "main-v00000010-e0", "main-v00000003-e1", "main-v00000012-e0", "other-v00000001-e0", "main-notes"]
    spoiled = ["main-v00000008-e0.damaged", "main-v00000011-e0.damaged"]
    unfinished = [".main-v00000011-e0.writing-abc", ".other-v00000002-e0.writing-abc"]
    for name in [*names, *spoiled, *unfinished]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("")
    listed = [version for version, _ in list_checkpoints(tmp_path, "main-")]
    assert listed == [Version(0, 9), Version(0, 10), Version(0, 12), Version(1, 3)]
    assert prune(tmp_path, keep=(), prefix="main-") == []
    keep = {tmp_path / "main-v00000010-e0", tmp_path / "main-v00000003-e1"}
    removed = {path.name for path in prune(tmp_path, keep=keep, prefix="main-")}
    assert removed == {"main-v00000009-e0", "main-v00000008-e0.damaged"}, "what is newer than the newest that is kept stays"
    left = {*names, *spoiled, ".other-v00000002-e0.writing-abc"} - removed
    assert {p.name for p in tmp_path.iterdir()} == left
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_checkpoint_is_read_back_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives back other bytes than it was given."""
    digests = iter(["what was written", "what is read"])
    monkeypatch.setattr(checkpoints, "file_digest", lambda path: next(digests))
    with pytest.raises(CheckpointDamaged):
        BackgroundWriter().submit(tmp_path / "at", fill("1")).result()
    assert list(tmp_path.iterdir()) == []
