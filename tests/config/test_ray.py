from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.errors import ConfigError
from tests.support.errors import raises


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    return tmp_path


def written(place: Path, text: str) -> Path:
    path = place / "run.toml"
    path.write_text("[data]\ntrain = 'rows.jsonl'\n" + text)
    return path


def test_a_whole_section(place: Path) -> None:
    config = load(
        written(
            place,
            "[ray]\naddress = 'auto'\n[ray.trainer]\ngpus = 0.4\n[ray.engine]\nstrategy = 'SPREAD'\nresources = {fast = 1}\n"
            "[ray.runtime_env.env_vars]\nHF_HOME = '/models'\n",
        )
    )
    assert (config.ray.address, config.ray.trainer.gpus, config.ray.engine.resources) == ("auto", 0.4, {"fast": 1})
    assert config.ray.runtime_env == {"env_vars": {"HF_HOME": "/models"}}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[ray.trainer]\ngpus = 1.5\n", "ray.trainer.gpus"),
        ("[ray.engine]\ngpus = -0.5\n", "ray.engine.gpus"),
        ("[ray.engine]\ncpus = -1.0\n", "ray.engine.cpus"),
        ("[ray.engine]\nresources = {GPU = 1}\n", "ray.engine.resources"),
        ("[ray.engine]\nresources = {fast = 0}\n", "ray.engine.resources.fast"),
        ("[ray]\nstart_timeout_s = 0\n", "ray.start_timeout_s"),
        ("[ray.others]\nstrategy = 'STRICT_SPREAD'\n", "ray.others.strategy"),
        ("[ray]\naddress = 'ray://head:10001'\n", "ray.address"),
        ("[ray]\naddress = 'auto'\n[trainer]\ngpu = 1\n", "trainer.gpu"),
        (
            "[ray]\naddress = 'auto'\ntrainer.gpus = 0.5\n[trainer]\nranks = 2\n",
            "ray.trainer.gpus",
        ),
        (
            "[ray]\naddress = 'auto'\n[model]\npath = '.'\n[engine]\nkind = 'sglang'\nsglang.gpus = [0]\n",
            "engine.sglang.gpus",
        ),
        (
            "[ray]\naddress = 'auto'\nengine.gpus = 0.5\n[model]\npath = '.'\n[engine]\nkind = 'sglang'\nsglang.tensor_parallel = 2\n",
            "ray.engine.gpus",
        ),
    ],
)
def test_what_it_may_not_say(place: Path, text: str, key: str) -> None:
    with raises(ConfigError, key=key):
        load(written(place, text))


def test_several_engines_on_sglang_need_no_list_of_gpus_with_ray(place: Path) -> None:
    text = "[model]\npath = '.'\n[engine]\nkind = 'sglang'\nworkers = 2\n"
    with raises(ConfigError, key="engine.sglang.gpus"):
        load(written(place, text))
    assert load(written(place, text + "[ray]\naddress = 'auto'\n")).engine.workers == 2
