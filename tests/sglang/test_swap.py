"""Weights that change while the real SGLang decodes: nothing stops, every token's version is exact, no forward pass mixes two."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch

from streamrl.engines.live_swap.messages import Pace
from streamrl.engines.sglang.prefixes import prefix_key
from streamrl.engines.sglang.server import SglangServer
from tests.sglang.cpu import SLOTS
from tests.sglang.updates import Answer, Updates, ask, ask_many, replay
from tests.support import models

EXACT = 1e-5
"""Log-probs of float32 models; two implementations differ by about 1e-6."""


@pytest.fixture(scope="module")
def one():
    return models.build("qwen3", 1)


@pytest.fixture(scope="module")
def other():
    return models.build("qwen3", 2)


@pytest_asyncio.fixture
async def updates(sglang_server: SglangServer, epochs: Iterator[int], tmp_path: Path) -> AsyncIterator[Updates]:
    updates = Updates(sglang_server, tmp_path, epoch=next(epochs))
    try:
        yield updates
    finally:
        await updates.host.close()


def changes(answer: Answer) -> list[int]:
    """Tokens whose version is not that of the one before."""
    return [t for t in range(1, len(answer.stamps)) if answer.stamps[t] != answer.stamps[t - 1]]


async def under_way(server: SglangServer, updates: Updates, weights, *, streams: int = 8, tokens: int = 200, pause_s: float = 0.15):
    """Answers of streams that decode while the weights are put, one version after the other."""
    tasks = await ask_many(server, streams, tokens)
    for model in weights:
        await asyncio.sleep(pause_s)
        await updates.put(model)
    return await asyncio.gather(*tasks)


async def test_streams_decode_through_commits_and_replay_by_their_stamps(sglang_server, updates, one, other):
    await updates.put(one)
    answers = await under_way(sglang_server, updates, [other, one, other])
    assert all(answer.meta.get("num_retractions", 0) == 0 for answer in answers)
    assert all(list(answer.stamps) == sorted(answer.stamps) for answer in answers)
    crossed = [answer for answer in answers if changes(answer)]
    assert len(crossed) >= 4, "the machine was too slow or too fast for a commit to fall into the answers"
    for answer in answers:
        assert float(replay(updates.models, answer, answer.stamps).max()) < EXACT
    # The control: the same replay notices a flip that is one token late, or one early.
    answer = crossed[0]
    at = changes(answer)[0]
    late, early = list(answer.stamps), list(answer.stamps)
    late[at] = answer.stamps[at - 1]
    early[at - 1] = answer.stamps[at]
    assert float(replay(updates.models, answer, late).max()) > 1000 * EXACT
    assert float(replay(updates.models, answer, early).max()) > 1000 * EXACT


async def test_no_forward_pass_mixes_versions(sglang_server, updates, one, other):
    await updates.put(one)
    answers = await under_way(sglang_server, updates, [other, one] * 8, tokens=300, pause_s=0.05)
    assert sum(len(changes(answer)) for answer in answers) >= 8
    for answer in answers:
        assert float(replay(updates.models, answer, answer.stamps).max()) < EXACT
    # These models reveal a mixture: wherever one token's pass is torn, between any two parameters, the replay leaves the bound.
    answer = next(answer for answer in answers if changes(answer))
    at = changes(answer)[0]
    torn = copy.deepcopy(updates.models[answer.stamps[at - 1]])
    new = dict(updates.models[answer.stamps[at]].named_parameters())
    named = list(torn.named_parameters())
    cut = msgspec.structs.replace(answer, ids=answer.ids[: at + 1], logprobs=answer.logprobs[: at + 1])
    for name, parameter in named[:-1]:
        parameter.data = new[name].data
        difference = replay(updates.models | {-7: torn}, cut, [*answer.stamps[:at], -7])
        assert float(difference[at]) > EXACT, f"torn after {name}"


async def test_idle_engine_commits_at_once(sglang_server, updates, one, other):
    await updates.put(one)
    before = updates.host.commits[-1][0].forward
    await updates.put(other)
    (done,) = updates.host.commits[-1]
    assert done.forward == before, "no forward pass was needed"
    answer = await ask(sglang_server, [5, 6, 7], 3)
    assert set(answer.stamps) == {max(updates.models)}
    assert float(replay(updates.models, answer, answer.stamps).max()) < EXACT


async def test_same_bytes_change_no_token(sglang_server, updates, one):
    await updates.put(one)
    alone = await ask(sglang_server, [9, 8, 7, 6], 300)
    task = asyncio.create_task(ask(sglang_server, [9, 8, 7, 6], 300))
    for _ in range(3):
        await asyncio.sleep(0.1)
        manifest, _ = await updates.put(one)
        assert await updates.host.served_digest(manifest) == (manifest.version, manifest.digest)
    again = await task
    assert len(set(again.stamps)) > 1
    assert (alone.ids, alone.logprobs) == (again.ids, again.logprobs)


async def test_paced_staging_brings_the_same_weights(sglang_server, updates, one, other):
    updates.host.pace = Pace(max_gap_ms=0.5)
    await updates.put(one)
    answers = await under_way(sglang_server, updates, [other])
    for answer in answers:
        assert float(replay(updates.models, answer, answer.stamps).max()) < EXACT


@pytest.mark.parametrize("isolated", [True, False])
async def test_prefixes_across_versions(sglang_server, updates, one, other, isolated):
    prompt = [11 + (7 * i) % 50 for i in range(48)]

    async def asked(key: str) -> Answer:
        return await ask(sglang_server, prompt, 12, extra_key=f"{updates}-{key if isolated else 'shared'}")

    await updates.put(one)
    first = await asked("one")
    await updates.put(other)
    second = await asked("other")
    old, new = sorted(updates.models)
    assert float(replay(updates.models, first, first.stamps).max()) < EXACT
    assert set(second.stamps) == {new}
    reused = second.meta["cached_tokens"]
    if isolated:
        assert reused == 0
        assert float(replay(updates.models, second, second.stamps).max()) < EXACT
    else:
        # Keys and values of the old weights live on in the cache, and the answer shows it. (SGLang computes the last prompt token anew for
        # the first answer token, and goes on with the old one's keys and values after that.)
        assert reused == len(prompt) - 1
        assert float(replay(updates.models, second, second.stamps)[0]) > EXACT
        assert float(replay(updates.models, second, second.stamps, reused=(reused, old))[0]) < EXACT


async def test_a_prompt_that_waited_through_a_commit_takes_no_older_prefix(sglang_server, updates, one, other):
    """Its worker has sent it with the key of the version served then, under which the prompt's keys and values lie ready."""
    prompt = [13 + (5 * i) % 50 for i in range(48)]
    await updates.put(one)
    old = updates.host.commits[-1][0].version
    first = await ask(sglang_server, prompt, 4, extra_key=prefix_key(old))
    again = await ask(sglang_server, prompt, 4, extra_key=prefix_key(old))
    assert (first.meta["cached_tokens"], again.meta["cached_tokens"]) == (0, len(prompt) - 1)
    # All slots are taken while it is sent.
    others = await ask_many(sglang_server, SLOTS, 150)
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(ask(sglang_server, prompt, 12, extra_key=prefix_key(old)))
    await asyncio.sleep(0.1)
    await updates.put(other)
    waited = await waiting
    await asyncio.gather(*others)
    late = await ask(sglang_server, prompt, 12, extra_key=prefix_key(old))
    for answer, reused in ((waited, 0), (late, len(prompt) - 1)):
        assert set(answer.stamps) == {max(updates.models)}
        assert answer.meta["cached_tokens"] == reused
        assert float(replay(updates.models, answer, answer.stamps).max()) < EXACT


async def test_sampled_tokens_keep_their_versions_in_a_stream(sglang_server, updates, one, other):
    await updates.put(one)
    body = {
        "input_ids": [4, 5, 6],
        "sampling_params": {"max_new_tokens": 150, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
        "extra_key": "in a stream",
    }
    ids: list[int] = []
    stamps: list[int] = []
    logprobs: list[float] = []
    put = asyncio.create_task(updates.put(other))
    async for part in sglang_server.client.stream(body):
        ids += part.output_ids or []
        logprobs += [row[0] for row in part.meta_info.output_token_logprobs or [] if row[0] is not None]
        stamps += part.meta_info.streamrl_versions or []
    await put
    assert len(ids) == len(logprobs) == len(stamps) == 150
    answer = Answer((4, 5, 6), tuple(ids), tuple(logprobs), tuple(stamps), {})
    assert float(replay(updates.models, answer, answer.stamps).max()) < EXACT


def test_models_differ(one, other):
    """Otherwise all of the above would hold for nothing."""
    assert all(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
