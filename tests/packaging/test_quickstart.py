from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.data.characters import write_tokenizer
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import load_tokenizer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture
def sets(tmp_path):
    config = load(QUICKSTART / "quickstart.toml")
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    return config, [load_problems(path, config.data, tokenizer) for path in (config.data.train, config.data.heldout)]


def test_the_problems_are_split_once(sets):
    _, (train, heldout) = sets
    assert (len(train), len(heldout)) == (648, 72)
    assert train.num_too_long == heldout.num_too_long == 0
    assert len({problem.prompt for problem in (*train.problems, *heldout.problems)}) == 720


def test_the_labels_are_right_and_fit(sets, tmp_path):
    config, both = sets
    tokenizer = load_tokenizer(tmp_path)
    for problems in both:
        for problem in problems.problems:
            a, b = problem.prompt.rstrip("=").split("+")
            assert int(a) + int(b) == int(problem.label)
            assert len(tokenizer.encode(problem.label)) < config.sampling.max_new_tokens


def test_the_files_are_what_the_script_writes(tmp_path):
    runpy.run_path(str(QUICKSTART / "make_problems.py"))["main"](tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes()
