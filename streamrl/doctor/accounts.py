"""The accounts of a run, for the configuration of a nats-server that somebody else runs."""

from __future__ import annotations

import json

from streamrl.bus.accounts import accounts
from streamrl.bus.permissions import OPERATOR, ROLES, role_users
from streamrl.config.tree import Config


def accounts_text(config: Config) -> str:
    """The block `accounts` for `config.run.name`: one account that has the streams, and one for each role.

    Accounts and users are called after the run, users by `bus.user` where it has a `{role}`. No password is printed: each stands as a
    variable, which nats-server takes from its environment or from its configuration.
    """
    run = config.run.name
    name = config.bus.user if "{role}" in config.bus.user else f"{run}-{{role}}"
    users = role_users(run, [(role, variable(run, role)) for role in (OPERATOR, *ROLES)], name=name)
    block = accounts(users, prefix=f"{run}-")
    text = json.dumps(block, indent=2)
    for user in users:
        # A variable is not quoted.
        text = text.replace(json.dumps(user.password), user.password)
    return f"accounts {text}"


def variable(run: str, role: str) -> str:
    """The variable of a password."""
    letters = "".join(letter if letter.isalnum() else "_" for letter in f"{run}_{role}_password")
    return f"${letters.upper()}"
