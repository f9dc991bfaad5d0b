import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.loop import onlookers, screens
from benchmarks.loop import sampler as sampler_module
from benchmarks.loop.onlookers import Browser, looking
from benchmarks.loop.sampler import Sampler
from benchmarks.loop.screens import SCREENS, Screen, ScreensSpec, asked, slice_ends
from benchmarks.loop.screens_report import build_report, report_of
from benchmarks.raw import Raw, Round, read, write
from benchmarks.report import render
from streamrl.cli import main
from streamrl.config.tree import Config, RunConfig
from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir
from tests.bench.known import raw_of, small_quickstart
from tests.page.conftest import batches, page
from tests.page.conftest import write as write_rows
from tests.support.errors import raises
from tests.support.processes import until

MEMORY = "supervisor 40 MB, page {} MB, top 50 MB"
OWN = {"cpu/trainer": 6.0, "cpu/engine": 3.0, "cpu/nats-server": 1.0}


def raw(supervisor: float, page: float, *, megabytes: float = 60.0) -> Raw:
    """Three runs of one slice; in each a second passes for a batch. CPU seconds of who looks, of a run that takes ten itself."""
    rounds: list[Round] = []
    for number in range(3):
        values = {"seconds": 10.0, "batches": 10, "load": 1.0, "draws": 2, **OWN, "cpu/supervisor": supervisor}
        rounds.append(Round(cell="", contender=Screen.FILE, round=number, values=values))
        looks = {"cpu/page": page, "cpu/top": 0.1, "before/page": 0.7, "bytes/page": megabytes * 1e6, "bytes/top": 5e7, "bytes/engine": 9e9}
        looks["bytes/supervisor"] = 4e7
        rounds.append(Round(cell="", contender=Screen.PAGE_TOP, round=number, values={**values, **looks}))
    return raw_of(SCREENS, ScreensSpec(screens=(Screen.FILE, Screen.PAGE_TOP), slices=1), rounds)


def test_who_looks_is_held_against_the_runs_own_time(tmp_path: Path) -> None:
    report = build_report(raw(0.05, 0.1))
    assert [(one.got, one.met) for one in report.targets] == [
        ("0.50% (0.50% - 0.50%)", True),
        ("2.50% (2.50% - 2.50%)", True),
        (MEMORY.format(60), True),
    ]
    text = render(report)
    assert " top | page       | 10.0            | 1.00% (1.00% - 1.00%) | 0.7          | 60 |" in text
    assert "1025           | +2.0% (+2.0% to +2.0%)" in text
    assert [one.met for one in build_report(raw(0.11, 0.1, megabytes=101)).targets] == [False, False, False]
    few = replace(raw(0.05, 0.1), rounds=raw(0.05, 0.1).rounds[:2])
    assert [one.met for one in build_report(few).targets] == [None, None, None]
    write(tmp_path, raw(0.05, 0.1).header, raw(0.05, 0.1).rounds)
    assert msgspec.json.encode(report_of(tmp_path)) == msgspec.json.encode(report)
    grown = raw(0.05, 0.1)
    of_page = [one for one in grown.rounds if one.contender == Screen.PAGE_TOP]
    for one, megabytes in zip(of_page, (60, 70, 150), strict=True):
        one.values["bytes/page"] = megabytes * 1e6
    report = build_report(grown)
    assert (report.targets[-1].got, report.targets[-1].met) == (MEMORY.format(150), False)
    assert "| 0.7          | 150 |" in render(report)


def test_slices_of_one_run_are_no_runs() -> None:
    one_run = raw(0.05, 0.1)
    one_run.header.spec["slices"] = 4
    report = build_report(one_run)
    assert {target.met for target in report.targets} == {None} and "3 runs are needed" in report.targets[0].got
    assert " top | 1    | 3      |" in render(report)
    whole = [replace(one, round=number * 4 + one.round) for number in range(3) for one in one_run.rounds]
    report = build_report(replace(one_run, rounds=whole))
    assert {target.met for target in report.targets} == {True} and " top | 3    | 9      |" in render(report)
    del one_run.header.spec["slices"]  # as before there were any
    assert {target.met for target in build_report(one_run).targets} == {True}


