"""The samples that every transport carries, and the forms in which the others' programs hold them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from benchmarks.bus.plan import Cell
from streamrl.schemas.samples import Sample, VersionSpan
from streamrl.schemas.versions import Version

VOCABULARY = 151_936
NUM_PATTERNS = 3
"""Different messages of a shape; more would measure memory."""


def group(cell: Cell, pattern: int) -> list[Sample]:
    """The samples of one task: an eighth is prompt, the rest was sampled by two versions."""
    random = np.random.default_rng([cell.samples, cell.tokens, pattern])
    prompt = max(1, cell.tokens // 8)
    rest = cell.tokens - prompt
    spans = (VersionSpan(prompt, None), VersionSpan(rest - rest // 2, Version(0, 41)), VersionSpan(rest // 2, Version(0, 42)))
    samples: list[Sample] = []
    for rollout in range(cell.samples):
        mask = np.ones(cell.tokens, np.uint8)
        mask[:prompt] = 0
        logprobs = -random.exponential(1.0, cell.tokens).astype(np.float32)
        logprobs[:prompt] = 0
        sample = Sample(
            run="bench",
            policy="policy",
            source="main",
            task=pattern,
            rollout=rollout,
            group_size=cell.samples,
            tokens=random.integers(0, VOCABULARY, cell.tokens, dtype=np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            spans=tuple(span for span in spans if span.length),
            reward=float(rollout % 2),
            reward_parts={"exact": float(rollout % 2)},
            seed=1000 * pattern + rollout,
            label="45",
            metadata={"row": pattern},
            engine="engine-0",
            producer="producer-0",
            started_s=1_790_000_000.25,
            finished_s=1_790_000_007.5,
        )
        samples.append(sample)
    return samples


def with_task(samples: list[Sample], task: int) -> list[Sample]:
    """The same arrays as another task's samples."""
    return [msgspec.structs.replace(sample, task=task) for sample in samples]


def mapping(sample: Sample, *, arrays: bool = False) -> dict[str, Any]:
    """The same facts as names and values, without what is not said; numbers of tokens as lists, or as the arrays they are."""
    named = {name: value for name, value in msgspec.structs.asdict(sample).items() if name in Plain.__struct_fields__}
    for name in ("tokens", "loss_mask", "logprobs"):
        named[name] = named[name] if arrays else named[name].tolist()
    for name in ("logprob_mode", "status"):
        named[name] = str(named[name])
    named["sampling"] = msgspec.structs.asdict(sample.sampling)
    versions = ((span.length, span.version) for span in sample.spans)
    named["spans"] = [(length, -1, -1) if version is None else (length, version.epoch, version.number) for length, version in versions]
    return named


class Plain(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The same facts as a struct of lists, its names left out on the wire."""

    run: str
    policy: str
    source: str
    task: int
    rollout: int
    sample: int
    group_size: int
    num_samples: int
    data_epoch: int
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    logprob_mode: str
    reward: float | None
    reward_parts: dict[str, float]
    status: str
    finish_reason: str
    sampling: dict[str, Any]
    seed: int
    label: Any
    metadata: dict[str, Any]
    engine: str
    producer: str
    started_s: float
    finished_s: float
    routed_experts: Any = None
    images: Any = None


def plain(sample: Sample) -> Plain:
    """A sample as a struct of lists."""
    return Plain(**mapping(sample))
