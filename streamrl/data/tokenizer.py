"""A tokenizer read from a Hugging Face model directory without importing transformers (which takes seconds).

`tokenizers` does the encoding, jinja2 the chat template; both give what `AutoTokenizer` gives (tested on it).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from streamrl.errors import ConfigError

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_OWN = ("messages", "tools", "add_generation_prompt", *_SPECIAL)
"""What a template is given by name besides the variables of the caller."""


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: the encoder.
        special: the texts of `bos_token`, `eos_token`, `pad_token` and `unk_token`, where there are any.
        template: chat template (Jinja), or empty.
        stop_ids: further ids that end a completion, besides the end-of-sequence token's.
        where: directory it came from, for messages.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special: Mapping[str, str], template: str, stop_ids: Sequence[int] = (), where: str = ""
    ) -> None:
        self.special = dict(special)
        self._backend = backend
        self._where = where
        self.chat_template = template
        """Its source (Jinja), or empty."""
        self._template = _compile(template, where) if template else None
        self._variables = _variables(self._template, template)
        self.eos_id = self._id_of("eos_token")
        self.pad_id = self._id_of("pad_token")
        own = () if self.eos_id is None else (self.eos_id,)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *stop_ids)))
        """Ids that end a completion, the end-of-sequence token's first."""

    @property
    def end_id(self) -> int:
        """The first id that ends a completion; raises as `check_end`."""
        self.check_end()
        return self.stop_ids[0]

    def check_end(self) -> None:
        """Raise ConfigError where no token ends a completion, for no answer would end by itself."""
        if not self.stop_ids:
            raise ConfigError(
                f"expected a token that ends an answer in {self._where}, got none",
                hint="set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
                path=self._where,
                missing="eos_token",
            )

    def check_model(self, vocab_size: int) -> None:
        """Raise ConfigError where a text gives ids that a model of `vocab_size` ids does not have; a model may have more ids than needed.

        Special tokens that end no answer may lie beyond, for a text gives them only where they are written out in it: Gemma 3 1B has
        one for images, which it cannot see.
        """
        special = {index for index, token in self._backend.get_added_tokens_decoder().items() if token.special}
        unseen = special.difference(self.stop_ids)
        beyond = {index: text for text, index in self._backend.get_vocab().items() if index >= vocab_size and index not in unseen}
        if beyond:
            first = min(beyond)
            raise ConfigError(
                f"expected token ids below the model's vocab_size of {vocab_size} in {self._where}, got {len(beyond)} beyond, the first "
                f"{first} ({beyond[first]!r})",
                hint="is the tokenizer that of another model, or were tokens added without resize_token_embeddings()?",
                path=self._where,
                vocab_size=vocab_size,
                got=first,
            )

    @property
    def vocab_size(self) -> int:
        """Number of ids this tokenizer can give; a model's embedding may be longer."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_texts(self) -> list[str]:
        """How its special tokens are written."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, special tokens written out in it included; nothing is added unless asked for (such as a leading bos)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """`encode` of each text, faster."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token the characters that it stands for, from (inclusive) and to (exclusive)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def text_of(self, token_id: int) -> str:
        """How one token is written; empty for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; ids without a token give nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as text, special tokens written out.

        Args:
            messages: with `role` and `content`.
            tools: definitions for templates that show them.
            add_generation_prompt: whether the text ends where the model begins to write.
            template_kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
            ConfigError: there is no template, it refuses the messages, or it reads no such variable.
        """
        if self._template is None:
            raise ConfigError(
                f"expected a chat template in {self._where}, got none",
                hint="set data.chat_template = false, or put a chat_template.jinja beside the tokenizer",
                path=self._where,
                missing="chat_template",
            )
        given = template_kwargs or {}
        if given:
            self.check_template_kwargs(given)
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.special, **given
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: a template that adds to a missing content
            raise ConfigError(
                f"the chat template in {self._where} refuses these messages: {error}",
                hint="check their roles and contents",
                path=self._where,
                refused=str(error),
            ) from error

    def check_template_kwargs(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError for a variable that the chat template does not read: Jinja itself would pass it over."""
        known = self._variables.difference(_OWN)
        if unknown := sorted(set(given) - known):
            raise ConfigError(
                f"expected variables that the chat template in {self._where} reads ({', '.join(sorted(known)) or 'it reads none'}), "
                f"got {', '.join(unknown)}",
                hint="check data.chat_template_kwargs",
                key="data.chat_template_kwargs",
                got=unknown,
            )

    def _id_of(self, name: str) -> int | None:
        return self._backend.token_to_id(self.special[name]) if name in self.special else None


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and `generation_config.json`; raises ConfigError.

    Takes milliseconds for a small vocabulary, a few tenths of a second for 150,000 tokens.
    """
    path = Path(directory)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"expected a fast tokenizer, got no tokenizer.json in {path}",
            hint="load it once with transformers.AutoTokenizer and save_pretrained() it into the model directory",
            path=str(path),
            missing="tokenizer.json",
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigError(f"expected a tokenizer in {file}, got: {error}", hint="is the file complete?", path=str(file)) from error
    backend.no_padding()
    backend.no_truncation()
    settings = _read_json(path / "tokenizer_config.json")
    special = {name: _content(settings[name]) for name in _SPECIAL if settings.get(name)}
    stops = _read_json(path / "generation_config.json").get("eos_token_id") or ()
    return Tokenizer(
        backend,
        special=special,
        template=_read_template(path, settings),
        stop_ids=[stops] if isinstance(stops, int) else stops,
        where=str(path),
    )


def _read_template(path: Path, settings: Mapping[str, Any]) -> str:
    """The template file, else the one inside the settings (one text, or several by name of which `default` is meant)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    inside = settings.get("chat_template") or ""
    if isinstance(inside, list):
        inside = {entry["name"]: entry["template"] for entry in inside}.get("default", "")
    return inside


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"expected JSON in {path}, got: {error.msg} (line {error.lineno})", hint="is the file complete?", path=str(path)
        ) from error


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model has written, for those who train on whole conversations."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


def _variables(template: jinja2.Template | None, source: str) -> frozenset[str]:
    """Names that a template looks for in what it is given."""
    if template is None:
        return frozenset()
    found = jinja2.meta.find_undeclared_variables(template.environment.parse(source))
    return frozenset(found - template.environment.globals.keys())
