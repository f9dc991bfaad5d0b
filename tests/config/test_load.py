"""Files, overrides and records of configurations: what is read, what is refused, and what earlier versions wrote."""

import json
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.config.check import check
from streamrl.config.former import LATER_DECISIONS, in_present_words
from streamrl.config.load import convert, dump, from_json, load, override
from streamrl.config.loss import LossConfig, RejectionConfig
from streamrl.config.tree import Config, OptimizerConfig, RunConfig, TasksConfig
from streamrl.core.fold_config import fold_config
from streamrl.core.state import initial_state
from streamrl.doctor.run_checks import check_budgets
from streamrl.errors import ConfigError
from streamrl.schemas.codec import encode
from streamrl.schemas.subjects import Subjects
from tests.support.errors import raises
from tests.support.refusals import refused


def test_reads_sections_and_keeps_defaults(write, tmp_path):
    config = load(write("[tasks]\nbatch_tasks = 16\n[trainer.optimizer]\nlearning_rate = 1\n"))
    assert (config.tasks, config.trainer.optimizer) == (TasksConfig(batch_tasks=16), OptimizerConfig(learning_rate=1.0))
    assert config.data.train == str(tmp_path / "rows.jsonl")


def test_files_that_cannot_be_read_are_named(tmp_path, write) -> None:
    for path in (tmp_path / "nothing.toml", tmp_path):
        with raises(ConfigError, path=str(path)):
            load(path)
    with pytest.raises(ConfigError, match=r"my\.toml.*line 4"):
        load(write("[tasks]\nbatch_tasks =\n"))
    path = tmp_path / "latin.toml"
    path.write_bytes(b"[run]\nname = '\xe4'\n")
    with refused(ConfigError, hint="UTF-8", path=str(path), byte=ANY):
        load(path)
    path = write("[tasks]\nbatch_tasks = 16\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(path).tasks.batch_tasks == 16


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("[tasks]\nbach_tasks = 1\n", "tasks.bach_tasks", "did you mean tasks.batch_tasks?"),
        ("[taks]\nbatch_tasks = 1\n", "taks", "did you mean tasks?"),
        ("[run]\nmax_staleness = 1\n", "run.max_staleness", "did you mean tasks.max_staleness?"),
        ("[trainer.optimizer]\nlearning_rat = 1\n", "trainer.optimizer.learning_rat", "did you mean trainer.optimizer.learning_rate?"),
        (
            "[reward]\nzzz = 1\n",
            "reward.zzz",
            "known here: kind, options, key, workers, late_versions, overlong_buffer, "
            "overlong_penalty, overlong_length, length, timeout_s, children, concurrency, max_hung",
        ),
    ],
)
def test_unknown_key_is_refused_with_a_suggestion(write, text, key, hint):
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert f"got {key} in" in caught.value.message and caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tasks]\nbatch_tasks = '64'\n", "expected int, got str '64' at tasks.batch_tasks"),
        ("[trainer.optimizer]\nlearning_rate = 'x'\n", "expected float, got str 'x' at trainer.optimizer.learning_rate"),
        ("[engine]\nkind = 'vllm'\n", "engine.kind must be one of 'local', 'table', 'sglang', got 'vllm'"),
        ("tasks = 3\n", "expected table, got int 3 at tasks"),
        ("[sampling]\ntop_p = 0.0\n", "sampling.top_p must be in (0, 1], got 0.0"),
        ("[run]\nname = 'a b'\n", "a run name may hold letters"),
        ("[tasks]\nbatch_tasks = 0\n", "tasks.batch_tasks must be at least 1, got 0"),
        ("[trainer.optimizer]\nlearning_rate = nan\n", "trainer.optimizer.learning_rate must be a finite number, got nan"),
        ("[trainer.optimizer]\nlearning_rate = inf\n", "trainer.optimizer.learning_rate must be a finite number, got inf"),
        ("[sampling]\ntop_p = nan\n", "sampling.top_p must be a finite number, got nan"),
        ("[loss.objectives]\nright = 1\nform = inf\n", "loss.objectives must be a finite number, got inf"),
        ("[trainer.optimizer]\nbeta1 = 1.0\n", "trainer.optimizer.beta1 must be below 1, got 1.0"),
        ("[engine.sglang]\ngpus = [0, -1]\n", "engine.sglang.gpus[1] must be at least 0, got -1"),
        ("[ray.engine.resources]\n'a.b' = 0\n", "ray.engine.resources.a.b must be above 0, got 0"),
        ("[engine]\nport = 70000\n", "engine.port must be at most 65535"),
    ],
)
def test_wrong_values_name_the_key(write, text, message, tmp_path):
    path = write("", data=f"{text}[data]\ntrain = 'rows.jsonl'\n")
    with refused(ConfigError, message, "my.toml", hint=True):
        load(path)


