"""Rows that are read when their turn comes: as those that are read whole, and whatever cannot be used is named and ends nothing else.

The first tests read files; the others have stand-ins for the file and the tokenizer, and hold every bound from both sides.
"""

import json
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
from streamrl.data.problems import BROKEN, TOO_LONG, WITH_IMAGES, Problem, Unusable, load_problems
from streamrl.data.streamed import Hope, StreamedProblems, open_task_rows, rows_digest, try_rows
from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import ConfigError, DataError
from streamrl.schemas.codec import encode
from streamrl.schemas.tasks import Refused
from tests.support.errors import raises
from tests.support.refusals import refused

BAD = {
    "not JSON": "{",
    "a list": "[1]",
    "a content that is none": '{"prompt": [{"role": "user", "content": null}], "label": "1"}',
    "a role that is a table": '{"prompt": [{"role": {}, "content": "1"}], "label": "1"}',
    "a number beyond the wire": '{"prompt": "1", "label": 1' + "0" * 30 + "}",
    "half a surrogate": '{"prompt": "\\ud800", "label": "1"}',
    "sampling beyond the vocabulary": '{"prompt": "1", "label": "1", "draw": {"logit_bias": {"9999": 1}}}',
    "greedy": '{"prompt": "1", "label": "1", "draw": {"temperature": 0}}',
    "an instruction without kwargs": '{"prompt": "1", "label": "1", "grade": "ifeval", "info": {"instruction_id_list": ["x"]}}',
    "deep": '{"prompt": "1", "label": "1", "info": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
    "large": '{"prompt": "1", "label": "1", "info": {"a": "' + "x" * (5 << 20) + '"}}',
}
GOOD = '{"prompt": "37+8=", "label": "45"}'


def of(path: Path, **data: object) -> Config:
    keys = {"train": str(path), "metadata_key": "info", "sampling_key": "draw", "reward_key": "grade"}
    return convert({"data": keys | data}, where="test")


def rows_of(config: Config, tokenizer: Tokenizer, tmp_path: Path):
    return open_task_rows(config, tokenizer, tmp_path / "kept", vocab_size=104)


def test_they_are_as_those_that_are_read_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1), "info": {"n": n}}) + "\n" for n in range(20)))
    config = of(path)
    whole = load_problems(str(path), config.data, tokenizer)
    rows = rows_of(config, tokenizer, tmp_path)
    assert not isinstance(rows, MixedRows) and rows.take([7, 3, 3, 19]) == whole.take([7, 3, 3, 19])
    assert [rows.order(9, place, shuffle=True) for place in range(45)] == [whole.order(9, place, shuffle=True) for place in range(45)]
    assert isinstance(open_task_rows(of(path, reading="whole"), tokenizer, tmp_path), type(whole))


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_row_that_cannot_be_used_is_named_and_its_neighbours_are_not(tmp_path: Path, tokenizer: Tokenizer, bad: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n{GOOD}\n")
    config = of(path)
    first, found, last = rows_of(config, tokenizer, tmp_path).take([0, 1, 2])
    assert isinstance(first, Problem) and isinstance(last, Problem) and last.line == 4
    assert isinstance(found, Unusable)
    assert (found.row, found.reason) == (1, BROKEN) and "line 3" in found.detail and len(found.detail) <= 500
    assert try_rows(config, tokenizer, tmp_path, vocab_size=104) == [("", [found], 3)]


def test_a_set_of_which_the_first_rows_cannot_be_used_does_not_start(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n" * 300)
    with refused(DataError, "has: label, prompt", "line 1", bad=256, rows=256):
        try_rows(of(path, prompt_key="question"), tokenizer, tmp_path, vocab_size=104)
    assert not (tmp_path / "kept").exists(), "a look at the first rows goes through no file"
    with raises(ConfigError, key="data.chat_template_kwargs"):
        try_rows(of(path, chat_template_kwargs={"enable_thinkng": 1}), tokenizer, tmp_path, vocab_size=104)


def test_a_file_that_was_cut_gives_no_rows_any_more(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n" * 9)
    rows = rows_of(of(path), tokenizer, tmp_path)
    before = rows_digest(of(path))
    path.write_text(f"{GOOD}\n" * 3)
    with raises(DataError, path=str(path)):
        rows.take([0])
    assert rows_digest(of(path)) != before


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

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.asked.append((list(texts), add_special_tokens))
        return [[ord(letter) for letter in text if letter != "~"] for text in texts]

    def check_template_kwargs(self, given: Any) -> None:
        self.asked.append(given)

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
    assert asked == [(0, "file"), (1, "file")] and found == Unusable(row=1, reason=BROKEN, detail="its sampling")


def test_a_row_that_the_file_cannot_give_is_named() -> None:
    rows: Any = Rows(row(), row())
    found = problems(rows)

    def read(number: int) -> Any:
        raise DataError("x" * 499 + "yz")

    rows.read = read
    assert found.take([1]) == [Unusable(row=1, reason=BROKEN, detail="x" * 499 + "y")]


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
