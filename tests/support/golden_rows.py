"""The samples whose bytes are kept here; see `tests/golden/generate.py`."""

import numpy as np
from msgspec.structs import replace

from streamrl.schemas.images import Image
from streamrl.schemas.samples import BlobRef, Branch, LogprobMode, Sample, Status, TurnSpan, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version


def samples() -> list[Sample]:
    """Make rows with every column that `samples/2` adds."""
    full, least = former_samples()
    full = replace(
        full,
        num_samples=1,
        claimed_s=11.5,
        scored_s=13.5,
        turns=(
            TurnSpan(
                start=2,
                length=2,
                inexact=True,
                finish_reason="stop",
                engine="engine-1",
                asked_s=12.5,
                began_s=12.625,
                finished_s=12.75,
                sampling={"temperature": 1.0, "min_p": 0.05, "stop": ["\n"]},
            ),
            TurnSpan(start=5, length=2),
        ),
        counters={"cached_tokens": 64.0, "spec_verify_ct": 3.0},
    )
    root = replace(least, num_samples=2, tokens=np.array([4, 9], np.int32), loss_mask=np.array([0, 0], np.uint8))
    root = replace(root, logprobs=np.array([0, 0], np.float32), spans=(VersionSpan(2, None),))
    return [full, root, replace(root, sample=1, branch=Branch(0, 1))]


def claimed_samples() -> list[Sample]:
    """The columns that were added to `samples/2` later: how the task was claimed, and when its first turn was begun."""
    full, *others = samples()
    return [replace(full, issued_s=10.5, deliveries=3, began_s=12.625), *others]


SAMPLING = Sampling(
    max_new_tokens=9,
    min_p=0.05,
    stop=("\n", "ü"),
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.25,
    logit_bias={7: 1.5, 5: -100.0},
    json_schema='{"type":"object"}',
)
"""Everything that was added to `Sampling` later and goes together."""


def sampled_samples() -> list[Sample]:
    """The column that was added to `samples/2` for later fields of `Sampling`, and a turn that was drawn otherwise than its sample."""
    full, *others = claimed_samples()
    first, second = full.turns
    own = {"json_schema": "", "regex": "[0-9]+", "logit_bias": {"6": 2.0}}
    turns = (replace(first, sampling=own), replace(second, inexact=True))
    return [replace(full, sampling=replace(SAMPLING, temperature=0.5), turns=turns), *others]


def agents_samples() -> list[Sample]:
    """The columns that were added to `samples/2` for agents with rewards of their own: one that has it, one whose reward is to come."""
    full, *others = sampled_samples()
    first, second = (replace(one, agent=agent) for one, agent in zip(others, ("solver/0", "selector"), strict=True))
    return [replace(full, agent="solver/0", agent_reward=0.0), replace(first, agent_reward=-0.5), second]


def graded_samples() -> list[Sample]:
    """The column that was added to `samples/2` for requests for a reward."""
    return [replace(sample, grading=(1 << 40) + number) for number, sample in enumerate(sampled_samples())]


def image_samples() -> list[Sample]:
    """The columns that were added to `samples/2` for what images hold: two of them in one sample, none in the others."""
    full, *others = graded_samples()
    rows = (Image("ab" * 32, "image/png", 67), Image("ef" * 32, "image/webp", 1 << 33))
    return [replace(full, images=BlobRef(f"0-63/{'cd' * 32}", "cd" * 32, 0, 2), image_rows=rows), *others]


def former_samples() -> list[Sample]:
    """A rollout with every column filled, sampled by two versions around a tool's answer, and one with as little as there can be."""
    full = Sample(
        run="golden",
        policy="policy",
        source="main",
        task=41,
        rollout=0,
        group_size=3,
        data_epoch=2,
        tokens=np.array([5, 6, 7, 8, 9, 10, 11], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.25, 0, -2.0, -0.125], np.float32),
        spans=(VersionSpan(2, None), VersionSpan(2, Version(0, 16)), VersionSpan(1, None), VersionSpan(2, Version(1, 17))),
        logprob_mode=LogprobMode.TEMPERATURE,
        reward=0.75,
        reward_parts={"answer": 1.0, "length": -0.25},
        status=Status.TRUNCATED,
        finish_reason="length",
        sampling=Sampling(max_new_tokens=9, temperature=0.5, top_p=0.75, top_k=20, stop_token_ids=(2, 3), ignore_eos=True),
        seed=(1 << 62) + 1,
        label={"answer": "42"},
        metadata={"level": 3, "tags": ["a", "ü"]},
        engine="engine-0",
        producer="producer-1",
        started_s=12.5,
        finished_s=13.25,
        routed_experts=BlobRef("experts/41", "ab" * 32, 3, 7),
        images=BlobRef("images/41", "cd" * 32),
    )
    least = Sample(
        run="golden",
        policy="policy",
        source="main",
        task=41,
        rollout=2,
        group_size=3,
        tokens=np.array([4], np.int32),
        loss_mask=np.array([0], np.uint8),
        logprobs=np.array([0], np.float32),
        spans=(VersionSpan(1, None),),
    )
    return [full, least]
