"""`streamrl convert` attacked: what would come out wrong without a word, a process that is killed, files of older versions."""

import argparse
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from streamrl.errors import CheckpointDamaged, ConfigError
from streamrl.trainers.megatron.convert import convert
from streamrl.trainers.megatron.metadata import Reader
from tests.trainers.megatron.models import KINDS, write_model


def equal(first: Path, second: Path) -> bool:
    """Whether two model directories of one file have the same values."""
    one, other = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("begin", ["model.layers.1.", "model.layers.2.mlp.experts.3.", "model.layers.0.input_layernorm."])
def test_layers_and_experts_of_several_types_are_refused(tmp_path: Path, begin: str) -> None:
    """Megatron's file has one tensor for all layers: of two types it would hold one, and the other's bits were lost."""
    write_model(tmp_path / "model", "Qwen3Moe", tied=True)
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: value.float() if name.startswith(begin) else value for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"decoder\.layers\.\S+ .*float32"):
        convert(tmp_path / "model", tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", KINDS)
def test_common_has_the_sizes_that_loaders_compare(tmp_path: Path, kind: str) -> None:
    """`num_layers`, `hidden_size`, `num_attention_heads` are compared by Megatron-LM; the others are read by converters."""
    write_model(tmp_path / "model", kind, tied=kind == "Llama", layers=3)
    convert(tmp_path / "model", tmp_path / "megatron")
    with torch.serialization.safe_globals([argparse.Namespace]):
        said = vars(torch.load(tmp_path / "megatron" / "release" / "common.pt", weights_only=True)["args"])
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (said["num_layers"], said["hidden_size"], said["num_attention_heads"], said["num_query_groups"]) == (3, 16, 4, 2)
    assert said["kv_channels"] == (4 if kind == "Qwen2" else 8)
    assert said["num_experts"] == config.get("num_experts", config.get("num_local_experts"))
    assert said["untie_embeddings_and_output_weights"] is not config["tie_word_embeddings"]
    assert said["moe_ffn_hidden_size" if kind == "Qwen3Moe" else "ffn_hidden_size"] == (8 if kind == "Qwen3Moe" else 24)


def change_metadata(release: Path, change: Callable[[Metadata], None]) -> bytes:
    """Change `.metadata`; returns it in the pickle protocol in which names of classes are text."""
    found = Reader(release).read_metadata()
    change(found)
    data = pickle.dumps(found, protocol=2)
    (release / ".metadata").write_bytes(data)
    return data


def test_metadata_of_an_older_megatron_core_is_read(tmp_path: Path) -> None:
    """Up to 0.15 it has a class of its own, torch's with one field more, which 0.16 keeps a stand-in for."""
    write_model(tmp_path / "model", "Qwen3", tied=False)
    convert(tmp_path / "model", tmp_path / "megatron")
    release = tmp_path / "megatron" / "release"
    data = change_metadata(release, lambda found: setattr(found, "mcore_data", {"decoder": {"nd_reformulated_orig_global_shape": (2, 3)}}))
    torchs = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    assert data.count(torchs) == 1
    (release / ".metadata").write_bytes(data.replace(torchs, b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"))
    convert(tmp_path / "megatron", tmp_path / "back")
    assert equal(tmp_path / "model", tmp_path / "back")
    (release / ".metadata").write_bytes(data.replace(torchs, b"cmegatron.core.dist_checkpointing.strategies.torch\nTheirs\n"))
    with pytest.raises(CheckpointDamaged, match=r"MCore|Theirs"):
        convert(tmp_path / "megatron", tmp_path / "again")


@pytest.mark.parametrize("key", ["decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.mlp.linear_fc2.weight"])
def test_a_layer_that_stands_twice_and_another_nowhere_is_damage(tmp_path: Path, key: str) -> None:
    """The count of elements is right; what is nowhere must not be what the memory held before."""

    def change(found: Metadata) -> None:
        one = found.state_dict_metadata[key]
        assert isinstance(one, TensorStorageMetadata)
        one.chunks[1] = dataclasses.replace(one.chunks[1], offsets=one.chunks[0].offsets)

    write_model(tmp_path / "model", "Qwen3", tied=True)
    convert(tmp_path / "model", tmp_path / "megatron")
    change_metadata(tmp_path / "megatron" / "release", change)
    with pytest.raises(CheckpointDamaged, match=rf"{key}.* whole, or twice"):
        convert(tmp_path / "megatron", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "model"]


def test_bits_that_flip_where_torch_describes_a_tensor_are_damage(tmp_path: Path) -> None:
    """Whatever torch makes of them, no other error comes. Values have no check sum, so those are not struck."""
    write_model(tmp_path / "model", "Llama", tied=False, layers=1)
    convert(tmp_path / "model", tmp_path / "megatron")
    file = tmp_path / "megatron" / "release" / "__0_0.distcp"
    data, struck = file.read_bytes(), 0
    about = data.index(b"_rebuild_tensor")
    for at in range(about - 60, about + 240, 10):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        try:
            convert(tmp_path / "megatron", tmp_path / f"back-{at}")
        except CheckpointDamaged:
            struck += 1
        assert not list(tmp_path.glob(".*"))
    assert struck > 5


def test_a_model_that_describes_itself_takes_no_other_description(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Llama", tied=False)
    with pytest.raises(ConfigError, match=r"--model"):
        convert(tmp_path / "model", tmp_path / "megatron", tmp_path / "model")


@pytest.mark.slow
@pytest.mark.process
def test_a_conversion_that_is_killed_leaves_no_dest_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Llama", tied=True, layers=64, hidden_size=512, intermediate_size=1536)
    command = [sys.executable, "-m", "streamrl", "convert", str(tmp_path / "model"), str(tmp_path / "dest")]
    killed = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        while killed.poll() is None and not any(file.stat().st_size > 1 << 20 for file in tmp_path.rglob(".*/**/*.distcp")):
            time.sleep(0.001)
    finally:
        killed.kill()
        killed.wait()
    assert killed.returncode == -9  # 300 MB are not written within the millisecond after the first one
    assert list(tmp_path.glob(".*"))
    assert not (tmp_path / "dest").exists()
    convert(tmp_path / "model", tmp_path / "dest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "model"]
    convert(tmp_path / "dest", tmp_path / "back")
    assert equal(tmp_path / "model", tmp_path / "back")
