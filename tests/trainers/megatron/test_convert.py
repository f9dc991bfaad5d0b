"""`streamrl convert` value by value: there and back, what it refuses, and attacks. Real megatron-core is in test_convert_megatron.py."""

import argparse
import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from streamrl.cli import main
from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError
from streamrl.models.megatron import convert as module
from streamrl.models.megatron.convert import convert
from streamrl.models.megatron.metadata import Reader
from tests.support.preloaded import PRELOADED
from tests.support.same_tensors import same_tensors
from tests.trainers.megatron.models import KINDS, write_model


def whole(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory."""
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(some: Path, others: Path) -> bool:
    """Whether names, types and bits of two model directories are equal."""
    return same_tensors(whole(some), whole(others))


def converted(place: Path, kind: str, **options: Any) -> None:
    """`place/model`, and what becomes of it in `place/megatron`."""
    write_model(place / "model", kind, **options)
    convert(place / "model", place / "megatron")


def left(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tied Qwen3."""
    write_model(tmp_path / "model", "Qwen3", tied=True)
    return tmp_path / "model"


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Where megatron-core would look for a tied Qwen3 once it is converted."""
    converted(tmp_path, "Qwen3", tied=True)
    return tmp_path / "megatron" / "release"


@pytest.mark.parametrize(("kind", "tied"), [(kind, tied) for kind in KINDS for tied in (True, False)])
@pytest.mark.parametrize("file_bytes", [1 << 30, 5000])
def test_there_and_back_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tied: bool, file_bytes: int) -> None:
    monkeypatch.setattr(module, "_ROWS_ELEMENTS", 16 * 7)  # the embedding of 50 rows goes in 8 pieces
    write_model(tmp_path / "model", kind, tied=tied)
    assert convert(tmp_path / "model", tmp_path / "megatron").to == "megatron"
    done = convert(tmp_path / "megatron", tmp_path / "back", file_bytes=file_bytes)
    assert same(tmp_path / "model", tmp_path / "back")
    source = whole(tmp_path / "model").values()
    assert done == ("hf", len(source), sum(value.nbytes for value in source))
    assert (len(list((tmp_path / "back").glob("*.safetensors"))) > 1) == (file_bytes == 5000)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert same_tensors(*(load(tmp_path / name, dtype="auto").state_dict() for name in ("model", "back")))
    assert (tmp_path / "back" / "tokenizer.txt").read_text() == "its tokenizer"
    assert not list(tmp_path.glob(".*"))


def test_the_command_line_says_what_it_did(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), str(tmp_path / "megatron")]) == 0
    assert "46 tensors" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "megatron" / "release"), str(tmp_path / "back"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == "hf"
    assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "back")]) == 1
    assert "there already" in capsys.readouterr().err


def change_config(directory: Path, **changes: object) -> None:
    """Write other values into config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Write other tensors; None takes one away. Names with `__` for a dot."""
    held = whole(directory) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in held.items() if value is not None}, directory / "model.safetensors")


NORM, Q = "model__norm__weight", "model__layers__0__self_attn__q_proj__weight"


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        ({"model_type": "mixtral"}, {}, ("model_type", "'mixtral'")),
        ({"vocab_size": 51}, {}, ("model.embed_tokens.weight", "[51, 16]", "[50, 16]")),
        ({"num_hidden_layers": 5}, {}, ("model.layers.4.input_layernorm.weight", "none")),
        ({"num_hidden_layers": 3}, {}, ("model.layers.3.", "too")),
        ({"tie_word_embeddings": False}, {}, ("lm_head.weight", "none")),
        ({}, {NORM: None}, ("model.norm.weight", "none")),
        ({}, {NORM: torch.ones(3)}, ("model.norm.weight", "[16]", "[3]")),
        ({}, {NORM: torch.ones(16, dtype=torch.float8_e4m3fn)}, ("model.norm.weight", "float8_e4m3fn")),
        ({}, {f"{Q}_scale_inv": torch.ones(1)}, ("q_proj.weight_scale_inv", "too")),
        ({}, {Q: torch.ones(32, 16)}, ("linear_qkv", "q_proj.weight float32", "k_proj.weight bfloat16")),
    ],
)
def test_a_model_that_is_not_its_description_is_refused_by_name(
    model: Path, tmp_path: Path, config: dict[str, object], change: dict[str, torch.Tensor | None], words: tuple[str, ...]
) -> None:
    change_config(model, **config)
    change_tensors(model, **change)
    with pytest.raises(ConfigError) as caught:
        convert(model, tmp_path / "megatron")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert left(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt_oss"}, ("gpt_oss",)),
        ({"vocab_size": 51}, ("word_embeddings", "[51, 16]", "[50, 16]")),
        ({"num_hidden_layers": 3}, ("[3, ", "[4, ")),
        ({"tie_word_embeddings": False}, ("output_layer.weight", "none")),
        ({"model_type": "llama"}, ("q_layernorm.weight", "too")),
        ({"num_key_value_heads": 4}, ("linear_qkv.weight",)),
    ],
)
def test_another_models_checkpoint_is_refused(release: Path, tmp_path: Path, config: dict[str, object], words: tuple[str, ...]) -> None:
    change_config(tmp_path / "model", **config)
    with pytest.raises(ConfigError) as caught:
        convert(release, tmp_path / "back", tmp_path / "model")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(release: Path, tmp_path: Path, keep: int) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        shutil.copytree(release.parent, tmp_path / "cut")
        file = tmp_path / "cut" / "release" / name
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(CheckpointDamaged, match=name):
            convert(tmp_path / "cut", tmp_path / "back")
        shutil.rmtree(tmp_path / "cut")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        convert(tmp_path / "model", tmp_path / "other")
    assert left(tmp_path) == ["megatron", "model"]


QKV, DOWN = "decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.mlp.linear_fc2.weight"


def change_metadata(release: Path, change: Callable[[Any], object]) -> bytes:
    """Change `.metadata`; returns it in the pickle protocol in which names of classes are text."""
    found = Reader(release).read_metadata()
    change(found)
    data = pickle.dumps(found, protocol=2)
    (release / ".metadata").write_bytes(data)
    return data


def stored(found: Metadata) -> list[Any]:
    """Where the first two layers of a tensor lie."""
    assert found.storage_data is not None
    return [index for index in found.storage_data if index.fqn == QKV][:2]


def chunks(found: Metadata, key: str) -> list[Any]:
    tensor = found.state_dict_metadata[key]
    assert isinstance(tensor, TensorStorageMetadata)
    return tensor.chunks


def doubled(found: Metadata, key: str) -> None:
    """A layer stands twice and another nowhere: the count of elements is right, and what is nowhere is what the memory held before."""
    one = chunks(found, key)
    one[1] = dataclasses.replace(one[1], offsets=one[0].offsets)


LIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "lost": (lambda found: found.storage_data.pop(stored(found)[0]), r"\.metadata"),
    "twice": (lambda found: found.storage_data.update({stored(found)[0]: found.storage_data[stored(found)[1]]}), r"\.metadata"),
    "elsewhere": (lambda found: setattr(found.storage_data[stored(found)[0]], "relative_path", "../../../secret"), r"\.metadata"),
    "fewer": (lambda found: chunks(found, QKV).pop(), r"\.metadata"),
    "doubled": (lambda found: doubled(found, QKV), rf"{QKV}.* whole, or twice"),
    "doubled behind": (lambda found: doubled(found, DOWN), rf"{DOWN}.* whole, or twice"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_cannot_be_true_is_refused(release: Path, tmp_path: Path, lie: str) -> None:
    change, said = LIES[lie]
    change_metadata(release, change)
    with pytest.raises(CheckpointDamaged, match=said):
        convert(release.parent, tmp_path / "back")
    assert left(tmp_path) == ["megatron", "model"]


class Enemy:
    """Runs a program when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_bytes_that_are_no_checkpoint_are_refused_and_run_no_program(release: Path, tmp_path: Path) -> None:
    file = release / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(CheckpointDamaged, match="__0_0"):
        convert(release.parent, tmp_path / "back")
    file.write_bytes(whole)
    (release / ".metadata").write_bytes(pickle.dumps(Enemy(tmp_path / "struck")))
    with pytest.raises(CheckpointDamaged, match=r"mkdir.*no checkpoint"):
        convert(release.parent, tmp_path / "back")
    assert left(tmp_path) == ["megatron", "model"]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda place: None, "config.json"),
        (lambda place: (place / "latest_checkpointed_iteration.txt").write_text("release"), "release"),
        (lambda place: (place / "latest_checkpointed_iteration.txt").write_text("../../x"), "latest_checkpointed"),
        (lambda place: (place / "config.json").write_text("[]"), "config.json"),
        (lambda place: (place / "config.json").write_text("{"), "config.json"),
    ],
)
def test_a_source_that_is_neither_is_refused(tmp_path: Path, make: object, word: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make(source)  # type: ignore[operator]
    with pytest.raises((ConfigError, CheckpointDamaged), match=word):
        convert(source, tmp_path / "dest")


def test_without_a_description_it_says_which_option_names_one(tmp_path: Path) -> None:
    converted(tmp_path, "Llama", tied=False)
    shutil.rmtree(tmp_path / "megatron" / "hf")
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "megatron", tmp_path / "back")
    assert "--model" in caught.value.hint
    convert(tmp_path / "megatron", tmp_path / "back", tmp_path / "model")
    assert same(tmp_path / "back", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"--model"):  # a model that describes itself takes no other description
        convert(tmp_path / "model", tmp_path / "again", tmp_path / "model")


