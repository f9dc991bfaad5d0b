"""The section `ray` and its rules."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.config.bounds import NonNegativeFloat, PositiveFloat, Section, refuse

OWN_GPUS_VARIABLE = "STREAMRL_OWN_GPUS"
"""Set in the environment of a worker that sees GPUs of its own only: every rank of a trainer then takes trainer.gpu of those it sees."""
_OURS = ("CPU", "GPU", "memory", "object_store_memory")


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


def check_ray(ray: RayConfig) -> None:
    """Raise ConfigError for the first rule of the section that does not hold; looks at no cluster."""
    for kind, place in (("trainer", ray.trainer), ("engine", ray.engine), ("others", ray.others)):
        _check_place(f"ray.{kind}", place)
    refuse(
        ray.others.strategy not in ("PACK", "SPREAD"),
        f"ray.others.strategy must be PACK or SPREAD, got {ray.others.strategy}: producers come and go, nothing reserves places for them",
        hint="choose one of the two",
        key="ray.others.strategy",
    )
    refuse(
        "://" in ray.address,
        f"ray.address must be local, auto or host:port, got {ray.address!r}: a Ray client cannot supervise workers",
        hint="run `streamrl up` on a machine of the cluster, with ray.address = 'auto'",
        key="ray.address",
    )


def _check_place(key: str, place: PlaceConfig) -> None:
    whole = place.gpus < 1 or place.gpus == int(place.gpus)
    refuse(
        not whole or (place.gpus < 0 and place.gpus != -1),
        f"{key}.gpus must be -1, a fraction below 1, or a whole number, got {place.gpus}",
        hint="below 1 several workers share a GPU; -1 takes what the rest of the configuration needs",
        key=f"{key}.gpus",
    )
    for name in place.resources:
        refuse(
            name in _OURS,
            f"{key}.resources may not name {name}",
            hint=f"set {key}.gpus or {key}.cpus, or leave it out",
            key=f"{key}.resources",
        )
