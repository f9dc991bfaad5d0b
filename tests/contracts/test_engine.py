"""One contract for every `Engine`: local in process, table behind HTTP and behind a channel, and in CI local behind both.

tests/sglang/test_contract.py runs the same tests on SGLang.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from streamrl.config.tree import EngineConfig
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.http import HttpEngine
from streamrl.engines.local.engine import LocalEngine
from streamrl.engines.protocol import Engine, GenerateRequest, HostedEngine
from streamrl.engines.server import serve
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import EngineError, WeightSyncError
from streamrl.schemas.samples import LogprobMode
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import Commit
from tests.support import models
from tests.support.errors import raises
from tests.support.models import Answer, ask
from tests.support.publishing import Published, load, publish

MAX_LEN = 1024
SLOTS = 8
EOS = 2
PROMPT = (5, 9, 11, 7)


class Site(msgspec.Struct):
    """An engine as a client sees it, its host, and where its versions come from."""

    engine: Engine
    host: HostedEngine
    kind: str
    seeded: bool = True
    """It draws by seed; where it does not, tests that compare tokens are greedy."""
    first_epoch: int = 0
    """A server that outlives a test has served the epochs before."""
    chunk_by_token: bool = True
    """It streams a chunk a token, however busy it is."""

    def at(self, number: int, epoch: int = 0) -> Version:
        return Version(self.first_epoch + epoch, number)

    @property
    def long(self) -> Sampling:
        return self.sampling(max_new_tokens=MAX_LEN - len(PROMPT))

    def sampling(self, **values) -> Sampling:
        """Ignores the end token; equal for equal seeds."""
        return Sampling(**{"ignore_eos": True, "temperature": 1.0 if self.seeded else 0.0} | values)

    def request(self, name: str = "r", **changes) -> GenerateRequest:
        values = {
            "sampling": self.sampling(max_new_tokens=20),
            "prompt_ids": PROMPT,
            "seeds": (1,),
            "min_epoch": self.first_epoch,
        } | changes
        return GenerateRequest(request_id=name, **values)

    def version(self, number: int, epoch: int = 0) -> Published:
        """Weights that differ by version."""
        if self.kind != "table":
            tensors = models.tensors(models.build("qwen3", seed=100 * epoch + number))
        else:
            rng = np.random.default_rng(100 * epoch + number)
            tensors = {"logits": rng.normal(size=(6, models.VOCABULARY, models.VOCABULARY)).astype(np.float32)}
        return publish(tensors, self.at(number, epoch))

    async def load(self, number: int, epoch: int = 0) -> Commit:
        return await load(self.host, self.version(number, epoch))

    async def until_idle(self) -> None:
        async with asyncio.timeout(30):
            while (info := await self.host.info()).running or info.waiting:
                await asyncio.sleep(0.005)


def make_host(kind: str, path: Path) -> BatchingEngine:
    config = EngineConfig(slots=SLOTS)
    if kind == "local":
        return LocalEngine(models.save_config("qwen3", path), config, engine_id="engine-0", policy="policy", max_len=MAX_LEN)
    (path / "table.json").write_text('{"vocab": 64, "max_position": 6, "eos": 2}')
    # Slow enough that a long request outlives whatever a test does meanwhile.
    delay = TokenDelay(mean_s=0.0005, sigma=0.0)
    return TableEngine(path, config, engine_id="engine-0", policy="policy", max_len=MAX_LEN, delay=delay)


IN_CI = [pytest.param(f"{way}-local", marks=pytest.mark.slow) for way in ("http", "channel")]
SITES = ["local", "http-table", "channel-table", *IN_CI]
"""Each engine and each way to it; both run on one loop over batches, so in process one of them is enough."""


@pytest.fixture(params=SITES)
async def bare(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """A site that serves no weights yet."""
    way, _, kind = request.param.rpartition("-")
    host = make_host(kind, tmp_path)
    await host.start()
    try:
        if not way:
            yield Site(host, host, kind)
        else:
            server = await serve(host)
            client = HttpEngine(server.address) if way == "http" else ChannelEngine(server.address)
            try:
                yield Site(client, host, kind)
            finally:
                await client.close()
                await server.stop()
    finally:
        await host.stop()


@pytest.fixture
async def site(bare: Site) -> Site:
    """A site that serves version 0.0."""
    assert (await bare.load(0)).committed
    return bare


async def test_a_completion_has_a_log_prob_and_a_version_for_every_token(site: Site):
    info = await site.engine.info()
    assert (info.engine, info.policy, info.serving) == ("engine-0", "policy", site.at(0))
    assert (info.slots, info.max_len, info.swaps_total, info.tokens_total) == (SLOTS, MAX_LEN, 1, 0)
    async for chunk in site.engine.generate(site.request()):
        assert chunk.engine == "engine-0"
        assert chunk.logprob_mode is LogprobMode.SAMPLED
    (answer,) = await ask(site.engine, site.request())
    assert len(answer.ids) == len(answer.logprobs) == 20
    assert answer.versions == [site.at(0)] * 20
    assert answer.reason == "length"
    assert answer.chunks == 1
    assert all(0 <= token < models.VOCABULARY for token in answer.ids)
    assert all(logprob <= 0 for logprob in answer.logprobs)


async def test_equal_seeds_give_equal_tokens_and_other_seeds_others(site: Site):
    answers = await ask(site.engine, site.request("a", seeds=(7, 8, 7, 9)))
    assert answers[0].ids == answers[2].ids
    assert len({tuple(answer.ids) for answer in answers}) == 3
    (again,) = await ask(site.engine, site.request("b", seeds=(8,)))
    assert again.ids == answers[1].ids
    np.testing.assert_allclose(again.logprobs, answers[1].logprobs, atol=1e-5)


async def test_more_completions_than_slots_all_end(site: Site):
    answers = await ask(site.engine, site.request(seeds=range(3 * SLOTS + 1)))
    assert [len(answer.ids) for answer in answers] == [20] * (3 * SLOTS + 1)
    info = await site.engine.info()
    assert info.tokens_total == 20 * (3 * SLOTS + 1)
    assert (info.running, info.waiting) == (0, 0)


async def test_a_shorter_completion_is_a_prefix_and_a_stop_token_is_part_of_it(site: Site):
    (free,) = await ask(site.engine, site.request("a"))
    (short,) = await ask(site.engine, site.request("short", sampling=site.sampling(max_new_tokens=5)))
    assert short.ids == free.ids[:5]
    stop = free.ids[6]
    sampling = site.sampling(max_new_tokens=20, stop_token_ids=(63, stop))
    (answer,) = await ask(site.engine, site.request("b", sampling=sampling))
    first = min(free.ids.index(token) for token in (63, stop) if token in free.ids)
    assert answer.ids == free.ids[: first + 1]
    assert answer.reason == "stop"


async def test_the_end_token_ends_a_completion_unless_it_is_ignored(site: Site):
    sampling = Sampling(max_new_tokens=200, temperature=3.0)
    answers = await ask(site.engine, site.request("a", seeds=range(8), sampling=sampling))
    stopped = [answer for answer in answers if answer.reason == "stop"]
    assert stopped, "200 nearly uniform draws from 64 tokens hold the end token"
    assert all(answer.ids[-1] == EOS and EOS not in answer.ids[:-1] for answer in stopped)
    ignoring = msgspec.structs.replace(sampling, ignore_eos=True)
    assert all(len(answer.ids) == 200 for answer in await ask(site.engine, site.request("b", seeds=range(8), sampling=ignoring)))


async def test_greedy_does_not_depend_on_the_seed(site: Site):
    answers = await ask(site.engine, site.request(seeds=(1, 2, 3), sampling=Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)))
    assert answers[0].ids == answers[1].ids == answers[2].ids
    assert all(logprob > -20 for logprob in answers[0].logprobs)


async def test_a_completion_ends_at_the_longest_length(site: Site):
    prompt = tuple(3 + k % 50 for k in range(MAX_LEN - 5))
    (answer,) = await ask(site.engine, site.request(prompt_ids=prompt))
    assert (len(answer.ids), answer.reason) == (5, "length")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_ids": ()}, "at least one prompt token"),
        ({"prompt_ids": (1,) * MAX_LEN}, f"at most {MAX_LEN - 1} tokens, got {MAX_LEN}"),
        ({"prompt_ids": (1, models.VOCABULARY)}, "got 64"),
        ({"prompt_ids": (1, -1)}, "got -1"),
        ({"policy": "other"}, "'other'"),
        ({"seeds": ()}, "one seed per completion"),
    ],
)
async def test_what_cannot_be_run_is_refused_with_a_hint(site: Site, changes, says):
    with pytest.raises(EngineError, match=says) as caught:
        await ask(site.engine, site.request(**changes))
    assert caught.value.hint
    assert len((await ask(site.engine, site.request("next")))[0].ids) == 20


async def test_a_running_request_id_is_refused(site: Site):
    running: Any = site.engine.generate(site.request(sampling=site.long, stream=True))
    await anext(running)
    with pytest.raises(EngineError, match="new request id"):
        await ask(site.engine, site.request())
    await running.aclose()


async def test_streaming_gives_the_same_tokens_in_more_chunks(site: Site):
    whole = await ask(site.engine, site.request("a", seeds=(4, 5)))
    streamed = await ask(site.engine, site.request("b", seeds=(4, 5), stream=True))
    for one, other in zip(whole, streamed, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.versions == other.versions
        assert (one.reason, one.chunks) == (other.reason, 1)
        assert other.chunks == 20 if site.chunk_by_token else 1 < other.chunks <= 20


async def test_requests_wait_for_the_first_weights(bare: Site):
    assert (await bare.engine.info()).serving is None
    waiting = asyncio.ensure_future(ask(bare.engine, bare.request()))
    await until_waiting(bare, 1)
    await bare.load(4)
    (answer,) = await waiting
    assert set(answer.versions) == {bare.at(4)}
    assert (await bare.engine.info()).serving == bare.at(4)


async def until_waiting(site: Site, count: int) -> None:
    async with asyncio.timeout(30):
        while (await site.host.info()).waiting != count:
            await asyncio.sleep(0.005)


async def test_a_request_waits_for_its_version_while_others_run(site: Site):
    later = asyncio.ensure_future(ask(site.engine, site.request("later", min_version=2, seeds=(1, 2))))
    await until_waiting(site, 2)
    await ask(site.engine, site.request("now"))
    await site.load(1)
    await ask(site.engine, site.request("now too", min_version=1))
    assert not later.done()
    await site.load(2)
    for answer in await later:
        assert set(answer.versions) == {site.at(2)}


async def test_a_request_that_waits_for_a_version_is_begun_by_any_of_a_later_epoch(site: Site):
    later = asyncio.ensure_future(ask(site.engine, site.request("later", min_version=9)))
    await until_waiting(site, 1)
    await site.load(3)
    assert not later.done()
    await site.load(2, epoch=1)
    (answer,) = await later
    assert set(answer.versions) == {site.at(2, epoch=1)}


async def test_a_swap_inside_a_running_request_gives_two_spans_and_no_restart(site: Site):
    answer = Answer()
    async for chunk in site.engine.generate(site.request(sampling=site.long, stream=True)):
        answer.add(chunk)
        if answer.chunks == 3:
            assert (await site.load(1)).committed
    assert answer.reason == "length"
    assert len(answer.ids) == MAX_LEN - len(PROMPT)
    first = answer.versions.count(site.at(0))
    assert 3 <= first < len(answer.ids)
    assert answer.versions == [site.at(0)] * first + [site.at(1)] * (len(answer.ids) - first)
    info = await site.engine.info()
    assert info.tokens_total == len(answer.ids), "a restart would have made tokens twice"
    assert info.swaps_total == 2


async def test_versions_never_go_back(site: Site):
    assert (await site.load(3)).committed
    assert not (await site.load(2)).committed
    assert not (await site.load(3)).committed
    assert (await site.engine.info()).serving == site.at(3)
    assert (await site.load(1, epoch=1)).committed
    before = await ask(site.engine, site.request("before"))
    assert not (await site.load(9)).committed
    assert (await site.engine.info()).serving == site.at(1, 1)
    after = await ask(site.engine, site.request("after"))
    assert after[0].ids == before[0].ids, "a refused version leaves the served bytes alone"
    assert set(after[0].versions) == {site.at(1, 1)}


async def test_a_version_must_be_staged_before_it_is_committed(site: Site):
    with raises(WeightSyncError, version=str(site.at(5)), staged=ANY):
        await site.host.commit(site.at(5))


async def test_abort_ends_every_completion_with_what_it_has(site: Site):
    answers = [Answer(), Answer()]
    async for chunk in site.engine.generate(site.request("cut", seeds=(1, 2), sampling=site.long, stream=True)):
        answers[chunk.completion].add(chunk)
        if all(answer.chunks >= 2 for answer in answers) and answers[0].reason is None:
            await site.engine.abort("cut")
    assert [answer.reason for answer in answers] == ["abort", "abort"]
    assert 2 <= len(answers[0].ids) < MAX_LEN - len(PROMPT)
    (again,) = await ask(site.engine, site.request("again", seeds=(1,), sampling=site.sampling(max_new_tokens=len(answers[0].ids))))
    assert again.ids == answers[0].ids
    await site.engine.abort("unknown")


async def test_one_completion_can_be_aborted(site: Site):
    answers = [Answer(), Answer()]
    async for chunk in site.engine.generate(site.request("pair", seeds=(1, 2), sampling=site.long, stream=True)):
        answers[chunk.completion].add(chunk)
        if chunk.completion == 1 and answers[1].chunks == 2:
            await site.engine.abort("pair.1")
    assert [answer.reason for answer in answers] == ["length", "abort"]
    assert len(answers[0].ids) == MAX_LEN - len(PROMPT)


@pytest.mark.parametrize("way", ["closed", "cancelled"])
async def test_who_stops_reading_frees_the_slots(site: Site, way: str):
    request = site.request("left", seeds=range(SLOTS), sampling=site.long, stream=way == "closed")
    if way == "closed":
        chunks: Any = site.engine.generate(request)
        await anext(chunks)
        await chunks.aclose()
    else:
        task = asyncio.ensure_future(ask(site.engine, request))
        async with asyncio.timeout(30):
            while not (await site.host.info()).running:
                await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await site.until_idle()
    assert (await site.host.info()).tokens_total < SLOTS * (MAX_LEN - len(PROMPT))


async def test_what_nobody_gets_is_counted_once(site: Site):
    before = (await site.host.info()).tokens_total - site.host.lost.tokens
    (whole,) = await ask(site.engine, site.request("whole"))
    task = asyncio.ensure_future(ask(site.engine, site.request("left", seeds=(1, 2), sampling=site.long)))
    async with asyncio.timeout(30):
        while (await site.host.info()).running < 2:
            await asyncio.sleep(0.001)
        # Until both have tokens. SGLang tells of a request that is not streamed at its end only, so there is nothing else to wait for.
        until_s = time.monotonic() + 1.0
        while (await site.host.info()).tokens_total - site.host.lost.tokens < before + len(whole.ids) + 20 and time.monotonic() < until_s:
            await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await site.until_idle()
        # The last tokens are handed back a moment after their rows are free.
        while (await site.host.info()).tokens_total - site.host.lost.tokens != before + len(whole.ids):
            await asyncio.sleep(0.005)
    assert sum(site.host.lost.take_lengths()) == 2
    assert site.host.lost.take_lengths() == ()


async def test_a_waiting_request_can_be_aborted_and_fails_where_the_engine_ends(site: Site):
    waiting = asyncio.ensure_future(ask(site.engine, site.request("later", min_version=5)))
    await until_waiting(site, 1)
    await site.engine.abort("later")
    (answer,) = await waiting
    assert (answer.ids, answer.reason) == ([], "abort")
    await site.until_idle()
    waiting = asyncio.ensure_future(ask(site.engine, site.request(min_version=5)))
    await until_waiting(site, 1)
    await site.host.stop()
    with pytest.raises(EngineError, match="stopped"):
        await waiting
    with pytest.raises(EngineError):
        await ask(site.engine, site.request("next"))
    with pytest.raises(EngineError):
        await site.engine.info()
