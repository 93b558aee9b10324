"""Verbs of random programs that the model works for: generate, submit, score, choose, cancel."""

from __future__ import annotations

from typing import Any

from draws import among, distinct_ids, ids, number, several, verb
from program_base import ProgramBase
from shadows import MAX_LEN, PARAMS, Running, Shadow, picked

from cotrt.errors import (
    BranchBusyError,
    InvalidRequestError,
    KVCacheExhaustedError,
    PromptTooLongError,
)
from cotrt.options.sampling import SamplingParams
from cotrt.program.handle import Handle
from cotrt.program.submission import submit
from cotrt.sampling.seeds import child_seed, output_seed, root_seed


class WorkVerbs(ProgramBase):
    """Works start, go on by steps, and are cancelled."""

    @verb(9, when=number, pick=number, params=among(*PARAMS))
    def generate(self, when: int, pick: int, params: SamplingParams) -> None:
        self.do(when, lambda: self.do_generate(pick, params))

    @verb(3, when=number, picks=several(number, 2, 3), params=number)
    def generate_many(self, when: int, picks: list[int], params: int) -> None:
        def act() -> None:
            for i, pick in enumerate(picks):
                self.do_generate(pick, PARAMS[(params + i) % len(PARAMS)])

        self.do(when, act)

    def do_generate(self, pick: int, params: SamplingParams) -> None:
        owner = self.pick(pick)
        if owner is not None:
            self.start(owner, params)

    def start(self, owner: Shadow, params: SamplingParams) -> None:
        """A generate of a branch, which may be refused."""
        assert owner.branch is not None
        length = len(owner.ids)
        try:
            if params.prompt_logprobs is None:
                handle: Any = owner.branch.generate(params)
            else:  # a completion has no place for them, a RequestOutput has
                [handle] = submit(self.rig.runtime, [owner.branch], params, default_max_tokens=None)
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
        run = Running("generate", owner, handle, self.new_key(), state, length)
        self.running.append(run)
        owner.busy = run
        self.look()

    @verb(2, when=number, prompts=several(ids, 1, 3), params=among(*PARAMS), n=among(1, 2, 3))
    def submit(self, when: int, prompts: list[list[int]], params: SamplingParams, n: int) -> None:
        self.do(when, lambda: self.do_submit(prompts, params.replace(n=n)))

    def do_submit(self, prompts: list[list[int]], params: SamplingParams) -> None:
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
            owner = Shadow(None, list(prompt), [False] * len(prompt), seed, self.new_key())
            run = Running("generate", owner, handle, self.new_key(), state, len(prompt))
            self.running.append(run)
        self.num_roots += len(prompts)
        self.look()

    @verb(4, when=number, pick=number, options=several(ids, 1, 4))
    def score(self, when: int, pick: int, options: list[list[int]]) -> None:
        given = options[-1][:5] if pick % 2 else []
        self.do(when, lambda: self._score(pick, options, given))

    def _score(self, pick: int, options: list[list[int]], given: list[int]) -> None:
        owner = self.pick(pick)
        if owner is None:
            return
        assert owner.branch is not None
        self.publish(owner)
        length = len(owner.ids) + len(given)
        try:
            handle: Handle[Any] = owner.branch.score(options, given=given)
        except (InvalidRequestError, PromptTooLongError, KVCacheExhaustedError):
            longest = length + max(map(len, options))
            assert length == 0 or longest > min(MAX_LEN, self.capacity)
            return
        ids = owner.ids + given
        run = Running("score", owner, handle, self.new_key(), ids=ids, options=options)
        self.running.append(run)

    @verb(4, when=number, pick=number, options=distinct_ids)
    def choose(self, when: int, pick: int, options: list[list[int]]) -> None:
        given = options[-1][:3] if pick % 2 else []
        self.do(when, lambda: self._choose(pick, options, given, bool(pick % 3)))

    def _choose(self, pick: int, options: list[list[int]], given: list[int], by_mean: bool) -> None:
        owner = self.pick(pick)
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
            self.new_key(),
            ids=owner.ids + given,
            options=options,
            given=given,
            by_mean=by_mean,
        )
        self.running.append(run)
        owner.busy = run

    @verb(3, when=number, pick=number)
    def cancel(self, when: int, pick: int) -> None:
        self.do(when, lambda: self.do_cancel(pick))

    def pick_run(self, pick: int) -> Running | None:
        """A work that runs."""
        if not self.running:
            return None
        return picked(self.running, pick, lambda run: run.key)

    def do_cancel(self, pick: int) -> None:
        run = self.pick_run(pick)
        if run is None:
            return
        if not run.handle.done:
            run.cancelled = True
            run.handle.cancel()
            assert run.handle.done
            if run.owner.branch is not None and not run.owner.pruned and run.owner.busy is run:
                assert not run.owner.branch._seq.is_busy
        self.look()

    @verb(14, count=among(1, 2, 3, 4, 5, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
