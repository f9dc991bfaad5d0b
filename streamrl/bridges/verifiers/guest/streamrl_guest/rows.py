"""A taskset's tasks as rows: the messages and tools with which the environment, played in earnest, first turns to the model.

What an episode begins with is up to harness and environment (a game's board, a system prompt, tools), so each task's episode is begun here
and refused at its first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from streamrl_guest.relay import Relay
from streamrl_guest.setting import Setting
from verifiers.v1.clients.train import tool_to_wire
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire

_AT_ONCE = 16
_REFUSAL = {"error": {"message": "streamrl only asks what an episode begins with", "type": "invalid_request_error"}}


async def main(setting: Setting, spec: Mapping[str, Any], say: Any) -> None:
    """Say a row for each task, in the taskset's order; raises ValueError for one whose episode asks the model nothing."""
    begun: dict[str, dict[str, Any]] = {}

    async def heard(trace: str, body: dict[str, Any]) -> web.Response:
        begun.setdefault(trace, body)
        return web.json_response(_REFUSAL, status=400)

    async with aiohttp.ClientSession() as http:
        relay = Relay(http, spec["model"], spec["max_len"])
        relay.heard = heard
        runner = await relay.start()
        try:
            client = vf.EvalClientConfig(base_url=relay.base_url, api_key_var="STREAMRL_NO_KEY")
            context = vf.ModelContext(model=spec["model"], client=client)
            renderer = setting.make_renderer()
            gate = asyncio.Semaphore(_AT_ONCE)

            async def row(task: vf.Task) -> dict[str, Any]:
                async with gate:
                    return await _row(setting, task, context, renderer, begun)

            async with setting.env.serving():
                for made in asyncio.as_completed([row(task) for task in setting.tasks()]):
                    say(row=await made)
        finally:
            await runner.cleanup()
    say(done=True)


async def _row(setting: Setting, task: vf.Task, context: vf.ModelContext, renderer: Any, begun: dict[str, Any]) -> dict[str, Any]:
    traces: list[str] = []
    episode = await setting.env.run_episode(task, context, on_trace=lambda trace: traces.append(trace.id))
    body = next((begun.pop(trace) for trace in traces if trace in begun), None)
    if body is None:
        errors = [error for holder in (episode, *episode.traces) for error in holder.errors]
        why = f"{errors[0].type}: {errors[0].message}" if errors else "it ended without a call"
        raise ValueError(f"expected the episode of task {task.data.idx} to ask the model something; {why}")
    asked = ChatDialect().parse_request(body)
    messages = [message_to_wire(message) for message in asked.messages]
    tools = [tool_to_wire(tool) for tool in asked.tools] if asked.tools else None
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=True)
    return {"idx": task.data.idx, "key": task.key, "messages": messages, "tools": tools, "token_ids": list(rendered.token_ids)}
