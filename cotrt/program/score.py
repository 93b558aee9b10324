"""`Branch.score`: the log-probability of forced continuations, all in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cotrt.engine.state import ScoreState
from cotrt.errors import InvalidRequestError
from cotrt.options.numbers import plain_ints
from cotrt.outputs import Score
from cotrt.program.handle import Handle, fresh, gather

if TYPE_CHECKING:
    from cotrt.program.branch import Branch
    from cotrt.program.runtime import Runtime


def as_options(continuations: Any) -> tuple[bool, list[Any]]:
    """Whether many were given, and the list of them: a str or a list of ids is one."""
    if isinstance(continuations, str):
        return False, [continuations]
    if hasattr(continuations, "tolist"):
        continuations = continuations.tolist()
    if isinstance(continuations, (bytes, dict)) or not hasattr(continuations, "__iter__"):
        raise InvalidRequestError(
            "give a str, a list of token ids, or a list of those, not "
            f"{type(continuations).__name__}"
        )
    items = plain_ints(continuations)
    if items and all(type(item) is int for item in items):
        return False, [items]
    return True, items


def one_each(texts: Any, count: int) -> list[Any]:
    """A text or list of ids for each of `count` branches: one for all is given to each.

    Raises:
        InvalidRequestError: as many texts as branches are needed.
    """
    many, each = as_options(texts)
    each = each if many else each * count
    if len(each) != count:
        raise InvalidRequestError(f"{len(each)} texts for {count} branches: give one, or one each")
    return each


def score(
    branches: Sequence[Branch], options: Sequence[Any], given: Any
) -> list[Handle[list[Score]]]:
    """Start the scores of all options on all branches; one handle a branch."""
    if not branches:
        return []
    runtime = branches[0]._runtime
    runtime.check()
    engine = runtime.engine
    before = runtime.encode_continuation(given, what="given")
    encoded = [runtime.encode_continuation(option, what="a continuation") for option in options]
    for option, ids in zip(options, encoded):
        if not ids:
            raise InvalidRequestError(f"the continuation {option!r} has no tokens to score")
    longest = len(before) + max(map(len, encoded), default=0)
    handles = []
    with engine.lock:
        runtime.check()  # it may have stopped since
        for branch in branches:
            runtime.check_owner(branch)
            branch._check(idle=False)
            if branch._seq.length + len(before) == 0:
                raise InvalidRequestError(
                    "nothing comes before the continuation: extend the branch, or set given="
                )
            runtime.check_length(branch._seq.length + longest)
        for branch in branches:
            states: list[ScoreState] = []
            for ids in encoded:
                child = engine.table.fork(branch._seq, internal=True)
                engine.table.extend(child, before + ids)
                state = ScoreState(child, child.length - len(ids))
                engine.start_score(state, counts_reuse=not states)
                states.append(state)
            handles.append(_handle(runtime, states, encoded))
    return handles


def _handle(
    runtime: Runtime, states: list[ScoreState], encoded: list[list[int]]
) -> Handle[list[Score]]:
    def one(pair: tuple[ScoreState, list[int]]) -> Score:
        state, ids = pair
        if state.promise.error is not None:
            raise fresh(state.promise.error)
        return Score(list(ids), list(state.promise.value))

    return Handle(
        runtime,
        [state.promise for state in states],
        lambda: gather(list(zip(states, encoded)), one),
        lambda: runtime.cancel(states),
    )
