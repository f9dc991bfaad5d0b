"""Problems whose answers are short or long: count up from a digit, as many digits as a letter says.

Usage: python examples/off_policy/counting.py DIRECTORY

`c7=` is answered by `7890`: four digits from 7 on. A letter stands for one of LENGTHS; the sources of counting.toml differ in these alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

LENGTHS = {"short": (2, 3, 4, 5), "medium": (10, 12, 14, 16), "long": (32, 36, 40, 44)}
"""Digits of an answer, by source."""
LETTERS = dict(zip((length for lengths in LENGTHS.values() for length in lengths), "abcdefghijkl", strict=True))


def answer(first: int, length: int) -> str:
    return "".join(str((first + step) % 10) for step in range(length))


def rows(source: str) -> list[dict[str, str]]:
    return [{"prompt": f"{LETTERS[length]}{first}=", "label": answer(first, length)} for length in LENGTHS[source] for first in range(10)]


def write(directory: Path) -> None:
    """One file a source."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in LENGTHS:
        text = "".join(json.dumps(row) + "\n" for row in rows(source))
        (directory / f"{source}.jsonl").write_text(text, encoding="utf-8")


async def read_aloud(task: Any, engine: Any) -> Any:
    """An answer, and an environment that takes `seconds_per_token` for each of its tokens before the rollout ends."""
    chat = engine.chat(task)
    turn = await chat.generate()
    await asyncio.sleep(engine.options["seconds_per_token"] * len(turn.token_ids))
    return chat.episode()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
