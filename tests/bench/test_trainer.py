"""`bench trainer`: the real thing on a tiny model, its plain loop against one sample at a time, the report from numbers that are known."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.raw import Fact, Raw, Record, Round, read, write
from benchmarks.report import render
from benchmarks.shapes import num_elements, shape_of
from benchmarks.trainer import measure as running
from benchmarks.trainer import spec as specs
from benchmarks.trainer.batch import make_batch
from benchmarks.trainer.contender import build_model, contend, flops_of_shape, shape_config
from benchmarks.trainer.parts import REST, Stopwatch
from benchmarks.trainer.plain import PlainLoop, group_advantages, make_rows
from benchmarks.trainer.report import build_report, report_of
from benchmarks.trainer.spec import MODEL, Contender, TrainerSpec, our_config, resolved
from benchmarks.trainer.trl_loss import make_rectangles
from streamrl.cli import main
from streamrl.errors import ConfigError, LaunchError
from tests.bench.known import raw_of
from tests.support.errors import raises

CPU = torch.device("cpu")
SMALL = resolved(TrainerSpec(answers=(16,), prompt_tokens=8, batch_tokens=300, rollouts=4, device="cpu", rounds=1, steps=1))


def test_a_batch_is_groups_with_answers_of_the_mean_that_was_asked_for() -> None:
    spec = resolved(TrainerSpec(shape="0.6B", batch_tokens=400_000))
    batch = make_batch(spec, 1500)
    answers = np.add.reduceat(batch.loss_mask, batch.offsets[:-1])
    assert len(np.unique(batch.tasks)) == 28 and batch.num_samples == 28 * 8
    assert answers.mean() == pytest.approx(1500, rel=0.15) and (batch.lengths - answers == 300).all()
    assert batch.lengths.max() <= specs.longest_sample(spec, 1500) == 7200 and specs.longest_sample(spec, 8000) == 16_384
    first = [batch.tokens[start : start + 300].tolist() for start in batch.offsets[:-1]]
    assert first[0] == first[7] != first[8]
    again = make_batch(spec, 1500)
    assert all(np.array_equal(getattr(batch, name), getattr(again, name)) for name in ("tokens", "offsets", "rewards"))


def test_a_shape_multiplies_its_own_parameters_of_a_mixture_those_that_a_token_meets() -> None:
    spec, shape = TrainerSpec(shape="4B"), shape_of("4B")
    found = flops_of_shape(spec, shape_config(spec))
    assert found.body == num_elements(shape) - shape.vocab * shape.hidden
    assert (found.head, found.attention) == (shape.vocab * shape.hidden, 36 * 32 * 128)
    spec, shape = TrainerSpec(shape="30B-A3B-6"), shape_of("30B-A3B-6")
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 2 * 128 + 2 * 2048  # attention, router, norms
    found = flops_of_shape(spec, shape_config(spec))
    assert found.body == 6 * (layer + 8 * 3 * 2048 * 768) + 2048
    assert (found.head, found.attention) == (shape.vocab * shape.hidden, 6 * 32 * 128)


def test_the_plain_loop_has_the_gradient_of_one_sample_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model(SMALL, tmp_path)
    batch = make_batch(SMALL, 16)
    loop = PlainLoop(msgspec.structs.replace(SMALL, kept_layers=2), tmp_path, CPU, Stopwatch(CPU))
    loop.start(batch)
    rows = make_rows(batch, loop.settings()["row"], CPU)
    assert len(rows) > 1 and max(int(row.starts.diff().gt(0).sum()) for row in rows) > 2, "several samples share a row"
    seen: list[torch.Tensor] = []

    def step(optimizer: torch.optim.AdamW) -> None:
        seen.extend(master.grad.clone() for group in optimizer.param_groups for master in group["params"] if master.grad is not None)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    loop.step(batch)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    advantages, total = group_advantages(batch), int(batch.loss_mask.sum())
    for n in range(batch.num_samples):
        own = slice(batch.offsets[n], batch.offsets[n + 1])
        ids, trained = torch.from_numpy(batch.tokens[own].astype(np.int64)), torch.from_numpy(batch.loss_mask[own])
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0][trained[1:]]
        ratio = torch.exp(logprobs - torch.from_numpy(batch.sampler_logprobs[own])[trained])
        (-(ratio * advantages[n]).sum() / total).backward()
    wanted = [p.grad for p in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert len(seen) == len(wanted)
    for found, exact in zip(seen, wanted, strict=True):
        assert exact is not None
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_every_trained_token_is_in_one_row_and_parts_exclude_each_other() -> None:
    batch = make_batch(SMALL, 16)
    length = specs.row_length(int(batch.lengths.max()))
    rows = make_rows(batch, length, CPU)
    assert {tuple(row.ids.shape) for row in rows} == {(1, length)} and len({row.starts.shape for row in rows}) == 1
    trained = sorted(batch.tokens[batch.loss_mask].tolist())
    assert sorted(token for row in rows for token in row.ids[0, row.target].tolist()) == trained
    rectangles = make_rectangles(batch, CPU)
    assert sorted(t for one in rectangles for t in one["completion_ids"][one["completion_mask"] == 1].tolist()) == trained
    assert all(one["prompt_ids"].shape[1] == 8 for one in rectangles)
    watch = Stopwatch(CPU)
    with watch.part("forward"):
        pass
    with watch.running() as seconds, watch.part("head"), watch.part("forward"):
        pass
    assert set(seconds) == {REST, "head", "forward"} and min(seconds.values()) >= 0


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"rounds": 0}, {"option": "--rounds", "got": 0}),
        ({"ranks": 0}, {"option": "--ranks", "got": 0}),
        ({"batch_tokens": -1}, {"option": "--batch-tokens", "got": -1}),
        ({"kept_layers": -2}, {"option": "--kept-layers", "got": -1}),
        ({"contenders": ()}, {"option": "--contenders"}),
        ({"answers": (4,)}, {"option": "--answers", "got": 4}),
        ({"shape": "4B", "answers": (16_200,)}, {"option": "--answers", "got": 16_200}),
    ],
)
def test_what_cannot_be_measured_is_refused(values: dict[str, Any], found: dict[str, Any]) -> None:
    with raises(ConfigError, **found):
        resolved(TrainerSpec(**values))


def test_rows_and_layers_are_chosen_by_arithmetic_and_settings_are_the_products() -> None:
    assert [specs.row_length(longest) for longest in (100, 7200, 8192, 8193, 16_384)] == [400, 8192, 8192, 16_384, 16_384]
    small, large = shape_of("0.6B"), shape_of("4b")
    assert large.name == "4B"
    assert specs.layers_kept(small, 8192, 149e9) == 28 and specs.layers_kept(large, 8192, 149e9) == 36
    assert 0 < specs.layers_kept(large, 16_384, 149e9) < 36 and specs.layers_kept(large, 8192, 80e9) == 0
    assert specs.layers_kept(large, 8192, float("inf")) == 36
    assert [specs.named_shape(text) for text in ("0.6b", "4B", "tiny")] == ["0.6B", "4B", "tiny"]
    assert specs.named_shape("30b-a3b-6") == "30B-A3B-6"
    with raises(ConfigError, option="--shape", got="30B-A3B"):  # no GPU has room for all of it
        specs.named_shape("30B-A3B")
    spec = resolved(TrainerSpec(shape="4B", settings=("trainer.activations=0",)))
    assert our_config(spec).trainer.activations == 0 and our_config(spec).model.dtype == "bfloat16"
    with raises(ConfigError, key="trainer.micro_tokens"):
        our_config(msgspec.structs.replace(spec, settings=("trainer.micro_tokens=0",)))


@pytest.mark.parametrize(
    ("key", "value"), [("trainer.ranks", "2"), ("trainer.dtype", "float32"), ("model.dtype", "float32"), ("trainer.device", "cpu")]
)
def test_settings_do_not_contradict_what_the_report_goes_by(key: str, value: str) -> None:
    with raises(ConfigError, key=key):
        our_config(resolved(TrainerSpec(shape="4B", settings=(f"{key}={value}",))))


def measured(contender: Contender, cell: str, number: int, step_s: float, ranks: int = 1) -> Round:
    values = {"step_s": step_s, "ranks": ranks, "samples": 64, "tokens": 100_000, "trained": 80_000, "flops": 989e12, "positions": 125_000}
    return Round(cell=cell, contender=contender, round=number, values={**values, "peak_bytes": 2**36, "first_s": 30.0, "load": 0.0})


def raw(shape: str = "4B", **spec: Any) -> Raw:
    ours, plain = Contender.OURS, Contender.PLAIN
    rounds = [measured(ours, f"{shape}, 1500", number, 2.0 + number / 2, spec.get("ranks", 1)) for number in range(3)]
    rounds += [measured(plain, f"{shape}, 1500", number, 2.5 + number / 2) for number in range(3)]
    facts = [
        Fact("device", "NVIDIA H200", 989e12),
        Fact("parts", f"{ours} ({shape}, 1500)", {"forward": 0.5, "backward": 1.5}),
        Fact("settings", f"{plain} ({shape}, 1500)", {"row": 8192, "compiled": True}),
        Fact("left out", f"{Contender.TRL} ({shape}, 1500)", "ModuleNotFoundError: No module named 'trl'"),
    ]
    return raw_of("trainer", resolved(TrainerSpec(shape=shape, answers=(1500,), **spec)), rounds, facts)


def test_the_report_has_speed_utilisation_and_what_is_left_out(tmp_path: Path) -> None:
    text = render(build_report(raw()))
    assert "| 4B    | 1500    | streamrl   | 40,000 (33,333 - 50,000)          | 40.0% | 64.0     | 80.0% | 1.20           |" in text
    assert "| 4B    | 1500    | plain loop | 33,333 (28,571 - 40,000)          | 33.3% |" in text
    assert "| streamrl (4B, 1500) | -       | 0.500   | -    | 1.500    |" in text
    assert "6 FLOPs a parameter" in text and "H200 989 TFLOP/s" in text
    assert "Left out: trl (4B, 1500): ModuleNotFoundError: " in text
    assert [(target.got, target.met) for target in build_report(raw()).targets] == [("1.20", True), ("40.0%", False)]
    assert [check.held for check in build_report(raw()).checks] == [True]
    write(tmp_path, raw().header, [*raw().facts, *raw().rounds])
    assert msgspec.json.encode(report_of(tmp_path)) == msgspec.json.encode(build_report(read(tmp_path, "trainer")))
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report_of(tmp_path)
    assert first == {path.name: path.read_bytes() for path in tmp_path.iterdir()} and set(first) == {
        *("raw.jsonl", "report.json", "table.md", "trainer.png")
    }


def test_targets_are_judged_by_all_batches_that_were_asked_for_and_by_the_shortest() -> None:
    whole = raw()
    whole.header.spec["answers"] = [8000, 1500]
    speed, mfu = build_report(whole).targets
    assert (speed.got, speed.met) == ("1.20; 8000: nothing to compare with", None)
    assert (mfu.got, mfu.met) == ("40.0%", False), "of the shorter answers, which stand second"
    whole.header.spec["answers"] = [500, 1500]
    assert [(target.got, target.met) for target in build_report(whole).targets] == [
        ("1.20; 500: nothing to compare with", None),
        ("-", None),
    ]
    whole.rounds.extend(measured(Contender.OURS, "4B, 500", number, 1.0) for number in range(3))
    whole.rounds.extend(measured(Contender.PLAIN, "4B, 500", number, 1.5) for number in range(3))
    assert [target.met for target in build_report(whole).targets] == [True, True]


def test_reports_of_mixtures_ranks_and_failures() -> None:
    whole = raw("30B-A3B-6")
    for one in whole.rounds:
        one.values["head_flops"] = 0.4 * 989e12
    whole.facts[1].value["head"] = 0.5  # of 2.5 s
    report = build_report(whole)
    assert [(target.got, target.met) for target in report.targets][1:] == [("30.0%", True)]
    assert "seconds: streamrl (30B-A3B-6, 1500) 30.0%." in render(report)
    report = build_report(raw("8B", ranks=2))
    assert "| 8B    | 1500    | streamrl, 2 ranks | 40,000 (33,333 - 50,000)          | 20.0% |" in render(report)
    assert [(target.got, target.met) for target in report.targets] == [("8B, 1500 (0.60)", False), ("20.0%", False)]
    whole = raw()
    failed = [*whole.facts, Fact("left out", f"{Contender.OURS} (4B, 1500)", "OutOfMemory: 9 GiB")]
    rounds = [one for one in whole.rounds if one.contender != Contender.OURS]
    for facts, left in ((failed, rounds), (whole.facts, rounds), (whole.facts[:1], [])):
        report = build_report(msgspec.structs.replace(whole, rounds=left, facts=facts))
        assert [check.held for check in report.checks] == [False] and report.targets[1].met is None
        assert render(report)


@pytest.mark.process
def test_a_process_that_dies_is_left_out_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = {"args": [sys.executable, "-c", "import os; os._exit(3)"], "env": dict(os.environ)}
    monkeypatch.setattr(running, "child", lambda *_, **__: command)
    [left_out] = running.ran("plain", 0, SMALL, tmp_path)
    assert isinstance(left_out, Fact) and (left_out.name, left_out.about) == ("left out", "plain (tiny, 16)")
    assert left_out.value.endswith("exit code 3")
    with pytest.raises(LaunchError, match="exit code 0, got 3"):
        list(running.ran("model", 0, SMALL, tmp_path))


def test_a_model_is_kept_for_other_runs_of_the_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ran(name: str, *_: Any) -> list[Round]:
        asked.append(name)
        return [Round(cell="tiny, 16", contender=name, round=0, values={"step_s": 1.0})] if name != "model" else []

    monkeypatch.setattr(running, "ran", ran)
    spec = msgspec.structs.replace(SMALL, contenders=(Contender.PLAIN,), model_dir=str(tmp_path / "models"))
    for name in ("first", "second"):
        running.measure(spec, tmp_path / name, "")
        assert len(read(tmp_path / name, "trainer").rounds) == 1
    assert asked == ["model", "plain", "plain"]
    with raises(ConfigError, got="tiny 0"):
        running.measure(msgspec.structs.replace(spec, shape="tiny-moe"), tmp_path / "third", "")


FAILS = """
import json, os, sys
name, spec, how, worst = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
def tell(**record):
    print(json.dumps(record), flush=True)
