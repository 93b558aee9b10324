"""Tokenizers and templates of several kinds, and a model that answers by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from api_helpers import scripted
from tokenizers import AddedToken, Tokenizer
from tokens import byte_tokenizer, piece_tokenizer

from cotrt import LLM
from cotrt.models.tokenizer import Tokenizer as OurTokenizer

LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[ {{ m.content }} /]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
# Llama 2's own has a space before the end, which its model does not say: each turn rewrites it.
SPACED = LLAMA.replace("}}</s>", "}} </s>")
# The reply follows a tag at once, as Mistral's and Zephyr's do; in the bare form it is not trimmed.
TAGS = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<e>\n"
    "{% else %}<a>{{ m.content | trim }}<e>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
BARE = TAGS.replace(" | trim", "")
# As Phi 3's, whose tags swallow the line's end after them.
LINES = TAGS.replace("<u>", "<u>\n").replace("<a>", "<a>\n")
PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer with its template.

    Attributes:
        style: of `piece_tokenizer`, or "bytes".
        end: the token that ends a reply.
        reply: what the model says; "" where it ends at once.
        tags: spellings of further added tokens.
        special: those are special tokens.
        rstrip: those swallow white space.
    """

    style: str
    template: str
    end: str
    reply: str = " hello w"
    tags: tuple[str, ...] = ()
    special: bool = True
    rstrip: bool = False


MARKS = ("<u>", "<a>", "<e>")
KINDS = {
    "llama": Kind("legacy", LLAMA, "</s>"),
    "llama, spaced": Kind("legacy", SPACED, "</s>"),
    "llama with a fox": Kind("legacy", LLAMA, "</s>", " he🦊 w"),
    "metaspace": Kind("metaspace", LLAMA, "</s>"),
    "special tags": Kind("legacy", TAGS, "<e>", tags=MARKS),
    "plain tags": Kind("legacy", TAGS, "<e>", tags=MARKS, special=False),
    "tags and a text that is not trimmed": Kind("legacy", BARE, "<e>", tags=MARKS),
    "tags that swallow": Kind("legacy", LINES, "<e>", tags=MARKS, rstrip=True),
    "swallowing at the start only": Kind("metaspace", LINES, "<e>", "he w", MARKS, rstrip=True),
    "bytes": Kind("bytes", PLAIN, "<|end|>", "hé 🦊"),
    "bytes with tags": Kind("bytes", TAGS, "<e>", "hé 🦊", MARKS),
}


def make_tokenizer(kind: Kind, folder: Path) -> Path:
    if kind.style == "bytes":
        byte_tokenizer(folder, eos_token=kind.end)
    else:
        piece_tokenizer(folder, style=kind.style, eos_token=kind.end)
    if kind.tags:
        path = str(folder / "tokenizer.json")
        made = Tokenizer.from_file(path)
        given = [
            AddedToken(tag, special=kind.special, rstrip=kind.rstrip, normalized=False)
            for tag in kind.tags
        ]
        if kind.special:
            made.add_special_tokens(given)
        else:
            made.add_tokens(given)
        made.save(path)
    return folder


def talker(kind: Kind, folder: Path, **options: object) -> LLM:
    """An LLM that gives the kind's reply to every message."""
    folder = make_tokenizer(kind, folder)
    reader = OurTokenizer.from_folder(folder)
    assert reader is not None and reader.eos_token_id is not None
    said = [*reader.encode_continuation(kind.reply), reader.eos_token_id]
    headers = [
        reader.encode_chat([{"role": "user", "content": c}], chat_template=kind.template)
        for c in ("he", "w")
    ]
    same = 0
    while headers[0][-1 - same] == headers[1][-1 - same]:
        same += 1
    header = headers[0][-same:]

    def probs(path: Sequence[int]) -> dict[int, float]:
        for done in range(len(said)):
            begin = len(path) - done
            if list(path[begin:]) == said[:done] and list(path[:begin])[-same:] == header:
                return {said[done]: 1.0}
        return {said[-1]: 1.0}

    return scripted(
        probs,
        vocab_size=reader.vocab_size,
        eos_token_id=reader.eos_token_id,
        tokenizer=str(folder),
        chat_template=kind.template,
        **options,
    )
