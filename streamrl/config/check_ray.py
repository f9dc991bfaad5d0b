"""What the section `ray` may not say, and what other sections may not say beside it."""

from __future__ import annotations

from streamrl.config.ray import PlaceConfig
from streamrl.config.tree import Config, require
from streamrl.errors import ConfigError

_OURS = ("CPU", "GPU", "memory", "object_store_memory")


def check_ray(config: Config) -> None:
    """Raise ConfigError for the first rule that does not hold; looks at no cluster."""
    ray = config.ray
    for kind, place in (("trainer", ray.trainer), ("engine", ray.engine), ("others", ray.others)):
        _check_place(f"ray.{kind}", place)
    require(ray.start_timeout_s > 0, "ray.start_timeout_s", "above 0", ray.start_timeout_s)
    _refuse(
        ray.others.strategy not in ("PACK", "SPREAD"),
        f"ray.others.strategy must be PACK or SPREAD, got {ray.others.strategy}: producers come and go, nothing reserves places for them",
        "choose one of the two",
        "ray.others.strategy",
    )
    if not ray.address:
        return
    _refuse(
        "://" in ray.address,
        f"ray.address must be local, auto or host:port, got {ray.address!r}: a Ray client cannot supervise workers",
        "run `streamrl up` on a machine of the cluster, with ray.address = 'auto'",
        "ray.address",
    )
    sglang = config.engine.sglang
    _refuse(
        bool(sglang.gpus),
        f"engine.sglang.gpus must be empty with ray.address, got {list(sglang.gpus)}: Ray gives each engine its GPUs",
        "leave it out; ray.engine.gpus says how many",
        "engine.sglang.gpus",
    )
    _refuse(
        config.trainer.gpu != 0,
        f"trainer.gpu must be 0 with ray.address, got {config.trainer.gpu}: Ray gives each rank its GPU",
        "leave it out; ray.trainer.gpus says how many",
        "trainer.gpu",
    )
    wanted = sglang.tensor_parallel
    _refuse(
        config.engine.kind == "sglang" and ray.engine.gpus > 0 and ray.engine.gpus != wanted and (wanted > 1 or ray.engine.gpus > 1),
        f"ray.engine.gpus must be engine.sglang.tensor_parallel = {wanted}, or below 1 for tensor_parallel = 1, got {ray.engine.gpus:g}",
        "leave it out",
        "ray.engine.gpus",
    )


def _check_place(key: str, place: PlaceConfig) -> None:
    whole = place.gpus < 1 or place.gpus == int(place.gpus)
    require((place.gpus >= 0 or place.gpus == -1) and whole, f"{key}.gpus", "-1, a fraction below 1, or a whole number", place.gpus)
    require(place.cpus >= 0, f"{key}.cpus", "at least 0", place.cpus)
    for name, amount in place.resources.items():
        _refuse(
            name in _OURS,
            f"{key}.resources may not name {name}",
            f"set {key}.gpus or {key}.cpus, or leave it out",
            f"{key}.resources",
        )
        require(amount > 0, f"{key}.resources.{name}", "above 0", amount)


def _refuse(when: bool, message: str, hint: str, key: str) -> None:
    if when:
        raise ConfigError(message, hint=hint, key=key)
