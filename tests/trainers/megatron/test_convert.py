"""`streamrl convert` value by value: there and back, and what it refuses. Real megatron-core is in test_convert_megatron.py."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from streamrl.cli import main
from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError
from streamrl.trainers.megatron import convert as module
from streamrl.trainers.megatron.convert import convert
from streamrl.trainers.megatron.metadata import Reader
from tests.support.preloaded import PRELOADED
from tests.trainers.megatron.models import KINDS, write_model

CASES = [(kind, tied) for kind in KINDS for tied in (True, False)]


def whole(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory."""
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether names, types and bits are equal."""
    return first.keys() == second.keys() and all(
        value.dtype == second[name].dtype and torch.equal(value, second[name]) for name, value in first.items()
    )


@pytest.mark.parametrize(("kind", "tied"), CASES)
@pytest.mark.parametrize("file_bytes", [1 << 30, 5000])
def test_there_and_back_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tied: bool, file_bytes: int) -> None:
    monkeypatch.setattr(module, "_ROWS_ELEMENTS", 16 * 7)  # the embedding of 50 rows goes in 8 pieces
    write_model(tmp_path / "model", kind, tied=tied)
    assert convert(tmp_path / "model", tmp_path / "megatron").to == "megatron"
    done = convert(tmp_path / "megatron", tmp_path / "back", file_bytes=file_bytes)
    source, back = whole(tmp_path / "model"), whole(tmp_path / "back")
    assert same(source, back)
    assert done == ("hf", len(source), sum(value.nbytes for value in source.values()))
    assert (len(list((tmp_path / "back").glob("*.safetensors"))) > 1) == (file_bytes == 5000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").state_dict(), again.state_dict())
    assert (tmp_path / "back" / "tokenizer.txt").read_text() == "its tokenizer"
    assert not list(tmp_path.glob(".*"))


def test_the_command_line_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "megatron")]) == 0
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


NORM = "model__norm__weight"


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
        ({}, {NORM: torch.ones(16, dtype=torch.float8_e4m3fn)}, ("model.norm.weight", "F8_E4M3")),
        ({}, {"model__layers__0__self_attn__q_proj__weight_scale_inv": torch.ones(1)}, ("q_proj.weight_scale_inv", "too")),
        (
            {},
            {"model__layers__0__self_attn__q_proj__weight": torch.ones(32, 16)},
            ("linear_qkv", "q_proj.weight F32", "k_proj.weight BF16"),
        ),
    ],
)
def test_a_model_that_is_not_its_description_is_refused_by_name(
    tmp_path: Path, config: dict[str, object], change: dict[str, torch.Tensor | None], words: tuple[str, ...]
) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    change_config(tmp_path / "model", **config)
    if change:
        change_tensors(tmp_path / "model", **change)
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "model", tmp_path / "megatron")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


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
def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, config: dict[str, object], words: tuple[str, ...]) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    convert(tmp_path / "model", tmp_path / "megatron")
    change_config(tmp_path / "model", **config)
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "megatron", tmp_path / "back", tmp_path / "model")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert not (tmp_path / "back").exists()


def cut(path: Path, keep: int) -> None:
    """Leave the first bytes of a file."""
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    convert(tmp_path / "model", tmp_path / "megatron")
    for name in ("__0_0.distcp", ".metadata"):
        shutil.copytree(tmp_path / "megatron", tmp_path / "cut")
        cut(tmp_path / "cut" / "release" / name, keep)
        with pytest.raises(CheckpointDamaged, match=name):
            convert(tmp_path / "cut", tmp_path / "back")
        shutil.rmtree(tmp_path / "cut")
    cut(tmp_path / "model" / "model.safetensors", keep)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        convert(tmp_path / "model", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "model"]


def test_bytes_that_are_no_tensor_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    convert(tmp_path / "model", tmp_path / "megatron")
    file = tmp_path / "megatron" / "release" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointDamaged, match="__0_0"):
        convert(tmp_path / "megatron", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "model"]


@pytest.mark.parametrize("lie", ["lost", "twice", "elsewhere", "fewer"])
def test_metadata_that_cannot_be_true_is_refused(tmp_path: Path, lie: str) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    convert(tmp_path / "model", tmp_path / "megatron")
    path = tmp_path / "megatron" / "release" / ".metadata"
    told = Reader(path.parent).read_metadata()
    assert told.storage_data is not None
    key = "decoder.layers.self_attention.linear_qkv.weight"
    first, second = [index for index in told.storage_data if index.fqn == key][:2]
    match lie:
        case "lost":
            del told.storage_data[first]
        case "twice":
            told.storage_data[first] = told.storage_data[second]
        case "elsewhere":
            told.storage_data[first].relative_path = "../../../secret"
        case _:
            tensor = told.state_dict_metadata[key]
            assert isinstance(tensor, TensorStorageMetadata)
            tensor.chunks.pop()
    path.write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointDamaged, match=r"\.metadata"):
        convert(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()


class Enemy:
    """Runs a program when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_a_program_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    convert(tmp_path / "model", tmp_path / "megatron")
    (tmp_path / "megatron" / "release" / ".metadata").write_bytes(pickle.dumps(Enemy(tmp_path / "struck")))
    with pytest.raises(CheckpointDamaged, match=r"mkdir.*no checkpoint"):
        convert(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "struck").exists()


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
    write_model(tmp_path / "model", "Llama", tied=False)
    convert(tmp_path / "model", tmp_path / "megatron")
    shutil.rmtree(tmp_path / "megatron" / "hf")
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "megatron", tmp_path / "back")
    assert "--model" in caught.value.hint
    convert(tmp_path / "megatron", tmp_path / "back", tmp_path / "model")
    assert same(whole(tmp_path / "back"), whole(tmp_path / "model"))


CHILD = """
import json, resource, signal, sys
from pathlib import Path
from streamrl.errors import StreamRLError
from streamrl.trainers.megatron.convert import convert
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
async def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, to: str) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    convert(tmp_path / "model", tmp_path / "megatron")
    source = tmp_path / ("model" if to == "megatron" else "megatron")
    code, said, err = await PRELOADED.run("-c", CHILD, "full", str(source), str(tmp_path / "dest"), folder=tmp_path)
    assert code == 3, err
    assert "dest cannot be written" in said
    assert sorted(os.listdir(tmp_path)) == ["megatron", "model"]


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


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "Qwen3", tied=True)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(TrainingError, match="free on its disk"):
        convert(tmp_path / "model", tmp_path / "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
