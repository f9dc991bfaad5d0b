from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.needs import need, verifiers_python
from tests.support.producing import Loop, memory_loop


@pytest_asyncio.fixture
async def loop(tmp_path: Path, run_id: str) -> AsyncIterator[Loop]:
    """A run on the in-process bus."""
    made = await memory_loop(tmp_path, run_id)
    yield made
    await made.bus.close()


@pytest.fixture
def python() -> str:
    """The interpreter that has verifiers."""
    need("verifiers")
    return verifiers_python() or ""
