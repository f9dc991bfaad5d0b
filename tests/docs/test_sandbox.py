"""The page's function does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.blocks import blocks

PAGE = Path(__file__).parents[2] / "docs" / "sandbox.md"


@pytest.mark.process
async def test_the_tool_of_the_page() -> None:
    [block] = [block for block in blocks(PAGE) if block.language == "python"]
    page: dict[str, Any] = {}
    exec(block.text, page)
    assert await page["python"]("print(open('data.csv').read())") == "a,b\n"
    assert (await page["python"]("1 / 0")).endswith("ZeroDivisionError: division by zero\n")
    assert await page["python"]("import os; os.kill(os.getpid(), 9)") == "killed: by signal 9 (Killed)"
