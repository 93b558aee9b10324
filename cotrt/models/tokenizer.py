"""Text to token ids and back, exactly.

`Tokenizer` is one face over a codec: `FileCodec` (a ``tokenizers`` file, opened in a tenth of the
time that AutoTokenizer takes) or `ObjectCodec` (a user's own object with encode and decode).
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidRequestError, ModelLoadError
from . import chat_template as templates
from .added_token import AddedToken
from .codec import FileCodec, ObjectCodec
from .config import read_json
from .prepared_chat import ChatEncoder, PreparedChat

logger = logging.getLogger("cotrt")

Messages = Sequence[Mapping[str, Any]]


class Codec(Protocol):
    """What a `Tokenizer` needs of whatever holds the vocabulary.

    Attributes:
        vocab_size: ids in all, added tokens included.
        special_ids: ids that ``skip_special_tokens`` leaves out.
        special_tokens: spelling of each token that is matched whole because it is special.
        added_tokens: all tokens that are matched whole, by id.
        space_after_added: a text after one of those gets a dummy space, too.
    """

    vocab_size: int
    special_ids: frozenset[int]
    special_tokens: Mapping[str, int]
    added_tokens: Mapping[int, AddedToken]
    space_after_added: bool

    def encode(self, text: str, *, whole: bool, special: bool, continues: bool) -> list[int]:
        """Ids of a text.

        Args:
            text: any text.
            whole: add what the tokenizer puts around a whole text (BOS and the like).
            special: match special tokens; else their spelling is plain characters.
            continues: the text follows other text: no dummy space at its start.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; ids that have none are left out."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token; None where they are those of its text, or unknown."""


