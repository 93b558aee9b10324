"""Padding ids and BOS over HTTP, on checkpoints with a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from api_helpers import ABCDEFGHIJ, COLON, END, RIG_CHAIN, make_rig, put_bos_first
from server_rig import running

from cotrt import LLM

GREEDY = {"temperature": 0, "max_tokens": 40, "model": "rig"}
PADDING = 49152 + 60


def serving(folder: Path) -> Any:
    llm = LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 24)
    return running(llm, served_model_names=("rig",))


def test_ids_beyond_the_tokenizer_have_no_text_and_fail_nothing(tmp_path: Path) -> None:
    """CASES B29 over HTTP: whole, streamed, echoed, with log-probabilities, in a chat."""
    chain = [COLON, *ABCDEFGHIJ[:2], PADDING, *ABCDEFGHIJ[2:], END]
    with serving(make_rig(tmp_path / "rig", chain, extra_vocab=64)) as rig:
        body = {"prompt": "go:", "logprobs": 5, **GREEDY}
        choice = rig.post("/v1/completions", body)["choices"][0]
        assert choice["text"] == " ABCDEFGHIJ" and choice["finish_reason"] == "stop"
        assert "".join(choice["logprobs"]["tokens"][:-1]) == choice["text"]
        assert len(choice["logprobs"]["token_logprobs"]) == len(chain) - 1
        events = rig.events("/v1/completions", {**body, "stream": True})
        assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == choice["text"]
        given = {**body, "prompt": [COLON, PADDING, COLON], "echo": True, "return_token_ids": True}
        echoed = rig.post("/v1/completions", given)["choices"][0]
        assert echoed["text"] == ":: ABCDEFGHIJ"
        assert echoed["prompt_token_ids"] == [COLON, PADDING, COLON]
        chat = {"messages": [{"role": "user", "content": "go"}], "logprobs": True, **GREEDY}
        chat |= {"top_logprobs": 5, "max_tokens": 3, "logit_bias": {str(PADDING): 100}}
        (said,) = rig.post("/v1/chat/completions", chat)["choices"]
        assert said["message"]["content"] == ""
        assert [entry["token"] for entry in said["logprobs"]["content"]] == [""] * 3
        assert rig.call("GET", "/health")[0] == 200


def test_one_bos_in_chats_and_texts_and_none_in_ids(tmp_path: Path) -> None:
    """CASES B30 over HTTP: ids and usage are those of transformers."""
    from transformers import AutoTokenizer

    folder = put_bos_first(make_rig(tmp_path / "rig", RIG_CHAIN), tmp_path / "bos")
    reference = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Go go:"}]
    options = {"add_generation_prompt": True}
    text = reference.apply_chat_template(messages, tokenize=False, **options)
    wanted = reference.apply_chat_template(messages, **options)["input_ids"]
    plain = reference("Go go:")["input_ids"]
    assert plain[0] == 1 and plain.count(1) == 1
    with serving(folder) as rig:
        more = {"return_token_ids": True, **GREEDY, "max_tokens": 1}
        chat = rig.post("/v1/chat/completions", {"messages": messages, **more})
        assert chat["prompt_token_ids"] == wanted
        assert chat["usage"]["prompt_tokens"] == len(wanted)
        for prompt, ids in [("Go go:", plain), (text, wanted), (plain[1:], plain[1:])]:
            reply = rig.post("/v1/completions", {"prompt": prompt, **more})
            assert reply["choices"][0]["prompt_token_ids"] == ids
            assert reply["usage"]["prompt_tokens"] == len(ids)
        assert rig.post("/tokenize", {"prompt": "Go go:"})["tokens"] == plain
