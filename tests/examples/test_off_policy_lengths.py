"""What a bound does to long answers: every policy is a configuration that a run accepts, and the tables count what the ledgers say."""

from __future__ import annotations

import importlib
import math
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from streamrl.config.load import load
from streamrl.schemas.ledger import Drop, LedgerEntry, SourceTally, Used
from streamrl.schemas.versions import Version

EXAMPLE = Path(__file__).parents[2] / "examples" / "off_policy"


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("lengths")


def test_every_policy_is_accepted(lengths: ModuleType, tmp_path: Path) -> None:
    lengths.write(tmp_path)
    for name in ("counting.toml", "counting.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    for arm in lengths.ARMS:
        config = load(tmp_path / "counting.toml", lengths.settings(lengths.Job(arm, 2), 30.0))
        assert (config.run.seed, config.run.max_seconds) == (2, 30)
        bound = 0 if arm == "lockstep" else int(arm.split("-")[1])
        assert config.tasks.max_staleness == bound
        assert config.tasks.hold_ahead == arm.endswith("paced")


def test_answers_count_up_and_have_the_lengths_of_their_source(lengths: ModuleType) -> None:
    counting = importlib.import_module("counting")
    assert counting.rows("short")[27] == {"prompt": "c7=", "label": "7890"}
    for source, allowed in counting.LENGTHS.items():
        assert {len(row["label"]) for row in counting.rows(source)} == set(allowed)
        assert len({row["prompt"] for row in counting.rows(source)}) == 40


def entry(number: int, tasks: dict[int, int], dropped: tuple[int, ...], told: dict[str, int]) -> LedgerEntry:
    """Trained `tasks` (task -> age), and dropped others whole."""
    return LedgerEntry(
        run="r",
        trainer="main",
        version=Version(0, number),
        source="x",
        used=tuple(Used(task, (0,), (1,)) for task in tasks),
        drops=tuple(Drop(1, task, (0,), "stale", retires=True) for task in dropped),
        staleness=tuple(tasks.values()),
        cursor=1,
        granted=1,
        retired=1,
        sources={name: SourceTally(groups) for name, groups in told.items()},
    )


def test_groups_are_counted_by_source_and_held_against_the_ledgers_own_count(lengths: ModuleType) -> None:
    from streamrl.data.mixture import source_of
    from streamrl.schemas.control import MixtureSegment

    segment = MixtureSegment(first=0, version=0, weights=(1.0, 1.0, 1.0), places=(0, 0, 0))
    names = [lengths.SOURCES[source_of(0, segment, place)[0]] for place in range(12)]
    first = 100  # the warm-up had a hundred tasks
    trained = {first + place: place for place in range(8)}
    told = {name: names[:8].count(name) for name in set(names[:8])}
    (found,) = lengths.by_source([entry(1, trained, (first + 8, first + 9), told)], seed=0)
    for name in lengths.SOURCES:
        ages = [place for place in range(8) if names[place] == name]
        assert found[name][:2] == (len(ages), names[8:10].count(name))
        assert found[name][2] == sum(ages) / len(ages) if ages else math.isnan(found[name][2])
    with pytest.raises(ValueError, match="sources of version"):
        lengths.by_source([entry(1, trained, (), {"long": 8})], seed=0)


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
