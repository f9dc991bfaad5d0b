"""`bench weights`: its options, shapes and plans, the group over which its trainer sends, and the script that runs several questions."""

import json
import os
import subprocess
import tarfile
from pathlib import Path
from unittest.mock import ANY

import msgspec
import pytest
import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import SHAPES, num_elements, parameters, shape_of, write_model
from benchmarks.weights.flags import server_flags, static_share
from benchmarks.weights.load import version_runs, wanted_tokens
from benchmarks.weights.options import PLANS, Mode, Options, Window, parse_plan, resolve
from benchmarks.weights.run import engine_config
from benchmarks.weights.trainer_group import TrainerGroup, buckets_of
from streamrl.config.engines import FIXED, OURS, SglangConfig
from streamrl.errors import ConfigError
from tests.support.errors import raises
from tests.support.preloaded import Preloaded


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
    for share in (0.5, None):
        flags = server_flags(shape_of(shape), streams=64, default_graphs=False, share=share)
        assert not set(flags) & {*OURS, *FIXED}


@pytest.mark.parametrize(
    ("shape", "gib", "tensor_parallel", "tokens", "beside", "share"),
    [
        ("8B", 79, 1, 1500, 0, 0.76),  # 30.5 GiB of weights, 26.4 of keys and values
        ("8B", 140, 1, 1500, 0, 0.43),
        ("8B", 40, 1, 1500, 0, 0.92),  # what fits of the keys and values
        ("8B", 79, 1, 1500, 30, 0.54),
        ("30B-A3B", 79, 2, 1000, 0, 0.84),
        ("30B-A3B", 140, 2, 1000, 0, 0.48),
    ],
)
def test_the_engines_share_holds_two_sets_of_weights_and_the_streams(shape, gib, tensor_parallel, tokens, beside, share):
    given = {"tensor_parallel": tensor_parallel, "streams": 128, "tokens": tokens, "beside": beside * 2**30}
    assert static_share(shape_of(shape), gib * 2**30, **given) == pytest.approx(share, abs=0.005)


def test_weights_that_fit_no_share_are_refused():
    with raises(ConfigError, shape="30B-A3B"):
        static_share(shape_of("30B-A3B"), 79 * 2**30, tensor_parallel=1, streams=1, tokens=1)


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
    assert billions == {"tiny": 0.0, "tiny-moe": 0.0, "135M": 0.1, "0.6B": 0.6, "4B": 4.0, "8B": 8.2, "30B-A3B": 30.5, "30B-A3B-6": 4.4}
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


RECEIVER = """
import sys
import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

# The way of SGLang's ranks: a group beside the default one, which is made with another store.
port, name, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store, _, _ = next(distributed.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
group, _ = c10d._new_process_group_helper(
    2, 1, [], "gloo", distributed.PrefixStore(name, store), group_name=name, timeout=c10d.default_pg_timeout
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
flat = torch.empty(size, dtype=torch.uint8)
distributed.broadcast(flat, src=0, group=group)
print(flat.sum().item())
distributed.destroy_process_group(group)
"""


@pytest.mark.process
def test_torch_distributed_on_the_other_side_gets_the_bytes(preloaded: Preloaded, tmp_path: Path):
    tensors = [torch.arange(12, dtype=torch.float32).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16)]
    wanted = sum(int(tensor.flatten().view(torch.uint8).sum()) for tensor in tensors)
    group = TrainerGroup(torch.device("cpu"), ranks=1, name="test")
    _, port = group.address
    with (tmp_path / "out").open("wb") as out:
        size = str(sum(tensor.nbytes for tensor in tensors))
        other = preloaded.start("-c", RECEIVER, str(port), "test", size, out=out.fileno())
        group.join()
        group.send(tensors)
        assert other.wait(timeout=60) == 0
    assert (tmp_path / "out").read_text().strip() == str(wanted)
    group.close()
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(100, [["a", "b", "c"]]), (40, [["a", "b"], ["c"]]), (16, [["a"], ["b"], ["c"]]), (1, [["a"], ["b"], ["c"]])],
)
def test_buckets_hold_neighbours_up_to_a_size(nbytes, expected):
    tensors = {"a": torch.zeros(4), "b": torch.zeros(6), "c": torch.zeros(5)}
    assert list(buckets_of(tensors, nbytes)) == expected
    assert list(buckets_of({}, nbytes)) == []


SCRIPT = Path(__file__).parents[2] / "scripts/gpu/together.sh"


def together(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    where = {"OUT": str(folder / "out"), "WORK": str(folder / "work"), "KIT": str(folder / "kit"), "HOME": str(folder)}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], cwd=folder, env={**os.environ, **where, **env}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "usage: together.sh"),
        (("9b:0",), "got 9b:0"),
        (("8b",), "got 8b"),
        (("8b:0,1", "graphs:1,2"), "expected each GPU in one question, got 1 in two"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, arguments, said):
    ended = together(tmp_path, *arguments)
    assert ended.returncode == 2 and said in ended.stderr
    assert not (tmp_path / "work").exists()


@pytest.mark.process
def test_each_question_keeps_what_it_wrote_and_says_how_it_ended(tmp_path):
    # No time is left for a server, which is an answer too.
    ended = together(tmp_path, "tiny:", "tiny:", LIMIT="60")
    assert ended.returncode == 1
    assert ended.stdout.count("== tiny:: exit code 1") == 2 and ended.stdout.count("no time left") == 2
    for name in ("0-tiny.tar", "1-tiny.tar"):
        with tarfile.open(tmp_path / "out" / name) as tar:
            assert "./screen.txt" in tar.getnames()
