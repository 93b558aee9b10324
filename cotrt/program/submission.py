"""`LLM.submit`: check every prompt, start them all, and gather their outputs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrt.engine.promise import Promise
from cotrt.engine.state import GenerationState
from cotrt.errors import BranchPrunedError, CotrtError, InvalidRequestError
from cotrt.options.numbers import plain_ints
from cotrt.options.sampling import SamplingParams
from cotrt.outputs import RequestMetrics, RequestOutput
from cotrt.program.branch import Branch
from cotrt.program.handle import Generation, Handle, gather, several, warn_inside_loop
from cotrt.program.runtime import Runtime
from cotrt.sampling.seeds import normalize_seed, output_seed

_request_ids = itertools.count()

Prompt = str | Sequence[int] | Mapping[str, Any] | Branch


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as its template wrote it, and the ids of that."""

    text: str
    ids: list[int]


@dataclass(slots=True)
class _Request:
    """One prompt with its params, checked."""

    id: str
    text: str | None
    ids: list[int]
    branch: Branch | None
    params: SamplingParams


class Submission(Handle[list[RequestOutput]], Sequence[Generation]):
    """Running prompts: a handle of their outputs, and a sequence of one `Generation` an output."""

    def __init__(
        self, runtime: Runtime, requests: list[_Request], groups: list[list[Generation]]
    ) -> None:
        self._items = held = [g for group in groups for g in group]
        # The callables hold the items, and not the handle: it is gone when it is dropped.
        super().__init__(
            runtime,
            [g._state.promise for g in held],
            lambda: gather(list(zip(requests, groups)), lambda pair: _output(runtime, *pair)),
            lambda: runtime.cancel([g._state for g in held]),
        )
        self._runtime: Runtime = runtime

    def __getitem__(self, index: Any) -> Any:
        """The generation at `index`, or a list of them for a slice."""
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return several(self)

    def _result_with_progress(self, use_tqdm: bool) -> list[RequestOutput]:
        """`result`, with a bar on a terminal; what is interrupted is cancelled."""
        try:
            if use_tqdm and sys.stderr.isatty() and not self.done:
                from tqdm import tqdm

                warn_inside_loop()

                with tqdm(total=len(self._items), desc="prompts", unit="output") as bar:
                    for generation in self._items:
                        promise: Promise = generation._state.promise
                        promise.wait(lambda p=promise: p.done)  # type: ignore[misc]
                        bar.update()
            return self.result()
        except BaseException:
            if not self.done:
                self._cancel()
            raise


def _output(runtime: Runtime, request: _Request, generations: list[Generation]) -> RequestOutput:
    completions = gather(generations, lambda g: g._completion())
    states = [g._state for g in generations]
    first_tokens = [s.first_token for s in states if s.first_token]
    return RequestOutput(
        request_id=request.id,
        prompt=request.text,
        prompt_token_ids=request.ids,
        outputs=completions,
        prompt_logprobs=_prompt_logprobs(runtime, request, states[0]),
        num_cached_tokens=states[0].num_cached,
        metrics=RequestMetrics(
            arrival_time=min(s.created for s in states),
            first_token_time=min(first_tokens, default=None),
            finished_time=max(s.finished for s in states),
        ),
    )


def _prompt_logprobs(runtime: Runtime, request: _Request, state: GenerationState) -> Any:
    if request.params.prompt_logprobs is None:
        return None
    return [
        None if i == 0 else runtime.logprob_dict(token, state.prompt_scores[i])
        for i, token in enumerate(request.ids)
    ]


