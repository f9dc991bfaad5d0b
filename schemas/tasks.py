"""Rollout tasks: what the feeder issues and producers claim."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.errors import SchemaError


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn; the names are SGLang's. The log-probs kept with a sample are those of this distribution."""

    max_new_tokens: int = 64
    """Longest completion."""
    temperature: float = 1.0
    """0 means greedy (evaluation only: a trained token needs a log-prob)."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together; 1: all."""
    top_k: int = -1
    """Draw from this many of the likeliest tokens; -1: all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's own end."""
    ignore_eos: bool = False
    """Do not end at the model's own end."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise SchemaError(f"sampling.max_new_tokens must be >= 1, got {self.max_new_tokens}", key="sampling.max_new_tokens")
        if not self.temperature >= 0:
            raise SchemaError(f"sampling.temperature must be >= 0, got {self.temperature}", key="sampling.temperature")
        if not 0 < self.top_p <= 1:
            raise SchemaError(f"sampling.top_p must be in (0, 1], got {self.top_p}", key="sampling.top_p")
        if self.top_k == 0 or self.top_k < -1:
            raise SchemaError(f"sampling.top_k must be -1 or >= 1, got {self.top_k}", key="sampling.top_k")


class RolloutTask(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset row to be rolled out `num_rollouts` times; a group is the rollouts of a task.

    The feeder leaves `index` out of the wire's meaning: it equals the message's sequence - 1 and is stored for readers of the
    body alone.

    Example:
        >>> task = RolloutTask(run="r", index=5, source="main", prompt_ids=(7, 8), label="15", num_rollouts=4, min_version=2)
        >>> task.num_rollouts, task.sampling.temperature
        (4, 1.0)
    """

    run: str
    index: int
    """Task index: position in the run's task stream, from 0."""
    source: str
    policy: str = "policy"
    row: int = 0
    """Row of the dataset (after slicing and filtering)."""
    data_epoch: int = 0
    """How many times the dataset had been gone through when this row came up."""
    prompt_ids: tuple[int, ...] = ()
    prompt: Any = None
    """Prompt as the dataset has it: a string, or a list of chat messages."""
    label: Any = None
    tools: Any = None
    metadata: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The row's own variables of the chat template, over those of the configuration; not on the wire when unset."""
    num_rollouts: int = 1
    sampling: Sampling = Sampling()
    min_version: int = 0
    """Lowest version number that may sample this task's first token; an engine holds the request back until it serves it."""
    seed: int = 0
    """Seed of the task; rollout k derives its own with `streamrl.core.seeds.rollout_seed`."""