CHILD = """
import json, resource, signal, sys
from pathlib import Path
from streamrl.errors import StreamRLError
from streamrl.models.megatron.convert import convert
mode, source, dest = sys.argv[1:]
if mode == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024
warm = Path(dest + "-warm")
try:
    if mode == "memory":
        convert(Path(source + "-small"), warm)
        import threading, time
        before, most, stop = held(), 0, threading.Event()
        def watch():
            global most
            while not stop.wait(0.001):
                most = max(most, held())
        watcher = threading.Thread(target=watch)
        watcher.start()
    done = convert(Path(source), Path(dest))
    if mode == "memory":
        stop.set()
        watcher.join()
        print(json.dumps({"bytes": done.nbytes, "more": most - before}))
except StreamRLError as error:
    print(error.message)
    sys.exit(3)
"""


@pytest.mark.process
@pytest.mark.parametrize("to", ["megatron", "hf"])
async def test_a_full_disk_is_said_and_nothing_is_left(release: Path, tmp_path: Path, to: str) -> None:
    source = tmp_path / ("model" if to == "megatron" else "megatron")
    code, said, err = await PRELOADED.run("-c", CHILD, "full", str(source), str(tmp_path / "dest"), folder=tmp_path)
    assert code == 3, err
    assert said.startswith("cannot write ") and "/dest:" in said
    assert left(tmp_path) == ["megatron", "model"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_memory_is_that_of_two_layers_however_many_there_are(tmp_path: Path, to: str) -> None:
    for name, layers in (("model", 48), ("model-small", 1)):
        write_model(tmp_path / name, "Llama", tied=True, layers=layers, hidden_size=512, intermediate_size=1536)
    if to == "hf":
        for name in ("model", "model-small"):
            convert(tmp_path / name, tmp_path / name.replace("model", "megatron"))
    words = [sys.executable, "-c", CHILD, "memory", str(tmp_path / ("model" if to == "megatron" else "megatron")), str(tmp_path / "dest")]
    made = subprocess.run(words, capture_output=True, text=True, timeout=170, check=False)
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    # 48 layers of 4.8 MB; what a process takes besides, the allocator and threads, is below 16 MB.
    assert told["bytes"] > 230e6
    assert told["more"] < 2 * told["bytes"] / 48 + 16e6


def test_no_room_is_said_before_anything_is_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(TrainingError, match="free on its disk"):
        convert(model, tmp_path / "megatron")
    assert left(tmp_path) == ["model"]


@pytest.mark.parametrize("begin", ["model.layers.1.", "model.layers.2.mlp.experts.3.", "model.layers.0.input_layernorm."])
def test_layers_and_experts_of_several_types_are_refused(tmp_path: Path, begin: str) -> None:
    """Megatron's file has one tensor for all layers: of two types it would hold one, and the other's bits were lost."""
    write_model(tmp_path / "model", "Qwen3Moe", tied=True)
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: value.float() if name.startswith(begin) else value for name, value in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"decoder\.layers\.\S+ .*float32"):
        convert(tmp_path / "model", tmp_path / "megatron")
    assert left(tmp_path) == ["model"]


