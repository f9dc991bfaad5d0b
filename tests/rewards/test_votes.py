from __future__ import annotations

import pytest

from streamrl.producers.episode import Episode, Segment
from streamrl.rewards.votes import answer_of
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version


@pytest.mark.parametrize(
    ("kind", "text", "left", "answer"),
    [
        ("exact_match", " 7 \n", {}, "7"),
        ("exact_match", "  ", {}, None),
        ("gsm8k", "so it is #### 1,234.0", {}, "1234"),
        ("gsm8k", "the answer is 1234", {}, "1234"),
        ("gsm8k", "I do not know", {}, None),
        ("math", "so \\boxed{7}", {}, "7"),
        ("gpqa", "It is A or C. The answer is (B).", {}, "B"),
        ("gpqa", "I think so", {}, None),
        ("dapo", "It is 3 + 4.\nAnswer: $7$", {}, "7"),
        ("dapo", "7", {}, None),
        ("mine.py:grade", "long text", {"answer": "B"}, "B"),
        ("mine.py:grade", "long text", {"answer": 3}, "3"),
        ("mine.py:grade", "long text", {"answer": [3]}, "long text"),
    ],
)
def test_what_a_completion_votes_for(kind: str, text: str, left: dict[str, object], answer: str | None) -> None:
    segments = (Segment([1]), Segment([2], [-0.1], (VersionSpan(1, Version()),)))
    episode = Episode(segments=segments, finish_reason="stop", turns=(text,), metadata=left)
    assert answer_of(kind, episode, {}) == answer
