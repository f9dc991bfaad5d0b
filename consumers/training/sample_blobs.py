"""What samples keep beside them, fetched ahead of the training thread.

That is the experts that their tokens went to (R3, arXiv 2510.11370), what else could have been drawn there, and the images of their
task's row, which are checked and let go: nothing is trained on them.

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
from streamrl.config.recording import NOTHING, Recording, recording_of
from streamrl.config.tree import Config
from streamrl.data.vocabulary import vocab_size
from streamrl.engines.experts import Routing, read_routing
from streamrl.errors import BusError, BusUnavailable, ConfigError, Forbidden, SchemaError
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.candidates import Candidates, CandidateSets, candidates_problem, joined, no_candidates
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import IMAGES
from streamrl.schemas.experts import RoutedExperts
from streamrl.schemas.images import Image, StoredImages, image_of, window_named
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import LogprobMode

NAME = re.compile(r"[0-9]{1,18}/[0-9]{1,9}\.[0-9a-f]{8}")
"""Of a rollout's blob: task, rollout, and what tells one attempt from another. Images: `streamrl.schemas.images`."""
OF_ROLLOUTS = ("routed_experts", "candidates")
"""Columns of such."""
_AT_ONCE = 4


def refs(samples: SampleBatch, column: str = "routed_experts") -> Iterator[tuple[int, BlobRef]]:
    """Row and slice of each sample of a message that has something in this column: where its tokens went, or `images`."""
    for row, said in enumerate(samples.optional(column) or ()):
        if said is not None:
            yield row, BlobRef(**said)


def blobs_named(samples: SampleBatch, *, images: bool = True) -> set[str]:
    """Names of a message's blobs, with `images` those of images too; what could not be one is left out."""
    found = {ref.name for column in OF_ROLLOUTS for _, ref in refs(samples, column) if NAME.fullmatch(ref.name)}
    return found | ({ref.name for _, ref in refs(samples, "images") if window_named(ref.name)} if images else set())


class Replayed(msgspec.Struct, frozen=True):
    """What a trainer takes from what the engines have recorded beside tokens."""

    routing: Routing | None = None
    """Of the policy; None: its routers choose."""
    recording: Recording = NOTHING
    vocab_size: int = 0
    """Of the policy; 0: not known."""

    @property
    def anything(self) -> bool:
        """Whether there is anything to take."""
        return self.routing is not None or self.recording.anything


NOTHING_REPLAYED = Replayed()


def replayed(config: Config, model_dir: Path) -> Replayed:
    """By a run's policy. Raises ConfigError for experts of a dense model."""
    recording = recording_of(config)
    if not config.trainer.routing_replay:
        return Replayed(recording=recording, vocab_size=vocab_size(model_dir))
    if (routing := read_routing(model_dir)) is not None:
        return Replayed(routing, recording, vocab_size(model_dir))
    raise ConfigError(
        f"trainer.routing_replay is for a mixture of experts, but {model_dir} holds none",
        hint="leave it out",
        key="trainer.routing_replay",
    )


def sample_blobs(
    log: Log, loop: asyncio.AbstractEventLoop, replayed: Replayed, config: Config, *, images: bool = False
) -> SampleBlobs | None:
    """Those of a run, with `images` also what is not trained on; None where nothing is looked at."""
    ahead = 2 * config.tasks.batch_tasks * config.group_size
    return SampleBlobs(log.sample_blobs, loop, replayed, ahead=ahead, images=images) if replayed.anything or images else None


class Loaded(msgspec.Struct, frozen=True):
    """A blob, or why it cannot be used."""

    experts: Any = None
    """[rows, layers, k]."""
    candidates: CandidateSets | None = None
    images: tuple[Image, ...] = ()
    """What there is of images, in order."""
    sha256: str = ""
    problem: str = ""


