"""Which GPUs train and which generate: as retrain's slime adapter would have it, or what is free of that."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.errors import ConfigError

_QUERY = ("--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")
_ANSWER_S = 30.0
FREE = 0.1
"""A GPU is free while at most this part of its memory is in use."""
SHARED_MEMORY = 0.35
"""`mem_fraction_static` of an engine that shares the trainer's GPU, where none is named."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the hyperparameters say; None: nothing."""

    trainer: int | None = None
    """GPUs of the trainer, on all nodes."""
    nodes: int = 1
    rollout: int | None = None
    """GPUs of all engines."""
    per_engine: int = 1
    tensor: int = 1
    pipeline: int = 1
    colocate: bool = False


class Placed(msgspec.Struct, frozen=True):
    """Configuration keys, and what is to be said about them."""

    keys: dict[str, Any]
    notes: tuple[str, ...] = ()


def place(free: int, asked: Asked) -> Placed:
    """Trainer and engines on `free` GPUs of this machine, or with several nodes on a cluster.

    Half of the GPUs generate where nothing is named (retrain's `max(1, n // 2)`), the others train. Where more are named than are free,
    each gets its share of what is free, at least one engine and one replica. One GPU is shared, and without any all is on the CPU.

    Raises:
        ConfigError: the smallest engine and the smallest replica do not fit.
    """
    if asked.nodes > 1:
        return _on_nodes(asked)
    if free == 0:
        return Placed(
            {"engine.kind": "local", "trainer.device": "cpu", "model.dtype": "float32"},
            ("no GPU is free: the model is trained and served on the CPU, in float32",),
        )
    replica, notes = asked.tensor * asked.pipeline, list[str]()
    if free == 1 and replica == asked.per_engine == 1:
        keys = _keys(1, 1, asked) | {"engine.sglang.gpus": [0], "engine.sglang.flags.mem_fraction_static": SHARED_MEMORY}
        return Placed(keys, ("one GPU is free: trainer and engine share it",))
    if asked.colocate:
        notes.append("colocate: nobody waits for the GPUs of others here, so trainer and engines have GPUs of their own")
    if free < replica + asked.per_engine:
        raise ConfigError(
            f"expected {replica} free GPUs for the trainer and {asked.per_engine} for an engine, {free} are free",
            hint="lower tensor_model_parallel_size, pipeline_model_parallel_size or rollout_num_gpus_per_engine, or free some",
        )
    engines = _whole(asked.rollout or min(free // 2, free - replica), asked.per_engine)
    trainer = _whole(asked.trainer or free - engines, replica)
    if (wanted := trainer + engines) > free:
        engines = _whole(min(free * engines // wanted, free - replica), asked.per_engine)
        trainer = _whole(min(trainer, free - engines), replica)
        notes.append(f"{wanted} GPUs are asked for and {free} are free")
    if notes or (asked.trainer, asked.rollout) != (trainer, engines):
        notes.append(f"GPUs: {trainer} train, {engines} generate")
    return Placed(_keys(trainer, engines, asked) | {"engine.sglang.gpus": [*range(trainer, trainer + engines)]}, tuple(notes))


def _whole(count: int, unit: int) -> int:
    """As many units as `count` has, one at least."""
    return max(unit, count - count % unit)


def _on_nodes(asked: Asked) -> Placed:
    """By Ray, on the cluster that this machine belongs to."""
    if asked.trainer is None or asked.rollout is None:
        raise ConfigError(
            f"expected actor_num_gpus_per_node and rollout_num_gpus beside actor_num_nodes = {asked.nodes}, one of them is not named",
            hint="the GPUs of other nodes are not known before the run starts",
        )
    keys = {"ray.address": "auto", "weights.transport": "bus"}
    return Placed(_keys(asked.trainer, asked.rollout, asked) | keys, (f"{asked.nodes} nodes: workers are placed by Ray's cluster",))


def _keys(trainer: int, engines: int, asked: Asked) -> dict[str, Any]:
    if engines % asked.per_engine or trainer % (asked.tensor * asked.pipeline):
        raise ConfigError(
            f"expected whole engines of {asked.per_engine} GPUs and whole replicas of {asked.tensor * asked.pipeline}, "
            f"got {engines} GPUs to generate and {trainer} to train",
            hint="make them multiples",
        )
    cut: Mapping[str, Any] = {"trainer.shards": trainer} if asked.tensor * asked.pipeline == 1 else {"trainer.backend": "megatron"}
    return {
        "engine.kind": "sglang",
        "engine.workers": engines // asked.per_engine,
        "engine.sglang.tensor_parallel": asked.per_engine,
        "trainer.device": "cuda",
        "trainer.ranks": trainer,
        "trainer.tensor": asked.tensor,
        "trainer.pipeline": asked.pipeline,
        "weights.transport": "ipc",
        **cut,
    }


def free_gpus(surroundings: Mapping[str, str] = os.environ) -> list[str]:
    """GPUs that this process may use and nobody else does, as CUDA_VISIBLE_DEVICES names them; empty without a driver.

    Raises:
        ConfigError: the driver does not answer.
    """
    program = shutil.which("nvidia-smi", path=surroundings.get("PATH"))
    if program is None:
        return []
    try:
        said = subprocess.run((program, *_QUERY), capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout
        used = {index: int(used) / int(total) for index, used, total in (line.split(", ") for line in said.splitlines() if line.strip())}
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise ConfigError(f"expected nvidia-smi to tell which GPUs are free, got {type(error).__name__}: {error}", hint="try it") from error
    visible = surroundings.get("CUDA_VISIBLE_DEVICES")
    named = [*used] if visible is None else [name.strip() for name in visible.split(",")]
    # CUDA sees the devices before the first name that is none, so that "-1" hides all; those named by UUID are taken as they are.
    named = [*itertools.takewhile(lambda name: name in used or name.startswith(("GPU-", "MIG-")), named)]
    return [name for name in named if used.get(name, 0.0) <= FREE]