@pytest.mark.parametrize(
    ("override", "key"),
    [("run.steps=ten", "run.steps"), ("run.steps=-3", "run.steps"), ('trainer.optimizer={beta1="x"}', "trainer.optimizer.beta1")],
)
def test_a_wrong_override_is_where_the_error_is(write, override, key):
    with raises(ConfigError, key=key, path=f"--set {override}"):
        load(write(""), [f"{key}=3", "tasks.batch_tasks=8", override])


def test_yaml_gets_a_hint_of_its_own(tmp_path):
    hints: list[str | None] = []
    for name in ("my.yaml", "my.toml"):
        (tmp_path / name).write_text("run:\n  steps: 3\n")
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / name)
        hints.append(caught.value.hint)
    assert hints[0] and hints[0] != hints[1]


def test_overrides_are_toml_values(write):
    texts = ["tasks.batch_tasks=32", "tasks.hold_ahead=true", "tasks.stale=mask"]
    assert load(write(""), texts).tasks == TasksConfig(batch_tasks=32, hold_ahead=True, stale="mask")


def test_overrides_win_and_keep_their_neighbours(write) -> None:
    config = load(write("[tasks]\nbatch_tasks = 4\nmax_staleness = 3\n"), ["tasks.batch_tasks=8", "trainer.optimizer.beta1=0.8"])
    assert (config.tasks.batch_tasks, config.tasks.max_staleness, config.trainer.optimizer.beta1) == (8, 3, 0.8)
    assert load(write(""), ["run.name=2024"]).run.name == "2024"
    assert load(write(""), ['run.name="quoted"']).run.name == "quoted"
    config = load(
        write(""), ["producer.options.turns=3", "producer.options.mode=fast", "reward.kind=pkg.mod:name", "reward.options={a = [1, 2]}"]
    )
    assert (config.producer.options, config.reward.options) == ({"turns": 3, "mode": "fast"}, {"a": [1, 2]})
    # Only so a branch of a run with gdpo leaves it: keys of a table cannot be taken out one by one.
    text = '[loss]\nadvantage = "gdpo"\nobjectives = { right = 1.0 }\n[tasks]\ndrop_zero_variance = false\n'
    changed = override(load(write(text)), ["loss.advantage=grpo", "loss.objectives={}"])
    assert (changed.loss.objectives, changed.tasks.drop_zero_variance) == ({}, False)
    with raises(ConfigError, override="run.name", got=3):
        load(write(""), ["run=3", "run.name=x"])
    with pytest.raises(ConfigError, match=r"did you mean tasks\.batch_tasks"):
        load(write(""), ["tasks.batch_task=3"])


CHOICE = "{} must be one of '"
BAD_OVERRIDES = [
    *((text, {"override": text}, (), "") for text in ("tasks.batch_tasks", "=3", "tasks..x=1")),
    # names that can be no folder and no subject
    *((f"run.name={name}", {}, ("run name",), "") for name in ("", "a b", "a/b", "x" * 129)),
    ("data.heldout=none.jsonl", {"key": "data.heldout"}, ("no such",), ""),
    ("model.path=none", {"key": "model.path"}, ("no such",), ""),
    ("reward.kind=none.py:score", {"key": "reward.kind"}, ("no such",), ""),
    ("producer.function=none.py:play", {"key": "producer.function"}, ("no such",), ""),
    ("engine.kind=locl", {"key": "engine.kind"}, (CHOICE, "got 'locl'"), "did you mean 'local'?"),
    ("loss.kl.estimator=k9", {"key": "loss.kl.estimator"}, (CHOICE, "got 'k9'"), ""),
    ("trainer.device=5", {"key": "trainer.device"}, (CHOICE, "got 5"), ""),
    ("tasks.stale=[1]", {"key": "tasks.stale"}, (CHOICE, "got [1]"), ""),
    ("loss.correction.reject=[{measure='ki'}]", {"key": "loss.correction.reject[0].measure"}, (CHOICE, "got 'ki'"), ""),
]


