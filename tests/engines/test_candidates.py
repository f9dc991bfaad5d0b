"""What engines record beside a token: by enumeration what it could have been, under the weights that drew it, over every way out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from streamrl.config.engines import EngineConfig
from streamrl.config.recording import Recording
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.batching.model import Draws
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.http import HttpEngine
from streamrl.engines.local import sampling as local_sampling
from streamrl.engines.local.engine import LocalEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.server import serve
from streamrl.engines.table import sampling
from streamrl.engines.table.engine import TableEngine
from streamrl.schemas.candidates import CandidateSets
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support import models
from tests.support.models import Answer, ask, started
from tests.support.publishing import load, publish

CUT = Sampling(temperature=0.8, top_p=0.7, max_new_tokens=12, ignore_eos=True)
BOTH = Recording(support=True, top=3)
VOCAB = 12


def rows_of(sets: CandidateSets) -> list[dict[int, float]]:
    values = np.zeros(len(sets.ids), np.float32) if sets.logprobs is None else sets.logprobs
    places = [slice(a, b) for a, b in zip(sets.bounds, sets.bounds[1:], strict=False)]
    return [dict(zip(sets.ids[place].tolist(), values[place].tolist(), strict=True)) for place in places]


def nucleus(logits: np.ndarray, temperature: float, top_p: float) -> dict[int, float]:
    """By its definition: the likeliest tokens until they have `top_p` together."""
    probs = np.exp(logits.astype(np.float64) / temperature)
    probs /= probs.sum()
    kept: list[int] = []
    for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token)):
        if probs[kept].sum() >= top_p:
            break
        kept.append(token)
    return {token: float(np.log(probs[token] / probs[kept].sum())) for token in sorted(kept)}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_row_records_by_how_it_was_drawn(kind: str) -> None:
    logits = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32) * 2
    how = Draws(
        uniform=np.array([0.1, 0.5, 0.9, 0.999999, 0.4]),
        temperature=np.array([0.7, 1.0, 1.3, 1.0, 0.0], np.float32),
        top_p=np.array([0.6, 1.0, 0.9, 1.0, 0.5], np.float32),
        top_k=np.full(5, -1),
        min_p=np.zeros(5, np.float32),
    )

    def drawn(recording: Recording) -> Any:
        return sampling.draw(logits, how, recording) if kind == "numpy" else local_sampling.draw(torch.from_numpy(logits), how, recording)

    nothing, both = drawn(Recording()), drawn(Recording(support=True, top=1))
    assert nothing.candidates is None
    assert (nothing.ids == both.ids).all() and (nothing.logprobs == both.logprobs).all(), "recording draws nothing else"
    found = rows_of(both.candidates)
    for row in (0, 2):
        assert found[row] == pytest.approx(nucleus(logits[row], float(how.temperature[row]), float(how.top_p[row])), abs=1e-5)
    for row in (1, 3):
        logp = logits[row].astype(np.float64) - np.log(np.exp(logits[row].astype(np.float64)).sum())
        wanted = {*np.argsort(-logp)[:1].tolist(), int(both.ids[row])}
        assert found[row] == pytest.approx({token: logp[token] for token in wanted}, abs=1e-5)
    assert len(found[3]) == 2, "a token that is none of the likeliest is there too"
    assert found[4] == {}, "a greedy token is no draw"
    assert [len(row) > 0 for row in rows_of(drawn(Recording(support=True)).candidates)] == [True, False, True, False, False]
    assert drawn(Recording(support=True)).candidates.logprobs is None
    assert [len(row) > 0 for row in rows_of(drawn(Recording(top=1)).candidates)] == [False, True, False, True, False]


@asynccontextmanager
async def table(path: Path, recording: Recording) -> AsyncIterator[TableEngine]:
    (path / "table.json").write_text(json.dumps({"vocab": VOCAB, "max_position": 4, "eos": 1}))
    engine = TableEngine(path, EngineConfig(slots=3), engine_id="t", policy="policy", max_len=64, recording=recording)
    async with started(engine, publish({"logits": tables(0)}, Version(0, 0))):
        yield engine


def tables(version: int) -> np.ndarray:
    return np.random.default_rng(version).normal(size=(4, VOCAB, VOCAB)).astype(np.float32) * 1.5


def check(answer: Answer, prompt: tuple[int, ...], sampling: Sampling) -> None:
    """Each token's candidates are the nucleus of the version that the engine says of it."""
    found = rows_of(answer.extras["candidates"].sets())
    before = prompt[-1]
    assert len(found) == len(answer.ids)
    for place, (token, logprob, version) in enumerate(zip(answer.ids, answer.logprobs, answer.versions, strict=True)):
        expected = nucleus(tables(version.number)[min(place, 3), before], sampling.temperature, sampling.top_p)
        assert found[place] == pytest.approx(expected, abs=1e-5)
        assert found[place][token] == pytest.approx(logprob, abs=1e-6)
        before = token


