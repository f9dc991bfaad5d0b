"""`bench rollouts`: sets of flags and what is made of their speeds, its configuration, and rounds over a stack in this process."""

import json
import os
import tomllib
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from benchmarks.raw import Fact, Round
from benchmarks.report import render
from benchmarks.rollouts import measure
from benchmarks.rollouts.flags import (
    CONFIGURED,
    FLAG_SETS,
    SWEEP,
    Speed,
    best_of,
    combined,
    config_with,
    flags_with,
    gain,
    toml_lines,
    unknown_flags,
)
from benchmarks.rollouts.plain import address_of, body_of
from benchmarks.rollouts.report import build_report
from benchmarks.rollouts.spec import BEST, LEFT_OUT, MOST_SETS, PLAIN, SLOTS, STACK, TOGETHER, RolloutsSpec, config_of, with_tokens
from benchmarks.rollouts.stack import Tally
from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.cli import main
from streamrl.config.tree import Config
from streamrl.consumers.training.reader import Incoming
from streamrl.core.records import Ended, Marked
from streamrl.data.model import ensure_model
from streamrl.data.streamed import open_task_rows
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.tasks import RolloutTask, Sampling
from tests.bench.known import raw_of
from tests.support.errors import raises
from tests.support.harness import make_run, services

T = TypeVar("T")
RUN = """
[run]
name = "q"
[model]
max_len = 32
[data]
train = "train.jsonl"
heldout = "train.jsonl"
max_prompt_tokens = 16
[tasks]
num_rollouts = 4
drop_zero_variance = false
[sampling]
max_new_tokens = 5
temperature = 0.7
[producer]
concurrency = 8
[engine]
kind = "{engine}"
slots = 16
[trainer]
backend = "{backend}"
[evaluation]
every = 20
"""
SIX = {
    "mem_fraction_static": 0.35,
    "attention-backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
    "cuda_graph_max_bs_decode": 512,
    "cuda_graph_bs_decode": [1, 16, 512],
}


