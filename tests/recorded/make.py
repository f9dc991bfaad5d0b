"""Makes the recorded runs of `data/`: `python -m tests.recorded.make PLACE [NAME ...]` with PLACE a new directory.

Only the command line is used, so that it ran on the code of 7fe21ef, which is what it is for: the archives are what that code left on
disk. They are never made again to make a test pass. A later format is recorded under new names, beside these.
"""

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import recorded as runs

COMMON = """
[run]
name = "{name}"
steps = {steps}
seed = 5
[data]
train = "train.jsonl"
chat_template = false
max_prompt_tokens = 16
[model]
max_len = 24
[tasks]
batch_tasks = 3
num_rollouts = 3
{tasks}
[sampling]
max_new_tokens = 4
top_k = 24
[producer]
concurrency = 6
[engine]
slots = 12
[bus]
samples_bytes = 100_000_000
blobs_bytes = 100_000_000
[trainer.optimizer]
learning_rate = 0.05
[trainer]
checkpoint_every = 4
keep_checkpoints = 2
"""
REWARD = """[reward]
kind = "tests.recorded.reward:score"
"""
SLOW = ("--set", "debug.token_delay_s=0.06", "--set", "debug.token_delay_sigma=1.5")
"""So that completions overtake each other, and the run can be stopped in its midst."""
SLOW_TORCH = ("--set", "producer.concurrency=1")
STOP_AT, STEPS = 8, 24
SECRET = ("bus.json", "credentials", "tls", "bus/nats-server.conf")
"""Of a run's directory; `up` makes new ones."""
LEFT_OUT = (*SECRET, "logs", "hf", "lock", "summary.json", "plot.png", "bus/nats-server.log", "bus/nats-server.pid")
FOLD_FIELDS = {
    "batch_tasks": "tasks.batch_tasks",
    "group_size": "tasks.num_rollouts",
    "max_staleness": "tasks.max_staleness",
    "stale": "tasks.stale",
    "drop_zero_spread": "tasks.drop_zero_spread",
    "late_versions": "reward.late_versions",
    "warmup_steps": "warmup.max_steps",
    "warmup_until": "warmup.until",
    "hold_ahead": "tasks.hold_ahead",
    "delay_versions": "debug.delay_versions",
}


def sections(tasks: str, *more: str, table: bool = True) -> dict[str, Any]:
    return {"tasks": tasks, "more": more, "table": table}


RUNS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "drop": (
        "groups dropped as stale, for zero spread and for failed rollouts; weights as anchors and deltas on the bus",
        sections(
            "max_staleness = 1", REWARD + "options = {failing = true}\n", '[weights]\ntransport = "bus"\nkeep = 2\nanchor_every = 4\n'
        ),
        ("loss.correction.high=1.01",),
    ),
    "wait": (
        "batches that wait for old tasks, tasks held while a batch is ready",
        sections('max_staleness = 2\nstale = "wait"\nhold_ahead = true', REWARD),
        ("tasks.max_staleness=1", "tasks.stale=drop"),
    ),
    "lockstep": (
        "no staleness at all: what comes after the resumption is determined too",
        sections("max_staleness = 0\ndrop_zero_spread = false", REWARD, '[loss]\nadvantage = "rloo"\n'),
        ("trainer.optimizer.learning_rate=0.02",),
    ),
    "warmup": (
        "a supervised warm-up, then batches whose old tokens are masked",
        sections('max_staleness = 1\nstale = "mask"', REWARD, "[warmup]\nmax_steps = 4\nuntil = 1.0\nlearning_rate = 0.1\n"),
        ("trainer.optimizer.learning_rate=0.02",),
    ),
    "late": (
        "rewards that come by themselves: corrected, superseded, or never",
        sections("max_staleness = 4", '[reward]\nkind = "late"\nlate_versions = 2\n'),
        ("trainer.optimizer.learning_rate=0.02",),
    ),
    "fork": (
        "a drain, a restart that trains other digits and is killed, a restart that forks the epoch",
        sections("max_staleness = 2", REWARD),
        ("loss.correction.high=1.01",),
    ),
    "torch": (
        "the torch backend: checkpoints with the optimizer's state, model and digests of torch",
        sections("max_staleness = 1", REWARD + "options = {seconds = 0.3}\n", table=False),
        ("loss.correction.high=1.01",),
    ),
}


def write_inputs(name: str, place: Path) -> None:
    """`run.toml` and the rows."""
    _, given, _ = RUNS[name]
    text = COMMON.format(name=name, steps=STEPS, tasks=given["tasks"])
    if given["table"]:
        text = text.replace("[engine]\n", '[engine]\nkind = "table"\n') + 'backend = "table"\n'
    else:
        text = text.replace("[engine]\n", '[engine]\nkind = "local"\n').replace("learning_rate = 0.05", "learning_rate = 0.003")
        text = text.replace("max_len = 24\n", "max_len = 24\nhidden = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nintermediate = 24\n")
    (place / "run.toml").write_text(text.lstrip() + "".join(given["more"]))
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(5)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def life(name: str, place: Path, *, enough: Callable[[], bool], now: bool = False, overrides: tuple[str, ...] = ()) -> None:
    """`up`, until there is enough, then `down`."""
    slow = SLOW if RUNS[name][1]["table"] else SLOW_TORCH
    with runs.started(place, *runs.command("up", "run.toml", "--plain", *slow, *overrides)) as up, runs.judged(place, name):

        def far_enough() -> bool:
            assert up.poll() is None, (place / "words.txt").read_text()
            return enough()

        runs.until(far_enough, "enough")
        down = runs.command("down", name, *(("--now",) if now else ()))
        subprocess.run(down, cwd=place, env=runs.surroundings(), check=True)
        up.wait()


