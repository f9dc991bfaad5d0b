"""Where workers go on a cluster, as plain data: what each asks for, whether that fits, and what it means for bus, engines and weights.

Nothing here talks to a cluster; `streamrl.launch.ray` does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from streamrl.config.ray import PlaceConfig
from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.runtime.kinds import num_workers
from streamrl.system import is_loopback, servers
from streamrl.tensors.mesh import mesh_of

RESERVED = ("trainer", "engine")
"""Kinds that keep their place over restarts."""


class Node(msgspec.Struct, frozen=True):
    """One node of the cluster, and what it has, whoever uses it."""

    id: str
    host: str
    total: Mapping[str, float]


class Group(msgspec.Struct, frozen=True):
    """Workers of one kind, all of which ask for the same."""

    kind: str
    count: int
    ask: Mapping[str, float]
    """CPU, GPU and resources of one worker; without those it asks nothing of."""
    strategy: str


def groups(config: Config, cluster_gpus: float) -> list[Group]:
    """The reserved workers of a run.

    GPUs that are left to us: one for each rank, tensor_parallel for each engine on SGLang, one for a local engine. Where there are fewer,
    one rank and local engines share what is there: a single GPU all of them, else the rank has one and the engines share the others.
    """
    ray, counts = config.ray, {kind: num_workers(config, kind) for kind in RESERVED}
    gpus = {
        "trainer": ray.trainer.gpus if ray.trainer.gpus >= 0 else _trainer_gpus(config, cluster_gpus),
        "engine": ray.engine.gpus if ray.engine.gpus >= 0 else _engine_gpus(config, cluster_gpus),
    }
    chosen_by_us = ray.trainer.gpus < 0 and ray.engine.gpus < 0
    wanted = sum(counts[kind] * gpus[kind] for kind in RESERVED)
    if chosen_by_us and counts["trainer"] == 1 and config.engine.traits.gpus == "shared" and 0 < cluster_gpus < wanted:
        gpus = _shares(gpus, counts["engine"], int(cluster_gpus))
    places = {"trainer": ray.trainer, "engine": ray.engine}
    return [Group(kind, counts[kind], _ask(places[kind], gpus[kind]), places[kind].strategy) for kind in RESERVED if counts[kind]]


def check_fits(asked: Sequence[Group], nodes: Sequence[Node]) -> None:
    """Raise LaunchError if no moment of this cluster has room: a worker larger than any node, or more in all than there is."""
    totals = _sum(_all(group) for group in asked)
    there = _sum(node.total for node in nodes)
    too_much = {name: amount for name, amount in totals.items() if amount > there.get(name, 0.0) + 1e-6}
    if too_much:
        raise no_room(asked, nodes, f"{said({name: there.get(name, 0.0) for name in too_much})} in all")
    for group in asked:
        together = _all(group) if group.strategy == "STRICT_PACK" else group.ask
        if not any(all(node.total.get(name, 0.0) + 1e-6 >= amount for name, amount in together.items()) for node in nodes):
            raise no_room(asked, nodes, f"no node with {said(together)}")
        if group.strategy == "STRICT_SPREAD" and group.count > len(nodes):
            raise no_room(asked, nodes, f"{len(nodes)} nodes for {group.count} workers of kind {group.kind} with STRICT_SPREAD")


def no_room(asked: Sequence[Group], nodes: Sequence[Node], why: str) -> LaunchError:
    """What was asked, what there is, and what to do."""
    wanted = "; ".join(f"{group.count} {group.kind}{'s' if group.count > 1 else ''} with {said(group.ask)} each" for group in asked)
    nodes_have = "; ".join(f"{node.host}: {said(node.total)}" for node in nodes) or "no node is alive"
    return LaunchError(
        f"the run does not fit the Ray cluster: it asks for {wanted}; there is {why} ({nodes_have})",
        hint="lower engine.workers or trainer.ranks, share GPUs with fractions in ray.trainer.gpus and ray.engine.gpus, lower ray.*.cpus, "
        "or end what else runs on the cluster",
    )


def fitted(config: Config, hosts: Mapping[str, str], *, home: str, others: Sequence[str]) -> Config:
    """The configuration for workers that have been placed.

    Weights go over the bus where an engine shares no host with the trainer, or ranks that publish a part each share none with each other.

    Args:
        config: as written.
        hosts: host of each reserved worker, by its name.
        home: host of `streamrl up`, where an embedded bus is.
        others: hosts that producers may be on.

    Raises:
        LaunchError: somebody on another host could not reach the bus, or an engine.
    """
    away = sorted({host for host in (*hosts.values(), *others) if host != home})
    listens_here = not config.bus.url and is_loopback(config.bus.host)
    if away and (listens_here or (config.bus.url and all(is_loopback(host) for _, host in servers(config.bus.url)))):
        where = f"bus.url is {config.bus.url}" if config.bus.url else f"bus.host is {config.bus.host}"
        raise LaunchError(
            f"workers on {', '.join(away)} cannot reach the bus on {home}: {where}, which never leaves that machine",
            hint="set bus.host = '0.0.0.0' (it speaks TLS then), or name a cluster that all reach in bus.url",
            home=home,
            away=away,
        )
    engines = {host for name, host in hosts.items() if name.startswith("engine-")}
    apart = sorted({host for host in engines for other in others if host != other})
    if apart and is_loopback(config.engine.host):
        raise LaunchError(
            f"producers on {', '.join(others)} cannot reach engines on {', '.join(apart)}: engine.host is {config.engine.host}",
            hint="set engine.host = '0.0.0.0'; requests carry the run's token, in plain text",
            producers=others,
            engines=apart,
        )
    first = hosts.get("trainer-0", home)
    apart_from_first = any(hosts.get(f"trainer-{rank}", first) != first for rank in range(1, mesh_of(config.trainer).shard))
    reached = not engines - {first} or config.weights.also_on_bus
    if config.weights.transport == "bus" or (reached and not apart_from_first):
        return config
    return replace(config, weights=replace(config.weights, transport="bus"))


def places_of_ranks(nodes: Mapping[int, str]) -> list[int]:
    """Which place each worker of a kind takes: those of one node are neighbours, and the node that has the most comes first.

    Neighbours hold a model that is cut together, and the first of them publish it: what they send each other then stays on a node.

    Args:
        nodes: of each place, by its index from 0.
    """
    count = Counter(nodes[place] for place in sorted(nodes))
    order = [node for node, _ in count.most_common()]
    return sorted(nodes, key=lambda place: (order.index(nodes[place]), place))


def _trainer_gpus(config: Config, there: float) -> float:
    trains_on_gpu = not config.trainer.tabular and (config.trainer.device == "cuda" or (config.trainer.device == "auto" and there > 0))
    return 1.0 if trains_on_gpu else 0.0


def _engine_gpus(config: Config, there: float) -> float:
    if config.engine.traits.gpus == "own":
        return 0.0 if config.engine.sglang.flags.get("device") == "cpu" else float(config.engine.sglang.tensor_parallel)
    return 1.0 if config.engine.traits.gpus == "shared" and there > 0 else 0.0


def _shares(gpus: Mapping[str, float], engines: int, there: int) -> dict[str, float]:
    """GPUs of the rank and of each engine where there are too few: a fraction is of one GPU, so equal parts of all may not fit."""
    own = int(gpus["trainer"]) if there > 1 else 0
    sharing = engines + (int(gpus["trainer"]) - own)
    share = int(100 / math.ceil(sharing / (there - own))) / 100
    return {"trainer": float(own) or min(gpus["trainer"], share), "engine": min(gpus["engine"], share)}


def _ask(place: PlaceConfig, gpus: float) -> dict[str, float]:
    asked = {"CPU": place.cpus, "GPU": gpus, **place.resources}
    return {name: amount for name, amount in asked.items() if amount > 0}


def _all(group: Group) -> dict[str, float]:
    return {name: amount * group.count for name, amount in group.ask.items()}


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def said(amounts: Mapping[str, float]) -> str:
    """Amounts of resources in words, without those that Ray adds by itself."""
    shown = {name: amount for name, amount in amounts.items() if "memory" not in name and not name.startswith("node:")}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
