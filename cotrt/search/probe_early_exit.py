"""Probes of a thinking branch: what would it answer now, and does it still change its mind?"""

from __future__ import annotations

from typing import Any

from cotrt.errors import InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.llm import LLM
from cotrt.search.budget import Budget
from cotrt.search.callbacks import check_int
from cotrt.search.events import OnEvent
from cotrt.search.result import SearchResult
from cotrt.search.session import Extract, Session
from cotrt.search.tree import Node


async def probe_early_exit(
    root: Branch | LLM,
    prompt: Any = None,
    *,
    every: int = 64,
    suffix: str = "\nThe final answer is",
    probe_tokens: int = 20,
    agree: int = 3,
    extract: Extract = "answer",
    params: SamplingParams | None = None,
    budget: Budget | None = None,
    on_event: OnEvent | None = None,
) -> SearchResult:
    r"""Think, and stop when the last `agree` probes give the same answer.

    Every `every` tokens the thinking branch is forked, `suffix` is forced, `probe_tokens` are
    sampled greedily, and the fork is pruned. The thinking branch's tokens are the same as without
    probes.

    Args:
        root: a branch, left unchanged, or an LLM.
        prompt: for an LLM: text, token ids or messages.
        every: tokens of thinking between two probes.
        suffix: asks for the answer now.
        probe_tokens: of one probe at most; they count in the budget.
        agree: equal answers in a row that end the thinking.
        extract: of a probe's text (the suffix left out), and of the thinking where it ends by
            itself: "answer" (boxed, else the last number), a name, a pattern or a function.
        params: of the thinking; ``max_tokens`` is for all of it.
        budget, on_event: as in every search.

    Returns:
        The winner is the thinking where it ended by itself, else the last probe with an answer.

    Raises:
        InvalidRequestError: an argument that is wrong.
    """
    for name, value in (("every", every), ("probe_tokens", probe_tokens), ("agree", agree)):
        check_int(name, value, 1)
    if not isinstance(suffix, str):
        raise InvalidRequestError(f"suffix={suffix!r}: must be a str")
    session = Session(
        "probe_early_exit",
        root,
        prompt,
        params=params,
        budget=budget,
        on_event=on_event,
        extract=extract,
    )
    probes: list[Node] = []
    thinking: Node | None = None
    async with session:
        started = session.fork(session.root, 1)
        growths = session.begin(started)
        while growths:
            [growth] = growths
            thinking = growth.node
            await session.advance(growths, every)
            if growth.done:
                await session.extract([thinking])
                break
            for probe in session.fork(thinking, 1, "probe"):
                session.force(probe, suffix, special=True)
                before = len(probe.path_text)
                await session.grow(
                    [probe],
                    max_tokens=probe_tokens,
                    min_tokens=0,
                    temperature=0.0,
                    ignore_eos=False,
                )
                if probe.state != "pruned":
                    await session.extract([probe], after=before)
                    probes.append(probe)
                session.let_go(probe)
            if session.stopped_by:
                break
            last = [probe.answer for probe in probes[-agree:]]
            if len(last) == agree and last[0] is not None and all(a == last[0] for a in last):
                session.stop("agreed")
                session.set_state(probes[-1], "finished", f"{agree} probes agree")
                break
            growth.node = session.follow(thinking)
    best = _winner(thinking, probes)
    for probe in probes:
        if probe is not best and probe.state != "cut":
            session.set_state(probe, "pruned", "a probe")
    candidates = [node for node in (best, thinking) if node is not None]
    return await session.finish(candidates[:1] if best is thinking else candidates, best=best)


def _winner(thinking: Node | None, probes: list[Node]) -> Node | None:
    answered = [probe for probe in probes if probe.answer is not None]
    if thinking is not None and thinking.is_finished and thinking.answer is not None:
        return thinking
    return answered[-1] if answered else thinking
