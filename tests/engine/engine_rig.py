"""An engine without a thread, over a model that checks every row; laws are checked every step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from logged_model import LoggedModel
from path_kv import check_chains

from cotrt.engine.driver import Driver
from cotrt.engine.engine import Engine
from cotrt.engine.records.record_stores import TierOptions
from cotrt.engine.state import GenerationState
from cotrt.models.tokenizer import Tokenizer
from cotrt.options.sampling import SamplingParams
from cotrt.program import runtime as runtime_module
from cotrt.program.branch import Branch
from cotrt.program.runtime import Runtime
from cotrt.program.stats import memory_stats, metrics


class StillDriver(Driver):
    """A driver without a thread: steps are taken by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forked = False
        self._wake = threading.Event()
        self._stopping = False


class Rig:
    """An engine, its runtime and its model, driven by hand; laws are checked after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 1 << 16,
        match_prompts: bool = True,
        seed: int = 0,
        model: Any = None,
        check: bool = True,
        tiers: TierOptions | None = None,
        **model_options: Any,
    ) -> None:
        assert model is None or not model_options, f"not for a model that is given: {model_options}"
        self.model = LoggedModel(**model_options) if model is None else model
        self.engine = Engine(
            self.model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            match_prompts=match_prompts,
            seed=seed,
            tiers=tiers,
        )
        self.tree, self.scheduler = self.engine.tree, self.engine.scheduler
        with mock.patch.object(runtime_module, "Driver", StillDriver):
            self.runtime = Runtime(
                self.engine,
                tokenizer=Tokenizer.from_object(self.model.tokenizer),
                eos_ids=self.model.eos_token_ids,
                defaults={},
                max_model_len=max_model_len,
            )
        self.checks = check
        self.after_step: Callable[[], None] = lambda: None
        self.num_steps = 0
        self.last_step: Any = None
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._remember_step  # type: ignore[method-assign]
        if isinstance(self.model, LoggedModel):
            self.model.expected = self._expected_paths
            self.model.on_load = self._check_load

    def _remember_step(self) -> Any:
        self.last_step = self._schedule()
        return self.last_step

    def _expected_paths(self) -> list[list[int]]:
        step = self.last_step
        owners = [entry.work.seq for entry in step.entries for _ in range(entry.num_rows)]
        for seq, slot in zip(owners, step.plan.slot_mapping.tolist(), strict=True):
            if slot >= 0:
                self._check_write(seq, *divmod(slot, self.tree.block_size))
        positions, paths = step.plan.positions.tolist(), list[list[int]]()
        for entry in step.entries:
            rows = positions[entry.first_row : entry.first_row + entry.num_rows]
            ids = entry.work.seq.ids(0, max(rows, default=-1) + 1)
            paths += [ids[: position + 1] for position in rows]
        return paths

    def _check_load(self, block: int) -> None:
        """Nobody sees the block that a record goes to before the step is over."""
        assert not self.tree.pool.sealed[block], f"a record goes into sealed block {block}"
        for seq in self.scheduler.sequences:
            seen = -(-seq.private_len // self.tree.block_size)
            assert block not in seq.private[:seen], f"a record goes under {seq.id}"

    def _check_write(self, writer: Any, block: int, offset: int) -> None:
        """The slot is in no sealed block, and nobody but the writer sees it."""
        assert not self.tree.pool.sealed[block], f"sealed block {block} is written"
        for seq in self.scheduler.sequences:
            if seq is not writer and block in seq.private:
                assert seq.private_len <= offset, f"block {block} is written under {seq.id}"

    # ---- verbs --------------------------------------------------------------------------------

    def root(self, ids: Sequence[int]) -> Branch:
        return Branch(self.runtime, self.engine.table.new_root(list(ids)))

    def start(
        self, branch: Branch, params: SamplingParams | None = None, **fields: Any
    ) -> GenerationState:
        """`branch.generate`, as the engine's own record."""
        params = SamplingParams(**fields) if params is None else params
        state = self.runtime.new_state(branch._seq, params, default_max_tokens=None)
        self.engine.start_generation(state)
        return state

    def step(self) -> bool:
        self.num_steps += 1
        more = self.engine.step()
        if isinstance(self.model, LoggedModel) and self.model.broken is not None:
            raise self.model.broken
        if self.engine.dead is not None:
            raise self.engine.dead
        self.after_step()
        if self.checks:
            self.check()
        return more

    def run(self, limit: int = 5000) -> int:
        """Step until nothing is left to do; how many steps that took."""
        for count in range(limit):
            if not self.step() and not self.engine.has_work:
                return count
        raise AssertionError(
            f"no end after {limit} steps: {len(self.scheduler.running)} running, "
            f"{len(self.scheduler.waiting)} waiting"
        )

    def solo(self, state: GenerationState) -> GenerationState:
        """The same generate alone in a large, fresh engine."""
        seq, start = state.seq, state.start
        return solo(
            tuple(seq.ids(0, start)),
            seq.span.slice_sampled(0, start),
            state.params,
            state.seed,
            state.epoch,
            self.runtime.max_model_len,
        )

    @property
    def ahead(self) -> Any:
        """The step that runs ahead of the device: none, but on a late one."""
        return None

    def is_ahead(self, seq: Any) -> bool:
        """`seq` has a row in the step that runs ahead."""
        return False

    # ---- laws ---------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, int]:
        return metrics(self.engine)

    def check(self) -> None:
        """The laws of the house, recomputed from outside."""
        self.engine.check_invariants()
        pool = self.tree.pool
        assert pool.num_free + pool.num_cached + pool.num_in_use == pool.num_blocks, (
            "free + cached + in use is not the total"
        )
        self.check_memory()
        if not isinstance(self.model, LoggedModel):
            return
        held = self._contents()
        ids, chains = held[:, : self.tree.block_size].tolist(), list[tuple[int, int, int]]()
        for node in self.tree.nodes():
            before = _last_block(node.parent)
            for block, key in zip(node.blocks, node.keys):
                assert tuple(ids[block]) == key, f"sealed block {block} has changed"
                chains.append((block, before, len(key)))
                before = block
        for seq in self.scheduler.sequences:
            if seq.private_len:
                tail = ids[seq.private[0]][: seq.private_len]
                assert tail == seq.ids(seq.node.end, seq.num_computed), f"tail of {seq.id}"
                chains.append((seq.private[0], _last_block(seq.node), seq.private_len))
            if not self.engine._in_flight and seq.work is None:
                assert len(seq.private) <= 1, f"idle sequence {seq.id} holds {seq.private}"
        if self.model.logs:
            check_chains(held, chains)
        self.check_counts()

    def _contents(self) -> npt.NDArray[np.int32]:
        """``[num_blocks, 2 * block_size]``: of each block its token ids, and their hashes."""
        return self.model.contents()

    def check_memory(self) -> None:
        """What is empty of the slots in use is the rest of each tail, and no more.

        While a step is in flight, a block that it begins is empty altogether.
        """
        memory = memory_stats(self.engine)
        assert memory.free + memory.in_use + memory.cached == memory.total, f"{memory}"
        owned = {b for node in self.tree.nodes() if node.num_live for b in node.blocks}
        tails = {b for seq in self.scheduler.sequences for b in seq.private} - owned
        empty = memory.in_use * memory.block_size - memory.tokens_stored
        begun = sum(
            len(seq.private) - -(-seq.private_len // memory.block_size)
            for seq in self.scheduler.sequences
        )
        assert not begun or self.engine._in_flight
        assert 0 <= empty <= len(tails) * (memory.block_size - 1) + begun, (
            f"{empty} empty slots in use, in {len(tails)} tails and {begun} blocks that are begun"
        )

    def check_counts(self) -> None:
        """Every computed row is a first computation or counted as computed again."""
        counts = self.metrics
        first = counts["prompt_tokens_computed"] + counts["generated_tokens_computed"]
        assert first == len(self.model.computed), (
            f"{first} tokens are counted as computed first, it were {len(self.model.computed)}"
        )
        assert counts["recomputed_tokens"] == self.model.num_rows - first, (
            f"{counts['recomputed_tokens']} tokens are counted as computed again, "
            f"it were {self.model.num_rows - first}"
        )

    def check_empty(self) -> None:
        """Nothing is live: the whole pool is free or cached."""
        assert not self.scheduler.sequences, "sequences are left"
        assert not self.scheduler.has_work, "work is left"
        assert not self.tree.root.tips, "tips are left"
        pool = self.tree.pool
        assert (pool.num_in_use, pool.num_free + pool.num_cached) == (0, pool.num_blocks), (
            f"nothing is live, and {pool.num_in_use} blocks are in use"
        )
        assert all(node.num_live == 0 for node in self.tree.nodes())


def _last_block(node: Any) -> int:
    """A node's last block; -1 for the tree's root."""
    return node.blocks[-1] if node.blocks else -1


@lru_cache(maxsize=4096)
def solo(
    ids: tuple[int, ...],
    sampled: bytes,
    params: SamplingParams,
    seed: int,
    epoch: int,
    max_model_len: int,
) -> GenerationState:
    """A generate from `ids` (of which `sampled` were sampled) in an engine of its own."""
    rig = Rig(num_blocks=512, block_size=16, max_model_len=max_model_len, check=False)
    rig.model.logs = False
    branch = rig.root(ids)
    branch._seq.span.sampled[:] = sampled
    state = rig.runtime.new_state(branch._seq, params, default_max_tokens=None)
    state.seed, state.epoch = seed, epoch
    rig.engine.start_generation(state)
    rig.run()
    return state


def from_scratch(
    states: Sequence[GenerationState],
    max_model_len: int,
    prompts: Sequence[list[int]],
    sampled: Sequence[list[bool]],
) -> list[GenerationState]:
    """The same generates from prompts of their own, sharing nothing, in a large, fresh engine."""
    rig = Rig(
        num_blocks=1024,
        block_size=16,
        max_model_len=max_model_len,
        match_prompts=False,
        check=False,
    )
    rig.model.logs = False
    again = []
    for state, prompt, flags in zip(states, prompts, sampled, strict=True):
        branch = rig.root(prompt)
        branch._seq.span.sampled[:] = bytes(flags)
        copy = rig.runtime.new_state(branch._seq, state.params, default_max_tokens=None)
        copy.seed, copy.epoch = state.seed, state.epoch
        rig.engine.start_generation(copy)
        again.append(copy)
    rig.run()
    return again
