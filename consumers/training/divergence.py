"""When batches that the policy learns nothing from are no accident any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from streamrl.errors import ConfigError, StreamRLError, WeightsDiverged
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import MEND, StepResult

_SAID = {"infinite": "a gradient that is not finite, and its update is left out", "none": "no gradient", "zero": "no gradient"}


class Divergence:
    """Counts batches that gave no gradient though one was due, or one that is not finite, and says so.

    One may be a bad sample's fault. Each that gave a gradient makes up for one that did not, so seven in eight are too many, too. A batch
    of which all is clipped, or whose advantages are all 0, is no fault, and only said.

    Args:
        most: so many more of them than of the others end the run (`trainer.max_unlearned`); 0: none do.
        say: told of the first, second, fourth, eighth ... of each sort.
    """

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        self._most = most
        self._say = say
        self._excess = 0
        self._seen: Counter[str] = Counter()

    def check(self, version: Version, result: StepResult) -> None:
        """Take note of the batch that made `version`.

        Raises:
            WeightsDiverged: it is one too many, and the weights or samples are why.
            ConfigError: the same, and a function of the user's is why.
        """
        sort = unlearned(result) or result.gradient
        self._excess = max(0, self._excess + (1 if unlearned(result) else -1))
        if sort not in _SAID:
            return
        self._seen[sort] += 1
        count = self._seen[sort]
        why = f": {result.fault}" if result.fault else ""
        if count & (count - 1) == 0:
            so_far = f"; {count} such batches so far" if count > 1 else ""
            self._say(f"the batch of version {version} had {_SAID[sort]}{why}{so_far}")
        if unlearned(result) and 0 < self._most <= self._excess:
            raise self._error(version, sort, result)

    def _error(self, version: Version, sort: str, result: StepResult) -> StreamRLError:
        counted = f"up to version {version}, {self._excess} more batches had {_SAID[sort]} than gave the policy something"
        named = {"version": str(version), "key": "trainer.max_unlearned"}
        if result.fault:
            return ConfigError(f"{counted}: {result.fault}", hint="mend that function; trainer.max_unlearned = 0 goes on", **named)
        return WeightsDiverged(f"the weights diverged: {counted}", hint=MEND, **named)


def unlearned(result: StepResult) -> str:
    """Why the policy has learnt nothing of a batch, where that is a fault: `infinite` or `none`; empty: it has, or it is none."""
    if not result.finite:
        return "infinite"
    return "none" if result.gradient == "none" else ""
