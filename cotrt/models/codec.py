"""What holds a vocabulary: a ``tokenizers`` file, or a user's own object."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError


class FileCodec:
    """A ``tokenizers`` tokenizer, with variants made from its JSON when they are first needed.

    ``tokenizers`` has no argument for "special tokens as plain text" or "no dummy space": they are
    properties of a tokenizer, so each combination is a tokenizer of its own, never changed after
    it is made, and so safe to use from several threads.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._source = source
        self._variants: dict[tuple[bool, bool], Any] = {(True, False): tokenizer}
        self._lock = threading.Lock()
        self._main = tokenizer
        # Ids and not entries: added tokens may lie beyond a gap.
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size: int = max(
            tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1
        )
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens: Mapping[str, int] = {
            token.content: i for i, token in added.items() if token.special and token.content
        }
        self.added_tokens: Mapping[str, int] = {
            token.content: i for i, token in added.items() if token.content
        }
        layout = {
            part: _state(getattr(tokenizer, part)) for part in ("normalizer", "pre_tokenizer")
        }
        self._has_dummy_space = _without_dummy_space(layout) is not None
        self.space_after_special = self._has_dummy_space and not _only_first(layout)

    @classmethod
    def from_file(cls, path: Path, settings: Mapping[str, Any]) -> FileCodec:
        """Open a tokenizer.json.

        Args:
            path: of the file.
            settings: tokenizer_config.json, whose added tokens count too. ``add_bos_token``
                does not: the file itself says what it adds, as in transformers.

        Raises:
            ModelLoadError: the file is damaged.
        """
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        return cls.from_json(source, settings, str(path))

    @classmethod
    def from_json(
        cls, source: str, settings: Mapping[str, Any], where: str = "tokenizer"
    ) -> FileCodec:
        """Open the contents of a tokenizer.json, as `from_file`."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(source)
        except Exception as error:
            raise ModelLoadError(
                f"{where} is not a tokenizer that can be read ({error}): it is damaged or "
                "half-downloaded; get it again."
            ) from error
        changed = _add_configured_tokens(tokenizer, settings)
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            changed = True
        return cls(tokenizer, tokenizer.to_str() if changed else source)

    def token_id(self, text: str | None) -> int | None:
        """The id of a token by its spelling."""
        if text is None:
            return None
        found: int | None = self._main.token_to_id(text)
        return found

    def encode(self, text: str, *, whole: bool, special: bool, continues: bool) -> list[int]:
        # A text that spells no special token is the same either way.
        if not special and not any(token in text for token in self.special_tokens):
            special = True
        tokenizer = self._variant(special, continues and self._has_dummy_space)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=whole).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        text: str = self._main.decode(ids, skip_special_tokens=False)
        return text

    def _variant(self, special: bool, bare: bool) -> Any:
        key = (special, bare)
        found = self._variants.get(key)
        if found is None:
            from tokenizers import Tokenizer

            with self._lock:
                source = self._source
                if bare:
                    source = json.dumps(_without_dummy_space(json.loads(source)))
                found = Tokenizer.from_str(source)
                found.encode_special_tokens = not special
                self._variants[key] = found
        return found


def _state(part: Any) -> Any:
    """The JSON of a normaliser or pre-tokenizer, without reading the whole vocabulary again."""
    return None if part is None else json.loads(part.__getstate__())


def _without_dummy_space(layout: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer without the space it puts before a text; None where it puts none."""
    changed = False

    def walk(part: Any) -> Any:
        nonlocal changed
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        if kind == "Sequence":
            key = "normalizers" if "normalizers" in part else "pretokenizers"
            kept = [walk(inner) for inner in part.get(key, [])]
            return {**part, key: [inner for inner in kept if inner is not None]}
        if kind == "Prepend":
            changed = True
            return None
        if kind == "Metaspace" and _prepends(part):
            changed = True
            rest = {k: v for k, v in part.items() if k != "add_prefix_space"}
            return {**rest, "prepend_scheme": "never"}
        if kind == "ByteLevel" and part.get("add_prefix_space"):
            changed = True
            return {**part, "add_prefix_space": False}
        return part

    out = {**layout}
    for key in ("normalizer", "pre_tokenizer"):
        out[key] = walk(layout.get(key))
    return out if changed else None


def _prepends(metaspace: Mapping[str, Any]) -> bool:
    scheme = metaspace.get("prepend_scheme", "always")
    return scheme != "never" and metaspace.get("add_prefix_space", True) is not False


def _only_first(layout: Mapping[str, Any]) -> bool:
    """Whether the dummy space comes at a text's start only, and not after special tokens too."""
    return '"prepend_scheme": "first"' in json.dumps(layout.get("pre_tokenizer"))


def _add_configured_tokens(tokenizer: Any, settings: Mapping[str, Any]) -> bool:
    """Tokens that tokenizer_config.json knows and tokenizer.json lacks; whether there were any."""
    from tokenizers import AddedToken

    have = tokenizer.get_added_tokens_decoder()
    missing = []
    for key, entry in sorted(
        (settings.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
    ):
        if int(key) not in have and isinstance(entry, Mapping):
            flags = {k: v for k, v in entry.items() if k in ("lstrip", "rstrip", "normalized")}
            flags.update(special=entry.get("special", False))
            missing.append(AddedToken(entry["content"], **flags))
    if missing:
        tokenizer.add_tokens(missing)
    return bool(missing)


class ObjectCodec:
    """A user's own tokenizer object; what it cannot do is not pretended."""

    space_after_special = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        size = getattr(tokenizer, "vocab_size", None)
        with contextlib.suppress(TypeError):
            size = len(tokenizer)
        # Without a size every id is passed on, and the object says what it is.
        self.vocab_size: int = size if isinstance(size, int) else 1 << 31
        self.special_ids = frozenset(getattr(tokenizer, "all_special_ids", None) or ())
        texts = getattr(tokenizer, "all_special_tokens", None) or ()
        ids = getattr(tokenizer, "all_special_ids", None) or ()
        self.special_tokens: Mapping[str, int] = dict(zip(texts, ids, strict=False))
        self.added_tokens: Mapping[str, int] = self.special_tokens
        self._takes_flag = _accepts(tokenizer.encode, "add_special_tokens")
        self._takes_skip = _accepts(tokenizer.decode, "skip_special_tokens")
        self._takes_split = _accepts(tokenizer.encode, "split_special_tokens")

    def encode(self, text: str, *, whole: bool, special: bool, continues: bool) -> list[int]:
        flags: dict[str, bool] = {}
        if self._takes_flag:
            flags["add_special_tokens"] = whole
        if not special and self._takes_split:
            flags["split_special_tokens"] = True
        return [int(i) for i in self._tokenizer.encode(text, **flags)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        flags = {"skip_special_tokens": False} if self._takes_skip else {}
        return str(self._tokenizer.decode(list(ids), **flags))


def _accepts(function: Any, name: str) -> bool:
    import inspect

    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
