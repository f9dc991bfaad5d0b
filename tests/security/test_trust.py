"""Whose code runs, whose folders are trusted, and which secrets are kept apart."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.bus.address import BusAddress
from streamrl.bus.memory.bus import MemoryBus
from streamrl.cli import main
from streamrl.config.code import check_trust, loss_code, rollout_code
from streamrl.config.evaluation import EvaluationConfig, EvaluationSetConfig, SetRewardConfig
from streamrl.config.filters import FiltersConfig
from streamrl.config.load import convert, dump
from streamrl.config.secret_options import with_secrets, without_secrets
from streamrl.config.slime import BESIDE_FILTER, PLACES, SlimeConfig
from streamrl.config.tree import BusConfig, Config, DataConfig, ProducerConfig, RewardConfig, RunConfig
from streamrl.consumers.training.checkpoints import latest_key, read_latest
from streamrl.consumers.training.ledger import take_fence
from streamrl.consumers.training.loop import raise_grant
from streamrl.data.problems import Problem, Problems
from streamrl.errors import ConfigError, SchemaError, WeightSyncError
from streamrl.launch.down import stop_run
from streamrl.producers.attempts import Attempts
from streamrl.producers.checkpoints import RolloutCheckpoints
from streamrl.producers.feeder import Feeder
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.weights.factory import weights_directory
from streamrl.weights.pins import Pin, Pins
from streamrl.weights.shm import check_own

PLANTED = "planted-secret-of-the-user"


def config(**options: object) -> Config:
    return Config(run=RunConfig(name="demo"), producer=ProducerConfig(options=dict(options)), reward=RewardConfig(options=dict(options)))


@pytest.mark.parametrize(
    "name", ["api_key", "API-KEY", "openai_apikey", "password", "hf_token", "secret", "client_secret", "AWS_SECRET_KEY"]
)
def test_options_that_look_like_secrets_are_not_in_the_configuration(name: str) -> None:
    whole = config(**{name: PLANTED, "temperature": 0.5})
    bare, taken = without_secrets(whole)
    assert PLANTED not in dump(bare)
    assert bare.producer.options == {"temperature": 0.5}
    assert taken == {"producer": {name: PLANTED}, "reward": {name: PLANTED}}
    assert with_secrets(bare, taken) == whole


@pytest.mark.parametrize("options", [{"max_new_tokens": 5}, {"token": 7}, {"label_key": "answer"}, {"stop_tokens": "x"}, {"api_key": ""}])
def test_others_stay(options: dict[str, object]) -> None:
    whole = config(**options)
    assert without_secrets(whole) == (whole, {})


def test_a_worker_of_user_code_gets_them_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo")
    run.create()
    whole = config(api_key=PLANTED)
    bare, taken = without_secrets(whole)
    run.write_config(bare)
    run.write_secret_options(taken)
    assert run.options_path.stat().st_mode & 0o077 == 0
    assert run.with_secret_options(run.load_config()) == whole
    run.options_path.write_text("{")
    with pytest.raises(ConfigError):
        run.with_secret_options(run.load_config())
    run.write_secret_options({})
    assert run.with_secret_options(run.load_config()) == bare


@pytest.mark.parametrize("text", ["", "\n", "  \n"])
def test_an_empty_secret_lets_nobody_in(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path / "demo")
    run.create()
    run.engine_token_path.write_text(text)
    with pytest.raises(ConfigError):
        run.engine_token()
    for key in ("token_file", "password_file"):
        named = replace(BusConfig(url="nats://somewhere:4222"), **{key: str(run.engine_token_path)})
        with pytest.raises(ConfigError) as caught:
            BusAddress.from_config(named)
        assert caught.value.values["key"] == f"bus.{key}"


def test_code_of_others_needs_a_word() -> None:
    named = {"loss.policy": "evil.py:loss"}
    check_trust(named, "", trusted=False)
    check_trust({}, "the recording x", trusted=False)
    check_trust(named, "the recording x", trusted=True)
    with pytest.raises(ConfigError) as caught:
        check_trust(named, "the recording x", trusted=False)
    assert caught.value.values["key"] == "loss.policy"
    assert "evil.py:loss" in caught.value.message


SETS = (
    EvaluationSetConfig(name="a", path="a.jsonl", reward=SetRewardConfig(kind="judge", options={"url": "http://evil/v1", "model": "m"})),
)


@pytest.mark.parametrize(
    ("words", "sections", "said"),
    [
        (["worker", "producer", "--run"], {"producer": ProducerConfig(function="evil.py:f")}, "producer.function"),
        (["worker", "evaluator", "--run"], {"evaluation": EvaluationConfig(sets=SETS)}, "evaluation.sets[a].reward.options.url"),
        (["worker", "feeder", "--run"], {"data": DataConfig(curriculum="evil.py:f")}, "data.curriculum"),
        (["rewarder", "--run"], {"reward": RewardConfig(workers=1, kind="judge", options={"url": "http://evil/v1"})}, "reward.options.url"),
        (["reward", "--check", "ROWS"], {"reward": RewardConfig(kind="evil.py:f")}, "reward.kind"),
        (["eval"], {"evaluation": EvaluationConfig(sets=SETS)}, "evaluation.sets[a].reward.options.url"),
    ],
)
def test_verbs_that_run_what_anothers_run_names_ask_first(
    words: list[str],
    sections: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDir(tmp_path / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo"), **sections))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "7"}\n')
    monkeypatch.setattr(RunDir, "foreign", "a run of user 12345")
    assert main([*(str(rows) if word == "ROWS" else word for word in words), str(run.path)]) == 1
    error = capsys.readouterr().err
    assert "user 12345 names what" in error and said in error and "--trust-code" in error


def test_every_function_of_the_configuration_is_known() -> None:

    from streamrl.config.paths import FUNCTIONS

    user = "file.py:name"
    loss = msgspec.structs.replace(Config().loss, advantage=user, policy=user, slime_loss=user)
    whole = Config(
        loss=loss,
        producer=ProducerConfig(function=user),
        reward=RewardConfig(kind=user),
        filters=FiltersConfig(function=user),
        data=DataConfig(curriculum=user),
        slime=SlimeConfig(**dict.fromkeys(BESIDE_FILTER, user)),
    )
    moved = {f"slime.{place.flag}": f"{place.section}.{place.key}" for place in PLACES}
    assert {*loss_code(whole), *rollout_code(whole)} == set(FUNCTIONS) - moved.keys()
    for place in PLACES:
        config = convert({"slime": {place.flag: user}, "data": {"train": "rows.jsonl"}}, where="test")
        named = {**loss_code(config), **rollout_code(config)}
        assert named[f"{place.section}.{place.key}"] == place.prefix + user


def folder(tmp_path: Path) -> Path:
    made = tmp_path / "weights"
    made.mkdir(mode=0o700)
    return made


def test_a_folder_for_weights_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    made = folder(tmp_path)
    check_own(made)
    check_own(tmp_path / "absent")
    link = tmp_path / "link"
    link.symlink_to(made)
    file = tmp_path / "file"
    file.touch()
    for path in (link, file):
        with pytest.raises(WeightSyncError) as caught:
            check_own(path)
        assert caught.value.values["path"] == str(path)
    made.chmod(0o777)
    with pytest.raises(WeightSyncError):
        check_own(made)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_folder_of_another_user_is_refused_and_not_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo")))
    left = weights_directory(Config().weights, "demo", run.path)
    left.mkdir(mode=0o700)
    try:
        os.chown(left, 12345, -1)
        with pytest.raises(WeightSyncError):
            check_own(left)
        with pytest.raises(WeightSyncError):
            stop_run(run, now=False, timeout_s=0.0)
        assert left.is_dir()
    finally:
        left.rmdir()
    os.chown(run.path, 12345, -1)
    assert run.foreign == "a run of user 12345"


ANSWER = b'{"type":"io.nats.jetstream.api.v1.stream_info_response","error":{"code":404}}'
PROBLEMS = Problems(problems=(Problem(row=0, line=1, prompt_ids=(0,), prompt="p", label="l"),), digest="digest")


@pytest.fixture
def memory_bus(run_id: str) -> MemoryBus:
    return MemoryBus(run_id)


@pytest.mark.parametrize("value", [ANSWER, b"-1", b"1.5", b"\xff\x00", "٣".encode()])
async def test_a_fence_that_is_no_number_is_named(memory_bus: MemoryBus, value: bytes) -> None:
    await memory_bus.kv.put("fences/main", value)
    with pytest.raises(SchemaError, match="key fences/main") as caught:
        await take_fence(memory_bus, "main")
    assert "nats kv put" in caught.value.hint
    await memory_bus.kv.put("fences/main", b"41")
    assert await take_fence(memory_bus, "main") == 42


@pytest.mark.parametrize("key", ["no-version/a", "1/a", "1-2-3/a", "1-2", "1-2/a/b", f"1-{'9' * 5000}/a", "-1/a"])
async def test_a_pin_that_is_none_is_passed_over(memory_bus: MemoryBus, key: str) -> None:
    pins = Pins(memory_bus.kv, "policy")
    await memory_bus.kv.put(f"pins/policy/{key}", b"")
    await pins.hold(Version(0, 3), "evaluator-0")
    assert await pins.versions() == {Version(0, 3)}
    watching = cast(AsyncGenerator[Pin], pins.watch())
    assert await anext(watching) == Pin(Version(0, 3), "evaluator-0")
    await watching.aclose()


async def test_deaths_that_are_no_count_are_none(memory_bus: MemoryBus) -> None:
    for value in (ANSWER, b"9" * 5000, b"-1"):
        await memory_bus.kv.put("attempts/7", value)
        assert await Attempts(memory_bus).load(7) == 0


async def test_grants_pointers_and_checkpoints_that_are_none_are_named_or_passed_over(memory_bus: MemoryBus, run_id: str) -> None:
    for key in ("granted", latest_key("main")):
        await memory_bus.kv.put(key, ANSWER)
    feeder = Feeder(memory_bus, Subjects(run_id), Config(run=RunConfig(name=run_id)), PROBLEMS)
    async with asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as group:
            await feeder.run()
    assert [type(error) for error in group.value.exceptions] == [SchemaError] and "key granted" in str(group.value.exceptions[0])
    with pytest.raises(SchemaError, match="key granted"):
        await raise_grant(memory_bus, Grant(granted=3, version=0, retired=0))
    with pytest.raises(SchemaError, match="key latest/main"):
        await read_latest(memory_bus, "main")
    mine = RolloutCheckpoints(memory_bus)
    await mine.save(7, 0, b"state")
    await memory_bus.kv.put("checkpoints/7/x", ANSWER)
    assert await RolloutCheckpoints(memory_bus).load(7) == {0: b"state"}