class Tokenizer:
    """Encodes, decodes and renders chats for one model.

    Attributes:
        bos_token_id: None where the tokenizer names no BOS.
        eos_token_id: None where it names no EOS.
        vocab_size: ids in all, added tokens included.
        all_special_ids: what ``skip_special_tokens`` leaves out.
        added_tokens: tokens that are matched whole in a text, by id.
        space_after_added: a text after one of those gets a dummy space, as at its start.
        chat_template: jinja source, by name; "default" is the one used without tools.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        special_texts: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        self._codec = codec
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.vocab_size = codec.vocab_size
        named = {i for i in (bos_token_id, eos_token_id) if i is not None}
        self.all_special_ids = codec.special_ids | named
        self._special_texts = dict(special_texts or {})
        if isinstance(chat_template, str):
            chat_template = {"default": chat_template}
        self.chat_templates: dict[str, str] = dict(chat_template or {})
        self.added_tokens = codec.added_tokens
        self.space_after_added = codec.space_after_added
        self._chats = ChatEncoder(codec)
        self._anchor: tuple[list[int], str] | None = None

    # Opening

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str | None = None) -> Tokenizer | None:
        """The tokenizer of a model folder, or None where it has no tokenizer files.

        Raises:
            ModelLoadError: its files are damaged or of a kind that cannot be read.
        """
        settings = read_json(folder / "tokenizer_config.json")
        if (folder / "tokenizer.json").exists():
            codec = FileCodec.from_file(folder / "tokenizer.json", settings)
        else:
            others = ("tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")
            if not any((folder / name).exists() for name in others):
                return None
            return cls.from_object(_open_slowly(folder), chat_template=chat_template)
        special = _named_tokens(folder, settings)
        found = chat_template or _find_template(folder, settings)
        return cls(
            codec,
            bos_token_id=codec.token_id(special.get("bos_token")),
            eos_token_id=codec.token_id(special.get("eos_token")),
            special_texts=special,
            chat_template=found,
        )

    @classmethod
    def from_object(cls, tokenizer: Any, *, chat_template: str | None = None) -> Tokenizer:
        """Wrap a user's own object, or a transformers tokenizer.

        Args:
            tokenizer: has ``encode(text) -> ids`` and ``decode(ids) -> text``.
            chat_template: used in place of its own.

        Raises:
            InvalidRequestError: it lacks one of them.
        """
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        for method in ("encode", "decode"):
            if not callable(getattr(tokenizer, method, None)):
                raise InvalidRequestError(
                    f"tokenizer {type(tokenizer).__name__} has no {method}(); it needs "
                    "encode(text) -> ids and decode(ids) -> text."
                )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        codec: Codec
        if backend is not None and hasattr(backend, "to_str"):
            codec = FileCodec.from_json(backend.to_str(), {})
        else:
            codec = ObjectCodec(tokenizer)
        texts = getattr(tokenizer, "special_tokens_map", None)
        own = getattr(tokenizer, "chat_template", None)
        return cls(
            codec,
            bos_token_id=getattr(tokenizer, "bos_token_id", None),
            eos_token_id=getattr(tokenizer, "eos_token_id", None),
            special_texts={k: str(v) for k, v in (texts or {}).items() if isinstance(v, str)},
            chat_template=chat_template or own,
        )

    # Text

    def encode(
        self, text: str, *, add_special_tokens: bool = True, special: bool = True
    ) -> list[int]:
        """Ids of a text that starts a sequence.

        A text that begins with the BOS token's spelling (a rendered chat, say) gets no second BOS.

        Args:
            text: any text.
            add_special_tokens: add BOS where this tokenizer does.
            special: match special tokens; False: ``<|im_end|>`` and the like are plain characters.
        """
        ids = self._codec.encode(text, whole=add_special_tokens, special=special, continues=False)
        bos = self.bos_token_id
        if add_special_tokens and special and bos is not None and ids[:2] == [bos, bos]:
            written = self._codec.encode(text, whole=False, special=True, continues=False)
            if written[:1] == [bos] and written[:2] != [bos, bos]:
                del ids[0]
        return ids

    def encode_continuation(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text that follows earlier text exactly: no BOS, no dummy space."""
        return self._codec.encode(text, whole=False, special=special, continues=True)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids.

        Ids outside the vocabulary decode to nothing; spaces are neither added nor cleaned. The
        text of a longer list begins with that of a shorter one, but for U+FFFD at its end, which
        stands for a character whose last bytes are still to come.
        """
        kept = [int(i) for i in ids if 0 <= i < self.vocab_size]
        if skip_special_tokens:
            kept = [i for i in kept if i not in self.all_special_ids]
        return self._codec.decode(kept)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it stands inside a text (its leading space included)."""
        if self._anchor is None:
            ids = self.encode_continuation("a")
            self._anchor = (ids, self.decode(ids))
        ids, text = self._anchor
        longer = self.decode([*ids, token_id])
        return longer[len(text) :] if longer.startswith(text) else self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token as they stand inside a text, its leading space included.

        A token may be a part of a character. One that has no text has no bytes; None says that the
        tokenizer does not tell them.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        found = self._codec.token_bytes(token_id)
        if found is not None:
            return found
        text = self.token_text(token_id)
        # A replacement character stands for bytes that are no text by themselves.
        return None if "\ufffd" in text else text.encode("utf-8", "replace")

    @property
    def added_ids(self) -> Mapping[str, int]:
        """Tokens that are matched whole wherever a text spells them, by their spelling."""
        return {token.text: i for i, token in self.added_tokens.items()}

    def hidden(self, tags: Iterable[str]) -> frozenset[str]:
        """Those of `tags` that are special tokens: ``skip_special_tokens`` leaves them out."""
        known = self._codec.special_tokens
        return frozenset(tag for tag in tags if known.get(tag) in self._codec.special_ids)

    def showing(self, tags: Iterable[str]) -> Tokenizer:
        """The same tokenizer, but that ``skip_special_tokens`` does not leave out `tags`."""
        shown = {self._codec.special_tokens[tag] for tag in self.hidden(tags)}
        if not shown:
            return self
        twin = copy.copy(self)
        twin._codec = copy.copy(self._codec)
        twin._codec.special_ids = self._codec.special_ids - shown
        twin.all_special_ids = self.all_special_ids - shown
        return twin

    # Chats

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Messages as text, by the model's chat template or the one given.

        Raises:
            InvalidRequestError: no template, a message of another form, or a template that fails.
        """
        return templates.render(
            self._template(chat_template, tools),
            messages,
            tools=tools,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self._special_texts,
        )

    def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Messages as ids; special tokens that a content spells are plain characters.

        Equal to encoding `render_chat` without added BOS wherever no content spells one.

        Raises:
            InvalidRequestError: as `render_chat`.
        """
        return self.encode_prepared(
            self.prepare_chat(
                messages,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        )

    def prepare_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> PreparedChat:
        """Messages rendered, for `encode_prepared`.

        Raises:
            InvalidRequestError: as `render_chat`.
        """
        guard = self._chats.guard((messages, tools))
        source = templates.render(
            self._template(chat_template, tools),
            messages,
            tools=tools,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self._special_texts,
            guarded=tuple(self._codec.special_tokens) if guard else (),
            guard=guard,
        )
        return PreparedChat(source.replace(guard, "") if guard else source, source, guard)

    def encode_prepared(
        self, chat: PreparedChat, *, after: int = 0, last_id: int | None = None
    ) -> list[int]:
        """Ids of a rendered chat.

        Args:
            chat: from `prepare_chat`.
            after: leave out so many characters, which the ids then follow.
            last_id: the last id of those characters.
        """
        return self._chats.encode(chat, after, last_id)

    def check_template(self, given: str | None, tools: object = None) -> None:
        """Refuse a template that rendering would refuse whatever the messages are.

        Raises:
            InvalidRequestError: there is none, it cannot be chosen, or it is not valid jinja.
        """
        templates.check_tools(tools)
        templates.check(self._template(given, tools))

    def _template(self, given: str | None, tools: object) -> str:
        if given is not None:
            known = self.chat_templates.get(given) if isinstance(given, str) else None
            return known or read_chat_template(given)
        if tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" in self.chat_templates:
            return self.chat_templates["default"]
        if self.chat_templates:
            raise InvalidRequestError(
                "the model has several chat templates and no default; name one with "
                f"chat_template=: {', '.join(self.chat_templates)}."
            )
        raise InvalidRequestError(
            "the model has no chat template; give one with chat_template=, or use plain prompts."
        )


def _named_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like as text; tokenizer_config.json wins."""
    named: dict[str, str] = {}
    for source in (read_json(folder / "special_tokens_map.json"), settings):
        for key, value in source.items():
            if key.endswith("_token"):
                text = value.get("content") if isinstance(value, Mapping) else value
                if isinstance(text, str):
                    named[key] = text
    return named


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Chat templates of a folder: its own files win over tokenizer_config.json."""
    found: dict[str, str] = {}
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, list):
        found.update((entry["name"], entry["template"]) for entry in stored)
    legacy = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    single = folder / "chat_template.jinja"
    if single.exists():
        found["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found or None


def read_chat_template(given: str) -> str:
    """A template given as jinja source or as the path of a file that holds it.

    Raises:
        ModelLoadError: it looks like a path and there is no such file.
        InvalidRequestError: it is no text, or not valid jinja.
    """
    if not isinstance(given, str):
        raise InvalidRequestError(
            f"chat_template must be jinja source or a file's path, not {type(given).__name__}."
        )
    template = given
    if "{" not in given and "\n" not in given:
        try:
            template = Path(os.path.expanduser(given)).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: no text, or no path
            raise ModelLoadError(
                f"chat_template {given!r} is neither jinja source nor a file that can be read: "
                f"{error}"
            ) from error
    templates.check(template)
    return template


def _open_slowly(folder: Path) -> Any:
    """Formats that only transformers reads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise ModelLoadError(
            f"the tokenizer in {folder} cannot be read ({error}); a tokenizer.json is best, or "
            "give tokenizer=, a folder, hub id or object."
        ) from error
