"""What samples keep beside them, fetched ahead of the training thread.

That is the experts that their tokens went to (R3, arXiv 2510.11370), and the images of their task's row, which are checked and let go:
nothing is trained on them.

A producer stores a rollout's blob before its samples, a feeder the images before their task, so one that is not there was lost, or never
was. Nothing is decided here: the live trainer puts what cannot be used onto the stream, and the fold goes by that
(`streamrl.core.fold.BLOB_MISSING`).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.bus.protocol import BlobReader, Log
from streamrl.config.tree import Config
from streamrl.engines.experts import Routing, read_routing
from streamrl.errors import BusError, BusUnavailable, ConfigError, Forbidden, SchemaError
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import IMAGES
from streamrl.schemas.experts import RoutedExperts
from streamrl.schemas.images import Image, StoredImages, image_of, window_named
from streamrl.schemas.sample_batch import SampleBatch

NAME = re.compile(r"[0-9]{1,18}/[0-9]{1,9}\.[0-9a-f]{8}")
"""Of a rollout's blob: task, rollout, and what tells one attempt from another. Images: `streamrl.schemas.images`."""
_AT_ONCE = 4


def refs(samples: SampleBatch, column: str = "routed_experts") -> Iterator[tuple[int, BlobRef]]:
    """Row and slice of each sample of a message that has something in this column: where its tokens went, or `images`."""
    for row, said in enumerate(samples.optional(column) or ()):
        if said is not None:
            yield row, BlobRef(**said)


def blobs_named(samples: SampleBatch, *, images: bool = True) -> set[str]:
    """Names of a message's blobs, with `images` those of images too; what could not be one is left out."""
    found = {ref.name for _, ref in refs(samples) if NAME.fullmatch(ref.name)}
    return found | ({ref.name for _, ref in refs(samples, "images") if window_named(ref.name)} if images else set())


def replayed_routing(config: Config, model_dir: Path) -> Routing | None:
    """Of the policy; None where nothing is replayed. Raises ConfigError for a dense model."""
    if not config.trainer.routing_replay:
        return None
    if (routing := read_routing(model_dir)) is not None:
        return routing
    raise ConfigError(
        f"trainer.routing_replay is for a mixture of experts, but {model_dir} holds none",
        hint="leave it out",
        key="trainer.routing_replay",
    )


def sample_blobs(
    log: Log, loop: asyncio.AbstractEventLoop, routing: Routing | None, config: Config, *, images: bool = False
) -> SampleBlobs | None:
    """Those of a run, with `images` also what is not trained on; None where nothing is looked at."""
    ahead = 2 * config.tasks.batch_tasks * config.group_size
    return SampleBlobs(log.sample_blobs, loop, routing, ahead=ahead, images=images) if routing or images else None


class Loaded(msgspec.Struct, frozen=True):
    """A blob, or why it cannot be used."""

    experts: Any = None
    """[rows, layers, k]."""
    images: tuple[Image, ...] = ()
    """What there is of images, in order."""
    sha256: str = ""
    problem: str = ""


