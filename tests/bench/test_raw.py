from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.raw import new_directory
from streamrl.errors import ConfigError


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="--out: "):
            new_directory(place)
    assert new_directory(tmp_path / "new" / "one").is_dir()
    assert list((tmp_path / "new" / "one").iterdir()) == []
