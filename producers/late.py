"""Rewards that come by themselves: minutes or hours after their samples, or as corrections.

A reward service reads what waits (`unrewarded`), judges it, and publishes. By (task, rollout) and revision: the highest revision that is on
the stream before its group's batch closes counts, whatever the order in which they came; the reward that came with a sample is revision 0.
One that comes after its task has ended is written down in the ledger (`superseded_reward`) and never trained.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

import msgspec

from streamrl.bus.protocol import Bus, Receipt
from streamrl.errors import LogTruncated, SchemaError
from streamrl.producers.publishing import Publisher
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.samples import LogprobMode, RewardUpdate, Sample, is_agent
from streamrl.schemas.subjects import SAMPLES, Subjects, kind_of

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)


class LateRewards:
    """The reward service's side of a run.

    Args:
        bus: connected to the run.
        subjects: of the run.
    """

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._publisher = Publisher(bus, subjects)

    @classmethod
    def of(cls, worker: Worker) -> LateRewards:
        """With a worker's connection."""
        return cls(worker.bus, worker.subjects)

    async def publish(
        self,
        task: int,
        rollout: int,
        reward: float,
        *,
        revision: int = 1,
        sample: int | None = None,
        agent: str = "",
        parts: Mapping[str, float] | None = None,
    ) -> Receipt:
        """Store a reward; returns once it is on the stream. Waits while the stream is full.

        Args:
            task: task index.
            rollout: index within the group.
            reward: finite.
            revision: at least 1; a correction needs a higher one than every reward of this rollout before it. A repeat of a revision
                changes nothing, whatever its reward.
            sample: the sample of the rollout that was judged; it is kept with the reward, which all samples of the rollout share.
            agent: whose own reward it is, `Sample.agent` of what was judged; empty: it is the rollout's. Each has revisions of its own.
            parts: named parts, kept with the reward and never trained on by themselves.

        Raises:
            SchemaError: a value out of range.
            BusUnavailable: the bus stayed away; the reward may have been stored, and publishing it again is harmless.
        """
        value = RewardValue(float(reward), dict(parts or {}))
        if min(task, rollout, sample or 0) < 0 or revision < 1:
            raise SchemaError(
                f"a reward needs task, rollout and sample >= 0 and revision >= 1, got task {task}, rollout {rollout}, sample {sample}, "
                f"revision {revision}",
                hint="indices count from 0; the reward that came with a sample is revision 0",
            )
        if agent and not is_agent(agent):
            raise SchemaError(
                f"expected an agent of letters, digits and _.- with at most one slash, got {agent[:80]!r}",
                hint="give Sample.agent as it is",
            )
        update = RewardUpdate(
            task=task,
            rollout=rollout,
            reward=value.value,
            revision=revision,
            reward_parts=value.parts,
            sample=sample,
            agent=agent or msgspec.UNSET,
        )
        return await self._publisher.reward(update)

    async def unrewarded(self, *, after: int = 0) -> AsyncGenerator[tuple[int, Sample]]:
        """Samples without the reward that they are trained on, in stream order, waiting for new ones for ever.

        Each comes with the sequence of its message. Demonstrations need no reward and are left out, and so is what cannot be read. Samples
        that have been trimmed meanwhile are skipped: their tasks have ended. A service that begins again passes the last sequence that it
        is done with as `after`, or reads everything again: what it gives twice changes nothing.
        """
        while True:
            try:
                async for message in self._bus.read(SAMPLES, after=after):
                    after = message.sequence
                    if kind_of(message.subject) == "samples":
                        for sample in _waiting(message.body, message.sequence):
                            yield message.sequence, sample
            except LogTruncated as gap:
                first = (await self._bus.state(SAMPLES)).first
                logger.warning("event=samples_trimmed needed=%s first=%d", gap.needed, first)
                after = max(after, first - 1)


def _waiting(body: bytes, sequence: int) -> list[Sample]:
    try:
        samples = decode_samples(body, where=f"{SAMPLES} sequence {sequence}").rows()
    except SchemaError as error:
        logger.debug("event=unreadable sequence=%d error=%s", sequence, error.message)
        return []
    return [sample for sample in samples if sample.trained_reward is None and sample.logprob_mode is not LogprobMode.NONE]
