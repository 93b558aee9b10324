"""What the branch routes are sent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cotrt.params import MAX_LOGPROBS, MAX_NUM_TOKENS, SamplingParams
from cotrt.server.chat_request import Message, Tool
from cotrt.server.completions import Ids
from cotrt.server.sampling_fields import NumTokens, RequestModel, SamplingFields, TokenId
from cotrt.server.service import Service

Ttl = Annotated[float, Field(gt=0, le=1e9)]
Continuation = str | list[TokenId]


class LeaseFields(RequestModel):
    """``ttl``: seconds that the branch lives on after its last use."""

    ttl: Ttl | None = None


class CreateRequest(LeaseFields):
    """A root: of text, of token ids, or of messages. Nothing is an empty root."""

    model: str | None = None
    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None


class ForkRequest(LeaseFields):
    """``n`` children at absolute length ``at``, by default at the end."""

    n: Annotated[int, Field(ge=1, le=1024)] = 1
    at: NumTokens | None = None


class ExtendRequest(LeaseFields):
    """Text that follows the branch's own, or token ids."""

    text: str | None = None
    token_ids: list[TokenId] | None = None
    special: bool = True


class GenerateRequest(SamplingFields):
    """How to sample; no ``max_tokens`` is no limit."""

    ttl: Ttl | None = None
    n: Annotated[int, Field(ge=1, le=1)] = 1
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool = False

    def params(self, service: Service) -> SamplingParams:
        """As `SamplingParams`."""
        fields: dict[str, Any] = self.overrides(service.options)
        return service.params(
            {**fields, "max_tokens": self.max_tokens, "logprobs": self.logprobs, "n": 1}
        )


class ScoreRequest(LeaseFields):
    """One continuation, or a list of them, after ``given``."""

    continuations: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=1024)]
    given: Continuation = ""


class ChooseRequest(LeaseFields):
    """Options of which the best is appended after ``given``."""

    options: Annotated[list[str | Ids], Field(min_length=1, max_length=1024)]
    given: Continuation = ""
    normalize: Literal["mean", "sum"] = "mean"


class TruncateRequest(LeaseFields):
    """Back to an absolute length."""

    length: Annotated[int, Field(ge=0, le=MAX_NUM_TOKENS)]
    same_draws: bool = False


class KeepRequest(LeaseFields):
    """Renews the lease."""
