import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.load import load
from streamrl.config.ray import PlaceConfig, RayConfig
from streamrl.config.tree import BusConfig, Config, EvaluationConfig, TrainerConfig, WeightsConfig
from streamrl.errors import ConfigError, LaunchError, StreamRLError
from streamrl.launch import prepare
from streamrl.launch.placement import Group, Node, check_fits, fitted, groups, places_of_ranks
from streamrl.launch.prepare import check_gpus, check_start
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from tests.support.errors import raises
from tests.support.runs import bare_run


async def test_no_run_starts_in_a_branch_or_without_room(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "faster")
    (run.path / BRANCH_FILE).write_text("{}")
    with raises(ConfigError, key="run.name", path=str(run.path)):
        await check_start(Config(), run)


def written(tmp_path: Path, **keys: object) -> Config:
    """Load a file that names rows beside it, with a tabular policy, and `keys` over that."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "mine.py").write_text("def reward(wrong):\n    return 0.0\n")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text('{"max_position_embeddings": 32}')
    (tmp_path / "short" / "table.json").write_text("{}")
    (tmp_path / "my.toml").write_text('[data]\ntrain = "rows.jsonl"\n[engine]\nkind = "table"\n[trainer]\nbackend = "table"\n')
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    return load(tmp_path / "my.toml", [one.replace("DIR", str(tmp_path)) for one in overrides])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"data__prompt_key": "question"},
        {"data__max_prompt_tokens": 1, "data__reading": "whole"},
        {"model__path": "DIR/short"},
        {"sampling__logit_bias": "{100000=1.0}"},
        pytest.param({"reward__kind": "DIR/mine.py:reward"}, marks=pytest.mark.process),
        pytest.param({"producer__function": "DIR/mine.py:nobody"}, marks=pytest.mark.process),
    ],
)
async def test_the_doctor_refuses_what_a_start_refuses_and_nothing_else(tmp_path: Path, keys: dict[str, object]) -> None:
    config = written(tmp_path, **keys)
    run = bare_run(tmp_path / "runs" / "demo")
    check = await prepare.rehearse(config)
    if not keys:
        assert (check.state, (await prepare.prepare(config, run)).num_rows) == ("ok", 0)
        return
    with pytest.raises(StreamRLError) as caught:
        await prepare.prepare(config, run)
    assert (check.state, check.hint) == ("fail", caught.value.hint)
    assert check.found.split()[:6] == caught.value.message.split()[:6], "but for where the model was built"
    described = {"num_attention_heads": 1, "hidden_size": 1 << 20, "intermediate_size": 1, "num_hidden_layers": 1, "vocab_size": 1 << 40}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = Config(run=replace(Config().run, dir=str(tmp_path / "runs")))
    with pytest.raises(LaunchError, match="two checkpoints") as caught:
        await check_start(replace(config, model=replace(config.model, path=str(tmp_path))), RunDir(tmp_path / "runs" / "demo"))
    assert "run.dir" in caught.value.hint


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB, whatever this machine has."""

    async def gpu_memories() -> list[int]:
        return [80 << 30]

    monkeypatch.setattr(prepare, "gpu_memories", gpu_memories)


@pytest.fixture
def model_2b(tmp_path: Path) -> Config:
    """A model of 1.9 billion parameters in bfloat16, beside SGLang on the first GPU."""
    described = {"num_attention_heads": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 26, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(described))
    engine = EngineConfig(kind="sglang", sglang=SglangConfig(flags={"mem_fraction_static": 0.4}))
    return replace(Config(), engine=engine, model=replace(Config().model, path=str(tmp_path), dtype="bfloat16"))


@pytest.mark.usefixtures("one_gpu")
async def test_a_trainer_that_does_not_fit_its_gpus_does_not_start(model_2b: Config) -> None:
    notes: list[str] = []
    await check_gpus(model_2b, notes.append)
    assert len(notes) == 1 and "one GPU of 80.0 GiB" in notes[0]
    for trainer, sampled, said in (
        (TrainerConfig(ranks=2, shards=2), 64, r"2, of 1 that torch sees \(trainer.gpu = 0, trainer.ranks = 2\)"),
        (TrainerConfig(check_logprobs=1), 10_000_000, "a rank takes .* for a sample of 10000128 tokens"),
    ):
        config = replace(model_2b, trainer=trainer, sampling=replace(model_2b.sampling, max_new_tokens=sampled))
        config = replace(config, tasks=replace(config.tasks, max_staleness=3))
        with pytest.raises(LaunchError, match=said) as caught:
            await check_gpus(config, notes.append)
        assert caught.value.hint
        await check_gpus(replace(config, trainer=replace(trainer, device="cpu"), engine=EngineConfig()), notes.append)
    tight = replace(model_2b, trainer=TrainerConfig(check_logprobs=1), tasks=replace(model_2b.tasks, max_staleness=3))
    await check_gpus(tight, notes.append)
    assert "trainer.check_logprobs" in notes[-1] and "set engine.sglang" in notes[-1]
    little = replace(model_2b.engine, sglang=replace(model_2b.engine.sglang, flags={"mem_fraction_static": 0.02}))
    with pytest.raises(LaunchError, match="too little for its weights"):
        await check_gpus(replace(model_2b, engine=little), notes.append)


