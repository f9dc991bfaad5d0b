"""Profiles of single steps: a trace that opens, of the versions that were asked for, at no cost to digits or to the run."""

import gzip
import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.config.load import convert
from streamrl.config.tree import Config, DebugConfig, TrainerConfig
from streamrl.errors import ConfigError, OutOfMemory
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.torch.profiling import StepProfiler
from tests.support.errors import raises
from tests.support.trainers import Rollouts


def make(model_dir: Path, profile_dir: Path | None, *, device: Any = "cpu", limit: int = 0) -> Trainer:
    debug = DebugConfig(profile_versions=(2,), memory_tokens=limit)
    return make_trainer(Config(trainer=TrainerConfig(device=device), debug=debug), model_dir, profile_dir=profile_dir)


def events(path: Path) -> list[dict[str, Any]]:
    """Of a Chrome trace."""
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def test_a_traced_step_has_equal_digits(model_dir: Path, rollouts: Rollouts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    profiled, bare = make(model_dir, tmp_path / "profile"), make(model_dir, None)
    for step in range(3):
        assert profiled.step(rollouts(step)) == bare.step(rollouts(step))
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "v00000002-rank0.json.gz" and f"event=profiled path={trace}" in caplog.text
    names = {event.get("name", "") for event in events(trace)}
    assert {"aten::scaled_dot_product_attention", "Optimizer.step#AdamW.step"} <= names
    assert any(name.startswith("autograd::engine::evaluate_function") for name in names), "the backward pass is in it"


def test_what_fails_leaves_a_trace_or_a_line(model_dir: Path, rollouts: Rollouts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(model_dir, tmp_path, limit=1)
    for step in range(2):
        with raises(OutOfMemory, micro_tokens=0):
            trainer.step(rollouts(step))
    assert [path.name for path in tmp_path.iterdir()] == ["v00000002-rank0.json.gz"]
    (tmp_path / "profile").write_text("a file")
    assert make(model_dir, tmp_path / "profile").step(rollouts(1)) == make(model_dir, None).step(rollouts(1))
    assert "event=profile_lost" in caplog.text


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("it is broken")


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_profiler_that_breaks_costs_a_line(
    method: str, model_dir: Path, rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = torch.profiler.profile.stop
    monkeypatch.setattr(torch.profiler.profile, method, lambda self: (whole(self) if method == "stop" else None, broken()))
    assert make(model_dir, tmp_path).step(rollouts(1)) == make(model_dir, None).step(rollouts(1))
    assert "event=profile_lost" in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("breaks", ["_dump_snapshot", "_record_memory_history", "stop"])
def test_the_history_of_memory_ends_with_its_step_whatever_breaks(breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, kept = torch.profiler.profile.stop, [False]

    def record(enabled: str | None = "all", **_: object) -> None:
        if breaks == "_record_memory_history" and enabled:
            kept.append(True)
            broken()
        kept.append(enabled is not None)

    def stop(profiler: torch.profiler.profile) -> None:
        whole(profiler)
        if breaks == "stop":
            raise KeyError("of another kind")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", broken)
    monkeypatch.setattr(torch.profiler.profile, "stop", stop)
    profiler = StepProfiler(tmp_path, [1], torch.device("cuda"), rank=0)
    with pytest.raises(KeyError) if breaks == "stop" else nullcontext(), profiler.step(1):
        assert kept[-1]
    assert not kept[-1]


def test_what_is_no_version_number_is_refused() -> None:
    for wrong in ([0], [-1], [1.5], ["x"], 3, [True]):
        with pytest.raises(ConfigError, match=r"debug\.profile_versions"):
            convert({"debug": {"profile_versions": wrong}}, where="run.toml")


@pytest.mark.gpu
def test_on_a_gpu_the_history_of_its_memory_is_there_too(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    trainer = make(model_dir, tmp_path, device="cuda")
    for step in range(3):
        trainer.step(rollouts(step))
    assert {path.name for path in tmp_path.iterdir()} == {"v00000002-rank0.json.gz", "v00000002-rank0.pickle"}
    assert any(event.get("cat") == "kernel" for event in events(tmp_path / "v00000002-rank0.json.gz"))
    history = pickle.loads((tmp_path / "v00000002-rank0.pickle").read_bytes())
    assert any(history["device_traces"])
