"""Streamed rows with stand-ins for the file and the tokenizer: what is asked of them, and every bound from both sides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.config.load import convert
from streamrl.config.tree import Config, DataConfig
from streamrl.data import streamed
from streamrl.data.mixed import MixedRows
from streamrl.data.problems import BROKEN, TOO_LONG, WITH_IMAGES, Problem, Unusable
from streamrl.data.streamed import Hope, StreamedProblems, open_task_rows, rows_digest, try_rows
from streamrl.errors import DataError
from streamrl.schemas.codec import encode
from streamrl.schemas.tasks import Refused
from tests.support.errors import raises

MOST = 4 << 20


class Rows:
    """A file of rows; the k-th stands on line 10 + k."""

    path, digest = "file", "its digest"

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows
        self.checks = 0

    def __len__(self) -> int:
        return len(self.rows)

    def check(self) -> None:
        self.checks += 1

    def read(self, row: int) -> dict[str, Any]:
        return self.rows[row]

    def line(self, row: int) -> int:
        return 10 + row

    def order(self, seed: int, place: int, *, shuffle: bool) -> Any:
        return seed, place, shuffle


class Letters:
    """A token a letter, none for a tilde; tells what it was asked."""

    chat_template = "the contents"

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.asked.append((list(texts), add_special_tokens))
        return [[ord(letter) for letter in text if letter != "~"] for text in texts]

    def check_template_kwargs(self, given: Any) -> None:
        self.asked.append(given)

    def check_shown(self, messages: Any, tools: Any = None, template_kwargs: Any = None) -> None: ...

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(message["content"] for message in messages)


CONFIG = DataConfig(train="x", chat_template=False, max_prompt_tokens=5, metadata_key="info", tools_key="tools")


def problems(*rows: Any, config: DataConfig = CONFIG, tokenizer: Letters | None = None, **options: Any) -> StreamedProblems:
    own = rows[0] if isinstance(rows[0], Rows) else Rows(*rows)
    return StreamedProblems(cast(Any, own), config, cast(Any, tokenizer or Letters()), **options)


def row(prompt: str = "ab", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "label": "1", **fields}


def test_rows_are_read_in_their_order_and_the_file_is_looked_at_before_and_after() -> None:
    rows, tokenizer = Rows(row("ab"), row("~"), row("abcde"), row("abcdef")), Letters()
    found = problems(rows, tokenizer=tokenizer)
    assert (found.digest, len(found), found.order(1, 2, shuffle=True)) == ("its digest", 4, (1, 2, True))
    first, broken, long, last, again = found.take([0, 1, 3, 2, 0])
    assert first == again == Problem(row=0, line=10, prompt_ids=(97, 98), prompt="ab", label="1")
    assert isinstance(last, Problem) and last.prompt_ids == (97, 98, 99, 100, 101)
    assert isinstance(broken, Unusable) and (broken.row, broken.reason) == (1, BROKEN)
    assert "file line 11" in broken.detail and "prompt" in broken.detail
    assert long == Unusable(row=3, reason=TOO_LONG, detail="expected a prompt of at most 5 tokens at file line 13, got 6")
    assert rows.checks == 2 and tokenizer.asked == [(["ab", "~", "abcdef", "abcde", "ab"], True)]


def test_a_chat_template_is_asked_about_its_variables_and_writes_its_own_special_tokens() -> None:
    config = replace(CONFIG, chat_template=True, chat_template_kwargs={"a": 1})
    tokenizer = Letters()
    problems(row([{"role": "user", "content": "ab"}]), config=config, tokenizer=tokenizer).take([0])  # type: ignore[arg-type]
    assert tokenizer.asked == [{"a": 1}, (["ab"], False)]


def test_a_row_s_own_check_is_asked_with_its_file() -> None:
    asked: list[Any] = []

    def check(problem: Problem, path: str) -> None:
        asked.append((problem.row, path))
        if problem.row:
            raise DataError("its sampling")

    _, found = problems(row(), row(), sampling=cast(Any, check)).take([0, 1])
    assert asked == [(0, "file"), (1, "file")] and found == Unusable(row=1, reason=BROKEN, detail="file line 11: its sampling")


def test_a_row_that_the_file_cannot_give_is_named() -> None:
    rows: Any = Rows(row(), row())
    found = problems(rows)

    def read(number: int) -> Any:
        raise DataError("x" * 499 + "yz")

    rows.read = read
    assert found.take([1]) == [Unusable(row=1, reason=BROKEN, detail="file line 11: " + "x" * 486)]


@pytest.mark.parametrize("field", ["prompt", "label", "info", "tools"])
@pytest.mark.parametrize("more", [0, 1])
def test_what_a_row_holds_has_to_fit_a_task(field: str, more: int) -> None:
    def filled(text: str) -> dict[str, Any]:
        values = {"prompt": "ab", "label": "1", "info": {"a": ""}, "tools": [{"type": "function", "function": {"name": "f"}}]}
        values[field] = {"info": {"a": text}, "tools": [{"type": "function", "function": {"name": text}}]}.get(field, text)
        return values

    def size(values: dict[str, Any]) -> int:
        return len(encode((values["prompt"], values["label"], values["tools"], values["info"], None)))

    big = "x" * (MOST - 1000)
    big += "x" * (MOST - size(filled(big)) + more)
    assert size(filled(big)) == MOST + more
    [found] = problems(filled(big), config=replace(CONFIG, max_prompt_tokens=1 << 30)).take([0])
    if not more:
        assert isinstance(found, Problem)
        return
    said = f"expected a row for a task at file line 10, got values of {MOST + 1} bytes, of which at most {MOST} fit a task"
    assert found == Unusable(row=0, reason=BROKEN, detail=said)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), AttributeError("x"), KeyError("x"), RecursionError("x"), TypeError("x"), ValueError("x")]
)
def test_whatever_a_template_raises_is_the_row_s(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> str:
        raise error

    monkeypatch.setattr(streamed, "problem_text", fails)
    [found] = problems(row()).take([0])
    said = f"expected a row for a task at file line 10, got values that cannot be used: {type(error).__name__}: {error}"
    assert found == Unusable(row=0, reason=BROKEN, detail=said)
    with raises(DataError, line=10):
        cast(Any, problems(row()))._text(Problem(row=0, line=10, prompt_ids=(), prompt="x"))


def test_a_surrogate_and_what_the_wire_does_not_take_are_the_row_s() -> None:
    for bad in (row("\ud800"), row(label=1 << 80), row(label=object())):
        [found] = problems(bad).take([0])
        assert isinstance(found, Unusable) and found.reason == BROKEN and msgspec.to_builtins(found)["row"] == 0


def tree(path: Path, **data: Any) -> Config:
    return convert({"data": {"train": str(path), "chat_template": False, **data}}, where="test")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two sets: of 258 rows, the last of which are broken, and of one."""
    good = '{"prompt": "ab", "label": "1", "images": null}\n'
    (tmp_path / "one.jsonl").write_text(good * 255 + "[1]\n" * 3)
    (tmp_path / "two.jsonl").write_text('{"prompt": "abc", "label": "1"}\n')
    return tmp_path


