from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration beside one row, which the section `data` in front of the text names."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')

    def write_text(text: str, *, data: str = '[data]\ntrain = "rows.jsonl"\n') -> Path:
        path = tmp_path / "my.toml"
        path.write_text(data + text)
        return path

    return write_text
