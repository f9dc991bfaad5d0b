"""Weights without the plugin: chosen loudly, exact where nothing was committed meanwhile, marked where something was."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from streamrl.config.engines import EngineConfig
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.sglang.engine import SglangEngine
from streamrl.engines.sglang.server import SglangServer
from streamrl.errors import EngineError, WeightSyncError
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.sglang.cpu import MAX_LEN, cpu_config
from tests.support import models
from tests.support.errors import raises
from tests.support.models import ask, build, teacher_forced
from tests.support.publishing import load, publish

PROMPT = (5, 9, 11, 7)
LONG = GenerateRequest(request_id="long", prompt_ids=PROMPT, seeds=(1,), sampling=Sampling(max_new_tokens=400, ignore_eos=True))


def engine_of(server: SglangServer, config: EngineConfig) -> SglangEngine:
    return SglangEngine(config, server.model_dir, server, engine_id="engine-0", policy="policy", max_len=MAX_LEN, owned=False)


@pytest_asyncio.fixture
async def paused(sglang_server: SglangServer, sglang_python: str) -> AsyncIterator[SglangEngine]:
    engine = engine_of(sglang_server, cpu_config(sglang_python, swap="pause"))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def test_updates_in_a_pause_are_exact_or_marked(paused: SglangEngine, epochs: Iterator[int]):
    epoch = next(epochs)
    policies = {Version(epoch, number): build("qwen3", seed=number) for number in (1, 2)}
    old, new = policies
    assert paused.detail["swap"] == "pause" and "degraded" not in paused.detail
    assert (await load(paused, publish(models.tensors(policies[old]), old))).committed
    (whole,) = await ask(paused, msgspec.structs.replace(LONG, request_id="whole", sampling=Sampling(max_new_tokens=20, ignore_eos=True)))
    expected = teacher_forced(policies[old], PROMPT, whole.ids)
    assert set(whole.versions) == {old} and max(abs(a - b) for a, b in zip(whole.logprobs, expected, strict=True)) < 1e-5

    chunks: list[Chunk] = []
    async for chunk in paused.generate(msgspec.structs.replace(LONG, stream=True)):
        chunks.append(chunk)
        if len(chunks) == 3:
            assert (await load(paused, publish(models.tensors(policies[new]), new))).committed
    assert sum(len(chunk.token_ids) for chunk in chunks) == 400 and chunks[-1].finish_reason == "length", "nothing is aborted"
    assert chunks[-1].extras["inexact_versions"] is True
    assert {span.version for chunk in chunks for span in chunk.spans} <= {old, new}
    info = await paused.info()
    assert (info.serving, info.swaps_total) == (new, 2)
    assert info.counters["engine/inexact_completions_total"] == 1
    (after,) = await ask(paused, msgspec.structs.replace(LONG, request_id="after", sampling=Sampling(max_new_tokens=20, ignore_eos=True)))
    expected = teacher_forced(policies[new], PROMPT, after.ids)
    assert set(after.versions) == {new} and max(abs(a - b) for a, b in zip(after.logprobs, expected, strict=True)) < 1e-5
    assert not (await load(paused, publish(models.tensors(policies[old]), old))).committed


async def test_changed_bytes_are_refused_before_anything_stops(paused: SglangEngine, epochs: Iterator[int]):
    published = publish(models.tensors(build("qwen3", seed=1)), Version(next(epochs), 1))
    data = bytearray(published.data)
    data[100] ^= 1
    with raises(WeightSyncError, expected=published.manifest.digest):
        await load(paused, msgspec.structs.replace(published, data=bytes(data)))
    with raises(WeightSyncError, version=str(published.manifest.version), staged=None):
        await paused.commit(published.manifest.version)


async def test_a_missing_plugin_is_a_loud_pause_or_an_error(
    sglang_server: SglangServer, sglang_python: str, caplog: pytest.LogCaptureFixture
):
    # The server has one rank: that of a second one does not answer.
    two: dict[str, Any] = {"tensor_parallel": 2}
    engine = engine_of(sglang_server, cpu_config(sglang_python, **two))
    with caplog.at_level(logging.WARNING):
        await engine.start()
    assert engine.detail["swap"] == "pause" and "rank" in engine.detail["why"]
    assert engine.detail["why"] in engine.detail["degraded"]
    assert any("event=sglang_pauses" in record.getMessage() for record in caplog.records)
    await engine.stop()
    refusing = engine_of(sglang_server, cpu_config(sglang_python, swap="flip", **two))
    with raises(EngineError, swap="flip") as caught:
        await refusing.start()
    assert "swap = auto" in caught.value.hint
    await refusing.stop()
