"""Rows of a file, and the problems that are made of them."""

import json

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.load import convert, load
from streamrl.config.tree import DataConfig
from streamrl.data.characters import write_tokenizer
from streamrl.data.problems import load_problems
from streamrl.data.rows import digest, open_rows
from streamrl.data.streamed import check_rows
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError, DataError
from streamrl.schemas.tasks import RewardSpec
from tests.support.chat_templates import family
from tests.support.errors import raises
from tests.support.refusals import refused

SUMS = [{"prompt": f"{i}+1=", "label": str(i + 1), "metadata": {"n": i}} for i in range(10)]


@pytest.fixture
def write(tmp_path):
    def _write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return _write


@pytest.fixture
def jsonl(write):
    return write(*SUMS)


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(SUMS), path, row_group_size=3)
    return path


@pytest.fixture(params=["jsonl", "parquet"])
def path(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("", slice(None)),
        ("@[0:3]", slice(0, 3)),
        ("@[4:]", slice(4, None)),
        ("@[:2]", slice(None, 2)),
        ("@[-3:]", slice(-3, None)),
        ("@[:-4]", slice(None, -4)),
        ("@[-5:-2]", slice(-5, -2)),
        ("@[7:100]", slice(7, 100)),
        ("@[:]", slice(None)),
    ],
)
def test_slices_are_those_of_a_list(path, suffix, expected):
    rows = open_rows(f"{path}{suffix}")
    assert list(rows) == SUMS[expected]
    assert [rows[i] for i in range(len(rows))] == SUMS[expected]
    assert [rows.line(i) for i in range(len(rows))] == list(range(1, 11))[expected]


def test_the_digest_is_of_contents_order_and_values(jsonl, parquet, tmp_path):
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_text("\r\n\r\n".join(json.dumps(dict(reversed(row.items())), indent=None) for row in SUMS))
    assert digest(open_rows(str(jsonl))) == digest(open_rows(str(parquet))) == digest(open_rows(str(spaced)))
    assert digest(open_rows(f"{jsonl}@[0:9]")) != digest(open_rows(str(jsonl)))
    assert digest(open_rows(f"{jsonl}@[1:3]")) == digest(open_rows(f"{parquet}@[1:3]"))

    def of(rows):
        path = tmp_path / "one.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return digest(open_rows(str(path)))

    assert len({of(SUMS), of(SUMS[::-1]), of([*SUMS[:-1], {**SUMS[-1], "label": "x"}]), of(SUMS[:-1])}) == 4


def test_files_of_any_ending_and_of_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')
    assert list(open_rows(str(path))) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a":\n{"a": 2}\n3\n')
    with raises(DataError, path=str(path), line=2, bad=2):
        open_rows(str(path))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 not really")
    for name in ("none.jsonl", "rows.parquet"):
        with raises(DataError, path=str(tmp_path / name)):
            open_rows(str(tmp_path / name))


@pytest.mark.parametrize("broken", ['{"prompt": "1', "[1, 2]", "3", '{"a": 1} {"b": 2}', '{"a": "\udcff"}'])
def test_a_broken_line_is_named(tmp_path, broken):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f'{{"prompt": "1"}}\n\n{broken}\n{{"prompt": "2"}}\n'.encode(errors="surrogateescape"))
    with raises(DataError, path=str(path), line=3):
        open_rows(str(path))
    assert list(open_rows(f"{path}@[0:1]")) == [{"prompt": "1"}]


