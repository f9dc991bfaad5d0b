"""The reward of the third set, which has no labels."""

from __future__ import annotations

from typing import Any


def vowel(task: Any, episode: Any, *, partial: float = 0.0) -> dict[str, float]:
    """1 for one of the five vowels, `partial` for another letter."""
    answer = episode.completion.strip()
    is_vowel = answer in set("aeiou")
    return {"vowel": float(is_vowel), "letter": partial * (not is_vowel and answer.isalpha() and len(answer) == 1)}
