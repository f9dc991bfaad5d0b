"""Workers as Ray actors on the nodes of a cluster: the one file that knows Ray.

Ray finds the places and starts a process on each; that process starts the worker and watches it (`PlacedWorker`). Ray restarts nothing: the
supervisor does. Tasks, samples, weights and numbers go over the bus; what passes through Ray is who starts, stops and has ended.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from streamrl.config.load import dump
from streamrl.config.ray import RayConfig
from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.launch.local import LocalLauncher
from streamrl.launch.placed import PlacedWorker
from streamrl.launch.placement import Group, Node, check_fits, fitted, groups, no_room, places_of_ranks, said
from streamrl.runtime.beats import RUNS
from streamrl.runtime.kinds import USER_CODE
from streamrl.runtime.rundir import RunDir

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100_000_000
"""Of a Ray of our own. Nothing is put there."""
_KILL_S = 5.0
"""A worker that was killed has ended after this long, or its actor is killed too."""
_ASK_S = 5.0
_LOST = 1
"""Exit code of a worker whose actor, or whose node, is gone."""
_HERE = ("feeder", "evaluator", "gateway")


class RayProcess:
    """One worker on some node."""

    def __init__(self, actor: Any, name: str, start_timeout_s: float) -> None:
        self.actor = actor
        self.lost = ""
        """Why Ray has lost it; empty: it has not."""
        self.why = ""
        """Why its actor has ended it."""
        self._name = name
        self._pid = 0
        self._pid_ref: Any = actor.start.remote()
        self._exit_ref: Any = actor.wait.remote()
        self._code: int | None = None
        self._start_s = start_timeout_s
        self._started_s = time.monotonic()
        self._killed_s = float("inf")

    @property
    def pid(self) -> int:
        """Process id on its node; 0 until it is known here."""
        if not self._pid and self._code is None and _is_ready(self._pid_ref):
            try:
                self._pid = int(ray.get(self._pid_ref))
            except RayError as error:
                self._lose(f"{error}")
        return self._pid

    def poll(self) -> int | None:
        """Exit code; None while it runs, or waits for its place. Never blocks."""
        if self._code is not None:
            return self._code
        now_s = time.monotonic()
        if _is_ready(self._exit_ref):
            try:
                self._code, self.why = ray.get(self._exit_ref)
            except RayError as error:
                self._lose(f"{error}")
        elif now_s > self._killed_s + _KILL_S:
            self._lose("it did not end when it was killed")
        elif now_s > self._started_s + self._start_s and not _is_ready(self._pid_ref):
            self._lose(f"it did not come up within ray.start_timeout_s = {self._start_s:g} s")
        return self._code

    def heard(self) -> str:
        """Its own actor listens to it, beside it (`PlacedWorker.wait`)."""
        return RUNS

    def dump(self) -> None:
        """The actor does that."""

    def stop(self) -> None:
        """Ask it to drain; no error if it has ended."""
        if self.poll() is None:
            self.actor.stop.remote()

    def kill(self) -> None:
        """End it and whatever it has started; no error if it has ended."""
        if self.poll() is None and self._killed_s == float("inf"):
            self._killed_s = time.monotonic()
            self.actor.kill.remote()

    def _lose(self, why: str) -> None:
        self._code, self.lost = _LOST, f"Ray has lost {self._name}: {why.strip()}"
        logger.warning("event=actor_lost worker=%s reason=%s", self._name, why.strip().partition("\n")[0])
        ray.kill(self.actor, no_restart=True)


class RayLauncher:
    """Connected from `open` to `close`; `config` is what the workers get.

    Args:
        run: whose workers.
        config: of the run, as it fits the places found.
        reserved: the placement group and what each worker asks for, by kind.
    """

    def __init__(self, run: RunDir, config: Config, reserved: Mapping[str, tuple[PlacementGroup, Group]]) -> None:
        self.config = config
        self._run = run
        self._reserved = dict(reserved)
        self._places = {kind: places_of_ranks(_bundles(group)) for kind, (group, _) in self._reserved.items()}
        """Index of each worker's bundle, by kind; kept when Ray finds another node for one."""
        self._processes: dict[str, RayProcess] = {}

    @classmethod
    def open(cls, config: Config, run: RunDir, note: Callable[[str], None]) -> RayLauncher:
        """Connect to the cluster, or start one, and reserve a place for each rank and each engine.

        Call it from the main thread, before signal handlers are set: Ray sets one of its own.

        Raises:
            LaunchError: no such cluster; the run does not fit it; or workers would be where they cannot reach each other.
        """
        _connect(config.ray, run.name, note)
        try:
            nodes = _nodes()
            asked = groups(config, sum(node.total.get("GPU", 0.0) for node in nodes))
            check_fits(asked, nodes)
            reserved = {group.kind: (_reserve(group), group) for group in asked}
            _await_places(reserved, config.ray.start_timeout_s)
            launcher = cls(run, config, reserved)
            launcher.config = launcher.fit(config)
        except BaseException:
            ray.shutdown()
            raise
        for name, host in sorted(launcher.hosts().items()):
            logger.info("event=placed worker=%s host=%s", name, host)
        if launcher.config.weights != config.weights:
            note(f"engines or ranks are on other hosts than rank 0: weights.transport = bus instead of {config.weights.transport}")
        return launcher

    def hosts(self) -> dict[str, str]:
        """Host of each reserved place, by the worker's name; none where a node has been lost and no other found."""
        by_id = {node.id: node.host for node in _nodes()}
        found: dict[str, str] = {}
        for kind, (group, _) in self._reserved.items():
            bundles = _bundles(group)
            nodes = [bundles.get(place, "") for place in self._places[kind]]
            found |= {f"{kind}-{index}": by_id[node] for index, node in enumerate(nodes) if node in by_id}
        return found

    def fit(self, config: Config) -> Config:
        """See `streamrl.launch.placement.fitted`."""
        nodes = _nodes()
        here = ray.get_runtime_context().get_node_id()
        home = next(node.host for node in nodes if node.id == here)
        others = sorted({node.host for node in nodes}) if config.ray.others.strategy == "SPREAD" else [home]
        return fitted(config, self.hosts(), home=home, others=others)

    def start(self, kind: str, index: int) -> RayProcess:
        """Start one worker; returns before it is up. Raises LaunchError when the places found since last time do not fit the run."""
        name = f"{kind}-{index}"
        if self.fit(self.config) != self.config:
            raise LaunchError(
                f"{name} has found a place on another host than rank 0 of the trainer, which weights.transport = "
                f"{self.config.weights.transport} does not reach",
                hint="set weights.transport = 'bus' and run `up` again",
                worker=name,
            )
        if name in self._processes:
            ray.kill(self._processes[name].actor, no_restart=True)
        actor_class: Any = ray.remote(PlacedWorker)
        options, gpus = self._options(kind, index)
        actor = actor_class.options(max_restarts=0, max_task_retries=0, **options).remote(
            str(self._run.path), dump(self.config), self._files(kind), kind, index, gpus
        )
        self._processes[name] = RayProcess(actor, name, self.config.ray.start_timeout_s)
        return self._processes[name]

    def tail(self, worker: str) -> str:
        """The last lines of a worker's log, asked of its node where it is not here."""
        process = self._processes.get(worker)
        if process is None or process.lost:
            return "\n".join(filter(None, (LocalLauncher(self._run, self.config).tail(worker), process.lost if process else "")))
        try:
            return str(ray.get(process.actor.tail.remote(), timeout=_ASK_S))
        except RayError as error:
            return f"its log is on another node, which does not answer: {error}"

    def close(self) -> None:
        """Leave the cluster, which ends what is left there of this run; a cluster of our own ends too."""
        publisher = self._processes.get("trainer-0")
        if publisher is not None and not publisher.lost:
            try:
                ray.get(publisher.actor.free.remote(), timeout=_ASK_S)
            except RayError as error:
                logger.warning("event=weights_not_freed worker=trainer-0 error=%s", str(error).partition("\n")[0])
        ray.shutdown()

    def _options(self, kind: str, index: int) -> tuple[dict[str, Any], bool]:
        """Options of an actor, and whether it has GPUs."""
        environment = {"runtime_env": self.config.ray.runtime_env} if self.config.ray.runtime_env else {}
        if kind in self._reserved:
            group, place = self._reserved[kind]
            ask, strategy = place.ask, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=self._places[kind][index])
        else:
            others = self.config.ray.others
            ask = {"CPU": others.cpus, "GPU": max(0.0, others.gpus), **others.resources}
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            strategy = here if others.strategy == "PACK" or kind in _HERE else "SPREAD"
        named = {name: amount for name, amount in ask.items() if name not in ("CPU", "GPU")}
        cpus, gpus = ask.get("CPU", 0.0), ask.get("GPU", 0.0)
        return {**environment, "num_cpus": cpus, "num_gpus": gpus, "resources": named, "scheduling_strategy": strategy}, gpus > 0

    def _files(self, kind: str) -> dict[str, bytes]:
        """What a worker of `kind` needs on a host that does not see this run directory."""
        paths = (self._run.engine_token_path, self._run.bus_path_of(kind))
        if kind in USER_CODE and self._run.options_path.is_file():
            paths = (*paths, self._run.options_path)
        if kind == "gateway":
            paths = (*paths, self._run.gateway_key_path)
        return {str(path.relative_to(self._run.path)): path.read_bytes() for path in paths}


