"""How an SGLang server is started, without starting one."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.engines.sglang.command import MOST_IN_GRAPH, arguments, environment, graph_sizes, holds_weights, visible_devices, write_site
from streamrl.engines.sglang.server import SglangServer

SECRET = Path("/nowhere/server.yaml")


def words(has_weights: bool = True, deterministic: bool = False, **sglang: Any) -> list[str]:
    config = EngineConfig(kind="sglang", slots=16, deterministic=deterministic, sglang=SglangConfig(**sglang))
    found = arguments(config, Path("/m"), port=81, max_len=100, dtype="bfloat16", has_weights=has_weights, secret_file=SECRET)
    return list(found)


def value_of(flag: str, argv: list[str]) -> str:
    return argv[argv.index(flag) + 1]


def test_the_configuration_becomes_flags():
    argv = words(tensor_parallel=2)
    assert value_of("--model-path", argv) == "/m" and value_of("--dtype", argv) == "bfloat16"
    assert value_of("--host", argv) == "127.0.0.1" and value_of("--tp-size", argv) == "2"
    assert value_of("--max-running-requests", argv) == "16" and int(value_of("--context-length", argv)) > 100
    assert "--load-format" not in argv and "--enable-deterministic-inference" not in argv
    assert "--enable-deterministic-inference" in words(deterministic=True)
    assert value_of("--load-format", words(has_weights=False)) == "dummy"
    assert value_of("--load-format", words(has_weights=False, flags={"load_format": "auto"})) == "auto"


def test_a_server_has_a_tokenizer_where_it_is_to_know_grammars():
    assert "--skip-tokenizer-init" in words() and value_of("--grammar-backend", words()) == "none"
    argv = words(grammar_backend="xgrammar")
    assert "--skip-tokenizer-init" not in argv and value_of("--grammar-backend", argv) == "xgrammar"
    argv = words(grammar_backend="xgrammar", flags={"grammar_backend": "none"})
    assert value_of("--grammar-backend", argv) == "xgrammar", "as configurations from before the key have it"


@pytest.mark.parametrize("slots", [1, 8, 16, 17, 33, 64, 100, 128, 200, 256, 500, 512, 1000])
def test_graphs_are_few_and_pad_little(slots: int):
    sizes = graph_sizes(slots)
    assert sizes[-1] == min(slots, MOST_IN_GRAPH) and len(sizes) <= 12 and list(sizes) == sorted(set(sizes))
    for below, size in itertools.pairwise((0, *sizes)):
        padding = (size - below - 1) / size
        assert padding <= 0.25 if size > 64 else padding < 0.5 or size <= 16


def test_decode_graphs_have_the_sizes_that_slots_have_unless_the_user_names_graphs():
    argv = words()
    assert value_of("--cuda-graph-bs-decode", argv) == value_of("--cuda-graph-max-bs-decode", argv) == "16"
    assert value_of("--cuda-graph-bs-decode", words(flags={"disable_prefill_cuda_graph": True})) == "16"
    named: list[dict[str, Any]] = [{"cuda_graph_max_bs": 8}, {"cuda-graph-bs-decode": [4]}, {"disable_cuda_graph": True}, {"device": "cpu"}]
    for flags in named:
        own = [word for word in words(flags=flags) if "graph" in word]
        assert own == [f"--{name.replace('_', '-')}" for name in flags if "graph" in name], "what the user has said, and no more"


def test_any_value_becomes_words():
    argv = words(flags={"a-b": 1.5, "on": True, "off": False, "many": [1, 2], "table": {"x": 1}, "--c_d": "e f"})
    assert value_of("--a-b", argv) == "1.5" and "--on" in argv and "--off" not in argv
    assert argv[argv.index("--many") + 1 : argv.index("--many") + 3] == ["1", "2"]
    assert json.loads(value_of("--table", argv)) == {"x": 1} and value_of("--c-d", argv) == "e f"


def test_an_engine_takes_its_gpus_first_and_sees_the_others():
    config = SglangConfig(tensor_parallel=2, gpus=(0, 3, 2, 1))
    assert visible_devices(config, None, index=0, num_gpus=5) == "0,3,1,2,4"
    assert visible_devices(config, None, index=1, num_gpus=5) == "2,1,0,3,4"
    assert visible_devices(config, None, index=2, num_gpus=5) == "0,3,1,2,4", "an engine that joins on another host"
    assert visible_devices(config, "GPU-a,GPU-b,GPU-c,GPU-d", index=1, num_gpus=9) == "GPU-c,GPU-b,GPU-a,GPU-d"
    assert visible_devices(SglangConfig(), "1", index=0, num_gpus=5) == "", "left as it is"


def test_the_plugin_is_told_by_the_environment_alone(tmp_path: Path):
    def env(plugin: dict[str, Any] | None, **surroundings: str) -> dict[str, str]:
        return environment(SglangConfig(env={"A": "own"}), surroundings, site=tmp_path, plugin=plugin, index=0, num_gpus=0)

    asleep = env(None, STREAMRL_PLUGIN="of somebody else", A="inherited", PYTHONPATH="/x")
    assert "STREAMRL_PLUGIN" not in asleep and asleep["A"] == "own" and asleep["PYTHONPATH"] == f"{tmp_path}:/x"
    awake = env({"dir": "/d"}, SGLANG_PLUGINS="mine")
    assert json.loads(awake["STREAMRL_PLUGIN"]) == {"dir": "/d"} and awake["SGLANG_PLUGINS"] == "mine,streamrl"


@pytest.mark.process
def test_any_interpreter_finds_the_plugin_and_keeps_its_own_packages(tmp_path: Path):
    site = write_site(tmp_path)
    code = (
        "import importlib.metadata as m\n"
        "(point,) = m.entry_points(group='sglang.srt.plugins', name='streamrl')\n"
        "print(point.load().__module__)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == "streamrl.engines.sglang.plugin", found.stderr


def test_weights_are_found_by_their_files(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert not holds_weights(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert holds_weights(tmp_path)


def test_a_servers_key_can_stand_behind_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang turns its configuration file into a command line: there a key that begins with a dash is another flag."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keys = {SglangServer(EngineConfig(kind="sglang"), tmp_path, name="e", max_len=8, dtype="float32").key for _ in range(300)}
    assert len(keys) == 300 and not [key for key in keys if not re.fullmatch("[0-9a-f]{64}", key)]
