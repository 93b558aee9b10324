"""One continuation of a conversation on a branch that holds a part of it.

The chat template is rendered for all messages and compared, as text, with what the branch holds:

    branch    <system><user>Hi<end><assistant>Hello<end>
    rendered  <system><user>Hi<end><assistant>Hello<end><user>Bye<end><assistant>
                                                       └── encoded and appended ──┘

Where the template rewrites history (it strips thinking, say) the branch is cut at the last token
boundary before the first difference, and goes on from there. So sampled tokens stay as they were
sampled, and a turn that was cut short is closed as the template closes one.

`Chat` and a server's branches continue by this alone, so that they have the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cotrt.engine.state import Tail
from cotrt.errors import BranchBusyError
from cotrt.options.sampling import SamplingParams
from cotrt.program.chat_reading import continue_chat
from cotrt.program.runtime import half_pairs_refused

if TYPE_CHECKING:
    from cotrt.engine.state import TokenSequence
    from cotrt.program.branch import Branch
    from cotrt.program.handle import Generation


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a branch was before it went on with a conversation.

    Attributes:
        length: tokens that it kept.
        removed: those after them.
        epoch, grammar, ended_at: as in the engine's sequence.
    """

    length: int
    removed: Tail
    epoch: int
    grammar: Any
    ended_at: int

    @classmethod
    def of(cls, seq: TokenSequence, keep: int) -> Earlier:
        """Of a sequence of which `keep` tokens will stay."""
        end = seq.length
        removed = Tail(
            seq.ids(keep, end),
            seq.span.slice_logprobs(keep, end),
            seq.span.slice_sampled(keep, end),
        )
        return cls(keep, removed, seq.epoch, seq.grammar, seq.ended_at)

    def bring_back(self, branch: Branch, *, same_draws: bool) -> None:
        """Make the branch what it was, under the engine's lock.

        Args:
            branch: it is not busy, and has the tokens that it kept.
            same_draws: the next sampling draws as it would have then; else anew.
        """
        table, seq = branch._runtime.engine.table, branch._seq
        table.cut(seq, self.length)
        table.restore(seq, self.removed)
        seq.grammar, seq.ended_at = self.grammar, self.ended_at
        if same_draws:
            seq.epoch = self.epoch


class Continuation:
    """How a branch goes on with a conversation; made without changing it.

    Args:
        branch: it is not generating; several threads may not use it at once.
        messages: all of the conversation.
        rendering: further arguments of the tokenizer's ``prepare_chat``.

    Attributes:
        keep: tokens of the branch that stay.
        ids: what follows them.

    Raises:
        InvalidRequestError: messages that the template refuses, half of a surrogate pair, or a
            model without a tokenizer.
        BranchBusyError, BranchPrunedError: the branch cannot be used.
    """

    def __init__(
        self,
        branch: Branch,
        messages: Sequence[Mapping[str, Any]],
        rendering: Mapping[str, Any],
    ) -> None:
        runtime, seq = branch._runtime, branch._seq
        self._branch = branch
        self._earlier: Earlier | None = None
        self._generation: Generation | None = None
        with runtime.engine.lock:
            branch._check()
            self._history = seq.ids()
            sampled = seq.span.slice_sampled(0, seq.length)
        with half_pairs_refused():
            encoder = runtime.chat_encoder()
            chat = encoder.prepare_chat(messages, **rendering)
            self.keep, self.ids = continue_chat(encoder, chat, self._history, sampled)

    @property
    def earlier(self) -> Earlier:
        """What the branch was before the start."""
        assert self._earlier is not None, "it was not started, or is taken back"
        return self._earlier

    def start(self, params: SamplingParams) -> Generation:
        """Cut, extend and generate; where anything is raised, the branch is as it was.

        Raises:
            BranchBusyError: it is generating, or was changed meanwhile.
            CotrtError: what `Branch.generate` raises.
            BaseException: a Ctrl-C, say.
        """
        branch, runtime = self._branch, self._branch._runtime
        engine, seq = runtime.engine, branch._seq
        try:
            with engine.lock:
                branch._check()
                if seq.ids() != self._history:
                    raise BranchBusyError(
                        f"branch {branch.id} was changed while a message was sent: use it from "
                        "one place at a time"
                    )
                runtime.max_length(params, self.keep + len(self.ids), None)
                self._earlier = Earlier.of(seq, self.keep)
                engine.table.cut(seq, self.keep)
                engine.table.extend(seq, self.ids)
                self._generation = branch.generate(params)
                return self._generation
        except BaseException:  # a Ctrl-C may come with the end of the lock, too
            self.take_back()
            raise

    def take_back(self) -> None:
        """End what `start` has begun; the branch is as it was. Without a start nothing happens."""
        earlier, seq = self._earlier, self._branch._seq
        if earlier is None:
            return
        engine = self._branch._runtime.engine
        with engine.lock:
            self._earlier, begun, work = None, self._generation, seq.work
            if work is not None and (begun is None or work.data is begun._state):
                engine.cancel(work.data)
            if not (seq.pruned or seq.is_busy):  # another may have taken it up meanwhile
                earlier.bring_back(self._branch, same_draws=True)
