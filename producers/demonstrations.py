"""Demonstrations: a task's own answer becomes a sample without any engine, in a warm-up and in runs of kind `sft`.

A label that is a text makes a sample of prompt, label and end token, and the loss is on the label and the end. One that is the rest of a
conversation makes a sample of the whole conversation, as the chat template renders it, and the loss is on the assistant's turns
(`streamrl.data.conversations`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.data.conversations import encode_conversation, is_answer
from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import SchemaError
from streamrl.schemas.samples import LogprobMode, Sample, VersionSpan
from streamrl.schemas.tasks import RolloutTask


def demonstration(
    task: RolloutTask,
    tokenizer: Tokenizer,
    *,
    end_token: int,
    max_len: int,
    producer: str,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Sample:
    """The sample of a task with an answer of its own; its log-probs are 0 and no version sampled it.

    Args:
        task: one rollout, with a label.
        tokenizer: encodes the label.
        end_token: the token with which the model ends its turn.
        max_len: longest sequence in tokens.
        producer: name kept with the sample.
        template_kwargs: variables of the chat template; the task's own go before them.

    Raises:
        SchemaError: no label, no prompt, a sequence beyond `max_len`, or a conversation that cannot be trained on.
        ConfigError: the chat template refuses the conversation.
    """
    rest = is_answer(task.label)
    if rest:
        given = {**(template_kwargs or {}), **({} if task.chat_template_kwargs is msgspec.UNSET else task.chat_template_kwargs)}
        messages = [*task.prompt, *task.label]
        ids, mask = encode_conversation(tokenizer, messages, tools=task.tools, template_kwargs=given)
        tokens, trained = np.array(ids, np.int32), np.array(mask, np.uint8)
    else:
        tokens, trained = _answered(task, tokenizer, end_token)
    length = len(tokens)
    if length > max_len:
        raise SchemaError(f"a demonstration of row {task.row} has {length} tokens, at most {max_len} fit", hint="raise model.max_len")
    now_s = time.time()
    return Sample(
        run=task.run,
        policy=task.policy,
        source=task.source,
        task=task.index,
        rollout=0,
        group_size=1,
        data_epoch=task.data_epoch,
        tokens=tokens,
        loss_mask=trained,
        logprobs=np.zeros(length, np.float32),
        spans=(VersionSpan(length, None),),
        logprob_mode=LogprobMode.NONE,
        sampling=task.sampling,
        seed=task.seed,
        label=None if rest else task.label,
        metadata=task.metadata,
        images=None if isinstance(task.image_blob, msgspec.UnsetType) else task.image_blob,
        image_rows=task.images,
        producer=producer,
        started_s=now_s,
        finished_s=now_s,
    )


def _answered(task: RolloutTask, tokenizer: Tokenizer, end_token: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Token ids [T] and loss mask [T] of the prompt and the label behind it."""
    if task.label is None or not str(task.label):
        raise SchemaError(
            f"a demonstration needs a label, row {task.row} has none", hint="correct data.label_key, or set warmup.max_steps = 0"
        )
    if not task.prompt_ids:
        raise SchemaError(f"a demonstration needs a prompt, row {task.row} has no tokens")
    answer = [*tokenizer.encode(str(task.label)), end_token]
    mask = np.ones(len(task.prompt_ids) + len(answer), np.uint8)
    mask[: len(task.prompt_ids)] = 0
    return np.array([*task.prompt_ids, *answer], np.int32), mask
