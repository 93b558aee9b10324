"""One continuation of a conversation: the same ids by whatever way, or nothing has changed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import KINDS, talker

from cotrt import LLM, Branch, InvalidRequestError, SamplingParams
from cotrt.program.chat import Chat

MESSAGES = ["he", "w he", "[ x /]", "he\nhe", "🦊 é"]


@pytest.mark.parametrize("name", KINDS)
def test_every_turn_has_the_ids_of_the_whole_conversation(name: str, tmp_path: Path) -> None:
    """Where the model spells its replies as the template does, nothing tells turns from a whole."""
    kind = KINDS[name]
    with talker(kind, tmp_path / "t") as llm:
        chat = llm.start_chat()
        for turn, message in enumerate(MESSAGES):
            length, before = len(chat.branch), llm.metrics["prompt_tokens_computed"]
            output = chat.send(message, max_tokens=40).result()
            assert output.finish_reason == "stop" and output.text.strip() == kind.reply.strip()
            new = len(chat.branch) - length - len(output.token_ids)
            rewritten = "spaced" in name and turn > 0
            assert llm.metrics["prompt_tokens_computed"] - before == new + rewritten
            whole = llm.tokenizer.encode_chat(chat.messages[:-1])
            if "not trimmed" not in name:
                assert chat.branch.token_ids == [*whole, *output.token_ids], turn


@pytest.mark.parametrize("name", KINDS)
def test_a_reply_that_was_cut_is_closed_with_the_ids_of_the_whole(
    name: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    with talker(kind, tmp_path / "t") as llm:
        chat = llm.start_chat()
        chat.send("he", max_tokens=2).result()
        held = chat.branch.token_ids
        chat.send("w", max_tokens=40).result()
        assert chat.branch.token_ids[: len(held)] == held
        rest = llm.tokenizer.encode_chat([{"role": "user", "content": "w"}])
        # What follows the reply's end is encoded as in a conversation of its own.
        tail = rest[1:] if kind.style != "bytes" and rest[0] == 1 else rest
        ids = chat.branch.token_ids[: -len(chat._reply._state.tokens)]
        assert ids[-len(tail) :] == tail


class Failure:
    """Fails inside of a start, in one of several places."""

    def __init__(self, llm: LLM, place: str, error: Callable[[], None]) -> None:
        self._llm, self._place, self._error = llm, place, error

    def __enter__(self) -> None:
        runtime = self._llm._runtime
        table, engine = runtime.engine.table, runtime.engine
        owner, name = {
            "encode": (runtime.tokenizer, "encode_prepared"),
            "cut": (table, "cut"),
            "extend": (table, "extend"),
            "start": (engine, "start_generation"),
            "after": (engine, "start_generation"),
        }[self._place]
        self._patch = pytest.MonkeyPatch()
        real = getattr(owner, name)
        armed = [True]

        def failing(*args: Any, **kwargs: Any) -> Any:
            if not armed or self._place in ("cut", "start", "encode"):
                if armed:
                    armed.clear()
                    self._error()
                return real(*args, **kwargs)
            made = real(*args, **kwargs)
            armed.clear()
            self._error()
            return made

        self._patch.setattr(owner, name, failing)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


ERRORS: dict[str, tuple[type[BaseException], Callable[[], None]]] = {
    "interrupt": (KeyboardInterrupt, raising(KeyboardInterrupt())),
    "cancelled": (asyncio.CancelledError, raising(asyncio.CancelledError())),
    "exit": (SystemExit, raising(SystemExit(3))),
    "type error": (TypeError, raising(TypeError("x"))),
    "memory": (MemoryError, raising(MemoryError())),
    # It waits for the engine's lock to be given back: then the reply runs already.
    "ctrl-c": (KeyboardInterrupt, lambda: signal.raise_signal(signal.SIGINT)),
}


def state_of(branch: Branch) -> tuple[Any, ...]:
    seq = branch._seq
    return (
        branch.token_ids,
        branch.logprobs,
        branch.sampled,
        branch.finished,
        seq.epoch,
        seq.grammar,
        branch.alive,
        seq.is_busy,
    )


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Chat]:
    with talker(KINDS["special tags"], tmp_path / "t") as llm:
        chat = llm.start_chat()
        chat.send("he").result()
        yield chat


@pytest.mark.parametrize("place", ["encode", "cut", "extend", "start", "after"])
@pytest.mark.parametrize("kind", ERRORS)
def test_after_any_exception_the_chat_is_as_it_was(chat: Chat, place: str, kind: str) -> None:
    error, fail = ERRORS[kind]
    llm, before, messages = chat._runtime, state_of(chat.branch), chat.messages
    told = state_of(chat.branch.fork(1)[0])
    with Failure(_Holder(llm), place, fail), pytest.raises(error):
        chat.send("w")
    assert state_of(chat.branch) == before and chat.messages == messages
    assert told[0] == before[0]
    # The same message then gets the same reply as if nothing had happened.
    assert chat.send("w").result().text == " hello w"
    chat.undo()
    assert chat.branch.token_ids == before[0] and chat.messages == messages


class _Holder:
    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime


def test_half_of_a_pair_is_refused_and_changes_nothing(chat: Chat) -> None:
    before, messages = state_of(chat.branch), chat.messages
    for bad in ("\ud83d", "he \udc00", {"role": "user", "content": "\ud800 w"}):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            chat.send(bad)
        assert state_of(chat.branch) == before and chat.messages == messages


def test_a_history_cut_inside_a_character_is_cut_before_it(tmp_path: Path) -> None:
    """The template drops the end of the reply, where a character of several tokens stands."""
    from dataclasses import replace

    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:2] }}\U0001f98b"
        "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    kind = replace(KINDS["bytes"], template=template, reply="hé🦊")
    with talker(kind, tmp_path / "t") as llm:
        chat = llm.start_chat()
        chat.send("a").result()
        chat.send("b").result()
        assert "hé🦋<|end|>\n<|start|>user\nb" in chat.branch.text
        assert "\ufffd" not in chat.branch.text
        rendered = llm.tokenizer.encode_chat(chat.messages[:-1])
        assert chat.branch.token_ids[: len(rendered)] == rendered


def test_a_reply_that_shows_its_stop_string_keeps_it_and_not_the_end_token(tmp_path: Path) -> None:
    with talker(KINDS["bytes"], tmp_path / "t") as llm:
        chat = llm.start_chat()
        shown = SamplingParams(stop=["é 🦊"], include_stop_str_in_output=True)
        chat.send("a", shown).result()
        assert chat.messages[-1]["content"] == "hé 🦊"
        chat.send("b", shown.replace(stop=(), skip_special_tokens=False)).result()
        assert chat.messages[-1]["content"] == "hé 🦊"


def test_undo_brings_back_the_end_of_the_reply_before(chat: Chat) -> None:
    assert chat.branch.finished
    chat.send("w", max_tokens=1).result()
    assert not chat.branch.finished
    chat.undo()
    assert chat.branch.finished