def sources(files: Path) -> Config:
    each = [{"name": name, "train": str(files / f"{name}.jsonl"), "weight": 1.0} for name in ("one", "two")]
    return convert({"data": {"chat_template": False, "sources": each}}, where="test")


def test_the_first_rows_of_each_set_are_tried(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    take = StreamedProblems.take

    def told(self: StreamedProblems, rows: Sequence[int]) -> Any:
        taken.append(list(rows))
        return take(self, rows)

    monkeypatch.setattr(StreamedProblems, "take", told)
    tokenizer = cast(Any, Letters())
    [(name, unusable, tried)] = try_rows(tree(files / "one.jsonl"), tokenizer, files / "kept", vocab_size=200)
    assert (name, [one.row for one in unusable], tried, taken) == ("", [255], 256, [list(range(256))])
    found = try_rows(sources(files), tokenizer, files / "kept", vocab_size=200)
    assert [(name, len(unusable), tried) for name, unusable, tried in found] == [("one", 1, 256), ("two", 0, 1)]
    taken.clear()
    images = tree(files / "one.jsonl", images_key="images")
    try_rows(images, tokenizer, files / "kept", vocab_size=200)
    assert taken == [list(range(first, first + WITH_IMAGES)) for first in range(0, 256, WITH_IMAGES)]


def test_the_sets_of_a_run(files: Path) -> None:
    tokenizer = cast(Any, Letters())
    one = open_task_rows(tree(files / "one.jsonl"), tokenizer, files / "kept")
    assert isinstance(one, StreamedProblems) and len(one) == 258
    both = open_task_rows(sources(files), tokenizer, files / "kept")
    assert isinstance(both, MixedRows)
    digest = rows_digest(sources(files))
    assert digest.startswith("blocks:") and len(digest) == 71 != len(rows_digest(tree(files / "two.jsonl"))) + 1
    assert rows_digest(tree(files / "one.jsonl")) != rows_digest(tree(files / "two.jsonl")) != digest


@pytest.mark.parametrize(("rows", "bad", "given_up"), [(1000, 950, False), (1000, 951, True), (20, 19, False), (20, 20, True)])
def test_hope_from_both_sides_of_its_bound(rows: int, bad: int, given_up: bool) -> None:
    hope = Hope(min(rows, 5000))
    hope.tell(rows - 1, [Refused("a", "first")] * (bad - 1))
    if not given_up:
        hope.tell(1, [Refused("b", "last")])
        hope.tell(rows - 1, [Refused("a", "x")] * (rows - 1))  # a window begins anew
        return
    with raises(DataError, bad=bad, rows=rows, reason="b") as caught:
        hope.tell(1, [Refused("b", "last")])
    assert caught.value.message.endswith("one of them: last") and str(caught.value.hint).startswith("name the right fields in [data]")
