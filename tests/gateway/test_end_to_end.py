"""A real `up` whose only producers are agents on OpenAI's SDK, and whose gateway is killed while they call."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from streamrl.producers.gateway.worker import addresses
from streamrl.runtime.rundir import RunDir
from tests.support.memory import freed_after_test
from tests.support.processes import send, until, worker_pid
from tests.support.programs import STREAMRL, Start, said
from tests.support.world.verdict import judge

TOML = """
[run]
name = "demo"
steps = 6
numerics = "bitwise"
[data]
train = "train.jsonl"
max_prompt_tokens = 16
[model]
max_len = 64
[sampling]
max_new_tokens = 4
[tasks]
batch_tasks = 2
num_rollouts = 4
max_staleness = 2
[producer]
workers = 0
[gateway]
workers = 1
[engine]
kind = "table"
[trainer]
backend = "table"
checkpoint_every = 4
[bus]
ack_wait_s = 1.0
[supervise]
backoff_s = 0.1
"""


class Agents:
    """Some that go on for ever. Each session asks twice, goes back and asks otherwise (a branch), and is rewarded by its agent."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._http = httpx.AsyncClient(timeout=30.0)
        self.ended = 0
        self.outlived = 0
        """Sessions in which an agent went on after the gateway that had begun them was gone."""
        self.kills = 0

    def _url(self) -> str:
        return addresses(self._run)["gateway-0"]

    async def _post(self, path: str, body: Any, key: str) -> Any:
        """Until it is answered: a gateway that is away, or has no task, is asked again."""
        while True:
            try:
                answer = await self._http.post(self._url() + path, json=body, headers={"Authorization": f"Bearer {key}"})
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            if answer.status_code not in (429, 503):
                assert answer.status_code in (200, 410), answer.text
                return answer.json()
            await asyncio.sleep(0.1)

    async def session(self) -> None:
        told = await self._post("/rl/start_session", {}, self._run.gateway_key())
        kills = self.kills
        key, prompt = told["api_key"], told["messages"]
        async with openai.AsyncOpenAI(base_url=told["base_url"], api_key=key, max_retries=60, timeout=30.0) as sdk:

            async def chat(messages: list[Any]) -> Any:
                answer = await sdk.chat.completions.create(model=told["model"], messages=messages)
                return answer.choices[0].message

            try:
                first = await chat(prompt)
                second = await chat([*prompt, first, {"role": "user", "content": "2"}])
                await chat([*prompt, first, {"role": "user", "content": "2"}, second, {"role": "user", "content": "3"}])
                await chat([*prompt, first, {"role": "user", "content": "4"}])
            except openai.APIStatusError as error:
                assert error.status_code == 410, "its task has ended meanwhile: too stale"
                return
        reward = len(first.content or "") % 3
        await self._post("/rl/set_reward", {"reward": reward}, key)
        await self._post("/rl/end_session", {}, key)
        self.ended += 1
        self.outlived += self.kills > kills

    async def forever(self) -> None:
        while True:
            await self.session()

    async def close(self) -> None:
        await self._http.aclose()


@pytest.mark.slow
async def test_agents_train_a_run_whose_gateway_is_killed(tmp_path: Path, start: Start) -> None:
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "demo.toml").write_text(TOML)
    run = RunDir(tmp_path / "runs" / "demo")
    up = await start(*STREAMRL, "up", "demo.toml", "--plain")
    await until(lambda: addresses(run), within_s=120)
    freed_after_test(run.load_config(), run)
    agents = Agents(run)
    working = [asyncio.create_task(agents.forever()) for _ in range(6)]
    try:
        for kill in range(2):
            await until(lambda goal=8 * (kill + 1): agents.ended >= goal or up.returncode is not None, within_s=120)
            pid = worker_pid(run, "gateway")
            assert pid is not None and send(pid, signal.SIGKILL)
            agents.kills += 1
        code, out, err = await said(up, within_s=240)
        assert code == 0, out + err
    finally:
        for task in working:
            task.cancel()
        results = await asyncio.gather(*working, return_exceptions=True)
        await agents.close()
    assert not [result for result in results if isinstance(result, AssertionError)], results
    assert agents.outlived > 0
    verdict = await judge(run)
    assert verdict.problems == []
    assert verdict.counts["samples"] > 6 * 2 * 4, "rollouts have branches"
