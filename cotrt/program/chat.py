"""`Chat`: a conversation on one branch, every turn of which computes its own tokens only."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from cotrt.errors import BranchBusyError, InvalidRequestError
from cotrt.options.sampling import SamplingParams
from cotrt.program.branch import Branch
from cotrt.program.conversation import Continuation, Earlier
from cotrt.program.handle import Generation
from cotrt.program.runtime import Runtime

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What `Chat.undo` goes back to.

    Attributes:
        num_messages: messages before the turn.
        earlier: the branch before the turn.
    """

    num_messages: int
    earlier: Earlier


class Chat:
    """A conversation that keeps its KV from turn to turn; made by `LLM.start_chat`.

    With every turn the chat template is rendered for all messages and compared, as text, with what
    the branch holds. The branch keeps what agrees, as it was sampled, and goes on from there: see
    `cotrt.program.conversation`.

    As a context manager it prunes its branch on leaving. Several threads may use one chat; a
    message that is sent while a reply is running is refused.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> None:
        runtime.check()
        if system is not None and not isinstance(system, str):
            raise InvalidRequestError(f"system must be a str or None, not {type(system).__name__}")
        tokenizer = runtime.tokenizer
        if tokenizer is None or (chat_template is None and not tokenizer.has_chat_template):
            what = "tokenizer" if tokenizer is None else "chat template"
            raise InvalidRequestError(
                f"the model has no {what}; give one to LLM(..., {what.replace(' ', '_')}=...)"
                + (", or start_chat(chat_template=...)" if tokenizer is not None else "")
            )
        tokenizer.check_template(chat_template, tools)
        self._runtime = runtime
        self._template = {"tools": tools, "chat_template": chat_template}
        self._messages: list[dict[str, Any]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._turns: list[_Turn] = []
        self._reply: Generation | None = None  # not yet among the messages
        self._lock = threading.RLock()
        with runtime.engine.lock:
            self._branch = Branch(runtime, runtime.engine.table.new_root([]))

    def send(
        self,
        message: str | Message | Sequence[Message],
        params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Generation:
        """Say something, and start the reply.

        Args:
            message: the user's text, a message, or several (tools' results, say).
            params: how to sample; default: the model's ``generation_config.json``. ``n`` must be
                1, and ``max_tokens`` unset means no limit.
            **overrides: fields of `SamplingParams` to set on top.

        Returns:
            The reply as it is made. It joins `messages` when it ends, cut short or not.

        Raises:
            pydantic.ValidationError: a bad value or an unknown field.
            InvalidRequestError: a message that the template refuses, or ``n`` is not 1.
            PromptTooLongError: the conversation leaves no room within max_model_len.
            KVCacheExhaustedError: it is more than the whole pool can ever hold.
            BranchBusyError: the last reply is still running.
            BranchPrunedError: the chat's branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        runtime = self._runtime
        runtime.check()
        params = runtime.params(params, overrides)
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n} in a chat: chat.fork({params.n}) it instead")
        with self._lock:
            self._take_reply()
            messages = [*self._messages, *_as_messages(message)]
            continuation = Continuation(self._branch, messages, self._template)
            num_turns, said = len(self._turns), self._messages
            try:
                reply = continuation.start(params)
                self._turns.append(_Turn(len(said), continuation.earlier))
                self._messages, self._reply = messages, reply
                return reply
            except BaseException:
                continuation.take_back()
                del self._turns[num_turns:]
                self._messages, self._reply = said, None
                raise

    def fork(self, n: int = 1) -> list[Chat]:
        """`n` chats that go on from here, each for itself; all KV up to here is shared.

        Raises:
            InvalidRequestError: `n` is not an int of at least 1.
            BranchBusyError: the last reply is still running.
            BranchPrunedError: the chat's branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        with self._lock:
            self._take_reply()
            chats = []
            for branch in self._branch.fork(n):
                chat = copy.copy(self)
                chat._messages = copy.deepcopy(self._messages)
                chat._turns = list(self._turns)
                chat._branch = branch
                chat._lock = threading.RLock()
                chats.append(chat)
            return chats

    def undo(self) -> Chat:
        """Take back the last message sent and its reply; the next reply draws anew.

        Returns:
            This chat.

        Raises:
            InvalidRequestError: nothing was sent yet.
            BranchBusyError: the last reply is still running.
            BranchPrunedError: the chat's branch was pruned or closed.
            EngineDeadError: the engine has stopped.
        """
        self._runtime.check()
        with self._lock:
            self._take_reply()
            if not self._turns:
                raise InvalidRequestError("undo: nothing was sent in this chat, or all is undone")
            engine, seq = self._runtime.engine, self._branch._seq
            with engine.lock:
                self._branch._check()
                turn = self._turns.pop()
                if turn.earlier.length <= seq.length:  # else the program has cut the branch itself
                    turn.earlier.bring_back(self._branch, same_draws=False)
            self._messages = self._messages[: turn.num_messages]
        return self

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages so far, copied; a reply is among them once it has ended."""
        with self._lock:
            if self._reply is None or self._reply.done:
                self._take_reply()
            return copy.deepcopy(self._messages)

    @property
    def branch(self) -> Branch:
        """The branch that holds the conversation, to fork, score or look at."""
        return self._branch

    # ---- inside -------------------------------------------------------------------------------

    def _take_reply(self) -> None:
        """Put the ended reply among the messages."""
        reply = self._reply
        if reply is None:
            return
        if not reply.done:
            raise BranchBusyError(
                "the chat's last reply is running: wait with g.result() or stop it with g.cancel()"
            )
        # The template writes the end-of-turn token itself.
        text = self._runtime.stream_text(reply._state, hides_end=True).append(
            reply._state.tokens, True
        )
        self._reply = None
        self._messages.append({"role": "assistant", "content": text})

    def __enter__(self) -> Chat:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime.on_leaving(self._branch.prune)

    def __repr__(self) -> str:
        return f"<Chat: {len(self._messages)} messages, {self._branch!r}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Chat cannot be pickled: its branch belongs to this process's engine; send "
            "chat.messages"
        )

    def __copy__(self) -> Chat:
        twin = Chat.__new__(Chat)
        twin.__dict__.update(self.__dict__)
        return twin


def _as_messages(message: Any) -> list[dict[str, Any]]:
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    if isinstance(message, Mapping):
        return [copy.deepcopy(dict(message))]
    if isinstance(message, Sequence) and message and all(isinstance(m, Mapping) for m in message):
        return [copy.deepcopy(dict(m)) for m in message]
    raise InvalidRequestError(
        f"send a str, a message or a list of messages, not {type(message).__name__} {message!r:.80}"
    )
