"""Agents as users have them: processes that know a run's gateways and their key, speak OpenAI's API, and write down what they are told.

`python -m tests.support.world.agents --run DIR --out FILE`: sessions one after the other, until it is killed. Each line of the file was
written before the agent went on: {"told": ...} an answer, {"ended": ...} a session whose end the gateway has confirmed, {"gone": ...} one
that was over, {"wrong": ...} an answer that no fault explains.
"""

import argparse
import asyncio
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from streamrl.producers.gateway.worker import addresses
from streamrl.runtime.rundir import RunDir
from tests.support.audit.answers import Answer, Place

Write = Callable[[dict[str, Any]], None]
LATER = (408, 429, 502, 503, 504)
OVER = (401, 410)
ANSWER_S = 20.0
PAUSE_S = 0.1


class Over(Exception):
    """The session has ended, or its call cannot be made."""


class Agent:
    def __init__(
        self, run: RunDir, write: Write, http: aiohttp.ClientSession, rng: random.Random, *, host: str = "", rewards: float = 0.7
    ) -> None:
        self._host = host
        self._rewards = rewards
        self._run = run
        self._write = write
        self._http = http
        self._rng = rng

    async def work(self) -> None:
        while True:
            told = await self._post("/rl/start_session", {"wait_s": 2.0}, self._run.gateway_key(), again=str(uuid.uuid4()))
            place = [told["task"], told["rollout"]]
            try:
                await self._session(told)
                self._write({"ended": place})
            except Over as error:
                self._write({"gone": place, "why": str(error)})

    async def _session(self, told: dict[str, Any]) -> None:
        """Two turns; in one session of three a compaction, after which it goes on from where it was, so that the tree has branches."""
        messages = await self._turn(told, told["messages"])
        if self._rng.random() < 0.33:
            compacted = [*told["messages"], {"role": "user", "content": "1"}]
            await self._turn(told, await self._turn(told, compacted))
        await self._turn(told, messages)
        reward = {"reward": float(told["rollout"] % 3)}
        rewards, late = self._rng.random() < self._rewards, self._rng.random() < 0.3
        if rewards and not late:
            await self._post("/rl/set_reward", reward, told["api_key"])
        await self._post("/rl/end_session", {}, told["api_key"])
        if rewards and late:
            await self._post("/rl/set_reward", reward, told["api_key"])

    async def _turn(self, told: dict[str, Any], messages: list[Any]) -> list[Any]:
        body = {"model": "policy", "messages": messages, "return_token_ids": True, "logprobs": True, "max_tokens": 3}
        answer = await self._post("/v1/chat/completions", body, told["api_key"])
        choice = answer["choices"][0]
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        place = [told["task"], told["rollout"]]
        self._write({"told": [*place, answer["prompt_token_ids"], choice["token_ids"], logprobs], "id": answer["id"]})
        return [*messages, choice["message"], {"role": "user", "content": "2"}]

    def _reached(self, url: str) -> str:
        return f"http://{self._host}:{urlsplit(url).port}" if self._host else url

    async def _post(self, path: str, body: dict[str, Any], key: str, again: str = "") -> Any:
        """The answer, asked for again until there is one; raises Over."""
        headers = {"Authorization": f"Bearer {key}"} | ({"Idempotency-Key": again} if again else {})
        while True:
            urls = [self._reached(url) for url in addresses(self._run).values()]
            try:
                if urls:
                    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
                    async with self._http.post(self._rng.choice(urls) + path, json=body, headers=headers, timeout=timeout) as answer:
                        text = await answer.read()
                    status, given = answer.status, msgspec.json.decode(text)
                    if status == 200:
                        return given
                    code = given["error"]["code"]
                    if status in OVER or code == "context_length_exceeded":
                        raise Over(given["error"]["message"])
                    if status not in LATER or "message" not in given["error"]:
                        self._write({"wrong": [path, status, given]})
                        raise Over(given["error"]["message"])
            except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.DecodeError):
                pass
            await asyncio.sleep(PAUSE_S)


class Told:
    """What agents have written down."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.answers: list[Answer] = []
        self.ended: list[Place] = []
        self.gone: list[Place] = []
        self.wrong: list[Any] = [line["wrong"] for line in lines if "wrong" in line]
        for line in lines:
            if "told" in line:
                task, rollout, prompt, ids, logprobs = line["told"]
                self.answers.append(Answer(task, rollout, tuple(prompt), tuple(ids), tuple(logprobs)))
            for name, places in (("ended", self.ended), ("gone", self.gone)):
                if name in line:
                    places.append((line[name][0], line[name][1]))


def read_told(*files: Path) -> Told:
    """All that is in these files; a last line that was cut short is nobody's answer yet."""
    lines: list[dict[str, Any]] = []
    for file in files:
        whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        lines += [json.loads(line) for line in whole]
    return Told(lines)


async def work(run: RunDir, out: Path, agents: int, seed: int, host: str, rewards: float) -> None:
    with out.open("ab", buffering=0) as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line).encode() + b"\n")

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
            for number in range(agents):
                group.create_task(Agent(run, write, http, random.Random(seed + number), host=host, rewards=rewards).work())


def main() -> None:
    parser = argparse.ArgumentParser(description="Agents that ask a run's gateways.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", default="")
    parser.add_argument("--rewards", type=float, default=0.7)
    given = parser.parse_args()
    asyncio.run(work(RunDir(given.run), given.out, given.agents, given.seed, given.host, given.rewards))


if __name__ == "__main__":
    main()
