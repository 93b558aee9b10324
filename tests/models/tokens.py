"""Small tokenizers of the kinds that models come with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write(folder: Path, tokenizer: Any, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_tokenizer(folder: Path, *, bos: bool = False, **settings: Any) -> Path:
    """Byte-level, as GPT-2's: ids 0 to 255 are bytes, then <|start|> and <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    if bos:
        tokenizer.post_processor = post.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 256)]
        )
        settings.setdefault("bos_token", "<|start|>")
    return write(folder, tokenizer, **{k: v for k, v in settings.items() if v is not None})


def piece_tokenizer(folder: Path, *, style: str = "metaspace", **settings: Any) -> Path:
    """SentencePiece-like, with a dummy space before a text, bytes for what it does not know."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁h", "▁he", "he", "ll", "▁w", "[", "]", "/"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "h"), ("▁h", "e"), ("h", "e"), ("l", "l"), ("▁", "w")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if style == "legacy":  # as Llama 2
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:  # as Mistral 0.3
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = post.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    specials = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(specials)
    return write(folder, tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **settings})
