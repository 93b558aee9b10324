"""Saving branches and making them again: what is taken from the engine, and what is put back.

A save holds what it reads by internal forks, and reads KV in pieces between steps, so that running
work waits for a piece at most. Blocks that are taken away under pressure in the meantime are
missing in the file, and computed again by whoever loads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cotrt.engine.engine import Engine
from cotrt.engine.promise import Promise
from cotrt.engine.records.saved_source import SavedSource
from cotrt.errors import BranchPrunedError, SavedBranchError
from cotrt.options.sampling import StructuredOutputs
from cotrt.plan import UInt8
from cotrt.saved.layout import Chunk, SavedBranch, chunks_of
from cotrt.saved.writer import SavedWriter
from cotrt.tree.sequence import Sequence as TokenSequence
from cotrt.tree.tokens import TokenSpan

# Bytes of KV that are read between two steps, and for how long what is held is evicted last.
_PIECE_BYTES = 8 << 20
_KEEP_SECONDS = 60.0


class _Record(NamedTuple):
    """A record in a tier: KV of positions `start` to `stop`."""

    start: int
    stop: int
    key: bytes


@dataclass(slots=True, eq=False)
class _Found:
    """What there is of a chunk.

    Attributes:
        head: its beginning, from the pool.
        rest: the records with what follows.
        waiting: those of `rest` whose store is planned, by key: their blocks are in the pool still.
    """

    head: UInt8 | None
    rest: list[_Record]
    waiting: dict[bytes, UInt8] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Held:
    """One branch as it was when the save was called.

    Attributes:
        seq: the branch's own sequence; fork: an internal one that holds its tokens and KV.
        parent: index of the parent among those held, -1 for the first.
        row: what the file says of it beside its tokens.
        shared: tokens that it has in common with its parent.
        records: those in memory tiers that follow its sealed KV.
    """

    seq: TokenSequence
    fork: TokenSequence
    parent: int
    row: dict[str, Any]
    shared: int = 0
    records: list[_Record] = field(default_factory=list)

    @property
    def num_held(self) -> int:
        """Leading tokens whose KV is in the pool or, after that, in a tier."""
        computed = self.fork.num_computed
        if self.records and self.records[0].start <= computed:
            return max(computed, self.records[-1].stop)
        return computed


class Snapshot:
    """A branch, or one with everything grown from it, held until it is saved.

    The caller holds the engine's lock to make one, and calls `release` in the end.
    """

    def __init__(self, engine: Engine, seq: TokenSequence, *, subtree: bool) -> None:
        self._engine = engine
        self._held: list[_Held] = []
        self._by_parent: dict[int, list[int]] = {}
        self._last: tuple[bytes, UInt8 | None] = (b"", None)
        index: dict[TokenSequence, int] = {}
        for each in _living(engine, seq) if subtree else [seq]:
            index[each] = len(self._held)
            parent = -1 if each is seq or each.parent is None else index[each.parent]
            self._by_parent.setdefault(parent, []).append(len(self._held))
            self._held.append(_Held(each, self._hold(each), parent, _row_of(each, seq)))

    def _hold(self, seq: TokenSequence) -> TokenSequence:
        engine = self._engine
        fork = engine.table.fork(seq, internal=True)
        engine.tree.clock += 1
        fork.last_used = engine.tree.clock
        fork.keep_until = time.monotonic() + _KEEP_SECONDS
        engine.tree.advance(fork, fork.length)
        return fork

    def release(self) -> None:
        """Give up what is held."""
        with self._engine.lock:
            for held in self._held:
                self._engine.discard(held.fork)

    @property
    def is_our_own(self) -> bool:
        """All KV was computed here, or loaded from a file that this installation wrote."""
        return all(held.fork.root is self._engine.tree.root for held in self._held)

    def branches(self) -> list[SavedBranch]:
        """The branches as a file holds them."""
        made = []
        for held in self._held:
            span, length = held.fork.span, held.fork.length
            if held.parent >= 0:
                held.shared = _common_length(span, self._held[held.parent].fork.span)
            values = span.slice_logprobs(held.shared, length)
            made.append(
                SavedBranch(
                    tokens=np.array(span.slice_ids(held.shared, length), np.int32),
                    logprobs=np.array([np.nan if v is None else v for v in values], np.float64),
                    sampled=np.frombuffer(span.slice_sampled(held.shared, length), np.uint8),
                    parent=held.parent,
                    shared=held.shared,
                    **held.row,
                )
            )
        return made

    def planned(self) -> list[Chunk]:
        """Chunks of KV that are there now, after `branches`; the caller holds the lock."""
        tiers = self._engine.tree.tiers
        if tiers is not None:
            for held in self._held:
                at = held.fork.node.end
                for key, count in zip(*tiers.look_up(held.fork, held.fork.length)):
                    held.records.append(_Record(at, at + count, key))
                    at += count
        stops = [held.num_held for held in self._held]
        for index in range(len(self._held) - 1, 0, -1):  # what a child has of its parent's
            held = self._held[index]
            stops[held.parent] = max(stops[held.parent], min(stops[index], held.shared))
        return [
            chunk
            for index, (held, stop) in enumerate(zip(self._held, stops))
            for chunk in chunks_of(index, held.shared, stop)
        ]

    def write(self, writer: SavedWriter, planned: Sequence[Chunk]) -> None:
        """Write the KV of the planned chunks that are there still, and the file's end.

        Raises:
            BranchPrunedError: what is being saved was pruned.
            EngineDeadError: the engine has stopped.
            SavedBranchError: the disk refused.
        """
        size = self._engine.model.kv_shape.token_bytes
        begin = 0
        while begin < len(planned):
            end, total = begin, 0
            while end < len(planned) and (end == begin or total < _PIECE_BYTES):
                total += planned[end].num_tokens * size
                end += 1
            piece = planned[begin:end]
            for chunk, found in zip(piece, self._between(lambda p=piece: self._read(p))):  # type: ignore[misc]
                record = None if found is None else self._complete(chunk, found)
                if record is not None:
                    writer.write_kv(chunk, record)
            begin = end
        writer.finish()

    def _between(self, call: Callable[[], Any]) -> Any:
        """`call` under the lock with no step in flight; what it raises is raised here."""

        def caught() -> tuple[Any, BaseException | None]:
            try:
                return call(), None
            except Exception as error:  # it must not end the step that it is called after
                return None, error

        with self._engine.lock:
            if self._engine.dead is not None:
                raise self._engine.dead
            promise: Promise = self._engine.when_between_steps(caught)
        promise.wait(lambda: promise.done)
        if promise.error is not None:
            raise promise.error
        value, error = promise.value
        if error is not None:
            raise error
        return value

    def _read(self, chunks: Sequence[Chunk]) -> list[_Found | None]:
        """What the pool has of some chunks, None for those that are nowhere. Between steps."""
        shape, size = self._engine.model.kv_shape, self._engine.tree.block_size
        tiers = self._engine.tree.tiers
        tables = _BlockTables(self._engine)
        until = time.monotonic() + _KEEP_SECONDS
        blocks: list[int] = []
        found: list[_Found | None] = []
        places: list[tuple[_Found, int, int, int]] = []
        stores: list[tuple[_Found, int, bytes, int]] = []
        for chunk in chunks:
            if self._held[chunk.branch].fork.pruned:
                number = self._held[chunk.branch].seq.id
                raise BranchPrunedError(f"branch {number} was pruned while it was saved")
            stop = chunk.start + chunk.num_tokens
            held = self._holder(chunk.branch, stop)
            if held is None:
                found.append(None)
                continue
            held.fork.keep_until = until
            end = min(stop, held.fork.num_computed)
            after = max(chunk.start, end)
            rest = [r for r in held.records if r.start < stop and r.stop > after]
            each = _Found(None, rest if end < stop else [])
            found.append(each)
            for begin, finish, key in each.rest:
                block = None if tiers is None else tiers.planned_block(key)
                if block is not None:
                    stores.append((each, len(blocks), key, finish - begin))
                    blocks.append(block)
            if end > chunk.start:
                skip = chunk.start % size
                places.append((each, len(blocks), skip, skip + end - chunk.start))
                blocks += tables.of(held.fork)[chunk.start // size : -(-end // size)]
        rows = self._engine.model.read_blocks(blocks) if blocks else None
        for each, first, skip, end in places:
            assert rows is not None
            record = shape.join(list(rows[first : first + -(-end // size)]))
            each.head = shape.cut(record, skip, end)
        for each, at, key, count in stores:
            assert rows is not None
            each.waiting[key] = shape.cut(rows[at], 0, count)
        return found

    def _complete(self, chunk: Chunk, found: _Found) -> UInt8 | None:
        """A chunk with what the tiers have of it, read outside of the lock; None if it is gone."""
        shape = self._engine.model.kv_shape
        parts = [] if found.head is None else [found.head]
        at = chunk.start + sum(part.size for part in parts) // shape.token_bytes
        stop = chunk.start + chunk.num_tokens
        for start, end, key in found.rest:
            record = found.waiting[key] if key in found.waiting else self._read_record(key)
            if record is None or record.size != (end - start) * shape.token_bytes:
                return None
            parts.append(shape.cut(record, at - start, min(stop, end) - start))
            at = min(stop, end)
        if at < stop:
            return None
        return parts[0] if len(parts) == 1 else shape.join(parts)

    def _read_record(self, key: bytes) -> UInt8 | None:
        if self._last[0] != key:  # a block may be longer than a chunk
            records, lock = self._engine.records, self._engine.lock
            assert records is not None
            with lock:
                record = records.host_copy(key)
            self._last = (key, records.read_now(key) if record is None else record)
        return self._last[1]

    def _holder(self, index: int, stop: int) -> _Held | None:
        """Who has KV of the branch's own tokens up to `stop`: the branch itself, or a child."""
        stack, best = [index], None
        while stack:
            each = stack.pop()
            held = self._held[each]
            if held.num_held >= stop and not held.fork.pruned:
                if held.fork.num_computed >= stop:
                    return held
                best = best or held
            stack += [c for c in self._by_parent.get(each, ()) if self._held[c].shared >= stop]
        return best


