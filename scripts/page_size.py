"""Measure the page of a long run: `python scripts/page_size.py [BATCHES]` makes a run of 10^5 batches and 10^6 samples and opens it.

docs/page.md has the output. The script needs a Chromium and playwright, as the tests of the page do.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from playwright.async_api import async_playwright

from streamrl.config.metrics import MetricsConfig
from streamrl.config.tree import Config, RunConfig
from streamrl.monitor.metrics_file import MetricsFile
from streamrl.monitor.series import BATCH, WINDOW, Row
from streamrl.page.address import address_of
from streamrl.page.index import LEDGER_TABLE, open_index
from streamrl.runtime.rundir import RunDir
from streamrl.telemetry.names import METRICS
from tests.support.needs import browser

SAMPLES = 10
"""Samples of a batch."""
_NAMES = [name for name in METRICS if name.startswith(("rollout/", "train/", "staleness/", "perf/", "rollouts/", "tokens/trained"))]
_ENGINES = 8


def rows(batches: int) -> Iterator[list[Row]]:
    """A row a batch with all metrics that batches have, and each ten batches those of a window, of the run and of each engine."""
    for number in range(1, batches + 1):
        found = [row(BATCH, number, {name: (number * 31 + at) % 97 / 97 for at, name in enumerate(_NAMES)})]
        if number % 10 == 0:
            lag = {"lag/stream_s": number % 7 / 7, "lag/versions_behind": 1.0, "tokens/sampled_total": 1e4}
            found += [row(WINDOW, number, lag)] + [row(WINDOW, number, lag, of=f"engine-{index}") for index in range(_ENGINES)]
        yield found


def row(kind: str, number: int, values: dict[str, float], of: str = "") -> Row:
    """One row."""
    return Row(time_s=1.7e9 + number, kind=kind, of=of, version=f"0.{number}", step=number, values=values)


def make(folder: Path, batches: int) -> RunDir:
    """A run directory with metrics of that many batches, and their ledger in the index as it would be read from the bus."""
    run = RunDir(folder / "long")
    run.create()
    run.write_config(Config(run=RunConfig(name="long", dir=str(folder), steps=batches)))
    file = MetricsFile(run.metrics, MetricsConfig(keep_bytes=1 << 40))
    waiting: list[Row] = []
    for found in rows(batches):
        waiting += found
        if len(waiting) > 1000:
            file.write(waiting)
            waiting.clear()
    file.write(waiting)
    file.close()
    print(f"{batches} batches of {len(_NAMES)} metrics: {sum(path.stat().st_size for path in run.metrics.iterdir()) / 1e6:.0f} MB of rows")
    began_s = time.perf_counter()
    with open_index(run) as index:
        while index.read_rows():
            pass
        for number in range(1, batches + 1):
            entry = {"version": number, "epoch": 0, "sequence": number, "samples": SAMPLES, "tokens": 1e3, "time_s": 1.7e9 + number}
            index.add(LEDGER_TABLE, entry | {"digest_high": 1.0, "digest_low": number}, source="ledger", mark=number)
        index.commit()
    took_s = time.perf_counter() - began_s
    other = RunDir(folder / "other")  # the same once more, to be compared with
    other.create()
    shutil.copy(run.config_path, other.config_path)
    shutil.copytree(run.metrics, other.metrics)
    size = sum(path.stat().st_size for path in (run.path / "page").rglob("*") if path.is_file())
    print(f"the index: {took_s:.1f} s, {size / 1e6:.0f} MB")
    return run


async def look(run: RunDir) -> None:
    """Serve it and look at it with a browser that has never seen it."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamrl", "page", str(run.path)), env=surroundings, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        while not (address := address_of(run, pid=server.pid)):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            answer = await client.get(address)
            base = str(answer.url).rstrip("/")
            await answer.read()
            for path in ("/api/run", "/api/series?x=version&names=rollout/raw_reward,staleness/p95,train/loss", "/api/versions"):
                began_s = time.perf_counter()
                body = await (await client.get(base + path)).read()
                print(f"{path.partition('?')[0]}: {1e3 * (time.perf_counter() - began_s):.0f} ms, {len(body) / 1e3:.0f} kB")
            began_s = time.perf_counter()
            while (compared := await (await client.get(f"{base}/api/compare?runs=other&x=elapsed_s")).json())["reading"] is not None:
                pass
            print(f"another run of {compared['runs'][1]['batches']} batches: read after {time.perf_counter() - began_s:.1f} s")
            began_s = time.perf_counter()
            body = await (await client.get(f"{base}/api/compare?runs=other&x=version")).read()
            print(f"/api/compare: {1e3 * (time.perf_counter() - began_s):.0f} ms, {len(body) / 1e3:.0f} kB")
        async with async_playwright() as player:
            chromium = await player.chromium.launch(executable_path=browser(), args=["--no-sandbox", "--disable-gpu"])
            for attempt in range(3):
                tab = await (await chromium.new_context(viewport={"width": 1280, "height": 900})).new_page()
                began_s = time.perf_counter()
                await tab.goto(address)
                await tab.wait_for_selector("section[aria-label=Reward] canvas")
                drawn_s = time.perf_counter() - began_s
                paints = await tab.evaluate("performance.getEntriesByType('paint').map((one) => one.startTime)")
                print(f"look {attempt + 1}: first paint {max(paints) / 1e3:.2f} s, charts after {drawn_s:.2f} s")
            await chromium.close()
        print(f"the server's memory: {resident_mb(server.pid):.0f} MB; load of the machine {os.getloadavg()[0]:.1f}")
    finally:
        server.terminate()
        await server.wait()


def resident_mb(pid: int) -> float:
    """Read the resident memory of a process from the kernel."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(look(make(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)))
