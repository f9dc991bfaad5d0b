"""Engines and trainers compute the same distribution: the log-probs that one records are those that the other finds, token by token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config.registry import Role
from streamrl.config.tree import Config, EngineConfig, LossConfig, ModelConfig, TrainerConfig
from streamrl.core.batches import LogitBiases, TrainBatch
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.local.engine import LocalEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import TrainingError
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.table.trainer import TableTrainer
from tests.support import models
from tests.support.errors import raises
from tests.support.models import Answer, ask
from tests.support.publishing import load, publish
from tests.support.scoring import score

PROMPT = (5, 9, 11)
WAYS = [
    Sampling(temperature=0.7, min_p=0.1),
    Sampling(logit_bias={7: 3.0, 9: -100.0, 20: 1.5}),
    Sampling(temperature=1.3, top_k=9, top_p=0.8, min_p=0.05, logit_bias={7: -2.0}),
]


def both(kind: str, directory: Path) -> tuple[BatchingEngine, Any, Trainer]:
    """An engine, what it is to serve, and a trainer of the same numbers."""
    if kind == "table":
        logits = (2 * np.random.default_rng(1).normal(size=(6, models.VOCABULARY, models.VOCABULARY))).astype(np.float32)
        (directory / "table.json").write_text(json.dumps({"vocab": models.VOCABULARY, "max_position": 6, "eos": 2}))
        np.save(directory / "logits.npy", logits)
        trainer = TableTrainer(directory, trainer=TrainerConfig(), loss=LossConfig(), learning_rate=lambda _: 0.1)
        return TableEngine(directory, EngineConfig(), engine_id="e", policy="policy"), {"logits": logits}, trainer
    model = models.build("qwen3", seed=1)
    model.save_pretrained(directory)
    trainer = make_trainer(Config(model=ModelConfig(dtype="float32"), trainer=TrainerConfig(device="cpu")), directory)
    return LocalEngine(directory, EngineConfig(), engine_id="e", policy="policy", max_len=64), models.tensors(model), trainer


def batch_of(answers: Sequence[Answer], ways: Sequence[Sampling]) -> TrainBatch:
    return TrainBatch.from_lists(
        [PROMPT] * len(answers),
        [answer.ids for answer in answers],
        sampler_logprobs=[answer.logprobs for answer in answers],
        rewards=[float(index % 2) for index in range(len(answers))],
        temperature=[way.temperature for way in ways],
        top_p=[way.top_p for way in ways],
        top_k=[way.top_k for way in ways],
        min_p=[way.min_p for way in ways],
        logit_bias=[way.logit_bias for way in ways],
    )


@pytest.mark.parametrize("kind", ["table", "local"])
async def test_what_an_engine_draws_from_is_what_a_trainer_computes(kind: str, tmp_path: Path) -> None:
    engine, tensors, trainer = both(kind, tmp_path)
    await engine.start()
    try:
        await load(engine, publish(tensors, Version(0, 0)))
        answers, ways = [], []
        for index, way in enumerate(WAYS):
            request = GenerateRequest(request_id=str(index), prompt_ids=PROMPT, sampling=way, seeds=tuple(range(6)))
            answers += await ask(engine, request)
            ways += [way] * 6
    finally:
        await engine.stop()
    batch = batch_of(answers, ways)
    found = score(trainer, batch, Role.POLICY)
    assert found[batch.loss_mask] == pytest.approx(batch.sampler_logprobs[batch.loss_mask], abs=3e-5)
    assert not any(9 in answer.ids for answer in answers[6:12])
    # Without what they were drawn with the numbers are others: the test can fail.
    plain = score(trainer, batch_of(answers, [Sampling()] * len(answers)), Role.POLICY)
    assert np.abs(plain - batch.sampler_logprobs)[batch.loss_mask].max() > 0.5


@pytest.mark.parametrize("kind", ["table", "local"])
async def test_a_token_outside_the_trainers_own_support_has_a_finite_log_prob(kind: str, tmp_path: Path) -> None:
    """Under newer weights a token may have fallen below min-p; it stays in, beside what is kept, and takes nobody's place."""
    _, _, trainer = both(kind, tmp_path)
    answers = [Answer() for _ in range(models.VOCABULARY)]
    for token, answer in enumerate(answers):
        answer.ids, answer.logprobs = [token], [-1.0]
    whole = score(trainer, batch_of(answers, [Sampling()] * len(answers)), Role.POLICY)[len(PROMPT) :: len(PROMPT) + 1]
    found = score(trainer, batch_of(answers, [Sampling(min_p=0.2)] * len(answers)), Role.POLICY)[len(PROMPT) :: len(PROMPT) + 1]
    p = np.exp(whole.astype(np.float64))
    kept = p >= 0.2 * p.max()
    assert 1 < kept.sum() < len(p)
    expected = np.log(p / np.where(kept, p[kept].sum(), p[kept].sum() + p))
    assert found == pytest.approx(expected, abs=1e-4)


def test_values_of_samples_where_those_of_tokens_belong_are_refused() -> None:
    batch = batch_of([Answer()], [Sampling()])
    with raises(TrainingError, field="top_p"):
        msgspec.structs.replace(batch, top_p=np.ones(1, np.float32))
    with raises(TrainingError, field="logit_bias"):
        TrainBatch.from_lists([PROMPT] * 2, [[1], [2]], logit_bias=[{}])
    assert LogitBiases.from_tables(np.full(3, -1, np.int32), [{3: 1.0}]) is None
