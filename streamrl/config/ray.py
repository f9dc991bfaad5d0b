"""The section `ray`."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.config.bounds import NonNegativeFloat, PositiveFloat, Section

OWN_GPUS_VARIABLE = "STREAMRL_OWN_GPUS"
"""Set in the environment of a worker that sees GPUs of its own only: every rank of a trainer then takes trainer.gpu of those it sees."""


class PlaceConfig(Section, frozen=True, kw_only=True):
    """What one worker asks of the cluster, and how workers of its kind lie to each other."""

    gpus: float = -1.0
    """GPUs of one worker; below 1 several share one. -1: what it needs by the rest of the configuration, where the cluster has GPUs."""
    cpus: NonNegativeFloat = 1.0
    """CPUs of one worker, as Ray counts them; 0: not counted. Threads are trainer.threads and engine.threads."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """On as few nodes as possible, on one, on as many as possible, or each on its own."""
    resources: dict[str, PositiveFloat] = {}
    """Resources of the user's own naming that each worker asks for; nodes are given them with `ray start --resources`."""


class RayConfig(Section, frozen=True, kw_only=True):
    """Workers placed with Ray on the nodes of a cluster (docs/ray.md). `streamrl up` runs on one of them and supervises them all."""

    address: str = ""
    """Empty: no Ray, workers are child processes. `local`: a Ray of this machine, started and ended with the run. `auto`: the cluster that
    this machine belongs to, else as `local`. `host:port`: a cluster by its address, of which this machine is a part."""
    trainer: PlaceConfig = PlaceConfig()
    """Each rank of the trainer."""
    engine: PlaceConfig = PlaceConfig()
    """Each engine."""
    others: PlaceConfig = PlaceConfig(gpus=0.0, cpus=0.0)
    """Each producer, the feeder and the evaluator. With PACK on the node of `streamrl up`; the feeder and the evaluator, which read the
    data, are there in any case."""
    runtime_env: dict[str, Any] = {}
    """Ray's `runtime_env` for all workers; no secrets, the configuration is stored with the run."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest wait for a place in the cluster, or for a worker to come up on it."""
