"""AReaL's verbs of a session: `/rl/start_session` with the gateway's key, `/rl/set_reward` and `/rl/end_session` with the session's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from streamrl.producers.gateway.entries import Ended, Rewarded
from streamrl.producers.gateway.errors import ApiError, refused
from streamrl.producers.gateway.keys import Keys, SessionKey
from streamrl.producers.gateway.session import Session
from streamrl.producers.gateway.sessions import Sessions
from streamrl.producers.gateway.wire_messages import messages_fields
from streamrl.producers.late import LateRewards

_START = frozenset({"task_id", "wait_s", "api_key"})
_REWARD = frozenset({"reward", "parts", "revision", "interaction_id"})
_END = frozenset({"failed"})
MAX_PARTS = 256
MAX_DETAIL = 1000
_MAX_REVISION = (1 << 53) - 1


class Verbs:
    """The verbs of one gateway.

    Args:
        sessions: that it has.
        keys: of sessions.
        late: publishes rewards that come after the end.
        wait_s: longest that a start waits.
        model: what the policy is called.
        show_label: whether agents are told what is expected.
        max_len: longest sequence in tokens.
    """

    def __init__(
        self, sessions: Sessions, keys: Keys, late: LateRewards, *, wait_s: float, model: str, show_label: bool, max_len: int
    ) -> None:
        self._sessions = sessions
        self._keys = keys
        self._late = late
        self._wait_s = wait_s
        self._model = model
        self._show_label = show_label
        self._max_len = max_len

    async def start(self, body: Mapping[str, Any], request: str, base_url: str) -> dict[str, Any]:
        """A session for who asks, with all that it needs: its key, the prompt, how tokens are drawn."""
        _only(body, _START)
        if body.get("api_key"):
            raise refused("expected no api_key: the gateway makes it", param="api_key")
        wait_s = body.get("wait_s")
        if wait_s is not None and (not isinstance(wait_s, int | float) or not 0 <= wait_s <= self._wait_s):
            raise refused(f"expected wait_s from 0 to {self._wait_s:g} s (gateway.wait_s), got {wait_s!r:.80}", param="wait_s")
        session = await self._sessions.start(self._wait_s if wait_s is None else float(wait_s), request)
        return self._told(session, base_url)

    def _told(self, session: Session, base_url: str) -> dict[str, Any]:
        task, rollout = session.context.task, session.context.rollout_index
        key = self._keys.make(task.index, rollout, session.started.nonce if session.started is not None else "")
        told: dict[str, Any] = {
            "session_id": session.name,
            "api_key": key,
            "base_url": f"{base_url}/sessions/{key}/v1",
            "model": self._model,
            "task": task.index,
            "rollout": rollout,
            "num_rollouts": task.num_rollouts,
            "messages": messages_fields(session.rules.messages()),
            "prompt_token_ids": task.prompt_ids,
            "tools": task.tools,
            "metadata": task.metadata,
            "sampling": msgspec.to_builtins(task.sampling),
            "max_model_len": self._max_len,
        }
        return told | {"label": task.label} if self._show_label else told

    async def set_reward(self, key: SessionKey, body: Mapping[str, Any]) -> dict[str, Any]:
        """What a rollout is worth: with its samples while its session is open, else behind them on the stream."""
        _only(body, _REWARD)
        if body.get("interaction_id") is not None:
            raise refused("expected no interaction_id: a reward is of the whole rollout", param="interaction_id")
        reward, parts = _number(body.get("reward"), "reward"), _parts(body.get("parts"))
        session = self._sessions.at_hand(key)
        if session is not None and session.ended is None:
            await session.set_reward(Rewarded(reward=reward, parts=parts))
            return {"message": "success", "session_id": session.name, "late": False}
        revision = body.get("revision")
        if revision is None:
            revision = int(time.time() * 1000)  # above every earlier one, whichever gateway is asked
        if type(revision) is not int or not 1 <= revision <= _MAX_REVISION:
            raise refused(f"expected a revision from 1 to 2^53 - 1, got {revision!r:.80}", param="revision")
        await self._late.publish(key.task, key.rollout, reward, revision=revision, parts=parts)
        return {"message": "success", "session_id": f"{key.task}.{key.rollout}", "late": True, "revision": revision}

    async def end(self, key: SessionKey, body: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
        """End a session; what it has made is the rollout, or with `failed` nothing is."""
        _only(body, _END)
        failed = body.get("failed")
        if failed is not None and not isinstance(failed, str):
            raise refused(f"expected a reason as text, got {failed!r:.80}", param="failed")
        detail = (failed or "")[:MAX_DETAIL]
        if self._sessions.has_ended(key):
            return {"message": "success", "session_id": f"{key.task}.{key.rollout}"}
        session = await self._sessions.find(key, wait_s)
        if session.ended is not None and session.ended.reason and not failed:
            raise ApiError(410, f"the session has ended: {session.ended.reason}, {session.ended.detail}", code="session_ended")
        if session.ended is None:
            await session.end(Ended(reason="failed" if failed is not None else "", detail=detail))
        return {"message": "success", "session_id": session.name}


def _only(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in body:
        if name not in known:
            raise refused(f"expected fields {', '.join(sorted(known))}, got {name!r:.80}", code="unknown_parameter", param=name)


def _number(value: Any, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
        raise refused(f"expected a finite number, got {value!r:.80}", param=param)
    return float(value)


def _parts(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(cast("Mapping[str, Any]", value)) > MAX_PARTS:
        raise refused(f"expected parts as a table of at most {MAX_PARTS} numbers, got {value!r:.80}", param="parts")
    return {name[:200]: _number(part, f"parts.{name:.80}") for name, part in cast("Mapping[str, Any]", value).items()}
