"""The comparisons of corrections: each method is a configuration that a run accepts, and the tables say what the runs wrote."""

import asyncio
import csv
import importlib
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from streamrl.config.load import load
from streamrl.schemas.ledger import Drop, LedgerEntry, SourceTally, Used
from tests.support.ledgers import entry
from tests.support.pythons import python

EXAMPLE = Path(__file__).parents[2] / "examples" / "off_policy"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's folder is no package."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_every_method_is_accepted_at_every_age() -> None:
    curves = importlib.import_module("curves")

    for method in curves.METHODS:
        for age in (0, 2, 32):
            config = load(curves.QUICKSTART, curves.settings(curves.Job(method, age, 1), 20))
            assert (config.tasks.max_staleness, config.debug.delay_versions, config.run.seed) == (age, age, 1)
            assert config.trainer.minibatches == 2


@pytest.mark.process
@pytest.mark.slow
def test_a_run_is_kept_as_a_table_and_not_made_again(tmp_path: Path) -> None:
    command = [EXAMPLE / "curves.py", "run", "--out", tmp_path, "--parallel", "1", "--seeds", "1", "--ages", "2"]
    command += ["--batches", "4", "--set", "warmup.max_steps=3", "--set", "tasks.batch_tasks=8"]
    python(tmp_path, *command, "--methods", "decoupled")
    rows = list(csv.DictReader((tmp_path / "decoupled-2-0.csv").read_text(encoding="utf-8").splitlines()))
    assert [int(row["batch"]) for row in rows] == [0, 1, 2, 3]
    assert {float(row["staleness_mean"]) for row in rows} == {2.0}
    assert all(0 < float(row["ess_token"]) <= 1 for row in rows)
    assert not (tmp_path / "runs" / "decoupled-2-0").exists()
    assert "batches" not in python(tmp_path, *command, "--methods", "decoupled")[0]