def submit(
    runtime: Runtime,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    default_max_tokens: int | None,
) -> Submission:
    """Check all prompts and params, then start them."""
    runtime.check()
    items = as_prompts(prompts)
    params = _as_params(sampling_params, len(items))
    requests = []
    for index, (prompt, one) in enumerate(zip(items, params)):
        try:
            requests.append(_check(runtime, prompt, one))
        except CotrtError as error:
            raise named(error, index, len(items)) from error.__cause__
    engine = runtime.engine
    with engine.lock:
        runtime.check()  # it may have stopped since
        seen: set[int] = set()
        for index, request in enumerate(requests):
            try:
                if request.branch is not None:
                    if id(request.branch._seq) in seen:
                        raise InvalidRequestError(f"branch {request.branch.id} is given twice")
                    seen.add(id(request.branch._seq))
                    request.branch._check()
                    request.ids = request.branch._seq.ids()
                runtime.max_length(request.params, len(request.ids), default_max_tokens)
            except CotrtError as error:
                raise named(error, index, len(items)) from error.__cause__
        groups: list[list[GenerationState]] = []
        try:
            for request in requests:
                groups.append(_states(runtime, request, default_max_tokens))
        except BaseException:  # a tokenizer may raise anything, and nothing was started
            for state in [state for group in groups for state in group if state.release_when_done]:
                engine.table.close(state.seq)
            raise
        for state in [state for group in groups for state in group]:
            engine.start_generation(state)
    generations = [
        [Generation(runtime, state, index) for index, state in enumerate(group)] for group in groups
    ]
    return Submission(runtime, requests, generations)


def _states(
    runtime: Runtime, request: _Request, default_max_tokens: int | None
) -> list[GenerationState]:
    """The generates of one request, not started; one sequence an output."""
    engine, params = runtime.engine, request.params
    options = {"default_max_tokens": default_max_tokens}
    if request.branch is not None:
        return [runtime.new_state(request.branch._seq, params, **options)]
    root = engine.table.new_root(request.ids)
    if params.n == 1:
        sequences = [root]
    else:
        sequences = [engine.table.fork(root) for _ in range(params.n)]
        engine.table.close(root)
    states = []
    try:
        for index, seq in enumerate(sequences):
            seed = None if params.seed is None else output_seed(normalize_seed(params.seed), index)
            own = params
            if index and params.prompt_logprobs is not None:
                own = params.replace(prompt_logprobs=None)  # the first output reports them for all
            state = runtime.new_state(seq, own, seed=seed, **options)
            state.release_when_done = True
            states.append(state)
    except BaseException:
        for seq in sequences:
            engine.table.close(seq)
        raise
    return states


def _check(runtime: Runtime, prompt: Any, params: SamplingParams | None) -> _Request:
    checked = runtime.params(params)
    request_id = f"request-{next(_request_ids)}"
    if isinstance(prompt, Branch):
        runtime.check_owner(prompt)
        if checked.n != 1:
            raise InvalidRequestError(f"n={checked.n} on a branch: fork({checked.n}) it instead")
        return _Request(request_id, None, [], prompt, checked)
    if isinstance(prompt, ChatPrompt):
        ids = runtime.check_ids(prompt.ids)
        return _Request(request_id, prompt.text, ids, None, checked)
    text, ids = runtime.encode_prompt(prompt)
    return _Request(request_id, text, ids, None, checked)


def as_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, Mapping, Branch)):
        return [prompts]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise InvalidRequestError(
            f"prompts must be a str, token ids, a dict, a Branch or a list of those, not "
            f"{type(prompts).__name__}"
        )
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, (int, float)):
        raise InvalidRequestError(f"prompts={prompts!r}: a number alone is no list of token ids")
    items = plain_ints(prompts)
    if items and all(type(item) is int for item in items):
        return [items]
    return items


def _as_params(params: Any, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, Mapping) or not hasattr(params, "__iter__"):
        raise InvalidRequestError(
            "sampling_params must be a SamplingParams, a list of them or None, not "
            f"{type(params).__name__}"
        )
    each = list(params)
    if len(each) != count:
        raise InvalidRequestError(f"{len(each)} sampling_params for {count} prompts: one, or each")
    return each


def named(error: CotrtError, index: int, count: int) -> CotrtError:
    """The error with the prompt's index in front, where there is more than one prompt."""
    if count == 1:
        return error
    text = f"prompt {index}: {error}"
    if isinstance(error, BranchPrunedError):
        return BranchPrunedError(text, error.output)
    told = type(error)(text)
    if isinstance(error, InvalidRequestError) and isinstance(told, InvalidRequestError):
        told.field = error.field
    return told
