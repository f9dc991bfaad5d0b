"""The comparison of corrections: every method is a configuration that a run accepts, and tables are means of what runs wrote."""

from __future__ import annotations

import asyncio
import csv
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.load import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "off_policy"


def execute(*command: str, timeout_s: float = 170) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=timeout_s)


def test_every_method_is_accepted_at_every_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    curves = importlib.import_module("curves")

    for method in curves.METHODS:
        for age in (0, 2, 32):
            config = load(curves.QUICKSTART, curves.settings(curves.Job(method, age, 1), 20))
            assert (config.tasks.max_staleness, config.debug.delay_versions, config.run.seed) == (age, age, 1)
            assert config.trainer.minibatches == 2


@pytest.mark.process
@pytest.mark.slow
def test_a_run_is_kept_as_a_table_and_not_made_again(tmp_path: Path) -> None:
    command = [str(EXAMPLE / "curves.py"), "run", "--out", str(tmp_path), "--parallel", "1", "--seeds", "1", "--ages", "2"]
    command += ["--batches", "4", "--set", "warmup.max_steps=3", "--set", "tasks.batch_tasks=8"]
    done = execute(*command, "--methods", "decoupled")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((tmp_path / "decoupled-2-0.csv").read_text(encoding="utf-8").splitlines()))
    assert [int(row["batch"]) for row in rows] == [0, 1, 2, 3]
    assert {float(row["staleness_mean"]) for row in rows} == {2.0}
    assert all(0 < float(row["ess_token"]) <= 1 for row in rows)
    assert not (tmp_path / "runs" / "decoupled-2-0").exists()
    assert "batches" not in execute(*command, "--methods", "decoupled").stdout


@pytest.mark.process
def test_a_run_that_is_ended_at_its_limit_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of `up` stands what drains, and says that this went well."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
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
    done = execute(str(EXAMPLE / "curves.py"), "report", str(tmp_path), "--picture", str(tmp_path / "curves.png"))
    assert done.returncode == 0, done.stderr
    assert "| no correction | 0.60 (0.50-0.70) |" in done.stdout
    assert "| CISPO | 0.90 (0.90-0.90) |" in done.stdout
    assert "8.0 versions" in done.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.process
def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    done = execute(str(EXAMPLE / "curves.py"), "report", str(tmp_path))
    assert done.returncode != 0
    assert "curves.py run --out" in done.stderr
