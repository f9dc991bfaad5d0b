"""Where a call goes on in its session's tree, and which tokens come between: by its messages, its token ids or its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from streamrl.producers.gateway.entries import OWN_PROMPT, TASK_PROMPT
from streamrl.producers.gateway.errors import ApiError, refused
from streamrl.producers.gateway.messages import ASSISTANT, Message, digest_of
from streamrl.producers.gateway.rendering import Rendering
from streamrl.producers.gateway.tree import Node, Tree, fits_messages, fits_text, fits_tokens
from streamrl.schemas.tasks import RolloutTask, Sampling

MOST_TOLD = 16
"""Newest answers to a prompt among which one is looked for that a call tells in other words."""


class Place(msgspec.Struct, frozen=True):
    """Behind which turn a call's answer will stand; the fields are those of `streamrl.producers.gateway.entries.Turn`."""

    parent: int
    kept: Sequence[int]
    """Tokens that its path has already."""
    context: Sequence[int]
    heard: tuple[bytes, ...]
    family: int = 0
    retold: tuple[int, ...] = ()

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine is given."""
        return [*self.kept, *self.context]


class Rules(msgspec.Struct, frozen=True):
    """What a session's calls may begin with."""

    task: RolloutTask
    rendering: Rendering
    own_prompts: bool
    """Whether they may begin otherwise than with the task's prompt (`gateway.prompts = "any"`)."""
    drawable: Callable[[Sampling], None]
    """Raises ConfigError for what the run's engines cannot draw by, or its trainer not train."""

    def messages(self) -> list[Message]:
        """The task's prompt."""
        return prompt_messages(self.task)

    def tree(self) -> Tree:
        """Of a session without turns."""
        return Tree(self.task.prompt_ids, _digests(self.messages(), self.task.tools))


def prompt_messages(task: RolloutTask) -> list[Message]:
    """The prompt of a task as messages; raises ApiError when it is none that the APIs can say."""
    from streamrl.producers.gateway.wire_messages import read_messages  # which knows the forms of messages

    prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
    return read_messages(prompt, "prompt")


def by_messages(messages: Sequence[Message], tools: Any, rules: Rules) -> Callable[[Tree], Place]:
    """For a call of messages."""
    own = rules.task.tools or None
    used = own if not tools or _plain(tools) == _plain(own) else tools
    digests = _digests(messages, used)

    def place(tree: Tree) -> Place:
        if messages[-1].role == ASSISTANT:
            raise refused(
                "expected the last message to be of another role than assistant: a turn of the model is not continued", param="messages"
            )
        node, end = tree.deepest(fits_messages(digests))
        if node is None and not rules.own_prompts:
            raise _not_granted("messages that begin with those of the task's prompt, and its tools", "messages")
        if node is None:
            return Place(OWN_PROMPT, (), rules.rendering.prompt(messages, used), digests, tree.new_family())
        rest = messages[end - 1 :]  # the tools stand before them
        retold = _retold(node, rest, digests[end:], used, rules)
        if node.turn is not None:
            context = rules.rendering.replies(rest, used, last_token=node.turn.tokens.token_ids[-1])
            return Place(node.number, node.token_ids(), context, digests[end:], node.family, retold)
        if not rest:
            return _at_prompt(tree, node)
        return Place(OWN_PROMPT, (), rules.rendering.prompt(messages, used), digests, node.family, retold)

    return place


def _retold(node: Node, rest: Sequence[Message], digests: Sequence[bytes], tools: Any, rules: Rules) -> tuple[int, ...]:
    """Numbers of the turns behind `node` that the messages after it tell in other words; `digests` are those of the messages.

    A message tells a turn that has the id of one of its calls, or that begins with all of its text.
    """
    call = re.compile(rf"call_{rules.task.index}[._]\d+[._](\d+)_\d")  # by `front`; some clients take dots for Anthropic's ids away
    found: list[int] = []
    for child in node.children[-MOST_TOLD:]:
        place = len(child.heard)
        if child.turn is None or place >= len(rest) or rest[place].role != ASSISTANT or tuple(digests[:place]) != child.heard:
            continue
        message, ids = rest[place], child.token_ids()
        text = rules.rendering.text(child.turn.tokens, child.turn.sampling)
        prompt_ids = ids[: len(ids) - len(child.turn.tokens.token_ids)]
        says = rules.rendering.parsed(text, tools, prompt_ids, given="no calls").content
        named = {number for told in (message.content, *(one.id for one in message.tool_calls)) for number in call.findall(told)}
        if str(child.number) in named or (says and message.content.strip().startswith(says)):
            found.append(child.number)
    return tuple(found)


def by_tokens(ids: Sequence[int], rules: Rules, *, param: str) -> Callable[[Tree], Place]:
    """For a call of token ids."""

    def place(tree: Tree) -> Place:
        node, end = tree.deepest(fits_tokens(ids))
        if node is None and not rules.own_prompts:
            raise _not_granted("token ids that begin with those of the task's prompt", param)
        return _behind(tree, node, ids, ids[end:])

    return place


def by_text(text: str, rules: Rules, *, param: str) -> Callable[[Tree], Place]:
    """For a call of text: an earlier answer within it is known by the text that was given for it."""
    rendering = rules.rendering

    def shown(node: Node) -> str:
        return rendering.tokenizer.decode(node.context) + (
            rendering.text(node.turn.tokens, node.turn.sampling) if node.turn is not None else ""
        )

    def place(tree: Tree) -> Place:
        node, end = tree.deepest(fits_text(text, shown))
        if node is None and not rules.own_prompts:
            raise _not_granted("text that begins with the task's prompt", param)
        context = rendering.content.encode(text[end:])
        ids = (node.token_ids() if node is not None else []) + context
        if not ids:
            raise refused("expected a prompt of at least one token, got none", param=param)
        return _behind(tree, node, ids, context)

    return place


def _behind(tree: Tree, node: Node | None, ids: Sequence[int], rest: Sequence[int]) -> Place:
    """Behind a node, of which `ids` are the whole path with what comes then; these messages are nobody's to recognise."""
    heard = (digest_of(list(rest)),) if rest else ()
    if node is not None and not rest and node.turn is None:
        return _at_prompt(tree, node)
    if node is not None and node.turn is not None:
        return Place(node.number, ids[: len(ids) - len(rest)], rest, heard, node.family)
    if node is not None and node is tree.prompts[0]:
        return Place(TASK_PROMPT, node.context, rest, heard)
    family = tree.new_family() if node is None else node.family
    return Place(OWN_PROMPT, (), ids, (digest_of(list(ids)),), family)


def _at_prompt(tree: Tree, prompt: Node) -> Place:
    if prompt is tree.prompts[0]:
        return Place(TASK_PROMPT, prompt.context, (), ())
    return Place(OWN_PROMPT, (), prompt.context, prompt.heard, prompt.family)


def _digests(messages: Sequence[Message], tools: Any) -> tuple[bytes, ...]:
    return (digest_of(_plain(tools)), *(message.digest() for message in messages))


def _plain(tools: Any) -> Any:
    """Tools by what they mean."""
    from streamrl.producers.gateway.wire_messages import plain_tool  # which knows their form

    return [plain_tool(tool) for tool in cast("list[Any]", tools or [])] or None


def _not_granted(what: str, param: str) -> ApiError:
    return refused(
        f"expected {what}, got others",
        hint="/rl/start_session gives the prompt; agents with prompts of their own need gateway.prompts = 'any'",
        code="prompt_not_granted",
        param=param,
    )
