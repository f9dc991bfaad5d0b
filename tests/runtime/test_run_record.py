"""What is recorded of a run: for a resume, and for producers of other hosts."""

import hashlib
import json
import os
import stat
import zlib
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.bus.address import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.config import tree as sections
from streamrl.config.engines import SglangConfig
from streamrl.config.load import dump, override
from streamrl.config.loss import CorrectionConfig, CriticConfig, DistillationConfig, KLConfig, LossConfig, RejectionConfig
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError, SchemaError
from streamrl.runtime.attach_file import Attachment, unpack_attach_file, write_attach_file
from streamrl.runtime.model_digests import model_digests
from streamrl.runtime.run_record import FREE_KEYS, check_resume, continued, with_decay_steps, write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import RunRecord
from tests.support.errors import raises
from tests.support.runs import bare_run


def made(*settings: str) -> Config:
    """A configuration that differs from the defaults by these, as the command line has them."""
    return override(Config(data=sections.DataConfig(train="x")), settings)


def record(config: Config, *, digest: str = "a" * 64) -> RunRecord:
    of = {"code_version": "0", "fingerprint": {}, "created_s": float(hash(digest) % 9)}
    return RunRecord(run="demo", config=dump(config), dataset_digest=digest, num_rows=4, **of)


def recorded(*settings: str) -> RunRecord:
    return record(made(*settings))


def of_tree(tree: dict[str, Any]) -> RunRecord:
    """A record whose configuration an earlier build has written."""
    return replace(recorded(), config=json.dumps(tree))


async def test_the_record_is_written_once_and_checked_afterwards(bus: Bus) -> None:
    first = recorded()
    assert not await write_or_check(bus, first)
    assert await write_or_check(bus, replace(first, created_s=99.0))
    with raises(ConfigError, key="data.train"):
        await write_or_check(bus, record(made(), digest="b" * 64))


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("tasks.max_staleness=3", "tasks.max_staleness"),
        ("run.seed=5", "run.seed"),
        ("run.steps=5", "trainer.optimizer.decay_steps"),
        ("trainer.optimizer.schedule=cosine", "trainer.optimizer.schedule"),
        ("trainer.minibatches=2", "trainer.minibatches"),
    ],
)
def test_what_decides_the_result_may_not_change(setting: str, key: str) -> None:
    with raises(ConfigError, key=key) as caught:
        check_resume(recorded(), recorded(setting))
    assert "--name" in caught.value.hint


def test_how_fast_and_where_may_change_and_where_the_reward_is_asked() -> None:
    check_resume(
        recorded(), recorded("run.dir=elsewhere", "run.max_seconds=9", "engine.workers=3", "engine.threads=2", "trainer.threads=2")
    )
    judged = ("reward.kind=judge", "reward.options.url=http://a/v1", "reward.options.model=m")
    check_resume(recorded(*judged), recorded(*judged, "reward.options.url=http://b/v1", "reward.options.token_env=KEY"))
    with raises(ConfigError, key="reward.options.model"):
        check_resume(recorded(*judged), recorded(*judged, "reward.options.model=n"))


@pytest.mark.parametrize("name", ["mine.py:other", "theirs.py:score", "mine:score", "exact_match"])
def test_a_reward_that_was_moved_with_its_run_is_the_same_and_another_is_not(name: str) -> None:
    there = recorded("reward.kind=/there/mine.py:score", "loss.policy=/there/mine.py:loss")
    check_resume(there, recorded("reward.kind=/here/too/mine.py:score", "loss.policy=/here/too/mine.py:loss"))
    with raises(ConfigError, key="reward.kind"):
        check_resume(there, recorded(f"reward.kind={name}", "loss.policy=/there/mine.py:loss"))