@pytest.mark.parametrize(("override", "values", "said", "hint"), BAD_OVERRIDES, ids=[row[0] for row in BAD_OVERRIDES])
def test_an_override_that_cannot_be_is_refused(write, override, values, said, hint):
    with refused(ConfigError, *(words.format(values.get("key")) for words in said), hint=hint, **values):
        load(write(""), [override])


def test_relative_paths(write, tmp_path, monkeypatch):
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in ("held.jsonl", "reward.py", "rows.jsonl"):
        (other / name).write_text("")
    (tmp_path / "reward.py").write_text("")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(other)
    path = write("[reward]\nkind = 'reward.py:score'\n[model]\npath = 'model'\n", data="[data]\ntrain = 'rows.jsonl@[0:1]'\n")
    config = load(path, ["data.heldout=held.jsonl@[-3:]", "producer.function=some.module:name"])
    assert (config.data.train, config.reward.kind) == (f"{tmp_path}/rows.jsonl@[0:1]", f"{tmp_path}/reward.py:score")
    assert (config.model.path, config.data.heldout) == (f"{tmp_path}/model", f"{other}/held.jsonl@[-3:]")
    assert (config.producer.function, config.run.dir) == ("some.module:name", "runs")


def test_what_is_named_must_be_there_and_of_its_kind(write, tmp_path) -> None:
    (tmp_path / "code.py").mkdir()  # rows may lie in a folder, of Arrow files
    with refused(ConfigError, "got a directory", key="producer.function"):
        load(write(""), [f"producer.function={tmp_path / 'code.py'}:ask"])
    with raises(ConfigError, key="bus.password_file", path=ANY):
        load(write("[bus]\nurl = 'tls://x:4222'\nuser = 'me'\npassword_file = 'secret.txt'\n"))
    with raises(ConfigError, got="rows.jsonl@[1:2:3]"):
        load(write("", data="[data]\ntrain = 'rows.jsonl@[1:2:3]'\n"))
    with raises(ConfigError, key="data.train"):
        load(write("[run]\nname = 'x'\n", data=""))


def test_a_run_that_an_earlier_version_gave_a_longer_name_goes_on(write, tmp_path):
    name = "x" * 200
    set_keys = [f"run.name={name}", f"run.dir={tmp_path}"]
    with raises(ConfigError, key="run.name"):
        load(write(""), set_keys)
    assert from_json(dump(Config(run=RunConfig(name=name)))).run.name == Subjects(name).run == name
    (tmp_path / name).mkdir()
    assert load(write(""), set_keys).run.name == name
    with raises(ConfigError, key="run.name"):
        load(write(""), [f"run.name={'x' * 300}", f"run.dir={tmp_path}"])