@pytest.mark.parametrize("kind", KINDS)
def test_common_has_the_sizes_that_loaders_compare(tmp_path: Path, kind: str) -> None:
    """`num_layers`, `hidden_size`, `num_attention_heads` are compared by Megatron-LM; the others are read by converters."""
    converted(tmp_path, kind, tied=kind == "Llama", layers=3)
    with torch.serialization.safe_globals([argparse.Namespace]):
        said = vars(torch.load(tmp_path / "megatron" / "release" / "common.pt", weights_only=True)["args"])
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (said["num_layers"], said["hidden_size"], said["num_attention_heads"], said["num_query_groups"]) == (3, 16, 4, 2)
    assert said["kv_channels"] == (4 if kind == "Qwen2" else 8)
    assert said["num_experts"] == config.get("num_experts", config.get("num_local_experts"))
    assert said["untie_embeddings_and_output_weights"] is not config["tie_word_embeddings"]
    assert said["moe_ffn_hidden_size" if kind == "Qwen3Moe" else "ffn_hidden_size"] == (8 if kind == "Qwen3Moe" else 24)


def test_metadata_of_an_older_megatron_core_is_read(release: Path, tmp_path: Path) -> None:
    """Up to 0.15 it has a class of its own, torch's with one field more, which 0.16 keeps a stand-in for."""
    data = change_metadata(release, lambda found: setattr(found, "mcore_data", {"decoder": {"nd_reformulated_orig_global_shape": (2, 3)}}))
    torchs = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    assert data.count(torchs) == 1
    (release / ".metadata").write_bytes(data.replace(torchs, b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"))
    convert(tmp_path / "megatron", tmp_path / "back")
    assert same(tmp_path / "model", tmp_path / "back")
    (release / ".metadata").write_bytes(data.replace(torchs, b"cmegatron.core.dist_checkpointing.strategies.torch\nTheirs\n"))
    with pytest.raises(CheckpointDamaged, match=r"MCore|Theirs"):
        convert(tmp_path / "megatron", tmp_path / "again")


def test_bits_that_flip_where_torch_describes_a_tensor_are_damage(tmp_path: Path) -> None:
    """Whatever torch makes of them, no other error comes. Values have no check sum, so those are not struck."""
    converted(tmp_path, "Llama", tied=False, layers=1)
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
    assert left(tmp_path) == ["dest", "model"]
    convert(tmp_path / "dest", tmp_path / "back")
    assert same(tmp_path / "model", tmp_path / "back")
