"""What a custom producer writes against: `engine.chat(task)`, `chat.generate()`, `chat.tool(text)`, `chat.episode()`.

```python
async def calculator(task, engine):
    chat = engine.chat(task)                        # the prompt's tokens
    turn = await chat.generate()                    # the model's tokens, as the engine gave them
    while (call := find_call(turn.text)):
        chat.tool(str(calculate(call)))             # the environment's tokens: masked
        turn = await chat.generate()
    return chat.episode()                           # scored by the run's reward, or chat.episode(reward=1.0)
```

A long episode outlives its producer with `await chat.save()` right after a turn: when the process dies and another takes the task over,
`engine.chat(task)` gives the chat as it was saved, and the function goes on from there:

```python
    chat = engine.chat(task)
    turn = chat.turns[-1] if chat.turns else await chat.generate()
```
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from streamrl.core.seeds import rollout_seed
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import EngineError, SchemaError
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.chat_saves import ChatSaves, SavedChat, Turn
from streamrl.producers.completions import complete
from streamrl.producers.episode import STATUS, Episode, Segment, bare
from streamrl.producers.protocol import Context
from streamrl.schemas.samples import LogprobMode, Status, is_turn_temperature
from streamrl.schemas.tasks import RolloutTask, Sampling, turn_sampling

_CHATS = 1 << 20
"""Chats and turns below this number have seeds of their own."""


class RolloutEngine:
    """The engine as one rollout sees it. Not shared between rollouts."""

    def __init__(self, context: Context, format: ChatFormat) -> None:
        self.context = context
        """Everything else: seed, options, rollout_index, the raw engine (`context.engine.generate`)."""
        self._format = format
        self._num_chats = 0
        self._saves = ChatSaves(context)

    @property
    def options(self) -> Mapping[str, Any]:
        """`producer.options` of the configuration."""
        return self.context.options

    @property
    def log(self) -> logging.Logger | logging.LoggerAdapter[Any]:
        """Logs with the task's index and the rollout's."""
        return self.context.log

    def chat(self, prompt: RolloutTask | str | Sequence[Any], *, sampling: Sampling | None = None) -> Chat:
        """Begin a token sequence, or go on with the one that was saved in its place when an earlier producer of the task died.

        Chats are told apart by their order within the rollout, and by their prompt.

        Args:
            prompt: the task (its prompt's tokens); or a text, chat messages or token ids, for a sub-agent of this rollout.
            sampling: how this chat's tokens are drawn; None: as the task says.

        Raises:
            SchemaError: an empty prompt.
        """
        number, self._num_chats = self._num_chats, self._num_chats + 1
        prompt_ids = tuple(self._prompt_ids(prompt))
        return Chat(self.context, self._format, prompt_ids, sampling or self.context.task.sampling, number, self._saves)

    def _prompt_ids(self, prompt: RolloutTask | str | Sequence[Any]) -> Sequence[int]:
        if isinstance(prompt, RolloutTask):
            return prompt.prompt_ids
        if isinstance(prompt, str):
            return self._format.text_prompt(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return self._format.prompt(prompt)
        return prompt


class Chat:
    """One token sequence under construction: prompt, then turns of the model and messages of the environment."""

    def __init__(
        self, context: Context, format: ChatFormat, prompt_ids: tuple[int, ...], sampling: Sampling, number: int, saves: ChatSaves
    ) -> None:
        if not prompt_ids:
            raise SchemaError("a chat needs a prompt of at least one token, got none", hint="pass engine.chat the task")
        self._context = context
        self._format = format
        self._sampling = sampling
        self._number = number
        self._saves = saves
        self._segments = [Segment(prompt_ids)]
        self._num_tokens = len(prompt_ids)
        """In all segments; counted along, for a chat may have thousands."""
        self._turns: list[Turn] = []
        self._finish_reason = ""
        self._mode = LogprobMode.SAMPLED
        self._engine = ""
        self._full = False
        """The longest sequence has been reached: whatever would come now is left out."""
        self._started_s = time.time()
        self.state: Any = None
        """What the last `save` was given; also in the process that goes on from it."""
        saved = saves.get(number, prompt_ids)
        if saved is not None:
            self._restore(saved)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The model's turns so far, those of an earlier producer included."""
        return tuple(self._turns)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(token for segment in self._segments for token in segment.token_ids)

    async def generate(
        self, *, max_new_tokens: int | None = None, temperature: float | None = None, sampling: Mapping[str, Any] | None = None
    ) -> Turn:
        """Let the model write its next turn and append its tokens.

        A turn is cut at `max_new_tokens` or where the model's longest sequence ends; where no room is left at all it is empty, with
        finish_reason `length`, the chat is truncated, and nothing is asked.

        Args:
            max_new_tokens: of this turn; None: the chat's.
            temperature: that this turn's tokens are drawn and trained at, above 0; None: the chat's.
            sampling: other fields of `Sampling` for this turn by name, such as `{"stop": ["</answer>"], "min_p": 0.05}`; what it does
                not name is the chat's.

        Raises:
            EngineError: the engine refused or went away. Let it pass: the rollout is then repeated.
            SchemaError: a temperature that is not above 0, or a field that there is not, or that does not take its value.
        """
        said = dict(sampling or {}) | ({} if temperature is None else {"temperature": temperature})
        temperature = said.get("temperature")
        if temperature is not None and not is_turn_temperature(temperature):
            raise SchemaError(
                f"expected a temperature above 0, and below 1e30, for a turn, got {temperature}",
                hint="a greedy token has no log-prob to train on; leave temperature out for the chat's own",
            )
        drawn = self._drawn(said, max_new_tokens)
        if drawn is None:
            # A loop that asks again and again must leave room for its own end.
            await asyncio.sleep(0)
            return self._end_full()
        context = self._context
        request = GenerateRequest(
            request_id=f"{context.task.index}.{context.rollout_index}-{uuid4().hex}",
            prompt_ids=self.token_ids,
            sampling=drawn,
            policy=context.task.policy,
            seeds=(self._seed(),),
            min_version=context.task.min_version,
            session=f"{context.task.index}.{context.rollout_index}.{self._number}",
        )
        [completion] = await complete(context.engine, request)
        if not completion.token_ids:  # the engine's longest sequence is shorter
            return self._end_full()
        if self._turns and completion.logprob_mode != self._mode:
            raise EngineError(
                f"expected log-probs of mode {self._mode} in every turn, got {completion.logprob_mode} from {completion.engine}"
            )
        turn = Turn(completion.text(context.tokenizer), tuple(completion.token_ids), completion.finish_reason)
        self._add(completion.segment)
        self._turns.append(turn)
        self._finish_reason, self._mode, self._engine = completion.finish_reason, completion.logprob_mode, completion.engine
        return turn

    @property
    def is_full(self) -> bool:
        """Whether the longest sequence has been reached: further turns are empty, and further messages are left out."""
        return self._full

    def _end_full(self) -> Turn:
        self._full, self._finish_reason = True, "length"
        return Turn("", (), "length")

    async def save(self, state: Any = None) -> None:
        """Store the chat as it is, so that another process goes on from here if this one dies; the newest save counts.

        Best effort (`Context.checkpoint`), and not to be mixed with `context.checkpoint` in one rollout.

        Args:
            state: whatever else the producer needs to go on: numbers, texts, bytes, lists, tables. `chat.state` afterwards.

        Raises:
            SchemaError: the rollout's chats are too large together, or `state` cannot be stored.
        """
        self.state = state
        saved = SavedChat(
            segments=bare(self._segments),
            turns=tuple(self._turns),
            finish_reason=self._finish_reason,
            mode=self._mode,
            engine=self._engine,
            started_s=self._started_s,
            state=state,
        )
        await self._saves.put(self._number, saved)

    def _restore(self, saved: SavedChat) -> None:
        self._segments = [msgspec.structs.replace(s, token_ids=tuple(s.token_ids), logprobs=tuple(s.logprobs)) for s in saved.segments]
        self._num_tokens = sum(len(segment.token_ids) for segment in self._segments)
        self._turns = list(saved.turns)
        self._finish_reason, self._mode, self._engine = saved.finish_reason, saved.mode, saved.engine
        self._started_s, self.state = saved.started_s, saved.state
        self._context.log.info("event=chat_resumed chat=%d turns=%d tokens=%d", self._number, len(self._turns), self._num_tokens)

    def _drawn(self, said: Mapping[str, Any], max_new_tokens: int | None) -> Sampling | None:
        """How a turn is drawn; None where there is no room for it."""
        sampling = turn_sampling(self._sampling, said) if said else self._sampling
        wanted = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        if self._context.max_len:
            wanted = min(wanted, self._context.max_len - self._num_tokens)
        if wanted < 1 or self._full:
            return None
        return msgspec.structs.replace(sampling, max_new_tokens=wanted)

    def _add(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._num_tokens += len(segment.token_ids)

    def _seed(self) -> int:
        # The first turn of the first chat has the rollout's own seed, so one turn here equals the built-in producer.
        request = self._number * _CHATS + len(self._turns)
        return rollout_seed(self._context.seed, request) if request else self._context.seed

    def tool(self, text: str) -> None:
        """Append a tool's result and open the model's next turn; masked in training.

        One that does not fit the longest sequence is left out and truncates the chat: see `is_full`.
        """
        self._reply("tool", text)

    def user(self, text: str) -> None:
        """Append a user message and open the model's next turn; otherwise as `tool`."""
        self._reply("user", text)

    def _reply(self, role: str, text: str) -> None:
        if self._full:
            return
        if not self._segments[-1].is_model:
            raise SchemaError(f"a {role} message follows a turn of the model, but none was generated since the last message")
        self.append(self._format.reply(role, text, last_token=self._segments[-1].token_ids[-1]))

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment as they are; otherwise as `tool`."""
        if self._context.max_len and self._num_tokens + len(token_ids) > self._context.max_len:
            self._end_full()
        if token_ids and not self._full:
            self._add(Segment(tuple(token_ids)))

    def episode(
        self,
        *,
        reward: float | None = None,
        reward_parts: Mapping[str, float] | None = None,
        status: Status | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Episode:
        """What has been made, ready to be returned.

        Args:
            reward: None: the run's reward scores it.
            reward_parts: named parts of `reward`, kept with the sample.
            status: None: from the last turn's finish reason; FAILED when a tool broke and the tokens up to there are valid.
            metadata: kept with the sample, and handed to the run's reward.

        Raises:
            SchemaError: no turn was generated.
        """
        return Episode(
            segments=tuple(self._segments),
            finish_reason=self._finish_reason or "abort",
            status=status or STATUS.get(self._finish_reason, Status.ABORTED),
            turns=tuple(turn.text for turn in self._turns),
            sampling=self._sampling,
            logprob_mode=self._mode,
            seed=self._context.seed,
            engine=self._engine,
            rollout=self._context.rollout_index,
            reward=reward,
            reward_parts=dict(reward_parts or {}),
            metadata=dict(metadata or {}),
            started_s=self._started_s,
            finished_s=time.time(),
        )
