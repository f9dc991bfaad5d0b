"""Chat templates: compiled as transformers compiles them, chosen by their names as it chooses, and given messages in the form they read.

Templates differ in what they take, and pass over in silence what they do not: some read contents as texts and some as lists of parts, some
the arguments of calls as tables and some as JSON text, and some read no tools. So each template is asked once, with messages made up for
that, and then given what it shows.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from streamrl.errors import ConfigError

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
"""Special tokens that a template is given by name, where the tokenizer has them."""
_OWN = ("messages", "tools", "documents", "add_generation_prompt", *SPECIAL)
"""Names that a template is given besides the variables of the caller."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of a template where a tokenizer has several: the one that is meant, and the one that is meant where there are tools."""
_PROBE = "7510001357"
"""A text that any template keeps as it is."""
_USER = {"role": "user", "content": "."}
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Errors of templates: those of `raise_exception`, or Python's own, as where one adds to a content that is missing."""
_Given = Mapping[str, Any]


class ChatTemplates:
    """The chat templates of one tokenizer.

    Args:
        sources: Jinja by name; without any there is no template.
        special: texts of special tokens by name.
        where: directory they came from, for messages.

    Raises:
        ConfigError: one is no Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str], where: str) -> None:
        self._where = where
        self._templates = {name: _Template(source, special, where) for name, source in sources.items()}

    def render(self, messages: Sequence[_Given], tools: Any, *, add_generation_prompt: bool, template_kwargs: _Given) -> str:
        """Messages as text; arguments and errors are those of `Tokenizer.apply_chat_template`.

        Args:
            messages: as `plain_messages` gives them.
            tools: as `plain_tools` gives them.
            add_generation_prompt: whether the text ends where the model begins to write.
            template_kwargs: further variables.
        """
        if template_kwargs:
            self.check_template_kwargs(template_kwargs)
        template = self._chosen(tools)
        if tools and not template.shows_tools(tools):
            raise self._no_tools()
        try:
            return template.render(messages, tools, {**template_kwargs, "add_generation_prompt": add_generation_prompt})
        except _REFUSALS as error:
            raise ConfigError(
                f"the chat template in {self._where} refuses these messages: {error}",
                hint="check their roles and contents",
                path=self._where,
                refused=str(error),
            ) from error

    def check_shown(self, messages: Sequence[_Given], tools: Any, template_kwargs: _Given) -> None:
        """Raise ConfigError where these messages are rendered to the same text with the tools and without, or their calls to nothing."""
        template = self._chosen(tools)
        if any(message.get("tool_calls") for message in messages) and not template.shows_calls:
            raise ConfigError(
                f"expected a chat template that shows calls of tools in {self._where}, got one that leaves them out",
                hint="put one that shows them into chat_template.jinja, or write calls into the contents as the model is to write them",
                path=self._where,
                missing="tool_calls",
            )
        if not tools:
            return
        given = {**template_kwargs, "add_generation_prompt": False}
        try:
            same = template.render(messages, tools, given) == template.render(messages, None, given)
        except _REFUSALS:  # said where they are rendered to be read
            return
        if same:
            raise self._no_tools()

    def check_template_kwargs(self, given: _Given) -> None:
        """Raise ConfigError for a variable that no template reads: Jinja itself would pass it over."""
        known = frozenset[str]().union(*(template.variables for template in self._templates.values())).difference(_OWN)
        if unknown := sorted(set(given) - known):
            raise ConfigError(
                f"expected variables that the chat template in {self._where} reads ({', '.join(sorted(known)) or 'it reads none'}), "
                f"got {', '.join(unknown)}",
                hint="check data.chat_template_kwargs",
                key="data.chat_template_kwargs",
                got=unknown,
            )

    def _chosen(self, tools: Any) -> _Template:
        """The template that transformers takes: `tool_use` where there are tools, else `default`."""
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        if name in self._templates:
            return self._templates[name]
        if self._templates:
            raise ConfigError(
                f"expected a chat template called {DEFAULT} in {self._where}, got only {', '.join(sorted(self._templates))}",
                hint="copy the one that is meant to chat_template.jinja",
                path=self._where,
                missing="chat_template",
            )
        raise ConfigError(
            f"expected a chat template in {self._where}, got none",
            hint="set data.chat_template = false, or put a chat_template.jinja beside the tokenizer",
            path=self._where,
            missing="chat_template",
        )

    def _no_tools(self) -> ConfigError:
        return ConfigError(
            f"expected a chat template that shows tools in {self._where}, got one whose text is the same with tools and without",
            hint="leave the tools out (data.tools_key), describe them in a system message, or put a template that shows them "
            "into chat_template.jinja",
            path=self._where,
            missing="tools",
        )


class _Template:
    """One template, and the form of messages that it shows."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        self._compiled = _compile(source, where)
        self._special = special
        parsed = self._compiled.environment.parse(source)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed) - self._compiled.environment.globals.keys())
        """Names that it looks for in what it is given."""
        self._with_tools: bool | None = None

    def render(self, messages: Sequence[_Given], tools: Any, given: _Given) -> str:
        """Messages of texts as text; raises one of _REFUSALS."""
        return self._render([self._in_form(message) for message in messages], tools, given)

    def shows_tools(self, tools: Any) -> bool:
        """Tell whether some conversation looks different with tools; one that the template refuses is none to judge by."""
        if self._with_tools is None:
            self._with_tools = "tools" in self.variables and self._differs(tools)
        return self._with_tools

    def _differs(self, tools: Any) -> bool:
        judged = False
        for messages in ([_USER], [{"role": "system", "content": "."}, _USER]):
            try:
                shown, bare = (self.render(messages, some, {"add_generation_prompt": True}) for some in (tools, None))
            except _REFUSALS:
                continue
            if shown != bare:
                return True
            judged = True
        return not judged

    @cached_property
    def _reads_parts(self) -> bool:
        """True for a template that shows a content that is a list of parts, and none that is a text."""
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            if self._shows([{"role": "user", "content": content}]):
                return isinstance(content, list)
        return False

    @property
    def shows_calls(self) -> bool:
        """True for a template that has calls of tools in its text."""
        return self._call_form is not None

    @cached_property
    def _call_form(self) -> tuple[bool, _Given] | None:
        """The form in which it shows calls: arguments as JSON text or not, and how a turn of calls has no content; None: it shows none."""
        forms = product((False, True), ({}, {"content": None}, {"content": ""}))
        return next((form for form in forms if self._shows(_called(*form))), None)

    def _shows(self, messages: Sequence[_Given]) -> bool:
        try:
            return _PROBE in self._render(messages, None, {"add_generation_prompt": False})
        except _REFUSALS:
            return False

    def _in_form(self, message: _Given) -> _Given:
        if calls := message.get("tool_calls"):
            as_text, content = self._call_form or (False, {"content": ""})
            message = {**content, **message, "tool_calls": [_call(call, as_text) for call in calls]}
        if isinstance(content := message.get("content"), str) and self._reads_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _render(self, messages: Sequence[_Given], tools: Any, given: _Given) -> str:
        return self._compiled.render(messages=messages, **{"tools": tools, "documents": None, **self._special, **given})


