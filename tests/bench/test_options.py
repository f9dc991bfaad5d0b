from unittest.mock import ANY

import msgspec
import pytest

from benchmarks.shapes import SHAPES, shape_of
from benchmarks.weights.flags import server_flags
from benchmarks.weights.load import version_runs, wanted_tokens
from benchmarks.weights.options import Options, resolve
from benchmarks.weights.run import engine_config
from streamrl.config.check_engine import FIXED, OURS
from streamrl.config.engines import SglangConfig
from streamrl.errors import ConfigError
from tests.support.errors import raises


def asked(shape: str, **values) -> Options:
    return msgspec.structs.replace(Options(shape=shape, plan=""), **values)


@pytest.mark.parametrize(
    ("shape", "num_gpus", "trainer", "tensor_parallel"),
    [
        ("tiny", 0, "cpu", 1),
        ("8B", 1, "cuda:0", 1),
        ("8B", 2, "cuda:1", 1),
        ("30B-A3B", 4, "cuda:2", 2),
    ],
)
def test_the_trainer_gets_a_gpu_that_the_engine_leaves_free(shape, num_gpus, trainer, tensor_parallel):
    found = resolve(asked(shape), num_gpus=num_gpus)
    assert (found.trainer_device, found.tensor_parallel) == (trainer, tensor_parallel)
    assert found.windows and found.streams >= found.probes > 0 and found.mean_tokens > 0 and found.warm_s > 0


@pytest.mark.parametrize("devices", ["cuda:1,cuda:1", "cuda:0,cuda:1,cuda:0"])
def test_a_gpu_that_is_named_twice_is_refused(devices: str) -> None:
    with raises(ConfigError, trainer_device=devices):
        resolve(asked("8B", trainer_device=devices), num_gpus=4)


@pytest.mark.parametrize(
    ("shape", "values", "num_gpus", "found"),
    [
        ("8B", {}, 0, {"expected_gpus": 1, "gpus": 0}),
        ("30B-A3B", {}, 1, {"expected_gpus": 2, "gpus": 1}),
        ("30B-A3B", {}, 2, {"expected_gpus": 3, "gpus": 2}),
        ("8B", {"streams": 2, "probes": 3}, 1, {"probes": 3, "streams": 2}),
        ("9B", {}, 1, {"shape": "9B"}),
        ("8B", {"plan": "steady:1,flip:1"}, 1, {"seconds": "flip:1"}),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(shape, values, num_gpus, found):
    with raises(ConfigError, **found):
        resolve(asked(shape, **values), num_gpus=num_gpus)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_no_flag_is_one_that_a_run_would_refuse(shape):
    for cpu in (False, True):
        flags = server_flags(shape_of(shape), streams=64, cpu=cpu, default_graphs=False)
        assert not set(flags) & {*OURS, *FIXED}


def test_lanes_ask_for_mixed_lengths_and_versions_are_kept_as_runs():
    first = [wanted_tokens(1000, lane, 0) for lane in range(128)]
    later = [wanted_tokens(1000, lane, number) for lane in range(128) for number in range(1, 20)]
    assert min(first) < 100 and max(first) > 900 and len(set(first)) > 100
    assert min(later) >= 400 and max(later) <= 1600
    assert sum(later) / len(later) == pytest.approx(1000, rel=0.03)
    assert version_runs([3, 3, 4, 3]) == [(3, 2), (4, 1), (3, 1)]
    assert version_runs([]) == []


def test_flags_are_none_that_a_run_refuses_and_the_callers_win():
    options = resolve(asked("tiny", flags={"mem_fraction_static": 0.7}), num_gpus=0)
    assert engine_config(options).sglang.flags["mem_fraction_static"] == 0.7
    assert asked("8B").max_gap_ms == SglangConfig().max_gap_ms


@pytest.mark.parametrize(
    ("num_gpus", "values"),
    [(1, {}), (2, {"trainer_device": "cuda:0"}), (2, {"trainer_device": "cpu"}), (4, {"tensor_parallel": 2, "trainer_device": "cuda:1"})],
)
def test_no_nccl_between_two_ranks_on_one_gpu(num_gpus, values):
    plan = "steady:1,distributed:1/1,steady:1"
    with raises(ConfigError, trainer_device=ANY):
        resolve(asked("8B", plan=plan, **values), num_gpus=num_gpus)
    assert resolve(asked("8B", plan=plan), num_gpus=2).trainer_device == "cuda:1"
    assert resolve(asked("tiny", plan=plan), num_gpus=0).trainer_device == "cpu"
