"""The trainer adapter: what it refuses before anything starts, what it writes, and how its runs end."""

import ast
import asyncio
import json
import tomllib
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.bridges.retrain import StreamrlTrainerAdapter
from streamrl.bridges.retrain.adapter import read_lines
from streamrl.bridges.retrain.run_files import producer, reference, toml, write_rows
from streamrl.config.load import load
from streamrl.errors import ConfigError, SchemaError, TrainingError
from streamrl.runtime.rundir import RunDir
from tests.bridges.retrain import reference as model
from tests.support.processes import alive, server_pid, until, worker_pid
from tests.support.pythons import python

TABLE = {"streamrl_engine.kind": "table", "streamrl_trainer.backend": "table", "streamrl_data.chat_template": False}
TABLE |= {"streamrl_page.enabled": False, "slime_rollout_max_response_len": 1, "slime_normalize_advantages": False}
GAME = """
class Game:
    async def reset(self, *, seed=None, options=None):
        return self.seen(options["initial_prompt"], True), {}

    async def step(self, action):
        return self.seen("x", False), float(len(action["raw_llm_output"]) % 2), True, False, {}

    def seen(self, text, wants):
        talk = [{"role": "user", "content": text}]
        return {"current_conversation": talk, "available_tools": [], "requires_llm_action": wants}
"""


def adapter(place: Path, *, keys: dict[str, Any] | None = None, **given: Any) -> StreamrlTrainerAdapter:
    (place / "game.py").write_text(GAME)
    config = {"name": "grpo", "backend": "slime", "hyperparameters": {**TABLE, **(keys or {})}}
    usual: dict[str, Any] = {"model": "", "algorithm_config": config, "prompt_source": ["1+1=", "1+2="], "gpus": ()}
    usual["environment"] = f"{place / 'game.py'}:Game"
    return StreamrlTrainerAdapter(**{**usual, "directory": place / "out", **given})


def test_what_it_writes_is_a_run(tmp_path: Path) -> None:
    config = SimpleNamespace(name="rloo", backend="streamrl", hyperparameters={**TABLE, "num_iterations": 4})
    options = {"env_type": "smol_agent", "env_specific_config": {"tools": ["a'b"], "n": 1.5, "on": True, "none": None}}
    (tmp_path / "made.py").write_text("def make(env_type, env_specific_config):\n    raise NotImplementedError\n")
    made = adapter(
        tmp_path, name="mine", algorithm_config=config, environment=f"{tmp_path / 'made.py'}:make", environment_options=options, max_steps=3
    )
    loaded = load(made.config_path)
    assert made.config_path == tmp_path / "out" / "mine" / "run.toml"
    assert (loaded.run.steps, loaded.loss.advantage, loaded.run.name) == (4, "rloo", "mine")
    assert [json.loads(line) for line in Path(loaded.data.train).read_text().splitlines()] == [{"prompt": "1+1="}, {"prompt": "1+2="}]
    [call] = [node for node in ast.walk(ast.parse((made.directory / "bridge.py").read_text())) if isinstance(node, ast.Call)]
    assert {word.arg: ast.literal_eval(word.value) for word in call.keywords} == {
        "environment": f"{tmp_path / 'made.py'}:make",
        "environment_options": options,
        "max_steps": 3,
    }
    assert adapter(tmp_path).name != adapter(tmp_path).name, "trainers do not meet"


def test_switches_leave_parts_to_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "label": "2", "metadata": {"reset": {"level": 3}}}]
    made = adapter(tmp_path, keys={"slime_use_retrain_environment": False, "slime_use_retrain_rewards": False}, prompt_source=rows)
    assert "environment=None" in (said := (made.directory / "bridge.py").read_text()) and "use_run_reward=True" in said
    loaded = load(made.config_path)
    assert (loaded.data.label_key, loaded.data.metadata_key, loaded.reward.kind) == ("label", "metadata", "exact_match")


class Local:
    class Inner:
        pass


