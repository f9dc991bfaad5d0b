"""Sets of SGLang's flags that a sweep compares, as changes of those that a run has. Pure functions; no server here.

A set may change speed alone: tokens are drawn from the same distribution, with log-probs of it. What is missing here for a reason:

- `enable_mixed_chunk`: SGLang mixes prefill and decode only where no request of either asks for log-probs, and all of ours do;
- `stream_interval`: concerns streamed answers, and groups are asked for whole;
- `num_continuous_decode_steps`: taken by SGLang's command line and read by nothing else (0.5.23);
- `skip_tokenizer_init`: set already, unless the run has a grammar backend;
- speculative decoding, quantised weights or caches: other log-probs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.raw import Round
from streamrl.config.tree import Config

CONFIGURED, COMBINED = "as configured", "all that helped"
"""The set that others are compared with, and the one that is made of those that were faster."""
SWEEP = "flags, "
"""A cell of the sweep begins with this."""
_SMALLEST_GAIN = 1.03
"""A set that is faster by less is taken for noise."""


class FlagSet(msgspec.Struct, frozen=True):
    """Changes of a run's flags."""

    changes: Mapping[str, Any]
    """Values by name of the flag; None leaves it to SGLang."""
    why: str
    """A few words on how it may help."""


FLAG_SETS: Mapping[str, FlagSet] = MappingProxyType(
    {
        CONFIGURED: FlagSet({}, "what the others are compared with"),
        "defaults": FlagSet(
            dict.fromkeys(
                (
                    "attention_backend",
                    "sampling_backend",
                    "disable_prefill_cuda_graph",
                    "cuda_graph_max_bs_decode",
                    "cuda_graph_bs_decode",
                )
            ),
            "SGLang's own choice of backends and graphs, which starts slowly",
        ),
        "fa3": FlagSet({"attention_backend": "fa3"}, "faster attention on Hopper"),
        "flashinfer": FlagSet({"attention_backend": "flashinfer", "sampling_backend": "flashinfer"}, "faster attention and sampling"),
        "prefill-graphs": FlagSet({"disable_prefill_cuda_graph": None}, "prompts are computed without a launch for each kernel"),
        "decode-graphs": FlagSet({"cuda_graph_bs_decode": None}, "graphs at more sizes: less padding"),
        "no-prefix-cache": FlagSet({"disable_radix_cache": True}, "less bookkeeping for a request; short prompts are computed again"),
        "prefill-interval": FlagSet(
            {"prefill_decode_interval": 8, "prefill_decode_interval_min_bs": 64}, "free slots are filled in larger batches"
        ),
        "prefill-delayer": FlagSet(
            {"enable_prefill_delayer": True, "prefill_delayer_queue_min_ratio": 0.1, "prefill_delayer_max_delay_ms": 30},
            "free slots are filled in larger batches",
        ),
        "free-slots": FlagSet({"min_free_slots_delay": 64}, "free slots are filled in batches of 64, not one by one"),
        "receive-interval": FlagSet({"scheduler_recv_interval": 4}, "the scheduler looks for requests less often"),
        "conservativeness": FlagSet({"schedule_conservativeness": 0.3}, "more requests at once where keys and values are short of memory"),
        "no-overlap": FlagSet({"disable_overlap_schedule": True}, "less bookkeeping where a forward pass is shorter than it"),
    }
)
LONE_SETS = (CONFIGURED, "defaults", "no-prefix-cache", "fa3", "receive-interval", "free-slots", "decode-graphs")
"""Sets of flags that a sweep compares by default. Its last start combines those that helped."""


def flags_with(flags: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run's flags with the changes of a set."""
    written = {name.lstrip("-").replace("-", "_"): value for name, value in flags.items()}
    return {name: value for name, value in (written | dict(changes)).items() if value is not None}


def config_with(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration of a run with the changes of a set."""
    sglang = replace(config.engine.sglang, flags=flags_with(config.engine.sglang.flags, changes))
    return replace(config, engine=replace(config.engine, sglang=sglang))


def unknown_flags(changes: Mapping[str, Any], known: str) -> list[str]:
    """Flags of a set that stand nowhere in the text of SGLang's own arguments."""
    return [name for name, value in changes.items() if value is not None and name not in known]


class Speed(msgspec.Struct, frozen=True):
    """Tokens a second that a set gave, by tokens of an answer."""

    name: str
    tokens_per_s: Mapping[int, float]


def speeds_of(found: Sequence[Round]) -> list[Speed]:
    """Speeds by set of flags, of the sweep's rounds."""
    speeds: dict[str, dict[int, float]] = {}
    for one in found:
        if one.cell.startswith(SWEEP):
            tokens = int(one.cell.removeprefix(SWEEP).split()[0])
            speeds.setdefault(one.contender, {})[tokens] = one.values["tokens"] / one.values["seconds"]
    return [Speed(name, values) for name, values in speeds.items()]


def gain(speed: Speed, base: Speed) -> float:
    """The speed of a set over that of `base`: the geometric mean over the lengths that both have; 0 if there is none."""
    product, count = 1.0, 0
    for tokens, value in speed.tokens_per_s.items():
        if base.tokens_per_s.get(tokens, 0.0) > 0:
            product, count = product * value / base.tokens_per_s[tokens], count + 1
    return product ** (1 / count) if count else 0.0


def best_of(speeds: Sequence[Speed]) -> str:
    """The fastest set; `CONFIGURED` unless one is faster by more than noise."""
    base = next((speed for speed in speeds if speed.name == CONFIGURED), None)
    if base is None:
        return CONFIGURED
    best = max(speeds, key=lambda speed: gain(speed, base))
    return best.name if gain(best, base) >= _SMALLEST_GAIN else CONFIGURED


def combined(speeds: Sequence[Speed]) -> dict[str, Any]:
    """The changes of all sets that were faster than `CONFIGURED`, the fastest one's last; empty where fewer than two were."""
    base = next((speed for speed in speeds if speed.name == CONFIGURED), None)
    if base is None:
        return {}
    speeds = [speed for speed in speeds if speed.name in FLAG_SETS]
    rising = sorted(speeds, key=lambda speed: gain(speed, base))
    helped = [speed.name for speed in rising if gain(speed, base) >= _SMALLEST_GAIN]
    changes: dict[str, Any] = {}
    for name in helped if len(helped) > 1 else ():
        changes |= FLAG_SETS[name].changes
    return changes


def toml_lines(flags: Mapping[str, Any]) -> str:
    """The section of a run's file that sets these flags."""
    return "\n".join(["[engine.sglang.flags]", *(f"{name} = {_toml(value)}" for name, value in flags.items())])


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(name))} = {_toml(one)}" for name, one in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return json.dumps(value)  # texts, numbers, true and false are written alike in both