def test_screens_and_slices_are_named_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loop", "--slices", "2", "--batches", "4"]) == 1
    assert "--slices" in capsys.readouterr().err
    assert asked("page-top,file") == (Screen.PAGE_TOP, Screen.FILE)
    assert {Screen.FILE, Screen.PAGE, Screen.PAGE_TOP} <= set(asked(""))
    with raises(ConfigError, option="--screens", got="browser"):
        asked("browser")
    assert slice_ends(60, 220, 4) == [60, 100, 140, 180, 220]
    assert slice_ends(2, 9, 3) == [2, 4, 6, 9]
    with raises(ConfigError, option="--slices", got=6):
        ScreensSpec(screens=(Screen.FILE,), batches=10, skip=5, slices=6)


async def test_the_browser_asks_again_when_there_is_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onlookers, "_DRAW_S", 0.1)
    run = RunDir(tmp_path / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo", dir=str(tmp_path))))
    write_rows(run, batches(1, 3))
    browser = Browser(run)
    async with page(run, works=True) as (base, token, _), looking([browser.look_at(f"{base}/?token={token}")]):
        await until(lambda: browser.draws == 1, within_s=60)
        write_rows(run, batches(4, 5))
        await until(lambda: browser.draws == 2, within_s=60)
        with pytest.raises(aiohttp.ClientResponseError, match="403"):
            await Browser(run).look_at(f"{base}/?token=wrong")


@pytest.mark.process
def test_the_sampler_knows_what_looks_and_its_memory() -> None:
    script = "block = bytearray(b'x' * 50_000_000); print(flush=True); input()"
    command = [sys.executable, "-c", script, "-m", "streamrl", "top", "demo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with Sampler(child.pid) as sampler:
            while not sampler.most_bytes():
                time.sleep(0.05)
        child.communicate("\n")
    most = sampler.most_bytes()
    assert list(most) == ["top"] and 50e6 < most["top"] < 100e6
    assert sampler.most_bytes(0.0) == {}


@pytest.mark.process
def test_the_memory_of_who_starts_processes_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_EVERY_S", 0.001)
    script = """
import subprocess
block = bytearray(b'x' * 50_000_000)
for number in range(400):
    subprocess.run(["true"], check=True)
    number == 50 and print(flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with Sampler(child.pid) as sampler:
            child.wait()
    assert 50e6 < max(sampler.most_bytes().values()) < 100e6


@pytest.mark.parametrize(("screen", "sinks"), [(Screen.PAGE_TOP, ()), (Screen.PROMETHEUS, ("prometheus",)), (Screen.WANDB, ("wandb",))])
def test_a_run_has_the_sink_that_is_to_look_at_it(
    screen: Screen, sinks: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    async def measured(_: Screen, config: Config, spec: ScreensSpec) -> list[dict[str, float]]:
        seen.append(config)
        return [{"seconds": 1.0}] * spec.slices

    monkeypatch.setattr(screens, "_measured", measured)
    monkeypatch.setattr(screens, "check_sinks", lambda metrics: None)
    spec = ScreensSpec(screens=(screen,), backend="table", batches=3, skip=1, rounds=2, slices=2)
    screens.measure(spec, tmp_path, "streamrl bench loop --screens")
    assert [config.metrics.sinks for config in seen] == [sinks] * 2 and seen[0].metrics.wandb.mode == "offline"
    assert [one.round for one in read(tmp_path, SCREENS).rounds] == [0, 1, 2, 3]


@pytest.mark.nats
@pytest.mark.process
@pytest.mark.slow
def test_a_tiny_run_measures_all_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(screens, "quickstart", small_quickstart)
    out = tmp_path / "out"
    flags = "--backend table --batches 3 --skip 1 --rounds 1 --slices 2 --screens page-top"
    assert main(["bench", "loop", *flags.split(), "--out", str(out)]) == 0
    assert "supervisor, page and top" in capsys.readouterr().out
    top, later = read(out, SCREENS).rounds
    assert (top.round, later.round, top.values["batches"], later.values["batches"]) == (0, 1, 1, 1)
    assert later.values["before/top"] == top.values["before/top"] and later.values["bytes/top"] >= top.values["bytes/top"]
    assert top.contender == Screen.PAGE_TOP
    assert {"cpu/supervisor", "cpu/page", "cpu/top", "bytes/page", "bytes/top"} <= top.values.keys()
    assert main(["bench", "loop", "--screens", "--report", str(out)]) == 0
