"""What docs/rewards.md says of kinds, options and forms is what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

from streamrl.config.instructions import instructions_of
from streamrl.config.reward import row_reward
from streamrl.config.reward_kinds import KINDS
from streamrl.rewards.python_tests import cases_of
from tests.rewards.episodes import task

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
ROWS, BODY, TESTS, INSTRUCTIONS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def test_every_kind_and_option_is_named() -> None:
    assert [kind for kind in KINDS if f"\n| `{kind}` |" not in PAGE] == []
    options = [option for known in KINDS.values() for option in known.options.__struct_fields__]
    assert [option for option in options if not re.search(rf"`{option}\b", PAGE)] == []


def test_what_rows_and_servers_are_given() -> None:
    for line in ROWS.splitlines():
        row_reward(json.loads(line)["grade"], {"judge": {"url": "http://127.0.0.1:8000/v1", "model": "m"}})
    assert list(json.loads(BODY)) == ["prompt", "response", "label", "metadata"]  # tests/rewards/test_asking.py
    asked = instructions_of("ifbench", json.loads(INSTRUCTIONS)["metadata"])
    assert asked == [("count:word_count_range", {"min_words": 20, "max_words": 40}), ("format:title_case", {})]
    forms = [cases_of(task(None, metadata={"tests": json.loads(line)}), "tests") for line in TESTS.splitlines()]
    assert list(map(len, forms)) == [2, 2, 1, 1, 1] and [cases[0].function for cases in forms] == ["", "", "", "add", "add"]
