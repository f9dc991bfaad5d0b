"""Commands of the product, started as a user starts them."""

import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


async def command(place: Path, *words: str, module: str = "streamrl") -> asyncio.subprocess.Process:
    """Start `python -m streamrl WORDS` in `place`, or another module; its output goes to `out` there."""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with (place / "out").open("ab") as out:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *words, cwd=place, env=surroundings, stdout=out, stderr=out
        )
