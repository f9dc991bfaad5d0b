from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.files import new_directory, write_private


def test_a_private_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old and readable by all")
    write_private(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]


def test_a_directory_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "parent" / "made"
    with new_directory(path) as scratch:
        (scratch / "a").write_text("1")
        assert not path.exists()
    assert (path / "a").read_text() == "1"
    with pytest.raises(ZeroDivisionError), new_directory(path.with_name("other")) as scratch:
        (scratch / "a").write_text(str(1 / 0))
    with pytest.raises(FileExistsError), new_directory(path):
        pass
    with pytest.raises(NotADirectoryError), new_directory(path / "a" / "below a file"):
        pass
    assert [one.name for one in path.parent.iterdir()] == ["made"]
