"""Both trainers by what was drawn and recorded: scores are those of engines, and of transformers in float64; a step goes by them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from streamrl.config.loss import CorrectionConfig
from streamrl.config.registry import Role
from streamrl.config.tree import Config, EngineConfig, LossConfig, ModelConfig, TrainerConfig
from streamrl.core.batches import LogitBiases, TrainBatch
from streamrl.core.candidates import restricted_tokens
from streamrl.core.packing import plan_micro_batches
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.local.engine import LocalEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import TrainingError
from streamrl.schemas.candidates import CandidateSets, bounds_of
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.table.trainer import TableTrainer
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.kernels import Kernels
from tests.support import models
from tests.support.errors import raises
from tests.support.meshes import slow, soak
from tests.support.models import Answer, ask, started
from tests.support.publishing import publish
from tests.support.scoring import score
from tests.support.steps import check_alike
from tests.support.trainers import Rollouts, config, make

VOCAB = 16
CPU = torch.device("cpu")
Floats = npt.NDArray[np.float64]


def with_candidates(batch: TrainBatch, seed: int = 0, *, unknown: bool = True) -> TrainBatch:
    """Random sets of 2 to 6 tokens beside each trained one's own; every other sample is under top-p, each fifth token says nothing."""
    generator = np.random.default_rng(seed)
    top_p = np.where(np.repeat(np.arange(batch.num_samples) % 2 == 0, batch.lengths), np.float32(0.8), np.float32(1))
    rows: list[dict[int, float]] = []
    for place, (token, trained) in enumerate(zip(batch.tokens.tolist(), batch.loss_mask.tolist(), strict=True)):
        others = generator.choice(VOCAB, generator.integers(2, 7), replace=False).tolist()
        probs = generator.dirichlet(np.ones(len({token, *others}) + (top_p[place] == 1)))
        row = dict(zip(sorted({token, *others}), np.log(probs).tolist(), strict=False))
        rows.append(row if trained and not (unknown and place % 5 == 0) else {})
    pairs = [pair for row in rows for pair in row.items()]
    sets = CandidateSets(
        bounds_of(np.array([len(row) for row in rows])),
        np.array([key for key, _ in pairs], np.int32),
        np.array([value for _, value in pairs], np.float32),
    )
    own = [row.get(token, 0.0) for row, token in zip(rows, batch.tokens.tolist(), strict=True)]
    mu = np.where(sets.counts > 0, np.array(own, np.float32), batch.sampler_logprobs)
    return replace(batch, top_p=top_p, candidates=sets, sampler_logprobs=mu)


def rows_of(batch: TrainBatch) -> list[dict[int, float]]:
    sets = batch.candidates
    assert sets is not None and sets.logprobs is not None
    pairs = list(zip(sets.ids.tolist(), sets.logprobs.tolist(), strict=True))
    return [dict(pairs[a:b]) for a, b in zip(sets.bounds, sets.bounds[1:], strict=False)]


def nucleus(probs: Floats, top_p: float, own: int) -> list[int]:
    order = np.argsort(-probs, kind="stable").tolist()
    kept = [token for place, token in enumerate(order) if probs[order[:place]].sum() < top_p]
    return sorted({*kept, own})


def distributions(logits_of: Callable[[int], Floats], batch: TrainBatch) -> dict[int, dict[int, float]]:
    """Of each trained token the log-probs of all tokens that are possible there, from its logits."""
    found: dict[int, dict[int, float]] = {}
    said, restricted = rows_of(batch), restricted_tokens(batch)
    for place in np.flatnonzero(batch.loss_mask).tolist():
        z = logits_of(place) / float(batch.temperature[place])
        probs = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        kept = list(range(VOCAB))
        if restricted[place]:
            kept = list(said[place]) or nucleus(probs, float(batch.top_p[place]), int(batch.tokens[place]))
        found[place] = {token: float(np.log(probs[token] / probs[kept].sum())) for token in kept}
    return found


def apart(pi: dict[int, float], mu: dict[int, float], own: int, logmu: float, kind: str) -> float:
    """D by its definition, over the known tokens and all others as one; of a token of which nothing is known over two outcomes."""
    known = mu or {own: logmu}
    p, q = ([np.exp(of[token]) for token in known] for of in (pi, known))
    p, q = np.array([*p, max(0.0, 1 - sum(p))]), np.array([*q, max(0.0, 1 - sum(q))])
    if kind == "topk_tv":
        return float(np.abs(p - q).sum() / 2)
    inside = q > 1e-5
    return float((q[inside] * np.log(q[inside] / np.maximum(p[inside], 1e-300))).sum())


