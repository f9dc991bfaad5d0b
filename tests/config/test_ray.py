from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.errors import ConfigError


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
    ("text", "message"),
    [
        ("[ray.trainer]\ngpus = 1.5\n", r"ray\.trainer\.gpus must be -1, a fraction below 1, or a whole number, got 1\.5"),
        ("[ray.engine]\ngpus = -0.5\n", r"ray\.engine\.gpus must be -1, a fraction"),
        ("[ray.engine]\ncpus = -1.0\n", r"ray\.engine\.cpus must be at least 0"),
        ("[ray.engine]\nresources = {GPU = 1}\n", r"ray\.engine\.resources may not name GPU"),
        ("[ray.engine]\nresources = {fast = 0}\n", r"ray\.engine\.resources\.fast must be above 0"),
        ("[ray]\nstart_timeout_s = 0\n", r"ray\.start_timeout_s must be above 0"),
        ("[ray.others]\nstrategy = 'STRICT_SPREAD'\n", r"ray\.others\.strategy must be PACK or SPREAD"),
        ("[ray]\naddress = 'ray://head:10001'\n", r"ray\.address must be local, auto or host:port"),
        ("[ray]\naddress = 'auto'\n[trainer]\ngpu = 1\n", r"trainer\.gpu must be 0 with ray\.address"),
        (
            "[ray]\naddress = 'auto'\ntrainer.gpus = 0.5\n[trainer]\nranks = 2\n",
            r"ray\.trainer\.gpus must be above 0\.5 with trainer\.ranks = 2",
        ),
        (
            "[ray]\naddress = 'auto'\n[model]\npath = '.'\n[engine]\nkind = 'sglang'\nsglang.gpus = [0]\n",
            r"engine\.sglang\.gpus must be empty with ray\.address",
        ),
        (
            "[ray]\naddress = 'auto'\nengine.gpus = 0.5\n[model]\npath = '.'\n[engine]\nkind = 'sglang'\nsglang.tensor_parallel = 2\n",
            r"ray\.engine\.gpus must be engine\.sglang\.tensor_parallel = 2",
        ),
    ],
)
def test_what_it_may_not_say(place: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(place, text))


def test_several_engines_on_sglang_need_no_list_of_gpus_with_ray(place: Path) -> None:
    text = "[model]\npath = '.'\n[engine]\nkind = 'sglang'\nworkers = 2\n"
    with pytest.raises(ConfigError, match=r"2 engines need engine\.sglang\.gpus"):
        load(written(place, text))
    assert load(written(place, text + "[ray]\naddress = 'auto'\n")).engine.workers == 2
