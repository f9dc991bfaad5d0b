"""The samplers against closed forms: numpy is the definition, torch must agree with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from streamrl.config.recording import NOTHING
from streamrl.engines.batching.edits import Edit, Editor
from streamrl.engines.batching.model import Draws
from streamrl.engines.local import sampling as local_sampling
from streamrl.engines.table import sampling
from streamrl.schemas.tasks import Sampling

SAMPLERS = ["numpy", "torch"]


def draws(u, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, edits=None) -> Draws:
    n = len(u)
    return Draws(
        uniform=np.asarray(u, np.float64),
        temperature=np.full(n, temperature, np.float32),
        top_p=np.full(n, top_p, np.float32),
        top_k=np.full(n, top_k, np.int64),
        min_p=np.full(n, min_p, np.float32),
        edits=edits or {},
    )


def draw(kind: str, logits: np.ndarray, how: Draws):
    if kind == "numpy":
        return sampling.draw(logits, how, NOTHING)[:2]
    return local_sampling.draw(torch.from_numpy(logits), how, NOTHING)[:2]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


LOGITS = np.array([0.3, -1.0, 2.0, 2.0, 0.0, -8.0, 1.2], np.float32)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_every_token_gets_exactly_its_share_of_the_unit_interval(kind, temperature):
    n = 4000
    u = (np.arange(n) + 0.5) / n
    ids, logprobs = draw(kind, np.tile(LOGITS, (n, 1)), draws(u, temperature))
    expected = softmax(LOGITS.astype(np.float64) / temperature)
    counts = np.bincount(ids, minlength=len(LOGITS))
    assert np.abs(counts - n * expected).max() <= 1.0
    assert (np.diff(ids) >= 0).all(), "tokens follow the cumulative distribution in order of ids"
    np.testing.assert_allclose(logprobs, np.log(expected)[ids], atol=2e-6)


def penalized(vocab: int, **penalties) -> Editor:
    """An editor whose completion has had some tokens of the vocabulary, some of them several times."""
    editor = Editor(Sampling(**penalties), None, None)
    for token in (1, 3, 1, vocab - 1, 1):
        assert not editor.take(token)
    return editor


def only(edit: Edit, vocab: int, allowed: list[int]) -> Edit:
    return replace(edit, allowed=np.isin(np.arange(vocab), allowed))


def edited_by_definition(logits: np.ndarray, drawn: list[int], sampling: Sampling, allowed=None) -> np.ndarray:
    """A loop over tokens: OpenAI's penalties, Hugging Face's, the grammar, the bias."""
    z = logits.astype(np.float64)
    for token in set(drawn):
        z[token] -= sampling.presence_penalty + sampling.frequency_penalty * drawn.count(token)
        z[token] = z[token] * sampling.repetition_penalty if z[token] < 0 else z[token] / sampling.repetition_penalty
    for token in range(len(z)):
        if allowed is not None and token not in allowed:
            z[token] = -np.inf
        z[token] += sampling.logit_bias.get(token, 0.0)
    return z


PENALTIES = [
    *({"presence_penalty": 1.5}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.5}),
    *({"repetition_penalty": 0.5}, {"logit_bias": {0: 2.0, 6: -100.0}}),
    {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.25, "logit_bias": {1: 1.0, 5: 3.0}},
]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("allowed", [None, [1, 3, 5]])
def test_penalties_grammar_and_bias_change_logits_before_the_temperature(kind, allowed):
    n = 1000
    u = (np.arange(n) + 0.5) / n
    logits = np.tile(LOGITS, (n, 1))
    for asked in PENALTIES:
        edit = penalized(len(LOGITS), **asked).edit()
        edit = edit if allowed is None else only(edit, len(LOGITS), allowed)
        ids, logprobs = draw(kind, logits, draws(u, 0.5, edits=dict.fromkeys(range(n), edit)))
        expected = softmax(edited_by_definition(LOGITS, [1, 3, 1, 6, 1], Sampling(**asked), allowed) / 0.5)
        assert np.abs(np.bincount(ids, minlength=len(LOGITS)) - n * expected).max() <= 1.0, asked
        np.testing.assert_allclose(logprobs, np.log(expected[ids]), atol=4e-6)
        assert (logits == LOGITS).all(), "the model's own logits are left as they are"


def kept_by_definition(p: np.ndarray, top_p: float, top_k: int) -> set[int]:
    """Straight from the sentence in `streamrl.engines.table.sampling`."""
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept: set[int] = set()
    before = 0.0
    for rank, token in enumerate(order):
        if rank == 0 or ((top_k < 0 or rank < top_k) and (top_p >= 1 or before < top_p)):
            kept.add(token)
        before += p[token]
    return kept


CUTS = [
    *((0.5, -1, 0.0), (0.9, -1, 0.0), (1.0, 1, 0.0), (1.0, 2, 0.0), (1.0, 3, 0.0), (0.6, 2, 0.0), (0.95, 3, 0.0), (1e-6, -1, 0.0)),
    *((1.0, 100, 0.0), (1.0, -1, 0.05), (1.0, -1, 0.4), (1.0, -1, 1.0), (1.0, 2, 0.3), (1.0, -1, 1e-9)),
]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_top_p_top_k_and_min_p_draw_from_the_renormalised_kept_set(kind):
    n = 4000
    u = (np.arange(n) + 0.5) / n
    p = softmax(LOGITS.astype(np.float64))
    for top_p, top_k, min_p in CUTS:
        ids, logprobs = draw(kind, np.tile(LOGITS, (n, 1)), draws(u, 1.0, top_p, top_k, min_p))
        kept = sorted(kept_by_definition(p, top_p, top_k) & set(np.flatnonzero(p >= np.float32(min_p) * p.max()).tolist()))
        expected = np.zeros_like(p)
        expected[kept] = p[kept] / p[kept].sum()
        assert set(ids.tolist()) <= set(kept), (top_p, top_k, min_p)
        assert np.abs(np.bincount(ids, minlength=len(p)) - n * expected).max() <= 1.0, (top_p, top_k, min_p)
        np.testing.assert_allclose(logprobs, np.log(expected[ids]), atol=2e-6)


def test_torch_draws_what_numpy_draws():
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(500, 104)) * 4).astype(np.float32)
    biased = Editor(Sampling(logit_bias={3: 5.0, 100: -100.0}), None, None).edit()
    edits = [biased, penalized(104, repetition_penalty=1.3, frequency_penalty=0.5).edit(), only(biased, 104, [5, 6, 80])]
    how = Draws(
        uniform=rng.random(500),
        temperature=rng.choice([0.0, 0.6, 1.0, 1.3], 500).astype(np.float32),
        top_p=rng.choice([1.0, 0.9, 0.4], 500).astype(np.float32),
        top_k=rng.choice([-1, 1, 7, 40], 500),
        min_p=rng.choice([0, 0.05, 0.5], 500).astype(np.float32),
        edits={row: edits[row % 3] for row in range(0, 500, 2)},
    )
    ids, logprobs = draw("numpy", logits, how)
    other_ids, other_logprobs = draw("torch", logits, how)
    assert (ids == other_ids).all()
    np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_greedy_takes_the_most_probable_token_with_its_log_prob_under_temperature_1(kind):
    ids, logprobs = draw(kind, LOGITS[None], draws([0.99], temperature=0.0, top_p=0.1, top_k=1))
    assert ids.tolist() == [2]
    np.testing.assert_allclose(logprobs, np.log(softmax(LOGITS))[2], atol=1e-6)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_logits_that_are_not_finite_give_nan_in_their_row_only(kind):
    logits = np.stack([LOGITS, LOGITS, LOGITS])
    logits[1, 3] = np.nan
    with np.errstate(invalid="ignore"):
        _, logprobs = draw(kind, logits, draws([0.5, 0.5, 0.5]))
    assert np.isnan(logprobs).tolist() == [False, True, False]
