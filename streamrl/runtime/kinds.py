"""The kinds of worker, where their code is, and what surroundings they need."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.runtime.kernels import kernel_folders

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker

MAINS: Mapping[str, str] = MappingProxyType(
    {
        "feeder": "streamrl.producers.feeder:main",
        "producer": "streamrl.producers.rollouts:main",
        "gateway": "streamrl.producers.gateway.worker:main",
        "rewarder": "streamrl.producers.rewarder:main",
        "evaluator": "streamrl.producers.evaluation.worker:main",
        "engine": "streamrl.consumers.serving.engine_worker:main",
        "trainer": "streamrl.consumers.training.worker:main",
    }
)
"""Entry point of each kind. A name, not an import: a process loads its own part only (a producer needs no torch)."""

PROCESS_GROUPS = ("trainer",)
"""Kinds whose workers of one run are ranks of one thing: index is rank, and when one fails all are started again."""

LOADING_S: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("feeder", "producer", "gateway", "rewarder", "evaluator"), 600.0),
        **dict.fromkeys(("engine", "trainer"), 3600.0),
    }
)
"""Longest that a worker of each kind may load before it counts as hung: rows and user code, or models and their servers."""

USER_CODE = ("producer", "gateway", "rewarder", "evaluator")
"""Kinds that run the user's functions, which may need keys of services they call."""
SINK_KIND = "sink-{kind}"
"""What the process of a sink is called: `sink-wandb`."""
_OWN_SECRETS: Mapping[str, frozenset[str]] = MappingProxyType({"sink-wandb": frozenset({"WANDB_API_KEY"})})
"""What a kind gets although it sounds like a secret."""
_SECRET_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIALS", "APIKEY"})
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def check_kind(kind: str) -> str:
    """Return `kind` if there is such a worker; raises ConfigError otherwise."""
    if kind not in MAINS:
        near = difflib.get_close_matches(kind, MAINS, n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"expected a kind of worker, got {kind!r}", hint=f"{advice}there are {', '.join(MAINS)}")
    return kind


def load_main(kind: str) -> Callable[[Worker], Awaitable[None]]:
    """Import the part of streamrl that `kind` runs."""
    module, _, function = MAINS[check_kind(kind)].partition(":")
    main: Callable[[Worker], Awaitable[None]] = getattr(importlib.import_module(module), function)
    return main


def num_workers(config: Config, kind: str) -> int:
    """How many workers of `kind` a run starts."""
    if kind == "producer":
        return config.producer.workers
    if kind == "gateway":
        return config.gateway.workers
    if kind == "rewarder":
        return config.reward.workers
    if kind == "engine" and config.run.kind == "sft" and not (config.data.heldout or config.evaluation.sets):
        return 0
    if kind == "engine":
        return config.engine.workers + config.evaluation.engines
    if kind == "evaluator":
        return 1 if config.data.heldout or config.evaluation.sets else 0
    if kind == "trainer":
        return config.trainer.ranks
    return 1


def environment(config: Config, kind: str) -> dict[str, str]:
    """Environment variables of a worker: the thread counts that the configuration gives it.

    They must be set before torch or numpy is loaded: without them every process starts a thread per core and they starve each other.
    """
    threads = {"engine": config.engine.threads, "trainer": config.trainer.threads}.get(kind, 1)
    return {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), "TOKENIZERS_PARALLELISM": "false"}


def take_environment(config: Config, kind: str) -> None:
    """Set `environment` and `kernel_folders` in this process, for it and for those that it starts; what the user has set stays."""
    for name, value in (environment(config, kind) | kernel_folders(config, kind, os.environ)).items():
        os.environ.setdefault(name, value)


def inherited(surroundings: Mapping[str, str], kind: str) -> dict[str, str]:
    """What a worker takes over from its supervisor's environment: all but what sounds like a secret, for kinds that need none.

    A variable counts as one when a word of its name does: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY.
    """
    if kind in USER_CODE:
        return dict(surroundings)
    own = _OWN_SECRETS.get(kind, frozenset())
    return {name: value for name, value in surroundings.items() if name in own or _SECRET_WORDS.isdisjoint(name.upper().split("_"))}
