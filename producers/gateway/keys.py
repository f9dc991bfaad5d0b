"""Session keys: who holds one may make calls for one rollout. Checked without a look at any store, by every gateway of the run.

```text
sk-<task>.<rollout>.<nonce>.<HMAC-SHA256 of run, task, rollout and nonce, under a secret made from the gateway's key>
```
"""

from __future__ import annotations

import hmac
import re
import secrets
from hashlib import sha256

import msgspec

_FORM = re.compile(r"sk-(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,8})\.([0-9a-f]{16})\.([0-9a-f]{40})", re.ASCII)


class SessionKey(msgspec.Struct, frozen=True):
    """What a key says."""

    task: int
    rollout: int
    nonce: str


class Keys:
    """Makes and checks the keys of a run's sessions.

    Args:
        gateway_key: of the run; another one makes all keys invalid.
        run: name of the run.
    """

    def __init__(self, gateway_key: str, run: str) -> None:
        self._gateway_key = gateway_key.encode()
        self._secret = hmac.digest(self._gateway_key, b"streamrl sessions 1", "sha256")
        self._run = run

    def opens(self, given: str) -> bool:
        """Whether `given` is the gateway's own key."""
        return hmac.compare_digest(given.encode(errors="replace"), self._gateway_key)

    def make(self, task: int, rollout: int, nonce: str) -> str:
        """The key of a session."""
        return f"sk-{task}.{rollout}.{nonce}.{self._mark(task, rollout, nonce)}"

    def read(self, text: str) -> SessionKey | None:
        """What a key says; None: nobody has made it for this run."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        task, rollout, nonce = int(found[1]), int(found[2]), found[3]
        return SessionKey(task, rollout, nonce) if hmac.compare_digest(found[4], self._mark(task, rollout, nonce)) else None

    def _mark(self, task: int, rollout: int, nonce: str) -> str:
        return hmac.new(self._secret, f"{self._run}/{task}/{rollout}/{nonce}".encode(), sha256).hexdigest()[:40]


def new_nonce() -> str:
    """For a session."""
    return secrets.token_hex(8)