def _connect(config: RayConfig, run: str, note: Callable[[str], None]) -> None:
    """`ray.init`, without telemetry, dashboard or a second copy of the workers' output."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray prints what its nodes report to standard output, which is the run's (`up --json`), and has no public switch for that. What it says
    # of a worker comes with the worker's error as well.
    importlib.import_module("ray._private.worker").__dict__["_worker_logs_enabled"] = False
    common: dict[str, Any] = {"namespace": f"streamrl-{run}", "log_to_driver": False, "configure_logging": False}
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    if config.address == "local":
        ray.init(address="local", **common, **own)
        return
    try:
        ray.init(address=config.address, **common)
    except ConnectionError as error:
        if config.address != "auto":
            raise LaunchError(
                f"expected a Ray cluster at {config.address}, which this machine is a part of: {error}",
                hint="join it with `ray start --address=HOST:PORT`, or set ray.address = 'local'",
            ) from error
        note("this machine belongs to no Ray cluster; starting a Ray of its own")
        ray.init(address="local", **common, **own)


def _nodes() -> list[Node]:
    return [Node(id=node["NodeID"], host=node["NodeManagerAddress"], total=node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _bundles(group: PlacementGroup) -> Mapping[int, str]:
    """Node of each of a group's bundles."""
    return placement_group_table(group)["bundles_to_node_id"]


def _reserve(group: Group) -> PlacementGroup:
    # A bundle must ask for something; memory of one byte is there on every node.
    bundle = dict(group.ask) or {"memory": 1}
    return placement_group([bundle] * group.count, strategy=group.strategy)


def _await_places(reserved: Mapping[str, tuple[PlacementGroup, Group]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for place, _ in reserved.values():
        if not place.wait(max(0.0, deadline - time.monotonic())):
            asked: Sequence[Group] = [group for _, group in reserved.values()]
            free = said(ray.available_resources())
            raise no_room(asked, _nodes(), f"{free} free in all, and no room came within ray.start_timeout_s = {timeout_s:g} s")


def _is_ready(reference: Any) -> bool:
    ready, _ = ray.wait([reference], timeout=0, fetch_local=False)
    return bool(ready)
