"""The file that lets a producer of another host attach: what it holds, and what is refused."""

from __future__ import annotations

import stat
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.bus.address import BusAddress
from streamrl.config.load import override
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError, SchemaError
from streamrl.runtime.attach_file import Attachment, unpack_attach_file, write_attach_file
from streamrl.runtime.rundir import RunDir
from tests.support.errors import raises

SECRET, OTHER, OPERATOR = "producers-word", "trainers-word", "operators-word"


def make(place: Path, *values: str) -> RunDir:
    run = RunDir(place / "runs" / "demo")
    run.create()
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
        return mark + b"\n" + zlib.compress(msgspec.msgpack.encode(msgspec.structs.replace(whole, **changes)))

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
    there = RunDir(tmp_path / "elsewhere" / "attached" / "demo")
    there.create()
    there.lock_path.touch()
    with pytest.raises(ConfigError, match="run of its own"):
        unpack_attach_file(tmp_path / "demo.attach", tmp_path / "elsewhere")
