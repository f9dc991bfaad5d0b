"""Build what a producer is called with: a task, its context over an engine, a chat, and the runner of a group."""

from __future__ import annotations

import logging
from typing import Any

from streamrl.core.seeds import rollout_seed
from streamrl.data.tokenizer import Tokenizer
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.functions import FunctionProducer
from streamrl.producers.groups import GroupRunner
from streamrl.producers.protocol import Context
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.rewards.built_in import ExactMatch
from streamrl.schemas.tasks import RolloutTask, Sampling

PROMPT = "<|user|>3+4<|end|><|assistant|>"


def task_of(tokenizer: Tokenizer, *, prompt: str = PROMPT, max_new_tokens: int = 8, **fields: Any) -> RolloutTask:
    """Make task 0 of a run: a rollout of `3+4`."""
    given = {"num_rollouts": 1, "prompt": "3+4", "label": "7", "seed": 11, "sampling": Sampling(max_new_tokens=max_new_tokens), **fields}
    return RolloutTask(run="run", index=0, source="main", prompt_ids=tuple(tokenizer.encode(prompt)), **given)


def context_of(engine: Any, tokenizer: Tokenizer, task: RolloutTask, *, max_len: int = 256, **fields: Any) -> Context:
    """Make the context of a task's first rollout."""
    seed, log = rollout_seed(task.seed, 0), logging.getLogger("test")
    return Context(engine=engine, tokenizer=tokenizer, task=task, seed=seed, log=log, max_len=max_len, **fields)


def engine_of(context: Context) -> RolloutEngine:
    """Make what user code chats with."""
    return RolloutEngine(context, ChatFormat(context.tokenizer, chat_template=context.chat_template))


def runner_of(engine: Any, tokenizer: Tokenizer, producer: Any, reward: Any = None, **more: Any) -> GroupRunner:
    """Make the runner of a producer, or of a function, whose episodes are scored by `exact_match` or `reward`."""
    return GroupRunner(
        producer=producer if hasattr(producer, "rollout") else FunctionProducer(producer),
        reward=reward or ExactMatch(),
        engine=engine,
        tokenizer=tokenizer,
        options={},
        max_len=128,
        chat_template=True,
        **more,
    )
