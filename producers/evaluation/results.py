"""From the records of a set to what people are told: the detail of the event `evaluation`, and of `streamrl eval`.

A failed sample (an engine that stayed away, a reward that raised or took too long) is neither right nor wrong: means are over the samples
that were answered, of each problem first and then over the problems that have one, and the failed are counted beside. pass@k and maj@k are
over the problems of which at least k samples were answered; their number stands beside each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from streamrl.config.evaluation_sets import ProblemSet
from streamrl.core.pass_rates import Estimate, estimates, majority_at, majority_ks, pass_at, powers
from streamrl.data.problems import Problem
from streamrl.producers.evaluation.store import ProblemRecord, SampleRecord
from streamrl.schemas.samples import Status
from streamrl.schemas.versions import Version

NUM_SHOWN = 8
"""Problems whose answers go with the event."""


def summarize(
    one: ProblemSet,
    problems: Sequence[Problem],
    records: Mapping[int, ProblemRecord],
    *,
    number: int,
    pinned: bool,
    took_s: float,
    resumed: int,
) -> dict[str, Any]:
    """The detail of a set's event, but for `final`; JSON only.

    Args:
        one: the set.
        problems: those that were asked.
        records: one of each problem, by row.
        number: the version that was to be evaluated.
        pinned: whether the engines that answered were to hold that version.
        took_s: seconds that asking took, in this process.
        resumed: problems that an earlier process had asked.
    """
    ordered = [records[problem.row] for problem in problems]
    samples = [sample for record in ordered for sample in record.samples]
    answered = [sample for sample in samples if sample.reward is not None]
    right = sum(sample.reward >= one.pass_reward for sample in answered if sample.reward is not None)
    truncated = [sample for sample in answered if sample.status == Status.TRUNCATED]
    truncated_right = sum(sample.reward >= one.pass_reward for sample in truncated if sample.reward is not None)
    versions = sorted({Version.parse(version) for sample in samples for version in sample.versions}) or [Version(0, number)]
    version = Version(versions[0].epoch, number)
    mean, passes, majorities = _rates(one, ordered)
    return {
        "set": one.name,
        "version": str(version),
        "versions": [str(versions[0]), str(versions[-1])],
        "pinned": pinned and versions[0] == versions[-1] == version,
        "accuracy": None if mean is None else mean.value,
        "interval": None if mean is None else [mean.low, mean.high],
        "num": len(problems),
        "n": one.n,
        "samples": len(samples),
        "answered": len(answered),
        "failed": len(samples) - len(answered),
        "right": right,
        "truncated": len(truncated),
        "wrong": len(answered) - right - (len(truncated) - truncated_right),
        "pass": {str(k): msgspec.to_builtins(found) for k, found in passes.items()},
        "majority": {str(k): msgspec.to_builtins(found) for k, found in majorities.items()},
        "tokens": _tokens(samples),
        "took_s": round(took_s, 3),
        "resumed": resumed,
        "reasons": _reasons(samples),
        "problems": [_shown(problem, record) for problem, record in list(zip(problems, ordered, strict=True))[:NUM_SHOWN]],
    }


def _rates(one: ProblemSet, ordered: Sequence[ProblemRecord]) -> tuple[Estimate | None, dict[int, Estimate], dict[int, Estimate]]:
    """The mean reward, pass@k and maj@k by k."""
    given = [[sample for sample in record.samples if sample.reward is not None] for record in ordered]
    counts = [len(samples) for samples in given]
    correct = [sum((sample.reward or 0.0) >= one.pass_reward for sample in samples) for samples in given]
    ks, voted = powers(one.n), majority_ks(one.n)
    columns = [[_mean(sample.reward or 0.0 for sample in samples) for samples in given]]
    columns += [pass_at(counts, correct, k).tolist() for k in ks]
    majorities = [majority_at([s.answer for s in samples], [s.reward or 0.0 for s in samples], voted) for samples in given]
    columns += [list(of_k) for of_k in zip(*majorities, strict=True)] if majorities else [[] for _ in voted]
    mean, *others = estimates(np.array(columns, np.float64).T)
    passes = {k: found for k, found in zip(ks, others, strict=False) if found is not None}
    return mean, passes, {k: found for k, found in zip(voted, others[len(ks) :], strict=True) if found is not None}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


def _tokens(samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Sampled tokens of the samples that gave some; each quantile is the length of one of them."""
    lengths = np.array([sample.tokens for sample in samples if sample.tokens], np.float64)
    if not lengths.size:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0, "sum": 0.0}
    p50, p95 = np.quantile(lengths, [0.5, 0.95], method="inverted_cdf")
    return {"mean": float(lengths.mean()), "p50": float(p50), "p95": float(p95), "sum": float(lengths.sum())}


def _reasons(samples: Sequence[SampleRecord]) -> dict[str, int]:
    """How many samples have failed by the reason, with the words of the first of each."""
    found: dict[str, int] = {}
    for sample in samples:
        if sample.reward is None:
            words = f"{sample.status}: {sample.detail}" if sample.detail else sample.status
            found[words] = found.get(words, 0) + 1
    return dict(sorted(found.items(), key=lambda pair: -pair[1])[:NUM_SHOWN])


def _shown(problem: Problem, record: ProblemRecord) -> dict[str, Any]:
    """The first sample of a problem; its reward is None where it has failed."""
    first = record.samples[0]
    return {"prompt": shown_prompt(problem.prompt), "expected": problem.label, "got": first.text, "reward": first.reward}


def shown_prompt(prompt: Any) -> str:
    """A prompt as text: the string, or the last message's content."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content", ""))
    return str(prompt)
