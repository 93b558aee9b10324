"""A device that runs behind the host, as late as it may, and a rig whose engine runs ahead of it.

Operations wait in one queue. They run when the host waits for one of them (and then all before
it), or earlier at moments drawn at random. They read the arrays of plans and batches only then, so
that one which the host changed shows; blocks that are free once a step is launched are overwritten
behind it, so that a read of them in any later step shows. Copies of records to and from the host
wait in a second queue, which runs at moments of its own.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engine_rig import Rig
from logged_model import LoggedModel, probs

from cotrt.engine.engine import Flight
from cotrt.kernels.cpu.sample import sample as native_sample
from cotrt.kernels.reference.candidates import BlockedLogits
from cotrt.kernels.reference.sample import MIN_TEMPERATURE, Draws, sample_filtered, sample_plain
from cotrt.plan import StepPlan, UInt8
from cotrt.sampling.sampler import token_logprobs
from cotrt.testing import ScriptedModel
from cotrt.tree.schedule.work import WorkState

POISON = -7


class LateTensor:
    """What an operation will have brought. Whoever looks at it waits for it."""

    def __init__(self, run_one: Callable[[], None]) -> None:
        self._run_one = run_one
        self.value: torch.Tensor | None = None
        self.error: Exception | None = None

    def now(self) -> torch.Tensor:
        """The tensor, once the device has come that far; raises what its operation raised."""
        while self.value is None and self.error is None:
            self._run_one()
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.now()[index]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        return function(*map(present, arguments), **(options or {}))


def present(value: Any) -> Any:
    """`value`, waited for where it is a `LateTensor`."""
    return value.now() if isinstance(value, LateTensor) else value


# What comes into blocks, by block: a block that is copied, or what a record holds.
Move = dict[int, "int | npt.NDArray[np.int32]"]
Operation = tuple[Callable[[], Any], list[LateTensor]]


class LateDevice:
    """A queue of operations, and one of copies beside it.

    Args:
        pace: how many of the waiting ones run by themselves when one more comes; 0 for none.
    """

    def __init__(self, pace: Callable[[], int]) -> None:
        self._pace = pace
        self._queue: collections.deque[Operation] = collections.deque()
        self._aside: collections.deque[Operation] = collections.deque()

    def enqueue(self, call: Callable[[], Any], num_results: int = 1) -> list[LateTensor]:
        """Run `call` later; it returns so many tensors."""
        results = [LateTensor(self.run_one) for _ in range(num_results)]
        self._queue.append((call, results))
        self._run_some()
        return results

    def enqueue_aside(self, call: Callable[[], Any]) -> LateTensor:
        """Run `call`, which returns a tensor, in the other queue; what it needs it waits for."""
        result = LateTensor(lambda: _run_first(self._aside))
        self._aside.append((lambda: (call(),), [result]))
        self._run_some()
        return result

    def _run_some(self) -> None:
        for queue in (self._queue, self._aside):
            for _ in range(self._pace() if queue else 0):
                if queue:
                    _run_first(queue)

    def run_one(self) -> None:
        _run_first(self._queue)

    def run_all(self) -> None:
        while self._queue:
            self.run_one()


def _run_first(queue: collections.deque[Operation]) -> None:
    call, results = queue.popleft()
    try:
        values = call()
    except Exception as error:  # every operation behind it that needs its results fails too
        for result in results:  # which do not keep the frames of whoever came to wait
            result.error = error.with_traceback(None)
        return
    for result, value in zip(results, values or (), strict=True):
        result.value = value


@dataclass(eq=False)
class Run:
    """A step on the device.

    Attributes:
        expected: path of each row as of the launch; None where the step before draws its input.
        before: that step.
        paths: what each row saw, once the step has run.
        is_read: the host has waited for its draws.
    """

    plan: StepPlan
    expected: list[list[int]] | None
    before: Run | None
    paths: list[list[int]] | None = None
    token_ids: LateTensor | None = None
    is_read: bool = False


class LateCopy:
    """Tensors that the host may wait for; verbs of the test act before it does."""

    def __init__(self, model: LateModel, run: Run | None, tensors: Sequence[LateTensor]) -> None:
        self._model = model
        self._run = run
        self._host = [
            model.device.enqueue(lambda tensor=tensor: (tensor.now().clone(),))[0]
            for tensor in tensors
        ]

    def wait(self) -> list[torch.Tensor]:
        if self._run is not None:
            self._run.is_read = True
        self._model._run_in_flight()
        return [tensor.now() for tensor in self._host]


class LateRecords:
    """Records of which the host has nothing before it waits."""

    seconds = 0.0

    def __init__(self, host: LateTensor) -> None:
        self._host = host

    def wait(self) -> UInt8:
        found: UInt8 = self._host.now().numpy()
        return found


class LateModel(LoggedModel):
    """A `LoggedModel` on a late device.

    Attributes:
        device: its queue.
        fails_late: `fail` comes out of the device and not out of the launch.
        num_ahead: steps launched before the draws they take as input were read.
        num_failed_ahead: of these, how many were made to fail.
        runs: by the id of its plan, each step; the plan is held, so the id stays its own.
        waiting_moves: copies and loads that are not made yet, in their order, a call each: block to
            the one that is copied into it, or to what is loaded.
        free_blocks: gives the blocks that are free now.
    """

    is_asynchronous = True

    def __init__(self, *, pace: Callable[[], int] = lambda: 0, **options: Any) -> None:
        super().__init__(**options)
        self.device = LateDevice(pace)
        self.fails_late = False
        self.num_ahead = 0
        self.num_failed_ahead = 0
        self.runs: dict[int, Run] = {}
        self.waiting_moves: list[Move] = []
        self.free_blocks: Callable[[], list[int]] = list
        self.expected_of: Callable[[StepPlan, bool], list[list[int]] | None] = lambda *_: None
        self._last: Run | None = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.no_room_to_copy:
            self.no_room_to_copy = False
            self.num_shortages += 1
            raise MemoryError("made to fail: no memory for a copy")

        def execute() -> None:
            assert self.waiting_moves.pop(0) is waiting
            self._copy(pairs)

        waiting: Move = {target: source for source, target in pairs}
        self.waiting_moves.append(waiting)
        self.device.enqueue(execute, 0)

    def read_blocks(self, blocks: Sequence[int]) -> UInt8:
        self.device.run_all()
        return super().read_blocks(blocks)

    def start_reading(self, blocks: Sequence[int]) -> LateRecords:
        def gather() -> tuple[torch.Tensor]:
            return (torch.from_numpy(LoggedModel.read_blocks(self, blocks)),)

        (gathered,) = self.device.enqueue(gather)
        return LateRecords(self.device.enqueue_aside(lambda: gathered.now().clone()))

    def write_blocks(self, blocks: Sequence[int], records: UInt8) -> None:
        if self.on_load is not None:
            for block in blocks:
                self.on_load(block)
        kept = torch.from_numpy(records.copy())
        loads: Move = dict(zip(blocks, kept.view(torch.int32).numpy(), strict=True))
        there = self.device.enqueue_aside(lambda: kept)

        def scatter() -> None:
            assert self.waiting_moves.pop(0) is loads
            self._put(blocks, there.now().numpy())

        self.waiting_moves.append(loads)
        self.device.enqueue(scatter, 0)

    def run(self, step: StepPlan, input_ids: Any = None) -> Any:
        if self.room is not None and len(step.positions) > self.room:
            self.num_shortages += 1
            raise torch.OutOfMemoryError(f"made to fail: {len(step.positions)} rows")
        error, self.fail = self.fail, None
        self.num_failed_ahead += error is not None and input_ids is not None
        if error is not None and not self.fails_late:
            raise error
        before = None
        if input_ids is not None:
            before = self._last
            assert before is not None and before.token_ids is input_ids
            assert (step.input_ids == -1).all()
            self.num_ahead += not before.is_read
        run = Run(step, self.expected_of(step, before is not None), before)
        self.runs[id(step)] = self._last = run

        def execute() -> tuple[torch.Tensor]:
            if error is not None:
                raise error
            ids = None if before is None else input_ids.now()
            try:
                return (self._execute(run, ids),)
            except Exception as broken:
                self.broken = broken
                raise

        logits = self.device.enqueue(execute)[0]
        free = self.free_blocks()
        self.device.enqueue(lambda: self._overwrite(free), 0)
        return logits

    def _overwrite(self, blocks: list[int]) -> None:
        self._kv[blocks] = POISON
        self._hashes[blocks] = 0

    def _execute(self, run: Run, input_ids: torch.Tensor | None) -> torch.Tensor:
        plan, expected = run.plan, run.expected
        if input_ids is not None:
            ids = input_ids.clamp(min=0).numpy()
            plan = replace(plan, input_ids=ids)
            assert run.before is not None and run.before.paths is not None
            expected = [
                [*path, token] for path, token in zip(run.before.paths, ids.tolist(), strict=True)
            ]
        logits = ScriptedModel.run(self, plan)
        paths = self._computed(plan)
        run.paths = [paths.of(row) for row in range(len(plan.positions))]
        if expected is not None:
            assert run.paths == expected
        self.num_logits_rows += len(plan.logits_rows)
        return logits

    def sample(self, logits: Any, *arguments: Any, raw: Any, raw_rows: Any) -> list[LateTensor]:
        def execute() -> tuple[torch.Tensor, ...]:
            return draw(present(logits), *arguments, raw=present(raw), raw_rows=raw_rows)

        drawn = self.device.enqueue(execute, 3)
        if self._last is not None:
            self._last.token_ids = drawn[0]
        return drawn

    def fetch(self, *tensors: LateTensor) -> LateCopy:
        assert tensors
        return LateCopy(self, self._last, tensors)


def draw(
    logits: torch.Tensor,
    rows: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    low: Any,
    high: Any,
    *,
    raw: torch.Tensor,
    raw_rows: Any,
) -> tuple[torch.Tensor, ...]:
    """The contract of `cotrt.kernels.triton.sample.sample`, by the kernel that others draw with.

    The native one and the reference differ where a token's mass lies within rounding of top_p.
    """
    if LoggedModel.backend_name == "cpu":
        drawn = native_sample(
            logits, rows, temperature, top_k, top_p, min_p, low, high, raw=raw, raw_rows=raw_rows
        )
        return tuple(map(torch.from_numpy, drawn))
    matrix, at = BlockedLogits(logits), torch.from_numpy(rows.astype(np.int64))
    bad = ~torch.isfinite(matrix.top[at])
    ids = matrix.matrix.argmax(dim=1)[at]
    filtered = (top_k > 0) & (top_k < logits.shape[1]) | (top_p < 1) | (min_p > 0)
    for chosen in (filtered, ~filtered):
        chosen = chosen & (temperature > 0) & ~bad.numpy()
        if chosen.any():
            draws = Draws(
                rows=at[chosen],
                temperature=torch.from_numpy(temperature[chosen]).double().clamp(MIN_TEMPERATURE),
                top_k=torch.from_numpy(top_k[chosen]).long(),
                top_p=torch.from_numpy(top_p[chosen]).double(),
                min_p=torch.from_numpy(min_p[chosen]).double(),
                key_low=torch.from_numpy(low[chosen].view(np.int32)),
                key_high=torch.from_numpy(high[chosen].view(np.int32)),
            )
            kept = filtered[chosen].all()
            found = sample_filtered(matrix, draws)[0] if kept else sample_plain(matrix, draws)
            ids[torch.from_numpy(chosen)] = found
    given = torch.from_numpy(raw_rows.astype(np.int64))
    logprobs = torch.from_numpy(token_logprobs(raw, given, ids, np.full(len(ids), -1, np.int32))[0])
    ids[bad] = -1
    logprobs[bad] = torch.nan
    return ids.int(), logprobs, bad


def random_pace(seed: int, pick: random.Random | None = None) -> Callable[[], int]:
    """None at all for a third of the seeds; else 0 to 3 operations at a time.

    Args:
        pick: what they are drawn from; None: from the seed.
    """
    pick = random.Random(seed) if pick is None else pick
    return (lambda: 0) if seed % 3 == 0 else (lambda: pick.choice([0, 0, 0, 1, 2, 3]))


class LateRig(Rig):
    """A rig over a `LateModel`.

    Counts only what an engine that runs one step at a time would have computed: a row that was
    computed ahead for a work that had ended when the step before was through is left out.

    Attributes:
        fences: how often each thing happened that a step in flight had to be fenced against.
    """

    def __init__(
        self,
        *,
        pace: Callable[[], int] = lambda: 0,
        next_probs: Callable[[list[int]], Any] = probs,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        self.fences: collections.Counter[str] = collections.Counter()
        model = LateModel(pace=pace, next_probs=next_probs, tokenizer=tokenizer)
        super().__init__(model=model, **options)
        self.model.free_blocks = lambda: list(self.tree.pool._free)
        self.model.expected_of = self._expected_of
        self._over: set[Any] = set()  # entries of the step in flight whose works have ended
        self._shared: set[int] = set()  # tails that were forked under a write in flight
        self._freed: set[int] = set()  # blocks that were freed under a step in flight
        self._schedule_ahead = self.scheduler.decode.ahead
        self.scheduler.decode.ahead = self._remember_ahead  # type: ignore[method-assign]
        self._commit = self.scheduler.commit
        self.scheduler.commit = self._count_step  # type: ignore[method-assign]
        self._update = self.engine._update
        self.engine._update = self._note_ended  # type: ignore[method-assign]

    @property
    def ahead(self) -> Flight | None:
        """The step that was launched with the draws of another, while that one is waited for."""
        flight = self.engine._flight
        run = None if flight is None else self.model.runs.get(id(flight.step.plan))
        return flight if run is not None and run.before is not None else None

    def is_ahead(self, seq: Any) -> bool:
        """`seq` has a row in the step that runs ahead."""
        flight = self.ahead
        return flight is not None and any(e.work.seq is seq for e in flight.step.entries)

    def _remember_ahead(self, step: Any) -> Any:
        made = self._schedule_ahead(step)
        if made is not None:
            self.last_step = made
        return made

    def _expected_of(self, plan: StepPlan, is_ahead: bool) -> list[list[int]] | None:
        step = self.last_step
        assert step.plan is plan
        if not is_ahead:
            self.fences["copy"] += any(source in self._shared for source, _ in plan.copies)
            written = set((plan.slot_mapping // self.tree.block_size).tolist())
            self.fences["reuse"] += bool(written & self._freed)
            self._freed -= written
            return self._expected_paths()
        for entry, slot in zip(step.entries, plan.slot_mapping.tolist(), strict=True):
            self._check_write(entry.work.seq, *divmod(slot, self.tree.block_size))
        return None

    def _note_ended(self, step: Any, result: Any, behind: Any) -> None:
        self._update(step, result, behind)
        self._over = set()
        if behind is not None:
            ended = [e for e in behind.entries if e.work.state is not WorkState.RUNNING]
            self._over = set(map(id, ended))
            self.fences["dropped"] += bool(ended)
            self.fences["all dropped"] += len(ended) == len(behind.entries)

    def _count_step(self, step: Any, failed: Collection[bytes] = ()) -> None:
        self.fences["load"] += bool(step.loads)
        self.fences["store"] += bool(step.plan.stores)
        if step.entries:
            self._count_rows(step)
        self._commit(step, failed)

    def _count_rows(self, step: Any) -> None:
        run = self.model.runs[id(step.plan)]
        assert run.paths is not None
        for entry in step.entries:
            if run.before is not None and id(entry) in self._over:
                continue
            for row in range(entry.first_row, entry.first_row + entry.num_rows):
                self.model.num_rows += 1
                if step.plan.slot_mapping[row] >= 0:
                    self.model.computed.add(tuple(run.paths[row]))
                elif tuple(run.paths[row]) not in self.model.computed:
                    raise AssertionError(f"row {row} takes KV that nobody has computed")

    def _contents(self) -> npt.NDArray[np.int32]:
        """What blocks hold, or will hold once what waits on the device has been put into them."""
        held = super()._contents()
        for waiting in self.model.waiting_moves:
            moved = [held[x].copy() if isinstance(x, int) else x for x in waiting.values()]
            held[list(waiting)] = moved
        return held

    def check(self) -> None:
        flight = self.ahead
        if flight is not None:
            freed = blocks_read(flight.step.plan) & set(self.tree.pool._free)
            self.fences["free"] += bool(freed)
            self._freed |= freed
        super().check()


def blocks_read(plan: StepPlan) -> set[int]:
    """Blocks that the rows of a step see, those that they write among them."""
    attention, found = plan.attention, set()
    for group in range(attention.num_groups):
        first = int(attention.group_block_offsets[group])
        count = -(-int(attention.group_len[group]) // attention.block_size)
        found |= set(attention.group_blocks[first : first + count].tolist())
    return found


__all__ = ["LateModel", "LateRig", "random_pace"]
