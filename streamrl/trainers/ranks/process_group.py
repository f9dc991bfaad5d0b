"""The ranks of one trainer: how they meet, and how they hear what to do.

Rank 0 listens on a free port (`Rendezvous`) and has the address told to the others, who `join`. What it then orders is signed in with a key
of the store, on which a rank may wait for hours, and carried by a broadcast. Whoever dies takes his connections along: a wait or a
collective of the others fails at once, or within the timeout where a host has vanished.

A meeting has a generation, a random word. A rank that comes to an address of an earlier one finds nobody, another generation, or its own
place taken, and looks for the address again: ranks of a dead group never meet the living.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamrl.errors import TrainingError
from streamrl.tensors.collectives import HINT, among_ranks

_POLL_S = 0.05
_CONNECT_S = 2.0
_SIOCGIFADDR = 0x8915
_SIGN = 1 << 63


_meshes: list[DeviceMesh] = []
"""Of this process's default group."""


def make_device_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks: torch's mesh over the default group."""
    with among_ranks("the mesh"):
        _meshes.append(init_device_mesh(device, shape, mesh_dim_names=names))
    return _meshes[-1]


def leave() -> None:
    """Leave the default group and end its threads, as far as nobody holds a model that was cut over it.

    Torch remembers for good how tensors of a mesh were handed about, and with it the mesh, and a mesh holds its groups: their threads would
    live until the interpreter is torn down, where a process is aborted now and then ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    for mesh in _meshes:
        mesh._pg_registry.clear()  # pyright: ignore[reportPrivateUsage]
    _meshes.clear()
    gc.collect()  # a model that is cut is a cycle


class RendezvousAddress(msgspec.Struct, frozen=True):
    """Where rank 0 waits for the others."""

    host: str
    port: int
    generation: str


class ProcessGroup:
    """This process's membership of torch.distributed's default group, whose ranks are one trainer. Not thread-safe: one thread calls it."""

    def __init__(self, store: Store, *, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._orders = 0

    def order(self, body: bytes) -> None:
        """Rank 0: have all others execute `body`; returns when it is on its way."""
        self._announce(len(body))
        self.send(body)

    def dismiss(self) -> None:
        """Rank 0: let the others end. No collective: it does no harm where some have ended already."""
        with contextlib.suppress(RuntimeError):
            self._announce(0)

    def next_order(self) -> bytes | None:
        """Other ranks: wait for the next order, however long that takes; None when rank 0 dismisses them. Raises TrainingError."""
        self._orders += 1
        key = f"order/{self._orders}"
        with among_ranks("the next order"):
            while True:
                try:
                    self._store.wait([key], self._timeout)
                    break
                except dist.DistStoreError:
                    continue
            nbytes = int(self._store.get(key))
        return self.receive(nbytes) if nbytes else None

    def send(self, body: bytes | memoryview) -> None:
        """Rank 0: hand `body` to all others, who call `receive` with its length."""
        with among_ranks("a broadcast"):
            dist.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), src=0)

    def receive(self, nbytes: int) -> bytes:
        """Other ranks: what rank 0 sends."""
        found = torch.empty(nbytes, dtype=torch.uint8)
        with among_ranks("a broadcast"):
            dist.broadcast(found, src=0)
        return found.numpy().tobytes()

    def gather(self, value: int) -> list[int]:
        """All ranks: an unsigned 64-bit number of each rank, by rank; returns when all have called it."""
        own = torch.tensor([value - 2 * _SIGN if value >= _SIGN else value], dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        with among_ranks("an agreement"):
            dist.all_gather(found, own)
        return [int(one) % (2 * _SIGN) for one in found]

    def done(self) -> None:
        """Rank 0, once all others have heard the last order: forget it."""
        self._store.delete_key(f"order/{self._orders}")

    def close(self) -> None:
        """Leave the process group; safe to call twice. What was made of it must not be held any more, see `leave`."""
        leave()

    def _announce(self, nbytes: int) -> None:
        self._orders += 1
        with among_ranks("an order"):
            self._store.set(f"order/{self._orders}", str(nbytes))


class Rendezvous:
    """Rank 0's side: open from the constructor on.

    Args:
        host: this machine's address, at which the others reach it; nothing listens on any other.
        ranks: how many there are, this one included.
        timeout_s: how long a rank waits for another in a collective.

    Raises:
        TrainingError: `host` is no address of this machine.
    """

    def __init__(self, host: str, *, ranks: int, timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        listener = _listener(host)
        port = int(listener.getsockname()[1])
        # The store owns the descriptor from here on.
        self._store = TCPStore(
            host, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.place = RendezvousAddress(host, port, secrets.token_hex(8))
        self._store.set("generation", self.place.generation)

    def missing(self) -> list[int]:
        """Ranks that are not here yet."""
        return [rank for rank in range(1, self._ranks) if not self._store.check([f"joined/{rank}"])]

    def begin(self, *, cuda: bool) -> ProcessGroup:
        """Form the group, once nobody is missing; raises TrainingError when that fails."""
        self._store.set("go", "1")
        return _form(self._store, self.place, rank=0, ranks=self._ranks, cuda=cuda, timeout_s=self._timeout_s)


def join(
    place: RendezvousAddress, *, rank: int, ranks: int, cuda: bool, timeout_s: float, stop: Callable[[], bool] = lambda: False
) -> ProcessGroup | None:
    """Another rank's side: join the meeting at `place`.

    Returns:
        None: this meeting is not ours (nobody is there, or another generation, or this rank has come already), or `stop` became true.

    Raises:
        TrainingError: it ended before the group was formed.
    """
    try:
        # Asked first: a store's client says much and waits long where nobody listens.
        socket.create_connection((place.host, place.port), timeout=_CONNECT_S).close()
        store = TCPStore(place.host, place.port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        if not store.check(["generation"]) or store.get("generation").decode() != place.generation or store.add(f"joined/{rank}", 1) != 1:
            return None
        store.set_timeout(timedelta(seconds=timeout_s))
    except (OSError, RuntimeError):
        return None
    with among_ranks("the meeting of the ranks"):
        while not store.check(["go"]):
            if stop():
                return None
            time.sleep(_POLL_S)
    return _form(store, place, rank=rank, ranks=ranks, cuda=cuda, timeout_s=timeout_s)


def _form(store: TCPStore, place: RendezvousAddress, *, rank: int, ranks: int, cuda: bool, timeout_s: float) -> ProcessGroup:
    if dist.is_initialized():
        raise TrainingError("expected a process that belongs to no process group yet, got one that does", hint=HINT)
    here = place.host if rank == 0 else _address_towards(place)
    with _on_interface(_interface(here)), among_ranks("the process group"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore(place.generation, store),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    return ProcessGroup(store, rank=rank, ranks=ranks, timeout_s=timeout_s)


def _listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise TrainingError(
            f"rank 0 of the trainer cannot listen on {host!r}: {error.strerror}",
            hint="is it an address of this machine? see `ip address`",
            host=host,
        ) from error
    return listener


def _address_towards(place: RendezvousAddress) -> str:
    with socket.create_connection((place.host, place.port), timeout=_CONNECT_S) as probe:
        return str(probe.getsockname()[0])


def _interface(address: str) -> str:
    """The network interface that has an IPv4 address; empty if it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address or (address.startswith("127.") and name == "lo"):
                    return name
    return ""


@contextmanager
def _on_interface(name: str) -> Generator[None]:
    """Have gloo and NCCL talk over `name`, unless the user has chosen: gloo would take the one that this host's name resolves to."""
    if name:
        # Stays set: NCCL looks when it first sends something.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    ours = bool(name) and "GLOO_SOCKET_IFNAME" not in os.environ
    if ours:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if ours:
            del os.environ["GLOO_SOCKET_IFNAME"]
