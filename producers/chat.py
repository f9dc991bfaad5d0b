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

A model that calls tools is answered by `while await chat.call_tools({"search": search}): await chat.generate()`. A chat may leave another
one: `chat.branch()` goes on from the same tokens, `chat.compact(summary)` from the beginning and a summary.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from streamrl.core.seeds import rollout_seed
from streamrl.data.tool_calls import NONE, ToolCall, tool_call_format
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import EngineError, SchemaError
from streamrl.producers.branches import Lineage
from streamrl.producers.chat_format import ChatFormat, Message
from streamrl.producers.chat_saves import ChatSaves, SavedChat
from streamrl.producers.completions import complete
from streamrl.producers.episode import STATUS, Episode, Segment, bare
from streamrl.producers.protocol import Context
from streamrl.producers.tool_runs import Tool, ToolResult, fail_on, result_message, run_calls
from streamrl.producers.turns import Turn, check_temperature
from streamrl.schemas.samples import LogprobMode, Status
from streamrl.schemas.tasks import Sampling, turn_sampling

_CHATS = 1 << 20
"""Chats and turns below this number have seeds of their own."""


class Style(NamedTuple):
    """What a chat and its branches have in common."""

    context: Context
    format: ChatFormat
    sampling: Sampling
    tools: Any
    template_kwargs: Mapping[str, Any]
    saves: ChatSaves
    next_number: Callable[[], int]