TABLE = "[engine]\nkind = 'table'\n[trainer]\nbackend = 'table'\n"
SGLANG = "[engine]\nkind = 'sglang'\n"
RANKS = "[trainer]\nranks = 2\n"
CONTEXT = f"{RANKS}context = 2\n"
EXACT = "[tasks]\ninexact = 'refuse'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tasks]\nhold_ahead = true\nmax_staleness = 0\n", "tasks.hold_ahead needs tasks.max_staleness >= 1"),
        ("[tasks]\nexpire_versions = 9\nstale = 'wait'\n", "tasks.expire_versions must be 0 with tasks.stale = wait, got 9"),
        ("[tasks]\nexpire_versions = 9\nmax_staleness = 0\n", "tasks.expire_versions must be 0 in lockstep, got 9"),
        ("[tasks]\nexpire_versions = 9\n[debug]\ndelay_versions = 1\n", "tasks.expire_versions must be 0 in lockstep, got 9"),
        ("[tasks]\nexpire_versions = 2\nmax_staleness = 2\n", "tasks.expire_versions must be above tasks.max_staleness - debug"),
        (f"{TABLE}ranks = 2\n", "trainer.ranks must be 1 with trainer.backend = table, got 2"),
        (f"{TABLE}[debug]\nprofile_versions = [1]\n", "debug.profile_versions is for trainer.backend = torch, got table"),
        (f"{RANKS}[debug]\nmemory_ranks = [0, 2]\n", "debug.memory_ranks: expected ranks below trainer.ranks = 2, got [0, 2]"),
        ("[debug]\nmemory_ranks = [-1]\n", "debug.memory_ranks"),
        ("[trainer]\nranks = 5\nshards = 2\n", "trainer.shards must divide trainer.ranks, got ranks = 5 and shards = 2: 5 = 2 x 2 + 1"),
        ("[trainer]\nranks = 5\ncontext = 2\n", "trainer.context must divide trainer.ranks, got ranks = 5 and context = 2: 5 = 2 x 2 + 1"),
        (f"{CONTEXT}attention = 'sdpa'\n", "trainer.context = 2 needs packed rows, which ranks share, got trainer.attention = 'sdpa'"),
        (
            f"{CONTEXT}[loss]\nslime_loss = 'a:b'\n",
            "trainer.context = 2, but loss.slime_loss wants the logits of whole samples, of which a rank has 1 / 2",
        ),
        ("[trainer]\nshards = 2\n", "trainer.shards must divide trainer.ranks, got ranks = 1 and shards = 2: 1 = 0 x 2 + 1"),
        (f"{TABLE}routing_replay = true\n", "engine.kind = table, whose policies are tables"),
        (
            f"{SGLANG}sglang.flags.enable_return_routed_experts = true\n",
            "engine.sglang.flags may not set 'enable_return_routed_experts': trainer.routing_replay does",
        ),
        ("[trainer]\ntensor = 2\n", "trainer.tensor is for trainer.backend = megatron, got 2 with torch"),
        ("[trainer]\nbackend = 'megatron'\nranks = 5\ntensor = 2\n", "got ranks = 5 and tensor = 2: 5 = 2 x 2 + 1"),
        ("[trainer]\nexperts = 2\n", "trainer.experts is for trainer.backend = megatron, got 2 with torch"),
        ("[trainer]\nbackend = 'megatron'\nranks = 3\nexperts = 2\n", "got ranks = 3 and experts = 2: 3 = 1 x 2 + 1"),
        ("[trainer]\nbackend = 'megatron'\nranks = 2\ntensor = 2\nexperts = 2\n", "trainer.tensor = 2 cuts no mixture of experts"),
        ("[trainer]\nbackend = 'megatron'\nranks = 4\ntensor = 4\ncontext = 2\n", "got 2 and 4 / (4 x 1) = 1: 1 = 0 x 2 + 1"),
        ("[trainer]\nbackend = 'megatron'\nranks = 2\nexperts = 2\ncontext = 2\n", "ranks that divide experts share no rows"),
        ("[trainer]\npipeline = 2\n", "trainer.pipeline is for trainer.backend = megatron, got 2 with torch"),
        ("[trainer]\nbackend = 'megatron'\nranks = 2\npipeline = 2\nexperts = 2\n", "trainer.pipeline = 2 cuts no mixture of experts"),
        ("[trainer]\nbackend = 'megatron'\nranks = 2\npipeline = 2\ntensor = 2\n", "got 2 x 2 = 4 and ranks = 2: 2 = 0 x 4 + 2"),
        ("[trainer]\nbackend = 'megatron'\n[loss]\nslime_loss = 'a:b'\n", "it hands out no logits"),
        ("[trainer]\nbackend = 'megatron'\nranks = 2\ntensor = 2\ncompile = 'on'\n", "tensor ranks wait for each other within a layer"),
        ("[trainer]\nrank_timeout_s = 0\n", "trainer.rank_timeout_s must be at least 1"),
        ("[sampling]\nmin_p = 1.5\n", "sampling.min_p must be in [0, 1], got 1.5"),
        ("[sampling]\nmin_p = nan\n", "sampling.min_p must be a finite number"),
        ("[sampling]\npresence_penalty = -3\n", "sampling.presence_penalty must be in [-2, 2], got -3"),
        ("[sampling]\nrepetition_penalty = 0\n", "sampling.repetition_penalty must be in (0, 2], got 0"),
        ("[sampling]\nstop = ['']\n", "sampling.stop must be at most 32 texts of 1 to 256 characters"),
        ("[sampling]\nlogit_bias = { 3 = 101 }\n", "sampling.logit_bias must be numbers in [-100, 100] by token ids"),
        ("[sampling]\nlogit_bias = { -3 = 1 }\n", "sampling.logit_bias must be numbers in [-100, 100] by token ids"),
        ("[sampling]\nlogit_bias = { 3 = nan }\n", "sampling.logit_bias must be numbers in [-100, 100] by token ids"),
        ("[sampling]\njson_schema = '[1]'\n", "sampling.json_schema must be a JSON schema as text"),
        ("[sampling]\nregex = 'a'\nignore_eos = true\n", "sampling has ignore_eos and a grammar"),
        (f"[sampling]\nregex = 'a'\n{EXACT}", "sampling.regex draws from a distribution that the trainer does not compute"),
        (f"[sampling]\nfrequency_penalty = 1\n{EXACT}", "sampling.frequency_penalty draws from a distribution"),
        ("[sampling]\nregex = 'a'\n[engine]\nkind = 'sglang'\n", "sampling.regex needs engine.sglang.grammar_backend, got none"),
        (f"{SGLANG}sglang.flags.grammar_backend = 'xgrammar'\n", "engine.sglang.flags.grammar_backend cannot be 'xgrammar'"),
        ("[sampling]\nmin_p = 0.1\n[engine]\nkind = 'sglang'\ndeterministic = true\n", "sampling.min_p does not go with"),
        ("[sampling]\nmin_p = 0.1\n[trainer]\nbackend = 'megatron'\nranks = 2\ntensor = 2\n", "cannot do what sampling.min_p asks for"),
        ("[sampling]\ntop_k = 5\n[trainer]\nbackend = 'megatron'\nranks = 2\ntensor = 2\n", "cannot do what sampling.top_k asks for"),
        ("[tasks]\nnum_rollouts = 1\n", "tasks.drop_zero_variance needs tasks.num_rollouts >= 2"),
        ("label_key = ''\n[warmup]\nmax_steps = 5\n", "warmup.max_steps needs data.label_key"),
        ("[evaluation]\nevery = 5\n", "evaluation.every needs problems"),
        ("[evaluation]\nengines = 1\n", "evaluation.engines needs problems"),
        ("[evaluation]\nengines = -1\n", "evaluation.engines must be at least 0"),
        ("[weights]\nanchor_every = 0\n", "weights.anchor_every must be at least 1"),
        ("[trainer]\nminibatches = 65\n", "trainer.minibatches must be at most tasks.batch_tasks"),
        ("[engine]\nkind = 'table'\n", "engine.kind and trainer.backend must both be table"),
        ("[model]\nheads = 3\n", "model.heads must be a multiple of model.kv_heads"),
        ("[model]\nmax_len = 100\n", "model.max_len must hold"),
        ("[bus]\nuser = 'x'\n", "got no bus.url"),
        ("[bus]\nsamples_bytes = 1000\n", "bus.samples_bytes must be at least 33554432 (32 MiB), got 1000"),
        ("[bus]\nack_wait_s = 0.5\n", "bus.ack_wait_s must be at least 1, got 0.5"),
        ("[bus]\nurl = 'nats://a'\nport = 3\n", "bus.port is the embedded server's"),
        ("[bus]\nreplicas = 3\n", "bus.replicas must be 1 without bus.url, got 3"),
        ("[bus]\nurl = 'nats://127.0.0.1'\nreplicas = 6\n", "bus.replicas must be at most 5, got 6"),
        ("[bus]\nurl = 'nats://127.0.0.1'\nreplicas = 0\n", "bus.replicas must be at least 1, got 0"),
        ("[slo]\nwebhook = 'https://u:secret@a/b'\n", "slo.webhook must hold no user and password: the"),
        ("[slo]\nwebhook = 'hooks.example.org'\n", "slo.webhook must be an http or https URL"),
        ("[bus]\nurl = 'http://a'\n", "bus.url must begin with"),
        ("[bus]\nurl = 'nats://a'\ntoken_file = 'x'\nuser = 'y'\n", "expected one kind of credentials"),
        ("[bus]\nurl = 'nats://a'\nuser = 'y'\n", "go together"),
        ("[weights]\ntransport = 'ipc'\nkeep = 0\n", "weights.keep = 0 keeps every version, but weights.transport = ipc"),
        ("[weights]\ntransport = 'ipc'\nkeep = 9\n[debug]\ndelay_versions = 1\n", "needs weights.ring >= 4, got 2"),
        ("[weights]\nring = 0\n", "weights.ring must be at least 1"),
        ("[weights]\nring = 'two'\n", "invalid enum value 'two' at weights.ring"),
        ("[engine]\nslots = 0\n", "engine.slots must be at least 1"),
        ("[sampling]\ntemperature = 0.0\n", "sampling.temperature must be above 0"),
    ],
)
def test_contradictions_are_refused_with_a_reason_and_a_hint(write, text, message):
    with refused(ConfigError, message, hint=True):
        load(write(text))


