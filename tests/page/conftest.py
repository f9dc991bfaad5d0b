import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from streamrl.config.metrics import MetricsConfig
from streamrl.config.tree import Config, RunConfig
from streamrl.monitor.metrics_file import MetricsFile
from streamrl.monitor.series import BATCH, Row
from streamrl.page.access import page_token, place_of
from streamrl.page.attention import Attention
from streamrl.page.index import Index, open_index
from streamrl.page.server import Page, served
from streamrl.page.serving import log_of
from streamrl.runtime.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A prepared run that has never been up: there are files, and no log."""
    run = RunDir(tmp_path / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo", dir=str(tmp_path))))
    return run


def batch(time_s: float, number: int, values: dict[str, float], *, epoch: int = 0) -> Row:
    return Row(time_s=time_s, kind=BATCH, version=f"{epoch}.{number}", step=number, values=values)


def batches(first: int, last: int, *, epoch: int = 0, reward: float = 0.5) -> list[Row]:
    return [
        batch(1e9 + number, number, {"rollout/raw_reward": reward, "staleness/max": float(number % 3)}, epoch=epoch)
        for number in range(first, last + 1)
    ]


def write(run: RunDir, rows: list[Row], **config: Any) -> None:
    file = MetricsFile(run.metrics, MetricsConfig(**config))
    file.write(rows)
    file.close()


def read(index: Index) -> None:
    while index.read_rows():
        pass


@contextmanager
def indexed(run: RunDir) -> Iterator[Index]:
    """The index of a run, which has all rows that there are."""
    with open_index(run) as index:
        read(index)
        yield index


@asynccontextmanager
async def page(run: RunDir, *, works: bool = False) -> AsyncIterator[tuple[str, str, aiohttp.ClientSession]]:
    """The page of a run without a log: its address, its token, and a client that is let in. It reads later rows where it `works`."""
    with indexed(run) as index:
        token = page_token(run)
        config = run.load_config()
        attention = Attention()
        shown = Page(run, config, index, log_of(run, index, config, attention), attention)
        app = shown.app(token)
        async with served(app, 0) as port, aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            base = f"http://127.0.0.1:{port}/{place_of(token)}"
            async with client.get(f"{base}/?token={token}") as answer:
                assert answer.status == 200
            working = asyncio.create_task(shown.work()) if works else None
            yield base, token, client
            if working is not None:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
