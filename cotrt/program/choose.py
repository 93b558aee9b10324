"""`Branch.choose`: score the options, then append the best one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cotrt.engine.promise import Promise
from cotrt.engine.state import ChoiceState, ScoreState
from cotrt.errors import InvalidRequestError
from cotrt.outputs import Choice, Score
from cotrt.program.handle import Handle, fresh

if TYPE_CHECKING:
    from cotrt.program.branch import Branch


def choose(
    branches: Sequence[Branch], options: Sequence[Any], given: Any, normalize: str
) -> list[Handle[Choice]]:
    """Start a choice on each branch; each is busy until its handle is done or cancelled."""
    if normalize not in ("mean", "sum"):
        raise InvalidRequestError(f'normalize={normalize!r}: must be "mean" or "sum"')
    options = options.tolist() if hasattr(options, "tolist") else options
    if isinstance(options, (str, bytes)) or not hasattr(options, "__iter__") or not options:
        raise InvalidRequestError(f"options must be a list of at least one, not {options!r}")
    if not branches:
        return []
    runtime = branches[0]._runtime
    runtime.check()
    before = runtime.encode_continuation(given, what="given")
    encoded = [runtime.encode_continuation(option, what="an option") for option in options]
    known: dict[tuple[int, ...], Any] = {}
    for option, ids in zip(options, encoded):
        if not ids:
            raise InvalidRequestError(f"the option {option!r} has no tokens")
        if tuple(ids) in known:
            raise InvalidRequestError(
                f"the options {known[tuple(ids)]!r} and {option!r} are equal as token ids"
            )
        known[tuple(ids)] = option
    engine = runtime.engine
    handles = []
    with engine.lock:
        runtime.check()  # it may have stopped since
        seen: set[int] = set()
        for branch in branches:
            runtime.check_owner(branch)
            branch._check()
            if id(branch._seq) in seen:
                raise InvalidRequestError(f"branch {branch.id} is in the batch twice")
            seen.add(id(branch._seq))
            length = branch._seq.length + len(before)
            if length == 0:
                raise InvalidRequestError("nothing comes before the options: set given=")
            runtime.check_length(length + max(map(len, encoded)))
        for branch in branches:
            scores = []
            for ids in encoded:
                child = engine.table.fork(branch._seq, internal=True)
                engine.table.extend(child, before + ids)
                scores.append(ScoreState(child, child.length - len(ids)))
            state = ChoiceState(branch._seq, scores, before, encoded, normalize == "mean")
            engine.start_choice(state)
            handles.append(_handle(branch, state, list(options)))
    return handles


def _handle(branch: Branch, state: ChoiceState, options: list[Any]) -> Handle[Choice]:
    runtime = branch._runtime

    def collect() -> Choice:
        if state.promise.error is not None:
            raise fresh(state.promise.error)
        scores = [
            Score(list(ids), list(score.logprobs))
            for ids, score in zip(state.options, state.scores)
        ]
        return Choice(state.promise.value, options[state.promise.value], scores)

    def cancel() -> None:
        with runtime.engine.lock:
            runtime.engine.cancel_choice(state)

    promises: list[Promise] = [state.promise]
    return Handle(runtime, promises, collect, cancel)