@pytest.fixture
def logits(model_dir: Path) -> Callable[[TrainBatch], Callable[[int], Floats]]:
    """Of transformers in float64, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()

    def of(batch: TrainBatch) -> Callable[[int], Floats]:
        found = np.zeros((batch.num_tokens, VOCAB))
        for first, last in zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False):
            ids = torch.from_numpy(batch.tokens[first:last].astype(np.int64))
            with torch.no_grad():
                found[first + 1 : last] = model(input_ids=ids[None]).logits[0, :-1].numpy()
        return lambda place: found[place]

    return of


@pytest.mark.parametrize("layout", ["shared", "rows", "packed", "callable head"])
@pytest.mark.parametrize("kind", ["topk_tv", "topk_kl"])
def test_every_layout_gives_the_log_probs_and_divergences_of_whole_distributions(
    model_dir: Path, rollouts: Rollouts, logits: Any, layout: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = with_candidates(rollouts())
    policy = CausalLM(model_dir, torch.float32, CPU, kernels=Kernels(attention="packed" if layout == "packed" else "sdpa"))
    if layout == "callable head":
        monkeypatch.setattr(CausalLM, "_linear", None)
    shared, row = layout != "rows", 20 if layout == "packed" else 0
    plans = plan_micro_batches(batch, batch.loss_mask, np.arange(batch.num_samples), budget=30, share_prefixes=shared, row_length=row)
    assert len(plans) > 1
    logprobs, far = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
    for plan in plans:
        found = policy.predict(plan, batch, divergence=kind)
        assert found[0].requires_grad and not found[2].requires_grad
        logprobs[plan.target], far[plan.target] = (one.detach().numpy() for one in (found[0], found[2]))
        assert len(policy.predict(plan, batch)) == 2
    said = rows_of(batch)
    for place, pi in distributions(logits(batch), batch).items():
        own = int(batch.tokens[place])
        assert logprobs[place] == pytest.approx(pi[own], abs=2e-5)
        assert far[place] == pytest.approx(apart(pi, said[place], own, float(batch.sampler_logprobs[place]), kind), abs=1e-4)


def test_the_table_trainer_normalises_over_the_same(table_dir: Path, rollouts: Rollouts) -> None:
    """A table of zeros: a token is as likely as its candidates are few."""
    batch = with_candidates(rollouts())
    result = make(table_dir, backend="table", support_replay=True).step(batch)
    assert result.tokens is not None
    for place, pi in distributions(lambda place: np.zeros(VOCAB), batch).items():
        assert result.tokens.logprobs[place] == pytest.approx(pi[int(batch.tokens[place])], abs=1e-12)
    cut = restricted_tokens(batch) & batch.loss_mask
    known = np.array([bool(row) for row in rows_of(batch)])
    assert 0 < result.metrics["train/support_replayed"] == known[cut].mean() < 1
    assert "train/likeliest_known" not in result.metrics


def test_policy_and_proximal_are_scored_alike(model_dir: Path, rollouts: Rollouts, logits: Any) -> None:
    batch = with_candidates(rollouts())
    trainer = make(model_dir, device="cpu", support_replay=True)
    expected = {place: pi[int(batch.tokens[place])] for place, pi in distributions(logits(batch), batch).items()}
    for role in (Role.POLICY, Role.PROXIMAL):
        found = score(trainer, batch, role)
        assert max(abs(found[place] - value) for place, value in expected.items()) < 2e-5


DPPO = LossConfig(policy="dppo", dppo_bound=0.3, dppo_symmetric=True, correction=CorrectionConfig(kind="none"))


@pytest.mark.parametrize("kind", ["topk_tv", "topk_kl"])
def test_a_step_leaves_out_whom_the_divergence_says(model_dir: Path, rollouts: Rollouts, logits: Any, kind: Any) -> None:
    batch = with_candidates(rollouts(), seed=4)
    result = make(model_dir, replace(DPPO, dppo_divergence=kind), device="cpu", support_replay=True).step(batch)
    said, far = rows_of(batch), []
    for place, pi in distributions(logits(batch), batch).items():
        far.append(apart(pi, said[place], int(batch.tokens[place]), float(batch.sampler_logprobs[place]), kind) > 0.3)
    assert 0.1 < np.mean(far) < 0.9, "a bound that tells tokens apart"
    sample = np.repeat(np.arange(batch.num_samples), batch.lengths)[batch.loss_mask]
    weights = 1 / np.bincount(sample, minlength=batch.num_samples)[sample] / batch.num_samples  # the mean over rollouts of token means
    assert result.metrics["train/pg_clipfrac"] == pytest.approx(float(np.array(far) @ weights), abs=1e-6)
    assert 0 < result.metrics["train/likeliest_known"] < 1


def test_a_loss_over_candidates_wants_their_log_probs(model_dir: Path, rollouts: Rollouts) -> None:
    batch = with_candidates(rollouts())
    assert batch.candidates is not None
    batch = replace(batch, candidates=replace(batch.candidates, logprobs=None))
    policy = CausalLM(model_dir, torch.float32, CPU)
    [plan] = plan_micro_batches(batch, batch.loss_mask, np.arange(batch.num_samples), budget=10_000)
    with raises(TrainingError, field="candidates"):
        policy.predict(plan, batch, divergence="topk_tv")


def test_a_batch_knows_the_candidates_of_its_tokens() -> None:
    batch = TrainBatch.from_lists([[5, 6]], [[7, 8]], candidates=[[{7: -0.5, 3: -0.9}, {}]])
    assert batch.candidates is not None
    assert (batch.candidates.bounds.tolist(), batch.candidates.ids.tolist()) == ([0, 0, 0, 2, 2], [3, 7])
    with raises(TrainingError, field="candidates"):
        TrainBatch.from_lists([[5, 6]], [[7, 8]], candidates=[[{3: -0.9}, {}]])
    with raises(TrainingError, field="candidates"):
        replace(batch, candidates=batch.candidates.at(np.arange(3)))


OTHERS = [
    slow({"backend": "megatron"}, id="megatron"),
    soak({"backend": "torch", "ranks": 2, "micro_tokens": 30}, id="two ranks"),
    slow({"backend": "torch", "ranks": 2, "context": 2, "attention": "packed"}, id="ranks that share rows"),
]


@pytest.mark.process
@pytest.mark.parametrize("other", OTHERS)
def test_other_backends_and_meshes_take_the_same_step(model_dir: Path, rollouts: Rollouts, other: dict[str, Any]) -> None:
    batch, found = with_candidates(rollouts(), seed=4), []
    for options in (dict[str, Any](backend="torch"), other):
        asked = config(replace(DPPO, dppo_divergence="topk_tv"), device="cpu", support_replay=True, rank_timeout_s=120.0, **options)
        with open_trainer(asked, model_dir) as made:
            found.append(made.step(batch))
    ours, theirs = found
    assert ours.tokens is not None and theirs.tokens is not None
    assert abs(ours.tokens.logprobs - theirs.tokens.logprobs).max() < 2e-5
    names = ("pg_clipfrac", "grad_norm", "loss", "support_replayed", "likeliest_known")
    check_alike([theirs], [ours], *(f"train/{name}" for name in names), rel=1e-4)


ASKED = (5, 9, 11)
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
        [ASKED] * len(answers),
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
    async with started(engine, publish(tensors, Version(0, 0))):
        answers, ways = [], []
        for index, way in enumerate(WAYS):
            request = GenerateRequest(request_id=str(index), prompt_ids=ASKED, sampling=way, seeds=tuple(range(6)))
            answers += await ask(engine, request)
            ways += [way] * 6
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
    whole = score(trainer, batch_of(answers, [Sampling()] * len(answers)), Role.POLICY)[len(ASKED) :: len(ASKED) + 1]
    found = score(trainer, batch_of(answers, [Sampling(min_p=0.2)] * len(answers)), Role.POLICY)[len(ASKED) :: len(ASKED) + 1]
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
        TrainBatch.from_lists([ASKED] * 2, [[1], [2]], logit_bias=[{}])
    assert LogitBiases.from_tables(np.full(3, -1, np.int32), [{3: 1.0}]) is None
