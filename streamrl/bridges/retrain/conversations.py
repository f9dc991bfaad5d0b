"""A rollout's chats, kept equal to what an environment of retrain's says the conversation is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.bridges.retrain.formats import Message
from streamrl.errors import SchemaError
from streamrl.producers.chat import Chat
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.turns import Turn
from streamrl.schemas.tasks import RolloutTask


class Conversation:
    """Turns of the model and messages of the environment.

    ```text
    environment says   [user]  [user, assistant, tool]  [user, assistant, tool, assistant, user]
    chat                  user | turn | tool | turn | user ...        the turns' tokens as they were sampled
    ```

    A conversation that does not go on with messages behind the model's turn (an environment that has rewritten it, or that lets the
    model go on without a word) is a chat of its own, which begins with all of it: what had been sampled before stays a sample too, and
    the new chat's beginning is not trained.

    A chat that an earlier producer of the task had saved has its turns already. They are given out again, one by one, before new ones are
    generated, and the environment's messages between them are there.
    """

    def __init__(self, task: RolloutTask, engine: RolloutEngine, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self._engine = engine
        self._tools = [*tools] or None
        self.messages = [*messages]
        """As the environment has said them last."""
        self.chats: list[Chat] = []
        self._given = 0
        """Turns of the newest chat that have been given out."""
        self._open(task if self.messages == [*opening(task)] and not tools else self.messages)

    async def turn(self) -> Turn:
        """The next turn; an empty one where the longest sequence is reached."""
        chat = self.chats[-1]
        if self._given < len(chat.turns):
            turn = chat.turns[self._given]
            if self._given == len(chat.turns) - 1:
                self._check_same(chat)
        else:
            turn = await chat.generate()
        self._given += 1
        return turn

    async def save(self) -> None:
        """Keep the chats, right after a turn; raises SchemaError where they are too large."""
        if self._given == len(self.chats[-1].turns):
            await self.chats[-1].save({"seen": self._digest()})

    def hear(self, messages: Sequence[Message]) -> None:
        """Take the conversation as the environment has it after a turn."""
        now, known = [*messages], len(self.messages)
        added = now[known:]
        # The first message behind what the model has read is its own turn, where the environment keeps it.
        added = added[1:] if added and added[0]["role"] == "assistant" else added
        goes_on = now[:known] == self.messages and added and all(message["role"] != "assistant" for message in added)
        self.messages = now
        if not goes_on:
            self._open(now)
        elif self._given == len(self.chats[-1].turns):
            self.chats[-1].reply(added)

    def episodes(self) -> list[Episode]:
        """What is to be trained: an episode for each chat in which the model has written, the newest last."""
        return [chat.episode() for chat in self.chats if chat.turns] or [self.chats[-1].episode()]

    def _open(self, prompt: RolloutTask | Sequence[Message]) -> None:
        self.chats.append(self._engine.chat(prompt, tools=self._tools))
        self._given = 0

    def _check_same(self, chat: Chat) -> None:
        saved = chat.state.get("seen") if isinstance(chat.state, dict) else None
        if saved != self._digest():
            raise SchemaError(
                f"expected the environment to show again what it had shown before turn {len(chat.turns) - 1}, when the chat was saved",
                hint="it must be a function of its seed and of the actions; else leave checkpoint off",
            )

    def _digest(self) -> str:
        """Of all that the model has read and written so far, by the environment's account: what is before the newest turn is part of it."""
        return hashlib.sha256(msgspec.json.encode(self.messages)).hexdigest()


def opening(task: RolloutTask) -> Sequence[Message]:
    """The messages of a task's prompt."""
    if task.prompt is None:
        raise SchemaError("expected a task with a prompt as a text or messages, got token ids alone")
    return [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt


def model_segments(episodes: Sequence[Episode]) -> list[Segment]:
    """Of each turn of the model, in the order of the turns."""
    return [segment for episode in episodes for segment in episode.segments if segment.is_model]
