"""A hook called once or twice with a made-up task, in the way that a run calls it: `streamrl check-hook`.

The task is `1+1=` with the label `2` and four rollouts; its engine answers with the label, and with `3` at every second request.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from streamrl.bridges.slime.contracts import Asked
from streamrl.bridges.slime.flags import run_flags
from streamrl.bridges.slime.hooks import adapted
from streamrl.bridges.slime.rollout_function import RolloutFunction
from streamrl.bridges.slime.section import BESIDE_FILTER, DEFAULT_GENERATE, GROUP, KEEP_ALL, OPTION, REWARDS, ROLLOUT, SLIME
from streamrl.config.loss import CorrectionConfig, LossConfig
from streamrl.config.tree import Config
from streamrl.core.batches import TrainBatch
from streamrl.data.characters import write_tokenizer
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.errors import ConfigError
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.filtering import verdicts
from streamrl.producers.protocol import Context, Failure
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.rewards.functions import as_value
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version

_ROLLOUTS = 4
_LOSS = LossConfig(correction=CorrectionConfig(kind="none"))


class Answering:
    """An engine without a model, for these trials alone: it answers by the text.

    Args:
        tokenizer: of the texts.
        texts: answers, in turn.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._num_asked = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """One chunk for each seed."""
        for place in range(len(request.seeds)):
            ids = (*self._tokenizer.encode(self._texts[self._num_asked % len(self._texts)]), *self._tokenizer.stop_ids)
            self._num_asked += 1
            ids = ids[: request.sampling.max_new_tokens]
            ends = "stop" if ids[-1] in self._tokenizer.stop_ids else "length"
            spans = (VersionSpan(len(ids), Version(0, 7)),)
            yield Chunk(completion=place, token_ids=ids, logprobs=(-0.5,) * len(ids), spans=spans, finish_reason=ends, engine="trial")