def test_no_rows(jsonl, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for text in (f"{jsonl}@[10:]", f"{jsonl}@[5:5]", str(tmp_path / "empty.jsonl")):
        with raises(DataError, path=text.partition("@")[0], rows=0):
            open_rows(text)


GOOD = {"prompt": "1", "label": "1"}


def test_a_string_is_one_user_message(write, tokenizer):
    [problem] = load_problems(write({"prompt": "37+8=", "label": "45"}), DataConfig(), tokenizer)
    assert tokenizer.decode(problem.prompt_ids) == "<|user|>37+8=<|end|><|assistant|>"
    assert (problem.label, problem.row, problem.line, problem.prompt) == ("45", 0, 1, "37+8=")
    [bare] = load_problems(write({"prompt": "37+8="}), DataConfig(chat_template=False, label_key=""), tokenizer)
    assert (tokenizer.decode(bare.prompt_ids), bare.label) == ("37+8=", None)


def test_messages_tools_and_metadata(write, tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write({"chat": messages, "answer": 3, "info": {"level": 1}, "functions": [{"name": "f"}]})
    config = DataConfig(prompt_key="chat", label_key="answer", metadata_key="info", tools_key="functions")
    problem = load_problems(path, config, tokenizer)[0]
    assert tokenizer.decode(problem.prompt_ids) == '<|system|>[{"name": "f"}]<|end|><|system|>s<|end|><|user|>u<|end|><|assistant|>'
    assert (problem.label, problem.metadata, problem.tools, problem.prompt) == (3, {"level": 1}, [{"name": "f"}], messages)


def test_long_prompts_are_left_out_and_counted(write, tokenizer, caplog):
    path = write(*({"prompt": "1" * n, "label": str(n)} for n in (50, *range(1, 11))))
    problems = load_problems(path, DataConfig(max_prompt_tokens=7), tokenizer)
    assert [(problem.row, problem.line, problem.label) for problem in problems.problems] == [(i, i + 2, str(i + 1)) for i in range(4)]
    assert problems.num_too_long == 7 and "too_long=7" in caplog.text
    places = f"{path} line 1, {path} line 6, {path} line 7"
    assert problems.left_out("data.train", 7).startswith("data.train: 7 of 11 rows")
    assert problems.left_out("data.train", 7).endswith(f"the first: {places}")
    assert problems.digest == load_problems(path, DataConfig(), tokenizer).digest, "it does not depend on the filter"
    with raises(DataError, max_prompt_tokens=3):
        load_problems(path, DataConfig(max_prompt_tokens=3), tokenizer)


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ({"prompt": "1"}, {"key": "data.label_key", "got": "NoneType"}),
        ({"prompt": "1", "label": None}, {"key": "data.label_key", "got": "NoneType"}),
        ({"label": "1"}, {"key": "data.prompt_key", "got": "NoneType"}),
        ({"prompt": 3, "label": "1"}, {"key": "data.prompt_key", "got": "int"}),
        ({"prompt": [], "label": "1"}, {"key": "data.prompt_key", "got": "list"}),
        ({"prompt": ["x"], "label": "1"}, {"key": "data.prompt_key", "got": "list"}),
        ({**GOOD, "info": [1]}, {"key": "data.metadata_key", "got": "list"}),
        ({"prompt": [{"role": "robot", "content": "x"}], "label": "1"}, {"refused": "unknown role robot"}),
        ({**GOOD, "draw": 3}, {"key": "data.sampling_key", "got": "int"}),
        ({**GOOD, "draw": {"min_p": 2}}, {"key": "data.sampling_key"}),
        ({**GOOD, "draw": {"min_q": 0.1}}, {"key": "data.sampling_key"}),
        ({**GOOD, "draw": {"logit_bias": {"a": 1}}}, {"key": "data.sampling_key"}),
        ({**GOOD, "draw": {"regex": "a", "json_schema": "{}"}}, {"key": "data.sampling_key"}),
        ({**GOOD, "grade": "maths"}, {"key": "data.reward_key"}),
        ({**GOOD, "grade": 3}, {"key": "data.reward_key"}),
        ({**GOOD, "grade": "mine.py:score"}, {"key": "data.reward_key"}),
        ({**GOOD, "grade": {"kind": "math", "option": {}}}, {"key": "data.reward_key"}),
        ({**GOOD, "grade": {"kind": "math", "options": {"boxed": True}}}, {"key": "data.reward_key"}),
        ({**GOOD, "grade": {"kind": "remote", "options": {"url": "http://a/"}}}, {"key": "data.reward_key"}),
        ({**GOOD, "grade": "judge"}, {"key": "data.reward_key"}),
    ],
)
def test_a_bad_row_is_named(write, tokenizer, row, values):
    with refused(DataError, hint=True, line=3, **values):
        load_problems(write(GOOD, GOOD, row), DataConfig(metadata_key="info", sampling_key="draw", reward_key="grade"), tokenizer)


