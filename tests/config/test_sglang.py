"""The section `engine.sglang`: what it may say, and what it is told when it may not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    (folder / "rows.jsonl").write_text("{}\n")
    path = folder / "run.toml"
    path.write_text(f"[data]\ntrain = 'rows.jsonl'\n{text}")
    return path


def sglang(text: str, engine: str = "") -> str:
    return f"[engine]\nkind = 'sglang'\n{engine}[engine.sglang]\n{text}"


def test_any_flag_of_sglang_passes_through(tmp_path: Path):
    flags = "flags = {mem-fraction-static = 0.8, attention_backend = 'fa3', speculative_algorithm = 'NGRAM'}\n"
    text = sglang(f"tensor_parallel = 2\ngpus = [0, 1]\n{flags}")
    config = load(write(tmp_path, text), ["engine.sglang.flags.log_level=info"]).engine.sglang
    assert config.flags == {"mem-fraction-static": 0.8, "attention_backend": "fa3", "speculative_algorithm": "NGRAM", "log_level": "info"}
    assert config.gpus == (0, 1)


def test_an_interpreter_is_found_from_the_file_and_its_links_are_kept(tmp_path: Path):
    (tmp_path / "python").symlink_to(sys.executable)
    assert load(write(tmp_path, sglang("python = './python'\n"))).engine.sglang.python == str(tmp_path / "python")
    assert load(write(tmp_path, sglang("python = 'python3'\n"))).engine.sglang.python == "python3"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (sglang("tensor_paralel = 2\n"), "got engine.sglang.tensor_paralel", "did you mean engine.sglang.tensor_parallel?"),
        (sglang("swap = 'flop'\n"), "engine.sglang.swap", ""),
        (sglang("flags = {dp_size = 2}\n"), "one server with one group", "engine.workers"),
        (sglang("flags = {data-parallel-size = 2}\n"), "one server with one group", "engine.workers"),
        (sglang("flags = {pp_size = 2}\n"), "pipeline", "tensor_parallel"),
        (sglang("flags = {quantization = 'fp8'}\n"), "needs engine.sglang.swap = pause", "choose pause"),
        (sglang("flags = {tp_size = 2}\n"), "engine.sglang.tensor_parallel does", "set engine.sglang.tensor_parallel"),
        (sglang("flags = {api_key = 'x'}\n"), "the worker does", "leave it out"),
        (sglang("flags = {disagregation_mode = 'prefill'}\n"), "no flag of SGLang", "did you mean disaggregation_mode?"),
        (sglang("env = {SGLANG_RETURN_ORIGINAL_LOGPROB = '1'}\n"), "distribution drawn from", "leave it out"),
        (sglang("env = {STREAMRL_PLUGIN = '{}'}\n"), "set by the worker", "leave it out"),
        (sglang("gpus = [0, 0]\n"), "different numbers", "once"),
        (sglang("gpus = [0]\ntensor_parallel = 2\n"), "must name 2 GPUs", "for each engine"),
        (sglang("", engine="workers = 2\n"), "2 engines need engine.sglang.gpus", "name 2 GPUs"),
        (sglang("max_gap_ms = -1\n"), "engine.sglang.max_gap_ms must be at least 0", "--set"),
        ("[engine.sglang]\ntensor_parallel = 2\n", "is for engine.kind = sglang, got 'local'", "leave the section out"),
    ],
)
def test_what_would_break_is_refused_with_a_hint(tmp_path: Path, text: str, message: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert message in caught.value.message
    assert caught.value.hint and hint in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        sglang("flags = {dp_size = 1, pp_size = 1, enable_dp_attention = false}\n"),
        sglang("swap = 'pause'\nflags = {quantization = 'fp8'}\n"),
        sglang("flags = {device = 'cpu', kv_cache_dtype = 'fp8_e5m2'}\n", engine="workers = 2\n"),
    ],
)
def test_what_works_is_accepted(tmp_path: Path, text: str):
    assert load(write(tmp_path, text)).engine.kind == "sglang"