def test_models_that_were_moved_with_their_run_are_the_same_and_others_are_not() -> None:
    def placed(folder: str, reference: str = "old") -> RunRecord:
        loss = LossConfig(
            kl=KLConfig(reference=f"{folder}/{reference}"),
            critic=CriticConfig(path=f"{folder}/critic"),
            distillation=DistillationConfig(teacher=f"{folder}/teacher"),
        )
        sglang = SglangConfig(python=f"{folder}/bin/python", gpus=(len(folder),))
        return record(replace(made(), loss=loss, engine=sections.EngineConfig(sglang=sglang)))

    check_resume(placed("/there/runs/demo"), placed("/here/too/runs/demo"))
    for other, key in ((placed("/there", "other"), "loss.kl.reference"), (placed("/here/too"), "loss.critic.path")):
        with raises(ConfigError, key=key):
            check_resume(placed("/there"), other)
    with raises(ConfigError, key="loss.critic.path"):
        check_resume(placed("/there"), recorded())


def test_a_model_elsewhere_goes_on_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    def placed(name: str, weights: bytes, settings: str = "{}") -> RunRecord:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(settings)
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "README.md").write_text(name)
        config = sections.Config(loss=LossConfig(kl=KLConfig(reference=str(folder))))
        return replace(record(config), models=model_digests(config, tmp_path / "none", tmp_path / "cache"))

    weights = bytes(range(256)) * (20 << 12)
    first = placed("a/model", weights)
    check_resume(first, placed("b/model", weights))
    check_resume(first, placed("c/renamed", weights))
    others = [
        placed("d/model", weights[:-1] + b"x"),
        placed("e/model", b"x" + weights[1:]),
        placed("f/model", weights + b"x"),
        placed("g/model", weights, "{} "),
    ]
    for other in others:
        with raises(ConfigError, key="loss.kl.reference"):
            check_resume(first, other)
        check_resume(first, first)
    with raises(ConfigError, key="loss.kl.reference"):
        check_resume(replace(first, models=msgspec.UNSET), others[0])