def _called(as_text: bool, content: _Given) -> list[_Given]:
    """A conversation with a call whose name is to be shown."""
    call = {"id": "call00001", "type": "function", "function": {"name": _PROBE, "arguments": "{}" if as_text else {}}}
    answered = {"role": "tool", "content": ".", "name": _PROBE[::-1], "tool_call_id": "call00001"}
    return [_USER, {"role": "assistant", **content, "tool_calls": [call]}, answered]


def _call(call: Any, as_text: bool) -> Any:
    """A call with its arguments as JSON text, or as the table that the text says."""
    inner = call.get("function") if isinstance(call, Mapping) else None
    holder = inner if isinstance(inner, Mapping) else call
    if not isinstance(holder, Mapping) or "arguments" not in holder:
        return call
    arguments = holder["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            table = json.loads(arguments)
        except (ValueError, RecursionError):
            table = None
        arguments = table if isinstance(table, dict) else arguments
    changed = {**holder, "arguments": arguments}
    return {**call, "function": changed} if holder is inner else changed


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model has written, for those who train on whole conversations."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As in transformers, what is set within stays within.
        return jinja2.nodes.Scope(body).set_lineno(line)


def _compile(template: str, where: str) -> jinja2.Template:
    """The environment that Hugging Face templates are written for: sandboxed, blocks trimmed, with its three extra functions."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = to_json
    functions: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals.update(functions)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"expected a Jinja chat template in {where}, got at its line {error.lineno}: {error.message}",
            hint="fix chat_template.jinja",
            path=where,
            line=error.lineno,
        ) from error