for mean in spec["answers"] if name != "model" else []:
    cell = f"tiny, {mean}"
    tell(type="round", cell=cell, contender=name, round=0, values={"step_s": 1.0})
    if mean == worst and how == "dies":
        os._exit(3)
    if mean == worst:
        tell(type="fact", name="left out", about=f"{name} ({cell})", value="OutOfMemory: 9 GiB")
        break
    tell(type="fact", name="settings", about=f"{name} ({cell})", value={})
"""


@pytest.mark.process
@pytest.mark.parametrize(("how", "why"), [("says", "OutOfMemory: 9 GiB"), ("dies", "its process ended with exit code 3")])
def test_what_failed_is_struck_off_and_what_stood_behind_it_is_tried(
    how: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(_: str, name: str, number: int, text: str, *__: object, env: object) -> dict[str, Any]:
        return {"args": [sys.executable, "-c", FAILS, name, text, how, "32"]}

    monkeypatch.setattr(running, "child", child)
    spec = msgspec.structs.replace(SMALL, answers=(16, 32, 48), contenders=(Contender.PLAIN,), rounds=2)
    running.measure(spec, tmp_path / "two", "")
    found = read(tmp_path / "two", "trainer")
    assert [one.cell for one in found.rounds] == ["tiny, 16", "tiny, 32", "tiny, 16", "tiny, 48"]
    assert found.named("left out") == {"plain (tiny, 32)": why}
    running.measure(msgspec.structs.replace(spec, rounds=1), tmp_path / "one", "")
    [first, untried] = read(tmp_path / "one", "trainer").named("left out").items()
    assert first == ("plain (tiny, 32)", why)
    assert untried[0] == "plain (tiny, 48)" and "not tried, because plain (tiny, 32)" in untried[1]


def here(name: str, number: int, spec: TrainerSpec, directory: Path) -> Iterator[Record]:
    """Stand in for `running.ran`: only the plain loop gets a process of its own."""
    if name == MODEL:
        build_model(spec, directory / "model")
    elif name == Contender.PLAIN:
        yield from RAN(name, number, spec, directory)
    else:
        yield from contend(Contender(name), number, spec, directory / "model")


RAN = running.ran
SIZE = ["--answers", "16", "--prompt", "8", "--rollouts", "4", "--batch-tokens", "300", "--rounds", "1", "--steps", "1", "--device", "cpu"]


def test_what_fails_is_said_and_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "ran", here)
    only = ["--contenders", "streamrl", "--set", "debug.memory_tokens=1", "--rounds", "2"]
    assert main(["bench", "trainer", *SIZE, *only, "--out", str(tmp_path / "out")]) == 1
    assert "OutOfMemory" in capsys.readouterr().out
    found = read(tmp_path / "out", "trainer")
    assert [fact.about for fact in found.facts if fact.name == "left out"] == ["streamrl (tiny, 16)"] and not found.rounds


@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_command_trains_measures_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "ran", here)
    out = tmp_path / "out"
    assert main(["bench", "trainer", *SIZE, "--set", "trainer.minibatches=2", "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["contender"]: row["values"] for row in report["rows"]}
    assert {"streamrl", "plain"} <= set(rows) and rows["streamrl"]["ratio"]["p50"] > 0
    assert all(values["fill"]["p50"] > 0 and values["peak_gib"]["p50"] > 0 for values in rows.values())
    parts = read(out, "trainer").named("parts")
    assert {"prepare", "forward", "head", "backward", "optimizer"} <= set(parts["streamrl (tiny, 16)"]) & set(parts["plain (tiny, 16)"])
    left_out = read(out, "trainer").named("left out")
    assert ("trl" in rows) != any(name.startswith("trl") for name in left_out), "either it runs, or it is said why not"
    assert main(["bench", "trainer", *SIZE, "--out", str(out)]) != 0
    assert "expected a new directory" in capsys.readouterr().err
