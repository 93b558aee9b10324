"""Scripted models on real tokenizers: SentencePiece-like, byte-level, and one with special tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cotrt import LLM
from cotrt.testing import ScriptedModel

KINDS = ("pieces", "bytes", "added", "special")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MARK = "<assistant>"


def tokenizer_folder(folder: Path, kind: str) -> Path:
    """A tokenizer of one of `KINDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "pieces":
        vocab = {"<unk>": 0, "<eos>": 1}
        for byte in range(256):
            vocab[f"<0x{byte:02X}>"] = len(vocab)
        for code in (0x2581, *range(33, 127)):
            vocab.setdefault(chr(code), len(vocab))
        merges = []
        for word in ("\u2581the", "</", "think", '":', "\u2581two"):
            for end in range(2, len(word) + 1):
                if word[:end] not in vocab:
                    vocab[word[:end]] = len(vocab)
                    merges.append((word[: end - 1], word[end - 1]))
        made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        made.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {letter: i for i, letter in enumerate(letters)}
        merges = []
        for left, right in ((">", "{"), ("<", "/"), ("t", "h"), ("Ċ", "Ċ"), ('"', ":")):
            vocab[left + right] = len(vocab)
            merges.append((left, right))
        made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<eos>", *(TAGS if kind == "special" else ())])
        if kind == "added":
            made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def saying(folder: Path, text: str, template: str, **options: Any) -> LLM:
    """An LLM that writes `text` after the last MARK of its prompt (or goes on in it), then ends."""
    from cotrt.models.tokenizer import Tokenizer as Own

    own = Own.from_folder(folder)
    assert own is not None
    ids = own.encode_continuation(text)
    eos = own.eos_token_id
    assert eos is not None
    context = own.encode_continuation("x")
    said = [own.decode([*context, *ids[:count]])[1:] for count in range(len(ids) + 1)]

    def next_probs(path: Sequence[int]) -> Mapping[int, float]:
        after = own.decode(path).rpartition(MARK)[2]
        for count in range(len(ids), -1, -1):
            if after == said[count]:
                return {(ids[count] if count < len(ids) else eos): 1.0}
        # The prompt has opened a thought: it is no part of the text.
        opened = after.removeprefix("\n").removeprefix("<think>").removeprefix("\n")
        for count in range(len(ids), -1, -1):
            if opened == said[count]:
                return {(ids[count] if count < len(ids) else eos): 1.0}
        return {eos: 1.0}

    model = ScriptedModel(
        next_probs,
        vocab_size=own.vocab_size,
        eos_token_id=eos,
        tokenizer=str(folder),
        max_model_len=4096,
    )
    return LLM(model, kv_cache_memory_bytes=1 << 20, chat_template=template, **options)