def _own() -> Any:
    def inside() -> None: ...

    return inside


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt_source": None}, "none are made up"),
        ({"prompt_source": []}, "at least one prompt"),
        ({"prompt_source": [{"label": "2"}]}, "prompt 0 to be a text"),
        ({"prompt_source": ["a", {"prompt": "b", "label": "c"}]}, "prompt 0 has none"),
        ({"prompt_source": [{"prompt": "a", "metadata": {"x": {1}}}]}, "plain numbers, texts"),
        ({"prompt_source": {"prompt": "a"}}, "got a dict"),
        ({"prompt_source": 3}, "got a int"),
        ({"prompt_source": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"model": None}, "to be a model directory"),
        ({"model": "Qwen/Qwen3-0.6B"}, "download the model first"),
        ({"model": SimpleNamespace(name_or_path="Qwen/Qwen3-0.6B")}, "download the model first"),
        ({"reference_model": "nowhere"}, "expected reference_model"),
        ({"reward_functions": [len]}, "expected a reward_calculator beside 1 reward_functions"),
        ({"environment": None}, "nobody would give a reward"),
        ({"environment": model.Guess()}, "each makes what it needs"),
        ({"environment": lambda: model.Guess()}, "got .*lambda"),
        ({"environment": _own()}, "got _own.<locals>.inside"),
        ({"environment": "game.py:Gaem"}, "there is none"),
        ({"reward_calculator": model.Calculator()}, "got an object of the class Calculator"),
        ({"reward_options": {"f": len}, "reward_calculator": dict}, "expected reward_options to be plain"),
        ({"algorithm_config": {"backend": "trl", "hyperparameters": {}}}, "algorithm.backend to be streamrl or slime"),
        ({"algorithm_config": {"name": "drgrpo", "hyperparameters": {}}}, "algorithm.name to be one of grpo"),
        ({"algorithm_config": {"name": "grpo"}}, "table hyperparameters"),
        ({"keys": {"streamrl_run.kind": "rll"}}, "run.kind must be one of"),
        ({"keys": {"lerning_rate": 1}}, "did you mean learning_rate"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        adapter(tmp_path, name="mine", **given)
    assert not (tmp_path / "out" / "mine" / "run.toml").exists()


def test_a_name_stays_in_its_directory(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="letters, digits"):
        adapter(tmp_path, name="../elsewhere")
    assert not (tmp_path / "out").exists()


def test_how_other_processes_find_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference(model.Guess, "environment") == "tests.bridges.retrain.reference:Guess"
    assert reference(Local.Inner, "environment").endswith(":Local.Inner")
    assert reference(json.JSONDecoder, "environment") == "json.decoder:JSONDecoder"
    (tmp_path / "beside.py").write_text("class Maze: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside  # pyright: ignore[reportMissingImports]

    assert reference(beside.Maze, "environment") == f"{tmp_path / 'beside.py'}:Maze"


@pytest.mark.process
def test_a_class_of_the_script_itself_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from streamrl.bridges.retrain.run_files import reference\nclass Maze: ...\nprint(reference(Maze, 'environment'))\n"
    )
    assert python(tmp_path, "script.py")[0].strip() == f"{tmp_path / 'script.py'}:Maze"


def test_files_hold_what_they_were_given(tmp_path: Path) -> None:
    tree = {"a": {"text": 'q"\\\n\x7f\u2028é', "n": -1e-300, "b": False, "l": [1, [2.5, "x"]], "t": {"a b": {"c": 1}, "d": []}}}
    assert tomllib.loads(toml(tree)) == tree
    for wrong in (None, {1}, object(), float("nan")):
        with pytest.raises(ConfigError):
            toml({"a": {"x": wrong}})
    with pytest.raises(ConfigError, match="x to be plain"):
        producer({"x": tmp_path})
    assert write_rows(tmp_path / "rows", iter(["a"])) == {"data.train": str(tmp_path / "rows"), "data.label_key": ""}


async def test_what_no_run_can_do_says_so(tmp_path: Path) -> None:
    made = adapter(tmp_path, name="mine")
    with pytest.raises(TrainingError, match="the run's own stream"):
        await made.step({})
    with pytest.raises(ConfigError, match="checkpoint_directory"):
        made.load_checkpoint(str(tmp_path / "nowhere"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "table.json").write_text("{}")
    made.load_checkpoint(str(tmp_path / "hf"))
    assert load(made.config_path).model.path == str(tmp_path / "hf")
    (made.directory / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(ConfigError, match="before the first train"):
        made.load_checkpoint(str(tmp_path / "hf"))


@pytest.mark.process
async def test_a_run_that_fails_says_why_and_one_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    broken = adapter(tmp_path, name="broken")
    (tmp_path / "game.py").unlink()
    with pytest.raises(TrainingError, match=r"exit code 1: .*game.py"):
        await broken.train()
    with pytest.raises(TrainingError, match="`streamrl export` of run broken"):
        broken.save_checkpoint(str(tmp_path / "saved"))

    made = adapter(tmp_path, name="mine", keys={"num_iterations": 100_000, "slime_save_interval": 100})
    run = RunDir(made.directory / "runs" / "mine")
    training = asyncio.create_task(made.train())
    kinds = ("trainer", "engine", "feeder", "producer")
    await until(lambda: server_pid(run) and all(worker_pid(run, kind) for kind in kinds), within_s=60)
    pids = [server_pid(run), *(worker_pid(run, kind) for kind in kinds)]
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert not [pid for pid in pids if pid is not None and alive(pid)]


@pytest.mark.process
def test_neither_retrain_nor_slime_nor_ray_is_needed_and_torch_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('retrain', 'slime', 'ray', 'sglang'))\n"
        "from streamrl.bridges.retrain import create_retrain_bridge\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "create_retrain_bridge('retrain.environment:get_environment')\n"
    )
    _, err = python(tmp_path, "-c", code, code=1)
    assert "retrain.environment with the environment" in err and "hint: install it" in err


async def test_a_runs_long_line_does_not_end_it() -> None:
    stream, tail = asyncio.StreamReader(limit=64), deque[str](maxlen=3)
    stream.feed_data(b"begun\n" + b"x" * 1000 + b"\nended\n")
    stream.feed_eof()
    await read_lines(stream, tail)
    assert [*tail] == ["begun", "(a long line)", "ended"]