class _BlockTables:
    """Block tables of sequences between two steps, each derived once."""

    def __init__(self, engine: Engine) -> None:
        self._tree = engine.tree
        self._last: tuple[TokenSequence, list[int]] | None = None

    def of(self, seq: TokenSequence) -> list[int]:
        if self._last is None or self._last[0] is not seq:
            table = [block for node in self._tree.path(seq) for block in node.blocks]
            self._last = (seq, table + seq.private)
        return self._last[1]


def _living(engine: Engine, seq: TokenSequence) -> list[TokenSequence]:
    """`seq` and its living descendants, parents first and siblings in the order of their making."""
    engine._drop_closed()
    found, stack = [], [seq]
    while stack:
        each = stack.pop()
        found.append(each)
        stack += reversed(each.living_children())
    wanted = {seq}
    for each in reversed(found):
        if each in wanted or not each.closed or each.is_busy:
            wanted.add(each)
            if each is not seq and each.parent is not None:
                wanted.add(each.parent)
    return [each for each in found if each in wanted]


def _row_of(seq: TokenSequence, first: TokenSequence) -> dict[str, Any]:
    number = 0
    if seq is not first and seq.parent is not None and len(seq.order) > len(seq.parent.order):
        number = seq.order[-1]
    grammar = None
    if seq.grammar is not None:
        grammar = (seq.grammar[0].model_dump(mode="json", exclude_none=True), seq.grammar[1])
    return {
        "seed": seq.seed,
        "epoch": seq.epoch,
        "fork_count": seq.num_forks,
        "fork_number": number,
        "fork_length": 0 if seq is first else seq.fork_length,
        "ended_at": seq.ended_at,
        "id": seq.id,
        "closed": seq.closed and seq is not first,
        "metadata": seq.metadata,
        "grammar": grammar,
    }


