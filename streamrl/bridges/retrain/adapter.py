"""The trainer adapter: what retrain gives its trainers, as a run of streamrl.

`StreamrlTrainerAdapter` has the constructor and the methods of retrain's `BaseTrainer`. It writes a run's files, and `train` is `streamrl
up` on them, in a process of its own: nothing of the run outlives a call that is cancelled or fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from streamrl.bridges.retrain.keys import translate
from streamrl.bridges.retrain.placement import free_gpus
from streamrl.bridges.retrain.rollouts import create_retrain_bridge
from streamrl.bridges.retrain.run_files import nested, producer, reference, toml, write_rows
from streamrl.config.load import load
from streamrl.errors import ConfigError, LaunchError, TrainingError
from streamrl.schemas.subjects import check_name

logger = logging.getLogger(__name__)

BACKENDS = ("streamrl", "slime")
"""`algorithm.backend` of configurations that this trainer takes."""
_ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "ppo": "ppo"}
_STOP_S = 60.0
"""Time that a run gets to stop after a signal."""
_TAIL = 20
"""Lines of a run that failed, in the error."""
_LONGEST_LINE = 1 << 20


class StreamrlTrainerAdapter:
    """Trains with streamrl what retrain has set up.

    Args:
        model: a Hugging Face model directory, or an object with `name_or_path`; empty: a small model is built.
        algorithm_config: has `hyperparameters` (`streamrl.bridges.retrain.keys`), and perhaps `name` and `backend`; an object or a table.
        reward_functions: retrain's batch rewards; as its slime adapter, it asks the calculator, and refuses them without one.
        prompt_source: a file of rows, or prompts: texts, or tables with `prompt` and perhaps `label` and `metadata`.
        tokenizer: not used; the policy's lies with the model.
        reference_model: of the KL term, as `model`.
        environment: the class or function that makes one, or its name; None: a row is one turn.
        reward_calculator: the same; None: the environment's rewards stand.
        directory: where a folder with the run's name is made.
        name: of the run; a name that is there goes on. Empty: a new one, so that trainers do not meet.
        gpus: those of this machine that the run may have, as CUDA_VISIBLE_DEVICES names them; None: those that nobody uses.
        **bridge: further arguments of `create_retrain_bridge`.

    Raises:
        ConfigError: something is missing, unknown, or contradicts something else; nothing has been started.
    """

    def __init__(
        self,
        model: Any,
        algorithm_config: Any,
        reward_functions: Sequence[Any] = (),
        prompt_source: Any = None,
        tokenizer: Any = None,
        reference_model: Any = None,
        environment: Any = None,
        reward_calculator: Any = None,
        *,
        directory: str | Path = "trainer_output",
        name: str = "",
        gpus: Sequence[str] | None = None,
        **bridge: Any,
    ) -> None:
        hyperparameters = _hyperparameters(algorithm_config)
        if prompt_source is None and not any(
            key.removeprefix("slime_").removeprefix("streamrl_") == "prompt_data" for key in hyperparameters
        ):
            raise ConfigError("expected a prompt_source, got none", hint="give a list of prompts or a file of rows: none are made up")
        if reward_functions and reward_calculator is None:
            raise ConfigError(
                f"expected a reward_calculator beside {len(reward_functions)} reward_functions, which only other trainers call",
                hint="give the function that makes retrain's RewardCalculator with these rewards",
            )
        self._gpus = tuple(free_gpus() if gpus is None else gpus)
        said = translate(hyperparameters, free=len(self._gpus))
        self.name = check_name("run name", name or f"retrain-{uuid4().hex[:8]}")
        self.directory = Path(directory).resolve() / self.name
        self.notes = said.notes
        self._keys: dict[str, Any] = {
            "run.name": self.name,
            "run.dir": str(self.directory / "runs"),
            "model.path": _model(model, "model"),
            **_estimator(algorithm_config),
            **said.keys,
        }
        if reference_model is not None:
            self._keys["loss.kl.reference"] = _model(reference_model, "reference_model")
        arguments = self._arguments(
            environment, reward_calculator, bridge, use_environment=said.use_environment, use_rewards=said.use_rewards
        )
        create_retrain_bridge(**arguments)
        self._keys["producer.function"] = f"{self.directory / 'bridge.py'}:bridge"
        self.directory.mkdir(parents=True, exist_ok=True)
        if prompt_source is not None:
            self._keys |= _rows(prompt_source, self.directory / "prompts.jsonl")
        (self.directory / "bridge.py").write_text(producer(arguments), encoding="utf-8")
        self._write()
        for note in self.notes:
            logger.warning("event=note text=%s", note)

    @property
    def config_path(self) -> Path:
        """The run's TOML file: `streamrl up` on it is the same run."""
        return self.directory / "run.toml"

    async def train(self, total_training_iterations: int | None = None) -> dict[str, Any]:
        """Train to the end, and say what it came to; a run that is there already goes on.

        Args:
            total_training_iterations: batches in all, in place of the hyperparameters'.

        Returns:
            The run's summary (docs/metrics.md), with retrain's `rollouts_completed` and `final_rollout_id`.

        Raises:
            TrainingError: the run has failed; says its last words.
        """
        given = [] if total_training_iterations is None else ["--set", f"run.steps={total_training_iterations}"]
        summary = json.loads(await self._up(*given))
        steps = summary["steps"]
        return {**summary, "rollouts_completed": steps, "final_rollout_id": steps - 1}

    async def step(self, experience_batch: Any) -> dict[str, Any]:
        """No trainer takes a batch from outside: raises TrainingError."""
        raise TrainingError(
            "expected train(): batches come from the run's own stream of samples, step() would have to train another one",
            hint="await train(total_training_iterations=n): it goes on where the run is",
        )

    def save_checkpoint(self, checkpoint_directory: str) -> None:
        """Write the newest version as a Hugging Face model directory, which must not be there yet; raises TrainingError."""
        command = self._command(
            "export", self.name, "--dir", str(self.directory / "runs"), "--out", str(Path(checkpoint_directory).resolve())
        )
        done = subprocess.run(command, env=self._surroundings(), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise self._failed("export", done.returncode, done.stderr.splitlines()[-_TAIL:])

    def load_checkpoint(self, checkpoint_directory: str) -> None:
        """Begin with the model of this directory; raises ConfigError once the run has begun: it goes on where it is by itself."""
        if (self.directory / "runs" / self.name).exists():
            raise ConfigError(
                f"expected load_checkpoint before the first train, run {self.name} has begun and goes on from its own checkpoints",
                hint="make another trainer, with another name",
            )
        self._keys["model.path"] = _model(checkpoint_directory, "checkpoint_directory")
        self._write()

    def _arguments(
        self, environment: Any, calculator: Any, bridge: Mapping[str, Any], *, use_environment: bool, use_rewards: bool
    ) -> dict[str, Any]:
        """Of `create_retrain_bridge`, in a form that another process can read."""
        named = {
            "environment": environment if use_environment else None,
            "reward_calculator": calculator if use_rewards else None,
            "parse": bridge.get("parse"),
        }
        if not use_rewards:
            bridge = {**bridge, "use_run_reward": True}
        return {**bridge, **{key: reference(given, key) for key, given in named.items() if given is not None}} | (
            {} if named["environment"] is not None else {"environment": None}
        )

    def _write(self) -> None:
        tree = nested(self._keys)
        before = self.config_path.read_bytes() if self.config_path.exists() else None
        self.config_path.write_text(toml(tree), encoding="utf-8")
        try:
            load(self.config_path)
        except ConfigError:
            # What is wrong is not left behind.
            self.config_path.unlink() if before is None else self.config_path.write_bytes(before)
            raise

    def _command(self, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "streamrl", *arguments)

    def _surroundings(self) -> dict[str, str]:
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)} if self._gpus else {})}

    async def _up(self, *arguments: str) -> str:
        """What `streamrl up` prints; its other lines go to the log."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command("up", str(self.config_path), "--json", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=self._surroundings(),
            limit=_LONGEST_LINE,
        )
        tail: deque[str] = deque(maxlen=_TAIL)
        try:
            said, _, code = await asyncio.gather(_all(process.stdout), read_lines(process.stderr, tail), process.wait())
        except BaseException:
            await _stopped(process)
            raise
        if code != 0:
            raise self._failed("up", code, tail)
        return said

    def _failed(self, verb: str, code: int, tail: Iterable[str]) -> TrainingError:
        return TrainingError(
            f"`streamrl {verb}` of run {self.name} ended with exit code {code}: {' | '.join(tail) or 'it said nothing'}",
            hint=f"its files are in {self.directory}; `streamrl status {self.name} --dir {self.directory / 'runs'}` says more",
            code=code,
        )


def _hyperparameters(algorithm_config: Any) -> Mapping[str, Any]:
    backend = _field(algorithm_config, "backend")
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"expected algorithm.backend to be {' or '.join(BACKENDS)}, got {backend!r}", hint="correct it")
    found = _field(algorithm_config, "hyperparameters")
    if not isinstance(found, Mapping):
        raise ConfigError(f"expected algorithm_config with a table hyperparameters, got {type(found).__name__}", hint="it may be empty")
    return found


def _estimator(algorithm_config: Any) -> dict[str, str]:
    name = _field(algorithm_config, "name")
    if name is None:
        return {}
    if str(name).lower() not in _ESTIMATORS:
        raise ConfigError(
            f"expected algorithm.name to be one of {', '.join(_ESTIMATORS)}, got {name!r}", hint="or name advantage_estimator instead"
        )
    return {"loss.advantage": _ESTIMATORS[str(name).lower()]}


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _model(given: Any, key: str) -> str:
    path = given if isinstance(given, str | Path) else getattr(given, "name_or_path", None)
    if path is None:
        raise ConfigError(f"expected {key} to be a model directory, or to have name_or_path, got {given!r}"[:300], hint="name a directory")
    if path and not (Path(path) / "config.json").is_file() and not (Path(path) / "table.json").is_file():
        raise ConfigError(
            f"expected {key} to be a Hugging Face model directory on this machine, got {str(path)!r}, which has no config.json",
            hint="download the model first (`hf download`): a run reads its weights from files",
        )
    return str(Path(path).resolve()) if path else ""


def _rows(prompts: Any, path: Path) -> dict[str, str]:
    if isinstance(prompts, str | Path):
        return {"data.train": str(Path(prompts).resolve())}
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"expected prompts, or a file of rows, as prompt_source, got a {type(prompts).__name__}", hint="give a list")
    return write_rows(path, prompts)


async def _all(stream: asyncio.StreamReader | None) -> str:
    return "" if stream is None else (await stream.read()).decode(errors="replace")


async def read_lines(stream: asyncio.StreamReader | None, tail: deque[str]) -> None:
    """A run's lines to the log, and the last ones to `tail`."""
    while stream is not None:
        try:
            line = await stream.readline()
        except ValueError:  # longer than _LONGEST_LINE: that much of it is gone, and what follows is read
            line = b"(a long line)\n"
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        tail.append(text)
        logger.info("event=run_line text=%s", text)


async def _stopped(process: asyncio.subprocess.Process) -> None:
    """End a run in order, and at once where it does not: `up` ends what it has started either way."""
    for stop in (process.terminate, process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await process.wait()
    raise LaunchError(f"process {process.pid} does not end", hint="look for it with ps")