def test_dumps_round_trip_without_credentials(write) -> None:
    config = load(write("[producer]\noptions = {a = 1}\n[sampling]\nstop_token_ids = [1, 2]\n"))
    assert from_json(dump(config)) == config
    config = Config()
    with_secret = from_json(dump(config).replace('"url": ""', '"url": "nats://me:hunter2@host:4222"'))
    assert "hunter2" not in dump(with_secret) and '"nats://host:4222"' in dump(with_secret)
    for text, values in (("{", {"where": "here", "line": 1}), ("[]", {"got": "list"}), ('{"nothing": 1}', {"key": "nothing"})):
        with raises(ConfigError, **values):
            from_json(text, where="here")


def criteria_of(**section: Any) -> tuple[RejectionConfig, ...]:
    return convert({"loss": {"correction": section}}, where="old.json").loss.correction.reject


def test_a_loss_of_slime_finds_its_estimator_in_the_policy_loss() -> None:
    from streamrl.bridges.slime.loss import slime_args

    config = convert({"data": {"train": "x"}, "loss": {"policy": "gspo", "slime_loss": "mine.py:loss"}}, where="x")
    check(config)
    assert slime_args(config.loss).advantage_estimator == "gspo"
    assert slime_args(LossConfig(advantage="rloo", slime_loss="mine.py:loss")).advantage_estimator == "rloo"


