"""All flags, the spellings that no slime had, and the families that SGLang and its router have."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from streamrl.bridges.slime.script.flag import Flag
from streamrl.bridges.slime.script.flags_data import BATCHES, CLUSTER, DATA, EVALUATION, REWARD, ROLLOUT
from streamrl.bridges.slime.script.flags_model import MODEL, PARALLEL
from streamrl.bridges.slime.script.flags_training import CHECKPOINTS, DEBUG, LOGS, LOSS, OPTIMIZER
from streamrl.bridges.slime.script.hooks import CODE
from streamrl.config.engines import FIXED, OURS

SECTIONS: Mapping[str, tuple[Flag, ...]] = MappingProxyType(
    {
        "Cluster": CLUSTER,
        "Data": DATA,
        "Batches": BATCHES,
        "Rollouts": ROLLOUT,
        "Code": CODE,
        "Rewards": REWARD,
        "Evaluation": EVALUATION,
        "Loss": LOSS,
        "Optimizer": OPTIMIZER,
        "Checkpoints": CHECKPOINTS,
        "Logs": LOGS,
        "Debugging": DEBUG,
        "Parallelism": PARALLEL,
        "Model": MODEL,
    }
)
FLAGS: Mapping[str, Flag] = MappingProxyType({flag.name: flag for flags in SECTIONS.values() for flag in flags})


class Alias(NamedTuple):
    """A spelling of documents about slime that none of its versions takes."""

    flag: str
    """What is meant; empty: nothing is to be set."""
    says: str


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "--tis-threshold": Alias("--tis-clip", "slime calls it --tis-clip"),
        "--initial-megatron-checkpoint": Alias("--load", "slime calls it --load"),
        "--fsdp-max-tokens-per-gpu": Alias("--max-tokens-per-gpu", "slime calls it --max-tokens-per-gpu"),
        "--output-dir": Alias("--save", "slime calls it --save"),
        "--async-buffer-size": Alias("--update-weights-interval", "no slime has it; read as --update-weights-interval, batches made ahead"),
        "--rollout-global-dataset": Alias("", "it is slime's default, and the only way here"),
        "--log-model-config": Alias("", "`streamrl config` and config.json show it"),
        "--use-critic": Alias("", "the critic comes with --advantage-estimator ppo"),
        "--max-turns": Alias("", "no slime has it; code that makes rollouts reads its own options"),
    }
)
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "--sglang-": "a flag of SGLang's server: engine.sglang.flags has it, without `--sglang-`",
        "--sglang-router-": "producers ask the engines themselves",
        "--slime-router-": "producers ask the engines themselves",
        "--router-": "producers ask the engines themselves",
    }
)
"""Beginnings of names; the longest counts."""
_OF_SGLANG_KINDS: Mapping[str, str] = MappingProxyType({"max_running_requests": "whole", "enable_deterministic_inference": "switch"})


def find(name: str) -> Flag | None:
    """What is known of a flag, of its alias, or of its family; None for a name that none has."""
    if name in FLAGS:
        return FLAGS[name]
    if alias := ALIASES.get(name):
        meant = FLAGS.get(alias.flag)
        if meant is None:
            return Flag(name, "any", "nothing", alias.says)
        return Flag(name, meant.kind, "approximated", alias.says, meant.keys, default=meant.default)
    family = max((begin for begin in FAMILIES if name.startswith(begin)), key=len, default="")
    if not family:
        return None
    if family != "--sglang-":
        return Flag(name, "any", "nothing", FAMILIES[family])
    return _of_sglang(name)


def _of_sglang(name: str) -> Flag:
    flag = name.removeprefix("--sglang-").replace("-", "_")
    if flag in ("tp_size", "tensor_parallel_size"):
        return Flag(name, "any", "nothing", "slime passes it over, too: --rollout-num-gpus-per-engine decides")
    if flag in _OF_SGLANG_KINDS:
        kind = "whole" if _OF_SGLANG_KINDS[flag] == "whole" else "switch"
        return Flag(name, kind, "mapped", "", (OURS[flag],))
    if flag == "enable_return_routed_experts":
        return Flag(name, "switch", "mapped", "", ("trainer.routing_replay",))
    if flag in OURS or flag in FIXED:
        return Flag(name, "any", "nothing", f"{OURS.get(flag, 'the engine worker')} decides it")
    return Flag(name, "texts", "mapped", FAMILIES["--sglang-"], (f"engine.sglang.flags.{flag}",))


def nearest(name: str) -> str:
    """The known flag whose name is most like it; empty: none is."""
    found = difflib.get_close_matches(name, [*FLAGS, *ALIASES], n=1, cutoff=0.75)
    return found[0] if found else ""