class SampleBlobs:
    """Blobs of the samples that are held. All methods but the fetching are called from the training thread.

    Args:
        blobs: where they are.
        loop: of that bus.
        replayed: what is trained with.
        ahead: fetched before somebody asks for them, at most.
        images: whether they are looked at too.
    """

    def __init__(self, blobs: BlobReader, loop: asyncio.AbstractEventLoop, replayed: Replayed, *, ahead: int, images: bool = False) -> None:
        self._blobs = blobs
        self._loop = loop
        self._replayed = replayed
        self._routing = replayed.routing
        self._wanted = tuple(name for name, used in zip(OF_ROLLOUTS, (replayed.routing, replayed.recording.anything), strict=True) if used)
        self._ahead = ahead
        self._images = images
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._loading: dict[tuple[str, str], Future[Loaded]] = {}
        """By column and name."""

    def want(self, samples: SampleBatch, *, now: bool = False, again: bool = False) -> None:
        """Begin to fetch a message's blobs, unless many are there already and they are not asked for `now`; `again` as in `problems`."""
        for named in self._named(samples, images=self._images and not again):
            if now or len(self._loading) < self._ahead:
                self._load(*named)

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
        for column in self._wanted:
            for row, ref in refs(samples, column):
                if problem := self._problem(samples, row, ref, column):
                    sample = int(samples.ints("sample")[row])
                    found.setdefault(int(samples.rollouts[row]), f"{column.replace('_', ' ')} of sample {sample}: {problem}")
        if self._images and not again:
            said = [samples.optional(f"image_{name}") or [None] * samples.num_rows for name in IMAGES]
            for row, ref in refs(samples, "images"):
                stated = tuple(map(Image, *(column[row] or () for column in said)))
                if problem := self._image_problem(ref, samples.task, stated):
                    found.setdefault(int(samples.rollouts[row]), f"images of sample {int(samples.ints('sample')[row])}: {problem}")
        return found

    def routed(self, samples: SampleBatch) -> npt.NDArray[np.int16]:
        """[T, layers, k] of a message's tokens, -1 where nothing is known: also where a blob cannot be used."""
        routing = self._routing
        assert routing is not None
        found = np.full((len(samples.tokens), routing.layers, routing.per_token), -1, np.int16)
        for row, ref in refs(samples):
            first = int(samples.offsets[row])
            if not self._problem(samples, row, ref, "routed_experts"):
                rows = self._load("routed_experts", ref.name).result().experts[ref.start_row : ref.start_row + ref.num_rows]
                found[first : first + ref.num_rows] = rows
        return found

    def candidates(self, samples: SampleBatch) -> CandidateSets:
        """Of a message's tokens, as far as they are asked for: none where nothing is known, also where a blob cannot be used."""
        said = {row: ref for row, ref in refs(samples, "candidates") if not self._problem(samples, row, ref, "candidates")}
        parts = [self._sets(said[row]) if row in said else no_candidates(tokens) for row, tokens in enumerate(samples.lengths.tolist())]
        cut, recording = _restricted(samples), self._replayed.recording
        return joined(parts).without((cut & (not recording.support)) | (~cut & (not recording.top)))

    @property
    def takes(self) -> dict[str, Callable[[SampleBatch], Any]]:
        """What `streamrl.core.assembly.assemble` is given by the names of its arguments."""
        made = {"routed_experts": ("routed", self.routed), "candidates": ("candidates", self.candidates)}
        return dict(made[column] for column in self._wanted)

    def keep(self, held: Iterable[SampleBatch]) -> None:
        """Let go of all blobs but those of these messages."""
        kept = {named for samples in held for named in self._named(samples, images=self._images)}
        for named in [named for named in self._loading if named not in kept]:
            self._loading.pop(named).cancel()

    def _named(self, samples: SampleBatch, *, images: bool) -> set[tuple[str, str]]:
        """Column and name of what is looked at."""
        found = {(column, ref.name) for column in self._wanted for _, ref in refs(samples, column) if NAME.fullmatch(ref.name)}
        return found | ({("images", ref.name) for _, ref in refs(samples, "images") if window_named(ref.name)} if images else set())

    def _image_problem(self, ref: BlobRef, task: int, stated: tuple[Image, ...]) -> str:
        window = window_named(ref.name)
        if window is None or not window[0] <= task <= window[1]:
            return f"expected the name of a blob of task {task}, like {task}-{task}/ and a SHA-256, got {ref.name[:80]!r}"
        loaded = self._load("images", ref.name).result()
        if loaded.problem:
            return loaded.problem
        if not loaded.sha256 == ref.sha256 == ref.name[-64:]:
            return f"expected a blob with SHA-256 {ref.sha256[:16]} as it is called, got {loaded.sha256[:16]}"
        if (there := loaded.images[ref.start_row : ref.start_row + ref.num_rows]) != stated:
            return f"expected {_shown(stated)}, got {_shown(there)}"
        return ""

    def _problem(self, samples: SampleBatch, row: int, ref: BlobRef, column: str) -> str:
        if not NAME.fullmatch(ref.name):
            return f"expected a name like 41/0.1f3a9c2e, got {ref.name[:80]!r}"
        loaded = self._load(column, ref.name).result()
        if loaded.problem:
            return loaded.problem
        if loaded.sha256 != ref.sha256:
            return f"expected a blob with SHA-256 {ref.sha256[:16]}, got {loaded.sha256[:16]}"
        tokens = slice(*samples.offsets[row : row + 2].tolist())
        rows = len(loaded.experts) if loaded.candidates is None else loaded.candidates.num_tokens
        if ref.num_rows > (num_tokens := tokens.stop - tokens.start) or ref.start_row + ref.num_rows > rows:
            return f"expected at most {num_tokens} rows of {rows}, got {ref.num_rows} from {ref.start_row} on"
        if loaded.candidates is None:
            return ""
        drawn = samples.tokens[tokens], samples.logprobs[tokens], _restricted(samples)[tokens]
        likely = self._replayed.recording.logprobs
        return candidates_problem(self._sets(ref), *drawn, vocab_size=self._replayed.vocab_size, likely=likely)

    def _sets(self, ref: BlobRef) -> CandidateSets:
        sets = self._load("candidates", ref.name).result().candidates
        assert sets is not None
        return sets.at(np.arange(ref.start_row, ref.start_row + ref.num_rows))

    def _load(self, column: str, name: str) -> Future[Loaded]:
        named = column, name
        if named not in self._loading:
            self._loading[named] = asyncio.run_coroutine_threadsafe(self._fetch(column, name), self._loop)
        return self._loading[named]

    async def _fetch(self, column: str, name: str) -> Loaded:
        async with self._gate:
            try:
                body = await self._blobs.get(name)
                return await asyncio.to_thread(self._open, column, name, body)
            except (BusUnavailable, Forbidden):  # of this trainer, not of the blob
                raise
            except (BusError, SchemaError) as error:
                return Loaded(problem=error.message)

    def _open(self, column: str, name: str, body: bytes) -> Loaded:
        if column == "candidates":
            sets = decode(body, Candidates, where=f"blob {name}").sets()
            return Loaded(candidates=sets, sha256=hashlib.sha256(body).hexdigest())
        if column == "images":
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


def _restricted(samples: SampleBatch) -> npt.NDArray[np.bool_]:
    """[T] which tokens of a message top-p, top-k or min-p cut something off for, with log-probs from behind that."""
    cut = (samples.drawn_at("top_p") < 1) | (samples.drawn_at("top_k") > 0) | (samples.drawn_at("min_p") > 0)
    return cut & np.repeat(np.array(samples.texts("logprob_mode")) == LogprobMode.SAMPLED, samples.lengths)


def _shown(images: tuple[Image, ...]) -> str:
    return ", ".join(f"{one.media_type} of {one.num_bytes} bytes, {one.sha256[:8]}" for one in images[:4]) or "no images"