def test_files_of_a_model_are_read_as_a_whole_and_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = tmp_path / "model", tmp_path / "model-files.json"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(24 << 20))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    read = list[str]()

    def digests() -> dict[str, str]:
        read.clear()
        return model_digests(sections.Config(), folder, cache)

    real = hashlib.file_digest

    def reading(file: BufferedReader, kind: str) -> object:
        read.append(Path(file.name).name)
        return real(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", reading)
    first = digests()
    assert first.keys() == {"model.path"} and sorted(read) == ["model.safetensors", "tokenizer.json"]
    assert digests() == first and read == []
    (folder / "README.md").write_text("another word")
    assert digests() == first and read == []
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek((2 << 20) - 5)
        file.write(b"x")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = digests()
    assert second != first and read == ["model.safetensors"], "one byte anywhere, with the old time"
    (folder / "tokenizer.json").write_text("{ }")
    third = digests()
    assert third != second and read == ["tokenizer.json"]
    for damaged in (b"", b"[]", b'{"a": 3}', cache.read_bytes()[:-9]):
        cache.write_bytes(damaged)
        assert digests() == third and len(read) == 2
    (folder / "vocab.txt").touch()
    assert digests() != third


def test_folders_that_cannot_be_looked_at_or_were_renamed(tmp_path: Path) -> None:
    """By a name that no file may have; so a folder of another user's fails, too."""
    folder = str(tmp_path / ("x" * 300))
    config = sections.Config(loss=LossConfig(kl=KLConfig(reference=folder)))
    with raises(ConfigError, path=folder) as caught:
        model_digests(config, tmp_path / "none", tmp_path / "cache")
    assert "can be read" in caught.value.message
    run = bare_run(tmp_path / "renamed")
    run.write_config(sections.Config(run=sections.RunConfig(name="first")))
    with raises(ConfigError, key="run.name", expected="first", got="renamed") as caught:
        continued(sections.Config(run=sections.RunConfig(name="renamed")), run)
    assert "first" in caught.value.hint


def test_keys_that_came_later_are_off_and_free_ones_exist() -> None:
    tree = json.loads(dump(made()))
    del tree["tasks"]["hold_ahead"], tree["debug"]
    old = of_tree(tree)
    check_resume(old, recorded())
    with raises(ConfigError, key="tasks.hold_ahead"):
        check_resume(old, recorded("tasks.hold_ahead=true"))
    asks = sections.RewardConfig(kind="remote", options={"url": "http://127.0.0.1:9/", "token_env": ""})
    by_row = sections.DataConfig(reward_options={kind: asks.options for kind in ("judge", "remote")})
    tree = msgspec.to_builtins(sections.Config(reward=asks, data=by_row))
    for key in FREE_KEYS:
        found = tree
        for part in key.split("."):
            assert part in found, key
            found = found[part]


def test_a_run_in_former_words_goes_on_in_present_ones() -> None:
    tree = json.loads(dump(made()))
    tree["loss"]["correction"] |= {"reject": "none", "reject_level": "token", "reject_low": 0.0, "reject_high": 0.0}
    check_resume(of_tree(tree), recorded())
    correction = CorrectionConfig(reject=(RejectionConfig(measure="k3", high=0.1),))
    with raises(ConfigError, key="loss.correction.reject"):
        check_resume(of_tree(tree), record(replace(made(), loss=LossConfig(correction=correction))))


def test_a_run_that_was_begun_without_a_decision_goes_on_without_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo")
    assert continued(sections.Config(), run) == (sections.Config(), [])
    run.create()
    old = made("tasks.inexact=allow", "tasks.check_max_len=false")
    run.write_config(old)
    now, settings = continued(made("producer.workers=3"), run)
    assert (now.tasks, now.producer.workers) == (old.tasks, 3)
    assert settings == ['tasks.inexact="allow"', "tasks.check_max_len=false"]
    check_resume(record(old), record(now))
    with raises(ConfigError, key="tasks.check_max_len"):
        check_resume(record(old), recorded())
    run.write_config(now)
    assert continued(now, run) == (now, [])
    run.write_config(made())
    assert continued(made(), run)[1] == []
    run.config_path.write_text("{")
    assert continued(sections.Config(), run) == (sections.Config(), [])


def test_the_schedule_keeps_the_length_of_the_first_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo")
    begun, text = with_decay_steps(made("run.steps=40"), run, trained=False)
    assert (begun.trainer.optimizer.decay_steps, text) == (40, "")
    run.create()
    run.write_config(begun)
    for steps in (5, 90):
        grown, text = with_decay_steps(made(f"run.steps={steps}"), run, trained=True)
        assert (grown.run.steps, grown.trainer.optimizer.decay_steps) == (steps, 40)
        assert f"run.steps is {steps}" in text and "over 40 batches" in text
        check_resume(record(begun), record(grown))
    assert with_decay_steps(made("run.steps=40"), run, trained=True) == (begun, "")
    constant = made("run.steps=90", "trainer.optimizer.schedule=constant")
    assert with_decay_steps(constant, run, trained=True)[1] == "", "there is nothing to say of a schedule without a length"
    asked = made("trainer.optimizer.decay_steps=7")
    assert with_decay_steps(asked, run, trained=True) == (asked, "")
    again, text = with_decay_steps(made("run.steps=90"), run, trained=False)
    assert (again.trainer.optimizer.decay_steps, text) == (90, ""), "nothing was trained by the former length"
    with raises(ConfigError, key="trainer.optimizer.decay_steps"):
        check_resume(record(begun), record(asked))


def test_a_run_of_an_earlier_build_keeps_its_schedule_when_it_grows(tmp_path: Path) -> None:
    tree = json.loads(dump(made("run.steps=40")))
    for key in ("schedule", "decay_steps", "cooldown_fraction"):
        del tree["trainer"]["optimizer"][key]
    run = bare_run(tmp_path / "demo")
    run.config_path.write_text(json.dumps(tree))
    old = of_tree(tree)
    for steps in (40, 90):
        grown, _ = with_decay_steps(made(f"run.steps={steps}"), run, trained=True)
        assert grown.trainer.optimizer == sections.OptimizerConfig(decay_steps=40)
        check_resume(old, record(grown))
        run.write_config(grown)


SECRET, OTHER, OPERATOR = "producers-word", "trainers-word", "operators-word"


def make(place: Path, *values: str) -> RunDir:
    run = bare_run(place / "runs" / "demo")
    config = override(Config(), ["run.name=demo", "data.train=rows.jsonl", "engine.kind=table", "trainer.backend=table", *values])
    run.write_config(config)
    ensure_model(config, run.model_dir)
    for path, password in ((run.role_path("producer"), SECRET), (run.role_path("trainer"), OTHER), (run.bus_path, OPERATOR)):
        BusAddress(url="nats://127.0.0.1:4222", user="u", password=password).save(path)
    run.write_secret_options({"producer.options": {"api_key": "options-word"}})
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make(tmp_path)


def test_a_file_holds_its_roles_login_and_no_other_secret(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "demo.attach"
    write_attach_file(run, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for _ in range(2):  # a second start beside the first
        there = unpack_attach_file(file, tmp_path / "elsewhere", bus_url="nats://127.0.0.1:9")
    assert there.path == tmp_path / "elsewhere" / "attached" / "demo"
    config = there.load_config()
    tokenizer = load_tokenizer(there.policy_dir(config))
    assert tokenizer.encode("2+3=") == load_tokenizer(run.policy_dir(run.load_config())).encode("2+3=")
    assert there.engine_token() == run.engine_token()
    address = BusAddress.load(there.bus_path_of("producer"))
    assert (address.url, address.password) == ("nats://127.0.0.1:9", SECRET)
    assert not list(there.model_dir.glob("*.safetensors")) and not there.bus_path.exists() and not there.options_path.exists()
    write_attach_file(run, tmp_path / "demo.attach")
    body = zlib.decompress((tmp_path / "demo.attach").read_bytes().partition(b"\n")[2])
    assert SECRET.encode() in body
    assert not any(word.encode() in body for word in (OTHER, OPERATOR, "options-word"))


def test_a_rewarders_file_has_its_login_and_no_token_of_engines(run: RunDir, tmp_path: Path) -> None:
    BusAddress(url="nats://127.0.0.1:4222", user="u", password="rewarders-word").save(run.role_path("rewarder"))
    token = run.engine_token()
    write_attach_file(run, tmp_path / "r.attach", role="rewarder")
    body = zlib.decompress((tmp_path / "r.attach").read_bytes().partition(b"\n")[2])
    assert b"rewarders-word" in body and not any(word.encode() in body for word in (SECRET, OTHER, OPERATOR, token))
    there = unpack_attach_file(tmp_path / "r.attach", tmp_path / "elsewhere", role="rewarder")
    assert BusAddress.load(there.bus_path_of("rewarder")).password == "rewarders-word" and there.engine_token() != token
    with pytest.raises(ConfigError, match="one of a rewarder"):
        unpack_attach_file(tmp_path / "r.attach", tmp_path / "elsewhere")


def test_who_scores_needs_the_code_of_the_reward(tmp_path: Path) -> None:
    run = make(tmp_path, "reward.kind=there.py:score", "reward.workers=1")
    BusAddress(url="nats://127.0.0.1:4222", user="u", password="x").save(run.role_path("rewarder"))
    for role in ("producer", "rewarder"):
        write_attach_file(run, tmp_path / role, role=role)
    assert unpack_attach_file(tmp_path / "producer", tmp_path / "a").load_config().reward.workers == 1
    with raises(ConfigError, key="reward.kind"):
        unpack_attach_file(tmp_path / "producer", tmp_path / "a", reward="here.py:score")
    with raises(ConfigError, key="reward.kind"):
        unpack_attach_file(tmp_path / "rewarder", tmp_path / "b", role="rewarder")
    there = unpack_attach_file(tmp_path / "rewarder", tmp_path / "b", role="rewarder", reward="here.py:score")
    assert there.load_config().reward.kind.endswith("here.py:score")


def test_the_operators_login_is_never_handed_out(run: RunDir, tmp_path: Path) -> None:
    run.role_path("producer").unlink()
    with pytest.raises(ConfigError, match="share the operator's"):
        write_attach_file(run, tmp_path / "demo.attach")
    BusAddress(url="nats://x:1", credentials_file="/there.creds").save(run.role_path("producer"))
    with pytest.raises(ConfigError, match=r"there\.creds"):
        write_attach_file(run, tmp_path / "demo.attach")
    BusAddress(url="tls://x:1", ca_file=str(tmp_path / "ca.pem")).save(run.role_path("producer"))
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        write_attach_file(run, tmp_path / "demo.attach")
    (tmp_path / "ca.pem").write_text("a certificate")
    write_attach_file(run, tmp_path / "demo.attach")
    there = unpack_attach_file(tmp_path / "demo.attach", tmp_path / "elsewhere")
    assert BusAddress.load(there.role_path("producer")).ca_pem == "a certificate"


def test_a_reward_of_the_users_is_named_here_and_never_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "demo.attach"
    write_attach_file(make(tmp_path, "reward.kind=/there/mine.py:score"), file)
    with raises(ConfigError, key="reward.kind") as caught:
        unpack_attach_file(file, tmp_path / "elsewhere")
    assert "--reward" in caught.value.hint
    there = unpack_attach_file(file, tmp_path / "elsewhere", reward="/here/mine.py:score")
    assert there.load_config().reward.kind == "/here/mine.py:score"


def test_a_reward_for_a_run_that_has_a_built_in_one_is_refused(run: RunDir, tmp_path: Path) -> None:
    write_attach_file(run, tmp_path / "demo.attach")
    with raises(ConfigError, key="reward.kind"):
        unpack_attach_file(tmp_path / "demo.attach", tmp_path / "elsewhere", reward="/here/mine.py:score")


def test_damaged_files_and_runs_of_their_own_are_left_alone(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "demo.attach"
    write_attach_file(run, file)
    mark, _, packed = file.read_bytes().partition(b"\n")
    whole = msgspec.msgpack.decode(zlib.decompress(packed), type=Attachment)

    def with_(**changes: Any) -> bytes:
        return mark + b"\n" + zlib.compress(msgspec.msgpack.encode(replace(whole, **changes)))

    bomb = zlib.compressobj(1)
    bombed = mark + b"\n" + b"".join(bomb.compress(bytes(1 << 20)) for _ in range(300)) + bomb.flush()
    wrong = [b"", b"x" * 100, file.read_bytes()[:-5], mark + b"\n" + zlib.compress(b"\x00"), bombed]
    wrong += [with_(run="../demo"), with_(run="other"), with_(config="{"), with_(config='{"later": 1}')]
    for data in wrong:
        file.write_bytes(data)
        with pytest.raises((ConfigError, SchemaError)):
            unpack_attach_file(file, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="attach file"):
        unpack_attach_file(tmp_path / "none", tmp_path / "elsewhere")
    file.write_bytes(with_(tokenizer={**whole.tokenizer, "../../evil": b"x"}))
    unpack_attach_file(file, tmp_path / "elsewhere")
    assert not list(tmp_path.rglob("evil"))
    write_attach_file(run, tmp_path / "demo.attach")
    bare_run(tmp_path / "elsewhere" / "attached" / "demo").lock_path.touch()
    with pytest.raises(ConfigError, match="run of its own"):
        unpack_attach_file(tmp_path / "demo.attach", tmp_path / "elsewhere")
