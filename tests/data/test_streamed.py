"""Rows that are read when their turn comes: as those that are read whole, and whatever cannot be used is named and ends nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from streamrl.config.load import convert
from streamrl.config.tree import Config
from streamrl.data.mixed import MixedRows
from streamrl.data.problems import BROKEN, Problem, Unusable, load_problems
from streamrl.data.streamed import open_task_rows, rows_digest, try_rows
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError, DataError
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
    "deep": '{"prompt": "1", "label": "1", "info": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    "large": '{"prompt": "1", "label": "1", "info": {"a": "' + "x" * (5 << 20) + '"}}',
}
GOOD = '{"prompt": "37+8=", "label": "45"}'


def of(path: Path, **data: object) -> Config:
    keys = {"train": str(path), "metadata_key": "info", "sampling_key": "draw", "reward_key": "grade"}
    return convert({"data": keys | data}, where="test")


def streamed(config: Config, tokenizer: Tokenizer, tmp_path: Path):
    return open_task_rows(config, tokenizer, tmp_path / "kept", vocab_size=104)


def test_they_are_as_those_that_are_read_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1), "info": {"n": n}}) + "\n" for n in range(20)))
    config = of(path)
    whole = load_problems(str(path), config.data, tokenizer)
    rows = streamed(config, tokenizer, tmp_path)
    assert not isinstance(rows, MixedRows) and rows.take([7, 3, 3, 19]) == whole.take([7, 3, 3, 19])
    assert [rows.order(9, place, shuffle=True) for place in range(45)] == [whole.order(9, place, shuffle=True) for place in range(45)]
    assert isinstance(open_task_rows(of(path, reading="whole"), tokenizer, tmp_path), type(whole))


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_row_that_cannot_be_used_is_named_and_its_neighbours_are_not(tmp_path: Path, tokenizer: Tokenizer, bad: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n{GOOD}\n")
    config = of(path)
    first, found, last = streamed(config, tokenizer, tmp_path).take([0, 1, 2])
    assert isinstance(first, Problem) and isinstance(last, Problem) and last.line == 4
    assert isinstance(found, Unusable)
    assert (found.row, found.reason) == (1, BROKEN) and "line 3" in found.detail and len(found.detail) <= 500
    assert try_rows(config, tokenizer, tmp_path, vocab_size=104) == [("", [found], 3)]


def test_a_set_of_which_the_first_rows_cannot_be_used_does_not_start(tmp_path: Path, tokenizer: Tokenizer, characters: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n" * 300)
    with refused(DataError, "has: label, prompt", "line 1", bad=256, rows=256):
        try_rows(of(path, prompt_key="question"), tokenizer, tmp_path, vocab_size=104)
    assert not (tmp_path / "kept").exists(), "a look at the first rows goes through no file"
    base = tmp_path / "base"
    shutil.copytree(characters, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": ""}))
    with raises(DataError, bad=256, rows=256) as caught:
        try_rows(of(path), load_tokenizer(base), tmp_path, vocab_size=104)
    assert "data.chat_template = false" in caught.value.hint, "what is wrong with all of them says what to do"
    with raises(ConfigError, key="data.chat_template_kwargs"):
        try_rows(of(path, chat_template_kwargs={"enable_thinkng": 1}), tokenizer, tmp_path, vocab_size=104)


def test_a_file_that_was_cut_gives_no_rows_any_more(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n" * 9)
    rows = streamed(of(path), tokenizer, tmp_path)
    before = rows_digest(of(path))
    path.write_text(f"{GOOD}\n" * 3)
    with raises(DataError, path=str(path)):
        rows.take([0])
    assert rows_digest(of(path)) != before
