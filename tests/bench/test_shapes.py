import json
from unittest.mock import ANY

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import SHAPES, num_elements, parameters, shape_of, write_model
from benchmarks.weights.options import PLANS, Mode, Window, parse_plan
from streamrl.errors import ConfigError
from tests.support.errors import raises


@pytest.mark.parametrize("name", ["tiny", "0.6B", "8B"])
def test_parameters_are_those_of_the_real_model(name, tmp_path):
    shape = shape_of(name)
    write_model(shape, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if shape.tied:
        del expected["lm_head.weight"]
    assert dict(parameters(shape)) == expected


def test_experts_have_the_sizes_of_the_real_model(tmp_path):
    shape = shape_of("30B-A3B")
    write_model(shape, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert num_elements(shape) == sum(value.numel() for value in model.state_dict().values())
    names = dict(parameters(shape))
    assert len(names) == 18_867
    assert names["model.layers.47.mlp.experts.127.down_proj.weight"] == (2048, 768)


def test_sizes_are_those_of_the_names_and_others_are_refused(tmp_path):
    billions = {name: round(num_elements(shape) / 1e9, 1) for name, shape in SHAPES.items()}
    assert billions == {"tiny": 0.0, "tiny-moe": 0.0, "0.6B": 0.6, "4B": 4.0, "8B": 8.2, "30B-A3B": 30.5, "30B-A3B-6": 4.4}
    with raises(ConfigError, shape="7B"):
        shape_of("7B")
    write_model(shape_of("tiny"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 128
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", list(PLANS))
def test_named_plans_parse(name):
    windows = parse_plan(name)
    assert windows[0].mode is Mode.STEADY and windows[-1].mode is Mode.STEADY


def test_a_plan_is_written_out():
    assert parse_plan("steady:1, flip:2.5/0.5,steady:1") == (
        Window(Mode.STEADY, 1.0),
        Window(Mode.FLIP, 2.5, 0.5),
        Window(Mode.STEADY, 1.0),
    )


@pytest.mark.parametrize(
    ("plan", "values"),
    [
        ("steady:1,flip:2,steady:1", {"seconds": "flip:2"}),
        ("steady:1/1", {"seconds": "steady:1/1"}),
        ("flip:1/1,steady:1", {"alone": ANY}),
        ("steady:1,flip:1/1,copy:1/1,steady:1", {"alone": ANY}),
        ("steady:1,flop:1/1,steady:1", {"window": "flop:1/1"}),
        ("steady:0", {"seconds": "steady:0"}),
        ("", {"window": ""}),
    ],
)
def test_plans_that_cannot_be_compared_are_refused(plan, values):
    with raises(ConfigError, **values):
        parse_plan(plan)