@pytest.mark.process
def test_a_run_that_is_ended_at_its_limit_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of `up` stands what drains, and says that this went well."""
    curves, running = importlib.import_module("curves"), importlib.import_module("running")
    drains = tmp_path / "drains"
    drains.write_text("#!/bin/sh\ntrap 'exit 0' TERM\nwhile :; do sleep 0.05; done\n")
    drains.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(drains))
    assert asyncio.run(running.execute(curves.QUICKSTART, "cut", [], tmp_path, 1.0)) != 0


@pytest.mark.process
def test_the_table_and_the_picture_show_what_the_runs_wrote(tmp_path: Path) -> None:
    rewards = {("none", 0): 0.5, ("none", 1): 0.7, ("cispo", 0): 0.9}
    for (method, seed), reward in rewards.items():
        with (tmp_path / f"{method}-{seed}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["method", "age", "seed", "batch", "reward", "staleness_mean"])
            # Only the last 20 batches count.
            writer.writerows([method, 8, seed, batch, reward if batch >= 5 else 0.0, 8.0] for batch in range(25))
    said, _ = python(tmp_path, EXAMPLE / "curves.py", "report", tmp_path, "--picture", tmp_path / "curves.png")
    assert "| no correction | 0.60 (0.50-0.70) |" in said and "| CISPO | 0.90 (0.90-0.90) |" in said and "8.0 versions" in said
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.process
def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    assert "curves.py run --out" in python(tmp_path, EXAMPLE / "curves.py", "report", tmp_path, code=1)[1]


def test_every_method_is_accepted_at_every_bound_and_none_is_another() -> None:
    bounds = importlib.import_module("bounds")
    for bound in (0, 8, 64):
        configs = [load(bounds.QUICKSTART, bounds.settings(bounds.Job(method, bound, 1), 20)) for method in bounds.COMPARED]
        assert {(one.tasks.max_staleness, one.debug.delay_versions, one.run.seed) for one in configs} == {(bound, 0, 1)}
        assert len({(repr(one.loss), repr(one.trainer.optimizer)) for one in configs}) == len(configs) == 5


def test_the_table_has_means_over_seeds_with_the_lowest_and_the_highest() -> None:
    report = importlib.import_module("bound_report")
    rows = [
        {
            **{"method": "vcpo", "bound": "8", "seed": str(seed), "batch": str(batch), "seconds": str(batch * (1 + seed))},
            # only the last 20 batches count for the reward
            **{"rollout/raw_reward": "0.5" if batch >= 10 else "0.0", "staleness/mean": "8.0", "staleness/max": "8"},
            **{"train/ess_token": "0.75" if batch < 15 else "0.25", "train/ess_sequence": str(0.2 + 0.2 * seed)},
            **{"heldout_first": "0.1", "heldout_last": str(0.8 + 0.1 * seed)},
        }
        for seed in (0, 1)
        for batch in reversed(range(30))
    ]
    assert report.table(rows).splitlines()[-1] == ("| 8 | VCPO | 44 (29-58) | 0.50 | 0.85 (0.80-0.90) | 8.0 | 0.50 | 0.30 (0.20-0.40) |")


@pytest.fixture
def lengths() -> ModuleType:
    return importlib.import_module("lengths")


def test_every_policy_is_accepted(lengths: ModuleType, tmp_path: Path) -> None:
    lengths.write(tmp_path)
    for name in ("counting.toml", "counting.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    for arm in lengths.ARMS:
        config = load(tmp_path / "counting.toml", lengths.settings(lengths.Job(arm, 2), 30.0))
        assert (config.run.seed, config.run.max_seconds) == (2, 30)
        bound = 0 if arm == "lockstep" else int(arm.split("-")[1])
        assert (config.tasks.max_staleness, config.tasks.hold_ahead) == (bound, arm.endswith("paced"))


def test_answers_count_up_and_have_the_lengths_of_their_source(lengths: ModuleType) -> None:
    counting = importlib.import_module("counting")
    assert counting.rows("short")[27] == {"prompt": "c7=", "label": "7890"}
    for source, allowed in counting.LENGTHS.items():
        assert {len(row["label"]) for row in counting.rows(source)} == set(allowed)
        assert len({row["prompt"] for row in counting.rows(source)}) == 40


def trained_of(tasks: dict[int, int], dropped: tuple[int, ...], told: dict[str, int]) -> LedgerEntry:
    """Trained `tasks` (task -> age), and dropped others whole."""
    used = tuple(Used(task, (0,), (1,)) for task in tasks)
    drops = tuple(Drop(1, task, (0,), "stale", retires=True) for task in dropped)
    sources = {name: SourceTally(groups) for name, groups in told.items()}
    return entry(used=used, drops=drops, staleness=tuple(tasks.values()), sources=sources)


def test_groups_are_counted_by_source_and_held_against_the_ledgers_own_count(lengths: ModuleType) -> None:
    from streamrl.data.mixture import source_of
    from streamrl.schemas.control import MixtureSegment

    segment = MixtureSegment(first=0, version=0, weights=(1.0, 1.0, 1.0), places=(0, 0, 0))
    names = [lengths.SOURCES[source_of(0, segment, place)[0]] for place in range(12)]
    first = 100  # the warm-up had a hundred tasks
    trained = {first + place: place for place in range(8)}
    told = {name: names[:8].count(name) for name in set(names[:8])}
    (found,) = lengths.by_source([trained_of(trained, (first + 8, first + 9), told)], seed=0)
    for name in lengths.SOURCES:
        ages = [place for place in range(8) if names[place] == name]
        assert found[name][:2] == (len(ages), names[8:10].count(name))
        assert found[name][2] == sum(ages) / len(ages) if ages else math.isnan(found[name][2])
    with pytest.raises(ValueError, match="sources of version"):
        lengths.by_source([trained_of(trained, (), {"long": 8})], seed=0)


def test_tables_are_means_over_seeds(lengths: ModuleType) -> None:
    report = importlib.import_module("length_report")
    rows = [
        {
            **{"arm": "wait-2", "seed": str(seed), "batch": str(batch), "seconds": str(2.0 * batch), "reward": "0.5", "tokens": "100"},
            **{"source": source, "trained": trained, "dropped": "0" if source == "short" else "3", "age": age},
            **{"accuracy_first": "0.1", "accuracy_last": str(0.4 + 0.2 * seed)},
        }
        for seed in (0, 1)
        for batch in range(20)
        for source, trained, age in (("short", "6", "0.0"), ("medium", "3", "1.0"), ("long", "3" if batch >= 10 else "0", "2.0"))
    ]
    sampling, learning = report.tables(rows).split("\n\n")
    # long: of 9 none, then 3 of 12; 6 dropped a batch beside 10.5 trained ones on average, half of them long
    assert sampling.splitlines()[-1] == "| wait-2 | 0% | 25% | 36% | 50% | 0.0 | 2.0 |"
    # 19 batches in 38 seconds, 50 tokens a second, two seeds that end at 0.4 and 0.6
    assert learning.splitlines()[-1] == "| wait-2 | 30 | 50 |" + " 0.50 (0.40-0.60) |" * 3 + " 0.10 |"