@pytest.fixture
def run_file(tmp_path: Path):
    def write(engine: str = "local", backend: str = "torch") -> str:
        rows = ({"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10, 20) for b in range(2, 6))
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "run.toml"
        path.write_text(RUN.format(engine=engine, backend=backend))
        return str(path)

    return write


def test_a_set_changes_flags_and_leaves_out_what_is_sglangs_to_choose():
    assert flags_with(SIX, FLAG_SETS["defaults"].changes) == {"mem_fraction_static": 0.35, "grammar_backend": "none"}
    assert flags_with(SIX, FLAG_SETS["fa3"].changes)["attention_backend"] == "fa3"
    assert flags_with(SIX, {})["attention_backend"] == "triton" and "attention-backend" not in flags_with(SIX, {})
    assert RolloutsSpec(config="run.toml", sets=("fa3",)).compared == (CONFIGURED, "fa3")
    config = config_with(Config(), {"disable_radix_cache": True})
    assert config.engine.sglang.flags == {"disable_radix_cache": True}


def test_no_set_changes_what_log_probs_mean():
    changed = {name for one in FLAG_SETS.values() for name in one.changes}
    meaning = {"enable_mixed_chunk", "quantization", "kv_cache_dtype", "dtype", "speculative_algorithm", "enable_fp32_lm_head"}
    assert not changed & meaning


def test_flags_that_this_sglang_lacks_are_found_in_its_text():
    text = "attention_backend: A[str] = None\n    scheduler_recv_interval: int = 1"
    assert unknown_flags({"attention_backend": "fa3", "scheduler_recv_interval": 4}, text) == []
    assert unknown_flags({"prefill_decode_interval": 8, "cuda_graph_bs_decode": None}, text) == ["prefill_decode_interval"]


@pytest.mark.parametrize(
    ("speeds", "best", "together"),
    [
        ({CONFIGURED: 100, "fa3": 102}, CONFIGURED, {}),
        ({CONFIGURED: 100, "fa3": 110, "no-prefix-cache": 90}, "fa3", {}),
        (
            {CONFIGURED: 100, "fa3": 120, "no-prefix-cache": 110},
            "fa3",
            {"disable_radix_cache": True, "attention_backend": "fa3"},
        ),
        ({"fa3": 120, "no-prefix-cache": 110}, CONFIGURED, {}),
        ({}, CONFIGURED, {}),
    ],
)
def test_the_best_set_is_faster_by_more_than_noise_and_those_that_helped_are_put_together(speeds, best, together):
    found = [Speed(name, {10: value, 300: 2 * value}) for name, value in speeds.items()]
    assert best_of(found) == best and combined(found) == together


def test_a_gain_is_taken_over_the_lengths_that_both_sets_have():
    base = Speed(CONFIGURED, {10: 100.0, 300: 400.0})
    assert gain(Speed("a", {10: 200.0, 300: 200.0}), base) == pytest.approx(1.0)
    assert gain(Speed("a", {10: 400.0, 50: 1.0}), base) == pytest.approx(4.0)
    assert gain(Speed("a", {}), base) == 0.0


def test_the_lines_for_a_file_give_the_flags_back():
    flags = {**flags_with(SIX, {}), "model_loader_extra_config": {"threads": 4, "of": ["a", "b"]}}
    assert tomllib.loads(toml_lines(flags))["engine"]["sglang"]["flags"] == flags


def test_what_is_asked_is_checked_before_anything_starts(run_file, tmp_path):
    for wrong in ({"tokens": ()}, {"tokens": (1, 2, 3), "rollouts": (4, 5)}, {"rollouts": (0,)}, {"config": ""}):
        with pytest.raises(ConfigError):
            RolloutsSpec(**{"config": "run.toml", **wrong})
    with raises(ConfigError, option="--sets", got="fa9"):
        RolloutsSpec(config="run.toml", sets=("fa9",))
    with raises(ConfigError, option="--sets", got=MOST_SETS + 1):
        RolloutsSpec(config="run.toml", sets=tuple(FLAG_SETS)[: MOST_SETS + 1])
    with raises(ConfigError, key="engine.kind"):
        config_of(RolloutsSpec(config=run_file(), sweep=True), tmp_path)
    with raises(ConfigError, key="engine.workers"):
        config_of(RolloutsSpec(config=run_file(), plain=True, changes=("engine.workers=0",)), tmp_path)
    with raises(ConfigError, key="ray.address"):
        config_of(RolloutsSpec(config=run_file(), changes=("ray.address=local",)), tmp_path)


def test_the_stack_has_the_runs_configuration_without_trainer_and_evaluation(run_file, tmp_path):
    spec = RolloutsSpec(config=run_file(), tokens=(4, 40), rollouts=(7, 3), changes=("engine.slots=3",))
    config = config_of(spec, tmp_path)
    assert (config.engine.slots, config.model.max_len, config.data.heldout, config.supervise.max_restarts) == (3, 56, "", 0)
    assert spec.rounds_of() == ((4, 7), (40, 3))
    short = with_tokens(config, 4).sampling
    assert (short.max_new_tokens, short.temperature, short.ignore_eos) == (4, 0.7, True)


def test_the_plain_client_asks_for_what_a_task_says():
    sampling = Sampling(max_new_tokens=4, temperature=0.7, ignore_eos=True)
    task = RolloutTask(run="r", index=0, source="main", row=0, prompt_ids=(5, 6), num_rollouts=3, sampling=sampling)
    alone, group = body_of(task, grouped=False), body_of(task, grouped=True)
    assert (alone["input_ids"], group["input_ids"]) == ([5, 6], [[5, 6]] * 3)
    wanted = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
    assert alone["sampling_params"] == group["sampling_params"] == wanted and alone["return_logprob"] is True


def test_a_server_is_found_by_its_command_line(tmp_path):
    (tmp_path / "server.yaml").write_text('api-key: "0a1b"\n')
    words = [
        "python",
        "-m",
        "sglang.launch_server",
        "--config",
        str(tmp_path / "server.yaml"),
        "--port",
        "4711",
        "--skip-tokenizer-init",
        "",
    ]
    address = address_of(words)
    assert (address.url, address.key, address.sglang) == ("http://127.0.0.1:4711", "0a1b", True)


def test_a_task_is_over_once_each_of_its_rollouts_has_ended_in_whatever_way():
    tally = Tally(2)
    tally.add(Incoming(Marked(1, "start"), None, None))
    for sequence, rollout in enumerate((0, 0, 1), 2):
        tally.add(Incoming(Ended(sequence, "main", 5, rollout, 2, "failed"), None, None))
    assert (tally.failed, tally.complete) == (2, False)
    tally.add(Incoming(Ended(9, "main", 6, None, 4, "failed"), None, None))
    tally.add(Incoming(Ended(10, "main", 6, 3, 4, "failed"), None, None))
    assert (tally.failed, tally.rollouts, tally.complete) == (6, 0, True)


def of_round(cell: str, contender: str, seconds: float, **more: float) -> Round:
    return Round(cell=cell, contender=contender, round=0, values={"rollouts": 100, "failed": 0, "tokens": 1000, "seconds": seconds, **more})


def test_the_report_says_the_share_where_time_goes_and_the_lines_of_the_best_set():
    rounds = [of_round(f"{SWEEP}10 tokens", CONFIGURED, 2.0, start_s=20.0), of_round(f"{SWEEP}10 tokens", "fa3", 1.0, start_s=30.0)]
    rounds += [of_round("10 tokens", PLAIN, 1.0), of_round("10 tokens", TOGETHER, 0.8)]
    rounds += [of_round("10 tokens", STACK, 1.25, **{"cpu/producer-0": 0.97, "cpu/engine-0": 0.2, "running": 30.0, "waiting": 0.0})]
    facts = [Fact(SLOTS, "all engines", 64), Fact(LEFT_OUT, "defaults", "no time left"), Fact(BEST, "fa3", {"attention_backend": "fa3"})]
    report = build_report(raw_of("rollouts", RolloutsSpec(config="run.toml"), rounds, facts))
    assert [(target.got, target.met) for target in report.targets] == [("10 tokens: 64.0%", False)]
    text = render(report)
    assert all(said in text for said in ('attention_backend = "fa3"', "no time left", "producer-0 97%", "limit: producer-0", "64 slots 30"))
    fast = build_report(raw_of("rollouts", RolloutsSpec(config="run.toml"), [*rounds[2:4], of_round("10 tokens", STACK, 0.84)], facts[:1]))
    assert fast.targets[0].met is True and "limit:" not in render(fast)
    assert measure.changes_of(rounds) == {"attention_backend": "fa3"}
    alone = build_report(raw_of("rollouts", RolloutsSpec(config="run.toml"), [rounds[-1]]))
    assert alone.targets[0].met is None and "limit:" not in render(alone)


class InProcess:
    """Workers on the test's event loop over a bus in memory."""

    def __init__(self, run: RunDir, bus: Bus) -> None:
        self.run = run
        self.bus: Bus = bus

    @asynccontextmanager
    async def working(self, config: Config, kinds: Sequence[str]) -> AsyncGenerator[None]:
        async with services(config, self.run, self.bus, [kind for kind in kinds if kind != "rewarder"]):
            yield

    def names(self) -> Mapping[int, str]:
        return {os.getpid(): "all"}

    async def until(self, done: Awaitable[T]) -> T:
        return await done


async def test_stack_and_plain_clients_make_as_many_rollouts_of_each_length(run_file, tmp_path):
    spec = RolloutsSpec(config=run_file(), tokens=(2, 5), rollouts=(14, 8), plain=True)
    config = config_of(spec, tmp_path)
    run, config = make_run(tmp_path / "runs", config)
    ensure_model(config, run.model_dir)
    rows = open_task_rows(config, load_tokenizer(run.model_dir), run.data)
    bus = MemoryBus(config.run.name, config.bus)
    stack = InProcess(run, bus)
    found = [record async for record in measure.rounds(spec, config, stack, run.model_dir, rows)]
    await bus.close()
    measured = [one for one in found if isinstance(one, Round)]
    assert found[0] == Fact(SLOTS, "all engines", 16) and len(measured) == len(found) - 1
    made = [(one.cell, one.contender, one.values["rollouts"], one.values["tokens"], one.values["failed"]) for one in measured]
    assert made == [
        (f"{tokens} tokens", contender, count, count * tokens, 0)
        for tokens, count in ((2, 16), (5, 8))
        for contender in (STACK, PLAIN, TOGETHER)
    ]
    assert all(one.values["seconds"] > 0 for one in measured)


@pytest.mark.slow
@pytest.mark.process
def test_the_command_starts_a_stack_of_processes_and_prints_the_report(run_file, tmp_path, capsys):
    arguments = ["bench", "rollouts", run_file("table", "table"), "--tokens", "3", "--rollouts", "8", "--plain", "--json"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["contender"] for row in printed["rows"]] == [STACK, PLAIN, TOGETHER]
    assert any(name.startswith("cpu/") for name in printed["rows"][0]["values"])
    assert main(["bench", "rollouts", "--report", str(tmp_path / "out"), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out) == printed
