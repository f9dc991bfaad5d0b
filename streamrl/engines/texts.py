"""The text of tokens inside an engine: read from the model directory's tokenizer when the first request asks for it, and stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from streamrl.errors import EngineError

Decode = Callable[[Sequence[int]], str]
_GUARD = 8
"""Characters at the beginning of a window that are not relied on: it may begin within a character."""


class Texts:
    """Tokens of one model as text. `tokenizer.json` is read once, in a thread of its own."""

    def __init__(self, model_dir: Path, *, engine: str) -> None:
        self.path = model_dir / "tokenizer.json"
        self._engine = engine
        self._lock = asyncio.Lock()

    async def load(self) -> Decode:
        """What turns token ids into text, special tokens written out; raises EngineError when there is no tokenizer."""
        async with self._lock:
            await asyncio.to_thread(lambda: self.tokenizer)
        return self.decode

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out; ids without a token give nothing."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The backend."""
        try:
            return tokenizers.Tokenizer.from_str(self.path.read_text(encoding="utf-8"))
        except Exception as error:  # the Rust library raises plain Exception
            raise EngineError(
                f"expected a tokenizer in {self.path}, which sampling.stop and grammars need at engine {self._engine}, got: {error}",
                hint="put the model's tokenizer.json there, or use stop_token_ids",
                path=str(self.path),
            ) from error


class StopText:
    """Looks for stop strings in the text of a completion while it grows, wherever tokens begin and end.

    A window of the last tokens is decoded after each: long enough for the longest stop string, whatever was before it. A stop string that
    ends within a token, or begins in one and ends in another, is found with the token that completes it.

    Args:
        decode: see `Texts`.
        stops: at least one text, none of them empty.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self.window: list[int] = []

    def take(self, token: int) -> str:
        """The next token; returns the stop string that it completes, the one that begins first, or an empty text."""
        self.window.append(token)
        text = self._decode(self.window)
        found = first_stop(text, self._stops)
        if found is not None:
            return found[1]
        if len(text) > 4 * self._longest + 8 * _GUARD:
            half = self.window[len(self.window) // 2 :]
            # Tokens of little or no text may be many: then the window grows for a while.
            if len(self._decode(half)) >= self._longest + _GUARD:
                self.window = half
        return ""


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string of a text begins, and which it is (the longest of those that begin there); None without one."""
    found = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    at, _, stop = min(found)
    return at, stop
