"""docs/algorithms.md says what the configuration's check says: its table, what else is refused, and every recipe."""

import re
import tomllib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.config.check import check
from streamrl.config.load import load, override
from streamrl.config.loss import CorrectionConfig, LossConfig
from streamrl.config.registry import ESTIMATORS, POLICY_LOSSES
from streamrl.config.tree import Config, DataConfig, TasksConfig, TrainerConfig
from streamrl.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
KINDS = ("truncate", "clip", "mask")
LEVELS = ("token", "sequence", "geometric")
FIRST = 2
"""Columns that name a row of the table."""


def part(name: str) -> str:
    """What stands between two marks."""
    found = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", PAGE, re.DOTALL)
    assert found, f"no marks {name}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without the line below its head."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def weights(**changes: str) -> list[CorrectionConfig]:
    """Every kind of weight at every level."""
    tables = (
        {"kind": kind, "level": level, "low": 0.0 if kind == "truncate" else 0.5, **changes} for kind, level in product(KINDS, LEVELS)
    )
    return [msgspec.convert(table, CorrectionConfig) for table in tables]


ROWS = DataConfig(train="train.jsonl")
NONE = [CorrectionConfig(kind="none")]
COLUMNS = {
    "none": ("recomputed", NONE),
    "weights": ("recomputed", weights()),
    "current": ("recomputed", weights(ratio="current")),
    "log-linear": ("log_linear", weights()),
    "sampler": ("sampler", NONE),
    "sampler, weights": ("sampler", weights()),
}
COMBINATIONS, REASONS = part("combinations").split("\n\n")


def cells() -> dict[tuple[str, str, str], str]:
    """(advantage, policy, column) -> what the page says."""
    head, *body = rows(COMBINATIONS)
    assert head[FIRST:] == list(COLUMNS)
    found: dict[tuple[str, str, str], str] = {}
    for row in body:
        for advantage, policy in product(row[0].split(", "), row[1].split(", ")):
            for column, cell in zip(head[FIRST:], row[FIRST:], strict=True):
                assert (advantage, policy, column) not in found
                found[advantage, policy, column] = cell
    return found


def test_the_tables_are_whole_and_all_recipes_are_found() -> None:
    assert set(cells()) == set(product(ESTIMATORS, POLICY_LOSSES, COLUMNS))
    assert len(RECIPES) == part("recipes").count("```toml") > 14


@pytest.mark.parametrize(("heading", "names"), [("### Advantages", ESTIMATORS), ("### Policy losses", POLICY_LOSSES)])
def test_every_name_has_its_equation(heading: str, names: Mapping[str, object]) -> None:
    table = PAGE.partition(heading)[2].partition("\n###")[0]
    assert {row[0].partition(",")[0].strip("`") for row in rows(table)[1:]} == set(names)


def test_the_example_of_the_library_runs() -> None:
    code = PAGE.partition("## As a library")[2].partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    exec(compile(code, "docs/algorithms.md", "exec"), found)
    assert found["found"].advantages.tolist() == [0, 0, 1, 1, 0, 0, -1]  # R_i less the other's
    assert found["loss"].tolist() == [-1, -1, 1]  # at pi = pi_proximal it is -A
    # GSPO: each token's log-prob gets its share of what the sequence's tokens send back.
    assert found["logprobs"].grad.tolist() == [-1, -1, 1]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_cell_is_what_the_check_says(column: str) -> None:
    reasons = {number: text.strip("`") for number, _, text in rows(REASONS)[1:]}
    proximal, corrections = COLUMNS[column]
    for (advantage, policy, name), cell in cells().items():
        for correction in corrections if name == column else []:
            objectives = {"correct": 1.0} if advantage == "gdpo" else {}
            loss = LossConfig(advantage=advantage, policy=policy, proximal=proximal, correction=correction, objectives=objectives)  # type: ignore[arg-type]
            tasks = TasksConfig(drop_zero_variance=advantage != "gdpo")
            config = Config(data=ROWS, loss=loss, tasks=tasks, trainer=TrainerConfig(minibatches=2))
            if cell == "yes":
                check(config)
                continue
            with pytest.raises(ConfigError, match=reasons[cell]):
                check(config)


@pytest.mark.parametrize("settings", [row[0] for row in rows(part("refused"))[1:]])
def test_what_the_page_calls_refused_is(settings: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(Config(data=ROWS), re.findall(r"`([^`]+)`", settings))
    # For the reason at hand, not for a name that is wrong or a file that is not there.
    named = re.findall(r"`([\w.]+)=", settings)
    assert caught.value.values["key"] in named


RECIPES = re.findall(r"\n([^\n]+)\n(?:[^\n]+\n)*\n```toml\n(.*?)```", "\n" + part("recipes"), re.DOTALL)


@pytest.mark.parametrize("recipe", [text for _, text in RECIPES], ids=[title for title, _ in RECIPES])
def test_every_recipe_is_accepted_and_changes_the_loss(recipe: str, write, tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    config = load(write(recipe))
    assert set(tomllib.loads(recipe)["loss"]) <= set(LossConfig.__struct_fields__)
    assert config.loss != LossConfig() or config.trainer.minibatches > 1
