from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.plugins import resolve
from tests.examples.runs import EXAMPLES, learned, remade

NAME = "search"


def of_example(name: str) -> Any:
    return resolve(f"{NAME}.py:{name}", what="an object", key="test", base=EXAMPLES / NAME)


@pytest.mark.process
@pytest.mark.slow
async def test_it_learns_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, first, last = await learned(NAME, tmp_path, monkeypatch, "run.steps=40")
    assert steps == 40
    assert last > first + 0.1


def test_every_question_is_answered_by_the_best_passage() -> None:
    rows = [json.loads(line) for line in (EXAMPLES / NAME / "problems.jsonl").read_text().splitlines()]
    queries = [(row["label"], row["metadata"]["answer"]) for row in rows if row["label"].endswith("</search>")]
    assert len(queries) == 5
    for label, answer in queries:
        found = of_example("search")(of_example("query_of")(label), 2)
        assert len(found) == 2 and found[-1].endswith(answer)
    assert of_example("search")("zebra", 2) == of_example("search")("", 2) == []


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("violin</search>", "violin"),
        ("I do not know. <search> a\nviolin </search>", "a\nviolin"),
        ("<search>violin", None),
        ("4", None),
        ("</search>", ""),
        ("<search>a<search>b</search>c</search>", "b"),
    ],
)
def test_queries(text: str, query: str | None) -> None:
    assert of_example("query_of")(text) == query


@pytest.mark.process
def test_the_problems_are_what_the_script_writes(tmp_path: Path) -> None:
    assert remade(NAME, tmp_path) == {"problems.jsonl": (EXAMPLES / NAME / "problems.jsonl").read_bytes()}
