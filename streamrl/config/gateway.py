"""The section `gateway` and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from streamrl.config.bounds import NonNegativeInt, Port, PositiveFloat, PositiveInt, Section, refuse

_MAX_PORT = 65535


class GatewayConfig(Section, frozen=True, kw_only=True):
    """An OpenAI URL for each session, so that agents of any kind make the rollouts (docs/gateway.md)."""

    workers: NonNegativeInt = 0
    """Gateway processes started with the run; 0: none. `streamrl gateway --run RUN` runs one beside it."""
    host: str = "127.0.0.1"
    """Address that they listen on. It is plain HTTP: off loopback put a proxy with TLS before it."""
    port: Port = 0
    """Port of the first; the others have those behind it. 0: the one that each had before, or any free one."""
    max_sessions: PositiveInt = 1024
    """Sessions that one gateway has open, in whole tasks of tasks.num_rollouts."""
    prompts: Literal["task", "any"] = "task"
    """`task`: what a call asks begins with the prompt of its task, and its tools. `any`: agents may have prompts of their own, which are
    trained too; the group's rollouts then answer different prompts."""
    show_label: bool = False
    """Tell agents the label of their task's row, for those that compute its reward themselves."""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Longest that /rl/start_session waits for a task before it answers 429, and that a call waits for a session that another gateway
    had."""
    call_timeout_s: PositiveFloat = 540.0
    """Longest that a call waits for its answer, an engine and its version included; then it gets a 504 and goes on, and the same call again
    gets its answer. Below the 600 s after which OpenAI's SDK gives up."""
    idle_timeout_s: PositiveFloat = 300.0
    """A session without a call for this long is over, as `timeout`; so is one that nobody starts while no other of its task is open. In
    all an agent has producer.rollout_timeout_s."""
    max_turns: PositiveInt = 1000
    """Calls of one session that are answered."""
    max_calls: PositiveInt = 64
    """Calls of one session that are open at a time."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    """Largest request."""


def check_gateway(gateway: GatewayConfig, num_rollouts: int, group_size: int) -> None:
    """Raise ConfigError for the first rule that does not hold; `group_size` is `num_rollouts` and the greedy one, if any."""
    last = gateway.port + max(0, gateway.workers - 1)
    refuse(
        gateway.port > 0 and last > _MAX_PORT,
        f"gateway.port must leave a port for each of {gateway.workers} gateways, got {gateway.port}, of which the last would be {last}",
        hint=f"lower it to {_MAX_PORT + 1 - gateway.workers} or less",
        key="gateway.port",
    )
    greedy = ", and the greedy one of remax" if group_size > num_rollouts else ""
    refuse(
        gateway.max_sessions < group_size,
        f"gateway.max_sessions must hold a whole task of {group_size} rollouts (tasks.num_rollouts{greedy}), got {gateway.max_sessions}",
        hint="raise it",
        key="gateway.max_sessions",
    )
