"""A user's function that weighs the sources anew as the run goes on: asked in a process of its own, used once its verdict is on record.

```text
ledger entries of the last versions -> statistics -> FILE:NAME in a child -> weights -> a segment under the key `mixture`
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import stretch
from streamrl.config.curriculum import CURRICULUM
from streamrl.config.plugins import check_form, resolve
from streamrl.config.tree import Config
from streamrl.errors import ConfigError, LogTruncated
from streamrl.producers.mixture import scheduled
from streamrl.runtime.kinds import environment, inherited
from streamrl.runtime.service import die_with_parent
from streamrl.schemas.codec import decode
from streamrl.schemas.control import MixtureSegment
from streamrl.schemas.ledger import LedgerEntry, SourceTally
from streamrl.schemas.subjects import LEDGER, Subjects

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""How long the function may take, the import of its file included."""
_ANSWER_BYTES = 1 << 20


class Curriculum:
    """Asks the function every `data.curriculum_every` versions. Until it has answered, and where it fails, the weights stay as they are.

    Args:
        bus: connected; the ledger is read there.
        subjects: of the run.
        config: the whole tree.
        limit_s: see LIMIT_S.
    """

    def __init__(self, bus: Bus, subjects: Subjects, config: Config, *, limit_s: float = LIMIT_S) -> None:
        self.error = ""
        """Why the newest call has given no weights; empty: it has, or there was none."""
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._limit_s = limit_s
        self._verdict: tuple[float, ...] | None = None
        self._asked = 0
        self._asking: asyncio.Task[None] | None = None

    def weights(self, last: MixtureSegment | None, version: int) -> tuple[float, ...]:
        """Those that tasks granted at `version` are to have, after the segment `last`; begins a call where one is due."""
        if last is None:
            return scheduled(self._config, version)
        due = version // self._config.data.curriculum_every
        if due > max(self._asked, last.version // self._config.data.curriculum_every) and (self._asking is None or self._asking.done()):
            self._asked = due
            self._asking = asyncio.create_task(self._ask(version, self._verdict or last.weights))
        return self._verdict or last.weights

    async def close(self) -> None:
        """End a call that is under way."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, version: int, weights: Sequence[float]) -> None:
        names = [one.name for one in self._config.data.sources]
        try:
            asked = statistics(await self._entries(version), dict(zip(names, weights, strict=True)))
            said = await call(self._config, {"version": version, "sources": asked}, self._limit_s)
            self._verdict, self.error = checked(said, names), ""
        except (ConfigError, LogTruncated) as error:
            self.error = f"data.curriculum at version {version}: {error.message}"
            logger.warning("event=curriculum_failed version=%d action=weights_stay error=%s", version, error.message)

    async def _entries(self, version: int) -> list[LedgerEntry]:
        """Of the last `data.curriculum_every` versions up to this one."""
        subject, first = self._subjects.ledger(self._config.trainer.name), version - self._config.data.curriculum_every
        state = await self._bus.state(LEDGER)
        begin = max(state.first, state.last - 4 * self._config.data.curriculum_every, 1)
        found = [
            decode(message.body, LedgerEntry, where="the ledger")
            async for message in stretch(self._bus, LEDGER, first=begin, last=state.last, subject=subject)
        ]
        return [entry for entry in found if first < entry.version.number <= version]


def statistics(entries: Iterable[LedgerEntry], weights: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """By source: its weight now, `groups` trained by these entries, and the mean `reward` of those, None where there is none."""
    told: dict[str, list[SourceTally]] = {name: [] for name in weights}
    for entry in entries:
        for name, tally in (entry.sources or {}).items():
            if name in told:
                told[name].append(tally)
    found: dict[str, dict[str, float | None]] = {}
    for name, tallies in told.items():
        rewarded = [(tally.groups, tally.reward) for tally in tallies if tally.reward is not None]
        total = sum(groups for groups, _ in rewarded)
        reward = sum(groups * reward for groups, reward in rewarded) / total if total else None
        found[name] = {"weight": weights[name], "groups": sum(tally.groups for tally in tallies), "reward": reward}
    return found


def checked(said: Any, names: Sequence[str]) -> tuple[float, ...]:
    """What the function has returned, as weights; raises ConfigError unless it is a number of at least 0 for each source, one above 0."""
    given: dict[str, Any] = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    weights = tuple(float(one) for one in given.values() if type(one) in (int, float) and 0 <= one < math.inf)
    if set(given) != set(names) or len(weights) < len(names) or not 0 < sum(weights) < math.inf:
        raise ConfigError(
            f"expected a weight of at least 0 for each of {', '.join(names)}, and one above it, got {str(said)[:200]}",
            hint="return a dict of numbers by source",
            key="data.curriculum",
        )
    return tuple(float(given[name]) for name in names)


async def call(config: Config, asked: Mapping[str, Any], limit_s: float) -> Any:
    """What the function returns for `asked`, from a process of its own, which is killed with all it has started.

    Raises ConfigError where it fails, takes longer than `limit_s`, or answers with more than 1 MiB.
    """
    surroundings = {**inherited(os.environ, "producer"), **environment(config, "producer")}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "streamrl.producers.curriculum", config.data.curriculum, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=surroundings,
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None
    answer = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            child.stdin.write(msgspec.json.encode(asked))
            child.stdin.close()
            while len(answer) <= _ANSWER_BYTES and (part := await child.stdout.read(_ANSWER_BYTES)):
                answer += part
        said = msgspec.json.decode(bytes(answer), type=dict[str, Any])
    except TimeoutError as error:
        raise _failed(f"no answer within {limit_s:g} s") from error
    except (msgspec.MsgspecError, RecursionError, ConnectionError) as error:
        raise _failed("a process that ended without an answer") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    if "error" in said:
        raise _failed(str(said["error"])[:500])
    return said.get("weights")


def _failed(got: str) -> ConfigError:
    return ConfigError(f"expected weights, got {got}", hint="mend the function; weights stay as they are until then", key="data.curriculum")


def _main(reference: str, parent: str) -> None:
    """The child: one question on stdin, one answer on what was stdout; what the user's code prints goes nowhere."""
    die_with_parent(int(parent))
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asked = msgspec.json.decode(sys.stdin.buffer.read())
    try:
        function = resolve(reference, what=CURRICULUM.what, key=CURRICULUM.key)
        check_form(CURRICULUM, reference, function)
        weights = function(asked["version"], asked["sources"])
        if isinstance(weights, dict):  # JSON has no NaN: as a text it is refused by its name
            weights = {name: str(one) if isinstance(one, float) and not math.isfinite(one) else one for name, one in weights.items()}
        body = msgspec.json.encode({"weights": weights})
    except Exception as error:  # whatever the user's code raises is its answer
        frame = traceback.extract_tb(error.__traceback__)[-1]
        body = msgspec.json.encode({"error": f"{type(error).__name__}: {error} ({Path(frame.filename).name} line {frame.lineno})"})
    answer.write(body)
    answer.close()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