@pytest.mark.parametrize("way", ["direct", "http", "channel"])
@pytest.mark.parametrize("stream", [False, True])
async def test_they_come_through_every_door(tmp_path: Path, way: str, stream: bool) -> None:
    async with table(tmp_path, BOTH) as engine:
        asked = GenerateRequest(request_id="r", prompt_ids=(3, 5), sampling=CUT, seeds=(1, 2, 3, 4, 5), stream=stream)
        if way == "direct":
            answers = await ask(engine, asked)
        else:
            server = await serve(engine, "127.0.0.1", 0)
            client = HttpEngine(server.address) if way == "http" else ChannelEngine(server.address)
            try:
                answers = await ask(client, asked)
            finally:
                await client.close()
                await server.stop()
        for answer in answers:
            check(answer, (3, 5), CUT)


async def test_of_a_response_over_two_versions_each_token_has_those_of_its_own(tmp_path: Path) -> None:
    async with table(tmp_path, BOTH) as engine:
        long = replace(CUT, max_new_tokens=60)
        asking = asyncio.create_task(
            ask(engine, GenerateRequest(request_id="r", prompt_ids=(3, 5), sampling=long, seeds=(1,), stream=True))
        )
        while (await engine.info()).tokens_total < 5:
            await asyncio.sleep(0)
        await load(engine, publish({"logits": tables(1)}, Version(0, 1)))
        [answer] = await asking
    check(answer, (3, 5), long)


async def test_an_engine_that_is_not_asked_says_nothing(tmp_path: Path) -> None:
    async with table(tmp_path, Recording(support=True)) as engine:
        whole = replace(CUT, top_p=1.0)
        [answer] = await ask(engine, GenerateRequest(request_id="r", prompt_ids=(3,), sampling=whole))
        assert "candidates" not in answer.extras, "the whole vocabulary is no part of it"


async def test_a_completion_of_too_many_stops_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.engines.batching.rows.MOST_RECORDED", 20)
    async with table(tmp_path, Recording(support=True)) as engine:
        [answer] = await ask(engine, GenerateRequest(request_id="r", prompt_ids=(3,), sampling=CUT))
    counts = answer.extras["candidates"].sets().counts
    assert len(counts) == 12 and 0 < counts.sum() <= 20 and counts[-1] == 0 and counts[0] > 0


@pytest.mark.parametrize("deterministic", [True, False])
async def test_the_local_engine_records_its_models_nucleus(tmp_path: Path, deterministic: bool) -> None:
    model = models.build("qwen3", 0)
    config = EngineConfig(slots=3, deterministic=deterministic)
    engine: BatchingEngine = LocalEngine(
        models.save_config("qwen3", tmp_path), config, engine_id="l", policy="policy", max_len=64, device="cpu", recording=BOTH
    )
    async with started(engine, publish(models.tensors(model), Version(0, 0))):
        asked = [
            GenerateRequest(request_id=str(n), prompt_ids=(7, 3 + n), sampling=replace(CUT, max_new_tokens=4 + 5 * n), seeds=(n, n + 9))
            for n in range(3)
        ]
        answers = [
            (one, answer)
            for one, found in zip(asked, await asyncio.gather(*(ask(engine, one) for one in asked)), strict=True)
            for answer in found
        ]
    for request, answer in answers:
        ids = [*request.prompt_ids, *answer.ids]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
        found = rows_of(answer.extras["candidates"].sets())
        for place, (token, logprob) in enumerate(zip(answer.ids, answer.logprobs, strict=True)):
            expected = nucleus(logits[len(request.prompt_ids) - 1 + place], 0.8, 0.7)
            assert found[place] == pytest.approx(expected, abs=1e-4)
            assert found[place][token] == pytest.approx(logprob, abs=1e-6)
