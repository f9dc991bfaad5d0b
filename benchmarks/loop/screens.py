"""`streamrl bench loop --screens`: what looking at a run costs it. The stream's run, while one thing after the other looks at it."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from msgspec.structs import replace

from benchmarks.loop.onlookers import Browser, Top, looking, scrape
from benchmarks.loop.plain import Trained
from benchmarks.loop.run import PACKAGES, contend, warm_policy
from benchmarks.loop.sampler import Sampler
from benchmarks.loop.ways import LoopSpec, Way, quickstart, write_problems
from benchmarks.names import names
from benchmarks.raw import Round, header, write_measured
from benchmarks.report import turn
from streamrl.config.metrics import PACKAGES as PACKAGES_OF_SINKS
from streamrl.config.metrics import MetricsConfig, PrometheusConfig, SinkKind, WandbConfig, check_sinks
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir

logger = logging.getLogger(__name__)

SCREENS = "loop --screens"
"""Its name in raw files and documents."""
SLICES = 4


class Screen(StrEnum):
    """What looks at a run; each is the name of the sink, or a file that every run has and what stands beside it."""

    FILE = "file"
    """Nothing but the supervisor, who writes the metrics file: no key turns that off."""
    PAGE = "page"
    """The page as well, with one client that asks what a browser at its overview asks."""
    PAGE_TOP = "page-top"
    """`streamrl top` as well, on a terminal of 80 x 24."""
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    """Offline."""
    TRACKIO = "trackio"
    PROMETHEUS = "prometheus"
    """Scraped every 5 s."""


class ScreensSpec(LoopSpec, frozen=True, kw_only=True):
    """One benchmark; of the loop's own fields those of its tail, and its ways, say nothing here."""

    screens: tuple[Screen, ...]
    slices: int = SLICES
    """Stretches of a run's measured batches, each a round of its own in the raw file: spreads without starting as many runs. Targets are
    judged by runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.slices <= self.batches - self.skip:
            raise ConfigError(
                f"expected 1 to {self.batches - self.skip} slices of so many measured batches, got {self.slices}",
                option="--slices",
                got=self.slices,
            )


def asked(text: str) -> tuple[Screen, ...]:
    """Those named; for an empty text all but the sinks whose packages are not installed. Raises ConfigError for a name that is none."""
    missing = {kind for kind, package in PACKAGES_OF_SINKS.items() if importlib.util.find_spec(package) is None}
    return tuple(one for one in names("--screens", text, Screen) if text or one not in missing)


def measure(spec: ScreensSpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`.

    Raises:
        ConfigError: `out` holds another run, or a sink's package is not installed.
        LaunchError: a run failed, or what looked at it ended before it.
    """
    for screen in spec.screens:
        check_sinks(_metrics(screen))
    packages = (*PACKAGES, *(name for kind, name in PACKAGES_OF_SINKS.items() if kind in spec.screens))
    write_measured(out, header(SCREENS, command, spec, packages), lambda scratch: _rounds(spec, scratch))


def _rounds(spec: ScreensSpec, directory: Path) -> Iterator[Round]:
    write_problems(directory / "train.jsonl")
    model = warm_policy(spec, directory)
    for number in range(spec.rounds):
        for screen in turn(spec.screens, number):
            config = quickstart(spec, directory, name=f"{screen}-{number}", model=model)
            parts = asyncio.run(_measured(screen, replace(config, metrics=_metrics(screen)), spec))
            for place, values in enumerate(parts):
                yield Round(cell="", contender=screen, round=number * spec.slices + place, values=values)


def _metrics(screen: Screen) -> MetricsConfig:
    sinks: tuple[SinkKind, ...] = tuple(kind for kind in PACKAGES_OF_SINKS if kind == screen)
    return MetricsConfig(sinks=sinks, wandb=WandbConfig(mode="offline"), prometheus=PrometheusConfig(port=_free_port()))


async def _measured(screen: Screen, config: Config, spec: ScreensSpec) -> list[dict[str, float]]:
    """CPU seconds and memory by kind of process, of each slice.

    `cpu/` are those from the end of the batch before the slice to the end of its last one, `before/` those until the first slice, `bytes/`
    the most at once up to the end of the slice; `draws`: how often the page's client asked for all charts, from its start on.
    """
    run = RunDir(Path(config.run.dir) / config.run.name)
    browser, top = Browser(run), Top(run)
    page = screen in (Screen.PAGE, Screen.PAGE_TOP)
    looks = [browser.look()] if page else []
    if screen == Screen.PAGE_TOP:
        looks.append(top.look())
    if screen == Screen.PROMETHEUS:
        looks.append(scrape(f"http://127.0.0.1:{config.metrics.prometheus.port}/metrics"))
    async with looking(looks):
        trained, sampler = await asyncio.to_thread(contend, Way.STREAM, config, page=page)
    samplers = [sampler, *([top.sampler] if top.sampler is not None else [])]
    logger.info("event=measured name=%s draws=%d", config.run.name, browser.draws)
    ends = slice_ends(spec.skip, len(trained), spec.slices)
    return [_values(trained, samplers, spec.skip, *stretch) | {"draws": browser.draws} for stretch in itertools.pairwise(ends)]


def slice_ends(skip: int, batches: int, slices: int) -> list[int]:
    """Where slices as equal as may be begin and end, in batches."""
    return [skip + place * (batches - skip) // slices for place in range(slices + 1)]


def _values(trained: list[Trained], samplers: list[Sampler], skip: int, first: int, end: int) -> dict[str, float]:
    start_s, end_s = trained[first - 1].time_s, trained[end - 1].time_s
    values: dict[str, float] = {"seconds": end_s - start_s, "batches": end - first, "load": os.getloadavg()[0]}
    for sampler in samplers:
        values |= {f"cpu/{kind}": seconds for kind, seconds in sampler.between(start_s, end_s).items()}
        values |= {f"before/{kind}": seconds for kind, seconds in sampler.until(trained[skip - 1].time_s).items()}
        values |= {f"bytes/{kind}": size for kind, size in sampler.most_bytes(end_s).items()}
    return values


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
