"""What one viewer of the live page has yet to be told: changes of branches, blocks and numbers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from cotrt.program.stats import metrics
from cotrt.sampling.detokenizer import NUM_CONTEXT_IDS, Detokenizer

if TYPE_CHECKING:
    from cotrt.engine.engine import Engine
    from cotrt.engine.state import TokenSequence
    from cotrt.server.service import Service

# Of a branch that is first seen, so many of its last tokens are shown.
_TAIL_TOKENS = 1500
FREE, PRIVATE, SHARED, CACHED, HOST, DISK = range(6)


class _Seen:
    """How far a viewer has seen one sequence."""

    __slots__ = ("about", "before", "epoch", "last", "length", "text")

    def __init__(self) -> None:
        self.about: tuple[Any, ...] = ()
        self.epoch = -1
        self.length = 0
        self.last = -1
        self.before: list[int] = []  # ids before the first that are shown
        self.text: Detokenizer | None = None


class LiveView:
    """The changes for one viewer.

    Text is shown of branches that the viewer's own key holds; of all other sequences (requests,
    other keys' branches) only that they are there, their length and their state.
    """

    def __init__(self, service: Service, owner: str) -> None:
        self._service = service
        self._owner = owner
        self._seen: dict[int, _Seen] = {}
        self._blocks: list[int] = []
        self._stats: dict[str, Any] = {}
        self._rates: list[tuple[float, int]] = []

    def changes(self) -> dict[str, Any]:
        """What is new since the last call; an empty dict where nothing is."""
        engine = self._service.runtime.engine
        fresh: list[tuple[_Seen, dict[str, Any], list[int]]] = []
        with engine.lock:
            living = set()
            for seq in engine.scheduler.sequences:
                if not seq.internal:
                    living.add(seq.id)
                    self._look(engine, seq, fresh)
            blocks = _block_states(engine)
            numbers = metrics(engine)
            pool = engine.tree.pool
            numbers.update(
                total=pool.num_blocks,
                free=pool.num_free,
                in_use=pool.num_in_use,
                cached=pool.num_cached,
                host=numbers["host_blocks"],
                disk=numbers["disk_blocks"],
            )
        told: dict[str, Any] = {}
        branches = [self._told(*each) for each in fresh]
        if branches:
            told["branches"] = branches
        gone = [number for number in self._seen if number not in living]
        if gone:
            told["gone"] = gone
            for number in gone:
                del self._seen[number]
        if blocks != self._blocks:
            told["blocks"] = self._blocks = blocks
        stats = self._numbers(numbers)
        if stats != self._stats:
            told["stats"] = self._stats = stats
        return told

    def _look(
        self,
        engine: Engine,
        seq: TokenSequence,
        fresh: list[tuple[_Seen, dict[str, Any], list[int]]],
    ) -> None:
        """Under the lock: copy what has changed."""
        seen = self._seen.get(seq.id)
        if seen is None:
            seen = self._seen[seq.id] = _Seen()
        parent = seq.parent
        shown = parent is not None and parent in engine.scheduler.sequences
        lease = self._service.branches.id_of(seq.id, self._owner)
        state = "idle"
        if seq.is_busy:
            waits = seq.work is not None and seq.work.state.name == "WAITING"
            state = "waiting" if waits else "running"
        elif seq.ended_at == seq.length:
            state = "finished"
        length = seq.length
        about = (parent.id if shown and parent is not None else None, state, length, lease)
        at = seen.length
        regrown = at > length or seen.epoch != seq.epoch
        if not regrown and at:
            regrown = seq.ids(at - 1, at) != [seen.last]
        if about == seen.about and not regrown:
            return
        ids: list[int] = []
        entry = {"id": seq.id, "parent": about[0], "state": state, "tokens": length}
        entry["depth"] = seq.depth
        if lease is not None:
            entry["lease"] = lease
            if regrown or not seen.about or seen.about[3] is None:
                at = max(0, length - _TAIL_TOKENS)
                seen.text, seen.before = None, seq.ids(max(0, at - NUM_CONTEXT_IDS), at)
                entry["reset"] = True
            ids = seq.ids(at)
        seen.about, seen.epoch, seen.length = about, seq.epoch, length
        seen.last = seq.ids(length - 1)[0] if length else -1
        fresh.append((seen, entry, ids))

    def _told(self, seen: _Seen, entry: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """Outside of the lock: turn tokens into text."""
        tokenizer = self._service.runtime.tokenizer
        if "lease" in entry and tokenizer is not None:
            if seen.text is None:
                seen.text = Detokenizer(
                    tokenizer, skip_special_tokens=False, context_ids=seen.before
                )
            entry["text"] = seen.text.append(ids) if ids else ""
        return entry

    def _numbers(self, numbers: dict[str, int]) -> dict[str, Any]:
        now = time.monotonic()
        self._rates.append((now, numbers["generated_tokens"]))
        while len(self._rates) > 2 and now - self._rates[0][0] > 2.0:
            self._rates.pop(0)
        since, before = self._rates[0]
        seconds = now - since
        rate = (numbers["generated_tokens"] - before) / seconds if seconds else 0.0
        given = numbers["prompt_tokens_reused"] + numbers["prompt_tokens_computed"]
        return {
            **numbers,
            "model": self._service.names[0],
            "tokens_per_s": round(rate, 1),
            "reused_share": round(numbers["prompt_tokens_reused"] / given, 4) if given else 0.0,
        }


def _block_states(engine: Engine) -> list[int]:
    """Every block's state in order, as runs: state, count, state, count, ...

    Blocks in host memory and on disk come after those of the pool.
    """
    tree, pool = engine.tree, engine.tree.pool
    holders = np.array(pool.holders)
    sealed = np.frombuffer(pool.sealed, np.uint8) != 0
    states = np.full(pool.num_blocks, FREE, np.int8)
    states[(holders == 0) & sealed] = CACHED
    states[holders == 1] = PRIVATE
    states[holders > 1] = SHARED
    # A node holds its blocks once for all that end in it or below it.
    for node in tree.nodes():
        if node.num_live > 1:
            up: Any = node
            while up is not None and up is not tree.root:
                blocks = up.blocks
                if blocks and states[blocks[0]] == SHARED and up is not node:
                    break
                states[blocks] = SHARED
                up = up.parent
    edges = np.flatnonzero(np.diff(states)) + 1
    starts = np.concatenate([[0], edges])
    counts = np.diff(np.concatenate([starts, [len(states)]]))
    runs = [int(x) for pair in zip(states[starts], counts) for x in pair]
    if engine.records is not None:
        for state, count in ((HOST, engine.records.num_host), (DISK, engine.records.num_disk)):
            runs += [state, count] if count else []
    return runs
