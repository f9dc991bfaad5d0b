"""Episodes for sessions: each session that the gateway gives is an episode of the task that its row names, scored by its taskset.

```text
/rl/start_session -> the row's task -> Env.run_episode -> /rl/set_reward -> /rl/end_session
                                              `-> it failed, timed out or gave no number: /rl/end_session {failed: why}
```
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import verifiers.v1 as vf
from streamrl_guest.relay import Line, Relay
from streamrl_guest.setting import Setting

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_LOOK_S = 0.5
_PAUSE_S = 1.0
_DETAIL = 1000
_OVER = (401, 404, 410)
"""The gateway's word that a session is no more."""


class Failed(Exception):
    """An episode that gives no reward; its text is the reason."""


async def main(setting: Setting, spec: Mapping[str, Any], say: Any) -> None:
    """Play episodes, `sessions` at a time, for as long as the process lives."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as http:
        relay = Relay(http, spec["model"], spec["max_len"])
        runner = await relay.start()
        try:
            async with setting.env.serving(), asyncio.TaskGroup() as group:
                guest = Guest(setting, spec, say, http, relay)
                group.create_task(guest.beat())
                await guest.acquit()
                for _ in range(spec["sessions"]):
                    group.create_task(guest.play())
        finally:
            await runner.cleanup()


class Guest:
    """One process' sessions."""

    def __init__(self, setting: Setting, spec: Mapping[str, Any], say: Any, http: aiohttp.ClientSession, relay: Relay) -> None:
        self._setting = setting
        self._gateway: str = spec["gateway"]
        self._key: str = spec["gateway_key"]
        self._idle_s: float = spec["idle_s"]
        self._adopted: list[dict[str, Any]] = list(spec["adopted"])
        self._suspects: list[dict[str, Any]] = list(spec["suspects"])
        self._say = say
        self._http = http
        self._relay = relay
        client = vf.TrainClientConfig(
            base_url=relay.base_url, api_key_var="STREAMRL_NO_KEY", renderer=setting.renderer, renderer_model_name=setting.model_dir
        )
        self._context = vf.ModelContext(model=spec["model"], client=client)

    async def beat(self) -> None:
        """Say again and again that the event loop is not held by an environment."""
        while True:
            self._say(beat=True)
            await asyncio.sleep(_BEAT_S)

    async def acquit(self) -> None:
        """Play the sessions that an earlier process may have died of, alone, so that it is known which one did."""
        for session in self._suspects:
            await self._play(session)

    async def play(self) -> None:
        """One session after the other."""
        while True:
            await self._play(self._adopted.pop() if self._adopted else await self._next())

    async def _play(self, session: Mapping[str, Any]) -> None:
        root = session["base_url"].removesuffix("/v1")
        self._say(opened=session)
        try:
            reward, parts = await self._episode(session, Line(root, session["api_key"], self._idle_s))
            await self._tell(root, "set_reward", {"reward": reward, "parts": parts})
            await self._tell(root, "end_session", {})
        except Failed as error:
            logger.warning("session %s failed: %s", session["session_id"], error)
            await self._tell(root, "end_session", {"failed": str(error)[:_DETAIL]})
        self._say(ended=session["session_id"])

    async def _next(self) -> dict[str, Any]:
        """A session, waited for as long as there is none; raises RuntimeError for a key that is not the gateway's."""
        # A start whose answer was lost gives the same session when it is repeated: no credit waits for a session that nobody knows of.
        headers = {"Authorization": f"Bearer {self._key}", "Idempotency-Key": uuid4().hex}
        while True:
            try:
                async with self._http.post(f"{self._gateway}/rl/start_session", headers=headers) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    said = await answer.text()
                    if answer.status in (401, 403):
                        raise RuntimeError(f"the gateway refuses the key to start sessions: {said[:300]}")
                    pause_s = float(answer.headers.get("Retry-After", _PAUSE_S))
                    if answer.status != 429:
                        logger.warning("the gateway answers %d: %s", answer.status, said[:300])
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                pause_s = _PAUSE_S
                logger.info("the gateway is away: %s", error)
            await asyncio.sleep(pause_s)

    async def _tell(self, root: str, verb: str, body: Mapping[str, Any]) -> None:
        """A verb of the session, repeated while the gateway is away; a session that is over already has an end."""
        deadline = time.monotonic() + self._idle_s
        while True:
            pause_s = _PAUSE_S
            try:
                async with self._http.post(f"{root}/rl/{verb}", json=body) as answer:
                    if answer.status == 200 or answer.status in _OVER:
                        return
                    said = await answer.text()
                    if answer.status < 500 and answer.status != 429:
                        logger.error("the gateway refuses %s: %d %s", verb, answer.status, said[:300])
                        return
            except aiohttp.ClientConnectionError as error:
                said = str(error)
            if time.monotonic() > deadline:
                logger.error("%s could not be told: %s", verb, said[:300])
                return
            await asyncio.sleep(pause_s)

    async def _episode(self, session: Mapping[str, Any], line: Line) -> tuple[float, dict[str, float]]:
        """Reward and its parts; raises Failed."""
        named = (session["metadata"] or {}).get("verifiers") or {}
        task = self._setting.task(named.get("idx", -1))
        if task is None or task.key != named.get("key"):
            got = "none" if task is None else task.key
            raise Failed(f"expected task {named.get('idx')} of the taskset to have the key {named.get('key')}, got {got}: it has changed")
        traces: list[vf.Trace] = []

        def minted(trace: vf.Trace) -> None:
            traces.append(trace)
            self._relay.lines[trace.id] = line

        [slot] = self._setting.env.slots(task)
        running = asyncio.create_task(self._setting.env.run_slot(slot, self._context, on_trace=minted))
        try:
            await self._watched(running, line)
            episode = running.result()
        except Failed:
            raise
        except Exception as error:  # whatever the environment raises fails this rollout
            raise Failed(f"{type(error).__name__}: {error}") from error
        finally:
            running.cancel()
            for trace in traces:
                self._relay.lines.pop(trace.id, None)
        self._keep(session, episode)
        return outcome(episode, {trace.id for trace in traces})

    async def _watched(self, running: asyncio.Task[Any], line: Line) -> None:
        """Wait for an episode, at most `idle_s` without a call of its."""
        while not (await asyncio.wait((running,), timeout=_LOOK_S))[0]:
            idle_s = 0.0 if line.open else time.monotonic() - line.active_s
            if idle_s > self._idle_s:
                running.cancel()
                await asyncio.wait((running,), timeout=_LOOK_S)
                raise Failed(f"the environment made no call for {idle_s:.0f} s (gateway.idle_timeout_s)")

    def _keep(self, session: Mapping[str, Any], episode: vf.Episode) -> None:
        folder: Path | None = self._setting.traces
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        record = episode.to_record(float_decimals=None)
        record["branches"] = [
            {"trace": trace.id, "token_ids": branch.token_ids, "sampled_mask": branch.sampled_mask, "logprobs": branch.logprobs}
            for trace in episode.traces
            for branch in trace.branches
        ]
        (folder / f"{session['session_id']}.json").write_text(json.dumps(record, default=str))


def outcome(episode: vf.Episode, ours: set[str]) -> tuple[float, dict[str, float]]:
    """What an episode is worth, by the traces of the policy; raises Failed where that is no number."""
    for error in (*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)):
        if not episode.ok:
            raise Failed(f"{error.type}: {error.message}")
    if not episode.ok:
        raise Failed("the episode did not end well, and verifiers does not say why")
    traces = [trace for trace in episode.traces if trace.id in ours and trace.num_turns and trace.agent.trainable]
    if not traces:
        raise Failed("the episode has no turn of the policy")
    for trace in traces:
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            raise Failed(f"the taskset gave no reward{': ' + ', '.join(missing) if missing else ''}")
        if not math.isfinite(trace.reward):
            raise Failed(f"expected a finite reward, got {trace.reward}")
    if len({trace.reward for trace in traces}) > 1:
        raise Failed(f"expected one reward, got {[trace.reward for trace in traces]} for the traces of {len(traces)} agents")
    return traces[0].reward, {name: reward.value for name, reward in traces[0].rewards.items() if reward is not None}
