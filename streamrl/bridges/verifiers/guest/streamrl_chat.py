"""A harness without a process: the conversation is held in the guest itself, with the taskset's tools.

verifiers' own `null` does the same in a process for each rollout, for which it installs `uv` from the network at its first use.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["StreamrlChat"]


class StreamrlChatConfig(vf.HarnessConfig):
    """Nothing of its own."""


class StreamrlChat(vf.Harness[StreamrlChatConfig]):
    """The model answers, its tool calls are made, until it makes none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: StreamrlChatConfig) -> None:
        super().__init__(config)
        # One for all rollouts: a client of httpx takes tens of milliseconds to make. Its calls stay on this machine, without TLS.
        http = httpx.AsyncClient(verify=False, timeout=None, limits=httpx.Limits(max_connections=None))
        self._http = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, http_client=http)

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One segment of the conversation; a refused call ends it, and verifiers says what that means."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {"mcpServers": {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}}
        client = self._http.with_options(base_url=endpoint, api_key=secret)
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp(servers, stack)
            try:
                while calls := await self._turn(client, ctx.model, messages, tools):
                    for call in calls:
                        content = await _called(call, dispatch, connections)
                        name = call["function"]["name"]
                        messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
            except APIStatusError as error:
                if not is_context_overflow(error):  # that one ends the conversation as it is
                    return vf.ProgramResult(1, "", str(error))
        return vf.ProgramResult(0, "", "")

    async def _turn(self, client: AsyncOpenAI, model: str, messages: list[Any], tools: list[Any]) -> list[dict[str, Any]]:
        answer = await client.chat.completions.create(model=model, messages=messages, **({"tools": tools} if tools else {}))
        message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        return message.get("tool_calls") or []


async def _called(call: dict[str, Any], dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """What a tool answers, or what was wrong with the call, for the model."""
    name = call["function"]["name"]
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except json.JSONDecodeError as error:
        return f"error: expected JSON arguments: {error}"
    if not isinstance(arguments, dict):
        return "error: expected a JSON object of arguments"
    return await call_mcp(connections, dispatch, name, arguments)