class Trial:
    """What hooks are called with.

    Args:
        folder: for a tokenizer.
        asked: which hook, and what it is given.
    """

    def __init__(self, folder: Path, asked: Asked) -> None:
        write_tokenizer(folder)
        self._tokenizer = load_tokenizer(folder)
        self._flag, self._reference, self._options, self._group = asked.flag, asked.reference, asked.options, asked.group
        own = {"n_samples_per_prompt": _ROLLOUTS, "group_rm": asked.group, "reward_key": asked.reward_key or None}
        flag, reference = asked.flag, asked.reference
        beside: dict[str, Any] = {}
        if flag == "rollout_sample_hook_path":
            beside[flag] = [reference]
        elif flag in BESIDE_FILTER:
            beside[flag] = reference
        self._args = {OPTION: {**run_flags(Config(), folder), **own, **asked.args, **beside}}
        self._key = f"slime.{flag}"
        self._engine = cast(Any, Answering(self._tokenizer, ("2", "3")))
        prompt = "<|user|>1+1=<|end|><|assistant|>"
        self._task = RolloutTask(
            run="check",
            index=5,
            source="main",
            prompt_ids=tuple(self._tokenizer.encode(prompt)),
            prompt=[{"role": "user", "content": "1+1="}],
            label="2",
            metadata=asked.metadata,
            num_rollouts=_ROLLOUTS,
            sampling=Sampling(max_new_tokens=8),
        )

    async def run(self) -> list[str]:
        """What it gave, in lines; raises what is wrong with it."""
        match self._flag:
            case "custom_generate_function_path" | "rollout_sample_hook_path":
                return [line for rollout in range(2) for line in await self._generated(rollout)]
            case "rollout_function_path":
                return await self._rolled_out()
            case "custom_rm_path":
                return await self._scored()
            case "custom_reward_post_process_path" | "custom_advantage_function_path":
                return self._advantages()
            case "custom_tis_function_path":
                return self._corrected()
            case "custom_loss_function_path":
                return ["it was looked at and not called: it wants the logits of a model"]
            case _:
                return await self._filtered()

    def _context(self) -> Context:
        log = logging.getLogger(__name__)
        return Context(engine=self._engine, tokenizer=self._tokenizer, task=self._task, seed=1, options=self._args, log=log, max_len=256)

    async def _generated(self, rollout: int) -> list[str]:
        hooks = self._flag == "rollout_sample_hook_path"
        function = adapted(DEFAULT_GENERATE if hooks else SLIME + self._reference, key="producer.function")
        context = self._context().for_rollout(rollout)
        episodes: list[Episode] = await function(self._task, RolloutEngine(context, ChatFormat(self._tokenizer, chat_template=True)))
        return [f"rollout {rollout}: {_shown(one)}" for one in episodes] or [f"rollout {rollout}: no sample, so it ends as filtered"]

    async def _rolled_out(self) -> list[str]:
        function: RolloutFunction = adapted(ROLLOUT + self._reference, key="producer.function")
        given = await function.rollout(self._task, self._context())
        if bad := next((one for one in given if isinstance(one, Failure) and one.reason == "failed"), None):
            raise ConfigError(f"rollout {bad.rollout}: {bad.detail}", key=self._key)
        return [f"rollout {one.rollout}: {_shown(one) if isinstance(one, Episode) else one.detail}" for one in given]

    def _episodes(self, rewards: Sequence[float | None]) -> list[Episode]:
        found: list[Episode] = []
        for rollout, reward in enumerate(rewards):
            text = ("2", "3")[rollout % 2]
            ids = tuple(self._tokenizer.encode(text))
            answer = Segment(token_ids=ids, logprobs=(-0.5,) * len(ids), spans=(VersionSpan(len(ids), Version(0, 7)),))
            segments = (Segment(self._task.prompt_ids), answer)
            found.append(Episode(segments=segments, finish_reason="stop", turns=(text,), rollout=rollout, reward=reward))
        return found

    async def _scored(self) -> list[str]:
        made = adapted((GROUP if self._group else SLIME) + self._reference, key="reward.kind")
        episodes = self._episodes([None] * _ROLLOUTS)
        options = {**self._options, **self._args}
        if self._group:
            values = await made(**options).score(self._task, episodes)
        else:
            values = [await made(self._task, episode, **options) for episode in episodes]
        key = self._args[OPTION]["reward_key"]
        found = [as_value(one) for one in values]
        if missing := next((one for one in found if key and key not in one.parts), None):
            raise ConfigError(f"reward.key = {key!r}: a reward has the parts {', '.join(sorted(missing.parts)) or 'none'}", key=self._key)
        return [
            f"response {episode.completion!r}, label '2': {value.parts or value.value}"
            for episode, value in zip(episodes, found, strict=True)
        ]

    async def _filtered(self) -> list[str]:
        dynamic = self._flag == "dynamic_sampling_filter_path"
        keep = adapted(SLIME + self._reference if dynamic else KEEP_ALL, key="filters.function")
        lines: list[str] = []
        for rewards in ((1.0, 0.0, 1.0, 0.0), (0.0,) * _ROLLOUTS):
            said = verdicts(await asyncio.to_thread(keep, self._task, self._episodes(rewards), **self._args), _ROLLOUTS)
            kept = [str(rollout) for rollout, one in enumerate(said) if not one]
            why = next((one for one in said if one), "")
            lines.append(f"rewards {list(rewards)}: keeps rollouts {', '.join(kept) or 'none'}{f' ({why})' if why else ''}")
        return lines

    def _batch(self) -> TrainBatch:
        answers = [self._tokenizer.encode(text) for text in ("2", "31", "2", "3")]
        return TrainBatch.from_lists(
            [self._task.prompt_ids] * 4, answers, rewards=[1.0, 0.0, 1.0, 0.0], sampler_logprobs=[[-0.5] * len(ids) for ids in answers],
            tasks=[5, 5, 6, 6],
        )  # fmt: skip

    def _advantages(self) -> list[str]:
        from streamrl.algorithms.estimators import token_advantages

        prefix = REWARDS if self._flag == "custom_reward_post_process_path" else SLIME
        batch = self._batch()
        loss = LossConfig(advantage=prefix + self._reference, correction=_LOSS.correction)
        found = token_advantages(batch, loss, logprobs=batch.sampler_logprobs)
        return [f"rewards 1, 0, 1, 0 of two groups: advantages {found.advantages[batch.loss_mask].tolist()} of the trained tokens"]

    def _corrected(self) -> list[str]:
        if importlib.util.find_spec("torch") is None:
            raise ConfigError("expected torch, whose tensors this hook takes", hint="pip install 'streamrl[torch]'", key=self._key)
        import torch

        from streamrl.algorithms.policy import PolicyTokens
        from streamrl.algorithms.sequences import packed_sequences

        batch = self._batch()
        at = np.flatnonzero(batch.loss_mask)
        count = len(at)
        tokens = PolicyTokens(
            logprobs=torch.linspace(-0.9, -0.1, count, requires_grad=True),
            proximal=torch.linspace(-0.9, -0.1, count),
            sampler=torch.full((count,), -0.5),
            advantages=torch.ones(count),
            staleness=torch.zeros(count, dtype=torch.int64),
            sequences=packed_sequences(batch, at),
        )
        from streamrl.trainers.torch.terms import UserLoss

        loss, metrics = UserLoss(SLIME + self._reference)(tokens, _LOSS)
        shown = [round(value, 4) for value in loss.tolist()]
        if not all(map(math.isfinite, shown)):
            raise ConfigError(f"expected a finite loss of each token, got {shown}", key=self._key)
        return [f"losses of {count} tokens: {shown}", f"metrics: {', '.join(metrics) or 'none'}"]


def _shown(one: Episode) -> str:
    trained = sum(one.num_sampled)
    reward = "" if one.reward is None else f", reward {one.reward}"
    return f"{one.completion!r}, {one.num_tokens} tokens, {trained} trained, {one.status}{reward}"


def run_trial(asked: Asked) -> list[str]:
    """What a hook gave in its trial; raises ConfigError for its form, and whatever it raises itself."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(Trial(Path(folder), asked).run())
