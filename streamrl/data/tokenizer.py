r"""A tokenizer read from a Hugging Face model directory without importing transformers (which takes seconds).

`tokenizers` does the encoding, jinja2 the chat template; both give what `AutoTokenizer` gives (tested on it), except that no content of a
message becomes a control token.

A message's content may hold the text of such a token, `<|im_end|>` say: a tool has read it on some page, or somebody wants to forge turns.
The tokens that the template itself writes are those tokens; in a content they are the characters that they are written with. So contents
are veiled before the template is rendered: such a text is replaced by two characters, which become ordinary tokens when the rendered text
is encoded.

```text
user: "<|im_end|>"   ->  <|im_start|>user\n??<|im_end|>\n   ->  [im_start] user \n  <  |im_end|>  [im_end] \n
```
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import tokenizers

from streamrl.data.chat_templates import DEFAULT, SPECIAL, ChatTemplates
from streamrl.data.messages import plain_messages, plain_tools
from streamrl.errors import ConfigError

_MARK = "\ufdd0"
"""A noncharacter of Unicode, which no text should hold; one that does has it veiled too."""
_FIRST = 0xE000
"""The character behind a mark says which text it stands for; Unicode leaves 6,400 from here on to whoever wants them."""
_MOST = 6399
_BARS = (("<|", "<｜"), ("|>", "｜>"))
"""Beginnings and ends of tokens that some vocabularies do not call special, though their templates set turns apart with them."""


class Piece(NamedTuple):
    """A part of a rendered text."""

    start: int
    """Its place in the text, in characters."""
    text: str
    veiled: bool
    """True for the text of a control token in some content, which is to be encoded as any other text."""


class ControlTokens:
    """The control tokens of one vocabulary.

    Args:
        texts: how they are written.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self._veiled = (_MARK, *longest_first[:_MOST])
        self._numbers = {text: number for number, text in enumerate(self._veiled)}
        self._hidden = re.compile("|".join(map(re.escape, self._veiled)))
        self._shown = re.compile(f"{_MARK}(.)", re.DOTALL)

    def veil(self, value: Any, *, only_marks: bool = False) -> Any:
        """A text, or the texts in lists and tables, with control tokens replaced.

        Args:
            value: what somebody has written.
            only_marks: leave control tokens as they are, and replace only what stands for one.
        """
        if isinstance(value, str):
            if only_marks:
                return value.replace(_MARK, _MARK + chr(_FIRST))
            return self._hidden.sub(lambda found: _MARK + chr(_FIRST + self._numbers[found[0]]), value)
        if isinstance(value, Mapping):
            table = cast("Mapping[Any, Any]", value)
            return {self.veil(name, only_marks=only_marks): self.veil(one, only_marks=only_marks) for name, one in table.items()}
        if isinstance(value, list | tuple):
            return [self.veil(one, only_marks=only_marks) for one in cast("Sequence[Any]", value)]
        return value

    def pieces(self, text: str) -> Iterator[Piece]:
        """A rendered text in its parts, in order; together they are all of it."""
        place = 0
        for found in self._shown.finditer(text):
            number = ord(found[1]) - _FIRST
            if 0 <= number < len(self._veiled):
                if found.start() > place:
                    yield Piece(place, text[place : found.start()], veiled=False)
                yield Piece(found.start(), self._veiled[number], veiled=True)
                place = found.end()
        if place < len(text):
            yield Piece(place, text[place:], veiled=False)

    def unveiled(self, text: str) -> str:
        """A rendered text as people read it."""
        return "".join(piece.text for piece in self.pieces(text)) if has_marks(text) else text


def has_marks(text: str) -> bool:
    """Tell whether something in a rendered text is veiled."""
    return _MARK in text


def is_barred(text: str) -> bool:
    """Tell whether a token is written as those that set turns apart, such as `<｜User｜>`."""
    begins, ends = _BARS
    return text.startswith(begins) or text.endswith(ends)


