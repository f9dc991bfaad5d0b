"""A server's processes that wait to be used, with a package of the shape of SGLang's that imports in no time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.engines import SglangConfig
from streamrl.engines.sglang.command import program
from streamrl.engines.sglang.quick_start import DETOKENIZER, SCHEDULER, changed, other_models, processes
from tests.support.processes import group_of, until
from tests.support.role_server import ROOT

CHILD = """
import os, sys
imported = dict(os.environ)
if imported.get("END") == {name!r} and sys.argv[0] == "-c":
    os._exit(3)
def run(writer, answer):
    main = sys.modules["__main__"].__name__
    told = {{n: os.environ.get(n) for n in ("SET", "SGLANG_RUN_ID", "SGLANG_X", "GONE")}}
    writer.send([os.getpid(), os.getppid(), "SET" not in imported, told, sys.argv, answer.recv()])
"""
SERVER = """
import json, multiprocessing, os, sys
from sglang.srt.managers import detokenizer_manager, scheduler
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    os.environ.update({"SET": "1", "SGLANG_RUN_ID": "r", "SGLANG_OFF": "0", **json.loads(os.environ["LATER"])})
    os.environ.pop("GONE", None)
    found = []
    for module in (scheduler, detokenizer_manager):
        reader, writer = multiprocessing.Pipe(duplex=False)
        question, answer = multiprocessing.Pipe()
        process = multiprocessing.Process(target=module.run, args=(writer, answer))
        process.start()
        writer.close()
        question.send("an answer")
        told = reader.recv()
        process.join()
        found.append({"pid": process.pid, "code": process.exitcode, "told": told})
    print(json.dumps({"pid": os.getpid(), "argv": sys.argv, "found": found}), flush=True)
    sys.stdin.read()
"""


def place(folder: Path) -> Path:
    """A package that is called `sglang`, to be found first."""
    managers = folder / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    for package in (folder / "sglang", managers.parent, managers):
        (package / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(SERVER)
    for name in ("scheduler", "detokenizer_manager"):
        (managers / f"{name}.py").write_text(CHILD.format(name=name))
    return folder


def start(folder: Path, *arguments: str, later: Mapping[str, str] | None = None, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(place(folder)), str(ROOT)])
    # torch sets CUDA_MODULE_LOADING in a process that has looked for a GPU, as other tests do; SGLang's server sets it anew.
    own = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    env = {**own, "PYTHONPATH": path, "LATER": json.dumps(later or {}), "GONE": "x", **environment}
    command = [sys.executable, *program(SglangConfig()), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder, start_new_session=True)


def outcome(process: subprocess.Popen[str]) -> tuple[dict[str, Any], list[str]]:
    """The server's last line, and the events that were printed before."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    *events, told = out.splitlines()
    return json.loads(told), events


@pytest.mark.process
@pytest.mark.parametrize(
    ("later", "environment", "used"),
    [
        ({}, {}, [True, True]),
        ({"OTHER": "1"}, {}, [True, True]),
        ({"SGLANG_X": "1"}, {}, [False, False]),
        ({}, {"END": "scheduler"}, [False, True]),
    ],
    ids=["used", "a variable that no import reads", "a variable that one may read", "one that has died"],
)
def test_a_process_that_waits_becomes_the_one_that_is_spawned(
    later: dict[str, str], environment: dict[str, str], used: list[bool], tmp_path: Path
):
    process = start(tmp_path, "--port", "1", later=later, **environment)
    told, events = outcome(process)
    assert told["argv"][1:] == ["--port", "1"]
    for one, waited, event in zip(told["found"], used, events, strict=True):
        pid, parent, imported_before, variables, argv, answer = one["told"]
        assert (pid, parent, one["code"], answer) == (one["pid"], told["pid"], 0, "an answer")
        assert imported_before is waited and event.startswith("event=streamrl_used" if waited else "event=streamrl_spawned")
        assert variables == {"SET": "1", "SGLANG_RUN_ID": "r", "SGLANG_X": later.get("SGLANG_X"), "GONE": None}
        assert argv[1:] == ["--port", "1"]


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_none_outlives_its_server(number: signal.Signals, tmp_path: Path):
    process = start(tmp_path, "--tp-size", "3")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    left = group_of(process.pid)
    assert lines[2].startswith("{") and len(left) >= 3, "two schedulers still wait"
    process.send_signal(number)
    process.communicate(timeout=60)
    asyncio.run(until(lambda: not group_of(process.pid)))


@pytest.mark.parametrize(
    ("arguments", "modules"),
    [
        ("--port 1", (SCHEDULER, DETOKENIZER)),
        ("--tp-size 2 --port 1", (SCHEDULER, SCHEDULER, DETOKENIZER)),
        ("--tp-size 2 --dp-size 2", ()),
        ("--nnodes 2", ()),
        ("--enable-memory-saver", ()),
    ],
)
def test_processes_are_known_of_a_plain_server_alone(arguments: str, modules: tuple[str, ...]):
    assert processes(arguments.split()) == modules


@pytest.mark.parametrize(
    ("imported", "now", "name"),
    [
        ({"A": "1"}, {"A": "2", "NCCL_ALGO": "tree"}, ""),
        ({}, {"SGLANG_ENABLE_X": "0", "SGLANG_ENABLE_Y": "False", "SGLANG_RUN_ID": "r"}, ""),
        ({}, {"SGLANG_ENABLE_X": "1"}, "SGLANG_ENABLE_X"),
        ({"SGLANG_ENABLE_X": "1"}, {}, "SGLANG_ENABLE_X"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES"),
        ({}, {"LD_PRELOAD": "x.so"}, "LD_PRELOAD"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "AUTO"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_what_an_import_may_have_read_must_not_have_changed(imported: dict[str, str], now: dict[str, str], name: str):
    assert changed(imported, now) == name


MODELS = {
    "qwen3": "class Qwen3ForCausalLM(nn.Module):\n    pass\nEntryClass = Qwen3ForCausalLM\n",
    "llama": "class LlamaForCausalLM(nn.Module):\n    pass\nclass LlamaForCausalLMEagle:\n    pass\n",
    "llava": "class Llava:\n    def load(self): ModelRegistry.resolve_model_cls()\n",
    "transformers": "class TransformersForCausalLM:\n    pass\n",
    "registry": "",
    "__init__": "",
}


@pytest.mark.parametrize(
    ("architectures", "flags", "left_out"),
    [
        (["Qwen3ForCausalLM"], [], ("llama", "llava")),
        (["LlamaForCausalLM"], [], ("llava", "qwen3")),
        (["Unknown"], [], ()),
        (["Llava"], [], ()),
        ([], [], ()),
        (["Qwen3ForCausalLM"], ["--speculative-algorithm", "EAGLE"], ()),
        (["Qwen3ForCausalLM"], ["--model-impl", "transformers"], ()),
    ],
)
def test_models_that_are_not_served_are_left_out(architectures: list[str], flags: list[str], left_out: tuple[str, ...], tmp_path: Path):
    for name, text in MODELS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    assert other_models(["--model-path", str(tmp_path), *flags], tmp_path) == left_out
    assert other_models(["--model-path", str(tmp_path / "none"), *flags], tmp_path) == ()


def test_sglang_starts_by_itself_where_it_is_to():
    assert program(SglangConfig(quick_start=False)) == ("-m", "sglang.launch_server")
