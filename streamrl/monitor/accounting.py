"""The account of a run: rollouts trained, time of workers and GPUs. Page, `top`, `status` and summary all take it from here."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from streamrl.config.tree import Config
from streamrl.monitor.numbers import Account
from streamrl.schemas.events import MetricReport
from streamrl.telemetry.states import STATES, gpus_of, seconds

SATURATED = "engine/saturated_s"
GPU_KINDS = ("trainer", "engine")
"""Kinds of workers that may have GPUs."""
_STATES_OF = {kind: tuple(seconds(kind, state) for state in states) for kind, states in STATES.items()}
_KEPT = {name: kind for kind, names in _STATES_OF.items() for name in names} | {SATURATED: ""}
_MOST_WORKERS = 1024
"""Workers whose GPUs may not be known yet."""
_MOST_GPUS = 1 << 16
"""The most that one worker is believed to have."""


class Devices(msgspec.Struct, frozen=True):
    """Processes and GPUs of a run, by its configuration."""

    ranks: int = 1
    """Processes of the trainer, of which rank 0 alone reports its time."""
    shared: bool = False
    """Trainer and engines compute on the same GPUs, where they have any."""


def devices_of(config: Config) -> Devices:
    """The trainer's ranks take the GPUs from `trainer.gpu` on, engines those that are named, or the first ones; on one host.

    With Ray every worker has GPUs of its own, unless both kinds ask for a part of one.
    """
    trainer, engine = config.trainer, config.engine
    if config.ray.address:
        return Devices(trainer.ranks, 0 < config.ray.trainer.gpus < 1 and 0 < config.ray.engine.gpus < 1)
    if engine.traits.gpus == "none":
        return Devices(trainer.ranks)
    own = engine.sglang.gpus or range(max(1, engine.workers) * engine.sglang.tensor_parallel)
    engines = set(own if engine.traits.gpus == "own" else (0,))
    return Devices(trainer.ranks, bool(engines.intersection(range(trainer.gpu, trainer.gpu + trainer.ranks))))


class Spent:
    """Adds up the time that workers report, by the metric that counts it, and GPU-seconds under `gpu_seconds(kind)`.

    Time before a process knows its GPUs, while it loads, counts once it does. Time in which a worker was away is nobody's.

    Args:
        before: sums of earlier sessions.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.sums: dict[str, float] = dict(before or {})
        self._held: dict[str, float] = {}
        """Seconds before a worker's GPUs are known, by worker."""

    def add(self, report: MetricReport) -> None:
        """One worker's report."""
        for name, amount in report.sum.items():
            if name in _KEPT and 0 <= amount < float("inf"):
                self.sums[name] = self.sums.get(name, 0.0) + amount
        for kind in GPU_KINDS:
            up_s = sum(max(0.0, report.sum.get(name, 0.0)) for name in _STATES_OF[kind])
            gpus = report.last.get(gpus_of(kind))
            if gpus is not None and 0 <= gpus <= _MOST_GPUS:
                name = gpu_seconds(kind)
                self.sums[name] = self.sums.get(name, 0.0) + gpus * (up_s + self._held.pop(report.worker, 0.0))
            elif up_s and (report.worker in self._held or len(self._held) < _MOST_WORKERS):
                self._held[report.worker] = self._held.get(report.worker, 0.0) + up_s


def gpu_seconds(kind: str) -> str:
    """The key of the GPU-seconds of a kind of worker."""
    return f"{kind}/gpu_s"


def account(
    spent: Mapping[str, float],
    devices: Devices,
    *,
    rollouts_trained: int,
    rollouts_dropped: int,
    tokens_trained: int,
    complete: bool = True,
) -> Account:
    """The account of a run.

    Args:
        spent: seconds by metric (`Spent.sums`).
        devices: by the configuration.
        rollouts_trained: by the ledger.
        rollouts_dropped: decided against for any reason, failures included.
        tokens_trained: of trained batches, prompts and warm-up included.
        complete: `spent` is of all sessions of the run; else no rate is made of it.
    """
    up_s = {kind: sum(spent.get(name, 0.0) for name in _STATES_OF[kind]) for kind in GPU_KINDS}
    gpu_s = {kind: spent.get(gpu_seconds(kind), 0.0) for kind in GPU_KINDS}
    workers_s = up_s["trainer"] * devices.ranks + up_s["engine"]
    gpus_s = max(gpu_s.values()) if devices.shared else sum(gpu_s.values())
    ended = rollouts_trained + rollouts_dropped
    per_s = {
        name: tokens_trained / amount if complete and amount > 0 else None for name, amount in (("gpu", gpus_s), ("worker", workers_s))
    }
    return Account(
        rollouts_trained=rollouts_trained,
        rollouts_ended=ended,
        trained_share=rollouts_trained / ended if ended else None,
        tokens_trained=tokens_trained,
        trainer_s=up_s["trainer"] * devices.ranks,
        engine_s=up_s["engine"],
        trainer_gpu_s=gpu_s["trainer"],
        engine_gpu_s=gpu_s["engine"],
        gpu_s=gpus_s,
        shared=devices.shared and min(gpu_s.values()) > 0,
        tokens_per_gpu_s=per_s["gpu"],
        tokens_per_worker_s=None if gpus_s > 0 else per_s["worker"],
        complete=complete,
    )
