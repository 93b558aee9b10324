"""The bytes of single tokens, as their decoder makes text of them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.lru_cache(maxsize=1)
def byte_alphabet() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others have the characters from U+0100 on,
    in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    shown = {chr(byte): byte for byte in plain}
    shown.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return shown


def piece_bytes(piece: str, *, is_byte_level: bool, has_byte_pieces: bool) -> bytes | None:
    """Bytes of a token by its spelling in the vocabulary; None where only a decoder knows.

    Args:
        piece: as the vocabulary spells it.
        is_byte_level: its characters stand for bytes, as in GPT-2's vocabulary.
        has_byte_pieces: a piece like ``<0xE2>`` is that byte, as in SentencePiece's.
    """
    if has_byte_pieces and (found := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(found[1], 16)])
    if is_byte_level:
        alphabet = byte_alphabet()
        if all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
    return None


def decoder_kinds(decoder: Any) -> frozenset[str]:
    """Types of the parts of a ``tokenizers`` decoder."""
    if decoder is None:
        return frozenset()
    found, ahead = set(), [json.loads(decoder.__getstate__())]
    while ahead:
        part = ahead.pop()
        if isinstance(part, dict):
            found.add(str(part.get("type")))
            ahead += part.get("decoders", [])
    return frozenset(found)