async def test_without_a_gpu_nothing_is_refused_but_a_gpu_that_is_named(model_2b: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none() -> list[int]:
        return []

    monkeypatch.setattr(prepare, "gpu_memories", none)
    await check_gpus(replace(model_2b, trainer=TrainerConfig(ranks=2, shards=2)), pytest.fail)
    with pytest.raises(LaunchError, match="1, of 0 that torch sees"):
        await check_gpus(replace(model_2b, trainer=TrainerConfig(device="cuda")), pytest.fail)


OPEN = {"bus": BusConfig(host="0.0.0.0"), "engine": EngineConfig(host="0.0.0.0")}


def asks(config: Config, gpus: float) -> dict[str, tuple[int, dict[str, float]]]:
    return {group.kind: (group.count, dict(group.ask)) for group in groups(config, gpus)}


def test_gpus_are_asked_for_and_shared_unless_the_user_has_chosen() -> None:
    assert asks(Config(), 0) == {"trainer": (1, {"CPU": 1.0}), "engine": (1, {"CPU": 1.0})}
    assert asks(Config(), 2) == {"trainer": (1, {"CPU": 1.0, "GPU": 1.0}), "engine": (1, {"CPU": 1.0, "GPU": 1.0})}
    assert asks(Config(trainer=TrainerConfig(device="cpu")), 2)["trainer"] == (1, {"CPU": 1.0})
    assert asks(Config(trainer=TrainerConfig(device="cuda", ranks=4)), 0)["trainer"] == (4, {"CPU": 1.0, "GPU": 1.0})
    assert asks(Config(trainer=TrainerConfig(device="cuda")), 0)["trainer"] == (1, {"CPU": 1.0, "GPU": 1.0})
    served = EngineConfig(kind="sglang", workers=2, sglang=SglangConfig(tensor_parallel=2))
    assert asks(Config(engine=served, evaluation=EvaluationConfig(engines=1)), 8)["engine"] == (3, {"CPU": 1.0, "GPU": 2.0})
    on_cpu = EngineConfig(kind="sglang", sglang=SglangConfig(flags={"device": "cpu"}))
    assert asks(Config(engine=on_cpu), 8)["engine"] == (1, {"CPU": 1.0})
    found = asks(Config(engine=EngineConfig(workers=2)), 1)
    assert (found["trainer"][1]["GPU"], found["engine"][1]["GPU"]) == (0.33, 0.33)
    chosen = RayConfig(trainer=PlaceConfig(gpus=0.5, cpus=0), engine=PlaceConfig(gpus=0.25, resources={"fast": 1}, strategy="SPREAD"))
    assert asks(Config(ray=chosen), 1) == {"trainer": (1, {"GPU": 0.5}), "engine": (1, {"CPU": 1.0, "GPU": 0.25, "fast": 1})}
    assert asks(Config(trainer=TrainerConfig(ranks=2)), 1)["trainer"][1]["GPU"] == 1.0


@pytest.mark.parametrize(
    ("trainer", "engines", "there", "expected"),
    [
        (TrainerConfig(), 2, 2, (1.0, 0.5)),
        (TrainerConfig(), 5, 3, (1.0, 0.33)),
        (TrainerConfig(), 1, 1, (0.5, 0.5)),
        (TrainerConfig(device="cpu"), 3, 2, (0.0, 0.5)),
        (TrainerConfig(device="cpu"), 2, 1, (0.0, 0.5)),
    ],
)
def test_shares_fit_into_whole_gpus(trainer: TrainerConfig, engines: int, there: int, expected: tuple[float, float]) -> None:
    found = asks(Config(trainer=trainer, engine=EngineConfig(workers=engines)), there)
    assert (found["trainer"][1].get("GPU", 0.0), found["engine"][1]["GPU"]) == expected
    own, share = expected
    left = there if own < 1 else there - 1
    assert left * int(1 / share + 1e-6) >= engines + (0 < own < 1)


def node(host: str, **total: float) -> Node:
    return Node(id=host, host=host, total=total)


PAIR = [node("a", GPU=2.0), node("b", GPU=2.0)]


@pytest.mark.parametrize(
    ("asked", "nodes", "why"),
    [
        ([Group("engine", 3, {"GPU": 1.0}, "PACK")], PAIR[:1], r"3 engines with 1 GPU each; there is 2 GPU in all \(a: 2 GPU\)"),
        ([Group("engine", 1, {"GPU": 4.0}, "PACK")], PAIR, r"there is no node with 4 GPU \(a: 2 GPU; b: 2"),
        ([Group("trainer", 3, {"GPU": 1.0}, "STRICT_PACK")], PAIR, "no node with 3 GPU"),
        ([Group("trainer", 3, {"CPU": 1.0}, "STRICT_SPREAD")], [node("a", CPU=9.0), node("b", CPU=9.0)], "2 nodes for 3 workers"),
        ([Group("engine", 1, {"fast": 1.0}, "PACK")], [node("a", CPU=9.0, memory=1e9)], r"there is 0 fast in all \(a: 9 CPU\)"),
        ([Group("engine", 1, {"CPU": 1.0}, "PACK")], [], "no node is alive"),
    ],
)
def test_what_can_never_fit_is_said_with_what_there_is(asked: list[Group], nodes: list[Node], why: str) -> None:
    with pytest.raises(LaunchError, match=why) as caught:
        check_fits(asked, nodes)
    assert "engine.workers" in caught.value.hint


def test_fractions_of_a_gpu_add_up() -> None:
    thirds = [Group("trainer", 1, {"GPU": 0.34}, "PACK"), Group("engine", 2, {"GPU": 0.33}, "PACK")]
    check_fits(thirds, [node("a", GPU=1.0)])
    with pytest.raises(LaunchError, match="does not fit"):
        check_fits([*thirds, Group("engine", 1, {"GPU": 0.01}, "PACK")], [node("a", GPU=1.0)])


def test_weights_go_over_the_bus_to_other_hosts() -> None:
    config = Config()
    assert fitted(config, {"trainer-0": "a", "engine-0": "a"}, home="a", others=["a"]) is config
    hosts = {"trainer-0": "a", "engine-0": "a", "engine-1": "b"}
    config = Config(**OPEN)
    assert fitted(config, hosts, home="a", others=["a"]).weights == WeightsConfig(transport="bus")
    mirrored = Config(**OPEN, weights=WeightsConfig(also_on_bus=True))
    assert fitted(mirrored, hosts, home="a", others=["a"]) is mirrored
    # Trainer and engines together elsewhere share their host's memory.
    assert fitted(config, {"trainer-0": "b", "engine-0": "b"}, home="a", others=["a"]) is config
    # Shared memory and device memory failed at the first version there.
    hosts = {"trainer-0": "a", "trainer-1": "b", "trainer-2": "b", "engine-0": "a"}
    whole = Config(**OPEN, trainer=TrainerConfig(ranks=3))
    assert fitted(whole, hosts, home="a", others=["a"]) is whole, "rank 0 publishes alone"
    for weights in (WeightsConfig(), WeightsConfig(transport="ipc"), WeightsConfig(also_on_bus=True)):
        cut = Config(**OPEN, trainer=TrainerConfig(ranks=2, shards=2), weights=weights)
        assert fitted(cut, hosts, home="a", others=["a"]).weights.transport == "bus"
    copies = Config(**OPEN, trainer=TrainerConfig(ranks=4, shards=2))
    together = {"trainer-0": "a", "trainer-1": "a", "trainer-2": "b", "trainer-3": "b", "engine-0": "a"}
    assert fitted(copies, together, home="a", others=["a"]) is copies, "the first copy is on one host"


@pytest.mark.parametrize(
    ("nodes", "places"), [("ab", [0, 1]), ("aaaa", [0, 1, 2, 3]), ("abab", [0, 2, 1, 3]), ("abbb", [1, 2, 3, 0]), ("", [])]
)
def test_ranks_of_one_node_are_neighbours(nodes: str, places: list[int]) -> None:
    assert places_of_ranks(dict(enumerate(nodes))) == places


@pytest.mark.parametrize(
    ("bus", "said"),
    [
        (BusConfig(), "bus.host is 127.0.0.1, which never leaves that machine"),
        (BusConfig(url="nats://localhost:4222"), "bus.url is nats://localhost:4222, which never leaves that machine"),
    ],
)
def test_a_bus_that_others_cannot_reach_is_refused(bus: BusConfig, said: str) -> None:
    with raises(LaunchError, home="a", away=["b"]) as caught:
        fitted(Config(bus=bus), {"trainer-0": "a", "engine-0": "b"}, home="a", others=["a"])
    assert said in caught.value.message
    fitted(Config(bus=BusConfig(url="tls://nats:4222"), engine=OPEN["engine"]), {"trainer-0": "a", "engine-0": "b"}, home="a", others=["a"])


def test_an_engine_that_producers_cannot_reach_is_refused() -> None:
    config = Config(bus=OPEN["bus"])
    with raises(LaunchError, producers=["a"], engines=["b"]):
        fitted(config, {"trainer-0": "a", "engine-0": "b"}, home="a", others=["a"])
    with raises(LaunchError, producers=["a", "b"], engines=["a"]):
        fitted(config, {"trainer-0": "a", "engine-0": "a"}, home="a", others=["a", "b"])
