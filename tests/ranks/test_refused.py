"""What is refused before ranks start: parts on hosts that share no memory, and what is for mixtures with a dense model."""

from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.consumers.training.ranks import check_hosts
from streamrl.errors import ConfigError
from streamrl.launch.prepare import prepare
from tests.ranks.trained import Trained
from tests.support.errors import raises


def test_parts_on_several_hosts_are_refused_by_the_transports_name() -> None:
    check_hosts("shm", [7])
    check_hosts("shm", [7, 7])
    with raises(ConfigError, key="weights.transport", ranks=[1, 3]) as caught:
        check_hosts("ipc", [7, 8, 7, 9])
    assert "weights.transport = ipc" in caught.value.message and "'bus'" in caught.value.hint


@pytest.mark.nats
@pytest.mark.parametrize("asked", ["trainer.routing_replay=true", "loss.experts.z_coef=0.001"])
async def test_what_is_for_mixtures_is_refused_with_a_dense_model_before_anything_starts(tmp_path: Path, asked: str) -> None:
    trained = Trained(tmp_path)
    trained.run.model_dir.mkdir(parents=True)
    (trained.run.model_dir / "config.json").write_text('{"model_type": "qwen3"}')
    with raises(ConfigError, key=asked.partition("=")[0], got="qwen3"):
        await prepare(load(tmp_path / "run.toml", [asked]), trained.run)