TEMPLATE_FILE, TEMPLATES_DIR = "chat_template.jinja", "additional_chat_templates"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE, "generation_config.json")
"""Names of the files that `load_tokenizer` reads, besides TEMPLATES_DIR."""


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: the encoder.
        special: the texts of `bos_token`, `eos_token`, `pad_token` and others, where there are any.
        template: chat template (Jinja), or empty; or several by name.
        stop_ids: further ids that end a completion, besides the end-of-sequence token's.
        where: directory it came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str],
        template: str | Mapping[str, str],
        stop_ids: Sequence[int] = (),
        where: str = "",
    ) -> None:
        self.special = dict(special)
        self._backend = backend
        self._where = where
        sources = {DEFAULT: template} if isinstance(template, str) and template else dict(template or {})
        self.chat_template = "\n".join(sources.values())
        """The source of its templates (Jinja), one after the other, or empty."""
        self._templates = ChatTemplates(sources, special, where)
        self.eos_id = self._id_of("eos_token")
        self.pad_id = self._id_of("pad_token")
        own = () if self.eos_id is None else (self.eos_id,)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *stop_ids)))
        """Ids that end a completion, the end-of-sequence token's first."""
        added = backend.get_added_tokens_decoder()
        self.control_texts = tuple(
            token.content for number, token in added.items() if token.special or number in self.stop_ids or is_barred(token.content)
        )
        """Texts of its control tokens, which no content of a message becomes."""
        self._control = ControlTokens(self.control_texts)

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

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, control tokens written out in it included; nothing is added unless asked for (such as a leading bos).

        In a text that `apply_chat_template` has given, the contents of messages give no control tokens.
        """
        if add_special_tokens or not has_marks(text):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.encode_with_offsets(text)[0]

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """`encode` of each text, faster."""
        found = [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]
        for place, text in enumerate(texts):
            if has_marks(text) and not add_special_tokens:
                found[place] = self.encode(text)
        return found

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token the characters that it stands for, from (inclusive) and to (exclusive)."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for piece in self._control.pieces(text):
            # In two parts it is no control token; each stands at one of the two characters that veil it.
            parts = (piece.text[:1], piece.text[1:]) if piece.veiled else (piece.text,)
            for place, part in enumerate(parts, piece.start):
                encoding = self._backend.encode(part, add_special_tokens=False)
                ids += encoding.ids
                if piece.veiled:
                    offsets += [(place, place + 1)] * len(encoding.ids)
                else:
                    offsets += [(place + start, place + end) for start, end in encoding.offsets]
        return ids, offsets

    def unveiled(self, rendered: str) -> str:
        """A text that `apply_chat_template` has given, as people read it: encoded, its contents may become control tokens."""
        return self._control.unveiled(rendered)

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
        own_turns: bool = False,
    ) -> str:
        """Messages as text for `encode`: the template's special tokens written out, those of contents veiled.

        All that renders conversations comes here: rows, chats, the gateway, and whole conversations as training data.

        Args:
            messages: with `role` and `content`, in any form that `streamrl.data.messages` knows.
            tools: definitions, as a list of tables or its JSON text.
            add_generation_prompt: whether the text ends where the model begins to write.
            template_kwargs: further variables of the template, such as `enable_thinking`.
            own_turns: whether the assistant's messages are what the model is to write, so that control tokens in them are tokens.

        Raises:
            SchemaError: messages or tools of another form, or a message that says nothing.
            ConfigError: there is no template, it refuses the messages, shows no tools where there are some, or reads no such variable.
        """
        plain, definitions = plain_messages(messages), plain_tools(tools)
        veiled = [self._control.veil(one, only_marks=own_turns and one["role"] == "assistant") for one in plain]
        return self._templates.render(
            veiled,
            self._control.veil(definitions),
            add_generation_prompt=add_generation_prompt,
            template_kwargs=self._control.veil(template_kwargs or {}),
        )

    def check_shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raise ConfigError where the chat template leaves these tools, or the calls of a message, out of the text without a word."""
        self._templates.check_shown(plain_messages(messages), plain_tools(tools), template_kwargs or {})

    def check_template_kwargs(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError for a variable that the chat template does not read: Jinja itself would pass it over."""
        self._templates.check_template_kwargs(given)

    def _id_of(self, name: str) -> int | None:
        return self._backend.token_to_id(self.special[name]) if name in self.special else None


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read TOKENIZER_FILES and the templates in TEMPLATES_DIR; raises ConfigError.

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
    settings = {**_read_json(path / "special_tokens_map.json"), **{key: value for key, value in settings.items() if value is not None}}
    special = {name: _content(settings[name]) for name in SPECIAL if settings.get(name)}
    stops = _read_json(path / "generation_config.json").get("eos_token_id") or ()
    return Tokenizer(
        backend,
        special=special,
        template=_read_templates(path, settings),
        stop_ids=[stops] if isinstance(stops, int) else stops,
        where=str(path),
    )


def _read_templates(path: Path, settings: Mapping[str, Any]) -> str | dict[str, str]:
    """The template files by name, else what the settings hold: one text, or several by name."""
    files = {file.stem: file for file in sorted((path / TEMPLATES_DIR).glob("*.jinja"))}
    if (path / TEMPLATE_FILE).is_file():
        files[DEFAULT] = path / TEMPLATE_FILE
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    inside = settings.get("chat_template") or ""
    return {entry["name"]: entry["template"] for entry in inside} if isinstance(inside, list) else inside


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
