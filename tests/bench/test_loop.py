import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.loop import run
from benchmarks.loop.links import EngineEnd, TrainerEnd, receive
from benchmarks.loop.plain import Rollouts, pack
from benchmarks.loop.report import build_report, report_of
from benchmarks.loop.sampler import Sampler
from benchmarks.loop.ways import LoopSpec, Way, quickstart, warm, write_problems
from benchmarks.names import names
from benchmarks.raw import Raw, Round, read, write
from benchmarks.report import render
from streamrl.cli import main
from streamrl.config.load import load
from streamrl.config.tree import DataConfig, EvaluationConfig
from streamrl.errors import ConfigError, LaunchError
from tests.bench.known import contend_here, raw_of, small_quickstart
from tests.support.errors import raises

ROOT = Path(__file__).parents[2]


def run_of(part: str, label: str, number: int, batch_s: float, cpu_s: dict[str, float]) -> Round:
    batches = 10
    values = {"seconds": batches * batch_s, "batches": batches, "samples": 512 * batches, "tokens": 6000 * batches}
    values |= {"staleness": 1.0, "wait_s": 0.02 * batches, "step_s": 0.1 * batches}
    return Round(cell=part, contender=label, round=number, values={**values, **{f"cpu/{kind}": s for kind, s in cpu_s.items()}})


def raw() -> Raw:
    runs = []
    for number, slow in enumerate((1.0, 2.0, 1.5)):  # another process slows whole rounds down: ratios do not see it
        runs.append(run_of("overhead", "stream", number, 0.12 * slow, {"trainer": 1.2, "nats-server": 0.3}))
        runs.append(run_of("overhead", "queues", number, 0.10 * slow, {"all": 1.0}))
        runs.append(run_of("tail", "asynchronous", number, 0.1 * slow, {"trainer": 0.1}))
        runs.append(run_of("tail", "lockstep", number, 0.3 * slow, {"trainer": 0.1}))
    return raw_of("loop", LoopSpec(batches=20, skip=10, tail_batches=20, tail_skip=10), runs)


def test_overhead_and_gain_are_ratios_of_rounds_and_the_table_says_whether_the_targets_are_met(tmp_path):
    stream, queues, asynchronous, lockstep = build_report(raw()).rows
    assert queues.values["overhead"].p50 == pytest.approx(1.2) and queues.values["cpu_overhead"].p50 == pytest.approx(1.5)
    assert asynchronous.values["gain"].p50 == pytest.approx(3.0)
    assert "gain" not in queues.values and "overhead" not in lockstep.values, "the two parts are not compared with each other"
    middle = {name: value.p50 for name, value in stream.values.items()}
    assert middle["batches_per_s"] == pytest.approx(1 / 0.18) and middle["samples_per_s"] == pytest.approx(512 / 0.18)
    assert (middle["wait_ms"], middle["step_ms"]) == pytest.approx((20, 100))
    assert (middle["cpu/nats-server"], middle["cpu/trainer"], middle["cpu_ms"]) == pytest.approx((30, 120, 150))

    def targets(rounds: list[Round]) -> list[tuple[str, bool | None]]:
        return [(target.got, target.met) for target in build_report(replace(raw(), rounds=rounds)).targets]

    text = render(build_report(raw()))
    assert "| <= 1.25 | 1.20 (1.20 - 1.20) | yes " in text
    assert "| >= 2.00 | 3.00 (3.00 - 3.00) | yes " in text
    assert " queues | +20% (+20% to +20%)      | +50% " in text
    assert "by process: trainer 120, nats-server 30." in text
    slow = [
        run_of("overhead", label, number, 0.2 if label == "stream" else 0.1, {}) for number in range(3) for label in ("stream", "queues")
    ]
    assert targets(slow) == [("2.00 (2.00 - 2.00)", False), ("-", None)]
    assert targets(slow[:2]) == [("2.00 (2.00 - 2.00); 3 rounds are needed", None), ("-", None)]
    write(tmp_path, raw().header, raw().rounds)
    assert msgspec.json.encode(report_of(tmp_path)) == msgspec.json.encode(build_report(raw()))
    assert (tmp_path / "loop.png").read_bytes().startswith(b"\x89PNG")


