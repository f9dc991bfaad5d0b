"""The accounts of a run on nats-server: one that holds its streams, and one for each role.

In NATS an answer goes wherever its asker says. Within one account that lets anybody who may ask anything aim an answer at the API (an empty
one sent to `$JS.API.STREAM.DELETE.<stream>` deletes the stream) or at a key. So a role has an account of its own, which has nothing but
imports of the subjects that the role may ask (`streamrl.bus.permissions`): the answer comes back under that account, where others' subjects
are nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.bus.address import API, ROLE_API
from streamrl.bus.permissions import User

RUN = "RUN"
"""Account of the operator, who makes the streams; they live there."""
FORMER = "$G"
"""Account of all users in runs of streamrl 0.1 before accounts, which is the server's default one."""
PULL_S = 5.0
"""Longest that one request for a task waits at the server."""
_ANSWERS_S = 10
"""How long the way back of an answer of several messages is kept after the last of them. Without a limit nats-server keeps it for good,
0.6 KB a request; it must outlast a pull that waits."""


def accounts(users: Sequence[User], prefix: str = "") -> dict[str, Any]:
    """The `accounts` block of a server's configuration; accounts are called `<prefix>RUN` and `<prefix><role>`.

    Users without limits are in the account of the streams.
    """
    home = prefix + RUN
    roles = [(prefix + user.role, user, user.rights) for user in users if user.rights is not None]
    exports: dict[tuple[str, str], dict[str, Any]] = {}
    for account, _, rights in roles:
        for kind, subjects, more in (
            ("service", rights.asks, {}),
            ("service", rights.batches, {"response_type": "stream", "threshold": f"{_ANSWERS_S}s"}),
            ("stream", rights.hears, {}),
        ):
            for subject in subjects:
                exports.setdefault((kind, subject), {kind: subject, "accounts": []} | more)["accounts"].append(account)
    operators = [_login(user) for user in users if user.rights is None]
    block: dict[str, Any] = {home: {"jetstream": "enabled", "users": operators, "exports": list(exports.values())}}
    for account, user, rights in roles:
        services = [{"service": {"account": home, "subject": subject}, "to": _called(subject)} for subject in rights.asks + rights.batches]
        streams = [{"stream": {"account": home, "subject": subject}} for subject in rights.hears]
        block[account] = {"users": [_login(user)], "imports": services + streams}
    return block


def _login(user: User) -> dict[str, Any]:
    """A user as the server's configuration wants it."""
    login: dict[str, Any] = {"user": user.name, "password": user.password}
    if user.rights is not None:
        hears = [f"{user.inbox}.>", *user.rights.hears]
        asks = [_called(subject) for subject in user.rights.asks + user.rights.batches]
        login["permissions"] = {"publish": {"allow": asks}, "subscribe": {"allow": hears}}
    return login


def _called(subject: str) -> str:
    """What a subject is called in the account of a role."""
    return ROLE_API + subject.removeprefix(API) if subject.startswith(API) else subject
