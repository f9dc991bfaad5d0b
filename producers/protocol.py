"""The producer seam: a task in, the episodes of all its rollouts out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from streamrl.core.seeds import rollout_seed
from streamrl.engines.protocol import Engine
from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode
from streamrl.schemas.tasks import RolloutTask, Sampling


class Tokenizer(Protocol):
    """The part of `streamrl.data.tokenizer` that producers use."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, control tokens in it included, except those in the contents of a rendered one.

        Nothing is added unless asked for (such as a leading bos).
        """
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def chat_template(self) -> str:
        """The source of its templates (Jinja), or empty."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as text for `encode`, as `streamrl.data.tokenizer.Tokenizer` renders them."""
        ...


class Claim(msgspec.Struct, frozen=True):
    """How a task came to be worked on; times in Unix seconds, for people and metrics only."""

    deliveries: int = 1
    """Of its task until now, this one included."""
    issued_s: float = 0.0
    claimed_s: float = 0.0

    @property
    def told(self) -> dict[str, Any]:
        """The same as fields of a `Sample`."""
        again = self.deliveries if self.deliveries > 1 else 0
        return {"issued_s": self.issued_s, "claimed_s": self.claimed_s, "deliveries": again}


class Failure(msgspec.Struct, frozen=True):
    """A rollout that gives no sample; it ends as a tombstone."""

    rollout: int
    reason: str = "failed"
    """`failed`, `filtered`, `timeout`, or a producer's own word."""
    detail: str = ""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer has besides its task."""

    engine: Engine
    tokenizer: Tokenizer
    task: RolloutTask
    seed: int
    """The rollout's seed, or the task's for a producer of whole groups."""
    options: Mapping[str, Any] = {}
    """`producer.options` of the configuration."""
    rollout_index: int = 0
    log: logging.Logger | logging.LoggerAdapter[Any]
    max_len: int = 0
    """Longest sequence in tokens, prompt included; 0: not known."""
    chat_template: bool = True
    """Whether prompts are chat messages; otherwise text is appended as it is."""
    template_kwargs: Mapping[str, Any] = {}
    """Variables of the chat template: `data.chat_template_kwargs`."""
    tool_calls: str = "auto"
    """`data.tool_calls`."""
    resumes: Mapping[int, bytes] = {}
    """By rollout: what an earlier producer of this task stored with `checkpoint` before it died."""
    store: Callable[[int, bytes], Awaitable[None]] | None = None
    """Stores a rollout's checkpoint; None where there is nothing to come back to (evaluation)."""
    images: Callable[[int], Awaitable[bytes]] | None = None
    """Reads an image of the task's row by its place; None where it has none."""

    @property
    def resume(self) -> bytes | None:
        """The newest checkpoint of this rollout from an earlier delivery of the task, or None."""
        return self.resumes.get(self.rollout_index)

    async def checkpoint(self, data: bytes) -> None:
        """Store `data`, in place of what was stored before: the rollout's `resume` if this producer dies.

        Kept until the task ends. Best effort: while the bus is away, or too much is stored already, it is left out and logged.

        Raises:
            SchemaError: more than 1 MiB with the turns so far (`streamrl.producers.checkpoints.MAX_BYTES`).
        """
        if self.store is not None:
            await self.store(self.rollout_index, data)

    async def image(self, place: int = 0) -> bytes:
        """An image of the task's row, as the row has it; `task.images` says of which type and size.

        Raises:
            SchemaError: the row has no image there.
            NotFound: it is gone; so is the rollout's sample then, whatever it does.
            EngineError: it cannot be read now; the rollout is begun again.
        """
        count = len(self.task.images)
        if type(place) is not int or not 0 <= place < count or self.images is None:
            raise SchemaError(f"expected the place of one of {count} images of task {self.task.index}, from 0 on, got {place!r}")
        return await self.images(place)

    @property
    def is_baseline(self) -> bool:
        """Whether this is the greedy rollout of its task (`RolloutTask.baseline`)."""
        return self.rollout_index == self.task.baseline

    def drawn(self, sampling: Sampling) -> Sampling:
        """How this rollout draws where its code asks for `sampling`: the baseline greedily, whatever temperature that has."""
        return msgspec.structs.replace(sampling, temperature=0.0) if self.is_baseline else sampling

    def for_rollout(self, rollout: int) -> Context:
        """The same for one rollout of the group."""
        seed = rollout_seed(self.task.seed, rollout)
        return msgspec.structs.replace(self, rollout_index=rollout, seed=seed, task=self.task.for_rollout(rollout))


class Producer(Protocol):
    """Rolls tasks out. Adapters: `single_turn`, and any async function (`streamrl.producers.functions`)."""

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """All episodes of all `task.num_rollouts` rollouts; each rollout has at least one episode or one Failure.

        Raises EngineError when an engine went away (the call is repeated); anything else that is raised ends the
        whole task as failed. May be cancelled at any await.
        """
        ...
