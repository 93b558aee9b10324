"""A random program over an engine: what it has, and what must hold after each of its verbs."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from engine_rig import Rig, from_scratch
from logged_model import VOCAB, logprob
from made_to_fail import FlakyTokenizer, FlakyWeights
from shadows import MAX_LEN, Running, Shadow, picked

from cotrt.engine.state import GenerationState
from cotrt.errors import BranchPrunedError
from cotrt.sampling.seeds import root_seed


class ProgramBase:
    """Branches grow and are cut while steps run; everything is compared with shadows.

    Attributes:
        rig: the engine, whose laws are checked after every step.
        shadows: every branch that was made; running: works that have not ended; ended: generates
            that have, and are compared with their twins from scratch in the end.
        errors: what works may end with by now, since something was made to fail so.
        ends: how many works ended by which error.
        new_rig: makes the engine.
        chance: how fast devices and disks are. Each verb begins it anew, so that it does not depend
            on the verbs before.
    """

    rig: Rig

    def __init__(self) -> None:
        self.shadows: list[Shadow] = []
        self.running: list[Running] = []
        self.ended: list[Running] = []
        self.num_roots = 0
        self.weights = FlakyWeights()
        self.tokenizer = FlakyTokenizer(VOCAB)
        self.errors: set[type[BaseException]] = set()
        self.ends: Counter[str] = Counter()
        self.new_rig: Callable[..., Rig] = Rig
        self.chance = random.Random(0)
        self._verb = 0
        self._num_made = 0

    def make(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        scored: int,
        match: bool,
        ids: list[int],
        **settings: Any,
    ) -> None:
        """The engine, and a first root of `ids`.

        Args:
            budget: rows of a step; scored: of these, logits rows of scores; match: reuse KV of
                earlier prompts; settings: of what else a program has.
        """
        self.capacity = num_blocks * block_size
        self.rig = self.new_rig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            match_prompts=match,
            max_model_len=MAX_LEN,
            next_probs=self.weights.probs,
            tokenizer=self.tokenizer,
        )
        self.rig.scheduler._max_scored_rows = scored
        self.new_root(ids)

    def happened(self) -> Counter[str]:
        """How often what has happened that a program is there for."""
        return Counter({f"ended by {name}": n for name, n in self.ends.items()})

    def dispose(self) -> None:
        """Leave nothing behind, however the program ended."""

    # ---- how verbs act ------------------------------------------------------------------------

    def begin_verb(self, seed: int) -> None:
        """What a verb meets by chance comes of its own seed."""
        self.chance.seed(seed)
        self._verb, self._num_made = seed, 0

    def new_key(self) -> int:
        """Of a branch that the verb makes."""
        self._num_made += 1
        return hash((self._verb, self._num_made))

    def do(self, when: int, act: Callable[[], None]) -> None:
        """Now, or (two in three times) while a step is in flight."""
        if when % 3 and self.rig.engine.has_work:
            self.rig.model.in_flight.append(act)
            self.step()
            while self.rig.model.in_flight:  # no step had to run
                self.rig.model.in_flight.popleft()()
        else:
            act()
        self.look()

    def step(self) -> None:
        self.rig.step()
        self.look()

    def held(self) -> list[Shadow]:
        return [s for s in self.shadows if s.branch is not None and not s.pruned]

    def pick(self, number: int) -> Shadow | None:
        held = self.held()
        return picked(held, number, lambda s: s.key) if held else None

    def new_root(self, ids: list[int]) -> None:
        seed = root_seed(0, self.num_roots)
        branch = self.rig.root(ids)
        self.num_roots += 1
        self.shadows.append(Shadow(branch, list(ids), [False] * len(ids), seed, self.new_key()))

    # ---- what must hold -----------------------------------------------------------------------

    def publish(self, shadow: Shadow) -> None:
        """Tokens that a running generate has brought so far belong to the shadow."""
        run = shadow.busy
        if run is not None and run.state is not None and shadow.branch is not None:
            new = run.state.seq.ids(len(shadow.ids))
            shadow.ids += new
            shadow.sampled += [True] * len(new)

    def look(self) -> None:
        """Take over what has ended; compare every branch with its shadow."""
        for run in [run for run in self.running if run.handle.done and not run.seen]:
            run.seen = True
            self.running.remove(run)
            self._take(run)
        for shadow in self.shadows:
            if shadow.branch is not None and not shadow.pruned:
                self.publish(shadow)
                seq = shadow.branch._seq
                assert seq.ids() == shadow.ids, f"branch {seq.id} has other tokens"
                sampled = seq.span.slice_sampled(0, seq.length)
                assert sampled == bytes(shadow.sampled), f"branch {seq.id}: what was sampled"
                assert (seq.seed, seq.epoch) == (shadow.seed, shadow.epoch)
                assert seq.is_busy == (shadow.busy is not None)

    def _take(self, run: Running) -> None:
        if run.owner.busy is run:
            run.owner.busy = None
        if run.kind == "generate":
            self._take_generate(run)
        else:
            self._take_scores(run)

    def _take_generate(self, run: Running) -> None:
        owner, state = run.owner, run.state
        assert state is not None
        new = state.tokens[len(owner.ids) - run.start :]
        owner.ids += new
        owner.sampled += [True] * len(new)
        error = state.promise.error
        if error is not None:
            self.ends[type(error).__name__] += 1
        if owner.pruned:
            assert isinstance(error, BranchPrunedError)
        elif error is not None:
            assert type(error) in self.errors, f"a generate ended with {error!r}"
        elif run.cancelled:
            assert state.finish_reason == "abort"
        run.ids, run.sampled = owner.ids[: run.start], owner.sampled[: run.start]
        self.ended.append(run)

    def _take_scores(self, run: Running) -> None:
        owner = run.owner
        try:
            result = run.handle.result()
        except BranchPrunedError:
            assert owner.pruned
            return
        except CancelledError:
            assert run.cancelled
            return
        except tuple(self.errors) as error:
            self.ends[type(error).__name__] += 1
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
                f"scored {score.logprobs}, they are {expected}"
            )
            values.append(sum(expected) / (len(option) if run.by_mean else 1))
        if run.kind == "choose":
            assert values[result.index] > max(values) - 1e-3
            new = run.given + run.options[result.index]
            owner.ids += new
            owner.sampled += [False] * len(new)

    def _has_to_be_equal(self, run: Running, state: GenerationState) -> bool:
        """Whether it has to be equal to its twin to the end."""
        if state.stop_reason == "kv_capacity":
            assert run.start + len(state.tokens) == self.capacity + 1
            return False
        return state.promise.error is None and state.finish_reason != "abort"

    def check_ended(self) -> None:
        """Each branch went on as the same tokens from scratch would."""
        twins = from_scratch(
            [run.state for run in self.ended if run.state is not None],
            MAX_LEN,
            [run.ids for run in self.ended],
            [run.sampled for run in self.ended],
        )
        for run, twin in zip(self.ended, twins, strict=True):
            state = run.state
            assert state is not None
            complete = self._has_to_be_equal(run, state)
            if complete:
                assert state.tokens == twin.tokens, "another text than from scratch"
                assert (state.finish_reason, state.stop_reason) == (
                    twin.finish_reason,
                    twin.stop_reason,
                )
            else:
                assert state.tokens == twin.tokens[: len(state.tokens)], (
                    "another text than from scratch"
                )
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
        self.ended.clear()

    def teardown(self) -> None:
        """All works end, all twins are equal, and nothing is left once all is pruned."""
        self.rig.run(limit=20_000)
        self.look()
        assert not self.running
        self.check_ended()
        for shadow in self.shadows:
            if shadow.branch is not None:
                shadow.branch.prune()
        self.shadows.clear()
        self.rig.run()
        self.rig.check_empty()