class Chat:
    """One token sequence under construction: prompt, then turns of the model and messages of the environment."""

    def __init__(
        self,
        style: Style,
        segments: list[Segment],
        lineage: Lineage,
        *,
        turns: Sequence[Turn] = (),
        opening: Sequence[Message] | None = None,
        parent: Chat | None = None,
    ) -> None:
        if not segments[0].token_ids:
            raise SchemaError("a chat needs a prompt of at least one token, got none", hint="pass engine.chat the task")
        self._style = style
        self._context = style.context
        self._format = style.format
        self._sampling = style.sampling
        self._calls = tool_call_format(style.context.tokenizer, style.context.tool_calls)
        self._lineage = lineage
        self._opening = opening
        self._segments = segments
        self._num_tokens = sum(len(segment.token_ids) for segment in segments)
        """In all segments; counted along, for a chat may have thousands."""
        self._turns = list(turns)
        self._finish_reason = turns[-1].finish_reason if turns else ""
        self._mode = LogprobMode.SAMPLED if parent is None else parent._mode
        self._engine = "" if parent is None else parent._engine
        self._full = False
        """The longest sequence has been reached: whatever would come now is left out."""
        self._started_s = time.time()
        self.state: Any = None
        """What the last `save` was given; also in the process that goes on from it."""
        saved = style.saves.get(lineage[-1][0], lineage, segments if parent is None else parent._segments)
        self._resumed = saved is not None
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

        A turn ends at `max_new_tokens` or where the model's longest sequence ends; where no room is left at all it is empty, with
        finish_reason `length`, the chat is truncated, and nothing is asked.

        Args:
            max_new_tokens: of this turn; None: the chat's.
            temperature: that this turn's tokens are drawn and trained at, above 0; None: the chat's. Not read in a greedy rollout.
            sampling: other fields of `Sampling` for this turn by name, such as `{"stop": ["</answer>"], "min_p": 0.05}`; what it does
                not name is the chat's.

        Raises:
            EngineError: the engine refused or went away. Let it pass: the rollout is then repeated.
            SchemaError: a temperature that is not above 0, or a field that there is not, or that does not take its value.
        """
        said = dict(sampling or {}) | ({} if temperature is None else {"temperature": temperature})
        check_temperature(None if self._context.is_baseline else said.get("temperature"))
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
            min_epoch=context.task.least.epoch,
            session=f"{context.task.index}.{context.rollout_index}.{self._lineage[0][0]}",
        )
        [completion] = await complete(context.engine, request)
        if not completion.token_ids:  # the engine's longest sequence is shorter
            return self._end_full()
        if self._turns and completion.logprob_mode != self._mode:
            raise EngineError(
                f"expected log-probs of mode {self._mode} in every turn, got {completion.logprob_mode} from {completion.engine}"
            )
        turn = Turn(completion.text(context.tokenizer), tuple(completion.token_ids), completion.finish_reason)
        turn = self._parsed(turn, self._segments[-1])
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
            turns=tuple(turn.bare() for turn in self._turns),
            finish_reason=self._finish_reason,
            mode=self._mode,
            engine=self._engine,
            started_s=self._started_s,
            lineage=self._lineage,
            state=state,
        )
        await self._style.saves.put(self._lineage[-1][0], saved)

    def _restore(self, saved: SavedChat) -> None:
        self._segments = [msgspec.structs.replace(s, token_ids=tuple(s.token_ids), logprobs=tuple(s.logprobs)) for s in saved.segments]
        self._num_tokens = sum(len(segment.token_ids) for segment in self._segments)
        before = [segment for segment, after in pairwise(self._segments) if after.is_model]
        self._turns = [self._parsed(turn, segment) for turn, segment in zip(saved.turns, before, strict=False)]
        self._lineage = saved.lineage or self._lineage
        self._finish_reason, self._mode, self._engine = saved.finish_reason, saved.mode, saved.engine
        self._started_s, self.state = saved.started_s, saved.state
        self._context.log.info("event=chat_resumed chat=%d turns=%d tokens=%d", self._lineage[-1][0], len(self._turns), self._num_tokens)

    def _drawn(self, said: Mapping[str, Any], max_new_tokens: int | None) -> Sampling | None:
        """How a turn is drawn; None where there is no room for it."""
        sampling = self._context.drawn(turn_sampling(self._sampling, said)) if said else self._sampling
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
        request = self._lineage[-1][0] * _CHATS + len(self._turns)
        return rollout_seed(self._context.seed, request) if request else self._context.seed

    def tool(self, text: str, *, call: ToolCall | None = None, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Append a tool's result and open the model's next turn; masked in training.

        One that does not fit the longest sequence is left out and truncates the chat: see `is_full`.

        Args:
            text: the result.
            call: that it answers, for templates that name the tool.
            template_kwargs: for the turn that follows, over the chat's own.
        """
        self.reply([result_message(text, call)], template_kwargs=template_kwargs)

    def tools(self, texts: Sequence[str], *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Append the results of all calls of the last turn, in their order; otherwise as `tool`.

        Raises:
            SchemaError: more or fewer results than the turn has calls.
        """
        calls = self._turns[-1].tool_calls if self._turns else ()
        if not self._full and (isinstance(texts, str) or len(texts) != len(calls)):
            raise SchemaError(f"expected a text for each of {len(calls)} calls of the last turn, got {len(texts)}")
        self.reply([result_message(text, call) for text, call in zip(texts, calls, strict=False)], template_kwargs=template_kwargs)

    def user(self, text: str, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Append a user message and open the model's next turn; otherwise as `tool`."""
        self.reply([{"role": "user", "content": text}], template_kwargs=template_kwargs)

    def reply(self, messages: Sequence[Message], *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Append messages with `role` (`tool`, `user`, `system`) and `content`, and open the model's next turn; otherwise as `tool`.

        Raises:
            SchemaError: no turn was generated since the last message, or the chat template cannot append them.
        """
        if self._full:
            return
        if not self._segments[-1].is_model:
            role = messages[0].get("role") if messages else ""
            raise SchemaError(f"a {role} message follows a turn of the model, but none was generated since the last message")
        given = {**self._style.template_kwargs, **(template_kwargs or {})}
        last = self._segments[-1].token_ids[-1]
        self.append(self._format.replies(messages, last_token=last, tools=self._style.tools, template_kwargs=given))

    async def call_tools(
        self, tools: Mapping[str, Tool], *, timeout_s: float = 10.0, retries: int = 0, fail: bool = False, max_chars: int = 20_000
    ) -> list[ToolResult]:
        """Run the tools that the last turn has called, all at the same time, and append their results; otherwise as `tool`.

        A tool that raises (`sys.exit` too) or hangs, is not known or was given wrong arguments, and a call that is malformed, are answered
        with the error's text. `EngineError` passes.

        Args:
            tools: functions by name, called with the arguments by keyword: `async def`, or `def`, which run in threads. What they give is
                the result: a text, or what JSON can say.
            timeout_s: of one try; less than `producer.idle_timeout_s`. An `async` tool is then cancelled; a plain one is not waited for.
            retries: further tries of a tool that raised or hung.
            fail: let a tool that gave nothing fail the rollout instead.
            max_chars: of a result; the rest is cut, and the model is told.

        Returns:
            What became of each call; empty: the last turn has none, was answered already, or the chat is full. So an agent is
            `while await chat.call_tools(tools): await chat.generate()`.

        Raises:
            ToolError: with `fail`; or too many calls hang in this process.
            SchemaError: it is not known how this model writes calls.
        """
        if self._calls is NONE:
            raise SchemaError(
                "the chat template does not show how the model writes calls of tools", hint='name it: data.tool_calls = "hermes"'
            )
        if self._full or not self._turns or not self._segments[-1].is_model:
            return []
        results = await run_calls(self._turns[-1], tools, timeout_s=timeout_s, retries=retries, max_chars=max_chars, log=self._context.log)
        if fail:
            fail_on(results)
        if results:
            self.reply([result_message(result.text, result.call) for result in results])
        return results

    def branch(self, *, keep: int | None = None) -> Chat:
        """A chat of its own that goes on from this one's tokens.

        What they share is trained once: in this chat, whose episode is returned before the branch's, or in the branch if this one has none.

        Args:
            keep: so many turns of the model stay, up to the end of the last one; 0: the prompt; None: all there is.

        Raises:
            SchemaError: there are not so many turns.
        """
        if keep is not None and not 0 <= keep <= len(self._turns):
            raise SchemaError(f"expected to keep 0 to {len(self._turns)} turns of the chat, got {keep}")
        ends = [place + 1 for place, segment in enumerate(self._segments) if segment.is_model]
        segments = self._segments[: len(self._segments) if keep is None else ends[keep - 1] if keep else 1]
        turns = self._turns if keep is None else self._turns[:keep]
        return self._left(segments, sum(len(segment.token_ids) for segment in segments), turns, self._opening)

    def compact(self, summary: str, *, keep: int = 0) -> Chat:
        """A chat of its own in which a summary, as a user message, stands for all but the first turns of this one.

        Args:
            summary: what the model is to know of what is left out.
            keep: so many turns of the model stay as they are. 0: the summary follows the prompt, which must have been messages or a text.

        Raises:
            SchemaError: there are not so many turns, or the prompt was token ids.
        """
        if keep:
            chat = self.branch(keep=keep)
            if not chat._resumed:
                chat.user(summary)
            return chat
        if self._opening is None:
            raise SchemaError("a chat that began with token ids has no messages to put a summary behind", hint="keep a turn: keep=1")
        messages = [*self._opening, {"role": "user", "content": summary}]
        prompt_ids = self._format.opening(messages, self._style.tools, self._style.template_kwargs)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._segments[0].token_ids, prompt_ids, strict=False)))
        return self._left([Segment(tuple(prompt_ids))], shared, (), messages)

    def _left(self, segments: list[Segment], shared: int, turns: Sequence[Turn], opening: Sequence[Message] | None) -> Chat:
        number = self._style.next_number()
        lineage = (*self._lineage, (number, shared)) if shared else ((number, 0),)
        return Chat(self._style, list(segments), lineage, turns=turns, opening=opening, parent=self)

    def _parsed(self, turn: Turn, before: Segment) -> Turn:
        return turn.parsed(self._calls, self._style.tools, thinking=self._format.opens_thought(before.token_ids))

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
        agent: str = "",
        reward_parts: Mapping[str, float] | None = None,
        status: Status | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Episode:
        """What has been made, ready to be returned.

        Args:
            reward: None: the run's reward scores it.
            agent: whose it is, if that agent has a reward of its own (`Episode.agent`).
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
            agent=agent,
            reward_parts=dict(reward_parts or {}),
            metadata=dict(metadata or {}),
            lineage=self._lineage,
            started_s=self._started_s,
            finished_s=time.time(),
        )
