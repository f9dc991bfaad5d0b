"""docs/gpu.md shows the files that `streamrl init --example gsm8k` copies, and they do what it says."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.blocks import blocks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gsm8k"
BLOCKS = blocks(ROOT / "docs" / "gpu.md")


def test_the_configuration_is_the_examples_file() -> None:
    [shown] = [block.text for block in BLOCKS if block.language == "toml"]
    head, _, body = (EXAMPLE / "one_gpu.toml").read_text().partition("\n\n")
    assert head.startswith("#") and shown == body


def test_the_reward_is_the_examples_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "brief", raising=False)
    import brief  # pyright: ignore[reportMissingImports]

    [shown] = [block.text for block in BLOCKS if block.language == "python"]
    lines = inspect.getsource(brief.score).splitlines()
    assert shown.splitlines()[1:] == [line for line in lines[1:] if '"""' not in line]
    task = SimpleNamespace(label="16 - 3 = 13\n#### 1,013")
    for text, right in (("so it is 1,013.", 1.0), ("13", 0.0), ("", 0.0), ("-1013", 0.0), ("#### 1013", 1.0)):
        given = brief.score(task, SimpleNamespace(completion=text))
        assert given["right"] == right and 0 < given["brief"] <= 0.1
    assert brief.score(task, SimpleNamespace(completion="a" * 1000))["brief"] == 0.05