def test_the_loop_is_the_quickstarts(tmp_path):
    spec = LoopSpec()
    example = load(ROOT / "examples" / "quickstart" / "quickstart.toml")
    ours = warm(quickstart(spec, tmp_path, name="quickstart"))
    same = {"run": example.run, "data": DataConfig(), "evaluation": EvaluationConfig()}
    assert replace(ours, **same) == replace(example, **same)
    assert ours.data.max_prompt_tokens == example.data.max_prompt_tokens
    write_problems(tmp_path / "train.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    known = [
        json.loads(line) for name in ("train", "heldout") for line in (ROOT / f"examples/quickstart/{name}.jsonl").read_text().splitlines()
    ]
    assert sorted(map(str, rows)) == sorted(map(str, known))


async def test_groups_cross_the_socket_and_the_end_is_noticed():
    here, there = socket.socketpair()
    group = Rollouts(4, (5, 6), [(7,)], [(-0.1,)], [((1, 2),)], [1.0])
    with here, there:
        engine, trainer = EngineEnd(here), TrainerEnd(there)
        await engine.put(group)
        assert trainer.get() == group
        trainer.close()
        assert await engine.weights() is None
        here.shutdown(socket.SHUT_WR)
        with raises(LaunchError, ended="sampling half"):
            trainer.get()
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall((100).to_bytes(8, "little") + b"half")
        assert receive(there) is None


BUSY = """
import time
print(flush=True)
input()
while time.process_time() < 0.8: sum(range(1000))
print(time.process_time(), flush=True)
input()
"""


@pytest.mark.process
def test_the_sampler_counts_what_a_process_says_it_used_also_once_it_has_ended():
    command = [sys.executable, "-c", BUSY, "worker", "demo"]
    with Sampler(os.getpid()) as sampler, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        time.sleep(0.6)
        start = time.time()
        print(file=child.stdin, flush=True)
        own = float(child.stdout.readline())
        time.sleep(0.6)
        end = time.time()
        child.communicate("\n")
        time.sleep(0.6)
    busy, later = sampler.between(start, end), sampler.between(end, time.time())
    before = sampler.between(0.0, start)["demo"]
    assert before + busy["demo"] == pytest.approx(own, abs=0.1) and busy["demo"] > before
    assert later["demo"] < 0.1 and "other" not in busy


def test_packing_without_a_stream_keeps_ages_and_masks(tmp_path):
    config = quickstart(LoopSpec(), tmp_path, name="x")
    one = Rollouts(4, (5, 6), [(7, 8, 9), (7,)], [(-0.1, -0.2, -0.3), (-0.4,)], [((2, 1), (1, 2)), ((1, 2),)], [1.0, 0.0])
    batch = pack([one], config, 3)
    np.testing.assert_array_equal(batch.tokens, [5, 6, 7, 8, 9, 5, 6, 7])
    np.testing.assert_array_equal(batch.loss_mask, [0, 0, 1, 1, 1, 0, 0, 1])
    np.testing.assert_array_equal(batch.staleness, [0, 0, 2, 2, 1, 0, 0, 1])
    np.testing.assert_array_equal(batch.offsets, [0, 5, 8])
    np.testing.assert_allclose(batch.sampler_logprobs[batch.loss_mask], [-0.1, -0.2, -0.3, -0.4], rtol=1e-6)
    assert batch.rewards.tolist() == [1.0, 0.0] and batch.tasks.tolist() == [4, 4] and batch.rollouts.tolist() == [0, 1]
    assert names("--ways", "queues,stream,queues", Way) == (Way.QUEUES, Way.STREAM)
    with raises(ConfigError, option="--ways", got="fast"):
        names("--ways", "fast", Way)


@pytest.mark.process
def test_a_tiny_run_measures_every_way_and_both_tails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """In this process and over the bus in memory; test_screens has a run of the stream under `up`."""
    monkeypatch.setattr(run, "contend", contend_here)
    monkeypatch.setattr(run, "quickstart", small_quickstart)
    out = tmp_path / "out"
    flags = "--backend table --batches 2 --skip 1 --rounds 1 --tail-rounds 1 --tail-batches 7 --tail-token-ms 0.5"
    assert main(["bench", "loop", *flags.split(), "--out", str(out)]) == 0
    assert "stream against" in capsys.readouterr().out
    found = read(out, "loop").rounds
    assert [one.contender for one in found] == ["stream", "queues", "pipes", "memory", "asynchronous", "lockstep"]
    for one in found:
        assert one.values["batches"] == 1 and one.values["seconds"] > 0
        assert one.values["samples"] == 64
    assert all(one.values["staleness_most"] <= 1 for one in found if one.cell == "overhead")
    assert found[-1].values["staleness_most"] == 0, "lockstep trains on its own samples"
    assert (out / "loop.png").is_file() and (out / "table.md").is_file()
