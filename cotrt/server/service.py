"""What every route shares: the engine, the limits, the counters, and the way to start work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from pydantic import ValidationError

from cotrt.errors import CotrtError
from cotrt.options.sampling import SamplingParams
from cotrt.program.conversation import Continuation
from cotrt.program.handle import Generation
from cotrt.program.llm import LLM
from cotrt.program.submission import Submission, submit
from cotrt.server.admission import Admission
from cotrt.server.branch_table import BranchTable, Lease
from cotrt.server.errors import ApiError
from cotrt.server.metrics import ServerMetrics
from cotrt.server.options import ServerOptions
from cotrt.server.thoughts import Thoughts

T = TypeVar("T")

# Threads that tokenize and render: more would only take time from the engine.
_NUM_THREADS = 4


class Service:
    """One engine behind the routes.

    Attributes:
        llm: the engine.
        options: the server's limits.
        names: names of the model; replies carry the first.
        admission: counts the work under way.
        branches: branches that live over HTTP.
        metrics: what /metrics tells.
        tool_style: how the model writes tool calls; None leaves them as text.
        thoughts: whether the model thinks before it answers.
    """

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm = llm
        self.runtime = llm._runtime
        self.options = options
        model = llm.config.model
        own = str(model) if isinstance(model, (str, bytes)) or hasattr(model, "__fspath__") else ""
        self.names = options.served_model_names or (own or type(model).__name__,)
        self.admission = Admission(llm.config.max_num_seqs, options.max_queue)
        self.metrics = ServerMetrics(llm, self.names[0])
        self.branches = BranchTable(llm, options)
        self.tool_style = _tool_style(llm, options.tool_call_parser)
        self.thoughts = Thoughts(llm.tokenizer, options.reasoning_parser)
        self.num_viewers = 0
        self._threads: anyio.CapacityLimiter | None = None

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens of the model that are matched whole, by their spelling."""
        tokenizer = self.runtime.tokenizer
        return {} if tokenizer is None else tokenizer.added_ids

    def begin_draining(self) -> None:
        """Refuse new work, and end live pages."""
        self.admission.is_draining = True

    def cancel_all(self) -> None:
        """End all work now: streams end with an error, replies are 503s."""
        engine = self.runtime.engine
        with engine.lock:
            for work in [*engine.scheduler.running, *engine.scheduler.waiting]:
                engine.cancel(work.data)

    def check_model(self, name: str | None) -> None:
        """A request's ``model``, if it names one, is ours.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    async def in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run what may take long off the event loop; it is waited for even when cancelled."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(_NUM_THREADS)
        return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=self._threads)

    async def params_of(self, fields: dict[str, Any]) -> SamplingParams:
        """The model's defaults with a request's fields on top.

        Raises:
            pydantic.ValidationError, InvalidRequestError: a bad value, or a grammar that is none.
        """
        if fields.get("structured_outputs") is None:
            return self.runtime.params(None, fields)
        # Compiling a grammar may take long.
        return await self.in_thread(self.runtime.params, None, fields)

    async def encode(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Tokenize or render in a thread; a text that the tokenizer refuses is the client's error.

        Raises:
            ApiError: 400.
        """
        try:
            return await self.in_thread(call, *args, **kwargs)
        except (CotrtError, ValidationError):
            raise
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ApiError(400, f"the text cannot be encoded: {error}"[:300]) from error

    async def reply(
        self, lease: Lease, rendering: dict[str, Any], params: SamplingParams
    ) -> Generation:
        """Reply to a conversation on a branch; a cancellation meanwhile leaves it as it was.

        Raises:
            CotrtError: as `BranchTable.reply`.
            ApiError: 400.
        """
        made: list[Continuation] = []

        def start() -> Generation:
            continuation, generation = self.branches.reply(lease, rendering, params)
            made.append(continuation)
            return generation

        try:
            generation = await self.encode(start)
            await anyio.lowlevel.checkpoint_if_cancelled()  # it waits for the thread to end
            return generation
        except BaseException:
            for continuation in made:
                continuation.take_back()
            raise

    def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        default_max_tokens: int | None,
    ) -> Submission:
        """Start all prompts, or none. Whoever calls it cancels the submission in the end.

        Raises:
            CotrtError: the first bad prompt or value.
        """
        wrapped = [{"prompt_token_ids": ids} for ids in prompts]
        return submit(self.runtime, wrapped, params, default_max_tokens=default_max_tokens)


def _tool_style(llm: LLM, parser: str) -> str | None:
    """The given one, or what the chat template shows."""
    if parser != "auto":
        return None if parser == "none" else parser
    templates = getattr(llm.tokenizer, "chat_templates", {})
    text = "".join(templates.values())
    if "<tool_call>" in text or "python_tag" not in text:
        return "hermes"
    return "llama3_json"
