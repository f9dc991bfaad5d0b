"""What the section `ray` may not say, and what other sections may not say beside it."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.ray import PlaceConfig
from streamrl.config.tree import Config

_OURS = ("CPU", "GPU", "memory", "object_store_memory")


def check_ray(config: Config) -> None:
    """Raise ConfigError for the first rule that does not hold; looks at no cluster."""
    ray = config.ray
    for kind, place in (("trainer", ray.trainer), ("engine", ray.engine), ("others", ray.others)):
        _check_place(f"ray.{kind}", place)
    refuse(
        ray.others.strategy not in ("PACK", "SPREAD"),
        f"ray.others.strategy must be PACK or SPREAD, got {ray.others.strategy}: producers come and go, nothing reserves places for them",
        hint="choose one of the two",
        key="ray.others.strategy",
    )
    if not ray.address:
        return
    refuse(
        "://" in ray.address,
        f"ray.address must be local, auto or host:port, got {ray.address!r}: a Ray client cannot supervise workers",
        hint="run `streamrl up` on a machine of the cluster, with ray.address = 'auto'",
        key="ray.address",
    )
    may_share = 0 < ray.trainer.gpus <= 0.5 and ray.trainer.strategy != "STRICT_SPREAD"
    refuse(
        config.trainer.ranks > 1 and config.trainer.device != "cpu" and may_share,
        f"ray.trainer.gpus must be above 0.5 with trainer.ranks = {config.trainer.ranks}, got {ray.trainer.gpus:g}: two ranks may get one "
        "GPU, where NCCL sums no gradients",
        hint="set it to 0.6, say; or ray.trainer.strategy = 'STRICT_SPREAD' for a node each",
        key="ray.trainer.gpus",
    )
    sglang = config.engine.sglang
    refuse(
        bool(sglang.gpus),
        f"engine.sglang.gpus must be empty with ray.address, got {list(sglang.gpus)}: Ray gives each engine its GPUs",
        hint="leave it out; ray.engine.gpus says how many",
        key="engine.sglang.gpus",
    )
    refuse(
        config.trainer.gpu != 0,
        f"trainer.gpu must be 0 with ray.address, got {config.trainer.gpu}: Ray gives each rank its GPU",
        hint="leave it out; ray.trainer.gpus says how many",
        key="trainer.gpu",
    )
    wanted = sglang.tensor_parallel
    refuse(
        config.engine.traits.gpus == "own" and ray.engine.gpus > 0 and ray.engine.gpus != wanted and (wanted > 1 or ray.engine.gpus > 1),
        f"ray.engine.gpus must be engine.sglang.tensor_parallel = {wanted}, or below 1 for tensor_parallel = 1, got {ray.engine.gpus:g}",
        hint="leave it out",
        key="ray.engine.gpus",
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