def _common_length(child: TokenSpan, parent: TokenSpan) -> int:
    """Leading tokens that two sequences have in the same spans."""
    a, b, a_stop, b_stop = child, parent, len(child), len(parent)
    while a is not b:
        if a.start >= b.start:
            if a.parent is None:
                return 0
            a, a_stop = a.parent, min(a_stop, a.start)
        else:
            assert b.parent is not None  # for it begins after position 0
            b, b_stop = b.parent, min(b_stop, b.start)
    return min(a_stop, b_stop)


def restore(
    engine: Engine,
    branches: Sequence[SavedBranch],
    source: SavedSource | None,
    private_key: bytes | None = None,
) -> list[TokenSequence]:
    """Sequences of a file's branches, in its order; the first is a root.

    It counts as a root made: later roots have the seeds that they would have after one more. The
    caller holds the engine's lock.

    Args:
        source: has their KV, which is loaded when it is needed; None for tokens alone.
        private_key: the key before the source's first block, where its KV is for these branches
            and their forks alone.

    Raises:
        SavedBranchError: structured outputs that are none.
    """
    grammars = [_grammar_of(branch) for branch in branches]
    made: list[TokenSequence] = []
    root = None if private_key is None else engine.tree.new_private_root(private_key)
    for branch, grammar in zip(branches, grammars):
        parent = made[branch.parent] if branch.parent >= 0 else None
        seq = engine.table.new_saved(branch.seed, branch.fork_number, branch.shared, parent, root)
        seq.span.ids += branch.tokens.tolist()
        seq.span.logprobs += [None if v != v else v for v in branch.logprobs.tolist()]
        seq.span.sampled += branch.sampled.tobytes()
        seq.epoch, seq.num_forks = branch.epoch, branch.fork_count
        seq.ended_at, seq.grammar = branch.ended_at, grammar
        seq.metadata = branch.metadata
        if parent is not None:
            seq.fork_length = branch.fork_length
        made.append(seq)
    for index, (seq, branch) in enumerate(zip(made, branches)):
        if source is not None:
            seq.num_restorable = source.num_covered[index]
        if branch.closed:
            engine.table.close(seq)
    if source is not None:
        engine.add_source(source, made[0])
    return made


def _grammar_of(branch: SavedBranch) -> tuple[StructuredOutputs, int] | None:
    if branch.grammar is None:
        return None
    fields, start = branch.grammar
    try:
        return StructuredOutputs(**fields), start
    except (ValueError, TypeError) as error:
        raise SavedBranchError(
            f"the structured outputs of branch {branch.id} are none: {error}"
        ) from error
