"""What the section `gateway` may not say beside the others."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.tree import Config

_MAX_PORT = 65535


def check_gateway(config: Config) -> None:
    """Raise ConfigError for the first rule that does not hold."""
    gateway = config.gateway
    last = gateway.port + max(0, gateway.workers - 1)
    refuse(
        gateway.port > 0 and last > _MAX_PORT,
        f"gateway.port must leave a port for each of {gateway.workers} gateways, got {gateway.port}, of which the last would be {last}",
        hint=f"lower it to {_MAX_PORT + 1 - gateway.workers} or less",
        key="gateway.port",
    )
    greedy = ", and the greedy one of remax" if config.group_size > config.tasks.num_rollouts else ""
    refuse(
        gateway.max_sessions < config.group_size,
        f"gateway.max_sessions must hold a whole task of {config.group_size} rollouts (tasks.num_rollouts{greedy}), got "
        f"{gateway.max_sessions}",
        hint="raise it",
        key="gateway.max_sessions",
    )