@pytest.mark.parametrize(
    ("rows", "config", "values"),
    [
        (
            [{"prompt": [{"role": "user", "content": "x"}], "label": "1"}],
            {"chat_template": False},
            {"line": 1, "key": "data.chat_template"},
        ),
        ([GOOD, GOOD, {"prompt": "1"}, GOOD, {"label": "2"}, {"prompt": 3}], {}, {"line": 3, "key": "data.label_key", "bad": 3}),
        ([{"prompt": [], "label": "2"}], {}, {"line": 1, "key": "data.prompt_key"}),
        ([GOOD, {"prompt": "", "label": "2"}], {}, {"line": 2, "key": "data.prompt_key", "bad": 1}),
        ([GOOD, {"prompt": "", "label": "2"}], {"chat_template": False}, {"line": 2, "key": "data.prompt_key", "bad": 1}),
    ],
)
def test_bad_rows_are_counted_and_the_first_is_named(write, tokenizer, rows, config, values):
    path = write(*rows)
    with raises(DataError, path=path, **values) as caught:
        load_problems(path, DataConfig(**config), tokenizer)
    assert ("got an empty list" in caught.value.message) == (rows[0]["prompt"] == [])


CHAT_ROW = {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}


@pytest.mark.parametrize(
    ("row", "chat_template", "hint"),
    [(GOOD, False, ""), (GOOD, True, "data.chat_template = false"), (CHAT_ROW, True, "as texts"), (CHAT_ROW, False, "as texts")],
)
def test_a_base_model_takes_texts_and_no_chats(write, tmp_path, row, chat_template, hint):
    """No hint leads to the next refusal."""
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config, path, base = DataConfig(chat_template=chat_template), write(row), load_tokenizer(tmp_path)
    if not hint:
        [problem] = load_problems(path, config, base).problems
        assert base.decode(problem.prompt_ids) == row["prompt"]
        return
    with raises(DataError, path=path, line=1) as caught:
        load_problems(path, config, base)
    assert hint in caught.value.hint