def test_several_criteria() -> None:
    assert criteria_of(reject=[]) == criteria_of() == ()
    tables = [{"measure": "ratio", "level": "sequence_mean", "low": 0.9, "high": 1.1}, {"measure": "k2", "high": 0.5}]
    want = (RejectionConfig(level="sequence_mean", low=0.9, high=1.1), RejectionConfig(measure="k2", high=0.5))
    assert criteria_of(reject=tables) == want
    text = '[{measure="ratio", level="sequence_mean", low=0.9, high=1.1}, {measure="k2", high=0.5}]'
    assert override(Config(), ["data.train=x", f"loss.correction.reject={text}"]).loss.correction.reject == want


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"reject": [], "reject_low": -1.0}, "expected a known key, got loss.correction.reject_low"),
        ({"reject": [{"measure": "k4"}]}, "must be one of 'ratio', 'k1', 'k2', 'k3', got 'k4'"),
        ({"reject": "none"}, "expected list, got str"),
        ({"reject": 0}, "expected array, got int|expected list, got int"),
        ({"reject": False}, "expected list, got bool"),
        ({"reject": [{"measure": "k3", "high": "much"}]}, "expected float, got str 'much' at loss.correction.reject"),
        ({"reject": [{"measure": "k3", "hihg": 1.0}]}, r"got loss\.correction\.reject\[0\]\.hihg"),
        ({"reject": ["k3"]}, "expected table, got str 'k3' at loss.correction.reject"),
        ({"reject_hihg": 1.0}, "expected a known key, got loss.correction.reject_hihg"),
    ],
)
def test_what_means_nothing_is_refused(correction: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        criteria_of(**correction)


@pytest.mark.parametrize("loss", [{"advantage": ["gspo"]}, {"advantage": 3}, {"correction": 3}, {"correction": None}, 3, "grpo"])
def test_a_section_of_another_type_is_an_error_of_the_configuration(loss: Any) -> None:
    with raises(ConfigError, path="x"):
        convert({"loss": loss}, where="x")


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ([{"measure": "k3", "high": float("nan")}], "must be a finite number"),
        ([{"measure": "k3", "high": 1.0}, {"measure": "k1", "low": 0.0, "high": 1.0}], "k1 has either sign"),
        ([{"measure": "k2", "low": -1.0, "high": 1.0}], "never negative"),
        ([{"measure": "k3", "high": 1.0}, {"measure": "k3", "high": 0.5}], "several times"),
    ],
)
def test_every_criterion_is_checked(criteria: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(convert({"data": {"train": "x"}, "loss": {"correction": {"reject": criteria}}}, where="x"))
    assert caught.value.values["key"] == "loss.correction.reject"


def test_a_recorded_configuration_is_read_and_written_in_present_words() -> None:
    tree = json.loads(dump(Config()))
    del tree["trainer"]["activations"]
    tree["trainer"]["gradient_checkpointing"] = False
    tree["tasks"]["drop_zero_spread"] = tree["tasks"].pop("drop_zero_variance")
    tree["loss"]["correction"] |= {"reject": "none", "reject_level": "token", "reject_low": 0.0, "reject_high": 0.0}
    text = json.dumps(tree)
    config = from_json(text)
    assert config == replace(Config(), trainer=replace(Config().trainer, activations="all")) and from_json(dump(config)) == config
    tree = {"tasks": {"drop_zero_spread": False, "batch_tasks": 4}}
    assert in_present_words(tree) == {"tasks": {"drop_zero_variance": False, "batch_tasks": 4}}
    assert tree["tasks"].keys() == {"drop_zero_spread", "batch_tasks"}
    with raises(ConfigError, key="tasks.drop_zero_spread", path=ANY):
        convert({"tasks": {"drop_zero_spread": False, "drop_zero_variance": True}}, where="x")


def test_a_recorded_configuration_without_a_decision_is_one_without_it() -> None:
    tree = json.loads(dump(Config()))
    assert (tree["tasks"]["inexact"], tree["tasks"]["check_max_len"]) == ("mask", True)
    assert from_json(dump(Config())) == Config()
    for key in LATER_DECISIONS:
        section, name = key.split(".")
        del tree[section][name]
    old = from_json(json.dumps(tree))
    assert (old.tasks.inexact, old.tasks.check_max_len) == ("allow", False)
    assert json.loads(dump(old)) == tree, "it stays one without it, however often it is written"
    assert convert(tree, where="a file").tasks.inexact == "mask"
    assert from_json(json.dumps({"tasks": 3} | {"run": {}}).replace("3", "{}")).tasks.inexact == "allow"


@pytest.mark.parametrize("given", [-1, "some", True])
def test_a_number_of_layers_is_one(given: object) -> None:
    with pytest.raises(ConfigError, match="activations"):
        convert({"trainer": {"activations": given}}, where="x.toml")


def counts(section: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """Keys of whole numbers, those of sections within sections too."""
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            yield from counts(value, f"{prefix}{field.encode_name}.")
        elif type(value) is int:
            yield prefix + field.encode_name


KEYS = sorted(set(counts(Config())) - {"run.seed"})


def test_whole_numbers_that_are_too_large_are_refused_by_their_key(write) -> None:
    file = write(TABLE)
    for key in KEYS:
        for value in (2**63 - 1, 2**63, 10**30):
            with refused(ConfigError, key):
                load(file, [f"{key}={value}"])
    with pytest.raises(ConfigError, match="seed"):
        load(file, ["run.seed=9223372036854775808"])
    assert load(file, ["run.seed=9223372036854775807"]).run.seed == 2**63 - 1


def test_the_largest_that_are_taken_have_room_wherever_they_go(write) -> None:
    file = write(TABLE)
    most = 2**31 - 1
    keys = ("tasks.batch_tasks", "tasks.max_staleness", "run.steps", "warmup.max_steps")
    config = load(file, [f"{key}={most}" for key in keys])
    state = initial_state(fold_config(config))
    assert msgspec.msgpack.decode(encode(state.grant)) and state.granted == 2**31 * most
    check(config)
    budgets = load(file, [f"bus.{name}={2**53}" for name in ("samples_bytes", "blobs_bytes", "sample_blobs_bytes")])
    assert check_budgets(budgets).state == "warn" and math.isfinite(budgets.bus.samples_bytes)
