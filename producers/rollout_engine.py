"""The engine as a custom producer gets it: begins chats."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.data.images import has_image_parts
from streamrl.errors import SchemaError
from streamrl.producers.chat import Chat, Style
from streamrl.producers.chat_format import ChatFormat, Message
from streamrl.producers.chat_saves import ChatSaves
from streamrl.producers.episode import Segment
from streamrl.producers.protocol import Context
from streamrl.schemas.tasks import RolloutTask, Sampling


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

    async def image(self, place: int = 0) -> bytes:
        """As `Context.image`: an image of the task's row, which no engine looks at: send it to what does."""
        return await self.context.image(place)

    def chat(
        self,
        prompt: RolloutTask | str | Sequence[Any],
        *,
        sampling: Sampling | None = None,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Chat:
        """Begin a token sequence, or go on with the one that was saved in its place when an earlier producer of the task died.

        Chats are told apart by their order within the rollout, and by their prompt.

        Args:
            prompt: the task (its prompt's tokens); or a text, chat messages or token ids, for a sub-agent of this rollout.
            sampling: how this chat's tokens are drawn; None: as the task says. A greedy rollout is greedy whatever temperature it has.
            tools: definitions that the prompt shows and that give calls their types; None: the task's for the task, else none.
            template_kwargs: variables of the chat template, over `data.chat_template_kwargs` and the row's own; of the task itself they
                change what follows its prompt, which is there already.

        Raises:
            SchemaError: an empty prompt, or one with an image.
            ConfigError: the chat template refuses the messages, or reads no such variable.
        """
        task = self.context.task
        given = {**self.context.template_kwargs, **(task.chat_template_kwargs or {}), **(template_kwargs or {})}
        opening: Sequence[Message] | None = None
        if isinstance(prompt, RolloutTask):
            tools = prompt.tools if tools is None else tools
            prompt_ids: Sequence[int] = prompt.prompt_ids
            if prompt.prompt is not None:
                opening = _messages(prompt.prompt)
        elif isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            opening = _messages(prompt)
            if has_image_parts(opening):
                hint = "send it to what looks at images, and write into the prompt what that says"
                raise SchemaError("expected messages of texts, got an image: no engine looks at images", hint=hint)
            prompt_ids = self._format.opening(opening, tools, given)
        else:
            prompt_ids = prompt
        style = Style(self.context, self._format, self.context.drawn(sampling or task.sampling), tools, given, self._saves, self._next)
        number = self._next()
        return Chat(style, [Segment(tuple(prompt_ids))], ((number, 0),), opening=opening)

    def _next(self) -> int:
        number, self._num_chats = self._num_chats, self._num_chats + 1
        return number


def _messages(prompt: Any) -> Sequence[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
