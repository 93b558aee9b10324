"""Random programs over an engine: a hypothesis state machine, its verbs and what must hold."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from engine_rig import EOS, VOCAB, Rig, from_scratch, logprob, probs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cotrt.branch import Branch
from cotrt.engine.state import GenerationState
from cotrt.errors import (
    BranchBusyError,
    BranchPrunedError,
    InvalidRequestError,
    KVCacheExhaustedError,
    NumericsError,
    PromptTooLongError,
)
from cotrt.handle import Handle
from cotrt.params import SamplingParams
from cotrt.sampling.seeds import child_seed, output_seed, root_seed
from cotrt.submission import submit
from cotrt.testing import CharTokenizer

MAX_LEN = 120


def _random_params(number: int) -> SamplingParams:
    pick = random.Random(number)
    max_tokens = pick.choice([0, 1, 2, 5, 9, 17, 40])
    fields: dict[str, Any] = {
        "temperature": pick.choice([0.0, 0.7, 1.0, 1.6]),
        "seed": pick.choice([None, None, None, 1, 2]),
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, pick.choice([0, 0, 4])),
        "ignore_eos": pick.random() < 0.5,
        "stop_token_ids": pick.choice([None, None, [3], [3, 5]]),
        "top_k": pick.choice([0, 0, 3]),
        "top_p": pick.choice([1.0, 1.0, 0.8]),
        "presence_penalty": pick.choice([0.0, 0.0, 0.6]),
        "repetition_penalty": pick.choice([1.0, 1.0, 1.3]),
        "logprobs": pick.choice([None, None, 0, 2]),
        "prompt_logprobs": pick.choice([None, None, None, None, 1]),
        "priority": pick.choice([0, 0, 0, -1, 1]),
    }
    if pick.random() < 0.25:
        fields["stop"] = [chr(pick.randrange(12)) + chr(pick.randrange(12)), chr(7)]
    return SamplingParams(**fields)


PARAMS = [_random_params(number) for number in range(96)]

# What a branch's work may end with when the model, the device or the tokenizer was made to fail.
MADE_TO_FAIL = (NumericsError, MemoryError, LookupError, RuntimeError)


class FlakyTokenizer(CharTokenizer):
    """Raises where it is to decode, while `is_broken`."""

    is_broken = False

    def decode(self, ids: Sequence[int]) -> str:
        if self.is_broken:
            raise LookupError("made to fail: the tokenizer")
        return super().decode(ids)


class Nan(float):
    """A weight above 0 whose logarithm is NaN."""

    def __new__(cls) -> Nan:
        return float.__new__(cls, "nan")

    def __gt__(self, other: object) -> bool:
        return True


class Failures:
    """What is made to fail now: next-token weights of some paths are NaN.

    Attributes:
        nan_of: one path of so many has NaN; 0: none has.
    """

    def __init__(self) -> None:
        self.nan_of = 0

    def probs(self, path: list[int]) -> Mapping[int, float]:
        if self.nan_of and hash(tuple(path)) % self.nan_of == 0:
            return {1: Nan()}
        return probs(path)


numbers = st.integers(0, (1 << 20) - 1)
token_lists = st.lists(st.integers(1, 3), min_size=1, max_size=24)


@dataclass(eq=False)
class Shadow:
    """What a branch has to be: kept beside the engine, by the rules of the API alone."""

    branch: Branch | None  # None once the handle was given up
    ids: list[int]
    sampled: list[bool]
    seed: int
    epoch: int = 0
    num_forks: int = 0
    parent: Shadow | None = None
    children: list[Shadow] = field(default_factory=list)
    pruned: bool = False
    busy: Any = None  # the Running that makes it busy


@dataclass(eq=False)
class Running:
    """A generate, score or choose that was started."""

    kind: str
    owner: Shadow
    handle: Any
    state: GenerationState | None = None
    start: int = 0
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    options: list[list[int]] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    by_mean: bool = True
    cancelled: bool = False
    seen: bool = False


class TreeProgram(RuleBasedStateMachine):
    """Branches grow and are cut while steps run; everything is compared with shadows."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig
        self.shadows: list[Shadow] = []
        self.running: list[Running] = []
        self.ended: list[Running] = []
        self.num_roots = 0
        self.num_storms = 0
        self.failures = Failures()
        self.tokenizer = FlakyTokenizer(VOCAB)

    @initialize(
        num_blocks=st.sampled_from([2, 3, 4, 6, 8, 12, 20, 64]),
        block_size=st.sampled_from([8, 16]),
        max_num_seqs=st.sampled_from([1, 2, 4, 256]),
        budget=st.sampled_from([1, 5, 16, 64, 2048]),
        scored=st.sampled_from([1, 3, 1024]),
        match=st.booleans(),
        ids=token_lists,
    )
    def make(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        scored: int,
        match: bool,
        ids: list[int],
    ) -> None:
        self.capacity = num_blocks * block_size
        self.rig = self._new_rig(
            ids,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            match_prompts=match,
            max_model_len=MAX_LEN,
            next_probs=self.failures.probs,
            tokenizer=self.tokenizer,
        )
        self.rig.scheduler._max_scored_rows = scored
        self._root(ids)

    def _new_rig(self, ids: list[int], **options: Any) -> Rig:
        return Rig(**options)

    # ---- verbs --------------------------------------------------------------------------------

    def _do(self, when: int, verb: Callable[[], None]) -> None:
        """Now, or (two in three times) while a step is in flight."""
        if when % 3 and self.rig.engine.has_work:
            self.rig.model.in_flight.append(verb)
            self._step()
            while self.rig.model.in_flight:  # no step had to run
                self.rig.model.in_flight.popleft()()
        else:
            verb()
        self._look()

    def _step(self) -> None:
        self.rig.step()
        self._look()

    def _held(self) -> list[Shadow]:
        return [s for s in self.shadows if s.branch is not None and not s.pruned]

    def _pick(self, number: int) -> Shadow | None:
        held = self._held()
        return held[number % len(held)] if held else None

    def _root(self, ids: list[int]) -> None:
        seed = root_seed(0, self.num_roots)
        branch = self.rig.root(ids)
        self.num_roots += 1
        self.shadows.append(Shadow(branch, list(ids), [False] * len(ids), seed))

    @rule(when=numbers, ids=token_lists)
    def root(self, when: int, ids: list[int]) -> None:
        self._do(when, lambda: self._root(ids))

    @rule(when=numbers, pick=numbers, n=st.integers(1, 3))
    def fork(self, when: int, pick: int, n: int) -> None:
        self._do(when, lambda: self._fork(pick, n, None))

    @rule(when=numbers, pick=numbers, at=numbers)
    def fork_at(self, when: int, pick: int, at: int) -> None:
        self._do(when, lambda: self._fork(pick, 1, at))

    def _fork(self, pick: int, n: int, at: int | None) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        self._publish(owner)
        length = len(owner.ids)
        cut = length if at is None else at % (length + 1)
        for branch in owner.branch.fork(n, at=None if at is None else cut):
            seed = child_seed(owner.seed, owner.num_forks)
            owner.num_forks += 1
            child = Shadow(branch, owner.ids[:cut], owner.sampled[:cut], seed, parent=owner)
            owner.children.append(child)
            self.shadows.append(child)

    @rule(when=numbers, pick=numbers, ids=token_lists)
    def extend(self, when: int, pick: int, ids: list[int]) -> None:
        self._do(when, lambda: self._extend(pick, ids))

    def _extend(self, pick: int, ids: list[int]) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        try:
            owner.branch.extend(ids)
        except BranchBusyError:
            assert owner.busy is not None
        except PromptTooLongError:
            assert len(owner.ids) + len(ids) > MAX_LEN
        except KVCacheExhaustedError:
            assert len(owner.ids) + len(ids) > self.capacity
        else:
            assert owner.busy is None
            owner.ids += ids
            owner.sampled += [False] * len(ids)

    @rule(when=numbers, pick=numbers, at=numbers, same=st.booleans())
    def truncate(self, when: int, pick: int, at: int, same: bool) -> None:
        self._do(when, lambda: self._truncate(pick, at, same))

    def _truncate(self, pick: int, at: int, same: bool) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        length = at % (len(owner.ids) + 1)
        try:
            owner.branch.truncate(length, same_draws=same)
        except BranchBusyError:
            assert owner.busy is not None
            return
        assert owner.busy is None
        if length < len(owner.ids) and not same:
            owner.epoch += 1
        del owner.ids[length:], owner.sampled[length:]

    @rule(when=numbers, pick=numbers, params=st.sampled_from(PARAMS))
    def generate(self, when: int, pick: int, params: SamplingParams) -> None:
        self._do(when, lambda: self._generate(pick, params))

    @rule(when=numbers, picks=st.lists(numbers, min_size=2, max_size=4), params=numbers)
    def generate_many(self, when: int, picks: list[int], params: int) -> None:
        def verb() -> None:
            for i, pick in enumerate(picks):
                self._generate(pick, PARAMS[(params + i) % len(PARAMS)])

        self._do(when, verb)

    def _generate(self, pick: int, params: SamplingParams) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        length = len(owner.ids)
        try:
            if params.prompt_logprobs is None:
                handle = owner.branch.generate(params)
            else:  # a completion has no place for them, a RequestOutput has
                handle = submit(self.rig.runtime, [owner.branch], params, default_max_tokens=None)[
                    0
                ]
        except BranchBusyError:
            assert owner.busy is not None
            return
        except PromptTooLongError:
            assert length >= MAX_LEN
            return
        except KVCacheExhaustedError:
            assert length > self.capacity
            return
        except InvalidRequestError:
            assert length == 0
            return
        assert owner.busy is None
        state = handle._state
        expected = (owner.seed, owner.epoch) if params.seed is None else (params.seed, 0)
        assert (state.seed, state.epoch) == expected
        run = Running("generate", owner, handle, state, length)
        self.running.append(run)
        owner.busy = run
        self._look()

    @rule(
        when=numbers,
        prompts=st.lists(token_lists, min_size=1, max_size=3),
        params=st.sampled_from(PARAMS),
        n=st.integers(1, 3),
    )
    def submit(self, when: int, prompts: list[list[int]], params: SamplingParams, n: int) -> None:
        self._do(when, lambda: self._submit(prompts, params.replace(n=n)))

    def _submit(self, prompts: list[list[int]], params: SamplingParams) -> None:
        """Prompts without a branch: their sequences go when they are done."""
        try:
            work = submit(self.rig.runtime, prompts, params, default_max_tokens=16)
        except KVCacheExhaustedError:
            assert max(map(len, prompts)) > self.capacity
            return
        for index, handle in enumerate(work):
            state, prompt = handle._state, prompts[index // params.n]
            seed = root_seed(0, self.num_roots + index // params.n)
            if params.n > 1:
                seed = child_seed(seed, index % params.n)
            if params.seed is not None:
                seed = output_seed(params.seed, index % params.n)
            assert (state.seed, state.epoch) == (seed, 0)
            owner = Shadow(None, list(prompt), [False] * len(prompt), seed)
            self.running.append(Running("generate", owner, handle, state, len(prompt)))
        self.num_roots += len(prompts)
        self._look()

    @rule(when=numbers, pick=numbers, options=st.lists(token_lists, min_size=1, max_size=4))
    def score(self, when: int, pick: int, options: list[list[int]]) -> None:
        given = options[-1][:5] if pick % 2 else []
        self._do(when, lambda: self._score(pick, options, given))

    def _score(self, pick: int, options: list[list[int]], given: list[int]) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        self._publish(owner)
        length = len(owner.ids) + len(given)
        try:
            handle: Handle[Any] = owner.branch.score(options, given=given)
        except (InvalidRequestError, PromptTooLongError, KVCacheExhaustedError):
            longest = length + max(map(len, options))
            assert length == 0 or longest > min(MAX_LEN, self.capacity)
            return
        ids = owner.ids + given
        self.running.append(Running("score", owner, handle, ids=ids, options=options))

    @rule(
        when=numbers,
        pick=numbers,
        options=st.lists(token_lists, min_size=1, max_size=3, unique_by=tuple),
    )
    def choose(self, when: int, pick: int, options: list[list[int]]) -> None:
        given = options[-1][:3] if pick % 2 else []
        self._do(when, lambda: self._choose(pick, options, given, bool(pick % 3)))

    def _choose(self, pick: int, options: list[list[int]], given: list[int], by_mean: bool) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        length = len(owner.ids) + len(given)
        try:
            handle = owner.branch.choose(
                options, given=given, normalize="mean" if by_mean else "sum"
            )
        except BranchBusyError:
            assert owner.busy is not None
            return
        except (InvalidRequestError, PromptTooLongError, KVCacheExhaustedError):
            longest = length + max(map(len, options))
            assert length == 0 or longest > min(MAX_LEN, self.capacity)
            return
        assert owner.busy is None
        run = Running(
            "choose",
            owner,
            handle,
            ids=owner.ids + given,
            options=options,
            given=given,
            by_mean=by_mean,
        )
        self.running.append(run)
        owner.busy = run

    @rule(when=numbers, pick=numbers)
    def cancel(self, when: int, pick: int) -> None:
        self._do(when, lambda: self._cancel(pick))

    def _cancel(self, pick: int) -> None:
        if not self.running:
            return
        run = self.running[pick % len(self.running)]
        if not run.handle.done:
            run.cancelled = True
            run.handle.cancel()
            assert run.handle.done
            if run.owner.branch is not None and not run.owner.pruned and run.owner.busy is run:
                assert not run.owner.branch._seq.is_busy
        self._look()

    @rule(when=numbers, pick=numbers)
    def prune(self, when: int, pick: int) -> None:
        self._do(when, lambda: self._prune(pick))

    def _prune(self, pick: int) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        stack = [owner]
        owner.branch.prune()
        while stack:
            each = stack.pop()
            each.pruned = True
            stack.extend(each.children)
            if each.branch is not None:
                assert not each.branch.alive
        self._look()

    @rule(when=numbers, pick=numbers, collect=st.booleans())
    def close(self, when: int, pick: int, collect: bool) -> None:
        self._do(when, lambda: self._close(pick, collect))

    def _close(self, pick: int, collect: bool) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        if not collect:
            owner.branch.close()
        owner.branch = None  # the last reference: as good as closed
        if collect and pick % 8 == 0:
            gc.collect()

    @rule(when=numbers, pick=numbers)
    def reopen(self, when: int, pick: int) -> None:
        """A handle of the parent, made again where it was closed or collected."""
        self._do(when, lambda: self._reopen(pick))

    def _reopen(self, pick: int) -> None:
        owner = self._pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        parent = owner.branch.parent
        if parent is None:
            assert owner.parent is None or owner.parent.pruned
            return
        assert owner.parent is not None and parent.id == parent._seq.id
        if owner.parent.branch is None:
            owner.parent.branch = parent
        assert owner.parent.branch is parent
        assert owner.branch in list(parent.children)

    @rule(when=numbers, pick=numbers, seconds=st.sampled_from([0, 1000]))
    def keep(self, when: int, pick: int, seconds: int) -> None:
        def verb() -> None:
            owner = self._pick(pick)
            if owner is not None and owner.branch is not None:
                try:
                    owner.branch.keep(seconds)
                except InvalidRequestError as error:
                    if "would be kept" not in str(error):
                        raise

        self._do(when, verb)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(count=st.integers(1, 6))
    def more_steps(self, count: int) -> None:
        self.steps(count)

    @rule(pick=numbers)
    def storm(self, pick: int) -> None:
        """Thousands of forks at once, which are pruned, closed and dropped again."""
        owner = self._pick(pick)
        if owner is None or self.num_storms:
            return
        assert owner.branch is not None
        self.num_storms += 1
        n = 10_000 if pick % 64 == 0 else 50
        self._publish(owner)
        children = owner.branch.fork(n)
        owner.num_forks += n
        works = [children[pick % n].generate(max_tokens=3)] if owner.ids else []
        self._step()
        for child in children[: n // 3]:
            child.prune()
        for child in children[n // 3 : n // 2]:
            child.close()
        del children, child
        self._step()
        for work in works:
            work.cancel()
        self._look()

    @rule(room=st.sampled_from([0, 1, 2, 5, 17]), copies=st.booleans(), count=st.integers(1, 8))
    def memory_is_short(self, room: int, copies: bool, count: int) -> None:
        """The device has room for small steps only, or for none, or not for copies."""
        self.rig.model.room = room
        self.rig.model.no_room_to_copy = copies
        self.steps(count)
        self.rig.model.room = None
        self.rig.model.no_room_to_copy = False

    @rule(nan_of=st.sampled_from([1, 3, 7]), count=st.integers(1, 4))
    def logits_are_nan(self, nan_of: int, count: int) -> None:
        self.failures.nan_of = nan_of
        self.steps(count)
        self.failures.nan_of = 0

    @rule(count=st.integers(1, 4))
    def tokenizer_raises(self, count: int) -> None:
        self.tokenizer.is_broken = True
        self.steps(count)
        self.tokenizer.is_broken = False

    @rule()
    def step_fails(self) -> None:
        """The model raises: the requests of that step end with it, everything else goes on."""
        if self.rig.engine.has_work and len(self.shadows) % 3 == 0:
            self.rig.model.fail = RuntimeError("made to fail")
            before = self.rig.last_step
            self.rig.step()
            self.rig.model.fail = None
            if self.rig.last_step is not before and self.rig.last_step is not None:
                for run in self.running:
                    if run.handle.done and not run.seen:
                        run.cancelled = True
            self._look()

    # ---- what must hold -----------------------------------------------------------------------

    def _publish(self, shadow: Shadow) -> None:
        """Tokens that a running generate has brought so far belong to the shadow."""
        run = shadow.busy
        if run is not None and run.kind == "generate" and shadow.branch is not None:
            seq = run.state.seq
            new = seq.ids(len(shadow.ids))
            shadow.ids += new
            shadow.sampled += [True] * len(new)

    def _look(self) -> None:
        """Take over what has ended; compare every branch with its shadow."""
        for run in [run for run in self.running if run.handle.done and not run.seen]:
            run.seen = True
            self.running.remove(run)
            self._take(run)
        for shadow in self.shadows:
            if shadow.branch is not None and not shadow.pruned:
                self._publish(shadow)
                seq = shadow.branch._seq
                assert seq.ids() == shadow.ids
                assert [bool(x) for x in seq.span.slice_sampled(0, seq.length)] == shadow.sampled
                assert (seq.seed, seq.epoch) == (shadow.seed, shadow.epoch)
                assert seq.is_busy == (shadow.busy is not None)

    def _take(self, run: Running) -> None:
        owner = run.owner
        if owner.busy is run:
            owner.busy = None
        if run.kind == "generate":
            state = run.state
            assert state is not None
            new = state.tokens[len(owner.ids) - run.start :]
            owner.ids += new
            owner.sampled += [True] * len(new)
            error = state.promise.error
            if owner.pruned:
                assert isinstance(error, BranchPrunedError)
            elif error is not None:
                assert isinstance(error, MADE_TO_FAIL), error
            elif run.cancelled:
                assert state.finish_reason == "abort"
            run.ids, run.sampled = owner.ids[: run.start], owner.sampled[: run.start]
            self.ended.append(run)
            return
        try:
            result = run.handle.result()
        except (BranchPrunedError, CancelledError, *MADE_TO_FAIL) as error:
            if isinstance(error, BranchPrunedError):
                assert owner.pruned
            elif isinstance(error, CancelledError):
                assert run.cancelled
            return
        scores = result.scores if run.kind == "choose" else result
        values = []
        for score, option in zip(scores, run.options, strict=True):
            assert score.token_ids == option
            path, expected = list(run.ids), []
            for token in option:
                expected.append(logprob(path, token))
                path.append(token)
            assert len(score.logprobs) == len(expected)
            assert all(abs(a - b) < 1e-4 for a, b in zip(score.logprobs, expected)), (
                score.logprobs,
                expected,
            )
            values.append(sum(expected) / (len(option) if run.by_mean else 1))
        if run.kind == "choose":
            assert values[result.index] > max(values) - 1e-3
            new = run.given + run.options[result.index]
            owner.ids += new
            owner.sampled += [False] * len(new)

    def _compare(self, run: Running) -> tuple[GenerationState, bool]:
        """The state, and whether it has to be equal to its twin to the end."""
        state = run.state
        assert state is not None
        complete = state.promise.error is None and state.finish_reason != "abort"
        if state.stop_reason == "kv_capacity":
            assert run.start + len(state.tokens) == self.capacity + 1
            complete = False
        return state, complete

    def _check_ended(self) -> None:
        """Each branch went on as the same tokens from scratch would."""
        twins = from_scratch(
            [run.state for run in self.ended if run.state is not None],
            MAX_LEN,
            [run.ids for run in self.ended],
            [run.sampled for run in self.ended],
        )
        for run, twin in zip(self.ended, twins, strict=True):
            state, complete = self._compare(run)
            if complete:
                assert state.tokens == twin.tokens
                assert (state.finish_reason, state.stop_reason) == (
                    twin.finish_reason,
                    twin.stop_reason,
                )
            else:
                assert state.tokens == twin.tokens[: len(state.tokens)]
            path = list(run.ids)
            assert len(state.logprobs) == len(state.tokens)
            for token, value in zip(state.tokens, state.logprobs):
                assert abs(value - logprob(path, token)) < 1e-4
                path.append(token)
            if state.params.logprobs is not None and complete:
                assert len(state.scores) == len(state.tokens)
            if state.params.prompt_logprobs is not None and complete:
                assert sorted(state.prompt_scores) == list(range(1, run.start))
                for position, scores in state.prompt_scores.items():
                    expected = logprob(run.ids[:position], run.ids[position])
                    assert math.isclose(scores.logprob, expected, abs_tol=1e-4)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run(limit=4000)
        self._look()
        assert not self.running
        self._check_ended()
        self.ended.clear()
        for shadow in self.shadows:
            if shadow.branch is not None:
                shadow.branch.prune()
        self.shadows.clear()
        self.rig.run()
        self.rig.check_empty()


__all__ = ["EOS", "PARAMS", "TreeProgram", "probs"]