class SampleBlobs:
    """Blobs of the samples that are held. All methods but the fetching are called from the training thread.

    Args:
        blobs: where they are.
        loop: of that bus.
        routing: of the policy; None: nothing is replayed.
        ahead: fetched before somebody asks for them, at most.
        images: whether they are looked at too.
    """

    def __init__(
        self, blobs: BlobReader, loop: asyncio.AbstractEventLoop, routing: Routing | None, *, ahead: int, images: bool = False
    ) -> None:
        self._blobs = blobs
        self._loop = loop
        self._routing = routing
        self._ahead = ahead
        self._images = images
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._loading: dict[str, Future[Loaded]] = {}

    def want(self, samples: SampleBatch, *, now: bool = False, again: bool = False) -> None:
        """Begin to fetch a message's blobs, unless many are there already and they are not asked for `now`; `again` as in `problems`."""
        for name in blobs_named(samples, images=self._images and not again):
            if now or len(self._loading) < self._ahead:
                self._load(name)

    def problems(self, samples: SampleBatch, *, again: bool = False) -> dict[int, str]:
        """Rollouts of a message whose blobs cannot be used, and why; waits for them.

        Args:
            samples: the message.
            again: what was trained before is trained again, which takes no images.

        Raises:
            BusUnavailable: the bus stayed away.
            Forbidden: the trainer's login may not read blobs of samples.
        """
        found: dict[int, str] = {}
        for row, ref in refs(samples) if self._routing is not None else ():
            if problem := self._problem(ref, int(np.diff(samples.offsets)[row])):
                found.setdefault(int(samples.rollouts[row]), f"routed experts of sample {int(samples.ints('sample')[row])}: {problem}")
        if self._images and not again:
            said = [samples.optional(f"image_{name}") or [None] * samples.num_rows for name in IMAGES]
            for row, ref in refs(samples, "images"):
                stated = tuple(map(Image, *(column[row] or () for column in said)))
                if problem := self._image_problem(ref, samples.task, stated):
                    found.setdefault(int(samples.rollouts[row]), f"images of sample {int(samples.ints('sample')[row])}: {problem}")
        return found

    @property
    def replayed(self) -> Callable[[SampleBatch], npt.NDArray[np.int16]] | None:
        """`routed`; None where nothing is replayed."""
        return None if self._routing is None else self.routed

    def routed(self, samples: SampleBatch) -> npt.NDArray[np.int16]:
        """[T, layers, k] of a message's tokens, -1 where nothing is known: also where a blob cannot be used."""
        routing = self._routing
        assert routing is not None
        found = np.full((len(samples.tokens), routing.layers, routing.per_token), -1, np.int16)
        for row, ref in refs(samples):
            first, end = samples.offsets[row : row + 2].tolist()
            if not self._problem(ref, end - first):
                found[first : first + ref.num_rows] = self._load(ref.name).result().experts[ref.start_row : ref.start_row + ref.num_rows]
        return found

    def keep(self, held: Iterable[SampleBatch]) -> None:
        """Let go of all blobs but those of these messages."""
        kept = {name for samples in held for name in blobs_named(samples, images=self._images)}
        for name in [name for name in self._loading if name not in kept]:
            self._loading.pop(name).cancel()

    def _image_problem(self, ref: BlobRef, task: int, stated: tuple[Image, ...]) -> str:
        window = window_named(ref.name)
        if window is None or not window[0] <= task <= window[1]:
            return f"expected the name of a blob of task {task}, like {task}-{task}/ and a SHA-256, got {ref.name[:80]!r}"
        loaded = self._load(ref.name).result()
        if loaded.problem:
            return loaded.problem
        if not loaded.sha256 == ref.sha256 == ref.name[-64:]:
            return f"expected a blob with SHA-256 {ref.sha256[:16]} as it is called, got {loaded.sha256[:16]}"
        if (there := loaded.images[ref.start_row : ref.start_row + ref.num_rows]) != stated:
            return f"expected {_shown(stated)}, got {_shown(there)}"
        return ""

    def _problem(self, ref: BlobRef, num_tokens: int) -> str:
        if not NAME.fullmatch(ref.name):
            return f"expected a name like 41/0.1f3a9c2e, got {ref.name[:80]!r}"
        loaded = self._load(ref.name).result()
        if loaded.problem:
            return loaded.problem
        if loaded.sha256 != ref.sha256:
            return f"expected a blob with SHA-256 {ref.sha256[:16]}, got {loaded.sha256[:16]}"
        if ref.num_rows > num_tokens or ref.start_row + ref.num_rows > len(loaded.experts):
            return f"expected at most {num_tokens} rows of {len(loaded.experts)}, got {ref.num_rows} from {ref.start_row} on"
        return ""

    def _load(self, name: str) -> Future[Loaded]:
        if name not in self._loading:
            self._loading[name] = asyncio.run_coroutine_threadsafe(self._fetch(name), self._loop)
        return self._loading[name]

    async def _fetch(self, name: str) -> Loaded:
        async with self._gate:
            try:
                body = await self._blobs.get(name)
                return await asyncio.to_thread(self._open, name, body)
            except (BusUnavailable, Forbidden):  # of this trainer, not of the blob
                raise
            except (BusError, SchemaError) as error:
                return Loaded(problem=error.message)

    def _open(self, name: str, body: bytes) -> Loaded:
        if window_named(name):
            found = tuple(map(image_of, decode(body, StoredImages, where=f"blob {name}").images))
            return Loaded(images=found, sha256=hashlib.sha256(body).hexdigest())
        experts = decode(body, RoutedExperts, where=f"blob {name}").array()
        routing = self._routing
        assert routing is not None
        if experts.shape[1:] != (routing.layers, routing.per_token) or (experts.size and int(experts.max()) >= routing.experts):
            raise SchemaError(
                f"expected experts [tokens, {routing.layers}, {routing.per_token}] below {routing.experts} in blob {name}, "
                f"got {list(experts.shape)} up to {int(experts.max(initial=0))}"
            )
        return Loaded(experts, sha256=hashlib.sha256(body).hexdigest())


def _shown(images: tuple[Image, ...]) -> str:
    return ", ".join(f"{one.media_type} of {one.num_bytes} bytes, {one.sha256[:8]}" for one in images[:4]) or "no images"
