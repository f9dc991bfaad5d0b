r"""Where a completion's answer stands, and what the label of a row says: text in, text out, in linear time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.rewards.protocol import ScoredEpisode
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{}` or `\fbox{}` holds; None where there is none, and where the last one is not closed."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    found = boxes[-1]
    depth = 1
    for brace in _BRACES.finditer(text, found.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped one is part of the answer
        if depth == 0:
            return text[found.end() : brace.start()].strip()
    return None


def without_reasoning(text: str) -> str | None:
    """What stands behind the last `</think>`, or the whole; None where reasoning begins and does not end."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return None if "<think>" in text else text


def labels(task: RolloutTask) -> list[str]:
    r"""The answers that are right: the label, or each of a list of them; of a boxed one what the box holds, of `... #### 72` 72.

    Raises:
        SchemaError: the row has none, or one that is neither text nor number.
    """
    given = task.label if isinstance(task.label, list | tuple) else [task.label]
    found = [_label(one, task) for one in given]
    if not found:
        raise SchemaError(f"row {task.row} has an empty list of labels, a right answer is needed", row=task.row)
    return found


def _label(given: Any, task: RolloutTask) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        hint = "data.label_key names the field with the right answer"
        raise SchemaError(f"row {task.row}: expected a text or a number as label, got {type(given).__name__}", hint=hint, row=task.row)
    text = str(given)
    box = last_box(text)
    return box if box is not None else text.rpartition("####")[2].strip()


class BoxedEpisode(msgspec.Struct, frozen=True):
    """An episode whose completion is what its last box holds; the empty text where there is none."""

    episode: ScoredEpisode

    @property
    def rollout(self) -> int:
        return self.episode.rollout

    @property
    def completion(self) -> str:
        return last_box(without_reasoning(self.episode.completion) or "") or ""

    @property
    def turns(self) -> Sequence[str]:
        return (*self.episode.turns[:-1], self.completion)

    @property
    def agent(self) -> str:
        return self.episode.agent

    @property
    def status(self) -> Status:
        return self.episode.status

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.episode.metadata
