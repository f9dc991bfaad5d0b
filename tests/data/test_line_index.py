"""The index of a file of lines says what a plain read of the file says, survives nothing that it should not, and is built again."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.data import line_index as module
from streamrl.data.line_index import LineIndex, first_lines, line_index, sampled_digest
from streamrl.errors import DataError
from tests.support.errors import raises
from tests.support.refusals import refused

LINES = st.lists(st.sampled_from([b"", b" ", b"\t\r", b'{"a": 1}', b' {"a": 2}', b"x" * 9, "\u00fc".encode()]), max_size=30)


def plainly(data: bytes) -> list[tuple[int, int]]:
    """(offset, 1-based line) of each line with more than white space."""
    found, place = [], 3 if data.startswith(b"\xef\xbb\xbf") else 0
    for number, line in enumerate(data[place:].split(b"\n"), 1):
        if line.strip():
            found.append((place, number))
        place += len(line) + 1
    return found


def seen(index: LineIndex) -> list[tuple[int, int]]:
    return [(int(index.starts[row]), index.line(row)) for row in range(len(index))]


@given(lines=LINES, end=st.sampled_from([b"", b"\n"]), mark=st.booleans(), block=st.integers(1, 40))
@example(lines=[b"a", b"b"], end=b"\n", mark=False, block=2)
@example(lines=[], end=b"", mark=True, block=3)
def test_it_is_what_a_plain_read_finds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, mark: bool, block: int
) -> None:
    place = tmp_path_factory.mktemp("index")
    data = (b"\xef\xbb\xbf" if mark else b"") + b"\n".join(lines) + end
    (place / "rows").write_bytes(data)
    before = module.READ_BYTES
    module.READ_BYTES = block  # lines that begin in one block and end in another
    try:
        index = line_index(place / "rows", place / "kept")
        again = line_index(place / "rows", place / "kept")
    finally:
        module.READ_BYTES = before
    assert seen(index) == seen(again) == plainly(data)
    assert index.digest == again.digest
    assert seen(first_lines(place / "rows", 3)) == plainly(data)[:4]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(100)))
    return path


def test_it_is_kept_and_found_again(rows: Path, tmp_path: Path) -> None:
    line_index(rows, tmp_path / "deep" / "kept")
    stamp = (tmp_path / "deep" / "kept").stat().st_ino
    line_index(rows, tmp_path / "deep" / "kept")
    assert (tmp_path / "deep" / "kept").stat().st_ino == stamp
    assert os.listdir(tmp_path / "deep") == ["kept"]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "longer", "head", "garbage"])
def test_a_damaged_index_is_found_out_and_built_again(rows: Path, tmp_path: Path, harm: str) -> None:
    kept = tmp_path / "kept"
    want = seen(line_index(rows, kept))
    data = bytearray(kept.read_bytes())
    if harm == "flip":
        data[-5] ^= 1
    elif harm == "head":
        data[30] ^= 1
    kept.write_bytes({"cut": data[:-8], "empty": b"", "longer": data + b"x", "garbage": b"\x00" * 9000}.get(harm, data))
    assert seen(line_index(rows, kept)) == want
    assert seen(line_index(rows, kept)) == want


def test_another_file_of_the_same_size_and_time_is_another(rows: Path, tmp_path: Path) -> None:
    first = line_index(rows, tmp_path / "kept")
    status = rows.stat()
    rows.write_bytes(rows.read_bytes().replace(b'{"n": 0}\n', b'\n{"n":0}\n'))
    os.utime(rows, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert rows.stat().st_size == status.st_size
    assert line_index(rows, tmp_path / "kept").digest != first.digest


def test_a_file_that_grows_while_it_is_read_is_refused(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = module.scan

    def growing(*args):
        with rows.open("a") as file:
            file.write("{}\n")
        return scan(*args)

    monkeypatch.setattr(module, "scan", growing)
    with raises(DataError, path=str(rows)):
        line_index(rows, tmp_path / "kept")
    assert os.listdir(tmp_path) == [rows.name]


def test_sampled_blocks_have_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = bytearray(9 << 20)

    def digest() -> str:
        path.write_bytes(data)
        with path.open("rb") as file:
            return sampled_digest(file)

    digests = {digest()}
    for place in (0, -1):
        data[place] = 1
        digests.add(digest())
    assert len(digests) == 3


@pytest.mark.process
def test_what_a_killed_builder_has_left_is_written_over_and_gone(rows: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom streamrl.data import line_index as module\n"
        "module.scan = lambda file, size, write: (write(module.np.zeros(99999, int)), os.kill(os.getpid(), 9))\n"
        "module.line_index(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    kept = tmp_path / "kept" / "one"
    assert subprocess.run([sys.executable, "-c", code, str(rows), str(kept)], check=False).returncode == -9
    assert os.listdir(kept.parent) == [".one.building"]
    assert seen(line_index(rows, kept)) == plainly(rows.read_bytes())
    assert os.listdir(kept.parent) == ["one"]


def test_several_that_build_at_once_agree(rows: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: seen(line_index(rows, tmp_path / "kept")), range(16)))
    assert found == [plainly(rows.read_bytes())] * 16
    assert sorted(os.listdir(tmp_path)) == ["kept", rows.name]


def test_a_place_that_cannot_be_written_is_named(rows: Path, tmp_path: Path) -> None:
    with refused(DataError, hint="run.dir", path=str(rows / "deep" / "kept")):
        line_index(rows, rows / "deep" / "kept")