def test_variables_of_the_template_for_the_run_and_for_a_row(write):
    path = write({"prompt": "2+3?", "label": "5"}, {"prompt": "2+3?", "label": "5", "how": {"enable_thinking": True, "date": None}})
    config = DataConfig(chat_template_kwargs={"enable_thinking": False}, chat_template_kwargs_key="how")
    off, on = load_problems(path, config, family("qwen3"))
    assert family("qwen3").decode(off.prompt_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert family("qwen3").decode(on.prompt_ids).endswith("assistant\n")
    assert (off.chat_template_kwargs, on.chat_template_kwargs) == (msgspec.UNSET, {"enable_thinking": True})


def test_variables_that_no_template_reads_are_refused(tmp_path, write):
    path = write({"prompt": "2+3?", "label": "5"}, {"prompt": "2+3?", "label": "5", "how": {"thinking": True}})
    with raises(ConfigError, key="data.chat_template_kwargs", got=["enable_thinkng"]):
        load_problems(path, DataConfig(chat_template_kwargs={"enable_thinkng": False}), family("qwen3"))
    with raises(DataError, line=2, got=["thinking"]):
        load_problems(path, DataConfig(chat_template_kwargs_key="how"), family("qwen3"))
    with raises(DataError, line=1, key="data.chat_template_kwargs_key"):
        load_problems(path, DataConfig(chat_template_kwargs_key="label"), family("qwen3"))

    for line in ("chat_template_kwargs = {enable_thinking = false}", 'chat_template_kwargs_key = "how"'):
        (tmp_path / "my.toml").write_text(f'[data]\ntrain = "rows.jsonl"\nchat_template = false\n{line}\n')
        with raises(ConfigError, key=f"data.{line.split(' ')[0]}"):
            load(tmp_path / "my.toml")


ROWS = [
    ({"temperature": 0}, {}, "draw.temperature must be above 0"),
    ({"regex": "a"}, {"engine": {"kind": "table"}, "trainer": {"backend": "table"}}, "draw.regex is a grammar, which engine.kind = table"),
    ({"regex": "("}, {}, "expected a grammar that llguidance understands in draw.regex"),
    ({"presence_penalty": 1}, {"tasks": {"inexact": "refuse"}}, "draw.presence_penalty draws from a distribution"),
    ({"logit_bias": {"104": 1}}, {}, "draw.logit_bias must be of token ids in 0 .. 103, got 104"),
    ({"json_schema": "{}"}, {"sampling": {"regex": "a"}}, "a json_schema and a regex"),
    ({"min_p": 0.1}, {"trainer": {"backend": "megatron", "ranks": 2, "tensor": 2}}, "log-probs over a vocabulary in parts"),
    ({"regex": "a"}, {"engine": {"kind": "sglang"}}, "draw.regex needs engine.sglang.grammar_backend"),
    ({"min_p": 0.1}, {"engine": {"kind": "sglang", "deterministic": True}}, "draw.min_p does not go with engine.deterministic"),
]


@pytest.mark.parametrize(("said", "sections", "problem"), ROWS)
def test_what_a_row_is_drawn_with_is_held_against_the_configuration(write, tokenizer, said, sections, problem):
    fine = {"stop": ["x"], "min_p": None} if sections else {"stop": ["x"], "json_schema": '{"type": "object"}'}
    path = write(*({**GOOD, "draw": draw} for draw in (fine, {}, said)))
    data = {"train": path, "heldout": path, "sampling_key": "draw"}
    config = convert({"data": data} | sections, where="a test")
    problems = load_problems(path, config.data, tokenizer)
    assert [problem.sampling for problem in problems.problems[:2]] == [{k: v for k, v in fine.items() if v is not None}, {}]
    with refused(DataError, problem, line=3, key="data.sampling_key", path=path):
        check_rows(problems, config, config.sampling, 104, trained=True)
    if "temperature" in said or "presence_penalty" in said:
        check_rows(problems, config, config.evaluation.sampling, 104, trained=False)


def test_what_a_reward_reads_of_a_row_is_looked_at(write, tokenizer):
    """Of the run's reward, of a set's, and not of rows that name another."""
    fine = {"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 3}]}
    rows = [{**GOOD, "info": fine}, {**GOOD, "grade": "math"}]
    broken = {**GOOD, "info": {**fine, "kwargs": [{"N": None}]}}

    def look(kind, *rows):
        data = {"train": (path := write(*rows)), "metadata_key": "info", "reward_key": "grade"}
        config = convert({"data": data, "reward": {"kind": kind}}, where="a test")
        check_rows(load_problems(path, config.data, tokenizer), config, config.sampling, 104, trained=True)

    look("ifbench", *rows)
    with refused(DataError, "count:numbers: expected N", line=3, key="data.metadata_key", path=write()):
        look("ifbench", *rows, broken)
    look("math", *rows, broken)


def test_a_row_names_its_reward(write, tokenizer):
    rows = ({**GOOD, "grade": "math"}, {"prompt": "1", "label": "1"}, {**GOOD, "grade": None})
    named = {**GOOD, "grade": {"kind": "judge", "options": {"high": 5.0, "model": None}}}
    config = DataConfig(reward_key="grade", reward_options={"judge": {"url": "http://127.0.0.1:9/v1", "model": "m"}})
    first, second, third, last = load_problems(write(*rows, named), config, tokenizer)
    assert first.reward == RewardSpec("math") and second.reward is third.reward is msgspec.UNSET
    assert last.reward == RewardSpec("judge", {"high": 5.0})  # where it is asked stays in the configuration