def newest_checkpoint(name: str, place: Path) -> tuple[int, Path]:
    """Its version number and its directory; 0 while there is none."""
    found = sorted((place / "runs" / name / "checkpoints").glob("main-v*-e*"))
    return (int(found[-1].name.split("-")[1][1:]), found[-1]) if found else (0, place)


def drained(name: str, place: Path, *, version: int) -> None:
    """A life to the first checkpoint at or above a version, and the few batches more until it is drained."""
    life(name, place, enough=lambda: newest_checkpoint(name, place)[0] >= version)


def alter(checkpoint: Path) -> None:
    """Give the optimizer other moments, as a machine with other numerics might have: the same version, other versions after it."""
    path = checkpoint / "state.npz"
    arrays = dict(np.load(path, allow_pickle=False))
    arrays["mean"] = arrays["mean"] * np.float32(0.5)
    np.savez(path, **arrays)


def forked(name: str, place: Path) -> None:
    """A drained run, a second life from altered moments that is killed, a third from the true ones, which trains the second's batches."""
    drained(name, place, version=4)
    version, checkpoint = newest_checkpoint(name, place)
    shutil.copytree(checkpoint, place / "kept")
    alter(checkpoint)

    def killed_at() -> bool:
        newest = str(runs.say(place, "status", name)["version"]).rpartition(".")[2]
        return newest.isdigit() and int(newest) >= version + 3

    life(name, place, enough=killed_at, now=True, overrides=("--set", "trainer.checkpoint_every=100"))
    shutil.rmtree(checkpoint)
    (place / "kept").rename(checkpoint)
    drained(name, place, version=version + 6)


def facts(name: str, place: Path) -> dict[str, Any]:
    """What the tests hold the archive and the code of the day against."""
    recording, here = place / runs.RECORDING, ("--dir", "runs")
    rows = runs.ledger(recording)
    line = {row["number"]: row for row in sorted(rows, key=lambda row: row["epoch"])}
    digests = [line[number]["digest"] for number in sorted(line)]
    assert len(digests) < STEPS, "the run was over before it was drained"
    report = runs.say(place, "replay", name, "--verify", *here)
    assert report["ok"] and report["equal"] == report["versions"] == len(digests) and report["digest"] == digests[-1], report
    middle = len(digests) - 1
    late = runs.say(place, "replay", name, "--verify", "--from", str(middle), *here)
    assert late["ok"] and late["began"] != "0.0", late
    sets = [part for one in RUNS[name][2] for part in ("--set", one)]
    runs.say(place, "replay", name, *sets, "--name", "branched", *here)
    compared = runs.say(place, "compare", name, "branched", *here)
    branch = [json.loads(text) for text in (place / "runs" / "branched" / "ledger.jsonl").read_text().splitlines()]
    shutil.rmtree(place / "runs" / "branched")
    tested = runs.say(place, "replay", name, "--policy-only", "--set", "tasks.max_staleness=1,4", "--set", "tasks.stale=drop,wait", *here)
    config = json.loads((place / "runs" / name / "config.json").read_text())
    return {
        "covers": RUNS[name][0],
        "versions": runs.versions(rows),
        "digests": digests,
        "ledger_sha256": runs.body_digest(rows),
        "drops": runs.drops(rows),
        "verify_from": [middle, late["began"]],
        "branch": {
            "set": list(RUNS[name][2]),
            "versions": len(branch),
            "digest": branch[-1]["digest"],
            "same_batches_to": compared["same_batches_to"],
            "same_digests_to": compared["same_digests_to"],
        },
        "backtest": [
            {key: one[key] for key in ("max_staleness", "stale", "batches", "staleness_mean", "stale_rollouts")}
            for one in tested["outcomes"]
        ],
        "fold": {field: config[key.split(".")[0]][key.split(".")[1]] for field, key in FOLD_FIELDS.items()},
        "last": STEPS + sum(row["source"] == "warmup" for row in line.values()),
    }


def pack(name: str, place: Path) -> None:
    """The archive, without secrets and what is for people."""

    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inside = entry.name.removeprefix(f"runs/{name}/")
        if inside in LEFT_OUT:
            return None
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(runs.DATA / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in ("run.toml", "train.jsonl", f"runs/{name}", runs.RECORDING):
            archive.add(place / path, arcname=path, filter=keep)


def to_the_end(name: str, place: Path) -> list[str]:
    """The packed run's own way to its end: its digests."""
    with runs.started(place, *runs.command("up", "run.toml", "--plain")) as up:
        assert up.wait(runs.PATIENCE_S) == 0
    runs.say(place, "record", name, "--out", "whole")
    return [row["digest"] for row in runs.ledger(place / "whole")]


def make(name: str, place: Path) -> None:
    """One run from start to archive."""
    place.mkdir(parents=True)
    write_inputs(name, place)
    if name == "fork":
        forked(name, place)
    else:
        drained(name, place, version=STOP_AT)
    runs.say(place, "record", name, "--out", runs.RECORDING, "--checkpoints")
    found = facts(name, place)
    pack(name, place)
    if name == "lockstep":
        found["digests_to_the_end"] = to_the_end(name, place)
    (runs.DATA / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    size = (runs.DATA / f"{name}.tar.xz").stat().st_size
    print(f"{name}: {size} bytes, versions to {found['versions'][-1]}, {found['drops']}")


if __name__ == "__main__":
    base, *names = sys.argv[1:]
    for chosen in names or RUNS:
        make(chosen, Path(base).absolute() / chosen)
