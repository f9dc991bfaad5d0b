"""Warm-up: a task's label becomes a sample without any engine: prompt, label, end token; the loss is on the label and the end."""

from __future__ import annotations

import time

import numpy as np

from streamrl.errors import SchemaError
from streamrl.producers.protocol import Tokenizer
from streamrl.schemas.samples import LogprobMode, Sample, VersionSpan
from streamrl.schemas.tasks import RolloutTask


def demonstration(task: RolloutTask, tokenizer: Tokenizer, *, end_token: int, max_len: int, producer: str) -> Sample:
    """The sample of a warm-up task; its log-probs are 0 and no version sampled it.

    Args:
        task: one rollout, with a label.
        tokenizer: encodes the label.
        end_token: the token with which the model ends its turn.
        max_len: longest sequence in tokens.
        producer: name kept with the sample.

    Raises:
        SchemaError: no label, no prompt, or a sequence beyond `max_len`.
    """
    if task.label is None or not str(task.label):
        hint = "correct data.label_key, or set warmup.max_steps = 0"
        raise SchemaError(f"a demonstration needs a label, row {task.row} has none", hint=hint)
    if not task.prompt_ids:
        raise SchemaError(f"a demonstration needs a prompt, row {task.row} has no tokens")
    answer = [*tokenizer.encode(str(task.label)), end_token]
    prompt_length, length = len(task.prompt_ids), len(task.prompt_ids) + len(answer)
    if length > max_len:
        raise SchemaError(f"a demonstration of row {task.row} has {length} tokens, at most {max_len} fit", hint="raise model.max_len")
    mask = np.zeros(length, np.uint8)
    mask[prompt_length:] = 1
    now_s = time.time()
    return Sample(
        run=task.run,
        policy=task.policy,
        source=task.source,
        task=task.index,
        rollout=0,
        group_size=1,
        data_epoch=task.data_epoch,
        tokens=np.array([*task.prompt_ids, *answer], np.int32),
        loss_mask=mask,
        logprobs=np.zeros(length, np.float32),
        spans=(VersionSpan(length, None),),
        logprob_mode=LogprobMode.NONE,
        sampling=task.sampling,
        seed=task.seed,
        label=task.label,
        metadata=task.metadata,
        producer=producer,
        started_s=now_s,
        finished_s=now_s,
    )
