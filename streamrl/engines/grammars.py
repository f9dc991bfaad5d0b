"""Grammars: which tokens keep a completion within a JSON schema or a regular expression, by llguidance.

A grammar is compiled once, in a thread of its own, within the library's bounds of time and memory; each completion goes through a copy.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.config.check_sampling import grammar_text, short
from streamrl.engines.texts import Texts
from streamrl.errors import EngineError
from streamrl.schemas.tasks import Sampling

KEPT = 64
"""Compiled grammars that an engine keeps."""
MISSING = "install streamrl with the extra grammar: pip install 'streamrl[grammar]'"


class Grammar:
    """One completion's way through its grammar. Not for several threads at once."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._vocab_size = vocab_size

    @property
    def problem(self) -> str:
        """Why it cannot go on, or an empty text."""
        return short(self._matcher.get_error()) if self._matcher.is_error() else ""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[V] tokens that may come next; nothing but the model's end where the text is complete and cannot go on."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: self._vocab_size].view(np.bool_)

    def take(self, token: int) -> None:
        """The token that came."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def copy(self) -> Grammar:
        """Another one at the same place."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)


class Grammars:
    """Compiles the grammars of one engine's requests.

    Args:
        texts: of the model.
        vocab_size: V, of the model's logits.
        eos_ids: tokens that end a completion.
        engine: for messages.
    """

    def __init__(self, texts: Texts, *, vocab_size: int, eos_ids: Sequence[int], engine: str) -> None:
        self._texts = texts
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._engine = engine
        self._tokenizer: Any = None
        self._kept: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._lock = asyncio.Lock()

    async def start(self, sampling: Sampling) -> Grammar:
        """The grammar that `sampling` asks for, at its beginning.

        Raises:
            EngineError: the library or the tokenizer is not there, or the grammar is none, or too large.
        """
        key = (sampling.json_schema, sampling.regex)
        async with self._lock:
            if key not in self._kept:
                await self._texts.load()
                self._kept[key] = await asyncio.to_thread(self._compile, sampling)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key].copy()

    def _compile(self, sampling: Sampling) -> Grammar:
        if not self._eos_ids:
            raise EngineError(f"a grammar needs a token that ends a completion, engine {self._engine} knows none of its model")
        try:
            import llguidance
        except ImportError as error:
            raise EngineError(f"sampling with a grammar needs llguidance, which is not here: {error}", hint=MISSING) from error
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(llguidance, self._texts, self._vocab_size, self._eos_ids)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar_text(sampling), log_level=0)
        grammar = Grammar(matcher, self._vocab_size)
        first = grammar.copy()
        if not first.problem:
            first.allowed()  # it may take long: here nobody waits for it
        if first.problem:
            raise EngineError(f"expected {_said(sampling)}, got: {first.problem}", hint="see docs/sampling.md")
        return grammar


def _said(sampling: Sampling) -> str:
    name = "json_schema" if sampling.json_schema else "regex"
    return f"a grammar in sampling.{name}, such as it is understood, {getattr(sampling, name)[:80]!r}"


def _tokenizer(library: Any, texts: Texts, vocab_size: int, eos_ids: list[int]) -> Any:
    backend = texts.tokenizer
    try:
        return library.LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=eos_ids)
    except ValueError:  # a decoder that the library does not know, such as that of the built models: tokens are their own text
        return library.LLTokenizer(library.TokenizerWrapper(_Plain(backend, vocab_size, eos_ids[0])), n_vocab=vocab_size, eos_token=eos_ids)


class _Plain:
    """A tokenizer whose tokens are texts, as the library asks for one."""

    def __init__(self, backend: Any, vocab_size: int, eos_id: int) -> None:
        added = json.loads(backend.to_str()).get("added_tokens") or ()
        self._backend = backend
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.special_token_ids = [token["id"] for token in added if token.get("special")]
        texts = [backend.decode([token], skip_special_tokens=False) for token in range(vocab_size)]
        # No text, no place in any grammar: 0xFF is in no UTF-8.
        self.tokens = [text.encode() or b"\xff<%d>" % token for token, text in enumerate(texts)]

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._backend.encode(plain, add_special_tokens=False).ids
