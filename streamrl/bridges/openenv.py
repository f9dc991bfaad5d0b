"""OpenEnv environments: `producer.function = "openenv:http://host:8000"` steps a server by the model's turns.

```text
chat: the row's prompt + what the server's reset shows -> turn -> step(turn) -> what it shows -> turn ... done, or no turn left
```

Each rollout has a WebSocket of its own, which is a session of its own at the server, and speaks OpenEnv's protocol (its version 0.10):
`reset`, `step` and `close`, answered by `observation` or `error`. Nothing of OpenEnv has to be installed here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from streamrl.config.bridges import check_options
from streamrl.config.tree import ProducerConfig
from streamrl.errors import ConfigError
from streamrl.producers.episode import Episode
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.schemas.tasks import RolloutTask

_OPTIONS = {"action": str, "observation": str, "reset": dict, "max_turns": int}
_MAX_TURNS = 32
_MAX_BYTES = 100 << 20
"""Of one message, as OpenEnv's own client takes it."""
_CONNECT_S = 10.0
_FULL = "CAPACITY_REACHED"
_FULL_PAUSE_S = 0.5
_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""An action of the model's that is none: it is told, and goes on. All other errors are the environment's."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"the OpenEnv server answered {code}: {text}")
        self.code, self.text = code, text


def producer(url: str) -> Callable[[RolloutTask, RolloutEngine], Awaitable[Episode]]:
    """The producer for the server at `url`."""

    async def roll_out(task: RolloutTask, engine: RolloutEngine) -> Episode:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=_CONNECT_S)) as http:
            return await _episode(http, url.rstrip("/"), task, engine)

    return roll_out


def check(url: str, section: ProducerConfig) -> None:
    """Raise ConfigError unless `url` is one, the options are known, and a server answers there."""
    if not url.startswith(("http://", "https://")):
        hint = "name the address of a running server"
        raise ConfigError(f"expected openenv:http://host:port, got openenv:{url}", hint=hint, key="producer.function")
    check_options(section.options, _OPTIONS)
    try:
        asyncio.run(_schema(url.rstrip("/")))
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        raise ConfigError(
            f"expected an OpenEnv server at {url}, got: {type(error).__name__}: {error}",
            hint="start the environment's server first, or correct its address",
            key="producer.function",
        ) from error


async def _schema(url: str) -> Mapping[str, Any]:
    """JSON schema of the actions that the server takes."""
    timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/schema", raise_for_status=True) as response:
        return (await response.json())["action"]


async def _episode(http: aiohttp.ClientSession, url: str, task: RolloutTask, engine: RolloutEngine) -> Episode:
    options = engine.options
    field = options.get("action") or _only_field(await _schema(url))
    reset = {**options.get("reset", {}), **task.metadata.get("reset", {})}
    socket, seen = await _begin(http, url, reset)
    async with socket:
        chat = engine.chat(_opened(task, _shown(seen, options), chat_template=engine.context.chat_template))
        rewards: list[float] = []
        for number in range(options.get("max_turns", _MAX_TURNS)):
            if number:
                chat.user(_shown(seen, options))
            turn = await chat.generate()
            if not turn.token_ids:  # the longest sequence is reached
                break
            try:
                seen = await _ask(socket, "step", _action(turn.text, field))
            except Refused as error:
                if error.code not in _REFUSED:
                    raise
                seen = {"refused": error.text}
            if seen.get("reward") is not None:
                rewards.append(float(seen["reward"]))
            if seen.get("done"):
                if not rewards:
                    raise ValueError(f"the environment at {url} ended without any reward")
                break
        await socket.send_json({"type": "close"})
    return chat.episode(reward=sum(rewards), metadata={"openenv": {"steps": len(chat.turns), "done": bool(seen.get("done"))}})


async def _begin(http: aiohttp.ClientSession, url: str, reset: Mapping[str, Any]) -> tuple[aiohttp.ClientWebSocketResponse, Any]:
    """A session and what it shows first; waits for a seat where the server has none, as long as the rollout may take."""
    while True:
        socket = await http.ws_connect(f"{url}/ws", max_msg_size=_MAX_BYTES, heartbeat=20.0)
        try:
            return socket, await _ask(socket, "reset", reset)
        except BaseException as error:
            await socket.close()
            if not (isinstance(error, Refused) and error.code == _FULL):
                raise
        await asyncio.sleep(_FULL_PAUSE_S)


async def _ask(socket: aiohttp.ClientWebSocketResponse, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    await socket.send_json({"type": kind, "data": data})
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise ConnectionError(f"the OpenEnv server ended the session during {kind}: {message.type.name} {message.extra or ''}".rstrip())
    answer = json.loads(message.data)
    said = answer.get("data") or {}
    if answer.get("type") == "error":
        raise Refused(str(said.get("code", "an error")), str(said.get("message", said)))
    return said


def _only_field(schema: Mapping[str, Any]) -> str:
    """The one field that an action needs; empty: several, and the model writes a JSON object."""
    required = schema.get("required", [])
    return required[0] if len(required) == 1 and schema["properties"][required[0]].get("type") == "string" else ""


def _action(text: str, field: str) -> dict[str, Any]:
    if field:
        return {field: text}
    try:
        action = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refused("INVALID_JSON", f"expected an action as a JSON object: {error}") from error
    if not isinstance(action, dict):
        raise Refused("INVALID_JSON", f"expected an action as a JSON object, got {text[:100]!r}")
    return action


def _opened(task: RolloutTask, shown: str, *, chat_template: bool) -> RolloutTask | str | Sequence[Mapping[str, Any]]:
    """For `engine.chat`: the task's prompt, with what the environment shows as the end of its last user message."""
    if not shown:
        return task
    if not chat_template:
        return f"{task.prompt}{shown}"
    messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else [*task.prompt]
    if messages[-1].get("role") != "user":
        return [*messages, {"role": "user", "content": shown}]
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{shown}"}]


def _shown(seen: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """An observation of OpenEnv's as text: the field that is chosen, its one text, or all of it as JSON; or why an action was refused."""
    observation = seen.get("observation") or {}
    if "refused" in seen:
        return f"error: {seen['refused']}"
    if name := options.get("observation"):
        if name not in observation:
            raise ValueError(f"expected a field {name!r} in the observation (producer.options.observation), got {', '.join(observation)}")
        return str(observation[name])
    only = next(iter(observation.values())) if len(observation) == 1 else None
    return only if isinstance(only, str) else json.dumps(observation, ensure_ascii=False)
