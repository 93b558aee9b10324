"""Log-probabilities over HTTP: each token with its own bytes, and by one name everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import scripted
from server_rig import running
from tokens import byte_tokenizer, piece_tokenizer

from cotrt import LLM
from cotrt.models.tokenizer import Tokenizer

TEXT = " he é🦊 w"


def make(kind: str, folder: Path) -> tuple[LLM, list[int], Tokenizer]:
    if kind in ("metaspace", "legacy"):
        folder = piece_tokenizer(folder / kind, style=kind)
    else:
        folder = byte_tokenizer(folder / kind, eos_token="<|end|>")
    reader = Tokenizer.from_folder(folder)
    assert reader is not None
    start = len(reader.encode("he"))
    ids = [*reader.encode_continuation(TEXT), reader.eos_token_id or 0]
    other = reader.encode_continuation("🦊")

    def probs(path: list[int]) -> dict[int, float]:
        at = len(path) - start
        want = ids[min(max(at, 0), len(ids) - 1)]
        return {other[at % 4]: 0.2, want: 0.7}

    llm = scripted(
        probs,
        vocab_size=reader.vocab_size,
        eos_token_id=reader.eos_token_id,
        tokenizer=str(folder),
        chat_template="{{ bos_token if bos_token else '' }}{{ messages[0].content }}",
    )
    return llm, ids, reader


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["metaspace", "legacy", "bytes"])
def test_each_token_has_its_own_bytes(kind: str, stream: bool, tmp_path: Path) -> None:
    llm, ids, reader = make(kind, tmp_path)
    with running(llm) as rig:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "he"}]}
        asked |= {"temperature": 0, "logprobs": True, "top_logprobs": 3}
        if stream:
            events = rig.events("/v1/chat/completions", {**asked, "stream": True})
            parts = [e["choices"][0] for e in events]
            entries = [x for c in parts if c["logprobs"] for x in c["logprobs"]["content"]]
            text = "".join(c["delta"].get("content") or "" for c in parts)
        else:
            choice = rig.post("/v1/chat/completions", asked)["choices"][0]
            entries, text = choice["logprobs"]["content"], choice["message"]["content"]
    assert text == TEXT == "".join(entry["token"] for entry in entries)
    own = [bytes(entry["bytes"]) for entry in entries]
    assert b"".join(own[:-1]) == TEXT.encode()
    assert own[-1] == reader.decode([ids[-1]]).encode()
    assert own == [reader.token_bytes(token) for token in ids]
    for entry in entries:
        named = {(top["token"], bytes(top["bytes"])) for top in entry["top_logprobs"]}
        assert (entry["token"], bytes(entry["bytes"])) in named
        assert any(each in "🦊".encode() for _, raw in named for each in raw)


@pytest.mark.parametrize("kind", ["metaspace", "legacy", "bytes"])
def test_completions_name_a_token_alike_in_both_lists(kind: str, tmp_path: Path) -> None:
    llm, _, _ = make(kind, tmp_path)
    with running(llm) as rig:
        asked = {"prompt": "he", "temperature": 0, "max_tokens": 40, "logprobs": 3, "echo": True}
        choice = rig.post("/v1/completions", asked)["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == "he" + TEXT
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        assert value is None or top[token] == value
