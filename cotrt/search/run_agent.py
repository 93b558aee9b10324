"""An agent: generate, run the tools that were called, force their answers in, go on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import anyio

from cotrt.errors import InvalidRequestError, KVCacheExhaustedError, PromptTooLongError
from cotrt.options.sampling import SamplingParams
from cotrt.options.tags import THINK
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.program.reply_parser import TAGS, is_opened
from cotrt.program.tool_calls import Reply, read_reply
from cotrt.search.access import tokenizer_of
from cotrt.search.budget import Budget
from cotrt.search.callbacks import check_int
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult
from cotrt.search.session import Extract, Session
from cotrt.search.tool_calls import FORMATS, ToolFormat, format_of
from cotrt.search.tools import Tools, as_tools, run_tool, tool_schema
from cotrt.search.tree import Node


async def run_agent(
    root: Branch | LLM,
    prompt: Any = None,
    tools: Tools | None = None,
    *,
    max_turns: int = 8,
    tool_timeout: float | None = 30.0,
    tool_format: str | ToolFormat = "auto",
    in_place: bool = False,
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
    extract: Extract | None = None,
) -> SearchResult:
    """Turns of the model, each followed by the answers of the tools that it called.

    A turn without a call is the answer. What stands in a turn's leading ``<think>...</think>`` (or
    before ``</think>``, where the prompt has opened the thought) is neither call nor answer. A tool
    that raises, takes too long or is not there, and a call that cannot be read, become an
    observation that the model sees. Tools' text is appended with special tokens as plain
    characters.

    The agent can be forked at any turn: ``on_event`` is given every node with its living branch,
    and with ``in_place=True`` and ``max_turns=1`` the program itself goes from turn to turn.

    Args:
        root: a branch, left unchanged unless `in_place`, or an LLM.
        prompt: for an LLM: text, token ids or messages (rendered with the tools' definitions, in a
            block of our own where the template has no place for them). On
            a branch the tools may stand here: ``run_agent(branch, tools)``.
        tools: functions, sync or async, or a dict of them by name.
        max_turns: turns of the model at most.
        tool_timeout: seconds for one call; None for no limit. A sync tool that is late runs on in
            its thread, unheard.
        tool_format: "hermes" (Qwen's, too), "llama3", "plain", a `ToolFormat`, or "auto": by the
            prompt's own markers.
        in_place: the given branch itself grows.
        params, budget, on_event, extract: as in every search; ``max_tokens`` is for one turn.

    Returns:
        ``answer`` is the last turn's text after its thought (or what `extract` finds in it); the
        tree holds turns and observations as a chain.

    Raises:
        InvalidRequestError: an argument that is wrong.
    """
    if tools is None and isinstance(root, Branch):
        prompt, tools = None, prompt
    if tools is None:
        raise InvalidRequestError("run_agent needs tools=: functions, or a dict of them by name")
    named = as_tools(tools)
    check_int("max_turns", max_turns, 1)
    if not isinstance(tool_format, ToolFormat) and tool_format not in (*FORMATS, "auto"):
        known = ", ".join(map(repr, FORMATS))
        raise InvalidRequestError(f"tool_format={tool_format!r}: must be 'auto', {known}")
    if isinstance(root, LLM) and _are_messages(prompt):
        prompt = _render(root, prompt, named)
    session = Session(
        "run_agent",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
        in_place=in_place,
    )
    last: Node | None = None
    content = ""
    async with session:
        opening = _opening(session.root.text)
        style = format_of(session.root.text) if tool_format == "auto" else tool_format
        if isinstance(style, str):
            style = FORMATS[style]
        style = dataclasses.replace(style, after=style.after + opening)
        turns = [session.follow(session.root)] if in_place else session.fork(session.root, 1)
        turn = turns[0] if turns else None
        for number in range(max_turns):
            if turn is None:
                break
            before = len(turn.path_text)
            await session.grow([turn])
            if turn.state == "pruned" or not turn.token_ids:
                break
            last = turn
            reply = _read(session, turn, opened=bool(opening))
            calls = reply.calls
            content = reply.content
            await session.extract([turn], after=before)
            if not calls or turn.state == "cut":
                break
            answers = [""] * len(calls)

            async def answer(index: int, calls: Any = calls, answers: Any = answers) -> None:
                answers[index] = await run_tool(named, calls[index], tool_timeout)

            async with anyio.create_task_group() as group:
                for index in range(len(calls)):
                    group.start_soon(answer, index)
            turn.answer = None
            session.set_state(turn, "kept", "called " + ", ".join(c.name or "?" for c in calls))
            try:
                observation = _observe(session, turn, style, answers)
            except (PromptTooLongError, KVCacheExhaustedError) as error:
                session.set_state(turn, "cut", str(error))
                break
            if number == max_turns - 1:
                session.stop("max_steps")
                last = observation
                break
            turn = session.follow(observation)
    final = last if last is not None and last.kind == "step" else None
    found: dict[str, Any] = {"answer": content} if final is not None and extract is None else {}
    result = await session.finish([last] if last is not None else [], best=last, **found)
    if final is None or (session.stopped_by == "max_steps"):
        result.answer = None
    return result


def _opening(prompt: str) -> str:
    """What a prompt ends in where it has opened a thought: each turn then begins with it."""
    return prompt[prompt.rindex(THINK) :] if is_opened(prompt) else ""


def _read(session: Session, turn: Node, *, opened: bool) -> Reply:
    """A turn as its reader sees it; tags that are special tokens count though texts hide them."""
    text, tokenizer = turn.text, tokenizer_of(turn.branch)
    hidden = frozenset() if tokenizer is None else tokenizer.hidden(TAGS)
    if hidden and session.params.skip_special_tokens:
        left_out = tokenizer.showing(hidden).all_special_ids
        shown = zip(turn.token_ids, turn.token_texts)
        text = "".join(text for token, text in shown if token not in left_out)
    else:
        hidden = frozenset()
    return read_reply(text, opened=opened, hidden=hidden)


def _observe(session: Session, turn: Node, style: ToolFormat, answers: list[str]) -> Node:
    """A node that holds the tools' answers, on the turn's own branch."""
    closed = turn.branch.finished
    observation = session.follow(turn, "observation")
    try:
        session.force(
            observation, ("" if closed else style.end_of_turn) + style.before, special=True
        )
        for index, text in enumerate(answers):
            if index:
                session.force(observation, style.between, special=True)
            if text:
                session.force(observation, text)
        session.force(observation, style.after, special=True)
    except (PromptTooLongError, KVCacheExhaustedError):
        turn._branch, observation._branch = observation._branch, None
        session.set_state(observation, "cut", "no room in the context")
        raise
    return observation


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def _render(llm: LLM, messages: Any, tools: Mapping[str, Any]) -> list[int]:
    """Messages with the tools' definitions, as the chat template writes them."""
    schemas = [tool_schema(tool, name) for name, tool in tools.items()]
    encode = functools.partial(llm.tokenizer.encode_chat, add_generation_prompt=True)
    ids: list[int] = encode(messages, tools=schemas)
    return ids
