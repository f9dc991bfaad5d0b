"""Methods against the bound: each is a configuration that a run accepts, and the table has the means over seeds of what runs wrote."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from streamrl.config.load import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "off_policy"


def test_every_method_is_accepted_at_every_bound_and_none_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    bounds = importlib.import_module("bounds")
    for bound in (0, 8, 64):
        configs = [load(bounds.QUICKSTART, bounds.settings(bounds.Job(method, bound, 1), 20)) for method in bounds.COMPARED]
        assert {(one.tasks.max_staleness, one.debug.delay_versions, one.run.seed) for one in configs} == {(bound, 0, 1)}
        assert len({(repr(one.loss), repr(one.trainer.optimizer)) for one in configs}) == len(configs) == 5


def test_the_table_has_means_over_seeds_with_the_lowest_and_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
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
