"""Tools, branches and saves of chats in user code that runs in a process of its own, async and plain."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.producers.children.jobs import Keeping
from streamrl.producers.episode import samples_of
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.tasks import Sampling
from tests.support.scripted import Scripted
from tests.support.user_code import Workshop, ends

pytestmark = pytest.mark.process

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><tool_call>{"name": "leave"}</tool_call>'
AGENT = """
{maybe_async}def agent(task, engine):
    chat = engine.chat(task)
    if not chat.turns:
        {wait}chat.generate()
        results = {wait}chat.call_tools({{"add": lambda a, b: a + b, "leave": lambda: sys.exit(3)}})
        tell("results", str([result.text for result in results]))
        {wait}chat.generate()
        {wait}chat.save()
        fork, short = chat.branch(keep=1), chat.compact("five")
        fork.tools(["6", "7"])
        {wait}fork.generate()
        {wait}fork.save()
        os._exit(1)
    fork, short = chat.branch(keep=1), chat.compact("five")
    tell("resumed", f"{{len(fork.turns)}} {{len(short.turns)}}")
    {wait}short.generate()
    return [chat.episode(), fork.episode(), short.episode(reward=1.0)]
"""


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_tools_branches_and_saves_of_a_process_that_dies(workshop: Workshop, kind: str) -> None:
    wait, maybe_async = ("await ", "async ") if kind == "async def" else ("", "")
    engine: Any = Scripted(workshop.tokenizer, [CALL, "left", "right", "short"])
    workshop.engine = engine
    kept: dict[int, bytes] = {}

    async def store(rollout: int, data: bytes) -> None:
        kept[rollout] = data

    task = replace(workshop.task(num_rollouts=1), sampling=Sampling(max_new_tokens=200))
    async with workshop.runner(
        AGENT.format(wait=wait, maybe_async=maybe_async), producer="agent", tool_calls="hermes", max_len=2000
    ) as runner:
        [group] = await workshop.run(runner, task, keeping=Keeping(store=store))
    assert ends(group) == {0: "episode"}
    assert [line[1:] for line in workshop.told("results")] == [["['5',", "'Error:", "SystemExit:", "3']"]]
    assert [line[1:] for line in workshop.told("resumed")] == [["2", "0"]]
    rows = decode_samples(encode_samples(samples_of(task, group.episodes, producer="p"))).rows()
    trained = [workshop.tokenizer.decode(row.tokens[row.loss_mask == 1].tolist()) for row in rows]
    assert trained == [f"{CALL}<|end|>left<|end|>", "right<|end|>", "short<|end|>"]
    assert [row.branch and row.branch.parent for row in rows] == [None, 0, 0]
    assert [row.reward for row in rows] == [1.0] * 3
    for row in rows:  # versions and log-probs are those that the parent recorded, of the shared turn too
        versions = [span.version.number for span in row.spans if span.version is not None]
        assert versions == {0: [1, 2], 1: [1, 3], 2: [4]}[row.sample]
