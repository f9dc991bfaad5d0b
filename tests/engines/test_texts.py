"""Stop strings in the text of growing completions: against a search of the whole text after every token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.data.byte_pairs import write_byte_pairs
from streamrl.data.characters import write_tokenizer
from streamrl.engines.texts import StopText, Texts, first_stop
from streamrl.errors import EngineError
from tests.support.errors import raises

TEXTS = ["the answer is 42", "über die Straße", "日本語のテキスト", "</answer>", "\n\nObservation:", "🙂🙃", "stop stop"] * 3


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Of 300 tokens of bytes: characters of several bytes take several tokens, and words take one."""
    directory = tmp_path_factory.mktemp("pairs")
    assert write_byte_pairs(directory, TEXTS, vocab_size=300) == 300
    return Texts(directory, engine="e")


def ended_at(texts: Texts, ids: list[int], stops: list[str]) -> int | None:
    """The token that completes the first stop string, found the slow way; None where none is."""
    return next((at for at in range(len(ids)) if any(stop in texts.decode(ids[: at + 1]) for stop in stops)), None)


def watched(texts: Texts, ids: list[int], stops: list[str]) -> tuple[int | None, str]:
    watch = StopText(texts.decode, stops)
    for at, token in enumerate(ids):
        if stop := watch.take(token):
            return at, stop
    return None, ""


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(texts: Texts, data: st.DataObject) -> None:
    words = st.lists(st.sampled_from([*TEXTS, " ", "x"]), min_size=1, max_size=12).map("".join)
    text = data.draw(words)
    ids = texts.tokenizer.encode(text).ids
    if data.draw(st.booleans()):
        ids = data.draw(st.lists(st.integers(0, 310), max_size=60))  # whatever a model may draw, ids without a token too
    whole = texts.decode(ids) or "x"
    start = data.draw(st.integers(0, len(whole) - 1))
    inside = whole[start : start + data.draw(st.integers(1, 9))]
    stops = [inside, *data.draw(st.lists(st.sampled_from(["never", "42", "ß", "🙂", "\n\n"]), max_size=2))]
    at, stop = watched(texts, ids, stops)
    assert at == ended_at(texts, ids, stops)
    assert at is None or stop == first_stop(texts.decode(ids[: at + 1]), stops)[1]  # type: ignore[index]


def test_a_stop_string_that_is_never_completed_ends_nothing_and_costs_no_memory(texts: Texts) -> None:
    watch = StopText(texts.decode, ["</answer>!"])
    ids = texts.tokenizer.encode("</answer>").ids
    for _ in range(200):
        assert not any(watch.take(token) for token in ids)
    assert len(watch.window) < 200
    # Tokens without a text between its parts do not hide it.
    assert not any(watch.take(token) for token in [*ids, *([305] * 500)])
    assert any(watch.take(token) for token in texts.tokenizer.encode("!").ids)


def test_the_first_stop_string_counts_and_of_two_that_begin_together_the_longer() -> None:
    assert first_stop("abcd", ["cd", "bc"]) == (1, "bc")
    assert first_stop("abcd", ["b", "bcd", "bc"]) == (1, "bcd")
    assert first_stop("abcd", ["x"]) is None


async def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with raises(EngineError, path=str(tmp_path / "tokenizer.json")):
        await Texts(tmp_path, engine="e").load()
    (tmp_path / "tokenizer.json").write_text('{"version":')
    with raises(EngineError, path=str(tmp_path / "tokenizer.json")):
        await Texts(tmp_path, engine="e").load()
    write_tokenizer(tmp_path)
    fresh = Texts(tmp_path, engine="e")
    one, other = await asyncio.gather(fresh.load(), fresh.load())
    assert one([40]) == other([40]) and isinstance(fresh.tokenizer, tokenizers.Tokenizer)
    assert one([5]) == "<|end|>", "special tokens are written out"
